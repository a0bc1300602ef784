//! Messages of all lengths, in both directions; regions of the application's; back-pressure.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lm_dataplane::{
    Announced, ConnectOptions, EffectiveMode, Endpoint, EndpointConfig, LandingRegion, LinkConfig, LoanError,
    MemoryConfig, ModeRequest, PeerId, Placed, Placement, RecvError, SendError, Settled, ZoneSource,
};

use crate::harness::{
    B, Bed, EAGER_MAX, FRAGMENT, PATIENCE, assert_clean, assert_delivered, check, config_a, config_b,
    connect, content, recv, restored, send, settle, up_to, wait_until,
};

const LENGTHS: [u64; 9] = [0, 1, 1440, 1441, 1448, 1449, 7168, (64 << 10) + 1, 5 << 20];

/// Sends one message of each length and waits until all are confirmed.
fn send_all(endpoint: &mut Endpoint, peer: PeerId, lengths: &[u64]) {
    let mut sent = Vec::new();
    for (tag, &len) in (0..).zip(lengths) {
        sent.push((send(endpoint, peer, tag, &content(tag, len)), tag, len));
    }
    assert_delivered(&settle(endpoint), &sent);
    let counters = endpoint.counters();
    assert_eq!(counters.messages_sent, lengths.len() as u64);
    assert_eq!(counters.bytes_sent, lengths.iter().sum::<u64>());
    assert_eq!(counters.user_copied_bytes, 0);
    assert_clean(endpoint);
}

/// Receives them, in whatever order small and large ones come.
fn receive_all(endpoint: &mut Endpoint, lengths: &[u64]) -> PeerId {
    let mut missing: Vec<bool> = vec![true; lengths.len()];
    let (mut base, mut peer) = (None, None);
    for _ in lengths {
        let message = recv(endpoint);
        peer = Some(message.peer());
        let tag = message.tag();
        let len = lengths[tag as usize];
        check(endpoint, &message, tag, len);
        assert!(
            std::mem::take(&mut missing[tag as usize]),
            "message {tag} came twice"
        );
        assert_eq!(message.is_eager(), len <= EAGER_MAX);
        // The offset it tells is the slice's own: no message lies outside the one UMEM.
        let start = message.as_ptr() as u64 - message.umem_offset();
        assert_eq!(*base.get_or_insert(start), start);
    }
    let counters = endpoint.counters();
    assert_eq!(counters.messages_received, lengths.len() as u64);
    assert_eq!(counters.bytes_received, lengths.iter().sum::<u64>());
    assert_eq!(counters.user_copied_bytes, 0);
    assert_eq!(
        counters.restored_bytes,
        lengths.iter().map(|&len| restored(len)).sum::<u64>()
    );
    let large = lengths.iter().filter(|&&len| len > EAGER_MAX);
    let fragments: u64 = large.map(|len| len.div_ceil(FRAGMENT)).sum();
    assert_eq!(counters.landing_packets, fragments);
    assert_clean(endpoint);
    peer.expect("at least one message")
}

#[test]
fn every_length_arrives_where_it_should_without_a_copy() {
    let Some(bed) = Bed::new(2) else { return };
    let copy = |config: EndpointConfig| EndpointConfig {
        link: LinkConfig {
            mode: ModeRequest::Copy,
            ..config.link
        },
        ..config
    };
    bed.talk(
        &copy(config_a()),
        &copy(config_b()),
        |a| {
            assert_eq!(a.status().mode(), EffectiveMode::CopyNative);
            assert_eq!(a.status().warnings(), [""; 0]);
            let peer = connect(a, 5 << 20);
            assert_eq!(
                (a.peer(peer).max_message_len(), a.peer(peer).address()),
                (5 << 20, Some(B))
            );
            send_all(a, peer, &LENGTHS);
        },
        |b| {
            receive_all(b, &LENGTHS);
        },
    );
}

#[test]
fn the_receiver_sends_back_to_whom_it_knows() {
    let Some(bed) = Bed::new(2) else { return };
    bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let peer = connect(a, 1 << 20);
            send(a, peer, 9, b"a word");
            receive_all(a, &LENGTHS);
        },
        |b| {
            let peer = recv(b).peer();
            assert_eq!(b.peer(peer).max_message_len(), EAGER_MAX);
            assert_eq!(b.loan(peer, EAGER_MAX + 1).unwrap_err(), LoanError::NoSession);
            b.peer(peer).open_session(&up_to(5 << 20)).unwrap();
            send_all(b, peer, &LENGTHS);
        },
    );
}

