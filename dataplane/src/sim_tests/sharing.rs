//! Several senders into one landing channel.
#![cfg(test)]

use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::landing::PLACES;
use lm_protocol::wire::lm::LmHeader;

use super::bed::{Bed, BedConfig, data_address, fill, lm_packet, noise};
use crate::completion::{LoanError, Outcome, PeerId, RecvError};
use crate::connect::ConnectOptions;
use crate::message::Message;
use crate::outbound::Outbound;
use crate::simnic::{Corrupt, Impairments};

const FIRST: usize = 1;

/// One sender: as many messages of one length as there is room for, again and again.
struct Stream {
    host: usize,
    peer: PeerId,
    len: usize,
    left: u32,
    sent: u32,
    settled: u32,
    received: u32,
}

struct Shared {
    bed: Bed,
    streams: Vec<Stream>,
    /// Bytes received of each stream while all of them had something to send.
    shares: Vec<u64>,
    order: Vec<usize>,
    held: Vec<Message>,
    hold: usize,
    incomplete: u32,
}

fn payload(host: usize, number: u32, len: usize) -> Vec<u8> {
    noise((host as u64) << 32 | u64::from(number), len)
}

fn options(max_message_len: u64) -> ConnectOptions {
    ConnectOptions {
        max_message_len,
        delivery: Delivery::Reliable,
        ..ConnectOptions::default()
    }
}

impl Shared {
    /// A sender for each length, which sends so many messages of it.
    fn new(config: &BedConfig, streams: &[(usize, u32)]) -> Shared {
        let mut bed = Bed::switch(config, FIRST + streams.len());
        let streams: Vec<Stream> = streams
            .iter()
            .enumerate()
            .map(|(at, &(len, left))| Stream {
                host: FIRST + at,
                peer: bed.connect(FIRST + at, &options(len as u64)).expect("a session"),
                len,
                left,
                sent: 0,
                settled: 0,
                received: 0,
            })
            .collect();
        Shared {
            shares: vec![0; streams.len()],
            bed,
            streams,
            order: Vec::new(),
            held: Vec::new(),
            hold: 0,
            incomplete: 0,
        }
    }

    fn is_contended(&self) -> bool {
        self.streams.iter().all(|stream| stream.left > 0)
    }

    fn round(&mut self) {
        self.round_of(0);
    }

    /// A round in which the streams before `first` do nothing.
    fn round_of(&mut self, first: usize) {
        for stream in &mut self.streams[first..] {
            while stream.left > 0 {
                let engine = &mut self.bed.hosts[stream.host];
                let room =
                    (engine.peers.at(stream.peer.index).outbound.as_ref()).is_some_and(Outbound::has_room);
                let Some(mut region) = room
                    .then(|| engine.loan(stream.peer, stream.len as u64))
                    .transpose()
                    .unwrap_or_else(|error| match error {
                        LoanError::WouldBlock => None,
                        error => panic!("{error}"),
                    })
                else {
                    break;
                };
                fill(&mut region, &payload(stream.host, stream.sent, stream.len));
                let now_ns = self.bed.now_ns;
                (engine.submit(region, u64::from(stream.sent), now_ns)).expect("there was room");
                stream.sent += 1;
                stream.left -= 1;
            }
        }
        self.bed.round();
        for stream in &mut self.streams[first..] {
            while let Some(completion) = self.bed.hosts[stream.host].told.completions().pop_front() {
                assert_eq!(completion.outcome, Outcome::Delivered, "host {}", stream.host);
                stream.settled += 1;
            }
        }
        self.take();
    }

