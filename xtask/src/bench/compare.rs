//! `cargo xtask bench compare`: `lm-bench` between two hosts on this machine, with a link for each kind of system, or through a box that
//! loses packets.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::bed::links::LinkConfig;
use crate::bed::{Bed, BedConfig, Impairments, Launch, Side};
use crate::machine::{command_line, revision, two_cores};
use crate::workspace::Programs;

/// As long as anybody may want to measure.
const LONG: Duration = Duration::from_secs(12 * 3600);

/// Measure LM beside everybody else between two hosts on this machine: kernel UDP and TCP in their best settings, bare AF_XDP, and
/// whatever standard tools are installed.
///
/// Makes two hosts with five equal links, segmentation offloads off: for LM's gate; without an XDP program, for the kernel; the same with
/// receive packet steering, with queues that sockets can poll (GRO), and with all offloads on. Each side has a core; leave the machine alone meanwhile. A round of `compare`
/// takes about a minute; each measurement waits a while for near cores, and is kept with how far apart they were. A target that is missed is no
/// error. There are comparisons of their own beside this one: see the commands.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    options: Options,
    /// What to run: compare, latency, throughput, cpu or limit
    #[arg(long, default_value = "compare")]
    command: String,
    /// Cargo features that lm-bench is built with besides its own: xsk-rs, for bare AF_XDP by that crate
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Vec<String>,
    /// With a switch, a bridge in a namespace of its own, on each link
    #[arg(long)]
    switch: bool,
    /// MTU of the links, in bytes
    #[arg(long, default_value_t = 1500)]
    mtu: u16,
}

/// What every comparison by lm-bench has.
#[derive(Debug, clap::Args)]
struct Options {
    /// Further options of lm-bench, after --: -- --rounds 3 --json FILE
    #[arg(last = true)]
    options: Vec<String>,
}

#[derive(Debug, clap::Subcommand)]
enum Part {
    /// LM and kernel TCP (cubic, bbr) through an impairment box that loses packets in both directions, at 64 KiB and 1 MiB messages
    Loss {
        /// Parts of the packets to lose, each measured in turn
        #[arg(long, value_delimiter = ',', default_value = "0%,0.1%,1%,5%")]
        loss: Vec<String>,
        #[command(flatten)]
        options: Options,
    },
    /// Reliable beside unreliable delivery where nothing is lost, at 7168 B, 64 KiB and 1 MiB messages
    Delivery(Options),
}

/// LM as its tools have it stands first; TCP's checksums are left to the interfaces, so nobody computes one, and LM stands beside it without
/// digests, too.
const LOSSY: &str = "lm,lm-no-integrity,lm-no-integrity-partial,lm-no-integrity-unreliable,tcp-cubic,tcp-bbr";
/// Of these something is asked beside each TCP. That bbr keeps three quarters of what it reaches without loss, so that nothing can be twice as
/// fast on a link that both fill, makes it a target that is missed, not a lower one.
const LOSSY_ASKED: [&str; 3] = ["lm", "lm-no-integrity", "lm-no-integrity-partial"];
/// Pairs of which the first shall reach nearly all of the second.
const DELIVERIES: &str = "lm,lm-unreliable,lm-no-integrity,lm-no-integrity-unreliable";
const DELIVERIES_ASKED: [&str; 2] = [
    "lm/lm-unreliable=0.97",
    "lm-no-integrity/lm-no-integrity-unreliable=0.97",
];

const TEN_ROUNDS: (&str, &str) = ("--rounds", "10");

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.part {
        None => everybody(arguments),
        Some(Part::Loss { loss, options }) => through_box(loss, options),
        Some(Part::Delivery(options)) => deliveries(options),
    }
}

