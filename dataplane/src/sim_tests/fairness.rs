//! Sessions that share a port: each has its part of what leaves.
#![cfg(test)]

use std::sync::{Arc, Mutex};

use lm_protocol::wire::lm::{LmHeader, TYPE_CONTROL, TYPE_DATA};

use super::bed::{Bed, BedConfig, TWO_QUEUES, data_address, noise};

use crate::bounds::RECEIVE_BURST;
use crate::bounds::TRANSMIT_BURST;
use crate::completion::{LoanError, Outcome, PeerId, SendError};
use crate::connect::ConnectOptions;
use crate::opening::Queues;
use crate::simnic::{Delivery, mac_of};

pub(super) const RECEIVERS: usize = 8;
pub(super) const LEN: usize = 100_000;
/// The link takes so many packets in each round of so many nanoseconds: 23 Gbit/s.
pub(super) const PACKETS: u32 = 20;
pub(super) const ROUND_NS: u64 = 10_000;
/// Shares are looked at over this time.
const WINDOW_NS: u64 = 50_000_000;

/// A session of host 0 with another host.
pub(super) fn session(bed: &mut Bed, to: usize) -> PeerId {
    let to = data_address(to);
    let now_ns = bed.now_ns;
    let engine = &mut bed.hosts[0];
    let addressing = engine.addressing_to(to, mac_of(*to.ip()));
    let index = engine
        .peers
        .find_or_add(to, &addressing, now_ns)
        .expect("room for a peer");
    let peer = engine.peers.id_of(index);
    let options = ConnectOptions {
        max_message_len: LEN as u64,
        ..ConnectOptions::default()
    };
    bed.ask(0, peer, &options);
    while bed.application_outcome(0, index).is_none() {
        bed.now_ns += 100_000;
        bed.round();
    }
    peer
}

