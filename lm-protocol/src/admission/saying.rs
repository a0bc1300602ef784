//! What a node says: to one host, to all of them, and to the programs of its own.

use super::incoming::Reply;
use super::message::{Append, MAX_BODY_LEN, Message, Remove, Stage};
use super::node::Node;
use super::outgoing::{Said, Ticket};
use super::seal::{Datagram, SealHeader};
use super::{Action, LIST_LEASE, LIST_LEASE_MAX};
use crate::time::Time;
use alloc::vec::Vec;
use core::net::SocketAddrV4;
use core::time::Duration;

/// How long after its last session a host says that it does not receive any more, under `concurrent`: so that many short sessions
/// do not flood the cluster with what nobody there decides by.
const IDLE: Duration = Duration::from_secs(1);

/// What all hosts were told of this one, under `concurrent`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Announced {
    Nothing,
    Active {
        again: Time,
    },
    /// Its last session has ended; to be taken back then.
    Idle {
        until: Time,
        again: Time,
    },
}

impl Node {
    /// Policy `concurrent`: keeps the other hosts' lists true.
    pub(super) fn announce(&mut self, now: Time) {
        if self.config.key.is_none() {
            return;
        }
        let is_receiving = self.is_receiving();
        let append = match self.announced {
            Announced::Nothing if is_receiving => {
                self.last_number += 1;
                true
            }
            Announced::Active { again } | Announced::Idle { again, .. } if is_receiving => {
                self.announced = Announced::Active { again };
                now >= again
            }
            Announced::Active { again } => {
                let until = now + IDLE;
                self.announced = Announced::Idle { until, again };
                false
            }
            Announced::Idle { until, .. } if now >= until => {
                self.announced = Announced::Nothing;
                let remove = Remove {
                    address: *self.config.address.ip(),
                    number: self.last_number,
                };
                self.transmit_to_all(&Message::Remove(remove));
                false
            }
            Announced::Nothing | Announced::Idle { .. } => false,
        };
        if append {
            self.announced = Announced::Active {
                again: now + LIST_LEASE / 3,
            };
            self.transmit_to_all(&self.active_for(LIST_LEASE));
        }
    }

    /// LM_APPEND_ADDR: this host's DLD is active, for so long at least.
    pub(super) fn active_for(&self, lease: Duration) -> Message {
        Message::Append(Append {
            address: *self.config.address.ip(),
            stage: Stage::Active,
            number: self.last_number,
            lease_ms: lease.min(LIST_LEASE_MAX).as_millis() as u32,
        })
    }

    /// Tells a host that is heard for the first time what all were told before they could take it.
    pub(super) fn tell_newcomer(&mut self, now: Time, to: SocketAddrV4) {
        let lease = match (&self.exclusive, self.announced) {
            (Some(exclusive), _) => exclusive.active_until().map(|until| until.since(now)),
            (None, Announced::Active { .. }) => Some(LIST_LEASE),
            (None, _) => None,
        };
        if let Some(lease) = lease {
            self.transmit(to, 0, &self.active_for(lease));
        }
    }

    /// Sends what receivers answer.
    pub(super) fn reply(&mut self) {
        let receivers = self
            .receivers
            .iter_mut()
            .filter(|(_, receiver)| !receiver.replies.is_empty());
        let replies = receivers.map(|(&port, receiver)| (port, core::mem::take(&mut receiver.replies)));
        // Allocates nothing where there are none: it is asked for in each turn.
        for (port, replies) in replies.collect::<Vec<_>>() {
            self.send_all(port, replies);
        }
    }

    pub(super) fn send_all(&mut self, port: u16, replies: Vec<Reply>) {
        for (to, message) in replies {
            self.transmit(to, port, &message);
        }
    }

    /// Sends, and tells programs, what the sessions that they have as senders say.
    pub(super) fn say(&mut self) {
        for what in core::mem::take(&mut self.outgoing.said) {
            match what {
                Said::Message(to, port, Ticket(request_id), message) => {
                    self.transmit(to, port, &Message::Session { request_id, message });
                }
                Said::Outcome(ticket, outcome) => self.out.push(Action::Tell { ticket, outcome }),
            }
        }
    }

    /// LM_HELLO: with our echo, and to a stranger with a challenge.
    pub(super) fn hello(&mut self, to: SocketAddrV4, echo: u64, to_stranger: bool) {
        let challenge = match (&self.config.key, to_stranger) {
            (Some(key), true) => self.peers.challenge(key, self.config.boot_id, to),
            _ => 0,
        };
        self.seal(Some(to), 0, challenge, echo, &Message::Hello);
    }

    pub(super) fn transmit(&mut self, to: SocketAddrV4, port: u16, message: &Message) {
        let challenge = match &self.config.key {
            Some(key) if !self.peers.is_known(to) => self.peers.challenge(key, self.config.boot_id, to),
            _ => 0,
        };
        let echo = self.peers.echo(to);
        self.seal(Some(to), port, challenge, echo, message);
    }

    pub(super) fn transmit_to_all(&mut self, message: &Message) {
        self.seal(None, 0, 0, 0, message);
    }

    fn seal(&mut self, to: Option<SocketAddrV4>, port: u16, challenge: u64, echo: u64, message: &Message) {
        self.sequence += 1;
        let header = SealHeader {
            port,
            boot_id: self.config.boot_id,
            sequence: self.sequence,
            challenge,
            echo,
        };
        let mut body = [0; MAX_BODY_LEN];
        let len = message.encode(&mut body);
        let datagram = match &self.config.key {
            Some(key) => key.seal(self.config.address, to, &header, &body[..len]),
            None => Datagram::plain(&body[..len]),
        };
        self.out.push(match to {
            Some(to) => Action::Send { to, datagram },
            None => Action::SendToAll { datagram },
        });
    }
}
