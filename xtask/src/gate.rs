//! How the committed objects are made from their sources, and how to tell that one is stale.
//!
//! The same clang gives the same bytes anywhere: the sources include nothing, no path enters the object, and DWARF,
//! which would carry the compiler's name, is stripped (BTF stays). `NAME.sum` records the hashes of sources and object
//! and the compiler, so that a machine without clang can still see that one was changed without the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::bed::leftovers::temporary_folder;
use crate::content::hex;
use crate::workspace::{root, run};

/// Rebuilds the committed objects of the gate, the impairment box and bare AF_XDP from their C sources.
pub fn build() -> Result<()> {
    ALL.iter().try_for_each(|object| {
        let compiler = object.build(&root().join(object.folder))?;
        println!("{}.o built by {compiler}", object.name);
        Ok(())
    })
}

/// Whether each object was made from its sources.
///
/// # Errors
/// Which one was not.
pub(crate) fn check() -> Result<()> {
    ALL.iter().try_for_each(|object| {
        let name = object.name;
        match object.check(&root().join(object.folder))? {
            None => println!("{name}.o is fresh: rebuilt to the same bytes"),
            Some(compiler) => {
                println!("{name}.o matches its sources by hash (not rebuilt: {compiler} is not installed)");
            }
        }
        Ok(())
    })
}

/// One committed object: `NAME.o` and `NAME.sum` in its crate's folder, its sources in `src`.
#[derive(Clone, Copy, Debug)]
struct Object {
    name: &'static str,
    folder: &'static str,
    /// Every file that it is made from; the first one is compiled.
    sources: &'static [&'static str],
}

/// The gate, the impairment box's forwarder, and the XDP program of bare AF_XDP.
const ALL: [Object; 3] = [
    Object {
        name: "gate",
        folder: "ebpf",
        sources: &["gate.c", "gate.h"],
    },
    Object {
        name: "impair",
        folder: "bench/box",
        sources: &["impair.c"],
    },
    Object {
        name: "redirect",
        folder: "bench",
        sources: &["redirect.c"],
    },
];

const FLAGS: [&str; 8] = [
    "-O2", "-g", "-target", "bpf", "-mcpu=v3", "-Wall", "-Wextra", "-Werror",
];
/// Ends of the names of compilers and their tools.
const VERSIONS: [&str; 8] = ["-14", "", "-15", "-16", "-17", "-18", "-19", "-20"];

impl Object {
    /// Rebuilds `NAME.o` and `NAME.sum` in `root`. Gives the compiler's name.
    fn build(&self, root: &Path) -> Result<String> {
        let (compiler, object) = self
            .compile(root, None)?
            .context("no clang with a matching llvm-strip is installed")?;
        fs::write(self.path(root, "o"), &object)?;
        fs::write(self.path(root, "sum"), self.sum(root, &object, &compiler)?)?;
        Ok(compiler)
    }

    /// Whether `NAME.o` in `root` was made from the sources beside it. Gives the recorded compiler where it is not
    /// here, so that hashes alone were compared.
    fn check(&self, root: &Path) -> Result<Option<String>> {
        let name = self.name;
        let object = read(&self.path(root, "o"))?;
        let recorded = String::from_utf8(read(&self.path(root, "sum"))?)?;
        let mut lines = recorded.lines();
        let compiler = lines.find_map(|line| line.strip_prefix("compiler "));
        let compiler =
            compiler.with_context(|| format!("{name}.sum names no compiler: run `cargo xtask gate`"))?;
        ensure!(
            recorded == self.sum(root, &object, compiler)?,
            "the sources or the object of {name} changed without each other: run `cargo xtask gate`"
        );
        let Some((_, rebuilt)) = self.compile(root, Some(compiler))? else {
            return Ok(Some(compiler.to_owned()));
        };
        ensure!(
            rebuilt == object,
            "{compiler} makes another {name}.o: run `cargo xtask gate`"
        );
        Ok(None)
    }

    fn path(&self, root: &Path, ending: &str) -> PathBuf {
        root.join(self.name).with_extension(ending)
    }

    /// Compiles with the first clang found, or with the one whose version is `wanted`; `None` if there is none.
    fn compile(&self, root: &Path, wanted: Option<&str>) -> Result<Option<(String, Vec<u8>)>> {
        for end in VERSIONS {
            let [clang, strip] = ["clang", "llvm-strip"].map(|name| format!("{name}{end}"));
            let Some(version) = version(&clang) else { continue };
            if wanted.is_some_and(|wanted| wanted != version) || self::version(&strip).is_none() {
                continue;
            }
            let (folder, _folder) = temporary_folder(&std::env::temp_dir(), self.name)?;
            let output = self.path(&folder, "o");
            let source = root.join("src").canonicalize()?;
            run(Command::new(clang)
                .args(FLAGS)
                .arg("-fdebug-compilation-dir=.")
                .arg(format!("-ffile-prefix-map={}=.", source.display()))
                .args(["-c", self.sources[0], "-o"])
                .arg(&output)
                .current_dir(&source))?;
            run(Command::new(strip).arg("-g").arg(&output))?;
            return Ok(Some((version, read(&output)?)));
        }
        Ok(None)
    }

    fn sum(&self, root: &Path, object: &[u8], compiler: &str) -> Result<String> {
        let mut text = String::new();
        for name in self.sources {
            let hash = hash(&read(&root.join("src").join(name))?);
            text += &format!("source {name} {hash}\n");
        }
        let (name, object, flags) = (self.name, hash(object), FLAGS.join(" "));
        Ok(text + &format!("object {name}.o {object}\nflags {flags}\ncompiler {compiler}\n"))
    }
}

/// First line of what a tool says about itself.
fn version(tool: &str) -> Option<String> {
    let output = Command::new(tool).arg("--version").output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().next().filter(|_| output.status.success())?;
    Some(line.trim().to_owned())
}

fn hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_are_fresh() {
        check().unwrap();
    }

    #[test]
    fn a_stale_object_is_noticed() {
        let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "stale").unwrap();
        let copy = |name: &str| {
            let from = root().join(ALL[0].folder).join(name);
            std::fs::copy(from, folder.join(name)).unwrap();
        };
        std::fs::create_dir_all(folder.join("src")).unwrap();
        for name in ["gate.o", "gate.sum", "src/gate.c", "src/gate.h"] {
            copy(name);
        }
        // In another folder the same compiler makes the same bytes.
        let fresh = ALL[0].check(&folder);
        let mut stale = Vec::new();
        for name in ["gate.o", "src/gate.c", "src/gate.h"] {
            let mut bytes = std::fs::read(folder.join(name)).unwrap();
            bytes.push(b'\n');
            std::fs::write(folder.join(name), bytes).unwrap();
            stale.push(ALL[0].check(&folder));
            copy(name);
        }
        fresh.unwrap();
        assert!(
            stale.iter().all(|outcome| outcome
                .as_ref()
                .is_err_and(|why| why.to_string().contains("cargo xtask gate"))),
            "{stale:?}"
        );
    }
}
