//! The maps' layouts in Rust: the twin of `gate.h`, compared with it through the object's BTF (`tests/layout.rs`).
//!
//! The structures are never built or borrowed where they are shared with the gate; they give sizes and offsets, and
//! `shared.rs` reaches the bytes through atomics. Fields named `*_ip`, `*_port` and `key` hold network byte order.

/// Receive queues that can be channels.
pub const QUEUES: u32 = 64;
/// Row of `lm_channels` that counts for every queue from [`QUEUES`] on.
pub const STRAY_ROW: u32 = 64;
/// Sessions of a landing queue; four bits of a session's key, above the lowest, say which: a power of two.
pub const SESSIONS: u32 = lm_protocol::landing::ROWS;
/// Entries of a channel's log: a power of two.
pub const LOG_ENTRIES: u32 = 32768;
/// Counters in a row of counters.
pub const VERDICT_ROW: usize = 32;
/// Longest frame, in bytes, that may carry Ethernet padding.
pub const SHORT_FRAME: u32 = 64;

/// `lm_config.flags`: one CPU at a time runs the gate for a queue.
pub const FLAG_ONE_CPU_PER_QUEUE: u32 = 1;
/// `lm_config.flags`: the machine keeps stores in order.
pub const FLAG_ORDERED_STORES: u32 = 2;
/// `lm_config.flags`: several programs, each with queues and a data port of its own.
pub const FLAG_SEVERAL_PROGRAMS: u32 = 4;

/// `struct lm_config`: constants of a loaded gate.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Address that packets must be sent to; 0 accepts any.
    pub local_ip: u32,
    /// UDP port of the control protocol: always passed.
    pub control_port: u16,
    /// Zero.
    pub reserved: u16,
    /// `FLAG_*`.
    pub flags: u32,
}

/// `struct lm_counters`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CounterRow {
    /// One counter per [`crate::Verdict`], at its number.
    pub verdicts: [u64; VERDICT_ROW],
    /// Packets that the kernel's data socket may have received.
    pub passed: u64,
    /// Zero.
    pub reserved: [u64; 7],
}

/// `struct lm_channel`: a row of `lm_channels`, by receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ChannelRow {
    /// `enum lm_role`.
    pub role: u32,
    /// Zero, though the kernel's verifier does not know it.
    pub zero: u32,
    /// Packets accepted since the gate was loaded (written by the gate).
    pub accepted: u64,
    /// UDP port of fragments and small LM packets on this queue.
    pub data_port: u16,
    /// Zero.
    pub reserved0: u16,
    /// The interface's address: what is for another one passes.
    pub mac: [u8; 6],
    /// Zero.
    pub reserved: [u8; 38],
    /// Counts while the queue has no log.
    pub counters: CounterRow,
}

/// `struct lm_session`: a row of `lm_sessions`, at queue × [`SESSIONS`] + row.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SessionRow {
    /// 1 while the session may land.
    pub open: u32,
    /// The sender's address.
    pub peer_ip: u32,
    /// Session key.
    pub key: u64,
    /// The address it sends to.
    pub local_ip: u32,
    /// The sender's data port.
    pub peer_port: u16,
    /// Bytes before the payload.
    pub header_len: u16,
    /// Payload bytes of every fragment but the last.
    pub payload_len: u16,
    /// log2 of the fragments in a window.
    pub window_shift: u8,
    /// `enum lm_wire`.
    pub wire: u8,
    /// Message of the last accepted fragment (written by the gate).
    pub last_message: u32,
    /// Index of the last accepted fragment (written by the gate).
    pub last_index: u32,
    /// Zero.
    pub reserved0: u32,
    /// CLOCK_MONOTONIC, in nanoseconds: nothing lands from then on; 0: there is no end.
    pub active_until_ns: u64,
    /// Zero.
    pub reserved1: [u8; 16],
}

/// `struct lm_log_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LogEntryRow {
    /// Position, low 16 bits.
    pub sequence: u16,
    /// The session's row, below [`SESSIONS`].
    pub session: u8,
    /// Zero: accepted. Until then the first word is a [`SlotRow`].
    pub frames: u8,
    /// Message number.
    pub message: u32,
    /// Fragment index.
    pub index: u32,
    /// Bytes of the frame.
    pub frame_len: u16,
    /// Bytes after the payload.
    pub padding_len: u8,
    /// CPU that ran the gate, low 8 bits.
    pub cpu: u8,
}

/// `struct lm_slot`: what the client says of a packet's frames before it may be accepted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SlotRow {
    /// Bytes of the longest packet that may be written there.
    pub longest: u16,
    /// Zero.
    pub reserved: u8,
    /// How many frames the packet has to take; 0: none is posted.
    pub frames: u8,
}

/// `struct lm_log`: the value of a channel's own map.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LogMap {
    /// Entries written (by the gate).
    pub producer: u64,
    /// Zero: a cache line of its own for what the other side writes.
    pub reserved0: [u8; 56],
    /// Entries that may be accepted (written by the client).
    pub posted: u64,
    /// Bytes of a packet that one frame holds, where packets may take several; 0: each takes one (written by the
    /// client).
    pub capacity: u32,
    /// Zero.
    pub reserved1: [u8; 52],
    /// Highest announced message number of each session (written by the client).
    pub message_limits: [u32; SESSIONS as usize],
    /// Counts of the queue (written by the gate).
    pub counters: CounterRow,
    /// Packets to the client's port on queues that are not its own (written by the gate).
    pub passed_elsewhere: u64,
    /// Zero.
    pub reserved2: [u8; 3384],
    /// The log, at `position % LOG_ENTRIES`.
    pub entries: [LogEntryRow; LOG_ENTRIES as usize],
}

const _: () = {
    assert!(size_of::<Config>() == 12);
    assert!(size_of::<CounterRow>() == 320);
    assert!(size_of::<ChannelRow>() == 384);
    assert!(size_of::<SessionRow>() == 64);
    assert!(size_of::<LogEntryRow>() == 16);
    assert!(size_of::<SlotRow>() == 4);
    assert!(std::mem::offset_of!(LogEntryRow, frames) == std::mem::offset_of!(SlotRow, frames));
    assert!(std::mem::offset_of!(LogMap, entries) == 4096);
    assert!(size_of::<LogMap>() == 4096 + 16 * LOG_ENTRIES as usize);
    assert!(LOG_ENTRIES.is_power_of_two() && SESSIONS.is_power_of_two() && VERDICT_ROW.is_power_of_two());
};

// SAFETY: integers and arrays of integers without padding (the sizes above are the sums of the fields); any bytes are a
// value.
unsafe impl aya::Pod for Config {}
// SAFETY: as for `Config`.
unsafe impl aya::Pod for ChannelRow {}
// SAFETY: as for `Config`.
unsafe impl aya::Pod for SessionRow {}
// SAFETY: as for `Config`.
unsafe impl aya::Pod for LogMap {}
