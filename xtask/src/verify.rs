//! `cargo xtask test`, `ci` and `gate`: the checks, by the same commands everywhere.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::bench;
use crate::table::Table;
use crate::vm::protocol::Mode;
use crate::vm::{self, Purpose};
use crate::workspace::{cargo, command_line, run};

/// Run every test of the workspace and sum up, with what was skipped and why.
///
/// Builds all programs, too, because tests start them. Tests that need root, a kernel feature or a second core
/// print `SKIPPED: why` where it is missing; with CI=true in the environment that is an error. What the running kernel
/// was built without is listed as well and is no error.
#[derive(Debug, clap::Args)]
pub struct TestArguments {
    /// Only this package (may be repeated); without it the whole workspace.
    #[arg(short, long, value_name = "NAME")]
    package: Vec<String>,
    /// Test the release builds.
    #[arg(long)]
    release: bool,
    /// Instead: the checks of zero-copy mode on emulated network cards, in the virtual machine of `cargo xtask vm`.
    ///
    /// Where the machine's packages cannot be had they are skipped.
    #[arg(long, conflicts_with_all = ["package", "release"])]
    vm: bool,
    /// With --vm: fewer checks that do less, in a minute and a half.
    #[arg(long, requires = "vm")]
    short: bool,
    /// With --vm: the mode to receive in.
    #[arg(long, requires = "vm", value_enum, default_value_t = Mode::ZeroCopy)]
    mode: Mode,
    /// With --vm: keep all results in this file.
    #[arg(long, requires = "vm", value_name = "FILE")]
    json: Option<PathBuf>,
    /// With --vm: keep the guest's console in this file.
    #[arg(long, requires = "vm", value_name = "FILE")]
    console: Option<PathBuf>,
    /// Passed to `cargo test`: a part of test names, or `-- --test-threads 1`. With --vm: names of checks.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    rest: Vec<String>,
}

/// Rebuild the gate's object file from its C source.
///
/// Needs clang. The object is committed, so only who changes the gate runs this.
#[derive(Debug, clap::Args)]
pub struct GateArguments {
    /// Change nothing; fail if the committed object is not what the source gives.
    #[arg(long)]
    check: bool,
}

/// What `cargo test` said, summed over all test programs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// Test name and reason.
    skipped: Vec<(String, String)>,
    /// Test name and what the kernel lacks for a part of it; nobody can install that.
    absent: Vec<(String, String)>,
    failures: Vec<String>,
    /// The test whose captured output is being read.
    current: String,
    /// Whether the lines read are the captured output of tests that passed.
    in_successes: bool,
}

impl Tally {
    /// Takes one line of `cargo test -- --show-output`; tells whether to show it.
    fn line(&mut self, line: &str) -> bool {
        if let Some(result) = line.strip_prefix("test result: ") {
            for part in result.split([';', '.']) {
                let mut words = part.split_whitespace();
                let (Some(number), Some(what)) = (words.next(), words.next()) else {
                    continue;
                };
                let Ok(number) = number.parse::<u64>() else {
                    continue;
                };
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.ignored += number,
                    _ => {}
                }
            }
            self.in_successes = false;
            return true;
        }
        if line == "successes:" {
            self.in_successes = true;
        } else if line == "failures:" {
            self.in_successes = false;
        } else if let Some(name) = line
            .strip_prefix("---- ")
            .and_then(|line| line.strip_suffix(" stdout ----"))
        {
            self.current = name.to_owned();
        } else if let Some((_, reason)) = line.split_once("SKIPPED: ") {
            self.skipped
                .push((self.current.clone(), reason.trim().to_owned()));
        } else if let Some((_, what)) = line.split_once("NOT IN THIS KERNEL: ") {
            self.absent.push((self.current.clone(), what.trim().to_owned()));
        } else if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|line| line.strip_suffix(" ... FAILED"))
        {
            self.failures.push(name.to_owned());
        }
        !self.in_successes
    }
}

