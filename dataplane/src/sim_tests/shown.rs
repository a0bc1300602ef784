//! What was shown of a message stays, however the message ends, and whoever forges packets.
#![cfg(test)]

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::manifest::{Manifest, fragment_digest, message_digest};
use lm_protocol::wire::lm::{
    LmHeader, MessageDigest, TYPE_ANNOUNCE, TYPE_DATA, TYPE_MANIFEST, TYPE_WINDOWS, WindowsPacket,
};

use super::audience::{Audience, P, Read, TAIL, W, WAYS, WINDOW, Way, config, options, payloads};
use super::bed::{Bed, BedConfig, IPS, data_address, lm_packet, noise};
use super::integrity::{has_message_digests, index_of, kind};
use crate::Ending;
use crate::connect::ConnectOptions;
use crate::message::LandingRegion;
use crate::placing::{Announced, Placed, Placement, Settled, ZoneSource};
use crate::simnic::mac_of;

/// Loses a fragment of the first message once.
fn lose(bed: &Bed, index: u32) {
    let mut is_first = true;
    bed.wire.set_filter(move |from, packet| {
        let is_it = from == 0 && kind(packet) == Some(TYPE_DATA) && index_of(packet) == index;
        !(is_it && std::mem::take(&mut is_first))
    });
}

/// An entry is left behind a loss. A message of which something is shown waits for a new channel; one of which nothing is shown is copied out,
/// and is read where it is then.
#[test]
fn what_is_shown_is_never_moved() {
    for way in WAYS {
        for (windows, lets_go) in [(5, false), (5, true), (1, false)] {
            let is_moved = windows == 1 || lets_go;
            let mut audience = Audience::of(way, Delivery::Reliable);
            lose(&audience.bed, ((windows - 1) * WINDOW + 5) as u32);
            audience.payloads = payloads(1, |_| windows * W);
            let mut first = None;
            if lets_go {
                audience.until("some of it", |audience| {
                    audience.reads.first().is_some_and(|read| !read.seen.is_empty())
                });
                audience.reads.clear();
            }
            audience.until("whole", |audience| {
                if let Some(read) = audience.reads.first().filter(|read| !read.seen.is_empty()) {
                    let bytes = read.incoming.bytes(read.seen[0].clone()).expect("shown");
                    assert_eq!(*first.get_or_insert(bytes.as_ptr()), bytes.as_ptr());
                }
                !audience.messages.is_empty()
            });
            if let Some(read) = audience.reads.first() {
                let all = read.incoming.bytes(0..windows * W).expect("whole");
                assert_eq!(all.as_ptr(), audience.messages[0].as_ptr());
            }
            let counters = audience.bed.hosts[1].counters;
            assert_eq!(counters.messages_copied_out, u64::from(is_moved), "{way:?}");
            assert_eq!(counters.landing_rebuilt > 0, !is_moved, "{way:?}");
            // Its memory is nobody else's while it is read.
            audience.messages.clear();
            audience.sent = 0;
            audience.payloads = payloads(8, |_| 5 * W);
            audience.until("others", |audience| audience.messages.len() == 8);
            audience.end();
        }
    }
}

