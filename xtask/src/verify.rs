//! `cargo xtask test` and `ci`: the checks, by the same commands everywhere.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use lm_measure::table::Table;

use crate::bench;
use crate::gate;
use crate::models;
use crate::size;
use crate::test_programs;
use crate::vm::devices::Device;
use crate::vm::{self, unless_lacking};
use crate::workspace::{cargo, run};

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
    /// Instead: write the names of all tests to xtask/test-names.txt, with which the whole list is compared each time;
    /// runs none.
    #[arg(long, conflicts_with_all = ["package", "release"])]
    update_names: bool,
    /// Instead: lower the bases of xtask/size.txt to what there is, and raise none; runs none.
    #[arg(long, conflicts_with_all = ["package", "release", "update_names"])]
    update_size: bool,
    /// Parts of the names of tests to run, then `-- --test-threads 1` and what else test programs take.
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
    let (filters, for_tests) = match arguments.rest.iter().position(|word| word == "--") {
        Some(at) => (&arguments.rest[..at], &arguments.rest[at + 1..]),
        None => (&arguments.rest[..], &[][..]),
    };
    let selection = test_programs::Selection {
        packages: arguments.package.clone(),
        release: arguments.release,
    };
    let tally = selection.run(filters, for_tests)?;

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
    if arguments.package.is_empty() && arguments.rest.is_empty() {
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

/// What all steps of `cargo xtask ci` together are to take at most.
const MINUTES: f64 = 16.0;
/// What later issues may add to that.
const LATER: &str = "AHEAD may add 20 s, DPDK 75 s, FIELD 60 s, SOCKETS 90 s, each once it is there";

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
            let machine = |devices: &[Device], spoiled| {
                unless_lacking(vm::run(&vm::Arguments::short(spoiled), devices), is_ci())
            };
            std::thread::scope(|scope| {
                let one = scope.spawn(|| machine(&[Device::Igb, Device::Veth], false));
                let other = machine(&[Device::VirtioNet], true);
                one.join().expect("it gives errors back").and(other)
            })
        }),
    ];
    // One processor for some minutes, in which instructions are counted: the others do not mind, and it does not mind
    // them.
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
    let started = Instant::now();
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
    let minutes = started.elapsed().as_secs_f64() / 60.0;
    if minutes > MINUTES {
        eprintln!("took {minutes:.1} min, and is to take {MINUTES}: {LATER}");
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}
