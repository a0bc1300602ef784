//! What a node tells of itself.

use super::super::Counters;
use super::super::exclusive::Exclusive;
use super::super::incoming::Receiver;
use super::super::list::{Flag, RecvAddr};
use super::super::saying::Announced;
use super::Node;
use crate::session::Session;
use crate::time::Time;
use alloc::vec::Vec;

/// What a node keeps at the moment; each is bounded by [`Limits`](crate::admission::Limits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Hosts that are known.
    pub hosts: usize,
    /// Sessions and requests of this host's programs.
    pub outgoing: usize,
    /// Sessions of this host's receivers.
    pub sessions: usize,
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Other hosts in the LM_RECV_ADDR list.
    pub listed: usize,
    /// Whether this host, as a voter, has given its word.
    pub promised: bool,
}

impl Node {
    /// When to call [`Node::on_timer`]; `None` when only a datagram or a program can change anything. To be asked after each call.
    pub fn next_deadline(&self) -> Option<Time> {
        let announcement = match self.announced {
            Announced::Nothing => None,
            Announced::Active { again: at } | Announced::Idle { until: at, .. } => Some(at),
        };
        let exclusive = self.exclusive.as_ref().and_then(Exclusive::next_deadline);
        let is_idle = self.exclusive.is_some() && !self.is_any_receiving();
        let fixed = [
            announcement,
            exclusive,
            is_idle.then(|| self.outgoing.next_place()).flatten(),
            self.outgoing.next_timer(),
            self.list.next_expiry(),
        ];
        let receivers = self.receivers.values().map(Receiver::next_deadline);
        fixed.into_iter().chain(receivers).flatten().min()
    }

    /// The LM_RECV_ADDR list, by address: other hosts that said so, and this one if it receives.
    pub fn recv_addrs(&self, now: Time) -> Vec<RecvAddr> {
        let others = self.list.iter().filter(|&(_, expires)| expires > now);
        let mut list: Vec<RecvAddr> = others
            .map(|(address, expires)| RecvAddr {
                address,
                flag: match self.outgoing.sends_to(address) {
                    true => Flag::Sending,
                    false => Flag::Elsewhere,
                },
                expires,
            })
            .collect();
        let placed = self.sessions().filter(|(_, session)| session.has_place());
        let own = placed.map(|(_, session)| session.expires).max();
        list.extend(own.map(|expires| RecvAddr {
            address: *self.config.address.ip(),
            flag: Flag::Receiving,
            expires,
        }));
        list.sort_by_key(|entry| entry.address);
        list
    }

    /// The sessions of this host's receivers, with the receiver's port.
    pub fn sessions(&self) -> impl Iterator<Item = (u16, &Session)> {
        self.receivers
            .iter()
            .flat_map(|(&port, receiver)| receiver.grantor.sessions().map(move |session| (port, session)))
    }

    /// What became of the datagrams that came in.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What is kept at the moment.
    pub fn usage(&self, now: Time) -> Usage {
        let promised_to = self
            .exclusive
            .as_ref()
            .and_then(|exclusive| exclusive.promised_to(now));
        Usage {
            hosts: self.peers.len(),
            outgoing: self.outgoing.len(),
            sessions: self.sessions().count(),
            waiting: self
                .receivers
                .values()
                .map(|receiver| receiver.waiting.len())
                .sum(),
            listed: self.list.len(),
            promised: promised_to.is_some(),
        }
    }
}
