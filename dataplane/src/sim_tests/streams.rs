//! Messages that are sent while they are written: nothing leaves that is not released, and a writer that stalls or gives up holds up its own
//! session alone.
#![cfg(test)]

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lm_protocol::control::ControlMessage;
use lm_protocol::delivery::Delivery;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::TYPE_ANNOUNCE;

use super::audience::{
    Audience, P, TAIL, W, WAYS, WINDOW, Way, config, impairments, options, payloads, say_otherwise,
    without_streams,
};
use super::bed::{Bed, noise};
use super::flood::Lines;
use super::integrity::kind;
use super::times;
use super::transfer::Dice;
use crate::Ending;
use crate::completion::{LoanError, Outcome};
use crate::connect::ConnectOptions;
use crate::simnic::Impairments;
use crate::writer::MessageWriter;

/// A message that is being written.
pub(super) struct Writing {
    pub(super) writer: MessageWriter,
    pub(super) payload: Vec<u8>,
}

impl Writing {
    /// Writes to `to`. All behind it that is not released becomes something else first: whoever reads it before it is released will see that.
    pub(super) fn write_to(&mut self, to: u64, scribble: u8) {
        let from = self.writer.released();
        let mut at = from as usize;
        for range in self.writer.payloads_mut() {
            let end = at + range.len();
            let right = (to as usize).clamp(at, end) - at;
            range[..right].copy_from_slice(&self.payload[at..at + right]);
            range[right..].fill(scribble);
            at = end;
        }
        match to == self.writer.len() {
            true => self.writer.finish().expect("all of it is written"),
            false => self.writer.release(to).expect("it is written"),
        }
    }
}

/// Begins the next message of an audience's sender.
pub(super) fn begin(audience: &mut Audience, payload: Vec<u8>) -> Writing {
    let tag = audience.payloads.len() as u64;
    let mut begun = None;
    audience.until("there is room for one more", |audience| {
        let now_ns = audience.bed.now_ns;
        let sender = &mut audience.bed.hosts[audience.sender];
        begun = match sender.begin(audience.to, payload.len() as u64, tag, now_ns) {
            Err(LoanError::WouldBlock) => None,
            writer => Some(writer.expect("a session for such messages")),
        };
        begun.is_some()
    });
    audience.payloads.push(payload.clone());
    audience.sent = audience.payloads.len();
    let writer = begun.expect("it was awaited");
    Writing { writer, payload }
}

pub(super) fn outcomes(audience: &mut Audience) -> Vec<(u64, Outcome)> {
    let completions = audience.bed.hosts[audience.sender].told.completions();
    { completions.drain(..) }
        .map(|completion| (completion.tag, completion.outcome))
        .collect()
}

/// Each window is read before the next but one is written; nothing is copied, and the message is that memory.
#[test]
fn a_message_is_read_while_it_is_written() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let payload = noise(3, (10 * W + 5) as usize);
        let mut writing = begin(&mut audience, payload);
        for window in 1..=10 {
            writing.write_to(window * W, window as u8);
            assert_eq!(writing.writer.released(), window * W);
            audience.until("shown", |audience| {
                let read = audience.reads.first();
                read.is_some_and(|read| read.seen.first().is_some_and(|seen| seen.end > (window - 1) * W))
            });
            let sent = audience.bed.hosts[0].counters.data_packets_sent;
            assert!(
                sent <= window * WINDOW,
                "{way:?}: {sent} packets in window {window}"
            );
        }
        assert!(audience.messages.is_empty());
        writing.write_to(10 * W + 5, 0);
        drop(writing);
        audience.until("whole", |audience| !audience.messages.is_empty());
        let read = &audience.reads[0];
        assert_eq!(read.incoming.settled(), Some(Ending::Whole));
        let all = read.incoming.bytes(0..10 * W + 5).expect("whole");
        assert_eq!(all.as_ptr(), audience.messages[0].as_ptr());
        audience.bed.pass(Duration::from_millis(5));
        assert_eq!(outcomes(&mut audience), [(0, Outcome::Delivered)]);
        let bed = audience.end_without_copies(way);
        assert_eq!(bed.hosts[1].counters.fragments_requested, 0);
    }
}

