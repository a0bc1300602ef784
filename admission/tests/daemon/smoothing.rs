//! Programs without privileges that send real-time messages: they share their daemon's smoother.

use std::net::SocketAddrV4;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use lm_dataplane::memory::Mapping;
use lm_dataplane::{
    Admission, AdmissionConfig, ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, PeerId, Session,
    SharedSmoother,
};
use lm_protocol::smoother::{Credits, Parameters};
use lm_realtime::{RealTime, RtSocket, SendOptions, SocketConfig, monotonic};
use rustix::process::Signal;
use xtask::bed::{Host, INTERFACE};

use crate::bed::{Daemon, Hosts, Side, beside, wait_until};
use crate::program::{Client, EXTREMES, Words, as_user};

const USER: u32 = 2001;
const LINK: [&str; 4] = ["--link-rate", "100M", "--allow-uid", "2001"];

fn qdiscs(host: &Host) -> String {
    shown(host, "qdisc")
}

/// What there is of a kind on the interface.
fn shown(host: &Host, kind: &str) -> String {
    let words = ["-n", host.name(), kind, "show", "dev", INTERFACE];
    let shown = Command::new("tc").args(words).output().unwrap();
    assert!(shown.status.success(), "{shown:?}");
    String::from_utf8(shown.stdout).unwrap()
}

pub(crate) fn tc(host: &Host, words: &str) {
    let mut command = Command::new("tc");
    command.args(["-n", host.name()]).args(words.split(' '));
    assert!(command.status().unwrap().success(), "{words}");
}

/// An endpoint of a program without privileges.
fn open(hosts: &Hosts, side: Side, port: u16) -> Endpoint {
    open_as(hosts, side, USER, port, 0)
}

