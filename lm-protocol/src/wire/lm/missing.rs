//! What a MISSING packet's payload lists.

use zerocopy::byteorder::network_endian::U32;

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
