//! One peer after the other: whoever serves many asks each for what is its own, and leaves what it has no room for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lm_dataplane::{ConnectOptions, Delivery, Ending, Integrity, Outcome, PeerId, RecvError};
use lm_sim::{Delivery as Delivering, WireConfig};

use super::world::{World, address, config, noise};

/// Three senders and one receiver, which knows them by these names.
fn world(delivery: Delivery) -> (World, [PeerId; 3], [PeerId; 3]) {
    let mut world = World::new(WireConfig::default(), 4, &config(Integrity::Manifest));
    let options = ConnectOptions {
        max_message_len: 1 << 20,
        delivery,
        ..ConnectOptions::default()
    };
    let senders = [0, 1, 2].map(|from| world.connect(from, 3, &options));
    let receivers = [0, 1, 2].map(|from| {
        world.ends[from]
            .try_send_copy(senders[from], b"hello", 0)
            .expect("room");
        let peer = world
            .until(|world| world.ends[3].try_recv().expect("no failure"))
            .peer();
        assert_eq!(world.ends[3].peer(peer).address(), Some(address(from)));
        world.until(|world| world.ends[from].try_completion());
        peer
    });
    (world, senders, receivers)
}

fn waiting(world: &World, host: usize) -> Vec<PeerId> {
    // What is in it already does not count.
    let mut peers = vec![];
    world.ends[host].status().waiting(&mut peers);
    let once = peers.clone();
    world.ends[host].status().waiting(&mut peers);
    assert_eq!(peers, once);
    peers
}

/// Messages that nobody takes neither hold up nor hide others', and each peer's keep their order.
#[test]
fn one_peers_messages_are_taken_and_others_wait() {
    let (mut world, senders, peers) = world(Delivery::Reliable);
    assert_eq!(waiting(&world, 3), []);
    for number in 0..3 {
        for from in [1, 0, 2] {
            let tag = 10 * from as u64 + number;
            let bytes = noise(tag, 5000 * (1 + number as usize));
            world.ends[from]
                .try_send_copy(senders[from], &bytes, tag)
                .expect("room");
            world.until(|world| world.ends[from].peer(senders[from]).try_completion());
        }
    }
    assert_eq!(waiting(&world, 3), [peers[1], peers[0], peers[2]]);
    for from in [2, 0] {
        for number in 0..3 {
            let message = world.ends[3].peer(peers[from]).try_recv();
            let message = message.expect("no failure").expect("a message");
            assert_eq!(message.tag(), 10 * from as u64 + number);
            assert_eq!(message[..], noise(message.tag(), message.len())[..]);
        }
        assert!(
            world.ends[3]
                .peer(peers[from])
                .try_recv()
                .expect("no failure")
                .is_none()
        );
    }
    assert_eq!(waiting(&world, 3), [peers[1]]);
    // What is left comes to whoever asks for anybody's.
    for number in 0..3 {
        let message = world.ends[3].try_recv().expect("no failure").expect("a message");
        assert_eq!((message.peer(), message.tag()), (peers[1], 10 + number));
    }
    assert_eq!(waiting(&world, 3), []);
}

/// A message that stays incomplete is its sender's, in its place among that one's messages.
#[test]
fn a_failure_comes_to_whoever_asks_for_its_sender() {
    let (mut world, senders, peers) = world(Delivery::Unreliable);
    let lost = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&lost);
    world.wire.set_filter(move |from, packet| {
        let is_first = from == 0 && packet.len() > 1000 && count.fetch_add(1, Ordering::Relaxed) == 0;
        !is_first
    });
    let bytes = noise(5, 50_000);
    for (from, tag) in [(0, 1), (1, 2), (0, 3)] {
        world.ends[from]
            .try_send_copy(senders[from], &bytes, tag)
            .expect("room");
        world.until(|world| world.ends[from].try_completion());
    }
    assert_eq!(waiting(&world, 3), [peers[0], peers[1]]);
    let message = world.ends[3].peer(peers[1]).try_recv().expect("no failure");
    assert_eq!(message.expect("a message").tag(), 2);
    let failure = world.ends[3].peer(peers[0]).try_recv();
    let Err(RecvError::Incomplete { peer, tag: 1, .. }) = failure else {
        panic!("{failure:?}");
    };
    assert_eq!(peer, peers[0]);
    let message = world.ends[3].peer(peers[0]).try_recv().expect("no more failures");
    assert_eq!(message.expect("a message").tag(), 3);
    assert_eq!(waiting(&world, 3), []);
}

/// The ends of what was sent are told by receiver.
#[test]
fn completions_come_to_whoever_asks_for_their_receiver() {
    let (mut world, _, peers) = world(Delivery::Reliable);
    let tokens = [2, 0, 1].map(|to| {
        let token = world.ends[3]
            .try_send_copy(peers[to], b"news", to as u64)
            .expect("room");
        world.until(|world| world.ends[to].try_recv().expect("no failure"));
        token
    });
    world.until(|world| (waiting(world, 3).len() == 3).then_some(()));
    for (to, token) in [(0, tokens[1]), (2, tokens[0]), (1, tokens[2])] {
        let completion = world.ends[3].peer(peers[to]).try_completion().expect("an end");
        assert_eq!((completion.peer, completion.token), (peers[to], token));
        assert_eq!(completion.outcome, Outcome::Delivered);
        assert!(world.ends[3].peer(peers[to]).try_completion().is_none());
    }
    assert_eq!(waiting(&world, 3), []);
}

/// A watched peer's message waits as soon as it has begun, and for whoever asks for that peer.
#[test]
fn a_message_that_begins_waits_under_its_sender() {
    let (mut world, senders, peers) = world(Delivery::Reliable);
    for peer in peers {
        assert!(world.ends[3].peer(peer).watch());
    }
    world.wire.set_delivery(Delivering::Manual);
    let bytes = noise(5, 1 << 20);
    for from in [0, 1] {
        world.ends[from]
            .try_send_copy(senders[from], &bytes, from as u64)
            .expect("room");
    }
    let both = |world: &World| waiting(world, 3).len() == 2;
    world.until(|world| {
        world.wire.deliver(8);
        both(world).then_some(())
    });
    assert!(
        world.ends[3].try_recv().expect("no failure").is_none(),
        "nothing is whole"
    );
    let second = world.ends[3].peer(peers[1]).try_incoming().expect("it has begun");
    assert_eq!((second.peer(), second.tag()), (peers[1], 1));
    assert!(world.ends[3].peer(peers[1]).try_incoming().is_none());
    assert_eq!(waiting(&world, 3), [peers[0]]);
    world.wire.set_delivery(Delivering::Inline);
    world.until(|world| second.settled().map(|_| both(world)));
    let message = world.ends[3].peer(peers[1]).try_recv().expect("no failure");
    assert_eq!(message.expect("whole")[..], bytes[..]);
    assert_eq!(second.settled(), Some(Ending::Whole));
}