/// Messages that are written, and others behind them, over a bad wire.
fn write_under(mut audience: Audience, seed: u64, impairments: Impairments) -> Bed {
    let mut dice = Dice(seed * 131 + 7);
    for host in 0..audience.bed.hosts.len() {
        let seed = seed * 2 + host as u64;
        let impairments = Impairments { seed, ..impairments };
        audience.bed.wire.impair(host, impairments);
    }
    for _ in 0..3 {
        let len = 1 + dice.roll(7 * W);
        let mut writing = begin(&mut audience, noise(seed + len, len as usize));
        // They wait for it.
        audience
            .payloads
            .extend(payloads(dice.roll(3), |number| 3_000 * (number + 1)));
        let mut plain = 0;
        let by_ranges = dice.roll(2) == 0;
        while writing.writer.released() < len {
            let step = 1 + dice.roll(2 * W);
            match by_ranges {
                true => {
                    let to = (writing.writer.released() + step).min(len);
                    writing.write_to(to, dice.roll(256) as u8);
                }
                false => {
                    let to = (plain + step).min(len);
                    (writing.writer)
                        .write_all(&writing.payload[plain as usize..to as usize])
                        .expect("room");
                    plain = to;
                    if plain == len {
                        writing.writer.finish().expect("all of it");
                    }
                }
            }
            for _ in 0..dice.roll(60) {
                audience.round();
            }
        }
        drop(writing);
        let all = audience.payloads.len();
        audience.until("all", |audience| {
            audience.messages.len() + audience.failures as usize == all
        });
    }
    for host in 0..audience.bed.hosts.len() {
        audience.bed.wire.impair(host, Impairments::default());
    }
    audience.end()
}

#[test]
fn what_is_written_on_a_bad_wire_is_right() {
    for way in WAYS {
        for seed in 0..times(12, 120) {
            let audience = Audience::of(way, Delivery::Reliable);
            let bed = write_under(audience, seed, impairments(seed));
            let counters = &bed.hosts[1].counters;
            assert_eq!(counters.violations.total(), 0);
            assert_eq!(counters.messages_incomplete, 0);
            assert_eq!(bed.hosts[0].counters.messages_failed, 0);
        }
    }
}

/// Fragments come by the kernel's socket; a message of which something is lost may end without it.
#[test]
fn what_is_written_goes_every_way() {
    for seed in 0..times(6, 60) {
        for way in [Way::Paired, Way::Digests] {
            let one_copy = ConnectOptions {
                one_copy: true,
                ..options(Delivery::Reliable)
            };
            let audience = Audience::new(Bed::new(&config(way)), [0, 1], &one_copy);
            let bed = write_under(audience, seed, impairments(seed));
            assert_eq!(bed.hosts[1].counters.messages_incomplete, 0);
        }
        for way in WAYS {
            for delivery in [Delivery::Unreliable, Delivery::Partial] {
                write_under(Audience::of(way, delivery), seed, impairments(seed));
            }
        }
    }
}

/// For as long as nothing is written its session waits, many times its receiver's patience, and no other does.
#[test]
fn a_writer_that_stalls_holds_up_its_own_session_alone() {
    for way in [Way::Paired, Way::Digests] {
        for released in [0, 2] {
            let mut bed = Bed::switch(&config(way), 3);
            let other = bed.connect(2, &options(Delivery::Reliable)).expect("a session");
            let mut audience = Audience::new(bed, [1, 0], &options(Delivery::Reliable));
            let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
            writing.write_to(released * W, 1);
            audience.bed.pass(Duration::from_millis(3));
            let stalled_ns = audience.bed.now_ns;
            let (mut sent, mut came) = (0, 0);
            while audience.bed.now_ns - stalled_ns < 12_000_000_000 {
                let payload = noise(sent, 300_000);
                let handed = audience.bed.try_send(2, other, &payload, sent).is_ok();
                sent += u64::from(handed);
                audience.bed.pass(Duration::from_millis(10));
                for read in &mut audience.reads {
                    read.check();
                }
                while let Some(message) = audience.bed.hosts[0].take_message().expect("no failure") {
                    assert_eq!((message.tag(), message[..] == noise(came, 300_000)), (came, true));
                    came += 1;
                }
            }
            assert!(
                came > 1000,
                "{way:?}: {came} messages came beside one that stalls"
            );
            let began_ns = audience.bed.now_ns;
            writing.write_to(5 * W, 2);
            audience.until("whole", |audience| !audience.messages.is_empty());
            assert!(audience.bed.now_ns - began_ns < 20_000_000);
            drop(writing);
            let now_ns = audience.bed.now_ns;
            audience.bed.hosts[2].end_session(other.index, now_ns);
            audience.bed.hosts[2].told.completions().clear();
            audience.end().check_clean();
        }
    }
}

