//! Messages in the order of their numbers: those that were announced and are not settled, and those that are.

use std::collections::VecDeque;

use lm_protocol::serial;
use lm_protocol::streaming::{Heard, Release, packets_released};
use lm_protocol::wire::lm::{Facts, SETTLED_KEPT, UnwholeMessage};

use super::arriving::{About, Arriving, Landed};
use super::progress::Untaken;
use super::terms::InboundTerms;
use crate::arena::pages_len;
use crate::bounds::IN_FLIGHT_MESSAGES_MAX;

/// Messages that were announced and are not settled.
#[derive(Debug)]
pub(crate) struct Order {
    messages: VecDeque<Arriving>,
    /// First message in `messages` that is not fully posted.
    posting: usize,
    /// Next message number to be announced.
    announced: u32,
    /// Packets of the announced messages.
    packets: u64,
    /// Messages of which not all may come.
    unreleased: u32,
}

impl Order {
    pub(super) fn new(terms: &InboundTerms) -> Order {
        Order {
            messages: VecDeque::with_capacity(IN_FLIGHT_MESSAGES_MAX as usize),
            posting: 0,
            announced: terms.first_message,
            packets: 0,
            unreleased: 0,
        }
    }

    /// Takes the announcement of a message that is not known; all before number `delivered` are settled. If it cannot, nothing changed.
    pub(super) fn announce(
        &mut self,
        terms: &InboundTerms,
        (number, about): (u32, &About),
        release: Release,
        delivered: u32,
        now_ns: u64,
    ) -> Result<(), Untaken> {
        // A sender has so many messages under way from the first on that we have not settled, which it may not know yet.
        let is_due = number.wrapping_sub(delivered) < terms.limits.messages_in_flight;
        if !is_due || about.len > terms.limits.max_message_len {
            return Err(Untaken::Implausible);
        }
        let geometry = match about.has_facts {
            true => Facts::geometry(&terms.layout, about.len),
            false => terms.layout.session_message(about.len).ok(),
        };
        let geometry = geometry.ok_or(Untaken::Implausible)?;
        if number != self.announced {
            return Err(Untaken::Early);
        }
        let mut message = Arriving::new(terms, number, about, geometry, self.packets, now_ns);
        if release != Release::Whole {
            if message.begins_with(release) == Heard::Contradiction {
                return Err(Untaken::Implausible);
            }
            self.unreleased += 1;
        }
        self.packets = message.end();
        self.messages.push_back(message);
        self.announced = number.wrapping_add(1);
        Ok(())
    }

    /// The sender says how much of a message is released; `None`: it is settled.
    pub(super) fn hear(&mut self, number: u32, release: Release) -> Option<Heard> {
        let at = self.position_of(number)?;
        let message = &mut self.messages[at];
        if message.is_released() && release == Release::Whole {
            return Some(Heard::Nothing);
        }
        let heard = message.hear(release);
        self.unreleased -= u32::from(heard == Heard::More && message.is_released());
        Some(heard)
    }

    /// Number of the next message to be announced.
    pub(crate) fn announced(&self) -> u32 {
        self.announced
    }

    /// Whether an announcement with this number was taken already.
    pub(crate) fn knows(&self, number: u32) -> bool {
        serial::precedes(number, self.announced)
    }

    /// Packets of the announced messages, as their senders count them.
    pub(super) fn packets(&self) -> u64 {
        self.packets
    }

    /// The same of those that may come: no entry is posted from a message on that [waits](Arriving::waits).
    pub(super) fn packets_open(&self) -> u64 {
        let waits = self.next().filter(|next| next.waits());
        waits.map_or_else(
            || self.packets_released(),
            |next| next.base + u64::from(next.slots.posted),
        )
    }

    /// The same of those that their sender may send: none behind what it released of a message that is being written.
    pub(super) fn packets_released(&self) -> u64 {
        let Some(front) = self.messages.front().filter(|_| self.unreleased > 0) else {
            return self.packets;
        };
        let messages = self.messages.iter();
        front.base
            + packets_released(
                messages.map(|message| (message.slots.open + message.fillers, message.is_released())),
            )
    }

    /// Packets behind so many that are released, where those behind them are not.
    #[inline]
    pub(super) fn unreleased_behind(&self, packets: u64) -> Option<u64> {
        (self.unreleased > 0).then(|| self.left(packets))
    }

    /// Packets of announced messages behind so many, as far as they are released.
    pub(super) fn left(&self, packets: u64) -> u64 {
        self.packets_released().saturating_sub(packets)
    }

    /// Number of the first message that is not settled.
    pub(crate) fn unsettled_from(&self) -> u32 {
        self.front().map_or(self.announced, |message| message.number)
    }

    /// Where the message with this number is, if it is not settled.
    #[inline]
    pub(super) fn position_of(&self, number: u32) -> Option<usize> {
        let at = number.wrapping_sub(self.messages.front()?.number) as usize;
        (at < self.messages.len()).then_some(at)
    }

    #[inline]
    pub(super) fn at(&self, at: usize) -> &Arriving {
        &self.messages[at]
    }

    #[inline]
    pub(super) fn at_mut(&mut self, at: usize) -> &mut Arriving {
        &mut self.messages[at]
    }

    #[inline]
    pub(super) fn front(&self) -> Option<&Arriving> {
        self.messages.front()
    }

