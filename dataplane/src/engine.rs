//! The poll engine: all state of an endpoint and the fixed order of its stages. Nothing here blocks.
//!
//! ```text
//!  poll(now):  1 packets of flows that are due (sending.rs); memory that the application gave back
//!              2 TX completions (late, in bulk)
//!              3 general channel: eager messages, acknowledgements, announcements, credits  (packets.rs); the rest waits
//!                while somebody waits for the application's answer to what came
//!              4 landing channel: fragments                                       (landing.rs)
//!              5 the admission daemon's news, where there is one        (daemon_sessions.rs); kernel UDP sockets:
//!                admission, and what the gate passed on                       (packets.rs, control.rs); handlers that are due
//!              6 what time brings to messages with losses (losses.rs); fill entries for announced messages, free
//!                general frames; what may be read of messages that are arriving                       (watching.rs)
//!              7 acknowledgements and credits that are due, announcements         (telling.rs)
//!              8 fragments within credit                                          (sending.rs)
//!              9 flush: one wake-up per channel
//!             10 timers
//! ```
//! Receiving comes before sending, so that a credit is used in the round that it came in.

use std::net::SocketAddrV4;

use lm_protocol::geometry::{Layout, LinkShape};
use lm_protocol::integrity::Integrity;
use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::LmHeader;

use crate::admission::Admissions;
use crate::bounds::{InFlight, OnTheWay, RECEIVE_BURST, RECEIVE_STEP};
use crate::checksum::Checksum;
use crate::counters::Counters;
use crate::landing_side::LandingSide;
use crate::looks::{CONTROL_PER_LOOK, DATAGRAMS_PER_LOOK, Looks};
use crate::memory::PACKET_HEADROOM;
use crate::message::Message;
use crate::notices::{Fault, NOBODY, Notices};
use crate::packet_memory::PacketMemory;
use crate::peer::Peers;
use crate::port::{Caps, Port, RxQueue};
use crate::release::Released;
use crate::sending::Sending;
use crate::small::Small;
use crate::told::Told;

/// How long the engine waits for more before it acknowledges what came, in nanoseconds: shorter than a round
/// trip through a sleeping kernel, longer than the gap between packets of one burst.
pub(crate) const ACKNOWLEDGE_AFTER_NS: u64 = 20_000;
/// So long at most when there is other work in every round.
pub(crate) const ACKNOWLEDGE_LATEST_NS: u64 = 500_000;

/// Constants of the endpoint, fixed at open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fixed {
    /// Address and data port.
    pub(crate) local: SocketAddrV4,
    pub(crate) sender_id: u64,
    pub(crate) mac: MacAddr,
    pub(crate) link: LinkShape,
    pub(crate) mtu: u16,
    /// Layout of messages of one fragment that go without a session: as `mtu` has it, as far as that fits one frame.
    pub(crate) layout: Layout,
    pub(crate) chunk_len: u32,
    /// What the device is like.
    pub(crate) caps: Caps,
    /// Where datagrams longer than a frame are received, in that case.
    pub(crate) datagram: u64,
    /// What is done so that nobody takes what is sent for something else.
    pub(crate) integrity: Integrity,
    pub(crate) checksum: Checksum,
    /// For how long a peer may be silent.
    pub(crate) patience_ns: u64,
    /// The device reads and writes the UMEM itself, whether messages land here or not.
    pub(crate) device_moves: bool,
    /// As [`crate::port::Caps::kept_frames`]; 0 in copy mode.
    pub(crate) kept_frames: u32,
    /// Handed to the driver and not yet completed, per channel.
    pub(crate) tx_in_flight: InFlight,
    /// What a channel that only sends registers: everything before the landing arena.
    pub(crate) transmit_registered_len: u64,
    pub(crate) receives: Receives,
}

