//! Sockets: what an application has of real time. Its thread and the endpoint's meet in bounded queues without locks.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use lm_dataplane::port::Port;
use lm_dataplane::{Endpoint, FlowError, FlowId, FlowSpec, HandlerError, Message, PeerId, Scope};
use lm_protocol::manifest::DIGEST_LEN;
use lm_protocol::smoother::{Parameters, ParametersError, Smoother};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{HEADER_LEN, RealTimePacket, TYPE_REALTIME, TYPE_RT_REPORT};

use crate::outgoing::Outgoing;
use crate::receiving::Receiving;
use crate::sending::{Leaving, Reports, Sent, Smoothed};

/// The host's monotonic time, as all programs of one host have it.
pub fn monotonic() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time::from_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// A flow's name, which nobody guesses.
fn random() -> u64 {
    let mut bytes = [0; 8];
    let read = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(read, Ok(bytes.len()), "the kernel gives no random numbers");
    u64::from_ne_bytes(bytes)
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere is that thread's failure; what is locked here is plain data.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the sockets of an endpoint share.
pub(crate) struct Hub {
    pub(crate) clock: Box<dyn Fn() -> Time + Send + Sync>,
    pub(crate) smoother: Option<Mutex<Smoother>>,
    /// Receiving sockets by their numbers, and flows that are sent. Locked in the endpoint's rounds, and where sockets open and close.
    pub(crate) sockets: Mutex<BTreeMap<u16, Arc<Queues>>>,
    pub(crate) flows: Mutex<Vec<(PeerId, Arc<Sent>)>>,
    pub(crate) refused_packets: AtomicU64,
    pub(crate) refused_reports: AtomicU64,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("smoother", &self.smoother)
            .finish_non_exhaustive()
    }
}

/// A message on its way from the socket to the endpoint.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) payload: Vec<u8>,
    pub(crate) priority: u8,
    pub(crate) deadline: Option<Time>,
    pub(crate) sent_at: Time,
}

/// Where a socket's thread and the endpoint's meet.
#[derive(Debug)]
pub(crate) struct Queues {
    pub(crate) orders: ArrayQueue<Order>,
    free: ArrayQueue<Vec<u8>>,
    arrived: ArrayQueue<RtMessage>,
    pub(crate) counts: Counts,
    pub(crate) drops_late: bool,
    pub(crate) same_host: bool,
}

impl Queues {
    pub(crate) fn give_back(&self, mut payload: Vec<u8>) {
        payload.clear();
        // There is room for all that were made.
        let _ = self.free.push(payload);
    }

    /// Keeps the last messages: the oldest gives way.
    pub(crate) fn deliver(&self, message: RtMessage) {
        if self.arrived.force_push(message).is_some() {
            self.counts.superseded_here.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sent: AtomicU64,
    pub(crate) unsent: AtomicU64,
    pub(crate) late_unsent: AtomicU64,
    pub(crate) superseded: AtomicU64,
    pub(crate) whole: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) late: AtomicU64,
    pub(crate) overtaken: AtomicU64,
    pub(crate) superseded_here: AtomicU64,
}

/// What a socket has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Messages that left.
    pub sent: u64,
    /// Messages whose deadline passed before they left.
    pub late_unsent: u64,
    /// Messages that gave way to newer ones before they left.
    pub superseded: u64,
    /// Of the messages that left, how many came, and how many did not, as far as their receiver said. Sums of 32 bits, which wrap.
    pub reported_whole: u32,
    /// As `reported_whole`.
    pub reported_lost: u32,
    /// Messages that came.
    pub whole: u64,
    /// Messages that did not come, by the gaps in their numbers.
    pub lost: u64,
    /// Messages that came behind their deadline.
    pub late: u64,
    /// Packets that came twice, or behind a newer message.
    pub overtaken: u64,
    /// Messages that came and gave way to newer ones before they were received here.
    pub superseded_here: u64,
    /// Packets for no socket here, or that no socket understands: of the whole endpoint.
    pub refused_packets: u64,
    /// Reports that cannot be true, or of no flow: of the whole endpoint.
    pub refused_reports: u64,
}

/// How a socket is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketConfig {
    /// Messages that wait to leave, and to be received, at most: the oldest gives way (DDS: HISTORY, keep last).
    pub keep: usize,
    /// Frames and descriptors that nothing else takes.
    pub frames: u32,
    /// Whether messages behind their deadline are dropped when they come. Else they are marked.
    pub drops_late: bool,
    /// Whether all who send here have this host's clock, as programs in its namespaces do. Of others only the delay above the flow's least
    /// counts for the deadline.
    pub same_host: bool,
}

impl Default for SocketConfig {
    fn default() -> SocketConfig {
        SocketConfig {
            keep: 16,
            frames: 16,
            drops_late: true,
            same_host: false,
        }
    }
}

