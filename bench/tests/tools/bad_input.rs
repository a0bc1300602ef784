//! What goes wrong between two hosts: each case is told in one line with a remedy, exits with a code above 0, and leaves
//! nothing attached and nothing half-written.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, SENDER, Tool, content, names, wait_until};
use lm_protocol::control::ControlMessage;
use rustix::process::Signal;

fn nothing_attached(bed: &Bed) {
    assert!(!bed.has_program(Host::Sender), "a program is left on the sender");
    assert!(
        !bed.has_program(Host::Receiver),
        "a program is left on the receiver"
    );
}

#[test]
fn the_receiver_refuses() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", 200_000);
    let file = file.to_str().unwrap();
    let out = bed.path("out");
    let out_text = out.to_str().unwrap();

    // Too large, told by the admission of the session.
    let receiver = bed.recv(&["--output", out_text, "--max-message-size", "64K"]);
    bed.send_to_end(&[file]).expect_error("65536");
    // The same receiver still takes what it likes; the output exists then.
    bed.send_to_end(&["--message-size", "64K", file]).expect_code(0);
    bed.send_to_end(&["--message-size", "64K", file])
        .expect_error("exists");
    assert!(fs::read(&out).unwrap() == content(200_000));
    receiver.interrupt().expect_code(130);

    // Known at the start.
    bed.recv_to_end(&["--interface", INTERFACE, "--output", out_text])
        .expect_error("--force");
    let receiver = bed.recv(&["--output", out_text, "--force", "--count", "1"]);
    let other = bed.path("other");
    fs::write(&other, b"other").unwrap();
    bed.send_to_end(&[other.to_str().unwrap()]).expect_code(0);
    receiver.end().expect_code(0);
    assert_eq!(fs::read(&out).unwrap(), b"other");

    // Not allowed.
    let (receiver, directory) = bed.recv_into("in", &["--allow", "192.0.2.0/24"]);
    bed.send_to_end(&[file]).expect_error("allow");
    receiver.interrupt().expect_code(130);
    assert!(names(&directory).is_empty());
    nothing_attached(&bed);
}

#[test]
fn interfaces_that_cannot_be_used() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", 1000);
    let file = file.to_str().unwrap();
    bed.recv_to_end(&["--interface", "nothing0"])
        .expect_error("nothing0");
    bed.send_to_end(&["--interface", "nothing0", file])
        .expect_error("nothing0");
    if cfg!(not(feature = "dpdk")) {
        let refused = bed.recv_to_end(&["--dpdk", "net_null0"]);
        refused.expect_error("--features dpdk");
    }

    for (kind, name, arguments) in [
        ("vlan", "vlan7", "link lm0 type vlan id 7"),
        ("bridge", "br0", "type bridge"),
        ("bond", "bond7", "type bond"),
    ] {
        if !bed.try_ip(Host::Receiver, &format!("link add {name} {}", arguments)) {
            println!("NOT IN THIS KERNEL: {kind} devices");
            continue;
        }
        bed.ip(Host::Receiver, &format!("link set {name} up"));
        // Only the VLAN device has a port here; it is the one to use.
        bed.recv_to_end(&["--interface", name])
            .expect_error(if kind == "vlan" { INTERFACE } else { name });
        bed.ip(Host::Receiver, &format!("link delete {name}"));
    }

    // Another program is attached: ours, of another receiver.
    let (receiver, _) = bed.recv_into("in", &[]);
    let second = bed.recv_to_end(&["--interface", INTERFACE, "--port", "9000"]);
    second.expect_error("lm_gate");
    // It did no harm.
    bed.send_to_end(&[file]).expect_code(0);
    receiver.interrupt().expect_code(130);

    // veth has no zero-copy.
    bed.recv_to_end(&["--interface", INTERFACE, "--mode", "zero-copy"])
        .expect_error("zero-copy");
    bed.ip(Host::Receiver, "link set lm0 mtu 500");
    bed.recv_to_end(&["--interface", INTERFACE]).expect_error("MTU");
    nothing_attached(&bed);
}

#[test]
fn checksums_that_can_be_had_and_one_that_cannot() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", 200_000);
    let file = file.to_str().unwrap();
    let out = bed.path("out");
    let receiver = bed.recv(&["--output", out.to_str().unwrap(), "--force"]);
    bed.send_to_end(&["--checksum", "offload", "--wire", "ipfrag", file])
        .expect_error("--checksum integrated");
    assert!(!out.exists());
    for checksum in ["offload", "integrated"] {
        bed.send_to_end(&["--checksum", checksum, file]).expect_code(0);
        assert!(fs::read(&out).unwrap() == content(200_000));
    }
    bed.send_to_end(&[
        "--checksum",
        "integrated",
        "--wire",
        "ipfrag",
        "--message-size",
        "60000",
        file,
    ])
    .expect_code(0);
    receiver.interrupt().expect_code(130);
    nothing_attached(&bed);
}

