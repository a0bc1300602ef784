//! Network interfaces and the cards behind them, below the data plane.
//!
//! - [`Interface`]: what the kernel tells of one, over [`netlink`].
//! - [`Ethtool`](ethtool::Ethtool): what a card's driver reads and sets.
//! - [`Facts`], [`judge`], [`Obstacle`]: what forbids zero-copy mode on a machine, and what to do about it.
//! - [`Probe`], [`footprint`]: what a driver writes beside a packet, which nobody tells.
//! - [`Steering`]: which packets a card puts on a landing queue.
//! - [`Shaping`]: at what rate the kernel's traffic leaves.
//!
//! None of it knows sockets, memory or the gate.
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "the ioctl of ethtool")]
pub mod ethtool;
pub mod footprint;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod interface;
mod journal;
pub mod netdev;
pub mod netlink;
mod pci;
mod platform;
mod probe;
mod shaping;
mod steering;

pub use interface::{Interface, InterfaceAddress, InterfaceError};
pub use journal::JournalError;
pub use netdev::XdpFeatures;
pub use platform::{Bounce, Demand, Facts, Obstacle, chunk_len_for, judge, rx_ring_len};
pub use probe::Probe;
pub use shaping::{Followed, Follower, Foreign, Shaping, ShapingError, Traffic};
pub use steering::{Neighbouring, Steering, SteeringError};
