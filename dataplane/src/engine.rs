//! The poll engine: all state of an endpoint and the fixed order of its stages. Nothing here blocks.
//!
//! ```text
//!  poll(now):  1 memory that the application gave back
//!              2 TX completions (late, in bulk)
//!              3 general channel: eager messages, acknowledgements, announcements, credits  (packets.rs); the rest waits
//!                while somebody waits for the application's answer to what came
//!              4 landing channel: fragments                                       (landing.rs)
//!              5 the admission daemon's news, where there is one              (stewarded.rs); kernel UDP sockets:
//!                admission, and what the gate passed on                       (packets.rs, control.rs); handlers that are due
//!              6 what time brings to messages with losses (losses.rs); fill entries for announced messages, free
//!                general frames
//!              7 acknowledgements and credits that are due, announcements         (telling.rs)
//!              8 fragments within credit                                          (sending.rs)
//!              9 flush: one wake-up per channel
//!             10 timers
//! ```
//! Receiving comes before sending, so that a credit is used in the round that it came in.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use lm_cards::Probe;
use lm_protocol::geometry::{Layout, LinkShape};
use lm_protocol::time::Time;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;

use crate::arena::Arena;
use crate::bounds::{GENERAL_FRAMES_FOR_SOCKET, OnTheWay};
use crate::capture::Capture;
use crate::completion::PeerId;
use crate::config::EndpointConfig;
use crate::control::{Applying, CONTROL_PER_LOOK, Held};
use crate::counters::Counters;
use crate::eager::EAGER_CREDIT;
use crate::eager::TransmitFrames;
use crate::entropy::Entropy;
use crate::frames::FramePool;
use crate::granting::Past;
use crate::handlers::Handlers;
use crate::introductions::Introductions;
use crate::landing::{Sessions, Zone};
use crate::link::Link;
use crate::looks::Looks;
use crate::memory::{PACKET_HEADROOM, Umem};
use crate::message::Message;
use crate::notices::{Fault, Notices};
use crate::outbound::OutgoingTable;
use crate::own_node::OwnNode;
use crate::packets::DATAGRAMS_PER_LOOK;
use crate::peer::Peers;
use crate::polling::Flow;
use crate::port::{Caps, Port, QueueDrops, RxQueue};
use crate::release::{Loaned, Released};
use crate::scheduler::{Scheduler, Vacated};
use crate::stewarded::Stewarded;
use crate::stream::Stream;
use crate::told::Told;

/// General frames posted beside those that the peers' eager credits cover, for control packets; few enough to stay in the
/// cache.
const GENERAL_FRAMES_SPARE: u32 = 128;

/// Packets taken from an RX ring in one round, so that no stage starves the others.
pub(crate) const RECEIVE_BURST: u32 = 256;

/// How long the engine waits for more before it acknowledges what came, in nanoseconds: shorter than a round
/// trip through a sleeping kernel, longer than the gap between packets of one burst.
pub(crate) const ACKNOWLEDGE_AFTER_NS: u64 = 20_000;
/// So long at most when there is other work in every round.
pub(crate) const ACKNOWLEDGE_LATEST_NS: u64 = 500_000;
/// Looks for packets between two idle rounds: some 20 ns each, with what the processor waits in `spin_loop`.
const LOOKS_MAX: u32 = 16;
/// Receive side of the general channel.
#[derive(Debug)]
pub(crate) struct General<R> {
    pub(crate) rx: R,
    /// Packets received, counted as the gate counts them.
    pub(crate) received: u64,
    /// Frames ever posted, counted likewise: in zero-copy mode the gate redirects so many packets, without those that are kept for
    /// the driver.
    pub(crate) posted: u64,
    /// The driver was woken since the channel was opened.
    pub(crate) woken: bool,
}

/// Receive side of the landing channel.
#[derive(Debug)]
pub(crate) struct LandingSide<R> {
    pub(crate) queue: u32,
    pub(crate) rx: R,
    pub(crate) arena: Arena,
    /// Regions that the application chose for its next messages.
    pub(crate) chosen: VecDeque<Zone>,
    pub(crate) sessions: Sessions,
    pub(crate) past: Past,
    pub(crate) drops: QueueDrops,
    pub(crate) registered_len: u64,
    /// It has a socket. If not, nothing lands until it has one again.
    pub(crate) is_open: bool,
    /// When memory to land in was last wanted that could not be had, or a socket; and memory for the one-copy path.
    pub(crate) failed_ns: [Option<u64>; 2],
    /// Its transmit side, for the scheduler.
    pub(crate) transmit: usize,
    /// The driver was woken since the channel was opened.
    pub(crate) woken: bool,
    pub(crate) flow: Flow,
}

