//! Stage 7: what peers are told when it is due: acknowledgements, credits, announcements.

use std::ops::Range;

use lm_protocol::serial;
use lm_protocol::wire::lm::{Credit, EagerAcknowledgement, LmHeader, MessageDigest, UnwholeMessage};

use crate::bounds::{IN_FLIGHT_MESSAGES_MAX, general_payload_len};
use crate::eager::EAGER_ACK_EVERY;
use crate::engine::{ACKNOWLEDGE_AFTER_NS, ACKNOWLEDGE_LATEST_NS, Engine};
use crate::outbound::Outbound;
use crate::port::Port;

/// A sender with fewer packets of credit left is told of more at once.
const LOW_CREDIT: u32 = 16;
/// So much more credit is told at once: a third of what may be on the way on veth.
const CREDIT_STEP: u32 = 96;
/// So long it waits to be as much, where few packets are on the way: what they take beyond the path's round trip.
const CREDIT_LATEST_NS: u64 = 1_000_000;
/// Announcements that fit a packet at the smallest MTU are at least 30; more in one packet gain nothing.
const ANNOUNCEMENTS_PER_PACKET: usize = 64;
/// Entries and digests in one announcement, in bytes, where the MTU allows so many.
const ANNOUNCEMENT_LEN_MAX: usize = 1440;
/// Messages that a CREDIT names, in bytes, where the MTU allows so many: all that may be under way, with 64 different statuses.
const CREDIT_LEN_MAX: usize = 4 * (IN_FLIGHT_MESSAGES_MAX as usize + 64);

impl<P: Port> Engine<P> {
    /// Stage 7: says what is due. `idle` is whether this round brought nothing so far.
    pub(crate) fn tell(&mut self, now_ns: u64, idle: bool) {
        self.acknowledge_eager(now_ns, idle);
        let taken = self.landing.as_ref().map(|landing| landing.sessions.taken());
        for row in taken.into_iter().flatten() {
            self.give_credit(row, now_ns, idle);
            self.ask_for_missing(row, now_ns);
            self.ask_for_digests(row, now_ns);
        }
        for position in 0..self.sending.senders().len() {
            let index = self.sending.senders()[position];
            self.announce(index, now_ns);
            self.send_manifests(index);
            if (self.peers.at(index).outbound.as_ref()).is_some_and(Outbound::has_windows_to_tell) {
                self.send_windows(index);
            }
            let (side, peer) = (self.port.side(), self.peers.at(index));
            (self.sending).send_repetitions(side, &mut self.memory, peer, &mut self.counters, now_ns);
        }
    }

    /// A message leaves unannounced, in the call that sends it, with what its receiver is to be told.
    pub(crate) fn leave(&mut self, index: u16, now_ns: u64) {
        self.small.stream.sent(now_ns);
        self.small.stream.answers_long();
        let sessions = self.landing.as_ref().map(|landing| &landing.sessions);
        let is_its = |row: &u8| {
            sessions
                .and_then(|sessions| sessions.at(*row))
                .is_some_and(|inbound| inbound.terms.peer.index == index)
        };
        let row = sessions.and_then(|sessions| sessions.taken().find(is_its));
        if let Some(row) = row {
            self.give_credit(row, now_ns, false);
        }
        let (peers, small, memory) = (&mut self.peers, &mut self.small, &mut self.memory);
        (self.sending).send_fragments(peers, small, memory, &mut self.counters, now_ns);
        self.sending.flush();
    }

