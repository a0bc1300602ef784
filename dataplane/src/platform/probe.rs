//! What a zero-copy device writes beside packets, found out on the general channel before messages land where it writes: see
//! [`super::footprint`].
//!
//! General frames do not overlap, so there it harms nobody. While the probe runs they are posted full of a pattern; whoever asks
//! for a session is made to send some packets there, and is granted one when they have shown what the driver does.

use crate::bounds::PREFIX_LEN_MAX;
use crate::completion::PeerId;
use crate::memory::{CHUNK_LEN_RANGE, Umem};

use super::Obstacle;
use super::footprint::{Footprint, Pattern, ProbeError, Trailer, examine};

/// Ethernet header with a VLAN tag and the parts of an IPv4 one up to its total length, in bytes.
const LENGTH_KNOWN: usize = 22;
/// Packets asked for in vain, beyond those that fill the device's ring, before nothing is expected any more.
const ASKED_MAX: u32 = 500;

/// The probe of one device.
#[derive(Debug)]
pub(crate) struct Probe {
    interface: String,
    footprint: Footprint,
    /// Which of the two patterns have shown a packet with nothing behind it, where padding would be seen.
    clean: [bool; 2],
    /// Packets in a row with bytes behind them. They may be an earlier packet's: a frame of one that the gate passed on is used
    /// again by the kernel, as it is, and there are as many of these as the device's ring has places.
    suspicions: u32,
    suspicions_max: u32,
    asked: u32,
    /// Who was asked last.
    pub(crate) peer: Option<PeerId>,
    chunk: Vec<u8>,
}

impl Probe {
    /// `kept_frames`: as [`crate::port::Device::kept_frames`].
    pub(crate) fn new(interface: &str, chunk_len: u32, kept_frames: u32) -> Probe {
        debug_assert!(CHUNK_LEN_RANGE.contains(&chunk_len));
        Probe {
            interface: interface.to_owned(),
            footprint: Footprint::default(),
            clean: [false; 2],
            suspicions: 0,
            suspicions_max: kept_frames.max(16),
            asked: 0,
            peer: None,
            chunk: vec![0; chunk_len as usize],
        }
    }

    /// Frames have the patterns without order: what tells something may be every second packet.
    fn pattern_of(&self, frame: u64) -> usize {
        let number = frame / self.chunk.len() as u64;
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63) as usize
    }

    /// The frame at UMEM address `frame` is about to be posted.
    pub(crate) fn prepare(&mut self, frame: u64, umem: &Umem) {
        let pattern = Pattern::PAIR[self.pattern_of(frame)];
        pattern.fill(&mut self.chunk);
        umem.copy_to(frame, &self.chunk);
    }

    /// `peer` is about to be asked for a packet. The obstacle, when so many were asked for that some must have shown something.
    pub(crate) fn ask(&mut self, peer: PeerId) -> Result<(), Obstacle> {
        self.peer = Some(peer);
        self.asked += 1;
        match self.asked > self.suspicions_max.saturating_add(ASKED_MAX) {
            true => Err(Obstacle::Unseen {
                interface: self.interface.clone(),
            }),
            false => Ok(()),
        }
    }

    /// A packet of `len` bytes, as the driver says, came into the frame at `frame` and begins at `start`. What is no IPv4 packet of that
    /// length, or so short that Ethernet may have filled it up, tells nothing: so neither what its sender put behind it nor what the
    /// driver counts as a part of it is taken for something else. The result, the length of the driver's prefix in bytes, is there when
    /// both patterns have shown it.
    pub(crate) fn look(
        &mut self,
        frame: u64,
        (start, len): (u64, u32),
        umem: &Umem,
    ) -> Option<Result<u8, Obstacle>> {
        umem.copy_from(frame, &mut self.chunk);
        let begin = (start - frame) as usize;
        let len = len as usize;
        if ip_frame_len(self.chunk.get(begin..begin + LENGTH_KNOWN)?)? != len {
            return None;
        }
        let which = self.pattern_of(frame);
        let found = match examine(Pattern::PAIR[which], &self.chunk, begin..begin + len) {
            Ok(found) => found,
            Err(ProbeError::Outside | ProbeError::TooShort { .. } | ProbeError::NotWritten) => return None,
        };
        self.footprint = self.footprint.merge(found);
        if found.trailer != Trailer::Nothing {
            self.suspicions += 1;
        } else if !len.is_multiple_of(4) {
            // Whoever pads does so to a multiple of 4 at least, and packets begin at one.
            self.clean[which] = true;
            self.suspicions = 0;
        }
        let is_clean = self.clean == [true; 2];
        if !is_clean && self.suspicions >= self.suspicions_max {
            return self.footprint.obstacle(&self.interface).map(Err);
        }
        if self.footprint.prefix_len > usize::from(PREFIX_LEN_MAX) {
            return Some(Err(Obstacle::LongPrefix {
                interface: self.interface.clone(),
                len: self.footprint.prefix_len,
            }));
        }
        is_clean.then_some(Ok(self.footprint.prefix_len as u8))
    }
}

