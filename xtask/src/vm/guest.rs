//! The guest's first process: this program, as `/init` of an initramfs. It sets up what a system has, runs the
//! plan's tasks one after the other, and powers off.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, mount};
use rustix::system::RebootCommand;
use rustix::termios::{OptionalActions, tcdrain, tcgetattr, tcsetattr};
use serde_json::{Value, json};

use super::devices::Device;
use super::protocol::{Ended, Event, MODULES_DIR, Outcome, PLAN_PATH, Plan, Spoil, Task, Work, tail};
use super::qemu;
use crate::bed::{Launch, Output};

/// The port that results leave through; the first one is the console.
const RESULTS_PORT: &str = "/dev/ttyS1";
/// How much of a task's output is brought back, in bytes.
const OUTPUT_LEN: usize = 128 << 10;
/// How long the devices of the plan may take to appear.
const DEVICES_LIMIT: Duration = Duration::from_secs(15);

/// File systems of the guest: type, place.
const MOUNTS: [(&str, &str); 7] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/run"),
    ("tmpfs", "/tmp"),
    ("bpf", "/sys/fs/bpf"),
    ("tracefs", "/sys/kernel/tracing"),
];

/// Whether this process is a guest's first one.
pub fn is_init() -> bool {
    let named_so = || std::env::args_os().next().is_some_and(|name| name == "/init");
    std::process::id() == 1 && named_so()
}

/// What the first process does. It does not return: the kernel panics when it ends.
pub fn init() -> ExitCode {
    // A panic here would be the kernel's: it ends the machine, and the host shows the console's last words.
    let done = run();
    if let Err(error) = &done {
        eprintln!("init: {error:#}");
    }
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
    ExitCode::FAILURE
}

fn run() -> Result<()> {
    let mut troubles = Vec::new();
    for (kind, place) in MOUNTS {
        let mounted = mount_at(kind, place);
        if let Err(error) = mounted {
            troubles.push(format!("cannot mount {kind} at {place}: {error}"));
        }
    }
    let mut port = Port::open()?;
    let prepared = prepare(&mut troubles);
    let plan = match prepared {
        Ok(plan) => plan,
        Err(error) => {
            let reason = format!("{error:#}");
            return port.say(&Event::Broken { reason });
        }
    };
    let mut facts = facts();
    facts["troubles"] = json!(troubles);
    port.say(&Event::Booted { facts })?;
    for task in &plan.tasks {
        let name = task.name.clone();
        port.say(&Event::Started { name })?;
        port.say(&Event::Ended(perform(task)))?;
    }
    port.say(&Event::Finished)?;
    tcdrain(&port.0).context("cannot wait for the results' port")
}

fn mount_at(kind: &str, place: &str) -> std::io::Result<()> {
    std::fs::create_dir_all(place)?;
    mount(kind, place, kind, MountFlags::empty(), None)?;
    Ok(())
}

/// Modules, shell, loopback. Without the plan or a module of it nothing can go on; the rest is trouble only.
fn prepare(troubles: &mut Vec<String>) -> Result<Plan> {
    let text = std::fs::read_to_string(PLAN_PATH).with_context(|| format!("cannot read {PLAN_PATH}"))?;
    let plan: Plan = serde_json::from_str(&text).with_context(|| format!("cannot understand {PLAN_PATH}"))?;
    for module in &plan.modules {
        let path = Path::new(MODULES_DIR).join(module);
        let image = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        match rustix::system::init_module(&image, c"") {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => troubles.push(format!("cannot load {module}: {error}")),
        }
    }
    let modules = std::fs::read_to_string("/proc/modules").context("cannot read /proc/modules")?;
    if let Some((address, len)) = place_of_module(&modules, "virtio_net") {
        ensure!(
            qemu::is_kept_zero(address, len),
            "virtio_net is at {address:#x}, so that its cards may send nothing from AF_XDP sockets in zero-copy mode"
        );
    }
    let quiet = |words: &[&str]| {
        let program = Launch::new(words[0]).args(&words[1..]).spawn();
        program.and_then(|program| program.finish().map(drop))
    };
    for words in [
        &["/bin/busybox", "--install", "-s", "/bin"][..],
        &["ip", "link", "set", "lo", "up"],
    ] {
        if let Err(error) = quiet(words) {
            troubles.push(format!("{error:#}"));
        }
    }
    let end = Instant::now() + DEVICES_LIMIT;
    let expected = |device: &&Device| device.driver().is_some_and(|driver| cards(driver).len() < 2);
    while plan.devices.iter().any(|device| expected(&device)) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(plan)
}

