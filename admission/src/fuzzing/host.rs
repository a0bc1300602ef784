//! A network namespace with an interface, and the daemon that serves it, on threads of this process.

use std::cell::RefCell;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lm_cards::Interface;
use lm_protocol::admission::ClusterKey;
use rustix::process::{Signal, getpid, kill_process};
use rustix::thread::LinkNameSpaceType;

use super::program::Program;
use crate::config::{Bytes, Config};
use crate::daemon::Daemon;
use crate::daemon::status::Status;

/// The interface, its address, and its queues.
pub(crate) const INTERFACE: &str = "lm0";
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const QUEUES: u32 = 4;

/// How long anything may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon ends by a signal, which all of this process hear.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Looks until it is so.
pub(super) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every queue that is not free is somebody's.
pub(super) fn check_queues(status: &Status) {
    for queue in &status.interfaces[0].queues {
        let is_free = matches!(queue.role.as_str(), "free" | "resting");
        assert!(is_free || queue.pid.is_some(), "{status:?}");
    }
}

pub(crate) struct Host {
    folder: PathBuf,
    daemon: RefCell<Option<JoinHandle<Result<(), String>>>>,
    _turn: MutexGuard<'static, ()>,
}

fn ip(words: &str) {
    let done = Command::new("ip").args(words.split_whitespace()).status();
    assert!(done.expect("iproute2").success(), "ip {words}");
}

fn daemon(config: Config) -> Result<Daemon, String> {
    let key = ClusterKey::new(&[7; 32]).expect("long enough");
    let reload = Box::new(|| Err("nothing is read again".to_owned()));
    Daemon::start(config, key, reload, Box::new(|_| {}))
}

impl Host {
    /// Moves the calling thread to a namespace of its own, which goes with it.
    pub(crate) fn new(name: &str) -> Host {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("lm-fuzz-{name}-{}", std::process::id());
        ip(&format!("netns add {name}"));
        let namespace = File::open(format!("/run/netns/{name}")).expect("a namespace");
        ip(&format!("netns delete {name}"));
        let network = Some(LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), network).expect("root");
        let queues = format!("numrxqueues {QUEUES} numtxqueues {QUEUES}");
        ip(&format!(
            "link add {INTERFACE} {queues} type veth peer name lm1 {queues}"
        ));
        ip(&format!("address add {ADDRESS}/24 dev {INTERFACE}"));
        for interface in [INTERFACE, "lm1", "lo"] {
            ip(&format!("link set {interface} up"));
        }
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        Host {
            folder,
            daemon: RefCell::default(),
            _turn: turn,
        }
    }

    fn config(&self) -> Config {
        Config {
            interface: vec![INTERFACE.to_owned()],
            socket: self.folder.join("socket"),
            state_dir: self.folder.clone(),
            allow_uid: vec![0],
            memory_max: Bytes(2 << 20),
            ..Config::default()
        }
    }

    /// Starts a daemon, or tells why there is none.
    pub(super) fn start(&self) -> Result<(), String> {
        let config = self.config();
        let (tell, started) = channel();
        let thread = std::thread::Builder::new().name("daemon".to_owned());
        let daemon = thread.spawn(move || {
            let daemon = daemon(config);
            let _ = tell.send(daemon.as_ref().map(|_| ()).map_err(Clone::clone));
            daemon?.run()
        });
        self.daemon.replace(Some(daemon.expect("a thread")));
        started.recv().expect("it does not panic")
    }

    /// A daemon that works when it is told to.
    #[cfg(test)]
    pub(crate) fn daemon(&self) -> Result<Daemon, String> {
        daemon(self.config())
    }

    fn end(&self, signal: Signal) {
        let Some(daemon) = self.daemon.take() else { return };
        kill_process(getpid(), signal).expect("it is this process");
        daemon.join().expect("it did not panic").expect("it ended well");
    }

    /// Ends the daemon, and everything stays for the next one.
    pub(super) fn hand_over(&self) {
        self.end(Signal::USR1);
    }

    pub(super) fn connect(&self) -> Program {
        Program::connect(&self.folder.join("socket"))
    }

    /// Writes what the next daemon reads; the tokens in it.
    pub(super) fn leave_state(&self, bytes: &[u8]) -> Vec<u64> {
        let text = match bytes.split_first() {
            Some((0, whole)) => whole.to_vec(),
            _ => {
                let stat = rustix::fs::stat("/proc/thread-self/ns/net").expect("procfs");
                let interface = Interface::by_name(INTERFACE).expect("it is there");
                let address = SocketAddrV4::new(ADDRESS, Config::default().control_port);
                let head = format!(
                    r#"{{"version":1,"interfaces":[{{"name":"{INTERFACE}","index":{},"namespace":{},"#,
                    interface.index, stat.st_ino
                );
                let programs = format!(r#""address":"{address}","programs":"#);
                [head.as_bytes(), programs.as_bytes(), bytes, b"}]}"].concat()
            }
        };
        std::fs::write(self.folder.join("state.json"), &text).expect("the state");
        let state: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        let programs = state["interfaces"][0]["programs"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        programs
            .iter()
            .filter_map(|program| program["token"].as_u64())
            .collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // One that was handed over goes with its next daemon.
            if self.daemon.borrow().is_none() {
                let _ = std::fs::remove_file(self.folder.join("state.json"));
                self.start().expect("the last daemon");
            }
            self.end(Signal::TERM);
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
