//! A port that says what is not so, outside the landing queue (that: `violations`): told once, counted, and nothing is lost.

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, noise};
use crate::bounds::{GENERAL_FRAMES, TRANSMIT_FRAMES};
use crate::ring::Descriptor;

/// Messages of both kinds pass, and all memory comes back.
fn expect_use(bed: &mut Bed) {
    let peer = bed.session(0, WireMode::Lm, 50_000);
    for seed in 0..20 {
        bed.exchange(0, peer, &noise(seed, 64));
        bed.exchange(0, peer, &noise(seed, 50_000));
    }
    bed.check_memory();
}

#[test]
fn descriptors_of_other_memory_than_was_posted() {
    let mut bed = Bed::new(&BedConfig::default());
    expect_use(&mut bed);
    let umem_len = bed.hosts[1].memory.umem().len();
    let frame_len = 2048;
    let behind_frames = u64::from(GENERAL_FRAMES) * frame_len;
    let untrue = [
        // Outside the memory, and as far as an address goes.
        Descriptor::received(umem_len, 256, 100),
        Descriptor::received(u64::MAX >> 16, 256, 100),
        // Landing memory, and transmit frames.
        Descriptor::received(umem_len / 2, 256, 100),
        Descriptor::received(behind_frames, 256, 100),
        // Frames that are free: the last ones, since those used last are posted first.
        Descriptor::received(behind_frames - frame_len, 256, 100),
        // More than its frame, of one that is posted.
        Descriptor::received(0, 256, 2048 - 255),
        Descriptor::received(0, 256, u32::MAX),
    ];
    for (at, descriptor) in untrue.into_iter().enumerate() {
        bed.wire.push_descriptor(1, 0, descriptor);
        bed.rounds(3);
        let drops = bed.hosts[1].counters.drops;
        assert_eq!(drops.foreign_frame, at as u64 + 1, "{descriptor:?}");
    }
    assert_eq!(bed.hosts[1].notices.lines, 1);
    assert!(bed.hosts[1].take_message().expect("no failure").is_none());
    expect_use(&mut bed);
}

/// The frame of a packet is posted again at once; its second descriptor would be of the next packet's.
#[test]
fn a_descriptor_twice_is_of_no_frame() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 50_000);
    bed.exchange(0, peer, &noise(1, 64));
    bed.send(0, peer, &noise(2, 64), 2);
    let descriptor = loop {
        bed.alone(0, 1);
        let (rx, _) = bed.hosts[1].small.receiver().expect("a general queue");
        if crate::port::RxQueue::available(rx, 1) > 0 {
            break crate::port::RxQueue::packet(rx, 0);
        }
    };
    bed.wire.push_descriptor(1, 0, descriptor);
    let message = bed.recv(1);
    assert!(message[..] == noise(2, 64)[..]);
    assert_eq!(bed.hosts[1].counters.drops.foreign_frame, 1);
    drop(message);
    bed.completion(0);
    expect_use(&mut bed);
}

#[test]
fn completions_of_what_was_not_sent() {
    let mut bed = Bed::new(&BedConfig::default());
    expect_use(&mut bed);
    let umem_len = bed.hosts[0].memory.umem().len();
    let arena = bed.hosts[0].sending.arena().start();
    // The last transmit frame, which nothing uses: of a packet that is under way a completion cannot be told from its own.
    let small = u64::from(GENERAL_FRAMES + TRANSMIT_FRAMES - 1) * 2048;
    let mut count = 0;
    for queue in [0, 1] {
        for address in [umem_len, u64::MAX, 0, small, small + 2, arena + (1 << 20)] {
            // Looked at when something is under way.
            bed.wire.push_completion(0, queue, address);
            let peer = bed.session(0, WireMode::Lm, 50_000);
            bed.exchange(0, peer, &noise(count, 50_000));
            bed.exchange(0, peer, &noise(count, 64));
            bed.check_memory();
            count += 1;
            assert_eq!(
                bed.hosts[0].counters.drops.foreign_completion, count,
                "{address} of queue {queue}"
            );
        }
    }
    assert_eq!(bed.hosts[0].notices.lines, 1);
    expect_use(&mut bed);
}
