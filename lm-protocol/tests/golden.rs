//! The paper's example and our own wire format, byte by byte. The dumps were made by hand, not by this crate.

mod inputs;

use std::net::{Ipv4Addr, SocketAddrV4};

use inputs::addressing;
use lm_protocol::control::*;
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Layout, LinkShape, Wire};
use lm_protocol::integrity::Integrity;
use lm_protocol::manifest::{FragmentHasher, window_digest};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::{
    self, AnnounceEntry, Credit, EagerAcknowledgement, Facts, LmHeader, MessageDigest, Trailer, WindowsPacket,
};
use lm_protocol::wire::{DataTemplate, IpFragTemplate, udp};

fn bytes(dump: &str) -> Vec<u8> {
    dump.split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

/// The bytes of the message in the examples.
fn message(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// LM section 3.1, figure 1.
#[test]
fn the_papers_example_as_ip_fragments() {
    let layout = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4).unwrap();
    let geometry = layout.message(7168).unwrap();

    // "7168 bytes user data to be sent are split into five blocks with 1472, 1480, 1480, 1480, and 1256 bytes"
    let lens: Vec<u16> = geometry.fragments().map(|fragment| fragment.len).collect();
    assert_eq!(lens, [1472, 1480, 1480, 1480, 1256]);

    // "44 bytes is reserved at the head of the user send buffer to place the protocol headers of the first fragment
    // packet and 36 bytes to place the protocol header of other fragments"
    let holes: Vec<u16> = (0..5).map(|index| layout.fragment_hole_len(index)).collect();
    assert_eq!(holes, [44, 36, 36, 36, 36]);
    let mut at = 0;
    for fragment in geometry.fragments() {
        at += u64::from(layout.fragment_hole_len(fragment.index));
        assert_eq!(
            geometry.tx_payload_offset(fragment.index),
            at,
            "a hole, then its payload, and nothing else"
        );
        at += u64::from(fragment.len);
    }
    assert_eq!(at, 44 + 4 * 36 + 7168);
    assert_eq!(geometry.tx_region_len(), at.next_multiple_of(16));

    // "the last fragment is transmitted firstly and finally the first fragment"
    let order: Vec<u32> = WindowShape::whole(5).transmit_order(5).collect();
    assert_eq!(order, [4, 3, 2, 1, 0]);

    // The landing zone: payloads of 1480 after the UDP header's 8 bytes.
    let starts: Vec<i64> = (0..5).map(|index| geometry.rx_frame_start(index)).collect();
    assert_eq!(starts, [-42, 1438, 2918, 4398, 5878]);
}

#[test]
fn header_bytes_of_the_papers_example() {
    let geometry = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4)
        .unwrap()
        .message(7168)
        .unwrap();
    let template = IpFragTemplate::new(&addressing(), &geometry, 0x0001_0042, 0).unwrap();
    let expected = [
        "02 00 00 00 00 02 02 00 00 00 00 01 08 00 \
         45 00 05 dc 00 42 20 00 40 11 d1 7b c0 a8 01 01 c0 a8 01 02 9c 40 1c 00 1c 08 00 00",
        "02 00 00 00 00 02 02 00 00 00 00 01 08 00 45 00 05 dc 00 42 20 b9 40 11 d0 c2 c0 a8 01 01 c0 a8 01 02",
        "02 00 00 00 00 02 02 00 00 00 00 01 08 00 45 00 05 dc 00 42 21 72 40 11 d0 09 c0 a8 01 01 c0 a8 01 02",
        "02 00 00 00 00 02 02 00 00 00 00 01 08 00 45 00 05 dc 00 42 22 2b 40 11 cf 50 c0 a8 01 01 c0 a8 01 02",
        "02 00 00 00 00 02 02 00 00 00 00 01 08 00 45 00 04 fc 00 42 02 e4 40 11 ef 77 c0 a8 01 01 c0 a8 01 02",
    ];
    for (fragment, dump) in geometry.fragments().zip(expected) {
        let mut out = [0xaa; 64];
        let len = template.write(&mut out, fragment.index, fragment.len);
        assert_eq!(out[..len], bytes(dump), "fragment {}", fragment.index);
        assert_eq!(len, usize::from(fragment.header_len));
        assert!(
            out[len..].iter().all(|&byte| byte == 0xaa),
            "wrote behind the headers"
        );
    }
}

