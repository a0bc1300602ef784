//! Programs that a command starts on its own host, and `serve` on the other: a fixed set, named by what they are for. Nobody who can
//! reach the port can have anything else started.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use super::end::Spec;
use super::host::{LINK, await_link};
use super::tools::ToolSpec;
use crate::cli::{Failure, chain};
use crate::kept::give_back;

/// How long a program may take to say that it is ready, its card's link included.
const READY: Duration = Duration::from_secs(10 + LINK.as_secs());
/// How long a program that was asked to end may take.
const ENDING: Duration = Duration::from_secs(2);

/// What to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Launch {
    /// An end of ours.
    End(Spec),
    /// Somebody else's program.
    Tool(ToolSpec),
}

/// On which host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place<'a> {
    /// The command's, with this interface.
    Near(&'a str),
    /// The other, with this interface.
    Far(&'a str),
}

impl Launch {
    /// Where its far end listens.
    pub(super) fn address(&self) -> Ipv4Addr {
        match self {
            Launch::End(spec) => *spec.address.ip(),
            Launch::Tool(spec) => *spec.address.ip(),
        }
    }

    pub(super) fn words(&self, place: Place<'_>, limit: Duration) -> Result<(PathBuf, Vec<String>), Failure> {
        let ours = || {
            std::env::current_exe().map_err(|error| Failure::new(format!("cannot find lm-bench: {error}")))
        };
        let limit_s = limit.as_secs_f64().ceil();
        let mut words = vec!["--time-limit".to_owned(), limit_s.to_string()];
        Ok(match self {
            Launch::End(spec) => {
                let (side, interface) = match place {
                    Place::Near(interface) => ("near", interface),
                    Place::Far(interface) => ("far", interface),
                };
                let goes_first = spec.goes_first;
                let spec = serde_json::to_string(spec).expect("a spec is numbers and names");
                words.extend(["end", side, &spec, "--interface", interface].map(str::to_owned));
                match goes_first {
                    false => (ours()?, words),
                    true => {
                        let chrt = ["--fifo", "1", &ours()?.to_string_lossy()].map(str::to_owned);
                        words.splice(0..0, chrt);
                        (PathBuf::from("chrt"), words)
                    }
                }
            }
            Launch::Tool(spec) => {
                // It has no time limit of its own.
                let mut words = vec!["-k".to_owned(), "1".to_owned(), limit_s.to_string()];
                words.extend(spec.words(place));
                (PathBuf::from("timeout"), words)
            }
        })
    }
}

/// A program that runs; it is ended when this is dropped.
pub(super) struct Running {
    interface: String,
    child: Child,
    /// What it says, on standard output and on standard error.
    said: [File; 2],
}

impl Running {
    /// Starts a program on a core, for `limit` at most. A far one is ready to be talked to when this returns.
    pub(super) fn start(
        launch: &Launch,
        place: Place<'_>,
        core: u32,
        limit: Duration,
    ) -> Result<Running, Failure> {
        let (Place::Near(interface) | Place::Far(interface)) = place;
        await_link(interface)?;
        let (program, words) = launch.words(place, limit)?;
        let cannot_start =
            |error: io::Error| Failure::new(format!("cannot start {}: {error}", program.display()));
        // In memory: a pipe has to be read all the time.
        let said = || memfd_create("said", MemfdFlags::CLOEXEC).map_err(|error| cannot_start(error.into()));
        let said = [File::from(said()?), File::from(said()?)];
        let [stdout, stderr] = said.each_ref().map(File::try_clone);
        let mut command = Command::new(&program);
        command
            .args(&words)
            .stdin(Stdio::null())
            .stdout(stdout.map_err(cannot_start)?)
            .stderr(stderr.map_err(cannot_start)?);
        let mut running = Running {
            interface: interface.to_owned(),
            child: on_core(core, || command.spawn().map_err(cannot_start))?,
            said,
        };
        if matches!(place, Place::Far(_)) {
            running.await_ready(launch)?;
            await_link(interface)?;
        }
        Ok(running)
    }

    fn complaints(&self) -> String {
        read(&self.said[1])
    }

    fn await_ready(&mut self, launch: &Launch) -> Result<(), Failure> {
        let limit = Instant::now() + READY;
        loop {
            let ready = match launch {
                Launch::Tool(spec) => is_bound(self.child.id(), spec.address),
                Launch::End(_) => self.complaints().lines().any(|line| line == "ready"),
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
        let status = self.child.wait().map_err(|error| Failure::new(chain(&error)))?;
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

    fn end(&mut self) {
        if self.has_ended() {
            return;
        }
        // It may have ended just now.
        let _gone = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let limit = Instant::now() + ENDING;
        while !self.has_ended() && Instant::now() < limit {
            thread::sleep(Duration::from_millis(1));
        }
        let _gone = self.child.kill();
        let _waited = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
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

/// Runs `work` on a core; what it starts stays there.
fn on_core<T>(core: u32, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let all = sched_getaffinity(None).map_err(|error| Failure::new(chain(&error)))?;
    let mut one = CpuSet::new();
    one.set(core as usize);
    sched_setaffinity(None, &one)
        .map_err(|error| Failure::new(format!("core {core}: {error}; choose another with --core")))?;
    let result = work();
    sched_setaffinity(None, &all).map_err(|error| Failure::new(chain(&error)))?;
    result
}

/// Whether a socket is bound to the port in the network namespace of a process (proc_pid_net(5): the second column is
/// `ADDRESS:PORT` in hexadecimal).
fn is_bound(process: u32, address: SocketAddrV4) -> bool {
    ["tcp", "tcp6", "udp", "udp6"].iter().any(|table| {
        let text = std::fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, state) = (fields.next(), fields.nth(1));
            let port = local.and_then(|local| u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok());
            // Listening (TCP), or not connected (UDP): what is left of an earlier connection is in other states.
            port == Some(address.port()) && matches!(state, Some("0A" | "07"))
        })
    })
}
