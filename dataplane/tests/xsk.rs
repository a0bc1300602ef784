//! AF_XDP sockets on real veth devices: the property that DLD stands on, set-up, teardown and statistics.

mod bed;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bed::{Mode, Namespace, Pair, RedirectAll};
use lm_cards::Interface;
use lm_dataplane::memory::{HugePages, Mapping, PACKET_HEADROOM, Umem, fill_address_is_valid};
use lm_dataplane::port::WakeError;
use lm_dataplane::ring::Descriptor;
use lm_dataplane::xsk::{BindMode, Rings, XdpStatistics, Xsk, XskConfig, XskError, XskOptions};

const CHUNK_LEN: u32 = 4096;
/// Header and payload of a full lm fragment at MTU 1500.
const HEADER_LEN: u64 = 66;
const PAYLOAD_LEN: u64 = 1448;
const PACKET_LEN: u32 = (HEADER_LEN + PAYLOAD_LEN) as u32;
/// Packets between sender and receiver: veth's ring holds 256.
const IN_FLIGHT: u32 = 128;

fn index_of(namespace: &Namespace, name: &str) -> u32 {
    namespace
        .run(|| Interface::by_name(name))
        .expect("the device")
        .index
}

fn config(mapping: &Arc<Mapping>, interface_index: u32, queue: u32) -> XskConfig<'_> {
    XskConfig {
        interface_index,
        queue,
        mapping,
        registered_len: mapping.len(),
        chunk_len: CHUNK_LEN,
        fill_len: 4096,
        completion_len: 4096,
        rx_len: 4096,
        tx_len: 4096,
        bind: BindMode::Copy,
    }
}

fn open(namespace: &Namespace, config: &XskConfig<'_>) -> (Xsk, Rings) {
    try_open(namespace, config).expect("an AF_XDP socket")
}

fn try_open(namespace: &Namespace, config: &XskConfig<'_>) -> Result<(Xsk, Rings), XskError> {
    namespace.run(|| Xsk::open(config))
}

/// A byte that tells fragment and place.
fn payload_byte(fragment: u64, at: u64) -> u8 {
    (fragment.wrapping_mul(2_654_435_761).wrapping_add(at * 131) >> 7) as u8
}

fn packet(fragment: u64) -> Vec<u8> {
    let mut packet = vec![0xaa; HEADER_LEN as usize];
    packet[..6].fill(0xff); // to everybody
    packet[12..14].copy_from_slice(&[0x88, 0xb5]); // an EtherType for local experiments
    packet[14..22].copy_from_slice(&fragment.to_be_bytes());
    packet.extend((0..PAYLOAD_LEN).map(|at| payload_byte(fragment, at)));
    packet
}

/// Sends fragments `count - 1` down to 0 and lets `receive` run until it has taken them all.
fn send_all(xsk: &Xsk, rings: &mut Rings, umem: &Umem, count: u32, mut receive: impl FnMut() -> u32) {
    let (mut sent, mut completed, mut received) = (0_u32, 0_u32, 0_u32);
    let deadline = Instant::now() + Duration::from_secs(20);
    while received < count || completed < count {
        assert!(
            Instant::now() < deadline,
            "sent {sent}, completed {completed}, received {received} of {count}"
        );
        // Completion comes when the receiving side has taken the packet, so it bounds what is under way.
        let batch = (count - sent)
            .min(IN_FLIGHT - (sent - completed))
            .min(rings.tx.free(32))
            .min(32);
        for offset in 0..batch {
            let place = u64::from((sent + offset) % IN_FLIGHT) * 2048;
            umem.copy_to(place, &packet(u64::from(count - 1 - sent - offset)));
            rings.tx.write(offset, Descriptor::new(place, PACKET_LEN));
        }
        rings.tx.submit(batch);
        sent += batch;
        if rings.tx.needs_wakeup() && sent > completed {
            xsk.wake_tx().expect("wake-up");
        }
        let done = rings.completion.available(64);
        for offset in 0..done {
            let address = rings.completion.read(offset);
            assert_eq!(
                address,
                u64::from((completed + offset) % IN_FLIGHT) * 2048,
                "completions in order"
            );
        }
        rings.completion.release(done);
        completed += done;
        received += receive();
    }
}

