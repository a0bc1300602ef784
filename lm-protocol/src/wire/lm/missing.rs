//! Lists in the payloads of CREDIT and MISSING packets.

use zerocopy::byteorder::network_endian::U32;

/// A receiver says of so many settled messages whether they are whole: as many as may be under way.
pub const SETTLED_KEPT: u32 = 256;

/// The message numbers in a CREDIT's payload.
pub fn broken_messages(payload: &[u8]) -> impl ExactSizeIterator<Item = u32> + '_ {
    payload
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| u32::from_be_bytes(*bytes))
}

/// One range of fragments in a MISSING payload.
///
/// ```text
///  0               4               8
/// +---------------+---------------+
/// |   first u32   |  length u32   |
/// +---------------+---------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingRange {
    /// First fragment that is missing.
    pub first: u32,
    /// Fragments that are missing from there.
    pub len: u32,
}

impl MissingRange {
    /// Bytes of a range.
    pub const LEN: usize = 8;

    /// The range's bytes.
    pub fn encode(&self) -> [u8; MissingRange::LEN] {
        zerocopy::transmute!([U32::new(self.first), U32::new(self.len)])
    }

    /// The ranges of a MISSING payload. Bytes behind the last whole range are left out; a parsed packet has none.
    /// Nothing is known about the numbers but their size: a hostile peer may name fragments that do not exist.
    pub fn iter(payload: &[u8]) -> impl ExactSizeIterator<Item = MissingRange> + '_ {
        payload
            .as_chunks::<{ MissingRange::LEN }>()
            .0
            .iter()
            .map(|chunk| {
                let [first, len]: [U32; 2] = zerocopy::transmute!(*chunk);
                MissingRange {
                    first: first.get(),
                    len: len.get(),
                }
            })
    }
}
