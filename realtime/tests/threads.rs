//! A control loop on a thread of its own, ahead of the thread that drives its endpoint in bulk, on one core of this kernel.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;
mod veth;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bed::Pair;
use lm_dataplane::{ConnectOptions, Endpoint, IdleStrategy, MemoryConfig, PeerId, SendError as MessageError};
use lm_realtime::{RealTime, RtSocket, SendOptions, SocketConfig, monotonic};

/// As many as a socket has room for, whatever else has the cores meanwhile.
const LOOPS: u32 = 1000;
const PERIOD: Duration = Duration::from_millis(1);
/// Messages of the bulk thread.
const BULK_LEN: usize = 1 << 20;

/// Sleeps as soon as there is nothing to do, so long.
fn sleepy(longest: Duration) -> IdleStrategy {
    IdleStrategy {
        spin: Duration::ZERO,
        yields: 0,
        sleep: Some(longest),
    }
}

fn socket(endpoint: &mut Endpoint) -> (RealTime, RtSocket) {
    let real_time = RealTime::new(endpoint, None, monotonic).expect("no other handler");
    let config = SocketConfig {
        keep: LOOPS as usize,
        same_host: true,
        drops_late: false,
        ..SocketConfig::default()
    };
    let socket = real_time.socket(endpoint, 1, &config).expect("memory");
    (real_time, socket)
}

/// Pins the thread to a core, if there is such a one.
fn pin(core: usize) {
    // SAFETY: an all-zero set is an empty one.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is a live local, and the core lies in it.
    unsafe { libc::CPU_SET(core, &mut cores) };
    // SAFETY: the set is live and of the length given; the calling thread is meant.
    unsafe { libc::sched_setaffinity(0, size_of_val(&cores), &raw const cores) };
}

/// From now on the thread runs before all ordinary ones of its core.
fn go_first() {
    let priority = libc::sched_param { sched_priority: 50 };
    // SAFETY: the parameter is a live local; the calling thread is meant.
    let done = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
    assert_eq!(done, 0, "root may");
}

/// How often the thread has given its core up of itself, and how long it has run.
fn usage() -> (i64, Duration) {
    let mut usage = std::mem::MaybeUninit::uninit();
    // SAFETY: getrusage(2) writes the structure, whose address is valid.
    let done = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    assert_eq!(done, 0);
    // SAFETY: it was written.
    let usage: libc::rusage = unsafe { usage.assume_init() };
    let ran = [usage.ru_utime, usage.ru_stime]
        .map(|time| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000));
    (usage.ru_nvcsw, ran[0] + ran[1])
}

/// Sends each message back, and takes whatever comes in bulk, until it is told to end. Bytes of the latter.
fn answer(mut end: Endpoint, mut socket: RtSocket, is_over: &AtomicBool) -> u64 {
    let (mut bytes, mut connected) = (0, None);
    while !is_over.load(Ordering::Relaxed) {
        if end.poll() == 0 {
            end.wait(Duration::from_millis(1));
        }
        while let Ok(Some(message)) = end.try_recv() {
            bytes += message.len() as u64;
        }
        while let Some(message) = socket.recv() {
            let from = message.info().from;
            if connected != Some(from) {
                socket.connect(&mut end, from, 1).expect("a peer");
                connected = Some(from);
            }
            socket
                .send(&message, SendOptions::default())
                .expect("it is polled");
        }
    }
    bytes
}

/// Ends the other end, also where a check fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What the loop saw.
struct Seen {
    came: u32,
    sleeps: i64,
    switches: i64,
    ran: Duration,
    took: Duration,
}

/// A message each millisecond; each answer is looked at.
fn control(socket: &mut RtSocket) -> Seen {
    go_first();
    let (mut next, mut came, mut sleeps) = (Instant::now(), 0u32, 0);
    let (begun, before) = (next, usage());
    for number in 0..LOOPS {
        next += PERIOD;
        let left = next.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            std::thread::sleep(left);
            sleeps += 1;
        }
        socket
            .send(&number.to_be_bytes(), SendOptions::default())
            .expect("all may wait");
        while let Some(answer) = socket.recv() {
            assert_eq!(answer[..], came.to_be_bytes(), "in order, and none is lost");
            came += 1;
        }
    }
    // The last ones are waited for: what comes, and what is over, wakes.
    let limit = Instant::now() + Duration::from_secs(5);
    while came < LOOPS && Instant::now() < limit {
        sleeps += 1;
        socket.wait(Some(Duration::from_millis(100)));
        while let Some(answer) = socket.recv() {
            assert_eq!(answer[..], came.to_be_bytes());
            came += 1;
        }
    }
    let after = usage();
    Seen {
        came,
        sleeps,
        switches: after.0 - before.0,
        ran: after.1 - before.1,
        took: begun.elapsed(),
    }
}

