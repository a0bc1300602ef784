//! The gate's log: an entry that is seen is whole, and what the gate may accept has a frame.

use lm_protocol::landing::LogEntry;
use loom::thread;

use crate::layout::LOG_ENTRIES;
use crate::log::Log;
use crate::ring::{self, Fill};
use crate::weak::{Access, weaken};

/// The log's array ends between the first position and the second.
const START: u64 = 5 * LOG_ENTRIES as u64 - 1;

fn entry(position: u64) -> LogEntry {
    LogEntry {
        sequence: position as u16,
        session: 2,
        message: 9,
        index: position as u32 ^ 0xffff,
        frame_len: position as u16 | 1,
        padding_len: 3,
        cpu: 1,
    }
}

/// The gate appends, user space reads what it sees, until it has seen everything.
fn appended_entries_are_whole() {
    loom::model(|| {
        let log = Log::new_in_memory();
        let mut gate = log.writer();
        let thread = thread::spawn(move || {
            for position in START..START + 2 {
                gate.append(position, entry(position));
            }
        });
        let mut position = START;
        while position < START + 2 {
            let producer = log.producer();
            assert!(producer <= START + 2);
            while position < producer {
                assert_eq!(log.entry(position), entry(position), "torn or old");
                position += 1;
            }
            thread::yield_now();
        }
        thread.join().expect("the gate");
    });
}

#[test]
fn entries_that_are_seen_are_whole() {
    appended_entries_are_whole();
}

#[test]
#[should_panic(expected = "torn or old")]
fn the_gates_release_is_needed() {
    weaken(Access::LogProducerStore);
    appended_entries_are_whole();
}

#[test]
#[should_panic(expected = "torn or old")]
fn the_readers_acquire_is_needed() {
    weaken(Access::LogProducerLoad);
    appended_entries_are_whole();
}

/// User space submits a fill entry, says which packet it is for, and then lets the gate accept one packet more (I3c): whoever the gate
/// lets in finds its frame, and was compared with that.
fn accepted_packets_have_frames() {
    loom::model(|| {
        let (mut fill, mut kernel) = ring::in_memory::<Fill>(2, u32::MAX);
        let mut log = Log::new_in_memory();
        let gate = log.writer();
        let thread = thread::spawn(move || {
            for accepted in 0..2 {
                if gate.posted() > accepted {
                    assert_eq!(kernel.available(1), 1, "no frame");
                    assert_eq!(kernel.read(0), accepted);
                    kernel.release(1);
                    assert_eq!(gate.slot(accepted), (3, 9000 + accepted as u16), "no slot");
                } else {
                    return; // the gate passes the packet on
                }
            }
        });
        for posted in 0..2 {
            assert!(fill.free(1) >= 1);
            fill.write(0, posted);
            fill.submit(1);
            log.set_slot(posted, 3, 9000 + posted as u16);
            log.set_posted(posted + 1);
        }
        thread.join().expect("the gate");
    });
}

#[test]
fn the_gate_accepts_what_has_a_frame() {
    accepted_packets_have_frames();
}

#[test]
#[should_panic(expected = "no frame")]
fn the_release_of_posted_is_needed() {
    weaken(Access::PostedStore);
    accepted_packets_have_frames();
}

#[test]
#[should_panic(expected = "no frame")]
fn the_gates_acquire_of_posted_is_needed() {
    weaken(Access::PostedLoad);
    accepted_packets_have_frames();
}
