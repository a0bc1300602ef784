//! Requests that wait for a place (policy `concurrent`): the shortest first, and nobody for ever.

use crate::control::Request;
use crate::time::Time;
use alloc::vec::Vec;
use core::net::SocketAddrV4;
use core::time::Duration;

/// Who has waited for so long goes before all that have not, whatever its length; among those, first come, first served.
pub const AGEING_BOUND: Duration = Duration::from_secs(1);

/// Who has not repeated its request for so long is gone.
pub const SILENCE_BOUND: Duration = Duration::from_secs(3);

/// One request that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    pub(super) from: SocketAddrV4,
    pub(super) request_id: u32,
    pub(super) request: Request,
    since: Time,
    heard: Time,
}

impl Waiter {
    fn is(&self, from: SocketAddrV4, request_id: u32, request: &Request) -> bool {
        self.from == from && self.request_id == request_id && self.request.sender_id == request.sender_id
    }

    /// Lower goes first.
    fn rank(&self, now: Time) -> (bool, u64, Time) {
        match now.since(self.since) >= AGEING_BOUND {
            true => (false, 0, self.since),
            false => (true, self.request.max_message_len, self.since),
        }
    }
}

/// The requests that wait for one receiver's places.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    waiters: Vec<Waiter>,
    capacity: usize,
}

impl Waiting {
    pub(super) fn new(capacity: usize) -> Waiting {
        Waiting {
            waiters: Vec::new(),
            capacity,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Takes a request in, or notes that it is still wanted. A full list turns newcomers away.
    pub(super) fn add(&mut self, now: Time, from: SocketAddrV4, request_id: u32, request: &Request) {
        if let Some(waiter) = self
            .waiters
            .iter_mut()
            .find(|waiter| waiter.is(from, request_id, request))
        {
            waiter.heard = now;
        } else if self.waiters.len() < self.capacity {
            self.waiters.push(Waiter {
                from,
                request_id,
                request: *request,
                since: now,
                heard: now,
            });
        }
    }

    /// Who goes next. It stays in the list.
    pub(super) fn next(&self, now: Time) -> Option<Waiter> {
        self.waiters.iter().min_by_key(|waiter| waiter.rank(now)).copied()
    }

    pub(super) fn remove(&mut self, from: SocketAddrV4, request_id: u32, request: &Request) {
        self.waiters
            .retain(|waiter| !waiter.is(from, request_id, request));
    }

    /// Drops those that have not repeated their request.
    pub(super) fn expire(&mut self, now: Time) {
        self.waiters
            .retain(|waiter| now.since(waiter.heard) < SILENCE_BOUND);
    }

    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.waiters
            .iter()
            .map(|waiter| waiter.heard + SILENCE_BOUND)
            .min()
    }

    pub(super) fn take_all(&mut self) -> Vec<Waiter> {
        core::mem::take(&mut self.waiters)
    }
}
