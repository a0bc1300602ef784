//! Watching: what may be read of messages that are arriving, from peers that the application watches. Which windows those are is
//! `landing/showing.rs`; here is what the two sides say to each other.
//!
//! ```text
//!  sender                                                        receiver
//!    ANNOUNCE                                     ───────▶  memory for the message
//!                                                 ◀───────  WINDOWS without digests: it wants those of all windows
//!    DATA of a window …, WINDOWS with its digest  ───────▶  in place, paired, equal: shown
//! ```
//! Without digests nobody asks, and pairing is the proof. Nor is a sender of an earlier version asked, which would not answer: its messages are
//! shown when they are whole.

use std::collections::VecDeque;
use std::net::SocketAddrV4;
use std::sync::Arc;

use lm_protocol::wire::lm::{LmHeader, TYPE_WINDOWS, WindowsPacket};

use crate::completion::PeerId;
use crate::engine::Engine;
use crate::incoming::Incoming;
use crate::landing::{Inbound, Violation};
use crate::notices::Fault;
use crate::port::{Port, RxQueue};

/// WINDOWS packets to one peer in one round: as with MANIFEST packets.
const PACKETS_PER_ROUND: u32 = 8;
/// Digests in one of them, in bytes, where the MTU allows so many.
const PAYLOAD_LEN_MAX: usize = 1440;

impl<P: Port> Engine<P> {
    /// Messages from a peer are told of while they arrive. `false`: there is no such peer, or nothing lands here.
    pub(crate) fn watch(&mut self, peer: PeerId) -> bool {
        let (Some(_), Some(landing)) = (self.peers.named(peer), &mut self.landing) else {
            return false;
        };
        let peers = &mut landing.watching.peers;
        peers.retain(|known| *known != peer && self.peers.named(*known).is_some());
        peers.push(peer);
        true
    }

    /// The next message that has begun and not ended.
    pub(crate) fn next_incoming(&mut self) -> Option<Incoming> {
        self.begun()?.pop_front()
    }

    /// The same of one peer's.
    pub(crate) fn next_incoming_of(&mut self, peer: PeerId) -> Option<Incoming> {
        let begun = self.begun()?;
        let at = begun.iter().position(|incoming| incoming.peer() == peer)?;
        begun.remove(at)
    }

    /// Messages that have begun and not ended, and were not asked for.
    fn begun(&mut self) -> Option<&mut VecDeque<Incoming>> {
        let begun = &mut self.landing.as_mut()?.watching.begun;
        begun.retain(|incoming| incoming.settled().is_none());
        Some(begun)
    }

    /// Adds the peers with whom the application has something to do, each once ([`Status::waiting`](crate::Status::waiting)).
    pub(crate) fn waiting(&self, peers: &mut Vec<PeerId>) {
        self.told.waiting(peers);
        let begun = (self.landing.iter()).flat_map(|landing| &landing.watching.begun);
        for incoming in begun.filter(|incoming| incoming.settled().is_none()) {
            if !peers.contains(&incoming.peer()) {
                peers.push(incoming.peer());
            }
        }
    }

    /// The application has let an [`Incoming`] go.
    #[cold]
    pub(crate) fn let_go(&mut self, id: u64) {
        if let Some(landing) = &mut self.landing {
            landing.arena.let_go(id);
            let is_arriving = landing.sessions.iter_mut().any(|inbound| inbound.let_go(id));
            self.counters.incoming_dropped += u64::from(is_arriving);
        }
    }

    /// Stage 6, last.
    #[inline]
    pub(crate) fn show_windows(&mut self, now_ns: u64) {
        if (self.landing.as_ref()).is_some_and(|landing| !landing.watching.peers.is_empty()) {
            self.show_watched(now_ns);
        }
    }

    #[cold]
    fn show_watched(&mut self, now_ns: u64) {
        let Some(landing) = &mut self.landing else { return };
        let watching = &mut landing.watching;
        // Nobody asked for them in time: the messages say as much.
        watching.begun.retain(|incoming| incoming.settled().is_none());
        let way_back = self.memory.loaned();
        let begun = |reading| {
            watching
                .begun
                .push_back(Incoming::new(Arc::clone(way_back), reading))
        };
        let names = &mut watching.next_id;
        let is_any = (landing.sessions).look_at_windows(&watching.peers, names, &mut landing.arena, begun);
        // I3: as with whole messages.
        if is_any && self.fixed.caps.witness && landing.rx.drops() != landing.drops {
            self.abort_landing(Violation::Statistics);
            return;
        }
        for row in landing.sessions.taken() {
            if let Some(inbound) = landing.sessions.at_mut(row) {
                inbound.show_windows();
            }
        }
        for row in landing.sessions.taken() {
            self.ask_for_windows(row, now_ns);
        }
    }

