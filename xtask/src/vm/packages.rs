//! Kernel, QEMU and the guest's tools from Debian's packages, by the ordinary `apt-get` with a state of its own: nothing is
//! installed, and the machine's own package state is neither read nor written. What is in the cache is not fetched again, and
//! each use compares it with the pins: a run on another kernel or another emulator would count other instructions and have other
//! faults, so that they change by a commit and no other way.
//!
//! ```text
//!   CACHE/apt/…           lists, sources and settings of apt
//!   CACHE/debs/…          the pinned packages
//!   CACHE/kernel/…        those of the kernel, unpacked: usr/lib/modules/RELEASE/vmlinuz, modules.dep, kernel/…
//!   CACHE/qemu/…          qemu-system-x86 and everything that it needs, its C library and loader too
//!   CACHE/tools/…         busybox, dash, iproute2, ethtool, likewise
//!   CACHE/PART.seal       what a part was unpacked from, and the digest of all that lies there
//! ```

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FlockOperation;

use super::unavailable::Unavailable;
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Launch, Output};
use crate::content::sha256;
use crate::workspace;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const MIRROR: &str = "http://deb.debian.org/debian";
const SUITES: [&str; 2] = ["trixie", "trixie-backports"];
/// The kernel's part: `usr/lib/modules/RELEASE` with image, modules and `modules.dep`.
pub(super) const KERNEL: &str = "kernel";
/// QEMU's part, with all that it needs.
pub(super) const QEMU: &str = "qemu";
/// The part of the guest's tools: busybox (static), a shell, `ip`, `tc`, `ethtool` with their libraries.
pub(super) const TOOLS: &str = "tools";
/// What is asked for; the packages that these need are pinned as well, but of what a kernel needs when it is installed.
const ASKED: [(&str, &[&str]); 3] = [
    (KERNEL, &["-t", SUITES[1], "linux-image-amd64"]),
    (QEMU, &["qemu-system-x86"]),
    (TOOLS, &["busybox-static", "dash", "iproute2", "ethtool"]),
];
/// No command here takes longer.
const LIMIT: Duration = Duration::from_secs(900);
/// Where the pins lie in the workspace, and what is there.
pub(super) const LOCK: &str = "xtask/src/vm/packages.lock";
const COMMITTED: &str = include_str!("packages.lock");
const LOCK_HEAD: &str = "\
# Debian's packages that the virtual machine is made of: kernel, QEMU, the guest's tools. Each use compares their files with the SHA-256.
# Made anew by `cargo xtask vm --refresh`.
#
# part file sha256
";

/// A package and what its file must be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pin {
    /// What it is for: a folder of the cache.
    part: String,
    /// As apt calls it: `NAME_VERSION_ARCHITECTURE.deb`, with `%3a` for a colon.
    file: String,
    /// SHA-256 of the file, in hexadecimal.
    sha256: String,
}

impl Pin {
    fn new(part: &str, file: &str, sha256: &str) -> Option<Pin> {
        let is_file = file.ends_with(".deb") && file.split('_').count() == 3;
        let is_hash = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
        (is_file && is_hash).then(|| Pin {
            part: part.to_owned(),
            file: file.to_owned(),
            sha256: sha256.to_owned(),
        })
    }

    /// Reads a line of `PART FILE SHA256`.
    fn parse(line: &str) -> Result<Pin> {
        let words: Vec<&str> = line.split(' ').collect();
        let pin = match words[..] {
            [part, file, sha256] => Pin::new(part, file, sha256),
            _ => None,
        };
        pin.with_context(|| {
            format!("{LOCK} has a line that is no part, file and SHA-256: {line:?}; `git checkout` it")
        })
    }

    /// Of what `apt-get --print-uris` says: lines of `'URI' FILE BYTES SHA256:HASH`.
    fn of_uri(part: &str, line: &str) -> Option<Pin> {
        let mut words = line.strip_prefix('\'')?.split_whitespace().skip(1);
        let (file, sha256) = (words.next()?, words.nth(1)?.strip_prefix("SHA256:")?);
        // Of the kernel's the packages of its release, and not what it needs when it is installed.
        let release = ["linux-image-", "linux-binary-", "linux-modules-"].map(|kind| file.strip_prefix(kind));
        let is_of_kernel = release
            .into_iter()
            .flatten()
            .any(|release| release.starts_with(|c: char| c.is_ascii_digit()));
        (part != KERNEL || is_of_kernel)
            .then(|| Pin::new(part, file, sha256))
            .flatten()
    }

