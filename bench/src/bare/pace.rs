//! Back-pressure at no cost: a counter in a file that both programs map.
//!
//! Completions tell the sender that the kernel has taken a packet, not that the receiving program has; where the two
//! share a core with the kernel's work, its ring overflows. On a bed inside one host the receiver writes how many
//! packets it has taken (into landing zones: how many it has posted frames for) into shared memory. No protocol can be
//! cheaper, which is the point of a yardstick.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::sys::Mapping;

const LEN: usize = 4096;

/// The counter.
pub(super) struct Pace {
    memory: Mapping,
}

impl Pace {
    /// Maps the counter in `path`, which is created if need be.
    pub(super) fn open(path: &Path) -> io::Result<Pace> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        file.set_len(LEN as u64)?;
        // A mapping keeps its file open.
        Ok(Pace {
            memory: Mapping::shared(file.as_raw_fd(), 0, LEN)?,
        })
    }

    /// What the receiver has published last. Its store and the sender's load carry no other data, so relaxed order does.
    pub(super) fn count(&self) -> u64 {
        self.counter().load(Ordering::Relaxed)
    }

    /// Publishes a number of packets.
    pub(super) fn set_count(&self, packets: u64) {
        self.counter().store(packets, Ordering::Relaxed);
    }

    fn counter(&self) -> &AtomicU64 {
        #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins at a page")]
        let counter = self.memory.base().cast::<AtomicU64>();
        // SAFETY: page-aligned, LEN bytes long, lives as long as `self`; both processes use it as an atomic only.
        unsafe { &*counter }
    }
}
