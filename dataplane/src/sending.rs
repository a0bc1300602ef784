//! Sending: fragments within credit, session by session (stage 8), one wake-up for each queue (stage 9), and the memory that packets leave
//! from, which comes back when the device is done with it (stage 2). Packets that have a frame of their own are `packets.rs`.

mod packets;

use std::net::SocketAddrV4;

use lm_protocol::geometry::Layout;
use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;

use crate::arena::Arena;
use crate::bounds::{OUTGOING_MAX, PEERS_MAX, TRANSMIT_BURST, TRANSMIT_RING_LEN};
use crate::checksum::Checksum;
use crate::counters::Counters;
use crate::eager::TransmitFrames;
use crate::frames::{Frame, FramePool};
use crate::link::Link;
use crate::memory::Umem;
use crate::outbound::{Copied, OutgoingTable, Way};
use crate::packet_memory::PacketMemory;
use crate::peer::Peers;
use crate::port::{RxQueue, TxQueue, WakeError};
use crate::release::Released;
use crate::scheduler::{
    Class, Flow, FlowError, FlowId, FlowSpec, Scheduler, Scope, Shaper, Transmit, Turn, Vacated,
    flow_memory_len,
};
use crate::small::Small;
pub(crate) use packets::SmallMessage;

/// Attempts to empty a TX ring before its queue is built anew: twice as many as a full ring needs.
const FLUSHES_MAX: u32 = 2 * TRANSMIT_RING_LEN / TRANSMIT_BURST;
/// Whether the interface is still there is looked at this often.
const LINK_LOOK_NS: u64 = 100_000_000;

/// What leaves, and what it leaves from.
#[derive(Debug)]
pub(crate) struct Sending<T> {
    scheduler: Scheduler<T>,
    /// For small messages and control packets.
    frames: TransmitFrames,
    /// For messages of many fragments, and for flows.
    arena: Arena,
    pub(crate) outgoing: OutgoingTable,
    /// Peers with an outbound session.
    senders: Vec<u16>,
    link: Link,
    /// Our data port.
    local: SocketAddrV4,
    /// Of messages of one fragment.
    layout: Layout,
    /// Longest packet that a transmit frame holds, and piece of one that a descriptor is for, in bytes.
    packet_len_max: u32,
    /// Bytes before each packet.
    room: u8,
    /// The device reads the memory itself.
    device_reads: bool,
    /// When this round began.
    now_ns: u64,
}

/// What fragments of a round are sent with.
struct Round<'a, R> {
    peers: &'a mut Peers,
    small: &'a mut Small<R>,
    memory: &'a mut PacketMemory,
    counters: &'a mut Counters,
    now_ns: u64,
}

impl<T: TxQueue> Sending<T> {
    /// With `frames` for small packets, and `len` bytes from UMEM address `start` for messages.
    pub(crate) fn new(
        scheduler: Scheduler<T>,
        frames: FramePool,
        (start, len): (u64, u64),
        local: SocketAddrV4,
        (layout, chunk_len, checksum): (Layout, u32, Checksum),
        device_reads: bool,
    ) -> Sending<T> {
        Sending {
            scheduler,
            frames: TransmitFrames::new(frames),
            arena: Arena::new(start, len, OUTGOING_MAX),
            outgoing: OutgoingTable::new(start, len),
            senders: Vec::with_capacity(PEERS_MAX),
            link: Link::default(),
            local,
            layout,
            packet_len_max: chunk_len - u32::from(checksum.room()),
            room: checksum.room(),
            device_reads,
            now_ns: 0,
        }
    }

    /// Stage 8.
    pub(crate) fn send_fragments<R: RxQueue>(
        &mut self,
        peers: &mut Peers,
        small: &mut Small<R>,
        memory: &mut PacketMemory,
        counters: &mut Counters,
        now_ns: u64,
    ) -> usize {
        if self.senders.is_empty() {
            return 0;
        }
        let flows = self.send_due(small, memory, now_ns);
        if let Err(error) = self.scheduler.flush_before_bulk() {
            self.link.failed(error);
        }
        let (most, burst) = self
            .scheduler
            .bulk_of_round(small.stream.is_exchange_of_small(now_ns));
        let mut round = Round {
            peers,
            small,
            memory,
            counters,
            now_ns,
        };
        let sent = match self.senders[..] {
            // It takes turns with nobody.
            [only] => self.send_of(only, None, most, burst, &mut round).packets,
            _ => self.send_by_turns(most, burst, &mut round),
        };
        round.counters.data_packets_sent += u64::from(sent);
        flows + sent as usize
    }

