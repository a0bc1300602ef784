//! What the simulated cluster is made of: hosts with clocks of their own, a network, programs that want to send, and chance.

use crate::gate::*;
use lm_protocol::admission::*;
use lm_protocol::control::Grant;
use lm_protocol::session::Session;
use lm_protocol::time::Time;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

/// How far the rate of a host's clock is from the world's, at most, in 1024ths.
pub(crate) const DRIFT: u64 = 40;

/// splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// What the network does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    pub(crate) loss_per_mille: u64,
    pub(crate) duplicate_per_mille: u64,
    pub(crate) delay_min: Duration,
    pub(crate) delay_max: Duration,
}

impl Weather {
    /// A switch with nothing to do.
    pub(crate) const FAIR: Weather = Weather {
        loss_per_mille: 0,
        duplicate_per_mille: 0,
        delay_min: Duration::from_micros(30),
        delay_max: Duration::from_micros(90),
    };
}

/// How somebody dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    /// The whole host: its gate too.
    Host,
    /// The daemon: the gate stays as it is.
    Daemon,
}

/// What became of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Not begun, or its host died.
    Nothing,
    Asking,
    Holding,
    Done,
    OneCopy,
    Cancelled,
    /// Rejected, with no place in time.
    TimedOut,
    Unreachable,
    Lost,
}

/// A program that wants to send one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) sender: usize,
    pub(crate) receiver: usize,
    pub(crate) len: u64,
    pub(crate) hold: Duration,
    pub(crate) fate: Fate,
    pub(crate) asked: Time,
    pub(crate) granted: Option<Time>,
    /// It requested, and was rejected.
    pub(crate) is_rejected: bool,
    pub(crate) life: u64,
    pub(crate) ticket: Option<Ticket>,
    pub(crate) grant: Option<Grant>,
    /// Since when nobody renews its session.
    pub(crate) gone: Option<Time>,
}

pub(crate) struct Host {
    pub(crate) address: SocketAddrV4,
    pub(crate) node: Option<Node>,
    pub(crate) gate: Gate,
    pub(crate) life: u64,
    /// Its clock: `offset + now · rate / 1024`.
    pub(crate) offset: u64,
    pub(crate) rate: u64,
    pub(crate) wake: Option<Time>,
    /// What the daemon knew of its sessions when it died.
    pub(crate) kept: Vec<Session>,
    pub(crate) last_active: Option<Time>,
    /// When its daemon started last.
    pub(crate) began: Time,
}

impl Host {
    pub(crate) fn local(&self, now: Time) -> Time {
        Time::from_nanos(self.offset + (u128::from(now.as_nanos()) * u128::from(self.rate) / 1024) as u64)
    }

    pub(crate) fn global(&self, local: Time) -> Time {
        let since = local.as_nanos().saturating_sub(self.offset);
        Time::from_nanos((u128::from(since) * 1024).div_ceil(u128::from(self.rate)) as u64)
    }

    /// Whether its gate admits packets.
    pub(crate) fn is_active(&self, now: Time) -> bool {
        !self.gate.open.is_empty() && self.gate.until.is_none_or(|until| self.local(now) < until)
    }
}

/// What to build.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) hosts: usize,
    /// Voters: the policy `exclusive`; 0: `concurrent`.
    pub(crate) voters: usize,
    pub(crate) places: usize,
    pub(crate) weather: Weather,
    pub(crate) limits: Limits,
    pub(crate) patience: Duration,
    /// Clocks that differ, in offset and rate.
    pub(crate) is_drifting: bool,
    /// More is a storm that feeds itself.
    pub(crate) datagrams_max: u64,
}

impl Setup {
    pub(crate) fn new(seed: u64, hosts: usize, voters: usize) -> Setup {
        Setup {
            seed,
            hosts,
            voters,
            places: 1,
            weather: Weather::FAIR,
            limits: Limits::default(),
            patience: Duration::from_secs(5),
            is_drifting: false,
            datagrams_max: 2_000_000,
        }
    }

    pub(crate) fn policy(&self) -> Policy {
        match self.voters {
            0 => Policy::Concurrent,
            voters => Policy::Exclusive {
                voters: (0..voters).map(address).collect(),
            },
        }
    }
}

pub(crate) fn address(host: usize) -> SocketAddrV4 {
    let host = u32::try_from(host).unwrap() + 1;
    SocketAddrV4::new(Ipv4Addr::from(0x0a00_0000 + host), 7169)
}

pub(crate) fn key() -> ClusterKey {
    ClusterKey::new(b"the key of the simulated cluster").unwrap()
}
