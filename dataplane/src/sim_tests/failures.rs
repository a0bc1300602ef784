//! Stories of failure: peers that die, packets that get lost, channels that are built anew, sessions that end early.

use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, IPS, PORT, TWO_QUEUES, data_address, noise};
use crate::completion::{LoanError, Outcome, RecvError};
use crate::connect::{ConnectError, ConnectOptions};
use crate::opening::Queues;
use crate::outbound::{Copied, Way};
use crate::simnic;

/// A channel that is built anew takes what was on its TX ring with it, so it is emptied first.
#[test]
fn building_the_landing_channel_anew_loses_none_of_our_packets() {
    let mut bed = Bed::new(&BedConfig {
        landing_len: 1 << 20,
        max_message_len: 60 << 20,
        on_the_way: u32::MAX,
        tx_in_flight: 1024,
        ..BedConfig::default()
    });
    let back = bed.session(1, WireMode::Lm, 1 << 20);
    // More than one wake-up takes, put on the ring and not yet shown to the kernel.
    let own = noise(2, 1 << 20);
    bed.send(1, back, &own, 2);
    bed.alone(0, 3);
    let now_ns = bed.now_ns;
    let engine = &mut bed.hosts[1];
    let peer = engine.sending.senders()[0];
    let outbound = engine.peers.at(peer).outbound.as_mut().expect("a session");
    // Credit that came before the announcement.
    outbound.terms.goes_ahead = false;
    outbound
        .credit(&mut engine.sending.outgoing, (700, 0, 0), 0)
        .expect("plausible");
    let (scheduler, frames, outgoing) = engine.sending.parts();
    let mut way = Way {
        channel: scheduler.queue(outbound.terms.channel),
        umem: engine.memory.umem(),
        piece_len: engine.fixed.chunk_len,
        more_pieces: 0,
        bytes: 0,
        frames,
        device_reads: false,
        copied: Copied::default(),
    };
    let sent = outbound.transmit(outgoing, &mut way, 100, now_ns, None);
    assert_eq!(sent, 100);
    let len = engine.landing.as_ref().expect("landing").arena.len() + (8 << 20);
    let before = bed.wire.counters().crossed;
    engine.grow_landing(len, false).expect("memory");
    assert_eq!(bed.wire.counters().crossed - before, 100);
}

/// A message is settled while the link still has packets of it: if the channel goes with them, its memory comes back all the same.
#[test]
fn packets_that_go_with_their_channel_give_their_memory_back() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 300_000);
    bed.send(0, peer, &noise(1, 300_000), 1);
    while bed.hosts[0].counters.data_packets_sent == 0 {
        bed.alone(1, 1);
        bed.wire.set_delivery(simnic::Delivery::Manual);
        bed.alone(0, 1);
        bed.wire.deliver(u32::MAX);
    }
    bed.alone(0, 10);
    let now_ns = bed.now_ns;
    bed.hosts[0].end_session(peer.index, now_ns);
    assert_eq!(bed.completion(0).outcome, Outcome::SessionEnded);
    assert_eq!(bed.hosts[0].sending.arena().live(), 1);
    let len = bed.hosts[0].landing.as_ref().expect("landing").arena.len();
    bed.hosts[0].rebuild_landing(len).expect("a channel");
    assert_eq!(bed.hosts[0].sending.arena().live(), 0);
}

#[test]
fn a_dead_senders_lease_ends_and_its_queue_is_free() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.exchange(0, peer, &noise(1, 100_000));
    // Host 0 is silent for longer than the lease.
    for _ in 0..520 {
        bed.now_ns += 10_000_000;
        bed.alone(1, 1);
    }
    assert_eq!(bed.hosts[1].counters.sessions_ended, 1);
    assert!(
        bed.hosts[1]
            .landing
            .as_ref()
            .expect("landing")
            .sessions
            .is_empty()
    );
    // It comes back: its old session is gone, which is told to it, and its messages go by the next one.
    bed.exchange(0, peer, &noise(2, 100_000));
    assert_eq!(bed.hosts[0].counters.messages_again, 1);
    assert_eq!(bed.hosts[0].counters.sessions_lost, 1);
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.exchange(0, peer, &noise(3, 100_000));
    bed.check_memory();
}

