//! The kernel interfaces that the loader reaches by itself: `BPF_LINK_CREATE` (aya falls back to an attachment without
//! a link, which would outlive us), pins of objects that aya gives no descriptor of, and one netlink question about an
//! interface.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use lm_cards::netlink;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage, LinkXdp};

const BPF_MAP_CREATE: libc::c_long = 0;
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

/// Makes a map of one value that programs can map (`BPF_MAP_TYPE_ARRAY`, `BPF_F_MMAPABLE`), all zeros: unlike a file it
/// cannot be cut short.
pub(crate) fn create_page(value_len: u32) -> io::Result<OwnedFd> {
    const ARRAY: u32 = 2;
    const MMAPABLE: u32 = 1 << 10;
    #[repr(C)]
    struct MapCreate {
        map_type: u32,
        key_len: u32,
        value_len: u32,
        max_entries: u32,
        flags: u32,
        rest: [u32; 2],
        name: [u8; 16],
    }
    let mut name = [0; 16];
    name[..10].copy_from_slice(b"lm_credits");
    let mut attr = MapCreate {
        map_type: ARRAY,
        key_len: size_of::<u32>() as u32,
        value_len,
        max_entries: 1,
        flags: MMAPABLE,
        rest: [0; 2],
        name,
    };
    // SAFETY: initialised, and nothing in it points anywhere.
    unsafe { bpf_object(BPF_MAP_CREATE, &mut attr) }
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

/// What the kernel says about an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    /// Its Ethernet address; zeros where it has none.
    pub(crate) mac: [u8; 6],
    /// Id of the XDP program attached to it, by whomever.
    pub(crate) xdp_program_id: Option<u32>,
}

/// Asks for one interface of this thread's network namespace. `ENODEV` when there is none with this index.
pub(crate) fn interface(ifindex: u32) -> io::Result<Interface> {
    let mut request = LinkMessage::default();
    request.header.index = ifindex;
    let RouteNetlinkMessage::NewLink(link) = netlink::one(&RouteNetlinkMessage::GetLink(request))? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let mut interface = Interface::default();
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name = name,
            LinkAttribute::Address(mac) => interface.mac = mac.as_slice().try_into().unwrap_or_default(),
            // With programs in several modes there is no IFLA_XDP_PROG_ID, but one attribute per mode.
            LinkAttribute::Xdp(parts) => {
                let mut ids = parts.iter().filter_map(|part| match *part {
                    LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) => Some(id),
                    LinkXdp::SkbProgId(id) | LinkXdp::HwProgId(id) => Some(id),
                    _ => None,
                });
                interface.xdp_program_id = ids.find(|&id| id != 0);
            }
            _ => {}
        }
    }
    Ok(interface)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_a_name() {
        assert_eq!(
            interface(1).unwrap(),
            Interface {
                name: "lo".to_owned(),
                mac: [0; 6],
                xdp_program_id: None
            }
        );
    }

    #[test]
    fn an_interface_that_is_not_there() {
        assert_eq!(
            interface(0x7fff_0000).unwrap_err().raw_os_error(),
            Some(libc::ENODEV)
        );
    }
}
