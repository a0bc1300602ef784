//! `lm-send` and `lm-recv` as an ordinary user without capabilities, by the admission daemons of their hosts.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use rustix::process::Signal;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, SENDER, Tool, content, wait_until};
use crate::hosts::{Hosts, USER, daemon};
use crate::links::{CUT, await_begin, flap, written};
use crate::measuring::lm_bench;

/// What the kernel says of a running program.
fn kernel_says(tool: &Tool, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", tool.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with(field));
    line.unwrap().split_whitespace().nth(1).unwrap().to_owned()
}

/// A file of `len` bytes lands at a receiver that was started for it.
fn a_file_lands(hosts: &Hosts, receiver: Tool, len: usize) {
    let file = hosts.bed.file("file", len);
    // What is counted is what lands.
    let sent = hosts.send(&[file.to_str().unwrap()]).end();
    sent.expect_code(0);
    let received = receiver.end();
    received.expect_code(0);
    let came = fs::read(hosts.bed.path("out").join("file")).unwrap();
    assert!(came == content(len), "the bytes differ");
    for report in [sent.json(), received.json()] {
        assert_eq!(report["bytes"], len);
        assert_eq!(report["mode"], "copy-native");
        // By the landing queue, and not by the kernel's socket.
        assert_eq!(report["user_copied_bytes"], 0, "{report}");
    }
}

#[test]
fn a_transfer_without_privileges() {
    let Some(hosts) = Hosts::new(USER) else { return };
    let out = hosts.directory("out").join("file");
    let receiver = hosts.recv(&out, &["--count", "1", "--json"]);
    assert_eq!(kernel_says(&receiver, "Uid:"), USER.to_string());
    assert_eq!(kernel_says(&receiver, "CapEff:"), "0000000000000000");
    // The daemon's sockets have nothing summed up.
    let file = hosts.bed.file("none", 1000);
    let summed = hosts.send(&["--checksum", "offload", file.to_str().unwrap()]);
    summed.end().expect_error("--checksum integrated");
    a_file_lands(&hosts, receiver, 64 << 20);
    hosts.wait_until_nothing_is_left();
}

/// Packets of several frames, as the daemons' interfaces have it.
#[test]
fn a_transfer_with_jumbo_frames() {
    let Some(bed) = Bed::new() else { return };
    for host in [Host::Sender, Host::Receiver] {
        bed.ip(host, &format!("link set {INTERFACE} mtu 9000"));
    }
    let Some(hosts) = Hosts::on(bed, USER) else { return };
    let out = hosts.directory("out").join("file");
    let receiver = hosts.recv(&out, &["--count", "1", "--json"]);
    a_file_lands(&hosts, receiver, 16 << 20);
    hosts.wait_until_nothing_is_left();
}

#[test]
fn daemons_that_are_killed_do_not_interrupt_a_transfer() {
    let Some(mut hosts) = Hosts::new(USER) else { return };
    const LEN: usize = 64 << 20;
    let file = hosts.bed.file("file", LEN);
    let out = hosts.directory("out").join("file");
    let receiver = hosts.recv(&out, &["--count", "1", "--json"]);
    // A second and a half at least.
    let mut sender = hosts.send(&["--rate", "300M", file.to_str().unwrap()]);
    await_begin(&mut sender, &hosts.bed.path("out"), 1 << 20);
    hosts.kill(Host::Receiver);
    hosts.kill(Host::Sender);
    // Both gates go on, and both programs with them; then the next daemons take everything over.
    hosts.start(Host::Receiver, USER);
    hosts.start(Host::Sender, USER);
    let sent = sender.end();
    sent.expect_code(0);
    let received = receiver.end();
    received.expect_code(0);
    for ended in [&sent, &received] {
        assert!(
            ended.stderr.contains("the admission daemon is gone"),
            "{}",
            ended.stderr
        );
    }
    assert!(fs::read(&out).unwrap() == content(LEN), "the bytes differ");
    assert_eq!(sent.json()["failed_transfers"], 0);
    hosts.wait_until_nothing_is_left();
}