    /// As `apt-get download` takes it.
    fn asked(&self) -> String {
        let words: Vec<&str> = self.file.split('_').collect();
        format!("{}={}", words[0], words[1].replace("%3a", ":"))
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {} {}", self.part, self.file, self.sha256)
    }
}

/// The pins of this workspace.
fn committed() -> Result<Vec<Pin>> {
    let lines = COMMITTED.lines().filter(|line| !line.starts_with('#'));
    lines.map(Pin::parse).collect()
}

/// Pins as they are committed: sorted, so that a change of one package is a change of one line.
fn lock_file(pins: &[Pin]) -> String {
    let mut pins = pins.to_vec();
    pins.sort();
    LOCK_HEAD.to_owned() + &pins.iter().map(Pin::to_string).collect::<String>()
}

/// The folder with all that was fetched.
#[derive(Debug)]
pub(super) struct Cache {
    root: PathBuf,
    pins: Vec<Pin>,
    /// Where apt fetches from.
    sources: String,
    /// Held as long as something may be fetched: two runs at once would write the same files.
    _held: File,
}

impl Cache {
    /// `$LM_VM_CACHE`, else `$XDG_CACHE_HOME/lm-vm`, else `~/.cache/lm-vm`; waits for others that use it. With `refresh` the newest
    /// packages are pinned.
    pub(super) fn open(refresh: bool) -> Result<Cache> {
        let root = folder(|name| std::env::var_os(name).map(PathBuf::from)).context(
            "no folder to keep packages in: neither LM_VM_CACHE nor XDG_CACHE_HOME nor HOME is set; set LM_VM_CACHE",
        )?;
        let mut cache = Cache::at(root, committed()?, sources())?;
        if refresh {
            cache.pins = cache.newest()?;
            let path = workspace::root().join(LOCK);
            std::fs::write(&path, lock_file(&cache.pins))
                .with_context(|| format!("cannot write {}", path.display()))?;
            eprintln!("the newest packages are pinned in {LOCK}: commit it");
        }
        Ok(cache)
    }

    fn at(root: PathBuf, pins: Vec<Pin>, sources: String) -> Result<Cache> {
        let unusable = || {
            format!(
                "cannot use the folder {}; name another in LM_VM_CACHE",
                root.display()
            )
        };
        std::fs::create_dir_all(root.join("debs")).with_context(unusable)?;
        let held = File::create(root.join("lock")).with_context(unusable)?;
        rustix::fs::flock(&held, FlockOperation::LockExclusive).with_context(unusable)?;
        Ok(Cache {
            root,
            pins,
            sources,
            _held: held,
        })
    }

    /// The folder with a part's packages, unpacked. It appears whole or not at all.
    pub(super) fn unpacked(&self, part: &str) -> Result<PathBuf> {
        let pins: Vec<&Pin> = self.pins.iter().filter(|pin| pin.part == part).collect();
        ensure!(!pins.is_empty(), "{LOCK} pins nothing for {part}");
        self.fetch(part, &pins)?;
        let (folder, seal) = (self.root.join(part), self.root.join(format!("{part}.seal")));
        let sealed = |folder: &Path| {
            let lines: String = pins.iter().map(|pin| pin.to_string()).collect();
            anyhow::Ok(lines + &tree_digest(folder)?)
        };
        if let Ok(text) = std::fs::read_to_string(&seal) {
            if folder.is_dir() && text == sealed(&folder)? {
                return Ok(folder);
            }
            eprintln!(
                "{} is not what was unpacked there, or of other packages: unpacking it anew",
                folder.display()
            );
        }
        eprintln!("unpacking {} packages of the {part}", pins.len());
        let (unpacked, _unpacked) = temporary_folder(&self.root, "unpacked")?;
        for pin in &pins {
            self.unpack(pin, &unpacked)?;
        }
        if part == KERNEL {
            depmod(&self.unpacked(TOOLS)?, &unpacked)?;
        }
        let unwritable = || format!("cannot write {}", folder.display());
        if folder.exists() {
            std::fs::remove_dir_all(&folder).with_context(unwritable)?;
        }
        std::fs::rename(&unpacked, &folder).with_context(unwritable)?;
        std::fs::write(seal, sealed(&folder)?).with_context(unwritable)?;
        Ok(folder)
    }

