//! Network interfaces as the kernel describes them, and whether LM can run on one.
//!
//! Links and addresses come over rtnetlink(7), driver and queue numbers over the ethtool ioctl; both see the network
//! namespace of the calling thread, unlike sysfs, which shows the namespace in which it was mounted.

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, LinkXdp};

use crate::ethtool::Ethtool;
use crate::netlink;

/// An IPv4 address of an interface with its network's prefix length in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address.
    pub ip: Ipv4Addr,
    /// Prefix length, 0 to 32.
    pub prefix_len: u8,
}

/// A network interface, as it was when asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its Ethernet address; zero where it has none.
    pub mac: [u8; 6],
    /// Longest IP packet in bytes.
    pub mtu: u32,
    /// Its IPv4 addresses in the kernel's order: the first is the primary one.
    pub addresses: Vec<InterfaceAddress>,
    /// What kind of virtual device it is ("veth", "bond", "bridge", "vlan" …); `None` for hardware.
    pub kind: Option<String>,
    /// Its driver's name, where it tells (`ETHTOOL_GDRVINFO`).
    pub driver: Option<String>,
    /// Receive queues in use (`ETHTOOL_GCHANNELS`), or, where the driver does not tell, those that exist.
    pub rx_queues: u32,
    /// Receive queues that exist: of none beyond them does a packet come, however many are put in use later.
    pub rx_queues_max: u32,
    /// Transmit queues, likewise.
    pub tx_queues: u32,
    /// The XDP program attached in native or, if there is none, generic mode: its id.
    pub xdp_program: Option<u32>,
    /// Whether it is set up and its link is there (`IFF_UP` and `IFF_LOWER_UP`).
    pub up: bool,
    /// Whether its frames are Ethernet frames of this host to another.
    pub ethernet: bool,
    /// For a bond, team or bridge its ports, for a VLAN or macvlan its lower device, down to devices that are neither.
    pub ports: Vec<String>,
}

impl Interface {
    /// The interface of that name.
    ///
    /// # Errors
    ///
    /// [`InterfaceError::Unknown`], with the names that come near, or [`InterfaceError::System`].
    pub fn by_name(name: &str) -> Result<Interface, InterfaceError> {
        let links = Links::read()?;
        match links.0.iter().find(|link| link.interface.name == name) {
            Some(link) => links.describe(link),
            None => Err(InterfaceError::Unknown {
                name: name.to_owned(),
                near: near_names(name, links.0.iter().map(|link| link.interface.name.as_str())),
            }),
        }
    }

    /// The interface with that index.
    ///
    /// # Errors
    ///
    /// [`InterfaceError::Unknown`] or [`InterfaceError::System`].
    pub fn by_index(index: u32) -> Result<Interface, InterfaceError> {
        let links = Links::read()?;
        match links.0.iter().find(|link| link.interface.index == index) {
            Some(link) => links.describe(link),
            None => Err(InterfaceError::Unknown {
                name: format!("number {index}"),
                near: Vec::new(),
            }),
        }
    }

    /// All interfaces of the thread's network namespace.
    ///
    /// # Errors
    ///
    /// [`InterfaceError::System`].
    pub fn all() -> Result<Vec<Interface>, InterfaceError> {
        let links = Links::read()?;
        links.0.iter().map(|link| links.describe(link)).collect()
    }

    /// Its primary IPv4 address.
    pub fn primary_address(&self) -> Option<Ipv4Addr> {
        self.addresses.first().map(|address| address.ip)
    }

    /// Whether LM can run on it with packets of up to `min_mtu` bytes.
    ///
    /// # Errors
    ///
    /// The first reason why not.
    pub fn check(&self, min_mtu: u32) -> Result<(), InterfaceError> {
        let name = || self.name.clone();
        if let Some(kind) = self.kind.as_deref().filter(|kind| is_stacked(kind)) {
            return Err(InterfaceError::Stacked {
                name: name(),
                kind: kind.to_owned(),
                ports: self.ports.clone(),
            });
        }
        if !self.ethernet {
            return Err(InterfaceError::NotEthernet { name: name() });
        }
        if !self.up {
            return Err(InterfaceError::Down { name: name() });
        }
        if self.mtu < min_mtu {
            return Err(InterfaceError::MtuTooSmall {
                name: name(),
                mtu: self.mtu,
                min: min_mtu,
            });
        }
        if self.addresses.is_empty() {
            return Err(InterfaceError::NoAddress { name: name() });
        }
        Ok(())
    }
}

