//! The systems: their names, the options that are words of a name, and which of them does what at which length.

use std::num::NonZeroU64;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use lm_dataplane::Depth;
use lm_protocol::smoother::Law;
use lm_protocol::window::WindowShape;
use serde::{Deserialize, Serialize};

use super::schema::What;
use crate::cli::{ChecksumOption, DeliveryOption, IntegrityOption, Mode, parse_rate, usage_fault};
use crate::lm::Idle;
use crate::size::ByteSize;

/// A way to move messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum How {
    Lm,
    RealTime,
    UdpBlocking,
    UdpSpinning,
    UdpGso,
    Tcp,
    Bare,
    Iperf3,
    Iperf3Tcp,
    Sockperf,
    SockperfSpinning,
}

/// A system by its name: `lm --integrity none`.
#[derive(Clone, Debug, Parser, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[command(name = "a system", no_binary_name = true, disable_help_flag = true)]
pub(crate) struct System {
    #[arg(skip)]
    pub(crate) name: String,
    #[arg(value_enum, value_name = "SYSTEM")]
    pub(crate) how: How,
    #[command(flatten)]
    pub(crate) options: Options,
}

/// The words behind a name.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// LM: whether digests go with what is sent
    #[arg(long, value_enum, default_value_t = IntegrityOption::Manifest)]
    pub(crate) integrity: IntegrityOption,
    /// LM: how its ends wait
    #[arg(long, value_enum, default_value_t = Idle::Spin)]
    pub(crate) idle: Idle,
    /// LM and bare: how packets pass between driver and program [default: --mode]
    #[arg(long, value_enum)]
    pub(super) mode: Option<Mode>,
    /// LM: what becomes of messages that lose fragments
    #[arg(long, value_enum, default_value_t = DeliveryOption::Reliable)]
    pub(crate) delivery: DeliveryOption,
    /// LM: packets in the device and on the way at once: full, auto, or a number
    #[arg(long, value_parser = crate::cli::parse_depth, default_value = "full")]
    pub(crate) depth: Depth,
    /// LM: what is in the UDP checksum of packets that leave
    #[arg(long, value_enum, default_value_t = ChecksumOption::None)]
    pub(crate) checksum: ChecksumOption,
    /// LM: fragments in a window
    #[arg(long, value_parser = crate::cli::parse_window, default_value = "256")]
    pub(crate) window: WindowShape,
    /// LM: whether its programs produce and consume all bytes, and a message's while it is on its way or before and after
    #[arg(long, value_enum, default_value_t = Work::None)]
    pub(crate) work: Work,
    /// TCP: congestion control of the near end
    #[arg(long)]
    pub(crate) congestion: Option<String>,
    /// Bare: its queue [default: the second of several for streams, and the first]
    #[arg(long)]
    pub(crate) queue: Option<u32>,
    /// UDP: packets are marked EF, and go before others in their host
    #[arg(long)]
    pub(crate) expedited: bool,
    /// Real time: a smoother for a link of this rate holds back what else the near host sends
    #[arg(long, value_parser = parse_rate)]
    pub(crate) smoother: Option<NonZeroU64>,
    /// Real time: the smoother's law
    #[arg(long, value_parser = law(), default_value = "paced")]
    pub(crate) law: Law,
    /// As a load: length of its messages
    #[arg(long, default_value = "64K")]
    pub(super) bytes: ByteSize,
    /// As a load: most that it sends, in bits of payload per second
    #[arg(long, value_parser = parse_rate)]
    pub(super) bits: Option<NonZeroU64>,
    /// Of a stream with a rate: messages that are due at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) burst: u32,
}

/// What programs do with messages' bytes (E-UDP).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Work {
    /// Nothing.
    None,
    /// A message is produced, then sent, and consumed when it has come.
    Coarse,
    /// Each window is sent when it is produced, and consumed when it is there.
    Overlap,
}

fn law() -> impl TypedValueParser<Value = Law> {
    PossibleValuesParser::new(["paper", "paced"]).map(|name| match &*name {
        "paper" => Law::Paper,
        _ => Law::Paced,
    })
}

impl System {
    /// Reads a name with its options.
    pub(crate) fn parse(text: &str) -> Result<System, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let system = System::try_parse_from(&words);
        // What is said of usage is said of another command line.
        let system = system.map_err(|error| usage_fault(&error.to_string()))?;
        Ok(System {
            name: words.join(" "),
            ..system
        })
    }

    /// What is measured where nothing is named: everything that moves ordinary messages, and LM without digests. The first one is what the
    /// others are compared with.
    pub(super) fn defaults() -> Vec<System> {
        let ordinary = How::value_variants().iter().filter(|how| **how != How::RealTime);
        let names = ordinary.filter_map(How::to_possible_value);
        let mut names: Vec<String> = names.map(|value| value.get_name().to_owned()).collect();
        names.insert(1, "lm --integrity none".to_owned());
        let parse = |name: String| System::parse(&name).expect("a name of this program");
        names.into_iter().map(parse).collect()
    }

    pub(crate) fn sleeps(&self) -> bool {
        self.options.idle == Idle::Default
    }

    /// Whether a round trip without an answer is given up: what was lost is not repeated, and what never sleeps can be asked to.
    pub(crate) fn gives_up(&self) -> bool {
        match self.how {
            How::RealTime => !self.sleeps(),
            how => matches!(how, How::UdpSpinning | How::Bare),
        }
    }

    /// Whether it can be measured by this at this length; what cannot leaves no trace in a report.
    pub(super) fn measures(&self, what: What, size: u64) -> bool {
        match (self.how, what) {
            (How::Lm, What::RoundTrips) => true,
            (How::Lm | How::RealTime | How::UdpSpinning, What::Beside) => size > 64,
            (_, What::Beside) => false,
            // One packet is all that a bare round trip has.
            (How::Bare, What::RoundTrips) => (8..=1472).contains(&size),
            (How::UdpBlocking | How::UdpSpinning, What::RoundTrips) => size <= MAX_DATAGRAM,
            (How::UdpGso | How::Iperf3 | How::Iperf3Tcp, What::RoundTrips) => false,
            (How::UdpGso, What::Stream) => size >= 64,
            (How::Iperf3, What::Stream) => (16..=64 << 10).contains(&size),
            (How::Sockperf | How::SockperfSpinning, What::RoundTrips) => (14..=MAX_DATAGRAM).contains(&size),
            (How::Sockperf | How::SockperfSpinning, What::Stream) => false,
            (_, What::RoundTrips) => true,
            (_, What::Stream) => size >= 8,
        }
    }
}

