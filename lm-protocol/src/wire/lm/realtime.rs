//! What REALTIME and RT_REPORT packets say: messages that are never repeated, and what their receiver has of a flow.

use core::time::Duration;

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::LmError;
use crate::time::Time;

/// Whose clock says when a message was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Clock {
    /// The monotonic clock of one host: comparable there alone.
    #[default]
    Host = 0,
    /// The time of day, kept equal among hosts.
    RealTime = 1,
    /// International atomic time, kept equal among hosts (PTP).
    Tai = 2,
}

impl Clock {
    fn read(byte: u8) -> Result<Clock, LmError> {
        match byte {
            0 => Ok(Clock::Host),
            1 => Ok(Clock::RealTime),
            2 => Ok(Clock::Tai),
            _ => Err(LmError::Length),
        }
    }
}

/// Behind the payload of a REALTIME packet.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Tail {
    sent_at: U64,
    message_len: U32,
    offset: U32,
    port: U16,
    priority: u8,
    clock: u8,
    zero: U32,
}

/// A REALTIME packet: a fragment of a message, or all of it.
///
/// ```text
///  0       1       2       4         12         16      18      20                24       24 + n
/// +-------+-------+-------+---------+----------+-------+-------+-----------------+---------+--------------- - -
/// |ver|  8|   2   |pay.len|  flow   | message  | index | count | deadline in µs  | payload | what is behind
/// +-------+-------+-------+---------+----------+-------+-------+-----------------+---------+--------------- - -
///      0         8             12       16     18         19      20      24          32
/// - - +---------+-------------+--------+------+----------+-------+-------+-----------+
///     | sent_at | message_len | offset | port | priority | clock |   0   | digest u64|
/// - - +---------+-------------+--------+------+----------+-------+-------+-----------+
/// ```
///
/// `flow`: 48 bits of the cookie by which its sender proved its address to the receiver, and 16 that name the flow.
/// `deadline` counts from `sent_at`; 0: there is none. Header and digest are [`LmHeader::Extension`](super::LmHeader::Extension)'s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RealTimePacket<'a> {
    /// Number of the message in its flow.
    pub message: u32,
    /// Which fragment this is, of how many.
    pub index: u16,
    /// At least one.
    pub count: u16,
    /// From [`sent_at`](Self::sent_at) on, in microseconds; `None`: it is never late.
    pub deadline: Option<Duration>,
    /// When the application sent it, by [`clock`](Self::clock).
    pub sent_at: Time,
    /// Length of the message in bytes.
    pub message_len: u32,
    /// Where in the message the payload belongs.
    pub offset: u32,
    /// The receiving socket.
    pub port: u16,
    /// 0 to 7, which is first.
    pub priority: u8,
    /// Whose clock that is.
    pub clock: Clock,
    /// Bytes of the message.
    pub payload: &'a [u8],
}

impl<'a> RealTimePacket<'a> {
    /// Bytes behind the payload, without the digest.
    pub const TAIL_LEN: usize = size_of::<Tail>();

    /// The header's words.
    pub fn words(&self) -> [u32; 3] {
        let deadline_us = self.deadline.map_or(0, |deadline| {
            u32::try_from(deadline.as_micros()).unwrap_or(u32::MAX).max(1)
        });
        let place = u32::from(self.index) << 16 | u32::from(self.count);
        [self.message, place, deadline_us]
    }

    /// What is behind the payload.
    pub fn tail(&self) -> [u8; RealTimePacket::TAIL_LEN] {
        zerocopy::transmute!(Tail {
            sent_at: self.sent_at.as_nanos().into(),
            message_len: self.message_len.into(),
            offset: self.offset.into(),
            port: self.port.into(),
            priority: self.priority,
            clock: self.clock as u8,
            zero: 0.into(),
        })
    }

    /// How many bytes of the message each fragment has; the last one has the rest, at least one. `None`: this one lies elsewhere, or is all of
    /// its message. Fragments with the same stride, count and length fill a message without gaps.
    pub fn stride(&self) -> Option<u32> {
        let last = u32::from(self.count).checked_sub(1).filter(|last| *last > 0)?;
        let (index, len) = (u32::from(self.index), self.payload.len() as u64);
        let stride = match index < last {
            true => len,
            false => u64::from(self.offset / last),
        };
        let before_last = u64::from(last) * stride;
        let message_len = u64::from(self.message_len);
        let has_place = u64::from(self.offset) == u64::from(index) * stride;
        let fits = (before_last + 1..=before_last + stride).contains(&message_len);
        let has_rest = index < last || before_last + len == message_len;
        (has_place && fits && has_rest).then_some(stride as u32) // at most the message's length
    }

