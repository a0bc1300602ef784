//! The workspace: where it is, how its programs are built, and which ones there are.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// The folder with the workspace's `Cargo.toml`.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
}

/// The cargo that started this program, or the one on the path.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// Runs a command to its end with its output shown; an exit code other than 0 is an error that names it.
pub fn run(command: &mut Command) -> Result<()> {
    let line = command_line(command);
    let status = command
        .status()
        .with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status}); its own message is above");
    }
    Ok(())
}

/// What a command says that ends well.
///
/// # Errors
/// What it says on standard error.
pub fn said_by(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start `{}`", command_line(command)))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The same of a command that shows by itself what goes wrong.
pub fn said_aloud_by(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start `{}`", command_line(command)))?;
    ensure!(
        output.status.success(),
        "`{}` failed; its own message is above",
        command_line(command)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The command as a user would type it.
pub fn command_line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words = std::iter::once(program).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Where cargo puts what it builds: `CARGO_TARGET_DIR`, cargo's configuration or `target/`, as cargo itself says.
pub fn target_dir() -> Result<PathBuf> {
    let words = ["metadata", "--format-version", "1", "--no-deps", "--offline"];
    let metadata: serde_json::Value = serde_json::from_str(&said_aloud_by(cargo().args(words))?)?;
    let folder = metadata["target_directory"]
        .as_str()
        .context("`cargo metadata` names no target directory")?;
    Ok(PathBuf::from(folder))
}

/// What cargo builds `--dpdk` and its tests with.
pub const WITH_DPDK: [&str; 2] = ["--features", "lm-bench/dpdk"];

/// Whether this machine has DPDK to build with.
///
/// # Errors
/// It has not; with the command that brings it.
pub fn ensure_dpdk() -> Result<()> {
    let asked = Command::new("pkg-config")
        .args(["--exists", "libdpdk >= 22.11"])
        .status();
    ensure!(
        asked.is_ok_and(|status| status.success()),
        "DPDK 22.11 or later is not installed; apt-get install libdpdk-dev dpdk-dev pkg-config"
    );
    Ok(())
}

/// The release builds of the tools.
#[derive(Clone, Debug)]
pub struct Programs {
    pub(crate) folder: PathBuf,
}

impl Programs {
    /// Builds these tools in release mode.
    pub fn build(names: &[&str]) -> Result<Programs> {
        Programs::build_with(names, &[])
    }

    /// The same with these features.
    pub fn build_with(names: &[&str], features: &[&str]) -> Result<Programs> {
        eprintln!("building the tools (release)");
        run(cargo()
            .args(["build", "--release", "--quiet"])
            .args(names.iter().flat_map(|name| ["--bin", name]))
            .args(features))?;
        Ok(Programs::in_folder(&target_dir()?.join("release")))
    }

    /// Tools that were built before.
    pub fn in_folder(folder: &Path) -> Programs {
        Programs {
            folder: folder.to_owned(),
        }
    }

    /// The path of `lm-send`, `lm-recv`, `lm-bench`, `lm-check` or `lm-admissiond`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
