//! What the kernel counts when it loses a packet on a socket's behalf, to the packet.

use lm_dataplane::ring::Descriptor;
use lm_dataplane::xsk::{MIN_FRAME_CAPACITY, XdpStatistics};

use crate::host::{Bed, FRAMES, Layout, losses};
use crate::programs::Kind;
use crate::traffic::{Item, JUMBO, PACKETS, SHORT, Wanted, run, stream};

in_both_modes!(rx_dropped, tx_invalid, rx_full, fill_empty);

/// Every second packet is longer than a frame holds.
fn rx_dropped(bed: &Bed) {
    let layout = Layout::default().headroom_len(4096 - 256 - MIN_FRAME_CAPACITY);
    let (mut sender, mut receiver, _program) = bed.one_way(layout, Kind::Redirect);
    receiver.post_all();
    let item = |number: u32| {
        Item::packet(
            number,
            if number.is_multiple_of(2) {
                SHORT
            } else {
                MIN_FRAME_CAPACITY + 1
            },
        )
    };
    let wanted = (0..PACKETS).step_by(2).map(|number| Wanted::whole(number, SHORT));
    let traffic = ((0..PACKETS).map(item).collect(), wanted.collect());
    run(&mut sender, &mut receiver, traffic);
    let expected = XdpStatistics {
        rx_dropped: u64::from(PACKETS / 2),
        ..XdpStatistics::default()
    };
    assert_eq!(losses(&receiver.xsk), expected);
}

/// Every second descriptor is longer than a frame.
fn tx_invalid(bed: &Bed) {
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default(), Kind::Redirect);
    receiver.post_all();
    let spare = Layout::default().sender().spare_frame();
    let item = |number: u32| match number % 2 {
        0 => Item::packet(number, SHORT),
        _ => Item::Refused(Descriptor::new(spare, JUMBO + 1)),
    };
    let wanted = (0..PACKETS).step_by(2).map(|number| Wanted::whole(number, SHORT));
    let traffic = ((0..PACKETS).map(item).collect(), wanted.collect());
    run(&mut sender, &mut receiver, traffic);
    let expected = XdpStatistics {
        tx_invalid_descriptors: u64::from(PACKETS / 2),
        ..XdpStatistics::default()
    };
    assert_eq!(losses(&sender.xsk), expected);
    let completed = sender.outgoing.borrow().refused_completed;
    assert!(
        [0, PACKETS / 2].contains(&completed),
        "all or, in older kernels, none"
    );
}

/// Half as many packets again as the socket takes: the first arrive, the others are lost.
fn half_too_many(bed: &Bed, layout: Layout, refill: bool, expected: XdpStatistics) {
    let (mut sender, mut receiver, _program) = bed.one_way(layout, Kind::Redirect);
    receiver.post_all();
    (receiver.refill, receiver.release) = (refill, !refill);
    let (items, mut wanted) = stream(FRAMES + FRAMES / 2, SHORT);
    wanted.truncate(FRAMES as usize);
    run(&mut sender, &mut receiver, (items, wanted));
    assert_eq!(losses(&receiver.xsk), expected);
}

/// Nobody gives RX entries back.
fn rx_full(bed: &Bed) {
    let layout = Layout {
        rx_ring_len: FRAMES,
        ..Layout::default()
    };
    let expected = XdpStatistics {
        rx_ring_full: u64::from(FRAMES / 2),
        ..XdpStatistics::default()
    };
    half_too_many(bed, layout, true, expected);
}

/// Nobody posts frames again; such a packet counts in two places.
fn fill_empty(bed: &Bed) {
    let expected = XdpStatistics {
        rx_dropped: u64::from(FRAMES / 2),
        rx_fill_ring_empty: u64::from(FRAMES / 2),
        ..XdpStatistics::default()
    };
    half_too_many(bed, Layout::default(), false, expected);
}
