//! Admission step by step, under virtual time.

mod receiver;

use lm_protocol::control::*;
use lm_protocol::geometry::{Layout, LinkShape, Wire};
use lm_protocol::session::*;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::VERSION;
use receiver::*;
use std::net::SocketAddrV4;
use std::time::Duration;

fn grant_of(reply: Option<ControlMessage>) -> Grant {
    match reply {
        Some(ControlMessage::Grant(grant)) => grant,
        other => panic!("no grant: {other:?}"),
    }
}

fn reject_of(reply: Option<ControlMessage>) -> Reject {
    match reply {
        Some(ControlMessage::Reject(reject)) => reject,
        other => panic!("no rejection: {other:?}"),
    }
}

fn some_grant() -> Grant {
    let mut queues = Queues::default();
    let message = ControlMessage::Request(request(1));
    grant_of(Grantor::new(&[3]).handle(peer(1), 9, &message, Time::ZERO, &mut permit(), &mut queues))
}

// ---- the applicant --------------------------------------------------------------------------------------------------

#[test]
fn requests_are_repeated_with_doubling_pauses_until_the_deadline() {
    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, Duration::from_millis(4500));
    let mut sent = Vec::new();
    while let Some(now) = applicant.poll_timeout() {
        while let Some(message) = applicant.poll_transmit(now) {
            sent.push((now.as_nanos() / 1_000_000, message));
        }
    }
    let withdrawn = (4500, ControlMessage::End(End::WITHDRAWN));
    assert_eq!(sent.pop(), Some(withdrawn));
    let (times, messages): (Vec<u64>, Vec<ControlMessage>) = sent.into_iter().unzip();
    assert_eq!(times, [0, 100, 300, 700, 1500, 2500, 3500]);
    assert!(
        messages
            .iter()
            .all(|&message| message == ControlMessage::Request(request(1)))
    );
    assert_eq!(*applicant.state(), ApplicantState::Unreachable);
    assert_eq!(applicant.poll_transmit(ms(10_000)), None);
}

#[test]
fn the_session_of_a_request_that_was_withdrawn_ends() {
    let mut queues = Queues::default();
    let mut grantor = Grantor::new(&[3]);
    let asking = ControlMessage::Request(request(1));
    let handle = |grantor: &mut Grantor, queues: &mut Queues, from, request_id, message: &ControlMessage| {
        grantor.handle(peer(from), request_id, message, Time::ZERO, &mut permit(), queues)
    };
    // Its grant and the withdrawal crossed each other.
    assert!(handle(&mut grantor, &mut queues, 1, 9, &asking).is_some());
    let withdrawn = ControlMessage::End(End::WITHDRAWN);
    for (from, request_id) in [(2, 9), (1, 8)] {
        assert_eq!(
            handle(&mut grantor, &mut queues, from, request_id, &withdrawn),
            None
        );
        assert_eq!(grantor.sessions().count(), 1, "somebody else's request");
    }
    assert_eq!(handle(&mut grantor, &mut queues, 1, 9, &withdrawn), None);
    assert_eq!(grantor.sessions().count(), 0);
    // A repetition that was late begins none.
    assert_eq!(handle(&mut grantor, &mut queues, 1, 9, &asking), None);
}

#[test]
fn a_grant_ends_the_asking() {
    let grant = some_grant();
    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
    applicant.poll_transmit(Time::ZERO);
    applicant.handle(8, &ControlMessage::Grant(grant), ms(1));
    assert_eq!(
        *applicant.state(),
        ApplicantState::Pending,
        "an answer to something else"
    );
    applicant.handle(9, &ControlMessage::Grant(grant), ms(2));
    assert_eq!(*applicant.state(), ApplicantState::Granted(grant));
    assert_eq!(applicant.poll_timeout(), None);
    // Repetitions, and everything else that comes late, change nothing.
    applicant.handle(9, &ControlMessage::Grant(grant), ms(3));
    let busy = Reject {
        reason: RejectReason::Busy,
        version: 1,
        retry_after_ms: 1,
        limit: 0,
    };
    applicant.handle(9, &ControlMessage::Reject(busy), ms(3));
    applicant.handle_refused();
    assert_eq!(*applicant.state(), ApplicantState::Granted(grant));
    assert_eq!(applicant.poll_transmit(ms(10_000)), None);
}

