//! The log of a landing channel: which fragment each RX descriptor holds, told before the headers were overwritten.
//!
//! The n-th entry describes the n-th RX descriptor (I3). The gate writes entries and `producer`; user space writes how
//! much it has posted and which messages it expects. Positions are 64-bit, start at 0 when the gate is loaded (not with
//! a session), and never wrap in practice.

use std::io;
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lm_protocol::landing::LogEntry;

use crate::layout::{LOG_ENTRIES, LogEntryRow, LogMap, SESSIONS, SlotRow};
use crate::shared::SharedMemory;
use crate::verdict::{Counters, Verdict};

const COUNTERS: usize = offset_of!(LogMap, counters);

/// Words of an entry.
const ENTRY_WORDS: usize = size_of::<LogEntryRow>() / size_of::<u32>();

fn entry_offset(position: u64) -> usize {
    offset_of!(LogMap, entries) + (position % u64::from(LOG_ENTRIES)) as usize * size_of::<LogEntryRow>()
}

fn limit_offset(row: u32) -> usize {
    offset_of!(LogMap, message_limits) + (row % SESSIONS) as usize * size_of::<u32>()
}

/// User space's end of a channel's log. `Send`; one thread at a time posts.
#[derive(Debug)]
pub struct Log {
    memory: Arc<SharedMemory>,
}

impl Log {
    /// Entries that the log holds: never let `posted` run further ahead of what was read.
    pub const ENTRIES: u32 = LOG_ENTRIES;

    /// A log in private memory, for a simulated NIC: its gate's end is [`Log::writer`].
    ///
    /// # Panics
    ///
    /// If the system has no memory for it.
    pub fn new_in_memory() -> Log {
        Log::over(SharedMemory::private(size_of::<LogMap>()).expect("half a megabyte of memory"))
    }

    /// Maps a log that the gate's owner handed over.
    ///
    /// # Errors
    /// The descriptor is of no such map, or cannot be mapped.
    pub fn of_map(map: BorrowedFd<'_>) -> io::Result<Log> {
        Ok(Log::over(SharedMemory::of_map(map, size_of::<LogMap>())?))
    }

    pub(crate) fn over(memory: SharedMemory) -> Log {
        Log {
            memory: Arc::new(memory),
        }
    }

    /// The same log once more: one of the two posts.
    pub fn share(&self) -> Log {
        Log {
            memory: Arc::clone(&self.memory),
        }
    }

    /// The gate's end, for a log in private memory. A log of a loaded gate has the gate itself at that end.
    pub fn writer(&self) -> LogWriter {
        LogWriter { log: self.share() }
    }

    /// Entries written since the gate was loaded. Entries below this may be read. In zero-copy mode there are none, and
    /// this counts the packets that the gate redirected.
    pub fn producer(&self) -> u64 {
        // Acquire: pairs with the gate's store of `producer` after the entry's stores (gate.c, `admit`).
        self.memory
            .load_u64(offset_of!(LogMap, producer), Ordering::Acquire)
    }

    /// The entry at `position`, copied. Meaningful for `producer - ENTRIES <= position < producer`.
    #[inline]
    pub fn entry(&self, position: u64) -> LogEntry {
        // Relaxed: ordered by the acquire load of `producer` that made this position known.
        let words: [u32; ENTRY_WORDS] = self.memory.load_u32s(entry_offset(position), Ordering::Relaxed);
        let word = |at: usize| words[at / size_of::<u32>()];
        // The first and the fourth word hold several fields in the machine's own order of bytes.
        let head = word(offset_of!(LogEntryRow, sequence)).to_ne_bytes();
        let tail = word(offset_of!(LogEntryRow, frame_len)).to_ne_bytes();
        let sequence = match head[offset_of!(LogEntryRow, frames)] {
            0 => u16::from_ne_bytes([head[0], head[1]]),
            // Still what `set_slot` wrote.
            _ => !(position as u16),
        };
        LogEntry {
            sequence,
            session: head[2],
            message: word(offset_of!(LogEntryRow, message)),
            index: word(offset_of!(LogEntryRow, index)),
            frame_len: u16::from_ne_bytes([tail[0], tail[1]]),
            padding_len: tail[2],
            cpu: tail[3],
        }
    }

    /// How many of the `most` entries from `position` on are as `first` says, each with the next sequence number and
    /// the next lower index, whatever CPU ran the gate.
    #[inline]
    pub fn descending(&self, position: u64, first: &LogEntry, most: u32) -> u32 {
        let tail = |cpu: u8| {
            let [low, high] = first.frame_len.to_ne_bytes();
            u32::from_ne_bytes([low, high, first.padding_len, cpu])
        };
        // The bits that count of the last word.
        let kept = !(tail(0) ^ tail(u8::MAX));
        let last = tail(0);
        let is_next = |at: &u32| {
            let [low, high] = first.sequence.wrapping_add(*at as u16).to_ne_bytes();
            // Frames: zero, as in every accepted entry.
            let head = u32::from_ne_bytes([low, high, first.session, 0]);
            let expected = [head, first.message, first.index.wrapping_sub(*at), last];
            // Relaxed: as in `entry`.
            let offset = entry_offset(position + u64::from(*at));
            let words: [u32; ENTRY_WORDS] = self.memory.load_u32s(offset, Ordering::Relaxed);
            let differs = |word: usize| words[word] ^ expected[word];
            differs(0) | differs(1) | differs(2) | (differs(3) & kept) == 0
        };
        (0..most).take_while(is_next).count() as u32
    }

    /// Entries that the gate may accept, counted like [`Log::producer`].
    pub fn posted(&self) -> u64 {
        self.memory
            .load_u64(offset_of!(LogMap, posted), Ordering::Relaxed)
    }

