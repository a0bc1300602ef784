//! Sockets: what an application has of real time. Its thread and the endpoint's meet in bounded queues without locks.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use lm_cards::{Follower, Foreign, Traffic};
use lm_dataplane::port::Port;
use lm_dataplane::{
    Endpoint, FlowError, FlowId, FlowSpec, HandlerError, HandlerId, PeerId, Scope, SendError as MessageError,
    Waker,
};
use lm_protocol::manifest::DIGEST_LEN;
use lm_protocol::smoother::{Parameters, Smoother};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{HEADER_LEN, RealTimePacket, TYPE_REALTIME, TYPE_RT_REPORT};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::assembling::Assembling;
use crate::error::{NotSent, OpenError, SendError};
use crate::message::{Deadline, RtMessage, SendOptions, SendOutcome};
use crate::pool::{Block, Blocks, Pool, RtBuffer};
use crate::queues::{ArrivingEnd, Order, SocketEnds, SocketState, queues};
use crate::receiving::{Expected, Receiving};
use crate::sending::{Leaving, Reports, Sent};
use crate::smoothing::{Declared, Lease, Smoothed, Smoothing, Source};
use crate::statistics::{Histograms, Statistics};

/// Frames of a socket at most: a transmit ring is shorter. How many are left, the endpoint says when the socket is connected.
const FRAMES_MAX: u32 = 4096;

/// A period that ends more often than rounds are made counts nothing.
pub(crate) const PERIOD_LEAST: Duration = Duration::from_micros(10);

/// The host's monotonic time, as all programs of one host have it.
pub fn monotonic() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time::from_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere is that thread's failure; what is locked here is plain data.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the sockets of an endpoint share.
pub(crate) struct Hub {
    pub(crate) clock: Box<dyn Fn() -> Time + Send + Sync>,
    pub(crate) smoothing: Arc<Smoothing>,
    /// Most bytes of a message in one packet.
    pub(crate) packet_payload_max: usize,
    /// Takes the packets that come.
    handler: OnceLock<HandlerId>,
    /// Wakes the endpoint.
    waker: Arc<Waker>,
    /// Sockets by their numbers, and flows that are sent. Locked by the endpoint's thread alone: in its rounds, and where sockets open, connect
    /// and close.
    pub(crate) sockets: Mutex<BTreeMap<u16, Receiver>>,
    pub(crate) flows: Mutex<Vec<(PeerId, Arc<Sent>)>>,
    pub(crate) refused_packets: AtomicU64,
    pub(crate) refused_reports: AtomicU64,
    pub(crate) flows_known: AtomicU64,
    pub(crate) flow_looks: AtomicU64,
    flow_numbers: AtomicU16,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("smoothing", &self.smoothing)
            .finish_non_exhaustive()
    }
}

impl Hub {
    /// Whether it was made for this endpoint, by whose waker that is known.
    fn is_of<P: Port>(&self, endpoint: &mut Endpoint<P>) -> Result<(), OpenError> {
        let waker = endpoint.extensions().waker().map_err(OpenError::Waker)?;
        match Arc::ptr_eq(&waker, &self.waker) {
            true => Ok(()),
            false => Err(OpenError::OtherEndpoint),
        }
    }

    /// Gives up what is kept for sockets that are gone.
    fn sweep<P: Port>(&self, endpoint: &mut Endpoint<P>) {
        locked(&self.sockets).retain(|_, receiver| {
            let is_open = !receiver.arriving.state.is_closed();
            if !is_open {
                endpoint.extensions().remove_flow(receiver.flow);
            }
            is_open
        });
        locked(&self.flows).retain(|(_, flow)| !flow.is_over());
        // No more than was reserved before.
        let _ = self.reserve(endpoint, 0);
    }

    /// Reserves the frames that packets for its sockets come into, and so many more.
    fn reserve<P: Port>(&self, endpoint: &mut Endpoint<P>, more: u32) -> Result<(), HandlerError> {
        let Some(handler) = self.handler.get() else {
            return Ok(());
        };
        let sockets = locked(&self.sockets);
        let frames = { sockets.values() }.fold(more, |sum, receiver| {
            sum.saturating_add(receiver.arriving.state.frames())
        });
        endpoint.extensions().reserve_frames(*handler, frames)
    }
}

/// A socket as its endpoint's rounds see it.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) arriving: ArrivingEnd,
    pub(crate) assembling: Assembling,
    /// Of a socket with a period.
    pub(crate) expected: Option<Expected>,
    /// What leaves of it.
    flow: FlowId,
}

