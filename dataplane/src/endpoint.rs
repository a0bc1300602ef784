//! Endpoint: the public face. Opened on the kernel's port ([`crate::open`]) or another one ([`crate::over`]), it hands everything to the
//! poll engine ([`crate::engine`]) and adds the waiting.

mod extensions;
mod peer_handle;
mod status;

use std::fmt;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::completion::{Completion, LoanError, PeerId, RecvError, SendError, SendToken};
use crate::connect::{ConnectError, ConnectOptions, Session};
use crate::counters::Counters;
use crate::engine::Engine;
use crate::idle::{Idle, IdleStep};
use crate::incoming::Incoming;
use crate::kernel::KernelNic;
use crate::message::Message;
use crate::over::Device;
use crate::port::Port;
use crate::region::SendRegion;
use crate::region::TrySendError;
use crate::waker::Waker;

pub use extensions::Extensions;
pub use peer_handle::PeerHandle;
pub use status::Status;

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
/// Dropping it ends all sessions, waits a moment for the peers to confirm, and detaches from the interface.
pub struct Endpoint<P: Port = KernelNic> {
    pub(crate) engine: Engine<P>,
    pub(crate) idle: Idle,
    /// Ends waits, if one was asked for ([`Extensions::waker`]).
    pub(crate) waker: Option<Arc<Waker>>,
    pub(crate) device: Device,
    pub(crate) warnings: Vec<String>,
    pub(crate) landing_start: u64,
}

impl<P: Port> fmt::Debug for Endpoint<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("device", &self.device.name)
            .field("local", &self.engine.fixed.local)
            .field("mode", &self.status().mode())
            .finish_non_exhaustive()
    }
}

impl<P: Port> Endpoint<P> {
    #[inline]
    fn now_ns(&self) -> u64 {
        self.engine.port.now_ns()
    }

    /// Address and data port of this endpoint; control has the next port.
    pub fn local(&self) -> SocketAddrV4 {
        self.engine.fixed.local
    }

    /// Resolves the way to a peer and, unless told otherwise, asks it for a landing session.
    ///
    /// `to` is the peer's data port. Polls until messages can go, which may be by the one-copy path at first
    /// ([`PeerHandle::lands`]), or `options.timeout` has passed.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(&mut self, to: SocketAddrV4, options: &ConnectOptions) -> Result<PeerId, ConnectError> {
        let index = self.resolve(to)?;
        let id = self.engine.peers.id_of(index);
        match options.session {
            Session::Now => self.peer(id).open_session(options)?,
            Session::Later => {}
            Session::Never => {
                options.check(self.engine.fixed.checksum)?;
                let now_ns = self.now_ns();
                (self.engine.make_plain(index, options.rate, now_ns))
                    .map_err(|error| ConnectError::Options(error.to_string()))?;
            }
        }
        Ok(id)
    }

    /// A peer, and the session with it. One that is not known has no address and no session.
    pub fn peer(&mut self, id: PeerId) -> PeerHandle<'_, P> {
        PeerHandle { endpoint: self, id }
    }

    /// Where flows, handlers, shapers and a source of landing memory are registered.
    pub fn extensions(&mut self) -> Extensions<'_, P> {
        Extensions { endpoint: self }
    }

    /// What this endpoint is and has: its device and mode, warnings, memory.
    pub fn status(&self) -> Status<'_, P> {
        Status { endpoint: self }
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
        self.engine.steer_small(to);
        Ok(index)
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

    /// The next message from a watched peer that has begun and not ended; of one that both begins and ends between two calls only
    /// [`try_recv`](Endpoint::try_recv) tells. Does not poll.
    pub fn try_incoming(&mut self) -> Option<Incoming> {
        self.engine.next_incoming()
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
                self.arm();
                let most = if self.is_busy() { BUSY_STEP } else { most };
                let most = most.min(longest);
                let most = self
                    .extensions()
                    .until_departure()
                    .map_or(most, |left| most.min(left));
                if !most.is_zero() {
                    self.engine.leave_queues();
                    let _ = self.engine.port.wait(most);
                }
                self.waker.iter().for_each(|waker| waker.disarm());
            }
        }
    }

    /// From now on a wake-up ends a wait. What there is to do is looked for behind this.
    fn arm(&self) {
        self.waker.iter().for_each(|waker| waker.arm());
    }

    /// How long [`poll`](Endpoint::poll) may be left alone by whoever waits on the descriptor, for whatever that does not tell: timers,
    /// completions, and what is due ([`until_departure`](Extensions::until_departure)).
    pub fn until_poll(&mut self) -> Duration {
        self.arm();
        let timers = match self.is_busy() {
            true => BUSY_STEP,
            false if self.engine.unconfirmed_messages() > 0 || self.engine.awaits_messages() => WAIT_STEP,
            false => QUIET_STEP,
        };
        self.extensions()
            .until_departure()
            .map_or(timers, |left| timers.min(left))
    }

    /// Nothing wakes for a completion, for what writers release, or for what is owed and comes with the next round: some are due.
    fn is_busy(&mut self) -> bool {
        self.engine.sending.awaits_completions()
            || self.engine.awaits_writers()
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
        let (packets_sent, wakeups) = self.engine.sending.handed_over();
        Counters {
            packets_sent,
            wakeups,
            user_copied_bytes: self.engine.counters.user_copied_bytes + self.engine.port.copied(),
            ..self.engine.counters
        }
    }
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
