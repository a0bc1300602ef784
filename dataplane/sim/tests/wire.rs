//! The simulated NIC by itself: zero-copy mode as measured on real drivers, and what impairments do behind the wire.

use std::net::Ipv4Addr;

use lm_dataplane::memory::{HUGE_PAGE_LEN, HugePages, PACKET_HEADROOM, Umem};
use lm_dataplane::port::{Port, QueueSpec, Role, RxQueue, Socket, TxQueue};
use lm_dataplane::ring::Descriptor;
use lm_ebpf::Verdict;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::LmHeader;
use lm_sim::driver::{PADDING_BYTE, PREFIX_BYTE};
use lm_sim::{
    Delivery, HostConfig, ImpairmentCounters, Impairments, Semantics, SimNic, SimRxQueue, SimTxQueue, Wire,
    WireConfig, ZeroCopy,
};

const A: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const PORT: u16 = 7168;
const KEY: u64 = 0x0123_4567_89ab_cdef;
const HEADER_LEN: u64 = 66;
const CHUNK_LEN: u32 = 4096;
/// Fragments of a message: as many as one wake-up sends.
const COUNT: u32 = 32;
/// Start of the landing zone.
const ZONE: u64 = 8192;

/// One host: its NIC, memory and queue 1.
struct Host {
    nic: SimNic,
    umem: Umem,
    rx: SimRxQueue,
    tx: SimTxQueue,
}

fn hosts(semantics: Semantics, role: Role) -> (Wire, Host, Host) {
    let umems = [0; 2].map(|_| Umem::new(2 * HUGE_PAGE_LEN, HugePages::Off).expect("memory"));
    let config = |ip, umem: &Umem| HostConfig {
        ip,
        port: PORT,
        queues: 2,
        mapping: umem.mapping().clone(),
        chunk_len: CHUNK_LEN,
        multi_buffer: false,
        tx_metadata_len: 0,
        ring_start: u32::MAX - 7,
    };
    let wire_config = WireConfig {
        semantics: [Semantics::Copy, semantics],
        ..WireConfig::default()
    };
    let (wire, a, b) = lm_sim::wire(wire_config, [config(A, &umems[0]), config(B, &umems[1])]);
    let mut umems = umems.into_iter();
    let [a, b] = [(a, Role::General), (b, role)].map(|(mut nic, role)| {
        let umem = umems.next().expect("two");
        let spec = QueueSpec {
            queue: 1,
            role,
            copies: false,
            registered_len: umem.len(),
            capacity: 0,
            rx_len: 64,
            tx_len: 64,
        };
        let (rx, tx) = nic.open(&spec).expect("a queue");
        let mut rx = rx.expect("a queue that receives");
        if role == Role::General {
            rx.allow(u64::MAX);
        }
        Host { nic, umem, rx, tx }
    });
    (wire, a, b)
}

fn packet(header: LmHeader, payload: &[u8]) -> Vec<u8> {
    let addressing = Addressing {
        src_mac: MacAddr(lm_sim::mac_of(A)),
        dst_mac: MacAddr(lm_sim::mac_of(B)),
        vlan: None,
        src_ip: A,
        dst_ip: B,
        src_port: PORT,
        dst_port: PORT,
    };
    let mut bytes = vec![0; 128];
    let len = addressing
        .write_headers(&mut bytes, &header, payload.len())
        .expect("room");
    bytes.truncate(len);
    bytes.extend_from_slice(payload);
    bytes
}

fn eager(number: u32) -> Vec<u8> {
    let header = LmHeader::Eager {
        sender_id: 2,
        number,
        tag: 0,
        digested: false,
        acknowledges: None,
    };
    packet(header, &[number as u8; 40])
}

/// A packet that no gate takes.
fn foreign() -> Vec<u8> {
    vec![0xff; 100]
}

fn byte(index: u32, at: usize) -> u8 {
    ((u64::from(index) * 1_000_003 + at as u64 * 7919) >> 3) as u8
}

