//! Strangers on the network: packets with forged addresses and packets of earlier lives, from a third host on the switch. What an honest
//! sender sends comes as if they were not there, and nothing that they send is taken.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectError, ConnectOptions, EndpointConfig, Outcome, RecvError};
use lm_protocol::control::{ControlMessage, End, MAX_CONTROL_LEN, Proof, RejectReason, Request};
use lm_protocol::geometry::{LinkShape, Wire};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::{AnnounceEntry, LmHeader, Trailer, parse_datagram};

use crate::harness::{
    B, Flag, PATIENCE, PORT, Switched, assert_delivered, check, config_a, config_b, content, open, send,
    settle, up_to, wait_until,
};

/// The honest sender's data address: a port of its own choice, so that it comes again as the same.
const HONEST: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 1), 7300);

fn honest_config() -> EndpointConfig {
    EndpointConfig {
        port: HONEST.port(),
        ..config_a()
    }
}

/// A raw socket that writes its own IP headers: any source address.
struct Forger(socket::RawSocket);

mod socket {
    use std::io;
    use std::net::Ipv4Addr;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    pub(super) struct RawSocket(OwnedFd);

    impl RawSocket {
        pub(super) fn new() -> io::Result<RawSocket> {
            // SAFETY: socket(2) takes no pointers; a descriptor that it gives is nobody else's.
            let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_RAW) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: as above.
            Ok(RawSocket(unsafe { OwnedFd::from_raw_fd(fd) }))
        }

        /// Sends an IPv4 packet, header included.
        pub(super) fn send(&self, packet: &[u8], to: Ipv4Addr) -> io::Result<()> {
            let address = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: 0,
                sin_addr: libc::in_addr {
                    s_addr: u32::from(to).to_be(),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: both pointers are to live values of the lengths given.
            let sent = unsafe {
                libc::sendto(
                    self.0.as_raw_fd(),
                    packet.as_ptr().cast(),
                    packet.len(),
                    0,
                    (&raw const address).cast(),
                    size_of::<libc::sockaddr_in>() as u32,
                )
            };
            if sent < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        }
    }
}

impl Forger {
    fn new() -> Forger {
        Forger(socket::RawSocket::new().expect("a raw socket"))
    }

    /// Sends a UDP datagram under any address. What finds a queue full is lost, like other packets.
    fn send(&self, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) {
        let len = 28 + payload.len();
        let mut packet = vec![0u8; 28];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        packet[6] = 0x40;
        packet[8] = 64;
        packet[9] = 17;
        packet[12..16].copy_from_slice(&from.ip().octets());
        packet[16..20].copy_from_slice(&to.ip().octets());
        packet[20..22].copy_from_slice(&from.port().to_be_bytes());
        packet[22..24].copy_from_slice(&to.port().to_be_bytes());
        packet[24..26].copy_from_slice(&((len - 20) as u16).to_be_bytes());
        packet.extend_from_slice(payload);
        match self.0.send(&packet, *to.ip()) {
            Err(error)
                if error.kind() != io::ErrorKind::WouldBlock
                    && error.raw_os_error() != Some(libc::ENOBUFS) =>
            {
                panic!("{error}")
            }
            _ => {}
        }
    }
}

/// A small message of the incarnation `sender_id`.
fn small_message(from: SocketAddrV4, sender_id: u64, number: u32, payload: &[u8]) -> Vec<u8> {
    let header = LmHeader::Eager {
        sender_id: sender_id | 1,
        number,
        tag: 666,
        digested: true,
        acknowledges: None,
    };
    let trailer = Trailer::new(&header, payload, from);
    let mut bytes = header.encode(payload.len() as u16).to_vec();
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(trailer.as_bytes());
    bytes
}

