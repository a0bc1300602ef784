//! The manifest: a 64-bit digest of each fragment's payload and one of the whole message.
//!
//! A packet's headers may be overwritten before anybody reads them, and Ethernet's FCS ends at each hop. The manifest
//! says end to end which bytes belong where. The sender makes it, it travels in MANIFEST packets apart from the data, and
//! the receiver shows a message only when the digests agree.
//!
//! ```text
//! MANIFEST of a message of `count` fragments, `n` digests from fragment `first` on
//!  0                        24                      24 + 8n                24 + 8n + 8
//! +------------------------+-----------------------+-----------------------+
//! |  LM header, type 7     |  n × fragment digest  |  message's digest     |
//! |  first, count          |  u64                  |  u64                  |
//! +------------------------+-----------------------+-----------------------+
//!                                                   only where first + n = count
//! ```
//!
//! *Fragment's digest*: XXH3 (64 bits) of its payload, with the session key as seed. *Message's digest*: the same hash of
//! the message's length in bytes, its tag and its number (8, 8 and 4 bytes, big endian), whose seed is a chain of hashes over
//! the fragments' digests in order (each 8 bytes big endian, 30 of them in one hash, which is the seed of the next; the
//! session key is the first). So a manifest proves itself, whatever became of single packets of it.
//!
//! On the way of a message that arrives whole there are no MANIFEST packets: its sender says its digest in an ANNOUNCE
//! ([`crate::wire::lm::MessageDigest`]), and a receiver that finds another one asks for those of the fragments.
//!
//! # Why XXH3
//!
//! Measured with `cargo bench -p lm-protocol --bench digest` on a 2-core x86-64 machine (built for baseline x86-64,
//! that is SSE2), nanoseconds for 1448 bytes, median:
//!
//! | candidate | payload in cache | payload from memory |
//! |---|---|---|
//! | XXH3 64, seeded | 53 | 93 |
//! | XXH3 64, seed 0 | 43 | 86 |
//! | CRC-32 (`crc32fast`), which is 32 bits only | 52 | 80 |
//! | CRC-32 and half of XXH3 | 113 | 140 |
//! | CRC-32 and a pair of sums | 140 | 191 |
//!
//! Two independent halves cost a second pass over the payload. A CRC finds every burst of up to 32 bits for certain and
//! XXH3 with a probability of 1 − 2⁻⁶⁴, as it does everything else, also what a CRC is blind to (a multiple of its
//! polynomial). The tests flip every single bit of a full payload, exchange blocks and overwrite ends. It is no
//! cryptographic hash: it guards against faults and displacement, not against somebody who knows the session key.

use crate::wire::lm::{LmHeader, MAX_PAYLOAD_LEN, MissingRange};
use alloc::boxed::Box;
use alloc::vec;
use core::ops::Range;
use twox_hash::XxHash3_64;
use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a digest on the wire.
pub const DIGEST_LEN: usize = 8;
/// The shortest payload that a MANIFEST packet may be limited to: the last fragment's digest and the message's travel
/// together.
pub const MIN_PAYLOAD_LEN: usize = 2 * DIGEST_LEN;

/// The digest of a fragment's payload in the session with this key.
///
/// Two fragments with the same bytes have the same digest: exchanging them does no harm.
///
/// ```
/// use lm_protocol::manifest::fragment_digest;
/// assert_ne!(fragment_digest(7, b"some bytes"), fragment_digest(7, b"same bytes"));
/// assert_ne!(fragment_digest(7, b"some bytes"), fragment_digest(8, b"some bytes"));
/// ```
#[inline]
pub fn fragment_digest(session_key: u64, payload: &[u8]) -> u64 {
    xxh3_64_with_seed(payload, session_key)
}

/// [`fragment_digest`] for many fragments of one session: what only depends on the key is worked out once.
///
/// ```
/// use lm_protocol::manifest::{FragmentHasher, fragment_digest};
/// let hasher = FragmentHasher::new(7);
/// for payload in [&[5; 100][..], &[5; 1448]] {
///     assert_eq!(hasher.digest(payload), fragment_digest(7, payload));
/// }
/// ```
#[derive(Clone, Debug)]
pub struct FragmentHasher {
    session_key: u64,
    /// XXH3's secret for payloads that are longer than [`FragmentHasher::SEEDED_MAX`].
    secret: [u8; FragmentHasher::SECRET_LEN],
}

