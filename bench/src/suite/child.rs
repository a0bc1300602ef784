//! Programs that a command starts on its own host, and `serve` on the other: a fixed set, named by what they are for. Nobody who can
//! reach the port can have anything else started.

use std::fs::File;
use std::net::SocketAddrV4;
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::end::{Side, Spec};
use super::host::{LINK, await_link};
use super::tools;
use crate::cli::Failure;
use crate::kept::give_back;

/// How long a program may take to say that it is ready, its card's link included.
const READY: Duration = Duration::from_secs(10 + LINK.as_secs());
/// How long a program that was asked to end may take.
const ENDING: Duration = Duration::from_secs(2);

/// What starts an end on an interface, for `limit` at most.
pub(super) fn command(spec: &Spec, side: Side, interface: &str, limit: Duration) -> Result<Command, Failure> {
    let limit_s = limit.as_secs_f64().ceil().to_string();
    if let Some(line) = tools::line(spec, side) {
        // It has no time limit of its own.
        let mut command = Command::new("timeout");
        command.args(["-k", "1", &limit_s]).args(line.split_whitespace());
        return Ok(command);
    }
    let ours =
        std::env::current_exe().map_err(|error| Failure::new(format!("cannot find lm-bench: {error}")))?;
    let mut command = Command::new(&ours);
    if spec.goes_first {
        command = Command::new("chrt");
        command.args(["--fifo", "1"]).arg(ours);
    }
    let side = if side == Side::Near { "near" } else { "far" };
    let spec = serde_json::to_string(spec).expect("a spec is numbers and names");
    command.args([
        "--time-limit",
        &limit_s,
        "end",
        side,
        &spec,
        "--interface",
        interface,
    ]);
    Ok(command)
}

/// A program that runs; it is ended when this is dropped.
pub(super) struct Running {
    interface: String,
    child: Child,
    /// What it says, on standard output and on standard error.
    said: [File; 2],
}

impl Running {
    /// Starts an end on a core, for `limit` at most. A far one is ready to be talked to when this returns.
    pub(super) fn start(
        spec: &Spec,
        side: Side,
        interface: &str,
        core: u32,
        limit: Duration,
    ) -> Result<Running, Failure> {
        await_link(interface)?;
        let mut command = command(spec, side, interface, limit)?;
        // In memory: a pipe has to be read all the time.
        let said = || memfd_create("said", MemfdFlags::CLOEXEC).map(File::from);
        let said = [said()?, said()?];
        command
            .stdin(Stdio::null())
            .stdout(said[0].try_clone()?)
            .stderr(said[1].try_clone()?);
        // What this thread starts stays on its core.
        let all = sched_getaffinity(None)?;
        let mut one = CpuSet::new();
        one.set(core as usize);
        sched_setaffinity(None, &one)
            .map_err(|error| Failure::new(format!("core {core}: {error}; choose another with --core")))?;
        let child = command.spawn();
        sched_setaffinity(None, &all)?;
        let program = command.get_program().display();
        let mut running = Running {
            interface: interface.to_owned(),
            child: child.map_err(|error| Failure::new(format!("cannot start {program}: {error}")))?,
            said,
        };
        if side == Side::Far {
            running.await_ready(spec)?;
            await_link(interface)?;
        }
        Ok(running)
    }

    fn complaints(&self) -> String {
        read(&self.said[1])
    }

    fn await_ready(&mut self, spec: &Spec) -> Result<(), Failure> {
        let limit = Instant::now() + READY;
        loop {
            let ready = match spec.system.how.tool() {
                Some(_) => is_bound(self.child.id(), spec.address),
                None => self.complaints().lines().any(|line| line == "ready"),
            };
            if ready {
                return Ok(());
            }
            if self.has_ended() {
                return Err(self.failure("it ended before it was ready"));
            }
            if Instant::now() > limit {
                return Err(self.failure(&format!("it is not ready after {} s", READY.as_secs())));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the program's end, which comes by its time limit at the latest, and gives what it printed.
    pub(super) fn finish(mut self) -> Result<String, Failure> {
        let status = self.child.wait()?;
        if !status.success() {
            return Err(self.failure(&format!("it ended with {status}")));
        }
        Ok(read(&self.said[0]))
    }

    /// The program's own last line, or what is wrong with it.
    fn failure(&self, what: &str) -> Failure {
        let complaints = self.complaints();
        let last = complaints.lines().rfind(|line| *line != "ready");
        Failure::new(last.map_or(what, |line| line.trim_start_matches("lm-bench: ")))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended() {
            // It may have ended just now.
            let _gone = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let limit = Instant::now() + ENDING;
            while !self.has_ended() && Instant::now() < limit {
                thread::sleep(Duration::from_millis(1));
            }
            let _gone = self.child.kill();
            let _waited = self.child.wait();
        }
        // Who was ended by a signal has given nothing back, and the next one is not to be measured with it.
        give_back(&self.interface);
    }
}

/// All that was written to a file until now.
fn read(file: &File) -> String {
    let mut bytes = vec![0; file.metadata().map_or(0, |metadata| metadata.len() as usize)];
    let len = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// Whether a socket is bound to the port in the network namespace of a process (proc_pid_net(5): the second column is
/// `ADDRESS:PORT` in hexadecimal).
fn is_bound(process: u32, address: SocketAddrV4) -> bool {
    ["tcp", "tcp6", "udp", "udp6"].iter().any(|table| {
        let text = std::fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, state) = (fields.next().unwrap_or_default(), fields.nth(1));
            // Listening (TCP), or not connected (UDP): what is left of an earlier connection is in other states.
            local.ends_with(&format!(":{:04X}", address.port())) && matches!(state, Some("0A" | "07"))
        })
    })
}
