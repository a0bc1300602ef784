//! Sending: fragments within credit, session by session (stage 8), one wake-up for each queue (stage 9), and packets that are no fragments.

use std::net::SocketAddrV4;

use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::lm::{HEADER_LEN, LmHeader, Trailer};

use crate::bounds::TRANSMIT_BURST;
use crate::engine::{Engine, General};
use crate::frames::Frame;
use crate::memory::Umem;
use crate::outbound::{Copied, Way};
use crate::port::{Port, RxQueue};
use crate::scheduler::{Class, Packet, Put, Turn};

impl<P: Port> Engine<P> {
    /// Stage 8.
    pub(crate) fn send_fragments(&mut self, now_ns: u64) -> usize {
        let flows = match self.scheduler.has_flows() {
            true => self.send_flows(now_ns),
            false => 0,
        };
        if self.senders.is_empty() {
            return flows;
        }
        if let Err(error) = self.scheduler.flush_before_bulk() {
            self.link.failed(error);
        }
        let (most, burst) = self.scheduler.bulk_of_round(self.stream.is_exchange(now_ns));
        let sent = match self.senders[..] {
            // It takes turns with nobody.
            [only] => self.send_of(only, None, most, burst, now_ns).packets,
            _ => self.send_by_turns(most, burst, now_ns),
        };
        self.counters.data_packets_sent += u64::from(sent);
        flows + sent as usize
    }

    /// Stage 8, first: packets of flows, which wait for no burst.
    #[cold]
    fn send_flows(&mut self, now_ns: u64) -> usize {
        let (capture, umem) = (&mut self.capture, &self.umem);
        let sent = self
            .scheduler
            .send_flows(umem, Time::from_nanos(now_ns), |address, len| {
                if let Some(capture) = capture {
                    capture.sent(umem, address, len);
                }
            });
        sent.map_or_else(
            |error| {
                self.link.failed(error);
                0
            },
            |count| count as usize,
        )
    }

    /// Sends up to `most` fragments on each queue, where sessions take turns. If something comes meanwhile, the next round begins with the
    /// queue behind.
    fn send_by_turns(&mut self, most: u32, burst: u32, now_ns: u64) -> u32 {
        let queues = self.scheduler.queues().len();
        let first = self.scheduler.first;
        let mut count = 0;
        for queue in (first..queues).chain(0..first) {
            count += self.send_on(queue, most, burst, now_ns);
            self.scheduler.first = (queue + 1) % queues;
            if self.has_come() {
                break;
            }
        }
        count
    }

    /// Sends up to `most` fragments of the sessions of a queue, a burst of each in turn: deficit round robin. The next round goes on with
    /// the session whose turn is not over, and with what is left of it.
    fn send_on(&mut self, queue: usize, most: u32, burst: u32, now_ns: u64) -> u32 {
        let turn = self.scheduler.queue(queue).turn.take();
        let is_next = |&index: &u16| turn.is_some_and(|turn| turn.peer == index);
        let first = turn.and_then(|_| self.senders.iter().position(is_next));
        let senders = self.senders.len();
        let first_at = first.unwrap_or(0);
        let mut count = 0;
        for step in 0..senders {
            let index = self.senders[(first_at + step) % senders];
            let left = match turn {
                Some(turn) if first.is_some() && step == 0 => turn.left,
                _ => TRANSMIT_BURST,
            };
            let sent = self.send_of(index, Some(queue), left.min(most - count), burst, now_ns);
            count += sent.packets;
            if sent.is_cut || count == most {
                let left = left - sent.packets;
                let next = self.senders[(first_at + step + 1) % senders];
                self.scheduler.queue(queue).turn = Some(match left {
                    0 => Turn {
                        peer: next,
                        left: TRANSMIT_BURST,
                    },
                    _ => Turn { peer: index, left },
                });
                break;
            }
        }
        count
    }

    /// Sends up to `most` fragments of a peer's session in bursts, if `on` is the queue that it sends on.
    fn send_of(&mut self, index: u16, on: Option<usize>, most: u32, burst: u32, now_ns: u64) -> Sent {
        let outbound = self.peers.at(index).outbound.as_mut();
        let is_it = |queue: usize| on.is_none_or(|on| on == queue);
        let Some(outbound) = outbound.filter(|outbound| is_it(outbound.terms.channel)) else {
            return Sent::default();
        };
        let (channel, shaping) = self.scheduler.for_bulk(outbound.terms.channel);
        // Who has nothing to send waits for no shaper.
        if shaping.is_any() && !outbound.has_fragments() {
            return Sent::default();
        }
        let mut way = Way {
            channel,
            umem: &self.umem,
            piece_len: self.fixed.chunk_len,
            more_pieces: 0,
            bytes: 0,
            frames: &mut self.transmit_frames,
            device_reads: self.fixed.device_moves,
            copied: Copied::default(),
        };
        let mut capture = (self.capture.as_mut())
            .map(|capture| |umem: &Umem, address, len| capture.sent(umem, address, len));
        let resent = outbound.resent;
        let mut sent = Sent::default();
        let now = Time::from_nanos(now_ns);
        // A burst of long packets, each of several descriptors, has fewer of them.
        for _ in 0..most.div_ceil(burst) {
            let allowed = shaping.take(Class::Bulk, burst.min(most - sent.packets), now);
            if allowed == 0 {
                self.counters.classes_starved += shaping.take_starved();
                sent.is_cut = true;
                break;
            }
            let heard = capture.as_mut().map(|heard| heard as _);
            let packets = outbound.transmit(&mut self.outgoing, &mut way, allowed, now_ns, heard);
            shaping.left(Class::Bulk, allowed, packets, std::mem::take(&mut way.bytes));
            if packets == 0 {
                break;
            }
            sent.packets += packets;
            if let Err(error) = way.channel.flush() {
                self.link.failed(error);
            }
            sent.is_cut = has_come(&mut self.general);
            if sent.is_cut {
                break;
            }
        }
        self.counters.user_copied_bytes += way.copied.bytes;
        self.counters.page_end_fragments += way.copied.fragments;
        self.counters.fragments_resent += outbound.resent - resent;
        let frame_len = u32::from(outbound.terms.layout.max_frame_len());
        sent.is_cut |=
            sent.packets < most && way.channel.room(Class::Bulk) < frame_len.div_ceil(self.fixed.chunk_len);
        sent
    }

