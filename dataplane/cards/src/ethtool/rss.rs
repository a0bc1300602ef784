//! How a card spreads packets over its receive queues: indirection table, hash key and hashed fields.

use std::fmt;
use std::io;

use lm_protocol::rss::{HashInput, MAX_TABLE_LEN, RssError, RssKey};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::uapi;
use super::{Ethtool, EthtoolError, numbers};

/// Bits of the hashed fields: source and destination address (`RXH_IP_SRC | RXH_IP_DST`).
const HASH_ADDRESSES: u64 = 0x30;
/// Those and both ports (`RXH_L4_B_0_1 | RXH_L4_B_2_3`): what ethtool(8) calls `sdfn`.
pub(crate) const HASH_ADDRESSES_AND_PORTS: u64 = 0xf0;

/// Longest key accepted from a driver, in bytes.
const MAX_KEY_LEN: usize = 256;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HashProblem {
    /// Not Toeplitz's hash.
    #[error(
        "the card spreads packets by hash function {function}; choose Toeplitz's (ethtool -X DEVICE hfunc toeplitz)"
    )]
    Function {
        /// `ETH_RSS_HASH_*`.
        function: u8,
    },
    /// Source and destination are mixed before they are hashed (`symmetric-xor`, `symmetric-or-xor`).
    #[error(
        "the card makes its hash symmetric, so that a source port cannot be chosen for a queue; switch that off \
         (ethtool -X DEVICE xfrm none)"
    )]
    Transform,
    /// The driver does not show the key; see [`system_key`].
    #[error("the driver does not show its RSS key")]
    Hidden,
    /// The key is none.
    #[error(transparent)]
    Key(RssError),
}

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

/// What bits `RXH_*` say.
pub(crate) fn hash_input(fields: u64) -> Option<HashInput> {
    match fields {
        HASH_ADDRESSES => Some(HashInput::Addresses),
        HASH_ADDRESSES_AND_PORTS => Some(HashInput::AddressesAndPorts),
        _ => None,
    }
}

impl Ethtool {
    /// How packets are spread over receive queues.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`]; [`EthtoolError::Unsupported`] where the driver has no table, as on veth.
    pub fn rss(&self) -> Result<RssSettings, EthtoolError> {
        const WHAT: &str = "RSS indirection table";
        // SAFETY: with both lengths 0 the kernel writes the struct alone.
        let head: uapi::Rxfh = unsafe { self.filled(WHAT, uapi::GET_RSS)? };
        let (table_len, key_len) = (head.table_len as usize, head.key_len as usize);
        if table_len > MAX_TABLE_LEN || key_len > MAX_KEY_LEN {
            return Err(EthtoolError::new(WHAT, io::ErrorKind::InvalidData.into()));
        }
        let mut request = uapi::Rxfh::new_zeroed();
        request.command = uapi::GET_RSS;
        request.table_len = head.table_len;
        request.key_len = head.key_len;
        // SAFETY: behind the struct there is room for the lengths that it asks for.
        let data = unsafe { self.with_rest(WHAT, &request, table_len * 4 + key_len)? };
        let (answer, rest) = uapi::Rxfh::read_from_prefix(&data).expect("longer than the struct");
        let (table, key) = rest.split_at(table_len * 4);
        Ok(RssSettings {
            table: numbers(table).collect(),
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

    /// Which fields of UDP over IPv4 are hashed: bits `RXH_*`.
    pub(crate) fn udp4_hash_fields(&self) -> Result<u64, EthtoolError> {
        let answer = self.rule_command("hashed fields of UDP", uapi::GET_HASH_FIELDS, |data| {
            data.flow_type = uapi::UDP_V4_FLOW;
        })?;
        Ok(answer.data)
    }

    /// What of UDP over IPv4 is hashed; `None` for anything but addresses, or addresses and ports.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn hash_input(&self) -> Result<Option<HashInput>, EthtoolError> {
        Ok(hash_input(self.udp4_hash_fields()?))
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
}
