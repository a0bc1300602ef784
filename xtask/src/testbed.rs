//! `cargo xtask testbed`: a cluster that stays, with an admission daemon on each host.
//!
//! `up` leaves a process behind that holds the namespaces and the daemons as any bed holds them: `down` ends it, and when it is killed
//! the next bed on the machine, `down` or `status` removes what it left. Its process id is in the namespaces' names, and names its
//! folder.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lm_measure::table::Table;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};

use crate::bed::daemons::{self, Ground, NOBODY};
use crate::bed::{self, Host, leftovers};
use crate::workspace::Programs;

/// Folders of test beds, named by their keepers' process ids.
const FOLDER: &str = "/run/lm-testbed";
/// The keeper has 64 hosts to remove at most.
const DOWN_LIMIT: Duration = Duration::from_secs(60);

/// Keep a cluster of hosts on one switch, with an admission daemon on each.
///
/// Programs on the hosts need no privileges: user 65534 may use the daemons.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Make the hosts and start their daemons; they stay until `down`.
    Up {
        /// How many hosts.
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=64))]
        hosts: u32,
        /// Start no daemons: programs embed the admission then, and need root.
        #[arg(long)]
        no_daemons: bool,
    },
    /// Remove everything that `up` made, also what a killed test bed left.
    Down,
    /// Show hosts, daemons, programs and sessions.
    Status {
        /// As one JSON object.
        #[arg(long)]
        json: bool,
    },
}

/// What `up` starts: holds a cluster until it is told to end.
#[derive(Debug, clap::Args)]
pub struct KeepArguments {
    #[arg(long)]
    hosts: u32,
    /// Folder of the tools; without it there are no daemons.
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// A test bed that is up.
struct Kept {
    pid: u32,
    hosts: Vec<Host>,
    folder: PathBuf,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    bed::require_root("make network namespaces")?;
    match arguments.what {
        What::Up { hosts, no_daemons } => up(hosts, no_daemons),
        What::Down => down(),
        What::Status { json } => status(json),
    }
}

fn up(hosts: u32, no_daemons: bool) -> Result<()> {
    if let Some(kept) = find()? {
        bail!(
            "a test bed of {} hosts is up already; `cargo xtask testbed down` removes it",
            kept.hosts.len()
        );
    }
    let mut keeper = Command::new(std::env::current_exe().context("cannot find this program")?);
    keeper.args(["testbed-keep", "--hosts", &hosts.to_string()]);
    if !no_daemons {
        keeper.arg("--programs").arg(Programs::build()?.folder());
    }
    keeper
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing. In a session of its own the keeper hears
    // nothing of this terminal's end.
    unsafe {
        keeper.pre_exec(|| Ok(rustix::process::setsid().map(drop)?));
    }
    let mut child = keeper.spawn().context("cannot start the test bed's keeper")?;
    let mut ready = String::new();
    let stdout = child.stdout.take().context("stdout is piped")?;
    BufReader::new(stdout).read_line(&mut ready)?;
    if ready.trim() != "ready" {
        let mut said = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_string(&mut said)?;
        }
        child.wait()?;
        let last = said.lines().last().unwrap_or("nothing");
        bail!("{}", last.strip_prefix("error: ").unwrap_or(last));
    }
    let kept = find()?.context("the test bed has gone already")?;
    let (first, last) = (&kept.hosts[0], &kept.hosts[kept.hosts.len() - 1]);
    println!(
        "{hosts} hosts on one switch, {} to {}; each is a network namespace:",
        first.address(),
        last.address()
    );
    println!("  {}  ip netns exec {} COMMAND", first.address(), first.name());
    if !no_daemons {
        let other = &kept.hosts[1];
        let (folder, user) = (
            kept.folder.display(),
            format!("setpriv --reuid {NOBODY} --clear-groups"),
        );
        println!("each has an admission daemon, which lets user {NOBODY} in, for example:");
        for (host, what) in [
            (other, "lm-recv -i lm0 --count 1 --output /dev/null".to_owned()),
            (first, format!("lm-send -i lm0 --to {} FILE", other.address())),
        ] {
            println!(
                "  ip netns exec {} {user} {folder}/{what} --admission {}",
                host.name(),
                daemons::socket_in(&kept.folder, host).display()
            );
        }
    }
    println!("`cargo xtask testbed status` shows them, `cargo xtask testbed down` removes them.");
    Ok(())
}

