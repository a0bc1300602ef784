//! The scheduler: a port's transmit queues, what leaves next, and the one place that puts packets on them. Step 4 of the data's path.
//!
//! Packets leave by [`Class`]: none of a class is put on a ring while one of a class before it waits and may leave. Small packets have a
//! queue of their own where the device has two, and it is handed over before the others; where all share one, each class leaves
//! descriptors to those before it. Inside the class of bulk, sessions take turns of one burst each, counted in packets: that is what a
//! ring's room is counted in, and a session's packets are all of one length but the last of a message. After each burst bulk gives way to
//! what has come meanwhile.

mod flow;
mod queue;
mod shaper;

use std::net::SocketAddrV4;

use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;

use crate::bounds::TRANSMIT_BURST;
use crate::memory::Umem;
use crate::port::{Datagrams, Socket, TxQueue, WakeError};
use flow::Asked;
pub use flow::{Flow, FlowError, FlowId, FlowSpec, TxBatch};
pub(crate) use flow::{Flows, Vacated, flow_memory_len};
pub(crate) use queue::{Transmit, Turn};
pub(crate) use shaper::Shaping;
pub use shaper::{RateLimit, Scope, Shaper, Signal};

/// What packets are for: which of them leave first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Acknowledgements, credits, announcements, what is missing.
    Control,
    /// What a [`Flow`] sends.
    RealTime,
    /// Small messages, each in a packet.
    Small,
    /// Fragments of long messages.
    Bulk,
}

const CLASSES: usize = 4;

/// Control packets that leave one after the other at most while flows have something to send.
const CONTROL_IN_A_ROW: u32 = 2;

/// Packets of bulk in a round while small messages go to and fro, so that each finds its thread soon: what a network card takes in some
/// microseconds.
pub(crate) const BURST_BESIDE_SMALL: u32 = 8;
/// The same on veth, where a packet's whole way to the far end is walked while it is handed over.
const BURST_BESIDE_SMALL_WALKED: u32 = 2;

impl Class {
    /// All of them, the first first.
    const ALL: [Class; CLASSES] = [Class::Control, Class::RealTime, Class::Small, Class::Bulk];
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
    /// Index of the queue for small packets. Without one, which no index says, they go through the kernel's socket.
    general: usize,
    /// Index of the queue whose sessions send first in the next round.
    pub(crate) first: usize,
    pub(crate) shaping: Shaping,
    flows: Flows,
    /// Control packets since flows had their turn.
    in_a_row: u32,
    burst_beside_small: u32,
}

impl<T: TxQueue> Scheduler<T> {
    pub(crate) fn new() -> Scheduler<T> {
        Scheduler {
            queues: Vec::with_capacity(8),
            burst_beside_small: BURST_BESIDE_SMALL,
            general: usize::MAX,
            first: 0,
            shaping: Shaping::default(),
            flows: Flows::default(),
            in_a_row: 0,
        }
    }

    /// Of a port where a packet's whole way to the far end is walked while it is handed over, or not.
    pub(crate) fn walking(mut self, walks: bool) -> Scheduler<T> {
        if walks {
            self.burst_beside_small = BURST_BESIDE_SMALL_WALKED;
        }
        self
    }

    /// One more queue of the port; its index.
    pub(crate) fn add(&mut self, queue: Transmit<T>) -> usize {
        self.queues.push(queue);
        self.reserve();
        self.queues.len() - 1
    }

    /// One more queue, the one for small packets.
    pub(crate) fn add_general(&mut self, queue: Transmit<T>) {
        self.general = self.queues.len();
        self.add(queue);
    }