#[test]
fn udp_checksum_of_the_papers_example() {
    let address = addressing();
    let (src, dst) = (address.src_ip, address.dst_ip);
    let message = message(7168);
    assert_eq!(udp::checksum(src, dst, 40_000, 7168, [&message[..]]), 0x0e86);
    // In the pieces that lie in the send region.
    let geometry = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4)
        .unwrap()
        .message(7168)
        .unwrap();
    let pieces = geometry.fragments().map(|fragment| {
        let range = fragment.message_range();
        &message[range.start as usize..range.end as usize]
    });
    assert_eq!(udp::checksum(src, dst, 40_000, 7168, pieces), 0x0e86);
}

/// The same message on our own wire.
#[test]
fn header_bytes_of_the_lm_wire() {
    let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).unwrap();
    assert_eq!(
        (layout.header_len(), layout.payload_len(), layout.hole_len()),
        (66, 1448, 68)
    );
    assert_eq!(layout.max_frame_len(), 1514);
    let geometry = layout.message(7168).unwrap();
    let template = DataTemplate::new(&addressing(), 0x1122_3344_5566_7788, 0x42, 5, 1448);

    let full = |index: &str| {
        format!(
            "02 00 00 00 00 02 02 00 00 00 00 01 08 00 \
             45 00 05 dc 00 00 40 00 40 11 b1 bd c0 a8 01 01 c0 a8 01 02 9c 40 1c 00 05 c8 00 00 \
             21 00 05 a8 11 22 33 44 55 66 77 88 00 00 00 42 00 00 00 {index} 00 00 00 05"
        )
    };
    let last = "02 00 00 00 00 02 02 00 00 00 00 01 08 00 \
                45 00 05 94 00 00 40 00 40 11 b2 05 c0 a8 01 01 c0 a8 01 02 9c 40 1c 00 05 80 00 00 \
                21 00 05 60 11 22 33 44 55 66 77 88 00 00 00 42 00 00 00 04 00 00 00 05";
    let expected = [full("00"), full("01"), full("02"), full("03"), last.to_owned()];
    for (fragment, dump) in geometry.fragments().zip(expected) {
        let mut out = [0xaa; 72];
        let len = template.write(&mut out, fragment.index, fragment.len);
        assert_eq!(out[..len], bytes(&dump), "fragment {}", fragment.index);
        assert!(
            out[len..].iter().all(|&byte| byte == 0xaa),
            "wrote behind the headers"
        );
    }
}

#[test]
fn header_bytes_with_a_vlan_tag() {
    let mut address = addressing();
    address.vlan = Some(0x123);
    let layout = Layout::new(Wire::Lm, 1500, address.link()).unwrap();
    assert_eq!(
        (layout.header_len(), layout.payload_len(), layout.hole_len()),
        (70, 1448, 72)
    );
    let mut template = DataTemplate::new(&address, 0x1122_3344_5566_7788, 9, 1, 1448);
    template.set_message(0x42, 5);
    let mut out = [0; 70];
    assert_eq!(template.write(&mut out, 3, 1448), 70);
    let dump = "02 00 00 00 00 02 02 00 00 00 00 01 81 00 01 23 08 00 \
                45 00 05 dc 00 00 40 00 40 11 b1 bd c0 a8 01 01 c0 a8 01 02 9c 40 1c 00 05 c8 00 00 \
                21 00 05 a8 11 22 33 44 55 66 77 88 00 00 00 42 00 00 00 03 00 00 00 05";
    assert_eq!(out[..], bytes(dump));
}

