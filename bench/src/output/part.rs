//! What is kept of a file whose transfer broke: `.NAME.part`, in a directory `.ADDRESS-KEY.part`. The file is all there is, so that it
//! survives whatever ends the program or the host. That it is the beginning of what is sent is shown by digests, each time.
//!
//! Whoever writes a part has it locked.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};

use super::FILE_PIECE_LEN;
use crate::transfer::wire::Digest;

const SUFFIX: &str = ".part";

/// Parts that a directory keeps. A sender chooses the keys, and shall not leave more behind.
const PARTS_MAX: usize = 16;

/// Which file of which sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The sender's address.
    pub from: Ipv4Addr,
    /// The same whenever that file is sent from there.
    pub key: u64,
}

impl Source {
    /// Where its part lies in a directory that takes many transfers.
    pub(super) fn part(&self, directory: &Path) -> PathBuf {
        directory.join(format!(".{}-{:016x}{SUFFIX}", self.from, self.key))
    }
}

/// Opens and locks a part, with what is there if `resume` is set, else empty. `None`: another transfer writes it.
pub(super) fn open(path: &Path, resume: bool) -> io::Result<Option<File>> {
    match open_ours(path) {
        Ok(file) => {
            let locked = lock(&file, path)?;
            if locked && !resume {
                file.set_len(0)?;
            }
            return Ok(locked.then_some(file));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        // A link, another user's file, a directory.
        Err(_) => fs::remove_file(path)?,
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    Ok(lock(&file, path)?.then_some(file))
}

/// A file that this user made under that name and no other.
fn open_ours(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    let found = file.metadata()?;
    let is_ours = found.is_file() && found.nlink() == 1 && found.uid() == rustix::process::geteuid().as_raw();
    if is_ours {
        Ok(file)
    } else {
        Err(ErrorKind::PermissionDenied.into())
    }
}

/// Locks the file and looks whether that is still its name: who had it locked may have been done with it just now. Where the file
/// system has no locks nothing is kept.
fn lock(file: &File, path: &Path) -> io::Result<bool> {
    if rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(false);
    }
    let (ours, named) = (file.metadata()?, fs::symlink_metadata(path));
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())))
}

/// The part of a file that has a name.
pub(super) fn of_file(path: &Path) -> PathBuf {
    super::beside(path, SUFFIX)
}

/// Removes the oldest parts of a directory, so that one more may be there; those that are written do not count.
pub(super) fn make_room(directory: &Path) -> io::Result<()> {
    let is_part = |name: &[u8]| name.starts_with(b".") && name.ends_with(SUFFIX.as_bytes());
    let mut parts = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if !is_part(entry.file_name().as_bytes()) {
            continue;
        }
        let Ok(file) = open_ours(&entry.path()) else {
            continue;
        };
        if lock(&file, &entry.path())? {
            parts.push((file.metadata()?.modified()?, entry.path()));
        }
    }
    parts.sort();
    let surplus = (parts.len() + 1).saturating_sub(PARTS_MAX);
    parts[..surplus]
        .iter()
        .try_for_each(|(_, oldest)| fs::remove_file(oldest))
}

/// The digest of the bytes `from..to` of a file, or of as many of them as there are. `between` is called after each piece and ends the
/// work by returning false.
pub fn digest(file: &File, from: u64, to: u64, between: &mut dyn FnMut() -> bool) -> io::Result<Digest> {
    let mut hash = Sha256::new();
    let mut piece = vec![0; FILE_PIECE_LEN];
    let mut at = from;
    while at < to {
        let len = (to - at).min(FILE_PIECE_LEN as u64) as usize;
        let read = match file.read_at(&mut piece[..len], at) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hash.update(&piece[..read]);
        at += read as u64;
        if !between() {
            return Err(super::destination::stopped());
        }
    }
    Ok(hash.finalize().into())
}