/// Frames at overlapping addresses become one contiguous message (DLD): `LM §3.2` on the kernel's own driver.
fn overlapping_frames_make_one_message(mode: Mode, sender_queue: u32, receiver_queue: u32) {
    const COUNT: u32 = 3000;
    let pair = Pair::new(3);
    let (va, vb) = (index_of(&pair.a, "va"), index_of(&pair.b, "vb"));
    let sender_memory = Umem::new(u64::from(IN_FLIGHT) * 2048 + 4096, HugePages::Off).expect("memory");
    let receiver_memory =
        Umem::new(u64::from(COUNT) * PAYLOAD_LEN + 3 * 4096, HugePages::Auto).expect("memory");
    let (sender, mut sender_rings) = open(&pair.a, &config(sender_memory.mapping(), va, sender_queue));
    let (receiver, mut rings) = open(&pair.b, &config(receiver_memory.mapping(), vb, receiver_queue));
    assert!(!sender.zero_copy() && !receiver.zero_copy(), "veth has none");
    let program = pair.b.run(|| RedirectAll::attach(vb, mode));
    program.register(receiver_queue, &receiver.as_fd());

    // Everything around the zone must stay as it is.
    let zone = 4096_u64;
    receiver_memory.copy_to(0, &[0xee; 4096]);
    let end = zone + u64::from(COUNT) * PAYLOAD_LEN;
    let behind = receiver_memory.len() - end;
    receiver_memory.copy_to(end, &vec![0xee; behind as usize]);

    let fill_address = |index: u32| zone + u64::from(index) * PAYLOAD_LEN - HEADER_LEN - PACKET_HEADROOM;
    assert_eq!(rings.fill.free(COUNT), 4096);
    for position in 0..COUNT {
        let address = fill_address(COUNT - 1 - position);
        assert!(fill_address_is_valid(address, CHUNK_LEN, receiver_memory.len()));
        rings.fill.write(position, address);
    }
    rings.fill.submit(COUNT);
    if rings.fill.needs_wakeup() {
        receiver.wake_rx().expect("wake-up");
    }

    let mut position = 0;
    send_all(&sender, &mut sender_rings, &sender_memory, COUNT, || {
        let count = rings.rx.available(64);
        for offset in 0..count {
            let received = rings.rx.read(offset);
            let address = fill_address(COUNT - 1 - position);
            assert_eq!(
                (received.base(), received.start()),
                (address, address + PACKET_HEADROOM)
            );
            assert_eq!((received.len, received.options), (PACKET_LEN, 0));
            position += 1;
        }
        rings.rx.release(count);
        count
    });

    let mut message = vec![0; (end - zone) as usize];
    receiver_memory.copy_from(zone, &mut message);
    for index in 0..u64::from(COUNT) {
        let fragment = &message[(index * PAYLOAD_LEN) as usize..][..PAYLOAD_LEN as usize];
        let expected: Vec<u8> = (0..PAYLOAD_LEN).map(|at| payload_byte(index, at)).collect();
        assert!(fragment == expected, "fragment {index}");
    }
    // Before the zone: the headers of fragment 0, and nothing before them. Behind it: nothing.
    assert_eq!(
        receiver_memory.read_header::<66>(zone - HEADER_LEN),
        packet(0)[..66]
    );
    let mut margin = vec![0; (zone - HEADER_LEN) as usize];
    receiver_memory.copy_from(0, &mut margin);
    assert!(margin.iter().all(|byte| *byte == 0xee));
    let mut tail = vec![0; behind as usize];
    receiver_memory.copy_from(end, &mut tail);
    assert!(tail.iter().all(|byte| *byte == 0xee));
    let lost = receiver.statistics().expect("statistics");
    assert_eq!(
        XdpStatistics {
            tx_ring_empty: 0,
            ..lost
        },
        XdpStatistics::default()
    );
    assert_eq!(rings.fill.consumed(), COUNT);
    let sender_lost = sender.statistics().expect("statistics");
    assert_eq!(sender_lost.tx_invalid_descriptors, 0);
}

