//! A log in private memory, by both of its ends. Not in `log.rs`, which is compiled over loom's atomics, too.
#![cfg(test)]

use lm_protocol::landing::LogEntry;

use crate::{Log, LogWriter};

/// The sequence number's sixteen bits end behind it, and so do the log's places.
const START: u64 = 0x1_fffc;

/// A log with fragments 9, 8, … of message 7 in all its places, and the first of their entries, which is at `START`.
fn filled() -> (Log, LogWriter, LogEntry) {
    let log = Log::new_in_memory();
    let mut writer = log.writer();
    for at in 0..10 {
        writer.append(START + at, fragment(at));
    }
    (log, writer, fragment(0))
}

fn fragment(at: u64) -> LogEntry {
    LogEntry {
        sequence: (START + at) as u16,
        session: 3,
        message: 7,
        index: 9 - at as u32,
        frame_len: 1514,
        padding_len: 0,
        cpu: 1,
    }
}

#[test]
fn fragments_that_follow_each_other_are_counted() {
    let (log, _, first) = filled();
    assert_eq!(log.descending(START, &first, 10), 10);
    assert_eq!(log.descending(START, &first, 4), 4);
    assert_eq!(log.descending(START + 2, &fragment(2), 8), 8);
    assert_eq!(log.descending(START, &fragment(1), 10), 0);
    // Whichever CPU ran the gate.
    let elsewhere = LogEntry { cpu: 0, ..first };
    assert_eq!(log.descending(START, &elsewhere, 10), 10);
}

#[test]
fn any_other_field_ends_them() {
    let change: [fn(&mut LogEntry); 6] = [
        |entry| entry.sequence ^= 1,
        |entry| entry.session ^= 1,
        |entry| entry.message ^= 1 << 31,
        |entry| entry.index += 1,
        |entry| entry.frame_len -= 1,
        |entry| entry.padding_len = 4,
    ];
    for change in change {
        let (log, mut writer, first) = filled();
        let mut other = fragment(6);
        change(&mut other);
        writer.append(START + 6, other);
        assert_eq!(log.descending(START, &first, 10), 6, "{other:?}");
    }
    // A place that is yet to be used.
    let (mut log, _, first) = filled();
    log.set_slot(START + 5, 2, 3000);
    assert_eq!(log.descending(START, &first, 10), 5);
}
