//! Links that go down and up, and paths that are cut, under `lm-send` and `lm-recv` at work.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::bed::{Bed, Ended, Host, INTERFACE, Tool, content, expect_files, names, wait_until};

/// Slow enough that a transfer outlasts what is done to it, and that tests beside it notice nothing.
const RATE: &str = "100M";
/// Longer than a session's lease (5 s), and than a message of an endpoint by default (2 s), may be silent.
pub(crate) const CUT: Duration = Duration::from_secs(7);

/// A transfer under way.
struct Transfer {
    directory: PathBuf,
    len: usize,
    receiver: Tool,
    sender: Tool,
}

impl Transfer {
    /// Begins one, and waits until bytes of it are written.
    fn begin(bed: &Bed, len: usize, receive: &[&str], send: &[&str]) -> Transfer {
        let directory = bed.directory("in");
        let output = ["--json", "--output", directory.to_str().unwrap()];
        let receiver = bed.recv(&[&output, receive].concat());
        let file = bed.file("file", len);
        let mut sender = bed.send(&[&["--json", "--rate", RATE, file.to_str().unwrap()], send].concat());
        await_begin(&mut sender, &directory, 1);
        Transfer {
            directory,
            len,
            receiver,
            sender,
        }
    }

    /// Neither end has given up, and it was no shorter than what was done to it.
    #[track_caller]
    fn expect_to_go_on(&mut self) {
        for tool in [&mut self.sender, &mut self.receiver] {
            assert!(!tool.has_ended(), "it has ended:\n{}", tool.stderr());
        }
    }

    /// It went on as if nothing had been: each byte was sent once, in one transfer.
    #[track_caller]
    fn expect_whole(self) {
        let sent = self.sender.end();
        let (sent, received) = (sent.expect_code(0), self.receiver.end());
        for ended in [sent, received.expect_code(0)] {
            let report = ended.json();
            assert_eq!(report["bytes"], self.len, "{report}");
            assert_eq!(
                (&report["transfers"], &report["failed_transfers"]),
                (&1.into(), &0.into())
            );
        }
        expect_files(&self.directory, self.len, &["transfer-000001"]);
    }
}

/// Waits until a file in the directory has `least` bytes.
pub(crate) fn await_begin(sender: &mut Tool, directory: &Path, least: u64) {
    wait_until("nothing is written", || {
        let is_begun = written(directory) >= least;
        let is_there = is_begun || !sender.has_ended();
        assert!(is_there, "no transfer:\n{}", sender.stderr());
        is_begun
    });
}

/// Bytes of the longest file there.
pub(crate) fn written(directory: &Path) -> u64 {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    let lens = files.filter_map(|file| Some(file.metadata().ok()?.len()));
    lens.max().unwrap_or(0)
}

fn set(bed: &Bed, hosts: &[Host], to: &str) {
    for &host in hosts {
        bed.ip(host, &format!("link set {INTERFACE} {to}"));
    }
}

/// Sets the interfaces of `hosts` down for a while, and then up for as long.
pub(crate) fn flap(bed: &Bed, hosts: &[Host]) {
    for to in ["down", "up"] {
        set(bed, hosts, to);
        thread::sleep(Duration::from_millis(250));
    }
}

fn interfaces_flap(len: usize, send: &[&str]) {
    let Some(bed) = Bed::quiet(false) else { return };
    let mut transfer = Transfer::begin(&bed, len, &["--count", "1"], send);
    for _ in 0..2 {
        flap(&bed, &[Host::Sender]);
        flap(&bed, &[Host::Receiver]);
        flap(&bed, &[Host::Sender, Host::Receiver]);
    }
    transfer.expect_to_go_on();
    transfer.expect_whole();
}

#[test]
fn a_transfer_survives_interfaces_that_flap() {
    interfaces_flap(36 << 20, &[]);
}

#[test]
fn small_messages_survive_interfaces_that_flap() {
    interfaces_flap(36 << 20, &["--message-size", "1000"]);
}

