//! Sources decide where messages land: in regions, later, or not at all; and take memory back while packets come for it.
#![cfg(test)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;

use super::bed::{BATCHED, Bed, BedConfig, data_address, noise, wire_of};
use super::source::{Answer, Source};
use super::times;
use super::transfer::Dice;
use crate::bounds::ZONES_MAX;
use crate::completion::{LoanError, Outcome, PeerId, RecvError};
use crate::connect::ConnectOptions;
use crate::placing::{Announced, Asked, RETRACTED, Settled};
use crate::simnic::{Impairments, Semantics, ZeroCopy};

const DEVICES: [Semantics; 3] = [
    Semantics::Copy,
    Semantics::ZeroCopy(ZeroCopy {
        prefix_len: 10,
        ..BATCHED
    }),
    // One that wants whole laps of entries.
    Semantics::ZeroCopy(ZeroCopy {
        batch: 1,
        ring_len: 80,
        burst: 32,
        prefix_len: 12,
        pad_to: 0,
        lap: 80,
    }),
];

fn config(semantics: Semantics) -> BedConfig {
    BedConfig {
        landing_len: 4 << 20,
        send_len: 4 << 20,
        wire: wire_of(semantics),
        ..BedConfig::default()
    }
}

fn impairments(seed: u64, ppm: u32) -> Impairments {
    Impairments {
        seed,
        loss_ppm: ppm,
        duplicate_ppm: ppm / 3,
        reorder_ppm: ppm / 3,
        reorder_packets_max: 8,
        reorder_hold_max_ns: 50_000,
        ..Impairments::default()
    }
}

#[test]
fn a_message_lands_in_the_region_that_its_source_gives() {
    for semantics in DEVICES {
        let mut bed = Bed::new(&config(semantics));
        let peer = bed.session(0, WireMode::Lm, 1 << 20);
        let source = Source::at(&mut bed, 1);
        let payload = noise(9, 300_000);
        let mut region = bed.hosts[1]
            .landing_region(payload.len() as u64)
            .expect("a region");
        for _ in 0..3 {
            let range = region.umem_range();
            source.give(region);
            let token = bed.send(0, peer, &payload, 5);
            let message = source.landed(&mut bed);
            assert!(range.contains(&message.umem_offset()));
            assert_eq!((message.tag(), &message[..]), (5, &payload[..]));
            assert_eq!(bed.completion(0).token, token);
            region = message.into_region().expect("it landed");
            assert_eq!(region.umem_range(), range);
        }
        let copied = bed.hosts[1].counters.user_copied_bytes;
        assert!(
            copied <= bed.hosts[1].counters.page_end_fragments * 1448,
            "{copied}"
        );

        // One of a packet asks nobody.
        bed.exchange(0, peer, &payload[..400]);
        assert_eq!(source.asked().len(), 3);

        // One that is too long for its region comes where it is.
        let small = bed.hosts[1].landing_region(100).expect("a region");
        let range = small.umem_range();
        source.give(small);
        bed.send(0, peer, &payload, 7);
        let (placed, how) = source.settled(&mut bed);
        let Settled::Elsewhere(small) = how else {
            panic!("{how:?}");
        };
        assert_eq!((placed.tag, placed.len), (7, 300_000));
        assert_eq!(small.umem_range(), range);
        let message = bed.recv(1);
        assert!(!range.contains(&message.umem_offset()) && message[..] == payload[..]);
        assert_eq!(bed.hosts[1].counters.regions_unfit, 1);
        bed.completion(0);
        assert!(matches!(
            bed.hosts[1].landing_region(1 << 40),
            Err(LoanError::TooLarge { .. })
        ));
        drop((message, region, small));
        bed.check_memory();
        bed.check_clean();
    }
}

