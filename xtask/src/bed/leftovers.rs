//! What must not outlive this process: programs, namespaces, temporary folders.
//!
//! Each is registered before it is made and removed when its [`Registered`] is dropped. When a signal ends the
//! process, no destructor runs; a thread of [`watch_signals`] then removes what is registered, programs first.
//! From that moment nothing new can be registered, so the main thread cannot make a namespace behind its back.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::host::NAMESPACE_DIR;
use super::{INTERFACE, ip};

/// Something to remove.
#[derive(Debug)]
pub enum Leftover {
    /// A running program, by its pidfd: a number could name another process by now.
    Process(Arc<OwnedFd>),
    /// A network card in a namespace of ours: it goes back to this process's namespace.
    Card {
        /// Where it is.
        namespace: String,
        /// What it is called there.
        interface: &'static str,
        /// What it is called at home.
        name: String,
    },
    /// A network namespace, by name. Its interfaces go with it.
    Namespace(String),
    /// A folder with everything in it.
    Folder(PathBuf),
}

impl Leftover {
    /// Programs before the namespaces they run in, cards out of them before, folders last.
    fn order(&self) -> u8 {
        match self {
            Leftover::Process(_) => 0,
            Leftover::Card { .. } => 1,
            Leftover::Namespace(_) => 2,
            Leftover::Folder(_) => 3,
        }
    }

    fn remove(&self) {
        match self {
            Leftover::Process(pidfd) => {
                // Fails only for a process that has ended already.
                let _ = pidfd_send_signal(pidfd, Signal::KILL);
                wait_for_end(pidfd, Duration::from_secs(5));
            }
            Leftover::Card {
                namespace,
                interface,
                name,
            } => {
                let home = std::process::id().to_string();
                let words = ["-n", namespace, "link", "set", "dev", interface];
                ip::quietly(&[&words[..], &["down", "netns", &home, "name", name]].concat());
            }
            Leftover::Namespace(name) => remove_namespace(name),
            Leftover::Folder(path) => {
                let _ = std::fs::remove_dir_all(path);
            }
        }
    }
}

/// Waits until the process has ended; `false` when it has not within `limit`.
pub(crate) fn wait_for_end(pidfd: &OwnedFd, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok();
        // A pidfd becomes readable when its process ends (pidfd_open(2)).
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], left.as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

struct Registry {
    closed: bool,
    next: u64,
    entries: BTreeMap<u64, Leftover>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    closed: false,
    next: 0,
    entries: BTreeMap::new(),
});

fn registry() -> MutexGuard<'static, Registry> {
    // A panic while the lock was held leaves a usable map, and cleaning up matters most then.
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a [`Leftover`] registered; removes it when dropped.
#[derive(Debug)]
#[must_use = "dropping it removes the thing it stands for"]
pub struct Registered(u64);

impl Drop for Registered {
    fn drop(&mut self) {
        // The lock is released before the removal: killing a program may take a while.
        let entry = registry().entries.remove(&self.0);
        if let Some(entry) = entry {
            entry.remove();
        }
    }
}

/// Registers something that is about to be made. Fails once a signal has started the removal.
pub fn register(leftover: Leftover) -> Result<Registered> {
    let mut registry = registry();
    ensure!(!registry.closed, "interrupted");
    let number = registry.next;
    registry.next += 1;
    registry.entries.insert(number, leftover);
    Ok(Registered(number))
}

/// A fresh folder under `parent`, removed with everything in it when the second value is dropped.
pub fn temporary_folder(parent: &Path, purpose: &str) -> Result<(PathBuf, Registered)> {
    static FOLDERS: AtomicU32 = AtomicU32::new(0);
    let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
    let path = parent.join(format!("{purpose}-{}-{number}", std::process::id()));
    let registered = register(Leftover::Folder(path.clone()))?;
    std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok((path, registered))
}

/// From now on SIGINT, SIGTERM and SIGHUP remove everything registered, then end the process as the signal
/// would have. Calling it again does nothing.
pub fn watch_signals() -> Result<()> {
    static STARTED: Mutex<bool> = Mutex::new(false);
    let mut is_started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if *is_started {
        return Ok(());
    }
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || {
        if let Some(signal) = signals.forever().next() {
            remove_everything();
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    })?;
    *is_started = true;
    Ok(())
}

/// Sleeps until a signal ends the process.
pub fn wait_for_signal() -> ! {
    loop {
        std::thread::park();
    }
}

fn remove_everything() {
    let mut registry = registry();
    registry.closed = true;
    let mut entries: Vec<Leftover> = std::mem::take(&mut registry.entries).into_values().collect();
    entries.sort_by_key(Leftover::order);
    for entry in entries {
        entry.remove();
    }
}

/// Where admission daemons pin what outlives them: a folder for each interface, named `NAMESPACE-INDEX`.
const PINS: &str = "/sys/fs/bpf/lm";

/// Removes a namespace, the interface in it, and what a daemon pinned for that; quiet if there is none.
pub(super) fn remove_namespace(name: &str) {
    let inode = std::fs::metadata(Path::new(NAMESPACE_DIR).join(name)).map(|found| found.ino());
    if let (Ok(inode), Ok(pins)) = (inode, std::fs::read_dir(PINS)) {
        let is_of_it = |entry: &std::fs::DirEntry| {
            let name = entry.file_name();
            name.to_string_lossy().starts_with(&format!("{inode}-"))
        };
        for entry in pins.flatten().filter(is_of_it) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    // The interface first: a namespace that is removed with a veth in it lives on until the kernel's own
    // clean-up has run, and the other end with it.
    ip::quietly(&["-n", name, "link", "del", INTERFACE]);
    ip::quietly(&["netns", "del", name]);
}
