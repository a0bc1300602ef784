//! Sessions without a place: they begin, get one, give it to others, and have it again.
#![cfg(test)]

use std::time::Duration;

use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::landing::PLACES;
use lm_protocol::session::UNUSED_MAX;
use lm_protocol::wire::lm::TYPE_DATA;

use super::bed::{BATCHED, Bed, BedConfig, bad_link, fill, noise, wire_of};
use super::integrity::kind;
use super::times;
use crate::completion::{Completion, LoanError, Outcome, PeerId, RecvError, SendError};
use crate::connect::{ConnectError, ConnectOptions};
use crate::notices::Fault;
use crate::simnic::{Impairments, Semantics};

const LEN_MAX: u64 = 200_000;

const ZERO_COPY: Semantics = Semantics::ZeroCopy(BATCHED);

fn options() -> ConnectOptions {
    ConnectOptions {
        max_message_len: LEN_MAX,
        messages_in_flight: 4,
        ..ConnectOptions::default()
    }
}

fn config(semantics: Semantics) -> BedConfig {
    BedConfig {
        wire: wire_of(semantics),
        ..BedConfig::default()
    }
}

/// A receiver (host 0) whose places are all taken, and one more sender (the last host).
struct Crowd {
    bed: Bed,
    holders: Vec<PeerId>,
    late: usize,
    peer: PeerId,
    /// Numbers of messages that the late one has sent, and that came.
    sent: u64,
    came: u64,
}

fn payload(number: u64) -> Vec<u8> {
    noise(number, 2_000 + (number as usize * 37_411) % 190_000)
}

impl Crowd {
    fn new(semantics: Semantics) -> Crowd {
        Crowd::with(&config(semantics))
    }

    fn with(config: &BedConfig) -> Crowd {
        // In zero-copy mode one session lands at a time.
        let places = match config.wire.semantics[0] {
            Semantics::Copy => PLACES as usize,
            Semantics::ZeroCopy(_) => 1,
        };
        let mut bed = Bed::switch(config, places + 2);
        let holders: Vec<PeerId> = (1..=places)
            .map(|host| bed.session(host, WireMode::Lm, 20_000))
            .collect();
        let late = places + 1;
        let peer = bed.connect(late, &options()).expect("a session");
        let mut crowd = Crowd {
            bed,
            holders,
            late,
            peer,
            sent: 0,
            came: 0,
        };
        assert!(crowd.is_one_copy());
        crowd
    }

    /// Whether messages of the late sender do not land, as far as it knows.
    fn is_one_copy(&mut self) -> bool {
        let peer = self.bed.hosts[self.late].peers.at(self.peer.index);
        !peer.outbound.as_ref().expect("a session").lands
    }

    fn key(&mut self) -> u64 {
        let peer = self.bed.hosts[self.late].peers.at(self.peer.index);
        peer.outbound.as_ref().expect("a session").terms.key
    }

    /// Whether the late sender's session has a place, and does not land yet.
    fn drains(&mut self) -> bool {
        let key = self.key();
        let landing = self.bed.hosts[0].landing.as_ref().expect("a landing side");
        let inbound = landing.sessions.with_key(key).expect("its session");
        inbound.has_place() && !landing.sessions.is_admitted(inbound.row())
    }

    /// A round in which the late sender hands a message over if one is taken. What comes is what was sent, once and in order.
    fn round(&mut self) {
        match self
            .bed
            .try_send(self.late, self.peer, &payload(self.sent), self.sent)
        {
            Ok(_) => self.sent += 1,
            Err(SendError::WouldBlock) => {}
            Err(error) => panic!("{error}"),
        }
        self.idle_round();
    }

    fn idle_round(&mut self) {
        self.bed.round();
        while let Some(message) = self.bed.hosts[0].take_message().expect("no failure") {
            assert_eq!(message.tag(), self.came);
            assert!(message[..] == payload(self.came)[..], "message {}", self.came);
            self.came += 1;
        }
        while let Some(completion) = self.bed.hosts[self.late].told.completions().pop_front() {
            assert_eq!(completion.outcome, Outcome::Delivered, "{}", completion.tag);
        }
    }

