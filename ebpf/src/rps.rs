//! Whether one CPU alone runs the gate for a queue in generic mode (I3a).
//!
//! In generic mode the program runs in the stack, on whichever CPU the packet was delivered to; two of them at once
//! break the pairing of log and RX ring (118 to 163 of 400,000 entries, measured). Receive packet steering with exactly
//! one CPU in the queue's mask puts all of the queue's packets on that CPU before the program runs (net/core/dev.c,
//! `get_rps_cpu`).

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::raw::{c_int, c_long, c_uint};

const FSCONFIG_CMD_CREATE: c_uint = 6;
const CLOEXEC: c_uint = 1; // FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC

/// The CPU that handles all packets of `queue`, or why that cannot be said.
pub(crate) fn only_cpu(interface: &str, queue: u32) -> Result<u32, String> {
    let path = format!("class/net/{interface}/queues/rx-{queue}/rps_cpus");
    let mask = read(&path).map_err(|error| format!("cannot read {path} in sysfs: {error}"))?;
    let cpus =
        cpus_of_mask(mask.trim()).ok_or_else(|| format!("{path} holds no CPU mask: {:?}", mask.trim()))?;
    match cpus[..] {
        [cpu] => Ok(cpu),
        _ => Err(format!("its RPS mask names {} CPUs instead of one", cpus.len())),
    }
}

/// CPUs in a mask as sysfs writes it: hexadecimal words of 32 bits, the highest first, separated by commas.
fn cpus_of_mask(mask: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for (word, digits) in mask.split(',').rev().enumerate() {
        let bits = u32::from_str_radix(digits, 16).ok()?;
        cpus.extend(
            (0..32)
                .filter(|bit| bits >> bit & 1 == 1)
                .map(|bit| word as u32 * 32 + bit),
        );
    }
    Some(cpus)
}

/// Reads a file of the sysfs that shows this thread's network namespace. `/sys` may show another one, so an instance of
/// our own is made, which is mounted nowhere and goes with its descriptor; without the privilege for that, `/sys` has
/// to do.
fn read(path: &str) -> io::Result<String> {
    let mut text = String::new();
    match detached_sysfs() {
        Ok(root) => open_below(&root, path)?.read_to_string(&mut text)?,
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            File::open(format!("/sys/{path}"))?.read_to_string(&mut text)?
        }
        Err(error) => return Err(error),
    };
    Ok(text)
}

fn detached_sysfs() -> io::Result<OwnedFd> {
    const SYSFS: &CStr = c"sysfs";
    // SAFETY: the name is a C string; the call makes a descriptor.
    let context = unsafe { owned(libc::syscall(libc::SYS_fsopen, SYSFS.as_ptr(), CLOEXEC)) }?;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: FSCONFIG_CMD_CREATE takes neither key nor value.
    let created = unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            context.as_raw_fd(),
            FSCONFIG_CMD_CREATE,
            none,
            none,
            0 as c_int,
        )
    };
    if created != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no pointers; the call makes a descriptor.
    unsafe {
        owned(libc::syscall(
            libc::SYS_fsmount,
            context.as_raw_fd(),
            CLOEXEC,
            0 as c_uint,
        ))
    }
}

fn open_below(root: &OwnedFd, path: &str) -> io::Result<File> {
    let path = CString::new(path)?;
    // SAFETY: the path is a C string; the call makes a descriptor.
    let fd = unsafe {
        owned(c_long::from(libc::openat(
            root.as_raw_fd(),
            path.as_ptr(),
            libc::O_RDONLY | libc::O_CLOEXEC,
        )))
    }?;
    Ok(File::from(fd))
}

/// Takes what a system call returned: a descriptor of its own making, or -1.
///
/// # Safety
///
/// `returned` must be -1 with `errno` set, or a descriptor that nothing else owns.
unsafe fn owned(returned: c_long) -> io::Result<OwnedFd> {
    if returned < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { OwnedFd::from_raw_fd(returned as RawFd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_of_sysfs() {
        assert_eq!(cpus_of_mask("0"), Some(vec![]));
        assert_eq!(cpus_of_mask("2"), Some(vec![1]));
        assert_eq!(cpus_of_mask("3"), Some(vec![0, 1]));
        assert_eq!(cpus_of_mask("00000001,00000000"), Some(vec![32]));
        assert_eq!(cpus_of_mask("ffff,x"), None);
        assert_eq!(cpus_of_mask(""), None);
    }

    #[test]
    fn loopback_is_not_steered() {
        let fault = only_cpu("lo", 0).unwrap_err();
        assert_eq!(fault, "its RPS mask names 0 CPUs instead of one");
        assert!(
            only_cpu("lo", 9)
                .unwrap_err()
                .contains("class/net/lo/queues/rx-9/rps_cpus")
        );
    }
}
