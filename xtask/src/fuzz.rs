//! `cargo xtask fuzz`: arbitrary input, and tools that watch memory.
//!
//! Both need a nightly toolchain, which nothing else here does.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::verify::is_ci;
use crate::workspace::{cargo, root, run, said_by, target_dir};

/// Fuzz every parser, the receiver's state machine on the simulated NIC, the gate, and the daemon.
///
/// Needs a nightly toolchain and cargo-fuzz; root for the gate and the daemon, which are left out without. Begins with
/// the committed corpus in fuzz/corpus; what it finds on the way is kept under the target directory. An input that
/// fails is left in fuzz/artifacts, and its path is shown with the command that repeats it.
#[derive(Debug, clap::Args)]
pub struct FuzzArguments {
    /// Seconds altogether, shared by the targets; half of them for `engine`, which is the slowest.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    time: u64,
    /// Instead: lm-protocol's tests, the cards', and the poll engine's on the simulated NIC, under AddressSanitizer.
    ///
    /// A nightly toolchain that is missing is said in one line, and is an error with CI=true only.
    #[arg(long, conflicts_with = "time")]
    asan: bool,
    /// Instead: those of them that it finishes in minutes under valgrind (memcheck), likewise.
    #[arg(long, conflicts_with_all = ["time", "asan"])]
    valgrind: bool,
}

/// The target that runs whole engines.
const ENGINE: &str = "engine";

/// Packages with tests that need no kernel.
const PACKAGES: [&str; 3] = ["lm-protocol", "lm-cards", "lm-dataplane"];

const NIGHTLY: [&str; 2] = ["+nightly", "--version"];
const NO_NIGHTLY: &str = "no nightly toolchain: run `rustup toolchain install nightly`";

/// Targets with a gate in the kernel.
const WITH_GATE: [&str; 3] = ["daemon", "gate", "state"];

pub(crate) fn answers(program: &str, arguments: &[&str]) -> bool {
    said_by(Command::new(program).args(arguments)).is_ok()
}

/// The fuzz targets, by name.
fn targets() -> Result<Vec<String>> {
    let folder = root().join("fuzz/fuzz_targets");
    let mut names = Vec::new();
    for file in std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = file?.file_name().into_string().unwrap_or_default();
        names.extend(name.strip_suffix(".rs").map(ToOwned::to_owned));
    }
    names.sort();
    Ok(names)
}

/// How many of `seconds` a target gets that shares them with `others`, at least one.
fn share(name: &str, others: usize, seconds: u64) -> u64 {
    let parts = if name == ENGINE { 1 } else { others as u64 };
    (seconds / 2 / parts).max(1)
}

/// Runs `cargo xtask fuzz`.
pub fn fuzz(arguments: &FuzzArguments) -> Result<()> {
    if arguments.asan {
        return asan();
    }
    if arguments.valgrind {
        return valgrind();
    }
    let mut targets = targets()?;
    if !rustix::process::geteuid().is_root() {
        targets.retain(|name| !WITH_GATE.contains(&name.as_str()));
        println!("SKIPPED: {}: a gate needs root", WITH_GATE.join(", "));
    }
    ensure!(answers("cargo", &NIGHTLY), "{NO_NIGHTLY}");
    ensure!(
        answers("cargo", &["fuzz", "--version"]),
        "no cargo-fuzz: run `cargo install cargo-fuzz`"
    );
    let folder = root().join("fuzz");
    let found = target_dir()?.join("fuzz-corpus");
    let mut failed = Vec::new();
    for name in &targets {
        let seconds = share(name, targets.len() - 1, arguments.time);
        let kept = found.join(name);
        std::fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
        let mut command = nightly();
        command
            .args(["fuzz", "run", "--features", "libfuzzer", "--fuzz-dir"])
            .arg(&folder)
            .arg(name)
            .arg(&kept)
            .arg(folder.join("corpus").join(name))
            .args(["--", "-max_len=2048", "-timeout=60", "-print_final_stats=1"])
            // The daemon is ended by these.
            .args(["-handle_term=0", "-handle_usr1=0"])
            .arg(format!("-max_total_time={seconds}"));
        eprintln!("── {name}: {seconds} s");
        if let Err(error) = run(&mut command) {
            eprintln!("{error:#}");
            failed.push(name.as_str());
        }
    }
    ensure!(
        failed.is_empty(),
        "failed: {}; repeat with `cargo +nightly fuzz run --features libfuzzer --fuzz-dir fuzz TARGET \
            fuzz/artifacts/TARGET/FILE`",
        failed.join(", ")
    );
    Ok(())
}

