//! Landing: where the fragments of large messages arrive. Steps 7 and 8 of the data's path: the gate's log and
//! the RX ring of the landing channel come in, whole messages go to [`crate::engine`].
//!
//! For payload stride `P`, header length `H` and zone start `R`, the packet of fragment `k` is posted at
//! `R + k·P − H`, in descending `k` inside a window. Each payload ends exactly where the packet before it put
//! its headers, and overwrites them (LM §3.2, figure 2):
//!
//! ```text
//!   window w (fragments lo..=hi)                window w+1
//!   ──────────────────────────────┐tail├────────────────────────
//!   lo │ lo+1 │  ...  │ hi        │ H  │ lo' │ lo'+1 │ ...
//!                                 └────┘
//!            headers of lo' land on the last H bytes of window w
//! ```
//! Those tail bytes are saved when `hi` has arrived, the entry of `lo'` is posted only after that, and they are
//! put back when `lo'` has its RX descriptor (invariant I5). Everything else needs no copy.
//!
//! What makes a message final (I1, I3): the n-th descriptor and the n-th log entry agree on place, length,
//! message and index; the header of each window's lowest fragment, which nothing has overwritten yet, names
//! the same; and the kernel's drop counters did not move. Anything else is a violation: nothing of the session
//! is shown, the channel is built anew.

use std::collections::VecDeque;
use std::ops::Range;

use lm_ebpf::Log;
use lm_protocol::geometry::{Geometry, Layout, Wire};
use lm_protocol::serial;
use lm_protocol::window::{TailRule, WindowShape};
use lm_protocol::wire::lm::HEADER_LEN;
use lm_protocol::wire::lm::LmHeader;
use lm_protocol::zone::ZoneShape;

use crate::arena::Arena;
use crate::config::IN_FLIGHT_MESSAGES_MAX;
use crate::memory::{PACKET_HEADROOM, Umem, fill_address_is_valid};
use crate::peer::PeerId;
use crate::ring::{FillRing, RxRing};

/// Longest header that a saved tail can hold: Ethernet with two tags, IPv6, UDP, LM, and a driver's prefix.
const TAIL_LEN_MAX: usize = 128;

/// A landing zone taken from the arena: what goes back is exactly this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// Why a session's packets can no longer be trusted to lie where they should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// A descriptor came for which nothing was posted.
    Unposted,
    /// The descriptor's address is not the next posted one.
    Address,
    /// The log's sequence number is not the next one.
    Sequence,
    /// The log names another fragment than the slot's: a packet before it was lost (displacement).
    Displaced,
    /// Log and descriptor, or log and geometry, disagree on the length.
    Length,
    /// The header that survived in a window's lowest slot names something else.
    Header,
    /// The kernel counted a dropped packet on this socket.
    Statistics,
    /// Generic mode: two CPUs ran the gate for this queue.
    Processor,
}

impl Violation {
    pub(crate) const ALL: [Violation; 8] = [
        Violation::Unposted,
        Violation::Address,
        Violation::Sequence,
        Violation::Displaced,
        Violation::Length,
        Violation::Header,
        Violation::Statistics,
        Violation::Processor,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Violation::Unposted => "landing_unposted",
            Violation::Address => "landing_address",
            Violation::Sequence => "landing_sequence",
            Violation::Displaced => "landing_displaced",
            Violation::Length => "landing_length",
            Violation::Header => "landing_header",
            Violation::Statistics => "landing_statistics",
            Violation::Processor => "landing_processor",
        }
    }
}

/// A message that was announced and is not settled.
#[derive(Debug)]
struct Arriving {
    number: u32,
    tag: u64,
    geometry: Geometry,
    /// Length of the message; the geometry may have padding behind it.
    len: u64,
    announced_ns: u64,
    zone: Option<Zone>,
    /// `R`: UMEM address of the first payload byte.
    payload: u64,
    /// Positions (transmit order) whose fill entry is posted.
    posted: u32,
    /// Positions whose RX descriptor was taken.
    received: u32,
    /// When a window's lowest entry may be posted and which tail is where (I5).
    rule: TailRule,
    /// Saved tails; [`TailRule::slot`] says which window uses which.
    tails: [[u8; TAIL_LEN_MAX]; 2],
}

