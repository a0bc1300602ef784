//! `cargo xtask bench compare`: `lm-bench compare` between two hosts on this machine, or through a box that loses packets.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::bed::links::LinkConfig;
use crate::bed::{Bed, BedConfig, Impairments, Launch, Side};
use crate::machine::{command_line, revision, two_cores};
use crate::workspace::Programs;

/// As long as anybody may want to measure.
const LONG: Duration = Duration::from_secs(12 * 3600);

/// Measure LM beside kernel UDP and TCP, bare AF_XDP, and whatever standard tools are installed, between two hosts on this machine.
///
/// Makes two hosts with two equal links, segmentation offloads off: for LM's gate, and without an XDP program for the kernel; with --loss there is
/// one. Each side has a core; leave the machine alone meanwhile. A round takes about a minute.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// With a switch, a bridge in a namespace of its own, on each link
    #[arg(long)]
    switch: bool,
    /// MTU of the links, in bytes
    #[arg(long, default_value_t = 1500)]
    mtu: u16,
    /// Through an impairment box that loses this part of the packets in both directions: 1%
    #[arg(long, value_name = "PART", conflicts_with_all = ["switch", "mtu"])]
    loss: Option<String>,
    /// Options of lm-bench compare, after --: -- --rounds 3 --json FILE
    #[arg(last = true)]
    options: Vec<String>,
}

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let programs = Programs::build()?;
    let command = command_line(std::env::args().skip(1));
    let mut words = vec!["--setting".to_owned(), format!("command={command}")];
    if let Some(commit) = revision() {
        words.extend(["--setting".to_owned(), format!("commit={commit}")]);
    }
    // What comes out of the box is received on the core of the host that it goes to, as between two machines: without that, the sender's
    // core would do the box's work and the receiver's as well, packet by packet.
    let bed = Bed::new(&BedConfig {
        mtu: arguments.mtu,
        senders: arguments.switch.then_some(1),
        with_box: arguments.loss.is_some(),
        box_cores: arguments.loss.as_ref().map(|_| two_cores()),
        ..BedConfig::default()
    })?;
    let loss = arguments.loss.as_deref().map(|loss| Impairments::loss(loss, 1));
    let lossy = loss
        .map(|loss| bed.start_box(&programs.path("lm-bench"), &loss))
        .transpose()?;
    if lossy.is_none() {
        let plain = LinkConfig {
            mtu: arguments.mtu,
            ..PLAIN
        };
        words.extend(["--peer-host".to_owned(), bed.add_link(1, &plain)?.to_string()]);
    }
    words.extend_from_slice(&arguments.options);
    let printed = between(&bed, &programs, words);
    if let Some(lossy) = lossy {
        let counters = lossy.stop()?;
        for direction in ["rightward", "leftward"] {
            let overrun = counters[direction]["overrun"].as_u64().unwrap_or(0);
            if overrun > 0 {
                println!("warning: the box's interfaces dropped {overrun} packets of their own {direction}");
            }
        }
    }
    print!("{}", printed?);
    Ok(())
}

/// The demonstration's figures, in so many rounds and in a file; what `lm-bench` printed.
pub(crate) fn for_show(programs: &Programs, rounds: u32, json: &Path) -> Result<String> {
    let bed = Bed::new(&BedConfig::default())?;
    let systems = "lm,lm --integrity none,udp-spinning,udp-blocking";
    let mut words = ["--systems", systems, "--sizes", "64K"]
        .map(str::to_owned)
        .to_vec();
    words.extend(["--rounds".to_owned(), rounds.to_string()]);
    words.extend(["--peer-host".to_owned(), bed.add_link(1, &PLAIN)?.to_string()]);
    words.extend(["--json".to_owned(), json.to_string_lossy().into_owned()]);
    between(&bed, programs, words)
}

/// Segmentation offloads are off for everyone.
const PLAIN: LinkConfig = LinkConfig {
    mtu: 1500,
    queues: 2,
    segmentation_offloads: false,
};

/// Runs `lm-bench compare` on the left host, with `serve` on the right one; what it printed.
fn between(bed: &Bed, programs: &Programs, words: Vec<String>) -> Result<String> {
    let [near, far] = two_cores();
    let right = Side::Right.address();
    let launch = || Launch::new(programs.path("lm-bench")).time_limit(LONG);
    let serve = launch().args(["serve", "--core", &far.to_string(), "--from-anyone"]);
    let mut server = bed
        .right()
        .spawn(serve.args(["--bind", &format!("{right}:7170")]))?;
    server.await_text("ready")?;
    let measure = launch().args(["compare", &right.to_string(), "--core", &near.to_string()]);
    let output = bed.left().spawn(measure.args(words))?.finish_aloud()?;
    server.stop()?;
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_like_the_beds_own() {
        let bed = BedConfig::default();
        assert_eq!((PLAIN.mtu, PLAIN.queues), (bed.mtu, bed.queues));
    }
}