fn request(data_port: u16, sender_id: u64, request_id: u32) -> Vec<u8> {
    let message = ControlMessage::Request(Request {
        sender_id,
        data_port,
        mtu: 1500,
        wire: Wire::Lm,
        link: LinkShape::IPV4,
        max_message_len: 1 << 20,
        window: WindowShape::DEFAULT,
        messages_in_flight: 4,
        uncompleted_max: 192,
        capabilities: 0,
        delivery: Default::default(),
        integrity: Default::default(),
        lands: true,
    });
    let mut bytes = [0; MAX_CONTROL_LEN];
    let len = message.encode(request_id, &mut bytes);
    bytes[..len].to_vec()
}

/// Runs an attack from the switch's third host while `work` is done.
fn under_attack<T: Send>(
    bed: &Switched,
    attack: impl FnMut(&Forger, u64) + Send,
    per_second: u64,
    work: impl FnOnce() -> T + Send,
) -> (T, u64) {
    let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let attacker = scope.spawn(|| {
            let mut attack = attack;
            bed.senders[1].run(|| {
                let (forger, start) = (Forger::new(), Instant::now());
                while !over.load(Ordering::Acquire) {
                    let due = (start.elapsed().as_secs_f64() * per_second as f64) as u64;
                    // Relaxed: read when this thread has ended.
                    let done = sent.load(Ordering::Relaxed);
                    for number in done..due {
                        attack(&forger, number);
                    }
                    sent.store(due.max(done), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        over.store(true, Ordering::Release);
        attacker.join().expect("the attacker");
        match result {
            Ok(result) => (result, sent.load(Ordering::Relaxed)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Serves the receiver until `over`; everything that it takes must be the honest sender's next message.
fn receive_in_order(over: &AtomicBool, config: &EndpointConfig) -> (u64, lm_dataplane::Counters) {
    let mut b = open(config);
    let mut next = 0;
    while !over.load(Ordering::Acquire) {
        while let Some(message) = b.try_recv().expect("no failure") {
            assert_eq!(b.peer_address(message.peer()), Some(HONEST));
            check(&b, &message, next, message.len() as u64);
            next += 1;
        }
        b.wait(Duration::from_millis(1));
    }
    (next, b.counters())
}

/// The honest side and the receiver, each in its namespace.
fn honest_work<T: Send>(
    bed: &Switched,
    config: &EndpointConfig,
    sender: impl FnOnce() -> T + Send,
) -> (T, (u64, lm_dataplane::Counters)) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| bed.receiver.run(|| receive_in_order(&over, config)));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bed.senders[0].run(sender)));
        over.store(true, Ordering::Release);
        let received = receiver.join();
        match (result, received) {
            (Ok(result), Ok(received)) => (result, received),
            (Err(panic), _) | (_, Err(panic)) => std::panic::resume_unwind(panic),
        }
    })
}

/// Connects without a session: only small messages.
fn small_only() -> ConnectOptions {
    ConnectOptions {
        session: false,
        ..ConnectOptions::default()
    }
}

/// Forged small messages were messages, and came: most of them were challenged.
fn was_attacked(counters: &lm_dataplane::Counters, sent: u64) {
    assert!(sent > 100, "{sent} forged packets are no attack");
    assert_eq!(counters.drops.malformed, 0, "{counters:?}");
    assert!(counters.challenged > sent / 2, "{sent} forged: {counters:?}");
}

/// Small messages under the honest sender's address, each of a new incarnation: none of them is taken, and its stream goes on.
#[test]
fn forged_small_messages_reset_nobody() {
    const MESSAGES: u64 = 3000;
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let attack = |forger: &Forger, n: u64| {
        let bytes = small_message(HONEST, n << 40, (n % 3) as u32, b"forged");
        forger.send(HONEST, B, &bytes);
    };
    let work = || {
        honest_work(&bed, &config_b(), || {
            let mut a = open(&honest_config());
            let peer = a.connect(B, &small_only()).unwrap();
            let mut tokens = Vec::new();
            for tag in 0..MESSAGES {
                tokens.push((send(&mut a, peer, tag, &content(tag, 64)), tag, 64));
                if tag % 64 == 63 {
                    // The attack gets its time.
                    a.wait(Duration::from_millis(2));
                }
            }
            assert_delivered(&settle(&mut a), &tokens);
        })
    };
    let (((), (received, counters)), sent) = under_attack(&bed, attack, 5000, work);
    assert_eq!(received, MESSAGES);
    was_attacked(&counters, sent);
}

/// In a process that a test started to kill: what the process does. Its test does nothing else there.
const VICTIM: &str = "LM_TEST_VICTIM_TAG";

/// A sender that is killed and started again at the same address and port is heard at once each time, by proving itself and not by any time limit,
/// also while others forge its address.
#[test]
fn a_sender_that_began_anew_is_heard_at_once() {
    const LIVES: u64 = 100;
    if let Ok(tag) = std::env::var(VICTIM) {
        let tag = tag.parse().expect("a number");
        let mut a = open(&honest_config());
        let peer = a.connect(B, &small_only()).unwrap();
        let token = send(&mut a, peer, tag, &content(tag, 64));
        assert_delivered(&settle(&mut a), &[(token, tag, 64)]);
        println!("heard {}", a.counters().eager_resent);
        std::thread::sleep(PATIENCE);
        panic!("nobody kills us");
    }
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let attack = |forger: &Forger, n: u64| {
        forger.send(HONEST, B, &small_message(HONEST, n << 40, 0, b"forged"));
    };
    let work = || {
        honest_work(&bed, &config_b(), || {
            let lives = (0..LIVES).map(|tag| {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args([
                    "--exact",
                    "attacks::a_sender_that_began_anew_is_heard_at_once",
                    "--nocapture",
                ]);
                let child = command
                    .env(VICTIM, tag.to_string())
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap();
                let mut child = Killed(child);
                let output = BufReader::new(child.0.stdout.take().unwrap());
                let heard = output.lines().find_map(|line| {
                    let line = line.expect("text");
                    Some(line.split_once("heard ")?.1.parse::<u64>().expect("a number"))
                });
                heard.expect("each life is heard")
            });
            lives.collect::<Vec<u64>>()
        })
    };
    let ((resent, (received, counters)), sent) = under_attack(&bed, attack, 1000, work);
    assert_eq!(received, LIVES);
    was_attacked(&counters, sent);
    // One repetition for the proof; a busy machine may bring a second. A time limit would bring ten and more.
    let late = resent.iter().filter(|&&resent| resent > 2).count();
    assert!(late <= LIVES as usize / 20, "{resent:?}");
}

/// A child that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The UDP datagrams of a capture: source, destination, payload.
fn datagrams(capture: &Path) -> Vec<(SocketAddrV4, SocketAddrV4, Vec<u8>)> {
    let bytes = std::fs::read(capture).expect("the capture");
    let mut found = Vec::new();
    let mut at = 24;
    while at + 16 <= bytes.len() {
        let len = u32::from_le_bytes(bytes[at + 8..at + 12].try_into().unwrap()) as usize;
        let frame = &bytes[at + 16..at + 16 + len];
        at += 16 + len;
        if frame.len() < 42 || frame[12..14] != [8, 0] || frame[23] != 17 {
            continue;
        }
        let ip = |at: usize| Ipv4Addr::new(frame[at], frame[at + 1], frame[at + 2], frame[at + 3]);
        let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let (from, to) = (
            SocketAddrV4::new(ip(26), port(34)),
            SocketAddrV4::new(ip(30), port(36)),
        );
        found.push((from, to, frame[42..].to_vec()));
    }
    found
}

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Everything that an earlier life of the sender said, recorded on the way and repeated from another host, to the same receiver and to
/// one that was started since: costs the present life nothing, and is not taken.
#[test]
fn an_earlier_life_repeated_from_elsewhere_is_not_taken() {
    const MESSAGES: u64 = 200;
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let capture = Scratch(std::env::temp_dir().join(format!("lm-replay-{}.pcap", std::process::id())));
    let life = |config: &EndpointConfig| {
        let mut a = open(config);
        let peer = a.connect(B, &up_to(100_000)).unwrap();
        let mut tokens = Vec::new();
        for tag in 0..MESSAGES {
            let len = if tag % 20 == 0 { 100_000 } else { 64 };
            tokens.push((send(&mut a, peer, tag, &content(tag, len)), tag, len));
            if tag % 10 == 0 {
                // In order, whichever way each goes.
                assert_delivered(&settle(&mut a), &std::mem::take(&mut tokens));
            }
        }
        assert_delivered(&settle(&mut a), &tokens);
        a.close();
    };
    let recorded = EndpointConfig {
        capture: Some(Arc::new(File::create(&capture.0).expect("a file"))),
        ..honest_config()
    };
    let (_, (received, _)) = honest_work(&bed, &config_b(), || life(&recorded));
    assert_eq!(received, MESSAGES);
    let said: Vec<_> = datagrams(&capture.0)
        .into_iter()
        .filter(|(from, ..)| *from == HONEST)
        .collect();
    assert!(said.len() > 500, "{} packets", said.len());
    let attack = |forger: &Forger, n: u64| {
        let (from, to, payload) = &said[n as usize % said.len()];
        forger.send(*from, *to, payload);
    };
    let work = || {
        honest_work(&bed, &config_b(), || {
            // The past comes before the present life does.
            std::thread::sleep(Duration::from_millis(300));
            life(&honest_config());
        })
    };
    let (((), (received, counters)), sent) = under_attack(&bed, attack, 10_000, work);
    assert_eq!(received, MESSAGES, "{counters:?}");
    assert!(sent > 1000, "{sent} packets are no attack");
    assert_eq!(
        counters.messages_incomplete + counters.messages_stalled,
        0,
        "{counters:?}"
    );
}

/// Who may not send is not heard by any of the three ways, and is told so.
#[test]
fn who_is_not_allowed_is_heard_by_no_way() {
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let config = EndpointConfig {
        allow: vec![(*HONEST.ip(), 32)],
        ..config_b()
    };
    let stranger = || {
        bed.senders[1].run(|| {
            let mut a = open(&config_a());
            let peer = a.connect(B, &small_only()).unwrap();
            send(&mut a, peer, 0, b"not allowed");
            wait_until(&mut a, "the message is refused", |a| {
                a.try_completion()
                    .is_some_and(|completion| completion.outcome == Outcome::Refused)
            });
            for one_copy in [false, true] {
                let options = ConnectOptions {
                    one_copy,
                    ..up_to(100_000)
                };
                let refused = a.open_session(peer, &options);
                assert!(
                    matches!(
                        refused,
                        Err(ConnectError::Rejected {
                            reason: RejectReason::NotAllowed,
                            ..
                        })
                    ),
                    "{refused:?}"
                );
            }
        });
    };
    let (_, (received, counters)) = honest_work(&bed, &config, || {
        std::thread::scope(|scope| scope.spawn(stranger).join().expect("the stranger"));
        let mut a = open(&honest_config());
        let peer = a.connect(B, &up_to(100_000)).unwrap();
        for tag in 0..2 {
            let len = 64 + 100_000 * (1 - tag) - 64 * (1 - tag);
            let token = send(&mut a, peer, tag, &content(tag, len));
            assert_delivered(&settle(&mut a), &[(token, tag, len)]);
        }
    });
    assert_eq!(received, 2);
    assert!(counters.drops.not_allowed >= 3, "{counters:?}");
}

/// A thousand forged addresses ask for sessions: nothing is held for them, and an honest sender gets its place and keeps it.
#[test]
fn forged_requests_hold_no_place() {
    const FORGED: u64 = 1000;
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let attack = |forger: &Forger, n: u64| {
        let host = 10 + n % FORGED;
        let from = SocketAddrV4::new(Ipv4Addr::new(10, 77 + (host >> 8) as u8, 1, host as u8), 7301);
        let to = SocketAddrV4::new(*B.ip(), PORT + 1);
        forger.send(from, to, &request(from.port() - 1, (n % FORGED) << 40, n as u32));
    };
    let send_some = || {
        let begun = Instant::now();
        let mut a = open(&honest_config());
        let peer = a.connect(B, &up_to(1 << 20)).unwrap();
        let place = begun.elapsed();
        let begun = Instant::now();
        let tokens: Vec<_> = (0..64)
            .map(|tag| (send(&mut a, peer, tag, &content(tag, 1 << 20)), tag, 1 << 20))
            .collect();
        assert_delivered(&settle(&mut a), &tokens);
        let took = begun.elapsed();
        a.close();
        (place, took)
    };
    let ((quiet_place, quiet), _) = honest_work(&bed, &config_b(), send_some);
    let work = || honest_work(&bed, &config_b(), send_some);
    let (((place, took), (received, counters)), sent) = under_attack(&bed, attack, 10_000, work);
    println!(
        "a place in {place:?} beside {quiet_place:?}, 64 MiB in {took:?} beside {quiet:?}, {sent} forged requests"
    );
    assert_eq!(received, 64);
    assert_eq!(counters.sessions_granted, 1, "{counters:?}");
    assert!(counters.challenged > 500, "{counters:?}");
}

/// Whoever keeps places without sending anything: real addresses that answer challenges and repeat their requests.
struct Claimants {
    sockets: Vec<(UdpSocket, u64)>,
    /// Their data ports.
    data: Vec<UdpSocket>,
    /// Each announces a message, of which it sends nothing.
    announces: bool,
}

impl Claimants {
    /// So many sockets at one address of the third host, each of which asks for a session of its own.
    fn new(ip: Ipv4Addr, count: u16) -> Claimants {
        let bind = |port: u16| {
            let socket = UdpSocket::bind((ip, port)).expect("a socket");
            socket.set_nonblocking(true).expect("a socket");
            socket
        };
        let claim = |n: u16| {
            let socket = bind(8001 + 2 * n);
            socket.connect((*B.ip(), PORT + 1)).expect("a route");
            (socket, (u64::from(u32::from(ip)) << 32 | u64::from(n) << 16) | 1)
        };
        Claimants {
            sockets: (0..count).map(claim).collect(),
            data: (0..count).map(|n| bind(8000 + 2 * n)).collect(),
            announces: false,
        }
    }

    /// The same, who announce messages as well.
    fn announcing(ip: Ipv4Addr, count: u16) -> Claimants {
        Claimants {
            announces: true,
            ..Claimants::new(ip, count)
        }
    }

    fn announce(&self, n: usize, session_key: u64) {
        if !self.announces {
            return;
        }
        let data = &self.data[n];
        let header = LmHeader::Announce {
            session_key,
            first: 0,
            entries: 1,
            sent: 0,
        };
        let payload = AnnounceEntry {
            len: 1 << 20,
            tag: 666,
            delivery: None,
            windows_released: AnnounceEntry::ALL_WINDOWS,
        }
        .encode();
        let SocketAddr::V4(from) = data.local_addr().expect("a bound socket") else {
            unreachable!("it was bound to an IPv4 address")
        };
        let mut bytes = header.encode(payload.len() as u16).to_vec();
        bytes.extend_from_slice(&payload);
        bytes.extend_from_slice(Trailer::new(&header, &payload, from).as_bytes());
        data.send_to(&bytes, B).expect("a datagram leaves");
    }

    /// They go: what they announced is given up.
    fn leave(&self) {
        for (n, (socket, _)) in self.sockets.iter().enumerate() {
            let mut bytes = [0; MAX_CONTROL_LEN];
            let len = ControlMessage::End(End::WITHDRAWN).encode(n as u32, &mut bytes);
            socket.send(&bytes[..len]).expect("a datagram leaves");
        }
    }

    /// Repeats the requests and answers challenges; how many have places.
    fn claim(&self) -> usize {
        let mut held = vec![None; self.sockets.len()];
        for (n, (socket, sender_id)) in self.sockets.iter().enumerate() {
            let data_port = 8000 + 2 * n as u16;
            let ask = || socket.send(&request(data_port, *sender_id, n as u32)).map(drop);
            ask().expect("a datagram leaves");
            let begun = Instant::now();
            let mut bytes = [0; 512];
            while begun.elapsed() < Duration::from_millis(20) {
                let Ok(len) = socket.recv(&mut bytes) else {
                    std::thread::sleep(Duration::from_micros(200));
                    continue;
                };
                match ControlMessage::parse(&bytes[..len]) {
                    Ok((_, ControlMessage::Challenge(challenge))) => {
                        let proof = ControlMessage::Proof(Proof {
                            sender_id: *sender_id,
                            cookie: challenge.cookie,
                            data_port,
                            uncompleted_max: 0,
                            word: [0; 16],
                        });
                        let mut bytes = [0; MAX_CONTROL_LEN];
                        let len = proof.encode(0, &mut bytes);
                        socket.send(&bytes[..len]).expect("a datagram leaves");
                        ask().expect("a datagram leaves");
                    }
                    Ok((_, ControlMessage::Grant(grant))) => {
                        self.announce(n, grant.session_key);
                        held[n] = Some((grant.session_key, grant.lands));
                        break;
                    }
                    // Of a place that it had before.
                    Ok((_, ControlMessage::Ended(_))) => {}
                    _ => break,
                }
            }
        }
        // A place that passed from one to another meanwhile is the other's. The one that lost it is told, but not in which order: no
        // condition says that nothing more comes, hence a pause.
        let counted = [true, false].map(|gains| {
            for (n, held) in held.iter_mut().enumerate() {
                self.hear(n, held, gains);
            }
            std::thread::sleep(Duration::from_millis(5));
            held.iter().flatten().filter(|(_, lands)| *lands).count()
        });
        counted[1]
    }

    /// What the receiver tells of the session of number `n`.
    fn hear(&self, n: usize, held: &mut Option<(u64, bool)>, gains: bool) {
        let mut bytes = [0; 512];
        while let Ok(len) = self.data[n].recv(&mut bytes) {
            let Ok((
                LmHeader::Credit {
                    session_key, lands, ..
                },
                _,
            )) = parse_datagram(&bytes[..len])
            else {
                continue;
            };
            if let Some((key, held)) = held
                && *key == session_key
            {
                *held = lands && (gains || *held);
            }
        }
        while let Ok(len) = self.sockets[n].0.recv(&mut bytes) {
            if let Ok((_, ControlMessage::Ended(ended))) = ControlMessage::parse(&bytes[..len]) {
                held.take_if(|(key, _)| *key == ended.session_key);
            }
        }
    }
}

/// Places in which nothing lands go to whoever waits, whatever is repeated for them, and one address has half of them at most. The honest
/// sender whose unused place was taken goes on all the same, and lands again.
#[test]
fn unused_places_go_to_whoever_waits() {
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let others = bed.more_addresses();
    let (_, (received, counters)) = honest_work(&bed, &config_b(), || {
        let mut a = open(&honest_config());
        let peer = a.connect(B, &up_to(100_000)).unwrap();
        let first = send(&mut a, peer, 0, &content(0, 100_000));
        assert_delivered(&settle(&mut a), &[(first, 0, 100_000)]);
        assert_eq!(a.lands(peer), Some(true));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let attacker = scope.spawn(|| {
                bed.senders[1].run(|| {
                    let claimants = others.map(|ip| Claimants::new(ip, 16));
                    let mut most = [0; 2];
                    while !over.load(Ordering::Acquire) {
                        for (most, claimants) in most.iter_mut().zip(&claimants) {
                            *most = claimants.claim().max(*most);
                        }
                    }
                    most
                })
            });
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // Half of the places each and all but our own: ours goes when it was unused for longest.
                wait_until(&mut a, "our place is taken", |a| a.lands(peer) == Some(false));
                let second = send(&mut a, peer, 1, &content(1, 100_000));
                assert_delivered(&settle(&mut a), &[(second, 1, 100_000)]);
                wait_until(&mut a, "messages land again", |a| a.lands(peer) == Some(true));
                let third = send(&mut a, peer, 2, &content(2, 100_000));
                assert_delivered(&settle(&mut a), &[(third, 2, 100_000)]);
            }));
            over.store(true, Ordering::Release);
            let most = attacker.join().expect("the attacker");
            if let Err(panic) = result {
                std::panic::resume_unwind(panic);
            }
            // Without a bound it would be fifteen.
            assert!(most.iter().all(|&most| (1..=8).contains(&most)), "{most:?}");
        });
    });
    assert_eq!(received, 3, "{counters:?}");
}

