//! No payload is copied in user space, told by somebody else than our own counter: valgrind sees every `memcpy` and
//! `memmove` of a transfer, with its length and its callers (`dhat --mode=copy`).
//!
//! Who copies a payload makes copies as long as a fragment or longer, once for each fragment or once for the message.
//! So of all copies outside the simulated kernel, those that happen for each packet or window are at most as long as
//! headers, and there is hardly anything else.
#![cfg(test)]

use std::process::Command;

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig};

/// Fragments of the message, and its length.
const COUNT: u64 = 900;
const LEN: u64 = COUNT * 1448;
/// Ethernet, IPv4, UDP and LM header.
const HEADER_LEN: u64 = 66;
/// Windows of the message, less one: as many edges are saved and restored, a header's length each.
const WINDOWS: u64 = COUNT / 64;
/// The longest value that is moved once a message.
const VALUE_LEN: u64 = 640;
/// Where the simulated kernel copies.
const KERNEL: [&str; 4] = ["(simnic.rs:", "(driver.rs:", "(host.rs:", "(datagram.rs:"];
/// Set for the run under valgrind, to the way that the payload takes.
const WAY: &str = "LM_COPIES_WAY";

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// What also runs under valgrind: a message of many fragments from one engine to the other, written and read in place.
#[test]
fn subject() {
    let mut bed = Bed::new(&BedConfig {
        guarded: false,
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, LEN);
    transfer(
        &mut bed,
        peer,
        std::env::var(WAY).is_ok_and(|way| way == "copied"),
    );
}

#[inline(never)]
fn transfer(bed: &mut Bed, peer: crate::PeerId, copied: bool) {
    let mut region = bed.hosts[0].loan(peer, LEN).expect("memory");
    let mut at = 0;
    for range in region.payloads_mut() {
        for place in range {
            *place = byte(at);
            at += 1;
        }
    }
    assert_eq!(at, LEN);
    let now_ns = bed.now_ns;
    bed.hosts[0].submit(region, 1, now_ns).expect("room");
    let message = bed.recv(1);
    if copied {
        let region = bed.hosts[1].landing_region(LEN).expect("memory");
        let (from, to) = (message.umem_offset(), region.umem_range().start);
        bed.hosts[1].memory.umem().copy_within(from, to, LEN);
    }
    assert_eq!(message.len() as u64, LEN);
    assert!(message.iter().zip(0..).all(|(&found, at)| found == byte(at)));
    assert_eq!(bed.hosts[1].counters.user_copied_bytes, 0);
}

/// Copies made by one chain of callers.
#[derive(Debug)]
struct Copies {
    bytes: u64,
    blocks: u64,
    callers: Vec<String>,
}

impl Copies {
    fn mean_len(&self) -> u64 {
        self.bytes.div_ceil(self.blocks.max(1))
    }

    fn has(&self, name: &str) -> bool {
        self.callers.iter().any(|caller| caller.contains(name))
    }
}

/// All copies of `transfer`, the simulated kernel's apart.
fn copies(way: &str) -> (Vec<Copies>, Vec<Copies>) {
    let directory = std::env::temp_dir().join(format!("lm-copies-{}-{way}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a temporary directory");
    let report = directory.join("dhat.json");
    let output = Command::new("valgrind")
        .args(["--tool=dhat", "--mode=copy", "--num-callers=60"])
        .arg(format!("--dhat-out-file={}", report.display()))
        .arg(std::env::current_exe().expect("this test's own program"))
        .args(["--exact", "--test-threads=1", "sim_tests::copies::subject"])
        .env(WAY, way)
        .output()
        .expect("valgrind was there a moment ago");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "the subject did not run"
    );
    let text = std::fs::read_to_string(&report).expect("valgrind's report");
    std::fs::remove_dir_all(&directory).expect("our own directory");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["mode"], "copy");
    let names = report["ftbl"].as_array().expect("a table of frames");
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    report["pps"]
        .as_array()
        .expect("places")
        .iter()
        .map(|place| Copies {
            bytes: number(&place["tb"]),
            blocks: number(&place["tbk"]),
            callers: place["fs"]
                .as_array()
                .expect("frames")
                .iter()
                .map(|frame| {
                    names[number(frame) as usize]
                        .as_str()
                        .unwrap_or_default()
                        .to_owned()
                })
                .collect(),
        })
        .filter(|copies| copies.has("copies::transfer"))
        .partition(|copies| KERNEL.iter().all(|file| !copies.has(file)))
}

fn has_valgrind() -> bool {
    let found = Command::new("valgrind").arg("--version").output();
    if found.is_ok_and(|output| output.status.success()) {
        return true;
    }
    let why = "valgrind is not installed, and nothing else can see every copy (apt install valgrind)";
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{why}");
    println!("SKIPPED: {why}");
    false
}

#[test]
fn payloads_are_not_copied() {
    if !has_valgrind() {
        return;
    }
    let (ours, kernel) = copies("in-place");
    // The simulated kernel copies each packet off one host and onto the other: valgrind sees what there is to see.
    let kernel_bytes: u64 = kernel.iter().map(|copies| copies.bytes).sum();
    assert!(
        kernel_bytes >= 2 * (LEN + COUNT * HEADER_LEN),
        "{kernel_bytes} bytes seen"
    );
    let mut bytes = 0;
    for copies in &ours {
        let longest = match copies.blocks {
            // Each packet, each window.
            WINDOWS.. => HEADER_LEN,
            // Announcements, and values of our own types, which valgrind cannot tell from bytes.
            _ => VALUE_LEN,
        };
        assert!(
            copies.mean_len() <= longest,
            "{} bytes: {copies:#?}",
            copies.mean_len()
        );
        bytes += copies.bytes;
    }
    // A mean can hide a long one among short ones, the sum cannot: each header is written once and copied into its
    // hole once, and all that is not headers is less than a dozen fragments.
    assert!(
        bytes <= COUNT * 2 * (HEADER_LEN + 4) + 12 * 1448,
        "{bytes} bytes: {ours:#?}"
    );

    // The same measure finds a copy where there is one.
    let (ours, _) = copies("copied");
    let longest = ours.iter().map(Copies::mean_len).max();
    assert_eq!(longest, Some(LEN));
}