#[test]
fn capabilities_that_are_not_known_are_ignored() {
    let request = Request {
        capabilities: u32::MAX,
        ..request(1)
    };
    let mut queues = Queues::default();
    let message = ControlMessage::Request(request);
    let reply = Grantor::new(&[3]).handle(peer(1), 9, &message, Time::ZERO, &mut permit(), &mut queues);
    assert_eq!(grant_of(reply), some_grant());

    let grant = Grant {
        capabilities: u32::MAX,
        ..some_grant()
    };
    let mut applicant = Applicant::new(request, 9, Time::ZERO, SECOND);
    applicant.poll_transmit(Time::ZERO);
    applicant.handle(9, &ControlMessage::Grant(grant), ms(1));
    assert_eq!(*applicant.state(), ApplicantState::Granted(grant));
}

#[test]
fn a_busy_receiver_is_asked_again_when_it_said() {
    let busy = Reject {
        reason: RejectReason::Busy,
        version: 1,
        retry_after_ms: 350,
        limit: 0,
    };
    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
    applicant.poll_transmit(Time::ZERO);
    assert_eq!(applicant.busy(), None);
    applicant.handle(9, &ControlMessage::Reject(busy), ms(10));
    assert_eq!(*applicant.state(), ApplicantState::Pending);
    assert_eq!(applicant.busy(), Some(&busy));
    assert_eq!(applicant.poll_timeout(), Some(ms(360)));
    assert_eq!(applicant.poll_transmit(ms(359)), None);
    assert!(applicant.poll_transmit(ms(360)).is_some());
    assert_eq!(applicant.poll_timeout(), Some(ms(460)), "the pauses start anew");
    applicant.poll_transmit(ms(1000));
    assert_eq!(
        *applicant.state(),
        ApplicantState::Rejected(busy),
        "there, but busy until the deadline"
    );
    assert_eq!(applicant.busy(), None);

    // No hurry and no delay that a hostile answer asks for.
    for (retry_after_ms, next) in [(0, 10), (u32::MAX, 1000)] {
        let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND * 10);
        applicant.poll_transmit(Time::ZERO);
        applicant.handle(
            9,
            &ControlMessage::Reject(Reject {
                retry_after_ms,
                ..busy
            }),
            Time::ZERO,
        );
        assert_eq!(applicant.poll_timeout(), Some(ms(next)));
    }
}

#[test]
fn other_rejections_are_final() {
    for reason in [
        RejectReason::TooLarge,
        RejectReason::NotAllowed,
        RejectReason::Unsupported,
        RejectReason::NoMemory,
        RejectReason::ShuttingDown,
        RejectReason::Version,
        RejectReason::Unverified,
    ] {
        let reject = Reject {
            reason,
            version: 1,
            retry_after_ms: 0,
            limit: 77,
        };
        let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
        applicant.handle(9, &ControlMessage::Reject(reject), ms(1));
        assert_eq!(*applicant.state(), ApplicantState::Rejected(reject));
        assert_eq!(
            (applicant.poll_timeout(), applicant.poll_transmit(ms(2))),
            (None, None)
        );
    }
}

#[test]
fn refusal_by_the_host_and_another_version_are_answers() {
    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
    applicant.handle_refused();
    assert_eq!(*applicant.state(), ApplicantState::NotListening);

    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
    applicant.handle_error(&ControlError::VersionMismatch {
        theirs: 3,
        request_id: Some(8),
    });
    applicant.handle_error(&ControlError::VersionMismatch {
        theirs: 3,
        request_id: None,
    });
    applicant.handle_error(&ControlError::Length);
    assert_eq!(*applicant.state(), ApplicantState::Pending);
    applicant.handle_error(&ControlError::VersionMismatch {
        theirs: 3,
        request_id: Some(9),
    });
    let reject = Reject {
        reason: RejectReason::Version,
        version: 3,
        retry_after_ms: 0,
        limit: 0,
    };
    assert_eq!(*applicant.state(), ApplicantState::Rejected(reject));
}

