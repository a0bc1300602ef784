//! Headers against `etherparse`, an implementation that is not ours, in both directions.

mod entries;
#[path = "../inputs/mod.rs"]
mod inputs;
mod mistakes;
mod oracle;

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
    assert_eq!((ip.time_to_live, ip.ecn.value(), ip.protocol.0), (64, 0, 17));
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
