//! Steering, ethtool and what is judged of a machine, against real devices without hardware: what they cannot do is said,
//! and nothing is changed.

#[path = "../../tests/bed/mod.rs"]
mod bed;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use bed::{Namespace, Pair};
use lm_cards::Interface;
use lm_cards::ethtool::{Ethtool, EthtoolError, Feature};
use lm_cards::{Demand, Facts, Obstacle, judge};
use lm_cards::{Steering, SteeringError};

/// Everything about a device that steering could change.
fn settings(ethtool: &Ethtool) -> Vec<String> {
    vec![
        format!("{:?}", ethtool.channels()),
        format!("{:?}", ethtool.rss()),
        format!("{:?}", ethtool.hash_input()),
        format!("{:?}", ethtool.feature(Feature::Ntuple)),
        format!("{:?}", ethtool.feature(Feature::RxVlan)),
        format!("{:?}", ethtool.feature(Feature::RxFcs)),
    ]
}

/// Where steering remembers what it changed of an interface in the calling thread's network namespace.
fn record(interface: &Interface) -> PathBuf {
    let namespace = std::fs::metadata("/proc/thread-self/ns/net")
        .expect("procfs")
        .ino();
    PathBuf::from(format!("/run/lm/steering/{}-{namespace}.json", interface.index))
}

#[test]
fn veth_cannot_be_steered_and_is_left_as_it_was() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(2);
    pair.a.run(|| {
        let va = Interface::by_name("va").expect("va");
        let ethtool = Ethtool::open(va.index).expect("a socket");
        let before = settings(&ethtool);
        let error = Steering::apply(&va, &[1]).expect_err("veth has no table");
        assert!(matches!(error, SteeringError::Unsupported { .. }));
        assert_eq!(
            error.to_string(),
            "va (driver veth) cannot keep other traffic off a landing queue: it has no RSS indirection table; use copy \
             mode, which needs none, or a card that shows one (ethtool -x va)"
        );
        assert_eq!(settings(&ethtool), before);
        assert!(!record(&va).exists());
    });
}

#[test]
fn ethtool_tells_what_veth_is() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(3);
    pair.a.run(|| {
        let va = Interface::by_name("va").expect("va");
        assert_eq!(
            (va.driver.as_deref(), va.rx_queues, va.tx_queues),
            (Some("veth"), 3, 3)
        );
        let ethtool = Ethtool::open(va.index).expect("a socket");
        let driver = ethtool.driver().expect("a driver");
        assert_eq!((driver.name.as_str(), driver.bus.as_str()), ("veth", ""));
        let channels = ethtool.channels().expect("channels");
        assert_eq!((channels.rx, channels.tx), (3, 3));
        assert!(matches!(ethtool.rss(), Err(EthtoolError::Unsupported { .. })));
        assert!(matches!(
            ethtool.set_rss_table(&[0, 0], 0),
            Err(EthtoolError::Unsupported { .. })
        ));
        assert!(matches!(
            ethtool.hash_input(),
            Err(EthtoolError::Unsupported { .. })
        ));
    });
}

#[test]
fn features_are_switched_and_refused_for_real() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    pair.a.run(|| {
        let va = Interface::by_name("va").expect("va");
        let ethtool = Ethtool::open(va.index).expect("a socket");
        for on in [false, true, true, false] {
            ethtool.set_feature(Feature::RxVlan, on).expect("veth can");
            let state = ethtool.feature(Feature::RxVlan).expect("its state");
            assert_eq!((state.on, state.changeable), (on, true));
        }
        for feature in [Feature::Ntuple, Feature::RxFcs, Feature::RxAll] {
            let error = ethtool.set_feature(feature, true).expect_err("veth cannot");
            assert!(matches!(error, EthtoolError::Unsupported { .. }), "{error}");
        }
        // The name is asked for each time.
        pair.a.ip("link set va down");
        pair.a.ip("link set va name renamed");
        assert_eq!(ethtool.driver().expect("the same device").name, "veth");
        pair.a.ip("link delete renamed");
        assert!(matches!(ethtool.driver(), Err(EthtoolError::Gone)));
        assert!(matches!(
            ethtool.set_feature(Feature::RxVlan, true),
            Err(EthtoolError::Gone)
        ));
    });
}

#[test]
fn settings_take_privileges() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    pair.a.run(|| {
        let va = Interface::by_name("va").expect("va");
        let nobody: libc::uid_t = 65534;
        // SAFETY: the system call takes no pointers, and without the C library's wrapper changes this thread alone, which
        // ends right after.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody) };
        assert_eq!(changed, 0, "{}", io::Error::last_os_error());
        let ethtool = Ethtool::open(va.index).expect("a socket");
        ethtool.channels().expect("questions are free");
        let error = ethtool
            .set_feature(Feature::RxVlan, false)
            .expect_err("not permitted");
        assert!(matches!(error, EthtoolError::NotPermitted { .. }), "{error}");
        assert!(error.to_string().contains("CAP_NET_ADMIN"));
    });
}

#[test]
fn zero_copy_is_refused_on_veth_and_dummy_with_reasons() {
    if !bed::root() {
        return;
    }
    let host = Namespace::new();
    host.ip("link add va type veth peer name vb");
    let mut names = vec!["va"];
    if host.try_ip("link add dummy0 type dummy") {
        names.push("dummy0");
    } else {
        println!("NOT IN THIS KERNEL: dummy devices");
    }
    let demand = Demand {
        chunk_len: 4096,
        memory_len: 0,
    };
    for name in names {
        let facts = host.run(|| {
            let interface = Interface::by_name(name).expect(name);
            Facts::read(&interface).expect("facts")
        });
        if facts.xdp.is_none() {
            println!("NOT IN THIS KERNEL: XDP features of a device");
            continue;
        }
        let obstacles = judge(&facts, &demand);
        let driver = if name == "va" { "veth" } else { "dummy" };
        assert!(
            matches!(&obstacles[..2], [
                Obstacle::NoZeroCopy { driver: named, .. },
                Obstacle::OneQueue { .. },
            ] if named == driver),
            "{obstacles:?}"
        );
    }
}
