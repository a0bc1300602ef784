//! Descriptors that the daemon hands out, and those that are handed to it: whatever a program does to them, the next program of another
//! user has the queue in full working order.

use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use lm_admission::daemon::status::Status;
use lm_dataplane::ipc::*;
use lm_dataplane::{
    Admission, AdmissionConfig, ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, SharedSmoother,
};
use nix::libc;
use rustix::process::Signal;
use xtask::bed::{BedConfig, INTERFACE, Side};

use crate::bed::{Daemon, Hosts, PATIENCE, wait_until, words};
use crate::neighbours::Bpffs;
use crate::program::{Client, as_user};

/// Of the program that spoils what it gets, and of the next one.
const SPOILER: u32 = 2001;
const NEXT: u32 = 2002;
const USERS: [&str; 6] = [
    "--allow-uid",
    "2001",
    "--allow-uid",
    "2002",
    "--link-rate",
    "100M",
];

fn bpf(command: libc::c_long, words: [u64; 7]) -> Result<(), i32> {
    // SAFETY: the attribute is as long as said; what it points to is live, and as long as any map's value here.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, words.as_ptr(), size_of_val(&words)) };
    (done >= 0).then_some(()).ok_or(nix::errno::Errno::last_raw())
}

fn freeze(map: BorrowedFd<'_>) -> Result<(), i32> {
    bpf(22, [map.as_raw_fd() as u64, 0, 0, 0, 0, 0, 0])
}

/// What a program got: sockets, logs, credits, and the UDP socket that it handed in.
struct Got {
    xsks: Vec<OwnedFd>,
    maps: Vec<OwnedFd>,
    udp: OwnedFd,
}

/// A program gets all that the daemon hands out; its connections.
fn get(hosts: &Hosts) -> (Got, [Client; 2]) {
    let path = hosts.socket(Side::Left);
    let mut client = Client::connect_as(&path, SPOILER)
        .hello()
        .join(hosts.host(Side::Left), 7168, true);
    let general = client.joined().general_queue.unwrap();
    client.open(general, Role::General);
    client.open(client.landing_queue(), Role::Landing);
    client.done(Call::Receive(client.offer()));
    let mut smooth = Client::connect_as(&path, SPOILER).hello();
    let interface = INTERFACE.to_owned();
    let (reply, credits) = smooth.call_beside(Call::Smooth { interface }, &[]);
    assert_eq!(reply, Reply::Smoother);
    let mut handed = std::mem::take(&mut client.channels).into_iter();
    let mut got = Got {
        xsks: Vec::new(),
        maps: credits,
        udp: client.udp.take().unwrap().into(),
    };
    while let (Some(xsk), Some(log)) = (handed.next(), handed.next()) {
        got.xsks.push(xsk);
        got.maps.push(log);
    }
    (got, [client, smooth])
}

/// The next program has the smoother, and a message of many packets lands at it.
fn is_in_working_order(hosts: &Hosts, daemon: &Daemon, after: &str) {
    wait_until(&format!("the queues are free after {after}"), || {
        let queues = daemon.interface().queues;
        queues.iter().all(|queue| queue.role == "free")
    });
    let asked = as_user(NEXT, || SharedSmoother::ask(&hosts.socket(Side::Left), INTERFACE));
    assert!(asked.is_ok(), "after {after}: {asked:?}");
    let open = |side: Side, uid: u32, port: u16, landing_len: u64| {
        let config = EndpointConfig {
            interface: INTERFACE.to_owned(),
            port,
            memory: MemoryConfig {
                landing_len,
                ..MemoryConfig::default()
            },
            admission: AdmissionConfig {
                by: Admission::Daemon(hosts.socket(side)),
                ..AdmissionConfig::default()
            },
            ..EndpointConfig::default()
        };
        let opened = as_user(uid, || Endpoint::open(&config));
        opened.unwrap_or_else(|error| panic!("after {after}: {error}"))
    };
    let received = hosts.host(Side::Left).enter(|| {
        let mut receiver = open(Side::Left, NEXT, 7168, 8 << 20);
        let to = receiver.local();
        let mut sender = hosts.host(Side::Right).enter(|| {
            let mut sender = open(Side::Right, 0, 7300, 0);
            let peer = sender.connect(to, &ConnectOptions::default())?;
            sender.send_copy(peer, &[7; 100_000], 1)?;
            Ok(sender)
        })?;
        let begun = Instant::now();
        loop {
            sender.poll();
            receiver.wait(Duration::from_millis(1));
            if let Some(message) = receiver.try_recv()? {
                return Ok((message.len(), receiver.counters().landing_packets));
            }
            assert!(begun.elapsed() < PATIENCE, "nothing comes after {after}");
        }
    });
    let (len, landed) = received.unwrap();
    assert!(
        len == 100_000 && landed > 60,
        "after {after}: {len}, {landed} landed"
    );
    wait_until("it has gone", || daemon.status().programs.is_empty());
}

