//! Transmit order and invariant I5, up to moving real bytes through a landing zone.

mod inputs;

use inputs::{addressing, any_layout};
use lm_protocol::geometry::{Geometry, Layout, LinkShape, Wire};
use lm_protocol::window::{TailRule, WindowError, WindowShape};
use lm_protocol::wire::{DataTemplate, IpFragTemplate};
use lm_protocol::zone::{XDP_PACKET_HEADROOM, ZoneShape};
use proptest::prelude::*;
use std::collections::VecDeque;

/// The order as the definition says it: windows forward, inside a window descending.
fn naive_order(window: u32, count: u32) -> Vec<u32> {
    let mut order = Vec::new();
    let mut start = 0;
    while start < count {
        let end = (start + window).min(count);
        order.extend((start..end).rev());
        start = end;
    }
    order
}

#[test]
fn only_powers_of_two() {
    for fragments in [0, 3, 5, 6, 7, 255, 257, u32::MAX] {
        assert_eq!(WindowShape::new(fragments), Err(WindowError { fragments }));
    }
    for shift in 0..32u8 {
        let windows = WindowShape::new(1 << shift).unwrap();
        assert_eq!((windows.fragments(), windows.shift()), (1 << shift, shift));
    }
    assert_eq!(WindowShape::DEFAULT.fragments(), 256);
    for (count, fragments) in [
        (0, 1),
        (1, 1),
        (5, 8),
        (8, 8),
        (1 << 31, 1 << 31),
        (u32::MAX, 1 << 31),
    ] {
        assert_eq!(WindowShape::whole(count).fragments(), fragments);
    }
}

#[test]
fn every_small_order_is_the_definitions() {
    for shift in 0..6 {
        let windows = WindowShape::new(1 << shift).unwrap();
        for count in 0..150 {
            let order = naive_order(1 << shift, count);
            assert_eq!(windows.transmit_order(count).collect::<Vec<_>>(), order);
            assert_eq!(windows.transmit_order(count).len(), count as usize);
            for (position, &index) in order.iter().enumerate() {
                assert_eq!(windows.index_at(position as u32, count), index);
                assert_eq!(windows.position_of(index, count), position as u32);
                assert_eq!(windows.transmit_order(count).nth(position), Some(index));
                let range = windows.range(windows.window_of(index), count);
                assert!(range.contains(&index));
                assert_eq!(windows.is_lowest(index), index == range.start);
                assert_eq!(windows.is_highest(index, count), index == range.end - 1);
            }
            let windows_len = windows.count_of_windows(count);
            let lens: u32 = (0..windows_len)
                .map(|window| windows.range(window, count).len() as u32)
                .sum();
            assert_eq!(lens, count);
            assert!(windows.range(windows_len, count).is_empty());
        }
    }
}

proptest! {
    #[test]
    fn giant_orders_are_permutations_that_descend_inside_windows(
        shift in 0u32..=31,
        count in 1u32..,
        at in any::<prop::sample::Index>(),
    ) {
        let windows = WindowShape::new(1 << shift).unwrap();
        let position = at.index(count as usize) as u32;
        let index = windows.index_at(position, count);
        prop_assert!(index < count);
        prop_assert_eq!(windows.position_of(index, count), position);
        prop_assert_eq!(windows.window_of(index), windows.window_of(position), "a window's packets stay together");
        if position + 1 < count {
            let next = windows.index_at(position + 1, count);
            if windows.is_lowest(index) {
                prop_assert_eq!(windows.window_of(next), windows.window_of(index) + 1);
                prop_assert!(windows.is_highest(next, count));
            } else {
                prop_assert_eq!(next, index - 1);
            }
        }
        // Behind the end nothing has a meaning, and nothing panics.
        let _ = windows.index_at(u32::MAX, count);
        let _ = windows.index_at(0, 0);
    }
}

