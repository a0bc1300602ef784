//! Programs of a bed: each on its own core, with a time limit, its output collected, gone with its parent.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::{
    CpuSet, Gid, Uid, sched_setaffinity, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::Host;
use super::host::enter_namespace;
use super::leftovers::{Leftover, Registered, register, wait_for_end};

/// How long a program may take to end after SIGTERM before it is killed.
const TERMINATION_LIMIT: Duration = Duration::from_secs(5);

/// What to run: a program, its arguments, its core and its time limit.
#[derive(Debug)]
pub struct Launch {
    command: Command,
    core: Option<CpuSet>,
    user: Option<u32>,
    goes_first: bool,
    is_aloud: bool,
    time_limit: Duration,
}

impl Launch {
    /// `program` without arguments, on any core, for a minute at most.
    pub fn new(program: impl AsRef<OsStr>) -> Launch {
        Launch {
            command: Command::new(program),
            core: None,
            user: None,
            goes_first: false,
            is_aloud: false,
            time_limit: Duration::from_secs(60),
        }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(self, argument: impl AsRef<OsStr>) -> Launch {
        self.args([argument])
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Launch {
        self.command.args(arguments);
        self
    }

    /// Pins the program to one core.
    #[must_use]
    pub fn core(mut self, core: usize) -> Launch {
        self.core.insert(CpuSet::new()).set(core);
        self
    }

    /// Runs the program as this user and the group of the same number, in no other group and without capabilities.
    #[must_use]
    pub fn user(mut self, user: u32) -> Launch {
        self.user = Some(user);
        self
    }

    /// Gives the program's core to it before any other: `SCHED_FIFO`. A nice value counts among programs of one group,
    /// and ksoftirqd is in none.
    #[must_use]
    pub fn goes_first(mut self) -> Launch {
        self.goes_first = true;
        self
    }

    /// Leaves standard error to this process's own.
    #[must_use]
    pub fn aloud(mut self) -> Launch {
        self.is_aloud = true;
        self
    }

    /// Kills the program when it runs longer.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Launch {
        self.time_limit = limit;
        self
    }

    /// The command as a user would type it.
    pub fn command_line(&self) -> String {
        let words = std::iter::once(self.command.get_program()).chain(self.command.get_args());
        words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
    }

    /// Starts the program in the machine's own network.
    pub fn spawn(self) -> Result<Program> {
        self.spawn_in(None)
    }

    /// Starts the program, in `host` if given. It ends when the *thread* that calls this ends
    /// (`PR_SET_PDEATHSIG` looks at threads): start programs from the thread that waits for them.
    pub(super) fn spawn_in(mut self, host: Option<&Host>) -> Result<Program> {
        let program = self.command.get_program().to_string_lossy().into_owned();
        let namespace = host.map(Host::open).transpose()?;
        let parent = rustix::process::getpid();
        let (core, user, goes_first) = (self.core, self.user, self.goes_first);
        let (stdout, stderr) = (Said::new()?, Said::new()?);
        // A process group of its own: Ctrl-C reaches this process alone, which then ends its programs.
        self.command
            .stdin(Stdio::null())
            .stdout(stdout.stdio()?)
            .stderr(if self.is_aloud {
                Stdio::inherit()
            } else {
                stderr.stdio()?
            })
            .process_group(0);
        // SAFETY: between fork and exec the closure makes system calls only and allocates nothing: the namespace
        // is an open descriptor, the CPU set a value, and `enter_namespace` promises the same.
        unsafe {
            self.command.pre_exec(move || {
                if let Some(namespace) = &namespace {
                    enter_namespace(namespace.as_fd())?;
                }
                if let Some(core) = &core {
                    sched_setaffinity(None, core)?;
                }
                if goes_first {
                    let parameters = libc::sched_param { sched_priority: 1 };
                    if libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                if let Some(user) = user {
                    let (gid, uid) = (Gid::from_raw(user), Uid::from_raw(user));
                    set_thread_groups(&[])?;
                    set_thread_res_gid(gid, gid, gid)?;
                    // The forked child has one thread. With its last user id that is 0 it loses every capability
                    // (capabilities(7)).
                    set_thread_res_uid(uid, uid, uid)?;
                }
                // After that change, which takes it back (prctl(2)).
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have ended before the line above: then nobody would ever send that signal.
                if rustix::process::getppid() != Some(parent) {
                    return Err(rustix::io::Errno::SRCH.into());
                }
                Ok(())
            });
        }
        let child = self.command.spawn();
        let child =
            Running(child.map_err(|error| anyhow!("cannot start {program}: {error}{}", remedy(&error)))?);
        let name = program.rsplit('/').next().unwrap_or_default().to_owned();
        let watched = || format!("cannot watch {name}");
        let pidfd = pidfd_open(Pid::from_child(&child.0), PidfdFlags::empty()).with_context(watched)?;
        let pidfd = Arc::new(pidfd);
        let registered = register(Leftover::Process(Arc::clone(&pidfd))).with_context(watched)?;
        Ok(Program {
            name,
            child,
            pidfd,
            deadline: Instant::now() + self.time_limit,
            time_limit: self.time_limit,
            stdout,
            stderr,
            _registered: registered,
        })
    }
}

fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::NotFound => "; is it built and named rightly?",
        std::io::ErrorKind::PermissionDenied => "; namespaces and their /sys need root with CAP_SYS_ADMIN",
        std::io::ErrorKind::InvalidInput => "; does the machine have that core?",
        _ => "",
    }
}