impl Arriving {
    /// UMEM addresses of window `window`'s tail: where the header of the next window's lowest frame goes.
    fn tail_range(&self, window: u32, terms: &InboundTerms) -> Range<u64> {
        let lowest = (window + 1) * terms.window.fragments();
        let header = self.geometry.rx_header_range(lowest);
        self.payload.wrapping_add_signed(header.start) - u64::from(terms.prefix)
            ..self.payload.wrapping_add_signed(header.end)
    }
}

/// A message whose every byte has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Landed {
    pub(crate) zone: Zone,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) number: u32,
    pub(crate) tag: u64,
    pub(crate) announced_ns: u64,
}

/// A message that was given up: which fragments did not arrive where they should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    pub(crate) number: u32,
    pub(crate) tag: u64,
    pub(crate) len: u64,
    /// Fragment indices, ascending.
    pub(crate) missing: Vec<Range<u32>>,
}

/// What the session's sender agreed to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboundTerms {
    pub(crate) peer: PeerId,
    pub(crate) key: u64,
    pub(crate) layout: Layout,
    pub(crate) window: WindowShape,
    pub(crate) chunk_len: u32,
    pub(crate) prefix: u8,
    pub(crate) first_message: u32,
    pub(crate) messages_in_flight: u32,
    /// Packets that the sender may have on the way.
    pub(crate) on_the_way: u32,
    pub(crate) max_message_len: u64,
    pub(crate) registered_len: u64,
    /// Generic mode: every packet of the session must have passed the gate on one CPU (invariant I3a).
    pub(crate) one_processor: bool,
}

/// The active session of the landing channel, and its place in the channel's order.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) terms: InboundTerms,
    messages: VecDeque<Arriving>,
    complete: VecDeque<Landed>,
    /// First message in `messages` that is not fully posted.
    posting: usize,
    /// Next message number to be announced.
    pub(crate) announced: u32,
    /// All messages before this number are settled.
    pub(crate) delivered: u32,
    /// Cumulative packets posted and received since the session began (mod 2^32).
    pub(crate) posted_packets: u32,
    received_packets: u32,
    /// Last packet or announcement, for the message's time limit.
    pub(crate) progress_ns: u64,
    /// A pause of our own was forgiven since the last packet.
    forgiven: bool,
    processor: Option<u8>,
    pub(crate) restored_bytes: u64,
}

/// Counts of the landing channel that outlive a session: its n-th packet is the log's n-th entry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChannelOrder {
    pub(crate) posted: u64,
    pub(crate) received: u64,
}

/// What a burst of descriptors brought.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Burst {
    pub(crate) packets: u32,
    pub(crate) window_ended: bool,
}

impl Inbound {
    pub(crate) fn new(terms: InboundTerms, now_ns: u64) -> Inbound {
        Inbound {
            terms,
            messages: VecDeque::with_capacity(IN_FLIGHT_MESSAGES_MAX as usize),
            complete: VecDeque::with_capacity(IN_FLIGHT_MESSAGES_MAX as usize),
            posting: 0,
            announced: terms.first_message,
            delivered: terms.first_message,
            posted_packets: 0,
            received_packets: 0,
            progress_ns: now_ns,
            forgiven: false,
            processor: None,
            restored_bytes: 0,
        }
    }

    /// Bytes of the arena that a message of this session takes, and where its payload begins in them.
    fn zone_of(&self, geometry: &Geometry) -> (u64, u64) {
        let shape = ZoneShape::new(geometry, self.terms.chunk_len, self.terms.prefix);
        (shape.total_len(), shape.message_start())
    }

    /// Takes an announcement. `false`: not the next one, too many, or longer than was agreed; nothing changed.
    pub(crate) fn announce(&mut self, number: u32, len: u64, tag: u64, now_ns: u64) -> bool {
        if number != self.announced
            || len > self.terms.max_message_len
            || self.messages.len() as u32 >= self.terms.messages_in_flight
        {
            return false;
        }
        let Ok(geometry) = self.terms.layout.session_message(len) else {
            return false;
        };
        if self.messages.is_empty() {
            self.progress_ns = now_ns;
        }
        self.messages.push_back(Arriving {
            number,
            tag,
            geometry,
            len,
            announced_ns: now_ns,
            zone: None,
            payload: 0,
            posted: 0,
            received: 0,
            rule: TailRule::new(self.terms.window, geometry.fragment_count()),
            tails: [[0; TAIL_LEN_MAX]; 2],
        });
        self.announced = number.wrapping_add(1);
        true
    }

