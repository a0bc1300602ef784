//! `cargo xtask bench card`: LM beside bare AF_XDP and the kernel's sockets on emulated cards, in time that is counted in instructions, so that
//! what this machine does meanwhile does not show. What that clock sees and what not: docs/testing.md.

pub(super) mod baseline;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use lm_measure::statistics::Summary;
use lm_measure::table::Table;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use baseline::compare;

use crate::machine::{self, ResultFile};
use crate::vm::checks::card::{Row, USECS, What};
use crate::vm::devices::Device;
use crate::vm::protocol::{Ended, Mode, Outcome};
use crate::vm::qemu::Clock;
use crate::vm::{self, Choice};

/// Rounds of a row, and two whole runs, agree when they differ by no more than this.
const AGREE: f64 = 0.01;
/// Seconds of the host that a boot may take, and that one round of a row takes at most when nothing is wrong.
const BOOT_SECONDS: u32 = 420;
const ROUND_SECONDS: u32 = 15;

/// What `--short --rounds 1 --json` kept, and every change is compared with.
const BASELINE: &str = "bench/card.json";

const SYSTEMS: [&str; 8] = [
    "lm",
    SLEEPING,
    "lm --integrity none",
    "bare",
    "udp-spinning",
    "udp-blocking",
    "udp-gso",
    "tcp",
];
const SLEEPING: &str = "lm --idle default";
const SIZES: [u64; 5] = [64, 1 << 10, 7168, 64 << 10, 1 << 20];

/// LM, bare AF_XDP, kernel UDP and TCP between emulated network cards, in time that is counted in instructions.
///
/// Everything runs in the virtual machine of `cargo xtask vm`. Rounds of a row agree within 1 %, whatever else this machine does; a row whose rounds do not
/// says so, and what fails is told and not repeated. docs/testing.md says what this clock does not see.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Kinds of cards.
    #[arg(long = "device", value_enum, value_delimiter = ',', default_values_t = Device::ALL)]
    devices: Vec<Device>,
    /// Systems of lm-bench with their options, separated by commas.
    #[arg(long = "system", value_name = "NAMES", value_delimiter = ',', default_values_t = SYSTEMS.map(str::to_owned))]
    systems: Vec<String>,
    /// Message lengths in bytes, separated by commas.
    #[arg(long = "size", value_name = "BYTES", value_delimiter = ',', default_values_t = SIZES)]
    sizes: Vec<u64>,
    /// What to measure.
    #[arg(long = "what", value_enum, value_delimiter = ',', default_values_t = [What::Stream, What::RoundTrips,
        What::Beside])]
    whats: Vec<What>,
    /// How often each row is measured.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=10))]
    rounds: u32,
    /// Interval between interrupts that igb is asked for, of its receive and of its transmit queues, in microseconds; 3: the driver adapts it. QEMU has it last
    /// 4.1 times as long.
    #[arg(long, default_value_t = USECS)]
    usecs: u32,
    /// Give each queue of igb one NAPI instance for both ways, as many cards have.
    #[arg(long)]
    shared: bool,
    /// Six rows in three minutes instead of all.
    #[arg(long, conflicts_with_all = ["devices", "systems", "sizes", "whats"])]
    short: bool,
    /// By the host's clock instead of counted instructions: ratios only, and with the noise of the machine.
    #[arg(long)]
    real_time: bool,
    /// Keep everything in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare with what an earlier run has kept; fails where a row differs by more than 1 %.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Keep the guest's console in this file.
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
}

/// What came of a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Measured {
    row: Row,
    /// Bits of payload a second, or nanoseconds of the median round trip; one for each round that came to its end.
    rounds: Vec<f64>,
    /// 99 of 100 round trips were not longer, in nanoseconds.
    p99: Vec<f64>,
    /// Bits of payload a second that the stream beside round trips had.
    beside: Vec<f64>,
    /// Lost messages for each that came, all rounds together.
    lost: f64,
    /// LM's wake-ups of devices for each message at the near and the far end.
    #[serde(default)]
    wakeups: [Option<f64>; 2],
    /// Bytes that LM copied for each.
    #[serde(default)]
    copied_bytes: [Option<f64>; 2],
    /// Why there are fewer rounds than asked for.
    failures: Vec<String>,
}

