//! What a session's sender agreed to.

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Geometry, Layout};
use lm_protocol::integrity::Integrity;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::window::WindowShape;
use lm_protocol::zone::{ZoneShape, frames_of};

use crate::completion::PeerId;
use crate::memory::PACKET_HEADROOM;
use crate::port::Caps;

/// What the session's sender agreed to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboundTerms {
    pub(crate) peer: PeerId,
    pub(crate) key: u64,
    pub(crate) layout: Layout,
    pub(crate) window: WindowShape,
    pub(crate) chunk_len: u32,
    pub(crate) caps: Caps,
    pub(crate) first_message: u32,
    pub(crate) limits: Limits,
    pub(crate) delivery: Delivery,
    /// Whether the sender sends digests.
    pub(crate) integrity: Integrity,
    /// Whether it tells those of windows, for which a receiver asks whose application reads.
    pub(crate) tells_windows: bool,
    /// Whether it sends short messages unannounced where it has credit.
    pub(crate) goes_ahead: bool,
    /// Packets without a payload that it sends behind each of these ([`InboundTerms::reach`]).
    pub(crate) fillers: u32,
    /// What the gate was told, to tell it again when the channel is built anew.
    pub(crate) admission: SessionAdmission,
}

/// How much of what a session may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) messages_in_flight: u32,
    pub(crate) max_message_len: u64,
    /// Packets that the sender may have on the way, at most.
    pub(crate) on_the_way: u32,
    /// And no more than fill the path.
    pub(crate) adapts: bool,
    /// Fill entries that may be posted at once.
    pub(crate) posted_max: u32,
    /// Landing memory that messages of its address may take, in bytes.
    pub(crate) memory_max: u64,
}

impl Limits {
    /// Packets that the sender of a session that lands may have on the way.
    pub(super) fn packets_landing(&self) -> u32 {
        self.on_the_way.clamp(1, self.posted_max.max(1))
    }
}

/// How many slots beyond a packet's own a device may write that writes to a chunk's end.
pub(crate) fn reach(chunk_len: u32, layout: &Layout) -> u32 {
    (chunk_len - PACKET_HEADROOM as u32) / u32::from(layout.first_payload_len())
}

impl InboundTerms {
    /// Frames that the packet of fragment `index` takes.
    #[inline]
    pub(super) fn frames_of(&self, geometry: &Geometry, index: u32) -> u32 {
        match self.caps.capacity {
            0 => 1,
            capacity => frames_of(geometry.fragment(index).frame_len(), capacity),
        }
    }

    /// How many of the entries behind one, in its window, let somebody write where its payload lies. A device may write to a chunk's end;
    /// the kernel writes a packet that the gate admitted, which ends where the payload begins.
    #[inline]
    pub(super) fn reach(&self) -> u32 {
        match self.caps.witness {
            true => 0,
            false => reach(self.chunk_len, &self.layout),
        }
    }

    /// Bytes of memory that a message takes, and where its payload begins in them.
    pub(super) fn zone_of(&self, geometry: &Geometry) -> (u64, u64) {
        let shape = ZoneShape::new(geometry, self.chunk_len, self.caps.prefix_len);
        (shape.total_len(), shape.message_start())
    }

    /// Bytes of memory that its longest message takes.
    pub(crate) fn zone_len_max(&self) -> u64 {
        let longest = self.layout.session_message(self.limits.max_message_len);
        longest.map_or(0, |geometry| self.zone_of(&geometry).0)
    }

    /// By how many bytes a message's first fragment has a longer header than others: 8 with IP fragments, else 0.
    pub(super) fn skew(&self) -> u32 {
        u32::from(self.layout.payload_len() - self.layout.first_payload_len())
    }

    /// What is not right is given up, and nobody asks what it was. In zero-copy mode, where one lost packet shifts all others, that
    /// would be the end of every message behind it.
    pub(super) fn gives_up_unasked(&self) -> bool {
        self.delivery == Delivery::Unreliable && self.caps.witness
    }

    /// The session's row on its channel: six bits of its key say it.
    pub(super) fn row(&self) -> u8 {
        self.admission.row() as u8
    }
}
