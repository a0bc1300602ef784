//! What cannot be opened is one line with a reason and what to do, and leaves nothing.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectOptions, EndpointConfig, LinkConfig, ModeRequest};
use lm_dpdk::DpdkConfig;
use lm_protocol::session::Permit;

use crate::bed::{A, B, PATIENCE, Wire, config, open};

fn refusal(dpdk: &DpdkConfig, config: &EndpointConfig) -> String {
    let permit = Permit {
        max_message_len: 1,
        lease: PATIENCE,
    };
    let error = lm_dpdk::open(dpdk, config, Box::new(permit)).expect_err("no such thing");
    let text = error.to_string();
    assert!(text.contains("; ") && !text.contains('\n'), "{text}");
    text
}

fn described(device: &str) -> DpdkConfig {
    DpdkConfig {
        device: device.to_owned(),
        address: A,
        prefix_len: 24,
        gateway: None,
    }
}

#[test]
fn bad_descriptions_have_a_reason() {
    let wire = Wire::new();
    let none = wire.folder.join("none").display().to_string();
    for (device, reason) in [
        ("", "names no driver"),
        (",queues=2", "names no driver"),
        ("a\0b", "names no driver"),
        ("net_wonder0,iface=/tmp/x", "net_wonder0"),
        (&format!("net_vhost90,iface={none},wonder=1"), "wonder"),
        ("net_vhost91", "net_vhost91"),
        ("net_ring0", "memory"),
        ("net_af_packet92,iface=wonder", "wonder"),
        (&format!("net_virtio_user93,path={none}"), &none),
        (&format!("net_vhost94,iface={none}/none"), "none/none"),
    ] {
        let text = refusal(&described(device), &config());
        assert!(text.contains(reason), "{device}: {text}");
    }
}

#[test]
fn bad_addresses_have_a_reason() {
    for (address, prefix_len, gateway) in [
        ([10, 9, 0, 0], 24, None),
        ([10, 9, 0, 255], 24, None),
        ([10, 9, 0, 1], 33, None),
        ([0, 0, 0, 0], 0, None),
        ([224, 0, 0, 1], 4, None),
        ([10, 9, 0, 1], 24, Some([10, 9, 1, 1])),
        ([10, 9, 0, 1], 24, Some([10, 9, 0, 1])),
    ] {
        let dpdk = DpdkConfig {
            address: address.into(),
            prefix_len,
            gateway: gateway.map(Ipv4Addr::from),
            ..described("net_null0")
        };
        let text = refusal(&dpdk, &config());
        assert!(text.contains("--dpdk-"), "{text}");
    }
}

#[test]
fn other_modes_have_a_reason() {
    for mode in [ModeRequest::ZeroCopy, ModeRequest::Generic] {
        let link = LinkConfig {
            mode,
            ..LinkConfig::default()
        };
        let config = EndpointConfig { link, ..config() };
        assert!(refusal(&described("net_null0"), &config).contains("--mode"));
    }
}

#[test]
fn a_socket_file_that_is_left_is_named() {
    let wire = Wire::new();
    drop(std::os::unix::net::UnixListener::bind(wire.socket()).expect("a socket"));
    let text = refusal(
        &described(&format!("net_vhost95,iface={}", wire.socket())),
        &config(),
    );
    assert!(text.contains(&format!("rm {}", wire.socket())), "{text}");
    std::fs::remove_file(wire.socket()).expect("it is there");
}

#[test]
fn a_neighbour_that_never_answers_is_given_up() {
    let wire = Wire::new();
    let [mut a, b] = wire.ends("queue_size=256");
    let nobody = "10.9.0.77:7168".parse().expect("an address");
    let began = Instant::now();
    let error = a
        .connect(nobody, &ConnectOptions::default())
        .expect_err("nobody is there");
    let took = began.elapsed();
    assert!(
        error.to_string().contains("10.9.0.77 answers no ARP; "),
        "{error}"
    );
    assert!(
        took > Duration::from_secs(1) && took < Duration::from_secs(3),
        "{took:?}"
    );
    drop((a, b));
    // Another one may have the same socket and address now.
    drop(open(format!("net_vhost96,iface={}", wire.socket()), B));
}
