//! The systemd unit as it is: systemd itself starts the daemon by it, in a machine of namespaces (`machine.sh`).

use std::net::UdpSocket;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use lm_dataplane::SharedSmoother;
use lm_dataplane::ipc::{Call, Reply, Role};
use rustix::process::Signal;
use xtask::bed::{INTERFACE, Launch, Program};

use crate::bed::{Hosts, Side, copy_program, wait_until};
use crate::program::Client;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lm-admissiond.service");
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/machine.sh");
/// In a program that runs inside the machine: the daemon's socket.
const INSIDE: &str = "LM_TEST_INSIDE";

/// Two hosts, on the left one of which a machine can be. `None`: skipped.
fn hosts(name: &str) -> Option<Hosts> {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !(has("/lib/systemd/systemd") && has("systemd-analyze") && has("unshare")) {
        let why = "the unit is tried by systemd and util-linux: apt-get install systemd util-linux";
        assert!(std::env::var_os("CI").is_none(), "{why}");
        println!("SKIPPED: {why}");
        return None;
    }
    Hosts::new(name)
}

/// A machine whose systemd starts the daemon.
struct Machine {
    program: Program,
    folder: PathBuf,
    /// Its first process.
    systemd: u32,
}

impl Machine {
    /// Boots it with this configuration, and waits until the unit is active.
    fn boot(hosts: &Hosts, config: &str) -> Machine {
        // Its name is that of the control groups, too.
        let folder = hosts.folder.join(hosts.folder.file_name().unwrap());
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(UNIT, folder.join("lm-admissiond.service")).unwrap();
        copy_program(&folder.join("lm-admissiond"));
        std::fs::copy(hosts.key(), folder.join("key")).unwrap();
        std::fs::write(folder.join("config.toml"), config).unwrap();
        let program = Launch::new("nsenter")
            .arg(format!("--net=/run/netns/{}", hosts.host(Side::Left).name()))
            .args(["unshare", "--mount", "sh", SCRIPT])
            .arg(&folder)
            .spawn()
            .unwrap();
        let mut machine = Machine {
            program,
            folder,
            systemd: 0,
        };
        wait_until("systemd begins", || {
            if machine.program.has_ended().unwrap() {
                panic!("no machine: {}", machine.program.said());
            }
            machine.systemd = child_of(machine.program.id(), "systemd").unwrap_or(0);
            machine.systemd != 0
        });
        machine.await_active();
        machine
    }