/// What was shown stays when the message is given up, or comes without something.
#[test]
fn messages_that_stay_incomplete_are_read_as_far_as_they_were_shown() {
    for way in WAYS {
        let windows = [2, 4].into_iter();
        let cases = windows.flat_map(|window| [Delivery::Unreliable, Delivery::Partial].map(|d| (window, d)));
        for (window, delivery) in cases {
            // Behind a loss in the last one an entry is left.
            let lost = window * WINDOW as u32 + 2;
            let mut audience = Audience::of(way, delivery);
            lose(&audience.bed, lost);
            audience.payloads = payloads(2, |_| 5 * W);
            audience.until("settled", |audience| {
                audience.messages.len() as u64 + audience.failures == 2
            });
            let read = &audience.reads[0];
            assert_eq!(
                read.incoming.settled(),
                Some(Ending::Incomplete),
                "{way:?} {delivery:?}"
            );
            assert_eq!(read.seen[0], 0..u64::from(window) * W, "{way:?} {delivery:?}");
            let lost = u64::from(lost) * P;
            assert!(read.incoming.bytes(lost..lost + 1).is_err());
            if delivery == Delivery::Partial {
                assert_eq!(audience.failures, 0);
                let message = &audience.messages[0];
                assert_eq!(message.missing(), std::slice::from_ref(&(lost..lost + P)));
                assert_eq!(
                    read.incoming.bytes(0..1).expect("shown").as_ptr(),
                    message.as_ptr()
                );
                assert_eq!(audience.bed.hosts[1].counters.messages_copied_out, 0);
            } else {
                assert_eq!(audience.failures, 1);
            }
            // Its memory is nobody else's while it is read.
            audience.messages.clear();
            audience.sent = 0;
            audience.payloads = payloads(12, |_| 5 * W);
            audience.until("others", |audience| audience.messages.len() == 12);
            audience.reads[0].check();
            audience.end();
        }
    }
}

/// All that a sender has credit for is lost: the message ends there, on a new channel, without what was never sent.
#[test]
fn a_message_of_which_the_rest_is_lost_ends_where_it_is_read() {
    for way in WAYS {
        let config = BedConfig {
            on_the_way: 32,
            ..config(way)
        };
        let mut audience = Audience::new(Bed::new(&config), [0, 1], &options(Delivery::Partial));
        audience.bed.wire.set_filter(|from, packet| {
            from != 0 || kind(packet) != Some(TYPE_DATA) || index_of(packet) < 3 * WINDOW as u32
        });
        audience.payloads = payloads(1, |_| 10 * W);
        audience.until("settled", |audience| !audience.messages.is_empty());
        let message = &audience.messages[0];
        assert_eq!(
            message.missing(),
            std::slice::from_ref(&(3 * W..10 * W)),
            "{way:?}"
        );
        let read = &audience.reads[0];
        assert_eq!(read.incoming.settled(), Some(Ending::Incomplete));
        assert!(
            read.seen[0].start == 0 && read.seen[0].end >= 3 * W - TAIL - 12,
            "{:?}",
            read.seen
        );
        assert_eq!(
            read.incoming.bytes(0..1).expect("shown").as_ptr(),
            message.as_ptr()
        );
        let rebuilt = audience.bed.hosts[1].counters.landing_rebuilt;
        assert!((1..4).contains(&rebuilt), "{way:?}: {rebuilt}");
        audience.end();
    }
}

#[test]
fn a_session_that_ends_leaves_what_was_shown() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        audience.payloads = payloads(3, |_| 10 * W);
        audience.until("half of one", |audience| {
            audience
                .reads
                .first()
                .is_some_and(|read| read.seen.iter().any(|range| range.end > 4 * W))
        });
        audience.end_session();
        audience.until("settled", |audience| {
            audience
                .reads
                .iter()
                .all(|read| read.incoming.settled().is_some())
        });
        assert_eq!(audience.reads[0].incoming.settled(), Some(Ending::SessionEnded));
        audience.bed.pass(Duration::from_millis(50));
        audience.reads[0].check();
        while audience.bed.hosts[1].take_message().is_err() {}
        audience.end();
    }
}

/// Gives a region for the next message, and lets it go when it was not for that.
struct Once(Option<LandingRegion>);

impl ZoneSource for Once {
    fn place(&mut self, _: &Announced<'_>) -> Placement {
        self.0.take().map_or(Placement::Arena, Placement::Land)
    }

    fn settled(&mut self, _: &Placed, how: Settled) {
        assert!(matches!(how, Settled::Elsewhere(_)), "it is read: {how:?}");
    }
}

