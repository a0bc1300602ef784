//! Kernel, QEMU and the guest's tools from Debian's packages, by the ordinary `apt-get` with a state of its own: nothing is
//! installed, and the machine's own package state is neither read nor written. What is in the cache is not fetched again.
//!
//! ```text
//!   CACHE/apt/…           lists, sources and settings of apt
//!   CACHE/kernel/…        the unpacked packages of a kernel: boot/vmlinuz-*, usr/lib/modules/*
//!   CACHE/qemu/…          qemu-system-x86 and everything that it needs, its C library and loader too
//!   CACHE/tools/…         busybox, dash, iproute2, ethtool, likewise
//! ```

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FlockOperation;

use super::debian;
use super::unavailable::Unavailable;
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Launch, Output};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const MIRROR: &str = "http://deb.debian.org/debian";
const SUITE: &str = "trixie";
const BACKPORTS: &str = "trixie-backports";
/// In each folder of the cache: the packages that were asked for.
const MADE_FOR: &str = "made-for";
/// More than that is not fetched for QEMU without being asked.
const MAX_DOWNLOAD_LEN: u64 = 250 << 20;
/// No answer of a mirror takes longer.
const FETCH_LIMIT: Duration = Duration::from_secs(900);
const UNPACK_LIMIT: Duration = Duration::from_secs(300);

/// The folder with all that was fetched.
#[derive(Debug)]
pub struct Cache {
    root: PathBuf,
    refresh: bool,
    /// Held as long as something may be fetched: two runs at once would write the same files.
    _lock: File,
}

impl Cache {
    /// `$LM_VM_CACHE`, else `$XDG_CACHE_HOME/lm-vm`, else `~/.cache/lm-vm`; waits for others that use it. With `refresh`
    /// everything is fetched anew.
    pub fn open(refresh: bool) -> Result<Cache> {
        let root = folder(|name| std::env::var_os(name).map(PathBuf::from)).context(
            "no folder to keep packages in: neither LM_VM_CACHE nor XDG_CACHE_HOME nor HOME is set; set LM_VM_CACHE",
        )?;
        let unusable = || {
            format!(
                "cannot use the folder {}; name another in LM_VM_CACHE",
                root.display()
            )
        };
        std::fs::create_dir_all(&root).with_context(unusable)?;
        let lock = File::create(root.join("lock")).with_context(unusable)?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).with_context(unusable)?;
        Ok(Cache {
            root,
            refresh,
            _lock: lock,
        })
    }

    /// The newest kernel of trixie-backports that is new enough for igb's zero-copy: the folder with its unpacked packages.
    pub fn kernel(&self) -> Result<PathBuf> {
        self.fetched("kernel", &["linux-image"], |apt, download| {
            apt.update()?;
            let list = apt.list(BACKPORTS)?;
            let index =
                std::fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
            let kernel = debian::newest_kernel(&index)
                .ok_or_else(|| Unavailable::Package(format!("kernel for amd64 in {BACKPORTS}")))?;
            eprintln!("fetching Linux {}", kernel.release);
            let download = download.to_string_lossy().into_owned();
            let line = ["-C", &download, "apt-get"].map(str::to_owned);
            let words = line
                .into_iter()
                .chain(apt.settings())
                .chain(["download".to_owned()]);
            apt.run(words.chain(kernel.packages).collect())?;
            Ok(())
        })
    }

    /// QEMU with all it needs: the folder to run it from. `None` when that is more than 250 MiB to fetch.
    pub fn qemu(&self) -> Result<Option<PathBuf>> {
        if !self.has("qemu", &["qemu-system-x86"]) {
            let apt = Apt::new(&self.root)?;
            apt.update()?;
            let uris = apt.install(&["--print-uris", "-qq"], &["qemu-system-x86"])?;
            let len = debian::download_len(&uris.stdout);
            if len > MAX_DOWNLOAD_LEN {
                return Ok(None);
            }
            eprintln!("fetching QEMU and the libraries it needs ({} MiB)", len >> 20);
        }
        self.closure("qemu", &["qemu-system-x86"]).map(Some)
    }

    /// The guest's tools: busybox (static), a shell, `ip`, `tc`, `ethtool` with their libraries.
    pub fn tools(&self) -> Result<PathBuf> {
        self.closure("tools", &["busybox-static", "dash", "iproute2", "ethtool"])
    }

    fn closure(&self, name: &str, packages: &[&str]) -> Result<PathBuf> {
        self.fetched(name, packages, |apt, download| {
            apt.update()?;
            // apt insists on a folder of that name inside.
            std::fs::create_dir_all(download.join("partial"))?;
            let archives = format!("Dir::Cache::archives={}", download.display());
            apt.install(&["--download-only", "-y", "-o", &archives], packages)?;
            Ok(())
        })
    }

    /// Whether the folder of that name is there, made for the same packages.
    fn has(&self, name: &str, packages: &[&str]) -> bool {
        let made_for = std::fs::read_to_string(self.root.join(name).join(MADE_FOR));
        !self.refresh && made_for.is_ok_and(|text| text == packages.join("\n"))
    }

    /// The folder of that name, made if need be: what `fetch` puts into a folder is unpacked. It appears whole or not at all.
    fn fetched(
        &self,
        name: &str,
        packages: &[&str],
        fetch: impl FnOnce(&Apt, &Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let folder = self.root.join(name);
        if self.has(name, packages) {
            return Ok(folder);
        }
        let apt = Apt::new(&self.root)?;
        let (download, _download) = temporary_folder(&self.root, "download")?;
        fetch(&apt, &download)?;
        let (unpacked, _unpacked) = temporary_folder(&self.root, "unpacked")?;
        let files = files_ending(&download, ".deb")?;
        ensure!(!files.is_empty(), "apt-get fetched nothing for {name}");
        for package in &files {
            eprintln!(
                "unpacking {}",
                package.file_name().unwrap_or_default().to_string_lossy()
            );
            Launch::new("dpkg-deb")
                .arg("-x")
                .args([package, &unpacked])
                .time_limit(UNPACK_LIMIT)
                .spawn()
                .map_err(|_| Unavailable::Command("dpkg-deb"))?
                .finish()
                .map_err(
                    |error| match format!("{error:#}").contains("No space left on device") {
                        true => Unavailable::Space(folder.display().to_string()).into(),
                        false => error.context(format!("cannot unpack {}", package.display())),
                    },
                )?;
        }
        let unwritable = || format!("cannot write {}", folder.display());
        std::fs::write(unpacked.join(MADE_FOR), packages.join("\n")).with_context(unwritable)?;
        if folder.exists() {
            std::fs::remove_dir_all(&folder).with_context(unwritable)?;
        }
        std::fs::rename(&unpacked, &folder).with_context(unwritable)?;
        Ok(folder)
    }
}

