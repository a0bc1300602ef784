//! Headers against `etherparse`, an implementation that is not ours, in both directions.

mod inputs;

use etherparse::{
    Ipv4Header, NetHeaders, PacketBuilder, PacketHeaders, PayloadSlice, TransportHeader, UdpHeader,
};
use inputs::{addressing, any_addressing};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Layout, LinkShape, Wire};
use lm_protocol::manifest::DIGEST_LEN;
use lm_protocol::wire::ipfrag::IpFragment;
use lm_protocol::wire::lm::{
    self, AnnounceEntry, EagerAcknowledgement, LmHeader, MessageDigest, MissingRange, Trailer, UnwholeMessage,
};
use lm_protocol::wire::{
    Addressing, BuildError, DataTemplate, Frame, IpFragTemplate, ParseError, Transport, parse_frame, udp,
};
use proptest::prelude::*;
use std::net::{Ipv4Addr, SocketAddrV4};

fn any_header() -> impl Strategy<Value = LmHeader> {
    let words = any::<(u64, u32, u32, u32)>();
    (words, 0usize..8).prop_map(|((key, a, b, c), kind)| match kind {
        0 => LmHeader::Data {
            session_key: key,
            message: a,
            index: b.min(u32::MAX - 1),
            count: c.max(b.saturating_add(1)),
        },
        1 => LmHeader::Eager {
            sender_id: key,
            number: a,
            tag: u64::from(b) << 32 | u64::from(c),
            digested: c & 2 == 2,
            acknowledges: (c & 4 == 4).then_some(EagerAcknowledgement {
                sender_id: key.rotate_left(32),
                next: c,
                limit: b,
            }),
        },
        2 => LmHeader::EagerAck {
            sender_id: key,
            next: a,
            limit: b,
        },
        3 => LmHeader::Announce {
            session_key: key,
            first: a,
            entries: b % 80,
            sent: c,
        },
        4 => LmHeader::Credit {
            session_key: key,
            packet_limit: a,
            delivered: b,
            announced: c,
            lands: true,
        },
        5 => LmHeader::Manifest {
            session_key: key,
            message: a,
            first: b % 1000,
            count: b % 1000 + 1 + c % 100,
        },
        6 => LmHeader::Extension {
            packet_type: 8 + (a % 6) as u8,
            key,
            words: [a, b, c],
        },
        _ => LmHeader::Missing {
            session_key: key,
            message: a,
            ranges: b % 80,
            manifest: c & 1 == 1,
        },
    })
}

/// A payload that the header may have.
fn payload_for(header: &LmHeader, bytes: &[u8]) -> Vec<u8> {
    let len = match header {
        LmHeader::Announce { entries, sent, .. } => {
            let mut noise = bytes.iter().copied().cycle();
            let mut payload = Vec::new();
            for opaque_len in (0..*entries).map(|n| (n + sent) % 9) {
                let at = payload.len();
                payload.extend(
                    noise
                        .by_ref()
                        .take(AnnounceEntry::LEN + opaque_len.next_multiple_of(4) as usize),
                );
                payload[at + 18..at + 20].copy_from_slice(&[0, opaque_len as u8]);
            }
            payload.extend(noise.take(*sent as usize % 9 * MessageDigest::LEN));
            return payload;
        }
        LmHeader::Missing { ranges, .. } => *ranges as usize * MissingRange::LEN,
        LmHeader::EagerAck { .. } => 0,
        LmHeader::Credit { packet_limit, .. } => *packet_limit as usize % 9 * 4,
        LmHeader::Manifest { first, count, .. } => (count - first + 1) as usize * DIGEST_LEN,
        _ => bytes.len(),
    };
    bytes.iter().copied().cycle().take(len).collect()
}

