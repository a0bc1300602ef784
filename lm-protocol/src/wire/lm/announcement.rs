//! What an ANNOUNCE's payload holds: entries, and then digests.

use zerocopy::byteorder::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::delivery::Delivery;

/// One message in an ANNOUNCE payload.
///
/// ```text
///  0                       8                       16  17  18      20              24
/// +-----------------------+-----------------------+---+---+-------+---------------+- - - - - - - - +
/// |      length u64       |        tag u64        |del|flg| opaque|  released u32 |  opaque bytes  |
/// +-----------------------+-----------------------+---+---+-------+---------------+- - - - - - - - +
/// ```
///
/// Opaque bytes are for who decides where the message lands: [`OPAQUE_LEN_MAX`](AnnounceEntry::OPAQUE_LEN_MAX) at most. The entry says how many
/// they are, and zeros follow them up to a multiple of 4. More are skipped by their length, as are those that nobody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnnounceEntry {
    /// Bytes of the message.
    pub len: u64,
    /// The application's tag.
    pub tag: u64,
    /// What becomes of the message if fragments of it are lost; `None`, and a way that is not known here: as the session has it.
    /// All messages of a session are sent as the session has it, and a receiver goes by that.
    pub delivery: Option<Delivery>,
    /// Windows that may be sent already, from the message's first; or [`ALL_WINDOWS`](AnnounceEntry::ALL_WINDOWS), or
    /// [`ABORTED`](AnnounceEntry::ABORTED). See [`crate::streaming::Release`].
    pub windows_released: u32,
    /// The message's last fragment ends with [`Facts`](super::Facts): bit 0 of the flags.
    pub has_facts: bool,
}

/// Flag of an entry: [`AnnounceEntry::has_facts`].
const FLAG_FACTS: u8 = 1 << 0;
/// [`AnnounceEntry::delivery`] that is the session's.
const SESSIONS_DELIVERY: u8 = 0xff;

impl AnnounceEntry {
    /// Bytes of an entry without opaque bytes.
    pub const LEN: usize = 24;
    /// Most opaque bytes that a sender gives along.
    pub const OPAQUE_LEN_MAX: usize = 48;
    /// [`AnnounceEntry::windows_released`] of a message that is whole.
    pub const ALL_WINDOWS: u32 = u32::MAX;
    /// [`AnnounceEntry::windows_released`] of a message whose writer gave up: nothing more of it is sent.
    pub const ABORTED: u32 = u32::MAX - 1;

    /// The entry's bytes, without opaque ones.
    pub fn encode(&self) -> [u8; AnnounceEntry::LEN] {
        self.encode_before(0)
    }

    /// Writes the entry and its opaque bytes, [`OPAQUE_LEN_MAX`](AnnounceEntry::OPAQUE_LEN_MAX) at most. Gives the length; `None`: there is no room.
    pub fn write(&self, opaque: &[u8], payload: &mut [u8]) -> Option<usize> {
        let padded_len = opaque.len().next_multiple_of(4);
        let (entry, behind) = payload.split_first_chunk_mut()?;
        let (bytes, zeros) = behind.get_mut(..padded_len)?.split_at_mut(opaque.len());
        *entry = self.encode_before(opaque.len() as u16);
        bytes.copy_from_slice(opaque);
        zeros.fill(0);
        Some(AnnounceEntry::LEN + padded_len)
    }

    fn encode_before(&self, opaque_len: u16) -> [u8; AnnounceEntry::LEN] {
        zerocopy::transmute!(RawEntry {
            len: U64::new(self.len),
            tag: U64::new(self.tag),
            delivery: self.delivery.map_or(SESSIONS_DELIVERY, Delivery::to_u8),
            flags: u8::from(self.has_facts) * FLAG_FACTS,
            opaque_len: U16::new(opaque_len),
            windows_released: U32::new(self.windows_released),
        })
    }

