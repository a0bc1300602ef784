//! The two kernel UDP sockets of an endpoint: control (admission) and data (what the gate passes: the one-copy path).
//!
//! Both are non-blocking. ICMP errors are asked for (`IP_RECVERR`, ip(7)), because on an unconnected socket they are
//! otherwise invisible: a host where no LM listens answers a request with *port unreachable*, and its address stands in
//! the error queue.

use std::cell::Cell;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use lm_protocol::wire::lm::dscp_ecn;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::net::sockopt::set_ip_tos;

use crate::memory::Umem;
use crate::port::{Socket, SocketEvent};
use crate::sockopt;

/// Receive and send allowance asked for, in bytes of kernel memory. The kernel charges some 2 KiB for a full packet, so
/// this holds several thousand, a window's worth of the one-copy path and more.
const SOCKET_ALLOWANCE_BYTES: libc::c_int = 8 << 20;

/// How often an ephemeral pair is tried before giving up.
const PAIR_ATTEMPTS: u32 = 64;

/// Datagrams too long for the space given that one receive call skips at most.
const MAX_SKIPPED: u32 = 64;

/// One socket with what its error queue may still hold.
#[derive(Debug)]
struct Bound {
    inner: UdpSocket,
    /// Set when a call reported a pending ICMP error; the queue is read until it is empty.
    errors_pending: Cell<bool>,
}

/// A pair of bound sockets: data on port P, control on P + 1.
#[derive(Debug)]
pub(crate) struct UdpPair {
    data: Bound,
    /// None where a daemon has the control port.
    control: Option<Bound>,
    local: SocketAddrV4,
}

impl UdpPair {
    /// Binds `port` and `port + 1` on `local`; port 0 takes any two neighbours that are free.
    ///
    /// # Errors
    ///
    /// See [`UdpError`].
    pub(crate) fn bind(local: Ipv4Addr, port: u16) -> Result<UdpPair, UdpError> {
        if port == u16::MAX {
            return Err(UdpError::NoControlPort);
        }
        let mut pair = UdpPair::bind_neighbours(local, port);
        for _ in 1..PAIR_ATTEMPTS {
            // The neighbour of a port that the kernel chose may be another program's, or none.
            if port != 0 || !matches!(pair, Err(UdpError::InUse(_) | UdpError::NoControlPort)) {
                break;
            }
            pair = UdpPair::bind_neighbours(local, port);
        }
        pair
    }

    fn bind_neighbours(local: Ipv4Addr, port: u16) -> Result<UdpPair, UdpError> {
        let mut pair = UdpPair::bind_data(local, port)?;
        let control = pair.data_port().checked_add(1).ok_or(UdpError::NoControlPort)?;
        pair.control = Some(Bound::bind(SocketAddrV4::new(local, control))?);
        Ok(pair)
    }

    /// Binds the data port alone, where somebody else has the control port of this host; 0 takes any.
    ///
    /// # Errors
    ///
    /// See [`UdpError`].
    pub(crate) fn bind_data(local: Ipv4Addr, port: u16) -> Result<UdpPair, UdpError> {
        let data = Bound::bind(SocketAddrV4::new(local, port))?;
        let local = SocketAddrV4::new(local, data.port()?);
        Ok(UdpPair {
            data,
            control: None,
            local,
        })
    }

    /// Whether there is a socket on the control port.
    pub(crate) fn has_control(&self) -> bool {
        self.control.is_some()
    }

    /// Address and port of the data socket; the control socket has the next port.
    pub(crate) fn local(&self) -> SocketAddrV4 {
        self.local
    }

    /// Port of the data socket.
    pub(crate) fn data_port(&self) -> u16 {
        self.local.port()
    }

    /// Port of the control socket.
    pub(crate) fn control_port(&self) -> u16 {
        self.local.port() + 1
    }

    /// Sends one datagram.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when the socket's allowance is used up: try later. Otherwise what sendto(2) says. An ICMP error about
    /// an earlier datagram is not an error of this one: [`UdpPair::recv`] reports it.
    pub(crate) fn send(&self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let dscp_ecn = match (socket, payload.first()) {
            (Socket::Data, Some(first)) => dscp_ecn(first & 0xf),
            _ => 0,
        };
        let socket = self.socket(socket);
        if dscp_ecn > 0 {
            set_ip_tos(&socket.inner, dscp_ecn)?;
        }
        let mut result = socket.inner.send_to(payload, to);
        if let Err(error) = &result
            && is_icmp_error(error)
        {
            // Either an older ICMP error, which the call reported instead of sending and thereby cleared, or this very
            // destination has no route, which the second call says again.
            socket.errors_pending.set(true);
            result = socket.inner.send_to(payload, to);
        }
        if dscp_ecn > 0 {
            set_ip_tos(&socket.inner, 0)?;
        }
        result.map(|_| ())
    }

