//! Streaming: one message is produced, sent, received and consumed at the same time.
//!
//! E-UDP's fine-grained pipelining (§4.3), one level up: between the windows of a message ([`crate::window`]) instead of the
//! pieces of a packet. Its grain θ is a window's payload.
//!
//! ```text
//!  writer               sender                      receiver                         reader
//!  Writer ─ Watermark ─▶ Released ──── ANNOUNCE ───▶ Released: how much may come
//!                           └───── DATA, WINDOWS ──▶ Showing: what is final ─ Shown ─▶ valid ranges
//! ```
//!
//! [`Watermark`] and [`Shown`] are the words that two threads share; everything else belongs to one, has no clock and does no I/O.
//!
//! # What holds, whatever the network, the writer and the reader do
//!
//! * S1: the sender reads only what is released ([`Released::fragments`]).
//! * S2: the writer touches only what is not ([`Writer::writable`]).
//! * S3: what is shown has the right bytes, and no posted fill entry may write there, as long as the message is held (I1, I5).
//! * S4: what is shown only grows until the message is settled.
//! * S5: a message that is delivered is shown altogether.
//! * S6: its zone is free only without a reader and without posted entries ([`Quarantine`]).
//! * S7: a session with nothing released has no turn ([`packets_released`]).
//!
//! `lm-protocol/stateright` tries every order of a small world on this very code, and on mutants of it; `models/stream.pml` has the same
//! rules in Promela.

use alloc::boxed::Box;
use alloc::vec;
use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use core::time::Duration;

use crate::time::Time;
use crate::window::{TailRule, WindowShape};
use crate::wire::lm::AnnounceEntry;

/// How a message is cut into windows, in bytes.
///
/// ```
/// use lm_protocol::streaming::Grain;
/// use lm_protocol::window::WindowShape;
///
/// let grain = Grain::new(100_000, 1448, WindowShape::new(16)?).unwrap();
/// assert_eq!((grain.windows(), grain.bytes(1), grain.bytes(4)), (5, 23_168..46_336, 92_672..100_000));
/// # Ok::<(), lm_protocol::window::WindowError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grain {
    len: u64,
    /// Fragments.
    count: u32,
    payload_len: u16,
    shape: WindowShape,
}

impl Grain {
    /// A message of `len` bytes in fragments of `payload_len` bytes, all but the last. (LM's own wire: one IP datagram is not streamed.)
    ///
    /// `None` for an empty message, and for one whose windows an announcement cannot count.
    pub const fn new(len: u64, payload_len: u16, shape: WindowShape) -> Option<Grain> {
        if len == 0 || payload_len == 0 {
            return None;
        }
        let count = len.div_ceil(payload_len as u64);
        if count >= AnnounceEntry::ABORTED as u64 {
            return None;
        }
        Some(Grain {
            len,
            count: count as u32,
            payload_len,
            shape,
        })
    }

    /// Fragments of the message.
    pub const fn fragments(&self) -> u32 {
        self.count
    }

    /// Windows of the message.
    pub const fn windows(&self) -> u32 {
        self.shape.count_of_windows(self.count)
    }

    /// Bytes of a window; empty behind the last one.
    pub const fn bytes(&self, window: u32) -> Range<u64> {
        let Range { start, end } = self.shape.range(window, self.count);
        let (start, end) = (self.start_of(start), self.start_of(end));
        start..end
    }

    const fn start_of(&self, fragment: u32) -> u64 {
        let start = fragment as u64 * self.payload_len as u64;
        if start < self.len { start } else { self.len }
    }

    /// Windows that end at or before this byte.
    pub const fn windows_before(&self, byte: u64) -> u32 {
        match byte >= self.len {
            true => self.windows(),
            false => (byte / self.payload_len as u64) as u32 >> self.shape.shift(),
        }
    }

    /// Fragments of the first `windows` windows: in transmit order the positions below this number.
    pub const fn fragments_of(&self, windows: u32) -> u32 {
        self.shape.range(windows, self.count).start
    }
}

/// How much of a message may be sent: what a writer tells its sender, and an announcement the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Release {
    /// So many windows, fewer than the message has.
    Windows(u32),
    /// What was released before, and nothing more will be: the writer gave up.
    Aborted,
    /// All of it.
    Whole,
}

impl Release {
    /// As [`AnnounceEntry::windows_released`] has it.
    pub const fn to_u32(self) -> u32 {
        match self {
            Release::Windows(windows) => windows,
            Release::Aborted => AnnounceEntry::ABORTED,
            Release::Whole => AnnounceEntry::ALL_WINDOWS,
        }
    }

