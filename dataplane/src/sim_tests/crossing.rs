//! Sessions that their receiver ends while their senders hand messages over: what it never heard announced arrives all the same, once
//! and in order.
#![cfg(test)]

use std::time::Duration;

use lm_protocol::control::ControlMessage;
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::landing::PLACES;
use lm_protocol::session::UNUSED_MAX;
use lm_protocol::wire::lm::{TYPE_ANNOUNCE, TYPE_DATA};

use super::bed::{BATCHED, Bed, BedConfig, PORT, bad_link, noise, wire_of};
use super::integrity::{UDP_HEADERS_LEN, kind};
use super::times;
use super::transfer::Dice;
use crate::completion::{Outcome, PeerId, RecvError, SendError};
use crate::connect::ConnectOptions;
use crate::granting::Closing;
use crate::notices::Fault;
use crate::simnic::{Impairments, Semantics};

const ZERO_COPY: Semantics = Semantics::ZeroCopy(BATCHED);

/// The host whose session ends.
const HOLDER: usize = 1;
const LEN_MAX: u64 = 40_000;
/// Virtual time of a long step and of a short one.
const STEP: Duration = Duration::from_micros(300);

/// What does not come through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Nothing,
    /// So many announcements of the holder's, from when it hands its messages over on.
    Announcements(u32),
    /// So many words of the receiver's that a session is over.
    Ended(u32),
}

#[derive(Clone, Copy, Debug)]
struct Case {
    semantics: Semantics,
    wire: WireMode,
    delivery: Delivery,
    messages: u64,
    lost: Lost,
}

impl Default for Case {
    fn default() -> Case {
        Case {
            semantics: ZERO_COPY,
            wire: WireMode::Lm,
            delivery: Delivery::Reliable,
            messages: 3,
            lost: Lost::Nothing,
        }
    }
}

/// What a host asks for that waits for a place.
fn waiting() -> ConnectOptions {
    ConnectOptions {
        max_message_len: LEN_MAX,
        timeout: Duration::from_secs(60),
        ..ConnectOptions::default()
    }
}

fn payload(number: u64) -> Vec<u8> {
    noise(number, 9_000 + (number as usize * 7_411) % 30_000)
}

fn is_ended(packet: &[u8]) -> bool {
    let parsed = packet.get(UDP_HEADERS_LEN..).map(ControlMessage::parse);
    matches!(parsed, Some(Ok((_, ControlMessage::Ended(_)))))
}

/// A receiver whose places are all taken, by the holder's session among others, and the last host, whose request waits for one: no session
/// may be without a place, so that the one that has not used its own for longest ends.
struct Crossing {
    bed: Bed,
    case: Case,
    peer: PeerId,
    /// The last host, and its peer.
    late: (usize, PeerId),
    /// All hosts that send, and their peers.
    senders: Vec<(usize, PeerId)>,
    sent: u64,
    came: u64,
    /// Bytes that the holder had copied when it handed its messages over.
    copied: u64,
    /// How the holder's messages ended.
    outcomes: Vec<Outcome>,
}

impl Crossing {
    fn new(case: Case) -> Crossing {
        let config = BedConfig {
            patience: Duration::from_secs(60),
            exclusive: true,
            wire: wire_of(case.semantics),
            ..BedConfig::default()
        };
        // In zero-copy mode one session lands at a time.
        let places = match case.semantics {
            Semantics::Copy => PLACES as usize,
            Semantics::ZeroCopy(_) => 1,
        };
        let mut bed = Bed::switch(&config, places + 2);
        let options = ConnectOptions {
            max_message_len: LEN_MAX,
            ..ConnectOptions::default()
        };
        let holders = ConnectOptions {
            wire: case.wire,
            delivery: case.delivery,
            ..options
        };
        bed.hosts[0].limit_aside(0);
        let peer = bed.connect(HOLDER, &holders).expect("a session");
        let mut senders = vec![(HOLDER, peer)];
        for host in HOLDER + 1..=places {
            senders.push((host, bed.connect(host, &options).expect("a session")));
        }
        let host = places + 1;
        let late = (host, bed.resolve(host));
        bed.ask(host, late.1, &waiting());
        senders.push(late);
        Crossing {
            bed,
            case,
            peer,
            late,
            senders,
            sent: 0,
            came: 0,
            copied: 0,
            outcomes: Vec::new(),
        }
    }