/// Longest datagram over IPv4.
pub(crate) const MAX_DATAGRAM: u64 = 65_507;

impl How {
    /// Whether messages pass an endpoint.
    pub(crate) const fn is_lm(self) -> bool {
        matches!(self, How::Lm | How::RealTime)
    }

    /// Whether what is lost is not repeated.
    pub(crate) const fn loses(self) -> bool {
        matches!(
            self,
            How::RealTime | How::UdpBlocking | How::UdpSpinning | How::UdpGso | How::Bare
        )
    }

    /// The program that is not of this workspace, and Debian's package that has it.
    pub(super) const fn tool(self) -> Option<&'static str> {
        match self {
            How::Iperf3 | How::Iperf3Tcp => Some("iperf3"),
            How::Sockperf | How::SockperfSpinning => Some("sockperf"),
            _ => None,
        }
    }

    /// The best configuration that was found, in words that go into the report.
    pub(super) const fn configuration(self) -> &'static str {
        match self {
            How::Lm => {
                "the tools' defaults: reliable, digests; never sleeps, 192 packets in flight, windows of 256 \
                 fragments, queue polled on veth; 1 MiB of messages under way, 4 to 256 of them"
            }
            How::RealTime => "LM's real-time sockets: messages are never repeated",
            How::UdpBlocking => {
                "one connected socket each side, one datagram a call, the kernel's own buffers; messages beyond \
                 65,507 bytes as trains of datagrams"
            }
            How::UdpSpinning => "as blocking, on sockets that do not block and are asked again at once",
            How::UdpGso => {
                "UDP_SEGMENT: up to 44 datagrams of one packet each a call, cut by the kernel; UDP_GRO; 4 MiB of \
                 receive memory"
            }
            How::Tcp => {
                "TCP_NODELAY, the kernel's own buffers and congestion control; round trips spin where a message fits \
                 a packet; streams gather short messages to 128 KiB a write, and read as much as there is"
            }
            How::Bare => {
                "bare AF_XDP: packets without messages, acknowledgements or gate, 192 in flight, 32 descriptors a \
                 call; on veth the \
                 receiving core polls the queue as LM does, paced through shared memory, else the receiver spins"
            }
            How::Iperf3 => "-u -b 0 -l SIZE: a yardstick for udp-blocking",
            How::Iperf3Tcp => "-l SIZE: a yardstick for tcp",
            How::Sockperf => "ping-pong --full-rtt: a yardstick for udp-blocking",
            How::SockperfSpinning => "ping-pong --full-rtt --nonblocked: a yardstick for udp-spinning",
        }
    }
}

impl TryFrom<String> for System {
    type Error = String;

    fn try_from(text: String) -> Result<System, String> {
        System::parse(&text)
    }
}

impl From<System> for String {
    fn from(system: System) -> String {
        system.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_is_measured_by_itself_measures_something() {
        let tasks = [What::RoundTrips, What::Stream, What::Beside];
        for system in System::defaults() {
            let does = |what| {
                [64, 1024, 65_536]
                    .into_iter()
                    .any(|size| system.measures(what, size))
            };
            assert!(tasks.into_iter().any(does), "{}", system.name);
        }
    }

    #[test]
    fn options_are_words_of_a_name() {
        let system = System::parse(" lm  --delivery partial --idle default").unwrap();
        assert_eq!(system.name, "lm --delivery partial --idle default");
        assert!(system.sleeps() && system.options.integrity == IntegrityOption::Manifest);
        assert_eq!(
            serde_json::to_string(&system).unwrap(),
            format!("{:?}", system.name)
        );
        let error = System::parse("rdma").unwrap_err();
        assert!(
            error.contains("rdma") && error.contains("tcp") && !error.contains("Usage"),
            "{error}"
        );
        assert!(System::parse("lm --interface lo").is_err() && System::parse("").is_err());
    }

    #[test]
    fn datagrams_end_somewhere() {
        let udp = System::parse("udp-spinning").unwrap();
        assert!(udp.measures(What::RoundTrips, 65_507) && !udp.measures(What::RoundTrips, 65_536));
        assert!(udp.measures(What::Stream, 1 << 20));
    }
}
