//! `lm-check flood`: packets that no session knows, sent beside a stream to where its fragments land.
//!
//! They have the addresses and ports of the stream's fragments, so that every hash and rule of a network card takes
//! them for such, and leave through a packet socket (packet(7)), beside whatever AF_XDP sends on the same interface.
//! Their contents are random: wherever one of them is shown to an application, a comparison fails.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use clap::Args;
use lm_box::split_mix;
use serde::Serialize;

use crate::failed;
use lm_bench::bare::{Ends, ToArgs, UDP_HEADER_LEN};
use lm_bench::cli::Failure;
use lm_bench::signals::Interrupt;
use lm_cards::Interface;

/// Ethernet and IP headers before an IP packet's payload, without the former: IPv4 20, UDP 8.
const IP_UDP_LEN: u16 = 28;
/// An 802.1Q tag.
const TAG_LEN: usize = 4;
/// Where the source port stands: behind Ethernet and IPv4.
const SOURCE_PORT_AT: usize = 34;
/// Between looks at clock and signals.
const STEP: Duration = Duration::from_millis(1);

/// Kinds of packets, taken in turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Datagrams that are no longer than a fragment's packet.
    Plain,
    /// The same with a VLAN tag, of VLAN 0 (priority only) and VLAN 5 in turns.
    Vlan,
    /// Datagrams that are longer than a fragment's packet.
    Long,
}

/// Arguments of `flood`. It ends with Ctrl-C or SIGTERM, or after its time.
#[derive(Debug, Clone, Args)]
pub(crate) struct FloodArgs {
    /// Interface to send from
    #[arg(long, short)]
    pub(crate) interface: String,
    /// Whom to send to, and who seems to have sent it
    #[command(flatten)]
    pub(crate) to: ToArgs,
    /// UDP port of the receiver
    #[arg(long)]
    pub(crate) port: u16,
    /// UDP port that they seem to come from: that of the fragments
    #[arg(long)]
    pub(crate) source_port: u16,
    /// Packets a second
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) rate: u32,
    /// Length of a full fragment's IP packet, in bytes
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u16).range(576..=9000))]
    pub(crate) fragment: u16,
    /// Longest IP packet of the long ones, in bytes; needs an MTU of as much
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u16).range(576..=9000))]
    pub(crate) longest: u16,
    /// Decides lengths and contents
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Seconds to send
    #[arg(long, default_value_t = 60.0)]
    pub(crate) seconds: f64,
}

/// What `flood` prints.
#[derive(Debug, Default, Serialize)]
pub(crate) struct FloodReport {
    /// Packets that the kernel took, without a tag and no longer than a fragment's.
    pub(crate) plain: u64,
    /// Those with a tag.
    pub(crate) vlan: u64,
    /// Those that are longer than a fragment's.
    pub(crate) long: u64,
    /// Packets that found no room in the interface's queue.
    pub(crate) refused: u64,
}

/// Runs `flood`.
///
/// # Errors
///
/// A one-line reason when there is no such interface, or a packet is longer than its MTU allows.
pub(crate) fn flood(args: &FloodArgs, ready: impl FnOnce()) -> Result<FloodReport, Failure> {
    if args.longest <= args.fragment {
        return Err(Failure::usage(format!(
            "no packet is longer than {} and at most {} bytes long; raise --longest",
            args.fragment, args.longest
        )));
    }
    let interrupt = Interrupt::install().map_err(failed)?;
    let interface = Interface::by_name(&args.interface).map_err(failed)?;
    let socket = PacketSocket::open(interface.index);
    let socket = socket.map_err(|error| {
        Failure::new(format!(
            "no packet socket on {}: {error}; run it as root",
            args.interface
        ))
    })?;
    let ends = args.to.ends(args.port);
    ready();
    let mut report = FloodReport::default();
    let started = Instant::now();
    let mut packet = Vec::new();
    let mut sent = 0_u64;
    while !interrupt.is_set() && started.elapsed().as_secs_f64() < args.seconds {
        let due = (started.elapsed().as_secs_f64() * f64::from(args.rate)) as u64;
        while sent < due {
            let kind = [Kind::Plain, Kind::Vlan, Kind::Long][(sent % 3) as usize];
            make(args, &ends, kind, sent, &mut packet);
            sent += 1;
            match socket.send(&packet) {
                Ok(()) => match kind {
                    Kind::Plain => report.plain += 1,
                    Kind::Vlan => report.vlan += 1,
                    Kind::Long => report.long += 1,
                },
                // A card that sets up its link anew takes nothing meanwhile.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENETDOWN)) => {
                    report.refused += 1;
                }
                Err(error) => {
                    return Err(Failure::new(format!(
                        "cannot send a packet of {} bytes: {error}; does --longest fit the MTU of {}?",
                        packet.len(),
                        args.interface
                    )));
                }
            }
        }
        std::thread::sleep(STEP);
    }
    Ok(report)
}

