//! The command line: refusals with a remedy.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};

fn skipped() -> bool {
    if rustix::process::geteuid().is_root() {
        return false;
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "not root, and CI=true allows no skipped test"
    );
    println!("SKIPPED: not root; network namespaces need it");
    true
}

/// A folder of this test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(purpose: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("xtask-{purpose}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The only line a failing command says, and its exit code.
fn refusal(output: &Output) -> (String, Option<i32>) {
    let text = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    (text, output.status.code())
}

#[test]
fn users_who_are_not_root_are_told_what_to_do() {
    let folder = Folder::new("cli");
    // The build's folder may be closed to other users.
    let program = folder.0.join("xtask");
    // By a process of its own: a program that another thread starts meanwhile would keep a file that we write open, and
    // nobody can run one that is being written (ETXTBSY).
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_xtask"))
        .arg(&program)
        .status();
    assert!(copied.unwrap().success());
    for command in [
        &["run"][..],
        &["bed"],
        &["bed", "--port", "100Mbit/32"],
        &["bench", "compare"],
        &["bench", "compare", "--loss", "1%"],
        &["bench", "compare", "--senders", "3", "--port", "100Mbit/32"],
    ] {
        let mut xtask = Command::new(&program);
        if rustix::process::geteuid().is_root() {
            xtask.uid(65534).gid(65534);
        }
        let (line, code) = refusal(&xtask.args(command).output().unwrap());
        assert!(
            line.starts_with("error: not root") && line.contains("sudo"),
            "{line}"
        );
        assert_eq!(code, Some(1));
    }
}

#[test]
fn a_machine_without_iproute2_is_told_what_to_install() {
    if skipped() {
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("bed")
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    let (line, code) = refusal(&output);
    assert!(line.contains("install iproute2"), "{line}");
    assert_eq!(code, Some(1));
}

#[test]
fn an_unwritable_result_file_is_refused_before_anything_runs() {
    if skipped() {
        return;
    }
    for command in [&["run"][..], &["bench", "card"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(command)
            .args(["--json", "/no/such/folder/result"])
            .output()
            .unwrap();
        let (line, code) = refusal(&output);
        assert!(line.contains("/no/such/folder/result"), "{line}");
        assert_eq!(code, Some(1));
    }
}

#[test]
fn an_interface_without_a_peer_is_wrong_usage() {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["run", "--interface", "lo"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--peer"));
}

/// As of `| head -1`.
#[test]
fn output_that_nobody_reads_ends_it_quietly() {
    let (_, unread) = std::io::pipe().unwrap();
    let mut list = Command::new(env!("CARGO_BIN_EXE_xtask"));
    let output = list.args(["vm", "--list"]).stdout(unread).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.as_str()), (Some(141), ""));
}
