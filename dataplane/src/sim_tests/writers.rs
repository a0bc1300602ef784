//! How messages end that are sent while they are written: given up, outlived, contradicted by a stranger.
#![cfg(test)]

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;
use lm_protocol::streaming::WriterError;
use lm_protocol::wire::lm::{AnnounceEntry, LmHeader, MissingRange, TYPE_WINDOWS, WindowsPacket};

use super::audience::{Audience, Read, TAIL, W, WAYS, WINDOW, Way, config, impairments, options};
use super::bed::{Bed, BedConfig, data_address, lm_packet, noise};
use super::streams::{Writing, begin, outcomes};
use super::times;
use crate::Ending;
use crate::completion::{LoanError, Outcome, RecvError};
use crate::connect::ConnectOptions;
use crate::simnic::Impairments;
use crate::writer::MessageWriter;

/// A sender that is gone is not waited for, whatever it had released.
#[test]
fn a_writer_whose_host_is_gone_is_given_up() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
    writing.write_to(2 * W, 1);
    (0..200).for_each(|_| audience.round());
    for _ in 0..40 {
        audience.bed.now_ns += 100_000_000;
        audience.bed.alone(1, 1);
    }
    assert_eq!(audience.bed.hosts[1].counters.messages_stalled, 1);
    assert_eq!(audience.reads[0].incoming.settled(), Some(Ending::SessionEnded));
}

