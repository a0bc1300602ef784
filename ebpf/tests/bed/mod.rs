//! Test bed: a thread with a network namespace of its own, veth pairs in it, and bare AF_XDP sockets.
//!
//! The namespace has no name and goes with its thread, also after a panic or a signal: nothing is left to clean up.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use lm_ebpf::{AttachMode, Gate, GateConfig};

pub(crate) mod btf;
pub(crate) mod foreign;
pub(crate) mod packet;
pub(crate) mod pair;
pub(crate) mod random;
pub(crate) mod xsk;

/// Runs `test` in a fresh network namespace on a thread of its own; without the privilege for that, says so and skips,
/// which is an error in CI.
pub(crate) fn in_namespace(test: impl FnOnce() + Send + 'static) {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: needs root for network namespaces and XDP");
        assert_ne!(
            std::env::var("CI").as_deref(),
            Ok("true"),
            "CI must not skip this test"
        );
        return;
    }
    let outcome = std::thread::spawn(move || {
        // SAFETY: gives this thread a network namespace of its own; no memory is passed.
        let unshared = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(unshared, 0, "unshare: {}", io::Error::last_os_error());
        test();
    })
    .join();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Runs `ip` in this thread's namespace.
pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .expect("iproute2 is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {error}");
}

/// Makes a veth pair `veth0`-`veth1` with two queues each, both up, and returns the indices.
pub(crate) fn veth_pair() -> (u32, u32) {
    ip("link add veth0 numrxqueues 2 numtxqueues 2 type veth peer name veth1 numrxqueues 2 numtxqueues 2");
    ip("link set veth0 up");
    ip("link set veth1 up");
    (ifindex("veth0"), ifindex("veth1"))
}

pub(crate) fn ifindex(name: &str) -> u32 {
    let name = std::ffi::CString::new(name).expect("a name without zeros");
    // SAFETY: a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// Attaches a gate where another one was just dropped. The kernel removes an unpinned link a moment after its last user
/// went, and a child that another test is starting holds a copy of its descriptor until it runs its program.
pub(crate) fn attach_once_free(ifindex: u32, config: &GateConfig, mode: AttachMode) -> Gate {
    let start = Instant::now();
    loop {
        match Gate::attach(ifindex, config, mode) {
            Ok(gate) => return gate,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An AF_XDP socket without memory: enough to be in an XSKMAP.
pub(crate) fn bare_xsk() -> OwnedFd {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "AF_XDP socket: {}", io::Error::last_os_error());
    // SAFETY: just made, owned by nobody else.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Keeps this thread on one CPU.
pub(crate) fn pin_to(cpu: usize) {
    // SAFETY: a set of bits; zero is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` is below the set's size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: an initialised set of this length. On a machine with fewer CPUs the thread stays where it is.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
}
