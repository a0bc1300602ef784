//! Integrity: what is changed on the way is noticed, and repaired where there is somebody to ask.
#![cfg(test)]

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::integrity::Integrity;
use lm_protocol::wire::lm::{
    AnnounceEntry, FLAG_DIGEST, FLAG_MANIFEST, HEADER_LEN, LmHeader, TYPE_ANNOUNCE, TYPE_CREDIT, TYPE_DATA,
    TYPE_EAGER, TYPE_EAGER_ACK, TYPE_MANIFEST, TYPE_MISSING,
};

use super::bed::{Bed, BedConfig, IPS, data_address, lm_packet, noise};
use crate::completion::{Outcome, PeerId, RecvError};
use crate::connect::ConnectOptions;
use crate::simnic;

/// Ethernet, IPv4 and UDP header.
pub(super) const UDP_HEADERS_LEN: usize = 42;
/// All headers of a fragment.
const HEADERS_LEN: usize = UDP_HEADERS_LEN + HEADER_LEN;
const MESSAGE_LEN: usize = 100 * 1448;

/// The type of an LM packet on the data port, and its first word (message number).
pub(super) fn kind(packet: &[u8]) -> Option<u8> {
    let to_data_port = packet.len() >= HEADERS_LEN && packet[23] == 17 && packet[36..38] == [0x1c, 0x00];
    to_data_port.then(|| packet[UDP_HEADERS_LEN] & 15)
}

pub(super) fn index_of(packet: &[u8]) -> u32 {
    let at = UDP_HEADERS_LEN + 16;
    u32::from_be_bytes(packet[at..at + 4].try_into().unwrap())
}

/// Whether there is anything behind the entries of an announcement but its own digest.
pub(super) fn has_message_digests(packet: &[u8]) -> bool {
    let entries = index_of(packet) as usize;
    packet.len() - HEADERS_LEN - 8 > entries * AnnounceEntry::LEN
}

fn session(bed: &mut Bed, delivery: Delivery) -> PeerId {
    let options = ConnectOptions {
        delivery,
        max_message_len: 1 << 20,
        ..ConnectOptions::default()
    };
    bed.connect(0, &options).expect("a session")
}

/// Calls `change` for the first `count` packets of host `from` that are of type `kind` and that `picks`, and lets the rest
/// cross. Says how many there were.
fn change(
    bed: &Bed,
    from: usize,
    kind: u8,
    count: u32,
    picks: impl Fn(&[u8]) -> bool + Send + 'static,
    mut change: impl FnMut(&mut Vec<u8>) -> bool + Send + 'static,
) -> Arc<AtomicU32> {
    let changed = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&changed);
    bed.wire.set_filter(move |sender, packet| {
        if sender != from || self::kind(packet) != Some(kind) || !picks(packet) {
            return true;
        }
        if counter.fetch_add(1, Ordering::Relaxed) >= count {
            return true;
        }
        change(packet)
    });
    changed
}

/// Flips a bit of the last byte: of a payload or a digest.
fn flip_last(packet: &mut [u8]) -> bool {
    *packet.last_mut().expect("bytes") ^= 0x10;
    true
}

/// Sends one message from host 0 and sees it arrive unharmed and be confirmed.
fn arrives(bed: &mut Bed, peer: PeerId, seed: u64) {
    let payload = noise(seed, MESSAGE_LEN);
    let begin_ns = bed.now_ns;
    bed.exchange(0, peer, &payload);
    assert!(
        bed.now_ns - begin_ns < 60_000_000,
        "{} ns for one message",
        bed.now_ns - begin_ns
    );
}

fn drops(bed: &Bed, host: usize, name: &str) -> u64 {
    let mut drops = bed.hosts[host].counters.drops();
    drops
        .find(|(known, _)| *known == name)
        .map(|(_, count)| count)
        .unwrap_or_else(|| panic!("no drop is called {name}"))
}

