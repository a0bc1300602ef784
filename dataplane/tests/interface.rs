//! Interfaces and routes on real devices in namespaces.

mod bed;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use bed::{Mode, Namespace, Pair, RedirectAll};
use lm_dataplane::interface::{Interface, InterfaceAddress, InterfaceError};
use lm_dataplane::route::{self, RouteError};

const A: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);

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

#[test]
fn a_neighbour_is_resolved() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let va = pair.a.run(|| Interface::by_name("va")).expect("va");
    let vb = pair.b.run(|| Interface::by_name("vb")).expect("vb");
    for interface in [None, Some(va.index)] {
        let hop = pair
            .a
            .run(|| route::resolve(B, interface))
            .expect("the other end");
        assert_eq!(
            (hop.interface_index, hop.source, hop.gateway),
            (va.index, A, None)
        );
        assert_eq!(hop.mac, vb.mac);
    }
    // Behind a router: its MAC address.
    pair.a.ip("route add 10.99.0.0/16 via 10.77.0.2");
    let hop = pair
        .a
        .run(|| route::resolve(Ipv4Addr::new(10, 99, 1, 2), None))
        .expect("behind the router");
    assert_eq!((hop.gateway, hop.mac), (Some(B), vb.mac));
    // A permanent entry is taken as it is.
    pair.a
        .ip("neighbour add 10.77.0.9 lladdr 02:00:00:00:00:09 dev va nud permanent");
    let hop = pair
        .a
        .run(|| route::resolve(Ipv4Addr::new(10, 77, 0, 9), None))
        .expect("a permanent neighbour");
    assert_eq!(hop.mac, [2, 0, 0, 0, 0, 9]);
}

#[test]
fn unreachable_hosts_get_a_reason_soon() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    pair.a.ip("address add 10.78.0.1/24 dev lo");
    let va = pair.a.run(|| Interface::by_name("va")).expect("va").index;
    let fail = |to: [u8; 4], interface| {
        pair.a
            .run(|| route::resolve(Ipv4Addr::from(to), interface))
            .expect_err("unreachable")
    };

    let start = Instant::now();
    let silent = fail([10, 77, 0, 66], None);
    assert!(
        matches!(&silent, RouteError::NoAnswer { interface, gateway: None, .. } if interface == "va"),
        "{silent}"
    );
    let took = start.elapsed();
    assert!(
        took >= route::NEIGHBOUR_PATIENCE && took < Duration::from_secs(3),
        "{took:?}"
    );

    assert!(matches!(fail([192, 0, 2, 1], None), RouteError::NoRoute { .. }));
    pair.a.ip("route add 10.99.0.0/16 via 10.77.0.67");
    assert!(matches!(
        fail([10, 99, 0, 1], None),
        RouteError::NoAnswer { gateway: Some(_), .. }
    ));
    for own in [[127, 0, 0, 1], [127, 3, 2, 1], [10, 77, 0, 1], [10, 78, 0, 1]] {
        for interface in [None, Some(va)] {
            assert!(
                matches!(fail(own, interface), RouteError::Local { .. }),
                "{own:?} {interface:?}"
            );
        }
    }
    for no_host in [
        [0, 0, 0, 0],
        [224, 0, 0, 1],
        [255, 255, 255, 255],
        [10, 77, 0, 255],
    ] {
        let error = fail(no_host, None);
        assert!(
            matches!(error, RouteError::NotAHost { .. }),
            "{no_host:?}: {error}"
        );
    }
    pair.a.ip("route add prohibit 10.98.0.0/16");
    pair.a.ip("route add blackhole 10.97.0.0/16");
    assert!(matches!(fail([10, 98, 0, 1], None), RouteError::NoRoute { .. }));
    assert!(matches!(fail([10, 97, 0, 1], None), RouteError::NoRoute { .. }));
    pair.a.ip("link set va down");
    let down = fail([10, 77, 0, 2], Some(va));
    assert!(matches!(down, RouteError::Down { .. }), "{down:?}");
}

#[test]
fn the_default_interface_is_found() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let default = || pair.a.run(route::default_interface);
    assert_eq!(default().expect("the only usable one").name, "va");
    pair.a.ip("link add second type veth peer name other");
    pair.a.ip("address add 10.80.0.1/24 dev second");
    pair.a.ip("link set other up");
    pair.a.ip("link set second up");
    match default() {
        Err(RouteError::NoDefault { mut usable }) => {
            usable.sort();
            assert_eq!(usable, ["second", "va"]);
        }
        other => panic!("two candidates, yet {other:?}"),
    }
    pair.a.ip("route add default via 10.77.0.2 metric 200");
    pair.a.ip("route add default via 10.80.0.2 metric 100");
    let second = default().expect("the better route's");
    assert_eq!(second.name, "second");
    let va = pair.a.run(|| Interface::by_name("va")).expect("va");
    assert_eq!(
        pair.a.run(route::default_route_interfaces).expect("two"),
        [second.index, va.index]
    );
    let nowhere = Namespace::new();
    assert!(
        matches!(nowhere.run(route::default_interface), Err(RouteError::NoDefault { usable }) if usable.is_empty())
    );
}
