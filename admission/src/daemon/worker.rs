//! What takes longer than the loop may take: waiting for the gate to be quiet, registering a program's memory, and writing to a disk.
//! All of it is done on other threads, and the loop is woken with what came of it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use lm_ebpf::{Quiesce, Quiet};
use mio::Waker;

use super::program::ProgramId;
use super::state::State;

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
    /// Whether the socket is still there that was bound on a queue.
    Looked { stay: Stay, queue: u16, is_there: bool },
    /// The state file is that which was given last.
    Written,
    /// An XSK is bound, or why not.
    Bound {
        stay: Stay,
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
    writes: Sender<Vec<u8>>,
    writer: JoinHandle<()>,
    done: Receiver<Done>,
    tell: Sender<Done>,
    waker: Arc<Waker>,
}

impl Workers {
    /// `state_dir`: where the state file is.
    pub(crate) fn start(waker: Arc<Waker>, state_dir: PathBuf) -> io::Result<Workers> {
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
        let (writes, to_write) = channel::<Vec<u8>>();
        let (telling, waking) = (tell.clone(), Arc::clone(&waker));
        let writing = thread::Builder::new().name("state".to_owned());
        let writer = writing.spawn(move || {
            while let Ok(text) = to_write.recv() {
                State::write(&text, &state_dir);
                let _ = telling.send(Done::Written);
                let _ = waking.wake();
            }
        })?;
        Ok(Workers {
            waits,
            writes,
            writer,
            done,
            tell,
            waker,
        })
    }

    pub(crate) fn wait(&self, stay: Stay, quiesce: Quiesce) {
        // The thread ends after this.
        let _ = self.waits.send((stay, quiesce));
    }

    /// Replaces the state file; [`Done::Written`] comes when that is done. One at a time.
    pub(crate) fn write(&self, state: Vec<u8>) {
        // The thread ends after this.
        let _ = self.writes.send(state);
    }

    /// Waits until everything is written.
    pub(crate) fn finish_writing(self) {
        drop(self.writes);
        if self.writer.join().is_err() {
            tracing::error!("the thread that writes the state failed");
        }
    }

    /// Binds on a thread of its own: each program has one call under way at most.
    pub(crate) fn bind(
        &self,
        stay: Stay,
        program: ProgramId,
        queue: u16,
        bind: impl FnOnce() -> Result<Bound, String> + Send + 'static,
    ) -> io::Result<()> {
        let (tell, waker) = (self.tell.clone(), Arc::clone(&self.waker));
        thread::Builder::new().name("bind".to_owned()).spawn(move || {
            let xsk = bind();
            let _ = tell.send(Done::Bound {
                stay,
                program,
                queue,
                xsk,
            });
            let _ = waker.wake();
        })?;
        Ok(())
    }

    /// Finds out on a thread of its own whether a queue is busy.
    pub(crate) fn look_for_socket(
        &self,
        stay: Stay,
        queue: u16,
        is_busy: impl FnOnce() -> bool + Send + 'static,
    ) -> io::Result<()> {
        let (tell, waker) = (self.tell.clone(), Arc::clone(&self.waker));
        thread::Builder::new().name("look".to_owned()).spawn(move || {
            let is_there = is_busy();
            let _ = tell.send(Done::Looked {
                stay,
                queue,
                is_there,
            });
            let _ = waker.wake();
        })?;
        Ok(())
    }

    pub(crate) fn next(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}
