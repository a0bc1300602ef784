//! What the measuring commands write with `--json`, and what the report page reads: one [`Report`].
//!
//! Times are whole round trips in nanoseconds, lengths payload in bytes, processor time in seconds. Fields that a later version adds
//! are optional; [`SCHEMA`] changes when the meaning of one does.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Value of [`Report::schema`].
pub const SCHEMA: &str = "lm-bench/1";

/// The result of one run of a measuring command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// `compare`, `latency`, `throughput`, `cpu` or `limit`.
    pub command: String,
    /// Version of `lm-bench`.
    pub version: String,
    /// When the run began (RFC 3339, UTC).
    pub started: String,
    /// The host on which the command ran: the sending side.
    pub host: Host,
    /// The other host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub far: Option<Host>,
    /// Links between the two, as the sending host sees them.
    pub links: Vec<Link>,
    /// The command's options, and whatever else a repetition needs to know.
    pub settings: BTreeMap<String, String>,
    /// What a reader must know before believing a figure.
    pub caveats: Vec<String>,
    /// Who was measured.
    pub systems: Vec<System>,
    /// What was measured.
    pub rows: Vec<Row>,
    /// Comparisons of systems within the rounds.
    pub ratios: Vec<Ratio>,
    /// Who was not measured, and why.
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
    /// Cores that the programs ran on.
    pub cores: Vec<u32>,
    /// Main memory in bytes.
    pub memory_bytes: u64,
    /// Frequency governor of those cores, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub governor: Option<String>,
}

/// A link between the hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// `veth`, `veth with RPS`, `igb` …; [`System::link`] names it.
    pub name: String,
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
    /// Receive packet steering of the far side's queues, as sysfs shows it; absent where it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rps: Option<String>,
    /// Speed that the driver reports, in Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed_mbit: Option<u64>,
}

/// One way to move messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct System {
    /// Stable name: `lm`, `udp-blocking`, `tcp-offloads`, `quinn` …
    pub id: String,
    /// Name for people.
    pub title: String,
    /// The best configuration found, in words.
    pub configuration: String,
    /// The [`Link::name`] it ran on.
    pub link: String,
}

/// What a [`Row`] measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Round trips of one message: rounds are [`LatencyRound`]s.
    Latency,
    /// One way, several messages in flight: rounds are [`TransferRound`]s.
    Throughput,
    /// The same, with the cores' spare cycles.
    Cpu,
    /// Round trips beside a bulk transfer on the same two threads: [`LatencyRound`]s.
    LatencyUnderLoad,
}

/// One system at one message size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub what: What,
    /// [`System::id`].
    pub system: String,
    /// Message length in bytes.
    pub size: u64,
    /// Each repetition.
    pub rounds: Vec<Round>,
    /// Where the two ends' cores were in each of them; empty where nobody asked, or the hosts are two machines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cores: Vec<Cores>,
    /// All rounds' round trips as `.hgrm` text (microseconds); for latency only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub histogram: Option<String>,
}

impl Row {
    /// Where the cores were in a repetition, if that is known.
    #[must_use]
    pub fn cores_at(&self, at: u32) -> Option<&Cores> {
        self.cores.iter().find(|cores| cores.at == at)
    }
}

/// How far apart the two ends' cores were around one repetition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cores {
    /// Index of the repetition.
    pub at: u32,
    /// A cache line there and back before it, in nanoseconds.
    pub before_ns: f64,
    /// The same after it.
    pub after_ns: f64,
    /// They were two threads of one core.
    pub shared: bool,
    /// They were two, near, and stayed.
    pub near: bool,
}

/// One repetition. The fields tell the two kinds apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Round {
    /// Round trips.
    Latency(LatencyRound),
    /// A transfer.
    Transfer(TransferRound),
}

/// Whole round trips of one repetition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyRound {
    /// Index of the repetition: rounds of the same index were measured side by side.
    pub at: u32,
    /// Round trips.
    pub count: u64,
    /// Shortest; this and the percentiles are absent where a tool does not print them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ns: Option<f64>,
    /// Median; the mean of a tool that prints only that.
    pub p50_ns: f64,
    /// 90 of 100 were not longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p90_ns: Option<f64>,
    /// 99 of 100 were not longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<f64>,
    /// 999 of 1000 were not longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p999_ns: Option<f64>,
    /// Longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_ns: Option<f64>,
    /// Mean.
    pub mean_ns: f64,
    /// What the bulk transfer beside them moved, in bits of received payload per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_bits_per_s: Option<f64>,
    /// What was counted for each, at the asking end.
    #[serde(flatten)]
    pub counts: PerMessage,
}

