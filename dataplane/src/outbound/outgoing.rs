//! Messages that are on their way out: what is kept of each, and which one a completion belongs to.

use std::ops::Range;

use lm_protocol::geometry::Geometry;
use lm_protocol::wire::{DataTemplate, IpFragTemplate};

use super::streamed::Stream;
use crate::bounds::OUTGOING_MAX;
use crate::checksum::Checksum;
use crate::completion::{Completion, Outcome, PeerId, SendToken};
use crate::eager::TransmitFrames;
use crate::fragment_digests::FragmentDigests;
use crate::memory::{Umem, crosses_huge_page};
use crate::mutants::mutant;
use crate::port::TxQueue;
use crate::release::Released;
use crate::scheduler::Transmit;
use crate::words::Words;

/// Longest header of a data packet: Ethernet with two tags, IPv4, UDP, LM.
pub(super) const HEADER_LEN_MAX: usize = 96;

#[derive(Clone, Copy, Debug)]
pub(super) enum Template {
    Lm(DataTemplate),
    IpFrag(IpFragTemplate),
}

/// A message of many fragments that is not settled, or whose memory the kernel may still read.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) released: Released,
    pub(super) start: u64,
    pub(super) geometry: Geometry,
    /// Length of the message; the geometry may have padding behind it.
    pub(super) len: u64,
    pub(super) number: u32,
    pub(crate) tag: u64,
    pub(super) words: Words,
    pub(crate) token: SendToken,
    pub(crate) submitted_ns: u64,
    /// Next position in transmit order.
    pub(super) position: u32,
    /// Positions before this one may be sent: all, but of a message that is still being written.
    pub(super) end: u32,
    pub(super) stream: Option<Box<Stream>>,
    /// Descriptors on the ring and not completed: one for each packet but long ones.
    pub(super) in_flight: u32,
    /// Index of the channel that they are on.
    pub(super) channel: usize,
    pub(super) template: Template,
    /// The application has its completion; the memory goes back with the last packet's completion.
    pub(super) settled: bool,
    pub(super) missing: Option<Vec<Range<u32>>>,
    /// The status that the receiver declined it with.
    pub(super) declined: Option<u16>,
    /// Its digest, once every fragment's is known.
    pub(super) digest: Option<u64>,
    /// Facts lie behind its bytes: it left unannounced.
    pub(super) has_facts: bool,
    /// Packets without a payload that go behind it.
    pub(super) fillers: u32,
}

impl Outgoing {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Its receiver has settled it without its being whole, and says so.
    pub(super) fn is_unwhole(&self) -> bool {
        self.declined.is_some() || self.missing.is_some()
    }

    /// Packets of it that were not sent.
    pub(super) fn left(&self) -> u32 {
        self.geometry.fragment_count() + self.fillers - self.position
    }

    /// Puts the packet of fragment `index` on the ring, where there is room for a descriptor. Returns its length in bytes; `None` when a
    /// frame is needed, or more room, and there is none now.
    // In `transmit` it would take registers from runs, which are most.
    #[inline(never)]
    pub(super) fn put_packet(
        &mut self,
        index: u32,
        way: &mut Way<'_, impl TxQueue>,
        header: &mut [u8; HEADER_LEN_MAX],
        sent: &mut Heard<'_>,
    ) -> Option<u32> {
        let fragment = self.geometry.fragment(index);
        let frame_len = u32::from(fragment.frame_len());
        let header_len = match &self.template {
            Template::Lm(template) => template.write(header, index, fragment.len),
            Template::IpFrag(template) => template.write(header, index, fragment.len),
        };
        let mut address = self.start + self.geometry.tx_frame_offset(index);
        let checksum = way.channel.checksum;
        let room = u32::from(checksum.room());
        if way.device_reads && crosses_huge_page(address - u64::from(room), frame_len + room) {
            address = self.copy_payload(index, header_len as u64, way)?;
        } else {
            self.in_flight += 1;
        }
        if frame_len > way.piece_len {
            // The packet is contiguous, but a descriptor is for no more than a chunk.
            self.in_flight -= 1;
            let pieces = way.channel.push_pieces(address, frame_len, way.piece_len)?;
            self.in_flight += pieces;
            way.more_pieces += pieces - 1;
        } else {
            way.channel.push(address, frame_len);
        }
        if checksum != Checksum::None {
            self.sum_up(checksum, index, way.umem, address, &mut header[..header_len]);
        }
        // The hole lies before the payload, inside the region that the application handed over; the kernel sees the descriptors later.
        way.umem.copy_to(address, &header[..header_len]);
        if let Some(sent) = sent {
            sent(way.umem, address, frame_len);
        }
        Some(frame_len)
    }

