//! What is asked of LM in zero-copy mode on cards, of each file of results that has the rows for it.

use lm_measure::statistics::Summary;
use serde_json::Value;

use super::{AGREE, AUTO_QUEUE, Measured, USECS, What};
use crate::vm::checks::card::{ROUND_TRIPS, Row, STREAM_SECONDS, WARM_UP};
use crate::vm::protocol::Mode;

/// Who is asked, how it waits, and who waits in the same way.
const KINDS: [(&str, &str, [&str; 2]); 2] = [
    ("lm", "polling", ["udp-spinning", "tcp"]),
    ("lm-sleeping", "sleeping", ["udp-blocking", "tcp"]),
];
const STREAMS: [u64; 2] = [64 << 10, 1 << 20];
const ROUND_TRIP_SIZES: [u64; 2] = [64, 7168];
/// Payload of a full packet of bare AF_XDP.
const PACKET: u64 = 1472;
/// Payload of a full packet of LM, about.
const LM_PACKET: f64 = 1448.0;

/// One line of what is asked.
#[derive(Debug)]
pub(crate) struct Line {
    /// Its name among all targets.
    pub(crate) key: String,
    /// What it is about.
    pub(crate) what: String,
    /// The bound.
    pub(crate) bound: f64,
    /// Whether more is better.
    pub(crate) at_least: bool,
    /// The figure, and what it is a ratio to.
    pub(crate) reached: String,
    /// `None`: LM's rounds differ by more than they may, or a peer did not end.
    pub(crate) is_met: Option<bool>,
}

/// What a file's rows say of what is asked; empty of rows that nothing is asked of.
pub(crate) fn asked(rows: &Value) -> serde_json::Result<Vec<Line>> {
    let rows: Vec<Measured> = serde_json::from_value(rows.clone())?;
    let mut lines = Vec::new();
    for one in &rows {
        let found = Found { rows: &rows, one };
        if one.row.mode == Some(Mode::ZeroCopy) {
            found.beside_kernel(&mut lines);
            found.alone(&mut lines);
        }
        found.queue(&mut lines);
        found.checksum(&mut lines);
        found.beside_bare(&mut lines);
    }
    Ok(lines)
}

/// A row of LM's among all of its file.
struct Found<'a> {
    rows: &'a [Measured],
    one: &'a Measured,
}