    fn hand_over(&mut self) {
        self.copied = self.bed.hosts[HOLDER].counters.user_copied_bytes;
        for _ in 0..self.case.messages {
            let number = self.sent;
            while let Err(error) = (self.bed).try_send(HOLDER, self.peer, &payload(number), number) {
                assert_eq!(error, SendError::WouldBlock);
                if self.has_ended() {
                    // There is a place for it again.
                    self.leave();
                }
                self.bed.round();
            }
            self.sent += 1;
        }
    }

    /// From now on the case's packets get lost.
    fn lose(&mut self) {
        let (lost, mut count) = (self.case.lost, 0);
        self.bed.wire.set_filter(move |from, packet| {
            let (is_it, most) = match lost {
                Lost::Nothing => (false, 0),
                Lost::Announcements(most) => (from == HOLDER && kind(packet) == Some(TYPE_ANNOUNCE), most),
                Lost::Ended(most) => (from == 0 && is_ended(packet), most),
            };
            count += u32::from(is_it);
            !is_it || count > most
        });
    }

    /// What came is what was sent, once and in order.
    fn look(&mut self) {
        while let Some(message) = self.bed.hosts[0].take_message().expect("nothing is given up") {
            assert_eq!(message.tag(), self.came, "{:?}", self.case);
            assert!(
                message[..] == payload(self.came)[..],
                "{:?}: message {}",
                self.case,
                self.came
            );
            self.came += 1;
        }
        while let Some(completion) = self.bed.hosts[HOLDER].told.completions().pop_front() {
            assert_eq!(completion.tag, self.outcomes.len() as u64, "{:?}", self.case);
            self.outcomes.push(completion.outcome);
        }
    }

    fn pass(&mut self, time: Duration) {
        let end_ns = self.bed.now_ns + time.as_nanos() as u64;
        while self.bed.now_ns < end_ns {
            self.bed.pass(STEP);
            self.look();
            let (late, peer) = self.late;
            if let Some(outcome) = self.bed.application_outcome(late, peer.index) {
                outcome.expect("a session");
            }
        }
    }

    /// The last host does not want a session any more.
    fn leave(&mut self) {
        let (now_ns, (late, peer)) = (self.bed.now_ns, self.late);
        let engine = &mut self.bed.hosts[late];
        engine.withdraw(peer.index, now_ns);
        engine.end_session(peer.index, now_ns);
    }

    /// It asks again.
    fn come_back(&mut self) {
        let (late, peer) = self.late;
        let engine = &mut self.bed.hosts[late];
        if engine.admission.requests.is_empty() && engine.sending.senders().is_empty() {
            self.bed.ask(late, peer, &waiting());
        }
    }

    fn has_ended(&self) -> bool {
        self.bed.hosts[0].counters.sessions_ended > 0
    }

    /// All that was handed over has come, and its sender knows.
    fn check_all_came(&mut self, what: &str) {
        self.pass(Duration::from_millis(200));
        self.leave();
        self.pass(Duration::from_secs(2));
        let case = self.case;
        assert_eq!(
            self.outcomes,
            vec![Outcome::Delivered; self.sent as usize],
            "{case:?}, {what}"
        );
        assert_eq!(self.came, self.sent, "{case:?}, {what}");
        // The program loaned memory and handed it over: nothing was copied on this side.
        assert_eq!(self.bed.hosts[HOLDER].counters.user_copied_bytes, self.copied);
        assert_eq!(self.bed.hosts[0].counters.violations.total(), 0);
        // And it goes on.
        self.case.messages = 1;
        self.hand_over();
        self.pass(Duration::from_millis(500));
        assert_eq!((self.came, self.outcomes.len() as u64), (self.sent, self.sent));
        // Entries that a loss left unused keep a zone as long as others land beside it.
        let now_ns = self.bed.now_ns;
        for &(host, peer) in &self.senders {
            self.bed.hosts[host].end_session(peer.index, now_ns);
        }
        self.bed.pass(Duration::from_millis(900));
        self.bed.check_memory();
    }
}

