//! Measurements by `lm-bench end`: a far end, which listens, and a near one, which sends. Both are told what is done,
//! as JSON, and print what they have measured.

use anyhow::{Context, Result};
use lm_measure::rate::BitRate;
use serde_json::{Value, json};

use crate::bed::{INTERFACE, Side};

/// Port that far ends listen on.
const PORT: u16 = 7168;

/// What both ends of a measurement are told.
#[derive(Clone, Debug)]
pub struct Ends {
    system: String,
    size: u64,
    port: u16,
    mode: &'static str,
    does: Does,
    /// Of the near and of the far end.
    seconds: [f64; 2],
    /// Bits of a stream, or round trips, a second at most.
    rate: Option<f64>,
    senders: u32,
}

#[derive(Clone, Copy, Debug)]
enum Does {
    Stream { warm_up: f64 },
    RoundTrips { count: u32 },
}

impl Ends {
    /// `count` round trips of messages of `size` bytes, after a tenth of it as a warm-up; fewer when they take longer
    /// than `seconds`.
    pub fn round_trips(system: &str, size: u64, count: u32, seconds: f64) -> Ends {
        Ends {
            does: Does::RoundTrips { count },
            ..Ends::stream(system, size, [0.0, seconds])
        }
    }

    /// A stream of messages of `size` bytes, of which `seconds` count at the far end after `warm_up` from its first
    /// one. `system` is one of `lm`, `lm --idle default`, `udp-blocking`, `tcp` and what else `lm-bench compare` calls
    /// so.
    pub fn stream(system: &str, size: u64, [warm_up, seconds]: [f64; 2]) -> Ends {
        Ends {
            system: system.to_owned(),
            size,
            port: PORT,
            mode: "auto",
            does: Does::Stream { warm_up },
            seconds: [seconds; 2],
            rate: None,
            senders: 1,
        }
    }

    /// A stream whose near end sends for `seconds` in all: the far end's time begins later where it waits for other
    /// senders.
    #[must_use]
    pub fn sending(mut self, seconds: f64) -> Ends {
        self.seconds[0] = seconds;
        self
    }

    /// Payload bits of a stream, or round trips, a second; else as many as go.
    #[must_use]
    pub fn rate(mut self, rate: f64) -> Ends {
        self.rate = Some(rate);
        self
    }

    /// Where the far end listens, beside others.
    #[must_use]
    pub fn port(mut self, port: u16) -> Ends {
        self.port = port;
        self
    }

    /// LM's mode, as `--mode` of its tools takes it.
    #[must_use]
    pub fn mode(mut self, mode: &'static str) -> Ends {
        self.mode = mode;
        self
    }

    /// A far end that waits for this number of near ones.
    #[must_use]
    pub fn senders(mut self, count: u32) -> Ends {
        self.senders = count;
        self
    }

    /// Arguments of `lm-bench` for the end that sends, on the left host.
    pub fn near(&self) -> Vec<String> {
        self.words("near", 0)
    }

    /// Arguments of `lm-bench` for the end that receives, on the right host.
    pub fn far(&self) -> Vec<String> {
        self.words("far", 1)
    }

    fn words(&self, side: &str, at: usize) -> Vec<String> {
        let (seconds, rate) = (self.seconds[at], self.rate);
        let task = match self.does {
            Does::Stream { warm_up } => {
                json!({"stream": {"warm_up": warm_up, "seconds": seconds, "rate": rate}})
            }
            Does::RoundTrips { count } => {
                json!({"round-trips": {"count": count, "seconds": seconds, "rate": rate}})
            }
        };
        let mut words = end(side, &spec(&self.system, task, self.size, self.port, self.mode));
        if at == 1 {
            words.extend(["--senders".to_owned(), self.senders.to_string()]);
        }
        words
    }
}

/// Datagrams of the kernel's UDP by the clock, from any number of near ends to one far end. Gaps between bursts are
/// exponential, those between single datagrams within half of their mean.
#[derive(Clone, Copy, Debug)]
pub struct Timetable {
    /// Where the far end listens.
    pub port: u16,
    /// Payload of a datagram.
    pub size: u64,
    /// When it begins, by the machine's monotonic clock.
    pub begins_ns: u64,
    /// How long it lasts.
    pub seconds: f64,
    /// Datagrams a second in the mean.
    pub rate: f64,
    /// Datagrams that are due at once.
    pub burst: u32,
    /// Whether the far end sends each one back, and the near one measures how long that takes. The kernel's are marked
    /// EF, with priority 6.
    pub is_answered: bool,
}

