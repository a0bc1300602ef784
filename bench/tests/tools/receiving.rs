//! What a stranger, or a program that has taken `lm-recv` over, can do to the host that receives: as little as its user said.

use std::fs;
use std::io::Write;
use std::net::SocketAddrV4;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use lm_bench::transfer::wire::{CONTROL_TAG, Plan, TransferId};

use crate::bed::{
    Bed, Ended, Host, INTERFACE, RECEIVER, SENDER, Tool, content, expect_files, names, seen_by, wait_until,
};
use crate::forger::{Forger, message};
use crate::strangers::start;

/// CAP_NET_ADMIN, CAP_NET_RAW, CAP_IPC_LOCK and CAP_BPF of `linux/capability.h`.
const KEPT: u64 = 1 << 12 | 1 << 13 | 1 << 14 | 1 << 39;
const CAP_DAC_OVERRIDE: u64 = 1 << 1;

/// A number of `/proc/PID/status`, hexadecimal as capabilities are.
fn status(tool: &Tool, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", tool.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap()
}

fn expect_usage(ended: &Ended, words: &[&str]) {
    ended.expect_code(2);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "no {word:?} in: {}", ended.stderr);
    }
}

#[test]
fn root_says_who_may_send() {
    let Some(bed) = Bed::new() else { return };
    let run = |user: &[&str], arguments: &[&str]| {
        let mut command = bed.command(Host::Receiver, "setpriv");
        command.args(user).arg(env!("CARGO_BIN_EXE_lm-recv"));
        command
            .args(["--interface", INTERFACE, "--output", "/dev/null"])
            .args(arguments);
        Tool::start(command)
    };
    let root = ["--reuid=0"];
    expect_usage(&run(&root, &[]).end(), &["--allow", "--from-anyone"]);
    let both = ["--allow", "10.77.0.0/24", "--from-anyone"];
    expect_usage(&run(&root, &both).end(), &["--allow", "--from-anyone"]);
    assert!(!bed.has_program(Host::Receiver));
    for said in [&["--allow", "10.77.0.1"][..], &["--from-anyone"]] {
        let receiver = run(&root, said);
        receiver.wait_for_line("listening on");
        receiver.interrupt().expect_code(130);
    }
    // An ordinary user fills no more than is an ordinary user's to fill.
    let needed = "+net_admin,+net_raw,+bpf,+ipc_lock";
    let user = [
        "--reuid=65534",
        "--clear-groups",
        &format!("--inh-caps={needed}"),
        &format!("--ambient-caps={needed}"),
    ];
    let receiver = run(&user, &[]);
    receiver.wait_for_line("listening on");
    receiver.interrupt().expect_code(130);
}

/// Messages of 64 MiB at most: 64 MiB of it and what headers take for one sender, and 48 MiB for others.
#[test]
fn landing_memory_and_its_bounds_are_shown() {
    let Some(bed) = Bed::new() else { return };
    let to = bed.path("out");
    let arguments = [
        "--max-message-size",
        "64M",
        "--json",
        "--count",
        "1",
        "--output",
        to.to_str().unwrap(),
    ];
    let receiver = bed.recv(&arguments);
    receiver.wait_for_line("landing memory 16.0 MiB, at most 112 MiB, 64.0 MiB for one sender");
    let file = bed.file("file", 20 << 20);
    bed.send_to_end(&["--message-size", "20M", file.to_str().unwrap()])
        .expect_code(0);
    let report = receiver.end().expect_code(0).json();
    let [now, most, of_one] =
        ["", "_max", "_address_max"].map(|what| report[format!("landing_memory{what}")].as_u64().unwrap());
    assert!((40 << 20..=64 << 20).contains(&now), "{now}");
    assert!(now < most && of_one == most - (48 << 20), "{report}");
}

#[test]
fn no_more_comes_than_was_said() {
    let Some(bed) = Bed::new() else { return };
    let directory = bed.directory("in");
    let receiver = bed.recv(&["--max-bytes", "500K", "--output", directory.to_str().unwrap()]);
    let file = bed.file("file", 300_000);
    let small = bed.file("small", 200_000);
    bed.send_to_end(&[file.to_str().unwrap()]).expect_code(0);
    bed.send_to_end(&[file.to_str().unwrap()])
        .expect_error("--max-bytes");
    // Who does not say how much it will be is ended where it is too much, and has taken nothing from others then.
    let mut sender = bed.send(&["--json", "--message-size", "64K", "-"]);
    let _ = sender.stdin().write_all(&content(300_000));
    sender.end().expect_error("--max-bytes");
    assert_eq!(names(&directory), ["transfer-000001"]);
    bed.send_to_end(&[small.to_str().unwrap()]).expect_code(0);
    receiver.interrupt().expect_code(130);
    assert_eq!(names(&directory), ["transfer-000001", "transfer-000002"]);
}

