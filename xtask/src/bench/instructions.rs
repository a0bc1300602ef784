//! `cargo xtask bench instructions`: what a fragment, and the answer to a small message, cost in user space, counted in instructions by
//! callgrind.
//!
//! The programs are the tests `sim_tests::instructions` of `lm-dataplane`, built as for release: one message from one engine to
//! the other on the simulated NIC, and small messages to and fro. Callgrind collects inside the rounds of one engine alone. What is
//! counted there in the files of the simulated NIC (its locks, its look at a queue) is taken off. Two numbers of fragments or messages are
//! counted, and the difference is divided by those between them: what happens once for a message or a session drops out.
//!
//! Instructions do not depend on the machine's speed or load, only on the compiler and, for the C library's copies, on the processor's
//! features. So a growth is told from noise where a time would not be.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use lm_measure::table::Table;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bed::leftovers;
use crate::fuzz::{answers, lacking};
use crate::machine::rustc;
use crate::workspace::{cargo, root, said_aloud_by};

/// Instructions per fragment, and per answer to a small message, in user space, counted by callgrind on the simulated NIC.
///
/// Fragments for the sending and the receiving engine apart; all without digests and with them. Compares with the committed baseline
/// (bench/instructions.json) and fails where a figure has grown by more than 5 %. Needs valgrind; neither root nor a quiet machine.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Arguments {
    /// Write what was counted to bench/instructions.json, after a change that is meant.
    #[arg(long)]
    update: bool,
}

/// Fragments of the shorter and the longer message, whole windows with some hundred rounds between them; and messages that are
/// answered.
const COUNTS: [u32; 2] = [1024, 5120];
/// A figure that is larger than the baseline by this factor is a failure.
const GROWTH: f64 = 1.05;
/// What is counted one by one: its name, the function that it runs in, in `dataplane/tests/simulated/instructions.rs`,
/// and the test that runs it.
const SUBJECTS: [(&str, &str, &str); 3] = [
    (
        "fragment, sender",
        "counted_round_of_sender",
        "transfer_of_fragments",
    ),
    (
        "fragment, receiver",
        "counted_round_of_receiver",
        "transfer_of_fragments",
    ),
    ("answer to 64 bytes", "counted_answer", "exchange_of_messages"),
];
const INTEGRITIES: [&str; 2] = ["none", "manifest"];

/// Instructions by case: `fragment, sender, integrity none`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Baseline {
    /// The compiler that made what was counted.
    rustc: String,
    /// Instructions, rounded to a tenth.
    instructions: BTreeMap<String, f64>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if !answers("valgrind", &["--version"]) {
        return lacking("instructions are counted by valgrind: install the package valgrind");
    }
    let program = build()?;
    let (folder, _guard) = leftovers::temporary_folder(&std::env::temp_dir(), "instructions")?;
    let path = root().join("bench/instructions.json");
    let baseline = || -> Result<Baseline> {
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}; make it with --update", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is no baseline", path.display()))
    };
    // What cannot be read is written anew where that is asked for.
    let baseline = match arguments.update {
        true => baseline().ok(),
        false => Some(baseline()?),
    };
    let rustc = rustc().context("cannot start `rustc --version`")?;
    let mut table = Table::new(&["for each", "instructions", "baseline", ""]);
    let mut instructions = BTreeMap::new();
    let mut grown = Vec::new();
    for integrity in INTEGRITIES {
        for (name, function, test) in SUBJECTS {
            let case = format!("{name}, integrity {integrity}");
            eprintln!("  counting: {case}");
            let count = |number| count(&program, &folder, [function, test, integrity], number);
            let [few, many] = [count(COUNTS[0])?, count(COUNTS[1])?];
            let more = f64::from(COUNTS[1] - COUNTS[0]);
            let found = tenths((many as f64 - few as f64) / more);
            let before = (baseline.as_ref()).and_then(|baseline| baseline.instructions.get(&case).copied());
            let has_grown = before.is_some_and(|before| found > before * GROWTH);
            table.row([
                case.clone(),
                format!("{found:.1}"),
                before.map_or_else(|| "none".to_owned(), |before| format!("{before:.1}")),
                if has_grown { "GROWN" } else { "" }.to_owned(),
            ]);
            if has_grown {
                grown.push(case.clone());
            }
            instructions.insert(case, found);
        }
    }
    println!("\nInstructions in user space, {rustc}:\n\n{table}");
    if let Some(baseline) = baseline.as_ref().filter(|baseline| baseline.rustc != rustc) {
        println!("The baseline is of {}.", baseline.rustc);
    }
    if arguments.update {
        let text = serde_json::to_string_pretty(&Baseline { rustc, instructions })?;
        std::fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
        println!("kept in {}", path.display());
        return Ok(());
    }
    if !grown.is_empty() {
        bail!(
            "more than 5 % above the baseline: {}; cut them, or say why with --update",
            grown.join("; ")
        );
    }
    Ok(())
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Builds the program that uses endpoints on the simulated NIC as for release, with symbols; its path.
fn build() -> Result<PathBuf> {
    eprintln!("building endpoints on the simulated NIC (as for release)");
    let mut command = cargo();
    // Of the tools' features, so that what they share is built once.
    let words = "test --release -p lm-dataplane -p lm-bench -p xtask --test simulated --no-run";
    command.args(words.split(' '));
    command.arg("--message-format=json-render-diagnostics");
    let messages = said_aloud_by(&mut command)?;
    let mut programs = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    programs.next_back().context("cargo named no test program")
}

