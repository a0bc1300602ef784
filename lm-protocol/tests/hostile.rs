//! Bytes from the network: nothing panics, and whatever is accepted says the same when it is written again.

mod inputs;

use inputs::addressing;
use lm_protocol::control::{ControlError, ControlMessage, MAX_CONTROL_LEN};
use lm_protocol::geometry::{Layout, LinkShape, Wire};
use lm_protocol::manifest;
use lm_protocol::wire::lm::{
    self, AnnounceEntry, EagerAcknowledgement, LmError, LmHeader, MessageDigest, MissingRange, Trailer,
    WindowsPacket,
};
use lm_protocol::wire::{IpFragTemplate, Transport, ipv4, parse_frame};
use proptest::prelude::*;
use proptest::sample::Index;
use std::net::{Ipv4Addr, SocketAddrV4};

/// Whatever the parsers make of these bytes must hold together.
fn look(bytes: &[u8]) {
    if let Ok(frame) = parse_frame(bytes) {
        let header_len = usize::from(frame.header_len);
        assert_eq!(
            &bytes[header_len..header_len + frame.payload.len()],
            frame.payload
        );
        match frame.transport {
            Transport::Lm { header, .. } => look_at_lm(&header, frame.payload),
            Transport::Fragment(fragment) => {
                assert!(usize::from(fragment.ip_offset) + frame.payload.len() <= 65_515);
                assert_eq!(fragment.udp.is_some(), fragment.ip_offset == 0);
                let _ = fragment.index(1480);
            }
        }
    }
    if let Ok((header, payload)) = lm::parse_datagram(bytes) {
        let end = bytes.len() - header.trailer_len();
        assert_eq!(payload, &bytes[lm::HEADER_LEN..end]);
        look_at_lm(&header, payload);
    }
    let _ = LmHeader::decode(bytes);
    match ControlMessage::parse(bytes) {
        Ok((request_id, message)) => {
            let mut again = [0; MAX_CONTROL_LEN];
            let len = message.encode(request_id, &mut again);
            assert_eq!(len, bytes.len());
            assert_eq!(ControlMessage::parse(&again[..len]), Ok((request_id, message)));
        }
        Err(ControlError::VersionMismatch { theirs, request_id }) => {
            assert_ne!(theirs, lm::VERSION);
            assert!(request_id.is_none() || bytes.len() >= 8);
        }
        Err(error) => assert!(
            (bytes.first()).is_none_or(
                |&byte| byte >> 4 == lm::VERSION || byte == lm::SEAL_VERSION << 4 | lm::TYPE_SEALED
            ),
            "{error}"
        ),
    }
}

fn look_at_lm(header: &LmHeader, payload: &[u8]) {
    let from = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7168);
    let trailer = Trailer::new(header, payload, from);
    let again = [
        &header.encode(payload.len() as u16)[..],
        payload,
        trailer.as_bytes(),
    ]
    .concat();
    let read = lm::parse_packet(&again).expect("what was read can be written");
    assert_eq!((read.header, read.payload), (*header, payload));
    match *header {
        LmHeader::Data { index, count, .. } => assert!(index < count),
        LmHeader::Announce { entries, .. } => {
            assert_eq!(AnnounceEntry::iter(payload, entries).count(), entries as usize);
            let digests = MessageDigest::iter(payload, entries).len();
            let len = entries as usize * AnnounceEntry::LEN + digests * MessageDigest::LEN;
            // The rest is opaque.
            assert!(len <= payload.len() && (payload.len() - len).is_multiple_of(4));
        }
        LmHeader::Missing { ranges, .. } => assert_eq!(MissingRange::iter(payload).count(), ranges as usize),
        LmHeader::Extension {
            packet_type: lm::TYPE_WINDOWS,
            words,
            ..
        } => {
            if let Ok(packet) = WindowsPacket::read(words, payload) {
                let count = packet.digests().len();
                assert!(count > 0 && packet.first.checked_add(count as u32).is_some());
                let mut again = vec![0; payload.len()];
                let written =
                    WindowsPacket::write(&mut again, packet.message, packet.first, packet.digests());
                assert_eq!((written, &again[..]), (Some((words, payload.len())), payload));
            }
        }
        LmHeader::Manifest { first, count, .. } => {
            let end = u64::from(first) + manifest::digests(payload).len() as u64;
            assert!(first < count && end <= u64::from(count) + 1 && end != u64::from(count));
        }
        _ => {}
    }
}

