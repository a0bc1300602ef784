//! `cargo xtask vm` and `cargo xtask models` where the programs that they need cannot be had: on this machine a reason
//! to skip, in CI an error.

use std::process::{Command, Output};

use xtask::bed::leftovers::temporary_folder;

/// Asks for a check with an empty cache, and no programs but these, which do nothing: none to fetch packages with.
fn without_packages(arguments: &[&str], programs: &[&str], ci: Option<&str>) -> Output {
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "no-packages").unwrap();
    // What a shell script may take for granted.
    let everywhere = "sh mkdir mktemp flock rm grep cut awk sed cat head tail sha256sum";
    for program in everywhere.split(' ') {
        std::os::unix::fs::symlink(format!("/usr/bin/{program}"), folder.join(program)).unwrap();
    }
    for program in programs {
        std::os::unix::fs::symlink("/bin/true", folder.join(program)).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command
        .args(arguments)
        .env("PATH", &folder)
        .env("LM_VM_CACHE", folder.join("cache"))
        .env_remove("CI");
    if let Some(ci) = ci {
        command.env("CI", ci);
    }
    command.output().unwrap()
}

const BOOT: [&str; 2] = ["vm", "boot"];

#[test]
fn a_guest_that_cannot_be_had_is_skipped_and_in_ci_an_error() {
    let output = without_packages(&BOOT, &[], None);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("SKIPPED: checks on emulated network cards: "),
        "{output:?}"
    );
    let output = without_packages(&BOOT, &[], Some("true"));
    let said = String::from_utf8_lossy(&output.stderr);
    let error: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(!output.status.success() && error.len() == 1, "{output:?}");
    assert!(
        error[0].contains("CI=true does not allow") && error[0].contains("; install "),
        "{said}"
    );
}

#[test]
fn models_without_spin_or_a_compiler_are_skipped_and_in_ci_an_error() {
    for (programs, missing) in [(&[][..], "spin"), (&["spin"], "cc")] {
        let output = without_packages(&["models"], programs, None);
        let said = String::from_utf8_lossy(&output.stdout);
        let skipped = format!("SKIPPED: the models in models/: no `{missing}`: `apt-get install ");
        assert!(output.status.success() && said.contains(&skipped), "{output:?}");
        let output = without_packages(&["models"], programs, Some("true"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{output:?}");
        assert!(
            said.contains("CI=true allows no skipping") && said.contains(&format!("no `{missing}`")),
            "{said}"
        );
    }
}
