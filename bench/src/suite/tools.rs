//! Standard tools, where they are installed: iperf3 and sockperf, by which our own kernel rows are judged.

use std::net::SocketAddrV4;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::child::Place;
use super::schema::{Round, Times};
use crate::cli::Failure;

/// A program that is not of this workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Tool {
    /// iperf3's UDP stream without a rate limit.
    Iperf3Udp,
    /// iperf3's TCP stream.
    Iperf3Tcp,
    /// sockperf's ping-pong, blocking.
    Sockperf,
    /// sockperf's ping-pong, spinning.
    SockperfSpinning,
}

/// A run of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ToolSpec {
    pub(super) tool: Tool,
    /// Where its far end listens.
    pub(super) address: SocketAddrV4,
    pub(super) size: u64,
    pub(super) seconds: f64,
}

impl Tool {
    /// All of them.
    pub(super) const ALL: [Tool; 4] = [
        Tool::Iperf3Udp,
        Tool::Iperf3Tcp,
        Tool::Sockperf,
        Tool::SockperfSpinning,
    ];

    /// The program, and Debian's package that has it.
    pub(super) const fn program(self) -> &'static str {
        match self {
            Tool::Iperf3Udp | Tool::Iperf3Tcp => "iperf3",
            Tool::Sockperf | Tool::SockperfSpinning => "sockperf",
        }
    }

    /// Port that its far end listens on: each tool's own.
    pub(super) const fn port(self) -> u16 {
        match self {
            Tool::Iperf3Udp | Tool::Iperf3Tcp => 5201,
            Tool::Sockperf | Tool::SockperfSpinning => 11_111,
        }
    }

    /// Whether this host has it.
    pub(super) fn is_installed(self) -> bool {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).any(|folder| folder.join(self.program()).is_file())
    }
}

impl ToolSpec {
    /// Program and arguments.
    pub(super) fn words(&self, place: Place<'_>) -> Vec<String> {
        let (ip, port) = (self.address.ip(), self.address.port());
        // As our own UDP programs do where a message is a little too long.
        let size = match self.tool {
            Tool::Iperf3Udp => self.size.min(65_507),
            _ => self.size,
        };
        let seconds = self.seconds;
        // sockperf and iperf3 count whole seconds.
        let line = match (self.tool, place) {
            (Tool::Iperf3Udp | Tool::Iperf3Tcp, Place::Far(_)) => format!("iperf3 -s -1 -B {ip} -p {port}"),
            (Tool::Iperf3Udp, Place::Near(_)) => {
                format!(
                    "iperf3 -c {ip} -p {port} -u -b 0 -l {size} -t {} -J",
                    whole(seconds)
                )
            }
            (Tool::Iperf3Tcp, Place::Near(_)) => {
                format!("iperf3 -c {ip} -p {port} -l {size} -t {} -J", whole(seconds))
            }
            (Tool::Sockperf | Tool::SockperfSpinning, _) => {
                let spin = if self.tool == Tool::SockperfSpinning {
                    " --nonblocked"
                } else {
                    ""
                };
                let to = format!("--ip {ip} --port {port}{spin}");
                match place {
                    Place::Far(_) => format!("sockperf server {to}"),
                    Place::Near(_) => format!(
                        "sockperf ping-pong {to} --msg-size {} --time {} --full-rtt",
                        size.max(14),
                        whole(seconds)
                    ),
                }
            }
        };
        line.split_whitespace().map(str::to_owned).collect()
    }

    /// What the near end printed, as a round.
    pub(super) fn round(&self, at: u32, text: &str) -> Result<Round, Failure> {
        let round = match self.tool {
            Tool::Iperf3Udp | Tool::Iperf3Tcp => stream(at, text),
            Tool::Sockperf | Tool::SockperfSpinning => sockperf(at, text),
        };
        let name = self.tool.program();
        round.ok_or_else(|| Failure::new(format!("{name} printed no figure; run it by hand to see why")))
    }
}

fn whole(seconds: f64) -> u64 {
    seconds.ceil().max(1.0) as u64
}

