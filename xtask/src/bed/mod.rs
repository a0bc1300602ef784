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
//! A bed may have an impairment box between its hosts, in a third namespace ([`middle`]), or a switch with more senders,
//! or with equal hosts that all send and receive ([`switch`]), whose links may be slow ([`port`]).
//! Instead of the veth pair it may have two network cards that are connected outside ([`BedConfig::cards`]).
//!
//! A [`Bed`] removes everything it made when it is dropped: at the end, after an error, and when a panic
//! unwinds. Ctrl-C and SIGTERM are covered by [`leftovers::watch_signals`]. Only `kill -9` leaves something
//! behind: the programs die with their parent (`PR_SET_PDEATHSIG`), and the namespaces carry the process id in
//! their name, so that the next bed anywhere on the machine removes those of dead processes.
//!
//! The addresses are of 198.18.0.0/15, set aside for measurements between networks (RFC 2544, RFC 6890).

pub mod daemons;
pub mod host;
pub mod ip;
pub mod leftovers;
pub mod middle;
pub mod port;
pub mod program;
pub mod switch;

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;

pub use host::Host;
pub use middle::Impairments;
pub use port::Port;
pub use program::{Launch, Output, Program};

use leftovers::{Leftover, Registered, register};

/// The interface's name on both hosts of a bed.
pub const INTERFACE: &str = "lm0";

/// Every namespace of a bed is named `<PREFIX>-<pid>-<number>-<side>`.
const NAMESPACE_PREFIX: &str = "lmx";

/// The side of a namespace that is no bed's.
const LONE: &str = "lone";

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

/// The hosts of every bed: by habit the sender and the receiver.
const SIDES: [(&str, Ipv4Addr); 2] = [("left", Ipv4Addr::new(198, 18, 0, 1)), ("right", RECEIVER)];
/// The right host's address.
pub const RECEIVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);

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
    /// Whether every host behind the switch receives, too ([`BedConfig::cluster`]).
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

impl BedConfig {
    /// A cluster: equal hosts on a switch, each of which sends to and receives from every other one. Behind a
    /// bridge the receive queue is the kernel's choice ([`switch`]), so each host has one landing queue, and everything
    /// for the host comes in on it: fragments land there, and the gate passes all else on to the kernel's sockets.
    pub fn cluster(hosts: u32) -> BedConfig {
        BedConfig {
            senders: Some(hosts - 1),
            is_cluster: true,
            ..BedConfig::default()
        }
    }
}

/// Connected hosts. A [`Program`] may outlive its bed: the kernel keeps the nameless namespace until the program ends,
/// which its own drop sees to. So no order of drops leaks anything.
#[derive(Debug)]
pub struct Bed {
    /// The left and the right one, and others behind the switch.
    hosts: Vec<Host>,
    /// The box or the switch.
    between: Option<Host>,
    config: BedConfig,
    /// Cards that go back, then the namespaces.
    _leftovers: Vec<Registered>,
}

