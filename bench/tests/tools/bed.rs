//! Test bed: two hosts (network namespaces) on a veth pair with two queues each, and the tools running in them.
//! Everything is removed when it is dropped, also after a panic.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lm_cards::Interface;
use lm_dataplane::Napi;
use rustix::process::{Pid, Signal};
use rustix::thread::LinkNameSpaceType;

/// The name of the veth device in both namespaces.
pub(crate) const INTERFACE: &str = "lm0";
/// The sending host's address.
pub(crate) const SENDER: &str = "10.77.0.1";
/// The receiving host's address.
pub(crate) const RECEIVER: &str = "10.77.0.2";

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Beds exist one at a time: the machine's cores are few, and tests measure patience.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Two hosts on a link.
pub(crate) struct Bed {
    name: String,
    scratch: PathBuf,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Bed {
    /// A fresh bed. `None`, after saying why, where there is no privilege to make one; in CI that is an error.
    pub(crate) fn new() -> Option<Bed> {
        Bed::make(false, 2, true)
    }

    /// One whose hosts have so many queues each way.
    pub(crate) fn with_queues(queues: u32) -> Option<Bed> {
        Bed::make(false, queues, true)
    }

    /// A bed with a third namespace between the hosts, [`Host::Box`], whose interfaces are `left` (towards the sender) and
    /// `right`. The hosts send nothing by themselves: they know each other's Ethernet address, and there is no IPv6.
    pub(crate) fn with_box() -> Option<Bed> {
        Bed::make(true, 2, true)
    }

    /// A bed on which little happens, for tests that wait most of the time: it may exist beside others.
    pub(crate) fn quiet(with_box: bool) -> Option<Bed> {
        Bed::make(with_box, 2, false)
    }

    fn make(with_box: bool, queues: u32, alone: bool) -> Option<Bed> {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "network namespaces need root");
            println!("SKIPPED: network namespaces need root");
            return None;
        }
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let turn = alone.then(|| ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner));
        // Relaxed: only uniqueness matters.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lmF-{}-{number}", std::process::id());
        let scratch = std::env::temp_dir().join(&name);
        fs::create_dir_all(&scratch).unwrap();
        let bed = Bed {
            name,
            scratch,
            _turn: turn,
        };
        let (a, b) = (bed.host_name(Host::Sender), bed.host_name(Host::Receiver));
        let join = |[(host, interface), (other, other_interface)]: [(&str, &str); 2]| {
            let queues = format!("numrxqueues {queues} numtxqueues {queues}");
            ip(&format!(
                "link add {interface} netns {host} {queues} type veth peer name {other_interface} netns {other} \
                 {queues}"
            ));
        };
        ip(&format!("netns add {a}"));
        ip(&format!("netns add {b}"));
        if with_box {
            let middle = bed.host_name(Host::Box);
            ip(&format!("netns add {middle}"));
            join([(&a, INTERFACE), (&middle, "left")]);
            join([(&b, INTERFACE), (&middle, "right")]);
            for host in [Host::Sender, Host::Receiver, Host::Box] {
                let off = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6";
                // Fails where the kernel has no IPv6, which is as well.
                let _ = bed.command(host, "sh").args(["-c", off]).output();
            }
            ip(&format!("-n {middle} link set left up"));
            ip(&format!("-n {middle} link set right up"));
        } else {
            join([(&a, INTERFACE), (&b, INTERFACE)]);
        }
        for (host, address) in [(a, SENDER), (b, RECEIVER)] {
            ip(&format!("-n {host} address add {address}/24 dev {INTERFACE}"));
            ip(&format!("-n {host} link set {INTERFACE} up"));
            ip(&format!("-n {host} link set lo up"));
        }
        if with_box {
            for (host, other, address) in [
                (Host::Sender, Host::Receiver, RECEIVER),
                (Host::Receiver, Host::Sender, SENDER),
            ] {
                let mac = bed.mac(other);
                bed.ip(
                    host,
                    &format!("neigh replace {address} lladdr {mac} dev {INTERFACE}"),
                );
            }
        }
        Some(bed)
    }

    /// The directory of this bed.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// A fresh directory.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap();
        path
    }

    /// A file with content that repeats nowhere.
    pub(crate) fn file(&self, name: &str, len: usize) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content(len)).unwrap();
        path
    }

    fn host_name(&self, host: Host) -> String {
        let letter = match host {
            Host::Sender => "a",
            Host::Receiver => "b",
            Host::Box => "x",
        };
        format!("{}-{letter}", self.name)
    }

    /// Makes the box a bridge.
    pub(crate) fn bridge(&self) {
        self.ip(Host::Box, "link add name bridge up type bridge");
        for port in ["left", "right"] {
            self.ip(Host::Box, &format!("link set {port} master bridge"));
        }
    }

    /// `ip` on a host.
    pub(crate) fn ip(&self, host: Host, arguments: &str) -> String {
        ip(&format!("-n {} {arguments}", self.host_name(host)))
    }

    /// `ip` on a host, for what the kernel may not offer.
    pub(crate) fn try_ip(&self, host: Host, arguments: &str) -> bool {
        let arguments = format!("-n {} {arguments}", self.host_name(host));
        let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
        output.status.success()
    }

    /// Whether an XDP program is attached to the host's interface.
    pub(crate) fn has_program(&self, host: Host) -> bool {
        self.ip(host, &format!("link show dev {INTERFACE}"))
            .contains("prog/xdp")
    }

    /// The Ethernet address of the host's interface.
    pub(crate) fn mac(&self, host: Host) -> String {
        let text = self.ip(host, &format!("-o link show dev {INTERFACE}"));
        let after = text.split("link/ether ").nth(1).expect("an Ethernet device");
        after.split_whitespace().next().expect("an address").to_owned()
    }

    /// A command on a host.
    pub(crate) fn command(&self, host: Host, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.host_name(host)])
            .arg(program);
        command
    }

    /// A command in a host's network namespace alone: with `ip netns exec` it would have a /sys of its own, and what a daemon pins
    /// there would go with it.
    pub(crate) fn network_command(&self, host: Host, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/run/netns/{}", self.host_name(host)))
            .arg(program);
        command
    }

    /// Starts `lm-recv` and waits until it listens.
    pub(crate) fn recv(&self, arguments: &[&str]) -> Tool {
        let mut command = self.command(Host::Receiver, env!("CARGO_BIN_EXE_lm-recv"));
        command.args(["--interface", INTERFACE]).args(arguments);
        command.args(from_anyone(arguments));
        let tool = Tool::start(command);
        tool.wait_for_line("listening on");
        tool
    }

    /// The same into a fresh directory.
    pub(crate) fn recv_into(&self, name: &str, arguments: &[&str]) -> (Tool, PathBuf) {
        let directory = self.directory(name);
        let output = ["--output", directory.to_str().unwrap()];
        (self.recv(&[&output, arguments].concat()), directory)
    }

    /// Starts `lm-recv` with this `--output`, a file system of its own that `mount` makes ("$1" is the folder), and waits until it
    /// listens. `ip netns exec` gives it a mount namespace: what is mounted goes away with it.
    pub(crate) fn recv_mounted(&self, output: &Path, mount: &str, arguments: &[&str]) -> Tool {
        let mut command = self.command(Host::Receiver, "sh");
        command.args(["-c", &format!(r#"{mount} && shift && exec "$@""#), "sh"]);
        command.arg(output).arg(env!("CARGO_BIN_EXE_lm-recv"));
        command
            .args(["--interface", INTERFACE, "--from-anyone", "--output"])
            .arg(output);
        command.args(arguments);
        let tool = Tool::start(command);
        tool.wait_for_line("listening on");
        tool
    }

    /// Runs `lm-recv` to its end.
    pub(crate) fn recv_to_end(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command(Host::Receiver, env!("CARGO_BIN_EXE_lm-recv"));
        command.args(arguments).args(from_anyone(arguments));
        Tool::start(command).end()
    }

    /// Starts `lm-send` towards the receiving host.
    pub(crate) fn send(&self, arguments: &[&str]) -> Tool {
        let mut command = self.command(Host::Sender, env!("CARGO_BIN_EXE_lm-send"));
        command.args(["--to", RECEIVER]).args(arguments);
        Tool::start(command)
    }

    /// Runs `lm-send --json` to its end.
    pub(crate) fn send_to_end(&self, arguments: &[&str]) -> Ended {
        self.send(&[&["--json"], arguments].concat()).end()
    }

    /// What `work` gives on a thread that has entered a host's namespace.
    pub(crate) fn on<T: Send>(&self, host: Host, work: impl FnOnce() -> T + Send) -> T {
        let namespace = fs::File::open(Path::new("/run/netns").join(self.host_name(host))).unwrap();
        thread::scope(|scope| {
            let done = scope.spawn(move || {
                let network = Some(LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), network)
                    .unwrap();
                work()
            });
            done.join().unwrap()
        })
    }

    /// NAPI instances of a host's interface whose interrupts are deferred as LM defers them.
    pub(crate) fn napis_kept(&self, host: Host) -> usize {
        self.on(host, || {
            let interface = Interface::by_name(INTERFACE).unwrap();
            let ids = Napi::ids_of(interface.index).unwrap();
            // An instance may be gone again.
            let deferrals = ids
                .into_iter()
                .filter_map(|id| Napi::new(id).ok()?.deferral().ok());
            deferrals
                .filter(|one| (one.hard_irqs, one.timeout_ns) == (200, 1_000_000))
                .count()
        })
    }

    /// An ordinary UDP socket of a host.
    pub(crate) fn udp_socket(&self, host: Host, address: &str) -> UdpSocket {
        let socket = self.on(host, || UdpSocket::bind(address).unwrap());
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        // Nobody paces plain datagrams, and the test may be kept from reading for a while.
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 8 << 20).unwrap();
        socket
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for host in [Host::Sender, Host::Receiver, Host::Box] {
            // May be missing when the set-up failed half-way; nothing to do about it here.
            let _ = Command::new("ip")
                .args(["netns", "delete", &self.host_name(host)])
                .output();
        }
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// What root has to say when it names nobody.
fn from_anyone(arguments: &[&str]) -> Option<&'static str> {
    (!arguments.contains(&"--allow")).then_some("--from-anyone")
}

/// One of the two hosts, or what is between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    Sender,
    Receiver,
    Box,
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {text}");
    String::from_utf8(output.stdout).unwrap()
}

