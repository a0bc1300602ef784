//! `cargo xtask vm`: unmodified NIC drivers in a virtual machine under software emulation, for what a veth pair cannot
//! show.
//!
//! ```text
//!   this machine                                       the guest (Debian's kernel, TCG)
//!  ┌──────────────────────────────┐                   ┌──────────────────────────────────┐
//!  │ packages: kernel, QEMU, tools│                   │ /init = this program             │
//!  │ image: tools + modules       │──── QEMU ────────▶│ igb0 ── hub ── igb1              │
//!  │ machine: ports, time limits  │                   │ virtio-net0 ── taps ── 1   veth  │
//!  │                              │◀─ console (ttyS0) │ checks, one process each         │
//!  │ table, JSON                  │◀─ results (ttyS1) │                                  │
//!  └──────────────────────────────┘                   └──────────────────────────────────┘
//! ```
//!
//! Neither KVM nor anything installed is needed. New checks go into the table of [`checks`].

pub mod checks;
pub mod devices;
pub mod guest;
pub mod machine;
mod packages;
pub mod protocol;
pub mod qemu;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use lm_measure::table::Table;
use serde_json::{Value, json};

use checks::card::Row;
use checks::{List, Selected};
use devices::Device;
use machine::Report;
pub use packages::Build;
pub(crate) use packages::Unavailable;
use protocol::{Mode, Outcome, Plan, Task, Work};
use qemu::{Clock, Qemu};

use crate::bed::leftovers::{temporary_folder, watch_signals};
use crate::content;
use crate::machine::ResultFile;
use crate::verify::is_ci;
use crate::workspace::target_dir;

/// Run checks on emulated network cards, in a virtual machine with a kernel of Debian's.
///
/// Without names it runs those of the machine itself; --all and --short run the others.
///
/// Fetches the kernel (trixie-backports), QEMU and tools that are pinned in xtask/src/vm/packages.lock from Debian's
/// packages with the ordinary apt-get, once, and installs nothing: everything lies in $LM_VM_CACHE, else
/// ~/.cache/lm-vm. Boots the tools under QEMU's software emulation with two igb and two virtio-net cards, runs the
/// checks inside and brings the results back. Without root virtio-net has one queue instead of two.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = "\
EXAMPLES
  cargo xtask vm                                  whether the machine, its cards and the tools work
  cargo xtask vm --all                            everything about zero-copy mode
  cargo xtask vm --devices igb transfer           one check on one kind of device
  cargo xtask vm --run 'ethtool -i eth0'      a command line in the guest
  cargo xtask vm --with target/…/my_test --run '/tests/my_test'

A guest that panics or hangs is reported with the check that ran and its console's last words;
--console FILE keeps it all.")]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// Kinds of devices in the machine [default: all]
    #[arg(long, value_enum, value_delimiter = ',', hide_default_value = true)]
    devices: Vec<Device>,
    /// Show the checks and end.
    #[arg(long)]
    list: bool,
    /// Run a command line of the guest's shell instead of checks and show the last 128 KiB of what it says; may be
    /// repeated.
    #[arg(long, value_name = "COMMAND", conflicts_with = "checks")]
    run: Vec<String>,
    /// Seconds that each --run may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    run_limit: u32,
    /// Copy a program to /tests/ in the guest, with its libraries. May be repeated.
    #[arg(long, value_name = "PATH")]
    with: Vec<PathBuf>,
    /// Everything about zero-copy mode instead.
    #[arg(long, conflicts_with_all = ["run", "checks"])]
    all: bool,
    /// With fewer checks that do less, in a minute and a half.
    #[arg(long, conflicts_with_all = ["run", "all"])]
    short: bool,
    /// Checks with faults put into them on purpose instead; each must be found.
    #[arg(long, conflicts_with_all = ["run", "checks", "all", "short"])]
    spoiled: bool,
    /// Pin and fetch the newest kernel, QEMU and tools: rewrites xtask/src/vm/packages.lock, which is to be committed.
    #[arg(long)]
    refresh: bool,
}

