//! A program as the daemon knows it.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;

use lm_dataplane::ipc::{Event, Mode, Reply, Role, Said};
use lm_protocol::control::{Grant, Request};
use lm_protocol::time::Time;

use super::worker::Bound;
use crate::socket::{Broken, Connection, Credentials};

/// Names a program while it is connected: never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProgramId(pub(crate) usize);

/// What a program got by [`Call::Join`](lm_dataplane::ipc::Call::Join).
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) token: u64,
    /// Position of its interface in the configuration.
    pub(crate) interface: usize,
    pub(crate) data_port: u16,
    pub(crate) general_queue: Option<u16>,
    pub(crate) landing_queue: Option<u16>,
    /// Registered memory by queue, in bytes.
    pub(crate) memory: BTreeMap<u16, u64>,
    /// Sessions as sender, and requests for them, by ticket.
    pub(crate) sent: BTreeMap<u32, Sent>,
}

impl Member {
    pub(crate) fn memory_bytes(&self) -> u64 {
        // What a state file says may be anything.
        self.memory
            .values()
            .fold(0, |sum: u64, len| sum.saturating_add(*len))
    }
}

/// A session as sender, or a request for one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// The receiver's data address.
    pub(crate) to: SocketAddrV4,
    pub(crate) request: Request,
    pub(crate) grant: Option<Grant>,
}

/// A call that is not answered yet.
#[derive(Debug)]
pub(crate) enum Pending {
    /// The XSK is being bound, or the gate made ready.
    Channel {
        queue: u16,
        role: Role,
        xsk: Option<Bound>,
    },
    /// Waits until it is known which of its user's sockets are gone.
    Join {
        interface: String,
        landing: bool,
        mode: Mode,
        beside: Vec<OwnedFd>,
    },
    /// Waits until the queue is quiet.
    Quiesce { queue: u16 },
    /// As that; then opens the gate again.
    OpenGate {
        queue: u16,
        session_key: u64,
        first_message: u32,
    },
}

impl std::fmt::Debug for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bound")
    }
}

/// A program.
#[derive(Debug)]
pub(crate) struct Program {
    /// None while it is awaited by a daemon that was restarted.
    pub(crate) connection: Option<Connection>,
    pub(crate) credentials: Credentials,
    /// It said which version it speaks.
    pub(crate) greeted: bool,
    pub(crate) member: Option<Member>,
    /// Position of the interface whose smoother it has.
    pub(crate) smooths: Option<usize>,
    pub(crate) pending: Option<(u32, Pending)>,
    /// It asked for the status, by a call of this number, and waits for its user's turn.
    pub(crate) question: Option<u32>,
    /// Counts reads, up to its last one.
    pub(crate) read_at: u64,
    /// Its socket may have more to read.
    pub(crate) readable: bool,
    /// It hung up; what it said before is taken still, up to a call that must wait.
    pub(crate) hung_up: bool,
    /// It could not take all that it was told, and is watched for when it can.
    pub(crate) is_deaf: bool,
    /// When it is given up, if it has not come back by then.
    pub(crate) awaited_until: Option<Time>,
}

impl Program {
    pub(crate) fn connected(connection: Connection, credentials: Credentials) -> Program {
        Program {
            connection: Some(connection),
            readable: true,
            ..Program::absent(credentials)
        }
    }

    /// One that an earlier daemon knew.
    pub(crate) fn awaited(credentials: Credentials, member: Member, until: Time) -> Program {
        Program {
            member: Some(member),
            awaited_until: Some(until),
            ..Program::absent(credentials)
        }
    }

    fn absent(credentials: Credentials) -> Program {
        Program {
            connection: None,
            credentials,
            greeted: false,
            member: None,
            smooths: None,
            pending: None,
            question: None,
            read_at: 0,
            readable: false,
            hung_up: false,
            is_deaf: false,
            awaited_until: None,
        }
    }

    /// A call of its own is under way.
    pub(crate) fn awaits_answer(&self) -> bool {
        self.pending.is_some() || self.question.is_some()
    }

    /// It may have a call that can be taken now, or it has hung up.
    pub(crate) fn can_be_read(&self) -> bool {
        self.readable && (self.hung_up || !self.awaits_answer())
    }

    pub(crate) fn reply(&mut self, number: u32, reply: Reply, beside: Vec<OwnedFd>) -> Result<(), Broken> {
        self.say(&Said::Reply(number, reply), beside)
    }

    pub(crate) fn tell(&mut self, event: Event) -> Result<(), Broken> {
        self.say(&Said::Event(event), Vec::new())
    }

    fn say(&mut self, said: &Said, beside: Vec<OwnedFd>) -> Result<(), Broken> {
        match &mut self.connection {
            Some(connection) => connection.say(said, beside),
            None => Ok(()),
        }
    }
}