/// Length of the frame that an IPv4 packet fills, by its first bytes, in bytes.
fn ip_frame_len(header: &[u8]) -> Option<usize> {
    let (link_len, kind) = match header[12..14] {
        [0x81, 0] => (18, &header[16..18]),
        _ => (14, &header[12..14]),
    };
    let total = usize::from(u16::from_be_bytes([header[link_len + 2], header[link_len + 3]]));
    (kind == [8, 0]).then_some(link_len + total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HugePages;

    const CHUNK: u64 = 2048;

    /// Packets of `len` bytes come, and `driver` writes beside the n-th, from its start to its end. What
    /// the probe says in the end, and after how many packets.
    fn probe(len: u32, driver: impl Fn(&Umem, u64, u64, u64)) -> Option<(u64, Result<u8, Obstacle>)> {
        let umem = Umem::new(100 * CHUNK, HugePages::Off).expect("memory");
        let mut probe = Probe::new("eth0", CHUNK as u32, 64);
        (1..100).find_map(|n| {
            // Every second frame is another packet's.
            let frame = 2 * (n % 50) * CHUNK;
            probe.prepare(frame, &umem);
            let start = frame + 256;
            let mut packet = vec![7; len as usize];
            packet[12..14].copy_from_slice(&[8, 0]);
            packet[16..18].copy_from_slice(&(len as u16 - 14).to_be_bytes());
            umem.copy_to(start, &packet);
            driver(&umem, n, start, start + u64::from(len));
            Some((n, probe.look(frame, (start, len), &umem)?))
        })
    }

    #[test]
    fn a_few_packets_tell_what_a_driver_writes() {
        assert_eq!(probe(90, |_, _, _, _| {}), Some((3, Ok(0))));
        let virtio = probe(90, |umem, _, start, _| umem.zero(start - 12, 12));
        assert_eq!(virtio, Some((3, Ok(12))));
        let long = probe(90, |umem, _, start, _| umem.zero(start - 100, 100));
        assert!(matches!(
            long,
            Some((1, Err(Obstacle::LongPrefix { len: 100, .. })))
        ));
    }

    #[test]
    fn what_stays_behind_every_packet_is_padding() {
        let padded = probe(90, |umem, _, _, end| umem.zero(end, 38));
        let padding = Obstacle::Padding {
            interface: "eth0".into(),
            len: 38,
        };
        assert_eq!(padded, Some((64, Err(padding))));
        // What earlier packets left in frames is not there for ever.
        let dirty = probe(90, |umem, n, _, end| {
            if n < 61 {
                umem.zero(end, 24);
            }
        });
        assert!(matches!(dirty, Some((61.., Ok(0)))), "{dirty:?}");
    }

    #[test]
    fn packets_that_tell_nothing_are_passed_over() {
        assert_eq!(probe(59, |_, _, _, _| {}), None, "Ethernet fills it up");
        let foreign = probe(90, |umem, _, start, _| umem.copy_to(start + 12, &[8, 6]));
        assert_eq!(foreign, None, "ARP");
        let longer = probe(90, |umem, _, start, end| {
            umem.copy_to(start + 16, &60u16.to_be_bytes());
            umem.zero(end, 38);
        });
        assert_eq!(longer, None, "its sender put something behind it");
        assert_eq!(probe(92, |_, _, _, _| {}), None, "no padding would be seen");
    }

    #[test]
    fn nobody_is_asked_for_ever() {
        const PEER: PeerId = PeerId {
            index: 0,
            generation: 0,
        };
        let mut probe = Probe::new("eth0", CHUNK as u32, 64);
        let asked = (0..).take_while(|_| probe.ask(PEER).is_ok()).count();
        assert_eq!(asked, 564);
        assert!(matches!(probe.ask(PEER), Err(Obstacle::Unseen { .. })));
    }
}
