//! Descriptors that the daemon hands out, and those that are handed to it: whatever a program does to them, the next program of another
//! user has the queue in full working order. And what one user's many connections leave to another's.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use lm_admission::daemon::status::Status;
use lm_dataplane::ipc::*;
use lm_dataplane::{ConnectOptions, SharedSmoother};
use nix::libc;
use rustix::net::{
    AddressFamily, Protocol, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType,
};
use rustix::process::Signal;
use xtask::bed::INTERFACE;

use crate::bed::{Daemon, Hosts, PATIENCE, Side, wait_until, words};
use crate::neighbours::Bpffs;
use crate::program::{Client, as_user};
use crate::smoothing::open_as;

/// Of the program that spoils what it gets, and of the next one.
const SPOILER: u32 = 2001;
const NEXT: u32 = 2002;
const USERS: &str = "--allow-uid 2001 --allow-uid 2002 --link-rate 100M";
/// Which of the descriptors that [`get`] gives are maps: two logs, and the credits.
const MAPS: [usize; 3] = [1, 3, 4];

fn start(hosts: &Hosts, further: &str) -> Daemon {
    let arguments: Vec<&str> = USERS.split(' ').chain(further.split_whitespace()).collect();
    hosts.daemon_with(Side::Left, &arguments)
}

fn connect(hosts: &Hosts, uid: u32) -> Client {
    Client::connect_as(&hosts.socket(Side::Left), uid).hello()
}

fn run(script: &str) {
    let done = Command::new("sh").args(["-c", script]).status();
    assert!(done.unwrap().success());
}

fn bpf(command: libc::c_long, words: [u64; 5]) -> Result<(), i32> {
    // SAFETY: the attribute is as long as said; what it points to is live, and as long as any map's value here.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, words.as_ptr(), size_of_val(&words)) };
    (done >= 0).then_some(()).ok_or(nix::errno::Errno::last_raw())
}

fn freeze(map: &OwnedFd) -> Result<(), i32> {
    bpf(22, [map.as_raw_fd() as u64, 0, 0, 0, 0])
}

fn set_option(fd: &impl AsFd, level: i32, option: i32, value: &[u8]) -> i32 {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the value is as long as said.
    unsafe { libc::setsockopt(fd, level, option, value.as_ptr().cast(), value.len() as u32) }
}

/// A program gets all that the daemon hands out: two sockets with their logs, and credits. Behind them, the socket that it handed in.
fn get(hosts: &Hosts) -> (Vec<OwnedFd>, [Client; 2]) {
    let mut client = connect(hosts, SPOILER).join(hosts.host(Side::Left), 7168, true);
    client.open(client.joined().general_queue.unwrap(), Role::General);
    client.open(client.landing_queue(), Role::Landing);
    client.done(Call::Receive(client.offer()));
    let mut smoothed = connect(hosts, SPOILER);
    let mut all = std::mem::take(&mut client.channels);
    all.extend(smoothed.call_beside(Client::smooth_call(INTERFACE), &[]).1);
    all.push(client.udp.take().unwrap().into());
    assert_eq!(all.len(), 6);
    (all, [client, smoothed])
}

