//! The UDP sockets of the control port on one interface: one at its address, and one that hears what is said to all.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use ipnet::Ipv4Net;
use lm_protocol::admission::seal::MAX_SEALED_LEN;
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_broadcast, set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Datagrams that may wait for the daemon, in bytes: some ten thousand.
const BUFFER_LEN: usize = 8 << 20;

/// The control port of one interface.
#[derive(Debug)]
pub(crate) struct Ports {
    unicast: UdpSocket,
    /// Bound to the subnet's broadcast address, where there is one.
    broadcast: Option<(UdpSocket, SocketAddrV4)>,
    /// Hosts that a broadcast does not reach.
    peers: Vec<SocketAddrV4>,
    /// Datagrams that could not be sent: as good as lost.
    pub(crate) send_errors: u64,
    /// Whether datagrams may be left that came.
    pub(crate) more: bool,
    broadcast_next: bool,
}

/// The broadcast address of a subnet; `None` where it has none (RFC 3021).
pub(crate) fn broadcast_of(subnet: Ipv4Net) -> Option<Ipv4Addr> {
    (1..=30)
        .contains(&subnet.prefix_len())
        .then(|| subnet.broadcast())
}

impl Ports {
    /// Binds them.
    ///
    /// # Errors
    /// One line: who may have the port.
    pub(crate) fn bind(subnet: Ipv4Net, port: u16, peers: &[SocketAddrV4]) -> Result<Ports, String> {
        let address = SocketAddrV4::new(subnet.addr(), port);
        let unicast = bind(address).map_err(|error| told(address, error))?;
        let broadcast = match broadcast_of(subnet) {
            Some(ip) => {
                let all = SocketAddrV4::new(ip, port);
                Some((bind(all).map_err(|error| told(all, error))?, all))
            }
            None => None,
        };
        let mut ports = Ports {
            unicast,
            broadcast,
            peers: Vec::new(),
            send_errors: 0,
            more: false,
            broadcast_next: false,
        };
        ports.set_peers(address, peers);
        Ok(ports)
    }

    /// Names the hosts that a broadcast does not reach.
    pub(crate) fn set_peers(&mut self, own: SocketAddrV4, peers: &[SocketAddrV4]) {
        self.peers = peers.iter().copied().filter(|peer| *peer != own).collect();
    }

    /// The next datagram, if one is there, and where it came from. A datagram longer than any of ours is cut, so that it is none.
    pub(crate) fn receive(&mut self, buffer: &mut Received) -> Option<(SocketAddrV4, usize)> {
        // By turns: a flood at one must not silence the other.
        self.broadcast_next = !self.broadcast_next;
        let broadcast = self.broadcast.as_ref().map(|(socket, _)| socket);
        let (first, second) = match self.broadcast_next {
            true => (broadcast, Some(&self.unicast)),
            false => (Some(&self.unicast), broadcast),
        };
        first
            .into_iter()
            .chain(second)
            .find_map(|socket| receive(socket, buffer))
    }

    /// The next datagram that is not for all hosts.
    pub(crate) fn receive_at_address(&self, buffer: &mut Received) -> Option<(SocketAddrV4, usize)> {
        receive(&self.unicast, buffer)
    }

    /// Sends to one host.
    pub(crate) fn send(&mut self, to: SocketAddrV4, bytes: &[u8]) {
        // What cannot be sent now is as good as lost on the way: what matters is repeated.
        if self.unicast.send_to(bytes, to).is_err() {
            self.send_errors += 1;
        }
    }

    /// Sends to all hosts.
    pub(crate) fn send_to_all(&mut self, bytes: &[u8]) {
        let all = self.broadcast.as_ref().map(|(_, all)| *all);
        for to in self.peers.clone().into_iter().chain(all) {
            self.send(to, bytes);
        }
    }

    pub(crate) fn raw_fds(&self) -> impl Iterator<Item = RawFd> {
        let broadcast = self.broadcast.iter().map(|(socket, _)| socket);
        std::iter::once(&self.unicast)
            .chain(broadcast)
            .map(AsRawFd::as_raw_fd)
    }
}

impl AsFd for Ports {
    /// The socket at the interface's address.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.unicast.as_fd()
    }
}

/// The next datagram at a socket, if one is there.
fn receive(socket: &UdpSocket, buffer: &mut Received) -> Option<(SocketAddrV4, usize)> {
    loop {
        match socket.recv_from(buffer) {
            Ok((len, SocketAddr::V4(from))) => return Some((from, len)),
            Ok((_, SocketAddr::V6(_))) => {}
            // ICMP said that nobody listens there; the message is repeated, or its lease ends.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

/// Room for a datagram, and a byte more.
pub(crate) type Received = [u8; MAX_SEALED_LEN + 1];

fn bind(address: SocketAddrV4) -> Result<UdpSocket, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd: OwnedFd = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    set_socket_broadcast(&fd, true)?;
    // Less than wished for is no reason not to work.
    set_socket_recv_buffer_size_force(&fd, BUFFER_LEN).ok();
    set_socket_send_buffer_size_force(&fd, BUFFER_LEN).ok();
    rustix::net::bind(&fd, &address)?;
    Ok(UdpSocket::from(fd))
}

fn told(address: SocketAddrV4, error: Errno) -> String {
    match error {
        Errno::ADDRINUSE => format!(
            "{address} is taken: another daemon or an endpoint with admission of its own runs here (ss -ulpn \"sport \
             = :{}\"); end it, or choose another --control-port at all hosts",
            address.port()
        ),
        error => format!("cannot listen on {address}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_addresses() {
        let of = |text: &str, len| {
            let subnet = Ipv4Net::new_assert(text.parse().unwrap(), len);
            broadcast_of(subnet).map(|ip| ip.to_string())
        };
        assert_eq!(of("198.18.0.1", 24).as_deref(), Some("198.18.0.255"));
        assert_eq!(of("10.1.2.3", 8).as_deref(), Some("10.255.255.255"));
        assert_eq!(of("10.1.2.3", 30).as_deref(), Some("10.1.2.3"));
        assert_eq!(of("10.1.2.3", 31), None);
        assert_eq!(of("10.1.2.3", 32), None);
        assert_eq!(of("10.1.2.3", 0), None);
    }
}