/// The session is ended as idle, for whoever waits, and its sender hands messages over in that very moment: a little before, so that its
/// announcement is on the way, at the same time, and while the word of the end is on the way.
fn cross(case: Case) {
    // When that is: in long steps to a little before, and from there in short ones.
    let mut first = Crossing::new(case);
    let mut steps = 0;
    while !first.has_ended() {
        first.bed.pass(STEP);
        steps += 1;
        assert!(steps < 40_000, "{case:?}: its place is never wanted");
    }
    let before = |rounds: u32| {
        let mut crossing = Crossing::new(case);
        (0..steps - 2).for_each(|_| crossing.bed.pass(STEP));
        crossing.bed.rounds(rounds);
        crossing
    };
    let mut second = before(0);
    let mut rounds = 0u32;
    while !second.has_ended() {
        second.bed.round();
        rounds += 1;
        assert!(rounds < 10_000);
    }
    let mut ended = 0;
    for early in [40, 6, 4, 3, 2, 1, 0, -1, -2, -5, -20, -60] {
        let mut crossing = before(rounds.saturating_add_signed(-early));
        crossing.lose();
        crossing.hand_over();
        crossing.pass(Duration::from_millis(1));
        ended += u32::from(crossing.has_ended());
        crossing.check_all_came(&format!("{early} rounds before"));
    }
    assert!(ended >= 7, "{case:?}: they did not cross");
}

#[test]
fn what_was_handed_over_while_a_session_was_ended_as_idle_arrives() {
    for messages in [1, 3, 8] {
        cross(Case {
            messages,
            ..Case::default()
        });
    }
    cross(Case {
        semantics: Semantics::Copy,
        ..Case::default()
    });
}

#[test]
fn the_same_of_every_delivery_and_wire() {
    for delivery in [Delivery::Unreliable, Delivery::Partial] {
        cross(Case {
            delivery,
            ..Case::default()
        });
    }
    // IP fragments have no one-copy path: they wait for a place.
    for semantics in [Semantics::Copy, ZERO_COPY] {
        let mut crossing = Crossing::new(Case {
            semantics,
            wire: WireMode::IpFrag,
            delivery: Delivery::Unreliable,
            ..Case::default()
        });
        crossing.bed.wire.set_filter(|_, packet| !is_ended(packet));
        while !crossing.has_ended() {
            crossing.pass(STEP);
        }
        crossing.hand_over();
        crossing.bed.wire.clear_filter();
        crossing.pass(Duration::from_millis(300));
        // In copy mode the place of another one that is idle goes to it.
        let came = match semantics {
            Semantics::Copy => 3,
            Semantics::ZeroCopy(_) => 0,
        };
        assert_eq!((crossing.came, crossing.outcomes.len()), (came, came as usize));
        crossing.check_all_came("a place is free");
    }
}

#[test]
fn the_same_with_announcements_lost_or_the_word_that_it_is_over() {
    for lost in [
        Lost::Announcements(1),
        Lost::Announcements(4),
        Lost::Ended(1),
        Lost::Ended(4),
    ] {
        cross(Case {
            lost,
            ..Case::default()
        });
    }
}

/// The path is cut while nothing is under way, and another sender gets the place. What is handed over meanwhile arrives when the path is whole
/// again, although nobody could tell its sender that the session is over.
#[test]
fn what_was_handed_over_while_the_path_was_cut_arrives() {
    for semantics in [Semantics::Copy, ZERO_COPY] {
        for delivery in [Delivery::Reliable, Delivery::Unreliable, Delivery::Partial] {
            let mut crossing = Crossing::new(Case {
                semantics,
                delivery,
                ..Case::default()
            });
            crossing.bed.wire.set_filter(|from, _| from != HOLDER);
            crossing.pass(Duration::from_secs(2));
            crossing.hand_over();
            crossing.pass(Duration::from_secs(5));
            assert!(crossing.has_ended());
            crossing.bed.wire.clear_filter();
            crossing.check_all_came("the path is whole");
        }
    }
}

