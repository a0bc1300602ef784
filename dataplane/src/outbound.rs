//! Outbound: large messages on their way out. Steps 2 and 3 of the data's path: send regions come from
//! [`crate::endpoint`], packets go to a TX ring of the [`crate::scheduler`].
//!
//! Headers are written into the holes just before a packet goes to the ring, windows in forward order and the
//! fragments of a window in descending order (LM §3.1). The receiver's credit (a cumulative count of fill
//! entries posted) and the number of packets in flight bound what is sent.

mod ahead;
mod announcing;
mod digests;
mod outgoing;
mod run;
mod streamed;
mod unheard;
mod unwhole;
mod windows;

use std::collections::VecDeque;
use std::num::{NonZeroU16, NonZeroU64};
use std::ops::Range;

use lm_protocol::control::Ended;
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Geometry, Layout, Wire};
use lm_protocol::integrity::Integrity;
use lm_protocol::serial;
use lm_protocol::time::Time;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::{Credit, LmHeader};
use lm_protocol::wire::{Addressing, DataTemplate, IpFragTemplate};

use crate::bounds::{LANDING_RING_LEN, OUTGOING_MAX};
use crate::completion::{Completion, Outcome, PeerId, SendToken};
use crate::mutants::mutant;
use crate::port::TxQueue;
use crate::release::Released;
use crate::scheduler::{Class, RateLimit, Shaper, Signal};
use crate::words::Words;

pub(crate) use digests::DigestsToTell;
pub(crate) use outgoing::{Copied, Heard, Outgoing, OutgoingTable, Way};
use outgoing::{HEADER_LEN_MAX, Template};
use streamed::Stall;

/// Packets of a plain datagram stream in flight: nobody gives credit there, and veth's ring has 256 entries.
const PLAIN_IN_FLIGHT: u32 = 128;

/// Ranges of fragments to be sent again that are kept; the receiver repeats requests for others.
const REPAIRS_MAX: usize = 1024;
/// What the grant said.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutboundTerms {
    pub(crate) key: u64,
    pub(crate) layout: Layout,
    pub(crate) window: WindowShape,
    pub(crate) packet_limit: u32,
    pub(crate) first_message: u32,
    pub(crate) messages_in_flight: u32,
    pub(crate) max_message_len: u64,
    /// What is to become of messages of which fragments are lost.
    pub(crate) delivery: Delivery,
    /// Whether there are digests.
    pub(crate) integrity: Integrity,
    /// Silence after which the session counts as lost.
    pub(crate) lease_ns: u64,
    /// Index of the transmit channel.
    pub(crate) channel: usize,
    /// No receiver that grants anything: plain IP fragments, unconfirmed.
    pub(crate) plain: bool,
    /// Messages may be announced and sent before they are whole.
    pub(crate) takes_streams: bool,
    /// Short messages may leave unannounced, within credit.
    pub(crate) goes_ahead: bool,
    /// Packets without a payload behind each of these.
    pub(crate) fillers: u32,
    /// Repetitions go the way of small messages.
    pub(crate) repeats_apart: bool,
    /// UDP source port of fragments; `None`: our data port.
    pub(crate) landing_port: Option<NonZeroU16>,
    /// Most bits of Ethernet frames per second.
    pub(crate) rate: Option<NonZeroU64>,
}

