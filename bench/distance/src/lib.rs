//! How far apart the two cores of a measurement are: the time that a cache line takes from one to the other and back.
//!
//! On a virtual machine it changes by a factor of four from minute to minute, as the host moves the virtual cores about, and what
//! hands packets from core to core changes with it, while a kernel socket's own work hardly does. So each round of a benchmark
//! notes it, waits a while for near cores, and is measured again when the distance changed under it:
//!
//! ```
//! # use lm_core_distance::{Distances, REPEATS};
//! # let measure = || 1;
//! let mut distances = Distances::between([0, 1]);
//! # distances = Distances::default();
//! let mut kept = Vec::new();
//! for repeat in 0..=REPEATS {
//!     let before = distances.wait();
//!     let round = measure();
//!     if distances.held(before) || repeat == REPEATS {
//!         kept.push(round);
//!         break;
//!     }
//! }
//! # assert_eq!(kept, [1]);
//! ```
#![forbid(unsafe_code)]

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
pub const REPEATS: u32 = 3;

#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// Nanoseconds that a cache line takes from one core to the other and back; `None` where there are no two such cores.
fn measure(cores: [usize; 2]) -> Option<f64> {
    let line = Line::default();
    let pin = |core| {
        let mut cores = CpuSet::new();
        cores.set(core);
        sched_setaffinity(None, &cores).ok()
    };
    thread::scope(|scope| {
        let near = scope.spawn(|| {
            pin(cores[0])?;
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
            pin(cores[1])?;
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
pub struct Distances {
    /// One for each round under which the cores stayed, in nanoseconds.
    pub rounds: Vec<f64>,
    cores: Option<[usize; 2]>,
}

impl Distances {
    /// Those between two cores. Of one core, as by [`Distances::default`], none is ever known, and no round waits.
    #[must_use]
    pub fn between(cores: [usize; 2]) -> Distances {
        Distances {
            rounds: Vec::new(),
            cores: (cores[0] != cores[1]).then_some(cores),
        }
    }

    fn look(&self) -> Option<f64> {
        let now = measure(self.cores?)?;
        LEAST_PS.fetch_min((now * 1000.0) as u64, Ordering::Relaxed);
        Some(now)
    }

    /// Waits for near cores, half a minute at most, and says how far apart they are then, in nanoseconds. Near is what is
    /// hardly farther than the least that this process has seen.
    pub fn wait(&self) -> Option<f64> {
        let start = Instant::now();
        loop {
            let now = self.look()?;
            let least = LEAST_PS.load(Ordering::Relaxed) as f64 / 1000.0;
            if now <= least * SAME || start.elapsed() > PATIENCE {
                return Some(now);
            }
            thread::sleep(Duration::from_millis(500));
        }
    }

    /// Whether the distance is still the one from before the round.
    pub fn held(&mut self, before: Option<f64>) -> bool {
        match (before, self.look()) {
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
        let mut distances = Distances::between([0, 1]);
        let before = distances.look();
        assert!((1.0..1e6).contains(&before.expect("cores 0 and 1")));
        // Shared machines are not still: it may have changed, and then the round does not count.
        let held = distances.held(before);
        assert_eq!(distances.rounds.len(), usize::from(held));
    }

    #[test]
    fn one_core_is_nowhere() {
        let mut distances = Distances::between([1, 1]);
        let before = distances.wait();
        assert!(before.is_none() && distances.held(before) && distances.rounds.is_empty());
    }
}
