//! What is refused, and by which name.

use crate::*;

/// A sum of zero goes out as 0xffff: 0 would mean "no checksum" (RFC 768).
#[test]
fn a_udp_checksum_is_never_zero() {
    let address = addressing();
    let of = |payload: &[u8]| udp::checksum(address.src_ip, address.dst_ip, 1, 2, [payload]);
    let without = of(&[0, 0]);
    // This word makes the sum all ones, whose complement is 0.
    assert_eq!(of(&without.to_be_bytes()), 0xffff);
}

#[test]
fn a_template_for_another_wire_or_link_is_refused() {
    let address = addressing();
    let lm = Layout::new(Wire::Lm, 1500, address.link())
        .unwrap()
        .message(1)
        .unwrap();
    assert!(IpFragTemplate::new(&address, &lm, 0, 0).is_none());
    let tagged = LinkShape { vlan_tags: 1 };
    let other = Layout::new(Wire::IpFrag, 1500, tagged).unwrap();
    assert!(IpFragTemplate::new(&address, &other.message(1).unwrap(), 0, 0).is_none());
}

#[test]
fn headers_that_do_not_fit_are_refused() {
    let address = addressing();
    let header = LmHeader::Eager {
        sender_id: 1,
        number: 2,
        tag: 3,
        digested: false,
        acknowledges: None,
    };
    let mut out = [0xaa; 66];
    assert_eq!(
        address.write_headers(&mut out[..65], &header, 0),
        Err(BuildError::OutputTooShort { needed: 66 })
    );
    assert_eq!(
        address.write_headers(&mut out, &header, lm::MAX_PAYLOAD_LEN + 1),
        Err(BuildError::PayloadTooLong {
            maximum: lm::MAX_PAYLOAD_LEN
        })
    );
    assert_eq!(out, [0xaa; 66]);
    assert_eq!(
        address.write_headers(&mut out, &header, lm::MAX_PAYLOAD_LEN),
        Ok(66)
    );
    assert_eq!(
        u16::from_be_bytes([out[16], out[17]]),
        65_535,
        "the longest IPv4 packet"
    );
}

/// Each mistake has its own name, found from the outside in.
#[test]
fn mistakes_are_named() {
    let address = addressing();
    let header = LmHeader::Eager {
        sender_id: 1,
        number: 2,
        tag: 3,
        digested: false,
        acknowledges: None,
    };
    let mut good = vec![0; 66 + 8];
    address.write_headers(&mut good, &header, 8).unwrap();
    let resum = |packet: &mut Vec<u8>| {
        packet[24..26].fill(0);
        let sum = lm_protocol::wire::ipv4::checksum(&packet[14..34]);
        packet[24..26].copy_from_slice(&sum.to_be_bytes());
    };
    let changed = |changes: &[(usize, u8)]| {
        let mut packet = good.clone();
        for &(at, value) in changes {
            packet[at] = value;
        }
        resum(&mut packet);
        parse_frame(&packet).map(|frame| frame.transport)
    };
    assert!(matches!(changed(&[]), Ok(Transport::Lm { .. })));
    assert_eq!(
        changed(&[(12, 0x86), (13, 0xdd)]),
        Err(ParseError::NotIpv4),
        "IPv6"
    );
    assert_eq!(
        changed(&[(12, 0x08), (13, 0x06)]),
        Err(ParseError::NotIpv4),
        "ARP"
    );
    assert_eq!(
        changed(&[(14, 0x65)]),
        Err(ParseError::NotIpv4),
        "version 6 inside"
    );
    assert_eq!(changed(&[(14, 0x46)]), Err(ParseError::IpOptions));
    assert_eq!(changed(&[(14, 0x44)]), Err(ParseError::IpLength));
    assert_eq!(changed(&[(16, 0), (17, 19)]), Err(ParseError::IpLength));
    assert_eq!(changed(&[(16, 1)]), Err(ParseError::Truncated));
    assert_eq!(changed(&[(23, 6)]), Err(ParseError::NotUdp));
    assert_eq!(changed(&[(38, 0), (39, 7)]), Err(ParseError::UdpLength));
    assert_eq!(changed(&[(39, 39)]), Err(ParseError::UdpLength));
    assert_eq!(changed(&[(39, 41)]), Err(ParseError::UdpLength));
    assert_eq!(
        changed(&[(17, 59), (20, 0x20)]),
        Err(ParseError::IpFragment),
        "39 bytes and more to come"
    );
    assert_eq!(
        changed(&[(17, 20), (20, 0x20)]),
        Err(ParseError::IpFragment),
        "no bytes and more to come"
    );
    assert_eq!(
        changed(&[(17, 20), (21, 1)]),
        Err(ParseError::IpFragment),
        "a last fragment of no bytes"
    );
    assert_eq!(
        changed(&[(20, 0x20)]),
        Err(ParseError::UdpLength),
        "more to come than UDP has"
    );
    assert!(matches!(
        changed(&[(20, 0x20), (39, 41)]),
        Ok(Transport::Fragment(_))
    ));
    assert_eq!(
        changed(&[(20, 0x1f), (21, 0xff)]),
        Err(ParseError::IpFragment),
        "ends behind 65,535"
    );
    let version = ParseError::Lm(lm::LmError::VersionMismatch { theirs: 3 });
    assert_eq!(
        changed(&[(42, 0x3f), (44, 9)]),
        Err(version),
        "the version comes first"
    );
    assert_eq!(
        changed(&[(42, 0x20)]),
        Err(ParseError::Lm(lm::LmError::UnknownType { packet_type: 0 }))
    );
    for packet_type in lm::EXTENSION_TYPES {
        let digest = Err(ParseError::Lm(lm::LmError::Digest));
        assert_eq!(
            changed(&[(42, 0x20 | packet_type)]),
            digest,
            "an extension's ends with one"
        );
        assert!(matches!(
            changed(&[(42, 0x20 | packet_type), (43, 2)]),
            Ok(Transport::Lm { .. })
        ));
    }
    assert_eq!(changed(&[(45, 7)]), Err(ParseError::Lm(lm::LmError::Length)));
    assert_eq!(
        changed(&[(42, 0x23)]),
        Err(ParseError::Lm(lm::LmError::Digest)),
        "an ACK ends with a digest"
    );
    assert!(matches!(
        changed(&[(42, 0x23), (43, 2)]),
        Ok(Transport::Lm { .. })
    ));
    assert_eq!(
        changed(&[(42, 0x23), (43, 2), (45, 7)]),
        Err(ParseError::Lm(lm::LmError::Length)),
        "a digest of 7 bytes"
    );
    assert_eq!(
        changed(&[(42, 0x21), (43, 2)]),
        Err(ParseError::Lm(lm::LmError::Digest)),
        "DATA has none"
    );
    let ack = LmHeader::EagerAck {
        sender_id: 1,
        next: 2,
        limit: 3,
    };
    let datagram = [&ack.encode(8)[..], &[0; 16]].concat();
    assert_eq!(
        lm::parse_datagram(&datagram),
        Err(lm::LmError::Length),
        "an ACK has no payload"
    );
    assert_eq!(
        changed(&[(42, 0x21), (61, 3)]),
        Err(ParseError::Lm(lm::LmError::Index)),
        "fragment 3 of 3"
    );

    // The eight bytes behind the header are too few for an acknowledgement.
    let short = Err(ParseError::Lm(lm::LmError::Length));
    assert_eq!(changed(&[(43, lm::FLAG_ACKNOWLEDGES)]), short);
    assert_eq!(changed(&[(43, lm::FLAG_ACKNOWLEDGES | lm::FLAG_DIGEST)]), short);
    assert!(
        matches!(changed(&[(42, 0x23), (43, 0xf8 | 2)]), Ok(Transport::Lm { .. })),
        "an ACK has none behind it, whatever its flags say"
    );

    let mut packet = good.clone();
    packet[25] ^= 1;
    assert_eq!(parse_frame(&packet), Err(ParseError::IpChecksum));
    for len in 0..good.len() {
        assert_eq!(
            parse_frame(&good[..len]),
            Err(ParseError::Truncated),
            "{len} bytes"
        );
    }
}