fn fragment(index: u32, payload_len: u64) -> Vec<u8> {
    let header = LmHeader::Data {
        session_key: KEY,
        message: 5,
        index,
        count: COUNT,
    };
    let payload: Vec<u8> = (0..payload_len as usize).map(|at| byte(index, at)).collect();
    packet(header, &payload)
}

impl Host {
    /// Puts packets on the TX ring, and wakes it once.
    fn send(&mut self, packets: &[Vec<u8>]) {
        let done = self.tx.completed(64);
        self.tx.release(done);
        for (n, packet) in packets.iter().enumerate() {
            let address = n as u64 * 2048;
            self.umem.copy_to(address, packet);
            let descriptor = Descriptor::new(address, packet.len() as u32);
            self.tx.write(n as u32, descriptor);
        }
        self.tx.submit(packets.len() as u32);
        self.tx.flush().expect("wake-up");
    }

    /// Posts entries, and the driver takes those that it has room for.
    fn post(&mut self, entries: &[u64]) {
        self.offer(entries);
        self.rx.wake().expect("wake-up");
        // Time passes on the wire.
        self.tx.flush().expect("wake-up");
    }

    fn offer(&mut self, entries: &[u64]) {
        for (n, &entry) in entries.iter().enumerate() {
            self.rx.write(n as u32, entry);
        }
        self.rx.submit(entries.len() as u32);
    }

    /// Frames received into, in order.
    fn received(&mut self) -> Vec<u64> {
        let count = self.rx.available(64);
        let entries = (0..count).map(|n| self.rx.packet(n).base()).collect();
        self.rx.release(count);
        entries
    }

    /// Opens the session and posts a frame for each fragment, highest first.
    fn land(&mut self, payload_len: u64) {
        let session = SessionAdmission {
            wire: lm_protocol::geometry::Wire::Lm,
            peer_ip: A,
            local_ip: B,
            peer_port: PORT,
            key: KEY,
            payload_len: payload_len as u16,
            header_len: HEADER_LEN as u16,
            window_fragments: 64,
            first_message: 5,
            active_until_ns: 0,
        };
        self.nic.admit(1, &session).expect("a session");
        let entries: Vec<u64> = (0..u64::from(COUNT))
            .rev()
            .map(|index| ZONE + index * payload_len - HEADER_LEN - PACKET_HEADROOM)
            .collect();
        self.post(&entries);
        self.rx.allow(COUNT.into());
        self.rx.set_message_limit(session.row(), 5);
    }

    /// The first byte of the landing zone that is not the message's.
    fn first_wrong(&self, payload_len: u64) -> Option<u64> {
        (0..u64::from(COUNT) * payload_len).find(|&at| {
            let [found] = self.umem.read_header::<1>(ZONE + at);
            found != byte((at / payload_len) as u32, (at % payload_len) as usize)
        })
    }
}

fn zero_copy(shape: ZeroCopy) -> Semantics {
    Semantics::ZeroCopy(shape)
}

fn message(payload_len: u64) -> Vec<Vec<u8>> {
    (0..COUNT)
        .rev()
        .map(|index| fragment(index, payload_len))
        .collect()
}

/// *Measured on igb and virtio-net*: the message is contiguous, and the program sees payload where headers were.
#[test]
fn headers_are_overwritten_before_the_program_runs() {
    for (semantics, intact) in [
        (Semantics::Copy, COUNT),
        (zero_copy(ZeroCopy::default()), 1),
        (
            zero_copy(ZeroCopy {
                burst: 8,
                ..ZeroCopy::default()
            }),
            4,
        ),
        (
            zero_copy(ZeroCopy {
                burst: 1,
                ..ZeroCopy::default()
            }),
            COUNT,
        ),
    ] {
        let (wire, mut a, mut b) = hosts(semantics, Role::Landing);
        // One that reads headers, as no queue in zero-copy mode has it.
        wire.set_role(1, 1, lm_ebpf::Role::Landing);
        b.land(1448);
        a.send(&message(1448));
        assert_eq!(b.first_wrong(1448), None, "the placement needs no program");
        let seen = b.nic.gate_counters();
        assert_eq!(seen.total(), u64::from(COUNT));
        // Of each burst the last packet alone still has its headers.
        assert_eq!(
            seen.get(Verdict::RedirectLanding),
            u64::from(intact),
            "{semantics:?}"
        );
        assert_eq!(b.received().len() as u32, intact);
        assert!(wire.counters().are_balanced(Default::default()));
    }
}