/// Everything that etherparse says about a packet's addresses, and its IPv4 header.
fn check_addresses(packet: &[u8], address: &Addressing) -> (Ipv4Header, Option<UdpHeader>, Vec<u8>) {
    let headers = PacketHeaders::from_ethernet_slice(packet).unwrap();
    let link = headers.link.and_then(|link| link.ethernet2()).unwrap();
    assert_eq!(
        (link.source, link.destination),
        (address.src_mac.0, address.dst_mac.0)
    );
    let vlan = headers.link_exts.first().map(|ext| match ext {
        etherparse::LinkExtHeader::Vlan(tag) => {
            assert_eq!(tag.pcp.value(), 0);
            tag.vlan_id.value()
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(vlan, address.vlan);
    let Some(NetHeaders::Ipv4(ip, extensions)) = headers.net else {
        panic!("no IPv4")
    };
    assert!(extensions.is_empty());
    assert_eq!(
        (ip.source, ip.destination),
        (address.src_ip.octets(), address.dst_ip.octets())
    );
    assert_eq!(ip.header_checksum, ip.calc_header_checksum(), "IPv4 checksum");
    assert_eq!(
        (ip.time_to_live, ip.dscp.value(), ip.ecn.value(), ip.protocol.0),
        (64, 0, 0, 17)
    );
    let udp = headers.transport.map(|transport| match transport {
        TransportHeader::Udp(udp) => {
            assert_eq!(
                (udp.source_port, udp.destination_port),
                (address.src_port, address.dst_port)
            );
            udp
        }
        other => panic!("{other:?}"),
    });
    let payload = match headers.payload {
        PayloadSlice::Udp(payload) => payload.to_vec(),
        PayloadSlice::Ip(payload) => payload.payload.to_vec(),
        other => panic!("{other:?}"),
    };
    (ip, udp, payload)
}

proptest! {
    #[test]
    fn what_we_build_etherparse_and_we_read(
        address in any_addressing(),
        header in any_header(),
        bytes in prop::collection::vec(any::<u8>(), 1..1400),
        padding in 0usize..40,
    ) {
        let payload = payload_for(&header, &bytes);
        let from = SocketAddrV4::new(address.src_ip, address.src_port);
        let trailer = Trailer::new(&header, &payload, from);
        let mut packet = vec![0; 70 + payload.len() + padding];
        let header_len = address.write_headers(&mut packet, &header, payload.len()).unwrap();
        prop_assert_eq!(header_len, if address.vlan.is_some() { 70 } else { 66 });
        packet[header_len..header_len + payload.len()].copy_from_slice(&payload);
        packet.truncate(header_len + payload.len());
        packet.extend_from_slice(trailer.as_bytes());

        let (ip, udp, udp_payload) = check_addresses(&packet, &address);
        prop_assert!(ip.dont_fragment && !ip.more_fragments && ip.identification == 0);
        let udp = udp.unwrap();
        prop_assert_eq!(udp.checksum, 0);
        prop_assert_eq!(usize::from(udp.length), 8 + 24 + payload.len() + header.trailer_len());
        prop_assert_eq!(lm::parse_datagram(&udp_payload), Ok((header, &payload[..])));
        let read = lm::parse_packet(&udp_payload).unwrap();
        let digest = lm::packet_digest(&header, &payload, from);
        prop_assert_eq!(read.digest, (header.digest_len() > 0).then_some(digest));
        for len in 0..udp_payload.len() {
            prop_assert!(lm::parse_packet(&udp_payload[..len]).is_err(), "{} bytes", len);
        }

        // Ethernet padding may hold anything.
        packet.resize(packet.len() + padding, 0x5a);
        let frame = parse_frame(&packet).unwrap();
        prop_assert_eq!(frame.lm(), Some(&header));
        prop_assert_eq!(frame.packet(), Some(read));
        prop_assert_eq!(frame.payload, &payload[..]);
        prop_assert_eq!(usize::from(frame.header_len), header_len);
        prop_assert_eq!(frame.addressing(), Some(address));
        prop_assert_eq!(frame.addressing().unwrap().reversed().reversed(), address);
        prop_assert_eq!(frame.fragment(), None);
    }

    #[test]
    fn what_etherparse_builds_we_read(
        address in any_addressing(),
        header in any_header(),
        bytes in prop::collection::vec(any::<u8>(), 1..1400),
        ttl: u8,
    ) {
        let payload = payload_for(&header, &bytes);
        let from = SocketAddrV4::new(address.src_ip, address.src_port);
        let trailer = Trailer::new(&header, &payload, from);
        let datagram = [&header.encode(payload.len() as u16)[..], &payload, trailer.as_bytes()].concat();
        let link = PacketBuilder::ethernet2(address.src_mac.0, address.dst_mac.0);
        let (src, dst) = (address.src_ip.octets(), address.dst_ip.octets());
        let network = match address.vlan {
            Some(vlan) => link.single_vlan(vlan.try_into().unwrap()).ipv4(src, dst, ttl),
            None => link.ipv4(src, dst, ttl),
        };
        let mut packet = Vec::new();
        network.udp(address.src_port, address.dst_port).write(&mut packet, &datagram).unwrap();

        let frame = parse_frame(&packet).unwrap();
        prop_assert_eq!(frame.addressing(), Some(address));
        prop_assert_eq!(frame.lm(), Some(&header));
        prop_assert_eq!(frame.payload, &payload[..]);
    }

    #[test]
    fn a_data_template_writes_what_the_generic_builder_writes(
        address in any_addressing(),
        key: u64, message: u32, count in 1u32.., at in any::<prop::sample::Index>(),
        full in 8u16..9000, short in any::<prop::sample::Index>(), is_short: bool,
    ) {
        let index = at.index(count as usize) as u32;
        let payload_len = if is_short { short.index(usize::from(full)) as u16 } else { full };
        let mut expected = [0xaa; 80];
        let header = LmHeader::Data { session_key: key, message, index, count };
        let len = address.write_headers(&mut expected, &header, usize::from(payload_len)).unwrap();

        // Made for another message, then moved on.
        let mut template = DataTemplate::new(&address, key, message.wrapping_sub(1), 1, full);
        template.set_message(message, count);
        let mut out = [0xaa; 80];
        prop_assert_eq!(template.write(&mut out, index, payload_len), len);
        prop_assert_eq!(template.header_len(), len);
        prop_assert_eq!(out, expected);
        let fresh = DataTemplate::new(&address, key, message, count, full);
        fresh.write(&mut out, index, payload_len);
        prop_assert_eq!(out, expected);
    }

    #[test]
    fn ip_fragments_are_a_datagram(
        address in any_addressing(),
        mtu in 576u16..=9000,
        len in prop_oneof![0u64..=65_507, 0u64..3000],
        number: u32,
        with_checksum: bool,
    ) {
        let message: Vec<u8> = (0..len).map(|at| (at * 31 % 256) as u8).collect();
        let (src, dst) = (address.src_ip, address.dst_ip);
        let checksum = if with_checksum {
            udp::checksum(src, dst, address.src_port, address.dst_port, message.chunks(997))
        } else {
            0
        };
        let layout = Layout::new(Wire::IpFrag, mtu, address.link()).unwrap();
        let geometry = layout.message(len).unwrap();
        let template = IpFragTemplate::new(&address, &geometry, number, checksum).unwrap();

        // Collected by offset, as any receiver does.
        let mut datagram = vec![0; 8 + message.len()];
        let mut ends = 0;
        for fragment in geometry.fragments().rev() {
            let mut packet = vec![0; 46];
            let header_len = template.write(&mut packet, fragment.index, fragment.len);
            prop_assert_eq!(header_len, usize::from(fragment.header_len));
            packet.truncate(header_len);
            let range = fragment.message_range();
            packet.extend_from_slice(&message[range.start as usize..range.end as usize]);
            prop_assert!(packet.len() <= usize::from(mtu + address.link().ethernet_len()));

            let (ip, _, _) = check_addresses(&packet, &address);
            prop_assert_eq!(ip.identification, number as u16);
            prop_assert!(!ip.dont_fragment);
            ends += usize::from(!ip.more_fragments);
            let ip_at = usize::from(address.link().ethernet_len());
            let ip_payload = &packet[ip_at + 20..ip_at + usize::from(ip.total_len)];
            prop_assert_eq!(ip_at + usize::from(ip.total_len), packet.len());
            prop_assert!(!ip.more_fragments || ip_payload.len().is_multiple_of(8));
            let at = usize::from(ip.fragment_offset.byte_offset());
            datagram[at..at + ip_payload.len()].copy_from_slice(ip_payload);

            // And our own reader, with padding.
            packet.resize(packet.len().max(60), 0xff);
            let frame = parse_frame(&packet);
            if geometry.fragment_count() == 1 {
                // A plain datagram without an LM header.
                prop_assert!(matches!(frame, Err(ParseError::Lm(_))) || len >= 24);
                continue;
            }
            let frame = frame.unwrap();
            prop_assert_eq!(frame.payload, &message[range.start as usize..range.end as usize]);
            prop_assert_eq!(usize::from(frame.header_len), header_len);
            let part = frame.fragment().unwrap();
            prop_assert_eq!(part.index(layout.payload_len()), Some(fragment.index));
            prop_assert_eq!(part.more, fragment.index + 1 < geometry.fragment_count());
            prop_assert_eq!(part.udp.is_some(), fragment.index == 0);
            let ports = (fragment.index == 0).then_some((address.src_port, address.dst_port));
            prop_assert_eq!(frame.ports(), ports);
            prop_assert_eq!(frame.lm(), None);
        }
        prop_assert_eq!(ends, 1, "one fragment is the last");
        let (header, payload) = UdpHeader::from_slice(&datagram).unwrap();
        prop_assert_eq!(payload, &message[..]);
        prop_assert_eq!(usize::from(header.length), datagram.len());
        prop_assert_eq!((header.source_port, header.destination_port), (address.src_port, address.dst_port));
        if with_checksum {
            let right = header.calc_checksum_ipv4_raw(src.octets(), dst.octets(), payload).unwrap();
            prop_assert_eq!(header.checksum, right);
        }
    }

    #[test]
    fn udp_checksums_are_etherparses(
        address in any_addressing(),
        payload in prop::collection::vec(any::<u8>(), 0..3000),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let header = UdpHeader {
            source_port: address.src_port,
            destination_port: address.dst_port,
            length: payload.len() as u16 + 8,
            checksum: 0,
        };
        let right = header
            .calc_checksum_ipv4_raw(address.src_ip.octets(), address.dst_ip.octets(), &payload)
            .unwrap();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(payload.len() + 1)).collect();
        cuts.extend([0, payload.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|cut| &payload[cut[0]..cut[1]]);
        let ours = udp::checksum(address.src_ip, address.dst_ip, address.src_port, address.dst_port, pieces);
        prop_assert_eq!(ours, right);
        prop_assert_ne!(ours, 0);
    }

    #[test]
    fn entries_survive(entries in prop::collection::vec(any::<(u64, u64)>(), 0..60)) {
        let announced: Vec<AnnounceEntry> = entries
            .iter()
            .map(|&(len, tag)| AnnounceEntry {
                len,
                tag,
                delivery: Delivery::from_u8(tag as u8 % 4),
                windows_released: (len ^ tag) as u32,
            })
            .collect();
        let told: Vec<MessageDigest> =
            entries.iter().map(|&(message, digest)| MessageDigest { message: message as u32, digest }).collect();
        let bytes: Vec<u8> = announced.iter().flat_map(AnnounceEntry::encode)
            .chain(told.iter().flat_map(MessageDigest::encode)).collect();
        let count = entries.len() as u32;
        prop_assert_eq!(AnnounceEntry::iter(&bytes, count).collect::<Vec<_>>(), announced);
        prop_assert_eq!(MessageDigest::iter(&bytes, count).collect::<Vec<_>>(), told);
        // No number of entries from the network takes more than there is.
        prop_assert_eq!(MessageDigest::iter(&bytes, u32::MAX).len(), 0);
        let missing: Vec<MissingRange> =
            entries.iter().map(|&(first, len)| MissingRange { first: first as u32, len: len as u32 }).collect();
        let bytes: Vec<u8> = missing.iter().flat_map(MissingRange::encode).collect();
        prop_assert_eq!(MissingRange::iter(&bytes).collect::<Vec<_>>(), missing);
    }
}

/// What an extension adds to an entry is skipped by its length, and a way of delivery that is not known is the session's.
#[test]
fn what_is_not_known_of_an_entry_is_skipped() {
    let entry = AnnounceEntry {
        len: 5,
        tag: 6,
        delivery: Some(Delivery::Partial),
        windows_released: 7,
    };
    let digest = MessageDigest {
        message: 8,
        digest: 9,
    };
    let mut payload = Vec::new();
    for opaque_len in [0, 1, 3, 4, 48] {
        let at = payload.len();
        payload.extend(entry.encode());
        payload[at + 18..at + 20].copy_from_slice(&[0, opaque_len]);
        payload.resize(payload.len() + usize::from(opaque_len.next_multiple_of(4)), 0xee);
    }
    payload[16] = 3;
    let packet_with = |payload: &[u8], entries| {
        let header = LmHeader::Announce {
            session_key: 1,
            first: 2,
            entries,
            sent: 3,
        };
        let trailer = Trailer::new(&header, payload, SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7168));
        [
            &header.encode(payload.len() as u16)[..],
            payload,
            trailer.as_bytes(),
        ]
        .concat()
    };
    let with_digest = [&payload[..], &digest.encode()].concat();
    let packet = packet_with(&with_digest, 5);
    let (_, read) = lm::parse_datagram(&packet).unwrap();
    let mut entries: Vec<AnnounceEntry> = AnnounceEntry::iter(read, 5).collect();
    assert_eq!(entries[0].delivery, None);
    entries[0].delivery = entry.delivery;
    assert_eq!(entries, [entry; 5]);
    assert!(MessageDigest::iter(read, 5).eq([digest]));

    // Opaque bytes that are not there, and those of which the padding is not.
    for cut in 1..=48 {
        let packet = packet_with(&payload[..payload.len() - cut], 5);
        assert_eq!(lm::parse_datagram(&packet), Err(lm::LmError::Length), "{cut}");
    }
    let mut overrun = with_digest.clone();
    overrun[18..20].fill(0xff);
    let overrun = packet_with(&overrun, 5);
    assert_eq!(lm::parse_datagram(&overrun), Err(lm::LmError::Length));
    let too_many = packet_with(&payload, u32::MAX);
    assert_eq!(lm::parse_datagram(&too_many), Err(lm::LmError::Length));
}

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

#[test]
fn opaque_bytes_come_with_their_entries() {
    let entries = [0usize, 1, 4, 47, 48].map(|len| {
        let entry = AnnounceEntry {
            len: len as u64,
            tag: 6,
            delivery: None,
            windows_released: AnnounceEntry::ALL_WINDOWS,
        };
        (entry, vec![len as u8 + 1; len])
    });
    let mut payload = [0xeeu8; 5 * AnnounceEntry::LEN + 4 + 4 + 48 + 48];
    let mut len = 0;
    for (entry, opaque) in &entries {
        let before = len;
        len += entry.write(opaque, &mut payload[len..]).unwrap();
        // Without room nothing is written.
        let mut short = payload[before..len - 1].to_vec();
        let kept = short.clone();
        assert_eq!(entry.write(opaque, &mut short), None);
        assert_eq!(short, kept);
    }
    assert_eq!(len, payload.len());
    assert!(payload.ends_with(&[49; 48]));
    let read = AnnounceEntry::with_opaque(&payload, 5).map(|(entry, opaque)| (entry, opaque.to_vec()));
    assert_eq!(read.collect::<Vec<_>>(), entries);
    assert!(AnnounceEntry::iter(&payload, 5).eq(entries.iter().map(|(entry, _)| *entry)));

    // More than a sender gives along are another's.
    let mut longer = entries[0].0.encode().to_vec();
    longer[18..20].copy_from_slice(&49u16.to_be_bytes());
    longer.extend([7; 52]);
    let read: Vec<_> = AnnounceEntry::with_opaque(&longer, 1).collect();
    assert_eq!(read, [(entries[0].0, &[][..])]);
}

#[test]
fn unwhole_messages_survive() {
    let of = |message: u32, declined: Option<u16>| UnwholeMessage { message, declined };
    for delivered in [0, 7, 100, u32::MAX, 1 << 31] {
        let near = |n: u32| delivered.wrapping_sub(n);
        let messages = [
            of(near(9), None),
            of(near(8), Some(0)),
            of(near(7), Some(0)),
            of(near(5), None),
            of(near(4), Some(u16::MAX)),
            of(near(3), Some(1)),
            of(near(1), Some(1)),
        ];
        // Four statuses begin, and there is room for one that does not.
        let mut payload = [0u8; 4 * (7 + 5)];
        let len = UnwholeMessage::encode_all(messages.into_iter(), delivered, &mut payload);
        assert_eq!(len, payload.len() - 4);
        let payload = &payload[..len];
        assert!(UnwholeMessage::iter(payload, delivered).eq(messages));
        // Who knows of no statuses takes each word for a number: none of them is near.
        let words = payload
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_be_bytes(*word));
        let is_near = |word: &u32| delivered.wrapping_sub(*word) <= lm::SETTLED_KEPT;
        assert!(
            words
                .filter(is_near)
                .eq(messages.iter().map(|message| message.message))
        );
        // As many as there is room for, and with it the first statuses.
        for room in 0..payload.len() {
            let mut short = vec![0; room];
            let len = UnwholeMessage::encode_all(messages.into_iter(), delivered, &mut short);
            let read: Vec<_> = UnwholeMessage::iter(&short[..len], delivered).collect();
            let count = messages.len().min(room / 4);
            let numbers =
                |messages: &[UnwholeMessage]| messages.iter().map(|of| of.message).collect::<Vec<_>>();
            assert_eq!(numbers(&read), numbers(&messages[..count]));
            let named = read
                .iter()
                .zip(&messages)
                .filter(|(read, told)| read == told)
                .count();
            let lost = read.iter().filter(|read| read.declined.is_none()).count();
            assert!(lost + named >= count && (room < 4 * 9 || named > 2), "{read:?}");
        }
    }
}
