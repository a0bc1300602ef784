//! Handlers: packets of types that the engine leaves to others ([`EXTENSION_TYPES`]), from the general channel and the kernel's data
//! socket alike. What leaves of such types is a [`Flow`](crate::Flow)'s, or a reply.

use std::net::SocketAddrV4;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use lm_protocol::manifest::DIGEST_LEN;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{EXTENSION_TYPES, HEADER_LEN, LmHeader};

use crate::completion::PeerId;
use crate::frames::Frame;
use crate::message::Message;
use crate::release::{Loaned, Released};

/// Takes packets of its types. It is called while the endpoint polls, so it does not block.
pub trait Handler: Send {
    /// A packet of one of its types: intact, and from a peer that the endpoint knows.
    fn packet(&mut self, packet: Arrived<'_>, now: Time, replies: &mut Replies);

    /// When it wants to be called although nothing came; `None`: never.
    fn due(&self) -> Option<Time> {
        None
    }

    /// It is due.
    fn tick(&mut self, now: Time, replies: &mut Replies) {
        let _ = (now, replies);
    }
}

/// A packet for a handler.
#[derive(Debug)]
pub struct Arrived<'a> {
    pub(crate) from: PeerId,
    pub(crate) source: SocketAddrV4,
    pub(crate) is_proved: bool,
    pub(crate) packet_type: u8,
    pub(crate) key: u64,
    pub(crate) words: [u32; 3],
    pub(crate) payload: &'a [u8],
    /// UMEM address of the payload.
    pub(crate) address: u64,
    pub(crate) loaned: &'a Arc<Loaned>,
    /// Where it came in. Empty: it is a message now.
    pub(crate) frame: &'a mut Option<Frame>,
    pub(crate) stamp: Option<Time>,
    pub(crate) may_keep: bool,
}

impl Arrived<'_> {
    /// Its sender.
    pub fn from(&self) -> PeerId {
        self.from
    }

    /// Its sender's data port.
    pub fn source(&self) -> SocketAddrV4 {
        self.source
    }

    /// Whether the upper 48 bits of its key are those of the cookie by which its sender proved its address: only the two know it. The
    /// lower 16 name a flow ([`PeerHandle::flow_key`](crate::PeerHandle::flow_key)).
    pub fn is_proved(&self) -> bool {
        self.is_proved
    }

    /// Its type, 8 to 13.
    pub fn packet_type(&self) -> u8 {
        self.packet_type
    }

    /// The header's key.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The header's other words.
    pub fn words(&self) -> [u32; 3] {
        self.words
    }

    /// What is between header and digest.
    pub fn payload(&self) -> &[u8] {
        self.payload
    }

    /// When the gate let it in, by `CLOCK_MONOTONIC`, if it is a real-time packet; `None`: it came another way, or its device has no room for
    /// metadata (`bpf_xdp_adjust_meta`).
    pub fn stamp(&self) -> Option<Time> {
        self.stamp
    }

    /// Its payload as a message, where it came in, with the key as tag. `None`, and the packet is gone: half of the frames that packets come
    /// into are messages already.
    pub fn keep(self) -> Option<Message> {
        let frame = match self.may_keep {
            true => self.frame.take()?,
            false => return None,
        };
        Some(Message {
            loaned: Arc::clone(self.loaned),
            released: Some(Released::GeneralFrame(frame.into_address())),
            address: self.address,
            len: self.payload.len() as u64,
            peer: self.from,
            tag: self.key,
            number: self.words[0],
            missing: Vec::new(),
            latency_ns: 0,
        })
    }
}

/// Packets that a handler sends: ahead of all that is not control, once, and lost where there is no room.
#[derive(Debug, Default)]
pub struct Replies {
    payload_max: usize,
    pub(crate) packets: Vec<(PeerId, LmHeader, Range<usize>)>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) reminds: Option<PeerId>,
}

impl Replies {
    /// Most bytes between header and digest.
    pub fn payload_max(&self) -> usize {
        self.payload_max
    }

    /// Sends a packet to a peer's data port. `false`: the type is none of [`EXTENSION_TYPES`], or the payload is too long.
    pub fn send(&mut self, to: PeerId, packet_type: u8, key: u64, words: [u32; 3], payload: &[u8]) -> bool {
        if !EXTENSION_TYPES.contains(&packet_type) || payload.len() > self.payload_max {
            return false;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(payload);
        let header = LmHeader::Extension {
            packet_type,
            key,
            words,
        };
        self.packets.push((to, header, start..self.bytes.len()));
        true
    }

    /// Tells a peer, at its address alone, what its flows have to show: a packet did not. Ten times a second at most.
    pub fn remind(&mut self, peer: PeerId) {
        self.reminds = Some(peer);
    }

    /// Whether there is nothing to send.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty() && self.reminds.is_none()
    }

