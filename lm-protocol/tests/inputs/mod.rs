//! Inputs that several tests draw from.
#![allow(dead_code, reason = "each test binary uses a part")]

use core::net::Ipv4Addr;
use lm_protocol::geometry::{Geometry, Layout, LinkShape, MIN_MTU, Wire};
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use proptest::prelude::*;

/// Two hosts on one link; the addresses of the golden dumps.
pub(crate) fn addressing() -> Addressing {
    Addressing {
        src_mac: MacAddr([2, 0, 0, 0, 0, 1]),
        dst_mac: MacAddr([2, 0, 0, 0, 0, 2]),
        vlan: None,
        src_ip: Ipv4Addr::new(192, 168, 1, 1),
        dst_ip: Ipv4Addr::new(192, 168, 1, 2),
        src_port: 40_000,
        dst_port: 7168,
    }
}

/// Any addressing, with or without a tag.
pub(crate) fn any_addressing() -> impl Strategy<Value = Addressing> {
    let vlan = prop::option::of(0u16..4096);
    (
        any::<([u8; 6], [u8; 6])>(),
        vlan,
        any::<([u8; 4], [u8; 4])>(),
        any::<(u16, u16)>(),
    )
        .prop_map(|(macs, vlan, ips, ports)| Addressing {
            src_mac: MacAddr(macs.0),
            dst_mac: MacAddr(macs.1),
            vlan,
            src_ip: ips.0.into(),
            dst_ip: ips.1.into(),
            src_port: ports.0,
            dst_port: ports.1,
        })
}

/// Any wire on any link at any MTU from the smallest to 9000.
pub(crate) fn any_layout() -> impl Strategy<Value = Layout> {
    (any::<bool>(), 0u8..=2, any::<prop::sample::Index>()).prop_map(|(ipfrag, vlan_tags, mtu)| {
        let wire = if ipfrag { Wire::IpFrag } else { Wire::Lm };
        let mtu = MIN_MTU + mtu.index(usize::from(9001 - MIN_MTU)) as u16;
        Layout::new(wire, mtu, LinkShape { vlan_tags }).unwrap()
    })
}

/// A message of any length that the layout allows: short, long, and around the edges of fragments.
pub(crate) fn any_geometry() -> impl Strategy<Value = Geometry> {
    any_layout().prop_flat_map(|layout| {
        let max = layout.max_message_len();
        let stride = u64::from(layout.payload_len());
        let edge =
            (0..=max / stride, 0u64..20).prop_map(move |(k, near)| (k * stride + near).saturating_sub(10));
        prop_oneof![
            2 => 0..=max,
            2 => 0..=max.min(100_000),
            1 => 0..=stride,
            2 => edge,
            1 => Just(max),
            1 => Just(0),
        ]
        .prop_map(move |len| layout.message(len.min(max)).unwrap())
    })
}
