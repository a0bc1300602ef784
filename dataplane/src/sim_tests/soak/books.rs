//! What a soak checks of its run: bytes, memory that nobody may write to, packets and messages that must all be accounted for.

use lm_protocol::wire::lm::Facts;
use lm_protocol::zone::ZONE_ALIGN;

use crate::completion::Outcome;
use crate::message::Message;
use crate::port::RxQueue as _;

use super::run::{Run, payload};

impl Run {
    /// What a sender was told is true.
    pub(super) fn check_outcomes(&self) -> Result<(), String> {
        for host in [0, 1] {
            let (sender, receiver) = (&self.applications[host], &self.applications[1 - host]);
            if sender.dead {
                continue;
            }
            let is_contradicted = |tag, outcome: &Outcome| match sender.given_up.contains(tag) {
                true => *outcome == Outcome::Delivered || receiver.received.contains(tag),
                false => *outcome == Outcome::Aborted,
            };
            for (tag, outcome) in &sender.sent {
                match outcome {
                    // Confirmed, and its application died before it took it.
                    Some(Outcome::Delivered) if !receiver.dead && !receiver.received.contains(tag) => {
                        return Err(format!("message {tag:#x} was confirmed and not delivered"));
                    }
                    None => return Err(format!("message {tag:#x} has no completion")),
                    Some(outcome) if is_contradicted(tag, outcome) => {
                        let whether = if sender.given_up.contains(tag) { "" } else { "not " };
                        return Err(format!(
                            "message {tag:#x} was {whether}given up, and ended as {outcome:?}"
                        ));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Every packet and every message is accounted for.
    pub(super) fn check_books(&self) -> Result<(), String> {
        let wire = self.bed.wire.counters();
        let impaired = [0, 1].map(|from| self.bed.wire.impairment_counters(from));
        if !wire.are_balanced(&impaired) {
            return Err(format!("packets are unaccounted for: {wire:?} {impaired:?}"));
        }
        let (mut judged, mut redirected, mut datagrams) = (0, 0, 0);
        for (host, engine) in self.bed.hosts.iter().enumerate() {
            let gate = engine.port.gate_counters();
            judged += gate.total();
            redirected += gate.get(lm_ebpf::Verdict::RedirectLanding);
            redirected += gate.get(lm_ebpf::Verdict::RedirectGeneral);
            let counters = &engine.counters;
            datagrams += counters.one_copy_packets + counters.control_packets;
            check_packets(engine).map_err(|error| format!("host {host}: {error}"))?;
            let application = &self.applications[host];
            let completed = |delivered: bool| {
                let outcomes = application.sent.values().flatten();
                outcomes
                    .filter(|outcome| (**outcome == Outcome::Delivered) == delivered)
                    .count() as u64
            };
            let sent = self.bed.wire.sent(host);
            if counters.data_packets_sent > sent {
                let fragments = counters.data_packets_sent;
                return Err(format!(
                    "host {host} counts {fragments} fragments sent, the wire saw {sent}"
                ));
            }
            if application.dead {
                continue;
            }
            let counted = [
                counters.messages_received,
                counters.messages_sent,
                counters.messages_failed,
            ];
            let found = [
                application.received.len() as u64,
                completed(true),
                completed(false),
            ];
            if counted != found {
                return Err(format!(
                    "host {host} counts {counted:?} messages received, confirmed and failed, and there are {found:?}"
                ));
            }
        }
        // Datagrams here are shorter than the MTU, so that every packet meets a gate.
        if judged + wire.device_lost != wire.arrived
            || redirected != wire.received + wire.ring_lost + wire.gate_lost
        {
            return Err(format!(
                "the gates judged {judged} packets and redirected {redirected}: {wire:?}"
            ));
        }
        // A dead host leaves datagrams in its sockets, and so does one that has just ended.
        let unread: u64 = [0, 1]
            .map(|host| self.bed.wire.unread_datagrams(host))
            .iter()
            .sum();
        if datagrams + unread != wire.in_sockets {
            return Err(format!(
                "engines took {datagrams} datagrams, and {unread} wait: {wire:?}"
            ));
        }
        Ok(())
    }

    pub(super) fn check_guards(&mut self) -> Result<(), String> {
        for host in [0, 1] {
            self.guards[host]
                .check_free(&mut self.bed.hosts[host])
                .map_err(|error| format!("host {host}: {error}"))?;
        }
        match self.bed.wire.strayed() {
            0 => Ok(()),
            times => Err(format!("{times} packets were written outside the receive memory")),
        }
    }

    pub(super) fn check_margins(
        &mut self,
        host: usize,
        message: &Message,
        zone: (u64, u64),
    ) -> Result<(), String> {
        let len = message.len() as u64;
        // With facts, if it came with some.
        let geometry = Facts::geometry(&self.layout, len).or_else(|| self.layout.session_message(len).ok());
        let geometry = geometry.expect("a length that was sent");
        // In zero-copy mode a device writes before packets, and those that nobody sent may be longer than a fragment.
        let fixed = &self.bed.hosts[host].fixed;
        let behind = if fixed.caps.witness { 0 } else { ZONE_ALIGN };
        let first =
            message.umem_offset() - u64::from(self.layout.header_len()) - u64::from(fixed.caps.prefix_len);
        let payload_len = geometry.rx_zone_payload_len().next_multiple_of(ZONE_ALIGN);
        let written = first..message.umem_offset() + payload_len + behind;
        self.guards[host].check_margins(&mut self.bed.hosts[host], zone, written)
    }

    /// The message is what its sender sent.
    pub(super) fn check(&self, host: usize, message: &Message, when: &str) -> Result<(), String> {
        let tag = message.tag();
        let lens = &self.plan.messages[1 - host];
        let len = match tag >> 32 == 1 - host as u64 {
            true => lens.get(tag as u32 as usize),
            false => None,
        };
        let Some(&len) = len else {
            return Err(format!("host {host} got message {tag:#x}, which nobody sent"));
        };
        let mut expected = payload(self.seed, tag, len);
        for range in message.missing() {
            expected[range.start as usize..range.end as usize].fill(0);
        }
        if message.len() != len {
            return Err(format!(
                "message {tag:#x} has {} bytes instead of {len} {when}",
                message.len()
            ));
        }
        match message.iter().zip(&expected).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of {len} of message {tag:#x} is wrong {when}")),
        }
    }
}

/// What a host's gate let through is what its engine took and what lies on its rings, and what the engine took was of use or
/// moved one counter of drops. Exactly: nothing is lost between the books.
///
/// ```text
///   gate: redirect_landing = landing_packets + drops.landing_discarded + on the ring
///   gate: redirect_general = general_packets + drops.foreign_frame + lost at the ring (XDP_STATISTICS) + on the ring
///   landing_packets + general_packets + one_copy_packets + control_packets + landing_heard
///       = packets_used + challenged        what is no fragment
///       + fragments_delivered              in messages that were shown
///       + fragments of open messages
///       + Σ drops                          but those that were not taken: landing_discarded, foreign_frame, foreign_completion
/// ```
/// The wire's own books ([`crate::simnic::Wire::are_balanced`]) say the same of the way from a host's TX rings to the other
/// one's gate: sent + duplicated + injected = judged + lost + held.
pub(in crate::sim_tests) fn check_packets(
    engine: &crate::engine::Engine<crate::simnic::SimNic>,
) -> Result<(), String> {
    let counters = &engine.counters;
    let gate = engine.port.gate_counters();
    let mut open = 0;
    if let Some(landing) = &engine.landing {
        let on_ring = landing.rx.accepted() - landing.sessions.entries.received;
        let accepted = gate.get(lm_ebpf::Verdict::RedirectLanding);
        let open_landed = landing.sessions.arrivals.landed;
        let taken = counters.landing_packets + open_landed + counters.drops.landing_discarded;
        if accepted != taken + on_ring {
            return Err(format!(
                "the gate let {accepted} fragments land, {taken} were taken or discarded, {on_ring} wait"
            ));
        }
        open += (landing.sessions.iter())
            .map(|inbound| inbound.open_fragments())
            .sum::<u64>();
    }
    let taken = counters.landing_packets
        + counters.general_packets
        + counters.one_copy_packets
        + counters.control_packets
        + counters.landing_heard;
    let dropped: u64 = counters.drops.iter().map(|(_, count)| count).sum();
    let others = counters.drops.landing_discarded
        + counters.drops.foreign_frame
        + counters.drops.foreign_completion
        + counters.drops.manifest_contradictory;
    let dropped = dropped - others;
    let used = counters.packets_used + counters.challenged + counters.fragments_delivered + open;
    if taken != used + dropped {
        return Err(format!(
            "{taken} packets were taken, {used} were of use and {dropped} dropped ({open} in open messages): \
             {counters:?}"
        ));
    }
    Ok(())
}
