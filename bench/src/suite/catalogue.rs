//! Who is measured: every system with the best configuration that was found for it, in words that go into the report.

use super::end::Transport;
use super::frozen::PREFIX;
use super::schema::What;
use super::tools::Tool;

/// Which of the links a system runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum On {
    /// The one to HOST.
    Main,
    /// The one to `--peer-host`: the same, and never with an XDP program.
    Plain,
    /// The one to `--rps-host`.
    Steered,
    /// The one to `--napi-host`.
    Polled,
    /// The one to `--offloads-host`.
    Offloads,
}

/// How a system's programs are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Our own ends.
    Ours(Transport),
    /// The bare programs, by whose sockets.
    Bare,
    /// The ends of a frozen build, as LM's own.
    Frozen,
    /// Somebody else's.
    Tool(Tool),
}

/// A system.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) configuration: &'static str,
    pub(super) on: On,
    pub(super) how: How,
    /// Of the near end.
    pub(super) options: &'static str,
}

const fn entry(
    id: &'static str,
    title: &'static str,
    on: On,
    how: How,
    configuration: &'static str,
) -> Entry {
    Entry {
        id,
        title,
        configuration,
        on,
        how,
        options: "",
    }
}

/// One that `all` does not stand for.
const fn variant(
    id: &'static str,
    title: &'static str,
    how: How,
    options: &'static str,
    configuration: &'static str,
) -> Entry {
    let on = match how {
        Ours(Transport::Tcp) => Plain,
        _ => Main,
    };
    Entry {
        options,
        ..entry(id, title, on, how, configuration)
    }
}

use How::{Bare, Ours};
use On::{Main, Offloads, Plain, Polled, Steered};

