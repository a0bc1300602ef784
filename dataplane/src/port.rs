//! What the engine needs of a network interface: the traits that the kernel's and the simulated one implement.
//!
//! A [`Port`] opens *queues*, each a pair of a receive and a transmit side, which the engine owns and polls; everything else goes through
//! the trait, so that the same engine runs on [`KernelNic`](crate::kernel::KernelNic) and, without root, on
//! `SimNic` of `lm-sim`.

mod datagrams;

use std::fmt;
use std::io;
use std::net::SocketAddrV4;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use lm_protocol::landing::{LogEntry, SessionAdmission};
use lm_protocol::rss::HashInput;

use crate::ring::Descriptor;
use crate::waker::Waker;

pub use datagrams::{Datagrams, Socket, SocketEvent};

/// How packets are to be moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModeRequest {
    /// Zero-copy where nothing forbids it ([`lm_cards`]), else native copy mode, else generic.
    #[default]
    Auto,
    /// Zero-copy or an error.
    ZeroCopy,
    /// Copy mode with the gate in the driver, or an error.
    Copy,
    /// Copy mode with the gate in the network stack.
    Generic,
}

/// How packets are moved, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EffectiveMode {
    /// The device reads and writes the UMEM itself.
    ZeroCopy,
    /// The kernel copies; the gate runs in the driver.
    CopyNative,
    /// The kernel copies; the gate runs in the network stack.
    CopyGeneric,
    /// The port itself copies, and runs the gate.
    CopyPort,
    /// No kernel: the simulated NIC.
    Simulated,
}

impl EffectiveMode {
    /// A stable name for reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            EffectiveMode::ZeroCopy => "zero-copy",
            EffectiveMode::CopyNative => "copy-native",
            EffectiveMode::CopyGeneric => "copy-generic",
            EffectiveMode::CopyPort => "copy-port",
            EffectiveMode::Simulated => "simulated",
        }
    }
}

impl fmt::Display for EffectiveMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EffectiveMode::ZeroCopy => "zero-copy",
            EffectiveMode::CopyNative => "copy (native)",
            EffectiveMode::CopyGeneric => "copy (generic)",
            EffectiveMode::CopyPort => "copy (port)",
            EffectiveMode::Simulated => "simulated",
        })
    }
}

/// What a receive queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Nothing is received, it only sends. For devices where the sender's queue decides which one receives (veth), and
    /// the receiver's landing queue has another number than ours.
    SendOnly,
    /// Small LM packets.
    General,
    /// Fragments of the sessions that are admitted. In zero-copy mode the queue carries nothing else.
    Landing,
}

/// What queue to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSpec {
    /// Its number on the interface.
    pub queue: u32,
    /// What it is for.
    pub role: Role,
    /// In copy mode, whatever the others are in.
    pub copies: bool,
    /// Bytes of the memory to register, from its start; whole pages.
    pub registered_len: u64,
    /// Bytes of a packet that one frame holds, where packets may take several; 0: each takes one.
    pub capacity: u32,
    /// Entries and received packets, and descriptors and completions, that may be out at once: powers of two.
    pub rx_len: u32,
    /// As `rx_len`.
    pub tx_len: u32,
}

/// What was lost on a queue since it was opened, behind the point at which packets are accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDrops {
    /// Packets longer than a frame holds, *and* those that met no entry, which count below too.
    pub dropped: u64,
    /// Packets that met a full RX ring. Their entries come back in another order: rebuild the queue.
    pub ring_full: u64,
    /// Packets that met no entry.
    pub no_entry: u64,
    /// Invalid entries, as far as they are counted.
    pub invalid: u64,
}

/// Why a wake-up failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WakeError {
    /// The device is down.
    #[error("the interface went down; set it up again (ip link set IF up)")]
    Down,
    /// The device or its queue no longer exists.
    #[error("the interface or its queue is gone; open the endpoint anew")]
    Gone,
    /// Anything else.
    #[error("cannot wake the AF_XDP socket: {0}")]
    System(io::Error),
}

/// Entries that were submitted and not looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Untaken {
    /// How many there are.
    pub count: u32,
    /// The device looks at none before it is woken.
    pub needs_wakeup: bool,
}

/// The receive side of a queue. Its n-th packet uses its n-th entry (I3); counts begin at what [`RxQueue::accepted`] says when it is opened.
pub trait RxQueue: fmt::Debug + Send {
    /// Entries that may be out at once.
    fn entries_max(&self) -> u32;

    /// How many entries may be written: at least `wanted` if there are so many, otherwise all that there are.
    fn room(&mut self, wanted: u32) -> u32;

