//! The guest's first process: this program, as `/init` of an initramfs. It sets up what a system has, runs the
//! plan's tasks one after the other, and powers off.

use std::fs::{DirEntry, File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lm_cards::Interface;
use rustix::mount::{MountFlags, mount};
use rustix::system::RebootCommand;
use rustix::termios::{OptionalActions, tcdrain, tcgetattr, tcsetattr};

use super::checks::read_plan;
use super::protocol::{Ended, Event, MODULES_DIR, Plan, Task, Work, tail};
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
    for (kind, place) in MOUNTS {
        mount_at(kind, place).with_context(|| format!("cannot mount {kind} at {place}"))?;
    }
    let mut port = Port::open()?;
    let plan = match prepare() {
        Ok(plan) => plan,
        Err(error) => return port.say(&Event::Broken(format!("{error:#}"))),
    };
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = kernel.trim().to_owned();
    port.say(&Event::Booted(kernel))?;
    for task in &plan.tasks {
        port.say(&Event::Started(task.name.clone()))?;
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

/// Modules, shell, loopback. Without these nothing can go on.
fn prepare() -> Result<Plan> {
    let plan = read_plan()?;
    for module in &plan.modules {
        let path = Path::new(MODULES_DIR).join(module);
        let image = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        match rustix::system::init_module(&image, c"") {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => bail!("cannot load {module}: {error}"),
        }
    }
    let modules = std::fs::read_to_string("/proc/modules").context("cannot read /proc/modules")?;
    if let Some((address, len)) = place_of_module(&modules, "virtio_net") {
        ensure!(
            qemu::is_kept_zero(address, len),
            "virtio_net is at {address:#x}, so that its cards may send nothing from AF_XDP sockets in zero-copy mode"
        );
    }
    for line in ["/bin/busybox --install -s /bin", "ip link set lo up"] {
        let mut words = line.split(' ');
        let program = Launch::new(words.next().unwrap_or_default()).args(words);
        program.spawn()?.finish()?;
    }
    let end = Instant::now() + DEVICES_LIMIT;
    let drivers = plan.devices.iter().filter_map(|device| device.driver());
    while drivers.clone().any(|driver| cards(driver).len() < 2) && Instant::now() < end {
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
        work => {
            let work = serde_json::to_string(work).expect("work is plain data");
            Launch::new("/bin/xtask").args(["vm-task", &work])
        }
    };
    let launch = launch.time_limit(Duration::from_secs(task.limit_s.into()));
    let output = launch.spawn().and_then(|program| program.outcome());
    let (passed, said, words) = match output {
        Ok(output) => ended(&task.work, output),
        Err(error) => (false, String::new(), format!("{error:#}")),
    };
    Ended {
        name: task.name.clone(),
        passed,
        seconds: started.elapsed().as_secs_f64(),
        report: serde_json::from_str(&said).unwrap_or_default(),
        output: tail(&words, OUTPUT_LEN).to_owned(),
    }
}

/// Whether it passed, by its exit code; what it printed as its report, and what it says.
fn ended(work: &Work, output: Output) -> (bool, String, String) {
    let passed = output.status.success();
    match work {
        Work::Command(_) => (passed, String::new(), output.stdout + &output.stderr),
        _ => (passed, output.stdout, output.stderr),
    }
}

/// The network cards in this process's namespace, by Ethernet address; virtual interfaces are no cards.
pub fn all_cards() -> Vec<Interface> {
    let entries = std::fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten();
    let interface = |entry: DirEntry| Interface::by_name(entry.file_name().to_str()?).ok();
    let mut cards: Vec<Interface> = entries.filter_map(interface).collect();
    cards.retain(|interface| interface.kind.is_none() && interface.driver.is_some());
    cards.sort_by_key(|card| card.mac);
    cards
}

/// The cards of one driver.
pub fn cards(driver: &str) -> Vec<Interface> {
    let mut cards = all_cards();
    cards.retain(|card| card.driver.as_deref() == Some(driver));
    cards
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
    fn a_row_has_a_report_and_a_command_what_it_said() {
        let command = Work::Command("ls".to_owned());
        let (passed, report, words) = ended(&command, output(0, "out\n", "err\n"));
        assert_eq!(
            (passed, report.as_str(), words.as_str()),
            (true, "", "out\nerr\n")
        );
        assert!(!ended(&command, output(3, "", "")).0);
        let check = Work::Check("boot".to_owned(), None);
        let (passed, report, words) = ended(&check, output(1, "{}", "error: no"));
        assert_eq!(
            (passed, report.as_str(), words.as_str()),
            (false, "{}", "error: no")
        );
    }

    #[test]
    fn only_the_guests_first_process_is_init() {
        assert!(!is_init());
    }
}
