//! LM endpoints on AF_XDP: UMEM, rings, landing zones, the poll engine.
#![cfg_attr(
    fuzzing,
    allow(dead_code, unused_imports, reason = "the fuzzer uses a part of the tests")
)]

mod arena;
mod capture;
mod channel;
pub mod config;
mod control;
mod counters;
pub mod daemon;
mod eager;
mod endpoint;
mod engine;
mod error;
mod frames;
mod granting;
mod idle;
mod integrity;
pub mod interface;
pub mod kernel;
mod landing;
mod landing_channel;
mod losses;
pub mod memory;
mod message;
pub mod napi;
mod netlink;
pub mod nic;
mod notices;
mod one_copy;
mod open;
mod open_daemon;
mod opening;
mod outbound;
mod packets;
mod peer;
mod pending;
pub mod platform;
mod polling;
mod probe;
mod queue_poll;
mod rate_limit;
mod region;
mod release;
mod requests;
pub mod ring;
mod ring_memory;
pub mod route;

#[cfg(any(test, fuzzing))]
mod sim_tests;
pub mod simnic;
pub mod steering;
mod stewarded;
mod stream;
mod telling;
pub mod terms;
mod timers;

pub mod udp;
pub mod xsk;

pub use config::{Admission, ConnectOptions, DEFAULT_PORT, EndpointConfig, IdleStrategy, Start};
pub use counters::{Counters, Drops, Violations};
pub use endpoint::Endpoint;
pub use error::{ConnectError, LoanError, OpenError, RecvError, SendError, TrySendError};
pub use lm_protocol::delivery::Delivery;
pub use lm_protocol::integrity::Integrity;
pub use memory::HugePages;
pub use message::{LandingRegion, Message};
pub use nic::{EffectiveMode, ModeRequest};
pub use outbound::{Completion, Outcome, SendToken};
pub use peer::PeerId;
pub use region::{Payloads, SendRegion};

/// Entries for the fuzz targets in `fuzz/`, which exist when cargo-fuzz builds this crate and at no other time.
#[cfg(fuzzing)]
pub mod fuzzing {
    /// Two engines on a simulated wire, with every decision taken from `tape`: packets from a hostile third, times, what
    /// the applications do. Panics when an invariant is violated.
    pub fn engine(tape: &[u8]) {
        crate::sim_tests::besiege(tape);
    }

    /// The kernel's answer to a question over rtnetlink.
    pub fn netlink(bytes: &[u8]) {
        crate::netlink::read(bytes, true, &mut true, &mut Vec::new()).ok();
        crate::netlink::read(bytes, false, &mut true, &mut Vec::new()).ok();
    }
}