/// Its sender dies in the middle of a message, or before the digests of one that has come: both are reported, as missing in part and
/// altogether, behind the whole messages before it.
#[test]
fn what_a_dead_sender_left_is_reported_in_order() {
    for whole in [false, true] {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = bed.session(0, WireMode::Lm, 100_000);
        for tag in [1, 2] {
            bed.send(0, peer, &noise(tag, 50_000), tag);
        }
        while bed.hosts[1].told.messages().count() < 2 {
            bed.round();
        }
        bed.send(0, peer, &noise(3, 4 * 1448), 3);
        let mut fragments = 0;
        bed.wire.set_filter(move |from, packet| {
            let is_fragment = packet.len() > 1000;
            let passes = if fragments == 0 {
                true // the announcement goes first
            } else {
                is_fragment && (whole || fragments < 2)
            };
            fragments += u32::from(from == 0 && is_fragment && passes);
            from == 1 || passes
        });
        for _ in 0..20 {
            bed.round();
        }
        for _ in 0..520 {
            bed.now_ns += 10_000_000;
            bed.alone(1, 1);
        }
        assert_eq!(bed.hosts[1].counters.sessions_ended, 1);
        for tag in [1, 2] {
            let message = bed.hosts[1].take_message().expect("no failure yet");
            assert_eq!(message.expect("it is whole").tag(), tag);
        }
        let failure = bed.hosts[1].take_message().expect_err("it never was whole");
        let RecvError::Incomplete { tag, missing, .. } = failure else {
            panic!("{failure}")
        };
        let expected = if whole { 0..4 } else { 0..2 };
        assert_eq!((tag, missing), (3, vec![expected]));
        assert!(bed.hosts[1].take_message().expect("no failure").is_none());
    }
}

#[test]
fn a_dead_receiver_is_noticed_within_the_lease() {
    let config = BedConfig::default();
    let mut bed = Bed::new(&config);
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    bed.exchange(0, peer, &noise(1, 1000));
    for n in 0..3 {
        bed.send(0, peer, &noise(n, 300_000), n);
    }
    bed.try_send(0, peer, b"eager", 3).expect("credit");
    // Host 1 is never polled again.
    let died_ns = bed.now_ns;
    let mut outcomes = Vec::new();
    while outcomes.len() < 4 {
        bed.now_ns += 5_000_000;
        bed.alone(0, 1);
        while let Some(completion) = bed.hosts[0].told.completions().pop_front() {
            outcomes.push((completion.tag, completion.outcome));
        }
        assert!(
            bed.now_ns - died_ns < config.lease.as_nanos() as u64 + 100_000_000,
            "not noticed in time: {outcomes:?}"
        );
    }
    outcomes.sort_by_key(|(tag, _)| *tag);
    let expected: Vec<_> = (0..4).map(|tag| (tag, Outcome::TimedOut)).collect();
    assert_eq!(outcomes, expected);
    assert_eq!(
        bed.hosts[0].loan(peer, 300_000).expect_err("the session is over"),
        LoanError::NoSession
    );
    assert_eq!(bed.hosts[0].unconfirmed_messages(), 0);
    assert_eq!(bed.hosts[0].sending.arena().live(), 0);
}

