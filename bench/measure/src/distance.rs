//! How far apart the two cores of a measurement are: the time that a cache line takes from one to the other and back.
//!
//! On a virtual machine it changes by a factor of four from minute to minute, as the host moves the virtual cores
//! about, and what hands packets from core to core changes with it, while a kernel socket's own work hardly does.
//! Nearest of all are two virtual cores that the host runs as the two threads of one core of its own: each of them has
//! little more than half of it, and no real host gives its two cores so. Each measurement of a benchmark waits a while
//! for near cores that are two, is done once, whatever they do meanwhile, and is kept with how far apart they were
//! before and after it:
//!
//! ```
//! # use lm_measure::distance::Distances;
//! # let measure = || Ok::<u32, ()>(1);
//! let mut distances = Distances::between([0, 1]);
//! # distances = Distances::default();
//! let kept = distances.around(|| measure());
//! # assert_eq!(kept, Ok((1, None)));
//! ```
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Round trips of a batch: some 0.1 to 0.6 ms, so that several find both cores free even beside a program that never
/// sleeps.
const ROUND_TRIPS: u64 = 1000;
/// Batches of one measurement; the quickest counts.
const BATCHES: u64 = 50;
/// Distances within this factor are the same.
const SAME: f64 = 1.5;
/// How long a measurement waits for near cores before it is done at any distance.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How long all measurements of a comparison wait together: on a machine whose cores stay far apart waiting brings
/// nothing.
const PATIENCE_OF_ALL: Duration = Duration::from_secs(120);

/// Work that takes so much longer on both cores than on one alone is done by two threads of one core: 1.6 to 1.8 there,
/// 0.9 to 1.2 elsewhere.
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

/// How far apart the cores were around a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    /// What a cache line took there and back before it, in nanoseconds.
    pub before_ns: f64,
    /// The same after it.
    pub after_ns: f64,
    /// They were threads of one core, before it or after it.
    pub is_shared: bool,
    /// Two cores, which stayed where they were, hardly farther apart than the least that this process had seen.
    pub is_near: bool,
}

impl Apart {
    fn of([before, after]: [Distance; 2], least_ns: f64) -> Apart {
        let [before_ns, after_ns] = [before.nanoseconds, after.nanoseconds];
        let (near, far) = (before_ns.min(after_ns), before_ns.max(after_ns));
        let is_shared = before.is_shared || after.is_shared;
        Apart {
            before_ns,
            after_ns,
            is_shared,
            is_near: !is_shared && far <= near * SAME && near <= least_ns * SAME,
        }
    }
}

/// Two cores between which measurements wait.
#[derive(Debug, Default)]
pub struct Distances {
    waited: Duration,
    cores: Option<[usize; 2]>,
}

impl Distances {
    /// Between these cores. Of one core, as by [`Distances::default`], no distance is ever known, and no measurement
    /// waits.
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

    /// Waits for near cores, [`PATIENCE`] at most, and measures once, wherever they are then. Who leaves a sample out
    /// because of how far apart they were can say so; `None` where nothing is known of that.
    ///
    /// # Errors
    /// Those of `measure`.
    pub fn around<T, E>(&mut self, measure: impl FnOnce() -> Result<T, E>) -> Result<(T, Option<Apart>), E> {
        let before = self.wait();
        let measured = measure()?;
        let both = before.zip(self.look());
        let apart = both.map(|(before, after)| Apart::of([before, after], least_ns()));
        Ok((measured, apart))
    }

    /// Waits for near cores and says how far apart they are then. Near is what is hardly farther than the least that
    /// this process has seen.
    fn wait(&mut self) -> Option<Distance> {
        let patience = PATIENCE.min(PATIENCE_OF_ALL.saturating_sub(self.waited));
        let start = Instant::now();
        loop {
            let now = self.look()?;
            let is_near = !now.is_shared && now.nanoseconds <= least_ns() * SAME;
            if is_near || start.elapsed() > patience {
                self.waited += start.elapsed();
                return Some(now);
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

fn least_ns() -> f64 {
    LEAST_PS.load(Ordering::Relaxed) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_kept_with_the_distance_of_two_cores() {
        if thread::available_parallelism().map_or(1, usize::from) < 2 {
            println!("SKIPPED: one core");
            return;
        }
        let mut distances = Distances::between([0, 1]);
        let (kept, apart) = distances.around(|| Ok::<_, ()>(7)).unwrap();
        let apart = apart.expect("cores 0 and 1");
        assert_eq!(kept, 7);
        for nanoseconds in [apart.before_ns, apart.after_ns] {
            assert!((1.0..1e6).contains(&nanoseconds), "{apart:?}");
        }
    }

    #[test]
    fn near_are_two_cores_that_stay_near() {
        let at = |nanoseconds, is_shared| Distance {
            nanoseconds,
            is_shared,
        };
        for (before, after, is_near) in [
            (at(60.0, false), at(55.0, false), true),
            (at(60.0, false), at(400.0, false), false),
            (at(400.0, false), at(60.0, false), false),
            (at(400.0, false), at(410.0, false), false),
            (at(60.0, true), at(60.0, true), false),
            (at(60.0, false), at(60.0, true), false),
        ] {
            let apart = Apart::of([before, after], 50.0);
            assert_eq!(apart.is_near, is_near, "{apart:?}");
        }
    }

    #[test]
    fn of_one_core_nothing_is_known() {
        let mut distances = Distances::between([1, 1]);
        assert_eq!(distances.around(|| Ok::<_, ()>(1)), Ok((1, None)));
    }
}
