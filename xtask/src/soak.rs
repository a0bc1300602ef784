//! `cargo xtask soak`: many seeds of the simulated world, in parallel processes of one test program.
//!
//! The test `sim_tests::soak::seeds_settle` of `lm-dataplane`, or `soak::seeds_settle` of `lm-protocol`'s admission tests, runs the
//! seeds that `LM_SOAK_SEEDS` names and says one line for each. Here they are handed out in small ranges, counted, and stopped at the
//! first failure.

mod cluster;
pub(crate) mod fates;
mod kernel;
mod traces;
mod world;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{cargo, command_line, root, run as run_command};
use world::{ADMISSION, ENGINES, World, build, rates};

/// A seed takes some 30 ms; one that takes so long hangs.
const SILENCE_MAX: Duration = Duration::from_secs(180);
/// Makes the tests' long loops run in full; `dataplane/src/sim_tests/mod.rs` reads it.
const LONG_VARIABLE: &str = "LM_LONG";
/// How often progress is shown: on a terminal, and elsewhere.
const PROGRESS_EVERY: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(10)];

/// Run random beds under random impairments on the simulated NIC, seed after seed.
///
/// Each seed is a bed of two hosts, a load and everything that goes wrong: loss, duplication, reordering, delay, foreign
/// packets, corrupt bytes, exhausted rings, hosts that pause or die. Checked is that every delivered message is the
/// one that was sent, every other one was reported, all memory came back and every packet is accounted for. Stops at the
/// first failure and says how to repeat it. Needs no root.
///
/// The packets, events and messages of the first 2000 seeds must be those that were recorded, hash by hash; with --traces, all of these
/// seeds run and all simulated tests as well. A change that is meant to do something else is recorded with --record.
///
/// With --admission: seeds of the admission between up to a hundred hosts instead, with loss, duplication, reordering, clocks that
/// differ, hosts and daemons that die, and somebody who records and sends again. Checked is that under `exclusive` there are never
/// two active receivers, that every request is answered, that leases end in time, that memory stays bounded, and that nobody
/// without the key changes anything. Then a table of both policies: grant latency and utilisation for 10, 100 and 1000 hosts.
///
/// With --cluster: all to all on a cluster of hosts with an admission daemon each, while every second a daemon or a program is killed
/// and started again. Checked is that no message was wrong, that every session ends in its time, that nothing is left in any gate, and that
/// the daemons grow in neither descriptors nor memory. Needs root.
///
/// With --long: the tests' own long loops, of which an ordinary run takes a part, in full (docs/ci.md lists them), and the measuring tools' tests with
/// QUIC, which an ordinary build does not have.
///
/// With --kernel N: N runs on the real kernel, through the impairment box, with messages whose every byte both ends know from
/// the seed. Needs root.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// How many seeds on the simulated NIC [default: 1000, with --kernel none]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Processes at a time; as many as there are CPUs by default.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// More kinds of trouble: `corrupt-unverified`, any byte changed where there are no digests either, which
    /// nothing notices.
    #[arg(long, value_name = "KIND,…", conflicts_with = "admission")]
    with: Option<String>,
    /// The admission between hosts instead of the data path.
    #[arg(long, conflicts_with = "kernel")]
    admission: bool,
    /// Killed daemons and programs in a cluster of hosts.
    #[arg(long, conflicts_with_all = ["admission", "kernel", "seeds", "with"])]
    cluster: bool,
    /// With --cluster: how many hosts.
    #[arg(long, default_value_t = 16, requires = "cluster", value_parser = clap::value_parser!(u32).range(2..=64))]
    hosts: u32,
    /// With --cluster: for so many seconds.
    #[arg(long, default_value_t = 60, requires = "cluster", value_parser = clap::value_parser!(u32).range(5..=3600))]
    seconds: u32,
    /// With --cluster: decides who is killed, and contents.
    #[arg(long, default_value_t = 1, requires = "cluster")]
    seed: u64,
    /// With --cluster: no daemons; programs embed the admission, as root.
    #[arg(long, requires = "cluster")]
    embedded: bool,
    /// The tests' long loops in full instead.
    #[arg(long, conflicts_with_all = ["seeds", "admission", "cluster", "kernel", "with"])]
    long: bool,
    /// The recorded seeds and all simulated tests.
    #[arg(long, conflicts_with_all = ["seeds", "from", "admission", "cluster", "kernel", "with", "long"])]
    traces: bool,
    /// Records what --traces compares with.
    #[arg(long, conflicts_with_all = ["traces", "seeds", "from", "admission", "cluster", "kernel", "with", "long"])]
    record: bool,
    /// How many seeds on the real kernel.
    #[arg(long, default_value_t = 0, value_name = "SEEDS")]
    kernel: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0, requires = "kernel", value_name = "SEED")]
    kernel_seed: u64,
}

