//! The tools by DPDK: two processes without privileges, and beside AF_XDP on a veth pair.
#![cfg(feature = "dpdk")]

#[path = "tools/bed.rs"]
#[allow(dead_code)] // the tests on AF_XDP use the rest
mod bed;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bed::{Bed, Host, INTERFACE, RECEIVER, SENDER, Tool, content, wait_until};
use rustix::process::Signal;

const LEN: usize = 20 << 20;
/// Slow enough to be caught under way.
const RATE: [&str; 4] = ["--rate", "200M", "--stats", "0.05"];

/// Devices of a receiver and a sender, up to the path of their socket.
const VHOST: [&str; 2] = ["net_vhost0,queues=2,iface", "net_virtio_user0,queues=2,path"];
const MEMIF: [&str; 2] = [
    "net_memif0,role=server,socket-abstract=no,socket",
    "net_memif0,role=client,socket-abstract=no,socket",
];

/// A folder of an ordinary user's, with a socket, and a file to send.
struct Place {
    folder: PathBuf,
    devices: [&'static str; 2],
}

impl Place {
    fn new(devices: [&'static str; 2]) -> Place {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("lm-dpdk-tools-{}-{number}", std::process::id()));
        std::fs::create_dir_all(folder.join("received")).expect("a folder");
        std::fs::write(folder.join("sent"), content(LEN)).expect("a file");
        for shared in [&folder, &folder.join("received")] {
            nix::unistd::chown(shared, Some(ORDINARY.into()), None).ok();
        }
        Place { folder, devices }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// A tool on a device there, as an ordinary user where this is root.
    fn tool(&self, program: &str, side: usize, arguments: &[&str]) -> Tool {
        use std::os::unix::process::CommandExt as _;
        let device = format!("{}={}", self.devices[side], self.path("lm.sock"));
        let address = format!("10.9.0.{}/24", side + 1);
        let mut command = Command::new(program);
        command.args(["--dpdk", &device, "--dpdk-address", &address, "--json"]);
        command.args(arguments).env("XDG_RUNTIME_DIR", &self.folder);
        if rustix::process::geteuid().is_root() {
            command.uid(ORDINARY).gid(ORDINARY);
        }
        Tool::start(command)
    }

    /// A receiver of `count` files.
    fn recv(&self, count: &str) -> Tool {
        let output = self.path("received");
        let arguments = ["--output", &output, "--count", count, "--stats", "0.05"];
        self.tool(RECV, 0, &arguments)
    }

    fn send(&self, arguments: &[&str]) -> Tool {
        let sent = self.path("sent");
        let common = ["--to", "10.9.0.1", &sent];
        self.tool(SEND, 1, &[&common, arguments].concat())
    }

    /// The socket that a receiver listens on, and one for each sender that it has accepted.
    fn sockets(&self) -> usize {
        let all = std::fs::read_to_string("/proc/net/unix").expect("procfs");
        all.matches(&self.path("lm.sock")).count()
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
const ORDINARY: u32 = 65534;

#[test]
fn a_file_crosses_between_two_processes() {
    for devices in [VHOST, MEMIF] {
        let place = Place::new(devices);
        let receiver = place.recv("1");
        receiver.wait_for_line("listening on net_");
        let ended = [place.send(&[]), receiver].map(Tool::end);
        place.expect_received("transfer-000001");
        for (ended, device) in ended.iter().zip([devices[1], devices[0]]) {
            let report = ended.expect_code(0).json();
            let name = report["device"].as_str().expect("a name");
            assert!(device.starts_with(name), "{report}");
            let is_aimed = device.starts_with("net_virtio");
            assert_eq!(report["mode"], if is_aimed { "zero-copy" } else { "copy-port" });
        }
        let is_left = place.folder.join("lm.sock").exists();
        assert!(!is_left, "the socket goes with its program");
    }
}

#[test]
fn senders_that_are_killed_make_room_for_others() {
    let place = Place::new(VHOST);
    let receiver = place.recv("1");
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

/// While none sends, one connects, one sends, and one has sent.
#[test]
fn receivers_that_are_killed_leave_a_file_that_is_named() {
    let place = Place::new(VHOST);
    for stage in 0..4 {
        let receiver = place.recv("2");
        receiver.wait_for_line("listening on net_vhost0");
        let sender = (stage > 0).then(|| place.send(&[&RATE[..], &["--patience", "1"]].concat()));
        match stage {
            1 => wait_until("a sender connects", || place.sockets() == 2),
            2 => receiver.wait_for_line("landed 1"),
            3 => receiver.wait_for_line("transfer-000001"),
            _ => {}
        }
        receiver.signal(Signal::KILL);
        receiver.end();
        if let Some(ended) = sender.map(Tool::end) {
            match stage {
                3 => ended.expect_code(0),
                _ => ended.expect_error(["", "", "is down"][stage]),
            };
        }
        let file = place.path("lm.sock");
        place.recv("1").end().expect_error(&format!("rm {file}"));
        std::fs::remove_file(&file).expect("it was left");
    }
    let receiver = place.recv("1");
    receiver.wait_for_line("listening on net_vhost0");
    place.send(&[]).end().expect_code(0);
    receiver.end().expect_code(0);
    place.expect_received("transfer-000001");
}

#[test]
fn an_interrupted_receiver_leaves_nothing() {
    let place = Place::new(VHOST);
    let receiver = place.recv("1");
    receiver.wait_for_line("listening on net_vhost0");
    receiver.interrupt().expect_code(130);
    assert!(
        ["lm.sock", "dpdk"]
            .iter()
            .all(|left| !place.folder.join(left).exists())
    );
}

#[test]
fn bad_command_lines_have_a_reason() {
    let place = Place::new(VHOST);
    let (sent, none) = (place.path("sent"), place.path("none"));
    let [odd, deep] = [",wonder=1", "/none"].map(|end| format!("net_vhost0,iface={none}{end}"));
    let server = format!("net_virtio_user0,path={none}");
    let absent = format!("listens on {none} first");
    let at = "--dpdk-address 10.9.0.2/24";
    let gateway = format!("{at} --dpdk-gateway 10.8.0.1");
    for (device, rest, words) in [
        ("", at, "names no driver"),
        (",queues=2", at, "names no driver"),
        ("net_wonder0", at, "\"net_wonder0\""),
        (&odd, at, "(net_vhost0)"),
        ("net_vhost0", at, "(net_vhost0)"),
        ("net_ring0", at, "net_memif"),
        ("0000:03:00.0", at, "is a card"),
        ("0000:03:00.0", &format!("{at} --mode zero-copy"), "is a card"),
        ("net_af_packet0,iface=wonder", at, "wonder cannot be opened"),
        (&server, at, &absent),
        (&deep, at, "failed to bind: No such file"),
        ("net_null0", "", "--dpdk-address"),
        ("net_null0", "--interface lo", "--interface"),
        ("net_null0", "--dpdk-address 10.9.0.2", "--dpdk-address"),
        ("net_null0", "--dpdk-address 10.9.0.2/33", "--dpdk-address"),
        ("net_null0", "--dpdk-address 10.9.0.0/24", "no host's address"),
        ("net_null0", "--dpdk-address 10.9.0.255/24", "no host's address"),
        ("net_null0", "--dpdk-address 224.0.0.1/4", "no host's address"),
        ("net_null0", &gateway, "--dpdk-gateway"),
        ("net_null0", &format!("{at} --mode zero-copy"), "--mode copy"),
        ("net_null0", "--dpdk-address 10.8.0.2/24", "--dpdk-gateway"),
        ("net_null0", at, "answers no ARP"),
    ] {
        let mut command = Command::new(SEND);
        command
            .args(["--to", "10.9.0.1", &sent, "--dpdk", device])
            .args(rest.split_whitespace());
        Tool::start(command).end().expect_error(words);
    }
}

/// The link of one side: by DPDK, where the kernel has no address on the interface any more, or by AF_XDP.
fn link(bed: &Bed, host: Host, by_dpdk: bool) -> String {
    if !by_dpdk {
        return format!("--interface {INTERFACE}");
    }
    bed.ip(host, &format!("address flush dev {INTERFACE}"));
    let address = if host == Host::Sender { SENDER } else { RECEIVER };
    format!("--dpdk net_af_packet0,iface={INTERFACE} --dpdk-address {address}/24")
}

fn on(bed: &Bed, host: Host, program: &str, line: &str) -> Tool {
    let mut command = bed.command(host, program);
    command.args(line.split_whitespace()).arg("--json");
    Tool::start(command)
}

/// How many messages went, and fragments came, by the one-copy path in a transfer of these bytes; the receiver is on DPDK, or the sender.
fn transfer(bed: &Bed, receiver_is: bool, bytes: &[u8], options: &str) -> [u64; 2] {
    let [sent, received] = ["sent", "received"].map(|name| bed.path(name));
    std::fs::write(&sent, bytes).expect("a file");
    let from = link(bed, Host::Sender, !receiver_is);
    let (to, out) = (link(bed, Host::Receiver, receiver_is), received.display());
    let line = format!("{to} --allow {SENDER} --count 1 --force --output {out}");
    let receiver = on(bed, Host::Receiver, RECV, &line);
    receiver.wait_for_line("listening on");
    let line = format!("{from} --to {RECEIVER} {} {options}", sent.display());
    let [sent, came] = [on(bed, Host::Sender, SEND, &line), receiver].map(|tool| {
        let ended = tool.end();
        ended.expect_code(0);
        ended.json()
    });
    let found = std::fs::read(&received).expect("a file");
    assert!(found == bytes, "what arrived is not what was sent");
    [&sent["messages_one_copy"], &came["fragments_one_copy"]].map(|count| count.as_u64().expect("a number"))
}

#[test]
fn files_cross_between_dpdk_and_af_xdp() {
    for receiver_is in [true, false] {
        // On veth a sender's queue is the receiver's, and DPDK sends on the first one.
        let queues = if receiver_is { 2 } else { 1 };
        let Some(bed) = Bed::with_queues(queues) else {
            return;
        };
        let [_, fragments] = transfer(&bed, receiver_is, &content(LEN), "");
        assert!(fragments < 100, "{fragments} of 14,500 fragments did not land");
        // One packet; and without a place on the landing queue.
        transfer(&bed, receiver_is, b"small", "");
        let [messages, fragments] = transfer(&bed, receiver_is, &content(3 << 20), "--one-copy");
        assert!(messages > 0 && fragments > 2000, "{messages}, {fragments}");
    }
}

#[test]
fn a_kernel_socket_receives_ip_fragments_from_dpdk() {
    let Some(bed) = Bed::new() else { return };
    let socket = bed.udp_socket(Host::Receiver, &format!("{RECEIVER}:7168"));
    let (from, sent) = (link(&bed, Host::Sender, true), bed.path("sent"));
    std::fs::write(&sent, content(20_000)).expect("a file");
    let file = sent.display();
    let line = format!("{from} --to {RECEIVER} {file} --wire ipfrag --message-size 10000");
    let sender = on(&bed, Host::Sender, SEND, &line);
    let mut datagram = vec![0; 65_536];
    let (len, _) = socket.recv_from(&mut datagram).expect("a datagram");
    assert!(datagram[..len] == content(20_000)[..10_000], "{len} bytes");
    sender.end().expect_code(0);
}

/// The kernel finds the device by ARP, and hears by ICMP that a port is not open; what has a VLAN tag is of another network.
#[test]
fn a_kernel_socket_is_answered_by_dpdk() {
    let Some(bed) = Bed::new() else { return };
    let to = link(&bed, Host::Receiver, true);
    let line = format!("{to} --allow {SENDER} --output {}", bed.path("out").display());
    let receiver = on(&bed, Host::Receiver, RECV, &line);
    receiver.wait_for_line("listening on");
    let answer = || {
        let socket = bed.udp_socket(Host::Sender, &format!("{SENDER}:0"));
        let patience = Some(Duration::from_secs(2));
        socket.set_read_timeout(patience).expect("a socket");
        socket.connect(format!("{RECEIVER}:99")).expect("a route");
        socket.send(b"a question").expect("sent");
        socket.recv(&mut [0; 16]).expect_err("a closed port").kind()
    };
    assert_eq!(answer(), std::io::ErrorKind::ConnectionRefused);
    let tagged = format!("link add link {INTERFACE} name tagged type vlan id 5");
    if !bed.try_ip(Host::Sender, &tagged) {
        println!("NOT IN THIS KERNEL: VLAN devices");
        return;
    }
    bed.ip(Host::Sender, &format!("address flush dev {INTERFACE}"));
    bed.ip(Host::Sender, &format!("address add {SENDER}/24 dev tagged"));
    bed.ip(Host::Sender, "link set tagged up");
    assert_ne!(answer(), std::io::ErrorKind::ConnectionRefused);
    receiver.interrupt().expect_code(130);
}