#[test]
fn a_session_that_nobody_will_use_is_ended() {
    let grant = some_grant();
    let end = |session_key| {
        Some(ControlMessage::End(End {
            session_key,
            messages: 0,
        }))
    };

    // Too late.
    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
    applicant.poll_transmit(ms(1000));
    assert_eq!(*applicant.state(), ApplicantState::Unreachable);
    applicant.handle(9, &ControlMessage::Grant(grant), ms(1001));
    assert_eq!(applicant.poll_timeout(), Some(Time::ZERO));
    assert_eq!(applicant.poll_transmit(ms(1001)), end(grant.session_key));
    assert_eq!(
        (applicant.poll_timeout(), applicant.poll_transmit(ms(1001))),
        (None, None)
    );
    assert_eq!(*applicant.state(), ApplicantState::Unreachable);

    // Twice: the receiver was restarted between two answers.
    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
    applicant.handle(9, &ControlMessage::Grant(grant), ms(1));
    applicant.handle(
        9,
        &ControlMessage::Grant(Grant {
            session_key: 5,
            ..grant
        }),
        ms(2),
    );
    assert_eq!(*applicant.state(), ApplicantState::Granted(grant));
    assert_eq!(applicant.poll_transmit(ms(2)), end(5));

    // Not what was asked for: another wire, or packets that our link does not carry.
    let ipfrag = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4).unwrap();
    let jumbo = Layout::new(Wire::Lm, 9000, LinkShape::IPV4).unwrap();
    for layout in [ipfrag, jumbo] {
        let wrong = Grant { layout, ..grant };
        let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
        applicant.handle(9, &ControlMessage::Grant(wrong), ms(1));
        assert_eq!(*applicant.state(), ApplicantState::Incompatible(wrong));
        assert_eq!(applicant.poll_transmit(ms(1)), end(grant.session_key));
    }
    // Smaller packets, or a receiver whose device strips tags, are fine.
    let smaller = Layout::new(Wire::Lm, 1400, LinkShape { vlan_tags: 1 }).unwrap();
    let mut applicant = Applicant::new(request(1), 9, Time::ZERO, SECOND);
    applicant.handle(
        9,
        &ControlMessage::Grant(Grant {
            layout: smaller,
            ..grant
        }),
        ms(1),
    );
    assert!(matches!(applicant.state(), ApplicantState::Granted(_)));
}

#[test]
fn a_farewell_is_repeated_until_confirmed() {
    let mut farewell = Farewell::new(77, 3, 9, Time::ZERO, SECOND);
    let end = Some(ControlMessage::End(End {
        session_key: 77,
        messages: 3,
    }));
    assert_eq!(farewell.poll_transmit(Time::ZERO), end);
    assert_eq!(farewell.poll_transmit(ms(99)), None);
    assert_eq!(farewell.poll_transmit(ms(100)), end);
    farewell.handle(
        9,
        &ControlMessage::Ended(Ended {
            session_key: 76,
            delivered: 1,
            heard: None,
        }),
    );
    farewell.handle(
        8,
        &ControlMessage::Ended(Ended {
            session_key: 77,
            delivered: 1,
            heard: None,
        }),
    );
    assert_eq!(*farewell.state(), FarewellState::Pending);
    farewell.handle(
        9,
        &ControlMessage::Ended(Ended {
            session_key: 77,
            delivered: 3,
            heard: None,
        }),
    );
    assert_eq!(*farewell.state(), FarewellState::Ended { delivered: 3 });
    assert_eq!(
        (farewell.poll_timeout(), farewell.poll_transmit(ms(300))),
        (None, None)
    );

    let mut farewell = Farewell::new(77, 3, 9, Time::ZERO, SECOND);
    assert_eq!(farewell.poll_transmit(ms(1000)), None);
    assert_eq!(*farewell.state(), FarewellState::Unconfirmed);
    let mut farewell = Farewell::new(77, 3, 9, Time::ZERO, SECOND);
    farewell.handle_refused();
    assert_eq!(*farewell.state(), FarewellState::Unconfirmed);
}

// ---- the grantor ----------------------------------------------------------------------------------------------------

#[test]
fn one_session_for_each_queue() {
    let mut receiver = Receiver::new(&[1, 4]);
    let first = grant_of(receiver.ask(1, 9, request(1), Time::ZERO));
    assert_eq!(
        (first.landing_queue, first.tx_queue, first.lease_ms),
        (1, Some(1), 5000)
    );
    assert_eq!((first.packet_limit, first.first_message), (512, 7));
    assert_eq!(
        first.max_message_len,
        1 << 28,
        "the smaller one of permit and terms"
    );
    let second = grant_of(receiver.ask(2, 9, request(2), Time::ZERO));
    assert_eq!(second.landing_queue, 4);
    let third = reject_of(receiver.ask(3, 9, request(3), Time::ZERO));
    assert_eq!(
        (third.reason, third.retry_after_ms, third.version),
        (RejectReason::Busy, 100, VERSION)
    );
    assert_eq!(
        receiver.grantor.session(second.session_key).unwrap().data_peer(),
        SocketAddrV4::new(*peer(2).ip(), 40_000)
    );
    assert_eq!(receiver.grantor.session(!second.session_key), None);

    // A rejection is not remembered: the same request succeeds once a queue is free.
    receiver.end(1, first.session_key, ms(1));
    assert_eq!(grant_of(receiver.ask(3, 9, request(3), ms(2))).landing_queue, 1);
}

