//! One run of the virtual machine: started, listened to, ended in any case.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::devices::Device;
use super::protocol::{Ended, Event, Lines, Outcome, Task, tail};
use super::qemu::{Clock, MachineConfig, Qemu};
use crate::bed::{Lone, Program};

/// From QEMU's start until the guest's first line. Six seconds on an idle machine, several times as long where
/// instructions are counted.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// From the guest's last line until QEMU has ended, and on top of a task's own limit.
const GRACE: Duration = Duration::from_secs(20);

/// What to start.
#[derive(Debug)]
pub struct Run<'a> {
    /// The QEMU to take.
    pub qemu: &'a Qemu,
    /// The kernel's image.
    pub kernel: &'a Path,
    /// The guest's files.
    pub initramfs: &'a Path,
    /// A folder for the ports' files.
    pub folder: &'a Path,
    /// Where the guest's console is kept.
    pub console: PathBuf,
    /// Kinds of devices.
    pub devices: &'a [Device],
    /// Whether QEMU joins virtio-net cards itself, though there may be taps.
    pub hub: bool,
    /// What its time is.
    pub clock: Clock,
    /// What the guest was told to do.
    pub tasks: &'a [Task],
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Report {
    /// What the guest said of itself when it was up; null if it never was.
    pub facts: Value,
    /// From QEMU's start until then.
    pub boot_seconds: f64,
    /// From QEMU's start to its end.
    pub seconds: f64,
    /// The tasks that have ended, and the one that the guest died in.
    pub ended: Vec<Ended>,
    /// Why the guest did not get to its end.
    pub died: Option<String>,
    /// What the network is made of: `taps` or `hub`.
    pub virtio_backend: Option<&'static str>,
}

