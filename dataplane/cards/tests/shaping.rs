//! Shaping under this kernel: the rate is kept, EF passes, and the interface is as before at the end, whatever the end is.

#[path = "../../tests/bed/mod.rs"]
mod bed;

use std::io::Write as _;
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use bed::{Namespace, Pair};
use caps::{CapSet, Capability};
use lm_cards::ethtool::{Ethtool, EthtoolError};
use lm_cards::{Foreign, Interface, JournalError, Shaping, ShapingError};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;

/// 1472 bytes of payload are so many on the wire.
const WIRE_LEN: u64 = 1538;
const MBIT: u64 = 125_000;

fn va() -> Interface {
    Interface::by_name("va").expect("va")
}

/// A tool of iproute2's, as JSON; in the calling thread's namespace.
fn shown(program: &str, words: &str) -> Value {
    let output = Command::new(program).args(words.split_whitespace()).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{program} {words}: {error}"))
}

/// The class; `tc` has no JSON of HTB's.
fn class() -> String {
    let output = Command::new("tc").args(["class", "show", "dev", "va"]).output();
    String::from_utf8(output.expect("tc").stdout).expect("text")
}

fn root() -> Value {
    let all = shown("tc", "-s -j qdisc show dev va");
    let all = all.as_array().expect("a list");
    all.iter()
        .find(|one| one["root"] == true)
        .cloned()
        .unwrap_or(Value::Null)
}

/// All that shaping changes, as other tools show it.
#[derive(Debug, PartialEq)]
struct Settings {
    kind: Value,
    handle: Value,
    options: Value,
    gso_max_segs: Value,
    tso: Vec<bool>,
}

fn settings() -> Settings {
    let root = root();
    let features = Ethtool::open(va().index)
        .expect("a socket")
        .features()
        .expect("veth tells");
    let tso = features.iter().filter(|one| one.name.starts_with("tx-tcp"));
    Settings {
        kind: root["kind"].clone(),
        handle: root["handle"].clone(),
        options: root["options"].clone(),
        gso_max_segs: shown("ip", "-d -j link show va")[0]["gso_max_segs"].clone(),
        tso: tso.map(|one| one.on).collect(),
    }
}

fn record() -> PathBuf {
    let namespace = std::fs::metadata("/proc/thread-self/ns/net")
        .expect("procfs")
        .ino();
    PathBuf::from(format!("/run/lm/shaping/{}-{namespace}.json", va().index))
}

/// A sender in `a` and a receiver in `b`.
fn sockets(pair: &Pair) -> [UdpSocket; 2] {
    let to = pair.b.run(|| UdpSocket::bind("10.77.0.2:9").expect("free"));
    let from = pair.a.run(|| UdpSocket::bind("10.77.0.1:0").expect("free"));
    from.connect("10.77.0.2:9").expect("a route");
    from.set_nonblocking(true).expect("a socket");
    to.set_read_timeout(Some(Duration::from_millis(200)))
        .expect("a socket");
    [from, to]
}

/// Bytes a second, on the wire, of a flood that passes.
fn passes([from, to]: &[UdpSocket; 2]) -> f64 {
    let end = Instant::now() + Duration::from_millis(1200);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while Instant::now() < end {
                // What its queue has no room for is refused, or dropped.
                while from.send(&[0; 1472]).is_ok() && Instant::now() < end {}
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        // What waited before, and the first burst, do not count.
        let begin = end - Duration::from_secs(1);
        let mut count = 0;
        while Instant::now() < end {
            let came = to.recv(&mut [0; 2048]).is_ok();
            count += u64::from(came && Instant::now() >= begin);
        }
        (count * WIRE_LEN) as f64
    })
}

fn empty([_, to]: &[UdpSocket; 2]) {
    while to.recv(&mut [0; 2048]).is_ok() {}
}