impl FragmentHasher {
    const SECRET_LEN: usize = 192;
    /// Up to this length XXH3 mixes the seed with the payload instead of the secret (`XXH3_MIDSIZE_MAX`).
    const SEEDED_MAX: usize = 240;

    /// For the session with this key.
    pub const fn new(session_key: u64) -> FragmentHasher {
        FragmentHasher {
            session_key,
            secret: const_custom_default_secret(session_key),
        }
    }

    /// The digest of a fragment's payload.
    #[inline]
    pub fn digest(&self, payload: &[u8]) -> u64 {
        match payload.len() {
            ..=FragmentHasher::SEEDED_MAX => fragment_digest(self.session_key, payload),
            // The other crate's takes what the compiler was told of the processor: half as fast as AVX2, which this one looks for.
            _ => {
                XxHash3_64::oneshot_with_secret(&self.secret, payload).expect("a secret of XXH3's own length")
            }
        }
    }
}

/// The chain of hashes over the digests of consecutive fragments.
fn chain(session_key: u64, digests: &[u64]) -> u64 {
    let mut chain = session_key;
    // The longest input for which XXH3 needs nothing that depends on the seed alone.
    let mut block = [[0; DIGEST_LEN]; FragmentHasher::SEEDED_MAX / DIGEST_LEN];
    for digests in digests.chunks(block.len()) {
        for (bytes, digest) in block.iter_mut().zip(digests) {
            *bytes = digest.to_be_bytes();
        }
        chain = xxh3_64_with_seed(block[..digests.len()].as_flattened(), chain);
    }
    chain
}

/// The digest of message number `message`, of `len` bytes and with this tag, whose fragments have these digests, in order.
pub fn message_digest(session_key: u64, message: u32, digests: &[u64], len: u64, tag: u64) -> u64 {
    let mut about = [0; 20];
    about[..8].copy_from_slice(&len.to_be_bytes());
    about[8..16].copy_from_slice(&tag.to_be_bytes());
    about[16..].copy_from_slice(&message.to_be_bytes());
    xxh3_64_with_seed(&about, chain(session_key, digests))
}

/// The digest of a message's window, whose fragments have these digests, in order: the chain over these alone, and then the message's
/// number and the window's (4 bytes each, big endian), so that one window's never does for another.
pub fn window_digest(session_key: u64, message: u32, window: u32, digests: &[u64]) -> u64 {
    let mut about = [0; 8];
    about[..4].copy_from_slice(&message.to_be_bytes());
    about[4..].copy_from_slice(&window.to_be_bytes());
    xxh3_64_with_seed(&about, chain(session_key, digests))
}

/// The digests in a MANIFEST payload. Bytes behind the last whole digest are left out; a parsed packet has none.
pub fn digests(payload: &[u8]) -> impl ExactSizeIterator<Item = u64> + '_ {
    let (digests, _) = payload.as_chunks::<DIGEST_LEN>();
    digests.iter().map(|bytes| u64::from_be_bytes(*bytes))
}

/// A message's manifest at its sender: says which packets carry it.
///
/// ```
/// use lm_protocol::manifest::{self, Manifest};
/// use lm_protocol::wire::lm::{HEADER_LEN, LmHeader};
///
/// let digests = [&b"frag"[..], b"ments"].map(|payload| manifest::fragment_digest(7, payload));
/// let packet = Manifest::new(7, 1, &digests, 9, 5).packets(1448).next().unwrap();
/// assert_eq!(packet.header, LmHeader::Manifest { session_key: 7, message: 1, first: 0, count: 2 });
/// assert_eq!(packet.payload_len(), 24);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Manifest<'a> {
    session_key: u64,
    message: u32,
    digests: &'a [u64],
    message_digest: u64,
}

impl<'a> Manifest<'a> {
    /// The manifest of message number `message`, of `len` bytes and with this tag, whose fragments have these digests.
    ///
    /// Computes the message's digest, which takes a pass over all of `digests`.
    ///
    /// # Panics
    ///
    /// When there are no digests, or more than 2³² − 1: a message has that many fragments.
    pub fn new(session_key: u64, message: u32, digests: &'a [u64], len: u64, tag: u64) -> Manifest<'a> {
        Manifest::with_message_digest(
            session_key,
            message,
            digests,
            message_digest(session_key, message, digests, len, tag),
        )
    }

    /// As [`Manifest::new`], with a message's digest that was computed before: to repeat parts of a manifest.
    ///
    /// # Panics
    ///
    /// As [`Manifest::new`].
    pub fn with_message_digest(
        session_key: u64,
        message: u32,
        digests: &'a [u64],
        message_digest: u64,
    ) -> Manifest<'a> {
        assert!(
            !digests.is_empty() && u32::try_from(digests.len()).is_ok(),
            "a message of {} fragments",
            digests.len()
        );
        Manifest {
            session_key,
            message,
            digests,
            message_digest,
        }
    }

