//! The queues of a port (steps 4 to 6 of ARCHITECTURE.md).
//!
//! ```text
//!  device ─▶ driver's memory ─▶ gate's model ─┬─▶ copied to the next entry of its queue, and logged
//!                                             └─▶ stack
//! ```
//! An aimed device writes to the entries itself (shim.c): there each queue is one of the device's, and no packet of the landing queue is looked at.
//!
//! [`Core`] is what all parts of a port share. One thread uses them, so its lock is never waited for. The n-th packet that the gate accepts for a
//! queue takes the queue's n-th entry (I3), and is copied there before its descriptor shows.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lm_dataplane::memory::{Mapping, PACKET_HEADROOM};
use lm_dataplane::port::{Flushed, QueueDrops, QueueSpec, Role, RxQueue, TxQueue, WakeError};
use lm_dataplane::ring::Descriptor;
use lm_ebpf::model::ModelGate;
use lm_ebpf::{Log, Verdict};
use lm_protocol::landing::LogEntry;

use crate::shim::{ENTRIES, Link, NONE, Packet, QUEUES, ROOM};
use crate::stack::Stack;

/// Where a packet has its LM type: behind Ethernet, IP and UDP header.
const TYPE_AT: usize = 42;
/// The type of fragments.
const FRAGMENT: u8 = 1;

/// How long a device may take nothing before it is looked at whether something is at its other end.
const LOOK_AFTER_NS: u64 = 500_000_000;

/// Entries and packets of a queue, between the two sides.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) role: Option<Role>,
    /// The device writes to its entries itself, which the link has then.
    aims: bool,
    /// Posted and not used.
    entries: VecDeque<u64>,
    /// Copied to entries, and not shown yet.
    arrived: VecDeque<Descriptor>,
    drops: QueueDrops,
    /// Packets that were sent, where they lie.
    completed: VecDeque<u64>,
}

impl Queue {
    /// Begins anew, with room for all entries that the queue may have.
    pub(crate) fn open(&mut self, spec: &QueueSpec, aims: bool) {
        assert!(spec.rx_len <= ENTRIES);
        *self = Queue {
            role: Some(spec.role),
            aims,
            entries: VecDeque::with_capacity(spec.rx_len as usize),
            arrived: VecDeque::with_capacity(spec.rx_len as usize),
            completed: VecDeque::with_capacity(spec.tx_len as usize),
            ..Queue::default()
        };
    }

    /// Copies a packet that the gate accepted.
    fn land(&mut self, mapping: &Mapping, packet: &[u8]) {
        let len = packet.len();
        assert!(len <= ROOM, "a longer one would lie on the next frame");
        let Some(entry) = self.entries.pop_front() else {
            self.drops.no_entry += 1;
            self.drops.dropped += 1;
            return;
        };
        let to = mapping.pointer(entry + PACKET_HEADROOM, len as u64);
        // SAFETY: `len` bytes can be read there; `pointer` found the same number in the mapping, which is not the driver's memory; and they are of
        // an entry that was posted, where this port alone writes, and which is not read before the packet is shown.
        unsafe { std::ptr::copy_nonoverlapping(packet.as_ptr(), to.as_ptr(), len) };
        let descriptor = Descriptor::received(entry, PACKET_HEADROOM as u16, len as u32);
        self.arrived.push_back(descriptor);
    }
}

/// What the parts of a port share.
#[derive(Debug)]
pub(crate) struct Core {
    // Drop order: the device is closed before its memory goes.
    pub(crate) link: Link,
    pub(crate) gate: ModelGate,
    pub(crate) stack: Stack,
    pub(crate) queues: [Queue; QUEUES],
    /// The device reads what is sent, and writes what it receives, where LM has it.
    pub(crate) is_aimed: bool,
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) mtu: u16,
    /// Packets to be sent, of all queues, in the order in which they were submitted: where the device takes none for a while, none overtakes
    /// one that it speaks of.
    pub(crate) outgoing: VecDeque<Packet>,
    /// Since when the device has taken nothing, or was last looked at; and that there was nothing at its other end then.
    pub(crate) stuck_ns: Option<u64>,
    pub(crate) is_down: bool,
    /// Bytes of packets that were copied to entries here; the link has the rest.
    pub(crate) copied: u64,
    pub(crate) opened: Instant,
}

