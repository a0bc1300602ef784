//! The gate: LM's XDP program, its loader and its maps.
//!
//! In copy mode the gate sees each packet before it takes a fill entry of an XSK. A fragment of the open session that
//! comes in order is redirected and logged; everything else passes to the kernel's stack (`gate.c`). User space learns
//! from the log which fragment each RX descriptor holds, because the headers in memory may be overwritten by then.
//!
//! - [`Gate`]: load, attach, roles, sockets, sessions. Needs CAP_BPF and CAP_NET_ADMIN.
//! - [`CreditPage`]: the credits of an interface's smoother, which its programs share.
//! - [`Log`]: a landing channel's log and counters, as its client sees them. Needs no privilege.
//! - [`Verdict`], [`Counters`]: what became of each packet; every packet counts once.
//! - [`model`]: the same gate in Rust, for simulated NICs and as the oracle of the tests.
//!
//! The object is committed, so that a build needs no clang; `cargo xtask gate` rebuilds it and says whether it is
//! stale.

mod attach;
mod credits;
mod gate;
pub mod layout;
mod log;
mod log_tests;
pub mod model;
mod role;
mod shared;
mod sys;
mod verdict;

pub use attach::{AttachError, AttachMode, EffectiveMode, GateConfig};
pub use credits::CreditPage;
pub use gate::{Gate, GateError, OpenSession, Quiesce, Quiet, remove_defunct_pins, remove_pins};
pub use log::{Log, LogWriter};
pub use role::Role;
pub use verdict::{Counters, Verdict};
