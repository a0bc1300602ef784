//! `cargo xtask bench`: contenders side by side, in turns, on fresh and identical beds.
//!
//! A [`Comparison`] has one quantity and several [`Contender`]s. One *round* measures every contender once, each
//! on a bed of its own; every other round goes backwards, so that a slow drift of the machine hits all alike.
//! Ratios are taken within a round and only then summarised: absolute values drift by much more than ratios do.
//! So `lm-bench compare` does it, which `compare` starts; what it has no ends for is done here: classes that share a slow port.

pub(crate) mod card;
pub(crate) mod compare;
mod frozen;
mod instructions;
mod rt;
mod target;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use lm_measure::distance::{Apart, Distances, PATIENCE};
use lm_measure::statistics::Summary;
use lm_measure::table::Table;
use serde_json::{Value, json};

pub use rt::{table_4, table_4_smoothed, under_tcp};
pub use target::Target;

use crate::bed::{Bed, BedConfig};
use crate::machine::{self, ResultFile, two_cores};
use crate::workspace::Programs;

/// Measure LM beside kernel UDP, kernel TCP and bare AF_XDP.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    suite: Suite,
}

#[derive(Debug, clap::Subcommand)]
enum Suite {
    Card(card::Arguments),
    Compare(compare::Arguments),
    Rt(rt::Arguments),
    Instructions(instructions::Arguments),
}

/// How often what is measured, and where it is kept.
#[derive(Debug, clap::Args)]
struct Rounds {
    /// Rounds: how often every contender is measured.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Also keep everything, with every single sample, in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only comparisons whose key contains this text: 64k, 1m, senders, tcp, …
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl Rounds {
    /// Measures what is asked for of a suite's comparisons by an lm-bench with these features, prints tables and what `remarks` has to say, and
    /// keeps everything.
    fn measure(
        &self,
        suite: &str,
        comparisons: Vec<Comparison>,
        features: &[String],
        remarks: impl FnOnce(&[Measured]),
    ) -> Result<()> {
        let comparisons = selected(comparisons, self.only.as_deref())?;
        let file = self.json.as_deref().map(ResultFile::create).transpose()?;
        let programs = Programs::build_with(features)?;
        let mut measured = Vec::new();
        for comparison in comparisons {
            let columns = comparison.columns;
            let one = comparison.measure(self.pairs, &programs, |what| eprintln!("  {what}"))?;
            let further: Vec<_> = columns.iter().filter_map(|column| one.column(column)).collect();
            measured.push(one);
            measured.extend(further);
        }
        print_results(&measured, self.pairs);
        remarks(&measured);
        println!("{ABOUT_VETH}");
        let Some(file) = file else { return Ok(()) };
        file.write(&json!({
            "suite": suite,
            "rounds": self.pairs,
            "machine": machine::describe(),
            "comparisons": measured.iter().map(Measured::to_json).collect::<Vec<_>>(),
        }))
    }
}

/// What a number means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Payload bits per nanosecond: more is better.
    GbitPerSecond,
    /// The same for less of it.
    MbitPerSecond,
    /// A length.
    Bytes,
    /// An amount of memory: less is better.
    Mebibytes,
    /// Frames of full length.
    FramesPerSecond,
    /// A time: less is better.
    Microseconds,
    /// The same for more of it.
    Milliseconds,
    /// A number of them.
    Packets,
    /// A part.
    Percent,
}

impl Unit {
    const fn name(self) -> &'static str {
        match self {
            Unit::GbitPerSecond => "Gbit/s",
            Unit::MbitPerSecond => "Mbit/s",
            Unit::Bytes => "B",
            Unit::Mebibytes => "MiB",
            Unit::FramesPerSecond => "frames/s",
            Unit::Microseconds => "µs",
            Unit::Milliseconds => "ms",
            Unit::Packets => "packets",
            Unit::Percent => "%",
        }
    }
}

/// One measurement: the number, and whatever the programs reported, for the JSON file.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The number, in the comparison's unit.
    pub value: f64,
    /// The programs' own reports.
    pub report: Value,
}

/// Starts programs on a bed and returns what they measured.
pub type Measure = Box<dyn Fn(&Bed, &Programs) -> Result<Sample>>;

/// One way to do what is compared.
pub struct Contender {
    /// As the table names it.
    pub name: &'static str,
    /// Its bed: a fresh one for every sample.
    pub bed: BedConfig,
    /// Measures once.
    pub measure: Measure,
}

impl std::fmt::Debug for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contender")
            .field("name", &self.name)
            .field("bed", &self.bed)
            .finish_non_exhaustive()
    }
}

