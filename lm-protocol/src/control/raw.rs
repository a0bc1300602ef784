//! What control messages are on the wire, field by field.

use super::{
    ANY_QUEUE, Ask, Challenge, ControlError, DELIVERY_SHIFT, FLAG_INTEGRITY, FLAG_ONE_COPY, Grant,
    MAX_CONTROL_LEN, Proof, Reject, RejectReason, Request, WORD_LEN,
};
use crate::delivery::Delivery;
use crate::geometry::{Layout, LinkShape, Wire};
use crate::integrity::Integrity;
use crate::window::WindowShape;
use core::num::NonZeroU16;
use zerocopy::byteorder::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawRequest {
    sender_id: U64,
    data_port: U16,
    mtu: U16,
    wire: u8,
    family: u8,
    vlan_tags: u8,
    flags: u8,
    max_message_len: U64,
    window_fragments: U32,
    messages_in_flight: U32,
    uncompleted_max: U32,
    capabilities: U32,
}

/// [`Grant::repeats_apart`] among a grant's flags.
pub(super) const REPEATS_APART: u8 = 1;
/// [`Grant::lands`] among a grant's flags.
pub(super) const LANDS: u8 = 2;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawGrant {
    session_key: U64,
    data_port: U16,
    header_len: U16,
    payload_len: U16,
    landing_queue: U16,
    tx_queue: U16,
    wire: u8,
    family: u8,
    prefix: u8,
    vlan_tags: u8,
    frames_per_packet: u8,
    flags: u8,
    max_message_len: U64,
    window_fragments: U32,
    packet_limit: U32,
    lease_ms: U32,
    first_message: U32,
    landing_port: U16,
    reserved: U16,
    capabilities: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawReject {
    reason: u8,
    version: u8,
    reserved: U16,
    retry_after_ms: U32,
    limit: U64,
}

/// LM_ENDME and LM_ENDME_OK.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawEnd {
    pub(super) session_key: U64,
    pub(super) messages: U32,
    /// Of LM_ENDME: reserved.
    pub(super) heard: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawChallenge {
    sender_id: U64,
    cookie: U64,
    challenger_id: U64,
    ask: u8,
    reserved: [u8; 3],
    uncompleted_max: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawProof {
    sender_id: U64,
    cookie: U64,
    data_port: U16,
    reserved: U16,
    uncompleted_max: U32,
    word: [u8; WORD_LEN],
}

const _: () = assert!(size_of::<RawChallenge>() == 32);
const _: () = assert!(size_of::<RawProof>() == 40);
const _: () = assert!(size_of::<RawRequest>() == 40);
const _: () = assert!(core::mem::offset_of!(RawRequest, max_message_len) == 16);
const _: () = assert!(size_of::<RawGrant>() == 56);
const _: () = assert!(core::mem::offset_of!(RawGrant, max_message_len) == 24);
const _: () = assert!(size_of::<RawReject>() == 16);
const _: () = assert!(size_of::<RawEnd>() == 16);
const _: () = assert!(MAX_CONTROL_LEN == 80);

fn parse_wire(byte: u8) -> Result<Wire, ControlError> {
    Wire::from_u8(byte).ok_or(ControlError::Field("wire"))
}

/// The address family of requests and grants.
const IPV4: u8 = 4;

fn parse_link(family: u8, vlan_tags: u8) -> Result<LinkShape, ControlError> {
    if family != IPV4 {
        return Err(ControlError::Field("address family"));
    }
    if vlan_tags > 2 {
        return Err(ControlError::Field("number of VLAN tags"));
    }
    Ok(LinkShape { vlan_tags })
}

fn parse_port(port: U16) -> Result<u16, ControlError> {
    match port.get() {
        0 => Err(ControlError::Field("data port")),
        port => Ok(port),
    }
}

impl From<Request> for RawRequest {
    fn from(request: Request) -> RawRequest {
        RawRequest {
            sender_id: U64::new(request.sender_id),
            data_port: U16::new(request.data_port),
            mtu: U16::new(request.mtu),
            wire: request.wire.to_u8(),
            family: IPV4,
            vlan_tags: request.link.vlan_tags,
            flags: (request.delivery.to_u8() << DELIVERY_SHIFT)
                | (u8::from(request.integrity.has_digests()) * FLAG_INTEGRITY)
                | (u8::from(!request.lands) * FLAG_ONE_COPY),
            max_message_len: U64::new(request.max_message_len),
            window_fragments: U32::new(request.window.fragments()),
            messages_in_flight: U32::new(request.messages_in_flight),
            uncompleted_max: U32::new(request.uncompleted_max),
            capabilities: U32::new(request.capabilities),
        }
    }
}

impl TryFrom<RawRequest> for Request {
    type Error = ControlError;

    fn try_from(raw: RawRequest) -> Result<Request, ControlError> {
        Ok(Request {
            sender_id: raw.sender_id.get(),
            data_port: parse_port(raw.data_port)?,
            mtu: raw.mtu.get(),
            wire: parse_wire(raw.wire)?,
            link: parse_link(raw.family, raw.vlan_tags)?,
            max_message_len: raw.max_message_len.get(),
            window: WindowShape::new(raw.window_fragments.get()).map_err(ControlError::Window)?,
            messages_in_flight: raw.messages_in_flight.get(),
            uncompleted_max: raw.uncompleted_max.get(),
            capabilities: raw.capabilities.get(),
            delivery: Delivery::from_u8((raw.flags >> DELIVERY_SHIFT) & 3)
                .ok_or(ControlError::Field("delivery"))?,
            integrity: match raw.flags & FLAG_INTEGRITY != 0 {
                true => Integrity::Manifest,
                false => Integrity::None,
            },
            lands: raw.flags & FLAG_ONE_COPY == 0,
        })
    }
}

impl From<Grant> for RawGrant {
    fn from(grant: Grant) -> RawGrant {
        RawGrant {
            session_key: U64::new(grant.session_key),
            data_port: U16::new(grant.data_port),
            header_len: U16::new(grant.layout.header_len()),
            payload_len: U16::new(grant.layout.payload_len()),
            landing_queue: U16::new(grant.landing_queue),
            tx_queue: U16::new(grant.tx_queue.unwrap_or(ANY_QUEUE)),
            wire: grant.layout.wire().to_u8(),
            family: IPV4,
            prefix: grant.prefix,
            vlan_tags: grant.layout.link().vlan_tags,
            frames_per_packet: grant.frames_per_packet,
            flags: (u8::from(grant.repeats_apart) * REPEATS_APART) | (u8::from(grant.lands) * LANDS),
            max_message_len: U64::new(grant.max_message_len),
            window_fragments: U32::new(grant.window.fragments()),
            packet_limit: U32::new(grant.packet_limit),
            lease_ms: U32::new(grant.lease_ms),
            first_message: U32::new(grant.first_message),
            landing_port: U16::new(grant.landing_port.map_or(0, NonZeroU16::get)),
            reserved: U16::ZERO,
            capabilities: U32::new(grant.capabilities),
        }
    }
}

impl TryFrom<RawGrant> for Grant {
    type Error = ControlError;

    fn try_from(raw: RawGrant) -> Result<Grant, ControlError> {
        let wire = parse_wire(raw.wire)?;
        let link = parse_link(raw.family, raw.vlan_tags)?;
        let layout = Layout::from_parts(wire, raw.header_len.get(), raw.payload_len.get(), link)
            .map_err(ControlError::Layout)?;
        if raw.frames_per_packet == 0 {
            return Err(ControlError::Field("frames per packet"));
        }
        let tx_queue = raw.tx_queue.get();
        Ok(Grant {
            session_key: raw.session_key.get(),
            data_port: parse_port(raw.data_port)?,
            layout,
            landing_queue: raw.landing_queue.get(),
            tx_queue: (tx_queue != ANY_QUEUE).then_some(tx_queue),
            prefix: raw.prefix,
            frames_per_packet: raw.frames_per_packet,
            repeats_apart: raw.flags & REPEATS_APART != 0,
            landing_port: NonZeroU16::new(raw.landing_port.get()),
            max_message_len: raw.max_message_len.get(),
            window: WindowShape::new(raw.window_fragments.get()).map_err(ControlError::Window)?,
            packet_limit: raw.packet_limit.get(),
            lease_ms: raw.lease_ms.get(),
            first_message: raw.first_message.get(),
            lands: raw.flags & LANDS != 0,
            capabilities: raw.capabilities.get(),
        })
    }
}

impl From<Reject> for RawReject {
    fn from(reject: Reject) -> RawReject {
        RawReject {
            reason: reject.reason as u8,
            version: reject.version,
            reserved: U16::ZERO,
            retry_after_ms: U32::new(reject.retry_after_ms),
            limit: U64::new(reject.limit),
        }
    }
}

impl TryFrom<RawReject> for Reject {
    type Error = ControlError;

    fn try_from(raw: RawReject) -> Result<Reject, ControlError> {
        Ok(Reject {
            reason: RejectReason::from_u8(raw.reason).ok_or(ControlError::Field("reject reason"))?,
            version: raw.version,
            retry_after_ms: raw.retry_after_ms.get(),
            limit: raw.limit.get(),
        })
    }
}

impl From<Challenge> for RawChallenge {
    fn from(challenge: Challenge) -> RawChallenge {
        RawChallenge {
            sender_id: U64::new(challenge.sender_id),
            cookie: U64::new(challenge.cookie),
            challenger_id: U64::new(challenge.challenger_id),
            ask: challenge.ask as u8,
            reserved: [0; 3],
            uncompleted_max: U32::new(challenge.uncompleted_max),
        }
    }
}

impl TryFrom<RawChallenge> for Challenge {
    type Error = ControlError;

    fn try_from(raw: RawChallenge) -> Result<Challenge, ControlError> {
        Ok(Challenge {
            sender_id: raw.sender_id.get(),
            cookie: raw.cookie.get(),
            challenger_id: raw.challenger_id.get(),
            ask: match raw.ask {
                0 => Ask::Cookie,
                1 => Ask::Word,
                2 => Ask::Silence,
                _ => return Err(ControlError::Field("wish in a challenge")),
            },
            uncompleted_max: raw.uncompleted_max.get(),
        })
    }
}

impl From<Proof> for RawProof {
    fn from(proof: Proof) -> RawProof {
        RawProof {
            sender_id: U64::new(proof.sender_id),
            cookie: U64::new(proof.cookie),
            data_port: U16::new(proof.data_port),
            reserved: U16::ZERO,
            uncompleted_max: U32::new(proof.uncompleted_max),
            word: proof.word,
        }
    }
}

impl TryFrom<RawProof> for Proof {
    type Error = ControlError;

    fn try_from(raw: RawProof) -> Result<Proof, ControlError> {
        Ok(Proof {
            sender_id: raw.sender_id.get(),
            cookie: raw.cookie.get(),
            data_port: parse_port(raw.data_port)?,
            uncompleted_max: raw.uncompleted_max.get(),
            word: raw.word,
        })
    }
}
