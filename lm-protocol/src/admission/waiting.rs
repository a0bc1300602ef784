//! Requests that wait for a place (policy `concurrent`): the shortest first, and nobody for ever.

use crate::control::Request;
use crate::session::Application;
use crate::time::Time;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::net::{Ipv4Addr, SocketAddrV4};
use core::time::Duration;

/// Who has waited for so long goes before all that have not, whatever its length; among those, first come, first served.
pub const AGEING_BOUND: Duration = Duration::from_secs(1);

/// Who has not repeated its request for so long is gone.
pub const SILENCE_BOUND: Duration = Duration::from_secs(3);

/// The order of those that wait since some moment: the smaller goes first.
pub(super) fn waits_before(now: Time, since: Time, request: &Request) -> (bool, u64, Time) {
    match now.since(since) >= AGEING_BOUND {
        true => (false, 0, since),
        false => (true, request.max_message_len, since),
    }
}

/// What makes a request the same one: whose it is, its number, and the life of its sender.
type Key = (SocketAddrV4, u32, u64);

fn key(application: &Application<'_>) -> Key {
    (
        application.from,
        application.request_id,
        application.request.sender_id,
    )
}

/// One request that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    pub(super) from: SocketAddrV4,
    pub(super) request_id: u32,
    pub(super) request: Request,
    pub(super) since: Time,
    heard: Time,
}

impl Waiter {
    pub(super) fn application(&self) -> Application<'_> {
        Application::new(self.from, self.request_id, &self.request)
    }
}

/// The requests that wait for one receiver's places. Whatever is done for one of them takes no longer because many wait: under load
/// that is when the least time is left.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    waiters: BTreeMap<Key, Waiter>,
    by_age: BTreeSet<(Time, Key)>,
    by_len: BTreeSet<(u64, Time, Key)>,
    by_silence: BTreeSet<(Time, Key)>,
    capacity: usize,
    /// Requests of one source address.
    address_max: usize,
}

impl Waiting {
    pub(super) fn new(capacity: usize, address_max: usize) -> Waiting {
        Waiting {
            waiters: BTreeMap::new(),
            by_age: BTreeSet::new(),
            by_len: BTreeSet::new(),
            by_silence: BTreeSet::new(),
            capacity,
            address_max,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    fn has_room_for(&self, address: Ipv4Addr) -> bool {
        let first = (SocketAddrV4::new(address, 0), 0, 0);
        let last = (SocketAddrV4::new(address, u16::MAX), u32::MAX, u64::MAX);
        self.waiters.len() < self.capacity
            && self.waiters.range(first..=last).take(self.address_max).count() < self.address_max
    }

    /// Takes a request in, or notes that it is still wanted. A full list turns newcomers away.
    pub(super) fn add(&mut self, now: Time, application: &Application<'_>) {
        let key = key(application);
        if let Some(waiter) = self.waiters.get_mut(&key) {
            self.by_silence.remove(&(waiter.heard, key));
            waiter.heard = now;
        } else if self.has_room_for(*application.from.ip()) {
            let waiter = Waiter {
                from: application.from,
                request_id: application.request_id,
                request: *application.request,
                since: now,
                heard: now,
            };
            self.waiters.insert(key, waiter);
            self.by_age.insert((now, key));
            self.by_len
                .insert((application.request.max_message_len, now, key));
        } else {
            return;
        }
        self.by_silence.insert((now, key));
    }

    /// Who goes next, after so many others. It stays in the list.
    pub(super) fn nth(&self, others: usize, now: Time) -> Option<Waiter> {
        let has_aged = |since: Time| now.since(since) >= AGEING_BOUND;
        let aged = (self.by_age.iter()).take_while(|(since, _)| has_aged(*since));
        let short = self.by_len.iter().filter(|(_, since, _)| !has_aged(*since));
        let mut order = aged.map(|(_, key)| key).chain(short.map(|(.., key)| key));
        self.waiters.get(order.nth(others)?).copied()
    }

    pub(super) fn remove(&mut self, application: &Application<'_>) {
        self.take(&key(application));
    }

    /// Its sender does not want the request any more.
    pub(super) fn withdraw(&mut self, from: SocketAddrV4, request_id: u32) {
        let lives = (from, request_id, 0)..=(from, request_id, u64::MAX);
        if let Some(key) = self.waiters.range(lives).next().map(|(&key, _)| key) {
            self.take(&key);
        }
    }

    fn take(&mut self, key: &Key) {
        if let Some(waiter) = self.waiters.remove(key) {
            self.by_age.remove(&(waiter.since, *key));
            self.by_len
                .remove(&(waiter.request.max_message_len, waiter.since, *key));
            self.by_silence.remove(&(waiter.heard, *key));
        }
    }

    /// Drops those that have not repeated their request.
    pub(super) fn expire(&mut self, now: Time) {
        while let Some(&(heard, key)) = self.by_silence.first()
            && now.since(heard) >= SILENCE_BOUND
        {
            self.take(&key);
        }
    }

    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.by_silence.first().map(|&(heard, _)| heard + SILENCE_BOUND)
    }

    pub(super) fn take_all(&mut self) -> Vec<Waiter> {
        let waiters = core::mem::replace(self, Waiting::new(self.capacity, self.address_max)).waiters;
        waiters.into_values().collect()
    }
}
