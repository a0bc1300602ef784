//! The stack by its frames alone: what it answers, what it believes, and that nothing grows.

use super::*;

const US: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const MAC: [u8; 6] = [2, 0, 10, 9, 0, 1];
const PEER_MAC: [u8; 6] = [2, 0, 10, 9, 0, 2];
const PORT: u16 = 7168;
const SECOND: u64 = 1_000_000_000;

fn stack_of(address: Ipv4Addr, mac: [u8; 6]) -> Stack {
    let site = Ipv4Net::new_assert(address, 24);
    Stack::new(site, Some(Ipv4Addr::new(10, 9, 0, 254)), mac, PORT)
}

fn stack() -> Stack {
    stack_of(US, MAC)
}

fn arp(operation: ArpOperation, from: ([u8; 6], Ipv4Addr), to: [u8; 6], target: Ipv4Addr) -> Vec<u8> {
    let arp = ArpEthIpv4Packet {
        operation,
        sender_mac: from.0,
        sender_ipv4: from.1.octets(),
        target_mac: to,
        target_ipv4: target.octets(),
    };
    let mut frame = Vec::new();
    let packet = PacketBuilder::ethernet2(from.0, to).arp(arp.into());
    packet.write_to_vec(&mut frame).expect("a frame");
    frame
}

fn question(from: ([u8; 6], Ipv4Addr)) -> Vec<u8> {
    arp(ArpOperation::REQUEST, from, BROADCAST, US)
}

fn answer(from: ([u8; 6], Ipv4Addr)) -> Vec<u8> {
    arp(ArpOperation::REPLY, from, MAC, US)
}

fn to_us() -> PacketBuilderStep<IpHeaders> {
    PacketBuilder::ethernet2(PEER_MAC, MAC).ipv4(PEER.octets(), US.octets(), 9)
}

fn written(packet: PacketBuilderStep<UdpHeader>, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    packet.write_to_vec(&mut frame, payload).expect("a frame");
    frame
}

fn datagram(ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    written(to_us().udp(ports.0, ports.1), payload)
}

fn read(stack: &mut Stack, socket: Socket) -> Option<(SocketEvent, Vec<u8>)> {
    let mut bytes = Vec::new();
    let event = stack.receive(socket, ROOM, |payload| bytes.extend_from_slice(payload))?;
    Some((event, bytes))
}

#[test]
fn neighbours_are_asked_for_believed_and_forgotten() {
    let mut stack = stack();
    assert_eq!(stack.neighbour(PEER, SECOND), Ok(None));
    let asked = stack.frame().to_vec();
    let packet = SlicedPacket::from_ethernet(&asked).expect("a frame");
    let Some(NetSlice::Arp(arp)) = packet.net else {
        panic!("{packet:?}")
    };
    let arp = arp.to_packet().try_eth_ipv4().expect("of IPv4");
    assert_eq!(
        (arp.operation, arp.target_ipv4_addr()),
        (ArpOperation::REQUEST, PEER)
    );
    assert_eq!(stack.neighbour(PEER, SECOND + 1), Ok(None));
    assert!(stack.frame().is_empty(), "asked a moment ago");
    stack.take(&answer((PEER_MAC, PEER)), SECOND + 2);
    assert_eq!(stack.neighbour(PEER, SECOND + 3), Ok(Some(PEER_MAC)));
    assert!(stack.frame().is_empty());
    // Old: known still, and asked for again; older: unknown.
    assert_eq!(stack.neighbour(PEER, 40 * SECOND), Ok(Some(PEER_MAC)));
    assert!(!stack.frame().is_empty());
    assert_eq!(stack.neighbour(PEER, 70 * SECOND), Ok(None));
    // Elsewhere is behind the gateway, and without one nowhere.
    let far = Ipv4Addr::new(192, 0, 2, 7);
    stack
        .neighbour(far, 70 * SECOND)
        .expect("the gateway is asked for");
    assert_eq!(stack.frame()[38..42], [10, 9, 0, 254]);
    stack.gateway = None;
    for nowhere in [far, US] {
        let why = stack.neighbour(nowhere, 70 * SECOND).unwrap_err();
        assert!(why.contains("; name "), "{why}");
    }
}

