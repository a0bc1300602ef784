//! Kernel, QEMU and the guest's tools, which `packages.sh` fetches and unpacks, and the archive that `image.sh` makes
//! for the guest.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::protocol::{PLAN_PATH, Plan};
use crate::workspace::root;

/// Where the pins lie in the workspace.
const LOCK: &str = "xtask/src/vm/packages.lock";
const PACKAGES: &str = include_str!("packages.sh");
const IMAGE: &str = include_str!("image.sh");
/// Where apt fetches from; the kernel is of the backports.
const SOURCES: &str = "\
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie-backports main";
/// The kernel's `modules.dep` is made by busybox of the tools.
const PARTS: [&str; 3] = ["tools", "qemu", "kernel"];
/// What `packages.sh` ends with where the packages cannot be had.
const LACKING: i32 = 3;
/// Modules that the checks and the tools use where the kernel has them: a bed's bridge, queueing disciplines, the
/// impairment box, foreign packets.
const USEFUL: [&str; 7] = [
    "bridge",
    "tun",
    "dummy",
    "sch_ingress",
    "cls_bpf",
    "act_bpf",
    "pktgen",
];

/// What the machine cannot be had without, with the remedy: a reason to skip, not a defect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unavailable(pub(crate) String);

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// The folder with the parts, unpacked: `$LM_VM_CACHE`, else `$XDG_CACHE_HOME/lm-vm`, else `~/.cache/lm-vm`. With
/// `refresh` the newest packages are pinned before.
pub(super) fn unpacked(refresh: bool) -> Result<PathBuf> {
    let cache = folder(|name| std::env::var_os(name).map(PathBuf::from)).context(
        "no folder to keep packages in: neither LM_VM_CACHE nor XDG_CACHE_HOME nor HOME is set; set LM_VM_CACHE",
    )?;
    ensure!(
        !cache.to_string_lossy().contains(':'),
        "the cache's path must not contain a colon; name another folder in LM_VM_CACHE"
    );
    let lock = root().join(LOCK);
    if refresh {
        fetch(&cache, &lock, SOURCES, &["--refresh"])?;
    }
    fetch(&cache, &lock, SOURCES, &PARTS)?;
    Ok(cache)
}

fn fetch(cache: &Path, lock: &Path, sources: &str, words: &[&str]) -> Result<()> {
    let mut script = Command::new("sh");
    script.args(["-c", PACKAGES, "packages.sh"]).args([cache, lock]);
    let script = script
        .arg(sources)
        .args(words)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = script.output().context("cannot start sh")?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match output.status.code() {
        Some(0) => Ok(()),
        Some(LACKING) => bail!(Unavailable(said)),
        _ => bail!("cannot unpack Debian's packages ({}): {said}", output.status),
    }
}

/// Where the cache lies, from the environment.
fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|path| path.is_absolute());
    set("LM_VM_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("lm-vm")))
        .or_else(|| Some(set("HOME")?.join(".cache/lm-vm")))
}

/// The one folder of the kernel's part, which has image and modules; its name is the release.
pub(super) fn kernel(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("kernel/usr/lib/modules");
    let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut entries = entries.flatten().map(|entry| entry.path());
    let (first, second) = (entries.next(), entries.next());
    ensure!(second.is_none(), "{} has two kernels", folder.display());
    first.with_context(|| format!("{} has no kernel", folder.display()))
}

/// The files of modules and of those they need, each after what it needs, by depmod's `modules.dep` in a kernel's
/// folder. What the list has not may be built in: the check of the devices knows better.
pub(super) fn load_order(folder: &Path, required: &[&str]) -> Result<Vec<PathBuf>> {
    let list = folder.join("modules.dep");
    let list = std::fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let is_called = |path: &str, name: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        let stem = file.split(".ko").next().unwrap_or(file);
        // To the kernel they are the same.
        stem.replace('-', "_") == name
    };
    let mut files: Vec<PathBuf> = Vec::new();
    for name in required.iter().chain(&USEFUL) {
        let mut lines = list.lines().filter_map(|line| line.split_once(':'));
        let Some((file, needed)) = lines.find(|(file, _)| is_called(file, name)) else {
            continue;
        };
        for file in needed.split_whitespace().rev().chain([file]) {
            let file = folder.join(file);
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

/// Packs the guest's files into `archive`, by way of the folder `root`; its length in bytes.
pub(super) fn pack(
    [root, archive]: [&Path; 2],
    [tools, programs]: [&Path; 2],
    plan: &Plan,
    modules: &[PathBuf],
    with: &[PathBuf],
) -> Result<u64> {
    let path = root.join(PLAN_PATH.trim_start_matches('/'));
    std::fs::create_dir_all(path.parent().context("the plan lies in a folder")?)?;
    std::fs::write(&path, serde_json::to_string_pretty(plan)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut script = Command::new("sh");
    script
        .args(["-c", IMAGE, "image.sh"])
        .args([root, tools, programs, archive])
        .args(with);
    let list = archive.with_extension("modules");
    let lines = modules.iter().map(|module| format!("{}\n", module.display()));
    std::fs::write(&list, lines.collect::<String>())?;
    let script = script.stdin(File::open(&list)?).stdout(Stdio::null());
    let status = script.status().context("cannot start sh")?;
    ensure!(
        status.success(),
        "cannot write {} ({status}); is the disk full?",
        archive.display()
    );
    Ok(archive.metadata().map_or(0, |metadata| metadata.len()))
}

#[cfg(test)]
#[path = "packages_tests.rs"]
mod tests;