/// Writers give up after each window: both ends are told once, and the next message comes.
#[test]
fn a_message_is_given_up_at_any_window() {
    for way in WAYS {
        for (seed, windows) in (0..times(2, 20)).flat_map(|seed| (0..5).map(move |windows| (seed, windows))) {
            for rounds in [0, 1, 4, 200] {
                for wire in [Impairments::default(), impairments(seed)] {
                    let mut audience = Audience::of(way, Delivery::Reliable);
                    for host in [0, 1] {
                        let seed = seed * 2 + host as u64;
                        audience.bed.wire.impair(host, Impairments { seed, ..wire });
                    }
                    let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
                    audience.payloads.push(noise(6, 40_000));
                    for window in 1..=windows {
                        writing.write_to(window * W - u64::from(window == 5), 1);
                        (0..rounds).for_each(|_| audience.round());
                    }
                    (0..rounds).for_each(|_| audience.round());
                    drop(writing);
                    let mut aborted = Vec::new();
                    for _ in 0..20_000 {
                        audience.bed.now_ns += 20_000;
                        audience.watch();
                        match audience.bed.hosts[1].take_message() {
                            Ok(Some(message)) => audience.messages.push(message),
                            Ok(None) if !audience.messages.is_empty() => break,
                            Ok(None) => {}
                            Err(RecvError::Aborted { number, tag, len, .. }) => {
                                aborted.push((number, tag, len))
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                    let what = format!("{way:?}, {windows} windows, {rounds} rounds, seed {seed}");
                    assert_eq!(aborted, [(0, 0, 5 * W)], "{what}");
                    assert_eq!(
                        (audience.messages[0].tag(), audience.messages[0].number()),
                        (1, 1),
                        "{what}"
                    );
                    assert!(audience.messages[0][..] == audience.payloads[1][..], "{what}");
                    let read = audience.reads.iter().find(|read| read.incoming.tag() == 0);
                    if let Some(read) = read {
                        assert_eq!(read.incoming.settled(), Some(Ending::Aborted), "{what}");
                    }
                    audience.bed.pass(Duration::from_millis(300));
                    let told = outcomes(&mut audience);
                    assert_eq!(told, [(0, Outcome::Aborted), (1, Outcome::Delivered)], "{what}");
                    for host in [0, 1] {
                        audience.bed.wire.impair(host, Impairments::default());
                    }
                    audience.end();
                }
            }
        }
    }
}

/// More than a credit names: their sender knows by itself that they are not to be sent.
#[test]
fn many_messages_are_given_up_at_once() {
    let options = ConnectOptions {
        messages_in_flight: 100,
        ..options(Delivery::Reliable)
    };
    let bed = Bed::new(&BedConfig {
        send_len: 4 << 20,
        ..config(Way::Digests)
    });
    let mut audience = Audience::new(bed, [0, 1], &options);
    let writings: Vec<Writing> = (0..80)
        .map(|seed| begin(&mut audience, noise(seed, 30_000)))
        .collect();
    audience.bed.pass(Duration::from_millis(5));
    // Digests that cannot be told yet are asked for of all of them.
    let peers = &mut audience.bed.hosts[1].peers;
    let from = peers.find(data_address(0)).expect("its sender");
    let addressing = peers.at(from).addressing;
    for number in 0..80 {
        let words = [number, 0, 1];
        let asks = LmHeader::Extension {
            packet_type: TYPE_WINDOWS,
            key: audience.key(),
            words,
        };
        audience
            .bed
            .wire
            .inject(0, 0, &lm_packet(&addressing, &asks, &[]));
        audience.bed.alone(0, 1);
        let peer = audience.bed.hosts[0].peers.at(audience.to.index);
        let asked = peer.outbound.as_ref().expect("a session").messages_to_tell_of();
        assert_eq!(asked, 64.min(number as usize + 1));
    }
    drop(writings);
    let mut aborted = 0;
    for _ in 0..2_000 {
        audience.watch();
        aborted += u64::from(matches!(
            audience.bed.hosts[1].take_message(),
            Err(RecvError::Aborted { .. })
        ));
    }
    assert_eq!(aborted, 80);
    let told = outcomes(&mut audience);
    assert_eq!(told.len(), 80);
    assert!(told.iter().all(|(_, outcome)| *outcome == Outcome::Aborted));
    audience.payloads.push(noise(7, 50_000));
    audience.until("whole", |audience| audience.messages.len() == 1);
    audience.end();
}

/// A sender that announces more messages than it was granted, and sends nothing of them: no more than those arrive.
#[test]
fn messages_that_arrive_at_once_are_as_many_as_were_granted() {
    let options = ConnectOptions {
        messages_in_flight: 8,
        ..options(Delivery::Reliable)
    };
    let mut audience = Audience::new(Bed::new(&config(Way::Digests)), [0, 1], &options);
    audience.payloads.push(noise(1, 2 * W as usize));
    audience.sent = 1;
    for first in 0..100 {
        forge_entry(&mut audience, first, 2 * W, AnnounceEntry::ALL_WINDOWS);
        (0..4).for_each(|_| audience.watch());
        let reads = audience.reads.iter();
        assert!((1..=8).contains(&reads.filter(|read| read.incoming.settled().is_none()).count()));
        assert_eq!(
            audience.drops("announcement_refused"),
            u64::from(first + 1).saturating_sub(8)
        );
    }
    audience.end();
}

/// What is loaned meanwhile is not the memory of a writer whose session is over.
#[test]
fn a_writer_outlives_its_session() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
    writing.write_to(2 * W, 1);
    audience.bed.pass(Duration::from_millis(1));
    assert!(!writing.writer.is_settled());
    audience.end_session();
    audience.bed.pass(Duration::from_millis(30));
    assert!(writing.writer.is_settled());
    assert_eq!(outcomes(&mut audience), [(0, Outcome::SessionEnded)]);
    let ended = audience.bed.hosts[1].take_message();
    assert!(matches!(ended, Err(RecvError::Incomplete { number: 0, .. })));
    let to = (audience.bed.connect(0, &options(Delivery::Reliable))).expect("a session");
    let payload = noise(8, 5 * W as usize);
    let mut region = audience.bed.hosts[0].loan(to, 5 * W).expect("memory");
    super::bed::fill(&mut region, &payload);
    writing.writer.payloads_mut().for_each(|range| range.fill(0xee));
    let error = writing.writer.write_all(&[1]).expect_err("nobody reads it");
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    let now_ns = audience.bed.now_ns;
    audience.bed.hosts[0].submit(region, 1, now_ns).expect("room");
    let message = audience.bed.recv(1);
    assert!(message[..] == payload[..]);
    drop(message);
    audience.bed.completion(0);
    assert_eq!(audience.bed.hosts[0].sending.arena().live(), 1);
    drop(writing);
    audience.reads.clear();
    audience.bed.rounds(3);
    assert_eq!(audience.bed.hosts[0].sending.arena().live(), 0);
    let now_ns = audience.bed.now_ns;
    audience.bed.hosts[0].end_session(to.index, now_ns);
    audience.bed.pass(Duration::from_millis(30));
    audience.bed.check_memory();
}

#[test]
fn a_writer_outlives_its_endpoint() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
    audience.bed.rounds(5);
    drop(audience);
    assert!(writing.writer.is_settled());
    writing.writer.payloads_mut().for_each(|range| range.fill(0xee));
    writing.writer.finish().expect("all counts as written");
    drop(writing);
}

/// A file that ends before the message, one that cannot be read on, and one that has the rest: each window leaves as soon as it is filled.
#[test]
fn files_are_read_into_messages_that_leave_meanwhile() {
    // The kernel fills so much at once.
    let (short, read) = (5 * W + 100, 4 * W - 100);
    let mut payload = noise(5, 20 * W as usize);
    payload[short as usize..][..read as usize].fill(0);
    let file = |bytes: &[u8]| {
        let file = rustix::fs::memfd_create(c"input", rustix::fs::MemfdFlags::CLOEXEC).map(File::from);
        let mut file = file.expect("memory");
        file.write_all(bytes).expect("room");
        file
    };
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let mut writing = begin(&mut audience, payload.clone());
        let reads_to = |audience: &mut Audience, to: u64| {
            let is_read = |read: &Read| read.seen.iter().any(|range| range.contains(&(to - TAIL - 13)));
            audience.until("what is released is read", |audience| {
                audience.reads.iter().any(is_read)
            });
        };
        let writer = &mut writing.writer;
        let begins = file(&[&[0xee; 10], &payload[..short as usize]].concat());
        assert_eq!(writer.read_from(&begins, 10).expect("a file"), short);
        assert_eq!((writer.written(), writer.released()), (short, 5 * W));
        reads_to(&mut audience, 5 * W);
        // It has as many zeros as there are offsets.
        let zeros = File::open("/dev/zero").expect("a device");
        let error = writer
            .read_from(&zeros, i64::MAX as u64 - 6 * W)
            .expect_err("no more offsets");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        assert_eq!((writer.written(), writer.released()), (short + read, 9 * W));
        reads_to(&mut audience, 9 * W);
        assert_eq!(writer.read_from(&file(&payload), 9 * W).expect("a file"), 11 * W);
        assert_eq!((writer.written(), writer.released()), (20 * W, 19 * W));
        reads_to(&mut audience, 19 * W);
        writer.finish().expect("all of it is written");
        audience.until("whole", |audience| !audience.messages.is_empty());
        drop(writing);
        audience.end();
    }
}

