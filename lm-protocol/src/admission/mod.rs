//! Admission between hosts (LM §3.3): what a daemon says to the daemons of other hosts, as a state machine without I/O, clock or
//! randomness.
//!
//! One [`Node`] speaks for one address of a host. Whoever runs it feeds it datagrams from the control port and the time, and does
//! what it says:
//!
//! ```text
//!                            ┌──────────────── Node ────────────────┐
//!  control port ─ datagram ─▶│ seal ─▶ peers ─▶ message             │─▶ Action::Send, Action::SendToAll ─▶ control port
//!  programs ───── request ──▶│ outgoing: Applicant … Farewell       │─▶ Action::Tell ────────────────────▶ programs
//!             add_receiver ─▶│ receivers: Grantor, requests waiting │─▶ Landing::open, close ────────────▶ gate
//!  clock ─ next_deadline ───▶│ exclusive: claim, voter              │─▶ Landing::active_until ───────────▶ gate
//!                            └──────────────────────────────────────┘
//! ```
//!
//! | file | what it answers |
//! |---|---|
//! | [`seal`] | does the sender know the cluster's key, and is it for us? |
//! | `peers` | is it new, and of the life of its sender that is going on? |
//! | [`message`] | what does it say? |
//! | `outgoing` | the sessions that this host's programs ask for, have and end ([`crate::session`]'s applicant) |
//! | `incoming` | who gets a place of a receiver here ([`crate::session`]'s grantor), and who waits |
//! | `voter`, `claim`, `exclusive` | is this the only host with active DLD? (policy [`Policy::Exclusive`]) |
//! | [`list`] | the LM_RECV_ADDR list |
//! | `saying` | what goes out, and what all hosts are told |
//!
//! ```
//! use core::time::Duration;
//! use lm_protocol::admission::*;
//! use lm_protocol::control::{Request, RejectReason};
//! use lm_protocol::geometry::{LinkShape, Wire};
//! use lm_protocol::session::*;
//! use lm_protocol::time::Time;
//! use lm_protocol::window::WindowShape;
//!
//! /// A host that only sends.
//! struct NoQueues;
//! impl Landing for NoQueues {
//!     fn open(&mut self, _: u16, _: &Application<'_>, _: &Permit) -> Result<Terms, Refusal> {
//!         Err(RejectReason::Unsupported.into())
//!     }
//!     fn close(&mut self, _: &Session, _: CloseReason) -> u32 { 0 }
//! }
//!
//! let key = ClusterKey::new(&[0x5a; 32])?; // from a file that only the daemons can read
//! let (here, there) = ("10.0.0.1:7169".parse()?, "10.0.0.2:7169".parse()?);
//! let config = Config {
//!     address: here, boot_id: 0x1234, key: Some(key), policy: Policy::Concurrent, limits: Limits::default(),
//! };
//! let mut node = Node::new(config, Time::ZERO);
//! let mut policy = Permit { max_message_len: 1 << 30, lease: Duration::from_secs(5) };
//! let mut local = Local { policy: &mut policy, landing: &mut NoQueues };
//! let mut actions = Vec::new();
//!
//! let request = Request {
//!     sender_id: 1, data_port: 40_000, ..Request::default()
//! };
//! let patience = Duration::from_secs(3);
//! let decision = node.request(Time::ZERO, there, 7168, request, patience, &mut local, &mut actions)?;
//! assert!(matches!(decision, Decision::Requested(_)));
//! // LM_REQ, to be transmitted; and again if nothing comes back.
//! assert!(matches!(actions[..], [Action::Send { to, .. }] if to == there));
//! assert_eq!(node.next_deadline(), Some(Time::from_millis(100)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod claim;
mod exclusive;
mod incoming;
pub mod list;
pub mod message;
mod node;
mod outgoing;
mod peers;
mod saying;
pub mod seal;
mod voter;
mod waiting;

pub use list::{Flag, RecvAddr};
pub use node::{Node, Usage};
pub use outgoing::Ticket;
pub use peers::WINDOW_LEN;
pub use seal::{ClusterKey, Datagram};
pub use voter::{PROMISE, TENURE};
pub use waiting::{AGEING_BOUND, SILENCE_BOUND};

use crate::control::{Grant, Reject};
use crate::landing::{PLACES, ROWS};
use crate::session::{Admit, Landing};
use alloc::vec::Vec;
use core::fmt;
use core::net::SocketAddrV4;
use core::time::Duration;

/// How long an LM_RECV_ADDR entry is good under the policy `concurrent`; it is said again three times in that time.
pub const LIST_LEASE: Duration = Duration::from_secs(6);

/// Longest lease of an LM_RECV_ADDR entry that is believed, whatever the message says.
pub const LIST_LEASE_MAX: Duration = Duration::from_secs(10);

/// Who may receive at the same time as whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Each place of each landing queue carries a session; requests wait for one, the shortest first.
    Concurrent,
    /// The paper's: one host in the cluster has active DLD at an instant, in one session; who comes then is rejected.
    Exclusive {
        /// The hosts that decide, by their control addresses: the same, in the same order, at all hosts; an odd number, three or
        /// five are enough. One that is down is survived as long as more than half are up.
        voters: Vec<SocketAddrV4>,
    },
}

