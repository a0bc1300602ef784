//! What the engine needs of a network interface: the trait that the kernel's and the simulated one implement.
//!
//! A [`Nic`] hands out *channels*: the application's ends of the four rings of one queue. The engine owns and polls
//! these; everything that is a system call on the kernel's side goes through the trait, so that the same engine runs on
//! [`KernelNic`](crate::kernel::KernelNic) and, without root, on [`SimNic`](crate::simnic::SimNic).

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU16;
use std::time::Duration;

use lm_cards::SteeringError;
use lm_ebpf::{AttachError, AttachMode, Counters, GateError, Log, Role, SessionAdmission};
use lm_protocol::rss::HashInput;

use crate::daemon::{Client, DaemonError};
use crate::memory::Umem;
use crate::ring::{CompletionRing, FillRing, RxRing, TxRing};
use crate::udp::{Port, UdpError, UdpEvent};
use crate::xsk::{BindMode, WakeError, XdpStatistics, XskError};

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

impl ModeRequest {
    /// Where to attach the gate.
    pub fn attach_mode(self) -> AttachMode {
        match self {
            ModeRequest::Auto => AttachMode::Auto,
            ModeRequest::ZeroCopy | ModeRequest::Copy => AttachMode::Native,
            ModeRequest::Generic => AttachMode::Generic,
        }
    }

    /// How to bind the sockets.
    pub fn bind_mode(self) -> BindMode {
        match self {
            ModeRequest::ZeroCopy => BindMode::ZeroCopy,
            ModeRequest::Auto | ModeRequest::Copy | ModeRequest::Generic => BindMode::Copy,
        }
    }
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
            EffectiveMode::Simulated => "simulated",
        })
    }
}

/// What channel to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// The queue of the interface.
    pub queue: u32,
    /// What the gate redirects there. [`Role::None`]: nothing, the channel only sends.
    pub role: Role,
    /// Bytes of the memory to register, from its start; whole pages.
    pub registered_len: u64,
    /// Fill ring length in entries, a power of two, as for the others.
    pub fill_len: u32,
    /// RX ring length in entries: at least `fill_len` (I3d).
    pub rx_len: u32,
    /// TX ring length in entries.
    pub tx_len: u32,
    /// Completion ring length in entries: at least as many as packets in flight.
    pub completion_len: u32,
}

/// The application's end of one queue: its four rings.
#[derive(Debug)]
pub struct Channel {
    /// The queue of the interface.
    pub queue: u32,
    /// Frames to receive into.
    pub fill: FillRing,
    /// Packets received. Counts start at 0 with each channel opened, unlike [`Log`] positions.
    pub rx: RxRing,
    /// Packets to send, at even addresses.
    pub tx: TxRing,
    /// Packets sent.
    pub completion: CompletionRing,
}

/// What has to be known of a device in zero-copy mode, and of its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Bytes before each packet (`virtio-net`: 10 to 12).
    pub prefix_len: u8,
    /// Frames that a general queue keeps posted, beyond those that packets may be redirected into: twice the device's receive ring,
    /// and its driver never lacks some.
    pub kept_frames: u32,
    /// Landing entries are submitted in multiples of this many, the length of the device's receive ring; 1: as they come.
    ///
    /// `igb` (Linux 6.14 to 7.3 at least) leaves a stale length behind the last entry that it took when it was given fewer than it
    /// asked for and the request went over its ring's end (`igb_alloc_rx_buffers_zc`, drivers/net/ethernet/intel/igb/igb_xsk.c).
    /// When all before it are used it takes that one for a packet, frees a frame twice, and the kernel's memory is corrupt. At the
    /// ring's end it clears the length.
    pub lap: u32,
}

/// A network interface with the gate on it and two UDP sockets beside it.
///
/// One owner polls it: nothing here is meant for two threads at once. Time is the caller's.
pub trait Nic {
    /// Opens a channel and gives its queue the role.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn open_channel(&mut self, config: &ChannelConfig) -> Result<Channel, NicError>;

    /// Opens a channel that only sends, on a queue that has no channel yet.
    ///
    /// For devices where another queue than the landing queue's number reaches the receiver's landing queue (veth in generic
    /// mode delivers what queue q + 1 sends to queue q).
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn tx_channel(&mut self, config: &ChannelConfig) -> Result<Channel, NicError> {
        self.open_channel(&ChannelConfig {
            role: Role::None,
            ..*config
        })
    }

    /// Takes what opening this channel needs, as far as that can be done while its queue has another: [`Nic::rebuild_channel`] and
    /// [`Nic::open_channel`] with the same configuration use it.
    ///
    /// # Errors
    ///
    /// See [`NicError`]; nothing has changed then.
    fn prepare_channel(&mut self, config: &ChannelConfig) -> Result<(), NicError> {
        let _ = config;
        Ok(())
    }

