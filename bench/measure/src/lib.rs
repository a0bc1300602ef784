//! What everything that measures here has in common, `lm-bench` and `cargo xtask` alike: what repeated measurements say,
//! sizes, bit rates, and tables; and what a closed standard output is to both.
#![deny(unsafe_code)]

pub mod against;
pub mod rate;
pub mod size;
pub mod statistics;
pub mod stdout;
pub mod table;