    /// The digest of the whole message.
    pub fn message_digest(&self) -> u64 {
        self.message_digest
    }

    fn count(&self) -> u32 {
        self.digests.len() as u32 // at most u32::MAX, checked in `with_message_digest`
    }

    /// All packets, in ascending order, with payloads of at most `payload_len` bytes: 181 digests in 1448.
    ///
    /// # Panics
    ///
    /// When `payload_len` is below [`MIN_PAYLOAD_LEN`].
    pub fn packets(&self, payload_len: usize) -> Packets<'a> {
        self.packets_of(
            MissingRange {
                first: 0,
                len: self.count(),
            },
            payload_len,
        )
    }

    /// The packets with the digests of a range of fragments that the receiver asked for; no packets for a range that the
    /// message has not. The message's digest goes with the last fragment's.
    ///
    /// # Panics
    ///
    /// When `payload_len` is below [`MIN_PAYLOAD_LEN`].
    pub fn packets_of(&self, range: MissingRange, payload_len: usize) -> Packets<'a> {
        assert!(
            payload_len >= MIN_PAYLOAD_LEN,
            "a manifest in payloads of {payload_len} bytes: must be {MIN_PAYLOAD_LEN} at least"
        );
        let first = range.first.min(self.count());
        Packets {
            manifest: *self,
            rest: first..first.saturating_add(range.len).min(self.count()),
            per_packet: (payload_len.min(MAX_PAYLOAD_LEN) / DIGEST_LEN) as u32,
        }
    }
}

/// The packets of a manifest; made by [`Manifest::packets`].
#[derive(Clone, Debug)]
pub struct Packets<'a> {
    manifest: Manifest<'a>,
    rest: Range<u32>,
    per_packet: u32,
}

impl<'a> Iterator for Packets<'a> {
    type Item = Packet<'a>;

    fn next(&mut self) -> Option<Packet<'a>> {
        let count = self.manifest.count();
        let (first, left) = (self.rest.start, self.rest.end.checked_sub(self.rest.start)?);
        if left == 0 {
            return None;
        }
        // A full packet that ends with the last fragment has no room for the message's digest, so that fragment goes
        // with the next packet.
        let mut taken = left.min(self.per_packet);
        if first + taken == count && taken == self.per_packet {
            taken -= 1;
        }
        self.rest.start = first + taken;
        let digests = &self.manifest.digests[first as usize..(first + taken) as usize];
        Some(Packet {
            header: LmHeader::Manifest {
                session_key: self.manifest.session_key,
                message: self.manifest.message,
                first,
                count,
            },
            digests,
            message_digest: (first + taken == count).then_some(self.manifest.message_digest),
        })
    }
}

/// One MANIFEST packet, yet to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The packet's header.
    pub header: LmHeader,
    /// The fragments' digests that it carries.
    pub digests: &'a [u64],
    /// The message's digest, where the last fragment's is.
    pub message_digest: Option<u64>,
}

impl Packet<'_> {
    /// Bytes of the payload.
    pub fn payload_len(&self) -> usize {
        (self.digests.len() + usize::from(self.message_digest.is_some())) * DIGEST_LEN
    }

    /// Writes the payload to the start of `out` and returns its length in bytes.
    ///
    /// # Panics
    ///
    /// When `out` is shorter than [`Packet::payload_len`].
    pub fn write_payload(&self, out: &mut [u8]) -> usize {
        let payload_len = self.payload_len();
        let all = self.digests.iter().copied().chain(self.message_digest);
        for (bytes, digest) in out[..payload_len]
            .as_chunks_mut::<DIGEST_LEN>()
            .0
            .iter_mut()
            .zip(all)
        {
            *bytes = digest.to_be_bytes();
        }
        payload_len
    }
}

