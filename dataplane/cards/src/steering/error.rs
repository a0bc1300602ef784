//! Why a card is not steered.

use std::fmt;
use std::io;
use std::net::Ipv4Addr;

use lm_protocol::rss::RssError;

use crate::ethtool::{EthtoolError, HashProblem};
use crate::journal::JournalError;
use crate::platform::Obstacle;

/// Why a card does not bring packets to the queue where they are wanted; one line each, with what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum SteeringError {
    /// The driver has no indirection table that could be changed.
    Unsupported {
        /// Name of the interface.
        interface: String,
        /// Name of its driver.
        driver: String,
    },
    /// Queue 0 receives what no rule or hash decides (ARP and others), and cannot be a landing queue.
    QueueZero,
    /// There is no such receive queue.
    NoSuchQueue {
        /// Name of the interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// How many receive queues there are.
        rx_queues: u32,
    },
    /// What was changed before, and is to be undone.
    Journal(JournalError),
    /// The queue of a packet cannot be computed.
    Hash(HashProblem),
    /// What the card hashes is not known.
    Fields,
    /// No source port leads to the queue.
    Rss(RssError),
    /// IP fragments of a sender have the same entry of the indirection table as its other packets.
    SharedEntry {
        /// The sender.
        source: Ipv4Addr,
    },
    /// The device may let writes to memory overtake others, and this cannot be changed here.
    RelaxedOrdering {
        /// Where it sits.
        bus: String,
        /// What sysfs said.
        source: EthtoolError,
    },
    /// The driver.
    Card(EthtoolError),
    /// Any other system call.
    System {
        /// The call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl From<EthtoolError> for SteeringError {
    fn from(error: EthtoolError) -> SteeringError {
        SteeringError::Card(error)
    }
}

impl From<JournalError> for SteeringError {
    fn from(error: JournalError) -> SteeringError {
        match error {
            JournalError::Device(error) => SteeringError::Card(error),
            error => SteeringError::Journal(error),
        }
    }
}

impl From<RssError> for SteeringError {
    fn from(error: RssError) -> SteeringError {
        SteeringError::Rss(error)
    }
}

impl fmt::Display for SteeringError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SteeringError::Unsupported { interface, driver } => write!(
                f,
                "{interface} (driver {driver}) cannot keep other traffic off a landing queue: it has no RSS indirection \
                 table; use copy mode, which needs none, or a card that shows one (ethtool -x {interface})"
            ),
            SteeringError::SharedEntry { source } => write!(
                f,
                "IP fragments from {source} come by the same entry of the RSS indirection table as its small packets, which \
                 would be lost; let it send from another port (start it again), or with --wire lm"
            ),
            SteeringError::QueueZero => f.write_str(
                "queue 0 receives ARP and other unsteered traffic and cannot be a landing queue; choose another",
            ),
            SteeringError::NoSuchQueue {
                interface,
                queue,
                rx_queues,
            } => write!(
                f,
                "{interface} has {rx_queues} receive queues, numbered from 0, and no queue {queue}; choose another, or \
                 make more (ethtool -L {interface} combined {})",
                queue.saturating_add(1)
            ),
            SteeringError::Journal(error) => error.fmt(f),
            SteeringError::Hash(problem) => problem.fmt(f),
            SteeringError::Fields => f.write_str(
                "the driver does not tell what of UDP it hashes; steer by a flow rule, or use copy mode",
            ),
            SteeringError::Rss(error) => error.fmt(f),
            SteeringError::RelaxedOrdering { bus, .. } => Obstacle::RelaxedOrdering { bus: bus.clone() }.fmt(f),
            SteeringError::Card(error) => error.fmt(f),
            SteeringError::System { call, source } => write!(f, "{call}: {source}"),
        }
    }
}

impl std::error::Error for SteeringError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SteeringError::System { source, .. } => Some(source),
            SteeringError::Journal(error) => error.source(),
            SteeringError::RelaxedOrdering { source, .. } | SteeringError::Card(source) => Some(source),
            _ => None,
        }
    }
}
