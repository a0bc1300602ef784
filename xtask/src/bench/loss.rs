//! `cargo xtask bench loss`: LM and kernel TCP through the impairment box, at several loss rates.
//!
//! Every sample has a fresh bed with a box between the hosts and random loss in both directions. The seed of the losses is the
//! number of the sample, so in one round all contenders meet the same one. The hosts' settings are those of [`recipes`];
//! checksums are left to the interfaces, as network cards would do it. What comes out of the box is received on the core of
//! the host that it goes to, as between two machines: without that, the sender's core would do the box's work and the
//! receiver's as well, packet by packet.
//!
//! LM runs by its tools' defaults, and without digests once for each delivery. A stream that ends because of the loss reaches 0.

use std::cell::Cell;

use anyhow::{Context, Result, ensure};
use lm_measure::statistics::Summary;
use serde_json::{Value, json};

use super::congestion::Congestion;
use super::recipes::{self, BARE, FULL_PACKET, LM, NO_DIGESTS, SECONDS, bare_addresses, words};
use super::{Comparison, Contender, Headings, Measured, Rounds, Sample, Target, Unit};
use crate::bed::{Bed, BedConfig, INTERFACE, Impairments, Launch};
use crate::ends::Ends;
use crate::machine::two_cores;
use crate::workspace::Programs;

/// A message length and a loss: key, title, message length, loss as the box takes it, and what LM shall reach of kernel TCP.
struct Point {
    key: &'static str,
    title: &'static str,
    message_len: u32,
    loss: &'static str,
    least: f64,
}

const fn point(
    key: &'static str,
    title: &'static str,
    message_len: u32,
    loss: &'static str,
    least: f64,
) -> Point {
    Point {
        key,
        title,
        message_len,
        loss,
        least,
    }
}

const POINTS: [Point; 8] = [
    point("64k_0", "64 KiB, no loss", 65_536, "0%", 0.95),
    point("64k_01", "64 KiB, 0.1 % lost", 65_536, "0.1%", 1.0),
    point("64k_1", "64 KiB, 1 % lost", 65_536, "1%", 2.0),
    point("64k_5", "64 KiB, 5 % lost", 65_536, "5%", 2.0),
    point("1m_0", "1 MiB, no loss", 1 << 20, "0%", 0.95),
    point("1m_01", "1 MiB, 0.1 % lost", 1 << 20, "0.1%", 1.0),
    point("1m_1", "1 MiB, 1 % lost", 1 << 20, "1%", 2.0),
    point("1m_5", "1 MiB, 5 % lost", 1 << 20, "5%", 2.0),
];

/// Kernel TCP as it is, by what it does about congestion: cubic takes every loss for it, the kernel's own default; bbr hardly minds
/// random ones.
const TCPS: [(&str, &str); 2] = [("kernel TCP, cubic", "cubic"), ("kernel TCP, bbr", "bbr")];
const BOX: &str = "the box";
const NO_BOX: &str = "the link without it";
/// What the box shall forward of what either side reaches through it.
const BOX_RATIO: f64 = 2.0;
/// What LM is here: name, transport and delivery, its defaults first. TCP's checksums are left to the interfaces, so nobody computes
/// one; LM stands beside it with digests, as its tools have it, and without.
const LM_STREAMS: [(&str, &str, Option<&str>); 4] = [
    (LM, "lm", None),
    ("LM, no digests", NO_DIGESTS, None),
    ("LM partial, no digests", NO_DIGESTS, Some("partial")),
    ("LM unreliable, no digests", NO_DIGESTS, Some("unreliable")),
];
/// Of these something is asked.
const LM_WITH_TARGETS: usize = 3;

/// Seconds before those that count.
const WARM_UP: f64 = 0.2;
/// TCP's sender goes on until its receiver has measured, but not for longer.
const SENDING_SECONDS: f64 = 12.0;

/// Runs the command.
pub(super) fn run(rounds: &Rounds) -> Result<()> {
    let tcps = tcps(&Congestion::of_this_system()?)?;
    rounds.measure("loss", comparisons(&tcps), Headings::LM, |measured| {
        for (name, packets) in measured.iter().flat_map(forwarded) {
            println!(
                "{name}: {packets:.0} packets of {FULL_PACKET} bytes a second, counted where they arrive"
            );
        }
        for (name, packets) in dropped_by_box(measured) {
            println!("warning: {name}: the box's interfaces dropped {packets} packets of their own");
        }
    })
}

type Tcp = (&'static str, &'static str);