/// Why a MANIFEST packet, or a whole manifest, was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// More fragments than the collector was made for, or none.
    #[error("a manifest of {count} fragments; 1 to {max} are possible here")]
    Count {
        /// Fragments of the message.
        count: u32,
        /// Most that there may be.
        max: u32,
    },
    /// Another session, message or fragment count than expected, a packet that is no MANIFEST, or digests of fragments
    /// that the message has not. Nothing was changed.
    #[error("the digests belong to another message")]
    Foreign,
    /// Digests that differ from those that came before. The fragments that are in dispute count as missing again;
    /// in a proved manifest nothing was changed.
    #[error("{fragments} digests differ from those that came before")]
    Conflict {
        /// How many fragments' digests differ.
        fragments: u32,
    },
    /// All digests came, and the message's does not agree with them: every one is missing again.
    #[error("the message's digest does not agree with the fragments'")]
    Disproved,
}

/// The manifest of one message at its receiver: takes MANIFEST packets in any order, and knows which digests lack.
///
/// All memory is taken when it is made, and used again for each message ([`ManifestCollector::begin`]). No digest is
/// told before the manifest is *proved*, that is, all are there and agree with the message's own.
///
/// ```
/// use lm_protocol::manifest::{Manifest, ManifestCollector, fragment_digest};
/// use lm_protocol::wire::lm::MissingRange;
///
/// let mut collector = ManifestCollector::new(1000);
/// collector.begin(7, 1, 2, 9, 5)?;
/// assert_eq!(collector.missing().next(), Some(MissingRange { first: 0, len: 2 }));
///
/// let digests = [fragment_digest(7, b"frag"), fragment_digest(7, b"ments")];
/// for packet in Manifest::new(7, 1, &digests, 9, 5).packets(1448) {
///     let mut payload = [0; 1448];
///     let len = packet.write_payload(&mut payload);
///     collector.accept(&packet.header, &payload[..len])?;
/// }
/// assert!(collector.is_proved());
/// assert_eq!(collector.digest(1), Some(fragment_digest(7, b"ments")));
/// # Ok::<(), lm_protocol::manifest::ManifestError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ManifestCollector {
    session_key: u64,
    message: u32,
    count: u32,
    len: u64,
    tag: u64,
    /// One for each fragment; meaningful where `known` says so.
    digests: Box<[u64]>,
    /// A bit for each fragment; those from `count` on are 0.
    known: Box<[u64]>,
    known_count: u32,
    /// Meaningful where the last fragment's digest is known: they come together.
    message_digest: u64,
    proved: bool,
}

impl ManifestCollector {
    /// A collector for messages of at most `max_fragments` fragments. Takes 8⅛ bytes for each.
    pub fn new(max_fragments: u32) -> ManifestCollector {
        let max = max_fragments as usize;
        ManifestCollector {
            session_key: 0,
            message: 0,
            count: 0,
            len: 0,
            tag: 0,
            digests: vec![0; max].into_boxed_slice(),
            known: vec![0; max.div_ceil(64)].into_boxed_slice(),
            known_count: 0,
            message_digest: 0,
            proved: false,
        }
    }

    /// Forgets everything and expects the manifest of this message: its session's key, number, fragments, length in bytes
    /// and tag, as they were announced.
    ///
    /// # Errors
    ///
    /// [`ManifestError::Count`]; the collector then expects nothing.
    pub fn begin(
        &mut self,
        session_key: u64,
        message: u32,
        count: u32,
        len: u64,
        tag: u64,
    ) -> Result<(), ManifestError> {
        self.forget();
        self.count = 0;
        if count == 0 || count as usize > self.digests.len() {
            return Err(ManifestError::Count {
                count,
                max: self.digests.len() as u32,
            });
        }
        (self.session_key, self.message, self.count) = (session_key, message, count);
        (self.len, self.tag) = (len, tag);
        Ok(())
    }

    fn forget(&mut self) {
        self.known[..self.count.div_ceil(64) as usize].fill(0);
        self.known_count = 0;
        self.proved = false;
    }

