//! Endpoint: the public face. Opened on the kernel's port ([`crate::open`]) or another one ([`crate::over`]), it hands everything to the
//! poll engine ([`crate::engine`]) and adds the waiting.

use std::fmt;
use std::net::SocketAddrV4;
use std::num::NonZeroU64;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use lm_protocol::time::Time;

use crate::completion::{Completion, LoanError, PeerId, RecvError, SendError, SendToken};
use crate::connect::{ConnectError, ConnectOptions};
use crate::counters::Counters;
use crate::engine::Engine;
use crate::handlers::{Handler, HandlerError, HandlerId};
use crate::idle::{Idle, IdleStep};
use crate::incoming::Incoming;
use crate::kernel::KernelNic;
use crate::landing_memory::LandingMemory;
use crate::message::{LandingRegion, Message};
use crate::over::Device;
use crate::placing::ZoneSource;
use crate::port::{EffectiveMode, Port, Steer};
use crate::region::SendRegion;
use crate::region::TrySendError;
use crate::scheduler::{Flow, FlowError, FlowId, FlowSpec, Scope, Shaper};

/// How long closing waits for receivers to confirm the end of their sessions.
const FAREWELL_PATIENCE_NS: u64 = 800_000_000;
/// How long a flush polls between looks at its deadline at most.
const WAIT_STEP: Duration = Duration::from_millis(10);
/// How soon to look again where completions are due.
const BUSY_STEP: Duration = Duration::from_micros(50);
/// How soon where a session is open at most: keepalives, and leases of five seconds.
const QUIET_STEP: Duration = Duration::from_millis(500);

/// One end of LM on one network interface: sends to and receives from any number of peers.
///
/// # Threads
///
/// An endpoint belongs to one thread at a time: it is `Send` but not `Sync`, and every call takes `&mut self`. That
/// thread must call [`poll`](Endpoint::poll), or a call that polls ([`send`](Endpoint::send),
/// [`recv`](Endpoint::recv), [`flush`](Endpoint::flush), [`connect`](Endpoint::connect)), at least every few hundred
/// milliseconds, or peers count it as gone. [`Message`]s and [`SendRegion`]s may be moved to and dropped on other
/// threads.
///
/// # Example
///
/// ```no_run
/// use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig};
/// use std::io::Write;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = EndpointConfig { interface: "eth1".into(), ..EndpointConfig::default() };
/// let mut endpoint = Endpoint::open(&config)?;
/// let peer = endpoint.connect("192.0.2.7:7168".parse()?, &ConnectOptions::default())?;
/// let mut region = endpoint.loan(peer, 1 << 20)?;
/// region.write_all(&vec![7; 1 << 20])?;
/// endpoint.send(region, 42)?;
/// endpoint.flush(std::time::Duration::from_secs(5))?;
/// # Ok(())
/// # }
/// ```
pub struct Endpoint<P: Port = KernelNic> {
    pub(crate) engine: Engine<P>,
    pub(crate) idle: Idle,
    pub(crate) device: Device,
    pub(crate) warnings: Vec<String>,
    pub(crate) landing_start: u64,
}

impl<P: Port> fmt::Debug for Endpoint<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("device", &self.device.name)
            .field("local", &self.engine.fixed.local)
            .field("mode", &self.mode())
            .finish_non_exhaustive()
    }
}

impl<P: Port> Endpoint<P> {
    #[inline]
    fn now_ns(&self) -> u64 {
        self.engine.port.now_ns()
    }

    /// What time it is, as flows, handlers and shapers are told it.
    pub fn now(&self) -> Time {
        Time::from_nanos(self.now_ns())
    }

    /// Things the user should know: a fallback that was taken, an MTU that was lowered.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The mode in effect, as the kernel reports it.
    pub fn mode(&self) -> EffectiveMode {
        self.engine.port.effective_mode()
    }

    /// The network interface.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Address and data port of this endpoint; control has the next port.
    pub fn local(&self) -> SocketAddrV4 {
        self.engine.fixed.local
    }

