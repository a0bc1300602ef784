//! From the description of a device to an endpoint on it.

use std::ffi::CString;
use std::hash::{BuildHasher as _, Hasher as _};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use lm_cards::chunk_len_for;
use lm_dataplane::memory::PACKET_HEADROOM;
use lm_dataplane::port::{Caps, PortError};
use lm_dataplane::{Device, Endpoint, EndpointConfig, ModeRequest, OpenError, PortMemory};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;
use lm_protocol::session::{Admit, Application};

use crate::eal;
use crate::nic::DpdkNic;
use crate::queues::lock;
use crate::shim::{self, AIMED_RING, Link, QUEUES, ROOM};
use crate::stack::{Site, Stack};

/// The longest IP packet: a packet has 2048 bytes with its Ethernet header, and a VLAN tag's four.
const MTU_MAX: u16 = 2030;
/// Driver that writes where its buffers are aimed.
const AIMED: &str = "net_virtio_user";
/// Longest prefix that a driver may write before a packet, in bytes.
const PREFIX_LEN_MAX: u8 = 64;
const REMEDY: &str = "check the driver's name and number, its arguments and the privileges it needs (--dpdk \
                      net_vhost0,iface=/tmp/lm.sock)";
/// What a sender may have on the way, so that no driver's ring overflows (`net_af_packet` and `net_memif`: 256 and more).
const ON_THE_WAY: u32 = 128;

/// A device of DPDK's, and the address to have there.
#[derive(Clone, Debug)]
pub struct DpdkConfig {
    /// Driver, number and arguments: `net_vhost0,iface=/tmp/lm.sock`.
    pub device: String,
    /// Our address.
    pub address: Ipv4Addr,
    /// Length of the network's part of it, at most 32.
    pub prefix_len: u8,
    /// The way to other networks.
    pub gateway: Option<Ipv4Addr>,
}

/// Why a device cannot be used, in one line with a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DpdkError {
    /// The device, its driver, or the address.
    #[error("{0}")]
    Device(String),
    /// The endpoint on it.
    #[error(transparent)]
    Endpoint(#[from] OpenError),
}

/// Opens an endpoint there that asks `admit` about every sender. Of `config` what it says of an interface and the daemon is not looked at.
///
/// # Errors
///
/// See [`DpdkError`]; nothing stays open.
pub fn open(
    dpdk: &DpdkConfig,
    config: &EndpointConfig,
    mut admit: Box<dyn Admit + Send>,
) -> Result<Endpoint<DpdkNic>, DpdkError> {
    let site = site(dpdk)?;
    let (mut link, mut facts, name) = probe(&dpdk.device, config)?;
    facts.mtu = facts.mtu.min(MTU_MAX);
    let is_aimed = is_aimed(&dpdk.device, facts.queues, config)?;
    let port = match config.port {
        0 => any_port(),
        port => port,
    };
    let stack = Stack::new(site, facts.mac, port);
    let device = Device {
        name,
        mac: facts.mac,
        mtu: facts.mtu.into(),
        queues: QUEUES as u32,
        rx_ring_len: AIMED_RING,
        chunk_len: match is_aimed {
            true => PACKET_HEADROOM as u32 + ROOM as u32,
            false => chunk_len_for(None, facts.mtu.into()),
        },
        caps: Caps {
            witness: !is_aimed,
            // What the driver writes beside packets shows before the first session.
            prefix_len: if is_aimed { PREFIX_LEN_MAX } else { 0 },
            tx_bound: if is_aimed { 0 } else { ON_THE_WAY },
            tx_steers: facts.queues > 1,
            ..Caps::copying(0)
        },
    };
    // Their first fragments alone have port numbers, and the stack puts none together that do not land.
    let admit = move |application: &Application<'_>| match application.request.wire {
        Wire::IpFrag => Err(RejectReason::Unsupported.into()),
        Wire::Lm => admit.admit(application),
    };
    let mut core = None;
    let open = |memory: PortMemory<'_>| {
        if is_aimed && !link.aim(memory.mapping) {
            let text =
                "another endpoint of this program has the memory that DPDK began with; ask for --mode copy";
            return Err(PortError::Other(text.into()));
        }
        let nic = DpdkNic::new(link, stack, &facts, is_aimed, memory);
        core = Some(Arc::clone(&nic.core));
        Ok(nic)
    };
    let endpoint = Endpoint::over_with(&device, config, Box::new(admit), open)?;
    // The first frames are posted, so that packets show what the driver writes beside them.
    let started = core.map_or(Ok(()), |core| lock(&core).link.start());
    started.map_err(|fault| DpdkError::Device(format!("{} {}; {REMEDY}", dpdk.device, eal::told(fault))))?;
    Ok(endpoint)
}

