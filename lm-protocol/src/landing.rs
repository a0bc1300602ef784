//! What lets a session land, and what is known of each packet that did.
//!
//! A receiver tells whatever looks at packets before they reach its memory (a BPF program, a model of it) which fragments may come
//! ([`SessionAdmission`]), and learns from it which ones came, in the order in which they were accepted ([`LogEntry`]).

use core::net::Ipv4Addr;

use crate::geometry::Wire;

/// Places of a landing queue: sessions that land there at once.
pub const PLACES: u32 = 16;

/// Rows of a landing queue: sessions that it knows, whether they land or not. A session keeps its row, and its key says it.
pub const ROWS: u32 = 64;

/// A session that a landing queue admits. All numbers in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionAdmission {
    /// Session key as in the LM header; unused by [`Wire::IpFrag`]. Six of its bits are the session's row.
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
    /// The row that a key says.
    pub const fn row_of(key: u64) -> u32 {
        (key >> 1) as u32 % ROWS
    }

    /// A key that says this row, otherwise the given one.
    pub const fn key_at(key: u64, row: u32) -> u64 {
        let mask = (ROWS as u64 - 1) << 1;
        key & !mask | (row as u64) << 1 & mask
    }

    /// Which of the queue's sessions it is: the six bits of the key above the lowest, so that it is found by what is in the packet.
    /// IP fragments carry no key, so theirs is 0.
    pub fn row(&self) -> u32 {
        match self.wire {
            Wire::Lm => SessionAdmission::row_of(self.key),
            Wire::IpFrag => 0,
        }
    }

    /// What is wrong with it, if anything.
    pub fn fault(&self) -> Option<&'static str> {
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

    /// Binary logarithm of the fragments in a window.
    pub const fn window_shift(&self) -> u8 {
        self.window_fragments.trailing_zeros() as u8
    }

    /// A place just before the first legal fragment: the message before the first, at the end of its last window, after which
    /// nothing of that message can come.
    pub const fn place_before_first(&self) -> (u32, u32) {
        (
            self.first_message.wrapping_sub(1),
            u32::MAX << self.window_shift(),
        )
    }
}

/// One accepted packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Position, low 16 bits. Differs from the position asked for when two CPUs accepted packets at once (I3a), or when no packet was
    /// accepted there.
    pub sequence: u16,
    /// The row of its session ([`SessionAdmission::row`]).
    pub session: u8,
    /// Message number; `ipfrag`: completed from the 16 bits on the wire.
    pub message: u32,
    /// Fragment index in the message.
    pub index: u32,
    /// Bytes of the frame from the Ethernet header on, padding included: must equal the RX descriptor's length.
    pub frame_len: u16,
    /// Bytes after the payload (Ethernet padding of a short frame).
    pub padding_len: u8,
    /// CPU that accepted it, low 8 bits.
    pub cpu: u8,
}