/// An acknowledgement takes 16 bytes before the digest, and nothing of the message.
#[test]
fn an_acknowledgement_is_no_part_of_its_message() {
    let acknowledgement = EagerAcknowledgement {
        sender_id: 5,
        next: 6,
        limit: 7,
    };
    for digested in [false, true] {
        let header = LmHeader::Eager {
            sender_id: lm::with_digests(1, digested),
            number: 2,
            tag: 3,
            digested,
            acknowledges: Some(acknowledgement),
        };
        let from = SocketAddrV4::new(addressing().src_ip, addressing().src_port);
        for message in [&b""[..], b"m", &[0x77; 1400]] {
            let trailer = Trailer::new(&header, message, from);
            assert_eq!(trailer.as_bytes().len(), header.trailer_len());
            let bytes = [
                &header.encode(message.len() as u16)[..],
                message,
                trailer.as_bytes(),
            ]
            .concat();
            let read = lm::parse_packet(&bytes).unwrap();
            assert_eq!((read.header, read.payload), (header, message));
            assert!(read.is_intact(from));
            // As many bytes as the header says, but none for the acknowledgement to lie in.
            let mut short = bytes.clone();
            short[2..4].copy_from_slice(&(header.trailer_len() as u16 - 1).to_be_bytes());
            short.truncate(lm::HEADER_LEN + header.trailer_len() - 1);
            assert_eq!(lm::parse_packet(&short), Err(lm::LmError::Length));
            // A header alone does not say what is acknowledged.
            assert_eq!(
                LmHeader::decode(&bytes[..lm::HEADER_LEN]),
                Err(lm::LmError::Truncated)
            );
        }
    }
    assert_eq!(
        addressing().write_headers(
            &mut [0; 128],
            &LmHeader::Eager {
                sender_id: 1,
                number: 2,
                tag: 3,
                digested: true,
                acknowledges: Some(acknowledgement),
            },
            lm::MAX_PAYLOAD_LEN - 23,
        ),
        Err(BuildError::PayloadTooLong {
            maximum: lm::MAX_PAYLOAD_LEN - 24
        })
    );
}

#[test]
fn a_fragment_of_another_size_has_no_index() {
    let fragment = |ip_offset| IpFragment {
        ip_offset,
        more: true,
        udp: None,
    };
    assert_eq!(fragment(2960).index(1480), Some(2));
    assert_eq!(fragment(2952).index(1480), None);
    assert_eq!(fragment(0).index(0), None);
}

#[test]
fn a_frame_without_ports_has_no_addressing() {
    let geometry = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4)
        .unwrap()
        .message(3000)
        .unwrap();
    let template = IpFragTemplate::new(&addressing(), &geometry, 0, 0).unwrap();
    let mut packet = vec![0; 1514];
    template.write(&mut packet, 1, 1480);
    let frame: Frame<'_> = parse_frame(&packet).unwrap();
    assert_eq!(frame.addressing(), None);
}
