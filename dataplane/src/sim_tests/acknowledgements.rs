//! Acknowledgements of eager messages behind those that go the other way: when they go there, what they may say, and what is
//! made of them where packets are lost, late, changed or forged.
#![cfg(test)]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lm_protocol::integrity::Integrity;
use lm_protocol::wire::lm::{EagerAcknowledgement, HEADER_LEN, LmHeader, TYPE_EAGER_ACK, has_digests};
use lm_protocol::wire::parse_frame;

use super::bed::{Bed, BedConfig, IPS, TWO_QUEUES, data_address, lm_packet, noise, sender_id};
use crate::completion::{Outcome, PeerId};
use crate::eager::EagerOut;
use crate::opening::Queues;
use crate::simnic::{self, Impairments};

const UDP_HEADERS_LEN: usize = 42;

/// What each host has sent.
#[derive(Debug, Default)]
struct Tally {
    /// EAGER packets.
    eager: [u32; 2],
    /// Of these with an acknowledgement.
    acknowledging: [u32; 2],
    /// EAGER_ACK packets.
    alone: [u32; 2],
}

impl Tally {
    /// Counts on the wire from now on.
    fn of(bed: &Bed) -> Arc<Mutex<Tally>> {
        let tally = Arc::new(Mutex::new(Tally::default()));
        let counting = Arc::clone(&tally);
        bed.wire.set_filter(move |from, packet| {
            let mut tally = counting.lock().expect("one thread");
            let eager = acknowledged_by(packet);
            tally.eager[from] += u32::from(eager.is_some());
            tally.acknowledging[from] += u32::from(eager.flatten().is_some());
            tally.alone[from] += u32::from(kind(packet) == TYPE_EAGER_ACK);
            true
        });
        tally
    }
}

fn kind(packet: &[u8]) -> u8 {
    packet.get(UDP_HEADERS_LEN).map_or(0, |first| first & 0xf)
}

/// What an EAGER packet acknowledges; `None`: it is something else.
fn acknowledged_by(packet: &[u8]) -> Option<Option<EagerAcknowledgement>> {
    match parse_frame(packet).ok()?.lm()? {
        LmHeader::Eager { acknowledges, .. } => Some(*acknowledges),
        _ => None,
    }
}

fn beds() -> [Bed; 3] {
    let one_queue = Queues {
        general: None,
        landing: Some(0),
    };
    let config = |queues, integrity| BedConfig {
        queues: [queues; 2],
        integrity,
        ..BedConfig::default()
    };
    [
        config(TWO_QUEUES, Integrity::Manifest),
        config(TWO_QUEUES, Integrity::None),
        // All by the kernel's sockets.
        config(one_queue, Integrity::Manifest),
    ]
    .map(|config| Bed::new(&config))
}

/// Both hosts know each other and have said so: the first message is answered at once by more credit than a stranger has.
fn both_ways(bed: &mut Bed) -> [PeerId; 2] {
    let peers = [0, 1].map(|host| bed.resolve(host));
    round_trip(bed, peers, b"first", b"first");
    bed.pass(Duration::from_millis(1));
    assert_eq!([0, 1].map(|host| confirmed(bed, host)), [1, 1]);
    peers
}

/// A message there, and one back as soon as it came.
fn round_trip(bed: &mut Bed, peers: [PeerId; 2], there: &[u8], back: &[u8]) {
    for (from, payload) in [(0, there), (1, back)] {
        bed.send(from, peers[from], payload, 1);
        let message = bed.recv(1 - from);
        assert!(message[..] == *payload, "{} bytes differ", payload.len());
    }
}

/// Everything that was sent is confirmed as delivered.
fn confirmed(bed: &mut Bed, host: usize) -> usize {
    let completions = std::mem::take(bed.hosts[host].told.completions());
    assert!(completions.iter().all(|c| c.outcome == Outcome::Delivered));
    completions.len()
}

