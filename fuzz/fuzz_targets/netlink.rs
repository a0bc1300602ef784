//! The kernel's answers about routes and neighbours: nothing panics, and reading ends.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| lm_dataplane::fuzzing::netlink(bytes));
