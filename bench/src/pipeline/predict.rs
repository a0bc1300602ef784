//! `lm-bench model`: what five stations cost, fitted to some of what was measured, and what the model (`model.rs`) says of the rest, of what
//! was not measured, and of faster links.
//!
//! Produce and send share a core, and land and consume another one, unless a timetable paces producer and consumer, who sleep then. What takes
//! time and is no station's work counts as the link's: wake-ups, announcements. A link with a rate has its cost of a byte by that rate; where
//! there is none that is fitted, and how long credit takes: elsewhere a window takes longer. Who sends a message when it is whole overlaps only sending, link and landing.

use std::collections::BTreeSet;
use std::io::Read as _;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::FRAGMENT;
use super::model::{Gives, Point, Station, fit, latency_ns, loss, period_ns};
use crate::cli::{Failure, chain};

/// A message of a kind: how it was measured, if it was.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Run {
    bed: String,
    len: u64,
    /// In fragments.
    window: u64,
    /// One after the other.
    whole: bool,
    /// The producer takes so many times as long.
    slower: u32,
    /// Bits of payload a second that the link passes; `None`: as many as cores do.
    link: Option<u64>,
    /// Bits a second of a timetable; `None`: producer and consumer compute.
    pace: Option<u64>,
    /// The model is fitted to it.
    fits: bool,
    /// Medians; `None`: it is yet to be measured.
    times: Option<Times>,
    /// From the first byte produced to the last byte consumed.
    #[serde(skip_deserializing)]
    predicted_ns: f64,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Times {
    latency_ns: f64,
    produce_ns: f64,
    send_ns: f64,
    /// Of messages that are read when they are whole it is not told.
    land_ns: Option<f64>,
    consume_ns: f64,
}

/// Of what is measured on a bed in one way.
#[derive(Clone, Copy, Debug, Serialize)]
struct Stations {
    produce: Station,
    send: Station,
    link: Station,
    land: Station,
    consume: Station,
}

const NEAR: usize = 0;
const FAR: usize = 1;
/// Stations that need no core.
const PRODUCER: usize = 2;
const LINK: usize = 3;
const CONSUMER: usize = 4;

/// The most that is sought in: what credit takes, and a link of 1 Gbit/s; and how often.
const CREDIT_NS: f64 = 1e6;
const LINK_BYTE_NS: f64 = 8.0;
const PASSES: u32 = 3;

/// Rates that are foretold, in bits a second, and lengths; what of a rate is left for payload.
const RATES: [u64; 4] = [2, 10, 25, 100];
const LENS: [u64; 4] = [64 << 10, 1 << 20, 16 << 20, 64 << 20];
const PAYLOAD: f64 = 1448.0 / 1538.0;
/// Windows in fragments.
const WINDOWS: [u64; 5] = [16, 32, 64, 128, 256];

fn paced(pace: u64, core: usize) -> Station {
    Station {
        byte_ns: 8e9 / pace as f64,
        core,
        ..Station::default()
    }
}

impl Stations {
    /// Fits what `runs`, all of one bed and in the same way, took; where that does not tell it what `others` on that bed took.
    fn fit(runs: &[&Run], others: &[&Run]) -> Option<Stations> {
        let first = *runs.first()?;
        let of = |runs: &[&Run], took: fn(&Times) -> Option<f64>, core| {
            let point = |run: &&Run| {
                Some(Point {
                    windows: run.len.div_ceil(run.grain()),
                    bytes: run.len,
                    took_ns: took(run.times.as_ref()?)?,
                })
            };
            let points: Vec<_> = runs.iter().filter_map(point).collect();
            (!points.is_empty()).then(|| fit(&points, core))
        };
        let works = |core, took| match first.pace {
            Some(pace) => Some(paced(pace, core)),
            None => of(runs, took, if core == PRODUCER { NEAR } else { FAR }),
        };
        let land: fn(&Times) -> Option<f64> = |times| times.land_ns;
        let mut stations = Stations {
            produce: works(PRODUCER, |times| Some(times.produce_ns))?,
            send: of(runs, |times| Some(times.send_ns), NEAR)?,
            link: first.link.map_or_else(Station::default, |rate| paced(rate, LINK)),
            land: of(runs, land, FAR).or_else(|| of(others, land, FAR))?,
            consume: works(CONSUMER, |times| Some(times.consume_ns))?,
        };
        stations.link.core = LINK;
        // A window is sent when it is produced, and shown when the next one has landed; in between each packet is for itself.
        stations.produce.gives = Gives::Window;
        stations.land.gives = Gives::WindowBelow;
        let measured_ns = |run: &Run| run.times.as_ref().map_or(f64::NAN, |times| times.latency_ns);
        let missed = |stations: &Stations| {
            let error = |run: &&Run| loss(stations.latency_ns(run) / measured_ns(run) - 1.0);
            runs.iter().map(error).sum::<f64>()
        };
        // No message is shorter than that.
        let shortest_ns = runs
            .iter()
            .map(|run| measured_ns(run))
            .fold(f64::INFINITY, f64::min);
        // What a message costs, given what a byte does and credit takes.
        let with = |byte_ns: f64, credit_ns: Option<f64>| {
            let mut stations = stations;
            (stations.link.byte_ns, stations.send.credit_ns) = (byte_ns, credit_ns);
            stations.link.message_ns = least(shortest_ns, |message_ns| {
                let mut stations = stations;
                stations.link.message_ns = message_ns;
                missed(&stations)
            });
            stations
        };
        if first.link.is_some() {
            return Some(with(stations.link.byte_ns, None));
        }
        // One given the other: long windows show the first, short ones the second.
        let (mut byte_ns, mut credit_ns) = (0.0, 0.0);
        for _ in 0..PASSES {
            credit_ns = least(CREDIT_NS, |credit_ns| missed(&with(byte_ns, Some(credit_ns))));
            byte_ns = least(LINK_BYTE_NS, |byte_ns| missed(&with(byte_ns, Some(credit_ns))));
        }
        Some(with(byte_ns, Some(credit_ns)))
    }