/// Its receiver has answered and owes it nothing: it hears that the sender is there, and is not asked.
#[test]
fn a_sender_that_waits_for_its_writer_asks_nobody() {
    let mut audience = Audience::of(Way::Digests, Delivery::Reliable);
    let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
    writing.write_to(2 * W, 1);
    audience.bed.pass(Duration::from_millis(50));
    let announced = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&announced);
    audience.bed.wire.set_filter(move |from, packet| {
        let is_it = from == 0 && kind(packet) == Some(TYPE_ANNOUNCE);
        counter.fetch_add(is_it.into(), Ordering::Relaxed);
        true
    });
    audience.bed.pass(Duration::from_secs(5));
    // Every half second.
    let announced = announced.load(Ordering::Relaxed);
    assert!((9..=11).contains(&announced), "{announced}");
    writing.write_to(5 * W, 1);
    audience.until("whole", |audience| !audience.messages.is_empty());
    drop(writing);
    audience.end();
}

/// What is released and lost comes again at once, and not when more is written.
#[test]
fn losses_are_repaired_while_a_writer_stalls() {
    for way in [Way::Paired, Way::Digests] {
        for seed in 0..times(20, 200) {
            let mut audience = Audience::of(way, Delivery::Reliable);
            let mut writing = begin(&mut audience, noise(seed, 4 * W as usize));
            // One that is whole waits for it.
            audience.payloads.push(noise(seed + 1, 2 * W as usize));
            (0..20).for_each(|_| audience.round());
            let loss = Impairments {
                seed,
                loss_ppm: 200_000,
                ..Impairments::default()
            };
            audience.bed.wire.impair(0, loss);
            writing.write_to(2 * W, 1);
            let released_ns = audience.bed.now_ns;
            audience.until("shown", |audience| {
                let landing = audience.bed.hosts[1].landing.as_ref().expect("it lands");
                let inbound = landing.sessions.iter().next().expect("a session");
                assert!(
                    inbound.told.packet_limit <= 2 * WINDOW as u32,
                    "credit for more than is released"
                );
                let seen = audience.reads.first().and_then(|read| read.seen.first());
                seen.is_some_and(|seen| seen.start == 0 && seen.end >= 2 * W - TAIL)
            });
            let took_ns = audience.bed.now_ns - released_ns;
            assert!(took_ns < 100_000_000, "{way:?}, seed {seed}: {took_ns} ns");
            audience.bed.wire.impair(0, Impairments::default());
            writing.write_to(4 * W, 1);
            audience.until("whole", |audience| audience.messages.len() == 2);
            drop(writing);
            audience.end();
        }
    }
}

/// The only session of a device that writes by itself, which may keep entries back.
#[test]
fn a_device_waits_for_a_writer() {
    for seed in 0..times(4, 40) {
        let mut audience = Audience::of(Way::ZeroCopy, Delivery::Reliable);
        let mut dice = Dice(seed);
        for host in [0, 1] {
            audience.bed.wire.impair(
                host,
                Impairments {
                    seed: seed * 2 + host as u64,
                    ..impairments(seed)
                },
            );
        }
        let mut writing = begin(&mut audience, noise(seed, 4 * W as usize));
        for window in 1..=4 {
            writing.write_to(window * W, 1);
            audience.bed.pass(Duration::from_millis(500 * dice.roll(12)));
        }
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert_eq!(audience.bed.hosts[1].counters.messages_stalled, 0);
        for host in [0, 1] {
            audience.bed.wire.impair(host, Impairments::default());
        }
        drop(writing);
        audience.end();
    }
}

