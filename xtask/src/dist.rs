//! `cargo xtask dist`: a tarball whose programs run on any Linux of this processor, without Rust.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lm_measure::size;

use crate::bed::leftovers::{temporary_folder, watch_signals};
use crate::workspace::{cargo, root, run, target_dir};

/// What is in the tarball beside the programs.
const DOCUMENTS: [&str; 8] = [
    "admission/config.example.toml",
    "admission/lm-admissiond.service",
    "README.md",
    "docs/running.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
];
const PROGRAMS: [&str; 4] = ["lm-send", "lm-recv", "lm-bench", "lm-admissiond"];

/// Makes the tarball in `dist` of cargo's target folder.
pub fn dist() -> Result<()> {
    watch_signals()?;
    let target = host_triple()?;
    let target_dir = target_dir()?;
    // Naming the target keeps the flag away from build scripts and procedural macros, which cannot be static.
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" -C target-feature=+crt-static");
    run(cargo()
        .args([
            "build",
            "--release",
            "--package",
            "lm-bench",
            "--package",
            "lm-admission",
        ])
        .args(["--target", &target])
        .args(PROGRAMS.iter().flat_map(|program| ["--bin", program]))
        .env("RUSTFLAGS", flags.trim()))?;

    let output = target_dir.join("dist");
    std::fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
    let name = format!("lm-{}-{target}", env!("CARGO_PKG_VERSION"));
    let (staging, _staging) = temporary_folder(&target_dir, "dist")?;
    let folder = staging.join(&name);
    std::fs::create_dir_all(&folder)?;
    let built = target_dir.join(&target).join("release");
    let programs = PROGRAMS.map(|program| built.join(program));
    for path in programs
        .into_iter()
        .chain(DOCUMENTS.map(|document| root().join(document)))
    {
        let to = folder.join(path.file_name().context("a document has no name")?);
        std::fs::copy(&path, to).with_context(|| format!("cannot copy {}", path.display()))?;
    }
    let tarball = output.join(format!("{name}.tar.gz"));
    let partial = staging.join("partial.tar.gz");
    run(Command::new("tar")
        .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-czf"])
        .arg(&partial)
        .arg("-C")
        .args([&staging, Path::new(&name)]))?;
    try_out(&partial, &staging.join("elsewhere"), &name)?;
    std::fs::rename(&partial, &tarball).with_context(|| format!("cannot write {}", tarball.display()))?;
    println!(
        "{} ({})",
        tarball.display(),
        size::exact(tarball.metadata()?.len())
    );
    Ok(())
}

/// Unpacks the tarball elsewhere and starts every program with an empty environment.
fn try_out(tarball: &Path, elsewhere: &Path, name: &str) -> Result<()> {
    std::fs::create_dir_all(elsewhere)?;
    run(Command::new("tar")
        .arg("-xzf")
        .arg(tarball)
        .arg("-C")
        .arg(elsewhere))?;
    for program in PROGRAMS {
        let path = elsewhere.join(name).join(program);
        ensure!(
            is_static(&path)?,
            "{} is linked dynamically; is a static libc installed (libc6-dev)?",
            path.display()
        );
        let output = Command::new(&path)
            .arg("--version")
            .env_clear()
            .current_dir("/")
            .output();
        let output = output.with_context(|| format!("the packed {program} does not start"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success() && said.contains(env!("CARGO_PKG_VERSION")),
            "the packed {program} --version failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// The target that `rustc` builds for by itself.
fn host_triple() -> Result<String> {
    let output = Command::new("rustc")
        .arg("-vV")
        .output()
        .context("cannot start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let triple = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(triple.context("`rustc -vV` names no host")?.to_owned())
}

/// Whether a program wants no library at all, not even a loader.
fn is_static(path: &Path) -> Result<bool> {
    let output = Command::new("ldd")
        .arg(path)
        .output()
        .context("cannot start ldd")?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    Ok(said.contains("statically linked") || said.contains("not a dynamic executable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_programs_are_recognised() {
        // This test itself is linked dynamically, as every ordinary build is.
        assert!(!is_static(&std::env::current_exe().unwrap()).unwrap());
    }
}
