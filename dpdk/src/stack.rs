//! A network stack for what the gate passes on: ARP, ICMP echo, and UDP for the two ports of one endpoint.
//!
//! It sees frames and time, and writes frames ([`Stack::frame`]): no device, no clock. All that others' packets can grow is bounded: neighbours,
//! and datagrams that wait.
//!
//! Checksums are written and not looked at: packets of this machine's own programs have none on virtual links (`CHECKSUM_PARTIAL` of Linux), and
//! of what crosses a cable Ethernet's own covers all.

use std::collections::{HashMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddrV4};

use etherparse::icmpv4::DestUnreachableHeader;
use etherparse::{
    ArpEthIpv4Packet, ArpOperation, Icmpv4Type, NetSlice, PacketBuilder, PacketBuilderStep, SlicedPacket,
    TransportSlice, UdpSlice,
};
use etherparse::{IpHeaders, Ipv4Header, Ipv4HeaderSlice, UdpHeader};
use ipnet::Ipv4Net;
use lm_dataplane::port::{Socket, SocketEvent};

use crate::shim::ROOM;

#[cfg(test)]
mod tests;

const BROADCAST: [u8; 6] = [0xff; 6];
const TTL: u8 = 64;
/// IP and UDP header.
const HEADERS_LEN: usize = Ipv4Header::MIN_LEN + UdpHeader::LEN;
/// Hosts whose Ethernet address is known or asked for.
const NEIGHBOURS_MAX: usize = 1024;
/// Datagrams that wait on a socket.
const WAITING_MAX: usize = 256;
/// Age at which the address of a host in use is asked for again; at twice this age it is unknown.
const FRESH_NS: u64 = 30_000_000_000;
/// How long an answer to such a question is waited for: no other answer is believed.
const ANSWER_NS: u64 = 2_000_000_000;
/// How soon a question is repeated.
const REPEAT_NS: u64 = 300_000_000;

/// What became of packets, beside those that reached a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ignored {
    /// For other hosts, protocols and networks, or malformed.
    pub(crate) foreign: u64,
    /// Parts of datagrams, which nothing here puts together.
    pub(crate) fragment: u64,
    /// Answers to no question.
    pub(crate) unasked: u64,
    /// Datagrams that met a full socket.
    pub(crate) full: u64,
    /// Datagrams for closed ports.
    pub(crate) refused: u64,
    /// Frames of hosts with the same address.
    pub(crate) same_address: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Neighbour {
    mac: Option<[u8; 6]>,
    heard_ns: u64,
    asked_ns: Option<u64>,
    used_ns: u64,
}

/// Datagrams and refusals that came for one port. Memory of those that were read is used again.
#[derive(Debug)]
struct Inbox {
    waiting: VecDeque<(SocketAddrV4, Option<Vec<u8>>)>,
    spare: Vec<Vec<u8>>,
}

impl Inbox {
    fn new() -> Inbox {
        Inbox {
            waiting: VecDeque::with_capacity(WAITING_MAX),
            spare: (0..WAITING_MAX).map(|_| Vec::with_capacity(ROOM)).collect(),
        }
    }

    /// `false`: it is full.
    fn put(&mut self, from: SocketAddrV4, payload: Option<&[u8]>) -> bool {
        if self.waiting.len() == WAITING_MAX {
            return false;
        }
        let kept = payload.and_then(|payload| {
            let mut space = self.spare.pop()?;
            space.extend_from_slice(payload);
            Some(space)
        });
        self.waiting.push_back((from, kept));
        true
    }

    fn take(&mut self, room: usize, read: impl FnOnce(&[u8])) -> Option<SocketEvent> {
        let (from, kept) = self.waiting.pop_front()?;
        let Some(mut payload) = kept else {
            return Some(SocketEvent::Refused(from));
        };
        let len = payload.len();
        if len <= room {
            read(&payload);
        }
        payload.clear();
        self.spare.push(payload);
        Some(match len <= room {
            true => SocketEvent::Datagram { from, len },
            false => SocketEvent::TooLong(from),
        })
    }
}

/// The stack of one address.
#[derive(Debug)]
pub(crate) struct Stack {
    /// Its address, and the network around it.
    site: Ipv4Net,
    /// The way to other networks.
    gateway: Option<Ipv4Addr>,
    mac: [u8; 6],
    data_port: u16,
    neighbours: HashMap<Ipv4Addr, Neighbour>,
    data: Inbox,
    control: Inbox,
    /// Datagrams and refusals that came to a socket.
    pub(crate) passed: u64,
    pub(crate) ignored: Ignored,
    frame: Box<[u8; ROOM]>,
    len: usize,
}

impl Stack {
    pub(crate) fn new(site: Ipv4Net, gateway: Option<Ipv4Addr>, mac: [u8; 6], data_port: u16) -> Stack {
        Stack {
            site,
            gateway,
            mac,
            data_port,
            neighbours: HashMap::with_capacity(NEIGHBOURS_MAX),
            data: Inbox::new(),
            control: Inbox::new(),
            passed: 0,
            ignored: Ignored::default(),
            frame: Box::new([0; ROOM]),
            len: 0,
        }
    }