/// The TCPs that this kernel offers.
fn tcps(congestion: &Congestion) -> Result<Vec<Tcp>> {
    let (there, absent): (Vec<Tcp>, Vec<Tcp>) =
        (TCPS.into_iter()).partition(|(_, name)| congestion.has(name));
    for (name, module) in absent {
        println!("absent: {name}; modprobe tcp_{module}");
    }
    ensure!(
        !there.is_empty(),
        "neither cubic nor bbr is offered by this kernel; modprobe tcp_cubic"
    );
    Ok(there)
}

/// Everything, as if all TCPs were there.
pub(super) fn all() -> Vec<Comparison> {
    comparisons(&TCPS)
}

/// Everything of `cargo xtask bench loss`. The same is asked beside each TCP. That bbr keeps three quarters of what it reaches without loss,
/// so that nothing can be twice as fast on a link that both fill, makes it a target that is missed, not a lower one.
fn comparisons(tcps: &[Tcp]) -> Vec<Comparison> {
    let point = |point: &Point| {
        let (len, loss) = (point.message_len, point.loss);
        let lm = LM_STREAMS
            .iter()
            .map(|&(name, transport, delivery)| lm_stream(name, len, loss, transport, delivery));
        let tcp = tcps
            .iter()
            .map(|&(name, congestion)| tcp_stream(name, len, loss, congestion));
        let targets = LM_STREAMS[..LM_WITH_TARGETS].iter().flat_map(|&(lm, ..)| {
            let target = move |&(tcp, _): &Tcp| Target::RatioOfAtLeast(lm, tcp, point.least);
            tcps.iter().map(target)
        });
        Comparison {
            key: point.key,
            title: point.title,
            unit: Unit::GbitPerSecond,
            contenders: lm.chain(tcp).collect(),
            targets: targets.collect(),
            most_rounds: None,
        }
    };
    let tcp = |&(name, congestion): &Tcp| tcp_stream(name, 65_536, "0%", congestion);
    let mut through_the_box = vec![
        forwarding(BOX, bed_with_box()),
        forwarding(NO_BOX, BedConfig::default()),
        lm_stream(LM, 65_536, "0%", "lm", None),
    ];
    through_the_box.extend(tcps.iter().map(tcp));
    through_the_box.push(bare_stream());
    let of_box = [LM].into_iter().chain(tcps.iter().map(|(name, _)| *name));
    let through_the_box = Comparison {
        key: "box",
        title: "the box, no loss",
        unit: Unit::GbitPerSecond,
        contenders: through_the_box,
        targets: of_box.map(|name| Target::RatioAtLeast(name, BOX_RATIO)).collect(),
        most_rounds: None,
    };
    std::iter::once(through_the_box)
        .chain(POINTS.iter().map(point))
        .collect()
}

fn bed_with_box() -> BedConfig {
    BedConfig {
        with_box: true,
        box_cores: Some(two_cores()),
        ..BedConfig::default()
    }
}

/// Runs `work` while the box loses `loss`; the box's counters go into the report.
fn through_box(
    bed: &Bed,
    programs: &Programs,
    impairments: &Impairments,
    work: impl FnOnce() -> Result<Sample>,
) -> Result<Sample> {
    let running = bed.start_box(&programs.path("lm-bench"), impairments)?;
    let sample = work();
    let counters = running.stop()?;
    let mut sample = sample?;
    sample.report["box"] = counters;
    Ok(sample)
}

fn lm_stream(
    name: &'static str,
    message_len: u32,
    loss: &'static str,
    transport: &'static str,
    delivery: Option<&str>,
) -> Contender {
    let ends = recipes::lm_stream_ends(name, message_len, transport, delivery);
    lossy_stream(name, ends, loss, |sample| match sample {
        // A stream that does not survive the loss delivers nothing: that is a result.
        Err(error) => Ok(Sample {
            value: 0.0,
            report: json!({"error": format!("{error:#}")}),
        }),
        other => other,
    })
}

fn tcp_stream(name: &'static str, message_len: u32, loss: &'static str, congestion: &str) -> Contender {
    let ends = Ends::stream("tcp", message_len.into(), [WARM_UP, SECONDS]);
    let ends = ends
        .sending(SENDING_SECONDS)
        .options(&format!("--congestion {congestion}"), "");
    lossy_stream(name, ends, loss, |sample| sample)
}

