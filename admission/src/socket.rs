//! The Unix `SOCK_SEQPACKET` socket for programs: packets, descriptors beside them, and who is at the other end.
//!
//! Nothing here waits. What a program does not take is kept for it, up to a bound; one that lets it come so far is dropped.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use lm_dataplane::ipc::{DESCRIPTORS_MAX, MESSAGE_LEN_MAX, Said};
use lm_dataplane::socket::unread_len;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

/// Packets that wait for a program, at most, and those of them that have descriptors beside them.
const WAITING_MAX: usize = 512;
const WAITING_BESIDE_MAX: usize = 1;

/// Any packet counts more for the kernel, in bytes.
const PACKET_LEN: u32 = 256;

/// Who is at the other end, as the kernel says (`SO_PEERCRED`): when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Credentials {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// The socket that programs connect to. Its path goes with it.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    // Held for its lock: nobody else listens on the path meanwhile.
    _lock: File,
}

impl Listener {
    /// Listens on `path`, which a daemon that is dead may have left behind.
    pub(crate) fn bind(path: &Path) -> Result<Listener, String> {
        let name = path.display();
        let lock = lock(&Listener::lock_path(path)).map_err(|error| match error {
            Errno::WOULDBLOCK => {
                format!("another daemon listens on {name}: end it, or choose another --socket")
            }
            Errno::ACCESS | Errno::LOOP => format!(
                "{} is not this user's ({error}): remove it",
                Listener::lock_path(path).display()
            ),
            error => format!("cannot make {name}: {error}"),
        })?;
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(format!("cannot replace {name}: {error}")),
        }
        let bound = || -> Result<OwnedFd, Errno> {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            // Everybody may connect, to be told why it is not allowed. No thread runs yet that makes files; and no path is looked up a
            // second time, when something else may be there.
            let mask = rustix::process::umask(Mode::from_raw_mode(0o111));
            let bound = rustix::net::bind(&fd, &SocketAddrUnix::new(path)?);
            rustix::process::umask(mask);
            bound?;
            rustix::net::listen(&fd, 64)?;
            Ok(fd)
        };
        let fd = bound().map_err(|error| format!("cannot listen on {name}: {error}"))?;
        Ok(Listener {
            fd,
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// The file whose lock says that somebody listens.
    pub(crate) fn lock_path(path: &Path) -> PathBuf {
        path.with_extension("lock")
    }

    /// The next program that wants to connect.
    pub(crate) fn accept(&self) -> io::Result<Option<(Connection, Credentials)>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = match rustix::net::accept_with(&self.fd, flags) {
            Ok(fd) => fd,
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let peer = socket_peercred(&fd)?;
        let credentials = Credentials {
            pid: peer.pid.as_raw_nonzero().get(),
            uid: peer.uid.as_raw(),
            gid: peer.gid.as_raw(),
        };
        Ok(Some((Connection::new(fd), credentials)))
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Leaves the path for the next daemon to replace.
    pub(crate) fn leave(mut self) {
        self.path = PathBuf::new();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

/// Locks a file that is made for that; the lock goes with the file's descriptor, and so with the process.
fn lock(path: &Path) -> Result<File, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?;
    rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive)?;
    Ok(File::from(fd))
}

/// A packet that came.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// Why a connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    /// The program closed it, or is dead.
    #[error("it is gone")]
    Ended,
    /// A packet that is longer than any call, or with more descriptors than any.
    #[error("it sent a packet that is longer than any call")]
    TooLong,
    /// It does not take what it is told.
    #[error("it does not take what it is told")]
    Deaf,
    /// What the kernel says.
    #[error("{0}")]
    System(Errno),
}

/// One program's connection.
#[derive(Debug)]
pub(crate) struct Connection {
    fd: OwnedFd,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// A packet with descriptors has gone. As long as it is not read they are in flight, and count for the daemon's user.
    handed: bool,
    /// As many descriptors are in flight as the daemon's user may have.
    pub(crate) is_crowded: bool,
}

impl Connection {
    fn new(fd: OwnedFd) -> Connection {
        Connection {
            fd,
            waiting: VecDeque::new(),
            handed: false,
            is_crowded: false,
        }
    }

    /// Whether descriptors may be in flight to the program. Closing the connection would not bring them back.
    pub(crate) fn holds_descriptors(&self) -> bool {
        self.handed && unread_len(&self.fd).is_ok_and(|len| len >= PACKET_LEN)
    }

    /// Says nothing more, and hears nothing.
    pub(crate) fn hang_up(&mut self) {
        self.waiting.clear();
        // Perhaps it has been so for long.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// The other end, as a program has it: it waits for what is to come.
    pub(crate) fn to(path: &Path) -> Result<Connection, Errno> {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Connection::new(fd))
    }

    /// The next packet, if one is there. What the listener accepted does not wait for one.
    pub(crate) fn receive(&self) -> Result<Option<Packet>, Broken> {
        let mut bytes = vec![0; MESSAGE_LEN_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let received = rustix::net::recvmsg(&self.fd, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        let received = match received {
            Ok(received) => received,
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(None),
            Err(Errno::CONNRESET) => return Err(Broken::Ended),
            Err(error) => return Err(Broken::System(error)),
        };
        // Taken in any case, so that they are closed.
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptors = rights.flatten().collect();
        if received.bytes == 0 {
            return Err(Broken::Ended);
        }
        let is_cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
        if received.flags.intersects(is_cut) {
            return Err(Broken::TooLong);
        }
        bytes.truncate(received.bytes);
        Ok(Some(Packet { bytes, descriptors }))
    }

    /// Tells the program something, with descriptors beside it; later, if it cannot take it now.
    pub(crate) fn say(&mut self, said: &Said, descriptors: Vec<OwnedFd>) -> Result<(), Broken> {
        let Ok(bytes) = postcard::to_stdvec(said) else {
            return Err(Broken::TooLong);
        };
        if bytes.len() > MESSAGE_LEN_MAX {
            return Err(Broken::TooLong);
        }
        self.waiting.push_back((bytes, descriptors));
        self.flush()?;
        let beside = self.waiting.iter().filter(|(_, beside)| !beside.is_empty());
        match self.waiting.len() > WAITING_MAX || beside.count() > WAITING_BESIDE_MAX {
            true => Err(Broken::Deaf),
            false => Ok(()),
        }
    }

    /// Sends what waits, as far as it can be taken: one packet with descriptors at a time.
    pub(crate) fn flush(&mut self) -> Result<(), Broken> {
        self.is_crowded = false;
        while let Some((bytes, descriptors)) = self.waiting.front() {
            if !descriptors.is_empty() && self.holds_descriptors() {
                return Ok(());
            }
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !borrowed.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut ancillary, flags) {
                Ok(_) => {
                    self.handed |= !descriptors.is_empty();
                    self.waiting.pop_front();
                }
                Err(Errno::WOULDBLOCK) => return Ok(()),
                Err(Errno::TOOMANYREFS) => {
                    self.is_crowded = true;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Broken::Ended),
                Err(error) => return Err(Broken::System(error)),
            }
        }
        Ok(())
    }

    /// Whether something waits until the program can take it.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lm_dataplane::ipc::Reply;

    /// A connection whose other end reads nothing, and how many packets wait when it is given up.
    fn left(beside: bool) -> usize {
        let flags = SocketFlags::CLOEXEC;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (near, far) = pair.expect("two sockets");
        let mut connection = Connection::new(near);
        let broken = (0..100_000).find_map(|number| {
            let descriptors = beside.then(|| far.try_clone().expect("a descriptor"));
            let said = Said::Reply(number, Reply::Done);
            connection.say(&said, descriptors.into_iter().collect()).err()
        });
        assert_eq!(broken, Some(Broken::Deaf));
        connection.waiting.len()
    }

    #[test]
    fn answers_that_are_not_read_are_bounded() {
        assert_eq!(left(false), WAITING_MAX + 1);
        assert_eq!(left(true), WAITING_BESIDE_MAX + 1);
    }
}