    /// Puts up to `room` of the packets without a payload on the ring, as long as there are frames. Gives how many, and their bytes.
    #[cold]
    #[inline(never)]
    pub(super) fn put_fillers(
        &mut self,
        room: u32,
        way: &mut Way<'_, impl TxQueue>,
        header: &mut [u8; HEADER_LEN_MAX],
    ) -> (u32, u64) {
        let (mut packets, mut bytes) = (0, 0);
        while packets < room
            && packets < self.left()
            && let Template::Lm(template) = &self.template
            && let Some(frame) = way.frames.take_for_control()
        {
            let (address, header_len) = (frame.address(), template.write(header, 0, 0));
            let header = &mut header[..header_len];
            way.channel.push(address, header_len as u32);
            way.channel.checksum.complete(way.umem, address, header, &[]);
            way.umem.copy_to(address, header);
            way.frames.control_sent(frame);
            packets += 1;
            bytes += header_len as u64;
        }
        self.position += packets;
        (packets, bytes)
    }

    /// The payload of fragment `index`.
    #[inline]
    pub(super) fn payload<'a>(&self, index: u32, umem: &'a Umem) -> &'a [u8] {
        let fragment = self.geometry.fragment(index);
        let address = self.start + self.geometry.tx_frame_offset(index) + u64::from(fragment.header_len);
        // SAFETY: the payload lies inside the region that the application handed over with the message: it has no
        // reference to it any more, the kernel only reads it, and headers are written before it.
        unsafe { umem.mapping().slice(address, u64::from(fragment.len)) }
    }

    /// Completes the headers of the packet of fragment `index`, which is to lie at `address`. A message that is one datagram has one checksum,
    /// in its first fragment's headers.
    #[cold]
    #[inline(never)]
    fn sum_up(&self, checksum: Checksum, index: u32, umem: &Umem, address: u64, headers: &mut [u8]) {
        match self.template {
            Template::IpFrag(mut template) if index == 0 => {
                template.sum_up((0..self.geometry.fragment_count()).map(|index| self.payload(index, umem)));
                template.write(headers, index, self.geometry.fragment_len(index));
            }
            _ => checksum.complete(umem, address, headers, self.payload(index, umem)),
        }
    }

    /// Copies the payload of fragment `index` to a frame of its own, behind room for its headers; the frame's address.
    #[cold]
    fn copy_payload(&self, index: u32, header_len: u64, way: &mut Way<'_, impl TxQueue>) -> Option<u64> {
        let frame = way.frames.take_for_control()?;
        let address = frame.address();
        let payload = self.geometry.tx_payload_range(index);
        let len = payload.end - payload.start;
        way.umem
            .copy_within(self.start + payload.start, address + header_len, len);
        way.frames.control_sent(frame);
        way.copied.fragments += 1;
        way.copied.bytes += len;
        Some(address)
    }
}

/// Hears the UMEM address and length of each packet that goes to the ring, where somebody listens.
pub(crate) type Heard<'a> = Option<&'a mut dyn FnMut(&Umem, u64, u32)>;

/// What a packet needs on its way to the ring.
#[derive(Debug)]
pub(crate) struct Way<'a, T> {
    pub(crate) channel: &'a mut Transmit<T>,
    pub(crate) umem: &'a Umem,
    /// Longest piece of a packet for one descriptor, in bytes: a chunk.
    pub(crate) piece_len: u32,
    /// Descriptors beyond one for each packet, of what goes to the ring now: they are part of the room, and of what one wake-up takes.
    pub(crate) more_pieces: u32,
    /// Length of what went to the ring, in bytes.
    pub(crate) bytes: u64,
    /// For what must be copied, because the device reads packets itself (zero-copy mode) and takes none that crosses the end of a
    /// huge page (`xp_desc_crosses_non_contig_pg` of include/net/xsk_buff_pool.h).
    pub(crate) frames: &'a mut TransmitFrames,
    pub(crate) device_reads: bool,
    pub(crate) copied: Copied,
}

/// Fragments that were copied on their way, and their payload in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copied {
    pub(crate) fragments: u64,
    pub(crate) bytes: u64,
}

/// All outgoing messages of an endpoint, and which of them a transmit completion belongs to.
#[derive(Debug)]
pub(crate) struct OutgoingTable {
    slots: Vec<Option<Outgoing>>,
    free: Vec<u16>,
    arena_start: u64,
    /// Slot of the message in each page of the send arena.
    owner: Vec<u16>,
    digests: FragmentDigests,
}