/// How a socket is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketConfig {
    /// Messages that wait to leave, and to be received, at most: the oldest gives way (DDS: HISTORY, keep last). So many frames and two more are
    /// reserved for messages of one packet, which come in them: one that comes, and one in use.
    pub keep: usize,
    /// Frames and descriptors that nothing else takes.
    pub frames: u32,
    /// Blocks for messages of several packets: at least [`keep`](Self::keep) + 2 of each kind that there are. Without, a message has one packet.
    pub blocks: Blocks,
    /// Whether messages behind their deadline are dropped when they come. Else they are marked.
    pub drops_late: bool,
    /// Whether all who send here have this host's clock, as programs in its namespaces do. Of others only the delay above the flow's least
    /// counts for the deadline.
    pub same_host: bool,
    /// A message is expected in each such period, from the first one that comes on (DDS: DEADLINE): one that passes without is counted, and
    /// [`RtSocket::missed`] tells of it. Of all who send here together; a socket for each sender tells them apart.
    pub period: Option<Duration>,
    /// Packets that it sends in a second: what is more leaves all the same, and is counted ([`Statistics::beyond_rate`]). Sockets on an interface
    /// with a smoother declare three quarters of its link together at most, as packets of full length.
    pub packets_per_second: Option<NonZeroU32>,
}

impl SocketConfig {
    fn check(&self) -> Result<(), OpenError> {
        let keep = self.keep;
        let few = |(_, count): &(u64, u32)| (*count as usize) < keep.saturating_add(2);
        if keep == 0 || self.frames == 0 {
            return Err(OpenError::Empty);
        }
        if self.period.is_some_and(|period| period < PERIOD_LEAST) {
            return Err(OpenError::Period);
        }
        if self.frames > FRAMES_MAX {
            return Err(OpenError::ManyFrames(FRAMES_MAX));
        }
        match self.blocks.counts().find(few) {
            Some((pages, count)) => Err(OpenError::FewBlocks { pages, count, keep }),
            None => Ok(()),
        }
    }
}

impl Default for SocketConfig {
    fn default() -> SocketConfig {
        SocketConfig {
            keep: 16,
            frames: 16,
            blocks: Blocks::default(),
            drops_late: true,
            same_host: false,
            period: None,
            packets_per_second: None,
        }
    }
}

/// Real time on an endpoint: where its sockets come from.
#[derive(Clone, Debug)]
pub struct RealTime(Arc<Hub>);

impl RealTime {
    /// Takes the endpoint's real-time packets. With `link` a smoother of these parameters stands before everything else that leaves; `clock`
    /// says when messages are sent and received ([`monotonic`]).
    ///
    /// The smoother of an endpoint behind the admission daemon is the daemon's, which all programs on the interface share, where it has one
    /// (`lm-admissiond --link-rate`).
    ///
    /// # Errors
    /// [`OpenError::Handler`], [`OpenError::Smoother`], [`OpenError::Waker`].
    pub fn new<P: Port>(
        endpoint: &mut Endpoint<P>,
        link: Option<Parameters>,
        clock: impl Fn() -> Time + Send + Sync + 'static,
    ) -> Result<RealTime, OpenError> {
        let smoothing = Arc::new(smoothing(endpoint, link)?);
        let mtu = endpoint.status().device().mtu as usize;
        let hub = Arc::new(Hub {
            packet_payload_max: mtu - (20 + 8 + HEADER_LEN + RealTimePacket::TAIL_LEN + DIGEST_LEN),
            clock: Box::new(clock),
            smoothing: Arc::clone(&smoothing),
            handler: OnceLock::new(),
            waker: endpoint.extensions().waker().map_err(OpenError::Waker)?,
            sockets: Mutex::default(),
            flows: Mutex::default(),
            refused_packets: AtomicU64::new(0),
            refused_reports: AtomicU64::new(0),
            flows_known: AtomicU64::new(0),
            flow_looks: AtomicU64::new(0),
            flow_numbers: AtomicU16::new(0),
        });
        let handler = endpoint.extensions().add_handler(
            TYPE_REALTIME..=TYPE_REALTIME,
            Box::new(Receiving::new(Arc::clone(&hub))),
        )?;
        // It is set once, here.
        let _ = hub.handler.set(handler);
        endpoint.extensions().add_handler(
            TYPE_RT_REPORT..=TYPE_RT_REPORT,
            Box::new(Reports(Arc::clone(&hub))),
        )?;
        if smoothing.is_there() {
            let smoothed = Smoothed {
                smoothing,
                asked: endpoint.status().now(),
            };
            endpoint.extensions().shape(Scope::Port, Some(Box::new(smoothed)));
        }
        Ok(RealTime(hub))
    }

