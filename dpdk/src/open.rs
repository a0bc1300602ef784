//! From the description of a device to an endpoint on it.

use std::ffi::CString;
use std::hash::{BuildHasher as _, Hasher as _};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use ipnet::Ipv4Net;
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
use crate::stack::Stack;

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
    /// Our address, and how much of it is the network's.
    pub address: Ipv4Net,
    /// The way to other networks.
    pub gateway: Option<Ipv4Addr>,
}

/// Opens an endpoint there that asks `admit` about every sender. Of `config` what it says of an interface and the daemon is not looked at.
///
/// # Errors
///
/// [`OpenError`], with a remedy; nothing stays open.
pub fn open(
    dpdk: &DpdkConfig,
    config: &EndpointConfig,
    mut admit: Box<dyn Admit + Send>,
) -> Result<Endpoint<DpdkNic>, OpenError> {
    ensure_address(dpdk)?;
    let (mut link, mut facts) = probe(&dpdk.device, config)?;
    facts.mtu = facts.mtu.min(MTU_MAX);
    let is_aimed = is_aimed(&dpdk.device, facts.queues, config)?;
    let port = match config.port {
        0 => any_port(),
        port => port,
    };
    let stack = Stack::new(dpdk.address, dpdk.gateway, facts.mac, port);
    let device = Device {
        name: driver(&dpdk.device).to_owned(),
        mac: facts.mac,
        mtu: facts.mtu.into(),
        queues: QUEUES as u32,
        // Half as much again is posted: the ring, and behind it what the engine may take before it posts again.
        rx_ring_len: 2 * AIMED_RING,
        chunk_len: PACKET_HEADROOM as u32 + ROOM as u32,
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
    started.map_err(|fault| OpenError::Config(format!("{} {}; {REMEDY}", dpdk.device, eal::told(fault))))?;
    Ok(endpoint)
}

/// Whether the device is to write to LM's own places: one whose driver takes buffers ahead, and was tried.
fn is_aimed(device: &str, queues: u16, config: &EndpointConfig) -> Result<bool, OpenError> {
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
        _ => Err(OpenError::Config(format!(
            "{device} {obstacle}; ask for --mode copy or auto"
        ))),
    }
}

/// The address is one that a host may have, and the gateway another one's there.
fn ensure_address(dpdk: &DpdkConfig) -> Result<(), OpenError> {
    let (site, address) = (dpdk.address, dpdk.address.addr());
    let is_end = address == site.network() || address == site.broadcast();
    if (is_end && site.prefix_len() < 31) || address.is_unspecified() || address.is_multicast() {
        return Err(OpenError::Config(format!(
            "{site} is no host's address; give one within a network (--dpdk-address 10.9.0.1/24)"
        )));
    }
    let is_host = |gateway: Ipv4Addr| site.contains(&gateway) && gateway != address;
    match dpdk.gateway.filter(|&gateway| !is_host(gateway)) {
        Some(gateway) => Err(OpenError::Config(format!(
            "gateway {gateway} is no other host of {site}; give one of that network (--dpdk-gateway)"
        ))),
        None => Ok(()),
    }
}

/// Driver and number.
fn driver(device: &str) -> &str {
    device.split(',').next().unwrap_or_default()
}

/// The device, found and not started.
fn probe(device: &str, config: &EndpointConfig) -> Result<(Link, shim::Facts), OpenError> {
    let name = driver(device);
    let mut all = device.to_owned();
    // Of what lies before a packet a driver is to read nothing, since the next one is there; and its ring is as short as what is on the way.
    for (key, value) in [(",mrg_rxbuf=", "0"), (",queue_size=", "128")] {
        if name.starts_with(AIMED) && !device.contains(key) {
            all += &[key, value].concat();
        }
    }
    let refuse = |why: String| Err(OpenError::Config(why));
    let all = match CString::new(all) {
        Ok(all) if !name.is_empty() => all,
        _ => return refuse(format!("--dpdk {device:?} names no driver; {REMEDY}")),
    };
    let obstacle = match name {
        _ if name.starts_with("net_ring") => "hands its sender's memory over, which may go at any time",
        // DPDK is begun without its bus: nothing of a card was tried.
        _ if name.contains(':') => "is a card, and none was tried",
        _ => "",
    };
    if !obstacle.is_empty() {
        return refuse(format!(
            "{name} {obstacle}; use net_memif, net_vhost or net_af_packet"
        ));
    }
    let argument = |key: &str| device.split(',').find_map(|argument| argument.strip_prefix(key));
    let is_vhost = name.starts_with("net_vhost");
    // DPDK would say no more than that it cannot listen there, and then remove the file of a program that listens.
    let listens = is_vhost && argument("client=") != Some("1");
    if let Some(path) = argument("iface=").filter(|path| listens && Path::new(path).exists()) {
        return refuse(format!(
            "{path} is there already; if no program listens there any more, remove it (rm {path})"
        ));
    }
    eal::begin(config).map_err(OpenError::Config)?;
    // Each end's transmit queue selects the other's receive queue there; one end has buffers that are waited for.
    let queues = match is_vhost || name.starts_with(AIMED) {
        true => QUEUES as u16,
        false => 1,
    };
    Link::open(&all, queues, is_vhost).or_else(|fault| {
        let told = eal::told(fault);
        refuse(match argument("path=") {
            Some(path) => format!("{device} {told}; start the program that listens on {path} first"),
            None => format!("{device} {told}; {REMEDY}"),
        })
    })
}

/// A port that no program of before used lately: its packets may still be under way.
fn any_port() -> u16 {
    let random = std::hash::RandomState::new().build_hasher().finish();
    49152 + (random % 8000) as u16 * 2
}
