//! Messages that are sent while they are read, and written while they arrive.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, Tool, content, names, wait_until};
use crate::impairments::{start_box, stop};

/// How long what is there of a file is, whose transfer is under way.
fn part_len(directory: &Path) -> Option<u64> {
    let found = part(directory).and_then(|part| fs::metadata(part).ok());
    found.map(|found| found.len())
}

fn part(directory: &Path) -> Option<PathBuf> {
    let mut names = names(directory).into_iter();
    let name = names.find(|name| name.ends_with(".part"));
    name.map(|name| directory.join(name))
}

/// A file becomes shorter when its receiver has written of it. Its sender notices, so it had not read all of the message then; and the file
/// is nowhere taken for whole.
#[test]
fn the_first_bytes_are_written_before_the_last_are_read() {
    let Some(bed) = Bed::new() else { return };
    const LEN: u64 = 256 << 20;
    let directory = bed.directory("in");
    let path = bed.path("file");
    let receiver = bed.recv(&["--output", directory.to_str().unwrap()]);
    let shortened = |pipeline| {
        let file = fs::File::create(&path).unwrap();
        file.set_len(LEN).unwrap();
        let options = ["--pipeline", pipeline, "--message-size", "1G"];
        let mut sender = bed.send(&[&options[..], &[path.to_str().unwrap()]].concat());
        wait_until("nothing is written", || {
            sender.has_ended() || part_len(&directory) > Some(0)
        });
        file.set_len(1).unwrap();
        sender.end()
    };
    // Without it all of it was read before any of it left.
    (0..2).for_each(|_| _ = shortened("off").expect_code(0));
    // A sender that has read all before the file is cut has been quick: another one may be less so.
    let is_noticed = (0..5).any(|_| {
        let ended = shortened("on");
        if ended.status.success() {
            return false;
        }
        ended.expect_error("became shorter while it was sent; ");
        true
    });
    assert!(is_noticed, "the sender reads all of a message first");
    receiver.wait_for_line("the sender gave up");
    receiver.interrupt().expect_code(130);
    // Of its one message nothing is of use to whoever goes on.
    let left = names(&directory);
    assert!(!left.iter().any(|name| name.ends_with(".part")), "{left:?}");
    for name in left {
        assert_eq!(fs::metadata(directory.join(name)).unwrap().len(), LEN);
    }
}

#[test]
fn with_and_without_it_files_are_the_same() {
    let Some(bed) = Bed::new() else { return };
    const LEN: usize = (5 << 20) + 3;
    let file = bed.file("file", LEN);
    for there in ["on", "off"] {
        let directory = bed.directory(there);
        let receiver = bed.recv(&["--output", directory.to_str().unwrap(), "--pipeline", there]);
        let mut count = 0;
        for here in ["on", "off"] {
            for message_size in ["64K", "3M", "1G"] {
                let options = ["--pipeline", here, "--message-size", message_size];
                let sent = bed.send_to_end(&[&options, &[file.to_str().unwrap()][..]].concat());
                assert_eq!(sent.expect_code(0).json()["user_copied_bytes"], 0);
                count += 1;
                let received = fs::read(directory.join(format!("transfer-{count:06}"))).unwrap();
                assert!(
                    received == content(LEN),
                    "{here} to {there}, {message_size}: the bytes differ"
                );
            }
        }
        receiver.interrupt().expect_code(130);
        assert_eq!(names(&directory).len(), count);

        let receiver = bed.recv(&["--output", "-", "--count", "1", "--pipeline", there]);
        bed.send_to_end(&["--message-size", "2M", file.to_str().unwrap()])
            .expect_code(0);
        assert!(
            receiver.end().expect_code(0).stdout == content(LEN),
            "the bytes differ"
        );
    }
}

/// Windows come in any order then, and some are sent again.
#[test]
fn what_is_written_early_is_right_after_losses() {
    let Some(bed) = Bed::with_box() else { return };
    const LEN: usize = (20 << 20) + 3;
    let file = bed.file("file", LEN);
    let directory = bed.directory("in");
    let running = start_box(&bed, "--loss 1% --duplicate 1% --reorder 1%");
    let receiver = bed.recv(&["--output", directory.to_str().unwrap()]);
    for (number, message_size) in [(1, "2M"), (2, "1G")] {
        let sent = bed.send_to_end(&["--message-size", message_size, file.to_str().unwrap()]);
        sent.expect_code(0);
        let received = fs::read(directory.join(format!("transfer-{number:06}"))).unwrap();
        assert!(received == content(LEN), "{message_size}: the bytes differ");
    }
    receiver.interrupt().expect_code(130);
    stop(running);
}

