//! The simulated kernel's and driver's side of one queue: what happens between a packet and the RX ring, in both modes.
//!
//! ```text
//!  copy mode       packet ─▶ gate ─▶ entry taken ─▶ packet copied 256 bytes behind it ─▶ RX ring
//!
//!  zero-copy mode  entries taken ahead, in batches
//!                  packet ─▶ written into the oldest of them ─▶ … more packets … ─▶ gate, on what lies there by then
//!                            ─▶ RX ring, or the frame goes to the free list
//! ```
//! Measured on `igb` and `virtio-net` in zero-copy mode: where frames overlap, the program finds a packet's headers overwritten by
//! the payload of the next ones; what the program passes is copied and its frame comes back *before* entries that were never
//! used, last in first out; `virtio-net` writes a header of its own before the packet; some devices pad what they write.

use std::collections::VecDeque;
use std::ops::Range;

use super::{HostConfig, WireCounters};
use lm_dataplane::memory::{Mapping, PACKET_HEADROOM, crosses_huge_page, fill_address_is_valid};
use lm_dataplane::ring::{Descriptor, SimCompletion, SimFill, SimRx, SimTx};
use lm_dataplane::xsk::XdpStatistics;

/// What a zero-copy device writes before a packet ([`ZeroCopy::prefix_len`]).
pub const PREFIX_BYTE: u8 = 0xa1;
/// What a zero-copy device writes behind a packet ([`ZeroCopy::pad_to`]).
pub const PADDING_BYTE: u8 = 0xa2;

/// How a host's driver receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Semantics {
    /// The program runs first; the kernel copies what it redirects.
    #[default]
    Copy,
    /// The device writes first.
    ZeroCopy(ZeroCopy),
}

/// A zero-copy device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroCopy {
    /// Entries that the driver takes from the fill ring at once (16 to 64 in real drivers), at least 1.
    pub batch: u32,
    /// Entries that the device's own ring holds, at least twice `batch`, or 1.
    pub ring_len: u32,
    /// Packets that are written before the program looks at the first of them, at least 1. It looks earlier when
    /// nothing more comes: at the end of a wake-up.
    pub burst: u32,
    /// Bytes that the device writes before each packet, at most 256 (`virtio-net`: 10 to 12).
    pub prefix_len: u32,
    /// Behind each packet the device writes on to the next address that is a multiple of this, within the frame; 0 or 1:
    /// nothing.
    pub pad_to: u32,
    /// The driver must not be given fewer entries than it asks for where the request goes over the end of a ring of this length,
    /// unless they end there: `igb`, see [`lm_dataplane::port::Caps::lap`]. It counts each time ([`Wire::short_laps`](super::Wire::short_laps)). 1: it
    /// takes what there is.
    pub lap: u32,
}

impl Default for ZeroCopy {
    fn default() -> ZeroCopy {
        ZeroCopy {
            batch: 16,
            ring_len: 64,
            burst: 64,
            prefix_len: 0,
            pad_to: 0,
            lap: 1,
        }
    }
}

/// A packet in its frame that no program has seen yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    pub(super) entry: u64,
    pub(super) len: u32,
    /// An impairment: the RX ring is to look full.
    rx_full: bool,
}

/// The device of a zero-copy queue.
#[derive(Debug)]
struct Device {
    shape: ZeroCopy,
    /// Entries taken from the fill ring, in the order of their use.
    posted: VecDeque<u64>,
    written: VecDeque<Written>,
    /// Entries ever taken, and how often the driver was given too few.
    taken: u64,
    short_laps: u64,
    /// The driver is to run: packets were written, or it was woken.
    interrupted: bool,
}

/// What a fault does to a packet that was redirected.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Exhaustion {
    pub(super) fill_empty: bool,
    pub(super) rx_full: bool,
}

/// The kernel's end of a channel.
#[derive(Debug)]
pub(super) struct SimChannel {
    pub(super) fill: SimFill,
    pub(super) rx: SimRx,
    pub(super) tx: SimTx,
    pub(super) completion: SimCompletion,
    pub(super) registered_len: u64,
    pub(super) statistics: XdpStatistics,
    /// Frames that came back without a descriptor: used first, from the end.
    returned: Vec<u64>,
    device: Option<Device>,
    /// Where packets may be written, if a test said so, and how often one was written elsewhere.
    bounds: Option<Range<u64>>,
    pub(super) strayed: u64,
}

