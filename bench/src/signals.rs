//! Ctrl-C: the first one asks the tool to end cleanly, a second one ends it at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::cli::EXIT_INTERRUPTED;

/// Whether SIGINT or SIGTERM came.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Begins to watch for the signals.
    ///
    /// # Errors
    /// What `sigaction(2)` reports.
    pub fn install() -> io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the shutdown acts on a flag that the first signal sets after it was looked at.
            flag::register_conditional_shutdown(signal, i32::from(EXIT_INTERRUPTED), Arc::clone(&flag))?;
            flag::register(signal, Arc::clone(&flag))?;
        }
        Ok(Interrupt(flag))
    }

    /// Whether to end.
    #[must_use]
    pub fn is_set(&self) -> bool {
        // Relaxed: a lone flag, set by a signal on some thread of this process; nothing is published with it.
        self.0.load(Ordering::Relaxed)
    }
}
