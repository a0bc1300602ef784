//! Packets of others on the landing queue. Where nobody reads headers the gate redirects whatever the device brings there, and the device
//! chooses by a few bits of a hash: all that a host sends which asks for a session may be among it, as long as another one's lands. (While
//! nothing is posted the device drops it.) What is short, and whole although the packets behind it may have been written over it, is taken as if it had come by the general queue or the
//! kernel's socket.

use std::net::SocketAddrV4;

use lm_protocol::wire::ethernet::{ETHERTYPE_IPV4, EthernetRepr};
use lm_protocol::wire::ipv4::{Ipv4Repr, PROTOCOL_UDP};
use lm_protocol::wire::lm::{TYPE_DATA, parse_packet};
use lm_protocol::wire::udp::{UdpRepr, checksum};

use crate::engine::{Engine, packet_start};
use crate::landing::FOREIGN_LEN_MAX;
use crate::port::Port;

/// A datagram for us.
struct Foreign<'a> {
    from: SocketAddrV4,
    port: u16,
    payload: &'a [u8],
}

impl<'a> Foreign<'a> {
    /// Reads a frame; `None`: another one was written over it, it is not for `to`'s address, or it is a fragment of a session.
    fn parse(frame: &'a [u8], to: SocketAddrV4) -> Option<Foreign<'a>> {
        let (ethernet, rest) = EthernetRepr::parse(frame).ok()?;
        if ethernet.ethertype != ETHERTYPE_IPV4 {
            return None;
        }
        let (ip, rest) = Ipv4Repr::parse(rest).ok()?;
        if ip.protocol != PROTOCOL_UDP || ip.is_fragment() || ip.dst != *to.ip() {
            return None;
        }
        let (udp, payload) = UdpRepr::parse(rest).ok()?;
        let from = SocketAddrV4::new(ip.src, udp.src_port);
        let is_whole = match udp.checksum {
            // Then its digest says so.
            0 => parse_packet(payload).is_ok_and(|packet| packet.digest.is_some() && packet.is_intact(from)),
            sum => sum == checksum(ip.src, ip.dst, udp.src_port, udp.dst_port, [payload]),
        };
        let is_fragment = payload.first().is_none_or(|first| first & 0xf == TYPE_DATA);
        (is_whole && !is_fragment).then_some(Foreign {
            from,
            port: udp.dst_port,
            payload,
        })
    }
}

impl<P: Port> Engine<P> {
    /// Takes what the last burst brought that is no fragment.
    pub(crate) fn take_foreign(&mut self, now_ns: u64) {
        let local = self.fixed.local;
        while let Some(landing) = &mut self.landing
            && let Some((start, len)) = landing.sessions.entries.next_foreign()
        {
            let mut bytes = [0u8; FOREIGN_LEN_MAX as usize];
            let frame = &mut bytes[..len as usize];
            self.memory.umem().copy_from(start, frame);
            let Some(Foreign { from, port, payload }) = Foreign::parse(frame, local) else {
                continue;
            };
            if port == local.port().wrapping_add(1) {
                self.counters.landing_heard += 1;
                self.take_control(from, payload, now_ns);
            } else if port == local.port()
                && let Some(frame) = self.small.take_frame()
            {
                self.counters.landing_heard += 1;
                let start = packet_start(frame.address());
                self.memory.umem().copy_to(start, &bytes[..len as usize]);
                self.take_packet(frame, start, len, now_ns);
            }
        }
    }
}
