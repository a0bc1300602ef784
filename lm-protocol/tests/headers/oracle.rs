//! What we build `etherparse` reads, and the other way round.

use crate::*;

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
        let is_real_time = matches!(header, LmHeader::Extension { packet_type: 8 | 9, .. });
        prop_assert_eq!(ip.dscp.value(), if is_real_time { 46 } else { 0 });
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
    fn checksums_in_frames_are_etherparses(
        address in any_addressing(),
        header in any_header(),
        bytes in prop::collection::vec(any::<u8>(), 1..1400),
        cuts in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        before: u16,
    ) {
        let payload = payload_for(&header, &bytes);
        let mut packet = vec![0; 70 + payload.len()];
        let header_len = address.write_headers(&mut packet, &header, payload.len()).unwrap();
        packet.truncate(header_len + payload.len());
        packet[header_len..].copy_from_slice(&payload);
        let udp = header_len - 32;
        let right = {
            let (header, payload) = UdpHeader::from_slice(&packet[udp..]).unwrap();
            header.calc_checksum_ipv4_raw(address.src_ip.octets(), address.dst_ip.octets(), payload).unwrap()
        };
        // Whatever was there, and wherever the headers are told to end.
        packet[udp + 6..udp + 8].copy_from_slice(&before.to_be_bytes());
        let end = udp + 8 + cuts.0.index(packet.len() - udp - 7);
        let (headers, rest) = packet.split_at_mut(end);
        let (one, other) = rest.split_at(cuts.1.index(rest.len() + 1));
        prop_assert_eq!(udp::put_checksum(headers, [one, other]), Some(udp));
        prop_assert_eq!(&packet[udp + 6..udp + 8], &right.to_be_bytes());
        // A device goes on from the sum over the pseudo header.
        prop_assert_eq!(udp::put_pseudo_sum(&mut packet[..end]), Some(udp));
        let sum = match lm_protocol::wire::ipv4::checksum(&packet[udp..]) {
            0 => 0xffff,
            sum => sum,
        };
        prop_assert_eq!(sum, right);
        // What is no whole UDP datagram over IPv4 stays as it is.
        let ip = udp - 20;
        for (at, bit) in [(ip - 1, 1), (ip, 0x10), (ip, 4), (ip + 6, 0x20), (ip + 7, 1), (ip + 9, 1)] {
            let mut other = packet.clone();
            other[at] ^= bit;
            let same = other.clone();
            prop_assert_eq!(udp::put_checksum(&mut other, []), None);
            prop_assert_eq!(udp::put_pseudo_sum(&mut other), None);
            prop_assert!(other == same);
        }
        for len in 0..udp + 8 {
            prop_assert_eq!(udp::put_checksum(&mut packet[..len].to_vec(), []), None);
        }
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
                has_facts: false,
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
