//! What pipelining must not cost: streams fill a link as far as its headers leave it, short windows are as fast as long ones, and so are transfers
//! that are read and written inside their messages (E-UDP §4.4: its equation 4 equals its equation 2). Part of `bench pipeline`.

use std::fs;
use std::time::Duration;

use anyhow::Context;
use lm_measure::rate::BitRate;
use serde_json::{Value, json};

use super::Unit::{GbitPerSecond, MbitPerSecond};
use super::{Comparison, Contender, Measure, Sample, Target, recipes};
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Bed, BedConfig, Launch, Port};
use crate::ends::Ends;
use crate::machine::two_cores;
use crate::workspace::{Programs, target_dir};

/// Of a port's link. Nothing of a stream is lost there: it has fewer frames on the way.
const PORT_FRAMES: u32 = 1000;
const LEN: u64 = 1 << 20;
const SECONDS: [f64; 2] = [0.5, 3.0];
/// Datagrams that fill a packet of 1500 bytes, and what LM has of such a packet.
const FULL_LEN: u64 = 1472;
const FRAGMENT: u64 = 1448;
/// More than a link passes, and no more than its sender can do.
const OFFERED: f64 = 1.1;
/// Of a transfer, and of each of its messages.
const FILE_LEN: usize = 128 << 20;
const MESSAGE: &str = "16M";
const LIMIT: Duration = Duration::from_secs(30);

/// What is asked: of what a flood of full frames passes, of the link's bits in percent, of longest windows, of whole messages.
const OF_FLOOD_LEAST: f64 = 0.97;
const OF_LINK_LEAST: f64 = 94.0;
const OF_LONGEST_LEAST: f64 = 0.95;
const OF_WHOLE_LEAST: f64 = 0.97;

const FLOOD: &str = "a flood of full frames";
const LONGEST: &str = "windows of 256";
const WHOLE: &str = "one after the other";

/// All of it.
pub(super) fn comparisons() -> Vec<Comparison> {
    vec![
        link(
            "link_500",
            "a stream over 500 Mbit/s, payload",
            BitRate(500_000_000),
        ),
        link(
            "link_100",
            "a stream over 100 Mbit/s, payload",
            BitRate(100_000_000),
        ),
        Comparison {
            key: "link_windows",
            title: "a stream on veth, by windows",
            unit: GbitPerSecond,
            contenders: vec![
                contender("windows of 32", None, windows(32)),
                contender(LONGEST, None, windows(256)),
            ],
            targets: vec![Target::RatioAtLeast(LONGEST, OF_LONGEST_LEAST)],
            columns: &[],
            most_rounds: None,
        },
        Comparison {
            key: "link_transfers",
            title: "a transfer over 500 Mbit/s",
            unit: MbitPerSecond,
            contenders: vec![
                contender("all at once", Some(BitRate(500_000_000)), transfer("on")),
                contender(WHOLE, Some(BitRate(500_000_000)), transfer("off")),
            ],
            targets: vec![Target::RatioAtLeast(WHOLE, OF_WHOLE_LEAST)],
            columns: &[],
            most_rounds: None,
        },
    ]
}

fn contender(name: &'static str, link: Option<BitRate>, measure: Measure) -> Contender {
    Contender {
        name,
        bed: BedConfig {
            // Ports are a switch's.
            senders: link.map(|_| 1),
            port: link.map(|rate| Port {
                rate,
                frames: PORT_FRAMES,
            }),
            ..BedConfig::default()
        },
        measure,
    }
}

fn link(key: &'static str, title: &'static str, rate: BitRate) -> Comparison {
    let lm = move |bed: &Bed, programs: &Programs| {
        let sample = recipes::stream(bed, programs, &Ends::stream("lm", LEN, SECONDS))?;
        Ok(of_link(sample, rate, 1.0))
    };
    // In bits of LM's payload, which its headers leave it of as many frames.
    let flood = move |bed: &Bed, programs: &Programs| {
        let ends = Ends::stream("udp-spinning", FULL_LEN, SECONDS).rate(OFFERED * rate.0 as f64);
        let sample = recipes::stream(bed, programs, &ends)?;
        Ok(of_link(sample, rate, FRAGMENT as f64 / FULL_LEN as f64))
    };
    let in_percent = |report: &Value| report["link_percent"].as_f64();
    Comparison {
        key,
        title,
        unit: MbitPerSecond,
        contenders: vec![
            contender("LM", Some(rate), Box::new(lm)),
            contender(FLOOD, Some(rate), Box::new(flood)),
        ],
        targets: vec![
            Target::RatioAtLeast(FLOOD, OF_FLOOD_LEAST),
            Target::ReportAtLeast("% of the link", in_percent, OF_LINK_LEAST),
        ],
        columns: &[],
        most_rounds: None,
    }
}

/// A stream's Gbit/s as so many Mbit/s of payload, and as a part of the link.
fn of_link(sample: Sample, link: BitRate, part: f64) -> Sample {
    let value = sample.value * 1e3 * part;
    let mut report = sample.report;
    report["link_percent"] = json!(value * 1e8 / link.0 as f64);
    Sample { value, report }
}

/// A stream in such windows, in fragments.
fn windows(fragments: u32) -> Measure {
    let option = format!("--window {fragments}");
    let ends = Ends::stream("lm", LEN, SECONDS).options(&option, "");
    Box::new(move |bed, programs| recipes::stream(bed, programs, &ends))
}

/// A file by the tools, with `--pipeline` so at both ends.
fn transfer(pipeline: &'static str) -> Measure {
    Box::new(move |bed, programs| {
        let (folder, _folder) = temporary_folder(&target_dir()?, "transfer")?;
        let path = folder.join("file");
        fs::write(&path, vec![0x5a; FILE_LEN]).with_context(|| format!("cannot write {}", path.display()))?;
        let [sending, receiving] = two_cores();
        let launch = |program: &str, line: &str, core: usize| {
            Launch::new(programs.path(program))
                .args(line.split(' '))
                .core(core)
                .time_limit(LIMIT)
        };
        let line = format!("--json --from-anyone --count 1 --output /dev/null --pipeline {pipeline}");
        let mut receiver = bed.right().spawn(launch("lm-recv", &line, receiving))?;
        receiver.await_text("listening")?;
        let line = format!(
            "--json --to {} --message-size {MESSAGE} --pipeline {pipeline}",
            bed.right().address()
        );
        let sender = bed
            .left()
            .spawn(launch("lm-send", &line, sending).args([&path]))?;
        let (sender, receiver) = (sender.finish()?.json()?, receiver.finish()?.json()?);
        let rate = sender["gbit_per_s"].as_f64();
        Ok(Sample {
            value: rate.context("lm-send tells no rate")? * 1e3,
            report: json!({"sender": sender, "receiver": receiver}),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_counts_as_what_lm_would_have_of_its_frames() {
        let sample = |gbit: f64| Sample {
            value: gbit,
            report: json!({}),
        };
        // 1538 bytes on the wire for each full frame.
        let flood = of_link(
            sample(0.5 * 1472.0 / 1538.0),
            BitRate(500_000_000),
            1448.0 / 1472.0,
        );
        assert!((flood.value - 500.0 * 1448.0 / 1538.0).abs() < 1e-9);
        let percent = flood.report["link_percent"].as_f64().unwrap();
        assert!((94.1..94.2).contains(&percent), "{percent}");
    }
}