    /// Index of the queue for small packets.
    #[inline]
    pub(crate) fn general(&self) -> Option<usize> {
        (self.general < self.queues.len()).then_some(self.general)
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

    /// How many packets of bulk leave on each queue in a round, and in each burst; `is_awaited`: small messages go to and fro, so that
    /// each of them is waited for.
    #[inline]
    pub(crate) fn bulk_of_round(&self, is_awaited: bool) -> (u32, u32) {
        match is_awaited {
            true => (self.burst_beside_small, self.burst_beside_small),
            // Two bursts: enough to keep the driver busy while the credits of this round are read.
            false => (2 * TRANSMIT_BURST, TRANSMIT_BURST),
        }
    }

    /// What a session sends with: its queue, the shapers of its class and of the port; and the flows that it gives way to.
    #[inline]
    pub(crate) fn for_bulk(&mut self, index: usize) -> (&mut Transmit<T>, &mut Shaping, &Flows) {
        (&mut self.queues[index], &mut self.shaping, &self.flows)
    }

    /// Sets the shaper of a class or of the port, or takes it away.
    pub(crate) fn shape(&mut self, scope: Scope, shaper: Option<Box<dyn Shaper>>) {
        self.shaping.set(scope, shaper);
    }

    /// Whether a packet of a class can be put where small packets go.
    #[inline]
    pub(crate) fn has_room(&mut self, class: Class) -> bool {
        let general = self.queues.get_mut(self.general);
        general.is_none_or(|queue| queue.has_room(class))
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
        match self.queues.get_mut(self.general) {
            Some(queue) => {
                queue.push_frame(umem, packet.address, packet.len);
                Put::OnRing
            }
            None => send_by_socket(side, umem, data, packet),
        }
    }

    /// Puts a control packet on a certain queue. The caller has asked for [room](Transmit::room).
    pub(crate) fn put_control_on(&mut self, queue: usize, umem: &Umem, address: u64, len: u32) {
        self.queues[queue].push_frame(umem, address, len);
        self.control_left(len);
    }

    /// A control packet leaves.
    #[inline]
    pub(crate) fn control_left(&mut self, len: u32) {
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.shaping.left(Class::Control, 0, 1, len.into());
    }

    /// Whether it is flows' turn before another control packet.
    #[inline]
    pub(crate) fn control_gives_way(&self) -> bool {
        self.in_a_row >= CONTROL_IN_A_ROW && self.has_flows()
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
        let Some(queue) = self.queues.get_mut(self.general) else {
            return send_by_socket(side, umem, data, packet);
        };
        queue.push_frame(umem, packet.address, packet.len);
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
        let has_others = self.queues.len() > 1;
        match self.queues.get_mut(self.general) {
            Some(queue) if has_others => queue.flush(),
            _ => Ok(()),
        }
    }

    /// Whether there are flows. They are asked first in each round, and between bursts of bulk.
    #[inline]
    pub(crate) fn has_flows(&self) -> bool {
        !self.flows.is_empty()
    }

    /// A flow, whose packets leave on the queue for small packets, or on the first one; its memory begins at UMEM address `start`.
    ///
    /// # Errors
    /// [`FlowError::NoDescriptors`]
    pub(crate) fn add_flow(
        &mut self,
        spec: &FlowSpec,
        addressing: Option<Addressing>,
        memory: (u64, u32),
        flow: Box<dyn Flow>,
    ) -> Result<FlowId, FlowError> {
        let reservable = self.queues[self.queue_of_flows()].reservable();
        let left = reservable.saturating_sub(self.flows.descriptors());
        if spec.descriptors > left {
            return Err(FlowError::NoDescriptors { left });
        }
        let room = self.queues[self.queue_of_flows()].checksum.room();
        let id = self.flows.add(spec, addressing, memory, room, flow);
        self.reserve();
        Ok(id)
    }

    /// Has a flow's packets go elsewhere; `false`: there is none of that name.
    pub(crate) fn aim_flow(&mut self, id: FlowId, addressing: &Addressing) -> bool {
        self.flows.aim(id, addressing)
    }

    /// Takes a flow out. [`Scheduler::vacated`] gives its memory, as soon as the device reads none of it.
    pub(crate) fn remove_flow(&mut self, id: FlowId) -> Option<Box<dyn Flow>> {
        let removed = self.flows.remove(id)?;
        self.reserve();
        Some(removed)
    }

    /// What flows that are there need, of all queues: the link takes turns between them.
    fn reserve(&mut self) {
        let (own, general) = (self.queue_of_flows(), self.general());
        let (descriptors, messages) = (self.flows.descriptors(), self.flows.messages());
        for (index, queue) in self.queues.iter_mut().enumerate() {
            match index == own && (descriptors > 0 || general.is_some()) {
                true => queue.reserve(descriptors, messages),
                false => queue.unshare(messages),
            }
        }
    }

    fn queue_of_flows(&self) -> usize {
        self.general().unwrap_or(0)
    }

    /// Puts packets of flows on their queue and hands them over: as many as a burst of each. `sent` gets the UMEM address and length
    /// of each. Gives how many there were.
    pub(crate) fn send_flows(
        &mut self,
        umem: &Umem,
        now: Time,
        mut sent: impl FnMut(u64, u32),
    ) -> Result<u32, WakeError> {
        let index = self.queue_of_flows();
        self.in_a_row = 0;
        let Scheduler {
            queues,
            shaping,
            flows,
            ..
        } = self;
        let queue = &mut queues[index];
        let mut count = 0;
        let most = flows.len() as u32 * TRANSMIT_BURST;
        // One that puts nothing was asked as well.
        for _ in 0..most {
            let room = queue.room(Class::RealTime).min(TRANSMIT_BURST).min(most - count);
            let allow = |wanted: u32| match wanted.min(room) {
                0 => 0,
                most => shaping.take(Class::RealTime, most, now),
            };
            let asked = flows.ask(umem, now, allow, |address, len| {
                queue.push_frame(umem, address, len);
                sent(address, len);
            });
            match asked {
                Asked::Nothing | Asked::Held => break,
                Asked::Put {
                    allowed,
                    packets,
                    bytes,
                } => {
                    shaping.left(Class::RealTime, allowed, packets, bytes);
                    count += packets;
                    if flows.len() == 1 && packets < allowed {
                        break;
                    }
                }
            }
        }
        if count > 0 {
            queue.flush()?;
        }
        Ok(count)
    }

    /// When a flow's next packet is due, and shapers let it go.
    pub(crate) fn flows_depart(&self) -> Option<Time> {
        self.flows.depart(&self.shaping)
    }

    /// Whether a packet of a flow is due that may leave.
    #[inline]
    pub(crate) fn flows_are_due(&self, now_ns: u64) -> bool {
        self.flows.are_due(&self.shaping, Time::from_nanos(now_ns))
    }

    /// A queue was built anew: nothing is on it.
    pub(crate) fn begin_anew(&mut self, index: usize) {
        self.queues[index].begin_anew();
        if index == self.queue_of_flows() {
            self.flows.abandoned();
        }
    }

    /// Hands over what is on the rings; `failed` hears of queues of which the device takes nothing.
    #[inline]
    pub(crate) fn flush(&mut self, failed: impl FnMut(WakeError)) {
        let flushed = self.queues.iter_mut().map(Transmit::flush);
        flushed.filter_map(Result::err).for_each(failed);
    }

    /// The queues to [reap](Transmit::reap), and the flows, whose packets are among what is completed.
    #[inline]
    pub(crate) fn completing(&mut self) -> (&mut [Transmit<T>], &mut Flows) {
        (&mut self.queues, &mut self.flows)
    }

    /// Memory of a flow that is gone, and of which the device reads nothing more.
    #[inline]
    pub(crate) fn vacated(&mut self) -> Option<Vacated> {
        match self.flows.is_empty() {
            true => None,
            false => self.flows.vacated(),
        }
    }

    /// How many completions came since the last call that no packet was waiting for.
    pub(crate) fn take_unknown(&mut self) -> u32 {
        let unknown = self
            .queues
            .iter_mut()
            .map(|queue| std::mem::take(&mut queue.unknown));
        unknown.sum()
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
