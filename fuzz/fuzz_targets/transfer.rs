//! What `lm-send` and `lm-recv` say to each other: what is accepted is the same again when it is written.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lm_bench::transfer::wire::{CONTROL_LEN_MAX, Control};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(control) = Control::parse(bytes) {
        let again = control.encode();
        assert!(again.len() <= CONTROL_LEN_MAX);
        assert_eq!(Control::parse(&again), Ok(control));
    }
});
