//! Whole frames, LM datagrams and lone headers: whatever is accepted holds together and says the same when written again.

use crate::geometry::{Layout, LinkShape, Wire};
use crate::manifest;
use crate::manifest::FragmentHasher;
use crate::wire::lm::{
    self, AnnounceEntry, Facts, LmHeader, MessageDigest, MissingRange, Trailer, WindowsPacket,
};
use crate::wire::{Transport, ipv4, parse_frame};
use std::net::{Ipv4Addr, SocketAddrV4};

fn header(header: &LmHeader, payload: &[u8]) {
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
            let read: Vec<AnnounceEntry> = AnnounceEntry::iter(payload, entries).collect();
            assert_eq!(read.len(), entries as usize);
            let digests: Vec<u8> = MessageDigest::iter(payload, entries)
                .flat_map(|digest| digest.encode())
                .collect();
            assert!(payload.ends_with(&digests));
            // Without the opaque bytes, which are skipped.
            let again: Vec<u8> = read.iter().flat_map(AnnounceEntry::encode).collect();
            assert!(again.len() + digests.len() <= payload.len());
            let again = [&again[..], &digests].concat();
            assert!(AnnounceEntry::iter(&again, entries).eq(read));
            assert!(MessageDigest::iter(&again, entries).eq(MessageDigest::iter(payload, entries)));
        }
        LmHeader::Missing { ranges, .. } => {
            let again: Vec<u8> = MissingRange::iter(payload)
                .flat_map(|range| range.encode())
                .collect();
            assert_eq!(
                (again.len(), &again[..]),
                (ranges as usize * MissingRange::LEN, payload)
            );
        }
        LmHeader::Extension {
            packet_type: lm::TYPE_WINDOWS,
            words,
            ..
        } => {
            if let Ok(packet) = WindowsPacket::read(words, payload) {
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

fn frame(bytes: &[u8]) {
    if let Ok(frame) = parse_frame(bytes) {
        let start = usize::from(frame.header_len);
        assert_eq!(&bytes[start..start + frame.payload.len()], frame.payload);
        match frame.transport {
            Transport::Lm { header: lm, .. } => header(&lm, frame.payload),
            Transport::Fragment(fragment) => {
                assert!(usize::from(fragment.ip_offset) + frame.payload.len() <= 65_515);
                assert_eq!(fragment.udp.is_some(), fragment.ip_offset == 0);
                let _ = fragment.index(1480);
            }
        }
    }
}

/// What is taken for facts says the same when written again, and has its place; also with the hash that a fuzzer does not guess.
fn facts(bytes: [u8; Facts::LEN]) {
    let hasher = FragmentHasher::new(7);
    let raw: Facts = zerocopy::transmute!(bytes);
    let facts = raw.seal(&hasher);
    assert_eq!(Facts::read(zerocopy::transmute!(facts), &hasher), Some(facts));
    assert!(Facts::read(bytes, &hasher).is_none_or(|read| read == raw && raw == facts));
    let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).expect("an MTU");
    if let Some(with) = Facts::geometry(&layout, facts.len.get()) {
        let last = with.fragment_count() - 1;
        assert!((1..Facts::FRAGMENTS_MAX).contains(&last));
        assert!(usize::from(with.fragment_len(last)) >= Facts::LEN);
        assert!(with.message_len() - facts.len.get() < 2 * Facts::LEN as u64);
    }
}

/// A frame, a datagram, a header, or none.
pub fn frames(bytes: &[u8]) {
    frame(bytes);
    if let Some(bytes) = bytes.last_chunk() {
        facts(*bytes);
    }
    // Once more with a right IPv4 checksum, which a fuzzer does not guess.
    let mut summed = bytes.to_vec();
    let ip_at = if bytes.get(12..14) == Some(&[0x81, 0]) {
        18
    } else {
        14
    };
    if summed.len() >= ip_at + 20 {
        summed[ip_at + 10..ip_at + 12].fill(0);
        let sum = ipv4::checksum(&summed[ip_at..ip_at + 20]);
        summed[ip_at + 10..ip_at + 12].copy_from_slice(&sum.to_be_bytes());
        frame(&summed);
    }
    if let Ok((lm, payload)) = lm::parse_datagram(bytes) {
        assert_eq!(payload, &bytes[lm::HEADER_LEN..bytes.len() - lm.trailer_len()]);
        header(&lm, payload);
    }
    if let Ok((lm, payload_len)) = LmHeader::decode(bytes) {
        let mut again = bytes.to_vec();
        again[..lm::HEADER_LEN].copy_from_slice(&lm.encode(payload_len));
        assert_eq!(LmHeader::decode(&again), Ok((lm, payload_len)));
    }
}
