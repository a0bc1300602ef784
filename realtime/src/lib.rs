//! Real-time messages on LM endpoints (SS-RTUDP): ahead of everything else on the link, never repeated, and of no use when late.
//!
//! Built on an endpoint's extension points alone: packets leave by a [`Flow`](lm_dataplane::Flow), ahead of messages, and come to a
//! [`Handler`](lm_dataplane::Handler); reports go back the same way, and a [`Shaper`](lm_dataplane::Shaper) asks the smoother for
//! everything that is not real-time. A message of several packets is put together in a block of its socket ([`Blocks`]), one of one packet stays
//! where it came in. Messages are copied when they are handed over, or written in the socket's memory ([`RtSocket::buffer`]). What the kernel sends on the interface gets what that leaves ([`RealTime::hold_kernel`]).
//!
//! ```no_run
//! use std::num::NonZeroU64;
//! use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig};
//! use lm_protocol::smoother::Parameters;
//! use lm_realtime::{Foreign, RealTime, SendOptions, SocketConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut endpoint = Endpoint::open(&EndpointConfig { interface: "eth1".into(), ..EndpointConfig::default() })?;
//! let link = Parameters::of_link(NonZeroU64::new(100_000_000).unwrap(), 1514);
//! let real_time = RealTime::new(&mut endpoint, Some(link), lm_realtime::monotonic)?;
//! real_time.hold_kernel("eth1", Foreign::Keep);
//! let mut socket = real_time.socket(&mut endpoint, 5000, &SocketConfig::default())?;
//! let peer = endpoint.connect("10.0.0.2:7168".parse()?, &ConnectOptions::default())?;
//! socket.connect(&mut endpoint, peer, 5000)?;
//! socket.send(b"set point", SendOptions { priority: 7, ..SendOptions::default() })?;
//! endpoint.poll();
//! while let Some(message) = socket.recv() {
//!     println!("{} bytes, {} lost before", message.len(), message.info().lost);
//! }
//! # Ok(())
//! # }
//! ```

mod assembling;
#[expect(unsafe_code, reason = "cells with one owner at a time")]
mod entries;
mod error;
mod flows;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod histogram;
mod incoming;
#[expect(unsafe_code, reason = "entries are their owner's")]
mod latest;
#[cfg(test)]
#[expect(unsafe_code, reason = "a thread's core and priority")]
mod latest_tests;
mod message;
mod outgoing;
#[expect(unsafe_code, reason = "blocks are parts of one mapping, which is locked")]
mod pool;
mod queues;
mod receiving;
mod sending;
mod smoothing;
mod socket;
mod statistics;

pub use error::{NotSent, OpenError, SendError};
pub use histogram::{Histogram, Percentiles, write_hgrm};
pub use lm_cards::{Foreign, Traffic};
pub use message::{Deadline, Info, RtMessage, SendOptions, SendOutcome};
pub use pool::{Blocks, RtBuffer};
pub use socket::{RealTime, RtSocket, SocketConfig, monotonic};
pub use statistics::{Histograms, Statistics};
