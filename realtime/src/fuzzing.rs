//! What the fuzz target in `fuzz/` does with its bytes, and the tests with every input that is committed there. It panics where something is
//! wrong.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use lm_dataplane::PeerId;
use lm_protocol::serial;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{RealTimePacket, RtReport};

use crate::assembling::{Assembling, Put};
use crate::flows::FlowKey;
use crate::incoming::Incoming;
use crate::pool::{Blocks, Pool};
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
                // Half of all numbers ahead is neither before nor behind.
                assert!(serial::distance(report.newest, packet.message) <= 0);
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

/// Fragments of three addresses' flows, 8 bytes each, in a socket with few blocks: what comes whole is what was sent, the address that
/// has most gives way, and all blocks come back.
pub fn assembling(bytes: &[u8]) {
    let blocks = Blocks {
        of_1: 2,
        of_4: 3,
        ..Blocks::default()
    };
    let pool = Pool::new(None, blocks).expect("a few pages");
    let (mut assembling, mut now) = (Assembling::new(Arc::clone(&pool), 5), Time::ZERO);
    for fragment in bytes.chunks_exact(8) {
        let [address, key, message, index, count, stride, last, waits] =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|at| fragment[at] as usize);
        now += Duration::from_micros(waits as u64 * 16);
        let (count, stride) = (2 + count % 4, 1 + stride * 16);
        let (index, len) = (index % count, (count - 1) * stride + 1 + last % stride);
        let flow = FlowKey {
            address: Ipv4Addr::from_bits(address as u32 % 3),
            peer: PeerId::default(),
            key: key as u64 % 2,
        };
        let seed = [address % 3, key % 2, message % 8]
            .into_iter()
            .fold(0, |seed, digit| seed * 8 + digit);
        let content: Vec<u8> = (0..len).map(|at| (at * 7 + seed) as u8).collect();
        let packet = RealTimePacket {
            message: message as u32 % 8,
            index: index as u16,
            count: count as u16,
            message_len: len as u32,
            offset: (index * stride) as u32,
            payload: &content[index * stride..len.min((index + 1) * stride)],
            ..RealTimePacket::default()
        };
        let mut put = assembling.put(flow, &packet, now);
        if matches!(put, Put::NoBlock)
            && let Some((gone, _)) = assembling.make_way(len)
        {
            let of = |address: u32| assembling.unfinished(Ipv4Addr::from_bits(address), len);
            assert!((0..3).all(|other| of(other) <= 1 + assembling.unfinished(gone.address, len)));
            put = assembling.put(flow, &packet, now);
            assert!(!matches!(put, Put::NoBlock));
        }
        if let Put::Whole(block) = put {
            assert!(*block.bytes() == content);
            assembling.forget(flow, packet.message);
        }
        assembling.give_up(now, |_, _| ());
        assert!(assembling.due().is_none_or(|due| due >= now));
    }
    assembling.give_up(Time::MAX, |_, _| ());
    let all = [1, 1, 4000, 4000, 4000].map(|len| pool.take(len));
    assert!(all.iter().all(Option::is_some));
}

#[cfg(test)]
#[path = "../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_of_assembling_is_survived() {
        replay("assembling", super::assembling);
    }

    #[test]
    fn the_corpus_of_realtime_is_survived() {
        replay("realtime", super::flow);
    }
}
