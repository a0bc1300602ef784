//! Packets that no honest peer sends, made up by a seed or by a fuzzer.

use std::net::Ipv4Addr;
use std::time::Duration;

use lm_protocol::control::{
    ControlMessage, End, Ended, Grant, MAX_CONTROL_LEN, Reject, RejectReason, Request,
};
use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::integrity::Integrity;
use lm_protocol::manifest::DIGEST_LEN;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{AnnounceEntry, EagerAcknowledgement, HEADER_LEN, LmHeader, TYPE_WINDOWS};

use crate::sim_tests::bed::{IPS, PORT, lm_packet, noise, sender_id};
use crate::sim_tests::transfer::Dice;
use crate::simnic;

/// Ethernet, IPv4 and UDP headers.
const UDP_HEADERS_LEN: usize = 42;
/// Headers of a packet of the `lm` wire.
const HEADERS_LEN: usize = UDP_HEADERS_LEN + HEADER_LEN;
/// Where decisions come from: a seed, or the bytes that a fuzzer made up.
pub(super) enum Choices {
    Seeded(Dice),
    Taped { tape: Vec<u8>, at: usize },
}

impl Choices {
    pub(super) fn seeded(seed: u64) -> Choices {
        Choices::Seeded(Dice(seed | 1))
    }

    /// A number below `sides`; behind the end of a tape always 0.
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        match self {
            Choices::Seeded(dice) => dice.roll(sides),
            Choices::Taped { tape, at } => {
                let len = match sides {
                    0..=0x100 => 1,
                    0x101..=0x1_0000 => 2,
                    _ => 8,
                };
                let taken = tape.get(*at..*at + len).unwrap_or_default();
                *at += len;
                taken
                    .iter()
                    .fold(0, |number, &byte| number << 8 | u64::from(byte))
                    % sides
            }
        }
    }

    pub(super) fn are_over(&self) -> bool {
        match self {
            Choices::Seeded(_) => false,
            Choices::Taped { tape, at } => *at >= tape.len(),
        }
    }

    /// The tag of an honest message. A fuzzer must not be able to write it on a forged one: that would prove nothing.
    pub(super) fn tag(&mut self, messages_before: usize) -> u64 {
        match self {
            Choices::Seeded(dice) => dice.roll(u64::MAX),
            Choices::Taped { .. } => {
                let bytes = noise(0x7a67_0000 ^ messages_before as u64, 8);
                u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
            }
        }
    }

    /// Steps in which time passes after the siege: a fuzzer has none to lose.
    pub(super) fn step(&self) -> Duration {
        match self {
            Choices::Seeded(_) => Duration::from_micros(300),
            Choices::Taped { .. } => Duration::from_millis(5),
        }
    }
}

/// A number that breaks things if any does.
pub(super) fn number(dice: &mut Choices) -> u64 {
    match dice.roll(6) {
        0 => dice.roll(4),
        1 => u64::MAX - dice.roll(3),
        2 => u64::from(u32::MAX) - dice.roll(3),
        3 => 1 << dice.roll(64),
        4 => dice.roll(2000),
        _ => dice.roll(u64::MAX),
    }
}

/// A packet to `to`, from its honest peer's address, or a stranger's.
fn packet(dice: &mut Choices, to: usize, port: u16, header: &LmHeader, payload: &[u8]) -> Vec<u8> {
    let (src_ip, src_port) = match dice.roll(6) {
        0 => (
            Ipv4Addr::from_bits(dice.roll(1 << 32) as u32),
            dice.roll(1 << 16) as u16,
        ),
        1 => (IPS[1 - to], dice.roll(1 << 16) as u16),
        _ => (IPS[1 - to], port),
    };
    let addressing = Addressing {
        src_mac: MacAddr(simnic::mac_of(src_ip)),
        dst_mac: MacAddr(simnic::mac_of(IPS[to])),
        vlan: (dice.roll(20) == 0).then_some(7),
        src_ip,
        dst_ip: IPS[to],
        src_port,
        dst_port: port,
    };
    let mut bytes = lm_packet(&addressing, header, payload);
    if dice.roll(8) == 0 {
        // The digest's, if there is one.
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    }
    bytes
}

fn window(dice: &mut Choices) -> WindowShape {
    WindowShape::new(1 << dice.roll(32)).expect("a power of two")
}

pub(super) fn wire(dice: &mut Choices) -> WireMode {
    [WireMode::Lm, WireMode::IpFrag][dice.roll(2) as usize]
}