#[test]
fn entries_are_taken_ahead_in_batches() {
    let shape = ZeroCopy {
        batch: 8,
        ring_len: 20,
        ..ZeroCopy::default()
    };
    let (wire, mut a, mut b) = hosts(zero_copy(shape), Role::General);
    let taken = |b: &mut Host| 40 - b.rx.untaken().count;
    let entries: Vec<u64> = (0..40).map(|n| ZONE + n * 4096).collect();
    b.offer(&entries);
    b.rx.wake().expect("wake-up");
    assert_eq!(taken(&mut b), 0, "an interrupt comes later");
    assert_eq!(wire.deliver(1), 0);
    assert_eq!(taken(&mut b), 16, "two whole batches fit");
    // Four packets: there is room for another batch behind them.
    let packets: Vec<_> = (0..4).map(eager).collect();
    a.send(&packets);
    assert_eq!(taken(&mut b), 24);
    assert_eq!(b.received(), entries[..4]);
    // In copy mode an entry is taken when its packet comes.
    let (_, mut a, mut b) = hosts(Semantics::Copy, Role::General);
    b.post(&entries);
    a.send(&packets);
    assert_eq!(taken(&mut b), 4);
}

#[test]
fn frames_of_passed_packets_come_back_first_and_last_in_first_out() {
    let shape = ZeroCopy {
        batch: 2,
        ring_len: 2,
        burst: 2,
        ..ZeroCopy::default()
    };
    let (wire, mut a, mut b) = hosts(zero_copy(shape), Role::General);
    let entries: Vec<u64> = (0..6).map(|n| ZONE + n * 4096).collect();
    b.post(&entries);
    a.send(&[foreign(), foreign()]);
    assert_eq!((b.received(), wire.counters().stack_ignored), (vec![], 2));
    a.send(&[eager(0), eager(1), eager(2)]);
    assert_eq!(b.received(), [entries[1], entries[0], entries[2]]);
    // In copy mode a passed packet takes no frame at all.
    let (_, mut a, mut b) = hosts(Semantics::Copy, Role::General);
    b.post(&entries);
    a.send(&[foreign(), foreign(), eager(0)]);
    assert_eq!(b.received(), entries[..1]);
}

/// A passed packet reaches the stack as it lies in memory by then.
#[test]
fn the_stack_gets_what_lies_in_the_frame() {
    let shape = ZeroCopy {
        batch: 1,
        ring_len: 4,
        ..ZeroCopy::default()
    };
    let (wire, mut a, mut b) = hosts(zero_copy(shape), Role::General);
    // Nothing is allowed: everything is passed, through the driver's frames.
    b.rx.allow(0);
    b.post(&[ZONE, ZONE + 4096]);
    a.send(&[eager(7)]);
    let mut space = [0; 100];
    assert!(
        b.nic
            .side()
            .recv(Socket::Data, &mut space)
            .expect("receive")
            .is_some()
    );
    assert_eq!(space[24..64], [7; 40]);
    // The second packet's payload lies over the first one's headers.
    b.post(&[ZONE + 8192 + 40, ZONE + 8192]);
    a.send(&[eager(1), eager(2), eager(3), eager(4)]);
    let mut got = Vec::new();
    while b
        .nic
        .side()
        .recv(Socket::Data, &mut space)
        .expect("receive")
        .is_some()
    {
        got.push(space[24]);
    }
    // Frames: the one that came back, the one left, and the overlapping two, of which the first is spoilt.
    assert_eq!(got, [1, 2, 4]);
    assert_eq!(wire.counters().stack_ignored, 1);
}

