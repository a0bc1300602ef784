//! `cargo xtask bed`: makes a bed and keeps it, for trying things by hand.

use anyhow::Result;
use lm_measure::rate::BitRate;

use crate::bed::daemons::{Ground, NOBODY, TOOLS};
use crate::bed::{Bed, BedConfig, Host, INTERFACE, Impairments, Port, leftovers};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// Senders at a switch with a slow port: those of SS-RTUDP, figure 10.
const SENDERS: u32 = 3;

/// Make two connected hosts, or several, and keep them until Ctrl-C.
///
/// Prints how to run a command on each. For trying the tools, or anything else, on the network that the
/// benchmark uses.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Put an impairment box between the hosts, with options of `lm-bench impair` such as "--loss 1% --delay 50us,2ms";
    /// without any it only forwards.
    #[arg(long = "box", id = "box", value_name = "OPTIONS", num_args = 0..=1, default_missing_value = "")]
    #[arg(allow_hyphen_values = true)]
    with_box: Option<String>,
    /// Put a switch between three senders and the right host, and make its port towards that slow, with a buffer in
    /// frames; what it passes is measured.
    #[arg(long, value_name = "RATE/FRAMES", conflicts_with = "box")]
    port: Option<Port>,
    /// The same with a slow cable from each host to the switch.
    #[arg(long, value_name = "RATE", conflicts_with = "box", value_parser = |text: &str| text.parse::<BitRate>())]
    cable: Option<BitRate>,
    /// Make a cluster of equal hosts on one switch instead.
    #[arg(long, value_name = "N", conflicts_with_all = ["box", "port", "cable"])]
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
    let is_slow = arguments.port.is_some() || arguments.cable.is_some();
    let bed = Bed::new(&BedConfig {
        with_box: impairments.is_some(),
        box_cores: Some(two_cores()),
        senders: is_slow.then_some(SENDERS),
        port: arguments.port,
        cable: arguments.cable,
        checksum_offload: !impairments.as_ref().is_some_and(Impairments::needs_checksums),
        ..BedConfig::default()
    })?;
    let start = |impairments| bed.start_box(&Programs::build(&TOOLS)?.path("lm-bench"), &impairments);
    let running = impairments.map(start).transpose()?;
    let joined = match (&running, is_slow) {
        (Some(_), _) => ", with an impairment box between them",
        (None, true) => " and a switch",
        (None, false) => "",
    };
    show(bed.hosts(), &format!(", joined by {INTERFACE}{joined}"));
    if let Some(port) = arguments.port {
        println!(
            "The switch's port towards {} passes {:.0} packets of 1500 bytes a second (measured) and keeps {}.",
            bed.right().address(),
            bed.capacity()?,
            port.frames
        );
    }
    keep()
}

fn keep_cluster(hosts: u32, with_daemons: bool) -> Result<()> {
    let how = format!(" on one switch, joined by {INTERFACE}");
    if !with_daemons {
        let bed = Bed::new(&BedConfig::cluster(hosts))?;
        show(bed.hosts(), &how);
        keep()
    }
    let ground = Ground::new(&Programs::build(&TOOLS)?, "cluster", hosts)?;
    let hosts = ground.bed.hosts();
    show(hosts, &how);
    println!("each has an admission daemon, which lets user {NOBODY} in, for example:");
    let [sending, receiving] = [&hosts[0], &hosts[1]];
    let send = format!("lm-send -i lm0 --to {} FILE", receiving.address());
    let receive = "lm-recv -i lm0 --count 1 --output /dev/null";
    for (host, what) in [(receiving, receive), (sending, &send)] {
        println!(
            "  ip netns exec {} setpriv --reuid {NOBODY} --clear-groups {} --admission {}",
            host.name(),
            ground.daemons.tool(what).display(),
            ground.daemons.socket(host).display()
        );
    }
    keep()
}

fn show(hosts: &[Host], how: &str) {
    println!("{} hosts{how}:", hosts.len());
    for host in hosts {
        println!("  {}  ip netns exec {} COMMAND", host.address(), host.name());
    }
}

/// Until Ctrl-C.
fn keep() -> ! {
    println!("Ctrl-C removes them.");
    leftovers::wait_for_signal()
}
