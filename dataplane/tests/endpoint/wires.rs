//! What is on the wire: the paper's IP fragments, to LM and to ordinary programs; captures.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use lm_dataplane::{
    ConnectError, ConnectOptions, EndpointConfig, LinkConfig, LoanError, MemoryConfig, Outcome,
};
use lm_protocol::geometry::Wire;
use lm_protocol::wire::lm::LmHeader;
use lm_protocol::wire::parse_frame;
use pcap_file::pcap::PcapReader;

use crate::harness::{
    B, Bed, PATIENCE, assert_clean, assert_delivered, both, check, completions, config_a, config_b, connect,
    content, open, plain, recv, send, settle, up_to, wait_until,
};

/// The longest UDP datagram over IPv4, in bytes.
const DATAGRAM_MAX: u64 = 65_507;

#[test]
fn ip_fragments_land_as_well() {
    let Some(bed) = Bed::new(2) else { return };
    let lengths = [1449, 1472, 1473, 7168, 60_000, DATAGRAM_MAX];
    bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let options = ConnectOptions {
                wire: Wire::IpFrag,
                ..up_to(DATAGRAM_MAX)
            };
            let peer = a.connect(B, &options).unwrap();
            let mut sent = Vec::new();
            for (tag, &len) in (0..).zip(&lengths) {
                sent.push((send(a, peer, tag, &content(tag, len)), tag, len));
            }
            let limit = DATAGRAM_MAX;
            assert_eq!(
                a.loan(peer, limit + 1).unwrap_err(),
                LoanError::TooLarge { limit }
            );
            assert_delivered(&settle(a), &sent);
            assert_clean(a);
            // More than a datagram is refused with the limit.
            let options = ConnectOptions {
                max_message_len: DATAGRAM_MAX + 1,
                ..options
            };
            let error = a.connect(B, &options).unwrap_err();
            assert!(
                matches!(
                    error,
                    ConnectError::Rejected {
                        limit: DATAGRAM_MAX,
                        ..
                    }
                ),
                "{error:?}"
            );
            assert!(error.to_string().contains("at most 65507 bytes"), "{error}");
        },
        |b| {
            for (tag, &len) in (0..).zip(&lengths) {
                let message = recv(b);
                check(b, &message, tag, len);
                assert!(!message.is_eager());
            }
            assert_eq!(b.counters().user_copied_bytes + b.counters().restored_bytes, 0);
            assert_clean(b);
        },
    );
}

/// Makes room for so many bytes, beyond the system's limit.
fn receive_buffer(socket: &UdpSocket, len: libc::c_int) {
    // SAFETY: the value is a live c_int of the length given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            (&raw const len).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// The receiver is the kernel: it reassembles what comes last fragment first.
#[test]
fn an_ordinary_socket_receives_whole_datagrams() {
    let Some(bed) = Bed::new(2) else { return };
    let lengths = [0, 1, 1472, 1473, 7168, 65_506, DATAGRAM_MAX];
    let to = SocketAddrV4::new(*B.ip(), 9999);
    both(
        &bed.pair.a,
        &bed.pair.b,
        |start, over| {
            let config = EndpointConfig {
                memory: MemoryConfig {
                    landing_len: 0,
                    ..config_a().memory
                },
                ..config_a()
            };
            let mut a = open(&config);
            start.meet();
            let peer = a.connect(to, &plain()).unwrap();
            assert_eq!(a.peer(peer).max_message_len(), DATAGRAM_MAX);
            assert_eq!(
                a.loan(peer, DATAGRAM_MAX + 1).unwrap_err(),
                LoanError::TooLarge { limit: DATAGRAM_MAX }
            );
            let mut sent = Vec::new();
            for (tag, &len) in (0..).zip(&lengths) {
                sent.push((send(&mut a, peer, tag, &content(tag, len)), tag, len));
            }
            a.flush(PATIENCE).unwrap();
            let ended = completions(&mut a);
            assert_eq!(ended.len(), sent.len());
            for (completion, sent) in ended.iter().zip(&sent) {
                assert_eq!((completion.token, completion.tag, completion.len), *sent);
                assert_eq!(completion.outcome, Outcome::Sent);
            }
            assert_clean(&a);
            // Neither of us goes before the datagrams are there.
            wait_until(&mut a, "the datagrams are there", |_| over.other());
        },
        |start, _over| {
            let socket = UdpSocket::bind(to).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            // All of them fit although nobody reads: on a busy machine this thread may come late, and the kernel drops
            // what the default does not hold.
            receive_buffer(&socket, 4 << 20);
            start.meet();
            let mut space = vec![0; 70_000];
            for (tag, &len) in (0..).zip(&lengths) {
                let (received, from) = socket.recv_from(&mut space).unwrap();
                assert_eq!(received as u64, len);
                assert!(space[..received] == content(tag, len), "datagram of {len} bytes");
                assert_eq!(from.ip(), Ipv4Addr::new(10, 77, 0, 1));
            }
        },
    );
}

#[test]
fn an_ordinary_socket_is_sent_to_from_the_data_port() {
    let Some(bed) = Bed::new(1) else { return };
    let to = SocketAddrV4::new(*B.ip(), 9999);
    let socket = bed.pair.b.run(|| UdpSocket::bind(to)).unwrap();
    let (local, from) = bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let socket_there = a.connect(to, &plain()).unwrap();
            send(a, socket_there, 0, &content(0, 5000));
            settle(a);
            a.local()
        },
        |_| {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut space = vec![0; 70_000];
            let (received, from) = socket.recv_from(&mut space).unwrap();
            assert!(space[..received] == content(0, 5000));
            from
        },
    );
    assert_eq!(from, SocketAddr::V4(local));
}

