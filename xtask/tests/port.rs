//! A switch whose links are slow: what its port keeps and passes, what a cable takes, and what is told of datagrams
//! that do not come through.

use std::io::{BufRead as _, BufReader};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lm_measure::rate::BitRate;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use xtask::bed::{Bed, BedConfig, Host, Launch, Port, until};
use xtask::bench::compare;
use xtask::ends::Ends;
use xtask::workspace::Programs;

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

/// Built by `cargo xtask test`, which builds every program before the tests.
fn programs() -> Option<Programs> {
    let folder = Path::new(env!("CARGO_BIN_EXE_xtask")).parent()?;
    if !folder.join("lm-bench").exists() {
        skipped("lm-bench is not built; cargo build -p lm-bench");
        return None;
    }
    Some(Programs::in_folder(folder))
}

fn bind(host: &Host) -> UdpSocket {
    let socket = host.enter(|| Ok(UdpSocket::bind((host.address(), 0))?)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    socket
}

/// Sends so many packets of full length at once, and gives the times at which those that come through come, after the
/// first one.
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
    let [port] = &bed.disciplines().unwrap()[..] else {
        panic!("one link is slow")
    };
    assert_eq!(
        [&port["dev"], &port["packets"], &port["drops"]],
        [&Value::from("port2"), &Value::from(came), &Value::from(40 - came)]
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

/// What a host's own queueing discipline drops is a class's loss, too.
#[test]
fn what_the_sending_kernel_refuses_is_counted() {
    let (true, Some(programs)) = (is_root(), programs()) else {
        return;
    };
    let bed = Bed::new(&BedConfig::default()).unwrap();
    let slow = "qdisc add dev lm0 root tbf rate 1mbit burst 6200 limit 12112 overhead 24";
    let slow = Launch::new("tc").args(slow.split(' '));
    bed.left().spawn(slow).unwrap().finish().unwrap();
    let mut ends = Ends::stream("udp-blocking --burst 10", 1472, [0.05, 0.5]);
    ends.rate = Some(1000.0 * 1472.0 * 8.0);
    let launch = |words: Vec<String>| Launch::new(programs.path("lm-bench")).args(words).goes_first();
    let mut receiver = bed.right().spawn(launch(ends.far())).unwrap();
    receiver.await_text("ready").unwrap();
    let sender = bed.left().spawn(launch(ends.near())).unwrap();
    let received = receiver.finish().unwrap().json().unwrap();
    let sent = sender.finish().unwrap().json().unwrap();
    let count = |report: &Value, name: &str| report[name].as_u64().unwrap();
    let (came, lost) = (count(&received, "messages"), count(&received, "lost_messages"));
    // The link takes 81 a second, and keeps 12; a burst has ten.
    assert!((1..=60).contains(&came) && lost > 5 * came, "{received}");
    // By the numbers of what came all that was due is there, wherever there was no room for it: 500 in the mean.
    assert!((200..=900).contains(&(came + lost)), "{received}");
    assert!(count(&sent, "messages") > came, "{sent}");
    assert_eq!(count(&received, "bytes"), came * 1472);
}

/// What `lm-bench compare` keeps of one round of these systems at a slow port; for a tenth of 100 Mbit/s as long as words say.
fn compared(bed: &Bed, programs: &Programs, line: &str) -> Vec<Value> {
    let file = std::env::temp_dir().join(format!(
        "port-{}-{:?}.json",
        std::process::id(),
        std::thread::current().id()
    ));
    // What stands between single quotes is one word.
    let parts = line.split('\'').enumerate().map(|(at, part)| match at % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    let mut words: Vec<String> = parts.flat_map(|words: Vec<String>| words).collect();
    words.extend(["--rounds", "1", "--json", file.to_str().unwrap()].map(str::to_owned));
    compare::between(bed, programs, words).unwrap();
    let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert!(report["failures"].is_null(), "{report:#}");
    rows.iter().map(|row| row["rounds"][0].clone()).collect()
}

fn number(round: &Value, place: &str) -> f64 {
    round
        .pointer(place)
        .and_then(Value::as_f64)
        .unwrap_or_else(|| panic!("no {place} in {round}"))
}

/// The part of messages that did not come.
fn lost(round: &Value, of: &str) -> f64 {
    let [came, lost] = ["messages", "lost_messages"].map(|name| number(round, &format!("{of}/{name}")));
    lost / (came + lost)
}

/// The words of table 4 on a network ten times as slow, which hardly any machine is too slow for.
const TABLE_4: &str = "--tasks stream --sizes 1472 --seconds 3 --warm-up 1 --bit-rate 471.04kbit --load 'udp-blocking \
                       --bytes 1472 --bits 2944kbit --burst 10' --systems";

fn at_slow_port() -> Bed {
    let port = Port {
        rate: BitRate(10_000_000),
        frames: 32,
    };
    Bed::new(&compare::at_port(3, port, 1500)).unwrap()
}

/// Table 4 on a network ten times as slow, which hardly any machine is too slow for.
#[test]
fn table_4_loses_what_the_port_cannot_pass() {
    let (true, Some(programs)) = (is_root(), programs()) else {
        return;
    };
    let bed = at_slow_port();
    let dropped = || {
        let mut disciplines = bed.disciplines().unwrap().into_iter();
        let port = disciplines.find(|one| one["dev"] == "port2");
        port.unwrap()["drops"].as_u64().unwrap()
    };
    let before = dropped();
    let round = &compared(&bed, &programs, &format!("{TABLE_4} udp-blocking"))[0];
    // Three senders, each of 40 and 250 a second.
    let due =
        |of: &str| number(round, &format!("{of}/messages")) + number(round, &format!("{of}/lost_messages"));
    assert!(
        (300.0..=420.0).contains(&due("")) && (1700.0..=2800.0).contains(&due("/load")),
        "{round}"
    );
    // The port sends 813 frames a second at most.
    let came = number(round, "/messages") / number(round, "/seconds")
        + number(round, "/load/messages") / number(round, "/load/seconds");
    assert!(came < 840.0, "{round}");
    assert!(lost(round, "") > 0.01 && lost(round, "/load") > 0.01, "{round}");
    // The port has dropped of it, beside what a busy machine did not send in time.
    assert!(dropped() > before, "{round}");
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
    until("the flood has begun", Duration::from_secs(10), || {
        Ok(received() >= 10)
    })
    .unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    child.wait().unwrap();
    assert!(namespaces_of(child.id()).is_empty());
}

/// On the same network others lose what they lose at their senders, and real time next to nothing.
#[test]
fn table_4_with_others_held_back_spares_real_time() {
    let (true, Some(programs)) = (is_root(), programs()) else {
        return;
    };
    let bed = at_slow_port();
    let line = format!("{TABLE_4} 'real-time --idle default --smoother 10Mbit'");
    let round = &compared(&bed, &programs, &line)[0];
    // Their queues are full: the kernel says so to the sender.
    assert!(lost(round, "/load") > 0.05, "{round}");
    assert!(lost(round, "") < lost(round, "/load") / 3.0, "{round}");
}

/// Round trips pass a TCP stream by, LM's beside its smoother and the kernel's by their mark.
#[test]
fn round_trips_and_tcp_share_a_slow_link() {
    let (true, Some(programs)) = (is_root(), programs()) else {
        return;
    };
    let port = Port {
        rate: BitRate(100_000_000),
        frames: 128,
    };
    let bed = Bed::new(&compare::at_port(1, port, 1500)).unwrap();
    let line = "--tasks round-trips --rate 400 --count 800 --seconds 2 --warm-up 1 --load 'tcp --congestion cubic' \
                --systems 'real-time --idle default --smoother 100Mbit,udp-blocking --expedited'";
    let rounds = compared(&bed, &programs, line);
    assert_eq!(rounds.len(), 2);
    for round in &rounds {
        let asked = number(round, "/messages") + number(round, "/lost_messages");
        assert_eq!(asked, 800.0, "{round}");
        assert!(lost(round, "") < 0.5, "{round}");
        let mbit_per_s = number(round, "/load/bytes") * 8e-6 / number(round, "/load/seconds");
        assert!((0.01..=100.0).contains(&mbit_per_s), "{round}");
        let times = ["p50_ns", "p99_ns", "max_ns"].map(|name| number(round, &format!("/{name}")));
        assert!(times.is_sorted(), "{round}");
    }
}