/// The sender's side of a session.
#[derive(Debug)]
pub(crate) struct Outbound {
    pub(crate) terms: OutboundTerms,
    /// Whether messages land, as far as the receiver said; else they take the one-copy path there.
    pub(crate) lands: bool,
    /// Messages not settled, in number order.
    queue: VecDeque<u16>,
    /// Messages that are being written, and are the session's only when they are whole.
    unwritten: VecDeque<u16>,
    /// Messages not settled that are sent while they are written, or were.
    pub(crate) streams: u32,
    has_said_whole: bool,
    /// What keeps the next message from being sent, if one of them does.
    stall: Option<Stall>,
    /// Numbers of those of which it is to be announced how much is released.
    news: Option<Range<u32>>,
    /// First in `queue` that is not fully sent.
    sending: usize,
    pub(crate) next_number: u32,
    /// Announcements sent, and those that the receiver confirmed.
    pub(crate) announced: u32,
    pub(crate) announced_confirmed: u32,
    /// The number after that of the last message that left unannounced, or will.
    ahead_to: u32,
    /// What the last one said of packets sent.
    announced_sent: u32,
    pub(crate) digests: DigestsToTell,
    /// Cumulative packets (mod 2^32).
    sent_packets: u32,
    limit: u32,
    pub(crate) delivered: u32,
    /// Fragments that the receiver asked for again: message number and indices.
    repairs: VecDeque<(u32, Range<u32>)>,
    pub(crate) resent: u64,
    pub(crate) last_announce_ns: u64,
    pub(crate) heard_ns: u64,
    /// When the receiver last allowed or confirmed something new, and how often it was asked since.
    progress_ns: u64,
    asked: u32,
    /// What the next message's facts say of the peer's session, and what those of the last one said that left since.
    pub(crate) credit_behind: Credit,
    pub(crate) credit_left: Credit,
    /// An announcement is due although no message is new (retransmission, keepalive).
    pub(crate) announce_due: bool,
    /// Since when it is known to be over, and not of how many messages the receiver had heard.
    pub(crate) over_ns: Option<u64>,
    pub(crate) rate_limit: Option<RateLimit>,
}

/// A credit that no honest receiver sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImplausibleCredit;

impl Outbound {
    pub(crate) fn new(terms: OutboundTerms, now_ns: u64) -> Outbound {
        Outbound {
            terms,
            lands: true,
            rate_limit: terms
                .rate
                .map(|rate| RateLimit::new(rate, terms.layout.max_frame_len(), Time::from_nanos(now_ns))),
            queue: VecDeque::with_capacity(OUTGOING_MAX),
            unwritten: VecDeque::new(),
            streams: 0,
            has_said_whole: false,
            stall: None,
            news: None,
            sending: 0,
            next_number: terms.first_message,
            announced: terms.first_message,
            announced_confirmed: terms.first_message,
            ahead_to: terms.first_message,
            announced_sent: 0,
            digests: DigestsToTell::new(terms.key, terms.first_message),
            sent_packets: 0,
            limit: terms.packet_limit,
            delivered: terms.first_message,
            repairs: VecDeque::with_capacity(REPAIRS_MAX),
            resent: 0,
            progress_ns: now_ns,
            asked: 0,
            last_announce_ns: now_ns,
            heard_ns: now_ns,
            credit_behind: Credit::default(),
            credit_left: Credit::default(),
            announce_due: false,
            over_ns: None,
        }
    }

    /// Whether one more message may be handed over now.
    pub(crate) fn has_room(&self) -> bool {
        (self.unsettled() as u32) < self.terms.messages_in_flight
    }

    /// Messages not settled.
    pub(crate) fn unsettled(&self) -> usize {
        self.queue.len() + self.unwritten.len()
    }

    /// When its first message that is not settled was handed over; 0: there is none.
    pub(crate) fn oldest_ns(&self, table: &mut OutgoingTable) -> u64 {
        let oldest = self.queue.front();
        oldest.map_or(0, |&slot| table.at(slot).submitted_ns)
    }

    /// Takes a message over. The caller asked for room here and in the table.
    pub(crate) fn submit(
        &mut self,
        table: &mut OutgoingTable,
        addressing: &Addressing,
        (released, start, geometry, len): (Released, u64, Geometry, u64),
        about: (u64, Words),
        token: SendToken,
        now_ns: u64,
    ) {
        let ahead = match about.1.as_bytes() {
            [] => self.ahead_of(table, &released, len),
            // Opaque bytes are in announcements alone.
            _ => None,
        };
        let memory = (released, start, ahead.unwrap_or(geometry), len);
        let mut outgoing = self.outgoing(addressing, memory, about, token, now_ns);
        if ahead.is_some() {
            (outgoing.has_facts, outgoing.fillers) = (true, self.terms.fillers);
            self.digests.has_left(self.next_number);
            self.announced = self.next_number.wrapping_add(1);
            self.ahead_to = self.announced;
        }
        self.next_number = self.next_number.wrapping_add(1);
        self.queue.push_back(table.insert(outgoing));
    }

