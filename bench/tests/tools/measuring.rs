//! `lm-bench`: every pair of ends and programs on real hosts. Speeds are not judged here, only that what is counted is true.

use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, SENDER, Tool, wait_until};

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

/// Runs a stream; gives the receiver's and the sender's report.
pub(crate) fn stream(bed: &Bed, receiving: &str, sending: &str) -> (Value, Value) {
    let receiver = receiver(bed, &format!("{receiving} --warmup 0.05 --seconds 0.2"));
    let sent = sender(bed, &format!("{sending} --seconds 1"));
    (receiver.end().expect_code(0).json(), sent)
}

/// What the ends of a stream are told: a second of it is sent, 0.2 count at the far end after `warm_up`.
fn stream_ends(transport: &str, size: u64, [sending, receiving]: [f64; 2]) -> [String; 2] {
    let task = |seconds| json!({"stream": {"warm_up": 0.05, "seconds": seconds, "rate": null}});
    ends(transport, size, [task(sending), task(receiving)])
}

/// Command lines of a near and a far end.
fn ends(transport: &str, size: u64, [near, far]: [Value; 2]) -> [String; 2] {
    [("near", near), ("far", far)].map(|(side, task)| {
        let spec = json!({
            "system": transport, "task": task, "size": size, "address": format!("{RECEIVER}:7168"), "mtu": 1500,
                "mode": "auto",
        });
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
    let pace = bed.path("pace");
    for (mode, busy_poll, sender_queue, receiver_queue) in [
        ("native", "off", 1, 1),
        ("native", "udp", 1, 1),
        ("generic", "off", 0, 0),
    ] {
        let both = format!("--interface {INTERFACE} --pace {}", pace.display());
        let (received, sent) = stream(
            &bed,
            &format!("bare recv {both} --mode {mode} --queue {receiver_queue} --busy-poll {busy_poll}"),
            &format!(
                "bare send {both} --queue {sender_queue} --payload 1000 {}",
                bare_addresses(&bed)
            ),
        );
        let packets = number(&received, "messages");
        assert!(packets > 0, "{mode} {busy_poll}: {received}");
        assert_eq!(
            number(&received, "bytes"),
            packets * 1000,
            "{mode} {busy_poll}: {received}"
        );
        assert_eq!(
            number(&received, "lost_messages"),
            0,
            "{mode} {busy_poll}: {received}"
        );
        assert_eq!(number(&received, "dropped"), 0, "{mode} {busy_poll}: {received}");
        assert!(
            packets <= number(&sent, "messages"),
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
    let receiver = receiver(&bed, &format!("bare recv {both} --seconds 1"));
    let sending = format!(
        "bare send {both} --credit 768 --payload 1472 --seconds 3 {}",
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
        number(&received, "messages") > 0 && number(&received, "lost_messages") == 0,
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
                &format!("bare recv {both}"),
                &format!("bare send {both} --in-flight 16 {to}"),
            );
            let packets = number(&received, "messages");
            assert!(packets > 0, "{mtu} {mode}: {received}");
            assert_eq!(
                number(&received, "bytes"),
                packets * payload,
                "{mtu} {mode}: {received}"
            );
            assert_eq!(number(&received, "lost_messages"), 0, "{mtu} {mode}: {received}");
            let pong = receiver(&bed, &format!("bare pong {end}"));
            let report = sender(&bed, &format!("bare ping {end} --count 20 {to}"));
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
    let receiver = receiver(&bed, &format!("bare pong --interface {INTERFACE} --mode native"));
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
    let round_trips = |transport: &str, rate: Option<u32>| {
        let task = json!({"round-trips": {"count": 500, "seconds": 60, "rate": rate}});
        ends(transport, 64, [task.clone(), task])
    };
    let bare = format!("--interface {INTERFACE} --mode native");
    let programs = [
        round_trips("udp-blocking", None),
        round_trips("udp-spinning", Some(5000)),
        [
            format!("bare ping {bare} {} --count 500", bare_addresses(&bed)),
            format!("bare pong {bare}"),
        ],
        round_trips("lm", None),
    ];
    for [asking, answering] in programs {
        let answering = receiver(&bed, &answering);
        let report = sender(&bed, &asking);
        assert_eq!(number(&report, "messages"), 500, "{report}");
        let trips: Vec<(u64, u64)> = serde_json::from_value(report["round_trips"].clone()).unwrap();
        assert_eq!(trips.iter().map(|(_, count)| count).sum::<u64>(), 500, "{report}");
        assert!(trips[0].0 > 500, "no round trip is that short: {report}");
        assert!(trips.is_sorted(), "{report}");
        answering.signal(Signal::TERM);
        answering.end();
        wait_until("a program stayed attached", || {
            !bed.has_program(Host::Receiver) && !bed.has_program(Host::Sender)
        });
    }
}