    /// Rounds until `is_so`, with messages or without.
    fn until(&mut self, what: &str, sends: bool, is_so: impl Fn(&mut Crowd) -> bool) {
        for _ in 0..200_000 {
            if is_so(self) {
                return;
            }
            match sends {
                true => self.round(),
                false => self.idle_round(),
            }
        }
        panic!("never: {what}; {:?}", self.bed.hosts[self.late].counters);
    }

    /// The late sender has something to send, and gets a place that is not used.
    fn wait_for_its_place(&mut self) {
        for _ in 0..8 {
            let came = self.came;
            self.until("a message arrives", true, |crowd| crowd.came > came);
            self.until("all came", false, |crowd| crowd.came == crowd.sent);
            self.bed.pass(Duration::from_secs(1));
            if self.has_landed() {
                return;
            }
        }
        panic!("it waits for a place that nobody uses");
    }

    /// One of those that were there first goes.
    fn free_a_place(&mut self) {
        let now_ns = self.bed.now_ns;
        self.bed.hosts[1].end_session(self.holders[0].index, now_ns);
    }

    /// Whether its session landed after it had begun without a place.
    fn has_landed(&mut self) -> bool {
        self.bed.hosts[0].counters.sessions_landed > 0
    }

    /// Sessions that the receiver has: those with a place, and the others.
    fn sessions(&self) -> (usize, usize) {
        let landing = self.bed.hosts[0].landing.as_ref().expect("a landing side");
        let placed = landing.sessions.iter().filter(|inbound| inbound.has_place());
        let placed = placed.count();
        (placed, landing.sessions.iter().count() - placed)
    }

    fn end(&mut self) {
        let now_ns = self.bed.now_ns;
        self.bed.hosts[self.late].end_session(self.peer.index, now_ns);
    }

    /// Nothing of the late sender is left anywhere, once so much time has passed.
    fn check_nothing_is_left(mut self, holders: usize, after: Duration) {
        self.bed.pass(after);
        assert_eq!(self.sessions(), (holders, 0));
        let engine = &mut self.bed.hosts[self.late];
        assert!(
            engine.admission.requests.is_empty()
                && !engine.is_leaving()
                && engine.sending.senders().is_empty()
        );
        let peer = engine.peers.at(self.peer.index);
        assert!(peer.outbound.is_none() && !peer.applying);
        // Entries that a loss left unused keep a zone as long as others land beside it.
        let now_ns = self.bed.now_ns;
        for (at, holder) in self.holders.iter().enumerate() {
            self.bed.hosts[at + 1].end_session(holder.index, now_ns);
        }
        self.bed.pass(Duration::from_millis(900));
        for engine in &mut self.bed.hosts {
            engine.told.completions().clear();
        }
        self.bed.check_memory();
    }
}

#[test]
fn a_message_arrives_before_a_place_is_free_and_later_ones_land() {
    for semantics in [Semantics::Copy, ZERO_COPY] {
        let mut crowd = Crowd::new(semantics);
        let places = crowd.holders.len();
        crowd.until("messages arrive", true, |crowd| crowd.came >= 5);
        assert_eq!(crowd.sessions(), (places, 1));
        assert_eq!(crowd.bed.hosts[0].counters.landing_packets, 0);
        assert!(crowd.bed.hosts[0].counters.fragments_one_copy > 100);
        // However long it takes.
        crowd.bed.pass(Duration::from_secs(4));
        crowd.until("messages arrive", true, |crowd| crowd.came >= 10);
        assert_eq!(crowd.sessions(), (places, 1));

        crowd.free_a_place();
        crowd.until("it lands", true, |crowd| !crowd.is_one_copy());
        assert!(crowd.has_landed());
        let (sent, one_copy) = (crowd.sent, crowd.bed.hosts[0].counters.fragments_one_copy);
        let late = crowd.late;
        let without = crowd.bed.hosts[late].counters.messages_one_copy;
        assert!((10..=sent).contains(&without));
        crowd.until("messages land", true, |crowd| crowd.came >= sent + 20);
        crowd.until("all came", false, |crowd| crowd.came == crowd.sent);
        let receiver = &crowd.bed.hosts[0].counters;
        assert_eq!(receiver.fragments_one_copy, one_copy);
        assert!(receiver.landing_packets > 500);
        assert_eq!(receiver.sessions_one_copy, 1);
        assert_eq!(receiver.violations.total(), 0);
        assert_eq!(crowd.bed.hosts[late].counters.messages_one_copy, without);
        assert_eq!(crowd.bed.hosts[0].counters.sessions_ended, 1);
        crowd.end();
        crowd.check_nothing_is_left(places - 1, Duration::from_millis(900));
    }
}