/// How a message is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOptions {
    /// 0 to 7; 7 leaves first.
    pub priority: u8,
    /// How long it is of use from now on; `None`: it is never late.
    pub deadline: Option<Duration>,
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another socket has the number.
    #[error("a real-time socket has number {0} already; close that one, or choose another number")]
    Taken(u16),
    /// No message could wait, or leave.
    #[error("a real-time socket keeps at least one message and has at least one frame")]
    Empty,
    /// The endpoint has other handlers for these packets.
    #[error("this endpoint has real time already: {0}")]
    Handler(#[from] HandlerError),
    /// Frames and descriptors.
    #[error("no memory or descriptors are left for a real-time socket: {0}")]
    Flow(#[from] FlowError),
    /// The smoother's parameters.
    #[error("{0}")]
    Smoother(#[from] ParametersError),
}

/// Why a message is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The socket has no peer.
    #[error("the socket is not connected; connect it first")]
    NotConnected,
    /// It does not fit a packet.
    #[error("a real-time message has at most {0} bytes here; send it in parts")]
    TooLong(usize),
    /// The endpoint was not polled since so many messages were sent.
    #[error("the endpoint does not poll: all buffers of the socket wait for it")]
    NotPolled,
}

/// Real time on an endpoint: where its sockets come from.
#[derive(Clone, Debug)]
pub struct RealTime(Arc<Hub>);

impl RealTime {
    /// Takes the endpoint's real-time packets. With `link` a smoother of these parameters stands before everything else that leaves; `clock`
    /// says when messages are sent and received ([`monotonic`]).
    ///
    /// # Errors
    /// [`OpenError::Handler`], [`OpenError::Smoother`].
    pub fn new<P: Port>(
        endpoint: &mut Endpoint<P>,
        link: Option<Parameters>,
        clock: impl Fn() -> Time + Send + Sync + 'static,
    ) -> Result<RealTime, OpenError> {
        let smoother = link
            .map(|link| Smoother::new(link, endpoint.status().now()))
            .transpose()?;
        let hub = Arc::new(Hub {
            clock: Box::new(clock),
            smoother: smoother.map(Mutex::new),
            sockets: Mutex::default(),
            flows: Mutex::default(),
            refused_packets: AtomicU64::new(0),
            refused_reports: AtomicU64::new(0),
        });
        endpoint.extensions().add_handler(
            TYPE_REALTIME..=TYPE_REALTIME,
            Box::new(Receiving::new(Arc::clone(&hub))),
        )?;
        endpoint.extensions().add_handler(
            TYPE_RT_REPORT..=TYPE_RT_REPORT,
            Box::new(Reports(Arc::clone(&hub))),
        )?;
        if hub.smoother.is_some() {
            let smoothed = Smoothed {
                hub: Arc::clone(&hub),
                asked: endpoint.status().now(),
            };
            endpoint.extensions().shape(Scope::Port, Some(Box::new(smoothed)));
        }
        Ok(RealTime(hub))
    }

    /// A socket with this number.
    ///
    /// # Errors
    /// [`OpenError::Taken`], [`OpenError::Empty`].
    pub fn socket(&self, port: u16, config: &SocketConfig) -> Result<RtSocket, OpenError> {
        if config.keep == 0 || config.frames == 0 {
            return Err(OpenError::Empty);
        }
        let mut sockets = locked(&self.0.sockets);
        if sockets.contains_key(&port) {
            return Err(OpenError::Taken(port));
        }
        let buffers = 2 * config.keep;
        let queues = Arc::new(Queues {
            orders: ArrayQueue::new(buffers),
            free: ArrayQueue::new(buffers),
            arrived: ArrayQueue::new(config.keep),
            counts: Counts::default(),
            drops_late: config.drops_late,
            same_host: config.same_host,
        });
        sockets.insert(port, Arc::clone(&queues));
        Ok(RtSocket {
            hub: Arc::clone(&self.0),
            queues,
            port,
            config: *config,
            payload_max: 0,
            flow: None,
        })
    }

    /// Credits a second that the smoother gives to what is not real-time; `None`: there is no smoother.
    pub fn credits_per_second(&self) -> Option<u32> {
        let smoother = self.0.smoother.as_ref()?;
        Some(locked(smoother).rate().credits_per_second())
    }
}

/// A real-time socket. It may be sent to a thread of its own; the endpoint is polled by another.
#[derive(Debug)]
pub struct RtSocket {
    hub: Arc<Hub>,
    queues: Arc<Queues>,
    port: u16,
    config: SocketConfig,
    payload_max: usize,
    flow: Option<(FlowId, PeerId, Arc<Sent>)>,
}

impl RtSocket {
    /// Sends to socket `port` of a peer from now on, and to the one before no more.
    ///
    /// # Errors
    /// [`OpenError::Flow`].
    pub fn connect<P: Port>(
        &mut self,
        endpoint: &mut Endpoint<P>,
        peer: PeerId,
        port: u16,
    ) -> Result<(), OpenError> {
        let spec = FlowSpec {
            to: peer,
            frames: self.config.frames,
            descriptors: self.config.frames,
        };
        let flow = Arc::new(Sent::new(random()));
        let leaving = Leaving {
            queues: Arc::clone(&self.queues),
            hub: Arc::clone(&self.hub),
            outgoing: Outgoing::new(self.config.keep),
            flow: Arc::clone(&flow),
            from: endpoint.local(),
            port,
            free: (0..self.config.frames).collect(),
        };
        self.disconnect(endpoint);
        let id = endpoint.extensions().add_flow(&spec, Box::new(leaving))?;
        locked(&self.hub.flows).push((peer, Arc::clone(&flow)));
        let mtu = endpoint.status().device().mtu as usize;
        self.payload_max = mtu - (20 + 8 + HEADER_LEN + RealTimePacket::TAIL_LEN + DIGEST_LEN);
        // All buffers are made here: sending takes none.
        while self
            .queues
            .free
            .push(Vec::with_capacity(self.payload_max))
            .is_ok()
        {}
        self.flow = Some((id, peer, flow));
        Ok(())
    }

    /// Takes its frames and descriptors from the endpoint, which a socket that is dropped leaves there. What has not left is lost.
    pub fn close<P: Port>(mut self, endpoint: &mut Endpoint<P>) {
        self.disconnect(endpoint);
    }

    fn disconnect<P: Port>(&mut self, endpoint: &mut Endpoint<P>) {
        if let Some((id, peer, flow)) = self.flow.take() {
            endpoint.extensions().remove_flow(id);
            locked(&self.hub.flows).retain(|known| known.0 != peer || known.1.key != flow.key);
        }
    }

    /// The longest message, in bytes: what one packet holds. 0 before it is connected.
    pub fn payload_max(&self) -> usize {
        self.payload_max
    }

    /// Hands a message over, which is copied; never waits. It leaves in the endpoint's next round, by its priority and its deadline.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send(&mut self, payload: &[u8], options: SendOptions) -> Result<(), SendError> {
        if self.flow.is_none() {
            return Err(SendError::NotConnected);
        }
        if payload.len() > self.payload_max {
            return Err(SendError::TooLong(self.payload_max));
        }
        let mut buffer = self.queues.free.pop().ok_or(SendError::NotPolled)?;
        buffer.extend_from_slice(payload);
        let sent_at = (self.hub.clock)();
        let order = Order {
            payload: buffer,
            priority: options.priority.min(7),
            deadline: options.deadline.map(|deadline| sent_at + deadline),
            sent_at,
        };
        // As many have room as there are buffers.
        let _ = self.queues.orders.push(order);
        Ok(())
    }

    /// The next message that came.
    pub fn recv(&mut self) -> Option<RtMessage> {
        self.queues.arrived.pop()
    }

    /// What it has done so far.
    pub fn statistics(&self) -> Statistics {
        let counts = &self.queues.counts;
        // Relaxed: each number is right for itself.
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let flow = self.flow.as_ref().map(|(_, _, flow)| flow);
        Statistics {
            sent: of(&counts.sent),
            late_unsent: of(&counts.late_unsent),
            superseded: of(&counts.superseded),
            reported_whole: flow.map_or(0, |flow| flow.whole()),
            reported_lost: flow.map_or(0, |flow| flow.lost()),
            whole: of(&counts.whole),
            lost: of(&counts.lost),
            late: of(&counts.late),
            overtaken: of(&counts.overtaken),
            superseded_here: of(&counts.superseded_here),
            refused_packets: of(&self.hub.refused_packets),
            refused_reports: of(&self.hub.refused_reports),
        }
    }
}

impl Drop for RtSocket {
    fn drop(&mut self) {
        locked(&self.hub.sockets).remove(&self.port);
    }
}

/// What is known of a message beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Who sent it.
    pub from: PeerId,
    /// Its number in its flow.
    pub number: u32,
    /// 0 to 7.
    pub priority: u8,
    /// When it was sent, by its sender's clock.
    pub sent_at: Time,
    /// When it came, by this host's.
    pub received_at: Time,
    /// How much longer it took than the fastest of the last ten seconds.
    pub delay: Duration,
    /// Messages that did not come since the one before.
    pub lost: u32,
    /// It came behind its deadline.
    pub late: bool,
}

/// A real-time message, where it came in. Its frame goes back when it is dropped.
#[derive(Debug)]
pub struct RtMessage {
    pub(crate) message: Message,
    pub(crate) len: usize,
    pub(crate) info: Info,
}

impl RtMessage {
    /// What is known of it.
    pub fn info(&self) -> &Info {
        &self.info
    }
}

impl Deref for RtMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.message[..self.len]
    }
}