    /// Takes a MANIFEST packet; returns the number of fragments whose digest is new. Duplicates are 0.
    ///
    /// Takes time for the digests in the packet, and once for all of them when the last one comes.
    ///
    /// # Errors
    ///
    /// [`ManifestError::Foreign`], [`ManifestError::Conflict`] and [`ManifestError::Disproved`]. After each of them the
    /// collector goes on, and [`ManifestCollector::missing`] says what to ask for again.
    pub fn accept(&mut self, header: &LmHeader, payload: &[u8]) -> Result<u32, ManifestError> {
        let LmHeader::Manifest {
            session_key,
            message,
            first,
            count,
        } = *header
        else {
            return Err(ManifestError::Foreign);
        };
        let expected = (self.session_key, self.message, self.count);
        let given = digests(payload).len();
        let end = first as usize + given;
        if (session_key, message, count) != expected
            || count == 0
            || given == 0
            || !payload.len().is_multiple_of(DIGEST_LEN)
            // One too many is the message's, which comes where the last fragment's is and nowhere else.
            || end > count as usize + 1
            || end == count as usize
        {
            return Err(ManifestError::Foreign);
        }
        let mut given = digests(payload);
        let (mut new, mut disputed) = (0, 0);
        for index in first..count {
            let Some(digest) = given.next() else { break };
            let message_digest = if index == count - 1 { given.next() } else { None };
            if !self.knows(index) {
                self.digests[index as usize] = digest;
                self.message_digest = message_digest.unwrap_or(self.message_digest);
                self.learn(index, true);
                new += 1;
            } else if self.digests[index as usize] != digest
                || message_digest.is_some_and(|digest| digest != self.message_digest)
            {
                disputed += 1;
                // Nobody can tell which of the two is right.
                if !self.proved {
                    self.learn(index, false);
                }
            }
        }
        if disputed > 0 {
            return Err(ManifestError::Conflict { fragments: disputed });
        }
        if new > 0 && self.known_count == self.count {
            let digests = &self.digests[..self.count as usize];
            let found = message_digest(self.session_key, self.message, digests, self.len, self.tag);
            if found != self.message_digest {
                self.forget();
                return Err(ManifestError::Disproved);
            }
            self.proved = true;
        }
        Ok(new)
    }

    fn knows(&self, index: u32) -> bool {
        self.known[index as usize / 64] >> (index % 64) & 1 == 1
    }

    fn learn(&mut self, index: u32, known: bool) {
        self.known[index as usize / 64] ^= 1 << (index % 64);
        self.known_count = self.known_count.wrapping_add_signed(if known { 1 } else { -1 });
    }

    /// Whether all digests are there and agree with the message's.
    pub fn is_proved(&self) -> bool {
        self.proved
    }

    /// Number of the message whose manifest is expected.
    pub fn message(&self) -> u32 {
        self.message
    }

    /// The message's digest. `None` before the manifest is proved.
    pub fn message_digest(&self) -> Option<u64> {
        self.proved.then_some(self.message_digest)
    }

    /// The digest that the fragment's payload must have. `None` before the manifest is proved, and for a fragment that
    /// the message has not.
    #[inline]
    pub fn digest(&self, index: u32) -> Option<u64> {
        (self.proved && index < self.count).then(|| self.digests[index as usize])
    }

    /// Whether these bytes are the fragment's payload. `None` as for [`ManifestCollector::digest`].
    #[inline]
    pub fn verify(&self, index: u32, payload: &[u8]) -> Option<bool> {
        let expected = self.digest(index)?;
        Some(fragment_digest(self.session_key, payload) == expected)
    }

    /// The fragments whose digests lack, in ascending order, as ranges that neither touch nor are empty. The message's
    /// digest lacks where the last fragment's does.
    pub fn missing(&self) -> impl Iterator<Item = MissingRange> + '_ {
        let mut at = 0;
        core::iter::from_fn(move || {
            let first = self.next_with(false, at)?;
            let end = self.next_with(true, first).unwrap_or(self.count);
            at = end;
            Some(MissingRange {
                first,
                len: end - first,
            })
        })
    }

    /// The first fragment from `from` on whose digest is known, or is not.
    fn next_with(&self, known: bool, from: u32) -> Option<u32> {
        let words = self.known[..self.count.div_ceil(64) as usize].iter();
        words
            .enumerate()
            .skip(from as usize / 64)
            .find_map(|(at, &word)| {
                let start = at as u64 * 64;
                let before = u64::from(from).saturating_sub(start); // below 64: earlier words were skipped
                let found = (if known { word } else { !word }) & (u64::MAX << before);
                (found != 0).then(|| start + u64::from(found.trailing_zeros()))
            })
            .filter(|&index| index < u64::from(self.count))
            .map(|index| index as u32)
    }
}