    /// From [`AnnounceEntry::windows_released`].
    pub const fn from_u32(released: u32) -> Release {
        match released {
            AnnounceEntry::ALL_WINDOWS => Release::Whole,
            AnnounceEntry::ABORTED => Release::Aborted,
            windows => Release::Windows(windows),
        }
    }
}

/// What a writer's thread has released, for the thread that sends.
#[derive(Debug, Default)]
pub struct Watermark(AtomicU32);

impl Watermark {
    /// Nothing is released.
    pub const fn new() -> Watermark {
        Watermark(AtomicU32::new(0))
    }

    /// Tells the sender. The store releases the bytes of all windows that are released: it pairs with the load of [`Watermark::seen`].
    pub fn publish(&self, release: Release) {
        self.0.store(release.to_u32(), Ordering::Release);
    }

    /// What the writer told last. The load acquires the bytes that [`Watermark::publish`] released.
    pub fn seen(&self) -> Release {
        Release::from_u32(self.0.load(Ordering::Acquire))
    }
}

/// Why a writer may not do what it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriterError {
    /// The message is finished or aborted.
    #[error("the message is finished or aborted: begin another one")]
    Ended,
    /// Bytes before this one are released, and may be on the way.
    #[error("bytes before {0} are released and may have left: go on behind them")]
    Released(u64),
    /// The message has so many bytes.
    #[error("the message was begun with {0} bytes and has no more")]
    Len(u64),
    /// So many bytes are written.
    #[error("{0} bytes are written so far: write the others first")]
    Written(u64),
}

/// A message that is going out, at its writer. What it returns is for [`Watermark::publish`].
///
/// ```
/// use lm_protocol::streaming::{Grain, Release, Writer, WriterError};
/// use lm_protocol::window::WindowShape;
///
/// let mut writer = Writer::new(Grain::new(10, 2, WindowShape::new(2)?).unwrap());
/// writer.wrote(0..7)?;
/// assert_eq!(writer.release(7)?, Release::Windows(1));
/// assert_eq!(writer.writable(), 4..10);
/// assert_eq!(writer.finish(), Err(WriterError::Written(7)));
/// writer.wrote(7..10)?;
/// assert_eq!(writer.finish()?, Release::Whole);
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Writer {
    grain: Grain,
    /// Bytes before this one are written.
    written: u64,
    /// Windows.
    released: u32,
    has_ended: bool,
}

impl Writer {
    /// Nothing is written.
    pub const fn new(grain: Grain) -> Writer {
        Writer {
            grain,
            written: 0,
            released: 0,
            has_ended: false,
        }
    }

    /// The bytes that may be written, any number of times: what is not released (S2). Empty when the message has ended.
    pub const fn writable(&self) -> Range<u64> {
        match self.has_ended {
            true => self.grain.len..self.grain.len,
            false => self.grain.bytes(self.released).start..self.grain.len,
        }
    }

    /// Bytes before this one are written.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// These bytes were written, or lent to be written: they count as written, and none is left out before them.
    ///
    /// # Errors
    ///
    /// [`WriterError::Ended`], [`WriterError::Released`] and [`WriterError::Len`]: they are not [writable](Writer::writable);
    /// [`WriterError::Written`]: others come first.
    pub fn wrote(&mut self, bytes: Range<u64>) -> Result<(), WriterError> {
        let writable = self.writable();
        if self.has_ended {
            return Err(WriterError::Ended);
        }
        if bytes.start < writable.start {
            return Err(WriterError::Released(writable.start));
        }
        if bytes.end > writable.end {
            return Err(WriterError::Len(self.grain.len));
        }
        if bytes.start > self.written {
            return Err(WriterError::Written(self.written));
        }
        self.written = self.written.max(bytes.end);
        Ok(())
    }

    /// Releases the windows that end at or before byte `up_to`, but for the last one, which [`Writer::finish`] releases.
    ///
    /// # Errors
    ///
    /// [`WriterError::Ended`], [`WriterError::Released`] where that takes a release back, and [`WriterError::Written`] where it is beyond
    /// what is written.
    pub fn release(&mut self, up_to: u64) -> Result<Release, WriterError> {
        if self.has_ended {
            return Err(WriterError::Ended);
        }
        if up_to > self.written {
            return Err(WriterError::Written(self.written));
        }
        let released_to = self.writable().start;
        if up_to < released_to {
            return Err(WriterError::Released(released_to));
        }
        self.released = self.grain.windows_before(up_to).min(self.grain.windows() - 1);
        Ok(Release::Windows(self.released))
    }