#[test]
fn a_forged_answer_changes_nothing() {
    let mut stack = stack();
    let forger = [2, 6, 6, 6, 6, 6];
    stack.take(&answer((forger, PEER)), SECOND);
    assert_eq!(stack.neighbour(PEER, SECOND), Ok(None));
    stack.take(&answer((PEER_MAC, PEER)), SECOND);
    stack.take(&answer((forger, PEER)), 2 * SECOND);
    assert_eq!(stack.neighbour(PEER, 2 * SECOND), Ok(Some(PEER_MAC)));
    // Late, from outside the network, of a group.
    stack.neighbour(Ipv4Addr::new(10, 9, 0, 3), SECOND).expect("near");
    stack.take(&answer((forger, Ipv4Addr::new(10, 9, 0, 3))), 4 * SECOND);
    stack.take(&question((forger, Ipv4Addr::new(10, 8, 0, 3))), SECOND);
    stack.take(&question(([3, 0, 0, 0, 0, 1], PEER)), SECOND);
    assert_eq!(stack.neighbour(PEER, 2 * SECOND), Ok(Some(PEER_MAC)));
    assert_eq!(stack.neighbour(Ipv4Addr::new(10, 9, 0, 3), 4 * SECOND), Ok(None));
    assert_eq!(stack.ignored.unasked, 5);
    // With this stack's address: told once, and not answered.
    for count in 1..3 {
        stack.take(&question((forger, US)), SECOND);
        assert_eq!((stack.ignored.same_address, stack.frame().len()), (count, 0));
    }
}

#[test]
fn ten_thousand_neighbours_take_no_more_memory_than_a_thousand() {
    let mut stack = stack();
    stack.site = Ipv4Net::new_assert(US, 8);
    let room = stack.neighbours.capacity();
    stack.take(&question((PEER_MAC, PEER)), SECOND);
    stack.neighbour(PEER, SECOND).expect("near");
    for number in 0..10_000_u32 {
        let [.., c, d] = number.to_be_bytes();
        let host = ([2, 1, 1, 1, c, d], Ipv4Addr::new(10, 10, c, d));
        stack.take(&question(host), 2 * SECOND);
        let packet = SlicedPacket::from_ethernet(stack.frame()).expect("an answer");
        assert!(matches!(packet.net, Some(NetSlice::Arp(_))), "each is answered");
    }
    assert_eq!(stack.neighbours.len(), NEIGHBOURS_MAX);
    assert!(stack.neighbours.capacity() <= room);
    assert_eq!(
        stack.neighbour(PEER, 3 * SECOND),
        Ok(Some(PEER_MAC)),
        "a neighbour in use stays"
    );
}

#[test]
fn datagrams_come_to_their_ports_and_others_are_refused() {
    let mut stack = stack();
    let from = SocketAddrV4::new(PEER, 99);
    stack.take(&datagram((99, PORT), b"data"), 0);
    stack.take(&datagram((99, PORT + 1), b""), 0);
    assert!(stack.frame().is_empty() && stack.has_datagrams());
    let event = SocketEvent::Datagram { from, len: 4 };
    assert_eq!(read(&mut stack, Socket::Data), Some((event, b"data".to_vec())));
    let event = SocketEvent::Datagram { from, len: 0 };
    assert_eq!(read(&mut stack, Socket::Control), Some((event, vec![])));
    assert_eq!(read(&mut stack, Socket::Control), None);
    stack.take(&datagram((99, PORT), b"data"), 0);
    assert_eq!(
        stack.receive(Socket::Data, 3, |_| panic!("too long")),
        Some(SocketEvent::TooLong(from))
    );

    // A datagram to a closed port is refused, and a refusal comes to its socket: the answer of one stack is for the other.
    stack.take(&datagram((PORT + 1, 9), b"a question"), 0);
    let mut theirs = stack_of(PEER, PEER_MAC);
    theirs.take(stack.frame(), 0);
    let refused = SocketEvent::Refused(SocketAddrV4::new(US, 9));
    assert_eq!(read(&mut theirs, Socket::Control), Some((refused, vec![])));
    assert_eq!((stack.ignored.refused, theirs.passed), (1, 1));

    // What this stack writes, another one reads.
    assert!(theirs.write_datagram(Socket::Data, (MAC, stack.local()), &[7; 1000], 1500));
    let written = theirs.frame().to_vec();
    stack.take(&written, 0);
    assert_eq!(
        read(&mut stack, Socket::Data).map(|(_, bytes)| bytes),
        Some(vec![7; 1000])
    );
    assert!(!theirs.write_datagram(Socket::Data, (MAC, stack.local()), &[7; 1473], 1500));
}