/// Bytes that repeat nowhere within 2^32.
pub(crate) fn content(len: usize) -> Vec<u8> {
    let words = (0..len.div_ceil(4) as u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes());
    words.take(len).collect()
}

/// A running tool; killed when dropped.
pub(crate) struct Tool {
    child: Child,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Arc<Mutex<String>>,
    stderr_reader: Option<JoinHandle<()>>,
}

/// A path as a tool sees it in a mount namespace of its own.
pub(crate) fn seen_by(tool: &Tool, path: &Path) -> PathBuf {
    PathBuf::from(format!("/proc/{}/root{}", tool.id(), path.display()))
}

/// A tool that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Tool {
    pub(crate) fn start(mut command: Command) -> Tool {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let stdout = thread::spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).unwrap();
            bytes
        });
        let stderr = Arc::new(Mutex::new(String::new()));
        let (lines, reader) = (Arc::clone(&stderr), BufReader::new(child.stderr.take().unwrap()));
        let stderr_reader = thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                let mut lines = lines.lock().unwrap();
                lines.push_str(&line);
                lines.push('\n');
            }
        });
        Tool {
            child,
            stdout: Some(stdout),
            stderr,
            stderr_reader: Some(stderr_reader),
        }
    }

    pub(crate) fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().unwrap()
    }

    pub(crate) fn stderr(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    /// Waits until standard error has a line with `words`.
    pub(crate) fn wait_for_line(&self, words: &str) {
        wait_until(&format!("no line with {words:?}"), || {
            // Asked before: what it said last is in the text then.
            let ended = self.stderr_reader.as_ref().is_none_or(JoinHandle::is_finished);
            let text = self.stderr();
            assert!(!ended || text.contains(words), "ended without {words:?}:\n{text}");
            text.contains(words)
        });
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn interrupt(self) -> Ended {
        self.signal(Signal::INT);
        self.end()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for the end.
    pub(crate) fn end(self) -> Ended {
        self.end_within(PATIENCE)
    }

    /// Waits for the end of something long.
    pub(crate) fn end_within(mut self, patience: Duration) -> Ended {
        drop(self.child.stdin.take());
        let begin = Instant::now();
        while !self.has_ended() {
            assert!(begin.elapsed() < patience, "still running:\n{}", self.stderr());
            thread::sleep(Duration::from_millis(2));
        }
        let status = self.child.wait().unwrap();
        let stdout = self.stdout.take().unwrap().join().unwrap();
        self.stderr_reader.take().unwrap().join().unwrap();
        Ended {
            status,
            stdout,
            stderr: self.stderr(),
        }
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        if !self.has_ended() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Ended {
    /// The exit code; with everything the tool said when it is another one.
    #[track_caller]
    pub(crate) fn expect_code(&self, code: i32) -> &Self {
        let stdout = String::from_utf8_lossy(&self.stdout[..self.stdout.len().min(2000)]).into_owned();
        assert_eq!(self.status.code(), Some(code), "{}\n{stdout}", self.stderr);
        self
    }

    /// The failure's line: the last one, with a remedy.
    #[track_caller]
    pub(crate) fn expect_error(&self, words: &str) -> &Self {
        self.expect_code(1);
        let line = self.stderr.lines().last().unwrap_or_default();
        assert!(line.contains(words), "no {words:?} in: {}", self.stderr);
        let remedies = ["; ", ": run as root", ": detach it"];
        assert!(
            remedies.iter().any(|remedy| line.contains(remedy)),
            "no remedy in: {line}"
        );
        assert!(
            line.starts_with("lm-send: ") || line.starts_with("lm-recv: "),
            "{line}"
        );
        self
    }

    /// The one JSON object on standard output.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| {
            panic!(
                "{error}: {}\n{}",
                String::from_utf8_lossy(&self.stdout),
                self.stderr
            )
        })
    }
}

/// Waits until `done`, but not for ever.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// These are there and nothing else, and each of them is a file of this length.
#[track_caller]
pub(crate) fn expect_files(directory: &Path, len: usize, expected: &[&str]) {
    assert_eq!(names(directory), expected);
    for name in expected {
        let read = fs::read(directory.join(name)).unwrap();
        assert!(read == content(len), "the bytes of {name} differ");
    }
}
