//! The command-line tools: `lm-send`, `lm-recv` and `lm-bench`, and what they share.
#![deny(unsafe_code)]

#[expect(
    unsafe_code,
    reason = "a yardstick of its own: system calls, rings and packet memory"
)]
pub mod bare;
pub mod cli;
pub mod doctor;
pub mod files;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod histogram;
pub mod input;
mod kept;
pub mod link;
pub mod lm;
mod log;
pub mod measuring;
pub mod meter;
pub mod output;
pub mod page;
pub mod privileges;
pub mod recv;
pub mod report;
#[cfg(test)]
mod scratch;
pub mod send;
pub mod signals;
pub mod suite;
pub mod transfer;

pub use lm_measure::size;