    #[inline]
    pub(super) fn front_mut(&mut self) -> Option<&mut Arriving> {
        self.messages.front_mut()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Arriving> {
        self.messages.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Arriving> {
        self.messages.iter_mut()
    }

    /// The front message is settled.
    pub(super) fn pop_front(&mut self) -> Option<Arriving> {
        let front = self.messages.pop_front()?;
        self.posting = self.posting.saturating_sub(1);
        self.unreleased -= u32::from(!front.is_released());
        Some(front)
    }

    /// No message will be settled any more: gives those that are left.
    pub(super) fn clear(&mut self) -> impl Iterator<Item = Arriving> {
        (self.posting, self.unreleased) = (0, 0);
        self.messages.drain(..)
    }

    /// The message that entries are to be posted for.
    #[inline]
    pub(super) fn next(&self) -> Option<&Arriving> {
        self.messages.get(self.posting)
    }

    #[inline]
    pub(super) fn next_mut(&mut self) -> Option<&mut Arriving> {
        self.messages.get_mut(self.posting)
    }

    /// The same, if it is known where it lands, and more of it may come.
    #[inline]
    pub(super) fn next_open(&self) -> Option<&Arriving> {
        self.next().filter(|next| next.is_open())
    }

    /// It, and those behind it.
    pub(super) fn unposted(&self) -> impl Iterator<Item = &Arriving> {
        (self.messages.range(self.posting..)).take_while(|message| !message.waits())
    }

    /// More is posted, or less: [`Slots::posted`](super::arriving::Slots) says what of each message.
    pub(super) fn look_for_unposted(&mut self) {
        let is_unposted = |message: &Arriving| message.slots.posted < message.fragment_count();
        self.posting = (self.messages.iter())
            .position(is_unposted)
            .unwrap_or(self.messages.len());
    }

    /// None of the posted entries will be used: what was posted for packets that are still to come is posted again. Whether there was any.
    pub(super) fn post_again(&mut self, has_witness: bool) -> bool {
        let had = self.awaits_packets();
        for message in &mut self.messages {
            message.slots.posted = message.slots.consumed;
            // Nothing is posted below it any more.
            message.is_claimed &= has_witness;
        }
        self.look_for_unposted();
        had
    }

    /// Packets of the session up to the last that an entry was posted for, or left out.
    pub(super) fn provided(&self) -> u64 {
        self.next().map_or(self.packets, |message| {
            message.base + u64::from(message.slots.posted)
        })
    }

    /// Whether packets of announced messages are owed for which entries are posted.
    pub(super) fn awaits_packets(&self) -> bool {
        (self.messages.iter()).any(|message| message.slots.posted > message.slots.consumed)
    }

    /// Bytes in pages of all zones that begin below UMEM address `end`.
    pub(crate) fn zones_len(&self, end: u64) -> u64 {
        let zones = self.messages.iter().filter_map(|message| message.slots.zone);
        { zones }
            .filter(|zone| zone.start < end)
            .map(|zone| pages_len(zone.len))
            .sum()
    }

    /// What was announced and is not settled counts as not heard.
    pub(crate) fn forget_unsettled(&mut self, delivered: u32) {
        self.announced = delivered;
    }
}

/// Messages that are settled, as far as the application or their sender do not know it yet.
#[derive(Debug)]
pub(crate) struct Settled {
    complete: VecDeque<Landed>,
    /// All messages before this number are settled.
    delivered: u32,
    /// Messages that were settled without being whole, of the last ones; those with the same status are neighbours.
    unwhole: Vec<UnwholeMessage>,
}

impl Settled {
    pub(super) fn new(first_message: u32) -> Settled {
        Settled {
            complete: VecDeque::with_capacity(IN_FLIGHT_MESSAGES_MAX as usize),
            delivered: first_message,
            unwhole: Vec::new(),
        }
    }

    /// All messages before this number are settled.
    pub(crate) fn delivered(&self) -> u32 {
        self.delivered
    }

    /// Whether a message waits for the application.
    #[inline]
    pub(crate) fn has_landed(&self) -> bool {
        !self.complete.is_empty()
    }

    /// A message goes to the application.
    pub(super) fn add(&mut self, landed: Landed) {
        self.complete.push_back(landed);
    }

    /// All before this number are settled.
    pub(super) fn deliver_to(&mut self, number: u32) {
        self.delivered = number;
    }

    /// The next message for the application; `unsettled_from` on they are not settled.
    pub(super) fn next(&mut self, unsettled_from: u32) -> Option<Landed> {
        let landed = self.complete.pop_front()?;
        if self.complete.is_empty() {
            self.delivered = unsettled_from;
        } else {
            self.delivered = landed.number.wrapping_add(1);
        }
        Some(landed)
    }

    /// No message will be shown any more: gives those that are left.
    pub(super) fn clear(&mut self) -> impl Iterator<Item = Landed> {
        self.complete.drain(..)
    }

    /// Fragments of messages that wait for the application.
    #[cfg(test)]
    pub(super) fn fragments(&self) -> u64 {
        self.complete.iter().map(|landed| landed.arrived).sum()
    }

    /// Messages from this one on that were settled without being whole.
    pub(super) fn unwhole_from(&self, number: u32) -> impl Iterator<Item = UnwholeMessage> + Clone + '_ {
        let unwhole = self.unwhole.iter().copied();
        unwhole.filter(move |unwhole| !serial::precedes(unwhole.message, number))
    }

    /// A message that was settled lately was whole.
    pub(super) fn was_whole(&self, number: u32) -> bool {
        let ago = serial::distance(number, self.delivered);
        let is_late = ago > 0 && ago <= SETTLED_KEPT as i32;
        is_late && !self.unwhole.iter().any(|unwhole| unwhole.message == number)
    }

    /// A message is settled without being whole: `declined` with a status, or given up.
    pub(super) fn broke(&mut self, message: u32, declined: Option<u16>) {
        let delivered = self.delivered;
        (self.unwhole).retain(|old| serial::distance(old.message, delivered) <= SETTLED_KEPT as i32);
        let at = self.unwhole.partition_point(|other| other.declined <= declined);
        (self.unwhole).insert(at, UnwholeMessage { message, declined });
    }
}