/// A stream through the box; what of it is a result where packets are lost.
fn lossy_stream(
    name: &'static str,
    ends: Ends,
    loss: &'static str,
    result: impl Fn(Result<Sample>) -> Result<Sample> + 'static,
) -> Contender {
    let seed = Cell::new(0);
    Contender {
        name,
        bed: bed_with_box(),
        measure: Box::new(move |bed, programs| {
            seed.set(seed.get() + 1);
            let impairments = Impairments::loss(loss, seed.get());
            through_box(bed, programs, &impairments, || {
                let sample = recipes::stream(bed, programs, &ends);
                if loss == "0%" { sample } else { result(sample) }
            })
        }),
    }
}

/// Bare AF_XDP through the box: the most that two cores reach with it between them.
fn bare_stream() -> Contender {
    Contender {
        name: BARE,
        bed: bed_with_box(),
        measure: Box::new(|bed, programs| {
            through_box(bed, programs, &Impairments::default(), || {
                recipes::bare_stream_on(bed, programs)
            })
        }),
    }
}

/// What arrives at the right host's interface of what one bare sender gives away, on a bed with the box, where its work and what follows
/// from it is done on the other core, or without it. The packets are for nobody, so that the far side's stack drops them at once.
fn forwarding(name: &'static str, bed: BedConfig) -> Contender {
    let has_box = bed.with_box;
    Contender {
        name,
        bed,
        measure: Box::new(move |bed, programs| match has_box {
            true => through_box(bed, programs, &Impairments::default(), || arriving(bed, programs)),
            false => arriving(bed, programs),
        }),
    }
}

fn arriving(bed: &Bed, programs: &Programs) -> Result<Sample> {
    let [sending, _] = two_cores();
    let mut words = words(&format!(
        "bare-send --interface {INTERFACE} --queue 1 --payload {FULL_PACKET} --seconds {SECONDS} --in-flight 192"
    ));
    words.extend(bare_addresses(bed)?);
    // Given last, it counts: an address that no interface has.
    let to = words.iter().position(|word| word == "--to-mac");
    words[to.context("a bare sender needs an address")? + 1] = "02:00:00:00:00:99".to_owned();
    let launch = Launch::new(programs.path("lm-bench")).args(words).core(sending);
    let before = arrived(bed)?;
    let report = bed.left().spawn(launch)?.finish()?.json()?;
    let packets = arrived(bed)? - before;
    let seconds = report["seconds"]
        .as_f64()
        .context("the sender reported no seconds")?;
    ensure!(packets > 0, "no packet arrived of what {report} says was sent");
    let per_second = packets as f64 / seconds;
    Ok(Sample {
        value: per_second * f64::from(FULL_PACKET) * 8.0 / 1e9,
        report: json!({"packets_per_s": per_second, "sender": report}),
    })
}

/// Packets that the right host's interface has received.
fn arrived(bed: &Bed) -> Result<u64> {
    let path = format!("/sys/class/net/{INTERFACE}/statistics/rx_packets");
    let text = bed.right().read_file(&path)?;
    text.trim()
        .parse()
        .with_context(|| format!("{path} says {text:?}"))
}

/// Packets a second that arrived, of the box and of the link without it.
fn forwarded(measured: &Measured) -> Vec<(&'static str, f64)> {
    let of = |(name, _, reports): &(&'static str, Summary, Vec<Value>)| {
        let all: Option<Vec<f64>> = reports
            .iter()
            .map(|report| report["packets_per_s"].as_f64())
            .collect();
        Some((*name, Summary::of(&all?)?.median))
    };
    measured.results.iter().filter_map(of).collect()
}

/// Packets that the box's interfaces dropped by themselves, where there are any.
fn dropped_by_box(measured: &[Measured]) -> Vec<(String, u64)> {
    let overruns = |report: &Value| -> u64 {
        ["rightward", "leftward"]
            .iter()
            .filter_map(|direction| report["box"][direction]["overrun"].as_u64())
            .sum()
    };
    let rows = measured.iter().flat_map(|comparison| {
        comparison.results.iter().map(move |(name, _, reports)| {
            let sum = reports.iter().map(overruns).sum();
            (format!("{}, {name}", comparison.title), sum)
        })
    });
    rows.filter(|(_, sum)| *sum > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_name_contenders() {
        for comparison in all() {
            assert!(!comparison.targets.is_empty(), "{}", comparison.key);
            for target in &comparison.targets {
                let named = match *target {
                    Target::RatioOfAtLeast(one, other, _) => vec![one, other],
                    Target::RatioAtLeast(other, _) => vec![other],
                    _ => panic!("another kind of target: {target:?}"),
                };
                for name in named {
                    assert!(comparison.contenders.iter().any(|one| one.name == name), "{name}");
                }
            }
        }
    }
}