/// Whoever is dropped last gives the memory back, and one that nobody asked for is gone with its message.
#[test]
fn readings_are_let_go_before_and_after_their_messages() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let live = |audience: &Audience| {
            let landing = audience.bed.hosts[1].landing.as_ref().expect("it lands");
            (landing.arena.live(), landing.watching.begun.len())
        };
        // While it arrives.
        audience.payloads = payloads(1, |_| 6 * W);
        audience.until("a window", |audience| {
            audience.reads.first().is_some_and(|read| !read.seen.is_empty())
        });
        audience.reads.clear();
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert!(audience.reads.is_empty(), "it is told of once");
        let dropped = |audience: &Audience| audience.bed.hosts[1].counters.incoming_dropped;
        assert_eq!(dropped(&audience), 1, "{way:?}");
        audience.messages.clear();
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience), (0, 0), "{way:?}");
        // After the message, and its region is no other's meanwhile.
        audience.sent = 0;
        audience.payloads = payloads(2, |_| 6 * W);
        audience.until("whole", |audience| audience.messages.len() == 1);
        let message = audience.messages.remove(0);
        let region = message.into_region().expect("a zone");
        audience.bed.hosts[1].place_by(Some(Box::new(Once(Some(region)))));
        audience.bed.pass(Duration::from_millis(5));
        audience.until("the next", |audience| !audience.messages.is_empty());
        audience.reads[0].check();
        audience.bed.hosts[1].place_by(None);
        audience.messages.clear();
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience).0, audience.reads.len(), "{way:?}");
        audience.reads.clear();
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience), (0, 0), "{way:?}");
        // Nobody asks for it.
        audience.bed.send(0, audience.to, &noise(3, 6 * W as usize), 0);
        drop(audience.bed.recv(1));
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(live(&audience), (0, 0), "{way:?}");
        assert_eq!(dropped(&audience), 1, "the others had ended: {way:?}");
        audience.end();
    }
}

/// WINDOWS packets of honest senders are lost, others come in their stead.
#[test]
fn forged_digests_show_nothing() {
    for way in [Way::Digests, Way::ZeroCopy] {
        // Slow enough for questions and answers while a message is on its way.
        let options = ConnectOptions {
            rate: NonZeroU64::new(300_000_000),
            ..options(Delivery::Reliable)
        };
        let mut audience = Audience::new(Bed::new(&config(way)), [0, 1], &options);
        let key = audience.key();
        let lets_through = Arc::new(AtomicBool::new(false));
        let letting = Arc::clone(&lets_through);
        audience.bed.wire.set_filter(move |_, packet| {
            kind(packet) != Some(TYPE_WINDOWS) || letting.load(Ordering::Relaxed)
        });
        audience.payloads = payloads(2, |_| 20 * W);
        audience.until("begun", |audience| !audience.reads.is_empty());
        let number = audience.reads[0].incoming.number();
        let mut payload = [0; 800];
        let (words, len) = WindowsPacket::write(&mut payload, number, 0, [5; 20].into_iter()).expect("room");
        let others = [6; 160];
        // Another key, counts that are not those of the payload, other windows than there are, digests that contradict those before; two are
        // taken.
        let forged = [
            (key ^ 1, words, &payload[..len]),
            (key, [number + 1000, 0, 20], &payload[..len]),
            (key, [number, u32::MAX - 10, 20], &payload[..len]),
            (key, [number, 0, u32::MAX], &payload[..len]),
            (key, [number, 0, 0], &payload[..len]),
            (key, [number, 0, 21], &payload[..len]),
            (key, words, &payload[..len - 1]),
            (key, [number, 1, 20], &payload[..len]),
            (key, words, &payload[..len]),
            (key, words, &others),
            (key, words, &payload[..len]),
        ];
        for (key, words, payload) in forged {
            audience.forge(&windows(key, words), payload);
        }
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert_eq!(audience.early, 0, "{way:?}");
        let dropped = ["corrupt", "unexpected", "malformed", "implausible"];
        assert_eq!(dropped.map(|name| audience.drops(name)), [0, 2, 5, 2], "{way:?}");
        // What comes too late is not looked at, and the next message's are believed again.
        audience.forge(&windows(key, words), &payload[..len]);
        audience.messages.clear();
        audience.until("the second", |audience| audience.reads.len() == 2);
        let number = audience.reads[1].incoming.number();
        audience.forge(&windows(key, [number, 0, 20]), &payload[..len]);
        audience.round();
        lets_through.store(true, Ordering::Relaxed);
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert!(audience.early > 0, "{way:?}");
        audience.end();
    }
}

