//! What the fuzz targets in `fuzz/` do with a fuzzer's bytes, and the tests with every input that is committed there. Each panics where
//! something is wrong.

use crate::transfer::wire::{CONTROL_LEN_MAX, Control};

/// What `lm-send` and `lm-recv` say to each other: what is accepted is the same again when it is written.
pub fn transfer(bytes: &[u8]) {
    if let Ok(control) = Control::parse(bytes) {
        let again = control.encode();
        assert!(again.len() <= CONTROL_LEN_MAX);
        assert_eq!(Control::parse(&again), Ok(control));
    }
}

/// What a client says to `lm-bench serve`: the programs that it would start are of the fixed set, with words of their own.
pub fn serve(bytes: &[u8]) {
    crate::suite::hear(bytes);
}

#[cfg(test)]
#[path = "../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_of_serve_is_survived() {
        replay("serve", super::serve);
    }

    #[test]
    fn the_corpus_of_transfer_is_survived() {
        replay("transfer", super::transfer);
    }
}
