//! What `lm-bench compare` writes with `--json`, and what the report page reads: one [`Report`].
//!
//! Times are whole round trips in nanoseconds, lengths payload in bytes, processor time in seconds. Fields that a later version adds
//! are optional; [`SCHEMA`] changes when the meaning of one does.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Value of [`Report::schema`].
pub const SCHEMA: &str = "lm-bench/2";

/// The result of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of `lm-bench`.
    pub version: String,
    /// When the run began (RFC 3339, UTC).
    pub started: String,
    /// The host on which the command ran: the sending side.
    pub host: Host,
    /// The other host.
    pub far: Host,
    /// Links between the two, as the sending host sees them.
    pub links: Vec<Link>,
    /// The command's options, and whatever else a repetition needs to know.
    pub settings: BTreeMap<String, String>,
    /// What a reader must know before believing a figure.
    pub caveats: Vec<String>,
    /// The systems that were measured.
    pub systems: Vec<Measured>,
    /// What was measured.
    pub rows: Vec<Row>,
    /// Comparisons of systems within the rounds.
    pub ratios: Vec<Ratio>,
    /// Systems that were not measured, and why.
    pub absent: Vec<Absent>,
    /// What failed: each round of a row is among its rounds or here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<Failed>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Kernel release (`uname -r`).
    pub kernel: String,
    /// Model of the processor.
    pub cpu: String,
    /// Core that the programs ran on.
    pub core: u32,
    /// Main memory in bytes.
    pub memory_bytes: u64,
    /// Frequency governor of that core, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub governor: Option<String>,
}

/// A link between the hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Interface on the sending host.
    pub interface: String,
    /// Its driver.
    pub driver: String,
    /// Largest IP packet in bytes.
    pub mtu: u32,
    /// How AF_XDP moved packets there: `native copy`, `native zero-copy`, `generic copy`, several joined by `and`, or `none` where no
    /// AF_XDP ran.
    pub mode: String,
    /// Receive queues.
    pub queues: u32,
    /// Offloads by the names that `ethtool -k` shows.
    pub offloads: BTreeMap<String, bool>,
    /// Whether an XDP program was attached before the run: then no kernel row is worth anything.
    pub xdp: bool,
    /// Speed that the driver reports, in Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed_mbit: Option<u64>,
}

/// One way to move messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Its name with its options: `lm`, `lm --integrity none`, `udp-blocking` …
    pub id: String,
    /// The best configuration found, in words.
    pub configuration: String,
    /// The [`Link::interface`] it ran on.
    pub link: String,
}

/// What a [`Row`] measured.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Round trips of one message.
    RoundTrips,
    /// One way, several messages in flight.
    Stream,
    /// Round trips of 64 bytes beside a stream of longer messages, on the same two threads.
    Beside,
}

impl What {
    /// As tables show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            What::RoundTrips => "round trips",
            What::Stream => "stream",
            What::Beside => "round trips beside",
        }
    }
}

/// One system at one message size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub what: What,
    /// [`Measured::id`].
    pub system: String,
    /// Message length in bytes.
    pub size: u64,
    /// Each repetition.
    pub rounds: Vec<Round>,
    /// All rounds' round trips as `.hgrm` text (microseconds).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub histogram: Option<String>,
}

/// One repetition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Index of the repetition: rounds of the same index were measured side by side.
    pub at: u32,
    /// Messages that arrived whole while the time counted, or round trips.
    pub messages: u64,
    /// Messages that did not come, or not whole.
    pub lost_messages: u64,
    /// Payload that arrived one way; beside round trips the stream's.
    pub bytes: u64,
    /// The time in which it did, by the receiver's clock.
    pub seconds: f64,
    /// Processor time of the sending process meanwhile.
    pub cpu_seconds_send: f64,
    /// Processor time of the receiving process meanwhile.
    pub cpu_seconds_receive: f64,
    /// Busy time of all cores meanwhile, softirqs included, by `/proc/stat`: of the machine, or the sum of both machines.
    pub cpu_seconds_machine: f64,
    /// What came of a load beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// How long round trips took.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub times: Option<Times>,
    /// LM's wake-ups of devices for each message, at the sending and the receiving end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wakeups_per_message: Vec<f64>,
    /// Bytes that LM copied for each message, at both ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copied_bytes_per_message: Vec<f64>,
}