/// Contenders for one quantity; the first is the one the targets are about.
#[derive(Debug)]
pub struct Comparison {
    /// Its name in JSON, stable.
    pub key: &'static str,
    /// Its name in the table.
    pub title: &'static str,
    /// The unit of every sample.
    pub unit: Unit,
    /// Who is measured, in this order.
    pub contenders: Vec<Contender>,
    /// What is asked of the first.
    pub targets: Vec<Target>,
    /// What else its reports tell.
    pub columns: &'static [Column],
    /// More rounds than this say nothing new; `None`: as many as wanted.
    pub most_rounds: Option<u32>,
}

/// A further quantity, which the contenders' reports have.
#[derive(Debug)]
pub struct Column {
    /// Where a report has it, as a JSON pointer (RFC 6901); its key in JSON, stable.
    pub place: &'static str,
    /// Its name in the table.
    pub title: &'static str,
    /// Its unit.
    pub unit: Unit,
    /// What is asked of the first contender by it.
    pub targets: &'static [Target],
}

impl Column {
    /// Of which nothing is asked.
    pub(crate) const fn new(place: &'static str, title: &'static str, unit: Unit) -> Column {
        Column {
            place,
            title,
            unit,
            targets: &[],
        }
    }
}

/// A comparison that has been measured.
#[derive(Debug)]
pub struct Measured {
    /// Its name in JSON.
    pub key: &'static str,
    /// Its name in the table.
    pub title: &'static str,
    /// The unit of every sample.
    pub unit: Unit,
    /// Per contender: name, summary, the programs' reports.
    pub results: Vec<(&'static str, Summary, Vec<Value>)>,
    /// How far apart the cores were in each round, where that is known. All rounds are kept.
    pub cores: Vec<Option<Apart>>,
    targets: Vec<Target>,
}

impl Comparison {
    /// Measures every contender `rounds` times (or [`Comparison::most_rounds`]), in turns. `progress` hears what is about to be measured.
    pub fn measure(self, rounds: u32, programs: &Programs, progress: impl Fn(&str)) -> Result<Measured> {
        let rounds = self.most_rounds.map_or(rounds, |most| most.min(rounds));
        let mut samples: Vec<Vec<Sample>> = self.contenders.iter().map(|_| Vec::new()).collect();
        let mut distances = Distances::between(two_cores());
        let mut cores = Vec::new();
        for round in 0..rounds {
            let (measured, apart) =
                distances.around(|| self.measure_once(round, rounds, programs, &progress))?;
            cores.push(apart);
            for (all, sample) in samples.iter_mut().zip(measured) {
                all.push(sample);
            }
        }
        let results = self.contenders.iter().zip(samples).map(|(contender, samples)| {
            let values: Vec<f64> = samples.iter().map(|sample| sample.value).collect();
            let summary =
                Summary::of(&values).with_context(|| format!("{} yielded no number", contender.name))?;
            Ok((
                contender.name,
                summary,
                samples.into_iter().map(|sample| sample.report).collect(),
            ))
        });
        let results = results.collect::<Result<Vec<_>>>()?;
        // Who ends a long measurement has at least these.
        let medians = results
            .iter()
            .map(|(name, summary, _): &(_, Summary, _)| format!("{name} {:.2}", summary.median));
        progress(&format!(
            "{}, medians: {}",
            self.title,
            medians.collect::<Vec<_>>().join("; ")
        ));
        Ok(Measured {
            key: self.key,
            title: self.title,
            unit: self.unit,
            results,
            cores,
            targets: self.targets,
        })
    }

    /// One round: a sample of each contender, in their order.
    fn measure_once(
        &self,
        round: u32,
        rounds: u32,
        programs: &Programs,
        progress: &impl Fn(&str),
    ) -> Result<Vec<Sample>> {
        let mut order: Vec<usize> = (0..self.contenders.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        let mut samples: Vec<Option<Sample>> = self.contenders.iter().map(|_| None).collect();
        for index in order {
            let contender = &self.contenders[index];
            progress(&format!(
                "{}, round {} of {rounds}: {}",
                self.title,
                round + 1,
                contender.name
            ));
            let sample = Bed::new(&contender.bed).and_then(|bed| (contender.measure)(&bed, programs));
            let sample = sample.with_context(|| format!("{}: {}", self.title, contender.name))?;
            progress(&format!(
                "{}: {:.3} {}",
                contender.name,
                sample.value,
                self.unit.name()
            ));
            samples[index] = Some(sample);
        }
        Ok(samples.into_iter().flatten().collect())
    }
}

impl Measured {
    /// The first contender's value over `name`'s, round by round.
    pub fn ratio_to(&self, name: &str) -> Option<Summary> {
        self.ratio(self.results.first()?.0, name)
    }

    /// The value of `one` over that of `other`, round by round.
    pub fn ratio(&self, one: &str, other: &str) -> Option<Summary> {
        Summary::of(&self.ratios(one, other)?)
    }