/// What can be done to the descriptors.
fn spoil(how: &str, got: &Got, daemon: i32, folder: &str) {
    let all = || got.xsks.iter().chain(&got.maps).chain([&got.udp]);
    let key = 0u32;
    let value = vec![0xffu8; 1 << 20];
    let at = [&raw const key as u64, value.as_ptr() as u64];
    match how {
        "freezing" => got
            .maps
            .iter()
            .for_each(|map| assert_eq!(freeze(map.as_fd()), Err(libc::EBUSY))),
        // The credits' content is another test's matter.
        "overwriting" => {
            for map in &got.maps[1..] {
                let fd = map.as_raw_fd() as u64;
                assert_eq!(bpf(2, [fd, at[0], at[1], 0, 0, 0, 0]), Ok(()));
                let batch = bpf(26, [0, 0, at[0], at[1], 1 | fd << 32, 0, 0]);
                assert_eq!(batch, Ok(()));
            }
        }
        "deleting" => got.maps.iter().for_each(|map| {
            let fd = map.as_raw_fd() as u64;
            bpf(3, [fd, at[0], 0, 0, 0, 0, 0]).unwrap_err();
            bpf(27, [0, 0, at[0], 0, 1 | fd << 32, 0, 0]).unwrap_err();
        }),
        "pinning" => got.maps.iter().enumerate().for_each(|(number, map)| {
            let path = std::ffi::CString::new(format!("{folder}/{number}")).unwrap();
            let words = [path.as_ptr() as u64, map.as_raw_fd() as u64, 0, 0, 0, 0, 0];
            assert_eq!(bpf(6, words), Ok(()));
        }),
        "locking" => all().for_each(|fd| {
            // All maps are one inode for the kernel.
            let _ = rustix::fs::flock(fd, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        }),
        // Whether they can be set or not.
        "flags and options" => all().for_each(|fd| {
            let fd = fd.as_raw_fd();
            let flags = libc::O_NONBLOCK | libc::O_ASYNC | libc::O_APPEND | libc::O_NOATIME;
            // SAFETY: numbers, and a buffer that is as long as said.
            unsafe {
                libc::fcntl(fd, libc::F_SETOWN, daemon);
                libc::fcntl(fd, 10, libc::SIGKILL);
                libc::fcntl(fd, libc::F_SETFL, flags);
                for (level, option) in [libc::SOL_SOCKET, libc::SOL_XDP, libc::SOL_UDP]
                    .iter()
                    .flat_map(|level| (1..100).map(move |option| (*level, option)))
                {
                    libc::setsockopt(fd, level, option, [1u64; 8].as_ptr().cast(), 4);
                    libc::setsockopt(fd, level, option, [1u64; 8].as_ptr().cast(), 32);
                }
            }
        }),
        "ends and addresses" => all().for_each(|fd| {
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
            let _ = rustix::net::connect_unspec(fd);
            let _ = rustix::net::bind(fd, &rustix::net::SocketAddrV4::new([127, 0, 0, 1].into(), 7169));
            let _ = rustix::net::listen(fd, 1);
            let _ = rustix::fs::ftruncate(fd, 0);
        }),
        _ => unreachable!(),
    }
}

#[test]
fn what_is_handed_out_is_the_next_programs_in_working_order() {
    let Some(hosts) = Hosts::new("handed") else { return };
    let (left, right) = (hosts.daemon_with(Side::Left, &USERS), hosts.daemon(Side::Right));
    let bpffs = Bpffs::new(&hosts, SPOILER);
    let mut kept = Vec::new();
    for how in [
        "freezing",
        "overwriting",
        "deleting",
        "pinning",
        "locking",
        "flags and options",
        "ends and addresses",
    ] {
        let (got, clients) = get(&hosts);
        as_user(SPOILER, || spoil(how, &got, left.id() as i32, bpffs.name()));
        drop(clients);
        // A queue is busy as long as its socket is open; maps stay open.
        kept.extend(got.maps);
        drop((got.xsks, got.udp));
        is_in_working_order(&hosts, &left, how);
    }
    // Nobody has them mapped once the daemon is dead.
    let (got, clients) = get(&hosts);
    left.kill();
    as_user(SPOILER, || {
        got.maps
            .iter()
            .for_each(|map| assert_eq!(freeze(map.as_fd()), Ok(())));
    });
    drop((clients, got.xsks, got.udp));
    let left = hosts.daemon_with(Side::Left, &USERS);
    is_in_working_order(&hosts, &left, "a restart");
    left.stop();
    right.stop();
}

/// Answers with descriptors that nobody reads are in flight, and count for the daemon's user.
#[test]
fn unread_answers_keep_no_other_program_waiting() {
    let Some(hosts) = Hosts::new("unread") else { return };
    let mut few = vec!["prlimit".to_owned(), "--nofile=512:512".to_owned()];
    few.extend(words(hosts.host(Side::Left)));
    let daemon = hosts.daemon_by(&few, Side::Left, &USERS);
    let path = hosts.socket(Side::Left);
    let call = Call::Status;
    let asks = postcard::to_stdvec(&Asked { number: 9, call }).unwrap();
    // Each asks and reads nothing; it makes the daemon hang up, and comes again.
    let mut kept = Vec::new();
    for round in 0..800 {
        let mut client = Client::connect_as(&path, SPOILER);
        if client.is_let_in() {
            for _ in 0..round % 12 {
                client.try_send_beside(&asks, &[]);
            }
            client.try_send_beside(&[0xff; 9][..round % 2 * 9], &[]);
            kept.push(client);
        }
    }
    let mut next = Client::connect_as(&path, NEXT)
        .hello()
        .join(hosts.host(Side::Left), 7300, true);
    next.open(next.landing_queue(), Role::Landing);
    // As many as it may have connected, and as many that were hung up.
    assert!(kept.len() <= 256, "{} connections hold something", kept.len());
    drop(kept);
    wait_until("its user is let in again", || {
        Client::connect_as(&path, SPOILER).is_let_in()
    });

    // Where others of the daemon's user leave no room, the answer comes when there is some.
    let (one, other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let file = std::fs::File::open(hosts.key()).unwrap();
    for _ in 0..3 {
        let beside = [file.as_fd(); 250];
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&beside));
        let bytes = [std::io::IoSlice::new(&[0])];
        rustix::net::sendmsg(&one, &bytes, &mut ancillary, rustix::net::SendFlags::empty()).unwrap();
    }
    next.send(Call::Status, &[]);
    assert!(next.hears_nothing(Duration::from_millis(100)));
    Client::connect_as(&path, NEXT).hello();
    drop((one, other));
    let (said, beside) = next.receive().expect("the daemon goes on");
    assert!(matches!(said, Said::Reply(_, Reply::Status)) && beside.len() == 1);
    daemon.stop();
}