/// A file that goes with the value.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("lm-endpoint-{}-{name}.pcap", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Message, index, count and payload of every fragment in a capture, in its order; every packet is checked.
fn fragments_of(path: &PathBuf) -> Vec<(u32, u32, u32, Vec<u8>)> {
    let mut reader = PcapReader::new(File::open(path).unwrap()).unwrap();
    let mut fragments = Vec::new();
    let mut last = std::time::Duration::ZERO;
    while let Some(packet) = reader.next_packet() {
        let packet = packet.unwrap();
        assert!(packet.timestamp >= last, "time goes back");
        last = packet.timestamp;
        assert_eq!(packet.orig_len as usize, packet.data.len());
        let sliced = etherparse::SlicedPacket::from_ethernet(&packet.data).unwrap();
        let Some(etherparse::NetSlice::Ipv4(ip)) = &sliced.net else {
            panic!("not IPv4: {sliced:?}");
        };
        let header = ip.header();
        assert_eq!(
            header.header_checksum(),
            header.to_header().calc_header_checksum()
        );
        let Some(etherparse::TransportSlice::Udp(udp)) = &sliced.transport else {
            panic!("not UDP: {sliced:?}");
        };
        assert_eq!(usize::from(udp.length()), 8 + udp.payload().len());
        assert_eq!(header.total_len(), 20 + udp.length());
        let frame = parse_frame(&packet.data).unwrap();
        if let Some(&LmHeader::Data {
            message,
            index,
            count,
            ..
        }) = frame.lm()
        {
            assert_eq!(udp.payload().len(), 24 + frame.payload.len());
            fragments.push((message, index, count, frame.payload.to_vec()));
        }
    }
    fragments
}

#[test]
fn both_sides_capture_every_fragment_in_transmit_order() {
    let Some(bed) = Bed::new(2) else { return };
    let (file_a, file_b) = (Scratch::new("a"), Scratch::new("b"));
    let capture = |path: &Scratch, config: EndpointConfig| EndpointConfig {
        link: LinkConfig {
            capture: Some(Arc::new(File::create(&path.0).unwrap())),
            ..config.link
        },
        ..config
    };
    let lengths = [7168, 1_000_000];
    bed.talk(
        &capture(&file_a, config_a()),
        &capture(&file_b, config_b()),
        |a| {
            let peer = connect(a, 1 << 20);
            send(a, peer, 7, b"small");
            for (tag, &len) in (0..).zip(&lengths) {
                send(a, peer, tag, &content(tag, len));
            }
            settle(a);
            assert!(a.status().capture_error().is_none());
        },
        |b| {
            for _ in 0..3 {
                recv(b);
            }
            assert!(b.status().capture_error().is_none());
        },
    );
    for file in [&file_a, &file_b] {
        let fragments = fragments_of(&file.0);
        let mut order = Vec::new();
        for (message, &len) in (0..).zip(&lengths) {
            let count = len.div_ceil(1448) as u32;
            for window in 0..count.div_ceil(256) {
                let indices = (window * 256..count.min((window + 1) * 256)).rev();
                order.extend(indices.map(|index| (message, index, count)));
            }
        }
        let found: Vec<_> = fragments.iter().map(|f| (f.0, f.1, f.2)).collect();
        assert!(found == order, "{}: {found:?}", file.0.display());
        for (message, &len) in (0..).zip(&lengths) {
            let mut bytes = vec![0; len as usize];
            for (_, index, _, payload) in fragments.iter().filter(|f| f.0 == message) {
                bytes[*index as usize * 1448..][..payload.len()].copy_from_slice(payload);
            }
            assert!(bytes == content(message.into(), len), "{}", file.0.display());
        }
    }
}
