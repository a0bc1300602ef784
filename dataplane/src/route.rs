//! Where packets to a host go: interface, source address, next hop and its MAC address, all as the kernel knows them.
//!
//! AF_XDP sends whole Ethernet frames, so what the kernel's own sockets leave to routing and ARP must be asked for: the
//! route by `RTM_GETROUTE`, the neighbour by `RTM_GETNEIGH`. A neighbour that the kernel does not know yet is made known
//! by sending an empty datagram to the *discard* port (RFC 863), which makes the kernel resolve it.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use lm_cards::{Interface, InterfaceError, netlink};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};
use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::sockopt;

/// How long a host may take to answer ARP: long enough for the kernel's second request, a second after the first
/// (`net.ipv4.neigh.*.retrans_time_ms`).
pub const NEIGHBOUR_PATIENCE: Duration = Duration::from_millis(1300);

/// Port of the datagram that makes the kernel resolve a neighbour: *discard*.
const DISCARD_PORT: u16 = 9;
/// What such datagrams may take of the kernel's memory: some forty that wait for ARP.
const NUDGES_BYTES: usize = 16 << 10;

/// How packets reach a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The interface they leave by.
    pub interface_index: u32,
    /// Their source address.
    pub source: Ipv4Addr,
    /// The router they go to first, if the host is not on the link itself.
    pub gateway: Option<Ipv4Addr>,
    /// Ethernet address of the router or the host.
    pub mac: [u8; 6],
}

/// Resolves `destination`; with `interface` it must be reached through that one.
///
/// Blocks for at most [`NEIGHBOUR_PATIENCE`] and a little. An entry that the kernel holds for stale is believed, while the
/// datagram sent makes the kernel confirm it.
///
/// # Errors
///
/// See [`RouteError`].
pub fn resolve(destination: Ipv4Addr, interface: Option<u32>) -> Result<NextHop, RouteError> {
    if destination.is_loopback() {
        return Err(RouteError::Local { destination });
    }
    if destination.is_unspecified() || destination.is_multicast() || destination.is_broadcast() {
        return Err(RouteError::NotAHost { destination });
    }
    // Asked without an interface first: bound to one, the kernel takes any address, even an own one of another
    // interface, for a host on that link (`ip_route_output_key_hash_rcu` of net/ipv4/route.c).
    let netlink = open_netlink()?;
    let mut route = lookup(&netlink, destination, None);
    if let Ok(Route {
        kind: RouteType::Local,
        ..
    }) = route
    {
        return Err(RouteError::Local { destination });
    }
    if let Some(index) = interface
        && !route.as_ref().is_ok_and(|route| route.interface_index == index)
    {
        route = lookup(&netlink, destination, Some(index));
        // The kernel says "unreachable" of an interface that is down.
        if let Err(RouteError::NoRoute { .. }) = route
            && !Interface::by_index(index).is_ok_and(|found| found.up)
        {
            return Err(RouteError::Down { destination });
        }
    }
    let route = route?;
    match route.kind {
        RouteType::Unicast => {}
        RouteType::Local => return Err(RouteError::Local { destination }),
        RouteType::Broadcast | RouteType::Multicast | RouteType::Anycast => {
            return Err(RouteError::NotAHost { destination });
        }
        _ => return Err(RouteError::NoRoute { destination }),
    }
    let mac = neighbour(netlink, destination, &route)?;
    Ok(NextHop {
        interface_index: route.interface_index,
        source: route.source,
        gateway: route.gateway,
        mac,
    })
}

/// The kernel's table of neighbours, asked again and again. Both sockets see the network namespace of the thread that opened them.
#[derive(Debug)]
pub struct Neighbours {
    interface: u32,
    netlink: Socket,
    /// Has the kernel ask for neighbours. What waits for an answer is bounded by its allowance: that of no other socket is used up by
    /// addresses that no host has.
    nudge: UdpSocket,
}

impl Neighbours {
    /// Those behind an interface.
    ///
    /// # Errors
    ///
    /// [`RouteError::System`].
    pub fn open(interface: u32) -> Result<Neighbours, RouteError> {
        Neighbours::by(open_netlink()?, interface)
    }

    fn by(netlink: Socket, interface: u32) -> Result<Neighbours, RouteError> {
        let nudge = nudge_socket(interface)
            .map_err(|source| failed("datagram that resolves the neighbour", source))?;
        Ok(Neighbours {
            interface,
            netlink,
            nudge,
        })
    }

    /// The Ethernet address of the next hop towards `destination`, if the kernel has it now. If not, or if it has not heard of it for
    /// long, the kernel is made to ask; try again some milliseconds later. Does not block.
    ///
    /// # Errors
    ///
    /// [`RouteError`]; after [`RouteError::System`] these sockets are of no more use.
    pub fn known(&self, destination: Ipv4Addr) -> Result<Option<[u8; 6]>, RouteError> {
        let route = lookup(&self.netlink, destination, Some(self.interface))?;
        self.by_route(destination, &route)
    }