#[test]
fn sessions_of_daemons_survive_interfaces_that_flap_and_a_path_that_is_cut() {
    let hosts = Bed::quiet(true).and_then(|bed| {
        bed.bridge();
        Hosts::on(bed, USER)
    });
    let Some(hosts) = hosts else { return };
    const LEN: usize = 24 << 20;
    let file = hosts.bed.file("file", LEN);
    let out = hosts.directory("out").join("file");
    let mut receiver = hosts.recv(&out, &["--count", "1", "--json"]);
    // Two seconds at least.
    let mut sender = hosts.send(&["--rate", "100M", file.to_str().unwrap()]);
    await_begin(&mut sender, &hosts.bed.path("out"), 1 << 20);
    for host in [Host::Sender, Host::Receiver] {
        flap(&hosts.bed, &[host]);
    }
    hosts.bed.ip(Host::Box, "link set right nomaster");
    thread::sleep(CUT);
    assert!(!sender.has_ended() && !receiver.has_ended());
    hosts.bed.ip(Host::Box, "link set right master bridge");
    for ended in [sender.end(), receiver.end()] {
        let report = ended.expect_code(0).json();
        assert_eq!(
            (&report["bytes"], &report["failed_transfers"]),
            (&LEN.into(), &0.into())
        );
    }
    assert!(fs::read(&out).unwrap() == content(LEN), "the bytes differ");
    hosts.wait_until_nothing_is_left();
}

/// The receiver's daemon lets no program register what a sender's messages need: they come by the one-copy path, and nobody else notices.
#[test]
fn a_bound_on_memory_costs_its_asker_alone() {
    let Some(mut hosts) = Bed::with_queues(4).and_then(|bed| Hosts::on(bed, USER)) else {
        return;
    };
    hosts.kill(Host::Receiver);
    hosts.policy = &["--memory-max", "100M"];
    hosts.start(Host::Receiver, USER);
    let out = hosts.directory("out");
    let receiver = hosts.recv(&out, &["--count", "2", "--json"]);
    let mut first = hosts.send(&["-"]);
    let mut input = first.stdin();
    let part = content(4 << 20);
    input.write_all(&part).unwrap();
    wait_until("it lands", || written(&out) > 1 << 20);
    let large = hosts.bed.file("large", 160 << 20);
    let second = hosts.send(&["--message-size", "80M", large.to_str().unwrap()]);
    second.end().expect_code(0);
    let told = receiver.stderr();
    assert!(
        told.contains("not all can be had") && told.contains("--memory-max"),
        "{told}"
    );
    input.write_all(&part).unwrap();
    drop(input);
    first.end().expect_code(0);
    let report = receiver.end().expect_code(0).json();
    let packets = (160 << 20) / 1448;
    let one_copy = report["fragments_one_copy"].as_u64().unwrap();
    assert!((packets..packets + 100).contains(&one_copy), "{report}");
    hosts.wait_until_nothing_is_left();
}

/// A program under a daemon hears only whom a daemon of the cluster speaks for, by whichever way: a host without the key is not heard by
/// the one-copy path, nor with small messages.
#[test]
fn a_host_without_the_clusters_key_is_not_heard() {
    let Some(mut hosts) = Hosts::new(USER) else { return };
    let out = hosts.directory("out").join("file");
    let receiver = hosts.recv(&out, &["--count", "1", "--json"]);
    hosts.kill(Host::Sender);
    let file = hosts.bed.file("file", 100_000);
    for way in [&["--one-copy"][..], &[]] {
        let mut command = hosts
            .bed
            .network_command(Host::Sender, env!("CARGO_BIN_EXE_lm-send"));
        command
            .args(["--admission", "embedded", "--to", RECEIVER])
            .args(way)
            .arg(&file);
        let refused = Tool::start(command).end();
        assert!(!refused.status.success(), "{way:?}: {}", refused.stderr);
    }
    assert!(!out.exists());
    hosts.start(Host::Sender, USER);
    let sent = hosts.send(&["--one-copy", file.to_str().unwrap()]).end();
    sent.expect_code(0);
    let received = receiver.end();
    received.expect_code(0);
    assert!(fs::read(&out).unwrap() == content(100_000));
    assert!(received.json()["transfers"] == 1);
}