    /// Resolves the way to a peer and, unless told otherwise, asks it for a landing session.
    ///
    /// `to` is the peer's data port. Polls until messages can go, which may be by the one-copy path at first
    /// ([`Endpoint::lands`]), or `options.timeout` has passed.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(&mut self, to: SocketAddrV4, options: &ConnectOptions) -> Result<PeerId, ConnectError> {
        let index = self.resolve(to)?;
        let id = self.engine.peers.id_of(index);
        if options.session {
            self.open_session(id, options)?;
        }
        Ok(id)
    }

    /// Resolves the way to a host that runs no LM: messages to it leave as plain UDP datagrams in IP fragments
    /// ([`lm_protocol::geometry::Wire::IpFrag`]), each at most 65,507 bytes, and nobody confirms them. `rate` is as in
    /// [`ConnectOptions::rate`].
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect_plain(
        &mut self,
        to: SocketAddrV4,
        rate: Option<NonZeroU64>,
    ) -> Result<PeerId, ConnectError> {
        let index = self.resolve(to)?;
        let now_ns = self.now_ns();
        (self.engine.make_plain(index, rate, now_ns))
            .map_err(|error| ConnectError::Options(error.to_string()))?;
        Ok(self.engine.peers.id_of(index))
    }

    fn resolve(&mut self, to: SocketAddrV4) -> Result<u16, ConnectError> {
        let side = self.engine.port.side();
        let mac = side.next_hop(*to.ip()).map_err(ConnectError::Route)?;
        let addressing = self.engine.addressing_to(to, mac);
        let now_ns = self.now_ns();
        let index = self
            .engine
            .peers
            .find_or_add(to, &addressing, now_ns)
            .ok_or(ConnectError::PeersFull)?;
        let peer = self.engine.peers.at(index);
        peer.addressing = addressing;
        peer.wanted = true;
        let steer = |queue| self.engine.port.steer(Steer::General { queue, from: to });
        if let Some(Err(error)) = self.engine.small.queue().map(steer) {
            tracing::debug!(peer = %to, "its small packets may come by the kernel's socket: {error}");
        }
        Ok(index)
    }

    /// Asks a known peer for a landing session, for example one whose message was just received. An existing
    /// session with it ends first.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn open_session(&mut self, peer: PeerId, options: &ConnectOptions) -> Result<(), ConnectError> {
        self.request_session(peer, options)?;
        loop {
            if let Some(outcome) = self.session_outcome(peer) {
                return outcome;
            }
            let now_ns = self.now_ns();
            self.engine.drive_admission(now_ns);
            // Nothing is hurried here, and the peer may share our core.
            let _ = self.engine.port.wait(Duration::from_millis(1));
        }
    }

    /// As [`open_session`](Endpoint::open_session), without waiting: [`session_outcome`](Endpoint::session_outcome) says what came of it.
    ///
    /// # Errors
    /// [`ConnectError::UnknownPeer`].
    pub fn request_session(&mut self, peer: PeerId, options: &ConnectOptions) -> Result<(), ConnectError> {
        let now_ns = self.now_ns();
        self.engine.peers.named(peer).ok_or(ConnectError::UnknownPeer)?;
        self.engine.end_session(peer.index, now_ns);
        self.engine.apply(peer.index, options, now_ns);
        Ok(())
    }

    /// Polls once; what came of the session that was requested with a peer. `None`: nothing yet. Said once.
    pub fn session_outcome(&mut self, peer: PeerId) -> Option<Result<(), ConnectError>> {
        self.poll();
        let now_ns = self.now_ns();
        self.engine.application_outcome(peer.index, now_ns)
    }

    /// Ends the landing session with a peer. Messages not confirmed end as [`crate::Outcome::SessionEnded`].
    pub fn end_session(&mut self, peer: PeerId) {
        let now_ns = self.now_ns();
        if self.engine.peers.named(peer).is_some() {
            self.engine.end_session(peer.index, now_ns);
        }
    }

    /// The peer's address and data port.
    pub fn peer_address(&mut self, peer: PeerId) -> Option<SocketAddrV4> {
        self.engine.peers.named(peer).map(|peer| peer.data)
    }

    /// The UDP source port of the fragments that go to this peer: our data port, or the one that its receiver asked for so that its
    /// network card brings them to the landing queue. `None` without a session.
    pub fn landing_port(&mut self, peer: PeerId) -> Option<u16> {
        let local = self.local().port();
        let outbound = self.engine.peers.named(peer)?.outbound.as_ref()?;
        Some(outbound.terms.landing_port.map_or(local, |port| port.get()))
    }

    /// Whether messages to this peer land there, as far as it said; else they take the one-copy path until there is a place for them. `None`
    /// without a session.
    pub fn lands(&mut self, peer: PeerId) -> Option<bool> {
        let outbound = self.engine.peers.named(peer)?.outbound.as_ref()?;
        Some(outbound.lands)
    }

    /// The longest message that can be sent to this peer now, in bytes; one fragment without a session.
    pub fn max_message_len(&mut self, peer: PeerId) -> u64 {
        let eager = self.engine.eager_max_len();
        let outbound = self
            .engine
            .peers
            .named(peer)
            .and_then(|peer| peer.outbound.as_ref());
        outbound.map_or(eager, |outbound| outbound.terms.max_message_len)
    }

    /// Loans memory for a message of `len` bytes to `peer`.
    ///
    /// # Errors
    /// [`LoanError::WouldBlock`] when no memory is free now: poll and try again.
    pub fn loan(&mut self, peer: PeerId, len: u64) -> Result<SendRegion, LoanError> {
        match self.engine.loan(peer, len) {
            Err(LoanError::WouldBlock) => {
                // Unsent regions and completions may have memory for us.
                self.poll();
                self.engine.loan(peer, len)
            }
            result => result,
        }
    }

    /// Hands a message over, or gives it back with the reason.
    ///
    /// # Errors
    /// [`SendError::WouldBlock`] as reason is back-pressure: poll and try again.
    // The error carries the region, as `std::sync::mpsc::SendError` carries its value.
    #[allow(clippy::result_large_err)]
    pub fn try_send(&mut self, region: SendRegion, tag: u64) -> Result<SendToken, TrySendError> {
        let now_ns = self.now_ns();
        self.engine.submit(region, tag, now_ns)
    }

    /// Hands a message over; polls while there is back-pressure.
    ///
    /// # Errors
    /// Everything but [`SendError::WouldBlock`].
    pub fn send(&mut self, region: SendRegion, tag: u64) -> Result<SendToken, SendError> {
        let mut region = region;
        loop {
            match self.try_send(region, tag) {
                Ok(token) => return Ok(token),
                Err(TrySendError {
                    region: back,
                    reason: SendError::WouldBlock,
                }) => region = back,
                Err(error) => return Err(error.reason),
            }
            self.poll_or_wait();
            self.check_link()?;
        }
    }

    /// Copies `payload` into a loaned region and hands it over; polls while there is back-pressure.
    ///
    /// # Errors
    /// Everything but [`SendError::WouldBlock`].
    pub fn send_copy(&mut self, peer: PeerId, payload: &[u8], tag: u64) -> Result<SendToken, SendError> {
        loop {
            match self.try_send_copy(peer, payload, tag) {
                Err(SendError::WouldBlock) => self.poll_or_wait(),
                result => return result,
            }
            self.check_link()?;
        }
    }

    /// As [`send_copy`](Endpoint::send_copy), without waiting.
    ///
    /// # Errors
    /// [`SendError::WouldBlock`] is back-pressure: poll and try again.
    pub fn try_send_copy(&mut self, peer: PeerId, payload: &[u8], tag: u64) -> Result<SendToken, SendError> {
        let now_ns = self.now_ns();
        if let Some(result) = self.engine.submit_copy(peer, payload, tag, now_ns) {
            return result;
        }
        let mut region = self.engine.loan(peer, payload.len() as u64)?;
        let mut rest = payload;
        for range in region.payloads_mut() {
            let (now, later) = rest.split_at(range.len());
            range.copy_from_slice(now);
            rest = later;
        }
        self.engine.counters.user_copied_bytes += payload.len() as u64;
        self.try_send(region, tag).map_err(|error| error.reason)
    }

    /// The next message that has arrived whole, if there is one. Polls once when none is ready.
    ///
    /// # Errors
    /// [`RecvError::Incomplete`] reports a message that stays incomplete.
    pub fn try_recv(&mut self) -> Result<Option<Message>, RecvError> {
        if let Some(message) = self.engine.take_message()? {
            return Ok(Some(message));
        }
        self.poll();
        self.engine.take_message()
    }

    /// The next message; polls until it is there.
    ///
    /// # Errors
    /// [`RecvError::TimedOut`] after `timeout`; [`RecvError::Incomplete`] reports a message that stays incomplete.
    pub fn recv(&mut self, timeout: Option<Duration>) -> Result<Message, RecvError> {
        let mut deadline_ns = None;
        loop {
            if let Some(message) = self.try_recv()? {
                return Ok(message);
            }
            // The clock of the round just run: reading it once more would be felt in every round trip.
            let now_ns = self.engine.looks.now_ns();
            if let Some(timeout) = timeout {
                let deadline_ns =
                    *deadline_ns.get_or_insert(now_ns.saturating_add(timeout.as_nanos() as u64));
                if now_ns >= deadline_ns {
                    return Err(RecvError::TimedOut);
                }
            }
            self.wait(WAIT_STEP);
        }
    }

    /// From now on messages of many fragments from this peer are told of while they arrive ([`Endpoint::try_incoming`]): their windows may be read
    /// as soon as each is final. They come whole by [`try_recv`](Endpoint::try_recv) all the same. `false`: there is no such peer, or nothing
    /// lands at this endpoint.
    ///
    /// What is shown is never moved, so repairs that would move it build the landing channel anew instead. Each message takes memory for what is
    /// known of its windows, some 100 bytes for each, as long as its [`Incoming`] is held.
    pub fn watch(&mut self, peer: PeerId) -> bool {
        self.engine.watch(peer)
    }

    /// The next message from a watched peer that has begun and not ended; of one that both begins and ends between two calls only
    /// [`try_recv`](Endpoint::try_recv) tells. Does not poll.
    pub fn try_incoming(&mut self) -> Option<Incoming> {
        self.engine.next_incoming()
    }

    /// A region for a message of up to `len` bytes, taken before the message comes, for [`Placement::Land`](crate::Placement::Land). Landing memory must have
    /// been taken at the start ([`crate::EndpointConfig::landing_len`]).
    ///
    /// # Errors
    /// [`LoanError::WouldBlock`] when no memory is free now.
    pub fn landing_region(&mut self, len: u64) -> Result<LandingRegion, LoanError> {
        self.engine.landing_region(len)
    }

    /// The end of a message that was handed over, if one has ended.
    pub fn try_completion(&mut self) -> Option<Completion> {
        self.engine.told.next_completion()
    }

    /// Polls until every message handed over is confirmed.
    ///
    /// # Errors
    /// [`SendError::TimedOut`] after `timeout`; [`SendError::Failed`] when messages ended otherwise since the last
    /// flush.
    pub fn flush(&mut self, timeout: Duration) -> Result<(), SendError> {
        let deadline_ns = self.now_ns().saturating_add(timeout.as_nanos() as u64);
        loop {
            self.poll_or_wait();
            self.check_link()?;
            let unconfirmed = self.engine.unconfirmed_messages();
            if unconfirmed == 0 {
                return match self.engine.told.take_failed_sends() {
                    0 => Ok(()),
                    messages => Err(SendError::Failed { messages }),
                };
            }
            if self.now_ns() >= deadline_ns {
                return Err(SendError::TimedOut { unconfirmed });
            }
        }
    }

    fn check_link(&mut self) -> Result<(), SendError> {
        match self.engine.sending.take_link_error() {
            Some(_) => Err(SendError::Link),
            None => Ok(()),
        }
    }

    /// One round of the engine: receives, sends, runs timers. Returns the number of packets and events handled;
    /// 0 means there was nothing to do.
    pub fn poll(&mut self) -> usize {
        let now_ns = self.now_ns();
        let work = self.engine.poll(now_ns);
        if work > 0 {
            self.idle.reset();
        }
        work
    }

    /// One step of the idle strategy, `longest` at most: call it when [`poll`](Endpoint::poll) returned 0.
    pub fn wait(&mut self, longest: Duration) {
        match self.idle.step(self.engine.looks.now_ns()) {
            IdleStep::Spin => self.engine.linger(),
            IdleStep::Yield => {
                let before_ns = self.now_ns();
                std::thread::yield_now();
                self.idle.yielded(before_ns, self.now_ns());
            }
            IdleStep::Sleep(most) => {
                let most = if self.is_busy() { BUSY_STEP } else { most };
                let most = most.min(longest);
                let most = self.until_departure().map_or(most, |left| most.min(left));
                if !most.is_zero() {
                    self.engine.leave_queues();
                    let _ = self.engine.port.wait(most);
                }
            }
        }
    }

    /// Sets what decides how much of a class of packets, or of all, may leave, or takes it away: with [`RateLimit`](crate::RateLimit) so many
    /// bits per second of all sessions together. Control packets are never held back; the port's shaper counts them.
    pub fn shape(&mut self, scope: Scope, shaper: Option<Box<dyn Shaper>>) {
        self.engine.sending.shape(scope, shaper);
    }

    /// Registers packets that others make and that leave before messages, control packets aside. Its frames and descriptors are its own.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn add_flow(&mut self, spec: &FlowSpec, flow: Box<dyn Flow>) -> Result<FlowId, FlowError> {
        self.engine.add_flow(spec, flow)
    }

    /// Takes a flow out: it is not asked again and hears nothing of what is under way. `None`: there is none of that name.
    pub fn remove_flow(&mut self, id: FlowId) -> Option<Box<dyn Flow>> {
        self.engine.remove_flow(id)
    }

    /// Registers who takes packets of these types, of [`EXTENSION_TYPES`](lm_protocol::wire::lm::EXTENSION_TYPES). Without, they are counted
    /// and not answered.
    ///
    /// # Errors
    /// See [`HandlerError`].
    pub fn add_handler(
        &mut self,
        types: RangeInclusive<u8>,
        handler: Box<dyn Handler>,
    ) -> Result<HandlerId, HandlerError> {
        self.engine.small.handlers.add(types, handler)
    }

    /// Takes a handler out. `None`: there is none of that name.
    pub fn remove_handler(&mut self, id: HandlerId) -> Option<Box<dyn Handler>> {
        self.engine.small.handlers.remove(id)
    }

    /// Registers who decides where messages of many fragments land, instead of who did before, or takes that away. Without, they land in the
    /// arena. Of messages that are announced already and have no memory yet it is asked at once.
    pub fn place_by(&mut self, source: Option<Box<dyn ZoneSource>>) {
        self.engine.place_by(source);
    }

    /// Asks again where the peer's message lands for which the source said [`Placement::Later`](crate::Placement::Later). `false`: no
    /// message of that number waits.
    pub fn retry(&mut self, peer: PeerId, number: u32) -> bool {
        self.engine.retry(peer, number)
    }

    /// Takes the memory of a peer's message back that is under way: nothing more is posted for it, and its sender hears that it was declined
    /// ([`RETRACTED`](crate::RETRACTED)). A source's region comes back by [`ZoneSource::settled`] when nothing that is posted covers it, and
    /// the messages before it in its session are settled. `false`: no message of that number is under way.
    pub fn retract(&mut self, peer: PeerId, number: u32) -> bool {
        self.engine.retract(peer, number)
    }

    /// How long until a flow's packet or a handler is due, or a rate limit ([`ConnectOptions::rate`]) or another shaper lets the next packet go, where one holds a packet back:
    /// [`wait`](Endpoint::wait) waits no longer, and neither should an application that waits on the descriptor.
    pub fn until_departure(&mut self) -> Option<Duration> {
        let departure_ns = self.engine.next_departure_ns()?;
        Some(Duration::from_nanos(departure_ns.saturating_sub(self.now_ns())))
    }

    /// How long [`poll`](Endpoint::poll) may be left alone by whoever waits on the descriptor, for whatever that does not tell: timers,
    /// completions, and what is due ([`until_departure`](Endpoint::until_departure)).
    pub fn until_poll(&mut self) -> Duration {
        let timers = match self.is_busy() {
            true => BUSY_STEP,
            false if self.engine.unconfirmed_messages() > 0 || self.engine.awaits_messages() => WAIT_STEP,
            false => QUIET_STEP,
        };
        self.until_departure().map_or(timers, |left| timers.min(left))
    }

    /// Nothing wakes for a completion, or for what is owed and comes with the next round: some are due.
    fn is_busy(&self) -> bool {
        self.engine.sending.awaits_completions()
            || self.engine.small.owed() > 0
            || (self.engine.landing.as_ref()).is_some_and(|landing| {
                landing.sessions.entries.await_driver()
                    || landing.sessions.iter().any(|inbound| inbound.told.changed)
            })
    }

    fn poll_or_wait(&mut self) {
        if self.poll() == 0 {
            self.wait(WAIT_STEP);
        }
    }

    /// What this endpoint has done so far.
    pub fn counters(&self) -> Counters {
        self.engine.counters
    }

    /// What the gate decided so far: name of the verdict and number of packets.
    pub fn gate_counters(&self) -> Vec<(&'static str, u64)> {
        self.engine.port.verdicts()
    }

    /// The file in which its memory lies, where it is lent to other processes ([`crate::EndpointConfig::lend`]): who maps it writes a loaned
    /// region at its [`umem_ranges`](SendRegion::umem_ranges) and reads a message at its [`umem_offset`](Message::umem_offset), which
    /// this process holds meanwhile. Who has it can read and write all that this endpoint sends and receives.
    pub fn memory_file(&self) -> Option<BorrowedFd<'_>> {
        self.engine.memory.umem().mapping().file()
    }

    /// How much landing memory there is, and may be.
    pub fn landing_memory(&self) -> LandingMemory {
        self.engine.landing_memory()
    }

    /// Position of the landing arena in the UMEM, in bytes: every message of many fragments lies in it.
    pub fn landing_range(&self) -> Range<u64> {
        let len = self
            .engine
            .landing
            .as_ref()
            .map_or(0, |landing| landing.arena.len());
        self.landing_start..self.landing_start + len
    }

    /// Why the capture ended early, if it did.
    pub fn take_capture_error(&mut self) -> Option<std::io::Error> {
        self.engine.memory.take_capture_error()
    }

    /// Ends all sessions, waits a moment for the peers to confirm, and detaches from the interface. Dropping does
    /// the same.
    pub fn close(self) {}
}