#[test]
fn overlapping_frames_make_one_message_native() {
    if bed::root() {
        overlapping_frames_make_one_message(Mode::Native, 1, 1);
    }
}

#[test]
fn overlapping_frames_make_one_message_generic() {
    if bed::root() {
        // In generic mode veth delivers what queue q + 1 sends to queue q.
        overlapping_frames_make_one_message(Mode::Generic, 2, 1);
    }
}

#[test]
fn queue_zero_reaches_queue_zero_in_both_modes() {
    if bed::root() {
        overlapping_frames_make_one_message(Mode::Native, 0, 0);
        overlapping_frames_make_one_message(Mode::Generic, 1, 0);
        overlapping_frames_make_one_message(Mode::Generic, 0, 0);
    }
}

#[test]
fn the_kernel_counts_what_it_loses() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let (va, vb) = (index_of(&pair.a, "va"), index_of(&pair.b, "vb"));
    let (sender_memory, receiver_memory) = (
        Umem::new(u64::from(IN_FLIGHT) * 2048 + 4096, HugePages::Off).expect("memory"),
        Umem::new(64 * 4096, HugePages::Off).expect("memory"),
    );
    let (sender, mut sender_rings) = open(&pair.a, &config(sender_memory.mapping(), va, 0));
    let small = XskConfig {
        rx_len: 8,
        chunk_len: 2048,
        ..config(receiver_memory.mapping(), vb, 0)
    };
    assert_eq!(XskOptions::default().frame_capacity(small.chunk_len), 1792);
    let (receiver, mut rings) = open(&pair.b, &small);
    let program = pair.b.run(|| RedirectAll::attach(vb, Mode::Native));
    program.register(0, &receiver.as_fd());
    let lost = || receiver.statistics().expect("statistics");

    // Nothing posted.
    send_all(&sender, &mut sender_rings, &sender_memory, 5, || {
        u32::from(lost().rx_fill_ring_empty == 5) * 5
    });
    let mut expected = XdpStatistics {
        rx_fill_ring_empty: 5,
        rx_dropped: 5,
        ..XdpStatistics::default()
    };
    assert_eq!(lost(), expected, "such a packet counts in two places");
    // Invalid entries are skipped without a word (design §4): the first valid one is used.
    for (offset, address) in [receiver_memory.len() - 2047, 1 << 47, 2048, 4096]
        .into_iter()
        .enumerate()
    {
        assert_eq!(
            fill_address_is_valid(address, 2048, receiver_memory.len()),
            offset >= 2
        );
        rings.fill.write(offset as u32, address);
    }
    rings.fill.submit(4);
    send_all(&sender, &mut sender_rings, &sender_memory, 1, || {
        rings.rx.available(1)
    });
    assert_eq!(rings.rx.read(0).base(), 2048);
    rings.rx.release(1);
    assert_eq!(
        lost(),
        expected,
        "the silence that makes validation before posting necessary"
    );
    // Twelve frames, room for eight descriptors.
    for offset in 0..11 {
        rings.fill.write(offset, u64::from(offset + 4) * 4096);
    }
    rings.fill.submit(11);
    send_all(&sender, &mut sender_rings, &sender_memory, 12, || {
        u32::from(lost().rx_ring_full == 4) * 12
    });
    assert_eq!(rings.rx.available(16), 8);
    assert_eq!(
        rings.rx.read(0).base(),
        4096,
        "entries are used first in, first out"
    );
    rings.rx.release(8);
    expected.rx_ring_full += 4;
    assert_eq!(lost(), expected);
    // The entry of the first lost packet served the others too: nine were taken for twelve packets, and one is kept for
    // the next, before those still on the ring. (The kernel publishes its index with the next packet that it delivers, so
    // before that it may lag behind.)
    send_all(&sender, &mut sender_rings, &sender_memory, 1, || {
        rings.rx.available(1)
    });
    assert_eq!(
        (rings.rx.read(0).base(), rings.fill.consumed()),
        (11 * 4096, 4 + 8)
    );
    rings.rx.release(1);
    // Longer than a chunk holds: lost, and its entry stays.
    pair.a.ip("link set va mtu 3000");
    pair.b.ip("link set vb mtu 3000");
    let mut long = packet(0);
    long.resize(1793, 0);
    sender_memory.copy_to(0, &long);
    let before = rings.fill.consumed();
    sender_rings.tx.write(0, Descriptor::new(0, 1793));
    sender_rings.tx.submit(1);
    sender.wake_tx().expect("wake-up");
    let deadline = Instant::now() + Duration::from_secs(5);
    expected.rx_dropped += 1;
    while lost() != expected {
        assert!(
            Instant::now() < deadline,
            "the long packet is counted: {:?}",
            lost()
        );
        std::thread::yield_now();
    }
    assert_eq!(rings.fill.consumed(), before);
}

