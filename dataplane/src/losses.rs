//! What is missing: the receiving side's requests to senders, and reports of what was given up. What is known about losses
//! is `landing/repair.rs`.

use lm_protocol::delivery::Delivery;
use lm_protocol::serial;
use lm_protocol::wire::lm::{LmHeader, MissingRange};

use crate::bounds::RANGES_MAX;
use crate::completion::{PeerId, RecvError};
use crate::engine::Engine;
use crate::landing::{GivenUp, Inbound, Remedy, RepairCounters, Zone};
use crate::notices::Fault;
use crate::port::Port;

impl<P: Port> Engine<P> {
    /// Stage 6, first half: messages with losses.
    pub(crate) fn care(&mut self, now_ns: u64) {
        let taken = self.landing.as_ref().map(|landing| landing.sessions.taken());
        for row in taken.into_iter().flatten() {
            self.care_for(row, now_ns);
        }
    }

    fn care_for(&mut self, row: u8, now_ns: u64) {
        let Some(landing) = &mut self.landing else { return };
        if landing.sessions.needs_care(row) {
            let remedy = (landing.sessions).watch(row, &mut landing.arena, self.memory.umem(), now_ns);
            let Some(inbound) = landing.sessions.at_mut(row) else {
                return;
            };
            let landed = inbound.settled.has_landed();
            match remedy {
                Some(Remedy::GivenUp(message)) => {
                    let (peer, key, delivery) =
                        (inbound.terms.peer, inbound.terms.key, inbound.terms.delivery);
                    // To a sender that repeats what is missing this would be a request.
                    if delivery != Delivery::Reliable && !message.is_aborted {
                        self.report_missing(peer, key, &message);
                    }
                    self.report_incomplete(peer, message);
                }
                Some(Remedy::Partial(message)) => {
                    let (peer, key) = (inbound.terms.peer, inbound.terms.key);
                    self.report_missing(peer, key, &message);
                }
                Some(Remedy::Rebuild) => {
                    let registered_len = landing.registered_len;
                    if let Err(what) = self.rebuild_under_sessions(registered_len) {
                        tracing::debug!("the landing channel is not built anew: {what}");
                    }
                }
                Some(Remedy::StopLanding) => self.stop_landing(row, Fault::Astray, now_ns),
                None => {}
            }
            if landed {
                self.show_landed(now_ns);
            }
        }
        let Some(landing) = &mut self.landing else { return };
        if landing.sessions.arrivals.is_any() {
            self.counters
                .arrivals(std::mem::take(&mut landing.sessions.arrivals));
        }
        let inbound = landing.sessions.at_mut(row);
        if let Some(inbound) = inbound.filter(|inbound| inbound.places.repair.is_any()) {
            let (peer, repair) = (inbound.terms.peer, std::mem::take(&mut inbound.places.repair));
            self.book_repair(peer, repair);
        }
    }

    /// Counts what a landing session did about losses.
    pub(crate) fn book_repair(&mut self, peer: PeerId, repair: RepairCounters) {
        self.counters.repair(repair);
        let seen = [
            (repair.implausible, Fault::FragmentShape),
            (repair.corrupt, Fault::Corrupt),
            (repair.contradictory, Fault::Contradictory),
        ];
        for (_, fault) in seen.into_iter().filter(|(count, _)| *count > 0) {
            if let Some(peer) = self.peers.named(peer) {
                let from = peer.data;
                self.notices.tell(fault, from);
            }
        }
    }

    /// Asks the sender for fragments that are due.
    pub(crate) fn ask_for_missing(&mut self, row: u8, now_ns: u64) {
        while let Some(landing) = &mut self.landing
            && let Some(inbound) = landing.sessions.at_mut(row)
            && inbound.places.is_troubled()
            && let Some((message, ranges)) = inbound.care().next_request(now_ns)
        {
            let (peer, session_key) = (inbound.terms.peer, inbound.terms.key);
            self.send_missing(peer, (session_key, message), ranges, false);
        }
    }

    /// Asks the sender for digests that are due.
    pub(crate) fn ask_for_digests(&mut self, row: u8, now_ns: u64) {
        let Some(landing) = &mut self.landing else { return };
        let Some(inbound) = landing.sessions.at_mut(row) else {
            return;
        };
        let Some((message, ranges)) = inbound.care().next_digest_request(now_ns) else {
            return;
        };
        let (peer, session_key) = (inbound.terms.peer, inbound.terms.key);
        self.send_missing(peer, (session_key, message), ranges, true);
    }

    /// Sends a MISSING packet about a session's message: as many of `ranges` as fit one. `manifest`: it asks for digests.
    fn send_missing(
        &mut self,
        peer: PeerId,
        (session_key, message): (u64, u32),
        ranges: impl IntoIterator<Item = MissingRange>,
        manifest: bool,
    ) {
        let mut payload = [0u8; RANGES_MAX * MissingRange::LEN];
        let mut count = 0;
        for (range, bytes) in (ranges.into_iter()).zip(payload.chunks_exact_mut(MissingRange::LEN)) {
            bytes.copy_from_slice(&range.encode());
            count += 1;
        }
        let header = LmHeader::Missing {
            session_key,
            message,
            ranges: count as u32,
            manifest,
        };
        self.send_packet(peer.index, &header, &payload[..count * MissingRange::LEN]);
    }

    /// Reports messages before number `heard` that were given up, to the application and to their sender.
    pub(crate) fn report_given_up(&mut self, inbound: &mut Inbound, heard: u32) -> Vec<Zone> {
        let (given_up, zones) = inbound.give_up();
        let (peer, key) = (inbound.terms.peer, inbound.terms.key);
        self.book_repair(peer, std::mem::take(&mut inbound.places.repair));
        let is_heard = |message: &GivenUp| serial::precedes(message.number, heard);
        for message in given_up.into_iter().filter(is_heard) {
            // To a sender that repeats what is missing this would be a request.
            if inbound.terms.delivery != Delivery::Reliable && !message.is_aborted {
                self.report_missing(peer, key, &message);
            }
            self.report_incomplete(peer, message);
        }
        zones
    }

    /// Tells the sender what is missing of a message that is settled without it.
    fn report_missing(&mut self, peer: PeerId, session_key: u64, message: &GivenUp) {
        let ranges = message.missing.iter().map(|range| MissingRange {
            first: range.start,
            len: range.end - range.start,
        });
        if self.peers.named(peer).is_some() {
            self.send_missing(peer, (session_key, message.number), ranges, false);
        }
    }

    /// Tells the application that a message was given up.
    fn report_incomplete(&mut self, peer: PeerId, message: GivenUp) {
        self.counters.messages_incomplete += 1;
        let GivenUp {
            number,
            tag,
            len,
            missing,
            is_aborted,
        } = message;
        let failure = match is_aborted {
            true => RecvError::Aborted {
                peer,
                number,
                tag,
                len,
            },
            false => RecvError::Incomplete {
                peer,
                number,
                tag,
                len,
                missing,
            },
        };
        self.told.incomplete(failure);
    }
}
