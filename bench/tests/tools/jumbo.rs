//! Large MTUs, of which nobody tells the tools.

use std::fs;

use crate::bed::{Bed, Host, INTERFACE, content};

const LEN: usize = (16 << 20) + 3;

fn with_mtu(mtu: u32) -> Option<Bed> {
    let bed = Bed::new()?;
    for host in [Host::Sender, Host::Receiver] {
        bed.ip(host, &format!("link set {INTERFACE} mtu {mtu}"));
    }
    Some(bed)
}

/// Sends a file and compares it.
fn transfer(bed: &Bed, arguments: &[&str]) {
    let file = bed.file("file", LEN);
    let out = bed.path("out");
    let receiver = bed.recv(&["--output", out.to_str().unwrap(), "--count", "1", "--json"]);
    let sent = bed.send_to_end(&[arguments, &[file.to_str().unwrap()]].concat());
    let received = receiver.end();
    sent.expect_code(0);
    received.expect_code(0);
    assert!(
        fs::read(&out).unwrap() == content(LEN),
        "{arguments:?}: the bytes differ"
    );
    fs::remove_file(&out).unwrap();
    for report in [sent.json(), received.json()] {
        assert_eq!(report["bytes"], LEN, "{arguments:?}");
        assert_eq!(report["mode"], "copy-native");
        let copied = report["user_copied_bytes"].as_u64().unwrap();
        assert!(
            copied == 0 || arguments.contains(&"--one-copy"),
            "{arguments:?}: {report}"
        );
    }
}

#[test]
fn transfers_at_large_mtus() {
    for mtu in [4000, 9000, 60_000] {
        let Some(bed) = with_mtu(mtu) else { return };
        transfer(&bed, &[]);
        transfer(&bed, &["--message-size", "10000"]);
        transfer(&bed, &["--message-size", "65000", "--wire", "ipfrag"]);
        transfer(&bed, &["--one-copy"]);
    }
}

/// Packets are as long as they can be.
#[test]
fn packets_are_as_long_as_the_mtu() {
    let Some(bed) = with_mtu(9000) else { return };
    let pcap = bed.path("x.pcap");
    transfer(&bed, &["--pcap", pcap.to_str().unwrap()]);
    let bytes = fs::read(&pcap).unwrap();
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    // Records of a pcap file behind its header: seconds, fraction, bytes kept, bytes of the packet.
    let (mut at, mut full) = (24, 0);
    while at < bytes.len() {
        assert_eq!(number(at + 8), number(at + 12));
        assert!(number(at + 12) <= 9014);
        full += usize::from(number(at + 12) == 9010);
        at += 16 + number(at + 8) as usize;
    }
    // 1 MiB is 117 full fragments and one of 2128 bytes.
    assert_eq!(full, 16 * 117);
}
