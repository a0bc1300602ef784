//! `lm-send` and `lm-recv` as processes on two hosts on a veth pair: what arrives, and what is reported.

use std::fs;
use std::io::Write;
use std::thread;

use crate::bed::{Bed, Host, RECEIVER, content, expect_files, names};

#[test]
fn files_of_many_sizes_into_a_directory() {
    let Some(bed) = Bed::new() else { return };
    let (receiver, directory) = bed.recv_into("in", &["--json"]);
    let mut total = 0;
    let mut number = 0;
    for (len, message_size) in [
        (1, "1M"),
        (1447, "1M"),
        (1448, "1M"),
        (1449, "1M"),
        (65_537, "1M"),
        (65_537, "64K"),
        (10_000, "1448"),
        (10_000, "1449"),
        (5 << 20, "5M"),
        ((5 << 20) + 3, "1M"),
    ] {
        let file = bed.file("file", len);
        // What is counted is what lands.
        let sent = bed.send_to_end(&["--message-size", message_size, file.to_str().unwrap()]);
        sent.expect_code(0);
        number += 1;
        total += len as u64;
        let received = fs::read(directory.join(format!("transfer-{number:06}"))).unwrap();
        assert!(
            received == content(len),
            "{len} bytes in messages of {message_size} differ"
        );
        let report = sent.json();
        assert_eq!(report["bytes"], len);
        assert_eq!(report["transfers"], 1);
        assert_eq!(report["user_copied_bytes"], 0, "{len} in {message_size}");
        assert_eq!(report["wire"], "lm");
        assert!(report["latency_us"]["p50"].as_f64().unwrap() > 0.0);
    }
    let received = receiver.interrupt();
    received.expect_code(130);
    let report = received.json();
    assert_eq!(report["bytes"], total);
    assert_eq!(report["transfers"], number);
    assert_eq!(report["failed_transfers"], 0);
    assert_eq!(report["user_copied_bytes"], 0);
    assert!(names(&directory).iter().all(|name| !name.starts_with('.')));
}

/// The names and types that scripts rely on, at both ends.
#[test]
fn reports() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", 3 << 20);
    let (out, hgrm, pcap) = (bed.path("out"), bed.path("x.hgrm"), bed.path("x.pcap"));
    let receiver = bed.recv(&["--output", out.to_str().unwrap(), "--count", "1", "--json"]);
    let sent = bed.send_to_end(&[
        "--histogram",
        hgrm.to_str().unwrap(),
        "--pcap",
        pcap.to_str().unwrap(),
        "--stats",
        "0.01",
        file.to_str().unwrap(),
    ]);
    let received = receiver.end();
    for ended in [sent.expect_code(0), received.expect_code(0)] {
        let report = ended.json();
        for name in [
            "bytes",
            "messages",
            "manifests_requested",
            "missing_bytes",
            "transfers",
            "failed_transfers",
            "user_copied_bytes",
            "messages_one_copy",
            "fragments_one_copy",
            "restored_bytes",
        ] {
            assert!(report[name].is_u64(), "{name} in {report}");
        }
        for name in ["seconds", "gbit_per_s"] {
            assert!(report[name].as_f64().unwrap() > 0.0, "{name} in {report}");
        }
        for name in ["p50", "p90", "p99", "p999", "max"] {
            assert!(report["latency_us"][name].is_f64(), "{name} in {report}");
        }
        assert!(report["mode"].as_str().unwrap().starts_with("copy-"), "{report}");
        assert_eq!(report["wire"], "lm");
        assert_eq!(report["messages"], 3);
        assert!(report["drops"].is_object());
        assert!(report.get("error").is_none());
    }
    let histogram = fs::read_to_string(hgrm).unwrap();
    assert!(
        histogram.contains("Total count    =            3]"),
        "{histogram}"
    );
    // A packet for every fragment at least.
    assert!(fs::metadata(pcap).unwrap().len() > 3 << 20);
    assert!(!bed.has_program(Host::Sender) && !bed.has_program(Host::Receiver));
}

#[test]
fn standard_input_to_standard_output() {
    let Some(bed) = Bed::new() else { return };
    for (len, message_size) in [
        (1, "1M"),
        (3000, "1000"),
        (300_000, "100000"),
        (250_000, "100000"),
    ] {
        let receiver = bed.recv(&["--output", "-", "--count", "1"]);
        let mut sender = bed.send(&["--json", "--message-size", message_size, "-"]);
        let mut stdin = sender.stdin();
        let writer = thread::spawn(move || {
            for part in content(len).chunks(70_001) {
                // Longer than a pipe: each waits for the sender to have read of it.
                stdin.write_all(part).unwrap();
            }
        });
        writer.join().unwrap();
        let sent = sender.end();
        sent.expect_code(0);
        let received = receiver.end();
        received.expect_code(0);
        assert!(received.stdout == content(len), "{len} bytes differ");
        assert_eq!(sent.json()["bytes"], len);
    }
}

#[test]
fn count_and_repeat() {
    let Some(bed) = Bed::new() else { return };
    let directory = bed.directory("in");
    let file = bed.file("file", 200_000);
    let receiver = bed.recv(&["--output", directory.to_str().unwrap(), "--count", "3", "--json"]);
    let sent = bed.send_to_end(&[
        "--repeat",
        "3",
        "--window",
        "2",
        "--message-size",
        "64K",
        file.to_str().unwrap(),
    ]);
    assert_eq!(sent.expect_code(0).json()["transfers"], 3);
    let received = receiver.end();
    assert_eq!(received.expect_code(0).json()["bytes"], 600_000);
    let files = ["transfer-000001", "transfer-000002", "transfer-000003"];
    expect_files(&directory, 200_000, &files);
}

