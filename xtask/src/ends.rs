//! Measurements by `lm-bench end`: a far end, which listens, and a near one, which sends. Both are told what is done,
//! as JSON, and print what they have measured.

use serde_json::json;

use crate::bed::{INTERFACE, RECEIVER};

/// Port that far ends listen on.
const PORT: u16 = 7168;

/// What both ends of a measurement are told.
#[derive(Clone, Debug)]
pub struct Ends {
    system: String,
    size: u64,
    /// Where the far end listens, beside others.
    pub port: u16,
    /// LM's mode, as `--mode` of its tools takes it.
    pub mode: &'static str,
    does: Does,
    /// Of the near end, its whole time of sending, and of the far end, whose time begins later where it waits for
    /// other senders.
    pub seconds: [f64; 2],
    /// Payload bits of a stream, or round trips, a second; else as many as go.
    pub rate: Option<f64>,
    /// Near ends that the far one waits for.
    pub senders: u32,
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
        let spec = json!({
            "system": self.system, "task": task, "size": self.size, "mtu": 1500, "mode": self.mode,
            "address": format!("{RECEIVER}:{}", self.port), "senders": self.senders,
        });
        ["end", side, &spec.to_string(), "--interface", INTERFACE]
            .map(str::to_owned)
            .to_vec()
    }
}
