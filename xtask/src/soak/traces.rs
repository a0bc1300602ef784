//! `cargo xtask soak --traces` and `--record`: whether the simulated world does what it did when its traces were recorded.
//! `dataplane/src/sim_tests/trace.rs` says what is in a trace. The seeds' own program compares the seeds.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::world::ENGINES;
use crate::workspace::{command_line, root};

/// So many seeds are recorded, from 0 on.
pub(super) const SEEDS: u64 = 2000;
/// A seed and its three hashes, one line a seed.
const SEEDS_FILE: &str = "dataplane/traces/seeds.txt";
/// A test and the three hashes of all that it ran, one line a test.
const TESTS_FILE: &str = "dataplane/traces/tests.txt";
/// Where a run of the tests writes the same.
const RUN_FILE: &str = "target/traces.txt";
/// Makes the seeds' own program compare nothing; `dataplane/src/sim_tests/soak.rs` reads it.
pub(super) const RECORD_VARIABLE: &str = "LM_SOAK_RECORD";
/// Random tests take what follows from this.
const PROPTEST_SEED: &str = "1";

pub(super) fn record(program: &Path, seeds: &BTreeMap<u64, String>) -> Result<()> {
    let seeds: String = (seeds.iter())
        .map(|(seed, hashes)| format!("{seed} {hashes}\n"))
        .collect();
    write(SEEDS_FILE, &seeds)?;
    write(TESTS_FILE, &run_tests(program)?)
}

/// # Errors
/// Which tests did something else than was recorded.
pub(super) fn compare(program: &Path) -> Result<()> {
    let recorded = std::fs::read_to_string(root().join(TESTS_FILE));
    let recorded = recorded.with_context(|| format!("cannot read {TESTS_FILE}"))?;
    let now = run_tests(program)?;
    let differences = differences(&recorded, &now);
    if !differences.is_empty() {
        bail!(
            "other than in {TESTS_FILE}; where that is meant: cargo xtask soak --record\n{}",
            differences.join("\n")
        );
    }
    println!("{} simulated tests as recorded", now.lines().count());
    Ok(())
}

fn write(file: &str, text: &str) -> Result<()> {
    std::fs::write(root().join(file), text).with_context(|| format!("cannot write {file}"))?;
    println!("{} lines are in {file}", text.lines().count());
    Ok(())
}

/// Runs all simulated tests; gives a line for each, in the order of their names.
fn run_tests(program: &Path) -> Result<String> {
    let file = root().join(RUN_FILE);
    // The tests append to it.
    std::fs::write(&file, "").with_context(|| format!("cannot write {RUN_FILE}"))?;
    let mut command = Command::new(program);
    command
        .arg("sim_tests::")
        .current_dir(root().join(ENGINES.folder))
        .env("LM_TRACES", &file)
        .env("PROPTEST_RNG_SEED", PROPTEST_SEED)
        .env(RECORD_VARIABLE, "1")
        .env_remove("LM_SOAK_SEEDS")
        .stdin(Stdio::null());
    let line = command_line(&command);
    let output = command
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    ensure!(
        output.status.success(),
        "`{line}` failed ({})\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {RUN_FILE}"))?;
    let mut lines: Vec<&str> = text.lines().collect();
    ensure!(!lines.is_empty(), "`{line}` wrote no traces");
    lines.sort_unstable();
    Ok(lines.iter().map(|line| format!("{line}\n")).collect())
}

/// What differs between two lists of tests, one line a test.
fn differences(recorded: &str, now: &str) -> Vec<String> {
    let of = |text: &str| -> BTreeMap<String, Vec<String>> {
        let words = text
            .lines()
            .map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        words
            .filter_map(|words| Some((words.first()?.clone(), words[1..].to_vec())))
            .collect()
    };
    let (recorded, now) = (of(recorded), of(now));
    let mut differences = Vec::new();
    for (test, hashes) in &now {
        match recorded.get(test) {
            None => differences.push(format!("{test}: new")),
            Some(before) => {
                let kinds = ["packets", "events", "messages"].iter();
                let changed = kinds.zip(before.iter().zip(hashes)).filter(|(_, (a, b))| a != b);
                let changed: Vec<&str> = changed.map(|(kind, _)| *kind).collect();
                if !changed.is_empty() {
                    differences.push(format!("{test}: other {}", changed.join(", ")));
                }
            }
        }
    }
    let gone = recorded.keys().filter(|test| !now.contains_key(*test));
    differences.extend(gone.map(|test| format!("{test}: vanished")));
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_does_something_else_is_named() {
        let recorded = "a 1 2 3\nb 1 2 3\nc 1 2 3\n";
        assert_eq!(differences(recorded, recorded), Vec::<String>::new());
        assert_eq!(
            differences(recorded, "a 1 2 3\nb 1 5 6\nd 1 2 3\n"),
            ["b: other events, messages", "d: new", "c: vanished"]
        );
    }
}
