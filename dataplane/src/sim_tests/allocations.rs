//! Nothing is allocated per message or packet: a counting allocator sees none once everything is open.
#![cfg(test)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, noise};
use super::source::Source;

struct Counting;

thread_local! {
    /// Allocations of this thread: tests run side by side.
    static COUNT: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has, and the most it ever had. What it frees for another counts as well.
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn count_one(len: usize) {
    // A thread that is ending has no counter any more, and is none of ours.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
    count_bytes(len as i64);
}

fn count_bytes(change: i64) {
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

/// By how many bytes the memory of this thread grew at most while `run` ran.
pub(super) fn growth(run: impl FnOnce()) -> i64 {
    let before = LIVE.get();
    PEAK.set(before);
    run();
    PEAK.get() - before
}

// SAFETY: every call is passed on to the system's allocator unchanged; the counter is a plain thread-local cell whose
// use allocates nothing (const-initialised, without a destructor).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_one(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count_one(len);
        count_bytes(-(layout.size() as i64));
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, len) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count_bytes(-(layout.size() as i64));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread while `run` runs.
fn allocations(run: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    run();
    COUNT.get() - before
}

/// A mix of everything that an open session does.
fn traffic(
    bed: &mut Bed,
    peers: [crate::PeerId; 2],
    payload: &[u8],
    source: &Source,
    region: &mut Option<crate::LandingRegion>,
) {
    for n in 0..40usize {
        for from in [0, 1] {
            for len in [0, 64, 1448, 1449, 1460, 20_000 + 777 * n, payload.len()] {
                bed.exchange(from, peers[from], &payload[..len]);
            }
        }
        // Several at once, out of order.
        for at in 0..3 {
            bed.send(0, peers[0], &payload[..30_000 + at], at as u64);
            bed.send(0, peers[0], &payload[..300 + at], at as u64);
        }
        let held: [_; 6] = std::array::from_fn(|_| bed.recv(1));
        let [a, b, c, d, e, f] = held;
        drop((d, a, f, b, e, c));
        for _ in 0..6 {
            bed.completion(0);
        }
        // Into a region of the application's choice.
        source.give(region.take().expect("a region"));
        bed.send(0, peers[0], &payload[..50_000], 1);
        *region = source.landed(bed).into_region();
        bed.completion(0);
    }
    // Keepalives and timers.
    bed.pass(Duration::from_secs(3));
}

#[test]
fn the_counter_counts() {
    let count = allocations(|| drop(std::hint::black_box(vec![1u8; 100])));
    assert_eq!(count, 1);
    let bytes = growth(|| {
        drop(std::hint::black_box(vec![1u8; 1000]));
        drop(std::hint::black_box(vec![1u8; 500]));
    });
    assert_eq!(bytes, 1000);
}

#[test]
fn an_open_session_allocates_nothing() {
    for wire in [WireMode::Lm, WireMode::IpFrag] {
        let mut bed = Bed::new(&BedConfig {
            guarded: false,
            ..BedConfig::default()
        });
        let len = if wire == WireMode::Lm { 200_000 } else { 60_000 };
        let payload = noise(3, len);
        let peers = [0, 1].map(|from| bed.session(from, wire, len as u64));
        let mut region = bed.hosts[1].landing_region(60_000).ok();
        let source = Source::at(&mut bed, 1);
        source.keep_nothing();
        // From the first message on.
        let count = allocations(|| traffic(&mut bed, peers, &payload, &source, &mut region));
        assert_eq!(count, 0, "{wire:?}");
        drop(region);
        bed.check_memory();
        bed.check_clean();
        assert!(bed.hosts[1].counters.landing_packets > 1000);
        assert_eq!(bed.hosts[0].counters.messages_ahead > 50, wire == WireMode::Lm);
    }
}
