//! The gate on real packets: the log pairs with the RX ring (I3), what passes reaches an ordinary socket, and closing
//! is final (I4).

mod bed;

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use bed::packet::{DATA_PORT, EAGER, LOCAL, Packet};
use bed::pair::lm_session;
use bed::xsk::{Sender, Xsk};
use lm_ebpf::{AttachMode, EffectiveMode, Gate, GateConfig, Role, Verdict};
use lm_protocol::landing::SessionAdmission;

const QUEUE: u32 = 0;

/// One queue each; `veth0` has the tests' local address.
fn link() -> (u32, u32) {
    bed::ip("link add veth0 address 02:00:00:00:00:02 type veth peer name veth1 address 02:00:00:00:00:01");
    bed::ip("addr add 10.77.0.2/24 dev veth0");
    bed::ip("link set veth0 up");
    bed::ip("link set veth1 up");
    (bed::ifindex("veth0"), bed::ifindex("veth1"))
}

fn config() -> GateConfig {
    GateConfig {
        local_ip: Some(LOCAL),
        ..GateConfig::default()
    }
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_log_pairs_with_the_rx_ring() {
    bed::in_namespace(pairs_with_the_rx_ring);
}

fn pairs_with_the_rx_ring() {
    let (ifindex, peer) = link();
    let mut gate = Gate::attach(ifindex, &config(), AttachMode::Native).unwrap();
    let mut xsk = Xsk::bind(ifindex, QUEUE);
    let socket = UdpSocket::bind((LOCAL, DATA_PORT)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    gate.register_xsk(QUEUE, xsk.as_fd()).unwrap();
    gate.set_role(QUEUE, Role::Landing).unwrap();
    gate.open_session(QUEUE, &lm_session()).unwrap();
    let mut log = gate.log(QUEUE).unwrap();
    log.set_message_limit(lm_session().row(), u32::MAX >> 1);
    log.set_posted(100);
    let sender = Sender::new(peer);
    let (mut landed, mut passed) = (0u64, 0);
    let others = [
        |packet| Packet {
            vlan: Some(5),
            ..packet
        },
        |packet| Packet {
            mac: [2, 0, 0, 0, 0, 9],
            ..packet
        },
    ];
    for message in 10..80 {
        // What a promiscuous interface sees beside: neither does it land, nor is it the socket's.
        for other in others.iter().take(usize::from(message < 20) * 2) {
            sender.send(&other(Packet::data(message, 3, 4, 77)).bytes());
        }
        // Window 3 2 1 0 of 4, with a duplicate, a late one and a foreign key in between.
        for (index, key_flip, lands) in [
            (3, 0, true),
            (2, 0, true),
            (2, 0, false),
            (3, 0, false),
            (0, 0x100, false),
            (0, 0, true),
        ] {
            let mut packet = Packet::data(message, index, 4, if index == 3 { 77 } else { 1448 });
            packet.key ^= key_flip;
            sender.send(&packet.bytes());
            let lands = lands && landed < 100;
            landed += u64::from(lands);
            passed += u64::from(!lands);
            if !lands {
                let len = socket
                    .recv(&mut [0; 2000])
                    .expect("what passes reaches the data socket");
                assert_eq!(len, packet.bytes().len() - 42);
            }
        }
    }
    let counted = || {
        gate.counters()
            .iter()
            .filter(|(verdict, _)| verdict.may_reach_data_socket())
            .map(|(_, n)| n)
            .sum::<u64>()
    };
    until("all packets judged", || {
        log.producer() + counted() >= landed + passed
    });
    assert_eq!(
        (log.producer(), counted(), log.passed()),
        (landed, passed, passed)
    );
    assert_eq!(landed, 100, "as many as posted");
    assert_eq!(log.counter(Verdict::PassForeign), 20);
    for position in 0..landed {
        until("the packet of a log entry", || xsk_has(&mut xsk, position, &log));
    }
    assert_eq!(xsk.receive(), None, "nothing without a log entry");
    // Closing is final: nothing lands, and the log stays.
    gate.close_session(QUEUE, lm_session().row()).unwrap();
    gate.quiesce(QUEUE).unwrap();
    log.set_posted(1000);
    sender.send(&Packet::data(90, 0, 1, 100).bytes());
    until("the late packet", || log.counter(Verdict::PassNoSession) == 1);
    assert_eq!(log.producer(), landed);
}

/// Takes the next packet and compares it with its entry.
fn xsk_has(xsk: &mut Xsk, position: u64, log: &lm_ebpf::Log) -> bool {
    let Some(packet) = xsk.receive() else { return false };
    let entry = log.entry(position);
    let word = |at: usize| u32::from_be_bytes(packet[at..at + 4].try_into().unwrap());
    assert_eq!(usize::from(entry.frame_len), packet.len());
    assert_eq!(
        (entry.sequence, entry.message, entry.index),
        (position as u16, word(54), word(58))
    );
    true
}

#[test]
fn small_packets_reach_the_general_queue() {
    bed::in_namespace(|| {
        let (ifindex, peer) = link();
        let mut gate = Gate::attach(ifindex, &config(), AttachMode::Native).unwrap();
        let mut xsk = Xsk::bind(ifindex, QUEUE);
        gate.register_xsk(QUEUE, xsk.as_fd()).unwrap();
        gate.set_role(QUEUE, Role::General).unwrap();
        let sender = Sender::new(peer);
        let frame = Packet::lm(EAGER, 64).bytes();
        sender.send(&frame);
        let mut received = None;
        until("the eager packet", || {
            received = xsk.receive();
            received.is_some()
        });
        assert_eq!(received.unwrap(), frame);
        // A closed socket leaves the map: the packet takes the one-copy path.
        let socket = UdpSocket::bind((LOCAL, DATA_PORT)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        gate.unregister_xsk(QUEUE).unwrap();
        gate.unregister_xsk(QUEUE).unwrap();
        sender.send(&frame);
        assert_eq!(socket.recv(&mut [0; 2000]).unwrap(), 24 + 64);
        assert_eq!(gate.log(QUEUE).unwrap().counter(Verdict::PassOneCopy), 1);
    });
}

/// Two CPUs send at once: in native mode one of them at a time runs the gate, so no increment and no entry is lost
/// although the rows are not atomic.
#[test]
fn native_mode_counts_without_atomics() {
    bed::in_namespace(|| {
        const EACH: u32 = 20_000;
        let (ifindex, peer) = link();
        let mut gate = Gate::attach(ifindex, &config(), AttachMode::Native).unwrap();
        assert_eq!(gate.mode(), EffectiveMode::Native);
        gate.set_role(QUEUE, Role::Landing).unwrap();
        let xsk = Xsk::bind(ifindex, QUEUE);
        gate.register_xsk(QUEUE, xsk.as_fd()).unwrap();
        gate.open_session(
            QUEUE,
            &SessionAdmission {
                payload_len: 64,
                ..lm_session()
            },
        )
        .unwrap();
        let mut log = gate.log(QUEUE).unwrap();
        log.set_message_limit(lm_session().row(), u32::MAX >> 1);
        log.set_posted(u64::from(2 * EACH));
        // The ring of a veth has 256 entries and refuses more: both send in step with what was judged.
        // The kernel's own multicast comes in between.
        let judged = || log.counters().total() - log.counter(Verdict::PassForeign);
        let send = |sender: &Sender, first: u32| {
            for step in 0..EACH {
                while 2 * u64::from(step) > judged() + 100 {
                    std::thread::yield_now();
                }
                sender.send(&Packet::data(first.wrapping_add(step), 0, 1, 8).bytes());
            }
        };
        std::thread::scope(|scope| {
            for cpu in 0..2 {
                let sender = Sender::new(peer);
                let send = &send;
                scope.spawn(move || {
                    bed::pin_to(cpu);
                    send(&sender, 10);
                });
            }
        });
        until("all packets judged", || judged() == u64::from(2 * EACH));
        let counters = log.counters();
        assert_eq!(
            counters.get(Verdict::RedirectLanding) + counters.get(Verdict::PassOrder),
            u64::from(2 * EACH)
        );
        assert_eq!(log.producer(), counters.get(Verdict::RedirectLanding));
        let first = log.producer().saturating_sub(u64::from(lm_ebpf::Log::ENTRIES));
        let messages: Vec<_> = (first..log.producer())
            .map(|position| log.entry(position))
            .collect();
        assert!(
            messages
                .iter()
                .zip(first..)
                .all(|(entry, position)| entry.sequence == position as u16)
        );
        assert!(messages.windows(2).all(|pair| pair[1].message > pair[0].message));
    });
}
