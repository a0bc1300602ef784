//! Timers: what happens because nothing happened. Driven by the engine's clock argument.

use lm_protocol::wire::lm::LmHeader;

use crate::completion::Outcome;
use crate::eager::EAGER_NEVER_NEXT;
use crate::engine::Engine;
use crate::notices::{Fault, NOBODY};
use crate::port::Port;

/// An announcement without an answer is repeated after this time.
const REPEAT_AFTER_NS: u64 = 20_000_000;
/// A peer that owes an acknowledgement of eager messages, or credit for more, is asked this often.
const ASK_AFTER_NS: u64 = 250_000_000;
/// Eager messages that are not acknowledged are sent again after this time, and then after twice as long.
const RESEND_AFTER_NS: u64 = 10_000_000;
const RESEND_AFTER_MAX_NS: u64 = 200_000_000;
/// A quiet session says that it is alive this often: several times within a lease.
const KEEPALIVE_NS: u64 = 500_000_000;
/// A silent peer whose host has said that nobody listens there is borne for no longer than this: its program is gone, not its path.
/// That word can be forged, so a peer that is heard again after it is there.
const REFUSED_SILENCE_NS: u64 = 5_000_000_000;

impl<P: Port> Engine<P> {
    /// Stage 10.
    pub(crate) fn run_timers(&mut self, now_ns: u64) {
        let (port, patience_ns) = (&self.port, self.fixed.patience_ns);
        (self.sending).watch_link(|| port.is_gone(), patience_ns, now_ns);
        for _ in 0..self.sending.take_unknown() {
            self.reject(Fault::Completion, NOBODY);
        }
        self.drive_admission(now_ns);
        self.look_at_reopening(now_ns);
        self.look_for_landing(now_ns);
        if let Some(landing) = self.landing.as_mut().filter(|landing| landing.placing.is_some()) {
            // After the last session nothing else does.
            landing.settle_placed(&mut self.counters, self.memory.umem(), now_ns);
        }
        self.touch_sessions(now_ns);
        self.land_late(now_ns);
        self.watch_inbound(now_ns);
        self.watch_turns(now_ns);
        for position in (0..self.sending.senders().len()).rev() {
            let index = self.sending.senders()[position];
            self.watch_outbound(index, now_ns);
        }
        self.follow_neighbour(now_ns);
        self.watch_eager(now_ns);
        self.ask_for_probes(now_ns);
        self.close_way(now_ns);
    }

    /// A peer may have got another card, or another router. The kernel knows, from ARP; what is sent to the peer from now on goes there.
    fn follow_neighbour(&mut self, now_ns: u64) {
        let Some(index) = self.peers.next_silent(now_ns) else {
            return;
        };
        let data = self.peers.at(index).data;
        if let Some(mac) = self.port.side().neighbour(*data.ip()) {
            self.peers.at(index).addressing = self.addressing_to(data, mac);
        }
    }

    fn watch_inbound(&mut self, now_ns: u64) {
        let patience_ns = self.fixed.patience_ns;
        let (peers, Some(landing)) = (&mut self.peers, &self.landing) else {
            return;
        };
        let stalled = (landing.sessions.iter()).find(|inbound| {
            let stalled_ns = inbound.stalled_ns(now_ns);
            // Few sessions are asked for their peer.
            stalled_ns > patience_ns.min(REFUSED_SILENCE_NS)
                && (peers.named(inbound.terms.peer)).is_none_or(|peer| {
                    stalled_ns > bearable_ns(patience_ns, peer.refused_ns, now_ns - stalled_ns)
                })
        });
        if let Some(key) = stalled.map(|inbound| inbound.terms.key) {
            self.counters.messages_stalled += 1;
            self.abort_session(key, Fault::Stalled);
        }
    }

    /// A session that uses nothing of what was posted for it does not hold up others on its landing queue for longer than an unused place.
    fn watch_turns(&mut self, now_ns: u64) {
        let landing = self.landing.as_ref();
        if let Some(row) = landing.and_then(|landing| landing.sessions.holds_up(now_ns)) {
            self.stop_landing(row, Fault::Stalled, now_ns);
        }
    }

