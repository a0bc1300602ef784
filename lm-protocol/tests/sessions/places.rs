//! Sessions that lose their place and get one again.

use crate::*;

/// A path may be cut: silence is borne for longer than a lease, but nobody who finds no place waits for it.
#[test]
fn a_silent_session_goes_on_until_patience_ends_or_its_place_is_wanted() {
    let mut receiver = Receiver::new(&[1, 2]);
    receiver.grantor = Grantor::new(&[1, 2]).with_patience(Duration::from_secs(60));
    let first = grant_of(receiver.ask(1, 9, request(1), Time::ZERO)).session_key;
    assert_eq!(receiver.grantor.poll_timeout(), Some(ms(60_000)));
    assert_eq!(receiver.grantor.expire(ms(6000), &mut receiver.queues), 0);
    // There is a place beside it.
    let second = grant_of(receiver.ask(2, 9, request(2), ms(6000))).session_key;
    assert!(receiver.queues.closed.is_empty());
    // Now there is none, and its lease has run out.
    let third = grant_of(receiver.ask(3, 9, request(3), ms(7000))).session_key;
    assert_eq!(receiver.queues.closed, [(first, CloseReason::Expired)]);
    assert_eq!(receiver.grantor.next_way(), Some(ms(11_000)));
    // Those of the others have not.
    assert_eq!(
        reject_of(receiver.ask(4, 9, request(4), ms(8000))).reason,
        RejectReason::Busy
    );
    // The second one's path is whole again.
    receiver.grantor.touched(second, ms(60_000));
    assert_eq!(receiver.grantor.expire(ms(66_999), &mut receiver.queues), 0);
    assert_eq!(receiver.grantor.expire(ms(67_000), &mut receiver.queues), 1);
    assert_eq!(receiver.queues.closed[1], (third, CloseReason::Expired));
    assert_eq!(receiver.grantor.expire(ms(119_999), &mut receiver.queues), 0);
    assert_eq!(receiver.grantor.expire(ms(120_000), &mut receiver.queues), 1);
}

/// A place in which nothing of a message comes goes to whoever waits, and so does that of one whose lease has run out; their sessions go on
/// without, and have one again when they have something to send and one is free.
#[test]
fn a_session_with_a_message_under_way_goes_on_without_its_place() {
    let mut receiver = Receiver::new(&[1, 2]);
    receiver.grantor = Grantor::new(&[1, 2])
        .with_aside_max(2)
        .with_patience(Duration::from_secs(60));
    let keys =
        [1, 2].map(|host| grant_of(receiver.ask(host, 9, request(host.into()), Time::ZERO)).session_key);
    let unused = |since, is_idle| Unused {
        since: ms(since),
        is_idle,
    };
    (receiver.queues.unused).extend(keys.into_iter().zip([unused(100, false), unused(200, false)]));
    for key in keys {
        receiver.grantor.touched(key, ms(5000));
    }
    assert_eq!(
        receiver
            .grantor
            .displace((*peer(9).ip(), Time::MAX), ms(5099), &mut receiver.queues),
        None
    );
    assert_eq!(receiver.grantor.free_places(), 0);
    // The first one cannot, so that it is the second one's turn.
    receiver.queues.fixed.push(keys[0]);
    assert_eq!(
        receiver
            .grantor
            .displace((*peer(9).ip(), Time::MAX), ms(5200), &mut receiver.queues),
        None
    );
    assert_eq!(
        (receiver.grantor.free_places(), &receiver.queues.aside[..]),
        (1, &keys[1..])
    );
    let third = grant_of(receiver.ask(3, 9, request(3), ms(5200))).session_key;
    assert_eq!(receiver.grantor.sessions().count(), 3);
    // It is as it was for its sender: its repeated request, its lease.
    assert_eq!(
        grant_of(receiver.ask(2, 9, request(2), ms(6000))).session_key,
        keys[1]
    );
    // A lease that has run out: who can goes aside, who cannot ends, and who is aside bears its silence as long as patience lasts.
    receiver.queues.unused.insert(third, unused(5200, false));
    assert_eq!(receiver.grantor.make_way(ms(11_500), &mut receiver.queues), 2);
    assert_eq!(receiver.queues.closed, [(keys[0], CloseReason::Expired)]);
    assert_eq!(receiver.queues.aside, [keys[1], third]);
    assert_eq!(receiver.grantor.expire(ms(20_000), &mut receiver.queues), 0);
    let ended = |session_key| Ended {
        session_key,
        delivered: 5,
        heard: None,
    };
    // As many as may be aside are: then they end.
    let fourth = grant_of(receiver.ask(4, 9, request(4), ms(20_000))).session_key;
    receiver.queues.unused.insert(fourth, unused(20_000, false));
    assert_eq!(
        receiver
            .grantor
            .displace((*peer(9).ip(), Time::MAX), ms(24_999), &mut receiver.queues),
        None
    );
    let told = receiver
        .grantor
        .displace((*peer(9).ip(), Time::MAX), ms(25_000), &mut receiver.queues);
    assert_eq!(told, Some((peer(4), 9, ended(fourth))));
    assert_eq!(receiver.grantor.free_places(), 2);
    // What was under way is here: one that was idle for as long waits for no place, until it has something to send.
    receiver.queues.unused.insert(keys[1], unused(21_000, true));
    let waiting = |receiver: &Receiver, now| {
        let waiting = receiver.grantor.waiting(now, &receiver.queues);
        (waiting.iter().map(|(session, _)| session.grant.session_key)).collect::<Vec<_>>()
    };
    assert_eq!(waiting(&receiver, ms(30_999)), [keys[1], third]);
    assert_eq!(waiting(&receiver, ms(31_000)), [third]);
    receiver.queues.unused.remove(&keys[1]);
    assert_eq!(waiting(&receiver, ms(31_000)), [keys[1], third]);
    let asked = grant_of(receiver.ask(2, 9, request(2), ms(31_000)));
    assert!(!asked.lands);
    assert!(receiver.grantor.land(keys[1], &mut receiver.queues));
    assert!(
        !receiver.grantor.land(keys[1], &mut receiver.queues),
        "it has one"
    );
    let asked = grant_of(receiver.ask(2, 9, request(2), ms(31_000)));
    assert_eq!((asked.session_key, asked.lands), (keys[1], true));
    assert_eq!(receiver.queues.aside, [third]);
    // The other one's sender ends it itself.
    assert!(matches!(
        receiver.end(3, third, ms(31_001)),
        Some(ControlMessage::Ended(_))
    ));
    assert!(receiver.queues.aside.is_empty());
}