#[test]
fn a_device_may_write_before_and_behind_a_packet() {
    let shape = ZeroCopy {
        prefix_len: 12,
        pad_to: 64,
        ..ZeroCopy::default()
    };
    let (wire, mut a, mut b) = hosts(zero_copy(shape), Role::General);
    wire.set_bounds(1, 1, ZONE..ZONE + 4096);
    b.post(&[ZONE]);
    let packet = eager(3);
    a.send(std::slice::from_ref(&packet));
    assert_eq!(b.received(), [ZONE]);
    let mut frame = [0; 4096];
    b.umem.copy_from(ZONE, &mut frame);
    let (start, end) = (256, 256 + packet.len());
    assert_eq!(frame[start..end], packet[..]);
    assert_eq!(frame[start - 12..start], [PREFIX_BYTE; 12]);
    assert!(frame[..start - 12].iter().all(|&byte| byte == 0));
    let padded = end.next_multiple_of(64);
    assert!(padded > end && frame[end..padded].iter().all(|&byte| byte == PADDING_BYTE));
    assert!(frame[padded..].iter().all(|&byte| byte == 0));
    assert_eq!(wire.strayed(), 0);
    b.post(&[ZONE + 4096]);
    a.send(&[packet]);
    // Prefix, packet and padding.
    assert_eq!(wire.strayed(), 3);
}

/// In reverse order a prefix does no harm, and padding does where payloads do not end at its multiples.
#[test]
fn prefixes_are_harmless_and_padding_is_not() {
    for (prefix_len, pad_to, payload_len, whole) in
        [(12, 0, 1448, true), (12, 64, 1448, false), (12, 64, 1408, true)]
    {
        let shape = ZeroCopy {
            prefix_len,
            pad_to,
            ..ZeroCopy::default()
        };
        let (_, mut a, mut b) = hosts(zero_copy(shape), Role::Landing);
        b.land(payload_len);
        a.send(&message(payload_len));
        assert_eq!(
            b.first_wrong(payload_len).is_none(),
            whole,
            "{prefix_len} {pad_to} {payload_len}"
        );
    }
}

#[test]
fn chunks_across_huge_pages_are_skipped_in_zero_copy_mode_alone() {
    let crossing = HUGE_PAGE_LEN - 2048;
    for (semantics, used) in [
        (Semantics::Copy, crossing),
        (zero_copy(ZeroCopy::default()), HUGE_PAGE_LEN),
    ] {
        let (_, mut a, mut b) = hosts(semantics, Role::General);
        b.post(&[crossing, HUGE_PAGE_LEN]);
        a.send(&[eager(0)]);
        assert_eq!(b.received(), [used], "skipped without a trace");
        let statistics = b.nic.statistics(1).expect("statistics");
        assert_eq!((statistics.rx_dropped, statistics.rx_invalid_descriptors), (0, 0));
    }
}

#[test]
fn a_device_without_frames_loses_packets_and_asks_to_be_woken() {
    let (wire, mut a, mut b) = hosts(zero_copy(ZeroCopy::default()), Role::General);
    a.send(&[eager(0)]);
    assert!(b.rx.untaken().needs_wakeup);
    assert_eq!(b.nic.statistics(1).expect("statistics").rx_fill_ring_empty, 1);
    b.post(&[ZONE]);
    b.rx.wake().expect("wake-up");
    assert!(!b.rx.untaken().needs_wakeup);
    a.send(&[eager(1)]);
    assert_eq!(b.received(), [ZONE]);
    assert!(wire.counters().are_balanced(Default::default()));
    assert_eq!((wire.counters().device_lost, wire.counters().ring_lost), (1, 0));
}

