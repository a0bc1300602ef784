//! An ordinary user's UDP sockets, and a host that forges addresses, against a real-time socket on a veth pair of this kernel: what they make it
//! hold, do and deliver.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;
#[path = "../../admission/tests/attacks/forger.rs"]
#[allow(dead_code)] // the attacks on admission use the rest
mod forger;
mod veth;

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use bed::Pair;
use forger::{Forger, encoded, message};
use lm_dataplane::Endpoint;
use lm_protocol::control::{ControlMessage, Proof};
use lm_protocol::wire::lm::{LmHeader, RealTimePacket, TYPE_REALTIME, Trailer};
use lm_realtime::{RtSocket, SendOptions, SocketConfig};

const PORT: u16 = 1;
/// Packets that a flood has in each round.
const PER_ROUND: u32 = 20;

/// Two hosts with a real-time socket each, the first of which sends to the second.
struct Hosts<'a> {
    ends: [Endpoint; 2],
    sockets: [RtSocket; 2],
    /// Messages that came and were not the first host's.
    others: u32,
    pair: &'a Pair,
}

impl Hosts<'_> {
    fn new(pair: &Pair) -> Hosts<'_> {
        let mut config = SocketConfig::default();
        config.blocks.of_1 = 18;
        let (ends, sockets) = veth::connected(pair, &config);
        let mut hosts = Hosts {
            ends,
            sockets,
            others: 0,
            pair,
        };
        assert!(hosts.exchange(6, |_| ()));
        hosts
    }

    /// Whether one of a hundred messages of the first host comes, which are sent each 100 rounds, beside what is done in each round.
    fn exchange(&mut self, len: usize, mut beside: impl FnMut(u32)) -> bool {
        for round in 0..10_000 {
            if round % 100 == 20 {
                let sent = self.sockets[0].send(&vec![7; len], SendOptions::default());
                sent.expect("it is polled");
            }
            beside(round);
            self.ends.iter_mut().for_each(|end| _ = end.poll());
            while let Some(message) = self.sockets[1].recv() {
                if message.len() == len {
                    return true;
                }
                self.others += 1;
            }
        }
        false
    }

    /// An ordinary user's socket, whose address the second host has proved.
    fn stranger(&mut self, ip: Ipv4Addr) -> Stranger {
        let far = &mut self.ends[1];
        let socket = (self.pair.a).run(|| UdpSocket::bind((ip, 0)).expect("free"));
        socket.connect(far.local()).expect("a route");
        socket.set_nonblocking(true).expect("a socket");
        let port = socket.local_addr().expect("bound").port();
        let (from, sender_id) = (SocketAddrV4::new(ip, port), u64::from(port) << 40 | 1);
        let greeting = message(from, sender_id, 0, 0, &[]);
        let (limit, mut datagram) = (Instant::now() + Duration::from_secs(20), [0; 2048]);
        let cookie = loop {
            assert!(Instant::now() < limit, "it is not challenged");
            socket.send(&greeting).expect("a route");
            for _ in 0..10 {
                far.poll();
            }
            let received = socket.recv(&mut datagram).unwrap_or(0);
            let said = ControlMessage::parse(&datagram[..received]);
            if let Ok((_, ControlMessage::Challenge(challenge))) = said {
                break challenge.cookie;
            }
        };
        let proof = ControlMessage::Proof(Proof {
            sender_id,
            cookie,
            data_port: port,
            uncompleted_max: 0,
            word: [0; 16],
        });
        socket.send(&encoded(&proof, 0)).expect("a route");
        far.poll();
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
    /// Sends the first packet of a flow's message. What finds a queue full is lost, like other packets.
    fn send(&self, flow: u16, message: u32, count: u16) {
        let key = self.cookie >> 16 << 16 | u64::from(flow);
        let _ = self.socket.send(&real_time(self.from, key, message, count));
    }
}

/// The first packet of a message of `count`.
fn real_time(from: SocketAddrV4, key: u64, message: u32, count: u16) -> Vec<u8> {
    let packet = RealTimePacket {
        message,
        count,
        message_len: 8 * u32::from(count),
        port: PORT,
        payload: b"stranger",
        ..RealTimePacket::default()
    };
    let header = LmHeader::Extension {
        packet_type: TYPE_REALTIME,
        key,
        words: packet.words(),
    };
    let payload = [packet.payload, &packet.tail()].concat();
    let trailer = Trailer::new(&header, &payload, from);
    let head = header.encode(payload.len() as u16);
    [&head[..], &payload, trailer.as_bytes()].concat()
}

