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

use anyhow::{Context as _, Result, bail, ensure};
use lm_measure::table::Table;
use serde::{Deserialize, Serialize};

use checks::card::Row;
use checks::{List, Selected};
use devices::Device;
use machine::Report;
pub(crate) use packages::Unavailable;
use protocol::{Plan, Task, Work};
use qemu::Clock;

use crate::bed::leftovers::{temporary_folder, watch_signals};
use crate::content;
use crate::verify::is_ci;
use crate::workspace::{Programs, target_dir};

/// Run checks on emulated network cards, in a virtual machine with a kernel of Debian's.
///
/// Without names it runs those of the machine itself; --all and --short run the others.
///
/// Fetches the kernel (trixie-backports), QEMU and tools that are pinned in xtask/src/vm/packages.lock from Debian's
/// packages with the ordinary apt-get, once, and installs nothing: everything lies in $LM_VM_CACHE, else
/// ~/.cache/lm-vm. Boots the tools under QEMU's software emulation with two cards of each kind that the checks are of,
/// runs the checks inside and brings the results back. Without root virtio-net has one queue instead of two.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = "\
EXAMPLES
  cargo xtask vm                                  whether the machine, its cards and the tools work
  cargo xtask vm --all                            everything about zero-copy mode
  cargo xtask vm igb/transfer                     one check on one kind of device
  cargo xtask vm --run 'ethtool -i eth0'      a command line in the guest
  cargo xtask vm --with target/…/my_test --run '/tests/my_test'

A guest that panics or hangs is reported with the check that ran and its console's last words;
--console FILE keeps it all.")]
pub struct Arguments {
    /// Checks to run, by name, device or both, as --list shows them [default: those of the machine and its cards]
    #[arg(value_name = "CHECK")]
    checks: Vec<String>,
    #[command(flatten)]
    choice: Choice,
    /// Show the checks and end.
    #[arg(long)]
    list: bool,
    /// Run a command line of the guest's shell instead of checks and show the last 128 KiB of what it says; may be
    /// repeated.
    #[arg(long, value_name = "COMMAND", conflicts_with = "checks")]
    run: Vec<String>,
    /// Copy a program to /tests/ in the guest, with its libraries. May be repeated.
    #[arg(long, value_name = "PATH")]
    with: Vec<PathBuf>,
    /// Everything about zero-copy mode instead.
    #[arg(long, conflicts_with_all = ["run", "checks"])]
    all: bool,
    /// With fewer checks that do less, in a minute and a half.
    #[arg(long, conflicts_with_all = ["run", "all"])]
    short: bool,
    /// Checks with faults put into them on purpose instead; each must be found. With --short: beside its checks.
    #[arg(long, conflicts_with_all = ["run", "checks", "all"])]
    spoiled: bool,
    /// Pin and fetch the newest kernel, QEMU and tools: rewrites xtask/src/vm/packages.lock, which is to be committed.
    #[arg(long)]
    refresh: bool,
}

/// What other commands choose of a machine, too.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Choice {
    /// What the guest's time is.
    #[arg(long, value_enum, default_value_t)]
    pub clock: Clock,
    /// Keep the guest's console in this file.
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
    /// Whether QEMU joins virtio-net cards itself, with one queue, though there may be taps.
    #[arg(skip)]
    pub hub: bool,
}

impl Arguments {
    /// `--short`, with `--spoiled` or without.
    pub(crate) fn short(spoiled: bool) -> Arguments {
        Arguments {
            short: true,
            spoiled,
            ..Arguments::default()
        }
    }

    /// Whether checks are to do less.
    fn is_short(&self) -> bool {
        self.short || self.spoiled
    }

    /// Whether a check of this list runs where none is named.
    fn lists(&self, list: List) -> bool {
        match list {
            List::Machine => !(self.all || self.short || self.spoiled),
            List::Short => self.all || self.short,
            List::Long => self.all,
            List::Named => false,
        }
    }

