//! The measuring commands: `serve` on one host; `latency`, `throughput`, `cpu`, `limit` and `compare` on the other.
//!
//! ```text
//!   lm-bench compare HOST                                   lm-bench serve
//!   rounds, ratios, tables    ── control (TCP, JSON) ──▶    starts what it is told, of a fixed set
//!        │ starts                                                 │ starts
//!   lm-bench end near         ──── what is measured ────▶   lm-bench end far
//! ```
//!
//! Each measurement has a fresh program on each side, pinned to a core, and nothing else runs meanwhile. `end` has the systems and what is
//! done with them, `catalogue` who they are, `measure` one measurement, `command` the rounds, `schema` what is kept.

mod args;
mod bare;
mod catalogue;
mod child;
mod command;
mod end;
mod frozen;
mod host;
#[cfg(any(test, feature = "fuzzing"))]
mod hostile;
mod measure;
mod output;
pub mod schema;
mod serve;
mod targets;
mod tools;

pub use args::MeasureArgs;
pub use command::{Measuring, measure};
pub use end::{Cost, EndArgs, Outcome, run};
pub(crate) use end::{Counted, Meter, Metered};
pub(crate) use host::await_link;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use hostile::hear;
pub use serve::{ServeArgs, serve};
