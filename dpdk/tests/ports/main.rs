//! Ports over the drivers that come with DPDK and need no card.
#![cfg(feature = "faults")]

mod bed;
mod messages;
mod steady;
