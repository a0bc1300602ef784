//! General packets: what comes on the general channel, or through the kernel's data socket where the gate
//! passed it on. Both ways end in the same functions; the socket's way is a *one-copy path*, since the kernel
//! copies the datagram.

mod eager;

use std::net::SocketAddrV4;
use std::ops::Range;

use lm_protocol::control::{ControlMessage, KIND_CHALLENGE, KIND_ENDED, KIND_PROOF, KIND_REQUEST};
use lm_protocol::geometry::Wire;
use lm_protocol::streaming::{Heard, Release};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{AnnounceEntry, Credit, EagerAcknowledgement, LmError, LmPacket, MessageDigest};
use lm_protocol::wire::lm::{
    LmHeader, MissingRange, TYPE_REALTIME, TYPE_WINDOWS, UnwholeMessage, parse_packet,
};
use lm_protocol::wire::{ParseError, parse_frame};

use crate::bounds::DATAGRAM_LEN_MAX;
use crate::completion::Completion;
use crate::engine::Engine;
use crate::frames::Frame;
use crate::handlers::Arrived;
use crate::landing::{About, Datagram, Untaken};
use crate::looks::DATAGRAMS_PER_LOOK;
use crate::notices::{Fault, source_of};
use crate::port::{Port, RxQueue, Socket, SocketEvent};
use crate::release::Released;
use crate::words::Words;

impl<P: Port> Engine<P> {
    /// A packet of the general channel: `len` bytes at UMEM address `start`, inside `frame`.
    pub(crate) fn take_packet(&mut self, frame: Frame, start: u64, len: u32, now_ns: u64) {
        let pointer = self.memory.pointer(start, u64::from(len));
        // SAFETY: the range lies inside the mapping (checked by `pointer`), which the memory keeps mapped for
        // longer than this call. The kernel gave the frame back with its RX descriptor and it is posted
        // nowhere, so nobody writes it: `frame` is its only token and is put back after the last use.
        let bytes = unsafe { std::slice::from_raw_parts(pointer.cast_const(), len as usize) };
        if let (_, Some(capture)) = self.memory.with_capture() {
            capture.received(bytes);
        }
        let found = parse_frame(bytes);
        let parsed = found.as_ref().ok().and_then(|parsed| {
            let addressing = parsed.addressing()?;
            // No host has a group's address.
            let is_hosts = addressing.src_mac.0[0] & 1 == 0;
            let from = SocketAddrV4::new(addressing.src_ip, addressing.src_port);
            Some((from, parsed.packet().filter(|_| is_hosts)?))
        });
        let Some((from, packet)) = parsed else {
            let fault = match found {
                Err(ParseError::Lm(LmError::VersionMismatch { .. })) => Fault::Version,
                _ => Fault::Malformed,
            };
            self.reject(fault, source_of(bytes));
            self.small.looked_at(Some(frame));
            return;
        };
        let mut frame = Some(frame);
        self.take_lm(&mut frame, Some(start), from, &packet, now_ns);
        self.small.looked_at(frame);
    }

    /// Stage 5, first half: datagrams that the gate passed on. Each is received straight into a general frame, or, where fragments may
    /// be longer than that, into memory for one of the longest.
    pub(crate) fn receive_data_datagrams(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        while count < DATAGRAMS_PER_LOOK {
            let Some(frame) = self.small.take_frame() else {
                self.counters.frames_exhausted += 1;
                break;
            };
            let address = frame.address();
            let mut frame = Some(frame);
            let was_there = self.receive_data_datagram(&mut frame, address, now_ns);
            self.small.looked_at(frame);
            if !was_there {
                break;
            }
            count += 1;
        }
        count
    }

