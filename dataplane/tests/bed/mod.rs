//! Test beds: network namespaces without names, veth pairs between them, and a tiny XDP program.
//!
//! A namespace lives as long as its descriptor, so it is gone after a panic, Ctrl-C or `kill -9` as well, together with
//! the devices in it.
#![allow(dead_code, unreachable_pub)] // each test program has its own copy and uses a part

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

/// Whether namespaces and XDP are to be had; prints why not. A skipped test is an error where `CI` is `true`.
pub fn root() -> bool {
    // SAFETY: geteuid(2) takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        return true;
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "CI must run these tests as root"
    );
    println!("SKIPPED: needs root for network namespaces and AF_XDP");
    false
}

/// Runs `waiting` on a thread of its own and `then` when that thread is blocked in the kernel (or through with it already).
pub fn while_waiting<T: Send>(waiting: impl FnOnce() -> T + Send, then: impl FnOnce()) -> T {
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let thread = scope.spawn(move || {
            tell.send(rustix::thread::gettid()).expect("somebody listens");
            waiting()
        });
        let stat = format!(
            "/proc/self/task/{}/stat",
            told.recv().expect("a thread's id").as_raw_nonzero()
        );
        // The state stands behind the name, which may contain anything but ends with the last parenthesis (proc(5)).
        let is_blocked = || {
            std::fs::read_to_string(&stat)
                .is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_blocked() && !thread.is_finished() {
            assert!(Instant::now() < deadline, "it neither waits nor ends");
            std::thread::yield_now();
        }
        then();
        thread.join().expect("no panic")
    })
}

/// A network namespace.
#[derive(Debug)]
pub struct Namespace(File);

impl Namespace {
    pub fn new() -> Namespace {
        let open = || {
            // SAFETY: unshare(2) takes no pointers; the thread ends right after.
            let unshared = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(unshared, 0, "{}", io::Error::last_os_error());
            File::open("/proc/thread-self/ns/net").expect("the thread's namespace")
        };
        let file = std::thread::scope(|scope| scope.spawn(open).join().expect("a namespace"));
        let namespace = Namespace(file);
        namespace.ip("link set lo up");
        namespace
    }

