//! What a driver writes beside a packet: packets of many lengths, each received alone in a chunk of known bytes.

use lm_cards::footprint::{Footprint, MIN_PACKET_LEN, Pattern, Trailer, examine};
use lm_dataplane::memory::PACKET_HEADROOM;
use serde::Serialize;

use super::ends::{CHUNK_LEN, Link};
use lm_bench::bare::{UDP_HEADER_LEN, headers};
use lm_bench::cli::{Failure, chain};

/// Longest packet at MTU 1500, in bytes.
const MAX_PACKET_LEN: usize = 1514;
/// From one length to the next, except around powers of two, where each is tried.
const STRIDE: usize = 29;
/// Where the chunk lies in the registered memory.
const CHUNK: u64 = 16 << 10;

/// What the probe found.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct FootprintReport {
    /// From the first byte written before a packet to the packet, at most.
    pub(crate) prefix_len: usize,
    /// How many of those bytes are written, from the first one on.
    pub(crate) prefix_written: usize,
    /// Packets received.
    pub(crate) packets: u64,
}

/// The lengths: what a device copies in bursts or pads shows near powers of two, and at both ends. With two packets
/// each they are fewer than the entries of any device's ring, so that each entry of it is used once: igb (Linux 7.3)
/// mistakes a used entry of a ring that is not full for a new packet.
fn lengths() -> impl Iterator<Item = usize> {
    (MIN_PACKET_LEN..=MAX_PACKET_LEN).filter(|len| {
        let power = len.next_power_of_two();
        let distance = (power - len).min(len - power / 2);
        distance <= 4 || len + 14 >= MAX_PACKET_LEN || len % STRIDE == 0
    })
}

/// Receives packets of each length, twice, and merges what was written beside them.
pub(crate) fn probe(link: &mut Link) -> Result<FootprintReport, Failure> {
    let mut footprint = Footprint::default();
    // From the last byte written before a packet to the packet.
    let mut gap = usize::MAX;
    let before = link.received;
    let mut chunk = vec![0; CHUNK_LEN as usize];
    for len in lengths() {
        let mut packet = headers(&link.addressing, len - UDP_HEADER_LEN).to_vec();
        packet.resize(len, 0xa5);
        link.sender.umem.copy_to(0, &packet);
        for pattern in Pattern::PAIR {
            pattern.fill(&mut chunk);
            link.receiver.umem.copy_to(CHUNK, &chunk);
            link.post(CHUNK);
            link.pass((0, len as u32), CHUNK + PACKET_HEADROOM)?;
            let painted = std::mem::replace(&mut chunk, vec![0; CHUNK_LEN as usize]);
            link.receiver.umem.copy_from(CHUNK, &mut chunk);
            let start = PACKET_HEADROOM as usize;
            let last = (0..start).rfind(|&at| chunk[at] != painted[at]);
            gap = gap.min(last.map_or(usize::MAX, |last| start - 1 - last));
            let found = examine(pattern, &chunk, start..start + len)
                .map_err(|error| Failure::new(format!("{} ({len} bytes)", chain(&error))))?;
            footprint = footprint.merge(found);
        }
    }
    if footprint.trailer != Trailer::Nothing {
        return Err(Failure::new(format!(
            "the driver writes {} bytes behind a packet, over payload that lies there; use copy mode (--mode copy)",
            footprint.trailer_len
        )));
    }
    Ok(FootprintReport {
        prefix_len: footprint.prefix_len,
        prefix_written: footprint.prefix_len.saturating_sub(gap),
        packets: link.received - before,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_reach_from_end_to_end_and_fill_no_ring() {
        let lengths: Vec<usize> = lengths().collect();
        assert_eq!((lengths[0], lengths.last()), (60, Some(&1514)));
        for power in [64, 128, 256, 512, 1024] {
            assert!((power - 4..=power + 4).all(|len| lengths.contains(&len)));
        }
        assert!(lengths.windows(2).all(|pair| pair[1] - pair[0] <= STRIDE));
        assert!(2 * lengths.len() + 8 < 256, "{}", lengths.len());
    }
}