/// Another system's stream beside a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Payload that arrived.
    pub bytes: u64,
    /// The time in which it did.
    pub seconds: f64,
    /// Messages that arrived whole.
    pub messages: u64,
    /// Messages that did not.
    pub lost_messages: u64,
}

/// Whole round trips of one repetition, in nanoseconds. What a tool does not print is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Median.
    pub p50_ns: f64,
    /// Mean.
    pub mean_ns: f64,
    /// Shortest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ns: Option<f64>,
    /// 99 of 100 were not longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<f64>,
    /// 999 of 1000 were not longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p999_ns: Option<f64>,
    /// Longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_ns: Option<f64>,
}

impl Round {
    /// A figure by its name: `p50`, `p99` (nanoseconds), `bits_per_s` or `cpu_s_per_gb`; `None` where the round has none.
    #[must_use]
    pub fn figure(&self, metric: &str) -> Option<f64> {
        let times = self.times.as_ref();
        match metric {
            "p50" => times.map(|times| times.p50_ns),
            "p99" => times?.p99_ns,
            "bits_per_s" if self.seconds > 0.0 => Some(self.bytes as f64 * 8.0 / self.seconds),
            "cpu_s_per_gb" if self.bytes > 0 => Some(self.cpu_seconds_machine / (self.bytes as f64 / 1e9)),
            _ => None,
        }
    }
}

impl Row {
    /// Median, quartiles and interval of a figure over the rounds.
    #[must_use]
    pub fn summary(&self, metric: &str) -> Option<lm_measure::statistics::Summary> {
        let figures = self.rounds.iter().filter_map(|round| round.figure(metric));
        lm_measure::statistics::Summary::of_finite(figures)
    }
}

/// One system's figure over another's, round by round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// What was measured.
    pub what: What,
    /// Message length in bytes.
    pub size: u64,
    /// As of [`Round::figure`].
    pub metric: String,
    /// [`Measured::id`] above the line.
    pub system: String,
    /// [`Measured::id`] below it.
    pub against: String,
    /// Rounds that both have.
    pub rounds: u32,
    /// Median of the rounds' ratios.
    pub median: f64,
    /// Lower end of the median's 95 % interval.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

/// A system that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// [`Measured::id`].
    pub system: String,
    /// Why, and what to install or say.
    pub why: String,
}

/// A repetition that failed, or was not tried any more. None is repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// What was to be measured.
    pub what: What,
    /// [`Measured::id`].
    pub system: String,
    /// Message length in bytes.
    pub size: u64,
    /// Index of the repetition.
    pub at: u32,
    /// Why.
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_has_the_figures_that_were_measured() {
        let text = concat!(
            r#"{"at":1,"messages":5,"lost_messages":0,"bytes":0,"seconds":1.0,"cpu_seconds_send":0.0,"#,
            r#""cpu_seconds_receive":0.0,"cpu_seconds_machine":0.0,"p50_ns":2.0,"mean_ns":2.5,"p99_ns":4.0}"#
        );
        let round: Round = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&round).unwrap(), text);
        assert_eq!((round.figure("p50"), round.figure("p99")), (Some(2.0), Some(4.0)));
        assert_eq!(round.figure("cpu_s_per_gb"), None);
        let stream = Round {
            bytes: 1_000_000_000,
            seconds: 2.0,
            cpu_seconds_machine: 3.0,
            ..Round::default()
        };
        let text = serde_json::to_string(&stream).unwrap();
        assert_eq!(serde_json::from_str::<Round>(&text).unwrap(), stream);
        let figures = ["bits_per_s", "cpu_s_per_gb", "p50"].map(|metric| stream.figure(metric));
        assert_eq!(figures, [Some(4e9), Some(3.0), None]);
    }

    #[test]
    fn names_in_json_are_those_of_the_command_line() {
        use clap::ValueEnum as _;
        for what in What::value_variants() {
            let name = what.to_possible_value().unwrap().get_name().to_owned();
            assert_eq!(serde_json::to_value(what).unwrap(), name);
        }
    }
}