    /// Lets the gate accept packets up to `position`, after that many fill entries were submitted (I3c).
    ///
    /// Lower it only with the session closed (I4), when fill entries are taken back.
    pub fn set_posted(&mut self, position: u64) {
        // Release: the fill ring's producer was stored before, and the packet that this lets in must find its entry
        // there. The gate's load and the kernel's later read of the ring run on one CPU with a control dependency
        // between them.
        self.memory
            .store_u64(offset_of!(LogMap, posted), position, Ordering::Release);
    }

    /// Says that packets may take several frames of `capacity` bytes each, so that the gate accepts one only where
    /// [`Log::set_slot`] said how many it takes; and that on a general queue none is longer. 0, as it is at first: each
    /// takes one.
    pub fn set_capacity(&mut self, capacity: u32) {
        // Relaxed: nothing is posted yet.
        self.memory
            .store_u32(offset_of!(LogMap, capacity), capacity, Ordering::Relaxed);
    }

    /// Says of the frames that the packet at `position` will take, before that is posted: how many there are, and the
    /// longest packet in bytes that may be written there.
    pub fn set_slot(&mut self, position: u64, frames: u8, longest: u16) {
        let longest = longest.to_ne_bytes();
        let slot = u32::from_ne_bytes([longest[0], longest[1], 0, frames]);
        // Relaxed: ordered by the release store of `posted`. Where the machine lets the gate read this before `posted`,
        // it finds what it wrote there itself, 0 frames, and passes the packet.
        self.memory.store_u32(
            entry_offset(position) + offset_of!(LogEntryRow, sequence),
            slot,
            Ordering::Relaxed,
        );
    }

    /// The highest message number that the gate may accept in the session at `row`.
    pub fn message_limit(&self, row: u32) -> u32 {
        self.memory.load_u32(limit_offset(row), Ordering::Relaxed)
    }

    /// Lets the gate accept messages up to and including `message` (serial arithmetic) in the session at `row`.
    pub fn set_message_limit(&mut self, row: u32, message: u32) {
        // Relaxed: the limit guards no other memory; `posted` is what makes frames available.
        self.memory
            .store_u32(limit_offset(row), message, Ordering::Relaxed);
    }

    /// What the gate counted on this channel's queue since the channel was made.
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        self.memory.add_counters(COUNTERS, &mut sum);
        sum
    }

    /// One counter of this channel.
    pub fn counter(&self, verdict: Verdict) -> u64 {
        self.memory.load_counter(COUNTERS, verdict)
    }

    /// Packets to this channel's data port that came on queues of other programs, and went to the data socket: one
    /// load. Only where several programs share the gate.
    pub fn passed_elsewhere(&self) -> u64 {
        // Relaxed: a counter orders nothing.
        self.memory
            .load_u64(offset_of!(LogMap, passed_elsewhere), Ordering::Relaxed)
    }

    /// Packets of this queue that the kernel's data socket may have received: one load. It moves *before* the packet is
    /// in the socket.
    pub fn passed(&self) -> u64 {
        self.memory.load_passed(COUNTERS)
    }
}

/// The gate's end of a log: what the BPF program does, for [`crate::model`].
#[derive(Debug)]
pub struct LogWriter {
    /// User space's end.
    pub(crate) log: Log,
}

impl LogWriter {
    /// What user space has posted.
    pub fn posted(&self) -> u64 {
        // Acquire: pairs with the release store in `Log::set_posted`.
        self.log
            .memory
            .load_u64(offset_of!(LogMap, posted), Ordering::Acquire)
    }

    /// As [`Log::set_capacity`].
    pub fn capacity(&self) -> u32 {
        self.log
            .memory
            .load_u32(offset_of!(LogMap, capacity), Ordering::Relaxed)
    }

    /// As [`Log::set_slot`]: frames, and the longest packet in bytes.
    pub fn slot(&self, position: u64) -> (u8, u16) {
        // Relaxed: `posted` was loaded with acquire before.
        let memory = &self.log.memory;
        let slot = memory
            .load_u32(
                entry_offset(position) + offset_of!(LogEntryRow, sequence),
                Ordering::Relaxed,
            )
            .to_ne_bytes();
        (
            slot[offset_of!(SlotRow, frames)],
            u16::from_ne_bytes([slot[0], slot[1]]),
        )
    }

    /// Writes the entry at `position` and publishes it.
    pub fn append(&mut self, position: u64, entry: LogEntry) {
        let store = |at, value| {
            self.log
                .memory
                .store_u32(entry_offset(position) + at, value, Ordering::Relaxed)
        };
        let len = entry.frame_len.to_ne_bytes();
        let sequence = entry.sequence.to_ne_bytes();
        store(
            offset_of!(LogEntryRow, sequence),
            u32::from_ne_bytes([sequence[0], sequence[1], entry.session, 0]),
        );
        store(offset_of!(LogEntryRow, message), entry.message);
        store(offset_of!(LogEntryRow, index), entry.index);
        store(
            offset_of!(LogEntryRow, frame_len),
            u32::from_ne_bytes([len[0], len[1], entry.padding_len, entry.cpu]),
        );
        // Release: pairs with the acquire load in `Log::producer`.
        self.skip(position);
    }

    /// Counts the packet at `position`, of which nothing is known: zero-copy mode.
    pub fn skip(&mut self, position: u64) {
        // Release: as in `append`, though there is nothing to publish but the number.
        self.log
            .memory
            .store_u64(offset_of!(LogMap, producer), position + 1, Ordering::Release);
    }

    pub(crate) fn count(&self, verdict: Verdict) {
        self.log.memory.count(COUNTERS, verdict);
    }

    pub(crate) fn count_elsewhere(&self) {
        self.log.memory.add_one(offset_of!(LogMap, passed_elsewhere));
    }
}