/// On which terms an endpoint receives messages of many fragments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receives {
    /// Which transmit queue of a veth peer reaches our landing queue: the same number. In generic mode nothing lands.
    pub(crate) tx_queue: Option<u16>,
    pub(crate) on_the_way: OnTheWay,
    /// And no more than fill the path.
    pub(crate) adapts: bool,
    pub(crate) ring_len: u32,
    pub(crate) max_message_len: u64,
    /// Landing memory of a session at least.
    pub(crate) landing_len: u64,
    /// IP fragments may land in zero-copy mode.
    pub(crate) exclusive: bool,
    /// In copy mode, where zero-copy mode turns out to be impossible.
    pub(crate) may_copy: bool,
}

/// All state of an endpoint.
pub(crate) struct Engine<P: Port> {
    pub(crate) port: P,
    pub(crate) fixed: Fixed,
    pub(crate) memory: PacketMemory,
    pub(crate) small: Small<P::Rx>,
    pub(crate) sending: Sending<P::Tx>,
    pub(crate) landing: Option<LandingSide<P::Rx>>,
    pub(crate) peers: Peers,
    pub(crate) admission: Admissions,
    pub(crate) told: Told,
    pub(crate) counters: Counters,
    pub(crate) notices: Notices,
    pub(crate) looks: Looks,
}

impl<P: Port> Engine<P> {
    /// One round of all stages. Returns the number of packets and events handled: 0 means idle.
    pub(crate) fn poll(&mut self, now_ns: u64) -> usize {
        if self.looks.begin(now_ns) {
            self.forgive_pause(now_ns);
        }
        let mut work = (self.sending).send_due(&mut self.small, &mut self.memory, now_ns);
        work += self.take_back();
        work += self.sending.reap(false, now_ns);
        self.poll_queues();
        let packets = self.receive_general(now_ns);
        work += packets;
        if packets > 0 && self.answers_first(now_ns) {
            return work;
        }
        let fragments = self.receive_landing(now_ns);
        work += fragments;
        if fragments > 0 && self.answers_first(now_ns) {
            return work;
        }
        self.small.stream.takes_time();
        self.small.apart.takes_time();
        work += self.look_at_sockets(now_ns);
        self.tick_handlers(now_ns);
        self.care(now_ns);
        self.land_drained(now_ns);
        self.replenish();
        self.show_windows(now_ns);
        self.tell(now_ns, work == 0);
        let (peers, small, memory) = (&mut self.peers, &mut self.small, &mut self.memory);
        work += (self.sending).send_fragments(peers, small, memory, &mut self.counters, now_ns);
        self.sending.flush();
        if work == 0 {
            work += self.sending.reap(true, now_ns);
        }
        if self.looks.wants_timers(now_ns) {
            self.run_timers(now_ns);
        }
        work
    }

    /// Whether the rest of the round can wait: it brought a message that is part of an exchange, and its sender waits for the
    /// application's answer, or for that to a handler's packet.
    fn answers_first(&mut self, now_ns: u64) -> bool {
        let took = std::mem::take(&mut self.small.handlers.took);
        (self.told.has_message() && self.small.stream.hurries(now_ns))
            || (took && self.small.apart.hurries(now_ns))
    }

    /// Looks for packets of the general channel for less than a microsecond, if nothing else is to be done: a look takes a tenth of a
    /// round, and a message would wait for half of one.
    pub(crate) fn linger(&mut self) {
        let lands = (self.landing.as_ref()).is_some_and(|landing| landing.sessions.awaits_packets());
        let is_idle = !lands && self.sending.is_idle() && !self.small.stream.is_hot();
        let expects_ahead = |landing: &&mut LandingSide<P::Rx>| landing.sessions.entries.standing() > 0;
        let landing = self.landing.as_mut().filter(expects_ahead);
        match is_idle && self.small.queue().is_some() {
            true => self.small.linger(landing.map(|landing| &mut landing.rx)),
            false => std::hint::spin_loop(),
        }
    }

    /// The application did not poll for a while. What came meanwhile may be more than one round takes, and a sender
    /// may have waited for our credit: nobody is late yet. Only the first of several long rounds is forgiven.
    fn forgive_pause(&mut self, now_ns: u64) {
        if let Some(landing) = &mut self.landing {
            (landing.sessions.iter_mut()).for_each(|inbound| inbound.progress.forgive_pause(now_ns));
        }
    }

