//! Two hosts with a daemon each.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lm_admission::daemon::status::{InterfaceStatus, Status};
use rustix::process::Signal;
use xtask::bed::{Bed, BedConfig, Host, INTERFACE, Launch, Output, Program, until};

/// How long anything may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

/// Looks until it is so.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    until(what, PATIENCE, || Ok(is_so())).unwrap();
}

/// Works beside what goes on until its flag is set, which it is where the work fails as well. What came of both.
pub(crate) fn beside<T, U: Send>(
    goes_on: impl FnOnce(&AtomicBool) -> U + Send,
    work: impl FnOnce() -> T,
) -> (T, U) {
    struct Ending<'a>(&'a AtomicBool);
    impl Drop for Ending<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| goes_on(&is_over));
        let ending = Ending(&is_over);
        let done = work();
        drop(ending);
        (done, other.join().unwrap())
    })
}

/// The two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

impl Side {
    pub(crate) const fn address(self) -> Ipv4Addr {
        match self {
            Side::Left => Ipv4Addr::new(198, 18, 0, 1),
            Side::Right => Ipv4Addr::new(198, 18, 0, 2),
        }
    }
}

/// Two hosts, a key, and a folder for sockets.
pub(crate) struct Hosts {
    pub(crate) bed: Bed,
    pub(crate) folder: PathBuf,
}

impl Hosts {
    /// `None`, after saying why, where there is no privilege.
    pub(crate) fn new(name: &str) -> Option<Hosts> {
        Hosts::with(name, &BedConfig::default())
    }

    /// With as many queues as this on each interface.
    pub(crate) fn with_queues(name: &str, queues: u32) -> Option<Hosts> {
        let config = BedConfig {
            queues,
            ..BedConfig::default()
        };
        Hosts::with(name, &config)
    }

    pub(crate) fn with(name: &str, config: &BedConfig) -> Option<Hosts> {
        let folder = Hosts::folder(name)?;
        let bed = Bed::new(config).unwrap();
        bed.introduce().unwrap();
        let hosts = Hosts { bed, folder };
        let made = hosts.tool(Side::Left, ["keygen".as_ref(), hosts.key().as_os_str()]);
        assert!(made.finish().unwrap().status.success());
        Some(hosts)
    }

    /// A folder for a test's keys and sockets. `None`, after saying why, where there is no privilege.
    pub(crate) fn folder(name: &str) -> Option<PathBuf> {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "network namespaces need root");
            println!("SKIPPED: network namespaces need root");
            return None;
        }
        let folder = std::env::temp_dir().join(format!("lm-admissiond-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Some(folder)
    }

    pub(crate) fn host(&self, side: Side) -> &Host {
        match side {
            Side::Left => self.bed.left(),
            Side::Right => self.bed.right(),
        }
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.folder.join("key")
    }

    pub(crate) fn socket(&self, side: Side) -> PathBuf {
        self.folder.join(format!("{side:?}")).join("socket")
    }

    /// The arguments of a daemon that lets root in.
    pub(crate) fn arguments(&self, side: Side) -> Vec<String> {
        arguments(&self.socket(side), &self.key())
    }

    fn words(&self, side: Side) -> [String; 3] {
        words(self.host(side))
    }

    /// `lm-admissiond` with these arguments on a host.
    pub(crate) fn tool(
        &self,
        side: Side,
        arguments: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>,
    ) -> Program {
        let [enter, namespace, program] = self.words(side);
        Launch::new(enter)
            .args([namespace, program])
            .args(arguments)
            .spawn()
            .unwrap()
    }

    /// Starts a daemon, and waits until it serves.
    pub(crate) fn daemon(&self, side: Side) -> Daemon {
        self.daemon_with(side, &[])
    }

    pub(crate) fn daemon_with(&self, side: Side, further: &[&str]) -> Daemon {
        self.daemon_by(&self.words(side), side, further)
    }

    fn start(&self, words: &[impl AsRef<str>], side: Side, further: &[&str]) -> Program {
        let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
        Launch::new(words[0])
            .args(&words[1..])
            .args(self.arguments(side))
            .args(further)
            .spawn()
            .unwrap()
    }

    /// As [`Hosts::daemon_with`], but these words start it: the last one is the program itself.
    pub(crate) fn daemon_by(&self, words: &[impl AsRef<str>], side: Side, further: &[&str]) -> Daemon {
        Daemon::serving(self.start(words, side, further), self.socket(side))
    }

    /// A daemon that cannot start, and says why in one line.
    pub(crate) fn refused(&self, side: Side, arguments: &[String], why: &str) {
        let told = one_line(self.tool(side, arguments));
        assert!(told.contains(why), "{told}");
    }

    /// Writes a configuration file that is like the arguments of [`Hosts::daemon`], but for these lines: its path.
    pub(crate) fn configure(&self, side: Side, lines: &str) -> PathBuf {
        let (file, socket, key) = (self.folder.join("toml"), self.socket(side), self.key());
        let state = socket.parent().unwrap();
        let text = format!(
            "interface = [\"{INTERFACE}\"]\nkey-file = {key:?}\nsocket = {socket:?}\nstate-dir = {state:?}\n{lines}\n"
        );
        std::fs::write(&file, text).unwrap();
        file
    }

    /// A daemon by that file.
    pub(crate) fn configured(&self, side: Side, file: &Path) -> Program {
        let mut program = self.tool(side, ["--config".as_ref(), file.as_os_str()]);
        program.await_text("serving").unwrap();
        wait_until("the socket is there", || self.socket(side).exists());
        program
    }

    /// What one says in one line that these words start.
    pub(crate) fn refused_by(&self, words: &[impl AsRef<str>], side: Side, further: &[&str]) -> String {
        one_line(self.start(words, side, further))
    }

    /// A copy of `lm-admissiond` that every user may start: the folder that it is built in may be closed.
    pub(crate) fn program_for_all(&self) -> String {
        let path = self.folder.join("lm-admissiond");
        copy_program(&path);
        path.to_str().unwrap().to_owned()
    }

    /// Folders in which gates are pinned for a host's interface.
    pub(crate) fn pins(&self, side: Side) -> Vec<PathBuf> {
        pins(self.host(side))
    }
}

