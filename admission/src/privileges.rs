//! What the daemon may do: everything that it needs and nothing else, from its start on.
//!
//! It begins as root, or with the capabilities below. It makes its directories and mounts bpffs, raises its limit of locked memory
//! (kernels before 5.11 charge maps to it), becomes another user if it shall, and keeps four capabilities:
//!
//! | capability | for |
//! |---|---|
//! | CAP_BPF | loading the gate, its maps |
//! | CAP_NET_ADMIN | attaching it; putting sockets into its map; large socket buffers |
//! | CAP_NET_RAW | AF_XDP sockets |
//! | CAP_IPC_LOCK | pinning the programs' memory |

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::process::{Gid, Resource, Rlimit, Uid, getrlimit, setrlimit};

use crate::config::BPFFS;
use crate::pins::Pins;

/// What programs of LM keep of root's power.
pub const KEPT: [Capability; 4] = [
    Capability::CAP_BPF,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_NET_RAW,
    Capability::CAP_IPC_LOCK,
];

/// Checks, as the user that the daemon has become, that it can write its files.
pub(crate) fn check_writable(directories: &[PathBuf]) -> Result<(), String> {
    for directory in directories {
        if let Err(error) = rustix::fs::access(directory, rustix::fs::Access::WRITE_OK) {
            let uid = rustix::process::geteuid();
            let name = directory.display();
            return Err(format!(
                "user {uid} cannot write in {name} ({error}): chown {uid} {name}"
            ));
        }
    }
    Ok(())
}

/// Where users of this machine are (passwd(5)). The C library's own search would load its modules, which crashes a program that is
/// linked statically, as those of the tarball are.
const USERS: &str = "/etc/passwd";

/// Finds a user by name or number.
pub(crate) fn find_user(name: &str) -> Result<(Uid, Gid), String> {
    let users =
        std::fs::read_to_string(USERS).map_err(|error| format!("user: cannot read {USERS}: {error}"))?;
    user_in(&users, name).ok_or_else(|| {
        format!(
            "user: there is no user {name} in {USERS}: make one with `useradd --system {name}`, or name another"
        )
    })
}

fn user_in(users: &str, name: &str) -> Option<(Uid, Gid)> {
    users.lines().find_map(|line| {
        let [its_name, _, uid, gid] = first_fields(line)?;
        let is_it = its_name == name || uid == name;
        // The highest number means none.
        let number = |text: &str| text.parse().ok().filter(|number| *number != u32::MAX);
        is_it.then_some((Uid::from_raw(number(uid)?), Gid::from_raw(number(gid)?)))
    })
}

fn first_fields(line: &str) -> Option<[&str; 4]> {
    let mut fields = line.split(':');
    Some([fields.next()?, fields.next()?, fields.next()?, fields.next()?])
}

/// Whether the capabilities are there.
pub(crate) fn check() -> Result<(), String> {
    let has =
        caps::read(None, CapSet::Permitted).map_err(|error| format!("cannot read capabilities: {error}"))?;
    let missing = KEPT.iter().filter(|capability| !has.contains(capability));
    let missing: Vec<String> = missing.map(ToString::to_string).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} missing: run as root, or by the systemd unit",
            missing.join(", ")
        )),
    }
}

/// Makes the directories and the folder for pins, mounts bpffs where it is absent, and raises the limit of locked memory: what needs root.
/// `files`: what the daemon will write there.
///
/// Where it will be another user it follows no symbolic link and gives that user nothing but what it made itself: what lies in the
/// user's folders is the user's doing.
pub(crate) fn prepare(
    directories: &[PathBuf],
    files: &[PathBuf],
    bpffs: &Path,
    user: Option<(Uid, Gid)>,
) -> Result<Pins, String> {
    // No error: kernels since 5.11 do not look at it.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    let _ = setrlimit(Resource::Memlock, unlimited);
    // Each program takes a handful of descriptors.
    let mut descriptors = getrlimit(Resource::Nofile);
    descriptors.current = descriptors.maximum;
    let _ = setrlimit(Resource::Nofile, descriptors);
    if !is_bpffs(bpffs) {
        let name = bpffs.display();
        let remedy = format!("mount -t bpf -o mode=0700 bpf {name}");
        if bpffs != Path::new(BPFFS) {
            return Err(format!("there is no bpffs at {name}: {remedy}"));
        }
        mount("bpf", bpffs, "bpf", MountFlags::empty(), Some(c"mode=0700"))
            .map_err(|error| format!("cannot mount bpffs at {name} ({error}): {remedy}"))?;
    }
    // What systemd has made for this daemon, and at a restart given back to root with all that is in it (systemd.exec(5)).
    let made = std::env::var_os("RUNTIME_DIRECTORY").unwrap_or_default();
    for directory in std::env::split_paths(&made).filter(|made| directories.contains(made)) {
        if let Some(user) = user {
            hand_over(&directory, files, user)
                .map_err(|error| format!("cannot give {} to the user: {error}", directory.display()))?;
        }
    }
    // Another one that is there may be anybody's, and stays so.
    for directory in directories.iter().filter(|path| path.symlink_metadata().is_err()) {
        let made = match user {
            None => std::fs::create_dir_all(directory).map_err(|error| error.to_string()),
            Some(user) => make_for(directory, user),
        };
        made.map_err(|what| format!("cannot make the directory {}: {what}", directory.display()))?;
    }
    for file in files {
        let found = file.symlink_metadata();
        if found.is_ok_and(|found| !found.is_file()) {
            return Err(format!(
                "{} is no regular file, and no link is followed: remove it",
                file.display()
            ));
        }
    }
    Pins::open(bpffs, user)
}

