//! The test bed on the real kernel: what it makes, what runs in it, and that nothing of it stays behind.

use std::io::{BufRead as _, BufReader};
use std::net::UdpSocket;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lm_cards::ethtool::Ethtool;
use rustix::process::{Pid, Signal, kill_process};
use xtask::bed::host::joins_packets;
use xtask::bed::{Bed, BedConfig, INTERFACE, Impairments, Launch, until};

/// Says why a test cannot run here, and whether it may be skipped: never where `CI=true`.
fn skipped() -> bool {
    if rustix::process::geteuid().is_root() {
        return false;
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "not root, and CI=true allows no skipped test"
    );
    println!("SKIPPED: not root; network namespaces need it");
    true
}

fn namespace_exists(name: &str) -> bool {
    Path::new("/run/netns").join(name).exists()
}

/// Namespaces of beds that process `pid` made.
fn namespaces_of(pid: u32) -> Vec<String> {
    let entries = std::fs::read_dir("/run/netns")
        .map(|entries| entries.flatten().collect())
        .unwrap_or_else(|_| Vec::new());
    let names = entries
        .iter()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| name.starts_with(&format!("lmx-{pid}-")))
        .collect()
}

#[test]
fn a_datagram_crosses_the_bed_and_is_answered() {
    if skipped() {
        return;
    }
    let bed = Bed::new(&BedConfig::default()).unwrap();
    let bind = |host: &xtask::bed::Host| {
        let address = host.address();
        host.enter(|| Ok(UdpSocket::bind((address, 0))?)).unwrap()
    };
    let (left, right) = (bind(bed.left()), bind(bed.right()));
    right.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    left.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let sent: Vec<u8> = (0..4000_u32).map(|n| n as u8).collect(); // more than a packet: fragments cross, too
    left.send_to(&sent, right.local_addr().unwrap()).unwrap();
    let mut received = vec![0; 8192];
    let (len, from) = right.recv_from(&mut received).unwrap();
    assert_eq!((&received[..len], from), (&sent[..], left.local_addr().unwrap()));
    right.send_to(b"answer", from).unwrap();
    let (len, _) = left.recv_from(&mut received).unwrap();
    assert_eq!(&received[..len], b"answer");
}

#[test]
fn the_bed_is_what_its_configuration_says() {
    if skipped() {
        return;
    }
    let config = BedConfig {
        mtu: 3000,
        queues: 3,
        ..BedConfig::default()
    };
    let bed = Bed::new(&config).unwrap();
    for host in [bed.left(), bed.right()] {
        let read = |file: &str| {
            host.read_file(&format!("/sys/class/net/{INTERFACE}/{file}"))
                .unwrap()
        };
        assert_eq!(read("mtu"), "3000");
        assert!(!host.has_xdp_program().unwrap());
        host.enter(|| {
            let queues = Path::new("/sys/class/net").join(INTERFACE).join("queues");
            let mut names: Vec<_> = std::fs::read_dir(queues)?
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            assert_eq!(names, ["rx-0", "rx-1", "rx-2", "tx-0", "tx-1", "tx-2"]);
            // The namespace's own /sys: no interface of the machine is in it.
            let mut links: Vec<_> = std::fs::read_dir("/sys/class/net")?
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            links.sort();
            assert_eq!(links, ["lm0", "lo"]);
            let features = Ethtool::named(INTERFACE)?.features()?;
            let on: Vec<&str> = features
                .iter()
                .filter(|f| f.changeable && joins_packets(&f.name) && f.on)
                .map(|f| f.name.as_str())
                .collect();
            assert!(on.is_empty(), "segmentation offloads left on: {on:?}");
            assert!(features.iter().any(|f| f.name == "tx-tcp-segmentation" && !f.on));
            Ok(())
        })
        .unwrap();
    }
    let error = bed.left().set_features(&[("no-such-feature", true)]).unwrap_err();
    assert!(format!("{error:#}").contains("no-such-feature"), "{error:#}");
}

