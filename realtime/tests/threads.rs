//! A control loop on a thread of its own, ahead of the thread that drives its endpoint in bulk, on one core of this kernel.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bed::Pair;
use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, SendError as MessageError};
use lm_realtime::{RealTime, RtSocket, SendOptions, SocketConfig, monotonic};

const LOOPS: u32 = 2000;
const PERIOD: Duration = Duration::from_millis(1);
/// Messages of the bulk thread.
const BULK_LEN: usize = 1 << 20;

fn open(interface: &str, idle: IdleStrategy) -> Endpoint {
    let config = EndpointConfig {
        interface: interface.into(),
        idle,
        ..EndpointConfig::default()
    };
    Endpoint::open(&config).expect("a veth device")
}

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
        keep: 1024,
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
            .expect("1024 may wait");
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

#[test]
fn a_loop_ahead_of_the_bulk_thread_on_its_core_waits_for_nobody() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(2);
    let busy = IdleStrategy::default();
    let (mut near, mut far) = (pair.a.run(|| open("va", busy)), pair.b.run(|| open("vb", busy)));
    let ((_near, mut looping), (_far, answering)) = (socket(&mut near), socket(&mut far));
    let is_over = AtomicBool::new(false);
    let to = far.local();
    let near = || {
        std::thread::scope(|scope| {
            let over = Over(&is_over);
            let far = scope.spawn(|| {
                pair.b.run(|| {
                    pin(1);
                    answer(far, answering, &is_over)
                })
            });
            let peer = near.connect(to, &ConnectOptions::default()).expect("a route");
            looping.connect(&mut near, peer, 1).expect("a peer");
            near.flush(Duration::from_secs(5)).expect("it answers");
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
            let (seen, statistics) = looping.join().expect("no panic");
            drop(over);
            let bytes = far.join().expect("no panic");
            assert_eq!((seen.came, statistics.superseded), (LOOPS, 0), "{statistics:?}");
            let waited = seen.switches - seen.sleeps;
            assert!(
                waited <= 0,
                "it waited {waited} times beside its own {} sleeps",
                seen.sleeps
            );
            assert!(seen.ran < seen.took / 4, "{:?} of {:?}", seen.ran, seen.took);
            let rate = bytes as f64 / seen.took.as_secs_f64();
            assert!(rate > 20e6, "{rate} bytes a second of bulk");
        })
    };
    pair.a.run(near);
}

/// Both threads sleep until the other one has something for them, and neither looks in vain meanwhile.
#[test]
fn threads_that_sleep_are_woken() {
    const TRIPS: u32 = 500;
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    // Far longer than a trip may take: only what wakes can end such a sleep.
    let idle = sleepy(Duration::from_secs(5));
    let (mut near, mut far) = (pair.a.run(|| open("va", idle)), pair.b.run(|| open("vb", idle)));
    let ((_near, mut asking), (_far, answering)) = (socket(&mut near), socket(&mut far));
    let is_over = AtomicBool::new(false);
    let to = far.local();
    let near = || {
        std::thread::scope(|scope| {
            let over = Over(&is_over);
            let far = scope.spawn(|| pair.b.run(|| answer(far, answering, &is_over)));
            let peer = near.connect(to, &ConnectOptions::default()).expect("a route");
            asking.connect(&mut near, peer, 1).expect("a peer");
            near.flush(Duration::from_secs(5)).expect("it answers");
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
            let (mut trips, is_there) = asking.join().expect("no panic");
            drop(over);
            far.join().expect("no panic");
            assert!(!is_there, "nothing more was sent");
            // Without, a timer would: a report is due every 5 ms.
            trips.sort_unstable();
            let median = trips[trips.len() / 2];
            assert!(median < Duration::from_millis(2), "{median:?} a trip");
        })
    };
    pair.a.run(near);
}
