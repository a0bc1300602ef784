//! A port's two datagram sockets, and its ways to other hosts.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};

use crate::memory::Umem;

/// Which of a port's two datagram sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Socket {
    /// Admission, on data port + 1.
    Control,
    /// What is passed on for the data port.
    Data,
}

/// What a look at a datagram socket found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketEvent {
    /// A datagram, whole, at the start of the space given.
    Datagram {
        /// The sender.
        from: SocketAddrV4,
        /// Payload length in bytes.
        len: usize,
    },
    /// Nobody listens on the port there: an ICMP *port unreachable* came back for something sent from this socket.
    Refused(SocketAddrV4),
    /// A datagram that was longer than the space given, and is gone.
    TooLong(SocketAddrV4),
}

/// The way that needs no queue: datagrams through the kernel, with a copy more.
pub trait Datagrams {
    /// Address and port of the data socket; the control socket has the next port.
    fn local(&self) -> SocketAddrV4;

    /// Sends a datagram.
    ///
    /// # Errors
    ///
    /// `WouldBlock` is back-pressure; otherwise what the system says.
    fn send(&mut self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()>;

    /// The next datagram or refusal, if there is one; datagrams longer than `space` are dropped.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn recv(&mut self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>>;

    /// As [`Datagrams::recv`], into the `len` bytes of the UMEM at `addr`.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn recv_into(
        &mut self,
        socket: Socket,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<SocketEvent>> {
        let mut space = vec![0; len as usize];
        let event = self.recv(socket, &mut space)?;
        if let Some(SocketEvent::Datagram { len, .. }) = event {
            umem.copy_to(addr, &space[..len]);
        }
        Ok(event)
    }

    /// Ethernet address of the next hop towards `ip`, if it is known now; else the kernel is made to find it out. Does not
    /// block.
    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]>;

    /// Ethernet address of the next hop towards `ip`, which is waited for.
    ///
    /// # Errors
    ///
    /// Why there is no way there, in one line.
    fn next_hop(&mut self, ip: Ipv4Addr) -> Result<[u8; 6], Box<dyn std::error::Error + Send + Sync>>;
}
