//! Warnings of the library on standard error: what came in that no honest peer sends, once for each kind and host.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Shows what the library has to say from now on. `RUST_LOG` decides what of it; where it is not set, warnings and errors,
/// and with each `verbose` one level more. Times and colours only on a terminal.
pub(crate) fn start(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let filter = EnvFilter::builder()
        .with_default_directive(level.into())
        .from_env_lossy();
    let is_terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(is_terminal);
    // Who calls this twice keeps what there is.
    let _ = match is_terminal {
        true => lines.try_init(),
        false => lines.without_time().try_init(),
    };
}
