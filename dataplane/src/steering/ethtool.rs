//! What ethtool(8) reads and sets of a network card, through the same ioctl (`SIOCETHTOOL`, `linux/ethtool.h`).
//!
//! An [`Ethtool`] belongs to the network namespace of the thread that opened it, wherever it is used later.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use lm_protocol::rss::{HashInput, MAX_TABLE_LEN, RssError, RssKey};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::uapi;

/// Bits of the hashed fields: source and destination address (`RXH_IP_SRC | RXH_IP_DST`).
const HASH_ADDRESSES: u64 = 0x30;
/// Those and both ports (`RXH_L4_B_0_1 | RXH_L4_B_2_3`): what ethtool(8) calls `sdfn`.
pub(super) const HASH_ADDRESSES_AND_PORTS: u64 = 0xf0;

/// Longest key accepted from a driver, in bytes.
const MAX_KEY_LEN: usize = 256;
/// Most rules that are listed.
const MAX_RULES: usize = 1 << 16;
/// Most features that are listed; Linux 6.18 has fewer than 64.
const MAX_FEATURES: usize = 1 << 10;

/// The card behind an interface, for questions and settings.
#[derive(Debug)]
pub struct Ethtool {
    socket: OwnedFd,
    interface_index: u32,
}

/// A driver, and what it drives (`ETHTOOL_GDRVINFO`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Its name, such as "igb".
    pub name: String,
    /// Where the card sits, such as "0000:01:00.0"; empty for devices without hardware.
    pub bus: String,
}

/// Queues in use and the most there can be (`ETHTOOL_GCHANNELS`). A combined channel has a receive and a transmit queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    /// Receive queues.
    pub rx: u32,
    /// Transmit queues.
    pub tx: u32,
    /// Most receive queues.
    pub max_rx: u32,
    /// Most transmit queues.
    pub max_tx: u32,
}

/// Lengths of the card's own rings (`ETHTOOL_GRINGPARAM`), in descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLens {
    /// Of each receive queue.
    pub rx: u32,
    /// The longest for receiving.
    pub rx_max: u32,
    /// Of each transmit queue.
    pub tx: u32,
    /// The longest for sending.
    pub tx_max: u32,
}

/// How packets are spread over receive queues (`ETHTOOL_GRSSH`).
#[derive(Clone, PartialEq, Eq)]
pub struct RssSettings {
    /// The indirection table: queue numbers.
    pub table: Vec<u32>,
    /// The hash key; empty where the driver does not show it.
    pub key: Vec<u8>,
    /// `ETH_RSS_HASH_*`: 1 Toeplitz, 2 XOR, 4 CRC-32; 0 where the driver does not tell.
    pub function: u8,
    /// `RXH_XFRM_*`: what happens to the input before it is hashed; 0 nothing.
    pub transform: u8,
}

/// Shows no key: who knows it can aim floods at one queue.
impl fmt::Debug for RssSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RssSettings")
            .field("table", &self.table)
            .field("key_len", &self.key.len())
            .field("function", &self.function)
            .field("transform", &self.transform)
            .finish()
    }
}

impl RssSettings {
    /// The key, if the hash is one that [`lm_protocol::rss`] computes.
    ///
    /// A driver that does not tell the function is taken to use Toeplitz's, as nearly all do; a wrong guess shows in the
    /// first packet, which comes to another queue.
    ///
    /// # Errors
    ///
    /// See [`HashProblem`].
    pub fn key(&self) -> Result<RssKey, HashProblem> {
        if self.function & !uapi::HASH_TOEPLITZ != 0 {
            return Err(HashProblem::Function {
                function: self.function,
            });
        }
        if self.transform != 0 {
            return Err(HashProblem::Transform);
        }
        if self.key.is_empty() {
            return Err(HashProblem::Hidden);
        }
        RssKey::new(&self.key).map_err(HashProblem::Key)
    }
}

/// Why the queue of a packet cannot be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HashProblem {
    /// Not Toeplitz's hash.
    Function {
        /// `ETH_RSS_HASH_*`.
        function: u8,
    },
    /// Source and destination are mixed before they are hashed (`symmetric-xor`, `symmetric-or-xor`).
    Transform,
    /// The driver does not show the key; see [`system_key`].
    Hidden,
    /// The key is none.
    Key(RssError),
}

