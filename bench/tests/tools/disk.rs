//! A disk that fails after it took the bytes: ext4 on an image that lies on a tmpfs. What is written to ext4 is in memory first; what
//! reaches the image is what a power cut would leave.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::bed::{Bed, Host, INTERFACE, Tool, content, seen_by};
use crate::quota::Quota;

/// Starts `lm-recv` into ext4 on an image of 64 MiB, of which `room` can be had.
fn receiver(bed: &Bed, directory: &Path, room: &str, arguments: &[&str]) -> Tool {
    let mount = format!(
        r#"mkdir -p "$1.back" && mount -t tmpfs -o size={room} tmpfs "$1.back" && truncate -s 64M "$1.back/disk" && \
           mke2fs -q -t ext4 -O ^has_journal -m 0 "$1.back/disk" && mount -o loop "$1.back/disk" "$1""#
    );
    bed.recv_mounted(directory, &mount, arguments)
}

fn can_make_file_systems() -> bool {
    let there = Command::new("mke2fs").arg("-V").output().is_ok() && Path::new("/dev/loop-control").exists();
    if !there {
        assert!(std::env::var_os("CI").is_none(), "needs mke2fs and loop devices");
        println!("SKIPPED: needs mke2fs (e2fsprogs) and loop devices");
    }
    there
}

#[test]
fn a_late_error_of_the_disk_reaches_the_sender() {
    let Some(bed) = Bed::new() else { return };
    if !can_make_file_systems() {
        return;
    }
    let directory = bed.directory("in");
    let file = bed.file("file", 24 << 20);
    // The error is a late one: who does not wait for the disk hears nothing of it.
    let hasty = receiver(&bed, &directory, "12M", &["--json"]);
    bed.send_to_end(&[file.to_str().unwrap()]).expect_code(0);
    hasty.interrupt().expect_code(130);

    let patient = receiver(&bed, &directory, "12M", &["--json", "--fsync"]);
    bed.send_to_end(&[file.to_str().unwrap()])
        .expect_error("transfer-000001");
    assert_eq!(
        fs::read_dir(seen_by(&patient, &directory)).unwrap().count(),
        1,
        "lost+found alone"
    );
    let report = patient.interrupt();
    report.expect_code(130);
    assert_eq!(report.json()["transfers"], 0);
    assert_eq!(report.json()["failed_transfers"], 1);
}

#[test]
fn with_fsync_success_outlives_a_power_cut() {
    let Some(bed) = Bed::new() else { return };
    if !can_make_file_systems() {
        return;
    }
    let directory = bed.directory("in");
    const LEN: usize = 5_000_000;
    let file = bed.file("file", LEN);
    let receiver = receiver(&bed, &directory, "64M", &["--fsync"]);
    bed.send_to_end(&["--repeat", "2", file.to_str().unwrap()])
        .expect_code(0);
    // At this instant, and without asking the file system to write anything.
    let image = bed.path("image");
    let back = directory.with_extension("back").join("disk");
    fs::copy(seen_by(&receiver, &back), &image).unwrap();
    receiver.interrupt().expect_code(130);
    let mounted = bed.directory("mounted");
    let script = r#"mount -o loop,ro "$1" "$2" && cat "$2/transfer-000001" "$2/transfer-000002""#;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(image)
        .arg(mounted);
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.stdout == [content(LEN), content(LEN)].concat(),
        "the bytes differ"
    );
}

/// Without --fsync, too: what `close` says is said before success is.
#[test]
fn an_error_at_close_reaches_the_sender() {
    let Some(bed) = Bed::new() else { return };
    let directory = bed.directory("in");
    let Some(_quota) = Quota::mount(&directory) else {
        return;
    };
    let mut command = bed.network_command(Host::Receiver, env!("CARGO_BIN_EXE_lm-recv"));
    command
        .args(["--interface", INTERFACE, "--from-anyone", "--json", "--output"])
        .arg(&directory);
    let receiver = Tool::start(command);
    receiver.wait_for_line("listening on");
    let file = bed.file("file", 300_000);
    bed.send_to_end(&[file.to_str().unwrap()])
        .expect_error("no space left");
    let report = receiver.interrupt();
    assert_eq!(report.expect_code(130).json()["failed_transfers"], 1);
}
