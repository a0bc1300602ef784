//! Asks a running daemon for its status.

use std::io::{IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use lm_dataplane::ipc::{Asked, Call, MESSAGE_LEN_MAX, Reply, Said, VERSION};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::daemon::status::Status;

/// How long the daemon may take.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn status(path: &Path) -> Result<Status, String> {
    let name = path.display();
    let told = |error: Errno| match error {
        Errno::NOENT | Errno::CONNREFUSED => {
            format!("no daemon listens on {name}: start it, or name its --socket")
        }
        Errno::WOULDBLOCK => format!("the daemon at {name} does not answer"),
        error => format!("cannot ask the daemon at {name}: {error}"),
    };
    let socket = connect(path).map_err(told)?;
    ask(&socket, 1, Call::Hello { version: VERSION }).map_err(told)?;
    let (reply, _) = receive(&socket).map_err(told)?;
    refused(reply)?;
    ask(&socket, 2, Call::Status).map_err(told)?;
    let (reply, beside) = receive(&socket).map_err(told)?;
    refused(reply)?;
    let Some(file) = beside.into_iter().next() else {
        return Err(format!("the daemon at {name} says nothing"));
    };
    let mut json = Vec::new();
    let read = std::fs::File::from(file).read_to_end(&mut json);
    read.map_err(|error| format!("cannot read the status: {error}"))?;
    serde_json::from_slice(&json).map_err(|error| format!("the status is none: {error}"))
}

fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn ask(socket: &OwnedFd, number: u32, call: Call) -> Result<(), Errno> {
    let bytes = postcard::to_stdvec(&Asked { number, call }).map_err(|_| Errno::INVAL)?;
    rustix::net::send(socket, &bytes, SendFlags::NOSIGNAL).map(drop)
}

fn receive(socket: &OwnedFd) -> Result<(Said, Vec<OwnedFd>), Errno> {
    let mut bytes = vec![0; MESSAGE_LEN_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(socket, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let beside = rights.flatten().collect();
    let said = postcard::from_bytes(&bytes[..received.bytes]).map_err(|_| Errno::PROTO)?;
    Ok((said, beside))
}

fn refused(said: Said) -> Result<(), String> {
    match said {
        Said::Reply(_, Reply::Refused(what)) => Err(what),
        _ => Ok(()),
    }
}
