//! Packets under any address, and answers to what comes back.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use lm_cards::Interface;
use lm_protocol::control::{ControlMessage, MAX_CONTROL_LEN, Proof, Request};
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader, Trailer};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketType, ipproto};

/// Where a receiver listens for data.
const DATA_PORT: u16 = 7168;
/// `ETH_P_IP`, in the order of the network.
const ETHERNET_IPV4: Protocol = Protocol::from_raw(std::num::NonZeroU32::new(0x0008).unwrap());

/// A raw socket that writes its own IP headers, with any source address; and one that reads every frame that is sent to this host's own MAC
/// address, whichever host it is for. The host is off the path: it reads nothing else.
pub(crate) struct Forger {
    writes: OwnedFd,
    reads: OwnedFd,
    mac: [u8; 6],
    /// By which id the last one that challenged knows itself.
    pub(crate) told: Cell<u64>,
    /// Tags and payloads of the small messages that follow a proof.
    pub(crate) script: Vec<(u64, Vec<u8>)>,
}

impl Forger {
    pub(crate) fn new(interface: &str) -> Forger {
        let socket = |family, protocol| rustix::net::socket(family, SocketType::RAW, Some(protocol));
        Forger {
            writes: socket(AddressFamily::INET, ipproto::RAW).expect("a raw socket"),
            reads: socket(AddressFamily::PACKET, ETHERNET_IPV4).expect("a packet socket"),
            mac: Interface::by_name(interface).expect("the link").mac,
            told: Cell::new(0),
            script: vec![(666, b"forged".to_vec())],
        }
    }

    /// Answers what came back as the forged host would: proves each challenge, and says what it has to say. How many challenges came.
    pub(crate) fn answer(&self) -> u64 {
        let (mut frame, mut challenges) = ([0; 2048], 0);
        while let Ok((len, _)) = rustix::net::recv(&self.reads, &mut frame, RecvFlags::DONTWAIT) {
            if len < 42 + HEADER_LEN || frame[..6] != self.mac || frame[23] != 17 {
                continue;
            }
            let address = |ip: usize, port: usize| {
                let [a, b, c, d] = [0, 1, 2, 3].map(|byte| frame[ip + byte]);
                SocketAddrV4::new(
                    Ipv4Addr::new(a, b, c, d),
                    u16::from_be_bytes([frame[port], frame[port + 1]]),
                )
            };
            let (receiver, forged, payload) = (address(26, 34), address(30, 36), &frame[42..len]);
            if let Ok((_, ControlMessage::Challenge(challenge))) = ControlMessage::parse(payload) {
                challenges += 1;
                self.told.set(challenge.challenger_id);
                let is_data = receiver.port() == DATA_PORT;
                let proof = ControlMessage::Proof(Proof {
                    sender_id: challenge.sender_id,
                    cookie: challenge.cookie,
                    data_port: forged.port() - u16::from(!is_data),
                    uncompleted_max: 0,
                    word: [0; 16],
                });
                let mut answer = encoded(&proof, 0);
                if is_data {
                    let kind = proof.kind();
                    let header = LmHeader::Control { request_id: 0, kind };
                    let trailer = Trailer::new(&header, &answer[HEADER_LEN..], forged);
                    answer.extend_from_slice(trailer.as_bytes());
                }
                self.send(forged, receiver, &answer);
                for ((tag, payload), number) in self.script.iter().zip(0..) {
                    self.send(
                        forged,
                        receiver,
                        &message(forged, challenge.sender_id, number, *tag, payload),
                    );
                }
            }
        }
        challenges
    }

    /// Sends a UDP datagram under any address. What finds a queue full is lost, like other packets.
    pub(crate) fn send(&self, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) {
        let len = 28 + payload.len();
        let mut packet = vec![0u8; 28];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        packet[6] = 0x40;
        packet[8] = 64;
        packet[9] = 17;
        packet[12..16].copy_from_slice(&from.ip().octets());
        packet[16..20].copy_from_slice(&to.ip().octets());
        packet[20..22].copy_from_slice(&from.port().to_be_bytes());
        packet[22..24].copy_from_slice(&to.port().to_be_bytes());
        packet[24..26].copy_from_slice(&((len - 20) as u16).to_be_bytes());
        packet.extend_from_slice(payload);
        // The header says to which port.
        let to = SocketAddrV4::new(*to.ip(), 0);
        match rustix::net::sendto(&self.writes, &packet, SendFlags::empty(), &to) {
            Ok(_) | Err(Errno::WOULDBLOCK | Errno::NOBUFS) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// A small message of the incarnation `sender_id`.
pub(crate) fn small_message(from: SocketAddrV4, sender_id: u64, number: u32, payload: &[u8]) -> Vec<u8> {
    message(from, sender_id, number, 666, payload)
}

/// The same with any tag.
pub(crate) fn message(from: SocketAddrV4, sender_id: u64, number: u32, tag: u64, payload: &[u8]) -> Vec<u8> {
    let header = LmHeader::Eager {
        sender_id: sender_id | 1,
        number,
        tag,
        digested: true,
        acknowledges: None,
    };
    let trailer = Trailer::new(&header, payload, from);
    let mut bytes = header.encode(payload.len() as u16).to_vec();
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(trailer.as_bytes());
    bytes
}

/// What asks for a session.
pub(crate) fn request(data_port: u16, sender_id: u64) -> Request {
    Request {
        sender_id,
        data_port,
        uncompleted_max: 192,
        ..Request::default()
    }
}

/// A control message under no key.
pub(crate) fn encoded(message: &ControlMessage, request_id: u32) -> Vec<u8> {
    let mut bytes = [0; MAX_CONTROL_LEN];
    let len = message.encode(request_id, &mut bytes);
    bytes[..len].to_vec()
}
