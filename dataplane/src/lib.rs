//! LM endpoints on AF_XDP: UMEM, rings, landing zones, the poll engine.

mod arena;
mod capture;
mod channel;
pub mod config;
mod control;
mod counters;
mod eager;
mod endpoint;
mod engine;
mod error;
mod frames;
mod idle;
pub mod interface;
pub mod kernel;
mod landing;
pub mod memory;
mod message;
mod netlink;
pub mod nic;
mod opening;
mod outbound;
mod packets;
mod peer;
mod probe;
mod queue_poll;
mod region;
mod release;
mod requests;
pub mod ring;
mod ring_memory;
pub mod route;

#[cfg(test)]
mod sim_tests;
pub mod simnic;
mod timers;

pub mod udp;
pub mod xsk;

pub use config::{ConnectOptions, DEFAULT_PORT, EndpointConfig, IdleStrategy};
pub use counters::{Counters, Drops, Violations};
pub use endpoint::Endpoint;
pub use error::{ConnectError, LoanError, OpenError, RecvError, SendError, TrySendError};
pub use lm_protocol::delivery::Delivery;
pub use memory::HugePages;
pub use message::{LandingRegion, Message};
pub use nic::{EffectiveMode, ModeRequest};
pub use outbound::{Completion, Outcome, SendToken};
pub use peer::PeerId;
pub use region::{Payloads, SendRegion};
