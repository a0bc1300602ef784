//! How the gate is attached to an interface, and what can go wrong.

use std::error::Error;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aya::programs::{ProgramError, Xdp, loaded_programs};
use aya::{Ebpf, EbpfError, EbpfLoader};
use lm_cards::{Interface, InterfaceError};
use sha2::{Digest as _, Sha256};

use crate::layout::{Config, FLAG_ONE_CPU_PER_QUEUE, FLAG_ORDERED_STORES, FLAG_SEVERAL_PROGRAMS};
use crate::sys;

/// The committed object, aligned as the loader's ELF reader needs it.
pub(crate) static OBJECT: &[u8] = aya::include_bytes_aligned!("../gate.o");
const PROGRAM: &str = "lm_gate";

/// What the gate must know before it is loaded.
#[derive(Clone, Debug)]
pub struct GateConfig {
    /// Only packets to this address are ours; `None` accepts any address, also of packets that the host forwards.
    pub local_ip: Option<Ipv4Addr>,
    /// UDP port of fragments and small LM packets, on every queue.
    pub data_port: u16,
    /// Several programs use the gate, each with queues and a data port of its own
    /// ([`Gate::set_data_port`](crate::Gate::set_data_port)):
    /// `data_port` is not used. For an admission daemon.
    pub several_programs: bool,
    /// UDP port of the control protocol: packets to it always pass.
    pub control_port: u16,
}

impl Default for GateConfig {
    fn default() -> Self {
        GateConfig {
            local_ip: None,
            data_port: 7168,
            several_programs: false,
            control_port: 7169,
        }
    }
}

/// Which mode to ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachMode {
    /// Native, or else generic with a warning.
    #[default]
    Auto,
    /// In the driver, or not at all.
    Native,
    /// In the network stack, where no session may land.
    Generic,
}

/// The mode that the kernel granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EffectiveMode {
    /// In the driver.
    Native,
    /// In the network stack.
    Generic,
}

