//! A program that speaks with a daemon by hand.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use lm_dataplane::ipc::*;
use lm_dataplane::memory::Mapping;
use lm_protocol::control::{ControlMessage, Grant, Request};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use xtask::bed::{Host, INTERFACE};

use crate::bed::PATIENCE;

/// Bytes that it registers for a channel.
pub(crate) const MEMORY_LEN: u64 = 1 << 20;

/// A connection to a daemon, and what it got.
pub(crate) struct Client {
    number: u32,
    pub(crate) events: Vec<Event>,
    pub(crate) udp: Option<UdpSocket>,
    pub(crate) joined: Option<Joined>,
    pub(crate) channels: Vec<OwnedFd>,
    /// Closed last: when the daemon has noticed, everything else is free as well, also where a process that another test forked held copies.
    socket: OwnedFd,
}

/// A UDP socket on a host.
pub(crate) fn udp(host: &Host, port: u16) -> UdpSocket {
    let address = SocketAddrV4::new(host.address(), port);
    host.enter(|| Ok(UdpSocket::bind(address)?)).unwrap()
}

/// Memory as the daemon wants it.
pub(crate) fn memory(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

/// What programs store where others read.
pub(crate) const EXTREMES: [u64; 6] = [u64::MAX, 0, 1, i64::MAX as u64, i64::MIN as u64, !0 << 32];

/// Memory that the daemon handed out, in which others read and write at the same time.
pub(crate) struct Words(pub(crate) Mapping);

impl Words {
    pub(crate) fn fill(&self, with: u64) {
        for at in 0..self.0.len() as usize / 8 {
            // SAFETY: a mapping of that length, on a page's boundary, while `self` lives; all accesses are atomic.
            unsafe { AtomicU64::from_ptr(self.0.base().cast::<u64>().as_ptr().add(at)) }.store(with, Relaxed);
        }
    }
}

/// Works as another user, in the group of the same number.
pub(crate) fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worked = scope.spawn(|| {
            let gid = rustix::thread::Gid::from_raw(uid);
            let uid = rustix::thread::Uid::from_raw(uid);
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            work()
        });
        worked.join().unwrap()
    })
}

impl Client {
    pub(crate) fn connect(path: &Path) -> Client {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Client {
            socket,
            number: 0,
            events: Vec::new(),
            udp: None,
            joined: None,
            channels: Vec::new(),
        }
    }

    /// Connects as somebody else.
    pub(crate) fn connect_as(path: &Path, uid: u32) -> Client {
        as_user(uid, || Client::connect(path))
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8], beside: &[BorrowedFd<'_>]) {
        assert!(self.try_send_beside(bytes, beside), "the daemon has hung up");
    }