/// A changed payload in its own slot, wherever in the message and in the fragment.
#[test]
fn a_corrupt_payload_is_sent_again() {
    for window in [1, 64, 1024] {
        // The highest and the lowest of a window, and the last of all.
        for index in [0, 1, 63, 64, 99] {
            for at in [0, 700, 1447] {
                let mut bed = Bed::new(&BedConfig {
                    window,
                    ..BedConfig::default()
                });
                let peer = session(&mut bed, Delivery::Reliable);
                let picks = move |packet: &[u8]| index_of(packet) == index;
                let changed = change(&bed, 0, TYPE_DATA, 1, picks, move |packet| {
                    packet[HEADERS_LEN + at] ^= 1;
                    true
                });
                arrives(&mut bed, peer, u64::from(index));
                assert_eq!(changed.load(Ordering::Relaxed), 2, "it and its repetition");
                let counters = &bed.hosts[1].counters;
                assert_eq!(
                    (drops(&bed, 1, "fragment_corrupt"), counters.manifests_requested),
                    (1, 1),
                    "window {window}, fragment {index}, byte {at}"
                );
                assert_eq!(bed.hosts[0].counters.manifest_packets_sent, 1);
                assert_eq!(counters.messages_received, 1);
                arrives(&mut bed, peer, 7);
                bed.check_memory();
            }
        }
    }
}

/// Several at once, one of them changed again when it is repeated; and behind a lost packet, so that it lies in another's slot.
#[test]
fn corrupt_repetitions_and_displaced_fragments_are_sent_again() {
    for loses in [false, true] {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = session(&mut bed, Delivery::Reliable);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sent = Arc::clone(&seen);
        bed.wire.set_filter(move |from, packet| {
            if from != 0 || kind(packet) != Some(TYPE_DATA) {
                return true;
            }
            let index = index_of(packet);
            let mut sent = sent.lock().unwrap();
            sent.push(index);
            let times = sent.iter().filter(|&&known| known == index).count();
            if loses && index == 40 && times == 1 {
                return false;
            }
            // Three times, twice, once.
            let wrong = match index {
                30 => 3,
                20 | 70 => 2,
                0 | 50 | 99 => 1,
                _ => 0,
            };
            if times <= wrong {
                packet[HEADERS_LEN + 5] ^= 0x80;
            }
            true
        });
        arrives(&mut bed, peer, 3);
        assert_eq!(drops(&bed, 1, "fragment_corrupt"), 3 + 2 + 2 + 3);
        assert_eq!(bed.hosts[1].counters.fragments_displaced > 0, loses);
        // One manifest is enough for all of it.
        assert_eq!(bed.hosts[0].counters.manifest_packets_sent, 1);
        bed.wire.clear_filter();
        arrives(&mut bed, peer, 4);
        bed.check_memory();
    }
}

/// Another fragment's index, and another message's number, are as plausible as the right ones.
#[test]
fn a_changed_index_or_number_is_noticed() {
    for (at, name) in [(19, "index"), (15, "number")] {
        for index in [3, 63, 64, 98] {
            let mut bed = Bed::new(&BedConfig::default());
            let peer = session(&mut bed, Delivery::Reliable);
            let picks = move |packet: &[u8]| index_of(packet) == index;
            change(&bed, 0, TYPE_DATA, 1, picks, move |packet| {
                packet[UDP_HEADERS_LEN + at] ^= 1;
                true
            });
            let payloads = [1, 2].map(|seed| noise(seed, MESSAGE_LEN));
            for (tag, payload) in payloads.iter().enumerate() {
                bed.send(0, peer, payload, tag as u64);
            }
            for (tag, payload) in payloads.iter().enumerate() {
                let message = bed.recv(1);
                assert!(
                    message.tag() == tag as u64 && message[..] == payload[..],
                    "{name} of fragment {index}"
                );
            }
            for _ in payloads {
                assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
            }
            arrives(&mut bed, peer, 9);
            // Entries that nothing used keep their zones until then.
            let now_ns = bed.now_ns;
            bed.hosts[0].end_session(peer.index, now_ns);
            bed.check_memory();
        }
    }
}

