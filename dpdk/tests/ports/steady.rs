//! A stream allocates nothing and makes no system call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lm_dataplane::{ConnectOptions, Endpoint};
use lm_dpdk::DpdkNic;

use crate::bed::{A, B, PATIENCE, Wire, until};

/// Counts what is asked for while it is armed, in whatever thread.
struct Counting;

static ARMED: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(ARMED.load(Ordering::Relaxed).into(), Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LEN: u64 = 200_000;
/// Messages before it is counted, and counted ones.
const WARM: u64 = 200;
const COUNTED: u64 = 200;

/// A call that nothing else makes: where the stream begins and ends in a list of calls.
fn mark() {
    let _ = rustix::process::getppid();
}

/// Polls an endpoint, which never sleeps, and does a step after each round, until one says that it was the last.
fn drive(endpoint: &mut Endpoint<DpdkNic>, mut is_last: impl FnMut(&mut Endpoint<DpdkNic>) -> bool) {
    // Each end keeps a core busy: where both have one, they exchange a ring of packets whenever one is preempted.
    until(3 * PATIENCE, || {
        endpoint.poll();
        is_last(endpoint).then_some(()).ok_or("the stream does not end")
    });
}

#[test]
fn a_stream_allocates_nothing() {
    for queues in [1, 2] {
        until(3 * PATIENCE, || {
            let streamed = std::thread::spawn(move || stream(queues)).join();
            streamed.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
    }
}

/// To the end that copies, or to the aimed one. How many packets of a sender that slept over its credit were moved, for which the engine takes memory.
fn stream(queues: u32) -> Result<(), u64> {
    let wire = Wire::new();
    let [mut b, mut a] = wire.ends(queues, "queue_size=256");
    let mut to = A;
    if queues > 1 {
        (to, b, a) = (B, a, b);
    }
    let options = ConnectOptions {
        max_message_len: LEN,
        messages_in_flight: 8,
        ..ConnectOptions::default()
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut received = 0;
            drive(&mut b, |b| {
                if b.try_recv().expect("nothing is lost").is_some() {
                    received += 1;
                    // Well within the sender's marks.
                    if received == WARM + 20 || received == WARM + COUNTED - 20 {
                        mark();
                    }
                }
                is_over.load(Ordering::Acquire)
            });
        });
        let peer = a.connect(SocketAddrV4::new(to, 7168), &options);
        let peer = peer.unwrap_or_else(|error| panic!("{error}"));
        let (mut sent, mut confirmed) = (0, 0);
        drive(&mut a, |a| {
            if sent < WARM + COUNTED
                && let Ok(mut region) = a.loan(peer, LEN)
            {
                region.payloads_mut().for_each(|range| range.fill(7));
                sent += u64::from(a.try_send(region, sent).is_ok());
            }
            while a.try_completion().is_some() {
                confirmed += 1;
                if confirmed == WARM || confirmed == WARM + COUNTED {
                    mark();
                    ARMED.store(confirmed == WARM, Ordering::SeqCst);
                }
            }
            confirmed == WARM + COUNTED
        });
        is_over.store(true, Ordering::Release);
    });
    let (taken, moved) = (
        ALLOCATIONS.swap(0, Ordering::SeqCst),
        b.counters().fragments_displaced,
    );
    assert!(taken == 0 || moved > 0, "{taken} {:?}", b.counters());
    (moved == 0).then_some(()).ok_or(moved)
}

#[test]
fn a_stream_makes_no_system_call() {
    let wire = Wire::new();
    let list = wire.folder.join("calls");
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let traced = Command::new("strace")
        .args(["-f", "-o"])
        .arg(&list)
        .arg(program)
        .args(["--exact", "steady::a_stream_allocates_nothing"])
        // Where DPDK makes a folder.
        .env("XDG_RUNTIME_DIR", &wire.folder)
        .output();
    let Ok(traced) = traced else {
        println!("SKIPPED: there is no strace (apt-get install strace)");
        return;
    };
    let said = String::from_utf8_lossy(&traced.stdout);
    assert!(traced.status.success(), "{said}");
    let calls = std::fs::read_to_string(&list).expect("a list of calls");
    std::fs::remove_file(&list).expect("it is there");
    let lines: Vec<_> = calls.lines().filter_map(|line| line.split_once(' ')).collect();
    let mut marked = BTreeMap::<&str, Vec<usize>>::new();
    for (at, (thread, _)) in (0..)
        .zip(&lines)
        .filter(|(_, (_, call))| call.contains("getppid("))
    {
        marked.entry(thread).or_default().push(at);
    }
    marked.retain(|_, marks| marks.len() == 2);
    assert!(marked.len() >= 4, "senders and receivers");
    for (thread, marks) in marked {
        let between = &lines[marks[0] + 1..marks[1]];
        let is_call = |call: &str| !call.contains("resumed>");
        let made: Vec<_> = (between.iter().filter(|(by, call)| *by == thread && is_call(call))).collect();
        // A device that takes nothing for half a second, on a machine that does other work, is looked at.
        assert!(made.len() < 10, "for 20,000 packets: {made:?}");
    }
}
