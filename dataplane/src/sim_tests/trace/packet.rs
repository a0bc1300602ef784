//! A packet as a line of a trace: what it says, and not how. What another version of the wire may say otherwise is left out: the version,
//! lengths, checksums and the digest of a whole packet (only whether it is right), and what a peer keeps uncompleted, the transmit queue of
//! a grant, capabilities, and of an announced message all but its length, its tag and what of it is not released.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};

use lm_protocol::control::{Challenge, ControlMessage, End, Ended, Grant, Proof, Reject, Request};
use lm_protocol::wire::lm::{
    AnnounceEntry, EagerAcknowledgement, LmHeader, LmPacket, MessageDigest, parse_packet,
};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// Ethernet, IPv4 without options, UDP.
const HEADERS_LEN: usize = 42;

/// Writes the packet that host `from` sends at a time, to a receive queue or put together from IP fragments.
pub(super) fn write(line: &mut String, (now_ns, from, queue): (u64, usize, Option<u32>), packet: &[u8]) {
    let _ = write!(line, "{now_ns} {from} ");
    let _ = match queue {
        Some(queue) => write!(line, "{queue} "),
        None => write!(line, "- "),
    };
    if write_lm(line, packet).is_none() {
        let _ = write!(line, "other {} {:x}", packet.len(), xxh3_64(packet));
    }
}

/// An LM packet; `None`, and nothing written, where it is none.
fn write_lm(line: &mut String, packet: &[u8]) -> Option<()> {
    let (headers, datagram) = packet.split_first_chunk::<HEADERS_LEN>()?;
    let is_fragment = u16::from_be_bytes([headers[20], headers[21]]) & 0x3fff != 0;
    if headers[12..15] != [0x08, 0x00, 0x45] || headers[23] != 17 || is_fragment {
        return None;
    }
    let lm = parse_packet(datagram).ok()?;
    let source = Ipv4Addr::new(headers[26], headers[27], headers[28], headers[29]);
    let source = SocketAddrV4::new(source, u16::from_be_bytes([headers[34], headers[35]]));
    let control = match lm.header {
        LmHeader::Control { .. } => Some(ControlMessage::parse(datagram).ok()?),
        _ => None,
    };
    // Addresses, ports, and what IP says of the way; no lengths, no checksums.
    let mut way = *headers;
    for left_out in [16..18, 24..26, 38..42] {
        way[left_out].fill(0);
    }
    let _ = write!(line, "{:x} ", xxh3_64(&way));
    match control {
        Some((request_id, message)) => write_control(line, request_id, &message),
        None => write_header(line, &lm.header),
    }
    if control.is_none() {
        let intact = if lm.is_intact(source) { "" } else { " broken" };
        let (len, digest) = measured(&lm);
        let _ = write!(line, " {len} {digest:x}{intact}");
    }
    Some(())
}

/// Length and hash of a payload, of an announced message's entry only its length and tag. Nothing is allocated.
fn measured(packet: &LmPacket<'_>) -> (usize, u64) {
    let LmHeader::Announce { entries, .. } = packet.header else {
        return (packet.payload.len(), xxh3_64(packet.payload));
    };
    let (mut len, mut hash) = (0, Xxh3Default::new());
    let mut add = |bytes: &[u8]| {
        len += bytes.len();
        hash.update(bytes);
    };
    for entry in AnnounceEntry::iter(packet.payload, entries) {
        add(&entry.len.to_be_bytes());
        add(&entry.tag.to_be_bytes());
        if entry.windows_released != AnnounceEntry::ALL_WINDOWS {
            add(&entry.windows_released.to_be_bytes());
        }
    }
    for digest in MessageDigest::iter(packet.payload, entries) {
        add(&digest.encode());
    }
    (len, hash.digest())
}

