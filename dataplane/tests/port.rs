//! One story on both NICs: what the engine may expect of a [`Port`], on the simulated one and on the kernel's.

mod bed;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use bed::Pair;
use lm_cards::Interface;
use lm_dataplane::memory::{HugePages, PACKET_HEADROOM, Umem};
use lm_dataplane::port::{
    EffectiveMode, ModeRequest, Port, PortError, QueueDrops, QueueSpec, Role, RxQueue, Socket, SocketEvent,
    TxQueue, WakeError,
};
use lm_dataplane::ring::Descriptor;
use lm_dataplane::xsk::XdpStatistics;
use lm_dataplane::{KernelNic, KernelNicConfig, UdpError};
use lm_ebpf::{AttachError, Verdict};
use lm_protocol::landing::SessionAdmission;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::LmHeader;
use lm_sim::{Delivery, HostConfig, SimNic, Wire, WireConfig};

const A: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const PORT: u16 = 7168;
const KEY: u64 = 0x0123_4567_89ab_cdef;
const HEADER_LEN: u64 = 66;
const PAYLOAD_LEN: u64 = 1448;
const COUNT: u32 = 40;
/// Fragments in a window: all of the message.
const WINDOW: u32 = 64;
const ZONE: u64 = 8192;
/// Where the general queue's frames begin.
const GENERAL: u64 = 256 << 10;
const REGISTERED: u64 = 512 << 10;

/// Both sides of a queue.
struct Queue<P: Port> {
    rx: P::Rx,
    tx: P::Tx,
}

impl<P: Port> Queue<P> {
    fn open(port: &mut P, spec: &QueueSpec) -> Queue<P> {
        let (rx, tx) = port.open(spec).expect("a queue");
        let rx = rx.expect("a queue that receives");
        Queue { rx, tx }
    }
}

/// A host under test: its port, memory, and the general and the landing queue.
struct Host<P: Port> {
    nic: P,
    umem: Umem,
    general: Queue<P>,
    landing: Queue<P>,
    /// Where its own landing queue is not the first behind the general one: the transmit queue to the other host's.
    beside: Option<P::Tx>,
    next_frame: u64,
}

fn spec(queue: u32, role: Role) -> QueueSpec {
    QueueSpec {
        queue,
        role,
        copies: role == Role::Landing,
        registered_len: REGISTERED,
        capacity: 0,
        rx_len: 64,
        tx_len: 64,
    }
}

impl<P: Port> Host<P> {
    fn new(mut nic: P, umem: Umem, landing_queue: u32) -> Host<P> {
        let general = Queue::open(&mut nic, &spec(0, Role::General));
        let landing = Queue::open(&mut nic, &spec(landing_queue, Role::Landing));
        let open = nic.open(&spec(landing_queue, Role::SendOnly));
        assert!(matches!(open, Err(PortError::QueueOpen { queue }) if queue == landing_queue));
        let beside = (landing_queue != 1).then(|| {
            let (_, tx) = nic
                .open(&spec(1, Role::SendOnly))
                .expect("a queue that only sends");
            tx
        });
        Host {
            nic,
            umem,
            general,
            landing,
            beside,
            next_frame: 0,
        }
    }

    /// Sends one packet to the other host's general (0) or landing (1) queue and waits for its completion.
    fn send(&mut self, queue: u32, packet: &[u8]) {
        let tx = match (queue, &mut self.beside) {
            (0, _) => &mut self.general.tx,
            (_, None) => &mut self.landing.tx,
            (_, Some(beside)) => beside,
        };
        let address = GENERAL + 128 * 1024 + self.next_frame * 2048;
        self.next_frame = (self.next_frame + 1) % 16;
        self.umem.copy_to(address, packet);
        assert!(tx.room(1) > 0);
        tx.write(0, Descriptor::new(address, packet.len() as u32));
        tx.submit(1);
        let deadline = Instant::now() + Duration::from_secs(5);
        while tx.completed(1) == 0 {
            tx.flush().expect("wake-up");
            assert!(Instant::now() < deadline, "no completion");
        }
        assert_eq!(tx.completion(0), address);
        tx.release(1);
    }
}

