//! Packets that nobody here sent: what else is on a network, and what somebody would send who wants to do harm without
//! knowing a session's key.

use std::net::{Ipv4Addr, SocketAddrV4};

use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{AnnounceEntry, LmHeader, MissingRange, Trailer};

use super::super::datagram::{HEADERS_LEN, write_datagram};
use super::super::mac_of;
use super::Dice;

/// The two hosts of a direction.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Data address of who sends.
    pub from: SocketAddrV4,
    /// Data address of who receives; control has the next port.
    pub to: SocketAddrV4,
    /// Longest IP packet.
    pub mtu: u32,
}

/// Writes a foreign packet that arrives at `ends.to`.
pub(super) fn write(packet: &mut Vec<u8>, ends: &Ends, dice: &mut Dice) {
    let other = |port: u16| port != ends.to.port() && port != ends.to.port() + 1;
    let payload_max = u64::from(ends.mtu) - 28;
    match dice.below(9) {
        0 => noise(packet, 1 + dice.below(u64::from(ends.mtu) + 14), dice),
        1 => arp(packet, ends),
        // To a port where nobody listens, from one where nobody waits for the answer.
        2 => {
            let port = (1024..).find(|&port| other(port)).unwrap_or(1024) + dice.below(1000) as u16;
            let from = SocketAddrV4::new(*ends.from.ip(), 40_000 + dice.below(1000) as u16);
            datagram(
                packet,
                from,
                SocketAddrV4::new(*ends.to.ip(), port),
                payload_max,
                dice,
            );
        }
        // To a third host.
        3 => {
            let stranger = Ipv4Addr::from_bits(ends.to.ip().to_bits() ^ (1 + dice.below(200) as u32));
            let to = SocketAddrV4::new(stranger, ends.to.port());
            datagram(packet, ends.from, to, payload_max, dice);
        }
        // Noise for the data port and the control port.
        4 => datagram(packet, ends.from, ends.to, payload_max, dice),
        5 => {
            let to = SocketAddrV4::new(*ends.to.ip(), ends.to.port() + 1);
            datagram(packet, ends.from, to, payload_max, dice);
        }
        // An IP fragment of something else.
        6 => {
            datagram(packet, ends.from, ends.to, payload_max, dice);
            packet[20] |= 0x20;
            let sum = u16::from_be_bytes([packet[24], packet[25]]);
            // The checksum's complement grows by 0x2000, with the carry added again (RFC 1624).
            let (less, borrow) = sum.overflowing_sub(0x2000);
            packet[24..26].copy_from_slice(&(less - u16::from(borrow)).to_be_bytes());
        }
        _ => forged(packet, ends, dice),
    }
}

fn noise(packet: &mut Vec<u8>, len: u64, dice: &mut Dice) {
    packet.clear();
    while (packet.len() as u64) < len {
        packet.extend_from_slice(&dice.number().to_le_bytes());
    }
    packet.truncate(len as usize);
}

/// Who has our address? (RFC 826)
fn arp(packet: &mut Vec<u8>, ends: &Ends) {
    packet.clear();
    packet.extend_from_slice(&[0xff; 6]);
    packet.extend_from_slice(&mac_of(*ends.from.ip()));
    packet.extend_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    packet.extend_from_slice(&mac_of(*ends.from.ip()));
    packet.extend_from_slice(&ends.from.ip().octets());
    packet.extend_from_slice(&[0; 6]);
    packet.extend_from_slice(&ends.to.ip().octets());
    packet.resize(60, 0);
}

fn datagram(packet: &mut Vec<u8>, from: SocketAddrV4, to: SocketAddrV4, payload_max: u64, dice: &mut Dice) {
    let mut payload = Vec::new();
    noise(&mut payload, dice.below(payload_max + 1), dice);
    write_datagram(packet, from, to, &payload);
    debug_assert!(packet.len() >= HEADERS_LEN);
}

/// A well-formed LM packet from the peer's address, with a key or sender id that nobody has.
fn forged(packet: &mut Vec<u8>, ends: &Ends, dice: &mut Dice) {
    let key = dice.number();
    let word = |dice: &mut Dice| dice.number() as u32;
    let small = |dice: &mut Dice| dice.below(64) as u32;
    let (header, payload_len) = match dice.below(5) {
        0 => {
            let count = 1 + small(dice);
            let header = LmHeader::Data {
                session_key: key,
                message: small(dice),
                index: dice.below(u64::from(count)) as u32,
                count,
            };
            (header, dice.below(u64::from(ends.mtu) - 52 + 1) as usize)
        }
        1 => {
            let header = LmHeader::EagerAck {
                sender_id: key,
                next: small(dice),
                limit: word(dice),
            };
            (header, 0)
        }
        2 => {
            let header = LmHeader::Announce {
                session_key: key,
                first: small(dice),
                entries: 1,
                sent: word(dice),
            };
            (header, AnnounceEntry::LEN)
        }
        3 => {
            let header = LmHeader::Credit {
                session_key: key,
                packet_limit: word(dice),
                delivered: small(dice),
                announced: small(dice),
                lands: true,
            };
            (header, 0)
        }
        _ => {
            let header = LmHeader::Missing {
                session_key: key,
                message: small(dice),
                ranges: 1,
                manifest: dice.below(2) == 0,
            };
            (header, MissingRange::LEN)
        }
    };
    let addressing = Addressing {
        src_mac: MacAddr(mac_of(*ends.from.ip())),
        dst_mac: MacAddr(mac_of(*ends.to.ip())),
        vlan: None,
        src_ip: *ends.from.ip(),
        dst_ip: *ends.to.ip(),
        src_port: ends.from.port(),
        dst_port: ends.to.port(),
    };
    packet.clear();
    packet.resize(256, 0);
    let header_len = addressing
        .write_headers(packet, &header, payload_len)
        .expect("room for headers");
    let mut payload = Vec::new();
    match header {
        LmHeader::Announce { .. } => {
            let entry = AnnounceEntry {
                len: dice.number(),
                tag: dice.number(),
                delivery: None,
                windows_released: AnnounceEntry::ALL_WINDOWS,
                has_facts: false,
            };
            payload.extend_from_slice(&entry.encode());
        }
        _ => noise(&mut payload, payload_len as u64, dice),
    }
    packet.truncate(header_len);
    packet.extend_from_slice(&payload);
    // The digest keeps nobody out, it is no secret.
    packet.extend_from_slice(Trailer::new(&header, &payload, ends.from).as_bytes());
}