#[test]
fn the_tail_rule_takes_events_in_order_and_once() {
    let windows = WindowShape::new(4).unwrap();
    let mut rule = TailRule::new(windows, 12);
    assert!(rule.may_post_lowest(0) && !rule.may_post_lowest(1) && !rule.may_post_lowest(2));
    assert!(!rule.tail_saved(1), "out of turn");
    assert_eq!(
        rule.lowest_arrived(0),
        None,
        "window 0 lies over the front margin"
    );
    assert_eq!(rule.lowest_arrived(1), None, "nothing was saved");
    assert_eq!(rule.tail_to_save(windows, 2, 12), None);
    assert_eq!(rule.tail_to_save(windows, 3, 12), Some(0));
    assert!(rule.tail_saved(0));
    assert!(!rule.tail_saved(0), "twice");
    assert_eq!(rule.tail_to_save(windows, 3, 12), None);
    assert!(rule.is_saved(0) && !rule.is_readable(0));
    assert!(rule.may_post_lowest(1) && !rule.may_post_lowest(2));
    assert!(rule.tail_saved(1));
    assert!(rule.may_post_lowest(2));
    assert!(!rule.tail_saved(2), "the last window's tail stays");
    assert!(rule.is_readable(2));
    assert_ne!(TailRule::slot(0), TailRule::slot(1));
    assert_eq!(rule.lowest_arrived(2), None, "tail 0 comes first");
    assert_eq!(rule.lowest_arrived(1), Some(0));
    assert_eq!(rule.lowest_arrived(1), None, "twice");
    assert!(rule.is_readable(0) && !rule.is_saved(0) && rule.is_saved(1) && !rule.is_finished());
    assert_eq!(rule.lowest_arrived(2), Some(1));
    assert!(rule.is_finished());

    // One window, and no fragments at all: no tails.
    for count in [0, 1, 4] {
        let rule = TailRule::new(windows, count);
        assert!(rule.is_finished() && rule.is_readable(0) && rule.may_post_lowest(0));
        assert_eq!(rule.tail_to_save(windows, 3, 4), None);
    }
}

/// A receiver in copy mode without loss: entries are posted ahead as far as `ring_len` and I5 allow, packets take them in
/// order and are written whole, headers first; whole bursts may be written before the receiver looks.
struct Receiver {
    geometry: Geometry,
    windows: WindowShape,
    zone: ZoneShape,
    memory: Vec<u8>,
    rule: TailRule,
    posted: VecDeque<u32>,
    arrived: VecDeque<u32>,
    next_position: u32,
    saved: [Vec<u8>; 2],
    restores: u32,
}

impl Receiver {
    fn new(geometry: Geometry, windows: WindowShape) -> Receiver {
        let zone = ZoneShape::new(&geometry, 16_384, 0);
        Receiver {
            geometry,
            windows,
            zone,
            memory: vec![0xee; zone.total_len() as usize],
            rule: TailRule::new(windows, geometry.fragment_count()),
            posted: VecDeque::new(),
            arrived: VecDeque::new(),
            next_position: 0,
            saved: [Vec::new(), Vec::new()],
            restores: 0,
        }
    }

    fn post(&mut self, ring_len: usize) {
        let count = self.geometry.fragment_count();
        while self.posted.len() < ring_len && self.next_position < count {
            let index = self.windows.index_at(self.next_position, count);
            if self.windows.is_lowest(index) && !self.rule.may_post_lowest(self.windows.window_of(index)) {
                break;
            }
            self.posted.push_back(index);
            self.next_position += 1;
        }
    }

    fn tail(&self, window: u32) -> std::ops::Range<usize> {
        let end = self.windows.range(window, self.geometry.fragment_count()).end;
        let end = self.zone.message_start() + self.geometry.message_offset(end);
        (end - u64::from(self.geometry.layout().header_len())) as usize..end as usize
    }

    /// The kernel: takes the next entry and writes the packet there.
    fn write(&mut self, packet: &[u8]) {
        let index = self.posted.pop_front().expect("an entry is posted");
        let at = (self.zone.fill_offset(&self.geometry, index) + u64::from(XDP_PACKET_HEADROOM)) as usize;
        self.memory[at..at + packet.len()].copy_from_slice(packet);
        self.arrived.push_back(index);
    }

    /// User space: looks at what arrived.
    fn poll(&mut self) {
        while let Some(index) = self.arrived.pop_front() {
            self.look(index);
        }
    }

    fn look(&mut self, index: u32) {
        let count = self.geometry.fragment_count();
        if let Some(window) = self.rule.tail_to_save(self.windows, index, count) {
            self.saved[TailRule::slot(window)] = self.memory[self.tail(window)].to_vec();
            assert!(self.rule.tail_saved(window));
        }
        if self.windows.is_lowest(index)
            && let Some(window) = self.rule.lowest_arrived(self.windows.window_of(index))
        {
            let tail = self.tail(window);
            assert_ne!(
                self.memory[tail.clone()],
                self.saved[TailRule::slot(window)],
                "the header lies over the tail"
            );
            self.memory[tail].copy_from_slice(&self.saved[TailRule::slot(window)]);
            self.restores += 1;
        }
    }

    fn message(&self) -> &[u8] {
        let start = self.zone.message_start() as usize;
        &self.memory[start..start + self.geometry.message_len() as usize]
    }
}