#[test]
fn a_rate_is_kept_and_changed_and_the_interface_is_restored() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let sockets = sockets(&pair);
    pair.a.run(|| {
        let before = settings();
        assert_eq!(before.kind, "noqueue");
        let mut shaping = Shaping::apply(&va(), 10 * MBIT, Foreign::Keep).expect("HTB");
        let now = settings();
        assert_eq!((now.kind, now.handle), ("htb".into(), "4c4d:".into()));
        assert_eq!(now.gso_max_segs, 2);
        assert!(
            before.tso.contains(&true) && !now.tso.contains(&true),
            "{:?}",
            now.tso
        );
        assert!(record().exists());
        // A frame takes 3 to 12 ms: a core that comes late by less costs nothing of what two frames may leave at once.
        for mbit in [2, 4, 1] {
            shaping.set_rate(mbit * MBIT).expect("the class");
            assert!(class().contains("htb 4c4d:2 "), "{}", class());
            assert!(class().contains(&format!("rate {mbit}Mbit ")), "{}", class());
            let passed = passes(&sockets) / (mbit * MBIT) as f64;
            assert!((0.9..=1.1).contains(&passed), "{mbit} Mbit/s: {passed:.3} of it");
        }
        let traffic = shaping.traffic().expect("the class");
        // ARP is short.
        let all_long = u64::from(traffic.packets) * 1514;
        assert!(
            (all_long - 10 * 1514..=all_long).contains(&traffic.bytes),
            "{traffic:?}"
        );
        assert!(traffic.dropped > 0, "{traffic:?}");
        drop(shaping);
        assert_eq!(settings(), before);
        assert!(!record().exists());
        empty(&sockets);
    });
}

#[test]
fn what_is_marked_ef_does_not_wait() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let others = sockets(&pair);
    let ef = pair.a.run(|| UdpSocket::bind("10.77.0.1:0").expect("free"));
    rustix::net::sockopt::set_ip_tos(&ef, 46 << 2).expect("a socket");
    pair.a.run(|| {
        // A frame takes 154 ms.
        let shaping = Shaping::apply(&va(), MBIT / 100, Foreign::Keep).expect("HTB");
        for number in 0..20_u8 {
            others[0].send(&[number; 1472]).expect("room");
        }
        for number in 100..150 {
            ef.send_to(&[number; 1472], "10.77.0.2:9").expect("room");
        }
        let (mut datagram, mut marked) = ([0; 2048], 0);
        let begun = Instant::now();
        while marked < 50 {
            others[1].recv(&mut datagram).expect("EF comes at once");
            marked += u32::from(datagram[0] >= 100);
        }
        assert!(
            begun.elapsed() < Duration::from_millis(500),
            "{:?}",
            begun.elapsed()
        );
        let root = root();
        assert_eq!(root["options"]["direct_packets_stat"], 50, "{root}");
        assert!(root["qlen"].as_u64() > Some(10), "{root}");
        assert!(shaping.traffic().expect("the class").waiting > 10);
    });
}

/// A TCP connection keeps the bound of segments that its interface had when it connected.
#[test]
fn packets_of_a_connection_that_was_there_are_cut() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let listener = pair.b.run(|| TcpListener::bind("10.77.0.2:9").expect("free"));
    pair.a.run(|| {
        let mut from = TcpStream::connect("10.77.0.2:9").expect("it listens");
        let (mut to, _) = listener.accept().expect("it connects");
        let megabyte = vec![1; 1 << 20];
        std::thread::scope(|scope| {
            scope.spawn(move || std::io::copy(&mut to, &mut std::io::sink()).expect("a stream"));
            from.write_all(&megabyte).expect("a stream");
            let _shaping = Shaping::apply(&va(), 10 * MBIT, Foreign::Keep).expect("HTB");
            let (begun, mut longest) = (Instant::now(), 0.0_f64);
            from.set_write_timeout(Some(Duration::from_millis(1)))
                .expect("not 0");
            while begun.elapsed() < Duration::from_millis(300) {
                let _full = from.write(&megabyte);
                let all = shown("tc", "-s -j qdisc show dev va");
                let leaf = all
                    .as_array()
                    .expect("a list")
                    .iter()
                    .find(|one| one["root"] != true);
                let leaf = leaf.expect("the class has one");
                let number = |name: &str| leaf[name].as_f64().expect(name);
                if number("qlen") > 0.0 {
                    longest = longest.max(number("backlog") / number("qlen"));
                }
            }
            from.shutdown(Shutdown::Both).expect("a stream");
            // Two segments have 66 bytes of headers more than one frame.
            assert!((1.0..=1514.0).contains(&longest), "{longest} bytes in the mean");
        });
    });
}