/// Devices whose packets belong to another device's driver: XDP on them sees too little, or nothing at all.
fn is_stacked(kind: &str) -> bool {
    matches!(
        kind,
        "bond" | "team" | "bridge" | "vlan" | "macvlan" | "macvtap" | "ipvlan" | "ipvtap"
    )
}

/// What a link dump says of one link.
struct Link {
    /// Without its addresses, driver and ports; of its queues those that exist.
    interface: Interface,
    /// The bond, team or bridge that it is a port of.
    controller: Option<u32>,
    /// The device that it stands on, if that is in this namespace.
    lower: Option<u32>,
}

impl Link {
    fn is_stacked(&self) -> bool {
        self.interface.kind.as_deref().is_some_and(is_stacked)
    }

    fn from_message(message: &LinkMessage) -> Link {
        let mut interface = Interface {
            index: message.header.index,
            name: String::new(),
            mac: [0; 6],
            mtu: 0,
            addresses: Vec::new(),
            kind: None,
            driver: None,
            rx_queues: 1,
            rx_queues_max: 1,
            tx_queues: 1,
            xdp_program: None,
            up: message.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp),
            ethernet: message.header.link_layer_type == LinkLayerType::Ether,
            ports: Vec::new(),
        };
        let (mut controller, mut lower) = (None, None);
        let mut foreign_lower = false;
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => interface.name.clone_from(name),
                LinkAttribute::Address(mac) => interface.mac = mac.as_slice().try_into().unwrap_or_default(),
                LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
                LinkAttribute::NumRxQueues(count) => {
                    (interface.rx_queues, interface.rx_queues_max) = (*count, *count);
                }
                LinkAttribute::NumTxQueues(count) => interface.tx_queues = *count,
                LinkAttribute::Controller(index) => controller = Some(*index),
                LinkAttribute::Link(index) => lower = Some(*index),
                LinkAttribute::LinkNetNsId(_) => foreign_lower = true,
                LinkAttribute::LinkInfo(infos) => {
                    interface.kind = infos.iter().find_map(|info| match info {
                        LinkInfo::Kind(kind) => Some(kind.to_string()),
                        _ => None,
                    });
                }
                // With programs in several modes there is no IFLA_XDP_PROG_ID, but one attribute per mode.
                LinkAttribute::Xdp(parts) => {
                    interface.xdp_program = parts.iter().find_map(|part| match *part {
                        LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) => Some(id),
                        LinkXdp::SkbProgId(id) | LinkXdp::HwProgId(id) => Some(id),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        Link {
            interface,
            controller,
            lower: lower.filter(|_| !foreign_lower),
        }
    }
}

struct Links(Vec<Link>);

impl Links {
    fn read() -> Result<Links, InterfaceError> {
        let links =
            netlink::dump(&RouteNetlinkMessage::GetLink(LinkMessage::default())).map_err(|source| {
                InterfaceError::System {
                    call: "list of interfaces (RTM_GETLINK)",
                    source,
                }
            })?;
        let links = links.iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewLink(link) => Some(Link::from_message(link)),
            _ => None,
        });
        Ok(Links(links.collect()))
    }

    fn describe(&self, link: &Link) -> Result<Interface, InterfaceError> {
        let mut interface = link.interface.clone();
        if link.is_stacked() {
            self.collect_ports(link, 0, &mut interface.ports);
        }
        let ethtool = Ethtool::open(interface.index).map_err(|source| InterfaceError::System {
            call: "socket for ethtool",
            source,
        })?;
        if let Ok(channels) = ethtool.channels() {
            let queues = [
                (&mut interface.rx_queues, channels.rx),
                (&mut interface.tx_queues, channels.tx),
            ];
            queues
                .into_iter()
                .filter(|(_, used)| *used > 0)
                .for_each(|(queues, used)| *queues = used);
        }
        let driver = ethtool.driver().map(|driver| driver.name).ok();
        interface.driver = driver.filter(|driver| !driver.is_empty());
        interface.addresses = addresses(interface.index)?;
        Ok(interface)
    }

    /// The devices under a stacked one, down to those that are not stacked themselves.
    fn collect_ports(&self, stacked: &Link, depth: u32, ports: &mut Vec<String>) {
        for link in &self.0 {
            let (above, index) = (stacked.interface.index, link.interface.index);
            let below = link.controller == Some(above) || stacked.lower == Some(index);
            if !below || index == above {
                continue;
            }
            // The kernel itself allows 8 levels (`MAX_NEST_DEV`).
            if link.is_stacked() && depth < 8 {
                self.collect_ports(link, depth + 1, ports);
            } else if !ports.contains(&link.interface.name) {
                ports.push(link.interface.name.clone());
            }
        }
    }
}

