//! Requests: what an application asks of the engine between poll rounds. Step 1 (loan) and step 2 (send) of the
//! data's path.

use std::net::SocketAddrV4;
use std::num::NonZeroU64;

use lm_protocol::geometry::{Geometry, GeometryError, Layout, Wire};
use lm_protocol::serial;
use lm_protocol::streaming::Writer;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Facts, LmHeader};

use crate::arena::pages_len;
use crate::completion::{LoanError, PeerId, RecvError, SendError, SendToken};
use crate::engine::Engine;
use crate::message::{LandingRegion, Message};
use crate::outbound::{Outbound, OutboundTerms};
use crate::placing::ZoneSource;
use crate::port::{Port, Steer};
use crate::region::SendRegion;
use crate::region::TrySendError;
use crate::release::Released;
use crate::scheduler::{Class, Flow, FlowError, FlowId, FlowSpec};
use crate::sending::SmallMessage;
use crate::words::Words;
use crate::writer::MessageWriter;

/// Fragments of a plain UDP datagram at the smallest MTU (65,507 bytes in pieces of 552), rounded up to a power of
/// two: one window a message, as in the paper.
const PLAIN_FRAGMENTS_MAX: u32 = 128;

/// Front margin of a region made before its session's header length is known: the longest headers.
const REGION_FRONT_MARGIN: u64 = 512;

impl<P: Port> Engine<P> {
    /// Loans memory for a message of `len` bytes.
    pub(crate) fn loan(&mut self, id: PeerId, len: u64) -> Result<SendRegion, LoanError> {
        let layout = self.fixed.layout;
        let peer = self.peers.named(id).ok_or(LoanError::UnknownPeer)?;
        let (plain, reopening) = (peer.plain, peer.reopening);
        let terms = peer.outbound.as_ref().map(|outbound| outbound.terms);
        if !plain && len <= self.eager_len_to(id.index) {
            // One fragment: eager.
            let geometry = layout
                .message(len)
                .map_err(|_| LoanError::TooLarge { limit: 0 })?;
            let frame = self.sending.take_frame().ok_or(LoanError::WouldBlock)?;
            let start = frame.into_address();
            return Ok(SendRegion::new(
                self.memory.way_back(),
                Released::TransmitFrame(start),
                start,
                geometry,
                len,
                id,
                true,
            ));
        }
        let terms = match terms {
            Some(terms) => terms,
            None if reopening => return Err(LoanError::WouldBlock),
            None => return Err(LoanError::NoSession),
        };
        let (geometry, start, region_len) = self.loan_region(&terms, len)?;
        let released = Released::SendRegion {
            start,
            len: region_len,
        };
        let mut region = SendRegion::new(self.memory.way_back(), released, start, geometry, len, id, !plain);
        region.zero_padding();
        Ok(region)
    }

    /// Memory for a message of `len` bytes in a session: how it lies there, where, and how many bytes.
    fn loan_region(&mut self, terms: &OutboundTerms, len: u64) -> Result<(Geometry, u64, u64), LoanError> {
        if len > terms.max_message_len {
            return Err(LoanError::TooLarge {
                limit: terms.max_message_len,
            });
        }
        let geometry = match terms.plain {
            true => terms.layout.message(len),
            false => terms.layout.session_message(len),
        };
        let geometry = geometry.map_err(|_| LoanError::TooLarge {
            limit: terms.max_message_len,
        })?;
        let mut region_len = geometry.tx_region_len();
        if let Some(with) = terms
            .goes_ahead
            .then(|| Facts::geometry(&terms.layout, len))
            .flatten()
            && pages_len(with.tx_region_len()) <= self.sending.region_len_max()
        {
            region_len = with.tx_region_len();
        }
        if pages_len(region_len) > self.sending.region_len_max() {
            let strides = self.sending.region_len_max() / geometry.tx_stride().max(1);
            return Err(LoanError::TooLarge {
                limit: strides * u64::from(terms.layout.payload_len()),
            });
        }
        let start = self.sending.take_region(region_len);
        start
            .map(|start| (geometry, start, region_len))
            .ok_or(LoanError::WouldBlock)
    }

