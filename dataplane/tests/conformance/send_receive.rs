//! Packets from one socket to the other, in every layout of rings and frames that fits a packet into one frame.

use std::os::fd::AsFd;

use crate::host::{Bed, End, Layout, losses};
use crate::programs::Kind;
use crate::traffic::{Item, PACKETS, SHORT, Wanted, exchange, run, stream};
use lm_cards::ethtool::{Ethtool, EthtoolError};
use lm_dataplane::xsk::XdpStatistics;

in_both_modes!(
    send_receive,
    frames_of_2_kib,
    single_packet,
    umem_headroom,
    bidirectional,
    unaligned,
    shortest_rings,
    longest_rings,
    tx_queue_consumer,
    teardown,
);

fn stream_through(bed: &Bed, layout: Layout) {
    let (mut sender, mut receiver, _program) = bed.one_way(layout, Kind::Redirect);
    receiver.post_all();
    run(&mut sender, &mut receiver, stream(PACKETS, SHORT));
    for xsk in [&sender.xsk, &receiver.xsk] {
        assert_eq!(losses(xsk), XdpStatistics::default());
    }
}

fn send_receive(bed: &Bed) {
    stream_through(bed, Layout::default());
}

fn frames_of_2_kib(bed: &Bed) {
    stream_through(bed, Layout::default().chunk_len(2048));
}

fn single_packet(bed: &Bed) {
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default(), Kind::Redirect);
    receiver.post_all();
    run(&mut sender, &mut receiver, stream(1, SHORT));
}

/// The headroom lies between the kernel's own and the packet; the receiver checks where packets start.
fn umem_headroom(bed: &Bed) {
    stream_through(bed, Layout::default().headroom_len(128));
    stream_through(bed, Layout::default().headroom_len(128).unaligned());
}

/// Both directions at once.
fn bidirectional(bed: &Bed) {
    let mut ends = [End::A, End::B].map(|end| {
        let (sender, receiver) = bed.open(end, Layout::default()).split();
        let program = bed.attach(end, Kind::Redirect);
        program.register(0, &receiver.xsk.as_fd());
        receiver.post_all();
        (sender, receiver, program)
    });
    for (sender, receiver, _) in &mut ends {
        let (items, wanted) = stream(PACKETS, SHORT);
        sender.send(items);
        receiver.want(wanted);
    }
    let [(sender_a, receiver_a, _), (sender_b, receiver_b, _)] = &mut ends;
    exchange(&mut [sender_a, receiver_b, sender_b, receiver_a]);
    receiver_a.assert_drained();
    receiver_b.assert_drained();
}

/// Half of the packets straddle a page, where they are sent from and where they arrive.
fn unaligned(bed: &Bed) {
    const BEFORE: u64 = SHORT as u64 / 2;
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default().unaligned(), Kind::Redirect);
    let frames = 0..u64::from(receiver.layout.rx_frames);
    let frames: Vec<u64> = frames.map(|frame| frame * 4096 - frame % 2 * BEFORE).collect();
    receiver.post(&frames);
    let sent_from = Layout::default().sent_from();
    let item = |number: u32| Item::at(number, -i64::from(number % sent_from % 2) * BEFORE as i64, SHORT);
    let wanted = (0..PACKETS).map(|number| Wanted::whole(number, SHORT)).collect();
    run(
        &mut sender,
        &mut receiver,
        ((0..PACKETS).map(item).collect(), wanted),
    );
}

/// The kernel's case also sets the device's rings, which veth has no operation for.
fn assert_no_hardware_rings(bed: &Bed) {
    let (namespace, device) = bed.namespace(End::A);
    let rings = namespace.run(|| Ethtool::named(device).expect("a socket").rx_ring_len());
    assert!(
        matches!(rings, Err(EthtoolError::Unsupported { .. })),
        "{rings:?}"
    );
}

/// Rings of 64 entries, one packet at a time, then all but one entry at once.
fn shortest_rings(bed: &Bed) {
    assert_no_hardware_rings(bed);
    let layout = Layout {
        rx_frames: 64,
        tx_frames: 64,
        ring_len: 64,
        rx_ring_len: 64,
        ..Layout::default()
    };
    let (mut sender, mut receiver, _program) = bed.one_way(layout, Kind::Redirect);
    receiver.post_all();
    for batch in [1, 63] {
        (sender.batch, receiver.batch) = (batch, batch);
        run(&mut sender, &mut receiver, stream(PACKETS, SHORT));
    }
    assert_eq!(losses(&receiver.xsk), XdpStatistics::default());
}

/// Rings of 8192 entries: batches of 2048, then nearly a whole ring at once.
fn longest_rings(bed: &Bed) {
    const LEN: u32 = 8192;
    assert_no_hardware_rings(bed);
    let layout = Layout {
        rx_frames: LEN,
        tx_frames: LEN,
        ring_len: LEN,
        rx_ring_len: LEN,
        ..Layout::default()
    };
    let (mut sender, mut receiver, _program) = bed.one_way(layout, Kind::Redirect);
    receiver.post_all();
    for (batch, count) in [(2048, PACKETS), (LEN - 8, LEN)] {
        (sender.batch, receiver.batch) = (batch, batch);
        run(&mut sender, &mut receiver, stream(count, SHORT));
    }
    assert_eq!(losses(&receiver.xsk), XdpStatistics::default());
}

/// One wake-up takes 32 descriptors and shows at once that it did (`__xsk_generic_xmit`).
fn tx_queue_consumer(bed: &Bed) {
    const BUDGET: u32 = 32;
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default(), Kind::Redirect);
    receiver.post_all();
    let (items, wanted) = stream(BUDGET + 1, SHORT);
    sender.send(items);
    receiver.want(wanted);
    assert_eq!(sender.post(), BUDGET + 1);
    sender.xsk.wake_tx().expect("wake-up");
    assert_eq!(sender.tx.consumed(), BUDGET);
    sender.xsk.wake_tx().expect("wake-up");
    assert_eq!(sender.tx.consumed(), BUDGET + 1);
    exchange(&mut [&mut sender, &mut receiver]);
}

/// Sockets come and go on the same queues.
fn teardown(bed: &Bed) {
    for _ in 0..10 {
        stream_through(bed, Layout::default());
    }
}
