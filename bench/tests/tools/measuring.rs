//! `lm-bench`: every pair of ends and programs on real hosts. Speeds are not judged here, only that what is counted is true.

use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, Tool, wait_until};

pub(crate) fn lm_bench(bed: &Bed, host: Host, line: &str) -> Command {
    let mut command = bed.command(host, env!("CARGO_BIN_EXE_lm-bench"));
    command.args(["--time-limit", "15"]).args(words(line));
    command
}

/// Words of a line; what stands between single quotes is one.
fn words(line: &str) -> Vec<&str> {
    let parts = line.split('\'').enumerate();
    let words = parts.map(|(number, part)| match number % 2 {
        0 => part.split_whitespace().collect(),
        _ => vec![part],
    });
    words.collect::<Vec<_>>().concat()
}

/// Starts the receiving program, which says when it is ready.
pub(crate) fn receiver(bed: &Bed, line: &str) -> Tool {
    let tool = Tool::start(lm_bench(bed, Host::Receiver, line));
    tool.wait_for_line("ready");
    tool
}

pub(crate) fn sender(bed: &Bed, line: &str) -> Value {
    let ended = Tool::start(lm_bench(bed, Host::Sender, line)).end();
    ended.expect_code(0).json()
}

/// What the ends of a stream are told: a second of it is sent, 0.2 count at the far end after `warm_up`.
fn stream_ends(transport: &str, size: u64, [sending, receiving]: [f64; 2]) -> [String; 2] {
    let task = |seconds| json!({"stream": {"warm_up": 0.05, "seconds": seconds, "rate": null}});
    ends(transport, size, [task(sending), task(receiving)])
}

/// Command lines of bare ends, of which the receiver paces the sender: of a stream, or of round trips.
pub(crate) fn bare_ends(system: &str, size: u64, mode: &str, mtu: u32, round_trips: bool) -> [String; 2] {
    let stream = |seconds| json!({"stream": {"warm_up": 0.05, "seconds": seconds, "rate": null}});
    let trips = json!({"round-trips": {"count": 20, "seconds": 10, "rate": null}});
    let tasks = [stream(0.8), stream(0.2)];
    let tasks = if round_trips {
        [trips.clone(), trips]
    } else {
        tasks
    };
    let pace = (!round_trips).then(std::process::id);
    let more = json!({"mode": mode, "mtu": mtu, "queues": 2, "pace": pace});
    ends_with(system, size, tasks, &more)
}

/// Runs a bare stream; gives the receiver's and the sender's report.
pub(crate) fn bare_stream(bed: &Bed, [near, far]: [String; 2]) -> (Value, Value) {
    let receiver = receiver(bed, &far);
    let sent = sender(bed, &near);
    let received = receiver.end().expect_code(0).json();
    let _none = std::fs::remove_file(format!("/run/lm-bench/pace-{}", std::process::id()));
    (received, sent)
}

/// Command lines of a near and a far end.
fn ends(transport: &str, size: u64, tasks: [Value; 2]) -> [String; 2] {
    ends_with(transport, size, tasks, &json!({}))
}

/// The same, with words more.
fn ends_with(transport: &str, size: u64, [near, far]: [Value; 2], more: &Value) -> [String; 2] {
    [("near", near), ("far", far)].map(|(side, task)| {
        let mut spec = json!({
            "system": transport, "task": task, "size": size, "address": format!("{RECEIVER}:7168"), "mtu": 1500,
                "mode": "auto",
        });
        for (name, value) in more.as_object().unwrap() {
            spec[name] = value.clone();
        }
        format!("end {side} '{spec}' --interface {INTERFACE}")
    })
}

/// Runs a stream between two ends; gives the far one's and the near one's report.
pub(crate) fn measured_stream(bed: &Bed, transport: &str, size: u64) -> (Value, Value) {
    let [near, far] = stream_ends(transport, size, [0.8, 0.2]);
    let receiver = receiver(bed, &far);
    let sent = sender(bed, &near);
    (receiver.end().expect_code(0).json(), sent)
}