/// What `work` gives on the first host, whose socket is connected to one that answers on a thread of the second meanwhile, and the
/// bytes that this one took in bulk.
fn against_answers<T: Send>(
    (queues, idle): (u32, IdleStrategy),
    work: impl FnOnce(&mut Endpoint, PeerId, RtSocket) -> T + Send,
) -> Option<(T, u64)> {
    if !bed::root() {
        return None;
    }
    let pair = Pair::new(queues);
    let open = |interface| veth::open_with(interface, idle, MemoryConfig::default());
    let (mut near, mut far) = (pair.a.run(|| open("va")), pair.b.run(|| open("vb")));
    let ((_near, mut asking), (_far, answering)) = (socket(&mut near), socket(&mut far));
    let (is_over, to) = (AtomicBool::new(false), far.local());
    let at_far = || {
        pin(1);
        answer(far, answering, &is_over)
    };
    let at_near = || {
        std::thread::scope(|scope| {
            let over = Over(&is_over);
            let far = scope.spawn(|| pair.b.run(at_far));
            let peer = near.connect(to, &ConnectOptions::default()).expect("a route");
            asking.connect(&mut near, peer, 1).expect("a peer");
            near.flush(Duration::from_secs(5)).expect("it answers");
            let result = work(&mut near, peer, asking);
            drop(over);
            (result, far.join().expect("no panic"))
        })
    };
    Some(pair.a.run(at_near))
}

#[test]
fn a_loop_ahead_of_the_bulk_thread_on_its_core_waits_for_nobody() {
    let work = |near: &mut Endpoint, peer, mut looping: RtSocket| {
        std::thread::scope(|scope| {
            let looping = scope.spawn(move || {
                pin(0);
                let seen = control(&mut looping);
                (seen, looping.statistics())
            });
            pin(0);
            let bulk = vec![0x55; BULK_LEN];
            while !looping.is_finished() {
                match near.try_send_copy(peer, &bulk, 0) {
                    Ok(_) => {}
                    Err(MessageError::WouldBlock) => drop(near.poll()),
                    Err(error) => panic!("{error}"),
                }
            }
            looping.join().expect("no panic")
        })
    };
    let Some(((seen, statistics), bytes)) = against_answers((2, IdleStrategy::default()), work) else {
        return;
    };
    assert_eq!((seen.came, statistics.superseded), (LOOPS, 0), "{statistics:?}");
    // A loop that waited for the other thread would do so in each turn; the kernel may have it wait for a page.
    let (waited, sleeps) = (seen.switches - seen.sleeps, seen.sleeps);
    assert!(
        waited < i64::from(LOOPS) / 20,
        "{waited} waits beside {sleeps} sleeps"
    );
    assert!(seen.ran < seen.took / 2, "{:?} of {:?}", seen.ran, seen.took);
    assert!(bytes > 2 << 20, "{bytes} bytes of bulk");
}

/// Both threads sleep until the other one has something for them, and neither looks in vain meanwhile.
#[test]
fn threads_that_sleep_are_woken() {
    const TRIPS: u32 = 500;
    // Far longer than a trip may take: only what wakes can end such a sleep.
    let idle = sleepy(Duration::from_secs(5));
    let work = |near: &mut Endpoint, _, mut asking: RtSocket| {
        std::thread::scope(|scope| {
            let asking = scope.spawn(move || {
                let mut trips = Vec::new();
                for number in 0..TRIPS {
                    let begun = Instant::now();
                    asking
                        .send(&number.to_be_bytes(), SendOptions::default())
                        .expect("polled");
                    // Every other one for ever, if it has to be.
                    let longest = number.is_multiple_of(2).then_some(Duration::from_secs(5));
                    let answer = loop {
                        assert!(asking.wait(longest), "message {number}");
                        if let Some(answer) = asking.recv() {
                            break answer;
                        }
                    };
                    assert_eq!(answer[..], number.to_be_bytes());
                    trips.push(begun.elapsed());
                }
                (trips, asking.wait(Some(Duration::from_millis(1))))
            });
            while !asking.is_finished() {
                if near.poll() == 0 {
                    near.wait(Duration::from_millis(200));
                }
            }
            asking.join().expect("no panic")
        })
    };
    let Some(((mut trips, is_there), _)) = against_answers((1, idle), work) else {
        return;
    };
    assert!(!is_there, "nothing more was sent");
    // Without, a timer would: a report is due every 5 ms.
    trips.sort_unstable();
    let median = trips[trips.len() / 2];
    assert!(median < Duration::from_millis(2), "{median:?} a trip");
}
