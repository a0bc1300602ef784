//! What a program and the admission daemon of its host say to each other, over a Unix `SOCK_SEQPACKET` socket.
//!
//! ```text
//!  program                                              lm-admissiond
//!     ── Hello, Join (its UDP socket) ───────────────────▶  uid and gid by SO_PEERCRED, the interface, the port
//!     ◀────────────────────────── Joined (queues) ──
//!     ── OpenChannel (the memory, sealed) ───────────────▶  registers it, binds an XSK
//!     ◀────────── ChannelOpened (XSK, log's map) ──
//!     ── Receive (terms) ────────────────────────────────▶  may be granted from now on
//!     ◀─────────────────── Event::Opened, Closed ──         the gate is open already, or closed
//!     ── Request ────────────────────────────────────────▶  LM_REQ to the other host's daemon
//!     ◀────────────────────────── Event::Told ────
//! ```
//!
//! One packet is one message, encoded with `postcard`: a [`Call`] under a number, answered by a [`Reply`] under the same number; an
//! [`Event`] has number 0. Descriptors travel beside it (`SCM_RIGHTS`), in the order named below. A program has one call under way
//! at a time; events may come before its reply. Messages of the admission protocol travel as they are on the wire
//! ([`lm_protocol::control::ControlMessage`]), as [`Control`].
//!
//! When the connection ends, so does everything that the program had; unless the daemon went: then the program's sockets, gate and
//! sessions go on, and it joins the next daemon with the token of the first ([`Call::Rejoin`]).

use std::net::{Ipv4Addr, SocketAddrV4};

use lm_protocol::control::{ControlError, ControlMessage, MAX_CONTROL_LEN, WORD_LEN};
use serde::{Deserialize, Serialize};

/// Version of these messages. Both sides must have the same.
pub const VERSION: u16 = 8;

/// No message is longer, in bytes.
pub const MESSAGE_LEN_MAX: usize = 4096;

/// No message has more descriptors beside it.
pub const DESCRIPTORS_MAX: usize = 4;

/// Where a daemon listens unless it is told otherwise.
pub const SOCKET_PATH: &str = "/run/lm-admissiond/socket";

/// A message of the admission protocol with its number, as on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Control(Vec<u8>);

impl Control {
    /// Encodes `message` under `request_id`.
    pub fn new(request_id: u32, message: &ControlMessage) -> Control {
        let mut bytes = [0u8; MAX_CONTROL_LEN];
        let len = message.encode(request_id, &mut bytes);
        Control(bytes[..len].to_vec())
    }

    /// Decodes.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn parse(&self) -> Result<(u32, ControlMessage), ControlError> {
        ControlMessage::parse(&self.0)
    }
}

/// What goes to the daemon: a call and its number, which is not 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Number of the reply.
    pub number: u32,
    /// What is asked.
    pub call: Call,
}

/// What comes from the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Said {
    /// To the call of this number.
    Reply(u32, Reply),
    /// Unasked.
    Event(Event),
}