    /// Packets of flows that are due, before anything else of a round and before bulk.
    #[inline]
    pub(crate) fn send_due<R: RxQueue>(
        &mut self,
        small: &mut Small<R>,
        memory: &mut PacketMemory,
        now_ns: u64,
    ) -> usize {
        if !self.scheduler.flows_are_due(now_ns) {
            return 0;
        }
        let sent = self.send_flows(memory, now_ns);
        if sent > 0 {
            small.apart.sent(now_ns);
            small.stream.left_apart();
        }
        sent
    }

    /// Packets of flows, which wait for no burst; between control packets, too.
    #[cold]
    fn send_flows(&mut self, memory: &mut PacketMemory, now_ns: u64) -> usize {
        let (umem, mut capture) = memory.with_capture();
        let sent = self
            .scheduler
            .send_flows(umem, Time::from_nanos(now_ns), |address, len| {
                if let Some(capture) = &mut capture {
                    capture.sent(umem, address, len);
                }
            });
        sent.map_or_else(
            |error| {
                self.link.failed(error);
                0
            },
            |count| count as usize,
        )
    }

    /// Sends up to `most` fragments on each queue, where sessions take turns. If something comes meanwhile, the next round begins with the
    /// queue behind.
    fn send_by_turns<R: RxQueue>(&mut self, most: u32, burst: u32, round: &mut Round<'_, R>) -> u32 {
        let queues = self.scheduler.queues().len();
        let first = self.scheduler.first;
        let mut count = 0;
        for queue in (first..queues).chain(0..first) {
            count += self.send_on(queue, most, burst, round);
            self.scheduler.first = (queue + 1) % queues;
            if round.small.has_come() || self.scheduler.flows_are_due(round.now_ns) {
                break;
            }
        }
        count
    }

    /// Sends up to `most` fragments of the sessions of a queue, a burst of each in turn: deficit round robin. The next round goes on with
    /// the session whose turn is not over, and with what is left of it.
    fn send_on<R: RxQueue>(&mut self, queue: usize, most: u32, burst: u32, round: &mut Round<'_, R>) -> u32 {
        let turn = self.scheduler.queue(queue).turn.take();
        let is_next = |&index: &u16| turn.is_some_and(|turn| turn.peer == index);
        let first = turn.and_then(|_| self.senders.iter().position(is_next));
        let senders = self.senders.len();
        let first_at = first.unwrap_or(0);
        let mut count = 0;
        for step in 0..senders {
            let index = self.senders[(first_at + step) % senders];
            let left = match turn {
                Some(turn) if first.is_some() && step == 0 => turn.left,
                _ => TRANSMIT_BURST,
            };
            let sent = self.send_of(index, Some(queue), left.min(most - count), burst, round);
            count += sent.packets;
            if sent.is_cut || count == most {
                let left = left - sent.packets;
                let next = self.senders[(first_at + step + 1) % senders];
                self.scheduler.queue(queue).turn = Some(match left {
                    0 => Turn {
                        peer: next,
                        left: TRANSMIT_BURST,
                    },
                    _ => Turn { peer: index, left },
                });
                break;
            }
        }
        count
    }

    /// Sends up to `most` fragments of a peer's session in bursts, if `on` is the queue that it sends on.
    fn send_of<R: RxQueue>(
        &mut self,
        index: u16,
        on: Option<usize>,
        most: u32,
        burst: u32,
        round: &mut Round<'_, R>,
    ) -> Sent {
        let now_ns = round.now_ns;
        let outbound = round.peers.at(index).outbound.as_mut();
        let is_it = |queue: usize| on.is_none_or(|on| on == queue);
        let Some(outbound) = outbound.filter(|outbound| is_it(outbound.terms.channel)) else {
            return Sent::default();
        };
        let (channel, shaping, flows) = self.scheduler.for_bulk(outbound.terms.channel);
        // Who has nothing to send waits for no shaper.
        if shaping.is_any() && !outbound.has_fragments() {
            return Sent::default();
        }
        let (umem, capture) = round.memory.with_capture();
        let mut way = Way {
            channel,
            umem,
            piece_len: self.packet_len_max,
            more_pieces: 0,
            bytes: 0,
            frames: &mut self.frames,
            device_reads: self.device_reads,
            copied: Copied::default(),
        };
        let mut capture = capture.map(|capture| |umem: &Umem, address, len| capture.sent(umem, address, len));
        let resent = outbound.resent;
        let mut sent = Sent::default();
        let now = Time::from_nanos(now_ns);
        // A burst of long packets, each of several descriptors, has fewer of them.
        for _ in 0..most.div_ceil(burst) {
            let allowed = shaping.take(Class::Bulk, burst.min(most - sent.packets), now);
            if allowed == 0 {
                round.counters.classes_starved += shaping.take_starved();
                sent.is_cut = true;
                break;
            }
            let heard = capture.as_mut().map(|heard| heard as _);
            let packets = outbound.transmit(&mut self.outgoing, &mut way, allowed, now_ns, heard);
            shaping.left(Class::Bulk, allowed, packets, std::mem::take(&mut way.bytes));
            if packets == 0 {
                break;
            }
            sent.packets += packets;
            if let Err(error) = way.channel.flush() {
                self.link.failed(error);
            }
            sent.is_cut = round.small.has_come() || flows.are_due(shaping, now);
            if sent.is_cut {
                break;
            }
        }
        round.counters.user_copied_bytes += way.copied.bytes;
        round.counters.page_end_fragments += way.copied.fragments;
        round.counters.fragments_resent += outbound.resent - resent;
        let frame_len = u32::from(outbound.terms.layout.max_frame_len());
        sent.is_cut |=
            sent.packets < most && way.channel.room(Class::Bulk) < frame_len.div_ceil(self.packet_len_max);
        sent
    }

