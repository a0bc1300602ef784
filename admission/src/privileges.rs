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

use std::path::{Path, PathBuf};

use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{Gid, Uid, chown};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const KEPT: [Capability; 4] = [
    Capability::CAP_BPF,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_NET_RAW,
    Capability::CAP_IPC_LOCK,
];

/// Where the kernel keeps what outlives a program.
const BPFFS: &str = "/sys/fs/bpf";

/// Where the gates of a daemon are pinned that runs as this user: each user has a folder of its own.
pub(crate) fn pins(user: Option<(Uid, Gid)>) -> PathBuf {
    let all = Path::new(BPFFS).join("lm");
    match user {
        Some((uid, _)) => all.join(format!("user-{uid}")),
        None => all,
    }
}

/// Checks, as the user that the daemon has become, that it can write its files.
pub(crate) fn check_writable(directories: &[PathBuf]) -> Result<(), String> {
    for directory in directories {
        if let Err(error) = rustix::fs::access(directory, rustix::fs::Access::WRITE_OK) {
            let uid = Uid::effective();
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
        let number = |text: &str| text.parse().ok();
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
    let missing: Vec<String> = KEPT
        .iter()
        .filter(|capability| !has.contains(capability))
        .map(ToString::to_string)
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} missing: run as root, or by the systemd unit",
            missing.join(", ")
        )),
    }
}

/// Makes the directories, mounts bpffs where it is absent, and raises the limit of locked memory: what needs root.
pub(crate) fn prepare(
    directories: &[PathBuf],
    files: &[PathBuf],
    user: Option<(Uid, Gid)>,
) -> Result<(), String> {
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
    if !is_bpffs(Path::new(BPFFS)) {
        mount("bpf", BPFFS, "bpf", MountFlags::empty(), None)
            .map_err(|error| format!("cannot mount bpffs at {BPFFS} ({error}): mount -t bpf bpf {BPFFS}"))?;
    }
    let (uid, gid) = user.unwrap_or((Uid::current(), Gid::current()));
    let give = |path: &Path| {
        // Nothing to ask for where it is so already: changing owners is another privilege.
        let stat = rustix::fs::stat(path);
        if stat.is_ok_and(|found| found.st_uid == uid.as_raw() && found.st_gid == gid.as_raw()) {
            return Ok(());
        }
        let given = chown(path, Some(uid), Some(gid));
        given.map_err(|error| format!("cannot give {} to the user: {error}", path.display()))
    };
    let make = |directory: &Path| {
        std::fs::create_dir_all(directory)
            .map_err(|error| format!("cannot make the directory {}: {error}", directory.display()))
    };
    for directory in directories {
        // One that is there may be anybody's, and stays so.
        if !directory.exists() {
            make(directory)?;
            give(directory)?;
        }
    }
    // What a daemon of another user may have left.
    files
        .iter()
        .filter(|file| file.exists())
        .try_for_each(|file| give(file))?;
    let pins = pins(user);
    make(&pins)?;
    if user.is_some() {
        give(&pins)?;
    }
    Ok(())
}

/// Becomes the user, if any, and keeps the four capabilities alone. No other thread may run yet: the kernel does this by thread.
pub(crate) fn drop_rest(user: Option<(Uid, Gid)>) -> Result<(), String> {
    let told = |what: &'static str| move |error: rustix::io::Errno| format!("cannot {what}: {error}");
    let caps_told = |error: caps::errors::CapsError| format!("cannot drop capabilities: {error}");
    let kept: CapsHashSet = KEPT.into_iter().collect();
    // The bounding set needs CAP_SETPCAP, which the unit does not grant and root has.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).unwrap_or(false) {
        for capability in caps::all() {
            // EINVAL for what this kernel does not have.
            let _ = caps::drop(None, CapSet::Bounding, capability);
        }
    }
    if let Some((uid, gid)) = user {
        let gid = rustix::thread::Gid::from_raw(gid.as_raw());
        let uid = rustix::thread::Uid::from_raw(uid.as_raw());
        rustix::thread::set_keep_capabilities(true).map_err(told("keep capabilities"))?;
        rustix::thread::set_thread_groups(&[gid]).map_err(told("leave groups"))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(told("change the group"))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(told("change the user"))?;
    }
    let _ = caps::clear(None, CapSet::Ambient);
    caps::set(None, CapSet::Effective, &kept).map_err(caps_told)?;
    caps::set(None, CapSet::Permitted, &kept).map_err(caps_told)?;
    caps::clear(None, CapSet::Inheritable).map_err(caps_told)?;
    rustix::thread::set_no_new_privs(true).map_err(told("forbid new privileges"))?;
    Ok(())
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
        let users = "root:x:0:0:root:/root:/bin/bash\n# none\n\nlm:x:998:997::/nonexistent:/usr/sbin/nologin\nodd:x:y:1\n";
        let lm = Some((Uid::from_raw(998), Gid::from_raw(997)));
        assert_eq!((user_in(users, "lm"), user_in(users, "998")), (lm, lm));
        assert_eq!((user_in(users, "odd"), user_in(users, "x")), (None, None));
        assert_eq!(user_in(users, ""), None);
    }
}
