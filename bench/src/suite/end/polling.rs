//! Busy polling by a kernel socket, as far as the kernel offers it: each read that would find nothing runs the NAPI instance of the queue that
//! the socket's packets come in on, and that instance's interrupts are deferred, as LM does with a queue on which a stream lands.

use std::io;
use std::os::fd::AsRawFd;

use super::sys;
use crate::kept::Kept;

/// Packets of one poll, as LM takes them.
const BUDGET: i32 = 128;
/// Any time enables it: a read that does not wait polls once.
const POLL_US: i32 = 20;

/// Whether a socket polls, and the instance that it has for itself once it knows it.
pub(super) struct Polling {
    wanted: bool,
    kept: Option<Kept>,
}

impl Polling {
    pub(super) fn new(wanted: bool) -> Polling {
        Polling { wanted, kept: None }
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// To be called when packets have come: they tell the socket its queue.
    #[inline]
    pub(super) fn begin(&mut self, socket: &impl AsRawFd) -> io::Result<()> {
        if self.wanted && self.kept.is_none() {
            self.keep(socket)?;
        }
        Ok(())
    }

    #[cold]
    fn keep(&mut self, socket: &impl AsRawFd) -> io::Result<()> {
        let id = sys::option(socket, libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID)?;
        if id <= 0 {
            return Err(io::Error::other(
                "the interface has no NAPI instance that a socket could poll; on veth switch generic receive offload on (ethtool -K IF gro on)",
            ));
        }
        sys::set_option(socket, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, 1)?;
        sys::set_option(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL, POLL_US)?;
        sys::set_option(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET, BUDGET)?;
        self.kept = Some(Kept::new(id as u32)?);
        Ok(())
    }
}
