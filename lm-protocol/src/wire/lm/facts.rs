//! Facts: what a message that leaves unannounced says of itself, at the end of the fragment that travels first.

use crate::geometry::{Geometry, Layout, Wire};
use crate::manifest::{DIGEST_LEN, FragmentHasher};
use zerocopy::byteorder::network_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What an ANNOUNCE says of a message, and its digest, behind its bytes.
///
/// ```text
///  0               8       12      16              24              32              40              56             64
/// +---------------+-------+-------+---------------+---------------+---------------+- - - - - - - -+---------------+
/// |session key u64|msg u32|sent   |  length u64   |    tag u64    |  digest u64   |  credit       |   hash u64    |
/// +---------------+-------+-------+---------------+---------------+---------------+- - - - - - - -+---------------+
/// ```
///
/// The credit is what a CREDIT says of the session that goes the other way: the upper half of its key, which is 0 where there is none, packet limit,
/// delivered and announced. The hash is that of the bytes before it ([`FragmentHasher::digest`]). The message's digest covers its own bytes alone: neither the facts, nor
/// the zeros that may lie before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Facts {
    /// The session's key.
    pub session_key: U64,
    /// Number of the message.
    pub message: U32,
    /// DATA packets of the session before this message's first (cumulative, mod 2^32).
    pub sent: U32,
    /// Bytes of the message, without the facts.
    pub len: U64,
    /// The application's tag.
    pub tag: U64,
    /// The message's digest ([`crate::manifest::message_digest`]).
    pub digest: U64,
    /// What its sender allows and has of the session that goes the other way.
    pub credit: Credit,
    /// [`Facts::seal`] sets it.
    pub hash: U64,
}

/// What a CREDIT says, of a session that lands and whose settled messages were all whole. The default says nothing.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Credit {
    /// The upper half of the session's key; 0 where nothing is said.
    pub session: U32,
    /// Packet limit, delivered and announced, as [`LmHeader::Credit`](super::LmHeader::Credit) has them.
    pub words: [U32; 3],
}

impl Credit {
    /// The part of a session's key that names it.
    pub const fn session_of(key: u64) -> u32 {
        (key >> 32) as u32
    }
}

impl Facts {
    /// Bytes of facts.
    pub const LEN: usize = 64;
    /// Most fragments of a message that carries facts.
    pub const FRAGMENTS_MAX: u32 = 64;

    /// Where a message of `len` bytes lies together with its facts, which are in its last fragment, whole. `None`: a message of this length
    /// carries none, since it would be one fragment, or more than [`FRAGMENTS_MAX`](Facts::FRAGMENTS_MAX), or IP fragments.
    ///
    /// ```
    /// use lm_protocol::geometry::{Layout, LinkShape, Wire};
    /// use lm_protocol::wire::lm::Facts;
    ///
    /// let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4)?;
    /// assert_eq!(Facts::geometry(&layout, 7168).map(|with| with.message_len()), Some(7168 + 64));
    /// assert_eq!(Facts::geometry(&layout, 2 * 1448 - 10).map(|with| with.message_len()), Some(2 * 1448 + 64));
    /// assert_eq!(Facts::geometry(&layout, 1000), None);
    /// # Ok::<(), lm_protocol::geometry::GeometryError>(())
    /// ```
    pub fn geometry(layout: &Layout, len: u64) -> Option<Geometry> {
        let payload_len = u64::from(layout.payload_len());
        let room = payload_len - len % payload_len;
        let before = match room < Facts::LEN as u64 {
            true => len.checked_add(room)?,
            false => len,
        };
        let with = layout
            .session_message(before.checked_add(Facts::LEN as u64)?)
            .ok()?;
        let is_short = (2..=Facts::FRAGMENTS_MAX).contains(&with.fragment_count());
        (is_short && layout.wire() == Wire::Lm).then_some(with)
    }

    /// With the hash that the others make; `hasher` is the session's.
    pub fn seal(mut self, hasher: &FragmentHasher) -> Facts {
        self.hash = hasher.digest(&self.as_bytes()[..Facts::LEN - DIGEST_LEN]).into();
        self
    }

    /// Reads facts of the session that `hasher` is of. `None`: the bytes are none.
    pub fn read(bytes: [u8; Facts::LEN], hasher: &FragmentHasher) -> Option<Facts> {
        let facts: Facts = zerocopy::transmute!(bytes);
        (facts.seal(hasher) == facts).then_some(facts)
    }
}

const _: () = assert!(size_of::<Facts>() == Facts::LEN);
