//! The four rings of [`crate::ring`] and the gate's log as a queue of a port, with the kernel's end behind a [`Bell`]: an AF_XDP
//! socket's, or the simulated card's.

use std::fmt::Debug;

use lm_ebpf::Log;
use lm_protocol::landing::LogEntry;

use crate::port::{Flushed, QueueDrops, RxQueue, TxQueue, Untaken, WakeError};
use crate::ring::{CompletionRing, Descriptor, FillRing, RxRing, TxRing, in_memory};

/// The kernel's end of rings.
pub trait Bell: Debug + Send {
    /// There is something to send. Copy mode sends some 32 packets a call.
    ///
    /// # Errors
    ///
    /// See [`WakeError`].
    fn wake_tx(&self) -> Result<(), WakeError>;

    /// There are entries.
    ///
    /// # Errors
    ///
    /// See [`WakeError`].
    fn wake_rx(&self) -> Result<(), WakeError>;

    /// See [`RxQueue::drops`].
    fn drops(&self) -> QueueDrops;
}

/// A receive queue over rings.
#[derive(Debug)]
pub struct RingRx<B> {
    fill: FillRing,
    rx: RxRing,
    log: Log,
    bell: Option<B>,
}

impl<B: Bell> RingRx<B> {
    /// Of these rings; `log` tells what the gate put where.
    pub fn new(fill: FillRing, rx: RxRing, log: Log, bell: B) -> RingRx<B> {
        RingRx {
            fill,
            rx,
            log,
            bell: Some(bell),
        }
    }

    /// Gives up what it has of its socket: nothing comes. What was accepted is known still.
    pub fn close(&mut self) {
        (self.fill, _) = in_memory(1, 0);
        (_, self.rx) = in_memory(1, 0);
        self.bell = None;
    }

    /// The log, to tamper with.
    #[cfg(any(test, feature = "fuzzing"))]
    #[cfg_attr(not(test), allow(dead_code, reason = "tests tamper with it"))]
    pub fn log(&self) -> &Log {
        &self.log
    }
}

impl<B: Bell> RxQueue for RingRx<B> {
    #[inline]
    fn entries_max(&self) -> u32 {
        self.fill.ring_len()
    }

    #[inline]
    fn room(&mut self, wanted: u32) -> u32 {
        self.fill.free(wanted)
    }

    #[inline]
    #[track_caller]
    fn write(&mut self, offset: u32, address: u64) {
        self.fill.write(offset, address);
    }

    #[inline]
    #[track_caller]
    fn submit(&mut self, count: u32) {
        self.fill.submit(count);
    }

    #[inline]
    fn allow(&mut self, until: u64) {
        self.log.set_posted(until);
    }

    #[inline]
    fn set_slot(&mut self, position: u64, frames: u8, longest: u16) {
        self.log.set_slot(position, frames, longest);
    }

    #[inline]
    fn set_message_limit(&mut self, row: u32, message: u32) {
        self.log.set_message_limit(row, message);
    }

    #[inline]
    fn untaken(&mut self) -> Untaken {
        Untaken {
            count: self.fill.produced().wrapping_sub(self.fill.consumed()),
            needs_wakeup: self.fill.needs_wakeup(),
        }
    }

    #[inline]
    fn wake(&mut self) -> Result<(), WakeError> {
        self.bell.as_ref().ok_or(WakeError::Gone)?.wake_rx()
    }

    #[inline]
    fn available(&mut self, max: u32) -> u32 {
        self.rx.available(max)
    }

    #[inline]
    #[track_caller]
    fn packet(&self, offset: u32) -> Descriptor {
        self.rx.read(offset)
    }

    #[inline]
    #[track_caller]
    fn release(&mut self, count: u32) {
        self.rx.release(count);
    }

    #[inline]
    fn accepted(&self) -> u64 {
        self.log.producer()
    }

    #[inline]
    fn entry(&self, position: u64) -> LogEntry {
        self.log.entry(position)
    }

    #[inline]
    fn descending(&self, position: u64, first: &LogEntry, most: u32) -> u32 {
        self.log.descending(position, first, most)
    }

    fn drops(&self) -> QueueDrops {
        self.bell.as_ref().map(Bell::drops).unwrap_or_default()
    }
}

/// A transmit queue over rings.
#[derive(Debug)]
pub struct RingTx<B> {
    tx: TxRing,
    completion: CompletionRing,
    bell: Option<B>,
}

impl<B: Bell> RingTx<B> {
    /// Of these rings.
    pub fn new(tx: TxRing, completion: CompletionRing, bell: B) -> RingTx<B> {
        RingTx {
            tx,
            completion,
            bell: Some(bell),
        }
    }

    /// Gives up what it has of its socket: there is no room.
    pub fn close(&mut self) {
        (self.tx, _) = in_memory(1, 0);
        (_, self.completion) = in_memory(1, 0);
        self.bell = None;
    }
}

impl<B: Bell> TxQueue for RingTx<B> {
    fn descriptors_max(&self) -> u32 {
        self.tx.ring_len().min(self.completion.ring_len())
    }

    #[inline]
    fn room(&mut self, wanted: u32) -> u32 {
        match self.bell {
            Some(_) => self.tx.free(wanted),
            None => 0,
        }
    }

    #[inline]
    #[track_caller]
    fn write(&mut self, offset: u32, descriptor: Descriptor) {
        self.tx.write(offset, descriptor);
    }

    #[inline]
    #[track_caller]
    fn submit(&mut self, count: u32) {
        self.tx.submit(count);
    }

    #[inline]
    fn flush(&mut self) -> Result<Flushed, WakeError> {
        let woken = self.tx.needs_wakeup();
        if woken {
            self.bell.as_ref().ok_or(WakeError::Gone)?.wake_tx()?;
        }
        // Copy mode takes at most 32 packets per wake-up.
        let unsent = self.tx.consumed() != self.tx.produced();
        Ok(Flushed { woken, unsent })
    }

    #[inline]
    fn completed(&mut self, max: u32) -> u32 {
        self.completion.available(max)
    }

    #[inline]
    #[track_caller]
    fn completion(&self, offset: u32) -> u64 {
        self.completion.read(offset)
    }

    #[inline]
    #[track_caller]
    fn release(&mut self, count: u32) {
        self.completion.release(count);
    }
}
