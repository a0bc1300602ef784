//! What every bed is built of: namespaces, and veth pairs between them, made by one call of `ip`.

use anyhow::{Context, Result};

use super::leftovers::{self, Leftover, Registered};
use super::{Host, ip};

/// What is to be made.
#[derive(Debug, Default)]
pub(super) struct Topology {
    commands: Vec<String>,
    kept: Vec<Registered>,
}

impl Topology {
    /// Something that goes with the bed, after what was kept before. Registered before it exists: what is registered
    /// and was never made is harmless to remove.
    pub(super) fn keep(&mut self, leftover: Leftover) -> Result<()> {
        self.kept.push(leftovers::register(leftover)?);
        Ok(())
    }

    /// A namespace for each of these.
    pub(super) fn hosts<'a>(&mut self, hosts: impl IntoIterator<Item = &'a Host>) -> Result<()> {
        for host in hosts {
            self.keep(Leftover::Namespace(host.name().to_owned()))?;
            self.run(format!("netns add {}", host.name()));
        }
        Ok(())
    }

    /// A veth pair between two interfaces, with so many queues each way.
    pub(super) fn join(&mut self, ends: [(&Host, &str); 2], mtu: u16, queues: u32) {
        let [one, other] = ends.map(|(host, interface)| {
            format!(
                "{interface} netns {} mtu {mtu} numrxqueues {queues} numtxqueues {queues}",
                host.name()
            )
        });
        self.run(format!("link add {one} type veth peer name {other}"));
    }

    /// Another command of `ip`.
    pub(super) fn run(&mut self, command: String) {
        self.commands.push(command);
    }

    /// Makes it all; what goes with the bed.
    pub(super) fn make(self) -> Result<Vec<Registered>> {
        ip::batch(None, &self.commands).context("cannot make the hosts")?;
        Ok(self.kept)
    }
}
