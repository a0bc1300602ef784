//! Bounds of an endpoint that nobody chooses: how long its rings are, how many frames and messages it has room for.

use lm_protocol::geometry::{Layout, Wire};
use lm_protocol::manifest::DIGEST_LEN;
use lm_protocol::wire::lm::HEADER_LEN;

/// General receive frames: posted frames plus messages that the application holds. At 2 KiB each, 8 MiB.
pub(crate) const GENERAL_FRAMES: u32 = 4096;
/// Small transmit frames: unacknowledged eager messages plus control packets in flight. At 2 KiB each, 4 MiB.
pub(crate) const TRANSMIT_FRAMES: u32 = 2048;
/// TX and completion ring of every channel; at least the packets that may be in flight.
pub(crate) const TRANSMIT_RING_LEN: u32 = 2048;
/// Fill and RX ring of a landing channel, in descriptors: 2^15 fragments of 1448 bytes are 45 MiB.
pub(crate) const LANDING_RING_LEN: u32 = 1 << 15;
/// Longest prefix of a driver that messages can land with, in bytes (`virtio-net` has 12).
pub(crate) const PREFIX_LEN_MAX: u8 = 64;
/// Peers that an endpoint knows at once; a silent one makes room for a new one.
pub(crate) const PEERS_MAX: usize = 1024;
/// Those of one address.
pub(crate) const PEERS_OF_ADDRESS_MAX: usize = PEERS_MAX / 2;
/// Messages of many fragments that wait, travel or are unconfirmed, per endpoint.
pub(crate) const OUTGOING_MAX: usize = 1024;
/// Landing zones that exist at once: announced messages, and delivered ones that the application holds.
pub(crate) const ZONES_MAX: usize = 4096;
/// Messages that one sender may have announced and not yet seen settled.
pub(crate) const IN_FLIGHT_MESSAGES_MAX: u32 = 256;
/// Most payload bytes of a packet of a session that is no fragment: the rest is its digest.
pub(crate) fn general_payload_len(layout: &Layout) -> usize {
    let header_len = match layout.wire() {
        Wire::Lm => usize::from(layout.header_len()),
        Wire::IpFrag => usize::from(layout.header_len()) + HEADER_LEN,
    };
    usize::from(layout.max_frame_len()).saturating_sub(header_len + DIGEST_LEN)
}

/// Statuses that a CREDIT can always name beside the messages.
const STATUSES_MIN: u32 = 8;

/// Messages of a session that are under way at once, of so many that its sender asked for: one CREDIT can name them all.
pub(crate) fn messages_in_flight(asked: u32, layout: &Layout) -> u32 {
    let words = (general_payload_len(layout) / size_of::<u32>()) as u32;
    asked.clamp(1, IN_FLIGHT_MESSAGES_MAX.min(words - STATUSES_MIN))
}

/// Packets taken from an RX ring in one round, so that no stage starves the others.
pub(crate) const RECEIVE_BURST: u32 = 256;
/// Fragments taken beside flows before something else is looked at: as many as a burst that leaves.
pub(crate) const RECEIVE_STEP: u32 = TRANSMIT_BURST;
/// Packets that one wake-up of a channel hands over (design: larger batches brought nothing; the kernel's
/// copy mode stops after 32, `TX_BATCH_SIZE` in net/xdp/xsk.c).
pub(crate) const TRANSMIT_BURST: u32 = 32;
/// Landing memory that several messages in flight may take together; a single larger message takes what it
/// needs.
pub(crate) const LANDING_LEN_SHARED: u64 = 48 << 20;
/// Where datagrams of the kernel's socket are received that are longer than a frame: one of the longest, in whole pages.
pub(crate) const DATAGRAM_LEN_MAX: u64 = 1 << 16;
/// General frames that are never posted: datagrams of the kernel's socket are received into them, and come however
/// many peers the general channel posts for.
pub(crate) const GENERAL_FRAMES_FOR_SOCKET: u32 = 64;
/// Missing ranges in one packet.
pub(crate) const RANGES_MAX: usize = 64;

/// Packets on a TX ring and not completed, where completions say nothing of the path. They are looked at only when half of these are
/// out: the kernel writes that cache line for every packet.
pub(crate) const TX_IN_FLIGHT_MAX: u32 = 1024;

/// Descriptors that are on a TX ring and not completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    /// At most.
    pub(crate) most: u32,
    /// Of bulk no more than keep the device busy.
    pub(crate) adapts: bool,
}

/// Packets that a sender may have on the way to us.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnTheWay {
    /// What the path holds.
    pub(crate) held: u32,
    /// With what is kept at a sender that waits for the path itself.
    pub(crate) most: u32,
}

impl OnTheWay {
    /// Where it does not matter what a sender keeps.
    pub(crate) const fn by_anybody(packets: u32) -> OnTheWay {
        OnTheWay {
            held: packets,
            most: packets,
        }
    }

    /// From a sender that keeps so many packets uncompleted at most; 0: it does not count them
    /// ([`Request::uncompleted_max`](lm_protocol::control::Request::uncompleted_max)).
    pub(crate) const fn of(&self, uncompleted_max: u32) -> u32 {
        match uncompleted_max != 0 && uncompleted_max <= self.held {
            true => self.most,
            false => self.held,
        }
    }
}

/// Packets that a sender may have on the way by the one-copy path: the socket's buffer has room for those of several.
pub(crate) const ONE_COPY_ON_THE_WAY: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_waits_for_the_path_has_more_on_the_way() {
        let kept = [0, 1, 192, 193, u32::MAX];
        let veth = OnTheWay { held: 192, most: 768 };
        assert_eq!(kept.map(|kept| veth.of(kept)), [192, 768, 768, 192, 192]);
        assert_eq!(kept.map(|kept| OnTheWay::by_anybody(20).of(kept)), [20; 5]);
    }
}
