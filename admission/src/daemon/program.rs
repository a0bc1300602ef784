//! A program as the daemon knows it.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;

use lm_dataplane::ipc::{Call, Said};
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

/// A call that is not answered yet: `Join` waits until it is known which of its user's sockets are gone, `OpenChannel` for the XSK and
/// the gate, `Quiesce` and `OpenGate` until the queue is quiet, `Status` for its user's turn.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) number: u32,
    pub(crate) call: Call,
    pub(crate) beside: Vec<OwnedFd>,
    /// What was bound for a channel.
    pub(crate) xsk: Option<Bound>,
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
    pub(crate) pending: Option<Pending>,
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
    /// One that has connected, or one that an earlier daemon knew, what it had, and how long it is awaited.
    pub(crate) fn new(
        credentials: Credentials,
        connection: Option<Connection>,
        had: Option<(Member, Time)>,
    ) -> Program {
        let (member, awaited_until) = had.unzip();
        Program {
            readable: connection.is_some(),
            connection,
            credentials,
            greeted: false,
            member,
            smooths: None,
            pending: None,
            read_at: 0,
            hung_up: false,
            is_deaf: false,
            awaited_until,
        }
    }

    /// It asked for the status.
    pub(crate) fn has_question(&self) -> bool {
        self.pending
            .as_ref()
            .is_some_and(|pending| pending.call == Call::Status)
    }

    /// It has an endpoint on an interface.
    pub(crate) fn is_on(&self, interface: usize) -> bool {
        self.member
            .as_ref()
            .is_some_and(|member| member.interface == interface)
    }

    /// It has this port of an interface.
    pub(crate) fn is_at(&self, interface: usize, data_port: u16) -> bool {
        let is_there = |member: &Member| (member.interface, member.data_port) == (interface, data_port);
        self.member.as_ref().is_some_and(is_there)
    }

    /// It may have a call that can be taken now, or it has hung up.
    pub(crate) fn can_be_read(&self) -> bool {
        self.readable && (self.hung_up || self.pending.is_none())
    }

    pub(crate) fn say(&mut self, said: &Said, beside: Vec<OwnedFd>) -> Result<(), Broken> {
        match &mut self.connection {
            Some(connection) => connection.say(said, beside),
            None => Ok(()),
        }
    }
}
