//! A cluster: any number of equal hosts on a switch, each of which sends to and receives from every other one.
//!
//! ```text
//!   …-left    lm0 198.18.0.1 ──┐   namespace …-switch
//!   …-right   lm0 198.18.0.2 ──┤  ┌───────────────────┐
//!   …         …                ├──│ port1 port2 …     │
//!   …-left16  lm0 198.18.0.16 ─┘  │       bridge      │
//!                                 └───────────────────┘
//! ```
//!
//! Behind a bridge the receive queue is the kernel's choice ([`switch`]), so each host has one landing queue, and
//! everything for the host comes in on it: fragments land there, and the gate passes all else on to the kernel's
//! sockets.

use anyhow::{Result, ensure};

use super::{Bed, BedConfig, Host, switch};

/// Most hosts: the addresses of the network end there.
pub const HOSTS_MAX: u32 = 64;

/// What a cluster shall look like.
#[derive(Clone, Copy, Debug)]
pub struct ClusterConfig {
    /// Hosts, 2 to [`HOSTS_MAX`].
    pub hosts: u32,
    /// Receive and transmit queues of each interface.
    pub queues: u32,
    /// Receive queue for everything that goes to a host; `None`: the kernel chooses.
    pub landing_queue: Option<u32>,
}

impl Default for ClusterConfig {
    /// 16 hosts with two queues, of which the second is the landing queue.
    fn default() -> Self {
        ClusterConfig {
            hosts: 16,
            queues: 2,
            landing_queue: Some(switch::RECEIVER_QUEUE),
        }
    }
}

/// Hosts on a switch.
#[derive(Debug)]
pub struct Cluster(Bed);

impl Cluster {
    /// Makes a cluster. Needs root and iproute2; says which of them is missing.
    pub fn new(config: &ClusterConfig) -> Result<Cluster> {
        ensure!(
            (2..=HOSTS_MAX).contains(&config.hosts),
            "a cluster has 2 to {HOSTS_MAX} hosts, not {}",
            config.hosts
        );
        let bed = Bed::new(&BedConfig {
            senders: Some(config.hosts - 1),
            is_cluster: true,
            queues: config.queues,
            landing_queue: config.landing_queue,
            ..BedConfig::default()
        });
        bed.map(Cluster)
    }

    /// The hosts, in the order of their addresses from 198.18.0.1 on.
    pub fn hosts(&self) -> &[Host] {
        &self.0.hosts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_has_hosts() {
        let one = ClusterConfig {
            hosts: 1,
            ..ClusterConfig::default()
        };
        assert!(Cluster::new(&one).unwrap_err().to_string().contains("2 to 64"));
    }
}