    /// Begins a message of `len` bytes that is sent while it is written.
    pub(crate) fn begin(
        &mut self,
        id: PeerId,
        len: u64,
        tag: u64,
        now_ns: u64,
    ) -> Result<MessageWriter, LoanError> {
        let peer = self.peers.named(id).ok_or(LoanError::UnknownPeer)?;
        let outbound = match &peer.outbound {
            Some(outbound) => outbound,
            None if peer.reopening => return Err(LoanError::WouldBlock),
            None => return Err(LoanError::NoSession),
        };
        if outbound.terms.layout.wire() == Wire::IpFrag {
            return Err(LoanError::Datagram);
        }
        if len == 0 {
            return Err(LoanError::Empty);
        }
        let (terms, grain) = (outbound.terms, outbound.grain(len));
        let limit = terms.max_message_len;
        let grain = grain
            .filter(|_| len <= limit)
            .ok_or(LoanError::TooLarge { limit })?;
        if !outbound.has_room() || !self.sending.outgoing.has_room() {
            return Err(LoanError::WouldBlock);
        }
        let (geometry, start, region_len) = self.loan_region(&terms, len)?;
        let released = Released::SendRegion {
            start,
            len: region_len,
        };
        let token = self.told.new_token();
        let peer = self.peers.at(id.index);
        let outbound = peer
            .outbound
            .as_mut()
            .expect("the session was there a moment ago");
        if outbound.says_whole() {
            tracing::warn!(to = %peer.data, "messages leave when they are whole: the receiver is of an earlier \
                                             version; update it");
        }
        let memory = (released, start, geometry, len);
        let table = &mut self.sending.outgoing;
        let (slot, watermark) = outbound.begin(table, &peer.addressing, memory, (tag, grain), token, now_ns);
        let (way_back, held) = (self.memory.way_back(), Released::Writer(slot));
        let mut region = SendRegion::new(way_back, held, start, geometry, len, id, true);
        region.zero_padding();
        Ok(MessageWriter::new(region, Writer::new(grain), watermark, token))
    }

    /// Takes a message over, or gives it back with the reason.
    // The error carries the region, as `std::sync::mpsc::SendError` carries its value.
    #[allow(clippy::result_large_err)]
    pub(crate) fn submit(
        &mut self,
        mut region: SendRegion,
        tag: u64,
        now_ns: u64,
    ) -> Result<SendToken, TrySendError> {
        let reason = match region.released {
            // Another endpoint's memory: its addresses mean nothing here.
            _ if !self.memory.is_from_here(&region.loaned) => Err(SendError::UnknownPeer),
            Some(Released::TransmitFrame(_)) => self.may_send_eager(region.peer, now_ns),
            _ => self.may_send_fragments(&region),
        };
        if let Err(reason) = reason {
            return Err(TrySendError { region, reason });
        }
        let token = self.told.new_token();
        let (index, words) = (region.peer.index, region.words.take());
        let (released, start, geometry, len) = region.into_sent();
        match released {
            Released::TransmitFrame(address) => {
                self.send_eager(index, address, start, &geometry, tag, token, now_ns);
            }
            _ => {
                let peer = self.peers.at(index);
                let outbound = peer
                    .outbound
                    .as_mut()
                    .expect("the session was there a moment ago");
                outbound.submit(
                    &mut self.sending.outgoing,
                    &peer.addressing,
                    (released, start, geometry, len),
                    (tag, words.map_or(Words::NONE, |words| *words)),
                    token,
                    now_ns,
                );
                if outbound.is_leaving() {
                    self.leave(index, now_ns);
                }
            }
        }
        Ok(token)
    }

    /// Copies a message of one fragment into a frame and hands it over, without a region in between. `None`: this message takes a
    /// region.
    pub(crate) fn submit_copy(
        &mut self,
        id: PeerId,
        payload: &[u8],
        tag: u64,
        now_ns: u64,
    ) -> Option<Result<SendToken, SendError>> {
        let len = payload.len() as u64;
        if self.peers.named(id)?.plain || len > self.eager_len_to(id.index) {
            return None;
        }
        let geometry = self.fixed.layout.message(len).ok()?;
        let Some(frame) = self.sending.take_frame() else {
            return Some(Err(SendError::WouldBlock));
        };
        if let Err(reason) = self.may_send_eager(id, now_ns) {
            self.sending.recover_frame(frame.into_address());
            return Some(Err(reason));
        }
        let start = frame.into_address();
        self.memory
            .umem()
            .copy_to(start + geometry.tx_payload_offset(0), payload);
        self.counters.user_copied_bytes += len;
        let token = self.told.new_token();
        self.send_eager(id.index, start, start, &geometry, tag, token, now_ns);
        Some(Ok(token))
    }