/// A socket that shows nothing of a UDP port on the interface.
#[test]
fn a_port_is_shown_by_a_udp_socket_of_the_daemons_network_alone() {
    let Some(hosts) = Hosts::new("port") else { return };
    let daemon = hosts.daemon_with(Side::Left, &USERS);
    let (host, other) = (hosts.host(Side::Left), hosts.host(Side::Right));
    let address = rustix::net::SocketAddrV4::new(host.address(), 7168);
    host.write_file("/proc/sys/net/ipv4/ping_group_range", "0 4294967294")
        .unwrap();
    let socket = |protocol: u32, device: Option<&str>| {
        let protocol = Some(rustix::net::Protocol::from_raw(protocol.try_into().unwrap()));
        let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM);
        let socket = rustix::net::socket(family, kind, protocol).unwrap();
        if let Some(name) = device {
            // SAFETY: the name is as long as said.
            let bound = unsafe {
                let (level, option) = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
                libc::setsockopt(
                    socket.as_raw_fd(),
                    level,
                    option,
                    name.as_ptr().cast(),
                    name.len() as u32,
                )
            };
            assert_eq!(bound, 0);
        }
        rustix::net::bind(&socket, &address).unwrap();
        socket
    };
    // The address of this host, at another one.
    let added = std::process::Command::new("ip")
        .args(["-n", other.name(), "address", "add"])
        .args([&format!("{}/32", host.address()), "dev", "lo"])
        .status();
    assert!(added.unwrap().success());
    let mut client = Client::connect_as(&hosts.socket(Side::Left), SPOILER).hello();
    for (what, host, protocol, device) in [
        ("UDP-Lite", host, 136, None),
        ("ICMP", host, 1, None),
        ("another network namespace", other, 17, None),
        ("another device", host, 17, Some("lo")),
    ] {
        let shown = host.enter(|| Ok(socket(protocol, device))).unwrap();
        let (reply, _) = client.call_beside(Client::join_call(true), &[shown.as_fd()]);
        let Reply::Refused(told) = reply else {
            panic!("{what}: {reply:?}")
        };
        assert!(
            told.contains("198.18.0.1") && !told.contains('\n'),
            "{what}: {told}"
        );
    }
    // One at the interface itself does, and one that is connected.
    for device in [None, Some(INTERFACE)] {
        let shown = host.enter(|| Ok(socket(17, device))).unwrap();
        rustix::net::connect(&shown, &rustix::net::SocketAddrV4::new(other.address(), 7168)).unwrap();
        let mut client = Client::connect_as(&hosts.socket(Side::Left), NEXT).hello();
        let (reply, _) = client.call_beside(Client::join_call(true), &[shown.as_fd()]);
        assert!(matches!(reply, Reply::Joined(_)), "{reply:?}");
        drop(client);
        wait_until("it has gone", || daemon.status().programs.is_empty());
    }
    daemon.stop();
}

