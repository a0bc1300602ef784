//! Why a call fails: an errno, and a line in words.

use std::borrow::Cow;
use std::error::Error;
use std::io;

use lm_cards::InterfaceError;
use lm_dataplane::port::PortError;
use lm_dataplane::xsk::XskError;
use lm_dataplane::{ConnectError, DaemonError, FlowError, OpenError, SendError, UdpError};
use lm_ebpf::AttachError;

/// What errno becomes, and why. Words that are known before cost no memory: whoever polls hears them often.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    pub(crate) why: Cow<'static, str>,
}

/// A failure in words of ours.
pub(crate) const fn failure(errno: i32, why: &'static str) -> Failure {
    Failure {
        errno,
        why: Cow::Borrowed(why),
    }
}

/// A failure in words of an error's own.
fn of(errno: i32, error: &dyn Error) -> Failure {
    Failure {
        errno,
        why: Cow::Owned(error.to_string()),
    }
}

/// The errno of a system call somewhere below an error.
fn below(error: &(dyn Error + 'static)) -> i32 {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    let found = causes.find_map(|error| error.downcast_ref::<io::Error>());
    match found.map(|error| (error.raw_os_error(), error.kind())) {
        Some((Some(errno), _)) => errno,
        Some((None, io::ErrorKind::OutOfMemory)) => libc::ENOMEM,
        _ => libc::EIO,
    }
}

fn of_interface(error: &InterfaceError) -> i32 {
    match error {
        InterfaceError::Unknown { .. } => libc::ENODEV,
        InterfaceError::Down { .. } => libc::ENETDOWN,
        InterfaceError::NoAddress { .. } => libc::EADDRNOTAVAIL,
        InterfaceError::System { .. } => below(error),
        _ => libc::EINVAL,
    }
}

fn of_daemon(error: &DaemonError) -> i32 {
    match error {
        DaemonError::Refused(_) => libc::EACCES,
        DaemonError::Socket { .. } => below(error),
        _ => libc::ECONNREFUSED,
    }
}

fn of_port(error: &PortError) -> i32 {
    let other = match error {
        PortError::Busy(_) => return libc::EBUSY,
        PortError::Denied(_) => return libc::EACCES,
        PortError::Other(other) => other.as_ref(),
        _ => return libc::EINVAL,
    };
    match other.downcast_ref::<XskError>() {
        Some(XskError::Privilege) => return libc::EPERM,
        Some(XskError::LockedMemory { .. } | XskError::Memory { .. }) => return libc::ENOMEM,
        Some(XskError::NoDevice { .. }) => return libc::ENODEV,
        Some(XskError::Down) => return libc::ENETDOWN,
        Some(XskError::Unsupported) => return libc::EOPNOTSUPP,
        _ => {}
    }
    match other.downcast_ref::<UdpError>() {
        Some(UdpError::InUse(_)) => return libc::EADDRINUSE,
        Some(UdpError::NotLocal(_)) => return libc::EADDRNOTAVAIL,
        Some(UdpError::Privilege(_)) => return libc::EACCES,
        _ => {}
    }
    match other.downcast_ref::<AttachError>() {
        Some(AttachError::NotPrivileged { .. }) => libc::EPERM,
        Some(AttachError::Occupied { .. }) => libc::EBUSY,
        _ => below(other),
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        let errno = match &error {
            OpenError::Interface(error) => of_interface(error),
            OpenError::Port(error) => of_port(error),
            OpenError::Memory { source, .. } | OpenError::System(source) => below(source),
            OpenError::Daemon(error) => of_daemon(error),
            OpenError::NoZeroCopy(_) => libc::EOPNOTSUPP,
            _ => libc::EINVAL,
        };
        of(errno, &error)
    }
}

impl From<lm_realtime::OpenError> for Failure {
    fn from(error: lm_realtime::OpenError) -> Failure {
        use lm_realtime::OpenError::{Blocks, Flow, Handler, Rate, ReceiveFrames, Taken};
        let errno = match &error {
            Taken(_) => libc::EADDRINUSE,
            Blocks(source) => below(source),
            Handler(_) | Rate(_) => libc::EBUSY,
            Flow(FlowError::NoMemory) => libc::ENOMEM,
            Flow(FlowError::NoDescriptors { .. }) | ReceiveFrames(_) => libc::ENOBUFS,
            _ => libc::EINVAL,
        };
        of(errno, &error)
    }
}

impl From<lm_realtime::SendError> for Failure {
    fn from(error: lm_realtime::SendError) -> Failure {
        use lm_realtime::SendError::{NotConnected, Past, TooLong};
        let errno = match error {
            NotConnected => libc::EDESTADDRREQ,
            TooLong(_) => libc::EMSGSIZE,
            Past => libc::ETIME,
            _ => libc::EINVAL,
        };
        of(errno, &error)
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Failure {
        let errno = match &error {
            ConnectError::Daemon(error) => of_daemon(error),
            _ => libc::EHOSTUNREACH,
        };
        of(errno, &error)
    }
}

impl From<SendError> for Failure {
    fn from(error: SendError) -> Failure {
        let errno = match error {
            SendError::Link => libc::ENETDOWN,
            _ => libc::EHOSTUNREACH,
        };
        of(errno, &error)
    }
}
