//! A program that says to a daemon what it likes.

use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use lm_dataplane::ipc::{Asked, Call, Reply, Said};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::HELLO;
use super::host::{ADDRESS, PATIENCE};
use crate::daemon::status::Status;
use crate::socket::{Broken, Connection};

/// What travels beside calls.
pub(super) struct Beside(OwnedFd);

impl Beside {
    pub(super) fn as_ref(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Memory as the daemon wants it, or such that can shrink.
pub(super) fn memory(sealed: bool) -> Beside {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("lm-fuzz", flags).expect("memory");
    rustix::fs::ftruncate(&fd, 1 << 20).expect("memory");
    if sealed {
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).expect("a seal");
    }
    Beside(fd)
}

/// A socket on the host's port; on its loopback where that is 0.
pub(super) fn udp(port: u16) -> Beside {
    let socket = match port {
        0 => UdpSocket::bind(("127.0.0.1", 0)),
        port => UdpSocket::bind((ADDRESS, port)),
    };
    Beside(socket.expect("a port that nobody has").into())
}

pub(super) struct Program {
    connection: Connection,
    number: u32,
}

impl Program {
    pub(super) fn connect(path: &Path) -> Program {
        let connection = Connection::to(path).expect("the daemon listens");
        Program {
            connection,
            number: 1 << 30,
        }
    }

    /// Whether the daemon has not hung up.
    pub(super) fn send(&self, bytes: &[u8], beside: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !beside.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(beside));
        }
        let slices = [IoSlice::new(bytes)];
        rustix::net::sendmsg(&self.connection, &slices, &mut ancillary, SendFlags::NOSIGNAL).is_ok()
    }

    /// The next reply, its number, and what is beside it; `None` when the daemon has hung up. One that says nothing has failed.
    pub(super) fn answer(&mut self) -> Option<(u32, Reply, Vec<OwnedFd>)> {
        loop {
            let mut awaited = [PollFd::new(&self.connection, PollFlags::IN)];
            let patience = Timespec {
                tv_sec: PATIENCE.as_secs() as i64,
                tv_nsec: 0,
            };
            let ready = poll(&mut awaited, Some(&patience)).expect("it can be waited for");
            assert!(ready > 0, "no answer within {PATIENCE:?}");
            match self.connection.receive() {
                Ok(Some(packet)) => match postcard::from_bytes(&packet.bytes).expect("a daemon's message") {
                    Said::Reply(number, reply) => return Some((number, reply, packet.descriptors)),
                    Said::Event(_) => {}
                },
                Ok(None) => {}
                Err(Broken::Ended) => return None,
                Err(broken) => panic!("{broken}"),
            }
        }
    }

    pub(super) fn call(&mut self, call: Call, beside: &[BorrowedFd<'_>]) -> (Reply, Vec<OwnedFd>) {
        self.number += 1;
        let number = self.number;
        self.ask(&Asked { number, call }, beside)
    }

    fn ask(&mut self, asked: &Asked, beside: &[BorrowedFd<'_>]) -> (Reply, Vec<OwnedFd>) {
        let bytes = postcard::to_stdvec(asked).expect("a call can be written");
        assert!(self.send(&bytes, beside), "the daemon has hung up");
        let (number, reply, beside) = self.answer().expect("the daemon goes on");
        assert_eq!(number, asked.number);
        (reply, beside)
    }

    pub(super) fn hello(&mut self) {
        let (reply, _) = self.ask(&HELLO, &[]);
        assert_eq!(reply, Reply::Done);
    }

    pub(super) fn status(&mut self) -> Status {
        let (reply, mut beside) = self.call(Call::Status, &[]);
        assert_eq!(reply, Reply::Status);
        let mut text = String::new();
        let mut file = std::fs::File::from(beside.pop().expect("a file"));
        file.read_to_string(&mut text).expect("a status");
        serde_json::from_str(&text).expect("a status")
    }
}