/// Constants of the endpoint, fixed at open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fixed {
    /// Address and data port.
    pub(crate) local: SocketAddrV4,
    pub(crate) sender_id: u64,
    pub(crate) mac: MacAddr,
    /// Which transmit queue of a veth peer reaches our landing queue: the same number in native mode, one more
    /// in generic mode (veth leaves `queue_mapping`, and `skb_get_rx_queue` takes one off).
    pub(crate) tx_queue: Option<u16>,
    pub(crate) link: LinkShape,
    pub(crate) mtu: u16,
    /// Layout of messages of one fragment that go without a session: as `mtu` has it, as far as that fits one frame.
    pub(crate) layout: Layout,
    pub(crate) chunk_len: u32,
    /// What the device is like.
    pub(crate) caps: Caps,
    /// Where datagrams longer than a frame are received, in that case.
    pub(crate) datagram: u64,
    pub(crate) window: WindowShape,
    pub(crate) one_processor: bool,
    /// The device reads and writes the UMEM itself, whether messages land here or not.
    pub(crate) device_moves: bool,
    /// As [`crate::port::Caps::kept_frames`]; 0 in copy mode.
    pub(crate) kept_frames: u32,
    /// Packets handed to the driver and not yet completed, per channel.
    pub(crate) tx_in_flight: u32,
    pub(crate) on_the_way: OnTheWay,
    pub(crate) landing_ring_len: u32,
    /// What a channel that only sends registers: everything before the landing arena.
    pub(crate) transmit_registered_len: u64,
}

/// All state of an endpoint.
pub(crate) struct Engine<P: Port> {
    pub(crate) port: P,
    pub(crate) config: EndpointConfig,
    pub(crate) fixed: Fixed,
    pub(crate) umem: Umem,
    pub(crate) loaned: Arc<Loaned>,
    pub(crate) frames: FramePool,
    /// General frames that are messages now.
    pub(crate) frames_held: u32,
    pub(crate) transmit_frames: TransmitFrames,
    pub(crate) send_arena: Arena,
    pub(crate) outgoing: OutgoingTable,
    pub(crate) scheduler: Scheduler<P::Tx>,
    pub(crate) handlers: Handlers,
    pub(crate) general: Option<General<P::Rx>>,
    pub(crate) landing: Option<LandingSide<P::Rx>>,
    pub(crate) peers: Peers,
    /// Peers with an outbound session.
    pub(crate) senders: Vec<u16>,
    /// Peers that are owed an acknowledgement of eager messages.
    pub(crate) acknowledge: VecDeque<u16>,
    /// Peers with eager messages unacknowledged by them.
    pub(crate) unconfirmed: Vec<u16>,
    pub(crate) applying: Vec<Applying>,
    /// Sessions that we have as sender.
    pub(crate) held: Vec<Held>,
    /// Grants sessions, where no daemon does.
    pub(crate) node: Option<OwnNode>,
    pub(crate) told: Told,
    pub(crate) counters: Counters,
    pub(crate) notices: Notices,
    pub(crate) introductions: Introductions,
    pub(crate) entropy: Entropy,
    pub(crate) capture: Option<Capture>,
    /// Finds out what the device writes; `None` when that is known.
    pub(crate) footprint: Option<Probe<PeerId>>,
    /// Messages cannot land on this device.
    pub(crate) unfit: bool,
    /// When the device was last told to bring packets to the landing queue.
    pub(crate) led_ns: Option<u64>,
    /// Whether the general channel carries a stream of messages in one direction.
    pub(crate) stream: Stream,
    pub(crate) probes_ns: u64,
    pub(crate) looks: Looks,
    /// The clock argument of the round that is running.
    pub(crate) now_ns: u64,
    pub(crate) link: Link,
    /// What the admission daemon does for us, where there is one.
    pub(crate) stewarded: Stewarded,
}

impl<P: Port> Engine<P> {
    /// One round of all stages. Returns the number of packets and events handled: 0 means idle.
    pub(crate) fn poll(&mut self, now_ns: u64) -> usize {
        if self.looks.begin(now_ns.saturating_sub(self.now_ns), now_ns) {
            self.forgive_pause(now_ns);
        }
        self.now_ns = now_ns;
        let mut work = self.take_back();
        work += self.reap(false);
        self.poll_queues();
        let packets = self.receive_general(now_ns);
        work += packets;
        if self.answers_first(packets, now_ns) {
            return work;
        }
        work += self.receive_landing(now_ns);
        work += self.look_at_sockets(now_ns);
        self.tick_handlers(now_ns);
        self.care(now_ns);
        self.land_drained(now_ns);
        self.replenish();
        self.tell(now_ns, work == 0);
        work += self.send_fragments(now_ns);
        self.flush();
        if work == 0 {
            work += self.reap(true);
        }
        if self.looks.wants_timers(now_ns) {
            self.run_timers(now_ns);
        }
        work
    }