/// What the machine is started for: which checks run when none is named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// `cargo xtask vm`.
    #[default]
    Machine,
    /// `--all`.
    Test,
    /// `--short`.
    ShortTest,
    /// `--spoiled`: only checks with faults put into them.
    Spoiled,
    /// The short list, and checks with faults.
    ShortAndSpoiled,
}

impl Purpose {
    fn includes(self) -> fn(List) -> bool {
        match self {
            Purpose::Machine => |list| list == List::Machine,
            Purpose::Test => |list| matches!(list, List::Short | List::Long),
            Purpose::ShortTest | Purpose::ShortAndSpoiled => |list| list == List::Short,
            Purpose::Spoiled => |_| false,
        }
    }

    fn is_short(self) -> bool {
        matches!(
            self,
            Purpose::ShortTest | Purpose::Spoiled | Purpose::ShortAndSpoiled
        )
    }

    fn has_faults(self) -> bool {
        matches!(self, Purpose::Spoiled | Purpose::ShortAndSpoiled)
    }
}

/// What other commands choose of a run, too.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Choice {
    /// Checks to run, by name, device or both, as --list shows them [default: those of the machine and its cards]
    #[arg(value_name = "CHECK")]
    pub checks: Vec<String>,
    /// The mode that LM's programs are to receive in, where a check does not say otherwise.
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,
    /// What the guest's time is.
    #[arg(long, value_enum, default_value_t)]
    pub clock: Clock,
    /// Keep all results in this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Keep the guest's console in this file.
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
    /// What it is for.
    #[arg(skip)]
    pub purpose: Purpose,
    /// Whose builds the guest gets.
    #[arg(skip)]
    pub build: Build,
    /// Whether QEMU joins virtio-net cards itself, with one queue, though there may be taps.
    #[arg(skip)]
    pub hub: bool,
}

impl From<Choice> for Arguments {
    fn from(choice: Choice) -> Arguments {
        Arguments {
            choice,
            ..Arguments::default()
        }
    }
}

impl Arguments {
    /// With these kinds of devices alone.
    #[must_use]
    pub fn with_devices(mut self, devices: &[Device]) -> Arguments {
        self.devices = devices.to_vec();
        self
    }

    /// Each kind of devices once, in the order of the results.
    fn devices(&self) -> Vec<Device> {
        let is_wanted = |device: &Device| self.devices.is_empty() || self.devices.contains(device);
        Device::ALL.into_iter().filter(is_wanted).collect()
    }
}

/// Runs `cargo xtask vm`.
pub fn command(mut arguments: Arguments) -> Result<()> {
    arguments.choice.purpose = match (arguments.all, arguments.short, arguments.spoiled) {
        (true, ..) => Purpose::Test,
        (_, true, _) => Purpose::ShortTest,
        (.., true) => Purpose::Spoiled,
        _ => Purpose::Machine,
    };
    unless_lacking(run(&arguments), is_ci())
}

/// What came of a run of the virtual machine. That its packages cannot be had is told, and an error in CI alone.
pub(crate) fn unless_lacking(result: Result<()>, is_ci: bool) -> Result<()> {
    let reason = |error: &anyhow::Error| {
        error
            .chain()
            .find_map(|cause| cause.downcast_ref::<Unavailable>().cloned())
    };
    match result.as_ref().err().and_then(reason) {
        Some(reason) if is_ci => {
            bail!("the checks on emulated network cards were skipped, which CI=true does not allow: {reason}")
        }
        Some(reason) => {
            println!("SKIPPED: checks on emulated network cards: {reason}");
            Ok(())
        }
        None => result,
    }
}