    fn take(&mut self) {
        let contended = self.is_contended();
        loop {
            let message = match self.bed.hosts[0].take_message() {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(RecvError::Incomplete { .. }) => {
                    self.incomplete += 1;
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let from = self.bed.hosts[0]
                .peers
                .named(message.peer())
                .map(|peer| peer.data);
            let at = (self.streams.iter())
                .position(|stream| Some(data_address(stream.host)) == from)
                .expect("one of the senders");
            let stream = &mut self.streams[at];
            assert_eq!(message.tag(), u64::from(stream.received), "host {}", stream.host);
            let expected = payload(stream.host, stream.received, stream.len);
            assert!(message[..] == expected[..], "host {}", stream.host);
            stream.received += 1;
            self.order.push(at);
            if contended {
                self.shares[at] += message.len() as u64;
            }
            self.held.push(message);
        }
        let keep = self.hold.min(self.held.len());
        self.held.drain(..self.held.len() - keep);
    }

    fn finish(&mut self) {
        self.finish_from(0);
    }

    /// Runs until every stream but those before `first` has received everything.
    fn finish_from(&mut self, first: usize) {
        let all = |stream: &Stream| stream.left == 0 && stream.settled == stream.sent;
        for _ in 0..400_000 {
            if self.streams[first..].iter().all(all) {
                self.take();
                let complete = |stream: &Stream| stream.received == stream.sent;
                assert!(self.streams[first..].iter().all(complete));
                return;
            }
            self.round_of(first);
        }
        let state: Vec<_> = (self.streams.iter())
            .map(|stream| (stream.left, stream.sent, stream.settled, stream.received))
            .collect();
        panic!("it never ends: {state:?}\n{:?}", self.bed.hosts[0].landing);
    }

    fn close(mut self) -> Bed {
        self.held.clear();
        for stream in &self.streams {
            let now_ns = self.bed.now_ns;
            self.bed.hosts[stream.host].end_session(stream.peer.index, now_ns);
        }
        self.bed.pass(Duration::from_millis(800));
        for host in 0..self.bed.hosts.len() {
            self.bed.hosts[host].told.completions().clear();
        }
        self.bed.check_memory();
        let landing = self.bed.hosts[0].landing.as_ref().expect("a landing channel");
        assert!(landing.sessions.is_empty());
        self.bed
    }
}

fn rooms(landing_len: u64) -> BedConfig {
    BedConfig {
        landing_len,
        send_len: 8 << 20,
        ..BedConfig::default()
    }
}

#[test]
fn eight_senders_share_equally_and_nothing_is_copied() {
    let mut shared = Shared::new(&rooms(4 << 20), &[(100_000, 40); 8]);
    shared.finish();
    let most = shared.shares.iter().max().unwrap();
    let least = shared.shares.iter().min().unwrap();
    assert!(*least * 2 > *most, "{:?}", shared.shares);
    let counters = &shared.bed.hosts[0].counters;
    assert_eq!(counters.violations.total(), 0);
    // They come in turns, so each packet finds an entry of its own.
    assert!(
        counters.fragments_displaced + counters.fragments_one_copy < counters.landing_packets / 100,
        "{counters:?}"
    );
    shared.close();
}

#[test]
fn a_short_message_does_not_wait_for_the_long_ones() {
    let lens = [(4 << 20, 1), (4 << 20, 1), (4 << 20, 1), (20_000, 60)];
    let mut shared = Shared::new(&rooms(16 << 20), &lens);
    shared.finish();
    // While the long ones go on, the short stream has a turn in each round.
    let first_long = shared.order.iter().position(|&at| at < 3).unwrap();
    assert!(
        first_long >= 12,
        "{first_long} short messages before the first long one"
    );
    shared.close();
}

#[test]
fn as_many_sessions_as_places() {
    let places = PLACES as usize;
    let mut shared = Shared::new(&rooms(1 << 20), &vec![(30_000, 5); places]);
    shared.finish();
    let mut bed = shared.close();
    // One more than there is place for.
    let mut crowded = Bed::switch(&rooms(1 << 20), FIRST + places + 1);
    for host in FIRST..FIRST + places {
        crowded.connect(host, &options(30_000)).expect("a session");
    }
    crowded
        .connect(FIRST + places, &options(30_000))
        .expect("a session");
    let landing = crowded.hosts[0].landing.as_ref().expect("a landing side");
    assert_eq!(landing.sessions.iter().count(), places + 1);
    assert_eq!(landing.sessions.admitted().count(), places);
    // Places are used again, sooner or later each of them.
    for round in 0..3 * places {
        let host = FIRST + round % places;
        let peer = bed.connect(host, &options(30_000)).expect("a session");
        let bytes = payload(host, round as u32, 30_000);
        bed.send(host, peer, &bytes, 1);
        assert!(bed.recv(0)[..] == bytes[..]);
        assert_eq!(bed.completion(host).outcome, Outcome::Delivered);
    }
}

#[test]
fn little_memory_and_slow_applications() {
    // Room for three messages, and the application keeps two of them for a while.
    let config = BedConfig {
        landing_ring_len: 64,
        on_the_way: 20,
        ..rooms(700_000)
    };
    let mut shared = Shared::new(
        &config,
        &[(150_000, 12), (150_000, 12), (90_000, 20), (2_000, 60)],
    );
    shared.hold = 1;
    shared.finish();
    shared.close();
}

#[test]
fn losses_of_one_are_no_losses_of_the_others() {
    for seed in 0..12 {
        let mut shared = Shared::new(&rooms(2 << 20), &[(90_000, 20); 4]);
        let impairments = Impairments {
            seed,
            loss_ppm: 20_000,
            duplicate_ppm: 10_000,
            duplicate_delay_max_ns: 100_000,
            reorder_ppm: 10_000,
            reorder_packets_max: 5,
            reorder_hold_max_ns: 100_000,
            corrupt: Corrupt::default(),
            ..Impairments::default()
        };
        shared.bed.wire.impair(2, impairments);
        if seed % 2 == 1 {
            // Credits and requests get lost, too.
            shared.bed.wire.impair(
                0,
                Impairments {
                    loss_ppm: 10_000,
                    ..impairments
                },
            );
        }
        shared.finish();
        assert_eq!(shared.bed.hosts[0].counters.violations.total(), 0, "seed {seed}");
        shared.close();
    }
}

#[test]
fn a_sender_that_dies_in_its_turn_leaves_the_channel_to_the_others() {
    for after in [0, 1, 3, 10, 40, 100] {
        let config = BedConfig {
            patience: Duration::from_millis(300),
            ..rooms(2 << 20)
        };
        let mut shared = Shared::new(&config, &[(200_000, 8), (200_000, 8), (200_000, 8)]);
        for _ in 0..after {
            shared.round();
        }
        // Host 1 says nothing more; what it had announced is reported.
        shared.bed.wire.set_filter(|from, _| from != 1);
        shared.finish_from(1);
        assert!(shared.streams[1..].iter().all(|stream| stream.received == 8));
        shared.bed.pass(Duration::from_secs(6));
        let landing = shared.bed.hosts[0].landing.as_ref().expect("a landing channel");
        assert_eq!(landing.sessions.iter().count(), 2, "its session expired");
    }
}

/// All senders but one say nothing from some time on, with credit, entries and turns that they had: one after the other would have to be
/// found out. The last one's messages come as if they were alone. Those of the others come when they go on.
#[test]
fn senders_that_fall_silent_hold_up_nobody() {
    for after in [0, 1, 2, 3, 5, 10, 40, 100] {
        let config = BedConfig {
            patience: Duration::from_secs(60),
            ..rooms(2 << 20)
        };
        let mut streams = [(100_000, 6); 10];
        streams[9].1 = 40;
        let mut shared = Shared::new(&config, &streams);
        for _ in 0..after {
            shared.round();
        }
        let last = FIRST + 9;
        (shared.bed.wire).set_filter(move |from, _| from == 0 || from == last);
        let began_ns = shared.bed.now_ns;
        shared.finish_from(9);
        let took_ns = shared.bed.now_ns - began_ns;
        assert!(took_ns < 500_000_000, "{took_ns} ns after {after} rounds");
        if after % 2 == 1 {
            let (now_ns, peer) = (shared.bed.now_ns, shared.streams[9].peer);
            shared.bed.hosts[last].end_session(peer.index, now_ns);
        }
        shared.bed.wire.set_filter(|_, _| true);
        shared.finish();
        assert_eq!(shared.incomplete, 0);
        assert_eq!(shared.bed.hosts[0].counters.violations.total(), 0);
        shared.close();
    }
}

/// A sender has more credit than it uses (of entries that another did not use, or of packets that came twice), and sends with it while it is the
/// other's turn: its messages lie aside before they have memory. That credit is left is no silence then, since there is nothing to send.
#[test]
fn messages_that_lie_aside_get_their_turn() {
    let mut shared = Shared::new(&rooms(4 << 20), &[(100_000, 40), (60_000, 1)]);
    shared.finish_from(1);
    (0..10).for_each(|_| shared.round());
    let key = shared.bed.key(FIRST + 1, shared.streams[1].peer);
    let landing = shared.bed.hosts[0].landing.as_mut().expect("landing");
    let packet_limit = landing.sessions.keyed(key).expect("a session").tell_more(200);
    let credit = LmHeader::Credit {
        session_key: key,
        packet_limit,
        delivered: 1,
        announced: 1,
        lands: true,
    };
    let (peers, wire) = (&mut shared.bed.hosts[0].peers, &shared.bed.wire);
    let to = peers.find(data_address(FIRST + 1)).expect("known");
    let packet = lm_packet(&peers.at(to).addressing, &credit, &[]);
    wire.inject(FIRST + 1, 0, &packet);
    shared.streams[1].left = 2;
    // The other's turn takes longer than a sender may be silent: the machine is busy.
    for _ in 0..40 {
        shared.round();
        shared.bed.now_ns += 2_000_000;
    }
    shared.finish();
    shared.close();
}

/// One of two says nothing for a while, and the other one goes meanwhile.
#[test]
fn a_sender_that_was_silent_goes_on_when_the_others_are_gone() {
    for after in [1, 2, 5, 10] {
        let config = BedConfig {
            patience: Duration::from_secs(60),
            ..rooms(2 << 20)
        };
        let mut shared = Shared::new(&config, &[(100_000, 6), (100_000, 20)]);
        for _ in 0..after {
            shared.round();
        }
        shared.bed.wire.set_filter(|from, _| from != FIRST);
        shared.finish_from(1);
        shared.bed.pass(Duration::from_millis(100));
        let (now_ns, peer) = (shared.bed.now_ns, shared.streams[1].peer);
        shared.bed.hosts[FIRST + 1].end_session(peer.index, now_ns);
        shared.bed.pass(Duration::from_millis(100));
        shared.bed.wire.set_filter(|_, _| true);
        shared.finish();
        shared.close();
    }
}

#[test]
fn a_session_ends_and_a_larger_one_begins_under_the_others() {
    let mut shared = Shared::new(&rooms(1 << 20), &[(100_000, 30), (100_000, 30)]);
    for _ in 0..20 {
        shared.round();
    }
    let (host, peer) = (shared.streams[0].host, shared.streams[0].peer);
    shared.finish();
    let now_ns = shared.bed.now_ns;
    shared.bed.hosts[host].end_session(peer.index, now_ns);
    // It needs more memory than there is: the channel is built anew under the other session.
    let peer = shared
        .bed
        .connect(host, &options(4 << 20))
        .expect("a larger session");
    shared.streams[0] = Stream {
        host,
        peer,
        len: 4 << 20,
        left: 2,
        sent: 0,
        settled: 0,
        received: 0,
    };
    shared.streams[1].left = 20;
    shared.finish();
    shared.close();
}

/// Sessions of LM's packets and of IP fragments, and the senders' hosts.
fn unlike() -> (Bed, [PeerId; 2]) {
    let mut bed = Bed::switch(&rooms(2 << 20), 4);
    let ipfrag = ConnectOptions {
        wire: WireMode::IpFrag,
        ..options(60_000)
    };
    let lm = bed.connect(1, &options(100_000)).expect("a session");
    // Behind it entries are open, which fragments would come to.
    bed.exchange(1, lm, &noise(1, 7168));
    let ipfrag_peer = bed.connect(2, &ipfrag).expect("a session of IP fragments");
    let second = ConnectOptions {
        timeout: Duration::from_millis(300),
        ..ipfrag
    };
    assert!(bed.connect(3, &second).is_err(), "fragments name no session");
    // This uses the credit up that was given before.
    bed.exchange(1, lm, &noise(1, 90_000));
    (bed, [lm, ipfrag_peer])
}

#[test]
fn ip_fragments_and_datagrams_side_by_side() {
    let (mut bed, peers) = unlike();
    for number in 0..20 {
        let bytes = [1, 2].map(|host| payload(host, number, 50_000));
        for (at, bytes) in bytes.iter().enumerate() {
            bed.send(at + 1, peers[at], bytes, at as u64);
        }
        for _ in 0..2 {
            let message = bed.recv(0);
            assert!(message[..] == bytes[message.tag() as usize][..]);
        }
    }
    assert_eq!(bed.hosts[0].counters.violations.total(), 0);
}

/// Where LM's packets are lost, IP fragments come to slots that are made for longer headers: what the next one lies on is not shown.
#[test]
fn ip_fragments_in_others_slots_are_not_shown() {
    let mut discarded = 0;
    for lost in (1..110).step_by(9) {
        let (mut bed, peers) = unlike();
        let mut count = 0;
        bed.wire.set_filter(move |from, packet| {
            count += u32::from(from == 1 && packet.len() > 1000);
            from != 1 || packet.len() <= 1000 || !(lost..lost + 4).contains(&count)
        });
        for number in 0..3 {
            let bytes = [1, 2].map(|host| payload(host, number, 50_000));
            for (at, bytes) in bytes.iter().enumerate() {
                bed.send(at + 1, peers[at], bytes, at as u64);
            }
            let mut came = 0;
            while came < 2 {
                bed.now_ns += 10_000;
                bed.round();
                came += match bed.hosts[0].take_message() {
                    Ok(None) => 0,
                    Ok(Some(message)) => {
                        assert!(message[..] == bytes[message.tag() as usize][..], "{lost}");
                        1
                    }
                    Err(RecvError::Incomplete { .. }) => 1,
                    Err(error) => panic!("{error}"),
                };
            }
        }
        discarded += bed.hosts[0].counters.drops.landing_discarded;
        assert_eq!(bed.hosts[0].counters.violations.total(), 0);
    }
    assert!(discarded > 0);
}
