//! Automation: the only entry to builds, beds, tests and benchmarks. All of it is in the library of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    xtask::cli::main()
}
