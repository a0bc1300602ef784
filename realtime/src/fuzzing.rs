//! What the fuzz target in `fuzz/` does with its bytes, and the tests with every input that is committed there. It panics where something is
//! wrong.

use std::sync::Arc;
use std::time::Duration;

use lm_protocol::serial;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{RealTimePacket, RtReport};

use crate::incoming::Incoming;
use crate::sending::Sent;

/// Packets of a flow and reports about it, 64 bytes each: what is read can be written, a receiver's sums only grow and are those of its
/// report, and no report has a sender believe in more than it sent.
pub fn flow(bytes: &[u8]) {
    let (sent, mut incoming, mut now) = (Sent::new(Arc::default(), 1, 1), None::<Incoming>, Time::ZERO);
    for packet in bytes.chunks_exact(64) {
        let (head, payload) = packet.split_at(16);
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let words = [word(4), word(8), word(12)];
        now += Duration::from_micros(word(0).into());
        if let Ok(packet) = RealTimePacket::read(words, payload) {
            let written = [packet.payload, &packet.tail()].concat();
            assert_eq!(RealTimePacket::read(packet.words(), &written), Ok(packet));
            let incoming = incoming.get_or_insert_with(|| Incoming::new(&packet, now));
            incoming.came(&packet, true, (now, Duration::ZERO), now);
            incoming.newly_lost();
            if let Some(report) = incoming.report(now) {
                assert!(serial::at_or_before(packet.message, report.newest));
            }
        }
        if let Ok(report) = RtReport::read(words, &payload[..RtReport::LEN]) {
            let (words, bytes) = report.write();
            assert_eq!(RtReport::read(words, &bytes), Ok(report));
            sent.sends();
            let before = sent.whole().wrapping_add(sent.lost());
            sent.take(&report);
            let told = sent.whole().wrapping_add(sent.lost());
            assert!(serial::at_or_before(before, told) && serial::at_or_before(told, sent.sends()));
        }
    }
}

#[cfg(test)]
#[path = "../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_of_realtime_is_survived() {
        replay("realtime", super::flow);
    }
}