impl fmt::Display for HashProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HashProblem::Function { function } => write!(
                f,
                "the card spreads packets by hash function {function}; choose Toeplitz's \
                 (ethtool -X DEVICE hfunc toeplitz)"
            ),
            HashProblem::Transform => f.write_str(
                "the card makes its hash symmetric, so that a source port cannot be chosen for a queue; \
                 switch that off (ethtool -X DEVICE xfrm none)",
            ),
            HashProblem::Hidden => f.write_str("the driver does not show its RSS key"),
            HashProblem::Key(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for HashProblem {}

/// The key that drivers take which have none of their own (`/proc/sys/net/core/netdev_rss_key`), its first `len` bytes.
///
/// For drivers that do not show the key they use. Whether it is this one has to be checked against the queue where
/// packets arrive.
///
/// # Errors
///
/// What the file system says; `NotFound` while no driver has asked for a key, or when it is shorter than `len`;
/// `InvalidData` when it is not a list of bytes.
pub fn system_key(len: usize) -> io::Result<Vec<u8>> {
    let text = std::fs::read_to_string("/proc/sys/net/core/netdev_rss_key")?;
    parse_key(&text, len)
}

fn parse_key(text: &str, len: usize) -> io::Result<Vec<u8>> {
    let parsed: Result<Vec<u8>, _> = text
        .trim()
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect();
    let mut key = parsed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    if key.len() < len || key.iter().all(|byte| *byte == 0) {
        return Err(io::Error::from(io::ErrorKind::NotFound));
    }
    key.truncate(len);
    Ok(key)
}

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
    /// For the interface of that index, in the calling thread's network namespace. Whether there is one shows at the first
    /// question.
    ///
    /// # Errors
    ///
    /// What socket(2) says.
    pub fn open(interface_index: u32) -> io::Result<Ethtool> {
        // SAFETY: socket(2) takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Ethtool {
            // SAFETY: the descriptor was just opened and nobody else owns it.
            socket: unsafe { OwnedFd::from_raw_fd(fd) },
            interface_index,
        })
    }

    /// A request that names the interface, by whatever name it has now.
    fn request(&self, what: &'static str) -> Result<libc::ifreq, EthtoolError> {
        // SAFETY: integers and a pointer, for which zeros are values.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_ifru.ifru_ifindex = self.interface_index.cast_signed();
        // SAFETY: the request is live and exclusive; the kernel reads the index and writes the name.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGIFNAME, &raw mut request) };
        if result < 0 {
            return Err(EthtoolError::new(what, io::Error::last_os_error()));
        }
        Ok(request)
    }

    /// Puts the command at the start of `data` to the driver; its answer takes its place. Gives what ioctl(2) returned.
    ///
    /// # Safety
    ///
    /// `data` begins with a command's number and has room for all that the kernel writes as that command's answer.
    unsafe fn ask(&self, what: &'static str, data: &mut [u8]) -> Result<i32, EthtoolError> {
        let mut request = self.request(what)?;
        request.ifr_ifru.ifru_data = data.as_mut_ptr().cast();
        // SAFETY: the request is live; the kernel reads the command from the exclusive `data` and writes the answer there,
        // for which there is room by the caller's promise. The kernel is trusted not to write more, and copies byte by byte,
        // so that alignment does not matter.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
        if result < 0 {
            Err(EthtoolError::new(what, io::Error::last_os_error()))
        } else {
            Ok(result)
        }
    }

    /// The driver.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`], as for all questions here.
    pub fn driver(&self) -> Result<Driver, EthtoolError> {
        let mut info = uapi::DriverInfo::new_zeroed();
        info.command = uapi::GET_DRIVER_INFO;
        // SAFETY: the command's struct, which has a fixed size.
        unsafe { self.ask("driver's name", info.as_mut_bytes())? };
        Ok(Driver {
            name: text(&info.driver),
            bus: text(&info.bus),
        })
    }

    /// Queues.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn channels(&self) -> Result<Channels, EthtoolError> {
        let mut channels = uapi::Channels::new_zeroed();
        channels.command = uapi::GET_CHANNELS;
        // SAFETY: the command's struct, which has a fixed size.
        unsafe { self.ask("number of queues", channels.as_mut_bytes())? };
        Ok(Channels {
            rx: channels.rx.saturating_add(channels.combined),
            tx: channels.tx.saturating_add(channels.combined),
            max_rx: channels.max_rx.max(channels.max_combined),
            max_tx: channels.max_tx.max(channels.max_combined),
        })
    }

    /// Lengths of the card's rings.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn ring_lens(&self) -> Result<RingLens, EthtoolError> {
        let mut rings = uapi::RingParam::new_zeroed();
        rings.command = uapi::GET_RINGS;
        // SAFETY: the command's struct, which has a fixed size.
        unsafe { self.ask("ring lengths", rings.as_mut_bytes())? };
        Ok(RingLens {
            rx: rings.rx,
            rx_max: rings.rx_max,
            tx: rings.tx,
            tx_max: rings.tx_max,
        })
    }

    /// How many receive queues RSS spreads over, as the kernel counts them for a table of its own making.
    pub(super) fn spread_queues(&self) -> Result<u32, EthtoolError> {
        let answer = self.rule_command("receive queues for RSS", uapi::GET_RX_RINGS, |_| {})?;
        Ok(u32::try_from(answer.data).unwrap_or(u32::MAX))
    }

    /// How packets are spread over receive queues.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`]; [`EthtoolError::Unsupported`] where the driver has no table, as on veth.
    pub fn rss(&self) -> Result<RssSettings, EthtoolError> {
        const WHAT: &str = "RSS indirection table";
        let mut head = uapi::Rxfh::new_zeroed();
        head.command = uapi::GET_RSS;
        // SAFETY: with both lengths 0 the kernel writes the struct alone.
        unsafe { self.ask(WHAT, head.as_mut_bytes())? };
        let (table_len, key_len) = (head.table_len as usize, head.key_len as usize);
        if table_len > MAX_TABLE_LEN || key_len > MAX_KEY_LEN {
            return Err(EthtoolError::new(
                WHAT,
                io::Error::from(io::ErrorKind::InvalidData),
            ));
        }
        let mut data = vec![0; size_of::<uapi::Rxfh>() + table_len * 4 + key_len];
        let mut request = uapi::Rxfh::new_zeroed();
        request.command = uapi::GET_RSS;
        request.table_len = head.table_len;
        request.key_len = head.key_len;
        data[..size_of::<uapi::Rxfh>()].copy_from_slice(request.as_bytes());
        // SAFETY: behind the struct there is room for the lengths that it asks for.
        unsafe { self.ask(WHAT, &mut data)? };
        let (answer, rest) = uapi::Rxfh::read_from_prefix(&data).expect("longer than the struct");
        let (table, key) = rest.split_at(table_len * 4);
        Ok(RssSettings {
            table: table
                .chunks_exact(4)
                .map(|entry| u32::from_ne_bytes(entry.try_into().expect("4 bytes")))
                .collect(),
            key: key.to_vec(),
            function: answer.function,
            transform: answer.transform,
        })
    }

    /// Sets the indirection table; key, function and transform stay. An empty one gives the kernel's own: queues in turn,
    /// and newly made when their number changes.
    ///
    /// `transform` is what [`Ethtool::rss`] told; the kernel takes a table only together with it.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`]; `EINVAL` for a table whose length or queues are not the card's.
    pub fn set_rss_table(&self, table: &[u32], transform: u8) -> Result<(), EthtoolError> {
        let mut head = uapi::Rxfh::new_zeroed();
        head.command = uapi::SET_RSS;
        head.table_len = u32::try_from(table.len()).expect("a table fits memory");
        head.transform = transform;
        let mut data = head.as_bytes().to_vec();
        data.extend(table.iter().flat_map(|queue| queue.to_ne_bytes()));
        // SAFETY: the kernel reads as many entries as the struct says, and writes at most the struct.
        unsafe { self.ask("RSS indirection table", &mut data)? };
        Ok(())
    }

    /// One of the commands with a `struct ethtool_rxnfc`.
    pub(super) fn rule_command(
        &self,
        what: &'static str,
        command: u32,
        fill: impl FnOnce(&mut uapi::Rxnfc),
    ) -> Result<uapi::Rxnfc, EthtoolError> {
        let mut data = uapi::Rxnfc::new_zeroed();
        data.command = command;
        fill(&mut data);
        assert_ne!(command, uapi::GET_RULES, "its answer is longer");
        // SAFETY: the command's struct, which has a fixed size; what GET_RULES writes behind it is excluded above.
        unsafe { self.ask(what, data.as_mut_bytes())? };
        Ok(data)
    }

    /// Which fields of UDP over IPv4 are hashed: bits `RXH_*`.
    pub(super) fn udp4_hash_fields(&self) -> Result<u64, EthtoolError> {
        let answer = self.rule_command("hashed fields of UDP", uapi::GET_HASH_FIELDS, |data| {
            data.flow_type = uapi::UDP_V4_FLOW;
        })?;
        Ok(answer.data)
    }

    pub(super) fn set_udp4_hash_fields(&self, fields: u64) -> Result<(), EthtoolError> {
        self.rule_command("hashed fields of UDP", uapi::SET_HASH_FIELDS, |data| {
            data.flow_type = uapi::UDP_V4_FLOW;
            data.data = fields;
        })?;
        Ok(())
    }

    /// What of UDP over IPv4 is hashed; `None` for anything but addresses, or addresses and ports.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn hash_input(&self) -> Result<Option<HashInput>, EthtoolError> {
        Ok(hash_input(self.udp4_hash_fields()?))
    }

    /// The card's table of flow rules.
    pub(super) fn rules(&self) -> Result<RuleTable, EthtoolError> {
        const WHAT: &str = "flow rules";
        let count = self.rule_command(WHAT, uapi::GET_RULE_COUNT, |_| {})?;
        let room = count.rule_count as usize;
        if room > MAX_RULES {
            return Err(EthtoolError::new(
                WHAT,
                io::Error::from(io::ErrorKind::InvalidData),
            ));
        }
        let mut head = uapi::Rxnfc::new_zeroed();
        head.command = uapi::GET_RULES;
        head.rule_count = count.rule_count;
        let mut data = head.as_bytes().to_vec();
        data.resize(size_of::<uapi::Rxnfc>() + room * 4, 0);
        // SAFETY: from RULE_LOCATIONS on, inside of the struct, there is room for as many locations as it asks for.
        unsafe { self.ask(WHAT, &mut data)? };
        let (answer, _) = uapi::Rxnfc::read_from_prefix(&data).expect("longer than the struct");
        let mut taken: Vec<u32> = data[uapi::RULE_LOCATIONS..]
            .chunks_exact(4)
            .take((answer.rule_count as usize).min(room))
            .map(|location| u32::from_ne_bytes(location.try_into().expect("4 bytes")))
            .collect();
        taken.sort_unstable();
        Ok(RuleTable {
            len: u32::try_from(answer.data).unwrap_or(u32::MAX),
            driver_picks: count.data & u64::from(uapi::LOCATION_SPECIAL) != 0,
            taken,
        })
    }

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