#[test]
fn programs_run_on_their_host_and_core_and_their_output_is_collected() {
    if skipped() {
        return;
    }
    let bed = Bed::new(&BedConfig::default()).unwrap();
    let script = "grep Cpus_allowed_list /proc/self/status; ls /sys/class/net; echo oops >&2; exit 3";
    let launch = || Launch::new("sh").args(["-c", script]).core(0);
    let output = bed.right().spawn(launch()).unwrap().outcome().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(output.stdout, "Cpus_allowed_list:\t0\nlm0\nlo\n");
    assert_eq!(output.stderr, "oops\n");
    let error = bed
        .right()
        .spawn(launch())
        .unwrap()
        .finish()
        .unwrap_err()
        .to_string();
    assert!(error.contains("sh failed") && error.contains("oops"), "{error}");
    let error = bed
        .right()
        .spawn(Launch::new("/no/such/program"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("/no/such/program") && error.contains("is it built"),
        "{error}"
    );
}

#[test]
fn a_program_that_overruns_its_time_is_killed() {
    if skipped() {
        return;
    }
    let bed = Bed::new(&BedConfig::default()).unwrap();
    let limit = Duration::from_millis(200);
    let started = Instant::now();
    let program = bed
        .left()
        .spawn(Launch::new("sleep").arg("60").time_limit(limit))
        .unwrap();
    let pid = program.id();
    let error = program.finish().unwrap_err().to_string();
    assert!(error.contains("0.2 s"), "{error}");
    assert!(started.elapsed() >= limit && started.elapsed() < Duration::from_secs(10));
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_receiver_is_awaited_until_it_says_so() {
    if skipped() {
        return;
    }
    let bed = Bed::new(&BedConfig::default()).unwrap();
    let start = |script: &str| {
        let launch = Launch::new("sh").args(["-c", script]);
        bed.left().spawn(launch).unwrap()
    };
    let mut waiting = start("echo listening on port 7168 >&2; exec sleep 60");
    waiting.await_text("listening on").unwrap();
    assert_eq!(waiting.await_line("listening on port").unwrap(), "7168");
    let output = waiting.stop().unwrap();
    assert_eq!(output.status.signal(), Some(15));
    let mut ended = start("echo no such interface >&2; exit 1");
    let error = ended.await_text("listening on").unwrap_err().to_string();
    assert!(
        error.contains("ended") && error.contains("no such interface"),
        "{error}"
    );
}

#[test]
fn a_dropped_bed_leaves_nothing() {
    if skipped() {
        return;
    }
    let bed = Bed::new(&BedConfig::default()).unwrap();
    let names = [bed.left().name().to_owned(), bed.right().name().to_owned()];
    assert!(names.iter().all(|name| namespace_exists(name)));
    let program = bed.left().spawn(Launch::new("sleep").arg("60")).unwrap();
    let pid = program.id();
    drop(bed);
    assert!(!names.iter().any(|name| namespace_exists(name)));
    drop(program);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_bed_with_a_box_passes_packets_while_the_box_runs() {
    if skipped() {
        return;
    }
    // Built by `cargo xtask test`, which builds every program before the tests.
    let lm_bench = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("lm-bench");
    if !lm_bench.exists() {
        assert!(
            std::env::var("CI").as_deref() != Ok("true"),
            "no lm-bench, and CI=true allows no skipped test"
        );
        println!("SKIPPED: lm-bench is not built; cargo build -p lm-bench");
        return;
    }
    let bed = Bed::new(&BedConfig {
        with_box: true,
        box_cores: Some(xtask::machine::two_cores()),
        checksum_offload: false,
        ..BedConfig::default()
    })
    .unwrap();
    let names = namespaces_of(std::process::id());
    let of_this_bed = bed.left().name().trim_end_matches("left");
    let middle = format!("{of_this_bed}box");
    assert!(names.contains(&middle), "{names:?}");
    let bind = |host: &xtask::bed::Host| {
        let address = host.address();
        let socket = host.enter(|| Ok(UdpSocket::bind((address, 0))?)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket
    };
    let (left, right) = (bind(bed.left()), bind(bed.right()));
    let delay = Impairments("--delay 5ms,0".to_owned());
    let started = Instant::now();
    let running = bed.start_box(&lm_bench, &delay).unwrap();
    left.send_to(b"question", right.local_addr().unwrap()).unwrap();
    let (len, from) = right.recv_from(&mut [0; 64]).unwrap();
    assert_eq!((len, from), (8, left.local_addr().unwrap()));
    assert!(started.elapsed() >= Duration::from_millis(5));
    let report = running.stop().unwrap().json().unwrap();
    assert!(
        report["rightward"]["sent"].as_u64().unwrap() >= 1,
        "ARP may add some: {report}"
    );
    // Without the box nothing passes.
    left.send_to(b"again", right.local_addr().unwrap()).unwrap();
    right.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(right.recv_from(&mut [0; 64]).is_err());
    let wrong = Impairments("--loss 1".to_owned());
    let error = format!("{:#}", bed.start_box(&lm_bench, &wrong).unwrap_err());
    assert!(error.contains("like 1%"), "{error}");
    drop(bed);
    assert!(!namespace_exists(&middle));
}

#[test]
fn a_panic_leaves_nothing() {
    if skipped() {
        return;
    }
    let names = std::sync::Mutex::new(Vec::new());
    let panicked = std::panic::catch_unwind(|| {
        let bed = Bed::new(&BedConfig::default()).unwrap();
        let program = bed.left().spawn(Launch::new("sleep").arg("60")).unwrap();
        names.lock().unwrap().push((
            bed.left().name().to_owned(),
            bed.right().name().to_owned(),
            program.id(),
        ));
        std::panic::resume_unwind(Box::new("a failing test"));
    });
    assert!(panicked.is_err());
    let (left, right, pid) = names.into_inner().unwrap().remove(0);
    assert!(!namespace_exists(&left) && !namespace_exists(&right));
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

/// Starts `cargo xtask bed` and waits until its bed stands, with this number of namespaces.
fn bed_of_another_process(options: &[&str], namespaces: usize) -> std::process::Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("bed")
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = lines.any(|line| line.unwrap().contains("Ctrl-C"));
    assert!(ready, "`xtask bed` ended before its bed stood");
    assert_eq!(namespaces_of(child.id()).len(), namespaces);
    child
}

#[test]
fn signals_end_the_process_and_leave_nothing() {
    if skipped() {
        return;
    }
    let cluster = &["--hosts", "3"][..];
    for (signal, options, namespaces) in [
        (Signal::INT, &[][..], 2),
        (Signal::TERM, cluster, 4),
        (Signal::HUP, &[], 2),
    ] {
        let mut child = bed_of_another_process(options, namespaces);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(
            status.signal(),
            Some(signal.as_raw()),
            "ended as by the signal itself"
        );
        assert_eq!(namespaces_of(child.id()), Vec::<String>::new(), "{signal:?}");
    }
}

#[test]
fn the_next_bed_removes_what_a_killed_process_left() {
    if skipped() {
        return;
    }
    let mut child = bed_of_another_process(&["--hosts", "2"], 3);
    child.kill().unwrap();
    child.wait().unwrap();
    // Beds of other tests may have removed it by now; nobody else can have kept it.
    let _bed = Bed::new(&BedConfig::default()).unwrap();
    until(
        "the dead process's namespaces are removed",
        Duration::from_secs(10),
        || Ok(namespaces_of(child.id()).is_empty()),
    )
    .unwrap();
}
