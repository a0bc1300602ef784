//! Properties of geometry: any length from 0 to 4 GiB, any MTU from 576 to 9000, both wires, both IP versions, 0 to 2
//! tags. Short messages are checked fragment by fragment, giant ones at their edges and in random places.

mod inputs;

use inputs::{any_geometry, any_layout};
use lm_protocol::geometry::{Geometry, GeometryError, Layout, LinkShape, Wire};
use lm_protocol::window::WindowShape;
use proptest::prelude::*;
use proptest::sample::Index;

/// Up to this many fragments every one is looked at.
const EXHAUSTIVE: u32 = 300;

/// The fragments to look at: all of a short message; else both ends, windows' edges and random ones.
fn sample(geometry: &Geometry, windows: WindowShape, random: &[Index]) -> Vec<u32> {
    let count = geometry.fragment_count();
    if count <= EXHAUSTIVE {
        return (0..count).collect();
    }
    let mut indices = vec![0, 1, 2, count - 3, count - 2, count - 1];
    for index in random {
        let index = index.index(count as usize) as u32;
        let window = windows.range(windows.window_of(index), count);
        indices.extend([index, window.start, window.end - 1]);
    }
    indices
}

fn any_windows() -> impl Strategy<Value = WindowShape> {
    (0u32..=31).prop_map(|shift| WindowShape::new(1 << shift).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn fragments_tile_the_message(geometry in any_geometry(), random: [Index; 16]) {
        let count = geometry.fragment_count();
        prop_assert!(count >= 1);
        prop_assert_eq!(geometry.message_offset(0), 0);
        prop_assert_eq!(geometry.fragment(count - 1).message_range().end, geometry.message_len());
        for index in sample(&geometry, WindowShape::DEFAULT, &random) {
            let fragment = geometry.fragment(index);
            let full = if index == 0 { geometry.layout().first_payload_len() } else { geometry.layout().payload_len() };
            if index + 1 < count {
                // Neighbours touch and all but the last are full: with both ends right, all of it is tiled.
                prop_assert_eq!(fragment.len, full);
                prop_assert_eq!(fragment.message_range().end, geometry.message_offset(index + 1));
            } else {
                prop_assert!(fragment.len <= full);
                prop_assert!(fragment.len > 0 || geometry.message_len() == 0);
            }
            for offset in [fragment.offset, fragment.message_range().end.saturating_sub(1)] {
                prop_assert!(geometry.fragment_at(offset) == index || geometry.message_len() == 0);
            }
        }
        prop_assert_eq!(geometry.fragment_at(geometry.message_len()), geometry.fragment_at(u64::MAX));
        prop_assert_eq!(geometry.fragment_at(u64::MAX), count - 1);
    }

    #[test]
    fn frames_in_the_send_region_are_contiguous_even_and_apart(geometry in any_geometry(), random: [Index; 16]) {
        let layout = geometry.layout();
        for index in sample(&geometry, WindowShape::DEFAULT, &random) {
            let frame = geometry.tx_frame_offset(index);
            let payload = geometry.tx_payload_range(index);
            prop_assert_eq!(frame % 2, 0, "TX addresses are even");
            prop_assert_eq!(payload.start % 4, 0);
            // One descriptor: headers right in front of the payload.
            prop_assert_eq!(frame + u64::from(layout.fragment_header_len(index)), payload.start);
            prop_assert_eq!(payload.end - payload.start, u64::from(geometry.fragment_len(index)));
            let hole_start = payload.start - u64::from(layout.fragment_hole_len(index));
            prop_assert!(frame >= hole_start);
            if index == 0 {
                prop_assert_eq!(hole_start, 0);
            } else {
                prop_assert_eq!(hole_start, geometry.tx_payload_range(index - 1).end);
            }
        }
        let end = geometry.tx_payload_range(geometry.fragment_count() - 1).end;
        prop_assert!(geometry.tx_region_len() >= end && geometry.tx_region_len() < end + 16);
        prop_assert_eq!(geometry.tx_region_len() % 16, 0);
    }

    #[test]
    fn headers_in_the_zone_cover_only_what_arrives_next(
        geometry in any_geometry(),
        windows in any_windows(),
        random: [Index; 16],
    ) {
        let count = geometry.fragment_count();
        for index in sample(&geometry, windows, &random) {
            let header = geometry.rx_header_range(index);
            let payload = geometry.rx_payload_range(index);
            prop_assert_eq!(header.end, payload.start as i64, "a packet is contiguous");
            if index == 0 {
                prop_assert_eq!(header.start, -i64::from(geometry.layout().header_len()), "in the front margin");
                continue;
            }
            // Payload ranges are the message's tiles, so a header inside the payload below overlaps no other.
            let below = geometry.rx_payload_range(index - 1);
            prop_assert_eq!(below.end, payload.start);
            prop_assert!(header.start >= below.start as i64 && header.end <= below.end as i64);
            if windows.is_lowest(index) {
                // The one exception, invariant I5: the payload below came as the first of the window before.
                prop_assert!(windows.is_highest(index - 1, count));
                prop_assert!(windows.position_of(index - 1, count) < windows.position_of(index, count));
            } else {
                prop_assert_eq!(windows.position_of(index - 1, count), windows.position_of(index, count) + 1);
            }
        }
    }

    #[test]
    fn frames_in_the_zone_stay_in_their_place(geometry in any_geometry(), random: [Index; 16]) {
        let layout = geometry.layout();
        let stride = i64::from(layout.payload_len());
        for index in sample(&geometry, WindowShape::DEFAULT, &random) {
            let start = geometry.rx_frame_start(index);
            prop_assert_eq!(start, i64::from(index) * stride - i64::from(layout.header_len()));
            // I2: the longest admitted packet ends where the next slot begins, the last one inside the zone.
            let end = start + i64::from(layout.max_frame_len());
            prop_assert!(end <= (i64::from(index) + 1) * stride);
            prop_assert!(end <= geometry.rx_zone_payload_len() as i64);
            prop_assert!(geometry.fragment(index).frame_len() <= layout.max_frame_len());
        }
        prop_assert_eq!(geometry.rx_zone_payload_len() % 64, 0);
    }

    #[test]
    fn a_layout_uses_the_mtu_and_not_more(
        mtu in 576u16..=9000, ipfrag: bool, vlan_tags in 0u8..=2,
    ) {
        let wire = if ipfrag { Wire::IpFrag } else { Wire::Lm };
        let link = LinkShape { vlan_tags };
        let layout = Layout::new(wire, mtu, link).unwrap();
        prop_assert_eq!(layout.payload_len() % 8, 0);
        let packet_len = layout.max_frame_len() - link.ethernet_len();
        prop_assert!(packet_len <= mtu && packet_len > mtu - 8);
        let first = layout.fragment_header_len(0) + layout.first_payload_len() - link.ethernet_len();
        prop_assert_eq!(first, packet_len);
        prop_assert_eq!(layout.hole_len() % 4, 0);
        prop_assert_eq!(Layout::from_parts(wire, layout.header_len(), layout.payload_len(), link), Ok(layout));
    }

    #[test]
    fn parts_from_a_peer_are_believed_only_if_they_fit(
        layout in any_layout(), header_len: u16, payload_len: u16, vlan_tags: u8,
    ) {
        let link = LinkShape { vlan_tags };
        if let Ok(layout) = Layout::from_parts(layout.wire(), header_len, payload_len, link) {
            prop_assert_eq!(layout.header_len(), header_len);
            prop_assert_eq!(layout.payload_len(), payload_len);
            prop_assert!(layout.header_len() < layout.payload_len());
            // No arithmetic overflows, whatever a peer wrote.
            let geometry = layout.message(layout.max_message_len()).unwrap();
            prop_assert!(geometry.tx_region_len() > geometry.message_len());
        }
        let wrong_header = Layout::from_parts(layout.wire(), header_len, layout.payload_len(), layout.link());
        prop_assert_eq!(wrong_header.is_ok(), header_len == layout.header_len());
    }
}

#[test]
fn limits() {
    let link = LinkShape::IPV4;
    assert_eq!(
        Layout::new(Wire::Lm, 575, link),
        Err(GeometryError::MtuTooSmall {
            mtu: 575,
            minimum: 576
        })
    );
    assert_eq!(
        Layout::new(Wire::Lm, 65_522, link),
        Err(GeometryError::MtuTooLarge {
            mtu: 65_522,
            maximum: 65_521
        })
    );
    let tags = LinkShape { vlan_tags: 3 };
    assert_eq!(
        Layout::new(Wire::Lm, 1500, tags),
        Err(GeometryError::TooManyVlanTags { tags: 3 })
    );
    for (wire, maximum) in [(Wire::Lm, 1 << 32), (Wire::IpFrag, 65_507)] {
        let layout = Layout::new(wire, 1500, link).unwrap();
        assert!(layout.message(maximum).is_ok());
        let error = GeometryError::MessageTooLong {
            len: maximum + 1,
            maximum,
        };
        assert_eq!(layout.message(maximum + 1), Err(error));
    }
    // The largest frames that a descriptor's lengths are counted with here.
    for (wire, vlan_tags) in [(Wire::Lm, 0), (Wire::Lm, 1), (Wire::Lm, 2), (Wire::IpFrag, 1)] {
        let link = LinkShape { vlan_tags };
        let layout = Layout::new(wire, u16::MAX - link.ethernet_len(), link).unwrap();
        let geometry = layout.message(65_507).unwrap();
        assert!(geometry.tx_stride() > u64::from(layout.payload_len()));
    }
}

#[test]
fn an_empty_message_is_one_empty_fragment() {
    for wire in [Wire::Lm, Wire::IpFrag] {
        let geometry = Layout::new(wire, 1500, LinkShape::IPV4)
            .unwrap()
            .message(0)
            .unwrap();
        assert_eq!(geometry.fragment_count(), 1);
        assert_eq!(geometry.fragment(0).message_range(), 0..0);
        assert_eq!(geometry.fragments().len(), 1);
    }
}

#[test]
fn every_length_near_the_start_at_every_small_mtu() {
    for wire in [Wire::Lm, Wire::IpFrag] {
        for mtu in 576..600 {
            let layout = Layout::new(wire, mtu, LinkShape::IPV4).unwrap();
            for len in 0..4000 {
                let geometry = layout.message(len).unwrap();
                let total: u64 = geometry.fragments().map(|fragment| u64::from(fragment.len)).sum();
                assert_eq!(total, len, "{wire} at MTU {mtu}");
            }
        }
    }
}