/// A cargo that picks its toolchain by name: the one that started this program has its own.
fn nightly() -> Command {
    let mut command = Command::new("cargo");
    command
        .arg("+nightly")
        .current_dir(root())
        .stdin(Stdio::null())
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO");
    command
}

pub(crate) fn lacking(what: &str) -> Result<()> {
    ensure!(!is_ci(), "{what}, and CI=true allows no skipping");
    println!("SKIPPED: {what}");
    Ok(())
}

fn asan() -> Result<()> {
    if !answers("cargo", &NIGHTLY) {
        return lacking(NO_NIGHTLY);
    }
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let build = target_dir()?.join("asan");
    for package in PACKAGES {
        let tests = match package {
            "lm-protocol" => "--tests",
            _ => "--lib",
        };
        run(nightly()
            .args(["test", "--target", &target, "--package", package, tests])
            // `copies` starts valgrind on its own program, which valgrind cannot run with AddressSanitizer in it.
            .args(["--", "--skip", "sim_tests::copies"])
            .env("RUSTFLAGS", "-Zsanitizer=address")
            .env("CARGO_TARGET_DIR", &build))?;
    }
    Ok(())
}

/// libtest keeps a thread's handle to the end ("possibly lost"); what is definitely lost is ours.
const VALGRIND: &str = "valgrind --quiet --error-exitcode=99 --leak-check=full --show-leak-kinds=definite \
    --errors-for-leak-kinds=definite";

fn valgrind() -> Result<()> {
    if !answers("valgrind", &["--version"]) {
        return lacking("no valgrind: install it with the system's package manager");
    }
    let architecture = std::env::consts::ARCH.to_uppercase();
    let runner = format!("CARGO_TARGET_{architecture}_UNKNOWN_LINUX_GNU_RUNNER");
    // A random case takes valgrind fifty times as long.
    let slow = "fuzzing sim_tests::copies sim_tests::hostile sim_tests::transfer sim_tests::resilience sim_tests::soak";
    for package in PACKAGES {
        run(cargo()
            .args(["test", "--package", package, "--lib", "--"])
            .args(slow.split(' ').flat_map(|name| ["--skip", name]))
            .env(&runner, VALGRIND))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_shared() {
        assert_eq!(["a", ENGINE, "b"].map(|name| share(name, 2, 100)), [25, 50, 25]);
        assert_eq!(share("a", 2, 1), 1);
    }

    /// `fuzz/fuzz_targets`, the manifest, the corpus and the tests that replay it have the same names.
    #[test]
    fn every_target_is_built_and_its_corpus_replayed() {
        let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
        let manifest = read("fuzz/Cargo.toml");
        let tests = [
            "admission/src/fuzzing/mod.rs",
            "bench/src/fuzzing.rs",
            "dataplane/cards/src/fuzzing.rs",
            "dataplane/src/fuzzing.rs",
            "ebpf/tests/differential.rs",
            "lm-protocol/src/fuzzing/mod.rs",
            "realtime/src/fuzzing.rs",
        ];
        let tests: String = tests.into_iter().map(read).collect();
        let corpora = std::fs::read_dir(root().join("fuzz/corpus")).unwrap();
        let mut corpora: Vec<String> = corpora
            .map(|folder| folder.unwrap().file_name().into_string().unwrap())
            .collect();
        corpora.sort();
        let targets = targets().unwrap();
        assert_eq!(targets, corpora);
        for name in targets {
            assert!(
                manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")),
                "{name}"
            );
            assert!(tests.contains(&format!("(\"{name}\",")), "{name}");
        }
    }
}
