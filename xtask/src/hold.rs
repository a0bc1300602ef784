//! `cargo xtask bed`: makes a bed and keeps it, for trying things by hand.

use anyhow::Result;
use lm_measure::rate::BitRate;

use crate::bed::daemons::NOBODY;
use crate::bed::{Bed, BedConfig, INTERFACE, Impairments, Port, leftovers};
use crate::machine::two_cores;
use crate::run::cluster;
use crate::workspace::Programs;

/// Senders at a switch with a slow port: those of SS-RTUDP, figure 10.
const SENDERS: u32 = 3;

/// Make two connected hosts, or several, and keep them until Ctrl-C.
///
/// Prints how to run a command on each. For trying the tools, or anything else, on the network that the
/// benchmark uses.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// MTU of both interfaces, in bytes.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u16).range(576..))]
    mtu: u16,
    /// Put an impairment box between the hosts, with options of `lm-bench impair` such as "--loss 1% --delay 50us,2ms";
    /// without any it only forwards.
    #[arg(long = "box", id = "box", value_name = "OPTIONS", num_args = 0..=1, default_missing_value = "")]
    #[arg(allow_hyphen_values = true)]
    with_box: Option<String>,
    /// Put a switch between the hosts, and so many senders at it instead of the left host alone.
    #[arg(long, value_name = "N", conflicts_with = "box", value_parser = clap::value_parser!(u32).range(1..=64))]
    senders: Option<u32>,
    /// Make the switch's port towards the receiver slow, with a buffer in frames; what it passes is measured.
    /// Three senders, if not said otherwise.
    #[arg(long, value_name = "RATE/FRAMES", conflicts_with = "box")]
    port: Option<Port>,
    /// Make the cable from each host to the switch slow.
    #[arg(long, value_name = "RATE", conflicts_with = "box", value_parser = |text: &str| text.parse::<BitRate>())]
    cable: Option<BitRate>,
    /// Make a cluster of equal hosts on one switch instead.
    #[arg(long, value_name = "N", conflicts_with_all = ["box", "senders", "port", "cable", "mtu"])]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=64))]
    hosts: Option<u32>,
    /// With --hosts: an admission daemon on each, so that programs need no privileges: user 65534 may use it.
    #[arg(long, requires = "hosts")]
    daemons: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    crate::bed::require_root("make network namespaces")?;
    if let Some(hosts) = arguments.hosts {
        return keep_cluster(hosts, arguments.daemons);
    }
    let impairments = arguments.with_box.clone().map(Impairments);
    let programs = impairments.as_ref().map(|_| Programs::build()).transpose()?;
    let slow = arguments.port.is_some() || arguments.cable.is_some();
    let bed = Bed::new(&BedConfig {
        mtu: arguments.mtu,
        with_box: impairments.is_some(),
        box_cores: Some(two_cores()),
        senders: arguments.senders.or(slow.then_some(SENDERS)),
        port: arguments.port,
        cable: arguments.cable,
        checksum_offload: !impairments.as_ref().is_some_and(Impairments::needs_checksums),
        ..BedConfig::default()
    })?;
    let running = (programs.zip(impairments))
        .map(|(programs, impairments)| bed.start_box(&programs.path("lm-bench"), &impairments))
        .transpose()?;
    let hosts: Vec<_> = bed.senders().into_iter().chain([bed.right()]).collect();
    let joined = if running.is_some() {
        ", with an impairment box between them"
    } else if hosts.len() > 2 || arguments.senders.is_some() {
        " and a switch"
    } else {
        ""
    };
    let capacity = arguments.port.map(|_| bed.capacity()).transpose()?;
    println!("{} hosts, joined by {INTERFACE}{joined}:", hosts.len());
    for host in hosts {
        println!("  {}  ip netns exec {} COMMAND", host.address(), host.name());
    }
    if let (Some(capacity), Some(port)) = (capacity, arguments.port) {
        let (address, mtu) = (bed.right().address(), arguments.mtu);
        println!(
            "The switch's port towards {address} passes {capacity:.0} packets of {mtu} bytes a second (measured) and \
                keeps {}.",
            port.frames
        );
    }
    println!("Ctrl-C removes them.");
    leftovers::wait_for_signal()
}

fn keep_cluster(hosts: u32, with_daemons: bool) -> Result<()> {
    let programs = with_daemons.then(Programs::build).transpose()?;
    let ground = cluster::ground(programs.as_ref(), hosts)?;
    println!("{hosts} hosts on one switch, joined by {INTERFACE}:");
    for host in ground.cluster.hosts() {
        println!("  {}  ip netns exec {} COMMAND", host.address(), host.name());
    }
    if let Some(daemons) = &ground.daemons {
        let (to, from) = (&ground.cluster.hosts()[1], &ground.cluster.hosts()[0]);
        println!("each has an admission daemon, which lets user {NOBODY} in, for example:");
        for (host, what) in [
            (to, "lm-recv -i lm0 --count 1 --output /dev/null".to_owned()),
            (from, format!("lm-send -i lm0 --to {} FILE", to.address())),
        ] {
            println!(
                "  ip netns exec {} setpriv --reuid {NOBODY} --clear-groups {}/{what} --admission {}",
                host.name(),
                daemons.folder().display(),
                daemons.socket(host).display()
            );
        }
    }
    println!("Ctrl-C removes them.");
    leftovers::wait_for_signal()
}
