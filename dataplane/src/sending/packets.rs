//! Packets in frames of their own: small messages, control packets, and fragments that are repeated apart.

use std::net::SocketAddrV4;
use std::ops::Range;

use lm_protocol::geometry::Geometry;
use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::lm::{EagerAcknowledgement, HEADER_LEN, LmHeader, Trailer};

use super::Sending;
use crate::bounds::TRANSMIT_BURST;
use crate::completion::{Completion, Outcome, PeerId, SendToken};
use crate::counters::Counters;
use crate::frames::Frame;
use crate::packet_memory::PacketMemory;
use crate::peer::Peer;
use crate::port::{Datagrams, Socket, TxQueue};
use crate::scheduler::{Class, Packet, Put};

/// Unacknowledged eager messages that are sent again at once.
const EAGER_RESEND_MAX: usize = 64;

/// A message of one fragment in a transmit frame.
pub(crate) struct SmallMessage<'a> {
    /// UMEM address of the frame, and of the region in it.
    pub(crate) address: u64,
    pub(crate) start: u64,
    pub(crate) geometry: &'a Geometry,
    pub(crate) tag: u64,
    pub(crate) token: SendToken,
    /// Somebody waits for it.
    pub(crate) answers: bool,
}

impl<T: TxQueue> Sending<T> {
    /// Whether one more small message may leave. What is allowed leaves.
    #[inline]
    pub(crate) fn allows_message(&mut self, counters: &mut Counters, now: Time) -> bool {
        if !self.scheduler.has_room(Class::Small) {
            return false;
        }
        let allows = self.scheduler.shaping.take(Class::Small, 1, now) > 0;
        if !allows {
            counters.classes_starved += self.scheduler.shaping.take_starved();
        }
        allows
    }

