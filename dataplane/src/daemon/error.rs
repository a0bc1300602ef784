//! What can go wrong between a program and the daemon of its host; one line each, with what to do.

use std::io;
use std::path::PathBuf;

/// Why the daemon did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// Nobody listens.
    #[error(
        "no admission daemon listens on {path}: start lm-admissiond, or run this with privileges and --admission \
         embedded"
    )]
    Absent {
        /// Where the socket should be.
        path: PathBuf,
    },
    /// The socket cannot be used.
    #[error("cannot reach the admission daemon at {path}: {source}")]
    Socket {
        /// Where its socket is.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It refused; its own words, with the remedy.
    #[error("the admission daemon refuses: {0}")]
    Refused(String),
    /// The connection ended. What is open goes on; it is connected to again.
    #[error("the admission daemon is gone: start lm-admissiond again")]
    Gone,
    /// No reply in time.
    #[error("the admission daemon does not answer: look at its log, or restart it")]
    Silent,
    /// It said what cannot be.
    #[error(
        "the admission daemon said what makes no sense ({0}): use programs and daemon of the same release"
    )]
    Nonsense(&'static str),
}