impl SimChannel {
    pub(super) fn new(
        rings: (SimFill, SimRx, SimTx, SimCompletion),
        registered_len: u64,
        semantics: Semantics,
        bounds: Option<Range<u64>>,
    ) -> SimChannel {
        let (fill, rx, tx, completion) = rings;
        let device = match semantics {
            Semantics::Copy => None,
            Semantics::ZeroCopy(shape) => Some(Device {
                posted: VecDeque::with_capacity(shape.ring_len as usize),
                written: VecDeque::with_capacity(shape.burst as usize),
                taken: 0,
                short_laps: 0,
                // Drivers look for entries when they get a socket.
                interrupted: true,
                shape,
            }),
        };
        SimChannel {
            returned: Vec::with_capacity(fill.ring_len() as usize),
            fill,
            rx,
            tx,
            completion,
            registered_len,
            statistics: XdpStatistics::default(),
            device,
            bounds,
            strayed: 0,
        }
    }

    /// The interface goes down: a driver in zero-copy mode gives back what it had (`igb_clean_rx_ring_zc`). Gives the number of packets
    /// that are lost by that.
    pub(super) fn go_down(&mut self) -> u64 {
        let lost = self.device.as_ref().map_or(0, |device| device.written.len());
        if let Some(device) = &mut self.device {
            let written = device.written.drain(..).map(|written| written.entry);
            self.returned.extend(written.chain(device.posted.drain(..)));
        }
        lost as u64
    }

    pub(super) fn short_laps(&self) -> u64 {
        self.device.as_ref().map_or(0, |device| device.short_laps)
    }

    pub(super) fn is_zero_copy(&self) -> bool {
        self.device.is_some()
    }

    pub(super) fn set_bounds(&mut self, bounds: Range<u64>) {
        self.bounds = Some(bounds);
    }

    /// As `xp_unaligned_validate_desc` of `net/xdp/xsk_queue.h`. A device reads physical memory: in zero-copy mode a packet must not
    /// cross the end of a huge page.
    pub(super) fn accepts(&self, descriptor: Descriptor, config: &HostConfig) -> bool {
        let Some(start) = descriptor.start().checked_sub(config.tx_metadata_len.into()) else {
            return false;
        };
        let len = descriptor.len.saturating_add(config.tx_metadata_len);
        if self.is_zero_copy() && crosses_huge_page(start, len.max(1)) {
            return false;
        }
        let pieces = match config.multi_buffer {
            true => libc::XDP_PKT_CONTD,
            false => 0,
        };
        let metadata = match config.tx_metadata_len {
            0 => 0,
            _ => libc::XDP_TX_METADATA,
        };
        descriptor.options & !(pieces | metadata) == 0
            && descriptor.len > 0
            && len <= config.chunk_len
            && start < self.registered_len
            && u64::from(len) <= self.registered_len - start
    }

    /// Copy mode: a packet that the gate redirected. As `__xsk_rcv` of `net/xdp/xsk.c` in unaligned mode.
    pub(super) fn receive(
        &mut self,
        (mapping, chunk_len, multi_buffer): (&Mapping, u32, bool),
        packet: &[u8],
        exhaustion: Exhaustion,
        counters: &mut WireCounters,
    ) {
        let capacity = (u64::from(chunk_len) - PACKET_HEADROOM) as usize;
        if multi_buffer && packet.len() > capacity {
            self.receive_pieces(
                (mapping, chunk_len),
                packet.chunks(capacity),
                exhaustion,
                counters,
            );
            return;
        }
        if packet.len() > capacity {
            self.statistics.rx_dropped += 1;
            counters.ring_lost += 1;
            return;
        }
        let entry = match exhaustion.fill_empty {
            true => None,
            false => self.next_frame(chunk_len),
        };
        let Some(entry) = entry else {
            self.statistics.rx_fill_ring_empty += 1;
            self.statistics.rx_dropped += 1;
            counters.ring_lost += 1;
            return;
        };
        self.put(mapping, entry + PACKET_HEADROOM, packet);
        self.show(entry, packet.len() as u32, exhaustion.rx_full, counters);
    }