/// Runs `cargo xtask test`.
pub fn test(arguments: &TestArguments) -> Result<()> {
    if arguments.vm {
        return in_machine(vm::Choice {
            purpose: match arguments.short {
                true => Purpose::ShortTest,
                false => Purpose::Test,
            },
            checks: arguments.rest.clone(),
            mode: arguments.mode,
            json: arguments.json.clone(),
            console: arguments.console.clone(),
            reports: None,
        });
    }
    let mut selection: Vec<String> = arguments
        .package
        .iter()
        .flat_map(|name| ["--package".to_owned(), name.clone()])
        .collect();
    if selection.is_empty() {
        selection.push("--workspace".to_owned());
    }
    if arguments.release {
        selection.push("--release".to_owned());
    }
    let (for_cargo, for_tests) = match arguments.rest.iter().position(|word| word == "--") {
        Some(at) => (&arguments.rest[..at], &arguments.rest[at + 1..]),
        None => (&arguments.rest[..], &[][..]),
    };
    // Tests start programs of other packages. `cargo test` builds all of them where it builds all tests; to build them before would be to
    // build most of the workspace twice, because tests ask for more features of what they depend on.
    let whole = arguments.package.is_empty() && !for_cargo.iter().any(|word| word.starts_with('-'));
    if !whole {
        run(cargo().args(["build", "--bins"]).args(if arguments.release {
            &["--workspace", "--release"][..]
        } else {
            &["--workspace"]
        }))?;
    }

    let mut command = cargo();
    command
        .args(["test", "--no-fail-fast"])
        .args(&selection)
        .args(for_cargo);
    command.args(["--", "--show-output"]).args(for_tests);
    let (tally, success) = tests_of(&mut command)?;

    println!();
    if !tally.skipped.is_empty() {
        println!("skipped:");
        for (name, reason) in &tally.skipped {
            println!("  {name}: {reason}");
        }
    }
    if !tally.absent.is_empty() {
        println!("parts of tests left out, because this kernel has no");
        for (name, what) in &tally.absent {
            println!("  {what}: {name}");
        }
    }
    if !tally.failures.is_empty() {
        println!("failed:");
        tally.failures.iter().for_each(|name| println!("  {name}"));
    }
    let skipped = tally.skipped.len() as u64;
    let passed = tally.passed.saturating_sub(skipped);
    println!("{passed} passed, {} failed, {skipped} skipped", tally.failed);
    ensure!(
        tally.failed == 0,
        "{} tests failed; they are listed above",
        tally.failed
    );
    ensure!(success, "`cargo test` failed; its own message is above");
    ensure!(passed > 0 || !arguments.rest.is_empty(), "no test ran");
    if std::env::var("CI").as_deref() == Ok("true") {
        ensure!(
            skipped == 0,
            "{skipped} tests were skipped, which CI=true does not allow; the reasons are above"
        );
    }
    Ok(())
}

/// Runs checks in the virtual machine. That its packages cannot be had, which nothing here can change, is told and no error; any
/// other reason is one.
fn in_machine(choice: vm::Choice) -> Result<()> {
    let result = vm::run(&choice.into());
    match result.as_ref().err().and_then(vm::skip_reason) {
        Some(reason) => {
            println!("SKIPPED: checks on emulated network cards: {reason}");
            Ok(())
        }
        None => result,
    }
}

