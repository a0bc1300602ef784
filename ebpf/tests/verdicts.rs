//! Every branch of the gate, by `BPF_PROG_TEST_RUN`: each case runs through the gate and through the model, which must agree
//! (`bed::pair`), and the verdict must be the one written here.

mod bed;

use std::net::Ipv4Addr;

use bed::packet::{CONTROL, CONTROL_PORT, EAGER, LAST_SMALL, LOCAL, PEER, Packet, VERSION};
use bed::pair::{GENERAL, LANDING, PLAIN, Pair, ipfrag_session, lm_session};
use lm_ebpf::Verdict::{self, *};
use lm_ebpf::{GateError, Role};
use lm_protocol::geometry::Wire;
use lm_protocol::landing::SessionAdmission;

const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);

fn expect(pair: &mut Pair, queue: u32, packet: &Packet, verdict: Verdict) {
    assert_eq!(pair.run(queue, &packet.bytes()), verdict, "{packet:?}");
}

/// Fragment 2 of 3 of the session's first message: legal, and never accepted in a test that expects refusals.
fn legal() -> Packet {
    Packet::data(10, 2, 3, 1000)
}

#[test]
fn what_is_not_ours_passes() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 1, 100);
        let foreign = [
            Packet {
                ethernet_type: 0x86dd,
                ..legal()
            },
            Packet {
                ethernet_type: 0x0806,
                ..legal()
            },
            Packet {
                ethernet_type: 0x88a8,
                ..legal()
            },
            Packet {
                ethernet_type: 0x8100,
                vlan: Some(1),
                ..legal()
            },
            Packet {
                version_words: 0x65,
                ..legal()
            },
            Packet {
                protocol: 6,
                ..legal()
            },
            Packet {
                destination: STRANGER,
                ..legal()
            },
            Packet {
                destination_port: 53,
                ..legal()
            },
        ];
        for packet in &foreign {
            expect(&mut pair, LANDING, packet, PassForeign);
            expect(&mut pair, GENERAL, packet, PassForeign);
        }
        let control = Packet {
            destination_port: CONTROL_PORT,
            ..legal()
        };
        expect(&mut pair, LANDING, &control, PassControl);
        expect(
            &mut pair,
            LANDING,
            &Packet {
                vlan: Some(7),
                ..control
            },
            PassControl,
        );
        expect(
            &mut pair,
            LANDING,
            &Packet {
                version_words: 0x46,
                ..legal()
            },
            PassOptions,
        );
        expect(
            &mut pair,
            LANDING,
            &Packet {
                version_words: 0x44,
                ..legal()
            },
            PassOptions,
        );
        expect(&mut pair, LANDING, &legal(), RedirectLanding);
    });
}

#[test]
fn any_address_is_ours_without_one() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(None);
        pair.open(&lm_session(), 1, 100);
        let eager = Packet {
            destination: STRANGER,
            ..Packet::lm(EAGER, 64)
        };
        expect(&mut pair, GENERAL, &eager, RedirectGeneral);
        expect(
            &mut pair,
            LANDING,
            &Packet {
                destination: STRANGER,
                ..legal()
            },
            PassPeer,
        );
    });
}

#[test]
fn every_truncation_passes() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 1, 100);
        for vlan in [None, Some(5)] {
            let whole = Packet { vlan, ..legal() }.bytes();
            let network = if vlan.is_some() { 18 } else { 14 };
            // The kernel runs the program on frames from 14 bytes on.
            for len in 14..whole.len() {
                let verdict = if len < network + 20 {
                    PassForeign
                } else {
                    PassMalformed
                };
                assert_eq!(pair.run(LANDING, &whole[..len]), verdict, "{len} bytes");
            }
        }
        assert_eq!(pair.log.producer(), 0);
    });
}

#[test]
fn lengths_that_contradict_each_other() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 1, 100);
        let (ip_len, udp_len) = (20 + 8 + 24 + 1000, 8 + 24 + 1000);
        let malformed = [
            Packet {
                total_len: Some(0),
                ..legal()
            },
            Packet {
                total_len: Some(19),
                ..legal()
            },
            Packet {
                total_len: Some(20),
                ..legal()
            },
            Packet {
                total_len: Some(ip_len - 1),
                ..legal()
            },
            Packet {
                total_len: Some(ip_len + 1),
                ..legal()
            },
            Packet {
                total_len: Some(ip_len + 1),
                trailer_len: 1,
                ..legal()
            },
            Packet {
                total_len: Some(u16::MAX),
                ..legal()
            },
            Packet {
                udp_len: Some(0),
                ..legal()
            },
            Packet {
                udp_len: Some(31),
                ..legal()
            },
            Packet {
                udp_len: Some(udp_len - 1),
                ..legal()
            },
            Packet {
                udp_len: Some(udp_len + 1),
                ..legal()
            },
            Packet {
                udp_len: Some(u16::MAX),
                ..legal()
            },
            Packet {
                lm_payload_len: Some(999),
                ..legal()
            },
            Packet {
                lm_payload_len: Some(1001),
                ..legal()
            },
            Packet {
                lm_payload_len: Some(u16::MAX),
                ..legal()
            },
            Packet {
                has_lm: false,
                payload_len: 23,
                ..legal()
            },
            Packet {
                has_lm: false,
                payload_len: 0,
                ..legal()
            },
        ];
        for packet in &malformed {
            expect(&mut pair, LANDING, packet, PassMalformed);
            expect(&mut pair, GENERAL, packet, PassMalformed);
        }
    });
}

