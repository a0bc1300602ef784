//! The admission daemon (`lm-admissiond`), as a program without privileges sees it.

mod client;
mod error;
pub mod ipc;
mod smoother;
pub mod socket;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use client::Client;
pub(crate) use client::News;
pub use error::DaemonError;
pub use smoother::SharedSmoother;

/// The connection to it, as an endpoint and its port have it in common: the port asks for what the gate has to do, the engine for
/// everything else. One thread has both.
#[derive(Clone, Debug)]
pub(crate) struct Daemon(Arc<Mutex<Client>>);

impl Daemon {
    pub(crate) fn new(client: Client) -> Daemon {
        Daemon(Arc::new(Mutex::new(client)))
    }

    #[inline]
    pub(crate) fn client(&self) -> MutexGuard<'_, Client> {
        // A client that panicked is as good as one whose daemon said nonsense.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