/// One of this user, with `landing_len` bytes of memory to land in.
pub(crate) fn open_as(hosts: &Hosts, side: Side, uid: u32, port: u16, landing_len: u64) -> Endpoint {
    let config = EndpointConfig {
        interface: INTERFACE.into(),
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
    let opened = hosts
        .host(side)
        .enter(|| Ok(as_user(uid, || Endpoint::open(&config))));
    opened.unwrap().expect("a daemon")
}

fn smoother(daemon: &Daemon) -> lm_admission::daemon::status::SmootherStatus {
    daemon.interface().smoother.expect("programs have it")
}

/// A program on the left that has more to send than may leave.
struct Program {
    endpoint: Endpoint,
    real_time: RealTime,
    socket: RtSocket,
    peer: PeerId,
    next: Instant,
}

impl Program {
    fn start(hosts: &Hosts, port: u16, to: SocketAddrV4) -> Program {
        let mut endpoint = open(hosts, Side::Left, port);
        let real_time = RealTime::new(&mut endpoint, None, monotonic).unwrap();
        let mut socket = real_time
            .socket(&mut endpoint, 1, &SocketConfig::default())
            .unwrap();
        let options = ConnectOptions {
            session: Session::Later,
            ..ConnectOptions::default()
        };
        let connected = hosts
            .host(Side::Left)
            .enter(|| Ok(endpoint.connect(to, &options)));
        let peer = connected.unwrap().unwrap();
        socket.connect(&mut endpoint, peer, 1).unwrap();
        Program {
            endpoint,
            real_time,
            socket,
            peer,
            next: Instant::now(),
        }
    }

    fn drive(&mut self) {
        if Instant::now() >= self.next {
            self.next += Duration::from_millis(5);
            self.socket.send(&[7; 1000], SendOptions::default()).unwrap();
        }
        for _ in 0..8 {
            let _ = self.endpoint.try_send_copy(self.peer, &[3; 1000], 0);
        }
        self.endpoint.poll();
        while self.endpoint.try_completion().is_some() {}
    }
}

/// Receives all of that on the right, until it shall end: how many real-time messages.
fn receive(mut endpoint: Endpoint, ends: &AtomicBool) -> usize {
    let real_time = RealTime::new(&mut endpoint, None, monotonic).unwrap();
    // Its daemon has no smoother.
    assert_eq!(real_time.credits_per_second(), None);
    let mut socket = real_time
        .socket(&mut endpoint, 1, &SocketConfig::default())
        .unwrap();
    let mut received = 0;
    while !ends.load(Relaxed) {
        endpoint.wait(Duration::from_millis(1));
        while let Ok(Some(_)) = endpoint.try_recv() {}
        received += std::iter::from_fn(|| socket.recv()).count();
    }
    received
}

/// Drives programs for so long. Together they send no more than there are credits for, and each sends some of it.
fn share(programs: &mut [Program], shared: &SharedSmoother, time: Duration) {
    let others = || shared.as_ref().sent().1;
    let sent = |program: &Program| program.endpoint.counters().messages_sent;
    let (begun, before, mut rates) = (Instant::now(), others(), Vec::new());
    let each: Vec<u64> = programs.iter().map(sent).collect();
    let waits = |programs: &[Program]| {
        programs
            .iter()
            .zip(&each)
            .any(|(program, before)| sent(program) == *before)
    };
    // On a busy machine one may have to wait for the other's answers.
    while begun.elapsed() < time || (waits(programs) && begun.elapsed() < 10 * time) {
        programs.iter_mut().for_each(Program::drive);
        rates.push(f64::from(shared.as_ref().rate().credits_per_second()));
    }
    let lambda = rates.iter().sum::<f64>() / rates.len() as f64;
    let part = (others() - before) as f64 / begun.elapsed().as_secs_f64() / lambda;
    assert!(part < 1.05, "{part} of λ");
    assert!(!waits(programs), "nothing has left of one of them");
}

#[test]
fn programs_share_a_smoother_that_outlives_their_daemon() {
    let Some(hosts) = Hosts::new("smoothing") else {
        return;
    };
    let (near, _far) = (
        hosts.daemon_with(Side::Left, &LINK),
        hosts.daemon_with(Side::Right, &LINK[2..]),
    );
    let before = qdiscs(hosts.host(Side::Left));
    assert_eq!(near.interface().smoother, None);
    let receiver = open(&hosts, Side::Right, 7168);
    let (to, host) = (receiver.local(), hosts.host(Side::Right));
    // In its namespace: it looks for the neighbours whose packets come by the kernel's socket.
    let receives = |ends: &AtomicBool| host.enter(|| Ok(receive(receiver, ends))).unwrap();
    let ((), received) = beside(receives, || send(&hosts, near, to, &before));
    assert!(received > 100, "{received} messages");
}

fn send(hosts: &Hosts, near: Daemon, to: SocketAddrV4, before: &str) {
    let mut programs = [7400, 7401].map(|port| Program::start(hosts, port, to));
    let shared = as_user(USER, || SharedSmoother::ask(&hosts.socket(Side::Left), INTERFACE)).unwrap();
    let status = smoother(&near);
    assert_eq!((status.programs, status.holds_kernel), (3, true));
    assert!(qdiscs(hosts.host(Side::Left)).contains("htb 4c4d:"));
    for program in &programs {
        assert!(program.real_time.credits_per_second() >= Some(4000));
        assert!(program.real_time.holds_kernel());
    }

    // Each would send all of it: together they send what there is, and real time is not held back.
    let run = |programs: &mut [Program], millis| share(programs, &shared, Duration::from_millis(millis));
    wait_until("both are known there", || {
        programs.iter_mut().for_each(Program::drive);
        let mut programs = programs.iter();
        programs.all(|program| program.endpoint.counters().messages_sent > 0)
    });
    run(&mut programs, 1000);
    for program in &programs {
        let statistics = program.socket.statistics();
        assert!(
            statistics.sent > 150 && statistics.reported_whole > 100,
            "{statistics:?}"
        );
    }

    // A loss that one tells lowers the rate for both.
    let signals = smoother(&near).signals;
    wait_until("the daemon hears of it", || {
        // One within 10 ms of a signal is none.
        shared.as_ref().tell_lost(1);
        smoother(&near).signals > signals
    });

    // The daemon is killed: its credits come as before, at the last rate.
    near.kill();
    let rate = shared.as_ref().rate();
    run(&mut programs, 500);
    assert_eq!(shared.as_ref().rate(), rate);
    assert!(qdiscs(hosts.host(Side::Left)).contains("htb 4c4d:"));

    // The next one goes on from there, and programs come back to it.
    let near = hosts.daemon_with(Side::Left, &LINK);
    wait_until("both are back", || {
        programs.iter_mut().for_each(Program::drive);
        near.interface()
            .smoother
            .is_some_and(|smoother| smoother.programs == 2)
    });
    let again = as_user(USER, || SharedSmoother::ask(&hosts.socket(Side::Left), INTERFACE)).unwrap();
    assert_eq!(
        again.as_ref().sent(),
        shared.as_ref().sent(),
        "the credits are others"
    );
    run(&mut programs, 500);

    // With the last program goes what was set for it.
    drop((programs, again));
    wait_until("the interface is as it was", || {
        near.interface().smoother.is_none() && qdiscs(hosts.host(Side::Left)) == before
    });
    near.stop();
    assert!(hosts.pins(Side::Left).is_empty());
}

/// What a program that was killed had declared is given back when the last one is gone.
#[test]
fn programs_declare_their_rates_together() {
    let Some(hosts) = Hosts::new("declared") else {
        return;
    };
    let daemon = hosts.daemon_with(Side::Left, &LINK);
    let ask = || as_user(USER, || SharedSmoother::ask(&hosts.socket(Side::Left), INTERFACE)).unwrap();
    let (killed, other) = (ask(), ask());
    assert_eq!(killed.as_ref().declare(6000), Ok(()));
    drop(killed);
    assert_eq!(other.as_ref().declare(96), Err(95));
    drop(other);
    wait_until("no program has it", || daemon.interface().smoother.is_none());
    assert_eq!(ask().as_ref().declare(6095), Ok(()));
}

/// Memory that others write: for ten seconds a program stores extremes into each word of the page, while its owner and another program use it.
/// Afterwards the owner hears, refreshes and gives the kernel's traffic its rate back; so does the next one, which finds the same page.
#[test]
fn whatever_programs_write_into_the_page_its_owner_goes_on() {
    let Some(hosts) = Hosts::new("extremes") else {
        return;
    };
    let (path, near) = (hosts.socket(Side::Left), hosts.daemon_with(Side::Left, &LINK));
    let mut attacker = Client::connect_as(&path, USER).hello();
    let (_, fds) = attacker.call_beside(Client::smooth_call(INTERFACE), &[]);
    let page = Words(Mapping::of_file(fds[0].as_fd(), size_of::<Credits>() as u64).unwrap());
    let ask = || as_user(USER, || SharedSmoother::ask(&path, INTERFACE)).unwrap();
    let honest = ask();
    let credits = honest.as_ref();
    let is_held = || shown(hosts.host(Side::Left), "class").contains("rate 64Kbit");
    wait_until("real time has it all", || {
        (0..100).for_each(|_| credits.spend(10, monotonic()));
        is_held()
    });
    let until_it_ends = |ends: &AtomicBool, work: &dyn Fn()| {
        while !ends.load(Relaxed) {
            work()
        }
    };
    let writes =
        |ends: &AtomicBool| until_it_ends(ends, &|| EXTREMES.iter().for_each(|with| page.fill(*with)));
    let uses = |ends: &AtomicBool| {
        until_it_ends(ends, &|| {
            credits.spend(10, monotonic());
            credits.give_back(credits.take(5, monotonic()));
            let _ = (credits.next(), credits.declare(5));
            let _ = credits.rate().refresh_period();
            credits.tell_delayed(Duration::MAX);
        })
    };
    let begun = Instant::now();
    let asks = || {
        while begun.elapsed() < Duration::from_secs(10) {
            smoother(&near);
        }
    };
    beside(writes, || beside(uses, asks));
    let hears = |daemon: &Daemon, credits: &Credits| {
        let signals = smoother(daemon).signals;
        wait_until("the owner hears of a loss", || {
            credits.tell_lost(1);
            smoother(daemon).signals > signals
        });
        wait_until("the kernel's traffic has its rate back", || !is_held());
        assert_eq!(credits.link_frames_per_second().map(u32::from), Some(8127));
        wait_until("a credit comes", || credits.take(1, monotonic()) > 0);
    };
    hears(&near, credits);
    near.kill();
    for extreme in EXTREMES {
        page.fill(extreme);
        let near = hosts.daemon_with(Side::Left, &LINK);
        hears(&near, ask().as_ref());
        near.kill();
    }
}

#[test]
fn who_may_not_have_a_smoother_is_told_why() {
    let Some(hosts) = Hosts::new("unsmoothed") else {
        return;
    };
    let daemon = hosts.daemon_with(Side::Left, &LINK);
    let _without = hosts.daemon_with(Side::Right, &LINK[2..]);
    let (socket, wants) = (hosts.socket(Side::Left), Client::smooth_call);
    let mut client = Client::connect(&socket).hello();
    client.refused_for(wants("eth7"), &[], "start it with --interface eth7");
    let mut stranger = Client::connect_as(&socket, 2002).hello();
    stranger.refused_for(wants(INTERFACE), &[], "--allow-uid 2002");
    Client::connect(&socket).refused_for(wants(INTERFACE), &[], "Hello");
    let mut client = Client::connect(&hosts.socket(Side::Right)).hello();
    client.refused_for(wants(INTERFACE), &[], "--link-rate 100M");
    assert_eq!(daemon.interface().smoother, None);

    // A program whose daemon has none makes its own, if it knows its link.
    let mut endpoint = open(&hosts, Side::Right, 7168);
    let link = Parameters::of_link(std::num::NonZeroU64::new(100_000_000).unwrap(), 1514);
    let real_time = RealTime::new(&mut endpoint, Some(link), monotonic).unwrap();
    assert_eq!(real_time.credits_per_second(), Some(4000));
}

#[test]
fn a_reload_changes_the_rate_of_the_link() {
    let Some(hosts) = Hosts::new("relink") else {
        return;
    };
    let write = |link: &str| hosts.configure(Side::Left, &format!("allow-uid = [0]\n{link}"));
    let file = write("link-rate = \"100M\"");
    let mut daemon = hosts.configured(Side::Left, &file);
    let shared = SharedSmoother::ask(&hosts.socket(Side::Left), INTERFACE).unwrap();
    let rate = || shared.as_ref().rate().credits_per_second();
    assert_eq!(rate(), 4000);
    write("link-rate = \"500M\"");
    daemon.signal(Signal::HUP);
    daemon.await_text("read again").unwrap();
    assert_eq!(rate(), 20_000);
    assert!(shared.as_ref().holds_kernel());
    // Without any there is no smoother, and programs have this one.
    write("");
    daemon.signal(Signal::HUP);
    daemon.await_text("link-rate has changed: restart").unwrap();
    assert_eq!(rate(), 20_000);
    daemon.stop().unwrap();
}

#[test]
fn a_root_qdisc_that_somebody_set_stays_unless_it_may_be_replaced() {
    let Some(hosts) = Hosts::new("qdisc") else { return };
    let left = hosts.host(Side::Left);
    let foreign = format!("qdisc add dev {INTERFACE} root handle 77: bfifo limit 12345");
    tc(left, &foreign);
    let before = qdiscs(left);
    let socket = hosts.socket(Side::Left);
    let logs = [&LINK[..], &["--log", "debug"]].concat();
    let daemon = hosts.daemon_with(Side::Left, &logs);
    let shared = SharedSmoother::ask(&socket, INTERFACE).unwrap();
    // Credits come all the same.
    let status = smoother(&daemon);
    assert_eq!((status.holds_kernel, status.packets_per_second), (false, 4000));
    assert!(!shared.as_ref().holds_kernel());
    shared.as_ref().tell_lost(1);
    wait_until("the daemon hears of it", || {
        smoother(&daemon).packets_per_second < 4000
    });
    assert_eq!(qdiscs(left), before);
    drop(shared);
    let output = daemon.stop();
    for said in ["(bfifo 77:)", "--replace-qdisc", "packets_per_second=3600"] {
        assert!(output.stderr.contains(said), "{said}: {}", output.stderr);
    }

    let replaces = ["--replace-qdisc", "--law", "paper", "--tolerance", "1"];
    let daemon = hosts.daemon_with(Side::Left, &[&LINK[..], &replaces].concat());
    let shared = SharedSmoother::ask(&socket, INTERFACE).unwrap();
    assert!(smoother(&daemon).holds_kernel && shared.as_ref().holds_kernel());
    // At figure 5's law RP falls to RPmin, and what of 40 was lost is tolerated at the next refresh.
    wait_until("RP is 5 ms", || smoother(&daemon).packets_per_second == 8000);
    shared.as_ref().spend(40, monotonic());
    shared.as_ref().tell_lost(40);
    shared.as_ref().spend(1, monotonic());
    wait_until("it is refreshed", || smoother(&daemon).credits == 40);
    let status = smoother(&daemon);
    assert_eq!((status.signals, status.packets_per_second), (0, 8000));
    assert!(qdiscs(left).contains("htb 4c4d:"), "{}", qdiscs(left));
    drop(shared);
    wait_until("it is back", || qdiscs(left) == before);
    daemon.stop();
}