/// Whoever waits, here or on the descriptor, is told when to come back: within a packet's time at this rate.
#[test]
fn a_rate_limit_says_when_the_next_packet_may_leave() {
    let Some(bed) = Bed::new(2) else { return };
    let len = 100_000;
    let (rate, packet) = (20_000_000, Duration::from_nanos(1514 * 8 * 50));
    bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let limited = ConnectOptions {
                rate: NonZeroU64::new(rate),
                ..up_to(len)
            };
            let peer = a.connect(B, &limited).unwrap();
            assert_eq!(a.extensions().until_departure(), None);
            let started = Instant::now();
            let token = send(a, peer, 0, &content(0, len));
            let mut told = None;
            wait_until(a, "the limit holds a packet back", |a| {
                told = a.extensions().until_departure();
                told.is_some()
            });
            assert!(told.unwrap() <= packet, "{told:?}");
            assert_delivered(&settle(a), &[(token, 0, len)]);
            // 70 packets, of which 4 may leave at once.
            assert!(started.elapsed() >= packet * 65, "{:?}", started.elapsed());
            assert_clean(a);
        },
        |b| {
            let message = recv(b);
            check(b, &message, 0, len);
        },
    );
}

#[test]
fn a_hundred_mebibytes_each_way() {
    let Some(bed) = Bed::new(2) else { return };
    // More fragments than the rings hold.
    let lengths = [100 << 20];
    let large = |config: EndpointConfig| EndpointConfig {
        memory: MemoryConfig {
            send_len: 110 << 20,
            ..config.memory
        },
        ..config
    };
    bed.talk(
        &large(config_a()),
        &large(config_b()),
        |a| {
            let peer = connect(a, lengths[0]);
            send_all(a, peer, &lengths);
            receive_all(a, &lengths);
        },
        |b| {
            let peer = receive_all(b, &lengths);
            b.peer(peer).open_session(&up_to(lengths[0])).unwrap();
            send_all(b, peer, &lengths);
        },
    );
}

/// Gives messages the regions that it has, the arena when it has none.
#[derive(Clone, Default)]
struct Regions(Arc<Mutex<(VecDeque<LandingRegion>, VecDeque<Settled>)>>);

impl Regions {
    fn give(&self, region: LandingRegion) {
        self.0.lock().unwrap().0.push_back(region);
    }

    /// What became of a message that has one.
    fn settled(&self, endpoint: &mut Endpoint) -> Settled {
        let mut settled = None;
        wait_until(endpoint, "a message is settled", |_| {
            settled = settled.take().or(self.0.lock().unwrap().1.pop_front());
            settled.is_some()
        });
        settled.unwrap()
    }
}

impl ZoneSource for Regions {
    fn place(&mut self, _: &Announced<'_>) -> Placement {
        let region = self.0.lock().unwrap().0.pop_front();
        region.map_or(Placement::Arena, Placement::Land)
    }

    fn settled(&mut self, _: &Placed, how: Settled) {
        self.0.lock().unwrap().1.push_back(how);
    }
}

#[test]
fn a_region_of_a_source_is_where_the_message_lands() {
    let Some(bed) = Bed::new(2) else { return };
    let len = 300_000;
    bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let peer = connect(a, 1 << 20);
            send(a, peer, 99, b"here");
            // Each is asked for by a word of the receiver, when it has a region for it.
            for tag in 0..4 {
                assert_eq!(*recv(a), *b"next");
                send(a, peer, tag, &content(tag, len));
                settle(a);
            }
            assert_eq!(*recv(a), *b"too large");
            send(a, peer, 5, &content(5, len));
            settle(a);
            assert_clean(a);
        },
        |b| {
            let peer = first_peer(b);
            let ask = |b: &mut Endpoint, word: &[u8]| b.send_copy(peer, word, 0).map(|_| ()).unwrap();
            let source = Regions::default();
            b.extensions().place_by(Some(Box::new(source.clone())));
            let mut copied = 0;
            // The same region again and again.
            let mut region = b.extensions().landing_region(len).unwrap();
            let range = region.umem_range();
            for tag in 0..4 {
                source.give(region);
                ask(b, b"next");
                copied += 4;
                let Settled::Landed(message) = source.settled(b) else {
                    panic!("it landed");
                };
                check(b, &message, tag, len);
                let offset = message.umem_offset();
                assert!(
                    range.start <= offset && offset + len <= range.end,
                    "{offset} in {range:?}"
                );
                assert_eq!(b.counters().user_copied_bytes, copied, "landed there, not copied");
                region = message.into_region().expect("a landed message has a region");
                assert_eq!(region.umem_range(), range);
            }
            drop(region);
            // It does not fit: it comes where it is.
            let small = b.extensions().landing_region(1000).unwrap();
            let small_range = small.umem_range();
            source.give(small);
            ask(b, b"too large");
            copied += 9;
            let message = b.recv(Some(PATIENCE)).unwrap();
            check(b, &message, 5, len);
            assert!(!small_range.contains(&message.umem_offset()));
            assert_eq!(b.counters().user_copied_bytes, copied);
            let Settled::Elsewhere(small) = source.settled(b) else {
                panic!("it is too short");
            };
            assert_eq!(small.umem_range(), small_range);
            drop((message, small));
            // All of it came back: everything can be had in one piece again.
            let whole = b.status().landing_range();
            let most = whole.end - whole.start - 4 * 4096;
            wait_until(b, "all landing memory is free", |b| {
                b.extensions().landing_region(most).is_ok()
            });
            assert_clean(b);
        },
    );
}

