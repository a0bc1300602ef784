//! `cargo xtask bench compare`: `lm-bench compare` between two hosts on this machine, or through a box that loses packets.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::bed::{Bed, BedConfig, Host, Impairments, Launch, Port};
use crate::machine::{command_line, revision, two_cores};
use crate::workspace::Programs;

/// As long as anybody may want to measure.
const LONG: Duration = Duration::from_secs(12 * 3600);

/// Measure LM beside kernel UDP and TCP, bare AF_XDP, and whatever standard tools are installed, between two hosts on this machine.
///
/// Makes two hosts with two equal links, segmentation offloads off: for LM's gate, and without an XDP program for the kernel; with --loss and
/// --port there is one. Each side has a core; leave the machine alone meanwhile. A round takes about a minute.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
SS-RTUDP'S EXPERIMENTS
  table 4, three senders that offer a port 7 % more than it passes, without a smoother and with one:
    cargo xtask bench compare --senders 3 --port 100Mbit/32 -- --tasks stream --sizes 1472 --seconds 30 --warm-up 2 \
      --bit-rate 4710.4kbit --load 'udp-blocking --bytes 1472 --bits 29440kbit --burst 10' \
      --systems 'real-time --idle default --smoother 100Mbit,real-time --idle default,udp-blocking'
  figure 9, round trips beside a TCP stream that takes most of a link:
    cargo xtask bench compare --senders 1 --port 100Mbit/128 -- --tasks round-trips --rate 400 --count 3200 \
      --seconds 8 --warm-up 3 --load 'tcp --congestion cubic' \
      --systems 'real-time --idle default --smoother 100Mbit,udp-blocking --expedited'")]
pub(super) struct Arguments {
    /// With a switch on each link, a bridge in a namespace of its own, and this number of senders at it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    senders: Option<u32>,
    /// Make the switch's port towards the receiver slow, with a buffer in frames, and as slow the cables of several senders
    #[arg(long, value_name = "RATE/FRAMES", requires = "senders")]
    port: Option<Port>,
    /// MTU of the links, in bytes
    #[arg(long, default_value_t = 1500)]
    mtu: u16,
    /// Through an impairment box that loses this part of the packets in both directions: 1%
    #[arg(long, value_name = "PART", conflicts_with_all = ["senders", "mtu"])]
    loss: Option<String>,
    /// Options of lm-bench compare, after --: -- --rounds 3 --json FILE
    #[arg(last = true)]
    options: Vec<String>,
}

/// A bed with a slow port of the switch towards the receiver. The link of a lone sender is as fast as goes: what it sends waits in the port alone.
pub fn at_port(senders: u32, port: Port, mtu: u16) -> BedConfig {
    BedConfig {
        mtu,
        senders: Some(senders),
        port: Some(port),
        cable: (senders > 1).then_some(port.rate),
        // Else a switch brings what is for the receiver to its landing queue, and nothing of real time lands.
        queues: 1,
        // A TCP packet of many segments takes its host's queue as one.
        segmentation_offloads: true,
        ..BedConfig::default()
    }
}

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let programs = Programs::build(&["lm-bench"])?;
    let command = command_line(std::env::args().skip(1));
    let setting = |name: &str, value: String| ["--setting".to_owned(), format!("{name}={value}")];
    let mut words = Vec::from(setting("command", command));
    words.extend(
        revision()
            .into_iter()
            .flat_map(|commit| setting("commit", commit)),
    );
    // What comes out of the box is received on the core of the host that it goes to, as between two machines: without that, the sender's
    // core would do the box's work and the receiver's as well, packet by packet.
    let config = BedConfig {
        mtu: arguments.mtu,
        senders: arguments.senders,
        with_box: arguments.loss.is_some(),
        box_cores: arguments.loss.as_ref().map(|_| two_cores()),
        ..BedConfig::default()
    };
    let bed = Bed::new(&match (arguments.port, arguments.senders) {
        (Some(port), Some(senders)) => at_port(senders, port, arguments.mtu),
        _ => config,
    })?;
    if arguments.port.is_some() {
        words.extend(setting(
            "port_frames_per_second",
            format!("{:.0}", bed.capacity()?),
        ));
    }
    let loss = arguments
        .loss
        .as_deref()
        .map(|loss| Impairments(format!("--loss {loss} --seed 1")));
    let lossy = loss
        .map(|loss| bed.start_box(&programs.path("lm-bench"), &loss))
        .transpose()?;
    if lossy.is_none() && arguments.port.is_none() {
        words.extend(["--peer-host".to_owned(), bed.add_link(1)?.to_string()]);
    }
    words.extend_from_slice(&arguments.options);
    let printed = between(&bed, &programs, words);
    if let Some(lossy) = lossy {
        let counters = lossy.stop()?.report_of("the box")?;
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
    words.extend(["--peer-host".to_owned(), bed.add_link(1)?.to_string()]);
    words.extend(["--json".to_owned(), json.to_string_lossy().into_owned()]);
    between(&bed, programs, words)
}

/// Runs `lm-bench compare` on the left host, with `serve` on the right one and on other senders; what it printed.
///
/// # Errors
/// What `lm-bench` says.
pub fn between(bed: &Bed, programs: &Programs, mut words: Vec<String>) -> Result<String> {
    let [near, far] = two_cores();
    let launch = || Launch::new(programs.path("lm-bench")).time_limit(LONG);
    let serve = |host: &Host, core: usize| {
        let (core, address) = (core.to_string(), format!("{}:7170", host.address()));
        let serve = launch().args(["serve", "--core", &core, "--from-anyone", "--bind", &address]);
        host.spawn_until(serve, "ready")
    };
    let others = bed.senders().into_iter().skip(1);
    let mut servers = vec![serve(bed.right(), far)?];
    for host in others {
        servers.push(serve(host, near)?);
        words.extend(["--also".to_owned(), host.address().to_string()]);
    }
    let to = bed.right().address().to_string();
    let measure = launch().args(["compare", &to, "--core", &near.to_string()]);
    let output = bed.left().spawn(measure.args(words).aloud())?.finish()?;
    for server in servers {
        server.stop()?;
    }
    Ok(output.stdout)
}