    /// Posts as many fill entries as rings, memory and I5 allow, in the session's packet order, so that at most
    /// `posted_max` are out. Regions that the application chose (`chosen`) are used before the arena.
    pub(crate) fn post(
        &mut self,
        fill: &mut FillRing,
        log: &mut Log,
        order: &mut ChannelOrder,
        arena: &mut Arena,
        chosen: &mut VecDeque<Zone>,
        posted_max: u32,
    ) -> u32 {
        // I3d: the RX ring, at least `posted_max` long, has room for everything that is posted.
        let in_ring = (order.posted - order.received) as u32;
        let room = posted_max.saturating_sub(in_ring);
        let room = fill.free(room.min(fill.ring_len())).min(room);
        let window_len = self.terms.window.fragments();
        let mut written = 0;
        'messages: while written < room && self.posting < self.messages.len() {
            if self.messages[self.posting].zone.is_none() && !self.place(arena, chosen) {
                break;
            }
            let message = &mut self.messages[self.posting];
            if message.posted == 0 {
                log.set_message_limit(message.number);
            }
            let count = message.geometry.fragment_count();
            while message.posted < count && written < room {
                let position = message.posted;
                let window = position / window_len;
                let window_end = count.min((window + 1) * window_len);
                let lowest = position + 1 == window_end;
                // I5: the tail of the window before must have arrived and been saved first. The fragment it
                // belongs to is the first of that window to arrive, so posting runs up to two windows ahead.
                if lowest && !message.rule.may_post_lowest(window) {
                    break 'messages;
                }
                let index = self.terms.window.index_at(position, count);
                let start = message
                    .payload
                    .wrapping_add_signed(message.geometry.rx_frame_start(index));
                fill.write(written, start - PACKET_HEADROOM);
                written += 1;
                message.posted += 1;
            }
            if message.posted == count {
                self.posting += 1;
            }
        }
        if written > 0 {
            fill.submit(written);
            order.posted += u64::from(written);
            self.posted_packets = self.posted_packets.wrapping_add(written);
            // After the entries themselves, so that the gate never accepts a packet without an entry (I3c).
            log.set_posted(order.posted);
        }
        written
    }

    /// Finds memory for the message at `posting`.
    fn place(&mut self, arena: &mut Arena, chosen: &mut VecDeque<Zone>) -> bool {
        let geometry = self.messages[self.posting].geometry;
        let (zone_len, front_margin) = self.zone_of(&geometry);
        let zone = match chosen.front() {
            Some(zone) if zone.len >= zone_len => chosen.pop_front(),
            _ => arena
                .allocate(zone_len)
                .map(|start| Zone { start, len: zone_len }),
        };
        let Some(zone) = zone else { return false };
        let payload = zone.start + front_margin;
        // I2: every entry of this message is valid and writes inside the zone. The lowest and the highest
        // bound all others.
        for index in [0, geometry.fragment_count() - 1] {
            let entry = payload.wrapping_add_signed(geometry.rx_frame_start(index)) - PACKET_HEADROOM;
            assert!(
                entry >= zone.start
                    && entry + u64::from(self.terms.chunk_len) <= zone.start + zone.len
                    && fill_address_is_valid(entry, self.terms.chunk_len, self.terms.registered_len),
                "fill entry outside its landing zone"
            );
        }
        let message = &mut self.messages[self.posting];
        message.zone = Some(zone);
        message.payload = payload;
        true
    }

    /// Takes up to `max` descriptors, pairs each with its log entry and places it.
    ///
    /// # Errors
    /// The first violation of I3. Nothing of the session may be shown after that.
    pub(crate) fn receive(
        &mut self,
        rx: &mut RxRing,
        log: &Log,
        order: &mut ChannelOrder,
        umem: &Umem,
        max: u32,
        now_ns: u64,
    ) -> Result<Burst, Violation> {
        let packets = rx.available(max);
        let mut burst = Burst {
            packets,
            window_ended: false,
        };
        if packets == 0 {
            return Ok(burst);
        }
        let mut result = Ok(());
        for offset in 0..packets {
            let descriptor = rx.read(offset);
            let entry = log.entry(order.received);
            let sequence = order.received as u32;
            order.received += 1;
            result = self.pair(
                descriptor.start(),
                descriptor.len,
                &entry,
                sequence,
                umem,
                &mut burst,
            );
            if result.is_err() {
                break;
            }
        }
        rx.release(packets);
        self.progress_ns = now_ns;
        self.forgiven = false;
        result.map(|()| burst)
    }

    #[inline]
    fn pair(
        &mut self,
        start: u64,
        len: u32,
        entry: &lm_ebpf::LogEntry,
        sequence: u32,
        umem: &Umem,
        burst: &mut Burst,
    ) -> Result<(), Violation> {
        let Some(message) = self.messages.front_mut() else {
            return Err(Violation::Unposted);
        };
        let position = message.received;
        if position >= message.posted {
            return Err(Violation::Unposted);
        }
        let geometry = &message.geometry;
        let count = geometry.fragment_count();
        let index = self.terms.window.index_at(position, count);
        let expected = message
            .payload
            .wrapping_add_signed(geometry.rx_frame_start(index));
        if start != expected {
            return Err(Violation::Address);
        }
        if entry.sequence != sequence {
            return Err(Violation::Sequence);
        }
        if entry.message != message.number || entry.index != index {
            return Err(Violation::Displaced);
        }
        let frame_len = u32::from(geometry.fragment(index).frame_len());
        let unpadded_len = len.checked_sub(u32::from(entry.padding_len));
        if u32::from(entry.frame_len) != len || unpadded_len != Some(frame_len) {
            return Err(Violation::Length);
        }
        if self.terms.one_processor && *self.processor.get_or_insert(entry.cpu) != entry.cpu {
            return Err(Violation::Processor);
        }
        message.received += 1;
        self.received_packets = self.received_packets.wrapping_add(1);

        // The window's highest fragment is here: save its last bytes before the next window's lowest entry
        // is posted on them.
        if let Some(tail) = message.rule.tail_to_save(self.terms.window, index, count) {
            let range = message.tail_range(tail, &self.terms);
            let slot = &mut message.tails[TailRule::slot(tail)];
            umem.copy_from(range.start, &mut slot[..(range.end - range.start) as usize]);
            let saved = message.rule.tail_saved(tail);
            debug_assert!(saved, "tails are saved in order");
        }
        if self.terms.window.is_lowest(index) {
            burst.window_ended = true;
            check_header(&self.terms, message, start, len, index, umem)?;
            if let Some(tail) = message.rule.lowest_arrived(self.terms.window.window_of(index)) {
                let range = message.tail_range(tail, &self.terms);
                let tail_len = (range.end - range.start) as usize;
                umem.copy_to(range.start, &message.tails[TailRule::slot(tail)][..tail_len]);
                self.restored_bytes += tail_len as u64;
            }
        }
        if message.received == count {
            self.land();
        }
        Ok(())
    }

    /// The front message is whole.
    fn land(&mut self) {
        let message = self
            .messages
            .pop_front()
            .expect("the message that just became whole");
        self.posting -= 1;
        self.complete.push_back(Landed {
            zone: message.zone.expect("a posted message has a zone"),
            address: message.payload,
            len: message.len,
            number: message.number,
            tag: message.tag,
            announced_ns: message.announced_ns,
        });
    }

    /// The next whole message. Call only after the kernel's statistics were found unchanged.
    pub(crate) fn next_landed(&mut self) -> Option<Landed> {
        let landed = self.complete.pop_front()?;
        self.delivered = landed.number.wrapping_add(1);
        Some(landed)
    }

    /// Whether every posted entry was used and every announced message settled.
    pub(crate) fn is_idle(&self) -> bool {
        self.messages.is_empty() && self.complete.is_empty()
    }

    /// Nanoseconds without progress while packets are owed to us; 0 when the next move is not the sender's.
    pub(crate) fn stalled_ns(&self, now_ns: u64) -> u64 {
        match self.messages.front() {
            Some(message) if message.posted > message.received => now_ns.saturating_sub(self.progress_ns),
            _ => 0,
        }
    }

    /// Begins the message's time limit anew after a pause of our own, once until a packet comes: perhaps the sender
    /// waited for a credit of ours.
    pub(crate) fn forgive_pause(&mut self, now_ns: u64) {
        if !self.forgiven {
            self.forgiven = true;
            self.progress_ns = now_ns;
        }
    }

    /// How many packets the sender may have sent (cumulative, mod 2^32): as many as are posted, and not more on
    /// the way than the path can hold.
    pub(crate) fn credit(&self, on_the_way: u32) -> u32 {
        let ahead = self
            .posted_packets
            .wrapping_sub(self.received_packets)
            .min(on_the_way);
        self.received_packets.wrapping_add(ahead)
    }

    /// Whether fill entries are posted that no packet has used.
    pub(crate) fn awaits_packets(&self) -> bool {
        self.posted_packets != self.received_packets
    }

    /// Cumulative packets landed since the session began (mod 2^32).
    pub(crate) fn received_packets(&self) -> u32 {
        self.received_packets
    }

    /// Gives the session up: its zones (to be freed only when the channel was built anew, I1), and what is
    /// missing of each message.
    pub(crate) fn give_up(&mut self) -> (Vec<GivenUp>, Vec<Zone>) {
        let mut zones = Vec::new();
        let mut given_up = Vec::new();
        for landed in self.complete.drain(..) {
            zones.push(landed.zone);
            let count = self
                .terms
                .layout
                .session_message(landed.len)
                .map_or(1, |g| g.fragment_count());
            given_up.push(GivenUp {
                number: landed.number,
                tag: landed.tag,
                len: landed.len,
                missing: std::iter::once(0..count).collect(),
            });
        }
        for message in self.messages.drain(..) {
            zones.extend(message.zone);
            given_up.push(GivenUp {
                number: message.number,
                tag: message.tag,
                len: message.len,
                missing: missing_ranges(
                    &self.terms.window,
                    message.received,
                    message.geometry.fragment_count(),
                ),
            });
        }
        self.posting = 0;
        self.delivered = self.announced;
        (given_up, zones)
    }

    /// Whether an announcement with this number was taken already.
    pub(crate) fn knows(&self, number: u32) -> bool {
        serial::precedes(number, self.announced)
    }
}

