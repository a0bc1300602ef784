//! A single namespace without interfaces, for whoever brings their own.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};

use super::leftovers::{self, Leftover, Registered};
use super::{Host, ip};

/// The last word of its name.
pub(super) const LONE: &str = "lone";

/// A namespace of its own; removed with everything in it when dropped.
#[derive(Debug)]
pub struct Lone {
    host: Host,
    _namespace: Registered,
}

impl Lone {
    /// Makes one. Needs root and iproute2; says which of them is missing.
    pub fn new() -> Result<Lone> {
        super::prepare()?;
        let name = super::namespace_name(super::next_number(), LONE);
        let namespace = leftovers::register(Leftover::Namespace(name.clone()))?;
        ip::batch(None, &[format!("netns add {name}")]).context("cannot make a namespace")?;
        Ok(Lone {
            host: Host::new(name, Ipv4Addr::UNSPECIFIED),
            _namespace: namespace,
        })
    }

    /// The namespace, to start programs in.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Runs `ip` commands in it, one a line.
    pub fn configure(&self, commands: &[String]) -> Result<()> {
        ip::batch(Some(self.host.name()), commands)
    }
}
