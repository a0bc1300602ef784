//! One interface while it is there: its gate, its control port, and the node that speaks for its address.

use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;
use lm_cards::Interface;
use lm_ebpf::{AttachMode, EffectiveMode, Gate, GateConfig};
use lm_protocol::admission::{self, Action, ClusterKey, Limits, Local, Node, Outcome, Policy, Taken, Ticket};
use lm_protocol::session::Permit;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::VERSION;

use super::ground::Ground;
use super::smoothing::Smoothing;
use super::worker::Stay;
use crate::clock;
use crate::config::{Config, GateMode, PolicyName};
use crate::pins::{Lock, Pins};
use crate::policy::{LEASE, PATIENCE};
use crate::ports::Ports;

/// Queues of the gate.
const QUEUES_MAX: u32 = 64;

/// Smallest MTU on which a session is possible, in bytes.
const MTU_MIN: u32 = 576;

/// So many hosts of another version are named: addresses can be forged.
const OTHER_VERSIONS_TOLD: usize = 8;

/// An interface that is there.
pub(crate) struct Attachment {
    pub(crate) stay: Stay,
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) address: SocketAddrV4,
    /// Its address, and the subnet around it.
    subnet: Ipv4Net,
    pub(crate) node: Node,
    pub(crate) ground: Ground,
    pub(crate) ports: Ports,
    pub(crate) told: Vec<(Ticket, Outcome)>,
    pub(crate) smoothing: Option<Smoothing>,
    /// Whether the gate was taken over from an earlier daemon.
    pub(crate) reopened: bool,
    /// No other daemon takes the pins over while this is held.
    _lock: Lock,
    pub(super) actions: Vec<Action>,
    /// Hosts that speak another version of LM, as far as they were named.
    other_versions: Vec<Ipv4Addr>,
}

/// The network namespace's number.
pub(crate) fn namespace() -> u64 {
    rustix::fs::stat("/proc/thread-self/ns/net").map_or(0, |found| found.st_ino)
}

impl Attachment {
    /// Checks what can be checked without changing anything.
    pub(crate) fn check(name: &str, config: &Config) -> Result<(Interface, Ipv4Net), String> {
        let interface = Interface::by_name(name).map_err(|error| error.to_string())?;
        interface.check(MTU_MIN).map_err(|error| error.to_string())?;
        let primary = (interface.addresses.first())
            .ok_or_else(|| format!("{name} has no IPv4 address: give it one"))?;
        let subnet = Ipv4Net::new_assert(primary.ip, primary.prefix_len);
        for (kind, host) in (config.peers().into_iter().map(|host| ("peer", host)))
            .chain(config.voters().into_iter().flatten().map(|host| ("voter", host)))
        {
            reachable(name, subnet, host).map_err(|what| format!("{kind}: {what}"))?;
        }
        Ok((interface, subnet))
    }