#[test]
fn exhausted_rings_are_counted_as_the_kernel_does() {
    let (wire, mut a, mut b) = hosts(Semantics::Copy, Role::General);
    let entries: Vec<u64> = (0..32).map(|n| ZONE + n * 4096).collect();
    b.post(&entries);
    wire.impair(
        0,
        Impairments {
            fill_empty_ppm: 200_000,
            rx_full_ppm: 200_000,
            ..Impairments::default()
        },
    );
    let packets: Vec<_> = (0..32).map(eager).collect();
    a.send(&packets);
    let counters = wire.impairment_counters(0);
    let statistics = b.nic.statistics(1).expect("statistics");
    assert!(statistics.rx_fill_ring_empty > 0 && statistics.rx_ring_full > 0);
    assert_eq!(statistics.rx_fill_ring_empty, counters.fill_empty);
    assert!(
        statistics.rx_ring_full <= counters.rx_full,
        "not where there was no entry"
    );
    let received = b.received();
    assert_eq!(
        received.len() as u64,
        32 - statistics.rx_fill_ring_empty - statistics.rx_ring_full
    );
    // The frame of a packet that met a full RX ring is the next packet's.
    assert_eq!(received, entries[..received.len()]);
    assert!(
        wire.counters()
            .are_balanced(&[counters, ImpairmentCounters::default()])
    );
}

/// Datagrams of the kernel's sockets are impaired too, long ones as well, and a wrong checksum reaches no socket.
#[test]
fn datagrams_are_impaired_too() {
    let (wire, mut a, mut b) = hosts(Semantics::Copy, Role::General);
    let to = std::net::SocketAddrV4::new(B, PORT + 1);
    wire.impair(
        0,
        Impairments {
            loss_ppm: 200_000,
            delay_ns: 1000,
            corrupt_ppm: 200_000,
            ..Impairments::default()
        },
    );
    for n in 0..1000usize {
        a.nic
            .side()
            .send(
                Socket::Control,
                to,
                &vec![n as u8; if n % 2 == 0 { 50 } else { 5000 }],
            )
            .expect("sent");
    }
    let mut space = vec![0; 9000];
    assert!(
        b.nic
            .side()
            .recv(Socket::Control, &mut space)
            .expect("receive")
            .is_none()
    );
    assert_eq!(wire.next_due_ns(), Some(1000));
    wire.advance(1000);
    let mut arrived = 0;
    while b
        .nic
        .side()
        .recv(Socket::Control, &mut space)
        .expect("receive")
        .is_some()
    {
        arrived += 1;
    }
    let (counters, impaired) = (wire.counters(), wire.impairment_counters(0));
    assert_eq!(counters.in_sockets, arrived);
    // Changed MAC addresses do no harm here, and neither does a changed checksum field that becomes 0.
    assert!(impaired.corrupted > 100 && counters.stack_ignored > impaired.corrupted / 2);
    assert!(arrived >= impaired.delivered - impaired.corrupted && impaired.lost_random > 100);
    assert!(counters.are_balanced(&[impaired, ImpairmentCounters::default()]));
}

#[test]
fn packets_moved_by_hand_run_the_program_once() {
    let umems = [0; 2].map(|_| Umem::new(1 << 20, HugePages::Off).expect("memory"));
    let config = |ip, umem: &Umem| HostConfig {
        ip,
        port: PORT,
        queues: 1,
        mapping: umem.mapping().clone(),
        chunk_len: CHUNK_LEN,
        multi_buffer: false,
        tx_metadata_len: 0,
        ring_start: 0,
    };
    let wire_config = WireConfig {
        delivery: Delivery::Manual,
        semantics: [zero_copy(ZeroCopy::default()); 2],
        ..WireConfig::default()
    };
    let (wire, mut a, _b) = lm_sim::wire(wire_config, [config(A, &umems[0]), config(B, &umems[1])]);
    let spec = QueueSpec {
        queue: 0,
        role: Role::General,
        copies: false,
        registered_len: 1 << 20,
        capacity: 0,
        rx_len: 64,
        tx_len: 64,
    };
    let (_rx, mut tx) = a.open(&spec).expect("a queue");
    umems[0].copy_to(0, &eager(1));
    for n in 0..4 {
        tx.write(n, Descriptor::new(0, 106));
    }
    tx.submit(4);
    assert_eq!(wire.deliver(3), 3);
    assert_eq!((wire.counters().crossed, wire.counters().in_sockets), (3, 3));
}
