//! Receive side scaling (RSS): on which receive queue a packet arrives, and which source port brings one to a queue.
//!
//! A network card hashes a packet's addresses (and ports) with a secret key, takes the hash modulo the length of its
//! *indirection table*, and finds the receive queue there. Whoever knows key, table and hashed fields can say beforehand
//! where a packet goes, and choose the one number in it that is free: the UDP source port.
//!
//! The hash is the one that cards agree on, Toeplitz's, as in Microsoft's "RSS hashing functions": for each bit of the
//! input that is set, from the most significant one of the first byte on, the 32 bits of the key that begin at that bit's
//! position are added modulo 2. Cards that XOR source and destination before they hash (`symmetric-xor`) give the same hash
//! to both directions of a flow, and none of this holds for them: callers must not use it there.
//!
//! ```
//! use core::net::Ipv4Addr;
//! use lm_protocol::rss::{Flow, HashInput, Rss, RssKey};
//!
//! let key = RssKey::new(&[0x6d; 40])?;
//! let table = [0, 0, 0, 2, 0, 0, 0, 0]; // queue 2 receives one eighth
//! let rss = Rss::new(&key, &table, HashInput::AddressesAndPorts)?;
//! let mut flow = Flow {
//!     source: Ipv4Addr::new(10, 0, 0, 1),
//!     destination: Ipv4Addr::new(10, 0, 0, 2),
//!     source_port: 0,
//!     destination_port: 7168,
//! };
//! flow.source_port = rss.source_port_for(2, &flow, 1)?;
//! assert_eq!(rss.queue(&flow), 2);
//! # Ok::<(), lm_protocol::rss::RssError>(())
//! ```

use core::fmt;
use core::net::Ipv4Addr;

/// First UDP source port that is chosen: the start of the dynamic ports (RFC 6335, section 6), which end at 65535.
pub const FIRST_SOURCE_PORT: u16 = 49152;

/// How many source ports there are to choose from.
const SOURCE_PORTS: u32 = (1 << 16) - FIRST_SOURCE_PORT as u32;

/// Lengths that a key may have, in bytes: what cards that hash IPv6 at most with ports have, and those with room for more.
pub const KEY_LENS: [usize; 2] = [40, 52];

/// Longest indirection table accepted, in entries; the longest known of a card has 4096.
pub const MAX_TABLE_LEN: usize = 1 << 16;

/// A card's hash key.
#[derive(Clone, PartialEq, Eq)]
pub struct RssKey {
    bytes: [u8; 52],
    len: u8,
}

impl RssKey {
    /// A key of 40 or 52 bytes.
    ///
    /// # Errors
    ///
    /// [`RssError::KeyLen`] for any other length; [`RssError::ZeroKey`] for a key of zeros, with which every hash is 0:
    /// drivers show it when the card keeps its key to itself.
    pub fn new(key: &[u8]) -> Result<RssKey, RssError> {
        if !KEY_LENS.contains(&key.len()) {
            return Err(RssError::KeyLen { len: key.len() });
        }
        if key.iter().all(|byte| *byte == 0) {
            return Err(RssError::ZeroKey);
        }
        let mut bytes = [0; 52];
        bytes[..key.len()].copy_from_slice(key);
        Ok(RssKey {
            bytes,
            len: key.len() as u8,
        })
    }

    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Toeplitz's hash of up to 12 bytes: all that IPv4 has to hash.
    fn hash(&self, input: &[u8]) -> u32 {
        debug_assert!(input.len() + 4 <= usize::from(self.len));
        let mut hash = 0;
        for (at, byte) in input.iter().enumerate() {
            // The 40 bits of the key that begin where the byte does: all windows of its 8 bits.
            let window = self.bytes[at..at + 5]
                .iter()
                .fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
            for bit in 0..8 {
                if byte & 0x80 >> bit != 0 {
                    hash ^= (window >> (8 - bit)) as u32;
                }
            }
        }
        hash
    }
}

/// Shows the length alone: who knows the key can aim floods at one queue.
impl fmt::Debug for RssKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RssKey({} bytes)", self.len)
    }
}

