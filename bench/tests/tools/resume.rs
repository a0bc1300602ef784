//! Transfers that go on where an earlier one ended, whoever was killed then, and whatever became of the file meanwhile.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use crate::bed::{Bed, Ended, Host, Tool, content, expect_files, names, wait_until};
use rustix::process::Signal;

pub(crate) const LEN: usize = 12 << 20;
const MESSAGE_LEN: u64 = 256 << 10;

fn send(bed: &Bed, file: &Path, options: &[&str]) -> Tool {
    let file = ["--json", "--message-size", "256K", file.to_str().unwrap()];
    bed.send(&[&file, options].concat())
}

fn part(directory: &Path) -> Option<PathBuf> {
    let parts = names(directory)
        .into_iter()
        .filter(|name| name.ends_with(".part"));
    parts.map(|name| directory.join(name)).next()
}

/// A transfer of the file that has come to a third.
pub(crate) fn under_way(bed: &Bed, file: &Path, directory: &Path, options: &[&str]) -> Tool {
    let sender = send(bed, file, &[&["--rate", "40M"], options].concat());
    wait_until("too little comes", || {
        let found = part(directory).and_then(|part| fs::metadata(part).ok());
        found.is_some_and(|found| found.blocks() * 512 > LEN as u64 / 3)
    });
    sender
}

/// Goes on, and returns how many bytes had not to be sent again.
pub(crate) fn resume(bed: &Bed, file: &Path) -> u64 {
    let ended: Ended = send(bed, file, &["--resume"]).end();
    let report = ended.expect_code(0).json();
    let (sent, resumed) = (&report["bytes"], report["resumed_bytes"].as_u64().unwrap());
    assert_eq!(
        sent.as_u64().unwrap() + resumed,
        fs::metadata(file).unwrap().len(),
        "{report}"
    );
    resumed
}

#[test]
fn after_the_receiver_was_killed() {
    let Some(bed) = Bed::quiet(false) else { return };
    let file = bed.file("file", LEN);
    let directory = bed.directory("in");
    for (output, kill_both) in [(directory.join("named"), false), (directory.clone(), true)] {
        let receiver = bed.recv(&["--output", output.to_str().unwrap()]);
        let sender = under_way(&bed, &file, &directory, &[]);
        receiver.signal(Signal::KILL);
        receiver.end();
        wait_until("it is still attached", || !bed.has_program(Host::Receiver));
        match kill_both {
            true => drop(sender),
            false => {
                sender.end().expect_code(1);
            }
        }
        // A receiver that knows of nothing but the file.
        let receiver = bed.recv(&["--output", output.to_str().unwrap(), "--json", "--count", "1"]);
        let resumed = resume(&bed, &file);
        assert!(resumed > LEN as u64 / 8 && resumed < LEN as u64, "{resumed}");
        let report = receiver.end().expect_code(0).json();
        assert_eq!(report["resumed_bytes"], resumed);
        assert_eq!(report["bytes"], LEN as u64 - resumed);
    }
    expect_files(&directory, LEN, &["named", "transfer-000001"]);
}

