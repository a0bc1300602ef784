//! Kernel, QEMU and the guest's tools from Debian's packages, by the ordinary `apt-get` with a state of its own: nothing is
//! installed, and the machine's own package state is neither read nor written. What is in the cache is not fetched again, and
//! each use compares it with the pins ([`super::lock`]).
//!
//! ```text
//!   CACHE/apt/…           lists, sources and settings of apt
//!   CACHE/debs/…          the pinned packages
//!   CACHE/kernel/…        those of the kernel, unpacked: boot/vmlinuz-*, usr/lib/modules/*
//!   CACHE/qemu/…          qemu-system-x86 and everything that it needs, its C library and loader too
//!   CACHE/tools/…         busybox, dash, iproute2, ethtool, likewise
//! ```

use std::fs::File;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};

use super::debian;
use super::lock::{self, Lock, Package, Pin};
use super::unavailable::Unavailable;
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Launch, Output};
use crate::content::{hex, sha256};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const MIRROR: &str = "http://deb.debian.org/debian";
const SUITE: &str = "trixie";
const BACKPORTS: &str = "trixie-backports";
const KERNEL: &str = "kernel";
const QEMU: &str = "qemu";
const TOOLS: &str = "tools";
/// What is asked for; the packages that these need are pinned as well, but of what a kernel needs when it is installed.
const ASKED: [(&str, &[&str]); 3] = [
    (KERNEL, &["-t", BACKPORTS, "linux-image-amd64"]),
    (QEMU, &["qemu-system-x86"]),
    // Busybox is the static one.
    (TOOLS, &["busybox-static", "dash", "iproute2", "ethtool"]),
];
/// In each unpacked folder: what it was unpacked from, and the digest of all that lies there.
const SEAL: &str = "seal";
/// No answer of a mirror takes longer.
const FETCH_LIMIT: Duration = Duration::from_secs(900);
const UNPACK_LIMIT: Duration = Duration::from_secs(300);

/// The folder with all that was fetched.
#[derive(Debug)]
pub struct Cache {
    root: PathBuf,
    lock: Lock,
    /// Where apt fetches from.
    sources: String,
    /// Held as long as something may be fetched: two runs at once would write the same files.
    _held: File,
}

impl Cache {
    /// `$LM_VM_CACHE`, else `$XDG_CACHE_HOME/lm-vm`, else `~/.cache/lm-vm`; waits for others that use it. With `refresh` the newest
    /// packages are pinned and fetched.
    pub fn open(refresh: bool) -> Result<Cache> {
        let root = folder(|name| std::env::var_os(name).map(PathBuf::from)).context(
            "no folder to keep packages in: neither LM_VM_CACHE nor XDG_CACHE_HOME nor HOME is set; set LM_VM_CACHE",
        )?;
        let mut cache = Cache::at(root, Lock::committed()?, sources())?;
        if refresh {
            cache.lock = cache.newest()?;
            let path = cache.lock.commit()?;
            eprintln!("the newest packages are pinned in {}: commit it", path.display());
        }
        Ok(cache)
    }