/// The message's digest is lost, or corrupt; so are requests for it, manifests, and requests for those.
#[test]
fn lost_and_corrupt_digests_are_asked_for() {
    let with_digests = |packet: &[u8]| {
        // Entries of 16 bytes would be a multiple of it.
        !(packet.len() - HEADERS_LEN - 8).is_multiple_of(16)
    };
    for lose in [true, false] {
        let harm = move |packet: &mut Vec<u8>| !lose && flip_last(packet);
        let mut bed = Bed::new(&BedConfig::default());
        let peer = session(&mut bed, Delivery::Reliable);
        let changed = change(&bed, 0, TYPE_ANNOUNCE, 3, with_digests, harm);
        arrives(&mut bed, peer, 1);
        assert!(changed.load(Ordering::Relaxed) > 3);
        assert_eq!(drops(&bed, 1, "corrupt"), if lose { 0 } else { 3 });
        assert_eq!(bed.hosts[1].counters.manifests_requested, 0);

        // The same, and each question is lost three times: of the manifest, and then of what is in it.
        for (from, kind) in [(1, TYPE_MISSING), (0, TYPE_MANIFEST)] {
            let mut bed = Bed::new(&BedConfig::default());
            let peer = session(&mut bed, Delivery::Reliable);
            let harmed = Arc::new(AtomicU32::new(0));
            let counter = Arc::clone(&harmed);
            let mut is_first = true;
            bed.wire.set_filter(move |sender, packet| {
                if sender == 0 && self::kind(packet) == Some(TYPE_DATA) && std::mem::take(&mut is_first) {
                    return flip_last(packet);
                }
                if sender == from
                    && self::kind(packet) == Some(kind)
                    && counter.fetch_add(1, Ordering::Relaxed) < 3
                {
                    return harm(packet);
                }
                true
            });
            arrives(&mut bed, peer, 2);
            assert!(harmed.load(Ordering::Relaxed) > 3);
            assert_eq!(drops(&bed, from ^ 1, "corrupt"), if lose { 0 } else { 3 });
            bed.check_memory();
        }
    }
}

/// The manifest of a long message takes many packets, of which some are lost.
#[test]
fn a_long_manifest_is_completed() {
    let mut bed = Bed::new(&BedConfig {
        mtu: 576,
        ..BedConfig::default()
    });
    let peer = session(&mut bed, Delivery::Reliable);
    let mut count = 0;
    bed.wire.set_filter(move |from, packet| {
        match (from, kind(packet)) {
            (0, Some(TYPE_DATA)) if index_of(packet) == 1000 && count == 0 => {
                count = 1;
                return flip_last(packet);
            }
            (0, Some(TYPE_MANIFEST)) => {
                count += 1;
                return count % 3 != 0;
            }
            _ => {}
        }
        true
    });
    bed.exchange(0, peer, &noise(1, 1 << 20));
    assert_eq!(drops(&bed, 1, "fragment_corrupt"), 1);
    assert!(bed.hosts[1].counters.manifests_requested > 1);
    bed.check_memory();
}

/// Unreliable: what differs is given up. Partial: it is delivered without. A loss beside it changes nothing.
#[test]
fn other_deliveries_show_nothing_that_is_not_verified() {
    for (delivery, loses) in [
        (Delivery::Unreliable, false),
        (Delivery::Unreliable, true),
        (Delivery::Partial, false),
        (Delivery::Partial, true),
    ] {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = session(&mut bed, delivery);
        bed.wire.set_filter(move |from, packet| {
            if from == 0 && kind(packet) == Some(TYPE_DATA) && packet[UDP_HEADERS_LEN + 15] == 0 {
                return match index_of(packet) {
                    17 => flip_last(packet),
                    44 => !loses,
                    _ => true,
                };
            }
            true
        });
        let mut expected = noise(1, MESSAGE_LEN);
        bed.send(0, peer, &expected, 1);
        let completion = bed.completion(0);
        let Outcome::Incomplete { missing } = completion.outcome else {
            panic!("{delivery:?}: {:?}", completion.outcome);
        };
        let bytes = |index: usize| (index * 1448) as u64..(index * 1448 + 1448) as u64;
        let gone: Vec<Range<u32>> = [17]
            .into_iter()
            .chain(loses.then_some(44))
            .map(|index| index..index + 1)
            .collect();
        match delivery {
            Delivery::Partial => {
                assert_eq!(missing, gone);
                let message = bed.recv(1);
                let lost: Vec<Range<u64>> = gone.iter().map(|range| bytes(range.start as usize)).collect();
                assert_eq!(message.missing(), lost);
                for range in lost {
                    expected[range.start as usize..range.end as usize].fill(0);
                }
                assert!(message[..] == expected, "{delivery:?}");
                assert_eq!(drops(&bed, 1, "fragment_corrupt"), 1);
            }
            _ => assert!(matches!(
                bed.hosts[1].take_message(),
                Err(RecvError::Incomplete { number: 0, .. })
            )),
        }
        // The next message comes whole.
        bed.exchange(0, peer, &noise(2, MESSAGE_LEN));
        bed.check_memory();
    }
}

