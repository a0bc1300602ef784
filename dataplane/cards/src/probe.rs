//! What a zero-copy device writes beside packets, found out on the general channel before messages land where it writes: see
//! [`crate::footprint`].
//!
//! General frames do not overlap, so there it harms nobody. While the probe runs they are posted full of a pattern; whoever asks
//! for a session is made to send some packets there, and is granted one when they have shown what the driver does.

use crate::footprint::{Footprint, Pattern, ProbeError, Trailer, examine};
use crate::platform::Obstacle;

/// Ethernet header with a VLAN tag and the parts of an IPv4 one up to its total length, in bytes.
const LENGTH_KNOWN: usize = 22;
/// Packets asked for in vain, beyond those that fill the device's ring, before nothing is expected any more.
const ASKED_MAX: u32 = 500;

/// The probe of one device. `P` names a peer.
#[derive(Debug)]
pub struct Probe<P> {
    interface: String,
    footprint: Footprint,
    /// Which of the two patterns have shown a packet with nothing behind it, where padding would be seen.
    clean: [bool; 2],
    /// Packets in a row with bytes behind them. They may be an earlier packet's: a frame of one that the gate passed on is used
    /// again by the kernel, as it is, and there are as many of these as the device's ring has places.
    suspicions: u32,
    suspicions_max: u32,
    asked: u32,
    /// The longest prefix that there is room for, in bytes.
    prefix_len_max: u8,
    peer: Option<P>,
    chunk: Vec<u8>,
}

impl<P: Copy> Probe<P> {
    /// Of a device whose general frames are of `chunk_len` bytes and which keeps `kept_frames` of them, where there is room for a prefix of
    /// `prefix_len_max` bytes.
    pub fn new(interface: &str, chunk_len: u32, kept_frames: u32, prefix_len_max: u8) -> Probe<P> {
        Probe {
            interface: interface.to_owned(),
            footprint: Footprint::default(),
            clean: [false; 2],
            suspicions: 0,
            suspicions_max: kept_frames.max(16),
            asked: 0,
            prefix_len_max,
            peer: None,
            chunk: vec![0; chunk_len as usize],
        }
    }

    /// Frames have the patterns without order: what tells something may be every second packet.
    fn pattern_of(&self, frame: u64) -> usize {
        let number = frame / self.chunk.len() as u64;
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63) as usize
    }

    /// The frame at UMEM address `frame` is about to be posted: what has to be in it then.
    pub fn prepare(&mut self, frame: u64) -> &[u8] {
        let pattern = Pattern::PAIR[self.pattern_of(frame)];
        pattern.fill(&mut self.chunk);
        &self.chunk
    }

    /// The peer that was asked last.
    pub fn peer(&self) -> Option<P> {
        self.peer
    }

    /// `peer` is about to be asked for a packet.
    ///
    /// # Errors
    ///
    /// The obstacle, when so many were asked for that some must have shown something.
    pub fn ask(&mut self, peer: P) -> Result<(), Obstacle> {
        self.peer = Some(peer);
        self.asked += 1;
        match self.asked > self.suspicions_max.saturating_add(ASKED_MAX) {
            true => Err(Obstacle::Unseen {
                interface: self.interface.clone(),
            }),
            false => Ok(()),
        }
    }

    /// A packet of `len` bytes, as the driver says, came into the frame at `frame`, which `read` copies, and begins at `start`. What is no IPv4 packet of that
    /// length, or so short that Ethernet may have filled it up, tells nothing: so neither what its sender put behind it nor what the
    /// driver counts as a part of it is taken for something else. The result, the length of the driver's prefix in bytes, is there when
    /// both patterns have shown it.
    pub fn look(
        &mut self,
        frame: u64,
        (start, len): (u64, u32),
        read: impl FnOnce(&mut [u8]),
    ) -> Option<Result<u8, Obstacle>> {
        read(&mut self.chunk);
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
        if self.footprint.prefix_len > usize::from(self.prefix_len_max) {
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

    const CHUNK: usize = 2048;
    /// Where a packet begins in its frame.
    const START: usize = 256;
    const PREFIX_LEN_MAX: u8 = 64;

    /// Packets of `len` bytes come, and `driver` writes beside the n-th into its frame, where it lies from [`START`] to the
    /// end given. What the probe says in the end, and after how many packets.
    fn probe(len: usize, driver: impl Fn(&mut [u8], u64, usize)) -> Option<(u64, Result<u8, Obstacle>)> {
        let mut probe = Probe::<()>::new("eth0", CHUNK as u32, 64, PREFIX_LEN_MAX);
        (1..100).find_map(|n| {
            // Every second frame is another packet's.
            let frame = 2 * (n % 50) * CHUNK as u64;
            let mut memory = probe.prepare(frame).to_vec();
            let mut packet = vec![7; len];
            packet[12..14].copy_from_slice(&[8, 0]);
            packet[16..18].copy_from_slice(&(len as u16 - 14).to_be_bytes());
            memory[START..START + len].copy_from_slice(&packet);
            driver(&mut memory, n, START + len);
            let packet = (frame + START as u64, len as u32);
            let found = probe.look(frame, packet, |chunk| chunk.copy_from_slice(&memory));
            Some((n, found?))
        })
    }

    #[test]
    fn a_few_packets_tell_what_a_driver_writes() {
        assert_eq!(probe(90, |_, _, _| {}), Some((3, Ok(0))));
        let virtio = probe(90, |frame, _, _| frame[START - 12..START].fill(0));
        assert_eq!(virtio, Some((3, Ok(12))));
        let long = probe(90, |frame, _, _| frame[START - 100..START].fill(0));
        assert!(matches!(
            long,
            Some((1, Err(Obstacle::LongPrefix { len: 100, .. })))
        ));
    }

    #[test]
    fn what_stays_behind_every_packet_is_padding() {
        let padded = probe(90, |frame, _, end| frame[end..end + 38].fill(0));
        let padding = Obstacle::Padding {
            interface: "eth0".into(),
            len: 38,
        };
        assert_eq!(padded, Some((64, Err(padding))));
        // What earlier packets left in frames is not there for ever.
        let dirty = probe(90, |frame, n, end| {
            if n < 61 {
                frame[end..end + 24].fill(0);
            }
        });
        assert!(matches!(dirty, Some((61.., Ok(0)))), "{dirty:?}");
    }

    #[test]
    fn packets_that_tell_nothing_are_passed_over() {
        assert_eq!(probe(59, |_, _, _| {}), None, "Ethernet fills it up");
        let foreign = probe(90, |frame, _, _| frame[START + 13] = 6);
        assert_eq!(foreign, None, "ARP");
        let longer = probe(90, |frame, _, end| {
            frame[START + 16..START + 18].copy_from_slice(&60u16.to_be_bytes());
            frame[end..end + 38].fill(0);
        });
        assert_eq!(longer, None, "its sender put something behind it");
        assert_eq!(probe(92, |_, _, _| {}), None, "no padding would be seen");
    }

    #[test]
    fn nobody_is_asked_for_ever() {
        let mut probe = Probe::new("eth0", CHUNK as u32, 64, PREFIX_LEN_MAX);
        let asked = (0..).take_while(|_| probe.ask(0).is_ok()).count();
        assert_eq!(asked, 564);
        assert!(matches!(probe.ask(0), Err(Obstacle::Unseen { .. })));
    }
}