/// A sender that has got credit and sends nothing holds up nobody, however long senders may be silent; it goes on when it is back.
#[test]
fn a_silent_sender_holds_up_nobody() {
    const LEN: u64 = 1 << 20;
    const MESSAGES: usize = 16;
    let Some(bed) = Switched::new() else { return };
    let [listens, silent, over] = <[Flag; 3]>::default();
    let bytes = content(0, LEN);
    let config = EndpointConfig {
        patience: 3 * PATIENCE,
        send_len: 64 << 20,
        ..config_a()
    };
    let receive = || {
        let mut b = open(&EndpointConfig {
            patience: config.patience,
            ..config_b()
        });
        listens.set();
        let mut received = 0;
        wait_until(&mut b, "all messages are here", |b| {
            while let Some(message) = b.try_recv().unwrap() {
                assert!(*message == bytes);
                received += 1;
            }
            received == 2 * MESSAGES
        });
        wait_until(&mut b, "the senders are gone", |b| {
            let counters = b.counters();
            counters.sessions_ended == counters.sessions_granted
        });
    };
    let fall_silent = || {
        listens.wait();
        let mut a = open(&config);
        let peer = a.connect(B, &up_to(LEN)).unwrap();
        for _ in 0..MESSAGES {
            send(&mut a, peer, 0, &bytes);
        }
        wait_until(&mut a, "it has begun", |a| a.counters().data_packets_sent > 100);
        assert!(a.counters().messages_sent < MESSAGES as u64);
        silent.set();
        over.wait();
        settle(&mut a);
        a.close();
    };
    let send_meanwhile = || {
        silent.wait();
        let mut a = open(&config);
        let peer = a.connect(B, &up_to(LEN)).unwrap();
        for _ in 0..MESSAGES {
            send(&mut a, peer, 0, &bytes);
        }
        settle(&mut a);
        over.set();
        a.close();
    };
    bed.run(receive, [&fall_silent, &send_meanwhile]);
}