    /// Has what the kernel sends on an interface of the calling thread's network namespace, the endpoint's, follow the smoother, too: from
    /// the next socket that is opened to the last that is dropped it has the rate that LM's own packets leave, in a class of HTB, and the
    /// kernel's packets marked EF (DSCP 46) are never held back. Then the interface is as before.
    ///
    /// That takes CAP_NET_ADMIN and a kernel with HTB. Where it cannot be had, or an administrator has set a root qdisc that is to stay, the
    /// kernel's traffic is not held back, and a warning (`tracing`) says why, once.
    ///
    /// Behind the admission daemon that is the daemon's to do (`--replace-qdisc`), and this does nothing.
    pub fn hold_kernel(&self, interface: &str, foreign: Foreign) {
        self.0.smoothing.hold_kernel(interface, foreign);
    }

    /// What of the kernel's traffic has left, and what waits, at the last refresh; `None`: it does not follow the endpoint's own smoother.
    pub fn kernel_traffic(&self) -> Option<Traffic> {
        self.0.smoothing.follower()?.traffic()
    }

    /// Whether the kernel's traffic follows the smoother: that of the endpoint, or behind the admission daemon the daemon's.
    pub fn holds_kernel(&self) -> bool {
        self.0.smoothing.holds_kernel()
    }

    /// A socket with this number on the endpoint that real time was made for. All memory that its messages will need is taken here, and locked, and
    /// so are the frames and descriptors that they leave in.
    ///
    /// # Errors
    /// [`OpenError`]: of all but handlers and smoothers.
    pub fn socket<P: Port>(
        &self,
        endpoint: &mut Endpoint<P>,
        port: u16,
        config: &SocketConfig,
    ) -> Result<RtSocket, OpenError> {
        config.check()?;
        self.0.is_of(endpoint)?;
        self.0.sweep(endpoint);
        if locked(&self.0.sockets).contains_key(&port) {
            return Err(OpenError::Taken(port));
        }
        let declared = (self.0.smoothing.declare(config.packets_per_second)).map_err(OpenError::Rate)?;
        let (keep, packet) = (config.keep, self.0.packet_payload_max);
        let out =
            Pool::new(Some((packet, keep.saturating_mul(2))), config.blocks).map_err(OpenError::Blocks)?;
        let blocks: usize = config.blocks.counts().map(|(_, count)| count as usize).sum();
        let assembling = Assembling::new(Pool::new(None, config.blocks).map_err(OpenError::Blocks)?, blocks);
        let frames = u32::try_from(keep).unwrap_or(u32::MAX).saturating_add(2);
        let state =
            SocketState::new(config.drops_late, config.same_host, frames).map_err(OpenError::Waker)?;
        let (ends, leaving, arriving) = queues(state, 2 * keep + blocks, keep);
        let state = Arc::clone(&arriving.state);
        let spec = FlowSpec {
            to: None,
            frames: config.frames,
            descriptors: config.frames,
            messages: self.0.smoothing.port_bound(),
        };
        let leaving = Leaving::new(leaving, &self.0, config, endpoint.local());
        self.0
            .reserve(endpoint, frames)
            .map_err(OpenError::ReceiveFrames)?;
        let flow = match endpoint.extensions().add_flow(&spec, Box::new(leaving)) {
            Ok(flow) => flow,
            Err(error) => {
                self.0.sweep(endpoint);
                return Err(error.into());
            }
        };
        let receiver = Receiver {
            arriving,
            assembling,
            expected: config.period.map(Expected::new),
            flow,
        };
        locked(&self.0.sockets).insert(port, receiver);
        let follower = self.0.smoothing.follow();
        Ok(RtSocket {
            _follower: follower,
            _declared: declared,
            hub: Arc::clone(&self.0),
            state,
            ends,
            leaving: flow,
            payload_max: config
                .blocks
                .longest()
                .map_or(packet, |longest| longest.max(packet)),
            out,
            connected: None,
            missed: 0,
        })
    }

    /// Credits a second that the smoother gives to what is not real-time; `None`: there is no smoother.
    pub fn credits_per_second(&self) -> Option<u32> {
        self.0.smoothing.credits_per_second()
    }
}

