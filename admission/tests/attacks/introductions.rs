//! Packets with forged addresses and packets of earlier lives, from a third host. What an honest sender sends comes as if they were not
//! there, and nothing that they send is taken.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lm_dataplane::{
    Admission, AdmissionConfig, ConnectError, ConnectOptions, Counters, EndpointConfig, LinkConfig, Outcome,
    Session,
};
use lm_protocol::control::RejectReason;
use lm_protocol::wire::lm::{LmHeader, TYPE_REALTIME, TYPE_RT_REPORT, Trailer};
use xtask::bed::until;

use crate::forger::{Forger, small_message};
use crate::form::{At, Bed, Form, HONEST, RECEIVER, config, under_attack};
use crate::traffic::{PATIENCE, assert_delivered, content, open, send, settle, up_to, wait_until};

/// Connects without a session: only small messages.
fn small_only() -> ConnectOptions {
    ConnectOptions {
        session: Session::Later,
        ..ConnectOptions::default()
    }
}

/// The receiver's queues: what comes on the one is on a ring, on the other with what lands and goes to its kernel's socket.
const QUEUES: [u32; 2] = [0, 1];

/// Forged small messages were messages, and came: most of them were challenged.
fn was_attacked(counters: &Counters, sent: u64) {
    assert!(sent > 100, "{sent} forged packets are no attack");
    assert_eq!(counters.drops.malformed, 0, "{counters:?}");
    assert!(counters.challenged > sent / 2, "{sent} forged: {counters:?}");
}

/// Small messages under the honest sender's address, each of a new incarnation: none of them is taken, and its stream goes on.
pub(crate) fn forged_small_messages_reset_nobody(form: Form) {
    const MESSAGES: u64 = 3000;
    let Some(bed) = Bed::new(form) else { return };
    let own = SocketAddrV4::new(bed.host(At::Attacker).address(), 7400);
    for queue in QUEUES {
        bed.steer_to_receiver(queue);
        let attack = |forger: &Forger, n: u64| {
            // What the honest sender calls itself towards a stranger is not what the receiver knows it by.
            let (id, number) = match n % 4 {
                0 => return forger.send(own, HONEST, &small_message(own, n << 40, 0, b"who?")),
                // The next one when all have come.
                1 => (forger.told.get(), MESSAGES as u32),
                _ => (n << 40, (n % 3) as u32),
            };
            forger.send(HONEST, RECEIVER, &small_message(HONEST, id, number, b"forged"));
        };
        let (counters, sent) = small_messages_come(&bed, MESSAGES, attack);
        was_attacked(&counters, sent);
    }
}

/// Real-time packets and reports under the honest sender's address, at a host without a real-time socket: each is counted, and its small
/// messages come.
pub(crate) fn real_time_packets_without_a_socket_cost_nobody(form: Form) {
    let Some(bed) = Bed::new(form) else { return };
    let attack = |forger: &Forger, n: u64| {
        let header = LmHeader::Extension {
            packet_type: [TYPE_REALTIME, TYPE_RT_REPORT][n as usize % 2],
            key: n,
            words: [n as u32, 1, u32::MAX],
        };
        let payload = [0xff; 64];
        let trailer = Trailer::new(&header, &payload, HONEST);
        let head = header.encode(payload.len() as u16);
        let bytes = [&head[..], &payload, trailer.as_bytes()].concat();
        forger.send(HONEST, RECEIVER, &bytes);
    };
    let (counters, sent) = small_messages_come(&bed, 3000, attack);
    assert!(sent > 100, "{sent} forged packets are no attack");
    let drops = counters.drops;
    assert!(drops.unexpected > sent / 2, "{sent} forged: {drops:?}");
    assert_eq!(drops.malformed, 0, "{drops:?}");
}

