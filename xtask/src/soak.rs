//! `cargo xtask soak`: many seeds of the simulated world, by one test each of `lm-dataplane` and of `lm-protocol`,
//! which shares the seeds among the processors and stops at the first failure (`lm-protocol/tests/admission/seeds.rs`);
//! and the same questions to real kernels, by `cluster` and `kernel`.

mod cluster;
pub(crate) mod fates;
mod kernel;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::test_programs::differences;
use crate::workspace::{cargo, root, run as run_command};

/// Makes the tests' long loops run in full; `dataplane/src/sim_tests/mod.rs` reads it.
const LONG_VARIABLE: &str = "LM_LONG";
/// The test program and the test that run seeds of two engines on the simulated NIC.
const ENGINES: (&str, &str) = ("lm-dataplane --lib", "sim_tests::soak::seeds_settle");
/// Those that run seeds of many hosts' admission, and the test that prints how long grants take.
const ADMISSION: (&str, &str) = ("lm-protocol --test admission", "soak::seeds_settle");
const RATES: &str = "rates::table";
/// Seeds that are recorded, from 0 on: a seed and its three hashes, one line a seed.
const RECORDED: u64 = 2000;
const SEEDS_FILE: &str = "dataplane/traces/seeds.txt";
/// A test and the three hashes of all that it ran, one line a test.
const TESTS_FILE: &str = "dataplane/traces/tests.txt";

/// Run random beds under random impairments on the simulated NIC, seed after seed.
///
/// Each seed is a bed of two hosts, a load and everything that goes wrong: loss, duplication, reordering, delay,
/// foreign packets, corrupt bytes, exhausted rings, writers that pause or give up, hosts that pause or die. Checked is
/// that every delivered message is the one that was sent, every other one was reported, all memory came back and every
/// packet is accounted for. Stops at the first failure and says how to repeat it. Needs no root.
///
/// The packets, events and messages of the first 2000 seeds must be those that were recorded, hash by hash; with
/// --traces, all of these seeds run and all simulated tests as well. A change that is meant to do something else is
/// recorded with --record.
///
/// With --admission: seeds of the admission between up to a hundred hosts instead, with loss, duplication, reordering,
/// clocks that differ, hosts and daemons that die, and somebody who records and sends again. Checked is that under
/// `exclusive` there are never two active receivers, that every request is answered, that leases end in time, that
/// memory stays bounded, and that nobody without the key changes anything. Then a table of both policies: grant latency
/// and utilisation for 10, 100 and 1000 hosts.
///
/// With --cluster: all to all on a cluster of hosts with an admission daemon each, while every second a daemon or a
/// program is killed and started again. Checked is that no message was wrong, that every session ends in its time, that
/// nothing is left in any gate, and that the daemons grow in neither descriptors nor memory. Needs root.
///
/// With --long: the tests' own long loops, of which an ordinary run takes a part, in full (docs/testing.md lists them).
///
/// With --kernel N: N runs on the real kernel, through the impairment box, with messages whose every byte both ends
/// know from the seed. Needs root.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// How many seeds on the simulated NIC.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first seed; with --cluster it decides what is killed, and contents.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// More kinds of trouble: `corrupt-unverified`, any byte changed where there are no digests either, which
    /// nothing notices; `reading`, messages are read while they arrive.
    #[arg(long, value_name = "KIND,…", conflicts_with = "admission")]
    with: Option<String>,
    /// The admission between hosts instead of the data path.
    #[arg(long, conflicts_with = "kernel")]
    admission: bool,
    /// Killed daemons and programs in a cluster of 16 hosts, for this number of seconds.
    #[arg(long, conflicts_with_all = ["admission", "kernel", "seeds", "with"])]
    #[arg(value_name = "SECONDS", num_args = 0..=1)]
    #[arg(default_missing_value = "60", value_parser = clap::value_parser!(u32).range(5..=3600))]
    cluster: Option<u32>,
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
    #[arg(long, default_value_t = 0, value_name = "SEEDS", conflicts_with = "seeds")]
    kernel: u64,
}