#[test]
fn a_flood_of_datagrams_is_bounded_and_counted() {
    let mut stack = stack();
    let flood = datagram((99, PORT), &[1; 100]);
    for _ in 0..10_000 {
        stack.take(&flood, 0);
    }
    assert_eq!(stack.passed + stack.ignored.full, 10_000);
    assert_eq!(stack.passed, WAITING_MAX as u64);
    while read(&mut stack, Socket::Data).is_some() {}
    stack.take(&flood, 0);
    assert!(read(&mut stack, Socket::Data).is_some(), "memory is used again");
}

#[test]
fn echoes_are_answered() {
    let mut stack = stack();
    let mut frame = Vec::new();
    let request = to_us().icmpv4_echo_request(7, 8);
    request
        .write_to_vec(&mut frame, b"are you there")
        .expect("a frame");
    stack.take(&frame, 0);
    let reply = SlicedPacket::from_ethernet(stack.frame()).expect("a frame");
    let Some(TransportSlice::Icmpv4(icmp)) = reply.transport else {
        panic!("{reply:?}")
    };
    assert!(matches!(icmp.icmp_type(), Icmpv4Type::EchoReply(echo) if (echo.id, echo.seq) == (7, 8)));
    assert_eq!(icmp.payload(), b"are you there");
    assert_eq!(stack.frame()[..6], PEER_MAC);
}

#[test]
fn tags_and_parts_are_dropped_and_counted() {
    let mut stack = stack();
    let mut part = datagram((99, PORT), b"a part");
    part[20] = 0x20;
    stack.take(&part, 0);
    assert_eq!(stack.ignored.fragment, 1);
    let frame = PacketBuilder::ethernet2(PEER_MAC, MAC).single_vlan(5.try_into().expect("a VLAN"));
    let frame = frame.ipv4(PEER.octets(), US.octets(), 9).udp(99, PORT);
    stack.take(&written(frame, b"tagged"), 0);
    assert_eq!((stack.ignored.foreign, stack.has_datagrams()), (1, false));
    // IP options are borne.
    let mut ip = Ipv4Header::new(0, 9, etherparse::IpNumber::UDP, PEER.octets(), US.octets()).expect("short");
    ip.options = [1, 1, 1, 0].into();
    let frame = PacketBuilder::ethernet2(PEER_MAC, MAC).ip(IpHeaders::Ipv4(ip, Default::default()));
    stack.take(&written(frame.udp(99, PORT), b"optional"), 0);
    assert!(read(&mut stack, Socket::Data).is_some_and(|(_, bytes)| bytes == b"optional"));
}

/// Whatever comes: no panic, one answer at most, and each frame is in one count.
#[test]
fn fuzzed_frames() {
    let mut seed = 1_u64;
    let mut roll = || {
        seed = seed
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (seed >> 33) as usize
    };
    let mut unreachable = stack();
    unreachable.take(&datagram((PORT, 9), b"refused"), 0);
    let known = [
        question((PEER_MAC, PEER)),
        answer((PEER_MAC, PEER)),
        datagram((99, PORT), b"data"),
        datagram((99, 9), b"refused"),
        unreachable.frame().to_vec(),
    ];
    let mut stack = stack();
    for round in 0..200_000 {
        let mut frame = known[roll() % known.len()].clone();
        for _ in 0..roll() % 4 {
            let at = roll() % frame.len();
            frame[at] = roll() as u8;
        }
        if roll() % 4 == 0 {
            frame.truncate(14 + roll() % (frame.len() - 13));
        }
        let before = (stack.passed, stack.ignored);
        stack.take(&frame, round * 1_000_000);
        let is_counted = before != (stack.passed, stack.ignored);
        assert!(
            is_counted || !stack.frame().is_empty() || frame[12..14] == [8, 6],
            "round {round}: {frame:?}"
        );
        if round % 100 == 0 {
            while read(&mut stack, Socket::Data).is_some() || read(&mut stack, Socket::Control).is_some() {}
        }
    }
    assert!(stack.neighbours.len() <= NEIGHBOURS_MAX);
}