/// Partial delivery without an answer about what came: given up, not shown.
#[test]
fn a_partial_message_without_a_manifest_is_given_up() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = session(&mut bed, Delivery::Partial);
    bed.wire.set_filter(|from, packet| match (from, kind(packet)) {
        (0, Some(TYPE_DATA)) => index_of(packet) != 5,
        (0, Some(TYPE_MANIFEST)) => false,
        _ => true,
    });
    bed.send(0, peer, &noise(1, MESSAGE_LEN), 1);
    assert!(matches!(bed.completion(0).outcome, Outcome::Incomplete { .. }));
    assert!(matches!(
        bed.hosts[1].take_message(),
        Err(RecvError::Incomplete { .. })
    ));
    assert!(bed.hosts[1].take_message().expect("no failure").is_none());
    bed.wire.clear_filter();
    bed.exchange(0, peer, &noise(2, MESSAGE_LEN));
    bed.check_memory();
}

/// Small messages and what is said about them: any byte of them.
#[test]
fn corrupt_eager_messages_and_acknowledgements_are_sent_again() {
    for (from, kind) in [(0, TYPE_EAGER), (1, TYPE_EAGER_ACK)] {
        for at in [
            6, 26, 34, 42, 43, 45, 46, 53, 54, 57, 58, 65, 66, 70, 73, 100, 1439, 1513,
        ] {
            let mut bed = Bed::new(&BedConfig::default());
            let peer = bed.resolve(0);
            bed.resolve(1);
            let longest = bed.hosts[0].eager_max_len() as usize;
            assert_eq!(longest, 1440);
            bed.exchange(0, peer, b"first");
            let changed = change(
                &bed,
                from,
                kind,
                1,
                |_| true,
                move |packet| {
                    let at = at.min(packet.len() - 1);
                    packet[at] ^= 4;
                    true
                },
            );
            bed.exchange(0, peer, &noise(4, longest));
            bed.exchange(0, peer, b"last");
            assert!(changed.load(Ordering::Relaxed) > 1);
            bed.check_memory();
        }
    }
}

/// Credits: a corrupt one changes nothing.
#[test]
fn corrupt_credits_are_dropped() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = session(&mut bed, Delivery::Reliable);
    // Limit, delivered, announced.
    for at in [12, 15, 19, 23] {
        let changed = change(
            &bed,
            1,
            TYPE_CREDIT,
            2,
            |_| true,
            move |packet| {
                packet[UDP_HEADERS_LEN + at] ^= 2;
                true
            },
        );
        arrives(&mut bed, peer, at as u64);
        assert!(changed.load(Ordering::Relaxed) >= 2);
    }
    assert_eq!(drops(&bed, 0, "corrupt"), 8);
    bed.check_memory();
}