/// Runs round trips between two ends until there are as many as that; gives the asking one's report.
pub(crate) fn round_trips(bed: &Bed, transport: &str, size: u64, count: u64, rate: Option<u32>) -> Value {
    let task = json!({"round-trips": {"count": count, "seconds": 60, "rate": rate}});
    let [asking, answering] = ends(transport, size, [task.clone(), task]);
    let answering = receiver(bed, &answering);
    let report = sender(bed, &asking);
    assert_eq!(number(&report, "messages"), count, "{report}");
    answering.signal(Signal::TERM);
    answering.end();
    report
}

pub(crate) fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {report}"))
}

#[test]
fn udp_stream_counts_what_arrived() {
    let Some(bed) = Bed::new() else { return };
    // 1 MiB goes as 17 datagrams of 61,680 or 61,681 bytes.
    let (received, sent) = measured_stream(&bed, "udp-blocking", 1 << 20);
    let (bytes, messages) = (number(&received, "bytes"), number(&received, "messages"));
    assert!(messages > 0 && bytes >= (messages - 1) << 20, "{received}");
    assert!(messages <= number(&sent, "messages"), "{received} {sent}");
    // 1472 bytes go as one.
    let (received, sent) = measured_stream(&bed, "udp-blocking", 1472);
    let messages = number(&received, "messages");
    assert!(messages > 0, "{received}");
    assert_eq!(number(&received, "bytes"), messages * 1472, "{received}");
    assert!(messages <= number(&sent, "messages"), "{received} {sent}");
}

#[test]
fn lm_is_measured_with_digests_unless_it_is_named_so() {
    let Some(bed) = Bed::new() else { return };
    for (transport, integrity) in [("lm", "manifest"), ("lm --integrity none", "none")] {
        let (received, sent) = measured_stream(&bed, transport, 64 << 10);
        assert!(number(&received, "bytes") > 0, "{received}");
        assert_eq!(sent["integrity"], integrity, "{sent}");
    }
}

#[test]
fn tcp_streams_count_whole_messages() {
    let Some(bed) = Bed::new() else { return };
    for len in [1 << 10, 1_u64 << 20] {
        let (received, sent) = measured_stream(&bed, "tcp", len);
        let messages = number(&received, "messages");
        assert!(messages > 0, "{len}: {received}");
        assert_eq!(number(&received, "bytes"), messages * len, "{received}");
        assert!(messages < number(&sent, "messages"), "{received} {sent}");
        assert!(!sent["congestion"].as_str().unwrap().is_empty(), "{sent}");
    }
}

/// Runs a stream whose near end ends long before the far one has measured.
fn stopped_early(transport: &str) {
    let Some(bed) = Bed::new() else { return };
    let [near, far] = stream_ends(transport, 1 << 10, [0.05, 10.0]);
    let receiver = receiver(&bed, &far);
    sender(&bed, &near);
    let ended = receiver.end();
    assert!(
        ended.expect_code(1).stderr.contains("the sender stopped"),
        "{ended:?}"
    );
}

#[test]
fn a_tcp_stream_that_stops_early_is_no_measurement() {
    stopped_early("tcp");
}

#[test]
fn udp_stream_without_sender_ends() {
    stopped_early("udp-blocking");
}

#[test]
fn bare_streams_lose_nothing() {
    let Some(bed) = Bed::new() else { return };
    for (mode, system) in [
        ("copy", "bare"),
        ("copy", "bare --queue 0"),
        ("generic", "bare --queue 0"),
    ] {
        let (received, sent) = bare_stream(&bed, bare_ends(system, 1000, mode, 1500, false));
        let packets = number(&received, "messages");
        assert!(packets > 0, "{mode} {system}: {received}");
        assert_eq!(
            number(&received, "bytes"),
            packets * 1000,
            "{mode} {system}: {received}"
        );
        assert_eq!(
            number(&received, "lost_messages"),
            0,
            "{mode} {system}: {received}"
        );
        assert_eq!(
            received["mode"],
            if mode == "copy" {
                "native copy"
            } else {
                "generic copy"
            }
        );
        assert!(
            packets <= number(&sent, "messages"),
            "{mode} {system}: {received} {sent}"
        );
        wait_until("the program stayed attached", || !bed.has_program(Host::Receiver));
    }
}

