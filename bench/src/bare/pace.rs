//! Back-pressure at no cost: a counter in a file that both programs map.
//!
//! Completions tell the sender that the kernel has taken a packet, not that the receiving program has; where the two
//! share a core with the kernel's work, its ring overflows. On a bed inside one host the receiver writes how many
//! packets it has taken (into landing zones: how many it has posted frames for) into shared memory. No protocol can be
//! cheaper, which is the point of a yardstick.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};

use super::mapping::Mapping;

const LEN: usize = 4096;

/// The counter.
pub(super) struct Pace {
    memory: Mapping,
}

impl Pace {
    /// Maps the counter in `path`. The file is created if need be, and its folder, which must be ours alone: in one where others may
    /// write, the file's name could be theirs, and lead anywhere.
    pub(super) fn open(path: &Path) -> io::Result<Pace> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::other("--pace must name a file"));
        };
        let folder = match folder.as_os_str().is_empty() {
            true => Path::new("."),
            false => folder,
        };
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(folder, flags | OFlags::DIRECTORY, Mode::empty())?;
        let found = rustix::fs::fstat(&opened)?;
        if found.st_uid != rustix::process::geteuid().as_raw() || found.st_mode & 0o022 != 0 {
            return Err(io::Error::other(format!(
                "others may write in {}; name a file in a folder of your own with --pace",
                folder.display()
            )));
        }
        let mode = Mode::RUSR | Mode::WUSR;
        let file = File::from(rustix::fs::openat(
            &opened,
            name,
            flags | OFlags::RDWR | OFlags::CREATE,
            mode,
        )?);
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