fn free_bytes(directory: &Path) -> u64 {
    let stat = rustix::fs::statvfs(directory).unwrap();
    stat.f_bavail * stat.f_frsize
}

#[test]
fn free_space_is_kept() {
    let Some(bed) = Bed::new() else { return };
    let directory = bed.directory("small");
    const SIZE: usize = 8 << 20;
    let mount = r#"mount -t tmpfs -o size=8M tmpfs "$1""#;
    let file = |name: &str, len: usize| bed.file(name, len).to_str().unwrap().to_owned();

    // A twentieth, if nobody says how much.
    let receiver = bed.recv_mounted(&directory, mount, &[]);
    bed.send_to_end(&[&file("whole", SIZE - 100_000)])
        .expect_error("stay free");
    bed.send_to_end(&[&file("most", SIZE - SIZE / 16)]).expect_code(0);
    receiver.interrupt().expect_code(130);

    // What fitted when it was announced does not any more: another program writes meanwhile.
    const KEPT: u64 = 2 << 20;
    let receiver = bed.recv_mounted(&directory, mount, &["--keep-free", "2M"]);
    bed.send_to_end(&[&file("much", SIZE - KEPT as usize + 1)])
        .expect_error("stay free");
    let seen = seen_by(&receiver, &directory);
    let sender = bed.send(&[
        "--json",
        "--rate",
        "40M",
        "--message-size",
        "64K",
        &file("half", SIZE / 2),
    ]);
    wait_until("nothing comes", || free_bytes(&seen) < SIZE as u64);
    fs::write(seen.join("others"), content(SIZE / 2)).unwrap();
    let mut least = SIZE as u64;
    let mut sender = Some(sender);
    wait_until("the transfer goes on", || {
        least = least.min(free_bytes(&seen));
        sender.as_mut().is_some_and(Tool::has_ended)
    });
    sender.take().unwrap().end().expect_error("stay free");
    assert!(least >= KEPT, "{least} bytes were free");
    assert_eq!(names(&seen), ["others"]);
    // A smaller one fits: nothing was left over.
    bed.send_to_end(&[&file("fits", SIZE / 8)]).expect_code(0);
    receiver.interrupt().expect_code(130);
}

#[test]
fn privileges_are_gone_when_packets_come() {
    let Some(bed) = Bed::new() else { return };
    let (receiver, directory) = bed.recv_into("in", &[]);
    let mut sender = bed.send(&["--message-size", "64K", "-"]);
    let mut stdin = sender.stdin();
    stdin.write_all(&content(200_000)).unwrap();
    wait_until("no transfer", || !names(&directory).is_empty());
    for tool in [&receiver, &sender] {
        for (name, most) in [
            ("CapEff", KEPT),
            ("CapPrm", KEPT),
            ("CapInh", 0),
            ("CapAmb", 0),
            ("CapBnd", 0),
        ] {
            let has = status(tool, name);
            assert_eq!(has & !most, 0, "{name} is {has:x}");
        }
        assert_eq!(status(tool, "NoNewPrivs"), 1);
    }
    drop(stdin);
    sender.end().expect_code(0);
    // What is left is enough for what is done under way: a landing channel built anew for a long message.
    const LONG: usize = 48 << 20;
    let long = bed.file("long", LONG);
    let sent = bed.send_to_end(&["--message-size", "48M", long.to_str().unwrap()]);
    assert_eq!(sent.expect_code(0).json()["messages_one_copy"], 0);
    assert!(fs::read(directory.join("transfer-000002")).unwrap() == content(LONG));
    let ended = receiver.interrupt();
    ended.expect_code(130);
    assert!(!ended.stderr.contains("power over files"), "{}", ended.stderr);
    assert!(!bed.has_program(Host::Sender) && !bed.has_program(Host::Receiver));

    // Another user's folder: nothing else would let root write there.
    let theirs = bed.directory("theirs");
    std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).unwrap();
    let receiver = bed.recv(&["--output", theirs.to_str().unwrap()]);
    receiver.wait_for_line("power over files stays");
    assert_eq!(status(&receiver, "CapEff"), KEPT | CAP_DAC_OVERRIDE);
    let file = bed.file("file", 1000);
    bed.send_to_end(&[file.to_str().unwrap()]).expect_code(0);
    receiver.interrupt().expect_code(130);
    assert_eq!(names(&theirs), ["transfer-000001"]);
}

