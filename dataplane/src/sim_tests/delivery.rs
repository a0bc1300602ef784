//! Delivery over a wire that loses, repeats and overtakes: reliable, unreliable, partial.
#![cfg(test)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, noise};
use super::times;
use super::transfer::Dice;
use crate::completion::{Outcome, PeerId, RecvError};
use crate::connect::ConnectOptions;

/// What the wire does to large packets of host 0, in packets of a million.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    loss: u64,
    repeat: u64,
    overtake: u64,
    /// Packets that do not carry fragments are lost at this rate.
    control_loss: u64,
}

/// Packets that reach host 1 again, or later, and after how many rounds.
type Pending = Arc<Mutex<Vec<(u32, Vec<u8>)>>>;

struct Impaired {
    bed: Bed,
    pending: Pending,
}

impl Impaired {
    fn new(config: &BedConfig, seed: u64, rates: Rates) -> Impaired {
        let bed = Bed::new(config);
        Impaired {
            pending: impair(&bed, seed, rates),
            bed,
        }
    }

    fn round(&mut self) {
        self.bed.now_ns += 20_000;
        self.bed.round();
        let mut due = Vec::new();
        self.pending.lock().unwrap().retain_mut(|(rounds, packet)| {
            *rounds -= 1;
            if *rounds == 0 {
                due.push(std::mem::take(packet));
            }
            *rounds > 0
        });
        for packet in due {
            self.bed.wire.inject(1, 1, &packet);
        }
    }
}

fn impair(bed: &Bed, seed: u64, rates: Rates) -> Pending {
    let pending = Pending::default();
    let later = Arc::clone(&pending);
    let mut dice = Dice(seed | 1);
    bed.wire.set_filter(move |from, packet| {
        // EtherType, UDP, data port, DATA.
        let is_data = from == 0
            && packet.len() > 66
            && packet[23] == 17
            && packet[36..38] == [0x1c, 0x00]
            && packet[42] == 0x21;
        if !is_data {
            return dice.roll(1_000_000) >= rates.control_loss;
        }
        if dice.roll(1_000_000) < rates.loss {
            return false;
        }
        if dice.roll(1_000_000) < rates.repeat {
            later
                .lock()
                .unwrap()
                .push((1 + dice.roll(20) as u32, packet.clone()));
        }
        if dice.roll(1_000_000) < rates.overtake {
            later
                .lock()
                .unwrap()
                .push((1 + dice.roll(4) as u32, packet.clone()));
            return false;
        }
        true
    });
    pending
}

/// Sends messages of the given lengths from host 0 over an impaired wire, several at once; gives what each became:
/// `None` delivered, or the completion's outcome.
fn transfer(
    impaired: &mut Impaired,
    peer: PeerId,
    lens: &[usize],
    mut received: impl FnMut(u64, &crate::message::Message, &[u8]),
) -> BTreeMap<u64, Outcome> {
    let mut outcomes = BTreeMap::new();
    let mut next = 0;
    let mut failed = 0;
    let mut delivered = 0;
    for _ in 0..400_000 {
        while next < lens.len() {
            let payload = noise(next as u64, lens[next]);
            match impaired.bed.try_send(0, peer, &payload, next as u64) {
                Ok(_) => next += 1,
                Err(crate::completion::SendError::WouldBlock) => break,
                Err(error) => panic!("{error}"),
            }
        }
        impaired.round();
        loop {
            match impaired.bed.hosts[1].take_message() {
                Ok(None) => break,
                Ok(Some(message)) => {
                    let tag = message.tag();
                    received(tag, &message, &noise(tag, lens[tag as usize]));
                    delivered += 1;
                }
                Err(RecvError::Incomplete { .. }) => failed += 1,
                Err(error) => panic!("{error}"),
            }
        }
        while let Some(completion) = impaired.bed.hosts[0].told.completions().pop_front() {
            assert!(outcomes.insert(completion.tag, completion.outcome).is_none());
        }
        if outcomes.len() == lens.len() && delivered + failed == lens.len() {
            return outcomes;
        }
    }
    panic!(
        "{} of {} settled, {delivered} delivered, {failed} failed: {:?}",
        outcomes.len(),
        lens.len(),
        impaired.bed.hosts[1]
            .landing
            .as_ref()
            .map(|landing| &landing.sessions)
    );
}

/// Ends the session and sees that all memory came back.
fn close(mut impaired: Impaired, peer: PeerId) -> Bed {
    impaired.bed.wire.clear_filter();
    let now_ns = impaired.bed.now_ns;
    impaired.bed.hosts[0].end_session(peer.index, now_ns);
    for _ in 0..200 {
        impaired.round();
    }
    impaired.bed.check_memory();
    impaired.bed
}

