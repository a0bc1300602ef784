//! An ordinary user's UDP sockets against a real-time socket, on a veth pair of this kernel: what strangers make it hold and do.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;
mod veth;

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use bed::Pair;
use lm_dataplane::{Endpoint, IdleStrategy};
use lm_protocol::control::{ControlMessage, MAX_CONTROL_LEN, Proof, WORD_LEN};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, LmHeader, RealTimePacket, TYPE_REALTIME, Trailer};
use lm_realtime::{RealTime, RtSocket, SendOptions, SocketConfig, monotonic};

const PORT: u16 = 1;

/// Two hosts with a real-time socket each, the first of which sends to the second.
struct Hosts<'a> {
    near: Endpoint,
    far: Endpoint,
    sender: RtSocket,
    receiver: RtSocket,
    pair: &'a Pair,
}

impl Hosts<'_> {
    fn new(pair: &Pair) -> Hosts<'_> {
        let open = |interface| veth::open(interface, IdleStrategy::default());
        let (mut near, mut far) = (pair.a.run(|| open("va")), pair.b.run(|| open("vb")));
        let [mut sender, receiver] = [&mut near, &mut far].map(|end| {
            let real_time = RealTime::new(end, None, monotonic).expect("no other handler");
            real_time
                .socket(end, PORT, &SocketConfig::default())
                .expect("memory")
        });
        let to = far.local();
        let peer = pair.a.run(|| veth::peer(&mut near, to));
        sender.connect(&mut near, peer, PORT).expect("frames");
        while far.try_recv().expect("the greeting").is_none() {
            near.poll();
        }
        Hosts {
            near,
            far,
            sender,
            receiver,
            pair,
        }
    }

    /// A message of the honest sender's comes.
    fn exchange(&mut self) {
        self.sender
            .send(b"honest", SendOptions::default())
            .expect("it is polled");
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            assert!(Instant::now() < limit, "{:?}", self.receiver.statistics());
            self.near.poll();
            self.far.poll();
            while let Some(message) = self.receiver.recv() {
                if message[..] == *b"honest" {
                    return;
                }
            }
        }
    }

    /// An ordinary user's socket, whose address the second host has proved.
    fn stranger(&mut self, ip: Ipv4Addr) -> Stranger {
        let socket = (self.pair.a).run(|| UdpSocket::bind(SocketAddrV4::new(ip, 0)).expect("free"));
        socket.connect(self.far.local()).expect("a route");
        socket.set_nonblocking(true).expect("a socket");
        let port = socket.local_addr().expect("bound").port();
        let (from, id) = (SocketAddrV4::new(ip, port), u64::from(port) << 40 | 1);
        let header = LmHeader::Eager {
            sender_id: id,
            number: 0,
            tag: 0,
            digested: true,
            acknowledges: None,
        };
        let greeting = [&header.encode(0)[..], Trailer::new(&header, &[], from).as_bytes()].concat();
        let limit = Instant::now() + Duration::from_secs(20);
        let mut datagram = [0; 2048];
        let mut again = 0;
        let cookie = loop {
            assert!(
                Instant::now() < limit,
                "{from} is not challenged: {:?}",
                self.far.counters()
            );
            if again % 1000 == 0 {
                socket.send(&greeting).expect("a route");
            }
            again += 1;
            self.far.poll();
            let Ok(len) = socket.recv(&mut datagram) else {
                continue;
            };
            if let Ok((_, ControlMessage::Challenge(challenge))) = ControlMessage::parse(&datagram[..len]) {
                break challenge.cookie;
            }
        };
        let proof = ControlMessage::Proof(Proof {
            sender_id: id,
            cookie,
            data_port: port,
            uncompleted_max: 0,
            word: [0; WORD_LEN],
        });
        let mut bytes = [0; MAX_CONTROL_LEN];
        let len = proof.encode(0, &mut bytes);
        socket.send(&bytes[..len]).expect("a route");
        self.far.poll();
        Stranger { socket, from, cookie }
    }
}

/// A UDP socket that has proved its address.
struct Stranger {
    socket: UdpSocket,
    from: SocketAddrV4,
    cookie: u64,
}

impl Stranger {
    /// Sends message 0 of a flow.
    fn send(&self, flow: u16) {
        let key = self.cookie >> 16 << 16 | u64::from(flow);
        let bytes = real_time(self.from, key, 0);
        // What finds a queue full is lost, like other packets.
        let _ = self.socket.send(&bytes);
    }
}

/// A message of one packet.
fn real_time(from: SocketAddrV4, key: u64, message: u32) -> Vec<u8> {
    let packet = RealTimePacket {
        message,
        index: 0,
        count: 1,
        deadline: None,
        sent_at: Time::ZERO,
        message_len: 8,
        offset: 0,
        port: PORT,
        priority: 0,
        clock: Clock::Host,
        payload: b"stranger",
    };
    let header = LmHeader::Extension {
        packet_type: TYPE_REALTIME,
        key,
        words: packet.words(),
    };
    let payload = [packet.payload, &packet.tail()].concat();
    let trailer = Trailer::new(&header, &payload, from);
    [
        &header.encode(payload.len() as u16)[..],
        &payload,
        trailer.as_bytes(),
    ]
    .concat()
}

/// Hundreds of flows of one address, then thousands of many: so many are known, and a round in which nothing comes looks at none of them.
#[test]
fn flows_of_strangers_are_bounded_and_cost_nothing_while_they_are_silent() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(2);
    // The second host looks for its neighbours in the namespace of its thread.
    pair.b.run(|| flood_of_flows(&pair));
}

fn flood_of_flows(pair: &Pair) {
    let mut hosts = Hosts::new(pair);
    hosts.exchange();
    let flood = |hosts: &mut Hosts<'_>, addresses: std::ops::Range<u8>, sockets: usize| {
        for last in addresses {
            let ip = Ipv4Addr::new(10, 77, 0, last);
            hosts.pair.a.ip(&format!("address add {ip}/24 dev va"));
            // The second host has a neighbour's entry for whatever it talked to.
            let talk = || UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(b"", (ip, 9)));
            hosts.pair.b.run(talk).expect("a route");
            for _ in 0..sockets {
                let stranger = hosts.stranger(ip);
                for flow in 0..16 {
                    stranger.send(flow);
                    hosts.far.poll();
                    while hosts.receiver.recv().is_some() {}
                }
            }
        }
        hosts.exchange();
        hosts.receiver.statistics()
    };
    let one = flood(&mut hosts, 100..101, 16);
    let many = flood(&mut hosts, 101..141, 4);
    assert!(many.whole > 2000, "{many:?}");
    // All reports have left.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(50) {
        hosts.far.poll();
    }
    let before = hosts.receiver.statistics();
    for _ in 0..10_000 {
        hosts.far.poll();
        // What a program asks before it sleeps.
        hosts.far.extensions().until_departure();
    }
    let looks = hosts.receiver.statistics().flow_looks - before.flow_looks;
    assert!(
        one.flows <= 64 + 1 && many.flows <= 1024 && looks <= many.flows,
        "{} flows of one address, {} of all, {looks} looks in 10,000 rounds without a packet",
        one.flows,
        many.flows
    );
}