/// A connection that asks twice for what it has one of.
#[test]
fn what_a_connection_takes_twice_is_given_back() {
    let config = BedConfig {
        queues: 4,
        ..BedConfig::default()
    };
    let Some(hosts) = Hosts::with("twice", &config) else {
        return;
    };
    let host = hosts.host(Side::Left);
    for words in [
        "link add lm1 numrxqueues 4 numtxqueues 4 type veth peer name lm2 numrxqueues 4 numtxqueues 4",
        "address add 198.19.0.1/24 dev lm1",
        "link set lm1 up",
        "link set lm2 up",
    ] {
        let mut ip = std::process::Command::new("ip");
        let done = ip.args(["-n", host.name()]).args(words.split(' ')).status();
        assert!(done.unwrap().success(), "{words}");
    }
    let both = [&USERS[..], &["--interface", "lm1"]].concat();
    let (daemon, path) = (hosts.daemon_with(Side::Left, &both), hosts.socket(Side::Left));
    let mut first = Client::connect_as(&path, SPOILER).hello().join(host, 7168, true);
    daemon.hand_over();
    let daemon = hosts.daemon_with(Side::Left, &both);

    let mut client = Client::connect_as(&path, SPOILER).hello();
    let smooth = |interface: &str| Call::Smooth {
        interface: interface.to_owned(),
    };
    for _ in 0..2 {
        assert_eq!(client.call(smooth(INTERFACE)), Reply::Smoother);
    }
    let mut refused = vec![client.call(smooth("lm1"))];
    // A second endpoint, by an earlier one's token.
    let at = SocketAddrV4::new([198, 19, 0, 1].into(), 7301);
    let shown = host.enter(|| Ok(UdpSocket::bind(at)?)).unwrap();
    let join = Call::Join {
        interface: "lm1".to_owned(),
        landing: true,
        mode: Mode::Auto,
    };
    let (reply, _) = client.call_beside(join, &[shown.as_fd()]);
    assert!(matches!(reply, Reply::Joined(_)), "{reply:?}");
    let token = first.joined().token;
    let beside = [first.udp.as_ref().unwrap().as_fd()];
    refused.push(client.call_beside(Call::Rejoin { token }, &beside).0);
    for reply in refused {
        assert!(
            matches!(&reply, Reply::Refused(told) if told.contains("another")),
            "{reply:?}"
        );
    }
    drop(client);
    drop(Client::connect_as(&path, SPOILER).hello().rejoin(&mut first));
    wait_until("all is given back", || {
        let interfaces = daemon.status().interfaces;
        let queues = interfaces.iter().flat_map(|interface| &interface.queues);
        let is_free = queues.map(|queue| &queue.role).all(|role| role == "free");
        is_free && interfaces.iter().all(|interface| interface.smoother.is_none())
    });
    daemon.stop();
}

/// Calls that wait when the daemon goes on: of one user on many connections, of the other on one.
#[test]
fn users_take_turns_however_many_connections_they_have() {
    let Some(hosts) = Hosts::new("turns") else { return };
    let (daemon, path) = (hosts.daemon_with(Side::Left, &USERS), hosts.socket(Side::Left));
    let mut crowd: Vec<Client> = (0..120)
        .map(|_| Client::connect_as(&path, SPOILER).hello())
        .collect();
    let mut next = Client::connect_as(&path, NEXT)
        .hello()
        .join(hosts.host(Side::Left), 7168, true);
    let pid = rustix::process::Pid::from_raw(daemon.id() as i32).unwrap();
    rustix::process::kill_process(pid, Signal::STOP).unwrap();
    for (number, client) in crowd.iter_mut().enumerate() {
        for _ in 0..16 {
            let version = VERSION;
            client.send(Call::Hello { version }, &[]);
        }
        if number % 2 == 0 {
            client.send(Call::Status, &[]);
        }
    }
    const CALLS: u64 = 50;
    next.send(Call::Status, &[]);
    for _ in 0..CALLS {
        let sessions = Vec::new();
        next.send(Call::Touched { sessions }, &[]);
    }
    next.send(Call::Status, &[]);
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    let mut calls = Vec::new();
    for _ in 0..CALLS + 2 {
        let (_, beside) = next.receive().expect("the daemon goes on");
        calls.extend(beside.into_iter().map(|file| {
            let status: Status = serde_json::from_reader(std::fs::File::from(file)).unwrap();
            status.calls
        }));
    }
    // One of theirs for each of its own.
    let theirs = calls[1] - calls[0] - CALLS - 1;
    assert!(theirs <= CALLS + 10, "{theirs} calls between {CALLS}");
    daemon.stop();
}