/// Everybody. The first one is what the others are compared with.
pub(super) const ALL: &[Entry] = &[
    entry(
        "lm",
        "LM",
        Main,
        Ours(Transport::Lm),
        "the tools' defaults: reliable, digests; never sleeps, 192 packets in flight, windows of 256 fragments, queue polled on veth; 1 MiB \
         of messages under way, 4 to 256 of them",
    ),
    entry(
        "lm-no-integrity",
        "LM without digests",
        Main,
        Ours(Transport::LmNoIntegrity),
        "as LM, with --integrity none: kernel UDP has only a checksum that a veth pair never computes",
    ),
    entry(
        "lm-sleeping",
        "LM that sleeps",
        Main,
        Ours(Transport::LmSleeping),
        "as LM, with the endpoint's default way to wait: spin, then yield, then sleep",
    ),
    entry(
        "bare",
        "bare AF_XDP",
        Main,
        Bare,
        "packets without messages, acknowledgements or gate, by the best of six recipes, LM's own among them: 192 in flight, 32 descriptors a \
         call, chunks of 2048 bytes that do not overlap, where packets are longer several of 4096 and 512 KiB in flight, paced through \
         shared memory where both ends are on one machine",
    ),
    entry(
        "udp-blocking",
        "kernel UDP, blocking",
        Plain,
        Ours(Transport::UdpBlocking),
        "one connected socket each side, one datagram a call, the kernel's own buffers; messages beyond 65,507 bytes as trains of datagrams",
    ),
    entry(
        "udp-spinning",
        "kernel UDP, spinning",
        Plain,
        Ours(Transport::UdpSpinning),
        "as blocking, on sockets that do not block and are asked again at once",
    ),
    entry(
        "udp-mmsg",
        "kernel UDP, sendmmsg and recvmmsg",
        Plain,
        Ours(Transport::UdpMmsg),
        "up to 32 datagrams or 256 KiB a call, 4 MiB of receive memory",
    ),
    entry(
        "udp-rps",
        "kernel UDP, sendmmsg and recvmmsg, RPS",
        Steered,
        Ours(Transport::UdpMmsg),
        "as udp-mmsg; the receiving core takes the packets from the sending one (receive packet steering)",
    ),
    entry(
        "udp-rps-single",
        "kernel UDP, blocking, RPS",
        Steered,
        Ours(Transport::UdpBlocking),
        "as udp-blocking; the receiving core takes the packets from the sending one (receive packet steering)",
    ),
    entry(
        "udp-polled",
        "kernel UDP, sendmmsg and recvmmsg, busy polling",
        Polled,
        Ours(Transport::UdpPolled),
        "as udp-mmsg (round trips: as udp-spinning); who receives never sleeps and polls the queue itself: SO_PREFER_BUSY_POLL, \
         SO_BUSY_POLL_BUDGET 128, its interrupts deferred as LM defers them; on veth with generic receive offload, without which it has no \
         NAPI instance",
    ),
    entry(
        "udp-gso",
        "kernel UDP, GSO and GRO",
        Plain,
        Ours(Transport::UdpGso),
        "UDP_SEGMENT: up to 44 datagrams of one packet each a call, cut by the kernel; UDP_GRO; 4 MiB of receive memory",
    ),
    entry(
        "udp-gso-offloads",
        "kernel UDP, GSO and GRO, offloads on",
        Offloads,
        Ours(Transport::UdpGso),
        "as udp-gso, on a link with segmentation offloads: on veth the segments never become packets",
    ),
    entry(
        "tcp",
        "kernel TCP",
        Plain,
        Ours(Transport::Tcp),
        "TCP_NODELAY, the kernel's own buffers and congestion control; round trips spin where a message fits a packet; streams gather short messages to 128 KiB a write, \
         and read as much as there is",
    ),
    entry(
        "tcp-rps",
        "kernel TCP, RPS",
        Steered,
        Ours(Transport::Tcp),
        "as tcp; the receiving core takes the packets from the sending one (receive packet steering)",
    ),
    entry(
        "tcp-polled",
        "kernel TCP, busy polling",
        Polled,
        Ours(Transport::TcpPolled),
        "as tcp; who receives never sleeps and polls the queue itself, as with udp-polled, where the kernel joins received segments",
    ),
    entry(
        "tcp-zerocopy",
        "kernel TCP, MSG_ZEROCOPY",
        Plain,
        Ours(Transport::TcpZerocopy),
        "as tcp, sent with MSG_ZEROCOPY from 16 buffers; on veth the kernel copies all the same when the packet changes hosts",
    ),
    entry(
        "tcp-offloads",
        "kernel TCP, offloads on",
        Offloads,
        Ours(Transport::Tcp),
        "as tcp, on a link with segmentation offloads: on veth the segments never become packets",
    ),
    entry(
        "iperf3",
        "iperf3, UDP",
        Plain,
        How::Tool(Tool::Iperf3Udp),
        "-u -b 0 -l SIZE: a yardstick for udp-blocking",
    ),
    entry(
        "iperf3-tcp",
        "iperf3, TCP",
        Plain,
        How::Tool(Tool::Iperf3Tcp),
        "-l SIZE: a yardstick for tcp",
    ),
    entry(
        "sockperf",
        "sockperf, blocking",
        Plain,
        How::Tool(Tool::Sockperf),
        "ping-pong --full-rtt: a yardstick for udp-blocking",
    ),
    entry(
        "sockperf-spinning",
        "sockperf, spinning",
        Plain,
        How::Tool(Tool::SockperfSpinning),
        "ping-pong --full-rtt --nonblocked: a yardstick for udp-spinning",
    ),
    entry(
        "fi_pingpong",
        "libfabric fi_pingpong",
        Plain,
        How::Tool(Tool::FiPingpong),
        "-p tcp -e msg; it tells a mean only, which stands for every percentile here",
    ),
    entry(
        "ucx_perftest",
        "UCX ucx_perftest",
        Plain,
        How::Tool(Tool::UcxPerftest),
        "tag_lat over TCP; it tells median and mean only, the mean stands for the upper percentiles here",
    ),
];

/// Who is measured by name alone, beside one of [`ALL`].
const VARIANTS: &[Entry] = &[
    variant(
        "lm-unreliable",
        "LM unreliable",
        Ours(Transport::Lm),
        "--delivery unreliable",
        "as LM, what is lost is not sent again",
    ),
    variant(
        "lm-auto-queue",
        "LM with an adaptive queue",
        Ours(Transport::LmAutoQueue),
        "",
        "as LM, as many packets at the device and on the way as keep both busy",
    ),
    variant(
        "lm-integrated",
        "LM that sums up",
        Ours(Transport::Lm),
        "--checksum integrated",
        "as LM, with UDP's checksum in each packet, taken beside its digest",
    ),
    variant(
        "lm-offload",
        "LM whose card sums up",
        Ours(Transport::Lm),
        "--checksum offload",
        "as LM, with UDP's checksum in each packet by the card, or by the kernel where it cannot",
    ),
    variant(
        "lm-summed-apart",
        "LM summed up in a pass of its own",
        Ours(Transport::Lm),
        "--sum-apart",
        "as LM, whose sender sums each message up before it sends it, and throws the sum away",
    ),
    variant(
        "real-time-sleeping",
        "LM's real-time sockets",
        Ours(Transport::RealTimeSleeping),
        "",
        "real-time messages, never repeated; asleep while there is nothing to do",
    ),
    variant(
        "lm-no-integrity-partial",
        "LM partial without digests",
        Ours(Transport::LmNoIntegrity),
        "--delivery partial",
        "as LM without digests; what is lost is not sent again, and the rest is delivered",
    ),
    variant(
        "lm-no-integrity-unreliable",
        "LM unreliable without digests",
        Ours(Transport::LmNoIntegrity),
        "--delivery unreliable",
        "as LM without digests, what is lost is not sent again",
    ),
    variant(
        "tcp-cubic",
        "kernel TCP, cubic",
        Ours(Transport::Tcp),
        "--congestion cubic",
        "as tcp, with the kernel's default congestion control, which takes every loss for congestion",
    ),
    variant(
        "tcp-bbr",
        "kernel TCP, bbr",
        Ours(Transport::Tcp),
        "--congestion bbr",
        "as tcp, with a congestion control that hardly minds random losses",
    ),
];

