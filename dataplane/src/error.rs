//! Why an endpoint could not be opened: one line each, with what to do.

use std::fmt;
use std::io;

use lm_cards::{InterfaceError, Obstacle};
use lm_protocol::geometry::GeometryError;

use crate::daemon::DaemonError;
use crate::port::PortError;

/// Why an endpoint could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The interface.
    Interface(InterfaceError),
    /// Sockets, ports or the gate.
    Port(PortError),
    /// The MTU.
    Geometry(GeometryError),
    /// The UMEM's memory.
    Memory {
        /// Bytes asked for.
        len: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The admission daemon of this host.
    Daemon(DaemonError),
    /// Zero-copy mode was demanded where it must not be used.
    NoZeroCopy(Obstacle),
    /// A value of the configuration cannot be used.
    Config(String),
    /// Any other system call.
    System(io::Error),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Interface(error) => error.fmt(f),
            OpenError::Port(error) => error.fmt(f),
            OpenError::Geometry(error) => error.fmt(f),
            OpenError::Memory { len, source } => {
                write!(
                    f,
                    "cannot map {len} bytes of packet memory ({source}); ask for less, or free memory"
                )
            }
            OpenError::Daemon(error) => error.fmt(f),
            OpenError::NoZeroCopy(obstacle) => obstacle.fmt(f),
            OpenError::Config(what) => f.write_str(what),
            OpenError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for OpenError {}

macro_rules! from {
    ($($variant:ident($source:ty)),*) => {
        $(impl From<$source> for OpenError {
            fn from(error: $source) -> Self {
                OpenError::$variant(error)
            }
        })*
    };
}

from!(
    Interface(InterfaceError),
    Port(PortError),
    Daemon(DaemonError),
    Geometry(GeometryError),
    System(io::Error)
);
