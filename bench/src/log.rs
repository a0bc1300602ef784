//! Warnings of the library on standard error: what came in that no honest peer sends, once for each kind and host.

use std::io::IsTerminal as _;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// Shows what the library has to say from now on. `RUST_LOG` decides what of it; where it is not set or says
/// nothing that is understood, warnings and errors, and with each `verbose` one level more. Times and colours only on a terminal.
pub(crate) fn start(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    let filter = match asked.parse() {
        Ok(filter) if !asked.is_empty() => filter,
        _ => Targets::new().with_default(level),
    };
    let is_terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(is_terminal);
    let subscriber = tracing_subscriber::registry().with(filter);
    // Who calls this twice keeps what there is.
    let _ = match is_terminal {
        true => subscriber.with(lines).try_init(),
        false => subscriber.with(lines.without_time()).try_init(),
    };
}