/// Whether the device is to write to LM's own places: one whose driver takes buffers ahead, and was tried.
fn is_aimed(device: &str, queues: u16, config: &EndpointConfig) -> Result<bool, DpdkError> {
    let obstacle = if !device.starts_with(AIMED) {
        "copies packets, or was not tried in zero-copy mode"
    } else if ["mrg_rxbuf=1", "vectorized=1"]
        .iter()
        .any(|argument| device.contains(argument))
    {
        "receives in another way with mrg_rxbuf=1 or vectorized=1"
    } else if usize::from(queues) < QUEUES || config.link.queue.is_some_and(|queue| queue != 1) {
        "has no queue for what lands alone (queues=2 at both ends brings one)"
    } else {
        return Ok(config.link.mode != ModeRequest::Copy);
    };
    match config.link.mode {
        ModeRequest::Auto | ModeRequest::Copy => Ok(false),
        _ => Err(DpdkError::Device(format!(
            "{device} {obstacle}; ask for --mode copy or auto"
        ))),
    }
}

/// The address, if it is one that a host may have.
fn site(dpdk: &DpdkConfig) -> Result<Site, DpdkError> {
    let (address, prefix_len) = (dpdk.address, dpdk.prefix_len);
    let site = Site {
        address,
        prefix_len: prefix_len.min(32),
        gateway: dpdk.gateway,
    };
    let host = address.to_bits() & !site.mask();
    let is_host = prefix_len >= 31 || (host != 0 && host != !site.mask());
    if prefix_len > 32 || !is_host || address.is_unspecified() || address.is_multicast() {
        return Err(DpdkError::Device(format!(
            "{address}/{prefix_len} is no host's address; give one within a network (--dpdk-address 10.9.0.1/24)"
        )));
    }
    match dpdk
        .gateway
        .filter(|&gateway| !site.is_near(gateway) || gateway == address)
    {
        Some(gateway) => Err(DpdkError::Device(format!(
            "gateway {gateway} is no other host of {address}/{prefix_len}; give one of that network (--dpdk-gateway)"
        ))),
        None => Ok(site),
    }
}

/// The device, started.
fn probe(devargs: &str, config: &EndpointConfig) -> Result<(Link, shim::Facts, String), DpdkError> {
    let name = devargs.split(',').next().unwrap_or_default();
    let mut all = devargs.to_owned();
    // Of what lies before a packet a driver is to read nothing, since the next one is there; and its ring is as short as what is on the way.
    for (key, value) in [(",mrg_rxbuf=", "0"), (",queue_size=", "128")] {
        if name.starts_with(AIMED) && !devargs.contains(key) {
            all += &[key, value].concat();
        }
    }
    let (Ok(all), Ok(first), false) = (CString::new(all), CString::new(name), name.is_empty()) else {
        return Err(DpdkError::Device(format!(
            "--dpdk {devargs:?} names no driver; {REMEDY}"
        )));
    };
    if name.starts_with("net_ring") {
        let text = format!(
            "{name} hands its sender's memory over, which may go at any time; use net_memif or net_vhost"
        );
        return Err(DpdkError::Device(text));
    }
    let argument = |key: &str| devargs.split(',').find_map(|argument| argument.strip_prefix(key));
    // DPDK would say no more than that it cannot listen there, and then remove the file of a program that listens.
    let listens = name.starts_with("net_vhost") && argument("client=") != Some("1");
    if let Some(path) = argument("iface=").filter(|path| listens && Path::new(path).exists()) {
        let text =
            format!("{path} is there already; if no program listens there any more, remove it (rm {path})");
        return Err(DpdkError::Device(text));
    }
    eal::begin(config).map_err(DpdkError::Device)?;
    // Each end's transmit queue selects the other's receive queue there; one end has buffers that are waited for.
    let is_vhost = name.starts_with("net_vhost");
    let queues = if is_vhost || name.starts_with(AIMED) {
        QUEUES as u16
    } else {
        1
    };
    match Link::open(&all, &first, queues, is_vhost) {
        Ok((link, facts)) => Ok((link, facts, name.to_owned())),
        Err(fault) => {
            let remedy = match argument("path=") {
                Some(path) => format!("start the program that listens on {path} first"),
                None => REMEDY.to_owned(),
            };
            Err(DpdkError::Device(format!(
                "{devargs} {}; {remedy}",
                eal::told(fault)
            )))
        }
    }
}

/// A port that no program of before used lately: its packets may still be under way.
fn any_port() -> u16 {
    let random = std::hash::RandomState::new().build_hasher().finish();
    49152 + (random % 8000) as u16 * 2
}
