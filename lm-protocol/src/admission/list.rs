//! The LM_RECV_ADDR list (LM §3.3): which hosts' DLD is active, as far as they said so.

use crate::time::Time;
use alloc::collections::BTreeMap;
use core::fmt;
use core::net::Ipv4Addr;

/// The paper's `flag` of an LM_RECV_ADDR entry: "the relation between the listed address and the local address".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flag {
    /// 00: "no LM_RECV traffic between the listed address and the local address".
    Elsewhere,
    /// 01: "the local node is transmitting LM_RECV traffic to some other remote nodes": to the listed one.
    Sending,
    /// 10: "the listed address is the local address": other nodes transmit to the local node.
    Receiving,
}

/// The paper's two binary digits.
impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Flag::Elsewhere => "00",
            Flag::Sending => "01",
            Flag::Receiving => "10",
        })
    }
}

/// One LM_RECV_ADDR entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecvAddr {
    /// The host whose DLD is active.
    pub address: Ipv4Addr,
    /// What it has to do with this host.
    pub flag: Flag,
    /// When the entry goes unless it is appended again.
    pub expires: Time,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    expires: Time,
}

/// Other hosts' entries; the flag and the own entry are the node's to know.
#[derive(Clone, Debug)]
pub(super) struct List {
    entries: BTreeMap<Ipv4Addr, Entry>,
    /// No entry expires before: entries that are appended again make it early, never late.
    earliest: Time,
}

impl List {
    pub(super) fn new() -> List {
        List {
            entries: BTreeMap::new(),
            earliest: Time::MAX,
        }
    }

    /// LM_APPEND_ADDR. Entries are as many as hosts at most, and `capacity` bounds those.
    pub(super) fn append(&mut self, address: Ipv4Addr, number: u64, expires: Time, capacity: usize) {
        if self.entries.len() < capacity || self.entries.contains_key(&address) {
            self.entries.insert(address, Entry { number, expires });
            self.earliest = self.earliest.min(expires);
        }
    }

    /// LM_REMOVE_ADDR for claims up to `number`; a number from a life before is past as well.
    pub(super) fn remove(&mut self, address: Ipv4Addr, number: u64) {
        if self
            .entries
            .get(&address)
            .is_some_and(|entry| entry.number <= number)
        {
            self.entries.remove(&address);
        }
    }

    /// A host began a new life: its numbers start anew, and its entry stays until its lease is over.
    pub(super) fn renumber(&mut self, address: Ipv4Addr) {
        if let Some(entry) = self.entries.get_mut(&address) {
            entry.number = 0;
        }
    }

    pub(super) fn expire(&mut self, now: Time) {
        if now >= self.earliest {
            self.entries.retain(|_, entry| entry.expires > now);
            let expiries = self.entries.values().map(|entry| entry.expires);
            self.earliest = expiries.min().unwrap_or(Time::MAX);
        }
    }

    /// When to [`expire`](List::expire) next.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        (!self.entries.is_empty()).then_some(self.earliest)
    }

    pub(super) fn contains(&self, address: Ipv4Addr) -> bool {
        self.entries.contains_key(&address)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Ipv4Addr, Time)> {
        self.entries
            .iter()
            .map(|(&address, entry)| (address, entry.expires))
    }
}