/// The test program and what it is told beside its seeds.
struct Subject {
    program: PathBuf,
    folder: PathBuf,
    arguments: Vec<String>,
    with: String,
    /// Nothing is compared with recorded traces.
    record: bool,
}

/// A seed that failed, and why.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    seed: u64,
    error: String,
    /// What the process wrote to standard error.
    said: String,
}

/// What all processes together have done.
#[derive(Default)]
struct Progress {
    next: AtomicU64,
    done: AtomicU64,
    messages: AtomicU64,
    /// The hashes of seeds that told them.
    traces: Mutex<BTreeMap<u64, String>>,
    stop: AtomicBool,
    failure: Mutex<Option<Failure>>,
}

/// One process at a time, with the time of its last line.
#[derive(Default)]
struct Worker {
    running: Mutex<Option<(Child, Instant)>>,
    hung: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Plain data; a panic elsewhere ends the program anyway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line of the test program.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Done {
        seed: u64,
        messages: u64,
        trace: Option<&'a str>,
    },
    Failed {
        seed: u64,
        error: &'a str,
    },
    Other,
}

fn parse(line: &str) -> Line<'_> {
    let parsed = line.strip_prefix("soak: ").and_then(|rest| {
        let (seed, rest) = rest.split_once(' ')?;
        let seed = seed.parse().ok()?;
        if let Some(error) = rest.strip_prefix("failed: ") {
            return Some(Line::Failed { seed, error });
        }
        let (messages, rest) = rest.strip_prefix("ok, ")?.split_once(" messages")?;
        Some(Line::Done {
            seed,
            messages: messages.parse().ok()?,
            trace: rest.split_once(", trace ").map(|(_, trace)| trace),
        })
    });
    parsed.unwrap_or(Line::Other)
}

/// Runs `cargo xtask soak`.
pub fn run(arguments: &Arguments) -> Result<()> {
    if arguments.cluster {
        return cluster::run(&cluster::Trouble {
            hosts: arguments.hosts,
            seconds: arguments.seconds,
            seed: arguments.seed,
            embedded: arguments.embedded,
        });
    }
    if arguments.long {
        return long_loops();
    }
    let seeds = match (arguments.seeds, arguments.kernel) {
        (Some(seeds), _) => seeds,
        (None, 0) => 1000,
        (None, _) => 0,
    };
    if arguments.traces || arguments.record {
        let (program, seeds) = simulated(arguments, traces::SEEDS, &ENGINES)?;
        return match arguments.record {
            true => traces::record(&program, &seeds),
            false => traces::compare(&program),
        };
    }
    if seeds > 0 && arguments.admission {
        let (program, _) = simulated(arguments, seeds, &ADMISSION)?;
        if seeds > 1 {
            rates(&program)?;
        }
    } else if seeds > 0 {
        simulated(arguments, seeds, &ENGINES)?;
    }
    if arguments.kernel > 0 {
        kernel::soak(arguments.kernel_seed, arguments.kernel)?;
    }
    Ok(())
}