#[test]
fn versions_and_types() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 1, 100);
        for version in (0..16).filter(|&version| version != VERSION) {
            let packet = Packet {
                version_type: version << 4 | 1,
                lm_payload_len: Some(7),
                ..legal()
            };
            expect(&mut pair, LANDING, &packet, PassVersion);
        }
        for kind in [0, 14] {
            expect(&mut pair, LANDING, &Packet::lm(kind, 10), PassType);
            expect(&mut pair, GENERAL, &Packet::lm(kind, 10), PassType);
        }
        for kind in (EAGER..=LAST_SMALL).chain([CONTROL]) {
            expect(&mut pair, GENERAL, &Packet::lm(kind, 10), RedirectGeneral);
            expect(
                &mut pair,
                GENERAL,
                &Packet {
                    vlan: Some(9),
                    ..Packet::lm(kind, 0)
                },
                RedirectGeneral,
            );
            expect(&mut pair, LANDING, &Packet::lm(kind, 10), PassOneCopy);
        }
        pair.set_xsk(GENERAL, false);
        expect(&mut pair, GENERAL, &Packet::lm(EAGER, 10), PassOneCopy);
        pair.set_xsk(GENERAL, true);
        expect(&mut pair, GENERAL, &legal(), PassNoSession);
    });
}

#[test]
fn queues_without_a_role_pass_everything() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        for (packet, verdict) in [
            (Packet::lm(EAGER, 10), PassOneCopy),
            (legal(), PassNoSession),
            (Packet::ip_fragment(1, 1480, true, 1480), PassFragment),
            (
                Packet {
                    destination_port: 53,
                    ..legal()
                },
                PassForeign,
            ),
        ] {
            let (before, reach) = (
                pair.gate.passed_elsewhere(),
                u64::from(verdict.may_reach_data_socket()),
            );
            assert_eq!(pair.run_anywhere(PLAIN, &packet.bytes()), verdict);
            assert_eq!(pair.gate.passed_elsewhere() - before, reach);
        }
    });
}

#[test]
fn queues_beyond_the_maps_pass_and_count() {
    bed::in_namespace(|| {
        bed::ip(
            "link add big0 numrxqueues 66 numtxqueues 66 type veth peer name big1 numrxqueues 66 numtxqueues 66",
        );
        bed::ip("link set big0 up");
        let ifindex = bed::ifindex("big0");
        let gate = lm_ebpf::Gate::attach(ifindex, &Default::default(), Default::default()).unwrap();
        for queue in [63, 64, 65] {
            let before = gate.counters().unwrap();
            assert_eq!(
                gate.test_run(ifindex, queue, &legal().bytes()).unwrap(),
                2,
                "XDP_PASS"
            );
            let counted = gate.counters().unwrap().since(&before);
            assert_eq!(
                (counted.total(), counted.get(PassNoSession)),
                (1, 1),
                "queue {queue}"
            );
        }
        assert_eq!(gate.passed_elsewhere(), 3);
    });
}

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
        expect(
            &mut pair,
            LANDING,
            &Packet {
                vlan: Some(3),
                ..legal()
            },
            PassHeader,
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
fn a_vlan_session_wants_the_tag() {
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
            RedirectLanding,
        );
        assert_eq!(pair.log.entry(0).frame_len, 70 + 1000);
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

/// In zero-copy mode a general queue's driver keeps the frames that user space does not allow to be redirected.
#[test]
fn a_zero_copy_general_queue_takes_what_is_allowed() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.gate.set_role(GENERAL, Role::GeneralZeroCopy).unwrap();
        pair.model.set_role(GENERAL, Role::GeneralZeroCopy);
        let eager = Packet::lm(EAGER, 64);
        let mut logs = [
            pair.gate.log(GENERAL).expect("a log"),
            pair.model.log(GENERAL).expect("a log"),
        ];
        expect(&mut pair, GENERAL, &eager, PassOneCopy);
        for (allowed, redirected) in [(2, 2), (2, 0), (3, 1), (1, 0), (8, 5)] {
            logs.iter_mut().for_each(|log| log.set_posted(allowed));
            for _ in 0..redirected {
                expect(&mut pair, GENERAL, &eager, RedirectGeneral);
            }
            expect(&mut pair, GENERAL, &eager, PassOneCopy);
            let foreign = Packet {
                destination_port: 9,
                ..eager.clone()
            };
            expect(&mut pair, GENERAL, &foreign, PassForeign);
        }
        logs.iter_mut().for_each(|log| log.set_posted(100));
        pair.set_xsk(GENERAL, false);
        expect(&mut pair, GENERAL, &eager, PassOneCopy);
    });
}

