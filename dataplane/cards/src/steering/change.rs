//! What steering changes of a card, and how it is taken back.

use serde::{Deserialize, Serialize};

use super::card::Card;
use super::rules::FlowRule;
use crate::ethtool::{Driver, EthtoolError, Feature};
use crate::journal::{self, Undoing};

/// A setting of a card, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Change {
    /// The RSS indirection table.
    Table {
        before: Vec<u32>,
        after: Vec<u32>,
        /// Belongs to the card's hash and stays.
        transform: u8,
    },
    /// Which fields of UDP over IPv4 are hashed, bits `RXH_*`.
    HashFields { before: u64, after: u64 },
    /// A feature, switched from `before` to its opposite.
    Feature { feature: Feature, before: bool },
    /// A rule that was not there.
    Rule(FlowRule),
    /// PCI Express relaxed ordering, switched off.
    RelaxedOrderingOff,
}

impl journal::Change for Change {
    type Device = dyn Card;

    fn driver(card: &dyn Card) -> Result<Driver, EthtoolError> {
        card.driver()
    }

    /// A card's table is always as long.
    fn is_possible(&self) -> bool {
        match self {
            Change::Table { before, after, .. } => before.len() == after.len() && !before.is_empty(),
            _ => true,
        }
    }

    fn make(&self, card: &dyn Card) -> Result<(), EthtoolError> {
        match self {
            Change::Table { after, transform, .. } => card.set_rss_table(after, *transform),
            Change::HashFields { after, .. } => card.set_hash_fields(*after),
            Change::Feature { feature, before } => card.set_feature(*feature, !before),
            Change::Rule(rule) => card.insert_rule(rule),
            Change::RelaxedOrderingOff => card.set_relaxed_ordering(false),
        }
    }

    fn undo(&self, card: &dyn Card) -> Result<Undoing, EthtoolError> {
        match self {
            Change::Table { before, after, .. } => {
                let now = card.rss()?;
                if now.table == *before {
                    return Ok(Undoing::Undone);
                }
                if now.table != *after {
                    return Ok(Undoing::Others);
                }
                // A table as the kernel makes it itself is given back to the kernel, which will then go on making it anew
                // when the number of queues changes; one that was written cannot be told from one set by hand.
                let queues = card.spread_queues().unwrap_or(0);
                let is_kernels = queues > 0
                    && before
                        .iter()
                        .zip((0..queues).cycle())
                        .all(|(set, own)| *set == own);
                card.set_rss_table(if is_kernels { &[] } else { before }, now.transform)?;
            }
            Change::HashFields { before, after } => {
                let now = card.hash_fields()?;
                if now != *before && now != *after {
                    return Ok(Undoing::Others);
                }
                if now != *before {
                    card.set_hash_fields(*before)?;
                }
            }
            Change::Feature { feature, before } => {
                if card.feature(*feature)?.on == *before {
                    return Ok(Undoing::Undone);
                }
                // Ours are gone by now. Without the feature the driver would drop the others.
                if *feature == Feature::Ntuple && card.has_rules()? {
                    return Ok(Undoing::Others);
                }
                card.set_feature(*feature, *before)?;
            }
            Change::Rule(rule) => {
                if let Some(location) = card.find_rule(rule)? {
                    card.delete_rule(location)?;
                }
            }
            Change::RelaxedOrderingOff => {
                if card.relaxed_ordering()? == Some(false) {
                    card.set_relaxed_ordering(true)?;
                }
            }
        }
        Ok(Undoing::Undone)
    }
}

/// Makes one change of the last two, if both are of the table and nothing was changed between them; whether it did.
pub(super) fn join_tables(changes: &mut Vec<Change>) -> bool {
    let [.., Change::Table { before, .. }, Change::Table { after, .. }] = changes.as_slice() else {
        return false;
    };
    let is_back = before == after;
    let after = after.clone();
    changes.pop();
    match changes.last_mut() {
        Some(Change::Table { after: joined, .. }) if !is_back => *joined = after,
        _ => {
            changes.pop();
        }
    }
    true
}
