//! Descriptors that the kernel must refuse, each alone, and those at the edge that it must take.

use lm_dataplane::ring::Descriptor;
use lm_dataplane::xsk::XdpStatistics;

use crate::host::{Bed, End, Layout, losses};
use crate::programs::Kind;
use crate::traffic::{Item, JUMBO, SHORT, Wanted, exchange, run};

in_both_modes!(
    invalid_aligned,
    invalid_aligned_2_kib,
    invalid_unaligned,
    invalid_unaligned_4001,
    invalid_multi_buffer_aligned,
    invalid_multi_buffer_unaligned,
    too_many_fragments,
);

const TOO_LONG: u32 = JUMBO + 1;

/// Sends the items, expects every packet among them, and every other descriptor to be counted as invalid.
fn refused_and_taken(bed: &Bed, layout: Layout, items: Vec<Item>) {
    let (mut sender, mut receiver, _program) = bed.one_way(layout, Kind::Redirect);
    receiver.post_all();
    let refused = items
        .iter()
        .filter(|item| matches!(item, Item::Refused(_)))
        .count();
    let wanted = items.iter().filter_map(|item| match item {
        Item::Packet { number, .. } => Some(Wanted::whole(*number, item.len())),
        Item::Refused(_) => None,
    });
    let wanted = wanted.collect();
    run(&mut sender, &mut receiver, (items, wanted));
    let expected = XdpStatistics {
        tx_invalid_descriptors: refused as u64,
        ..XdpStatistics::default()
    };
    assert_eq!(losses(&sender.xsk), expected);
    assert_eq!(losses(&receiver.xsk), XdpStatistics::default());
    let completed = sender.outgoing.borrow().refused_completed as usize;
    assert!(
        [0, refused].contains(&completed),
        "all or, in older kernels, none"
    );
}

/// Whether the kernel, having refused a descriptor, also takes the rest of its packet for refused. Older ones begin a new
/// packet right behind it.
fn refuses_the_rest(bed: &Bed) -> bool {
    let layout = Layout::default().multi_buffer();
    let spare = layout.sender().spare_frame();
    let (mut sender, _) = bed.open(End::A, layout.sender()).split();
    let refused = |len| Item::Refused(Descriptor::new(spare, len).continued());
    let rest = Item::Refused(Descriptor::new(spare, SHORT));
    sender.send(vec![refused(SHORT), refused(TOO_LONG), rest]);
    exchange(&mut [&mut sender]);
    match losses(&sender.xsk).tx_invalid_descriptors {
        3 => true,
        2 => false,
        other => panic!("{other} descriptors refused"),
    }
}

fn one_piece(bed: &Bed, layout: Layout) {
    let (chunk_len, umem_len) = (u64::from(layout.chunk_len), layout.sender().umem_len());
    let spare = layout.sender().spare_frame();
    let half = u64::from(SHORT / 2);
    let refused = |addr, len| Item::Refused(Descriptor::new(addr, len));
    let aligned = layout.options.aligned_chunks;
    let straddling = |number, boundary: u64| {
        if aligned && boundary.is_multiple_of(chunk_len) {
            refused(boundary - half, SHORT)
        } else {
            Item::at(number, (boundary - half) as i64, SHORT)
        }
    };
    let items = vec![
        Item::packet(0, SHORT), // at address 0
        Item::packet(1, SHORT),
        refused(-2_i64 as u64, SHORT), // straddles the start
        refused(spare, TOO_LONG),
        Item::at(2, (umem_len - u64::from(SHORT) - 2 * chunk_len) as i64, SHORT), // the third frame: up to the end
        refused(umem_len, SHORT),
        refused(umem_len - half, SHORT), // straddles the end
        straddling(3, 4096),
        straddling(4, 2048),
        Item::packet(5, SHORT),
    ];
    refused_and_taken(bed, layout, items);
}

fn invalid_aligned(bed: &Bed) {
    one_piece(bed, Layout::default());
}

fn invalid_aligned_2_kib(bed: &Bed) {
    one_piece(bed, Layout::default().chunk_len(2048));
}

fn invalid_unaligned(bed: &Bed) {
    one_piece(bed, Layout::default().unaligned());
}

/// The UMEM ends inside a page, so that straddling its end is not straddling a page.
fn invalid_unaligned_4001(bed: &Bed) {
    let layout = Layout::default().unaligned().chunk_len(4001);
    let beyond = layout.sender().umem_len() % 4096;
    assert!((u64::from(SHORT) + 1..4096 - u64::from(SHORT)).contains(&beyond));
    one_piece(bed, layout);
}

fn several_pieces(bed: &Bed, layout: Layout) {
    const LARGE: u32 = 3072;
    const WHOLE: u32 = 4096;
    bed.jumbo();
    let layout = layout.multi_buffer();
    let (umem_len, spare) = (layout.sender().umem_len(), layout.sender().spare_frame());
    let first = |addr, len| Item::Refused(Descriptor::new(addr, len).continued());
    let last = |addr, len| Item::Refused(Descriptor::new(addr, len));
    // What follows a refused descriptor that says that its packet goes on.
    let rest = refuses_the_rest(bed).then(|| last(spare, SHORT));
    let strange = Item::Refused(Descriptor {
        options: 0xffff,
        ..Descriptor::new(spare, LARGE)
    });
    let half = SHORT / 2;
    let mut items = vec![Item::packet(0, SHORT)];
    // An empty piece.
    items.extend([first(spare, LARGE), first(spare, LARGE), last(spare, 0)]);
    // A piece outside the UMEM, one longer than a frame, one with options that do not exist.
    for refused in [first(umem_len, LARGE), first(spare, TOO_LONG), strange] {
        items.extend([first(spare, LARGE), refused]);
        items.extend(rest.clone());
    }
    // Two full frames are sent; three are received, because each gives 256 bytes to the kernel.
    items.push(Item::cut(1, 2 * WHOLE, WHOLE));
    // A short piece across a chunk's end.
    if layout.options.aligned_chunks {
        items.extend([first(spare, LARGE), last(spare - u64::from(half), SHORT)]);
    } else {
        items.push(Item::Packet {
            number: 2,
            pieces: vec![(0, LARGE), (-i64::from(half), SHORT)],
        });
    }
    items.push(Item::packet(3, SHORT));
    refused_and_taken(bed, layout, items);
}

fn invalid_multi_buffer_aligned(bed: &Bed) {
    several_pieces(bed, Layout::default());
}

fn invalid_multi_buffer_unaligned(bed: &Bed) {
    several_pieces(bed, Layout::default().unaligned());
}

/// A packet has at most one piece and `MAX_SKB_FRAGS` more (`xsk_build_skb`).
fn too_many_fragments(bed: &Bed) {
    bed.jumbo();
    let most = std::fs::read_to_string("/proc/sys/net/core/max_skb_frags").expect("a sysctl");
    let most = most.trim().parse::<u32>().expect("a number") + 1;
    let layout = Layout::default().multi_buffer();
    let spare = Descriptor::new(layout.sender().spare_frame(), SHORT);
    let mut items = vec![Item::packet(0, SHORT), Item::cut(1, most * SHORT, SHORT)];
    items.extend((0..most).map(|_| Item::Refused(spare.continued())));
    items.extend(refuses_the_rest(bed).then_some(Item::Refused(spare)));
    items.push(Item::packet(2, SHORT));
    refused_and_taken(bed, layout, items);
}
