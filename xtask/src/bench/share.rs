//! `cargo xtask bench compare share`: many LM senders into one receiver, and kernel TCP beside LM.
//!
//! **Many senders** stand at a switch (`bed/switch.rs`) with their receiver, which counts each sender's messages from the moment
//! on when it has one of each. All senders share one core and the receiver has the other, as in every comparison; what is compared with
//! is one sender through the same switch. On a real network each sender has a host of its own; here they also share what one core can
//! send, so that the sum says nothing about more senders than one being faster.
//!
//! **Beside TCP**: the two receivers share a core and the two senders the other. The stream in the background starts first and ends
//! last, and each of the two is measured once in the background of the other: so no sample has a moment in which it is alone.
//!
//! **Beside busy loops** (`--busy`): the same streams alone, each beside so many loops that never sleep, in turns over the two cores.
//!
//! LM waits here as it does by default, spinning for some 100 µs and then asleep, or asleep at once while it finds that others use its
//! core: whoever shares a core must give it away.

use std::time::Duration;

use anyhow::{Result, ensure};
use lm_measure::statistics::Summary;
use serde_json::{Value, json};

use super::recipes::{self, SECONDS};
use super::{Comparison, Contender, Measured, Rounds, Target, Unit, congestion::Congestion};
use crate::bed::{Bed, BedConfig, Launch, Program};
use crate::ends::Ends;
use crate::machine::two_cores;
use crate::workspace::Programs;

/// Many LM senders into one receiver, and kernel TCP beside LM, at 64 KiB and 1 MiB messages.
///
/// Prints what all senders reach together beside one alone, each sender's part of a fair share, and what kernel TCP and LM keep of
/// what they reach alone when they share a link. Takes both of two cores; leave the machine alone meanwhile. A target
/// that is missed is no error.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    rounds: Rounds,
    /// Senders into the one receiver.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=64))]
    senders: u32,
    /// Instead: LM and kernel TCP, each beside so many busy loops on the two cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    busy: Option<u32>,
}

const ALL: &str = "LM, all senders";
const ONE: &str = "LM, one sender";
const TCP_BESIDE: &str = "TCP beside LM";
const TCP_ALONE: &str = "TCP alone";
const LM_BESIDE: &str = "LM beside TCP";
const LM_ALONE: &str = "LM alone";

/// LM as it waits by default.
const LM_TRANSPORT: &str = "lm-sleeping";
const LM_BUSY: &str = "LM beside busy loops";
const TCP_BUSY: &str = "TCP beside busy loops";
/// What LM shall reach of TCP there.
const BUSY_KEPT: f64 = 1.0;

/// What all senders shall reach of one's goodput.
const SUM_KEPT: f64 = 0.80;
/// What each sender shall have of its fair share.
const SHARE_LEAST: f64 = 0.5;
/// What TCP shall keep of what it reaches alone.
const TCP_KEPT: f64 = 0.25;

/// Seconds before those that count.
const WARM_UP: f64 = 0.2;
/// How long each of many senders goes on: its start beside the others', the receiver's time, and some to spare.
const SENDING_SECONDS: f64 = SECONDS + 4.0;
/// How long a stream in the background lasts, unless it is stopped when the other one has been measured.
const BACKGROUND_SECONDS: f64 = 20.0;
/// The stream in the background has run for so long when the other one starts.
const HEAD_START: Duration = Duration::from_millis(400);
/// No program runs for longer.
const LIMIT: Duration = Duration::from_secs(30);

const LENS: [(&str, u32); 2] = [("64k", 65_536), ("1m", 1 << 20)];

/// Runs the command.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let congestion = Congestion::of_this_system()?;
    let comparisons = match arguments.busy {
        Some(loops) => beside_loops(loops),
        None => comparisons(arguments.senders, &congestion),
    };
    let rounds = &arguments.rounds;
    rounds.measure("share", comparisons, &[], |measured| {
        for (title, shares) in measured.iter().filter_map(shares_of_all) {
            println!(
                "{title}: each of {} senders had {:.2} to {:.2} of its fair share in all rounds, {:.2} in the median.",
                arguments.senders,
                shares.samples.iter().copied().fold(f64::INFINITY, f64::min),
                shares.samples.iter().copied().fold(0.0, f64::max),
                shares.median,
            );
        }
        for one in measured {
            if let Some(kept) = one.ratio(LM_BESIDE, LM_ALONE) {
                println!(
                    "{}: LM kept {:.2} of what it reaches alone.",
                    one.title, kept.median
                );
            }
        }
        println!(
            "\nkernel TCP's congestion control is {}, this system's default, where none is named. All senders share one core, and all\n\
             receivers the other: what is shared here is the cores more than the link.",
            congestion.default
        );
    })
}

/// Everything, as if all were there.
pub(super) fn all() -> Vec<Comparison> {
    let congestion = Congestion {
        default: "bbr".to_owned(),
        available: vec!["bbr".to_owned(), "cubic".to_owned()],
    };
    let mut all = comparisons(8, &congestion);
    all.extend(beside_loops(1));
    all
}

