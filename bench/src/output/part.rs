//! What is kept of a file whose transfer broke: `.NAME-ADDRESS-KEY.part`, in a directory `.ADDRESS-KEY.part`. The file is all there is, so that it
//! survives whatever ends the program or the host. That it is the beginning of what is sent is shown by digests, each time.
//!
//! Whoever writes a part has it locked.

use std::fmt;
use std::fs::{self, DirEntry, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};

use super::FILE_PIECE_LEN;
use crate::transfer::wire::Digest;

const SUFFIX: &str = ".part";

/// Parts that an output keeps. A sender chooses the keys, and shall not leave more behind.
const PARTS_MAX: usize = 16;

/// Of these, parts of one address.
const SHARE_MAX: usize = PARTS_MAX / 2;

/// Which file of which sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The sender's address.
    pub from: Ipv4Addr,
    /// The same whenever that file is sent from there.
    pub key: u64,
}

impl fmt::Display for Source {
    /// How the name of its part ends.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:016x}{SUFFIX}", self.from, self.key)
    }
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    from: Ipv4Addr,
    /// Bytes of it that were counted.
    counted: u64,
}

/// The parts of an output that no transfer writes, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Kept {
    parts: Vec<Part>,
    /// Bytes that were counted for parts which are gone.
    pub(super) freed: u64,
}

impl Kept {
    /// Those in this directory whose names begin so.
    pub(super) fn of(directory: &Path, prefix: &str) -> Kept {
        let found = |entry: DirEntry| {
            let name = entry.file_name();
            let source = name.to_str()?.strip_prefix(prefix)?.strip_suffix(SUFFIX)?;
            let from = source.split_once('-')?.0.parse().ok()?;
            let (path, counted) = (entry.path(), 0);
            Some(Part { path, from, counted })
        };
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let mut parts: Vec<_> = entries.filter_map(found).collect();
        let modified = |part: &Part| fs::symlink_metadata(&part.path)?.modified();
        parts.sort_by_cached_key(|part| modified(part).ok());
        Kept { parts, freed: 0 }
    }

    /// A transfer from this address is to write the part. `false`: there is no room for it.
    pub(super) fn take(&mut self, path: &Path, from: Ipv4Addr, resume: bool) -> bool {
        let Some(at) = self.parts.iter().position(|part| part.path == path) else {
            return self.make_room(from);
        };
        let part = self.parts.remove(at);
        self.freed += if resume { 0 } else { part.counted };
        true
    }

    /// One more. `false`: there is no room for it.
    pub(super) fn add(&mut self, path: &Path, from: Ipv4Addr, counted: u64) -> bool {
        let path = path.to_owned();
        self.make_room(from) && {
            self.parts.push(Part { path, from, counted });
            true
        }
    }

    /// Removes the oldest parts of this address, or of one that has more than its share, so that one more may be there.
    fn make_room(&mut self, from: Ipv4Addr) -> bool {
        let of = |parts: &[Part], ip| parts.iter().filter(|part| part.from == ip).count();
        loop {
            let (parts, theirs) = (&self.parts, of(&self.parts, from));
            if theirs < SHARE_MAX && parts.len() < PARTS_MAX {
                return true;
            }
            let own = parts.iter().position(|part| part.from == from);
            let above = (parts.iter()).position(|part| of(parts, part.from) > SHARE_MAX);
            let Some(at) = above.filter(|_| theirs < SHARE_MAX).or(own) else {
                return false;
            };
            let part = self.parts.remove(at);
            self.freed += part.counted;
            // Another receiver's may be written.
            if open_ours(&part.path).is_ok_and(|file| lock(&file, &part.path).is_ok_and(|locked| locked)) {
                let _ = fs::remove_file(&part.path);
            }
        }
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