    /// Whether the rest of the round can wait: it brought a message that is part of an exchange, and its sender waits for the
    /// application's answer.
    fn answers_first(&mut self, packets: usize, now_ns: u64) -> bool {
        self.stream
            .hurries(packets > 0 && self.told.has_message(), now_ns)
    }

    /// Looks for packets of the general channel for less than a microsecond, if nothing else is to be done: a look takes a tenth of a
    /// round, and a message would wait for half of one.
    pub(crate) fn linger(&mut self) {
        let lands = (self.landing.as_ref()).is_some_and(|landing| landing.sessions.awaits_packets());
        let is_idle = !lands && self.outgoing.is_empty() && !self.stream.is_hot();
        let general = self.general.as_mut().filter(|_| is_idle);
        let Some(general) = general else {
            std::hint::spin_loop();
            return;
        };
        for _ in 0..LOOKS_MAX {
            if general.rx.available(1) > 0 {
                break;
            }
            std::hint::spin_loop();
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
        while let Some(released) = self.loaned.next_returned() {
            count += 1;
            self.recover(released);
        }
        count
    }

    /// Puts memory that nobody uses any more back where it came from.
    pub(crate) fn recover(&mut self, released: Released) {
        match released {
            Released::GeneralFrame(address) => {
                if let Some(frame) = self.frames.reclaim(address) {
                    self.frames.put(frame);
                    self.frames_held -= 1;
                }
            }
            Released::Zone { start, len } => {
                if let Some(landing) = &mut self.landing {
                    landing.arena.free(start, len);
                }
            }
            Released::TransmitFrame(address) => {
                if let Some(frame) = self.transmit_frames.reclaim(address) {
                    self.transmit_frames.put(frame);
                }
            }
            Released::SendRegion { start, len } => self.send_arena.free(start, len),
        }
    }

    /// Stage 2.
    pub(crate) fn reap(&mut self, all: bool) -> usize {
        let frames = &mut self.transmit_frames;
        let outgoing = &mut self.outgoing;
        let arena = &mut self.send_arena;
        let reaped = self.scheduler.reap(all, |address| {
            if !frames.completed(address)
                && let Some(Released::SendRegion { start, len }) = outgoing.completed(address)
            {
                arena.free(start, len);
            }
        });
        if !outgoing.unknown.is_empty() {
            self.complete_flows();
        }
        reaped as usize
    }

    /// Tells flows which of their packets the device is done with.
    #[cold]
    fn complete_flows(&mut self) {
        let now = Time::from_nanos(self.now_ns);
        for address in self.outgoing.unknown.drain(..) {
            if let Some(Vacated { start, len }) = self.scheduler.completed(address, now) {
                self.send_arena.free(start, len);
            }
        }
    }

    /// Stage 3: takes packets of the general channel. A frame either becomes a message or goes back at once.
    fn receive_general(&mut self, now_ns: u64) -> usize {
        let Some(general) = &mut self.general else {
            return 0;
        };
        let packets = general.rx.available(RECEIVE_BURST);
        for offset in 0..packets {
            let Some(general) = &mut self.general else { break };
            let descriptor = general.rx.packet(offset);
            let Some(frame) = self.frames.reclaim(descriptor.start()) else {
                let nobody = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
                self.reject(Fault::Frame, nobody);
                continue;
            };
            if self.footprint.is_some() {
                self.look_at_footprint(frame.address(), (descriptor.start(), descriptor.len));
            }
            self.counters.general_packets += 1;
            self.take_packet(frame, descriptor.start(), descriptor.len, now_ns);
        }
        self.stream.looked(packets);
        if packets > 0
            && let Some(general) = &mut self.general
        {
            general.rx.release(packets);
            general.received += u64::from(packets);
        }
        packets as usize
    }

    /// Stage 4: takes fragments, checks what I3 asks for, and makes messages of what is whole.
    pub(crate) fn receive_landing(&mut self, now_ns: u64) -> usize {
        let Some(landing) = &mut self.landing else {
            return 0;
        };
        // In zero-copy mode what comes between sessions uses frames that are left of the last one.
        if landing.sessions.is_empty() && self.fixed.caps.witness {
            return 0;
        }
        let (sessions, rx) = (&mut landing.sessions, &mut landing.rx);
        let burst = match sessions.receive(rx, &self.umem, RECEIVE_BURST, now_ns) {
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
            while let Some(landed) = inbound.next_landed() {
                if let Some(capture) = &mut self.capture {
                    let addressing = self.peers.at(inbound.terms.peer.index).addressing.reversed();
                    capture.landed(&self.umem, &addressing, &inbound.terms, &landed);
                }
                let missing = landed.missing_bytes(&inbound.terms.layout);
                for range in &missing {
                    // What lies there is an earlier message's, perhaps another sender's.
                    self.umem
                        .zero(landed.address + range.start, range.end - range.start);
                    self.counters.missing_bytes += range.end - range.start;
                }
                self.counters.messages_received += 1;
                self.counters.fragments_delivered += landed.arrived;
                self.counters.bytes_received += landed.len;
                self.told.received(Message {
                    loaned: Arc::clone(&self.loaned),
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
                });
            }
            let edges = std::mem::take(&mut inbound.places.edges);
            self.counters.restored_bytes += edges.restored_bytes;
            self.counters.page_end_fragments += edges.page_ends;
        }
    }

    /// Stage 5.
    fn look_at_sockets(&mut self, now_ns: u64) -> usize {
        if !self.fixed.caps.witness {
            self.take_foreign(now_ns);
        }
        let news = match self.stewarded.has_news(now_ns) {
            true => self.look_at_daemon(now_ns),
            false => 0,
        };
        news + self.look_at_udp_sockets(now_ns)
    }

    fn look_at_udp_sockets(&mut self, now_ns: u64) -> usize {
        // Nothing that comes this way is in a hurry, unless there is no general channel.
        let repairs =
            (self.landing.as_ref()).is_some_and(|landing| landing.sessions.awaits_datagrams(now_ns));
        if !(self.looks).wants_count(repairs || self.general.is_none(), now_ns) {
            return 0;
        }
        if !self.looks.wants_sockets(self.port.passed_count(), now_ns) {
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
        if let Some(general) = &mut self.general {
            while let Some(address) = general.rx.recalled() {
                if let Some(frame) = self.frames.reclaim(address + PACKET_HEADROOM) {
                    self.frames.put(frame);
                    general.posted -= 1;
                }
            }
            // The frames used last come first, and only as many as the peers' credits allow: a short list of
            // frames stays in the cache.
            let target = self.fixed.kept_frames
                + GENERAL_FRAMES_SPARE
                + EAGER_CREDIT.most * self.peers.len().max(1) as u32;
            let posted = general.posted.saturating_sub(general.received) as u32;
            let free = (self.frames.available() as u32).saturating_sub(GENERAL_FRAMES_FOR_SOCKET);
            let wanted = target.saturating_sub(posted).min(free);
            let count = match wanted {
                0 => 0,
                _ => general.rx.room(wanted).min(wanted),
            };
            for offset in 0..count {
                let frame = self.frames.take().expect("as many as were counted");
                if let Some(probe) = &mut self.footprint {
                    self.umem.copy_to(frame.address(), probe.prepare(frame.address()));
                }
                general.rx.write(offset, frame.into_address());
            }
            if count > 0 {
                general.rx.submit(count);
                general.posted += u64::from(count);
                if self.fixed.kept_frames > 0 {
                    let allowed = general.posted.saturating_sub(self.fixed.kept_frames.into());
                    general.rx.allow(allowed);
                }
            }
        }
        if let Some(landing) = &mut self.landing
            && !landing.sessions.is_empty()
        {
            if self.fixed.device_moves {
                let (entries, ring_len) = (&mut landing.sessions.entries, self.fixed.kept_frames / 2);
                entries.look_at_card(&mut landing.rx, ring_len, self.now_ns);
            }
            // Memory is posted when packets may come for it, not when its message is announced: what was freed last is
            // then used again while it is in the cache.
            let (sessions, rx, memory) = landing.with_memory();
            sessions.post(rx, memory, &self.umem, self.now_ns);
        }
        if self.fixed.device_moves {
            self.wake_receivers();
        }
    }

    /// Wakes drivers that have no entries while there are some: they take them when a packet comes, and without entries none does.
    /// Asked in every round, because a driver that finds the ring empty asks to be woken without looking again.
    fn wake_receivers(&mut self) {
        let general = self.general.as_mut();
        let general = general.map(|general| (&mut general.rx, &mut general.woken));
        let landing = self.landing.as_mut();
        let landing = landing.map(|landing| (&mut landing.rx, &mut landing.woken));
        for (rx, woken) in general.into_iter().chain(landing) {
            let untaken = rx.untaken();
            if untaken.count > 0 && (!*woken || untaken.needs_wakeup) {
                // The first entries of a new channel come after its driver looked for some.
                *woken = true;
                if let Err(error) = rx.wake() {
                    self.link.failed(error);
                }
            }
        }
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
