//! `lm-bench`: every pair of programs on real hosts. Speeds are not judged here, only that what is counted is true.

use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, SENDER, Tool, wait_until};

pub(crate) fn lm_bench(bed: &Bed, host: Host, line: &str) -> Command {
    let mut command = bed.command(host, env!("CARGO_BIN_EXE_lm-bench"));
    command.args(["--time-limit", "15"]).args(line.split_whitespace());
    command
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

/// Runs a stream; gives the receiver's and the sender's report.
pub(crate) fn stream(bed: &Bed, receiving: &str, sending: &str) -> (Value, Value) {
    let receiver = receiver(bed, &format!("{receiving} --warmup 0.05 --seconds 0.2"));
    let sent = sender(bed, &format!("{sending} --seconds 1"));
    (receiver.end().expect_code(0).json(), sent)
}

/// Whom a bare program on the sending host talks to.
pub(crate) fn bare_addresses(bed: &Bed) -> String {
    let (from, to) = (bed.mac(Host::Sender), bed.mac(Host::Receiver));
    format!("--from {SENDER} --from-mac {from} --to {RECEIVER} --to-mac {to}")
}

pub(crate) fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {report}"))
}

#[test]
fn udp_stream_counts_what_arrived() {
    let Some(bed) = Bed::new() else { return };
    let to = format!("{RECEIVER}:7400");
    let (received, sent) = stream(
        &bed,
        &format!("udp-recv --bind {to}"),
        &format!("udp-send --to {to} --message-size 1M"),
    );
    let (bytes, packets) = (number(&received, "bytes"), number(&received, "packets"));
    // 1 MiB goes as 17 datagrams of 61,680 or 61,681 bytes.
    assert!(
        packets > 0 && bytes.div_ceil(packets).abs_diff(61_681) <= 1,
        "{received}"
    );
    assert!(packets <= number(&sent, "packets"), "{received} {sent}");
    assert_eq!(
        sent["receiver"]["bytes"], received["bytes"],
        "the sender has the receiver's report"
    );
}

#[test]
fn tcp_streams_count_whole_messages() {
    let Some(bed) = Bed::new() else { return };
    let to = format!("{RECEIVER}:7500");
    for (message_size, len) in [("1K", 1 << 10), ("1M", 1_u64 << 20)] {
        let (received, sent) = stream(
            &bed,
            &format!("tcp-stream-recv --bind {to} --message-size {message_size}"),
            &format!("tcp-stream-send --to {to} --message-size {message_size}"),
        );
        let messages = number(&received, "messages");
        assert!(messages > 0, "{message_size}: {received}");
        assert_eq!(number(&received, "bytes"), messages * len, "{received}");
        assert!(messages < number(&sent, "messages"), "{received} {sent}");
        assert_eq!(sent["receiver"], received, "the sender has the receiver's report");
        assert!(!sent["congestion"].as_str().unwrap().is_empty(), "{sent}");
    }
}

#[test]
fn a_tcp_stream_that_stops_early_is_no_measurement() {
    let Some(bed) = Bed::new() else { return };
    let to = format!("{RECEIVER}:7500");
    let receiver = receiver(&bed, &format!("tcp-stream-recv --bind {to} --seconds 10"));
    sender(&bed, &format!("tcp-stream-send --to {to} --seconds 0.1"));
    let ended = receiver.end();
    assert!(
        ended.expect_code(1).stderr.contains("the sender stopped"),
        "{ended:?}"
    );
}

#[test]
fn udp_stream_without_sender_ends() {
    let Some(bed) = Bed::new() else { return };
    let to = format!("{RECEIVER}:7400");
    let receiver = receiver(&bed, &format!("udp-recv --bind {to} --seconds 10"));
    sender(
        &bed,
        &format!("udp-send --to {to} --message-size 1K --seconds 0.1"),
    );
    let ended = receiver.end();
    assert!(
        ended.expect_code(1).stderr.contains("the sender stopped"),
        "{ended:?}"
    );
}