/// Runs the machine. An error with an `Unavailable` in it says that it cannot be had here.
pub fn run(arguments: &Arguments) -> Result<()> {
    let devices = arguments.devices();
    let selected = checks::select(
        &arguments.choice.checks,
        &devices,
        arguments.choice.purpose.includes(),
    )?;
    if arguments.list {
        let all = checks::all(&devices);
        let shown = if arguments.choice.checks.is_empty() {
            &all
        } else {
            &selected
        };
        print!("{}", listing(shown));
        return Ok(());
    }
    for path in &arguments.with {
        ensure!(path.is_file(), "{} is no file", path.display());
    }
    watch_signals()?;
    let result_file = arguments
        .choice
        .json
        .as_deref()
        .map(ResultFile::create)
        .transpose()?;
    let tasks = tasks(arguments, &selected);
    let (report, result) = boot(arguments, &tasks)?;
    if let Some(file) = result_file {
        file.write(&result)?;
    }
    print!("{}", shown(&report, !arguments.run.is_empty()));
    verdict(&report, &tasks)
}

/// Measures rows of one kind of cards, with these programs in the guest's /tests/; what the machine said, and what is
/// known of it, as result files have it.
pub(crate) fn measure(choice: Choice, rows: &[Row], with: Vec<PathBuf>) -> Result<(Report, Value)> {
    watch_signals()?;
    let task = |row: &Row| Task {
        name: row.name(),
        limit_s: row.limit_s(),
        work: Work::Row(row.clone()),
    };
    let tasks: Vec<Task> = rows.iter().map(task).collect();
    let arguments = Arguments {
        devices: rows.iter().map(|row| row.device).collect(),
        with,
        ..choice.into()
    };
    boot(&arguments, &tasks)
}

/// Starts the machine for these tasks.
fn boot(arguments: &Arguments, tasks: &[Task]) -> Result<(Report, Value)> {
    let devices = &*arguments.devices();
    if std::env::consts::ARCH != "x86_64" {
        bail!(Unavailable(format!(
            "the virtual machine is an x86-64 one, and this machine is {}; run this on an x86-64 machine",
            std::env::consts::ARCH
        )));
    }
    let started = Instant::now();
    let cache = packages::unpacked(arguments.refresh)?;
    let parts = packages::kernel(&cache)?;
    let (kernel, release) = (parts.join("vmlinuz"), parts.file_name().context("a release")?);
    let qemu = Qemu::unpacked(&cache.join("qemu"))?;
    let fetched_seconds = started.elapsed().as_secs_f64();
    let programs = packages::build(arguments.choice.build)?;
    let built_seconds = started.elapsed().as_secs_f64() - fetched_seconds;

    let (folder, _folder) = temporary_folder(&target_dir()?, "vm")?;
    let archive = folder.join("initramfs");
    let mut needed: Vec<&str> = devices
        .iter()
        .flat_map(|device| device.modules())
        .copied()
        .collect();
    // Beds and checks make veth pairs, whatever the machine has.
    needed.extend(Device::Veth.modules());
    let modules = packages::load_order(&parts, &needed)?;
    let file_name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let choice = &arguments.choice;
    let plan = Plan {
        modules: modules.iter().filter_map(file_name).collect(),
        devices: devices.to_vec(),
        huge_pages: qemu::HUGE_PAGES,
        mode: choice.mode,
        clock: choice.clock,
        short: choice.purpose.is_short(),
        spoil: None,
        tasks: tasks.to_vec(),
    };
    let root = folder.join("root");
    let tools = cache.join("tools");
    let archive_len = packages::pack(
        [&root, &archive],
        [&tools, &programs],
        &plan,
        &modules,
        &arguments.with,
    )?;
    let initramfs_seconds = started.elapsed().as_secs_f64() - fetched_seconds - built_seconds;
    // Where instructions are counted, these and QEMU decide everything.
    let digests = [content::sha256(&kernel)?, content::sha256(&archive)?];

    eprintln!(
        "booting Linux {} under QEMU {} (initramfs {} MiB)",
        release.display(),
        qemu.version,
        archive_len >> 20
    );
    let report = machine::Run {
        qemu: &qemu,
        kernel: &kernel,
        initramfs: &archive,
        folder: &folder,
        console: choice.console.clone().unwrap_or_else(|| folder.join("console")),
        devices,
        hub: choice.hub,
        clock: choice.clock,
        tasks: &plan.tasks,
    }
    .run()?;
    let result = json!({
        "suite": "vm",
        "mode": choice.mode,
        "short": plan.short,
        "machine": crate::machine::describe(),
        "kernel": {"image": kernel, "release": release.to_string_lossy()},
        "sha256": {"kernel": digests[0], "initramfs": digests[1]},
        "qemu": {"version": qemu.version},
        "devices": devices,
        "virtio_net_backend": report.virtio_backend,
        "guest": report.facts,
        "seconds": {
            "fetch": fetched_seconds,
            "build": built_seconds,
            "initramfs": initramfs_seconds,
            "boot": report.boot_seconds,
            "machine": report.seconds,
            "all": started.elapsed().as_secs_f64(),
        },
        "checks": report.ended,
        "died": report.died,
    });
    Ok((report, result))
}