    /// Writes the entry `offset` places behind the submitted ones: a frame of the memory, by its address.
    ///
    /// # Panics
    ///
    /// When `offset` is not below what [`RxQueue::room`] gave.
    fn write(&mut self, offset: u32, address: u64);

    /// Gives the next `count` entries, which were written, to the device.
    fn submit(&mut self, count: u32);

    /// Lets packets be accepted up to position `until`, for which there are entries (I3c).
    fn allow(&mut self, until: u64);

    /// Says of the frames that the packet at `position` will take, before it is allowed: how many there are, and the longest packet
    /// in bytes that may be written there. Only where packets may take several.
    fn set_slot(&mut self, _position: u64, _frames: u8, _longest: u16) {}

    /// Lets messages be accepted up to and including `message` (serial arithmetic) in the session at `place`.
    fn set_message_limit(&mut self, row: u32, message: u32);

    /// Entries that the device has not looked at.
    fn untaken(&mut self) -> Untaken {
        Untaken::default()
    }

    /// Makes the device look at its entries.
    ///
    /// # Errors
    ///
    /// See [`WakeError`].
    fn wake(&mut self) -> Result<(), WakeError> {
        Ok(())
    }

    /// Descriptors of received packets: at most `max`.
    fn available(&mut self, max: u32) -> u32;

    /// The descriptor `offset` places behind the released ones.
    ///
    /// # Panics
    ///
    /// When `offset` is not below what [`RxQueue::available`] gave.
    fn packet(&self, offset: u32) -> Descriptor;

    /// Gives the descriptors of `count` packets back, which were read.
    fn release(&mut self, count: u32);

    /// Packets that were accepted since the port was opened. Those below this may be asked for.
    fn accepted(&self) -> u64;

    /// What was accepted at `position`. In zero-copy mode nothing is known.
    fn entry(&self, position: u64) -> LogEntry;

    /// How many of the `most` packets from `position` on were accepted as `first` says, each with the next sequence number and the next
    /// lower index, whatever CPU accepted them.
    fn descending(&self, position: u64, first: &LogEntry, most: u32) -> u32;

    /// What was lost behind the point at which packets are accepted, since the queue was opened.
    fn drops(&self) -> QueueDrops;
}

/// The transmit side of a queue.
pub trait TxQueue: fmt::Debug + Send {
    /// Descriptors that may be out at once.
    fn descriptors_max(&self) -> u32;

    /// How many descriptors may be written: at least `wanted` if there are so many, otherwise all that there are.
    fn room(&mut self, wanted: u32) -> u32;

    /// Writes the descriptor `offset` places behind the submitted ones. Its packet lies at an even address.
    ///
    /// # Panics
    ///
    /// When `offset` is not below what [`TxQueue::room`] gave.
    fn write(&mut self, offset: u32, descriptor: Descriptor);

    /// Gives the next `count` descriptors, which were written, to the device.
    fn submit(&mut self, count: u32);

    /// Wakes the device where it has to be. Whether it was, and whether descriptors are left that it has not taken: call again then.
    ///
    /// # Errors
    ///
    /// See [`WakeError`]. What was submitted stays.
    fn flush(&mut self) -> Result<Flushed, WakeError>;

    /// Completions: at most `max`.
    fn completed(&mut self, max: u32) -> u32;

    /// Where the packet, or the piece of one, lies that was completed `offset` places behind the released ones.
    fn completion(&self, offset: u32) -> u64;

    /// Gives `count` completions back, which were read.
    fn release(&mut self, count: u32);
}

/// What [`TxQueue::flush`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flushed {
    /// The device was woken.
    pub woken: bool,
    /// Descriptors are left.
    pub unsent: bool,
}