    /// The same rounds by another quantity, of those contenders that have it; `None` where the first has none of it.
    fn column(&self, column: &Column) -> Option<Measured> {
        let results = self.results.iter().map(|(name, _, reports)| {
            let values: Vec<f64> = (reports.iter())
                .filter_map(|report| report.pointer(column.place)?.as_f64())
                .collect();
            let summary = Summary::of(&values).filter(|_| values.len() == reports.len())?;
            Some((*name, summary, Vec::new()))
        });
        let results: Vec<_> = results.collect();
        results.first()?.as_ref()?;
        Some(Measured {
            key: column.place,
            title: column.title,
            unit: column.unit,
            results: results.into_iter().flatten().collect(),
            // They stand with what was measured.
            cores: Vec::new(),
            targets: column.targets.to_vec(),
        })
    }

    /// The rounds with near cores alone; `None` where there is none.
    fn near_only(&self) -> Option<Measured> {
        let near = |place: usize| self.cores.get(place).is_some_and(is_near);
        let results = self.results.iter().map(|(name, summary, reports)| {
            let samples = (summary.samples.iter().enumerate()).filter(|(place, _)| near(*place));
            let samples: Vec<f64> = samples.map(|(_, sample)| *sample).collect();
            let reports = (reports.iter().enumerate()).filter(|(place, _)| near(*place));
            let reports = reports.map(|(_, report)| report.clone()).collect();
            Some((*name, Summary::of(&samples)?, reports))
        });
        Some(Measured {
            results: results.collect::<Option<_>>()?,
            cores: self.cores.iter().copied().filter(is_near).collect(),
            targets: self.targets.clone(),
            ..*self
        })
    }

    fn samples_of(&self, name: &str) -> Option<&[f64]> {
        let result = self.results.iter().find(|(contender, ..)| *contender == name)?;
        Some(&result.1.samples)
    }

    fn ratios(&self, one: &str, other: &str) -> Option<Vec<f64>> {
        let pairs = self.samples_of(one)?.iter().zip(self.samples_of(other)?);
        Some(pairs.map(|(a, b)| a / b).collect())
    }

    /// The first contender's value less those of all these, round by round.
    fn excess_over(&self, names: &[&str]) -> Option<Vec<f64>> {
        let mut excess = self.results.first()?.1.samples.clone();
        for name in names {
            for (left, sample) in excess.iter_mut().zip(self.samples_of(name)?) {
                *left -= sample;
            }
        }
        Some(excess)
    }

    /// What was reached of a target; `None` where nothing was measured for it.
    fn reached(&self, target: &Target) -> Option<f64> {
        Some(match *target {
            Target::RatioAtLeast(name, _) | Target::RatioAtMost(name, _) => self.ratio_to(name)?.median,
            Target::RatioSurelyAtMost(name, _) => self.ratio_to(name)?.interval[1],
            Target::RatioOfAtMost([one, other], _) => self.ratio(one, other)?.median,
            Target::ExcessAtMost(names, _) => Summary::of(&self.excess_over(names)?)?.median,
            Target::AtMost(_) => self.results.first()?.1.median,
            Target::ReportAtLeast(_, find, _) => {
                let found: Vec<f64> = self.results.first()?.2.iter().filter_map(find).collect();
                Summary::of(&found)?.median
            }
        })
    }

    /// Per target: what was asked, what was reached, whether that is enough.
    fn verdicts(&self) -> Vec<(String, f64, bool)> {
        let verdict = |target: &Target| {
            let reached = self.reached(target)?;
            Some((target.asked(self.unit), reached, target.is_met(reached)))
        };
        self.targets.iter().filter_map(verdict).collect()
    }

    /// Adds this comparison's lines to a table.
    pub fn add_to(&self, table: &mut Table) {
        let near = self.near_only();
        for (number, (name, summary, _)) in self.results.iter().enumerate() {
            let times = |ratio: Option<Summary>| {
                let ratio = ratio.filter(|ratio| number > 0 && ratio.median.is_finite());
                ratio.map_or_else(String::new, |ratio| format!("{:.2} ×", ratio.median))
            };
            table.row([
                if number == 0 {
                    self.title.to_owned()
                } else {
                    String::new()
                },
                (*name).to_owned(),
                format!("{:.2} {}", summary.median, self.unit.name()),
                format!("±{:.0} %", summary.spread() * 100.0),
                times(self.ratio_to(name)),
                times(near.as_ref().and_then(|near| near.ratio_to(name))),
            ]);
        }
    }

