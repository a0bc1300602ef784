//! The scheduler: a port's transmit queues, what leaves next, and the one place that puts packets on them. Step 4 of the data's path.
//!
//! Packets leave by [`Class`]: none of a class is put on a ring while one of a class before it waits and may leave. Small packets have a
//! queue of their own where the device has two, and it is handed over before the others; where all share one, each class leaves
//! descriptors to those before it. Inside the class of bulk, sessions take turns of one burst each, counted in packets: that is what a
//! ring's room is counted in, and a session's packets are all of one length but the last of a message. After each burst bulk gives way to
//! what has come meanwhile.

mod queue;
mod shaper;

use std::net::SocketAddrV4;

use crate::memory::Umem;
use crate::port::{Datagrams, Socket, TxQueue, WakeError};
pub(crate) use queue::{Transmit, Turn};
pub(crate) use shaper::Shaping;
pub use shaper::{RateLimit, Scope, Shaper, Signal};

/// What packets are for: which of them leave first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Acknowledgements, credits, announcements, what is missing.
    Control,
    /// Small messages, each in a packet.
    Small,
    /// Fragments of long messages.
    Bulk,
}

const CLASSES: usize = 3;

impl Class {
    /// All of them, the first first.
    const ALL: [Class; CLASSES] = [Class::Control, Class::Small, Class::Bulk];
}

/// A packet in a transmit frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    /// UMEM address of its Ethernet header.
    pub(crate) address: u64,
    /// Its length in bytes.
    pub(crate) len: u32,
    /// Bytes before its LM header: through the kernel's socket it goes without them.
    pub(crate) below_lm_len: u32,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// It is on a ring: its frame is the kernel's until its completion.
    OnRing,
    /// The kernel has copied it.
    Copied,
    /// It did not go.
    Refused,
}

/// A port's transmit queues.
#[derive(Debug)]
pub(crate) struct Scheduler<T> {
    queues: Vec<Transmit<T>>,
    /// Index of the queue for small packets; without one they go through the kernel's socket.
    general: Option<usize>,
    /// Index of the queue whose sessions send first in the next round.
    pub(crate) first: usize,
    pub(crate) shaping: Shaping,
}

impl<T: TxQueue> Scheduler<T> {
    pub(crate) fn new() -> Scheduler<T> {
        Scheduler {
            queues: Vec::with_capacity(8),
            general: None,
            first: 0,
            shaping: Shaping::default(),
        }
    }

    /// One more queue of the port; its index.
    pub(crate) fn add(&mut self, queue: Transmit<T>) -> usize {
        self.queues.push(queue);
        self.queues.len() - 1
    }

    /// One more queue, the one for small packets.
    pub(crate) fn add_general(&mut self, queue: Transmit<T>) {
        self.general = Some(self.add(queue.shared()));
    }

    /// Index of the queue for small packets.
    #[inline]
    pub(crate) fn general(&self) -> Option<usize> {
        self.general
    }

    /// Index of the queue with this number on the device.
    pub(crate) fn find(&self, number: u32) -> Option<usize> {
        self.queues.iter().position(|queue| queue.queue == number)
    }

    pub(crate) fn queues(&self) -> &[Transmit<T>] {
        &self.queues
    }

    #[inline]
    pub(crate) fn queue(&mut self, index: usize) -> &mut Transmit<T> {
        &mut self.queues[index]
    }

    /// What a session sends with: its queue, and the shapers of its class and of the port.
    #[inline]
    pub(crate) fn for_bulk(&mut self, index: usize) -> (&mut Transmit<T>, &mut Shaping) {
        (&mut self.queues[index], &mut self.shaping)
    }

    /// Sets the shaper of a class or of the port, or takes it away.
    pub(crate) fn shape(&mut self, scope: Scope, shaper: Option<Box<dyn Shaper>>) {
        self.shaping.set(scope, shaper);
    }

    /// Whether a packet of a class can be put where small packets go.
    #[inline]
    pub(crate) fn has_room(&mut self, class: Class) -> bool {
        self.general
            .is_none_or(|general| self.queues[general].room(class) > 0)
    }

    /// Puts a small packet on the queue for these, or, where there is none, has the kernel's socket send it to `data`. The caller has asked
    /// for [room](Scheduler::has_room).
    #[inline]
    pub(crate) fn put_small(
        &mut self,
        side: &mut dyn Datagrams,
        umem: &Umem,
        data: SocketAddrV4,
        packet: &Packet,
    ) -> Put {
        match self.general {
            Some(general) => {
                self.queues[general].push(packet.address, packet.len);
                Put::OnRing
            }
            None => send_by_socket(side, umem, data, packet),
        }
    }

    /// As [`Scheduler::put_small`], and hands what is on the queue over, if somebody waits for this packet or enough are written for a
    /// wake-up of their own.
    #[inline]
    pub(crate) fn put_message(
        &mut self,
        side: &mut dyn Datagrams,
        umem: &Umem,
        data: SocketAddrV4,
        packet: &Packet,
        is_awaited: bool,
        failed: impl FnOnce(WakeError),
    ) -> Put {
        let Some(general) = self.general else {
            return send_by_socket(side, umem, data, packet);
        };
        let queue = &mut self.queues[general];
        queue.push(packet.address, packet.len);
        if is_awaited || queue.has_burst() {
            queue.flush().unwrap_or_else(failed);
        }
        Put::OnRing
    }

    /// Hands over what waits on the queue for small packets, where bulk has others: it waits for no burst.
    ///
    /// # Errors
    /// As [`Transmit::flush`].
    #[inline]
    pub(crate) fn flush_before_bulk(&mut self) -> Result<(), WakeError> {
        match self.general {
            Some(general) if self.queues.len() > 1 => self.queues[general].flush(),
            _ => Ok(()),
        }
    }

    /// Hands over what is on the rings; `failed` hears of queues of which the device takes nothing.
    #[inline]
    pub(crate) fn flush(&mut self, failed: impl FnMut(WakeError)) {
        let flushed = self.queues.iter_mut().map(Transmit::flush);
        flushed.filter_map(Result::err).for_each(failed);
    }

    /// As [`Transmit::reap`], of all queues.
    #[inline]
    pub(crate) fn reap(&mut self, all: bool, mut done: impl FnMut(u64)) -> u32 {
        let reaped = self.queues.iter_mut().map(|queue| queue.reap(all, &mut done));
        reaped.sum()
    }

    /// Whether there are packets that are not completed.
    pub(crate) fn awaits_completions(&self) -> bool {
        self.queues.iter().any(|queue| queue.in_flight() > 0)
    }
}

/// Sends a packet from its LM header on through the kernel's socket, which copies it before it returns.
fn send_by_socket(side: &mut dyn Datagrams, umem: &Umem, to: SocketAddrV4, packet: &Packet) -> Put {
    let Packet {
        address,
        len,
        below_lm_len,
    } = *packet;
    // SAFETY: the packet lies inside a transmit frame that the engine owns; nobody writes it meanwhile.
    let bytes = unsafe {
        umem.mapping()
            .slice(address + u64::from(below_lm_len), u64::from(len - below_lm_len))
    };
    match side.send(Socket::Data, to, bytes) {
        Ok(()) => Put::Copied,
        Err(_) => Put::Refused,
    }
}