    fn watch_outbound(&mut self, index: u16, now_ns: u64) {
        let patience_ns = self.fixed.patience_ns;
        let peer = self.peers.at(index);
        let Some(outbound) = &mut peer.outbound else {
            return;
        };
        if outbound.terms.plain {
            self.settle_outbound(index, None, now_ns);
            return;
        }
        // What else the peer says, on its eager messages for example, is no answer: it may have ended this session, and its word of that
        // may be lost. To a message behind a pause of ours there can be none yet.
        let asked_ns = (outbound.heard_ns).max(outbound.oldest_ns(&mut self.sending.outgoing));
        let unanswered_ns = now_ns.saturating_sub(asked_ns);
        let patience_ns = patience_ns.max(outbound.terms.lease_ns);
        if unanswered_ns > bearable_ns(patience_ns, peer.refused_ns, asked_ns) {
            self.drop_outbound(index, &Outcome::TimedOut, now_ns);
            return;
        }
        if let Some(over_ns) = outbound.over_ns {
            if outbound.unsettled() == 0 {
                self.lose_session(index, None, now_ns);
                return;
            }
            // Its program is silent, or gone.
            if now_ns.saturating_sub(over_ns) > outbound.terms.lease_ns || peer.refused_ns > over_ns {
                self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
                return;
            }
        }
        let since_announcement = now_ns.saturating_sub(outbound.last_announce_ns);
        let unanswered = outbound.announced != outbound.announced_confirmed
            || outbound.over_ns.is_some()
            || (outbound.waits_for_receiver() && unanswered_ns > REPEAT_AFTER_NS);
        let asks = outbound.should_ask(now_ns);
        if asks {
            outbound.asks();
        }
        if asks || (unanswered && since_announcement > REPEAT_AFTER_NS) || since_announcement > KEEPALIVE_NS {
            outbound.announce_again();
        }
    }

    fn watch_eager(&mut self, now_ns: u64) {
        let patience_ns = self.fixed.patience_ns;
        for position in (0..self.small.watched().len()).rev() {
            let index = self.small.watched()[position];
            let peer = self.peers.at(index);
            let unanswered_ns = now_ns.saturating_sub(peer.eager_out.progress_ns);
            let limit_ns = bearable_ns(patience_ns, peer.refused_ns, peer.eager_out.progress_ns);
            let waits = peer.eager_out.oldest.is_some() || peer.eager_credit() == 0;
            if waits && unanswered_ns > limit_ns {
                self.give_up_eager(index, &Outcome::TimedOut, now_ns);
            }
            let peer = self.peers.at(index);
            let since_resent_ns =
                now_ns.saturating_sub(peer.eager_out.resent_ns.max(peer.eager_out.progress_ns));
            let pause_ns = (RESEND_AFTER_NS << peer.eager_out.resends.min(7)).min(RESEND_AFTER_MAX_NS);
            if peer.eager_out.oldest.is_some() && since_resent_ns > pause_ns {
                self.resend_eager(index, now_ns);
            }
            let peer = self.peers.at(index);
            if peer.eager_out.oldest.is_none() && peer.eager_credit() > 0 {
                self.small.unwatch(position, &mut peer.eager_out);
            } else if unanswered_ns > ASK_AFTER_NS
                && now_ns.saturating_sub(peer.eager_out.asked_ns) > ASK_AFTER_NS
            {
                // The answer that we wait for, or the one with new credit, may be lost.
                self.ask_where(index, now_ns);
            }
        }
    }

    /// Settles all eager messages that a peer has not acknowledged, and numbers those to come anew.
    pub(crate) fn give_up_eager(&mut self, index: u16, outcome: &Outcome, now_ns: u64) {
        let id = self.peers.id_of(index);
        let (told, counters) = (&mut self.told, &mut self.counters);
        (self.sending).give_up(self.peers.at(index), id, outcome, now_ns, |completion| {
            told.ended(completion, counters);
        });
    }

    /// Asks a peer to say where it is in our eager messages, with one that is never the next.
    pub(crate) fn ask_where(&mut self, index: u16, now_ns: u64) {
        let peer = self.peers.at(index);
        peer.eager_out.asked_ns = now_ns;
        let header = LmHeader::Eager {
            sender_id: peer.own_id(self.fixed.sender_id),
            number: peer.eager_out.next.wrapping_sub(EAGER_NEVER_NEXT),
            tag: 0,
            digested: self.fixed.integrity.has_digests(),
            acknowledges: None,
        };
        self.send_packet(index, &header, &[]);
    }
}

/// For how long a peer may be silent that was heard last at `heard_ns`, and whose host said at `refused_ns` that nobody listens there.
fn bearable_ns(patience_ns: u64, refused_ns: u64, heard_ns: u64) -> u64 {
    match refused_ns > heard_ns {
        true => patience_ns.min(REFUSED_SILENCE_NS),
        false => patience_ns,
    }
}