/// Polls until there is something; the simulated NIC has it at once.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

fn payload(index: u32) -> Vec<u8> {
    (0..PAYLOAD_LEN)
        .map(|at| (u64::from(index) * 37 + at * 11 + at / 256) as u8)
        .collect()
}

fn packet(macs: [[u8; 6]; 2], header: LmHeader, payload: &[u8]) -> Vec<u8> {
    let addressing = Addressing {
        src_mac: MacAddr(macs[0]),
        dst_mac: MacAddr(macs[1]),
        vlan: None,
        src_ip: A,
        dst_ip: B,
        src_port: PORT,
        dst_port: PORT,
    };
    let mut packet = vec![0; 66 + payload.len()];
    let len = addressing
        .write_headers(&mut packet, &header, payload.len())
        .expect("a legal packet");
    packet[len..].copy_from_slice(payload);
    packet
}

/// From host A to host B: a message that lands, packets that do not, small packets, datagrams, and a rebuilt channel.
fn story<P: Port>(mut a: Host<P>, mut b: Host<P>, macs: [[u8; 6]; 2]) {
    let data = |message, index| {
        packet(
            macs,
            LmHeader::Data {
                session_key: KEY,
                message,
                index,
                count: COUNT,
            },
            &payload(index),
        )
    };
    let session = SessionAdmission {
        key: KEY,
        wire: lm_protocol::geometry::Wire::Lm,
        peer_ip: A,
        peer_port: PORT,
        local_ip: B,
        header_len: HEADER_LEN as u16,
        payload_len: PAYLOAD_LEN as u16,
        window_fragments: WINDOW,
        first_message: 5,
        active_until_ns: 0,
    };
    b.nic.admit(1, &session).expect("a session");

    // The zone's frames overlap; two more entries than fragments stay for later.
    let address = |index: u32| ZONE + u64::from(index) * PAYLOAD_LEN - HEADER_LEN - PACKET_HEADROOM;
    for position in 0..COUNT {
        b.landing.rx.write(position, address(COUNT - 1 - position));
    }
    b.landing.rx.submit(COUNT);
    b.landing.rx.wake().expect("wake-up");
    b.landing.rx.allow(u64::from(COUNT));
    b.landing.rx.set_message_limit(session.row(), 5);
    assert_eq!(b.nic.passed_count(), 0);

    for index in (0..COUNT).rev() {
        a.send(1, &data(5, index));
        if index == 10 {
            a.send(1, &data(5, index)); // twice: the gate passes it to the socket
        }
    }
    until("all fragments", || {
        (b.landing.rx.available(64) == COUNT).then_some(())
    });
    assert!(b.nic.wait(Duration::ZERO).expect("wait"), "there is something");
    assert_eq!(b.landing.rx.accepted(), u64::from(COUNT));
    for position in 0..COUNT {
        let (received, entry) = (
            b.landing.rx.packet(position),
            b.landing.rx.entry(u64::from(position)),
        );
        assert_eq!(
            (entry.sequence, entry.message, entry.index),
            (position as u16, 5, COUNT - 1 - position)
        );
        assert_eq!(u32::from(entry.frame_len), received.len);
        assert_eq!(received.start(), address(entry.index) + PACKET_HEADROOM);
    }
    b.landing.rx.release(COUNT);
    for index in 0..COUNT {
        let mut found = vec![0; PAYLOAD_LEN as usize];
        b.umem
            .copy_from(ZONE + u64::from(index) * PAYLOAD_LEN, &mut found);
        assert!(found == payload(index), "fragment {index}");
    }
    assert_eq!(b.landing.rx.untaken().count, 0);

    // The duplicate, by way of the stack.
    until("the counter", || (b.nic.passed_count() == 1).then_some(()));
    let mut space = [0; 2048];
    let (from, len) = until("the duplicate", || {
        match b.nic.side().recv(Socket::Data, &mut space).expect("receive") {
            Some(SocketEvent::Datagram { from, len }) => Some((from, len)),
            Some(other) => panic!("{other:?}"),
            None => None,
        }
    });
    assert_eq!(
        (from, len),
        (SocketAddrV4::new(A, PORT), 24 + PAYLOAD_LEN as usize)
    );
    assert!(space[24..len] == payload(10));
    assert!(
        !b.nic.wait(Duration::ZERO).expect("wait"),
        "there is nothing more"
    );

    // After the session nothing lands, whatever is posted.
    b.nic.revoke(1, session.row()).expect("closed");
    b.nic.quiesce(1).expect("quiet");
    b.landing.rx.write(0, address(3));
    b.landing.rx.submit(1);
    b.landing.rx.allow(u64::from(COUNT) + 1);
    b.landing.rx.set_message_limit(session.row(), 6);
    a.send(1, &data(6, 3));
    until("a passed packet", || {
        b.nic.side().recv(Socket::Data, &mut space).expect("receive")
    });
    assert_eq!(
        (b.landing.rx.available(1), b.landing.rx.accepted()),
        (0, u64::from(COUNT))
    );
    assert_eq!(b.landing.rx.drops(), QueueDrops::default());

    // A small message reaches the general queue, and is lost where no frame waits for it.
    let eager = packet(
        macs,
        LmHeader::Eager {
            sender_id: 8,
            number: 1,
            tag: 7,
            digested: false,
            acknowledges: None,
        },
        b"small",
    );
    b.general.rx.write(0, GENERAL);
    b.general.rx.submit(1);
    a.send(0, &eager);
    until("the small message", || {
        (b.general.rx.available(1) == 1).then_some(())
    });
    let received = b.general.rx.packet(0);
    assert_eq!((received.base(), received.start()), (GENERAL, GENERAL + 256));
    let mut found = vec![0; eager.len()];
    b.umem.copy_from(received.start(), &mut found);
    assert_eq!(found, eager, "headers and all");
    b.general.rx.release(1);
    a.send(0, &eager);
    let expected = QueueDrops {
        no_entry: 1,
        dropped: 1,
        ..QueueDrops::default()
    };
    until("the loss in the statistics", || {
        (b.general.rx.drops() == expected).then_some(())
    });

    // The neighbour's address, once the kernel has resolved it.
    let neighbour = until("a neighbour", || b.nic.side().neighbour(A));
    assert_eq!(neighbour, macs[0]);

    // Datagrams, both ways; a port where nobody listens.
    assert_eq!(
        (a.nic.side().local(), b.nic.side().local()),
        (SocketAddrV4::new(A, PORT), SocketAddrV4::new(B, PORT))
    );
    a.nic
        .side()
        .send(Socket::Control, SocketAddrV4::new(B, PORT + 1), b"request")
        .expect("send");
    let event = until("a request", || {
        b.nic
            .side()
            .recv_into(Socket::Control, &b.umem, 100, 64)
            .expect("receive")
    });
    assert_eq!(
        event,
        SocketEvent::Datagram {
            from: SocketAddrV4::new(A, PORT + 1),
            len: 7
        }
    );
    assert_eq!(&b.umem.read_header::<7>(100), b"request");
    b.nic
        .side()
        .send(Socket::Data, SocketAddrV4::new(A, PORT), &[7; 9000])
        .expect("send");
    let mut long = vec![0; 9000];
    let event = until("a long datagram", || {
        a.nic.side().recv(Socket::Data, &mut long).expect("receive")
    });
    assert_eq!(
        event,
        SocketEvent::Datagram {
            from: SocketAddrV4::new(B, PORT),
            len: 9000
        }
    );
    let nobody = SocketAddrV4::new(B, 9999);
    a.nic
        .side()
        .send(Socket::Control, nobody, b"anybody?")
        .expect("send");
    let event = until("a refusal", || {
        a.nic.side().recv(Socket::Control, &mut space).expect("receive")
    });
    assert_eq!(event, SocketEvent::Refused(nobody));

    // A longer registration: the rings start anew, the log goes on.
    let longer = QueueSpec {
        registered_len: b.umem.len(),
        ..spec(1, Role::Landing)
    };
    let Queue { rx, tx } = &mut b.landing;
    b.nic.rebuild(rx, tx, &longer).expect("rebuilt");
    let far = b.umem.len() - 4096;
    let base = b.landing.rx.accepted();
    b.nic
        .admit(
            1,
            &SessionAdmission {
                key: KEY,
                first_message: 6,
                ..session
            },
        )
        .expect("a session");
    b.landing.rx.write(0, far);
    b.landing.rx.submit(1);
    b.landing.rx.allow(base + 1);
    b.landing.rx.set_message_limit(session.row(), 6);
    a.send(1, &data(6, 4));
    until("a fragment far out", || {
        (b.landing.rx.available(1) == 1).then_some(())
    });
    assert_eq!(b.landing.rx.packet(0).base(), far);
    assert_eq!(
        (b.landing.rx.accepted(), b.landing.rx.entry(base).index),
        (base + 1, 4)
    );
    b.landing.rx.release(1);

    let verdicts = b.nic.verdicts();
    let count = |verdict: Verdict| {
        let found = verdicts.iter().find(|(name, _)| *name == verdict.name());
        found.map(|(_, count)| *count).expect("every verdict")
    };
    assert_eq!(count(Verdict::RedirectLanding), u64::from(COUNT) + 1);
    assert_eq!(count(Verdict::RedirectGeneral), 2);
    assert_eq!(count(Verdict::PassOrder), 1);
    assert_eq!(count(Verdict::PassNoSession), 1);
    assert_eq!(count(Verdict::PassControl), 1);

    // What cannot be built anew is closed: nothing comes, and there is no room.
    let odd = QueueSpec { rx_len: 63, ..longer };
    let Queue { rx, tx } = &mut b.landing;
    assert!(matches!(b.nic.rebuild(rx, tx, &odd), Err(PortError::Other(_))));
    assert_eq!((tx.room(1), rx.available(1)), (0, 0));
    assert!(matches!(rx.wake(), Err(WakeError::Gone)));
    b.nic.rebuild(rx, tx, &longer).expect("rebuilt");
    assert!(tx.room(1) > 0);
}