    /// A message that is the session's next.
    fn outgoing(
        &self,
        addressing: &Addressing,
        (released, start, geometry, len): (Released, u64, Geometry, u64),
        (tag, words): (u64, Words),
        token: SendToken,
        now_ns: u64,
    ) -> Outgoing {
        Outgoing {
            released,
            start,
            geometry,
            len,
            number: self.next_number,
            tag,
            words,
            token,
            submitted_ns: now_ns,
            position: 0,
            end: geometry.fragment_count(),
            stream: None,
            in_flight: 0,
            channel: self.terms.channel,
            template: self.template(addressing, &geometry),
            settled: false,
            missing: None,
            declined: None,
            digest: None,
            has_facts: false,
            fillers: 0,
        }
    }

    /// Of the headers of the next message's packets.
    fn template(&self, addressing: &Addressing, geometry: &Geometry) -> Template {
        let mut addressing = *addressing;
        if let Some(port) = self.terms.landing_port {
            addressing.src_port = port.get();
        }
        match self.terms.layout.wire() {
            Wire::Lm => Template::Lm(DataTemplate::new(
                &addressing,
                self.terms.key,
                self.next_number,
                geometry.fragment_count(),
                self.terms.layout.payload_len(),
            )),
            Wire::IpFrag => Template::IpFrag(
                IpFragTemplate::new(&addressing, geometry, self.next_number, 0)
                    .expect("the session's layout is of this wire and this link"),
            ),
        }
    }

