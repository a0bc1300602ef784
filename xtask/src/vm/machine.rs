//! One run of the virtual machine: started, listened to, ended in any case.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::devices::Device;
use super::protocol::{Ended, Event, Task, tail};
use super::qemu::{self, Clock, TAPS};
use crate::bed::leftovers::Registered;
use crate::bed::{Host, Program, ip, lone};

/// From QEMU's start until the guest's first line. Six seconds on an idle machine, several times as long where
/// instructions are counted.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// From the guest's last line until QEMU has ended, and on top of a task's own limit.
const GRACE: Duration = Duration::from_secs(20);

/// What to start.
#[derive(Debug)]
pub struct Run<'a> {
    /// The folder of QEMU's packages.
    pub qemu: &'a Path,
    /// The kernel's image.
    pub kernel: &'a Path,
    /// The guest's files.
    pub initramfs: &'a Path,
    /// Where the guest's results go.
    pub results: PathBuf,
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
    /// The release of the guest's kernel; `None` if it never was up.
    pub kernel: Option<String>,
    /// The tasks that have ended, and the one that the guest died in.
    pub ended: Vec<Ended>,
    /// Why the guest did not get to its end.
    pub died: Option<String>,
}

impl Run<'_> {
    /// Starts the machine and waits for its end, telling what happens on standard error.
    pub fn run(&self) -> Result<Report> {
        // QEMU makes both files anew; they exist before, so that reading them needs no waiting.
        File::create(&self.console).with_context(|| {
            let console = self.console.display();
            format!("cannot write {console}; name another file: --console FILE")
        })?;
        let results =
            || File::create(&self.results).and_then(|_| Ok(BufReader::new(File::open(&self.results)?)));
        let results = results().with_context(|| format!("cannot write {}", self.results.display()))?;
        let network = self.network();
        let files = [self.kernel, self.initramfs, &self.console, &self.results];
        let options = qemu::options(self.devices, network.is_some(), self.clock, files);
        let tasks: Duration = self.tasks.iter().map(limit).sum();
        let launch = qemu::launch(self.qemu, &options).time_limit(BOOT_LIMIT + GRACE + tasks);
        let program = match &network {
            Some((host, _)) => host.spawn(launch)?,
            None => launch.spawn()?,
        };
        let mut conversation = Conversation::new(self.tasks);
        self.listen(program, results, &mut conversation)?;
        Ok(conversation.report)
    }

    /// A namespace with two taps on a bridge, which give a virtio-net device several queues. Without root QEMU joins
    /// the devices itself, with one queue each.
    fn network(&self) -> Option<(Host, Vec<Registered>)> {
        if self.hub || !self.devices.contains(&Device::VirtioNet) {
            return None;
        }
        let made = lone().and_then(|lone| {
            ip::batch(Some(lone.0.name()), &tap_commands())?;
            Ok(lone)
        });
        if let Err(error) = &made {
            eprintln!("virtio-net has one queue, because there are no taps: {error:#}");
        }
        made.ok()
    }

    fn listen(
        &self,
        mut program: Program,
        mut results: BufReader<File>,
        conversation: &mut Conversation<'_>,
    ) -> Result<()> {
        let mut line = Vec::new();
        loop {
            // Asked before the port is read: what was written before the end is then read as well.
            let ended = program.has_ended()?;
            while 0 < (results.read_until(b'\n', &mut line)).context("cannot read the guest's results")? {
                // What is there of a line that has no end yet stays.
                if line.ends_with(b"\n") {
                    conversation.take(Event::parse(&line)?)?;
                    line.clear();
                }
            }
            if conversation.finished {
                // Nothing is left to hear. QEMU may trip over its own devices while a guest powers off.
                return program.stop().map(drop);
            }
            if ended {
                let output = program.outcome()?;
                if let Some(said) = qemu_failure(output.status.success(), &output.stderr) {
                    bail!("QEMU failed: {said}");
                }
                conversation.die(last_words(&self.console_text()));
                return Ok(());
            }
            if let Some(what) = conversation.overdue(Instant::now()) {
                program.stop()?;
                conversation.die(format!("{what}; console: {}", last_words(&self.console_text())));
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

/// How long a task may take before the guest hangs.
fn limit(task: &Task) -> Duration {
    Duration::from_secs(task.limit_s.into()) + GRACE
}

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
    let mut words = stderr
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.contains("warning:"));
    (!success).then(|| words.next_back().unwrap_or("it says nothing").to_owned())
}

/// The line of the console that says most about a guest's end.
fn last_words(console: &str) -> String {
    let mut lines = console.lines();
    let panic = lines.clone().find(|line| line.contains("Kernel panic"));
    let line = panic.or_else(|| lines.rfind(|line| !line.trim().is_empty()));
    tail(line.unwrap_or("(nothing on its console)").trim(), 200).to_owned()
}

/// What the guest has said so far.
struct Conversation<'a> {
    tasks: &'a [Task],
    /// The task that runs.
    running: Option<&'a Task>,
    finished: bool,
    /// When the guest said something last.
    heard: Instant,
    report: Report,
}

