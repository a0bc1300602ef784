//! Admission: who may send to this host, and how much.
//!
//! Receivers without a daemon embed a [`Policy`]. Between hosts `lm-admissiond` speaks for all programs of a host ([`daemon`]): it
//! alone has privileges, and gives programs that its configuration allows their AF_XDP sockets, so that these need none.
#![forbid(unsafe_code)]

pub mod cli;
mod clock;
pub mod config;
pub mod daemon;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod key;
mod lines;
mod metrics;
mod pins;
mod policy;
mod ports;
pub mod privileges;
mod reader;
mod socket;

pub use ipnet::Ipv4Net;
pub use policy::{Policy, range};
