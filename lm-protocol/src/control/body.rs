//! The bodies of control messages: their fields one behind the other, in network byte order.

use super::{
    ANY_QUEUE, Ask, Challenge, ControlError, DELIVERY_SHIFT, End, Ended, FLAG_INTEGRITY, FLAG_ONE_COPY,
    Grant, MAX_CONTROL_LEN, Proof, Reject, RejectReason, Request,
};
use crate::delivery::Delivery;
use crate::geometry::{Layout, LinkShape, Wire};
use crate::integrity::Integrity;
use crate::window::WindowShape;
use crate::wire::lm::{self, LmHeader};
use core::num::NonZeroU16;

/// Bytes of a grant, the longest body.
pub(super) const GRANT_LEN: usize = 56;
/// [`Grant::repeats_apart`] among a grant's flags.
const REPEATS_APART: u8 = 1;
/// [`Grant::lands`] among a grant's flags.
const LANDS: u8 = 2;
/// The address family of requests and grants.
const IPV4: u8 = 4;

const _: () = assert!(MAX_CONTROL_LEN == 80);

/// A control packet that is written.
pub(crate) struct Writer<'a> {
    out: &'a mut [u8; MAX_CONTROL_LEN],
    len: usize,
}

impl Writer<'_> {
    pub(crate) fn new(out: &mut [u8; MAX_CONTROL_LEN]) -> Writer<'_> {
        let len = lm::HEADER_LEN;
        Writer { out, len }
    }

    /// Writes the next field.
    pub(crate) fn put<const N: usize>(mut self, field: [u8; N]) -> Self {
        self.out[self.len..self.len + N].copy_from_slice(&field);
        self.len += N;
        self
    }

    /// Writes the header; gives the packet's length.
    pub(crate) fn finish(self, request_id: u32, kind: u8) -> usize {
        let header = LmHeader::Control { request_id, kind };
        let body_len = (self.len - lm::HEADER_LEN) as u16;
        self.out[..lm::HEADER_LEN].copy_from_slice(&header.encode(body_len));
        self.len
    }
}

/// The fields of a body that are not read yet.
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Of a body that must have this length.
    pub(crate) fn of(body: &'a [u8], len: usize) -> Result<Fields<'a>, ControlError> {
        match body.len() == len {
            true => Ok(Fields(body)),
            false => Err(ControlError::Length),
        }
    }

    /// Reads the next field; zeros behind the end.
    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *field
    }

    /// Passes over reserved bytes.
    pub(crate) fn skip<const N: usize>(&mut self) -> &mut Self {
        let _: [u8; N] = self.take();
        self
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_be_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }

    fn window(&mut self) -> Result<WindowShape, ControlError> {
        WindowShape::new(self.u32()).map_err(ControlError::Window)
    }
}

fn parse_wire(byte: u8) -> Result<Wire, ControlError> {
    Wire::from_u8(byte).ok_or(ControlError::Field("wire"))
}

fn parse_link(family: u8, vlan_tags: u8) -> Result<LinkShape, ControlError> {
    if family != IPV4 {
        return Err(ControlError::Field("address family"));
    }
    if vlan_tags > 2 {
        return Err(ControlError::Field("number of VLAN tags"));
    }
    Ok(LinkShape { vlan_tags })
}

fn parse_port(port: u16) -> Result<u16, ControlError> {
    match port {
        0 => Err(ControlError::Field("data port")),
        port => Ok(port),
    }
}

impl Request {
    pub(super) fn write<'a>(&self, to: Writer<'a>) -> Writer<'a> {
        let flags = (self.delivery.to_u8() << DELIVERY_SHIFT)
            | (u8::from(self.integrity.has_digests()) * FLAG_INTEGRITY)
            | (u8::from(!self.lands) * FLAG_ONE_COPY);
        to.put(self.sender_id.to_be_bytes())
            .put(self.data_port.to_be_bytes())
            .put(self.mtu.to_be_bytes())
            .put([self.wire.to_u8(), IPV4, self.link.vlan_tags, flags])
            .put(self.max_message_len.to_be_bytes())
            .put(self.window.fragments().to_be_bytes())
            .put(self.messages_in_flight.to_be_bytes())
            .put(self.uncompleted_max.to_be_bytes())
            .put(self.capabilities.to_be_bytes())
    }

    pub(super) fn read(body: &[u8]) -> Result<Request, ControlError> {
        let mut fields = Fields::of(body, 40)?;
        let (sender_id, data_port, mtu) = (fields.u64(), parse_port(fields.u16())?, fields.u16());
        let [wire, family, vlan_tags, flags] = fields.take();
        Ok(Request {
            sender_id,
            data_port,
            mtu,
            wire: parse_wire(wire)?,
            link: parse_link(family, vlan_tags)?,
            max_message_len: fields.u64(),
            window: fields.window()?,
            messages_in_flight: fields.u32(),
            uncompleted_max: fields.u32(),
            capabilities: fields.u32(),
            delivery: Delivery::from_u8((flags >> DELIVERY_SHIFT) & 3)
                .ok_or(ControlError::Field("delivery"))?,
            integrity: match flags & FLAG_INTEGRITY != 0 {
                true => Integrity::Manifest,
                false => Integrity::None,
            },
            lands: flags & FLAG_ONE_COPY == 0,
        })
    }
}