impl Found<'_> {
    /// Streams and round trips beside the better of UDP and TCP that wait in the same way, and streams beside TCP with its driver's offloads.
    fn beside_kernel(&self, lines: &mut Vec<Line>) {
        let row = &self.one.row;
        let Some((_, kind, peers)) = KINDS.iter().find(|(system, ..)| *system == row.system) else {
            return;
        };
        let is_polling = *kind == "polling";
        let (bound, at_least) = match row.what {
            What::Stream if STREAMS.contains(&row.size) && row.usecs > USECS => (1.68, true),
            What::Stream if STREAMS.contains(&row.size) => (if is_polling { 2.5 } else { 1.68 }, true),
            What::RoundTrips if ROUND_TRIP_SIZES.contains(&row.size) => {
                (if is_polling { 0.7 } else { 0.9 }, false)
            }
            _ => return,
        };
        let all: Vec<&Measured> = peers
            .iter()
            .filter_map(|peer| self.other(peer, None, row.size))
            .collect();
        let best = all.iter().copied().reduce(|one, other| {
            let (a, b) = (one.median(), other.median());
            match (a, b) {
                (Some(a), Some(b)) if (b > a) == at_least => other,
                (None, Some(_)) => other,
                _ => one,
            }
        });
        if let Some(best) = best {
            let has_failed = all.iter().find(|one| !one.failures.is_empty());
            let of = "the better of UDP and TCP";
            lines.push(self.line(kind, of, best, has_failed.copied(), bound, at_least));
            if row.what == What::Stream && row.size == STREAMS[0] && row.usecs == USECS {
                lines.extend(self.instructions(kind));
            }
        }
        if row.what == What::Stream
            && let Some(tcp) = self.other("tcp-offloads", None, row.size)
        {
            lines.push(self.line(kind, "TCP with offloads", tcp, None, 1.0, true));
        }
    }

    /// LM's stream of long messages beside full packets of bare AF_XDP, in the same mode.
    fn beside_bare(&self, lines: &mut Vec<Line>) {
        let row = &self.one.row;
        let bound = match &*row.system {
            "lm" => 0.75,
            "lm-no-integrity" => 0.9,
            _ => return,
        };
        if row.what == What::Stream
            && row.size == STREAMS[0]
            && let Some(bare) = self.other("bare", row.mode, PACKET)
        {
            let mode = row.mode.map_or("", Mode::option);
            let digests = if row.system == "lm" {
                "digests"
            } else {
                "no digests"
            };
            let kind = format!("{mode}, {digests}");
            lines.push(self.line(&kind, "full packets of bare AF_XDP", bare, None, bound, true));
        }
    }

    /// Guest time is instructions, so that a byte's are what is left of the goodput; time in which both processors idle is in it.
    fn instructions(&self, kind: &str) -> Option<Line> {
        let row = &self.one.row;
        let peer = if kind == "polling" {
            "udp-spinning"
        } else {
            "udp-blocking"
        };
        let udp = self.other(peer, None, row.size)?;
        let (own, udps) = (self.one.median()?, udp.median()?);
        let of_byte = |bits_per_s: f64| 8e9 / bits_per_s / 2.0;
        Some(self.judged(
            format!("instructions a payload byte, {kind}"),
            0.5,
            false,
            udps / own,
            format!("{:.2} of {peer}'s {:.1}", of_byte(own), of_byte(udps)),
            &[udp],
        ))
    }

    /// Interrupts while polling, and the slowest round trips beside the median.
    fn alone(&self, lines: &mut Vec<Line>) {
        let row = &self.one.row;
        let Some((_, kind, _)) = KINDS.iter().find(|(system, ..)| *system == row.system) else {
            return;
        };
        let Some(median) = self.one.median() else {
            return;
        };
        if let (Some([near, _]), "polling", true) = (self.one.interrupts, *kind, row.usecs == USECS) {
            let packets = match row.what {
                What::Stream if STREAMS.contains(&row.size) => {
                    Some(median * (WARM_UP + STREAM_SECONDS) / 8.0 / LM_PACKET)
                }
                What::RoundTrips if row.size == ROUND_TRIP_SIZES[0] => Some(2.0 * f64::from(ROUND_TRIPS)),
                _ => None,
            };
            if let Some(packets) = packets {
                let of_hundred = near / packets * 100.0;
                let what = format!("interrupts for 100 packets, {}", row.what.name());
                lines.push(self.judged(
                    what,
                    1.0,
                    false,
                    of_hundred,
                    "the near card's, whole row".to_owned(),
                    &[],
                ));
            }
        }
        if let (What::RoundTrips, Some(p99)) = (row.what, Summary::of(&self.one.p99)) {
            let ratio = p99.median / median;
            let words = format!("{:.0} µs", p99.median / 1e3);
            lines.push(self.judged(format!("p99 beside p50, {kind}"), 2.0, false, ratio, words, &[]));
        }
    }

    /// A small message beside a stream where the bound of what a device has adapts (E-UDP §4.2), and where it is fixed; and that stream.
    fn queue(&self, lines: &mut Vec<Line>) {
        let row = &self.one.row;
        let Some(fixed) = (row.system == AUTO_QUEUE)
            .then(|| self.other("lm", row.mode, row.size))
            .flatten()
        else {
            return;
        };
        let mode = row.mode.map_or("", Mode::option);
        let median = |of: &[f64]| Summary::of(of).map_or(f64::NAN, |summary| summary.median);
        let mut line = |kind, bound, at_least, of: fn(&Measured) -> &[f64], (scale, unit)| {
            let (own, others) = (median(of(self.one)), median(of(fixed)));
            let what = format!("{kind}, {mode}: adaptive queue / fixed");
            let words = format!("{:.0} : {:.0} {unit}", own / scale, others / scale);
            lines.push(self.judged(what, bound, at_least, own / others, words, &[fixed]));
        };
        line(
            "64 B beside a stream, p99",
            0.7,
            false,
            |one| &one.p99,
            (1e3, "µs"),
        );
        line(
            "the stream beside 64 B",
            0.98,
            true,
            |one| &one.beside,
            (1e6, "Mbit/s"),
        );
    }

    /// What UDP's checksum costs beside digests alone (E-UDP §4.1): a byte's instructions, which are what is left of the goodput.
    fn checksum(&self, lines: &mut Vec<Line>) {
        let bound = match &*self.one.row.system {
            "lm-integrated" => 1.1,
            "lm-offload" => 1.02,
            _ => return,
        };
        let row = &self.one.row;
        let alone = self.other("lm", row.mode, row.size);
        if row.size == STREAMS[0]
            && let Some(alone) = alone
            && let (Some(own), Some(others)) = (self.one.median(), alone.median())
        {
            let what = format!("instructions a payload byte, {}: / digests alone", row.system);
            let words = format!("{:.0} : {:.0} Mbit/s", own / 1e6, others / 1e6);
            lines.push(self.judged(what, bound, false, others / own, words, &[alone]));
        }
    }

    /// Another system that does the same, on the same machine.
    fn other(&self, system: &str, mode: Option<Mode>, size: u64) -> Option<&Measured> {
        let row = &self.one.row;
        // Offloads and kernel systems of virtio-net are the taps', as zero-copy mode is.
        let is_same = |other: &Row| {
            other.device == row.device
                && other.what == row.what
                && other.usecs == row.usecs
                && other.shared == row.shared
                && other.taps == row.taps
        };
        let mut rows = self.rows.iter();
        rows.find(|other| {
            other.row.system == system
                && other.row.mode == mode
                && other.row.size == size
                && is_same(&other.row)
        })
    }

    /// A ratio to another row.
    fn line(
        &self,
        kind: &str,
        of: &str,
        other: &Measured,
        failed: Option<&Measured>,
        bound: f64,
        at_least: bool,
    ) -> Line {
        let row = &self.one.row;
        let what = format!("{}, {kind}: LM / {of}", row.what.name());
        let (Some(own), Some(others)) = (self.one.median(), other.median()) else {
            return self.judged(
                what,
                bound,
                at_least,
                f64::NAN,
                "a row has no figure".to_owned(),
                &[],
            );
        };
        let (scale, unit) = match row.what {
            What::Stream | What::Sessions => (1e6, "Mbit/s"),
            What::RoundTrips | What::Beside => (1e3, "µs"),
        };
        let words = format!(
            "{:.0} : {:.0} {unit}, {}",
            own / scale,
            others / scale,
            other.row.system
        );
        let peers: Vec<&Measured> = failed.into_iter().chain([other]).collect();
        self.judged(what, bound, at_least, own / others, words, &peers)
    }

    fn judged(
        &self,
        what: String,
        bound: f64,
        at_least: bool,
        reached: f64,
        words: String,
        peers: &[&Measured],
    ) -> Line {
        let row = &self.one.row;
        let apart = self.one.apart().filter(|apart| *apart > AGREE);
        let mut all = std::iter::once(self.one).chain(peers.iter().copied());
        let failed = all.find(|one| !one.failures.is_empty());
        let mut notes = vec![words];
        notes.extend(apart.map(|apart| format!("LM's rounds differ by {:.1} %", apart * 100.0)));
        notes.extend(failed.map(|one| format!("{} did not end", one.row.system)));
        let reaches = if at_least {
            reached >= bound
        } else {
            reached <= bound
        };
        let is_row = apart.is_none() && failed.is_none() && !reached.is_nan() && self.one.rounds.len() > 1;
        let bed = match (row.shared, row.usecs > USECS) {
            (true, _) => ", shared instances",
            (false, true) => ", interrupts held back",
            (false, false) => "",
        };
        let what = format!("{}{bed}, {} B: {what}", row.device.name(), row.size);
        Line {
            key: format!("card/{what}"),
            what,
            bound,
            at_least,
            reached: match reached.is_nan() {
                true => notes.join("; "),
                false => format!("{reached:.2} ({})", notes.join("; ")),
            },
            is_met: match reaches {
                false if !reached.is_nan() => Some(false),
                _ => is_row.then_some(true),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(system: &str, what: &str, size: u64, rounds: &[f64]) -> Value {
        let mode = system.starts_with("lm").then_some("zero-copy");
        json!({
            "row": {"device": "igb", "system": system, "mode": mode, "what": what, "size": size, "rounds": 2, "usecs": USECS,
                "taps": false, "calls": false},
            "rounds": rounds, "p99": rounds.iter().filter(|_| what == "round-trips").map(|round| round * 3.0).collect::<Vec<_>>(),
            "beside": [], "lost": 0.0, "calls": [null, null], "uncounted": null, "interrupts": [100.0, 100.0], "failures": [],
        })
    }

    fn of(rows: Vec<Value>) -> Vec<Line> {
        asked(&Value::Array(rows)).unwrap()
    }

    #[test]
    fn the_better_peer_of_the_same_kind_counts() {
        let streams = |lm: [f64; 2]| {
            let peers = [("udp-spinning", 4e8), ("tcp", 5e8), ("udp-blocking", 9e9)];
            let peers = peers.map(|(system, figure)| row(system, "stream", 65_536, &[figure, figure]));
            of([vec![row("lm", "stream", 65_536, &lm)], peers.into()].concat())
        };
        let met = streams([1.5e9, 1.5e9]);
        assert_eq!(
            met[0].what,
            "igb, 65536 B: stream, polling: LM / the better of UDP and TCP"
        );
        assert_eq!(
            (met[0].is_met, &*met[0].reached),
            (Some(true), "3.00 (1500 : 500 Mbit/s, tcp)")
        );
        assert!(met.iter().any(
            |line| line.reached == "0.27 (2.67 of udp-spinning's 10.0)" && line.is_met == Some(true)
        ));
        assert_eq!(streams([1.2e9, 1.2e9])[0].is_met, Some(false));
        let once = of(vec![
            row("lm", "stream", 65_536, &[1.5e9]),
            row("tcp", "stream", 65_536, &[5e8, 5e8]),
        ]);
        assert_eq!(once[0].is_met, None, "a round agrees with none: {once:?}");
        let differing = streams([1.5e9, 1.6e9]);
        assert_eq!(differing[0].is_met, None, "no row that was met: {differing:?}");
    }

    #[test]
    fn an_adaptive_queue_is_asked_for_less_delay_and_as_much_of_the_stream() {
        let beside = |system: &str, p99: f64, stream: f64| {
            let mut row = row(system, "beside", 65_536, &[1e5, 1e5]);
            row["p99"] = json!([p99, p99]);
            row["beside"] = json!([stream, stream]);
            row
        };
        let of = |auto: [f64; 2]| {
            let lines = of(vec![beside(AUTO_QUEUE, auto[0], auto[1]), beside("lm", 1e6, 8e8)]);
            lines.into_iter().map(|line| line.is_met).collect::<Vec<_>>()
        };
        assert_eq!(of([6e5, 7.9e8]), [Some(true), Some(true)]);
        assert_eq!(of([8e5, 7.7e8]), [Some(false), Some(false)]);
    }

    #[test]
    fn a_peer_that_did_not_end_is_no_row_that_was_met() {
        let mut udp = row("udp-spinning", "round-trips", 64, &[]);
        udp["failures"] = json!(["not finished after 32 s"]);
        let tcp = row("tcp", "round-trips", 64, &[100_000.0, 100_000.0]);
        let lines = of(vec![
            row("lm", "round-trips", 64, &[50_000.0, 50_000.0]),
            udp,
            tcp,
        ]);
        let beside = lines
            .iter()
            .find(|line| line.what.ends_with("UDP and TCP"))
            .unwrap();
        assert_eq!((beside.is_met, beside.bound), (None, 0.7), "{beside:?}");
        let p99 = lines.iter().find(|line| line.what.contains("p99")).unwrap();
        assert_eq!(p99.is_met, Some(false), "three times as long: {p99:?}");
    }
}