    /// Sends a message of one fragment, which lies in a transmit frame.
    #[inline]
    pub(crate) fn send_message(
        &mut self,
        side: &mut dyn Datagrams,
        memory: &mut PacketMemory,
        peer: &mut Peer,
        (header, message): (&LmHeader, &SmallMessage<'_>),
        counters: &mut Counters,
        now_ns: u64,
    ) {
        let &SmallMessage {
            address,
            start,
            geometry,
            tag,
            token,
            answers,
        } = message;
        let fragment = geometry.fragment(0);
        let packet = start + geometry.tx_frame_offset(0);
        let header_len = peer.addressing.header_len();
        // SAFETY: the range lies inside a transmit frame that the engine owns now: the kernel has no entry for it, and nobody else
        // reads or writes it.
        let headers = unsafe { memory.umem().mapping().slice_mut(packet, header_len as u64) };
        peer.addressing
            .write_headers(headers, header, usize::from(fragment.len))
            .expect("as many bytes as the headers take");
        let trailer_len = header.trailer_len() as u32;
        let packet_len = u32::from(fragment.frame_len()) + trailer_len;
        if let Some(outbound) = &mut peer.outbound {
            outbound.spend(Class::Small, 1, packet_len.into());
        }
        self.scheduler.shaping.left(Class::Small, 1, 1, packet_len.into());
        if trailer_len > 0 {
            // A transmit frame holds a packet of the MTU, and this message is shorter by the trailer's length.
            let payload = packet + header_len as u64;
            let len = u64::from(fragment.len);
            // SAFETY: the range lies inside a transmit frame that the engine owns now; nobody writes it.
            let bytes = unsafe { memory.umem().mapping().slice(payload, len) };
            let trailer = Trailer::new(header, bytes, self.local);
            memory.umem().copy_to(payload + len, trailer.as_bytes());
        }
        let small = Packet {
            address: packet,
            len: packet_len,
            below_lm_len: u32::from(fragment.header_len) - HEADER_LEN as u32,
        };
        // Somebody waits for an answer: it leaves before the books are kept.
        let failed = |error| self.link.failed(error);
        let put = (self.scheduler).put_message(side, memory.umem(), peer.data, &small, answers, failed);
        if put == Put::Refused {
            counters.control_send_errors += 1;
        } else if let LmHeader::Eager {
            acknowledges: Some(acknowledgement),
            ..
        } = header
        {
            peer.eager_in.told(acknowledgement);
        }
        memory.record(packet, packet_len);
        let frame = self
            .frames
            .reclaim(address)
            .expect("the region was a transmit frame");
        self.frames.message_sent(
            &mut peer.eager_out,
            frame,
            put == Put::OnRing,
            token,
            tag,
            (u32::from(fragment.len), trailer_len),
            now_ns,
        );
    }

    /// Takes an acknowledgement of small messages. `false`: it acknowledges what was never sent.
    pub(crate) fn acknowledged(
        &mut self,
        peer: &mut Peer,
        id: PeerId,
        acknowledgement: &EagerAcknowledgement,
        now_ns: u64,
        settled: impl FnMut(Completion),
    ) -> bool {
        let (next, limit) = (acknowledgement.next, acknowledgement.limit);
        (self.frames).acknowledged(&mut peer.eager_out, id, next, limit, now_ns, settled)
    }

    /// Settles all small messages that a peer has not acknowledged, and numbers those to come anew.
    pub(crate) fn give_up(
        &mut self,
        peer: &mut Peer,
        id: PeerId,
        outcome: &Outcome,
        now_ns: u64,
        mut settled: impl FnMut(Completion),
    ) {
        let out = &mut peer.eager_out;
        while out.oldest.is_some() {
            (self.frames).settle_oldest(out, id, outcome.clone(), now_ns, &mut settled);
        }
        out.begin_anew(now_ns);
    }

    /// Sends a peer's unacknowledged messages again, oldest first, as far as there is room.
    pub(crate) fn resend(
        &mut self,
        side: &mut dyn Datagrams,
        memory: &mut PacketMemory,
        peer: &mut Peer,
        counters: &mut Counters,
        now_ns: u64,
    ) {
        let out = &mut peer.eager_out;
        let mut next = out.oldest;
        if next.is_none() {
            return;
        }
        out.resent_ns = now_ns;
        out.resends = out.resends.saturating_add(1);
        for _ in 0..EAGER_RESEND_MAX {
            let Some(frame) = next else { break };
            let (address, (len, trailer_len), in_kernel, following) = self.frames.unacknowledged(frame);
            next = following;
            if in_kernel {
                continue;
            }
            let Ok(geometry) = self.layout.message(u64::from(len)) else {
                break;
            };
            let packet = address + geometry.tx_frame_offset(0);
            let packet_len = u32::from(geometry.fragment(0).frame_len()) + trailer_len;
            if !self.scheduler.has_room(Class::Small) {
                break;
            }
            let small = Packet {
                address: packet,
                len: packet_len,
                below_lm_len: u32::from(geometry.fragment(0).header_len) - HEADER_LEN as u32,
            };
            // Where the peer is by now.
            memory.umem().copy_to(packet, &peer.addressing.dst_mac.0);
            match (self.scheduler).put_small(side, memory.umem(), peer.data, &small) {
                Put::OnRing => self.frames.sent_again(frame),
                Put::Copied => {}
                Put::Refused => {
                    counters.control_send_errors += 1;
                    break;
                }
            }
            memory.record(packet, packet_len);
            counters.eager_resent += 1;
            if let Some(outbound) = &mut peer.outbound {
                outbound.spend(Class::Small, 1, packet_len.into());
            }
            self.scheduler.shaping.left(Class::Small, 0, 1, packet_len.into());
        }
    }

    /// Sends one LM packet that is not a fragment, to the data address `data`. `false`: no room now; try again in a later round.
    pub(crate) fn send_packet(
        &mut self,
        side: &mut dyn Datagrams,
        memory: &mut PacketMemory,
        (addressing, data): (&Addressing, SocketAddrV4),
        header: &LmHeader,
        payload: &[u8],
    ) -> bool {
        self.let_flows_pass(memory);
        let mut frame = self.frame_for_control();
        if frame.is_none() {
            // A burst of packets with an answer each fills the ring, and copy mode sends 32 of them a wake-up.
            self.flush();
            self.reap(true, self.now_ns);
            frame = self.frame_for_control();
        }
        let Some(frame) = frame else {
            return false;
        };
        let mut headers = [0u8; 128];
        let header_len = addressing
            .write_headers(&mut headers, header, payload.len())
            .expect("128 bytes hold any header");
        let trailer = Trailer::new(header, payload, self.local);
        let parts = [&headers[..header_len], payload, trailer.as_bytes()];
        let len = parts.iter().map(|part| part.len() as u32).sum();
        // The frame behind this one is somebody else's.
        assert!(
            len <= self.packet_len_max,
            "control packets are shorter than a frame"
        );
        let address = frame.address();
        let mut at = address;
        for part in parts {
            memory.umem().copy_to(at, part);
            at += part.len() as u64;
        }
        let packet = Packet {
            address,
            len,
            below_lm_len: (header_len - HEADER_LEN) as u32,
        };
        self.scheduler.control_left(len);
        self.put_once(side, memory, frame, (data, &packet))
    }

    fn frame_for_control(&mut self) -> Option<Frame> {
        let has_room = self.scheduler.has_room(Class::Control);
        has_room.then(|| self.frames.take_for_control())?
    }

    /// Before a control packet: so that however many there are, flows wait for few.
    #[inline]
    fn let_flows_pass(&mut self, memory: &mut PacketMemory) {
        if self.scheduler.control_gives_way() {
            self.send_flows(memory, self.now_ns);
        }
    }

    /// Sends a control packet on a certain queue, if there is room.
    pub(crate) fn send_on_queue(&mut self, queue: usize, memory: &mut PacketMemory, packet: &[u8]) {
        self.let_flows_pass(memory);
        if self.scheduler.queue(queue).room(Class::Control) == 0 {
            return;
        }
        let Some(frame) = self.frames.take_for_control() else {
            return;
        };
        let address = frame.address();
        memory.umem().copy_to(address, packet);
        (self.scheduler).put_control_on(queue, memory.umem(), address, packet.len() as u32);
        self.frames.control_sent(frame);
    }

    /// Stage 7: sends fragments again that a receiver asked for, where they must not go to its landing queue. What does not leave is
    /// asked for again.
    pub(crate) fn send_repetitions(
        &mut self,
        side: &mut dyn Datagrams,
        memory: &mut PacketMemory,
        peer: &mut Peer,
        counters: &mut Counters,
        now_ns: u64,
    ) {
        for _ in 0..TRANSMIT_BURST {
            let Some(outbound) = &mut peer.outbound else {
                return;
            };
            if !outbound.has_repetitions_apart() {
                return;
            }
            let shaping = &mut self.scheduler.shaping;
            if shaping.take(Class::Bulk, 1, Time::from_nanos(now_ns)) == 0 {
                return;
            }
            let resent = outbound.resent;
            let next = outbound.next_repetition(&mut self.outgoing, now_ns);
            let header_len = peer.addressing.header_len() as u64;
            let bytes = next
                .as_ref()
                .map(|(_, payload)| header_len + payload.end - payload.start);
            shaping.left(Class::Bulk, 1, bytes.is_some().into(), bytes.unwrap_or(0));
            let Some((header, payload)) = next else {
                return;
            };
            counters.fragments_resent += outbound.resent - resent;
            if !self.send_apart(
                side,
                memory,
                (peer.data, &peer.addressing),
                (&header, payload),
                counters,
            ) {
                return;
            }
        }
    }

    /// Sends a fragment of the send region as a packet of its own: from a transmit frame, or through the kernel's socket where there
    /// is no general channel, or a frame is too short: how long fragments are is the receiver's to say. `false`: no room now.
    fn send_apart(
        &mut self,
        side: &mut dyn Datagrams,
        memory: &mut PacketMemory,
        (data, addressing): (SocketAddrV4, &Addressing),
        (header, payload): (&LmHeader, Range<u64>),
        counters: &mut Counters,
    ) -> bool {
        let payload_len = payload.end - payload.start;
        let len = addressing.header_len() as u64 + payload_len;
        if self.scheduler.general().is_none() || len > u64::from(self.packet_len_max) {
            let mut datagram = header.encode(payload_len as u16).to_vec();
            let header_len = datagram.len();
            datagram.resize(header_len + payload_len as usize, 0);
            memory
                .umem()
                .copy_from(payload.start, &mut datagram[header_len..]);
            counters.user_copied_bytes += payload_len;
            return side.send(Socket::Data, data, &datagram).is_ok();
        }
        if !self.scheduler.has_room(Class::Bulk) {
            return false;
        }
        let Some(frame) = self.frames.take_for_control() else {
            return false;
        };
        let mut headers = [0u8; 128];
        let header_len = addressing
            .write_headers(&mut headers, header, payload_len as usize)
            .expect("a fragment that was sent before");
        let address = frame.address();
        memory.umem().copy_to(address, &headers[..header_len]);
        memory
            .umem()
            .copy_within(payload.start, address + header_len as u64, payload_len);
        let packet = Packet {
            address,
            len: len as u32,
            below_lm_len: (header_len - HEADER_LEN) as u32,
        };
        counters.user_copied_bytes += payload_len;
        counters.data_packets_sent += 1;
        self.put_once(side, memory, frame, (data, &packet))
    }

    /// Sends a packet that lies in a transmit frame and that nobody will want again. `false`: it did not go.
    fn put_once(
        &mut self,
        side: &mut dyn Datagrams,
        memory: &mut PacketMemory,
        frame: Frame,
        (data, packet): (SocketAddrV4, &Packet),
    ) -> bool {
        let put = (self.scheduler).put_small(side, memory.umem(), data, packet);
        memory.record(packet.address, packet.len);
        match put {
            Put::OnRing => self.frames.control_sent(frame),
            Put::Copied | Put::Refused => self.frames.put(frame),
        }
        put != Put::Refused
    }
}