/// Everything that can be done to the descriptors, whether it succeeds or not.
fn spoil(all: &[OwnedFd], daemon: &Daemon, bpffs: &Bpffs) {
    let (key, value) = (0u32, vec![0xffu8; 1 << 20]);
    let (key, value) = (&raw const key as u64, value.as_ptr() as u64);
    for map in MAPS.map(|at| &all[at]) {
        assert_eq!(freeze(map), Err(libc::EBUSY));
        let fd = map.as_raw_fd() as u64;
        // Overwritten; the credits' content is another test's matter.
        if map.as_raw_fd() != all[4].as_raw_fd() {
            assert_eq!(bpf(2, [fd, key, value, 0, 0]), Ok(()));
            assert_eq!(bpf(26, [0, 0, key, value, 1 | fd << 32]), Ok(()));
        }
        bpf(3, [fd, key, 0, 0, 0]).unwrap_err();
        bpf(27, [0, 0, key, 0, 1 | fd << 32]).unwrap_err();
        let path = std::ffi::CString::new(format!("{}/{fd}", bpffs.name())).unwrap();
        assert_eq!(bpf(6, [path.as_ptr() as u64, fd, 0, 0, 0]), Ok(()));
    }
    for fd in all {
        let _ = rustix::fs::flock(fd, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        let flags = libc::O_NONBLOCK | libc::O_ASYNC | libc::O_APPEND | libc::O_NOATIME;
        let signals = [(libc::F_SETOWN, daemon.id() as i32), (10, libc::SIGKILL)];
        for (what, argument) in [&signals[..], &[(libc::F_SETFL, flags)]].concat() {
            // SAFETY: numbers.
            unsafe { libc::fcntl(fd.as_raw_fd(), what, argument) };
        }
        for option in 1..100 {
            for level in [libc::SOL_SOCKET, libc::SOL_XDP, libc::SOL_UDP, libc::SOL_IP] {
                set_option(fd, level, option, &[1, 0, 0, 0]);
                set_option(fd, level, option, &[1; 32]);
            }
        }
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        let _ = rustix::net::connect_unspec(fd);
        let _ = rustix::net::bind(fd, &SocketAddrV4::new([127, 0, 0, 1].into(), 7169));
        let _ = rustix::net::listen(fd, 1);
        let _ = rustix::fs::ftruncate(fd, 0);
    }
}

/// The next program has the smoother, and a message of many packets lands at it.
fn is_in_working_order(hosts: &Hosts, daemon: &Daemon) {
    wait_until("the queues are free", || daemon.is_free());
    let asked = as_user(NEXT, || SharedSmoother::ask(&hosts.socket(Side::Left), INTERFACE));
    let _smoother = asked.expect("a smoother");
    let mut receiver = open_as(hosts, Side::Left, NEXT, 7168, 8 << 20);
    let mut sender = open_as(hosts, Side::Right, 0, 7300, 0);
    let (right, to) = (hosts.host(Side::Right), receiver.local());
    let connected = right.enter(|| Ok(sender.connect(to, &ConnectOptions::default())?));
    sender.send_copy(connected.unwrap(), &[7; 100_000], 1).unwrap();
    let landed = hosts.host(Side::Left).enter(|| {
        let begun = Instant::now();
        while receiver.try_recv()?.is_none() {
            sender.poll();
            receiver.wait(Duration::from_millis(1));
            assert!(begun.elapsed() < PATIENCE, "nothing comes");
        }
        Ok(receiver.counters().landing_packets)
    });
    assert!(landed.unwrap() > 60);
}

#[test]
fn what_is_handed_out_is_the_next_programs_in_working_order() {
    let Some(hosts) = Hosts::new("handed") else { return };
    let (left, _right) = (start(&hosts, ""), hosts.daemon(Side::Right));
    let bpffs = Bpffs::new(&hosts, SPOILER);
    let (all, clients) = get(&hosts);
    as_user(SPOILER, || spoil(&all, &left, &bpffs));
    // A queue is busy as long as its socket is open; maps stay open.
    let _maps = MAPS.map(|at| all[at].try_clone().unwrap());
    drop((all, clients));
    is_in_working_order(&hosts, &left);
    // No process has them mapped once the daemon is dead.
    wait_until("it has gone", || left.status().programs.is_empty());
    let (all, clients) = get(&hosts);
    left.kill();
    as_user(SPOILER, || MAPS.map(|at| assert_eq!(freeze(&all[at]), Ok(()))));
    drop((all, clients));
    let left = start(&hosts, "");
    is_in_working_order(&hosts, &left);
}

/// Answers with descriptors that are not read are in flight, and count for the daemon's user.
#[test]
fn unread_answers_keep_no_other_program_waiting() {
    let Some(hosts) = Hosts::new("unread") else { return };
    let few = ["prlimit", "--nofile=512:512"].map(str::to_owned);
    let few = [&few[..], &words(hosts.host(Side::Left))].concat();
    let _daemon = hosts.daemon_by(&few, Side::Left, &USERS.split(' ').collect::<Vec<_>>());
    let (number, call) = (9, Call::Status);
    let asks = postcard::to_stdvec(&Asked { number, call }).unwrap();
    // Each asks and reads nothing; it makes the daemon hang up, and comes again.
    let mut kept = Vec::new();
    for round in 0..800 {
        let mut client = Client::connect_as(&hosts.socket(Side::Left), SPOILER);
        if client.is_let_in() {
            (0..round % 12).all(|_| client.try_send_beside(&asks, &[]));
            client.try_send_beside(&[0xff; 9][..round % 2 * 9], &[]);
            kept.push(client);
        }
    }
    let mut next = connect(&hosts, NEXT).join(hosts.host(Side::Left), 7300, true);
    next.open(next.landing_queue(), Role::Landing);
    // As many as it may have connected, and as many that were hung up.
    assert!(kept.len() <= 256, "{} connections hold something", kept.len());
    drop(kept);
    let again = || Client::connect_as(&hosts.socket(Side::Left), SPOILER).is_let_in();
    wait_until("its user is let in again", again);

    // Where others of the daemon's user leave no room, the answer comes when there is some.
    let (one, other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let beside = [next.channels[0].as_fd(); 250];
    for _ in 0..3 {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&beside));
        rustix::net::sendmsg(&one, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::empty()).unwrap();
    }
    next.send(Call::Status, &[]);
    assert!(next.hears_nothing(Duration::from_millis(100)));
    connect(&hosts, NEXT);
    drop((one, other));
    assert_eq!(next.receive().expect("the daemon goes on").1.len(), 1);
}

