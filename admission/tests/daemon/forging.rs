//! An allowed program that is after another user's session: what the daemon tells it, and what it can send with that.

use std::net::SocketAddrV4;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use lm_dataplane::ipc::*;
use lm_dataplane::memory::Mapping;
use lm_dataplane::ring::Descriptor;
use lm_dataplane::xsk::{BindMode, Rings, Xsk, XskConfig};
use lm_dataplane::{
    Admission, AdmissionConfig, ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, Outcome,
};
use lm_protocol::control::Grant;
use lm_protocol::wire::ipv4;
use lm_protocol::wire::lm::{LmHeader, Trailer};
use xtask::bed::INTERFACE;

use crate::bed::{Daemon, Hosts, PATIENCE, Side, wait_until};
use crate::program::{Client, MEMORY_LEN, grant, memory};

/// Users of the receiver and of who is after its session.
const OWNER: u32 = 2001;
const THIEF: u32 = 2002;

/// An AF_XDP socket that the daemon gave to a program, to send any frame with.
struct Sender {
    memory: std::fs::File,
    xsk: Xsk,
    rings: Rings,
}

impl Sender {
    fn new(client: &mut Client, queue: u16) -> Sender {
        let memory = memory(MEMORY_LEN);
        let call = Client::channel_call(queue, Role::Transmit, MEMORY_LEN);
        let (reply, mut beside) = client.call_beside(call, &[memory.as_fd()]);
        assert_eq!(reply, Reply::ChannelOpened { zero_copy: false });
        let mapping = Arc::new(Mapping::of_file(memory.as_fd(), MEMORY_LEN).unwrap());
        let config = XskConfig {
            interface_index: client.joined().interface_index,
            queue: queue.into(),
            mapping: &mapping,
            registered_len: MEMORY_LEN,
            chunk_len: 2048,
            fill_len: 64,
            completion_len: 64,
            rx_len: 64,
            tx_len: 64,
            bind: BindMode::Copy,
        };
        let (xsk, rings) = Xsk::adopt(beside.remove(0), &config).unwrap();
        Sender {
            memory: memory.into(),
            xsk,
            rings,
        }
    }

    /// Sends a packet under the address of another program.
    fn send(&mut self, macs: &[[u8; 6]; 2], from: SocketAddrV4, to: SocketAddrV4, header: &LmHeader) {
        let frame = frame(macs, from, to, header);
        self.memory.write_all_at(&frame, 0).unwrap();
        let descriptor = Descriptor {
            addr: 0,
            len: frame.len() as u32,
            options: 0,
        };
        assert!(self.rings.tx.free(1) > 0);
        self.rings.tx.write(0, descriptor);
        self.rings.tx.submit(1);
        let sent = self.rings.tx.produced();
        wait_until("the kernel takes the frame", || {
            // Busy now is not busy for ever.
            let _ = self.xsk.wake_tx();
            self.rings.tx.consumed() == sent
        });
        let done = self.rings.completion.available(1);
        self.rings.completion.release(done);
    }
}

fn frame(macs: &[[u8; 6]; 2], from: SocketAddrV4, to: SocketAddrV4, header: &LmHeader) -> Vec<u8> {
    let trailer = Trailer::new(header, &[], from);
    let lm = [&header.encode(0)[..], trailer.as_bytes()].concat();
    let udp_len = (8 + lm.len()) as u16;
    let mut ip = [0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0].to_vec();
    ip[2..4].copy_from_slice(&(20 + udp_len).to_be_bytes());
    ip.extend_from_slice(&from.ip().octets());
    ip.extend_from_slice(&to.ip().octets());
    let checksum = ipv4::checksum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let [own, theirs] = macs;
    let mut frame = [&theirs[..], own, &[8, 0], &ip].concat();
    for word in [from.port(), to.port(), udp_len, 0] {
        frame.extend_from_slice(&word.to_be_bytes());
    }
    frame.extend_from_slice(&lm);
    frame
}

fn mac(hosts: &Hosts, side: Side) -> [u8; 6] {
    let text = hosts
        .host(side)
        .read_file(&format!("/sys/class/net/{INTERFACE}/address"));
    let text = text.unwrap();
    let bytes: Vec<u8> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    bytes.try_into().unwrap()
}

/// What the daemon tells a program of its status.
fn status_as(client: &mut Client) -> String {
    let (reply, beside) = client.call_beside(Call::Status, &[]);
    assert_eq!(reply, Reply::Status);
    let file = std::fs::File::from(beside.into_iter().next().unwrap());
    std::io::read_to_string(file).unwrap()
}

/// Every number in a text, however it is written: one of them may be a key.
fn numbers(text: &str) -> Vec<u64> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric());
    let number = |word: &str| match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    };
    words.filter_map(number).collect()
}