impl OutgoingTable {
    pub(crate) fn new(arena_start: u64, arena_len: u64) -> OutgoingTable {
        OutgoingTable {
            slots: (0..OUTGOING_MAX).map(|_| None).collect(),
            free: (0..OUTGOING_MAX as u16).rev().collect(),
            arena_start,
            owner: vec![u16::MAX; (arena_len / crate::arena::PAGE_LEN) as usize],
            digests: FragmentDigests::new(arena_start, arena_len),
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Messages that can be taken now.
    #[cfg(test)]
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    pub(super) fn insert(&mut self, outgoing: Outgoing) -> u16 {
        let slot = self.free.pop().expect("room was asked for");
        if let Released::SendRegion { start, len } = outgoing.released {
            let first = ((start - self.arena_start) / crate::arena::PAGE_LEN) as usize;
            let pages = (crate::arena::pages_len(len) / crate::arena::PAGE_LEN) as usize;
            self.owner[first..first + pages].fill(slot);
        }
        self.slots[usize::from(slot)] = Some(outgoing);
        slot
    }

    #[inline]
    pub(super) fn at(&mut self, slot: u16) -> &mut Outgoing {
        self.slots[usize::from(slot)]
            .as_mut()
            .expect("a queued slot is taken")
    }

    #[inline]
    pub(super) fn at_with_digests(&mut self, slot: u16) -> (&mut Outgoing, &mut FragmentDigests) {
        let outgoing = self.slots[usize::from(slot)]
            .as_mut()
            .expect("a queued slot is taken");
        (outgoing, &mut self.digests)
    }

    /// The device is done with the packet at `address`; whether it had one of a message there. Memory that nobody needs any more is `freed`.
    #[inline]
    pub(crate) fn completed(&mut self, address: u64, freed: impl FnOnce(Released)) -> bool {
        let page = address.wrapping_sub(self.arena_start) / crate::arena::PAGE_LEN;
        let Some(&slot) = self.owner.get(page as usize) else {
            return false;
        };
        let Some(Some(outgoing)) = self.slots.get_mut(usize::from(slot)) else {
            return false;
        };
        if outgoing.in_flight > 1 {
            outgoing.in_flight -= 1;
            return true;
        }
        let had_one = outgoing.in_flight == 1;
        outgoing.in_flight = 0;
        if had_one
            && outgoing.settled
            && let Some(released) = self.free_if_done(slot)
        {
            freed(released);
        }
        had_one
    }

    /// Memory of the send arena is no message's.
    pub(crate) fn disown(&mut self, start: u64, len: u64) {
        let first = ((start - self.arena_start) / crate::arena::PAGE_LEN) as usize;
        let pages = (crate::arena::pages_len(len) / crate::arena::PAGE_LEN) as usize;
        self.owner[first..first + pages].fill(u16::MAX);
    }

    /// A channel was closed: its packets will have no completion. Returns memory that nobody needs any more.
    pub(crate) fn abandoned(&mut self, channel: usize) -> Vec<Released> {
        let mut released = Vec::new();
        for slot in 0..self.slots.len() as u16 {
            if let Some(outgoing) = &mut self.slots[usize::from(slot)]
                && outgoing.channel == channel
            {
                outgoing.in_flight = 0;
                released.extend(self.free_if_done(slot));
            }
        }
        released
    }

    /// The message in a slot has come to its end: what its application is told, and memory that nobody needs any more.
    pub(crate) fn settle(
        &mut self,
        slot: u16,
        peer: PeerId,
        outcome: Outcome,
        now_ns: u64,
    ) -> (Completion, Option<Released>) {
        let outgoing = self.at(slot);
        outgoing.settled = true;
        if let Some(stream) = &mut outgoing.stream {
            stream.end();
        }
        let completion = Completion {
            token: outgoing.token,
            peer,
            tag: outgoing.tag,
            len: outgoing.len(),
            latency_ns: now_ns.saturating_sub(outgoing.submitted_ns),
            outcome,
        };
        (completion, self.free_if_done(slot))
    }

    /// The writer of the message in a slot writes no more. Returns memory that nobody needs any more.
    pub(crate) fn writer_is_gone(&mut self, slot: u16) -> Option<Released> {
        if let Some(stream) = &mut self.at(slot).stream {
            stream.is_held = false;
        }
        self.free_if_done(slot)
    }

    fn free_if_done(&mut self, slot: u16) -> Option<Released> {
        let outgoing = self.at(slot);
        let is_held = outgoing.stream.as_ref().is_some_and(|stream| stream.is_held);
        if outgoing.in_flight > 0 && !mutant!(SentMemoryFreed) || !outgoing.settled || is_held {
            return None;
        }
        let released = outgoing.released;
        self.slots[usize::from(slot)] = None;
        self.free.push(slot);
        Some(released)
    }
}