#[test]
fn ip_fragments_to_lm() {
    let Some(bed) = Bed::new() else { return };
    let out = bed.path("out");
    let file = bed.file("file", 150_000);
    let receiver = bed.recv(&["--output", out.to_str().unwrap(), "--count", "1", "--json"]);
    let sent = bed.send_to_end(&["--wire", "ipfrag", file.to_str().unwrap()]);
    assert_eq!(sent.expect_code(0).json()["wire"], "ipfrag");
    let report = receiver.end().expect_code(0).json();
    assert_eq!(report["wire"], "ipfrag");
    assert_eq!(report["messages"], 3);
    assert!(fs::read(out).unwrap() == content(150_000));
}

/// Without admission and without a place of the landing queue.
#[test]
fn by_the_one_copy_path() {
    let Some(bed) = Bed::new() else { return };
    const LEN: usize = 5_000_000;
    let out = bed.path("out");
    let file = bed.file("file", LEN);
    let receiver = bed.recv(&["--output", out.to_str().unwrap(), "--count", "1", "--json"]);
    let sent = bed.send_to_end(&["--one-copy", file.to_str().unwrap()]);
    assert_eq!(sent.expect_code(0).json()["messages_one_copy"], 5);
    let report = receiver.end().expect_code(0).json();
    // The user space copy into the message's place: the gate let nothing land.
    assert!(
        report["user_copied_bytes"].as_u64() >= Some(LEN as u64),
        "{report}"
    );
    assert!(fs::read(out).unwrap() == content(LEN));
}

/// The paper's wire mode is plain IP: the kernel of a host without LM reassembles each message to one datagram.
#[test]
fn ip_fragments_to_an_ordinary_socket() {
    let Some(bed) = Bed::new() else { return };
    let socket = bed.udp_socket(Host::Receiver, &format!("{RECEIVER}:7168"));
    let file = bed.file("file", 150_000);
    let sender = bed.send(&["--json", "--wire", "ipfrag", file.to_str().unwrap()]);
    let mut datagram = vec![0; 70_000];
    let mut received = Vec::new();
    for wanted in [65_507, 65_507, 18_986] {
        let len = socket.recv(&mut datagram).unwrap();
        assert_eq!(len, wanted);
        received.extend_from_slice(&datagram[..len]);
    }
    assert!(received == content(150_000));
    let sent = sender.end();
    sent.expect_code(0);
    assert!(sent.stderr.contains("plain UDP datagrams"), "{}", sent.stderr);
    assert_eq!(sent.json()["bytes"], 150_000);
    assert_eq!(sent.json()["messages"], 3);

    // One short datagram: not even fragmented.
    let file = bed.file("short", 100);
    let sender = bed.send(&["--json", "--wire", "ipfrag", file.to_str().unwrap()]);
    assert_eq!(socket.recv(&mut datagram).unwrap(), 100);
    assert!(datagram[..100] == content(100));
    sender.end().expect_code(0);
}

#[test]
fn a_hundred_megabytes_in_one_message() {
    let Some(bed) = Bed::new() else { return };
    let out = bed.path("out");
    let len = 100 << 20;
    let file = bed.file("file", len);
    let receiver = bed.recv(&["--output", out.to_str().unwrap(), "--count", "1", "--json"]);
    // The receiver takes memory for it first, which may be long for who does not wait.
    let sent = bed.send_to_end(&["--message-size", "1G", file.to_str().unwrap()]);
    assert_eq!(sent.expect_code(0).json()["messages"], 1);
    assert_eq!(receiver.end().expect_code(0).json()["user_copied_bytes"], 0);
    assert!(fs::read(out).unwrap() == content(len));
}

/// How long a transfer takes says that no more left than was allowed. That not much less did is shown where no other program
/// takes part: on the simulated NIC.
#[test]
fn a_rate_limit_is_kept() {
    let Some(bed) = Bed::new() else { return };
    const LEN: usize = 1 << 20;
    let file = bed.file("file", LEN);
    for (message_size, packet_payload) in [("64K", 1448.0), ("1000", 1000.0)] {
        let out = bed.path("out");
        let receiver = bed.recv(&["--output", out.to_str().unwrap(), "--count", "1", "--json"]);
        let sent = bed.send_to_end(&[
            "--rate",
            "40M",
            "--message-size",
            message_size,
            file.to_str().unwrap(),
        ]);
        sent.expect_code(0);
        receiver.end().expect_code(0);
        assert!(fs::read(&out).unwrap() == content(LEN));
        // 66 bytes of headers in each packet; four full packets may go at once, and one when all is sent but the last.
        let bits = LEN as f64 / packet_payload * (packet_payload + 66.0) * 8.0;
        let least = (bits - 5.0 * 1514.0 * 8.0) / 40e6;
        let seconds = sent.json()["seconds"].as_f64().unwrap();
        assert!(seconds >= least, "{seconds} s, where {least} s are needed");
        fs::remove_file(&out).unwrap();
    }
    let refused = bed.send_to_end(&["--rate", "1kbit", file.to_str().unwrap()]);
    let line = &refused.expect_code(2).stderr;
    assert!(line.contains("write a rate from 100kbit"), "{line}");
}
