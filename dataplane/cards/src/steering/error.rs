//! Why a card is not steered.

use std::net::Ipv4Addr;

use lm_protocol::rss::RssError;

use crate::ethtool::{EthtoolError, HashProblem};
use crate::journal::JournalError;
use crate::platform::Obstacle;

fn relaxed_ordering(bus: &str) -> Obstacle {
    Obstacle::RelaxedOrdering { bus: bus.into() }
}

/// Why a card does not bring packets to the queue where they are wanted; one line each, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SteeringError {
    /// The driver has no indirection table that could be changed.
    #[error(
        "{interface} (driver {driver}) cannot keep other traffic off a landing queue: it has no RSS indirection \
         table; use copy mode, which needs none, or a card that shows one (ethtool -x {interface})"
    )]
    Unsupported {
        /// Name of the interface.
        interface: String,
        /// Name of its driver.
        driver: String,
    },
    /// Queue 0 receives what no rule or hash decides (ARP and others), and cannot be a landing queue.
    #[error("queue 0 receives ARP and other unsteered traffic and cannot be a landing queue; choose another")]
    QueueZero,
    /// There is no such receive queue.
    #[error(
        "{interface} has {rx_queues} receive queues, numbered from 0, and no queue {queue}; choose another, or make \
         more (ethtool -L {interface} combined {})",
        .queue.saturating_add(1)
    )]
    NoSuchQueue {
        /// Name of the interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// How many receive queues there are.
        rx_queues: u32,
    },
    /// What was changed before, and is to be undone.
    #[error(transparent)]
    Journal(JournalError),
    /// The queue of a packet cannot be computed.
    #[error(transparent)]
    Hash(HashProblem),
    /// What the card hashes is not known.
    #[error("the driver does not tell what of UDP it hashes; steer by a flow rule, or use copy mode")]
    Fields,
    /// No source port leads to the queue.
    #[error(transparent)]
    Rss(#[from] RssError),
    /// IP fragments of a sender have the same entry of the indirection table as its other packets.
    #[error(
        "IP fragments from {sender} come by the same entry of the RSS indirection table as its small packets, which \
         would be lost; let it send from another port (start it again), or with --wire lm"
    )]
    SharedEntry {
        /// The sender.
        sender: Ipv4Addr,
    },
    /// The device may let writes to memory overtake others, and this cannot be changed here.
    #[error("{}", relaxed_ordering(.bus))]
    RelaxedOrdering {
        /// Where it sits.
        bus: String,
        /// What sysfs said.
        source: EthtoolError,
    },
    /// The driver.
    #[error(transparent)]
    Card(#[from] EthtoolError),
}

impl From<JournalError> for SteeringError {
    fn from(error: JournalError) -> SteeringError {
        match error {
            JournalError::Device(error) => SteeringError::Card(error),
            error => SteeringError::Journal(error),
        }
    }
}
