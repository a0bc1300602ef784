//! What an application chooses when it opens an endpoint.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lm_protocol::admission::ClusterKey;
use lm_protocol::integrity::Integrity;

use crate::checksum::Checksum;
use crate::port::ModeRequest;

/// UDP port of data packets; control packets use the next one.
pub const DEFAULT_PORT: u16 = 7168;

/// What to do when a poll round found nothing to do: spin, then yield the core, then sleep in `poll(2)`.
///
/// Where a yield shows that others use the core as well, the next 0.1 s have no spinning and no yields but those of who never sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleStrategy {
    /// For so long rounds return at once. Lowest latency, a busy core.
    pub spin: Duration,
    /// Rounds after that which yield the core.
    pub yields: u32,
    /// Longest sleep after that. `None` never sleeps.
    pub sleep: Option<Duration>,
}

impl Default for IdleStrategy {
    /// Spins for longer than a round trip, then sleeps soon: whoever spins or yields on a busy machine
    /// gets its core back a time slice later, and a sleeper at once. With 2 ms of spinning and 200 yields beside a compiler,
    /// messages of 1 MiB took up to 0.9 s.
    fn default() -> Self {
        IdleStrategy {
            spin: Duration::from_micros(100),
            yields: 5,
            sleep: Some(Duration::from_millis(10)),
        }
    }
}

impl IdleStrategy {
    /// Never leaves the core: for a core of one's own.
    pub const SPIN: IdleStrategy = IdleStrategy {
        spin: Duration::MAX,
        yields: 0,
        sleep: None,
    };
}

/// How to open an [`crate::Endpoint`].
///
/// ```
/// use lm_dataplane::EndpointConfig;
/// let config = EndpointConfig { interface: "eth1".into(), port: 7168, ..EndpointConfig::default() };
/// assert_eq!(config.receive.max_message_len, 1 << 30);
/// ```
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Network interface, for example `eth1`.
    pub interface: String,
    /// UDP port for data; control uses the next one. 0 takes a free pair.
    pub port: u16,
    /// The interface as this endpoint uses it.
    pub link: LinkConfig,
    /// Memory that is taken.
    pub memory: MemoryConfig,
    /// What is accepted, and how it is shown.
    pub receive: ReceiveConfig,
    /// What this endpoint does so that nobody takes what it sends for something else. What it receives has what its senders
    /// chose. Sessions with `ipfrag` are without, unless they land in zero-copy mode.
    pub integrity: Integrity,
    /// For how long a peer may be silent, a message without progress, or the interface down, before messages are given up as incomplete
    /// or timed out, sessions end, and the endpoint reports its link. A session that this endpoint sends in lasts for its lease at
    /// least (5 s); a silent one that it granted gives way after its lease to whoever wants its place. A peer whose host answers
    /// that nobody listens there is borne for 5 s at most.
    pub patience: Duration,
    /// What to do when there is nothing to do.
    pub idle: IdleStrategy,
    /// Who admits senders, and which.
    pub admission: AdmissionConfig,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        EndpointConfig {
            interface: String::new(),
            port: 0,
            link: LinkConfig::default(),
            memory: MemoryConfig::default(),
            receive: ReceiveConfig::default(),
            integrity: Integrity::Manifest,
            patience: Duration::from_secs(2),
            idle: IdleStrategy::default(),
            admission: AdmissionConfig::default(),
        }
    }
}

/// The interface as this endpoint uses it.
#[derive(Clone, Debug, Default)]
pub struct LinkConfig {
    /// Which XDP mode to ask for.
    pub mode: ModeRequest,
    /// Largest IP packet to send and to accept, in bytes; the interface's MTU when `None`.
    pub mtu: Option<u16>,
    /// Receive queue of the landing channel: by default the second one, small messages having the first. Where the device has one queue
    /// only, or this is the first one, landing takes it and small messages use the kernel's UDP socket.
    pub queue: Option<u32>,
    /// How many packets are in the device and on the way at once.
    pub depth: Depth,
    /// What is in the UDP checksum of packets that leave.
    pub checksum: Checksum,
    /// Write every packet of this endpoint to this file, as pcap.
    pub capture: Option<Arc<File>>,
}

/// How many packets of long messages are in the device and on the way at once: what leaves next waits behind all of them. The rest waits in
/// memory, where small messages and real time pass it.
///
/// Of what this endpoint sends it bounds what a device has and has not completed; of what it receives, what a sender may have on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// As many as they hold.
    #[default]
    Full,
    /// As many as keep both busy, as it turns out ([`lm_protocol::depth`]). For a path with a slow port in it: a small message does not wait
    /// there behind all that the port's buffer holds.
    Auto,
}

impl Depth {
    pub(crate) fn adapts(self) -> bool {
        self == Depth::Auto
    }
}

/// Memory that an endpoint takes.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// Landing memory taken at the start, in bytes; more is taken when a sender is admitted that needs it, up to what
    /// [`Status::landing_memory`](crate::Status::landing_memory) says.
    /// 0 = this endpoint receives no large messages.
    pub landing_len: u64,
    /// Memory for messages being sent, in bytes.
    pub send_len: u64,
    /// Whether other processes are lent its memory ([`Status::memory_file`](crate::Status::memory_file)): it lies in a file then, and
    /// never in huge pages, which zero-copy mode needs.
    pub lend: bool,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        MemoryConfig {
            landing_len: 16 << 20,
            send_len: 16 << 20,
            lend: false,
        }
    }
}

/// What an endpoint accepts, and how it shows it.
#[derive(Clone, Debug)]
pub struct ReceiveConfig {
    /// Longest message to accept, in bytes.
    pub max_message_len: u64,
    /// Whether senders of IP fragments may land in zero-copy mode. Port numbers are in the first fragment only, so cards choose
    /// the queue of fragments by the two addresses. While such a session lasts, *everything* that the card hashes by
    /// addresses alone between its sender and this host comes to the landing queue and is lost to everybody else: other
    /// programs' fragments, ping, most of what is neither TCP nor UDP. Without it those senders are refused in zero-copy
    /// mode ([`RejectReason::Unverified`](lm_protocol::control::RejectReason::Unverified)). In copy mode it changes nothing.
    pub exclusive: bool,
}

impl Default for ReceiveConfig {
    fn default() -> Self {
        ReceiveConfig {
            max_message_len: 1 << 30,
            exclusive: false,
        }
    }
}

/// Who admits senders, and which.
#[derive(Clone, Debug, Default)]
pub struct AdmissionConfig {
    /// Who holds the gate and speaks the admission protocol.
    pub by: Admission,
    /// The cluster's key, for an endpoint that admits by itself: it has sessions with those that have the key as well, endpoints or daemons,
    /// and hears only whom they speak for. None: it hears whoever receives at the address that it sends from.
    pub key: Option<ClusterKey>,
    /// Who may send here, by whichever way: addresses in CIDR notation, none: everybody's. A peer that this endpoint connected to may answer.
    /// On which terms a sender's messages land, an endpoint that holds its gate itself asks its [`Admit`](lm_protocol::session::Admit).
    pub allow: Vec<(Ipv4Addr, u8)>,
}

/// Who holds the gate and speaks the admission protocol for an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// The daemon of this host where its socket is there ([`SOCKET_PATH`](crate::daemon::ipc::SOCKET_PATH), or what `LM_ADMISSION_SOCKET`
    /// names), else the endpoint itself.
    #[default]
    Auto,
    /// The endpoint itself, which needs the privileges: CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_IPC_LOCK. Zero-copy mode is had only so.
    Embedded,
    /// The daemon that listens there (`lm-admissiond`).
    Daemon(PathBuf),
}