    /// Runs `f` on a thread inside the namespace; sockets opened there stay there.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let inside = || {
            // SAFETY: setns(2) takes no pointers and changes this thread alone.
            let entered = unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(entered, 0, "{}", io::Error::last_os_error());
            f()
        };
        std::thread::scope(|scope| match scope.spawn(inside).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// Runs `ip WORDS` inside.
    pub fn ip(&self, words: &str) {
        self.command("ip", words);
    }

    pub fn command(&self, program: &str, words: &str) {
        let run = || Command::new(program).args(words.split_whitespace()).output();
        let output = self.run(run).unwrap_or_else(|error| panic!("{program}: {error}"));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {words}: {error}");
    }

    /// Runs `ip WORDS` inside; whether it succeeded.
    pub fn try_ip(&self, words: &str) -> bool {
        let run = || Command::new("ip").args(words.split_whitespace()).output();
        self.run(run).expect("ip").status.success()
    }

    /// A path that names the namespace to child processes.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// Two hosts on a link: `va` 10.77.0.1/24 in `a`, `vb` 10.77.0.2/24 in `b`.
#[derive(Debug)]
pub struct Pair {
    pub a: Namespace,
    pub b: Namespace,
}

impl Pair {
    pub fn new(queues: u32) -> Pair {
        let pair = Pair {
            a: Namespace::new(),
            b: Namespace::new(),
        };
        let queues = format!("numrxqueues {queues} numtxqueues {queues}");
        pair.a.ip(&format!(
            "link add va {queues} type veth peer name vb {queues} netns {}",
            pair.b.path()
        ));
        for (namespace, device, address) in [(&pair.a, "va", "10.77.0.1"), (&pair.b, "vb", "10.77.0.2")] {
            // Without IPv6 the link is silent: no packet but a test's own.
            namespace.ip(&format!("link set {device} addrgenmode none"));
            namespace.ip(&format!("address add {address}/24 dev {device}"));
            namespace.ip(&format!("link set {device} up"));
        }
        // The kernel gives the devices their queueing disciplines from a work item; before it, what is sent is lost.
        for (namespace, device) in [(&pair.a, "va"), (&pair.b, "vb")] {
            let deadline = Instant::now() + Duration::from_secs(20);
            let show = || {
                Command::new("ip")
                    .args(["link", "show", device])
                    .output()
                    .expect("ip")
                    .stdout
            };
            while !String::from_utf8_lossy(&namespace.run(show)).contains("state UP") {
                assert!(Instant::now() < deadline, "{device} does not come up");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        pair
    }
}

/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE` of `linux/if_link.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Generic = 2,
    Native = 4,
}

/// An XDP program that redirects every packet to the XSK of its queue, and its map; detached on drop.
#[derive(Debug)]
pub struct RedirectAll {
    map: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
}

const QUEUES: u32 = 16;

impl RedirectAll {
    /// Attaches to the interface, which is one of the calling thread's namespace.
    pub fn attach(interface_index: u32, mode: Mode) -> RedirectAll {
        const XSKMAP: u32 = 17;
        let map = bpf(0, &[XSKMAP, 4, 4, QUEUES]); // BPF_MAP_CREATE: type, key, value, entries
        let instructions: [u64; 6] = [
            0x0010_1261,                             // r2 = *(u32 *)(r1 + 16), xdp_md.rx_queue_index
            0x1118 | (map.as_raw_fd() as u64) << 32, // r1 = map, first half
            0,                                       // second half
            0x0000_03b7 | 2 << 32,                   // r3 = XDP_PASS, where there is no socket
            0x0000_0085 | 51 << 32,                  // call bpf_redirect_map
            0x0000_0095,                             // exit
        ];
        let license = CString::new("GPL").expect("no zero inside");
        let mut load = [0_u32; 20];
        load[0] = 6; // BPF_PROG_TYPE_XDP
        load[1] = instructions.len() as u32;
        set_pointer(&mut load[2..4], instructions.as_ptr().addr());
        set_pointer(&mut load[4..6], license.as_ptr().addr());
        load[17] = 37; // expected_attach_type BPF_XDP, at byte 68
        let program = bpf(5, &load);
        let link = bpf(
            28,
            &[program.as_raw_fd() as u32, interface_index, 37, mode as u32],
        ); // BPF_LINK_CREATE
        RedirectAll {
            map,
            _program: program,
            _link: link,
        }
    }

    pub fn register(&self, queue: u32, xsk: &impl AsRawFd) {
        let fd = xsk.as_raw_fd() as u32;
        let mut update = [0_u32; 8];
        update[0] = self.map.as_raw_fd() as u32;
        set_pointer(&mut update[2..4], (&raw const queue).addr());
        set_pointer(&mut update[4..6], (&raw const fd).addr());
        // BPF_MAP_UPDATE_ELEM
        assert_eq!(raw_bpf(2, &update), 0, "{}", io::Error::last_os_error());
    }
}

/// Writes an address into two halves of a `union bpf_attr`.
pub fn set_pointer(halves: &mut [u32], address: usize) {
    halves[0] = address as u32;
    halves[1] = (address as u64 >> 32) as u32;
}

pub fn raw_bpf(command: libc::c_int, attributes: &[u32]) -> libc::c_long {
    // SAFETY: the attributes are live, of the length given, and the pointers in them point to live data of the callers.
    unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            attributes.as_ptr(),
            size_of_val(attributes),
        )
    }
}

/// A `bpf(2)` command that returns a descriptor.
pub fn bpf(command: libc::c_int, attributes: &[u32]) -> OwnedFd {
    let fd = raw_bpf(command, attributes);
    assert!(fd >= 0, "bpf({command}): {}", io::Error::last_os_error());
    // SAFETY: bpf(2) just returned the descriptor, and nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

/// Writes a file of the sysfs that shows the calling thread's network namespace.
pub fn write_sysfs(path: &str, value: &str) {
    // The mount is private to the shell's mount namespace.
    let script = format!("mount -t sysfs lm-test /sys && echo {value} > /sys/{path}");
    let output = Command::new("unshare").args(["-m", "sh", "-c", &script]).output();
    let output = output.expect("util-linux");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{path}: {error}");
}

/// Takes a capability from the calling thread alone (capabilities(7)).
pub fn drop_capability(number: u32) {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0]; // and the calling thread
    let mut sets = [[0_u32; 3]; 2]; // effective, permitted, inheritable; low and high halves
    // SAFETY: header and sets have the layout of version 3 of these calls and are live; only this thread changes.
    unsafe {
        assert_eq!(
            libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()),
            0
        );
        sets[number as usize / 32][0] &= !(1 << (number % 32));
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}