#[test]
fn bare_streams_lose_nothing() {
    let Some(bed) = Bed::new() else { return };
    let pace = bed.path("pace");
    for (mode, busy_poll, sender_queue, receiver_queue) in [
        ("native", "off", 1, 1),
        ("native", "udp", 1, 1),
        ("generic", "off", 0, 0),
    ] {
        let both = format!("--interface {INTERFACE} --pace {}", pace.display());
        let (received, sent) = stream(
            &bed,
            &format!("bare-recv {both} --mode {mode} --queue {receiver_queue} --busy-poll {busy_poll}"),
            &format!(
                "bare-send {both} --queue {sender_queue} --payload 1000 {}",
                bare_addresses(&bed)
            ),
        );
        let packets = number(&received, "packets");
        assert!(packets > 0, "{mode} {busy_poll}: {received}");
        assert_eq!(
            number(&received, "bytes"),
            packets * 1000,
            "{mode} {busy_poll}: {received}"
        );
        assert_eq!(
            number(&received, "lost_packets"),
            0,
            "{mode} {busy_poll}: {received}"
        );
        assert_eq!(number(&received, "dropped"), 0, "{mode} {busy_poll}: {received}");
        assert!(
            packets <= number(&sent, "packets"),
            "{mode} {busy_poll}: {received} {sent}"
        );
        let polled = number(&received, "napi_id") > 0;
        assert_eq!(polled, busy_poll == "udp", "{mode} {busy_poll}: {received}");
        wait_until("the program stayed attached", || !bed.has_program(Host::Receiver));
    }
}

/// What LM's own recipe has, the yardstick can have: interrupts of the polled queue deferred, polls of 128, 768 packets by credit.
#[test]
fn a_bare_receiver_keeps_its_queue_as_lm_does() {
    let Some(bed) = Bed::new() else { return };
    let both = format!(
        "--interface {INTERFACE} --queue 1 --busy-poll udp --busy-budget 128 --keep-napi --posted 1536 --pace {}",
        bed.path("pace").display()
    );
    let receiver = receiver(&bed, &format!("bare-recv {both} --seconds 1"));
    let sending = format!(
        "bare-send {both} --credit 768 --payload 1472 --seconds 3 {}",
        bare_addresses(&bed)
    );
    let sending = Tool::start(lm_bench(&bed, Host::Sender, &sending));
    wait_until("the queue's interrupts were not deferred", || {
        bed.napis_kept(Host::Receiver) == 1
    });
    let received = receiver.end().expect_code(0).json();
    sending.end().expect_code(0);
    assert_eq!(received["kept"], true, "{received}");
    assert!(
        number(&received, "packets") > 0 && number(&received, "lost_packets") == 0,
        "{received}"
    );
    assert_eq!(number(&received, "dropped"), 0, "{received}");
}

/// Packets of several chunks, to the longest there is, one way and to and fro.
#[test]
fn bare_packets_may_be_long() {
    let Some(bed) = Bed::new() else { return };
    let pace = bed.path("pace");
    for (mtu, payload) in [(4000, 3972), (9000, 8972), (65_535, 65_507)] {
        for host in [Host::Sender, Host::Receiver] {
            bed.ip(host, &format!("link set {INTERFACE} mtu {mtu}"));
        }
        for mode in ["native", "generic"] {
            let end = format!("--interface {INTERFACE} --long --posted 1024 --mode {mode}");
            let both = format!("{end} --pace {}", pace.display());
            let to = format!("--payload {payload} {}", bare_addresses(&bed));
            let (received, _) = stream(
                &bed,
                &format!("bare-recv {both}"),
                &format!("bare-send {both} --in-flight 16 {to}"),
            );
            let packets = number(&received, "packets");
            assert!(packets > 0, "{mtu} {mode}: {received}");
            assert_eq!(
                number(&received, "bytes"),
                packets * payload,
                "{mtu} {mode}: {received}"
            );
            assert_eq!(number(&received, "lost_packets"), 0, "{mtu} {mode}: {received}");
            let pong = receiver(&bed, &format!("bare-pong {end}"));
            let report = sender(&bed, &format!("bare-ping {end} --count 20 {to}"));
            assert_eq!(number(&report, "count"), 20, "{mtu} {mode}: {report}");
            pong.signal(Signal::TERM);
            pong.end();
            wait_until("the program stayed attached", || !bed.has_program(Host::Receiver));
        }
    }
}

