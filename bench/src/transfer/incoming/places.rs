//! Places: one address has half of them at most, and those of which too little comes are others'.

use std::net::Ipv4Addr;
use std::ops::Deref;
use std::time::{Duration, Instant};

use lm_protocol::session::UNUSED_MAX;

use super::{Broken, Receiver, queue};
use crate::transfer::wire::{Plan, Status};

/// How long it is held against an address that a transfer came to nothing.
pub(super) const WASTED_FOR: Duration = Duration::from_secs(10);

/// An address with this number of these has no grace: its places are others' unless something comes.
pub(super) const WASTED_BORNE: usize = 8;

/// Such transfers that are remembered, and those of one address, which begins no more then: each costs a file.
pub(super) const WASTED_MAX: (usize, usize) = (4096, 256);

/// What a byte counts for a transfer that wants to keep its place: 64 KiB are a second.
pub(super) const BYTE_TIME: Duration = Duration::from_micros(16);

impl<P: Copy + Eq, M: Deref<Target = [u8]>> Receiver<P, M> {
    /// A transfer of this address came to nothing.
    pub(super) fn waste(&mut self, from: Ipv4Addr, now: Instant) {
        queue(&mut self.wasted, (from, now), WASTED_MAX, |(ip, _)| *ip == from);
    }

    pub(super) fn wasted_by(&self, from: Ipv4Addr) -> usize {
        self.wasted.iter().filter(|(ip, _)| *ip == from).count()
    }

    /// Whether there is a place for a transfer of this address, which has half of them at most. One of which too little comes gives way;
    /// not so what was written to a stream, which nothing takes back.
    pub(super) fn has_place(&mut self, from: Ipv4Addr, now: Instant) -> bool {
        self.wasted.retain(|(_, at)| now < *at + WASTED_FOR);
        if self.wasted_by(from) >= WASTED_MAX.1 {
            return false;
        }
        let closing = self.closing.iter().map(|closing| closing.tally.from);
        let holders = self
            .active
            .iter()
            .map(|incoming| incoming.tally.from)
            .chain(closing);
        let most = self.output.concurrent_max();
        let has_share = holders.clone().filter(|holder| *holder == from).count() < most.div_ceil(2);
        if !has_share || holders.count() >= most {
            let gives_way = |position: &usize| {
                let incoming = &self.active[*position];
                let is_spoilt = incoming.destination.in_order() && incoming.tally.written > 0;
                incoming.idle_at <= now && (has_share || incoming.tally.from == from) && !is_spoilt
            };
            let idle = (0..self.active.len()).filter(gives_way);
            let Some(position) = idle.min_by_key(|position| self.active[*position].idle_at) else {
                return false;
            };
            let text = "too little came, and its place became another's; start it again".to_owned();
            self.fail(position, Broken(Status::TimedOut, text), now);
        }
        true
    }
}

/// How long nothing may come of a transfer that keeps its place: its messages may be written when they are whole.
pub(super) fn patience_with(plan: Plan) -> Duration {
    UNUSED_MAX + at_disk_pace(plan.longest_message())
}

/// The time that these bytes take at 32 MiB a second.
pub(super) fn at_disk_pace(bytes: u64) -> Duration {
    Duration::from_secs(bytes >> 25)
}