impl Bed {
    /// Makes a bed. Needs root and iproute2; says which of them is missing.
    pub fn new(config: &BedConfig) -> Result<Bed> {
        prepare()?;
        ensure!(
            config.senders.is_some() || config.port.is_none() && config.cable.is_none(),
            "a slow port or cable is a switch's: say how many senders it has"
        );
        let number = next_number();
        let host = |side: &str, address| Host::new(namespace_name(number, side), address);
        let sides = SIDES.map(|(side, address)| host(side, address));
        let mut hosts = Vec::from(sides);
        for last in switch::further_senders(config.senders.unwrap_or(1))? {
            hosts.push(host(&format!("left{last}"), Ipv4Addr::new(198, 18, 0, last)));
        }
        // Of a box that becomes a sender.
        let third = |side| host(side, Ipv4Addr::new(198, 18, 0, 3));
        let switch = config.senders.map(|_| switch::SWITCH);
        let between = config.with_box.then_some(middle::BOX).or(switch).map(third);
        let first = match &between {
            Some(middle) => (middle, middle::RIGHT),
            None => (&hosts[0], INTERFACE),
        };
        let mut leftovers = Vec::new();
        let mut moved = Vec::new();
        // Cards go home before their namespaces go.
        for (card, (host, interface)) in config.cards.iter().flatten().zip([first, (&hosts[1], INTERFACE)]) {
            leftovers.push(register(Leftover::Card {
                namespace: host.name().to_owned(),
                interface,
                name: card.clone(),
            })?);
            let (namespace, mtu) = (host.name(), config.mtu);
            moved.push(format!(
                "link set dev {card} netns {namespace} name {interface} mtu {mtu}"
            ));
        }
        leftovers.extend(make_namespaces(hosts.iter().chain(&between))?);
        ip::batch(None, &moved).context("cannot give the hosts their cards")?;
        let bed = Bed {
            hosts,
            between,
            config: config.clone(),
            _leftovers: leftovers,
        };
        bed.lay(0, &bed.hosts)?;
        if let Some(middle) = bed.middle() {
            middle::configure(middle, config)?;
        }
        if let Some(switch) = bed.switch() {
            port::configure(switch, &bed.hosts, config)?;
            for (at, host) in bed.hosts.iter().enumerate() {
                let queue = if at == 1 || config.is_cluster {
                    config.landing_queue
                } else {
                    Some(0)
                };
                // Steering needs a choice.
                if let Some(queue) = queue.filter(|_| config.queues > 1) {
                    switch::steer(switch, host, queue, config.queues)?;
                }
            }
            let (some, others) = match config.is_cluster {
                true => (bed.hosts.iter().collect(), bed.hosts.iter().collect()),
                false => (bed.senders(), vec![bed.right()]),
            };
            introduce(&some, &others)?;
            switch::await_forwarding(switch, &bed.hosts)?;
        }
        Ok(bed)
    }

    /// Makes a further link like `lm0`, with this number, between the left and the right host, and gives the right one's
    /// address on it. It is called `lm<n>` on both, which have the addresses 198.18.n.1 and 198.18.n.2. In a bed with a
    /// switch it has a bridge of its own there, and the kernel chooses the queue that its packets come in on. It goes
    /// with the bed.
    pub fn add_link(&self, number: u8) -> Result<Ipv4Addr> {
        ensure!(number > 0, "link 0 is the bed's own");
        self.lay(number, &self.hosts[..2])?;
        Ok(Ipv4Addr::new(198, 18, number, 2))
    }

    /// Lays a link: veth pairs from each of these hosts to what is between them, or from one to the other; with
    /// addresses, offloads and whatever else of the configuration is about an interface by itself.
    fn lay(&self, number: u8, hosts: &[Host]) -> Result<()> {
        let BedConfig { mtu, queues, .. } = self.config;
        let (left, right, interface) = (self.left(), self.right(), format!("lm{number}"));
        let mut pairs = match (self.middle(), self.switch()) {
            (_, Some(switch)) => {
                let port = |host| (host, switch, switch::port_of(host, number));
                hosts.iter().map(port).collect()
            }
            (Some(middle), _) if number == 0 => vec![
                (left, middle, middle::LEFT.to_owned()),
                (right, middle, middle::RIGHT.to_owned()),
            ],
            _ => vec![(left, right, interface.clone())],
        };
        if self.config.cards.is_some() && number == 0 {
            pairs.pop();
        }
        let end = |host: &Host, name: &str| {
            let namespace = host.name();
            format!("{name} netns {namespace} mtu {mtu} numrxqueues {queues} numtxqueues {queues}")
        };
        let pair = |(host, other, name): &(&Host, &Host, String)| {
            format!(
                "link add {} type veth peer name {}",
                end(host, &interface),
                end(other, name)
            )
        };
        let made = ip::batch(None, &pairs.iter().map(pair).collect::<Vec<_>>());
        made.with_context(|| format!("cannot make the link {interface}"))?;
        if let Some(switch) = self.switch() {
            switch::bridge(switch, number, hosts)?;
        }
        for host in hosts {
            let set_up = || {
                // With them 64 KiB segments cross a veth pair without ever becoming packets, and nothing that is measured
                // says anything about a network.
                if !self.config.segmentation_offloads {
                    host.switch_segmentation_offloads(&interface, false)?;
                }
                if !self.config.checksum_offload {
                    host.set_features(&[("tx-checksum-ip-generic", false)])?;
                }
                let [.., last] = host.address().octets();
                host.ip(&[
                    "link set lo up".to_owned(),
                    format!("addr add 198.18.{number}.{last}/24 dev {interface}"),
                    format!("link set {interface} up"),
                ])
            };
            set_up().with_context(|| format!("cannot set up host {}", host.name()))?;
        }
        Ok(())
    }