    fn acknowledge_eager(&mut self, now_ns: u64, idle: bool) {
        for _ in 0..self.small.owed() {
            let Some(index) = self.small.take_owed() else {
                break;
            };
            let free = self.small.free_frames();
            let peer = self.peers.at(index);
            let eager = &peer.eager_in;
            let acknowledgement = eager.acknowledgement(free, peer.uncompleted_max);
            let quiet = now_ns.saturating_sub(eager.last_ns) >= patience_ns(idle);
            let owed = eager.unacknowledged() > 0 || eager.repeat;
            // A peer that was left with little credit is told again when frames have come back.
            let short = |limit: u32| serial::distance(eager.next, limit) < EAGER_ACK_EVERY as i32;
            let relief = short(eager.told_limit) && !short(acknowledgement.limit);
            if eager.unacknowledged() < EAGER_ACK_EVERY && !(quiet && owed) && !relief {
                if owed || short(eager.told_limit) {
                    self.small.owe(index);
                } else {
                    self.peers.at(index).acknowledgement_due = false;
                }
                continue;
            }
            let EagerAcknowledgement {
                sender_id,
                next,
                limit,
            } = acknowledgement;
            let header = LmHeader::EagerAck {
                sender_id,
                next,
                limit,
            };
            if self.send_packet(index, &header, &[]) {
                let eager = &mut self.peers.at(index).eager_in;
                eager.told(&acknowledgement);
                eager.repeat = false;
            }
            self.small.owe(index);
        }
    }

    /// What travels behind a message of `len` bytes to a peer: the acknowledgement that it is owed, if the packet has room for it.
    ///
    /// Not what is said again because something was dropped (`repeat`): the peer draws conclusions from that, and an
    /// acknowledgement that is sent again with its message may be long out of date.
    #[inline]
    pub(crate) fn acknowledgement_behind(&mut self, index: u16, len: u64) -> Option<EagerAcknowledgement> {
        if self.peers.at(index).eager_in.unacknowledged() == 0
            || len + EagerAcknowledgement::LEN as u64 > self.eager_len_to(index)
        {
            return None;
        }
        let free = self.small.free_frames();
        let peer = self.peers.at(index);
        Some(peer.eager_in.acknowledgement(free, peer.uncompleted_max))
    }

    // A call of its own would be more than most rounds do here.
    #[inline(always)]
    fn give_credit(&mut self, row: u8, now_ns: u64, idle: bool) {
        let Some(landing) = &mut self.landing else { return };
        let limit = landing.sessions.credit(row);
        let step = landing.sessions.credit_step(row);
        let Some(inbound) = landing.sessions.at_mut(row) else {
            return;
        };
        let outbound = self.peers.at(inbound.terms.peer.index).outbound.as_mut();
        let mut outbound = outbound.filter(|outbound| outbound.terms.goes_ahead);
        if let Some(outbound) = &mut outbound {
            outbound.credit_behind = Credit::default();
            let left = std::mem::take(&mut outbound.credit_left);
            if left.session == Credit::session_of(inbound.terms.key) {
                let [limit, delivered, announced] = left.words.map(|word| word.get());
                inbound.tell_limit(limit, now_ns);
                (inbound.told).is_told(limit, delivered, announced, now_ns);
            }
        }
        let (accepted, announced) = (inbound.progress.accepted_packets(), inbound.order.announced());
        let delivered = inbound.settled.delivered();
        let told = &mut inbound.told;
        // Entries that were posted for packets which came otherwise take nothing back.
        let limit = serial::later(told.packet_limit, limit);
        let more = limit.wrapping_sub(told.packet_limit);
        let left = serial::distance(accepted, told.packet_limit).max(0) as u32;
        let settled = delivered.wrapping_sub(told.delivered);
        let anything = more > 0 || settled > 0 || announced != told.announced || told.asked;
        if !anything {
            return;
        }
        if !told.changed {
            told.changed = true;
            told.changed_ns = now_ns;
        }
        let is_credit_alone = settled == 0 && announced == told.announced && left > 0;
        let (enough, patience_ns) = match step {
            Some(step) if is_credit_alone => (step.min(CREDIT_STEP), CREDIT_LATEST_NS),
            _ => (CREDIT_STEP, patience_ns(idle)),
        };
        // In an exchange the answer says it, if there soon is one.
        let in_flight = inbound.terms.limits.messages_in_flight;
        let few = if inbound.is_exchange() { 2 } else { 1 };
        let told = &mut inbound.told;
        let due = told.asked
            || more >= enough
            || (more > 0 && left < LOW_CREDIT)
            || settled >= (in_flight / 4).max(in_flight.min(few))
            || now_ns.saturating_sub(told.changed_ns) >= patience_ns;
        if !due {
            if let Some(outbound) = outbound
                && inbound.lands()
                && inbound.unwhole().next().is_none()
            {
                let words = [limit, delivered, announced].map(Into::into);
                let session = Credit::session_of(inbound.terms.key).into();
                outbound.credit_behind = Credit { session, words };
            }
            return;
        }
        // The rest makes the next burst.
        let limit = match step {
            Some(_) if more >= enough => limit.wrapping_sub(more % enough),
            _ => limit,
        };
        let header = LmHeader::Credit {
            session_key: inbound.terms.key,
            packet_limit: limit,
            delivered,
            announced,
            lands: inbound.lands(),
        };
        let peer = inbound.terms.peer.index;
        let mut payload = [0u8; CREDIT_LEN_MAX];
        let room = general_payload_len(&inbound.terms.layout).min(CREDIT_LEN_MAX);
        let len = UnwholeMessage::encode_all(inbound.unwhole(), delivered, &mut payload[..room]);
        if self.send_packet(peer, &header, &payload[..len])
            && let Some(landing) = &mut self.landing
            && let Some(inbound) = landing.sessions.at_mut(row)
        {
            inbound.tell_limit(limit, now_ns);
            inbound.told.is_told(limit, delivered, announced, now_ns);
            self.counters.credits_sent += 1;
        }
    }

