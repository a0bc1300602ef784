//! What comes to the control port and is not from an honest host: counted, each in its own place, and without effect.

use std::collections::BTreeMap;
use std::net::{SocketAddrV4, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectError, ConnectOptions, EndpointConfig};
use lm_protocol::admission::{Action, ClusterKey, Config, Limits, Local, Node, Outcome, Policy};
use lm_protocol::control::{ControlMessage, End, RejectReason};
use lm_protocol::session::{Application, CloseReason, Landing, Permit, Refusal, Session, Terms};
use lm_protocol::time::Time;
use xtask::bed::INTERFACE;

use crate::bed::{Daemon, PATIENCE, beside, wait_until};
use crate::forger::{Forger, encoded, request};
use crate::form::{At, Bed, CONTROL, Form, HONEST, RECEIVER};
use crate::program::udp;
use crate::traffic::{assert_delivered, content, open, send, settle, up_to};

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

/// A daemon of the honest host, in this process: what it sends is seen, and can be sent again.
struct Recorder {
    node: Node,
    socket: UdpSocket,
    start: Instant,
    sent: Vec<Vec<u8>>,
    outcomes: Vec<Outcome>,
}

impl Recorder {
    fn new(bed: &Bed) -> Recorder {
        let address = SocketAddrV4::new(*HONEST.ip(), 7169);
        let config = Config {
            address,
            boot_id: 77,
            key: Some(ClusterKey::new(&bed.key(At::Receiver)).unwrap()),
            policy: Policy::Concurrent,
            limits: Limits::default(),
        };
        let socket = udp(bed.host(At::Honest), 7169);
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
    fn granted(&mut self, data_port: u16) {
        let request = request(data_port, 1);
        self.act(|node, now, local, out| {
            node.request(now, CONTROL, RECEIVER.port(), request, PATIENCE, local, out)
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

/// Datagrams on the control port by what became of them, where somebody counts them: a daemon.
fn datagrams(bed: &Bed) -> Option<BTreeMap<String, u64>> {
    Some(bed.daemon()?.interface().datagrams)
}

fn total(counts: &BTreeMap<String, u64>) -> u64 {
    counts.values().sum()
}

/// Whether nothing waits in the receiver's control socket (`rx_queue` of /proc/net/udp).
fn is_all_read(bed: &Bed) -> bool {
    let table = bed.on(At::Receiver, || {
        std::fs::read_to_string("/proc/thread-self/net/udp")
    });
    let port = format!(":{:04X}", CONTROL.port());
    table.expect("the kernel's table").lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next().is_some_and(|local| local.ends_with(&port))
            && words.nth(2).is_some_and(|queues| queues.ends_with(":00000000"))
    })
}

/// Waits until so many datagrams had this outcome, and no more; or, where nobody counts them, until all are read.
fn counted(bed: &Bed, outcome: &str, count: u64) {
    let Some(daemon) = bed.daemon() else {
        wait_until("all are read", || is_all_read(bed));
        return;
    };
    let so_far = || daemon.interface().datagrams[outcome];
    wait_until(outcome, || so_far() >= count);
    assert_eq!(so_far(), count, "{outcome}");
}

/// The sessions that the receiver's daemon has: with whom, and on which queue.
fn sessions(bed: &Bed) -> Option<Vec<(SocketAddrV4, u16)>> {
    let sessions = bed.daemon()?.interface().sessions;
    Some(
        sessions
            .iter()
            .map(|session| (session.from, session.queue))
            .collect(),
    )
}

/// What an honest host said, repeated, from elsewhere, and with each bit altered and at each length: its session does not notice.
pub(crate) fn altered_truncated_and_replayed(form: Form) {
    let Some(bed) = Bed::with_keys(form, [None, Some("key"), None]) else {
        return;
    };
    let receiver = EndpointConfig {
        // Its sender sends nothing.
        patience: 4 * PATIENCE,
        ..bed.config(At::Receiver)
    };
    let ((), (received, counters)) = bed.beside_receiver(&receiver, || {
        let mut recorder = Recorder::new(&bed);
        recorder.granted(9000);
        let session = sessions(&bed);
        assert!(session.as_ref().is_none_or(|sessions| sessions.len() == 1));
        repeat_and_alter(&bed, &recorder);
        // The session has not noticed.
        assert_eq!(sessions(&bed), session);
        // Others are served as before, and what the program is told comes in order.
        recorder.granted(9002);
        wait_until("it has them both", || bed.counters().sessions_granted == 2);
    });
    assert_eq!((counters.sessions_granted, counters.sessions_ended), (2, 0));
    assert_eq!((counters.sessions_set_aside, received), (0, 0), "{counters:?}");
}

fn repeat_and_alter(bed: &Bed, recorder: &Recorder) {
    let before = datagrams(bed);
    // All of what was said, again: by the same host, byte for byte.
    let sent = &recorder.sent;
    assert!(!sent.is_empty());
    for datagram in sent {
        recorder.socket.send_to(datagram, CONTROL).unwrap();
    }
    // What was said before the hosts knew each other is replayed like everything else.
    counted(bed, "replayed", sent.len() as u64);
    // The same from another address: the tag is over both.
    let elsewhere = udp(bed.host(At::Honest), 7200);
    for datagram in sent {
        elsewhere.send_to(datagram, CONTROL).unwrap();
    }
    counted(bed, "unauthenticated", sent.len() as u64);
    // Each bit of the last one altered; each length of it.
    let last = sent.last().unwrap();
    let bits = (0..last.len() * 8).map(|bit| {
        let mut altered = last.clone();
        altered[bit / 8] ^= 1 << (bit % 8);
        altered
    });
    let lens = (1..last.len()).map(|len| last[..len].to_vec());
    let all: Vec<Vec<u8>> = bits.chain(lens).chain([vec![0x5a; 1400]]).collect();
    let mut count = 2 * sent.len() as u64;
    // The ring of a veth has 256 entries, and what it has no room for is lost.
    for some in all.chunks(200) {
        for datagram in some {
            recorder.socket.send_to(datagram, CONTROL).unwrap();
        }
        count += some.len() as u64;
        match &before {
            Some(before) => wait_until("all are counted", || {
                datagrams(bed).is_some_and(|now| total(&now) >= total(before) + count)
            }),
            None => wait_until("all are read", || is_all_read(bed)),
        }
    }
    if let (Some(before), Some(after)) = (before, datagrams(bed)) {
        assert_eq!(total(&after), total(&before) + count);
        assert_eq!(
            after["accepted"], before["accepted"],
            "something altered was believed"
        );
        assert_eq!(after["strangers"], before["strangers"]);
        assert_eq!(after["impossible"], 0);
    }
}

/// Who has another key is not answered, whoever else it may be.
pub(crate) fn another_key(form: Form) {
    let Some(bed) = Bed::with_keys(form, [Some("other"), Some("key"), None]) else {
        return;
    };
    let ask = || {
        let mut a = open(&bed.config(At::Honest));
        let options = ConnectOptions {
            timeout: Duration::from_millis(500),
            ..up_to(1 << 20)
        };
        a.connect(RECEIVER, &options).map(drop)
    };
    let (connected, (received, counters)) =
        bed.beside_receiver(&bed.config(At::Receiver), || bed.program(At::Honest, ask));
    let is_unanswered = match form {
        Form::Embedded => matches!(connected, Err(ConnectError::Unreachable { .. })),
        Form::Daemon => matches!(connected, Err(ConnectError::NoDaemon { .. })),
    };
    assert!(is_unanswered, "{connected:?}");
    assert_eq!((received, counters.sessions_granted), (0, 0));
    if let Some(daemon) = bed.daemon() {
        let interface = daemon.interface();
        let asked = interface.datagrams["unauthenticated"];
        assert!((2..=5).contains(&asked), "asked {asked} times in half a second");
        assert_eq!((interface.datagrams["accepted"], interface.hosts), (0, 0));
    }
}

/// Ends of sessions that there are not, and whatever is of another version: it may come under a forged address, and each
/// answer goes there. A daemon names eight hosts of another version, each once.
pub(crate) fn strangers_ends_and_other_versions_are_answered_in_measure(form: Form) {
    let Some(mut bed) = Bed::new(form) else { return };
    let socket = udp(bed.host(At::Attacker), 7300);
    socket.set_nonblocking(true).unwrap();
    let flood = || {
        let (begun, mut answers, mut buffer) = (Instant::now(), 0, [0; 512]);
        for session_key in 1..20_000 {
            let end = encoded(
                &ControlMessage::End(End {
                    session_key,
                    messages: 1,
                }),
                7,
            );
            let other = [&[1 << 4 | end[0] & 0xf], &end[1..]].concat();
            for (datagram, to) in [(&end, CONTROL), (&other, CONTROL), (&other, RECEIVER)] {
                // A full queue is what a flood makes.
                let _ = socket.send_to(datagram, to);
            }
            while let Ok(len) = socket.recv(&mut buffer) {
                assert!(len <= end.len(), "{len} bytes for {}", end.len());
                answers += 1;
            }
        }
        (answers, begun.elapsed().as_millis())
    };
    let seal = |daemon: &Daemon| {
        let forger = Forger::new(INTERFACE);
        wait_until("sealed ones are counted", || {
            for host in 10..50 {
                let from = SocketAddrV4::new([198, 18, 0, host].into(), CONTROL.port());
                forger.send(from, CONTROL, &[15 << 4 | 14; 60]);
            }
            daemon.interface().datagrams["other_version"] > 80
        });
    };
    let work = || {
        let answered = flood();
        bed.daemon().into_iter().for_each(seal);
        answered
    };
    let attack = || bed.on(At::Attacker, work);
    let ((answers, millis), _) = bed.beside_receiver(&bed.config(At::Receiver), attack);
    // 64 in as many milliseconds from each port.
    assert!(
        answers <= 2 * (millis + 3 * 64),
        "{answers} answers to 60000 datagrams in {millis} ms"
    );
    if let Some(said) = bed.end_daemon() {
        assert_eq!(said.matches("does not speak LM version").count(), 8, "{said}");
    }
}

/// Whatever comes to the control port meanwhile, who is honest has its sessions.
pub(crate) fn a_flood_keeps_nobody_out(form: Form) {
    const SESSIONS: u64 = 10;
    const LEN: u64 = 100_000;
    let Some(bed) = Bed::with_keys(form, [Some("key"); 3]) else {
        return;
    };
    let socket = udp(bed.host(At::Honest), 7200);
    let sent = AtomicU64::new(0);
    let flood = |over: &AtomicBool| {
        // Relaxed: a lone flag, and a lone count.
        while !over.load(Ordering::Relaxed) {
            for _ in 0..100 {
                // A full queue is what a flood makes.
                let _ = socket.send_to(&[0x1e; 132], CONTROL);
            }
            sent.fetch_add(100, Ordering::Relaxed);
            std::thread::yield_now();
        }
    };
    let flooded = || match datagrams(&bed) {
        Some(counts) => counts["malformed"] + counts["unauthenticated"] > 1000,
        None => sent.load(Ordering::Relaxed) > 1000,
    };
    let come_and_go = || {
        let mut a = open(&bed.config(At::Honest));
        let peer = a.connect(RECEIVER, &up_to(LEN)).unwrap();
        for number in 0..SESSIONS {
            if number > 0 {
                a.peer(peer).open_session(&up_to(LEN)).unwrap();
            }
            assert_eq!(a.peer(peer).lands(), Some(true), "session {number}");
            // A program does not hear of a session that ends in the turn of its daemon in which it was granted.
            let token = send(&mut a, peer, number, &content(number, LEN));
            assert_delivered(&settle(&mut a), &[(token, number, LEN)]);
            a.peer(peer).end_session();
        }
    };
    let is_left = |daemon: &Daemon| {
        let queues = daemon.interface().queues;
        (queues.iter()).any(|queue| queue.open_places + queue.closing_places > 0)
    };
    let work = || {
        beside(flood, || {
            wait_until("the flood is there", flooded);
            bed.program(At::Honest, come_and_go);
            wait_until("all have ended", || bed.counters().sessions_ended == SESSIONS);
            wait_until("no place is left", || !bed.daemon().is_some_and(is_left));
        })
    };
    let (_, (received, counters)) = bed.beside_receiver(&bed.config(At::Receiver), work);
    assert_eq!(
        (received, counters.sessions_granted),
        (SESSIONS, SESSIONS),
        "{counters:?}"
    );
}