/// Loses everything from one fragment on, and sees both sides name what is missing: the paper's service.
#[test]
fn an_incomplete_message_is_reported_on_both_sides() {
    // 12 fragments in windows of 4: 3 2 1 0, 7 6 5 4, 11 10 9 8.
    let expected: [(u32, &[(u32, u32)]); 4] = [
        (0, &[(0, 12)]),
        (2, &[(0, 2), (4, 12)]),
        (5, &[(4, 7), (8, 12)]),
        (11, &[(8, 9)]),
    ];
    for (lost, missing) in expected {
        let missing: Vec<_> = missing.iter().map(|&(start, end)| start..end).collect();
        let mut bed = Bed::new(&BedConfig {
            window: 4,
            ..BedConfig::default()
        });
        let options = ConnectOptions {
            max_message_len: 100_000,
            delivery: Delivery::Unreliable,
            ..ConnectOptions::default()
        };
        let peer = bed.connect(0, &options).expect("a session");
        bed.exchange(0, peer, &noise(1, 50_000));
        let mut seen = 0;
        // From the lost one on nothing comes, as on a link that goes down.
        bed.wire.set_filter(move |from, packet| {
            let data = from == 0 && packet.len() > 1000;
            seen += u32::from(data);
            !(data && seen > lost)
        });
        let token = bed.send(0, peer, &noise(2, 12 * 1448), 77);
        let began_ns = bed.now_ns;
        let failure = loop {
            bed.now_ns += 1_000_000;
            bed.round();
            match bed.hosts[1].take_message() {
                Ok(None) => {}
                Ok(Some(_)) => panic!("an incomplete message was delivered"),
                Err(failure) => break failure,
            }
        };
        // The sender says that it has sent all, long before the time limit.
        assert!(bed.now_ns - began_ns < 100_000_000);
        let RecvError::Incomplete {
            tag,
            len,
            missing: reported,
            number,
            ..
        } = failure
        else {
            panic!("{failure}")
        };
        assert_eq!((number, tag, len), (1, 77, 12 * 1448));
        assert_eq!(reported, missing);
        let completion = bed.completion(0);
        assert_eq!(completion.token, token);
        assert_eq!(
            completion.outcome,
            Outcome::Incomplete {
                missing: missing.clone()
            }
        );
        assert_eq!(bed.hosts[1].counters.messages_stalled, 0);
        assert_eq!(bed.hosts[1].counters.violations.total(), 0);
        // The session goes on, and no memory was lost.
        bed.wire.clear_filter();
        bed.exchange(0, peer, &noise(3, 100_000));
        let now_ns = bed.now_ns;
        bed.hosts[0].end_session(peer.index, now_ns);
        bed.check_memory();
    }
}

/// A link that goes down for good: the time limit ends the session on the receiver's side, and the sender hears of it.
fn ends_with_the_time_limit(is_built_anew: bool) {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.exchange(0, peer, &noise(1, 50_000));
    bed.wire
        .set_filter(|from, packet| from == 1 || packet.len() < 1000);
    bed.send(0, peer, &noise(2, 100_000), 5);
    let began_ns = bed.now_ns;
    let limit_ns = bed.hosts[1].fixed.patience_ns;
    let failure = loop {
        bed.now_ns += 1_000_000;
        bed.round();
        assert!(bed.now_ns - began_ns < limit_ns + 100_000_000, "it has more time");
        if is_built_anew {
            let len = bed.hosts[1].landing.as_ref().expect("landing").registered_len;
            bed.hosts[1].rebuild_under_sessions(len).expect("a channel");
        }
        if let Err(failure) = bed.hosts[1].take_message() {
            break failure;
        }
    };
    assert!(matches!(failure, RecvError::Incomplete { tag: 5, .. }));
    assert!(bed.now_ns - began_ns >= limit_ns);
    assert_eq!(bed.completion(0).outcome, Outcome::SessionEnded);
    assert_eq!(bed.hosts[1].counters.messages_stalled, 1);
    assert!(
        bed.hosts[0].counters.fragments_resent > 10,
        "it was asked for, again and again"
    );
    assert!(
        bed.hosts[0].counters.fragments_resent < 10_000,
        "and ever less often"
    );
    bed.wire.clear_filter();
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.exchange(0, peer, &noise(3, 100_000));
    bed.check_memory();
}

#[test]
fn a_message_that_nothing_comes_of_ends_with_the_time_limit() {
    ends_with_the_time_limit(false);
}

/// What was posted before has had its time.
#[test]
fn entries_that_are_posted_again_give_their_sender_no_more_time() {
    ends_with_the_time_limit(true);
}

/// The next move was the application's: no time limit of the sender's runs.
#[test]
fn an_application_that_keeps_all_memory_for_long_loses_nothing() {
    let mut bed = Bed::new(&BedConfig {
        landing_len: 4096,
        max_message_len: 60 << 20,
        send_len: 130 << 20,
        ..BedConfig::default()
    });
    // Each message takes more than half of the landing memory.
    let peer = bed.session(0, WireMode::Lm, 50 << 20);
    let payload = noise(4, 50 << 20);
    bed.send(0, peer, &payload, 1);
    bed.send(0, peer, &payload, 2);
    let first = bed.recv(1);
    bed.pass(Duration::from_secs(6));
    assert!(bed.hosts[1].take_message().expect("no failure").is_none());
    drop(first);
    // A round in which memory comes back, entries are posted, and the timers run.
    bed.now_ns += 2_000_000;
    bed.alone(1, 1);
    let second = bed.recv(1);
    assert!(second.tag() == 2 && second[..] == payload[..]);
    drop(second);
    assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    bed.check_memory();
    bed.check_clean();
}

