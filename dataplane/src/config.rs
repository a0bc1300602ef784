//! What an application chooses when it opens an endpoint, and the bounds that nobody chooses.

use std::fs::File;
use std::net::Ipv4Addr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::integrity::Integrity;

use crate::memory::HugePages;
use crate::port::ModeRequest;

/// General receive frames: posted frames plus messages that the application holds. At 2 KiB each, 8 MiB.
pub(crate) const GENERAL_FRAMES: u32 = 4096;
/// Fill and RX ring of the general channel: everything that can be posted fits (invariant I3d).
pub(crate) const GENERAL_RING_LEN: u32 = GENERAL_FRAMES;
/// Small transmit frames: unacknowledged eager messages plus control packets in flight. At 2 KiB each, 4 MiB.
pub(crate) const TRANSMIT_FRAMES: u32 = 2048;
/// Transmit frames that eager messages may not take, so that acknowledgements and credits always find one.
pub(crate) const TRANSMIT_FRAMES_FOR_CONTROL: u32 = 128;
/// TX and completion ring of every channel; at least the packets that may be in flight.
pub(crate) const TRANSMIT_RING_LEN: u32 = 2048;
/// Fill and RX ring of a landing channel, in descriptors: 2^15 fragments of 1448 bytes are 45 MiB.
pub(crate) const LANDING_RING_LEN: u32 = 1 << 15;
/// The same on veth, where no more than twice [`ON_THE_WAY_PACED`] are ever posted: short rings stay in the cache.
pub(crate) const LANDING_RING_LEN_VETH: u32 = 2048;
/// Frames of their own for landing entries in zero-copy mode that have no place in a zone: three at each end of a 2 MiB page, and
/// one for each packet too many. At 2 KiB each, 512 KiB.
pub(crate) const SPARE_FRAMES: u32 = 256;
/// Longest prefix of a driver that messages can land with, in bytes (`virtio-net` has 12).
pub(crate) const PREFIX_LEN_MAX: u8 = 64;
/// Peers that an endpoint knows at once; a silent one makes room for a new one.
pub(crate) const PEERS_MAX: usize = 1024;
/// Messages of many fragments that wait, travel or are unconfirmed, per endpoint.
pub(crate) const OUTGOING_MAX: usize = 1024;
/// Messages that one sender may have announced and not yet seen settled.
pub(crate) const IN_FLIGHT_MESSAGES_MAX: u32 = 256;
/// Landing zones that exist at once: announced messages, and delivered ones that the application holds.
pub(crate) const ZONES_MAX: usize = 4096;
/// Packets that one wake-up of a channel hands over (design: larger batches brought nothing; the kernel's
/// copy mode stops after 32, `TX_BATCH_SIZE` in net/xdp/xsk.c).
pub(crate) const TRANSMIT_BURST: u32 = 32;
/// The same while small messages go to and fro, so that each finds its thread soon: what a network card takes in some microseconds.
pub(crate) const EXCHANGE_BURST: u32 = 8;
/// The same on veth, where a packet's whole way to the far end is walked while it is handed over.
pub(crate) const EXCHANGE_BURST_VETH: u32 = 2;
/// Packets taken from an RX ring in one round, so that no stage starves the others.
pub(crate) const RECEIVE_BURST: u32 = 256;
/// Landing memory that several messages in flight may take together; a single larger message takes what it
/// needs.
pub(crate) const LANDING_LEN_SHARED: u64 = 48 << 20;
/// The largest MTU used: with an Ethernet header a packet is 65,535 bytes long.
pub(crate) const MTU_MAX: u16 = u16::MAX - 14;
/// The largest at which a packet goes in one frame whatever the driver does: a chunk of 4096 bytes has 256 bytes of headroom, and veth and
/// several drivers keep another 320 at its end (`skb_shared_info`). Messages of one fragment are no longer than that.
pub(crate) const MTU_IN_ONE_FRAME: u16 = 3498;
/// Where datagrams of the kernel's socket are received that are longer than a frame: one of the longest, in whole pages.
pub(crate) const DATAGRAM_LEN_MAX: u64 = 1 << 16;