/// I3: the header in a window's lowest slot is still there, because nothing lower was posted behind it. It
/// must name this session, message and index.
fn check_header(
    terms: &InboundTerms,
    message: &Arriving,
    start: u64,
    len: u32,
    index: u32,
    umem: &Umem,
) -> Result<(), Violation> {
    let mut header = [0u8; TAIL_LEN_MAX];
    let header_len = usize::from(terms.layout.fragment_header_len(index)).min(len as usize);
    umem.copy_from(start, &mut header[..header_len]);
    let header = &header[..header_len];
    let names_this = match terms.layout.wire() {
        Wire::Lm => {
            let expected = LmHeader::Data {
                session_key: terms.key,
                message: message.number,
                index,
                count: message.geometry.fragment_count(),
            };
            let found = header
                .len()
                .checked_sub(HEADER_LEN)
                .map(|at| LmHeader::decode(&header[at..]));
            let payload_len = message.geometry.fragment_len(index);
            found == Some(Ok((expected, payload_len)))
        }
        // The gate has checked addresses and offset; what it cannot have confused is the identification.
        Wire::IpFrag => {
            let ip = terms.layout.link().ethernet_len() as usize;
            header.get(ip + 4..ip + 6) == Some(&(message.number as u16).to_be_bytes()[..])
                && header.get(ip + 6..ip + 8).is_some_and(|field| {
                    let offset = u32::from(u16::from_be_bytes([field[0], field[1]]) & 0x1fff) * 8;
                    offset == index * u32::from(terms.layout.payload_len())
                })
        }
    };
    if names_this {
        Ok(())
    } else {
        Err(Violation::Header)
    }
}

/// Fragment indices at positions `received..count` in transmit order: what is left of the current window lies
/// at its low end, and all windows behind it are missing.
fn missing_ranges(window: &WindowShape, received: u32, count: u32) -> Vec<Range<u32>> {
    if received >= count {
        return Vec::new();
    }
    let window_len = window.fragments();
    let low = received / window_len * window_len;
    let highest_missing = window.index_at(received, count);
    let next_window = count.min(low + window_len);
    let rest = low..highest_missing + 1;
    let later = next_window..count;
    match (later.is_empty(), rest.end == later.start) {
        (true, _) => std::iter::once(rest).collect(),
        (false, true) => std::iter::once(rest.start..later.end).collect(),
        (false, false) => Vec::from([rest, later]),
    }
}
