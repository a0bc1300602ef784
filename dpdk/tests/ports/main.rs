//! Ports over the drivers that come with DPDK and need no card.
#![cfg(feature = "dpdk")]

mod bed;
mod messages;
mod steady;
