//! Test beds: two hosts on one machine, made of network namespaces and joined by a veth pair.
//!
//! ```text
//!   namespace lmx-<pid>-<n>-left            namespace lmx-<pid>-<n>-right
//!  ┌───────────────────────────┐           ┌───────────────────────────┐
//!  │ programs (one core each)  │           │ programs (one core each)  │
//!  │ lm0  198.18.0.1/24        │───veth────│ lm0  198.18.0.2/24        │
//!  └───────────────────────────┘           └───────────────────────────┘
//! ```
//!
//! A bed may have an impairment box between its hosts, in a third namespace ([`middle`]), or a switch with more senders
//! ([`switch`]), whose links may be slow ([`port`]).
//! Instead of the veth pair it may have two network cards that are connected outside ([`BedConfig::cards`]).
//!
//! A [`Bed`] removes everything it made when it is dropped: at the end, after an error, and when a panic
//! unwinds. Ctrl-C and SIGTERM are covered by [`leftovers::watch_signals`]. Only `kill -9` leaves something
//! behind: the programs die with their parent (`PR_SET_PDEATHSIG`), and the namespaces carry the process id in
//! their name, so that the next bed anywhere on the machine removes those of dead processes.
//!
//! The addresses are of 198.18.0.0/15, set aside for measurements between networks (RFC 2544, RFC 6890).

pub mod cluster;
pub mod daemons;
pub mod host;
pub mod ip;
pub mod leftovers;
pub mod links;
pub mod lone;
pub mod middle;
pub mod port;
pub mod program;
pub mod switch;
mod topology;

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;

pub use cluster::{Cluster, ClusterConfig};
pub use host::Host;
pub use lone::Lone;
pub use middle::{Impairments, RunningBox};
pub use port::{Drops, Port};
pub use program::{Launch, Output, Program};

use leftovers::{Leftover, Registered};
use topology::Topology;

/// The interface's name on both hosts of a bed.
pub const INTERFACE: &str = "lm0";

/// Every namespace of a bed is named `<PREFIX>-<pid>-<number>-<side>`.
const NAMESPACE_PREFIX: &str = "lmx";
/// The side of the namespace between the hosts.
const BOX: &str = "box";

/// Looks until it is so.
///
/// # Errors
/// It is not within the limit.
pub fn until(what: &str, limit: Duration, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + limit;
    while !is_so()? {
        ensure!(Instant::now() < end, "not within {} s: {what}", limit.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The two ends of a bed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// 198.18.0.1, by habit the sender's.
    Left,
    /// 198.18.0.2, by habit the receiver's.
    Right,
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Side::Left => "left",
            Side::Right => "right",
        }
    }

    /// The address of this side's interface.
    pub const fn address(self) -> Ipv4Addr {
        match self {
            Side::Left => Ipv4Addr::new(198, 18, 0, 1),
            Side::Right => Ipv4Addr::new(198, 18, 0, 2),
        }
    }
}

/// What a bed shall look like. The default is the bed of the measurements: MTU 1500, two queues each way,
/// segmentation offloads off, no receive packet steering, the kernel's own queueing discipline.
#[derive(Clone, Debug)]
pub struct BedConfig {
    /// MTU of both interfaces, in bytes.
    pub mtu: u16,
    /// Receive and transmit queues of both interfaces. XDP needs as many receive queues on one side as there
    /// are transmit queues on the other, so there is one number for all four.
    pub queues: u32,
    /// Whether a box is between the hosts. Nothing passes until [`Bed::start_box`].
    pub with_box: bool,
    /// Cores of the left and the right host's programs: the box does its work, and the kernel what follows from it, on
    /// the core of the host that the packet goes to (receive packet steering), as an interrupt of that host's network
    /// card would. `None`: on the core of whoever sent it.
    pub box_cores: Option<[usize; 2]>,
    /// `Some(n)`: a switch with `n` senders, the left host and others, and the right host as their receiver.
    pub senders: Option<u32>,
    /// Whether every host behind the switch receives, too ([`Cluster`]).
    pub is_cluster: bool,
    /// Receive queue for everything that the switch sends to a receiver; `None`: the kernel chooses.
    pub landing_queue: Option<u32>,
    /// What the switch's port towards the receiver sends and keeps; without, as much as goes.
    pub port: Option<Port>,
    /// The rate of the cable from each host to the switch; without, as much as goes.
    pub cable: Option<BitRate>,
    /// Whether TSO, GSO, GRO and their relatives stay on.
    pub segmentation_offloads: bool,
    /// Whether the interfaces compute checksums, as network cards do; on a veth pair then nobody does.
    pub checksum_offload: bool,
    /// Two interfaces of this process's namespace, connected with each other outside, instead of a veth pair; with the
    /// queues that they have. They come back under their names when the bed goes. With a box the first one is the
    /// box's, towards the right host, and the left host has a veth to the box.
    pub cards: Option<[String; 2]>,
}