#[test]
fn the_same_request_gets_the_same_grant() {
    let mut receiver = Receiver::new(&[1, 2]);
    let grant = grant_of(receiver.ask(1, 9, request(1), Time::ZERO));
    assert_eq!(grant_of(receiver.ask(1, 9, request(1), ms(100))), grant);
    assert_eq!(receiver.queues.opened.len(), 1);
    assert_eq!(
        receiver.grantor.poll_timeout(),
        Some(ms(5100)),
        "a repetition is a sign of life"
    );
    // Another number, sender or address is another request.
    assert_ne!(
        grant_of(receiver.ask(1, 10, request(1), ms(100))).session_key,
        grant.session_key
    );
    assert_eq!(
        reject_of(receiver.ask(1, 9, request(2), ms(100))).reason,
        RejectReason::Busy
    );
    assert_eq!(
        reject_of(receiver.ask(2, 9, request(1), ms(100))).reason,
        RejectReason::Busy
    );
}

#[test]
fn one_address_has_no_more_places_than_it_may() {
    let queues: Vec<u16> = (1..=16).collect();
    let mut receiver = Receiver::new(&queues);
    receiver.grantor = Grantor::new(&queues).with_address_max(8);
    let mut granted = 0;
    for n in 0..16 {
        let reply = receiver.ask(1, n, request(u64::from(n)), Time::ZERO);
        granted += u32::from(matches!(reply, Some(ControlMessage::Grant(_))));
    }
    assert_eq!(granted, 8);
    grant_of(receiver.ask(2, 1, request(77), Time::ZERO));
}

#[test]
fn the_end_is_confirmed_as_often_as_asked() {
    let mut receiver = Receiver::new(&[1]);
    let key = grant_of(receiver.ask(1, 9, request(1), Time::ZERO)).session_key;
    assert_eq!(receiver.end(2, key, ms(1)), None, "somebody else's session");
    assert_eq!(receiver.queues.open.len(), 1);
    let ended = Some(ControlMessage::Ended(Ended {
        session_key: key,
        delivered: 5,
        heard: None,
    }));
    assert_eq!(receiver.end(1, key, ms(2)), ended);
    assert_eq!(
        receiver.queues.closed,
        [(key, CloseReason::Ended { messages: 6 })]
    );
    assert_eq!(receiver.end(1, key, ms(3)), ended);
    assert_eq!(receiver.queues.closed.len(), 1);
    let unknown = Some(ControlMessage::Ended(Ended {
        session_key: 5,
        delivered: 0,
        heard: None,
    }));
    assert_eq!(receiver.end(1, 5, ms(3)), unknown, "of an earlier life");

    // A repetition of the request that was on its way all the time begins nothing.
    assert_eq!(receiver.ask(1, 9, request(1), ms(4)), None);
    assert!(receiver.queues.open.is_empty());
    // Its sender's next request does.
    grant_of(receiver.ask(1, 10, request(1), ms(5)));
}

#[test]
fn a_lease_runs_out_unless_something_is_heard() {
    let mut receiver = Receiver::new(&[1, 2]);
    let key = grant_of(receiver.ask(1, 9, request(1), Time::ZERO)).session_key;
    let second = grant_of(receiver.ask(2, 9, request(2), Time::ZERO)).session_key;
    assert_eq!(receiver.grantor.poll_timeout(), Some(ms(5000)));
    receiver.grantor.touched(second, ms(3000));
    receiver.grantor.touched(!second, ms(3000));
    assert_eq!(receiver.grantor.expire(ms(4999), &mut receiver.queues), 0);
    assert_eq!(receiver.grantor.expire(ms(5000), &mut receiver.queues), 1);
    assert_eq!(receiver.queues.closed, [(key, CloseReason::Expired)]);
    assert_eq!(receiver.grantor.poll_timeout(), Some(ms(8000)));
    // A request finds an expired session's queue free, even if nobody looked in between.
    grant_of(receiver.ask(3, 9, request(3), ms(5000)));
    grant_of(receiver.ask(4, 9, request(4), ms(8000)));
    assert_eq!(receiver.queues.closed.len(), 2);
    // The sender that had vanished ends its session after all.
    let ended = Some(ControlMessage::Ended(Ended {
        session_key: key,
        delivered: 5,
        heard: None,
    }));
    assert_eq!(receiver.end(1, key, ms(8001)), ended);
    assert_eq!(receiver.queues.open.len(), 2);
}

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

