//! A program's end of the connection to the daemon: calls, their replies, and what the daemon tells unasked.
//!
//! [`Client::call`] waits for its reply, and is for what a program cannot go on without. [`Client::tell`] does not: the call goes when
//! the one before it is answered, and its reply is only logged if it is a refusal. When the daemon goes, everything that was opened
//! goes on; the client connects again, and what has ended meanwhile comes as news like any other ([`Client::look`]).

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lm_protocol::control::ControlMessage;
use lm_protocol::landing::ROWS;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::error::DaemonError;
use super::ipc::{
    Asked, Call, DESCRIPTORS_MAX, Event, Joined, MESSAGE_LEN_MAX, Mode, Outcome, Reply, Said, VERSION,
};

/// Daemons that are asked in turn, each gone before it answered.
const ATTEMPTS: u32 = 3;
/// How long a reply may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a program that ends waits for the daemon.
const FAREWELL: Duration = Duration::from_millis(500);
/// First and longest pause before the daemon is connected to again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Calls that wait for the daemon, at most: more only while it is away, and then the oldest say least.
const OUTBOX_MAX: usize = 256;
/// Messages taken in one look.
const PER_LOOK: usize = 64;

/// What the daemon told.
#[derive(Debug)]
pub(crate) enum News {
    /// As it said it.
    Event(Event),
    /// It knows nothing of this program any more: channels and sessions are lost.
    Disowned(String),
}

/// How far a new connection is.
#[derive(Debug)]
enum State {
    /// Ready for calls.
    Joined,
    /// Waits for the reply to [`Call::Hello`], or [`Call::Rejoin`] after it.
    Greeting(u32),
    Rejoining(u32),
    /// Not connected; when to try again.
    Away(Instant),
    /// For ever.
    Disowned,
}

/// A connection to the daemon of this host, and through it an endpoint on one of its interfaces.
#[derive(Debug)]
pub(crate) struct Client {
    path: PathBuf,
    socket: Option<OwnedFd>,
    state: State,
    pause: Duration,
    number: u32,
    /// Number of the call that was told and is not answered.
    told: Option<u32>,
    outbox: VecDeque<Call>,
    news: VecDeque<News>,
    joined: Option<Joined>,
    /// The data port's socket, to show that the port is ours.
    udp: Option<OwnedFd>,
    /// Keys of the sessions to which the gate is open, by row.
    open: [Option<u64>; ROWS as usize],
    /// Sessions as receiver that are open, and as sender or asked for: what has to end when the daemon forgot it.
    received: Vec<u64>,
    sent: Vec<u32>,
    /// Somebody saw that there is something to read.
    due: bool,
}

