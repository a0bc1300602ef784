//! `cargo xtask test` and `ci`: the checks, by the same commands everywhere.

use std::time::Instant;

use anyhow::{Result, ensure};
use lm_measure::table::Table;

use crate::bench;
use crate::gate;
use crate::models;
use crate::size;
use crate::test_programs;
use crate::vm::devices::Device;
use crate::vm::{self, unless_lacking};
use crate::workspace::{cargo, ensure_dpdk, run};

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
    /// Instead: write the names of all tests to xtask/test-names.txt, with which the whole list is compared each time;
    /// runs none.
    #[arg(long, conflicts_with = "package")]
    update_names: bool,
    /// Instead: lower the bases of xtask/size.txt to what there is, and raise none; runs none.
    #[arg(long, conflicts_with_all = ["package", "update_names"])]
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
    let mut words = arguments.rest.split(|word| word == "--");
    let (filters, for_tests) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let tally = test_programs::Selection(arguments.package.clone()).run(filters, for_tests)?;

    println!();
    let told = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            println!("{title}\n  {}", lines.join("\n  "));
        }
    };
    let skipped = tally.skipped.iter();
    let skipped = skipped.map(|(name, reason)| format!("{name}: {reason}"));
    let unbuilt = ensure_dpdk()
        .err()
        .map(|reason| format!("what DPDK is needed for: {reason}"));
    told("skipped:", skipped.chain(unbuilt.clone()).collect());
    let absent = tally.absent.iter().map(|(name, what)| format!("{what}: {name}"));
    told(
        "parts of tests left out, because this kernel has no",
        absent.collect(),
    );
    told("failed:", tally.failures.clone());
    let skipped = tally.skipped.len() as u64;
    let passed = tally.passed.saturating_sub(skipped);
    let skipped = skipped + u64::from(unbuilt.is_some());
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

/// What came of a step: what stands in the table, and what is to be done.
type Ran = ([String; 3], Option<String>);

fn run_step((name, remedy, step): Step) -> Ran {
    eprintln!("── {name}");
    let started = Instant::now();
    let result = step();
    if let Err(error) = &result {
        eprintln!("error in {name}: {error:#}");
    }
    let seconds = format!("{:.1}", started.elapsed().as_secs_f64());
    let verdict = if result.is_ok() { "ok" } else { "FAILED" };
    let to_do = result.err().map(|error| format!("{name}: {error:#} ({remedy})"));
    ([name.to_owned(), seconds, verdict.to_owned()], to_do)
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
        // Its sessions have this machine's time: what keeps the processors busy ends them.
        ("vm", "correct what failed: `cargo xtask vm CHECK`", || {
            let machine = |devices: &[Device], spoiled| {
                unless_lacking(vm::run(&vm::Arguments::short(spoiled), devices), is_ci())
            };
            // One after the other, for the same reason.
            let one = machine(&[Device::Igb, Device::Veth], false);
            machine(&[Device::VirtioNet], true).and(one)
        }),
    ];
    // Half a processor for some minutes, in which instructions are counted: other steps change no figure of it.
    let cards: Step = (
        "cards",
        "correct what is worse: `cargo xtask bench card --short`",
        || unless_lacking(bench::card::baseline::check(), is_ci()),
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
            if ensure_dpdk().is_ok() {
                run(cargo()
                    .args(["clippy", "--package", "lm-dpdk", "--package", "lm-bench"])
                    .args(["--all-targets", "--features=lm-bench/dpdk,lm-dpdk/faults"])
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
            || bench::instructions::run(&bench::instructions::Arguments::default()),
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
    for (row, to_do) in ran {
        table.row(row);
        failed.extend(to_do);
    }
    eprintln!("\n{table}");
    let minutes = started.elapsed().as_secs_f64() / 60.0;
    if minutes > MINUTES {
        eprintln!("took {minutes:.1} min, and is to take {MINUTES}: {LATER}");
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}
