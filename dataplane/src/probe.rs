//! Probes: datagrams that teach a receiver's socket which NAPI instance serves a queue (see
//! [`crate::queue_poll`]).
//!
//! A receiver asks the peer that sends to it, on its data port, to send one datagram to a given port by the same
//! way as the traffic in question: the channel of its landing session, or the general channel. Both packets are
//! LM control packets, which the gate passes on; a peer that does not know them ignores them.

use std::net::SocketAddrV4;

use lm_protocol::wire::lm::LmHeader;

use crate::engine::Engine;
use crate::notices::Fault;
use crate::port::{Attend, Attended, Port};

/// Asks for a probe; the request number holds the port and, in bit 16, which way it should come.
const KIND_PROBE_ME: u8 = 0x70;
/// The probe.
const KIND_PROBE: u8 = 0x71;
/// Set for the way of landing traffic, clear for that of general traffic.
const BY_LANDING: u32 = 1 << 16;

impl<P: Port> Engine<P> {
    /// Asks for the probes that are missing and of use now, and notices those that have come. Called from the timers.
    pub(crate) fn ask_for_probes(&mut self, now_ns: u64) {
        let asks = self.looks.wants_probes(now_ns);
        if let Some(landing) = &self.landing
            && let Some(index) = landing.sessions.any_peer()
            && let Attended::Needs(port) = self.port.attend(landing.queue, Attend::Soon)
            && asks
        {
            self.ask_for_probe(index, u32::from(port) | BY_LANDING, now_ns);
        }
        if self.small.stream.is_hot()
            && let Some(index) = self.small.first_owed()
            && let Some(queue) = self.small.queue()
            && let Attended::Needs(port) = self.port.attend(queue, Attend::Soon)
            && asks
        {
            self.ask_for_probe(index, u32::from(port), now_ns);
        }
    }

    fn ask_for_probe(&mut self, index: u16, request_id: u32, now_ns: u64) {
        self.looks.asked_for_probe(now_ns);
        let header = LmHeader::Control {
            request_id,
            kind: KIND_PROBE_ME,
        };
        self.send_packet(index, &header, &[]);
    }

    /// A peer asks for a probe.
    pub(crate) fn take_probe_request(&mut self, from: SocketAddrV4, kind: u8, request_id: u32) {
        let known = self.peers.find(from);
        let (Some(index), KIND_PROBE_ME) = (known, kind) else {
            match kind {
                KIND_PROBE => self.counters.packets_used += 1,
                _ => self.reject(Fault::Unexpected, from),
            }
            return;
        };
        self.counters.packets_used += 1;
        let peer = self.peers.at(index);
        let by_landing = request_id & BY_LANDING != 0;
        let queue = match (&peer.outbound, self.sending.general_queue()) {
            (Some(outbound), _) if by_landing => outbound.terms.channel,
            (_, Some(general)) if !by_landing => general,
            // The session is over, or our small traffic goes through the kernel's socket.
            _ => return,
        };
        let mut addressing = peer.addressing;
        addressing.dst_port = request_id as u16;
        if addressing.dst_port == 0 {
            return;
        }
        let header = LmHeader::Control {
            request_id,
            kind: KIND_PROBE,
        };
        let mut packet = [0u8; 128];
        let len = addressing
            .write_headers(&mut packet, &header, 0)
            .expect("128 bytes hold any header");
        (self.sending).send_on_queue(queue, &mut self.memory, &packet[..len]);
    }
}