/// A module's address and length, by /proc/modules.
fn place_of_module(modules: &str, name: &str) -> Option<(u64, u64)> {
    let line = modules
        .lines()
        .find(|line| line.split(' ').next() == Some(name))?;
    let fields: Vec<&str> = line.split(' ').collect();
    let address = u64::from_str_radix(fields.get(5)?.strip_prefix("0x")?, 16).ok()?;
    Some((address, fields.get(1)?.parse().ok()?))
}

/// The port for results, raw: a terminal would turn line ends into two bytes.
struct Port(File);

impl Port {
    fn open() -> Result<Port> {
        let file = OpenOptions::new().read(true).write(true).open(RESULTS_PORT);
        let file = file.with_context(|| format!("cannot open {RESULTS_PORT}"))?;
        let mut settings = tcgetattr(&file).context("cannot read the settings of the results' port")?;
        settings.make_raw();
        tcsetattr(&file, OptionalActions::Now, &settings).context("cannot set the results' port")?;
        Ok(Port(file))
    }

    fn say(&mut self, event: &Event) -> Result<()> {
        self.0
            .write_all(event.to_line().as_bytes())
            .context("cannot write to the results' port")
    }
}

/// Runs a task in a process of its own.
fn perform(task: &Task) -> Ended {
    let started = Instant::now();
    let launch = match &task.work {
        Work::Command(command) => Launch::new("/bin/sh").args(["-c", command]),
        Work::Row(row) => {
            let row = serde_json::to_string(row).expect("a row is plain data");
            Launch::new("/bin/xtask").args(["vm-card", &row])
        }
        Work::Check(check) => Launch::new("/bin/xtask").args(["vm-check", check]),
        Work::Spoiled(check, spoil) => {
            Launch::new("/bin/xtask").args(["vm-check", check, "--spoil", spoil.option()])
        }
    };
    let limit = Duration::from_secs(u64::from(task.limit_s));
    let finished = launch
        .time_limit(limit)
        .spawn()
        .and_then(|program| program.outcome());
    let (outcome, report, output) = match finished {
        Ok(output) => match task.work {
            Work::Command(_) => of_command(&output),
            Work::Spoiled(_, spoil) => of_spoiled(spoil, of_check(&output)),
            Work::Check(_) | Work::Row(_) => of_check(&output),
        },
        Err(error) => (Outcome::Failed, Value::Null, format!("{error:#}")),
    };
    Ended {
        name: task.name.clone(),
        outcome,
        seconds: started.elapsed().as_secs_f64(),
        report,
        output: tail(&output, OUTPUT_LEN).to_owned(),
    }
}

fn of_command(output: &Output) -> (Outcome, Value, String) {
    let outcome = if output.status.success() {
        Outcome::Passed
    } else {
        Outcome::Failed
    };
    let text = format!("{}{}", output.stdout, output.stderr);
    (outcome, json!({"exit_code": output.status.code()}), text)
}

/// A check prints its report as JSON, `{"skipped": WHY}` for one that cannot be here, and any other error on standard
/// error.
fn of_check(output: &Output) -> (Outcome, Value, String) {
    if !output.status.success() {
        return (Outcome::Failed, Value::Null, output.stderr.clone());
    }
    let report = output.stdout.lines().last().unwrap_or_default();
    match serde_json::from_str::<Value>(report) {
        Ok(report) => match report["skipped"].as_str() {
            Some(why) => (Outcome::Skipped, Value::Null, why.to_owned()),
            None => (Outcome::Passed, report, output.stderr.clone()),
        },
        Err(_) => (
            Outcome::Failed,
            Value::Null,
            format!(
                "the check ended without a report\n{}{}",
                output.stdout, output.stderr
            ),
        ),
    }
}

/// A check with a fault passes by finding it.
fn of_spoiled(spoil: Spoil, found: (Outcome, Value, String)) -> (Outcome, Value, String) {
    let (outcome, _, text) = found;
    match outcome {
        Outcome::Failed if text.contains(spoil.words()) => (Outcome::Passed, Value::Null, String::new()),
        Outcome::Skipped => (outcome, Value::Null, text),
        Outcome::Passed | Outcome::Failed => (
            Outcome::Failed,
            Value::Null,
            format!("the fault that was put in was not found\n{text}"),
        ),
    }
}

/// A network card that the guest found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its interface.
    pub interface: String,
    /// Its driver.
    pub driver: String,
    /// Its Ethernet address.
    pub mac: String,
    /// Its receive queues; before it is first set up, as many as the driver could have.
    pub rx_queues: usize,
}

