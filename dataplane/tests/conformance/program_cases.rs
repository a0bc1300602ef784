//! Programs that choose among packets and sockets, that write metadata, and that change a packet's length.

use std::os::fd::AsFd;

use lm_dataplane::xsk::SharedRings;

use crate::host::{Bed, Layout, RING_LEN};
use crate::programs::Kind;
use crate::traffic::{Item, JUMBO, PACKETS, Receiver, SHORT, Sender, Wanted, exchange, run, stream};

in_both_modes!(
    program_cleanup,
    drop_half,
    shared_umem,
    metadata,
    metadata_multi_buffer,
    tail_shrinks,
    tail_grows,
    tail_shrinks_multi_buffer,
    tail_grows_multi_buffer,
);

/// Packets of the cases that change lengths.
const FEW: u32 = 64;

/// A second sender and a second receiver on the same queues and memory.
fn share(sender: &Sender, receiver: &Receiver) -> (Sender, Receiver) {
    let open = |xsk: &lm_dataplane::xsk::Xsk| xsk.share(RING_LEN, RING_LEN).expect("a socket that shares");
    let (sending, SharedRings { tx, .. }) = open(&sender.xsk);
    let (receiving, SharedRings { rx, .. }) = open(&receiver.xsk);
    (sender.share(sending, tx, 1), receiver.share(receiving, rx, 1))
}

/// The place in the map goes from one socket to another; the program stays.
fn program_cleanup(bed: &Bed) {
    let (mut sender, mut receiver, program) = bed.one_way(Layout::default(), Kind::Redirect);
    let (mut other_sender, mut other_receiver) = share(&sender, &receiver);
    receiver.post_all();
    run(&mut sender, &mut receiver, stream(PACKETS, SHORT));
    program.register(0, &other_receiver.xsk.as_fd());
    run(&mut other_sender, &mut other_receiver, stream(PACKETS, SHORT));
    receiver.assert_drained();
}

fn drop_half(bed: &Bed) {
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default(), Kind::DropEveryOther);
    receiver.post_all();
    let (items, mut wanted) = stream(PACKETS, SHORT);
    wanted.retain(|wanted| wanted.number % 2 == 0);
    run(&mut sender, &mut receiver, (items, wanted));
}

/// Two sockets on each side share queue, memory, fill and completion ring.
fn shared_umem(bed: &Bed) {
    let (mut sender, mut receiver, program) = bed.one_way(Layout::default(), Kind::ByDestination);
    let (mut other_sender, mut other_receiver) = share(&sender, &receiver);
    program.register(1, &other_receiver.xsk.as_fd());
    receiver.post_all();
    let (items, wanted) = stream(PACKETS, SHORT);
    let number = |item: &Item| match item {
        Item::Packet { number, .. } => *number,
        Item::Refused(_) => unreachable!("a stream of packets"),
    };
    let (even, odd) = items.into_iter().partition(|item| number(item) % 2 == 0);
    sender.send(even);
    other_sender.send(odd);
    let (even, odd) = wanted.into_iter().partition(|wanted| wanted.number % 2 == 0);
    receiver.want(even);
    other_receiver.want(odd);
    exchange(&mut [
        &mut sender,
        &mut receiver,
        &mut other_sender,
        &mut other_receiver,
    ]);
    receiver.assert_drained();
    other_receiver.assert_drained();
}

/// What the program writes before a packet arrives before it.
fn metadata(bed: &Bed) {
    let (mut sender, mut receiver, program) = bed.one_way(Layout::default(), Kind::Metadata);
    receiver.post_all();
    receiver.metadata = true;
    run(&mut sender, &mut receiver, stream(PACKETS, SHORT));
    assert_eq!(program.cell(), i64::from(PACKETS));
}

/// The same before packets of three frames.
fn metadata_multi_buffer(bed: &Bed) {
    bed.jumbo();
    let (mut sender, mut receiver, _program) = bed.one_way(Layout::default().multi_buffer(), Kind::Metadata);
    receiver.post_all();
    receiver.metadata = true;
    let items = (0..PACKETS).map(|number| Item::cut(number, JUMBO, 4096));
    let wanted = (0..PACKETS).map(|number| Wanted::whole(number, JUMBO));
    run(&mut sender, &mut receiver, (items.collect(), wanted.collect()));
}

/// Sends packets of `sent_len` bytes through a program that adds `bytes`, and expects the program to be told `answer`.
fn tail(bed: &Bed, layout: Layout, sent_len: u32, bytes: i32, answer: i32) {
    let (mut sender, mut receiver, program) = bed.one_way(layout, Kind::AdjustTail(bytes));
    receiver.post_all();
    let len = match answer {
        0 => sent_len.wrapping_add_signed(bytes),
        _ => sent_len,
    };
    let items = (0..FEW).map(|number| Item::cut(number, sent_len, 4096));
    let wanted = (0..FEW).map(|number| Wanted { number, sent_len, len });
    run(&mut sender, &mut receiver, (items.collect(), wanted.collect()));
    assert_eq!(program.cell(), i64::from(answer));
}

fn tail_shrinks(bed: &Bed) {
    tail(bed, Layout::default(), 2 * SHORT, -4, 0);
}

/// The bytes added are zero.
fn tail_grows(bed: &Bed) {
    tail(bed, Layout::default(), 2 * SHORT, 4, 0);
}

fn tail_shrinks_multi_buffer(bed: &Bed) {
    bed.jumbo();
    tail(bed, Layout::default().multi_buffer(), 6144, -4096, 0);
}

/// The kernel refuses: veth states no length of its fragments (`bpf_xdp_frags_increase_tail` of `net/core/filter.c` asks
/// for `rxq->frag_size`). The packets arrive as they are.
fn tail_grows_multi_buffer(bed: &Bed) {
    bed.jumbo();
    tail(bed, Layout::default().multi_buffer(), 6144, 2047, -libc::EOPNOTSUPP);
}