    /// Takes the next datagram or error, if there is one; a datagram longer than `space` is dropped and counted.
    ///
    /// # Errors
    ///
    /// What recvfrom(2) says; that there is nothing is `Ok(None)`.
    pub(crate) fn recv(&self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>> {
        let socket = self.socket(socket);
        for _ in 0..MAX_SKIPPED {
            match socket.recv_from(space) {
                Ok((from, received)) if received <= space.len() => {
                    return Ok(Some(SocketEvent::Datagram { from, len: received }));
                }
                Ok((from, _)) => {
                    return Ok(Some(SocketEvent::TooLong(from)));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(if socket.errors_pending.get() {
                        socket.next_refusal()?
                    } else {
                        None
                    });
                }
                Err(error) if is_icmp_error(&error) => {
                    socket.errors_pending.set(true);
                    if let Some(event) = socket.next_refusal()? {
                        return Ok(Some(event));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// As [`UdpPair::recv`], into the `len` bytes of the UMEM at `addr`.
    ///
    /// # Errors
    ///
    /// Those of [`UdpPair::recv`].
    ///
    /// # Panics
    ///
    /// When the range leaves the mapping.
    pub(crate) fn recv_into(
        &self,
        socket: Socket,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<SocketEvent>> {
        // SAFETY: the call writes there as `Umem::copy_to` would, under the same rules: nothing else does meanwhile.
        self.recv(socket, unsafe { umem.mapping().slice_mut(addr, len) })
    }

    /// The socket's descriptor, to wait on: readable when [`UdpPair::recv`] has something.
    pub(crate) fn fd(&self, socket: Socket) -> BorrowedFd<'_> {
        self.socket(socket).inner.as_fd()
    }

    fn socket(&self, socket: Socket) -> &Bound {
        match socket {
            // Without one, the other: nobody asks then.
            Socket::Control => self.control.as_ref().unwrap_or(&self.data),
            Socket::Data => &self.data,
        }
    }
}

impl Bound {
    fn bind(address: SocketAddrV4) -> Result<Bound, UdpError> {
        let inner = UdpSocket::bind(address).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => UdpError::InUse(address),
            io::ErrorKind::AddrNotAvailable => UdpError::NotLocal(*address.ip()),
            io::ErrorKind::PermissionDenied => UdpError::Privilege(address.port()),
            _ => UdpError::System {
                call: "bind of a UDP socket",
                source,
            },
        })?;
        let socket = Bound {
            inner,
            errors_pending: Cell::new(false),
        };
        socket.configure().map_err(|source| UdpError::System {
            call: "set-up of a UDP socket",
            source,
        })?;
        Ok(socket)
    }

    fn configure(&self) -> io::Result<()> {
        self.inner.set_nonblocking(true)?;
        sockopt::set(&self.inner, libc::IPPROTO_IP, libc::IP_RECVERR, &1)?;
        for (forced, plain) in [
            (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
            (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
        ] {
            // Beyond net.core.rmem_max only with CAP_NET_ADMIN; without it take what the limit allows.
            let allow = |option| sockopt::set(&self.inner, libc::SOL_SOCKET, option, &SOCKET_ALLOWANCE_BYTES);
            allow(forced).or_else(|_| allow(plain))?;
        }
        Ok(())
    }

    fn port(&self) -> Result<u16, UdpError> {
        self.inner
            .local_addr()
            .map(|address| address.port())
            .map_err(|source| UdpError::System {
                call: "getsockname",
                source,
            })
    }

    /// Sender and *real* length of the next datagram, which may exceed `space` (`MSG_TRUNC`).
    #[inline]
    fn recv_from(&self, space: &mut [u8]) -> io::Result<(SocketAddrV4, usize)> {
        let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
        let (_, received, from) = rustix::net::recvfrom(&self.inner, space, flags)?;
        Ok((from.ok_or(Errno::DESTADDRREQ)?.try_into()?, received))
    }

    /// Reads the error queue up to the next *port unreachable*; other ICMP errors are as good as silence and skipped.
    fn next_refusal(&self) -> io::Result<Option<SocketEvent>> {
        loop {
            match self.next_error()? {
                None => {
                    self.errors_pending.set(false);
                    return Ok(None);
                }
                Some((to, libc::ECONNREFUSED)) => return Ok(Some(SocketEvent::Refused(to))),
                Some(_) => {}
            }
        }
    }

    /// The oldest entry of the error queue: the destination of the datagram that it is about, and the errno.
    fn next_error(&self) -> io::Result<Option<(SocketAddrV4, i32)>> {
        // SAFETY: an all-zero address is a valid one, of no family.
        let mut to: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        // Room for one IP_RECVERR message: sock_extended_err and the offender's address (ip(7)); u64 for alignment.
        let mut control = [0_u64; 16];
        // SAFETY: an all-zero msghdr is a valid one: null pointers with zero lengths.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = (&raw mut to).cast();
        message.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        // SAFETY: name and control point to live, exclusive locals of the lengths given; there is no data part.
        let received = unsafe {
            libc::recvmsg(
                self.inner.as_raw_fd(),
                &mut message,
                libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT,
            )
        };
        if received < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock {
                Ok(None)
            } else {
                Err(error)
            };
        }
        let mut errno = 0;
        // SAFETY: the message's control part is what recvmsg just wrote, and CMSG_* walk inside its length; the data of an
        // IP_RECVERR message starts with a sock_extended_err, read unaligned.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&message);
            while !header.is_null() {
                if (*header).cmsg_level == libc::IPPROTO_IP && (*header).cmsg_type == libc::IP_RECVERR {
                    let extended = libc::CMSG_DATA(header)
                        .cast::<libc::sock_extended_err>()
                        .read_unaligned();
                    errno = extended.ee_errno as i32;
                }
                header = libc::CMSG_NXTHDR(&message, header);
            }
        }
        let address = Ipv4Addr::from(u32::from_be(to.sin_addr.s_addr));
        Ok(Some((
            SocketAddrV4::new(address, u16::from_be(to.sin_port)),
            errno,
        )))
    }
}

/// Errnos that `icmp_err_convert` (`net/ipv4/icmp.c`) makes of ICMP messages.
fn is_icmp_error(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNREFUSED
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::ENOPROTOOPT
                | libc::EOPNOTSUPP
                | libc::EMSGSIZE
                | libc::EPROTO
                | libc::EACCES
        )
    )
}

/// Why the sockets could not be bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UdpError {
    /// The port is taken.
    #[error("UDP {0} is taken; stop the program that has it (ss -lunp) or choose another --socket")]
    InUse(SocketAddrV4),
    /// The address is not one of this host.
    #[error("{0} is not an address of this host")]
    NotLocal(Ipv4Addr),
    /// A port below `net.ipv4.ip_unprivileged_port_start`.
    #[error("no privilege for socket {0}: CAP_NET_BIND_SERVICE is missing; choose a socket above 1023")]
    Privilege(u16),
    /// Data port 65535 leaves no control port, or no two neighbours are free.
    #[error("no free socket for control (data socket + 1); choose a data socket below 65535")]
    NoControlPort,
    /// Anything else.
    #[error("{call}: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HugePages;
    use std::time::{Duration, Instant};

    fn wait_for(pair: &UdpPair, socket: Socket, space: &mut [u8]) -> Option<SocketEvent> {
        let deadline = Instant::now() + Duration::from_secs(2);
        while Instant::now() < deadline {
            if let Some(event) = pair.recv(socket, space).expect("receive") {
                return Some(event);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    #[test]
    fn an_ephemeral_pair_takes_neighbours() {
        let pair = UdpPair::bind(Ipv4Addr::LOCALHOST, 0).expect("a pair");
        assert_ne!(pair.data_port(), 0);
        assert_eq!(pair.control_port(), pair.data_port() + 1);
        let taken = UdpPair::bind(Ipv4Addr::LOCALHOST, pair.data_port());
        assert!(matches!(taken, Err(UdpError::InUse(address)) if address == pair.local()));
        assert!(matches!(
            UdpPair::bind(Ipv4Addr::LOCALHOST, u16::MAX),
            Err(UdpError::NoControlPort)
        ));
    }

    #[test]
    fn datagrams_arrive_on_their_port() {
        let a = UdpPair::bind(Ipv4Addr::LOCALHOST, 0).expect("a pair");
        let b = UdpPair::bind(Ipv4Addr::LOCALHOST, 0).expect("a pair");
        let umem = Umem::new(4096, HugePages::Off).expect("a page");
        let control = SocketAddrV4::new(Ipv4Addr::LOCALHOST, b.control_port());
        a.send(Socket::Control, control, b"request").expect("send");
        a.send(Socket::Data, b.local(), b"").expect("send");
        let mut space = [0; 16];
        let from = SocketAddrV4::new(Ipv4Addr::LOCALHOST, a.control_port());
        assert_eq!(
            wait_for(&b, Socket::Control, &mut space),
            Some(SocketEvent::Datagram { from, len: 7 })
        );
        assert_eq!(&space[..7], b"request");
        assert_eq!(
            wait_for(&b, Socket::Data, &mut space),
            Some(SocketEvent::Datagram {
                from: a.local(),
                len: 0
            })
        );
        a.send(Socket::Data, b.local(), b"into the UMEM").expect("send");
        let event = b.recv_into(Socket::Data, &umem, 100, 64).expect("receive");
        assert_eq!(
            event,
            Some(SocketEvent::Datagram {
                from: a.local(),
                len: 13
            })
        );
        assert_eq!(&umem.read_header::<14>(100), b"into the UMEM\0");
    }

    /// What IP_RECVTOS tells of the next datagram.
    fn received_tos(pair: &UdpPair) -> u8 {
        let mut space = [0; 64];
        let mut part = libc::iovec {
            iov_base: space.as_mut_ptr().cast(),
            iov_len: space.len(),
        };
        let mut control = [0_u64; 8];
        // SAFETY: an all-zero msghdr is a valid one; its parts point to live, exclusive locals of the lengths given, and the control part is
        // read inside what recvmsg wrote.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&control) as _;
            assert!(
                libc::recvmsg(pair.data.inner.as_raw_fd(), &mut message, 0) >= 0,
                "loopback"
            );
            let header = libc::CMSG_FIRSTHDR(&message).as_ref().expect("IP_RECVTOS");
            assert_eq!(header.cmsg_type, libc::IP_TOS);
            *libc::CMSG_DATA(header)
        }
    }

    #[test]
    fn real_time_leaves_a_socket_expedited_and_nothing_else_does() {
        let bind = || UdpPair::bind(Ipv4Addr::LOCALHOST, 0).expect("a pair");
        let (a, b) = (bind(), bind());
        sockopt::set(&b.data.inner, libc::IPPROTO_IP, libc::IP_RECVTOS, &1).expect("set");
        for (packet_type, tos) in [(7, 0), (8, 0xb8), (9, 0xb8), (10, 0)] {
            a.send(Socket::Data, b.local(), &[0x20 | packet_type])
                .expect("send");
            assert_eq!(received_tos(&b), tos, "type {packet_type}");
        }
    }

    #[test]
    fn a_datagram_too_long_is_dropped_and_counted() {
        let a = UdpPair::bind(Ipv4Addr::LOCALHOST, 0).expect("a pair");
        let mut space = [0; 8];
        a.send(Socket::Data, a.local(), &[1; 9]).expect("send");
        a.send(Socket::Data, a.local(), &[2; 8]).expect("send");
        assert_eq!(
            wait_for(&a, Socket::Data, &mut space),
            Some(SocketEvent::TooLong(a.local()))
        );
        assert_eq!(
            wait_for(&a, Socket::Data, &mut space),
            Some(SocketEvent::Datagram {
                from: a.local(),
                len: 8
            })
        );
        assert_eq!(space, [2; 8]);
    }

    #[test]
    fn refusals_name_the_peer_and_lose_nothing() {
        let bind = || UdpPair::bind(Ipv4Addr::LOCALHOST, 0).expect("a pair");
        let (a, b, leaving, leaving_too) = (bind(), bind(), bind(), bind());
        let (first, second) = (leaving.local(), leaving_too.local());
        drop((leaving, leaving_too));
        for to in [first, second, b.local()] {
            a.send(Socket::Data, to, b"anybody there?")
                .expect("an earlier refusal is not this datagram's error");
        }
        let mut space = [0; 64];
        let mut refused = [
            wait_for(&a, Socket::Data, &mut space),
            wait_for(&a, Socket::Data, &mut space),
        ]
        .map(|event| match event {
            Some(SocketEvent::Refused(peer)) => peer,
            other => panic!("expected a refusal, got {other:?}"),
        });
        let mut expected = [first, second];
        refused.sort();
        expected.sort();
        assert_eq!(refused, expected);
        assert_eq!(a.recv(Socket::Data, &mut space).expect("receive"), None);
        assert!(wait_for(&b, Socket::Data, &mut space).is_some());
    }
}
