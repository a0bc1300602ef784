//! `lm-send` and `lm-recv` as an ordinary user with the capabilities that their manual names, and no others.

use std::fs;
use std::process::Command;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, Tool, content};

const USER: &str = "65534";
/// Locked memory that a user has who did not ask for more, in bytes.
const MEMLOCK: &str = "--memlock=8388608";

/// The capabilities that a tool's manual says it needs.
fn named(tool: &str) -> Vec<String> {
    let output = Command::new(tool).arg("--help").output().unwrap();
    let manual = String::from_utf8(output.stdout).unwrap();
    let (_, rest) = manual.split_once("Needs ").expect("the manual names them");
    let (named, _) = rest.split_once("or root").expect("and root beside them");
    let words = named.split(|letter: char| letter != '_' && !letter.is_ascii_uppercase());
    words
        .filter_map(|word| word.strip_prefix("CAP_"))
        .map(str::to_lowercase)
        .collect()
}

/// A tool with these capabilities alone.
fn with_only(bed: &Bed, host: Host, capabilities: &[String], tool: &str, arguments: &[&str]) -> Tool {
    let sets = capabilities
        .iter()
        .fold("-all".to_owned(), |sets, name| sets + ",+" + name);
    let mut command = bed.network_command(host, "prlimit");
    command
        .args([
            MEMLOCK,
            "setpriv",
            "--clear-groups",
            "--reuid",
            USER,
            "--regid",
            USER,
        ])
        .args([
            format!("--inh-caps={sets}"),
            format!("--ambient-caps={sets}"),
            format!("--bounding-set={sets}"),
        ])
        .args([tool, "--admission", "embedded"])
        .args(arguments);
    Tool::start(command)
}

#[test]
fn the_tools_run_with_what_their_manual_names() {
    let Some(bed) = Bed::new() else { return };
    let [send, recv] = [env!("CARGO_BIN_EXE_lm-send"), env!("CARGO_BIN_EXE_lm-recv")];
    let capabilities = named(recv);
    assert!(!capabilities.is_empty());
    assert_eq!(named(send), capabilities);
    let out = bed.directory("out");
    std::os::unix::fs::chown(&out, Some(65534), Some(65534)).unwrap();
    let to = out.join("file");
    let listen = [
        "--interface",
        INTERFACE,
        "--output",
        to.to_str().unwrap(),
        "--count",
        "1",
        "--json",
    ];
    let receiver = with_only(&bed, Host::Receiver, &capabilities, recv, &listen);
    receiver.wait_for_line("listening on");
    const LEN: usize = 4 << 20;
    let file = bed.file("file", LEN);
    let arguments = ["--json", "--to", RECEIVER, file.to_str().unwrap()];
    let sent = with_only(&bed, Host::Sender, &capabilities, send, &arguments).end();
    sent.expect_code(0);
    let received = receiver.end();
    received.expect_code(0);
    assert!(fs::read(&to).unwrap() == content(LEN), "the bytes differ");
    for report in [sent.json(), received.json()] {
        assert_eq!(
            (&report["bytes"], &report["mode"]),
            (&LEN.into(), &"copy-native".into())
        );
    }
    // None of them is too much, and each that is missing is named.
    for left_out in 0..capabilities.len() {
        let mut fewer = capabilities.clone();
        let name = format!("CAP_{}", fewer.remove(left_out).to_uppercase());
        let again = [&listen[..], &["--force"]].concat();
        with_only(&bed, Host::Receiver, &fewer, recv, &again)
            .end()
            .expect_error(&name);
        assert!(!bed.has_program(Host::Receiver));
    }
}