/// A card's table of flow rules.
pub(super) struct RuleTable {
    /// How many places it has.
    pub(super) len: u32,
    /// Whether the driver picks a rule's place itself.
    pub(super) driver_picks: bool,
    /// The places in use, ascending.
    pub(super) taken: Vec<u32>,
}

impl RuleTable {
    /// Where to put one more rule. Where the driver does not pick, the last free place: rules of the administrator,
    /// usually at the front, go first.
    pub(super) fn free_place(&self) -> Option<u32> {
        if self.driver_picks {
            return Some(uapi::LOCATION_ANY);
        }
        (0..self.len)
            .rev()
            .find(|place| self.taken.binary_search(place).is_err())
    }
}

/// What bits `RXH_*` say.
pub(super) fn hash_input(fields: u64) -> Option<HashInput> {
    match fields {
        HASH_ADDRESSES => Some(HashInput::Addresses),
        HASH_ADDRESSES_AND_PORTS => Some(HashInput::AddressesAndPorts),
        _ => None,
    }
}

/// A string of C's.
fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Why a card did not answer, or does not do what was asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum EthtoolError {
    /// The driver cannot do that.
    Unsupported {
        /// What was asked.
        what: &'static str,
    },
    /// It takes CAP_NET_ADMIN.
    NotPermitted {
        /// What was asked.
        what: &'static str,
    },
    /// There is no such interface (any more).
    Gone,
    /// Anything else.
    System {
        /// What was asked.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl EthtoolError {
    pub(super) fn new(what: &'static str, source: io::Error) -> EthtoolError {
        match source.raw_os_error() {
            Some(libc::EOPNOTSUPP) => EthtoolError::Unsupported { what },
            Some(libc::EPERM) => EthtoolError::NotPermitted { what },
            Some(libc::ENODEV) => EthtoolError::Gone,
            _ => EthtoolError::System { what, source },
        }
    }
}

impl fmt::Display for EthtoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EthtoolError::Unsupported { what } => write!(f, "the driver does not support this: {what}"),
            EthtoolError::NotPermitted { what } => {
                write!(f, "not permitted: {what}; run as root or with CAP_NET_ADMIN")
            }
            EthtoolError::Gone => f.write_str("the interface is gone; see ip link"),
            EthtoolError::System { what, source } => write!(f, "{what}: {source}"),
        }
    }
}