#[test]
fn a_busy_queue_is_waited_for_and_then_named() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(2);
    let va = index_of(&pair.a, "va");
    let memory = Umem::new(1 << 20, HugePages::Off).expect("memory");
    let first = config(memory.mapping(), va, 0);
    let (xsk, rings) = open(&pair.a, &first);
    let start = Instant::now();
    let error = try_open(&pair.a, &first).expect_err("taken");
    assert!(matches!(error, XskError::Busy { queue: 0 }), "{error}");
    assert!(start.elapsed() >= Duration::from_secs(1));
    // The same memory on another queue is fine, with another registered length.
    let second = XskConfig {
        registered_len: 1 << 19,
        ..config(memory.mapping(), va, 1)
    };
    let (other, other_rings) = open(&pair.a, &second);
    assert_eq!((xsk.queue(), other.queue()), (0, 1));
    // The rings alone keep the socket: closing the descriptor frees nothing until they are gone.
    drop(xsk);
    assert!(matches!(try_open(&pair.a, &first), Err(XskError::Busy { .. })));
    // Freed while somebody waits.
    let reopened = bed::while_waiting(|| try_open(&pair.a, &first), || drop(rings));
    drop(reopened.expect("free now"));
    drop((other, other_rings));
    for round in 0..20 {
        let again = try_open(&pair.a, &first);
        assert!(again.is_ok(), "round {round}: {:?}", again.err());
    }
}

#[test]
fn refusals_say_what_to_do() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let va = index_of(&pair.a, "va");
    let memory = Umem::new(1 << 20, HugePages::Off).expect("memory");
    let good = config(memory.mapping(), va, 0);
    let fail = |config: XskConfig<'_>| try_open(&pair.a, &config).map(|_| ()).expect_err("refused");
    for (invalid, why) in [
        (
            XskConfig {
                chunk_len: 1024,
                ..good.clone()
            },
            "chunk",
        ),
        (
            XskConfig {
                chunk_len: 8192,
                ..good.clone()
            },
            "chunk",
        ),
        (
            XskConfig {
                registered_len: memory.len() + 1,
                ..good.clone()
            },
            "registered",
        ),
        (
            XskConfig {
                registered_len: 100,
                ..good.clone()
            },
            "registered",
        ),
        (
            XskConfig {
                rx_len: 100,
                ..good.clone()
            },
            "powers of two",
        ),
        (
            XskConfig {
                tx_len: 0,
                ..good.clone()
            },
            "powers of two",
        ),
    ] {
        let error = fail(invalid);
        assert!(
            matches!(error, XskError::Invalid { .. }) && error.to_string().contains(why),
            "{error}"
        );
    }
    assert!(matches!(
        fail(XskConfig {
            queue: 7,
            ..good.clone()
        }),
        XskError::Refused { queue: 7, .. }
    ));
    assert!(matches!(
        fail(XskConfig {
            interface_index: 4711,
            ..good.clone()
        }),
        XskError::NoDevice { index: 4711 }
    ));
    assert!(matches!(
        fail(XskConfig {
            bind: BindMode::ZeroCopy,
            ..good.clone()
        }),
        XskError::ZeroCopyUnsupported
    ));
    let (automatic, rings) = open(
        &pair.a,
        &XskConfig {
            bind: BindMode::Auto,
            ..good.clone()
        },
    );
    assert!(!automatic.zero_copy(), "veth has none, and says so");
    drop((automatic, rings));

    let (xsk, mut rings) = open(&pair.a, &good);
    rings.tx.write(0, Descriptor::new(0, 100));
    rings.tx.submit(1);
    pair.a.ip("link set va down");
    assert!(matches!(xsk.wake_tx(), Err(WakeError::Down)));
    assert!(matches!(
        fail(XskConfig {
            queue: 0,
            ..good.clone()
        }),
        XskError::Busy { .. } | XskError::Down
    ));
    // Down is not gone: what is on the ring leaves when the link is back, by the same socket.
    assert!(!xsk.lost_its_device());
    pair.a.ip("link set va up");
    xsk.wake_tx().expect("the link is up again");
    assert_eq!(rings.tx.consumed(), rings.tx.produced());
    pair.a.ip("link delete va");
    assert!(matches!(xsk.wake_tx(), Err(WakeError::Gone | WakeError::Down)));
    assert!(xsk.lost_its_device());
    assert!(xsk.as_fd().as_raw_fd() >= 0);
}

