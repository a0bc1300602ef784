//! `cargo xtask test --vm` where the virtual machine cannot be had: on this machine a reason to skip, in CI an error.

use std::process::{Command, Output};

use xtask::bed::leftovers::temporary_folder;

/// Asks for a check with an empty cache, and no program to fetch packages with.
fn without_packages(ci: Option<&str>) -> Output {
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "no-packages").unwrap();
    std::os::unix::fs::symlink("/usr/bin/env", folder.join("env")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command
        .args(["test", "--vm", "boot"])
        .env("PATH", &folder)
        .env("LM_VM_CACHE", folder.join("cache"))
        .env_remove("CI");
    if let Some(ci) = ci {
        command.env("CI", ci);
    }
    command.output().unwrap()
}

#[test]
fn a_guest_that_cannot_be_had_is_skipped_and_in_ci_an_error() {
    let output = without_packages(None);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("SKIPPED: checks on emulated network cards: "),
        "{output:?}"
    );
    let output = without_packages(Some("true"));
    let said = String::from_utf8_lossy(&output.stderr);
    let error: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(!output.status.success() && error.len() == 1, "{output:?}");
    assert!(
        error[0].contains("CI=true does not allow") && error[0].contains("; install "),
        "{said}"
    );
}
