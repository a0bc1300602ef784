//! What is passed on to the network stack.

use lm_protocol::wire::lm::{TYPE_REALTIME, TYPE_RT_REPORT};

use crate::*;

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
        // A VLAN's traffic is its own device's, and what the link shows to a promiscuous host or to all is not ours
        // either.
        let fragment = Packet::ip_fragment(10, 0, true, 1480);
        let control = Packet {
            destination_port: CONTROL_PORT,
            ..legal()
        };
        expect(&mut pair, LANDING, &control, PassControl);
        for ours in [
            legal(),
            Packet::lm(EAGER, 0),
            Packet::lm(CONTROL, 0),
            fragment,
            control,
        ] {
            for (mac, vlan) in [(MAC, Some(0)), (MAC, Some(7)), ([0xff; 6], None)]
                .into_iter()
                .chain((0..6).map(|at| (std::array::from_fn(|n| MAC[n] ^ u8::from(n == at)), None)))
            {
                let packet = Packet {
                    mac,
                    vlan,
                    ..ours.clone()
                };
                expect(&mut pair, LANDING, &packet, PassForeign);
                expect(&mut pair, GENERAL, &packet, PassForeign);
            }
        }
        for version_words in [0x46, 0x44] {
            let packet = Packet {
                version_words,
                ..legal()
            };
            expect(&mut pair, LANDING, &packet, PassOptions);
        }
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
        let whole = legal().bytes();
        // The kernel runs the program on frames from 14 bytes on.
        for len in 14..whole.len() {
            let verdict = if len < 14 + 20 { PassForeign } else { PassMalformed };
            assert_eq!(pair.run(LANDING, &whole[..len]), verdict, "{len} bytes");
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
            expect(&mut pair, LANDING, &Packet::lm(kind, 10), PassOneCopy);
        }
        pair.set_xsk(GENERAL, false);
        expect(&mut pair, GENERAL, &Packet::lm(EAGER, 10), PassOneCopy);
        pair.set_xsk(GENERAL, true);
        expect(&mut pair, GENERAL, &legal(), PassNoSession);
    });
}

#[test]
fn real_time_comes_to_the_general_queue_alone() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 1, 100);
        for kind in [TYPE_REALTIME, TYPE_RT_REPORT] {
            let packet = Packet::lm(kind, 200);
            expect(&mut pair, GENERAL, &packet, RedirectGeneral);
            // Turns of others last there: it goes to the kernel's socket.
            expect(&mut pair, LANDING, &packet, PassOneCopy);
        }
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
            "link add big0 address 2:0:0:0:0:2 numrxqueues 66 numtxqueues 66 type veth peer name big1 numrxqueues 66 \
                numtxqueues 66",
        );
        bed::ip("link set big0 up");
        let ifindex = bed::ifindex("big0");
        let gate = lm_ebpf::Gate::attach(ifindex, &Default::default(), Default::default()).unwrap();
        for queue in [63, 64, 65] {
            let before = gate.counters();
            assert_eq!(
                gate.test_run(ifindex, queue, &legal().bytes()).unwrap(),
                2,
                "XDP_PASS"
            );
            let counted = gate.counters().since(&before);
            assert_eq!(
                (counted.total(), counted.get(PassNoSession)),
                (1, 1),
                "queue {queue}"
            );
        }
        assert_eq!(gate.passed_elsewhere(), 3);
    });
}
