//! The measuring commands: `lm-bench serve` on one host, `lm-bench compare` on the other.
//!
//! ```text
//!   lm-bench compare HOST                                   lm-bench serve
//!   rounds, ratios, tables    ── control (TCP, JSON) ──▶    starts what it is told, of a fixed set
//!        │ starts                                                 │ starts
//!   lm-bench end near         ──── what is measured ────▶   lm-bench end far
//! ```
//!
//! Each measurement has a fresh program on each side, pinned to a core, and nothing else runs meanwhile. `end` has what ends do,
//! `systems` their names, `measure` one measurement, `compare` the rounds, `schema` what is kept.

mod args;
mod child;
mod compare;
mod end;
mod host;
#[cfg(any(test, feature = "fuzzing"))]
mod hostile;
mod measure;
mod output;
mod ratios;
pub mod schema;
mod serve;
mod systems;
mod tools;

pub use args::CompareArgs;
pub use compare::compare;
pub(crate) use end::{Arrival, End, Patience, SILENCE, Side, Spec, Task};
pub use end::{EndArgs, Outcome, run};
pub(crate) use host::await_link;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use hostile::hear;
pub(crate) use output::{Partial, text};
pub use serve::{ServeArgs, serve};
