//! Features of a device that can be switched on and off.

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::uapi;
use super::{Ethtool, EthtoolError, text};

/// Most features that are listed; Linux 6.18 has fewer than 64.
const MAX_FEATURES: usize = 1 << 10;

/// Device features that matter to LM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Feature {
    /// The card takes VLAN tags out of packets, which changes the length of their headers.
    RxVlan,
    /// Flow rules.
    Ntuple,
    /// The frame check sequence stays at a packet's end.
    RxFcs,
    /// Packets with errors are received as well.
    RxAll,
}

impl Feature {
    /// Its name in the kernel (`net/ethtool/common.c`, `netdev_features_strings`).
    pub fn name(self) -> &'static str {
        match self {
            Feature::RxVlan => "rx-vlan-hw-parse",
            Feature::Ntuple => "rx-ntuple-filter",
            Feature::RxFcs => "rx-fcs",
            Feature::RxAll => "rx-all",
        }
    }

    /// Its name in ethtool(8), option `-K`.
    pub fn option(self) -> &'static str {
        match self {
            Feature::RxVlan => "rxvlan",
            Feature::Ntuple => "ntuple",
            Feature::RxFcs => "rx-fcs",
            Feature::RxAll => "rx-all",
        }
    }
}

/// A feature of a device, as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureState {
    /// Whether it is on.
    pub on: bool,
    /// Whether it can be switched.
    pub changeable: bool,
}

impl Ethtool {
    /// A feature's state.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`]; [`EthtoolError::Unsupported`] where the kernel does not know the feature.
    pub fn feature(&self, feature: Feature) -> Result<FeatureState, EthtoolError> {
        let (bit, count) = self.feature_bit(feature)?;
        let blocks = count.div_ceil(32);
        let head = uapi::Features {
            command: uapi::GET_FEATURES,
            size: blocks as u32,
        };
        let mut data = head.as_bytes().to_vec();
        data.resize(data.len() + blocks * size_of::<uapi::FeatureBlock>(), 0);
        // SAFETY: behind the struct there is room for as many blocks as it says.
        unsafe { self.ask("features", &mut data)? };
        let at = size_of::<uapi::Features>() + bit / 32 * size_of::<uapi::FeatureBlock>();
        let (block, _) =
            uapi::FeatureBlock::read_from_prefix(&data[at..]).expect("the bit is one of the blocks'");
        let mask = 1 << (bit % 32);
        Ok(FeatureState {
            on: block.active & mask != 0,
            changeable: block.available & !block.never_changed & mask != 0,
        })
    }

    /// Switches a feature.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`]; [`EthtoolError::Unsupported`] where it cannot be switched, or was not although the kernel noted the
    /// wish (another feature may stand against it).
    pub fn set_feature(&self, feature: Feature, on: bool) -> Result<(), EthtoolError> {
        let (bit, count) = self.feature_bit(feature)?;
        let blocks = count.div_ceil(32);
        let mut changes = vec![
            uapi::FeatureChange {
                valid: 0,
                requested: 0
            };
            blocks
        ];
        changes[bit / 32] = uapi::FeatureChange {
            valid: 1 << (bit % 32),
            requested: u32::from(on) << (bit % 32),
        };
        let head = uapi::Features {
            command: uapi::SET_FEATURES,
            size: blocks as u32,
        };
        let mut data = head.as_bytes().to_vec();
        data.extend_from_slice(changes.as_bytes());
        // SAFETY: the kernel reads as many blocks as the struct says, and writes nothing.
        let result = unsafe { self.ask(feature.name(), &mut data)? };
        if result & uapi::FEATURE_UNSUPPORTED != 0 || self.feature(feature)?.on != on {
            return Err(EthtoolError::Unsupported { what: feature.name() });
        }
        Ok(())
    }

    /// A feature's number, and how many there are.
    fn feature_bit(&self, feature: Feature) -> Result<(usize, usize), EthtoolError> {
        const WHAT: &str = "names of features";
        let mut set = uapi::StringSet::new_zeroed();
        set.command = uapi::GET_STRING_SETS;
        set.mask = 1 << uapi::FEATURE_NAMES;
        // SAFETY: the struct has room for the length of the one set that it asks for.
        unsafe { self.ask(WHAT, set.as_mut_bytes())? };
        let count = set.len as usize;
        if set.mask == 0 || count > MAX_FEATURES {
            return Err(EthtoolError::Unsupported { what: WHAT });
        }
        let head = uapi::Strings {
            command: uapi::GET_STRINGS,
            set: uapi::FEATURE_NAMES,
            len: set.len,
        };
        let mut data = head.as_bytes().to_vec();
        data.resize(data.len() + count * uapi::STRING_LEN, 0);
        // SAFETY: behind the struct there is room for every string of the set, whose number the kernel has just told and
        // which does not change while it runs.
        unsafe { self.ask(WHAT, &mut data)? };
        let names = &data[size_of::<uapi::Strings>()..];
        names
            .chunks_exact(uapi::STRING_LEN)
            .position(|name| text(name) == feature.name())
            .map(|bit| (bit, count))
            .ok_or(EthtoolError::Unsupported { what: feature.name() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_of_loopback_are_told() {
        let ethtool = Ethtool::open(1).expect("a socket");
        for feature in [Feature::RxVlan, Feature::Ntuple, Feature::RxFcs, Feature::RxAll] {
            let state = ethtool.feature(feature).expect("every kernel knows them");
            assert!(!state.on && !state.changeable, "{feature:?}: {state:?}");
        }
    }
}