    /// Opens a channel anew, with another registered length perhaps; the role comes from `config`. An open session is closed
    /// first and the old channel goes, with whatever was posted on it; [`Log`] positions go on, so take `producer()` as the
    /// new channel's position 0.
    ///
    /// # Errors
    ///
    /// See [`NicError`]. The queue has no channel then: open one.
    fn rebuild_channel(&mut self, old: Channel, config: &ChannelConfig) -> Result<Channel, NicError>;

    /// Gives up a channel: nothing is redirected to its queue any more.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn close_channel(&mut self, channel: Channel) -> Result<(), NicError>;

    /// Sends what is on the queue's TX ring. Call again while descriptors are left: copy mode sends some 32 a call.
    ///
    /// # Errors
    ///
    /// See [`WakeError`].
    fn wake_tx(&mut self, queue: u32) -> Result<(), WakeError>;

    /// Lets the driver look at the queue's fill ring.
    ///
    /// # Errors
    ///
    /// See [`WakeError`].
    fn wake_rx(&mut self, queue: u32) -> Result<(), WakeError>;

    /// Whether the device was removed since the last time this was asked.
    fn is_gone(&self) -> bool {
        false
    }

    /// What was lost on a queue since its channel was opened.
    ///
    /// # Errors
    ///
    /// What the system says; none are expected of an open channel.
    fn statistics(&self, queue: u32) -> io::Result<XdpStatistics>;

    /// Lets a session land on a landing queue. Nothing lands before the log's limits allow it.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn open_session(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), NicError>;

    /// Closes the session at a place of the queue. The gate may still be accepting a packet of it.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn close_session(&mut self, queue: u32, place: u32) -> Result<(), NicError>;

    /// When this returns the log has stopped, as far as sessions are closed (I4). Blocks for some milliseconds.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn quiesce(&mut self, queue: u32) -> Result<(), NicError>;

    /// The log of a queue that has a role.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn log(&self, queue: u32) -> Result<Log, NicError>;

    /// Packets that the gate passed and that a UDP socket here may receive.
    ///
    /// A hint when to call [`Nic::udp_recv`], cheaper than a system call: it may move some microseconds *before* the datagram is
    /// there, it may move for a packet that never gets there, and it does not move for [`UdpEvent::Refused`]. So look at the
    /// sockets for a while after it moved, and every few milliseconds anyway.
    fn passed_count(&self) -> u64;

    /// What the gate decided, by verdict. Not for a hot path.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn gate_counters(&self) -> Result<Counters, NicError>;

    /// Address and port of the data socket; the control socket has the next port.
    fn local(&self) -> SocketAddrV4;

    /// Ethernet address of the next hop towards `ip`, if it is known now; else the kernel is made to find it out. Does not
    /// block.
    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]>;

    /// Sends a datagram through the kernel.
    ///
    /// # Errors
    ///
    /// `WouldBlock` is back-pressure; otherwise what the system says.
    fn udp_send(&mut self, port: Port, to: SocketAddrV4, payload: &[u8]) -> io::Result<()>;

    /// The next datagram or refusal, if there is one; datagrams longer than `space` are dropped.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn udp_recv(&mut self, port: Port, space: &mut [u8]) -> io::Result<Option<UdpEvent>>;

    /// As [`Nic::udp_recv`], into the `len` bytes of the UMEM at `addr`.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn udp_recv_into(&mut self, port: Port, umem: &Umem, addr: u64, len: u64)
    -> io::Result<Option<UdpEvent>>;

    /// Takes and processes what has arrived at a queue now, on this core, where that is possible. Without it the
    /// sender's core (veth) or an interrupt does so.
    fn busy_poll(&mut self, queue: u32) {
        let _ = queue;
    }

    /// A UDP port of ours at which a datagram has to arrive *through that queue* before [`Nic::busy_poll`] can work:
    /// the kernel tells a socket which NAPI instance serves it only with a packet. `None`: not needed (any more).
    fn busy_poll_port(&mut self, queue: u32) -> Option<u16> {
        let _ = queue;
        None
    }

    /// Keeps a queue's receive work to [`Nic::busy_poll`], or lets interrupts and senders' cores do it again. Whether it is kept now.
    /// Packets of a queue that is kept and not polled are late.
    fn keep_queue(&mut self, queue: u32, keep: bool) -> bool {
        let _ = (queue, keep);
        false
    }

    /// Blocks until something can be received, at most `timeout`; whether there is something.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn wait(&mut self, timeout: Duration) -> io::Result<bool>;

    /// Has the device put the fragments of a sender on landing queue `queue`, and its other packets elsewhere: those of its data
    /// port on queue `general`, if that is given. `from` is its data port, `hashed` what devices look at in its fragments, `alone`
    /// says that no other sender has a session there. Where ports count, nothing that comes from `elsewhere` comes to that queue. Gives
    /// the source port that its fragments must have; `None`: its data port, because the device looks at something else (of IP fragments
    /// the addresses, on veth the transmit queue).
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn lead(
        &mut self,
        queue: u32,
        general: Option<u32>,
        from: SocketAddrV4,
        hashed: HashInput,
        elsewhere: &[SocketAddrV4],
        alone: bool,
    ) -> Result<Option<NonZeroU16>, NicError> {
        let _ = (queue, general, from, hashed, elsewhere, alone);
        Ok(None)
    }

    /// Has the device put the packets that a peer's data port sends to ours on queue `general`, where it can. Without it they may come by
    /// the kernel's socket.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn keep(&mut self, general: u32, peer: SocketAddrV4) -> Result<(), NicError> {
        let _ = (general, peer);
        Ok(())
    }

    /// No sender has fragments for a landing queue any more: nothing comes there.
    ///
    /// # Errors
    ///
    /// See [`NicError`].
    fn unlead(&mut self) -> Result<(), NicError> {
        Ok(())
    }

    /// From now on channels of [`Role::Landing`] are opened in copy mode, whatever was asked for.
    fn land_in_copy_mode(&mut self);

    /// How packets are moved.
    fn effective_mode(&self) -> EffectiveMode;

    /// The admission daemon, where it holds the gate in our place.
    fn steward(&mut self) -> Option<&mut Client> {
        None
    }

    /// Whether the daemon may have said something, so long after it was last looked at. No system call.
    #[inline]
    fn has_news(&self, since_ns: u64) -> bool {
        let _ = since_ns;
        false
    }

    /// The daemon granted a session at a place of the landing queue, and the gate is open to it.
    fn session_opened(&mut self, place: u32, key: u64) {
        let _ = (place, key);
    }

    /// The daemon ended a session, or was asked to.
    fn session_ended(&mut self, key: u64) {
        let _ = key;
    }

    /// The device, where it reads and writes packets itself: zero-copy mode. `None`: the kernel copies them.
    fn device(&self) -> Option<Device> {
        None
    }
}