/// How much a node keeps, at most, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Hosts that are known, and entries of the LM_RECV_ADDR list. Not less than the cluster has.
    pub hosts: usize,
    /// Sessions that this host's programs ask for or have.
    pub outgoing: usize,
    /// Requests that wait for the places of one receiver.
    pub waiting: usize,
    /// Those of one source address among them; what it asks for beyond that has no turn, and is tried when it is asked for again.
    pub waiting_of_address: usize,
    /// For how long sessions go on in silence, where that is longer than their leases: a path may be cut, or a link down.
    /// Whoever waits for the place of one whose lease has run out gets it.
    pub patience: Duration,
    /// Sessions of one receiver that may be without a place; half of them of one source address.
    pub aside: usize,
    /// Places of one receiver that one source address may have. 0: nothing lands, every session stays without a place.
    pub sessions_of_address: usize,
}

impl Default for Limits {
    /// 4096 hosts, 4096 sessions, 1024 waiting, and no patience beyond the leases.
    fn default() -> Limits {
        Limits {
            hosts: 4096,
            outgoing: 4096,
            waiting: 1024,
            waiting_of_address: usize::MAX,
            patience: Duration::ZERO,
            aside: (ROWS - PLACES) as usize,
            sessions_of_address: usize::MAX,
        }
    }
}

/// What a node is told at its start.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where its datagrams come from and go to: its host's address and control port, as all others know them.
    pub address: SocketAddrV4,
    /// Number of this life: random. Never one that was used before.
    pub boot_id: u64,
    /// The cluster's key. None: control messages go and come as they are; only [`Policy::Concurrent`], and no host is told of another.
    pub key: Option<ClusterKey>,
    /// The same at all hosts.
    pub policy: Policy,
    /// Bounds of memory, and of waiting.
    pub limits: Limits,
}

/// Who decides and acts on this host while a node works: its admission policy, and its gate.
pub struct Local<'a> {
    /// Who may send here.
    pub policy: &'a mut dyn Admit,
    /// What opens and closes landing queues. Their numbers are those of [`Node::add_receiver`].
    pub landing: &'a mut dyn Landing,
}

impl fmt::Debug for Local<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Local")
    }
}

/// What is to be done for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Transmit to one host, from the node's address.
    Send {
        /// Whither.
        to: SocketAddrV4,
        /// What.
        datagram: Datagram,
    },
    /// Transmit to all hosts: to the subnet's broadcast address where there is one, and to each configured host that it does not reach.
    SendToAll {
        /// What.
        datagram: Datagram,
    },
    /// Tell the program that has the ticket.
    Tell {
        /// Which.
        ticket: Ticket,
        /// What became of its request or session.
        outcome: Outcome,
    },
}

/// What a program learns about its request, or its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// LM_ACQ_OK: the session is open. The node renews its lease until it is told to end it.
    Granted(Grant),
    /// LM_ACQ_REJ. With [`crate::control::RejectReason::Busy`] under the policy `concurrent`: its turn did not come in time; under
    /// `exclusive`: the destination receives from others, and is not to be disturbed.
    Rejected(Reject),
    /// No answer in time.
    Unreachable,
    /// Its host says that nobody receives there ([`Node::on_refused`]).
    NotListening,
    /// The receiver granted what was not asked for; that session was ended.
    Incompatible,
    /// The session is over on the receiver's side, or nothing was heard of it for a whole lease.
    Lost,
    /// The session ended, and the receiver said so.
    Ended {
        /// Messages that it delivered in the session.
        delivered: u32,
    },
    /// The session ended, and nobody said so; its lease ends it on the other side.
    Unconfirmed,
}

/// What a sender is to do (LM §3.3): the paper's three cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// LM_REQ is on its way. Data may start on the one-copy path meanwhile, so that it is not delayed.
    Requested(Ticket),
    /// The list is not empty, and the destination is not in it: LM_REQ is for a session that sends in the one-copy way, until the list is.
    OneCopy(Ticket),
    /// The destination is in the list: the transmission is cancelled.
    Cancel,
}

/// [`Limits::outgoing`] sessions are there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many sessions at once")]
pub struct TooMany;

/// What became of a datagram that came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Taken {
    /// It was of use.
    Used,
    /// A request that was refused.
    Refused,
    /// A request whose session is over, once more.
    Late,
    /// The end of a session that there is not.
    WrongKey(u64),
    /// An answer that nothing waited for, to the request of this number.
    Unasked(u32),
    /// Of another version.
    OtherVersion,
    /// No control message, or one that makes no sense.
    Malformed,
    /// Not sealed with the cluster's key, or seen before.
    Unproved,
    /// Of a life of its sender that is not known yet: it was challenged.
    Stranger,
}

/// What became of the datagrams that came in: each is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Taken.
    pub accepted: u64,
    /// Wrong length.
    pub malformed: u64,
    /// Not sealed: from an endpoint without a daemon, or no LM at all.
    pub not_sealed: u64,
    /// Of another version, in the seal or in the message.
    pub other_version: u64,
    /// Wrong tag.
    pub unauthenticated: u64,
    /// Seen before.
    pub replayed: u64,
    /// From a life that is not known yet; answered with LM_HELLO.
    pub strangers: u64,
    /// Authentic, and makes no sense.
    pub impossible: u64,
    /// Our own broadcasts.
    pub own: u64,
}