/// General frames posted beside those that the peers' eager credits cover, for control packets; few enough to stay in the
/// cache.
pub(crate) const GENERAL_FRAMES_SPARE: u32 = 128;
/// General frames that are never posted: datagrams of the kernel's socket are received into them, and come however
/// many peers the general channel posts for.
pub(crate) const GENERAL_FRAMES_FOR_SOCKET: u32 = 64;
/// Packets of a plain datagram stream in flight: nobody gives credit there, and veth's ring has 256 entries.
pub(crate) const PLAIN_IN_FLIGHT: u32 = 128;
/// Packets on the way to a veth device.
pub(crate) const ON_THE_WAY_VETH: u32 = 192;
/// So many more from a sender whose own completions keep veth's ring from overflowing: the receiver's kernel work goes on
/// while the next credit is under way.
pub(crate) const ON_THE_WAY_PACED: u32 = 4 * ON_THE_WAY_VETH;
/// Fragments of a plain UDP datagram at the smallest MTU (65,507 bytes in pieces of 552), rounded up to a power of
/// two: one window a message, as in the paper.
pub(crate) const PLAIN_FRAGMENTS_MAX: u32 = 128;

/// A burst under a rate limit: full packets of so much time, so that neither the sleep of an endpoint that waits nor a short
/// pause of its thread costs throughput.
pub(crate) const RATE_BURST: Duration = Duration::from_millis(1);
/// Fewest and most packets of such a burst. The most is what a window has, and no more than what veth's ring takes.
pub(crate) const RATE_BURST_PACKETS: (u32, u32) = (4, 256);

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
/// assert_eq!(config.window_fragments, 256);
/// ```
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Network interface, for example `eth1`.
    pub interface: String,
    /// Which XDP mode to ask for.
    pub mode: ModeRequest,
    /// UDP port for data; control uses the next one. 0 takes a free pair.
    pub port: u16,
    /// Largest IP packet to send and to accept, in bytes; the interface's MTU when `None`.
    pub mtu: Option<u16>,
    /// Receive queue of the general channel.
    pub general_queue: u32,
    /// Receive queue of the landing channel: by default the next one after the general queue. Where the
    /// device has one queue only, landing takes it and small traffic uses the kernel's UDP socket.
    pub landing_queue: Option<u32>,
    /// Fragments in a window, a power of two. A window is what travels in reverse order.
    pub window_fragments: u32,
    /// Longest message to accept, in bytes.
    pub max_message_len: u64,
    /// Landing memory taken at the start, in bytes; more is taken when a sender is admitted that needs it, up to what
    /// [`Endpoint::landing_memory`](crate::Endpoint::landing_memory) says.
    /// 0 = this endpoint receives no large messages.
    pub landing_len: u64,
    /// Memory for messages being sent, in bytes.
    pub send_len: u64,
    /// Packets handed to the driver and not yet completed, per channel. Completions are looked at only when half of
    /// these are out: the kernel writes that cache line for every packet. On veth 192 at most: a completion means there
    /// that the packet has left the ring of 256 entries at the far end.
    pub tx_in_flight: u32,
    /// Packets that a sender may have on the way to this endpoint and not yet received by it: what the path in
    /// between can hold. When `None`: 192 on veth, whose ring has 256 entries, or 768 from a sender that counts its
    /// completions there; three quarters of the card's receive ring in zero-copy mode; and as many as are posted elsewhere.
    pub packets_on_the_way: Option<u32>,
    /// Whether the polling thread also runs the kernel's receive work of its queues where it can (busy polling on
    /// veth): more throughput on two cores, at the same latency. Off where receiver and sender share a core.
    pub poll_queues: bool,
    /// Whether large messages of a sender are shown in the order in which it sent them. If not, each is shown when it is whole,
    /// although an earlier one still lacks fragments; its sender gets its confirmation in order all the same.
    pub in_order: bool,
    /// Whether to use huge pages.
    pub huge_pages: HugePages,
    /// For how long a peer may be silent, a message without progress, or the interface down, before messages are given up as incomplete
    /// or timed out, sessions end, and the endpoint reports its link. A session that this endpoint sends in lasts for its lease at
    /// least (5 s); a silent one that it granted gives way after its lease to whoever wants its place. A peer whose host answers
    /// that nobody listens there is borne for 5 s at most.
    pub patience: Duration,
    /// What this endpoint does so that nobody takes what it sends for something else. What it receives has what its senders
    /// chose. Sessions with `ipfrag` are without, unless they land in zero-copy mode.
    pub integrity: Integrity,
    /// Whether senders of IP fragments may land in zero-copy mode. Port numbers are in the first fragment only, so cards choose
    /// the queue of fragments by the two addresses. While such a session lasts, *everything* that the card hashes by
    /// addresses alone between its sender and this host comes to the landing queue and is lost to everybody else: other
    /// programs' fragments, ping, most of what is neither TCP nor UDP. Without it those senders are refused in zero-copy
    /// mode ([`RejectReason::Unverified`](lm_protocol::control::RejectReason::Unverified)). In copy mode it changes nothing.
    pub exclusive: bool,
    /// What to do when there is nothing to do.
    pub idle: IdleStrategy,
    /// Write every packet of this endpoint to this file, as pcap.
    pub capture: Option<Arc<File>>,
    /// Who holds the gate and speaks the admission protocol.
    pub admission: Admission,
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

