//! What steering needs of a card: the trait that ethtool and the tests' model implement.

use super::rules::FlowRule;
use crate::ethtool::uapi;
use crate::ethtool::{Driver, Ethtool, EthtoolError, Feature, FeatureState, RssSettings};
use crate::pci::PciDevice;

/// A card's settings. Each call reads or changes the card itself; no setting is remembered.
pub(crate) trait Card: Send {
    fn driver(&self) -> Result<Driver, EthtoolError>;
    /// How many receive queues RSS spreads over, as the kernel counts them for a table of its own making.
    fn spread_queues(&self) -> Result<u32, EthtoolError>;
    fn rss(&self) -> Result<RssSettings, EthtoolError>;
    /// An empty table: the kernel's own.
    fn set_rss_table(&self, table: &[u32], transform: u8) -> Result<(), EthtoolError>;
    /// Bits `RXH_*`.
    fn hash_fields(&self) -> Result<u64, EthtoolError>;
    fn set_hash_fields(&self, fields: u64) -> Result<(), EthtoolError>;
    fn feature(&self, feature: Feature) -> Result<FeatureState, EthtoolError>;
    fn set_feature(&self, feature: Feature, on: bool) -> Result<(), EthtoolError>;
    /// Whether the card has any rule.
    fn has_rules(&self) -> Result<bool, EthtoolError>;
    /// Where the card has that rule.
    fn find_rule(&self, rule: &FlowRule) -> Result<Option<u32>, EthtoolError>;
    fn insert_rule(&self, rule: &FlowRule) -> Result<(), EthtoolError>;
    fn delete_rule(&self, location: u32) -> Result<(), EthtoolError>;
    /// `None` where the question has no sense: no PCI Express device.
    fn relaxed_ordering(&self) -> Result<Option<bool>, EthtoolError>;
    fn set_relaxed_ordering(&self, on: bool) -> Result<(), EthtoolError>;
}

const RELAXED_ORDERING: &str = "PCI Express relaxed ordering";

fn pci(card: &Ethtool) -> Result<Option<&PciDevice>, EthtoolError> {
    if card.pci.get().is_none() {
        let _ = card.pci.set(PciDevice::at(&card.driver()?.bus));
    }
    Ok(card.pci.get().and_then(Option::as_ref))
}

impl Card for Ethtool {
    fn driver(&self) -> Result<Driver, EthtoolError> {
        self.driver()
    }

    fn spread_queues(&self) -> Result<u32, EthtoolError> {
        let answer = self.rule_command("receive queues for RSS", uapi::GET_RX_RINGS, |_| {})?;
        Ok(u32::try_from(answer.data).unwrap_or(u32::MAX))
    }

    fn rss(&self) -> Result<RssSettings, EthtoolError> {
        self.rss()
    }

    fn set_rss_table(&self, table: &[u32], transform: u8) -> Result<(), EthtoolError> {
        self.set_rss_table(table, transform)
    }

    fn hash_fields(&self) -> Result<u64, EthtoolError> {
        self.udp4_hash_fields()
    }

    fn set_hash_fields(&self, fields: u64) -> Result<(), EthtoolError> {
        self.rule_command("hashed fields of UDP", uapi::SET_HASH_FIELDS, |data| {
            data.flow_type = uapi::UDP_V4_FLOW;
            data.data = fields;
        })?;
        Ok(())
    }

    fn feature(&self, feature: Feature) -> Result<FeatureState, EthtoolError> {
        self.feature(feature)
    }

    fn set_feature(&self, feature: Feature, on: bool) -> Result<(), EthtoolError> {
        self.set_feature(feature, on)
    }

    fn has_rules(&self) -> Result<bool, EthtoolError> {
        Ok(!self.rules()?.taken.is_empty())
    }

    fn find_rule(&self, rule: &FlowRule) -> Result<Option<u32>, EthtoolError> {
        for location in self.rules()?.taken {
            let found =
                self.rule_command("flow rule", uapi::GET_RULE, |data| data.spec.location = location)?;
            if rule.is(&found.spec) {
                return Ok(Some(location));
            }
        }
        Ok(None)
    }

    fn insert_rule(&self, rule: &FlowRule) -> Result<(), EthtoolError> {
        let place = self.rules()?.free_place();
        let location = place.ok_or(EthtoolError::Unsupported {
            what: "one more flow rule (the card's table is full)",
        })?;
        self.rule_command("flow rule", uapi::INSERT_RULE, |data| {
            data.spec = rule.encode(location)
        })?;
        Ok(())
    }

    fn delete_rule(&self, location: u32) -> Result<(), EthtoolError> {
        self.rule_command("flow rule", uapi::DELETE_RULE, |data| {
            data.spec.location = location
        })?;
        Ok(())
    }

    fn relaxed_ordering(&self) -> Result<Option<bool>, EthtoolError> {
        let device = pci(self)?.map(PciDevice::relaxed_ordering).transpose();
        let relaxed = device.map_err(|error| EthtoolError::new(RELAXED_ORDERING, error))?;
        Ok(relaxed.flatten())
    }

    fn set_relaxed_ordering(&self, on: bool) -> Result<(), EthtoolError> {
        let what = RELAXED_ORDERING;
        let device = pci(self)?.ok_or(EthtoolError::Unsupported { what })?;
        let set = device.set_relaxed_ordering(on);
        set.map_err(|error| EthtoolError::new(what, error))
    }
}