/// An eager packet from host 1 to host 0; [`both_ways`] has sent number 0.
fn eager(number: u32, acknowledges: Option<EagerAcknowledgement>, bed: &Bed) -> Vec<u8> {
    let sender_id = sender_id(1, Integrity::Manifest);
    let header = LmHeader::Eager {
        sender_id,
        number,
        tag: 5,
        digested: has_digests(sender_id),
        acknowledges,
    };
    let addressing = bed.hosts[1].addressing_to(data_address(0), simnic::mac_of(IPS[0]));
    lm_packet(&addressing, &header, b"with an acknowledgement")
}

/// An EAGER_ACK from host 1 to host 0.
fn alone(next: u32, limit: u32, bed: &Bed) -> Vec<u8> {
    let header = LmHeader::EagerAck {
        sender_id: sender_id(0, Integrity::Manifest),
        next,
        limit,
    };
    let addressing = bed.hosts[1].addressing_to(data_address(0), simnic::mac_of(IPS[0]));
    lm_packet(&addressing, &header, &[])
}

fn acknowledgement(next: u32, limit: u32) -> EagerAcknowledgement {
    EagerAcknowledgement {
        sender_id: sender_id(0, Integrity::Manifest),
        next,
        limit,
    }
}

/// Host 0 has sent number 1, which host 1 got, and nothing that host 1 says of it came back.
fn one_unconfirmed() -> Bed {
    let mut bed = Bed::new(&BedConfig::default());
    let peers = both_ways(&mut bed);
    bed.wire.set_filter(|from, _| from == 0);
    bed.send(0, peers[0], b"unconfirmed", 1);
    drop(bed.recv(1));
    bed.rounds(10);
    assert_eq!(bed.hosts[0].unconfirmed_messages(), 1);
    bed
}

fn out(bed: &mut Bed) -> &mut EagerOut {
    let index = bed.hosts[0].peers.find(data_address(1)).expect("known");
    &mut bed.hosts[0].peers.at(index).eager_out
}

#[test]
fn messages_that_answer_each_other_need_no_other_packets() {
    for mut bed in beds() {
        let peers = both_ways(&mut bed);
        let tally = Tally::of(&bed);
        let trips = 400;
        for n in 0..trips {
            round_trip(&mut bed, peers, &noise(n, 64), &noise(n, 1000));
            // Each is confirmed by its answer.
            assert_eq!(bed.hosts[0].unconfirmed_messages(), 0);
            assert!(bed.hosts[1].unconfirmed_messages() <= 1);
        }
        {
            let tally = tally.lock().expect("one thread");
            let trips = trips as u32;
            assert_eq!(tally.eager, [trips; 2]);
            assert_eq!(tally.acknowledging, [trips - 1, trips], "{tally:?}");
            assert_eq!(tally.alone, [0, 0]);
        }
        // The last answer is not answered.
        bed.pass(Duration::from_millis(1));
        assert_eq!(tally.lock().expect("one thread").alone, [1, 0]);
        assert_eq!([0, 1].map(|host| confirmed(&mut bed, host)), [400, 400]);
        bed.check_memory();
        bed.check_clean();
    }
}

/// Nobody answers: acknowledgements are packets of their own, a few.
#[test]
fn a_stream_in_one_direction_is_acknowledged_by_packets() {
    let mut bed = Bed::new(&BedConfig::default());
    let peers = both_ways(&mut bed);
    let tally = Tally::of(&bed);
    for n in 0..960 {
        bed.send(0, peers[0], &noise(n, 64), n);
        // Each peer stands once in the lists of those that are owed one, and that owe one.
        assert!(bed.hosts[1].small.owed() <= 1 && bed.hosts[0].small.watched().len() <= 1);
        while bed.hosts[1].take_message().expect("no failure").is_some() {}
    }
    bed.pass(Duration::from_millis(1));
    while bed.hosts[1].take_message().expect("no failure").is_some() {}
    {
        let tally = tally.lock().expect("one thread");
        assert_eq!((tally.acknowledging, tally.alone[0]), ([0, 0], 0));
        assert!((5..=20).contains(&tally.alone[1]), "{tally:?}");
    }
    assert_eq!(confirmed(&mut bed, 0), 960);
    bed.check_memory();
    bed.check_clean();
}

