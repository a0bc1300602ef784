//! A cluster: any number of equal hosts on a switch, each of which sends to and receives from every other one.
//!
//! ```text
//!   …-host1   lm0 198.18.0.1 ──┐   namespace …-switch
//!   …-host2   lm0 198.18.0.2 ──┤  ┌───────────────────┐
//!   …         …                ├──│ port1 port2 …     │
//!   …-host16  lm0 198.18.0.16 ─┘  │       bridge      │
//!                                 └───────────────────┘
//! ```
//!
//! Behind a bridge the receive queue is the kernel's choice ([`switch`]), so each host has one landing queue, and
//! everything for the host comes in on it: fragments land there, and the gate passes all else on to the kernel's sockets.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};

use super::leftovers::Registered;
use super::topology::Topology;
use super::{BedConfig, Host, INTERFACE, configure, namespace_name, next_number, prepare, switch};

/// Side of the hosts' namespaces, followed by their number.
const HOST: &str = "host";
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

/// Hosts on a switch. Goes like a [`Bed`](super::Bed).
#[derive(Debug)]
pub struct Cluster {
    hosts: Vec<Host>,
    _namespaces: Vec<Registered>,
}

impl Cluster {
    /// Makes a cluster. Needs root and iproute2; says which of them is missing.
    pub fn new(config: &ClusterConfig) -> Result<Cluster> {
        ensure!(
            (2..=HOSTS_MAX).contains(&config.hosts),
            "a cluster has 2 to {HOSTS_MAX} hosts, not {}",
            config.hosts
        );
        prepare()?;
        let bed = next_number();
        let hosts: Vec<Host> = (1..=config.hosts)
            .map(|number| {
                let address = Ipv4Addr::new(198, 18, 0, number as u8);
                Host::new(namespace_name(bed, &format!("{HOST}{number}")), address)
            })
            .collect();
        let switch = Host::new(namespace_name(bed, switch::SWITCH), Ipv4Addr::UNSPECIFIED);
        let all = BedConfig::default();
        let mut topology = Topology::default();
        topology.hosts(hosts.iter().chain([&switch]))?;
        for host in &hosts {
            let port = switch::port_of(host);
            topology.join([(host, INTERFACE), (&switch, &port)], all.mtu, config.queues);
        }
        let cluster = Cluster {
            _namespaces: topology.make()?,
            hosts,
        };
        let ports: Vec<_> = (cluster.hosts.iter())
            .map(|host| (host, config.landing_queue))
            .collect();
        switch::configure(&switch, &ports)?;
        for host in &cluster.hosts {
            configure(host, &all).with_context(|| format!("cannot set up host {}", host.name()))?;
        }
        let everybody: Vec<&Host> = cluster.hosts.iter().collect();
        switch::introduce(&everybody, &everybody).context("cannot introduce the hosts")?;
        Ok(cluster)
    }

    /// The hosts, in the order of their addresses from 198.18.0.1 on.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }
}

/// Whether `side` is one of a cluster's.
pub(super) fn is_host(side: &str) -> bool {
    side.strip_prefix(HOST)
        .and_then(|number| number.parse::<u32>().ok())
        .is_some_and(|number| (1..=HOSTS_MAX).contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_of_a_cluster() {
        assert!(is_host("host1") && is_host("host64"));
        for other in ["host", "host0", "host65", "hostx", "left", "switch"] {
            assert!(!is_host(other), "{other}");
        }
        let one = ClusterConfig {
            hosts: 1,
            ..ClusterConfig::default()
        };
        assert!(Cluster::new(&one).unwrap_err().to_string().contains("2 to 64"));
    }
}