#[test]
fn odd_transmit_addresses_come_back_even() {
    if !bed::root() {
        return;
    }
    // Why TX addresses must be even: kernel 6.18 tags completions in bit 0 and clears it. Where this fails, the
    // kernel no longer does; the rule costs nothing and stays.
    let pair = Pair::new(1);
    let va = index_of(&pair.a, "va");
    let memory = Umem::new(1 << 20, HugePages::Off).expect("memory");
    let (xsk, mut rings) = open(&pair.a, &config(memory.mapping(), va, 0));
    memory.copy_to(4097, &packet(1));
    memory.copy_to(8192, &packet(1));
    for (offset, address) in [(0, 4097), (1, 8192)] {
        rings.tx.write(offset, Descriptor::new(address, PACKET_LEN));
    }
    rings.tx.submit(2);
    let deadline = Instant::now() + Duration::from_secs(5);
    while rings.completion.available(2) < 2 {
        xsk.wake_tx().expect("wake-up");
        assert!(Instant::now() < deadline);
    }
    assert_eq!(rings.completion.read(1), 8192);
    let odd = rings.completion.read(0);
    println!("the completion of TX address 4097 says {odd}");
    assert!(odd == 4096 || odd == 4097);
}

#[test]
fn missing_privileges_are_named() {
    if !bed::root() {
        return;
    }
    const CAP_NET_RAW: u32 = 13;
    const CAP_IPC_LOCK: u32 = 14;
    let pair = Pair::new(1);
    let va = index_of(&pair.a, "va");
    let memory = Umem::new(1 << 20, HugePages::Off).expect("memory");
    let mapping = memory.mapping();
    let open_without = |capability| {
        pair.a.run(|| {
            bed::drop_capability(capability);
            Xsk::open(&config(mapping, va, 0)).map(|_| ())
        })
    };
    let error = open_without(CAP_NET_RAW).expect_err("no privilege");
    assert!(matches!(error, XskError::Privilege) && error.to_string().contains("CAP_NET_RAW"));
    // The limit holds for the whole test program, but only threads without CAP_IPC_LOCK feel it.
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the limit is a live local.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit), 0);
        limit.rlim_cur = 65536.min(limit.rlim_max);
        assert_eq!(
            libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit),
            0,
            "{}",
            std::io::Error::last_os_error()
        );
    }
    let error = open_without(CAP_IPC_LOCK).expect_err("too much to pin");
    assert!(
        matches!(error, XskError::LockedMemory { len } if len == 1 << 20),
        "{error}"
    );
}