impl Grant {
    pub(super) fn write<'a>(&self, to: Writer<'a>) -> Writer<'a> {
        let (wire, tags) = (self.layout.wire().to_u8(), self.layout.link().vlan_tags);
        let flags = (u8::from(self.repeats_apart) * REPEATS_APART) | (u8::from(self.lands) * LANDS);
        to.put(self.session_key.to_be_bytes())
            .put(self.data_port.to_be_bytes())
            .put(self.layout.header_len().to_be_bytes())
            .put(self.layout.payload_len().to_be_bytes())
            .put(self.landing_queue.to_be_bytes())
            .put(self.tx_queue.unwrap_or(ANY_QUEUE).to_be_bytes())
            .put([wire, IPV4, self.prefix, tags, self.frames_per_packet, flags])
            .put(self.max_message_len.to_be_bytes())
            .put(self.window.fragments().to_be_bytes())
            .put(self.packet_limit.to_be_bytes())
            .put(self.lease_ms.to_be_bytes())
            .put(self.first_message.to_be_bytes())
            .put(self.landing_port.map_or(0, NonZeroU16::get).to_be_bytes())
            .put([self.fillers, 0])
            .put(self.capabilities.to_be_bytes())
    }

    pub(super) fn read(body: &[u8]) -> Result<Grant, ControlError> {
        let mut fields = Fields::of(body, GRANT_LEN)?;
        let (session_key, data_port) = (fields.u64(), fields.u16());
        let (header_len, payload_len) = (fields.u16(), fields.u16());
        let (landing_queue, tx_queue) = (fields.u16(), fields.u16());
        let [wire, family, prefix, vlan_tags, frames_per_packet, flags] = fields.take();
        let (wire, link) = (parse_wire(wire)?, parse_link(family, vlan_tags)?);
        let layout = Layout::from_parts(wire, header_len, payload_len, link);
        let layout = layout.map_err(ControlError::Layout)?;
        if frames_per_packet == 0 {
            return Err(ControlError::Field("frames per packet"));
        }
        Ok(Grant {
            session_key,
            data_port: parse_port(data_port)?,
            layout,
            landing_queue,
            tx_queue: (tx_queue != ANY_QUEUE).then_some(tx_queue),
            prefix,
            frames_per_packet,
            repeats_apart: flags & REPEATS_APART != 0,
            lands: flags & LANDS != 0,
            max_message_len: fields.u64(),
            window: fields.window()?,
            packet_limit: fields.u32(),
            lease_ms: fields.u32(),
            first_message: fields.u32(),
            landing_port: NonZeroU16::new(fields.u16()),
            fillers: fields.take::<2>()[0],
            capabilities: fields.u32(),
        })
    }
}

impl Reject {
    pub(super) fn write<'a>(&self, to: Writer<'a>) -> Writer<'a> {
        to.put([self.reason as u8, self.version, 0, 0])
            .put(self.retry_after_ms.to_be_bytes())
            .put(self.limit.to_be_bytes())
    }

    pub(super) fn read(body: &[u8]) -> Result<Reject, ControlError> {
        let mut fields = Fields::of(body, 16)?;
        Ok(Reject {
            reason: RejectReason::from_u8(fields.u8()).ok_or(ControlError::Field("reject reason"))?,
            version: fields.u8(),
            retry_after_ms: fields.skip::<2>().u32(),
            limit: fields.u64(),
        })
    }
}

impl End {
    pub(super) fn write<'a>(&self, to: Writer<'a>) -> Writer<'a> {
        to.put(self.session_key.to_be_bytes())
            .put(self.messages.to_be_bytes())
            .put([0; 4])
    }

    pub(super) fn read(body: &[u8]) -> Result<End, ControlError> {
        let mut fields = Fields::of(body, 16)?;
        Ok(End {
            session_key: fields.u64(),
            messages: fields.u32(),
        })
    }
}

impl Ended {
    pub(super) fn write<'a>(&self, to: Writer<'a>) -> Writer<'a> {
        to.put(self.session_key.to_be_bytes())
            .put(self.delivered.to_be_bytes())
            .put(self.heard.map_or(0, |heard| heard.wrapping_add(1)).to_be_bytes())
    }

    pub(super) fn read(body: &[u8]) -> Result<Ended, ControlError> {
        let mut fields = Fields::of(body, 16)?;
        Ok(Ended {
            session_key: fields.u64(),
            delivered: fields.u32(),
            heard: fields.u32().checked_sub(1),
        })
    }
}

impl Challenge {
    pub(super) fn write<'a>(&self, to: Writer<'a>) -> Writer<'a> {
        to.put(self.sender_id.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .put(self.challenger_id.to_be_bytes())
            .put([self.ask as u8, 0, 0, 0])
            .put(self.uncompleted_max.to_be_bytes())
    }

    pub(super) fn read(body: &[u8]) -> Result<Challenge, ControlError> {
        let mut fields = Fields::of(body, 32)?;
        Ok(Challenge {
            sender_id: fields.u64(),
            cookie: fields.u64(),
            challenger_id: fields.u64(),
            ask: match fields.u8() {
                0 => Ask::Cookie,
                1 => Ask::Word,
                2 => Ask::Silence,
                _ => return Err(ControlError::Field("wish in a challenge")),
            },
            uncompleted_max: fields.skip::<3>().u32(),
        })
    }
}

impl Proof {
    pub(super) fn write<'a>(&self, to: Writer<'a>) -> Writer<'a> {
        to.put(self.sender_id.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .put(self.data_port.to_be_bytes())
            .put([0; 2])
            .put(self.uncompleted_max.to_be_bytes())
            .put(self.word)
    }

    pub(super) fn read(body: &[u8]) -> Result<Proof, ControlError> {
        let mut fields = Fields::of(body, 40)?;
        Ok(Proof {
            sender_id: fields.u64(),
            cookie: fields.u64(),
            data_port: parse_port(fields.u16())?,
            uncompleted_max: fields.skip::<2>().u32(),
            word: fields.take(),
        })
    }
}
