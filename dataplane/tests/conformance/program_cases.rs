//! Programs that choose among packets and sockets, that write metadata, and that change a packet's length.

use std::os::fd::AsFd;

use crate::host::{Bed, Layout};
use crate::programs::Kind;
use crate::traffic::{Item, JUMBO, PACKETS, SHORT, Wanted, exchange, run, stream};

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

/// The place in the map goes from one socket to another; the program stays.
fn program_cleanup(bed: &Bed) {
    let (mut sender, mut receiver, program) = bed.one_way(Layout::default(), Kind::Redirect);
    let (mut other_sender, mut other_receiver) = bed.share(&sender, &receiver);
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
    let (mut other_sender, mut other_receiver) = bed.share(&sender, &receiver);
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
    exchange(&mut [&mut sender, &mut receiver, &mut other_sender, &mut other_receiver]);
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

/// Sends packets of `sent_len` bytes through a program that adds `bytes` where the kernel lets it; how many packets stayed
/// as they were, and what the kernel answered then.
fn tail(bed: &Bed, layout: Layout, sent_len: u32, bytes: i32) -> (u32, i64) {
    let (mut sender, mut receiver, program) = bed.one_way(layout, Kind::AdjustTail(bytes));
    receiver.post_all();
    let wanted = |number| Wanted {
        number,
        sent_len,
        len: sent_len.wrapping_add_signed(bytes),
        may_stay: true,
    };
    let items = (0..FEW).map(|number| Item::cut(number, sent_len, 4096));
    let traffic = (items.collect(), (0..FEW).map(wanted).collect());
    run(&mut sender, &mut receiver, traffic);
    (receiver.stayed, program.cell())
}

fn tail_shrinks(bed: &Bed) {
    assert_eq!(tail(bed, Layout::default(), 2 * SHORT, -4), (0, 0));
}

/// The bytes added are zero. There is room for them up to the cache line's end: veth and generic mode copy a packet into
/// exactly as much (`skb_pp_cow_data`), so one that fills its last line grows only where its page happens to end.
fn tail_grows(bed: &Bed) {
    assert_eq!(tail(bed, Layout::default(), 2 * SHORT - 4, 4), (0, 0));
    let (stayed, answer) = tail(bed, Layout::default(), 2 * SHORT, 4);
    let refusal = if stayed == 0 { 0 } else { -i64::from(libc::EINVAL) };
    assert_eq!(answer, refusal, "{stayed} stayed");
}

fn tail_shrinks_multi_buffer(bed: &Bed) {
    bed.jumbo();
    let layout = Layout::default().multi_buffer();
    assert_eq!(tail(bed, layout, 6144, -4096), (0, 0));
}

/// The kernel refuses where a device states no length for its fragments (`bpf_xdp_frags_increase_tail`): veth does not.
fn tail_grows_multi_buffer(bed: &Bed) {
    bed.jumbo();
    let refused = tail(bed, Layout::default().multi_buffer(), 6144, 2047);
    assert_eq!(refused, (FEW, -i64::from(libc::EOPNOTSUPP)));
}
