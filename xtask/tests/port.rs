//! A switch whose links are slow: what its port keeps and passes, and what a cable takes.

use std::io::{BufRead as _, BufReader};
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lm_measure::rate::BitRate;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use xtask::bed::{Bed, BedConfig, Host, Port};

/// A frame of 1538 bytes on the wire takes 12.3 ms.
const SLOW: BitRate = BitRate(1_000_000);

/// Says why a test cannot run here, and whether it may be skipped: never where `CI=true`.
fn skipped(why: &str) {
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{why}, and CI=true allows no skipped test"
    );
    println!("SKIPPED: {why}");
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped("not root; network namespaces need it");
    }
    is_root
}

fn config(senders: u32, port: Option<Port>, cable: Option<BitRate>) -> BedConfig {
    BedConfig {
        senders: Some(senders),
        port,
        cable,
        ..BedConfig::default()
    }
}

fn bind(host: &Host) -> UdpSocket {
    let socket = host.enter(|| Ok(UdpSocket::bind((host.address(), 0))?)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    socket
}

/// Sends so many packets of full length at once, and gives the times at which those that come through come, after the first one.
fn burst(bed: &Bed, packets: usize) -> Vec<Duration> {
    let (left, right) = (bind(bed.left()), bind(bed.right()));
    let to = right.local_addr().unwrap();
    for _ in 0..packets {
        left.send_to(&[0; 1472], to).unwrap();
    }
    let mut times = Vec::new();
    while right.recv(&mut [0; 2048]).is_ok() {
        times.push(Instant::now());
    }
    times.iter().map(|time| *time - times[0]).collect()
}

#[test]
fn a_port_keeps_its_buffer_and_drops_the_rest() {
    if !is_root() {
        return;
    }
    let port = Port {
        rate: SLOW,
        frames: 8,
    };
    let bed = Bed::new(&config(1, Some(port), None)).unwrap();
    let came = burst(&bed, 40).len();
    // Four go at once, and one more for each 12 ms that sending took.
    assert!((12..=20).contains(&came), "{came} came");
    let drops = bed.drops().unwrap();
    assert_eq!((drops.port, drops.sum()), (40 - came as u64, 40 - came as u64));
    let [port] = &bed.disciplines().unwrap()[..] else {
        panic!("one link is slow")
    };
    assert_eq!(
        (&port["dev"], &port["packets"]),
        (&Value::from("port2"), &Value::from(came))
    );
}

#[test]
fn a_cable_takes_its_time_and_loses_nothing() {
    if !is_root() {
        return;
    }
    let bed = Bed::new(&config(1, None, Some(SLOW))).unwrap();
    let times = burst(&bed, 14);
    assert_eq!(times.len(), 14);
    // Four go at once. A receiver that is late itself sees the last ones closer together, never all of them.
    let frame = Duration::from_micros(12_304);
    assert!(times[13] - times[3] >= frame * 8, "{times:?}");
    let error = bed.capacity().unwrap_err().to_string();
    assert!(error.contains("no slow port"), "{error}");
}

/// Here the cable cannot bring what the port passes.
#[test]
fn a_bed_that_is_slower_than_its_port_is_refused() {
    if !is_root() {
        return;
    }
    let port = Port {
        rate: BitRate(10_000_000),
        frames: 64,
    };
    let bed = Bed::new(&config(1, Some(port), Some(SLOW))).unwrap();
    let error = bed.capacity().unwrap_err().to_string();
    assert!(
        error.contains("of 813 frames a second") && error.contains("leave this machine alone"),
        "{error}"
    );
    let without_switch = BedConfig {
        senders: None,
        ..config(1, Some(port), None)
    };
    let error = Bed::new(&without_switch).unwrap_err().to_string();
    assert!(error.contains("say how many senders"), "{error}");
}

/// Namespaces of beds that a process made.
fn namespaces_of(pid: u32) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let start = format!("lmx-{pid}-");
    entries
        .map(|entry| entry.path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(&start))
        .collect()
}

#[test]
fn a_bed_with_a_slow_port_says_what_it_passes_and_leaves_nothing() {
    if !is_root() {
        return;
    }
    let start = || {
        Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["bed", "--port", "10Mbit/64", "--cable", "10Mbit"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut child = start();
    let lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let lines: Vec<String> = lines.take_while(|line| !line.contains("Ctrl-C")).collect();
    assert_eq!(
        lines.iter().filter(|line| line.contains("ip netns exec")).count(),
        4,
        "{lines:?}"
    );
    let said = lines.last().unwrap();
    let measured = said.strip_prefix("The switch's port towards 198.18.0.2 passes ");
    let (passed, rest) = measured.and_then(|rest| rest.split_once(' ')).unwrap();
    assert_eq!(rest, "packets of 1500 bytes a second (measured) and keeps 64.");
    // 812.7 by its rate.
    assert!((796..=820).contains(&passed.parse().unwrap()), "{said}");
    assert_eq!(namespaces_of(child.id()).len(), 5);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    child.wait().unwrap();
    assert!(namespaces_of(child.id()).is_empty());
    // The same in the midst of its flood.
    let mut child = start();
    let end = Instant::now() + Duration::from_secs(10);
    let right = format!("lmx-{}-0-right", child.id());
    let received = || {
        let mut counter = Command::new("ip");
        counter.args([
            "netns",
            "exec",
            &right,
            "cat",
            "/sys/class/net/lm0/statistics/rx_packets",
        ]);
        let output = counter.stderr(Stdio::null()).output().unwrap();
        String::from_utf8_lossy(&output.stdout)
            .trim()
            .parse::<u64>()
            .unwrap_or(0)
    };
    while received() < 10 {
        assert!(Instant::now() < end, "no flood after 10 s");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    child.wait().unwrap();
    assert!(namespaces_of(child.id()).is_empty());
}