    /// Receives a datagram for the frame at `address`; whether there was one.
    fn receive_data_datagram(&mut self, frame: &mut Option<Frame>, address: u64, now_ns: u64) -> bool {
        let in_frame = crate::engine::packet_start(address);
        let frame_space = u64::from(self.fixed.chunk_len) - crate::memory::PACKET_HEADROOM;
        let (start, space) = match self.fixed.caps.capacity {
            0 => (in_frame, frame_space),
            _ => (self.fixed.datagram, DATAGRAM_LEN_MAX),
        };
        let event = self
            .port
            .side()
            .recv_into(Socket::Data, self.memory.umem(), start, space);
        let (from, len) = match event {
            Ok(Some(SocketEvent::Datagram { from, len })) => (from, len),
            Ok(Some(SocketEvent::Refused(by))) => {
                self.take_refusal(by);
                return true;
            }
            Ok(Some(SocketEvent::TooLong(from))) => {
                self.counters.one_copy_packets += 1;
                self.reject(Fault::Malformed, from);
                return true;
            }
            Ok(None) | Err(_) => return false,
        };
        let pointer = self.memory.pointer(start, len as u64);
        // SAFETY: as in `take_packet`; the kernel has finished its copy into the frame.
        let bytes = unsafe { std::slice::from_raw_parts(pointer.cast_const(), len) };
        self.counters.one_copy_packets += 1;
        let packet = match parse_packet(bytes) {
            Ok(parsed) => parsed,
            Err(error) => {
                match error {
                    LmError::VersionMismatch { .. } => self.take_other_version(from, bytes, now_ns),
                    _ => self.reject(Fault::Malformed, from),
                }
                return true;
            }
        };
        if let LmHeader::Data {
            session_key,
            message,
            index,
            count,
        } = packet.header
        {
            // It is never answered.
            self.take_fragment(from, session_key, (message, index, count), packet.payload, now_ns);
            return true;
        }
        let packet = match start == in_frame {
            true => Some(packet),
            // It may be kept as a message: in a frame of its own.
            false if len as u64 <= frame_space => {
                self.memory.umem().copy_within(start, in_frame, len as u64);
                let pointer = self.memory.pointer(in_frame, len as u64);
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts(pointer.cast_const(), len) };
                parse_packet(bytes).ok()
            }
            false => None,
        };
        let Some(packet) = packet else {
            self.reject(Fault::Malformed, from);
            return true;
        };
        self.take_lm(frame, None, from, &packet, now_ns);
        true
    }

    /// One LM packet from either way in. Its payload lies inside `frame`, which is taken if it becomes a message; where the gate let it in,
    /// `start` is the packet's UMEM address.
    fn take_lm(
        &mut self,
        frame: &mut Option<Frame>,
        start: Option<u64>,
        from: SocketAddrV4,
        packet: &LmPacket<'_>,
        now_ns: u64,
    ) {
        let payload = packet.payload;
        let ip = from.ip();
        if ip.is_unspecified() || ip.is_broadcast() || ip.is_multicast() || from.port() == 0 {
            // No host has such an address, and an answer to it could reach many: the kernel drops these as well
            // (`ip_route_input_slow`), but they did not come through it.
            self.reject(Fault::Malformed, from);
            return;
        }
        if !packet.is_intact(from) {
            self.reject(Fault::Corrupt, from);
            return;
        }
        match packet.header {
            LmHeader::Eager {
                sender_id,
                number,
                tag,
                acknowledges,
                ..
            } => {
                if let Some(acknowledgement) = acknowledges
                    && !self.take_acknowledgement_behind(from, &acknowledgement, now_ns)
                {
                    return;
                }
                let address = self.memory.address_of(payload);
                let len = payload.len() as u64;
                self.take_eager(frame, from, (sender_id, number, tag), (address, len), now_ns);
            }
            LmHeader::EagerAck {
                sender_id,
                next,
                limit,
            } => {
                let acknowledgement = EagerAcknowledgement {
                    sender_id,
                    next,
                    limit,
                };
                self.take_eager_ack(from, &acknowledgement, now_ns);
            }
            LmHeader::Announce {
                session_key,
                first,
                entries,
                sent,
            } => {
                self.take_announcements(from, session_key, (first, entries, sent), payload, now_ns);
            }
            LmHeader::Credit {
                session_key,
                packet_limit,
                delivered,
                announced,
                lands,
            } => {
                let credit = (packet_limit, delivered, announced);
                self.take_credit(from, session_key, credit, (lands, payload), now_ns);
            }
            LmHeader::Missing {
                session_key,
                message,
                manifest: true,
                ..
            } => self.take_digest_request(from, session_key, message, payload, now_ns),
            LmHeader::Manifest { .. } => self.take_manifest(from, packet, now_ns),
            LmHeader::Missing {
                session_key, message, ..
            } => {
                self.take_missing(from, session_key, message, payload, now_ns);
            }
            LmHeader::Data {
                session_key,
                message,
                index,
                count,
            } => self.take_fragment(from, session_key, (message, index, count), payload, now_ns),
            LmHeader::Control {
                request_id,
                kind: kind @ (KIND_REQUEST..=KIND_ENDED | KIND_CHALLENGE | KIND_PROOF),
            } => match ControlMessage::parse_body(kind, payload) {
                Ok(ControlMessage::Proof(proof)) => {
                    self.take_proof(Socket::Data, from, &proof, now_ns);
                }
                Ok(message) => self.take_admission(Socket::Data, from, request_id, &message, now_ns),
                Err(_) => self.reject(Fault::Malformed, from),
            },
            LmHeader::Control { request_id, kind } => self.take_probe_request(from, kind, request_id),
            LmHeader::Extension {
                packet_type,
                key,
                words,
            } => {
                let packet = (packet_type, key, words);
                self.take_extension((frame, start), from, packet, payload, now_ns);
            }
            _ => self.reject(Fault::Unexpected, from),
        }
    }

    /// A packet for a handler.
    fn take_extension(
        &mut self,
        (frame, start): (&mut Option<Frame>, Option<u64>),
        from: SocketAddrV4,
        (packet_type, key, words): (u8, u64, [u32; 3]),
        payload: &[u8],
        now_ns: u64,
    ) {
        let is_windows = packet_type == TYPE_WINDOWS;
        if is_windows && self.take_windows(from, key, words, payload, now_ns) {
            return;
        }
        // Of whom small messages are taken, too.
        let index = self.peers.find(from);
        let index = index.filter(|index| self.peers.at(*index).incarnation.is_some());
        let stamp = start.filter(|_| packet_type == TYPE_REALTIME);
        let stamp = stamp.and_then(|start| self.memory.stamp_before(start));
        let is_taken = index.is_some_and(|index| {
            let packet = Arrived {
                from: self.peers.id_of(index),
                source: from,
                is_proved: self.peers.at(index).secret >> 16 == key >> 16,
                packet_type,
                key,
                words,
                payload,
                address: self.memory.address_of(payload),
                loaned: self.memory.loaned(),
                frame,
                stamp,
                may_keep: self.small.may_keep(packet_type),
            };
            self.small.handlers.packet(packet, Time::from_nanos(now_ns))
        });
        match index.filter(|_| is_taken) {
            Some(index) => {
                self.counters.packets_used += 1;
                self.peers.at(index).heard_ns = now_ns;
                self.small.apart.message_came();
                self.send_replies(now_ns);
            }
            None => self.reject(Fault::Unexpected, from),
        }
    }

    /// Calls handlers that are due.
    #[inline]
    pub(crate) fn tick_handlers(&mut self, now_ns: u64) {
        if !self.small.handlers.is_empty() && self.small.handlers.tick(Time::from_nanos(now_ns)) {
            self.send_replies(now_ns);
        }
    }

    /// Sends what handlers reply.
    fn send_replies(&mut self, now_ns: u64) {
        if self.small.handlers.replies.is_empty() {
            return;
        }
        let mut replies = std::mem::take(&mut self.small.handlers.replies);
        if let Some(peer) = replies.reminds.take() {
            self.remind(peer, now_ns);
        }
        replies.drain(|to, header, payload| {
            if self.peers.named(to).is_none() || !self.send_packet(to.index, header, payload) {
                self.counters.control_send_errors += 1;
            }
        });
        self.small.handlers.replies = replies;
    }

    /// A fragment that the gate passed on: repeated on request, late, or from elsewhere.
    fn take_fragment(
        &mut self,
        from: SocketAddrV4,
        key: u64,
        place: (u32, u32, u32),
        payload: &[u8],
        now_ns: u64,
    ) {
        if !self.knows_session(key) {
            self.ask_for_session(now_ns);
        }
        let address = self.memory.address_of(payload);
        let peers = &mut self.peers;
        let landing = self.landing.as_mut().filter(|landing| {
            landing.sessions.with_key(key).is_some_and(|inbound| {
                // Its fragments may have another source port than all else that it sends.
                let port = inbound.terms.admission.peer_port;
                inbound.terms.layout.wire() == Wire::Lm
                    && (peers.named(inbound.terms.peer)).is_some_and(|peer| {
                        peer.data == from || SocketAddrV4::new(*peer.data.ip(), port) == from
                    })
            })
        });
        let Some(landing) = landing else {
            self.reject_for(key, Fault::Fragment, from);
            return;
        };
        let datagram = Datagram {
            fragment: place,
            from: address,
            len: payload.len() as u64,
        };
        // In zero-copy mode the gate counts none.
        let accepted = match self.fixed.caps.witness {
            true => landing.rx.accepted(),
            false => landing.sessions.entries.received,
        };
        (landing.sessions).take_datagram(key, &datagram, accepted, self.memory.umem(), now_ns);
        if landing
            .sessions
            .keyed(key)
            .is_some_and(|inbound| inbound.settled.has_landed())
        {
            self.show_landed(now_ns);
        }
    }

    fn knows_session(&self, key: u64) -> bool {
        (self.landing.as_ref()).is_some_and(|landing| landing.sessions.with_key(key).is_some())
    }

    fn take_announcements(
        &mut self,
        from: SocketAddrV4,
        key: u64,
        (first, entries, sent): (u32, u32, u32),
        payload: &[u8],
        now_ns: u64,
    ) {
        if !self.knows_session(key) {
            self.ask_for_session(now_ns);
        }
        let peers = &mut self.peers;
        let landing = self.landing.as_mut().filter(|landing| {
            landing
                .sessions
                .with_key(key)
                .is_some_and(|inbound| peers.named(inbound.terms.peer).map(|peer| peer.data) == Some(from))
        });
        let Some(landing) = landing else {
            self.tell_ended_again(from, key);
            self.reject_for(key, Fault::Key, from);
            return;
        };
        let Some(inbound) = landing.sessions.keyed(key) else {
            return;
        };
        match &mut self.admission.node {
            Some(own) => own.touched(key, Time::from_nanos(now_ns)),
            None => self.admission.stewarded.touched(inbound.row()),
        }
        // A repetition, or a keepalive: the sender wants to know where we are.
        let mut repeated = payload.is_empty();
        let taken = AnnounceEntry::with_opaque(payload, entries)
            .zip(0..)
            .try_for_each(|((entry, opaque), offset)| {
                let number = first.wrapping_add(offset);
                let release = Release::from_u32(entry.windows_released);
                if inbound.order.knows(number) {
                    return match inbound.hear(number, release) {
                        Heard::More | Heard::Aborted => Ok(()),
                        Heard::Contradiction => Err(Untaken::Implausible),
                        Heard::Nothing => {
                            repeated = true;
                            Ok(())
                        }
                    };
                }
                let about = About {
                    len: entry.len,
                    tag: entry.tag,
                    words: Words::new(opaque).unwrap_or(Words::NONE),
                    has_facts: entry.has_facts,
                };
                inbound.announce(number, &about, release, now_ns)
            });
        inbound.heard_sender(now_ns);
        let believed = inbound.claimed(sent, now_ns);
        if taken == Err(Untaken::Early) && inbound.terms.goes_ahead {
            inbound.told.is_unknown();
        }
        inbound.told.asked |= repeated;
        for known in MessageDigest::iter(payload, entries) {
            inbound.told.asked |= !inbound.care().take_digest(known);
        }
        let landed = inbound.settled.has_landed();
        inbound.limit_messages(&mut landing.rx);
        if landing.placing.is_some() {
            landing.place(key);
        }
        // One counter for a packet: what follows from a refused announcement is no news.
        match (taken, believed) {
            (Ok(()), Ok(())) => self.counters.packets_used += 1,
            (Err(Untaken::Implausible), _) => self.reject(Fault::Announcement, from),
            (_, Err(Untaken::Implausible)) => self.reject(Fault::Claim, from),
            _ => self.counters.drops.announcement_early += 1,
        }
        if landed {
            self.show_landed(now_ns);
        }
    }

    fn take_credit(
        &mut self,
        from: SocketAddrV4,
        key: u64,
        (limit, delivered, announced): (u32, u32, u32),
        (lands, payload): (bool, &[u8]),
        now_ns: u64,
    ) {
        let Some(index) = self.peers.find(from) else {
            self.reject_for(key, Fault::Key, from);
            return;
        };
        let peer = self.peers.at(index);
        let Some(outbound) = peer
            .outbound
            .as_mut()
            .filter(|outbound| outbound.terms.key == key)
        else {
            self.reject_for(key, Fault::Key, from);
            return;
        };
        // What of them needs not be sent is known before it is looked at whether that can be.
        for unwhole in UnwholeMessage::iter(payload, delivered) {
            outbound.unwhole(&mut self.sending.outgoing, unwhole);
        }
        match self.credited(index, (limit, delivered, announced), lands, now_ns) {
            true => self.counters.packets_used += 1,
            false => self.reject(Fault::Credit, from),
        }
    }

    /// The receiver of our session with a peer says what it allows and has. `false`: no receiver says that.
    fn credited(&mut self, index: u16, credit: (u32, u32, u32), lands: bool, now_ns: u64) -> bool {
        let peer = self.peers.at(index);
        peer.heard_ns = now_ns;
        let Some(outbound) = &mut peer.outbound else {
            return false;
        };
        let Ok(settled) = outbound.credit(&mut self.sending.outgoing, credit, now_ns) else {
            return false;
        };
        if !std::mem::replace(&mut outbound.lands, lands) {
            self.counters.messages_one_copy += u64::from(settled);
        }
        self.settle_outbound(index, None, now_ns);
        true
    }

    /// Takes credits that came with messages.
    pub(crate) fn take_credits_behind(&mut self, now_ns: u64) {
        while let Some((index, credit)) =
            (self.landing.as_mut()).and_then(|landing| landing.sessions.next_credit())
        {
            let outbound = self.peers.at(index).outbound.as_ref();
            if outbound.is_some_and(|outbound| credit.session == Credit::session_of(outbound.terms.key)) {
                let [limit, delivered, announced] = credit.words.map(|word| word.get());
                self.credited(index, (limit, delivered, announced), true, now_ns);
            }
        }
    }

    fn take_missing(&mut self, from: SocketAddrV4, key: u64, message: u32, payload: &[u8], now_ns: u64) {
        let Some(index) = self.peers.find(from) else {
            self.reject_for(key, Fault::Key, from);
            return;
        };
        let peer = self.peers.at(index);
        let Some(outbound) = peer
            .outbound
            .as_mut()
            .filter(|outbound| outbound.terms.key == key)
        else {
            self.reject_for(key, Fault::Key, from);
            return;
        };
        let ranges: Vec<Range<u32>> = MissingRange::iter(payload)
            .map(|range| range.first..range.first.saturating_add(range.len))
            .collect();
        outbound.heard_ns = now_ns;
        let fragments = ranges.iter().map(Range::len).sum::<usize>() as u32;
        match outbound.missing(&mut self.sending.outgoing, message, ranges) {
            true => {
                self.counters.packets_used += 1;
                self.sending.lost(fragments);
            }
            false => self.reject(Fault::Missing, from),
        }
    }

    /// Settles what is confirmed of a peer's session (or all of it, when it `ended`).
    pub(crate) fn settle_outbound(
        &mut self,
        index: u16,
        ended: Option<&crate::completion::Outcome>,
        now_ns: u64,
    ) {
        let id = self.peers.id_of(index);
        while let Some(outbound) = &mut self.peers.at(index).outbound {
            let Some(settled) = outbound.settle_next(&mut self.sending.outgoing, id, ended, now_ns) else {
                break;
            };
            self.settled(settled);
        }
    }

    /// A message of many fragments has come to its end, and nobody needs this memory any more.
    pub(crate) fn settled(&mut self, (completion, released): (Completion, Option<Released>)) {
        self.told.ended(completion, &mut self.counters);
        if let Some(released) = released {
            self.recover(released);
        }
    }
}