    /// Stage 1.
    fn take_back(&mut self) -> usize {
        let mut count = 0;
        while let Some(released) = self.memory.next_returned() {
            count += 1;
            match released {
                // Most are these, and need no call.
                Released::GeneralFrame(address) => self.small.recover(address),
                _ => self.recover(released),
            }
        }
        count
    }

    /// Puts memory that nobody uses any more back where it came from.
    pub(crate) fn recover(&mut self, released: Released) {
        match released {
            Released::GeneralFrame(address) => {
                self.small.recover(address);
            }
            Released::Zone { start, len } => {
                if let Some(landing) = &mut self.landing {
                    landing.arena.free(start, len);
                }
            }
            Released::Hold(id) => self.let_go(id),
            Released::TransmitFrame(address) => {
                self.sending.recover_frame(address);
            }
            Released::SendRegion { start, len } => self.sending.recover_region(start, len),
            Released::Writer(slot) => self.sending.writer_is_gone(slot),
        }
    }

    /// Stage 3: takes packets of the general channel. A frame either becomes a message or goes back at once.
    fn receive_general(&mut self, now_ns: u64) -> usize {
        let Some(packets) = self.small.available(RECEIVE_BURST) else {
            return 0;
        };
        let shows_footprint = (self.landing.as_ref()).is_some_and(|landing| landing.footprint.is_sought());
        for offset in 0..packets {
            let Some((descriptor, frame)) = self.small.packet(offset) else {
                break;
            };
            let Some(frame) = frame else {
                self.reject(Fault::Frame, NOBODY);
                continue;
            };
            if shows_footprint {
                self.look_at_footprint(frame.address(), (descriptor.start(), descriptor.len));
            }
            self.counters.general_packets += 1;
            self.take_packet(frame, descriptor.start(), descriptor.len, now_ns);
        }
        self.small.release(packets);
        packets as usize
    }

    /// Stage 4. Beside flows small packets and what is due wait for few fragments, not for a whole round's.
    pub(crate) fn receive_landing(&mut self, now_ns: u64) -> usize {
        let step = match self.sending.has_flows() {
            true => RECEIVE_STEP,
            false => RECEIVE_BURST,
        };
        let mut count = 0;
        loop {
            let fragments = self.receive_fragments(step, now_ns);
            count += fragments;
            if fragments < step as usize
                || count >= RECEIVE_BURST as usize
                || self.small.has_come()
                || self.sending.flows_are_due(now_ns)
            {
                return count;
            }
        }
    }

    /// Takes `most` fragments at most, checks what I3 asks for, and makes messages of what is whole.
    fn receive_fragments(&mut self, most: u32, now_ns: u64) -> usize {
        let Some(landing) = &mut self.landing else {
            return 0;
        };
        // In zero-copy mode what comes between sessions uses frames that are left of the last one.
        if landing.sessions.is_empty() && self.fixed.caps.witness {
            return 0;
        }
        let (sessions, rx, mut memory) = landing.with_memory();
        let (umem, memory) = (self.memory.umem(), &mut memory);
        let burst = match sessions.receive(rx, (umem, memory), most, now_ns) {
            Ok(burst) => burst,
            Err(violation) if !self.fixed.caps.witness => {
                // Which entry comes next is not known any more. What the digests have proved stays.
                self.counters.violations.count(violation);
                let registered_len = landing.registered_len;
                if let Err(what) = self.rebuild_under_sessions(registered_len) {
                    tracing::debug!("the landing channel is not built anew: {what}");
                }
                return 1;
            }
            Err(violation) => {
                self.abort_landing(violation);
                return 1;
            }
        };
        if burst.packets == 0 {
            return 0;
        }
        landing.flow.landed(burst.packets);
        if burst.window_ended || (landing.sessions.iter()).any(|inbound| inbound.settled.has_landed()) {
            self.show_landed(now_ns);
        }
        burst.packets as usize
    }

