//! `cargo xtask testbed`: up, status, down, and what a killed keeper leaves.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use xtask::bed::until;

/// The command's exit code, standard output and standard error.
fn xtask(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
    let output = xtask.arg("testbed").args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The hosts' namespaces.
fn namespaces() -> Vec<String> {
    let (code, status, said) = xtask(&["status", "--json"]);
    assert_eq!(code, Some(0), "{said}");
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let hosts = status["hosts"].as_array().unwrap().iter();
    hosts
        .map(|host| host["namespace"].as_str().unwrap().to_owned())
        .collect()
}

fn are_gone(namespaces: &[String]) -> bool {
    !namespaces
        .iter()
        .any(|name| Path::new("/run/netns").join(name).exists())
}

#[test]
fn a_test_bed_stays_until_it_is_removed() {
    if !rustix::process::geteuid().is_root() {
        assert!(
            std::env::var("CI").as_deref() != Ok("true"),
            "not root, and CI=true allows no skipped test"
        );
        println!("SKIPPED: not root; network namespaces need it");
        return;
    }
    if !namespaces().is_empty() {
        println!("SKIPPED: a test bed is up; cargo xtask testbed down");
        return;
    }
    let (code, said, error) = xtask(&["up", "--hosts", "3", "--no-daemons"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(
        said.contains("3 hosts") && said.contains("ip netns exec"),
        "{said}"
    );
    let hosts = namespaces();
    assert_eq!(hosts.len(), 3);
    let (code, _, error) = xtask(&["up", "--no-daemons"]);
    assert_eq!((code, error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("testbed down"), "{error}");
    let (code, said, _) = xtask(&["down"]);
    assert_eq!((code, said.as_str()), (Some(0), "3 hosts removed"));
    assert!(are_gone(&hosts));
    assert_eq!(xtask(&["down"]).1, "no test bed is up");

    xtask(&["up", "--hosts", "2", "--no-daemons"]);
    let hosts = namespaces();
    let keeper: i32 = hosts[0].split('-').nth(1).unwrap().parse().unwrap();
    kill_process(Pid::from_raw(keeper).unwrap(), Signal::KILL).unwrap();
    until("the dead test bed is gone", Duration::from_secs(10), || {
        Ok(namespaces().is_empty() && are_gone(&hosts))
    })
    .unwrap();
    assert_eq!(xtask(&["up", "--hosts", "1"]).0, Some(2));
}