/// Runs `testbed-keep`.
pub fn keep(arguments: &KeepArguments) -> Result<()> {
    let folder = Path::new(FOLDER).join(std::process::id().to_string());
    let _folder = leftovers::register(leftovers::Leftover::Folder(folder.clone()))?;
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let programs = arguments.programs.as_deref().map(Programs::in_folder);
    let _kept = Ground::new(programs.as_ref(), &folder, arguments.hosts)?;
    println!("ready");
    leftovers::wait_for_signal()
}

fn down() -> Result<()> {
    let Some(kept) = find()? else {
        println!("no test bed is up");
        return Ok(());
    };
    let pid = Pid::from_raw(kept.pid as i32).context("a keeper has a process id")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("the keeper has gone")?;
    pidfd_send_signal(&pidfd, Signal::TERM).context("cannot end the keeper")?;
    if !leftovers::wait_for_end(&pidfd, DOWN_LIMIT) {
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        leftovers::wait_for_end(&pidfd, DOWN_LIMIT);
    }
    ensure!(find()?.is_none(), "another test bed came up meanwhile");
    println!("{} hosts removed", kept.hosts.len());
    Ok(())
}

fn status(as_json: bool) -> Result<()> {
    let kept = find()?;
    if as_json {
        let hosts = kept.iter().flat_map(|kept| {
            kept.hosts.iter().map(|host| {
                json!({"address": host.address(), "namespace": host.name(), "daemon": daemon(kept, host)})
            })
        });
        println!("{:#}", json!({"hosts": hosts.collect::<Vec<_>>()}));
        return Ok(());
    }
    let Some(kept) = kept else {
        println!("no test bed is up; `cargo xtask testbed up` makes one");
        return Ok(());
    };
    let mut table = Table::new(&[
        "host",
        "namespace",
        "daemon",
        "programs",
        "received",
        "sent",
        "waiting",
        "open places",
    ]);
    for host in &kept.hosts {
        let mut row = vec![host.address().to_string(), host.name().to_owned()];
        row.extend(cells(&daemon(&kept, host)));
        table.row(row);
    }
    println!("{table}");
    Ok(())
}

/// A host's daemon in the table of `status`.
fn cells(daemon: &Value) -> Vec<String> {
    if daemon.is_null() {
        return vec!["none".to_owned()];
    }
    let len = |value: &Value| value.as_array().map_or(0, Vec::len).to_string();
    let interface = &daemon["interfaces"][0];
    let places = interface["queues"].as_array().into_iter().flatten();
    let open: u64 = places.filter_map(|queue| queue["open_places"].as_u64()).sum();
    vec![
        format!("pid {}", daemon["pid"]),
        len(&daemon["programs"]),
        len(&interface["sessions"]),
        interface["outgoing"].to_string(),
        interface["waiting"].to_string(),
        open.to_string(),
    ]
}

/// What a host's daemon says; null where there is none.
fn daemon(kept: &Kept, host: &Host) -> Value {
    let program = kept.folder.join("lm-admissiond");
    daemons::status(&program, &daemons::socket_in(&kept.folder, host)).unwrap_or_default()
}

/// The test bed that is up; removes what dead ones left.
fn find() -> Result<Option<Kept>> {
    bed::remove_stale();
    let Ok(entries) = std::fs::read_dir(FOLDER) else {
        return Ok(None);
    };
    let mut found = None;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(pid) = name.parse() else { continue };
        match is_keeper(pid) {
            true => {
                let hosts = bed::cluster::hosts_of(pid)?;
                found = (!hosts.is_empty()).then(|| Kept {
                    pid,
                    hosts,
                    folder: entry.path(),
                });
            }
            false => {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
    if found.is_none() {
        // It is empty by now, or another `up` has just begun.
        let _ = std::fs::remove_dir(FOLDER);
    }
    Ok(found)
}

/// Whether the process is a keeper: its number may be another's by now.
fn is_keeper(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|&byte| byte == 0).nth(1) == Some(b"testbed-keep")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_daemon() {
        assert_eq!(cells(&Value::Null), ["none"]);
        let daemon = json!({
            "pid": 17, "programs": [{}, {}],
            "interfaces": [{
                "sessions": [{}], "outgoing": 4, "waiting": 0,
                "queues": [{"open_places": 2}, {"open_places": 3}],
            }],
        });
        assert_eq!(cells(&daemon), ["pid 17", "2", "1", "4", "0", "5"]);
    }

    #[test]
    fn this_process_is_no_keeper() {
        assert!(!is_keeper(std::process::id()) && !is_keeper(u32::MAX));
    }
}