fn memory() -> Umem {
    Umem::new(1 << 20, HugePages::Off).expect("memory")
}

fn simulated(config: WireConfig, ring_start: u32, landing_of_a: u32) -> (Wire, Host<SimNic>, Host<SimNic>) {
    let (a, b) = (memory(), memory());
    let host = |ip, umem: &Umem| HostConfig {
        ip,
        port: PORT,
        queues: 3,
        mapping: umem.mapping().clone(),
        chunk_len: 4096,
        multi_buffer: false,
        tx_metadata_len: 0,
        ring_start,
    };
    let (wire, nic_a, nic_b) = lm_sim::wire(config, [host(A, &a), host(B, &b)]);
    (wire, Host::new(nic_a, a, landing_of_a), Host::new(nic_b, b, 1))
}

#[test]
fn the_story_on_the_simulated_nic() {
    for ring_start in [0, u32::MAX, u32::MAX - 20] {
        for landing_of_a in [1, 2] {
            let (wire, a, b) = simulated(WireConfig::default(), ring_start, landing_of_a);
            assert_eq!(a.nic.effective_mode(), EffectiveMode::Simulated);
            story(a, b, [lm_sim::mac_of(A), lm_sim::mac_of(B)]);
            let counters = wire.counters();
            assert_eq!(
                (counters.too_long, counters.stack_ignored, counters.socket_full),
                (0, 0, 0)
            );
        }
    }
}