/// In zero-copy mode what lies in a frame may be anything by the time the gate runs: all of it goes to the socket, and is counted.
#[test]
fn a_zero_copy_landing_queue_takes_everything_unread() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.gate.set_role(LANDING, Role::LandingZeroCopy).unwrap();
        pair.model.set_role(LANDING, Role::LandingZeroCopy);
        // With and without a session, beyond what is posted and announced, whatever it is.
        let anything = [
            legal().bytes(),
            Packet {
                ethernet_type: 0x0806,
                ..legal()
            }
            .bytes(),
            vec![0xa5; 1514],
            vec![0; 14],
        ];
        for frame in &anything {
            assert_eq!(pair.run(LANDING, frame), RedirectLanding);
        }
        pair.open(&lm_session(), 1, 1);
        for frame in anything.iter().chain(&anything) {
            assert_eq!(pair.run(LANDING, frame), RedirectLanding);
        }
        assert_eq!(pair.log.producer(), 12);
        assert_eq!(pair.log.entry(3).message, 0, "nothing is logged");
        // Other queues are what they were.
        assert_eq!(pair.run_anywhere(PLAIN, &anything[1]), PassForeign);
        pair.close();
        pair.set_xsk(LANDING, false);
        assert_eq!(pair.run(LANDING, &anything[0]), PassNoSocket);
        pair.set_xsk(LANDING, true);
        // Counting goes on where it was: the log's positions are those of descriptors in either role.
        pair.gate.set_role(LANDING, Role::Landing).unwrap();
        pair.model.set_role(LANDING, Role::Landing);
        pair.open(&lm_session(), 1, 4);
        assert_eq!(pair.run(LANDING, &legal().bytes()), RedirectLanding);
        assert_eq!((pair.log.producer(), pair.log.entry(12).message), (13, 10));
    });
}

#[test]
fn a_packet_of_several_frames_lands_where_as_many_are_posted() {
    const CAPACITY: u32 = 3840;
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        let session = SessionAdmission {
            payload_len: 8944,
            window_fragments: 64,
            ..lm_session()
        };
        pair.set_capacity(CAPACITY);
        let first = session.first_message;
        pair.open(&session, 8, 0);
        let at = pair.log.producer();
        // A full fragment is 9010 bytes, in three frames.
        let full = |message: u32, index| Packet::data(first + message, index, 8, 8944);
        let last = |message: u32, payload_len| Packet::data(first + message, 7, 8, payload_len);
        // Posted, but nothing is said of the frames.
        pair.post(at + 1);
        expect(&mut pair, LANDING, &full(0, 6), PassSlot);
        pair.set_slot(at, 3, 9010);
        expect(&mut pair, LANDING, &full(0, 6), RedirectLanding);
        // One byte more than two frames hold takes three.
        for (frames, payload_len, verdict) in [
            (2, 7680 - 66 + 1, PassSlot),
            (2, 3840 - 66, PassSlot),
            (3, 7680 - 66, PassSlot),
            (2, 7680 - 66, RedirectLanding),
            (1, 3840 - 66 + 1, PassSlot),
            (1, 3840 - 66, RedirectLanding),
            (3, 7680 - 66 + 1, RedirectLanding),
            (1, 1, RedirectLanding),
        ] {
            let position = pair.log.producer();
            pair.set_slot(position, frames, 9010);
            pair.post(position + 1);
            let message = (position - at) as u32;
            expect(&mut pair, LANDING, &last(message, payload_len), verdict);
        }
        // A longer packet would end in a place that is not its slot's (I2), though it takes as many frames.
        let position = pair.log.producer();
        pair.set_slot(position, 3, 9009);
        pair.post(position + 1);
        expect(&mut pair, LANDING, &full(5, 6), PassSlot);
        pair.set_slot(position, 3, 9010);
        expect(&mut pair, LANDING, &full(5, 6), RedirectLanding);
        // What was accepted is no slot any more, a lap of the log later either.
        let entry = pair.log.entry(position);
        assert_eq!((entry.sequence, entry.frame_len), (position as u16, 9010));
        let next = pair.log.producer();
        pair.set_slot(next, 3, 9010);
        assert_ne!(pair.log.entry(next).sequence, next as u16);
        // General packets are in one frame each.
        let general = |payload_len| Packet::lm(EAGER, payload_len);
        expect(&mut pair, GENERAL, &general(3840 - 66), RedirectGeneral);
        expect(&mut pair, GENERAL, &general(3840 - 66 + 1), PassOneCopy);
        expect(&mut pair, GENERAL, &general(60_000), PassOneCopy);
    });
}
