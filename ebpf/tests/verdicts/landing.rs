//! Which fragments land.

use crate::*;

#[test]
fn the_session_decides_who_lands() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        expect(&mut pair, LANDING, &legal(), PassNoSession);
        pair.open(&lm_session(), 1, 100);
        expect(
            &mut pair,
            LANDING,
            &Packet {
                key: legal().key ^ 0x100,
                ..legal()
            },
            PassKey,
        );
        expect(
            &mut pair,
            LANDING,
            &Packet {
                key: legal().key ^ 1 << 63,
                ..legal()
            },
            PassKey,
        );
        expect(
            &mut pair,
            LANDING,
            &Packet {
                source: STRANGER,
                ..legal()
            },
            PassPeer,
        );
        expect(
            &mut pair,
            LANDING,
            &Packet {
                source_port: 1,
                ..legal()
            },
            PassPeer,
        );
        expect(&mut pair, LANDING, &Packet { index: 3, ..legal() }, PassIndex);
        expect(&mut pair, LANDING, &Packet { count: 0, ..legal() }, PassIndex);
        expect(
            &mut pair,
            LANDING,
            &Packet {
                index: u32::MAX,
                count: u32::MAX,
                ..legal()
            },
            PassIndex,
        );
        pair.set_xsk(LANDING, false);
        expect(&mut pair, LANDING, &legal(), PassNoSocket);
        pair.set_xsk(LANDING, true);
        pair.post(0);
        expect(&mut pair, LANDING, &legal(), PassUnposted);
        pair.post(1);
        pair.limit(&lm_session(), 9);
        expect(&mut pair, LANDING, &legal(), PassLimit);
        pair.limit(&lm_session(), 10);
        // None of the refusals moved the session's state: the same packet lands now, once, in the only frame.
        expect(&mut pair, LANDING, &legal(), RedirectLanding);
        expect(&mut pair, LANDING, &legal(), PassOrder);
        expect(&mut pair, LANDING, &Packet::data(10, 1, 3, 1448), PassUnposted);
        pair.close();
        pair.post(100);
        expect(&mut pair, LANDING, &Packet::data(10, 1, 3, 1448), PassNoSession);
    });
}

#[test]
fn fragments_have_the_length_of_their_place() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 1000, 1000);
        for (index, payload_len, verdict) in [
            (2, 0, PassLength),
            (2, 1449, PassLength),
            (1, 1447, PassLength),
            (1, 1449, PassLength),
            (1, 0, PassLength),
            (2, 1448, RedirectLanding),
            (1, 1448, RedirectLanding),
        ] {
            expect(
                &mut pair,
                LANDING,
                &Packet::data(10, index, 3, payload_len),
                verdict,
            );
        }
        expect(&mut pair, LANDING, &Packet::data(11, 0, 1, 1), RedirectLanding);
        // Nothing may follow a fragment that is longer than any padded frame.
        expect(
            &mut pair,
            LANDING,
            &Packet {
                trailer_len: 1,
                ..Packet::data(12, 1, 2, 1000)
            },
            PassLength,
        );
        expect(
            &mut pair,
            LANDING,
            &Packet {
                trailer_len: 1,
                ..Packet::data(12, 0, 2, 1448)
            },
            PassLength,
        );
        // 66 header bytes and one of payload: never padded on the wire.
        expect(
            &mut pair,
            LANDING,
            &Packet {
                trailer_len: 1,
                ..Packet::data(12, 0, 1, 1)
            },
            PassLength,
        );
    });
}

#[test]
fn windows_forward_and_indices_descending() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 3, 1000);
        let mut step = |message, index, verdict| {
            // 10 fragments: windows 3 2 1 0, 7 6 5 4, 9 8; the last fragment is index 9.
            let payload_len = if index == 9 { 5 } else { 1448 };
            let packet = Packet::data(message, index, 10, payload_len);
            assert_eq!(
                pair.run(LANDING, &packet.bytes()),
                verdict,
                "message {message}, index {index}"
            );
        };
        step(9, 0, PassOrder); // before the first message
        step(10, 2, RedirectLanding); // 3 is lost
        step(10, 3, PassOrder); // too late
        step(10, 2, PassOrder); // duplicate
        step(10, 0, RedirectLanding); // 1 is lost
        step(10, 1, PassOrder);
        step(10, 7, RedirectLanding); // next window
        step(10, 3, PassOrder); // window before
        step(10, 4, RedirectLanding);
        step(10, 9, RedirectLanding);
        step(10, 7, PassOrder);
        step(12, 3, RedirectLanding); // message 11 is lost
        step(11, 3, PassOrder);
        step(10, 8, PassOrder);
        step(13, 3, PassLimit);
        step(12, 1, RedirectLanding);
    });
}