    /// Releases all of the message.
    ///
    /// # Errors
    ///
    /// [`WriterError::Ended`], and [`WriterError::Written`] where not all of it is written.
    pub fn finish(&mut self) -> Result<Release, WriterError> {
        if self.has_ended {
            return Err(WriterError::Ended);
        }
        if self.written < self.grain.len {
            return Err(WriterError::Written(self.written));
        }
        self.has_ended = true;
        Ok(Release::Whole)
    }

    /// Gives up: what a writer does that is dropped. `None` where the message has ended before.
    pub const fn abort(&mut self) -> Option<Release> {
        if self.has_ended {
            return None;
        }
        self.has_ended = true;
        Some(Release::Aborted)
    }
}

/// What a message's writer, or an announcement, said of how much is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// There is more.
    More,
    /// Nothing new; also an older announcement that was overtaken.
    Nothing,
    /// The message is aborted. Its receiver settles it so; its sender counts the rest as sent, as that of a settled message.
    Aborted,
    /// What no writer says: more windows than there are, or more of a message that has ended. To be counted.
    Contradiction,
}

/// How much of a message is released: at its sender, which hears of it from [`Watermark::seen`], and at its receiver, which hears of it from
/// announcements.
///
/// Messages of a session keep their order, so one that waits for its writer holds up those behind it: a slow writer wants a session of its
/// own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Released {
    grain: Grain,
    windows: u32,
    is_aborted: bool,
}

impl Released {
    /// Nothing is released.
    pub const fn new(grain: Grain) -> Released {
        Released {
            grain,
            windows: 0,
            is_aborted: false,
        }
    }

    /// This was said last. What is released stays released.
    pub const fn hear(&mut self, release: Release) -> Heard {
        let all = self.grain.windows();
        let windows = match release {
            Release::Aborted if self.is_aborted => return Heard::Nothing,
            Release::Aborted if self.windows < all => {
                self.is_aborted = true;
                return Heard::Aborted;
            }
            Release::Aborted => return Heard::Contradiction,
            Release::Whole => all,
            Release::Windows(windows) if windows < all => windows,
            Release::Windows(_) => return Heard::Contradiction,
        };
        if windows <= self.windows {
            return Heard::Nothing;
        }
        if self.is_aborted {
            return Heard::Contradiction;
        }
        self.windows = windows;
        Heard::More
    }

    /// Positions below this one, in transmit order, may be read and sent, for the first time or again (S1); entries, credit and turns of
    /// the receiver go up to there.
    pub const fn fragments(&self) -> u32 {
        self.grain.fragments_of(self.windows)
    }

    /// What is to be announced.
    pub const fn release(&self) -> Release {
        match self.windows == self.grain.windows() {
            _ if self.is_aborted => Release::Aborted,
            true => Release::Whole,
            false => Release::Windows(self.windows),
        }
    }

    /// All that may be sent was sent, or came (`sent` positions), and there will be more: the sender waits for its writer, and not for the
    /// receiver.
    pub fn waits_for_writer(&self, sent: u32) -> bool {
        matches!(self.release(), Release::Windows(_)) && sent >= self.fragments()
    }
}

/// When the sender of a message that is not yet whole announces how much is released.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Announcements {
    last: Option<Release>,
    pause: Duration,
    due: Time,
}

impl Announcements {
    /// Nothing is announced. A receiver that hears nothing for `message_timeout` gives the message up.
    pub const fn new(message_timeout: Duration) -> Announcements {
        Announcements {
            last: None,
            pause: Duration::from_nanos(message_timeout.as_nanos() as u64 / 4),
            due: Time::ZERO,
        }
    }

    /// What is to be announced now, asked once a round: what is new at once, and what is not every quarter of the time-out.
    pub fn next(&mut self, release: Release, now: Time) -> Option<Release> {
        if self.last == Some(release) && now < self.due {
            return None;
        }
        (self.last, self.due) = (Some(release), now + self.pause);
        self.last
    }
}

/// Packets that may come of a session's unsettled messages, in order: of each how many are released, and whether these are all. When they have
/// come there is no turn ([`crate::turns`], S7).
pub fn packets_released(messages: impl IntoIterator<Item = (u32, bool)>) -> u64 {
    let mut packets = 0;
    for (released, is_whole) in messages {
        packets += u64::from(released);
        if !is_whole {
            break; // Those behind it wait for it.
        }
    }
    packets
}

mod showing;

pub use showing::{
    Awaits, Ending, Landing, NotValid, Part, PostError, Quarantine, Showing, Shown, TellError,
};