/// Sixteen bytes of room decide.
#[test]
fn a_message_that_fills_its_packet_carries_none() {
    for mut bed in beds() {
        let peers = both_ways(&mut bed);
        let longest = bed.hosts[1].eager_max_len() as usize;
        for (len, carries) in [(0, 1), (1, 1), (longest - 16, 1), (longest - 15, 0), (longest, 0)] {
            bed.pass(Duration::from_millis(1));
            let tally = Tally::of(&bed);
            round_trip(&mut bed, peers, b"there", &noise(3, len));
            bed.pass(Duration::from_millis(1));
            let tally = tally.lock().expect("one thread");
            assert_eq!(tally.acknowledging, [0, carries], "{len} bytes");
            assert_eq!(tally.alone, [1, 1 - carries], "{len} bytes");
        }
        assert_eq!([0, 1].map(|host| confirmed(&mut bed, host)), [5, 5]);
        bed.check_memory();
        bed.check_clean();
    }
}

/// A session tells what the peer's interface takes: no packet is longer, with what is behind the message.
#[test]
fn no_packet_is_longer_than_those_of_the_session() {
    let mut bed = Bed::new(&BedConfig::default());
    let back = bed.session(1, lm_protocol::geometry::Wire::Lm, 100_000);
    let there = bed.resolve(0);
    let outbound = bed.hosts[1].peers.at(back.index).outbound.as_mut();
    let terms = &mut outbound.expect("a session").terms;
    terms.layout = lm_protocol::geometry::Layout::new(terms.layout.wire(), 1000, terms.layout.link())
        .expect("an MTU of at least 576");
    let max_packet_len = u64::from(terms.layout.max_frame_len());
    let longest = bed.hosts[1].eager_len_to(back.index);
    // 1000 bytes and Ethernet's 14, less what is left over of whole words of payload.
    assert!((1006..=1014).contains(&max_packet_len) && longest < bed.hosts[1].eager_max_len());
    let acknowledging = Arc::new(Mutex::new(0));
    let counting = Arc::clone(&acknowledging);
    bed.wire.set_filter(move |from, packet| {
        if from == 1 {
            assert!(packet.len() as u64 <= max_packet_len);
            *counting.lock().expect("one thread") += u32::from(acknowledged_by(packet).flatten().is_some());
        }
        true
    });
    for len in longest - 30..=longest {
        round_trip(&mut bed, [there, back], b"there", &noise(len, len as usize));
    }
    // From 30 to 16 bytes below the longest; the first message was answered at once.
    assert_eq!(*acknowledging.lock().expect("one thread"), 15 - 1);
    bed.pass(Duration::from_millis(1));
    assert_eq!([0, 1].map(|host| confirmed(&mut bed, host)), [31, 31]);
}

/// What is sent again is the packet that was lost, to the last byte, although there is more to acknowledge by now.
#[test]
fn a_lost_message_is_sent_again_with_its_acknowledgement() {
    for mut bed in beds() {
        let peers = both_ways(&mut bed);
        let resent = [0, 1].map(|host| bed.hosts[host].counters.eager_resent);
        let packets: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let seen = Arc::clone(&packets);
        bed.wire.set_filter(move |from, packet| {
            let mut seen = seen.lock().expect("one thread");
            if from == 1 && acknowledged_by(packet).flatten().is_some() {
                seen.push(packet.clone());
                // The first is lost.
                return seen.len() > 1;
            }
            true
        });
        bed.send(0, peers[0], b"question", 1);
        drop(bed.recv(1));
        bed.send(1, peers[1], b"answer", 2);
        bed.send(0, peers[0], b"another question", 3);
        drop(bed.recv(1));
        assert_eq!(&bed.recv(0)[..], b"answer");
        bed.pass(Duration::from_millis(1));
        let packets = packets.lock().expect("one thread");
        assert_eq!(packets.len(), 2);
        assert_eq!(packets[0], packets[1]);
        assert_eq!([0, 1].map(|host| confirmed(&mut bed, host)), [2, 1]);
        assert_eq!(bed.hosts[1].counters.eager_resent, resent[1] + 1);
        // The other end repeats nothing for an acknowledgement that came late.
        assert_eq!(bed.hosts[0].counters.eager_resent, resent[0]);
        bed.check_memory();
    }
}