#[test]
fn a_transfer_survives_a_path_that_is_cut() {
    let Some(bed) = Bed::quiet(true) else { return };
    bed.bridge();
    let mut transfer = Transfer::begin(&bed, 20 << 20, &["--count", "1"], &[]);
    // Nobody's carrier is lost.
    bed.ip(Host::Box, "link set right nomaster");
    thread::sleep(CUT);
    transfer.expect_to_go_on();
    bed.ip(Host::Box, "link set right master bridge");
    transfer.expect_whole();
}

/// Both ends say what happened, and the receiver serves whoever comes next.
#[test]
fn patience_ends() {
    let Some(bed) = Bed::quiet(true) else { return };
    bed.bridge();
    let patience = ["--patience", "3"];
    let transfer = Transfer::begin(
        &bed,
        40 << 20,
        &[&patience[..], &["--count", "1"]].concat(),
        &patience,
    );
    bed.ip(Host::Box, "link set left down");
    let cut = Instant::now();
    transfer.receiver.wait_for_line("failed");
    let sent = transfer.sender.end();
    sent.expect_error("was not confirmed in time");
    assert!(cut.elapsed() >= Duration::from_secs(3) && cut.elapsed() < Duration::from_secs(9));
    // What came is kept for `--resume`, under no name of a file.
    let kept = names(&transfer.directory);
    assert!(kept.iter().all(|name| name.starts_with('.')), "{kept:?}");

    bed.ip(Host::Box, "link set left up");
    let file = bed.file("next", 1 << 20);
    bed.send_to_end(&[file.to_str().unwrap()]).expect_code(0);
    let report = transfer.receiver.end().expect_code(0).json();
    assert_eq!(
        (&report["transfers"], &report["failed_transfers"]),
        (&1.into(), &1.into())
    );
}

/// The interface stays down for longer than its program bears.
#[test]
fn an_interface_that_stays_down_ends_its_program() {
    let Some(bed) = Bed::quiet(false) else { return };
    let patience = ["--patience", "2"];
    let transfer = Transfer::begin(&bed, 40 << 20, &patience, &patience);
    set(&bed, &[Host::Sender, Host::Receiver], "down");
    let down = Instant::now();
    for ended in [transfer.sender.end(), transfer.receiver.end()] {
        ended.expect_error("the interface went away or is down");
        assert!(down.elapsed() >= Duration::from_secs(2) && down.elapsed() < Duration::from_secs(6));
    }
}

/// What is gone does not come back.
#[test]
fn an_interface_that_is_deleted_ends_both_programs_at_once() {
    let Some(bed) = Bed::quiet(false) else { return };
    let transfer = Transfer::begin(&bed, 40 << 20, &[], &[]);
    bed.ip(Host::Sender, &format!("link delete {INTERFACE}"));
    let gone = Instant::now();
    let both: [Ended; 2] = [transfer.sender.end(), transfer.receiver.end()];
    assert!(gone.elapsed() < Duration::from_secs(3), "{:?}", gone.elapsed());
    both.iter().for_each(|ended| {
        ended.expect_error("the interface went away");
    });
}

/// A program that is gone is no path that is cut: its host says so.
#[test]
fn a_receiver_that_is_killed_is_not_waited_for() {
    let Some(bed) = Bed::quiet(false) else { return };
    let transfer = Transfer::begin(&bed, 40 << 20, &[], &[]);
    transfer.receiver.signal(Signal::KILL);
    transfer.receiver.end();
    let killed = Instant::now();
    transfer.sender.end().expect_error("was not confirmed in time");
    assert!(
        killed.elapsed() < Duration::from_secs(9),
        "{:?}",
        killed.elapsed()
    );
}

