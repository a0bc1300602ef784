//! Packets of others that the device brings to the landing queue, where nobody reads headers.

#![cfg(test)]

use std::net::{Ipv4Addr, SocketAddrV4};

use lm_protocol::control::{ControlMessage, End, MAX_CONTROL_LEN};
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};
use lm_protocol::wire::udp::checksum;

use super::bed::{Bed, BedConfig, IPS, PORT, lm_packet, noise, wire_of};
use crate::completion::{Outcome, PeerId};
use crate::simnic::{self, Semantics, ZeroCopy};

const LEN: usize = 200_000;
const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 77);
const LANDING: u32 = 1;

fn bed() -> Bed {
    Bed::new(&BedConfig {
        wire: wire_of(Semantics::ZeroCopy(ZeroCopy::default())),
        ..BedConfig::default()
    })
}

/// From a stranger to a port of host 1, with the checksum that kernels and cards write.
fn packet(ports: (u16, u16), header: &LmHeader, payload: &[u8]) -> Vec<u8> {
    let addressing = Addressing {
        src_mac: MacAddr(simnic::mac_of(STRANGER)),
        dst_mac: MacAddr(simnic::mac_of(IPS[1])),
        vlan: None,
        src_ip: STRANGER,
        dst_ip: IPS[1],
        src_port: ports.0,
        dst_port: ports.1,
    };
    let mut packet = lm_packet(&addressing, header, payload);
    let sum = checksum(STRANGER, IPS[1], ports.0, ports.1, [&packet[42..]]);
    packet[40..42].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// A control message to the control port.
fn control(message: &ControlMessage) -> Vec<u8> {
    let mut datagram = [0u8; MAX_CONTROL_LEN];
    let len = message.encode(7, &mut datagram);
    let (header, _) = LmHeader::decode(&datagram[..len]).expect("just encoded");
    packet((PORT + 1, PORT + 1), &header, &datagram[HEADER_LEN..len])
}

fn request() -> Vec<u8> {
    control(&super::flood::request(0x7777, SocketAddrV4::new(STRANGER, PORT)))
}

fn eager() -> Vec<u8> {
    let header = LmHeader::Eager {
        sender_id: 0x7777_0001,
        number: 0,
        tag: 1,
        digested: true,
        acknowledges: None,
    };
    packet((PORT, PORT), &header, &[0x5a; 100])
}

/// A session of whose message a part has landed, and whose sender is silent.
fn in_the_middle(bed: &mut Bed) -> PeerId {
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    bed.exchange(0, peer, &noise(1, LEN));
    bed.send(0, peer, &noise(2, LEN), 2);
    let half = bed.hosts[0].counters.data_packets_sent + 60;
    while bed.hosts[0].counters.data_packets_sent < half {
        bed.round();
    }
    bed.wire.set_filter(|from, _| from != 0);
    bed.rounds(20);
    assert!(bed.hosts[1].told.messages().count() == 0);
    peer
}

/// It goes on, and its message arrives.
fn go_on(bed: &mut Bed, peer: PeerId) {
    bed.wire.set_filter(|_, _| true);
    assert!(bed.recv(1)[..] == noise(2, LEN)[..]);
    assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    let now_ns = bed.now_ns;
    bed.hosts[0].end_session(peer.index, now_ns);
    bed.rounds(50);
    bed.check_memory();
}

/// Whoever asks for a session or sends a small message is answered, although all that it sends comes to the landing queue of another one.
#[test]
fn a_stranger_is_heard_by_the_landing_queue() {
    let mut bed = bed();
    let peer = in_the_middle(&mut bed);
    for packet in [request(), eager()] {
        let before = bed.hosts[1].counters.challenged;
        bed.wire.inject(1, LANDING, &packet);
        bed.rounds(20);
        assert_eq!(bed.hosts[1].counters.challenged, before + 1);
    }
    assert_eq!(bed.hosts[1].counters.landing_heard, 2);
    // Of one burst not more than this.
    for _ in 0..40 {
        bed.wire.inject(1, LANDING, &request());
    }
    bed.rounds(20);
    assert_eq!(bed.hosts[1].counters.landing_heard, 2 + 32);
    go_on(&mut bed, peer);
}

/// What is not whole, or not for us, is none of it.
#[test]
fn what_was_written_over_is_not_heard() {
    let mut bed = bed();
    let peer = in_the_middle(&mut bed);
    let before = bed.hosts[1].counters;
    let end = control(&ControlMessage::End(End {
        session_key: 1,
        messages: 0,
    }));
    for original in [request(), eager(), end] {
        // As many as entries are left. Ethernet's addresses are not looked at here.
        for at in (12..original.len()).step_by(7) {
            let mut packet = original.clone();
            packet[at] ^= 0x10;
            bed.wire.inject(1, LANDING, &packet);
            bed.rounds(3);
        }
    }
    let after = bed.hosts[1].counters;
    assert_eq!(after.challenged, before.challenged);
    assert_eq!(after.landing_heard, before.landing_heard);
    assert_eq!(bed.wire.counters().device_lost, 0);
    go_on(&mut bed, peer);
}