    /// The packets sent since the last time.
    pub(crate) fn drain(&mut self, mut packet: impl FnMut(PeerId, &LmHeader, &[u8])) {
        for (to, header, range) in self.packets.drain(..) {
            packet(to, &header, &self.bytes[range]);
        }
        self.bytes.clear();
    }
}

/// Names a handler of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HandlerId(u64);

/// Why there is no handler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandlerError {
    /// Types of the engine's own.
    #[error("packets of types {} to {} are not for handlers; choose among {} to \
             {}", .types.start(), .types.end(), EXTENSION_TYPES.start(), EXTENSION_TYPES.end())]
    NotForHandlers {
        /// What was asked for.
        types: RangeInclusive<u8>,
    },
    /// Frames that are to be reserved.
    #[error("only {left} frames can be reserved for what handlers keep; ask for fewer")]
    NoFrames {
        /// How many there are.
        left: u32,
    },
    /// No such handler.
    #[error("the endpoint has no such handler; it was taken out")]
    Unknown,
    /// Another handler has a type.
    #[error("packets of type {packet_type} have a handler already; remove that one first")]
    Taken {
        /// The type.
        packet_type: u8,
    },
}

struct Registered {
    id: HandlerId,
    types: RangeInclusive<u8>,
    handler: Box<dyn Handler>,
    /// Frames that its packets come into and that nothing else keeps.
    frames: u32,
}

/// The handlers of an endpoint.
pub(crate) struct Handlers {
    all: Vec<Registered>,
    last: u64,
    pub(crate) replies: Replies,
    /// One took a packet since this was asked last.
    pub(crate) took: bool,
}

impl Handlers {
    /// For packets of up to `mtu` bytes.
    pub(crate) fn new(mtu: u16) -> Handlers {
        const HEADERS_LEN: usize = 20 + 8 + HEADER_LEN + DIGEST_LEN;
        Handlers {
            all: Vec::new(),
            last: 0,
            took: false,
            replies: Replies {
                payload_max: usize::from(mtu).saturating_sub(HEADERS_LEN),
                packets: Vec::new(),
                bytes: Vec::new(),
                reminds: None,
            },
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn add(
        &mut self,
        types: RangeInclusive<u8>,
        handler: Box<dyn Handler>,
    ) -> Result<HandlerId, HandlerError> {
        let is_extension = |packet_type| EXTENSION_TYPES.contains(packet_type);
        if types.is_empty() || !is_extension(types.start()) || !is_extension(types.end()) {
            return Err(HandlerError::NotForHandlers { types });
        }
        if let Some(packet_type) = types
            .clone()
            .find(|&packet_type| self.position(packet_type).is_some())
        {
            return Err(HandlerError::Taken { packet_type });
        }
        self.last += 1;
        let id = HandlerId(self.last);
        self.all.push(Registered {
            id,
            types,
            handler,
            frames: 0,
        });
        Ok(id)
    }

    pub(crate) fn remove(&mut self, id: HandlerId) -> Option<Box<dyn Handler>> {
        let position = self.all.iter().position(|registered| registered.id == id)?;
        Some(self.all.remove(position).handler)
    }

    /// Reserves so many frames for what a handler keeps, instead of those before, and `most` for all together; how many are reserved then.
    pub(crate) fn reserve(&mut self, id: HandlerId, frames: u32, most: u32) -> Result<u32, HandlerError> {
        let (mut others, mut found) = (0, None);
        for registered in &mut self.all {
            match registered.id == id {
                true => found = Some(registered),
                false => others += registered.frames,
            }
        }
        let registered = found.ok_or(HandlerError::Unknown)?;
        let left = most - others;
        if frames > left {
            return Err(HandlerError::NoFrames { left });
        }
        registered.frames = frames;
        Ok(others + frames)
    }

    /// Whether frames are reserved for packets of a type.
    pub(crate) fn has_frames(&self, packet_type: u8) -> bool {
        (self.position(packet_type)).is_some_and(|position| self.all[position].frames > 0)
    }

    fn position(&self, packet_type: u8) -> Option<usize> {
        (self.all.iter()).position(|registered| registered.types.contains(&packet_type))
    }

    /// Gives a packet to its handler; `false`: there is none.
    pub(crate) fn packet(&mut self, packet: Arrived<'_>, now: Time) -> bool {
        let Some(position) = self.position(packet.packet_type) else {
            return false;
        };
        self.all[position].handler.packet(packet, now, &mut self.replies);
        self.took = true;
        true
    }

    /// Calls those that are due; `false`: none is.
    pub(crate) fn tick(&mut self, now: Time) -> bool {
        let mut is_due = false;
        for Registered { handler, .. } in &mut self.all {
            if handler.due().is_some_and(|due| due <= now) {
                is_due = true;
                handler.tick(now, &mut self.replies);
            }
        }
        is_due
    }

    /// When the next one is due.
    pub(crate) fn due(&self) -> Option<Time> {
        (self.all.iter())
            .filter_map(|registered| registered.handler.due())
            .min()
    }
}