/// Another local user puts a link where root is about to write.
#[test]
fn no_file_is_written_through_a_link_or_over_another() {
    let Some(bed) = Bed::new() else { return };
    let victim = bed.file("victim", 100);
    let link = bed.path("link");
    symlink(&victim, &link).unwrap();
    let file = bed.file("file", 100_000);
    let directory = bed.directory("in");
    for option in ["--pcap", "--histogram"] {
        for path in [&link, &victim] {
            let arguments = [option, path.to_str().unwrap()];
            bed.send_to_end(&[&arguments[..], &[file.to_str().unwrap()]].concat())
                .expect_error("exists");
            let output = ["--interface", INTERFACE, "--output", directory.to_str().unwrap()];
            bed.recv_to_end(&[&output[..], &arguments].concat())
                .expect_error("exists");
        }
        assert!(fs::read(&victim).unwrap() == content(100));
    }
    // Who says so gets a new file in the link's place.
    let receiver = bed.recv(&["--output", directory.to_str().unwrap(), "--count", "1"]);
    let arguments = [
        "--force",
        "--histogram",
        link.to_str().unwrap(),
        file.to_str().unwrap(),
    ];
    bed.send_to_end(&arguments).expect_code(0);
    receiver.end().expect_code(0);
    assert!(fs::symlink_metadata(&link).unwrap().is_file());
    assert!(fs::read_to_string(&link).unwrap().contains("Total count"));
    assert!(fs::read(&victim).unwrap() == content(100));
}

/// A host on the link that may not send forges one that may, under its own Ethernet address, and answers whatever comes back: with a file
/// of its own, and as the program whose transfer is under way.
#[test]
fn a_forged_host_writes_nothing_and_ends_nothing() {
    const LEN: usize = 4 << 20;
    let Some(bed) = Bed::with_box() else { return };
    bed.bridge();
    bed.ip(Host::Box, "address add 10.77.0.3/24 dev bridge");
    // Everything comes to the receiver's general queue, by whichever core it is sent.
    let cpus = (1u64 << std::thread::available_parallelism().unwrap().get()) - 1;
    let steer = format!("echo {cpus:x} > /sys/class/net/right/queues/tx-0/xps_cpus");
    let steered = bed.command(Host::Box, "sh").args(["-c", &steer]).status();
    assert!(steered.unwrap().success());
    let directory = bed.directory("in");
    let receiver = bed.recv(&["--allow", SENDER, "--output", directory.to_str().unwrap()]);
    let mut sender = bed.send(&["--json", "--message-size", "64K", "-"]);
    let mut input = sender.stdin();
    input.write_all(&content(LEN)[..LEN / 2]).unwrap();
    wait_until("it is under way", || {
        fs::read_dir(&directory).unwrap().count() > 0
    });
    // The data port is the lower one of two. An attacker tries all.
    let table = bed.on(Host::Sender, || fs::read_to_string("/proc/thread-self/net/udp"));
    let port = |line: &str| u16::from_str_radix(line.split_whitespace().nth(1)?.split_once(':')?.1, 16).ok();
    let port = table.unwrap().lines().filter_map(port).min().expect("its port");
    let transfer = TransferId::new(7).unwrap();
    let start = start(transfer, Plan::new(Some(6), 6).unwrap(), None, false);
    let script = [
        (CONTROL_TAG, start.encode()),
        (transfer.data_tag(0), b"forged".to_vec()),
    ];
    bed.on(Host::Box, || {
        let mut forger = Forger::new("bridge");
        forger.script = script.to_vec();
        for n in 0..1000u64 {
            let from = SocketAddrV4::new(SENDER.parse().unwrap(), if n % 2 == 0 { port } else { 9000 });
            let bytes = message(from, n << 40 | 1, 0, CONTROL_TAG, &script[0].1);
            forger.send(from, SocketAddrV4::new(RECEIVER.parse().unwrap(), 7168), &bytes);
            std::thread::sleep(Duration::from_micros(500));
            forger.answer();
        }
    });
    let _ = input.write_all(&content(LEN)[LEN / 2..]);
    drop(input);
    let ended = sender.end();
    receiver.interrupt().expect_code(130);
    expect_files(&directory, LEN, &["transfer-000001"]);
    ended.expect_code(0);
}
