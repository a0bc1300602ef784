//! Why an endpoint could not be opened: one line each, with what to do.

use std::io;

use lm_cards::{InterfaceError, Obstacle};
use lm_protocol::geometry::GeometryError;

use crate::daemon::DaemonError;
use crate::port::PortError;

/// Why an endpoint could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The interface.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// Sockets, ports or the gate.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The MTU.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The UMEM's memory.
    #[error("cannot map {len} bytes of packet memory ({source}); ask for less, or free memory")]
    Memory {
        /// Bytes asked for.
        len: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The admission daemon of this host.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// Zero-copy mode was demanded where it must not be used.
    #[error("{0}")]
    NoZeroCopy(Obstacle),
    /// A value of the configuration cannot be used.
    #[error("{0}")]
    Config(String),
    /// Any other system call.
    #[error(transparent)]
    System(#[from] io::Error),
}
