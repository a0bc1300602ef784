//! [`lm_realtime::fuzzing::assembling`] on what a fuzzer makes up.

#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lm_realtime::fuzzing::assembling(bytes));
