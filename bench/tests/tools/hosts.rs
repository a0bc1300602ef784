//! Two hosts with an admission daemon each, and tools there as an ordinary user.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, Tool, wait_until};

/// An ordinary user.
pub(crate) const USER: u32 = 65534;

/// Two hosts with a daemon each.
pub(crate) struct Hosts {
    pub(crate) bed: Bed,
    pub(crate) program: PathBuf,
    /// Options of both daemons.
    pub(crate) policy: &'static [&'static str],
    pub(crate) sender: Option<Tool>,
    pub(crate) receiver: Option<Tool>,
}

/// Beside the tools, where `cargo xtask test` and every build of the workspace put it.
pub(crate) fn daemon() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_lm-send")).with_file_name("lm-admissiond");
    if path.exists() {
        return Some(path);
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "lm-admissiond is not built: cargo build -p lm-admission"
    );
    println!("SKIPPED: lm-admissiond is not built: cargo build -p lm-admission");
    None
}

impl Hosts {
    /// Daemons on both hosts that let `uid` in.
    pub(crate) fn new(uid: u32) -> Option<Hosts> {
        Hosts::on(Bed::new()?, uid)
    }

    /// The same with the impairment box's interfaces between them.
    pub(crate) fn with_box(uid: u32) -> Option<Hosts> {
        Hosts::on(Bed::with_box()?, uid)
    }

    pub(crate) fn on(bed: Bed, uid: u32) -> Option<Hosts> {
        Hosts::with_policy(bed, uid, &[])
    }

    pub(crate) fn with_policy(bed: Bed, uid: u32, policy: &'static [&'static str]) -> Option<Hosts> {
        let program = daemon()?;
        let mut hosts = Hosts {
            bed,
            program,
            policy,
            sender: None,
            receiver: None,
        };
        let made = Command::new(&hosts.program)
            .arg("keygen")
            .arg(hosts.bed.path("key"))
            .status();
        assert!(made.unwrap().success());
        for host in [Host::Sender, Host::Receiver] {
            hosts.start(host, uid);
        }
        Some(hosts)
    }

    pub(crate) fn socket(&self, host: Host) -> PathBuf {
        self.bed.path(&format!("{host:?}")).join("socket")
    }

    /// Starts the host's daemon, and waits until it serves.
    pub(crate) fn start(&mut self, host: Host, uid: u32) {
        let socket = self.socket(host);
        let mut command = self.bed.network_command(host, &self.program);
        command
            .args(["--interface", INTERFACE, "--allow-uid", &uid.to_string()])
            .args(self.policy)
            .arg("--key-file")
            .arg(self.bed.path("key"))
            .arg("--socket")
            .arg(&socket)
            .arg("--state-dir")
            .arg(socket.parent().unwrap());
        let daemon = Tool::start(command);
        wait_until("the daemon serves", || self.try_status(host).is_some());
        match host {
            Host::Sender => self.sender = Some(daemon),
            _ => self.receiver = Some(daemon),
        }
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self, host: Host) {
        let daemon = match host {
            Host::Sender => self.sender.take(),
            _ => self.receiver.take(),
        };
        let daemon = daemon.unwrap();
        daemon.signal(Signal::KILL);
        daemon.end();
    }

    pub(crate) fn try_status(&self, host: Host) -> Option<serde_json::Value> {
        let mut command = Command::new(&self.program);
        command
            .args(["status", "--json", "--socket"])
            .arg(self.socket(host));
        let output = command.output().unwrap();
        let read = || serde_json::from_slice(&output.stdout).unwrap();
        output.status.success().then(read)
    }

    pub(crate) fn status(&self, host: Host) -> serde_json::Value {
        self.try_status(host).expect("the daemon answers")
    }

    /// A tool on a host, as the user, without a capability.
    pub(crate) fn tool(&self, host: Host, program: &str, arguments: &[&str]) -> Tool {
        let mut command = self.bed.network_command(host, "setpriv");
        command
            .args([format!("--reuid={USER}"), format!("--regid={USER}")])
            .args(["--clear-groups", "--inh-caps=-all", "--bounding-set=-all"])
            .arg(program)
            .arg("--admission")
            .arg(self.socket(host))
            .args(arguments);
        Tool::start(command)
    }

    pub(crate) fn recv(&self, output: &Path, arguments: &[&str]) -> Tool {
        let output = ["--interface", INTERFACE, "--output", output.to_str().unwrap()];
        let tool = self.tool(
            Host::Receiver,
            env!("CARGO_BIN_EXE_lm-recv"),
            &[&output, arguments].concat(),
        );
        tool.wait_for_line("listening on");
        tool
    }

    pub(crate) fn send(&self, arguments: &[&str]) -> Tool {
        let to = ["--json", "--to", RECEIVER];
        self.tool(
            Host::Sender,
            env!("CARGO_BIN_EXE_lm-send"),
            &[&to, arguments].concat(),
        )
    }

    /// A directory that the user may write.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        let path = self.bed.directory(name);
        std::os::unix::fs::chown(&path, Some(USER), Some(USER)).unwrap();
        path
    }

    /// Waits until neither daemon has a program, a session or a queue that is not free.
    pub(crate) fn wait_until_nothing_is_left(&self) {
        for host in [Host::Sender, Host::Receiver] {
            wait_until("something is left", || is_empty(&self.status(host)));
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // Those that end by a signal remove what they pinned.
        for daemon in [self.sender.take(), self.receiver.take()].into_iter().flatten() {
            daemon.signal(Signal::TERM);
            daemon.end();
        }
    }
}

fn is_empty(status: &serde_json::Value) -> bool {
    let programs = status["programs"].as_array().expect("a list of programs");
    let interface = &status["interfaces"][0];
    let queues = interface["queues"].as_array().expect("a list of queues");
    let sessions = interface["sessions"].as_array().expect("a list of sessions");
    let is_free = |queue: &serde_json::Value| {
        queue["role"] == "free" && queue["open_places"] == 0 && queue["closing_places"] == 0
    };
    programs.is_empty() && sessions.is_empty() && queues.iter().all(is_free) && interface["outgoing"] == 0
}
