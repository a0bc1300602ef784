//! LM wire formats, geometry, windows and session state machines; no I/O, no clock.
//!
//! LM moves a message from one application's memory into another's without reassembly copies. This crate holds
//! everything about it that is arithmetic, bytes on the wire or protocol state:
//!
//! | module | what it answers |
//! |---|---|
//! | [`geometry`] | where each fragment's header and payload lie, in the send region and in the landing zone |
//! | [`zone`] | how much memory a landing zone takes, and where a fragment's fill entry points (invariant I2) |
//! | [`window`] | in which order fragments travel, and when a window's lowest frame may be posted (invariant I5) |
//! | [`wire`] | Ethernet, IPv4, UDP, LM headers and IP fragments: parse, build, per-packet templates |
//! | [`delivery`] | which fragments arrived, which are missing, when to ask for them again |
//! | [`control`] | the admission messages of the paper's section 3.3 as datagrams |
//! | [`admission`] | what the daemons of a cluster's hosts say to each other: who receives, from whom, for how long |
//! | [`manifest`] | 64-bit digests of fragments and messages: what proves that every byte is where it belongs |
//! | [`integrity`] | whether there are digests, and when to ask for those that are missing |
//! | [`rate`] | how many packets may leave now: a sender's rate limit, and its back-off on loss |
//! | [`rss`] | on which queue of a card a packet arrives, and which source port brings one there |
//! | [`session`] | the applicant's and the grantor's state machines, sans-I/O, under a given time |
//! | [`smoother`] | how many packets may leave so that real-time ones find room at a port that hosts share |
//! | [`serial`] | comparison of numbers that wrap |
//! | [`streaming`] | what may be sent of a message that is still written, and what may be read of one that is still arriving |
//! | [`time`] | the time that the state machines are told |
//!
//! The crate needs `alloc` for the grantor's table, the receiver's digests and windows and the ranges that are missing of a message
//! only, never calls the operating system, never reads a clock and
//! never panics on bytes from the network.
//!
//! ```
//! use lm_protocol::geometry::{Layout, LinkShape, Wire};
//!
//! // The paper's example (LM section 3.1): 7168 bytes as IP fragments at MTU 1500.
//! let layout = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4)?;
//! let message = layout.message(7168)?;
//! let lens: Vec<u16> = message.fragments().map(|fragment| fragment.len).collect();
//! assert_eq!(lens, [1472, 1480, 1480, 1480, 1256]);
//! # Ok::<(), lm_protocol::geometry::GeometryError>(())
//! ```
#![cfg_attr(not(any(test, feature = "fuzzing")), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod admission;
pub mod control;
pub mod delivery;
pub mod depth;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod geometry;
pub mod integrity;
pub mod introduction;
pub mod landing;
pub mod manifest;
pub mod rate;
pub mod rss;
pub mod serial;
pub mod session;
pub mod smoother;
pub mod streaming;
pub mod time;
pub mod turns;
pub mod window;
pub mod wire;
pub mod zone;

/// UDP port of the data path when nothing else was asked for.
pub const DEFAULT_DATA_PORT: u16 = 7168;

/// UDP port of the admission messages that belongs to a data port: the next one.
///
/// Returns `None` for port 65535, which has no next one, and for 0.
///
/// ```
/// assert_eq!(lm_protocol::control_port(7168), Some(7169));
/// assert_eq!(lm_protocol::control_port(65535), None);
/// ```
pub const fn control_port(data_port: u16) -> Option<u16> {
    match data_port {
        0 => None,
        port => port.checked_add(1),
    }
}
