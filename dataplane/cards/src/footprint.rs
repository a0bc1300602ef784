//! Which bytes of a chunk a driver writes when a packet arrives in zero-copy mode: the packet, and what else.
//!
//! Some drivers put a header of their own before a packet (the *prefix*: virtio-net, 10 or 12 bytes), some fill up its end,
//! some leave the frame check sequence there. Overlapping frames in reverse order forgive a prefix of known length, but
//! whatever is written *behind* a packet lies on payload that came before and is lost.
//!
//! So before a driver is trusted, packets of known length are received in chunks filled with a [`Pattern`], once with each of
//! [`Pattern::PAIR`], each chunk is [`examine`]d when its descriptor has come, and the [`Footprint`]s are merged.

use std::ops::Range;

use crate::platform::Obstacle;

/// Shortest packet that tells anything, in bytes without frame check sequence: Ethernet itself fills up shorter ones
/// (IEEE 802.3, section 3.2.8).
pub const MIN_PACKET_LEN: usize = 60;

/// Length of a frame check sequence in bytes.
const FCS_LEN: usize = 4;

/// Known bytes, which differ from their neighbours and from one run of 251 to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    inverted: bool,
}

impl Pattern {
    /// Two patterns that differ in every bit: what is written looks like one of them at most.
    pub const PAIR: [Pattern; 2] = [Pattern { inverted: false }, Pattern { inverted: true }];

    fn byte(self, at: usize) -> u8 {
        // 251 is the largest prime below 256: the pattern does not repeat at a power of two.
        let byte = (at % 251) as u8 ^ (at / 251 % 256) as u8;
        if self.inverted { !byte } else { byte }
    }

    /// Fills a chunk before it is posted.
    pub fn fill(self, chunk: &mut [u8]) {
        for (at, byte) in chunk.iter_mut().enumerate() {
            *byte = self.byte(at);
        }
    }
}

/// What was written beside a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// From the first byte written to the packet, in bytes.
    pub prefix_len: usize,
    /// From the packet's end to the last byte written, in bytes.
    pub trailer_len: usize,
    /// What stands there.
    pub trailer: Trailer,
}

/// What a driver writes behind a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trailer {
    /// Nothing.
    #[default]
    Nothing,
    /// The frame check sequence.
    Fcs,
    /// Anything else.
    Padding,
}

impl Footprint {
    /// What two packets' footprints say together.
    #[must_use]
    pub fn merge(self, other: Footprint) -> Footprint {
        Footprint {
            prefix_len: self.prefix_len.max(other.prefix_len),
            trailer_len: self.trailer_len.max(other.trailer_len),
            trailer: self.trailer.max(other.trailer),
        }
    }

    /// Why zero-copy may not be used with such a driver.
    pub fn obstacle(&self, interface: &str) -> Option<Obstacle> {
        match self.trailer {
            Trailer::Nothing => None,
            Trailer::Fcs => Some(Obstacle::FcsKept {
                interface: interface.to_owned(),
            }),
            Trailer::Padding => Some(Obstacle::Padding {
                interface: interface.to_owned(),
                len: self.trailer_len,
            }),
        }
    }
}

/// What a driver wrote into `chunk`, filled with `pattern` before, beside the packet at `packet` (offsets in the chunk; its
/// length without frame check sequence, as the sender knows it).
///
/// # Errors
///
/// See [`ProbeError`].
pub fn examine(pattern: Pattern, chunk: &[u8], packet: Range<usize>) -> Result<Footprint, ProbeError> {
    if packet.start > packet.end || packet.end > chunk.len() {
        return Err(ProbeError::Outside);
    }
    if packet.len() < MIN_PACKET_LEN {
        return Err(ProbeError::TooShort { len: packet.len() });
    }
    let is_written = |at: &usize| chunk[*at] != pattern.byte(*at);
    if !packet.clone().any(|at| is_written(&at)) {
        return Err(ProbeError::NotWritten);
    }
    let prefix_len = (0..packet.start)
        .find(is_written)
        .map_or(0, |first| packet.start - first);
    let trailer_len = (packet.end..chunk.len())
        .rfind(is_written)
        .map_or(0, |last| last + 1 - packet.end);
    let behind = &chunk[packet.end..];
    // Ethernet sends the sequence's least significant byte first. One of its bytes may be the pattern's own.
    let fcs = crc32fast::hash(&chunk[packet.clone()]).to_le_bytes();
    let (trailer, trailer_len) = match trailer_len {
        0 => (Trailer::Nothing, 0),
        1..=FCS_LEN if behind.starts_with(&fcs) => (Trailer::Fcs, FCS_LEN),
        len => (Trailer::Padding, len),
    };
    Ok(Footprint {
        prefix_len,
        trailer_len,
        trailer,
    })
}

