//! Stories: devices with one queue, sessions that follow one another, back-pressure.

use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, IPS, ROUND_NS, TWO_QUEUES, data_address, fill, noise};
use crate::completion::{LoanError, Outcome, SendError};
use crate::connect::{ConnectError, ConnectOptions};
use crate::opening::Queues;
use crate::simnic::{self, Delivery, WireConfig};

const ONE_QUEUE: Queues = Queues {
    general: None,
    landing: Some(0),
};

#[test]
fn with_one_queue_small_traffic_takes_the_kernels_socket() {
    let mut bed = Bed::new(&BedConfig {
        queues: [ONE_QUEUE; 2],
        ..BedConfig::default()
    });
    let there = bed.session(0, WireMode::Lm, 1 << 20);
    let back = bed.session(1, WireMode::Lm, 1 << 20);
    for len in [0, 1, 1448, 1449, 100_000, 1 << 20] {
        bed.exchange(0, there, &noise(len as u64, len));
        bed.exchange(1, back, &noise(len as u64 + 1, len));
    }
    // More small ones than are taken from the socket in one look.
    for n in 0..150u64 {
        bed.send(0, there, &noise(n, 300), n);
    }
    for n in 0..150u64 {
        let message = bed.recv(1);
        assert_eq!((message.tag(), &message[..]), (n, &noise(n, 300)[..]));
        assert!(message.is_eager());
    }
    bed.rounds(100);
    for host in &mut bed.hosts {
        assert!(host.counters.one_copy_packets > 6 && host.counters.general_packets == 0);
        host.told.completions().clear();
    }
    bed.check_memory();
    bed.check_clean();
}

