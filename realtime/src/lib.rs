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
//!
//! # ROS 2's QoS on real-time sockets
//!
//! What a middleware for ROS 2 (`rmw`) would set and ask for each policy of a topic, by the names of `lm-realtime`. LM
//! has no such middleware, no discovery and no types: a topic is a socket's number, and a publisher is connected to
//! each subscriber by a socket of its own.
//!
//! - *history: keep last, depth n*: `SocketConfig::keep`, at both ends: the oldest gives way, `send` never waits;
//!   `Statistics::superseded`, `superseded_here`
//! - *history: keep all*: none: refuse it, or send by the endpoint, whose messages are repeated and wait
//!   (`Endpoint::send`)
//! - *reliability: best effort*: what a socket does: nothing is repeated, gaps are told (`Info::lost`,
//!   `Statistics::lost`, `reported_lost`), and that there is no subscriber (`reported_refused`)
//! - *reliability: reliable*: messages of the endpoint (`Delivery::Reliable`), behind all real time in their host
//! - *lifespan*: `SendOptions::deadline`, a duration or a moment (`Deadline`): over already is an error; late before
//!   it left, it does not leave; late there, it is dropped (`drops_late`) or marked
//! - *deadline, at a subscriber*: `SocketConfig::period`; `RtSocket::missed` tells of periods without a message and
//!   ends `wait`
//! - *deadline, at a publisher*: its own timer; that nothing was sent no socket tells
//! - *liveliness: automatic, manual by topic*: messages count: a `period` as long as the lease, and a short message in
//!   each where nothing else is sent
//! - *durability: volatile*: what a socket does: a late subscriber gets what is sent from then on
//! - *durability: transient local*: none: refuse it
//! - *transport priority*: `SendOptions::priority`, 0 to 7; on the wire DSCP 46 (EF) for all of them, and for their
//!   reports
//!
//! *Deadline* means two things: that of DDS is a period, and LM's `deadline` is DDS's lifespan.
//!
//! ## What else users of it ask for
//!
//! - *publishing never blocks*: `RtSocket::send` copies and returns; the endpoint's next round sends by priority, then
//!   by deadline
//! - loaned messages (`rmw_borrow_loaned_message`): `RtSocket::buffer`, `send_buffer`; `unlocked` gives it back
//! - *taken without a copy*: `RtMessage` is read where it lies, and goes back when it is dropped; one of several
//!   packets was copied once
//! - *take with info*: `RtMessage::info`: `sent_at`, `received_at`, `number`, `lost`, `late`
//! - *waiting on many topics*: a socket is a descriptor for poll(2) (`AsFd`); C: `lm_rt_fd`
//! - *statistics of topics*: `RtSocket::histograms`: latency, jitter, delay, lost, late, missed, superseded; as
//!   `.hgrm` by `Histogram::write_hgrm`
//! - *a rate that is kept free*: `SocketConfig::packets_per_second`: three quarters of the link for all sockets
//!   together, or opening one is an error; `Statistics::beyond_rate`
//!
//! ## Bounds
//!
//! - A message has 65,436 bytes at most, in a block of 16 pages (`SocketConfig::blocks`). Longer ones (images, point
//!   clouds) are messages of the endpoint.
//! - A lifespan across hosts needs one clock, and only programs of one host have one (`SocketConfig::same_host`). Else
//!   a message is late when it was on the way longer by that than the fastest of the last ten seconds, whatever clock
//!   it says it is by.
//! - `period` is of all senders to a socket together: a socket for each publisher tells them apart.
//! - Publisher and subscriber do not compare policies. The setup of the topic does: an offered deadline or lease must
//!   be no longer than the requested one, as DDS has it.

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