    /// The namespace of the box, with its interfaces [`middle::LEFT`] and [`middle::RIGHT`]; only a bed with a box has
    /// one.
    pub fn middle(&self) -> Option<&Host> {
        self.between.as_ref().filter(|_| self.config.with_box)
    }

    /// Has the switch bring everything for the receiver to one of its queues.
    pub fn steer_to_receiver(&self, queue: u32) -> Result<()> {
        let switch = self.switch().context("a bed without a switch")?;
        switch::steer(switch, self.right(), queue, self.config.queues)
    }

    fn switch(&self) -> Option<&Host> {
        self.between.as_ref().filter(|_| !self.config.with_box)
    }

    /// The host with address 198.18.0.1.
    pub fn left(&self) -> &Host {
        &self.hosts[0]
    }

    /// The host with address 198.18.0.2.
    pub fn right(&self) -> &Host {
        &self.hosts[1]
    }

    /// All hosts, in the order of their addresses from 198.18.0.1 on.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// All senders, the left host first; only a bed with a switch ([`BedConfig::senders`]) has others.
    pub fn senders(&self) -> Vec<&Host> {
        std::iter::once(self.left()).chain(&self.hosts[2..]).collect()
    }

    /// Tells the left and the right host each other's Ethernet address for ever: no ARP between them.
    pub fn introduce(&self) -> Result<()> {
        introduce(&[self.left()], &[self.right()])
    }
}

/// Tells each of `some` the Ethernet addresses of the `others`, and the others theirs: a question to all would go to
/// every port of a switch.
pub(crate) fn introduce(some: &[&Host], others: &[&Host]) -> Result<()> {
    for (hosts, neighbours) in [(some, others), (others, some)] {
        let mut lines = Vec::new();
        for of in neighbours {
            let mac = of.read_file(&format!("/sys/class/net/{INTERFACE}/address"))?;
            let address = of.address();
            lines.push(format!(
                "neigh replace {address} lladdr {mac} nud permanent dev {INTERFACE}"
            ));
        }
        for host in hosts {
            let own = format!("neigh replace {} ", host.address());
            let others: Vec<String> = lines
                .iter()
                .filter(|line| !line.starts_with(&own))
                .cloned()
                .collect();
            host.ip(&others).context("cannot tell a host its neighbours")?;
        }
    }
    Ok(())
}

/// A namespace without interfaces, for whoever brings their own. It goes with the second value.
///
/// # Errors
/// Needs root and iproute2; says which of them is missing.
pub fn lone() -> Result<(Host, Vec<Registered>)> {
    prepare()?;
    let host = Host::new(namespace_name(next_number(), LONE), Ipv4Addr::UNSPECIFIED);
    let registered = make_namespaces(std::iter::once(&host))?;
    Ok((host, registered))
}

/// A namespace for each of these; they go with what is given back. Registered before they exist: what is registered and
/// was never made is harmless to remove.
fn make_namespaces<'a>(hosts: impl Iterator<Item = &'a Host> + Clone) -> Result<Vec<Registered>> {
    let namespace = |host: &Host| register(Leftover::Namespace(host.name().to_owned()));
    let registered = hosts.clone().map(namespace).collect::<Result<_>>()?;
    let add = |host: &Host| format!("netns add {}", host.name());
    ip::batch(None, &hosts.clone().map(add).collect::<Vec<_>>()).context("cannot make the hosts")?;
    for host in hosts {
        // IPv6 would send router solicitations and multicast reports of its own into every measurement.
        host.write_file("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
            .ok();
    }
    Ok(registered)
}

/// What making namespaces needs: privilege, a watch for Ctrl-C, and no namespaces of the dead.
fn prepare() -> Result<()> {
    require_root("make network namespaces")?;
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
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim());
    state.is_some_and(|state| !state.starts_with(['Z', 'X']))
}

/// The process id in a bed's namespace name; `None` for namespaces of others.
fn owner_of(name: &str) -> Option<u32> {
    let mut parts = name.strip_prefix(NAMESPACE_PREFIX)?.strip_prefix('-')?.split('-');
    let pid = parts.next()?.parse().ok()?;
    let _number: u32 = parts.next()?.parse().ok()?;
    let side = parts.next()?.trim_end_matches(|c: char| c.is_ascii_digit());
    let ours = matches!(side, "left" | "right" | middle::BOX | switch::SWITCH | LONE);
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