    fn by_route(&self, destination: Ipv4Addr, route: &Route) -> Result<Option<[u8; 6]>, RouteError> {
        let hop = route.gateway.unwrap_or(destination);
        let (state, mac) = known_neighbour(&self.netlink, hop, route.interface_index)?;
        if let NeighbourState::None | NeighbourState::Failed | NeighbourState::Stale = state {
            // What cannot be asked now is asked by the next try. A refusal by a firewall changes nothing: the neighbour may
            // be known all the same.
            let _ = self
                .nudge
                .send_to(&[], SocketAddrV4::new(destination, DISCARD_PORT));
        }
        Ok(mac)
    }
}

struct Route {
    kind: RouteType,
    interface_index: u32,
    source: Ipv4Addr,
    gateway: Option<Ipv4Addr>,
}

fn lookup(netlink: &Socket, destination: Ipv4Addr, interface: Option<u32>) -> Result<Route, RouteError> {
    let mut request = RouteMessage::default();
    request.header.address_family = AddressFamily::Inet;
    request.header.destination_prefix_length = 32;
    request
        .attributes
        .push(RouteAttribute::Destination(RouteAddress::Inet(destination)));
    if let Some(index) = interface {
        request.attributes.push(RouteAttribute::Oif(index));
    }
    let answer = netlink::one_by(netlink, &RouteNetlinkMessage::GetRoute(request)).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL) => {
                RouteError::NoRoute { destination }
            }
            Some(libc::ENETDOWN | libc::ENODEV) => RouteError::Down { destination },
            _ => failed("route (RTM_GETROUTE)", source),
        }
    })?;
    let RouteNetlinkMessage::NewRoute(answer) = answer else {
        return Err(RouteError::NoRoute { destination });
    };
    let mut route = Route {
        kind: answer.header.kind,
        interface_index: 0,
        source: Ipv4Addr::UNSPECIFIED,
        gateway: None,
    };
    for attribute in &answer.attributes {
        match attribute {
            RouteAttribute::Oif(index) => route.interface_index = *index,
            RouteAttribute::PrefSource(RouteAddress::Inet(ip)) => route.source = *ip,
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => route.gateway = Some(*ip),
            RouteAttribute::Via(_) => return Err(RouteError::Ipv6Gateway { destination }),
            _ => {}
        }
    }
    Ok(route)
}

/// MAC address of the next hop, resolved if need be.
fn neighbour(netlink: Socket, destination: Ipv4Addr, route: &Route) -> Result<[u8; 6], RouteError> {
    let neighbours = Neighbours::by(netlink, route.interface_index)?;
    let deadline = Instant::now() + NEIGHBOUR_PATIENCE;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(mac) = neighbours.by_route(destination, route)? {
            return Ok(mac);
        }
        if Instant::now() >= deadline {
            let interface = Interface::by_index(route.interface_index).map(|found| found.name);
            return Err(RouteError::NoAnswer {
                destination,
                gateway: route.gateway,
                interface: interface.unwrap_or_else(|_| format!("interface {}", route.interface_index)),
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// The state of the kernel's entry for a neighbour, and the MAC address where it is usable.
fn known_neighbour(
    netlink: &Socket,
    ip: Ipv4Addr,
    interface: u32,
) -> Result<(NeighbourState, Option<[u8; 6]>), RouteError> {
    let mut request = NeighbourMessage::default();
    request.header.family = AddressFamily::Inet;
    request.header.ifindex = interface;
    request
        .attributes
        .push(NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)));
    let answer = match netlink::one_by(netlink, &RouteNetlinkMessage::GetNeighbour(request)) {
        Ok(RouteNetlinkMessage::NewNeighbour(answer)) => answer,
        Ok(_) => return Ok((NeighbourState::None, None)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok((NeighbourState::None, None)),
        Err(source) => return Err(failed("neighbour (RTM_GETNEIGH)", source)),
    };
    let state = answer.header.state;
    if matches!(
        state,
        NeighbourState::None | NeighbourState::Incomplete | NeighbourState::Failed
    ) {
        return Ok((state, None));
    }
    let mac = answer.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().ok(),
        _ => None,
    });
    Ok((state, mac))
}

/// A socket whose datagrams make the kernel resolve or confirm next hops behind an interface.
fn nudge_socket(interface: u32) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_nonblocking(true)?;
    set_socket_send_buffer_size(&socket, NUDGES_BYTES)?;
    sockopt::set(&socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, &interface)?;
    Ok(socket)
}

fn open_netlink() -> Result<Socket, RouteError> {
    netlink::open(NETLINK_ROUTE).map_err(|source| failed("socket of rtnetlink", source))
}

fn failed(call: &'static str, source: io::Error) -> RouteError {
    RouteError::System { call, source }
}