#[test]
fn message_numbers_wrap() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(
            &SessionAdmission {
                first_message: u32::MAX - 1,
                ..lm_session()
            },
            4,
            1000,
        );
        for (message, verdict) in [
            (u32::MAX - 2, PassOrder),
            (u32::MAX - 1, RedirectLanding),
            (u32::MAX, RedirectLanding),
            (0, RedirectLanding),
            (u32::MAX, PassOrder),
            (2, PassLimit),
            (1, RedirectLanding),
            (1 + (1 << 31), PassLimit), // exactly opposite: neither before nor after
            (2 + (1 << 31), PassOrder),
        ] {
            expect(&mut pair, LANDING, &Packet::data(message, 0, 1, 9), verdict);
        }
    });
}

#[test]
fn the_log_wraps_and_positions_outlive_sessions() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        let frame = |message| Packet::data(message, 0, 1, 100).bytes();
        pair.open(&lm_session(), 40000, 40000);
        for message in 10..40010 {
            let frame = frame(message);
            assert_eq!(
                pair.gate.test_run(pair.ifindex, LANDING, &frame).unwrap(),
                4,
                "XDP_REDIRECT"
            );
            assert!(pair.model.run(LANDING, &frame).is_redirect());
        }
        assert_eq!(pair.run(LANDING, &frame(40010)), PassLimit);
        for position in 40000 - u64::from(lm_ebpf::Log::ENTRIES)..40000 {
            let entry = pair.log.entry(position);
            assert_eq!(
                (entry.sequence, entry.message),
                (position as u16, position as u32 + 10)
            );
            assert_eq!((entry.index, entry.frame_len, entry.padding_len), (0, 166, 0));
        }
        pair.close();
        pair.open(&lm_session(), 1, 1);
        assert_eq!(pair.run(LANDING, &frame(10)), RedirectLanding);
        assert_eq!(pair.log.producer(), 40001);
        assert_eq!(pair.run(LANDING, &frame(10)), PassOrder);
    });
}

#[test]
fn a_session_with_a_tag_has_no_packets() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(
            &SessionAdmission {
                header_len: 70,
                ..lm_session()
            },
            5,
            100,
        );
        expect(&mut pair, LANDING, &legal(), PassHeader);
        expect(
            &mut pair,
            LANDING,
            &Packet {
                vlan: Some(3),
                ..legal()
            },
            PassForeign,
        );
    });
}

#[test]
fn a_session_needs_a_landing_queue_and_legal_terms() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        let open = |pair: &mut Pair, queue, session| pair.gate.open_session(queue, &session);
        assert!(matches!(
            open(&mut pair, GENERAL, lm_session()),
            Err(GateError::NotLanding(0))
        ));
        assert!(matches!(
            open(&mut pair, 64, lm_session()),
            Err(GateError::NoQueue(64))
        ));
        for illegal in [
            SessionAdmission {
                window_fragments: 0,
                ..lm_session()
            },
            SessionAdmission {
                window_fragments: 3,
                ..lm_session()
            },
            SessionAdmission {
                payload_len: 0,
                ..lm_session()
            },
            SessionAdmission {
                header_len: 42,
                ..lm_session()
            },
            SessionAdmission {
                payload_len: 1472 + 1,
                ..ipfrag_session()
            },
            SessionAdmission {
                wire: Wire::IpFrag,
                ..lm_session()
            },
        ] {
            assert!(
                matches!(
                    open(&mut pair, LANDING, illegal),
                    Err(GateError::IllegalSession(_))
                ),
                "{illegal:?}"
            );
        }
        open(&mut pair, LANDING, lm_session()).unwrap();
        assert!(matches!(
            open(&mut pair, LANDING, lm_session()),
            Err(GateError::Open { queue: 1, .. })
        ));
        assert_eq!(pair.log.message_limit(lm_session().row()), 9);
        // Taking the role away closes the session.
        pair.gate.set_role(LANDING, Role::None).unwrap();
        pair.model.set_role(LANDING, Role::None);
        assert_eq!(pair.run_anywhere(LANDING, &legal().bytes()), PassNoSession);
        pair.gate.set_role(LANDING, Role::Landing).unwrap();
        pair.model.set_role(LANDING, Role::Landing);
        assert_eq!(pair.run_anywhere(LANDING, &legal().bytes()), PassNoSession);
        assert!(matches!(pair.gate.log(PLAIN), Err(GateError::NoRole(PLAIN))));
        assert_eq!(PEER, lm_session().peer_ip);
    });
}