/// Places for whose sessions a message is announced and nothing comes go to whoever waits, although their requests and announcements are
/// repeated. A sender that slept goes on without its place, loses nothing, and lands again.
#[test]
fn a_place_whose_message_does_not_come_goes_to_whoever_waits() {
    const LEN: u64 = 100_000;
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let others = bed.more_addresses();
    let patient = |config: EndpointConfig| EndpointConfig {
        patience: 3 * PATIENCE,
        ..config
    };
    let [listens, held, landed, over] = <[Flag; 4]>::default();
    let receive = || {
        let mut b = open(&patient(config_b()));
        listens.set();
        let mut tags = Vec::new();
        // Each step of the senders has its own limit.
        let deadline = Instant::now() + 3 * PATIENCE;
        while !over.is_set() {
            assert!(Instant::now() < deadline, "{:?}", b.counters());
            match b.try_recv() {
                Ok(Some(message)) => {
                    check(&b, &message, message.tag(), LEN);
                    tags.push(message.tag());
                    continue;
                }
                Err(RecvError::Incomplete { tag: 666, .. }) if landed.is_set() => continue,
                nothing => assert!(matches!(nothing, Ok(None)), "{nothing:?}"),
            }
            b.wait(Duration::from_millis(1));
        }
        tags.sort_unstable();
        assert_eq!(tags, [1, 2, 3, 4], "{:?}", b.counters());
    };
    let hold = || {
        listens.wait();
        let mut a = open(&patient(config_a()));
        let peer = a.connect(B, &up_to(LEN)).unwrap();
        let mut region = a.loan(peer, LEN).unwrap();
        std::io::Write::write_all(&mut region, &content(2, LEN)).unwrap();
        let first = a.try_send(region, 2).unwrap();
        a.poll();
        let claimants = [(others[0], 8), (others[1], 7)].map(|(ip, count)| Claimants::announcing(ip, count));
        let mut is_held = false;
        let deadline = Instant::now() + 3 * PATIENCE;
        while !landed.is_set() {
            assert!(Instant::now() < deadline, "nobody else lands");
            let granted: usize = claimants.iter().map(Claimants::claim).sum();
            if granted == 15 && !std::mem::replace(&mut is_held, true) {
                held.set();
            }
        }
        assert_delivered(&settle(&mut a), &[(first, 2, LEN)]);
        claimants.iter().for_each(Claimants::leave);
        let second = send(&mut a, peer, 3, &content(3, LEN));
        assert_delivered(&settle(&mut a), &[(second, 3, LEN)]);
        wait_until(&mut a, "it lands again", |a| a.lands(peer) == Some(true));
        let before = a.counters().messages_one_copy;
        let third = send(&mut a, peer, 4, &content(4, LEN));
        assert_delivered(&settle(&mut a), &[(third, 4, LEN)]);
        assert_eq!(a.counters().messages_one_copy, before);
        over.set();
    };
    let wait_for_a_place = || {
        held.wait();
        let begun = Instant::now();
        let mut a = open(&patient(config_a()));
        let peer = a.connect(B, &up_to(LEN)).unwrap();
        wait_until(&mut a, "it has a place", |a| a.lands(peer) == Some(true));
        let token = send(&mut a, peer, 1, &content(1, LEN));
        assert_delivered(&settle(&mut a), &[(token, 1, LEN)]);
        assert_eq!(a.counters().messages_one_copy, 0);
        println!("a place after {:?}", begun.elapsed());
        a.close();
        landed.set();
    };
    bed.run(receive, [&wait_for_a_place, &hold]);
}