/// Interfaces of the default routes, best first.
///
/// Attaching an XDP program makes some drivers reset their link, which cuts a remote login off for a moment: warn when
/// an interface is among these.
///
/// # Errors
///
/// [`RouteError::System`].
pub fn default_route_interfaces() -> Result<Vec<u32>, RouteError> {
    let mut request = RouteMessage::default();
    request.header.address_family = AddressFamily::Inet;
    let routes =
        netlink::dump(&RouteNetlinkMessage::GetRoute(request)).map_err(|source| RouteError::System {
            call: "list of routes (RTM_GETROUTE)",
            source,
        })?;
    let mut found: Vec<(u32, u32)> = Vec::new();
    for route in &routes {
        let RouteNetlinkMessage::NewRoute(route) = route else {
            continue;
        };
        if route.header.destination_prefix_length != 0 || route.header.kind != RouteType::Unicast {
            continue;
        }
        let mut metric = 0;
        let mut interfaces = Vec::new();
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Priority(value) => metric = *value,
                RouteAttribute::Oif(index) => interfaces.push(*index),
                RouteAttribute::MultiPath(hops) => {
                    interfaces.extend(hops.iter().map(|hop| hop.interface_index))
                }
                _ => {}
            }
        }
        found.extend(interfaces.into_iter().map(|index| (metric, index)));
    }
    found.sort_by_key(|(metric, _)| *metric);
    let mut interfaces: Vec<u32> = Vec::new();
    for (_, index) in found {
        if !interfaces.contains(&index) {
            interfaces.push(index);
        }
    }
    Ok(interfaces)
}

/// The interface to receive on when none was named: the best default route's, or the only one that is usable.
///
/// # Errors
///
/// [`RouteError::NoDefault`] with the usable interfaces, when there are several or none.
pub fn default_interface() -> Result<Interface, RouteError> {
    if let Some(index) = default_route_interfaces()?.first() {
        return Interface::by_index(*index).map_err(RouteError::Interface);
    }
    let mut usable: Vec<Interface> = Interface::all()
        .map_err(RouteError::Interface)?
        .into_iter()
        .filter(|one| one.check(576).is_ok())
        .collect();
    match usable.pop() {
        Some(only) if usable.is_empty() => Ok(only),
        last => Err(RouteError::NoDefault {
            usable: usable
                .into_iter()
                .chain(last)
                .map(|interface| interface.name)
                .collect(),
        }),
    }
}

fn no_answer(destination: &Ipv4Addr, gateway: Option<&Ipv4Addr>, interface: &str) -> String {
    match gateway {
        None => format!(
            "{destination} does not answer on {interface}; is the host up, and on that link? (ping {destination})"
        ),
        Some(gateway) => format!(
            "the router {gateway} to {destination} does not answer on {interface}; check the route (ip route)"
        ),
    }
}

fn no_default(usable: &[String]) -> String {
    match usable {
        [] => "no usable interface: none is up and has an IPv4 address; see ip -brief address".into(),
        _ => format!(
            "no default route; choose with --interface {}",
            usable.join(" or ")
        ),
    }
}

/// Why a host cannot be reached; one line each, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// The address is this host's own.
    #[error(
        "{destination} is this host itself; LM crosses a link: name another host (cargo xtask run makes two)"
    )]
    Local {
        /// The address.
        destination: Ipv4Addr,
    },
    /// A broadcast, multicast or unspecified address.
    #[error("{destination} is not one host's address; name a host")]
    NotAHost {
        /// The address.
        destination: Ipv4Addr,
    },
    /// The kernel has no route there, or one that forbids it.
    #[error("no route to {destination}; see ip route get {destination}")]
    NoRoute {
        /// The address.
        destination: Ipv4Addr,
    },
    /// The interface asked for is down or gone.
    #[error("the interface towards {destination} is down or gone; set it up (ip link set IF up)")]
    Down {
        /// The address.
        destination: Ipv4Addr,
    },
    /// The route's gateway is an IPv6 address.
    #[error(
        "the route to {destination} has an IPv6 gateway, which LM cannot use; add a route with an IPv4 one"
    )]
    Ipv6Gateway {
        /// The address.
        destination: Ipv4Addr,
    },
    /// Nobody answered ARP within [`NEIGHBOUR_PATIENCE`].
    #[error("{}", no_answer(.destination, .gateway.as_ref(), .interface))]
    NoAnswer {
        /// The address.
        destination: Ipv4Addr,
        /// The router asked for, if there is one.
        gateway: Option<Ipv4Addr>,
        /// The interface asked on.
        interface: String,
    },
    /// No interface was named, and there is no obvious one.
    #[error("{}", no_default(.usable))]
    NoDefault {
        /// Those that could be named.
        usable: Vec<String>,
    },
    /// An interface could not be read.
    #[error(transparent)]
    Interface(InterfaceError),
    /// The kernel could not be asked.
    #[error("{call}: {source}")]
    System {
        /// The question.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}
