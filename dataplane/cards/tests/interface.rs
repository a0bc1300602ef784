//! Interfaces on real devices in namespaces.

#[path = "../../tests/bed/mod.rs"]
mod bed;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use bed::{Mode, Namespace, Pair, RedirectAll};
use lm_cards::{Interface, InterfaceAddress, InterfaceError};

const A: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

#[test]
fn a_veth_device_is_described() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(3);
    pair.a.ip("address add 10.78.0.1/16 dev va");
    let va = pair.a.run(|| Interface::by_name("va")).expect("va");
    assert_eq!(
        (va.kind.as_deref(), va.driver.as_deref()),
        (Some("veth"), Some("veth"))
    );
    assert_eq!((va.rx_queues, va.tx_queues, va.mtu), (3, 3, 1500));
    assert_eq!(
        va.addresses,
        [
            InterfaceAddress {
                ip: A,
                prefix_len: 24
            },
            InterfaceAddress {
                ip: Ipv4Addr::new(10, 78, 0, 1),
                prefix_len: 16
            }
        ]
    );
    assert_eq!(va.primary_address(), Some(A));
    assert!(va.up && va.ethernet && va.xdp_program.is_none() && va.mac != [0; 6]);
    va.check(1500).expect("usable");
    assert!(matches!(
        va.check(1501),
        Err(InterfaceError::MtuTooSmall {
            mtu: 1500,
            min: 1501,
            ..
        })
    ));

    // Fewer queues in use than exist.
    pair.a.command("ethtool", "-L va rx 2 tx 1");
    let va = pair.a.run(|| Interface::by_name("va")).expect("va");
    assert_eq!((va.rx_queues, va.tx_queues), (2, 1));

    // veth has native XDP only with a receive queue for each transmit queue of the other end.
    pair.a.command("ethtool", "-L va rx 3 tx 3");
    for mode in [Mode::Generic, Mode::Native] {
        let program = pair.a.run(|| RedirectAll::attach(va.index, mode));
        let with = pair.a.run(|| Interface::by_index(va.index)).expect("va");
        assert!(with.xdp_program.is_some(), "{mode:?}");
        drop(program);
        // A program that another test is just starting may still hold a copy of the link's descriptor.
        let deadline = Instant::now() + Duration::from_secs(5);
        while pair
            .a
            .run(|| Interface::by_index(va.index))
            .expect("va")
            .xdp_program
            .is_some()
        {
            assert!(Instant::now() < deadline, "{mode:?}: still attached");
        }
    }

    pair.b.ip("link set vb down");
    let va = pair.a.run(|| Interface::by_name("va")).expect("va");
    assert!(
        matches!(va.check(576), Err(InterfaceError::Down { .. })),
        "no link without the other end"
    );
}

#[test]
fn unknown_names_get_near_ones() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let error = pair
        .a
        .run(|| Interface::by_name("vaa"))
        .expect_err("no such device");
    assert_eq!(error.to_string(), "no interface vaa; did you mean va?");
    let error = pair
        .a
        .run(|| Interface::by_name("averylongnameindeedfornothing"))
        .expect_err("no such device");
    assert!(matches!(error, InterfaceError::Unknown { .. }));
    assert!(pair.a.run(|| Interface::by_index(4711)).is_err());
}

#[test]
fn stacked_devices_name_their_ports() {
    if !bed::root() {
        return;
    }
    let host = Namespace::new();
    for port in ["p0", "p1", "p2", "p3", "p4"] {
        host.ip(&format!("link add {port} type veth peer name x{port}"));
    }
    host.ip("link add bridge0 type bridge");
    host.ip("link set p0 master bridge0");
    host.ip("link set p1 master bridge0");
    for (make, device, kind, ports) in [
        ("", "bridge0", "bridge", "p0 or p1"),
        ("link add link p2 name p2.5 type vlan id 5", "p2.5", "vlan", "p2"),
        (
            "link add link bridge0 name bridge0.7 type vlan id 7",
            "bridge0.7",
            "vlan",
            "p0 or p1",
        ),
        ("link add link p3 name mac0 type macvlan", "mac0", "macvlan", "p3"),
        (
            "link add link bridge0 name mac1 type macvlan",
            "mac1",
            "macvlan",
            "p0 or p1",
        ),
        ("link add bond0 type bond", "bond0", "bond", "p4"),
    ] {
        if !make.is_empty() && !host.try_ip(make) {
            println!("NOT IN THIS KERNEL: {kind} devices");
            continue;
        }
        if kind == "bond" {
            host.ip("link set p4 master bond0");
        }
        let found = host.run(|| Interface::by_name(device)).expect(device);
        let error = found.check(576).expect_err("stacked");
        assert_eq!(
            error.to_string(),
            format!("{device} is a {kind} device; use the device below it: --interface {ports}")
        );
    }
    let port = host.run(|| Interface::by_name("p3")).expect("p3");
    assert!(matches!(port.check(576), Err(InterfaceError::Down { .. })));
    host.ip("link set p3 up");
    host.ip("link set xp3 up");
    let port = host.run(|| Interface::by_name("p3")).expect("p3");
    assert!(matches!(port.check(576), Err(InterfaceError::NoAddress { .. })));
}
