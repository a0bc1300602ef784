//! A peer that starts anew in the middle of a message, and knows nothing of what was before.

#![cfg(test)]

use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::wire::ethernet::MacAddr;

use super::bed::{Bed, BedConfig, noise};
use crate::completion::{Outcome, PeerId, RecvError};
use crate::connect::{ConnectError, ConnectOptions};

const LEN: usize = 300_000;

/// A session in which the first half of a message has arrived.
fn in_the_middle(bed: &mut Bed) -> PeerId {
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    bed.exchange(0, peer, &noise(1, LEN));
    bed.send(0, peer, &noise(2, LEN), 2);
    let half = bed.hosts[0].counters.data_packets_sent + 100;
    while bed.hosts[0].counters.data_packets_sent < half {
        bed.round();
    }
    assert!(bed.hosts[1].told.messages().count() == 0);
    peer
}

/// A peer gets another card: its messages come when the kernel has heard of that.
#[test]
fn where_a_silent_peer_is_says_the_kernel() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    let now = bed.hosts[0].peers.at(peer.index).addressing.dst_mac;
    bed.hosts[0].peers.at(peer.index).addressing.dst_mac = MacAddr([2, 9, 9, 9, 9, 9]);
    bed.wire.set_up(1, false);
    bed.send(0, peer, &noise(1, 100), 7);
    bed.pass(Duration::from_secs(1));
    assert_eq!(bed.hosts[0].peers.at(peer.index).addressing.dst_mac, now);
    bed.wire.set_up(1, true);
    bed.pass(Duration::from_secs(1));
    assert_eq!(bed.hosts[1].told.messages().count(), 1);
}

/// The sender forgets its sessions and messages, and comes back under another number.
#[test]
fn a_sender_that_starts_anew_gets_its_turn_when_the_old_session_has_ended() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = in_the_middle(&mut bed);
    // No farewell: what was on its way is forgotten on this side alone. (Settled first, so that the memory is its own again.)
    let now_ns = bed.now_ns;
    bed.hosts[0].admission.requests.forget_held();
    bed.hosts[0].drop_outbound(peer.index, &Outcome::SessionEnded, now_ns);
    bed.hosts[0].fixed.sender_id ^= 0x5a5a << 40;
    bed.hosts[0].told.completions().clear();
    let options = ConnectOptions {
        max_message_len: LEN as u64,
        timeout: Duration::from_secs(1),
        ..ConnectOptions::default()
    };
    let mut refused = 0;
    let peer = loop {
        match bed.connect(0, &options) {
            Ok(peer) => break peer,
            Err(ConnectError::Rejected { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(refused < 20, "the old session never ends");
    };
    // The message that was begun is reported, and never shown.
    let mut incomplete = 0;
    loop {
        match bed.hosts[1].take_message() {
            Ok(None) => break,
            Err(RecvError::Incomplete { tag, .. }) => {
                assert_eq!(tag, 2);
                incomplete += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(incomplete, 1);
    for n in 10..15 {
        bed.exchange(0, peer, &noise(n, LEN));
        bed.exchange(0, peer, b"small");
    }
    bed.check_memory();
    assert_eq!(bed.hosts[1].counters.violations.total(), 0);
}

/// The receiver forgets the session without a word. Its sender is told by the silence, and may ask for another.
#[test]
fn a_receiver_that_starts_anew_is_noticed() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = in_the_middle(&mut bed);
    // Nothing of the old life reaches the sender.
    bed.wire.drop_next(1, u32::MAX);
    let landing = bed.hosts[1].landing.as_ref().expect("a landing channel");
    let key = landing.sessions.iter().next().expect("a session").terms.key;
    bed.hosts[1].abort_session(key, crate::notices::Fault::Stalled);
    let host = &mut bed.hosts[1];
    host.peers = crate::peer::Peers::new(host.admission.introductions.cookies());
    bed.hosts[1].landing.as_mut().expect("a landing channel").past = crate::landing_side::Past::new();
    bed.rounds(20);
    bed.wire.drop_next(1, 0);
    bed.hosts[1].told.forget_failures();
    let mut seconds = 0;
    let outcome = loop {
        if let Some(completion) = bed.hosts[0].told.completions().pop_front() {
            break completion.outcome;
        }
        bed.pass(Duration::from_millis(100));
        seconds += 1;
        assert!(seconds < 100, "the sender waits for ever");
    };
    assert!(
        matches!(outcome, Outcome::SessionEnded | Outcome::TimedOut),
        "{outcome:?}"
    );
    // What came for the session that is no more was late, or nobody's.
    let drops = bed.hosts[1].counters.drops;
    assert!(drops.late + drops.wrong_key > 0, "{drops:?}");
    let options = ConnectOptions {
        max_message_len: LEN as u64,
        ..ConnectOptions::default()
    };
    bed.hosts[0].end_session(peer.index, bed.now_ns);
    let peer = bed.connect(0, &options).expect("a session");
    bed.exchange(0, peer, &noise(5, LEN));
    bed.check_memory();
}

/// Another program has the address of one that has gone: it counts small messages from 0, and so does who answers it.
#[test]
fn a_program_at_the_address_of_an_earlier_one_is_answered() {
    let mut bed = Bed::new(&BedConfig::default());
    for program in 0..3 {
        let peer = bed.resolve(0);
        for tag in 0..3 {
            bed.send(0, peer, &noise(tag, 100), tag);
            let asked = bed.recv(1);
            bed.send(1, asked.peer(), &noise(program, 100), tag);
            assert_eq!(bed.recv(0).tag(), tag);
        }
        bed.pass(Duration::from_millis(100));
        bed.hosts[0].fixed.sender_id ^= 0x5a5a << (40 - program);
        let host = &mut bed.hosts[0];
        host.peers = crate::peer::Peers::new(host.admission.introductions.cookies());
        bed.hosts[0].told.completions().clear();
    }
}
