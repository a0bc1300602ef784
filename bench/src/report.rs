//! What a tool says when it ends: one text for people or one JSON object for programs.
//!
//! The names of the JSON fields are a promise: fields may be added, none is renamed or given another unit.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::histogram::{LatencyHistogram, LatencySummary};
use crate::size::approximate;

/// The end of a run of `lm-send` or `lm-recv`. Its JSON form has exactly these field names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Payload bytes of messages that were confirmed (sender) or written out (receiver).
    pub bytes: u64,
    /// Those messages.
    pub messages: u64,
    /// Bytes that the receiver had of an earlier transfer, verified, and that were not sent again.
    pub resumed_bytes: u64,
    /// Transfers that ended complete.
    pub transfers: u64,
    /// Transfers that were begun and did not end complete.
    pub failed_transfers: u64,
    /// From the first transfer's request to the last one's end, in seconds.
    pub seconds: f64,
    /// `bytes * 8 / seconds / 10^9`; 0 when `seconds` is 0.
    pub gbit_per_s: f64,
    /// The interface, or the DPDK device: driver and number.
    pub device: String,
    /// The mode that the kernel reports, such as `copy-native`; of a DPDK device `zero-copy` or `copy-port`.
    pub mode: String,
    /// `lm`, `ipfrag`, or `mixed` when transfers of both kinds came; `null` before the first.
    pub wire: Option<&'static str>,
    /// Payload bytes that user space copied from memory to memory: 0 on the loss-free path of large messages.
    pub user_copied_bytes: u64,
    /// Sender: messages that were handed over to a session by the one-copy path, and did not land.
    pub messages_one_copy: u64,
    /// Receiver: fragments that came by the one-copy path, of those messages, or for another reason.
    pub fragments_one_copy: u64,
    /// Fragments that were copied because their places cross the end of a huge page (zero-copy mode).
    pub page_end_fragments: u64,
    /// Receiver: messages that came unannounced; those of them that were copied, since a region of slots ended or a packet was lost; and how often there
    /// was no memory for such messages.
    pub messages_ahead: u64,
    /// As said there.
    pub messages_ahead_copied: u64,
    /// As said there.
    pub open_refused: u64,
    /// Bytes put back at window edges (rule I5).
    pub restored_bytes: u64,
    /// Payload bytes that are missing of messages which were delivered without them (partial delivery); they are zeros.
    pub missing_bytes: u64,
    /// How often the receiver asked for the manifest of a message, because what came differed from its digest.
    pub manifests_requested: u64,
    /// Receiver: landing memory in bytes, the most that it may become, and the most of that for messages under way from one address.
    pub landing_memory: u64,
    /// As said there.
    pub landing_memory_max: u64,
    /// As said there.
    pub landing_memory_address_max: u64,
    /// Completion time per message in microseconds. Sender: from handing the message over, or beginning it, to the receiver's confirmation.
    /// Receiver: from the announcement or first packet to delivery. `null` when nothing was measured.
    pub latency_us: LatencySummary,
    /// Packets and messages that were dropped, by reason; reasons that never occurred are left out.
    pub drops: BTreeMap<String, u64>,
    /// Why the run failed; left out when it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Report {
    /// Sets `bytes`, `messages`, the time, the rate and the latencies from what was measured.
    pub fn set_measured(&mut self, bytes: u64, messages: u64, seconds: f64, latency: &LatencyHistogram) {
        self.bytes = bytes;
        self.messages = messages;
        self.seconds = seconds;
        self.gbit_per_s = gbit_per_s(bytes, seconds);
        self.latency_us = latency.summary();
    }

    /// The one line that `--json` prints.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"report: {error}\"}}"))
    }
}

/// Payload throughput in 10^9 bits per second; 0 for no time at all.
#[must_use]
pub fn gbit_per_s(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 * 8.0 / seconds / 1e9
    } else {
        0.0
    }
}