/// Writes the `number`-th packet.
fn make(args: &FloodArgs, ends: &Ends, kind: Kind, number: u64, packet: &mut Vec<u8>) {
    let random = split_mix(args.seed, number);
    // Every second one as long as its kind may be: short packets do less harm.
    let ip_len = |least: u16, most: u16| match random & 1 {
        0 => most,
        _ => least + ((random >> 1) % u64::from(most - least + 1)) as u16,
    };
    let ip_len = match kind {
        Kind::Plain | Kind::Vlan => ip_len(IP_UDP_LEN, args.fragment),
        Kind::Long => ip_len(args.fragment + 1, args.longest),
    };
    let payload_len = usize::from(ip_len - IP_UDP_LEN);
    packet.clear();
    packet.extend_from_slice(&ends.headers(payload_len));
    packet[SOURCE_PORT_AT..][..2].copy_from_slice(&args.source_port.to_be_bytes());
    if kind == Kind::Vlan {
        let vlan: u16 = if number & 2 == 0 { 0 } else { 5 };
        let [high, low] = vlan.to_be_bytes();
        // Behind the addresses, before the type of what follows (IEEE 802.1Q).
        packet.splice(12..12, [0x81, 0x00, high, low]);
    }
    let headers_len = packet.len();
    while packet.len() < headers_len + payload_len {
        let place = packet.len() as u64;
        packet.extend_from_slice(&split_mix(random, place).to_le_bytes());
    }
    packet.truncate(headers_len + payload_len);
    debug_assert!(headers_len == UDP_HEADER_LEN || headers_len == UDP_HEADER_LEN + TAG_LEN);
}

/// Sends raw frames out of an interface.
struct PacketSocket(OwnedFd);

#[expect(unsafe_code, reason = "packet sockets, which rustix cannot bind")]
impl PacketSocket {
    fn open(ifindex: u32) -> io::Result<PacketSocket> {
        // SAFETY: no memory is passed. Protocol 0: it receives nothing.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: integers and bytes only; zero is a value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        (address.sll_family, address.sll_ifindex) = (libc::AF_PACKET as u16, ifindex as i32);
        // SAFETY: an initialised address of this length.
        let bound = unsafe { libc::bind(fd, (&raw const address).cast(), size_of_val(&address) as u32) };
        if bound != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(PacketSocket(socket))
    }

    fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: `frame` is readable for its length.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use lm_bench::bare::Mac;

    fn packets(kind: Kind) -> Vec<Vec<u8>> {
        let args = FloodArgs {
            interface: String::new(),
            to: ToArgs {
                to: Ipv4Addr::new(10, 0, 0, 2),
                to_mac: Mac([2, 0, 0, 0, 0, 2]),
                from: Ipv4Addr::new(10, 0, 0, 1),
                from_mac: Mac([2, 0, 0, 0, 0, 1]),
            },
            port: 7168,
            source_port: 50_000,
            rate: 1,
            fragment: 1400,
            longest: 1600,
            seed: 7,
            seconds: 1.0,
        };
        let ends = args.to.ends(args.port);
        let one = |number| {
            let mut packet = Vec::new();
            make(&args, &ends, kind, number, &mut packet);
            packet
        };
        (0..200).map(one).collect()
    }

    #[test]
    fn packets_have_the_ports_of_fragments_and_the_lengths_of_their_kind() {
        for packet in packets(Kind::Plain) {
            assert_eq!(packet[34..38], [0xc3, 0x50, 0x1c, 0x00]);
            assert!((42..=1414).contains(&packet.len()));
            assert_eq!(packet[16..18], ((packet.len() - 14) as u16).to_be_bytes());
        }
        let long = packets(Kind::Long);
        assert!(long.iter().all(|packet| (1415..=1614).contains(&packet.len())));
        assert!(long.iter().any(|packet| packet.len() == 1614));
        assert!(long[0] != long[1] && long == packets(Kind::Long));
    }

    #[test]
    fn tags_stand_behind_the_addresses() {
        let packets = packets(Kind::Vlan);
        for packet in &packets {
            assert_eq!(packet[12..14], [0x81, 0x00]);
            assert_eq!(packet[16..18], [0x08, 0x00], "the type of what follows");
            assert_eq!(packet[38..40], [0xc3, 0x50], "the source port");
        }
        let of = |vlan| packets.iter().filter(|packet| packet[15] == vlan).count();
        assert_eq!((of(0), of(5)), (100, 100));
    }
}
