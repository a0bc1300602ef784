//! `cargo xtask test` and `ci`: the checks, by the same commands everywhere.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use lm_measure::table::Table;

use crate::bench;
use crate::gate;
use crate::models;
use crate::size;
use crate::tally::Tally;
use crate::test_programs;
use crate::vm::devices::Device;
use crate::vm::{self, Purpose, unless_lacking};
use crate::workspace::{cargo, command_line, run};

/// Run every test of the workspace and sum up, with what was skipped and why.
///
/// Builds all programs, too, because tests start them. Tests that need root, a kernel feature or a second core
/// print `SKIPPED: why` where it is missing; with CI=true in the environment that is an error. What the running kernel
/// was built without is listed as well and is no error.
#[derive(Debug, Default, clap::Args)]
pub struct TestArguments {
    /// Only this package (may be repeated); without it the whole workspace.
    #[arg(short, long, value_name = "NAME")]
    package: Vec<String>,
    /// Test the release builds.
    #[arg(long)]
    release: bool,
    /// Instead: write the names of all tests to xtask/test-names.txt, with which the whole list is compared each time; runs none.
    #[arg(long, conflicts_with_all = ["package", "release"])]
    update_names: bool,
    /// Instead: lower the bases of xtask/size.txt to what there is, and raise none; runs none.
    #[arg(long, conflicts_with_all = ["package", "release", "update_names"])]
    update_size: bool,
    /// Passed to `cargo test`: a part of test names, or `-- --test-threads 1`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    rest: Vec<String>,
}

/// Runs `cargo xtask test`.
pub fn test(arguments: &TestArguments) -> Result<()> {
    if arguments.update_names {
        return test_programs::update();
    }
    if arguments.update_size {
        return size::lower();
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
    let (tally, success) = if whole {
        (
            test_programs::run_all(arguments.release, for_cargo, for_tests)?,
            true,
        )
    } else {
        run(cargo().args(["build", "--bins"]).args(if arguments.release {
            &["--workspace", "--release"][..]
        } else {
            &["--workspace"]
        }))?;
        let mut command = cargo();
        command
            .args(["test", "--no-fail-fast"])
            .args(&selection)
            .args(for_cargo);
        command.args(["--", "--show-output"]).args(for_tests);
        tests_of(&mut command)?
    };

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
    if whole && arguments.rest.is_empty() {
        test_programs::compare(&tally.names)?;
    }
    ensure!(passed > 0 || !arguments.rest.is_empty(), "no test ran");
    if is_ci() {
        ensure!(
            skipped == 0,
            "{skipped} tests were skipped, which CI=true does not allow; the reasons are above"
        );
    }
    Ok(())
}

pub(crate) fn is_ci() -> bool {
    std::env::var("CI").as_deref() == Ok("true")
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

/// A step: its name, what to do when it fails, and what it does.
type Step = (&'static str, &'static str, fn() -> Result<()>);

/// What came of a step.
struct Ran {
    name: &'static str,
    remedy: &'static str,
    seconds: f64,
    result: Result<()>,
}

fn run_step((name, remedy, step): Step) -> Ran {
    eprintln!("── {name}");
    let started = Instant::now();
    let result = step();
    if let Err(error) = &result {
        eprintln!("error in {name}: {error:#}");
    }
    Ran {
        name,
        remedy,
        seconds: started.elapsed().as_secs_f64(),
        result,
    }
}

/// Runs `cargo xtask ci`: every step even if one fails, then the verdict.
pub fn ci() -> Result<()> {
    let steps: [Step; 4] = [
        ("format", "run `cargo fmt --all`", || {
            run(cargo().args(["fmt", "--all", "--check"]))
        }),
        ("test", "correct what failed", || test(&TestArguments::default())),
        (
            "gate",
            "run `cargo xtask gate` and commit the object",
            gate::check,
        ),
        ("vm", "correct what failed: `cargo xtask vm CHECK`", || {
            // One waits for links and leases most of the time, and so does the other.
            let machine = |devices: &[Device], purpose| {
                let choice = vm::Choice {
                    purpose,
                    ..vm::Choice::default()
                };
                unless_lacking(
                    vm::run(&vm::Arguments::from(choice).with_devices(devices)),
                    is_ci(),
                )
            };
            std::thread::scope(|scope| {
                let one = scope.spawn(|| machine(&[Device::Igb, Device::Veth], Purpose::ShortTest));
                let other = machine(&[Device::VirtioNet], Purpose::ShortAndSpoiled);
                one.join().expect("it gives errors back").and(other)
            })
        }),
    ];
    // One processor for some minutes, in which instructions are counted: the others do not mind, and it does not mind them.
    let cards: Step = (
        "cards",
        "correct what is worse: `cargo xtask bench card --short`",
        || unless_lacking(bench::check_cards(), is_ci()),
    );
    let beside: [Step; 4] = [
        ("clippy", "correct what it names", || {
            for chosen in [
                &["--workspace", "--all-targets"][..],
                &["--package", "lm-fuzz", "--bins", "--features", "targets"],
            ] {
                run(cargo()
                    .arg("clippy")
                    .args(chosen)
                    .args(["--", "--deny", "warnings"]))?;
            }
            Ok(())
        }),
        (
            "models",
            "correct what it names: `cargo xtask models`",
            models::run,
        ),
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
    let mut ran = Vec::from(steps.map(run_step));
    std::thread::scope(|scope| {
        let cards = scope.spawn(|| run_step(cards));
        ran.extend(beside.map(run_step));
        ran.push(cards.join().expect("it gives errors back"));
    });
    let mut table = Table::new(&["step", "seconds", ""]);
    let mut failed = Vec::new();
    for one in &ran {
        let verdict = if one.result.is_ok() { "ok" } else { "FAILED" };
        table.row([one.name, &format!("{:.1}", one.seconds), verdict]);
        if one.result.is_err() {
            failed.push(format!("{} ({})", one.name, one.remedy));
        }
    }
    eprintln!("\n{table}");
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}
