//! A *transfer*: one file, or standard input until its end, as one or more messages.
//!
//! ```text
//!  sender                                   receiver
//!    │ ── START (shape) ───────────────────────▶ │  may it come? opens the destination
//!    │ ◀─────────────────────── READY / REFUSED ─ │
//!    │ ── data 0, 1, 2 … (tag = number, index) ─▶ │  written at index * message_len
//!    │ ── END (count; when not known before) ──▶ │
//!    │ ◀──────────────────── RESULT (written) ─── │  only this is success; ALIVE until then
//! ```
//!
//! A transfer that goes on where an earlier one of the same file ended has this between READY and the data:
//!
//! ```text
//!    │ ◀──────────────────────── READY (held) ─── │  so many bytes are there, of whatever
//!    │ ── CHECK (offset, block, count) ────────▶ │  again and again, from the first byte on;
//!    │ ◀────────────────── DIGESTS (SHA-256s) ─── │  in smaller blocks where one differs
//!    │ ── BEGIN (first message) ────────────────▶ │  cuts what lies behind
//!    │ ◀───────────────────────────────── BEGUN ─ │
//! ```
//!
//! Control messages may be repeated and their answers are the same (START → READY, END → RESULT); a sender repeats
//! them once a second. Data may overtake them: messages of one fragment travel on another channel than long ones. What is final of a
//! message is written before it is whole (`incoming/shown.rs`); it counts when it is.

/// Messages that are no longer are filled before they leave, and whole before they are written: several of them are under way at once, so
/// that they overlap as they are, and a loss costs them less.
pub const WHOLE_MAX: u64 = 1 << 20;

pub mod incoming;
pub mod outgoing;
pub mod progress;
pub mod resume;
pub mod wire;