/// The same where all who hold a place repeat themselves, so that no lease runs out.
#[test]
fn repeated_announcements_keep_no_place() {
    const LEN: u64 = 100_000;
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let others = bed.more_addresses();
    let [listens, held, placed, left, over] = <[Flag; 5]>::default();
    let receive = || {
        let mut b = open(&EndpointConfig {
            patience: 3 * PATIENCE,
            ..config_b()
        });
        listens.set();
        let mut received = 0;
        wait_until(&mut b, "the honest sender is done", |b| {
            // Asked before: what was confirmed by then is taken.
            let is_over = over.is_set();
            loop {
                match b.try_recv() {
                    Ok(Some(message)) => {
                        check(b, &message, 1, LEN);
                        received += 1;
                    }
                    Err(RecvError::Incomplete { tag: 666, .. }) => {}
                    nothing => {
                        assert!(matches!(nothing, Ok(None)), "{nothing:?}");
                        return is_over;
                    }
                }
            }
        });
        assert_eq!(received, 1);
        assert!(b.counters().sessions_set_aside > 0, "{:?}", b.counters());
    };
    let claim = || {
        listens.wait();
        let claimants = others.map(|ip| Claimants::announcing(ip, 8));
        let deadline = Instant::now() + PATIENCE;
        while !placed.is_set() {
            assert!(Instant::now() < deadline, "nobody else gets a place");
            if claimants.iter().map(Claimants::claim).sum::<usize>() == 16 {
                held.set();
            }
        }
        claimants.iter().for_each(Claimants::leave);
        left.set();
    };
    let wait_for_a_place = || {
        held.wait();
        let mut a = open(&config_a());
        let peer = a.connect(B, &up_to(LEN)).unwrap();
        wait_until(&mut a, "it has a place", |a| a.lands(peer) == Some(true));
        placed.set();
        left.wait();
        let token = send(&mut a, peer, 1, &content(1, LEN));
        assert_delivered(&settle(&mut a), &[(token, 1, LEN)]);
        assert_eq!(a.counters().messages_one_copy, 0);
        over.set();
    };
    bed.run(receive, [&wait_for_a_place, &claim]);
}