    /// Of a kind of message.
    fn latency_ns(&self, run: &Run) -> f64 {
        let slower = f64::from(run.slower);
        let produce = Station {
            message_ns: self.produce.message_ns * slower,
            window_ns: self.produce.window_ns * slower,
            byte_ns: self.produce.byte_ns * slower,
            ..self.produce
        };
        let way = [self.send, self.link, self.land];
        match run.whole {
            false => {
                let all = [produce, way[0], way[1], way[2], self.consume];
                latency_ns(&all, run.len, run.grain(), FRAGMENT)
            }
            true => {
                let windows = run.len.div_ceil(run.grain());
                let alone_ns = |station: &Station| station.alone_ns(windows, run.len);
                alone_ns(&produce)
                    + latency_ns(&way, run.len, run.grain(), FRAGMENT)
                    + alone_ns(&self.consume)
            }
        }
    }

    /// What each station costs in the units of the field.
    fn costs(&self) -> Value {
        let cost = |station: &Station| {
            json!({
                "message_us": station.message_ns / 1e3, "window_us": station.window_ns / 1e3,
                "packet_us": station.byte_ns * FRAGMENT as f64 / 1e3, "byte_ns": station.byte_ns,
            })
        };
        json!({
            "produce": cost(&self.produce), "send": cost(&self.send), "link": cost(&self.link), "land": cost(&self.land),
            "consume": cost(&self.consume), "credit_us": self.send.credit_ns.map(|credit_ns| credit_ns / 1e3),
        })
    }
}

impl Run {
    fn grain(&self) -> u64 {
        self.window * FRAGMENT
    }
}

/// Where from 0 to `most` a function that falls and then rises is least, within a 5000th of `most`: golden sections.
fn least(most: f64, of: impl Fn(f64) -> f64) -> f64 {
    const SECTION: f64 = 0.618_033_988_749_895;
    let (mut from, mut to) = (0.0, most);
    let [mut left, mut right] = [to - SECTION * to, SECTION * to].map(|at| (at, of(at)));
    for _ in 0..17 {
        if left.1 <= right.1 {
            (to, right) = (right.0, left);
            let at = to - SECTION * (to - from);
            left = (at, of(at));
        } else {
            (from, left) = (left.0, right);
            let at = from + SECTION * (to - from);
            right = (at, of(at));
        }
    }
    (from + to) / 2.0
}

/// Predicts all runs, says what was fitted, and what faster links would give where cores are what bounds.
fn predict(mut runs: Vec<Run>) -> Result<Value, Failure> {
    let ways: BTreeSet<_> = runs.iter().map(|run| (run.bed.clone(), run.whole)).collect();
    let (mut costs, mut computing) = (Vec::new(), [None; 2]);
    for (bed, whole) in ways {
        let fits: Vec<&Run> = runs.iter().filter(|run| run.bed == bed && run.fits).collect();
        let (same, others): (Vec<_>, Vec<_>) = fits.into_iter().partition(|run| run.whole == whole);
        let stations = Stations::fit(&same, &others)
            .ok_or_else(|| Failure::new(format!("nothing to fit the model to on {bed}, whole {whole}")))?;
        costs.push(json!({"bed": bed, "whole": whole, "stations": stations.costs()}));
        if same.iter().any(|run| run.pace.is_none()) {
            computing[usize::from(whole)] = Some(stations);
        }
        for run in runs.iter_mut().filter(|run| run.bed == bed && run.whole == whole) {
            run.predicted_ns = stations.latency_ns(run);
        }
    }
    let rates = match computing {
        [Some(fine), Some(coarse)] => RATES.iter().map(|&rate| at_rate(rate, fine, coarse)).collect(),
        _ => Vec::new(),
    };
    Ok(json!({"costs": costs, "runs": runs, "rates": rates}))
}

