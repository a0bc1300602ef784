//! Sessions that their receiver ended, mostly because others waited for their places: they are asked for again, and messages of which the
//! receiver had not heard are handed over again.

use crate::completion::Outcome;
use crate::control::Applying;
use crate::engine::Engine;
use crate::port::Port;

impl<P: Port> Engine<P> {
    /// The receiver ended the session that messages to a peer go by. `heard`: of how many messages it had heard; where that matters and is
    /// not known, its program is asked. All others are handed over again to the session that follows.
    pub(crate) fn lose_session(&mut self, index: u16, heard: Option<u32>, now_ns: u64) {
        self.settle_outbound(index, None, now_ns);
        let peer = self.peers.at(index);
        let Some(outbound) = &mut peer.outbound else {
            return;
        };
        match heard {
            Some(heard) => peer.unheard = outbound.take_unheard(heard),
            None if outbound.unsettled() > 0 => return outbound.is_over(now_ns),
            None => {}
        }
        // With a message that is lost the session is, unless others need it.
        let goes_on = outbound.unsettled() == 0 || !peer.unheard.is_empty();
        let options = peer.options.filter(|_| goes_on);
        self.drop_outbound(index, &Outcome::SessionEnded, now_ns);
        let Some(options) = options else {
            return self.hand_over_again(index, now_ns);
        };
        self.counters.sessions_lost += 1;
        self.peers.at(index).reopening = true;
        self.apply(index, &options, now_ns);
    }

    /// Takes the outcome of sessions that are asked for again.
    pub(crate) fn look_at_reopening(&mut self, now_ns: u64) {
        let reopening = |applying: &Applying| applying.peer;
        let mut asked: Vec<u16> = self.admission.applying.iter().map(reopening).collect();
        asked.retain(|&index| self.peers.at(index).reopening);
        for index in asked {
            if let Some(outcome) = self.application_outcome(index, now_ns) {
                self.peers.at(index).reopening = false;
                if let Err(error) = outcome {
                    tracing::warn!(to = %self.peers.at(index).data, "no session any more: {error}");
                    self.hand_over_again(index, now_ns);
                }
            }
        }
    }

    /// What the receiver of the session before had not heard of is the present one's. Where there is none, the messages end with it.
    pub(crate) fn hand_over_again(&mut self, index: u16, now_ns: u64) {
        let id = self.peers.id_of(index);
        while let Some(slot) = self.peers.at(index).unheard.pop_front() {
            let peer = self.peers.at(index);
            if let Some(outbound) = &mut peer.outbound
                && outbound.take_again(&mut self.sending.outgoing, &peer.addressing, slot)
            {
                self.counters.messages_again += 1;
                continue;
            }
            let settled = (self.sending.outgoing).settle(slot, id, Outcome::SessionEnded, now_ns);
            self.settled(settled);
        }
    }
}