    /// Whether the daemon has not hung up.
    pub(crate) fn try_send_beside(&self, bytes: &[u8], beside: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !beside.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(beside));
        }
        let flags = SendFlags::NOSIGNAL;
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, flags).is_ok()
    }

    /// As when it dies, also where a process that another test forked holds copies.
    pub(crate) fn hang_up(&self) {
        rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both).unwrap();
    }

    /// The daemon's status, without a process of its own that asks for it.
    pub(crate) fn status(&mut self) -> lm_admission::daemon::status::Status {
        let (_, mut beside) = self.call_beside(Call::Status, &[]);
        serde_json::from_reader(std::fs::File::from(beside.remove(0))).unwrap()
    }

    /// Whether the daemon answers, and does not hang up.
    pub(crate) fn is_let_in(&mut self) -> bool {
        let call = Call::Hello { version: VERSION };
        let bytes = postcard::to_stdvec(&Asked { number: 1, call }).unwrap();
        // It may have hung up already.
        self.try_send_beside(&bytes, &[]) && self.receive().is_some()
    }

    /// Sends without taking any answer; whether the daemon is still there.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match rustix::net::send(&self.socket, bytes, flags) {
                Ok(_) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return true,
                Err(_) => return false,
            }
        }
    }

    pub(crate) fn send(&mut self, call: Call, beside: &[BorrowedFd<'_>]) -> u32 {
        self.number += 1;
        let number = self.number;
        let bytes = postcard::to_stdvec(&Asked { number, call }).unwrap();
        self.send_bytes(&bytes, beside);
        number
    }

    /// The next packet; `None` when the daemon has closed the connection.
    pub(crate) fn receive(&mut self) -> Option<(Said, Vec<OwnedFd>)> {
        let mut bytes = vec![0; MESSAGE_LEN_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        // A socket with a time limit is interrupted when the process is stopped and goes on (signal(7)).
        let came = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(&self.socket, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        });
        let received = match came {
            Ok(received) if received.bytes > 0 => received,
            Ok(_) | Err(rustix::io::Errno::CONNRESET) => return None,
            Err(error) => panic!("nothing came: {error}"),
        };
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let beside = rights.flatten().collect();
        Some((postcard::from_bytes(&bytes[..received.bytes]).unwrap(), beside))
    }

    pub(crate) fn call_beside(&mut self, call: Call, beside: &[BorrowedFd<'_>]) -> (Reply, Vec<OwnedFd>) {
        let number = self.send(call, beside);
        loop {
            match self.receive().expect("the daemon answers") {
                (Said::Reply(of, reply), beside) => {
                    assert_eq!(of, number);
                    return (reply, beside);
                }
                (Said::Event(event), _) => self.events.push(event),
            }
        }
    }

    pub(crate) fn call(&mut self, call: Call) -> Reply {
        self.call_beside(call, &[]).0
    }

    /// Calls, and is refused for this reason.
    pub(crate) fn refused_for(&mut self, call: Call, beside: &[BorrowedFd<'_>], why: &str) {
        let told = self.refused(call, beside);
        assert!(told.contains(why), "{told}");
    }

    /// Calls; what it gets told when it is refused.
    pub(crate) fn refused(&mut self, call: Call, beside: &[BorrowedFd<'_>]) -> String {
        match self.call_beside(call, beside).0 {
            Reply::Refused(what) => {
                assert!(!what.contains('\n'), "{what}");
                what
            }
            other => panic!("not refused: {other:?}"),
        }
    }

    pub(crate) fn done(&mut self, call: Call) {
        assert_eq!(self.call(call), Reply::Done);
    }

    pub(crate) fn hello(mut self) -> Client {
        self.done(Call::Hello { version: VERSION });
        self
    }

    pub(crate) fn smooth_call(interface: &str) -> Call {
        let interface = interface.to_owned();
        Call::Smooth { interface }
    }

    pub(crate) fn join_call(landing: bool) -> Call {
        Call::Join {
            interface: INTERFACE.to_owned(),
            landing,
            mode: Mode::Auto,
        }
    }

    /// Joins with a socket of its own on `port`.
    pub(crate) fn join(self, host: &Host, port: u16, landing: bool) -> Client {
        self.join_by(Client::join_call(landing), udp(host, port))
    }

    pub(crate) fn rejoin(self, old: &mut Client) -> Client {
        let token = old.joined().token;
        let mut client = self.join_by(Call::Rejoin { token }, old.udp.take().unwrap());
        client.channels = std::mem::take(&mut old.channels);
        client
    }

    fn join_by(mut self, call: Call, udp: UdpSocket) -> Client {
        let (reply, _) = self.call_beside(call, &[udp.as_fd()]);
        let Reply::Joined(joined) = reply else {
            panic!("not joined: {reply:?}")
        };
        self.udp = Some(udp);
        self.joined = Some(joined);
        self
    }

    pub(crate) fn joined(&self) -> &Joined {
        self.joined.as_ref().unwrap()
    }

    pub(crate) fn landing_queue(&self) -> u16 {
        self.joined().landing_queue.unwrap()
    }

    pub(crate) fn channel_call(queue: u16, role: Role, registered_len: u64) -> Call {
        Call::OpenChannel(Channel {
            queue,
            role,
            registered_len,
            chunk_len: 2048,
            multi_buffer: false,
            ring_lens: [64; 4],
        })
    }

    /// Opens a channel over memory of its own.
    pub(crate) fn open(&mut self, queue: u16, role: Role) {
        let memory = memory(MEMORY_LEN);
        let call = Client::channel_call(queue, role, MEMORY_LEN);
        let (reply, beside) = self.call_beside(call, &[memory.as_fd()]);
        assert_eq!(reply, Reply::ChannelOpened { zero_copy: false });
        assert_eq!(beside.len(), if role == Role::Transmit { 1 } else { 2 });
        self.channels.extend(beside);
    }

    pub(crate) fn offer(&self) -> Offer {
        Offer {
            queue: self.landing_queue(),
            mtu: 1500,
            chunk_len: 2048,
            max_message_len: 1 << 30,
            window_max: 256,
            allow: Vec::new(),
        }
    }

    /// A program that receives on `port`.
    pub(crate) fn receiver(path: &Path, host: &Host, port: u16) -> Client {
        let mut client = Client::connect(path).hello().join(host, port, true);
        client.open(client.landing_queue(), Role::Landing);
        client.done(Call::Receive(client.offer()));
        client
    }

    /// A program that sends from `port`.
    pub(crate) fn sender(path: &Path, host: &Host, port: u16) -> Client {
        Client::connect(path).hello().join(host, port, false)
    }

    pub(crate) fn request(&self, max_message_len: u64) -> Control {
        let request = Request {
            sender_id: 7,
            data_port: self.udp.as_ref().unwrap().local_addr().unwrap().port(),
            max_message_len,
            ..Request::default()
        };
        Control::new(1, &ControlMessage::Request(request))
    }

    /// Asks for a session.
    pub(crate) fn try_ask(&mut self, to: SocketAddrV4, max_message_len: u64) -> Reply {
        let request = self.request(max_message_len);
        let patience_ms = PATIENCE.as_millis() as u32;
        let call = Call::Request {
            to,
            request,
            patience_ms,
        };
        self.call(call)
    }

    /// Asks for a session; gives its ticket.
    pub(crate) fn ask(&mut self, to: SocketAddrV4, max_message_len: u64) -> u32 {
        match self.try_ask(to, max_message_len) {
            Reply::Requested(Decision::Requested(ticket)) => ticket,
            other => panic!("not requested: {other:?}"),
        }
    }

    /// Says how far a session is that it receives in.
    pub(crate) fn tell_progress(&mut self, session_key: u64, delivered: u32, unused: Option<(u32, bool)>) {
        let progress = Progress {
            session_key,
            delivered,
            is_heard: true,
            unused,
        };
        let sessions = vec![progress];
        self.done(Call::Touched { sessions });
    }

    /// The next event.
    pub(crate) fn event(&mut self) -> Event {
        if !self.events.is_empty() {
            return self.events.remove(0);
        }
        match self.receive().expect("the daemon is there").0 {
            Said::Event(event) => event,
            other => panic!("no event: {other:?}"),
        }
    }

    /// What became of a request.
    pub(crate) fn outcome(&mut self, ticket: u32) -> Outcome {
        match self.event() {
            Event::Told { ticket: of, outcome } if of == ticket => outcome,
            other => panic!("not the outcome: {other:?}"),
        }
    }

    pub(crate) fn granted(&mut self, ticket: u32) -> Grant {
        match self.outcome(ticket) {
            Outcome::Granted(control) => grant(&control),
            other => panic!("not granted: {other:?}"),
        }
    }

    /// Whether nothing comes for a while.
    pub(crate) fn hears_nothing(&mut self, wait: Duration) -> bool {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(wait)).unwrap();
        let mut byte = [0u8; 1];
        let heard = rustix::net::recv(&self.socket, &mut byte, RecvFlags::PEEK);
        set_socket_timeout(&self.socket, Timeout::Recv, Some(PATIENCE)).unwrap();
        self.events.is_empty() && heard == Err(rustix::io::Errno::WOULDBLOCK)
    }
}

pub(crate) fn grant(control: &Control) -> Grant {
    match control.parse().unwrap().1 {
        ControlMessage::Grant(grant) => grant,
        other => panic!("no grant: {other:?}"),
    }
}
