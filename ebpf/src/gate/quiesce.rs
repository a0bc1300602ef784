//! Waiting until no CPU is inside the gate (I4), also on a thread that has no [`Gate`]; and logs for new clients.
//!
//! A queue's log is mapped by its client, and stays mapped for as long as that likes. So a queue that goes from one
//! program to another gets a new log: the old one's owner could otherwise let packets land that the new one has posted
//! nothing for (I6).

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use super::{ChannelLog, Gate, GateError, channel_offset, check};
use crate::layout::{ChannelRow, QUEUES, SESSIONS};
use crate::role::Role;
use crate::sys;

/// How far the queues are on their way from one use to the next, a bit for each.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Left by their program: they need a new log.
    pub(super) vacated: u64,
    /// [`Quiesce`] was made, and not given back.
    waiting: u64,
}

/// A wait that has not begun: from [`Gate::start_quiesce`], and back as a [`Quiet`] to [`Gate::finish_quiesce`].
#[derive(Debug)]
#[must_use = "the queue stays as it is until `Gate::finish_quiesce`"]
pub struct Quiesce {
    queue: u32,
    rows: u64,
    logs: OwnedFd,
    log: OwnedFd,
    new: Option<ChannelLog>,
}

/// A wait that is over.
#[derive(Debug)]
#[must_use = "the queue stays as it is until `Gate::finish_quiesce`"]
pub struct Quiet {
    queue: u32,
    rows: u64,
    new: Option<ChannelLog>,
}

impl Quiesce {
    /// Its queue.
    pub fn queue(&self) -> u32 {
        self.queue
    }

    /// Waits, for tens of milliseconds, until no CPU is inside the gate that was there before.
    ///
    /// It waits for an RCU grace period: XDP programs run inside a read-side section of it, redirect included. The
    /// kernel waits for one whenever a map in a map is replaced (kernel/bpf/syscall.c, `maybe_wait_bpf_programs`);
    /// membarrier would do the same but is missing where a CPU runs without a tick.
    ///
    /// # Errors
    /// What bpf(2) says; none are expected.
    pub fn wait(self) -> io::Result<Quiet> {
        sys::update_map(self.logs.as_fd(), self.queue, self.log.as_raw_fd() as u32)?;
        Ok(Quiet {
            queue: self.queue,
            rows: self.rows,
            new: self.new,
        })
    }
}

impl Gate {
    /// Begins what [`Gate::quiesce`] does, so that another thread can wait: for the rows of `queue` that are closed by
    /// now, and where its program left the queue ([`Gate::vacate`]) or it never had a log, for a new one. One at a time
    /// for a queue.
    ///
    /// # Errors
    /// [`GateError::Quiescing`] where the last one was not finished; a descriptor or map that cannot be had.
    pub fn start_quiesce(&mut self, queue: u32) -> Result<Quiesce, GateError> {
        check(queue)?;
        if self.progress.waiting & 1 << queue != 0 {
            return Err(GateError::Quiescing(queue));
        }
        let new = match self.needs_log(queue) {
            true => Some(ChannelLog::create()?),
            false => None,
        };
        let log = new.as_ref().or(self.channel_logs[queue as usize].as_ref());
        let log = log.ok_or(GateError::NoRole(queue))?.fd().try_clone_to_owned()?;
        let quiesce = Quiesce {
            queue,
            rows: self.closing[queue as usize],
            logs: self.logs_fd.try_clone()?,
            log,
            new,
        };
        if quiesce.new.is_some() {
            // From here to the end a pin would name a log that the gate may not have any more.
            self.unpin_log(queue);
        }
        self.progress.waiting |= 1 << queue;
        Ok(quiesce)
    }

    /// The rows may be used again, and the queue has its new log, if it was to have one.
    ///
    /// # Errors
    /// The new log cannot be pinned; everything else is done then.
    pub fn finish_quiesce(&mut self, quiet: Quiet) -> Result<(), GateError> {
        let queue = quiet.queue;
        self.progress.waiting &= !(1 << queue);
        self.closing[queue as usize] &= !quiet.rows;
        if let Some(log) = quiet.new {
            // Positions of a log begin at 0. Relaxed: the queue has no role, and no CPU is inside the gate with an old
            // one.
            let accepted = channel_offset(queue) + offset_of!(ChannelRow, accepted);
            self.channels.store_u64(accepted, 0, Ordering::Relaxed);
            let old = self.channel_logs[queue as usize].replace(log);
            if let Some(old) = old.and_then(|old| old.mapping) {
                self.retired = self.retired.plus(&old.counters());
            }
            self.progress.vacated &= !(1 << queue);
            self.pin_log(queue)?;
        }
        Ok(())
    }

    /// Waits until no CPU is inside the gate with a session that was closed before (I4): afterwards the log does not
    /// grow by it, and what is in it has its RX descriptor or was dropped and counted by the kernel. Takes tens of
    /// milliseconds.
    pub fn quiesce(&mut self, queue: u32) -> Result<(), GateError> {
        check(queue)?;
        // Without a log it never had a role, so no session could be open.
        if self.needs_log(queue) {
            return Ok(());
        }
        self.renew(queue)
    }

    /// Takes a queue from its program: closes its sessions, takes role, port and XSK away. It has no log until it is
    /// quiet ([`Gate::start_quiesce`]); who maps the old one reaches nothing with it then. Does not wait.
    ///
    /// # Errors
    /// [`GateError::NoQueue`], or a map that cannot be changed.
    pub fn vacate(&mut self, queue: u32) -> Result<(), GateError> {
        check(queue)?;
        (0..SESSIONS).try_for_each(|row| self.close_session(queue, row))?;
        self.store_role(queue, Role::None);
        self.progress.vacated |= 1 << queue;
        self.set_data_port(queue, 0)?;
        self.unregister_xsk(queue)
    }

    /// Whether a queue without a role can have one at once: [`Gate::set_role`] waits for tens of milliseconds
    /// otherwise.
    pub fn is_ready(&self, queue: u32) -> bool {
        queue < QUEUES && !self.needs_log(queue)
    }

    pub(super) fn needs_log(&self, queue: u32) -> bool {
        self.channel_logs[queue as usize].is_none() || self.progress.vacated & 1 << queue != 0
    }

    /// All of it, on this thread.
    pub(super) fn renew(&mut self, queue: u32) -> Result<(), GateError> {
        let quiesce = self.start_quiesce(queue)?;
        match quiesce.wait() {
            Ok(quiet) => self.finish_quiesce(quiet),
            Err(error) => {
                self.progress.waiting &= !(1 << queue);
                Err(error.into())
            }
        }
    }
}
