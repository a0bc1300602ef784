//! The gate's branches for the `ipfrag` wire, by `BPF_PROG_TEST_RUN`, as in `verdicts.rs`.

mod bed;

use std::net::Ipv4Addr;

use bed::packet::{CONTROL_PORT, LOCAL, Packet};
use bed::pair::{LANDING, Pair, ipfrag_session};
use lm_ebpf::Verdict::{self, *};
use lm_protocol::landing::SessionAdmission;

const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);

fn expect(pair: &mut Pair, packet: &Packet, verdict: Verdict) {
    assert_eq!(pair.run(LANDING, &packet.bytes()), verdict, "{packet:?}");
}

#[test]
fn places_fragments_by_offset() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        expect(&mut pair, &Packet::ip_fragment(10, 0, true, 1480), PassFragment);
        pair.open(&ipfrag_session(), 3, 100);
        let fragment = Packet::ip_fragment;
        // The paper's example: 7168 bytes and the UDP header are 4 times 1480 and 1256.
        expect(&mut pair, &fragment(10, 4 * 1480, false, 1256), RedirectLanding);
        expect(&mut pair, &fragment(10, 3 * 1480, true, 1480), RedirectLanding);
        expect(&mut pair, &fragment(10, 3 * 1480, true, 1480), PassOrder);
        expect(
            &mut pair,
            &Packet {
                source: STRANGER,
                ..fragment(10, 1480, true, 1480)
            },
            PassFragment,
        );
        expect(&mut pair, &fragment(10, 1488, true, 1480), PassIndex);
        expect(&mut pair, &fragment(10, 1480, true, 1472), PassLength);
        expect(&mut pair, &fragment(10, 1480, true, 1488), PassLength);
        expect(&mut pair, &fragment(10, 1480, false, 0), PassLength);
        expect(&mut pair, &fragment(10, 1480, false, 1481), PassLength);
        // The first fragment shows its ports: another datagram between the same hosts is not ours.
        let first = fragment(10, 0, true, 1480);
        expect(
            &mut pair,
            &Packet {
                source_port: 1,
                ..first.clone()
            },
            PassFragment,
        );
        expect(
            &mut pair,
            &Packet {
                destination_port: CONTROL_PORT,
                ..first.clone()
            },
            PassFragment,
        );
        let cut = Packet {
            has_udp: false,
            payload_len: 7,
            ..first.clone()
        };
        expect(&mut pair, &cut, PassMalformed);
        expect(&mut pair, &first, RedirectLanding);
        // The next message's identification, then one beyond the limit, then an old one.
        expect(&mut pair, &fragment(11, 1480, false, 100), RedirectLanding);
        expect(&mut pair, &fragment(13, 1480, false, 100), PassLimit);
        expect(&mut pair, &fragment(10, 0, true, 1480), PassOrder);
        // LM packets do not land in this session.
        expect(&mut pair, &Packet::data(10, 2, 3, 1000), PassNoSession);
        let entry = pair.log.entry(0);
        assert_eq!((entry.message, entry.index, entry.frame_len), (10, 4, 34 + 1256));
        assert_eq!(pair.log.entry(2).index, 0);
    });
}

#[test]
fn short_last_fragments_may_be_padded() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&ipfrag_session(), 100, 100);
        // 34 header bytes and one of payload, padded to Ethernet's 60; and with a tag kept by the switch, 64.
        for (id, trailer_len, verdict) in [
            (10, 25, RedirectLanding),
            (11, 29, RedirectLanding),
            (12, 30, PassLength),
            (13, 0, RedirectLanding),
            (14, 1, RedirectLanding),
        ] {
            let packet = Packet {
                trailer_len,
                ..Packet::ip_fragment(id, 1480, false, 1)
            };
            let position = pair.log.producer();
            expect(&mut pair, &packet, verdict);
            if verdict == RedirectLanding {
                let entry = pair.log.entry(position);
                assert_eq!(usize::from(entry.padding_len), trailer_len);
                assert_eq!(usize::from(entry.frame_len), 35 + trailer_len);
            }
        }
    });
}

#[test]
fn identifications_wrap() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(
            &SessionAdmission {
                first_message: 0x0001_fffe,
                ..ipfrag_session()
            },
            10,
            100,
        );
        for (id, message) in [(0xfffe, 0x1fffe), (0xffff, 0x1ffff), (0, 0x20000), (3, 0x20003)] {
            let position = pair.log.producer();
            expect(
                &mut pair,
                &Packet::ip_fragment(id, 1480, false, 8),
                RedirectLanding,
            );
            assert_eq!(pair.log.entry(position).message, message);
        }
        expect(&mut pair, &Packet::ip_fragment(2, 1480, false, 8), PassOrder);
    });
}