/// Requests for digests that no honest receiver sends.
#[test]
fn forged_requests_for_digests_are_refused() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let key = audience.key();
    audience.payloads = payloads(1, |_| 20 * W);
    audience.until("begun", |audience| !audience.reads.is_empty());
    let number = audience.reads[0].incoming.number();
    let index = { &mut audience.bed.hosts[1].peers }
        .find(data_address(0))
        .expect("known");
    let addressing = audience.bed.hosts[1].peers.at(index).addressing;
    let forged = [
        (key ^ 1, [number, 0, 20]),
        (key, [number, 0, 0]),
        (key, [number, 0, 21]),
        (key, [number, 20, 1]),
        (key, [number, u32::MAX, u32::MAX]),
        (key, [number + 1, 0, 1]),
        (key, [number.wrapping_sub(1), 0, u32::MAX]),
    ];
    for (key, words) in forged {
        let packet = lm_packet(&addressing, &windows(key, words), &[]);
        audience.bed.wire.inject(0, 0, &packet);
    }
    audience.until("whole", |audience| !audience.messages.is_empty());
    let drops = audience.bed.hosts[0].counters.drops();
    let refused: Vec<_> = drops.into_iter().filter(|(_, count)| *count > 0).collect();
    assert_eq!(
        refused.iter().map(|(_, count)| count).sum::<u64>(),
        6,
        "{refused:?}"
    );
    assert!(audience.early > 0);
    audience.end();
}

/// A sender whose windows agree, and whose message is to have other bytes: what was shown stays, and the message is given up.
#[test]
fn what_is_shown_stays_when_its_sender_contradicts_itself() {
    // In zero-copy mode a manifest says where what is missing may be, too.
    for (way, loses) in [
        (Way::Digests, false),
        (Way::ZeroCopy, false),
        (Way::ZeroCopy, true),
    ] {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let key = audience.key();
        audience
            .bed
            .wire
            .set_filter(move |from, packet| match (from, kind(packet)) {
                (0, Some(TYPE_MANIFEST)) => false,
                (0, Some(TYPE_ANNOUNCE)) => !has_message_digests(packet),
                (0, Some(TYPE_DATA)) => !(loses && index_of(packet) == 4 * WINDOW as u32 + 1),
                _ => true,
            });
        audience.payloads = payloads(1, |_| 5 * W);
        audience.until("some", |audience| {
            let shows = |read: &Read| read.seen.iter().any(|range| range.end >= 3 * W);
            audience.reads.first().is_some_and(shows)
        });
        audience.bed.pass(Duration::from_millis(10));
        let number = audience.reads[0].incoming.number();
        let fragments = audience.payloads[0].chunks(P as usize);
        let mut digests: Vec<u64> = fragments.map(|bytes| fragment_digest(key, bytes)).collect();
        digests[5] ^= 1;
        let manifest = Manifest::new(key, number, &digests, 5 * W, 0);
        let mut packets = Vec::new();
        for packet in manifest.packets(1400) {
            let mut payload = vec![0; packet.payload_len()];
            packet.write_payload(&mut payload);
            packets.push((packet.header, payload));
        }
        let digest = message_digest(key, number, &digests, 5 * W, 0);
        let announce = LmHeader::Announce {
            session_key: key,
            first: number + 1,
            entries: 0,
            sent: 5 * WINDOW as u32,
        };
        let digest = MessageDigest {
            message: number,
            digest,
        };
        audience.forge(&announce, &digest.encode());
        // How much was sent is believed after some milliseconds.
        for _ in 0..300 {
            audience.bed.now_ns += 100_000;
            audience.round();
            for (header, payload) in &packets {
                audience.forge(header, payload);
            }
        }
        assert_eq!(audience.failures, 1, "{way:?} {loses}");
        assert_eq!(audience.reads[0].incoming.settled(), Some(Ending::Incomplete));
        assert_eq!(audience.drops("manifest_contradictory"), 1);
        audience.end();
    }
}

