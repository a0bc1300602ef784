//! Opaque bytes of a message come with its announcement.
#![cfg(test)]

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::wire::lm::{AnnounceEntry, LmHeader};

use super::bed::{Bed, BedConfig, data_address, fill, lm_packet, noise};
use super::placing::sender;
use super::source::{Answer, Source};
use super::transfer::Dice;
use crate::completion::{LoanError, PeerId, SendToken};
use crate::simnic::mac_of;
use crate::words::WordsError;

#[test]
fn words_come_with_their_message() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    let source = Source::at(&mut bed, 1);
    source.answer([Answer::Arena; 200]);
    let mut dice = Dice(5);
    // Announcements are lost, and repeated several in a packet.
    bed.wire
        .set_filter(move |_, packet| packet.len() > 1000 || dice.roll(4) > 0);
    let words = |tag: u64| noise(tag, tag as usize % 49);
    let mut received = 0;
    for tag in 0..100 {
        let mut region = loop {
            match bed.hosts[0].loan(peer, 5000) {
                Ok(region) => break region,
                Err(error) => assert_eq!(error, LoanError::WouldBlock),
            }
            bed.round();
        };
        region.set_words(&noise(1, 7)).expect("not too long");
        region.set_words(&words(tag)).expect("not too long");
        assert_eq!(region.set_words(&[0; 49]), Err(WordsError::TooLong { len: 49 }));
        fill(&mut region, &noise(tag, 5000));
        let mut sent: Result<SendToken, _> = {
            let now_ns = bed.now_ns;
            bed.hosts[0].submit(region, tag, now_ns)
        };
        while let Err(error) = sent {
            bed.round();
            let now_ns = bed.now_ns;
            sent = bed.hosts[0].submit(error.region, tag, now_ns);
        }
        while bed.hosts[1].take_message().expect("no failure").is_some() {
            received += 1;
        }
    }
    while received < 100 {
        bed.round();
        received += u32::from(bed.hosts[1].take_message().expect("no failure").is_some());
    }
    for (tag, (_, asked, len, found)) in (0..).zip(&source.desk().asked) {
        assert_eq!((*asked, *len, found), (tag, 5000, &words(tag)));
    }
    assert_eq!(source.asked().len(), 100);
    let mut small = bed.hosts[0].loan(peer, 100).expect("memory");
    assert_eq!(small.set_words(b"op"), Err(WordsError::NotAnnounced));
    let lines = [
        WordsError::TooLong { len: 49 }.to_string(),
        WordsError::NotAnnounced.to_string(),
    ];
    assert!(
        lines
            .iter()
            .all(|line| line.lines().count() == 1 && line.contains(": "))
    );
    for _ in 0..100 {
        bed.completion(0);
    }
}

/// What a hostile sender puts into an announcement is skipped, and an application that names no message is told so.
#[test]
fn words_that_are_too_long_and_numbers_that_nobody_has() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    let source = Source::at(&mut bed, 1);
    let (key, first) = {
        let terms = bed.hosts[0]
            .peers
            .at(peer.index)
            .outbound
            .as_ref()
            .expect("a session")
            .terms;
        (terms.key, terms.first_message)
    };
    let mut addressing = bed.hosts[1].addressing_to(data_address(0), mac_of(*data_address(0).ip()));
    addressing = addressing.reversed();
    let entry = AnnounceEntry {
        len: 5000,
        tag: 1,
        delivery: None,
        windows_released: AnnounceEntry::ALL_WINDOWS,
        has_facts: false,
    };
    source.answer([Answer::Later, Answer::Later, Answer::Refuse(3)]);
    let header = LmHeader::Announce {
        session_key: key,
        first,
        entries: 3,
        sent: 0,
    };
    let mut payload = Vec::new();
    for opaque_len in [48u16, 49, 1300] {
        let at = payload.len();
        payload.extend(entry.encode());
        payload[at + 18..at + 20].copy_from_slice(&opaque_len.to_be_bytes());
        payload.resize(at + 24 + usize::from(opaque_len.next_multiple_of(4)), 0xee);
    }
    bed.wire.inject(1, 0, &lm_packet(&addressing, &header, &payload));
    bed.rounds(20);
    let words: Vec<usize> = source
        .desk()
        .asked
        .iter()
        .map(|(.., words)| words.len())
        .collect();
    assert_eq!(words, [48, 0, 0]);
    // More than there is.
    payload[18..20].fill(0xff);
    bed.wire.inject(1, 0, &lm_packet(&addressing, &header, &payload));
    bed.rounds(20);
    assert_eq!(source.asked().len(), 3);
    assert_eq!(bed.hosts[1].counters.drops.malformed, 1);

    let from = sender(&mut bed);
    let nobody = PeerId {
        generation: from.generation.wrapping_add(1),
        ..from
    };
    for (peer, number) in [
        (from, first.wrapping_sub(1)),
        (from, first.wrapping_add(3)),
        (nobody, first),
    ] {
        assert!(!bed.hosts[1].retry(peer, number));
        assert!(!bed.hosts[1].retract(peer, number));
    }
    // The third is refused, and waits for nobody.
    assert!(!bed.hosts[1].retry(from, first.wrapping_add(2)));
    assert!(!bed.hosts[1].retract(from, first.wrapping_add(2)));
    // Without a landing queue, or a session, there is none either.
    assert!(!bed.hosts[0].retry(peer, 0) && !bed.hosts[0].retract(peer, 0));
    assert!(bed.hosts[1].retract(from, first));
    assert_eq!(source.asked().len(), 3);
}