    /// Reads the words of a header of [`TYPE_REALTIME`](super::TYPE_REALTIME), and what is between header and digest.
    ///
    /// # Errors
    ///
    /// [`LmError::Length`] where something is missing or no value of its field; [`LmError::Index`] where the fragment lies outside its
    /// message, or has no number of it.
    pub fn read(
        [message, place, deadline_us]: [u32; 3],
        bytes: &'a [u8],
    ) -> Result<RealTimePacket<'a>, LmError> {
        let (payload, tail) = Tail::read_from_suffix(bytes).map_err(|_| LmError::Length)?;
        let (index, count) = ((place >> 16) as u16, place as u16);
        let (offset, message_len) = (tail.offset.get(), tail.message_len.get());
        let end = u64::from(offset) + payload.len() as u64;
        if index >= count || end > u64::from(message_len) || (count == 1 && end != u64::from(message_len)) {
            return Err(LmError::Index);
        }
        if tail.priority > 7 {
            return Err(LmError::Length);
        }
        Ok(RealTimePacket {
            message,
            index,
            count,
            deadline: (deadline_us > 0).then(|| Duration::from_micros(deadline_us.into())),
            sent_at: Time::from_nanos(tail.sent_at.get()),
            message_len,
            offset,
            port: tail.port.get(),
            priority: tail.priority,
            clock: Clock::read(tail.clock)?,
            payload,
        })
    }
}

/// An RT_REPORT packet: what the receiver of a flow has seen of it. Sums run from the flow's first message on and wrap.
///
/// ```text
///  0       1       2       4      12        16      20     24     28          32          36   38  40        48        56
/// +-------+-------+-------+------+---------+-------+------+------+-----------+-----------+----+---+---------+---------+--------+
/// |ver|  9|   2   |  32   | flow | newest  | whole | late | lost | delay     | interval  |port|ref| sent_at | held_ns | digest |
/// +-------+-------+-------+------+---------+-------+------+------+-----------+-----------+----+---+---------+---------+--------+
/// ```
///
/// `ref` is 0, or 1: refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RtReport {
    /// Number of the newest message.
    pub newest: u32,
    /// Messages that came whole, those that were late among them.
    pub whole: u32,
    /// Messages that came behind their deadline.
    pub late: u32,
    /// Messages that did not come.
    pub lost: u32,
    /// Queueing delay of the packet that waited least since the report before: above the least of the flow, in nanoseconds.
    pub delay: Duration,
    /// Time since the report before, in microseconds.
    pub interval: Duration,
    /// The receiving socket.
    pub port: u16,
    /// There is no such socket: of the rest only `newest` says something.
    pub refused: bool,
    /// When the newest message was sent, as its sender said.
    pub sent_at: Time,
    /// How long ago it came, in nanoseconds.
    pub held: Duration,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ReportBytes {
    lost: U32,
    delay_ns: U32,
    interval_us: U32,
    port: U16,
    refused: U16,
    sent_at: U64,
    held_ns: U64,
}

impl RtReport {
    /// Bytes between header and digest.
    pub const LEN: usize = size_of::<ReportBytes>();

    /// Of a packet that there is no socket for.
    pub fn refusal(packet: &RealTimePacket<'_>) -> RtReport {
        RtReport {
            newest: packet.message,
            port: packet.port,
            refused: true,
            sent_at: packet.sent_at,
            ..RtReport::default()
        }
    }

    /// The header's words, and what is between header and digest.
    pub fn write(&self) -> ([u32; 3], [u8; Self::LEN]) {
        let capped = |value: u128| u32::try_from(value).unwrap_or(u32::MAX);
        let bytes = ReportBytes {
            lost: self.lost.into(),
            delay_ns: capped(self.delay.as_nanos()).into(),
            interval_us: capped(self.interval.as_micros()).into(),
            port: self.port.into(),
            refused: u16::from(self.refused).into(),
            sent_at: self.sent_at.as_nanos().into(),
            held_ns: (self.held.as_nanos() as u64).into(),
        };
        ([self.newest, self.whole, self.late], zerocopy::transmute!(bytes))
    }

    /// Reads the words of a header of [`TYPE_RT_REPORT`](super::TYPE_RT_REPORT), and what is between header and digest.
    ///
    /// # Errors
    ///
    /// [`LmError::Length`].
    pub fn read([newest, whole, late]: [u32; 3], bytes: &[u8]) -> Result<RtReport, LmError> {
        let bytes = ReportBytes::read_from_bytes(bytes).map_err(|_| LmError::Length)?;
        Ok(RtReport {
            newest,
            whole,
            late,
            lost: bytes.lost.get(),
            delay: Duration::from_nanos(bytes.delay_ns.get().into()),
            interval: Duration::from_micros(bytes.interval_us.get().into()),
            port: bytes.port.get(),
            refused: bytes.refused.get() & 1 != 0,
            sent_at: Time::from_nanos(bytes.sent_at.get()),
            held: Duration::from_nanos(bytes.held_ns.get()),
        })
    }
}