fn kernel_config(interface_index: u32, ip: Ipv4Addr, mode: ModeRequest, umem: &Umem) -> KernelNicConfig<'_> {
    KernelNicConfig {
        interface_index,
        local_ip: ip,
        port: PORT,
        mode,
        mapping: umem.mapping(),
        chunk_len: 4096,
        multi_buffer: false,
        tx_metadata_len: 0,
        poll_queues: false,
    }
}

/// `va` in the calling thread's namespace, once its gate is gone with its NIC: a child that another test is starting holds a copy of the
/// link's descriptor until it runs its program.
fn detached() -> Interface {
    until("the gate goes with its NIC", || {
        let va = Interface::by_name("va").expect("va");
        va.xdp_program.is_none().then_some(va)
    })
}

fn on_the_kernels_nic(mode: ModeRequest, landing_of_a: u32) {
    let pair = Pair::new(3);
    let open = |namespace: &bed::Namespace, device: &str, ip, landing_queue| {
        namespace.run(|| {
            let interface = Interface::by_name(device).expect("the device");
            let umem = memory();
            let nic = KernelNic::open(&kernel_config(interface.index, ip, mode, &umem));
            let nic = nic.unwrap_or_else(|error| panic!("{error}"));
            let host = Host::new(nic, umem, landing_queue);
            assert_eq!(host.nic.effective_mode(), EffectiveMode::CopyNative);
            (host, interface)
        })
    };
    let (a, va) = open(&pair.a, "va", A, landing_of_a);
    let (mut b, vb) = open(&pair.b, "vb", B, 1);
    // One gate an interface, one endpoint a port.
    let second = |port| {
        pair.a.run(|| {
            KernelNic::open(&KernelNicConfig {
                port,
                ..kernel_config(va.index, A, mode, &memory())
            })
        })
    };
    assert!(matches!(second(0), Err(PortError::Other(error)) if error.is::<AttachError>()));
    assert!(matches!(second(PORT), Err(PortError::Other(error)) if error.is::<UdpError>()));
    let start = Instant::now();
    assert!(
        !b.nic.wait(Duration::from_millis(50)).expect("wait"),
        "the link is silent"
    );
    assert!(start.elapsed() >= Duration::from_millis(50));
    pair.b.run(|| story(a, b, [va.mac, vb.mac])); // its rebuilt channel opens a socket there
    let left = pair.a.run(detached);
    assert!(left.up);
}

