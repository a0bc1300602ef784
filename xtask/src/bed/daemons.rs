//! Admission daemons on the hosts of a bed, one each, with one key for all.
//!
//! Sockets and state of all of them lie in a folder that goes with them. What they pin in bpffs goes with the hosts.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::leftovers::{Leftover, Registered, register};
use super::{Bed, BedConfig, Host, INTERFACE, Launch, Program};
use crate::workspace::{Programs, said_by};

/// The user of a bed's programs without privileges: by tradition nobody.
pub const NOBODY: u32 = 65534;
/// What hosts with daemons need.
pub const TOOLS: [&str; 5] = ["lm-admissiond", "lm-bench", "lm-check", "lm-recv", "lm-send"];
/// How long a daemon may take until it answers.
const START_LIMIT: Duration = Duration::from_secs(20);
/// A bed lives as long as it likes, and its daemons with it.
const LIFE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// The daemons' folder.
#[derive(Debug)]
pub struct Daemons {
    folder: PathBuf,
    /// Their state files, in memory as under the `/run` of a distribution: a disk would be measured.
    states: PathBuf,
    _leftovers: [Registered; 2],
}

impl Daemons {
    /// A folder for daemons, at `folder`, with a key for them and the tools that users without privileges may start.
    fn new(programs: &Programs, folder: &Path) -> Result<Daemons> {
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
        said_by(
            Command::new("cp")
                .args(TOOLS.map(|tool| programs.path(tool)))
                .arg(folder),
        )?;
        let daemons = Daemons {
            folder: folder.to_owned(),
            states,
            _leftovers: leftovers,
        };
        let mut keygen = Command::new(daemons.tool("lm-admissiond"));
        said_by(keygen.arg("keygen").arg(daemons.tool("key")))?;
        Ok(daemons)
    }

    /// One of the tools, where everybody may start it.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Where the host's daemon listens for programs.
    pub fn socket(&self, host: &Host) -> PathBuf {
        self.folder.join(host.name()).join("socket")
    }

    /// Starts the host's daemon, or starts it again; does not wait until it answers.
    pub fn spawn(&self, host: &Host) -> Result<Program> {
        let line = format!(
            "--interface {INTERFACE} --allow-uid {NOBODY} --socket {} --state-dir {} --key-file {}",
            self.socket(host).display(),
            self.states.join(host.name()).display(),
            self.tool("key").display()
        );
        let launch = Launch::new(self.tool("lm-admissiond")).args(line.split(' '));
        host.spawn(launch.time_limit(LIFE_MAX))
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
        let mut status = Command::new(self.tool("lm-admissiond"));
        status
            .args(["status", "--json", "--socket"])
            .arg(self.socket(host));
        serde_json::from_str(&said_by(&mut status)?).context("lm-admissiond status says no JSON")
    }
}

/// A cluster with daemons.
#[derive(Debug)]
pub struct Ground {
    /// The hosts.
    pub bed: Bed,
    /// Their daemons' folder.
    pub daemons: Daemons,
    /// The daemons, in the hosts' order.
    pub running: Vec<Program>,
}

impl Ground {
    /// `hosts` hosts, and on each a daemon of these programs that answers, with its things in `/run/lm-PURPOSE-PID`.
    pub fn new(programs: &Programs, purpose: &str, hosts: u32) -> Result<Ground> {
        let bed = Bed::new(&BedConfig::cluster(hosts))?;
        let folder = format!("/run/lm-{purpose}-{}", std::process::id());
        let daemons = Daemons::new(programs, Path::new(&folder))?;
        let running = bed.hosts().iter().map(|host| daemons.spawn(host));
        let mut running = running.collect::<Result<Vec<_>>>()?;
        for (host, program) in bed.hosts().iter().zip(&mut running) {
            daemons.await_ready(host, program)?;
        }
        Ok(Ground {
            bed,
            daemons,
            running,
        })
    }
}
