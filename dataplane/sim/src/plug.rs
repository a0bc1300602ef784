//! Hosts are plugged into a wire: by hand, or with an endpoint on each.

use std::net::Ipv4Addr;
use std::sync::Arc;

use lm_cards::chunk_len_for;

use super::host::Host;
use super::{HostConfig, Semantics, SimNic, Wire, WireConfig, lock, mac_of};
use lm_dataplane::Device;
use lm_dataplane::Endpoint;
use lm_dataplane::EndpointConfig;
use lm_dataplane::OpenError;
use lm_dataplane::memory::CHUNK_LEN_RANGE;
use lm_dataplane::port::Caps;

/// Hosts on one switch, at most.
pub(super) const HOSTS_MAX: usize = 64;

/// Two hosts on a wire.
///
/// # Panics
///
/// As [`switch`].
pub fn wire(config: WireConfig, hosts: [HostConfig; 2]) -> (Wire, SimNic, SimNic) {
    let (wire, nics) = switch(config, hosts.into());
    let [a, b] = <[SimNic; 2]>::try_from(nics).expect("two hosts, two NICs");
    (wire, a, b)
}

/// Hosts on a switch that knows them all: it takes a packet to the host with its destination address, however it
/// is called. Between two hosts everything goes to the other one.
///
/// # Panics
///
/// When there are fewer than two hosts, and as [`Wire::plug`].
pub fn switch(config: WireConfig, hosts: Vec<HostConfig>) -> (Wire, Vec<SimNic>) {
    assert!(hosts.len() >= 2, "{} hosts", hosts.len());
    let wire = Wire::new(config);
    let nics = hosts.into_iter().map(|host| wire.plug(host)).collect();
    (wire, nics)
}

impl Wire {
    /// One host more: its number is how many there were.
    ///
    /// # Panics
    ///
    /// When there are 64 hosts, when the host has no queues or more than 64, when a chunk length is not 2048 to 4096, when its data port
    /// is 65535, or when another has its address.
    pub fn plug(&self, config: HostConfig) -> SimNic {
        let mut shared = lock(&self.0);
        let number = shared.hosts.len();
        assert!(number < HOSTS_MAX, "{number} hosts");
        let mut others = shared.hosts.iter();
        assert!(
            others.all(|other| other.config.ip != config.ip),
            "two hosts with one address"
        );
        assert!(
            (1..=lm_ebpf::layout::QUEUES).contains(&config.queues),
            "{} queues",
            config.queues
        );
        assert!(
            CHUNK_LEN_RANGE.contains(&config.chunk_len),
            "a chunk of {} bytes",
            config.chunk_len
        );
        assert_ne!(config.port, u16::MAX, "no control port");
        shared.hosts.push(Host::new(config));
        shared.links.push(None);
        SimNic::new(Arc::clone(&self.0), number)
    }

    /// What the device of host number `host` is like.
    pub fn device(&self, host: usize) -> Device {
        let config = lock(&self.0).config;
        let semantics = config.semantics[host.min(1)];
        let (caps, rx_ring_len) = match semantics {
            Semantics::Copy => (Caps::copying(0), 0),
            Semantics::ZeroCopy(device) => {
                let caps = Caps {
                    prefix_len: device.prefix_len as u8,
                    kept_frames: 2 * device.ring_len,
                    lap: device.lap,
                    ..Caps::device()
                };
                (caps, device.ring_len)
            }
        };
        Device {
            name: format!("sim{host}"),
            mac: mac_of(Ipv4Addr::UNSPECIFIED),
            mtu: config.mtu,
            queues: 4,
            rx_ring_len,
            chunk_len: chunk_len_for(None, config.mtu),
            caps: Caps {
                tx_steers: true,
                sums: true,
                ..caps
            },
        }
    }

    /// Plugs the next host in, and opens an endpoint on it, at the port of `config`.
    ///
    /// # Errors
    /// As [`Endpoint::over`].
    ///
    /// # Panics
    ///
    /// As [`Wire::plug`].
    pub fn open(&self, ip: Ipv4Addr, config: &EndpointConfig) -> Result<Endpoint<SimNic>, OpenError> {
        let number = lock(&self.0).hosts.len();
        let device = Device {
            mac: mac_of(ip),
            ..self.device(number)
        };
        Endpoint::over(&device, config, |memory| {
            Ok(self.plug(HostConfig {
                ip,
                port: config.port,
                queues: device.queues,
                mapping: Arc::clone(memory.mapping),
                chunk_len: memory.chunk_len,
                multi_buffer: memory.multi_buffer,
                tx_metadata_len: memory.tx_metadata_len,
                ring_start: 0,
            }))
        })
    }
}
