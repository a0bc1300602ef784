//! What is looked at in a bed: guard bytes, memory that came back, and counters.

use super::*;

impl Bed {
    /// Looks at the guard bytes of all free landing memory.
    #[cfg(test)]
    pub(crate) fn check_guards(&mut self) {
        for (host, (guard, engine)) in self.guards.iter_mut().zip(&mut self.hosts).enumerate() {
            if let Some(guard) = guard {
                let checked = guard.check_free(engine);
                checked.unwrap_or_else(|error| panic!("host {host}: {error}"));
            }
        }
    }

    /// Paints what was given back since the last round.
    #[cfg(test)]
    pub(super) fn look_after(&mut self) {
        for (guard, engine) in self.guards.iter_mut().zip(&mut self.hosts) {
            if let Some(guard) = guard {
                guard.look(engine);
            }
        }
    }

    #[cfg(not(test))]
    pub(super) fn look_after(&mut self) {}

    /// Looks at the margins around a message in a landing zone.
    #[cfg(test)]
    pub(super) fn check_margins(&mut self, host: usize, message: &Message) {
        let engine = &mut self.hosts[host];
        // Of other wires and layouts the test knows more.
        let layout = Layout::new(WireMode::Lm, engine.fixed.mtu, engine.fixed.link).ok();
        let layout = layout.filter(|layout| {
            (engine.landing.as_ref())
                .and_then(|landing| landing.sessions.iter().next())
                .is_some_and(|inbound| inbound.terms.layout == *layout)
        });
        let (Some(guard), Some(Released::Zone { start, len }), Some(layout)) =
            (&mut self.guards[host], &message.released, layout)
        else {
            return;
        };
        let Ok(geometry) = layout.session_message(message.len() as u64) else {
            return;
        };
        // With facts, if it came with some.
        let geometry = Facts::geometry(&layout, message.len() as u64).unwrap_or(geometry);
        let payload_len = geometry.rx_zone_payload_len().next_multiple_of(ZONE_ALIGN);
        // In zero-copy mode foreign packets may be longer than a fragment: to the chunk's end (I2).
        let (before, behind) = match engine.fixed.caps.witness {
            true => (0, 0),
            false => (
                u64::from(engine.fixed.caps.prefix_len),
                u64::from(engine.fixed.chunk_len),
            ),
        };
        let written = message.umem_offset() - u64::from(layout.header_len()) - before
            ..message.umem_offset() + payload_len + behind;
        let checked = guard.check_margins(engine, (*start, *len), written);
        checked.unwrap_or_else(|error| panic!("host {host}: {error}"));
    }

    #[cfg(not(test))]
    pub(super) fn check_margins(&mut self, _host: usize, _message: &Message) {}

    /// Everything was given back, and nothing is under way. Sessions may be open.
    pub(crate) fn check_memory(&mut self) {
        self.pass(Duration::from_millis(30));
        for host in 0..self.hosts.len() {
            self.check_memory_of(host);
        }
    }

    /// The same of one host, after rounds in which it has taken everything back.
    pub(crate) fn check_memory_of(&mut self, host: usize) {
        let engine = &mut self.hosts[host];
        let (free, held) = engine.small.frames();
        assert_eq!(free, GENERAL_FRAMES, "general frames of host {host}");
        assert_eq!(held, 0, "host {host}");
        assert_eq!(
            engine.sending.parts().1.available(),
            TRANSMIT_FRAMES as usize,
            "transmit frames of host {host}"
        );
        assert_eq!(engine.sending.arena().live(), 0, "send regions of host {host}");
        assert!(engine.sending.arena().is_whole(), "send arena of host {host}");
        #[cfg(test)]
        assert_eq!(
            engine.sending.outgoing.available(),
            OUTGOING_MAX,
            "outgoing messages of host {host}"
        );
        for transmit in engine.sending.scheduler().queues() {
            assert_eq!(transmit.in_flight(), 0, "queue {} of host {host}", transmit.queue);
        }
        if let Some(landing) = &engine.landing {
            assert_eq!(landing.arena.live(), 0, "landing zones of host {host}");
            assert!(landing.arena.is_whole(), "landing arena of host {host}");
            assert!(
                landing
                    .placing
                    .as_ref()
                    .is_none_or(|placing| placing.placed() == 0)
            );
            let entries = &landing.sessions.entries;
            let unused = entries.outstanding() - entries.standing();
            // Without a witness some are left that are for no message.
            let may_be_left = !engine.fixed.caps.witness;
            assert!(unused == 0 || may_be_left, "{unused} entries of host {host}");
            assert!(
                entries.are_used() || entries.standing() > 0,
                "entries of host {host}"
            );
        }
        assert!(engine.told.messages().count() == 0 && engine.told.completions().is_empty());
    }

    /// Nothing was dropped, and no invariant violated.
    pub(crate) fn check_clean(&self) {
        for (host, engine) in self.hosts.iter().enumerate() {
            for (name, count) in engine.counters.drops() {
                assert_eq!(count, 0, "{name} of host {host}");
            }
            let counters = &engine.counters;
            assert_eq!(counters.messages_failed, 0, "host {host}");
            assert_eq!(counters.messages_incomplete, 0, "host {host}");
            assert_eq!(counters.frames_exhausted, 0, "host {host}");
            assert_eq!(counters.control_send_errors, 0, "host {host}");
            assert_eq!(counters.landing_lost, 0, "host {host}");
            for transmit in engine.sending.scheduler().queues() {
                let statistics = engine.port.statistics(transmit.queue).expect("an open channel");
                assert_eq!(
                    (
                        statistics.rx_dropped,
                        statistics.rx_ring_full,
                        statistics.tx_invalid_descriptors
                    ),
                    (0, 0, 0),
                    "queue {} of host {host}",
                    transmit.queue
                );
            }
        }
        let counters = self.wire.counters();
        assert_eq!(
            (counters.too_long, counters.stack_ignored, counters.socket_full),
            (0, 0, 0)
        );
    }
}