    /// The data port and its address.
    pub(crate) fn local(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.site.addr(), self.data_port)
    }

    /// What was written last, to be sent; empty: nothing.
    pub(crate) fn frame(&self) -> &[u8] {
        &self.frame[..self.len]
    }

    fn inbox(&mut self, port: u16) -> Option<&mut Inbox> {
        match port {
            port if port == self.data_port => Some(&mut self.data),
            port if port == self.data_port + 1 => Some(&mut self.control),
            _ => None,
        }
    }

    /// Whether datagrams wait.
    pub(crate) fn has_datagrams(&self) -> bool {
        !self.data.waiting.is_empty() || !self.control.waiting.is_empty()
    }

    /// The next datagram or refusal; `read` is given one that is no longer than `room`.
    pub(crate) fn receive(
        &mut self,
        socket: Socket,
        room: usize,
        read: impl FnOnce(&[u8]),
    ) -> Option<SocketEvent> {
        match socket {
            Socket::Data => self.data.take(room, read),
            Socket::Control => self.control.take(room, read),
        }
    }

    /// Takes a frame that came, and writes what answers it.
    pub(crate) fn take(&mut self, frame: &[u8], now_ns: u64) {
        self.len = 0;
        let packet = match SlicedPacket::from_ethernet(frame) {
            Ok(packet) if packet.link_exts.is_empty() => packet,
            _ => {
                self.ignored.foreign += 1;
                return;
            }
        };
        let is_ours = frame[..6] == self.mac;
        match (&packet.net, &packet.transport) {
            (Some(NetSlice::Arp(arp)), _) if is_ours || frame[..6] == BROADCAST => {
                match arp.to_packet().try_eth_ipv4() {
                    Ok(arp) => self.take_arp(&arp, now_ns),
                    Err(_) => self.ignored.foreign += 1,
                }
            }
            (Some(NetSlice::Ipv4(ip)), transport)
                if is_ours && ip.header().destination_addr() == self.site.addr() =>
            {
                let header = ip.header();
                match transport {
                    _ if ip.is_payload_fragmented() => self.ignored.fragment += 1,
                    Some(TransportSlice::Udp(udp)) => self.take_datagram(frame, &header, udp),
                    Some(TransportSlice::Icmpv4(icmp)) => {
                        self.take_icmp(frame, &header, icmp.icmp_type(), icmp.payload());
                    }
                    _ => self.ignored.foreign += 1,
                }
            }
            _ => self.ignored.foreign += 1,
        }
    }

    fn take_arp(&mut self, arp: &ArpEthIpv4Packet, now_ns: u64) {
        let (from, target) = (arp.sender_ipv4_addr(), arp.target_ipv4_addr());
        if from == self.site.addr() && arp.sender_mac != self.mac {
            if self.ignored.same_address == 0 {
                let [a, b, c, d, e, f] = arp.sender_mac;
                tracing::warn!(
                    "{from} is used by {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x} as well; give one of the two \
                     another address (--dpdk-address)"
                );
            }
            self.ignored.same_address += 1;
            return;
        }
        if target != self.site.addr() {
            self.ignored.foreign += 1;
            return;
        }
        // A question is from a host that is about to send (RFC 826); an answer counts where there was a question.
        let is_question = arp.operation == ArpOperation::REQUEST;
        let is_asked = |neighbour: &Neighbour| {
            (neighbour.asked_ns).is_some_and(|asked_ns| now_ns.saturating_sub(asked_ns) < ANSWER_NS)
        };
        let is_awaited = is_question || self.neighbours.get(&from).is_some_and(is_asked);
        if !is_awaited || !self.site.contains(&from) || arp.sender_mac[0] & 1 != 0 {
            self.ignored.unasked += 1;
        } else {
            let neighbour = self.entry(from);
            neighbour.mac = Some(arp.sender_mac);
            (neighbour.heard_ns, neighbour.asked_ns) = (now_ns, None);
        }
        if is_question {
            self.write_arp(ArpOperation::REPLY, arp.sender_mac, from);
        }
    }

    fn write_arp(&mut self, operation: ArpOperation, to: [u8; 6], target: Ipv4Addr) {
        let arp = ArpEthIpv4Packet {
            operation,
            sender_mac: self.mac,
            sender_ipv4: self.site.addr().octets(),
            target_mac: if to == BROADCAST { [0; 6] } else { to },
            target_ipv4: target.octets(),
        };
        let frame = PacketBuilder::ethernet2(self.mac, to).arp(arp.into());
        self.len = frame.write_to_slice(&mut self.frame[..]).unwrap_or_default();
    }

    /// What is known of a host. One that was not used for the longest time makes room for a new one.
    fn entry(&mut self, ip: Ipv4Addr) -> &mut Neighbour {
        if self.neighbours.len() == NEIGHBOURS_MAX && !self.neighbours.contains_key(&ip) {
            let unused = self.neighbours.iter();
            let unused = unused.min_by_key(|(_, neighbour)| (neighbour.used_ns, neighbour.heard_ns));
            if let Some(unused) = unused.map(|(&ip, _)| ip) {
                self.neighbours.remove(&unused);
            }
        }
        self.neighbours.entry(ip).or_default()
    }

    /// The Ethernet address behind which `ip` is, if it is known; where it is to be asked for, writes the question.
    ///
    /// # Errors
    ///
    /// There is no way there.
    pub(crate) fn neighbour(&mut self, ip: Ipv4Addr, now_ns: u64) -> Result<Option<[u8; 6]>, String> {
        self.len = 0;
        let site = self.site;
        if ip == site.addr() {
            return Err(format!(
                "{ip} is the address of this port itself; name another host"
            ));
        }
        let hop = Some(ip).filter(|ip| site.contains(ip)).or(self.gateway);
        let hop = hop
            .ok_or_else(|| format!("{ip} is not on the network {site}; name the gateway (--dpdk-gateway)"))?;
        let neighbour = self.entry(hop);
        neighbour.used_ns = now_ns;
        let age_ns = now_ns.saturating_sub(neighbour.heard_ns);
        let known = neighbour.mac.filter(|_| age_ns < 2 * FRESH_NS);
        let was_asked = |asked_ns| now_ns.saturating_sub(asked_ns) < REPEAT_NS;
        if (known.is_none() || age_ns >= FRESH_NS) && !neighbour.asked_ns.is_some_and(was_asked) {
            neighbour.asked_ns = Some(now_ns);
            self.write_arp(ArpOperation::REQUEST, BROADCAST, hop);
        }
        Ok(known)
    }

    fn ipv4(&self, to_mac: [u8; 6], to: Ipv4Addr) -> PacketBuilderStep<IpHeaders> {
        let frame = PacketBuilder::ethernet2(self.mac, to_mac);
        frame.ipv4(self.site.addr().octets(), to.octets(), TTL)
    }

    /// Writes a datagram. `false`: it is too long.
    pub(crate) fn write_datagram(
        &mut self,
        socket: Socket,
        (to_mac, to): ([u8; 6], SocketAddrV4),
        payload: &[u8],
        mtu: u16,
    ) -> bool {
        let from = self.data_port + u16::from(socket == Socket::Control);
        let datagram = self.ipv4(to_mac, *to.ip()).udp(from, to.port());
        if payload.len() + HEADERS_LEN > usize::from(mtu) {
            return false;
        }
        let written = datagram.write_to_slice(&mut self.frame[..], payload);
        self.len = written.unwrap_or_default();
        self.len > 0
    }

    fn take_datagram(&mut self, frame: &[u8], ip: &Ipv4HeaderSlice<'_>, udp: &UdpSlice<'_>) {
        let from = SocketAddrV4::new(ip.source_addr(), udp.source_port());
        let inbox = self.inbox(udp.destination_port());
        match inbox.map(|inbox| inbox.put(from, Some(udp.payload()))) {
            Some(true) => self.passed += 1,
            Some(false) => self.ignored.full += 1,
            None => {
                self.ignored.refused += 1;
                let unreachable = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port);
                let original = &frame[14..][..ip.slice().len() + UdpHeader::LEN];
                self.answer(frame, ip.source_addr(), unreachable, original);
            }
        }
    }

    fn take_icmp(&mut self, frame: &[u8], ip: &Ipv4HeaderSlice<'_>, kind: Icmpv4Type, payload: &[u8]) {
        match kind {
            Icmpv4Type::EchoRequest(echo) => {
                self.answer(frame, ip.source_addr(), Icmpv4Type::EchoReply(echo), payload);
            }
            Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port) => self.take_refusal(payload),
            _ => self.ignored.foreign += 1,
        }
    }

    /// An ICMP message to the sender of `frame`: to where that came from, since its address may not be known.
    fn answer(&mut self, frame: &[u8], to: Ipv4Addr, kind: Icmpv4Type, payload: &[u8]) {
        let to_mac = <[u8; 6]>::try_from(&frame[6..12]).expect("an Ethernet header");
        let message = self.ipv4(to_mac, to).icmpv4(kind);
        let written = message.write_to_slice(&mut self.frame[..], payload);
        self.len = written.unwrap_or_default();
    }

    /// A datagram from here went to a closed port: these are its first bytes.
    fn take_refusal(&mut self, original: &[u8]) {
        let local = self.site.addr();
        let header = Ipv4HeaderSlice::from_slice(original).ok();
        let ours = header.filter(|header| header.source_addr() == local && header.protocol().0 == 17);
        let refused = ours.and_then(|header| {
            let (udp, _) = UdpHeader::from_slice(original.get(header.slice().len()..)?).ok()?;
            let by = SocketAddrV4::new(header.destination_addr(), udp.destination_port);
            self.inbox(udp.source_port).map(|inbox| inbox.put(by, None))
        });
        match refused {
            Some(true) => self.passed += 1,
            Some(false) => self.ignored.full += 1,
            None => self.ignored.foreign += 1,
        }
    }
}