#[test]
fn a_port_is_shown_by_a_udp_socket_of_the_daemons_network_alone() {
    let Some(hosts) = Hosts::new("port") else { return };
    let (_daemon, host, other) = (start(&hosts, ""), hosts.host(Side::Left), hosts.host(Side::Right));
    let (there, own) = (other.name(), SocketAddrV4::new(host.address(), 7168));
    run(&format!("ip -n {there} address add {}/32 dev lo", own.ip()));
    let pings = host.write_file("/proc/sys/net/ipv4/ping_group_range", "0 4294967294");
    pings.unwrap();
    let mut client = connect(&hosts, SPOILER);
    // UDP-Lite and ICMP; the address in another namespace; another device; and the interface.
    let protocols = [136u32, 1, 17, 17, 17];
    for (at, device) in ["", "", "", "lo", INTERFACE].iter().enumerate() {
        let host = if at == 2 { other } else { host };
        let shown = host.enter(|| {
            let protocol = Some(Protocol::from_raw(protocols[at].try_into()?));
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, protocol)?;
            let device = device.as_bytes();
            set_option(&socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device);
            rustix::net::bind(&socket, &own)?;
            Ok(socket)
        });
        let shown = shown.unwrap();
        let (reply, _) = client.call_beside(Client::join_call(true), &[shown.as_fd()]);
        assert_eq!(matches!(reply, Reply::Joined(_)), at == 4, "{at}: {reply:?}");
    }
}

/// A connection that asks twice for what it has one of.
#[test]
fn what_a_connection_takes_twice_is_given_back() {
    let Some(hosts) = Hosts::new("twice") else { return };
    let host = hosts.host(Side::Left);
    let ip = format!("ip -n {}", host.name());
    run(&format!(
        "{ip} link add lm1 type veth peer name lm2 && {ip} address add 198.19.0.1/24 dev lm1"
    ));
    run(&format!("{ip} link set lm1 up && {ip} link set lm2 up"));
    let daemon = start(&hosts, "--interface lm1");
    let mut first = connect(&hosts, SPOILER).join(host, 7168, false);
    daemon.hand_over();
    let daemon = start(&hosts, "--interface lm1");
    let mut client = connect(&hosts, SPOILER).join(host, 7301, false);
    assert_eq!(client.call(Client::smooth_call(INTERFACE)), Reply::Smoother);
    assert_eq!(client.call(Client::smooth_call(INTERFACE)), Reply::Smoother);
    let mut told = client.refused(Client::smooth_call("lm1"), &[]);
    // A second endpoint, by an earlier one's token.
    let token = first.joined().token;
    told += &client.refused(Call::Rejoin { token }, &[first.udp.as_ref().unwrap().as_fd()]);
    assert_eq!(told.matches("open another one").count(), 2, "{told}");
    drop((client, connect(&hosts, SPOILER).rejoin(&mut first)));
    wait_until("all is given back", || {
        let mut interfaces = daemon.status().interfaces.into_iter();
        daemon.is_free() && interfaces.all(|interface| interface.smoother.is_none())
    });
}

/// Calls that wait when the daemon goes on: of one user on many connections, of the other on one.
#[test]
fn users_take_turns_however_many_connections_they_have() {
    let Some(hosts) = Hosts::new("turns") else { return };
    let daemon = start(&hosts, "");
    let mut crowd: Vec<Client> = (0..120).map(|_| connect(&hosts, SPOILER)).collect();
    let mut next = connect(&hosts, NEXT).join(hosts.host(Side::Left), 7168, true);
    let pid = rustix::process::Pid::from_raw(daemon.id() as i32).unwrap();
    rustix::process::kill_process(pid, Signal::STOP).unwrap();
    for client in &mut crowd {
        for _ in 0..16 {
            client.send(Call::Hello { version: VERSION }, &[]);
        }
        client.send(Call::Status, &[]);
    }
    const CALLS: u64 = 50;
    next.send(Call::Status, &[]);
    for _ in 0..CALLS {
        next.send(Call::Touched { sessions: Vec::new() }, &[]);
    }
    next.send(Call::Status, &[]);
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    let mut calls = Vec::new();
    while calls.len() < 2 {
        for file in next.receive().expect("the daemon goes on").1 {
            let status: Status = serde_json::from_reader(std::fs::File::from(file)).unwrap();
            calls.push(status.calls);
        }
    }
    // One of theirs for each of its own.
    let theirs = calls[1] - calls[0] - CALLS - 1;
    assert!(theirs <= CALLS + 10, "{theirs} calls between {CALLS}");
}

#[test]
fn a_user_asks_for_no_more_sessions_than_leave_others_some() {
    let Some(hosts) = Hosts::with_queues("asks", 8) else {
        return;
    };
    let (_daemon, host) = (start(&hosts, ""), hosts.host(Side::Left));
    let to = SocketAddrV4::new(hosts.host(Side::Right).address(), 7168);
    let ask = |client: &mut Client| matches!(client.try_ask(to, 1 << 20), Reply::Requested(_));
    let join = |uid, port| connect(&hosts, uid).join(host, port, false);
    let mut crowd = [7201, 7202, 7203, 7204].map(|port| join(SPOILER, port));
    let count = |client: &mut Client| (0..700).take_while(|_| ask(client)).count();
    let asked = crowd.each_mut().map(count);
    assert_eq!(asked, [640, 640, 640, 128]);
    assert!(ask(&mut join(NEXT, 7301)));
}