    fn at(root: PathBuf, lock: Lock, sources: String) -> Result<Cache> {
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
            lock,
            sources,
            _held: held,
        })
    }

    /// The kernel: the folder with its unpacked packages.
    pub fn kernel(&self) -> Result<PathBuf> {
        self.unpacked(KERNEL)
    }

    /// QEMU with all it needs: the folder to run it from.
    pub fn qemu(&self) -> Result<PathBuf> {
        self.unpacked(QEMU)
    }

    /// The guest's tools: busybox (static), a shell, `ip`, `tc`, `ethtool` with their libraries.
    pub fn tools(&self) -> Result<PathBuf> {
        self.unpacked(TOOLS)
    }

    /// The folder with a part's packages, unpacked. It appears whole or not at all.
    fn unpacked(&self, part: &str) -> Result<PathBuf> {
        let pins = self.lock.of(part);
        ensure!(!pins.is_empty(), "{} pins nothing for {part}", lock::PATH);
        self.fetch(part, &pins)?;
        let folder = self.root.join(part);
        let seal = |folder: &Path| {
            let pins: String = pins.iter().map(|pin| format!("{pin}\n")).collect();
            anyhow::Ok(pins + &tree_digest(folder)?)
        };
        if let Ok(sealed) = std::fs::read_to_string(folder.join(SEAL)) {
            if sealed == seal(&folder)? {
                return Ok(folder);
            }
            eprintln!(
                "{} is not what was unpacked there, or of other packages: unpacking it anew",
                folder.display()
            );
        }
        let (unpacked, _unpacked) = temporary_folder(&self.root, "unpacked")?;
        eprintln!("unpacking {} packages of the {part}", pins.len());
        for pin in &pins {
            self.unpack(&self.file_of(&pin.package), &unpacked)?;
        }
        let unwritable = || format!("cannot write {}", folder.display());
        std::fs::write(unpacked.join(SEAL), seal(&unpacked)?).with_context(unwritable)?;
        if folder.exists() {
            std::fs::remove_dir_all(&folder).with_context(unwritable)?;
        }
        std::fs::rename(&unpacked, &folder).with_context(unwritable)?;
        Ok(folder)
    }

    fn unpack(&self, package: &Path, into: &Path) -> Result<()> {
        let program = Launch::new("dpkg-deb")
            .arg("-x")
            .args([package, into])
            .time_limit(UNPACK_LIMIT);
        let program = program.spawn().map_err(|_| Unavailable::Command("dpkg-deb"))?;
        program.finish().map(drop).map_err(|error| {
            match format!("{error:#}").contains("No space left on device") {
                true => Unavailable::Space(self.root.display().to_string()).into(),
                false => error.context(format!("cannot unpack {}", package.display())),
            }
        })
    }

    fn file_of(&self, package: &Package) -> PathBuf {
        self.root.join("debs").join(package.file_name())
    }

    /// Every pinned package is there, and is what is pinned: fetched where it was not.
    fn fetch(&self, part: &str, pins: &[&Pin]) -> Result<()> {
        let is_there = |pin: &Pin| {
            let file = self.file_of(&pin.package);
            if !file.exists() {
                return Ok(false);
            }
            let found = sha256(&file)?;
            if found != pin.sha256 {
                eprintln!(
                    "{} is not the pinned package (SHA-256 {found}): fetching it anew",
                    file.display()
                );
            }
            anyhow::Ok(found == pin.sha256)
        };
        let mut missing = Vec::new();
        for pin in pins {
            if !is_there(pin)? {
                missing.push(*pin);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        eprintln!("fetching {} packages of the {part}", missing.len());
        let packages: Vec<&Package> = missing.iter().map(|pin| &pin.package).collect();
        let (download, _download) = temporary_folder(&self.root, "download")?;
        Apt::new(&self.root, &self.sources)?.download(&packages, &download)?;
        for pin in missing {
            let fetched = download.join(pin.package.file_name());
            let found = sha256(&fetched).context("apt-get did not fetch what was asked for")?;
            ensure!(
                found == pin.sha256,
                "the mirror's {} has SHA-256 {found}, and {} is pinned in {}; see who changed it, and pin it anew: --refresh",
                pin.package.asked(),
                pin.sha256,
                lock::PATH
            );
            let file = self.file_of(&pin.package);
            std::fs::rename(&fetched, &file).with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(())
    }

    /// Pins of what the mirror has now: the newest kernel of the backports, QEMU and tools.
    fn newest(&self) -> Result<Lock> {
        let apt = Apt::new(&self.root, &self.sources)?;
        apt.forget_lists()?;
        apt.update()?;
        let mut pins = Vec::new();
        for (part, asked) in ASKED {
            let uris = apt.uris(asked)?;
            let found = debian::packages(&uris.stdout);
            let found = found.filter(|(package, _)| part != KERNEL || debian::is_of_kernel(&package.name));
            let before = pins.len();
            pins.extend(found.map(|(package, sha256)| Pin {
                part: part.to_owned(),
                package,
                sha256: sha256.to_owned(),
            }));
            ensure!(
                pins.len() > before,
                Unavailable::Package(format!("package of the {part} ({})", asked.join(" ")))
            );
        }
        Ok(Lock::new(pins))
    }
}

/// The digest of all files in a folder but its seal: their paths, and their bytes or where links point.
fn tree_digest(folder: &Path) -> Result<String> {
    let mut digest = Sha256::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(below) = folders.pop() {
        let unreadable = || format!("cannot read {}", below.display());
        let entries = std::fs::read_dir(&below).with_context(unreadable)?;
        let mut paths = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<Vec<_>>>()
            .with_context(unreadable)?;
        paths.sort();
        for path in paths.into_iter().filter(|path| *path != folder.join(SEAL)) {
            let name = path.strip_prefix(folder).unwrap_or(&path).as_os_str();
            let kind = path.symlink_metadata().with_context(unreadable)?.file_type();
            let content = if kind.is_symlink() {
                let to = std::fs::read_link(&path).with_context(unreadable)?;
                hex(to.as_os_str().as_bytes())
            } else if kind.is_file() {
                sha256(&path)?
            } else {
                if kind.is_dir() {
                    folders.push(path.clone());
                }
                String::new()
            };
            digest.update(name.as_bytes());
            digest.update(format!("\0{content}\n"));
        }
    }
    Ok(hex(&digest.finalize()))
}

/// Where the cache lies, from the environment.
fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|path| path.is_absolute());
    set("LM_VM_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("lm-vm")))
        .or_else(|| Some(set("HOME")?.join(".cache/lm-vm")))
}

/// `apt-get` with a state of its own.
struct Apt {
    root: PathBuf,
}

impl Apt {
    fn new(cache: &Path, sources: &str) -> Result<Apt> {
        if sources.contains(KEYRING) && !Path::new(KEYRING).exists() {
            bail!(Unavailable::Keyring(KEYRING));
        }
        let root = cache.join("apt");
        let unwritable = || format!("cannot write {}", root.display());
        for folder in ["lists/partial", "archives/partial", "state"] {
            std::fs::create_dir_all(root.join(folder)).with_context(unwritable)?;
        }
        let files = [
            ("apt.conf", settings(&root)),
            ("sources.list", sources.to_owned()),
            // Nothing is installed here, so that whatever a package needs is fetched as well.
            ("status", String::new()),
        ];
        for (name, text) in files {
            std::fs::write(root.join(name), text).with_context(unwritable)?;
        }
        Ok(Apt { root })
    }

    fn settings(&self) -> [String; 2] {
        [
            "-c".to_owned(),
            self.root.join("apt.conf").to_string_lossy().into_owned(),
        ]
    }

    /// Fetches the package lists, unless that was done in this hour.
    fn update(&self) -> Result<()> {
        let fresh = |path: PathBuf| {
            let age = std::fs::metadata(path).and_then(|metadata| metadata.modified());
            age.is_ok_and(|time| time.elapsed().is_ok_and(|age| age < Duration::from_secs(3600)))
        };
        let stamp = self.stamp();
        if fresh(stamp.clone()) {
            return Ok(());
        }
        eprintln!("fetching Debian's package lists ({SUITE}, {BACKPORTS})");
        let words = ["apt-get".to_owned()].into_iter().chain(self.settings());
        self.run(words.chain(["update".to_owned()]).collect())?;
        std::fs::write(&stamp, "").with_context(|| format!("cannot write {}", stamp.display()))
    }

    fn stamp(&self) -> PathBuf {
        self.root.join("updated")
    }

    /// The next update fetches the lists, whatever their age.
    fn forget_lists(&self) -> Result<()> {
        match std::fs::remove_file(self.stamp()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.stamp().display()))
            }
            _ => Ok(()),
        }
    }

    /// Fetches the files of packages, of these versions and no others, into a folder.
    fn download(&self, packages: &[&Package], into: &Path) -> Result<()> {
        self.update()?;
        let into = into.to_string_lossy().into_owned();
        let words = ["-C".to_owned(), into, "apt-get".to_owned()].into_iter();
        let words = words.chain(self.settings()).chain(["download".to_owned()]);
        self.run(
            words
                .chain(packages.iter().map(|package| package.asked()))
                .collect(),
        )
        .map(drop)
    }

    /// What installing packages would fetch, with the SHA-256 of each file.
    fn uris(&self, asked: &[&str]) -> Result<Output> {
        let words = ["apt-get".to_owned()].into_iter().chain(self.settings());
        let options = [
            "install",
            "--no-install-recommends",
            "--print-uris",
            "-qq",
            "-o",
            "Acquire::ForceHash=SHA256",
        ];
        let rest = options.iter().chain(asked).map(|&word| word.to_owned());
        self.run(words.chain(rest).collect())
    }

    /// Runs `env WORDS…` to its end.
    fn run(&self, words: Vec<String>) -> Result<Output> {
        let program = Launch::new("env").args(["LC_ALL=C", "DEBIAN_FRONTEND=noninteractive"]);
        // `env -C FOLDER` must come before the assignments.
        let program = if words.first().is_some_and(|word| word == "-C") {
            Launch::new("env")
                .args(["-C", &words[1], "LC_ALL=C"])
                .args(&words[2..])
        } else {
            program.args(&words)
        };
        let output = program.time_limit(FETCH_LIMIT).spawn()?.outcome()?;
        match output.status.code() {
            Some(0) => Ok(output),
            // env(1): the command was not found.
            Some(127) => bail!(Unavailable::Command("apt-get")),
            _ => bail!(Unavailable::from_apt(debian::apt_message(&output.stderr))),
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
    [SUITE, BACKPORTS]
        .map(|suite| format!("deb [signed-by={KEYRING}] {MIRROR} {suite} main\n"))
        .concat()
}

#[cfg(test)]
#[path = "packages_tests.rs"]
mod tests;