impl Core {
    pub(crate) fn now_ns(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    /// Which queue a packet is for: the landing queue has fragments, and the general one the rest. Where there is one queue only it has all.
    #[inline]
    fn queue_for(&self, packet: &[u8]) -> usize {
        let is_fragment = packet.get(TYPE_AT).is_some_and(|first| first & 15 == FRAGMENT);
        let wanted = match is_fragment {
            true => Role::Landing,
            false => Role::General,
        };
        usize::from(self.queues[0].role != Some(wanted) && self.queues[1].role.is_some())
    }

    /// Takes a burst from the device. What comes for a socket or is answered is done with here.
    pub(crate) fn receive(&mut self) {
        for at in 0..self.link.receive() {
            let packet = self.link.packet(at);
            let queue = &self.queues[packet.queue];
            let aims = queue.aims;
            // Where packets land none is read, and the gate lets all in.
            let bytes = match aims && queue.role == Some(Role::Landing) {
                true => &[],
                false => self.link.bytes(at),
            };
            let number = if aims { packet.queue } else { self.queue_for(bytes) };
            let verdict = self.gate.run(number as u32, bytes);
            let enters = matches!(verdict, Verdict::RedirectLanding | Verdict::RedirectGeneral);
            let (entry, len) = (packet.address, packet.len);
            if enters && !aims {
                self.copied += len as u64;
                self.queues[number].land(&self.mapping, bytes);
            } else if enters && entry != NONE {
                let descriptor = Descriptor::received(entry, PACKET_HEADROOM as u16, len as u32);
                self.queues[number].arrived.push_back(descriptor);
            } else {
                // What came to the driver's own memory shows nothing of what the device writes beside packets.
                self.pass(at);
                if entry != NONE {
                    // SAFETY: it was posted, its packet was read, and the engine is not told of it.
                    unsafe { self.link.post(packet.queue, &[entry]) };
                }
            }
        }
    }

    /// Gives a packet to the stack, and sends what it answers.
    fn pass(&mut self, at: usize) {
        let now_ns = self.now_ns();
        self.stack.take(self.link.bytes(at), now_ns);
        self.send_answer();
    }

    /// Sends what the stack wrote last, if it wrote something. `false`: there was no room.
    pub(crate) fn send_answer(&mut self) -> bool {
        self.stack.frame().is_empty() || self.link.send_bytes(self.stack.frame())
    }

    /// Sends what was submitted, as far as the device takes it.
    fn flush(&mut self) -> Result<Flushed, WakeError> {
        let mut woken = false;
        while self.has_unsent() {
            woken = true;
            let (first, _) = self.outgoing.as_slices();
            // SAFETY: they lie in the mapping, and their owner leaves them alone until they are completed; `submit` looked at their lengths.
            let taken = unsafe { self.link.send(first) };
            self.outgoing.drain(..taken);
            self.complete();
            if taken > 0 {
                self.stuck_ns = None;
            } else if self.has_unsent() {
                return self.look_at_link().map(|()| Flushed { woken, unsent: true });
            }
        }
        self.stuck_ns = None;
        Ok(Flushed { woken, unsent: false })
    }

    /// What the device is done with is completed.
    pub(crate) fn complete(&mut self) {
        for (number, queue) in self.queues.iter_mut().enumerate() {
            queue.completed.extend(self.link.done(number));
        }
    }

    fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty() || self.link.waits()
    }

    /// The device takes nothing: whether there is something at its other end. A driver may make a system call for that, so not at once.
    fn look_at_link(&mut self) -> Result<(), WakeError> {
        let now_ns = self.now_ns();
        let since_ns = *self.stuck_ns.get_or_insert_with(|| {
            self.is_down = false;
            now_ns
        });
        if now_ns - since_ns >= LOOK_AFTER_NS {
            (self.stuck_ns, self.is_down) = (Some(now_ns), !self.link.is_up());
        }
        match self.is_down {
            true => Err(WakeError::Down),
            false => Ok(()),
        }
    }

    /// Whether something came that was not looked at.
    pub(crate) fn has_arrived(&self) -> bool {
        self.stack.has_datagrams() || self.queues.iter().any(|queue| !queue.arrived.is_empty())
    }
}

/// A port's parts, shared among its queues.
pub(crate) type Shared = Arc<Mutex<Core>>;

pub(crate) fn lock(shared: &Shared) -> MutexGuard<'_, Core> {
    // A panic elsewhere is that thread's; packets and entries are plain data.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The receive side of a queue.
#[derive(Debug)]
pub struct DpdkRx {
    core: Shared,
    queue: usize,
    log: Log,
    /// Entries that are written and not submitted, and how many are posted and not shown.
    written: Vec<u64>,
    posted: u32,
    ready: VecDeque<Descriptor>,
    entries_max: u32,
}

impl DpdkRx {
    pub(crate) fn new(core: Shared, spec: &QueueSpec, log: Log) -> DpdkRx {
        DpdkRx {
            core,
            queue: spec.queue as usize,
            log,
            written: vec![0; spec.rx_len as usize],
            posted: 0,
            ready: VecDeque::with_capacity(spec.rx_len as usize),
            entries_max: spec.rx_len,
        }
    }
}

impl RxQueue for DpdkRx {
    fn entries_max(&self) -> u32 {
        self.entries_max
    }

    #[inline]
    fn room(&mut self, _wanted: u32) -> u32 {
        self.entries_max - self.posted - self.ready.len() as u32
    }

    #[inline]
    fn write(&mut self, offset: u32, address: u64) {
        self.written[offset as usize] = address;
    }