#[test]
fn no_privilege() {
    let Some(bed) = Bed::new() else { return };
    let mut command = bed.command(Host::Receiver, "setpriv");
    command.args([
        "--reuid",
        "65534",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]);
    command.args([
        env!("CARGO_BIN_EXE_lm-recv"),
        "--interface",
        INTERFACE,
        "--output",
        "/tmp",
    ]);
    let ended = Tool::start(command).end();
    ended.expect_error("CAP_");
    nothing_attached(&bed);
}

#[test]
fn nobody_is_there() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", 1000);
    let file = file.to_str().unwrap();
    bed.send_to_end(&[file]).expect_error("lm-recv");
    let mut command = bed.command(Host::Sender, env!("CARGO_BIN_EXE_lm-send"));
    command.args(["--to", "10.77.0.99", file]);
    Tool::start(command).end().expect_error("10.77.0.99");
    let mut command = bed.command(Host::Sender, env!("CARGO_BIN_EXE_lm-send"));
    command.args(["--to", "192.0.2.1", file]);
    Tool::start(command).end().expect_error("192.0.2.1");
    nothing_attached(&bed);
}

#[test]
fn inputs_that_cannot_be_sent() {
    let Some(bed) = Bed::new() else { return };
    let empty = bed.file("empty", 0);
    let (receiver, directory) = bed.recv_into("in", &[]);
    for (path, words) in [
        (bed.path("missing").as_path(), "does not exist"),
        (&empty, "is empty"),
        (&directory, "is a directory"),
    ] {
        bed.send_to_end(&[path.to_str().unwrap()]).expect_error(words);
    }
    // Standard input shows it only when it is read.
    bed.send_to_end(&["-"]).expect_error("is empty");
    receiver.interrupt().expect_code(130);
    assert!(names(&directory).is_empty());
}

#[test]
fn another_version() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", 1000);
    let socket = bed.udp_socket(Host::Receiver, &format!("{RECEIVER}:7169"));
    let sender = bed.send(&["--json", file.to_str().unwrap()]);
    let mut request = [0; 2048];
    let (len, from) = socket.recv_from(&mut request).unwrap();
    // A receiver of another version answers with a header of its own version.
    let (id, _) = ControlMessage::parse(&request[..len]).unwrap();
    let mut answer = request[..len].to_vec();
    answer[0] = (answer[0] & 0x0f) | 0x70;
    assert_eq!(u32::from_be_bytes(answer[4..8].try_into().unwrap()), id);
    socket.send_to(&answer, from).unwrap();
    sender.end().expect_error("version");
    nothing_attached(&bed);
}

/// What no honest peer sends is counted each time, and told once for each kind.
#[test]
fn strange_packets_are_told_once() {
    let Some(bed) = Bed::new() else { return };
    let directory = bed.directory("in");
    let receiver = bed.recv(&["--json", "--output", directory.to_str().unwrap()]);
    let socket = bed.udp_socket(Host::Sender, &format!("{SENDER}:0"));
    // As many as a socket surely has room for, whenever it is looked at.
    for _ in 0..60 {
        // A version that there is, and nothing else; and one that there is not.
        for byte in [0x2d, 0x7d] {
            socket.send_to(&[byte; 40], format!("{RECEIVER}:7168")).unwrap();
        }
    }
    receiver.wait_for_line("contradict themselves");
    receiver.wait_for_line("another version");
    // An honest transfer goes on as if nothing had been.
    let file = bed.file("file", 100_000);
    bed.send_to_end(&[file.to_str().unwrap()]).expect_code(0);
    receiver.signal(Signal::TERM);
    let ended = receiver.end();
    let warnings: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| line.contains("WARN"))
        .collect();
    assert_eq!(warnings.len(), 2, "{}", ended.stderr);
    for line in &warnings {
        assert!(line.contains(SENDER) && line.contains("; dropped"), "{line}");
        // No colours and no times where nobody looks.
        assert!(line.trim_start().starts_with("WARN from"), "{line:?}");
    }
    let report = ended.expect_code(130).json();
    assert_eq!(report["drops"]["malformed"], 60, "{report}");
    assert_eq!(report["drops"]["other_version"], 60, "{report}");
}