#[test]
fn sessions_of_a_queue_do_not_see_each_other() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        let other = SessionAdmission {
            key: lm_session().key ^ 4,
            peer_port: lm_session().peer_port + 1,
            first_message: 70,
            ..lm_session()
        };
        let fragments = SessionAdmission {
            first_message: 500,
            ..ipfrag_session()
        };
        pair.open(&lm_session(), 4, 100);
        pair.open(&other, 1, 100);
        pair.open(&fragments, 1, 100);
        let rows = [lm_session(), other, fragments].map(|session| session.row());
        assert_eq!(rows, [55, 53, 0]);
        let of = |session: &SessionAdmission, message, index| {
            let mut packet = Packet::data(message, index, 4, 1448);
            packet.key = session.key;
            packet.source_port = session.peer_port;
            packet.bytes()
        };
        // Each has an order and a limit of its own; the log has one order.
        assert_eq!(pair.run(LANDING, &of(&lm_session(), 10, 3)), RedirectLanding);
        assert_eq!(pair.run(LANDING, &of(&other, 70, 2)), RedirectLanding);
        let fragment = Packet::ip_fragment(500, 1480, true, 1480).bytes();
        assert_eq!(pair.run(LANDING, &fragment), RedirectLanding);
        assert_eq!(pair.run(LANDING, &of(&lm_session(), 10, 2)), RedirectLanding);
        assert_eq!(pair.run(LANDING, &of(&other, 70, 3)), PassOrder);
        assert_eq!(pair.run(LANDING, &of(&other, 71, 3)), PassLimit);
        assert_eq!(pair.run(LANDING, &of(&lm_session(), 11, 3)), RedirectLanding);
        let logged: Vec<_> = (0..5)
            .map(|at| pair.log.entry(at))
            .map(|entry| (entry.session, entry.message, entry.index))
            .collect();
        let expected = [(55, 10, 3), (53, 70, 2), (0, 500, 1), (55, 10, 2), (55, 11, 3)];
        assert_eq!(logged, expected);
        // A key at another's place, a key at nobody's, the right key from another's port.
        let mut packet = Packet::data(70, 1, 4, 1448);
        packet.key = other.key ^ 0x100;
        assert_eq!(pair.run(LANDING, &packet.bytes()), PassKey);
        packet.key = other.key ^ 16;
        assert_eq!(pair.run(LANDING, &packet.bytes()), PassNoSession);
        packet.key = other.key;
        assert_eq!(pair.run(LANDING, &packet.bytes()), PassPeer);
        // One is closed, the others go on.
        pair.gate.close_session(LANDING, other.row()).unwrap();
        pair.model.close_session(LANDING, other.row());
        assert!(pair.gate.is_closing(LANDING, other.row()));
        assert_eq!(pair.run(LANDING, &of(&other, 70, 1)), PassNoSession);
        assert_eq!(pair.run(LANDING, &of(&lm_session(), 11, 2)), RedirectLanding);
        // Its place can be taken again, which waits until no CPU can be inside with the old one.
        pair.open(&other, 1, 100);
        assert!(!pair.gate.is_closing(LANDING, other.row()));
        assert_eq!(pair.run(LANDING, &of(&other, 70, 3)), RedirectLanding);
    });
}
