//! The pins of the machine's packages: which versions it is made of, and the SHA-256 of each package's file. A run on another kernel or
//! another emulator would count other instructions and have other faults, so that they change by a commit and no other way.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// The committed pins.
const COMMITTED: &str = include_str!("packages.lock");
/// Where they lie in the workspace.
pub const PATH: &str = "xtask/src/vm/packages.lock";
const HEAD: &str = "\
# Debian's packages that the virtual machine is made of: kernel, QEMU, the guest's tools. Each use compares their files with the SHA-256.
# Made anew by `cargo xtask vm --refresh`.
#
# part package version architecture sha256
";

/// A package, as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version, with the epoch.
    pub version: String,
    /// `amd64` or `all`.
    pub architecture: String,
}

impl Package {
    /// The package in a file of that name, as apt calls it: `NAME_VERSION_ARCHITECTURE.deb`, with `%3a` for a colon.
    pub fn of_file(name: &str) -> Option<Package> {
        let mut parts = name.strip_suffix(".deb")?.split('_');
        let (name, version, architecture) = (parts.next()?, parts.next()?, parts.next()?);
        parts.next().is_none().then(|| Package {
            name: name.to_owned(),
            version: version.replace("%3a", ":"),
            architecture: architecture.to_owned(),
        })
    }

    /// The name of its file.
    pub fn file_name(&self) -> String {
        let version = self.version.replace(':', "%3a");
        format!("{}_{version}_{}.deb", self.name, self.architecture)
    }

    /// As `apt-get download` takes it.
    pub fn asked(&self) -> String {
        format!("{}={}", self.name, self.version)
    }
}

/// A package and what its file must be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pin {
    /// What it is for: a folder of the cache.
    pub part: String,
    /// The package.
    pub package: Package,
    /// SHA-256 of its file, in hexadecimal.
    pub sha256: String,
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Package {
            name,
            version,
            architecture,
        } = &self.package;
        write!(f, "{} {name} {version} {architecture} {}", self.part, self.sha256)
    }
}

/// All pins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lock(Vec<Pin>);

impl Lock {
    /// Those of this workspace.
    pub fn committed() -> Result<Lock> {
        Lock::parse(COMMITTED).with_context(|| format!("cannot understand {PATH}; `git checkout` it"))
    }

    /// Sorted, so that a change of one package is a change of one line.
    pub fn new(mut pins: Vec<Pin>) -> Lock {
        pins.sort();
        Lock(pins)
    }

    /// Reads lines of `PART PACKAGE VERSION ARCHITECTURE SHA256`.
    pub fn parse(text: &str) -> Result<Lock> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let pin = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let [part, name, version, architecture, sha256] = words[..] else {
                anyhow::bail!("a line has five words, and this is one: {line:?}");
            };
            ensure!(
                sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit()),
                "no SHA-256 at the end of {line:?}"
            );
            Ok(Pin {
                part: part.to_owned(),
                package: Package {
                    name: name.to_owned(),
                    version: version.to_owned(),
                    architecture: architecture.to_owned(),
                },
                sha256: sha256.to_owned(),
            })
        };
        Ok(Lock::new(lines.map(pin).collect::<Result<_>>()?))
    }

    /// The pins of one part.
    pub fn of(&self, part: &str) -> Vec<&Pin> {
        self.0.iter().filter(|pin| pin.part == part).collect()
    }

    /// Writes them over the workspace's; the file.
    pub fn commit(&self) -> Result<PathBuf> {
        let path = workspace::root().join(PATH);
        self.write(&path)?;
        Ok(path)
    }

    fn write(&self, path: &Path) -> Result<()> {
        let lines = self.0.iter().map(|pin| format!("{pin}\n"));
        let text = HEAD.to_owned() + &lines.collect::<String>();
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_as_apt_names_them() {
        let name = "libcap2_1%3a2.75-10+deb13u1+b3_amd64.deb";
        let package = Package::of_file(name).unwrap();
        assert_eq!(package.asked(), "libcap2=1:2.75-10+deb13u1+b3");
        assert_eq!(package.file_name(), name);
        for other in ["libcap2_1.deb", "a_b_c_d.deb", "a_1_amd64.rpm"] {
            assert_eq!(Package::of_file(other), None, "{other}");
        }
    }

    #[test]
    fn the_committed_pins_are_whole_and_as_they_would_be_written() {
        let lock = Lock::committed().unwrap();
        let has = |part: &str, name: &str| lock.of(part).iter().any(|pin| pin.package.name.starts_with(name));
        for (part, name) in [
            ("kernel", "linux-image-"),
            ("kernel", "linux-modules-"),
            ("qemu", "qemu-system-x86"),
            ("tools", "busybox-static"),
            ("tools", "iproute2"),
            ("tools", "ethtool"),
            ("tools", "dash"),
        ] {
            assert!(has(part, name), "{PATH} pins no {name} for {part}");
        }
        let path = std::env::temp_dir().join(format!("xtask-lock-{}", std::process::id()));
        lock.write(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), COMMITTED);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_line_that_pins_nothing_is_an_error() {
        for line in ["tools dash 1.0 amd64", "tools dash 1.0 amd64 abc", "", "a  b c d"] {
            assert!(Lock::parse(&format!("{line}\n")).is_err(), "{line:?}");
        }
    }
}