#[test]
fn bytes_of_every_lm_header() {
    let cases = [
        (
            LmHeader::Data {
                session_key: 0x0102_0304_0506_0708,
                message: 0x1112_1314,
                index: 0x21,
                count: 0x3132_3334,
            },
            0x05a8,
            "21 00 05 a8 01 02 03 04 05 06 07 08 11 12 13 14 00 00 00 21 31 32 33 34",
        ),
        (
            LmHeader::Eager {
                sender_id: 0x0102_0304_0506_0708,
                number: 0x1112_1314,
                tag: 0x2122_2324_3132_3334,
                digested: false,
                acknowledges: None,
            },
            1,
            "22 00 00 01 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 31 32 33 34",
        ),
        (
            LmHeader::Eager {
                sender_id: 0x0102_0304_0506_0708,
                number: 0x1112_1314,
                tag: 0x2122_2324_3132_3334,
                digested: true,
                acknowledges: None,
            },
            1,
            "22 02 00 09 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 31 32 33 34",
        ),
        (
            LmHeader::EagerAck {
                sender_id: 0x0102_0304_0506_0708,
                next: 0x1112_1314,
                limit: 0x2122_2324,
            },
            0,
            "23 02 00 08 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 00 00 00 00",
        ),
        (
            LmHeader::Announce {
                session_key: 0x0102_0304_0506_0708,
                first: 0x1112_1314,
                entries: 2,
                sent: 0x2122_2324,
            },
            48 + 12,
            "24 02 00 44 01 02 03 04 05 06 07 08 11 12 13 14 00 00 00 02 21 22 23 24",
        ),
        (
            LmHeader::Credit {
                session_key: 0x0102_0304_0506_0708,
                packet_limit: 0x1112_1314,
                delivered: 0x2122_2324,
                announced: 0x3132_3334,
                lands: false,
            },
            0,
            "25 02 00 08 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 31 32 33 34",
        ),
        (
            LmHeader::Missing {
                session_key: 0x0102_0304_0506_0708,
                message: 0x1112_1314,
                ranges: 3,
                manifest: false,
            },
            24,
            "26 02 00 20 01 02 03 04 05 06 07 08 11 12 13 14 00 00 00 03 00 00 00 00",
        ),
        (
            LmHeader::Manifest {
                session_key: 0x0102_0304_0506_0708,
                message: 0x1112_1314,
                first: 0x2122_2324,
                count: 0x3132_3334,
            },
            1440,
            "27 02 05 a8 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 31 32 33 34",
        ),
        (
            LmHeader::Extension {
                packet_type: 13,
                key: 0x0102_0304_0506_0708,
                words: [0x1112_1314, 0x2122_2324, 0x3132_3334],
            },
            5,
            "2d 02 00 0d 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 31 32 33 34",
        ),
        (
            LmHeader::Control {
                request_id: 0x0102_0304,
                kind: 5,
            },
            16,
            "2f 00 00 10 01 02 03 04 05 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00",
        ),
    ];
    for (header, payload_len, dump) in cases {
        assert_eq!(header.encode(payload_len)[..], bytes(dump), "{header:?}");
        assert_eq!(LmHeader::decode(&bytes(dump)), Ok((header, payload_len)));
    }
}

/// The second entry has five opaque bytes.
#[test]
fn bytes_of_announced_messages() {
    let whole = AnnounceEntry {
        len: 0x0102_0304_0506_0708,
        tag: 0x1112_1314_1516_1718,
        delivery: Some(Delivery::Partial),
        windows_released: AnnounceEntry::ALL_WINDOWS,
        has_facts: false,
    };
    let dump = "01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18 02 00 00 00 ff ff ff ff";
    assert_eq!(whole.encode()[..], bytes(dump));
    let as_the_session = AnnounceEntry {
        delivery: None,
        windows_released: 0x2122_2324,
        has_facts: true,
        ..whole
    };
    let without = "01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18 ff 01 00 00 21 22 23 24";
    assert_eq!(as_the_session.encode()[..], bytes(without));
    let with =
        "01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18 ff 01 00 05 21 22 23 24 6f 70 61 71 75 00 00 00";
    let payload = bytes(&format!("{dump} {with} 00 00 00 09 31 32 33 34 35 36 37 38"));
    assert!(AnnounceEntry::iter(&payload, 2).eq([whole, as_the_session]));
    let told = MessageDigest {
        message: 9,
        digest: 0x3132_3334_3536_3738,
    };
    assert!(MessageDigest::iter(&payload, 2).eq([told]));
}

