//! A single namespace without interfaces, for whoever brings their own.

use std::net::Ipv4Addr;

use anyhow::Result;

use super::Host;
use super::leftovers::Registered;

/// The last word of its name.
pub(super) const LONE: &str = "lone";

/// A namespace of its own; removed with everything in it when dropped.
#[derive(Debug)]
pub struct Lone {
    host: Host,
    _namespace: Vec<Registered>,
}

impl Lone {
    /// Makes one. Needs root and iproute2; says which of them is missing.
    pub fn new() -> Result<Lone> {
        super::prepare()?;
        let name = super::namespace_name(super::next_number(), LONE);
        let host = Host::new(name, Ipv4Addr::UNSPECIFIED);
        let namespace = super::make_namespaces(std::iter::once(&host))?;
        Ok(Lone {
            host,
            _namespace: namespace,
        })
    }

    /// The namespace, to start programs in.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Runs `ip` commands in it, one a line.
    pub fn configure(&self, commands: &[String]) -> Result<()> {
        self.host.ip(commands)
    }
}