    fn may_send_eager(&mut self, id: PeerId, now_ns: u64) -> Result<(), SendError> {
        let peer = self.peers.named(id).ok_or(SendError::UnknownPeer)?;
        let now = Time::from_nanos(now_ns);
        if let Some(outbound) = &mut peer.outbound
            && outbound.allowed(Class::Small, 1, now) == 0
        {
            return Err(SendError::WouldBlock);
        }
        if peer.eager_out.proving {
            return Err(SendError::WouldBlock);
        }
        if peer.eager_credit() == 0 {
            // Watched while it waits, because the packet with more credit may get lost.
            self.small.watch(id.index, &mut peer.eager_out);
            return Err(SendError::WouldBlock);
        }
        // The last question: what it allows leaves.
        match self.sending.allows_message(&mut self.counters, now) {
            true => Ok(()),
            false => Err(SendError::WouldBlock),
        }
    }

    fn may_send_fragments(&mut self, region: &SendRegion) -> Result<(), SendError> {
        if !self.sending.outgoing.has_room() {
            return Err(SendError::WouldBlock);
        }
        let peer = self.peers.named(region.peer).ok_or(SendError::UnknownPeer)?;
        let outbound = match &peer.outbound {
            Some(outbound) => outbound,
            None if peer.reopening => return Err(SendError::WouldBlock),
            None => return Err(SendError::NoSession),
        };
        // A session that was granted anew may have another layout than the one that this region was cut for.
        if *region.geometry.layout() != outbound.terms.layout {
            return Err(SendError::NoSession);
        }
        match outbound.has_room() {
            true => Ok(()),
            false => Err(SendError::WouldBlock),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn send_eager(
        &mut self,
        index: u16,
        address: u64,
        start: u64,
        geometry: &Geometry,
        tag: u64,
        token: SendToken,
        now_ns: u64,
    ) {
        let answers = self.small.stream.sent(now_ns);
        let acknowledges = self.acknowledgement_behind(index, geometry.fragment(0).len.into());
        let peer = self.peers.at(index);
        let number = peer.eager_out.next;
        let sender_id = peer.own_id(self.fixed.sender_id);
        let header = LmHeader::Eager {
            sender_id,
            number,
            tag,
            digested: self.fixed.integrity.has_digests(),
            acknowledges,
        };
        let message = SmallMessage {
            address,
            start,
            geometry,
            tag,
            token,
            answers,
        };
        self.small.watch(index, &mut peer.eager_out);
        let (side, memory) = (self.port.side(), &mut self.memory);
        (self.sending).send_message(
            side,
            memory,
            peer,
            (&header, &message),
            &mut self.counters,
            now_ns,
        );
    }

    /// Takes the next message, or the news that one stays incomplete, in the order in which they were settled.
    pub(crate) fn take_message(&mut self) -> Result<Option<Message>, RecvError> {
        if let Some(message) = self.told.next_message()? {
            return Ok(Some(message));
        }
        if self.sending.take_link_error().is_some() {
            return Err(RecvError::Link);
        }
        Ok(None)
    }

    /// A landing zone for a message of up to `len` bytes, taken before the message comes.
    pub(crate) fn landing_region(&mut self, len: u64) -> Result<LandingRegion, LoanError> {
        let chunk_len = u64::from(self.fixed.chunk_len);
        let landing = self.landing.as_mut().ok_or(LoanError::NoSession)?;
        // The shape that I2 asks for, whatever payload length (at most a chunk) the session will have.
        let total = REGION_FRONT_MARGIN + len + chunk_len + chunk_len;
        if pages_len(total) > landing.registered() {
            return Err(LoanError::TooLarge {
                limit: landing.registered().saturating_sub(4 * chunk_len),
            });
        }
        let start =
            (landing.arena.allocate_in(total, 0, landing.registered_len)).ok_or(LoanError::WouldBlock)?;
        Ok(LandingRegion {
            loaned: self.memory.way_back(),
            start,
            len: total,
        })
    }

    /// Registers who decides where messages land, or nobody.
    pub(crate) fn place_by(&mut self, source: Option<Box<dyn ZoneSource>>) {
        let loaned = self.memory.loaned();
        if let Some(landing) = &mut self.landing {
            landing.place_by(source, loaned);
        }
    }

    /// Asks again where a message lands; `false`: none of that number waits.
    pub(crate) fn retry(&mut self, peer: PeerId, number: u32) -> bool {
        let Some(landing) = &mut self.landing else {
            return false;
        };
        let (sessions, _, mut memory) = landing.with_memory();
        sessions.retry(peer, number, &mut memory)
    }

    /// Takes the memory of a message back; `false`: none of that number is under way.
    pub(crate) fn retract(&mut self, peer: PeerId, number: u32) -> bool {
        let loaned = self.memory.loaned();
        (self.landing.as_mut()).is_some_and(|landing| landing.retract(peer, number, loaned))
    }

    /// Makes a peer that runs no LM: it gets plain UDP datagrams as IP fragments, unconfirmed.
    pub(crate) fn make_plain(
        &mut self,
        index: u16,
        rate: Option<NonZeroU64>,
        now_ns: u64,
    ) -> Result<(), GeometryError> {
        let layout = Layout::new(Wire::IpFrag, self.fixed.mtu, self.fixed.link)?;
        let terms = OutboundTerms {
            key: 0,
            layout,
            window: lm_protocol::window::WindowShape::whole(PLAIN_FRAGMENTS_MAX),
            packet_limit: 0,
            // The IP identification: not the same datagrams as an earlier run's.
            first_message: self.admission.entropy.draw() as u16 as u32,
            messages_in_flight: 4,
            max_message_len: layout.max_message_len(),
            lease_ns: u64::MAX,
            channel: 0,
            delivery: lm_protocol::delivery::Delivery::Unreliable,
            integrity: lm_protocol::integrity::Integrity::None,
            plain: true,
            takes_streams: false,
            goes_ahead: false,
            fillers: 0,
            repeats_apart: false,
            landing_port: None,
            rate,
        };
        let peer = self.peers.at(index);
        peer.plain = true;
        peer.outbound = Some(Outbound::new(terms, now_ns));
        self.sending.add_sender(index);
        Ok(())
    }

    /// Registers a flow, with frames of its own.
    pub(crate) fn add_flow(&mut self, spec: &FlowSpec, flow: Box<dyn Flow>) -> Result<FlowId, FlowError> {
        let pieces = (u32::from(self.fixed.mtu) + u32::from(self.fixed.link.ethernet_len()))
            .div_ceil(self.fixed.chunk_len - u32::from(self.fixed.checksum.room()));
        let spec = FlowSpec {
            messages: spec.messages.map(|packets| packets.max(2).saturating_mul(pieces)),
            ..*spec
        };
        self.sending.add_flow(&mut self.peers, &spec, flow)
    }

    /// Has the device bring a peer's small packets to the general queue, where it can choose.
    pub(crate) fn steer_small(&mut self, from: SocketAddrV4) {
        let steer = |queue| self.port.steer(Steer::General { queue, from });
        if let Some(Err(error)) = self.small.queue().map(steer) {
            tracing::debug!(peer = %from, "its small packets may come by the kernel's socket: {error}");
        }
    }

    /// Has a flow's packets go to a peer, and the peer's come to the queue that each round looks at.
    pub(crate) fn aim_flow(&mut self, id: FlowId, to: PeerId) -> Result<(), FlowError> {
        let peer = self.peers.named(to).ok_or(FlowError::UnknownPeer)?;
        let data = peer.data;
        self.sending.aim_flow(id, &peer.addressing)?;
        self.steer_small(data);
        Ok(())
    }

    /// Takes a flow out; `None` if there is none of that name.
    pub(crate) fn remove_flow(&mut self, id: FlowId) -> Option<Box<dyn Flow>> {
        self.sending.remove_flow(id)
    }

    /// Whether announced messages are on their way here.
    pub(crate) fn awaits_messages(&self) -> bool {
        let landing = self.landing.as_ref();
        landing.is_some_and(|landing| landing.sessions.iter().any(|inbound| !inbound.is_idle()))
    }

    /// Whether messages are being written.
    pub(crate) fn awaits_writers(&mut self) -> bool {
        let senders = self.sending.senders();
        { senders.iter() }.any(|&index| {
            let outbound = self.peers.at(index).outbound.as_ref();
            outbound.is_some_and(|outbound| outbound.streams > 0)
        })
    }

    /// Messages handed over and not settled.
    pub(crate) fn unconfirmed_messages(&mut self) -> u64 {
        let mut count = 0;
        for position in 0..self.sending.senders().len() {
            let index = self.sending.senders()[position];
            count += self
                .peers
                .at(index)
                .outbound
                .as_ref()
                .map_or(0, |outbound| outbound.unsettled() as u64);
        }
        for index in self.admission.requests.peers() {
            count += self.peers.at(index).unheard.len() as u64;
        }
        for position in 0..self.small.watched().len() {
            let index = self.small.watched()[position];
            let out = &self.peers.at(index).eager_out;
            count += serial::distance(out.acknowledged, out.next).max(0) as u64;
        }
        count
    }
}