/// Everybody, and who is measured by name alone.
pub(super) fn known() -> impl Iterator<Item = &'static Entry> {
    ALL.iter().chain(VARIANTS)
}

/// LM by a frozen build of this name.
pub(super) fn frozen(name: &str) -> Entry {
    // A command runs once and ends.
    let id = format!("{PREFIX}{name}").leak();
    let title = format!("LM at {name}").leak();
    let configuration = format!("as LM, by both ends of the build {name}").leak();
    entry(id, title, Main, How::Frozen, configuration)
}

/// Longest datagram over IPv4.
const MAX_DATAGRAM: u64 = 65_507;

impl Entry {
    /// Whether the system can be measured by this at this length. What cannot is no fault of anybody's, and leaves no trace in a report.
    pub(super) fn measures(&self, what: What, size: u64) -> bool {
        let stream = matches!(what, What::Throughput | What::Cpu);
        match self.how {
            How::Tool(tool) => match what {
                What::Latency => {
                    tool.is_round_trip()
                        && (tool != Tool::Sockperf && tool != Tool::SockperfSpinning
                            || (14..=MAX_DATAGRAM).contains(&size))
                }
                What::Throughput => {
                    !tool.is_round_trip() && (tool != Tool::Iperf3Udp || (16..=64 << 10).contains(&size))
                }
                What::Cpu | What::LatencyUnderLoad => false,
            },
            // One packet is all that a bare round trip has.
            How::Bare => match what {
                What::Throughput => size >= 8,
                What::Latency => (8..=1472).contains(&size),
                What::Cpu | What::LatencyUnderLoad => false,
            },
            How::Frozen => ALL[0].measures(what, size),
            How::Ours(transport) => match transport {
                // To hand a single packet to another core only takes time.
                _ if what == What::Latency && self.on == Steered => false,
                Transport::UdpBlocking | Transport::UdpSpinning | Transport::UdpPolled
                    if what == What::Latency =>
                {
                    size <= MAX_DATAGRAM
                }
                Transport::UdpPolled => stream && size >= 64,
                Transport::UdpMmsg | Transport::UdpGso | Transport::TcpZerocopy => stream && size >= 64,
                _ if what == What::LatencyUnderLoad => {
                    matches!(
                        transport,
                        Transport::Lm
                            | Transport::LmNoIntegrity
                            | Transport::LmAutoQueue
                            | Transport::UdpSpinning
                    ) && self.on != Steered
                        && size > 64
                }
                _ if stream => size >= 8,
                _ => true,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_everybody_measures_something() {
        let ids: BTreeSet<_> = known().map(|entry| entry.id).collect();
        assert_eq!(ids.len(), known().count());
        for entry in known() {
            let whats = [What::Latency, What::Throughput, What::Cpu, What::LatencyUnderLoad];
            assert!(
                whats.into_iter().any(|what| [64, 1024, 65_536]
                    .into_iter()
                    .any(|size| entry.measures(what, size))),
                "{}",
                entry.id
            );
        }
    }

    #[test]
    fn what_is_called_lm_has_the_tools_defaults() {
        for entry in known() {
            let is_default = entry.how == Ours(Transport::Lm) && entry.options.is_empty();
            assert_eq!(entry.title == "LM", is_default, "{entry:?}");
        }
        assert_eq!(ALL[0].title, "LM");
    }

    #[test]
    fn datagrams_end_somewhere() {
        let udp = ALL.iter().find(|entry| entry.id == "udp-spinning").unwrap();
        assert!(udp.measures(What::Latency, 65_507) && !udp.measures(What::Latency, 65_536));
        assert!(udp.measures(What::Throughput, 1 << 20));
    }
}