/// What the thief does with each number: grants credit, lets the sender send, and says that all was delivered.
fn forge(thief: &mut Sender, macs: &[[u8; 6]; 2], grant: &Grant, addresses: [SocketAddrV4; 2], keys: &[u64]) {
    let [from, to] = addresses;
    for delivered in [0, 0, 0, 1] {
        for &session_key in keys {
            let credit = LmHeader::Credit {
                session_key,
                packet_limit: 100,
                delivered: grant.first_message + delivered,
                // What is not announced yet is not sent.
                announced: grant.first_message + 1,
                lands: true,
            };
            thief.send(macs, from, to, &credit);
        }
        // Nothing answers it: the sender gets its time to be misled.
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_session_is_not_its_neighbours() {
    let Some(hosts) = Hosts::with_queues("forging", 4) else {
        return;
    };
    let left = hosts.daemon(Side::Left);
    let [owner, thief] = [OWNER, THIEF].map(|uid| uid.to_string());
    let right = hosts.daemon_with(Side::Right, &["--allow-uid", &owner, "--allow-uid", &thief]);
    let path = hosts.socket(Side::Right);
    let host = hosts.host(Side::Right);
    // It has a session, and delivers nothing in it.
    let mut receiver = Client::connect_as(&path, OWNER).hello().join(host, 7168, true);
    receiver.open(receiver.landing_queue(), Role::Landing);
    receiver.done(Call::Receive(receiver.offer()));
    let mut thief = Client::connect_as(&path, THIEF).hello().join(host, 7300, false);
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            hosts
                .host(Side::Left)
                .enter(|| Ok(send_one(&hosts, told)))
                .unwrap()
        });
        let Event::Opened {
            from, grant: opened, ..
        } = receiver.event()
        else {
            panic!("not opened")
        };
        let opened = grant(&opened);
        is_told_to_its_own(&right, &mut receiver, &mut thief, from, opened.session_key);
        let mut keys = numbers(&status_as(&mut thief));
        keys.sort_unstable();
        keys.dedup();
        let macs = [Side::Right, Side::Left].map(|side| mac(&hosts, side));
        let addresses = [SocketAddrV4::new(host.address(), 7168), from];
        let mut socket = Sender::new(&mut thief, 2);
        forge(&mut socket, &macs, &opened, addresses, &keys);
        // The forgery itself is right: with the key it succeeds.
        tell.send(()).unwrap();
        forge(&mut socket, &macs, &opened, addresses, &[opened.session_key]);
        // The sender ends; also where something above fails, since this is the closure's own.
        drop(tell);
        let [before, after] = sender.join().unwrap();
        assert_eq!(
            before, None,
            "a message was said to be delivered by who has no part in it"
        );
        assert_eq!(
            after,
            Some(Outcome::Delivered),
            "the forgery is none, whatever the key"
        );
    });
    left.stop();
    right.stop();
}

/// Its owner and root see the session, nobody else does, and nobody the key.
fn is_told_to_its_own(
    daemon: &Daemon,
    owner: &mut Client,
    thief: &mut Client,
    from: SocketAddrV4,
    session_key: u64,
) {
    let session = format!("\"from\":\"{from}\"");
    let own = status_as(owner);
    assert!(own.contains(&session), "{own}");
    let theirs = status_as(thief);
    assert!(!theirs.contains(&session), "{theirs}");
    let all = daemon.status();
    assert_eq!(all.interfaces[0].sessions[0].from, from);
    let all = serde_json::to_string(&all).unwrap();
    for status in [own, theirs, all] {
        assert!(!numbers(&status).contains(&session_key), "{status}");
    }
}

/// Sends one message that nobody takes; what is said to have become of it until `told` is, and after.
fn send_one(hosts: &Hosts, told: std::sync::mpsc::Receiver<()>) -> [Option<Outcome>; 2] {
    let mut endpoint = Endpoint::open(&EndpointConfig {
        interface: INTERFACE.to_owned(),

        // Nothing but a word of its receiver's ends it.
        patience: 4 * PATIENCE,
        memory: MemoryConfig {
            landing_len: 0,
            ..MemoryConfig::default()
        },
        admission: AdmissionConfig {
            by: Admission::Daemon(hosts.socket(Side::Left)),
            ..AdmissionConfig::default()
        },
        ..EndpointConfig::default()
    })
    .unwrap_or_else(|error| panic!("{error}"));
    let options = ConnectOptions {
        max_message_len: 1 << 16,
        ..ConnectOptions::default()
    };
    let to = SocketAddrV4::new(hosts.host(Side::Right).address(), 7168);
    let peer = endpoint
        .connect(to, &options)
        .unwrap_or_else(|error| panic!("{error}"));
    endpoint
        .send_copy(peer, &[7; 20_000], 1)
        .unwrap_or_else(|error| panic!("{error}"));
    let mut outcomes = [None, None];
    let mut end = None;
    while outcomes[1].is_none() && end.is_none_or(|end| Instant::now() < end) {
        endpoint.poll();
        endpoint.wait(Duration::from_millis(1));
        if end.is_none() && told.try_recv() != Err(std::sync::mpsc::TryRecvError::Empty) {
            end = Some(Instant::now() + PATIENCE);
        }
        while let Some(completion) = endpoint.try_completion() {
            outcomes[usize::from(end.is_some())] = Some(completion.outcome);
        }
    }
    outcomes
}
