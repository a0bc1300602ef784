//! The commands `ip` and `tc` of iproute2: many settings in one process through `-batch`.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs one `ip` command per line, in `namespace` if given; stops at the first that fails and names it.
pub fn batch(namespace: Option<&str>, commands: &[String]) -> Result<()> {
    batch_of("ip", namespace, commands)
}

/// The same with this tool of iproute2.
pub(super) fn batch_of(tool: &str, namespace: Option<&str>, commands: &[String]) -> Result<()> {
    let mut command = iproute2(tool);
    if let Some(namespace) = namespace {
        command.args(["-n", namespace]);
    }
    let mut child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| {
            format!(
                "the command `{tool}` is missing; install iproute2 (Debian, Ubuntu: apt-get install iproute2)"
            )
        })?;
    // A failing one may close its end early; its own message says more than the broken pipe.
    let mut stdin = child.stdin.take().context("stdin is piped")?;
    let _ = stdin.write_all((commands.join("\n") + "\n").as_bytes());
    drop(stdin);
    let output = child
        .wait_with_output()
        .with_context(|| format!("`{tool}` ended unexpectedly"))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    // It ends its message with "Command failed -:LINE".
    let line = message
        .rsplit_once("-:")
        .and_then(|(_, line)| line.trim().parse::<usize>().ok());
    let failed = line
        .and_then(|line| commands.get(line.wrapping_sub(1)))
        .map_or("", String::as_str);
    bail!(
        "`{tool} {failed}` failed: {}",
        message.lines().next().unwrap_or("no message")
    )
}

/// Runs an `ip` command that may fail, and says nothing.
pub(super) fn quietly(words: &[&str]) {
    let _ = iproute2("ip").args(words).output();
}

/// A command in a process group of its own: a Ctrl-C at the terminal must not end an `ip` that is cleaning up.
pub(super) fn iproute2(tool: &str) -> Command {
    let mut command = Command::new(tool);
    command.process_group(0).stdin(Stdio::null());
    command
}