/// The tests on the simulated NIC with their loops in full, built as they are for `cargo xtask test`: with overflow checked.
fn long_loops() -> Result<()> {
    run_command(
        cargo()
            .args(["test", "--package", "lm-dataplane", "--lib", "sim_tests::"])
            .env(LONG_VARIABLE, "1"),
    )?;
    // An ordinary build has no QUIC.
    run_command(cargo().args([
        "test",
        "--package",
        "lm-bench",
        "--features",
        "peers",
        "--test",
        "tools",
        "suite::",
    ]))
}

/// Seeds of a simulated world; gives the program that ran them, and their traces.
fn simulated(arguments: &Arguments, seeds: u64, world: &World) -> Result<(PathBuf, BTreeMap<u64, String>)> {
    let last = arguments.from.checked_add(seeds);
    let last = last.context("no seed is beyond 2^64; choose fewer --seeds or a lower --from")?;
    let subject = Subject {
        program: build(world)?,
        folder: root().join(world.folder),
        arguments: ["--exact", world.test, "--nocapture"].map(str::to_owned).to_vec(),
        with: arguments.with.clone().unwrap_or_default(),
        record: arguments.record,
    };
    let cpus = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let jobs = arguments.jobs.map_or(cpus, u64::from);
    let started = Instant::now();
    let progress = soak(&subject, arguments.from..last, jobs)?;
    let seconds = started.elapsed().as_secs_f64();
    // Relaxed here and below: every thread has ended.
    let done = progress.done.load(Ordering::Relaxed);
    if let Some(failure) = progress
        .failure
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
    {
        if !failure.said.is_empty() {
            eprintln!("{}", failure.said.trim_end());
        }
        let with = match subject.with.is_empty() {
            true => String::new(),
            false => format!(" --with {}", subject.with),
        };
        let Failure { seed, error, .. } = failure;
        bail!(
            "seed {seed} failed after {done} good ones: {error}; again: cargo xtask soak{} --seeds 1 --from {seed}{with}",
            world.option
        );
    }
    let messages = progress.messages.load(Ordering::Relaxed);
    ensure!(
        done == seeds,
        "{done} of {seeds} seeds ran; is the test {} still there?",
        world.test
    );
    println!("{done} seeds, {messages} messages, {seconds:.1} s");
    let traces = (progress.traces.into_inner()).unwrap_or_else(PoisonError::into_inner);
    Ok((subject.program, traces))
}

