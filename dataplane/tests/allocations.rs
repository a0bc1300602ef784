//! The steady state allocates nothing: two real endpoints, a counting allocator.

mod bed;
#[path = "endpoint/harness.rs"]
mod harness;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectOptions, Endpoint, LoanError, Outcome, PeerId};

use harness::{B, Bed, PATIENCE, config_a, config_b, up_to};

/// Counts what is asked for while it is armed, in whatever thread.
struct Counting;

static ARMED: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

fn count() {
    if ARMED.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `alloc_zeroed`'s contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(pointer, layout, len) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SMALL: u64 = 200;
const LARGE: u64 = 100_000;

/// Sends `count` messages of `len` bytes as fast as the receiver takes them, and waits for their confirmation.
fn stream(endpoint: &mut Endpoint, peer: PeerId, len: u64, count: u64) {
    let (mut sent, mut settled) = (0, 0);
    let deadline = Instant::now() + PATIENCE;
    while settled < count {
        if sent < count {
            match endpoint.loan(peer, len) {
                Ok(mut region) => {
                    let block = [sent as u8; 512];
                    while region.written() < len {
                        let rest = (len - region.written()).min(512) as usize;
                        region.write_all(&block[..rest]).unwrap();
                    }
                    endpoint.send(region, sent).unwrap();
                    sent += 1;
                }
                Err(LoanError::WouldBlock) => endpoint.wait(Duration::from_millis(1)),
                Err(error) => panic!("{error}"),
            }
        } else if endpoint.poll() == 0 {
            endpoint.wait(Duration::from_millis(1));
        }
        while let Some(completion) = endpoint.try_completion() {
            assert_eq!(completion.outcome, Outcome::Delivered);
            settled += 1;
        }
        assert!(Instant::now() < deadline, "{sent} sent, {settled} settled");
    }
}

fn take(endpoint: &mut Endpoint, len: u64, count: u64) {
    for number in 0..count {
        let message = endpoint.recv(Some(PATIENCE)).unwrap();
        assert_eq!((message.tag(), message.len() as u64), (number, len));
        assert!(message.first() == Some(&(number as u8)) && message.last() == Some(&(number as u8)));
    }
}

#[test]
fn nothing_is_allocated_once_it_runs() {
    let Some(bed) = Bed::new(2) else { return };
    let options = ConnectOptions {
        messages_in_flight: 16,
        ..up_to(LARGE)
    };
    // The same three times: first to warm up, which takes until the landing queue's NAPI instance is known; then counted.
    bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let peer = a.connect(B, &options).unwrap();
            for armed in [false, false, true] {
                ARMED.store(armed, Ordering::SeqCst);
                stream(a, peer, SMALL, 1000);
                stream(a, peer, LARGE, 200);
            }
            ARMED.store(false, Ordering::SeqCst);
        },
        |b| {
            for _ in 0..3 {
                take(b, SMALL, 1000);
                take(b, LARGE, 200);
            }
        },
    );
    assert_eq!(
        ALLOCATIONS.load(Ordering::SeqCst),
        0,
        "allocations in the steady state"
    );
    // The counter counts.
    ARMED.store(true, Ordering::SeqCst);
    drop(std::hint::black_box(vec![0_u8; 10]));
    ARMED.store(false, Ordering::SeqCst);
    assert!(ALLOCATIONS.load(Ordering::SeqCst) > 0);
}
