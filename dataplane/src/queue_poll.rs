//! Busy polling of one device queue on this core.
//!
//! On veth the sender's core does all the receiver's kernel work, inside its `sendto`, unless somebody else runs
//! the queue's NAPI instance first. Busy polling does: the receiving core takes the packets itself, and the two
//! cores work side by side. Polling an AF_XDP socket cannot do it there, because veth registers its receive queues
//! before their NAPI instances have an id (`veth_enable_xdp_range` in drivers/net/veth.c), so such a socket never
//! learns one. An ordinary UDP socket does, from the first datagram that it receives through the queue
//! (`sk_mark_napi_id_once` in net/core/sock.c): the peer is asked to send one.
//!
//! A poll ends where another begins: as soon as this core has left the instance, the next packet that is sent takes it again and
//! runs it on the sender's core, one packet a softirq, which keeps the sender from sending; and a poll that used its budget up
//! raises a softirq here, which goes on for as long as packets come, so that nobody gives credit meanwhile. While a stream goes
//! on, the kernel is therefore told to leave the instance to us ([`QueuePoller::keep`]).

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;

use crate::napi::Instance;
use crate::sockopt;

/// How long one poll may look for packets, in microseconds: any value above 0 enables it, and a non-blocking
/// read looks once.
const BUSY_POLL_US: libc::c_int = 20;
/// Packets that one poll may take; a read polls twice, and what lies in veth's ring is then taken at once. Half of that was slower, and
/// twice as much no faster.
const BUDGET: libc::c_int = 128;

/// Packets that a wake-up may take as it sends: what a driver takes at a time (`NAPI_POLL_WEIGHT`).
const PACKETS_OF_A_CALL: libc::c_int = 64;

/// A UDP socket on an ephemeral port whose only use is to know a NAPI instance.
pub(crate) struct QueuePoller {
    socket: UdpSocket,
    ready: bool,
    /// The instance, once it was looked for, or why it cannot be kept.
    instance: Option<io::Result<Instance>>,
    kept: bool,
}

impl QueuePoller {
    /// `None`, which is told, where a socket may not poll: an unprivileged program's, or on a kernel before 5.11.
    pub(crate) fn new(local: Ipv4Addr) -> Option<QueuePoller> {
        QueuePoller::open(local)
            .inspect_err(|error| {
                tracing::debug!("the kernel runs the landing queue's NAPI instance: {error}")
            })
            .ok()
    }

    fn open(local: Ipv4Addr) -> io::Result<QueuePoller> {
        let socket = UdpSocket::bind(SocketAddrV4::new(local, 0))?;
        socket.set_nonblocking(true)?;
        prefer_busy_polling(&socket, BUDGET)?;
        Ok(QueuePoller {
            socket,
            ready: false,
            instance: None,
            kept: false,
        })
    }

    /// The port that waits for a datagram through the queue; `None` once it came.
    pub(crate) fn wanted_port(&mut self) -> Option<u16> {
        if !self.ready {
            self.ready = self.napi_id().is_ok_and(|id| id > 0);
        }
        match self.ready {
            true => None,
            false => self.socket.local_addr().ok().map(|address| address.port()),
        }
    }

    /// Keeps the instance from interrupts and from senders' cores, or gives it back to them. Whether it is kept now: an unprivileged
    /// program cannot, nor can one on a kernel before 6.14. Who keeps it must go on polling.
    #[inline]
    pub(crate) fn keep(&mut self, keep: bool) -> bool {
        if keep != self.kept {
            self.set(keep);
        }
        self.kept
    }

    #[cold]
    fn set(&mut self, keep: bool) {
        if self.instance.is_none() && self.ready {
            self.instance = Some(self.napi_id().and_then(|id| Instance::new(id as u32)));
        }
        let Some(Ok(instance)) = &self.instance else {
            return;
        };
        match instance.set(keep) {
            Ok(()) => {
                self.kept = keep;
                if !keep {
                    // Until a poll ends without a timer behind it, veth takes the instance for scheduled and wakes nobody
                    // (`rx_notify_masked` in drivers/net/veth.c).
                    self.poll();
                }
            }
            Err(error) => {
                self.kept = false;
                self.instance = Some(Err(error));
            }
        }
        if let Some(Err(error)) = &self.instance {
            tracing::debug!("the landing queue's NAPI instance cannot be kept: {error}");
        }
    }

