//! How far apart the two cores of a measurement are: the time that a cache line takes from one to the other and back.
//!
//! On a virtual machine it changes by a factor of four from minute to minute, as the host moves the virtual cores about, and what
//! hands packets from core to core changes with it, while a kernel socket's own work hardly does. Nearest of all are two virtual
//! cores that the host runs as the two threads of one core of its own: each of them has little more than half of it, and no real host
//! gives its two cores so. Each measurement of a benchmark notes all this, waits a while for near cores that are two, and is repeated
//! when the distance changed under it:
//!
//! ```
//! # use lm_core_distance::Distances;
//! # let measure = || Ok::<u32, ()>(1);
//! let mut distances = Distances::between([0, 1]);
//! # distances = Distances::default();
//! let kept = distances.near(|_repeat| measure());
//! # assert_eq!(kept, Ok(1));
//! ```
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Round trips of a batch: some 0.1 to 0.6 ms, so that several find both cores free even beside a program that never sleeps.
const ROUND_TRIPS: u64 = 1000;
/// Batches of one measurement; the quickest counts.
const BATCHES: u64 = 50;
/// Distances within this factor are the same.
const SAME: f64 = 1.5;
/// How long a measurement waits for near cores before it is done at any distance.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How long all measurements of a comparison wait together: on a machine whose cores stay far apart waiting brings nothing.
const PATIENCE_OF_ALL: Duration = Duration::from_secs(120);
/// How often a measurement is repeated because the distance changed.
pub const REPEATS: u32 = 3;

/// Work that takes so much longer on both cores than on one alone is done by two threads of one core: 1.6 to 1.8 there, 0.9 to 1.2
/// elsewhere.
const SHARED: f64 = 1.4;
/// Times that the work is done; the quickest counts.
const WORKS: u32 = 10;

#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// Where two cores are to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Distance {
    /// What a cache line takes there and back.
    nanoseconds: f64,
    /// They are threads of one core.
    is_shared: bool,
}

fn pin(core: usize) -> Option<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores).ok()
}

/// `None` where there are no two such cores.
fn measure(cores: [usize; 2]) -> Option<Distance> {
    let nanoseconds = measure_nanoseconds(cores)?;
    let is_alone = AtomicBool::new(false);
    let (alone, both) = thread::scope(|scope| {
        let far = scope.spawn(|| {
            pin(cores[1])?;
            while !is_alone.load(Ordering::Relaxed) {
                work();
            }
            Some(())
        });
        let near = scope.spawn(|| {
            let pinned = pin(cores[0]);
            let both = quickest_work();
            is_alone.store(true, Ordering::Relaxed);
            pinned.map(|()| both)
        });
        let both = near.join().ok()??;
        far.join().ok()??;
        let alone = scope.spawn(|| pin(cores[0]).map(|()| quickest_work()));
        Some((alone.join().ok()??, both))
    })?;
    Some(Distance {
        nanoseconds,
        is_shared: both.as_secs_f64() > alone.as_secs_f64() * SHARED,
    })
}

fn quickest_work() -> Duration {
    (0..WORKS).map(|_| work()).min().unwrap_or_default()
}

/// Some 70 µs of arithmetic that keeps all of a core's units busy.
fn work() -> Duration {
    let mut values = [1u64, 2, 3, 4, 5, 6, 7, 8];
    let start = Instant::now();
    for round in 0..20_000u64 {
        for value in &mut values {
            *value ^= *value << 13;
            *value ^= *value >> 7;
            *value ^= *value << 17;
            *value = value.wrapping_add(round);
        }
    }
    std::hint::black_box(values);
    start.elapsed()
}

fn measure_nanoseconds(cores: [usize; 2]) -> Option<f64> {
    let line = Line::default();
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

/// The least distance of two cores that this process has seen, in picoseconds.
static LEAST_PS: AtomicU64 = AtomicU64::new(u64::MAX);

/// The distances of a comparison's measurements.
#[derive(Debug, Default)]
pub struct Distances {
    /// One for each measurement under which the cores stayed, in nanoseconds.
    pub rounds: Vec<f64>,
    /// Measurements of these on two threads of one core.
    pub shared: usize,
    waited: Duration,
    cores: Option<[usize; 2]>,
}

impl Distances {
    /// Those between two cores. Of one core, as by [`Distances::default`], none is ever known, and no round waits.
    #[must_use]
    pub fn between(cores: [usize; 2]) -> Distances {
        Distances {
            cores: (cores[0] != cores[1]).then_some(cores),
            ..Distances::default()
        }
    }

    fn look(&self) -> Option<Distance> {
        let now = measure(self.cores?)?;
        if !now.is_shared {
            LEAST_PS.fetch_min((now.nanoseconds * 1000.0) as u64, Ordering::Relaxed);
        }
        Some(now)
    }

    /// Measures on near cores if may be: waits for them, and measures again, [`REPEATS`] times at most, when they moved meanwhile.
    /// `measure` is told how often it was called before.
    ///
    /// # Errors
    /// Those of `measure`, at once.
    pub fn near<T, E>(&mut self, mut measure: impl FnMut(u32) -> Result<T, E>) -> Result<T, E> {
        let mut repeat = 0;
        loop {
            let before = self.wait();
            let measured = measure(repeat)?;
            if self.held(before) || repeat == REPEATS {
                return Ok(measured);
            }
            repeat += 1;
        }
    }

    /// Waits for near cores, [`PATIENCE`] at most, and says how far apart they are then. Near is what is hardly farther than the
    /// least that this process has seen.
    fn wait(&mut self) -> Option<Distance> {
        let patience = PATIENCE.min(PATIENCE_OF_ALL.saturating_sub(self.waited));
        let start = Instant::now();
        loop {
            let now = self.look()?;
            let least = LEAST_PS.load(Ordering::Relaxed) as f64 / 1000.0;
            let is_near = !now.is_shared && now.nanoseconds <= least * SAME;
            if is_near || start.elapsed() > patience {
                self.waited += start.elapsed();
                return Some(now);
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Whether the distance is still the one from before the measurement.
    fn held(&mut self, before: Option<Distance>) -> bool {
        match (before, self.look()) {
            (Some(before), Some(after)) => {
                let [one, other] = [before.nanoseconds, after.nanoseconds];
                let same = before.is_shared == after.is_shared && one.max(other) <= one.min(other) * SAME;
                if same {
                    self.rounds.push(one.max(other));
                    self.shared += usize::from(after.is_shared);
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
        assert!((1.0..1e6).contains(&before.expect("cores 0 and 1").nanoseconds));
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