/// What iperf3's receiving side counted.
fn stream(at: u32, text: &str) -> Option<Round> {
    let report: Value = serde_json::from_str(text).ok()?;
    let end = &report["end"];
    // TCP: what the receiver took. UDP: `sum` is the sender's, with what the receiver missed.
    let (seconds, bytes, messages, lost) = if end["sum_received"].is_object() && end["sum"].is_null() {
        let sum = &end["sum_received"];
        (sum["seconds"].as_f64()?, sum["bytes"].as_f64()?, 0, 0)
    } else {
        let sum = &end["sum"];
        let (packets, lost) = (sum["packets"].as_u64()?, sum["lost_packets"].as_u64()?);
        let part = 1.0 - sum["lost_percent"].as_f64()? / 100.0;
        let came = packets.saturating_sub(lost);
        (
            sum["seconds"].as_f64()?,
            sum["bytes"].as_f64()? * part,
            came,
            lost,
        )
    };
    let cpu = |name: &str| end["cpu_utilization_percent"][name].as_f64().unwrap_or(0.0) / 100.0 * seconds;
    let (send, receive) = (cpu("host_total"), cpu("remote_total"));
    Some(Round {
        at,
        messages,
        lost_messages: lost,
        bytes: bytes as u64,
        seconds,
        cpu_seconds_send: send,
        cpu_seconds_receive: receive,
        cpu_seconds_machine: send + receive,
        ..Round::default()
    })
}

/// Lines like `sockperf: ---> percentile 50.000 =    6.970`, in microseconds.
fn sockperf(at: u32, text: &str) -> Option<Round> {
    let after = |words: &str| {
        let line = text.lines().find(|line| line.contains(words))?;
        line.rsplit('=').next()?.trim().parse::<f64>().ok()
    };
    let percentile = |wanted: &str| Some(after(&format!("percentile {wanted}"))? * 1000.0);
    // `[Valid Duration] RunTime=0.9 sec; SentMessages=1; ReceivedMessages=64532`
    let count = text
        .lines()
        .find(|line| line.contains("Valid Duration"))
        .and_then(|line| line.rsplit('=').next()?.trim().parse().ok());
    // `Summary: Round trip is 7.1 usec`
    let mean = text.lines().find_map(|line| {
        let (_, rest) = line.split_once("Summary: Round trip is ")?;
        rest.split_whitespace().next()?.parse::<f64>().ok()
    });
    let p50_ns = percentile("50.000")?;
    Some(Round {
        at,
        messages: count.unwrap_or(0),
        times: Some(Times {
            min_ns: after("<MIN> observation").map(|us| us * 1000.0),
            p50_ns,
            p99_ns: percentile("99.000"),
            p999_ns: percentile("99.900"),
            max_ns: after("<MAX> observation").map(|us| us * 1000.0),
            mean_ns: mean.map_or(p50_ns, |mean| mean * 1000.0),
        }),
        ..Round::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sockperf_prints() {
        let text = "\
sockperf: [Valid Duration] RunTime=0.950 sec; SentMessages=64532; ReceivedMessages=64532
sockperf: ====> avg-rtt=7.201
sockperf: Summary: Round trip is 7.201 usec
sockperf: ---> <MAX> observation =  101.500
sockperf: ---> percentile 99.900 =   11.000
sockperf: ---> percentile 99.000 =    9.000
sockperf: ---> percentile 90.000 =    8.000
sockperf: ---> percentile 50.000 =    6.970
sockperf: ---> <MIN> observation =    5.500
";
        let round = sockperf(3, text).expect("it is understood");
        assert_eq!((round.at, round.messages), (3, 64_532));
        let times = round.times.unwrap();
        assert_eq!(
            [
                times.min_ns,
                times.p99_ns,
                times.max_ns,
                Some(times.p50_ns),
                Some(times.mean_ns)
            ],
            [5500.0, 9000.0, 101_500.0, 6970.0, 7201.0].map(Some)
        );
        assert!(sockperf(0, "nothing").is_none());
    }

    #[test]
    fn iperf3_counts_what_arrived() {
        let udp = r#"{"end":{"sum":{"seconds":2,"bytes":4000,"packets":4,"lost_packets":1,"lost_percent":25},
            "cpu_utilization_percent":{"host_total":50,"remote_total":25}}}"#;
        let round = stream(0, udp).expect("it is understood");
        assert_eq!((round.bytes, round.messages, round.lost_messages), (3000, 3, 1));
        assert_eq!(round.cpu_seconds_machine, 1.5);
        let tcp =
            r#"{"end":{"sum_sent":{"bytes":9000,"seconds":1},"sum_received":{"bytes":8000,"seconds":1}}}"#;
        assert_eq!(stream(0, tcp).unwrap().bytes, 8000);
        assert!(stream(0, r#"{"error":"refused"}"#).is_none());
    }
}