#[test]
fn the_story_on_the_kernels_nic() {
    if bed::root() {
        on_the_kernels_nic(ModeRequest::Copy, 1);
        on_the_kernels_nic(ModeRequest::Auto, 2);
    }
}

#[test]
fn zero_copy_on_veth_is_an_error() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(2);
    pair.a.run(|| {
        let index = Interface::by_name("va").expect("va").index;
        let umem = memory();
        let mut nic =
            KernelNic::open(&kernel_config(index, A, ModeRequest::ZeroCopy, &umem)).expect("attached");
        let error = nic
            .open(&QueueSpec {
                copies: false,
                ..spec(1, Role::Landing)
            })
            .expect_err("no zero-copy");
        assert_eq!(
            error.to_string(),
            "the driver has no zero-copy for AF_XDP; use copy mode"
        );
        drop(nic);
        detached();
    });
}

#[test]
fn packets_cross_by_hand_and_in_turn() {
    let config = WireConfig {
        delivery: Delivery::Manual,
        ..WireConfig::default()
    };
    let (wire, mut a, mut b) = simulated(config, u32::MAX - 2, 1);
    let eager = |number| {
        packet(
            [[2; 6]; 2],
            LmHeader::Eager {
                sender_id: 2,
                number,
                tag: 0,
                digested: false,
                acknowledges: None,
            },
            &[number as u8; 8],
        )
    };
    for offset in 0..8 {
        b.general.rx.write(offset, GENERAL + u64::from(offset) * 4096);
        a.umem.copy_to(u64::from(offset) * 2048, &eager(offset));
        a.general
            .tx
            .write(offset, Descriptor::new(u64::from(offset) * 2048, 74));
    }
    b.general.rx.submit(8);
    a.general.tx.submit(8);
    a.general.tx.flush().expect("wake-up");
    assert_eq!((a.general.tx.completed(8), b.general.rx.available(8)), (0, 0));
    assert!(wire.step());
    assert_eq!((a.general.tx.completed(8), b.general.rx.available(8)), (1, 1));
    assert_eq!(wire.deliver(100), 7);
    assert!(!wire.step());
    assert_eq!((a.general.tx.completed(8), b.general.rx.available(9)), (8, 8));
    assert_eq!(wire.counters().crossed, 8);
}

