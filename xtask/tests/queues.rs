//! Which receive queue a packet comes in on behind a bridge: what `bed/switch.rs` says, and why it steers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use xtask::bed::{Bed, BedConfig, Host, INTERFACE, Launch, Program, until};

/// Says why a test cannot run here, and whether it may be skipped: never where `CI=true`.
fn skipped(why: &str) {
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{why}, and CI=true allows no skipped test"
    );
    println!("SKIPPED: {why}");
}

const QUEUES: u32 = 4;
/// Datagrams of each way of sending, at least.
const ENOUGH: u64 = 40;

/// Two hosts of four queues, and the measuring programs, which `cargo xtask test` builds before the tests.
fn cluster(landing_queue: Option<u32>) -> Option<(PathBuf, Bed)> {
    if !rustix::process::geteuid().is_root() {
        skipped("not root; network namespaces need it");
        return None;
    }
    let lm_bench = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("lm-bench");
    if !lm_bench.exists() {
        skipped("lm-bench is not built; cargo build -p lm-bench");
        return None;
    }
    let config = BedConfig {
        queues: QUEUES,
        landing_queue,
        ..BedConfig::cluster(2)
    };
    Some((lm_bench, Bed::new(&config).unwrap()))
}

/// An end of a bare stream towards this host, on this queue of the interface.
fn bare(lm_bench: &Path, side: &str, [to, port]: [&str; 2], queue: u32, seconds: f64) -> Launch {
    let task = json!({"stream": {"warm_up": 0.0, "seconds": seconds, "rate": null}});
    let spec = json!({
        "system": format!("bare --queue {queue}"), "task": task, "size": 1472, "address": format!("{to}:{port}"),
        "mtu": 1500, "mode": "copy",
    });
    Launch::new(lm_bench).args(["end", side, &spec.to_string(), "--interface", INTERFACE])
}

/// An XDP program on the receiver, so that its queues are counted.
fn counting(lm_bench: &Path, host: &Host) -> Program {
    let launch = bare(lm_bench, "far", [&host.address().to_string(), "7300"], 0, 30.0);
    let mut program = host.spawn(launch).unwrap();
    program.await_text("ready").unwrap();
    program
}

/// What came in on each queue while `work` ran, when it is `ENOUGH`.
fn queues_of(receiver: &Host, work: impl FnOnce()) -> Vec<u64> {
    let before = receiver.queue_packets().unwrap();
    assert_eq!(before.len(), QUEUES as usize);
    work();
    let mut came = Vec::new();
    until("enough packets came", Duration::from_secs(10), || {
        let now = receiver.queue_packets()?;
        came = now
            .iter()
            .zip(&before)
            .map(|(now, before)| now - before)
            .collect();
        Ok(came.iter().sum::<u64>() >= ENOUGH)
    })
    .unwrap();
    came
}

/// Packets of one flow from an XSK on a queue of the sender. The port is none that the receiver takes.
fn from_xsk(lm_bench: &Path, [sender, receiver]: [&Host; 2], queue: u32) {
    let launch = bare(
        lm_bench,
        "near",
        [&receiver.address().to_string(), "7444"],
        queue,
        0.05,
    );
    sender.spawn(launch).unwrap().finish().unwrap();
}

/// Datagrams of as many flows through the kernel's stack.
fn from_sockets([sender, receiver]: [&Host; 2], flows: u64) {
    for flow in 0..flows {
        let bind = || Ok(std::net::UdpSocket::bind((sender.address(), 0))?);
        let socket = sender.enter(bind).unwrap();
        for _ in 0..ENOUGH.div_ceil(flows) {
            let port = 7500 + flow as u16;
            socket.send_to(b"datagram", (receiver.address(), port)).unwrap();
        }
    }
}

/// The queues that had more than what the stack says now and then by itself.
fn used(packets: &[u64]) -> Vec<usize> {
    let all: u64 = packets.iter().sum();
    (0..packets.len())
        .filter(|&queue| packets[queue] * 20 > all)
        .collect()
}

#[test]
fn behind_a_bridge_the_kernel_chooses_the_queue() {
    let Some((lm_bench, cluster)) = cluster(None) else {
        return;
    };
    let pair = [&cluster.hosts()[0], &cluster.hosts()[1]];
    let _counting = counting(&lm_bench, pair[1]);
    // veth leaves the sender's queue number in the packet, and skb_tx_hash takes it for that of a receive queue, which
    // begins at 1.
    for queue in 1..QUEUES {
        let came = queues_of(pair[1], || from_xsk(&lm_bench, pair, queue));
        println!("XSK on queue {queue}: {came:?}");
        assert_eq!(
            used(&came),
            [queue as usize - 1],
            "XSK on queue {queue}: {came:?}"
        );
    }
    // 0 means none: a hash of the flow, always the same for one flow.
    let came = queues_of(pair[1], || from_xsk(&lm_bench, pair, 0));
    println!("XSK on queue 0: {came:?}");
    assert_eq!(used(&came).len(), 1, "{came:?}");
    let flows = 64;
    let came = queues_of(pair[1], || from_sockets(pair, flows));
    println!("{flows} sockets: {came:?}");
    assert!(used(&came).len() > 1, "{came:?}");
}

#[test]
fn a_switch_that_steers_sends_everything_to_the_landing_queue() {
    let landing = 2;
    let Some((lm_bench, cluster)) = cluster(Some(landing)) else {
        return;
    };
    for pair in [[0, 1], [1, 0]].map(|pair| pair.map(|at| &cluster.hosts()[at])) {
        let _counting = counting(&lm_bench, pair[1]);
        for queue in 0..QUEUES {
            let came = queues_of(pair[1], || from_xsk(&lm_bench, pair, queue));
            assert_eq!(used(&came), [landing as usize], "XSK on queue {queue}: {came:?}");
        }
        let came = queues_of(pair[1], || from_sockets(pair, 64));
        assert_eq!(used(&came), [landing as usize], "sockets: {came:?}");
    }
}
