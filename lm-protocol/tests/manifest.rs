//! The manifest: golden bytes, what the digest detects, and collectors under any order, repetition, conflict and
//! nonsense.

use std::collections::HashMap;

use lm_protocol::manifest::{
    DIGEST_LEN, FragmentHasher, MIN_PAYLOAD_LEN, Manifest, ManifestCollector, ManifestError, digests,
    fragment_digest, message_digest,
};
use lm_protocol::wire::lm::{self, HEADER_LEN, LmError, LmHeader, MissingRange};
use proptest::prelude::*;
use proptest::sample::Index;

const KEY: u64 = 0x0102_0304_0506_0708;

/// The bytes of the message in the golden dumps.
fn message(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

fn digests_of(message: &[u8], payload_len: usize) -> Vec<u64> {
    message
        .chunks(payload_len)
        .map(|payload| fragment_digest(KEY, payload))
        .collect()
}

/// Header and payload of every packet.
fn packets(manifest: &Manifest<'_>, payload_len: usize) -> Vec<Vec<u8>> {
    manifest
        .packets(payload_len)
        .map(|packet| {
            let mut bytes = packet.header.encode(packet.payload_len() as u16).to_vec();
            // The packet's own digest is another matter.
            bytes.resize(HEADER_LEN + packet.payload_len() + DIGEST_LEN, 0);
            assert_eq!(
                packet.write_payload(&mut bytes[HEADER_LEN..]),
                packet.payload_len()
            );
            bytes
        })
        .collect()
}

fn accept(collector: &mut ManifestCollector, packet: &[u8]) -> Result<u32, ManifestError> {
    let (header, payload) = lm::parse_datagram(packet).expect("an LM packet");
    collector.accept(&header, payload)
}

/// Two crates work digests out, and one of them in several ways: what one side has of one, the other may have of another.
#[test]
fn digests_do_not_depend_on_who_works_them_out() {
    let payload: Vec<u8> = (0..9000u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let hasher = FragmentHasher::new(KEY);
    for len in (0..1600).chain((1600..9000).step_by(37)) {
        let payload = &payload[..len];
        assert_eq!(
            hasher.digest(payload),
            fragment_digest(KEY, payload),
            "{len} bytes"
        );
    }
}

/// Digests by libxxhash 0.8.1 (`XXH3_64bits_withSeed`), not by the crate that is used here.
#[test]
fn digests_are_those_of_the_reference_implementation() {
    let expected = [
        (0, 0x4a7f_542d_4511_ab5e),
        (1, 0xf9c3_f76a_b6d3_6495),
        (3, 0xafde_dce1_b6b5_39ff),
        (8, 0xd2f2_ac1b_5a73_60d2),
        (16, 0xedde_37c2_64fe_cafd),
        (17, 0x34ec_59fc_3e90_0581),
        (128, 0xdd1c_488f_5ff1_343c),
        (129, 0x27e9_728d_8c71_50d0),
        (240, 0xbc5a_c06f_aae0_75ad),
        (241, 0x9661_fd63_d531_c989),
        (1024, 0x719f_2739_c281_d80f),
        (1448, 0x6662_1e66_8fb1_ad57),
    ];
    for (len, digest) in expected {
        assert_eq!(fragment_digest(KEY, &message(len)), digest, "{len} bytes");
    }
}

/// 4000 bytes in fragments of 1448; digests by libxxhash 0.8.1.
#[test]
fn bytes_of_a_manifest() {
    let digests = digests_of(&message(4000), 1448);
    let manifest = Manifest::new(KEY, 0x1112_1314, &digests, 4000, 0x2122_2324_3132_3334);
    assert_eq!(manifest.message_digest(), 0x4fa1_3b3b_b00f_e6c3);
    let dump = "27 02 00 28 01 02 03 04 05 06 07 08 11 12 13 14 00 00 00 00 00 00 00 03 \
                66 62 1e 66 8f b1 ad 57 b3 00 cd b3 2d d0 ba 8e e9 a7 b5 19 50 38 75 91 4f a1 3b 3b b0 0f e6 c3 \
                00 00 00 00 00 00 00 00";
    let bytes: Vec<u8> = dump
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    assert_eq!(packets(&manifest, 1448), [bytes]);

    // More digests than one hash takes.
    let many: Vec<u64> = (0..61).collect();
    assert_eq!(message_digest(KEY, 5, &many, 70_000, 9), 0x3b48_bf39_cf9e_932a);

    // One less than three digests and the message's: the last fragment's goes with the message's.
    let short: Vec<(u32, usize)> = manifest
        .packets(31)
        .map(|packet| match packet.header {
            LmHeader::Manifest { first, .. } => (first, packet.payload_len()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(short, [(0, 16), (2, 16)]);
}

#[test]
fn one_packet_holds_181_digests_at_mtu_1500() {
    for (count, lens) in [
        (1, vec![16]),
        (180, vec![1448]),
        (181, vec![1440, 16]),
        (182, vec![1448, 16]),
        (362, vec![1448, 1440, 16]),
    ] {
        let digests: Vec<u64> = (0..count).collect();
        let manifest = Manifest::new(KEY, 1, &digests, 1, 0);
        let made: Vec<usize> = manifest
            .packets(1448)
            .map(|packet| packet.payload_len())
            .collect();
        assert_eq!(made, lens, "{count} fragments");
    }
}

/// What links and landing zones do to payloads: each changes the digest.
#[test]
fn faults_of_a_full_payload_are_noticed() {
    let payload: Vec<u8> = (0..1448u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let mut seen = HashMap::from([(fragment_digest(KEY, &payload), payload.clone())]);
    let mut differs = |payload: &[u8], what: &str| {
        // Two faults may give the same bytes; other bytes may not have the same digest.
        let first = seen
            .entry(fragment_digest(KEY, payload))
            .or_insert_with(|| payload.to_vec());
        assert!(first[..] == *payload, "{what}");
    };
    for bit in 0..payload.len() * 8 {
        let mut changed = payload.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        differs(&changed, &format!("bit {bit}"));
    }
    for at in 0..payload.len() - 1 {
        let mut changed = payload.clone();
        changed[at] = !changed[at];
        changed[at + 1] = !changed[at + 1];
        differs(&changed, &format!("bytes {at} and the next"));
    }
    // Blocks exchanged: lanes of the hash (8 bytes), its stripes (64), cache lines shifted by the header.
    for block in [8, 16, 64, 66, 128] {
        for at in (0..payload.len() - 2 * block).step_by(block) {
            let mut changed = payload.clone();
            changed[at..at + 2 * block].rotate_left(block);
            differs(&changed, &format!("blocks of {block} at {at}"));
        }
    }
    // The headers of the fragment above, on the end.
    for header_len in 1..=70 {
        let mut changed = payload.clone();
        changed[1448 - header_len..].fill(0x45);
        differs(&changed, &format!("{header_len} bytes of headers"));
    }
    for len in 0..1448 {
        differs(&payload[..len], &format!("cut to {len}"));
    }
    // Zeros have no bytes to tell lengths by.
    for len in 1..=1448 {
        differs(&vec![0; len], &format!("{len} zeros"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever two bytes do, alone or together.
    #[test]
    fn any_change_of_two_bytes_is_noticed(len in 2usize..2000, a: Index, b: Index, x in 1u8.., y: u8) {
        let payload = message(len);
        let mut changed = payload.clone();
        changed[a.index(len)] ^= x;
        changed[b.index(len)] ^= y;
        prop_assume!(changed != payload);
        prop_assert_ne!(fragment_digest(KEY, &changed), fragment_digest(KEY, &payload));
    }

    /// The message's digest depends on each fragment's, on their order, on the length and on the session.
    #[test]
    fn the_messages_digest_covers_everything(
        mut digests in prop::collection::vec(any::<u64>(), 2..200),
        len: u64, tag: u64, at: Index, other: Index, bit in 0u32..64,
    ) {
        let right = message_digest(KEY, 3, &digests, len, tag);
        prop_assert_ne!(message_digest(KEY ^ 1, 3, &digests, len, tag), right);
        prop_assert_ne!(message_digest(KEY, 3 ^ 1 << (bit % 32), &digests, len, tag), right);
        prop_assert_ne!(message_digest(KEY, 3, &digests, len, tag ^ 1 << bit), right);
        prop_assert_ne!(message_digest(KEY, 3, &digests, len ^ 1 << bit, tag), right);
        prop_assert_ne!(message_digest(KEY, 3, &digests[1..], len, tag), right);
        let (at, other) = (at.index(digests.len()), other.index(digests.len()));
        if digests[at] != digests[other] {
            digests.swap(at, other);
            prop_assert_ne!(message_digest(KEY, 3, &digests, len, tag), right);
            digests.swap(at, other);
        }
        digests[at] ^= 1 << bit;
        prop_assert_ne!(message_digest(KEY, 3, &digests, len, tag), right);
    }

    /// The packets hold each digest once, in order, and the message's at the end; all are legal and as full as they can be.
    #[test]
    fn packets_hold_every_digest_once(
        digests in prop::collection::vec(any::<u64>(), 1..600), payload_len in MIN_PAYLOAD_LEN..2000, number: u32,
    ) {
        let manifest = Manifest::new(KEY, number, &digests, 5, 0);
        let mut all = Vec::new();
        let mut lens = Vec::new();
        for packet in packets(&manifest, payload_len) {
            let (header, payload) = lm::parse_datagram(&packet).unwrap();
            prop_assert_eq!(
                header,
                LmHeader::Manifest {
                    session_key: KEY,
                    message: number,
                    first: all.len() as u32,
                    count: digests.len() as u32,
                }
            );
            prop_assert!(payload.len() <= payload_len);
            lens.push(payload.len());
            all.extend(lm_protocol::manifest::digests(payload));
        }
        prop_assert_eq!(all.pop(), Some(manifest.message_digest()));
        prop_assert_eq!(&all, &digests);
        let full = payload_len / DIGEST_LEN * DIGEST_LEN;
        let (_, before) = lens.split_last().unwrap();
        if let Some((last, before)) = before.split_last() {
            prop_assert!(before.iter().all(|&len| len == full));
            prop_assert!(*last >= full - DIGEST_LEN, "room for the message's digest is all that is left free");
        }
    }

    /// Any order, any losses and repetitions; what lacks is requested by range until the manifest is proved.
    #[test]
    fn collectors_converge(
        digests in prop::collection::vec(any::<u64>(), 1..500),
        payload_len in MIN_PAYLOAD_LEN..400,
        arrivals in prop::collection::vec(any::<Index>(), 0..40),
        resent_len in MIN_PAYLOAD_LEN..400,
    ) {
        let manifest = Manifest::new(KEY, 9, &digests, 77, 0);
        let count = digests.len() as u32;
        let packets = packets(&manifest, payload_len);
        let mut collector = ManifestCollector::new(count + 3);
        // Something else was there before.
        collector.begin(1, 1, count + 3, 5, 0).unwrap();
        let before: Vec<u64> = vec![3; count as usize + 3];
        for packet in self::packets(&Manifest::new(1, 1, &before, 5, 0), 1448) {
            accept(&mut collector, &packet).unwrap();
        }
        prop_assert!(collector.is_proved());

        collector.begin(KEY, 9, count, 77, 0).unwrap();
        let mut known = vec![false; digests.len()];
        for arrival in arrivals {
            let packet = arrival.get(&packets);
            let LmHeader::Manifest { first, .. } = LmHeader::decode(packet).unwrap().0 else { unreachable!() };
            let mut new = 0;
            let digests_in = (packet.len() - HEADER_LEN - DIGEST_LEN) / DIGEST_LEN;
            for known in known.iter_mut().skip(first as usize).take(digests_in) {
                new += u32::from(!*known);
                *known = true;
            }
            prop_assert_eq!(accept(&mut collector, packet), Ok(new));
            // The ranges are exactly what lacks.
            let mut lacking = vec![false; digests.len()];
            let mut end_before = None;
            for MissingRange { first, len } in collector.missing() {
                prop_assert!(len > 0 && end_before.is_none_or(|end| first > end));
                end_before = Some(first + len);
                lacking[first as usize..(first + len) as usize].fill(true);
            }
            prop_assert!(lacking.iter().zip(&known).all(|(lacking, known)| lacking != known));
            prop_assert_eq!(collector.is_proved(), known.iter().all(|&known| known));
        }
        let ranges: Vec<MissingRange> = collector.missing().collect();
        let lacked: u32 = ranges.iter().map(|range| range.len).sum();
        let mut new = 0;
        for range in ranges {
            for packet in manifest.packets_of(range, resent_len) {
                let mut payload = vec![0; packet.payload_len()];
                packet.write_payload(&mut payload);
                new += collector.accept(&packet.header, &payload).unwrap();
            }
        }
        prop_assert_eq!(new, lacked, "what was asked for came, and nothing else");
        prop_assert!(collector.is_proved());
        prop_assert_eq!(collector.missing().next(), None);
        for (index, &digest) in digests.iter().enumerate() {
            prop_assert_eq!(collector.digest(index as u32), Some(digest));
        }
        prop_assert_eq!(collector.digest(count), None);
        // Everything once more is a duplicate.
        for packet in &packets {
            prop_assert_eq!(accept(&mut collector, packet), Ok(0));
        }
    }

    /// One changed digest: whichever comes first, the wrong or the right one, the wrong one is never told; what was in
    /// doubt is asked for again, and the manifest is proved in the end.
    #[test]
    fn a_changed_digest_is_never_believed(
        digests in prop::collection::vec(any::<u64>(), 1..300),
        which: Index, at: Index, bit in 0u8..8, wrong_first: bool,
    ) {
        let manifest = Manifest::new(KEY, 9, &digests, 77, 0);
        let count = digests.len() as u32;
        let packets = packets(&manifest, 160);
        let which = which.index(packets.len());
        let mut wrong = packets[which].clone();
        let at = HEADER_LEN + at.index(wrong.len() - HEADER_LEN - DIGEST_LEN);
        wrong[at] ^= 1 << bit;

        let mut collector = ManifestCollector::new(count);
        collector.begin(KEY, 9, count, 77, 0).unwrap();
        let mut outcomes = Vec::new();
        if wrong_first {
            outcomes.push(accept(&mut collector, &wrong));
        }
        for (place, packet) in packets.iter().enumerate() {
            outcomes.push(accept(&mut collector, packet));
            if place == which && !wrong_first {
                outcomes.push(accept(&mut collector, &wrong));
            }
            let is_wrong = |index: &u32| collector.digest(*index).is_some_and(|d| d != digests[*index as usize]);
        if let Some(told) = (0..count).find(is_wrong) {
                prop_assert!(false, "digest {told} is wrong");
            }
        }
        prop_assert!(
            outcomes.iter().any(|outcome| matches!(
                outcome,
                Err(ManifestError::Conflict { fragments: 1 }) | Err(ManifestError::Disproved)
            )),
            "{:?}", outcomes
        );
        let ranges: Vec<MissingRange> = collector.missing().collect();
        for packet in ranges.iter().flat_map(|range| manifest.packets_of(*range, 160)) {
            let mut payload = vec![0; packet.payload_len()];
            packet.write_payload(&mut payload);
            collector.accept(&packet.header, &payload).unwrap();
        }
        prop_assert!(collector.is_proved());
    }

    /// Nothing panics, whatever is accepted, and nobody gets a manifest proved without its digests.
    #[test]
    fn hostile_packets(
        count in 0u32..200,
        packets in prop::collection::vec(
            (
                any::<(u64, u32)>(),
                prop_oneof![0u32..200, any::<u32>()],
                prop_oneof![0u32..200, any::<u32>()],
                prop::collection::vec(any::<u8>(), 0..400),
            ),
            0..60,
        ),
        honest: bool,
    ) {
        let digests: Vec<u64> = (0..u64::from(count)).map(|n| n * n).collect();
        let mut collector = ManifestCollector::new(150);
        let begun = collector.begin(KEY, 9, count, 77, 0);
        prop_assert_eq!(begun.is_ok(), (1..=150).contains(&count));
        for ((key, number), first, total, payload) in packets {
            let (session_key, message) = if honest { (KEY, 9) } else { (key, number) };
            let total = if honest && total < 200 { count } else { total };
            let header = LmHeader::Manifest { session_key, message, first, count: total };
            let outcome = collector.accept(&header, &payload);
            let missing: u64 = collector.missing().map(|range| u64::from(range.len)).sum();
        let known = u64::from(collector_count(&begun, count)) - missing;
            prop_assert!(known <= 150);
            if !honest || total != count || begun.is_err() {
                prop_assert_eq!(outcome, Err(ManifestError::Foreign));
            }
            prop_assert!(!collector.is_proved());
            prop_assert!((0..200).all(|index| collector.digest(index).is_none()));
        prop_assert!((0..200).all(|index| collector.verify(index, b"x").is_none()));
            // On the wire the same header is refused before, or agrees with its payload.
            let mut bytes = header.encode(payload.len() as u16).to_vec();
            bytes.extend_from_slice(&payload);
            bytes.extend_from_slice(&[0; DIGEST_LEN]);
            match lm::parse_datagram(&bytes) {
                Ok((LmHeader::Manifest { first, count, .. }, payload)) => {
                    let n = lm_protocol::manifest::digests(payload).len() as u64;
                    prop_assert!(first < count && n > 0 && payload.len().is_multiple_of(8));
                    let end = u64::from(first) + n;
            prop_assert!(end <= u64::from(count) + 1 && end != u64::from(count));
                }
                Ok(other) => prop_assert!(false, "{:?}", other),
                Err(error) => prop_assert!(matches!(error, LmError::Index | LmError::Length), "{:?}", error),
            }
        }
        if begun.is_ok() {
            // Afterwards the honest manifest is proved, at the latest when what is in doubt was asked for twice.
            let manifest = Manifest::new(KEY, 9, &digests, 77, 0);
            for _ in 0..3 {
                let ranges: Vec<MissingRange> = collector.missing().collect();
                let again = ranges.iter().flat_map(|range| manifest.packets_of(*range, 160));
        for packet in manifest.packets(160).chain(again) {
                    let mut payload = vec![0; packet.payload_len()];
                    packet.write_payload(&mut payload);
                    let _ = collector.accept(&packet.header, &payload);
                }
            }
            prop_assert!(collector.is_proved());
        }
    }
}

fn collector_count(begun: &Result<(), ManifestError>, count: u32) -> u32 {
    if begun.is_ok() { count } else { 0 }
}

#[test]
fn ranges_that_the_message_has_not_give_no_packets() {
    let digests = [1, 2, 3];
    let manifest = Manifest::new(KEY, 1, &digests, 3, 0);
    let of = |first, len| -> Vec<usize> {
        manifest
            .packets_of(MissingRange { first, len }, 1448)
            .map(|packet| packet.payload_len())
            .collect()
    };
    assert_eq!(of(0, 0), []);
    assert_eq!(of(3, 1), []);
    assert_eq!(of(u32::MAX, u32::MAX), []);
    assert_eq!(of(2, u32::MAX), [16]);
    assert_eq!(of(1, 1), [8]);
    assert_eq!(of(0, u32::MAX), [32]);
}

/// A proved manifest stays so; later lies are told and change nothing.
#[test]
fn a_proved_manifest_is_not_unsettled() {
    let honest = digests_of(&message(4000), 1448);
    let mut collector = ManifestCollector::new(3);
    collector.begin(KEY, 1, 3, 4000, 0).unwrap();
    for packet in packets(&Manifest::new(KEY, 1, &honest, 4000, 0), 1448) {
        assert_eq!(accept(&mut collector, &packet), Ok(3));
    }
    let forged = [1, honest[1], 2];
    for packet in packets(&Manifest::new(KEY, 1, &forged, 4000, 0), 1448) {
        assert_eq!(
            accept(&mut collector, &packet),
            Err(ManifestError::Conflict { fragments: 2 })
        );
    }
    assert!(collector.is_proved());
    let whole = message(4000);
    assert_eq!(collector.verify(2, &whole[2896..]), Some(true));
    assert_eq!(collector.verify(1, &whole[2896..]), Some(false));
    assert_eq!(collector.verify(3, &whole[2896..]), None);
    // The next message knows nothing of this one.
    collector.begin(KEY, 2, 3, 4000, 0).unwrap();
    assert!(!collector.is_proved() && collector.digest(0).is_none());
}

/// A manifest that is consistent in its fragments and wrong in its length is not believed.
#[test]
fn another_length_is_disproved() {
    let honest = digests_of(&message(4000), 1448);
    let mut collector = ManifestCollector::new(3);
    collector.begin(KEY, 1, 3, 3999, 0).unwrap();
    for packet in packets(&Manifest::new(KEY, 1, &honest, 4000, 0), 1448) {
        assert_eq!(accept(&mut collector, &packet), Err(ManifestError::Disproved));
    }
    assert_eq!(
        collector.missing().collect::<Vec<_>>(),
        [MissingRange { first: 0, len: 3 }]
    );
    assert_eq!(
        ManifestCollector::new(3).begin(KEY, 1, 4, 1, 0),
        Err(ManifestError::Count { count: 4, max: 3 })
    );
    assert_eq!(digests(&[0; 7]).len(), 0);
}