/// A sender that ends its session right after its last packet: what is on the RX ring counts as received.
#[test]
fn packets_on_the_ring_are_taken_before_a_session_ends() {
    let mut bed = Bed::new(&BedConfig {
        window: 1024,
        on_the_way: u32::MAX,
        tx_in_flight: 1024,
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    let payload = noise(5, 1 << 20);
    bed.send(0, peer, &payload, 9);
    while bed.hosts[1]
        .landing
        .as_ref()
        .is_some_and(|landing| !landing.sessions.is_empty() && !landing.sessions.awaits_packets())
    {
        bed.round();
    }
    bed.alone(0, 60);
    let now_ns = bed.now_ns;
    bed.hosts[0].end_session(peer.index, now_ns);
    // The next round looks at the sockets (its number is 0), where the end of the session is, after one burst of packets.
    bed.hosts[1].looks.hurry();
    let message = bed.recv(1);
    assert!(message[..] == payload[..]);
    drop(message);
    assert_eq!(bed.completion(0).outcome, Outcome::SessionEnded);
    bed.check_memory();
    assert_eq!(bed.hosts[1].counters.messages_incomplete, 0);
}

/// The one packet that would give the sender credit again is lost, or the receiver starts anew meanwhile.
#[test]
fn a_sender_without_credit_asks_for_it() {
    for restarted in [false, true] {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = bed.resolve(0);
        let mut sent = 0;
        while bed.hosts[1].told.messages().count() < 4000 || bed.hosts[0].unconfirmed_messages() > 0 {
            sent += u64::from(bed.try_send(0, peer, b"kept", sent).is_ok());
            bed.round();
        }
        while bed.try_send(0, peer, b"kept", sent).is_ok() {
            sent += 1;
            bed.rounds(20);
        }
        bed.wire.drop_next(1, u32::MAX);
        for _ in 0..sent {
            drop(bed.recv(1));
        }
        bed.pass(Duration::from_millis(100));
        if restarted {
            let known = bed.hosts[1].peers.find(data_address(0)).expect("a peer");
            bed.hosts[1].peers.at(known).eager_in = crate::eager::EagerIn::default();
        }
        bed.wire.drop_next(1, 0);
        bed.hosts[0].told.completions().clear();
        assert!(bed.try_send(0, peer, b"more", sent).is_err());
        bed.pass(Duration::from_secs(2));
        bed.exchange(0, peer, b"more");
        bed.check_memory();
    }
}

/// The landing channel cannot be built anew: who asks is asked to wait, everything else goes on, and later something lands again.
#[test]
fn a_landing_channel_that_is_lost_takes_nothing_else_with_it() {
    let mut bed = Bed::new(&BedConfig {
        queues: [
            Queues {
                general: Some(0),
                landing: Some(2),
            },
            TWO_QUEUES,
        ],
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, 300_000);
    // Host 1 sends as well, on a channel behind the landing channel in its list.
    let back = bed.session(1, WireMode::Lm, 300_000);
    bed.exchange(1, back, &noise(1, 200_000));
    bed.wire.refuse_channels(1, 1);
    bed.send(0, peer, &noise(2, 200_000), 1);
    bed.wire
        .set_filter(|from, packet| from == 1 || packet.len() < 1000);
    for _ in 0..3000 {
        bed.now_ns += 1_000_000;
        bed.round();
        if bed.hosts[1].counters.landing_lost > 0 {
            break;
        }
    }
    assert_eq!(bed.hosts[1].counters.landing_lost, 1);
    bed.wire.clear_filter();
    assert!(matches!(
        bed.hosts[1].take_message(),
        Err(RecvError::Incomplete { .. })
    ));
    bed.exchange(1, back, &noise(3, 200_000));
    let small = bed.resolve(1);
    bed.exchange(1, small, b"small");
    assert_eq!(bed.completion(0).outcome, Outcome::SessionEnded);
    let options = ConnectOptions {
        timeout: Duration::from_secs(1),
        ..ConnectOptions::default()
    };
    let peer = bed.connect(0, &options).expect("a session");
    let landed = bed.hosts[1].counters.landing_packets;
    bed.exchange(0, peer, &noise(4, 200_000));
    assert_eq!(bed.hosts[1].counters.landing_packets, landed);
    for _ in 0..6 {
        bed.pass(Duration::from_secs(1));
        bed.exchange(0, peer, &noise(6, 20_000));
    }
    bed.exchange(0, peer, &noise(5, 200_000));
    assert!(bed.hosts[1].counters.landing_packets > landed);
    assert_eq!(bed.hosts[1].counters.landing_lost, 1);
}

/// Nobody is there: the stack refuses, or nothing answers.
#[test]
fn a_peer_that_does_not_listen_is_named() {
    let mut bed = Bed::new(&BedConfig::default());
    let engine = &mut bed.hosts[0];
    let to = std::net::SocketAddrV4::new(IPS[1], PORT + 50);
    let addressing = engine.addressing_to(to, simnic::mac_of(IPS[1]));
    let now_ns = bed.now_ns;
    let index = engine.peers.find_or_add(to, &addressing, now_ns).expect("room");
    engine.apply(index, &ConnectOptions::default(), now_ns);
    let outcome = loop {
        bed.now_ns += 500_000;
        bed.round();
        if let Some(outcome) = bed.application_outcome(0, index) {
            break outcome;
        }
    };
    assert!(matches!(outcome, Err(ConnectError::NotListening { .. })));
    // Every request is lost.
    bed.wire.drop_next(0, 1000);
    let outcome = bed.connect(0, &ConnectOptions::default());
    assert!(matches!(outcome, Err(ConnectError::Unreachable { .. })));
}

/// Grants, announcements, credits and acknowledgements are repeated until one gets through.
#[test]
fn lost_control_packets_are_repeated() {
    for seed in 0..20u64 {
        let mut bed = Bed::new(&BedConfig {
            patience: Duration::from_secs(30),
            ..BedConfig::default()
        });
        let mut dice = super::transfer::Dice(seed + 1);
        bed.wire.set_filter(move |_, packet| {
            let lm = packet.get(14 + 28).copied().unwrap_or(0);
            // Not data, not eager messages: their recovery is another matter.
            let control = lm != 0x21 && lm != 0x22;
            !control || dice.roll(5) < 2
        });
        let options = ConnectOptions {
            // A request a second, and a challenge and its proof before one is heard: of each two in five get through.
            timeout: Duration::from_secs(180),
            ..ConnectOptions::default()
        };
        let peer = bed.connect(0, &options).expect("a session");
        for n in 0..5 {
            let payload = noise(n, 100_000 - n as usize);
            let token = bed.send(0, peer, &payload, n);
            let message = loop {
                bed.now_ns += 1_000_000;
                bed.round();
                if let Some(message) = bed.hosts[1].take_message().expect("no failure") {
                    break message;
                }
            };
            assert!(message[..] == payload[..]);
            drop(message);
            assert_eq!(bed.completion(0).token, token);
        }
        bed.wire.clear_filter();
        bed.check_memory();
    }
}

/// The receiver's landing queue has a number that the sender's device does not have.
#[test]
fn a_sender_with_too_few_queues_is_told_what_is_missing() {
    let mut bed = Bed::new(&BedConfig::default());
    bed.hosts[1].fixed.receives.tx_queue = Some(9);
    let error = bed
        .connect(0, &ConnectOptions::default())
        .expect_err("too few queues");
    assert!(matches!(error, ConnectError::Queue { queue: 9, .. }), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("at least 10 transmit queues"), "{error}");
    assert!(!error.contains('\n'), "{error}");
    // The grant was given back: small messages go on, and the receiver is free.
    let peer = bed.resolve(0);
    bed.exchange(0, peer, b"small");
    assert_eq!(bed.hosts[1].counters.sessions_ended, 1);
    bed.hosts[1].fixed.receives.tx_queue = Some(1);
    let peer = bed.session(0, WireMode::Lm, 100_000);
    bed.exchange(0, peer, &noise(1, 100_000));
    bed.check_memory();
    bed.check_clean();
}