/// A message that waits keeps its session in order and alive, for longer than anybody is patient, and others on the queue go on.
#[test]
fn a_message_waits_until_its_source_is_asked_again() {
    for (semantics, ppm) in DEVICES
        .into_iter()
        .flat_map(|device| [(device, 0), (device, 20_000)])
    {
        let mut bed = Bed::switch(&config(semantics), 3);
        let source = Source::at(&mut bed, 0);
        let peer = bed.session(1, WireMode::Lm, 300_000);
        let beside = bed.session(2, WireMode::Lm, 300_000);
        bed.wire.impair(1, impairments(3, ppm));
        for _ in 0..3 {
            let region = bed.hosts[0].landing_region(200_000).expect("a region");
            source.give(region);
        }
        source.answer([Answer::Region, Answer::Later]);
        let payload = |tag: u64| noise(tag, 100_000 + tag as usize);
        for tag in 0..3 {
            bed.send(1, peer, &payload(tag), tag);
        }
        assert_eq!(source.landed(&mut bed)[..], payload(0)[..]);
        let id = bed.hosts[0].peers.find(data_address(1)).expect("a peer");
        let id = bed.hosts[0].peers.id_of(id);
        // Host 2 has the landing queue to itself, as far as it lands there at all.
        source.answer([Answer::Arena; 40]);
        for tag in 10..30 {
            bed.send(2, beside, &payload(tag), tag);
            let message = bed.recv(0);
            assert_eq!((message.tag(), &message[..]), (tag, &payload(tag)[..]));
        }
        bed.pass(Duration::from_secs(8));
        assert_eq!(source.asked()[..3], [0, 1, 2]);
        assert!(
            source.desk().settled.is_empty(),
            "it waits, and what is behind it"
        );
        assert_eq!(bed.hosts[1].counters.messages_failed, 0);
        source.desk().answers.clear();
        // It may wait once more.
        let number = source.desk().asked[1].0;
        source.answer([Answer::Later]);
        assert!(bed.hosts[0].retry(id, number));
        bed.pass(Duration::from_millis(100));
        assert!(source.desk().settled.is_empty());
        assert!(bed.hosts[0].retry(id, number));
        for tag in [1, 2] {
            assert_eq!(source.landed(&mut bed)[..], payload(tag)[..]);
        }
        assert!(!bed.hosts[0].retry(id, number), "it waits no more");
        for host in [1, 2] {
            for _ in 0..if host == 1 { 3 } else { 20 } {
                assert_eq!(bed.completion(host).outcome, Outcome::Delivered);
            }
        }
        source.desk().regions.clear();
        bed.wire.impair(1, Impairments::default());
        bed.check_memory();
    }
}

/// Refused messages cost their session nothing, and each sender hears why, however many control packets are lost.
#[test]
fn what_is_refused_ends_with_its_status_and_later_messages_go_on() {
    let deliveries = [Delivery::Reliable, Delivery::Partial, Delivery::Unreliable];
    for (semantics, delivery) in DEVICES
        .into_iter()
        .flat_map(|device| deliveries.map(|delivery| (device, delivery)))
    {
        for ppm in [0, 10_000] {
            let mut bed = Bed::new(&config(semantics));
            let options = ConnectOptions {
                delivery,
                max_message_len: 300_000,
                messages_in_flight: 8,
                ..ConnectOptions::default()
            };
            let peer = bed.connect(0, &options).expect("a session");
            let source = Source::at(&mut bed, 1);
            bed.wire.impair(0, impairments(7, ppm));
            let mut dice = Dice(11);
            if ppm > 0 {
                // Of what is no fragment every tenth packet is lost.
                bed.wire
                    .set_filter(move |_, packet| packet.len() > 1000 || dice.roll(10) > 0);
            }
            let status = |tag: u64| (!tag.is_multiple_of(3)).then_some((tag % 5 * 10_000) as u16);
            source.answer((0..60).map(|tag| status(tag).map_or(Answer::Arena, Answer::Refuse)));
            let mut outcomes = BTreeMap::new();
            for tag in 0..60 {
                bed.send(0, peer, &noise(tag, 20_000 + 4_000 * tag as usize), tag);
                while let Ok(Some(message)) = bed.hosts[1].take_message() {
                    assert_eq!(status(message.tag()), None);
                    assert!(
                        !message.missing().is_empty()
                            || message[..] == noise(message.tag(), message.len())[..]
                    );
                }
                note(&mut bed, &mut outcomes);
            }
            while outcomes.len() < 60 {
                bed.now_ns += 20_000;
                bed.round();
                let _ = bed.hosts[1].take_message();
                note(&mut bed, &mut outcomes);
            }
            for (tag, outcome) in outcomes {
                match status(tag) {
                    Some(status) => assert_eq!(outcome, Outcome::Declined { status }, "{tag}"),
                    None if ppm == 0 || delivery == Delivery::Reliable => {
                        assert_eq!(outcome, Outcome::Delivered)
                    }
                    None => assert!(matches!(outcome, Outcome::Delivered | Outcome::Incomplete { .. })),
                }
            }
            assert_eq!(source.asked(), Vec::from_iter(0..60));
            assert_eq!(bed.hosts[0].counters.drops.implausible, 0);
            bed.wire.impair(0, Impairments::default());
            bed.wire.set_filter(|_, _| true);
            while !matches!(bed.hosts[1].take_message(), Ok(None)) {}
            // Entries may be left of messages that were given up.
            let now_ns = bed.now_ns;
            bed.hosts[0].end_session(peer.index, now_ns);
            bed.check_memory();
        }
    }
}