impl<'a> Conversation<'a> {
    fn new(tasks: &'a [Task]) -> Conversation<'a> {
        Conversation {
            tasks,
            running: None,
            finished: false,
            heard: Instant::now(),
            report: Report::default(),
        }
    }

    fn take(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Booted(kernel) => {
                let seconds = self.heard.elapsed().as_secs_f64();
                eprintln!("  {kernel} is up after {seconds:.1} s");
                self.report.kernel = Some(kernel);
            }
            Event::Started(name) => self.running = self.tasks.iter().find(|task| task.name == name),
            Event::Ended(ended) => {
                eprintln!("  {} {} ({:.1} s)", ended.name, ended.verdict(), ended.seconds);
                self.running = None;
                self.report.ended.push(ended);
            }
            Event::Broken(reason) => bail!("the guest could not go on: {reason}"),
            Event::Finished => self.finished = true,
        }
        self.heard = Instant::now();
        Ok(())
    }

    /// What takes too long, if anything does.
    fn overdue(&self, now: Instant) -> Option<String> {
        let (limit, what) = match self.running {
            Some(task) => (limit(task), "it hung for more than"),
            None if self.report.kernel.is_none() => (BOOT_LIMIT, "the guest did not come up within"),
            None => (GRACE, "the guest fell silent within"),
        };
        (now.saturating_duration_since(self.heard) > limit).then(|| format!("{what} {} s", limit.as_secs()))
    }

    /// The guest is gone before its time. The task that ran has failed.
    fn die(&mut self, why: String) {
        let text = match self.running {
            Some(task) => format!("the guest died in {}: {why}", task.name),
            None if self.report.kernel.is_none() => format!("the guest did not come up: {why}"),
            None => format!("the guest died between two checks: {why}"),
        };
        if let Some(task) = self.running {
            eprintln!("  {text}");
            self.report.ended.push(Ended {
                name: task.name.clone(),
                passed: false,
                seconds: self.heard.elapsed().as_secs_f64(),
                report: Value::Null,
                output: text.clone(),
            });
        }
        self.report.died = Some(text);
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Work;
    use super::*;

    fn tasks() -> Vec<Task> {
        vec![Task {
            name: "boot".to_owned(),
            limit_s: 5,
            work: Work::Check("boot".to_owned(), None),
        }]
    }

    fn booted() -> Event {
        Event::Booted("7.2".to_owned())
    }

    #[test]
    fn a_guest_that_dies_has_failed_what_it_ran() {
        let tasks = tasks();
        let mut conversation = Conversation::new(&tasks);
        conversation.take(booted()).unwrap();
        conversation.take(Event::Started("boot".to_owned())).unwrap();
        let console =
            "[1.0] hello\n[2.0] Kernel panic - not syncing: sysrq triggered crash\n[2.1] Rebooting\n";
        conversation.die(last_words(console));
        let report = conversation.report;
        let text = "the guest died in boot: [2.0] Kernel panic - not syncing: sysrq triggered crash";
        assert_eq!(report.died.as_deref(), Some(text));
        assert_eq!(
            (report.ended[0].passed, report.ended[0].output.as_str()),
            (false, text)
        );
    }

    #[test]
    fn a_guest_that_never_came_up_or_ended_well_is_told_apart() {
        let mut conversation = Conversation::new(&[]);
        conversation.die(last_words(""));
        let died = conversation.report.died.unwrap();
        assert_eq!(died, "the guest did not come up: (nothing on its console)");
        let mut conversation = Conversation::new(&[]);
        conversation.take(booted()).unwrap();
        conversation.take(Event::Finished).unwrap();
        assert!(conversation.finished && conversation.report.died.is_none());
        let error = conversation
            .take(Event::Broken("no proc".to_owned()))
            .unwrap_err();
        assert_eq!(error.to_string(), "the guest could not go on: no proc");
    }

    #[test]
    fn what_takes_too_long_is_named() {
        let tasks = tasks();
        let mut conversation = Conversation::new(&tasks);
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert_eq!(conversation.overdue(later(290)), None);
        let text = conversation.overdue(later(310)).unwrap();
        assert_eq!(text, "the guest did not come up within 300 s");
        conversation.take(booted()).unwrap();
        assert_eq!(conversation.overdue(later(10)), None);
        assert!(conversation.overdue(later(30)).unwrap().contains("fell silent"));
        conversation.take(Event::Started("boot".to_owned())).unwrap();
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