    /// A packet of several frames: all of them or none, and the RX ring is looked at first.
    fn receive_pieces(
        &mut self,
        (mapping, chunk_len): (&Mapping, u32),
        pieces: std::slice::Chunks<'_, u8>,
        exhaustion: Exhaustion,
        counters: &mut WireCounters,
    ) {
        let count = pieces.len() as u32;
        let posted = self.returned.len() as u32 + self.fill.available(count);
        if exhaustion.fill_empty || posted < count {
            self.statistics.rx_fill_ring_empty += 1;
            self.statistics.rx_dropped += 1;
            counters.ring_lost += 1;
            return;
        }
        if exhaustion.rx_full || self.rx.free(count) < count {
            self.statistics.rx_ring_full += 1;
            counters.ring_lost += 1;
            return;
        }
        for (at, piece) in (0..count).zip(pieces) {
            let Some(entry) = self.next_frame(chunk_len) else {
                // The kernel would stop here as well: an invalid entry among those that it counted.
                panic!("an invalid fill entry for a packet of several frames");
            };
            self.put(mapping, entry + PACKET_HEADROOM, piece);
            let descriptor = Descriptor::received(entry, PACKET_HEADROOM as u16, piece.len() as u32);
            let descriptor = match at + 1 < count {
                true => descriptor.continued(),
                false => descriptor,
            };
            self.rx.write(at, descriptor);
        }
        self.rx.submit(count);
        counters.received += 1;
    }

    /// Writes a packet's descriptor; without room for it the packet is lost and its frame used before new entries.
    fn show(&mut self, entry: u64, len: u32, rx_full: bool, counters: &mut WireCounters) {
        if rx_full || self.rx.free(1) == 0 {
            self.statistics.rx_ring_full += 1;
            self.returned.push(entry);
            counters.ring_lost += 1;
            return;
        }
        self.rx
            .write(0, Descriptor::received(entry, PACKET_HEADROOM as u16, len));
        self.rx.submit(1);
        counters.received += 1;
    }

    /// What the kernel or the device does to memory.
    fn put(&mut self, mapping: &Mapping, address: u64, bytes: &[u8]) {
        let end = address + bytes.len() as u64;
        if let Some(bounds) = &self.bounds
            && !(bounds.start <= address && end <= bounds.end)
        {
            self.strayed += 1;
        }
        let frame = mapping.pointer(address, bytes.len() as u64);
        // SAFETY: the range lies inside the mapping; its owner posted the entry and leaves the frame alone until the RX
        // descriptor. `bytes` is the wire's own memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), frame.as_ptr(), bytes.len()) };
    }

    /// Writes one byte at `address`, where an entry that is posted and not shown lets the kernel or the device write (I1): a packet of
    /// up to `frame_len` bytes in copy mode, else all from the prefix to the chunk's end. `false`: none does.
    pub(super) fn rewrite(
        &mut self,
        (mapping, chunk_len, frame_len): (&Mapping, u32, u32),
        address: u64,
        byte: u8,
    ) -> bool {
        let unread = self.fill.available(u32::MAX);
        let posted = (0..unread).map(|at| self.fill.read(at));
        let mut held: Vec<u64> = posted.chain(self.returned.iter().copied()).collect();
        let mut reach = (0, PACKET_HEADROOM + u64::from(frame_len));
        if let Some(device) = &self.device {
            held.extend(&device.posted);
            held.extend(device.written.iter().map(|written| written.entry));
            reach = (u64::from(device.shape.prefix_len), u64::from(chunk_len));
        }
        let covers = |&entry: &u64| (entry + PACKET_HEADROOM - reach.0..entry + reach.1).contains(&address);
        let may = held.iter().any(covers);
        if may {
            self.put(mapping, address, &[byte]);
        }
        may
    }

    fn next_frame(&mut self, chunk_len: u32) -> Option<u64> {
        if let Some(entry) = self.returned.pop() {
            return Some(entry);
        }
        while self.fill.available(1) == 1 {
            let entry = self.fill.read(0);
            self.fill.release(1);
            // In zero-copy mode a chunk must be physically contiguous, too (`xp_check_unaligned`).
            let is_whole = !self.is_zero_copy() || !crosses_huge_page(entry, chunk_len);
            if fill_address_is_valid(entry, chunk_len, self.registered_len) && is_whole {
                return Some(entry);
            }
        }
        None
    }

    /// Zero-copy mode: the driver is woken, and runs behind the packets that are on the way: an interrupt comes later.
    pub(super) fn wake(&mut self) {
        if let Some(device) = &mut self.device {
            device.interrupted = true;
        }
    }