/// An honest sender's small messages come while somebody attacks. What the receiver counted, and how many packets the attacker sent.
fn small_messages_come(bed: &Bed, messages: u64, attack: impl FnMut(&Forger, u64) + Send) -> (Counters, u64) {
    let send_all = || {
        let mut a = open(&bed.config(At::Honest));
        let peer = a.connect(RECEIVER, &small_only()).unwrap();
        let mut tokens = Vec::new();
        for tag in 0..messages {
            tokens.push((send(&mut a, peer, tag, &content(tag, 64)), tag, 64));
            if tag % 64 == 63 {
                // The attack gets its time.
                a.wait(Duration::from_millis(2));
            }
        }
        assert_delivered(&settle(&mut a), &tokens);
        (0..20).for_each(|_| a.wait(Duration::from_millis(2)));
    };
    let work = || bed.beside_receiver(&bed.config(At::Receiver), || bed.program(At::Honest, send_all));
    let (((), (received, counters)), sent) = under_attack(bed, attack, 5000, work);
    assert_eq!(received, messages);
    (counters, sent)
}

/// In a process that a test started to kill: what the process does. Its test does nothing else there.
const VICTIM: &str = "LM_TEST_VICTIM_TAG";
/// The socket of that process's daemon, where it has one.
const VICTIM_SOCKET: &str = "LM_TEST_VICTIM_SOCKET";

/// Sends one message, and waits for its end.
fn live(tag: u64) {
    let mut a = open(&EndpointConfig {
        admission: AdmissionConfig {
            by: match std::env::var_os(VICTIM_SOCKET) {
                Some(socket) => Admission::Daemon(socket.into()),
                None => Admission::Embedded,
            },
            ..config(At::Honest).admission
        },
        ..config(At::Honest)
    });
    let peer = a.connect(RECEIVER, &small_only()).unwrap();
    let token = send(&mut a, peer, tag, &content(tag, 64));
    assert_delivered(&settle(&mut a), &[(token, tag, 64)]);
    println!("heard {}", a.counters().eager_resent);
    std::thread::sleep(PATIENCE);
    panic!("nobody kills us");
}