#[test]
fn after_the_sender_was_killed_or_stopped() {
    let Some(bed) = Bed::quiet(false) else { return };
    let file = bed.file("file", LEN);
    let (receiver, directory) = bed.recv_into("in", &[]);
    let sender = under_way(&bed, &file, &directory, &[]);
    sender.signal(Signal::KILL);
    sender.end();
    wait_until("it is still attached", || !bed.has_program(Host::Sender));
    // When its lease is over.
    receiver.wait_for_line("transfer from 10.77.0.1 failed");
    let resumed = resume(&bed, &file);
    assert!(resumed > LEN as u64 / 8 && resumed < LEN as u64, "{resumed}");

    // Twice, then by another receiver.
    under_way(&bed, &file, &directory, &[])
        .interrupt()
        .expect_code(130);
    receiver.wait_for_line("the sender gave up");
    let sender = send(&bed, &file, &["--resume", "--rate", "40M"]);
    let before = fs::metadata(part(&directory).unwrap()).unwrap().mtime_nsec();
    wait_until("nothing comes", || {
        fs::metadata(part(&directory).unwrap()).unwrap().mtime_nsec() != before
    });
    receiver.interrupt().expect_code(130);
    sender.end().expect_code(1);
    let receiver = bed.recv(&["--output", directory.to_str().unwrap(), "--json"]);
    let resumed = resume(&bed, &file);
    assert!(resumed > LEN as u64 / 8 && resumed < LEN as u64, "{resumed}");

    // Without --resume it begins anew.
    under_way(&bed, &file, &directory, &[])
        .interrupt()
        .expect_code(130);
    receiver.wait_for_line("the sender gave up");
    let sent = send(&bed, &file, &[]).end();
    assert_eq!(sent.expect_code(0).json()["resumed_bytes"], 0);
    let report = receiver.interrupt().expect_code(130).json();
    assert_eq!(report["resumed_bytes"], resumed);
    let files = ["transfer-000001", "transfer-000002", "transfer-000003"];
    expect_files(&directory, LEN, &files);
}

/// Whatever lies in the part's place: what is the file's beginning is not sent, and all that differs is.
#[test]
fn what_was_kept_is_believed_as_far_as_its_digests_go() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", LEN);
    let (receiver, directory) = bed.recv_into("in", &[]);
    under_way(&bed, &file, &directory, &[])
        .interrupt()
        .expect_code(130);
    receiver.wait_for_line("the sender gave up");
    let part = part(&directory).unwrap();

    let good = content(LEN);
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        bytes
    };
    let longer = |bytes: &[u8]| [bytes, &bytes[..LEN / 2]].concat();
    let mut hole = good.clone();
    hole[3 << 20..(3 << 20) + 4096].fill(0);
    let whole_messages = |bytes: usize| bytes as u64 / MESSAGE_LEN * MESSAGE_LEN;
    let mut count = 0;
    let mut go_on = |source: &[u8], resumed: u64, what: &str| {
        fs::write(&file, source).unwrap();
        assert_eq!(resume(&bed, &file), resumed, "{what}");
        count += 1;
        let received = directory.join(format!("transfer-{count:06}"));
        assert!(fs::read(received).unwrap() == source, "{what}: the bytes differ");
        assert!(!part.exists());
    };
    for (what, kept, resumed) in [
        ("a flipped byte", flipped(5_000_000), whole_messages(5_000_000)),
        ("the first byte", flipped(0), 0),
        ("the last byte", flipped(LEN - 1), LEN as u64 - MESSAGE_LEN),
        ("all of it", good.clone(), LEN as u64),
        ("more than all", longer(&good), LEN as u64),
        (
            "a flipped byte and more than all",
            longer(&flipped(6_000_000)),
            whole_messages(6_000_000),
        ),
        ("a hole", hole, 3 << 20),
        (
            "the beginning",
            good[..1_000_000].to_vec(),
            whole_messages(1_000_000),
        ),
        ("another file of that length", vec![7; LEN], 0),
        ("nothing", Vec::new(), 0),
    ] {
        fs::write(&part, kept).unwrap();
        go_on(&good, resumed, what);
    }
    // The file has changed since, and is shorter.
    fs::write(&part, &good).unwrap();
    go_on(
        &flipped(7_000_000)[..LEN - 1000],
        whole_messages(7_000_000),
        "a change",
    );

    // What other users of the directory put there is neither read nor written.
    let victim = bed.file("victim", LEN);
    for hard in [false, true] {
        if hard {
            fs::hard_link(&victim, &part).unwrap();
        } else {
            symlink(&victim, &part).unwrap();
        }
        go_on(&good, 0, "a link");
        assert!(fs::read(&victim).unwrap() == good);
    }
    receiver.interrupt().expect_code(130);
}