impl Client {
    /// Connects, and makes sure that the daemon is of this version.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub(crate) fn connect(path: &Path) -> Result<Client, DaemonError> {
        let socket = open(path)?;
        let mut client = Client {
            path: path.to_owned(),
            socket: Some(socket),
            state: State::Joined,
            pause: PAUSES.0,
            number: 0,
            told: None,
            outbox: VecDeque::new(),
            news: VecDeque::new(),
            joined: None,
            udp: None,
            open: [None; ROWS as usize],
            received: Vec::new(),
            sent: Vec::new(),
            due: false,
        };
        client.done(Call::Hello { version: VERSION }, &[])?;
        Ok(client)
    }

    /// Opens an endpoint: queues of an interface, for the program that has `udp`, bound to the interface's address.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub(crate) fn join(
        &mut self,
        interface: &str,
        landing: bool,
        mode: Mode,
        udp: BorrowedFd<'_>,
    ) -> Result<Joined, DaemonError> {
        let call = Call::Join {
            interface: interface.to_owned(),
            landing,
            mode,
        };
        let (reply, _) = self.call(call, &[udp])?;
        let Reply::Joined(joined) = reply else {
            return Err(DaemonError::Nonsense("no queues"));
        };
        let queues = u32::from(u16::try_from(lm_ebpf::layout::QUEUES).unwrap_or(u16::MAX));
        let is_absurd = |queue: Option<u16>| queue.is_some_and(|queue| u32::from(queue) >= queues);
        if is_absurd(joined.general_queue) || is_absurd(joined.landing_queue) {
            return Err(DaemonError::Nonsense("a queue that cannot be"));
        }
        self.udp = Some(udp.try_clone_to_owned().map_err(|source| self.failed(source))?);
        self.joined = Some(joined.clone());
        Ok(joined)
    }

    /// Asks, and waits for the reply: two seconds at most, in which a daemon that is away may come back. Descriptors go and come beside
    /// it.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub(crate) fn call(
        &mut self,
        call: Call,
        beside: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), DaemonError> {
        let deadline = Instant::now() + PATIENCE;
        // One call at a time: what was told before goes first.
        while self.told.is_some() || !self.outbox.is_empty() || !matches!(self.state, State::Joined) {
            if matches!(self.state, State::Disowned) {
                return Err(DaemonError::Gone);
            }
            self.await_until(deadline)?;
            self.take_all();
        }
        let number = self.send(&call, beside)?;
        loop {
            self.await_until(deadline)?;
            match self.receive() {
                Ok(Some((Said::Reply(answered, reply), beside))) if answered == number => {
                    return match reply {
                        Reply::Refused(what) => Err(DaemonError::Refused(what)),
                        reply => Ok((reply, beside)),
                    };
                }
                Ok(Some((said, _))) => self.take(said),
                Ok(None) => {}
                Err(error) => {
                    self.lose();
                    return Err(error);
                }
            }
        }
    }

    /// [`Client::call`] of what is answered by [`Reply::Done`].
    ///
    /// # Errors
    /// [`DaemonError`].
    pub(crate) fn done(&mut self, call: Call, beside: &[BorrowedFd<'_>]) -> Result<(), DaemonError> {
        match self.call(call, beside)?.0 {
            Reply::Done => Ok(()),
            _ => Err(DaemonError::Nonsense("another reply than was asked for")),
        }
    }

    /// [`Client::done`] of a call that may be repeated: when the daemon goes while it is under way, the next one is asked.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub(crate) fn insist(
        &mut self,
        call: &Call,
        beside: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), DaemonError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.call(call.clone(), beside) {
                Err(DaemonError::Gone) if attempts < ATTEMPTS => {}
                answer => return answer,
            }
        }
    }

    /// Whether there is a daemon to ask, as far as is known.
    pub(crate) fn is_here(&self) -> bool {
        matches!(self.state, State::Joined)
    }

    /// Asks without waiting.
    pub(crate) fn tell(&mut self, call: Call) {
        if self.outbox.len() >= OUTBOX_MAX {
            self.outbox.pop_front();
        }
        self.outbox.push_back(call);
        self.send_told();
    }

    /// Waits until the daemon has heard what it was told, for a moment.
    pub(crate) fn finish(&mut self) {
        let deadline = Instant::now() + FAREWELL;
        while (self.told.is_some() || !self.outbox.is_empty()) && self.socket.is_some() {
            if self.await_until(deadline).is_err() {
                return;
            }
            self.take_all();
        }
    }

    /// What the daemon told since the last time. `now`: also without a sign that there is something. Connects again where it is time for
    /// that. Does not wait.
    pub(crate) fn look(&mut self, now: bool) -> Option<News> {
        if self.news.is_empty() && (now || std::mem::take(&mut self.due)) {
            self.take_all();
        }
        self.news.pop_front()
    }

    /// Whether there is something to look at, as far as is known.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.due || !self.news.is_empty()
    }

    /// A ticket was got: it ends with its news.
    pub(crate) fn asked(&mut self, ticket: u32) {
        self.sent.push(ticket);
    }

    /// The daemon granted a session in a row of the landing queue, and the gate is open to it.
    pub(crate) fn opened(&mut self, row: u32, key: u64) {
        self.open[(row % ROWS) as usize] = Some(key);
    }

    /// The gate is closed to a session, or the daemon was asked to close it.
    pub(crate) fn closed(&mut self, key: u64) {
        for slot in self.open.iter_mut().filter(|slot| **slot == Some(key)) {
            *slot = None;
        }
    }

    /// Whether the gate is open to a session, as far as is known.
    pub(crate) fn is_open(&self, key: u64) -> bool {
        self.open.contains(&Some(key))
    }

    /// The session in a row to which the gate is open.
    pub(crate) fn open_at(&self, row: u32) -> Option<u64> {
        self.open.get(row as usize).copied().flatten()
    }

    /// A session as receiver ended by our own will.
    pub(crate) fn gave_up(&mut self, session_key: u64) {
        self.received.retain(|&key| key != session_key);
    }

    /// Somebody saw that there is something to read, or a packet that only news can explain.
    pub(crate) fn hint(&mut self) {
        self.due = true;
    }

    /// Where the daemon listens.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The connection alone, if there is one.
    pub(crate) fn into_socket(self) -> Option<OwnedFd> {
        self.socket
    }

    /// To wait on, while there is a daemon.
    pub(crate) fn raw_fd(&self) -> Option<RawFd> {
        self.socket.as_ref().map(|socket| socket.as_raw_fd())
    }

    /// What was told and not looked at, and the sessions that are open, as receiver and as sender.
    #[cfg(test)]
    pub(super) fn kept(&self) -> [usize; 3] {
        [self.news.len(), self.received.len(), self.sent.len()]
    }

    fn failed(&self, source: io::Error) -> DaemonError {
        DaemonError::Socket {
            path: self.path.clone(),
            source,
        }
    }

    /// Waits until there is something to read, or it is time to connect.
    fn await_until(&mut self, deadline: Instant) -> Result<(), DaemonError> {
        let now = Instant::now();
        if now >= deadline {
            return Err(match self.state {
                State::Away(_) => DaemonError::Gone,
                _ => DaemonError::Silent,
            });
        }
        let left = deadline - now;
        match (&self.socket, &self.state) {
            (Some(socket), _) => {
                let timeout = Timespec {
                    tv_sec: left.as_secs() as i64,
                    tv_nsec: left.subsec_nanos().into(),
                };
                match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
                    Ok(_) | Err(Errno::INTR) => Ok(()),
                    Err(error) => Err(self.failed(error.into())),
                }
            }
            (None, State::Away(at)) => {
                std::thread::sleep(at.saturating_duration_since(now).min(left));
                Ok(())
            }
            (None, _) => Err(DaemonError::Gone),
        }
    }

    /// Takes what has come, and goes on with a connection that is being made.
    fn take_all(&mut self) {
        if let State::Away(at) = self.state
            && Instant::now() >= at
        {
            self.reconnect();
        }
        for _ in 0..PER_LOOK {
            if self.socket.is_none() {
                return;
            }
            match self.receive() {
                Ok(Some((said, _))) => self.take(said),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!("{error}");
                    self.lose();
                }
            }
        }
        // More may wait.
        self.due = true;
    }

    fn take(&mut self, said: Said) {
        match said {
            Said::Event(event) => self.note(event),
            Said::Reply(number, reply) => match self.state {
                State::Greeting(awaited) if number == awaited => self.greeted(&reply),
                State::Rejoining(awaited) if number == awaited => self.rejoined(reply),
                _ => {
                    if self.told == Some(number) {
                        self.told = None;
                        if let Reply::Refused(what) = reply {
                            tracing::debug!("the admission daemon refuses: {what}");
                        }
                        self.send_told();
                    }
                }
            },
        }
    }

    fn note(&mut self, event: Event) {
        match &event {
            Event::Opened { grant, .. } => {
                if let Ok((_, ControlMessage::Grant(grant))) = grant.parse() {
                    self.received.push(grant.session_key);
                }
            }
            Event::Closed { session_key, .. } => self.received.retain(|key| key != session_key),
            Event::Landed { .. } | Event::SetAside { .. } => {}
            Event::Told { ticket, outcome } => {
                if !matches!(outcome, Outcome::Granted(_)) {
                    self.sent.retain(|known| known != ticket);
                }
            }
        }
        self.news.push_back(News::Event(event));
    }

    fn send_told(&mut self) {
        if self.told.is_some() || !matches!(self.state, State::Joined) {
            return;
        }
        let Some(call) = self.outbox.pop_front() else {
            return;
        };
        match self.send(&call, &[]) {
            Ok(number) => self.told = Some(number),
            Err(_) => self.outbox.push_front(call),
        }
    }

    /// Sends a call; gives its number.
    fn send(&mut self, call: &Call, beside: &[BorrowedFd<'_>]) -> Result<u32, DaemonError> {
        let Some(socket) = &self.socket else {
            return Err(DaemonError::Gone);
        };
        self.number = self.number.wrapping_add(1).max(1);
        let asked = Asked {
            number: self.number,
            call: call.clone(),
        };
        let bytes = postcard::to_stdvec(&asked)
            .ok()
            .filter(|bytes| bytes.len() <= MESSAGE_LEN_MAX)
            .ok_or(DaemonError::Nonsense("a call that is too long"))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !beside.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(beside));
        }
        let sent = rustix::net::sendmsg(
            socket,
            &[IoSlice::new(&bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
        match sent {
            Ok(_) => Ok(self.number),
            Err(error) => {
                tracing::debug!("cannot ask the admission daemon: {error}");
                self.lose();
                Err(DaemonError::Gone)
            }
        }
    }

    /// The next message, if one is there.
    fn receive(&self) -> Result<Option<(Said, Vec<OwnedFd>)>, DaemonError> {
        let Some(socket) = &self.socket else {
            return Err(DaemonError::Gone);
        };
        let mut bytes = [0; MESSAGE_LEN_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let received = match rustix::net::recvmsg(socket, slices, &mut ancillary, flags) {
            Ok(received) => received,
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(None),
            Err(_) => return Err(DaemonError::Gone),
        };
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let beside: Vec<OwnedFd> = rights.flatten().collect();
        if received.bytes == 0 {
            return Err(DaemonError::Gone);
        }
        match postcard::from_bytes(&bytes[..received.bytes]) {
            Ok(said) => Ok(Some((said, beside))),
            Err(_) => Err(DaemonError::Nonsense("a message that is none")),
        }
    }

    /// The daemon is gone: a call that was told goes again to the next one.
    fn lose(&mut self) {
        if matches!(self.state, State::Joined) && self.joined.is_some() {
            tracing::warn!("the admission daemon is gone; what is open goes on");
        }
        self.socket = None;
        self.told = None;
        self.state = State::Away(Instant::now() + self.pause);
        self.pause = (2 * self.pause).min(PAUSES.1);
    }

    fn reconnect(&mut self) {
        match open(&self.path) {
            Ok(socket) => {
                self.socket = Some(socket);
                if let Ok(number) = self.send(&Call::Hello { version: VERSION }, &[]) {
                    self.state = State::Greeting(number);
                }
            }
            Err(_) => self.lose(),
        }
    }

    fn greeted(&mut self, reply: &Reply) {
        let (Some(joined), Some(udp), Reply::Done) = (&self.joined, &self.udp, reply) else {
            return self.disowned(match reply {
                Reply::Refused(what) => what.clone(),
                _ => "it said what makes no sense".to_owned(),
            });
        };
        let rejoin = Call::Rejoin { token: joined.token };
        let Ok(udp) = udp.try_clone() else {
            return self.lose();
        };
        if let Ok(number) = self.send(&rejoin, &[udp.as_fd()]) {
            self.state = State::Rejoining(number);
        }
    }

    fn rejoined(&mut self, reply: Reply) {
        let joined = match reply {
            Reply::Joined(joined) => joined,
            Reply::Refused(what) => return self.disowned(what),
            _ => return self.disowned("it said what makes no sense".to_owned()),
        };
        tracing::info!("the admission daemon is back");
        self.state = State::Joined;
        self.pause = PAUSES.0;
        self.end_all_but(&joined.received, &joined.sent);
        self.joined = Some(joined);
        self.send_told();
    }

    /// Sessions of which the daemon knows nothing are over.
    fn end_all_but(&mut self, received: &[u64], sent: &[u32]) {
        for session_key in self.received.clone() {
            if !received.contains(&session_key) {
                self.note(Event::Closed {
                    session_key,
                    messages: None,
                    was_idle: false,
                });
            }
        }
        for ticket in self.sent.clone() {
            if !sent.contains(&ticket) {
                let outcome = Outcome::Lost;
                self.note(Event::Told { ticket, outcome });
            }
        }
    }

    fn disowned(&mut self, what: String) {
        self.socket = None;
        self.state = State::Disowned;
        self.outbox.clear();
        self.end_all_but(&[], &[]);
        self.news.push_back(News::Disowned(what));
    }
}

fn open(path: &Path) -> Result<OwnedFd, DaemonError> {
    let connected = || -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    connected().map_err(|error| match error {
        Errno::NOENT | Errno::CONNREFUSED => DaemonError::Absent {
            path: path.to_owned(),
        },
        error => DaemonError::Socket {
            path: path.to_owned(),
            source: error.into(),
        },
    })
}
