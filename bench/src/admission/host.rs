//! A host that only sends, as far as admission sees it: the daemons' state machine, a UDP socket and a clock.

use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use lm_protocol::admission::{
    Action, Config, Counters, Datagram, Decision, Limits, Local, Node, Outcome, Policy, Ticket,
};
use lm_protocol::control::{RejectReason, Request};
use lm_protocol::session::{Application, CloseReason, Landing, Permit, Refusal, Session, Terms};
use lm_protocol::time::Time;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Ends;
use crate::cli::{Failure, chain};

/// Datagrams taken at a time.
const DATAGRAMS_PER_TURN: usize = 64;
/// No message of the protocol is longer, in bytes.
const DATAGRAM_LEN_MAX: usize = 2048;

/// It receives nothing.
struct NoQueues;

impl Landing for NoQueues {
    fn open(&mut self, _: u16, _: &Application<'_>, _: &Permit) -> Result<Terms, Refusal> {
        Err(RejectReason::Unsupported.into())
    }

    fn close(&mut self, _: &Session, _: CloseReason) -> u32 {
        0
    }
}

/// What a request or a session came to, and when.
pub(super) struct Told {
    pub(super) ticket: Ticket,
    pub(super) outcome: Outcome,
    pub(super) at: Instant,
}

/// The host.
pub(super) struct Host {
    node: Node,
    socket: UdpSocket,
    started: Instant,
    actions: Vec<Action>,
    /// What requests and sessions have come to.
    pub(super) told: Vec<Told>,
    /// The last datagram that left.
    pub(super) last_sent: Option<Datagram>,
}

impl Host {
    /// A host on any port.
    pub(super) fn new(ends: &Ends) -> Result<Host, Failure> {
        let bytes = lm_admission::key::read(&ends.key_file, None).map_err(Failure::new)?;
        let key = lm_admission::key::of_bytes(&ends.key_file, &bytes).map_err(Failure::new)?;
        let told = |error| Failure::new(chain(&error));
        let socket = UdpSocket::bind((ends.bind, 0)).map_err(told)?;
        socket.set_nonblocking(true).map_err(told)?;
        let SocketAddr::V4(address) = socket.local_addr().map_err(told)? else {
            return Err(Failure::new(
                "the socket has no IPv4 address; name one with --bind",
            ));
        };
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| told(error.into()))?;
        let config = Config {
            address,
            boot_id: u64::from_ne_bytes(random),
            key: Some(key),
            policy: Policy::Concurrent,
            limits: Limits::default(),
        };
        Ok(Host {
            node: Node::new(config, Time::ZERO),
            socket,
            started: Instant::now(),
            actions: Vec::new(),
            told: Vec::new(),
            last_sent: None,
        })
    }

    fn now(&self) -> Time {
        Time::from_nanos(self.started.elapsed().as_nanos() as u64)
    }

    /// Asks the daemon at `to` for a session with its program on `port`. `None`: too many are asked for already.
    pub(super) fn ask(
        &mut self,
        to: SocketAddrV4,
        port: u16,
        request: Request,
        patience: Duration,
    ) -> Option<Ticket> {
        let now = self.now();
        let asked =
            self.with_node(|node, local, out| node.request(now, to, port, request, patience, local, out));
        self.act();
        match asked {
            Ok(Decision::Requested(ticket) | Decision::OneCopy(ticket)) => Some(ticket),
            Ok(Decision::Cancel) | Err(_) => None,
        }
    }

    /// Ends a session.
    pub(super) fn end(&mut self, ticket: Ticket) {
        let now = self.now();
        self.with_node(|node, local, out| node.end(now, ticket, 0, local, out));
        self.act();
    }

    /// Takes what has come and does what is due; sleeps before for `longest` at most, when nothing is.
    pub(super) fn turn(&mut self, longest: Duration) -> Result<(), Failure> {
        let due = self
            .node
            .next_deadline()
            .map(|deadline| deadline.since(self.now()));
        let longest = due.map_or(longest, |due| due.min(longest));
        let timeout = Timespec {
            tv_sec: longest.as_secs() as i64,
            tv_nsec: i64::from(longest.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Failure::new(format!("cannot wait for datagrams: {error}"))),
        }
        let mut bytes = [0; DATAGRAM_LEN_MAX];
        for _ in 0..DATAGRAMS_PER_TURN {
            // What an earlier datagram came to (nobody listens) is no news: requests are repeated.
            let Ok((len, SocketAddr::V4(from))) = self.socket.recv_from(&mut bytes) else {
                break;
            };
            let now = self.now();
            self.with_node(|node, local, out| node.on_datagram(now, from, &bytes[..len], local, out));
            self.act();
        }
        let now = self.now();
        if self.node.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.with_node(|node, local, out| node.on_timer(now, local, out));
            self.act();
        }
        Ok(())
    }

    /// Sends bytes as they are.
    pub(super) fn send_raw(&self, to: SocketAddrV4, bytes: &[u8]) -> bool {
        self.socket.send_to(bytes, to).is_ok()
    }

    pub(super) fn counters(&self) -> Counters {
        self.node.counters()
    }

    fn with_node<T>(&mut self, work: impl FnOnce(&mut Node, &mut Local<'_>, &mut Vec<Action>) -> T) -> T {
        let mut permit = Permit {
            max_message_len: 0,
            lease: Duration::from_secs(5),
        };
        let mut local = Local {
            policy: &mut permit,
            landing: &mut NoQueues,
        };
        work(&mut self.node, &mut local, &mut self.actions)
    }

    fn act(&mut self) {
        for action in self.actions.drain(..) {
            match action {
                Action::Send { to, datagram } => {
                    // As good as lost where it fails: it is said again.
                    let _ = self.socket.send_to(datagram.as_bytes(), to);
                    self.last_sent = Some(datagram);
                }
                Action::Tell { ticket, outcome } => self.told.push(Told {
                    ticket,
                    outcome,
                    at: Instant::now(),
                }),
                // A host that receives nothing has nothing to tell all others.
                _ => {}
            }
        }
    }
}
