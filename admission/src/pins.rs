//! Where gates are pinned, and who may: a folder of a bpffs that nobody but the daemon's user can look into.
//!
//! ```text
//!  bpffs, by default /sys/fs/bpf
//!  └ lm                    root's
//!    ├ NS-INDEX            the pins of an interface: network namespace and index
//!    ├ lock-NS-INDEX       its lock (flock)
//!    └ user-UID            the same for a daemon with --user, that user's
//! ```
//!
//! The lock keeps a second daemon from taking over the pins of one that runs. Two that do not share pins are kept apart by the kernel,
//! which attaches one gate to an interface.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use crate::privileges::{give, is_ours_alone, open_folder};

/// The folder, open from before the daemon becomes another user: from then on the way to it may be closed.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    folder: Arc<OwnedFd>,
    name: PathBuf,
}

impl Pins {
    /// Opens the folder of a daemon that is to be this user, or makes it.
    pub(crate) fn open(bpffs: &Path, user: Option<(Uid, Gid)>) -> Result<Pins, String> {
        let name = bpffs.join("lm");
        let told = |name: &Path, error: Errno| match error {
            Errno::LOOP | Errno::NOTDIR => {
                format!(
                    "{} is no directory, and no link is followed: remove it",
                    name.display()
                )
            }
            error => format!("cannot make the directory {}: {error}", name.display()),
        };
        let parent = std::fs::File::open(bpffs);
        let parent = parent.map_err(|error| format!("cannot open {}: {error}", bpffs.display()))?;
        if !stays(&parent) {
            tracing::warn!(
                "the bpffs at {} is of this mount namespace alone (ip netns exec makes one), so gate and sessions end \
                 with the daemon, however it ends: mount one where process 1 sees it, and name it with --bpffs",
                bpffs.display()
            );
        }
        let (folder, _) =
            make_folder(&parent.into(), OsStr::new("lm")).map_err(|error| told(&name, error))?;
        if !is_ours_alone(&folder) {
            return Err(format!(
                "{} is another user's, or others can write in it: remove it, or name another bpffs with --bpffs",
                name.display()
            ));
        }
        let Some((uid, gid)) = user else {
            return Ok(Pins {
                folder: Arc::new(folder),
                name,
            });
        };
        let own = format!("user-{uid}");
        let name = name.join(&own);
        let made = match make_folder(&folder, OsStr::new(&own)) {
            // An earlier daemon gave it to the user, and root without CAP_DAC_OVERRIDE (the unit's) may not look into it.
            Err(Errno::ACCESS) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::openat(&folder, &own, flags, Mode::empty()).map(|folder| (folder, false))
            }
            made => made,
        };
        let (folder, is_new) = made.map_err(|error| told(&name, error))?;
        if is_new {
            give(&folder, (uid, gid)).map_err(|error| told(&name, error))?;
        }
        Ok(Pins {
            folder: Arc::new(folder),
            name,
        })
    }

    /// A way to the folder, or what is in it, that is open as long as this is.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.folder.as_raw_fd()))
    }

    /// What the folder is called.
    pub(crate) fn name(&self) -> &Path {
        &self.name
    }

    /// Locks the pins of an interface, `WOULDBLOCK` where another daemon has them.
    pub(crate) fn lock(&self, interface: &str) -> Result<Lock, Errno> {
        let name = OsString::from(format!("lock-{interface}"));
        loop {
            let (locked, _) = make_folder(&self.folder, &name)?;
            rustix::fs::flock(&locked, FlockOperation::NonBlockingLockExclusive)?;
            // Whoever had it before may have removed it meanwhile.
            let there = rustix::fs::statat(&*self.folder, &name, AtFlags::SYMLINK_NOFOLLOW);
            let own = rustix::fs::fstat(&locked)?;
            if there.is_ok_and(|there| there.st_ino == own.st_ino) {
                let folder = Arc::clone(&self.folder);
                return Ok(Lock {
                    folder,
                    name,
                    _locked: locked,
                });
            }
        }
    }
}

/// A lock of [`Pins::lock`]: it goes with the process, however that ends.
#[derive(Debug)]
pub(crate) struct Lock {
    folder: Arc<OwnedFd>,
    name: OsString,
    _locked: OwnedFd,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is locked still.
        let _ = rustix::fs::unlinkat(&*self.folder, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Opens a folder, which is no link to one, or makes it for this user alone; whether it was made.
fn make_folder(parent: &OwnedFd, name: &OsStr) -> Result<(OwnedFd, bool), Errno> {
    let made = rustix::fs::mkdirat(parent, name, Mode::RWXU);
    let is_new = match made {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(error),
    };
    Ok((open_folder(parent, name)?, is_new))
}

/// Whether a bpffs is mounted where process 1 sees it, which outlives every daemon; also where that cannot be known.
fn stays(bpffs: &std::fs::File) -> bool {
    let (Ok(found), Ok(mounts)) = (
        rustix::fs::fstat(bpffs),
        std::fs::read_to_string("/proc/1/mountinfo"),
    ) else {
        return true;
    };
    // proc_pid_mountinfo(5): the third word of a line is the file system's device.
    let (major, minor) = (rustix::fs::major(found.st_dev), rustix::fs::minor(found.st_dev));
    let device = format!("{major}:{minor}");
    mounts
        .lines()
        .any(|line| line.split(' ').nth(2) == Some(device.as_str()))
}