/// How packets come to a landing queue, and leave: what an engine depends on, whatever the port is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Bytes of a packet that one frame holds, where packets may take several; 0: each takes one.
    pub capacity: u32,
    /// Bytes that are written before each packet (`virtio-net`: 10 to 12).
    pub prefix_len: u8,
    /// What was accepted is known, packet by packet ([`RxQueue::entry`]), and none is written further than it is long. If not, a device
    /// writes what comes, up to the frame's end, before anybody has looked at it: digests say what it was.
    pub witness: bool,
    /// A frame across the end of a huge page is passed over without a word.
    pub page_ends: bool,
    /// Landing entries are submitted in multiples of this many, the length of the device's receive ring; 1: as they come.
    ///
    /// `igb` (Linux 6.14 to 7.3 at least) leaves a stale length behind the last entry that it took when it was given fewer than it
    /// asked for and the request went over its ring's end (`igb_alloc_rx_buffers_zc`, drivers/net/ethernet/intel/igb/igb_xsk.c).
    /// When all before it are used it takes that one for a packet, frees a frame twice, and the kernel's memory is corrupt. At the
    /// ring's end it clears the length.
    pub lap: u32,
    /// Frames that a general queue keeps posted, beyond those that packets may be redirected into: twice the device's receive ring,
    /// and its driver never lacks some. Only without a witness.
    pub kept_frames: u32,
    /// Packets that may be uncompleted at once, where a completion says that the far end has taken the packet (veth): so many its ring
    /// holds. 0: completions say nothing of the path.
    pub tx_bound: u32,
    /// The sender's transmit queue selects the receiver's queue (veth, vhost): what is to land leaves on the queue that the grant names.
    pub tx_steers: bool,
    /// Packets whose descriptor asks for it get their UDP checksum on the way out (`struct xsk_tx_metadata`).
    pub sums: bool,
    /// Messages may land, and leave, that were not announced.
    pub ahead: bool,
}

impl Caps {
    /// Where the kernel writes packets, as they were accepted.
    pub const fn copying(capacity: u32) -> Caps {
        Caps {
            capacity,
            prefix_len: 0,
            witness: true,
            page_ends: false,
            lap: 1,
            kept_frames: 0,
            tx_bound: 0,
            tx_steers: false,
            sums: false,
            ahead: true,
        }
    }

    /// Where a device does, by physical addresses.
    pub const fn device() -> Caps {
        Caps {
            witness: false,
            page_ends: true,
            ..Caps::copying(0)
        }
    }

    /// Whether entries, and packets, can be taken many at once: each is one frame, a payload behind the one before it.
    #[inline]
    pub const fn has_runs(&self) -> bool {
        self.witness && self.capacity == 0
    }
}

/// Which packets the device puts on a queue.
#[derive(Clone, Copy, Debug)]
pub enum Steer<'a> {
    /// The fragments of a sender on a landing queue, and its other packets elsewhere.
    Landing {
        /// The landing queue.
        queue: u32,
        /// Where packets of the sender's data port come, if that is given.
        general: Option<u32>,
        /// The sender's data port.
        from: SocketAddrV4,
        /// The source port that its fragments have already ([`Steer::Later`]).
        port: Option<NonZeroU16>,
        /// What devices look at in its fragments.
        hashed: HashInput,
        /// Where ports count, nothing that comes from there comes to that queue.
        elsewhere: &'a [SocketAddrV4],
        /// No other sender has a session there.
        alone: bool,
    },
    /// The packets that a peer's data port sends to ours on a general queue. Without it they may come by the kernel's socket.
    General {
        /// The general queue.
        queue: u32,
        /// The peer's data port.
        from: SocketAddrV4,
    },
    /// Nothing yet: the fragments of a sender that may have a landing queue later are to have a source port by which the device can tell them
    /// then.
    Later {
        /// The sender's data port.
        from: SocketAddrV4,
        /// As in [`Steer::Landing`].
        elsewhere: &'a [SocketAddrV4],
    },
    /// No sender has fragments for a landing queue any more: nothing comes there.
    Nothing,
}

/// Who runs the receive work of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attend {
    /// Whoever does; this core may want to, later.
    Soon,
    /// This core, now: what has arrived is taken and processed, where that is possible.
    Now,
    /// This core, whenever it says [`Attend::Now`]. Packets of a queue that is kept and not attended to are late.
    Alone,
    /// Interrupts and the senders' cores do it again.
    NoMore,
}

/// What [`Port::attend`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attended {
    /// Others run the queue too, or it cannot be chosen.
    Shared,
    /// The queue is kept to this core.
    Kept,
    /// Nothing can be chosen before a datagram came *through that queue* to this UDP port of ours: the kernel tells a socket which NAPI
    /// instance serves it only with a packet. Said to [`Attend::Soon`].
    Needs(u16),
}

/// A network interface: queues, what is let in and where, and two datagram sockets beside.
///
/// One owner polls it: nothing here is meant for two threads at once.
pub trait Port {
    /// The receive side of its queues.
    type Rx: RxQueue;
    /// The transmit side of its queues.
    type Tx: TxQueue;

    /// Nanoseconds since any moment: the time by which all that an endpoint does is timed. It never goes back.
    fn now_ns(&self) -> u64;

    /// Opens a queue. One that only sends ([`Role::SendOnly`]) has no receive side.
    ///
    /// # Errors
    ///
    /// See [`PortError`].
    fn open(&mut self, spec: &QueueSpec) -> Result<(Option<Self::Rx>, Self::Tx), PortError>;

