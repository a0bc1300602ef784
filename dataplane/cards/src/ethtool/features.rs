//! Features of a device that can be switched on and off.

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::uapi;
use super::{Ethtool, EthtoolError, text};

/// Most names of a set that are listed; Linux 6.18 has fewer than 64 features, and a driver some ten statistics a queue. There is room for as
/// many in every answer: a driver whose queues become more meanwhile may write more than it told before.
const MAX_NAMES: usize = 1 << 12;

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
}

/// A feature of a device, as it is now: what `ethtool -k` lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureState {
    /// Its name in the kernel, such as `rx-gro`.
    pub name: String,
    /// Whether it is on.
    pub on: bool,
    /// Whether it can be switched.
    pub changeable: bool,
}

impl Ethtool {
    /// All features that the kernel knows, in the order of their bits.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn features(&self) -> Result<Vec<FeatureState>, EthtoolError> {
        let names = self.names(uapi::FEATURE_NAMES)?;
        let blocks = names.len().div_ceil(32);
        let head = uapi::Features {
            command: uapi::GET_FEATURES,
            size: blocks as u32,
        };
        // SAFETY: behind the struct there is room for as many blocks as it says.
        let data = unsafe { self.with_rest("features", &head, blocks * size_of::<uapi::FeatureBlock>())? };
        let state = |(bit, name)| {
            let at = size_of::<uapi::Features>() + bit / 32 * size_of::<uapi::FeatureBlock>();
            let (block, _) =
                uapi::FeatureBlock::read_from_prefix(&data[at..]).expect("the bit is one of the blocks'");
            let mask = 1_u32 << (bit % 32);
            FeatureState {
                name,
                on: block.active & mask != 0,
                changeable: block.available & !block.never_changed & mask != 0,
            }
        };
        Ok(names.into_iter().enumerate().map(state).collect())
    }

    /// Switches features by their names.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`]; [`EthtoolError::Unsupported`] where the kernel does not know one, or did not switch it although it noted the wish
    /// (another feature may stand against it).
    pub fn set_features(&self, wanted: &[(&str, bool)]) -> Result<(), EthtoolError> {
        const WHAT: &str = "switching features";
        let unsupported = || EthtoolError::Unsupported { what: WHAT };
        let names = self.names(uapi::FEATURE_NAMES)?;
        let head = uapi::Features {
            command: uapi::SET_FEATURES,
            size: names.len().div_ceil(32) as u32,
        };
        let mut changes = vec![uapi::FeatureChange::new_zeroed(); names.len().div_ceil(32)];
        for (name, on) in wanted {
            let bit = names.iter().position(|known| known == name);
            let bit = bit.ok_or_else(unsupported)?;
            changes[bit / 32].valid |= 1 << (bit % 32);
            changes[bit / 32].requested |= u32::from(*on) << (bit % 32);
        }
        let mut data = head.as_bytes().to_vec();
        data.extend_from_slice(changes.as_bytes());
        // SAFETY: the kernel reads as many blocks as the struct says, and writes nothing.
        unsafe { self.ask(WHAT, &mut data)? };
        // What is fixed is fine as it is wanted, although the kernel calls it unsupported.
        let now = self.features()?;
        let is_so =
            |(name, on): &(&str, bool)| now.iter().any(|state| state.name == *name && state.on == *on);
        match wanted.iter().all(is_so) {
            true => Ok(()),
            false => Err(unsupported()),
        }
    }

    /// A feature's state.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`]; [`EthtoolError::Unsupported`] where the kernel does not know the feature.
    pub fn feature(&self, feature: Feature) -> Result<FeatureState, EthtoolError> {
        let mut features = self.features()?.into_iter();
        let found = features.find(|state| state.name == feature.name());
        found.ok_or(EthtoolError::Unsupported { what: feature.name() })
    }

    /// Switches a feature.
    ///
    /// # Errors
    ///
    /// As [`Ethtool::set_features`].
    pub fn set_feature(&self, feature: Feature, on: bool) -> Result<(), EthtoolError> {
        let set = self.set_features(&[(feature.name(), on)]);
        set.map_err(|error| match error {
            EthtoolError::Unsupported { .. } => EthtoolError::Unsupported { what: feature.name() },
            error => error,
        })
    }

    /// The driver's statistics by name, as `ethtool -S` shows them.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn statistics(&self) -> Result<Vec<(String, u64)>, EthtoolError> {
        let names = self.names(uapi::STATISTIC_NAMES)?;
        let head = uapi::Statistics {
            command: uapi::GET_STATISTICS,
            count: names.len() as u32,
        };
        // SAFETY: behind the struct there is room for more numbers than the driver has names.
        let data = unsafe { self.with_rest("statistics", &head, MAX_NAMES * size_of::<u64>())? };
        let values = data[size_of::<uapi::Statistics>()..].as_chunks().0;
        let values = values.iter().map(|&value| u64::from_ne_bytes(value));
        Ok(names.into_iter().zip(values).collect())
    }

    /// The names of a set: this kernel's features in the order of their bits, or a driver's statistics.
    fn names(&self, names: u32) -> Result<Vec<String>, EthtoolError> {
        const WHAT: &str = "names";
        let mut set = uapi::StringSet::new_zeroed();
        set.command = uapi::GET_STRING_SETS;
        set.mask = 1 << names;
        // SAFETY: the struct has room for the length of the one set that it asks for.
        unsafe { self.ask(WHAT, set.as_mut_bytes())? };
        let count = set.len as usize;
        if set.mask == 0 || count > MAX_NAMES {
            return Err(EthtoolError::Unsupported { what: WHAT });
        }
        let head = uapi::Strings {
            command: uapi::GET_STRINGS,
            set: names,
            len: set.len,
        };
        // SAFETY: behind the struct there is room for more strings than the set has.
        let data = unsafe { self.with_rest(WHAT, &head, MAX_NAMES * uapi::STRING_LEN)? };
        let names = data[size_of::<uapi::Strings>()..].chunks_exact(uapi::STRING_LEN);
        Ok(names.take(count).map(text).collect())
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
