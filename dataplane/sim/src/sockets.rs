//! The two datagram sockets of a simulated host, in memory.

use std::collections::VecDeque;
use std::net::SocketAddrV4;

use lm_dataplane::port::{Socket, SocketEvent};

/// Datagrams that a socket holds; more are lost and counted.
const SOCKET_LEN: usize = 4096;

/// What became of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It waits in a socket.
    Socket,
    /// The socket is full.
    Full,
    /// Nobody listens at the port.
    Nobody,
}

#[derive(Debug, Default)]
struct Queue {
    datagrams: VecDeque<(SocketAddrV4, Vec<u8>)>,
    refusals: VecDeque<SocketAddrV4>,
}

/// The datagram sockets of one address: data, and control at the next port.
#[derive(Debug)]
pub(crate) struct Sockets {
    local: SocketAddrV4,
    data: Queue,
    control: Queue,
    passed: u64,
}

impl Sockets {
    pub(crate) fn new(local: SocketAddrV4) -> Sockets {
        let queue = || Queue {
            datagrams: VecDeque::with_capacity(SOCKET_LEN),
            refusals: VecDeque::new(),
        };
        Sockets {
            local,
            data: queue(),
            control: queue(),
            passed: 0,
        }
    }

    /// Address and port of a socket.
    pub(crate) fn address(&self, socket: Socket) -> SocketAddrV4 {
        let port = self.local.port() + u16::from(socket == Socket::Control);
        SocketAddrV4::new(*self.local.ip(), port)
    }

    /// Datagrams that reached a socket.
    pub(crate) fn passed(&self) -> u64 {
        self.passed
    }

    /// Datagrams that nobody has read.
    pub(crate) fn unread(&self) -> usize {
        self.data.datagrams.len() + self.control.datagrams.len()
    }

    /// Whether there is anything to receive.
    pub(crate) fn has_event(&self) -> bool {
        self.unread() + self.data.refusals.len() + self.control.refusals.len() > 0
    }

    fn of(&mut self, socket: Socket) -> &mut Queue {
        match socket {
            Socket::Control => &mut self.control,
            Socket::Data => &mut self.data,
        }
    }

    fn at(&mut self, port: u16) -> Option<&mut Queue> {
        let socket = [Socket::Data, Socket::Control].map(|socket| (self.address(socket).port(), socket));
        let (_, socket) = socket.into_iter().find(|(its, _)| *its == port)?;
        Some(self.of(socket))
    }

    /// A datagram came to a port of the address.
    pub(crate) fn take(&mut self, from: SocketAddrV4, port: u16, payload: &[u8]) -> Reached {
        let Some(queue) = self.at(port) else {
            return Reached::Nobody;
        };
        if queue.datagrams.len() == SOCKET_LEN {
            return Reached::Full;
        }
        queue.datagrams.push_back((from, payload.to_vec()));
        self.passed += 1;
        Reached::Socket
    }

    /// Nobody listens at `there`, where a datagram from a port of the address went.
    pub(crate) fn refuse(&mut self, port: u16, there: SocketAddrV4) {
        if let Some(queue) = self.at(port)
            && queue.refusals.len() < SOCKET_LEN
        {
            queue.refusals.push_back(there);
        }
    }

    /// As [`recv`](lm_dataplane::port::Datagrams::recv), with `take` for a datagram that fits.
    pub(crate) fn next_event(
        &mut self,
        socket: Socket,
        space_len: usize,
        mut take: impl FnMut(&[u8]),
    ) -> Option<SocketEvent> {
        let queue = self.of(socket);
        if let Some(peer) = queue.refusals.pop_front() {
            return Some(SocketEvent::Refused(peer));
        }
        let (from, payload) = queue.datagrams.pop_front()?;
        if payload.len() > space_len {
            return Some(SocketEvent::TooLong(from));
        }
        take(&payload);
        let len = payload.len();
        Some(SocketEvent::Datagram { from, len })
    }
}
