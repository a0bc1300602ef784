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
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};

use super::mapping::Mapping;

const LEN: usize = 4096;

/// The counter.
pub(super) struct Pace {
    memory: Mapping,
}

/// Where the files are: no other user can make it.
fn folder() -> PathBuf {
    let own = match rustix::process::geteuid() {
        user if user.is_root() => PathBuf::from("/run"),
        user => PathBuf::from(format!("/run/user/{}", user.as_raw())),
    };
    own.join("lm-bench")
}

fn name(number: u64) -> String {
    format!("pace-{number}")
}

/// Removes the file of this process's runs; there may be none.
pub(crate) fn remove_pace_file() {
    let _none = std::fs::remove_file(folder().join(name(std::process::id().into())));
}

impl Pace {
    /// The counter of the command with this process number.
    pub(super) fn open(number: u64) -> io::Result<Pace> {
        Pace::map(&folder(), &name(number))
    }

    /// Maps the counter in a file. The file is created if need be, and its folder, which must be ours alone: in one where others may
    /// write, the file's name could be theirs, and lead anywhere.
    fn map(folder: &Path, name: &str) -> io::Result<Pace> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(folder, flags | OFlags::DIRECTORY, Mode::empty())?;
        let found = rustix::fs::fstat(&opened)?;
        if found.st_uid != rustix::process::geteuid().as_raw() || found.st_mode & 0o022 != 0 {
            return Err(io::Error::other(format!(
                "others may write in {}, which has to be this user's alone",
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::scratch::Scratch;

    /// In a folder where any user may write, a link lies in the file's place.
    #[test]
    fn a_pace_file_leads_nowhere_else() {
        let scratch = Scratch::new("pace");
        let [everybodys, own, precious] =
            ["everybodys", "own", "precious"].map(|name| scratch.path().join(name));
        fs::write(&precious, [7; 9000]).unwrap();
        for (folder, mode) in [(&everybodys, 0o1777), (&own, 0o700)] {
            fs::create_dir(folder).unwrap();
            fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
            std::os::unix::fs::symlink(&precious, folder.join("link")).unwrap();
        }
        for (folder, name) in [(&everybodys, "link"), (&everybodys, "new"), (&own, "link")] {
            assert!(Pace::map(folder, name).is_err(), "{}", folder.display());
            assert_eq!(fs::read(&precious).unwrap(), [7; 9000]);
        }
        let error = Pace::map(&everybodys, "new").err().unwrap().to_string();
        assert!(error.contains("others may write in"), "{error}");
        assert!(!everybodys.join("new").exists());
        let [one, other] = [(); 2].map(|()| Pace::map(&own, "new").unwrap());
        one.set_count(77);
        assert_eq!(other.count(), 77);
        assert_eq!(fs::metadata(own.join("new")).unwrap().len(), LEN as u64);
    }
}
