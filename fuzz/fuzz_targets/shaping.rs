//! [`lm_cards::fuzzing::shaping`] on what a fuzzer makes up.

#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lm_cards::fuzzing::shaping(bytes));