/// Messages of which the receiver had heard end as the session does; those behind them go on.
#[test]
fn what_the_receiver_had_heard_is_not_handed_over_again() {
    for delivery in [Delivery::Reliable, Delivery::Unreliable, Delivery::Partial] {
        let mut crossing = Crossing::new(Case {
            messages: 2,
            delivery,
            ..Case::default()
        });
        let (peer, is_announcement) = (crossing.peer, |packet: &[u8]| kind(packet) == Some(TYPE_ANNOUNCE));
        let mut announcements = 0;
        crossing.bed.wire.set_filter(move |from, packet| {
            let is_it = from == HOLDER && is_announcement(packet);
            announcements += u32::from(is_it);
            from != HOLDER || (is_it && announcements == 1)
        });
        crossing.hand_over();
        crossing.bed.rounds(20);
        // Two were announced and nothing came of them; two more nobody has heard of.
        crossing.hand_over();
        crossing.bed.rounds(20);
        let outbound = crossing.bed.hosts[HOLDER].peers.at(peer.index).outbound.as_ref();
        let key = outbound.expect("a session").terms.key;
        let inbound = (crossing.bed.hosts[0].landing.as_ref())
            .and_then(|landing| landing.sessions.with_key(key))
            .expect("a session");
        assert_eq!(inbound.ended().heard, Some(2));
        crossing.bed.wire.clear_filter();
        crossing.bed.hosts[0].abort_session(key, Fault::Stalled);
        crossing.bed.pass(Duration::from_secs(1));
        for tag in 0..2 {
            let lost = crossing.bed.hosts[0].take_message();
            assert!(
                matches!(lost, Err(RecvError::Incomplete { tag: of, .. }) if of == tag),
                "{lost:?}"
            );
            let completion = crossing.bed.completion(HOLDER);
            assert_eq!(completion.tag, tag);
            assert!(
                matches!(
                    completion.outcome,
                    Outcome::SessionEnded | Outcome::Incomplete { .. }
                ),
                "{delivery:?}: {:?}",
                completion.outcome
            );
        }
        for tag in 2..4 {
            let message = crossing.bed.recv(0);
            assert!(message.tag() == tag && message[..] == payload(tag)[..]);
            assert_eq!(crossing.bed.completion(HOLDER).outcome, Outcome::Delivered);
        }
        assert_eq!(crossing.bed.hosts[HOLDER].counters.messages_again, 2);
    }
}

/// A daemon ends a session as idle and does not know what its program has heard meanwhile: that is forgotten, however much has landed of it,
/// and comes again. What its application was shown does not.
#[test]
fn what_came_since_a_session_was_thought_idle_comes_again() {
    for semantics in [Semantics::Copy, ZERO_COPY] {
        // The messages have 7, 12, 17 and 22 fragments.
        for (fragments, again) in [(0, 4), (1, 4), (5, 4), (8, 3), (30, 2)] {
            let mut crossing = Crossing::new(Case {
                semantics,
                messages: 4,
                ..Case::default()
            });
            let mut came = 0;
            crossing.bed.wire.set_filter(move |from, packet| {
                let is_fragment = from == HOLDER && kind(packet) == Some(TYPE_DATA);
                came += u32::from(is_fragment);
                !is_fragment || came <= fragments
            });
            crossing.hand_over();
            crossing.pass(5 * STEP);
            let peer = crossing.peer.index;
            let outbound = crossing.bed.hosts[HOLDER].peers.at(peer).outbound.as_ref();
            let key = outbound.expect("a session").terms.key;
            let landing = crossing.bed.hosts[0].landing.as_ref().expect("a landing side");
            let inbound = landing.sessions.with_key(key).expect("a session");
            assert_eq!(inbound.ended().heard, Some(4));
            let (now_ns, receiver) = (crossing.bed.now_ns, &mut crossing.bed.hosts[0]);
            receiver.close_landing(key, Closing::Unheard);
            // The next one has its place.
            let queue = receiver.landing.as_ref().expect("a landing side").queue as u16;
            receiver.with_node(now_ns, |node, _, _, _| node.add_places(PORT, &[queue]));
            crossing.bed.wire.clear_filter();
            crossing.check_all_came(&format!("{fragments} fragments"));
            assert_eq!(crossing.bed.hosts[HOLDER].counters.messages_again, again);
        }
    }
}