impl std::error::Error for EthtoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            EthtoolError::System { source, .. } => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> RssSettings {
        RssSettings {
            table: vec![0, 1],
            key: vec![0x6d; 40],
            function: 1,
            transform: 0,
        }
    }

    #[test]
    fn only_toeplitz_without_a_transform_is_computed() {
        assert!(settings().key().is_ok());
        let with = |change: fn(&mut RssSettings)| {
            let mut settings = settings();
            change(&mut settings);
            settings.key()
        };
        assert!(with(|settings| settings.function = 0).is_ok(), "not told");
        for function in [2, 4, 8] {
            let mut settings = settings();
            settings.function = function;
            assert_eq!(settings.key(), Err(HashProblem::Function { function }));
        }
        assert_eq!(
            with(|settings| settings.transform = 1),
            Err(HashProblem::Transform)
        );
        assert_eq!(
            with(|settings| settings.transform = 2),
            Err(HashProblem::Transform)
        );
        assert_eq!(with(|settings| settings.key.clear()), Err(HashProblem::Hidden));
        assert_eq!(
            with(|settings| settings.key.fill(0)),
            Err(HashProblem::Key(RssError::ZeroKey))
        );
        assert_eq!(
            with(|settings| settings.key.truncate(16)),
            Err(HashProblem::Key(RssError::KeyLen { len: 16 }))
        );
        assert!(
            !format!("{:?}", settings()).contains("109"),
            "keys are not printed"
        );
    }

    #[test]
    fn the_systems_key_is_read_as_the_kernel_writes_it() {
        let text: Vec<String> = (1..=52).map(|byte| format!("{byte:02x}")).collect();
        let text = text.join(":") + "\n";
        let whole: Vec<u8> = (1..=52).collect();
        assert_eq!(parse_key(&text, 52).expect("52 bytes"), whole);
        assert_eq!(parse_key(&text, 40).expect("40 of them"), whole[..40]);
        let kind = |text: &str, len| parse_key(text, len).expect_err("no key").kind();
        assert_eq!(kind(&text, 53), io::ErrorKind::NotFound);
        assert_eq!(kind("00:00:00\n", 3), io::ErrorKind::NotFound);
        assert_eq!(kind("\n", 40), io::ErrorKind::InvalidData);
        assert_eq!(kind("6d:5g\n", 2), io::ErrorKind::InvalidData);
    }

    #[test]
    fn hashed_fields_are_the_known_sets() {
        assert_eq!(hash_input(0x30), Some(HashInput::Addresses));
        assert_eq!(hash_input(0xf0), Some(HashInput::AddressesAndPorts));
        for other in [0, 0x10, 0x70, 0xf2, 1 << 31] {
            assert_eq!(hash_input(other), None);
        }
    }

    #[test]
    fn rules_take_the_last_free_place() {
        let place = |len, driver_picks, taken: &[u32]| {
            let taken = taken.to_vec();
            RuleTable {
                len,
                driver_picks,
                taken,
            }
            .free_place()
        };
        assert_eq!(place(8, false, &[]), Some(7));
        assert_eq!(place(8, false, &[0, 1, 7]), Some(6));
        assert_eq!(place(2, false, &[0, 1]), None);
        assert_eq!(place(0, false, &[]), None);
        assert_eq!(place(8, true, &[7]), Some(uapi::LOCATION_ANY));
    }

    #[test]
    fn errors_of_the_kernel_have_their_kind() {
        let error = |code| EthtoolError::new("a thing", io::Error::from_raw_os_error(code));
        assert!(matches!(
            error(libc::EOPNOTSUPP),
            EthtoolError::Unsupported { what: "a thing" }
        ));
        assert!(matches!(
            error(libc::EPERM),
            EthtoolError::NotPermitted { what: "a thing" }
        ));
        assert!(matches!(error(libc::ENODEV), EthtoolError::Gone));
        assert!(matches!(
            error(libc::EINVAL),
            EthtoolError::System { what: "a thing", .. }
        ));
    }

    /// Index 1 is the loopback device of every namespace; it has no driver at all.
    #[test]
    fn loopback_supports_nothing_and_says_so() {
        let ethtool = Ethtool::open(1).expect("a socket");
        macro_rules! unsupported {
            ($($question:expr),*) => {
                $(match $question {
                    Err(EthtoolError::Unsupported { .. }) => {}
                    other => panic!("{}: {other:?}", stringify!($question)),
                })*
            };
        }
        unsupported!(
            ethtool.channels(),
            ethtool.ring_lens(),
            ethtool.rss(),
            ethtool.hash_input(),
            ethtool.rules().map(|table| table.len)
        );
        let gone = Ethtool::open(i32::MAX as u32).expect("a socket");
        assert!(matches!(gone.driver(), Err(EthtoolError::Gone)));
    }

    #[test]
    fn features_of_loopback_are_told() {
        let ethtool = Ethtool::open(1).expect("a socket");
        for feature in [Feature::RxVlan, Feature::Ntuple, Feature::RxFcs, Feature::RxAll] {
            let state = ethtool.feature(feature).expect("every kernel knows them");
            assert!(!state.on && !state.changeable, "{feature:?}: {state:?}");
        }
    }
}
