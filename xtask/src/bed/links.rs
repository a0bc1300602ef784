//! Further links of a bed: veth pairs beside `lm0`, between the same two hosts and just as it, each with settings of
//! its own. Link `n` is called `lm<n>` on both hosts, which have the addresses 198.18.n.1 and 198.18.n.2 on it. In a
//! bed with a switch each link has a bridge of its own there, and the kernel chooses the queue that its packets come in
//! on.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};

use super::topology::Topology;
use super::{Bed, Host, ip, switch};

/// What a further link shall look like.
#[derive(Clone, Copy, Debug)]
pub struct LinkConfig {
    /// MTU of both interfaces, in bytes.
    pub mtu: u16,
    /// Receive and transmit queues of both interfaces.
    pub queues: u32,
    /// Whether TSO, GSO, GRO and their relatives stay on.
    pub segmentation_offloads: bool,
}

impl Bed {
    /// Makes link `number` (1 to 255) and gives the right host's address on it. It goes with the bed.
    pub fn add_link(&self, number: u8, config: &LinkConfig) -> Result<Ipv4Addr> {
        ensure!(number > 0, "link 0 is the bed's own");
        let name = format!("lm{number}");
        let (left, right) = (self.left(), self.right());
        let mut topology = Topology::default();
        let mut join = |ends: [(&Host, &str); 2]| topology.join(ends, config.mtu, config.queues);
        let ports = ["left", "right"].map(|side| format!("{side}{number}"));
        match &self.switch {
            None => join([(left, &name), (right, &name)]),
            Some(switch) => {
                join([(left, &name), (switch, &ports[0])]);
                join([(right, &name), (switch, &ports[1])]);
            }
        }
        topology
            .make()
            .with_context(|| format!("cannot make the link {name}"))?;
        if let Some(switch) = &self.switch {
            switch::bridge(switch, &format!("bridge{number}"), &ports)?;
        }
        for (host, end) in [(left, 1), (right, 2)] {
            if !config.segmentation_offloads {
                host.switch_offloads_of(&name, false)?;
            }
            let commands = [
                format!("addr add 198.18.{number}.{end}/24 dev {name}"),
                format!("link set {name} up"),
            ];
            ip::batch(Some(host.name()), &commands)?;
        }
        Ok(Ipv4Addr::new(198, 18, number, 2))
    }
}