#[test]
fn what_no_writer_may_do_is_refused() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let (to, now_ns) = (audience.to, audience.bed.now_ns);
    let host = &mut audience.bed.hosts[0];
    let limit = 1 << 20;
    let refused = |begun: Result<MessageWriter, LoanError>| begun.map(drop).expect_err("refused");
    assert_eq!(refused(host.begin(to, 0, 1, now_ns)), LoanError::Empty);
    assert_eq!(
        refused(host.begin(to, limit + 1, 1, now_ns)),
        LoanError::TooLarge { limit }
    );
    assert_eq!(
        refused(host.begin(to, u64::MAX, 1, now_ns)),
        LoanError::TooLarge { limit }
    );
    let mut writing = begin(&mut audience, noise(5, 3 * W as usize));
    let writer = &mut writing.writer;
    assert_eq!(writer.release(1), Err(WriterError::Written(0)));
    assert_eq!(writer.finish(), Err(WriterError::Written(0)));
    writer
        .write_all(&writing.payload[..W as usize + 10])
        .expect("room");
    assert_eq!((writer.released(), writer.written()), (W, W + 10));
    assert_eq!(writer.release(W - 1), Err(WriterError::Released(W)));
    assert_eq!(writer.release(2 * W), Err(WriterError::Written(W + 10)));
    assert_eq!(
        writer.payloads_mut().map(|range| range.len() as u64).sum::<u64>(),
        2 * W
    );
    assert_eq!(writer.write(&[1]).expect("no error"), 0);
    writing.write_to(3 * W, 1);
    let writer = &mut writing.writer;
    assert_eq!(writer.finish(), Err(WriterError::Ended));
    assert_eq!(writer.release(3 * W), Err(WriterError::Ended));
    assert_eq!(writer.payloads_mut().count(), 0);
    assert_eq!(
        writer.write(&[1]).map_err(|error| error.kind()),
        Err(std::io::ErrorKind::InvalidInput)
    );
    drop(writing);
    audience.until("whole", |audience| !audience.messages.is_empty());
    audience.end();

    let mut bed = Bed::new(&BedConfig::default());
    let to = bed.resolve(0);
    let now_ns = bed.now_ns;
    assert_eq!(
        refused(bed.hosts[0].begin(to, 100_000, 1, now_ns)),
        LoanError::NoSession
    );
    let to = bed.session(0, Wire::IpFrag, 60_000);
    let now_ns = bed.now_ns;
    assert_eq!(
        refused(bed.hosts[0].begin(to, 50_000, 1, now_ns)),
        LoanError::Datagram
    );
}

