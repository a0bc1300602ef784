//! Announcing: what the receiver is told of messages before and while they are sent, and when it is asked what it has.

use std::ops::Range;

use lm_protocol::serial;
use lm_protocol::wire::lm::AnnounceEntry;

use super::streamed::Stall;
use super::{Outbound, OutgoingTable};
use crate::words::Words;

/// A receiver that owes an answer is asked after this time, and then ever less often.
const ASK_AFTER_NS: u64 = 2_000_000;
const ASK_AFTER_MAX_NS: u64 = 100_000_000;

impl Outbound {
    /// Entries and opaque bytes of messages from number `from` on, at most `max`, for an announcement.
    pub(crate) fn announcements<'a>(
        &'a self,
        table: &'a mut OutgoingTable,
        from: u32,
        max: usize,
    ) -> impl Iterator<Item = (AnnounceEntry, Words)> + 'a {
        let first_queued = self.next_number.wrapping_sub(self.queue.len() as u32);
        let skip = from.wrapping_sub(first_queued) as usize;
        self.queue.iter().skip(skip).take(max).map(|&slot| {
            let outgoing = table.at(slot);
            let entry = AnnounceEntry {
                len: outgoing.len,
                tag: outgoing.tag,
                delivery: Some(self.terms.delivery),
                windows_released: outgoing.release().to_u32(),
                has_facts: outgoing.has_facts,
            };
            (entry, outgoing.words)
        })
    }

    /// Whether there may be messages to be announced.
    #[inline]
    pub(crate) fn has_to_announce(&self) -> bool {
        self.announced != self.next_number || self.announce_due || self.news.is_some()
    }

    /// Numbers of the messages that are to be announced now. `None`: there is nothing to say of any.
    pub(crate) fn to_announce(&self) -> Option<Range<u32>> {
        let unconfirmed = match self.announce_due {
            true => self.announced_confirmed,
            false => self.announced,
        };
        let is_due = self.announce_due || unconfirmed != self.next_number;
        let Some(news) = &self.news else {
            return is_due.then_some(unconfirmed..self.next_number);
        };
        // Those that are settled by now are no news.
        let first = serial::later(news.start, self.first_queued());
        match (is_due, serial::precedes(first, news.end)) {
            (true, true) if serial::precedes(first, unconfirmed) => Some(first..self.next_number),
            (true, _) => Some(unconfirmed..self.next_number),
            (false, true) => Some(first..news.end),
            (false, false) => None,
        }
    }

    /// Those were announced, up to a number.
    pub(crate) fn has_announced(&mut self, to: u32, now_ns: u64) {
        self.announced = serial::later(self.announced, to);
        self.announced_sent = self.sent_packets;
        self.announce_due = false;
        self.last_announce_ns = now_ns;
        let left = self.news.take().filter(|news| serial::precedes(to, news.end));
        self.news = left.map(|news| serial::later(news.start, to)..news.end);
    }

    /// The receiver is asked: what it may not have heard is announced again.
    pub(crate) fn announce_again(&mut self) {
        self.announce_due = true;
        if self.streams > 0 && !self.queue.is_empty() {
            let first = self.first_queued();
            self.news = Some(first..self.next_number);
        }
    }

    /// Whether it is time to ask the receiver what it has: it owes us something and has been silent about it. The pause
    /// doubles, from a few round trips on.
    pub(crate) fn should_ask(&self, now_ns: u64) -> bool {
        let pause_ns = (ASK_AFTER_NS << self.asked.min(6)).min(ASK_AFTER_MAX_NS);
        self.waits_for_receiver()
            && now_ns.saturating_sub(self.progress_ns.max(self.last_announce_ns)) > pause_ns
    }

    /// The receiver is being asked.
    pub(crate) fn asks(&mut self) {
        self.asked += 1;
    }

    /// Whether every message is sent as far as the credit allows and nothing new waits: the next move is the
    /// receiver's.
    pub(crate) fn waits_for_receiver(&self) -> bool {
        match self.stall {
            None => {}
            // Nor does it, once it has answered: it knows what it lacks of what was sent, and has settled what was sent whole.
            Some(Stall::Writer) => {
                let has_answered =
                    self.announced_sent == self.sent_packets && self.heard_ns > self.last_announce_ns;
                return self.sending > 0 || !has_answered;
            }
            Some(Stall::Aborted(_)) => return true,
        }
        !self.queue.is_empty()
            && (self.sending == self.queue.len()
                || self.awaits_confirmation()
                || serial::at_or_before(self.limit, self.sent_packets))
    }
}