    /// What the guest is to do on devices of these kinds, and those that it needs.
    fn tasks(&self, devices: &[Device]) -> Result<(Vec<Task>, Vec<Device>)> {
        let command = |line: &String| Task {
            name: line.clone(),
            limit_s: LIMIT_S,
            work: Work::Command(line.clone()),
        };
        if !self.run.is_empty() {
            return Ok((self.run.iter().map(command).collect(), devices.to_vec()));
        }
        let selected = checks::select(&self.checks, devices, |list| self.lists(list))?;
        let spoiled = checks::SPOILED.into_iter().filter(|_| self.spoiled);
        let spoiled = spoiled.filter_map(|(name, spoil)| {
            let mut all = checks::all(devices).into_iter();
            Some((all.find(|one| one.name() == name)?, Some(spoil)))
        });
        let task = |(one, spoil): (Selected, Option<_>)| Task {
            name: one.name() + spoil.map_or("", |_| " with a fault"),
            limit_s: if self.is_short() { SHORT_LIMIT_S } else { LIMIT_S },
            work: Work::Check(one.name(), spoil),
        };
        let selected = selected.into_iter().map(|one| (one, None));
        let selected: Vec<_> = selected.chain(spoiled).collect();
        let is_needed = |device: &&Device| selected.iter().any(|(one, _)| one.device == **device);
        let devices = devices.iter().filter(is_needed).copied().collect();
        Ok((selected.into_iter().map(task).collect(), devices))
    }
}

/// Seconds that each check may take where it does less, and where not: what it starts has limits of its own, so that
/// this is for what hangs. Each command line may take as long.
const SHORT_LIMIT_S: u32 = 300;
const LIMIT_S: u32 = 1200;

/// Runs `cargo xtask vm`.
pub fn command(arguments: &Arguments) -> Result<()> {
    unless_lacking(run(arguments, &Device::ALL), is_ci())
}

