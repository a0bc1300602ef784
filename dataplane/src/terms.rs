//! On which terms a session lands: one computation for an endpoint that grants for itself and for a daemon that does it for
//! programs. Who may send, and whether there is a place, is decided elsewhere.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;

use lm_protocol::control::{RejectReason, Request};
use lm_protocol::geometry::{Layout, LinkShape, Wire};
use lm_protocol::integrity::Integrity;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::session::{Refusal, Terms};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::with_digests;
use lm_protocol::zone::{XDP_PACKET_HEADROOM, ZoneShape, frames_of};

use crate::bounds::LANDING_RING_LEN;
use crate::daemon::ipc::Offer;
use crate::landing::reach;
use crate::mutants::mutant;

/// Longest window of a session, in fragments: entries of several are posted together.
pub(crate) const WINDOW_FRAGMENTS_MAX: u32 = LANDING_RING_LEN / 4;

/// What a landing queue and its program bring to the terms of a session.
#[derive(Clone, Copy, Debug)]
pub struct LandingTerms {
    /// The receiver's address and data port.
    pub local: SocketAddrV4,
    /// MTU, in bytes.
    pub mtu: u16,
    /// What is before the IP packet.
    pub link: LinkShape,
    /// Length of a chunk in bytes.
    pub chunk_len: u32,
    /// Longest message, in bytes.
    pub max_message_len: u64,
    /// Shortest and longest window, in fragments, powers of two.
    pub window_fragments: (u32, u32),
    /// The sender's transmit queue that leads to the landing queue, if known.
    pub tx_queue: Option<u16>,
    /// The device writes packets into the zones itself, and so many bytes before each.
    pub zero_copy: bool,
    /// Bytes that the driver writes before a packet.
    pub prefix: u8,
    /// In zero-copy mode: IP fragments may land.
    pub exclusive: bool,
    /// Messages may land that were not announced.
    pub goes_ahead: bool,
}

/// What a request comes to, before it is known whether there is place and memory for it.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    /// Wire, header and payload length, link.
    pub layout: Layout,
    /// Bytes of a landing zone for its longest message.
    pub zone_len: u64,
    /// The session's.
    pub integrity: Integrity,
    /// The session's.
    pub window: WindowShape,
}

impl LandingTerms {
    /// What a program offers to the daemon of its host, in copy mode. `is_steered`: a sender's queue selects the
    /// receiver's, as on veth.
    pub fn of_offer(offer: &Offer, local: SocketAddrV4, is_steered: bool) -> LandingTerms {
        LandingTerms {
            local,
            mtu: offer.mtu,
            link: LinkShape::IPV4,
            chunk_len: offer.chunk_len,
            max_message_len: offer.max_message_len,
            window_fragments: (1, offer.window_max.clamp(1, WINDOW_FRAGMENTS_MAX)),
            tx_queue: is_steered.then_some(offer.queue),
            zero_copy: false,
            prefix: 0,
            exclusive: false,
            goes_ahead: true,
        }
    }

    /// Whether a request can be met at all.
    ///
    /// # Errors
    /// The [`Refusal`] that its sender gets; asking again does not help.
    pub fn fit(&self, request: &Request) -> Result<Fit, Refusal> {
        // The paper's wire is without, where the gate can read headers.
        let integrity = match request.wire {
            Wire::IpFrag if !self.zero_copy => Integrity::None,
            Wire::Lm | Wire::IpFrag => request.integrity,
        };
        if self.zero_copy {
            let may_land = request.wire == Wire::Lm || self.exclusive;
            if !may_land || !request.integrity.has_digests() {
                return Err(RejectReason::Unverified.into());
            }
        }
        let layout = request
            .layout_at(self.mtu, self.link)
            .map_err(|_| RejectReason::Unsupported)?;
        if layout.payload_len() < crate::fragment_digests::PAYLOAD_LEN_MIN {
            return Err(RejectReason::Unsupported.into());
        }
        let max_message_len = self.max_message_len.min(layout.max_message_len());
        if request.max_message_len > max_message_len {
            return Err(Refusal::too_large(max_message_len));
        }
        let largest = layout
            .session_message(request.max_message_len)
            .map_err(|_| RejectReason::Unsupported)?;
        // Entries of several windows are submitted together; the lowest of each waits for the window before it (I5).
        let (shortest, longest) = self.window_fragments;
        let window = request.window.fragments().max(shortest).min(longest);
        Ok(Fit {
            layout,
            zone_len: ZoneShape::new(&largest, self.chunk_len, self.prefix).total_len(),
            integrity,
            window: WindowShape::new(window).unwrap_or(WindowShape::DEFAULT),
        })
    }

    /// The terms of a session at `place` of the landing queue, with a key that is never used again, for the sender whose data
    /// address is `from`; its fragments have another source port, if `landing_port` says so. `random` gives 64 bits a call
    /// that nobody guesses.
    pub fn grant(
        &self,
        fit: &Fit,
        request: &Request,
        from: SocketAddrV4,
        row: u16,
        landing_port: Option<NonZeroU16>,
        mut random: impl FnMut() -> u64,
    ) -> (Terms, SessionAdmission) {
        // The gate finds the session by four bits of its key.
        let key = SessionAdmission::key_at(random(), u32::from(row));
        let key = with_digests(key, fit.integrity.has_digests());
        let first_message = match request.wire {
            Wire::Lm => 0,
            // IP fragments carry no key, only the number's low half: a late packet of an earlier session must not
            // pass for one of this.
            Wire::IpFrag => random() as u32,
        };
        let terms = Terms {
            session_key: key,
            data_port: self.local.port(),
            layout: fit.layout,
            tx_queue: self.tx_queue,
            prefix: self.prefix,
            frames_per_packet: frames_of(fit.layout.max_frame_len(), self.chunk_len - XDP_PACKET_HEADROOM)
                as u8,
            fillers: match self.zero_copy && !mutant!(NoFillers) {
                true => reach(self.chunk_len, &fit.layout) as u8,
                false => 0,
            },
            repeats_apart: self.zero_copy,
            goes_ahead: self.goes_ahead,
            landing_port,
            max_message_len: request.max_message_len,
            window: fit.window,
            packet_limit: 0,
            first_message,
        };
        let admission = self.admission(&terms, from);
        (terms, admission)
    }

    /// What the gate has to know of a session on these terms.
    pub fn admission(&self, terms: &Terms, from: SocketAddrV4) -> SessionAdmission {
        SessionAdmission {
            key: terms.session_key,
            wire: terms.layout.wire(),
            peer_ip: *from.ip(),
            peer_port: terms.landing_port.map_or(from.port(), NonZeroU16::get),
            local_ip: *self.local.ip(),
            header_len: terms.layout.header_len(),
            payload_len: terms.layout.payload_len(),
            window_fragments: terms.window.fragments(),
            first_message: terms.first_message,
            active_until_ns: 0,
        }
    }
}
