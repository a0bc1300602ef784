//! `cargo xtask soak`: many seeds of the simulated world, in parallel processes of one test program.
//!
//! The test `sim_tests::soak::seeds_settle` of `lm-dataplane`, or `soak::seeds_settle` of `lm-protocol`'s admission tests, runs the
//! seeds that `LM_SOAK_SEEDS` names and says one line for each. Here they are handed out in small ranges, counted, and stopped at the
//! first failure.

mod cluster;
mod driver;
pub(crate) mod fates;
mod kernel;
mod traces;
pub(crate) mod world;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::workspace::{cargo, run as run_command};
use world::{ADMISSION, ENGINES, Simulated, World, rates};

/// Makes the tests' long loops run in full; `dataplane/src/sim_tests/mod.rs` reads it.
const LONG_VARIABLE: &str = "LM_LONG";
/// Run random beds under random impairments on the simulated NIC, seed after seed.
///
/// Each seed is a bed of two hosts, a load and everything that goes wrong: loss, duplication, reordering, delay, foreign
/// packets, corrupt bytes, exhausted rings, writers that pause or give up, hosts that pause or die. Checked is that every
/// delivered message is the one that was sent, every other one was reported, all memory came back and every packet is accounted
/// for. Stops at the first failure and says how to repeat it. Needs no root.
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
/// With --long: the tests' own long loops, of which an ordinary run takes a part, in full (docs/testing.md lists them).
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
    /// nothing notices; `reading`, messages are read while they arrive.
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

/// The tests on the simulated NIC, and of steady real-time messages on veth, with their loops in full, built as they are for `cargo xtask test`:
/// with overflow checked.
fn long_loops() -> Result<()> {
    for tests in [
        ["lm-dataplane", "--lib", "sim_tests::"],
        ["lm-realtime", "--test", "steady"],
    ] {
        run_command(
            cargo()
                .args(["test", "--package"])
                .args(tests)
                .env(LONG_VARIABLE, "1"),
        )?;
    }
    Ok(())
}

/// Seeds of a simulated world; gives the program that ran them, and their traces.
fn simulated(
    arguments: &Arguments,
    seeds: u64,
    world: &'static World,
) -> Result<(PathBuf, BTreeMap<u64, String>)> {
    let last = arguments.from.checked_add(seeds);
    let last = last.context("no seed is beyond 2^64; choose fewer --seeds or a lower --from")?;
    let soak = Simulated::new(
        world,
        arguments.with.as_deref().unwrap_or_default(),
        arguments.record,
    )?;
    let cpus = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let jobs = arguments.jobs.map_or(cpus, u64::from);
    driver::run(&soak, arguments.from..last, jobs)?;
    Ok(soak.into_parts())
}

#[cfg(test)]
mod tests {
    use crate::workspace::root;

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
