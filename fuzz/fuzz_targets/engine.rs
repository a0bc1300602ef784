//! The receiver's state machine, and everything else of the poll engine: two engines on a simulated wire, packets from a
//! hostile third, any times, any calls of the applications. No delivered message has a wrong byte, all memory comes back, and
//! honest traffic works afterwards (`dataplane/src/sim_tests/hostile.rs`).

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|tape: &[u8]| lm_dataplane::fuzzing::engine(tape));