#[test]
fn a_killed_bare_program_leaves_nothing_attached() {
    let Some(bed) = Bed::new() else { return };
    let receiver = receiver(&bed, &format!("bare-pong --interface {INTERFACE} --mode native"));
    assert!(bed.has_program(Host::Receiver));
    receiver.signal(Signal::KILL);
    receiver.end();
    wait_until("the program stayed attached", || !bed.has_program(Host::Receiver));
}

#[test]
fn lm_streams_lose_and_copy_nothing() {
    let Some(bed) = Bed::new() else { return };
    for (message_size, len) in [("1K", 1 << 10), ("64K", 1 << 16), ("1M", 1_u64 << 20)] {
        let both = format!("--interface {INTERFACE} --message-size {message_size}");
        let (received, sent) = stream(
            &bed,
            &format!("lm-stream-recv {both}"),
            &format!("lm-stream-send {both} --to {RECEIVER}"),
        );
        let messages = number(&received, "messages");
        assert!(messages > 0, "{message_size}: {received}");
        assert_eq!(
            number(&received, "bytes"),
            messages * len,
            "{message_size}: {received}"
        );
        assert_eq!(
            number(&received, "lost_messages"),
            0,
            "{message_size}: {received}"
        );
        assert_eq!(
            number(&received, "user_copied_bytes"),
            0,
            "{message_size}: {received}"
        );
        assert_eq!(
            sent["receiver"]["bytes"], received["bytes"],
            "{message_size}: the sender has the report"
        );
    }
}

#[test]
fn round_trips_are_whole_and_ordered() {
    let Some(bed) = Bed::new() else { return };
    let bare = format!("--interface {INTERFACE} --mode native");
    let to = format!("{RECEIVER}:7400");
    let programs = [
        (format!("udp-pong --bind {to}"), format!("udp-ping --to {to}")),
        (
            format!("udp-pong --bind {to} --spin"),
            format!("udp-ping --to {to} --spin --rate 5000 --histogram"),
        ),
        (
            format!("bare-pong {bare}"),
            format!("bare-ping {bare} {}", bare_addresses(&bed)),
        ),
        (
            format!("lm-pong --interface {INTERFACE}"),
            format!("lm-ping --interface {INTERFACE} --to {RECEIVER}"),
        ),
    ];
    for (answering, asking) in programs {
        let answering = receiver(&bed, &answering);
        let report = sender(&bed, &format!("{asking} --count 500"));
        assert_eq!(number(&report, "count"), 500, "{report}");
        let at = |name: &str| report["rtt_us"][name].as_f64().unwrap();
        assert!(at("min") > 0.5, "no round trip is that short: {report}");
        let ordered = ["min", "p50", "p90", "p99", "p999", "max"].map(at);
        assert!(ordered.is_sorted(), "{report}");
        if let Some(counts) = report["rtt_counts"].as_array() {
            let trips = counts.iter().filter_map(|count| count[1].as_u64());
            assert_eq!(trips.sum::<u64>(), 500, "{report}");
        }
        answering.signal(Signal::TERM);
        answering.end();
        wait_until("a program stayed attached", || {
            !bed.has_program(Host::Receiver) && !bed.has_program(Host::Sender)
        });
    }
}

#[test]
fn binding_tells_the_truth_about_veth() {
    let Some(bed) = Bed::new() else { return };
    let bind = |line: &str| {
        let line = format!("bind --interface {INTERFACE} --memory 4M {line}");
        Tool::start(lm_bench(&bed, Host::Receiver, &line)).end()
    };
    for mode in ["auto", "copy"] {
        let report = bind(&format!("--mode {mode}")).expect_code(0).json();
        let queues = report["queues"].as_array().expect("a list of queues");
        assert_eq!(queues.len(), 2, "{report}");
        assert!(
            queues
                .iter()
                .all(|queue| queue["zero_copy"] == false && queue["error"].is_null()),
            "{report}"
        );
    }
    // veth has no zero-copy; without huge pages it does not come that far.
    let ended = bind("--mode zero-copy");
    if ended.status.success() {
        let report = ended.json();
        assert!(report["queues"][0]["error"].is_string(), "{report}");
    } else {
        assert!(ended.stderr.contains("reserve huge pages"), "{}", ended.stderr);
    }
    let line = "bind --interface none0";
    let ended = Tool::start(lm_bench(&bed, Host::Receiver, line)).end();
    ended.expect_code(1);
    assert!(ended.stderr.contains("none0"), "{}", ended.stderr);
}