/// ANNOUNCEs in a sender's name.
#[test]
fn releases_that_no_sender_announces_are_dropped() {
    for way in [Way::Paired, Way::Digests] {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let mut writing = begin(&mut audience, noise(5, 6 * W as usize));
        writing.write_to(3 * W, 1);
        audience.bed.pass(Duration::from_millis(5));
        let announce = |audience: &mut Audience, first: u32, len: u64, windows_released: u32| {
            let before = audience.drops("announcement_refused");
            forge_entry(audience, first, len, windows_released);
            audience.bed.pass(Duration::from_millis(5));
            audience.drops("announcement_refused") - before
        };
        let len = 6 * W;
        // A release taken back is an older word: nothing comes of it.
        assert_eq!(announce(&mut audience, 0, len, 1), 0);
        assert_eq!(announce(&mut audience, 0, len, 0), 0);
        // More windows than there are.
        for absurd in [6, 7, 1 << 20, AnnounceEntry::ABORTED - 1] {
            assert_eq!(announce(&mut audience, 0, len, absurd), 1, "{absurd}");
            assert_eq!(announce(&mut audience, 1, len, absurd), 1, "{absurd}");
        }
        // Of a message that has no windows.
        assert_eq!(announce(&mut audience, 1, 0, 0), 1);
        audience.round();
        assert!(audience.reads[0].seen[0].end <= 3 * W);
        writing.write_to(6 * W, 1);
        audience.until("whole", |audience| !audience.messages.is_empty());
        drop(writing);
        // Given up after it was delivered.
        assert_eq!(announce(&mut audience, 0, len, AnnounceEntry::ABORTED), 1);
        assert_eq!(announce(&mut audience, 0, len, 2), 0);
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(outcomes(&mut audience), [(0, Outcome::Delivered)]);
        audience.end();
    }
}

/// A message is announced in a sender's name.
fn forge_entry(audience: &mut Audience, first: u32, len: u64, windows_released: u32) {
    let entry = AnnounceEntry {
        len,
        tag: 0,
        delivery: None,
        windows_released,
        has_facts: false,
    };
    let header = LmHeader::Announce {
        session_key: audience.key(),
        first,
        entries: 1,
        sent: 0,
    };
    audience.forge(&header, &entry.encode());
}

/// It is said in a sender's name that its first message, of `len` bytes, is given up.
fn forge_abort(audience: &mut Audience, len: u64) {
    forge_entry(audience, 0, len, AnnounceEntry::ABORTED);
}

/// A message of which all is released is not given up any more, whether it was written meanwhile or not.
#[test]
fn a_forged_abort_of_what_is_finished_is_refused() {
    for is_written in [true, false] {
        let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
        let payload = noise(5, 20 * W as usize);
        match is_written {
            true => begin(&mut audience, payload).write_to(20 * W, 1),
            false => audience.payloads.push(payload),
        }
        audience.until("shown", |audience| {
            audience.reads.first().is_some_and(|read| !read.seen.is_empty())
        });
        forge_abort(&mut audience, 20 * W);
        assert!(audience.messages.is_empty(), "it is whole");
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert_eq!(audience.drops("announcement_refused"), 1);
        audience.end();
    }
}

