//! The rings over plain memory: both ends, the wrap at 2³², and what may not be touched.

use lm_dataplane::ring::{self, Completion, Descriptor, Fill, Rx, Tx};

#[test]
fn entries_cross_the_wrap_in_order() {
    for start in [0, u32::MAX - 20, u32::MAX, 1 << 31] {
        let (mut fill, mut kernel) = ring::in_memory::<Fill>(8, start);
        let (mut sent, mut seen) = (0_u64, 0_u64);
        for round in 0..1000_u32 {
            let room = fill.free(8);
            let count = room.min(round % 5 + 1);
            for offset in 0..count {
                fill.write(offset, sent);
                sent += 1;
            }
            fill.submit(count);
            let available = kernel.available(round % 4);
            for offset in 0..available {
                assert_eq!(kernel.read(offset), seen, "start {start}, round {round}");
                seen += 1;
            }
            kernel.release(available);
            assert_eq!(fill.produced(), start.wrapping_add(sent as u32));
            assert_eq!(kernel.produced(), fill.produced());
            assert_eq!(kernel.consumed(), start.wrapping_add(seen as u32));
            assert_eq!(fill.consumed(), kernel.consumed());
        }
        assert!(
            sent > 1000 && sent - seen <= 8,
            "start {start}: {sent} sent, {seen} seen"
        );
    }
}

#[test]
fn a_ring_holds_its_length_and_no_more() {
    let (mut tx, mut kernel) = ring::in_memory::<Tx>(4, u32::MAX - 1);
    assert_eq!((tx.free(1), tx.ring_len(), kernel.available(9)), (4, 4, 0));
    for offset in 0..4 {
        tx.write(offset, Descriptor::new(u64::from(offset) * 2048, 100 + offset));
    }
    assert_eq!(kernel.available(9), 0, "nothing is visible before submit");
    tx.submit(4);
    assert_eq!((tx.free(1), kernel.available(9), kernel.available(2)), (0, 4, 2));
    assert_eq!(
        kernel.read(3),
        Descriptor {
            addr: 6144,
            len: 103,
            options: 0
        }
    );
    kernel.release(1);
    assert_eq!((tx.free(1), kernel.available(9)), (1, 3));
}

#[test]
fn the_shared_index_is_read_only_when_needed() {
    let (mut fill, mut kernel) = ring::in_memory::<Fill>(8, 0);
    fill.submit(8);
    assert_eq!(kernel.available(8), 8);
    kernel.release(3);
    assert_eq!(fill.free(1), 3, "none seen, so it looked");
    kernel.release(3);
    assert_eq!(fill.free(2), 3, "three seen are enough");
    assert_eq!(fill.free(4), 6, "not enough, so it looked");
    let (mut completion, mut reaper) = ring::in_memory::<Completion>(8, 0);
    completion.submit(2);
    assert_eq!(reaper.available(1), 1);
    completion.submit(2);
    assert_eq!(reaper.available(2), 2, "two seen are enough");
    assert_eq!(reaper.available(8), 4, "not enough, so it looked");
}

#[test]
fn wake_up_requests_reach_the_producer() {
    let (fill, mut kernel) = ring::in_memory::<Fill>(8, 0);
    assert!(!fill.needs_wakeup());
    kernel.set_needs_wakeup(true);
    assert!(fill.needs_wakeup());
    kernel.set_needs_wakeup(false);
    assert!(!fill.needs_wakeup());
}

#[test]
fn received_addresses_carry_their_offset() {
    let packet = Descriptor::received(0x1234_5678_9abc, 256, 1514);
    assert_eq!(packet.addr, 256 << 48 | 0x1234_5678_9abc);
    assert_eq!(
        (packet.base(), packet.start()),
        (0x1234_5678_9abc, 0x1234_5678_9bbc)
    );
}

#[test]
fn an_end_outlives_the_other() {
    let (mut rx, kernel) = ring::in_memory::<Rx>(64, 7);
    drop(kernel);
    rx.write(0, Descriptor::default());
    rx.submit(1);
    let (_, mut kernel) = ring::in_memory::<Rx>(64, 7);
    assert_eq!(kernel.available(1), 0);
}

#[test]
fn two_threads_see_whole_entries() {
    const COUNT: u64 = 200_000;
    let (mut tx, mut kernel) = ring::in_memory::<Tx>(64, u32::MAX - 1000);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut next = 0;
            while next < COUNT {
                let count = tx.free(16).min(16).min((COUNT - next) as u32);
                for offset in 0..count {
                    let number = next + u64::from(offset);
                    tx.write(
                        offset,
                        Descriptor {
                            addr: number,
                            len: !number as u32,
                            options: number as u32 ^ 0x5a5a,
                        },
                    );
                }
                tx.submit(count);
                next += u64::from(count);
                if count == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let mut next = 0;
        while next < COUNT {
            let count = kernel.available(32);
            for offset in 0..count {
                let number = next + u64::from(offset);
                let expected = Descriptor {
                    addr: number,
                    len: !number as u32,
                    options: number as u32 ^ 0x5a5a,
                };
                assert_eq!(kernel.read(offset), expected);
            }
            kernel.release(count);
            next += u64::from(count);
            if count == 0 {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
#[should_panic(expected = "must be a power of two")]
fn an_odd_length_is_refused() {
    let _ = ring::in_memory::<Fill>(12, 0);
}

#[test]
#[should_panic(expected = "entry 8 is not free")]
fn writing_over_unread_entries_panics() {
    let (mut fill, _kernel) = ring::in_memory::<Fill>(8, 0);
    fill.write(8, 0);
}

#[test]
#[should_panic(expected = "9 entries are not free")]
fn submitting_too_many_panics() {
    let (mut fill, _kernel) = ring::in_memory::<Fill>(8, 0);
    fill.submit(9);
}

#[test]
#[should_panic(expected = "entry 0 is not there")]
fn reading_ahead_panics() {
    let (_fill, kernel) = ring::in_memory::<Fill>(8, 0);
    kernel.read(0);
}

#[test]
#[should_panic(expected = "1 entries are not there")]
fn releasing_ahead_panics() {
    let (_fill, mut kernel) = ring::in_memory::<Fill>(8, 0);
    kernel.release(1);
}
