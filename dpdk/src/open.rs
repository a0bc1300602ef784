//! From the description of a device to an endpoint on it.

use std::ffi::CString;
use std::hash::{BuildHasher as _, Hasher as _};
use std::net::Ipv4Addr;
use std::path::Path;

use lm_cards::chunk_len_for;
use lm_dataplane::port::Caps;
use lm_dataplane::{Device, Endpoint, EndpointConfig, ModeRequest, OpenError, PortMemory};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;
use lm_protocol::session::{Admit, Application};

use crate::eal;
use crate::nic::DpdkNic;
use crate::queues::QUEUES;
use crate::shim::{self, Link};
use crate::stack::{Site, Stack};

/// The longest IP packet: a packet has 2048 bytes with its Ethernet header, and a VLAN tag's four.
const MTU_MAX: u16 = 2030;
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
    if !matches!(config.link.mode, ModeRequest::Auto | ModeRequest::Copy) {
        let text = "a DPDK device is used in copy mode only; ask for --mode copy or auto";
        return Err(DpdkError::Device(text.to_owned()));
    }
    let (link, facts, name) = probe(&dpdk.device)?;
    let port = match config.port {
        0 => any_port(),
        port => port,
    };
    let mtu = facts.mtu.min(MTU_MAX);
    let stack = Stack::new(site, facts.mac, port);
    let device = Device {
        name,
        mac: facts.mac,
        mtu: mtu.into(),
        queues: QUEUES,
        rx_ring_len: ON_THE_WAY,
        chunk_len: chunk_len_for(None, mtu.into()),
        caps: Caps {
            tx_bound: ON_THE_WAY,
            ahead: false,
            ..Caps::copying(0)
        },
    };
    // Their first fragments alone have port numbers, and the stack puts none together that do not land.
    let admit = move |application: &Application<'_>| match application.request.wire {
        Wire::IpFrag => Err(RejectReason::Unsupported.into()),
        Wire::Lm => admit.admit(application),
    };
    let open = |memory: PortMemory<'_>| Ok(DpdkNic::new(link, stack, facts.mac, mtu, memory));
    Ok(Endpoint::over_with(&device, config, Box::new(admit), open)?)
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
fn probe(devargs: &str) -> Result<(Link, shim::Facts, String), DpdkError> {
    let remedy = "check the driver's name and number, its arguments and the privileges it needs (--dpdk \
                  net_vhost0,iface=/tmp/lm.sock)";
    let name = devargs.split(',').next().unwrap_or_default();
    let (Ok(all), Ok(first), false) = (CString::new(devargs), CString::new(name), name.is_empty()) else {
        return Err(DpdkError::Device(format!(
            "--dpdk {devargs:?} names no driver; {remedy}"
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
    eal::begin().map_err(DpdkError::Device)?;
    match Link::open(&all, &first) {
        Ok((link, facts)) => Ok((link, facts, name.to_owned())),
        Err((fault, said)) => {
            let reason = eal::reason(&said).unwrap_or_else(|| "DPDK gives no reason".to_owned());
            let remedy = match argument("path=") {
                Some(path) => format!("start the program that listens on {path} first"),
                None => remedy.to_owned(),
            };
            Err(DpdkError::Device(format!(
                "{devargs} {fault}: {reason}; {remedy}"
            )))
        }
    }
}

/// A port that no program of before used lately: its packets may still be under way.
fn any_port() -> u16 {
    let random = std::hash::RandomState::new().build_hasher().finish();
    49152 + (random % 8000) as u16 * 2
}