/// Loss, repetition and overtaking in both directions: each message comes once, in order, and is confirmed.
#[test]
fn losses_repetitions_and_overtaking_do_no_harm() {
    for seed in 0..6 {
        let mut bed = Bed::new(&BedConfig::default());
        let peers = both_ways(&mut bed);
        for from in [0, 1] {
            let impairments = Impairments {
                seed: seed * 2 + from as u64,
                loss_ppm: 20_000,
                duplicate_ppm: 50_000,
                delay_ns: 10_000,
                jitter_ns: 60_000,
                ..Impairments::default()
            };
            bed.wire.impair(from, impairments);
        }
        let tally = Tally::of(&bed);
        let total = 1500u64;
        let (mut sent, mut received) = ([0; 2], [0; 2]);
        let mut done = [0; 2];
        for round in 0.. {
            for host in [0, 1] {
                // Now an exchange, now a stream in one direction.
                let ahead = if round / 1000 % 2 == 0 {
                    1
                } else {
                    40 * host as u64
                };
                while sent[host] < total
                    && sent[host] <= received[host] + ahead
                    && let Ok(_) = bed.try_send(host, peers[host], &noise(sent[host], 100), sent[host])
                {
                    sent[host] += 1;
                }
            }
            bed.round();
            for host in [0, 1] {
                while let Some(message) = bed.hosts[host].take_message().expect("no failure") {
                    assert_eq!(message.tag(), received[host]);
                    assert!(message[..] == noise(received[host], 100)[..]);
                    received[host] += 1;
                }
                done[host] += confirmed(&mut bed, host) as u64;
            }
            if done == [total; 2] {
                break;
            }
            assert!(round < 2_000_000, "seed {seed}: {sent:?} {received:?} {done:?}");
            if round > 100_000 {
                bed.now_ns += 100_000;
            }
        }
        assert_eq!(received, [total; 2]);
        let tally = tally.lock().expect("one thread");
        assert!(tally.acknowledging.iter().all(|&count| count > 100), "{tally:?}");
        for host in &bed.hosts {
            assert!(host.counters.drops.eager_duplicate > 0);
            assert!(host.counters.eager_resent > 0);
            assert_eq!((host.counters.drops.implausible, host.notices.lines), (0, 0));
        }
        for from in [0, 1] {
            bed.wire.impair(from, Impairments::default());
        }
        bed.check_memory();
    }
}

/// Whatever byte of such a packet is changed: it is as good as lost.
#[test]
fn a_changed_acknowledgement_confirms_nothing() {
    let mut bed = one_unconfirmed();
    bed.wire.clear_filter();
    let packet = eager(1, Some(acknowledgement(2, 66)), &bed);
    let trailer_at = packet.len() - EagerAcknowledgement::LEN - 8;
    // Of what the gate looks at is no byte among them: version and type, and length.
    let header = UDP_HEADERS_LEN + 1..UDP_HEADERS_LEN + HEADER_LEN;
    let length = [2, 3].map(|at| UDP_HEADERS_LEN + at);
    let mut injected = 0;
    for at in header
        .chain(trailer_at..packet.len())
        .filter(|at| !length.contains(at))
    {
        let mut changed = packet.clone();
        // In flags bit 3: whether there is one.
        changed[at] ^= 8;
        bed.wire.inject(0, 0, &changed);
        injected += 1;
    }
    bed.alone(0, 2);
    assert_eq!(bed.hosts[0].unconfirmed_messages(), 1);
    assert_eq!(bed.hosts[0].counters.drops.corrupt, injected);
    bed.wire.inject(0, 0, &packet);
    bed.alone(0, 2);
    assert_eq!(confirmed(&mut bed, 0), 1);
    assert_eq!(&bed.recv(0)[..], b"with an acknowledgement");
}