    /// Attaches the gate, or takes it over, and opens the control port.
    ///
    /// # Errors
    /// One line with the remedy.
    pub(crate) fn new(
        stay: Stay,
        name: &str,
        config: &Config,
        key: &ClusterKey,
        pins: &Pins,
    ) -> Result<Attachment, String> {
        let (interface, subnet) = Attachment::check(name, config)?;
        let address = SocketAddrV4::new(subnet.addr(), config.control_port);
        // A name that is never used for another interface while the machine runs.
        let place = format!("{}-{}", namespace(), interface.index);
        let lock = pins.lock(&place).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => format!(
                "another daemon serves {name}: end it (`lm-admissiond status` shows its sockets), or choose another \
                 interface"
            ),
            error => format!("{name}: cannot lock it in {}: {error}", pins.name().display()),
        })?;
        let ports = Ports::bind(subnet, config.control_port, &config.peers())?;
        let dir = pins.path().join(place);
        let gate_config = GateConfig {
            local_ip: Some(*address.ip()),
            control_port: config.control_port,
            several_programs: true,
            ..GateConfig::default()
        };
        let (mode, wanted) = match config.mode {
            GateMode::Auto => (AttachMode::Auto, None),
            GateMode::Copy => (AttachMode::Native, Some(EffectiveMode::Native)),
            GateMode::Generic => (AttachMode::Generic, Some(EffectiveMode::Generic)),
        };
        let told = |error: lm_ebpf::AttachError| format!("{name}: {error}");
        let mut reopened = Gate::reopen(interface.index, &gate_config, &dir).map_err(told)?;
        if let Some(gate) = &mut reopened
            && wanted.is_some_and(|wanted| wanted != gate.mode())
        {
            let what = "the gate of the last daemon is in another mode: it is replaced";
            tracing::warn!(interface = name, "{what}");
            let unpinned = gate.unpin();
            unpinned.map_err(|error| format!("{name}: cannot remove the pins: {error}"))?;
            reopened = None;
        }
        let is_reopened = reopened.is_some();
        let gate = match reopened {
            Some(gate) => gate,
            None => {
                let mut gate = Gate::attach(interface.index, &gate_config, mode).map_err(told)?;
                let place = pins.name().display();
                let pinned = gate.pin(&dir);
                pinned.map_err(|error| format!("{name}: cannot pin the gate in {place}: {error}"))?;
                gate
            }
        };
        for warning in gate.warnings() {
            tracing::warn!(interface = name, "{warning}");
        }
        let mut limits = Limits::default();
        if gate.mode() == EffectiveMode::Generic {
            limits.sessions_of_address = 0;
        }
        let policy = match config.voters() {
            None => {
                limits.patience = PATIENCE;
                Policy::Concurrent
            }
            Some(voters) => Policy::Exclusive { voters },
        };
        let node = Node::new(
            admission::Config {
                address,
                boot_id: super::random_u64(),
                key: Some(key.clone()),
                policy,
                limits,
            },
            clock::now(),
        );
        let queues = interface.rx_queues.min(interface.tx_queues).clamp(1, QUEUES_MAX);
        let is_veth = interface.kind.as_deref() == Some("veth");
        let mtu = interface.mtu.min(u32::from(u16::MAX)) as u16;
        let is_exclusive = config.policy == PolicyName::Exclusive;
        let ground = Ground::new(gate, *address.ip(), (mtu, is_veth, queues as usize), is_exclusive);
        tracing::info!(
            interface = name,
            %address,
            queues,
            mode = ?ground.gate.mode(),
            taken_over = is_reopened,
            "serving"
        );
        Ok(Attachment {
            stay,
            name: name.to_owned(),
            index: interface.index,
            address,
            subnet,
            node,
            ground,
            ports,
            told: Vec::new(),
            smoothing: None,
            reopened: is_reopened,
            _lock: lock,
            actions: Vec::new(),
            other_versions: Vec::new(),
        })
    }

    /// Takes a datagram of the control port.
    pub(crate) fn take(&mut self, from: SocketAddrV4, datagram: &[u8]) {
        let taken = self.drive(|node, now, local, out| node.on_datagram(now, from, datagram, local, out));
        let is_news =
            || self.other_versions.len() < OTHER_VERSIONS_TOLD && !self.other_versions.contains(from.ip());
        if taken == Taken::OtherVersion && is_news() {
            self.other_versions.push(*from.ip());
            tracing::warn!(
                interface = self.name,
                "the daemon at {from} does not speak LM version {VERSION}: use the same release on both hosts"
            );
        }
    }

    /// Lets the node do something, and sends what it says. What programs are to be told is kept.
    pub(crate) fn drive<R>(
        &mut self,
        work: impl FnOnce(&mut Node, Time, &mut Local<'_>, &mut Vec<Action>) -> R,
    ) -> R {
        // How long a message may be is the program's to say: `Ground` knows it.
        let mut policy = Permit {
            max_message_len: u64::MAX,
            lease: LEASE,
        };
        let mut local = Local {
            policy: &mut policy,
            landing: &mut self.ground,
        };
        let result = work(&mut self.node, clock::now(), &mut local, &mut self.actions);
        for action in self.actions.drain(..) {
            match action {
                Action::Send { to, datagram } => self.ports.send(to, datagram.as_bytes()),
                Action::SendToAll { datagram } => self.ports.send_to_all(datagram.as_bytes()),
                Action::Tell { ticket, outcome } => self.told.push((ticket, outcome)),
                _ => {}
            }
        }
        result
    }

    /// Whether a host can be asked for a session.
    pub(crate) fn reachable(&self, host: SocketAddrV4) -> Result<(), String> {
        if host.ip() == self.address.ip() {
            return Err(format!("{} is this host: name another", host.ip()));
        }
        reachable(&self.name, self.subnet, host)
    }

    /// Ends everything here cleanly; the gate goes.
    pub(crate) fn end(mut self) {
        if let Err(error) = self.ground.gate.unpin() {
            tracing::warn!(interface = self.name, "cannot remove the pins: {error}");
        }
    }
}

/// Whether a host is on the subnet, or there is a route to it.
fn reachable(name: &str, subnet: Ipv4Net, host: SocketAddrV4) -> Result<(), String> {
    if subnet.contains(host.ip()) {
        return Ok(());
    }
    let routed = std::net::UdpSocket::bind((subnet.addr(), 0)).and_then(|socket| socket.connect(host));
    routed.map_err(|error| {
        format!(
            "{} is not on the subnet of {name}, {}, and cannot be reached otherwise ({error}): \
             name a host of the subnet, or add a route",
            host.ip(),
            subnet.trunc()
        )
    })
}