/// What was loaned before is sent after, and lands.
#[test]
fn a_region_outlives_the_change() {
    let mut crowd = Crowd::new(Semantics::Copy);
    let (late, peer) = (crowd.late, crowd.peer);
    crowd.until("a message arrives", true, |crowd| crowd.came >= 1);
    crowd.until("all came", false, |crowd| crowd.came == crowd.sent);
    let mut region = crowd.bed.hosts[late].loan(peer, 50_000).expect("a region");
    fill(&mut region, &noise(77, 50_000));
    crowd.free_a_place();
    crowd.until("it lands", false, Crowd::has_landed);
    let now_ns = crowd.bed.now_ns;
    let one_copy = crowd.bed.hosts[0].counters.fragments_one_copy;
    assert!(crowd.bed.hosts[late].submit(region, 77, now_ns).is_ok());
    assert!(crowd.bed.recv(0)[..] == noise(77, 50_000)[..]);
    assert_eq!(crowd.bed.hosts[0].counters.fragments_one_copy, one_copy);
    assert_eq!(crowd.bed.completion(late).outcome, Outcome::Delivered);
}

/// What is refused for good is refused at once, and no other session is asked for.
#[test]
fn a_refusal_is_no_waiting() {
    let mut bed = Bed::new(&BedConfig::default());
    let large = ConnectOptions {
        max_message_len: 1 << 40,
        ..ConnectOptions::default()
    };
    let refused = bed.connect(0, &large);
    assert!(
        matches!(
            refused,
            Err(ConnectError::Rejected {
                reason: RejectReason::TooLarge,
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(bed.hosts[0].admission.requests.is_empty());
    // Who is granted a session at once has one, and no more.
    let peer = bed.session(0, WireMode::Lm, 20_000);
    bed.exchange(0, peer, &noise(1, 20_000));
    assert_eq!(bed.hosts[1].counters.sessions_granted, 1);
    assert_eq!(bed.hosts[1].counters.sessions_one_copy, 0);
}

/// Loss, duplication and reordering of everything, from the first request to the last farewell.
#[test]
fn the_change_survives_a_bad_link() {
    for seed in 0..times(4, 12) {
        // Eighteen hosts take long.
        let semantics = if seed % 6 == 0 { Semantics::Copy } else { ZERO_COPY };
        let mut crowd = Crowd::with(&BedConfig {
            lease: Duration::from_secs(1),
            ..config(semantics)
        });
        let late = crowd.late;
        let places = crowd.holders.len();
        for from in [0, late] {
            crowd
                .bed
                .wire
                .impair(from, bad_link(seed * 2 + u64::from(from == 0)));
        }
        crowd.until("messages arrive", true, |crowd| crowd.came >= 3);
        crowd.free_a_place();
        crowd.until("it lands", true, Crowd::has_landed);
        let sent = crowd.sent;
        crowd.until("messages land", true, |crowd| crowd.came >= sent + 5);
        crowd.until("all came", false, |crowd| crowd.came == crowd.sent);
        for from in [0, late] {
            crowd.bed.wire.impair(from, Impairments::default());
        }
        crowd.end();
        // A farewell that nobody hears leaves the rest to the lease.
        crowd.check_nothing_is_left(places - 1, Duration::from_secs(2));
    }
}

#[test]
fn a_receiver_that_dies_leaves_nothing_here() {
    for granted in [false, true] {
        let mut crowd = Crowd::new(Semantics::Copy);
        let late = crowd.late;
        crowd.until("a message arrives", true, |crowd| crowd.came >= 1);
        if granted {
            grant_while_it_sends(&mut crowd);
        } else {
            crowd.round();
        }
        crowd.bed.wire.set_filter(|from, _| from != 0);
        crowd.bed.pass(Duration::from_secs(12));
        let engine = &mut crowd.bed.hosts[late];
        assert!(
            engine.admission.requests.is_empty()
                && engine.sending.senders().is_empty()
                && !engine.is_leaving()
        );
        assert_eq!(
            engine.loan(crowd.peer, LEN_MAX).unwrap_err(),
            LoanError::NoSession
        );
        let completions: Vec<_> = engine.told.completions().drain(..).collect();
        assert!(!completions.is_empty());
        let lost = |outcome: &Outcome| matches!(outcome, Outcome::TimedOut | Outcome::SessionEnded);
        assert!(completions.iter().all(|completion| lost(&completion.outcome)));
        crowd.bed.check_memory_of(late);
    }
}

/// Fragments of the late sender do not pass, so that its session is not drained.
fn hold_fragments(crowd: &mut Crowd) {
    let late = crowd.late;
    crowd
        .bed
        .wire
        .set_filter(move |from, packet| from != late || packet.len() < 1000);
    let sent = crowd.sent;
    crowd.until("it sends", true, |crowd| crowd.sent > sent);
    crowd.until("its message has memory", false, |crowd| {
        let key = crowd.key();
        let landing = crowd.bed.hosts[0].landing.as_ref().expect("a landing side");
        let inbound = landing.sessions.with_key(key).expect("its session");
        inbound.order.zones_len(u64::MAX) > 0
    });
}

/// A place gets free while the late sender's messages are under way and stay so.
fn grant_while_it_sends(crowd: &mut Crowd) {
    hold_fragments(crowd);
    crowd.free_a_place();
    crowd.until("a place", false, Crowd::drains);
}

#[test]
fn a_sender_that_closes_takes_no_place() {
    // Before there is a place.
    let mut crowd = Crowd::new(Semantics::Copy);
    let places = crowd.holders.len();
    crowd.until("a message arrives", true, |crowd| crowd.came >= 1);
    crowd.until("all came", false, |crowd| crowd.came == crowd.sent);
    crowd.end();
    crowd.free_a_place();
    crowd.check_nothing_is_left(places - 1, Duration::from_millis(900));

    // With a place, while messages are under way by the one-copy path.
    let mut crowd = Crowd::new(Semantics::Copy);
    grant_while_it_sends(&mut crowd);
    assert_eq!(crowd.sessions(), (places, 0));
    crowd.end();
    crowd.bed.hosts[crowd.late].told.completions().clear();
    crowd.bed.wire.set_filter(|_, _| true);
    crowd.bed.pass(Duration::from_millis(900));
    assert!(crowd.bed.hosts[0].take_message().is_err(), "what was under way");
    crowd.check_nothing_is_left(places - 1, Duration::from_millis(1));
}

/// It does not lose its place while what was under way keeps it from landing.
#[test]
fn a_place_is_kept_until_it_is_used() {
    let mut crowd = Crowd::with(&BedConfig {
        lease: Duration::from_millis(1500),
        patience: Duration::from_secs(30),
        ..BedConfig::default()
    });
    let places = crowd.holders.len();
    grant_while_it_sends(&mut crowd);
    crowd.bed.pass(Duration::from_secs(5));
    assert!(crowd.drains());
    assert_eq!(crowd.sessions(), (places, 0));
    crowd.bed.wire.set_filter(|_, _| true);
    crowd.until("it lands", false, Crowd::has_landed);
    let sent = crowd.sent;
    crowd.until("messages land", true, |crowd| crowd.came > sent + 3);
}

/// A session that its receiver ends before it lands takes with it what was under way, and the next one has the place.
#[test]
fn a_session_that_ends_before_it_lands_leaves_its_place() {
    let mut crowd = Crowd::new(Semantics::Copy);
    let (late, places) = (crowd.late, crowd.holders.len());
    grant_while_it_sends(&mut crowd);
    let key = crowd.key();
    crowd.bed.hosts[0].abort_session(key, Fault::Stalled);
    crowd.bed.wire.set_filter(|_, _| true);
    crowd.bed.pass(Duration::from_millis(900));
    let lost: Vec<_> = crowd.bed.hosts[late].told.completions().drain(..).collect();
    assert!(!lost.is_empty());
    let is_lost = |completion: &Completion| completion.outcome == Outcome::SessionEnded;
    assert!(lost.iter().all(is_lost));
    assert!(matches!(
        crowd.bed.hosts[0].take_message(),
        Err(RecvError::Incomplete { .. })
    ));
    while crowd.bed.hosts[0].take_message().is_err() {}
    crowd.came = crowd.sent;
    crowd.peer = crowd.bed.connect(late, &options()).expect("a session");
    assert!(!crowd.is_one_copy());
    assert_eq!(crowd.sessions(), (places, 0));
    let sent = crowd.sent;
    crowd.until("messages land", true, |crowd| crowd.came > sent + 3);
    assert!(crowd.bed.hosts[0].counters.landing_packets > 0);
}

/// What limits the rate goes on when a session lands.
#[test]
fn the_rate_limit_stays() {
    let mut crowd = Crowd::new(Semantics::Copy);
    let late = crowd.late;
    let rated = ConnectOptions {
        rate: std::num::NonZeroU64::new(50_000_000),
        ..options()
    };
    crowd.peer = crowd.bed.connect(late, &rated).expect("a session");
    crowd.until("a message arrives", true, |crowd| crowd.came >= 1);
    crowd.free_a_place();
    crowd.until("it lands", true, Crowd::has_landed);
    let (began_ns, bytes) = (crowd.bed.now_ns, crowd.bed.hosts[0].counters.bytes_received);
    let sent = crowd.sent;
    crowd.until("messages land", true, |crowd| crowd.came >= sent + 10);
    let bits = 8 * (crowd.bed.hosts[0].counters.bytes_received - bytes);
    let seconds = (crowd.bed.now_ns - began_ns) as f64 / 1e9;
    // Five packets of a burst more.
    assert!(
        bits as f64 <= 50e6 * seconds + 5.0 * 1500.0 * 8.0,
        "{bits} bits in {seconds} s"
    );
}

/// A place in which nothing lands goes to a session that has something to send, and not back.
#[test]
fn a_place_goes_to_whoever_waits_and_not_back() {
    for semantics in [Semantics::Copy, ZERO_COPY] {
        let mut crowd = Crowd::new(semantics);
        let places = crowd.holders.len();
        for second in 1..20 {
            crowd.bed.pass(Duration::from_secs(1));
            crowd.until("a message arrives", true, |crowd| crowd.came >= second);
        }
        assert!(crowd.has_landed());
        assert_eq!(crowd.sessions(), (places, 1));
        assert_eq!(crowd.bed.hosts[0].counters.sessions_set_aside, 1);
        // The one that gave its place up goes on, and lands again when there is one.
        crowd.until("all came", false, |crowd| crowd.came == crowd.sent);
        crowd.end();
        let (holder, payload) = (crowd.holders[0], noise(5, 20_000));
        crowd.bed.exchange(1, holder, &payload);
        crowd.bed.pass(Duration::from_millis(200));
        assert_eq!(crowd.sessions(), (places, 0));
        let landed = crowd.bed.hosts[0].counters.landing_packets;
        crowd.bed.exchange(1, holder, &payload);
        assert!(crowd.bed.hosts[0].counters.landing_packets > landed);
        assert_eq!(crowd.bed.hosts[1].counters.sessions_lost, 0);
    }
}

/// The path of a sender is cut while its message is under way, for longer than a place may be unused, and others wait for places: its session
/// goes on without, and what it has handed over arrives whole, once and in order. Then it lands again.
#[test]
fn a_path_that_is_cut_costs_the_place_and_no_message() {
    for seed in 0..times(4, 40) {
        let semantics = if seed % 2 == 0 { Semantics::Copy } else { ZERO_COPY };
        let mut crowd = Crowd::with(&BedConfig {
            patience: Duration::from_secs(60),
            ..config(semantics)
        });
        let (cut, holder) = (1, crowd.holders[0]);
        let sent: Vec<Vec<u8>> = (0..3)
            .map(|tag| noise(seed * 8 + tag, 9_000 + 3_000 * tag as usize))
            .collect();
        for (tag, bytes) in sent.iter().enumerate() {
            crowd.bed.send(cut, holder, bytes, 1000 + tag as u64);
        }
        // They are announced, and so many rounds go on; nothing comes from then on.
        let is_idle = |bed: &Bed| {
            let landing = bed.hosts[0].landing.as_ref().expect("a landing side");
            landing.sessions.iter().all(|inbound| inbound.is_idle())
        };
        while is_idle(&crowd.bed) {
            crowd.bed.round();
        }
        crowd.bed.rounds(seed as u32 % 8);
        crowd.bed.wire.set_filter(move |from, _| from != cut);
        let mut came = 0;
        let mut look = |bed: &mut Bed| {
            while let Some(message) = bed.hosts[0].take_message().expect("nothing is given up") {
                if message.tag() == 0 {
                    continue;
                }
                assert_eq!(message.tag(), 1000 + came, "seed {seed}");
                assert!(message[..] == sent[came as usize][..], "seed {seed}");
                came += 1;
            }
            came
        };
        for step in 0..80 {
            if step % 20 == 0 {
                crowd.bed.send(crowd.late, crowd.peer, &payload(0), 0);
            }
            crowd.bed.pass(Duration::from_millis(100));
            look(&mut crowd.bed);
        }
        assert!(
            crowd.has_landed(),
            "seed {seed}: it waits for a place that nobody uses"
        );
        crowd.bed.wire.set_filter(|_, _| true);
        for _ in 0..20 {
            crowd.bed.pass(Duration::from_millis(100));
            look(&mut crowd.bed);
        }
        assert_eq!(look(&mut crowd.bed), 3, "seed {seed}");
        let engine = &mut crowd.bed.hosts[cut];
        let outcomes: Vec<Outcome> = engine
            .told
            .completions()
            .drain(..)
            .map(|completion| completion.outcome)
            .collect();
        assert_eq!(outcomes, vec![Outcome::Delivered; 3], "seed {seed}");
    }
}

/// In zero-copy mode as well: a sender announces its message, again and again, and nothing comes behind its first fragments. Whoever waits has the
/// place after as long as one may be unused, and lands alone there; what the first one sends then comes by the one-copy path. Nothing
/// is lost, and when the other one is gone it lands again.
#[test]
fn a_stalled_session_in_zero_copy_mode_goes_on_without_its_place() {
    const LEN: usize = 20_000;
    // Of fourteen fragments so many land, and one of these does not: what is behind it lies in others' slots.
    for (before, lost) in [(0, 0), (1, 0), (3, 1), (4, 0), (9, 3), (10, 0), (13, 0), (13, 6)] {
        let mut crowd = Crowd::with(&BedConfig {
            patience: Duration::from_secs(60),
            window: 4,
            ..config(ZERO_COPY)
        });
        let (stalled, holder) = (1, crowd.holders[0]);
        let mut fragments = 0;
        crowd.bed.wire.set_filter(move |from, packet| {
            let is_fragment = from == stalled && kind(packet) == Some(TYPE_DATA);
            fragments += u32::from(is_fragment);
            !is_fragment || (fragments <= before && fragments != lost)
        });
        crowd.bed.send(stalled, holder, &noise(1, LEN), 1000);
        crowd.bed.pass(UNUSED_MAX - Duration::from_millis(100));
        assert!(!crowd.has_landed());
        crowd.wait_for_its_place();
        let first = crowd.sent;
        assert_eq!(crowd.bed.hosts[0].counters.sessions_set_aside, 1);
        let landed = crowd.bed.hosts[0].counters.landing_packets;
        crowd.until("messages land", true, |crowd| crowd.came >= 5);
        crowd.until("all came", false, |crowd| crowd.came == crowd.sent);
        let packets = |bytes: usize| bytes.div_ceil(1448) as u64;
        let theirs: u64 = (first..crowd.sent)
            .map(|number| packets(payload(number).len()))
            .sum();

        // Beside one that lands. What was lost is asked for, and the next one comes without that.
        crowd.bed.wire.set_filter(|_, _| true);
        let lost = crowd.bed.wire.counters().device_lost;
        let (late, peer, number) = (crowd.late, crowd.peer, crowd.sent);
        crowd.bed.send(stalled, holder, &noise(2, LEN), 1001);
        crowd.bed.send(late, peer, &payload(number), number);
        let mut tags = [(); 3].map(|()| {
            let message = crowd.bed.recv(0);
            let expected = match message.tag() {
                tag @ 1000.. => noise(tag - 999, LEN),
                tag => payload(tag),
            };
            assert!(message[..] == expected[..], "message {}", message.tag());
            message.tag()
        });
        tags.sort_unstable();
        assert_eq!(tags, [number, 1000, 1001]);
        for host in [stalled, stalled, late] {
            assert_eq!(crowd.bed.completion(host).outcome, Outcome::Delivered);
        }
        let receiver = &crowd.bed.hosts[0].counters;
        assert_eq!(
            receiver.landing_packets - landed,
            theirs + packets(payload(number).len()),
            "what lands is the new holder's"
        );
        assert_eq!(crowd.bed.wire.counters().device_lost, lost);
        assert_eq!(receiver.violations.total(), 0);
        assert_eq!(receiver.messages_incomplete, 0);

        // The other one goes, and it lands again.
        crowd.end();
        crowd.bed.pass(Duration::from_millis(500));
        assert_eq!(crowd.bed.hosts[stalled].counters.sessions_lost, 0);
        assert_eq!(crowd.sessions(), (1, 0));
        let landed = crowd.bed.hosts[0].counters.landing_packets;
        crowd.bed.send(stalled, holder, &noise(3, LEN), 1002);
        assert!(crowd.bed.recv(0)[..] == noise(3, LEN)[..]);
        assert_eq!(crowd.bed.completion(stalled).outcome, Outcome::Delivered);
        assert_eq!(crowd.bed.hosts[0].counters.landing_packets - landed, packets(LEN));
        crowd.bed.check_memory();
    }
}

/// From when it has no place on, what it sends comes to the general queue, also before anything of the next one lands: no packet finds a
/// landing queue without entries.
#[test]
fn who_has_no_place_is_not_led_to_the_landing_queue() {
    let mut crowd = Crowd::with(&BedConfig {
        patience: Duration::from_secs(60),
        ..config(ZERO_COPY)
    });
    let (stalled, holder, late) = (1, crowd.holders[0], crowd.late);
    (crowd.bed.wire).set_filter(move |from, packet| from != stalled || kind(packet) != Some(TYPE_DATA));
    crowd.bed.send(stalled, holder, &noise(1, 20_000), 1000);
    crowd.wait_for_its_place();
    assert_eq!(crowd.bed.hosts[0].counters.sessions_set_aside, 1);
    crowd.bed.wire.set_filter(move |from, _| from != late);
    let lost = crowd.bed.wire.counters().device_lost;
    for tag in 1001..1004 {
        crowd.bed.send(stalled, holder, &noise(tag, 20_000), tag);
    }
    let tags: Vec<u64> = (0..4).map(|_| crowd.bed.recv(0).tag()).collect();
    assert_eq!(tags, [1000, 1001, 1002, 1003]);
    assert_eq!(crowd.bed.wire.counters().device_lost, lost);
    assert_eq!(crowd.sessions(), (1, 1));
}