/// The smoother of an endpoint's interface.
fn smoothing<P: Port>(endpoint: &Endpoint<P>, link: Option<Parameters>) -> Result<Smoothing, OpenError> {
    if let Some(daemon) = endpoint.status().daemon() {
        let interface = &endpoint.status().device().name;
        match Lease::ask(&daemon, interface) {
            Ok(lease) => return Ok(Smoothing::new(Source::Daemons(lease), endpoint.status().now())),
            Err(what) => tracing::info!(interface, "the admission daemon has no smoother: {what}"),
        }
    }
    let now = endpoint.status().now();
    let source = match link {
        Some(link) => Source::Own(Mutex::new(Smoother::new(link, now)?)),
        None => Source::Nothing,
    };
    Ok(Smoothing::new(source, now))
}

/// A real-time socket. It may be sent to a thread of its own; the endpoint is polled by another. Neither waits for the other to send or receive.
#[derive(Debug)]
pub struct RtSocket {
    hub: Arc<Hub>,
    state: Arc<SocketState>,
    ends: SocketEnds,
    leaving: FlowId,
    payload_max: usize,
    /// Memory for messages until they leave.
    out: Arc<Pool>,
    connected: Option<(PeerId, Arc<Sent>)>,
    /// Of the periods that passed without a message, those that were told.
    missed: u64,
    /// The last socket takes it along.
    _follower: Option<Arc<Follower>>,
    _declared: Option<Declared>,
}

impl RtSocket {
    /// Sends to socket `port` of a peer from now on, and to the one before no more: what has not left for that is not sent, and lent memory
    /// comes back. A peer that does not know this endpoint is sent an empty small message, for it takes real-time packets from no stranger,
    /// and has none to report to. Messages wait until it has said what they have to show.
    ///
    /// # Errors
    /// [`OpenError::Flow`], [`OpenError::OtherEndpoint`], [`OpenError::Greeting`].
    pub fn connect<P: Port>(
        &mut self,
        endpoint: &mut Endpoint<P>,
        peer: PeerId,
        port: u16,
    ) -> Result<(), OpenError> {
        self.hub.is_of(endpoint)?;
        endpoint.extensions().aim_flow(self.leaving, peer)?;
        if !endpoint.peer(peer).knows_us() {
            match endpoint.try_send_copy(peer, &[], 0) {
                // Others that are under way to it do as well.
                Ok(_) | Err(MessageError::WouldBlock) => {}
                Err(error) => return Err(OpenError::Greeting(error)),
            }
        }
        self.disconnect();
        let shown = endpoint.peer(peer).flow_key().ok_or(FlowError::UnknownPeer)?;
        // Relaxed: each is another. One that wraps may have it again: nothing is known of the first by then.
        let number = self.hub.flow_numbers.fetch_add(1, Ordering::Relaxed);
        let flow = Arc::new(Sent::new(shown, number, port));
        let mut flows = locked(&self.hub.flows);
        flows.retain(|(_, flow)| !flow.is_over());
        flows.push((peer, Arc::clone(&flow)));
        drop(flows);
        self.connected = Some((peer, flow));
        Ok(())
    }

    /// Takes its frames and descriptors from the endpoint; those of a socket that is dropped stay there until another one is opened. What has not
    /// left is lost.
    pub fn close<P: Port>(self, endpoint: &mut Endpoint<P>) {
        let hub = Arc::clone(&self.hub);
        drop(self);
        hub.sweep(endpoint);
    }

    fn disconnect(&mut self) {
        if let Some((_, flow)) = self.connected.take() {
            flow.end();
        }
    }

    /// The longest message, in bytes: what one packet holds, or the longest of the socket's blocks.
    pub fn payload_max(&self) -> usize {
        self.payload_max
    }