/// Why no session follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    /// The receiver ends its sessions and is gone.
    Goes,
    /// The same, and the application ends the session.
    Ends,
    /// Its daemon says that the session is over, and the receiver says nothing.
    Silent,
}

/// No session follows: the messages end with theirs, once.
#[test]
fn messages_that_no_session_follows_end_with_it() {
    for last in [Last::Goes, Last::Ends, Last::Silent] {
        let mut crossing = Crossing::new(Case::default());
        let peer = crossing.peer.index;
        let is_announcement = |packet: &[u8]| kind(packet) == Some(TYPE_ANNOUNCE);
        (crossing.bed.wire).set_filter(move |from, packet| from != HOLDER || !is_announcement(packet));
        crossing.hand_over();
        crossing.bed.rounds(20);
        if last == Last::Silent {
            let now_ns = crossing.bed.now_ns;
            crossing.bed.hosts[HOLDER].lose_session(peer, None, now_ns);
        } else {
            let now_ns = crossing.bed.now_ns;
            crossing.bed.hosts[0].close_to_requests(now_ns);
        }
        crossing
            .bed
            .wire
            .set_filter(move |from, packet| from != 0 || is_ended(packet));
        let mut rounds = 0;
        while last != Last::Silent && !crossing.bed.hosts[HOLDER].peers.at(peer).reopening {
            crossing.bed.round();
            rounds += 1;
            assert!(rounds < 1000);
        }
        let engine = &mut crossing.bed.hosts[HOLDER];
        assert_eq!(
            (engine.unconfirmed_messages(), engine.told.completions().len()),
            (3, 0)
        );
        if last == Last::Ends {
            engine.end_session(peer, crossing.bed.now_ns);
            assert_eq!(engine.told.completions().len(), 3);
        }
        crossing.bed.pass(Duration::from_secs(6));
        let engine = &mut crossing.bed.hosts[HOLDER];
        assert_eq!(engine.unconfirmed_messages(), 0);
        let completions = engine.told.completions().drain(..);
        let ended: Vec<_> = { completions }.map(|ended| (ended.tag, ended.outcome)).collect();
        let expected: Vec<_> = (0..3).map(|tag| (tag, Outcome::SessionEnded)).collect();
        assert_eq!(ended, expected, "{last:?}");
        assert!(engine.peers.at(peer).outbound.is_none());
        assert!(engine.admission.requests.is_empty());
        crossing.bed.check_memory_of(HOLDER);
    }
}

/// Loss, repetition and overtaking of everything, and messages now and then, about as often as a place goes unused for too long: the session
/// ends again and again, in every state.
#[test]
fn sessions_that_end_again_and_again_lose_nothing() {
    let (seeds, mut lost, mut again) = (times(10, 60), 0, 0);
    for seed in 0..seeds {
        let mut crossing = Crossing::new(Case {
            lost: Lost::Nothing,
            messages: 1 + seed % 4,
            ..Case::default()
        });
        for from in [0, HOLDER] {
            crossing
                .bed
                .wire
                .impair(from, bad_link(seed * 2 + u64::from(from == 0)));
        }
        let mut dice = Dice(0x9e37_79b9 + seed);
        let index = crossing.peer.index;
        crossing.bed.hosts[HOLDER].peers.at(index).options = Some(waiting());
        for _ in 0..10 {
            crossing.come_back();
            let idle_ms = UNUSED_MAX.as_millis() as u64 - 20 + dice.roll(140);
            crossing.pass(Duration::from_millis(idle_ms));
            crossing.hand_over();
        }
        crossing.pass(Duration::from_secs(2));
        for from in [0, HOLDER] {
            crossing.bed.wire.impair(from, Impairments::default());
        }
        let counters = crossing.bed.hosts[HOLDER].counters;
        lost += counters.sessions_lost;
        again += counters.messages_again;
        crossing.copied = counters.user_copied_bytes;
        crossing.check_all_came(&format!("seed {seed}"));
    }
    assert!(lost > 2 * seeds && again > 0, "{lost} sessions, {again} messages");
}