/// Counts the instructions of so many fragments or messages.
fn count(program: &Path, folder: &Path, [function, test, integrity]: [&str; 3], number: u32) -> Result<u64> {
    let report = folder.join("callgrind.out");
    let mut command = Command::new("valgrind");
    command
        .args([
            "--tool=callgrind",
            "--collect-atstart=no",
            "--compress-strings=no",
        ])
        .args(["--compress-pos=no", "--dump-line=yes"])
        .arg(format!("--toggle-collect=*{function}*"))
        .arg(format!("--callgrind-out-file={}", report.display()))
        .arg(program)
        .args(["--exact", "--test-threads=1"])
        .arg(format!("instructions::{test}"))
        .env("LM_INSTRUCTIONS_COUNT", number.to_string())
        .env("LM_INSTRUCTIONS_INTEGRITY", integrity);
    let output = command.output().context("cannot start valgrind")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && said.contains("1 passed"),
        "the counted program failed:\n{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = std::fs::read_to_string(&report).context("callgrind left no report")?;
    let counted = read(&text)?;
    ensure!(
        counted > 0,
        "nothing was counted in {function}: did it get another name?"
    );
    Ok(counted)
}

/// Reads a report of callgrind without compression (its manual, "Callgrind Format Specification"): what functions took themselves, but for those
/// in files of the simulated NIC.
fn read(report: &str) -> Result<u64> {
    let (mut counted, mut is_simulated, mut of_call) = (0, false, false);
    for line in report.lines() {
        let file = ["fl=", "fi=", "fe="]
            .iter()
            .find_map(|key| line.strip_prefix(key));
        if let Some(file) = file {
            is_simulated = file.contains("/sim/src/");
        } else if line.starts_with("calls=") {
            // The next line is what the called function took, which is told with that function.
            of_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit()) {
            let cost = line.split_whitespace().nth(1).context("a line without a cost")?;
            let cost: u64 = cost.parse().context("a cost that is no number")?;
            if !std::mem::take(&mut of_call) && !is_simulated {
                counted += cost;
            }
        }
    }
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_calls_belong_to_the_called() {
        let report = "\
events: Ir
fl=/a/src/engine.rs
fn=poll
10 5
11 7
cfn=wake
calls=2 3
11 900
fi=/a/src/ring.rs
4 3
fe=/a/src/engine.rs
12 1

fl=/a/sim/src/host.rs
fn=wake
3 800
fi=/std/mutex.rs
9 100
fl=???
fn=memcpy
0 40
totals: 956
";
        // poll 16, wake 100 in another file, memcpy 40; 800 are the simulated NIC's.
        assert_eq!(read(report).unwrap(), 156);
        assert!(read("fn=a\n1 x\n").is_err());
    }

    /// The names by which callgrind finds what to count, and what it is told to run, are in that program.
    #[test]
    fn the_counted_functions_exist() {
        let path = root().join("dataplane/tests/simulated/instructions.rs");
        let text = std::fs::read_to_string(path).unwrap();
        for (_, function, test) in SUBJECTS {
            assert!(
                text.contains(&format!("#[inline(never)]\nfn {function}(")),
                "{function}"
            );
            assert!(text.contains(&format!("#[test]\nfn {test}()")), "{test}");
        }
    }
}