impl Timetable {
    /// Arguments of `lm-bench` for an end that sends, with gaps that this seed decides.
    pub fn near(&self, seed: u64) -> Vec<String> {
        self.words("near", seed)
    }

    /// Arguments of `lm-bench` for the end that receives, on the right host.
    pub fn far(&self) -> Vec<String> {
        self.words("far", 0)
    }

    fn words(&self, side: &str, seed: u64) -> Vec<String> {
        let task = json!({ "timetable": self.to_json(seed) });
        end(side, &spec("udp-blocking", task, self.size, self.port, "auto"))
    }

    fn to_json(self, seed: u64) -> Value {
        json!({
            "begins_ns": self.begins_ns, "seconds": self.seconds, "rate": self.rate, "burst": self.burst, "seed": seed,
            "is_answered": self.is_answered,
        })
    }
}

/// Messages of LM's real-time sockets by the clock, from any number of near ends to one far end. A near one's smoother,
/// if it has one, holds back what else its host sends.
#[derive(Clone, Copy, Debug)]
pub struct RealTime {
    /// When they are due, at which far end; one of at most a packet's length is cut to what a packet holds.
    pub timetable: Timetable,
    /// The law of the smoother, `paced` or `paper`, and the rate of the senders' links.
    pub smoother: Option<(&'static str, BitRate)>,
}

impl RealTime {
    /// Arguments of `lm-bench` for an end that sends, with gaps that this seed decides.
    pub fn near(&self, seed: u64) -> Vec<String> {
        self.words("near", seed)
    }

    /// Arguments of `lm-bench` for the end that receives, on the right host.
    pub fn far(&self) -> Vec<String> {
        self.words("far", 0)
    }

    fn words(&self, side: &str, seed: u64) -> Vec<String> {
        let Timetable { size, port, .. } = self.timetable;
        let smoother =
            (self.smoother).map(|(law, BitRate(rate))| json!({"law": law, "bits_per_second": rate}));
        let timetable = self.timetable.to_json(seed);
        let task = json!({"real-time": {"timetable": timetable, "smoother": smoother}});
        end(side, &spec("real-time", task, size, port, "copy"))
    }
}

/// What both ends are told; the far one listens at a port of the right host.
fn spec(system: &str, task: Value, size: u64, port: u16, mode: &str) -> Value {
    let address = format!("{}:{port}", Side::Right.address());
    json!({"system": system, "task": task, "size": size, "address": address, "mtu": 1500, "mode": mode})
}

fn end(side: &str, spec: &Value) -> Vec<String> {
    ["end", side, &spec.to_string(), "--interface", INTERFACE]
        .map(str::to_owned)
        .to_vec()
}

/// Payload over time, of what a receiver printed.
pub fn gbit_per_s(report: &Value) -> Result<f64> {
    let number = |name: &str| {
        report[name]
            .as_f64()
            .with_context(|| format!("no {name} in {report}"))
    };
    Ok(number("bytes")? * 8.0 / number("seconds")? / 1e9)
}

/// Latencies in microseconds, shortest first, of lists of nanoseconds and how many took so long.
pub fn latencies_us<'a>(counts: impl IntoIterator<Item = &'a Value>) -> Vec<f64> {
    let counts = counts
        .into_iter()
        .flat_map(|counts| serde_json::from_value::<Vec<(u64, u64)>>(counts.clone()).unwrap_or_default());
    let mut all: Vec<f64> = counts
        .flat_map(|(nanoseconds, count)| vec![nanoseconds as f64 / 1e3; count as usize])
        .collect();
    all.sort_by(f64::total_cmp);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_counted_out_in_order() {
        let (one, other) = (json!([[3000, 1], [1000, 2]]), json!([[2000, 1]]));
        assert_eq!(latencies_us([&one, &other]), [1.0, 1.0, 2.0, 3.0]);
        assert!(latencies_us([&Value::Null]).is_empty());
    }
}
