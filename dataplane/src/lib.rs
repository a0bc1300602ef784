//! LM endpoints on AF_XDP: messages between hosts without copies in user space.
//!
//! An [`Endpoint`] is one interface's UDP port as a program uses it. Memory is taken when it opens; a program writes
//! messages into that memory and reads received ones from it. One thread at a time drives an endpoint, by its calls.
//!
//! # A first message
//!
//! The sender connects, borrows a region, fills it and sends it. Messages of more than one packet need a session, which
//! [`Endpoint::connect`] asks for:
//!
//! ```no_run
//! use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig};
//! use std::{io::Write, time::Duration};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = EndpointConfig { interface: "eth1".into(), ..EndpointConfig::default() };
//! let mut endpoint = Endpoint::open(&config)?;
//! let options = ConnectOptions { max_message_len: 1 << 20, ..ConnectOptions::default() };
//! let peer = endpoint.connect("10.0.0.2:7168".parse()?, &options)?;
//! let mut region = endpoint.loan(peer, 1 << 20)?; // memory that the driver reads
//! region.write_all(&[7; 1 << 20])?; // skips the holes for headers
//! endpoint.send(region, 42)?; // 42: a tag for the receiver
//! endpoint.send_copy(peer, b"a small one", 43)?; // one packet: copied, no session needed
//! endpoint.flush(Duration::from_secs(10))?; // until the receiver has confirmed both
//! # Ok(())
//! # }
//! ```
//!
//! The receiver takes messages. Each is one slice of the memory in which it landed, given back when it is dropped:
//!
//! ```no_run
//! use lm_dataplane::{Endpoint, EndpointConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = EndpointConfig { interface: "eth1".into(), port: 7168, ..EndpointConfig::default() };
//! let mut endpoint = Endpoint::open(&config)?;
//! let message = endpoint.recv(None)?;
//! println!("{} bytes, tag {}, from {:?}", message.len(), message.tag(), message.peer());
//! # Ok(())
//! # }
//! ```
//!
//! # Where to go on
//!
//! | wish | see |
//! |---|---|
//! | calls that do not wait | [`Endpoint::try_send`], [`Endpoint::try_recv`], [`Endpoint::poll`] |
//! | sleep in an epoll of one's own | [`Endpoint::until_poll`] |
//! | what became of a message | [`Endpoint::try_completion`], [`Outcome`], [`Delivery`] |
//! | send while writing, read while arriving | [`PeerHandle::begin`], [`PeerHandle::watch`], [`Incoming`] |
//! | choose where messages land | [`Extensions::place_by`], [`ZoneSource`] |
//! | packets of one's own, rate limits | [`Flow`], [`Handler`], [`Shaper`] |
//! | another device | [`port::Port`], [`Endpoint::over`] |
//! | mode, counters, warnings | [`Endpoint::status`], [`Endpoint::counters`] |
//!
//! `dataplane/examples` has `echo`, `ping` and `file`; `ARCHITECTURE.md` the data's path and its invariants.

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
mod mutants;
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
pub mod sockopt;
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
pub use napi::{Deferral, Instance, Napi, Setting};
pub use over::{Device, PortMemory};
pub use placing::{Announced, Placed, Placement, RETRACTED, Settled, ZoneSource};
pub use port::{EffectiveMode, ModeRequest};
pub use queue_poll::prefer_busy_polling;
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
