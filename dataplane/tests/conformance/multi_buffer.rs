//! Packets of several frames.

use lm_dataplane::xsk::XdpStatistics;

use crate::host::{Bed, Layout, losses};
use crate::programs::Kind;
use crate::traffic::{Item, JUMBO, PACKETS, Wanted, packet, run};

in_both_modes!(jumbo, jumbo_unaligned, jumbo_contiguous);

fn jumbo_packets(count: u32) -> (Vec<Item>, Vec<Wanted>) {
    (
        (0..count).map(|number| Item::cut(number, JUMBO, 4096)).collect(),
        (0..count).map(|number| Wanted::whole(number, JUMBO)).collect(),
    )
}

fn through(bed: &Bed, layout: Layout) {
    bed.jumbo();
    let (mut sender, mut receiver, _program) = bed.one_way(layout.multi_buffer(), Kind::Redirect);
    receiver.post_all();
    run(&mut sender, &mut receiver, jumbo_packets(PACKETS));
    for xsk in [&sender.xsk, &receiver.xsk] {
        assert_eq!(losses(xsk), XdpStatistics::default());
    }
}

fn jumbo(bed: &Bed) {
    through(bed, Layout::default());
}

fn jumbo_unaligned(bed: &Bed) {
    through(bed, Layout::default().unaligned());
}

/// No case of the kernel's, but what landing zones for long packets stand on: frames that lie one frame's capacity apart
/// make one contiguous packet of its pieces.
fn jumbo_contiguous(bed: &Bed) {
    const COUNT: u32 = 16;
    bed.jumbo();
    let layout = Layout::default().unaligned().multi_buffer();
    let (mut sender, mut receiver, _program) = bed.one_way(layout, Kind::Redirect);
    let capacity = u64::from(receiver.layout.capacity());
    let pieces = u64::from(JUMBO).div_ceil(capacity);
    let zone = |number: u32| u64::from(number) * 65536;
    let frames = (0..COUNT).flat_map(|number| (0..pieces).map(move |piece| zone(number) + piece * capacity));
    receiver.post(&frames.collect::<Vec<_>>());
    receiver.refill = false;
    run(&mut sender, &mut receiver, jumbo_packets(COUNT));
    for number in 0..COUNT {
        let mut bytes = vec![0; JUMBO as usize];
        receiver.umem.copy_from(zone(number) + 256, &mut bytes);
        assert!(bytes == packet(number, JUMBO, 0), "packet {number}");
    }
}
