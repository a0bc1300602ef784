//! What `cargo xtask bench instructions` runs under callgrind: one message of many fragments from one engine to the other,
//! with the rounds of either engine in a function of its own, whose instructions are counted and nobody else's.
//!
//! Packets cross the wire between the rounds ([`Delivery::Manual`]), so that the simulated kernel does not work inside them. Virtual
//! time and one thread: the same instructions in each run.
#![cfg(test)]

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::integrity::Integrity;

use super::bed::{Bed, BedConfig, fill, noise};
use crate::PeerId;
use crate::config::EndpointConfig;
use crate::engine::Engine;
use crate::simnic::{Delivery, SimNic, WireConfig};

/// Fragments of the message; without it few, as the ordinary test runs it.
const FRAGMENTS: &str = "LM_INSTRUCTIONS_FRAGMENTS";
/// `none` or `manifest`.
const INTEGRITY: &str = "LM_INSTRUCTIONS_INTEGRITY";

/// Payload of a full fragment at MTU 1500.
const PAYLOAD_LEN: usize = 1448;

/// A round of the sending engine. Callgrind collects between its begin and its end: the name is known to `xtask`.
#[inline(never)]
fn counted_round_of_sender(engine: &mut Engine<SimNic>, now_ns: u64) {
    engine.poll(now_ns);
}

/// A round of the receiving engine.
#[inline(never)]
fn counted_round_of_receiver(engine: &mut Engine<SimNic>, now_ns: u64) {
    // What differs from the sender's keeps the two from being folded into one function.
    std::hint::black_box(engine.poll(now_ns));
}

/// Sends the payload and runs both engines, by turns, until it was received and confirmed.
fn transfer(bed: &mut Bed, peer: PeerId, payload: &[u8]) {
    let mut region = bed.hosts[0].loan(peer, payload.len() as u64).expect("memory");
    fill(&mut region, payload);
    let now_ns = bed.now_ns;
    bed.hosts[0].submit(region, 1, now_ns).expect("room");
    let mut received = false;
    for _ in 0..10_000 {
        bed.now_ns += super::bed::ROUND_NS;
        bed.wire.advance(bed.now_ns);
        counted_round_of_sender(&mut bed.hosts[0], bed.now_ns);
        bed.wire.deliver(u32::MAX);
        counted_round_of_receiver(&mut bed.hosts[1], bed.now_ns);
        bed.wire.deliver(u32::MAX);
        if let Some(message) = bed.hosts[1].take_message().expect("no failure") {
            assert!(message[..] == *payload, "other bytes came");
            received = true;
        }
        if let Some(completion) = bed.hosts[0].completions.pop_front() {
            assert_eq!(completion.outcome, crate::Outcome::Delivered);
            assert!(received);
            return;
        }
    }
    panic!("not confirmed");
}

#[test]
fn subject() {
    let fragments: usize = std::env::var(FRAGMENTS).map_or(300, |text| text.parse().expect("a number"));
    let integrity = match std::env::var(INTEGRITY).as_deref() {
        Ok("manifest") => Integrity::Manifest,
        Ok("none") | Err(_) => Integrity::None,
        Ok(other) => panic!("{other}: none or manifest"),
    };
    let len = fragments * PAYLOAD_LEN;
    let mut bed = Bed::new(&BedConfig {
        guarded: false,
        window: EndpointConfig::default().window_fragments,
        integrity,
        landing_len: 16 << 20,
        send_len: 16 << 20,
        landing_ring_len: crate::config::LANDING_RING_LEN_VETH,
        wire: WireConfig {
            delivery: Delivery::Inline,
            ..WireConfig::default()
        },
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, len as u64);
    bed.wire.set_delivery(Delivery::Manual);
    let payload = noise(7, len);
    transfer(&mut bed, peer, &payload);
    bed.check_clean();
    let engine = &bed.hosts[0];
    assert_eq!(engine.counters.data_packets_sent, fragments as u64);
    assert_eq!(engine.counters.user_copied_bytes, 0);
    assert_eq!(bed.hosts[1].counters.user_copied_bytes, 0);
}
