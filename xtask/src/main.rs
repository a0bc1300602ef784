//! Automation: the only entry to builds, beds, tests and benchmarks.
fn main() {}