#[test]
fn a_region_waits_in_vain_and_comes_back() {
    let Some(bed) = Bed::new(2) else { return };
    bed.talk(
        &config_a(),
        &config_b(),
        |_| (),
        |b| {
            let whole = b.status().landing_range();
            let most = whole.end - whole.start - 4 * 4096;
            for _ in 0..3 {
                let region = b.extensions().landing_region(most).unwrap();
                assert_eq!(
                    b.extensions().landing_region(most).unwrap_err(),
                    LoanError::WouldBlock
                );
                let source = Regions::default();
                source.give(region);
                b.extensions().place_by(Some(Box::new(source)));
                let none = b.recv(Some(Duration::from_millis(1)));
                assert_eq!(none.unwrap_err(), RecvError::TimedOut);
                b.extensions().place_by(None);
                b.poll();
            }
            let limit = match b.extensions().landing_region(1 << 30).unwrap_err() {
                LoanError::TooLarge { limit } => limit,
                error => panic!("{error}"),
            };
            assert!(b.extensions().landing_region(limit).is_ok());
        },
    );
}

#[test]
fn too_much_at_once_is_an_ordinary_result() {
    let Some(bed) = Bed::new(2) else { return };
    let little = |config: EndpointConfig| EndpointConfig {
        memory: MemoryConfig {
            send_len: 1 << 20,
            ..config.memory
        },
        ..config
    };
    bed.talk(
        &little(config_a()),
        &little(config_b()),
        |a| {
            let peer = connect(a, 4 << 20);
            assert_eq!(
                a.loan(peer, (4 << 20) + 1).unwrap_err(),
                LoanError::TooLarge { limit: 4 << 20 }
            );
            // Longer than the send memory: the limit it names can be had.
            let limit = match a.loan(peer, 2 << 20).unwrap_err() {
                LoanError::TooLarge { limit } => limit,
                error => panic!("{error}"),
            };
            let region = a.loan(peer, limit).unwrap();
            assert_eq!(region.len(), limit);
            assert_eq!(a.loan(peer, limit).unwrap_err(), LoanError::WouldBlock);
            drop(region);
            a.poll();
            // What comes back unsent can be had again.
            let mut sent = 0;
            let mut refused = 0;
            while refused == 0 {
                match a.try_send_copy(peer, &content(sent, 100_000), sent) {
                    Ok(_) => sent += 1,
                    Err(SendError::WouldBlock) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
                assert!(sent <= 10, "more than a mebibyte in a mebibyte");
            }
            assert!(sent >= 7, "only {sent} messages of 100 kB in a mebibyte");
            settle(a);
            // Small ones: bounded by the receiver's credit.
            let mut small = 0;
            while a.try_send_copy(peer, b"x", small).is_ok() {
                small += 1;
                assert!(small < 100_000);
            }
            settle(a);
            send(a, peer, u64::MAX, &[]);
            settle(a);
            assert_eq!(a.counters().messages_sent, sent + small + 1);
            assert_clean(a);
        },
        |b| {
            while recv(b).tag() != u64::MAX {}
            assert_clean(b);
        },
    );
}

/// Waits for somebody to have a session here, without taking a message.
fn first_peer(endpoint: &mut Endpoint) -> PeerId {
    let peer = recv(endpoint).peer();
    wait_until(endpoint, "a session is granted", |b| {
        b.counters().sessions_granted == 1
    });
    peer
}