    /// When a shaper lets the next packet go; `None` where none holds one back.
    pub(crate) fn next_departure(&mut self, peers: &mut Peers) -> Option<Time> {
        let mut next = self.scheduler.flows_depart();
        for &index in &self.senders {
            let Some(outbound) = peers.at(index).outbound.as_ref() else {
                continue;
            };
            let class = match outbound.has_fragments() {
                true => Class::Bulk,
                false => Class::Small,
            };
            // All of them have to let it go.
            let departures = [outbound.departs(class), self.scheduler.shaping.next(class)];
            let departure = departures.into_iter().flatten().max();
            next = next.into_iter().chain(departure).min();
        }
        next
    }

    /// Stage 9.
    pub(crate) fn flush(&mut self) {
        self.scheduler.flush(|error| self.link.failed(error));
    }

    /// Stage 2.
    pub(crate) fn reap(&mut self, all: bool, now_ns: u64) -> usize {
        let mut reaped = 0;
        self.now_ns = now_ns;
        let (queues, flows) = self.scheduler.completing();
        for queue in queues {
            reaped += queue.reap(all, now_ns, |address| {
                if let Some(was_sent) = self.frames.completed(address) {
                    return was_sent;
                }
                let freed = |released| {
                    if let Released::SendRegion { start, len } = released {
                        self.arena.free(start, len);
                    }
                };
                self.outgoing.completed(address, freed) || flows.completed(address, Time::from_nanos(now_ns))
            });
        }
        self.free_vacated();
        reaped as usize
    }

    /// Takes the memory of flows that are gone.
    #[inline]
    fn free_vacated(&mut self) {
        while let Some(Vacated { start, len }) = self.scheduler.vacated() {
            self.arena.free(start, len);
        }
    }

    /// Memory of messages that were never sent, or of which nobody needs any more.
    pub(crate) fn recover_region(&mut self, start: u64, len: u64) {
        self.arena.free(start, len);
    }

    /// The writer of a message writes no more.
    #[cold]
    pub(crate) fn writer_is_gone(&mut self, slot: u16) {
        if let Some(Released::SendRegion { start, len }) = self.outgoing.writer_is_gone(slot) {
            self.arena.free(start, len);
        }
    }

    /// A frame of a small message that was never sent, by its address.
    pub(crate) fn recover_frame(&mut self, address: u64) {
        if let Some(frame) = self.frames.reclaim(address) {
            self.frames.put(frame);
        }
    }

    /// A frame for a small message.
    #[inline]
    pub(crate) fn take_frame(&mut self) -> Option<Frame> {
        self.frames.take_for_message()
    }

    /// Memory for a message of many fragments.
    pub(crate) fn take_region(&mut self, len: u64) -> Option<u64> {
        self.arena.allocate(len)
    }

    /// Bytes for messages of many fragments.
    pub(crate) fn region_len_max(&self) -> u64 {
        self.arena.len()
    }
}

/// Sessions, flows, queues and the link.
impl<T: TxQueue> Sending<T> {
    /// So many fragments of bulk were lost.
    pub(crate) fn lost(&mut self, fragments: u32) {
        self.scheduler.shaping.lost(Class::Bulk, fragments);
    }

    /// Peers with an outbound session.
    pub(crate) fn senders(&self) -> &[u16] {
        &self.senders
    }

    pub(crate) fn add_sender(&mut self, peer: u16) {
        if !self.senders.contains(&peer) {
            self.senders.push(peer);
        }
    }

    pub(crate) fn remove_sender(&mut self, peer: u16) {
        self.senders.retain(|&sender| sender != peer);
    }

    /// Registers a flow, with frames of its own.
    pub(crate) fn add_flow(
        &mut self,
        peers: &mut Peers,
        spec: &FlowSpec,
        flow: Box<dyn Flow>,
    ) -> Result<FlowId, FlowError> {
        let frame_len = self.packet_len_max;
        let len = flow_memory_len(spec.frames, frame_len, self.room);
        if spec.frames == 0 || spec.descriptors == 0 {
            return Err(FlowError::Empty);
        }
        let addressing = match spec.to {
            Some(to) => Some(peers.named(to).ok_or(FlowError::UnknownPeer)?.addressing),
            None => None,
        };
        let start = self.arena.allocate(len).ok_or(FlowError::NoMemory)?;
        self.outgoing.disown(start, len);
        let added = self
            .scheduler
            .add_flow(spec, addressing, (start, frame_len), flow);
        if added.is_err() {
            self.arena.free(start, len);
        }
        added
    }

