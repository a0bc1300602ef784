//! Admission daemons on the hosts of a bed, one each, with one key for all.
//!
//! Sockets and state of all of them lie in a folder that goes with them. What they pin in bpffs goes with the hosts.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::leftovers::{Leftover, Registered, register};
use super::{Cluster, ClusterConfig, Host, INTERFACE, Launch, Program};
use crate::workspace::Programs;

/// The user of a bed's programs without privileges: by tradition nobody.
pub const NOBODY: u32 = 65534;
/// How long a daemon may take until it answers.
const START_LIMIT: Duration = Duration::from_secs(20);
/// A bed lives as long as it likes, and its daemons with it.
const LIFE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// The daemons' folder, and how they are started.
#[derive(Debug)]
pub struct Daemons {
    folder: PathBuf,
    options: Vec<String>,
    go_first: bool,
    /// Their state files, in memory as under the `/run` of a distribution: a disk would be measured.
    states: PathBuf,
    _leftovers: [Registered; 2],
}

impl Daemons {
    /// A folder for daemons, at `folder`, with a key for them and the tools that users without privileges may start.
    /// `options`: of every daemon, beside what it needs.
    pub fn new(programs: &Programs, folder: &Path, options: &[&str]) -> Result<Daemons> {
        let states = Path::new("/dev/shm").join(folder.file_name().unwrap_or_default());
        let leftover = |folder: &Path| register(Leftover::Folder(folder.to_owned()));
        let leftovers = [leftover(folder)?, leftover(&states)?];
        for folder in [folder, &states] {
            std::fs::create_dir_all(folder)
                .and_then(|()| std::fs::set_permissions(folder, Permissions::from_mode(0o755)))
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        // The folder that programs are built in may be closed to other users. Copied by a process of its own: a program
        // that another thread starts meanwhile would keep a file that we write open, and nobody can run one that is
        // being written (ETXTBSY).
        let tools = ["lm-admissiond", "lm-bench", "lm-check", "lm-send", "lm-recv"];
        let copied = Command::new("cp")
            .args(tools.map(|tool| programs.path(tool)))
            .arg(folder)
            .stdin(Stdio::null())
            .output()
            .context("cannot run cp")?;
        ensure!(
            copied.status.success(),
            "cannot copy the tools to {}: {}",
            folder.display(),
            String::from_utf8_lossy(&copied.stderr).trim()
        );
        let daemons = Daemons {
            folder: folder.to_owned(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
            go_first: false,
            states,
            _leftovers: leftovers,
        };
        let output = Command::new(daemons.tool("lm-admissiond"))
            .arg("keygen")
            .arg(daemons.key_file())
            .stdin(Stdio::null())
            .output()
            .context("cannot start lm-admissiond")?;
        ensure!(output.status.success(), "{}", said(&output.stderr));
        Ok(daemons)
    }

    /// Lets the daemons go before other programs of the machine, as their systemd unit does.
    #[must_use]
    pub fn go_first(mut self) -> Daemons {
        self.go_first = true;
        self
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// One of the tools, where everybody may start it.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The key of the cluster.
    pub fn key_file(&self) -> PathBuf {
        self.folder.join("key")
    }

    /// Where the host's daemon listens for programs.
    pub fn socket(&self, host: &Host) -> PathBuf {
        self.folder.join(host.name()).join("socket")
    }

    /// Starts the host's daemon, or starts it again; does not wait until it answers. `core`: the only one that it has.
    pub fn spawn(&self, host: &Host, core: Option<usize>) -> Result<Program> {
        let mut launch = Launch::new(self.tool("lm-admissiond"))
            .args(["--interface", INTERFACE, "--allow-uid", &NOBODY.to_string()])
            .arg("--socket")
            .arg(self.socket(host))
            .arg("--state-dir")
            .arg(self.states.join(host.name()))
            .arg("--key-file")
            .arg(self.key_file())
            .args(&self.options)
            .time_limit(LIFE_MAX);
        if let Some(core) = core {
            launch = launch.core(core);
        }
        if self.go_first {
            launch = launch.goes_first();
        }
        host.spawn(launch)
    }

    /// Waits until the host's daemon answers.
    pub fn await_ready(&self, host: &Host, program: &mut Program) -> Result<()> {
        let end = Instant::now() + START_LIMIT;
        while let Err(error) = self.status(host) {
            if program.has_ended()? || Instant::now() >= end {
                let words = program.said();
                let last = words.lines().last().unwrap_or("nothing");
                bail!(
                    "the daemon on {} does not answer ({error:#}), and said {last}",
                    host.address()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// What `lm-admissiond status --json` says.
    pub fn status(&self, host: &Host) -> Result<Value> {
        let output = Command::new(self.tool("lm-admissiond"))
            .args(["status", "--json", "--socket"])
            .arg(self.socket(host))
            .stdin(Stdio::null())
            .output()
            .context("cannot start lm-admissiond")?;
        ensure!(output.status.success(), "{}", said(&output.stderr));
        serde_json::from_slice(&output.stdout).context("lm-admissiond status says no JSON")
    }
}

/// A cluster, and daemons where programs ask some.
#[derive(Debug)]
pub struct Ground {
    /// The hosts.
    pub cluster: Cluster,
    /// Their daemons' folder.
    pub daemons: Option<Daemons>,
    /// The daemons, in the hosts' order.
    pub running: Vec<Program>,
}

impl Ground {
    /// So many hosts, and on each a daemon of these programs that answers, with its things in `folder`; none: without
    /// daemons.
    pub fn new(programs: Option<&Programs>, folder: &Path, hosts: u32) -> Result<Ground> {
        let cluster = Cluster::new(&ClusterConfig {
            hosts,
            ..ClusterConfig::default()
        })?;
        let daemons = programs.map(|programs| Daemons::new(programs, folder, &[]));
        let daemons = daemons.transpose()?;
        let mut running = Vec::new();
        if let Some(daemons) = &daemons {
            for host in cluster.hosts() {
                running.push(daemons.spawn(host, None)?);
            }
            for (host, program) in cluster.hosts().iter().zip(&mut running) {
                daemons.await_ready(host, program)?;
            }
        }
        Ok(Ground {
            cluster,
            daemons,
            running,
        })
    }
}

fn said(stderr: &[u8]) -> String {
    String::from_utf8_lossy(stderr).trim().to_owned()
}