#[test]
fn a_root_qdisc_that_somebody_set_is_left_alone_or_comes_back() {
    if !bed::root() {
        return;
    }
    for (qdisc, classes, is_restorable) in [
        ("handle 77: bfifo limit 12345", "", true),
        ("handle 78: tbf rate 1mbit burst 5000 limit 30000", "", true),
        (
            "handle 79: htb default 1",
            "parent 79: classid 79:1 htb rate 1mbit",
            false,
        ),
    ] {
        let pair = Pair::new(1);
        pair.a.command("tc", &format!("qdisc add dev va root {qdisc}"));
        if !classes.is_empty() {
            pair.a.command("tc", &format!("class add dev va {classes}"));
        }
        pair.a.run(|| {
            let before = settings();
            let error = Shaping::apply(&va(), MBIT, Foreign::Keep).expect_err("it is somebody's");
            let text = error.to_string();
            assert!(matches!(error, ShapingError::Foreign { .. }), "{text}");
            assert!(
                text.contains(&qdisc[7..9]) && text.contains("tc qdisc del dev va root"),
                "{text}"
            );
            assert_eq!(settings(), before);
            let replaced = Shaping::apply(&va(), MBIT, Foreign::Replace);
            match (replaced, is_restorable) {
                (Ok(shaping), true) => {
                    assert_eq!(settings().kind, "htb");
                    drop(shaping);
                }
                (Err(error @ ShapingError::Foreign { .. }), false) => {
                    assert!(error.to_string().contains("could not be restored"), "{error}");
                }
                (result, _) => panic!("{qdisc}: {result:?}"),
            }
            assert_eq!(settings(), before, "{qdisc}");
            assert!(!record().exists());
        });
    }
}

#[test]
fn what_somebody_sets_meanwhile_stays() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    pair.a.run(|| {
        let mut shaping = Shaping::apply(&va(), MBIT, Foreign::Keep).expect("HTB");
        pair.a
            .command("tc", "qdisc replace dev va root handle 77: bfifo limit 12345");
        pair.a.ip("link set va gso_max_segs 17");
        let error = shaping.set_rate(2 * MBIT).expect_err("the class is gone");
        assert!(matches!(error, ShapingError::Device(_)), "{error}");
        drop(shaping);
        let now = settings();
        assert_eq!((now.handle, now.gso_max_segs), ("77:".into(), 17.into()));
        assert!(!record().exists());
    });
}