/// The hash by libxxhash 0.8.4.
#[test]
fn bytes_of_facts() {
    let facts = Facts {
        session_key: 0x0102_0304_0506_0708.into(),
        message: 0x1112_1314.into(),
        sent: 0x2122_2324.into(),
        len: 0x3132_3334_3536_3738.into(),
        tag: 0x4142_4344_4546_4748.into(),
        digest: 0x5152_5354_5556_5758.into(),
        credit: Credit {
            session: 0x6162_6364.into(),
            words: [0x7172_7374, 0x8182_8384, 0x9192_9394].map(Into::into),
        },
        hash: 0.into(),
    };
    let hasher = FragmentHasher::new(facts.session_key.get());
    let dump = "01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 31 32 33 34 35 36 37 38 41 42 43 44 45 46 47 48 \
                51 52 53 54 55 56 57 58 61 62 63 64 71 72 73 74 81 82 83 84 91 92 93 94 bd f5 fb 3e 6b 8b 0a be";
    let sealed = facts.seal(&hasher);
    let encoded: [u8; Facts::LEN] = zerocopy::transmute!(sealed);
    assert_eq!(encoded[..], bytes(dump));
    assert_eq!(Facts::read(encoded, &hasher), Some(sealed));
    assert_eq!(Facts::read(encoded, &FragmentHasher::new(1)), None);
    for bit in 0..encoded.len() * 8 {
        let mut changed = encoded;
        changed[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(Facts::read(changed, &hasher), None, "bit {bit}");
    }
}

/// Digests by libxxhash 0.8.1.
#[test]
fn bytes_of_a_packet_with_a_digest() {
    let header = LmHeader::Credit {
        session_key: 0x0102_0304_0506_0708,
        packet_limit: 0x1112_1314,
        delivered: 0x2122_2324,
        announced: 0x3132_3334,
        lands: false,
    };
    let dump = "25 02 00 10 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 31 32 33 34 \
                00 00 00 05 00 00 00 06 5a c0 82 1d 0c 3e 69 4c";
    let packet = bytes(dump);
    let read = lm::parse_packet(&packet).unwrap();
    assert_eq!((read.header, read.payload), (header, &packet[24..32]));
    let from = SocketAddrV4::new(Ipv4Addr::new(192, 168, 1, 1), 7168);
    assert_eq!(read.digest, Some(lm::packet_digest(&header, read.payload, from)));
    assert!(read.is_intact(from));

    // Any bit of it, of the sender's address or of its port.
    for bit in 0..packet.len() * 8 {
        let mut changed = packet.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let intact = lm::parse_packet(&changed).is_ok_and(|packet| packet.is_intact(from));
        // Flags that nobody knows mean nothing; that of MISSING is unknown to a CREDIT.
        assert_eq!(
            intact,
            bit / 8 == 1 && ![8 + 1, 8 + 4].contains(&bit),
            "bit {bit}"
        );
    }
    for bit in 0..32 {
        let other = Ipv4Addr::from_bits(from.ip().to_bits() ^ 1 << bit);
        assert!(!read.is_intact(SocketAddrV4::new(other, 7168)));
    }
    for bit in 0..16 {
        assert!(!read.is_intact(SocketAddrV4::new(*from.ip(), 7168 ^ 1 << bit)));
    }
}

/// Digests by the Python module xxhash.
#[test]
fn bytes_of_windows() {
    let from = SocketAddrV4::new(Ipv4Addr::new(192, 168, 1, 1), 7168);
    let dump = "2a 02 00 18 01 02 03 04 05 06 07 08 11 12 13 14 21 22 23 24 00 00 00 02 \
                41 42 43 44 45 46 47 48 51 52 53 54 55 56 57 58 2e 40 e8 10 4f 3b c5 7b";
    let packet = bytes(dump);
    let digests = [0x4142_4344_4546_4748, 0x5152_5354_5556_5758];
    let (key, message, first) = (0x0102_0304_0506_0708, 0x1112_1314, 0x2122_2324);
    let mut payload = [0; 16];
    let (words, len) = WindowsPacket::write(&mut payload, message, first, digests.into_iter()).unwrap();
    let header = LmHeader::Extension {
        packet_type: lm::TYPE_WINDOWS,
        key,
        words,
    };
    let trailer = Trailer::new(&header, &payload, from);
    let written = [&header.encode(len as u16)[..], &payload, trailer.as_bytes()].concat();
    assert_eq!(written, packet);
    let read = lm::parse_packet(&packet).unwrap();
    assert_eq!(read.header, header);
    assert!(read.is_intact(from));
    let read = WindowsPacket::read(words, read.payload).unwrap();
    assert_eq!((read.message, read.first), (message, first));
    assert!(read.digests().eq(digests));

    // Its window, bound to its place: two fragments of it.
    assert_eq!(
        window_digest(key, message, first, &digests),
        0xb777_5612_2813_b29a
    );
}

/// The digest by libxxhash 0.8.4.
#[test]
fn bytes_of_a_message_that_acknowledges() {
    let header = LmHeader::Eager {
        sender_id: 0x0102_0304_0506_0709,
        number: 0x1112_1314,
        tag: 0x2122_2324_3132_3334,
        digested: true,
        acknowledges: Some(EagerAcknowledgement {
            sender_id: 0x4142_4344_4546_4748,
            next: 0x5152_5354,
            limit: 0x6162_6364,
        }),
    };
    let dump = "22 0a 00 1d 01 02 03 04 05 06 07 09 11 12 13 14 21 22 23 24 31 32 33 34 68 65 6c 6c 6f \
                41 42 43 44 45 46 47 48 51 52 53 54 61 62 63 64 da 00 d2 0e 07 80 80 89";
    let packet = bytes(dump);
    let from = SocketAddrV4::new(Ipv4Addr::new(192, 168, 1, 1), 7168);
    let trailer = Trailer::new(&header, b"hello", from);
    let built = [&header.encode(5)[..], b"hello", trailer.as_bytes()].concat();
    assert_eq!(built, packet);
    let read = lm::parse_packet(&packet).unwrap();
    assert_eq!((read.header, read.payload), (header, &b"hello"[..]));
    assert!(read.is_intact(from));

    // Any bit, also of the acknowledgement.
    for bit in 0..packet.len() * 8 {
        let mut changed = packet.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let intact = lm::parse_packet(&changed).is_ok_and(|packet| packet.is_intact(from));
        // That of MISSING and the five that nobody knows mean nothing.
        assert_eq!(intact, bit / 8 == 1 && ![1, 3].contains(&(bit % 8)), "bit {bit}");
    }
}

/// No change of one byte makes an eager packet with a digest one without, or anything else an eager packet without.
#[test]
fn one_byte_does_not_switch_a_digest_off() {
    let from = SocketAddrV4::new(Ipv4Addr::new(192, 168, 1, 1), 7168);
    let key = lm::with_digests(0x1234_5678_9abc_def0, true);
    let headers = [
        LmHeader::Eager {
            sender_id: key,
            number: 0,
            tag: 9,
            digested: true,
            acknowledges: Some(EagerAcknowledgement {
                sender_id: key,
                next: 1,
                limit: 2,
            }),
        },
        LmHeader::Eager {
            sender_id: key,
            number: 0,
            tag: 9,
            digested: true,
            acknowledges: None,
        },
        LmHeader::Data {
            session_key: key,
            message: 0,
            index: 1,
            count: 2,
        },
        LmHeader::Credit {
            session_key: lm::with_digests(key, false),
            packet_limit: 0,
            delivered: 0,
            announced: 0,
            lands: false,
        },
        LmHeader::Control {
            request_id: 0,
            kind: 0x70,
        },
    ];
    for header in headers {
        // As long as an acknowledgement and a digest, in whose place it could be taken.
        let payload: &[u8] = match header {
            LmHeader::Eager { .. } | LmHeader::Credit { .. } => &[0x5a; 24],
            _ => &[],
        };
        let mut packet = header.encode(payload.len() as u16).to_vec();
        packet.extend_from_slice(payload);
        packet.extend_from_slice(Trailer::new(&header, payload, from).as_bytes());
        assert!(lm::parse_packet(&packet).unwrap().is_intact(from));
        for at in 0..packet.len() {
            for change in 1..=255 {
                let mut changed = packet.clone();
                changed[at] ^= change;
                if let Ok(read) = lm::parse_packet(&changed)
                    && matches!(read.header, LmHeader::Eager { .. })
                    && read.is_intact(from)
                {
                    // Unknown flags mean nothing.
                    assert_eq!((read.header, at), (header, 1), "{header:?}, byte {at}");
                }
            }
        }
    }
}

#[test]
fn bytes_of_every_control_message() {
    let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).unwrap();
    let cases = [
        (
            ControlMessage::Request(Request {
                sender_id: 0x0102_0304_0506_0708,
                data_port: 0x9c40,
                mtu: 1500,
                wire: Wire::IpFrag,
                link: LinkShape { vlan_tags: 1 },
                max_message_len: 65_507,
                window: WindowShape::new(64).unwrap(),
                messages_in_flight: 4,
                uncompleted_max: 192,
                capabilities: 0x8000_0001,
                delivery: Delivery::Partial,
                integrity: Integrity::Manifest,
                lands: true,
            }),
            "2f 00 00 28 aa bb cc dd 01 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             01 02 03 04 05 06 07 08 9c 40 05 dc 01 04 01 0c \
             00 00 00 00 00 00 ff e3 00 00 00 40 00 00 00 04 00 00 00 c0 80 00 00 01",
        ),
        (
            ControlMessage::Request(Request {
                sender_id: 0x0102_0304_0506_0708,
                data_port: 7168,
                mtu: 1500,
                wire: Wire::Lm,
                link: LinkShape::IPV4,
                max_message_len: 1 << 20,
                window: WindowShape::new(64).unwrap(),
                messages_in_flight: 4,
                uncompleted_max: 0,
                capabilities: 0,
                delivery: Delivery::Reliable,
                integrity: Integrity::Manifest,
                lands: true,
            }),
            "2f 00 00 28 aa bb cc dd 01 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             01 02 03 04 05 06 07 08 1c 00 05 dc 00 04 00 0a \
             00 00 00 00 00 10 00 00 00 00 00 40 00 00 00 04 00 00 00 00 00 00 00 00",
        ),
        (
            ControlMessage::Grant(Grant {
                session_key: 0x1112_1314_1516_1718,
                data_port: 7168,
                layout,
                landing_queue: 1,
                tx_queue: None,
                prefix: 12,
                frames_per_packet: 1,
                fillers: 0,
                repeats_apart: true,
                landing_port: core::num::NonZeroU16::new(50_001),
                max_message_len: 1 << 30,
                window: WindowShape::DEFAULT,
                packet_limit: 512,
                lease_ms: 10_000,
                first_message: 7,
                lands: false,
                capabilities: 0x4142_4344,
            }),
            "2f 00 00 38 aa bb cc dd 03 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             11 12 13 14 15 16 17 18 1c 00 00 42 05 a8 00 01 ff ff 00 04 0c 00 01 01 \
             00 00 00 00 40 00 00 00 00 00 01 00 00 00 02 00 00 00 27 10 00 00 00 07 \
             c3 51 00 00 41 42 43 44",
        ),
        (
            ControlMessage::Reject(Reject {
                reason: RejectReason::TooLarge,
                version: 1,
                retry_after_ms: 0x0102,
                limit: 0x0304,
            }),
            "2f 00 00 10 aa bb cc dd 04 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             03 01 00 00 00 00 01 02 00 00 00 00 00 00 03 04",
        ),
        (
            ControlMessage::End(End {
                session_key: 0x1112_1314_1516_1718,
                messages: 9,
            }),
            "2f 00 00 10 aa bb cc dd 02 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             11 12 13 14 15 16 17 18 00 00 00 09 00 00 00 00",
        ),
        (
            ControlMessage::Ended(Ended {
                session_key: 0x1112_1314_1516_1718,
                delivered: 8,
                heard: None,
            }),
            "2f 00 00 10 aa bb cc dd 05 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             11 12 13 14 15 16 17 18 00 00 00 08 00 00 00 00",
        ),
        (
            ControlMessage::Ended(Ended {
                session_key: 0x1112_1314_1516_1718,
                delivered: 8,
                heard: Some(10),
            }),
            "2f 00 00 10 aa bb cc dd 05 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             11 12 13 14 15 16 17 18 00 00 00 08 00 00 00 0b",
        ),
        (
            ControlMessage::Challenge(Challenge {
                sender_id: 0x0102_0304_0506_0708,
                cookie: 0x1112_1314_1516_1718,
                challenger_id: 0x2122_2324_2526_2728,
                ask: Ask::Word,
                uncompleted_max: 192,
            }),
            "2f 00 00 20 aa bb cc dd 0a 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18 21 22 23 24 25 26 27 28 01 00 00 00 00 00 00 c0",
        ),
        (
            ControlMessage::Proof(Proof {
                sender_id: 0x0102_0304_0506_0708,
                cookie: 0x1112_1314_1516_1718,
                data_port: 7168,
                uncompleted_max: 0x3132_3334,
                word: core::array::from_fn(|at| at as u8),
            }),
            "2f 00 00 28 aa bb cc dd 0b 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
             01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18 1c 00 00 00 31 32 33 34 \
             00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f",
        ),
    ];
    for (message, dump) in cases {
        let mut out = [0; MAX_CONTROL_LEN];
        let len = message.encode(0xaabb_ccdd, &mut out);
        assert_eq!(out[..len], bytes(dump), "{}", message.name());
        assert_eq!(ControlMessage::parse(&bytes(dump)), Ok((0xaabb_ccdd, message)));
    }
}