#[test]
fn a_program_that_is_killed_leaves_nothing() {
    let Some(hosts) = Hosts::new(USER) else { return };
    const LEN: usize = 32 << 20;
    let file = hosts.bed.file("file", LEN);
    let directory = hosts.directory("out");
    let receiver = hosts.recv(&directory.join("first"), &["--count", "1"]);
    let mut sender = hosts.send(&["--rate", "50M", file.to_str().unwrap()]);
    await_begin(&mut sender, &directory, 1 << 20);
    receiver.signal(Signal::KILL);
    receiver.end();
    // The sender learns that its session is over, and not only by silence.
    let sent = sender.end();
    assert_ne!(sent.status.code(), Some(0), "{}", sent.stderr);
    hosts.wait_until_nothing_is_left();
    // Queues, port and sockets can be had again.
    let out = directory.join("second");
    let receiver = hosts.recv(&out, &["--count", "1"]);
    let sender = hosts.send(&[file.to_str().unwrap()]);
    sender.end().expect_code(0);
    receiver.end().expect_code(0);
    assert!(fs::read(&out).unwrap() == content(LEN), "the bytes differ");
    // A sender that dies frees the place of its session.
    let receiver = hosts.recv(&directory.join("third"), &["--count", "1"]);
    let mut sender = hosts.send(&["--rate", "50M", file.to_str().unwrap()]);
    await_begin(&mut sender, &directory, 1 << 20);
    sender.signal(Signal::KILL);
    sender.end();
    wait_until("the sender is gone", || {
        let status = hosts.status(Host::Sender);
        status["programs"].as_array().is_some_and(Vec::is_empty)
    });
    receiver.signal(Signal::INT);
    receiver.end();
    hosts.wait_until_nothing_is_left();
}

/// A voter that has just started abstains: it may have promised something in its life before. Until then nothing lands. How many transfers
/// there were.
fn until_the_voter_says_yes(hosts: &Hosts) -> u32 {
    let first = hosts.bed.file("first", 4 << 20);
    let mut transfers = 0;
    wait_until("the voter says yes", || {
        let sent = hosts.send(&["--rate", "100M", first.to_str().unwrap()]).end();
        sent.expect_code(0);
        transfers += 1;
        sent.json()["messages_one_copy"].as_u64() < sent.json()["messages"].as_u64()
    });
    transfers
}

/// Until messages of a session have landed at the receiver.
fn await_landing(hosts: &Hosts) {
    wait_until("messages land", || {
        let status = hosts.status(Host::Receiver);
        let session = &status["interfaces"][0]["sessions"][0];
        session["lands"] == true && session["delivered"].as_u64() > Some(0)
    });
}

/// The paper's second case (LM §3.3): while one host receives, who sends to another does so by the one-copy path.
#[test]
fn under_exclusive_admission_others_send_by_the_one_copy_path() {
    // Each host receives and sends.
    let Some(bed) = Bed::with_queues(4) else { return };
    let policy = &["--policy", "exclusive", "--voter", SENDER];
    let Some(hosts) = Hosts::with_policy(bed, USER, policy) else {
        return;
    };
    const LEN: usize = 32 << 20;
    let file = hosts.bed.file("file", LEN);
    let (there, back) = (hosts.directory("there"), hosts.directory("back"));
    let receiver = hosts.recv(&there, &["--json"]);
    let before = until_the_voter_says_yes(&hosts);
    // Four seconds.
    let sender = hosts.send(&["--rate", "60M", file.to_str().unwrap()]);
    await_landing(&hosts);
    let small = hosts.bed.file("small", 4 << 20);
    let output = back.join("small");
    let other = hosts.tool(
        Host::Sender,
        env!("CARGO_BIN_EXE_lm-recv"),
        &[
            "--interface",
            INTERFACE,
            "--output",
            output.to_str().unwrap(),
            "--count",
            "1",
            "--json",
        ],
    );
    other.wait_for_line("listening on");
    let sent = hosts
        .tool(
            Host::Receiver,
            env!("CARGO_BIN_EXE_lm-send"),
            &["--json", "--to", SENDER, small.to_str().unwrap()],
        )
        .end();
    sent.expect_code(0);
    let came = other.end();
    came.expect_code(0);
    assert!(fs::read(&output).unwrap() == content(4 << 20), "the bytes differ");
    assert!(
        came.json()["user_copied_bytes"].as_u64() >= Some(4 << 20),
        "{}",
        came.json()
    );
    // The one that was there first landed, from the vote on.
    let sent = sender.end();
    sent.expect_code(0);
    assert!(
        sent.json()["messages_one_copy"].as_u64() <= Some(2),
        "{}",
        sent.json()
    );
    receiver.interrupt();
    let name = format!("transfer-{:06}", before + 1);
    assert!(
        fs::read(there.join(name)).unwrap() == content(LEN),
        "the bytes differ"
    );
    hosts.wait_until_nothing_is_left();
}