fn write_header(line: &mut String, header: &LmHeader) {
    let _ = match *header {
        LmHeader::Data {
            session_key,
            message,
            index,
            count,
        } => write!(line, "data {session_key:x} {message} {index} {count}"),
        LmHeader::Eager {
            sender_id,
            number,
            tag,
            digested,
            acknowledges,
        } => {
            let _ = write!(line, "eager {sender_id:x} {number} {tag:x} {digested}");
            match acknowledges {
                Some(EagerAcknowledgement {
                    sender_id,
                    next,
                    limit,
                }) => write!(line, " {sender_id:x} {next} {limit}"),
                None => Ok(()),
            }
        }
        LmHeader::EagerAck {
            sender_id,
            next,
            limit,
        } => write!(line, "ack {sender_id:x} {next} {limit}"),
        LmHeader::Announce {
            session_key,
            first,
            entries,
            sent,
        } => write!(line, "announce {session_key:x} {first} {entries} {sent}"),
        LmHeader::Credit {
            session_key,
            packet_limit,
            delivered,
            announced,
            lands,
        } => write!(
            line,
            "credit {session_key:x} {packet_limit} {delivered} {announced} {lands}"
        ),
        LmHeader::Missing {
            session_key,
            message,
            ranges,
            manifest,
        } => write!(line, "missing {session_key:x} {message} {ranges} {manifest}"),
        LmHeader::Manifest {
            session_key,
            message,
            first,
            count,
        } => write!(line, "manifest {session_key:x} {message} {first} {count}"),
        LmHeader::Extension {
            packet_type,
            key,
            words: [a, b, c],
        } => write!(line, "type {packet_type} {key:x} {a} {b} {c}"),
        LmHeader::Control { .. } => unreachable!("written with its message"),
        _ => unreachable!("a header that is not known here"),
    };
}

fn write_control(line: &mut String, request_id: u32, message: &ControlMessage) {
    let _ = write!(line, "control {request_id:x} ");
    let _ = match *message {
        ControlMessage::Request(Request {
            sender_id,
            data_port,
            mtu,
            wire,
            link,
            max_message_len,
            window,
            messages_in_flight,
            uncompleted_max: _,
            capabilities: _,
            delivery,
            integrity,
            lands,
        }) => write!(
            line,
            "request {sender_id:x} {data_port} {mtu} {} {} 4 {max_message_len} {} {messages_in_flight} {} {} {lands}",
            wire.to_u8(),
            link.vlan_tags,
            window.fragments(),
            delivery.to_u8(),
            integrity.has_digests(),
        ),
        ControlMessage::Grant(Grant {
            session_key,
            data_port,
            layout,
            landing_queue,
            tx_queue: _,
            prefix,
            frames_per_packet,
            fillers: _,
            repeats_apart,
            landing_port,
            max_message_len,
            window,
            packet_limit,
            lease_ms,
            first_message,
            lands,
            capabilities: _,
        }) => write!(
            line,
            "grant {session_key:x} {data_port} {} {} {} {landing_queue} {prefix} {frames_per_packet} {repeats_apart} \
             {} {max_message_len} {} {packet_limit} {lease_ms} {first_message} {lands}",
            layout.wire().to_u8(),
            layout.header_len(),
            layout.payload_len(),
            landing_port.map_or(0, u16::from),
            window.fragments(),
        ),
        ControlMessage::Reject(Reject {
            reason,
            version: _,
            retry_after_ms,
            limit,
        }) => write!(line, "reject {} {retry_after_ms} {limit}", reason as u8),
        ControlMessage::End(End {
            session_key,
            messages,
        }) => write!(line, "end {session_key:x} {messages}"),
        ControlMessage::Ended(Ended {
            session_key,
            delivered,
            heard,
        }) => {
            let heard = heard.map(|heard| format!(" of {heard}")).unwrap_or_default();
            write!(line, "ended {session_key:x} {delivered}{heard}")
        }
        ControlMessage::Challenge(Challenge {
            sender_id,
            cookie,
            challenger_id,
            ask,
            uncompleted_max: _,
        }) => write!(
            line,
            "challenge {sender_id:x} {cookie:x} {challenger_id:x} {}",
            ask as u8
        ),
        ControlMessage::Proof(Proof {
            sender_id,
            cookie,
            data_port,
            uncompleted_max: _,
            word,
        }) => write!(
            line,
            "proof {sender_id:x} {cookie:x} {data_port} {:x}",
            u128::from_be_bytes(word)
        ),
        _ => unreachable!("a message that is not known here"),
    };
}

