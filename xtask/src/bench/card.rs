//! `cargo xtask bench card`: `lm-bench compare` on emulated cards, in time that is counted in instructions, so that what this machine does meanwhile
//! does not show. What that clock sees and what not: docs/testing.md.

pub(crate) mod baseline;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::machine::{self, ResultFile};
use crate::vm::checks::card::Row;
use crate::vm::devices::Device;
use crate::vm::protocol::Ended;
use crate::vm::qemu::Clock;
use crate::vm::{self, Choice, Machine};

/// Two whole runs agree when no figure differs by more than this.
const AGREE: f64 = 0.01;
/// Seconds that a comparison may take: one of the short list, and any other.
const SHORT_LIMIT_S: u32 = 100;
const LIMIT_S: u32 = 3600;

/// What `--short --json` kept, and every change is compared with.
const BASELINE: &str = "bench/card.json";

/// The kernel's systems.
const KERNELS: &str = "udp-spinning,udp-blocking,udp-gso,tcp";

/// LM, bare AF_XDP, kernel UDP and TCP between emulated network cards, in time that is counted in instructions.
///
/// Runs `lm-bench compare` in the virtual machine of `cargo xtask vm`, and prints what it prints. Rounds of a row agree within 1 %, whatever else this
/// machine does. docs/testing.md says what this clock does not see.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Kinds of cards
    #[arg(long = "device", value_enum, value_delimiter = ',', default_values_t = Device::ALL)]
    devices: Vec<Device>,
    /// Systems as of lm-bench compare [default: LM that polls and that sleeps, UDP that spins and that blocks, TCP, and bare AF_XDP, in
    /// each mode that the cards have]
    #[arg(long, value_name = "NAMES")]
    systems: Option<String>,
    /// Give each queue of igb one NAPI instance for both ways, as many cards have
    #[arg(long)]
    shared: bool,
    /// Six rows of LM in three minutes instead of all
    #[arg(long, conflicts_with_all = ["devices", "systems", "options"])]
    short: bool,
    /// Keep everything in this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare with what an earlier run has kept; fails where a figure differs by more than 1 %
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Options of lm-bench compare, after --: -- --tasks stream --sizes 64K --rounds 2
    #[arg(last = true)]
    options: Vec<String>,
}

/// What came of a row: the report of `lm-bench`, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Measured {
    row: Row,
    report: Value,
}

/// A result file, as far as it is compared.
#[derive(Debug, Deserialize)]
struct Kept {
    rustc: Option<String>,
    boots: Vec<Machine>,
    rows: Vec<Measured>,
}

/// The comparisons that are asked for.
fn rows(arguments: &Arguments) -> Vec<Row> {
    let mut rows = Vec::new();
    for &device in &arguments.devices {
        // Zero-copy mode wants two queues, which virtio-net has on taps alone.
        let beds = if device == Device::VirtioNet {
            &[true, false][..]
        } else {
            &[false]
        };
        for &taps in beds {
            let row = |systems| Row {
                device,
                shared: arguments.shared && device == Device::Igb,
                taps,
                systems,
                options: arguments.options.join(" "),
                limit_s: LIMIT_S,
            };
            match &arguments.systems {
                Some(systems) => rows.push(row(systems.clone())),
                None => rows.extend(systems(device, taps).map(row)),
            }
        }
    }
    rows
}

/// All that a card can: LM beside the kernel, and bare AF_XDP, which has a queue to itself. Without digests zero-copy mode is refused.
fn systems(device: Device, taps: bool) -> [String; 2] {
    let modes: &[&str] = match (device, taps) {
        (Device::Igb, _) => &["zero-copy", "copy"],
        (Device::VirtioNet, true) => &["zero-copy"],
        _ => &["copy"],
    };
    let in_modes = |system: &str| {
        modes
            .iter()
            .map(|mode| format!("{system} --mode {mode}"))
            .collect()
    };
    let mut lm: Vec<String> = ["lm", "lm --idle default"].map(in_modes).concat();
    if modes.contains(&"copy") {
        lm.push("lm --integrity none --mode copy".to_owned());
    }
    let bare: Vec<String> = in_modes("bare --queue 0");
    [format!("{},{KERNELS}", lm.join(",")), bare.join(",")]
}

/// The short list: what LM does on each kind of card, as far as another image changes nothing. In zero-copy mode virtio-net's taps are the host's,
/// whose time differs from run to run.
fn short_rows() -> Vec<Row> {
    const LIST: [(Device, &str); 6] = [
        (Device::Igb, "--mode zero-copy --tasks stream --sizes 65536"),
        (Device::Igb, "--mode zero-copy --tasks round-trips --sizes 64"),
        (Device::Igb, "--mode zero-copy --tasks round-trips --sizes 7168"),
        (Device::Igb, "--mode copy --tasks stream --sizes 65536"),
        (Device::VirtioNet, "--mode copy --tasks stream --sizes 65536"),
        (Device::VirtioNet, "--mode copy --tasks round-trips --sizes 7168"),
    ];
    let row = |(device, options): (Device, &str)| Row {
        device,
        shared: false,
        taps: false,
        systems: "lm".to_owned(),
        options: options.to_owned(),
        limit_s: SHORT_LIMIT_S,
    };
    LIST.map(row).into()
}

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let earlier = arguments.against.as_deref().map(baseline::earlier).transpose()?;
    let rows = match arguments.short {
        true => short_rows(),
        false => rows(arguments),
    };
    let (measured, machines) = measure(rows)?;
    if let Some(file) = file {
        file.write(&json!({
            "suite": "card",
            "machine": machine::describe(),
            "rustc": machine::rustc(),
            "boots": machines,
            "rows": measured,
        }))?;
    }
    match earlier {
        Some(earlier) => baseline::within(-AGREE..=AGREE, &measured, &earlier.rows)
            .with_context(|| format!("where {}", baseline::other_machine(&machines, &earlier.boots))),
        None => Ok(()),
    }
}

/// Measures in a boot for each kind of machine, and prints what `lm-bench` says.
fn measure(rows: Vec<Row>) -> Result<(Vec<Measured>, Vec<Machine>)> {
    let mut measured = Vec::new();
    let mut machines = Vec::new();
    for mut rows in rows.chunk_by(|one, other| (one.device, one.taps) == (other.device, other.taps)) {
        while let Some(first) = rows.first() {
            let choice = Choice {
                clock: Clock::Instructions,
                hub: !first.taps,
                ..Choice::default()
            };
            let (report, machine) = vm::measure(choice, rows)?;
            machines.push(machine);
            ensure!(
                !report.ended.is_empty(),
                "{} did not run: {}",
                first.name(),
                report.died.unwrap_or_default()
            );
            // A guest that dies in a row takes no others along: those have not begun.
            let (ran, rest) = rows.split_at(report.ended.len());
            for (row, ended) in ran.iter().zip(report.ended) {
                println!("{}\n{}", row.name(), said(&ended));
                let report = ended.report["report"].clone();
                measured.push(Measured {
                    row: row.clone(),
                    report,
                });
            }
            rows = rest;
        }
    }
    Ok((measured, machines))
}

/// What a row's `lm-bench` said, and how it failed.
fn said(ended: &Ended) -> String {
    let said = ended.report["said"].as_str().unwrap_or_default();
    let error = match ended.passed {
        true => ended.report["error"].as_str(),
        false => ended.output.trim().lines().last().or(Some("it ended")),
    };
    error.map_or_else(|| said.to_owned(), |error| format!("{said}failed: {error}\n"))
}

#[cfg(test)]
#[path = "card_tests.rs"]
mod tests;
