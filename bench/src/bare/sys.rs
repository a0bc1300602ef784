//! The XDP program of the bare AF_XDP programs, with its socket map.
//!
//! Nothing here knows the gate: the program is twenty instructions that are assembled in this file,
//! so that the comparison rests on the kernel's interface alone (`include/uapi/linux/bpf.h`).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::PortArgs;
use super::socket::patiently;
use crate::suite::await_link;

/// How the XDP program is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attach {
    /// In the driver (`XDP_FLAGS_DRV_MODE`).
    Native,
    /// In the stack, on socket buffers (`XDP_FLAGS_SKB_MODE`).
    Generic,
}

const BPF_MAP_CREATE: u32 = 0;
const BPF_MAP_UPDATE_ELEM: u32 = 2;
const BPF_PROG_LOAD: u32 = 5;
const BPF_LINK_CREATE: u32 = 28;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
/// The program takes packets of several buffers.
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
const XDP_PASS: i32 = 2;
const BPF_FUNC_REDIRECT_MAP: i32 = 51;
/// Receive queues a socket map can hold.
const MAX_QUEUES: u32 = 64;

#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

#[repr(C)]
struct MapUpdate {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_count: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_len: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    ifindex: u32,
    expected_attach_type: u32,
}

#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// `bpf(2)` with `attributes` as the leading part of `union bpf_attr`; the kernel takes the rest as zero.
///
/// # Safety
///
/// `T` is the `repr(C)` struct of `command`, and every address in it is valid for what the command does with it.
unsafe fn bpf<T>(command: u32, attributes: &T) -> io::Result<i64> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes from a live reference; the rest is the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, ptr::from_ref(attributes), size_of::<T>()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn owned(fd: i64) -> OwnedFd {
    // SAFETY: callers pass what a descriptor-creating bpf(2) command just returned; nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}

/// An attached redirect program. Dropping it detaches: the link is the only reference to the attachment, so a killed
/// process leaves nothing behind either.
#[derive(Debug)]
pub(super) struct Redirect {
    map: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
}

impl Redirect {
    /// Attaches to `ifindex` a program that redirects each IPv4 UDP datagram to the port and queue of `args` to
    /// `socket`, and passes everything else to the stack. Returns when the card, which may begin anew with that, has its link again: what was
    /// sent before would be lost.
    pub(super) fn to(socket: RawFd, ifindex: u32, args: &PortArgs) -> io::Result<Redirect> {
        let redirect = patiently(|| Redirect::attach(ifindex, args))?;
        redirect.register(args.queue, socket)?;
        await_link(&args.interface).map_err(|failure| io::Error::other(failure.text))?;
        Ok(redirect)
    }

    fn attach(ifindex: u32, args: &PortArgs) -> io::Result<Redirect> {
        let create = MapCreate {
            map_type: BPF_MAP_TYPE_XSKMAP,
            key_size: 4,
            value_size: 4,
            max_entries: MAX_QUEUES,
            flags: 0,
        };
        // SAFETY: `MapCreate` is the head of union bpf_attr for BPF_MAP_CREATE and holds no address.
        let map = owned(unsafe { bpf(BPF_MAP_CREATE, &create) }?);
        let program = load(
            &assemble(map.as_raw_fd(), args.port),
            if args.long { BPF_F_XDP_HAS_FRAGS } else { 0 },
        )?;
        let flags = match args.mode {
            Attach::Native => XDP_FLAGS_DRV_MODE,
            Attach::Generic => XDP_FLAGS_SKB_MODE,
        };
        let create = LinkCreate {
            prog_fd: program.as_raw_fd() as u32,
            target_ifindex: ifindex,
            attach_type: BPF_XDP,
            flags,
        };
        // SAFETY: `LinkCreate` is the head of union bpf_attr for BPF_LINK_CREATE and holds no address.
        let link = owned(unsafe { bpf(BPF_LINK_CREATE, &create) }?);
        Ok(Redirect {
            map,
            _program: program,
            _link: link,
        })
    }

    /// Packets of `queue` go to `socket` from now on.
    fn register(&self, queue: u32, socket: RawFd) -> io::Result<()> {
        let value = socket as u32;
        let update = MapUpdate {
            map_fd: self.map.as_raw_fd() as u32,
            pad: 0,
            key: ptr::from_ref(&queue) as u64,
            value: ptr::from_ref(&value) as u64,
            flags: 0,
        };
        // SAFETY: `key` and `value` are 4-byte locals that outlive the call, as the map's key and value sizes say.
        unsafe { bpf(BPF_MAP_UPDATE_ELEM, &update) }.map(drop)
    }
}

fn load(instructions: &[Instruction], flags: u32) -> io::Result<OwnedFd> {
    let mut name = [0; 16];
    name[..7].copy_from_slice(b"lm_bare");
    let load = ProgLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_count: instructions.len() as u32,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        log_level: 0,
        log_len: 0,
        log: 0,
        kernel_version: 0,
        flags,
        name,
        ifindex: 0,
        expected_attach_type: BPF_XDP,
    };
    // SAFETY: `insns` and `license` point to memory that outlives the call, with the lengths that are stated.
    Ok(owned(unsafe { bpf(BPF_PROG_LOAD, &load) }?))
}

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8, // source << 4 | destination
    offset: i16,
    immediate: i32,
}