/// The network cards in this process's namespace, by Ethernet address; virtual interfaces have no driver and are no
/// cards.
pub fn all_cards() -> Vec<Card> {
    let Ok(entries) = std::fs::read_dir("/sys/class/net") else {
        return Vec::new();
    };
    let card = |folder: &Path| {
        let driver = std::fs::read_link(folder.join("device/driver")).ok()?;
        let queues = std::fs::read_dir(folder.join("queues")).ok()?.flatten();
        Some(Card {
            interface: folder.file_name()?.to_str()?.to_owned(),
            driver: driver.file_name()?.to_str()?.to_owned(),
            mac: read(&folder.join("address")),
            rx_queues: queues
                .filter(|queue| queue.file_name().to_string_lossy().starts_with("rx-"))
                .count(),
        })
    };
    let mut cards: Vec<Card> = entries
        .flatten()
        .filter_map(|entry| card(&entry.path()))
        .collect();
    cards.sort_by(|one, other| one.mac.cmp(&other.mac));
    cards
}

/// The cards of one driver.
pub fn cards(driver: &str) -> Vec<Card> {
    let mut cards = all_cards();
    cards.retain(|card| card.driver == driver);
    cards
}

/// What the guest is, as results show it.
pub fn facts() -> Value {
    let cards: Vec<Value> = all_cards()
        .into_iter()
        .map(|card| {
            json!({"interface": card.interface, "driver": card.driver, "mac": card.mac, "rx_queues": card.rx_queues})
        })
        .collect();
    let huge = |name: &str| {
        let folder = Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
        read(&folder.join(name)).parse::<u64>().ok()
    };
    json!({
        "kernel": read(Path::new("/proc/sys/kernel/osrelease")),
        "command_line": read(Path::new("/proc/cmdline")),
        "cpus": crate::machine::cores(),
        "cards": cards,
        "huge_pages": {"total": huge("nr_hugepages"), "free": huge("free_hugepages")},
    })
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    fn output(code: i32, stdout: &str, stderr: &str) -> Output {
        Output {
            status: ExitStatus::from_raw(code << 8),
            stdout: stdout.to_owned(),
            stderr: stderr.to_owned(),
        }
    }

    #[test]
    fn a_module_is_found_where_it_lies() {
        let modules = "net_failover 24576 1 virtio_net, Live 0xffffffffc0200000\nvirtio_net 147456 0 - Live \
            0xffffffffc0210000\n";
        let (address, len) = place_of_module(modules, "virtio_net").unwrap();
        assert_eq!((address, len), (0xffff_ffff_c021_0000, 147_456));
        assert!(qemu::is_kept_zero(address, len));
        assert!(!qemu::is_kept_zero(0xffff_ffff_c400_0000 - len, len + 1));
        assert!(!qemu::is_kept_zero(0xffff_ffff_a021_0000, len));
        assert_eq!(place_of_module(modules, "igb"), None);
    }

    #[test]
    fn a_check_passes_with_a_report_only() {
        let (outcome, report, _) = of_check(&output(0, "chatter\n{\"bytes\":1}\n", ""));
        assert_eq!((outcome, report), (Outcome::Passed, json!({"bytes": 1})));
        let (outcome, _, text) = of_check(&output(0, "{\"skipped\":\"too old\"}", ""));
        assert_eq!((outcome, text.as_str()), (Outcome::Skipped, "too old"));
        let (outcome, _, text) = of_check(&output(1, "{\"bytes\":1}", "error: no"));
        assert_eq!((outcome, text.as_str()), (Outcome::Failed, "error: no"));
        let (outcome, _, text) = of_check(&output(0, "", ""));
        assert!(outcome == Outcome::Failed && text.contains("without a report"));
    }

    #[test]
    fn a_check_with_a_fault_passes_by_finding_it() {
        let failed = |text: &str| (Outcome::Failed, Value::Null, text.to_owned());
        let found = of_spoiled(Spoil::File, failed("SHA-256 1 instead of 2"));
        assert_eq!(found, (Outcome::Passed, Value::Null, String::new()));
        let (outcome, _, text) = of_spoiled(Spoil::Card, failed("SHA-256 1 instead of 2"));
        assert!(
            outcome == Outcome::Failed && text.contains("was not found\nSHA-256"),
            "{text}"
        );
        let passed = (Outcome::Passed, json!({}), String::new());
        assert_eq!(of_spoiled(Spoil::File, passed).0, Outcome::Failed);
        let skipped = (Outcome::Skipped, Value::Null, "too old".to_owned());
        assert_eq!(of_spoiled(Spoil::File, skipped.clone()), skipped);
    }

    #[test]
    fn a_command_passes_with_exit_code_0() {
        let (outcome, report, text) = of_command(&output(0, "out\n", "err\n"));
        assert_eq!((outcome, text.as_str()), (Outcome::Passed, "out\nerr\n"));
        assert_eq!(report["exit_code"], 0);
        assert_eq!(of_command(&output(3, "", "")).0, Outcome::Failed);
    }

    #[test]
    fn only_the_guests_first_process_is_init() {
        assert!(!is_init());
        assert!(
            facts()["kernel"]
                .as_str()
                .is_some_and(|kernel| !kernel.is_empty())
        );
    }
}