    /// Puts up to `budget` packets on the ring, or fewer of several descriptors, in the session's order, as far as credit and room allow.
    pub(crate) fn transmit(
        &mut self,
        table: &mut OutgoingTable,
        way: &mut Way<'_, impl TxQueue>,
        budget: u32,
        now_ns: u64,
        mut sent: Heard<'_>,
    ) -> u32 {
        let now = Time::from_nanos(now_ns);
        let budget = self.allowed(Class::Bulk, budget, now);
        let repaired = self.transmit_repairs(table, way, budget, &mut sent);
        let budget = budget - repaired;
        let credit = match self.terms.plain {
            true => PLAIN_IN_FLIGHT.saturating_sub(way.channel.in_flight()),
            false => serial::distance(self.sent_packets, self.limit).max(0) as u32,
        };
        let allowed = budget.min(credit);
        if allowed == 0 || self.sending == self.queue.len() || self.awaits_confirmation() {
            return repaired;
        }
        let allowed = allowed.min(way.channel.room(Class::Bulk));
        if allowed == 0 {
            way.channel.waited();
            return repaired;
        }
        way.more_pieces = 0;
        let (mut packets, mut bytes) = (0, 0);
        let mut header = [0u8; HEADER_LEN_MAX];
        'messages: while packets + way.more_pieces < allowed && self.sending < self.queue.len() {
            let (outgoing, digests) = table.at_with_digests(self.queue[self.sending]);
            let (count, end) = (outgoing.geometry.fragment_count(), outgoing.end);
            if outgoing.position == 0 {
                if outgoing.in_flight > 0 {
                    // Handed over again: the kernel may still read headers of the session before.
                    break;
                }
                outgoing.channel = self.terms.channel;
                if outgoing.has_facts {
                    let sent = self.sent_packets.wrapping_add(packets);
                    self.credit_left = std::mem::take(&mut self.credit_behind);
                    let about = (self.terms.key, sent, self.credit_left);
                    outgoing.write_facts(about, digests, way.umem, &self.digests.hasher);
                }
            }
            let has_digests = self.terms.integrity.has_digests() && !outgoing.has_facts;
            while outgoing.position < end && packets + way.more_pieces < allowed {
                let index = self.terms.window.index_at(outgoing.position, count);
                let most = allowed - packets - way.more_pieces;
                let (mut run, each) = outgoing.put_run((index, self.terms.window), most, way, &mut sent);
                packets += run;
                bytes += u64::from(run) * u64::from(each);
                if run == 0 {
                    let is_forward = outgoing.has_facts && mutant!(SentForward);
                    let index = if is_forward { outgoing.position } else { index };
                    let Some(len) = outgoing.put_packet(index, way, &mut header, &mut sent) else {
                        break 'messages;
                    };
                    bytes += u64::from(len);
                    packets += 1;
                    outgoing.position += 1;
                    run = 1;
                }
                if has_digests {
                    for back in 0..run {
                        outgoing.note_digest(index - back, digests, way.umem, &self.digests.hasher);
                    }
                }
            }
            if outgoing.fillers > 0 && outgoing.position >= count {
                let room = allowed - packets - way.more_pieces;
                let (fillers, len) = outgoing.put_fillers(room, way, &mut header);
                packets += fillers;
                bytes += len;
                if outgoing.left() > 0 {
                    break;
                }
            }
            if outgoing.position >= count {
                if has_digests {
                    outgoing.note_message_digest(digests, self.terms.key);
                }
                self.sending += 1;
                if self.awaits_confirmation() {
                    break;
                }
            } else if outgoing.position == end {
                // It waits for its writer, and those behind it do.
                break;
            }
        }
        self.sent_packets = self.sent_packets.wrapping_add(packets);
        way.bytes += bytes;
        self.spend(Class::Bulk, packets, bytes);
        repaired + packets
    }

    /// Sends what the receiver asked for again. It needs no credit: there is a slot for each, or it takes the one-copy
    /// path.
    fn transmit_repairs(
        &mut self,
        table: &mut OutgoingTable,
        way: &mut Way<'_, impl TxQueue>,
        budget: u32,
        sent: &mut Heard<'_>,
    ) -> u32 {
        if self.repairs.is_empty() || self.terms.repeats_apart {
            return 0;
        }
        let allowed = budget.min(way.channel.room(Class::Bulk));
        way.more_pieces = 0;
        let (mut packets, mut bytes) = (0, 0);
        let mut header = [0u8; HEADER_LEN_MAX];
        while packets + way.more_pieces < allowed
            && let Some((number, range)) = self.repairs.front_mut()
        {
            let first_queued = self.next_number.wrapping_sub(self.queue.len() as u32);
            let slot = self.queue.get(number.wrapping_sub(first_queued) as usize);
            let (Some(&slot), Some(index)) = (slot, range.next_back()) else {
                self.repairs.pop_front();
                continue;
            };
            let outgoing = table.at(slot);
            let Some(len) = outgoing.put_packet(index, way, &mut header, sent) else {
                range.end = index + 1;
                break;
            };
            bytes += u64::from(len);
            packets += 1;
        }
        self.resent += u64::from(packets);
        way.bytes += bytes;
        self.spend(Class::Bulk, packets, bytes);
        packets
    }

    /// The next fragment that the receiver asked for again, where repetitions go apart: its header, and where its payload is
    /// in the UMEM.
    pub(crate) fn next_repetition(
        &mut self,
        table: &mut OutgoingTable,
        now_ns: u64,
    ) -> Option<(LmHeader, Range<u64>)> {
        if !self.has_repetitions_apart() || self.allowed(Class::Bulk, 1, Time::from_nanos(now_ns)) == 0 {
            return None;
        }
        let first_queued = self.next_number.wrapping_sub(self.queue.len() as u32);
        while let Some((number, range)) = self.repairs.front_mut() {
            let slot = self.queue.get(number.wrapping_sub(first_queued) as usize);
            let (Some(&slot), Some(index)) = (slot, range.next_back()) else {
                self.repairs.pop_front();
                continue;
            };
            let header = LmHeader::Data {
                session_key: self.terms.key,
                message: *number,
                index,
                count: table.at(slot).geometry.fragment_count(),
            };
            let outgoing = table.at(slot);
            let payload = outgoing.geometry.tx_payload_range(index);
            let frame_len = u64::from(outgoing.geometry.fragment(index).frame_len());
            self.resent += 1;
            self.spend(Class::Bulk, 1, frame_len);
            return Some((
                header,
                outgoing.start + payload.start..outgoing.start + payload.end,
            ));
        }
        None
    }

    /// Whether it has repetitions that go the way of small messages.
    pub(crate) fn has_repetitions_apart(&self) -> bool {
        self.terms.repeats_apart && !self.repairs.is_empty()
    }

    /// Whether it has fragments to send that its receiver takes.
    pub(crate) fn has_fragments(&self) -> bool {
        !self.repairs.is_empty()
            || (self.sending < self.queue.len()
                && self.stall.is_none()
                && !self.awaits_confirmation()
                && (self.terms.plain || serial::precedes(self.sent_packets, self.limit)))
    }

    /// Packets left that count against the rate limit.
    #[inline]
    pub(crate) fn spend(&mut self, class: Class, packets: u32, bytes: u64) {
        if let Some(limit) = &mut self.rate_limit {
            limit.signal(Signal::Left {
                class,
                allowed: packets,
                packets,
                bytes,
            });
        }
    }

    /// Of `packets` that would leave now, how many the rate limit allows.
    #[inline]
    pub(crate) fn allowed(&mut self, class: Class, packets: u32, now: Time) -> u32 {
        let limit = self.rate_limit.as_mut();
        limit.map_or(packets, |limit| limit.take(class, packets, now))
    }

    /// When the rate limit lets the next packet go; `None` where it holds none back.
    pub(crate) fn departs(&self, class: Class) -> Option<Time> {
        self.rate_limit.as_ref()?.next(class)
    }

    /// Cumulative packets sent, without repetitions (mod 2^32).
    pub(crate) fn sent_packets(&self) -> u32 {
        self.sent_packets
    }

    /// Takes a credit packet: of how many more messages the receiver has all there is to come.
    ///
    /// # Errors
    /// It goes beyond any receiver's rings or confirms what was not sent; nothing changed.
    pub(crate) fn credit(
        &mut self,
        table: &mut OutgoingTable,
        (limit, delivered, announced): (u32, u32, u32),
        now_ns: u64,
    ) -> Result<u32, ImplausibleCredit> {
        let (messages, packets) = self.not_needed(table, delivered);
        let ahead = serial::distance(self.sent_packets.wrapping_add(packets), limit);
        // Far behind is as far off as far ahead: serial numbers turn around.
        if ahead.unsigned_abs() > LANDING_RING_LEN * 2
            || serial::precedes(self.settled_at_most(messages), delivered)
            || serial::precedes(self.announced, announced)
        {
            return Err(ImplausibleCredit);
        }
        self.heard_ns = now_ns;
        if serial::precedes(self.limit, limit) || serial::precedes(self.delivered, delivered) {
            self.progress_ns = now_ns;
            self.asked = 0;
        } else if serial::at_or_before(announced, self.announced_confirmed) {
            // It says nothing new: of what left unannounced the first packet was lost.
            self.announce_due |= serial::precedes(self.announced_confirmed, self.ahead_to);
        }
        self.limit = serial::later(self.limit, limit);
        let before = self.delivered;
        self.delivered = serial::later(before, delivered);
        self.announced_confirmed = serial::later(self.announced_confirmed, announced);
        Ok(self.delivered.wrapping_sub(before))
    }

    /// The receiver ended the session and says how many of its messages it has delivered, and of how many it has heard.
    ///
    /// # Errors
    /// It confirms what was not sent, or heard of what was not announced, or of less than it confirmed; nothing changed.
    pub(crate) fn ended(&mut self, ended: &Ended) -> Result<(), ImplausibleCredit> {
        let heard = ended
            .heard
            .map(|heard| self.terms.first_message.wrapping_add(heard));
        if heard.is_some_and(|heard| {
            serial::precedes(self.announced, heard) || serial::precedes(heard, self.delivered)
        }) {
            return Err(ImplausibleCredit);
        }
        if self.terms.delivery != Delivery::Reliable {
            // Settled, which need not mean whole.
            return Ok(());
        }
        let delivered = self.terms.first_message.wrapping_add(ended.delivered);
        let aborted = match self.stall {
            Some(Stall::Aborted(messages)) => messages,
            _ => 0,
        };
        if serial::precedes(self.settled_at_most(aborted), delivered) {
            return Err(ImplausibleCredit);
        }
        self.delivered = serial::later(self.delivered, delivered);
        Ok(())
    }

    /// The first number that no receiver has settled: of a message that is not fully sent, or, where messages are given up
    /// at a loss, of one that is not announced.
    /// So many messages behind what is sent need not be.
    fn settled_at_most(&self, not_needed: u32) -> u32 {
        match self.terms.delivery {
            Delivery::Reliable => self.sent_up_to().wrapping_add(not_needed),
            Delivery::Unreliable | Delivery::Partial => self.announced,
        }
    }

    /// Number of the first message that is not fully sent.
    fn sent_up_to(&self) -> u32 {
        self.next_number
            .wrapping_sub((self.queue.len() - self.sending) as u32)
    }

    /// The receiver says what is missing of a message: a request, or a report where it is not going to ask. `false`: it
    /// names what the message does not have, or what was not sent; nothing changed.
    pub(crate) fn missing(
        &mut self,
        table: &mut OutgoingTable,
        number: u32,
        ranges: Vec<Range<u32>>,
    ) -> bool {
        let first_queued = self.next_number.wrapping_sub(self.queue.len() as u32);
        let at = number.wrapping_sub(first_queued) as usize;
        let Some(&slot) = self.queue.get(at) else {
            // Settled meanwhile, or never sent.
            return serial::precedes(number, first_queued);
        };
        let outgoing = table.at(slot);
        if self.terms.delivery != Delivery::Reliable {
            outgoing.missing = Some(ranges);
            return true;
        }
        let count = outgoing.geometry.fragment_count();
        let was_sent = |range: &Range<u32>| {
            range.start < range.end
                && range.end <= count
                && self.terms.window.window_of(range.start) == self.terms.window.window_of(range.end - 1)
                && self.terms.window.position_of(range.start, count) < outgoing.position
        };
        if !ranges.iter().all(was_sent) {
            return false;
        }
        for range in ranges {
            if self.repairs.len() == REPAIRS_MAX {
                // It will be asked for again.
                break;
            }
            if !self.repairs.contains(&(number, range.clone())) {
                self.repairs.push_back((number, range));
            }
        }
        true
    }

    /// Settles the oldest message when the receiver confirmed it (or all of them, when the session `ended`).
    pub(crate) fn settle_next(
        &mut self,
        table: &mut OutgoingTable,
        peer: PeerId,
        ended: Option<&Outcome>,
        now_ns: u64,
    ) -> Option<(Completion, Option<Released>)> {
        if let Some(settled) = self.settle_unwritten(table, peer, ended, now_ns) {
            return Some(settled);
        }
        let slot = *self.queue.front()?;
        let outgoing = table.at(slot);
        let confirmed = match self.terms.plain {
            true => outgoing.position == outgoing.geometry.fragment_count() && outgoing.in_flight == 0,
            false => serial::precedes(outgoing.number, self.delivered),
        };
        let declined = outgoing.declined.filter(|_| confirmed || ended.is_some());
        let outcome = match (outgoing.missing.take(), confirmed, ended) {
            _ if declined.is_some() => Outcome::Declined {
                status: declined.unwrap_or_default(),
            },
            (_, confirmed, ended) if outgoing.is_aborted() && (confirmed || ended.is_some()) => {
                Outcome::Aborted
            }
            (Some(missing), true, _) | (Some(missing), _, Some(_)) => Outcome::Incomplete { missing },
            (None, true, _) if self.terms.plain => Outcome::Sent,
            (None, true, _) => Outcome::Delivered,
            (None, false, Some(ended)) => ended.clone(),
            (missing, false, None) => {
                outgoing.missing = missing;
                return None;
            }
        };
        // The receiver counts the packets that need not be sent any more as if they had been.
        let left = outgoing.left();
        self.sent_packets = self.sent_packets.wrapping_add(left);
        if outgoing.stream.is_some() {
            self.streams -= 1;
            self.stall = None;
        }
        self.queue.pop_front();
        self.sending = self.sending.saturating_sub(1);
        Some(table.settle(slot, peer, outcome, now_ns))
    }
}
