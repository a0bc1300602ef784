//! Memory ordering of the rings, of the gate's log and of real-time messages between threads, tried by `loom` in every interleaving.
//!
//! `dataplane/src/ring.rs`, `ebpf/src/log.rs` and `realtime/src/latest.rs` are compiled here once more, word for word, over another memory:
//! `ring_memory`, `shared` and `entries` take the places of the modules of the same names, with loom's atomics for the words that
//! both parties access and loom's cells for ring entries, which report every access that nothing orders. So what is
//! checked is the code that runs, and nothing of loom is in the product.
//!
//! Each model has a counterpart that weakens one ordering (`weak`) and must fail: a model that cannot fail shows nothing.
//!
//! `cargo test -p lm-ring-models`; about 15 seconds.
#![cfg(test)]

mod entries;
#[path = "../../../realtime/src/latest.rs"]
#[allow(dead_code, reason = "a part of it is under test")]
mod latest;
mod latest_models;
#[path = "../../../ebpf/src/log.rs"]
#[allow(dead_code, unreachable_pub, reason = "a part of it is under test")]
mod log;
mod log_models;
#[path = "../../src/ring.rs"]
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "a part of it is under test"
)]
#[allow(
    clippy::arc_with_non_send_sync,
    reason = "the product's memory is both; loom's cells need not be"
)]
mod ring;
mod ring_memory;
mod ring_models;
mod shared;
mod weak;

/// What `log.rs` finds at the root of its own crate.
mod layout {
    pub(crate) use lm_ebpf::layout::{LOG_ENTRIES, LogEntryRow, LogMap, SESSIONS, SlotRow};
}
mod verdict {
    pub(crate) use lm_ebpf::{Counters, Verdict};
}