    fn submit(&mut self, count: u32) {
        let mut core = lock(&self.core);
        let core = &mut *core;
        let submitted = &self.written[..count as usize];
        match core.queues[self.queue].aims {
            // SAFETY: the engine posts frames of the mapping that are the port's then, and as many as `room` allows.
            true => unsafe { core.link.post(self.queue, submitted) },
            false => core.queues[self.queue].entries.extend(submitted),
        }
        self.posted += count;
    }

    #[inline]
    fn allow(&mut self, until: u64) {
        self.log.set_posted(until);
    }

    #[inline]
    fn set_message_limit(&mut self, row: u32, message: u32) {
        self.log.set_message_limit(row, message);
    }

    #[inline]
    fn available(&mut self, max: u32) -> u32 {
        if self.ready.is_empty() {
            let mut core = lock(&self.core);
            if core.queues[self.queue].arrived.is_empty() {
                core.receive();
            }
            std::mem::swap(&mut self.ready, &mut core.queues[self.queue].arrived);
            self.posted -= self.ready.len() as u32;
        }
        max.min(self.ready.len() as u32)
    }

    #[inline]
    fn packet(&self, offset: u32) -> Descriptor {
        self.ready[offset as usize]
    }

    #[inline]
    fn release(&mut self, count: u32) {
        self.ready.drain(..count as usize);
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
        lock(&self.core).queues[self.queue].drops
    }
}

/// The transmit side of a queue. What is copied for the device is completed.
#[derive(Debug)]
pub struct DpdkTx {
    core: Shared,
    queue: usize,
    /// Written and not submitted.
    written: Vec<Descriptor>,
    /// Submitted, and completions not given back.
    out: u32,
    completed: VecDeque<u64>,
    descriptors_max: u32,
}

impl DpdkTx {
    pub(crate) fn new(core: Shared, spec: &QueueSpec) -> DpdkTx {
        DpdkTx {
            core,
            queue: spec.queue as usize,
            written: vec![Descriptor::default(); spec.tx_len as usize],
            out: 0,
            completed: VecDeque::with_capacity(spec.tx_len as usize),
            descriptors_max: spec.tx_len,
        }
    }
}

impl TxQueue for DpdkTx {
    fn descriptors_max(&self) -> u32 {
        self.descriptors_max
    }

    #[inline]
    fn room(&mut self, _wanted: u32) -> u32 {
        self.descriptors_max - self.out
    }

    #[inline]
    fn write(&mut self, offset: u32, descriptor: Descriptor) {
        assert!(self.out + offset < self.descriptors_max, "there is no room");
        self.written[offset as usize] = descriptor;
    }

    fn submit(&mut self, count: u32) {
        self.out += count;
        let core = &mut *lock(&self.core);
        let (mapping, queue) = (&core.mapping, self.queue);
        let packets = self.written[..count as usize].iter().map(|descriptor| {
            let len = descriptor.len as usize;
            assert!(len <= ROOM, "a packet of {len} bytes");
            let start = mapping.pointer(descriptor.start(), len as u64).as_ptr();
            Packet::new(start, len, descriptor.addr, queue)
        });
        core.outgoing.extend(packets);
    }

    fn flush(&mut self) -> Result<Flushed, WakeError> {
        lock(&self.core).flush()
    }

    #[inline]
    fn completed(&mut self, max: u32) -> u32 {
        if self.completed.is_empty() && self.out > 0 {
            let core = &mut *lock(&self.core);
            std::mem::swap(&mut self.completed, &mut core.queues[self.queue].completed);
        }
        max.min(self.completed.len() as u32)
    }

    #[inline]
    fn completion(&self, offset: u32) -> u64 {
        self.completed[offset as usize]
    }

    #[inline]
    fn release(&mut self, count: u32) {
        self.completed.drain(..count as usize);
        self.out -= count;
    }
}

#[cfg(test)]
mod tests {
    use lm_dataplane::memory::HugePages;

    use super::*;

    #[test]
    fn the_longest_packet_stays_in_its_frame_and_one_without_an_entry_is_dropped() {
        let mapping = Mapping::new(8192, HugePages::Off).expect("two pages");
        let mut queue = Queue::default();
        queue.entries.extend([0, 2304]);
        for len in [ROOM, 1, 1] {
            queue.land(&mapping, &vec![7; len]);
        }
        let arrived = queue.arrived.iter().map(|packet| (packet.start(), packet.len));
        assert_eq!(arrived.collect::<Vec<_>>(), [(256, 2048), (2304 + 256, 1)]);
        assert_eq!((queue.drops.dropped, queue.drops.no_entry), (1, 1));
        // SAFETY: nothing else reads or writes it.
        let bytes = unsafe { mapping.slice(0, 4096) };
        assert_eq!([255, 256, 2303, 2304, 2560].map(|at| bytes[at]), [0, 7, 7, 0, 7]);
    }
}