/// Runs `cargo xtask soak`.
pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(seconds) = arguments.cluster {
        return cluster::run(seconds, arguments.from);
    }
    if arguments.long {
        return long_loops();
    }
    if arguments.kernel > 0 {
        return kernel::soak(arguments.from, arguments.kernel);
    }
    let is_whole = arguments.traces || arguments.record;
    let seeds = if is_whole { RECORDED } else { arguments.seeds };
    let last = arguments.from.checked_add(seeds);
    let last = last.context("no seed is beyond 2^64; choose fewer --seeds or a lower --from")?;
    let tests = if arguments.admission { ADMISSION } else { ENGINES };
    let mut command = only(tests.0, tests.1);
    command
        .env("LM_SOAK_SEEDS", format!("{}..{last}", arguments.from))
        .env("LM_SOAK_WITH", arguments.with.as_deref().unwrap_or_default());
    if arguments.record {
        command.env("LM_SOAK_RECORD", root().join(SEEDS_FILE));
    }
    run_command(&mut command)?;
    if is_whole {
        return traces(arguments.record);
    }
    if arguments.admission && seeds > 1 {
        run_command(only(ADMISSION.0, RATES).env("LM_ADMISSION_TABLE", "1"))?;
    }
    Ok(())
}

/// A test program of a package.
fn tests_of(words: &str) -> Command {
    let mut command = cargo();
    command.args(["test", "--release", "--quiet", "--package"]);
    command.args(words.split(' ')).arg("--");
    command
}

/// Of a test program one test, which says something.
fn only(words: &str, test: &str) -> Command {
    let mut command = tests_of(words);
    command.args(["--exact", test, "--nocapture"]);
    command
}

/// Runs all simulated tests; whether they did what they did when they were recorded, or from now on are to do.
///
/// # Errors
/// Which tests did something else than was recorded.
fn traces(is_recorded: bool) -> Result<()> {
    let (kept, file) = (root().join(TESTS_FILE), root().join("target/traces.txt"));
    // The tests append to it.
    std::fs::write(&file, "").with_context(|| format!("cannot write {}", file.display()))?;
    run_command(
        tests_of(ENGINES.0)
            .arg("sim_tests::")
            .env("LM_TRACES", &file)
            // Random tests take what follows from the seed.
            .env("PROPTEST_RNG_SEED", "1"),
    )?;
    let read = |path: &Path| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let ran: BTreeSet<String> = read(&file)?.lines().map(str::to_owned).collect();
    ensure!(!ran.is_empty(), "the simulated tests wrote no traces");
    if is_recorded {
        let text: String = ran.iter().map(|line| format!("{line}\n")).collect();
        return std::fs::write(kept, text).with_context(|| format!("cannot write {TESTS_FILE}"));
    }
    let differences = differences(&read(&kept)?, &ran);
    ensure!(
        differences.is_empty(),
        "other than in {TESTS_FILE} (test, packets, events, messages); where that is meant: \
         cargo xtask soak --record\n{}",
        differences.join("\n")
    );
    println!("{} simulated tests as recorded", ran.len());
    Ok(())
}

/// The tests on the simulated NIC, and of steady real-time messages on veth, with their loops in full, built as they
/// are for `cargo xtask test`: with overflow checked.
fn long_loops() -> Result<()> {
    for tests in ["lm-dataplane --lib sim_tests::", "lm-realtime --test steady"] {
        let mut command = cargo();
        command.args(["test", "--package"]).args(tests.split(' '));
        run_command(command.env(LONG_VARIABLE, "1"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::workspace::root;

    #[test]
    fn the_tests_that_run_seeds_are_there() {
        let names = std::fs::read_to_string(root().join("xtask/test-names.txt")).unwrap();
        for (program, test) in [
            ("dataplane/src/lib.rs", super::ENGINES.1),
            ("lm-protocol/tests/admission/main.rs", super::ADMISSION.1),
            ("lm-protocol/tests/admission/main.rs", super::RATES),
        ] {
            assert!(
                names.lines().any(|line| line == format!("{program} {test}")),
                "{test}"
            );
        }
    }

    /// What an ordinary run leaves out stands on the page, and is nowhere more than nine tenths.
    #[test]
    fn the_page_lists_every_long_loop() {
        let page = std::fs::read_to_string(root().join("docs/testing.md")).unwrap();
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
}