    fn unpack(&self, pin: &Pin, into: &Path) -> Result<()> {
        let package = self.file_of(pin);
        let program = Launch::new("dpkg-deb").arg("-x").args([&*package, into]);
        let program = program.time_limit(LIMIT).spawn();
        let unpacked = program.map_err(|_| Unavailable::command("dpkg-deb"))?.finish();
        unpacked.map(drop).map_err(|error| {
            if !format!("{error:#}").contains("No space left on device") {
                return error.context(format!("cannot unpack {}", package.display()));
            }
            let what = format!(
                "the disk has no room for Debian's packages in {}",
                self.root.display()
            );
            Unavailable::debian(&what, "free 1 GiB there, or name another folder (LM_VM_CACHE)").into()
        })
    }

    fn file_of(&self, pin: &Pin) -> PathBuf {
        self.root.join("debs").join(&pin.file)
    }

    /// Every pinned package is there, and is what is pinned: fetched where it was not.
    fn fetch(&self, part: &str, pins: &[&Pin]) -> Result<()> {
        let mut missing = Vec::new();
        for &pin in pins {
            let file = self.file_of(pin);
            let found = file.exists().then(|| sha256(&file)).transpose()?;
            if let Some(other) = found.as_ref().filter(|&found| *found != pin.sha256) {
                eprintln!(
                    "{} is not the pinned package (SHA-256 {other}): fetching it anew",
                    file.display()
                );
            }
            if found.as_ref() != Some(&pin.sha256) {
                missing.push(pin);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        eprintln!("fetching {} packages of the {part}", missing.len());
        let (download, _download) = temporary_folder(&self.root, "download")?;
        let asked = missing.iter().map(|pin| pin.asked());
        let words = ["download".to_owned()].into_iter().chain(asked);
        self.apt()?.run(&download, words.collect())?;
        for pin in missing {
            let fetched = download.join(&pin.file);
            let found = sha256(&fetched).context("apt-get did not fetch what was asked for")?;
            ensure!(
                found == pin.sha256,
                "the mirror's {} has SHA-256 {found}, and {} is pinned in {LOCK}; see who changed it, and pin it anew: --refresh",
                pin.asked(),
                pin.sha256,
            );
            let file = self.file_of(pin);
            std::fs::rename(&fetched, &file).with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(())
    }

    /// Pins of what the mirror has now: the newest kernel of the backports, QEMU and tools.
    fn newest(&self) -> Result<Vec<Pin>> {
        let apt = self.apt()?;
        let mut pins = Vec::new();
        for (part, asked) in ASKED {
            let words =
                "install --no-install-recommends --print-uris -qq -o Acquire::ForceHash=SHA256".split(' ');
            let words = words.chain(asked.iter().copied()).map(str::to_owned);
            let uris = apt.run(&self.root, words.collect())?;
            let before = pins.len();
            pins.extend(uris.stdout.lines().filter_map(|line| Pin::of_uri(part, line)));
            ensure!(
                pins.len() > before,
                Unavailable::package(&format!("package of the {part} ({})", asked.join(" ")))
            );
        }
        Ok(pins)
    }

    /// `apt-get` with the lists that the mirror has now.
    fn apt(&self) -> Result<Apt> {
        let apt = Apt::new(&self.root.join("apt"), &self.sources)?;
        eprintln!("fetching Debian's package lists ({})", SUITES.join(", "));
        apt.run(&self.root, vec!["update".to_owned()])?;
        Ok(apt)
    }
}

/// Writes `modules.dep`, which Debian makes when it installs a kernel, and nothing is installed here.
fn depmod(tools: &Path, kernel: &Path) -> Result<()> {
    let modules = super::image::only_entry(&kernel.join("usr/lib/modules"))?;
    let program = Launch::new(tools.join("usr/bin/busybox"))
        .args(["depmod", "-b"])
        .arg(kernel.join("usr"))
        .arg(modules.file_name().unwrap_or_default());
    program.time_limit(LIMIT).spawn()?.finish().map(drop)
}

/// The digest of all that lies in a folder, in the order in which it lies there.
fn tree_digest(folder: &Path) -> Result<String> {
    let digest = Launch::new("sh").args(["-c", "tar -C \"$0\" -cf - . | sha256sum"]);
    let digest = digest.arg(folder).time_limit(LIMIT).spawn()?.finish();
    Ok(digest
        .with_context(|| format!("cannot read {}", folder.display()))?
        .stdout)
}

/// Where the cache lies, from the environment.
fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|path| path.is_absolute());
    set("LM_VM_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("lm-vm")))
        .or_else(|| Some(set("HOME")?.join(".cache/lm-vm")))
}

/// `apt-get` with a state of its own: the file with its settings.
struct Apt(PathBuf);

impl Apt {
    fn new(root: &Path, sources: &str) -> Result<Apt> {
        if sources.contains(KEYRING) && !Path::new(KEYRING).exists() {
            let what = format!("Debian's keys are missing ({KEYRING})");
            bail!(Unavailable::debian(&what, "install debian-archive-keyring"));
        }
        let unwritable = || format!("cannot write {}", root.display());
        for folder in ["lists/partial", "archives/partial", "state"] {
            std::fs::create_dir_all(root.join(folder)).with_context(unwritable)?;
        }
        let files = [
            ("apt.conf", settings(root)),
            ("sources.list", sources.to_owned()),
            // Nothing is installed here, so that whatever a package needs is fetched as well.
            ("status", String::new()),
        ];
        for (name, text) in files {
            std::fs::write(root.join(name), text).with_context(unwritable)?;
        }
        Ok(Apt(root.join("apt.conf")))
    }

    /// Runs `apt-get WORDS…` in a folder to its end.
    fn run(&self, folder: &Path, words: Vec<String>) -> Result<Output> {
        let program = Launch::new("env").arg("-C").arg(folder);
        let program = program.args(["LC_ALL=C", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-c"]);
        let program = program.arg(&self.0).args(words).time_limit(LIMIT);
        let output = program.spawn()?.outcome()?;
        match output.status.code() {
            Some(0) => Ok(output),
            // env(1): the command was not found.
            Some(127) => bail!(Unavailable::command("apt-get")),
            _ => bail!(Unavailable::from_apt(&output.stderr)),
        }
    }
}

/// Read after the machine's own settings, of which proxies are worth keeping and commands that follow an update are not.
fn settings(root: &Path) -> String {
    let root = root.display();
    format!(
        "\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear DPkg::Post-Invoke;
#clear APT::Architectures;
Dir::State \"{root}/state\";
Dir::State::lists \"{root}/lists\";
Dir::State::status \"{root}/status\";
Dir::State::extended_states \"{root}/state/extended_states\";
Dir::Cache \"{root}\";
Dir::Cache::archives \"{root}/archives\";
Dir::Cache::pkgcache \"\";
Dir::Cache::srcpkgcache \"\";
Dir::Etc::sourcelist \"{root}/sources.list\";
Dir::Etc::sourceparts \"/dev/null\";
Dir::Etc::preferences \"/dev/null\";
Dir::Etc::preferencesparts \"/dev/null\";
APT::Architecture \"amd64\";
APT::Architectures {{ \"amd64\"; }};
APT::Install-Recommends \"false\";
APT::Sandbox::User \"root\";
APT::Update::Error-Mode \"any\";
Acquire::Languages \"none\";
Acquire::Retries \"3\";
Acquire::http::Timeout \"30\";
Debug::NoLocking \"true\";
"
    )
}

fn sources() -> String {
    SUITES
        .map(|suite| format!("deb [signed-by={KEYRING}] {MIRROR} {suite} main\n"))
        .concat()
}

#[cfg(test)]
#[path = "packages_tests.rs"]
mod tests;