/// What a program asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// The first call: which version the program speaks. Answered by [`Reply::Done`].
    Hello {
        /// [`VERSION`].
        version: u16,
    },
    /// Opens an endpoint on an interface of the daemon's. Beside it: the UDP socket of its data port, bound to the interface's address in
    /// the daemon's network namespace, which shows that the port is the program's. Answered by [`Reply::Joined`].
    Join {
        /// Name of the interface.
        interface: String,
        /// Whether it wants to receive long messages.
        landing: bool,
        /// How packets are to be moved.
        mode: Mode,
    },
    /// Goes on with what an earlier daemon gave; beside it the UDP socket again. Answered by [`Reply::Joined`].
    Rejoin {
        /// From [`Reply::Joined`].
        token: u64,
    },
    /// Opens a channel on a queue: one of [`Reply::Joined`], or with [`Role::Transmit`] any that nobody has. Beside it: the memory, a file
    /// that cannot shrink (`F_SEAL_SHRINK`, or of hugetlbfs). A channel that the program has there is closed first. Answered by
    /// [`Reply::ChannelOpened`].
    OpenChannel(Channel),
    /// Closes a channel: takes it out of the gate. Answered by [`Reply::Done`].
    CloseChannel {
        /// Its queue.
        queue: u16,
    },
    /// From now on senders may be granted sessions on these terms; replaces earlier terms. Answered by [`Reply::Done`].
    Receive(Offer),
    /// Closes the gate to a session of the program's own, as before it builds its channel anew. The session itself goes on. Answered by
    /// [`Reply::Done`].
    CloseGate {
        /// The session.
        session_key: u64,
    },
    /// Waits until no CPU is inside the gate with a session of this queue that was closed before (I4). Answered by [`Reply::Done`].
    Quiesce {
        /// The landing queue.
        queue: u16,
    },
    /// Opens the gate again to a session that was granted to the program and has not ended. Answered by [`Reply::Done`].
    OpenGate {
        /// The session.
        session_key: u64,
        /// What lands next.
        first_message: u32,
    },
    /// The program has done with a session of which [`Event::Closed`] told it: its row of the gate may be used again. Answered by
    /// [`Reply::Done`].
    Released {
        /// The session.
        session_key: u64,
    },
    /// Ends a session that was granted to the program; its sender is told. No [`Event::Closed`] and no [`Call::Released`] follow.
    /// Answered by [`Reply::Done`].
    Abort {
        /// The session.
        session_key: u64,
        /// Messages that were delivered in it.
        delivered: u32,
    },
    /// How far the sessions are that were granted to the program. Answered by [`Reply::Done`].
    Touched {
        /// Them.
        sessions: Vec<Progress>,
    },
    /// Wants a session with the receiver at `to`. Answered by [`Reply::Requested`]; [`Event::Told`] follows where a ticket is in it.
    Request {
        /// The receiver's data address.
        to: SocketAddrV4,
        /// LM_REQ; its data port must be the program's.
        request: Control,
        /// How long to ask, in milliseconds.
        patience_ms: u32,
    },
    /// Ends a session of the program's as sender, or takes a request back. Answered by [`Reply::Done`]; [`Event::Told`] follows.
    End {
        /// Which.
        ticket: u32,
        /// Messages that were sent in it.
        messages: u32,
    },
    /// Wants the daemon's word for a challenge that the program's endpoint got. Answered by [`Reply::Word`].
    Vouch {
        /// The challenger's data address.
        to: SocketAddrV4,
        /// The program's incarnation, as it was challenged.
        sender_id: u64,
        /// The challenge's cookie.
        cookie: u64,
    },
    /// Asks whether a word is that of a daemon of the cluster. Answered by [`Reply::Done`], or refused.
    Confirm {
        /// The data address of the endpoint that it is said for.
        from: SocketAddrV4,
        /// The incarnation that it is said for.
        sender_id: u64,
        /// The cookie that the program gave.
        cookie: u64,
        /// The word.
        word: [u8; WORD_LEN],
    },
    /// What `lm-admissiond status` shows. Answered by [`Reply::Status`].
    Status,
    /// Sends real-time messages on an interface of the daemon's, and wants its smoother for as long as the connection lasts. Answered by
    /// [`Reply::Smoother`]. For a connection of its own: it needs no [`Call::Join`].
    Smooth {
        /// Name of the interface.
        interface: String,
    },
}

/// A channel that a program wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// Queue of the interface.
    pub queue: u16,
    /// What the gate redirects there.
    pub role: Role,
    /// Bytes of the memory to register, from its start; whole pages.
    pub registered_len: u64,
    /// Length of a chunk in bytes, 2048 to 4096.
    pub chunk_len: u32,
    /// Whether packets may take several frames.
    pub multi_buffer: bool,
    /// Lengths of the fill, RX, TX and completion rings, in entries.
    pub ring_lens: [u32; 4],
}

/// How far a session is that was granted to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The session.
    pub session_key: u64,
    /// Messages that were delivered in it.
    pub delivered: u32,
    /// Something of it came since the last time: as good as a renewal of its lease.
    pub is_heard: bool,
    /// For how many milliseconds nothing of it has landed, and whether nothing is under way, as
    /// [`Unused`](lm_protocol::session::Unused) says it; `None` while something lands, or may.
    pub unused: Option<(u32, bool)>,
}

/// How packets are to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// The best that the daemon gives to programs.
    Auto,
    /// Copy mode, with the gate in the driver.
    Copy,
    /// Copy mode, with the gate in the network stack.
    Generic,
    /// Zero-copy mode.
    ZeroCopy,
}

/// What the gate redirects to a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Nothing: it only sends.
    Transmit,
    /// Small packets.
    General,
    /// Fragments of sessions.
    Landing,
}