/// What of a UDP packet over IPv4 a card hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HashInput {
    /// Source and destination address (the *2-tuple*), as always for IP fragments.
    Addresses,
    /// Source and destination address, then source and destination port (the *4-tuple*).
    AddressesAndPorts,
}

/// The parts of a UDP packet over IPv4 that matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Address of the sender.
    pub source: Ipv4Addr,
    /// Address of the receiver, whose card hashes.
    pub destination: Ipv4Addr,
    /// UDP source port.
    pub source_port: u16,
    /// UDP destination port.
    pub destination_port: u16,
}

/// A card's way from packets to queues.
#[derive(Clone, Copy, Debug)]
pub struct Rss<'a> {
    key: &'a RssKey,
    table: &'a [u32],
    input: HashInput,
}

impl<'a> Rss<'a> {
    /// The way through `table`, whose entries are queue numbers.
    ///
    /// # Errors
    ///
    /// [`RssError::TableLen`] for a table without entries or with more than [`MAX_TABLE_LEN`].
    pub fn new(key: &'a RssKey, table: &'a [u32], input: HashInput) -> Result<Rss<'a>, RssError> {
        if table.is_empty() || table.len() > MAX_TABLE_LEN {
            return Err(RssError::TableLen { len: table.len() });
        }
        Ok(Rss { key, table, input })
    }

    /// The 32-bit hash of a packet of that flow.
    pub fn hash(&self, flow: &Flow) -> u32 {
        let mut input = [0; 12];
        input[..4].copy_from_slice(&flow.source.octets());
        input[4..8].copy_from_slice(&flow.destination.octets());
        input[8..10].copy_from_slice(&flow.source_port.to_be_bytes());
        input[10..].copy_from_slice(&flow.destination_port.to_be_bytes());
        self.key.hash(match self.input {
            HashInput::Addresses => &input[..8],
            HashInput::AddressesAndPorts => &input,
        })
    }

    /// The receive queue of that flow's packets.
    pub fn queue(&self, flow: &Flow) -> u32 {
        self.table[self.hash(flow) as usize % self.table.len()]
    }

    /// Every source port from [`FIRST_SOURCE_PORT`] on with which packets of `flow` come to `queue`, each once; `flow`'s own
    /// source port does not matter. `seed` says where to begin, so that several senders do not all take the same one.
    pub fn source_ports_for(
        &self,
        queue: u32,
        flow: &Flow,
        seed: u32,
    ) -> impl Iterator<Item = u16> + use<'a> {
        let (rss, flow) = (*self, *flow);
        (0..SOURCE_PORTS)
            .map(move |step| FIRST_SOURCE_PORT + (seed.wrapping_add(step) % SOURCE_PORTS) as u16)
            .filter(move |port| {
                rss.queue(&Flow {
                    source_port: *port,
                    ..flow
                }) == queue
            })
    }

    /// The first of [`Rss::source_ports_for`].
    ///
    /// # Errors
    ///
    /// - [`RssError::QueueNotInTable`]: no packet comes to that queue by its hash.
    /// - [`RssError::PortsNotHashed`]: the addresses alone decide, for another queue.
    /// - [`RssError::NoPort`]: none of the ports leads there.
    pub fn source_port_for(&self, queue: u32, flow: &Flow, seed: u32) -> Result<u16, RssError> {
        if !self.table.contains(&queue) {
            return Err(RssError::QueueNotInTable { queue });
        }
        match self.source_ports_for(queue, flow, seed).next() {
            Some(port) => Ok(port),
            None if self.input == HashInput::Addresses => Err(RssError::PortsNotHashed { queue }),
            None => Err(RssError::NoPort { queue }),
        }
    }
}