impl Default for BedConfig {
    fn default() -> Self {
        BedConfig {
            mtu: 1500,
            queues: 2,
            with_box: false,
            box_cores: None,
            senders: None,
            is_cluster: false,
            landing_queue: Some(switch::RECEIVER_QUEUE),
            port: None,
            cable: None,
            segmentation_offloads: false,
            checksum_offload: true,
            cards: None,
        }
    }
}

/// Two connected hosts. A [`Program`] may outlive its bed: the kernel keeps the nameless namespace until the
/// program ends, which its own drop sees to. So no order of drops leaks anything.
#[derive(Debug)]
pub struct Bed {
    /// The left and the right one, and senders beyond the left one.
    hosts: Vec<Host>,
    middle: Option<Host>,
    switch: Option<Host>,
    config: BedConfig,
    /// Cards that go back, then the namespaces.
    _leftovers: Vec<Registered>,
}

impl Bed {
    /// Makes a bed. Needs root and iproute2; says which of them is missing.
    pub fn new(config: &BedConfig) -> Result<Bed> {
        prepare()?;
        ensure!(
            config.senders.is_none() || !config.with_box,
            "a bed has a box or a switch, not both"
        );
        ensure!(
            config.cards.is_none() || config.senders.is_none(),
            "a bed of network cards has no switch"
        );
        ensure!(
            config.senders.is_some() || config.port.is_none() && config.cable.is_none(),
            "a slow port or cable is a switch's: say how many senders it has"
        );
        let number = next_number();
        let name = |side: &str| namespace_name(number, side);
        let mut hosts = [Side::Left, Side::Right]
            .map(|side| (side.name().to_owned(), side.address()))
            .to_vec();
        if let Some(senders) = config.senders {
            hosts.extend(switch::further_senders(senders)?);
        }
        let hosts: Vec<Host> = hosts
            .iter()
            .map(|(side, address)| Host::new(name(side), *address))
            .collect();
        let [left, right] = [&hosts[0], &hosts[1]];
        let nameless = |side: &str| Host::new(name(side), Ipv4Addr::UNSPECIFIED);
        let middle = config.with_box.then(|| nameless(BOX));
        let switch = config.senders.map(|_| nameless(switch::SWITCH));
        let mut topology = Topology::default();
        // Cards go home before their namespaces go.
        let first = match &middle {
            Some(middle) => (middle, middle::RIGHT),
            None => (left, INTERFACE),
        };
        let cards = || config.cards.iter().flatten().zip([first, (right, INTERFACE)]);
        for (card, (host, interface)) in cards() {
            topology.keep(Leftover::Card {
                namespace: host.name().to_owned(),
                interface,
                name: card.clone(),
            })?;
        }
        topology.hosts(hosts.iter().chain(&middle).chain(&switch))?;
        let mut join = |ends: [(&Host, &str); 2]| topology.join(ends, config.mtu, config.queues);
        if let Some(switch) = &switch {
            for host in &hosts {
                join([(host, INTERFACE), (switch, &switch::port_of(host))]);
            }
        } else if let Some(middle) = &middle {
            join([(left, INTERFACE), (middle, middle::LEFT)]);
            if config.cards.is_none() {
                join([(right, INTERFACE), (middle, middle::RIGHT)]);
            }
        } else if config.cards.is_none() {
            join([(left, INTERFACE), (right, INTERFACE)]);
        }
        for (card, (host, interface)) in cards() {
            let (namespace, mtu) = (host.name(), config.mtu);
            topology.run(format!(
                "link set dev {card} netns {namespace} name {interface} mtu {mtu}"
            ));
        }
        let leftovers = topology.make()?;
        let bed = Bed {
            hosts,
            middle,
            switch,
            config: config.clone(),
            _leftovers: leftovers,
        };
        if let Some(switch) = &bed.switch {
            // Steering needs a choice.
            let steered = |at| match (at == 1 || config.is_cluster, config.queues) {
                (_, 1) => None,
                (true, _) => config.landing_queue,
                (false, _) => Some(0),
            };
            let ports: Vec<_> = bed
                .hosts
                .iter()
                .enumerate()
                .map(|(at, host)| (host, steered(at)))
                .collect();
            switch::configure(switch, &ports)?;
            let hosts: Vec<&Host> = bed.hosts.iter().collect();
            port::configure(switch, &hosts, bed.right(), config)?;
        }
        if let Some(middle) = &bed.middle {
            middle
                .write_file("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
                .ok();
            let up = |interface| format!("link set {interface} up");
            let mut up = [middle::LEFT, middle::RIGHT].map(up);
            if config.cards.is_some() {
                // A card takes only what is for itself, and the box's packets are for the left host.
                up[1].push_str(" promisc on");
            }
            ip::batch(Some(middle.name()), &up).context("cannot set up the box")?;
            if let Some([left, right]) = config.box_cores {
                for queue in 0..config.queues {
                    middle.steer(middle::LEFT, queue, 1 << right)?;
                    middle.steer(middle::RIGHT, queue, 1 << left)?;
                }
            }
        }
        for host in &bed.hosts {
            configure(host, config).with_context(|| format!("cannot set up host {}", host.name()))?;
        }
        if let Some(switch) = &bed.switch {
            let all: Vec<&Host> = bed.hosts.iter().collect();
            let (some, others) = match config.is_cluster {
                true => (all.clone(), all.clone()),
                false => (bed.senders(), vec![bed.right()]),
            };
            switch::introduce(&some, &others).context("cannot introduce the hosts")?;
            switch::await_forwarding(switch, &all)?;
        }
        Ok(bed)
    }

    /// The namespace of the box, with its interfaces [`middle::LEFT`] and [`middle::RIGHT`]; only a bed with a box has
    /// one.
    pub fn middle(&self) -> Option<&Host> {
        self.middle.as_ref()
    }

    /// Has the switch bring everything for the right host to this receive queue of two.
    pub fn steer_to_receiver(&self, queue: u32) -> Result<()> {
        let switch = self.switch.as_ref().context("a bed without a switch")?;
        switch::steer(switch, self.right(), queue)
    }

    /// The host with address 198.18.0.1.
    pub fn left(&self) -> &Host {
        &self.hosts[0]
    }

    /// All senders, the left host first; only a bed with a switch ([`BedConfig::senders`]) has others.
    pub fn senders(&self) -> Vec<&Host> {
        std::iter::once(self.left()).chain(&self.hosts[2..]).collect()
    }

    /// Tells the left and the right host each other's Ethernet address for ever: no ARP between them.
    pub fn introduce(&self) -> Result<()> {
        for (host, other) in [(self.left(), self.right()), (self.right(), self.left())] {
            let mac = other.read_file(&format!("/sys/class/net/{INTERFACE}/address"))?;
            let line = format!(
                "neigh replace {} lladdr {mac} nud permanent dev {INTERFACE}",
                other.address()
            );
            ip::batch(Some(host.name()), &[line]).context("cannot tell a host its neighbour")?;
        }
        Ok(())
    }

    /// The host with address 198.18.0.2.
    pub fn right(&self) -> &Host {
        &self.hosts[1]
    }
}

/// Address, offloads and whatever else of `config` is about a host by itself.
fn configure(host: &Host, config: &BedConfig) -> Result<()> {
    // IPv6 would send router solicitations and multicast reports of its own into every measurement.
    host.write_file("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
        .ok();
    // With them 64 KiB segments cross a veth pair without ever becoming packets, and nothing that is measured says
    // anything about a network.
    if !config.segmentation_offloads {
        host.switch_segmentation_offloads(false)?;
    }
    if !config.checksum_offload {
        host.set_features(&[("tx-checksum-ip-generic", false)])?;
    }
    let commands = [
        "link set lo up".to_owned(),
        format!("addr add {}/24 dev {INTERFACE}", host.address()),
        format!("link set {INTERFACE} up"),
    ];
    ip::batch(Some(host.name()), &commands)?;
    Ok(())
}

/// What making namespaces needs: privilege, iproute2, a watch for Ctrl-C, and no namespaces of the dead.
fn prepare() -> Result<()> {
    require_root("make network namespaces")?;
    ip::require_installed()?;
    leftovers::watch_signals().context("cannot watch for Ctrl-C")?;
    remove_stale();
    Ok(())
}

/// A number that no other bed of this process has.
fn next_number() -> u32 {
    static BEDS: AtomicU32 = AtomicU32::new(0);
    BEDS.fetch_add(1, Ordering::Relaxed)
}

fn namespace_name(number: u32, side: &str) -> String {
    format!("{NAMESPACE_PREFIX}-{}-{number}-{side}", std::process::id())
}

/// Fails with the remedy unless the process is root.
pub fn require_root(to_do_what: &str) -> Result<()> {
    anyhow::ensure!(
        rustix::process::geteuid().is_root(),
        "not root: only root may {to_do_what}; run the same command with sudo, or in a root shell"
    );
    Ok(())
}

/// Removes the namespaces of beds whose process is dead. Failures are left to the next bed.
pub(crate) fn remove_stale() {
    let Ok(entries) = std::fs::read_dir(host::NAMESPACE_DIR) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if owner_of(&name).is_some_and(|pid| !is_alive(pid)) {
            leftovers::remove_namespace(&name);
        }
    }
}

/// Whether there is such a process and it has not ended; nobody may have waited for it yet.
fn is_alive(pid: u32) -> bool {
    // proc_pid_stat(5): the state follows the command's name, which may have any character in it.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.trim().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The process id in a bed's namespace name; `None` for namespaces of others.
fn owner_of(name: &str) -> Option<u32> {
    let mut parts = name.split('-');
    if parts.next()? != NAMESPACE_PREFIX {
        return None;
    }
    let pid = parts.next()?.parse().ok()?;
    let _number: u32 = parts.next()?.parse().ok()?;
    let side = parts.next()?;
    let ours = matches!(side, "left" | "right" | BOX | switch::SWITCH | lone::LONE)
        || switch::is_further_sender(side);
    (ours && parts.next().is_none()).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_beds_have_an_owner() {
        assert_eq!(owner_of("lmx-4711-0-left"), Some(4711));
        assert_eq!(owner_of("lmx-4711-12-right"), Some(4711));
        assert_eq!(owner_of("lmx-4711-0-box"), Some(4711));
        assert_eq!(owner_of("lmx-4711-0-switch"), Some(4711));
        assert_eq!(owner_of("lmx-4711-0-lone"), Some(4711));
        assert_eq!(owner_of("lmx-4711-0-left9"), Some(4711));
        for foreign in [
            "lmx",
            "lmx-4711",
            "lmx-4711-0",
            "lmx-x-0-left",
            "lmx-4711-0-top",
            "lmx-1-0-left-2",
            "lmB-1-0-left",
        ] {
            assert_eq!(owner_of(foreign), None, "{foreign}");
        }
    }
}