/// As many as may be under way are refused while their sender hears nothing, and it hears of all of them afterwards. Only of more statuses
/// than a packet names are some left out.
#[test]
fn all_that_is_under_way_is_refused_and_heard_late() {
    for (mtu, count, statuses, told_least) in [
        (1500, 256, 1, 256),
        (1500, 256, 60, 256),
        (1500, 256, 256, 60),
        (576, 120, 6, 120),
        (576, 120, 120, 6),
    ] {
        let mut bed = Bed::new(&BedConfig {
            mtu,
            ..config(Semantics::Copy)
        });
        let options = ConnectOptions {
            max_message_len: 4000,
            messages_in_flight: 256,
            ..ConnectOptions::default()
        };
        let peer = bed.connect(0, &options).expect("a session");
        let source = Source::at(&mut bed, 1);
        let status = |tag: u64| (tag % statuses) as u16;
        source.answer((0..count).map(|tag| Answer::Refuse(status(tag))));
        bed.wire.set_filter(|from, _| from == 0);
        for tag in 0..count {
            bed.send(0, peer, &noise(tag, 4000), tag);
        }
        for _ in 0..200 {
            bed.round();
        }
        assert_eq!(source.asked().len(), count as usize);
        bed.wire.set_filter(|_, _| true);
        let mut outcomes = BTreeMap::new();
        while outcomes.len() < count as usize {
            bed.now_ns += 20_000;
            bed.round();
            note(&mut bed, &mut outcomes);
        }
        let mut told = 0;
        for (tag, outcome) in outcomes {
            match outcome {
                Outcome::Declined { status: named } if named == status(tag) => told += 1,
                outcome => assert!(
                    matches!(outcome, Outcome::Incomplete { .. }),
                    "{tag}: {outcome:?}"
                ),
            }
        }
        assert!(told >= told_least, "{mtu}, {statuses}: {told}");
        bed.check_memory();
    }
}

fn note(bed: &mut Bed, outcomes: &mut BTreeMap<u64, Outcome>) {
    while let Some(completion) = bed.hosts[0].told.completions().pop_front() {
        outcomes.insert(completion.tag, completion.outcome);
    }
}

