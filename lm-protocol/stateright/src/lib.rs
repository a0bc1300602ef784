//! Streaming under `stateright`: every order in which writer, sender, network, card, receiver and reader can act in a small world.
//!
//! `lm-protocol/src/streaming.rs` is compiled here once more, word for word, over a memory of the model's (`weak`), and with each mistake of
//! `mutants.rs` beside the rule that it breaks; `mistakes` says which is made. So what is checked is the code that runs, nothing of the
//! model is in the product, and a mutant that no property finds fails the test that is named after it.
//!
//! `cargo test -p lm-streaming-models -- --nocapture` shows states and depths.
#![cfg(test)]

mod checks;
mod mistakes;
mod receiver;
mod weak;
mod world;

/// What `streaming.rs` finds at the root of its own crate.
use lm_protocol::{time, window, wire};
extern crate alloc;

#[allow(
    dead_code,
    unused_imports,
    unused_parens,
    unreachable_pub,
    unfulfilled_lint_expectations,
    clippy::all,
    reason = "a part of it is under test, with mistakes put into it"
)]
mod streaming {
    include!(concat!(env!("OUT_DIR"), "/streaming.rs"));
}

#[allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "the build script reads the rest"
)]
#[path = "../mutants.rs"]
mod mutants;