fn everybody(arguments: &Arguments) -> Result<()> {
    let lm_bench = LmBench::build(&arguments.options, &arguments.features)?;
    let [near, far] = two_cores();
    let bed = Bed::new(&BedConfig {
        mtu: arguments.mtu,
        senders: arguments.switch.then_some(1),
        ..BedConfig::default()
    })?;
    let plain = LinkConfig {
        mtu: arguments.mtu,
        ..PLAIN
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
    let mut words = words(&arguments.command);
    for (option, address) in [
        ("--peer-host", bed.add_link(1, &plain)?),
        ("--rps-host", bed.add_link(2, &steered)?),
        ("--offloads-host", bed.add_link(3, &offloads)?),
        ("--napi-host", bed.add_link(4, &polled)?),
    ] {
        words.extend([option.to_owned(), address.to_string()]);
    }
    if arguments.switch {
        words.extend(["--place", "through a switch"].map(str::to_owned));
    }
    lm_bench.measure(&bed, words, &[])
}

/// What comes out of the box is received on the core of the host that it goes to, as between two machines: without that, the sender's core
/// would do the box's work and the receiver's as well, packet by packet.
fn through_box(losses: &[String], options: &Options) -> Result<()> {
    let keeps = options.options.iter().any(|option| option == "--json");
    ensure!(
        losses.len() == 1 || !keeps,
        "a file keeps one loss rate; name it, as with --loss 1%"
    );
    let lm_bench = LmBench::build(options, &[])?;
    for loss in losses {
        let bed = Bed::new(&BedConfig {
            with_box: true,
            box_cores: Some(two_cores()),
            ..BedConfig::default()
        })?;
        let running = bed.start_box(&lm_bench.programs.path("lm-bench"), &Impairments::loss(loss, 1))?;
        let mut words = words("throughput");
        words.extend(["--place".to_owned(), format!("through a box, {loss} lost")]);
        for system in LOSSY_ASKED {
            for tcp in ["tcp-cubic", "tcp-bbr"] {
                words.extend([
                    "--least".to_owned(),
                    format!("{system}/{tcp}={}", asked_beside_tcp(loss)),
                ]);
            }
        }
        println!("\nThrough a box that loses {loss} of the packets:");
        let measured = lm_bench.measure(
            &bed,
            words,
            &[("--systems", LOSSY), ("--sizes", "64K,1M"), TEN_ROUNDS],
        );
        let counters = running.stop()?;
        for direction in ["rightward", "leftward"] {
            let overrun = counters[direction]["overrun"].as_u64().unwrap_or(0);
            if overrun > 0 {
                println!("warning: the box's interfaces dropped {overrun} packets of their own {direction}");
            }
        }
        measured?;
    }
    Ok(())
}

/// What LM shall reach of kernel TCP.
fn asked_beside_tcp(loss: &str) -> f64 {
    match loss.trim_end_matches('%').parse() {
        Ok(0.0) => 0.95,
        Ok(percent) if percent < 1.0 => 1.0,
        _ => 2.0,
    }
}

fn deliveries(options: &Options) -> Result<()> {
    let lm_bench = LmBench::build(options, &[])?;
    let bed = Bed::new(&BedConfig::default())?;
    let mut words = words("throughput");
    words.extend(
        DELIVERIES_ASKED
            .iter()
            .flat_map(|asked| ["--least", asked])
            .map(str::to_owned),
    );
    lm_bench.measure(
        &bed,
        words,
        &[("--systems", DELIVERIES), ("--sizes", "7168,64K,1M"), TEN_ROUNDS],
    )
}

/// The demonstration's figures, in so many rounds and in a file; what `lm-bench` printed.
pub(crate) fn for_show(programs: &Programs, rounds: u32, json: &Path) -> Result<String> {
    let bed = Bed::new(&BedConfig::default())?;
    let mut words = words("compare");
    words.extend(
        [
            "--systems",
            "lm,lm-no-integrity,udp-spinning,udp-blocking",
            "--sizes",
            "64K",
        ]
        .map(str::to_owned),
    );
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
    gro: false,
    rps: [0, 0],
};

/// A command of lm-bench towards the right host.
fn words(command: &str) -> Vec<String> {
    vec![command.to_owned(), Side::Right.address().to_string()]
}

/// The programs to measure with, and what the user adds.
struct LmBench<'a> {
    programs: Programs,
    options: &'a [String],
}

impl LmBench<'_> {
    fn build<'a>(options: &'a Options, features: &[String]) -> Result<LmBench<'a>> {
        Ok(LmBench {
            programs: Programs::build_with(features)?,
            options: &options.options,
        })
    }

    /// Measures and prints, with defaults for what the user leaves open.
    fn measure(&self, bed: &Bed, mut words: Vec<String>, defaults: &[(&str, &str)]) -> Result<()> {
        for (option, value) in defaults {
            if !self.options.iter().any(|given| given == option) {
                words.extend([option, value].map(|&word| word.to_owned()));
            }
        }
        let command = command_line(std::env::args().skip(1));
        words.extend([
            "--near-cores".to_owned(),
            "--setting".to_owned(),
            format!("command={command}"),
        ]);
        if let Some(commit) = revision() {
            words.extend(["--setting".to_owned(), format!("commit={commit}")]);
        }
        words.extend_from_slice(self.options);
        print!("{}", between(bed, &self.programs, words)?);
        Ok(())
    }
}

/// Runs a command of lm-bench on the left host, with `serve` on the right one; what it printed.
fn between(bed: &Bed, programs: &Programs, words: Vec<String>) -> Result<String> {
    let [near, far] = two_cores();
    let launch = || Launch::new(programs.path("lm-bench")).time_limit(LONG);
    let serve = launch().args(["serve", "--core", &far.to_string(), "--from-anyone"]);
    let serve = serve.args(["--bind", &format!("{}:7170", Side::Right.address())]);
    let mut server = bed.right().spawn(serve)?;
    server.await_text("ready")?;
    let measure = launch().args(words).args(["--core", &near.to_string()]);
    let output = bed.left().spawn(measure)?.finish_aloud()?;
    server.stop()?;
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_is_asked_beside_tcp_where_more_is_lost() {
        let asked = ["0%", "0.1%", "1%", "5%"].map(asked_beside_tcp);
        assert_eq!(asked, [0.95, 1.0, 2.0, 2.0]);
    }

    #[test]
    fn links_are_like_the_beds_own() {
        let bed = BedConfig::default();
        assert_eq!((PLAIN.mtu, PLAIN.queues), (bed.mtu, bed.queues));
    }
}