/// Hands messages over as long as there is room.
pub(super) fn keep_full(bed: &mut Bed, peers: &[PeerId], payload: &[u8]) {
    for &peer in peers {
        loop {
            match bed.try_send(0, peer, payload, 0) {
                Ok(_) => {}
                Err(SendError::WouldBlock | SendError::Loan(LoanError::WouldBlock)) => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// What came to each receiver since the last look, in bytes.
pub(super) fn received(bed: &mut Bed) -> [usize; RECEIVERS] {
    while let Some(completion) = bed.hosts[0].told.completions().pop_front() {
        assert_eq!(completion.outcome, Outcome::Delivered);
    }
    std::array::from_fn(|host| {
        let mut bytes = 0;
        while let Some(message) = bed.hosts[host + 1].take_message().expect("no failure") {
            bytes += message.len();
        }
        bytes
    })
}

/// Host 0 with a session to each of the others.
pub(super) fn bed(queues: [Queues; 2]) -> (Bed, Vec<PeerId>) {
    bed_that(queues, false)
}

/// The same, where no more are in the device and on the way than keep both busy if it `adapts`.
pub(super) fn bed_that(queues: [Queues; 2], adapts: bool) -> (Bed, Vec<PeerId>) {
    let config = BedConfig {
        send_len: 64 << 20,
        guarded: false,
        queues,
        adapts: [adapts; 2],
        ..BedConfig::default()
    };
    let mut bed = Bed::switch(&config, RECEIVERS + 1);
    let peers = (1..=RECEIVERS).map(|host| session(&mut bed, host)).collect();
    (bed, peers)
}

/// A sender whose fragments leave on the queue of its small packets: that is the receivers' landing queue.
pub(super) const SHARED: [Queues; 2] = [
    Queues {
        general: Some(0),
        landing: None,
    },
    Queues {
        general: Some(1),
        landing: Some(0),
    },
];

/// *House rule of the scheduler*: eight backlogged sessions of one port each get 0.8 to 1.25 of an equal share over any 50 ms.
#[test]
fn backlogged_sessions_of_a_port_have_equal_shares() {
    for (queues, adapts) in [
        ([TWO_QUEUES; 2], false),
        (SHARED, false),
        ([TWO_QUEUES; 2], true),
        (SHARED, true),
    ] {
        let (mut bed, peers) = bed_that(queues, adapts);
        bed.wire.set_delivery(Delivery::Manual);
        let payload = noise(1, LEN);
        for window in 0..3 {
            let mut bytes = [0usize; RECEIVERS];
            for _ in 0..WINDOW_NS / ROUND_NS {
                keep_full(&mut bed, &peers, &payload);
                bed.now_ns += ROUND_NS;
                bed.wire.deliver(PACKETS);
                bed.round();
                (bytes.iter_mut().zip(received(&mut bed))).for_each(|(bytes, more)| *bytes += more);
            }
            let share = bytes.iter().sum::<usize>() as f64 / RECEIVERS as f64;
            let shares = bytes.map(|bytes| bytes as f64 / share);
            assert!(share > 10.0 * LEN as f64, "{share} bytes each");
            // The first one begins with sessions that have nothing under way.
            assert!(
                window == 0 || shares.iter().all(|share| (0.8..=1.25).contains(share)),
                "{shares:.2?}"
            );
        }
    }
}

/// Asks for a probe, which is answered at once.
const KIND_PROBE_ME: u8 = 0x70;
/// UDP port that the answer goes to.
const PROBED: u16 = 9999;

/// What crosses between a control packet's cause and the packet.
#[derive(Debug, Default)]
struct Waits {
    /// Fragments since a question crossed that has no answer yet.
    waiting: Option<u32>,
    longest: u32,
    answers: u32,
}

fn watch(bed: &Bed) -> Arc<Mutex<Waits>> {
    let waits = Arc::new(Mutex::new(Waits::default()));
    let seen = Arc::clone(&waits);
    bed.wire.set_filter(move |from, packet| {
        let mut waits = seen.lock().expect("one thread");
        let to_port = u16::from_be_bytes([packet[36], packet[37]]);
        match (from, packet[42] & 0xf) {
            (0, TYPE_DATA) => {
                if let Some(count) = &mut waits.waiting {
                    *count += 1;
                }
            }
            (0, TYPE_CONTROL) if to_port == PROBED => {
                let count = waits.waiting.take().expect("a question");
                waits.longest = waits.longest.max(count);
                waits.answers += 1;
            }
            (1, TYPE_CONTROL) if packet[50] == KIND_PROBE_ME => waits.waiting = Some(0),
            _ => {}
        }
        true
    });
    waits
}

/// Host 1 asks host 0 for a control packet.
pub(super) fn ask(bed: &mut Bed) {
    let index = bed.hosts[1].peers.find(data_address(0)).expect("a peer");
    let header = LmHeader::Control {
        request_id: PROBED.into(),
        kind: KIND_PROBE_ME,
    };
    assert!(bed.hosts[1].send_packet(index, &header, &[]));
}

/// *House rule of the scheduler*: where small packets have a queue, control waits for no more than a burst. Where packets cross as they are
/// handed over, as on veth, for none; where the link takes turns between queues, for its turns.
#[test]
fn control_waits_for_no_more_than_a_burst() {
    for (delivery, most) in [(Delivery::Inline, 0), (Delivery::Manual, TRANSMIT_BURST)] {
        let (mut bed, peers) = bed([TWO_QUEUES; 2]);
        bed.wire.set_delivery(delivery);
        let waits = watch(&bed);
        let payload = noise(1, LEN);
        let mut sent = 0;
        for round in 0..4000 {
            keep_full(&mut bed, &peers, &payload);
            if round % 8 == 0 {
                ask(&mut bed);
            }
            bed.now_ns += ROUND_NS;
            bed.wire.deliver(PACKETS);
            bed.round();
            sent += received(&mut bed).iter().sum::<usize>();
        }
        let waits = waits.lock().expect("one thread");
        assert!(sent > 100 * LEN, "{delivery:?}: {sent} bytes");
        assert_eq!(waits.answers, 500, "{delivery:?}");
        assert!(waits.longest <= most, "{delivery:?}: behind {}", waits.longest);
    }
}

/// Where all share a queue control waits for what is on it, but is never refused: bulk leaves it descriptors.
#[test]
fn control_finds_a_descriptor_on_a_queue_full_of_bulk() {
    let (mut bed, peers) = bed(SHARED);
    bed.wire.set_delivery(Delivery::Manual);
    let payload = noise(1, LEN);
    for _ in 0..200 {
        keep_full(&mut bed, &peers, &payload);
        bed.wire.deliver(PACKETS);
        bed.round();
        received(&mut bed);
    }
    // The link takes nothing more: bulk fills the queue.
    for _ in 0..20 {
        bed.now_ns += ROUND_NS;
        bed.poll(0);
    }
    let before = bed.hosts[0].counters.data_packets_sent;
    bed.poll(0);
    assert_eq!(bed.hosts[0].counters.data_packets_sent, before);
    let (limit, queue) = (
        bed.hosts[0].fixed.tx_in_flight.most,
        &bed.hosts[0].sending.scheduler().queues()[0],
    );
    assert!(
        queue.in_flight() > limit * 3 / 4,
        "{} in flight",
        queue.in_flight()
    );
    for _ in 0..16 {
        let index = peers[0].index;
        let header = LmHeader::Control {
            request_id: PROBED.into(),
            kind: KIND_PROBE_ME,
        };
        assert!(bed.hosts[0].send_packet(index, &header, &[]));
    }
}

/// What comes while bulk is sent is looked at after a burst: more came than a round takes, so each round sends one.
#[test]
fn bulk_gives_way_to_what_has_come() {
    let (mut bed, peers) = bed([TWO_QUEUES; 2]);
    let payload = noise(1, LEN);
    let mut bursts = Vec::new();
    for _ in 0..400 {
        keep_full(&mut bed, &peers, &payload);
        for host in 1..=RECEIVERS {
            let back = bed.resolve(host);
            for _ in 0..40 {
                let _ = bed.try_send(host, back, &payload[..64], 0);
            }
            bed.poll(host);
        }
        let waiting = bed.hosts[0].small.available(u32::MAX).expect("a general queue");
        let is_more = waiting > RECEIVE_BURST;
        let before = bed.hosts[0].counters.data_packets_sent;
        bed.now_ns += ROUND_NS;
        bed.poll(0);
        let sent = bed.hosts[0].counters.data_packets_sent - before;
        assert!(!is_more || sent <= u64::from(TRANSMIT_BURST), "{sent} fragments");
        if is_more {
            bursts.push(sent);
        }
        while bed.hosts[0].take_message().expect("no failure").is_some() {}
        bed.round();
        received(&mut bed);
        while bed.hosts[0].take_message().expect("no failure").is_some() {}
    }
    let full = bursts.iter().filter(|sent| **sent == u64::from(TRANSMIT_BURST));
    assert!(full.count() > 10, "{bursts:?}");
}

/// A turn that the link cuts short goes on with what is left of it: it is not longer for that.
#[test]
fn a_turn_that_is_cut_is_a_burst_in_all() {
    let (mut bed, peers) = bed([TWO_QUEUES; 2]);
    bed.wire.set_delivery(Delivery::Manual);
    // Fragments that crossed one after the other to the same receiver.
    let runs = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&runs);
    bed.wire.set_filter(move |from, packet| {
        if from == 0 && packet[42] & 0xf == TYPE_DATA {
            let mut runs = seen.lock().expect("one thread");
            match runs.last_mut() {
                Some((to, count)) if *to == packet[33] => *count += 1,
                _ => runs.push((packet[33], 1)),
            }
        }
        true
    });
    let payload = noise(1, LEN);
    for _ in 0..4000 {
        keep_full(&mut bed, &peers, &payload);
        bed.now_ns += ROUND_NS;
        bed.wire.deliver(PACKETS);
        bed.round();
        received(&mut bed);
    }
    let runs = runs.lock().expect("one thread");
    let [_, runs @ .., _] = &runs[..] else {
        panic!("no runs")
    };
    assert!(runs.len() > 1000, "{} turns", runs.len());
    let is_whole = |(_, count): &&(u8, u32)| *count == TRANSMIT_BURST;
    // The first one begins with sessions that have nothing under way.
    assert_eq!(runs[RECEIVERS..].iter().find(|run| !is_whole(run)), None);
}