#[test]
fn a_landing_queue_of_another_number_is_reached_by_its_like() {
    let mut bed = Bed::new(&BedConfig {
        queues: [
            TWO_QUEUES,
            Queues {
                general: Some(0),
                landing: Some(2),
            },
        ],
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    for len in [10, 5000, 1 << 20] {
        bed.exchange(0, peer, &noise(len as u64, len));
    }
    let queues = |bed: &Bed| {
        bed.hosts[0]
            .sending
            .scheduler()
            .queues()
            .iter()
            .map(|queue| queue.queue)
            .collect::<Vec<_>>()
    };
    assert_eq!(queues(&bed), [0, 1, 2]);
    // The channel is opened once.
    bed.session(0, WireMode::Lm, 1 << 20);
    bed.exchange(0, peer, &noise(3, 50_000));
    assert_eq!(queues(&bed).len(), 3);
    bed.check_memory();
    bed.check_clean();
}

/// Small traffic that a device delivers to another queue than the general one comes through the kernel's socket,
/// also when many peers are known and much is posted for them.
#[test]
fn small_traffic_on_the_wrong_queue_comes_through_the_socket() {
    let mut bed = Bed::new(&BedConfig {
        queues: [
            TWO_QUEUES,
            Queues {
                general: Some(1),
                landing: Some(0),
            },
        ],
        ..BedConfig::default()
    });
    for n in 0..100u16 {
        let address = std::net::SocketAddrV4::new(IPS[0], 20_000 + n);
        let addressing = bed.hosts[1].addressing_to(address, simnic::mac_of(IPS[0]));
        let now_ns = bed.now_ns;
        bed.hosts[1].peers.find_or_add(address, &addressing, now_ns);
    }
    let peer = bed.resolve(0);
    bed.rounds(3);
    for n in 0..300 {
        bed.exchange(0, peer, &noise(n, 700));
    }
    // And the first one once more, with the proof that was asked for.
    assert_eq!(bed.hosts[1].counters.one_copy_packets, 300 + 2);
    bed.check_memory();
    bed.check_clean();
}

#[test]
fn sessions_follow_one_another() {
    let mut bed = Bed::new(&BedConfig::default());
    for n in 0..10u64 {
        let wire = [WireMode::Lm, WireMode::IpFrag][n as usize % 2];
        let peer = bed.session(0, wire, 60_000);
        bed.exchange(0, peer, &noise(n, 60_000));
        bed.exchange(0, peer, &noise(n, 5_000));
    }
    assert_eq!(bed.hosts[1].counters.sessions_granted, 10);
    assert_eq!(bed.hosts[1].counters.sessions_ended, 9);
    // A region of an earlier session's layout does not fit the next one's.
    let peer = bed.session(0, WireMode::Lm, 60_000);
    let mut region = bed.hosts[0].loan(peer, 40_000).expect("memory");
    fill(&mut region, &noise(1, 40_000));
    bed.session(0, WireMode::IpFrag, 60_000);
    let now_ns = bed.now_ns;
    let refused = bed.hosts[0]
        .submit(region, 0, now_ns)
        .expect_err("another layout");
    assert_eq!(refused.reason, SendError::NoSession);
    drop(refused);
    bed.check_memory();
    bed.check_clean();
}

/// A region is loaned before the message's length is known, and cut to it: down to nothing.
#[test]
fn a_message_may_turn_out_shorter_than_its_region() {
    for wire in [WireMode::Lm, WireMode::IpFrag] {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = bed.session(0, wire, 60_000);
        for len in [59_999usize, 2896, 2895, 1473, 1472, 1449, 1448, 10, 1, 0, 60_000] {
            let payload = noise(len as u64, len);
            let mut region = bed.hosts[0].loan(peer, 60_000).expect("memory");
            region.truncate(len as u64);
            fill(&mut region, &payload);
            let now_ns = bed.now_ns;
            bed.hosts[0].submit(region, 3, now_ns).expect("room");
            let message = bed.recv(1);
            assert!(message[..] == payload[..], "{wire:?}, {len} bytes");
            drop(message);
            assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
        }
        bed.check_memory();
        bed.check_clean();
    }
}

#[test]
fn what_the_receiver_cannot_hold_is_refused() {
    let mut bed = Bed::new(&BedConfig::default());
    let options = ConnectOptions {
        max_message_len: 9 << 20,
        ..ConnectOptions::default()
    };
    assert!(matches!(
        bed.connect(0, &options),
        Err(ConnectError::Rejected { limit, .. }) if limit == 8 << 20
    ));
    let peer = bed.session(0, WireMode::Lm, 100_000);
    assert_eq!(
        bed.hosts[0].loan(peer, 100_001).expect_err("too long"),
        LoanError::TooLarge { limit: 100_000 }
    );
    bed.check_memory();
}

#[test]
fn landing_memory_grows_under_held_messages_and_under_our_own_sending() {
    let mut bed = Bed::new(&BedConfig {
        landing_len: 1 << 20,
        max_message_len: 60 << 20,
        send_len: 70 << 20,
        on_the_way: u32::MAX,
        tx_in_flight: 1024,
        ..BedConfig::default()
    });
    let small = noise(1, 100_000);
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.send(0, peer, &small, 1);
    let held = bed.recv(1);
    bed.completion(0);
    let landing_len = |bed: &Bed| bed.hosts[1].landing.as_ref().expect("landing").arena.len();
    let before = landing_len(&bed);

    // Host 1 sends on the channel that is about to be built anew, and the wire is slow.
    let back = bed.session(1, WireMode::Lm, 4 << 20);
    let own = noise(2, 4 << 20);
    bed.send(1, back, &own, 2);
    bed.rounds(3);
    let now_ns = bed.now_ns;
    bed.hosts[0].end_session(peer.index, now_ns);
    let peer = bed.session(0, WireMode::Lm, 30 << 20);
    assert!(landing_len(&bed) > before && landing_len(&bed) >= 30 << 20);
    let received = bed.recv(0);
    assert_eq!(received[..], own[..]);
    drop(received);
    assert_eq!(bed.completion(1).outcome, Outcome::Delivered);

    let large = noise(3, 30 << 20);
    bed.send(0, peer, &large, 3);
    let message = bed.recv(1);
    assert!(message[..] == large[..], "after growing");
    assert_eq!(held[..], small[..], "held all the while");
    drop((message, held));
    bed.completion(0);
    bed.check_memory();
    bed.check_clean();
}

#[test]
fn an_idle_session_stays_alive() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.pass(Duration::from_secs(20));
    bed.exchange(0, peer, &noise(1, 100_000));
    assert_eq!(bed.hosts[1].counters.sessions_ended, 0);
    bed.check_memory();
    bed.check_clean();
}

#[test]
fn back_pressure_is_a_result() {
    let mut bed = Bed::new(&BedConfig {
        wire: WireConfig {
            delivery: Delivery::Manual,
            ..WireConfig::default()
        },
        ..BedConfig::default()
    });
    let peer = bed.resolve(0);
    let options = ConnectOptions {
        messages_in_flight: 32,
        max_message_len: 1 << 20,
        ..ConnectOptions::default()
    };
    let peer = {
        let connected = bed.connect(0, &options).expect("control packets need no channel");
        assert_eq!(connected, peer);
        connected
    };
    // Nothing leaves: every resource in turn runs out, and says so.
    let mut refused = [0u32; 2];
    for n in 0..4000u64 {
        for (kind, len) in [(0, 100), (1, 20_000)] {
            match bed.try_send(0, peer, &noise(n, len), n) {
                Ok(_) => {}
                Err(SendError::WouldBlock) => refused[kind] += 1,
                Err(error) => panic!("{error}"),
            }
        }
        if n % 8 == 0 {
            bed.round();
        }
    }
    assert!(refused.iter().all(|&count| count > 3900), "{refused:?}");
    // Regions that are never sent exhaust the send memory, and come back.
    let mut regions = Vec::new();
    let blocked = loop {
        match bed.hosts[0].loan(peer, 20_000) {
            Ok(region) => regions.push(region),
            Err(error) => break error,
        }
    };
    assert_eq!(blocked, LoanError::WouldBlock);
    let mut frames = Vec::new();
    while let Ok(region) = bed.hosts[0].loan(peer, 20) {
        frames.push(region);
    }
    drop((regions, frames));
    // The link moves again, and everything arrives.
    let mut arrived = 0;
    let wanted = 64 + 32;
    for _ in 0..20_000 {
        bed.wire.deliver(16);
        bed.round();
        while let Some(message) = bed.hosts[1].take_message().expect("no failure") {
            assert_eq!(message[..], noise(message.tag(), message.len())[..]);
            arrived += 1;
        }
        if bed.hosts[0].told.completions().len() >= wanted && bed.hosts[0].unconfirmed_messages() == 0 {
            break;
        }
    }
    assert_eq!(arrived, wanted);
    assert_eq!(bed.hosts[0].unconfirmed_messages(), 0);
    bed.hosts[0].told.completions().clear();
    for _ in 0..200 {
        bed.wire.deliver(16);
        bed.now_ns += 100_000;
        bed.round();
    }
    bed.check_memory();
    bed.check_clean();
}

/// An application that takes nothing stops its sender, and nothing is lost.
#[test]
fn a_receiver_that_takes_nothing_stops_its_sender() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    let mut sent = 0u64;
    let mut refused = 0;
    while refused < 2000 {
        match bed.try_send(0, peer, &sent.to_le_bytes(), sent) {
            Ok(_) => {
                sent += 1;
                refused = 0;
            }
            Err(SendError::WouldBlock) => {
                refused += 1;
                bed.now_ns += ROUND_NS;
                bed.round();
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(sent > 1000, "{sent}");
    // Credit comes back with the memory.
    for taken in 0..12_000u64 {
        if taken == sent {
            bed.send(0, peer, &sent.to_le_bytes(), sent);
            sent += 1;
        }
        let message = bed.recv(1);
        assert_eq!(message[..], taken.to_le_bytes());
        drop(message);
        if sent < 12_000 && bed.try_send(0, peer, &sent.to_le_bytes(), sent).is_ok() {
            sent += 1;
        }
        bed.hosts[0].told.completions().clear();
    }
    assert_eq!(sent, 12_000);
    bed.rounds(100);
    assert_eq!(bed.hosts[0].unconfirmed_messages(), 0);
    bed.hosts[0].told.completions().clear();
    bed.check_memory();
    bed.check_clean();
}

/// An endpoint that has no landing memory: sends large messages, receives small ones.
#[test]
fn an_endpoint_without_landing_memory_refuses_sessions() {
    let mut bed = Bed::new(&BedConfig {
        queues: [
            Queues {
                general: Some(0),
                landing: None,
            },
            TWO_QUEUES,
        ],
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, 300_000);
    bed.exchange(0, peer, &noise(1, 300_000));
    let refused = bed.connect(1, &ConnectOptions::default());
    assert!(
        matches!(refused, Err(ConnectError::Rejected { .. })),
        "{refused:?}"
    );
    let back = bed.resolve(1);
    bed.exchange(1, back, &noise(2, 1000));
    assert_eq!(
        bed.hosts[0].landing_region(10).expect_err("no landing memory"),
        LoanError::NoSession
    );
    bed.check_memory();
}

/// What the sender's address says is who it is.
#[test]
fn messages_name_their_sender() {
    let mut bed = Bed::switch(&BedConfig::default(), 3);
    let peers = [1, 2].map(|host| bed.resolve(host));
    bed.send(1, peers[0], b"hello", 3);
    let first = bed.recv(0);
    bed.send(2, peers[1], b"hello as well", 12);
    let second = bed.recv(0);
    for (message, host) in [(&first, 1), (&second, 2)] {
        let from = bed.hosts[0].peers.named(message.peer()).map(|peer| peer.data);
        assert_eq!(from, Some(data_address(host)));
    }
    bed.send(0, first.peer(), b"and back", 4);
    assert_eq!(&bed.recv(1)[..], b"and back");
}
