//! The smoother that programs of this host share on an interface.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use lm_ebpf::CreditPage;
use lm_protocol::smoother::Credits;

use super::ipc::{Call, Reply};
use super::{Client, DaemonError};

/// A smoother of the admission daemon. The kernel's traffic on the interface follows it while a program has one of these.
///
/// Its credits go on when the daemon is gone, at the last rate; the next daemon has them from the last one.
#[derive(Debug)]
pub struct SharedSmoother {
    credits: CreditPage,
    socket: OwnedFd,
}

impl SharedSmoother {
    /// Asks the daemon that listens at `path` for the smoother of an interface; waits for its answer, two seconds at most.
    ///
    /// # Errors
    /// [`DaemonError`]; [`DaemonError::Refused`] where the daemon has none for this interface, or for this user.
    pub fn ask(path: &Path, interface: &str) -> Result<SharedSmoother, DaemonError> {
        let mut client = Client::connect(path)?;
        let call = Call::Smooth {
            interface: interface.to_owned(),
        };
        let (Reply::Smoother, beside) = client.call(call, &[])? else {
            return Err(DaemonError::Nonsense("no smoother"));
        };
        let map = (beside.first()).ok_or(DaemonError::Nonsense("a smoother without credits"))?;
        let credits =
            CreditPage::of_map(map.as_fd()).map_err(|_| DaemonError::Nonsense("credits that are none"))?;
        let socket = client.into_socket().ok_or(DaemonError::Gone)?;
        Ok(SharedSmoother { credits, socket })
    }
}

impl AsRef<Credits> for SharedSmoother {
    fn as_ref(&self) -> &Credits {
        self.credits.as_ref()
    }
}

impl AsFd for SharedSmoother {
    /// Readable when the daemon is gone: it says nothing more.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
