//! A switch whose links are slow: what its port keeps and passes, what a cable takes, and what is told of datagrams
//! that do not come through.

use std::io::{BufRead as _, BufReader};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lm_measure::rate::BitRate;
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;
use xtask::bed::{Bed, BedConfig, Host, Launch, Port, until};
use xtask::bench::{Contender, Experiment, table_4, under_tcp};
use xtask::ends::Timetable;
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
    let now = clock_gettime(ClockId::Monotonic);
    let timetable = Timetable {
        port: 7168,
        size: 1472,
        begins_ns: now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64 + 500_000_000,
        seconds: 0.5,
        rate: 1000.0,
        burst: 10,
        is_answered: false,
    };
    let launch = |words: Vec<String>| Launch::new(programs.path("lm-bench")).args(words).goes_first();
    let mut receiver = bed.right().spawn(launch(timetable.far())).unwrap();
    receiver.await_text("ready").unwrap();
    let sent = bed.left().spawn(launch(timetable.near(1))).unwrap();
    let (sent, received) = (
        sent.finish().unwrap().json().unwrap(),
        receiver.finish().unwrap().json().unwrap(),
    );
    let count = |place: &str| sent.pointer(place).unwrap().as_u64().unwrap();
    let (due, late, refused) = (
        count("/offered/due"),
        count("/offered/late"),
        count("/offered/refused"),
    );
    // The link takes 81 a second, and keeps 12; a burst has ten, and some are sent on any machine.
    assert!(refused > 0, "{sent}");
    assert_eq!(count("/messages"), due - late - refused, "{sent}");
    assert_eq!(received["messages"], sent["messages"]);
    assert_eq!(received["bytes"], count("/messages") * 1472);
}

fn named<'a>(experiment: &'a Experiment, name: &str) -> &'a Contender {
    let mut all = experiment.contenders.iter();
    all.find(|one| one.name == name).unwrap()
}

/// Where nothing is smoothed there is no rate.
fn is_told(report: &Value, place: &str) -> bool {
    let found = report.pointer(place);
    found.is_some_and(|found| found.is_number() || (place.ends_with("/credits_mean") && found.is_null()))
}

/// Table 4 on a network ten times as slow, which hardly any machine is too slow for. What does not add up fails in
/// `table_4` itself.
#[test]
fn table_4_loses_what_the_port_cannot_pass() {
    let (true, Some(programs)) = (is_root(), programs()) else {
        return;
    };
    let experiment = table_4(BitRate(10_000_000), 3.0);
    let contender = named(&experiment, "kernel UDP, no smoother");
    let report = &(contender.measure)(&Bed::new(&contender.bed).unwrap(), &programs).unwrap();
    assert!(
        experiment.columns.iter().all(|place| is_told(report, place)),
        "{report}"
    );
    let number = |place: &str| report.pointer(place).unwrap().as_f64().unwrap();
    let all = ["/real_time/due", "/others/due"].map(number);
    assert!(
        (320.0..=400.0).contains(&all[0]) && (1800.0..=2700.0).contains(&all[1]),
        "{report}"
    );
    let lost = number("/lost_percent") / 100.0 * (all[0] + all[1]);
    let counted: f64 = ["/drops/port", "/drops/cables", "/drops/sockets"]
        .map(number)
        .iter()
        .sum();
    let senders = number("/lost_at_senders_percent") / 100.0 * (all[0] + all[1]);
    assert!((lost - counted - senders).abs() < 0.5, "{report}");
    // The port sends 813 frames a second at most, and what port and cables keep when the timetables are over.
    let least = all[0] + all[1] - 813.0 * 3.0 - 100.0;
    assert!(least > 0.0 && lost >= least, "{least} at least: {report}");
    assert!(number("/floor_percent") > 0.0, "{report}");
    assert!(
        number("/real_time/lost_percent") > 1.0 && number("/others/lost_percent") > 1.0,
        "{report}"
    );
    let delays = ["p50", "p99", "max"].map(|name| number(&format!("/real_time/delay_us/{name}")));
    // Two links of 1.23 ms a frame, when the buckets are empty; in the port 31 more are before the last one.
    assert!(delays.is_sorted() && delays[1] > 10_000.0, "{report}");
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
    let experiment = table_4(BitRate(10_000_000), 3.0);
    for name in ["LM, paced", "LM, others held by hand"] {
        let contender = named(&experiment, name);
        let report = &(contender.measure)(&Bed::new(&contender.bed).unwrap(), &programs).unwrap();
        assert!(
            experiment.columns.iter().all(|place| is_told(report, place)),
            "{report}"
        );
        let number = |place: &str| report.pointer(place).unwrap().as_f64().unwrap();
        assert!((320.0..=400.0).contains(&number("/real_time/due")), "{report}");
        // Their queues are full: the kernel says so to who sends.
        assert!(number("/others/refused") > 0.0, "{report}");
        assert!(number("/others/lost_percent") > 5.0, "{report}");
        assert!(
            number("/real_time/lost_percent") < number("/others/lost_percent") / 3.0,
            "{name}: {report}"
        );
        let smoothed = report["real_time"]["smoothed"].as_array().unwrap();
        assert_eq!(smoothed.len(), if name == "LM, paced" { 3 } else { 0 });
        for one in smoothed {
            assert!(one["dropped"].as_u64() > Some(0), "{one}");
            assert!(
                (40..=790).contains(&one["credits_least"].as_u64().unwrap()),
                "{one}"
            );
        }
    }
}

/// Round trips pass a TCP stream by, LM's beside its smoother and the kernel's beside HTB at the same rate.
#[test]
fn round_trips_and_tcp_share_a_slow_link() {
    let (true, Some(programs)) = (is_root(), programs()) else {
        return;
    };
    let experiment = under_tcp(BitRate(100_000_000), "cubic", 2.0);
    for name in ["LM, paced", "kernel UDP, EF, TCP held by hand"] {
        let contender = named(&experiment, name);
        let report = &(contender.measure)(&Bed::new(&contender.bed).unwrap(), &programs).unwrap();
        let number = |place: &str| report.pointer(place).and_then(Value::as_f64).expect(place);
        for place in experiment.columns {
            number(place);
        }
        assert!((720.0..=880.0).contains(&number("/due")), "{report}");
        // What a busy machine did not send in time is lost, too, and most of the rest is answered.
        let sent = number("/due") - number("/offered/late") - number("/offered/refused");
        let answered = number("/due") * (1.0 - number("/lost_percent") / 100.0);
        assert!(sent * 0.5 < answered && answered <= sent + 0.5, "{report}");
        assert_eq!(report["tcp"]["congestion"], "cubic");
        assert!((0.01..=100.0).contains(&number("/tcp/link_percent")), "{report}");
        assert!((5.0..=8127.0).contains(&number("/held_frames")), "{report}");
        let times = ["p50", "p99", "max"].map(|name| number(&format!("/time_us/{name}")));
        assert!(times.is_sorted(), "{report}");
    }
}