/// Messages that come twice or too early still say what their sender has got.
#[test]
fn a_message_that_is_dropped_acknowledges_all_the_same() {
    for (number, counter) in [(9, "eager_out_of_order"), (0, "eager_duplicate")] {
        let mut bed = one_unconfirmed();
        bed.wire
            .inject(0, 0, &eager(number, Some(acknowledgement(2, 66)), &bed));
        bed.alone(0, 2);
        assert_eq!(confirmed(&mut bed, 0), 1);
        assert!(bed.hosts[0].take_message().expect("no failure").is_none());
        for (name, count) in bed.hosts[0].counters.drops() {
            assert_eq!(count, u64::from(name == counter), "{name}");
        }
    }
}

/// An incarnation that is gone is not confirmed: not that of another life, nor that of another numbering. The message is good.
#[test]
fn what_another_incarnation_sent_is_not_confirmed() {
    let mut bed = one_unconfirmed();
    let right = acknowledgement(2, 66);
    let gone = [right.sender_id ^ 0x5a5a, right.sender_id.wrapping_sub(2)];
    for (number, sender_id) in (1..).zip(gone) {
        let late = EagerAcknowledgement { sender_id, ..right };
        bed.wire.inject(0, 0, &eager(number, Some(late), &bed));
        bed.alone(0, 2);
        let message = bed.hosts[0].take_message().expect("no failure");
        assert_eq!(&message.expect("it is taken")[..], b"with an acknowledgement");
        assert_eq!(confirmed(&mut bed, 0), 0);
    }
    bed.wire.inject(0, 0, &eager(3, Some(right), &bed));
    bed.alone(0, 2);
    assert_eq!(confirmed(&mut bed, 0), 1);
    bed.check_clean();
}

/// Both ends begin a new numbering by turns, in the middle of an exchange.
#[test]
fn an_exchange_survives_new_incarnations() {
    let mut bed = Bed::new(&BedConfig::default());
    let peers = both_ways(&mut bed);
    for life in 0..6u64 {
        for n in 0..20 {
            round_trip(&mut bed, peers, &noise(n, 64), &noise(n + life, 64));
        }
        bed.pass(Duration::from_millis(1));
        for host in [0, 1] {
            assert_eq!(confirmed(&mut bed, host), 20);
        }
        // It counts from 0 again, as somebody else; what it was told before is of its last life.
        let host = (life % 2) as usize;
        bed.hosts[host].fixed.sender_id = bed.hosts[host].fixed.sender_id.wrapping_add(0x1_0000);
        let now_ns = bed.now_ns;
        let index = bed.hosts[host].peers.find(data_address(1 - host)).expect("known");
        bed.hosts[host].peers.at(index).eager_out = EagerOut::new(now_ns);
    }
    bed.check_memory();
    bed.check_clean();
}

/// What no honest peer says is counted, and nothing of its packet is taken.
#[test]
fn a_forged_acknowledgement_costs_its_message() {
    let mut bed = one_unconfirmed();
    let forged = [(3, 67), (1 << 31, (1 << 31) + 64), (2, 1), (2, (1 << 31) + 2)];
    for (next, limit) in forged {
        bed.wire
            .inject(0, 0, &eager(1, Some(acknowledgement(next, limit)), &bed));
    }
    bed.alone(0, 2);
    assert_eq!(bed.hosts[0].counters.drops.implausible, forged.len() as u64);
    assert_eq!(bed.hosts[0].notices.lines, 1);
    assert!(bed.hosts[0].take_message().expect("no failure").is_none());
    assert_eq!(bed.hosts[0].unconfirmed_messages(), 1);
    // The same number in an honest packet is still the next one.
    bed.wire.clear_filter();
    let peer = bed.resolve(1);
    bed.send(1, peer, b"honest", 1);
    assert_eq!(&bed.recv(0)[..], b"honest");
    bed.pass(Duration::from_millis(20));
    assert_eq!([0, 1].map(|host| confirmed(&mut bed, host)), [1, 1]);
    bed.check_memory();
}