/// A sender that finds others receiving begins by the one-copy path, and its messages land as soon as it is admitted.
#[test]
fn under_exclusive_admission_messages_land_when_it_is_their_turn() {
    let Some(bed) = Bed::with_queues(4) else { return };
    let policy = &["--policy", "exclusive", "--voter", SENDER];
    let Some(hosts) = Hosts::with_policy(bed, USER, policy) else {
        return;
    };
    let receiver = hosts.recv(&hosts.directory("there"), &["--json"]);
    until_the_voter_says_yes(&hosts);
    // Two seconds.
    let short = hosts.bed.file("short", 10 << 20);
    let before = hosts.send(&["--rate", "40M", short.to_str().unwrap()]);
    await_landing(&hosts);
    // The other way, for six seconds.
    const LEN: usize = 32 << 20;
    let file = hosts.bed.file("file", LEN);
    let out = hosts.directory("back").join("file");
    let output = ["--interface", INTERFACE, "--output", out.to_str().unwrap()];
    let other = hosts.tool(
        Host::Sender,
        env!("CARGO_BIN_EXE_lm-recv"),
        &[&output[..], &["--count", "1", "--json"]].concat(),
    );
    other.wait_for_line("listening on");
    let sent = hosts
        .tool(
            Host::Receiver,
            env!("CARGO_BIN_EXE_lm-send"),
            &["--json", "--to", SENDER, "--rate", "45M", file.to_str().unwrap()],
        )
        .end();
    sent.expect_code(0);
    let came = other.end();
    came.expect_code(0);
    assert!(fs::read(&out).unwrap() == content(LEN), "the bytes differ");
    let (sent, came) = (sent.json(), came.json());
    let one_copy = sent["messages_one_copy"].as_u64().unwrap();
    assert!(
        (1..sent["messages"].as_u64().unwrap()).contains(&one_copy),
        "{sent}"
    );
    let copied = came["user_copied_bytes"].as_u64().unwrap();
    assert!((one_copy << 20..LEN as u64).contains(&copied), "{came}");
    before.end().expect_code(0);
    receiver.interrupt();
    hosts.wait_until_nothing_is_left();
}

#[test]
fn what_a_daemon_does_not_give() {
    // It lets root in, and nobody else.
    let Some(bed) = Bed::quiet(false) else { return };
    let Some(hosts) = Hosts::on(bed, 0) else { return };
    let file = hosts.bed.file("file", 1 << 20);
    let sent = hosts.send(&[file.to_str().unwrap()]).end();
    sent.expect_code(1);
    assert!(sent.stderr.contains("--allow-uid"), "{}", sent.stderr);
    let run = |admission: &Path, interface: &str| {
        let mut command = hosts
            .bed
            .network_command(Host::Sender, env!("CARGO_BIN_EXE_lm-send"));
        command.args(["--interface", interface, "--to", RECEIVER, "--admission"]);
        command.arg(admission).arg(&file);
        let ended = Tool::start(command).end();
        ended.expect_code(1);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        ended.stderr
    };
    let socket = hosts.socket(Host::Sender);
    // An interface that is not the daemon's.
    hosts
        .bed
        .ip(Host::Sender, "link add other0 type veth peer name other1");
    hosts.bed.ip(Host::Sender, "address add 10.79.0.1/24 dev other0");
    hosts.bed.ip(Host::Sender, "link set other0 up");
    hosts.bed.ip(Host::Sender, "link set other1 up");
    let error = run(&socket, "other0");
    assert!(error.contains("does not serve other0"), "{error}");
    // No daemon here.
    let error = run(&hosts.bed.path("nothing"), INTERFACE);
    assert!(error.contains("start lm-admissiond"), "{error}");
    // None there.
    let mut hosts = hosts;
    hosts.kill(Host::Receiver);
    let error = {
        let mut command = hosts
            .bed
            .network_command(Host::Sender, env!("CARGO_BIN_EXE_lm-send"));
        command.args(["--to", RECEIVER, "--admission"]);
        command.arg(&socket).arg(&file);
        Tool::start(command).end().stderr
    };
    assert!(
        error.contains("start lm-admissiond there with the same key"),
        "{error}"
    );
    // What the one that was killed has pinned goes with the next one.
    hosts.start(Host::Receiver, 0);
}