    /// Announces messages that are new, or repeats the unconfirmed ones.
    pub(crate) fn announce(&mut self, index: u16, now_ns: u64) {
        let peer = self.peers.at(index);
        let Some(outbound) = &mut peer.outbound else {
            return;
        };
        let table = &mut self.sending.outgoing;
        if outbound.streams > 0 && outbound.hear_writers(table, &peer.addressing, now_ns) {
            // What was given up may have been all that there is to tell.
            return self.settle_outbound(index, None, now_ns);
        }
        if outbound.terms.plain || !(outbound.has_to_announce() || outbound.has_digests_to_tell()) {
            return;
        }
        let Range { start: from, end } = match outbound.to_announce() {
            Some(messages) => messages,
            None if outbound.has_digests_to_tell() => outbound.announced..outbound.announced,
            None => return,
        };
        let (key, sent) = (outbound.terms.key, outbound.sent_packets());
        let mut payload = [0u8; ANNOUNCEMENT_LEN_MAX];
        let room = outbound.general_payload_len().min(payload.len());
        let most = ANNOUNCEMENTS_PER_PACKET.min(end.wrapping_sub(from) as usize);
        let (mut entries, mut len) = (0u32, 0);
        for (entry, words) in outbound.announcements(&mut self.sending.outgoing, from, most) {
            let Some(written) = entry.write(words.as_bytes(), &mut payload[len..room]) else {
                break;
            };
            len += written;
            entries += 1;
        }
        let header = LmHeader::Announce {
            session_key: key,
            first: from,
            entries,
            sent,
        };
        let mut told = outbound.digests_told();
        while len + MessageDigest::LEN <= room
            && let Some(digest) = outbound.digest_of(&mut self.sending.outgoing, told)
        {
            payload[len..len + MessageDigest::LEN].copy_from_slice(&digest.encode());
            len += MessageDigest::LEN;
            told = told.wrapping_add(1);
        }
        if self.send_packet(index, &header, &payload[..len])
            && let Some(outbound) = &mut self.peers.at(index).outbound
        {
            outbound.told_digests(told);
            outbound.has_announced(from.wrapping_add(entries), now_ns);
        }
    }
}

/// How long an acknowledgement waits for more to say. One peer's stream must not keep another from its answer, so
/// there is an end to it without an idle round, too.
fn patience_ns(idle: bool) -> u64 {
    match idle {
        true => ACKNOWLEDGE_AFTER_NS,
        false => ACKNOWLEDGE_LATEST_NS,
    }
}
