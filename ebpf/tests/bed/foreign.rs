//! Somebody else's XDP program: passes everything.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PROG_LOAD: i64 = 5;
const OBJ_GET_INFO_BY_FD: i64 = 15;
const LINK_CREATE: i64 = 28;
const LINK_DETACH: i64 = 34;

pub(crate) struct Program {
    program: OwnedFd,
    link: OwnedFd,
}

/// bpf(2) with an attribute of 32-bit words that makes a descriptor or returns 0.
fn bpf(command: i64, attr: &mut [u64]) -> i64 {
    // SAFETY: `attr` is initialised and as long as said; pointers in it are the callers', who keep them alive.
    let returned = unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_mut_ptr(), size_of_val(attr)) };
    assert!(
        returned >= 0,
        "bpf command {command}: {}",
        io::Error::last_os_error()
    );
    returned
}

fn words(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl Program {
    /// Loads and attaches it; detached on drop. `flags`: the mode, `XDP_FLAGS_*_MODE`.
    pub(crate) fn attach(ifindex: u32, name: &str, flags: u32) -> Program {
        // r0 = XDP_PASS; exit
        let instructions: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];
        let license = c"GPL";
        let mut padded = [0u8; 16];
        padded[..name.len()].copy_from_slice(name.as_bytes());
        let name = padded.map(u64::from);
        let half = |at: usize| (0..8).fold(0, |word, byte| word | name[at + byte] << (8 * byte));
        // prog_type XDP, insn_cnt; insns; license; log; kern_version, prog_flags; prog_name; prog_ifindex,
        // expected_attach_type
        let mut load = [
            words(6, 2),
            instructions.as_ptr() as u64,
            license.as_ptr() as u64,
            0,
            0,
            0,
            half(0),
            half(8),
            words(0, 37),
        ];
        let fd = bpf(PROG_LOAD, &mut load);
        // SAFETY: just made, owned by nobody else.
        let program = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let fd = bpf(
            LINK_CREATE,
            &mut [words(fd as u32, ifindex), words(37, flags), 0, 0],
        );
        // SAFETY: as above.
        let link = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        Program { program, link }
    }

    pub(crate) fn id(&self) -> u32 {
        let mut info = [0u32; 2]; // type, id
        bpf(
            OBJ_GET_INFO_BY_FD,
            &mut [
                words(self.program.as_raw_fd() as u32, size_of_val(&info) as u32),
                info.as_mut_ptr() as u64,
            ],
        );
        info[1]
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Closing is not enough at once: a child that another test is starting holds a copy until it runs its program.
        bpf(LINK_DETACH, &mut [words(self.link.as_raw_fd() as u32, 0)]);
    }
}