impl Measured {
    fn of(row: &Row, ended: &Ended) -> Measured {
        let report = &ended.report;
        let mut failures: Vec<String> = ["failures", "absent"]
            .iter()
            .filter_map(|kind| report[*kind].as_array())
            .flatten()
            .filter_map(|one| one["why"].as_str().map(str::to_owned))
            .collect();
        if ended.outcome != Outcome::Passed {
            failures.push(
                ended
                    .output
                    .trim()
                    .lines()
                    .last()
                    .unwrap_or("it ended")
                    .to_owned(),
            );
        } else if failures.is_empty() {
            failures.extend(report["error"].as_str().map(str::to_owned));
        }
        let rounds = report["rounds"].as_array().map_or(&[][..], Vec::as_slice);
        let figure = |round: &Value| match row.what {
            What::Stream => bits_per_s(round),
            What::RoundTrips | What::Beside => round["p50_ns"].as_f64(),
        };
        let sum = |name: &str| {
            rounds
                .iter()
                .filter_map(|round| round[name].as_f64())
                .sum::<f64>()
        };
        let of_both = |what: &str| {
            let of_end = |end: usize| rounds.iter().filter_map(move |round| round[what][end].as_f64());
            [0, 1].map(|end| Summary::of_finite(of_end(end)).map(|found| found.median))
        };
        let messages = sum("messages");
        Measured {
            row: row.clone(),
            rounds: rounds.iter().filter_map(figure).collect(),
            p99: (rounds.iter())
                .filter_map(|round| round["p99_ns"].as_f64())
                .collect(),
            beside: (rounds.iter())
                .filter(|_| row.what == What::Beside)
                .filter_map(bits_per_s)
                .collect(),
            lost: if messages > 0.0 {
                sum("lost_messages") / messages
            } else {
                0.0
            },
            wakeups: of_both("wakeups_per_message"),
            copied_bytes: of_both("copied_bytes_per_message"),
            failures,
        }
    }

    /// Of a row that did not begin.
    fn absent(row: &Row, why: String) -> Measured {
        let ended = Ended {
            name: row.name(),
            outcome: Outcome::Failed,
            seconds: 0.0,
            report: Value::Null,
            output: why,
        };
        Measured::of(row, &ended)
    }

    fn median(&self) -> Option<f64> {
        Summary::of(&self.rounds).map(|summary| summary.median)
    }

    /// The longest distance between two rounds, as a part of the least; `None` of fewer than two.
    fn apart(&self) -> Option<f64> {
        let least = self.rounds.iter().copied().reduce(f64::min)?;
        let most = self.rounds.iter().copied().reduce(f64::max)?;
        (self.rounds.len() > 1 && least > 0.0).then(|| most / least - 1.0)
    }

    /// What a reader must know before believing the figure; nothing where rounds agree and nothing was lost.
    fn remark(&self) -> String {
        let mut words = Vec::new();
        if let Some(why) = self.failures.first() {
            words.push(format!("{} failed: {why}", self.failures.len()));
        }
        match self.apart() {
            Some(apart) if apart > AGREE => words.push(format!("rounds differ by {:.1} %", apart * 100.0)),
            Some(_) => {}
            None if self.rounds.len() == 1 => words.push("one round".to_owned()),
            None => {}
        }
        if let Some(beside) = Summary::of(&self.beside) {
            words.push(format!("beside {:.0} Mbit/s", beside.median / 1e6));
        }
        if self.lost > 0.0 {
            words.push(format!("{:.2} lost for each that came", self.lost));
        }
        words.join("; ")
    }
}

fn bits_per_s(round: &Value) -> Option<f64> {
    Some(round["bytes"].as_f64()? * 8.0 / round["seconds"].as_f64()?)
}

/// The rows that are asked for; what a system cannot do is left out.
fn rows(arguments: &Arguments) -> Vec<Row> {
    let mut rows = Vec::new();
    for &device in &arguments.devices {
        for &what in &arguments.whats {
            for &size in &arguments.sizes {
                for system in arguments
                    .systems
                    .iter()
                    .filter(|system| measures(system, what, size))
                {
                    for (mode, taps) in ways(device, system) {
                        rows.push(Row {
                            device,
                            system: system.clone(),
                            mode,
                            what,
                            size,
                            rounds: arguments.rounds,
                            usecs: arguments.usecs,
                            shared: arguments.shared && device == Device::Igb,
                            taps,
                        });
                    }
                }
            }
        }
    }
    rows
}

