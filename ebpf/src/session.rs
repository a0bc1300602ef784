//! What a session may do to a landing queue, and what each queue is for.

use std::net::Ipv4Addr;

use crate::layout::SESSIONS;

/// What a receive queue is for (`enum lm_role`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum Role {
    /// Not ours: every packet passes.
    #[default]
    None,
    /// Small LM packets are redirected to the queue's XSK.
    General,
    /// Fragments of its open sessions are redirected to the queue's XSK and logged.
    Landing,
    /// Everything is redirected to the queue's XSK, unread and without a log: the device has written the packets before the gate
    /// runs, perhaps over each other's headers (zero-copy mode). The queue must carry nothing but its session.
    LandingZeroCopy,
    /// As [`Role::General`], but no more packets are redirected than [`Log::set_posted`](crate::Log::set_posted) allows: the others
    /// pass, and the driver uses their frames again. Some drivers must never lack frames (zero-copy mode).
    GeneralZeroCopy,
}

impl Role {
    /// Whether sessions land on such a queue.
    pub const fn lands(self) -> bool {
        matches!(self, Role::Landing | Role::LandingZeroCopy)
    }
}

/// How a message travels (`enum lm_wire`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Wire {
    /// UDP datagrams with an LM header.
    #[default]
    Lm,
    /// IPv4 fragments of one UDP datagram.
    IpFrag,
}

/// A session that a landing queue admits. All numbers in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionAdmission {
    /// Session key as in the LM header; unused by [`Wire::IpFrag`]. Four of its bits are the session's place.
    pub key: u64,
    /// Wire mode.
    pub wire: Wire,
    /// The sender's address.
    pub peer_ip: Ipv4Addr,
    /// The sender's data port.
    pub peer_port: u16,
    /// The address that it sends to.
    pub local_ip: Ipv4Addr,
    /// Bytes before the payload: `lm` 66, `ipfrag` 42 (the first fragment's), 4 more with a VLAN tag.
    pub header_len: u16,
    /// Payload bytes of every fragment but the last; `ipfrag`: IP payload bytes, a multiple of 8.
    pub payload_len: u16,
    /// Fragments in a window: a power of two.
    pub window_fragments: u32,
    /// Number of the session's first message.
    pub first_message: u32,
    /// Nothing lands from then on: CLOCK_MONOTONIC, in nanoseconds; 0: there is no end. In zero-copy mode the gate does not look.
    pub active_until_ns: u64,
}

impl SessionAdmission {
    /// Sessions that a landing queue has place for.
    pub const PLACES: u32 = SESSIONS;

    /// The place that a key says.
    pub const fn place_of(key: u64) -> u32 {
        (key >> 1) as u32 % SESSIONS
    }

    /// A key that says this place, otherwise the given one.
    pub const fn key_at(key: u64, place: u32) -> u64 {
        let mask = (SESSIONS as u64 - 1) << 1;
        key & !mask | (place as u64) << 1 & mask
    }

    /// Which of the queue's sessions it is: the four bits of the key above the lowest, so that the gate finds it by
    /// what is in the packet.
    /// IP fragments carry no key, so theirs is 0.
    pub fn place(&self) -> u32 {
        match self.wire {
            Wire::Lm => SessionAdmission::place_of(self.key),
            Wire::IpFrag => 0,
        }
    }

    /// What is wrong with it, if anything.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        if !self.window_fragments.is_power_of_two() {
            return Some("fragments in a window must be a power of two");
        }
        if self.payload_len == 0 {
            return Some("payload length must not be 0");
        }
        if self.wire == Wire::IpFrag && !self.payload_len.is_multiple_of(8) {
            return Some("ipfrag: the fragment length must be a multiple of 8");
        }
        let (untagged, tagged) = match self.wire {
            Wire::Lm => (66, 70),
            Wire::IpFrag => (42, 46),
        };
        if self.header_len != untagged && self.header_len != tagged {
            return Some("header length is not the wire's, with or without one VLAN tag");
        }
        None
    }

    pub(crate) fn window_shift(&self) -> u8 {
        self.window_fragments.trailing_zeros() as u8
    }

    /// A place just before the first legal fragment: the message before the first, at the end of its last window, after which
    /// nothing of that message can come.
    pub(crate) fn place_before_first(&self) -> (u32, u32) {
        (
            self.first_message.wrapping_sub(1),
            u32::MAX << self.window_shift(),
        )
    }
}