fn layout(dice: &mut Choices) -> Layout {
    loop {
        let link = LinkShape {
            vlan_tags: dice.roll(3) as u8,
        };
        let mtu = 576 + dice.roll(9000) as u16;
        if let Ok(layout) = Layout::new(wire(dice), mtu, link) {
            return layout;
        }
    }
}

pub(super) fn grant(dice: &mut Choices) -> Grant {
    Grant {
        session_key: number(dice),
        data_port: number(dice).max(1) as u16 | 1,
        layout: layout(dice),
        landing_queue: number(dice) as u16,
        tx_queue: (dice.roll(2) == 0).then(|| dice.roll(6) as u16),
        prefix: number(dice) as u8,
        frames_per_packet: number(dice) as u8 | 1,
        fillers: number(dice) as u8,
        repeats_apart: dice.roll(2) == 0,
        landing_port: std::num::NonZeroU16::new(dice.roll(1 << 16) as u16),
        max_message_len: number(dice),
        window: window(dice),
        packet_limit: number(dice) as u32,
        lease_ms: number(dice) as u32,
        first_message: number(dice) as u32,
        lands: true,
        capabilities: u32::MAX,
    }
}

/// A control message with fields from nowhere; `key` is a real session's.
pub(super) fn control(dice: &mut Choices, key: u64) -> ControlMessage {
    let key = if dice.roll(4) == 0 { key } else { number(dice) };
    match dice.roll(6) {
        0 => ControlMessage::Grant(grant(dice)),
        1 => ControlMessage::Reject(Reject {
            reason: RejectReason::Busy,
            version: number(dice) as u8,
            retry_after_ms: number(dice) as u32,
            limit: number(dice),
        }),
        2 => ControlMessage::End(End {
            session_key: key,
            messages: number(dice) as u32,
        }),
        3 => {
            let delivered = number(dice) as u32;
            ControlMessage::Ended(Ended {
                session_key: key,
                delivered,
                heard: (delivered & 1 == 0).then_some(delivered / 2),
            })
        }
        _ => ControlMessage::Request(Request {
            sender_id: number(dice),
            data_port: if dice.roll(2) == 0 {
                PORT
            } else {
                dice.roll(u64::from(u16::MAX)) as u16 + 1
            },
            mtu: number(dice) as u16,
            wire: wire(dice),
            link: LinkShape {
                vlan_tags: dice.roll(3) as u8,
            },
            max_message_len: number(dice),
            window: window(dice),
            messages_in_flight: number(dice) as u32,
            uncompleted_max: dice.roll(2) as u32,
            capabilities: u32::MAX,
            delivery: Delivery::Reliable,
            integrity: [Integrity::None, Integrity::Manifest][dice.roll(2) as usize],
            lands: true,
        }),
    }
}

/// A control message as a packet.
pub(super) fn control_packet(
    dice: &mut Choices,
    to: usize,
    request_id: u32,
    message: &ControlMessage,
) -> Vec<u8> {
    let mut datagram = [0u8; MAX_CONTROL_LEN];
    let len = message.encode(request_id, &mut datagram);
    let (header, _) = LmHeader::decode(&datagram[..len]).expect("just encoded");
    packet(dice, to, PORT + 1, &header, &datagram[HEADER_LEN..len])
}

