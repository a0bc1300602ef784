//! A bed with a switch: its senders reach the receiver, on the queue where LM needs their data.

use std::path::{Path, PathBuf};

use xtask::bed::{Bed, BedConfig, Launch};
use xtask::ends::Ends;

/// Says why a test cannot run here, and whether it may be skipped: never where `CI=true`.
fn skipped(why: &str) {
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{why}, and CI=true allows no skipped test"
    );
    println!("SKIPPED: {why}");
}

fn switch(senders: u32) -> Option<Bed> {
    if !rustix::process::geteuid().is_root() {
        skipped("not root; network namespaces need it");
        return None;
    }
    let config = BedConfig {
        senders: Some(senders),
        ..BedConfig::default()
    };
    Some(Bed::new(&config).unwrap())
}

/// Built by `cargo xtask test`, which builds every program before the tests.
fn lm_bench() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("lm-bench");
    if !path.exists() {
        skipped("lm-bench is not built; cargo build -p lm-bench");
        return None;
    }
    Some(path)
}

fn launch(lm_bench: &Path, words: Vec<String>) -> Launch {
    Launch::new(lm_bench).args(words)
}

#[test]
fn every_sender_reaches_the_receiver_without_asking_who_it_is() {
    let Some(bed) = switch(3) else { return };
    let senders = bed.senders();
    let addresses: Vec<String> = senders.iter().map(|host| host.address().to_string()).collect();
    assert_eq!(addresses, ["198.18.0.1", "198.18.0.3", "198.18.0.4"]);
    assert_eq!(senders[0].name(), bed.left().name());
    let bind = |host: &xtask::bed::Host| {
        let socket = host
            .enter(|| Ok(std::net::UdpSocket::bind((host.address(), 0))?))
            .unwrap();
        socket
            .set_read_timeout(Some(std::time::Duration::from_secs(5)))
            .unwrap();
        socket
    };
    let receiver = bind(bed.right());
    for sender in &senders {
        let socket = bind(sender);
        socket
            .send_to(b"question", receiver.local_addr().unwrap())
            .unwrap();
        let (len, from) = receiver.recv_from(&mut [0; 64]).unwrap();
        assert_eq!((len, from), (8, socket.local_addr().unwrap()));
        receiver.send_to(b"answer", from).unwrap();
        assert_eq!(socket.recv_from(&mut [0; 64]).unwrap().0, 6);
    }
    let table = bed.right().read_file("/proc/thread-self/net/arp").unwrap();
    let fixed = table.lines().skip(1).filter(|line| line.contains("0x6")).count();
    assert_eq!(fixed, 3, "permanent entries: {table}");
    let names: Vec<String> = senders.iter().map(|host| host.name().to_owned()).collect();
    drop(bed);
    for name in names {
        assert!(!Path::new("/run/netns").join(name).exists());
    }
}

/// What comes in on another queue takes the one-copy path, and is counted as copied.
#[test]
fn data_comes_in_on_the_landing_queue() {
    let (Some(lm_bench), Some(bed)) = (lm_bench(), switch(2)) else {
        return;
    };
    let ends = Ends::stream("lm --idle default", 64 << 10, [0.05, 0.2]);
    let mut receiver = bed.right().spawn(launch(&lm_bench, ends.far())).unwrap();
    receiver.await_text("ready").unwrap();
    let sender = bed.senders()[1].spawn(launch(&lm_bench, ends.near())).unwrap();
    let received = receiver.finish().unwrap().json().unwrap();
    assert!(received["messages"].as_u64().unwrap() > 0, "{received}");
    assert_eq!(received["user_copied_bytes"], 0, "{received}");
    sender.finish().unwrap();
}

/// Messages of one packet need no session: any number of senders at once.
#[test]
fn a_receiver_counts_each_sender_apart() {
    let (Some(lm_bench), Some(bed)) = (lm_bench(), switch(3)) else {
        return;
    };
    let mut ends = Ends::stream("lm --idle default", 1000, [0.05, 0.3]);
    (ends.seconds[0], ends.senders) = (1.5, 3);
    let mut receiver = bed.right().spawn(launch(&lm_bench, ends.far())).unwrap();
    receiver.await_text("ready").unwrap();
    let senders: Vec<_> = (bed.senders().iter())
        .map(|host| host.spawn(launch(&lm_bench, ends.near())).unwrap())
        .collect();
    let received = receiver.finish().unwrap().json().unwrap();
    let each = received["senders"].as_array().unwrap();
    let mut addresses: Vec<&str> = each
        .iter()
        .map(|one| one["address"].as_str().unwrap().split(':').next().unwrap())
        .collect();
    addresses.sort_unstable();
    assert_eq!(
        addresses,
        ["198.18.0.1", "198.18.0.3", "198.18.0.4"],
        "{received}"
    );
    let sum = |name: &str| -> u64 { each.iter().map(|one| one[name].as_u64().unwrap()).sum() };
    assert!(
        each.iter().all(|one| one["messages"].as_u64().unwrap() > 0),
        "{received}"
    );
    assert_eq!(sum("messages"), received["messages"].as_u64().unwrap());
    assert_eq!(sum("bytes"), 1000 * sum("messages"));
    for sender in senders {
        sender.finish().unwrap();
    }
}

#[test]
fn a_receiver_that_waits_in_vain_says_who_is_missing() {
    let (Some(lm_bench), Some(bed)) = (lm_bench(), switch(2)) else {
        return;
    };
    let mut ends = Ends::stream("lm --idle default", 1000, [0.05, 1.0]);
    (ends.seconds[0], ends.senders) = (0.1, 2);
    let mut receiver = bed.right().spawn(launch(&lm_bench, ends.far())).unwrap();
    receiver.await_text("ready").unwrap();
    bed.left()
        .spawn(launch(&lm_bench, ends.near()))
        .unwrap()
        .finish()
        .unwrap();
    let output = receiver.outcome().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.contains("1 of 2 senders came"), "{}", output.stderr);
}
