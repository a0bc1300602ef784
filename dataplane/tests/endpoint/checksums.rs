//! UDP's checksum, as the kernel sees it: it drops a datagram whose checksum is another, and counts it.

use std::fs::File;
use std::net::{SocketAddrV4, UdpSocket};
use std::sync::Arc;

use lm_dataplane::memory::{HugePages, Mapping};
use lm_dataplane::xsk::{BindMode, Xsk, XskConfig, XskError, XskOptions};
use lm_dataplane::{Checksum, ConnectOptions, EndpointConfig, LinkConfig};
use lm_protocol::geometry::Wire;
use lm_protocol::wire::lm::TYPE_DATA;
use pcap_file::pcap::PcapReader;

use crate::bed::{Namespace, root};
use crate::harness::{
    B, Bed, PATIENCE, assert_delivered, both, check, completions, config_a, config_b, content, open, plain,
    recv, send, settle, up_to, wait_until,
};
use crate::wires::Scratch;

fn with(config: EndpointConfig, checksum: Checksum) -> EndpointConfig {
    EndpointConfig {
        link: LinkConfig {
            checksum,
            ..config.link
        },
        ..config
    }
}

fn captured(config: EndpointConfig, file: &Scratch) -> EndpointConfig {
    EndpointConfig {
        link: LinkConfig {
            capture: Some(Arc::new(File::create(&file.0).unwrap())),
            ..config.link
        },
        ..config
    }
}

/// Datagrams that this host's kernel dropped for their checksum.
fn wrong_checksums(namespace: &Namespace) -> u64 {
    let counters = namespace.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap());
    let mut lines = counters.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut all = names.split(' ').zip(values.split(' '));
    let (_, count) = all.find(|(name, _)| *name == "InCsumErrors").unwrap();
    count.parse().unwrap()
}

/// How many UDP headers from our data port are in a capture, before what `is_ours` asks for: all with a checksum.
fn summed_up(file: &Scratch, port: u16, is_ours: impl Fn(&[u8]) -> bool) -> usize {
    let mut reader = PcapReader::new(File::open(&file.0).unwrap()).unwrap();
    let mut count = 0;
    while let Some(packet) = reader.next_packet() {
        let data = packet.unwrap().data;
        let is_first = u16::from_be_bytes([data[20], data[21]]) & 0x1fff == 0;
        if is_first && data[34..36] == port.to_be_bytes() && is_ours(&data[42..]) {
            assert_ne!(data[40..42], [0, 0], "{data:?}");
            count += 1;
        }
    }
    count
}

/// Whole datagrams, of one packet and of IP fragments.
#[test]
fn an_ordinary_socket_accepts_what_is_summed_up() {
    let Some(bed) = Bed::new(2) else { return };
    let lengths = [0, 1, 1472, 1473, 7168, 65_507];
    let to = SocketAddrV4::new(*B.ip(), 9999);
    let file = Scratch::new("summed");
    let (port, ()) = both(
        &bed.pair.a,
        &bed.pair.b,
        |start, over| {
            let mut a = open(&captured(with(config_a(), Checksum::Integrated), &file));
            start.meet();
            let peer = a.connect(to, &plain()).unwrap();
            for (tag, &len) in (0..).zip(&lengths) {
                send(&mut a, peer, tag, &content(tag, len));
            }
            a.flush(PATIENCE).unwrap();
            assert_eq!(completions(&mut a).len(), lengths.len());
            wait_until(&mut a, "all has come", |_| over.other());
            a.local().port()
        },
        |start, _over| {
            let socket = UdpSocket::bind(to).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            start.meet();
            let mut space = vec![0; 70_000];
            for (tag, &len) in (0..).zip(&lengths) {
                let received = socket.recv(&mut space).unwrap();
                assert!(space[..received] == content(tag, len), "datagram of {len} bytes");
            }
        },
    );
    assert_eq!(wrong_checksums(&bed.pair.b), 0);
    assert_eq!(summed_up(&file, port, |_| true), lengths.len());
}