/// Who is not known acknowledges nothing.
#[test]
fn a_stranger_acknowledges_nothing() {
    let mut bed = one_unconfirmed();
    let challenged = bed.hosts[0].counters.challenged;
    let stranger = SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 77), 4000);
    for number in 0..3 {
        let header = LmHeader::Eager {
            sender_id: 0x77,
            number,
            tag: 5,
            digested: true,
            acknowledges: Some(acknowledgement(2, 66)),
        };
        let addressing = bed.hosts[0]
            .addressing_to(stranger, simnic::mac_of(*stranger.ip()))
            .reversed();
        bed.wire.inject(0, 0, &lm_packet(&addressing, &header, b"hello"));
    }
    bed.alone(0, 2);
    assert_eq!(bed.hosts[0].counters.challenged, challenged + 3);
    assert_eq!(bed.hosts[0].unconfirmed_messages(), 1);
    assert!(bed.hosts[0].told.messages().count() == 0);
}

/// An acknowledgement behind a message may be as old as the message. That it confirms nothing does not say that something is
/// lost, or that the receiver has lost count; in a packet of its own it does.
#[test]
fn a_late_acknowledgement_changes_nothing() {
    let mut bed = one_unconfirmed();
    let resent = bed.hosts[0].counters.eager_resent;
    // Long enough for an answer that confirms nothing to mean a loss.
    for _ in 0..100 {
        bed.alone(0, 1);
    }
    bed.wire
        .inject(0, 0, &eager(1, Some(acknowledgement(1, 65)), &bed));
    bed.alone(0, 2);
    assert_eq!(bed.hosts[0].counters.eager_resent, resent);
    bed.wire.inject(0, 0, &alone(1, 65, &bed));
    bed.alone(0, 2);
    assert_eq!(bed.hosts[0].counters.eager_resent, resent + 1);

    // Confirmed, and without credit.
    bed.wire.inject(0, 0, &alone(2, 65, &bed));
    bed.alone(0, 2);
    assert_eq!(confirmed(&mut bed, 0), 1);
    out(&mut bed).limit = 2;
    bed.wire
        .inject(0, 0, &eager(2, Some(acknowledgement(1, 2)), &bed));
    bed.alone(0, 2);
    assert_eq!((out(&mut bed).epoch, out(&mut bed).next), (0, 2));
    bed.wire.inject(0, 0, &alone(1, 2, &bed));
    bed.alone(0, 2);
    assert_eq!((out(&mut bed).epoch, out(&mut bed).next), (1, 0));
    assert_eq!(bed.hosts[0].counters.drops.implausible, 0);
    assert_eq!(bed.hosts[0].told.messages().count(), 2);
}

/// What is said again because a message was dropped goes alone, also while messages go that way.
#[test]
fn what_is_said_again_is_said_alone() {
    let mut bed = Bed::new(&BedConfig::default());
    let peers = both_ways(&mut bed);
    let tally = Tally::of(&bed);
    bed.wire.inject(0, 0, &eager(0, None, &bed));
    bed.alone(0, 1);
    assert_eq!(bed.hosts[0].counters.drops.eager_duplicate, 1);
    bed.send(0, peers[0], b"a message", 1);
    drop(bed.recv(1));
    bed.pass(Duration::from_millis(1));
    let tally = tally.lock().expect("one thread");
    assert_eq!(
        (tally.eager[0], tally.acknowledging[0], tally.alone[0]),
        (1, 0, 1)
    );
}
