//! What `cargo xtask bench instructions` runs under callgrind: one message of many fragments from one engine to the other,
//! with the rounds of either engine in a function of its own, whose instructions are counted and nobody else's; and small messages to
//! and fro, with all that one end does between a message and its answer in such a function.
//!
//! Packets cross the wire between the rounds ([`Delivery::Manual`]), so that the simulated kernel does not work inside them. Virtual
//! time and one thread: the same instructions in each run.
#![cfg(test)]

use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::integrity::Integrity;

use super::bed::{Bed, BedConfig, fill, noise};
use crate::PeerId;
use crate::config::EndpointConfig;
use crate::engine::Engine;
use crate::simnic::{Delivery, SimNic, WireConfig};

/// Fragments of the message, or messages that are answered; without it few, as the ordinary tests run it.
const COUNT: &str = "LM_INSTRUCTIONS_COUNT";
/// `none` or `manifest`.
const INTEGRITY: &str = "LM_INSTRUCTIONS_INTEGRITY";

/// Payload of a full fragment at MTU 1500.
const PAYLOAD_LEN: usize = 1448;
/// Length of a message that is answered.
const SMALL_LEN: usize = 64;

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

/// What an engine does from a message that waits on its ring to the answer that is with the kernel, as the application's calls ask for
/// it: a round, the message, the answer's bytes, its way out.
#[inline(never)]
fn counted_answer(engine: &mut Engine<SimNic>, now_ns: u64) {
    engine.poll(now_ns);
    let message = engine.take_message().expect("no failure").expect("a message");
    let submitted = engine.submit_copy(message.peer(), &message, message.tag(), now_ns);
    submitted.expect("one fragment").expect("room");
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
        if let Some(completion) = bed.hosts[0].told.completions().pop_front() {
            assert_eq!(completion.outcome, crate::Outcome::Delivered);
            assert!(received);
            return;
        }
    }
    panic!("not confirmed");
}

fn environment() -> (usize, Integrity) {
    let count: usize = std::env::var(COUNT).map_or(300, |text| text.parse().expect("a number"));
    let integrity = match std::env::var(INTEGRITY).as_deref() {
        Ok("manifest") => Integrity::Manifest,
        Ok("none") | Err(_) => Integrity::None,
        Ok(other) => panic!("{other}: none or manifest"),
    };
    (count, integrity)
}

fn bed(integrity: Integrity) -> Bed {
    Bed::new(&BedConfig {
        guarded: false,
        window: EndpointConfig::default().receive.window_fragments,
        integrity,
        landing_len: 16 << 20,
        send_len: 16 << 20,
        landing_ring_len: crate::over::LANDING_RING_LEN_BOUND,
        wire: WireConfig {
            delivery: Delivery::Inline,
            ..WireConfig::default()
        },
        ..BedConfig::default()
    })
}

#[test]
fn transfer_of_fragments() {
    let (fragments, integrity) = environment();
    let len = fragments * PAYLOAD_LEN;
    let mut bed = bed(integrity);
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

#[test]
fn exchange_of_messages() {
    let (messages, integrity) = environment();
    let mut bed = bed(integrity);
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    bed.wire.set_delivery(Delivery::Manual);
    let payload = noise(7, SMALL_LEN);
    for number in 0..messages as u64 {
        bed.now_ns += super::bed::ROUND_NS;
        bed.wire.advance(bed.now_ns);
        let now_ns = bed.now_ns;
        let mut region = bed.hosts[0].loan(peer, payload.len() as u64).expect("memory");
        fill(&mut region, &payload);
        bed.hosts[0].submit(region, number, now_ns).expect("room");
        // The first message is no answer: it leaves with the round.
        bed.hosts[0].poll(now_ns);
        bed.wire.deliver(u32::MAX);
        counted_answer(&mut bed.hosts[1], now_ns);
        bed.wire.deliver(u32::MAX);
        bed.hosts[0].poll(now_ns);
        let answer = bed.hosts[0]
            .take_message()
            .expect("no failure")
            .expect("an answer");
        assert!(answer[..] == payload && answer.tag() == number);
        // Rounds without a packet, as there are while it is on its way.
        bed.hosts[1].poll(now_ns);
    }
    bed.wire.set_delivery(Delivery::Inline);
    bed.pass(Duration::from_millis(2));
    bed.check_clean();
    assert_eq!(bed.hosts[1].counters.messages_sent, messages as u64);
}