fn valid_frames() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let headers = [
        (
            LmHeader::Data {
                session_key: 1,
                message: 2,
                index: 3,
                count: 4,
            },
            100,
        ),
        (
            LmHeader::Eager {
                sender_id: 1,
                number: 2,
                tag: 3,
                digested: false,
                acknowledges: None,
            },
            7,
        ),
        (
            LmHeader::Eager {
                sender_id: 1,
                number: 2,
                tag: 3,
                digested: true,
                acknowledges: None,
            },
            7,
        ),
        (
            LmHeader::Eager {
                sender_id: 1,
                number: 2,
                tag: 3,
                digested: true,
                acknowledges: Some(EagerAcknowledgement {
                    sender_id: 4,
                    next: 5,
                    limit: 6,
                }),
            },
            7,
        ),
        (
            LmHeader::EagerAck {
                sender_id: 1,
                next: 2,
                limit: 3,
            },
            0,
        ),
        (
            LmHeader::Announce {
                session_key: 1,
                first: 2,
                entries: 3,
                sent: 9,
            },
            3 * AnnounceEntry::LEN + 8 + 2 * MessageDigest::LEN,
        ),
        (
            LmHeader::Credit {
                session_key: 1,
                packet_limit: 2,
                delivered: 3,
                announced: 4,
                lands: true,
            },
            0,
        ),
        (
            LmHeader::Missing {
                session_key: 1,
                message: 2,
                ranges: 2,
                manifest: true,
            },
            16,
        ),
        (
            LmHeader::Manifest {
                session_key: 1,
                message: 2,
                first: 3,
                count: 5,
            },
            24,
        ),
        (
            LmHeader::Extension {
                packet_type: lm::TYPE_WINDOWS,
                key: 1,
                words: [2, 3, 2],
            },
            16,
        ),
        (
            LmHeader::Control {
                request_id: 1,
                kind: 2,
            },
            16,
        ),
    ];
    for vlan in [None, Some(7)] {
        let mut address = addressing();
        address.vlan = vlan;
        for (header, payload_len) in headers {
            let mut frame = vec![0x33; address.header_len() + payload_len + header.trailer_len()];
            let start = address.write_headers(&mut frame, &header, payload_len).unwrap();
            if matches!(header, LmHeader::Announce { .. }) {
                // The second one has opaque bytes.
                for (at, opaque_len) in [(0, 0), (24, 5), (56, 0)] {
                    frame[start + at + 18..start + at + 20].copy_from_slice(&[0, opaque_len]);
                }
            }
            frames.push(frame);
        }
        let geometry = Layout::new(Wire::IpFrag, 576, address.link())
            .unwrap()
            .message(1500)
            .unwrap();
        let template = IpFragTemplate::new(&address, &geometry, 9, 0).unwrap();
        for fragment in geometry.fragments() {
            let mut frame = vec![0x44; usize::from(fragment.frame_len())];
            template.write(&mut frame, fragment.index, fragment.len);
            frames.push(frame);
        }
    }
    frames
}

/// Makes the IPv4 checksum right again, so that changes behind it are looked at too.
fn resum(frame: &mut [u8]) {
    for ip_at in [14, 18] {
        if frame.len() >= ip_at + 20 && frame[ip_at] >> 4 == 4 {
            frame[ip_at + 10..ip_at + 12].fill(0);
            let sum = ipv4::checksum(&frame[ip_at..ip_at + 20]);
            frame[ip_at + 10..ip_at + 12].copy_from_slice(&sum.to_be_bytes());
            return;
        }
    }
}