/// Runs all seeds of a range, or as many as there are until one fails.
fn soak(subject: &Subject, seeds: std::ops::Range<u64>, jobs: u64) -> Result<Progress> {
    let count = seeds.end - seeds.start;
    let jobs = jobs.clamp(1, count);
    // Long enough to forget the start of a process, short enough that all of them end together.
    let at_once = (count / (jobs * 8)).clamp(1, 100);
    let progress = Progress {
        next: AtomicU64::new(seeds.start),
        ..Progress::default()
    };
    let workers: Vec<Worker> = (0..jobs).map(|_| Worker::default()).collect();
    let result = std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter()
            .map(|worker| {
                let (progress, end) = (&progress, seeds.end);
                scope.spawn(move || {
                    let result = worker.work(subject, end, at_once, progress);
                    if result.is_err() {
                        progress.stop.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        let started = Instant::now();
        let is_terminal = std::io::stderr().is_terminal();
        let every = PROGRESS_EVERY[usize::from(!is_terminal)];
        let mut shown = Instant::now();
        while !threads.iter().all(|thread| thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            let stopped = progress.stop.load(Ordering::Relaxed);
            workers.iter().for_each(|worker| worker.watch(stopped));
            if shown.elapsed() >= every {
                shown = Instant::now();
                show(&progress, count, started, is_terminal);
            }
        }
        if is_terminal {
            eprint!("\r\x1b[K");
        }
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("a worker does not panic"))
    });
    result.map(|()| progress)
}

fn show(progress: &Progress, count: u64, started: Instant, is_terminal: bool) {
    let done = progress.done.load(Ordering::Relaxed);
    let messages = progress.messages.load(Ordering::Relaxed);
    let seconds = started.elapsed().as_secs();
    let line = format!("{done} of {count} seeds, {messages} messages, {seconds} s");
    if is_terminal {
        eprint!("\r\x1b[K{line}");
        let _ = std::io::stderr().flush();
    } else {
        eprintln!("{line}");
    }
}

impl Worker {
    /// Takes one range of seeds after another.
    fn work(&self, subject: &Subject, end: u64, at_once: u64, progress: &Progress) -> Result<()> {
        while !progress.stop.load(Ordering::Relaxed) {
            let from = progress.next.fetch_add(at_once, Ordering::Relaxed);
            if from >= end {
                return Ok(());
            }
            let to = end.min(from.saturating_add(at_once));
            if let Some(failure) = self.range(subject, from..to, progress)? {
                progress.stop.store(true, Ordering::Relaxed);
                // Several may fail at once: the lowest seed is as good as any, and the same each time.
                let mut first = lock(&progress.failure);
                if first.as_ref().is_none_or(|first| first.seed > failure.seed) {
                    *first = Some(failure);
                }
            }
        }
        Ok(())
    }

    /// Runs one process.
    fn range(
        &self,
        subject: &Subject,
        seeds: std::ops::Range<u64>,
        progress: &Progress,
    ) -> Result<Option<Failure>> {
        let mut command = Command::new(&subject.program);
        command
            .args(&subject.arguments)
            .current_dir(&subject.folder)
            .env("LM_SOAK_SEEDS", format!("{}..{}", seeds.start, seeds.end))
            .env("LM_SOAK_WITH", &subject.with)
            .envs(subject.record.then_some((traces::RECORD_VARIABLE, "1")))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let line = command_line(&command);
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start `{line}`"))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        *lock(&self.running) = Some((child, Instant::now()));
        let mut stderr = stderr.expect("stderr is piped");
        // Read beside the lines, so that a long message does not stop the process.
        let reader = std::thread::spawn(move || {
            let mut said = Vec::new();
            let _ = stderr.read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        });
        let mut expected = seeds.start;
        let mut failed = None;
        for line in BufReader::new(stdout.expect("stdout is piped")).lines() {
            let Ok(line) = line else { break };
            match parse(&line) {
                Line::Done {
                    seed,
                    messages,
                    trace,
                } => {
                    lock(&progress.traces).extend(trace.map(|trace| (seed, trace.to_owned())));
                    expected = seed + 1;
                    progress.done.fetch_add(1, Ordering::Relaxed);
                    progress.messages.fetch_add(messages, Ordering::Relaxed);
                }
                Line::Failed { seed, error } => failed = Some((seed, error.to_owned())),
                Line::Other => {}
            }
            if let Some((_, since)) = &mut *lock(&self.running) {
                *since = Instant::now();
            }
        }
        let running = lock(&self.running).take();
        let status = match running {
            Some((mut child, _)) => Some(child.wait().context("cannot wait for the test program")?),
            None => None,
        };
        let said = reader.join().unwrap_or_default();
        let was_stopped = progress.stop.load(Ordering::Relaxed) && failed.is_none();
        let (seed, error) = match failed {
            Some(failed) => failed,
            None if expected == seeds.end || was_stopped => return Ok(None),
            None if self.hung.swap(false, Ordering::Relaxed) => {
                (expected, format!("no end after {} s", SILENCE_MAX.as_secs()))
            }
            None => match status {
                Some(status) if status.success() => return Ok(None),
                Some(status) => (expected, format!("the process died ({status})")),
                None => return Ok(None),
            },
        };
        Ok(Some(Failure { seed, error, said }))
    }

    /// Ends the process when the others failed, or when it says nothing for too long.
    fn watch(&self, stop: bool) {
        if let Some((child, since)) = &mut *lock(&self.running) {
            let is_hung = since.elapsed() > SILENCE_MAX;
            if is_hung {
                self.hung.store(true, Ordering::Relaxed);
            }
            if stop || is_hung {
                // It may have ended by itself, which is as good.
                let _ = child.kill();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        assert_eq!(
            parse(
                "soak: 17 ok, 24 messages, 5 delivered, 2 sessions, 2 violations, 79 packets, trace 1a 2b 3c"
            ),
            Line::Done {
                seed: 17,
                messages: 24,
                trace: Some("1a 2b 3c"),
            }
        );
        assert_eq!(
            parse("soak: 17 ok, 24 messages"),
            Line::Done {
                seed: 17,
                messages: 24,
                trace: None,
            }
        );
        assert_eq!(
            parse("soak: 3 failed: message 0x4: lost, not found"),
            Line::Failed {
                seed: 3,
                error: "message 0x4: lost, not found"
            }
        );
        for other in [
            "",
            "soak: ",
            "soak: x ok, 1 messages",
            "running 1 test",
            "soak: 1 ok",
        ] {
            assert_eq!(parse(other), Line::Other, "{other}");
        }
    }

    /// What an ordinary run leaves out stands on the page, and is nowhere more than nine tenths.
    #[test]
    fn the_page_lists_every_long_loop() {
        let page = std::fs::read_to_string(root().join("docs/ci.md")).unwrap();
        let mut loops = 0;
        for entry in std::fs::read_dir(root().join("dataplane/src/sim_tests")).unwrap() {
            let path = entry.unwrap().path();
            let Ok(text) = std::fs::read_to_string(&path) else {
                continue;
            };
            let module = path.file_stem().unwrap().to_str().unwrap();
            for call in text.split("times(").skip(1) {
                let counts = call.split_once(')').unwrap().0.replace('_', "");
                let Some((Ok(ordinary), Ok(full))) = counts
                    .split_once(", ")
                    .map(|(a, b)| (a.parse::<u64>(), b.parse::<u64>()))
                else {
                    continue;
                };
                loops += 1;
                assert!(full <= 10 * ordinary, "{module}: {counts}");
                let row = format!("| {ordinary} | {full} |");
                assert!(
                    page.lines()
                        .any(|line| line.contains(&format!("`{module}`")) && line.contains(&row)),
                    "{module}: {row}"
                );
            }
        }
        assert!(loops > 0);
    }

    /// A shell in the test program's place: this is about processes, ranges and what they say.
    fn shell(each: &str) -> Subject {
        let script = format!(
            "n=${{LM_SOAK_SEEDS%..*}}; while [ $n -lt ${{LM_SOAK_SEEDS#*..}} ]; do {each}; n=$((n+1)); done"
        );
        Subject {
            program: PathBuf::from("/bin/sh"),
            folder: PathBuf::from("."),
            arguments: vec!["-c".to_owned(), script],
            with: String::new(),
            record: false,
        }
    }

    const OK: &str = "echo soak: $n ok, 2 messages";

    #[test]
    fn every_seed_runs_once() {
        for (seeds, jobs) in [(0..1, 4), (5..105, 3), (7..1000, 2)] {
            let count = seeds.end - seeds.start;
            let progress = soak(&shell(OK), seeds, jobs).unwrap();
            assert_eq!(progress.done.into_inner(), count);
            assert_eq!(progress.messages.into_inner(), 2 * count);
            assert!(progress.failure.into_inner().unwrap().is_none());
        }
    }

    #[test]
    fn a_failure_stops_all_and_is_told() {
        let each = format!(
            "if [ $n = 60 ]; then echo why >&2; echo soak: 60 failed: wrong byte; exit 101; fi; {OK}"
        );
        let progress = soak(&shell(&each), 0..1_000_000, 3).unwrap();
        let failure = progress.failure.into_inner().unwrap();
        let expected = Failure {
            seed: 60,
            error: "wrong byte".to_owned(),
            said: "why\n".to_owned(),
        };
        assert_eq!(failure, Some(expected));
        assert!(progress.done.into_inner() < 500_000);
        // A process that dies names its seed by its silence.
        let each = format!("if [ $n = 9 ]; then kill -9 $$; fi; {OK}");
        let progress = soak(&shell(&each), 0..20, 1).unwrap();
        let failure = progress.failure.into_inner().unwrap().unwrap();
        assert!(
            failure.seed == 9 && failure.error.contains("signal: 9"),
            "{failure:?}"
        );
    }
}
