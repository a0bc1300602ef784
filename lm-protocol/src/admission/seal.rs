//! What an admission message between daemons is wrapped in: who says it, when in its life, and the proof that it knows the
//! cluster's key.
//!
//! ```text
//!  0       1       2       4       6       8               16              24              32              40
//! +-------+-------+-------+-------+-------+---------------+---------------+---------------+---------------+--------+--------+
//! |ver|14 | flags |bodylen| port  |   0   |    boot id    |   sequence    |   challenge   |     echo      |  body  | tag 16 |
//! +-------+-------+-------+-------+-------+---------------+---------------+---------------+---------------+--------+--------+
//! ```
//!
//! The body is a control message as [`crate::control`] writes it, or one of [`super::message`]; its own header says its version, so
//! that another version of the protocol is told apart *after* the sender is known to be one of the cluster.
//!
//! The tag is the first 16 bytes of HMAC-SHA-256 (RFC 2104; truncated as in RFC 4868) over a label, both hosts' addresses, header and
//! body. HMAC-SHA-256, because it is the most reviewed of the candidates, is plain Rust, takes well under a microsecond a message, and
//! its crate compares in constant time; BLAKE3's crate wants a C compiler for its fast paths, SipHash's has no constant-time
//! comparison. The addresses are in it although they are not in the datagram, so that nobody can
//! send one host's message to another, or in another's name. Bit 0 of the flags: for all hosts; the address is then the broadcast
//! address, whichever way the datagram travels.

use crate::control::WORD_LEN;
use crate::wire::lm::{SEAL_VERSION, TYPE_SEALED};
use core::fmt;
use core::net::{Ipv4Addr, SocketAddrV4};
use hmac::{Hmac, Mac as _};
use sha2::Sha256;
use zerocopy::byteorder::network_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::message::MAX_BODY_LEN;

/// Bytes in front of the body.
pub const SEAL_HEADER_LEN: usize = 40;
/// Bytes of the tag behind the body.
pub const TAG_LEN: usize = 16;
/// Longest sealed datagram, in bytes.
pub const MAX_SEALED_LEN: usize = SEAL_HEADER_LEN + MAX_BODY_LEN + TAG_LEN;

/// Where a message for all hosts says that it goes.
const EVERYBODY: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::BROADCAST, 0);
/// Flag: the message is for all hosts.
const FLAG_ALL: u8 = 1;

/// What the key is used for, so that no use can be taken for another.
const LABEL_TAG: &[u8; 8] = b"lm-seal1";
const LABEL_CHALLENGE: &[u8; 8] = b"lm-chal1";
const LABEL_WORD: &[u8; 8] = b"lm-word1";

/// The key that all daemons of a cluster share.
#[derive(Clone)]
pub struct ClusterKey(Hmac<Sha256>);

/// The key is shorter than [`ClusterKey::MIN_LEN`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a cluster key has at least {} bytes", ClusterKey::MIN_LEN)]
pub struct KeyTooShort;

/// Does not show the key.
impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(…)")
    }
}

impl ClusterKey {
    /// Shortest key, in bytes.
    pub const MIN_LEN: usize = 16;

    /// The key with these bytes: random ones, not a password.
    ///
    /// # Errors
    ///
    /// [`KeyTooShort`].
    pub fn new(bytes: &[u8]) -> Result<ClusterKey, KeyTooShort> {
        if bytes.len() < ClusterKey::MIN_LEN {
            return Err(KeyTooShort);
        }
        // HMAC takes keys of any length.
        Hmac::new_from_slice(bytes)
            .map(ClusterKey)
            .map_err(|_| KeyTooShort)
    }

    fn mac(&self, from: SocketAddrV4, to: SocketAddrV4, sealed: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(LABEL_TAG);
        mac.update(&address(from));
        mac.update(&address(to));
        mac.update(sealed);
        mac
    }

    /// A number that nobody without the key can tell beforehand, for one host and one purpose.
    pub(crate) fn nonce(&self, boot_id: u64, peer: SocketAddrV4, generation: u64) -> u64 {
        let mut mac = self.0.clone();
        mac.update(LABEL_CHALLENGE);
        mac.update(&boot_id.to_be_bytes());
        mac.update(&address(peer));
        mac.update(&generation.to_be_bytes());
        let bytes = mac.finalize().into_bytes();
        let nonce = bytes
            .iter()
            .take(8)
            .fold(0, |nonce, &byte| nonce << 8 | u64::from(byte));
        // 0 says that there is none.
        nonce.max(1)
    }

    /// A daemon's word for a program of its host: that the endpoint at `from`, of the incarnation `sender_id`, is one that it allows, and
    /// was given `cookie` by the endpoint at `to` ([`crate::introduction`]). Both are data addresses.
    #[must_use]
    pub fn word(&self, from: SocketAddrV4, to: SocketAddrV4, sender_id: u64, cookie: u64) -> [u8; WORD_LEN] {
        let bytes = self.spoken(from, to, sender_id, cookie).finalize().into_bytes();
        core::array::from_fn(|at| bytes[at])
    }

    /// Whether `word` is that ([`ClusterKey::word`]); compared in constant time.
    #[must_use]
    pub fn is_word(
        &self,
        from: SocketAddrV4,
        to: SocketAddrV4,
        (sender_id, cookie): (u64, u64),
        word: &[u8; WORD_LEN],
    ) -> bool {
        self.spoken(from, to, sender_id, cookie)
            .verify_truncated_left(word)
            .is_ok()
    }

