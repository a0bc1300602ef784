//! A model of a card with two receive queues and a table of rules.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::card::Card;
use super::super::rules::FlowRule;
use super::super::{Steering, SteeringError};
use super::{Folder, interface};
use crate::ethtool::{Driver, EthtoolError, Feature, FeatureState, RssSettings};

/// All that a card remembers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) table: Vec<u32>,
    /// Whether the kernel counts the table as set by hand.
    pub(super) by_hand: bool,
    pub(super) fields: u64,
    pub(super) ntuple: bool,
    pub(super) vlan: bool,
    pub(super) rules: Vec<(u32, FlowRule)>,
    pub(super) relaxed: bool,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) settings: Settings,
    pub(super) queues: u32,
    pub(super) key: Vec<u8>,
    pub(super) has_table: bool,
    pub(super) takes_rules: bool,
    pub(super) can_set_fields: bool,
    pub(super) bus: String,
    /// The settings as they were before each change.
    pub(super) history: Vec<Settings>,
    /// Every change fails from now on.
    pub(super) broken: Option<i32>,
}

/// Many hands on one card.
#[derive(Clone, Debug)]
pub(super) struct Model(Arc<Mutex<State>>);

impl Model {
    /// Like the card of two `igb` queues, with rules.
    pub(super) fn new() -> Model {
        Model(Arc::new(Mutex::new(State {
            settings: Settings {
                table: (0..128).map(|at| at * 2 / 128).collect(),
                by_hand: false,
                fields: 0x30,
                ntuple: false,
                vlan: true,
                rules: Vec::new(),
                relaxed: true,
            },
            queues: 2,
            key: (1..=40).collect(),
            has_table: true,
            takes_rules: true,
            can_set_fields: true,
            bus: "0000:01:00.0".into(),
            history: Vec::new(),
            broken: None,
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic")
    }

    pub(super) fn settings(&self) -> Settings {
        self.state().settings.clone()
    }

    fn change(&self, what: &'static str, change: impl FnOnce(&mut Settings)) -> Result<(), EthtoolError> {
        let mut state = self.state();
        if let Some(code) = state.broken {
            return Err(EthtoolError::new(what, io::Error::from_raw_os_error(code)));
        }
        let before = state.settings.clone();
        state.history.push(before);
        change(&mut state.settings);
        Ok(())
    }

    pub(super) fn apply(&self, folder: &Folder) -> Result<Steering, SteeringError> {
        Steering::apply_to(Box::new(self.clone()), folder.store(), &interface(), &[1])
    }
}

fn unsupported<T>(what: &'static str) -> Result<T, EthtoolError> {
    Err(EthtoolError::Unsupported { what })
}

impl Card for Model {
    fn driver(&self) -> Result<Driver, EthtoolError> {
        Ok(Driver {
            name: "model".into(),
            bus: self.state().bus.clone(),
        })
    }

    fn spread_queues(&self) -> Result<u32, EthtoolError> {
        Ok(self.state().queues)
    }

    fn rss(&self) -> Result<RssSettings, EthtoolError> {
        let state = self.state();
        if !state.has_table {
            return unsupported("table");
        }
        Ok(RssSettings {
            table: state.settings.table.clone(),
            key: state.key.clone(),
            function: 1,
            transform: 0,
        })
    }

    fn set_rss_table(&self, table: &[u32], _: u8) -> Result<(), EthtoolError> {
        let queues = self.state().queues;
        let len = self.state().settings.table.len();
        // As drivers do.
        if !table.is_empty() && table.len() != len {
            return Err(EthtoolError::new(
                "table",
                io::Error::from_raw_os_error(libc::EINVAL),
            ));
        }
        self.change("table", |settings| {
            settings.by_hand = !table.is_empty();
            settings.table = if table.is_empty() {
                (0..queues).cycle().take(len).collect()
            } else {
                table.to_vec()
            };
        })
    }

    fn hash_fields(&self) -> Result<u64, EthtoolError> {
        Ok(self.state().settings.fields)
    }

    fn set_hash_fields(&self, fields: u64) -> Result<(), EthtoolError> {
        if !self.state().can_set_fields {
            return unsupported("fields");
        }
        self.change("fields", |settings| settings.fields = fields)
    }

    fn feature(&self, feature: Feature) -> Result<FeatureState, EthtoolError> {
        let settings = self.settings();
        let on = match feature {
            Feature::Ntuple => settings.ntuple,
            Feature::RxVlan => settings.vlan,
            Feature::RxFcs | Feature::RxAll => false,
        };
        Ok(FeatureState {
            name: feature.name().to_owned(),
            on,
            changeable: true,
        })
    }

    fn set_feature(&self, feature: Feature, on: bool) -> Result<(), EthtoolError> {
        match feature {
            Feature::Ntuple if self.state().takes_rules => self.change("ntuple", |settings| {
                settings.ntuple = on;
                // As drivers do.
                if !on {
                    settings.rules.clear();
                }
            }),
            Feature::RxVlan => self.change("vlan", |settings| settings.vlan = on),
            _ => unsupported("feature"),
        }
    }

    fn has_rules(&self) -> Result<bool, EthtoolError> {
        Ok(!self.state().settings.rules.is_empty())
    }

    fn find_rule(&self, rule: &FlowRule) -> Result<Option<u32>, EthtoolError> {
        if !self.state().takes_rules {
            return unsupported("rules");
        }
        let rules = self.settings().rules;
        Ok(rules.iter().find(|(_, own)| own == rule).map(|(at, _)| *at))
    }

    fn insert_rule(&self, rule: &FlowRule) -> Result<(), EthtoolError> {
        assert!(self.state().settings.ntuple, "rules are switched on first");
        self.change("rule", |settings| {
            let place = settings.rules.iter().map(|(at, _)| *at + 1).max().unwrap_or(0);
            settings.rules.push((place, *rule));
        })
    }

    fn delete_rule(&self, location: u32) -> Result<(), EthtoolError> {
        self.change("rule", |settings| {
            settings.rules.retain(|(at, _)| *at != location)
        })
    }

    fn relaxed_ordering(&self) -> Result<Option<bool>, EthtoolError> {
        Ok(Some(self.state().settings.relaxed))
    }

    fn set_relaxed_ordering(&self, on: bool) -> Result<(), EthtoolError> {
        self.change("relaxed ordering", |settings| settings.relaxed = on)
    }
}