/// On which terms a program receives: what the daemon needs to grant a session without asking it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Landing queue.
    pub queue: u16,
    /// MTU that it uses, in bytes; at most the interface's.
    pub mtu: u16,
    /// Length of a chunk in bytes.
    pub chunk_len: u32,
    /// Longest message, in bytes.
    pub max_message_len: u64,
    /// Longest window, in fragments; a power of two.
    pub window_max: u32,
    /// Senders' addresses in CIDR notation; none: everybody.
    pub allow: Vec<(Ipv4Addr, u8)>,
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It is done.
    Done,
    /// It is not, and nothing has changed. One line, with the remedy.
    Refused(String),
    /// To [`Call::Join`] and [`Call::Rejoin`].
    Joined(Joined),
    /// To [`Call::OpenChannel`]. Beside it: the XSK, bound; and unless it only sends, the log's map.
    ChannelOpened {
        /// Whether the kernel moves packets without a copy.
        zero_copy: bool,
    },
    /// To [`Call::Request`]: the paper's three cases.
    Requested(Decision),
    /// To [`Call::Vouch`].
    Word([u8; WORD_LEN]),
    /// To [`Call::Status`]. Beside it a file: JSON.
    Status,
    /// To [`Call::Smooth`]. Beside it the map of the credits ([`lm_ebpf::CreditPage`]).
    Smoother,
}

/// What a program gets of an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// Names this program to the next daemon: nobody else knows it.
    pub token: u64,
    /// Index of the interface.
    pub interface_index: u32,
    /// Queue for small packets; none where the device has too few.
    pub general_queue: Option<u16>,
    /// Queue for fragments, where it was wanted.
    pub landing_queue: Option<u16>,
    /// Whether the gate is in the network stack.
    pub generic: bool,
    /// The daemons' control port, the same at all hosts.
    pub control_port: u16,
    /// Sessions as receiver that are still granted, after [`Call::Rejoin`]: all others are over.
    pub received: Vec<u64>,
    /// Sessions as sender that are still renewed: all others are over.
    pub sent: Vec<u32>,
}

/// What a sender is to do (LM §3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decision {
    /// LM_REQ is on its way under this ticket.
    Requested(u32),
    /// Others receive: it is for a session that sends in the one-copy way, until they do not.
    OneCopy(u32),
    /// The destination receives from others: do not disturb it.
    Cancel,
}

/// What the daemon tells a program unasked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A session was granted on the program's landing queue, and the gate is open to it if the grant says that it lands. Nothing does
    /// before the program lets it ([`lm_ebpf::Log::set_message_limit`]).
    Opened {
        /// The sender's data address.
        from: SocketAddrV4,
        /// Its row of the gate.
        row: u16,
        /// LM_REQ, as it came.
        request: Control,
        /// LM_ACQ_OK, as it went.
        grant: Control,
    },
    /// A session is over, and its gate closed. [`Call::Released`] is expected.
    Closed {
        /// The session.
        session_key: u64,
        /// Messages that its sender says it sent; `None`: it was not its sender that ended it.
        messages: Option<u32>,
        /// It was not its sender that ended it, and as far as the program had said nothing of it was under way.
        was_idle: bool,
    },
    /// A session that was granted without a place has one. The program opens the gate to it ([`Call::OpenGate`]) when nothing that it has
    /// credit for is under way.
    Landed {
        /// The session.
        session_key: u64,
    },
    /// Others wait for the place of a session of which nothing lands: the gate is closed to it, and it goes on by the one-copy path.
    SetAside {
        /// The session.
        session_key: u64,
    },
    /// What became of a request or a session as sender.
    Told {
        /// From [`Decision::Requested`].
        ticket: u32,
        /// What.
        outcome: Outcome,
    },
}

/// As [`lm_protocol::admission::Outcome`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// LM_ACQ_OK.
    Granted(Control),
    /// LM_ACQ_REJ.
    Rejected(Control),
    /// No daemon answered in time.
    Unreachable,
    /// The receiver granted what was not asked for.
    Incompatible,
    /// Over: the receiver or its host is gone.
    Lost,
    /// Over, and the receiver said so.
    Ended {
        /// Messages that it delivered.
        delivered: u32,
    },
    /// Over, and nobody said so.
    Unconfirmed,
}