/// A process that is killed when this is dropped.
#[derive(Debug)]
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A started program. Dropped, it is killed.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Running,
    pidfd: Arc<OwnedFd>,
    deadline: Instant,
    time_limit: Duration,
    stdout: Said,
    stderr: Said,
    _registered: Registered,
}

impl Program {
    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.0.id()
    }

    /// Waits until the program ends by itself. Running past its time limit is an error, and so is an exit code
    /// other than 0; both come with the end of what the program said.
    pub fn finish(self) -> Result<Output> {
        let name = self.name.clone();
        let output = self.outcome()?;
        if !output.status.success() {
            bail!("{name} failed ({}){}", output.status, last_words(&output.stderr));
        }
        Ok(output)
    }

    /// Like [`Self::finish`], but any exit status is fine.
    pub fn outcome(mut self) -> Result<Output> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if !wait_for_end(&self.pidfd, left) {
            self.signal(Signal::KILL);
            let (words, limit) = (last_words(&self.reap()?.stderr), self.time_limit.as_secs_f64());
            bail!(
                "{} ran longer than its limit of {limit} s and was killed{words}",
                self.name
            );
        }
        self.reap()
    }

    /// Asks the program to end (SIGTERM) and waits for it; kills it if it does not listen. Any exit status is fine.
    pub fn stop(mut self) -> Result<Output> {
        self.signal(Signal::TERM);
        if !wait_for_end(&self.pidfd, TERMINATION_LIMIT) {
            self.signal(Signal::KILL);
        }
        self.reap()
    }

    /// Sends a signal; a program that has ended already does not mind.
    pub fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// What it has written to standard error so far.
    pub fn said(&self) -> String {
        self.stderr.text()
    }

    /// Whether the program has ended by itself.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.try_wait()?.is_some())
    }

    fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .0
            .try_wait()
            .context("cannot ask for the program's state")
    }

    /// Waits until the program has written `text` to standard error or standard output.
    pub fn await_text(&mut self, text: &str) -> Result<()> {
        self.await_that(&format!("said {text:?}"), |program| {
            program.stderr.text().contains(text) || program.stdout.text().contains(text)
        })
    }

    /// Waits until the program has written a line that begins with `start` to standard error; the rest of that line.
    pub fn await_line(&mut self, start: &str) -> Result<String> {
        let line = |program: &Program| rest_of_line(&program.stderr.text(), start);
        self.await_that(&format!("said {start:?}"), |program| line(program).is_some())?;
        line(self).context("the line is gone")
    }

    fn await_that(&mut self, what: &str, is_so: impl Fn(&Program) -> bool) -> Result<()> {
        loop {
            let ended = self.try_wait()?;
            // Asked after: it may be the last that the program said.
            if is_so(self) {
                return Ok(());
            }
            let (name, limit) = (&self.name, self.time_limit.as_secs_f64());
            if let Some(status) = ended {
                let words = last_words(&self.stderr.text());
                bail!("{name} ended ({status}) before it {what}{words}");
            }
            ensure!(
                Instant::now() < self.deadline,
                "{name} has not {what} within {limit} s"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn reap(&mut self) -> Result<Output> {
        let status = self.child.0.wait().context("cannot wait for the program")?;
        Ok(Output {
            status,
            stdout: self.stdout.text(),
            stderr: self.stderr.text(),
        })
    }
}

/// What stands behind `start` on the first whole line that begins so.
fn rest_of_line(text: &str, start: &str) -> Option<String> {
    let mut lines = text.split_inclusive('\n');
    let rest = lines.find_map(|line| line.strip_suffix('\n')?.strip_prefix(start));
    rest.map(|rest| rest.trim().to_owned())
}

/// What a program left.
#[derive(Clone, Debug)]
pub struct Output {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output; empty if that went to a file.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Output {
    /// Standard output as one JSON object.
    pub fn json(&self) -> Result<serde_json::Value> {
        serde_json::from_str(self.stdout.trim())
            .with_context(|| format!("not the JSON object that was expected: {:?}", self.stdout.trim()))
    }

    /// The same of a program that has ended well; `what` it is.
    pub fn report_of(&self, what: &str) -> Result<serde_json::Value> {
        let (status, said) = (self.status, self.stderr.trim());
        ensure!(status.success(), "{what} ended with {status}: {said}");
        self.json().with_context(|| what.to_owned())
    }
}

/// `: ` and the last lines of standard error, or nothing.
fn last_words(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
    match lines[lines.len().saturating_sub(5)..].join(" | ") {
        nothing if nothing.is_empty() => nothing,
        words => format!(": {words}"),
    }
}

/// What a program writes to one of its streams: a file in memory, so that the program never waits for us, nor we for
/// what it has started itself.
#[derive(Debug)]
struct Said(File);

impl Said {
    fn new() -> Result<Said> {
        let file = memfd_create("said", MemfdFlags::CLOEXEC).context("no memory for a program's output")?;
        Ok(Said(file.into()))
    }

    fn stdio(&self) -> Result<Stdio> {
        let file = self.0.try_clone();
        Ok(file.context("no descriptor for a program's output")?.into())
    }

    fn text(&self) -> String {
        let len = self.0.metadata().map_or(0, |metadata| metadata.len());
        let mut bytes = vec![0; len as usize];
        // It only grows.
        let _ = self.0.read_exact_at(&mut bytes, 0);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_are_read() {
        let text = "ready\nport 17\nport 4";
        assert_eq!(rest_of_line(text, "port "), Some("17".to_owned()));
        assert_eq!(rest_of_line("port 4", "port "), None);
        assert_eq!(rest_of_line(text, "por t"), None);
    }
}
