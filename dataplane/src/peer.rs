//! Peers: who an endpoint talks to, and the table of them.
//!
//! A peer is known by the address of its data port. It is made by `connect`, or when a sender has proved its address
//! ([`crate::hearing`]). The table is bounded; when it is full, the peer that was silent longest and owes nothing makes room.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lm_protocol::introduction::Cookies;
use lm_protocol::serial;
use lm_protocol::wire::Addressing;

use crate::bounds::{PEERS_MAX, PEERS_OF_ADDRESS_MAX};
use crate::completion::PeerId;
use crate::connect::ConnectOptions;
use crate::eager::{EagerIn, EagerOut};
use crate::outbound::Outbound;

/// After this silence of a peer the way to it is looked up again, one peer's at a time.
const SILENT_NS: u64 = 250_000_000;

/// One peer.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) generation: u32,
    /// Its data port.
    pub(crate) data: SocketAddrV4,
    /// Its control port.
    pub(crate) control: SocketAddrV4,
    /// Headers of packets to it.
    pub(crate) addressing: Addressing,
    /// What is added to the endpoint's id towards it ([`Cookies::alias`]).
    pub(crate) alias: u64,
    pub(crate) eager_out: EagerOut,
    pub(crate) eager_in: EagerIn,
    /// The incarnation that proved its address; see [`crate::introductions`].
    pub(crate) incarnation: Option<u64>,
    /// The cookie by which it became that: what its flows have to show ([`Arrived::is_proved`](crate::Arrived::is_proved)).
    pub(crate) secret: u64,
    /// When it was told that last, because a packet under its address did not show it.
    pub(crate) reminded_ns: u64,
    /// What flows to it show.
    pub(crate) shown: Arc<AtomicU64>,
    /// Packets that it keeps uncompleted at most; 0: it does not count them, or that is not known.
    pub(crate) uncompleted_max: u32,
    /// The last challenge of the peer's that was answered, and when.
    pub(crate) proved: (u64, u64),
    pub(crate) outbound: Option<Outbound>,
    /// No LM endpoint: takes plain UDP datagrams only.
    pub(crate) plain: bool,
    pub(crate) heard_ns: u64,
    /// When its host said last that nobody listens there (ICMP); 0: never.
    pub(crate) refused_ns: u64,
    /// In the list of peers that are owed an acknowledgement.
    pub(crate) acknowledgement_due: bool,
    /// The application asked for it by address: it does not make room for strangers.
    pub(crate) wanted: bool,
    /// It is being asked for a session.
    pub(crate) applying: bool,
    /// The session that the application asked for.
    pub(crate) options: Option<ConnectOptions>,
    /// That session was ended by the peer, and is being asked for again.
    pub(crate) reopening: bool,
    /// Messages that the receiver of the session before had not heard of, for the next one: slots of the table of outgoing ones.
    pub(crate) unheard: VecDeque<u16>,
    /// Its sessions that land here.
    pub(crate) inbound: u32,
}

impl Peer {
    fn new(generation: u32, data: SocketAddrV4, addressing: Addressing, alias: u64, now_ns: u64) -> Peer {
        Peer {
            generation,
            data,
            alias,
            control: SocketAddrV4::new(*data.ip(), data.port().wrapping_add(1)),
            addressing,
            eager_out: EagerOut::new(now_ns),
            eager_in: EagerIn::unheard(),
            incarnation: None,
            secret: 0,
            reminded_ns: 0,
            shown: Arc::default(),
            uncompleted_max: 0,
            proved: (0, 0),
            outbound: None,
            plain: false,
            heard_ns: now_ns,
            refused_ns: 0,
            acknowledgement_due: false,
            wanted: false,
            applying: false,
            options: None,
            reopening: false,
            unheard: VecDeque::new(),
            inbound: 0,
        }
    }

    /// Has flows to it show the cookie that it asked for last, or that it became known by if it never asked: both ends have that.
    pub(crate) fn show(&self) {
        let cookie = if self.proved.0 == 0 {
            self.secret
        } else {
            self.proved.0
        };
        // Relaxed: the endpoint's thread alone reads it.
        self.shown.store(cookie, Ordering::Relaxed);
    }

    /// The id under which it knows this endpoint, in the present numbering.
    pub(crate) fn own_id(&self, endpoint: u64) -> u64 {
        self.eager_out.sender_id(endpoint.wrapping_add(self.alias))
    }

