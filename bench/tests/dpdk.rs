//! The tools by DPDK: two processes without privileges, and beside AF_XDP on a veth pair.
#![cfg(feature = "dpdk")]

#[path = "tools/bed.rs"]
#[allow(dead_code)] // the tests on AF_XDP use the rest
mod bed;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bed::{Bed, Ended, Host, INTERFACE, RECEIVER, SENDER, Tool, content};
use rustix::process::Signal;

const LEN: usize = 20 << 20;
/// Slow enough to be caught under way.
const RATE: [&str; 4] = ["--rate", "200M", "--stats", "0.05"];

/// A folder of an ordinary user's, with a socket, and a file to send.
struct Place {
    folder: PathBuf,
}

impl Place {
    fn new() -> Place {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("lm-dpdk-tools-{}-{number}", std::process::id()));
        std::fs::create_dir_all(folder.join("received")).expect("a folder");
        std::fs::write(folder.join("sent"), content(LEN)).expect("a file");
        for shared in [&folder, &folder.join("received")] {
            nix::unistd::chown(shared, Some(NOBODY.into()), None).ok();
        }
        Place { folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// A tool on a device there, as nobody where this is root.
    fn tool(&self, program: &str, device: &str, address: &str, arguments: &[&str]) -> Tool {
        use std::os::unix::process::CommandExt as _;
        let mut command = Command::new(program);
        command
            .args(["--dpdk", device, "--dpdk-address", address, "--json"])
            .args(arguments);
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        Tool::start(command)
    }

    fn recv(&self, arguments: &[&str]) -> Tool {
        let device = format!("net_vhost0,iface={}", self.path("lm.sock"));
        let output = self.path("received");
        let common = ["--output", &output, "--count", "1", "--stats", "0.05"];
        self.tool(RECV, &device, "10.9.0.1/24", &[&common, arguments].concat())
    }

    fn send(&self, arguments: &[&str]) -> Tool {
        let device = format!("net_virtio_user0,path={}", self.path("lm.sock"));
        let sent = self.path("sent");
        let common = ["--to", "10.9.0.1", &sent];
        self.tool(SEND, &device, "10.9.0.2/24", &[&common, arguments].concat())
    }

    fn expect_received(&self, name: &str) {
        let found = std::fs::read(self.folder.join("received").join(name)).expect("it was received");
        assert!(found == content(LEN), "{name} is not what was sent");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

const RECV: &str = env!("CARGO_BIN_EXE_lm-recv");
const SEND: &str = env!("CARGO_BIN_EXE_lm-send");
const NOBODY: u32 = 65534;

#[test]
fn a_file_crosses_between_two_processes() {
    let place = Place::new();
    let receiver = place.recv(&[]);
    receiver.wait_for_line("listening on net_vhost0");
    let sent = place.send(&[]).end();
    sent.expect_code(0);
    let received = receiver.end();
    received.expect_code(0);
    place.expect_received("transfer-000001");
    for (report, device) in [(sent.json(), "net_virtio_user0"), (received.json(), "net_vhost0")] {
        assert_eq!(
            (&report["device"], &report["mode"]),
            (&device.into(), &"copy-port".into())
        );
        assert_eq!(report["drops"], serde_json::json!({}), "{report}");
    }
    assert!(
        !Path::new(&place.path("lm.sock")).exists(),
        "the socket goes with its program"
    );
}

#[test]
fn senders_that_are_killed_make_room_for_others() {
    let place = Place::new();
    let receiver = place.recv(&[]);
    receiver.wait_for_line("listening on net_vhost0");
    // While it opens its device, and while it sends.
    let opening = place.send(&RATE);
    opening.signal(Signal::KILL);
    opening.end();
    let sending = place.send(&RATE);
    receiver.wait_for_line("landed 1");
    sending.signal(Signal::KILL);
    sending.end();
    place.send(&[]).end().expect_code(0);
    receiver.end().expect_code(0);
    place.expect_received("transfer-000001");
}

#[test]
fn receivers_that_are_killed_leave_a_file_that_is_named() {
    let place = Place::new();
    let waiting = place.recv(&[]);
    waiting.wait_for_line("listening on net_vhost0");
    waiting.signal(Signal::KILL);
    waiting.end();
    let file = place.path("lm.sock");
    place.recv(&[]).end().expect_error(&format!("rm {file}"));
    std::fs::remove_file(&file).expect("it was left");

    let receiver = place.recv(&[]);
    receiver.wait_for_line("listening on net_vhost0");
    let sender = place.send(&[&RATE[..], &["--patience", "1"]].concat());
    receiver.wait_for_line("landed 1");
    receiver.signal(Signal::KILL);
    receiver.end();
    let ended = sender.end();
    assert!(!ended.status.success(), "nobody has the file");
    std::fs::remove_file(&file).expect("it was left");
    let receiver = place.recv(&[]);
    receiver.wait_for_line("listening on net_vhost0");
    place.send(&[]).end().expect_code(0);
    receiver.end().expect_code(0);
    place.expect_received("transfer-000001");
}

#[test]
fn an_interrupted_receiver_leaves_nothing() {
    let place = Place::new();
    let receiver = place.recv(&[]);
    receiver.wait_for_line("listening on net_vhost0");
    receiver.interrupt().expect_code(130);
    assert!(!Path::new(&place.path("lm.sock")).exists());
}

#[test]
fn bad_command_lines_have_a_reason() {
    let place = Place::new();
    let (sent, none) = (place.path("sent"), place.path("none"));
    let (odd, deep) = (
        format!("net_vhost0,iface={none},wonder=1"),
        format!("net_vhost0,iface={none}/none"),
    );
    let server = format!("net_virtio_user0,path={none}");
    for (device, rest, words) in [
        ("", "--dpdk-address 10.9.0.2/24", "names no driver"),
        (",queues=2", "--dpdk-address 10.9.0.2/24", "names no driver"),
        ("net_wonder0", "--dpdk-address 10.9.0.2/24", "\"net_wonder0\""),
        (&odd, "--dpdk-address 10.9.0.2/24", "(net_vhost0)"),
        ("net_vhost0", "--dpdk-address 10.9.0.2/24", "(net_vhost0)"),
        ("net_ring0", "--dpdk-address 10.9.0.2/24", "net_memif"),
        (
            "net_af_packet0,iface=wonder",
            "--dpdk-address 10.9.0.2/24",
            "wonder cannot be opened",
        ),
        (
            &server,
            "--dpdk-address 10.9.0.2/24",
            &format!("No such file or directory; start the program that listens on {none}"),
        ),
        (
            &deep,
            "--dpdk-address 10.9.0.2/24",
            "failed to bind: No such file",
        ),
        ("net_null0", "", "--dpdk-address"),
        ("net_null0", "--interface lo", "--interface"),
        ("net_null0", "--dpdk-address 10.9.0.2", "--dpdk-address"),
        ("net_null0", "--dpdk-address 10.9.0.2/33", "no host's address"),
        ("net_null0", "--dpdk-address 10.9.0.0/24", "no host's address"),
        ("net_null0", "--dpdk-address 10.9.0.255/24", "no host's address"),
        ("net_null0", "--dpdk-address 224.0.0.1/4", "no host's address"),
        (
            "net_null0",
            "--dpdk-address 10.9.0.2/24 --dpdk-gateway 10.8.0.1",
            "--dpdk-gateway",
        ),
        (
            "net_null0",
            "--dpdk-address 10.9.0.2/24 --mode zero-copy",
            "--mode copy",
        ),
        ("net_null0", "--dpdk-address 10.8.0.2/24", "--dpdk-gateway"),
        ("net_null0", "--dpdk-address 10.9.0.2/24", "answers no ARP"),
    ] {
        let mut command = Command::new(SEND);
        command
            .args(["--to", "10.9.0.1", &sent, "--dpdk", device])
            .args(rest.split_whitespace());
        Tool::start(command).end().expect_error(words);
    }
}

/// The device of the bed's interface on one side, which the kernel has no address on any more.
fn packet_device(bed: &Bed, host: Host) -> String {
    bed.ip(host, &format!("address flush dev {INTERFACE}"));
    format!("net_af_packet0,iface={INTERFACE}")
}

fn on(bed: &Bed, host: Host, program: &str, arguments: &[&str]) -> Tool {
    let mut command = bed.command(host, program);
    command.args(arguments).arg("--json");
    Tool::start(command)
}

/// What both said, after a transfer of these bytes; the receiver is on DPDK, or the sender.
fn transfer(bed: &Bed, receiver_is: bool, bytes: &[u8], options: &[&str]) -> [Ended; 2] {
    let (sent, received) = (bed.path("sent"), bed.path("received"));
    std::fs::write(&sent, bytes).expect("a file");
    let host = if receiver_is { Host::Receiver } else { Host::Sender };
    let address = if receiver_is { RECEIVER } else { SENDER };
    let (device, address) = (packet_device(bed, host), format!("{address}/24"));
    let dpdk = ["--dpdk", &device, "--dpdk-address", &address];
    let kernel = ["--interface", INTERFACE];
    let links = if receiver_is {
        [&dpdk[..], &kernel]
    } else {
        [&kernel[..], &dpdk]
    };
    let output = received.display().to_string();
    let receiving = ["--allow", SENDER, "--count", "1", "--force", "--output", &output];
    let receiver = on(bed, Host::Receiver, RECV, &[links[0], &receiving].concat());
    receiver.wait_for_line("listening on");
    let file = sent.display().to_string();
    let sending = ["--to", RECEIVER, &file];
    let sender = on(bed, Host::Sender, SEND, &[links[1], &sending, options].concat());
    let ended = [sender.end(), receiver.end()];
    ended.iter().for_each(|ended| {
        ended.expect_code(0);
    });
    assert!(
        std::fs::read(&received).expect("a file") == bytes,
        "what arrived is not what was sent"
    );
    ended
}

#[test]
fn files_cross_between_dpdk_and_af_xdp() {
    for receiver_is in [true, false] {
        // On veth a sender's queue is the receiver's, and DPDK sends on the first one.
        let queues = if receiver_is { 2 } else { 1 };
        let Some(bed) = Bed::with_queues(queues) else {
            return;
        };
        let [_, received] = transfer(&bed, receiver_is, &content(LEN), &[]);
        let one_copy = received.json()["fragments_one_copy"].as_u64().expect("a number");
        assert!(one_copy < 100, "{}", received.json());
        // One packet; and without a place on the landing queue.
        transfer(&bed, receiver_is, b"small", &[]);
        let [sent, received] = transfer(&bed, receiver_is, &content(3 << 20), &["--one-copy"]);
        assert!(
            sent.json()["messages_one_copy"].as_u64() > Some(0),
            "{}",
            sent.json()
        );
        assert!(
            received.json()["fragments_one_copy"].as_u64() > Some(2000),
            "{}",
            received.json()
        );
    }
}

#[test]
fn a_kernel_socket_receives_ip_fragments_from_dpdk() {
    let Some(bed) = Bed::new() else { return };
    let socket = bed.udp_socket(Host::Receiver, &format!("{RECEIVER}:7168"));
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a socket");
    let device = packet_device(&bed, Host::Sender);
    let sent = bed.path("sent");
    std::fs::write(&sent, content(20_000)).expect("a file");
    let address = format!("{SENDER}/24");
    let file = sent.display().to_string();
    let dpdk = ["--dpdk", &device, "--dpdk-address", &address];
    let wire = [
        "--to",
        RECEIVER,
        &file,
        "--wire",
        "ipfrag",
        "--message-size",
        "10000",
    ];
    let sender = on(&bed, Host::Sender, SEND, &[&dpdk[..], &wire].concat());
    let mut datagram = vec![0; 65_536];
    let (len, _) = socket.recv_from(&mut datagram).expect("a datagram");
    assert!(datagram[..len] == content(20_000)[..10_000], "{len} bytes");
    sender.end().expect_code(0);
}