/// A data-path packet with fields from nowhere. Fragments never bear the real key: with it anybody can write a
/// session's messages.
pub(super) fn forged(dice: &mut Choices, to: usize, key: u64) -> Vec<u8> {
    let session_key = if dice.roll(3) > 0 { key } else { number(dice) };
    let words = [0; 4].map(|_| number(dice));
    let header = match dice.roll(7) {
        0 => LmHeader::Data {
            session_key: key ^ (1 << dice.roll(64)),
            message: words[0] as u32,
            index: words[1] as u32,
            count: words[2] as u32,
        },
        1 => LmHeader::Eager {
            sender_id: words[0],
            number: words[1] as u32,
            tag: words[2],
            digested: dice.roll(2) == 0,
            // Half of them with the real incarnation, and every other one of any at all.
            acknowledges: (words[3] & 1 == 0).then(|| EagerAcknowledgement {
                sender_id: match words[3] & 2 {
                    0 => sender_id(to, Integrity::Manifest),
                    _ => words[0],
                },
                next: words[3] as u32 >> 2,
                limit: words[1] as u32,
            }),
        },
        2 => LmHeader::EagerAck {
            // The real one's now and then.
            sender_id: if dice.roll(2) == 0 {
                sender_id(to, Integrity::Manifest)
            } else {
                words[0]
            },
            next: words[1] as u32,
            limit: words[2] as u32,
        },
        3 => LmHeader::Announce {
            session_key,
            first: words[0] as u32,
            entries: words[1] as u32,
            sent: words[1].rotate_left(9) as u32,
        },
        4 => LmHeader::Credit {
            session_key,
            packet_limit: words[0] as u32,
            delivered: words[1] as u32,
            announced: words[2] as u32,
            lands: true,
        },
        5 => LmHeader::Missing {
            session_key,
            message: words[0] as u32,
            ranges: words[1] as u32,
            manifest: dice.roll(2) == 0,
        },
        // Most are of messages that there may be, and of their first windows.
        _ if words[3] & 3 > 0 => LmHeader::Extension {
            packet_type: TYPE_WINDOWS,
            key: session_key,
            words: [words[0] as u32 & 63, words[1] as u32 & 3, words[2] as u32],
        },
        _ if words[3] & 4 > 0 => LmHeader::Extension {
            packet_type: TYPE_WINDOWS,
            key: session_key,
            words: [words[0] as u32, words[1] as u32, words[2] as u32],
        },
        _ => LmHeader::Control {
            request_id: words[0] as u32,
            kind: words[1] as u8,
        },
    };
    // Where entries are counted, half of the packets carry as many as they say.
    let (header, payload_len) = match header {
        LmHeader::Announce {
            session_key, first, ..
        } if dice.roll(2) == 0 => {
            let entries = dice.roll(60) as u32;
            let header = LmHeader::Announce {
                session_key,
                first,
                entries,
                sent: entries,
            };
            (header, entries as usize * AnnounceEntry::LEN)
        }
        LmHeader::Missing {
            session_key, message, ..
        } if dice.roll(2) == 0 => {
            let ranges = dice.roll(60) as u32;
            let header = LmHeader::Missing {
                session_key,
                message,
                ranges,
                manifest: dice.roll(2) == 0,
            };
            (header, ranges as usize * 8)
        }
        // Digests of windows, or none: a request for those of one or two.
        LmHeader::Extension {
            packet_type,
            key,
            words: [message, first, count],
        } => {
            let len = dice.roll(1449) as usize;
            let (count, len) = match count & 7 {
                0 => (count, len),
                1 | 2 => (count & 3, 0),
                count => (count, count as usize * DIGEST_LEN),
            };
            let words = [message, first, count];
            (
                LmHeader::Extension {
                    packet_type,
                    key,
                    words,
                },
                len,
            )
        }
        header => (header, dice.roll(1449) as usize),
    };
    let mut payload = noise(dice.roll(u64::MAX), payload_len);
    if let LmHeader::Announce { entries, .. } = header {
        // Without opaque bytes, or most would not be read.
        for entry in payload
            .chunks_exact_mut(AnnounceEntry::LEN)
            .take(entries as usize)
        {
            entry[18..20].fill(0);
        }
    }
    packet(dice, to, PORT, &header, &payload)
}

/// A real packet, repeated with some of its header changed; its payload stays. Behind the key of a fragment or an
/// announcement nothing is changed: that would be another one of the session, and nobody could tell.
pub(super) fn mutated(dice: &mut Choices, packet: &[u8]) -> Vec<u8> {
    let mut bytes = packet.to_vec();
    let is_fragment = bytes.get(20).is_some_and(|b| b & 0x3f != 0);
    let is_data = is_fragment || matches!(bytes.get(UDP_HEADERS_LEN), Some(&(0x21 | 0x24)));
    let end = match (is_fragment, is_data) {
        // The message begins right behind IP's header, in all but the first.
        (true, _) => UDP_HEADERS_LEN - 8,
        (_, true) => UDP_HEADERS_LEN + 12,
        _ => HEADERS_LEN,
    };
    // An IP fragment's identification and offset say which one it is.
    let fixed = if is_data { 18..22 } else { 0..0 };
    for _ in 0..dice.roll(4) {
        let at = dice.roll(end.min(bytes.len()) as u64) as usize;
        if !fixed.contains(&at) {
            bytes[at] ^= 1 << dice.roll(8);
        }
    }
    match dice.roll(6) {
        0 => bytes.truncate(dice.roll(bytes.len() as u64) as usize),
        1 => bytes.resize(bytes.len() + dice.roll(100) as usize, 0x5a),
        _ => {}
    }
    if dice.roll(2) == 0 && bytes.len() >= 34 {
        // A right checksum, so that what was changed is looked at.
        bytes[24..26].fill(0);
        let sum: u32 = bytes[14..34]
            .chunks_exact(2)
            .map(|half| u32::from(u16::from_be_bytes([half[0], half[1]])))
            .sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let checksum = !((folded + (folded >> 16)) as u16);
        bytes[24..26].copy_from_slice(&checksum.to_be_bytes());
    }
    bytes
}
