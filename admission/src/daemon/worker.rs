//! What takes longer than the loop may take: waiting for the gate to be quiet, and registering a program's memory. Both are done on
//! other threads, and the loop is woken with what came of it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use lm_ebpf::{Quiesce, Quiet};
use mio::Waker;

use super::program::ProgramId;

/// Which interface, and which of the times that it was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stay {
    /// Position in the configuration.
    pub(crate) interface: usize,
    /// Counts the times.
    pub(crate) number: u32,
}

/// What was done.
pub(crate) enum Done {
    /// A queue is quiet.
    Quiet {
        stay: Stay,
        queue: u32,
        quiet: io::Result<Quiet>,
    },
    /// An XSK is bound, or why not.
    Bound {
        program: ProgramId,
        queue: u16,
        xsk: Result<Bound, String>,
    },
}

/// A bound XSK.
pub(crate) struct Bound {
    pub(crate) fd: OwnedFd,
    pub(crate) zero_copy: bool,
}

/// The threads' end of the loop.
pub(crate) struct Workers {
    waits: Sender<(Stay, Quiesce)>,
    done: Receiver<Done>,
    tell: Sender<Done>,
    waker: Arc<Waker>,
}

impl Workers {
    pub(crate) fn start(waker: Arc<Waker>) -> io::Result<Workers> {
        let (waits, to_wait) = channel::<(Stay, Quiesce)>();
        let (tell, done) = channel();
        let (telling, waking) = (tell.clone(), Arc::clone(&waker));
        // Ends when the loop's end of the channel goes.
        thread::Builder::new().name("quiet".to_owned()).spawn(move || {
            while let Ok((stay, quiesce)) = to_wait.recv() {
                let queue = quiesce.queue();
                let quiet = quiesce.wait();
                // Nobody listens any more when the daemon ends.
                let _ = telling.send(Done::Quiet { stay, queue, quiet });
                let _ = waking.wake();
            }
        })?;
        Ok(Workers {
            waits,
            done,
            tell,
            waker,
        })
    }

    pub(crate) fn wait(&self, stay: Stay, quiesce: Quiesce) {
        // The thread ends after this.
        let _ = self.waits.send((stay, quiesce));
    }

    /// Binds on a thread of its own: each program has one call under way at most.
    pub(crate) fn bind(
        &self,
        program: ProgramId,
        queue: u16,
        bind: impl FnOnce() -> Result<Bound, String> + Send + 'static,
    ) -> io::Result<()> {
        let (tell, waker) = (self.tell.clone(), Arc::clone(&self.waker));
        thread::Builder::new().name("bind".to_owned()).spawn(move || {
            let xsk = bind();
            let _ = tell.send(Done::Bound { program, queue, xsk });
            let _ = waker.wake();
        })?;
        Ok(())
    }

    pub(crate) fn next(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}