    /// Asks the sender for digests of windows that are due, or says that it cannot tell them.
    fn ask_for_windows(&mut self, row: u8, now_ns: u64) {
        let inbound = (self.landing.as_mut()).and_then(|landing| landing.sessions.at_mut(row));
        if let Some(inbound) = inbound
            && inbound.says_whole()
        {
            let from = self.peers.at(inbound.terms.peer.index).data;
            tracing::warn!(%from, "messages are shown when they are whole: the sender is of an earlier version; \
                                   update it");
        }
        while let Some(landing) = &mut self.landing
            && let Some(inbound) = landing.sessions.at_mut(row)
            && let Some((message, first, count)) = inbound.next_windows_request(now_ns)
        {
            let (peer, header) = (
                inbound.terms.peer,
                windows_header(inbound.terms.key, [message, first, count]),
            );
            self.send_packet(peer.index, &header, &[]);
        }
    }

    /// A WINDOWS packet. `false`: it is of no session.
    pub(crate) fn take_windows(
        &mut self,
        from: SocketAddrV4,
        key: u64,
        words: [u32; 3],
        payload: &[u8],
        now_ns: u64,
    ) -> bool {
        match payload.is_empty() {
            true => self.take_windows_request(from, key, words, now_ns),
            false => self.take_window_digests(from, key, words, payload, now_ns),
        }
    }

    /// Digests of windows that were asked for.
    fn take_window_digests(
        &mut self,
        from: SocketAddrV4,
        key: u64,
        words: [u32; 3],
        payload: &[u8],
        now_ns: u64,
    ) -> bool {
        let inbound = (self.landing.as_mut()).and_then(|landing| landing.sessions.keyed(key));
        let peers = &mut self.peers;
        let is_its =
            |inbound: &&mut Inbound| peers.named(inbound.terms.peer).map(|peer| peer.data) == Some(from);
        let Some(inbound) = inbound.filter(is_its) else {
            return false;
        };
        let Ok(packet) = WindowsPacket::read(words, payload) else {
            self.reject(Fault::Malformed, from);
            return true;
        };
        match inbound.take_windows((packet.message, packet.first), packet.digests(), now_ns) {
            Some(Ok(_)) => self.counters.packets_used += 1,
            Some(Err(_)) => self.reject(Fault::Digests, from),
            None => self.reject(Fault::Unexpected, from),
        }
        true
    }

    /// A receiver asks for digests of a message's windows, each as it leaves.
    fn take_windows_request(
        &mut self,
        from: SocketAddrV4,
        key: u64,
        [message, first, count]: [u32; 3],
        now_ns: u64,
    ) -> bool {
        let found = self.peers.find(from);
        let outbound = found.and_then(|index| self.peers.at(index).outbound.as_mut());
        let Some(outbound) = outbound.filter(|outbound| outbound.terms.key == key) else {
            return false;
        };
        outbound.heard_ns = now_ns;
        match outbound.windows_requested(&mut self.sending.outgoing, message, (first, count)) {
            true => self.counters.packets_used += 1,
            false => self.reject(Fault::Digests, from),
        }
        true
    }

    /// Stage 7: sends digests of windows that a receiver asked for, and that have left. What is lost is asked for again.
    #[cold]
    pub(crate) fn send_windows(&mut self, index: u16) {
        for _ in 0..PACKETS_PER_ROUND {
            let Some(outbound) = &mut self.peers.at(index).outbound else {
                return;
            };
            let key = outbound.terms.key;
            let mut payload = [0u8; PAYLOAD_LEN_MAX];
            let room = outbound.general_payload_len().min(payload.len());
            let Some((words, len)) = outbound.next_windows(&mut self.sending.outgoing, &mut payload[..room])
            else {
                return;
            };
            if !self.send_packet(index, &windows_header(key, words), &payload[..len]) {
                return;
            }
            if let Some(outbound) = &mut self.peers.at(index).outbound {
                outbound.windows_sent(words);
            }
        }
    }
}

fn windows_header(key: u64, words: [u32; 3]) -> LmHeader {
    LmHeader::Extension {
        packet_type: TYPE_WINDOWS,
        key,
        words,
    }
}