/// A receiver of before takes messages when they are whole, in the order in which they became so, and hears nothing of others.
#[test]
fn a_receiver_without_the_capability_gets_whole_messages() {
    let bed = Bed::new(&config(Way::Digests));
    bed.wire.set_filter(|from, packet| {
        if from == 1 {
            without_streams(packet);
        }
        true
    });
    let mut audience = Audience::new(bed, [0, 1], &options(Delivery::Reliable));
    let lines = Arc::new(AtomicU64::new(0));
    let [mut first, mut dropped, mut second] =
        tracing::subscriber::with_default(Lines(Arc::clone(&lines)), || {
            [1, 2, 3].map(|seed| begin(&mut audience, noise(seed, 3 * W as usize)))
        });
    assert_eq!(lines.load(Ordering::Relaxed), 1, "it is said once");
    for writing in [&mut first, &mut dropped] {
        writing.write_to(2 * W, 1);
    }
    audience.bed.pass(Duration::from_millis(5));
    assert_eq!(audience.bed.hosts[0].counters.data_packets_sent, 0);
    second.write_to(3 * W, 1);
    audience.until("whole", |audience| audience.messages.len() == 1);
    drop(dropped);
    first.write_to(3 * W, 1);
    audience.until("whole", |audience| audience.messages.len() == 2);
    let tags: Vec<u64> = audience.messages.iter().map(|message| message.tag()).collect();
    assert_eq!(tags, [2, 0]);
    audience.bed.pass(Duration::from_millis(5));
    let mut told = outcomes(&mut audience);
    told.sort_by_key(|(tag, _)| *tag);
    let delivered = Outcome::Delivered;
    assert_eq!(
        told,
        [(0, delivered.clone()), (1, Outcome::Aborted), (2, delivered)]
    );
    drop((first, second));
    audience.end();
}

/// A session that its receiver ended before it heard of the message: the next one takes it, window by window.
#[test]
fn a_message_that_is_being_written_goes_over_to_the_next_session() {
    for way in WAYS {
        let mut audience = Audience::of(way, Delivery::Reliable);
        let key = audience.key();
        let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
        writing.write_to(W, 1);
        audience.bed.hosts[1].abort_session(key, crate::notices::Fault::Stalled);
        for window in 2..=5 {
            audience.bed.pass(Duration::from_millis(20));
            writing.write_to(window * W, 1);
        }
        audience.until("whole", |audience| !audience.messages.is_empty());
        assert_eq!(audience.bed.hosts[0].counters.messages_again, 1);
        drop(writing);
        audience.end();
    }
}

/// The next session has other windows, of which what was released would be another part.
#[test]
fn a_message_that_is_being_written_ends_with_its_windows() {
    let bed = Bed::new(&config(Way::Digests));
    let mut first = None;
    bed.wire.set_filter(move |from, packet| {
        if from == 1 {
            say_otherwise(packet, |message| {
                if let ControlMessage::Grant(grant) = message
                    && *first.get_or_insert(grant.session_key) != grant.session_key
                {
                    grant.window = WindowShape::new(2 * WINDOW as u32).expect("a power of two");
                }
            });
        }
        true
    });
    let mut audience = Audience::new(bed, [0, 1], &options(Delivery::Reliable));
    let key = audience.key();
    let mut writing = begin(&mut audience, noise(5, 5 * W as usize));
    writing.write_to(W, 1);
    audience.bed.hosts[1].abort_session(key, crate::notices::Fault::Stalled);
    audience.bed.pass(Duration::from_millis(60));
    assert!(writing.writer.is_settled());
    assert_eq!(outcomes(&mut audience), [(0, Outcome::SessionEnded)]);
    assert_eq!(audience.bed.hosts[0].counters.data_packets_sent, 0);
    drop(writing);
    audience.end();
}

/// One byte, and one fragment: there is padding behind them.
#[test]
fn short_messages_are_written() {
    for way in WAYS {
        for len in [1, P, P + 1, W, W + 1] {
            let mut audience = Audience::of(way, Delivery::Reliable);
            let mut writing = begin(&mut audience, noise(5, len as usize));
            audience.bed.pass(Duration::from_millis(2));
            writing.write_to(len, 0);
            audience.until("whole", |audience| !audience.messages.is_empty());
            drop(writing);
            audience.end();
        }
    }
}
