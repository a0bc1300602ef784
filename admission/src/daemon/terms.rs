//! On which terms a session is granted.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use lm_dataplane::daemon::ipc::Offer;
use lm_ebpf::SessionAdmission;
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::{LinkShape, Wire};
use lm_protocol::integrity::Integrity;
use lm_protocol::session::{Application, Permit, Refusal, Terms};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::with_digests;

use super::random_u64;

/// The receiving program's side.
pub(crate) struct Side {
    pub(crate) local: SocketAddrV4,
    pub(crate) mtu: u16,
    pub(crate) veth: bool,
    pub(crate) queue: u16,
}

pub(crate) fn terms(
    side: &Side,
    offer: &Offer,
    application: &Application<'_>,
    permit: &Permit,
    is_free: impl Fn(usize) -> bool,
) -> Result<(Terms, SessionAdmission), Refusal> {
    let request = application.request;
    let places = match request.wire {
        Wire::IpFrag => 0..1,
        Wire::Lm => 0..super::ground::PLACES,
    };
    let Some(place) = places.into_iter().find(|&place| is_free(place)) else {
        return Err(Refusal::busy(Duration::from_millis(50)));
    };
    let layout = request
        .layout_at(offer.mtu.min(side.mtu), LinkShape::IPV4)
        .map_err(|_| RejectReason::Unsupported)?;
    let max = permit.max_message_len.min(offer.max_message_len).min(layout.max_message_len());
    if request.max_message_len > max {
        return Err(Refusal::too_large(max));
    }
    let integrity = match request.wire {
        Wire::IpFrag => Integrity::None,
        Wire::Lm => request.integrity,
    };
    let window = WindowShape::new(request.window.fragments().min(offer.window_max)).unwrap_or(WindowShape::DEFAULT);
    let key = with_digests(
        SessionAdmission::key_at(random_u64(), place as u32),
        integrity.has_digests(),
    );
    let first_message = match request.wire {
        Wire::Lm => 0,
        Wire::IpFrag => random_u64() as u32,
    };
    let peer_ip: Ipv4Addr = *application.from.ip();
    let admission = SessionAdmission {
        key,
        wire: match request.wire {
            Wire::Lm => lm_ebpf::Wire::Lm,
            Wire::IpFrag => lm_ebpf::Wire::IpFrag,
        },
        peer_ip,
        peer_port: request.data_port,
        local_ip: *side.local.ip(),
        header_len: layout.header_len(),
        payload_len: layout.payload_len(),
        window_fragments: window.fragments(),
        first_message,
        active_until_ns: 0,
    };
    let terms = Terms {
        session_key: key,
        data_port: side.local.port(),
        layout,
        tx_queue_hint: side.veth.then_some(side.queue),
        prefix: 0,
        frames_per_packet: 1,
        repeats_apart: false,
        landing_port: None,
        max_message_len: request.max_message_len,
        window,
        packet_limit: 0,
        first_message,
    };
    Ok((terms, admission))
}