fn addresses(index: u32) -> Result<Vec<InterfaceAddress>, InterfaceError> {
    let answers =
        netlink::dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default())).map_err(|source| {
            InterfaceError::System {
                call: "list of addresses (RTM_GETADDR)",
                source,
            }
        })?;
    let of_message = |message: &RouteNetlinkMessage| {
        let RouteNetlinkMessage::NewAddress(address) = message else {
            return None;
        };
        if address.header.index != index {
            return None;
        }
        // IFA_LOCAL is the own address, IFA_ADDRESS the peer's on a point-to-point link.
        let local = address.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(IpAddr::V4(ip)) => Some(*ip),
            _ => None,
        });
        let plain = address.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(IpAddr::V4(ip)) => Some(*ip),
            _ => None,
        });
        local.or(plain).map(|ip| InterfaceAddress {
            ip,
            prefix_len: address.header.prefix_len,
        })
    };
    Ok(answers.iter().filter_map(of_message).collect())
}

/// Up to four names that are one or two edits away, or that begin alike; all if there are few.
fn near_names<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<(usize, &str)> = names
        .filter(|name| *name != "lo")
        .map(|name| (strsim::levenshtein(wanted, name), name))
        .collect();
    names.sort();
    let few = names.len() <= 4;
    names
        .into_iter()
        .filter(|(distance, name)| few || *distance <= 2 || name.starts_with(wanted))
        .take(4)
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// The names as `text` puts them, or `otherwise` if there are none.
fn named_or(names: &[String], otherwise: &str, text: impl Fn(String) -> String) -> String {
    match names {
        [] => otherwise.into(),
        _ => text(names.join(" or ")),
    }
}

/// Why LM cannot run on an interface; one line each, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterfaceError {
    /// There is none of that name.
    #[error("no interface {name}; {}", named_or(.near, "see ip link", |near| format!("did you mean {near}?")))]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names that come near.
        near: Vec<String>,
    },
    /// It stands on other devices, whose drivers the packets belong to.
    #[error("{name} is a {kind} device{}", named_or(
        .ports,
        ", without a device below it here; use a physical interface",
        |ports| format!("; use the device below it: --interface {ports}"),
    ))]
    Stacked {
        /// Its name.
        name: String,
        /// "bond", "bridge", "vlan" …
        kind: String,
        /// The devices to use instead.
        ports: Vec<String>,
    },
    /// Loopback, a tunnel, or anything else without Ethernet frames.
    #[error("{name} is no Ethernet interface; choose another (ip -brief link)")]
    NotEthernet {
        /// Its name.
        name: String,
    },
    /// It is not set up, or has no link.
    #[error("{name} is down or has no link; set it up (ip link set {name} up) or check the cable")]
    Down {
        /// Its name.
        name: String,
    },
    /// Packets would be too short.
    #[error("{name} has MTU {mtu}, but at least {min} is needed; raise it (ip link set {name} mtu {min})")]
    MtuTooSmall {
        /// Its name.
        name: String,
        /// Its MTU in bytes.
        mtu: u32,
        /// The least that is needed, in bytes.
        min: u32,
    },
    /// It has no IPv4 address.
    #[error("{name} has no IPv4 address; give it one (ip address add ADDRESS/LENGTH dev {name})")]
    NoAddress {
        /// Its name.
        name: String,
    },
    /// The kernel could not be asked.
    #[error("{call}: {source}")]
    System {
        /// The question.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_near() {
        let names = ["lo", "eth0", "eth1", "enp3s0", "wlan0", "docker0", "br-lan"];
        assert_eq!(near_names("eht0", names.into_iter()), ["eth0"]);
        assert_eq!(near_names("eth", names.into_iter()), ["eth0", "eth1"]);
        assert_eq!(near_names("tap7", names.into_iter()), [""; 0]);
        assert_eq!(near_names("x", ["lo", "eth0"].into_iter()), ["eth0"]);
    }

    #[test]
    fn loopback_is_refused() {
        let lo = Interface::by_name("lo").expect("every namespace has a loopback");
        assert!(matches!(lo.check(576), Err(InterfaceError::NotEthernet { .. })));
        assert_eq!(Interface::by_index(lo.index).expect("the same by its index"), lo);
    }
}