    /// Has a flow's packets go elsewhere.
    pub(crate) fn aim_flow(&mut self, id: FlowId, addressing: &Addressing) -> Result<(), FlowError> {
        match self.scheduler.aim_flow(id, addressing) {
            true => Ok(()),
            false => Err(FlowError::UnknownFlow),
        }
    }

    /// Takes a flow out; `None` if there is none of that name.
    pub(crate) fn remove_flow(&mut self, id: FlowId) -> Option<Box<dyn Flow>> {
        let flow = self.scheduler.remove_flow(id)?;
        self.free_vacated();
        Some(flow)
    }

    #[inline]
    pub(crate) fn has_flows(&self) -> bool {
        self.scheduler.has_flows()
    }

    /// As [`Scheduler::flows_are_due`].
    #[inline]
    pub(crate) fn flows_are_due(&self, now_ns: u64) -> bool {
        self.scheduler.flows_are_due(now_ns)
    }

    pub(crate) fn shape(&mut self, scope: Scope, shaper: Option<Box<dyn Shaper>>) {
        self.scheduler.shape(scope, shaper);
    }

    /// Whether nothing but small messages leaves.
    pub(crate) fn is_idle(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Whether there are packets that are not completed.
    pub(crate) fn awaits_completions(&self) -> bool {
        self.scheduler.awaits_completions()
    }

    /// Packets that were put on queues, and how often a device was woken for some.
    pub(crate) fn handed_over(&self) -> (u64, u64) {
        let of_queues = self.scheduler.queues().iter();
        of_queues.fold((0, 0), |(packets, wakeups), queue| {
            (packets + queue.packets, wakeups + queue.wakeups)
        })
    }

    /// Index of the queue for small packets.
    pub(crate) fn general_queue(&self) -> Option<usize> {
        self.scheduler.general()
    }

    /// Index of the queue with this number on the device.
    pub(crate) fn find_queue(&self, number: u32) -> Option<usize> {
        self.scheduler.find(number)
    }

    /// One more queue; its index.
    pub(crate) fn add_queue(&mut self, queue: Transmit<T>) -> usize {
        self.scheduler.add(queue)
    }

    /// Hands over what is on a queue that will be built anew: packets on it would go with it, and nobody would send them again.
    pub(crate) fn empty_queue(&mut self, queue: usize, now_ns: u64) {
        for _ in 0..FLUSHES_MAX {
            if !self.scheduler.queue(queue).has_unsent() {
                break;
            }
            self.flush();
        }
        self.reap(true, now_ns);
    }

    /// A queue is built anew: nothing is on it.
    pub(crate) fn begin_anew(&mut self, queue: usize) -> &mut T {
        self.scheduler.begin_anew(queue);
        self.free_vacated();
        &mut self.scheduler.queue(queue).tx
    }

    /// The kernel was asked to send or to receive, and said so.
    #[cold]
    pub(crate) fn link_failed(&mut self, error: WakeError) {
        self.link.failed(error);
    }

    pub(crate) fn take_link_error(&mut self) -> Option<WakeError> {
        self.link.take_error()
    }

    /// As [`Scheduler::take_unknown`].
    pub(crate) fn take_unknown(&mut self) -> u32 {
        self.scheduler.take_unknown()
    }

    /// Looks at the interface: who only waits for packets is told nothing otherwise.
    pub(crate) fn watch_link(&mut self, is_gone: impl FnOnce() -> bool, patience_ns: u64, now_ns: u64) {
        if now_ns.saturating_sub(self.link.looked_ns) >= LINK_LOOK_NS {
            self.link.looked_ns = now_ns;
            if is_gone() {
                self.link.failed(WakeError::Gone);
            }
        }
        self.link.look(now_ns, patience_ns);
    }
}

/// For tests, which look inside.
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), allow(dead_code, reason = "the fuzzer uses a part of the tests"))]
impl<T> Sending<T> {
    pub(crate) fn scheduler(&self) -> &Scheduler<T> {
        &self.scheduler
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn parts(&mut self) -> (&mut Scheduler<T>, &mut TransmitFrames, &mut OutgoingTable) {
        (&mut self.scheduler, &mut self.frames, &mut self.outgoing)
    }
}

/// What left of a session in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    packets: u32,
    /// It might have gone on: the queue has no room, a shaper of all sessions allows no more, or something has come.
    is_cut: bool,
}