#[test]
fn interrupted() {
    let Some(bed) = Bed::new() else { return };
    let directory = bed.directory("in");
    let output = directory.to_str().unwrap();
    for stop_sender in [true, false] {
        let receiver = bed.recv(&["--output", output, "--json"]);
        let mut sender = bed.send(&["--json", "--message-size", "64K", "-"]);
        let mut stdin = sender.stdin();
        stdin.write_all(&content(200_000)).unwrap();
        wait_until("no partial file", || !names(&directory).is_empty());
        if stop_sender {
            let sent = sender.interrupt();
            sent.expect_code(130);
            assert!(sent.json()["error"].as_str().unwrap().contains("interrupted"));
            receiver.wait_for_line("the sender gave up");
            assert!(names(&directory).is_empty());
            receiver.interrupt().expect_code(130);
        } else {
            let received = receiver.interrupt();
            received.expect_code(130);
            assert_eq!(received.json()["failed_transfers"], 1);
            assert!(names(&directory).is_empty());
            wait_until("the sender does not notice", || sender.has_ended());
            sender.end().expect_error("stopped");
        }
        nothing_attached(&bed);
    }
}

/// Noise on both ports, before and during a transfer.
#[test]
fn hostile_packets() {
    let Some(bed) = Bed::new() else { return };
    let (receiver, directory) = bed.recv_into("in", &["--json"]);
    let socket = bed.udp_socket(Host::Sender, &format!("{SENDER}:0"));
    let noise = thread::spawn(move || {
        let bytes = content(2_000_000);
        for (n, chunk) in bytes.chunks(997).enumerate() {
            let mut packet = chunk[..chunk.len().min(1 + n % 997)].to_vec();
            // Every type of a good version, so that each parser gets something to chew.
            packet[0] = 0x20 | (n % 16) as u8;
            if let [_, _, high, low, ..] = &mut packet[..] {
                [*high, *low] = (chunk.len().min(1 + n % 997).saturating_sub(24) as u16).to_be_bytes();
            }
            let port = 7168 + (n / 16) % 2;
            let _ = socket.send_to(&packet, format!("{RECEIVER}:{port}"));
            if n % 64 == 0 {
                thread::yield_now();
            }
        }
    });
    let file = bed.file("file", 3_000_000);
    for number in 1..=3 {
        let sent = bed.send_to_end(&["--message-size", "200K", file.to_str().unwrap()]);
        sent.expect_code(0);
        let received = fs::read(directory.join(format!("transfer-{number:06}"))).unwrap();
        assert!(received == content(3_000_000));
    }
    noise.join().unwrap();
    receiver.interrupt().expect_code(130);
    assert_eq!(names(&directory).len(), 3);
    nothing_attached(&bed);
}

#[test]
fn outputs_that_cannot_be_written() {
    let Some(bed) = Bed::new() else { return };
    for (output, words) in [("/nowhere/x", "no such file"), ("/proc/x", "cannot write")] {
        assert!(!Path::new(output).exists());
        bed.recv_to_end(&["--interface", INTERFACE, "--output", output])
            .expect_error(words);
    }
    // Read-only even for root.
    let directory = bed.directory("ro");
    let mut command = bed.command(Host::Receiver, "sh");
    command.args([
        "-c",
        r#"mount -t tmpfs -o ro tmpfs "$1" && exec "$2" --interface lm0 --from-anyone --output "$1""#,
        "sh",
    ]);
    command.arg(&directory).arg(env!("CARGO_BIN_EXE_lm-recv"));
    Tool::start(command).end().expect_error("read-only");
    nothing_attached(&bed);
}

/// As of `| head -1`, or on a disk that is full.
#[test]
fn a_tool_whose_output_is_not_taken_ends_without_a_panic() {
    let run = |tool: &str, arguments: &[&str], stdout: Stdio| {
        let output = Command::new(tool)
            .args(arguments)
            .stdout(stdout)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let doctor = (env!("CARGO_BIN_EXE_lm-bench"), &["rt", "doctor"][..]);
    for (tool, arguments) in [
        doctor,
        (env!("CARGO_BIN_EXE_lm-send"), &["--help"]),
        (env!("CARGO_BIN_EXE_lm-recv"), &["--help"]),
        (env!("CARGO_BIN_EXE_lm-check"), &["--help"]),
    ] {
        let (_, unread) = std::io::pipe().unwrap();
        assert_eq!(run(tool, arguments, unread.into()), (Some(141), String::new()));
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (code, said) = run(doctor.0, doctor.1, full.into());
    assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
    let words = "lm-bench: cannot print: No space left on device";
    assert!(said.starts_with(words), "{said}");
}