/// What a link of so many Gbit/s gives.
fn at_rate(gbit: u64, mut fine: Stations, mut coarse: Stations) -> Value {
    let byte_ns = 8.0 / (gbit as f64 * PAYLOAD);
    for stations in [&mut fine, &mut coarse] {
        // What it costs besides the rate stays.
        stations.link.byte_ns = stations.link.byte_ns.max(byte_ns);
    }
    let run = |len, window, whole| Run {
        bed: String::new(),
        len,
        window,
        whole,
        slower: 1,
        link: None,
        pace: None,
        fits: false,
        times: None,
        predicted_ns: 0.0,
    };
    let of = |&len: &u64| {
        let takes_ns = |window: u64| fine.latency_ns(&run(len, window, false));
        let best = WINDOWS
            .into_iter()
            .min_by(|a, b| takes_ns(*a).total_cmp(&takes_ns(*b)));
        let best = best.expect("some");
        let all = [fine.produce, fine.send, fine.link, fine.land, fine.consume];
        json!({
            "len": len, "window": best, "fine_ns": takes_ns(best),
            "coarse_ns": coarse.latency_ns(&run(len, best, true)),
            "gbit_per_second": len as f64 * 8.0 / period_ns(&all, len, best * FRAGMENT),
        })
    };
    json!({"gbit": gbit, "lens": LENS.iter().map(of).collect::<Vec<_>>()})
}

/// Reads runs as JSON from standard input; what the model says of them.
///
/// # Errors
///
/// [`Failure`]: they are not readable, or there is nothing to fit the model to.
pub fn run() -> Result<Value, Failure> {
    let mut text = String::new();
    (std::io::stdin().read_to_string(&mut text)).map_err(|error| Failure::new(chain(&error)))?;
    let runs: Vec<Run> = serde_json::from_str(&text).map_err(|error| Failure::new(chain(&error)))?;
    // A window of nothing would have no end, and a producer of no cost is none.
    if let Some(run) = (runs.iter())
        .find(|run| run.window == 0 || run.len == 0 || run.pace == Some(0) || run.link == Some(0))
    {
        return Err(Failure::new(format!(
            "a message without length, window or rate: {run:?}"
        )));
    }
    predict(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(len: u64, whole: bool, stations: &Stations, fits: bool) -> Run {
        let mut run = Run {
            bed: "a".into(),
            len,
            window: if len > 1 << 20 { 32 } else { 16 },
            whole,
            slower: 1,
            link: None,
            pace: None,
            fits,
            times: None,
            predicted_ns: 0.0,
        };
        let alone_ns = |station: &Station| station.alone_ns(len.div_ceil(run.grain()), len);
        let times = Times {
            latency_ns: stations.latency_ns(&run),
            produce_ns: alone_ns(&stations.produce),
            send_ns: alone_ns(&stations.send),
            land_ns: (!whole).then(|| alone_ns(&stations.land)),
            consume_ns: alone_ns(&stations.consume),
        };
        run.times = Some(times);
        run
    }

    #[test]
    fn what_a_model_made_is_foretold_from_half_of_it() {
        let station = |message_ns, byte_ns, core| Station {
            message_ns,
            window_ns: 0.0,
            byte_ns,
            core,
            ..Station::default()
        };
        let stations = Stations {
            produce: Station {
                gives: Gives::Window,
                ..station(100.0, 0.5, NEAR)
            },
            send: Station {
                credit_ns: Some(120_000.0),
                ..station(2000.0, 1.0, NEAR)
            },
            link: station(30_000.0, 0.0, LINK),
            land: Station {
                gives: Gives::WindowBelow,
                ..station(1000.0, 1.1, FAR)
            },
            consume: station(0.0, 0.6, FAR),
        };
        let lens = (0..8).map(|power| 4096u64 << (2 * power)).take(5);
        let runs = lens.enumerate().flat_map(|(number, len)| {
            [false, true].map(|whole| measured(len, whole, &stations, number % 2 == 0))
        });
        let found = predict(runs.collect()).unwrap();
        for run in found["runs"].as_array().unwrap() {
            let error =
                run["predicted_ns"].as_f64().unwrap() / run["times"]["latency_ns"].as_f64().unwrap() - 1.0;
            assert!(error.abs() < 0.05, "{run}");
        }
        // The link bounds up to 2 Gbit/s and more; a faster one than cores are changes nothing.
        let rates = found["rates"].as_array().unwrap();
        let takes = |at: usize| rates[at]["lens"][3]["fine_ns"].as_f64().unwrap();
        assert!(takes(0) > 1.5 * takes(1));
        assert!((takes(2) / takes(3) - 1.0).abs() < 1e-3);
        for rate in rates {
            let len = &rate["lens"][3];
            assert!(len["fine_ns"].as_f64() < len["coarse_ns"].as_f64(), "{rate}");
        }
        assert!(predict(vec![measured(4096, false, &stations, false)]).is_err());
    }

    #[test]
    fn the_least_is_found() {
        assert!((least(10.0, |x| (x - 3.0).abs()) - 3.0).abs() < 2e-3);
        assert!(least(10.0, |x| x) < 2e-3);
    }
}
