//! Sessions by the one-copy path (LM §3.3: what a sender uses that was not admitted, or not yet): a message's fragments come to the
//! kernel's data socket, and each is copied to its place in contiguous memory.
//!
//! Such a session takes no place of the gate, no entry of the landing queue and no admission between hosts; it is asked for on the
//! data port. Memory for its messages comes from the landing arena.

use std::net::SocketAddrV4;

use lm_ebpf::SessionAdmission;
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;
use lm_protocol::session::{Application, Permit, Refusal, Terms};
use lm_protocol::wire::lm::with_digests;
use lm_protocol::zone::ZoneShape;

use crate::config::IN_FLIGHT_MESSAGES_MAX;
use crate::control::random_u64;
use crate::engine::Engine;
use crate::granting::{NEIGHBOUR_RETRY, Retired};
use crate::landing::{Inbound, InboundTerms};
use crate::nic::Nic;

use std::time::Duration;

/// Stands for a landing queue in the grants of such sessions.
pub(crate) const ONE_COPY_QUEUE: u16 = u16::MAX;

/// Packets that a sender may have on the way: the socket's buffer has room for those of several.
const ON_THE_WAY: u32 = 64;

impl<N: Nic> Engine<N> {
    pub(crate) fn open_one_copy(
        &mut self,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        let request = application.request;
        let Some(landing) = &self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        if request.wire != Wire::Lm {
            return Err(RejectReason::Unsupported.into());
        }
        let Some(place) = landing.sessions.free_one_copy_place() else {
            return Err(Refusal::busy(Duration::from_millis(50)));
        };
        let layout = (request.layout_at(self.fixed.mtu, self.fixed.link).ok())
            .filter(|layout| layout.payload_len() >= crate::integrity::PAYLOAD_LEN_MIN)
            .ok_or(RejectReason::Unsupported)?;
        let max_message_len = permit.max_message_len.min(layout.max_message_len());
        if request.max_message_len > max_message_len {
            return Err(Refusal::too_large(max_message_len));
        }
        let largest = layout
            .session_message(request.max_message_len)
            .map_err(|_| RejectReason::Unsupported)?;
        let zone_len = ZoneShape::new(&largest, self.fixed.chunk_len, 0).total_len();
        let from = SocketAddrV4::new(*application.from.ip(), request.data_port);
        // As for sessions that land: whoever asks may have forged its address.
        let peers = &mut self.peers;
        let is_from = |inbound: &Inbound| {
            inbound.terms.one_copy && (peers.named(inbound.terms.peer)).is_some_and(|peer| peer.data == from)
        };
        if landing.sessions.iter().any(is_from) {
            return Err(Refusal::busy(Duration::from_millis(50)));
        }
        let Some(mac) = self.nic.neighbour(*from.ip()) else {
            return Err(Refusal::busy(NEIGHBOUR_RETRY));
        };
        let messages_in_flight = request.messages_in_flight.clamp(1, IN_FLIGHT_MESSAGES_MAX);
        self.grow_landing(self.landing_len_for(zone_len, messages_in_flight))?;
        let addressing = self.addressing_to(from, mac);
        let now_ns = self.now_ns;
        let Some(index) = self.peers.find_or_add(from, &addressing, now_ns) else {
            return Err(Refusal::busy(Duration::from_millis(100)));
        };
        self.peers.at(index).addressing = addressing;
        let peer = self.peers.id_of(index);
        let key = SessionAdmission::key_at(random_u64(), u32::from(place));
        let key = with_digests(key, request.integrity.has_digests());
        let admission = SessionAdmission {
            key,
            wire: lm_ebpf::Wire::Lm,
            peer_ip: *from.ip(),
            peer_port: from.port(),
            local_ip: *self.nic.local().ip(),
            header_len: layout.header_len(),
            payload_len: layout.payload_len(),
            window_fragments: request.window.fragments(),
            first_message: 0,
            active_until_ns: 0,
        };
        let Some(landing) = &mut self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        let terms = InboundTerms {
            peer,
            key,
            layout,
            window: request.window,
            chunk_len: self.fixed.chunk_len,
            prefix: 0,
            zero_copy: false,
            first_message: 0,
            messages_in_flight,
            on_the_way: ON_THE_WAY,
            posted_max: ON_THE_WAY,
            delivery: request.delivery,
            integrity: request.integrity,
            in_order: self.config.in_order,
            max_message_len: request.max_message_len,
            registered_len: landing.registered_len,
            one_processor: false,
            one_copy: true,
            admission,
        };
        (landing.sessions).insert(Inbound::new(terms, &landing.arena, now_ns));
        self.peers.at(index).inbound += 1;
        self.counters.sessions_granted += 1;
        Ok(Terms {
            session_key: key,
            data_port: self.nic.local().port(),
            layout,
            tx_queue_hint: None,
            prefix: 0,
            frames_per_packet: 1,
            repeats_apart: false,
            landing_port: None,
            max_message_len: request.max_message_len,
            window: request.window,
            packet_limit: 0,
            first_message: 0,
        })
    }

    pub(crate) fn close_one_copy(&mut self, key: u64) -> u32 {
        let place = (self.landing.as_ref())
            .and_then(|landing| landing.sessions.with_key(key))
            .map(Inbound::place);
        let Some(Retired { delivered, zones, .. }) = place.and_then(|place| self.retire(place)) else {
            return 0;
        };
        // No entry was ever posted there.
        if let Some(landing) = &mut self.landing {
            for zone in zones {
                landing.arena.free(zone.start, zone.len);
            }
        }
        delivered
    }
}