    /// The entries of an ANNOUNCE payload, in message order, of which the header says how many there are. Fewer where the
    /// payload ends before; a parsed packet has all.
    pub fn iter(payload: &[u8], entries: u32) -> impl Iterator<Item = AnnounceEntry> + '_ {
        AnnounceEntry::with_opaque(payload, entries).map(|(entry, _)| entry)
    }

    /// The same, each with its opaque bytes; none where they are more than [`OPAQUE_LEN_MAX`](AnnounceEntry::OPAQUE_LEN_MAX).
    pub fn with_opaque(payload: &[u8], entries: u32) -> impl Iterator<Item = (AnnounceEntry, &[u8])> {
        Entries {
            rest: payload,
            left: entries,
        }
    }
}

/// The digest of one message, behind the entries of an ANNOUNCE payload.
///
/// ```text
///  0               4                       12
/// +---------------+-----------------------+
/// |  message u32  |      digest u64       |
/// +---------------+-----------------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageDigest {
    /// Number of the message, whose fragments were all sent.
    pub message: u32,
    /// Its digest; see [`crate::manifest::message_digest`].
    pub digest: u64,
}

impl MessageDigest {
    /// Bytes of one.
    pub const LEN: usize = 12;

    /// Its bytes.
    pub fn encode(&self) -> [u8; MessageDigest::LEN] {
        let mut bytes = [0; MessageDigest::LEN];
        bytes[..4].copy_from_slice(&self.message.to_be_bytes());
        bytes[4..].copy_from_slice(&self.digest.to_be_bytes());
        bytes
    }

    /// The digests of an ANNOUNCE payload with so many entries. Bytes behind the last whole one are left out; a parsed packet
    /// has none.
    pub fn iter(payload: &[u8], entries: u32) -> impl ExactSizeIterator<Item = MessageDigest> + '_ {
        let entries = Entries {
            rest: payload,
            left: entries,
        };
        let digests = entries.behind().unwrap_or_default();
        digests
            .as_chunks::<{ MessageDigest::LEN }>()
            .0
            .iter()
            .map(|chunk| {
                let [message @ .., _, _, _, _, _, _, _, _] = *chunk;
                let [_, _, _, _, digest @ ..] = *chunk;
                MessageDigest {
                    message: u32::from_be_bytes(message),
                    digest: u64::from_be_bytes(digest),
                }
            })
    }
}

/// Whether an ANNOUNCE's payload is so many entries, and then whole digests.
pub(super) fn is_announcement(payload: &[u8], entries: u32) -> bool {
    let entries = Entries {
        rest: payload,
        left: entries,
    };
    (entries.behind()).is_some_and(|digests| digests.len().is_multiple_of(MessageDigest::LEN))
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawEntry {
    len: U64,
    tag: U64,
    delivery: u8,
    flags: u8,
    opaque_len: U16,
    windows_released: U32,
}

const _: () = assert!(size_of::<RawEntry>() == AnnounceEntry::LEN);
const _: () = assert!(core::mem::offset_of!(RawEntry, windows_released) == 20);

/// Entries of an ANNOUNCE payload that are not read yet, and what follows them.
struct Entries<'a> {
    rest: &'a [u8],
    left: u32,
}

impl<'a> Entries<'a> {
    /// What follows the entries; `None` where the payload ends before.
    fn behind(mut self) -> Option<&'a [u8]> {
        while self.left > 0 {
            self.next()?;
        }
        Some(self.rest)
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = (AnnounceEntry, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let (raw, behind) = RawEntry::ref_from_prefix(self.rest).ok()?;
        let opaque_len = usize::from(raw.opaque_len.get());
        self.rest = behind.get(opaque_len.next_multiple_of(4)..)?;
        let opaque = behind.get(..opaque_len)?;
        let is_known = opaque_len <= AnnounceEntry::OPAQUE_LEN_MAX;
        let entry = AnnounceEntry {
            len: raw.len.get(),
            tag: raw.tag.get(),
            delivery: Delivery::from_u8(raw.delivery),
            windows_released: raw.windows_released.get(),
            has_facts: raw.flags & FLAG_FACTS != 0,
        };
        Some((entry, if is_known { opaque } else { &[] }))
    }
}