impl<P: Port + AsFd> AsFd for Endpoint<P> {
    /// Readable (level-triggered) when [`poll`](Endpoint::poll) may find something to receive.
    ///
    /// Only `poll` runs timers, sends what the kernel had no room for and repeats what was lost: poll when
    /// [`until_poll`](Endpoint::until_poll) has passed in any case.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.engine.port.as_fd()
    }
}

impl<P: Port> Drop for Endpoint<P> {
    fn drop(&mut self) {
        let now_ns = self.now_ns();
        while let Some(&index) = self.engine.sending.senders().first() {
            self.engine.end_session(index, now_ns);
            self.engine.sending.remove_sender(index);
        }
        // What has arrived is confirmed before we go.
        self.poll();
        let now_ns = self.now_ns();
        self.engine.close_to_requests(now_ns);
        self.engine.shut_down_at_daemon();
        let deadline_ns = now_ns + FAREWELL_PATIENCE_NS;
        while self.engine.is_leaving() && self.now_ns() < deadline_ns {
            self.poll();
            let now_ns = self.now_ns();
            self.engine.drive_admission(now_ns);
            let _ = self.engine.port.wait(Duration::from_millis(1));
        }
        self.engine.sending.flush();
        self.engine.admission.stewarded.finish();
    }
}