/// Where the cache lies, from the environment.
fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|path| path.is_absolute());
    set("LM_VM_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("lm-vm")))
        .or_else(|| Some(set("HOME")?.join(".cache/lm-vm")))
}

/// Files in a folder whose names end so, sorted.
fn files_ending(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().ends_with(ending))
        .collect();
    files.sort();
    Ok(files)
}

/// `apt-get` with a state of its own.
struct Apt {
    root: PathBuf,
}

impl Apt {
    fn new(cache: &Path) -> Result<Apt> {
        if !Path::new(KEYRING).exists() {
            bail!(Unavailable::Keyring(KEYRING));
        }
        let root = cache.join("apt");
        let unwritable = || format!("cannot write {}", root.display());
        for folder in ["lists/partial", "archives/partial", "state"] {
            std::fs::create_dir_all(root.join(folder)).with_context(unwritable)?;
        }
        let files = [
            ("apt.conf", settings(&root)),
            ("sources.list", sources()),
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
        let stamp = self.root.join("updated");
        if fresh(stamp.clone()) && self.list(BACKPORTS).is_ok() {
            return Ok(());
        }
        eprintln!("fetching Debian's package lists ({SUITE}, {BACKPORTS})");
        let words = ["apt-get".to_owned()].into_iter().chain(self.settings());
        self.run(words.chain(["update".to_owned()]).collect())?;
        std::fs::write(&stamp, "").with_context(|| format!("cannot write {}", stamp.display()))
    }

    fn install(&self, options: &[&str], packages: &[&str]) -> Result<Output> {
        let words = ["apt-get".to_owned()].into_iter().chain(self.settings());
        let rest = ["install", "--no-install-recommends"]
            .iter()
            .chain(options)
            .chain(packages);
        self.run(words.chain(rest.map(|&word| word.to_owned())).collect())
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

    /// The file with the list of a suite's packages.
    fn list(&self, suite: &str) -> Result<PathBuf> {
        let ending = format!("_{suite}_main_binary-amd64_Packages");
        let found = files_ending(&self.root.join("lists"), &ending)?.pop();
        found.ok_or_else(|| Unavailable::Package(format!("package list of {suite}")).into())
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
Acquire::GzipIndexes \"false\";
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
mod tests {
    use super::*;

    #[test]
    fn the_cache_lies_where_the_environment_says() {
        let find = |variables: &'static [(&'static str, &'static str)]| {
            folder(|name| {
                let (_, value) = variables.iter().find(|(variable, _)| *variable == name)?;
                Some(PathBuf::from(value))
            })
        };
        let all = &[("LM_VM_CACHE", "/c"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(find(all), Some("/c".into()));
        assert_eq!(find(&all[1..]), Some("/x/lm-vm".into()));
        assert_eq!(find(&all[2..]), Some("/h/.cache/lm-vm".into()));
        assert_eq!(
            find(&[("LM_VM_CACHE", "relative"), ("HOME", "/h")]),
            Some("/h/.cache/lm-vm".into())
        );
        assert_eq!(find(&[]), None);
    }

    #[test]
    fn what_is_in_the_cache_counts_for_the_same_packages_only() {
        let root = std::env::temp_dir().join(format!("xtask-cache-{}", std::process::id()));
        std::fs::create_dir_all(root.join("tools")).unwrap();
        let mut cache = Cache {
            root: root.clone(),
            refresh: false,
            _lock: File::create(root.join("lock")).unwrap(),
        };
        assert!(
            !cache.has("tools", &["a", "b"]),
            "left half-made by an older version"
        );
        std::fs::write(root.join("tools").join(MADE_FOR), "a\nb").unwrap();
        let found = cache
            .fetched("tools", &["a", "b"], |_, _| unreachable!())
            .unwrap();
        assert_eq!(found, root.join("tools"));
        assert!(!cache.has("tools", &["a"]) && !cache.has("kernel", &["a"]));
        cache.refresh = true;
        assert!(!cache.has("tools", &["a", "b"]));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn apt_never_touches_the_machines_own_state() {
        let text = settings(Path::new("/cache/apt"));
        let folders = text.lines().filter(|line| line.starts_with("Dir::"));
        for line in folders {
            let value = line.split('"').nth(1).unwrap();
            assert!(
                value.is_empty() || value == "/dev/null" || value.starts_with("/cache/apt"),
                "{line}"
            );
        }
        for needed in [
            "Dir::State::status ",
            "Dir::Cache ",
            "Dir::State ",
            "#clear APT::Update::Post-Invoke;",
        ] {
            assert!(text.contains(needed), "{needed}");
        }
        assert_eq!(
            sources(),
            "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main\n\
             deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie-backports main\n"
        );
    }
}