#[test]
fn the_valid_frames_are_valid() {
    for frame in valid_frames() {
        assert!(parse_frame(&frame).is_ok(), "{frame:02x?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        look(&bytes);
    }

    #[test]
    fn random_control_bodies(kind in 0u8..9, mut bytes in prop::collection::vec(any::<u8>(), 24..80)) {
        let len = bytes.len() - lm::HEADER_LEN;
        bytes[..lm::HEADER_LEN].copy_from_slice(&LmHeader::Control { request_id: 5, kind }.encode(len as u16));
        look(&bytes);
        // Bodies of the right length with small numbers, which are legal more often.
        let body_len = [0, 40, 16, 56, 16, 16][usize::from(kind) % 6];
        bytes.truncate(lm::HEADER_LEN);
        bytes.resize(lm::HEADER_LEN + body_len, kind % 4);
        bytes[..lm::HEADER_LEN].copy_from_slice(&LmHeader::Control { request_id: 5, kind }.encode(body_len as u16));
        look(&bytes);
    }

    #[test]
    fn changed_frames(
        which: Index,
        changes in prop::collection::vec(any::<(Index, u8)>(), 0..4),
        cut in prop::option::of(any::<Index>()),
        right_sum: bool,
    ) {
        let frames = valid_frames();
        let mut frame = frames[which.index(frames.len())].clone();
        for (at, value) in changes {
            // Mostly in the headers, and in the first entries of an announcement.
            let at = at.index(frame.len().min(120));
            frame[at] = value;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len()));
        }
        if right_sum {
            resum(&mut frame);
        }
        look(&frame);
        for skip in [34, 38, 42, 46] {
            look(frame.get(skip..).unwrap_or_default());
        }
    }
}

#[test]
fn windows_that_are_none() {
    let mut out = [0; 65_507];
    let mut write = |first, count| WindowsPacket::write(&mut out, 1, first, vec![5; count].into_iter());
    assert_eq!(write(0, 0), None, "no digest");
    assert_eq!(write(u32::MAX, 1), None, "no message has so many windows");
    assert_eq!(write(0, 8185), None, "longer than a datagram");
    assert_eq!(write(0, 8184), Some(([1, 0, 8184], 65_472)));
    assert_eq!(
        WindowsPacket::write(&mut [0; 15], 1, 3, [5; 2].into_iter()),
        None,
        "no room"
    );

    let read = |words, len| WindowsPacket::read(words, &out[..len]).map(|packet| packet.digests().len());
    assert_eq!(read([1, 3, 2], 16), Ok(2));
    assert_eq!(read([1, 3, 0], 0), Err(LmError::Length));
    for len in (0..16).chain(17..40) {
        assert_eq!(read([1, 3, 2], len), Err(LmError::Length));
    }
    assert_eq!(
        read([1, 3, 0x2000_0002], 16),
        Err(LmError::Length),
        "more windows than bytes"
    );
    assert_eq!(read([1, u32::MAX - 1, 2], 16), Err(LmError::Index));
    assert_eq!(read([1, u32::MAX - 2, 2], 16), Ok(2));
}

proptest! {
    #[test]
    fn words_and_digests_of_windows(
        words: [u32; 3],
        digests in prop::collection::vec(any::<u64>(), 0..40),
        cut in 0usize..3,
    ) {
        let payload: Vec<u8> = digests.iter().flat_map(|digest| digest.to_be_bytes()).collect();
        let payload = &payload[..payload.len().saturating_sub(cut)];
        let words = [words[0], words[1], if words[2] % 2 == 0 { digests.len() as u32 } else { words[2] }];
        let is_in_range = words[2] > 0 && words[1].checked_add(words[2]).is_some();
        let is_right = is_in_range && words[2] as usize * 8 == payload.len();
        let read = WindowsPacket::read(words, payload);
        prop_assert_eq!(read.is_ok(), is_right);
        if let Ok(packet) = read {
            prop_assert_eq!((packet.message, packet.first), (words[0], words[1]));
            prop_assert!(packet.digests().eq(digests.iter().copied()));
            let mut again = [0; 400];
            let written = WindowsPacket::write(&mut again, packet.message, packet.first, packet.digests());
            prop_assert_eq!(written, Some((words, payload.len())));
            prop_assert_eq!(&again[..payload.len()], payload);
        }
    }
}