fn tasks(arguments: &Arguments, selected: &[Selected]) -> Vec<Task> {
    if arguments.run.is_empty() {
        let task = |one: &Selected| Task {
            name: one.name(),
            limit_s: one.check.limit_s,
            work: Work::Check(one.name()),
        };
        let mut tasks: Vec<Task> = selected.iter().map(task).collect();
        if arguments.choice.purpose.has_faults() {
            tasks.extend(spoiled(&arguments.devices()));
        }
        return tasks;
    }
    let command = |line: &String| Task {
        name: line.clone(),
        limit_s: arguments.run_limit,
        work: Work::Command(line.clone()),
    };
    arguments.run.iter().map(command).collect()
}

/// The checks with faults that these devices can have.
fn spoiled(devices: &[Device]) -> impl Iterator<Item = Task> {
    let all = checks::all(devices);
    checks::SPOILED.into_iter().filter_map(move |(name, spoil)| {
        let limit_s = all.iter().find(|one| one.name() == name)?.check.limit_s;
        Some(Task {
            name: format!("{name} with a fault"),
            limit_s,
            work: Work::Spoiled(name.to_owned(), spoil),
        })
    })
}

fn listing(selected: &[Selected]) -> String {
    let width = selected.iter().map(|one| one.name().len()).max().unwrap_or(0);
    let line = |one: &Selected| format!("{:<width$}  {}\n", one.name(), one.check.about);
    selected.iter().map(line).collect()
}

/// What standard output gets: the commands' output, or a table of the checks with the words of those that did not pass
/// and the figures of those that measure.
fn shown(report: &Report, of_commands: bool) -> String {
    if of_commands {
        let lines = report.ended.iter().flat_map(|ended| ended.output.lines());
        return lines.map(|line| format!("{line}\n")).collect();
    }
    let mut table = Table::new(&["check", "seconds", ""]);
    let mut words = String::new();
    for ended in &report.ended {
        let seconds = format!("{:.1}", ended.seconds);
        table.row([ended.name.as_str(), &seconds, ended.outcome.as_str()]);
        if let Some(summary) = ended.report["summary"].as_str() {
            words.push_str(&format!("\n{}: {summary}\n", ended.name));
        }
        if ended.outcome != Outcome::Passed {
            words.push_str(&format!("\n{} {}:\n", ended.name, ended.outcome.as_str()));
            for line in ended.output.trim_end().lines() {
                words.push_str(&format!("  {line}\n"));
            }
        }
    }
    format!("{table}{words}")
}

/// An error for whatever did not pass or did not run.
fn verdict(report: &Report, tasks: &[Task]) -> Result<()> {
    if let Some(died) = &report.died {
        bail!("{died}; the whole console: --console FILE");
    }
    let failed = report
        .ended
        .iter()
        .filter(|ended| ended.outcome == Outcome::Failed);
    let failed: Vec<&str> = failed.map(|ended| ended.name.as_str()).collect();
    ensure!(
        failed.is_empty(),
        "{} of {} failed: {}; what they said is above",
        failed.len(),
        report.ended.len(),
        failed.join(", ")
    );
    let missing = tasks
        .iter()
        .find(|task| !report.ended.iter().any(|ended| ended.name == task.name));
    if let Some(task) = missing {
        bail!(
            "{} did not run; the console may tell why: --console FILE",
            task.name
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
