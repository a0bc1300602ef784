//! Automation of this repository: test beds, `run`, `test`, `bench`, the gate's build, checks, the tarball.
//!
//! `cargo xtask --help` is the manual. Everything here starts commands and programs and judges what they report;
//! of the product only `lm-cards` is linked in, so the automation builds even when the rest does not.

pub mod bed;
pub mod bench;
pub mod cli;
pub mod content;
pub mod dist;
pub mod ends;
pub mod fuzz;
pub mod gate;
pub mod hold;
pub mod machine;
pub mod models;
pub mod run;
pub mod size;
pub mod soak;
mod tally;
mod test_programs;
pub mod verify;
pub mod vm;
pub mod workspace;