/// One repetition of a transfer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferRound {
    /// Index of the repetition: rounds of the same index were measured side by side.
    pub at: u32,
    /// Payload that arrived while the time counted.
    pub bytes: u64,
    /// Messages that arrived whole meanwhile.
    pub messages: u64,
    /// Messages that did not come, or not whole.
    pub lost_messages: u64,
    /// The time that counted, by the receiver's clock.
    pub seconds: f64,
    /// Processor time of the sending process meanwhile.
    pub cpu_seconds_send: f64,
    /// Processor time of the receiving process meanwhile.
    pub cpu_seconds_receive: f64,
    /// Busy time of all cores meanwhile, softirqs included, by `/proc/stat`: of the machine, or the sum of both machines.
    pub cpu_seconds_machine: f64,
    /// What a loop of the lowest priority got of each core, as a part of what it gets of the idle core; for `cpu` only.
    /// The sending core, then the receiving one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spare_fraction: Vec<f64>,
    /// What was counted for each message that the sending and the receiving program sent or received.
    #[serde(flatten)]
    pub counts: PerMessage,
}

/// What the kernel did for each message, where it was counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PerMessage {
    /// System calls of the program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls_per_message: Vec<f64>,
    /// Its wake-ups of AF_XDP sockets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wakeups_per_message: Vec<f64>,
    /// Doorbells of its core.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doorbells_per_message: Vec<f64>,
    /// Bytes that its core copied, in the kernel and in the program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copied_bytes_per_message: Vec<f64>,
}

impl TransferRound {
    /// Payload over time.
    #[must_use]
    pub fn bits_per_s(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.seconds
    }

    /// Busy time of all cores for 10^9 bytes of payload.
    #[must_use]
    pub fn cpu_s_per_gb(&self) -> f64 {
        self.cpu_seconds_machine / (self.bytes as f64 / 1e9)
    }
}

/// One system's figure over another's, round by round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// What was measured.
    pub what: What,
    /// Message length in bytes.
    pub size: u64,
    /// `p50`, `p99`, `bits_per_s` or `cpu_s_per_gb`.
    pub metric: String,
    /// [`System::id`] above the line.
    pub system: String,
    /// [`System::id`] below it.
    pub against: String,
    /// Rounds that both have.
    pub rounds: u32,
    /// Median of the rounds' ratios.
    pub median: f64,
    /// Lower end of the median's 95 % interval.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
    /// The same over near cores; absent where nothing is known of the cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub near: Option<Near>,
    /// What is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// Whether it was reached.
    pub verdict: Verdict,
}

/// A ratio over the rounds in which both systems had near cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Near {
    /// How many these are.
    pub rounds: u32,
    /// The others.
    pub left_out: u32,
    /// Median, and the lower and the upper end of its interval; absent where there is no such round.
    pub median_low_high: Option<[f64; 3]>,
}

/// What is asked of a ratio.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// It shall not be below.
    AtLeast(f64),
    /// It shall not be above.
    AtMost(f64),
}

/// Whether the interval is clear of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// All of it is on the right side.
    Met,
    /// All of it is on the wrong side.
    Missed,
    /// It has both.
    Unclear,
    /// Nothing was asked.
    None,
}

/// A system that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// [`System::id`].
    pub system: String,
    /// Why, and what to install or say.
    pub why: String,
}

/// A repetition that failed, or was not tried any more. None is repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// What was to be measured.
    pub what: What,
    /// [`System::id`].
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
    fn rounds_are_told_apart_by_their_fields() {
        let latency = r#"{"at":1,"count":5,"min_ns":1.0,"p50_ns":2.0,"p90_ns":3.0,"p99_ns":4.0,"p999_ns":5.0,"max_ns":6.0,"mean_ns":2.5}"#;
        let transfer = r#"{"at":0,"bytes":1000000000,"messages":2,"lost_messages":0,"seconds":2.0,"cpu_seconds_send":1.0,
            "cpu_seconds_receive":1.0,"cpu_seconds_machine":3.0,"spare_fraction":[0.5,0.25]}"#;
        let Round::Latency(round) = serde_json::from_str(latency).unwrap() else {
            panic!("taken for a transfer");
        };
        assert_eq!(serde_json::to_string(&round).unwrap(), latency);
        let Round::Transfer(round) = serde_json::from_str(transfer).unwrap() else {
            panic!("taken for round trips");
        };
        assert_eq!((round.bits_per_s(), round.cpu_s_per_gb()), (4e9, 3.0));
    }

    #[test]
    fn names_in_json_are_those_of_the_page() {
        assert_eq!(
            serde_json::to_value(What::LatencyUnderLoad).unwrap(),
            "latency-under-load"
        );
        assert_eq!(
            serde_json::to_string(&Target::AtMost(0.5)).unwrap(),
            r#"{"at_most":0.5}"#
        );
        assert_eq!(serde_json::to_value(Verdict::Unclear).unwrap(), "unclear");
    }
}