/// Why the queue of a packet cannot be computed or chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RssError {
    /// A key that is neither 40 nor 52 bytes long.
    #[error("an RSS key of {len} bytes; 40 and 52 are known")]
    KeyLen {
        /// Its length in bytes.
        len: usize,
    },
    /// A key of zeros.
    #[error("the RSS key is all zeros: the driver does not show the card's key")]
    ZeroKey,
    /// A table without entries, or with too many.
    #[error("an RSS indirection table of {len} entries")]
    TableLen {
        /// Its length in entries.
        len: usize,
    },
    /// The table does not name the queue.
    #[error(
        "the RSS indirection table does not name queue {queue}; give it an entry, or steer by a flow rule"
    )]
    QueueNotInTable {
        /// The queue.
        queue: u32,
    },
    /// Ports are not hashed, and the addresses lead elsewhere.
    #[error(
        "the card hashes addresses only, and these do not lead to queue {queue}; let it hash ports as well (ethtool \
         -N DEVICE rx-flow-hash udp4 sdfn)"
    )]
    PortsNotHashed {
        /// The queue.
        queue: u32,
    },
    /// No source port leads to the queue.
    #[error(
        "no source port from {FIRST_SOURCE_PORT} on leads to queue {queue}; give it more entries of the RSS \
         indirection table"
    )]
    NoPort {
        /// The queue.
        queue: u32,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The key of Microsoft's verification suite.
    const KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0,
        0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42,
        0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    fn flow(source: [u8; 4], source_port: u16, destination: [u8; 4], destination_port: u16) -> Flow {
        Flow {
            source: source.into(),
            destination: destination.into(),
            source_port,
            destination_port,
        }
    }

    /// "Verifying the RSS hash calculation", table for IPv4: flow, hash of the addresses, hash with ports.
    fn published() -> [(Flow, u32, u32); 5] {
        [
            (
                flow([66, 9, 149, 187], 2794, [161, 142, 100, 80], 1766),
                0x323e_8fc2,
                0x51cc_c178,
            ),
            (
                flow([199, 92, 111, 2], 14230, [65, 69, 140, 83], 4739),
                0xd718_262a,
                0xc626_b0ea,
            ),
            (
                flow([24, 19, 198, 95], 12898, [12, 22, 207, 184], 38024),
                0xd2d0_a5de,
                0x5c2b_394a,
            ),
            (
                flow([38, 27, 205, 30], 48228, [209, 142, 163, 6], 2217),
                0x8298_9176,
                0xafc7_327f,
            ),
            (
                flow([153, 39, 163, 191], 44251, [202, 188, 127, 2], 1303),
                0x5d18_09c5,
                0x10e8_28a2,
            ),
        ]
    }

    #[test]
    fn the_published_vectors_hold() {
        let mut long = [0x5c; 52];
        long[..40].copy_from_slice(&KEY);
        for key in [&KEY[..], &long[..]] {
            let key = RssKey::new(key).expect("a key");
            for (flow, addresses, ports) in published() {
                let hash = |input| Rss::new(&key, &[0], input).expect("a table").hash(&flow);
                assert_eq!(hash(HashInput::Addresses), addresses, "{flow:?}");
                assert_eq!(hash(HashInput::AddressesAndPorts), ports, "{flow:?}");
            }
        }
    }

    #[test]
    fn the_table_is_indexed_by_the_hash_modulo_its_length() {
        let key = RssKey::new(&KEY).expect("a key");
        for len in [1_usize, 3, 64, 128, 512, 4096] {
            let table: Vec<u32> = (0..len as u32).collect();
            let rss = Rss::new(&key, &table, HashInput::AddressesAndPorts).expect("a table");
            for (flow, _, hash) in published() {
                assert_eq!(rss.queue(&flow), hash % len as u32);
            }
        }
    }

    #[test]
    fn what_is_no_key_or_no_table_is_refused() {
        for len in [0, 16, 39, 41, 51, 53, 64] {
            assert_eq!(RssKey::new(&vec![1; len]), Err(RssError::KeyLen { len }));
        }
        assert_eq!(RssKey::new(&[0; 40]), Err(RssError::ZeroKey));
        let key = RssKey::new(&KEY).expect("a key");
        for len in [0, MAX_TABLE_LEN + 1] {
            let table = vec![0; len];
            let error = Rss::new(&key, &table, HashInput::Addresses).expect_err("no table");
            assert_eq!(error, RssError::TableLen { len });
        }
        assert!(!format!("{key:?}").contains("6d"), "keys are not printed");
    }

    #[test]
    fn a_queue_with_one_entry_of_128_is_reached() {
        let key = RssKey::new(&KEY).expect("a key");
        let mut table = [0; 128];
        table[127] = 1;
        let rss = Rss::new(&key, &table, HashInput::AddressesAndPorts).expect("a table");
        let wanted = flow([10, 0, 0, 1], 0, [10, 0, 0, 2], 7168);
        let ports: Vec<u16> = rss.source_ports_for(1, &wanted, 0).collect();
        // The hash is linear in the port: each entry gets its share exactly when 7 of its rows are independent, as here.
        assert_eq!(ports.len(), 16384 / 128);
        assert!(ports.iter().all(|port| *port >= FIRST_SOURCE_PORT));
        assert_eq!(rss.source_port_for(1, &wanted, 0), Ok(ports[0]));
        // Another seed gives the same ports from another place on.
        let mut again: Vec<u16> = rss.source_ports_for(1, &wanted, 5 * 16384 + 70).collect();
        assert_eq!(again[0], ports[1], "49222 is behind the first");
        again.sort_unstable();
        assert_eq!(again, ports);
        // What both give together is every port, once.
        assert_eq!(rss.source_ports_for(0, &wanted, 9).count(), 16384 - ports.len());
    }

    #[test]
    fn what_no_port_can_do_is_said() {
        let key = RssKey::new(&KEY).expect("a key");
        let wanted = flow([10, 0, 0, 1], 0, [10, 0, 0, 2], 7168);
        let rss = Rss::new(&key, &[0, 2], HashInput::AddressesAndPorts).expect("a table");
        assert_eq!(
            rss.source_port_for(1, &wanted, 0),
            Err(RssError::QueueNotInTable { queue: 1 })
        );
        let table = [0, 1];
        let rss = Rss::new(&key, &table, HashInput::Addresses).expect("a table");
        let there = rss.queue(&wanted);
        assert_eq!(rss.source_port_for(there, &wanted, 5), Ok(FIRST_SOURCE_PORT + 5));
        assert_eq!(
            rss.source_port_for(1 - there, &wanted, 5),
            Err(RssError::PortsNotHashed { queue: 1 - there })
        );
        // A key that ignores the source port: its bits meet zeros.
        let mut blind = [0; 40];
        blind[0] = 0x80;
        let key = RssKey::new(&blind).expect("a key");
        let rss = Rss::new(&key, &table, HashInput::AddressesAndPorts).expect("a table");
        let there = rss.queue(&wanted);
        assert_eq!(
            rss.source_port_for(1 - there, &wanted, 0),
            Err(RssError::NoPort { queue: 1 - there })
        );
    }

    proptest! {
        /// The definition, bit by bit, with the whole key shifted by one for each bit of the input.
        #[test]
        fn the_hash_is_the_definitions(key in prop::collection::vec(any::<u8>(), 40), input: [u8; 12]) {
            prop_assume!(key.iter().any(|byte| *byte != 0));
            let bit = |bytes: &[u8], at: usize| u32::from(bytes[at / 8] >> (7 - at % 8) & 1);
            let mut expected = 0_u32;
            for at in 0..96 {
                if bit(&input, at) == 1 {
                    expected ^= (0..32).fold(0, |window, next| window << 1 | bit(&key, at + next));
                }
            }
            prop_assert_eq!(RssKey::new(&key).expect("a key").hash(&input), expected);
        }

        #[test]
        fn chosen_ports_lead_where_they_should(source: u32, port: u16, seed: u32, queue in 0_u32..4) {
            let key = RssKey::new(&KEY).expect("a key");
            let table = [0, 1, 2, 3, 0, 1, 2, 3];
            let rss = Rss::new(&key, &table, HashInput::AddressesAndPorts).expect("a table");
            let mut wanted = flow(source.to_be_bytes(), 0, [10, 0, 0, 2], port);
            wanted.source_port = rss.source_port_for(queue, &wanted, seed).expect("a quarter of all");
            prop_assert_eq!(rss.queue(&wanted), queue);
        }
    }
}
