//! The side that grants sessions.

use crate::*;

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
