//! `cargo xtask dist`: a tarball whose programs run on any Linux of this processor, without Rust.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
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

/// Make a tarball of the tools that runs where no Rust is.
///
/// The programs are linked statically, glibc included; the tarball is unpacked and each program started before
/// the command says where it lies.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Where to put the tarball [default: dist/ in cargo's target folder]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Runs the command.
pub fn dist(arguments: &Arguments) -> Result<()> {
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
            "--target",
            &target,
        ])
        .args(PROGRAMS.iter().flat_map(|program| ["--bin", program]))
        .env("RUSTFLAGS", flags.trim()))?;

    let output = arguments
        .output
        .clone()
        .unwrap_or_else(|| target_dir.join("dist"));
    std::fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
    let name = format!("lm-{}-{target}", env!("CARGO_PKG_VERSION"));
    let (staging, _staging) = temporary_folder(&target_dir, "dist")?;
    let folder = staging.join(&name);
    std::fs::create_dir_all(&folder)?;
    for program in PROGRAMS {
        copy(
            &target_dir.join(&target).join("release").join(program),
            &folder.join(program),
        )?;
        ensure_static(&folder.join(program))?;
    }
    for document in DOCUMENTS {
        let path = root().join(document);
        let name = path.file_name().context("a document has no name")?;
        copy(&path, &folder.join(name))?;
    }
    let tarball = output.join(format!("{name}.tar.gz"));
    let partial = staging.join("partial.tar.gz");
    run(Command::new("tar")
        .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-czf"])
        .arg(&partial)
        .arg("-C")
        .args([&staging, Path::new(&name)]))?;
    try_out(&partial, &staging, &name)?;
    // Not a rename: the output may lie on another file system.
    let len = copy(&partial, &tarball)?;
    println!("{} ({})", tarball.display(), size::exact(len));
    Ok(())
}

/// Unpacks the tarball elsewhere and starts every program with an empty environment.
fn try_out(tarball: &Path, staging: &Path, name: &str) -> Result<()> {
    let elsewhere = staging.join("elsewhere");
    std::fs::create_dir_all(&elsewhere)?;
    run(Command::new("tar")
        .arg("-xzf")
        .arg(tarball)
        .arg("-C")
        .arg(&elsewhere))?;
    for program in PROGRAMS {
        let path = elsewhere.join(name).join(program);
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

fn copy(from: &Path, to: &Path) -> Result<u64> {
    std::fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// The target that `rustc` builds for by itself.
fn host_triple() -> Result<String> {
    let output = Command::new("rustc")
        .arg("-vV")
        .output()
        .context("cannot start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let triple = text
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .context("`rustc -vV` names no host")?;
    Ok(triple.to_owned())
}

/// Fails for a program that wants a dynamic loader (ELF: a program header of type PT_INTERP).
fn ensure_static(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    match wants_loader(&bytes) {
        Some(false) => Ok(()),
        Some(true) => bail!(
            "{} is linked dynamically; is a static libc installed (libc6-dev)?",
            path.display()
        ),
        None => bail!("{} is no 64-bit little-endian ELF program", path.display()),
    }
}

/// Whether an ELF program has an interpreter; `None` if it is not one of ELF64, little-endian (elf(5)).
fn wants_loader(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    let u16_at = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| {
        Some(u32::from_le_bytes(
            elf.get(at..at.checked_add(4)?)?.try_into().ok()?,
        ))
    };
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?)).ok()?;
    let (entry_len, entries) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
    for entry in 0..entries {
        if u32_at(table.checked_add(entry * entry_len)?)? == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_programs_are_recognised() {
        // This test itself is linked dynamically, as every ordinary build is.
        let elf = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(wants_loader(&elf), Some(true));
        assert_eq!(wants_loader(b"#!/bin/sh"), None);
        assert_eq!(wants_loader(&elf[..60]), None);
    }
}
