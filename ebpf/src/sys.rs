//! The kernel interfaces that the loader reaches by itself: `BPF_LINK_CREATE` (aya falls back to an attachment without
//! a link, which would outlive us), and pins of objects that aya gives no descriptor of.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_XDP: u32 = 37;
/// `XDP_FLAGS_SKB_MODE`: run in the stack, for any driver.
pub(crate) const XDP_GENERIC: u32 = 1 << 1;
/// `XDP_FLAGS_DRV_MODE`: run in the driver.
pub(crate) const XDP_NATIVE: u32 = 1 << 2;

/// The part of `union bpf_attr` that `BPF_LINK_CREATE` reads for XDP, and zeros.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    rest: [u64; 6],
}

/// Attaches a loaded XDP program; closing the descriptor (or dying) detaches it.
pub(crate) fn link_xdp(program: BorrowedFd<'_>, ifindex: u32, flags: u32) -> io::Result<OwnedFd> {
    let mut attr = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        target_ifindex: ifindex,
        attach_type: BPF_XDP,
        flags,
        rest: [0; 6],
    };
    // SAFETY: `attr` is initialised, and nothing in it points anywhere.
    unsafe { bpf_object(BPF_LINK_CREATE, &mut attr) }
}

/// bpf(2).
///
/// # Safety
/// `attr` is initialised and its command's; what it points to is live, and writable where the command writes there.
unsafe fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: by the caller's promise; the size is the attribute's.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attr),
            size_of::<T>() as libc::c_uint,
        )
    };
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A command of bpf(2) that gives a descriptor.
///
/// # Safety
/// As [`bpf`].
unsafe fn bpf_object<T>(command: libc::c_long, attr: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: by the caller's promise.
    let fd = unsafe { bpf(command, attr) }?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// The part of `union bpf_attr` that `BPF_OBJ_PIN` and `BPF_OBJ_GET` read.
#[repr(C)]
struct ObjectPath {
    path: u64,
    fd: u32,
    flags: u32,
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Pins a BPF object at a path in a bpffs.
pub(crate) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = ObjectPath {
        path: path.as_ptr().addr() as u64,
        fd: object.as_raw_fd() as u32,
        flags: 0,
    };
    // SAFETY: the path lives across the call and ends with a zero.
    unsafe { bpf(BPF_OBJ_PIN, &mut attr) }.map(|_| ())
}

/// Opens a pinned BPF object.
pub(crate) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = ObjectPath {
        path: path.as_ptr().addr() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: the path lives across the call and ends with a zero.
    unsafe { bpf_object(BPF_OBJ_GET, &mut attr) }
}

/// Index of the interface that an XDP link is attached to; 0 when that is gone.
pub(crate) fn link_interface(link: BorrowedFd<'_>) -> io::Result<u32> {
    #[repr(C)]
    struct InfoByFd {
        fd: u32,
        info_len: u32,
        info: u64,
    }
    // `struct bpf_link_info`: type, id, program's id, padding, and for XDP the interface's index.
    let mut info = [0u32; 16];
    let mut attr = InfoByFd {
        fd: link.as_raw_fd() as u32,
        info_len: size_of_val(&info) as u32,
        info: info.as_mut_ptr().expose_provenance() as u64,
    };
    // SAFETY: `info` is writable for the length given, and any bytes are a value.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info[4])
}

/// Runs an XDP program once on a frame (`BPF_PROG_TEST_RUN`), with `metadata` as its `struct xdp_md`; returns the
/// action.
pub(crate) fn test_run(program: BorrowedFd<'_>, frame: &[u8], metadata: &[u32; 6]) -> io::Result<u32> {
    #[repr(C)]
    struct TestRun {
        program: u32,
        action: u32,
        frame_len: u32,
        out_len: u32,
        frame: u64,
        out: u64,
        repeat: u32,
        duration: u32,
        metadata_len: u32,
        metadata_out_len: u32,
        metadata: u64,
        metadata_out: u64,
    }
    let mut attr = TestRun {
        program: program.as_raw_fd() as u32,
        action: 0,
        frame_len: frame.len() as u32,
        out_len: 0,
        frame: frame.as_ptr().addr() as u64,
        out: 0,
        repeat: 1,
        duration: 0,
        metadata_len: size_of_val(metadata) as u32,
        metadata_out_len: 0,
        metadata: metadata.as_ptr().addr() as u64,
        metadata_out: 0,
    };
    // SAFETY: frame and metadata live across the call and are as long as said; the kernel writes into `attr` itself.
    unsafe { bpf(BPF_PROG_TEST_RUN, &mut attr) }?;
    Ok(attr.action)
}

/// Sets the value of a map at a key, both of four bytes.
pub(crate) fn update_map(map: BorrowedFd<'_>, key: u32, value: u32) -> io::Result<()> {
    #[repr(C)]
    struct Update {
        map: u32,
        padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let mut attr = Update {
        map: map.as_raw_fd() as u32,
        padding: 0,
        key: (&raw const key).addr() as u64,
        value: (&raw const value).addr() as u64,
        flags: 0,
    };
    // SAFETY: key and value live across the call and are as long as the map's.
    unsafe { bpf(BPF_MAP_UPDATE_ELEM, &mut attr) }.map(|_| ())
}