    /// Runs a line of the shell in it; what that writes to standard output.
    fn run(&self, line: &str) -> String {
        let output = Command::new("nsenter")
            .args(["--mount", "--pid", "--target", &self.systemd.to_string()])
            .args(["sh", "-c", line])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// A program among its processes gets queues, memory and a place in the gate: this test program again, which finds [`INSIDE`] set.
    fn run_receiver(&self) {
        let output = Command::new("nsenter")
            .args(["--pid", "--net", "--target", &self.systemd.to_string()])
            .arg(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "unit::the_unit_starts_the_daemon_in_its_sandbox",
                "--nocapture",
            ])
            .env(INSIDE, self.path("run/lm-admissiond/socket"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}\n{}", self.said());
    }

    fn await_active(&self) {
        wait_until("the unit is active", || {
            let state = self.run("systemctl is-active lm-admissiond");
            // It is tried again each second: the first failure is one.
            let restarts = self.run("systemctl show -P NRestarts lm-admissiond");
            if state == "failed" || !["", "0"].contains(&restarts.as_str()) {
                panic!(
                    "{state}: {}\n{}",
                    self.run("systemctl status lm-admissiond"),
                    self.said()
                );
            }
            state == "active"
        });
    }

    fn path(&self, inside: &str) -> PathBuf {
        Path::new("/proc")
            .join(format!("{}/root", self.systemd))
            .join(inside)
    }

    /// What the daemon wrote to standard error.
    fn said(&self) -> String {
        std::fs::read_to_string(self.path("run/said")).unwrap_or_default()
    }

    /// A value of the daemon's `/proc/PID/status`.
    fn status(&self, name: &str) -> String {
        let line = format!("grep ^{name}: /proc/$(systemctl show -P MainPID lm-admissiond)/status");
        self.run(&line)
            .split_whitespace()
            .nth(1)
            .unwrap_or_default()
            .to_owned()
    }

    /// Everything works; a restart hands over to the next daemon, and a stop leaves nothing.
    fn check(&self, hosts: &Hosts) {
        self.run_receiver();
        // CAP_NET_ADMIN 12, CAP_NET_RAW 13, CAP_IPC_LOCK 14, CAP_BPF 39.
        let kept = format!("{:016x}", 1u64 << 12 | 1 << 13 | 1 << 14 | 1 << 39);
        assert_eq!(
            (self.status("CapEff"), self.status("CapPrm")),
            (kept.clone(), kept)
        );
        // Filtered by seccomp(2), in the mode that filters have.
        assert_eq!(
            (self.status("NoNewPrivs"), self.status("Seccomp")),
            ("1".to_owned(), "2".to_owned())
        );
        let mounts = self.run("cat /proc/$(systemctl show -P MainPID lm-admissiond)/mounts");
        let options = |place: &str| {
            // The last one covers those before it.
            let mount = mounts.lines().rfind(|line| line.split(' ').nth(1) == Some(place));
            mount
                .and_then(|line| line.split(' ').nth(3))
                .unwrap_or_default()
                .to_owned()
        };
        assert!(
            options("/").starts_with("ro") && options("/sys").starts_with("ro"),
            "{mounts}"
        );
        assert!(options("/sys/fs/bpf").starts_with("rw"), "{mounts}");

        assert_eq!(
            self.run("systemctl restart lm-admissiond && echo done"),
            "done",
            "{}",
            self.said()
        );
        self.await_active();
        assert!(self.said().contains("taken_over=true"), "{}", self.said());
        self.run_receiver();
        assert_eq!(self.run("systemctl stop lm-admissiond && echo done"), "done");
        assert_eq!(
            self.run("systemctl show -P Result lm-admissiond"),
            "success",
            "{}",
            self.said()
        );
        assert_eq!(
            self.run("find /sys/fs/bpf/lm -mindepth 1 -name '*-*' -not -name 'user-*'"),
            ""
        );
        assert!(!hosts.host(Side::Left).has_xdp_program().unwrap());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // With its first process all others go; what is mounted goes with the last.
        self.program.signal(Signal::KILL);
        let script = "mount -t cgroup2 lm-test \"$1/groups\" && cd \"$1/groups\" || exit 1
            for try in $(seq 100); do
                [ -d \"${1##*/}\" ] || exit 0
                find \"${1##*/}\" -depth -type d -exec rmdir {} \\; 2>/dev/null
                sleep 0.05
            done";
        let _ = Command::new("unshare")
            .args(["--mount", "sh", "-c", script, "sh"])
            .arg(&self.folder)
            .status();
    }
}

/// The child of a process, if it has this name by now.
fn child_of(parent: u32, name: &str) -> Option<u32> {
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        // "pid (name) state parent …" (proc(5)); names like these have no parenthesis.
        let (head, rest) = stat.split_once(") ")?;
        let (pid, its_name) = head.split_once(" (")?;
        let its_parent: u32 = rest.split(' ').nth(1)?.parse().ok()?;
        (its_parent == parent && its_name == name).then(|| pid.parse().ok())?
    })
}

/// What the program inside does.
fn receive(socket: &Path) {
    let mut client = Client::connect(socket).hello();
    let udp = UdpSocket::bind((Side::Left.address(), 7168)).unwrap();
    let (reply, _) = client.call_beside(Client::join_call(true), &[udp.as_fd()]);
    let Reply::Joined(joined) = reply else {
        panic!("not joined: {reply:?}")
    };
    client.joined = Some(joined);
    client.open(client.landing_queue(), Role::Landing);
    client.done(Call::Receive(client.offer()));
    // The smoother shapes the kernel's traffic, in the sandbox too.
    let smoother = SharedSmoother::ask(socket, INTERFACE).unwrap();
    let shown = qdiscs();
    assert!(shown.contains("htb 4c4d:"), "{shown}");
    drop(smoother);
    wait_until("the interface is as it was", || !qdiscs().contains("htb"));
}

fn qdiscs() -> String {
    let shown = Command::new("tc")
        .args(["qdisc", "show", "dev", INTERFACE])
        .output();
    String::from_utf8(shown.unwrap().stdout).unwrap()
}

#[test]
fn the_unit_starts_the_daemon_in_its_sandbox() {
    if let Some(socket) = std::env::var_os(INSIDE) {
        return receive(Path::new(&socket));
    }
    let Some(hosts) = hosts("unit") else { return };
    let machine = Machine::boot(
        &hosts,
        "interface = [\"lm0\"]\nallow-uid = [0]\nlink-rate = \"1G\"\n",
    );
    let verified = std::fs::read_to_string(machine.path("run/verified")).unwrap();
    assert_eq!(verified, "", "systemd-analyze verify");
    machine.run("systemctl reload lm-admissiond");
    wait_until("the configuration is read again", || {
        machine.said().contains("was read again")
    });
    machine.check(&hosts);
}

#[test]
fn under_the_unit_the_daemon_can_become_another_user() {
    let Some(hosts) = hosts("unituser") else { return };
    let config = "interface = [\"lm0\"]\nallow-uid = [0]\nlink-rate = \"1G\"\nuser = \"nobody\"\n";
    let machine = Machine::boot(&hosts, config);
    assert_eq!(machine.status("Uid"), "65534");
    machine.check(&hosts);
}
