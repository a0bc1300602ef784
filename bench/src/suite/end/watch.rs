//! Notices that nothing arrives any more, without touching the sockets that are measured.
//!
//! A blocking receive with a time limit arms a timer for each sleep, which ordinary programs do not pay. So a thread of
//! its own looks twice a second at a counter and ends the program when it has stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// How often the watching thread looks. Silence is noticed after one to two such periods.
const PERIOD: Duration = Duration::from_millis(700);
/// Time more for each byte of what arrives at once: 10 MB/s is slow.
const PERIOD_OF_BYTE: Duration = Duration::from_nanos(100);

/// Watches a count of what has arrived, from the first arrival on; when nothing has arrived for a while after something had, complains and ends
/// the process with exit code 1. Stored without order: it orders nothing.
pub(crate) fn watch(what_is_wrong: String, message_len: u64) -> Arc<AtomicU64> {
    let period = PERIOD + PERIOD_OF_BYTE * u32::try_from(message_len).unwrap_or(u32::MAX);
    let count = Arc::new(AtomicU64::new(0));
    let seen = Arc::downgrade(&count);
    thread::spawn(move || {
        let mut before = 0;
        // Ends with the measurement, whose end drops the counter.
        while let Some(count) = seen.upgrade() {
            let now = count.load(Ordering::Relaxed);
            drop(count);
            if now > 0 && now == before {
                eprintln!("lm-bench: {what_is_wrong}");
                std::process::exit(1);
            }
            before = now;
            thread::sleep(period);
        }
    });
    count
}
