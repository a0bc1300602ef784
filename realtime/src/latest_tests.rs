//! Tests of [`crate::latest`], whose source is compiled for the models under loom as well.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::latest::{Reader, begun, latest};
use crate::pool::{Blocks, Pool};

fn all<T>(reader: &mut Reader<T>) -> Vec<T> {
    std::iter::from_fn(|| reader.take()).collect()
}

#[test]
fn the_last_ones_come_in_order_and_the_oldest_give_way() {
    for keep in [1, 2, 3, 7] {
        let (mut writer, mut reader) = latest(keep);
        assert!(!reader.has_some() && reader.take().is_none());
        for number in 0..keep {
            assert_eq!(writer.put(number), None);
        }
        assert!(reader.has_some());
        assert_eq!(all(&mut reader), (0..keep).collect::<Vec<_>>());
        let given_way: Vec<_> = (0..3 * keep + 1)
            .filter_map(|number| writer.put(number))
            .collect();
        assert_eq!(given_way, (0..2 * keep + 1).collect::<Vec<_>>());
        assert_eq!(all(&mut reader), (2 * keep + 1..3 * keep + 1).collect::<Vec<_>>());
        // One taken, two come.
        for number in 0..keep {
            writer.put(number);
        }
        assert_eq!(reader.take(), Some(0));
        assert_eq!(writer.put(100), None);
        assert_eq!(writer.put(101), (keep > 1).then_some(1).or(Some(100)));
    }
}

#[test]
fn numbers_begin_anew_behind_the_last() {
    let keep = 3;
    let (mut writer, mut reader) = begun(keep, u32::MAX - 2);
    for number in 0..20 {
        assert_eq!(writer.put(number), None);
        assert_eq!((reader.take(), reader.take()), (Some(number), None));
    }
    let (mut writer, mut reader) = begun(keep, u32::MAX - 2);
    for number in 0..20 {
        let _ = writer.put(number);
    }
    assert_eq!(all(&mut reader), [17, 18, 19]);
}

#[test]
fn what_is_left_is_dropped_with_it() {
    struct Counted(Arc<AtomicU32>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let dropped = Arc::new(AtomicU32::new(0));
    let (mut writer, mut reader) = latest(4);
    for _ in 0..10 {
        writer.put(Counted(Arc::clone(&dropped)));
    }
    assert_eq!(dropped.load(Ordering::Relaxed), 6);
    drop(reader.take());
    drop((writer, reader));
    assert_eq!(dropped.load(Ordering::Relaxed), 10);
}

/// Each message is taken once or comes back once, and those that are taken are in order.
#[test]
fn nothing_is_lost_between_two_threads() {
    const MESSAGES: u32 = 20_000;
    for keep in [1, 2, 5] {
        let (mut writer, mut reader) = latest(keep);
        let putting = std::thread::spawn(move || {
            let put = (0..MESSAGES).filter_map(|number| {
                if number % 64 == 0 {
                    std::thread::yield_now();
                }
                writer.put(Box::new(number))
            });
            put.map(|number| *number).collect::<Vec<_>>()
        });
        let mut taken = Vec::new();
        while !putting.is_finished() {
            taken.extend(reader.take().map(|number| *number));
        }
        taken.extend(all(&mut reader).into_iter().map(|number| *number));
        assert!(taken.is_sorted_by(|a, b| a < b));
        assert_eq!(taken.last(), Some(&(MESSAGES - 1)));
        let mut both = putting.join().unwrap();
        assert!(both.is_sorted_by(|a, b| a < b));
        both.append(&mut taken);
        both.sort_unstable();
        assert!(both.into_iter().eq(0..MESSAGES), "keep {keep}");
    }
}

/// Pins the thread to the first core; with `fifo` ahead of all ordinary ones there. `false`: it may not.
fn pin(fifo: bool) -> bool {
    // SAFETY: an all-zero set is an empty one.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is a live local, and core 0 lies in it.
    unsafe { libc::CPU_SET(0, &mut cores) };
    // SAFETY: the set is live and of the length given; the calling thread is meant.
    let pinned = unsafe { libc::sched_setaffinity(0, size_of_val(&cores), &raw const cores) } == 0;
    let priority = libc::sched_param { sched_priority: 50 };
    // SAFETY: the parameter is a live local; the calling thread is meant.
    let first = !fifo || unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) } == 0;
    pinned && first
}

/// What a thread of the first priority takes for a look, each 50 µs for a second, while an ordinary one on the same core does `work`; the
/// longest. It interrupts the other wherever that is.
fn longest_look(mut work: impl FnMut() + Send, mut look: impl FnMut() + Send) -> Option<Duration> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut longest = pin(true).then_some(Duration::ZERO);
            let end = Instant::now() + Duration::from_secs(1);
            while let Some(longest) = &mut longest
                && Instant::now() < end
            {
                std::thread::sleep(Duration::from_micros(50));
                let begun = Instant::now();
                look();
                *longest = begun.elapsed().max(*longest);
            }
            is_over.store(true, Ordering::Relaxed);
            longest
        });
        pin(false);
        while !is_over.load(Ordering::Relaxed) {
            work();
        }
        looking.join().unwrap()
    })
}

/// A queue in which the interrupted thread holds the other one up stops that until the kernel throttles real time, for 0.95 s.
#[test]
fn a_thread_that_is_interrupted_holds_nobody_up() {
    const MOST: Duration = Duration::from_millis(300);
    let (mut writer, mut reader) = latest(16);
    let write = || (0..64).for_each(|number| drop(writer.put(Box::new(number))));
    let Some(reading) = longest_look(write, || drop(all(&mut reader))) else {
        println!("SKIPPED: needs the right to run ahead of others (CAP_SYS_NICE)");
        return;
    };
    assert!(reading < MOST, "{reading:?} for a look at what came");
    let (mut writer, mut reader) = latest(16);
    let write = || (0..20).for_each(|number| drop(writer.put(Box::new(number))));
    let writing = longest_look(|| drop(all(&mut reader)), write).unwrap();
    assert!(writing < MOST, "{writing:?} for twenty messages");
    let blocks = Blocks {
        of_1: 16,
        ..Blocks::default()
    };
    let pool = Pool::new(None, blocks).unwrap();
    let take = || drop([(); 8].map(|()| pool.take(1)));
    let taking = longest_look(take, take).unwrap();
    assert!(taking < MOST, "{taking:?} for eight blocks");
}