/// Everything of `cargo xtask bench compare share`.
fn comparisons(senders: u32, congestion: &Congestion) -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for (key, message_len) in LENS {
        let (key, title) = match key {
            "64k" => ("senders_64k", "many senders, 64 KiB"),
            _ => ("senders_1m", "many senders, 1 MiB"),
        };
        comparisons.push(Comparison {
            key,
            title,
            unit: Unit::GbitPerSecond,
            contenders: vec![
                lm_senders(ALL, senders, message_len),
                lm_senders(ONE, 1, message_len),
            ],
            targets: vec![
                Target::RatioAtLeast(ONE, SUM_KEPT),
                Target::ReportAtLeast("of its share has each", least_share, SHARE_LEAST),
            ],
            columns: &[],
            most_rounds: None,
        });
    }
    for (key, message_len) in LENS {
        let (key, title, cubic_key, cubic_title) = match key {
            "64k" => (
                "tcp_64k",
                "beside TCP, 64 KiB",
                "tcp_cubic_64k",
                "beside TCP cubic, 64 KiB",
            ),
            _ => (
                "tcp_1m",
                "beside TCP, 1 MiB",
                "tcp_cubic_1m",
                "beside TCP cubic, 1 MiB",
            ),
        };
        comparisons.push(beside_tcp(key, title, message_len, None));
        if congestion.shows_cubic() {
            comparisons.push(beside_tcp(cubic_key, cubic_title, message_len, Some("cubic")));
        }
    }
    comparisons
}

/// LM and TCP, each beside so many busy loops.
fn beside_loops(loops: u32) -> Vec<Comparison> {
    let one = |(key, title, message_len)| Comparison {
        key,
        title,
        unit: Unit::GbitPerSecond,
        contenders: vec![
            stream(LM_BUSY, lm(message_len, Place::Foreground), None, loops),
            stream(TCP_BUSY, tcp(message_len, None, Place::Foreground), None, loops),
        ],
        targets: vec![Target::RatioAtLeast(TCP_BUSY, BUSY_KEPT)],
        columns: &[],
        most_rounds: None,
    };
    [
        ("busy_64k", "beside busy loops, 64 KiB", LENS[0].1),
        ("busy_1m", "beside busy loops, 1 MiB", LENS[1].1),
    ]
    .map(one)
    .into()
}

/// The least sender's goodput over a fair share of the sum.
fn least_share(report: &Value) -> Option<f64> {
    shares(report)?.into_iter().reduce(f64::min)
}

/// Each sender's goodput over a fair share of the sum.
fn shares(report: &Value) -> Option<Vec<f64>> {
    let senders = report["receiver"]["senders"].as_array()?;
    let sum = report["receiver"]["bytes"].as_f64().filter(|&sum| sum > 0.0)?;
    let fair = sum / senders.len() as f64;
    senders
        .iter()
        .map(|sender| Some(sender["bytes"].as_f64()? / fair))
        .collect()
}

/// The shares of all senders in all rounds.
fn shares_of_all(measured: &Measured) -> Option<(&'static str, Summary)> {
    let (_, _, reports) = measured.results.iter().find(|(name, ..)| *name == ALL)?;
    let all: Vec<f64> = reports.iter().filter_map(shares).flatten().collect();
    Some((measured.title, Summary::of(&all)?))
}

/// So many senders at once through a switch.
fn lm_senders(name: &'static str, senders: u32, message_len: u32) -> Contender {
    let ends = Ends::stream(LM_TRANSPORT, message_len.into(), [WARM_UP, SECONDS])
        .sending(SENDING_SECONDS)
        .options("", &format!("--senders {senders}"));
    Contender {
        name,
        bed: BedConfig {
            senders: Some(senders),
            ..BedConfig::default()
        },
        measure: Box::new(move |bed, programs| {
            let mut receiving = start_receiver(bed, programs, &ends)?;
            let senders = bed.senders();
            let sending: Vec<Program> = (senders.iter())
                .map(|&host| host.spawn(launch(programs, ends.near(), two_cores()[0])))
                .collect::<Result<_>>()?;
            let mut reports = Vec::new();
            for program in sending {
                reports.push(recipes::finish_sender(program, &mut receiving)?);
            }
            let receiver = receiving.finish()?.json()?;
            let heard = receiver["senders"].as_array().map_or(0, Vec::len);
            ensure!(
                heard == senders.len(),
                "the receiver heard {heard} of {} senders",
                senders.len()
            );
            recipes::stream_sample(recipes::Reports {
                sender: json!(reports),
                receiver,
            })
        }),
    }
}

/// How long a stream lasts: as a sample, or around one.
#[derive(Clone, Copy)]
enum Place {
    Foreground,
    Background,
}

impl Place {
    fn seconds(self) -> [f64; 2] {
        let seconds = match self {
            Place::Foreground => SECONDS,
            Place::Background => BACKGROUND_SECONDS,
        };
        [WARM_UP, seconds]
    }
}

