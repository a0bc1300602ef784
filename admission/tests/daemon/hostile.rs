//! What comes to the control port and is not from an honest daemon: counted, each in its own place, and without effect.

use std::net::{SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use lm_dataplane::ipc::Event;
use lm_protocol::admission::{Action, ClusterKey, Config, Limits, Local, Node, Outcome, Policy};
use lm_protocol::control::{RejectReason, Request};
use lm_protocol::geometry::{LinkShape, Wire};
use lm_protocol::session::{Application, CloseReason, Landing, Permit, Refusal, Session, Terms};
use lm_protocol::time::Time;
use lm_protocol::window::WindowShape;
use xtask::bed::Side;

use crate::bed::{Daemon, Hosts, PATIENCE, wait_until};
use crate::program::{Client, udp};

/// A host that only sends.
struct NoQueues;

impl Landing for NoQueues {
    fn open(&mut self, _: u16, _: &Application<'_>, _: &Permit) -> Result<Terms, Refusal> {
        Err(RejectReason::Unsupported.into())
    }

    fn close(&mut self, _: &Session, _: CloseReason) -> u32 {
        0
    }
}

/// A daemon of the left host, in this process: what it sends is seen, and can be sent again.
struct Recorder {
    node: Node,
    socket: UdpSocket,
    start: Instant,
    sent: Vec<Vec<u8>>,
    outcomes: Vec<Outcome>,
}

impl Recorder {
    fn new(hosts: &Hosts, key: &[u8]) -> Recorder {
        let address = SocketAddrV4::new(hosts.host(Side::Left).address(), 7169);
        let config = Config {
            address,
            boot_id: 77,
            key: Some(ClusterKey::new(key).unwrap()),
            policy: Policy::Concurrent,
            limits: Limits::default(),
        };
        let socket = udp(hosts.host(Side::Left), 7169);
        socket.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        Recorder {
            node: Node::new(config, Time::ZERO),
            socket,
            start: Instant::now(),
            sent: Vec::new(),
            outcomes: Vec::new(),
        }
    }

    fn act(&mut self, work: impl FnOnce(&mut Node, Time, &mut Local<'_>, &mut Vec<Action>)) {
        let now = Time::from_nanos(self.start.elapsed().as_nanos() as u64);
        let mut policy = Permit {
            max_message_len: u64::MAX,
            lease: Duration::from_secs(5),
        };
        let mut local = Local {
            policy: &mut policy,
            landing: &mut NoQueues,
        };
        let mut out = Vec::new();
        work(&mut self.node, now, &mut local, &mut out);
        for action in out {
            match action {
                Action::Send { to, datagram } => {
                    self.sent.push(datagram.as_bytes().to_vec());
                    self.socket.send_to(datagram.as_bytes(), to).unwrap();
                }
                Action::Tell { outcome, .. } => self.outcomes.push(outcome),
                _ => {}
            }
        }
    }

    /// Lets it talk until a session was granted.
    fn granted(&mut self, to: SocketAddrV4, data_port: u16) {
        let request = Request {
            sender_id: 1,
            data_port,
            mtu: 1500,
            wire: Wire::Lm,
            link: LinkShape::IPV4,
            max_message_len: 1 << 20,
            window: WindowShape::DEFAULT,
            messages_in_flight: 1,
            uncompleted_max: 0,
            capabilities: 0,
            delivery: Default::default(),
            integrity: Default::default(),
            lands: true,
        };
        self.act(|node, now, local, out| {
            node.request(now, to, 7168, request, PATIENCE, local, out)
                .unwrap();
        });
        let mut buffer = [0; 2048];
        wait_until("a grant", || {
            if let Ok((len, std::net::SocketAddr::V4(from))) = self.socket.recv_from(&mut buffer) {
                let datagram = buffer[..len].to_vec();
                self.act(|node, now, local, out| {
                    node.on_datagram(now, from, &datagram, local, out);
                });
            }
            self.act(|node, now, local, out| node.on_timer(now, local, out));
            !self.outcomes.is_empty()
        });
        match self.outcomes.remove(0) {
            Outcome::Granted(_) => {}
            other => panic!("not granted: {other:?}"),
        }
    }
}

fn key_of(hosts: &Hosts) -> Vec<u8> {
    let text = std::fs::read_to_string(hosts.key()).unwrap();
    let digit = |byte: u8| (byte as char).to_digit(16).unwrap() as u8;
    text.trim()
        .as_bytes()
        .chunks(2)
        .map(|pair| digit(pair[0]) << 4 | digit(pair[1]))
        .collect()
}

fn counted(daemon: &Daemon, outcome: &str, count: u64) {
    wait_until(outcome, || daemon.datagrams(outcome) >= count);
    assert_eq!(daemon.datagrams(outcome), count, "{outcome}");
}

#[test]
fn altered_truncated_and_replayed() {
    let Some(hosts) = Hosts::new("hostile") else {
        return;
    };
    let right = hosts.daemon(Side::Right);
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut recorder = Recorder::new(&hosts, &key_of(&hosts));
    let to = SocketAddrV4::new(hosts.host(Side::Right).address(), 7169);
    recorder.granted(to, 9000);
    assert!(matches!(receiver.event(), Event::Opened { .. }));
    let opened = |daemon: &Daemon| {
        let sessions = daemon.interface().sessions;
        assert_eq!(sessions.len(), 1);
        (sessions[0].from, sessions[0].queue)
    };
    let session = opened(&right);
    let accepted = right.datagrams("accepted");
    let strangers = right.datagrams("strangers");

    // All of what was said, again: by the same host, byte for byte.
    let sent = recorder.sent.clone();
    assert!(!sent.is_empty());
    for datagram in &sent {
        recorder.socket.send_to(datagram, to).unwrap();
    }
    // What was said before the daemons knew each other is replayed like everything else.
    counted(&right, "replayed", sent.len() as u64);
    // The same from another address: the tag is over both.
    let elsewhere = udp(hosts.host(Side::Left), 7200);
    for datagram in &sent {
        elsewhere.send_to(datagram, to).unwrap();
    }
    counted(&right, "unauthenticated", sent.len() as u64);
    // Each bit of the last one altered; each length of it.
    let last = sent.last().unwrap();
    let before = right.interface().datagrams;
    let total = |counts: &std::collections::BTreeMap<String, u64>| counts.values().sum::<u64>();
    let bits = (0..last.len() * 8).map(|bit| {
        let mut altered = last.clone();
        altered[bit / 8] ^= 1 << (bit % 8);
        altered
    });
    let lens = (1..last.len()).map(|len| last[..len].to_vec());
    let all: Vec<Vec<u8>> = bits.chain(lens).chain([vec![0x5a; 1400]]).collect();
    let mut count = 0;
    // The ring of a veth has 256 entries, and what it has no room for is lost.
    for some in all.chunks(200) {
        for datagram in some {
            recorder.socket.send_to(datagram, to).unwrap();
        }
        count += some.len() as u64;
        wait_until("all are counted", || {
            total(&right.interface().datagrams) >= total(&before) + count
        });
    }
    let after = right.interface().datagrams;
    assert_eq!(total(&after), total(&before) + count);
    assert_eq!(after["accepted"], accepted, "something altered was believed");
    assert_eq!(after["strangers"], strangers);
    assert_eq!(after["impossible"], 0);
    // The session has not noticed.
    assert_eq!(opened(&right), session);
    assert!(receiver.hears_nothing(Duration::from_millis(20)));
    right.stop();
}

#[test]
fn another_key() {
    let Some(hosts) = Hosts::new("key") else { return };
    let right = hosts.daemon(Side::Right);
    let _receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let other = hosts.folder.join("other");
    let made = hosts.tool(Side::Left, ["keygen".as_ref(), other.as_os_str()]);
    assert!(made.finish().unwrap().status.success());
    // The same at the left host, under the same name.
    std::fs::rename(&other, hosts.key()).unwrap();
    let left = hosts.daemon(Side::Left);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    let request = sender.request(1 << 20);
    let call = lm_dataplane::ipc::Call::Request {
        to: SocketAddrV4::new(hosts.host(Side::Right).address(), 7168),
        request,
        patience_ms: 500,
    };
    use lm_dataplane::ipc::{Decision, Outcome, Reply};
    let Reply::Requested(Decision::Requested(ticket)) = sender.call(call) else {
        panic!("not requested")
    };
    assert_eq!(sender.outcome(ticket), Outcome::Unreachable);
    let asked = right.datagrams("unauthenticated");
    assert!((2..=5).contains(&asked), "asked {asked} times in half a second");
    assert_eq!((right.datagrams("accepted"), right.interface().hosts), (0, 0));
    left.stop();
    right.stop();
}

#[test]
fn a_flood_keeps_nobody_out() {
    let Some(hosts) = Hosts::new("flood") else { return };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    let to = SocketAddrV4::new(hosts.host(Side::Right).address(), 7168);
    let control = SocketAddrV4::new(hosts.host(Side::Right).address(), 7169);
    let socket = udp(hosts.host(Side::Left), 7200);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: a lone flag.
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                for _ in 0..100 {
                    // A full queue is what a flood makes.
                    let _ = socket.send_to(&[0x1e; 132], control);
                }
                std::thread::yield_now();
            }
        });
        let mut work = || {
            for _ in 0..10 {
                let ticket = sender.ask(to, 1 << 20);
                let session_key = sender.granted(ticket).session_key;
                assert!(matches!(receiver.event(), Event::Opened { .. }));
                sender.done(lm_dataplane::ipc::Call::End { ticket, messages: 0 });
                assert!(matches!(sender.event(), Event::Told { .. }));
                assert!(matches!(receiver.event(), Event::Closed { .. }));
                receiver.done(lm_dataplane::ipc::Call::Released { session_key });
            }
        };
        let flooded = || right.datagrams("malformed") + right.datagrams("unauthenticated") > 1000;
        let work = || {
            wait_until("the flood is there", flooded);
            work();
        };
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        if let Err(panic) = worked {
            std::panic::resume_unwind(panic);
        }
    });
    left.stop();
    right.stop();
}
