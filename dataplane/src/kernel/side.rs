//! The kernel's two datagram sockets and its table of neighbours.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};

use crate::memory::Umem;
use crate::port::{Datagrams, Socket, SocketEvent};
use crate::route::{Neighbours, RouteError};
use crate::udp::UdpPair;

/// The kernel's sockets and its table of neighbours.
pub(super) struct Side {
    pub(super) udp: UdpPair,
    pub(super) interface_index: u32,
    /// Opened with the port, in the namespace of its interface: another thread may drive it, in another one.
    pub(super) neighbours: Option<Neighbours>,
}

impl Datagrams for Side {
    fn local(&self) -> SocketAddrV4 {
        self.udp.local()
    }

    fn send(&mut self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        if socket == Socket::Control && !self.udp.has_control() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.udp.send(socket, to, payload)
    }

    fn recv(&mut self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>> {
        if socket == Socket::Control && !self.udp.has_control() {
            return Ok(None);
        }
        self.udp.recv(socket, space)
    }

    fn recv_into(
        &mut self,
        socket: Socket,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<SocketEvent>> {
        self.udp.recv_into(socket, umem, addr, len)
    }

    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        let opened = || Neighbours::open(self.interface_index).ok();
        let neighbours = self.neighbours.take().or_else(opened)?;
        let known = neighbours.known(ip);
        if !matches!(known, Err(RouteError::System { .. })) {
            self.neighbours = Some(neighbours);
        }
        known.ok().flatten()
    }

    fn next_hop(&mut self, ip: Ipv4Addr) -> Result<[u8; 6], Box<dyn std::error::Error + Send + Sync>> {
        Ok(crate::route::resolve(ip, Some(self.interface_index))?.mac)
    }
}
