//! The test programs that `cargo xtask soak` runs.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::driver::{Failure, SEEDS, Soak, Tally, lock};
use super::traces::RECORD_VARIABLE;
use crate::bed::Launch;
use crate::workspace::{cargo, command_line, root};

/// A range of seeds takes a few seconds; one that takes so long hangs.
const LIMIT: Duration = Duration::from_secs(180);

/// A test program, and the test in it that runs seeds.
pub(super) struct World {
    /// What is shown while it is built.
    name: &'static str,
    package: &'static str,
    /// Where cargo runs its tests.
    pub(super) folder: &'static str,
    /// Cargo's way to name it, and its name among what cargo built.
    select: &'static [&'static str],
    target: &'static str,
    pub(super) test: &'static str,
    /// What the command line needs beside the seed.
    pub(super) option: &'static str,
}

/// Two engines on the simulated NIC.
pub(super) const ENGINES: World = World {
    name: "the simulated world",
    package: "lm-dataplane",
    folder: "dataplane",
    select: &["--lib"],
    target: "lm_dataplane",
    test: "sim_tests::soak::seeds_settle",
    option: "",
};

/// Many hosts' admission on a simulated network.
pub(super) const ADMISSION: World = World {
    name: "the simulated cluster",
    package: "lm-protocol",
    folder: "lm-protocol",
    select: &["--test", "admission"],
    target: "admission",
    test: "soak::seeds_settle",
    option: " --admission",
};

/// The test of [`ADMISSION`] that prints how long grants take.
const RATES: &str = "rates::table";
/// The test program, as cargo names it among what it built.
pub(crate) fn executable(messages: &str, target: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find(|message| {
            message["reason"] == "compiler-artifact"
                && message["target"]["name"] == target
                && message["profile"]["test"] == true
        })
        .and_then(|message| message["executable"].as_str().map(PathBuf::from))
}

fn build(world: &World) -> Result<PathBuf> {
    eprintln!("building {} (release)", world.name);
    let mut command = cargo();
    command
        .args(["test", "--release", "--quiet", "--package", world.package])
        .args(world.select)
        .args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let line = command_line(&command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    ensure!(
        output.status.success(),
        "`{line}` failed ({}); its own message is above",
        output.status
    );
    executable(&String::from_utf8_lossy(&output.stdout), world.target)
        .with_context(|| format!("`{line}` named no test program"))
}

/// Seeds of a world, a process for each range.
pub(super) struct Simulated {
    program: PathBuf,
    arguments: Vec<String>,
    /// Where it runs, and variables beside the seeds, as env(1) takes them.
    environment: Vec<String>,
    /// What repeats a seed, without it.
    again: String,
    /// The hashes of seeds that told them.
    traces: Mutex<BTreeMap<u64, String>>,
}

impl Simulated {
    /// Builds a world's program, which is told the kinds of trouble. To `record` nothing is compared with recorded traces.
    pub(super) fn new(world: &World, with: &str, record: bool) -> Result<Simulated> {
        let folder = root().join(world.folder).display().to_string();
        let mut environment = vec!["-C".to_owned(), folder, format!("LM_SOAK_WITH={with}")];
        environment.extend(record.then(|| format!("{RECORD_VARIABLE}=1")));
        let mut again = format!("cargo xtask soak{}", world.option);
        if !with.is_empty() {
            again += &format!(" --with {with}");
        }
        let arguments = ["--exact", world.test, "--nocapture"].map(str::to_owned);
        Ok(Simulated {
            environment,
            again,
            ..Simulated::of(build(world)?, arguments.to_vec())
        })
    }

    fn of(program: PathBuf, arguments: Vec<String>) -> Simulated {
        Simulated {
            program,
            arguments,
            environment: Vec::new(),
            again: String::new(),
            traces: Mutex::default(),
        }
    }

    /// The program, and the traces of the seeds that it ran.
    pub(super) fn into_parts(self) -> (PathBuf, BTreeMap<u64, String>) {
        let traces = std::mem::take(&mut *lock(&self.traces));
        (self.program, traces)
    }
}

impl Soak for Simulated {
    fn run(&self, seeds: Range<u64>, tally: &Tally, is_stopped: &AtomicBool) -> Result<Option<Failure>> {
        let launch = Launch::new("env")
            .args(&self.environment)
            .arg(format!("LM_SOAK_SEEDS={}..{}", seeds.start, seeds.end))
            .arg(&self.program)
            .args(&self.arguments);
        let mut program = launch.time_limit(2 * LIMIT).spawn()?;
        let started = Instant::now();
        let mut has_ended = false;
        while !has_ended && started.elapsed() < LIMIT && !is_stopped.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(2));
            has_ended = program.has_ended()?;
        }
        let output = program.stop()?;
        let mut expected = seeds.start;
        for line in output.stdout.lines() {
            match parse(line) {
                Line::Done {
                    seed,
                    messages,
                    trace,
                } => {
                    lock(&self.traces).extend(trace.map(|trace| (seed, trace.to_owned())));
                    expected = seed + 1;
                    tally.add(SEEDS, 1);
                    tally.add("messages", messages);
                }
                Line::Failed { seed, error } => {
                    let (error, said) = (error.to_owned(), output.stderr);
                    return Ok(Some(Failure { seed, error, said }));
                }
                Line::Other => {}
            }
        }
        let error = match has_ended {
            _ if expected == seeds.end => return Ok(None),
            true if output.status.success() => return Ok(None),
            true => format!("the process died ({})", output.status),
            false if is_stopped.load(Ordering::Relaxed) => return Ok(None),
            false => format!("no end after {} s", LIMIT.as_secs()),
        };
        Ok(Some(Failure {
            seed: expected,
            error,
            said: output.stderr,
        }))
    }

    fn again(&self, seed: u64) -> String {
        format!("{} --seeds 1 --from {seed}", self.again)
    }
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

