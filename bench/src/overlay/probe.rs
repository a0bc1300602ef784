//! What a driver writes beside a packet: packets of every length, each received alone in a chunk of known bytes.

use lm_dataplane::memory::PACKET_HEADROOM;
use lm_dataplane::platform::footprint::{Footprint, MIN_PACKET_LEN, Pattern, Trailer, examine};
use serde::Serialize;

use super::ends::{CHUNK_LEN, Link};
use crate::bare::{Ends, Mac, UDP_HEADER_LEN};
use crate::cli::{Failure, chain};

/// Longest packet at MTU 1500, in bytes.
const MAX_PACKET_LEN: usize = 1514;
/// Where the chunk lies in the registered memory.
const CHUNK: u64 = 16 << 10;

/// What the probe found.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct FootprintReport {
    /// Bytes written before a packet, at most.
    pub prefix_len: usize,
    /// Bytes written behind one, at most.
    pub trailer_len: usize,
    /// Shortest packet received, in bytes without frame check sequence.
    pub from_len: usize,
    /// Longest one; each length between was tried.
    pub to_len: usize,
    /// Packets received.
    pub packets: u64,
}

/// Receives packets of each length, twice, and merges what was written beside them.
pub(super) fn probe(link: &mut Link) -> Result<FootprintReport, Failure> {
    let mut footprint = Footprint::default();
    let before = link.received;
    let addressing = &link.addressing;
    let ends = Ends {
        source_mac: Mac(addressing.src_mac.0),
        destination_mac: Mac(addressing.dst_mac.0),
        source: addressing.src_ip,
        destination: addressing.dst_ip,
        port: addressing.dst_port,
    };
    let mut chunk = vec![0; CHUNK_LEN as usize];
    for len in MIN_PACKET_LEN..=MAX_PACKET_LEN {
        let mut packet = ends.headers(len - UDP_HEADER_LEN).to_vec();
        packet.resize(len, 0xa5);
        link.sender.umem.copy_to(0, &packet);
        for pattern in Pattern::PAIR {
            pattern.fill(&mut chunk);
            link.receiver.umem.copy_to(CHUNK, &chunk);
            link.post(CHUNK);
            link.pass((0, len as u32), CHUNK + PACKET_HEADROOM)?;
            link.receiver.umem.copy_from(CHUNK, &mut chunk);
            let start = PACKET_HEADROOM as usize;
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
        trailer_len: footprint.trailer_len,
        from_len: MIN_PACKET_LEN,
        to_len: MAX_PACKET_LEN,
        packets: link.received - before,
    })
}
