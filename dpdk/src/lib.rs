//! LM on DPDK: a `Port` of `lm_dataplane` over any poll-mode driver, without a kernel's part in it.
//!
//! Packets come to the driver's own memory; the gate's model judges each, and what it accepts is copied once, to its queue's next entry. What it
//! passes on comes to a small network stack (`stack.rs`): ARP, ICMP echo, and UDP for the two ports of an endpoint. So two programs may exchange
//! messages as ordinary users, without huge pages and without an interface.
//!
//! The crate is empty without its feature `dpdk`.
#![cfg(feature = "dpdk")]

mod eal;
mod nic;
mod open;
mod queues;
mod shim;
mod stack;

pub use nic::DpdkNic;
pub use open::{DpdkConfig, open};
#[cfg(feature = "faults")]
pub use shim::{counts, put_in};