/// In which modes a system runs, and whether on cards that taps of the host join: zero-copy mode wants two queues, which virtio-net has there
/// alone, and so what it is compared with is measured there as well. Without digests zero-copy mode is refused.
fn ways(device: Device, system: &str) -> Vec<(Option<Mode>, bool)> {
    let virtio = device == Device::VirtioNet;
    let (zero_copy, copy) = ((Some(Mode::ZeroCopy), virtio), (Some(Mode::Copy), false));
    match system {
        "lm" | SLEEPING | "bare" if device != Device::Veth => vec![zero_copy, copy],
        system if system == "bare" || system == "real-time" || system.starts_with("lm") => vec![copy],
        _ if virtio => vec![(None, true), (None, false)],
        _ => vec![(None, false)],
    }
}

/// Bare AF_XDP has packets and no messages; what else a system cannot do `lm-bench` knows, which leaves it out. Beside a stream messages take
/// several packets.
fn measures(system: &str, what: What, size: u64) -> bool {
    match what {
        What::Stream => system != "bare" || size <= 1472,
        What::RoundTrips if system == "bare" => size <= 1472,
        What::RoundTrips if system.starts_with("udp-gso") => false,
        What::RoundTrips => !system.starts_with("udp") || size <= 65_507,
        What::Beside => size > 1472 && (system == "udp-spinning" || system.starts_with("lm")),
    }
}

/// The short list: what LM does on each kind of card, as far as another image changes nothing. In zero-copy mode virtio-net's taps are the host's,
/// whose time differs from run to run.
fn short_rows(rounds: u32, usecs: u32) -> Vec<Row> {
    const LIST: [(Device, Mode, What, u64); 6] = [
        (Device::Igb, Mode::ZeroCopy, What::Stream, 64 << 10),
        (Device::Igb, Mode::ZeroCopy, What::RoundTrips, 64),
        (Device::Igb, Mode::ZeroCopy, What::RoundTrips, 7168),
        (Device::Igb, Mode::Copy, What::Stream, 64 << 10),
        (Device::VirtioNet, Mode::Copy, What::Stream, 64 << 10),
        (Device::VirtioNet, Mode::Copy, What::RoundTrips, 7168),
    ];
    let row = |(device, mode, what, size)| Row {
        device,
        system: "lm".to_owned(),
        mode: Some(mode),
        what,
        size,
        rounds,
        usecs,
        shared: false,
        taps: false,
    };
    LIST.map(row).into()
}

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let earlier = arguments.against.as_deref().map(earlier).transpose()?;
    let rows = match arguments.short {
        true => short_rows(arguments.rounds, arguments.usecs),
        false => rows(arguments),
    };
    ensure!(!rows.is_empty(), "no system measures that");
    let choice = choice(arguments);
    let (measured, machines) = measure(rows, &choice)?;
    print!("{}", table(&measured));
    if let Some(file) = file {
        file.write(&json!({
            "suite": "card",
            "rounds": arguments.rounds,
            "clock": choice.clock,
            "machine": machine::describe(),
            "rustc": machine::rustc(),
            "boots": machines,
            "rows": measured,
        }))?;
    }
    match earlier {
        Some(earlier) => compare(&measured, &earlier.rows)
            .with_context(|| format!("where {}", other_machine(&machines, &earlier.boots))),
        None => Ok(()),
    }
}

fn choice(arguments: &Arguments) -> Choice {
    Choice {
        clock: match arguments.real_time {
            true => Clock::Real,
            false => Clock::Instructions,
        },
        // The short list is measured by what `cargo xtask ci` has built.
        build: match arguments.short {
            true => vm::Build::Counted,
            false => vm::Build::Release,
        },
        console: arguments.console.clone(),
        ..Choice::default()
    }
}

/// Measures rows of the same number of rounds, boot by boot.
fn measure(mut rows: Vec<Row>, choice: &Choice) -> Result<(Vec<Measured>, Vec<Machine>)> {
    let counts = choice.clock == Clock::Instructions;
    if counts {
        // Each has a machine of its own.
        rows.sort_by_key(machine_of);
    }
    let mut measured = Vec::new();
    let mut machines = Vec::new();
    for mut rows in boots(&rows) {
        while !rows.is_empty() {
            let choice = Choice {
                hub: counts && !rows[0].taps,
                ..choice.clone()
            };
            let (report, machine) = vm::measure(choice, rows)?;
            machines.push(Machine::of(&rows[0], &machine));
            // A guest that dies in a row takes no others along: those have not begun.
            let (ran, rest) = rows.split_at(report.ended.len());
            measured.extend(
                ran.iter()
                    .zip(&report.ended)
                    .map(|(row, ended)| Measured::of(row, ended)),
            );
            rows = rest;
            if ran.is_empty() {
                let why = report.died.unwrap_or_else(|| "it did not run".to_owned());
                measured.extend(rows.iter().map(|row| Measured::absent(row, why.clone())));
                break;
            }
        }
    }
    Ok((measured, machines))
}

