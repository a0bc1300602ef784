//! [`lm_cards::fuzzing::steering`] on what a fuzzer makes up.

#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lm_cards::fuzzing::steering(bytes));
