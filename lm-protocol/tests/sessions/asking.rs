//! The side that asks for sessions, and ends them.

use crate::*;

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