/// A host that has as many sessions as it may takes no place from others, however long they have not used theirs.
#[test]
fn who_has_enough_displaces_nobody_else() {
    let mut receiver = Receiver::new(&[1, 2]);
    receiver.grantor = Grantor::new(&[1, 2]).with_address_max(1);
    let keys =
        [1, 2].map(|host| grant_of(receiver.ask(host, 9, request(host.into()), Time::ZERO)).session_key);
    for (key, since) in keys.into_iter().zip([100, 200]) {
        let since = ms(since);
        receiver
            .queues
            .unused
            .insert(key, Unused { since, is_idle: true });
    }
    // The first one's has been unused for longer, and the second host has one.
    let told = receiver
        .grantor
        .displace((*peer(2).ip(), Time::MAX), ms(6000), &mut receiver.queues);
    assert_eq!(told.map(|(peer, ..)| peer), Some(peer(2)));
    let told = receiver
        .grantor
        .displace((*peer(2).ip(), Time::MAX), ms(6000), &mut receiver.queues);
    assert_eq!(told.map(|(peer, ..)| peer), Some(peer(1)));
}

/// An address has half of the sessions that may be without a place, and no more.
#[test]
fn who_has_sessions_aside_leaves_some_to_others() {
    let mut receiver = Receiver::new(&[1, 2]);
    receiver.grantor = Grantor::new(&[1, 2]).with_aside_max(4);
    for number in 0..2 {
        let key = grant_of(receiver.ask(1, number, request(number.into()), Time::ZERO)).session_key;
        let since = Time::ZERO;
        receiver.queues.unused.insert(
            key,
            Unused {
                since,
                is_idle: false,
            },
        );
        assert_eq!(
            receiver
                .grantor
                .displace((*peer(9).ip(), Time::MAX), ms(5000), &mut receiver.queues),
            None
        );
    }
    assert_eq!(receiver.grantor.free_places(), 2);
    let mut aside = |host: u8, number: u32| {
        let request = request(number.into());
        let application = Application::new(peer(host), number, &request);
        (receiver.grantor).grant_aside(&application, ms(1), &mut receiver.permit, &mut receiver.queues)
    };
    assert_eq!(
        aside(1, 2).map_err(|refusal| refusal.reason),
        Err(RejectReason::Busy)
    );
    assert!(!aside(2, 3).unwrap().lands);
}