    fn spoken(&self, from: SocketAddrV4, to: SocketAddrV4, sender_id: u64, cookie: u64) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(LABEL_WORD);
        mac.update(&address(from));
        mac.update(&address(to));
        mac.update(&sender_id.to_be_bytes());
        mac.update(&cookie.to_be_bytes());
        mac
    }

    /// Writes a sealed datagram from `from` to `to`, or to everybody.
    ///
    /// # Panics
    ///
    /// If the body is longer than a control message can be.
    pub fn seal(
        &self,
        from: SocketAddrV4,
        to: Option<SocketAddrV4>,
        header: &SealHeader,
        body: &[u8],
    ) -> Datagram {
        assert!(body.len() <= MAX_BODY_LEN);
        let mut bytes = [0; MAX_SEALED_LEN];
        let raw = RawSeal {
            version_type: SEAL_VERSION << 4 | TYPE_SEALED,
            flags: if to.is_none() { FLAG_ALL } else { 0 },
            body_len: U16::new(body.len() as u16),
            port: U16::new(header.port),
            reserved: U16::ZERO,
            boot_id: U64::new(header.boot_id),
            sequence: U64::new(header.sequence),
            challenge: U64::new(header.challenge),
            echo: U64::new(header.echo),
        };
        bytes[..SEAL_HEADER_LEN].copy_from_slice(raw.as_bytes());
        let end = SEAL_HEADER_LEN + body.len();
        bytes[SEAL_HEADER_LEN..end].copy_from_slice(body);
        let tag = self
            .mac(from, to.unwrap_or(EVERYBODY), &bytes[..end])
            .finalize()
            .into_bytes();
        bytes[end..end + TAG_LEN].copy_from_slice(&tag[..TAG_LEN]);
        Datagram {
            bytes,
            len: (end + TAG_LEN) as u8,
        }
    }

    /// Reads a datagram that came from `from` to us at `to`; gives its header and body. Nothing of it is believed before the tag
    /// is found right.
    ///
    /// # Errors
    ///
    /// [`SealError`].
    pub fn open<'a>(
        &self,
        from: SocketAddrV4,
        to: SocketAddrV4,
        datagram: &'a [u8],
    ) -> Result<(SealHeader, &'a [u8]), SealError> {
        let first = *datagram.first().ok_or(SealError::Length)?;
        if first & 0xf != TYPE_SEALED {
            return Err(SealError::NotSealed);
        }
        if first >> 4 != SEAL_VERSION {
            return Err(SealError::Version { theirs: first >> 4 });
        }
        if datagram.len() > MAX_SEALED_LEN {
            return Err(SealError::Length);
        }
        let (raw, rest) = RawSeal::read_from_prefix(datagram).map_err(|_| SealError::Length)?;
        let body_len = usize::from(raw.body_len.get());
        if rest.len() != body_len + TAG_LEN {
            return Err(SealError::Length);
        }
        let (body, tag) = rest.split_at(body_len);
        let to = if raw.flags & FLAG_ALL != 0 { EVERYBODY } else { to };
        self.mac(from, to, &datagram[..SEAL_HEADER_LEN + body_len])
            .verify_truncated_left(tag)
            .map_err(|_| SealError::Tag)?;
        let header = SealHeader {
            port: raw.port.get(),
            boot_id: raw.boot_id.get(),
            sequence: raw.sequence.get(),
            challenge: raw.challenge.get(),
            echo: raw.echo.get(),
        };
        Ok((header, body))
    }
}

fn address(address: SocketAddrV4) -> [u8; 6] {
    let [a, b, c, d] = address.ip().octets();
    let [high, low] = address.port().to_be_bytes();
    [a, b, c, d, high, low]
}

/// What a sealed message says about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealHeader {
    /// Data port of the receiver that the message is about; 0 where it is about a host.
    pub port: u16,
    /// Number of the sender's life: random, another one after each start.
    pub boot_id: u64,
    /// Counts the messages of that life, to whomever, from 1.
    pub sequence: u64,
    /// A number to send back, which proves that the answer is not an old one; 0: not asked for.
    pub challenge: u64,
    /// The last number that the other side asked to have back; 0: none.
    pub echo: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawSeal {
    version_type: u8,
    flags: u8,
    body_len: U16,
    port: U16,
    reserved: U16,
    boot_id: U64,
    sequence: U64,
    challenge: U64,
    echo: U64,
}

const _: () = assert!(size_of::<RawSeal>() == SEAL_HEADER_LEN);
const _: () = assert!(core::mem::offset_of!(RawSeal, boot_id) == 8);
const _: () = assert!(core::mem::offset_of!(RawSeal, echo) == 32);
const _: () = assert!(MAX_SEALED_LEN <= u8::MAX as usize);

/// A datagram to transmit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    bytes: [u8; MAX_SEALED_LEN],
    len: u8,
}

impl Datagram {
    /// A message as it is.
    pub(super) fn plain(body: &[u8]) -> Datagram {
        let mut bytes = [0; MAX_SEALED_LEN];
        bytes[..body.len()].copy_from_slice(body);
        Datagram {
            bytes,
            len: body.len() as u8,
        }
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Datagram({} bytes)", self.len)
    }
}

/// Why a datagram was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// Too short, too long, or not of the length that it says.
    #[error("the sealed message has a wrong length")]
    Length,
    /// Not a sealed message: what an endpoint without a daemon sends, or something else.
    #[error("not a sealed admission message")]
    NotSealed,
    /// Another version of the seal.
    #[error("sealed by version {theirs}; this is version {SEAL_VERSION}")]
    Version {
        /// Which.
        theirs: u8,
    },
    /// Another key, other addresses, or altered on the way.
    #[error("the tag is wrong: another cluster key, or altered on the way")]
    Tag,
}