    /// Whether small packets have come since the round looked for some: what they ask for goes before the next burst.
    fn has_come(&mut self) -> bool {
        has_come(&mut self.general)
    }

    /// When a shaper lets the next packet go; `None` where none holds one back.
    pub(crate) fn next_departure_ns(&mut self) -> Option<u64> {
        let mut next = [self.scheduler.flows_depart(), self.handlers.due()]
            .into_iter()
            .flatten()
            .min();
        for &index in &self.senders {
            let Some(outbound) = self.peers.at(index).outbound.as_ref() else {
                continue;
            };
            let class = match outbound.has_fragments() {
                true => Class::Bulk,
                false => Class::Small,
            };
            // All of them have to let it go.
            let departures = [outbound.departs(class), self.scheduler.shaping.next(class)];
            let departure = departures.into_iter().flatten().max();
            next = next.into_iter().chain(departure).min();
        }
        next.map(Time::as_nanos)
    }

    /// Calls handlers that are due.
    pub(crate) fn tick_handlers(&mut self, now_ns: u64) {
        if self.handlers.tick(Time::from_nanos(now_ns)) {
            self.send_replies();
        }
    }

    /// Sends what handlers reply.
    pub(crate) fn send_replies(&mut self) {
        let mut replies = std::mem::take(&mut self.handlers.replies);
        replies.drain(|to, header, payload| {
            if self.peers.named(to).is_none() || !self.send_packet(to.index, header, payload) {
                self.counters.control_send_errors += 1;
            }
        });
        self.handlers.replies = replies;
    }

    /// Stage 9.
    pub(crate) fn flush(&mut self) {
        self.scheduler.flush(|error| self.link.failed(error));
    }

    /// Sends one LM packet that is not a fragment. `false`: no room now; try again in a later round.
    pub(crate) fn send_packet(&mut self, peer: u16, header: &LmHeader, payload: &[u8]) -> bool {
        let peer = self.peers.at(peer);
        let (addressing, data) = (peer.addressing, peer.data);
        self.send_packet_to(&addressing, data, header, payload)
    }

    /// The same to an address that no peer need have.
    pub(crate) fn send_packet_to(
        &mut self,
        addressing: &Addressing,
        data: SocketAddrV4,
        header: &LmHeader,
        payload: &[u8],
    ) -> bool {
        if !self.scheduler.has_room(Class::Control) {
            return false;
        }
        let Some(frame) = self.transmit_frames.take_for_control() else {
            return false;
        };
        let mut headers = [0u8; 128];
        let header_len = addressing
            .write_headers(&mut headers, header, payload.len())
            .expect("128 bytes hold any header");
        let trailer = Trailer::new(header, payload, self.fixed.local);
        let parts = [&headers[..header_len], payload, trailer.as_bytes()];
        let len = parts.iter().map(|part| part.len() as u32).sum();
        // The frame behind this one is somebody else's.
        assert!(
            len <= self.fixed.chunk_len,
            "control packets are shorter than a frame"
        );
        let address = frame.address();
        let mut at = address;
        for part in parts {
            self.umem.copy_to(at, part);
            at += part.len() as u64;
        }
        let packet = Packet {
            address,
            len,
            below_lm_len: (header_len - HEADER_LEN) as u32,
        };
        self.scheduler.shaping.left(Class::Control, 0, 1, len.into());
        self.put_once(frame, data, &packet)
    }

    /// Sends a packet that lies in a transmit frame and that nobody will want again. `false`: it did not go.
    pub(crate) fn put_once(&mut self, frame: Frame, data: SocketAddrV4, packet: &Packet) -> bool {
        if let Some(capture) = &mut self.capture {
            capture.sent(&self.umem, packet.address, packet.len);
        }
        let put = (self.scheduler).put_small(self.port.side(), &self.umem, data, packet);
        match put {
            Put::OnRing => self.transmit_frames.control_sent(frame),
            Put::Copied | Put::Refused => self.transmit_frames.put(frame),
        }
        put != Put::Refused
    }
}

/// What left of a session in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    packets: u32,
    /// It might have gone on: the queue has no room, a shaper of all sessions allows no more, or something has come.
    is_cut: bool,
}

#[inline]
fn has_come<R: RxQueue>(general: &mut Option<General<R>>) -> bool {
    general
        .as_mut()
        .is_some_and(|general| general.rx.available(1) > 0)
}