    /// As it is kept in JSON files.
    pub fn to_json(&self) -> Value {
        let near = self.near_only();
        let contenders = self
            .results
            .iter()
            .enumerate()
            .map(|(number, (name, summary, reports))| {
                let mut entry = summary.to_json();
                entry["name"] = json!(name);
                entry["reports"] = json!(reports);
                if number > 0 {
                    let of = |ratio: Option<Summary>| ratio.map_or(Value::Null, |ratio| ratio.to_json());
                    entry["lm_ratio"] = of(self.ratio_to(name));
                    entry["lm_ratio_near"] = of(near.as_ref().and_then(|near| near.ratio_to(name)));
                }
                entry
            });
        let first = self.results.first().map_or("", |(name, ..)| *name);
        let targets = self.targets.iter().filter_map(|target| {
            let reached = self.reached(target)?;
            Some(json!({
                "asked": target.asked(self.unit), "of": target.of(first), "bound": target.bound(), "reached": reached,
                "near": near.as_ref().and_then(|near| near.reached(target)), "met": target.is_met(reached),
            }))
        });
        json!({
            "key": self.key,
            "title": self.title,
            "unit": self.unit.name(),
            "contenders": contenders.collect::<Vec<_>>(),
            "cores": self.cores.iter().map(apart_json).collect::<Vec<_>>(),
            "targets": targets.collect::<Vec<_>>(),
        })
    }
}

fn is_near(apart: &Option<Apart>) -> bool {
    apart.is_some_and(|apart| apart.is_near)
}

/// How far apart the cores were, as result files have it.
fn apart_json(apart: &Option<Apart>) -> Value {
    apart.map_or(Value::Null, |apart| {
        json!({
            "before_ns": apart.before_ns, "after_ns": apart.after_ns, "is_shared": apart.is_shared, "is_near": apart.is_near,
        })
    })
}

/// Says in plain words what a veth pair can and cannot show.
const ABOUT_VETH: &str = "\
A veth pair has no zero-copy mode: here the kernel copies every packet once on its way into the receiver's memory
and once out of the sender's, for LM as for UDP, and no NIC takes work off the CPU. So these figures compare
software paths on one machine and say nothing about a network. Segmentation offloads are off for everyone: with
them on, kernel TCP and UDP move 64 KiB segments over a veth that never become packets, and win.";

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    if !matches!(arguments.suite, Suite::Instructions(_)) {
        crate::bed::require_root("make network namespaces")?;
    }
    match arguments.suite {
        Suite::Card(arguments) => card::run(&arguments),
        Suite::Compare(arguments) => compare::run(&arguments),
        Suite::Rt(arguments) => rt::run(&arguments),
        Suite::Instructions(arguments) => instructions::run(&arguments),
    }
}

/// Instructions per fragment against their baseline: a step of `cargo xtask ci`.
pub(crate) fn check_instructions() -> Result<()> {
    instructions::run(&instructions::Arguments::default())
}

/// The short list of cards against its baseline: a step of `cargo xtask ci`.
pub(crate) fn check_cards() -> Result<()> {
    card::baseline::check()
}

/// The comparisons whose key contains `only`.
fn selected(mut comparisons: Vec<Comparison>, only: Option<&str>) -> Result<Vec<Comparison>> {
    comparisons.retain(|comparison| only.is_none_or(|text| comparison.key.contains(text)));
    ensure!(
        !comparisons.is_empty(),
        "no comparison has a key like that; without --only all are measured"
    );
    Ok(comparisons)
}

/// Prints the table of results and that of targets.
fn print_results(measured: &[Measured], pairs: u32) {
    let mut results = Table::new(&["", "contender", "median", "spread", "the first is", "near cores"]);
    for comparison in measured {
        comparison.add_to(&mut results);
    }
    println!(
        "\nMedians of {pairs} interleaved rounds; spread: half the distance of the quartiles.\n\n{results}"
    );
    print_targets(measured);
    print_distances(measured);
}

/// Prints what was asked and what was reached.
fn print_targets(measured: &[Measured]) {
    let mut targets = Table::new(&["target", "asked", "reached", ""]);
    for comparison in measured {
        for (asked, reached, met) in comparison.verdicts() {
            let verdict = if met { "met" } else { "MISSED" };
            targets.row([comparison.title, &asked, &format!("{reached:.2}"), verdict]);
        }
    }
    println!("{targets}");
}

/// Says how far apart the cores were.
fn print_distances(measured: &[Measured]) {
    let cores: Vec<Apart> = (measured.iter())
        .flat_map(|one| one.cores.iter().flatten().copied())
        .collect();
    let all = || cores.iter().flat_map(|apart| [apart.before_ns, apart.after_ns]);
    if !cores.is_empty() {
        println!(
            "The two cores were {:.0} to {:.0} ns apart (a cache line there and back). A round waits up to {} s for near cores and is\n\
             measured once: all {} are kept, {} of them are left out under \"near cores\".\n",
            all().fold(f64::INFINITY, f64::min),
            all().fold(0.0, f64::max),
            PATIENCE.as_secs(),
            cores.len(),
            cores.iter().filter(|apart| !apart.is_near).count(),
        );
    }
}

#[cfg(test)]
mod tests;
