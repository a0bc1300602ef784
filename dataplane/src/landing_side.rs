//! Receive side of the landing channel: its ring, its memory, its sessions, and what is known of its device.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use lm_protocol::control::Ended;

use crate::arena::Arena;
use crate::bounds::ZONES_MAX;
use crate::completion::PeerId;
use crate::counters::Counters;
use crate::footprint::Footprint;
use crate::incoming::Incoming;
use crate::landing::{Memory, Sessions};
use crate::memory::Umem;
use crate::placing::{Placing, ZoneSource};
use crate::port::{QueueDrops, RxQueue};
use crate::release::Loaned;

/// Sessions that are over and remembered.
const PAST_MAX: usize = 64;

/// Receive side of the landing channel.
#[derive(Debug)]
pub(crate) struct LandingSide<R> {
    pub(crate) queue: u32,
    pub(crate) rx: R,
    pub(crate) arena: Arena,
    /// Who decides where messages land, where somebody does, or did.
    pub(crate) placing: Option<Box<Placing>>,
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
    pub(crate) footprint: Footprint,
    /// When the device was last told to bring packets here.
    pub(crate) led_ns: Option<u64>,
    pub(crate) watching: Watching,
}

/// Whose messages the application hears of while they arrive.
#[derive(Debug, Default)]
pub(crate) struct Watching {
    pub(crate) peers: Vec<PeerId>,
    /// What it has not asked for yet.
    pub(crate) begun: VecDeque<Incoming>,
    /// Names the next one.
    pub(crate) next_id: u64,
}

/// What comes to the landing queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flow {
    /// Packets since the last pause, or since the queue was last kept.
    pub(crate) packets: u32,
    /// The round before brought some. It may have taken longer than a pause.
    pub(crate) brought: bool,
    pub(crate) brought_ns: u64,
    /// Nobody but this core runs the queue.
    pub(crate) kept: bool,
}

impl Flow {
    /// A round brought so many packets.
    #[inline]
    pub(crate) fn landed(&mut self, packets: u32) {
        self.packets = self.packets.saturating_add(packets);
        self.brought = true;
    }
}

/// The last sessions that ended, with the data address of each one's sender: it may not know it.
#[derive(Debug)]
pub(crate) struct Past(VecDeque<(SocketAddrV4, Ended)>);

impl Past {
    pub(crate) fn new() -> Past {
        Past(VecDeque::with_capacity(PAST_MAX))
    }

    pub(crate) fn remember(&mut self, from: SocketAddrV4, ended: Ended) {
        if self.0.len() == PAST_MAX {
            self.0.pop_front();
        }
        self.0.push_back((from, ended));
    }

    pub(crate) fn of(&self, session_key: u64) -> Option<(SocketAddrV4, Ended)> {
        let mut past = self.0.iter().copied();
        past.find(|(_, ended)| ended.session_key == session_key)
    }
}

impl<R: RxQueue> LandingSide<R> {
    /// Bytes of the arena in which messages can land.
    pub(crate) fn registered(&self) -> u64 {
        self.registered_len.saturating_sub(self.arena.start())
    }

    /// Where zones come from, and the ring that their entries go to, with the sessions that have them.
    pub(crate) fn with_memory(&mut self) -> (&mut Sessions, &mut R, Memory<'_>) {
        let memory = Memory {
            arena: &mut self.arena,
            placing: self.placing.as_deref_mut(),
            registered_len: self.registered_len,
            // Reading a message while it arrives begins with its announcement.
            opens: self.watching.peers.is_empty(),
        };
        (&mut self.sessions, &mut self.rx, memory)
    }

    /// Bytes for messages by the one-copy path, or such that land.
    pub(crate) fn usable(&self, one_copy: bool) -> u64 {
        match one_copy {
            true => self.arena.len(),
            false => self.registered(),
        }
    }

    /// How much of them messages under way from other addresses than `ip` leave.
    pub(crate) fn left_to(&self, ip: Ipv4Addr, one_copy: bool) -> u64 {
        let usable = self.usable(one_copy);
        let others = (self.sessions.iter()).filter(|inbound| inbound.terms.admission.peer_ip != ip);
        let held: u64 = { others }
            .map(|inbound| inbound.order.zones_len(self.arena.start() + usable))
            .sum();
        usable.saturating_sub(held)
    }

    /// What decides where messages land, made when it is first needed.
    fn placing(&mut self, loaned: &Arc<Loaned>) -> &mut Placing {
        (self.placing).get_or_insert_with(|| Box::new(Placing::new(Arc::clone(loaned), ZONES_MAX)))
    }

    /// Another source decides, or nobody; of what waits it is asked again.
    pub(crate) fn place_by(&mut self, source: Option<Box<dyn ZoneSource>>, loaned: &Arc<Loaned>) {
        self.placing(loaned).replace(source);
        let (sessions, _, mut memory) = self.with_memory();
        for inbound in sessions.iter_mut() {
            inbound.retry_all();
            inbound.place(&mut memory);
        }
    }

    /// Asks where messages land that were just announced in the session with this key.
    #[cold]
    pub(crate) fn place(&mut self, key: u64) {
        let (sessions, _, mut memory) = self.with_memory();
        if let Some(inbound) = sessions.keyed(key) {
            inbound.place(&mut memory);
        }
    }

    /// A peer's message is not to land. `false`: there is no such that is not settled.
    pub(crate) fn retract(&mut self, peer: PeerId, number: u32, loaned: &Arc<Loaned>) -> bool {
        self.placing(loaned);
        let (sessions, _, mut memory) = self.with_memory();
        sessions.retract(peer, number, &mut memory)
    }

    /// Gives what became of messages to who decided of them.
    #[cold]
    pub(crate) fn settle_placed(&mut self, counters: &mut Counters, umem: &Umem, now_ns: u64) {
        let (sessions, _, mut memory) = self.with_memory();
        sessions.settle_placed(&mut memory, umem, now_ns);
        counters.regions_unfit += self.placing.as_mut().map_or(0, |placing| placing.take_unfit());
    }

    /// The session in a row goes on by the one-copy path. Nothing is posted for it.
    pub(crate) fn stop_landing(&mut self, row: u8, umem: &Umem, now_ns: u64) {
        let (sessions, _, mut memory) = self.with_memory();
        sessions.stop_landing(row, &mut memory, umem, now_ns);
        if let Some(inbound) = self.sessions.at(row) {
            inbound.limit_messages(&mut self.rx);
        }
    }
}