/// Nor does a sender that is killed hold up the next one: its turn on the landing queue goes, also where the next one's first packets used
/// the entries that were posted for its message.
#[test]
fn a_sender_that_is_killed_does_not_hold_up_the_next() {
    const LEN: usize = 8 << 20;
    let Some(bed) = Bed::quiet(false) else { return };
    let next = bed.file("next", LEN);
    // A message's entries are fewer than the next sender's first packets, and those of all that are announced are more.
    let transfer = Transfer::begin(&bed, 40 << 20, &[], &["--message-size", "256K"]);
    wait_until("little is written", || written(&transfer.directory) > 4 << 20);
    transfer.sender.signal(Signal::KILL);
    transfer.sender.end();
    // Long before --patience is over.
    bed.send_to_end(&[next.to_str().unwrap()]).expect_code(0);
    let came = fs::read(transfer.directory.join("transfer-000001")).unwrap();
    assert!(came == content(LEN), "the bytes differ");
}

/// What of the host spoils real time is said in one line each, with what to do about it.
#[test]
fn the_doctor_of_real_time_names_what_spoils_it_and_the_remedy() {
    let doctor = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lm-bench"));
        let output = command.args(["rt", "doctor"]).args(words).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (_, said) = doctor(&[]);
    for what in ["preemption", "throttling", "C-states", "memlock", "priorities"] {
        let lines: Vec<_> = said
            .lines()
            .filter(|line| line.contains(&format!(": {what}: ")))
            .collect();
        assert_eq!(lines.len(), 1, "{what}: {said}");
        assert!(
            lines[0].starts_with("well: ") || lines[0].contains("; "),
            "{said}"
        );
    }
    let (code, said) = doctor(&["--interface", "lo"]);
    assert!(
        said.contains(": coalescing: ") && said.contains(": GSO: "),
        "{said}"
    );
    assert_eq!(
        code,
        Some(i32::from(said.contains("spoils real time: "))),
        "{said}"
    );
    let (code, said) = doctor(&["--interface", "nosuch"]);
    assert!(
        code == Some(1) && said.contains("nosuch") && said.contains("ip link"),
        "{said}"
    );
}

/// Privileges and limits of a process, and what an interface does with TCP, before and after what the doctor says was done.
#[test]
fn the_doctor_of_real_time_is_content_when_its_remedies_were_taken() {
    let Some(bed) = Bed::quiet(false) else { return };
    let said = |before: &[&str]| {
        let doctor = [
            env!("CARGO_BIN_EXE_lm-bench"),
            "rt",
            "doctor",
            "--interface",
            INTERFACE,
        ];
        let words = [before, &doctor].concat();
        let output = bed
            .command(Host::Sender, words[0])
            .args(&words[1..])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let verdict = |said: &str, what: &str| {
        let line = said.lines().find(|line| line.contains(&format!(": {what}: ")));
        line.unwrap_or_else(|| panic!("{what}: {said}"))
            .split_once(':')
            .unwrap()
            .0
            .to_owned()
    };
    let check = |said: &str, verdicts: [(&str, &str); 3]| {
        for (what, expected) in verdicts {
            assert_eq!(verdict(said, what), expected, "{what}: {said}");
        }
    };
    let (well, spoils) = ("well", "spoils real time");
    let with = |capabilities: &str| {
        let bounding = format!("--bounding-set=-all{capabilities}");
        said(&[
            "prlimit",
            "--memlock=65536:65536",
            "--rtprio=0:0",
            "setpriv",
            &bounding,
        ])
    };
    check(
        &with(""),
        [("memlock", spoils), ("priorities", spoils), ("GSO", spoils)],
    );
    check(
        &with(",+ipc_lock,+sys_nice"),
        [("memlock", well), ("priorities", well), ("GSO", spoils)],
    );
    let off = ["-K", INTERFACE, "gso", "off", "tso", "off"];
    assert!(
        bed.command(Host::Sender, "ethtool")
            .args(off)
            .status()
            .unwrap()
            .success()
    );
    check(
        &said(&["env"]),
        [("memlock", well), ("priorities", well), ("GSO", well)],
    );
}