/// The text for people, one fact a line.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.transfers == 1 { "" } else { "s" };
        let (size, messages, transfers) = (approximate(self.bytes), self.messages, self.transfers);
        write!(f, "{size} in {messages} messages, {transfers} transfer{plural}")?;
        if self.failed_transfers > 0 {
            write!(f, ", {} failed", self.failed_transfers)?;
        }
        if self.resumed_bytes > 0 {
            write!(f, "\n{} were there already", approximate(self.resumed_bytes))?;
        }
        write!(f, "\n{:.3} s, {:.3} Gbit/s", self.seconds, self.gbit_per_s)?;
        let (device, wire) = (&self.device, self.wire.unwrap_or("none"));
        write!(f, "\ndevice {device}, mode {}, wire {wire}", self.mode)?;
        let latency = &self.latency_us;
        if let (Some(p50), Some(p90), Some(p99), Some(p999), Some(max)) =
            (latency.p50, latency.p90, latency.p99, latency.p999, latency.max)
        {
            write!(
                f,
                "\nmessage completion in us: p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1}, p99.9 {p999:.1}, max {max:.1}"
            )?;
        }
        let (copied, restored) = (self.user_copied_bytes, self.restored_bytes);
        write!(
            f,
            "\nuser space copied {copied} payload bytes and restored {restored} bytes at window edges"
        )?;
        for (before, count, what) in [
            ("", self.messages_one_copy, "messages went by the one-copy path"),
            ("", self.fragments_one_copy, "fragments came by the one-copy path"),
            ("", self.messages_ahead, "messages came unannounced"),
            ("", self.messages_ahead_copied, "of these were copied"),
            ("", self.open_refused, "times there was no memory for these"),
            ("", self.missing_bytes, "payload bytes were lost and are zeros"),
            (
                "corrupt messages: ",
                self.manifests_requested,
                "manifests were requested",
            ),
        ] {
            if count > 0 {
                write!(f, "\n{before}{count} {what}")?;
            }
        }
        let drops = if self.drops.is_empty() { " none" } else { "" };
        write!(f, "\ndrops:{drops}")?;
        for (reason, count) in &self.drops {
            write!(f, " {reason} {count}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Report {
        let mut latency = LatencyHistogram::new();
        latency.record_ns(250_000);
        let mut report = Report {
            transfers: 1,
            device: "eth1".into(),
            mode: "copy-native".into(),
            wire: Some("lm"),
            user_copied_bytes: 0,
            messages_one_copy: 3,
            page_end_fragments: 0,
            restored_bytes: 264,
            missing_bytes: 0,
            manifests_requested: 2,
            drops: BTreeMap::from([("no_session".to_owned(), 3)]),
            ..Report::default()
        };
        report.set_measured(5 << 20, 5, 0.01, &latency);
        report
    }

    /// Golden: scripts depend on these names.
    #[test]
    fn json_names_are_stable() {
        let json = sample().to_json();
        assert!(!json.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        let mut names: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "bytes",
                "device",
                "drops",
                "failed_transfers",
                "fragments_one_copy",
                "gbit_per_s",
                "landing_memory",
                "landing_memory_address_max",
                "landing_memory_max",
                "latency_us",
                "manifests_requested",
                "messages",
                "messages_ahead",
                "messages_ahead_copied",
                "messages_one_copy",
                "missing_bytes",
                "mode",
                "open_refused",
                "page_end_fragments",
                "restored_bytes",
                "resumed_bytes",
                "seconds",
                "transfers",
                "user_copied_bytes",
                "wire"
            ]
        );
        assert_eq!(value["bytes"], 5 << 20);
        assert_eq!(value["drops"]["no_session"], 3);
        assert!((value["gbit_per_s"].as_f64().unwrap() - 4.194_304).abs() < 1e-9);
        assert!((value["latency_us"]["p50"].as_f64().unwrap() - 250.0).abs() < 0.5);
        let failed = Report {
            error: Some("no".into()),
            ..sample()
        };
        let value: serde_json::Value = serde_json::from_str(&failed.to_json()).unwrap();
        assert_eq!(value["error"], "no");
    }

    #[test]
    fn no_time_is_no_rate() {
        assert_eq!(gbit_per_s(10, 0.0), 0.0);
        assert!(!Report::default().to_json().contains("NaN"));
    }

    #[test]
    fn text_names_what_matters() {
        let text = sample().to_string();
        for part in [
            "5.00 MiB in 5 messages, 1 transfer",
            "4.194 Gbit/s",
            "copy-native",
            "p99.9",
            "no_session 3",
            "3 messages went by the one-copy path",
            "2 manifests",
        ] {
            assert!(text.contains(part), "{part} is missing in:\n{text}");
        }
        assert!(Report::default().to_string().ends_with("drops: none"));
    }
}