mod tests {
    use super::*;
    use crate::sim_tests::bed::{Bed, BedConfig, data_address, lm_packet};
    use lm_protocol::control::MAX_CONTROL_LEN;
    use lm_protocol::geometry::{Layout, LinkShape, Wire};
    use lm_protocol::window::WindowShape;

    fn line(packet: &[u8]) -> String {
        let mut line = String::new();
        write(&mut line, (0, 0, Some(0)), packet);
        line
    }

    fn eager(tag: u64) -> Vec<u8> {
        let bed = Bed::new(&BedConfig::default());
        let addressing = bed.hosts[0].addressing_to(data_address(1), [2; 6]);
        let header = LmHeader::Eager {
            sender_id: 1,
            number: 2,
            tag,
            digested: true,
            acknowledges: None,
        };
        lm_packet(&addressing, &header, b"payload")
    }

    fn grant(tx_queue: Option<u16>, prefix: u8) -> Vec<u8> {
        let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).expect("a legal MTU");
        let message = ControlMessage::Grant(Grant {
            session_key: 3,
            data_port: 7168,
            layout,
            landing_queue: 1,
            tx_queue,
            prefix,
            frames_per_packet: 1,
            fillers: 0,
            repeats_apart: false,
            landing_port: None,
            max_message_len: 100_000,
            window: WindowShape::DEFAULT,
            packet_limit: 64,
            lease_ms: 1000,
            first_message: 0,
            lands: true,
            capabilities: 0,
        });
        control(&message)
    }

    fn proof(uncompleted_max: u32, cookie: u64) -> Vec<u8> {
        control(&ControlMessage::Proof(Proof {
            sender_id: 1,
            cookie,
            data_port: 7168,
            uncompleted_max,
            word: [0; 16],
        }))
    }

    /// A datagram as the kernel sends it.
    fn control(message: &ControlMessage) -> Vec<u8> {
        let mut datagram = [0; MAX_CONTROL_LEN];
        let len = message.encode(5, &mut datagram);
        let mut packet = eager(0)[..HEADERS_LEN].to_vec();
        packet.extend_from_slice(&datagram[..len]);
        packet
    }

    #[test]
    fn what_is_left_out_does_not_show() {
        assert_ne!(proof(0, 1), proof(192, 1));
        assert_eq!(line(&proof(0, 1)), line(&proof(192, 1)));
        assert_ne!(grant(None, 0), grant(Some(7), 0));
        assert_eq!(line(&grant(None, 0)), line(&grant(Some(7), 0)));
        assert_ne!(line(&eager(1)), line(&eager(2)));
        assert_ne!(line(&proof(0, 1)), line(&proof(0, 2)));
        assert_ne!(line(&grant(None, 0)), line(&grant(None, 1)));
    }

    /// Each bit but those of IP's and UDP's lengths and checksums, and of flags, of which most mean nothing.
    #[test]
    fn every_other_bit_shows() {
        let packet = eager(1);
        let usual = line(&packet);
        assert!(usual.contains("eager") && !usual.contains("broken"), "{usual}");
        const FLAGS: usize = HEADERS_LEN + 1;
        let left_out = |at: usize| matches!(at, 16..18 | 24..26 | 38..42) || at == FLAGS;
        for bit in (0..8 * packet.len()).filter(|bit| !left_out(bit / 8)) {
            let mut changed = packet.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(line(&changed), usual, "byte {}", bit / 8);
        }
    }
}