fn connect(impaired: &mut Impaired, delivery: Delivery, len: u64, in_flight: u32) -> PeerId {
    let options = ConnectOptions {
        delivery,
        max_message_len: len,
        messages_in_flight: in_flight,
        ..ConnectOptions::default()
    };
    impaired.bed.connect(0, &options).expect("a session")
}

#[test]
fn reliable_messages_arrive_whatever_is_lost_repeated_or_overtaken() {
    for seed in 1..=times(40, 120) {
        let mut dice = Dice(seed * 0x9e37_79b9);
        let rate = |dice: &mut Dice| [0, 1_000, 10_000, 50_000, 200_000][dice.roll(5) as usize];
        let rates = Rates {
            loss: rate(&mut dice),
            repeat: rate(&mut dice),
            overtake: rate(&mut dice),
            control_loss: [0, 10_000, 100_000][dice.roll(3) as usize],
        };
        let config = BedConfig {
            window: 1 << dice.roll(9),
            on_the_way: [20, 192, u32::MAX][dice.roll(3) as usize],
            landing_len: [1 << 20, 8 << 20][dice.roll(2) as usize],
            lease: std::time::Duration::from_secs(60),
            patience: std::time::Duration::from_secs(20),
            ..BedConfig::default()
        };
        let lens: Vec<usize> = (0..3 + dice.roll(20))
            .map(|_| 1449 + dice.roll(120_000) as usize)
            .collect();
        let mut impaired = Impaired::new(&config, seed, Rates::default());
        let peer = connect(
            &mut impaired,
            Delivery::Reliable,
            200_000,
            1 + dice.roll(12) as u32,
        );
        impaired.pending = impair(&impaired.bed, seed, rates);
        let mut expected = 0;
        let outcomes = transfer(&mut impaired, peer, &lens, |tag, message, payload| {
            assert!(message[..] == *payload, "seed {seed}: message {tag} differs");
            assert_eq!(tag, expected, "seed {seed}: out of order");
            expected += 1;
        });
        assert!(
            outcomes.values().all(|outcome| *outcome == Outcome::Delivered),
            "seed {seed}: {outcomes:?}"
        );
        let counters = impaired.bed.hosts[1].counters;
        assert_eq!(counters.violations.total(), 0, "seed {seed}");
        let lost = rates.loss > 0 && lens.len() > 10;
        assert!(
            !lost || rates.loss < 10_000 || counters.fragments_requested > 0,
            "seed {seed}"
        );
        close(impaired, peer);
    }
}

/// Loses the n-th fragment only.
fn lose_one(bed: &Bed, lost: u32) {
    let mut seen = 0;
    bed.wire.set_filter(move |from, packet| {
        let is_data = from == 0 && packet.len() > 1000;
        seen += u32::from(is_data);
        !(is_data && seen == lost + 1)
    });
}

#[test]
fn without_reliable_delivery_only_the_message_with_the_loss_is_given_up() {
    for lost in [0, 1, 30, 63, 64, 100, 199, 200, 201, 400, 599] {
        for delivery in [Delivery::Unreliable, Delivery::Partial] {
            let mut impaired = Impaired::new(&BedConfig::default(), 1, Rates::default());
            let peer = connect(&mut impaired, delivery, 300_000, 8);
            lose_one(&impaired.bed, lost);
            // 200 fragments each.
            let lens = [200 * 1448; 3];
            let broken = u64::from(lost / 200);
            let position = lost % 200;
            // Windows of 64 fragments.
            let index = match position / 64 {
                3 => 192 + 199 - position,
                window => window * 64 + (window * 64 + 63) - position,
            };
            let mut partial = 0;
            let outcomes = transfer(&mut impaired, peer, &lens, |tag, message, payload| {
                if tag != broken {
                    assert!(message.missing().is_empty() && message[..] == *payload);
                    return;
                }
                assert_eq!(delivery, Delivery::Partial, "lost {lost}");
                partial += 1;
                let start = u64::from(index) * 1448;
                let missing = start..(start + 1448).min(message.len() as u64);
                assert_eq!(message.missing(), std::slice::from_ref(&missing));
                let (start, end) = (missing.start as usize, missing.end as usize);
                assert!(message[..start] == payload[..start] && message[end..] == payload[end..]);
            });
            assert_eq!(partial, u32::from(delivery == Delivery::Partial));
            for (tag, outcome) in outcomes {
                let expected = match tag == broken {
                    true => Outcome::Incomplete {
                        missing: std::iter::once(index..index + 1).collect(),
                    },
                    false => Outcome::Delivered,
                };
                assert_eq!(outcome, expected, "{delivery:?}, lost {lost}");
            }
            let counters = impaired.bed.hosts[1].counters;
            assert_eq!(counters.messages_stalled, 0);
            assert_eq!(counters.violations.total(), 0);
            assert_eq!(counters.fragments_requested, 0);
            close(impaired, peer);
        }
    }
}

