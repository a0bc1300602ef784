//! What shaping changes of an interface, and how it is taken back.

use serde::{Deserialize, Serialize};

use super::link::{Link, Qdisc, ROOT_HANDLE, is_tso};
use crate::ethtool::{Driver, EthtoolError};
use crate::journal::{self, Undoing};

/// A setting of an interface, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Change {
    /// Our HTB is the root qdisc. `None`: the kernel's default was, which comes back by itself.
    Root { before: Option<Qdisc> },
    /// The most segments of a packet that are made of it below the qdisc.
    GsoMaxSegs { before: u32, after: u32 },
    /// Features by which the card cuts TCP itself, switched off.
    TsoOff(Vec<String>),
}

impl journal::Change for Change {
    type Device = Link;

    fn driver(link: &Link) -> Result<Driver, EthtoolError> {
        link.ethtool.driver()
    }

    fn is_possible(&self) -> bool {
        match self {
            Change::Root { before } => before.as_ref().is_none_or(Qdisc::is_restorable),
            Change::GsoMaxSegs { before, after } => before > after,
            Change::TsoOff(names) => names.iter().all(|name| is_tso(name)),
        }
    }

    fn make(&self, link: &Link) -> Result<(), EthtoolError> {
        match self {
            Change::Root { .. } => link.set_root(),
            Change::GsoMaxSegs { after, .. } => link.set_gso_max_segs(*after),
            Change::TsoOff(names) => link.set_features(names, false),
        }
    }

    fn undo(&self, link: &Link) -> Result<Undoing, EthtoolError> {
        match self {
            Change::Root { before } => {
                let now = link.root()?;
                if now == *before {
                    return Ok(Undoing::Undone);
                }
                if now.is_none_or(|now| now.handle != ROOT_HANDLE) {
                    return Ok(Undoing::Others);
                }
                link.restore_root(before.as_ref())?;
            }
            Change::GsoMaxSegs { before, after } => {
                let now = link.gso_max_segs()?;
                if now != *before && now != *after {
                    return Ok(Undoing::Others);
                }
                link.set_gso_max_segs(*before)?;
            }
            Change::TsoOff(names) => {
                let [off, on] = [link.tso(false)?, link.tso(true)?];
                let back: Vec<String> = names.iter().filter(|name| off.contains(name)).cloned().collect();
                link.set_features(&back, true)?;
                // A device may lose one: veth does, whose other end has an XDP program.
                if names.iter().any(|name| !off.contains(name) && !on.contains(name)) {
                    return Ok(Undoing::Others);
                }
            }
        }
        Ok(Undoing::Undone)
    }
}
