//! Seeds of a soak. An ordinary run takes some, one after the other; `cargo xtask soak` names others in `LM_SOAK_SEEDS`, which all
//! processors share. The tests of two crates have this file.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Which seeds: `FROM..TO`.
const SEEDS_VARIABLE: &str = "LM_SOAK_SEEDS";
/// How often progress is shown.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// A seed takes a moment; one that takes this long hangs.
const LIMIT: Duration = Duration::from_secs(180);

/// The seed that a thread runs, and since when.
type Running = Mutex<Option<(u64, Instant)>>;

/// What came of the seeds so far.
struct Done<T> {
    count: u64,
    failure: Option<(u64, String)>,
    take: T,
}

/// Runs `one`, and makes its panic an error of one line.
pub(crate) fn caught<R>(one: impl FnOnce() -> Result<R, String>) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(one)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied());
        let words: Vec<&str> = text.unwrap_or("of another kind").split_whitespace().collect();
        Err(format!("panic: {}", words.join(" ")))
    })
}

/// Runs the seeds that are named, else the ordinary ones on this thread; `take` is given what each brought. Which seeds that were.
///
/// # Panics
/// At the first seed that fails, with the command `again` that repeats it.
pub(crate) fn run<R>(
    ordinary: Range<u64>,
    again: &str,
    one: impl Fn(u64) -> Result<R, String> + Sync,
    take: impl FnMut(u64, R) + Send,
) -> Range<u64> {
    let named = std::env::var(SEEDS_VARIABLE).ok().map(|text| {
        let parsed = text
            .split_once("..")
            .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
        parsed.unwrap_or_else(|| panic!("{SEEDS_VARIABLE} is FROM..TO, not {text}"))
    });
    let cpus = || std::thread::available_parallelism().map_or(1, |count| count.get());
    let jobs = if named.is_some() { cpus() } else { 0 };
    let seeds = named.unwrap_or(ordinary);
    if let Err((seed, error)) = over(seeds.clone(), jobs, one, take) {
        panic!("seed {seed}: {error}; again: {again} --seeds 1 --from {seed}");
    }
    seeds
}

/// Runs seeds in `jobs` threads; with 0 in this one.
///
/// # Errors
/// The lowest seed of those that failed before all stopped, and why.
pub(crate) fn over<R>(
    seeds: Range<u64>,
    jobs: usize,
    one: impl Fn(u64) -> Result<R, String> + Sync,
    take: impl FnMut(u64, R) + Send,
) -> Result<(), (u64, String)> {
    let total = seeds.end.saturating_sub(seeds.start);
    let next = Mutex::new(seeds);
    let done = Mutex::new(Done {
        count: 0,
        failure: None,
        take,
    });
    let work = |running: &Running| {
        while lock(&done).failure.is_none() {
            let Some(seed) = lock(&next).next() else { break };
            *lock(running) = Some((seed, Instant::now()));
            let brought = caught(|| one(seed));
            let mut done = lock(&done);
            match brought {
                Ok(brought) => {
                    (done.take)(seed, brought);
                    done.count += 1;
                }
                Err(error) if done.failure.as_ref().is_none_or(|(other, _)| seed < *other) => {
                    done.failure = Some((seed, error));
                }
                Err(_) => {}
            }
        }
        *lock(running) = None;
    };
    let running: Vec<Running> = (0..jobs).map(|_| Mutex::default()).collect();
    let started = Instant::now();
    let show = || {
        let (count, seconds) = (lock(&done).count, started.elapsed().as_secs());
        let now: Vec<u64> = running
            .iter()
            .filter_map(|one| lock(one).map(|(seed, _)| seed))
            .collect();
        // Of a process that dies the last line says with what it was busy.
        println!("soak: {count} of {total} seeds in {seconds} s; now {now:?}");
    };
    if running.is_empty() {
        work(&Mutex::default());
    } else {
        std::thread::scope(|scope| {
            let threads: Vec<_> = running.iter().map(|own| scope.spawn(|| work(own))).collect();
            let mut shown = Instant::now();
            while !threads.iter().all(|thread| thread.is_finished()) {
                std::thread::sleep(Duration::from_millis(5));
                if shown.elapsed() >= PROGRESS_EVERY {
                    shown = Instant::now();
                    show();
                }
                let overdue = |one: &Running| lock(one).filter(|(_, since)| since.elapsed() > LIMIT);
                if let Some((seed, _)) = running.iter().find_map(overdue) {
                    println!("soak: seed {seed} has no end after {} s", LIMIT.as_secs());
                    std::process::abort();
                }
            }
        });
        show();
    }
    match lock(&done).failure.take() {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it is held ends the test anyway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
