//! The XDP programs of the cases, as raw instructions: no compiler is needed to test.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::bed::{self, Mode, bpf, set_pointer};

/// What a program does before it redirects to a socket, and to which.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Redirects to socket 0.
    Redirect,
    /// Drops every second packet; the others go to socket 0.
    DropEveryOther,
    /// To the socket that the destination's MAC address names.
    ByDestination,
    /// Puts 32 bytes of metadata before each packet: a count.
    Metadata,
    /// Changes each packet's length by so many bytes; where the kernel will not, the packet stays as it is, and
    /// [`Program::cell`] holds the kernel's last refusal.
    AdjustTail(i32),
}

/// An attached program with its sockets and its one variable; detached on drop.
pub struct Program {
    sockets: OwnedFd,
    cell: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
}

// Map and program types, attach type, flags and helper functions by the numbers of `linux/bpf.h`.
const MAP_CREATE: i32 = 0;
const MAP_LOOKUP: i32 = 1;
const MAP_UPDATE: i32 = 2;
const PROG_LOAD: i32 = 5;
const LINK_CREATE: i32 = 28;
const MAP_ARRAY: u32 = 2;
const MAP_XSK: u32 = 17;
const PROG_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const HAS_FRAGS: u32 = 1 << 5;
const REDIRECT_MAP: i32 = 51;
const ADJUST_META: i32 = 54;
const ADJUST_TAIL: i32 = 65;
const XDP_DROP: i32 = 1;
const SOCKETS: u32 = 2;

/// One instruction: operation, registers, offset of a jump or an access, constant.
const fn op(code: u8, to: u8, from: u8, offset: i16, constant: i32) -> u64 {
    code as u64
        | (to as u64) << 8
        | (from as u64) << 12
        | (offset as u16 as u64) << 16
        | (constant as u32 as u64) << 32
}
const fn set(to: u8, constant: i32) -> u64 {
    op(0xb7, to, 0, 0, constant)
}
const fn copy(to: u8, from: u8) -> u64 {
    op(0xbf, to, from, 0, 0)
}
const fn add(to: u8, constant: i32) -> u64 {
    op(0x07, to, 0, 0, constant)
}
const fn load32(to: u8, from: u8, offset: i16) -> u64 {
    op(0x61, to, from, offset, 0)
}
const fn load64(to: u8, from: u8) -> u64 {
    op(0x79, to, from, 0, 0)
}
const fn store64(to: u8, from: u8) -> u64 {
    op(0x7b, to, from, 0, 0)
}
const fn if_equal(register: u8, constant: i32, skip: i16) -> u64 {
    op(0x15, register, 0, skip, constant)
}
const fn if_above(register: u8, other: u8, skip: i16) -> u64 {
    op(0x2d, register, other, skip, 0)
}
const fn call(function: i32) -> u64 {
    op(0x85, 0, 0, 0, function)
}
const EXIT: u64 = 0x95;

/// The address of a map (`kind` 1) or of an array's first value (`kind` 2): two instructions.
fn address_of(to: u8, map: &OwnedFd, kind: u8) -> [u64; 2] {
    [op(0x18, to, kind, 0, map.as_raw_fd()), 0]
}

