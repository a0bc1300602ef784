//! How far apart the two cores of a measurement are: the time that a cache line takes from one to the other and back.
//!
//! On a virtual machine it changes by a factor of four from minute to minute, as the host moves the virtual cores about, and what
//! hands packets from core to core changes with it, while a kernel socket's own work hardly does. So each round of a benchmark
//! notes it, waits a while for near cores, and is measured again when the distance changed under it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Round trips of a batch: some 0.1 to 0.6 ms, so that several find both cores free even beside a program that never sleeps.
const ROUND_TRIPS: u64 = 1000;
/// Batches of one measurement; the quickest counts.
const BATCHES: u64 = 50;
/// Distances within this factor are the same.
const SAME: f64 = 1.5;
/// How long a round waits for near cores before it is measured at any distance.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a round is measured again because the distance changed.
pub(super) const REPEATS: u32 = 3;

#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// Nanoseconds that a cache line takes from core 0 to core 1 and back; `None` where there are no two such cores.
pub(super) fn measure() -> Option<f64> {
    let line = Line::default();
    let pin = |core| {
        let mut cores = CpuSet::new();
        cores.set(core);
        sched_setaffinity(None, &cores).ok()
    };
    thread::scope(|scope| {
        let near = scope.spawn(|| {
            pin(0)?;
            let mut least = f64::INFINITY;
            for batch in 0..BATCHES {
                let start = Instant::now();
                for turn in batch * ROUND_TRIPS..(batch + 1) * ROUND_TRIPS {
                    line.0.store(2 * turn + 1, Ordering::Release);
                    await_value(&line.0, 2 * turn + 2)?;
                }
                least = least.min(start.elapsed().as_nanos() as f64 / ROUND_TRIPS as f64);
            }
            Some(least)
        });
        let far = scope.spawn(|| {
            pin(1)?;
            for turn in 0..BATCHES * ROUND_TRIPS {
                await_value(&line.0, 2 * turn + 1)?;
                line.0.store(2 * turn + 2, Ordering::Release);
            }
            Some(())
        });
        let nanoseconds = near.join().ok()?;
        far.join().ok()?.and(nanoseconds)
    })
}

/// Waits for the other core; `None` when it is not there.
fn await_value(line: &AtomicU64, value: u64) -> Option<()> {
    let mut spins = 0u64;
    while line.load(Ordering::Acquire) != value {
        std::hint::spin_loop();
        spins += 1;
        if spins > 1 << 32 {
            return None;
        }
    }
    Some(())
}

/// The least distance that this process has seen, in picoseconds.
static LEAST_PS: AtomicU64 = AtomicU64::new(u64::MAX);

/// The distances of a comparison's rounds.
#[derive(Debug, Default)]
pub(super) struct Distances {
    /// One for each round under which the cores stayed, in nanoseconds.
    pub(super) rounds: Vec<f64>,
}

impl Distances {
    fn look() -> Option<f64> {
        let now = measure()?;
        LEAST_PS.fetch_min((now * 1000.0) as u64, Ordering::Relaxed);
        Some(now)
    }

    /// Waits for near cores, and says how far apart they are then.
    pub(super) fn wait() -> Option<f64> {
        let start = Instant::now();
        loop {
            let now = Distances::look()?;
            let least = LEAST_PS.load(Ordering::Relaxed) as f64 / 1000.0;
            if now <= least * SAME || start.elapsed() > PATIENCE {
                return Some(now);
            }
            thread::sleep(Duration::from_millis(500));
        }
    }

    /// Whether the distance is still the one from before the round.
    pub(super) fn held(&mut self, before: Option<f64>) -> bool {
        match (before, Distances::look()) {
            (Some(before), Some(after)) => {
                let same = before.max(after) <= before.min(after) * SAME;
                if same {
                    self.rounds.push(before.max(after));
                }
                same
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_cores_are_some_distance_apart() {
        if thread::available_parallelism().map_or(1, usize::from) < 2 {
            println!("SKIPPED: one core");
            return;
        }
        let mut distances = Distances::default();
        let before = Distances::look();
        assert!((1.0..1e6).contains(&before.expect("cores 0 and 1")));
        // Shared machines are not still: it may have changed, and then the round does not count.
        let held = distances.held(before);
        assert_eq!(distances.rounds.len(), usize::from(held));
    }
}