/// Why a chunk tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The packet does not lie inside the chunk.
    #[error("the probe's packet does not lie inside its chunk")]
    Outside,
    /// The packet is so short that Ethernet itself would fill it up.
    #[error("a probe of {len} bytes; at least {MIN_PACKET_LEN} are needed")]
    TooShort {
        /// Its length in bytes.
        len: usize,
    },
    /// Nothing was written where the packet should be.
    #[error("the probe's packet is not where it should be")]
    NotWritten,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PACKET: Range<usize> = 300..1400;

    /// A chunk in which a packet of fives arrived, after what `driver` wrote.
    fn chunk(pattern: Pattern, driver: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut chunk = vec![0; 2048];
        pattern.fill(&mut chunk);
        driver(&mut chunk);
        chunk[PACKET].fill(5);
        chunk
    }

    fn footprint(driver: impl Fn(&mut [u8])) -> Footprint {
        let [a, b] = Pattern::PAIR
            .map(|pattern| examine(pattern, &chunk(pattern, &driver), PACKET).expect("a packet"));
        a.merge(b)
    }

    #[test]
    fn a_driver_that_writes_the_packet_alone_has_no_footprint() {
        let footprint = footprint(|_| {});
        assert_eq!(footprint, Footprint::default());
        assert_eq!(footprint.obstacle("eth0"), None);
    }

    #[test]
    fn virtios_header_is_a_prefix() {
        for len in [10, 12] {
            let footprint = footprint(|chunk| chunk[300 - len..300].fill(0));
            assert_eq!(
                footprint,
                Footprint {
                    prefix_len: len,
                    ..Footprint::default()
                }
            );
            assert_eq!(footprint.obstacle("eth0"), None);
        }
    }

    #[test]
    fn padding_of_any_length_and_value_is_seen() {
        for value in [0, 5, 0x55, 0xff] {
            for len in [1, 2, 3, 4, 5, 60, 648] {
                let footprint = footprint(|chunk| chunk[1400..1400 + len].fill(value));
                assert_eq!(
                    (footprint.trailer, footprint.trailer_len),
                    (Trailer::Padding, len)
                );
                assert_eq!(footprint.prefix_len, 0);
                assert_eq!(
                    footprint.obstacle("eth0"),
                    Some(Obstacle::Padding {
                        interface: "eth0".into(),
                        len
                    })
                );
            }
        }
        // Far behind the packet, with a gap.
        let footprint = footprint(|chunk| chunk[2047] ^= 1);
        assert_eq!(
            (footprint.trailer, footprint.trailer_len),
            (Trailer::Padding, 648)
        );
    }

    #[test]
    fn the_frame_check_sequence_is_told_from_padding() {
        // By Ethernet's own definition, bit by bit: reflected, from ones, inverted at the end.
        let mut crc = u32::MAX;
        for _ in PACKET {
            crc ^= 5;
            for _ in 0..8 {
                crc = if crc & 1 == 1 {
                    crc >> 1 ^ 0xedb8_8320
                } else {
                    crc >> 1
                };
            }
        }
        let fcs = (!crc).to_le_bytes();
        let kept = footprint(|chunk| chunk[1400..1404].copy_from_slice(&fcs));
        assert_eq!((kept.trailer, kept.trailer_len), (Trailer::Fcs, 4));
        assert_eq!(
            kept.obstacle("eth0"),
            Some(Obstacle::FcsKept {
                interface: "eth0".into()
            })
        );
        let padded = footprint(|chunk| {
            chunk[1400..1404].copy_from_slice(&fcs);
            chunk[1404..1408].fill(0);
        });
        assert_eq!((padded.trailer, padded.trailer_len), (Trailer::Padding, 8));
        let mut wrong = fcs;
        wrong[0] ^= 1;
        let wrong = footprint(|chunk| chunk[1400..1404].copy_from_slice(&wrong));
        assert_eq!((wrong.trailer, wrong.trailer_len), (Trailer::Padding, 4));
    }

    #[test]
    fn chunks_that_tell_nothing_are_refused() {
        let pattern = Pattern::PAIR[0];
        let mut untouched = vec![0; 2048];
        pattern.fill(&mut untouched);
        assert_eq!(examine(pattern, &untouched, PACKET), Err(ProbeError::NotWritten));
        assert_eq!(
            examine(pattern, &untouched, 300..359),
            Err(ProbeError::TooShort { len: 59 })
        );
        assert_eq!(examine(pattern, &untouched, 2000..2049), Err(ProbeError::Outside));
        let reversed = Range { start: 400, end: 300 };
        assert_eq!(examine(pattern, &untouched, reversed), Err(ProbeError::Outside));
    }

    proptest! {
        /// Whatever is written, and wherever: one of the two patterns shows each byte of it.
        #[test]
        fn nothing_that_is_written_stays_hidden(at in 0_usize..2048, value: u8) {
            let footprint = footprint(|chunk| chunk[at] = value);
            let expected = match at {
                0..300 => (300 - at, 0),
                300..1400 => (0, 0),
                _ => (0, at + 1 - 1400),
            };
            prop_assert_eq!((footprint.prefix_len, footprint.trailer_len), expected);
        }
    }
}