#[test]
fn the_simulated_nic_loses_as_the_kernel_does() {
    let (wire, mut a, mut b) = simulated(WireConfig::default(), 0, 1);
    let eager = packet(
        [[2; 6]; 2],
        LmHeader::Eager {
            sender_id: 2,
            number: 1,
            tag: 0,
            digested: false,
            acknowledges: None,
        },
        &[1; 8],
    );
    // Rings of 4, and entries of which the first two are invalid.
    let short = QueueSpec {
        rx_len: 4,
        ..spec(0, Role::General)
    };
    let Queue { rx, tx } = &mut b.general;
    b.nic.rebuild(rx, tx, &short).expect("rebuilt");
    let mut offer = |entries: [u64; 4]| {
        assert_eq!(b.general.rx.room(4), 4);
        for (offset, entry) in (0..).zip(entries) {
            b.general.rx.write(offset, entry);
        }
        b.general.rx.submit(4);
    };
    offer([REGISTERED - 4095, 1 << 48, GENERAL, GENERAL + 4096]);
    a.send(0, &eager);
    a.send(0, &eager);
    offer([8192, 12288, 16384, 20480].map(|frame| GENERAL + frame));
    for _ in 0..4 {
        a.send(0, &eager);
    }
    let mut expected = XdpStatistics {
        rx_ring_full: 2,
        ..XdpStatistics::default()
    };
    let lost = |b: &Host<SimNic>| XdpStatistics {
        tx_ring_empty: 0,
        ..b.nic.statistics(0).expect("statistics")
    };
    assert_eq!(lost(&b), expected);
    assert_eq!(
        (b.general.rx.available(8), b.general.rx.packet(1).base()),
        (4, GENERAL + 4096)
    );
    b.general.rx.release(4);
    a.send(0, &eager);
    a.send(0, &eager);
    assert_eq!(b.general.rx.available(4), 2);
    assert_eq!(
        b.general.rx.packet(0).base(),
        GENERAL + 16384,
        "the lost packets' entry first"
    );
    assert_eq!(b.general.rx.packet(1).base(), GENERAL + 20480);
    b.general.rx.release(2);
    a.send(0, &eager);
    expected.rx_fill_ring_empty = 1;
    expected.rx_dropped = 1;
    assert_eq!(lost(&b), expected);
    // Bad descriptors, and packets longer than the link takes.
    for (offset, (address, len, options)) in [
        (0, 0, 0),
        (0, 4097, 0),
        (REGISTERED - 10, 11, 0),
        (0, 60, 1),
        (0, 1519, 0),
    ]
    .into_iter()
    .enumerate()
    {
        a.general.tx.write(
            offset as u32,
            Descriptor {
                addr: address,
                len,
                options,
            },
        );
    }
    a.general.tx.submit(5);
    a.general.tx.flush().expect("wake-up");
    let statistics = a.nic.statistics(0).expect("statistics");
    assert_eq!(statistics.tx_invalid_descriptors, 4);
    assert_eq!((wire.counters().too_long, a.general.tx.completed(9)), (1, 1));
    a.general.tx.release(1);
    // What no gate and no socket takes.
    a.send(0, &[0xff; 60]);
    assert_eq!(wire.counters().stack_ignored, 1);
    // One wake-up sends 32.
    for offset in 0..40 {
        a.landing.tx.write(offset, Descriptor::new(0, 60));
    }
    a.landing.tx.submit(40);
    a.landing.tx.flush().expect("wake-up");
    assert_eq!(a.landing.tx.completed(64), 32);
    a.landing.tx.flush().expect("wake-up");
    assert_eq!(a.landing.tx.completed(64), 40);
    assert!(matches!(
        a.nic.open(&spec(3, Role::SendOnly)),
        Err(PortError::NoQueue { queue: 3, queues: 3 })
    ));
}