fn lm(message_len: u32, place: Place) -> Ends {
    Ends::stream(LM_TRANSPORT, message_len.into(), place.seconds())
}

fn tcp(message_len: u32, congestion: Option<&str>, place: Place) -> Ends {
    let option = congestion.map_or_else(String::new, |name| format!("--congestion {name}"));
    Ends::stream("tcp", message_len.into(), place.seconds()).options(&option, "")
}

/// TCP and LM beside each other, and each alone.
fn beside_tcp(
    key: &'static str,
    title: &'static str,
    message_len: u32,
    congestion: Option<&'static str>,
) -> Comparison {
    let lm = |place| lm(message_len, place);
    let tcp = |place| tcp(message_len, congestion, place);
    let (front, back) = (Place::Foreground, Place::Background);
    Comparison {
        key,
        title,
        unit: Unit::GbitPerSecond,
        contenders: vec![
            stream(TCP_BESIDE, tcp(front), Some(lm(back)), 0),
            stream(TCP_ALONE, tcp(front), None, 0),
            stream(LM_BESIDE, lm(front), Some(tcp(back)), 0),
            stream(LM_ALONE, lm(front), None, 0),
        ],
        targets: vec![Target::RatioAtLeast(TCP_ALONE, TCP_KEPT)],
        columns: &[],
        most_rounds: None,
    }
}

/// A stream, beside another one if there is one in the background, and beside so many busy loops.
fn stream(name: &'static str, measured: Ends, background: Option<Ends>, loops: u32) -> Contender {
    Contender {
        name,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| {
            let running = match &background {
                Some(ends) => {
                    let receiving = start_receiver(bed, programs, ends)?;
                    let sending = bed.left().spawn(launch(programs, ends.near(), two_cores()[0]))?;
                    std::thread::sleep(HEAD_START);
                    Some([sending, receiving])
                }
                None => None,
            };
            let mut looping = Vec::new();
            for (core, _) in two_cores().into_iter().cycle().zip(0..loops) {
                let busy = Launch::new("sh").args(["-c", "while :; do :; done"]);
                looping.push(bed.left().spawn(busy.core(core).time_limit(LIMIT))?);
            }
            let sample = recipes::stream(bed, programs, &measured)?;
            for busy in &mut looping {
                ensure!(
                    !busy.has_ended()?,
                    "a busy loop ended before the stream was measured"
                );
            }
            // Both are looked at first: one ends when the other is stopped.
            let mut running: Vec<Program> = running.into_iter().flatten().collect();
            for program in &mut running {
                ensure_running(program)?;
            }
            for program in running {
                program.stop()?;
            }
            Ok(sample)
        }),
    }
}

/// A program of the background must have been there all the time.
fn ensure_running(program: &mut Program) -> Result<()> {
    if program.has_ended()? {
        anyhow::bail!("the stream in the background ended before the other one was measured");
    }
    Ok(())
}

fn launch(programs: &Programs, words: Vec<String>, core: usize) -> Launch {
    Launch::new(programs.path("lm-bench"))
        .args(words)
        .core(core)
        .time_limit(LIMIT)
}

/// A receiver on the right host that is ready.
fn start_receiver(bed: &Bed, programs: &Programs, ends: &Ends) -> Result<Program> {
    let mut receiver = bed.right().spawn(launch(programs, ends.far(), two_cores()[1]))?;
    receiver.await_text("ready")?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_what_one_has_of_an_equal_part() {
        let sender = |bytes: f64| json!({"bytes": bytes});
        let report = json!({"receiver": {
            "bytes": 8.0,
            "senders": [sender(1.0), sender(2.0), sender(3.0), sender(2.0)],
        }});
        assert_eq!(shares(&report).unwrap(), [0.5, 1.0, 1.5, 1.0]);
        assert_eq!(least_share(&report), Some(0.5));
        assert_eq!(
            least_share(&json!({"receiver": {"bytes": 0.0, "senders": []}})),
            None
        );
    }

    #[test]
    fn targets_name_contenders_and_keys_differ() {
        let all = all();
        let mut keys: Vec<&str> = all.iter().map(|one| one.key).collect();
        assert_eq!(keys.len(), 8);
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 8);
        for comparison in &all {
            assert_eq!(comparison.contenders.len() % 2, 0);
            for target in &comparison.targets {
                match target {
                    Target::RatioAtLeast(name, _) => {
                        assert!(
                            comparison.contenders.iter().any(|one| one.name == *name),
                            "{name}"
                        );
                    }
                    Target::ReportAtLeast(..) => {}
                    _ => panic!("another kind of target: {target:?}"),
                }
            }
        }
        let cubic = Congestion {
            default: "cubic".to_owned(),
            available: vec!["bbr".to_owned(), "cubic".to_owned()],
        };
        assert_eq!(comparisons(8, &cubic).len(), 4, "the default is cubic already");
    }
}