#[test]
fn losses_are_repaired_by_the_daemon() {
    // Messages that need more landing memory than there is, and entries that a loss left unused: the daemon builds the channel anew.
    let Some(hosts) = Hosts::with_box(USER) else {
        return;
    };
    let options = "impair --left left --right right --seed 7 --loss 1%";
    let middle = Tool::start(lm_bench(&hosts.bed, Host::Box, options));
    middle.wait_for_line("ready");
    const LEN: usize = 48 << 20;
    let file = hosts.bed.file("file", LEN);
    let out = hosts.directory("out").join("file");
    let receiver = hosts.recv(&out, &["--count", "1", "--json"]);
    let sent = hosts
        .send(&["--message-size", "12M", file.to_str().unwrap()])
        .end();
    sent.expect_code(0);
    receiver.end().expect_code(0);
    assert!(fs::read(&out).unwrap() == content(LEN), "the bytes differ");
    middle.signal(Signal::TERM);
    middle.end();
    hosts.wait_until_nothing_is_left();
}

/// Makes a key file.
fn keygen(bed: &Bed, name: &str) -> Option<PathBuf> {
    let path = bed.path(name);
    let made = Command::new(daemon()?).arg("keygen").arg(&path).status();
    assert!(made.unwrap().success());
    Some(path)
}

#[test]
fn a_key_without_a_daemon() {
    let Some(bed) = Bed::quiet(false) else { return };
    let Some(key) = keygen(&bed, "key") else { return };
    let other = keygen(&bed, "other").expect("as the first");
    let [key, other] = [&key, &other].map(|path| path.to_str().unwrap());
    let (file, out) = (bed.file("file", 1 << 20), bed.directory("out").join("file"));
    let (file, out) = (file.to_str().unwrap(), out.to_str().unwrap());
    let receiver = bed.recv(&["--key", key, "--json", "--count", "1", "--output", out]);
    for wrong in [&["--key", other, file][..], &[file]] {
        let refused = bed.send(wrong).end();
        assert!(!refused.status.success(), "{wrong:?}");
        assert_eq!(refused.stderr.lines().count(), 1, "{}", refused.stderr);
    }
    bed.send(&["--key", key, file]).end().expect_code(0);
    let received = receiver.end();
    received.expect_code(0);
    assert_eq!(received.json()["user_copied_bytes"], 0, "{}", received.json());
    assert!(fs::read(out).unwrap() == content(1 << 20));
}

/// One end has a daemon, the other the key.
#[test]
fn a_key_and_a_daemon() {
    let Some(mut hosts) = Hosts::new(USER) else { return };
    let daemon = hosts.sender.take().unwrap();
    daemon.signal(Signal::TERM);
    daemon.end();
    let key = hosts.bed.path("key");
    let out = hosts.directory("out").join("file");
    let receiver = hosts.recv(&out, &["--count", "1", "--json"]);
    let file = hosts.bed.file("file", 8 << 20);
    let sent = [
        "--admission",
        "embedded",
        "--key",
        key.to_str().unwrap(),
        "--json",
        file.to_str().unwrap(),
    ];
    let sent = hosts.bed.send(&sent).end();
    sent.expect_code(0);
    let received = receiver.end();
    received.expect_code(0);
    assert!(fs::read(hosts.bed.path("out").join("file")).unwrap() == content(8 << 20));
    assert_eq!(received.json()["user_copied_bytes"], 0, "{}", received.json());
    let daemon = [
        "--admission",
        hosts.socket(Host::Sender).to_str().unwrap(),
        "--key",
        key.to_str().unwrap(),
        file.to_str().unwrap(),
    ]
    .map(str::to_owned);
    let both = hosts.bed.send(&daemon.each_ref().map(String::as_str)).end();
    assert!(!both.status.success());
    assert!(both.stderr.contains("leave the key out"), "{}", both.stderr);
}
