//! One host of a bed: a network namespace, entered by threads and programs.

use std::ffi::CStr;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use anyhow::{Context, Result};
use lm_cards::ethtool::Ethtool;
use rustix::fs::{CWD, statfs};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount,
    open_tree,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use super::program::{Launch, Program};
use super::{INTERFACE, ip};

/// Where `ip netns` keeps its namespaces.
pub(super) const NAMESPACE_DIR: &str = "/run/netns";

/// A host of a [`Bed`](super::Bed).
#[derive(Debug)]
pub struct Host {
    name: String,
    address: Ipv4Addr,
}

impl Host {
    pub(super) fn new(name: String, address: Ipv4Addr) -> Host {
        Host { name, address }
    }

    /// The namespace's name, as `ip netns exec` takes it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address of [`INTERFACE`] on this host.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    pub(super) fn open(&self) -> Result<File> {
        let path = Path::new(NAMESPACE_DIR).join(&self.name);
        File::open(&path).with_context(|| format!("cannot open the namespace {}", path.display()))
    }

    /// Runs `work` on a thread of its own inside this host, with this host's `/sys`. Sockets it opens stay in
    /// this host wherever they are used later.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = self.open()?;
        std::thread::scope(|scope| {
            let entered = scope.spawn(|| {
                enter_namespace(namespace.as_fd()).context("cannot enter the namespace")?;
                work()
            });
            entered
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Starts a program in this host.
    pub fn spawn(&self, launch: Launch) -> Result<Program> {
        launch.spawn_in(Some(self))
    }

    /// Starts a program in it, and waits until that has said `text`.
    pub fn spawn_until(&self, launch: Launch, text: &str) -> Result<Program> {
        let mut program = self.spawn(launch)?;
        program.await_text(text)?;
        Ok(program)
    }

    /// Writes a setting under `/sys` or `/proc/sys` as this host sees it.
    pub fn write_file(&self, path: &str, value: &str) -> Result<()> {
        self.enter(|| {
            std::fs::write(path, value).with_context(|| format!("cannot write {value:?} to {path}"))
        })
    }

    /// Reads a file under `/sys` or `/proc` as this host sees it, without the white space at its end.
    pub fn read_file(&self, path: &str) -> Result<String> {
        self.enter(|| {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
            Ok(text.trim_end().to_owned())
        })
    }

    /// Runs `ip` commands in it, one a line.
    pub(super) fn ip(&self, commands: &[String]) -> Result<()> {
        ip::batch(Some(&self.name), commands)
    }

    /// Switches interface features by the names that `ethtool -k` shows, for example `("rx-gro", true)`.
    pub fn set_features(&self, wanted: &[(&str, bool)]) -> Result<()> {
        self.enter(|| set_features(INTERFACE, wanted))
    }

    /// Switches everything on or off that lets several packets travel as one through the stack (TSO, GSO, GRO…).
    pub fn switch_segmentation_offloads(&self, interface: &str, on: bool) -> Result<()> {
        self.enter(|| {
            let features = card(interface)?.features()?;
            let joining = features
                .iter()
                .filter(|feature| feature.changeable && joins_packets(&feature.name));
            let wanted: Vec<_> = joining.map(|feature| (&*feature.name, on)).collect();
            set_features(interface, &wanted)
        })
    }

    /// Packets that came in on each receive queue of the veth interface while an XDP program was attached to it.
    pub fn queue_packets(&self) -> Result<Vec<u64>> {
        let statistics = self.enter(|| Ok(card(INTERFACE)?.statistics()?))?;
        // veth_get_strings in drivers/net/veth.c, by queue.
        let of_queues = statistics
            .into_iter()
            .filter(|(name, _)| name.starts_with("rx_queue_") && name.ends_with("_xdp_packets"));
        Ok(of_queues.map(|(_, packets)| packets).collect())
    }

    /// Whether an XDP program is attached to the interface, as `ip link` shows it.
    pub fn has_xdp_program(&self) -> Result<bool> {
        let mut show = ip::iproute2("ip");
        let output = show
            .args(["-n", &self.name, "-d", "link", "show", INTERFACE])
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).contains("prog/xdp"))
    }
}

fn set_features(interface: &str, wanted: &[(&str, bool)]) -> Result<()> {
    let set = card(interface)?.set_features(wanted);
    set.with_context(|| format!("{interface}: {wanted:?}"))
}

/// The card behind an interface of the calling thread's network namespace.
fn card(interface: &str) -> Result<Ethtool> {
    Ethtool::named(interface).with_context(|| format!("cannot ask for {interface}"))
}

/// Whether a feature of that name lets several packets cross the stack as one: segmentation on the way out, receive
/// coalescing on the way in.
pub fn joins_packets(name: &str) -> bool {
    name.ends_with("-segmentation")
        || name.starts_with("tx-gso-")
        || name.starts_with("rx-gro")
        || name == "rx-udp-gro-forwarding"
        || name == "rx-lro"
}

/// A CPU mask as sysfs takes it: groups of 32 bits, hexadecimal, separated by commas.
pub(super) fn cpu_mask(mask: u64) -> String {
    if mask >> 32 == 0 {
        format!("{mask:x}")
    } else {
        format!("{:x},{:08x}", mask >> 32, mask & 0xffff_ffff)
    }
}

/// Moves the calling thread (or the only thread of a forked child) into a network namespace, with a `/sys` that
/// shows it, as `ip netns exec` does, but with the machine's bpffs still in it: what is pinned there outlives whoever
/// pinned it. Allocates nothing, so it may run between `fork` and `exec`.
pub(super) fn enter_namespace(namespace: BorrowedFd<'_>) -> std::io::Result<()> {
    const ROOT: &CStr = c"/";
    const SYS: &CStr = c"/sys";
    const SYSFS: &CStr = c"sysfs";
    const BPFFS: &CStr = c"/sys/fs/bpf";
    const BPF_FS_MAGIC: u64 = 0xcafe_4a11; // include/uapi/linux/magic.h
    move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
    // SAFETY: `unshare_unsafe` is unsafe because CLONE_FILES and CLONE_FS can surprise code that shares
    // descriptors or the working folder between threads. CLONE_NEWNS implies CLONE_FS only: this thread gets its
    // own working folder and umask, equal to the old ones, and nothing here relies on changing the shared ones.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    // Without this the mount below would spread to the machine's own mount namespace.
    mount_change(
        ROOT,
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )?;
    let bpffs = match statfs(BPFFS) {
        Ok(found) if found.f_type as u64 == BPF_FS_MAGIC => {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            Some(open_tree(CWD, BPFFS, flags)?)
        }
        _ => None,
    };
    // sysfs shows the interfaces of the namespace it was mounted from: put a new one over the old.
    mount(
        SYSFS,
        SYS,
        SYSFS,
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
        None,
    )?;
    if let Some(bpffs) = bpffs {
        move_mount(bpffs, c"", CWD, BPFFS, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_written_in_groups_of_32_bits() {
        assert_eq!(cpu_mask(0), "0");
        assert_eq!(cpu_mask(0b10), "2");
        assert_eq!(cpu_mask(1 << 32), "1,00000000");
        assert_eq!(cpu_mask(u64::MAX), "ffffffff,ffffffff");
    }
}