    /// Gives whole messages to the application, if no packet was dropped between the gate and the ring (I3): one look
    /// per burst, before anything of it is shown.
    pub(crate) fn show_landed(&mut self, now_ns: u64) {
        let Some(landing) = &mut self.landing else { return };
        if !self.fixed.caps.witness {
            // A packet for which there was no entry is only lost, and a digest proves what is shown.
            self.deliver_landed(now_ns);
            return;
        }
        if landing.rx.drops() == landing.drops {
            self.deliver_landed(now_ns);
        } else {
            self.abort_landing(crate::landing::Violation::Statistics);
        }
    }

    fn deliver_landed(&mut self, now_ns: u64) {
        let Some(landing) = &mut self.landing else { return };
        for row in landing.sessions.taken() {
            let Some(inbound) = landing.sessions.at_mut(row) else {
                continue;
            };
            while let Some(mut landed) = inbound.next_landed() {
                if let Some(reader) = landed.reader.take() {
                    reader.landed(landed.missing.is_empty());
                }
                if let (umem, Some(capture)) = self.memory.with_capture() {
                    let addressing = self.peers.at(inbound.terms.peer.index).addressing.reversed();
                    capture.landed(umem, &addressing, &inbound.terms, &landed);
                }
                let missing = landed.missing_bytes(&inbound.terms.layout);
                for range in &missing {
                    // What lies there is an earlier message's, perhaps another sender's.
                    self.memory
                        .umem()
                        .zero(landed.address + range.start, range.end - range.start);
                    self.counters.missing_bytes += range.end - range.start;
                }
                self.counters.messages_received += 1;
                self.counters.fragments_delivered += landed.arrived;
                self.counters.bytes_received += landed.len;
                let message = Message {
                    loaned: self.memory.way_back(),
                    released: Some(Released::Zone {
                        start: landed.zone.start,
                        len: landed.zone.len,
                    }),
                    address: landed.address,
                    len: landed.len,
                    peer: inbound.terms.peer,
                    tag: landed.tag,
                    number: landed.number,
                    missing,
                    latency_ns: now_ns.saturating_sub(landed.announced_ns),
                };
                if inbound.is_exchange() {
                    self.small.stream.message_came();
                }
                let placing = landing.placing.as_mut().filter(|_| landed.zone.placed);
                match placing {
                    None => self.told.received(message),
                    Some(placing) => placing.landed(message).into_iter().for_each(|message| {
                        self.told.received(message);
                    }),
                }
            }
            let edges = std::mem::take(&mut inbound.places.edges);
            self.counters.restored_bytes += edges.restored_bytes;
            self.counters.page_end_fragments += edges.page_ends;
        }
        self.take_credits_behind(now_ns);
    }

    /// Stage 5.
    fn look_at_sockets(&mut self, now_ns: u64) -> usize {
        if !self.fixed.caps.witness {
            self.take_foreign(now_ns);
        }
        let news = match self.admission.stewarded.has_news(now_ns) {
            true => self.look_at_daemon(now_ns),
            false => 0,
        };
        news + self.look_at_udp_sockets(now_ns)
    }

    fn look_at_udp_sockets(&mut self, now_ns: u64) -> usize {
        // Nothing that comes this way is in a hurry, unless there is no general channel.
        let repairs =
            (self.landing.as_ref()).is_some_and(|landing| landing.sessions.awaits_datagrams(now_ns));
        if !(self.looks).wants_count(repairs || self.small.queue().is_none(), now_ns) {
            return 0;
        }
        let (passed, seldom) = (self.port.passed_count(), self.sending.has_flows());
        if !self.looks.wants_sockets(passed, seldom, now_ns) {
            self.found_socket_empty(now_ns);
            return 0;
        }
        let datagrams = self.receive_data_datagrams(now_ns);
        let control = self.receive_control(now_ns);
        if datagrams >= DATAGRAMS_PER_LOOK || control >= CONTROL_PER_LOOK {
            self.looks.more_waits();
        }
        if datagrams < DATAGRAMS_PER_LOOK {
            self.found_socket_empty(now_ns);
        }
        datagrams + control
    }

    /// Nothing waits in the data socket, and the gate has passed nothing on since it was read.
    fn found_socket_empty(&mut self, now_ns: u64) {
        if let Some(landing) = &mut self.landing {
            landing.sessions.entries.found_socket_empty(now_ns);
        }
    }