/// What came of a run of the virtual machine. That its packages cannot be had is told, and an error in CI alone.
pub(crate) fn unless_lacking(result: Result<()>, is_ci: bool) -> Result<()> {
    let Err(error) = &result else { return result };
    match error.downcast_ref::<Unavailable>() {
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

/// Runs the machine, with what these kinds of devices can have. An error with an `Unavailable` in it says that it
/// cannot be had here.
pub fn run(arguments: &Arguments, devices: &[Device]) -> Result<()> {
    if arguments.list {
        let is_shown = |list| arguments.checks.is_empty() || arguments.lists(list);
        let selected = checks::select(&arguments.checks, devices, is_shown)?;
        print!("{}", listing(&selected));
        return Ok(());
    }
    for path in &arguments.with {
        ensure!(path.is_file(), "{} is no file", path.display());
    }
    watch_signals()?;
    let (tasks, devices) = arguments.tasks(devices)?;
    let (report, _) = boot(arguments, &devices, &tasks)?;
    print!("{}", shown(&report, !arguments.run.is_empty()));
    verdict(&report)
}

/// What decides a boot's figures where instructions are counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The first kind of devices.
    pub(crate) device: Device,
    /// QEMU's version.
    pub(crate) qemu: String,
    /// The guest's kernel.
    pub(crate) guest: String,
    /// SHA-256 of the kernel's image and of all files of the guest: programs, and the rows in their order.
    pub(crate) kernel_sha256: String,
    pub(crate) initramfs_sha256: String,
}

/// Measures rows of one kind of cards; what the machine said, and what is known of it, as result files have it.
pub(crate) fn measure(choice: Choice, rows: &[Row]) -> Result<(Report, Machine)> {
    watch_signals()?;
    let task = |row: &Row| Task {
        name: row.name(),
        limit_s: row.limit_s,
        work: Work::Row(row.clone()),
    };
    let tasks: Vec<Task> = rows.iter().map(task).collect();
    let is_measured = |device: &Device| rows.iter().any(|row| row.device == *device);
    let devices: Vec<Device> = Device::ALL.into_iter().filter(is_measured).collect();
    let arguments = Arguments {
        choice,
        ..Arguments::default()
    };
    boot(&arguments, &devices, &tasks)
}

/// Starts the machine for these tasks.
fn boot(arguments: &Arguments, devices: &[Device], tasks: &[Task]) -> Result<(Report, Machine)> {
    if std::env::consts::ARCH != "x86_64" {
        bail!(Unavailable(format!(
            "the virtual machine is an x86-64 one, and this machine is {}; run this on an x86-64 machine",
            std::env::consts::ARCH
        )));
    }
    let choice = &arguments.choice;
    let cache = packages::unpacked(arguments.refresh)?;
    let parts = packages::kernel(&cache)?;
    let (kernel, release) = (parts.join("vmlinuz"), parts.file_name().context("a release")?);
    let qemu = cache.join("qemu");
    let version = qemu::version(&qemu)?;
    // Optimised ones: in software emulation others fall behind their own traffic.
    let programs = Programs::build(&["lm-bench", "lm-check", "lm-recv", "lm-send", "xtask"])?;

    let (folder, _folder) = temporary_folder(&target_dir()?, "vm")?;
    let archive = folder.join("initramfs");
    // Beds and checks make veth pairs, whatever the machine has.
    let needed = devices.iter().chain(&[Device::Veth]);
    let needed: Vec<&str> = needed.flat_map(|device| device.modules()).copied().collect();
    let modules = packages::load_order(&parts, &needed)?;
    let file_name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let plan = Plan {
        modules: modules.iter().filter_map(file_name).collect(),
        devices: devices.to_vec(),
        clock: choice.clock,
        short: arguments.is_short(),
        spoil: None,
        tasks: tasks.to_vec(),
    };
    let archive_len = packages::pack(
        [&folder.join("root"), &archive],
        [&cache.join("tools"), &programs.folder],
        &plan,
        &modules,
        &arguments.with,
    )?;
    eprintln!(
        "booting Linux {} under QEMU {} (initramfs {} MiB)",
        release.display(),
        version,
        archive_len >> 20
    );
    let report = machine::Run {
        qemu: &qemu,
        kernel: &kernel,
        initramfs: &archive,
        results: folder.join("results"),
        console: choice.console.clone().unwrap_or_else(|| folder.join("console")),
        devices,
        hub: choice.hub,
        clock: choice.clock,
        tasks,
    }
    .run()?;
    let machine = Machine {
        device: devices.first().copied().unwrap_or(Device::Veth),
        qemu: version,
        guest: report.kernel.clone().unwrap_or_default(),
        kernel_sha256: content::sha256(&kernel)?,
        initramfs_sha256: content::sha256(&archive)?,
    };
    Ok((report, machine))
}

fn listing(selected: &[Selected]) -> String {
    let width = selected.iter().map(|one| one.name().len()).max().unwrap_or(0);
    let line = |one: &Selected| format!("{:<width$}  {}\n", one.name(), one.check.about);
    selected.iter().map(line).collect()
}

/// What standard output gets: the commands' output, or a table of the checks with the words of those that did not pass.
fn shown(report: &Report, of_commands: bool) -> String {
    if of_commands {
        let lines = report.ended.iter().flat_map(|ended| ended.output.lines());
        return lines.map(|line| format!("{line}\n")).collect();
    }
    let mut table = Table::new(&["check", "seconds", ""]);
    let mut words = String::new();
    for ended in &report.ended {
        let seconds = format!("{:.1}", ended.seconds);
        table.row([ended.name.as_str(), &seconds, ended.verdict()]);
        if !ended.passed {
            words.push_str(&format!("\n{} {}:\n", ended.name, ended.verdict()));
            for line in ended.output.trim_end().lines() {
                words.push_str(&format!("  {line}\n"));
            }
        }
    }
    format!("{table}{words}")
}

/// An error for whatever did not pass. A guest that lives has run everything.
fn verdict(report: &Report) -> Result<()> {
    if let Some(died) = &report.died {
        bail!("{died}; the whole console: --console FILE");
    }
    let failed = report.ended.iter().filter(|ended| !ended.passed);
    let failed: Vec<&str> = failed.map(|ended| ended.name.as_str()).collect();
    ensure!(
        failed.is_empty(),
        "{} of {} failed: {}; what they said is above",
        failed.len(),
        report.ended.len(),
        failed.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests;
