//! poll(2) on a socket: it sends, it waits, and it does not report what is not there.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::bed::while_waiting;
use crate::host::{Bed, End, Layout, RING_LEN};
use crate::programs::Kind;
use crate::traffic::{Drive, PACKETS, SHORT, exchange, poll_for, run, stream};

in_both_modes!(poll_rx, poll_tx, poll_rx_times_out, poll_tx_times_out);

/// Long enough that nothing but a missing event explains the end of it, short enough to wait for.
const NOTHING_MS: i64 = 100;

fn poll_rx(bed: &Bed) {
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default(), Kind::Redirect);
    receiver.post_all();
    receiver.drive = Drive::Poll;
    run(&mut sender, &mut receiver, stream(PACKETS, SHORT));

    // Somebody who already waits is woken.
    let (items, wanted) = stream(1, SHORT);
    sender.send(items);
    receiver.want(wanted);
    let xsk = receiver.xsk.as_fd();
    let woken = while_waiting(
        move || poll_for(&xsk, PollFlags::IN, 20_000),
        || exchange(&mut [&mut sender]),
    );
    assert!(woken);
    exchange(&mut [&mut receiver]);
}

fn poll_tx(bed: &Bed) {
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default(), Kind::Redirect);
    receiver.post_all();
    sender.drive = Drive::Poll;
    run(&mut sender, &mut receiver, stream(PACKETS, SHORT));
}

/// Nobody sends.
fn poll_rx_times_out(bed: &Bed) {
    let (_, mut receiver) = bed.open(End::B, Layout::default()).split();
    let program = bed.attach(End::B, Kind::Redirect);
    program.register(0, &receiver.xsk.as_fd());
    receiver.post_all();
    let start = Instant::now();
    assert!(!poll_for(&receiver.xsk.as_fd(), PollFlags::IN, NOTHING_MS));
    assert!(start.elapsed() >= Duration::from_millis(NOTHING_MS as u64));
    receiver.assert_drained();
}

/// Nobody takes completions, so the completion ring fills, then the TX ring, and poll(2) reports no room; when the
/// completions are taken, it does again.
fn poll_tx_times_out(bed: &Bed) {
    let layout = Layout {
        tx_frames: 2 * PACKETS,
        ..Layout::default().chunk_len(2048)
    };
    let (mut sender, _) = bed.open(End::A, layout).split();
    sender.drive = Drive::Poll;
    sender.send(stream(2 * PACKETS, 2048).0);
    let deadline = Instant::now() + Duration::from_secs(20);
    while poll_for(&sender.xsk.as_fd(), PollFlags::OUT, NOTHING_MS) {
        sender.post();
        assert!(Instant::now() < deadline, "the rings do not fill");
    }
    while sender.outgoing.borrow_mut().completed(2 * RING_LEN) < RING_LEN {
        assert!(Instant::now() < deadline, "the completion ring is not full");
    }
    assert!(sender.waiting() > RING_LEN / 2, "more than half of the TX ring");
    assert!(!poll_for(&sender.xsk.as_fd(), PollFlags::OUT, NOTHING_MS));
    exchange(&mut [&mut sender]);
}