/// What was shown stays where it is, for as long as somebody reads it, and nobody waits for more.
#[test]
fn what_is_shown_outlives_its_endpoint() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        audience.payloads = payloads(1, |_| 10 * W);
        audience.until("half of it", |audience| {
            let is_half = |read: &Read| read.seen.iter().any(|range| range.end > 4 * W);
            audience.reads.iter().any(is_half)
        });
        let Audience { bed, mut reads, .. } = audience;
        drop(bed);
        let read = &mut reads[0];
        assert!(read.check() > 3 * W, "{way:?}: {:?}", read.seen);
        assert_eq!(read.incoming.settled(), Some(Ending::SessionEnded));
        assert_eq!(read.incoming.wait(10 * W, Duration::MAX), 10 * W);
    }
}

/// A packet of WINDOWS with these words.
fn windows(key: u64, words: [u32; 3]) -> LmHeader {
    LmHeader::Extension {
        packet_type: TYPE_WINDOWS,
        key,
        words,
    }
}

/// Each round other digests of every window in a sender's name, and a request in a receiver's: messages come, and nothing of them again.
#[test]
fn a_flood_of_digests_stops_nothing() {
    for way in [Way::Digests, Way::ZeroCopy] {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let key = audience.key();
        audience.payloads = payloads(3, |_| 20 * W);
        let mut flooded = 0;
        audience.until("whole", |audience| {
            let landing = audience.bed.hosts[1].landing.as_ref();
            assert_eq!(landing.map(|landing| landing.sessions.ready_windows()), Some(0));
            let reads = audience.reads.iter();
            let arriving = { reads }.find(|read| read.incoming.settled().is_none());
            if let Some(number) = arriving.map(|read| read.incoming.number()) {
                flooded += 1;
                let mut payload = [0; 800];
                let digests = [flooded; 20].into_iter();
                let (words, len) = WindowsPacket::write(&mut payload, number, 0, digests).expect("room");
                audience.forge(&windows(key, words), &payload[..len]);
                let peers = &mut audience.bed.hosts[1].peers;
                let index = peers.find(data_address(0)).expect("its sender");
                let request = lm_packet(&peers.at(index).addressing, &windows(key, [number, 0, 20]), &[]);
                audience.bed.wire.inject(0, 0, &request);
            }
            audience.messages.len() == 3
        });
        assert!(flooded > 20, "{way:?}: {flooded}");
        assert!(audience.drops("implausible") > 10, "{way:?}");
        let counters = audience.bed.hosts[1].counters;
        assert_eq!(
            (counters.fragments_requested, counters.messages_incomplete),
            (0, 0)
        );
        audience.end();
    }
}

/// Digests with a session's key from another host than its sender are of no session.
#[test]
fn digests_of_another_host_are_not_taken() {
    for way in [Way::Digests, Way::ZeroCopy] {
        let bed = Bed::switch(&config(way), 3);
        let mut audience = Audience::new(bed, [1, 0], &options(Delivery::Reliable));
        let key = audience.key();
        let stranger = audience.bed.hosts[2].addressing_to(data_address(0), mac_of(IPS[0]));
        audience.payloads = payloads(1, |_| 20 * W);
        let (mut forged, mut payload) = (0, [0; 800]);
        audience.until("whole", |audience| {
            if let Some(read) = audience
                .reads
                .first()
                .filter(|read| read.incoming.settled().is_none())
            {
                let digests = [5; 20].into_iter();
                let (words, len) =
                    WindowsPacket::write(&mut payload, read.incoming.number(), 0, digests).expect("room");
                let packet = lm_packet(&stranger, &windows(key, words), &payload[..len]);
                audience.bed.wire.inject(0, 0, &packet);
                forged += 1;
            }
            !audience.messages.is_empty()
        });
        assert!(
            forged > 0 && audience.early > 10 * W,
            "{way:?}: {forged} {}",
            audience.early
        );
        assert_eq!(audience.drops("implausible"), 0, "{way:?}");
        audience.end();
    }
}
