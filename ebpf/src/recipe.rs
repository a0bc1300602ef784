//! How the committed objects are made from their sources, and how to tell that one is stale.
//!
//! The same clang gives the same bytes anywhere: the sources include nothing, no path enters the object, and DWARF, which
//! would carry the compiler's name, is stripped (BTF stays). `NAME.sum` records the hashes of sources and object and the
//! compiler, so that a machine without clang can still see that one was changed without the other.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

/// One committed object: `NAME.o` and `NAME.sum` in the crate's folder, its sources in `src`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Name of the object.
    pub name: &'static str,
    /// Every file that it is made from; the first one is compiled.
    pub sources: &'static [&'static str],
}

/// The gate.
pub const GATE: Recipe = Recipe {
    name: "gate",
    sources: &["gate.c", "gate.h"],
};

/// The impairment box's forwarder.
pub const IMPAIR: Recipe = Recipe {
    name: "impair",
    sources: &["impair.c"],
};

/// Every committed object.
pub const ALL: [Recipe; 2] = [GATE, IMPAIR];

const FLAGS: [&str; 8] = [
    "-O2", "-g", "-target", "bpf", "-mcpu=v3", "-Wall", "-Wextra", "-Werror",
];
const TOOLS: [(&str, &str); 8] = [
    ("clang-14", "llvm-strip-14"),
    ("clang", "llvm-strip"),
    ("clang-15", "llvm-strip-15"),
    ("clang-16", "llvm-strip-16"),
    ("clang-17", "llvm-strip-17"),
    ("clang-18", "llvm-strip-18"),
    ("clang-19", "llvm-strip-19"),
    ("clang-20", "llvm-strip-20"),
];

/// What [`Recipe::check`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Rebuilt with the recorded compiler: the same bytes.
    Rebuilt,
    /// Hashes agree; the recorded compiler is not here, so nothing was rebuilt.
    HashesOnly {
        /// The compiler that made the object.
        compiler: String,
    },
}

impl Recipe {
    /// Rebuilds `NAME.o` and `NAME.sum` in `root`, the folder of this crate. Returns the compiler's name.
    ///
    /// # Errors
    ///
    /// One line that says what is missing or what the compiler said.
    pub fn build(&self, root: &Path) -> Result<String, String> {
        let (compiler, object) = self
            .compile(root, None)?
            .ok_or("no clang with a matching llvm-strip is installed")?;
        write(&self.object(root), &object)?;
        write(&self.sums(root), self.sum(root, &object, &compiler)?.as_bytes())?;
        Ok(compiler)
    }

    /// Says whether `NAME.o` in `root` was made from the sources beside it.
    ///
    /// # Errors
    ///
    /// One line that says what is stale and how to mend it.
    pub fn check(&self, root: &Path) -> Result<Freshness, String> {
        let name = self.name;
        let object = read(&self.object(root))?;
        let recorded = String::from_utf8(read(&self.sums(root))?).map_err(|error| error.to_string())?;
        let compiler = recorded
            .lines()
            .find_map(|line| line.strip_prefix("compiler "))
            .ok_or_else(|| format!("{name}.sum names no compiler: run `cargo xtask gate`"))?;
        if recorded != self.sum(root, &object, compiler)? {
            return Err(format!(
                "the sources or the object of {name} changed without each other: run `cargo xtask gate`"
            ));
        }
        match self.compile(root, Some(compiler))? {
            Some((_, rebuilt)) if rebuilt == object => Ok(Freshness::Rebuilt),
            Some(_) => Err(format!(
                "{compiler} makes another {name}.o: run `cargo xtask gate`"
            )),
            None => Ok(Freshness::HashesOnly {
                compiler: compiler.to_owned(),
            }),
        }
    }

    fn object(&self, root: &Path) -> PathBuf {
        root.join(format!("{}.o", self.name))
    }

    fn sums(&self, root: &Path) -> PathBuf {
        root.join(format!("{}.sum", self.name))
    }

    /// Compiles with the first clang found, or with the one whose version is `wanted`; `None` if there is none.
    fn compile(&self, root: &Path, wanted: Option<&str>) -> Result<Option<(String, Vec<u8>)>, String> {
        for (clang, strip) in TOOLS {
            let Some(version) = version(clang) else { continue };
            if wanted.is_some_and(|wanted| wanted != version) || self::version(strip).is_none() {
                continue;
            }
            let output = Scratch::new(self.name)?;
            let source = root
                .join("src")
                .canonicalize()
                .map_err(|error| error.to_string())?;
            run(Command::new(clang)
                .args(FLAGS)
                .arg("-fdebug-compilation-dir=.")
                .arg(format!("-ffile-prefix-map={}=.", source.display()))
                .args(["-c", self.sources[0], "-o"])
                .arg(&output.0)
                .current_dir(&source))?;
            run(Command::new(strip).arg("-g").arg(&output.0))?;
            return Ok(Some((version, read(&output.0)?)));
        }
        Ok(None)
    }

    fn sum(&self, root: &Path, object: &[u8], compiler: &str) -> Result<String, String> {
        let mut text = String::new();
        for name in self.sources {
            let hash = hash(&read(&root.join("src").join(name))?);
            let _ = writeln!(text, "source {name} {hash}");
        }
        let _ = writeln!(text, "object {}.o {}", self.name, hash(object));
        let _ = writeln!(text, "flags {}", FLAGS.join(" "));
        let _ = writeln!(text, "compiler {compiler}");
        Ok(text)
    }
}

/// First line of what a tool says about itself.
fn version(tool: &str) -> Option<String> {
    let output = Command::new(tool)
        .arg("--version")
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned(),
    )
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    fs::write(path, bytes).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// A file name of our own in the temporary folder; removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(object: &str) -> Result<Scratch, String> {
        let name = format!(
            "lm-{object}-{}-{:?}.o",
            std::process::id(),
            std::thread::current().id()
        );
        Ok(Scratch(std::env::temp_dir().join(name.replace(['(', ')'], ""))))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