/// What a [`Nic`] could not do; one line each, with what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum NicError {
    /// An AF_XDP socket.
    Xsk(XskError),
    /// The UDP sockets.
    Udp(UdpError),
    /// Attaching the gate.
    Attach(AttachError),
    /// The attached gate.
    Gate(GateError),
    /// The device's spread of packets over queues.
    Steering(SteeringError),
    /// The admission daemon.
    Daemon(DaemonError),
    /// A channel is already open on the queue.
    ChannelOpen {
        /// The queue.
        queue: u32,
    },
    /// No channel is open on the queue.
    NoChannel {
        /// The queue.
        queue: u32,
    },
    /// The interface has fewer queues.
    NoQueue {
        /// The queue.
        queue: u32,
        /// How many there are.
        queues: u32,
    },
}

impl fmt::Display for NicError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NicError::Xsk(error) => error.fmt(f),
            NicError::Udp(error) => error.fmt(f),
            NicError::Attach(error) => error.fmt(f),
            NicError::Gate(error) => error.fmt(f),
            NicError::Steering(error) => error.fmt(f),
            NicError::Daemon(error) => error.fmt(f),
            NicError::ChannelOpen { queue } => {
                write!(f, "queue {queue} already has a channel; choose another queue")
            }
            NicError::NoChannel { queue } => write!(f, "queue {queue} has no channel; open one first"),
            NicError::NoQueue { queue, queues } => write!(
                f,
                "there is no queue {queue}, only 0 to {}; choose one of these (ethtool -l IF)",
                queues.saturating_sub(1)
            ),
        }
    }
}

impl std::error::Error for NicError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // The text is the inner error's own, so what comes next is that one's source.
        match self {
            NicError::Xsk(error) => error.source(),
            NicError::Udp(error) => error.source(),
            NicError::Attach(error) => error.source(),
            NicError::Gate(error) => error.source(),
            NicError::Steering(error) => error.source(),
            NicError::Daemon(error) => error.source(),
            _ => None,
        }
    }
}

impl From<DaemonError> for NicError {
    fn from(error: DaemonError) -> NicError {
        NicError::Daemon(error)
    }
}

impl From<XskError> for NicError {
    fn from(error: XskError) -> NicError {
        NicError::Xsk(error)
    }
}

impl From<UdpError> for NicError {
    fn from(error: UdpError) -> NicError {
        NicError::Udp(error)
    }
}

impl From<AttachError> for NicError {
    fn from(error: AttachError) -> NicError {
        NicError::Attach(error)
    }
}

impl From<SteeringError> for NicError {
    fn from(error: SteeringError) -> NicError {
        NicError::Steering(error)
    }
}

impl From<GateError> for NicError {
    fn from(error: GateError) -> NicError {
        NicError::Gate(error)
    }
}
