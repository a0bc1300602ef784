//! A stream of messages into landing zones through the real gate, with two ways to place payload: LM's *overlay*, where each
//! packet lies with its headers over the payload before it, and *strip*, where the gate takes the headers off and the kernel
//! copies payload alone (copy mode only; the fill address is `R + k·P − 256`).
//!
//! Both receivers do the same for each packet but for what the placement demands: overlay saves and restores the tails of
//! windows (invariant I5) and looks at the header that survives in each window's lowest slot (I3). Where headers are stripped,
//! there is none: the log alone says which packet came, and only a manifest could check that against the payload. No
//! acknowledgement, no repair: a packet that is not the next expected one ends the program, so a figure is never that of
//! a stream with something missing or in the wrong place. `--verify` on both sides also compares every byte, and guard bytes around
//! each zone.

mod receive;
mod send;

use std::io;

use clap::{Args, ValueEnum};
use lm_protocol::window::WindowShape;
use serde::Serialize;

use super::PortArgs;
use crate::size::ByteSize;

pub use receive::{LandArgs, LandReport, land};
pub use send::{LandSendArgs, land_send};

/// Bytes before the payload: Ethernet 14, IPv4 20, UDP 8, LM 24.
const HEADER_LEN: u16 = 66;
/// Payload of every fragment but the last, at MTU 1500.
const PAYLOAD_LEN: u16 = 1448;
/// The kernel leaves nothing shorter than an Ethernet header when the gate strips headers.
const LEAST_STRIPPED_LEN: u16 = 14;
/// There is no admission here: both sides know the session's key, and the first message's number.
const KEY: u64 = 0x6c61_6e64_2d7a_6f6e;
const FIRST_MESSAGE: u32 = 1;

/// Where payload goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Packets overlap, in reverse order: each one's payload overwrites the headers of the one before it.
    Overlay,
    /// The gate strips the headers; packets do not overlap.
    Strip,
}

/// What both sides must be told alike.
#[derive(Debug, Clone, Args)]
pub struct StreamArgs {
    /// Switches of the port; --pace is needed, and --posted says how many frames are posted ahead
    #[command(flatten)]
    pub port: PortArgs,
    /// Bytes of each message
    #[arg(long, default_value = "64K")]
    pub message_size: ByteSize,
    /// Fragments of a window, a power of two; with 1 the fragments travel in forward order, which only stripping can take
    #[arg(long, default_value_t = WindowShape::DEFAULT.fragments())]
    pub window: u32,
    /// Fill messages with bytes that depend on message and place, and compare all of them
    #[arg(long)]
    pub verify: bool,
}

impl StreamArgs {
    fn shape(&self) -> io::Result<Shape> {
        let most = 1 << 30;
        let message_len = self.message_size.bytes();
        if message_len == 0 || message_len > most {
            return Err(io::Error::other("--message-size must be 1 byte to 1G"));
        }
        Ok(Shape {
            message_len,
            count: message_len.div_ceil(u64::from(PAYLOAD_LEN)) as u32,
            windows: WindowShape::new(self.window).map_err(io::Error::other)?,
        })
    }

    fn pace(&self) -> io::Result<super::pace::Pace> {
        let path = self.port.pace.as_deref();
        super::pace::Pace::open(path.ok_or_else(|| io::Error::other("landing streams need --pace FILE"))?)
    }
}

/// How messages are cut and in which order they travel.
#[derive(Debug, Clone, Copy)]
struct Shape {
    message_len: u64,
    /// Fragments of a message.
    count: u32,
    windows: WindowShape,
}

impl Shape {
    fn payload_len(&self, index: u32) -> u16 {
        if index + 1 < self.count {
            return PAYLOAD_LEN;
        }
        (self.message_len - u64::from(index) * u64::from(PAYLOAD_LEN)) as u16
    }
}

/// A place in the stream: the next fragment to send, to post or to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cursor {
    message: u32,
    /// In transmit order.
    position: u32,
}

impl Cursor {
    const START: Cursor = Cursor {
        message: FIRST_MESSAGE,
        position: 0,
    };

    fn index(self, shape: &Shape) -> u32 {
        shape.windows.index_at(self.position, shape.count)
    }

    fn advance(&mut self, shape: &Shape) {
        self.position += 1;
        if self.position == shape.count {
            self.message = self.message.wrapping_add(1);
            self.position = 0;
        }
    }
}

/// Writes the payload that `--verify` expects: no two fragments of neighbouring messages are alike.
fn write_content(message: u32, index: u32, payload: &mut [u8]) {
    let mut state = u64::from(message) << 32 | u64::from(index);
    for bytes in payload.chunks_mut(8) {
        // A linear congruential generator (Knuth's MMIX); its low bits are weak, so the high half is folded in.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.copy_from_slice(&(state ^ state >> 33).to_le_bytes()[..bytes.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(message_len: u64, window: u32) -> Shape {
        Shape {
            message_len,
            count: message_len.div_ceil(1448) as u32,
            windows: WindowShape::new(window).unwrap(),
        }
    }

    #[test]
    fn fragments_make_up_the_message() {
        for (len, count) in [(1, 1), (1448, 1), (1449, 2), (7168, 5), (1 << 20, 725)] {
            let shape = shape(len, 256);
            let sum: u64 = (0..shape.count)
                .map(|index| u64::from(shape.payload_len(index)))
                .sum();
            assert_eq!((shape.count, sum), (count, len));
        }
    }

    #[test]
    fn cursors_follow_the_transmit_order() {
        for (window, expected) in [(4, [3, 2, 1, 0, 4, 3, 2]), (1, [0, 1, 2, 3, 4, 0, 1])] {
            let shape = shape(7168, window);
            let mut cursor = Cursor::START;
            let mut order = Vec::new();
            for _ in 0..expected.len() {
                order.push(cursor.index(&shape));
                cursor.advance(&shape);
            }
            assert_eq!(order, expected);
            assert_eq!((cursor.message, cursor.position), (FIRST_MESSAGE + 1, 2));
        }
    }

    #[test]
    fn content_tells_fragments_and_messages_apart() {
        let content = |message, index| {
            let mut bytes = [0; 13];
            write_content(message, index, &mut bytes);
            bytes
        };
        assert_eq!(content(1, 0), content(1, 0));
        for (message, index) in [(1, 1), (2, 0), (0, 0)] {
            assert_ne!(content(1, 0), content(message, index));
        }
    }
}
