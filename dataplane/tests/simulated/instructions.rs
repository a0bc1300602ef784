//! What `cargo xtask bench instructions` runs under callgrind: one message of many fragments from one endpoint to the other,
//! with the rounds of either one in a function of its own, whose instructions are counted and nobody else's; and small messages to
//! and fro, with all that one end does between a message and its answer in such a function.
//!
//! Packets cross the wire between the rounds ([`Delivery::Manual`]), so that the simulated kernel does not work inside them. Virtual
//! time and one thread: the same instructions in each run. The endpoint's crate is compiled as for any program, without its tests.

use lm_dataplane::{ConnectOptions, Endpoint, Integrity, Outcome, PeerId};
use lm_sim::{Delivery, SimNic, WireConfig};

use super::world::{World, config, noise};

/// Fragments of the message, or messages that are answered; without it few, as the ordinary tests run it.
const COUNT: &str = "LM_INSTRUCTIONS_COUNT";
/// `none` or `manifest`.
const INTEGRITY: &str = "LM_INSTRUCTIONS_INTEGRITY";

/// Payload of a full fragment at MTU 1500.
const PAYLOAD_LEN: usize = 1448;
/// Length of a message that is answered.
const SMALL_LEN: usize = 64;

/// A round of the sending endpoint. Callgrind collects between its begin and its end: the name is known to `xtask`.
#[inline(never)]
fn counted_round_of_sender(end: &mut Endpoint<SimNic>) {
    end.poll();
}

/// A round of the receiving endpoint.
#[inline(never)]
fn counted_round_of_receiver(end: &mut Endpoint<SimNic>) {
    // What differs from the sender's keeps the two from being folded into one function.
    std::hint::black_box(end.poll());
}

/// What a program does from a message that waits on the ring to the answer that is with the kernel: a round, the message, the answer's
/// bytes, its way out.
#[inline(never)]
fn counted_answer(end: &mut Endpoint<SimNic>) {
    let message = end.try_recv().expect("no failure").expect("a message");
    let sent = end.try_send_copy(message.peer(), &message, message.tag());
    sent.expect("room");
}

/// Sends the payload and runs both endpoints, by turns, until it was received and confirmed.
fn transfer(world: &mut World, peer: PeerId, payload: &[u8]) {
    let mut region = world.ends[0].loan(peer, payload.len() as u64).expect("memory");
    let mut rest = payload;
    for range in region.payloads_mut() {
        let (now, later) = rest.split_at(range.len());
        range.copy_from_slice(now);
        rest = later;
    }
    world.ends[0].try_send(region, 1).expect("room");
    let (mut received, mut waiting) = (false, Vec::new());
    for _ in 0..10_000 {
        world.pass();
        counted_round_of_sender(&mut world.ends[0]);
        world.wire.deliver(u32::MAX);
        counted_round_of_receiver(&mut world.ends[1]);
        world.wire.deliver(u32::MAX);
        world.ends[1].status().waiting(&mut waiting);
        for sender in waiting.drain(..) {
            let message = world.ends[1].peer(sender).try_recv();
            let message = message.expect("no failure").expect("a message");
            assert!(message[..] == *payload, "other bytes came");
            received = true;
        }
        if let Some(completion) = world.ends[0].try_completion() {
            assert_eq!(completion.outcome, Outcome::Delivered);
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

/// Two endpoints with a session for messages of so many bytes.
fn world(integrity: Integrity, len: usize) -> (World, PeerId) {
    let mut world = World::new(WireConfig::default(), 2, &config(integrity));
    let options = ConnectOptions {
        max_message_len: len as u64,
        ..ConnectOptions::default()
    };
    let peer = world.connect(0, 1, &options);
    world.wire.set_delivery(Delivery::Manual);
    (world, peer)
}

#[test]
fn transfer_of_fragments() {
    let (fragments, integrity) = environment();
    let len = fragments * PAYLOAD_LEN;
    let (mut world, peer) = world(integrity, len);
    transfer(&mut world, peer, &noise(7, len));
    let [sender, receiver] = [0, 1].map(|host| world.ends[host].counters());
    assert_eq!(sender.data_packets_sent, fragments as u64);
    // One for a burst of 32, and for what is left at the end of a round.
    assert!(sender.wakeups <= sender.packets_sent / 8, "{sender:?}");
    assert_eq!(sender.user_copied_bytes, 0);
    assert_eq!(receiver.user_copied_bytes, 0);
}

/// As many as are handed over between two rounds.
#[test]
fn small_messages_share_doorbells() {
    let (mut world, peer) = world(Integrity::None, 1 << 20);
    let payload = noise(7, SMALL_LEN);
    world.pass();
    let before = world.ends[0].counters();
    for number in 0..40 {
        world.ends[0].try_send_copy(peer, &payload, number).expect("room");
    }
    world.ends[0].poll();
    let now = world.ends[0].counters();
    assert!(now.packets_sent >= before.packets_sent + 40, "{now:?}");
    assert!(now.wakeups <= before.wakeups + 3, "{now:?}");
}

#[test]
fn exchange_of_messages() {
    let (messages, integrity) = environment();
    let (mut world, peer) = world(integrity, 1 << 20);
    let payload = noise(7, SMALL_LEN);
    for number in 0..messages as u64 {
        world.pass();
        world.ends[0].try_send_copy(peer, &payload, number).expect("room");
        // The first message is no answer: it leaves with the round.
        world.ends[0].poll();
        world.wire.deliver(u32::MAX);
        counted_answer(&mut world.ends[1]);
        world.wire.deliver(u32::MAX);
        let answer = world.ends[0].try_recv().expect("no failure").expect("an answer");
        assert!(answer[..] == payload && answer.tag() == number);
        // Rounds without a packet, as there are while it is on its way.
        world.ends[1].poll();
    }
    world.wire.set_delivery(Delivery::Inline);
    for _ in 0..100 {
        world.round();
    }
    assert_eq!(world.ends[1].counters().messages_sent, messages as u64);
}
