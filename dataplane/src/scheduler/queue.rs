//! One transmit queue: how much is in flight, what is on the ring and not yet handed to the driver, and completions, reaped late and in
//! bulk.

use lm_protocol::depth::DeviceDepth;
use lm_protocol::time::Time;

use super::{CLASSES, Class};
use crate::bounds::{InFlight, TRANSMIT_BURST};
use crate::checksum::Checksum;
use crate::memory::Umem;
use crate::port::{TxQueue, WakeError};
use crate::ring::Descriptor;

/// Descriptors of a shared queue that each class leaves to those before it.
const KEPT: u32 = 16;

/// Descriptors of bulk that a device has at least, where it has no more than it needs and real time leaves on the same queue; elsewhere as many as
/// one wake-up hands over.
const DEPTH_LEAST_BESIDE_FLOWS: u32 = 2;

/// Whose fragments come first in the next round: a session whose turn is not over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// The peer's index.
    pub(crate) peer: u16,
    /// Packets left of its quantum.
    pub(crate) left: u32,
}

/// One queue's transmit side.
#[derive(Debug)]
pub(crate) struct Transmit<T> {
    /// Device queue.
    pub(crate) queue: u32,
    pub(crate) tx: T,
    /// Descriptors that may be in flight behind one of each class.
    limits: [u32; CLASSES],
    /// Those of bulk that keep the device busy, where there are to be no more.
    depth: Option<DeviceDepth>,
    /// Completions are taken from so many descriptors in flight on.
    reap_from: u32,
    /// Descriptors handed over (or about to be) and not completed: one for each packet but long ones.
    in_flight: u32,
    /// Written to the ring, not yet visible to the kernel.
    written: u32,
    /// Visible to the kernel, not yet known to be taken.
    unsent: bool,
    pub(crate) turn: Option<Turn>,
    /// What is done about UDP's checksum of packets that leave here, and what their descriptors say of it.
    pub(crate) checksum: Checksum,
    options: u32,
    pub(crate) packets: u64,
    pub(crate) wakeups: u64,
    /// Completions that no packet was waiting for.
    pub(super) unknown: u32,
}

impl<T: TxQueue> Transmit<T> {
    pub(crate) fn new(queue: u32, tx: T, in_flight: InFlight, checksum: Checksum) -> Transmit<T> {
        let most = in_flight.most.clamp(1, tx.descriptors_max());
        Transmit {
            queue,
            tx,
            limits: [most; CLASSES],
            depth: in_flight.adapts.then(|| DeviceDepth::new(TRANSMIT_BURST, most)),
            reap_from: most / 2,
            in_flight: 0,
            written: 0,
            unsent: false,
            turn: None,
            checksum,
            options: checksum.descriptor_options(),
            packets: 0,
            wakeups: 0,
            unknown: 0,
        }
    }

    /// Nothing but messages leaves here. Beside flows on another queue they have so many descriptors at most, where that is said.
    pub(super) fn unshare(&mut self, messages: Option<u32>) {
        self.limit(0, 0, messages);
    }

    /// Descriptors that flows may have.
    pub(super) fn reservable(&self) -> u32 {
        self.limits[0] / 4
    }

    /// Small packets and flows leave here, too: whatever fills the queue, classes before it find a descriptor, and flows so many. Beside flows
    /// messages have no more than `messages` on the queue, or, where that is not said, bulk no more than a burst: flows wait for no more.
    pub(super) fn reserve(&mut self, descriptors: u32, messages: Option<u32>) {
        self.limit(KEPT.min(self.limits[0] / 8), descriptors, messages);
    }