/// Copies `lm-admissiond` by a process of its own: one that another thread starts meanwhile would keep a file that we write open (ETXTBSY).
pub(crate) fn copy_program(to: &Path) {
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_lm-admissiond"))
        .arg(to)
        .status();
    assert!(copied.unwrap().success());
}

/// What starts `lm-admissiond` on a host: in the network namespace alone, so that what it pins stays when it ends.
pub(crate) fn words(host: &Host) -> [String; 3] {
    let namespace = format!("--net=/run/netns/{}", host.name());
    [
        "nsenter".to_owned(),
        namespace,
        env!("CARGO_BIN_EXE_lm-admissiond").to_owned(),
    ]
}

/// The arguments of a daemon that lets root in.
pub(crate) fn arguments(socket: &Path, key: &Path) -> Vec<String> {
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let pairs = [
        ("--interface", INTERFACE.to_owned()),
        ("--key-file", text(key)),
        ("--socket", text(socket)),
        ("--state-dir", text(socket.parent().unwrap())),
        ("--allow-uid", "0".to_owned()),
    ];
    pairs
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value])
        .collect()
}

/// Folders in which gates are pinned for a host's interface.
fn pins(host: &Host) -> Vec<PathBuf> {
    let name = format!("/run/netns/{}", host.name());
    let number = rustix::fs::stat(&name).unwrap().st_ino;
    let prefix = format!("{number}-");
    // A daemon of another user has a folder of its own.
    let folders = ["/sys/fs/bpf/lm", "/sys/fs/bpf/lm/user-65534"];
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok());
    let paths = entries.flatten().flatten().map(|entry| entry.path());
    paths
        .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&prefix))
        .collect()
}

/// After a kill -9 the pins stay, and with them the gate; and the empty folder that was the lock.
pub(crate) fn unpin(host: &Host) {
    for path in pins(host) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let _ = std::fs::remove_dir(path.with_file_name(format!("lock-{name}")));
        let _ = std::fs::remove_dir_all(path);
    }
}

pub(crate) fn one_line(mut program: Program) -> String {
    wait_until("it refuses", || program.has_ended().unwrap());
    let output = program.outcome().unwrap();
    assert!(!output.status.success(), "it did not fail");
    let lines: Vec<&str> = output.stderr.lines().collect();
    assert_eq!(lines.len(), 1, "not one line: {}", output.stderr);
    lines[0].to_owned()
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for side in [Side::Left, Side::Right] {
            unpin(self.host(side));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A daemon that runs.
pub(crate) struct Daemon {
    program: Program,
    socket: PathBuf,
}

impl Daemon {
    /// Waits until a program that was started serves.
    pub(crate) fn serving(program: Program, socket: PathBuf) -> Daemon {
        let mut daemon = Daemon { program, socket };
        wait_until("the daemon serves", || {
            daemon.try_status().is_some() || daemon.program.has_ended().unwrap()
        });
        if daemon.program.has_ended().unwrap() {
            panic!("no daemon: {}", daemon.program.outcome().unwrap().stderr);
        }
        daemon
    }

    fn try_status(&self) -> Option<Status> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lm-admissiond"));
        let asked = command
            .args(["status", "--json", "--socket"])
            .arg(&self.socket)
            .output()
            .unwrap();
        asked
            .status
            .success()
            .then(|| serde_json::from_slice(&asked.stdout).unwrap())
    }

    /// What it says of itself.
    pub(crate) fn status(&self) -> Status {
        self.try_status().expect("the daemon answers")
    }

    /// Of its one interface.
    pub(crate) fn interface(&self) -> InterfaceStatus {
        self.status().interfaces.remove(0)
    }

    /// No program has any of its queues.
    pub(crate) fn is_free(&self) -> bool {
        let mut interfaces = self.status().interfaces.into_iter();
        interfaces.all(|interface| interface.queues.iter().all(|queue| queue.role == "free"))
    }

    pub(crate) fn id(&self) -> u32 {
        self.program.id()
    }

    /// Ends it without a warning.
    pub(crate) fn kill(self) -> Output {
        self.program.signal(Signal::KILL);
        self.program.outcome().unwrap()
    }

    /// Ends it; it must say that all went well.
    pub(crate) fn stop(self) -> Output {
        let output = self.program.stop().unwrap();
        assert!(output.status.success(), "{}", output.stderr);
        output
    }

    /// Leaves everything to the next one.
    pub(crate) fn hand_over(self) {
        self.program.signal(Signal::USR1);
        let output = self.program.outcome().unwrap();
        assert!(output.status.success(), "{}", output.stderr);
    }
}
