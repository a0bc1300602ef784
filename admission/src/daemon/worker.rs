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
#[derive(Debug)]
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
        let (tell, done) = channel();
        let (waits, _) = queue("quiet", &tell, &waker, |(stay, quiesce): (Stay, Quiesce)| {
            Done::Quiet {
                stay,
                queue: quiesce.queue(),
                quiet: quiesce.wait(),
            }
        })?;
        let (writes, writer) = queue("state", &tell, &waker, move |text: Vec<u8>| {
            State::write(&text, &state_dir);
            Done::Written
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

    /// Does something on a thread of its own: each program has one call under way at most, and each queue one look.
    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce() -> Done + Send + 'static) -> io::Result<()> {
        let (tell, waker) = (self.tell.clone(), Arc::clone(&self.waker));
        let thread = thread::Builder::new().name(name.to_owned());
        thread.spawn(move || report(&tell, &waker, work())).map(drop)
    }

    pub(crate) fn next(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}

/// A thread that does one thing after the other, until the loop's end of the channel goes.
fn queue<T: Send + 'static>(
    name: &str,
    tell: &Sender<Done>,
    waker: &Arc<Waker>,
    work: impl Fn(T) -> Done + Send + 'static,
) -> io::Result<(Sender<T>, JoinHandle<()>)> {
    let (tell, waker) = (tell.clone(), Arc::clone(waker));
    let (give, given) = channel();
    let thread = thread::Builder::new().name(name.to_owned());
    let thread = thread.spawn(move || given.iter().for_each(|one| report(&tell, &waker, work(one))))?;
    Ok((give, thread))
}

fn report(tell: &Sender<Done>, waker: &Waker, done: Done) {
    // The loop does not listen any more when the daemon ends.
    let _ = tell.send(done);
    let _ = waker.wake();
}
