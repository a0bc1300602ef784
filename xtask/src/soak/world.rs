//! The test programs that `cargo xtask soak` runs.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::{cargo, command_line};

/// A test program, and the test in it that runs seeds.
pub(super) struct World {
    /// What is shown while it is built.
    name: &'static str,
    package: &'static str,
    /// Where cargo runs its tests.
    pub(super) folder: &'static str,
    /// Cargo's way to name it, and its name among what cargo built.
    select: &'static [&'static str],
    target: &'static str,
    pub(super) test: &'static str,
    /// What the command line needs beside the seed.
    pub(super) option: &'static str,
}

/// Two engines on the simulated NIC.
pub(super) const ENGINES: World = World {
    name: "the simulated world",
    package: "lm-dataplane",
    folder: "dataplane",
    select: &["--lib"],
    target: "lm_dataplane",
    test: "sim_tests::soak::seeds_settle",
    option: "",
};

/// Many hosts' admission on a simulated network.
pub(super) const ADMISSION: World = World {
    name: "the simulated cluster",
    package: "lm-protocol",
    folder: "lm-protocol",
    select: &["--test", "admission"],
    target: "admission",
    test: "soak::seeds_settle",
    option: " --admission",
};

/// The test of [`ADMISSION`] that prints how long grants take.
const RATES: &str = "rates::table";
/// The test program, as cargo names it among what it built.
fn executable(messages: &str, target: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find(|message| {
            message["reason"] == "compiler-artifact"
                && message["target"]["name"] == target
                && message["profile"]["test"] == true
        })
        .and_then(|message| message["executable"].as_str().map(PathBuf::from))
}

pub(super) fn build(world: &World) -> Result<PathBuf> {
    eprintln!("building {} (release)", world.name);
    let mut command = cargo();
    command
        .args(["test", "--release", "--quiet", "--package", world.package])
        .args(world.select)
        .args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let line = command_line(&command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    ensure!(
        output.status.success(),
        "`{line}` failed ({}); its own message is above",
        output.status
    );
    executable(&String::from_utf8_lossy(&output.stdout), world.target)
        .with_context(|| format!("`{line}` named no test program"))
}

/// Prints the table of both admission policies. What the test program itself says around it is left out.
pub(super) fn rates(program: &Path) -> Result<()> {
    let mut command = Command::new(program);
    command
        .args(["--exact", RATES, "--nocapture"])
        .env("LM_ADMISSION_TABLE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let line = command_line(&command);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start `{line}`"))?;
    let mut lines = 0;
    for said in BufReader::new(child.stdout.take().expect("stdout is piped")).lines() {
        let said = said.with_context(|| format!("cannot read what `{line}` says"))?;
        if said.starts_with('|') {
            println!("{said}");
            lines += 1;
        }
    }
    let status = child.wait().context("cannot wait for the test program")?;
    ensure!(status.success() && lines > 2, "`{line}` failed ({status})");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_program_is_found_among_what_cargo_built() {
        let messages = r#"
{"reason":"compiler-artifact","target":{"name":"lm_dataplane"},"profile":{"test":false},"executable":null}
not JSON
{"reason":"compiler-artifact","target":{"name":"lm_dataplane"},"profile":{"test":true},"executable":"/t/lm_dataplane-1"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(
            executable(messages, "lm_dataplane"),
            Some(PathBuf::from("/t/lm_dataplane-1"))
        );
        assert_eq!(executable(messages, "admission"), None);
        assert_eq!(executable("", "lm_dataplane"), None);
    }
}