/// A receiver asks for digests of what is not released: that would be read while it is written.
#[test]
fn digests_of_what_is_not_released_are_not_told() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let key = audience.key();
    let mut writing = begin(&mut audience, noise(5, 6 * W as usize));
    writing.write_to(3 * W, 1);
    audience.bed.pass(Duration::from_millis(5));
    let asks = |audience: &mut Audience, first: u32, manifest: bool| {
        let header = LmHeader::Missing {
            session_key: key,
            message: 0,
            ranges: 1,
            manifest,
        };
        let peers = &mut audience.bed.hosts[1].peers;
        let index = peers.find(data_address(0)).expect("its sender");
        let addressing = peers.at(index).addressing;
        let range = MissingRange { first, len: 1 };
        let packet = lm_packet(&addressing, &header, &range.encode());
        audience.bed.wire.inject(0, 0, &packet);
        let sent = audience.bed.hosts[0].counters.data_packets_sent;
        audience.bed.pass(Duration::from_millis(5));
        let drops = audience.bed.hosts[0].counters.drops();
        let refused = drops.into_iter().find(|(name, _)| *name == "implausible");
        let sent = audience.bed.hosts[0].counters.data_packets_sent - sent;
        (refused.map(|(_, count)| count), sent)
    };
    assert_eq!(asks(&mut audience, 0, true), (Some(1), 0));
    assert_eq!(asks(&mut audience, 3 * WINDOW as u32, false), (Some(2), 0));
    writing.write_to(6 * W, 1);
    audience.until("whole", |audience| !audience.messages.is_empty());
    drop(writing);
    audience.end();
}

/// Nor has a sender any of what is not released.
#[test]
fn digests_of_what_is_not_released_are_not_taken() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let key = audience.key();
    let mut writing = begin(&mut audience, noise(5, 6 * W as usize));
    writing.write_to(3 * W, 1);
    audience.bed.pass(Duration::from_millis(5));
    for (first, refused) in [(3, 1), (2, 2), (5, 3)] {
        let mut payload = [0; 16];
        let digests = [5, 5].into_iter();
        let (words, len) = WindowsPacket::write(&mut payload, 0, first, digests).expect("room");
        let header = LmHeader::Extension {
            packet_type: TYPE_WINDOWS,
            key,
            words,
        };
        audience.forge(&header, &payload[..len]);
        audience.round();
        assert_eq!(audience.drops("implausible"), refused, "{first}");
    }
    writing.write_to(6 * W, 1);
    audience.until("whole", |audience| !audience.messages.is_empty());
    assert!(audience.early > 2 * W);
    drop(writing);
    audience.end();
}

/// An abort in a sender's name ends what the sender goes on with; it is told, and what was shown stays.
#[test]
fn a_forged_abort_harms_its_message_alone() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let mut writing = begin(&mut audience, noise(5, 6 * W as usize));
    writing.write_to(3 * W, 1);
    audience.payloads.push(noise(6, 40_000));
    audience.until("shown", |audience| {
        let read = audience.reads.first();
        read.is_some_and(|read| !read.seen.is_empty())
    });
    forge_abort(&mut audience, 6 * W);
    audience.bed.pass(Duration::from_millis(5));
    audience.watch();
    assert_eq!(audience.reads[0].incoming.settled(), Some(Ending::Aborted));
    assert!(matches!(
        audience.bed.hosts[1].take_message(),
        Err(RecvError::Aborted { number: 0, .. })
    ));
    // Its sender hears that its receiver has nothing of it, and goes on with the next one.
    audience.until("whole", |audience| !audience.messages.is_empty());
    assert!(writing.writer.is_settled());
    audience.bed.pass(Duration::from_millis(5));
    let told = outcomes(&mut audience);
    assert!(
        matches!(
            told[..],
            [(0, Outcome::Incomplete { .. }), (1, Outcome::Delivered)]
        ),
        "{told:?}"
    );
    drop(writing);
    audience.end();
}