/// Has a process of its own [`live`] until it was heard; how often its message was repeated.
fn life(bed: &Bed, tag: u64) -> u64 {
    let form = match bed.form() {
        Form::Embedded => "embedded",
        Form::Daemon => "daemon",
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = format!("a_sender_that_began_anew_is_heard_at_once::{form}");
    command.args(["--exact", &test, "--nocapture"]);
    command.env(VICTIM, tag.to_string()).stdout(Stdio::piped());
    if bed.form() == Form::Daemon {
        command.env(VICTIM_SOCKET, bed.socket(At::Honest));
    }
    let mut child = Killed(command.spawn().unwrap());
    let output = BufReader::new(child.0.stdout.take().unwrap());
    let heard = output.lines().find_map(|line| {
        let line = line.expect("text");
        Some(line.split_once("heard ")?.1.parse::<u64>().expect("a number"))
    });
    heard.expect("each life is heard")
}

/// A sender that is killed and started again at the same address and port is heard at once each time, by proving itself and not by any time limit,
/// also while others forge its address.
pub(crate) fn a_sender_that_began_anew_is_heard_at_once(form: Form) {
    // Each takes an eighth of a second.
    let lives = if form == Form::Embedded { 100 } else { 40 };
    if let Ok(tag) = std::env::var(VICTIM) {
        return form.program(|| live(tag.parse().expect("a number")));
    }
    let Some(bed) = Bed::new(form) else { return };
    let attack = |forger: &Forger, n: u64| {
        forger.send(HONEST, RECEIVER, &small_message(HONEST, n << 40, 0, b"forged"));
    };
    let live_all = || (0..lives).map(|tag| life(&bed, tag)).collect::<Vec<u64>>();
    let work = || bed.beside_receiver(&bed.config(At::Receiver), || bed.on(At::Honest, live_all));
    let ((resent, (received, counters)), sent) = under_attack(&bed, attack, 1000, work);
    assert_eq!(received, lives);
    was_attacked(&counters, sent);
    // One repetition for the proof; a busy machine may bring a second. A time limit would bring ten and more.
    let late = resent.iter().filter(|&&resent| resent > 2).count();
    assert!(late <= lives as usize / 20, "{resent:?}");
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
/// one that was started since: costs the present life nothing, and is not taken. What a daemon said for it is
/// [`altered_truncated_and_replayed`](crate::control::altered_truncated_and_replayed)'s.
pub(crate) fn an_earlier_life_repeated_from_elsewhere_is_not_taken(form: Form) {
    const MESSAGES: u64 = 200;
    let Some(bed) = Bed::new(form) else { return };
    let capture = Scratch(std::env::temp_dir().join(format!("lm-replay-{}.pcap", std::process::id())));
    let life = |config: &EndpointConfig| {
        let mut a = open(config);
        let peer = a.connect(RECEIVER, &up_to(100_000)).unwrap();
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
        drop(a);
    };
    let recorded = EndpointConfig {
        link: LinkConfig {
            capture: Some(Arc::new(File::create(&capture.0).expect("a file"))),
            ..bed.config(At::Honest).link
        },
        ..bed.config(At::Honest)
    };
    let receiver = bed.config(At::Receiver);
    let (_, (received, _)) = bed.beside_receiver(&receiver, || bed.program(At::Honest, || life(&recorded)));
    assert_eq!(received, MESSAGES);
    let said: Vec<_> = datagrams(&capture.0)
        .into_iter()
        .filter(|(from, ..)| *from == HONEST)
        .collect();
    assert!(said.len() > 500, "{} packets", said.len());
    for queue in QUEUES {
        bed.steer_to_receiver(queue);
        let repeated = AtomicU64::new(0);
        let attack = |forger: &Forger, n: u64| {
            let (from, to, payload) = &said[n as usize % said.len()];
            forger.send(*from, *to, payload);
            // Relaxed: a lone count.
            repeated.store(n, Ordering::Relaxed);
        };
        let work = || {
            bed.beside_receiver(&receiver, || {
                // All of the past comes before the present life does.
                let all = said.len() as u64;
                let is_so = || Ok(repeated.load(Ordering::Relaxed) > all);
                until("the past is repeated", PATIENCE, is_so).unwrap();
                bed.program(At::Honest, || life(&bed.config(At::Honest)));
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
}

/// Who may not send is not heard by any of the three ways, and is told so.
pub(crate) fn who_is_not_allowed_is_heard_by_no_way(form: Form) {
    let Some(bed) = Bed::new(form) else { return };
    let receiver = EndpointConfig {
        admission: AdmissionConfig {
            allow: vec![(*HONEST.ip(), 32)],
            ..bed.config(At::Receiver).admission
        },
        ..bed.config(At::Receiver)
    };
    let stranger = || {
        let mut a = open(&bed.config(At::Attacker));
        let peer = a.connect(RECEIVER, &small_only()).unwrap();
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
            let refused = a.peer(peer).open_session(&options);
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
    };
    let allowed = || {
        let mut a = open(&bed.config(At::Honest));
        let peer = a.connect(RECEIVER, &up_to(100_000)).unwrap();
        for tag in 0..2 {
            let len = 64 + 100_000 * (1 - tag) - 64 * (1 - tag);
            let token = send(&mut a, peer, tag, &content(tag, len));
            assert_delivered(&settle(&mut a), &[(token, tag, len)]);
        }
    };
    for queue in QUEUES {
        bed.steer_to_receiver(queue);
        // And not under an address that may, from elsewhere: all that comes back is answered.
        let attack = |forger: &Forger, n: u64| {
            forger.send(HONEST, RECEIVER, &small_message(HONEST, n << 40, 0, b"forged"));
        };
        let ((_, (received, counters)), sent) = under_attack(&bed, attack, 5000, || {
            bed.beside_receiver(&receiver, || {
                bed.program(At::Attacker, stranger);
                bed.program(At::Honest, allowed);
            })
        });
        // Some came before there was a receiver.
        assert!(
            sent > 100 && counters.challenged > 100,
            "{sent} forged: {counters:?}"
        );
        assert_eq!(received, 2);
        // A daemon refuses sessions before its program hears of them.
        let refused = if form == Form::Embedded { 3 } else { 1 };
        assert!(counters.drops.not_allowed >= refused, "{counters:?}");
    }
}