/// Runs a `cargo test`, showing its output but for what passing tests printed.
fn tests_of(command: &mut Command) -> Result<(Tally, bool)> {
    let line = command_line(command);
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{line}`"))?;
    let mut tally = Tally::default();
    let mut out = std::io::stdout();
    for bytes in BufReader::new(child.stdout.take().expect("stdout is piped")).split(b'\n') {
        let bytes = bytes.context("cannot read what the tests say")?;
        let line = String::from_utf8_lossy(&bytes);
        if tally.line(&line) {
            let _ = writeln!(out, "{line}");
        }
    }
    let status = child.wait().context("cannot wait for the tests")?;
    Ok((tally, status.success()))
}

/// Runs `cargo xtask gate`.
pub fn gate(arguments: &GateArguments) -> Result<()> {
    run(&mut gate_command(arguments.check))
}

fn gate_command(check: bool) -> Command {
    let mut command = cargo();
    command.args(["run", "--quiet", "--package", "lm-ebpf", "--bin", "lm-gate-build"]);
    if check {
        command.args(["--", "--check"]);
    }
    command
}

/// Runs `cargo xtask ci`: every step even if one fails, then the verdict.
pub fn ci() -> Result<()> {
    type Step = (&'static str, &'static str, fn() -> Result<()>);
    let steps: [Step; 7] = [
        ("format", "run `cargo fmt --all`", || {
            run(cargo().args(["fmt", "--all", "--check"]))
        }),
        ("clippy", "correct what it names", || {
            run(cargo().args([
                "clippy",
                "--workspace",
                "--all-targets",
                "--",
                "--deny",
                "warnings",
            ]))
        }),
        ("gate", "run `cargo xtask gate` and commit the object", || {
            run(&mut gate_command(true))
        }),
        ("test", "correct what failed", || {
            test(&TestArguments {
                package: Vec::new(),
                release: false,
                vm: false,
                short: false,
                mode: Mode::ZeroCopy,
                json: None,
                console: None,
                rest: Vec::new(),
            })
        }),
        ("vm", "correct what failed: `cargo xtask test --vm CHECK`", || {
            let short = || {
                in_machine(vm::Choice {
                    purpose: Purpose::ShortTest,
                    ..vm::Choice::default()
                })
            };
            // QEMU's virtio-net has been seen to send nothing for a program from a machine's start to its end, in two of three on a bad day.
            let mut result = short();
            for _ in 0..2 {
                let Err(error) = &result else { break };
                eprintln!("error: {error:#}; once more, in a new machine");
                result = short();
            }
            result
        }),
        (
            "instructions",
            "cut them: `cargo xtask bench instructions`",
            bench::check_instructions,
        ),
        ("doc", "correct the documentation comments it names", || {
            let flags = std::env::var("RUSTDOCFLAGS").unwrap_or_default();
            run(cargo()
                .args(["doc", "--workspace", "--no-deps"])
                .env("RUSTDOCFLAGS", format!("{flags} -D warnings")))
        }),
    ];
    let mut table = Table::new(&["step", "seconds", ""]);
    let mut failed = Vec::new();
    for (name, remedy, step) in steps {
        eprintln!("── {name}");
        let started = Instant::now();
        let result = step();
        if let Err(error) = &result {
            eprintln!("error: {error:#}");
            failed.push(format!("{name} ({remedy})"));
        }
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        table.row([name, &format!("{:.1}", started.elapsed().as_secs_f64()), verdict]);
    }
    eprintln!("\n{table}");
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tally_sums_test_programs_and_finds_what_was_skipped() {
        let output = "\
running 3 tests
test wire::tests::golden ... ok
test bed::needs_root ... ok
test bad ... FAILED

successes:

---- bed::needs_root stdout ----
SKIPPED: not root; network namespaces need it

---- wire::tests::golden stdout ----
NOT IN THIS KERNEL: bond devices


successes:
    wire::tests::golden
    bed::needs_root

failures:

---- bad stdout ----
thread 'bad' panicked

failures:
    bad

test result: FAILED. 2 passed; 1 failed; 4 ignored; 0 measured; 0 filtered out; finished in 0.00s
   Doc-tests x
test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.20s";
        let mut tally = Tally::default();
        let shown: Vec<&str> = output.lines().filter(|line| tally.line(line)).collect();
        assert_eq!((tally.passed, tally.failed, tally.ignored), (7, 1, 4));
        assert_eq!(
            tally.skipped,
            [(
                "bed::needs_root".to_owned(),
                "not root; network namespaces need it".to_owned()
            )]
        );
        assert_eq!(
            tally.absent,
            [("wire::tests::golden".to_owned(), "bond devices".to_owned())]
        );
        assert_eq!(tally.failures, ["bad"]);
        assert!(
            shown.contains(&"thread 'bad' panicked") && !shown.iter().any(|line| line.contains("SKIPPED"))
        );
        assert!(shown.last().unwrap().starts_with("test result: ok."));
    }
}
