//! Care: what is done when a packet is not simply the next one, and when messages are whole.
//!
//! A fragment that lies elsewhere than at its place (in a slot that an earlier, lost packet was to use, or in a
//! datagram of the one-copy path) is copied there as soon as nothing can be written there any more, and is *held* aside
//! until then. What time brings is [`repair`](super::repair)'s.

use std::ops::Range;

use lm_protocol::delivery::Arrival;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{LmPacket, MessageDigest};

use super::arriving::Arriving;
use super::astray::Astray;
use super::order::{Order, Settled};
use super::places::Places;
use super::progress::{Pace, Progress};
use super::strays::Strays;
use super::terms::InboundTerms;
use crate::memory::Umem;

/// A session's parts, for what concerns several of them.
pub(crate) struct Care<'a> {
    pub(super) terms: &'a InboundTerms,
    pub(super) order: &'a mut Order,
    pub(super) settled: &'a mut Settled,
    pub(super) progress: &'a mut Progress,
    pub(super) pace: &'a mut Pace,
    pub(super) places: &'a mut Places,
    pub(super) strays: &'a mut Strays,
    pub(super) astray: &'a mut Astray,
}

/// A fragment that came by the one-copy path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram {
    /// Number of its message, its index, and how many fragments there are.
    pub(crate) fragment: (u32, u32, u32),
    /// UMEM address of its payload.
    pub(crate) from: u64,
    pub(crate) len: u64,
}

impl Care<'_> {
    /// A fragment landed that was not simply the next one in its own slot. Where its payload is, when that has to be copied.
    pub(super) fn landed_elsewhere(
        &mut self,
        at: usize,
        position: u32,
        arrival: Arrival,
        in_place: bool,
        start: u64,
        now_ns: u64,
    ) -> Option<u64> {
        // The gate keeps the order: what has not come of the messages before is lost, or late.
        let mut lost = 0;
        for before in self.order.iter_mut().take(at) {
            let expected = before.gaps.arrivals.expected();
            if before.gaps.arrivals.claim(u32::MAX) {
                lost += before.gaps.arrivals.expected() - expected;
                before.gaps.noticed(now_ns);
            }
        }
        if lost > 0 {
            self.pace.lost(lost, now_ns);
        }
        if !self.noticed(at, arrival, now_ns) || in_place {
            return None;
        }
        self.places.repair.displaced += 1;
        let message = self.order.at(at);
        let fragment = message.geometry.fragment(message.index_at(position));
        Some(start + u64::from(fragment.header_len))
    }

    /// Books an arrival that is out of the ordinary. `false`: it had arrived before.
    fn noticed(&mut self, at: usize, arrival: Arrival, now_ns: u64) -> bool {
        self.places.trouble();
        if let Arrival::Jumped(lost) = arrival {
            self.pace.lost(lost, now_ns);
        }
        let gaps = &mut self.order.at_mut(at).gaps;
        match arrival {
            Arrival::Duplicate => {
                self.places.repair.duplicate += 1;
                return false;
            }
            Arrival::Jumped(_) => gaps.noticed(now_ns),
            Arrival::Late => {
                if let Some(sample) = gaps.timer.progressed(Time::from_nanos(now_ns)) {
                    self.pace.answered(sample);
                }
            }
            Arrival::Next => {}
        }
        if gaps.arrivals.missing().is_empty() {
            gaps.timer.clear();
        }
        true
    }

    /// A fragment came by the one-copy path. `drained_ns`: entries were posted when it passed the gate, which was after that.
    pub(super) fn take_datagram(
        &mut self,
        datagram: &Datagram,
        drained_ns: Option<u64>,
        umem: &Umem,
        now_ns: u64,
    ) {
        let (number, index, count) = datagram.fragment;
        let Some(at) = self.order.position_of(number) else {
            self.places.repair.stale += 1;
            return;
        };
        let message = self.order.at_mut(at);
        let known = message.fragment_count();
        if count != known || index >= known || datagram.len != u64::from(message.geometry.fragment_len(index))
        {
            self.places.repair.implausible += 1;
            return;
        }
        let position = message.position_of(index);
        let arrival = message.gaps.arrivals.take(position);
        // One that the gate could not admit (its announcement was overtaken) uses no entry: those that are posted are for
        // what follows it.
        let end = message.base + u64::from(position) + 1;
        if end > self.progress.accepted() {
            self.progress.overtaken(end);
            self.progress.suspect(end, now_ns);
        }
        self.progress.begin(now_ns);
        if self.noticed(at, arrival, now_ns) {
            let message = self.order.at_mut(at);
            if let Some(drained_ns) = drained_ns {
                (self.astray).came_to_the_socket(message, position, drained_ns);
            }
            self.places.repair.datagrams += 1;
            self.places.store(message, position, datagram.from, now_ns, umem);
            self.settle_trouble(umem);
        }
    }

    /// Puts what is held to its place as far as that is free, and lands what is whole.
    pub(super) fn settle_trouble(&mut self, umem: &Umem) {
        self.places.put_held(self.order, umem);
        self.land_all();
        self.places.look_for_trouble(self.order);
    }

    /// Lands what is whole.
    fn land_all(&mut self) {
        while self.front_may_land() {
            self.land(Vec::new());
        }
    }

    /// Lands what became whole with one packet.
    #[inline]
    pub(super) fn land_whole(&mut self) {
        if self.front_may_land() {
            self.land(Vec::new());
        }
    }

    #[inline]
    fn front_may_land(&mut self) -> bool {
        (self.order.front_mut()).is_some_and(|front| self.places.may_show(front))
    }

    /// The front message goes: whole, or without what is `missing`.
    pub(super) fn land(&mut self, missing: Vec<Range<u32>>) {
        let mut message = self
            .order
            .pop_front()
            .expect("the message that just became whole");
        // Its last fragments may have come without the gate: what comes next is the next message's, or its fillers, which are counted.
        let fillers = if self.terms.caps.witness {
            0
        } else {
            message.fillers
        };
        self.progress.overtaken(message.end() - u64::from(fillers));
        self.settled.add(message.landed(missing));
    }

    /// Takes a message's digest as its sender says it. `false`: it was known, or the message is settled.
    pub(crate) fn take_digest(&mut self, digest: MessageDigest) -> bool {
        if !self.places.evidence().has_digests() {
            return true;
        }
        let Some(at) = self.order.position_of(digest.message) else {
            return !self.order.knows(digest.message);
        };
        let proof = &mut self.order.at_mut(at).proof;
        if proof.announced.is_some() {
            return false;
        }
        proof.announced = Some(digest.digest);
        self.land_all();
        true
    }

    /// Takes a MANIFEST packet. `Some(false)`: it contradicts what came before; `None`: nobody asked for it.
    pub(crate) fn take_manifest(&mut self, packet: &LmPacket<'_>, now_ns: u64) -> Option<bool> {
        let front = self.order.front_mut()?;
        self.places.evidence_mut().take_manifest(front, packet, now_ns)
    }

    /// The entry of `position` of the message at `at` was used, or never will be; see [`Places::passed`].
    #[inline]
    pub(super) fn passed(&mut self, at: usize, position: u32, landed: Option<u16>, umem: &Umem) {
        let (message, reach) = (self.order.at_mut(at), self.terms.reach());
        self.places.passed(message, position, landed, reach, umem);
    }

    /// The front message, which has something to be cared for.
    pub(super) fn front(&mut self) -> &mut Arriving {
        self.order.at_mut(0)
    }
}
