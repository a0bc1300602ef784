//! LM endpoints on AF_XDP: UMEM, rings, landing zones, the poll engine.

// Unit tests of the engine run on the simulated NIC. It is a crate that uses this one, so they compile its source as a module here.
#[cfg(any(test, feature = "fuzzing"))]
extern crate self as lm_dataplane;

mod admission;
mod applying;
mod arena;
mod aside;
mod bounds;
mod capture;
mod checksum;
mod completion;
mod config;
mod connect;
mod control;
mod counters;
mod daemon;
mod daemon_sessions;
mod eager;
mod endpoint;
mod engine;
mod entropy;
mod error;
mod footprint;
mod foreign;
mod fragment_digests;
mod frames;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod granting;
mod handlers;
mod hearing;
mod idle;
mod incoming;
mod integrity;
mod introductions;
mod kernel;
mod landing;
mod landing_channel;
mod landing_memory;
mod landing_side;
mod link;
mod looks;
mod losses;
pub mod memory;
mod message;
mod napi;
mod notices;
mod open;
mod open_daemon;
mod opening;
mod outbound;
mod outgoing_sessions;
mod over;
mod own_node;
mod packet_memory;
mod packets;
mod peer;
mod placing;
mod polling;
pub mod port;
mod probe;
mod queue_poll;
mod region;
mod release;
mod requests;
pub mod ring;
mod ring_memory;
pub mod ring_queue;
pub mod route;
mod scheduler;
mod sending;

#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    not(test),
    allow(dead_code, unused_imports, reason = "the fuzzer uses a part of the tests")
)]
mod sim_tests;
#[cfg(any(test, feature = "fuzzing"))]
#[path = "../sim/src/simnic.rs"]
#[allow(
    unreachable_pub,
    dead_code,
    unused_imports,
    reason = "it is a crate of its own as well"
)]
mod simnic;
mod small;
mod sockopt;
mod stewarded;
mod stream;
mod telling;
mod terms;
mod timers;
mod told;

mod udp;
mod waker;
mod watching;
mod words;
mod writer;
pub mod xsk;

pub use checksum::Checksum;
pub use completion::{Completion, LoanError, Outcome, PeerId, RecvError, SendError, SendToken};
pub use config::{
    Admission, AdmissionConfig, DEFAULT_PORT, Depth, EndpointConfig, IdleStrategy, LinkConfig, MemoryConfig,
    ReceiveConfig,
};
pub use connect::{ConnectError, ConnectOptions, Session};
pub use counters::{Counters, Drops, Violations};
pub use daemon::{DaemonError, SharedSmoother, ipc, socket};
pub use endpoint::{Endpoint, Extensions, PeerHandle, Status};
pub use error::OpenError;
pub use handlers::{Arrived, Handler, HandlerError, HandlerId, Replies};
pub use incoming::Incoming;
pub use kernel::{KernelNic, KernelNicConfig};
pub use landing_memory::LandingMemory;
pub use lm_protocol::admission::ClusterKey;
pub use lm_protocol::delivery::Delivery;
pub use lm_protocol::integrity::Integrity;
pub use lm_protocol::streaming::{Ending, NotValid, WriterError};
pub use memory::HugePages;
pub use message::{LandingRegion, Message};
pub use napi::{Deferral, Napi, Setting};
pub use over::{Device, PortMemory};
pub use placing::{Announced, Placed, Placement, RETRACTED, Settled, ZoneSource};
pub use port::{EffectiveMode, ModeRequest};
pub use region::{Payloads, SendRegion, TrySendError};
pub use scheduler::{Class, Flow, FlowError, FlowId, FlowSpec, RateLimit, Scope, Shaper, Signal, TxBatch};
pub use terms::LandingTerms;
pub use udp::UdpError;
pub use waker::Waker;
pub use words::WordsError;
pub use writer::MessageWriter;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