fn instructions(kind: Kind, sockets: &OwnedFd, cell: &OwnedFd) -> Vec<u64> {
    let [map, map_rest] = address_of(1, sockets, 1);
    let [count, count_rest] = address_of(1, cell, 2);
    let drop = [set(0, XDP_DROP), EXIT];
    let redirect_to_key_in_r2 = [map, map_rest, set(3, XDP_DROP), call(REDIRECT_MAP), EXIT];
    let mut code = match kind {
        Kind::Redirect => vec![set(2, 0)],
        Kind::DropEveryOther => vec![
            count,
            count_rest,
            load64(2, 1),
            copy(3, 2),
            add(3, 1),
            store64(1, 3),
            op(0x57, 2, 0, 0, 1), // r2 &= 1
            if_equal(2, 0, 2),
            drop[0],
            drop[1],
            // r2 is 0: the key
        ],
        Kind::ByDestination => vec![
            load32(2, 1, 0), // xdp_md.data
            load32(3, 1, 4), // xdp_md.data_end
            copy(4, 2),
            add(4, 14),
            if_above(4, 3, 3),    // to the drop
            op(0x71, 2, 2, 5, 0), // r2 = the destination's last byte
            op(0x77, 2, 0, 0, 1), // r2 >>= 1
            op(0x05, 0, 0, 2, 0), // over the drop
            drop[0],
            drop[1],
        ],
        Kind::Metadata => vec![
            copy(6, 1),
            set(2, -32),
            call(ADJUST_META),
            if_equal(0, 0, 2),
            drop[0],
            drop[1],
            load32(2, 6, 8), // xdp_md.data_meta
            load32(3, 6, 0),
            copy(4, 2),
            add(4, 32),
            if_above(4, 3, -7), // to the drop
            count,
            count_rest,
            load64(5, 1),
            store64(2, 5),
            add(5, 1),
            store64(1, 5),
            set(2, 0),
        ],
        Kind::AdjustTail(bytes) => vec![
            set(2, bytes),
            call(ADJUST_TAIL),
            if_equal(0, 0, 3), // over the note
            count,
            count_rest,
            store64(1, 0),
            set(2, 0),
        ],
    };
    code.extend(redirect_to_key_in_r2);
    code
}

impl Program {
    /// Attaches to the interface, which is one of the calling thread's namespace.
    pub fn attach(interface_index: u32, mode: Mode, kind: Kind) -> Program {
        let sockets = bpf(MAP_CREATE, &[MAP_XSK, 4, 4, SOCKETS]); // type, key, value, entries
        let cell = bpf(MAP_CREATE, &[MAP_ARRAY, 4, 8, 1]);
        let instructions = instructions(kind, &sockets, &cell);
        let license = CString::new("GPL").expect("no zero inside");
        let mut load = [0_u32; 20];
        load[0] = PROG_XDP;
        load[1] = instructions.len() as u32;
        set_pointer(&mut load[2..4], instructions.as_ptr().addr());
        set_pointer(&mut load[4..6], license.as_ptr().addr());
        load[11] = HAS_FRAGS; // prog_flags, at byte 44
        load[17] = ATTACH_XDP; // expected_attach_type, at byte 68
        let program = bpf(PROG_LOAD, &load);
        let link = bpf(
            LINK_CREATE,
            &[
                program.as_raw_fd() as u32,
                interface_index,
                ATTACH_XDP,
                mode as u32,
            ],
        );
        Program {
            sockets,
            cell,
            _program: program,
            _link: link,
        }
    }

    /// Makes `xsk` socket `key`, in place of another one if there was one.
    pub fn register(&self, key: u32, xsk: &impl AsRawFd) {
        let fd = xsk.as_raw_fd() as u32;
        let update = element(&self.sockets, &raw const key, (&raw const fd).addr());
        assert_eq!(
            bed::raw_bpf(MAP_UPDATE, &update),
            0,
            "{}",
            io::Error::last_os_error()
        );
    }

    /// The program's variable.
    pub fn cell(&self) -> i64 {
        let (key, mut value) = (0_u32, 0_i64);
        // Exposed, because the kernel writes through the address.
        let lookup = element(&self.cell, &raw const key, (&raw mut value).expose_provenance());
        assert_eq!(
            bed::raw_bpf(MAP_LOOKUP, &lookup),
            0,
            "{}",
            io::Error::last_os_error()
        );
        value
    }
}

fn element(map: &OwnedFd, key: *const u32, value: usize) -> [u32; 8] {
    let mut attributes = [0; 8];
    attributes[0] = map.as_raw_fd() as u32;
    set_pointer(&mut attributes[2..4], key.addr());
    set_pointer(&mut attributes[4..6], value);
    attributes
}