const fn op(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers: source << 4 | destination,
        offset,
        immediate,
    }
}

// Instruction classes and modes, from include/uapi/linux/bpf.h and bpf_common.h.
const LDX_W: u8 = 0x61;
const LDX_H: u8 = 0x69;
const LDX_B: u8 = 0x71;
const MOV_REGISTER: u8 = 0xbf;
const MOV_IMMEDIATE: u8 = 0xb7;
const ADD_IMMEDIATE: u8 = 0x07;
const JGT_REGISTER: u8 = 0x2d;
const JNE_IMMEDIATE: u8 = 0x55;
const LD_DW: u8 = 0x18;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const PSEUDO_MAP_FD: u8 = 1;

/// Offsets in a packet without VLAN tag and with a 20-byte IPv4 header.
const ETHERTYPE: i16 = 12;
const PROTOCOL: i16 = 23;
const DESTINATION_PORT: i16 = 36;
const HEADERS: i32 = 42;

/// Index of the instruction that starts the way out for foreign packets.
const PASS: i16 = 18;

fn assemble(map: RawFd, port: u16) -> [Instruction; 20] {
    // Two-byte loads are in host order; constants are compared as they lie in the packet.
    let wire = |value: u16| i32::from(u16::from_ne_bytes(value.to_be_bytes()));
    // A jump's offset counts from the instruction after it.
    let pass_from = |index: i16| PASS - index - 1;
    [
        op(MOV_REGISTER, 6, 1, 0, 0),                             // 0: r6 = context
        op(LDX_W, 2, 1, 0, 0),                                    // 1: r2 = data
        op(LDX_W, 3, 1, 4, 0),                                    // 2: r3 = data_end
        op(MOV_REGISTER, 4, 2, 0, 0),                             // 3
        op(ADD_IMMEDIATE, 4, 0, 0, HEADERS),                      // 4: r4 = data + 42
        op(JGT_REGISTER, 4, 3, pass_from(5), 0),                  // 5: too short
        op(LDX_H, 5, 2, ETHERTYPE, 0),                            // 6
        op(JNE_IMMEDIATE, 5, 0, pass_from(7), wire(0x0800)),      // 7: not IPv4
        op(LDX_B, 5, 2, PROTOCOL, 0),                             // 8
        op(JNE_IMMEDIATE, 5, 0, pass_from(9), libc::IPPROTO_UDP), // 9: not UDP
        op(LDX_H, 5, 2, DESTINATION_PORT, 0),                     // 10
        op(JNE_IMMEDIATE, 5, 0, pass_from(11), wire(port)),       // 11: not ours
        op(LDX_W, 2, 6, 16, 0),                                   // 12: r2 = rx_queue_index
        op(LD_DW, 1, PSEUDO_MAP_FD, 0, map),                      // 13: r1 = map (two slots)
        op(0, 0, 0, 0, 0),                                        // 14
        op(MOV_IMMEDIATE, 3, 0, 0, XDP_PASS),                     // 15: r3 = verdict where no socket is
        op(CALL, 0, 0, 0, BPF_FUNC_REDIRECT_MAP),                 // 16: r0 = verdict
        op(EXIT, 0, 0, 0, 0),                                     // 17
        op(MOV_IMMEDIATE, 0, 0, 0, XDP_PASS),                     // 18: PASS
        op(EXIT, 0, 0, 0, 0),                                     // 19
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_jump_leads_to_the_way_out() {
        let program = assemble(3, 7300);
        for (index, instruction) in program.iter().enumerate() {
            if matches!(instruction.code, JGT_REGISTER | JNE_IMMEDIATE) {
                assert_eq!(index as i16 + 1 + instruction.offset, PASS, "instruction {index}");
            }
        }
        let out = program[PASS as usize];
        assert_eq!((out.code, out.immediate), (MOV_IMMEDIATE, XDP_PASS));
        assert_eq!(
            program[PASS as usize - 1].code,
            EXIT,
            "nothing falls through to it"
        );
    }
}
