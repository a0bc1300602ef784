//! What all soaks over seeds have in common: seeds are handed out in small ranges, what was done is counted and shown meanwhile, and the first
//! failure stops all and says how to repeat it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

/// How often progress is shown.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// Seeds that came to a good end, in a [`Tally`].
pub(super) const SEEDS: &str = "seeds";

/// What all runs together did, by name.
#[derive(Default)]
pub(super) struct Tally(Mutex<BTreeMap<&'static str, u64>>);

impl Tally {
    pub(super) fn add(&self, what: &'static str, count: u64) {
        *lock(&self.0).entry(what).or_default() += count;
    }

    pub(super) fn of(&self, what: &str) -> u64 {
        lock(&self.0).get(what).copied().unwrap_or(0)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = lock(&self.0);
        let others = counts.iter().filter(|(what, _)| **what != SEEDS);
        let words = others.map(|(what, count)| format!("{what} {count}"));
        f.write_str(&words.collect::<Vec<_>>().join(", "))
    }
}

/// A seed that failed, and why.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) seed: u64,
    pub(super) error: String,
    /// What else is known of it.
    pub(super) said: String,
}

/// Something that runs seeds.
pub(super) trait Soak: Sync {
    /// Runs seeds, or those before the first that fails, and counts those that came to a good end as [`SEEDS`]; none need be run to its end
    /// once `is_stopped`.
    fn run(&self, seeds: Range<u64>, tally: &Tally, is_stopped: &AtomicBool) -> Result<Option<Failure>>;

    /// The command that runs a seed again.
    fn again(&self, seed: u64) -> String;
}

/// Runs all seeds of a range in so many threads.
///
/// # Errors
/// The first seed that failed, and the command that repeats it.
pub(super) fn run(soak: &dyn Soak, seeds: Range<u64>, jobs: u64) -> Result<Tally> {
    let (count, started, tally) = (seeds.end - seeds.start, Instant::now(), Tally::default());
    let line = || {
        let (done, seconds) = (tally.of(SEEDS), started.elapsed().as_secs());
        format!("{done} of {count} seeds in {seconds} s: {tally}")
    };
    let failure = first_failure(soak, seeds, jobs, &tally, &|| eprintln!("{}", line()))?;
    let done = tally.of(SEEDS);
    if let Some(Failure { seed, error, said }) = failure {
        if !said.is_empty() {
            eprintln!("{}", said.trim_end());
        }
        let again = soak.again(seed);
        bail!("seed {seed} failed after {done} good ones: {error}; again: {again}");
    }
    ensure!(
        done == count,
        "{done} of {count} seeds ran; is the test still there?"
    );
    println!("{}", line());
    Ok(tally)
}

fn first_failure(
    soak: &dyn Soak,
    seeds: Range<u64>,
    jobs: u64,
    tally: &Tally,
    show: &dyn Fn(),
) -> Result<Option<Failure>> {
    let count = seeds.end - seeds.start;
    let jobs = jobs.clamp(1, count);
    // Long enough to forget the start of a process, short enough that all of them end together.
    let at_once = (count / (jobs * 8)).clamp(1, 100);
    let next = AtomicU64::new(seeds.start);
    let is_stopped = AtomicBool::new(false);
    let first: Mutex<Option<Failure>> = Mutex::default();
    let work = || -> Result<()> {
        // Relaxed: a worker that sees it late runs one more range.
        while !is_stopped.load(Ordering::Relaxed) {
            let from = next.fetch_add(at_once, Ordering::Relaxed);
            if from >= seeds.end {
                return Ok(());
            }
            let range = from..seeds.end.min(from.saturating_add(at_once));
            let failure = soak
                .run(range, tally, &is_stopped)
                .inspect_err(|_| is_stopped.store(true, Ordering::Relaxed))?;
            if let Some(failure) = failure {
                is_stopped.store(true, Ordering::Relaxed);
                // Several may fail at once: the lowest seed is as good as any, and the same each time.
                let mut first = lock(&first);
                if first.as_ref().is_none_or(|first| first.seed > failure.seed) {
                    *first = Some(failure);
                }
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let mut shown = Instant::now();
        while !threads.iter().all(|thread| thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            if shown.elapsed() >= PROGRESS_EVERY {
                shown = Instant::now();
                show();
            }
        }
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("a worker does not panic"))
    })?;
    Ok(lock(&first).take())
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Plain data; a panic elsewhere ends the program anyway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
