//! Messages between two ports.

use lm_dataplane::{Delivery, EffectiveMode};

use crate::bed::{A, B, Wire, carry};

/// Lengths in one packet and in many, around their ends, and beyond the landing memory that is there at first.
const LENS: [usize; 10] = [1, 1439, 1440, 1441, 1448, 2896, 2897, 100_000, 1 << 20, 8 << 20];

#[test]
fn messages_cross_both_ways_on_all_rings() {
    let ways = [
        Delivery::Reliable,
        Delivery::Unreliable,
        Delivery::Partial,
        Delivery::Reliable,
    ];
    for (delivery, (ring, packed)) in ways.into_iter().zip([(128, 0), (128, 1), (256, 0), (256, 1)]) {
        let wire = Wire::new();
        let mut ends = wire.ends(&format!("queue_size={ring},packed_vq={packed}"));
        assert_eq!(ends[0].status().mode(), EffectiveMode::CopyPort);
        for to in [B, A] {
            let before = ends[1].counters().user_copied_bytes;
            let [sent, received] = carry(&mut ends, to, delivery, &LENS);
            // Each packet once, and nothing by the sockets.
            let bytes = LENS.iter().sum::<usize>() as u64;
            assert!(received.user_copied_bytes - before >= bytes, "{received:?}");
            assert_eq!(
                (received.fragments_one_copy, received.fragments_requested),
                (0, 0),
                "{received:?}"
            );
            assert_eq!((received.violations.total(), sent.messages_failed), (0, 0));
            ends.swap(0, 1);
        }
    }
}