/// Of one message that takes two seconds on the link.
#[test]
fn a_message_is_written_while_it_arrives() {
    let Some(bed) = Bed::quiet(false) else { return };
    const LEN: usize = 8 << 20;
    const TIME: Duration = Duration::from_millis(1600);
    let file = bed.file("file", LEN);
    for is_on in [true, false] {
        let directory = bed.directory(if is_on { "on" } else { "off" });
        let pipeline = if is_on { "on" } else { "off" };
        let output = directory.to_str().unwrap();
        let receiver = bed.recv(&[
            "--output",
            output,
            "--count",
            "1",
            "--stats",
            "0.1",
            "--pipeline",
            pipeline,
        ]);
        let mut sender = bed.send(&[
            "--rate",
            "40M",
            "--stats",
            "0.1",
            "--message-size",
            "1G",
            file.to_str().unwrap(),
        ]);
        wait_until("nothing begins", || part_len(&directory).is_some());
        let begin = Instant::now();
        match is_on {
            true => wait_until("little is written", || {
                assert!(!sender.has_ended(), "it was written when it was whole");
                part_len(&directory) > Some(LEN as u64 / 4)
            }),
            false => {
                // Nothing is written for so long.
                std::thread::sleep(TIME / 3);
                let len = part_len(&directory);
                // A machine that has much else to do may have slept for longer.
                assert!(
                    len == Some(0) || begin.elapsed() > TIME,
                    "{len:?} of it is written"
                );
            }
        }
        let (sent, received) = (sender.end(), receiver.end());
        // All of it was read and released, and some of it sent, when nothing was confirmed; some of it had landed, and was shown and written
        // where that is wanted, when nothing was whole.
        let fragments = LEN.div_ceil(1448);
        let under_way = |stderr: &str, before: &str, behind: &str| {
            let is_it = |line: &str| {
                let count = line.split_once(before)?.1.split_once(behind)?.0;
                Some((1..fragments).contains(&count.parse().ok()?))
            };
            stderr.lines().any(|line| is_it(line) == Some(true))
        };
        let (sent, received) = (&sent.expect_code(0).stderr, &received.expect_code(0).stderr);
        let sent_to = "read 8.00 MiB, released 8.00 MiB, sent ";
        assert!(
            under_way(sent, sent_to, " fragments, confirmed 0 B in 0 messages, "),
            "{sent}"
        );
        let is_nothing_written = " fragments, shown 0 B, written 0 B, whole 0 B in 0 messages, ";
        assert!(
            under_way(received, "landed ", is_nothing_written) || is_on,
            "{received}"
        );
        let mib = |line: &str, before: &str| {
            let count = line.split_once(before)?.1.split_once(" MiB, ")?.0;
            count.parse::<f64>().ok()
        };
        let is_written = received.lines().any(|line| {
            let (shown, written) = (mib(line, ", shown "), mib(line, ", written "));
            written.is_some() && shown >= written && line.contains(", whole 0 B in 0 messages, ")
        });
        assert_eq!(is_written, is_on, "{received}");
        assert!(fs::read(directory.join("transfer-000001")).unwrap() == content(LEN));
    }
}

/// Whatever was written of messages that were not whole: what goes on is what the digests of whole messages say.
#[test]
fn a_transfer_goes_on_that_broke_in_the_middle_of_a_message() {
    let Some(bed) = Bed::quiet(false) else { return };
    const LEN: usize = 12 << 20;
    const MESSAGE_LEN: u64 = 4 << 20;
    let file = bed.file("file", LEN);
    let directory = bed.directory("in");
    let options = ["--json", "--message-size", "4M", file.to_str().unwrap()];
    for (count, receiver_is_killed) in [(1, false), (2, true)] {
        let receiver = bed.recv(&["--output", directory.to_str().unwrap()]);
        let sender = bed.send(&[&options, &["--rate", "60M"][..]].concat());
        wait_until("too little comes", || {
            part_len(&directory) > Some(MESSAGE_LEN + MESSAGE_LEN / 4)
        });
        if receiver_is_killed {
            receiver.signal(Signal::KILL);
            receiver.end();
            sender.end().expect_code(1);
            assert!(part_len(&directory) > Some(MESSAGE_LEN));
        } else {
            sender.interrupt().expect_code(130);
            receiver.wait_for_line("the sender gave up");
            receiver.interrupt().expect_code(130);
            assert_eq!(part_len(&directory).unwrap() % MESSAGE_LEN, 0);
        }
        let receiver = bed.recv(&["--output", directory.to_str().unwrap(), "--count", "1"]);
        let resumed = bed.send(&[&options, &["--resume"][..]].concat()).end();
        let resumed = resumed.expect_code(0).json()["resumed_bytes"].as_u64().unwrap();
        assert!(
            (1..3).any(|messages| resumed == messages * MESSAGE_LEN),
            "{resumed}"
        );
        receiver.end().expect_code(0);
        assert!(fs::read(directory.join(format!("transfer-{count:06}"))).unwrap() == content(LEN));
        assert_eq!(part(&directory), None);
    }
}

/// The soak's reader of what arrives sees windows before their messages are whole, and finds bytes that are not those that were sent.
#[test]
fn a_wrong_byte_is_found_while_it_arrives() {
    let Some(bed) = Bed::new() else { return };
    let check = |host, line: &str| {
        let line = format!(
            "messages --interface {INTERFACE} --time-limit 15 --lens 1M --messages 8 --window 16 {line}"
        );
        let mut command = bed.command(host, env!("CARGO_BIN_EXE_lm-check"));
        command.args(line.split_whitespace());
        Tool::start(command)
    };
    for (seed, is_right) in [(1, true), (2, false)] {
        let receiver = check(Host::Receiver, &format!("--read --seed {seed}"));
        receiver.wait_for_line("ready");
        let sent = check(Host::Sender, &format!("--to {RECEIVER} --seed 1")).end();
        sent.expect_code(0);
        receiver.signal(Signal::TERM);
        let report = receiver.end().expect_code(0).json();
        let faults = report["faults"].as_array().expect("a list").iter();
        let shown = faults.filter(|fault| {
            fault
                .as_str()
                .is_some_and(|fault| fault.ends_with("was shown and is wrong"))
        });
        assert_eq!(shown.count() == 0, is_right, "{report}");
        assert!(
            !is_right || report["read"]["early_bytes"].as_u64() > Some(1 << 20),
            "{report}"
        );
    }
}