/// A message of more packets than any ring has is refused like others: what its sender may send is far ahead then.
#[test]
fn the_longest_messages_are_refused_like_others() {
    const LEN: u64 = 100 << 20;
    let mut bed = Bed::new(&BedConfig {
        guarded: false,
        landing_len: LEN + (8 << 20),
        send_len: 2 * LEN,
        max_message_len: LEN,
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, LEN);
    let source = Source::at(&mut bed, 1);
    source.answer([Answer::Refuse(7), Answer::Arena, Answer::Refuse(8), Answer::Arena]);
    for tag in 0..2 {
        let region = bed.hosts[0].loan(peer, LEN).expect("memory");
        let now_ns = bed.now_ns;
        bed.hosts[0].submit(region, tag, now_ns).expect("room");
        bed.send(0, peer, &noise(tag, 5000), 10 + tag);
        assert_eq!(bed.recv(1)[..], noise(tag, 5000)[..]);
        let outcome = bed.completion(0).outcome;
        let status = 7 + tag as u16;
        assert_eq!(outcome, Outcome::Declined { status });
        assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    }
    assert_eq!(bed.hosts[0].counters.data_packets_sent, 8);
    bed.check_memory();
    assert!(bed.hosts[0].counters.drops().all(|(_, count)| count == 0));
}

/// What becomes of messages whose memory is taken back at any time, over a wire that loses, repeats and overtakes: each is settled once, its
/// sender knows how, and nobody writes to what was given back (the bed's guards are over it).
#[test]
fn memory_is_taken_back_while_packets_come_for_it() {
    let mut retracted = 0;
    for seed in 0..times(20, 200) {
        for semantics in DEVICES {
            retracted += retract_some(seed, semantics);
        }
    }
    assert!(retracted > 40, "{retracted}");
}

fn retract_some(seed: u64, semantics: Semantics) -> u64 {
    let mut dice = Dice(seed * 2 + 1);
    let delivery = [
        Delivery::Reliable,
        Delivery::Reliable,
        Delivery::Partial,
        Delivery::Unreliable,
    ];
    let delivery = delivery[dice.roll(4) as usize];
    let mut bed = Bed::new(&BedConfig {
        window: [4, 64, 256][dice.roll(3) as usize],
        ..config(semantics)
    });
    let options = ConnectOptions {
        delivery,
        max_message_len: 300_000,
        messages_in_flight: 4,
        one_copy: dice.roll(8) == 0,
        ..ConnectOptions::default()
    };
    let peer = bed.connect(0, &options).expect("a session");
    let source = Source::at(&mut bed, 1);
    bed.wire
        .impair(0, impairments(seed, [0, 10_000, 60_000][dice.roll(3) as usize]));
    let from = sender(&mut bed);
    const COUNT: u64 = 12;
    let (mut outcomes, mut ends, mut elsewhere) = (BTreeMap::new(), BTreeMap::new(), 0);
    let mut tag = 0;
    let mut taken_back = Vec::new();
    let len = |tag: u64| 3_000 + (tag as usize * 37_777 + seed as usize * 1_111) % 290_000;
    for round in 0.. {
        assert!(round < 400_000, "{seed}: {outcomes:?} {ends:?}");
        if tag < COUNT
            && source.desk().regions.is_empty()
            && let Ok(region) = bed.hosts[1].landing_region(300_000)
        {
            source.give(region);
        }
        let is_next = source.desk().regions.len() == 1 && source.asked().len() as u64 == tag;
        if tag < COUNT && is_next && bed.try_send(0, peer, &noise(tag, len(tag)), tag).is_ok() {
            tag += 1;
        }
        let number = source.desk().asked.last().map(|(number, ..)| *number);
        if let Some(number) = number.filter(|_| dice.roll(60) == 0) {
            let number = number.wrapping_sub(dice.roll(3) as u32);
            if bed.hosts[1].retract(from, number) {
                assert!(!bed.hosts[1].retract(from, number), "once");
                taken_back.push(number);
            }
        }
        bed.now_ns += dice.roll(3) * 10_000;
        bed.round();
        note(&mut bed, &mut outcomes);
        match bed.hosts[1].take_message() {
            Ok(Some(message)) => assert!(is_as_sent(&message, len)),
            Ok(None) | Err(RecvError::Incomplete { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        while let Some((placed, how)) = { source.desk().settled.pop_front() } {
            let end = match how {
                Settled::Landed(message) => {
                    assert!(is_as_sent(&message, len), "{seed}");
                    "landed"
                }
                // The region goes back to the arena here, and is guarded.
                Settled::Retracted(_) => "retracted",
                Settled::GivenUp(_) => "given up",
                Settled::Elsewhere(_) => {
                    elsewhere += 1;
                    "elsewhere"
                }
            };
            assert_eq!(
                ends.insert(placed.tag, (placed.number, end)),
                None,
                "{seed}: twice"
            );
        }
        if outcomes.len() as u64 == COUNT && ends.len() as u64 == COUNT {
            break;
        }
    }
    assert!(elsewhere == 0 || delivery == Delivery::Partial);
    for (tag, (number, end)) in ends {
        let outcome = &outcomes[&tag];
        let is_retracted = taken_back.contains(&number);
        assert_eq!(is_retracted, end == "retracted", "{seed}: {tag}");
        match end {
            "retracted" => assert_eq!(*outcome, Outcome::Declined { status: RETRACTED }, "{seed}"),
            _ if delivery == Delivery::Reliable => assert_eq!(*outcome, Outcome::Delivered, "{seed}"),
            _ => assert!(
                matches!(outcome, Outcome::Delivered | Outcome::Incomplete { .. }),
                "{seed}"
            ),
        }
    }
    source.desk().regions.clear();
    // What was sent before its sender heard is still on the way, and more comes. Of what is not sent again it may take the entries.
    bed.wire.impair(0, Impairments::default());
    source.answer([Answer::Arena; 4]);
    for tag in (0..4).filter(|_| delivery == Delivery::Reliable) {
        bed.send(0, peer, &noise(tag, len(tag)), tag);
        assert!(is_as_sent(&bed.recv(1), len));
        assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    }
    assert_eq!(bed.hosts[1].counters.violations.total(), 0, "{seed}");
    assert_eq!(bed.hosts[0].counters.drops.implausible, 0, "{seed}");
    // Entries may be left.
    let now_ns = bed.now_ns;
    bed.hosts[0].end_session(peer.index, now_ns);
    bed.check_memory();
    taken_back.len() as u64
}

fn is_as_sent(message: &crate::message::Message, len: impl Fn(u64) -> usize) -> bool {
    let mut payload = noise(message.tag(), len(message.tag()));
    for range in message.missing() {
        payload[range.start as usize..range.end as usize].fill(0);
    }
    message[..] == payload[..]
}

/// Nothing comes that would use up what is posted for a message that was taken back: the channel is built anew, and the region comes back.
#[test]
fn a_region_comes_back_although_nothing_comes_any_more() {
    for semantics in DEVICES {
        let mut bed = Bed::new(&config(semantics));
        let peer = bed.session(0, WireMode::Lm, 1 << 20);
        let source = Source::at(&mut bed, 1);
        let region = bed.hosts[1].landing_region(1 << 20).expect("a region");
        let range = region.umem_range();
        source.give(region);
        // No fragment arrives.
        bed.wire
            .set_filter(|from, packet| from != 0 || packet.len() < 1000);
        let token = bed.send(0, peer, &noise(1, 1 << 20), 1);
        while bed.hosts[0].counters.data_packets_sent < 50 {
            bed.round();
        }
        let (number, ..) = source.desk().asked[0];
        let from = sender(&mut bed);
        assert!(bed.hosts[1].retract(from, number));
        let (_, how) = source.settled(&mut bed);
        assert!(
            matches!(&how, Settled::Retracted(region) if region.umem_range() == range),
            "{how:?}"
        );
        assert_eq!(bed.hosts[1].counters.landing_rebuilt, 1);
        let completion = bed.completion(0);
        let declined = Outcome::Declined { status: RETRACTED };
        assert_eq!((completion.token, completion.outcome), (token, declined));
        drop(how);
        bed.wire.set_filter(|_, _| true);
        source.answer([Answer::Arena]);
        bed.exchange(0, peer, &noise(2, 500_000));
        assert_eq!(bed.hosts[1].counters.violations.total(), 0);
        bed.check_memory();
    }
}

#[test]
fn a_session_ends_while_its_messages_wait() {
    for semantics in DEVICES {
        for ends_at_sender in [true, false] {
            let mut bed = Bed::new(&config(semantics));
            let peer = bed.session(0, WireMode::Lm, 1 << 20);
            let source = Source::at(&mut bed, 1);
            for _ in 0..2 {
                let region = bed.hosts[1].landing_region(200_000).expect("a region");
                source.give(region);
            }
            // The first is under way when the session ends, the third has a region and waits behind the second.
            source.answer([Answer::Region, Answer::Later, Answer::Region]);
            bed.wire
                .set_filter(|from, packet| from != 0 || packet.len() < 1000);
            for tag in 0..3 {
                bed.send(0, peer, &noise(tag, 100_000), tag);
            }
            bed.rounds(100);
            assert_eq!(source.asked(), [0, 1, 2]);
            let (number, ..) = source.desk().asked[1];
            let from = sender(&mut bed);
            match ends_at_sender {
                true => {
                    let now_ns = bed.now_ns;
                    bed.hosts[0].end_session(peer.index, now_ns);
                }
                false => {
                    bed.hosts[0].peers.at(peer.index).options = None;
                    let now_ns = bed.now_ns;
                    bed.hosts[1].close_to_requests(now_ns);
                }
            }
            let mut ended: Vec<u64> = (0..2)
                .map(|_| match source.settled(&mut bed) {
                    (placed, Settled::GivenUp(_)) => placed.tag,
                    other => panic!("{other:?}"),
                })
                .collect();
            ended.sort_unstable();
            assert_eq!(ended, [0, 2]);
            assert!(!bed.hosts[1].retry(from, number) && !bed.hosts[1].retract(from, number));
            for _ in 0..3 {
                assert_eq!(bed.completion(0).outcome, Outcome::SessionEnded);
                let incomplete = bed.hosts[1].take_message();
                assert!(
                    matches!(incomplete, Err(RecvError::Incomplete { .. })),
                    "{incomplete:?}"
                );
            }
            bed.wire.set_filter(|_, _| true);
            bed.check_memory();
        }
    }
}

/// Another source decides from now on, or nobody: what waited is asked for again, and regions that are in use are the arena's.
#[test]
fn sources_follow_one_another() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    let payload = |tag: u64| noise(tag, 50_000);
    let first = Source::at(&mut bed, 1);
    first.answer([Answer::Later, Answer::Later]);
    for tag in 0..2 {
        bed.send(0, peer, &payload(tag), tag);
    }
    bed.rounds(100);
    let second = Source::new();
    for _ in 0..2 {
        let region = bed.hosts[1].landing_region(50_000).expect("a region");
        second.give(region);
    }
    bed.hosts[1].place_by(Some(Box::new(second.clone())));
    assert_eq!((first.asked(), second.asked()), (vec![0, 1], vec![0, 1]));
    let from = sender(&mut bed);
    assert!(
        !bed.hosts[1].retry(from, second.desk().asked[0].0),
        "it waits no more"
    );
    assert_eq!(Arc::strong_count(&first.0), 1, "the first one is gone");
    assert_eq!(second.landed(&mut bed)[..], payload(0)[..]);
    assert_eq!(second.landed(&mut bed)[..], payload(1)[..]);

    let region = bed.hosts[1].landing_region(50_000).expect("a region");
    let range = region.umem_range();
    second.give(region);
    second.answer([Answer::Region, Answer::Later]);
    for tag in 2..4 {
        bed.send(0, peer, &payload(tag), tag);
    }
    while second.asked().len() < 4 {
        bed.round();
    }
    bed.hosts[1].place_by(None);
    for tag in 2..4 {
        let message = bed.recv(1);
        assert_eq!((message.tag(), &message[..]), (tag, &payload(tag)[..]));
        assert_eq!(range.contains(&message.umem_offset()), tag == 2);
    }
    for _ in 0..4 {
        assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    }
    bed.check_memory();
    bed.check_clean();
}

/// A region is a zone of the arena, and a message takes the one that it has from its source.
#[test]
fn messages_have_no_more_regions_than_there_are_zones() {
    let mut bed = Bed::new(&BedConfig {
        landing_len: 64 << 20,
        guarded: false,
        ..BedConfig::default()
    });
    let source = Source::at(&mut bed, 1);
    source.keep_nothing();
    while let Ok(region) = bed.hosts[1].landing_region(1000) {
        source.give(region);
    }
    let landing = bed.hosts[1].landing.as_mut().expect("a landing queue");
    let placing = landing.placing.as_mut().expect("a source");
    let announced = Announced {
        peer: PeerId::default(),
        number: 0,
        tag: 0,
        len: 1000,
        words: &[],
    };
    let asked = (0..2 * ZONES_MAX).map(|_| placing.place(&announced, (1000, u64::MAX), &landing.arena));
    assert_eq!(asked.filter(|asked| *asked != Asked::Arena).count(), ZONES_MAX);
    assert_eq!(placing.placed(), ZONES_MAX);
}

/// Host 0, as host 1 knows it.
pub(super) fn sender(bed: &mut Bed) -> PeerId {
    let from = bed.hosts[1].peers.find(data_address(0)).expect("a peer");
    bed.hosts[1].peers.id_of(from)
}