/// A process that shapes `va` in the calling thread's namespace until it is killed.
fn shaped_elsewhere() -> Pid {
    // SAFETY: the child calls what other threads' locks do not matter for, but for the allocator's, which the C library sees to.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "{}", std::io::Error::last_os_error());
    if pid == 0 {
        // With the thread that made it.
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        let shaping = Shaping::apply(&va(), MBIT, Foreign::Keep);
        while shaping.is_ok() {
            // SAFETY: no pointers. Until it is killed.
            unsafe { libc::pause() };
        }
        std::process::abort();
    }
    let end = Instant::now() + Duration::from_secs(20);
    // The last change.
    while settings().tso.contains(&true) {
        assert!(Instant::now() < end, "the child shapes nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    Pid::from_raw(pid).expect("positive")
}

#[test]
fn after_a_kill_the_next_start_restores() {
    if !bed::root() {
        return;
    }
    for applies in [true, false] {
        let pair = Pair::new(1);
        pair.a.run(|| {
            let before = settings();
            let child = shaped_elsewhere();
            let error = Shaping::apply(&va(), MBIT, Foreign::Replace).expect_err("it lives");
            let is_child = |pid| pid == child.as_raw_pid() as u32;
            assert!(
                matches!(error, ShapingError::Journal(JournalError::InUse { pid }) if is_child(pid)),
                "{error}"
            );
            assert!(matches!(
                Shaping::recover(&va()),
                Err(ShapingError::Journal(JournalError::InUse { .. }))
            ));
            kill_process(child, Signal::KILL).expect("our child");
            waitpid(Some(child), WaitOptions::empty()).expect("our child");
            assert_eq!(settings().handle, "4c4d:");
            if applies {
                let shaping = Shaping::apply(&va(), 2 * MBIT, Foreign::Keep).expect("HTB");
                assert!(class().contains("rate 2Mbit "), "{}", class());
                drop(shaping);
            } else {
                assert!(Shaping::recover(&va()).expect("it is dead"));
            }
            assert_eq!(settings(), before);
            assert!(!record().exists());
            assert!(!Shaping::recover(&va()).expect("nothing is left"));
        });
    }
}

/// The number of a namespace's inode comes again as soon as it is gone, and in each of them the first interface has the same index.
#[test]
fn what_was_left_in_a_namespace_is_not_undone_in_one_of_its_number() {
    if !bed::root() {
        return;
    }
    let gone = Pair::new(1);
    let text = gone.a.run(|| {
        let child = shaped_elsewhere();
        kill_process(child, Signal::KILL).expect("our child");
        waitpid(Some(child), WaitOptions::empty()).expect("our child");
        let text = std::fs::read_to_string(record()).expect("what is left");
        std::fs::remove_file(record()).expect("ours");
        text
    });
    drop(gone);
    // Earlier versions did not write down whose it is.
    for (text, is_old) in [
        (text.clone(), false),
        (text.replace("\"namespace\"", "\"\""), true),
    ] {
        let pair = Pair::new(1);
        pair.a.run(|| {
            // The namespace that has that number now finds it under that number's name.
            std::fs::write(record(), text).expect("a folder");
            let before = settings();
            pair.a.command("ethtool", "-K va tso off");
            let wanted = if is_old { before } else { settings() };
            let recovered = Shaping::recover(&va()).expect("its owner is dead");
            assert_eq!((recovered, settings()), (is_old, wanted));
            assert!(!record().exists());
        });
    }
}

#[test]
fn shaping_takes_privileges() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    pair.a.run(|| {
        let before = settings();
        // Of this thread alone, which ends right after.
        caps::drop(None, CapSet::Effective, Capability::CAP_NET_ADMIN).expect("root has it");
        let error = Shaping::apply(&va(), MBIT, Foreign::Keep).expect_err("not permitted");
        assert!(
            matches!(error, ShapingError::Device(EthtoolError::NotPermitted { .. })),
            "{error}"
        );
        assert!(error.to_string().contains("CAP_NET_ADMIN"));
        assert_eq!(settings(), before);
        assert!(!record().exists());
    });
}

#[test]
fn an_interface_that_goes_takes_its_settings_along() {
    if !bed::root() {
        return;
    }
    let host = Namespace::new();
    host.ip("link add va type veth peer name vb");
    host.run(|| {
        let mut shaping = Shaping::apply(&va(), MBIT, Foreign::Keep).expect("HTB");
        let record = record();
        assert!(record.exists());
        host.ip("link delete va");
        for error in [
            shaping.set_rate(2 * MBIT).expect_err("gone"),
            shaping.traffic().expect_err("gone"),
        ] {
            assert!(
                matches!(error, ShapingError::Device(EthtoolError::Gone)),
                "{error}"
            );
        }
        drop(shaping);
        assert!(!record.exists());
    });
}