impl Run<'_> {
    /// Starts the machine and waits for its end, telling what happens on standard error.
    pub fn run(&self) -> Result<Report> {
        let results = self.folder.join("results");
        // QEMU makes both files anew; they exist before, so that reading them needs no waiting.
        File::create(&self.console).with_context(|| {
            format!(
                "cannot write {}; name another file: --console FILE",
                self.console.display()
            )
        })?;
        File::create(&results).with_context(|| format!("cannot write {}", results.display()))?;
        let network = self.network()?;
        let limit = BOOT_LIMIT
            + GRACE
            + self
                .tasks
                .iter()
                .map(|task| Duration::from_secs(u64::from(task.limit_s)) + GRACE)
                .sum::<Duration>();
        let config = MachineConfig {
            kernel: self.kernel,
            initramfs: self.initramfs,
            console: &self.console,
            results: &results,
            devices: self.devices,
            taps: network.is_some().then(|| TAPS.map(str::to_owned)),
            clock: self.clock,
        };
        let launch = self.qemu.launch(&config, limit);
        let started = Instant::now();
        let program = match &network {
            Some(lone) => lone.host().spawn(launch)?,
            None => launch.spawn()?,
        };
        let port = File::open(&results).with_context(|| format!("cannot read {}", results.display()))?;
        let mut conversation = Conversation::new(started, self.tasks);
        self.listen(program, port, &mut conversation)?;
        let mut report = conversation.report;
        report.seconds = started.elapsed().as_secs_f64();
        if self.devices.contains(&Device::VirtioNet) {
            report.virtio_backend = Some(if network.is_some() { "taps" } else { "hub" });
        }
        Ok(report)
    }

    /// A namespace with two taps on a bridge, which give a virtio-net device several queues. Without root QEMU joins
    /// the devices itself, with one queue each.
    fn network(&self) -> Result<Option<Lone>> {
        if self.hub || !self.devices.contains(&Device::VirtioNet) {
            return Ok(None);
        }
        let made = Lone::new().and_then(|lone| {
            lone.host()
                .write_file("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
                .ok();
            lone.configure(&tap_commands())?;
            Ok(lone)
        });
        match made {
            Ok(lone) => Ok(Some(lone)),
            Err(error) => {
                eprintln!("virtio-net has one queue, because there are no taps: {error:#}");
                Ok(None)
            }
        }
    }

    fn listen(
        &self,
        mut program: Program,
        mut port: File,
        conversation: &mut Conversation<'_>,
    ) -> Result<()> {
        let mut lines = Lines::default();
        loop {
            // Asked before the port is read: what was written before the end is then read as well.
            let ended = program.has_ended()?;
            let mut piece = Vec::new();
            port.read_to_end(&mut piece)
                .context("cannot read the guest's results")?;
            for line in lines.push(&piece) {
                conversation.take(Event::parse(&line)?)?;
            }
            if conversation.finished {
                // Nothing is left to hear. QEMU may trip over its own devices while a guest powers off.
                program.stop()?;
                return Ok(());
            }
            if ended {
                let output = program.outcome()?;
                if let Some(said) = qemu_failure(output.status.success(), &output.stderr) {
                    bail!("QEMU failed: {said}");
                }
                let console = self.console_text();
                conversation.die(|| last_words(&console));
                return Ok(());
            }
            if let Some(what) = conversation.overdue(Instant::now()) {
                program.stop()?;
                let console = self.console_text();
                conversation.die(|| format!("{what}; console: {}", last_words(&console)));
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn console_text(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

const TAPS: [&str; 2] = ["tap0", "tap1"];

fn tap_commands() -> Vec<String> {
    let mut commands = vec!["link add name joint type bridge".to_owned()];
    for tap in TAPS {
        commands.push(format!("tuntap add dev {tap} mode tap multi_queue"));
        commands.push(format!("link set dev {tap} txqueuelen 10000 master joint up"));
    }
    commands.push("link set dev joint up".to_owned());
    commands
}

/// What QEMU itself complains about: it has ended with an error, or never started the machine.
fn qemu_failure(success: bool, stderr: &str) -> Option<String> {
    let words = stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let words: Vec<&str> = words.filter(|line| !line.contains("warning:")).collect();
    (!success).then(|| words.last().map_or("it says nothing", |line| line).to_owned())
}

/// The line of the console that says most about a guest's end.
fn last_words(console: &str) -> String {
    let line = console
        .lines()
        .find(|line| line.contains("Kernel panic"))
        .or_else(|| console.lines().rfind(|line| !line.trim().is_empty()));
    let line = line.unwrap_or("(nothing on its console)").trim();
    tail(line, 200).to_owned()
}

/// What the guest has said so far.
struct Conversation<'a> {
    tasks: &'a [Task],
    started: Instant,
    /// The task that runs, since when, and its limit.
    running: Option<(String, Instant, Duration)>,
    finished: bool,
    /// When the guest said something last.
    heard: Instant,
    report: Report,
}

impl<'a> Conversation<'a> {
    fn new(started: Instant, tasks: &'a [Task]) -> Conversation<'a> {
        Conversation {
            tasks,
            started,
            running: None,
            finished: false,
            heard: started,
            report: Report::default(),
        }
    }

    fn take(&mut self, event: Event) -> Result<()> {
        self.heard = Instant::now();
        match event {
            Event::Booted { facts } => {
                self.report.boot_seconds = self.started.elapsed().as_secs_f64();
                let kernel = facts["kernel"].as_str().unwrap_or("a kernel of unknown version");
                eprintln!("  {kernel} is up after {:.1} s", self.report.boot_seconds);
                for trouble in facts["troubles"].as_array().into_iter().flatten() {
                    eprintln!("  trouble: {}", trouble.as_str().unwrap_or_default());
                }
                self.report.facts = facts;
            }
            Event::Started { name } => {
                let limit = self.tasks.iter().find(|task| task.name == name);
                let limit = Duration::from_secs(limit.map_or(0, |task| u64::from(task.limit_s)));
                self.running = Some((name, Instant::now(), limit + GRACE));
            }
            Event::Ended(ended) => {
                eprintln!(
                    "  {} {} ({:.1} s)",
                    ended.name,
                    ended.outcome.as_str(),
                    ended.seconds
                );
                self.running = None;
                self.report.ended.push(ended);
            }
            Event::Broken { reason } => bail!("the guest could not go on: {reason}"),
            Event::Finished => self.finished = true,
        }
        Ok(())
    }

    /// What takes too long, if anything does.
    fn overdue(&self, now: Instant) -> Option<String> {
        let since = |start: Instant| now.saturating_duration_since(start);
        if let Some((_, start, limit)) = &self.running {
            return (since(*start) > *limit).then(|| format!("it hung for more than {} s", limit.as_secs()));
        }
        let (limit, what) = if self.report.facts.is_null() {
            (BOOT_LIMIT, "the guest did not come up")
        } else {
            (GRACE, "the guest fell silent")
        };
        (since(self.heard) > limit).then(|| format!("{what} within {} s", limit.as_secs()))
    }

    /// The guest is gone. If that was before its time, the task that ran has failed.
    fn die(&mut self, why: impl FnOnce() -> String) {
        if self.finished {
            return;
        }
        let why = why();
        match self.running.take() {
            Some((name, start, _)) => {
                let text = format!("the guest died in {name}: {why}");
                eprintln!("  {text}");
                self.report.ended.push(Ended {
                    name,
                    outcome: Outcome::Failed,
                    seconds: start.elapsed().as_secs_f64(),
                    report: Value::Null,
                    output: text.clone(),
                });
                self.report.died = Some(text);
            }
            None if self.report.facts.is_null() => {
                self.report.died = Some(format!("the guest did not come up: {why}"));
            }
            None => self.report.died = Some(format!("the guest died between two checks: {why}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::protocol::Work;
    use super::*;

    fn tasks() -> Vec<Task> {
        vec![Task {
            name: "boot".to_owned(),
            limit_s: 5,
            work: Work::Check("boot".to_owned()),
        }]
    }

    fn booted() -> Event {
        Event::Booted {
            facts: json!({"kernel": "7.2"}),
        }
    }

    #[test]
    fn a_guest_that_dies_has_failed_what_it_ran() {
        let tasks = tasks();
        let mut conversation = Conversation::new(Instant::now(), &tasks);
        conversation.take(booted()).unwrap();
        let name = "boot".to_owned();
        conversation.take(Event::Started { name }).unwrap();
        let console =
            "[1.0] hello\n[2.0] Kernel panic - not syncing: sysrq triggered crash\n[2.1] Rebooting\n";
        conversation.die(|| last_words(console));
        let report = conversation.report;
        let text = "the guest died in boot: [2.0] Kernel panic - not syncing: sysrq triggered crash";
        assert_eq!(report.died.as_deref(), Some(text));
        assert_eq!(
            (report.ended[0].outcome, report.ended[0].output.as_str()),
            (Outcome::Failed, text)
        );
    }

    #[test]
    fn a_guest_that_never_came_up_or_ended_well_is_told_apart() {
        let mut conversation = Conversation::new(Instant::now(), &[]);
        conversation.die(|| last_words(""));
        let died = conversation.report.died.unwrap();
        assert_eq!(died, "the guest did not come up: (nothing on its console)");
        let mut conversation = Conversation::new(Instant::now(), &[]);
        conversation.take(booted()).unwrap();
        conversation.take(Event::Finished).unwrap();
        conversation.die(|| unreachable!());
        assert_eq!(conversation.report.died, None);
        let reason = "no proc".to_owned();
        let error = conversation.take(Event::Broken { reason }).unwrap_err();
        assert_eq!(error.to_string(), "the guest could not go on: no proc");
    }

    #[test]
    fn what_takes_too_long_is_named() {
        let tasks = tasks();
        let start = Instant::now();
        let mut conversation = Conversation::new(start, &tasks);
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert_eq!(conversation.overdue(later(290)), None);
        let text = conversation.overdue(later(310)).unwrap();
        assert_eq!(text, "the guest did not come up within 300 s");
        conversation.take(booted()).unwrap();
        assert_eq!(conversation.overdue(later(10)), None);
        assert!(conversation.overdue(later(30)).unwrap().contains("fell silent"));
        let name = "boot".to_owned();
        conversation.take(Event::Started { name }).unwrap();
        assert_eq!(conversation.overdue(later(24)), None);
        assert_eq!(
            conversation.overdue(later(26)).unwrap(),
            "it hung for more than 25 s"
        );
    }

    #[test]
    fn qemu_itself_may_fail() {
        let stderr =
            "qemu: warning: slow\nqemu-system-x86_64: -device igb: 'igb' is not a valid device model name\n";
        assert!(qemu_failure(false, stderr).unwrap().ends_with("model name"));
        assert_eq!(qemu_failure(false, "").unwrap(), "it says nothing");
        assert_eq!(qemu_failure(true, stderr), None);
    }
}