/// Fragments that leave by a ring and come by the kernel's socket, where there is one queue and they take the one-copy path.
#[test]
fn the_kernels_socket_accepts_fragments_whoever_sums_them_up() {
    for checksum in [Checksum::Integrated, Checksum::Offload] {
        let Some(bed) = Bed::new(1) else { return };
        let lengths = [1449, 7168, 300_001];
        let file = Scratch::new("one-copy");
        let (port, ()) = bed.talk(
            &captured(with(config_a(), checksum), &file),
            &with(config_b(), checksum),
            |a| {
                let options = ConnectOptions {
                    one_copy: true,
                    ..up_to(1 << 20)
                };
                let peer = a.connect(B, &options).unwrap();
                let mut sent = Vec::new();
                for (tag, &len) in (0..).zip(&lengths) {
                    sent.push((send(a, peer, tag, &content(tag, len)), tag, len));
                }
                assert_delivered(&settle(a), &sent);
                assert_eq!(a.counters().fragments_resent, 0);
                a.local().port()
            },
            |b| {
                for (tag, &len) in (0..).zip(&lengths) {
                    let message = recv(b);
                    check(b, &message, tag, len);
                }
                assert!(b.counters().one_copy_packets > 0);
            },
        );
        assert_eq!(
            [&bed.pair.a, &bed.pair.b].map(wrong_checksums),
            [0, 0],
            "{checksum:?}"
        );
        // What is no fragment leaves by the kernel's socket here, and is the kernel's to sum up.
        let is_fragment = |payload: &[u8]| payload[0] & 0xf == TYPE_DATA;
        let fragments: u64 = lengths.iter().map(|len| len.div_ceil(1448)).sum();
        assert_eq!(
            summed_up(&file, port, is_fragment),
            fragments as usize,
            "{checksum:?}"
        );
    }
}

/// Messages land as they do without.
#[test]
fn packets_with_metadata_land_as_others_do() {
    let Some(bed) = Bed::new(2) else { return };
    let lengths = [0, 1, 1400, 1449, 300_001, 3 << 20];
    bed.talk(
        &with(config_a(), Checksum::Offload),
        &with(config_b(), Checksum::Offload),
        |a| {
            let peer = a.connect(B, &up_to(3 << 20)).unwrap();
            let mut sent = Vec::new();
            for (tag, &len) in (0..).zip(&lengths) {
                sent.push((send(a, peer, tag, &content(tag, len)), tag, len));
            }
            assert_delivered(&settle(a), &sent);
            // One datagram for many packets has one sum, which no device makes.
            for options in [
                plain(),
                ConnectOptions {
                    wire: Wire::IpFrag,
                    ..up_to(7168)
                },
            ] {
                let error = a.connect(B, &options).unwrap_err().to_string();
                assert!(
                    error.contains("--checksum integrated") && !error.contains('\n'),
                    "{error}"
                );
            }
        },
        |b| {
            for (tag, &len) in (0..).zip(&lengths) {
                let message = recv(b);
                check(b, &message, tag, len);
            }
            assert_eq!(b.counters().one_copy_packets, 0);
        },
    );
}

/// What a kernel without metadata says to it (`EINVAL`), this one says to metadata of an impossible length.
#[test]
fn a_kernel_that_takes_no_metadata_is_named() {
    if !root() {
        return;
    }
    let mapping = Arc::new(Mapping::new(1 << 20, HugePages::Off).unwrap());
    let config = XskConfig {
        interface_index: 1,
        queue: 0,
        mapping: &mapping,
        registered_len: 1 << 20,
        chunk_len: 2048,
        fill_len: 64,
        completion_len: 64,
        rx_len: 64,
        tx_len: 64,
        bind: BindMode::Copy,
    };
    let options = |tx_metadata_len| XskOptions {
        tx_metadata_len,
        ..XskOptions::default()
    };
    Xsk::prepare(&config, &options(24)).unwrap();
    let error = Xsk::prepare(&config, &options(20)).unwrap_err();
    assert!(matches!(error, XskError::NoMetadata), "{error}");
    let line = error.to_string();
    assert!(line.contains("Linux 6.11") && !line.contains('\n'), "{line}");
}