    /// Whether nothing is owed in either direction.
    fn is_disposable(&self) -> bool {
        self.outbound.is_none()
            && !self.eager_out.watched
            && !self.acknowledgement_due
            && !self.applying
            && self.inbound == 0
    }

    /// Whether one more eager message may be sent now.
    pub(crate) fn eager_credit(&self) -> u32 {
        serial::distance(self.eager_out.next, self.eager_out.limit).max(0) as u32
    }
}

/// All peers of an endpoint.
#[derive(Debug)]
pub(crate) struct Peers {
    cookies: Cookies,
    slots: Vec<Option<Peer>>,
    by_address: HashMap<SocketAddrV4, u16>,
    generation: u32,
    /// The one that the last packet came from: bursts come from one peer.
    last: Option<(SocketAddrV4, u16)>,
    /// The slot of the last silent one, and when it was looked for.
    silent: (u16, u64),
}

impl Peers {
    pub(crate) fn new(cookies: &Cookies) -> Peers {
        Peers {
            cookies: cookies.clone(),
            slots: (0..PEERS_MAX).map(|_| None).collect(),
            // Twice the bound, so that inserting after removals never has to grow the table.
            by_address: HashMap::with_capacity(2 * PEERS_MAX),
            generation: 0,
            last: None,
            silent: (0, 0),
        }
    }

    /// Now and then, one after the other: a peer with which something is under way, and that has been silent for
    /// [`SILENT_NS`].
    pub(crate) fn next_silent(&mut self, now_ns: u64) -> Option<u16> {
        let (last, looked_ns) = self.silent;
        if now_ns.saturating_sub(looked_ns) < SILENT_NS {
            return None;
        }
        let is_silent =
            |peer: &Peer| !peer.is_disposable() && now_ns.saturating_sub(peer.heard_ns) > SILENT_NS;
        let is_it = |&index: &u16| self.slots[usize::from(index)].as_ref().is_some_and(is_silent);
        let found = (last + 1..PEERS_MAX as u16).chain(0..=last).find(is_it);
        self.silent = (found.unwrap_or(last), now_ns);
        found
    }

    /// The peer at an address.
    #[inline]
    pub(crate) fn find(&mut self, data: SocketAddrV4) -> Option<u16> {
        match self.last {
            Some((address, index)) if address == data => Some(index),
            _ => {
                let index = *self.by_address.get(&data)?;
                self.last = Some((data, index));
                Some(index)
            }
        }
    }

    /// What is added to the endpoint's id towards an address.
    pub(crate) fn alias(&self, data: SocketAddrV4) -> u64 {
        self.cookies.alias(data)
    }

    /// Finds or makes the peer at an address. `None`: the table is full of peers that are owed something.
    pub(crate) fn find_or_add(
        &mut self,
        data: SocketAddrV4,
        addressing: &Addressing,
        now_ns: u64,
    ) -> Option<u16> {
        if let Some(index) = self.find(data) {
            return Some(index);
        }
        let is_neighbour = |peer: &Peer| peer.data.ip() == data.ip();
        let peers = || (self.slots.iter().enumerate()).filter_map(|(at, peer)| Some((at, peer.as_ref()?)));
        // One that proves itself at many ports makes room for itself.
        let is_crowd = peers().filter(|(_, peer)| is_neighbour(peer)).count() >= PEERS_OF_ADDRESS_MAX;
        let free = self.slots.iter().position(Option::is_none).filter(|_| !is_crowd);
        let disposable = || {
            peers()
                .filter(|(_, peer)| peer.is_disposable() && (!is_crowd || is_neighbour(peer)))
                .min_by_key(|(_, peer)| (peer.wanted, peer.heard_ns))
                .map(|(at, _)| at)
        };
        let index = free.or_else(disposable)?;
        if let Some(old) = &self.slots[index] {
            self.by_address.remove(&old.data);
            self.last = None;
        }
        self.generation = self.generation.wrapping_add(1);
        let alias = self.alias(data);
        self.slots[index] = Some(Peer::new(self.generation, data, *addressing, alias, now_ns));
        self.by_address.insert(data, index as u16);
        Some(index as u16)
    }