/// A packet that is right but for whose it is: its address is part of what the digest is of.
#[test]
fn a_corrupt_address_does_not_pass() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = session(&mut bed, Delivery::Reliable);
    arrives(&mut bed, peer, 1);
    let key = bed.key(0, peer);
    let header = LmHeader::Credit {
        session_key: key,
        packet_limit: 200,
        delivered: 1,
        announced: 1,
        lands: true,
    };
    let mut addressing = bed.hosts[1].addressing_to(data_address(0), simnic::mac_of(IPS[0]));
    let right = lm_packet(&addressing, &header, &[]);
    addressing.src_port ^= 1;
    let other = lm_packet(&addressing, &header, &[]);
    let mut forged = right.clone();
    // The other one's digest.
    let at = forged.len() - 8;
    forged[at..].copy_from_slice(&other[at..]);
    bed.wire.inject(0, 0, &forged);
    bed.rounds(2);
    assert_eq!(drops(&bed, 0, "corrupt"), 1);
    bed.wire.inject(0, 0, &right);
    bed.rounds(2);
    assert_eq!(drops(&bed, 0, "corrupt"), 1);
}

/// A manifest that proves itself and is not that of the announced digest: its sender says two things. Nothing is shown, and
/// the session goes on.
#[test]
fn a_manifest_that_contradicts_the_announcement_is_not_believed() {
    for delivery in [Delivery::Reliable, Delivery::Partial] {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = session(&mut bed, delivery);
        let key = bed.key(0, peer);
        let addressing = bed.hosts[0].addressing_to(data_address(1), simnic::mac_of(IPS[1]));
        let lie = Arc::new(AtomicU32::new(0));
        let lies = Arc::clone(&lie);
        bed.wire
            .set_filter(move |from, packet| match (from, kind(packet)) {
                (0, Some(TYPE_DATA)) if packet[UDP_HEADERS_LEN + 15] == 0 && index_of(packet) == 9 => {
                    flip_last(packet)
                }
                (0, Some(TYPE_MANIFEST)) => {
                    // Of other fragments, and right in itself.
                    let digests: Vec<u64> = (0..100).collect();
                    let manifest =
                        lm_protocol::manifest::Manifest::new(key, 0, &digests, MESSAGE_LEN as u64, 1);
                    let made = manifest.packets(1440).next().unwrap();
                    let mut payload = vec![0; made.payload_len()];
                    made.write_payload(&mut payload);
                    *packet = lm_packet(&addressing, &made.header, &payload);
                    lies.fetch_add(1, Ordering::Relaxed);
                    true
                }
                _ => true,
            });
        bed.send(0, peer, &noise(1, MESSAGE_LEN), 1);
        let outcome = bed.completion(0).outcome;
        assert!(matches!(outcome, Outcome::Incomplete { .. }), "{outcome:?}");
        assert_eq!(lie.load(Ordering::Relaxed), 1);
        assert!(matches!(
            bed.hosts[1].take_message(),
            Err(RecvError::Incomplete { number: 0, .. })
        ));
        assert_eq!(drops(&bed, 1, "manifest_contradictory"), 1);
        bed.exchange(0, peer, &noise(2, MESSAGE_LEN));
        bed.check_memory();
    }
}

/// Manifests that nobody asked for, and requests for what is not there.
#[test]
fn unwanted_manifests_cost_a_look_each() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = session(&mut bed, Delivery::Reliable);
    arrives(&mut bed, peer, 1);
    let key = bed.key(0, peer);
    let to_1 = bed.hosts[0].addressing_to(data_address(1), simnic::mac_of(IPS[1]));
    let to_0 = bed.hosts[1].addressing_to(data_address(0), simnic::mac_of(IPS[0]));
    for message in 0..300u32 {
        let header = LmHeader::Manifest {
            session_key: key,
            message: message % 3,
            first: 0,
            count: u32::MAX,
        };
        bed.wire.inject(1, 0, &lm_packet(&to_1, &header, &[7; 1440]));
        let header = LmHeader::Missing {
            session_key: key,
            message,
            ranges: 1,
            manifest: true,
        };
        bed.wire.inject(0, 0, &lm_packet(&to_0, &header, &[0xff; 8]));
        bed.round();
    }
    bed.rounds(10);
    assert_eq!(drops(&bed, 1, "late"), 300);
    // The first message is settled: a late question.
    assert_eq!(drops(&bed, 0, "implausible"), 299);
    assert_eq!(bed.hosts[0].counters.manifest_packets_sent, 0);
    arrives(&mut bed, peer, 2);
    bed.check_memory();
}