/// Every grant was lost until the lease ran out, and the applicant is still asking.
#[test]
fn a_session_that_expired_unused_is_granted_anew() {
    let mut receiver = Receiver::new(&[1]);
    let first = grant_of(receiver.ask(1, 9, request(1), Time::ZERO));
    assert_eq!(receiver.grantor.expire(ms(5000), &mut receiver.queues), 1);
    let second = grant_of(receiver.ask(1, 9, request(1), ms(5001)));
    assert_ne!(first.session_key, second.session_key);
}

#[test]
fn refusals_say_why_and_take_nothing() {
    let mut receiver = Receiver::new(&[1]);
    let long = Request {
        max_message_len: (1 << 30) + 1,
        ..request(1)
    };
    let reject = reject_of(receiver.ask(1, 9, long, Time::ZERO));
    assert_eq!((reject.reason, reject.limit), (RejectReason::TooLarge, 1 << 30));

    let tiny = Request {
        mtu: 100,
        ..request(1)
    };
    assert_eq!(
        reject_of(receiver.ask(1, 10, tiny, Time::ZERO)).reason,
        RejectReason::Unsupported
    );

    receiver.queues.refuse = Some(RejectReason::NoMemory.into());
    assert_eq!(
        reject_of(receiver.ask(1, 11, request(1), Time::ZERO)).reason,
        RejectReason::NoMemory
    );
    receiver.queues.refuse = None;

    let mut nobody = |_: &Application<'_>| Err(RejectReason::NotAllowed.into());
    let message = ControlMessage::Request(request(1));
    let reply = receiver.grantor.handle(
        peer(1),
        12,
        &message,
        Time::ZERO,
        &mut nobody,
        &mut receiver.queues,
    );
    assert_eq!(reject_of(reply).reason, RejectReason::NotAllowed);
    assert!(receiver.queues.opened.is_empty() && receiver.grantor.sessions().next().is_none());

    // Whom the policy does not allow does not learn that the queues are taken.
    grant_of(receiver.ask(1, 13, request(1), Time::ZERO));
    let reply = receiver.grantor.handle(
        peer(2),
        1,
        &message,
        Time::ZERO,
        &mut nobody,
        &mut receiver.queues,
    );
    assert_eq!(reject_of(reply).reason, RejectReason::NotAllowed);
}

#[test]
fn closing_from_this_side() {
    let mut receiver = Receiver::new(&[1, 2]);
    let key = grant_of(receiver.ask(1, 9, request(1), Time::ZERO)).session_key;
    assert!(!receiver.grantor.close(!key, &mut receiver.queues));
    assert!(receiver.grantor.close(key, &mut receiver.queues));
    grant_of(receiver.ask(2, 9, request(2), Time::ZERO));
    receiver.grantor.shut_down(&mut receiver.queues);
    assert!(receiver.queues.open.is_empty());
    assert!(
        receiver
            .queues
            .closed
            .iter()
            .all(|(_, reason)| *reason == CloseReason::Local)
    );
    assert_eq!(
        reject_of(receiver.ask(3, 9, request(3), ms(1))).reason,
        RejectReason::ShuttingDown
    );
}

#[test]
fn another_version_is_told_ours_and_replies_are_not_answered() {
    let mut receiver = Receiver::new(&[1]);
    let error = ControlError::VersionMismatch {
        theirs: 1,
        request_id: Some(9),
    };
    let (request_id, reply) = receiver.grantor.handle_error(&error).unwrap();
    let reject = reject_of(Some(reply));
    assert_eq!(
        (request_id, reject.reason, reject.version),
        (9, RejectReason::Version, VERSION)
    );
    let anonymous = ControlError::VersionMismatch {
        theirs: 1,
        request_id: None,
    };
    assert_eq!(receiver.grantor.handle_error(&anonymous), None);
    assert_eq!(receiver.grantor.handle_error(&ControlError::Length), None);

    for message in [
        ControlMessage::Grant(some_grant()),
        ControlMessage::Reject(reject),
        ControlMessage::Ended(Ended {
            session_key: 1,
            delivered: 1,
            heard: None,
        }),
    ] {
        let Receiver {
            grantor,
            queues,
            permit,
        } = &mut receiver;
        assert_eq!(
            grantor.handle(peer(1), 9, &message, Time::ZERO, permit, queues),
            None
        );
    }
}