impl EndpointConfig {
    /// Whether a sender at this address is one of those that may send here.
    pub(crate) fn allows(&self, ip: Ipv4Addr) -> bool {
        let covers = |&(network, len): &(Ipv4Addr, u8)| {
            let differ = network.to_bits() ^ ip.to_bits();
            differ.checked_shr(32 - u32::from(len.min(32))).unwrap_or(0) == 0
        };
        self.allow.is_empty() || self.allow.iter().any(covers)
    }
}

impl Default for EndpointConfig {
    fn default() -> Self {
        EndpointConfig {
            interface: String::new(),
            mode: ModeRequest::Auto,
            port: 0,
            mtu: None,
            general_queue: 0,
            landing_queue: None,
            window_fragments: 256,
            max_message_len: 1 << 30,
            landing_len: 16 << 20,
            send_len: 16 << 20,
            tx_in_flight: 1024,
            packets_on_the_way: None,
            poll_queues: true,
            in_order: true,
            huge_pages: HugePages::Auto,
            patience: Duration::from_secs(2),
            integrity: Integrity::Manifest,
            exclusive: false,
            idle: IdleStrategy::default(),
            capture: None,
            admission: Admission::Auto,
            allow: Vec::new(),
        }
    }
}

/// When a sender that asked for a session that lands begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// While the request is pending, where there is no place or no answer for 25 ms: by the one-copy path, whose fragments the
    /// receiving host copies once. The request is made on, and when it is granted, messages land: those that are handed over when all
    /// before them are settled. [`Counters::messages_one_copy`](crate::Counters::messages_one_copy) tells how many did not. Not with `ipfrag`.
    #[default]
    WhilePending,
    /// When the session is granted. If that takes longer than the time limit, it is an error.
    WhenGranted,
}

/// How to reach a peer.
#[derive(Clone, Copy, Debug)]
pub struct ConnectOptions {
    /// How fragments travel.
    pub wire: Wire,
    /// Longest message that will be sent, in bytes.
    pub max_message_len: u64,
    /// Messages that will be announced and unconfirmed at once.
    pub messages_in_flight: u32,
    /// What is to become of messages of which fragments are lost. With `ipfrag`, whose packets carry no session key, it is
    /// always [`Delivery::Unreliable`].
    pub delivery: Delivery,
    /// How long to try.
    pub timeout: Duration,
    /// When to begin: at the latest when a session that lands is granted, or not before.
    pub start: Start,
    /// Whether the session is one by the one-copy path, for good: it takes no place of the receiver's landing queue and no admission between
    /// hosts, and the receiving host copies each fragment once. Not with `ipfrag`.
    pub one_copy: bool,
    /// Whether to ask for a session now. Without one only messages of one fragment can be sent.
    pub session: bool,
    /// Most that may leave for the peer while the session lasts, in bits per second of Ethernet frames, from the
    /// destination address to the last payload byte (no preamble, no checksum). Over any time `t` no more than
    /// `rate · t` leaves and a burst: as many full packets as the rate brings in a millisecond, 4 at least and 256 at
    /// most (one packet more where messages of one fragment go as well). Repeated fragments and small messages count;
    /// acknowledgements and other control packets do not.
    ///
    /// A receiver gives a message up that brings no packet for its `patience`: full packets should leave more
    /// often than that.
    pub rate: Option<NonZeroU64>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            wire: Wire::Lm,
            max_message_len: 1 << 20,
            messages_in_flight: 8,
            delivery: Delivery::Reliable,
            timeout: Duration::from_secs(3),
            start: Start::default(),
            one_copy: false,
            session: true,
            rate: None,
        }
    }
}