/// Without digests nothing notices a changed payload: what the tests here and the soak look for can be seen.
#[test]
fn without_integrity_corruption_arrives() {
    let mut bed = Bed::new(&BedConfig {
        integrity: Integrity::None,
        ..BedConfig::default()
    });
    let peer = session(&mut bed, Delivery::Reliable);
    change(
        &bed,
        0,
        TYPE_DATA,
        1,
        |packet| index_of(packet) == 9,
        |packet| flip_last(packet),
    );
    let payload = noise(1, MESSAGE_LEN);
    bed.send(0, peer, &payload, 1);
    let message = bed.recv(1);
    let differing: Vec<usize> = (0..MESSAGE_LEN)
        .filter(|&at| message[at] != payload[at])
        .collect();
    assert_eq!(differing, [9 * 1448 + 1447]);
    drop(message);
    assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    // A small one, too: 8 bytes more fit it.
    let small = noise(2, 1448);
    assert_eq!(bed.hosts[0].eager_max_len(), 1448);
    change(&bed, 0, TYPE_EAGER, 1, |_| true, |packet| flip_last(packet));
    bed.send(0, peer, &small, 2);
    assert!(bed.recv(1)[..] != small[..]);
    // But not what the endpoints say to each other.
    let changed = change(&bed, 1, TYPE_CREDIT, 2, |_| true, |packet| flip_last(packet));
    bed.send(0, peer, &payload, 3);
    drop(bed.recv(1));
    while changed.load(Ordering::Relaxed) < 2 {
        bed.round();
    }
    bed.rounds(2);
    assert_eq!(drops(&bed, 0, "corrupt"), 2);
    assert_eq!(bed.hosts[1].counters.manifests_requested, 0);
}

/// What an endpoint sends is its own choice; the other one obeys.
#[test]
fn each_side_has_its_own_integrity() {
    let mut bed = Bed::new(&BedConfig::default());
    bed.hosts[0].fixed.integrity = Integrity::None;
    bed.hosts[0].fixed.sender_id &= !1;
    let peers = [0, 1].map(|from| bed.session(from, WireMode::Lm, 100_000));
    let digested = [0, 1].map(|_| Arc::new(AtomicU32::new(0)));
    let counters = digested.clone();
    bed.wire.set_filter(move |from, packet| {
        let has_digest = kind(packet) == Some(TYPE_EAGER) && packet[UDP_HEADERS_LEN + 1] & FLAG_DIGEST != 0;
        let tells = kind(packet) == Some(TYPE_ANNOUNCE) && has_message_digests(packet);
        counters[from].fetch_add(u32::from(has_digest || tells), Ordering::Relaxed);
        true
    });
    for from in [0, 1] {
        for len in [0, 10, 1440, 1441, 1448, 1449, 100_000] {
            bed.exchange(from, peers[from], &noise(len as u64, len));
        }
    }
    let [without, with] = digested.map(|count| count.load(Ordering::Relaxed));
    // Facts have one, too.
    let ahead = bed.hosts[0].counters.messages_ahead;
    assert!(
        without == 0 && u64::from(with) + ahead >= 7,
        "{without}, {with}, {ahead}"
    );
    bed.check_memory();
    bed.check_clean();
}

/// IP fragments have no digests, whatever the endpoint's are.
#[test]
fn ip_fragments_are_without() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::IpFrag, 60_000);
    bed.wire.set_filter(move |from, packet| {
        if from == 0 && kind(packet) == Some(TYPE_ANNOUNCE) {
            assert!(!has_message_digests(packet));
        }
        assert!(kind(packet) != Some(TYPE_MISSING) || packet[UDP_HEADERS_LEN + 1] & FLAG_MANIFEST == 0);
        true
    });
    bed.exchange(0, peer, &noise(1, 60_000));
    bed.check_memory();
    bed.check_clean();
}