/// What LM's own recipe has, the yardstick has: interrupts of the polled queue deferred.
#[test]
fn a_bare_receiver_keeps_its_queue_as_lm_does() {
    let Some(bed) = Bed::new() else { return };
    let [near, far] = bare_ends("bare", 1472, "copy", 1500, false);
    let receiver = receiver(&bed, &far);
    let sending = Tool::start(lm_bench(&bed, Host::Sender, &near));
    wait_until("the queue's interrupts were not deferred", || {
        bed.napis_kept(Host::Receiver) == 1
    });
    let received = receiver.end().expect_code(0).json();
    sending.end().expect_code(0);
    assert!(
        number(&received, "messages") > 0 && number(&received, "lost_messages") == 0,
        "{received}"
    );
}

/// Packets of several chunks, to the longest there is, one way and to and fro.
#[test]
fn bare_packets_may_be_long() {
    let Some(bed) = Bed::new() else { return };
    for (mtu, payload) in [(4000, 3972), (9000, 8972), (65_535, 65_507)] {
        for host in [Host::Sender, Host::Receiver] {
            bed.ip(host, &format!("link set {INTERFACE} mtu {mtu}"));
        }
        for mode in ["copy", "generic"] {
            let (received, _) = bare_stream(&bed, bare_ends("bare --queue 0", 1 << 20, mode, mtu, false));
            let packets = number(&received, "messages");
            assert!(packets > 0, "{mtu} {mode}: {received}");
            assert_eq!(
                number(&received, "bytes"),
                packets * payload,
                "{mtu} {mode}: {received}"
            );
            assert_eq!(number(&received, "lost_messages"), 0, "{mtu} {mode}: {received}");
            let [ping, pong] = bare_ends("bare", 1 << 20, mode, mtu, true);
            let pong = receiver(&bed, &pong);
            let report = sender(&bed, &ping);
            assert_eq!(number(&report, "messages"), 20, "{mtu} {mode}: {report}");
            pong.signal(Signal::TERM);
            pong.end();
            wait_until("the program stayed attached", || !bed.has_program(Host::Receiver));
        }
    }
}

#[test]
fn a_killed_bare_program_leaves_nothing_attached() {
    let Some(bed) = Bed::new() else { return };
    let [_, pong] = bare_ends("bare", 64, "copy", 1500, true);
    let receiver = receiver(&bed, &pong);
    assert!(bed.has_program(Host::Receiver));
    receiver.signal(Signal::KILL);
    receiver.end();
    wait_until("the program stayed attached", || !bed.has_program(Host::Receiver));
}

#[test]
fn lm_streams_lose_and_copy_nothing() {
    let Some(bed) = Bed::new() else { return };
    for len in [1 << 10, 1 << 16, 1_u64 << 20] {
        let (received, _) = measured_stream(&bed, "lm", len);
        let messages = number(&received, "messages");
        assert!(messages > 0, "{len}: {received}");
        assert_eq!(number(&received, "bytes"), messages * len, "{len}: {received}");
        assert_eq!(number(&received, "lost_messages"), 0, "{len}: {received}");
        assert_eq!(number(&received, "user_copied_bytes"), 0, "{len}: {received}");
    }
}

#[test]
fn round_trips_are_whole_and_ordered() {
    let Some(bed) = Bed::new() else { return };
    let rates = [None, Some(5000), None, None];
    for (transport, rate) in ["udp-blocking", "udp-spinning", "bare", "lm"]
        .into_iter()
        .zip(rates)
    {
        let report = round_trips(&bed, transport, 64, 500, rate);
        let trips: Vec<(u64, u64)> = serde_json::from_value(report["round_trips"].clone()).unwrap();
        assert_eq!(trips.iter().map(|(_, count)| count).sum::<u64>(), 500, "{report}");
        assert!(trips[0].0 > 500, "no round trip is that short: {report}");
        assert!(trips.is_sorted(), "{report}");
        wait_until("a program stayed attached", || {
            !bed.has_program(Host::Receiver) && !bed.has_program(Host::Sender)
        });
    }
}