/// A result file, as far as it is compared.
#[derive(Debug, Deserialize)]
struct Kept {
    rustc: Option<String>,
    boots: Vec<Machine>,
    rows: Vec<Measured>,
}

/// What decides a boot's figures where instructions are counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Machine {
    /// The kind of cards.
    device: Device,
    /// QEMU's version.
    qemu: String,
    /// The guest's kernel.
    guest: String,
    /// SHA-256 of the kernel's image and of all files of the guest: programs, and the rows in their order.
    kernel_sha256: String,
    initramfs_sha256: String,
}

impl Machine {
    fn of(row: &Row, result: &Value) -> Machine {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Machine {
            device: row.device,
            qemu: text(&result["qemu"]["version"]),
            guest: text(&result["guest"]["kernel"]),
            kernel_sha256: text(&result["sha256"]["kernel"]),
            initramfs_sha256: text(&result["sha256"]["initramfs"]),
        }
    }
}

/// In what the machines of two runs differ: why their figures may.
fn other_machine(now: &[Machine], earlier: &[Machine]) -> String {
    let differs = |part: fn(&Machine) -> &str| !now.iter().map(part).eq(earlier.iter().map(part));
    let parts = [
        ("QEMU", differs(|one| &one.qemu)),
        ("the kernel", differs(|one| &one.kernel_sha256)),
        (
            "the guest's files (programs, or which rows and their order)",
            differs(|one| &one.initramfs_sha256),
        ),
    ];
    let parts: Vec<&str> = (parts.iter())
        .filter_map(|(name, differs)| differs.then_some(*name))
        .collect();
    match parts.as_slice() {
        [] => "QEMU, kernel and the guest's files are the same: something else than instructions decided"
            .to_owned(),
        parts => format!("another machine was measured: different are {}", parts.join(", ")),
    }
}

/// What a row's machine must be: rows of which this is the same share a boot.
fn machine_of(row: &Row) -> (Device, bool) {
    (row.device, row.taps)
}

/// As many rows as one boot of the machine takes in its time.
fn boots(rows: &[Row]) -> Vec<&[Row]> {
    let rounds = rows.first().map_or(1, |row| row.rounds);
    let most = BOOT_SECONDS / (ROUND_SECONDS * rounds);
    rows.chunk_by(|one, other| machine_of(one) == machine_of(other))
        .flat_map(|rows| rows.chunks(most.max(1) as usize))
        .collect()
}

fn table(measured: &[Measured]) -> Table {
    let mut table = Table::new(&[
        "row",
        "bytes",
        "Mbit/s, or p50 µs",
        "p99 µs",
        "wake-ups a message",
        "copied bytes",
        "",
    ]);
    for one in measured {
        let whole = one.row.name();
        let name = whole.rsplit_once(' ').map_or(&*whole, |(name, _)| name);
        let scale = match one.row.what {
            What::Stream => 1e6,
            What::RoundTrips | What::Beside => 1e3,
        };
        let shown = |figure: Option<f64>, scale: f64, digits: usize| {
            figure.map_or("–".to_owned(), |figure| format!("{:.digits$}", figure / scale))
        };
        let ends = |both: [Option<f64>; 2]| match both {
            [near, None] => shown(near, 1.0, 2),
            [near, far] => format!("{}; {}", shown(near, 1.0, 2), shown(far, 1.0, 2)),
        };
        let p99 = Summary::of(&one.p99).map(|summary| summary.median);
        let p99 = match one.row.what {
            What::Stream => String::new(),
            What::RoundTrips | What::Beside => shown(p99, 1e3, 1),
        };
        table.row([
            name.to_owned(),
            one.row.size.to_string(),
            shown(one.median(), scale, 1),
            p99,
            ends(one.wakeups),
            ends(one.copied_bytes),
            one.remark(),
        ]);
    }
    table
}

/// An earlier run.
fn earlier(path: &std::path::Path) -> Result<Kept> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no result of this command", path.display()))
}

#[cfg(test)]
#[path = "card_tests.rs"]
mod tests;