    /// Hands a message over, which is copied; never waits. It leaves in the endpoint's next round, by its priority and its deadline.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send(&mut self, payload: &[u8], options: SendOptions) -> Result<(), SendError> {
        let Some((_, flow)) = &self.connected else {
            return Err(SendError::NotConnected);
        };
        if payload.len() > self.payload_max {
            return Err(SendError::TooLong(self.payload_max));
        }
        let times = self.times(options)?;
        let mut block = self.out.take(payload.len()).ok_or(SendError::NotPolled)?;
        block.bytes_mut().copy_from_slice(payload);
        let flow = Arc::clone(flow);
        self.order(flow, (block, false), options.priority, times);
        Ok(())
    }

    /// When a message is sent, and when it is of no use any more.
    fn times(&self, options: SendOptions) -> Result<(Time, Option<Time>), SendError> {
        let sent_at = (self.hub.clock)();
        let deadline = options.deadline.map(|deadline| match deadline {
            Deadline::In(time) => sent_at + time,
            Deadline::At(moment) => moment,
        });
        match deadline.is_some_and(|deadline| deadline <= sent_at) {
            true => Err(SendError::Past),
            false => Ok((sent_at, deadline)),
        }
    }

    fn order(
        &mut self,
        flow: Arc<Sent>,
        (payload, is_lent): (Block, bool),
        priority: u8,
        (sent_at, deadline): (Time, Option<Time>),
    ) {
        let order = Order {
            payload,
            is_lent,
            priority: priority.min(7),
            deadline,
            sent_at,
            flow,
        };
        // As many have room as there are blocks.
        let _ = self.ends.orders.push(order);
        self.hub.waker.wake();
    }

    /// Lends memory for a message of `len` bytes, or a longer one if its block takes it. `None`: none is left, or none is as long. It is of the
    /// blocks that messages have which are copied, so open the socket with more of them.
    pub fn buffer(&mut self, len: usize) -> Option<RtBuffer> {
        self.out.lend(len)
    }

    /// Hands a message over in the first `len` bytes of lent memory; never waits. It leaves as others do. [`unlocked`](Self::unlocked) gives the
    /// memory back when the device is done with it; where the socket is closed before, it is lent no more.
    ///
    /// # Errors
    /// [`SendError`], with the memory.
    pub fn send_buffer(&mut self, buffer: RtBuffer, len: usize, options: SendOptions) -> Result<(), NotSent> {
        let checked = match &self.connected {
            None => Err(SendError::NotConnected),
            _ if !buffer.is_of(&self.out) => Err(SendError::Foreign),
            _ if len > buffer.len() => Err(SendError::TooLong(buffer.len())),
            Some((_, flow)) => self.times(options).map(|times| (Arc::clone(flow), times)),
        };
        match checked {
            Ok((flow, times)) => {
                self.order(flow, (buffer.cut(len), true), options.priority, times);
                Ok(())
            }
            Err(reason) => Err(NotSent { buffer, reason }),
        }
    }

    /// Lent memory that came back since this was asked last, and what became of its message.
    pub fn unlocked(&mut self) -> Option<(RtBuffer, SendOutcome)> {
        self.ends.unlocked.pop().ok()
    }

    /// The next message that came; never waits.
    pub fn recv(&mut self) -> Option<RtMessage> {
        self.ends.arrived.take()
    }

    /// Sleeps until a message has come, lent memory is back, or a period has passed without a message; at most so long, if that is said. On a
    /// thread of its own: who polls the endpoint waits on that. `false`: nothing is there.
    pub fn wait(&mut self, longest: Option<Duration>) -> bool {
        if self.has_news() {
            return true;
        }
        self.state.waker.arm();
        if !self.has_news() {
            let mut readable = [PollFd::new(&self.state.waker, PollFlags::IN)];
            let longest = longest.and_then(|longest| Timespec::try_from(longest).ok());
            // A signal ends it as well.
            let _ = rustix::event::poll(&mut readable, longest.as_ref());
        }
        self.state.waker.disarm();
        self.has_news()
    }

    fn has_news(&self) -> bool {
        // Relaxed: the waker orders it.
        let missed = self.state.counts.missed.load(Ordering::Relaxed);
        self.ends.arrived.has_some() || !self.ends.unlocked.is_empty() || missed != self.missed
    }

    /// Periods that passed without a message since this was asked last; 0 without a period.
    pub fn missed(&mut self) -> u64 {
        // Relaxed: nothing is ordered by it.
        let missed = self.state.counts.missed.load(Ordering::Relaxed);
        missed - std::mem::replace(&mut self.missed, missed)
    }

    /// How long things took, and how many messages were lost in a row.
    pub fn histograms(&self) -> &Histograms {
        &self.state.counts.times
    }

    /// What it has done so far.
    pub fn statistics(&self) -> Statistics {
        let flow = self.connected.as_ref().map(|(_, flow)| flow);
        // Relaxed: each number is right for itself.
        Statistics {
            reported_whole: flow.map_or(0, |flow| flow.whole()),
            reported_lost: flow.map_or(0, |flow| flow.lost()),
            reported_refused: flow.map_or(0, |flow| flow.refused()),
            refused_packets: self.hub.refused_packets.load(Ordering::Relaxed),
            refused_reports: self.hub.refused_reports.load(Ordering::Relaxed),
            flows: self.hub.flows_known.load(Ordering::Relaxed),
            flow_looks: self.hub.flow_looks.load(Ordering::Relaxed),
            ..self.state.counts.read()
        }
    }
}

impl AsFd for RtSocket {
    /// Readable when something may have come since [`wait`](Self::wait) found nothing: for poll(2) of a thread with other descriptors.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.state.waker.as_fd()
    }
}

impl Drop for RtSocket {
    fn drop(&mut self) {
        self.disconnect();
        self.state.close();
    }
}