    /// Zero-copy mode: where the driver runs, it takes entries ahead, a batch at a time, as far as its ring has room for whole batches; it asks
    /// to be woken when there were none. Without an interrupt it does nothing.
    pub(super) fn take_ahead(&mut self, chunk_len: u32) {
        let interrupted = self
            .device
            .as_mut()
            .map(|device| std::mem::take(&mut device.interrupted));
        let Some(shape) =
            { self.device.as_ref().filter(|_| interrupted == Some(true)) }.map(|device| device.shape)
        else {
            return;
        };
        let mut taken = 0;
        let posted = self.device.as_ref().map_or(0, |device| device.posted.len()) as u32;
        let room = shape.ring_len.saturating_sub(posted);
        let wanted = room / shape.batch.max(1) * shape.batch.max(1);
        while taken < wanted
            && let Some(entry) = self.next_frame(chunk_len)
        {
            taken += 1;
            if let Some(device) = &mut self.device {
                device.posted.push_back(entry);
            }
        }
        if let Some(device) = &mut self.device {
            let at = device.taken % u64::from(shape.lap.max(1));
            let ends_at = (at + u64::from(taken)) % u64::from(shape.lap.max(1));
            let is_short = taken < wanted && at + u64::from(wanted) >= u64::from(shape.lap) && ends_at != 0;
            device.short_laps += u64::from(shape.lap > 1 && taken > 0 && is_short);
            device.taken += u64::from(taken);
        }
        self.fill.set_needs_wakeup(posted + taken == 0);
    }

    /// Zero-copy mode: a packet arrives and is written into the next frame, before anybody looks at it. Whether the program is
    /// to run now, because a burst is full.
    pub(super) fn write(
        &mut self,
        mapping: &Mapping,
        chunk_len: u32,
        packet: &[u8],
        exhaustion: Exhaustion,
        counters: &mut WireCounters,
    ) -> bool {
        let Some(device) = &mut self.device else {
            return false;
        };
        let shape = device.shape;
        let fits = packet.len() as u64 <= u64::from(chunk_len) - PACKET_HEADROOM;
        let entry = match exhaustion.fill_empty || !fits {
            true => None,
            false => device.posted.pop_front(),
        };
        let Some(entry) = entry else {
            // The device drops it before the kernel hears of it. That there was no entry is counted where the driver asked
            // for one (`xp_alloc`).
            self.statistics.rx_fill_ring_empty += u64::from(fits);
            counters.device_lost += 1;
            return false;
        };
        device.interrupted = true;
        device.written.push_back(Written {
            entry,
            len: packet.len() as u32,
            rx_full: exhaustion.rx_full,
        });
        let is_full = device.written.len() >= shape.burst as usize;
        let start = entry + PACKET_HEADROOM;
        let prefix = [PREFIX_BYTE; PACKET_HEADROOM as usize];
        let prefix_len = u64::from(shape.prefix_len).min(PACKET_HEADROOM);
        self.put(mapping, start - prefix_len, &prefix[..prefix_len as usize]);
        self.put(mapping, start, packet);
        let end = start + packet.len() as u64;
        let padded = end
            .next_multiple_of(u64::from(shape.pad_to.max(1)))
            .min(entry + u64::from(chunk_len));
        let padding = [PADDING_BYTE; 4096];
        self.put(mapping, end, &padding[..(padded - end) as usize]);
        is_full
    }

    /// The next packet for the program, as it lies in memory now.
    pub(super) fn next_written(&mut self, mapping: &Mapping, packet: &mut Vec<u8>) -> Option<Written> {
        let written = self.device.as_mut()?.written.pop_front()?;
        packet.resize(written.len as usize, 0);
        let frame = mapping.pointer(written.entry + PACKET_HEADROOM, u64::from(written.len));
        // SAFETY: the range lies inside the mapping and was written by `write`; its owner leaves it alone until the RX
        // descriptor. `packet` is the wire's own memory and as long.
        unsafe { std::ptr::copy_nonoverlapping(frame.as_ptr(), packet.as_mut_ptr(), packet.len()) };
        Some(written)
    }

    /// Zero-copy mode: the program redirected the packet.
    pub(super) fn show_written(&mut self, written: Written, counters: &mut WireCounters) {
        self.show(written.entry, written.len, written.rx_full, counters);
    }

    /// Zero-copy mode: the program did not redirect the packet. Its frame is used before entries that were never used.
    pub(super) fn give_back(&mut self, written: Written) {
        self.returned.push(written.entry);
    }
}