    fn limit(&mut self, kept: u32, descriptors: u32, messages: Option<u32>) {
        let most = self.limits[0];
        let small = (most - kept - descriptors).min(messages.unwrap_or(most));
        let bulk = match (descriptors, messages) {
            (0, _) => small - kept,
            (_, None) => (small - kept).min(TRANSMIT_BURST),
            (_, Some(_)) => small - KEPT.min(small / 8).max(1),
        };
        let limits = [most, most - kept, small, bulk];
        if std::mem::replace(&mut self.limits, limits) == limits {
            return;
        }
        let least = match descriptors {
            0 => TRANSMIT_BURST,
            _ => DEPTH_LEAST_BESIDE_FLOWS,
        };
        self.bound_depth(least, bulk);
        // Flows wait for their completions, and messages that have few descriptors do.
        self.reap_from = match descriptors > 0 || messages.is_some() {
            true => 1,
            false => bulk / 2,
        };
    }

    fn bound_depth(&mut self, least: u32, most: u32) {
        if let Some(depth) = &mut self.depth {
            *depth = DeviceDepth::new(least, most);
        }
    }

    /// Descriptors that can be written now for packets of a class.
    #[inline]
    pub(crate) fn room(&mut self, class: Class) -> u32 {
        let limit = self.limits[class as usize];
        if self.in_flight >= limit {
            0
        } else {
            let allowed = match (class, &self.depth) {
                (Class::Bulk, Some(depth)) => depth_left(depth, limit, self.in_flight),
                _ => limit - self.in_flight,
            };
            self.tx
                .room(self.written + 1)
                .saturating_sub(self.written)
                .min(allowed)
        }
    }

    /// There was no room for packets of bulk.
    #[inline]
    pub(crate) fn waited(&mut self) {
        if let Some(depth) = &mut self.depth {
            depth.waited();
        }
    }

    /// Whether a descriptor can be written now for a packet of a class.
    #[inline]
    pub(super) fn has_room(&mut self, class: Class) -> bool {
        self.in_flight < self.limits[class as usize] && self.tx.room(self.written + 1) > self.written
    }

    /// Completes a packet in a frame of its own and writes it. The caller has asked for [`room`](Transmit::room).
    #[inline]
    pub(crate) fn push_frame(&mut self, umem: &Umem, address: u64, len: u32) {
        if self.checksum != Checksum::None {
            self.checksum.complete_frame(umem, address, len);
        }
        self.push(address, len);
    }

    /// Writes one packet in one piece, whose headers are complete or will be before it is handed over. The caller has asked for
    /// [`room`](Transmit::room).
    #[inline]
    pub(crate) fn push(&mut self, address: u64, len: u32) {
        debug_assert!(address & 1 == 0, "TX addresses are even");
        let descriptor = Descriptor::new(address, len).with_options(self.options);
        self.tx.write(self.written, descriptor);
        self.has_put(1);
    }

    /// Writes the packet `offset` places behind the last one that was [counted](Transmit::has_put).
    #[inline]
    pub(crate) fn put(&mut self, offset: u32, address: u64, len: u32) {
        // Completion addresses lose bit 0 on Linux 6.18 (pointer tagging in net/xdp/xsk.c).
        debug_assert!(address & 1 == 0, "TX addresses are even");
        self.tx
            .write(self.written + offset, Descriptor::new(address, len));
    }

    /// Completes so many packets that were [put](Transmit::put) and not yet counted: the first is at `first`, and each is `stride` bytes before
    /// the one that it comes behind.
    #[cold]
    #[inline(never)]
    pub(crate) fn sum_up(&mut self, umem: &Umem, first: u64, packets: u32, stride: u64, len: u32) {
        self.checksum.complete_run(umem, (first, packets), stride, len);
        for offset in 0..packets {
            let address = first - u64::from(offset) * stride;
            let descriptor = Descriptor::new(address, len).with_options(self.options);
            self.tx.write(self.written + offset, descriptor);
        }
    }

    /// Counts so many packets that were [put](Transmit::put).
    #[inline]
    pub(crate) fn has_put(&mut self, packets: u32) {
        self.written += packets;
        self.in_flight += packets;
        self.packets += u64::from(packets);
    }

