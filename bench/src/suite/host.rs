//! What a report says of the hosts and of the links between them.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use lm_cards::Interface;
use lm_cards::ethtool::Ethtool;
use serde::{Deserialize, Serialize};

use super::schema::{Host, Link};
use crate::cli::Failure;

/// How long an interface may take to have its link again.
pub(super) const LINK: Duration = Duration::from_secs(15);

/// The offload that a report tells, by ethtool(8)'s name, which one of the kernel's features belongs to.
fn offload_of(feature: &str) -> Option<&'static str> {
    match feature {
        "rx-checksum" => Some("rx-checksumming"),
        "tx-generic-segmentation" => Some("generic-segmentation-offload"),
        "rx-gro" => Some("generic-receive-offload"),
        name if name.starts_with("tx-checksum-") => Some("tx-checksumming"),
        name if name.starts_with("tx-tcp") => Some("tcp-segmentation-offload"),
        _ => None,
    }
}

/// One host's end of a link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LinkEnd {
    /// Without a mode.
    #[serde(flatten)]
    pub(super) link: Link,
    pub(super) address: Ipv4Addr,
    pub(super) is_virtual: bool,
}

impl LinkEnd {
    /// The interface that has this address.
    pub(super) fn of(address: Ipv4Addr) -> Result<LinkEnd, Failure> {
        let interfaces = Interface::all()?;
        let found = interfaces
            .into_iter()
            .find(|interface| interface.addresses.iter().any(|one| one.ip == address));
        let interface = found.ok_or_else(|| {
            Failure::new(format!(
                "no interface of the other host has {address}; name an address of that host's"
            ))
        })?;
        let name = interface.name.clone();
        let features = Ethtool::open(interface.index).map(|card| card.features());
        let mut offloads = BTreeMap::new();
        for feature in features.ok().and_then(Result::ok).into_iter().flatten() {
            if let Some(offload) = offload_of(&feature.name) {
                *offloads.entry(offload.to_owned()).or_default() |= feature.on;
            }
        }
        let kind = interface.kind.clone().unwrap_or_default();
        let is_virtual = kind == "veth";
        let speed = read(&format!("/sys/class/net/{name}/speed")).and_then(|text| text.parse().ok());
        Ok(LinkEnd {
            link: Link {
                offloads,
                mode: String::new(),
                mtu: interface.mtu,
                queues: interface.rx_queues,
                driver: interface.driver.unwrap_or(kind),
                xdp: interface.xdp_program.is_some(),
                // What a veth pair says is made up.
                speed_mbit: speed.filter(|&speed| speed > 0 && !is_virtual),
                interface: name,
            },
            address,
            is_virtual,
        })
    }

    /// As a report tells it: this end's, but for what matters on the receiving side.
    pub(super) fn link(&self, far: &LinkEnd, mode: &str) -> Link {
        Link {
            mtu: self.link.mtu.min(far.link.mtu),
            mode: mode.to_owned(),
            queues: self.link.queues.min(far.link.queues),
            xdp: self.link.xdp || far.link.xdp,
            ..self.link.clone()
        }
    }
}

/// Waits until an interface has its link: many cards begin anew when an XDP program comes or goes, and lose what is sent meanwhile.
pub(crate) fn await_link(interface: &str) -> Result<(), Failure> {
    let carrier = format!("/sys/class/net/{interface}/carrier");
    let limit = Instant::now() + LINK;
    // Of an interface that is down it cannot be read.
    while read(&carrier).as_deref() != Some("1") {
        if Instant::now() > limit {
            return Err(Failure::new(format!(
                "{interface} has no link after {} s; see what ip link says of it",
                LINK.as_secs()
            )));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// This machine, and the core that the programs run on.
pub(super) fn host(core: u32) -> Host {
    let system = rustix::system::uname();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let line = |path: &str, name: &str| {
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let memory = line("/proc/meminfo", "MemTotal")
        .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    Host {
        name: text(system.nodename()),
        kernel: text(system.release()),
        cpu: line("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned()),
        core,
        memory_bytes: memory.unwrap_or(0) << 10,
        governor: read(&format!(
            "/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor"
        )),
    }
}

/// What two hosts on one machine have in common, and no others.
pub(super) fn machine() -> String {
    read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}