    /// Runs the queue's NAPI instance once, if it is known.
    #[inline]
    pub(crate) fn poll(&self) {
        if !self.ready {
            return;
        }
        // Nothing is expected to be read: a non-blocking read of an empty queue busy-polls once (`sk_busy_loop` in
        // __skb_recv_udp, net/ipv4/udp.c).
        let _ = self.socket.recv(&mut [0]);
    }

    fn napi_id(&self) -> io::Result<libc::c_int> {
        sockopt::get(&self.socket, libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID)
    }
}

impl Drop for QueuePoller {
    fn drop(&mut self) {
        self.keep(false);
    }
}

/// Has calls of a socket that find nothing run its NAPI instance once, and take `budget` packets at most.
///
/// Of an AF_XDP socket each wake-up does, and wakes its driver no more (`xsk_no_wakeup` in net/xdp/xsk.c). It knows the instance of its receive
/// queue alone. In zero-copy mode that must be its transmit queue's too (`Napi::shared_by`), or nothing is ever sent.
///
/// # Errors
///
/// What setsockopt(2) says: `EPERM` without `CAP_NET_ADMIN`, or a kernel before 5.11.
pub fn prefer_busy_polling(socket: &impl AsFd, budget: libc::c_int) -> io::Result<()> {
    let set = |option, value| sockopt::set(socket, libc::SOL_SOCKET, option, &value);
    set(libc::SO_PREFER_BUSY_POLL, 1)?;
    set(libc::SO_BUSY_POLL, BUSY_POLL_US)?;
    set(libc::SO_BUSY_POLL_BUDGET, budget)
}

/// Has the calls of an AF_XDP socket do its queue's work, both ways, if `shared` says that one instance does ([`Napi::shared_by`]); whether they do.
///
/// # Errors
/// Why the kernel does not say, or what it says to the options; calls wake the driver as before.
pub(crate) fn send_in_calls(socket: &impl AsFd, shared: io::Result<Option<u32>>) -> io::Result<bool> {
    match shared? {
        Some(_) => prefer_busy_polling(socket, PACKETS_OF_A_CALL).map(|()| true),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::napi::{Deferral, Napi};

    /// Its instance has gone, and a kernel before 6.14 refuses as well.
    #[test]
    fn an_instance_that_cannot_be_kept_is_left_alone() {
        let napi = Napi::new(u32::MAX).expect("Linux 6.7");
        let instance = Instance::of(napi, Deferral::default());
        let mut poller = QueuePoller {
            socket: UdpSocket::bind("127.0.0.1:0").unwrap(),
            ready: true,
            instance: Some(Ok(instance)),
            kept: false,
        };
        for _ in 0..2 {
            assert!(!poller.keep(true));
            assert!(matches!(poller.instance, Some(Err(_))), "it is not asked again");
        }
        // What cannot be looked for is not kept either.
        poller.instance = None;
        assert!(!poller.keep(true) && matches!(poller.instance, Some(Err(_))));
    }

    /// A kernel before 6.8 has no such question; its answer is an error as well.
    #[test]
    fn without_an_answer_packets_leave_by_interrupts() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let prefers = || sockopt::get::<libc::c_int>(&socket, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL);
        let polls = || prefers().unwrap();
        let refused = Napi::shared_by(1, 99);
        assert!(refused.is_err(), "the loopback has no such queue");
        assert!(send_in_calls(&socket, refused).is_err(), "which is told");
        assert!(!send_in_calls(&socket, Ok(None)).unwrap());
        assert_eq!(polls(), 0);
        match send_in_calls(&socket, Ok(Some(1))) {
            Ok(in_calls) => assert!(in_calls && polls() == 1),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM), "without CAP_NET_ADMIN"),
        }
    }
}