/// Whatever else is wrong, another version is what the user hears of.
#[test]
fn another_version_comes_before_anything_else() {
    for version in (0..16).filter(|&version| version != lm::VERSION) {
        for packet_type in 0..16 {
            let first = version << 4 | packet_type;
            if first == lm::SEAL_VERSION << 4 | lm::TYPE_SEALED {
                let sealed = LmHeader::decode(&[first; 40]);
                assert_eq!(sealed, Err(LmError::UnknownType { packet_type }));
                continue;
            }
            for len in 1..40 {
                let mut bytes = vec![0xab; len];
                bytes[0] = first;
                let theirs = version;
                assert_eq!(LmHeader::decode(&bytes), Err(LmError::VersionMismatch { theirs }));
                assert_eq!(
                    lm::parse_datagram(&bytes),
                    Err(LmError::VersionMismatch { theirs })
                );
                let request_id = (packet_type == 15 && len >= 8).then_some(0xabab_abab);
                let expected = ControlError::VersionMismatch { theirs, request_id };
                assert_eq!(ControlMessage::parse(&bytes), Err(expected));
            }
        }
    }
}

#[test]
fn illegal_fields_of_control_messages_are_named() {
    let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).unwrap();
    let grant = ControlMessage::Grant(lm_protocol::control::Grant {
        session_key: 1,
        data_port: 2,
        layout,
        landing_queue: 1,
        tx_queue: Some(3),
        prefix: 0,
        frames_per_packet: 1,
        fillers: 0,
        repeats_apart: false,
        landing_port: None,
        max_message_len: 1,
        window: lm_protocol::window::WindowShape::DEFAULT,
        packet_limit: 1,
        lease_ms: 1,
        first_message: 0,
        lands: true,
        capabilities: 0,
    });
    let mut good = [0; MAX_CONTROL_LEN];
    let len = grant.encode(1, &mut good);
    let changed = |at: usize, value: u8| {
        let mut bytes = good;
        bytes[lm::HEADER_LEN + at] = value;
        ControlMessage::parse(&bytes[..len]).map(|(_, message)| message)
    };
    assert_eq!(changed(0, 0), Ok(grant));
    assert_eq!(changed(9, 0), Err(ControlError::Field("data port")));
    assert!(
        matches!(changed(11, 67), Err(ControlError::Layout(_))),
        "header length"
    );
    assert!(
        matches!(changed(13, 0xa9), Err(ControlError::Layout(_))),
        "payload length"
    );
    assert_eq!(changed(18, 2), Err(ControlError::Field("wire")));
    assert_eq!(changed(19, 5), Err(ControlError::Field("address family")));
    assert_eq!(changed(21, 3), Err(ControlError::Field("number of VLAN tags")));
    assert_eq!(changed(22, 0), Err(ControlError::Field("frames per packet")));
    assert!(matches!(changed(34, 0), Err(ControlError::Window(_))));
    assert!(matches!(changed(35, 7), Err(ControlError::Window(_))));
    assert_eq!(
        ControlMessage::parse(&good[..len - 1]),
        Err(ControlError::Packet(LmError::Length))
    );

    let credit = LmHeader::Credit {
        session_key: 1,
        packet_limit: 2,
        delivered: 3,
        announced: 4,
        lands: true,
    };
    let credit = [&credit.encode(0)[..], &[0; 8]].concat();
    assert_eq!(
        ControlMessage::parse(&credit),
        Err(ControlError::NotControl { packet_type: 5 })
    );
    let append = LmHeader::Control {
        request_id: 1,
        kind: 6,
    }
    .encode(0);
    assert_eq!(
        ControlMessage::parse(&append),
        Err(ControlError::UnknownKind { kind: 6 })
    );
    let empty = LmHeader::Control {
        request_id: 1,
        kind: 1,
    }
    .encode(0);
    assert_eq!(ControlMessage::parse(&empty), Err(ControlError::Length));
}