/// A message too long to be copied out of its zone: the channel is built anew under the session.
#[test]
fn a_loss_in_the_last_message_does_not_keep_it_back() {
    for (len, rebuilt) in [(42 * 1448, false), (4000 * 1448, true)] {
        for lost in [0, 5, 40, len as u32 / 1448 - 1] {
            let mut impaired = Impaired::new(
                &BedConfig {
                    max_message_len: 20 << 20,
                    landing_len: 16 << 20,
                    send_len: 30 << 20,
                    ..BedConfig::default()
                },
                1,
                Rates::default(),
            );
            let peer = connect(&mut impaired, Delivery::Reliable, 8 << 20, 4);
            lose_one(&impaired.bed, lost);
            let outcomes = transfer(&mut impaired, peer, &[len], |_, message, payload| {
                assert!(message[..] == *payload);
            });
            assert_eq!(outcomes[&0], Outcome::Delivered);
            let counters = impaired.bed.hosts[1].counters;
            assert_eq!(counters.fragments_requested, 1, "lost {lost}");
            assert_eq!(impaired.bed.hosts[0].counters.fragments_resent, 1);
            // The last one's repetition takes the entry that it left.
            let last = lost == len as u32 / 1448 - 1;
            assert_eq!(counters.messages_copied_out, u64::from(!rebuilt && !last));
            // The session goes on.
            let outcomes = transfer(&mut impaired, peer, &[50_000, 90_000], |_, message, payload| {
                assert!(message[..] == *payload);
            });
            assert!(outcomes.values().all(|outcome| *outcome == Outcome::Delivered));
            close(impaired, peer);
        }
    }
}

#[test]
fn the_ipfrag_wire_reports_what_it_loses() {
    let mut impaired = Impaired::new(&BedConfig::default(), 1, Rates::default());
    let options = ConnectOptions {
        wire: WireMode::IpFrag,
        max_message_len: 60_000,
        ..ConnectOptions::default()
    };
    let peer = impaired.bed.connect(0, &options).expect("a session");
    lose_one(&impaired.bed, 50);
    let outcomes = transfer(&mut impaired, peer, &[60_000; 4], |tag, message, payload| {
        assert!(tag != 1 && message[..] == *payload);
    });
    for (tag, outcome) in outcomes {
        assert_eq!(matches!(outcome, Outcome::Incomplete { .. }), tag == 1);
    }
    close(impaired, peer);
}

/// A message that lacks a fragment holds the later ones up.
#[test]
fn whole_messages_wait_for_one_that_is_not() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let mut bed = Bed::new(&BedConfig::default());
    let options = ConnectOptions {
        max_message_len: 50_000,
        messages_in_flight: 8,
        ..ConnectOptions::default()
    };
    let peer = bed.connect(0, &options).expect("a session");
    // Fragment 7 of the first message does not get through, however often it is sent, until it may.
    let blocked = Arc::new(AtomicBool::new(true));
    let gate = Arc::clone(&blocked);
    bed.wire.set_filter(move |from, packet| {
        let is_it = from == 0
            && packet.len() > 66
            && packet[42] == 0x21
            && packet[54..62] == [0, 0, 0, 0, 0, 0, 0, 7];
        !(is_it && gate.load(Ordering::Relaxed))
    });
    let messages: Vec<Vec<u8>> = (0..6).map(|n| noise(n, 30_000 + 2000 * n as usize)).collect();
    for (tag, bytes) in messages.iter().enumerate() {
        bed.send(0, peer, bytes, tag as u64);
    }
    let mut order = Vec::new();
    let mut take = |bed: &mut Bed, rounds: u32| {
        for _ in 0..rounds {
            bed.round();
            while let Some(message) = bed.hosts[1].take_message().expect("nothing is reported") {
                let tag = message.tag() as usize;
                assert!(message[..] == messages[tag][..], "message {tag}");
                order.push(tag);
            }
        }
        order.clone()
    };
    assert_eq!(take(&mut bed, 60), [0; 0]);
    // None of them is confirmed before its predecessors are settled.
    assert!(bed.hosts[0].told.completions().is_empty());
    blocked.store(false, Ordering::Relaxed);
    assert_eq!(take(&mut bed, 20_000), [0, 1, 2, 3, 4, 5]);
    assert_eq!(bed.hosts[0].told.completions().len(), 6);
    bed.hosts[0].told.completions().clear();
    let now_ns = bed.now_ns;
    bed.hosts[0].end_session(peer.index, now_ns);
    bed.pass(std::time::Duration::from_millis(800));
    bed.check_memory();
}