/// Gives a directory that is root's alone to a user, and those of `files` that are in it and root's: while it is, nothing there can be
/// exchanged.
fn hand_over(directory: &Path, files: &[PathBuf], user: (Uid, Gid)) -> Result<(), Errno> {
    let folder = open_folder(rustix::fs::CWD, directory.as_os_str())?;
    if !is_ours_alone(&folder) {
        return Ok(());
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    for file in files.iter().filter(|file| file.parent() == Some(directory)) {
        let name = file.file_name().unwrap_or_default();
        match rustix::fs::openat(&folder, name, flags, Mode::empty()) {
            Ok(open) if rustix::fs::fstat(&open)?.st_nlink == 1 => give(&open, user)?,
            Ok(_) | Err(Errno::NOENT | Errno::NXIO | Errno::LOOP) => {}
            Err(error) => return Err(error),
        }
    }
    give(&folder, user)
}

/// Makes a directory for a user. It must lie in one that nobody else can change: what is made there cannot be exchanged.
fn make_for(directory: &Path, (uid, gid): (Uid, Gid)) -> Result<(), String> {
    let by_hand = || format!("install -d -o {uid} {}", directory.display());
    let mut folder = open_folder(rustix::fs::CWD, OsStr::new("/")).map_err(|error| error.to_string())?;
    let mut is_new = false;
    for part in directory.components().filter(|part| *part != Component::RootDir) {
        folder = match open_folder(&folder, part.as_os_str()) {
            Ok(found) => found,
            Err(Errno::NOENT) if is_ours_alone(&folder) => {
                is_new = true;
                rustix::fs::mkdirat(&folder, part.as_os_str(), Mode::from_raw_mode(0o755))
                    .and_then(|()| open_folder(&folder, part.as_os_str()))
                    .map_err(|error| error.to_string())?
            }
            Err(Errno::NOENT) => return Err(format!("others can write there: {}", by_hand())),
            Err(Errno::LOOP | Errno::NOTDIR) => {
                let part = part.as_os_str().display();
                return Err(format!(
                    "{part} in it is no directory, and no link is followed: {}",
                    by_hand()
                ));
            }
            Err(error) => return Err(error.to_string()),
        };
    }
    if is_new {
        give(&folder, (uid, gid)).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Opens a directory, which is no link to one.
pub(crate) fn open_folder(parent: impl std::os::fd::AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

/// Whether a directory is this user's, and nobody else can write in it.
pub(crate) fn is_ours_alone(folder: &OwnedFd) -> bool {
    let own = rustix::process::geteuid().as_raw();
    rustix::fs::fstat(folder).is_ok_and(|found| found.st_uid == own && found.st_mode & 0o022 == 0)
}

/// Changes the owner of what is open.
pub(crate) fn give(folder: &OwnedFd, (uid, gid): (Uid, Gid)) -> Result<(), Errno> {
    rustix::fs::fchown(folder, Some(uid), Some(gid))
}

/// Becomes the user, if any, and keeps the four capabilities alone. No other thread may run yet: the kernel does this by thread.
pub(crate) fn drop_rest(user: Option<(Uid, Gid)>) -> Result<(), String> {
    let told = |what: &'static str| move |error: rustix::io::Errno| format!("cannot {what}: {error}");
    close_ways();
    if let Some((uid, gid)) = user {
        rustix::thread::set_keep_capabilities(true).map_err(told("keep capabilities"))?;
        rustix::thread::set_thread_groups(&[gid]).map_err(told("leave groups"))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(told("change the group"))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(told("change the user"))?;
    }
    keep(&KEPT.into_iter().collect())
}

/// Closes the ways to further capabilities, as far as this process may.
pub fn close_ways() {
    // The bounding set needs CAP_SETPCAP, which the unit does not grant and root has.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).unwrap_or(false) {
        for capability in caps::all() {
            // EINVAL for what this kernel does not have.
            let _ = caps::drop(None, CapSet::Bounding, capability);
        }
    }
    let _ = caps::clear(None, CapSet::Ambient);
}

/// Gives up every capability but these for good. No other thread may run yet.
///
/// # Errors
/// One line with the remedy.
pub fn keep(kept: &CapsHashSet) -> Result<(), String> {
    caps::set(None, CapSet::Effective, kept).map_err(told)?;
    caps::set(None, CapSet::Permitted, kept).map_err(told)?;
    caps::clear(None, CapSet::Inheritable).map_err(told)?;
    let forbidden = rustix::thread::set_no_new_privs(true);
    forbidden.map_err(|error| format!("cannot forbid new privileges: {error}; use Linux 6.x"))
}

/// Why capabilities are not given up, in one line with the remedy.
pub fn told(error: CapsError) -> String {
    format!("cannot give up capabilities: {error}; run without the sandbox that forbids it")
}

fn is_bpffs(path: &Path) -> bool {
    const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 == BPF_FS_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        let users = "root:x:0:0:root:/root:/bin/bash\n# \
                     none\n\nlm:x:998:997::/nonexistent:/usr/sbin/nologin\nodd:x:y:1\n";
        let lm = Some((Uid::from_raw(998), Gid::from_raw(997)));
        assert_eq!((user_in(users, "lm"), user_in(users, "998")), (lm, lm));
        assert_eq!((user_in(users, "odd"), user_in(users, "x")), (None, None));
        assert_eq!(user_in(users, ""), None);
    }
}