    /// Stage 6.
    fn replenish(&mut self) {
        let (landing, umem) = (&mut self.landing, self.memory.umem());
        self.small.replenish(self.peers.len(), |frame| {
            if let Some(landing) = landing
                && let Some(probe) = landing.footprint.sought()
            {
                umem.copy_to(frame, probe.prepare(frame));
            }
        });
        if let Some(landing) = &mut self.landing
            && !landing.sessions.is_empty()
        {
            if landing.placing.is_some() {
                landing.settle_placed(&mut self.counters, self.memory.umem(), self.looks.now_ns());
            }
            if self.fixed.device_moves {
                let (entries, ring_len) = (&mut landing.sessions.entries, self.fixed.kept_frames / 2);
                entries.look_at_card(&mut landing.rx, ring_len, self.looks.now_ns());
            }
            // Memory is posted when packets may come for it, not when its message is announced: what was freed last is
            // then used again while it is in the cache.
            let (sessions, rx, memory) = landing.with_memory();
            sessions.post(rx, memory, self.memory.umem(), self.looks.now_ns());
        }
        if self.fixed.device_moves {
            self.wake_receivers();
        }
    }

    /// Wakes drivers that have no entries while there are some: they take them when a packet comes, and without entries none does.
    /// Asked in every round, because a driver that finds the ring empty asks to be woken without looking again.
    fn wake_receivers(&mut self) {
        let general = self.small.receiver();
        let landing = self.landing.as_mut();
        let landing = landing.map(|landing| (&mut landing.rx, &mut landing.woken));
        for (rx, woken) in general.into_iter().chain(landing) {
            let untaken = rx.untaken();
            if untaken.count > 0 && (!*woken || untaken.needs_wakeup) {
                // The first entries of a new channel come after its driver looked for some.
                *woken = true;
                if let Err(error) = rx.wake() {
                    self.sending.link_failed(error);
                }
            }
        }
    }

    /// Counts a packet that is dropped, and says so if it is the first of its kind.
    pub(crate) fn reject(&mut self, fault: Fault, from: SocketAddrV4) {
        if let Some(counter) = fault.counter(&mut self.counters.drops) {
            *counter += 1;
        }
        self.notices.tell(fault, from);
    }

    /// Drops a packet for the session or request `number`, which there is not: it is late, or `fault`.
    pub(crate) fn reject_for(&mut self, number: u64, fault: Fault, from: SocketAddrV4) {
        match self.notices.is_past(number) {
            true => self.counters.drops.late += 1,
            false => self.reject(fault, from),
        }
    }

    /// When a handler is due, or a shaper lets the next packet go; `None` where none holds one back.
    pub(crate) fn next_departure_ns(&mut self) -> Option<u64> {
        let departure = self.sending.next_departure(&mut self.peers);
        let next = [departure, self.small.handlers.due()].into_iter().flatten().min();
        next.map(Time::as_nanos)
    }

    /// Sends one LM packet that is not a fragment. `false`: no room now; try again in a later round.
    pub(crate) fn send_packet(&mut self, peer: u16, header: &LmHeader, payload: &[u8]) -> bool {
        let peer = self.peers.at(peer);
        let to = (&peer.addressing, peer.data);
        (self.sending).send_packet(self.port.side(), &mut self.memory, to, header, payload)
    }

    /// Addressing of packets to `data`, whose next hop has the address `mac`.
    pub(crate) fn addressing_to(&self, data: std::net::SocketAddrV4, mac: [u8; 6]) -> Addressing {
        let local = self.fixed.local;
        Addressing {
            src_mac: self.fixed.mac,
            dst_mac: MacAddr(mac),
            vlan: None,
            src_ip: *local.ip(),
            dst_ip: *data.ip(),
            src_port: local.port(),
            dst_port: data.port(),
        }
    }
}

/// Where a general packet begins when its frame is posted at `frame`.
pub(crate) const fn packet_start(frame: u64) -> u64 {
    frame + PACKET_HEADROOM
}