/// Message bytes that no header contains by accident: the test's MAC and IP addresses have no byte above 0xc8.
fn content(len: u64) -> Vec<u8> {
    (0..len).map(|at| 0xd0 | (at * 7 + at / 253) as u8).collect()
}

/// The sender: payloads into the region, headers into the holes, frames in transmit order.
fn frames(geometry: &Geometry, windows: WindowShape, message: &[u8]) -> Vec<Vec<u8>> {
    let mut address = addressing();
    address.vlan = (geometry.layout().link().vlan_tags == 1).then_some(5);
    let count = geometry.fragment_count();
    let mut region = vec![0; geometry.tx_region_len() as usize];
    for fragment in geometry.fragments() {
        let (from, to) = (
            fragment.message_range(),
            geometry.tx_payload_range(fragment.index),
        );
        region[to.start as usize..to.end as usize]
            .copy_from_slice(&message[from.start as usize..from.end as usize]);
    }
    let data = DataTemplate::new(&address, 1, 2, count, geometry.layout().payload_len());
    let ipfrag = IpFragTemplate::new(&address, geometry, 2, 0);
    windows
        .transmit_order(count)
        .map(|index| {
            let fragment = geometry.fragment(index);
            let at = geometry.tx_frame_offset(index) as usize;
            let header_len = match geometry.layout().wire() {
                Wire::Lm => data.write(&mut region[at..], index, fragment.len),
                Wire::IpFrag => ipfrag
                    .as_ref()
                    .unwrap()
                    .write(&mut region[at..], index, fragment.len),
            };
            assert_eq!(header_len, usize::from(fragment.header_len));
            region[at..at + usize::from(fragment.frame_len())].to_vec()
        })
        .collect()
}

fn wire_layout() -> impl Strategy<Value = Layout> {
    any_layout().prop_map(|layout| {
        // The wire formats are IPv4 with at most one tag.
        let link = LinkShape {
            vlan_tags: layout.link().vlan_tags.min(1),
        };
        Layout::new(layout.wire(), layout.payload_len() + 80, link).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// LM sections 3.1 and 3.2 in one: the message lies contiguous in the zone, for any length, MTU, window and ring, and
    /// nothing outside the places of its packets was written.
    #[test]
    fn a_message_arrives_whole(
        layout in wire_layout(),
        len in 0u64..200_000,
        shift in 0u32..=8,
        ring_len in 1usize..600,
        burst in 1usize..600,
    ) {
        let geometry = layout.message(len.min(layout.max_message_len())).unwrap();
        let windows = WindowShape::new(1 << shift).unwrap();
        let message = content(geometry.message_len());
        let mut receiver = Receiver::new(geometry, windows);
        for frame in frames(&geometry, windows, &message) {
            if receiver.posted.is_empty() || receiver.arrived.len() >= burst {
                receiver.poll();
                receiver.post(ring_len);
            }
            receiver.write(&frame);
        }
        receiver.poll();
        prop_assert!(receiver.message() == message, "the message differs");
        prop_assert!(receiver.rule.is_finished());
        let count = geometry.fragment_count();
        prop_assert_eq!(receiver.restores, windows.count_of_windows(count) - 1);

        let start = receiver.zone.message_start() as usize;
        let first = start - usize::from(layout.header_len());
        let end = start + geometry.message_len() as usize;
        prop_assert!(receiver.memory[..first].iter().all(|&byte| byte == 0xee), "written in front");
        prop_assert!(receiver.memory[end..].iter().all(|&byte| byte == 0xee), "written behind");
    }
}

/// I5 is not idle caution: without the restore the message is wrong at every window's edge.
#[test]
fn without_the_rule_tails_are_lost() {
    let geometry = Layout::new(Wire::Lm, 1500, LinkShape::IPV4)
        .unwrap()
        .message(8 * 1448)
        .unwrap();
    let windows = WindowShape::new(4).unwrap();
    let message = content(geometry.message_len());
    let mut receiver = Receiver::new(geometry, windows);
    for frame in frames(&geometry, windows, &message) {
        receiver.post(1);
        let index = receiver.posted[0];
        receiver.write(&frame);
        receiver.poll();
        if index == 4 {
            // Undo the restore.
            let tail = receiver.tail(0);
            receiver.memory[tail].copy_from_slice(&frame[..66]);
        }
    }
    let wrong: Vec<usize> = (0..message.len())
        .filter(|&at| receiver.message()[at] != message[at])
        .collect();
    assert_eq!(wrong, (4 * 1448 - 66..4 * 1448).collect::<Vec<_>>());
}
