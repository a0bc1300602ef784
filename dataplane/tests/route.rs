//! Routes on real devices in namespaces.

mod bed;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use bed::{Namespace, Pair};
use lm_cards::Interface;
use lm_dataplane::route::{self, RouteError};

const A: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);

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
