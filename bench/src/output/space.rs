//! Free space of a file system, and what of it transfers leave alone.

use std::fs::File;

use rustix::fs::StatVfs;

use crate::size::approximate;

/// What stays free where the user does not say how much: a twentieth of the file system, at most this, in bytes.
const KEPT_MAX: u64 = 1 << 30;
const KEPT_SHARE: u64 = 20;

/// A transfer takes at most this share of what can be spared before it looks again, so that all that a directory takes at once
/// and other programs do not meet what is to stay free.
const ROOM_SHARE: u64 = 32;

/// The most that is written between two looks, in bytes.
const ROOM_MAX: u64 = 64 << 20;

/// Free bytes of a file system.
#[derive(Clone, Copy, Debug)]
pub(super) struct Space {
    free: u64,
    kept: u64,
}

impl Space {
    /// `None` for a file system that cannot say (FUSE, ramfs, some network file systems): it finds out while writing.
    pub(super) fn of(stat: rustix::io::Result<StatVfs>, keep_free: Option<u64>) -> Option<Space> {
        let stat = stat.ok().filter(|stat| stat.f_blocks > 0)?;
        let total = stat.f_blocks.saturating_mul(stat.f_frsize);
        Some(Space {
            free: stat.f_bavail.saturating_mul(stat.f_frsize),
            kept: keep_free.unwrap_or((total / KEPT_SHARE).min(KEPT_MAX)),
        })
    }

    /// Bytes that transfers may take.
    pub(super) fn spare(&self) -> u64 {
        self.free.saturating_sub(self.kept)
    }

    /// Why `needed` bytes of a file beside `place` do not fit.
    pub(super) fn lacks(&self, place: &str, needed: u64) -> String {
        format!(
            "{} are free in {place}, {} are needed and {} stay free; free some, choose another --output or a smaller \
             --keep-free",
            approximate(self.free),
            approximate(needed),
            approximate(self.kept)
        )
    }
}

/// What one file may still take before the file system is looked at again.
#[derive(Debug)]
pub(super) struct Room {
    keep_free: Option<u64>,
    left: u64,
}

impl Room {
    pub(super) fn new(keep_free: Option<u64>) -> Room {
        Room { keep_free, left: 0 }
    }

    /// `len` bytes more will be written.
    ///
    /// # Errors
    /// The space, which cannot spare them.
    pub(super) fn take(&mut self, file: &File, len: u64) -> Result<(), Space> {
        if self.left < len {
            let Some(space) = Space::of(rustix::fs::fstatvfs(file), self.keep_free) else {
                return Ok(());
            };
            if space.spare() < len {
                return Err(space);
            }
            self.left = (space.spare() / ROOM_SHARE).min(ROOM_MAX).max(len);
        }
        self.left -= len;
        Ok(())
    }
}
