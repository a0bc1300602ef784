//! `cargo xtask bench compare`: `lm-bench compare` between two hosts on this machine, with a link for each kind of system.

use std::time::Duration;

use anyhow::Result;

use super::frozen::{self, Revision};

use crate::bed::links::LinkConfig;
use crate::bed::{Bed, BedConfig, Launch, Side};
use crate::machine::{command_line, revision, two_cores};
use crate::workspace::{self, Programs};

/// As long as anybody may want to measure.
const LONG: Duration = Duration::from_secs(12 * 3600);

/// Measure LM beside everybody else between two hosts on this machine: kernel UDP and TCP in their best settings, QUIC, bare AF_XDP, and
/// whatever standard tools are installed.
///
/// Makes two hosts with five equal links, segmentation offloads off: for LM's gate; without an XDP program, for the kernel; the same with
/// receive packet steering, with queues that sockets can poll (GRO), and with all offloads on. Each side has a core; leave the machine alone meanwhile. A round of `compare`
/// takes about a minute; each measurement waits a while for near cores, and is kept with how far apart they were.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    /// What to run: compare, latency, throughput, cpu or limit
    #[arg(long, default_value = "compare")]
    command: String,
    /// Cargo features that lm-bench is built with besides its own: xsk-rs, for bare AF_XDP by that crate
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Vec<String>,
    /// Also measure LM as it was at these revisions, as lm@REVISION, in turns with this tree's: before-house,242f8ac. Each is built once, in a
    /// git worktree below target/frozen; a figure of this tree over theirs that is worse for sure is MISSED
    #[arg(long, value_name = "REVISIONS", value_delimiter = ',')]
    frozen: Vec<String>,
    /// With a switch, a bridge in a namespace of its own, on each link
    #[arg(long)]
    switch: bool,
    /// MTU of the links, in bytes
    #[arg(long, default_value_t = 1500)]
    mtu: u16,
    /// Further options of lm-bench, after --: -- --rounds 3 --json FILE
    #[arg(last = true)]
    options: Vec<String>,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let revisions = frozen::revisions(workspace::root(), &arguments.frozen)?;
    let frozen: Vec<String> = revisions.iter().map(Revision::built).collect::<Result<_>>()?;
    let frozen = || frozen.iter().flat_map(|build| ["--frozen", build]);
    let programs = Programs::build_with(&arguments.features)?;
    let [near, far] = two_cores();
    let bed = Bed::new(&BedConfig {
        mtu: arguments.mtu,
        senders: arguments.switch.then_some(1),
        ..BedConfig::default()
    })?;
    let plain = LinkConfig {
        mtu: arguments.mtu,
        queues: BedConfig::default().queues,
        segmentation_offloads: false,
        gro: false,
        rps: [0, 0],
    };
    let polled = LinkConfig { gro: true, ..plain };
    let steered = LinkConfig {
        rps: [1 << near, 1 << far],
        ..plain
    };
    let offloads = LinkConfig {
        segmentation_offloads: true,
        ..plain
    };
    let links = [
        ("--peer-host", bed.add_link(1, &plain)?),
        ("--rps-host", bed.add_link(2, &steered)?),
        ("--offloads-host", bed.add_link(3, &offloads)?),
        ("--napi-host", bed.add_link(4, &polled)?),
    ];
    let lm_bench = programs.path("lm-bench");
    let launch = || Launch::new(&lm_bench).time_limit(LONG);
    let serve = launch().args(["serve", "--core", &far.to_string()]);
    let serve = serve.args([
        "--bind",
        &format!("{}:7170", Side::Right.address()),
        "--from-anyone",
    ]);
    let serve = serve.args(frozen());
    let mut server = bed.right().spawn(serve)?;
    server.await_text("ready")?;
    let mut measure = launch()
        .arg(&arguments.command)
        .arg(Side::Right.address().to_string())
        .args(["--core", &near.to_string(), "--near-cores"]);
    if arguments.switch {
        measure = measure.args(["--place", "through a switch"]);
    }
    let command = command_line(std::env::args().skip(1));
    measure = measure.args(["--setting", &format!("command={command}")]);
    if let Some(commit) = revision() {
        measure = measure.args(["--setting", &format!("commit={commit}")]);
    }
    measure = measure.args(frozen());
    for (option, address) in links {
        measure = measure.arg(option).arg(address.to_string());
    }
    let measuring = bed.left().spawn(measure.args(&arguments.options))?;
    print!("{}", measuring.finish_aloud()?.stdout);
    server.stop()?;
    Ok(())
}