    /// The peer in a slot that is known to be taken.
    #[inline]
    pub(crate) fn at(&mut self, index: u16) -> &mut Peer {
        self.slots[usize::from(index)]
            .as_mut()
            .expect("a peer index in use names a peer")
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// The peer with this name, if it still is there.
    #[inline]
    pub(crate) fn named(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.slots[usize::from(id.index)]
            .as_mut()
            .filter(|peer| peer.generation == id.generation)
    }

    /// ICMP says that nobody listens at `by`.
    pub(crate) fn refused(&mut self, by: SocketAddrV4, now_ns: u64) {
        if let Some(index) = self.find(by) {
            self.at(index).refused_ns = now_ns;
        }
    }

    /// Its name.
    #[inline]
    pub(crate) fn id_of(&mut self, index: u16) -> PeerId {
        PeerId {
            index,
            generation: self.at(index).generation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lm_protocol::wire::ethernet::MacAddr;
    use std::net::Ipv4Addr;

    fn address(n: u16) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::new(10, 0, (n >> 8) as u8, n as u8), 7168)
    }

    fn addressing() -> Addressing {
        Addressing {
            src_mac: MacAddr([2, 0, 0, 0, 0, 1]),
            dst_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            vlan: None,
            src_ip: Ipv4Addr::new(10, 0, 0, 1),
            dst_ip: Ipv4Addr::new(10, 0, 0, 2),
            src_port: 7168,
            dst_port: 7168,
        }
    }

    #[test]
    fn the_longest_silent_peer_makes_room() {
        let mut peers = Peers::new(&Cookies::new(&[0; 16]));
        let addressing = addressing();
        for n in 0..PEERS_MAX as u16 {
            assert_eq!(
                peers.find_or_add(address(n), &addressing, u64::from(n) + 10),
                Some(n)
            );
        }
        let first = peers.id_of(0);
        assert!(peers.named(first).is_some());
        // Slot 0 is the oldest, but has a session; slot 1 goes.
        peers.at(0).inbound = 1;
        let new = peers.find_or_add(address(5000), &addressing, 5000);
        assert_eq!(new, Some(1));
        assert_eq!(peers.find(address(1)), None);
        peers.at(0).inbound = 0;
        assert_eq!(peers.find_or_add(address(5001), &addressing, 5001), Some(0));
        assert!(
            peers.named(first).is_none(),
            "an old name must not reach the new peer"
        );
    }

    #[test]
    fn strangers_do_not_push_out_whom_the_application_asked_for() {
        let mut peers = Peers::new(&Cookies::new(&[0; 16]));
        let addressing = addressing();
        let wanted = peers.find_or_add(address(9000), &addressing, 0).unwrap();
        peers.at(wanted).wanted = true;
        for n in 0..2 * PEERS_MAX as u16 {
            assert!(
                peers
                    .find_or_add(address(n), &addressing, 1000 + u64::from(n))
                    .is_some()
            );
        }
        assert_eq!(peers.find(address(9000)), Some(wanted));
        // Among the wanted ones the longest silent makes room again.
        for index in 0..PEERS_MAX as u16 {
            peers.at(index).wanted = true;
        }
        assert_eq!(peers.find_or_add(address(9001), &addressing, 9999), Some(wanted));
    }

    /// A host that answers at its address does so at each port.
    #[test]
    fn one_address_has_half_of_the_table() {
        let mut peers = Peers::new(&Cookies::new(&[0; 16]));
        let addressing = addressing();
        let others = PEERS_MAX as u16 / 4;
        for n in 0..others {
            peers.find_or_add(address(n), &addressing, 0).unwrap();
        }
        for port in 1..20_000 {
            let from = SocketAddrV4::new(*address(9000).ip(), port);
            assert!(peers.find_or_add(from, &addressing, u64::from(port)).is_some());
        }
        assert_eq!(peers.len(), usize::from(others) + PEERS_MAX / 2);
        assert!((0..others).all(|n| peers.find(address(n)).is_some()));
    }

    #[test]
    fn a_table_of_busy_peers_refuses() {
        let mut peers = Peers::new(&Cookies::new(&[0; 16]));
        let addressing = addressing();
        for n in 0..PEERS_MAX as u16 {
            let index = peers.find_or_add(address(n), &addressing, 0).unwrap();
            peers.at(index).acknowledgement_due = true;
        }
        assert_eq!(peers.find_or_add(address(5000), &addressing, 0), None);
    }
}
