//! Memory that changes between two reads: as long as an entry is posted, the kernel or the device writes where that entry lets it (I1),
//! over bytes that were received and digested already, too. No byte of that is shown.
#![cfg(test)]

use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};

use super::bed::{Bed, BedConfig, ROUND_NS, noise, wire_of};
use super::times;
use super::transfer::Dice;
use crate::completion::PeerId;
use crate::message::Message;
use crate::simnic::{Delivery, Semantics, ZeroCopy};

/// Two windows, so that a tail is saved and restored (I5).
const WINDOW: u32 = 4;
const FRAGMENTS: usize = 7;
/// Short packets, many of which lie within one chunk, and with no byte to spare: all that a device of this MTU may write is a fragment's.
const MTU: u16 = 580;
/// The landing queue.
const QUEUE: u32 = 1;

/// Shows each packet before the next one comes.
fn device(prefix_len: u32) -> Semantics {
    Semantics::ZeroCopy(ZeroCopy {
        prefix_len,
        burst: 1,
        ..ZeroCopy::default()
    })
}

/// When the second of two messages is sent, at the latest when the first one has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Second {
    AtOnce,
    /// Its packets use the entries that a loss has left of the first one, which is whole by then.
    WhenResent,
    Last,
}

/// Sends two messages, a packet between two rounds. Before and after each round of the receiver `rewrite` has its turn.
fn exchange(
    bed: &mut Bed,
    peer: PeerId,
    payloads: &[Vec<u8>; 2],
    second: Second,
    mut rewrite: impl FnMut(&Bed),
) -> Vec<Message> {
    let resent = bed.hosts[0].counters.fragments_resent;
    let mut unsent = payloads.iter().peekable();
    let mut messages = Vec::new();
    for _ in 0..100_000 {
        let is_due = unsent.len() == 2
            || messages.len() == 1
            || match second {
                Second::AtOnce => true,
                Second::WhenResent => bed.hosts[0].counters.fragments_resent > resent,
                Second::Last => false,
            };
        if let Some(payload) = unsent.next_if(|_| is_due) {
            bed.try_send(0, peer, payload, 1).expect("room for two");
        }
        bed.now_ns += ROUND_NS;
        bed.wire.advance(bed.now_ns);
        bed.poll(0);
        bed.wire.step();
        rewrite(bed);
        bed.poll(1);
        messages.extend(bed.hosts[1].take_message().expect("reliable"));
        if messages.len() == 2 {
            return messages;
        }
        rewrite(bed);
    }
    panic!("{} messages", messages.len());
}

/// Each byte of a message in turn is written anew, rightly or wrongly, whenever some posted entry lets the device write there. Of some
/// messages one packet is lost. Gives how often a byte was wrong, and how many fragments were found to be changed.
fn each_byte_rewritten(semantics: Semantics, loses: bool, seed: u64) -> (u64, u64) {
    let mut bed = Bed::new(&BedConfig {
        mtu: MTU,
        window: WINDOW,
        guarded: false,
        wire: wire_of(semantics),
        ..BedConfig::default()
    });
    let layout = Layout::new(WireMode::Lm, MTU, LinkShape::IPV4).expect("an MTU");
    assert_eq!(layout.max_frame_len(), MTU + 14);
    let len = FRAGMENTS * usize::from(layout.payload_len());
    let peer = bed.session(0, WireMode::Lm, len as u64);
    bed.wire.set_delivery(Delivery::Manual);
    let first = exchange(
        &mut bed,
        peer,
        &[0, 1].map(|_| noise(seed, len)),
        Second::Last,
        |_| (),
    );
    let place = first[0].umem_offset();
    drop(first);
    let mut dice = Dice(seed);
    let (mut wrong, mut in_place) = (0, 0);
    for at in 0..len {
        let payloads = [0, 1].map(|number| noise(seed ^ (at as u64) << 8 ^ number, len));
        let payload = &payloads[0];
        bed.hosts[0].told.completions().clear();
        let second = [Second::AtOnce, Second::WhenResent, Second::Last][dice.roll(3) as usize];
        let mut lost_at = if loses {
            1 + dice.roll(4 * FRAGMENTS as u64)
        } else {
            u64::MAX
        };
        let messages = exchange(&mut bed, peer, &payloads, second, |bed| {
            lost_at = lost_at.wrapping_sub(1);
            bed.wire.drop_next(0, u32::from(lost_at == 0));
            let change = match dice.roll(3) {
                0 => return,
                1 => 0,
                _ => 1 + dice.roll(255) as u8,
            };
            let may = bed
                .wire
                .rewrite(1, QUEUE, place + at as u64, payload[at] ^ change);
            wrong += u64::from(may && change != 0);
        });
        for (message, payload) in messages.iter().zip(&payloads) {
            in_place += u64::from(message.umem_offset() == place);
            let differs = (0..len).find(|&other| message[other] != payload[other]);
            assert_eq!(
                differs, None,
                "seed {seed:#x}: byte {at} was rewritten, and byte {differs:?} is wrong"
            );
        }
    }
    let counters = &bed.hosts[1].counters;
    assert_eq!(counters.violations.total(), 0);
    assert_eq!(bed.hosts[0].counters.messages_failed, 0);
    assert!(
        in_place > len as u64 / 4,
        "{in_place} of {len} lay where it was rewritten"
    );
    (wrong, counters.drops.fragment_corrupt)
}

/// A device may write to a chunk's end until it shows the packet: over fragments that were received before.
#[test]
fn what_a_device_rewrites_between_two_reads_is_not_shown() {
    for (prefix_len, seed) in [(0, 0x5eed), (12, 0x0dd5)] {
        let (wrong, found) = each_byte_rewritten(device(prefix_len), false, seed);
        // Later packets are written over most of it.
        assert!(found > 100 && wrong > found, "{found} of {wrong}");
    }
}

/// Behind a lost packet each lies in another's slot, and is read to be moved before its place is final, or copied out.
#[test]
fn what_a_device_rewrites_behind_a_loss_is_not_shown() {
    for seed in 0..times(1, 10) {
        let (wrong, found) = each_byte_rewritten(device(12), true, 0x5eed + seed);
        assert!(found > 100 && wrong > found, "{found} of {wrong}");
    }
}

/// In copy mode an entry lets the kernel write a packet: headers, over what was received only at saved tails, and its own payload.
#[test]
fn what_the_kernel_may_rewrite_is_not_read_before() {
    let (wrong, found) = each_byte_rewritten(Semantics::Copy, false, 0x5eed);
    assert!(wrong > 100, "{wrong}");
    assert_eq!(found, 0, "of {wrong}");
}