/// Why the gate is not attached. One line each, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No such interface in this network namespace.
    #[error("there is no interface with index {0}")]
    NoInterface(u32),
    /// The process may not do this.
    #[error(
        "{action} needs {capabilities}: run as root, grant them to the program, or start the admission daemon \
            (lm-admissiond)"
    )]
    NotPrivileged {
        /// What was refused.
        action: &'static str,
        /// Capabilities that allow it.
        capabilities: &'static str,
    },
    /// Another XDP program is attached.
    #[error(
        "{interface} already has an XDP program, \"{name}\" (id {id}): detach it (ip link set dev {interface} xdp \
         off, or end the program that owns its link) or use another interface"
    )]
    Occupied {
        /// Interface name.
        interface: String,
        /// Program id.
        id: u32,
        /// Program name; empty if it has none or may not be read.
        name: String,
    },
    /// The object did not load.
    #[error("the kernel refused the gate: {0}")]
    Load(#[source] Box<EbpfError>),
    /// Asked for native mode and not got it.
    #[error(
        "{interface} does not run XDP programs in its driver ({source}): use generic mode, or a smaller MTU"
    )]
    NoNative {
        /// Interface name.
        interface: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Generic mode refused by the kernel.
    #[error("{interface} does not accept an XDP program in generic mode: {source}")]
    NoGeneric {
        /// Interface name.
        interface: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel's answer about the interface, or the maps, could not be had.
    #[error("cannot set up the gate: {0}")]
    System(#[from] io::Error),
}

/// A loaded and attached program.
pub(crate) struct Attached {
    pub(crate) ebpf: Ebpf,
    pub(crate) link: OwnedFd,
    pub(crate) mode: EffectiveMode,
    pub(crate) interface: Interface,
    pub(crate) warnings: Vec<String>,
}

pub(crate) fn attach(ifindex: u32, config: &GateConfig, mode: AttachMode) -> Result<Attached, AttachError> {
    let interface = free_interface(ifindex)?;
    let mut warnings = Vec::new();
    let mut tried = match mode {
        AttachMode::Generic => EffectiveMode::Generic,
        _ => EffectiveMode::Native,
    };
    loop {
        let ebpf = load(config, tried)?;
        match link(&ebpf, ifindex, tried) {
            Ok(link) => {
                return Ok(Attached {
                    ebpf,
                    link,
                    mode: tried,
                    interface,
                    warnings,
                });
            }
            Err(source)
                if mode == AttachMode::Auto && tried == EffectiveMode::Native && !is_final(&source) =>
            {
                warnings.push(format!(
                    "{} does not run XDP programs in its driver ({source}): generic mode, where large \
                     messages are copied",
                    interface.name
                ));
                tried = EffectiveMode::Generic;
            }
            Err(source) => return Err(refused(ifindex, interface.name, source, tried)),
        }
    }
}

/// The interface, if no XDP program is attached to it.
fn free_interface(ifindex: u32) -> Result<Interface, AttachError> {
    let interface = interface(ifindex)?;
    match interface.xdp_program {
        Some(id) => Err(AttachError::Occupied {
            interface: interface.name,
            id,
            name: program_name(id),
        }),
        None => Ok(interface),
    }
}

/// An interface of this thread's network namespace.
pub(crate) fn interface(ifindex: u32) -> Result<Interface, AttachError> {
    Interface::by_index(ifindex).map_err(|error| match error {
        InterfaceError::Unknown { .. } => AttachError::NoInterface(ifindex),
        InterfaceError::System { source, .. } => AttachError::System(source),
        error => AttachError::System(io::Error::other(error)),
    })
}

fn program_name(id: u32) -> String {
    let program = loaded_programs()
        .filter_map(Result::ok)
        .find(|program| program.id() == id);
    program
        .and_then(|program| program.name_as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// Loads the object for a mode. In native mode a queue's NAPI instance runs the gate, and has one owner at a time.
pub(crate) fn load(config: &GateConfig, mode: EffectiveMode) -> Result<Ebpf, AttachError> {
    let flags = [
        (mode == EffectiveMode::Native, FLAG_ONE_CPU_PER_QUEUE),
        (cfg!(target_arch = "x86_64"), FLAG_ORDERED_STORES),
        (config.several_programs, FLAG_SEVERAL_PROGRAMS),
    ];
    let flags = flags.iter().filter(|(is_set, _)| *is_set);
    let constants = Config {
        local_ip: config.local_ip.map_or(0, |ip| u32::from_ne_bytes(ip.octets())),
        control_port: config.control_port.to_be(),
        reserved: 0,
        flags: flags.fold(0, |all, (_, flag)| all | flag),
    };
    let mut ebpf = EbpfLoader::new()
        .override_global("lm_config", &constants, true)
        .load(OBJECT)
        .map_err(load_error)?;
    xdp_mut(&mut ebpf)
        .and_then(|program| Ok(program.load()?))
        .map_err(load_error)?;
    Ok(ebpf)
}

fn load_error(error: EbpfError) -> AttachError {
    let mut causes = std::iter::successors(Some(&error as &dyn Error), |&error| error.source());
    let errno = |error: &(dyn Error + 'static)| error.downcast_ref::<io::Error>()?.raw_os_error();
    match causes.any(|error| errno(error) == Some(libc::EPERM)) {
        true => AttachError::NotPrivileged {
            action: "loading the gate",
            capabilities: "CAP_BPF and CAP_NET_ADMIN",
        },
        false => AttachError::Load(Box::new(error)),
    }
}

/// Eight bytes of the object's hash: names the version of program and maps.
pub(crate) fn object_digest() -> String {
    let digest = Sha256::digest(OBJECT);
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The gate's program in a loaded object.
pub(crate) fn program(ebpf: &Ebpf) -> io::Result<BorrowedFd<'_>> {
    let program = ebpf.program(PROGRAM).ok_or(ProgramError::NotLoaded);
    let program = program.and_then(<&Xdp>::try_from).and_then(Xdp::fd);
    Ok(program.map_err(io::Error::other)?.as_fd())
}

fn xdp_mut(ebpf: &mut Ebpf) -> Result<&mut Xdp, EbpfError> {
    let program = ebpf.program_mut(PROGRAM).ok_or(ProgramError::NotLoaded)?;
    Ok(program.try_into()?)
}

fn link(ebpf: &Ebpf, ifindex: u32, mode: EffectiveMode) -> io::Result<OwnedFd> {
    let flags = match mode {
        EffectiveMode::Native => sys::XDP_NATIVE,
        EffectiveMode::Generic => sys::XDP_GENERIC,
    };
    sys::link_xdp(program(ebpf)?, ifindex, flags)
}

/// Errors that generic mode would meet as well.
fn is_final(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPERM | libc::EBUSY | libc::EEXIST | libc::ENODEV)
    )
}

fn refused(ifindex: u32, interface: String, source: io::Error, mode: EffectiveMode) -> AttachError {
    match (source.raw_os_error(), mode) {
        (Some(libc::EPERM), _) => AttachError::NotPrivileged {
            action: "attaching the gate",
            capabilities: "CAP_NET_ADMIN",
        },
        // Somebody attached a program since we looked.
        (Some(libc::EBUSY | libc::EEXIST), _) => free_interface(ifindex)
            .err()
            .unwrap_or(AttachError::System(source)),
        (Some(libc::ENODEV), _) => AttachError::NoInterface(ifindex),
        (_, EffectiveMode::Native) => AttachError::NoNative { interface, source },
        (_, EffectiveMode::Generic) => AttachError::NoGeneric { interface, source },
    }
}