/// Has the second host's thread do something in its namespace, where it looks for its neighbours.
fn attacked(attack: impl FnOnce(&mut Hosts<'_>) + Send) {
    if bed::root() {
        let pair = Pair::new(2);
        pair.b.run(|| attack(&mut Hosts::new(&pair)));
    }
}

/// An address of the first host beside its own, that the second host's kernel knows the way to.
fn address(hosts: &Hosts<'_>, last: u8) -> Ipv4Addr {
    let ip = Ipv4Addr::new(10, 77, 0, last);
    hosts.pair.a.ip(&format!("address add {ip}/24 dev va"));
    let talked = UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(b"", (ip, 9)));
    talked.expect("a route");
    ip
}

/// Hundreds of flows of one address, then thousands of many: 64 and 1024 are known, and a round in
/// which nothing comes looks at none of them.
#[test]
fn flows_of_strangers_are_bounded_and_cost_nothing_while_they_are_silent() {
    attacked(|hosts| {
        let flood = |hosts: &mut Hosts<'_>, addresses: std::ops::Range<u8>, sockets| {
            for last in addresses {
                let ip = address(hosts, last);
                for _ in 0..sockets {
                    let stranger = hosts.stranger(ip);
                    for flow in 0..16 {
                        stranger.send(flow, 0, 1);
                        hosts.ends[1].poll();
                        while hosts.sockets[1].recv().is_some() {}
                    }
                }
            }
            assert!(hosts.exchange(6, |_| ()));
            hosts.sockets[1].statistics()
        };
        let (one, many) = (flood(hosts, 100..101, 16), flood(hosts, 101..141, 4));
        assert!(many.whole > 2000, "{many:?}");
        let far = &mut hosts.ends[1];
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(50) {
            far.poll(); // all reports leave
        }
        let before = hosts.sockets[1].statistics();
        for _ in 0..10_000 {
            far.poll();
            // What a program asks before it sleeps.
            far.extensions().until_departure();
        }
        let looks = hosts.sockets[1].statistics().flow_looks - before.flow_looks;
        assert!(
            one.flows <= 64 + 1 && many.flows <= 1024 && looks <= many.flows,
            "{} flows of one address, {} of all, {looks} looks in 10,000 rounds without a packet",
            one.flows,
            many.flows
        );
    });
}

/// Packets under the sender's address, of a host that sees nothing of what the two say, are no messages, no flows, and take no block; neither do
/// the unfinished messages of strangers keep its own out.
#[test]
fn forged_packets_are_no_flow_and_unfinished_messages_give_way() {
    attacked(|hosts| {
        let forger = hosts.pair.a.run(|| Forger::new("va"));
        let [from, to] = hosts.ends.each_ref().map(Endpoint::local);
        let ip = address(hosts, 100);
        let strangers = [(); 4].map(|()| hosts.stranger(ip));
        // It has been challenged itself, and tries whatever comes to its mind.
        let keys = [0, 7 << 40, 0x9e37_79b9_7f4a_7c15, strangers[0].cookie];
        let forge = |round: u32| {
            for number in round * PER_ROUND..(round + 1) * PER_ROUND {
                let key = keys[number as usize % 4].wrapping_add(u64::from(number / 8 % 64));
                forger.send(
                    from,
                    to,
                    &real_time(from, key, number, 1 + (number / 4 % 2) as u16),
                );
            }
        };
        let forged = [(); 20].map(|()| hosts.exchange(3000, forge));
        let (statistics, others) = (hosts.sockets[1].statistics(), hosts.others);
        let unfinished = |round: u32| {
            for number in 0..PER_ROUND {
                strangers[number as usize % 4].send(number as u16, round, 2);
            }
        };
        let strange = [(); 20].map(|()| hosts.exchange(3000, unfinished));
        let came = [forged, strange].map(|came| came.into_iter().filter(|came| *came).count());
        assert_eq!(
            (others, statistics.flows, came),
            (0, 1, [20; 2]),
            "forged messages, flows, and those of 20 that came beside both floods: {statistics:?}"
        );
        assert!(statistics.refused_packets > 1000, "{statistics:?}");
    });
}
