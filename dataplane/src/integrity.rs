//! Integrity: digests on their way between an endpoint's two sides. What is received is checked in
//! [`crate::landing`], what is sent gets its digests in [`crate::outbound`]; here is what they say to each other.
//!
//! ```text
//!  sender                                                        receiver
//!    DATA …                                       ───────▶  digest of each fragment as it is taken
//!    ANNOUNCE with the message's digest, behind   ───────▶  equal to what came: shown
//!                                                 ◀───────  not there: MISSING, manifest, no ranges
//!    ANNOUNCE                                     ───────▶
//!                                                 ◀───────  another one: MISSING, manifest, ranges of fragments
//!    MANIFEST …                                   ───────▶  which fragments differ: missing, like lost ones
//! ```

use std::net::SocketAddrV4;

use lm_protocol::geometry::{Layout, Wire};
use lm_protocol::integrity::Integrity;
use lm_protocol::manifest::{DIGEST_LEN, MIN_PAYLOAD_LEN};
use lm_protocol::wire::lm::{LmHeader, LmPacket, MissingRange, has_digests};

use crate::engine::Engine;
use crate::notices::Fault;
use crate::port::Port;

/// MANIFEST packets to one peer in one round: they need no credit, and must not fill the general channel.
const MANIFESTS_PER_ROUND: u32 = 8;
/// Digests in one MANIFEST packet where the MTU allows so many, in bytes.
const MANIFEST_LEN_MAX: usize = 1440;
impl<P: Port> Engine<P> {
    /// Bytes of the digest behind an eager message of ours.
    pub(crate) fn eager_digest_len(&self) -> u32 {
        match self.fixed.integrity {
            Integrity::Manifest => DIGEST_LEN as u32,
            Integrity::None => 0,
        }
    }

    /// Longest message that goes in one packet, without a session, in bytes.
    pub(crate) fn eager_max_len(&self) -> u64 {
        u64::from(self.fixed.layout.payload_len()) - u64::from(self.eager_digest_len())
    }

    /// Longest message that goes to this peer in one packet, in bytes: what its interface takes is known from a session.
    pub(crate) fn eager_len_to(&mut self, index: u16) -> u64 {
        let session = self.peers.at(index).outbound.as_ref();
        match session.map(|outbound| outbound.terms.layout) {
            Some(layout) => self.eager_max_len().min(self.eager_len_in(&layout)),
            None => self.eager_max_len(),
        }
    }

    /// Longest message in one packet that is no longer than those of a session with this layout, in bytes.
    fn eager_len_in(&self, session: &Layout) -> u64 {
        let overhead = u32::from(self.fixed.layout.header_len()) + self.eager_digest_len();
        u64::from(session.max_frame_len()).saturating_sub(overhead.into())
    }

    /// What our messages have in a session with this wire and key: as IP fragments digests, where the receiver wants them.
    pub(crate) fn integrity_of(&self, wire: Wire, key: u64) -> Integrity {
        match wire {
            Wire::IpFrag if !has_digests(key) => Integrity::None,
            Wire::Lm | Wire::IpFrag => self.fixed.integrity,
        }
    }

    /// The receiver of a session of ours lacks digests: of fragments, or, where it names none, of the message.
    pub(crate) fn take_digest_request(
        &mut self,
        from: SocketAddrV4,
        key: u64,
        message: u32,
        payload: &[u8],
        now_ns: u64,
    ) {
        let found = self.peers.find(from);
        let outbound = found
            .and_then(|index| self.peers.at(index).outbound.as_mut())
            .filter(|outbound| outbound.terms.key == key && outbound.terms.integrity.has_digests());
        let Some(outbound) = outbound else {
            self.reject_for(key, Fault::Key, from);
            return;
        };
        outbound.heard_ns = now_ns;
        if payload.is_empty() {
            outbound.announce_due = true;
        } else if !outbound.digests_requested(
            &mut self.sending.outgoing,
            self.memory.umem(),
            message,
            MissingRange::iter(payload),
        ) {
            self.reject(Fault::Digests, from);
            return;
        }
        self.counters.packets_used += 1;
    }

    /// Digests of fragments that were asked for.
    pub(crate) fn take_manifest(&mut self, from: SocketAddrV4, packet: &LmPacket<'_>, now_ns: u64) {
        let LmHeader::Manifest { session_key, .. } = packet.header else {
            return;
        };
        let inbound = (self.landing.as_mut()).and_then(|landing| landing.sessions.keyed(session_key));
        let peers = &mut self.peers;
        let inbound =
            inbound.filter(|inbound| peers.named(inbound.terms.peer).map(|peer| peer.data) == Some(from));
        let Some(inbound) = inbound else {
            self.reject_for(session_key, Fault::Key, from);
            return;
        };
        match inbound.care().take_manifest(packet, now_ns) {
            Some(true) => self.counters.packets_used += 1,
            Some(false) => self.reject(Fault::Digests, from),
            // It was asked for twice, or the message is settled.
            None => self.counters.drops.late += 1,
        }
    }

    /// Stage 7: sends digests of fragments that a receiver asked for. What does not leave is asked for again.
    pub(crate) fn send_manifests(&mut self, index: u16) {
        for _ in 0..MANIFESTS_PER_ROUND {
            let Some(outbound) = &mut self.peers.at(index).outbound else {
                return;
            };
            let room = outbound.general_payload_len().min(MANIFEST_LEN_MAX);
            let Some(packet) = outbound.next_manifest(&mut self.sending.outgoing, room.max(MIN_PAYLOAD_LEN))
            else {
                return;
            };
            let mut payload = [0u8; MANIFEST_LEN_MAX];
            let len = packet.write_payload(&mut payload);
            let (header, digests) = (packet.header, packet.digests.len() as u32);
            if !self.send_packet(index, &header, &payload[..len]) {
                return;
            }
            self.counters.manifest_packets_sent += 1;
            if let Some(outbound) = &mut self.peers.at(index).outbound {
                outbound.manifest_sent(digests);
            }
        }
    }
}