    /// Writes one packet as pieces of `piece_len` bytes, an even number, the last of which may be shorter; how many they are. `None`:
    /// there is no room for all of them.
    #[cold]
    pub(crate) fn push_pieces(&mut self, address: u64, len: u32, piece_len: u32) -> Option<u32> {
        debug_assert!(address & 1 == 0 && piece_len & 1 == 0, "TX addresses are even");
        let pieces = len.div_ceil(piece_len);
        if self.room(Class::Bulk) < pieces {
            return None;
        }
        for piece in 0..pieces {
            let skipped = piece * piece_len;
            let start = address + u64::from(skipped);
            // What the first one says of metadata is of the whole packet.
            let options = if piece == 0 { self.options } else { 0 };
            let descriptor = match piece + 1 < pieces {
                true => Descriptor::new(start, piece_len).continued(),
                false => Descriptor::new(start, len - skipped),
            }
            .with_options(options);
            self.tx.write(self.written + piece, descriptor);
        }
        self.written += pieces;
        self.in_flight += pieces;
        self.packets += 1;
        Some(pieces)
    }

    /// Whether enough is written for a wake-up of its own.
    #[inline]
    pub(crate) fn has_burst(&self) -> bool {
        self.written >= TRANSMIT_BURST
    }

    /// Shows what was written to the kernel and wakes it where it asks for that.
    ///
    /// # Errors
    /// What the wake-up reports (the interface is gone, for example). Packets stay on the ring.
    #[inline]
    pub(crate) fn flush(&mut self) -> Result<(), WakeError> {
        if self.written > 0 {
            self.tx.submit(self.written);
            self.written = 0;
            self.unsent = true;
        }
        if self.unsent {
            let flushed = self.tx.flush()?;
            self.wakeups += u64::from(flushed.woken);
            // What is left is for the next round.
            self.unsent = flushed.unsent;
        }
        Ok(())
    }

    /// Takes completions, when there is reason to: little room is left, or `all` asks for it. Calls `done`
    /// with the UMEM address of each packet, or piece of one, that the kernel will not read any more; `false`: no packet was there.
    #[inline]
    pub(crate) fn reap(&mut self, all: bool, now_ns: u64, mut done: impl FnMut(u64) -> bool) -> u32 {
        let from = match &self.depth {
            // A burst may wait for the last of them.
            Some(depth) if depth.is_awaited() => 1,
            Some(depth) => self.reap_from.min(depth.allowed() / 2),
            None => self.reap_from,
        };
        if self.in_flight == 0 || (!all && self.in_flight < from) {
            return 0;
        }
        let ready = self.tx.completed(self.in_flight);
        for offset in 0..ready {
            if !done(self.tx.completion(offset)) {
                self.is_unknown();
            }
        }
        if ready > 0 {
            self.tx.release(ready);
            self.in_flight -= ready;
            if let Some(depth) = &mut self.depth {
                depth.completed(ready, self.in_flight, Time::from_nanos(now_ns));
            }
        }
        ready
    }

    /// One of the completions is none.
    #[cold]
    fn is_unknown(&mut self) {
        self.in_flight += 1;
        self.unknown += 1;
    }

    /// The queue was built anew: nothing is on it.
    pub(crate) fn begin_anew(&mut self) {
        (self.in_flight, self.written, self.unsent) = (0, 0, false);
    }

    /// Whether packets are on the ring that the kernel has not taken.
    pub(crate) fn has_unsent(&self) -> bool {
        self.written > 0 || self.unsent
    }

    /// Descriptors not completed.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

/// Descriptors of bulk that may be added: none while they would not make a burst, so that one wake-up hands that much over.
#[cold]
fn depth_left(depth: &DeviceDepth, limit: u32, in_flight: u32) -> u32 {
    let most = limit.min(depth.allowed());
    let left = most.saturating_sub(in_flight);
    match left < TRANSMIT_BURST.min(limit / 2).min(most) {
        true => 0,
        false => left,
    }
}