/// Prints the table of both admission policies. What the test program itself says around it is left out.
pub(super) fn rates(program: &Path) -> Result<()> {
    let mut command = Command::new(program);
    command
        .args(["--exact", RATES, "--nocapture"])
        .env("LM_ADMISSION_TABLE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let line = command_line(&command);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start `{line}`"))?;
    let mut lines = 0;
    for said in BufReader::new(child.stdout.take().expect("stdout is piped")).lines() {
        let said = said.with_context(|| format!("cannot read what `{line}` says"))?;
        if said.starts_with('|') {
            println!("{said}");
            lines += 1;
        }
    }
    let status = child.wait().context("cannot wait for the test program")?;
    ensure!(status.success() && lines > 2, "`{line}` failed ({status})");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soak::driver;

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

    /// A shell in the test program's place: this is about processes, ranges and what they say.
    fn shell(each: &str) -> Simulated {
        let script = format!(
            "n=${{LM_SOAK_SEEDS%..*}}; while [ $n -lt ${{LM_SOAK_SEEDS#*..}} ]; do {each}; n=$((n+1)); done"
        );
        Simulated::of(PathBuf::from("/bin/sh"), vec!["-c".to_owned(), script])
    }

    fn failure_of(each: &str, seeds: Range<u64>) -> String {
        let failure = driver::run(&shell(each), seeds, 3).err();
        failure.expect("a seed fails").to_string()
    }

    const OK: &str = "echo soak: $n ok, 2 messages";

    #[test]
    fn every_seed_runs_once() {
        for (seeds, jobs) in [(0..1, 4), (5..105, 3), (7..1000, 2)] {
            let count = seeds.end - seeds.start;
            let soak = shell(OK);
            let tally = driver::run(&soak, seeds, jobs).unwrap();
            assert_eq!((tally.of(SEEDS), tally.of("messages")), (count, 2 * count));
        }
        let silent = failure_of("true", 0..2);
        assert!(silent.contains("0 of 2 seeds ran"), "{silent}");
    }

    #[test]
    fn a_failure_stops_all_and_is_told() {
        let each = format!(
            "if [ $n = 60 ]; then echo why >&2; echo soak: 60 failed: wrong byte; exit 101; fi; {OK}"
        );
        let error = failure_of(&each, 0..1_000_000);
        assert!(
            error.starts_with("seed 60 failed after ")
                && error.contains("wrong byte; again:  --seeds 1 --from 60"),
            "{error}"
        );
        let done = error.split(' ').nth(4).unwrap().parse::<u64>().unwrap();
        assert!(done < 500_000, "{error}");
        let failure = shell(&each)
            .run(0..100, &Tally::default(), &AtomicBool::new(false))
            .unwrap();
        let expected = Failure {
            seed: 60,
            error: "wrong byte".to_owned(),
            said: "why\n".to_owned(),
        };
        assert_eq!(failure, Some(expected));
        // A process that dies names its seed by its silence.
        let each = format!("if [ $n = 9 ]; then kill -9 $$; fi; {OK}");
        let failure = shell(&each)
            .run(0..20, &Tally::default(), &AtomicBool::new(false))
            .unwrap()
            .unwrap();
        assert!(
            failure.seed == 9 && failure.error.contains("signal: 9"),
            "{failure:?}"
        );
    }

    #[test]
    fn the_test_program_is_found_among_what_cargo_built() {
        let messages = r#"
{"reason":"compiler-artifact","target":{"name":"lm_dataplane"},"profile":{"test":false},"executable":null}
not JSON
{"reason":"compiler-artifact","target":{"name":"lm_dataplane"},"profile":{"test":true},"executable":"/t/lm_dataplane-1"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(
            executable(messages, "lm_dataplane"),
            Some(PathBuf::from("/t/lm_dataplane-1"))
        );
        assert_eq!(executable(messages, "admission"), None);
        assert_eq!(executable("", "lm_dataplane"), None);
    }
}