    /// Takes what opening this queue needs, as far as that can be done while another has its number: [`Port::rebuild`] with the same
    /// specification uses it.
    ///
    /// # Errors
    ///
    /// See [`PortError`]; nothing has changed then.
    fn prepare(&mut self, _spec: &QueueSpec) -> Result<(), PortError> {
        Ok(())
    }

    /// Opens a queue anew, with another registered length perhaps, or one that was lost: the old one goes, with whatever was posted on
    /// it. Positions go on, so that what [`RxQueue::accepted`] says is the new one's position 0, and no packet is allowed.
    ///
    /// # Errors
    ///
    /// See [`PortError`]. The queue is closed then, nothing comes and there is no room: rebuild it again.
    fn rebuild(&mut self, rx: &mut Self::Rx, tx: &mut Self::Tx, spec: &QueueSpec) -> Result<(), PortError>;

    /// Whether the device was removed since the last time this was asked.
    fn is_gone(&self) -> bool {
        false
    }

    /// Lets a session land on a landing queue. Nothing lands before its entries and its messages are allowed.
    ///
    /// # Errors
    ///
    /// See [`PortError`].
    fn admit(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), PortError>;

    /// Lets the session at a place of the queue land no more. A packet of it may still be accepted.
    ///
    /// # Errors
    ///
    /// See [`PortError`].
    fn revoke(&mut self, queue: u32, row: u32) -> Result<(), PortError>;

    /// When this returns no packet is accepted any more, as far as sessions are revoked (I4). Blocks for some milliseconds, unless packets
    /// are accepted by this thread.
    ///
    /// # Errors
    ///
    /// See [`PortError`].
    fn quiesce(&mut self, _queue: u32) -> Result<(), PortError> {
        Ok(())
    }

    /// Has the device put packets on queues, where it can. Gives the source port that a landing sender's fragments must have;
    /// `None`: its data port, because the device looks at something else (of IP fragments the addresses, on veth the transmit queue).
    ///
    /// # Errors
    ///
    /// See [`PortError`].
    fn steer(&mut self, _wish: Steer<'_>) -> Result<Option<NonZeroU16>, PortError> {
        Ok(None)
    }

    /// The datagram sockets.
    fn side(&mut self) -> &mut dyn Datagrams;

    /// Packets that were passed on and that a datagram socket here may receive.
    ///
    /// A hint when to call [`Datagrams::recv`], cheaper than a system call: it may move some microseconds *before* the datagram is
    /// there, it may move for a packet that never gets there, and it does not move for [`SocketEvent::Refused`]. So look at the
    /// sockets for a while after it moved, and every few milliseconds anyway.
    fn passed_count(&self) -> u64;

    /// What became of packets before they were accepted: names and numbers, to be reported. Not for a hot path.
    fn verdicts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Bytes of packets that the port itself copied, to entries and to a device's memory.
    fn copied(&self) -> u64 {
        0
    }

    /// Says who runs a queue's receive work, where that can be chosen.
    fn attend(&mut self, _queue: u32, _how: Attend) -> Attended {
        Attended::Shared
    }

    /// From now on this ends [`Port::wait`], too.
    fn wake_by(&mut self, _waker: Arc<Waker>) {}

    /// Blocks until something can be received, at most `timeout`; whether there is something.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn wait(&mut self, timeout: Duration) -> io::Result<bool>;

    /// How packets are moved.
    fn effective_mode(&self) -> EffectiveMode;

    /// What random numbers are made from; `None`: they are the kernel's. Only of a world that is to be repeatable.
    fn seed(&self) -> Option<u64> {
        None
    }
}

/// What a [`Port`] could not do; one line each, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// We have the queue open.
    #[error("queue {queue} is open already; choose another queue")]
    QueueOpen {
        /// The queue.
        queue: u32,
    },
    /// The queue is not open.
    #[error("queue {queue} is not open; open it first")]
    NoQueueOpen {
        /// The queue.
        queue: u32,
    },
    /// The interface has fewer queues.
    #[error("there is no queue {queue}, only 0 to {}; choose one of these (ethtool -l IF)", .queues.saturating_sub(1))]
    NoQueue {
        /// The queue.
        queue: u32,
        /// How many there are.
        queues: u32,
    },
    /// Another program has the queue, or had it a moment ago.
    #[error(transparent)]
    Busy(Box<dyn std::error::Error + Send + Sync>),
    /// The daemon that holds the gate did not do it.
    #[error(transparent)]
    Denied(Box<dyn std::error::Error + Send + Sync>),
    /// Anything else: what the part of the port says that could not do it.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}
