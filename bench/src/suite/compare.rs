//! `lm-bench compare`: what is measured how often, in which order, and what is told of it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use lm_measure::against::changes;

use super::args::CompareArgs;
use super::measure::{Bench, SHORT};
use super::output::{self, Partial};
use super::ratios;
use super::schema::{Absent, Failed, Measured, Report, Round, Row, SCHEMA, What};
use super::systems::System;
use crate::cli::Failure;
use crate::histogram::LatencyHistogram;
use crate::page::read as read_report;
use crate::size::ByteSize;

/// What to measure at which lengths: round trips that nothing but the default asks for have one.
fn rows(args: &CompareArgs) -> Vec<(What, u64)> {
    let asked: Vec<u64> = args.sizes.iter().map(|size| size.bytes().max(1)).collect();
    let all = [What::RoundTrips, What::Stream, What::Beside];
    let is_named = !args.tasks.is_empty();
    let tasks = if is_named { &args.tasks[..] } else { &all };
    let mut rows = Vec::new();
    for &what in tasks {
        let own: &[u64] = match what {
            What::RoundTrips => &[SHORT],
            What::Stream => &[1 << 10, 7168, 64 << 10, 1 << 20],
            What::Beside => &[64 << 10],
        };
        let keeps_own = asked.is_empty() || (!is_named && what != What::Stream);
        let sizes = if keeps_own { own } else { &asked };
        rows.extend(sizes.iter().map(|&size| (what, size)));
    }
    rows
}

/// Runs the command: measures, prints tables on standard output and progress on standard error, and writes the file asked for.
///
/// # Errors
///
/// A one-line reason when the other host does not answer, or a file cannot be written. A system that fails is part of the report.
pub fn compare(args: &CompareArgs) -> Result<(), Failure> {
    let systems = match &args.systems[..] {
        [] => System::defaults(),
        named => named.to_vec(),
    };
    let started = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let earlier = args.against.as_deref().map(read_report).transpose()?;
    let kept = args.json.as_deref().map(Partial::create).transpose()?;
    let mut bench = Bench::connect(args)?;
    let mut run = Run::default();
    for system in systems {
        match bench.absence(&system) {
            Some(why) => run.absent.push(Absent {
                system: system.name,
                why,
            }),
            None => run.systems.push(system),
        }
    }
    // Each round has all rows, each row all systems, every other round backwards, so that what the machine does meanwhile hits all alike.
    for at in 0..args.rounds {
        for (what, size) in rows(args) {
            let able = (0..run.systems.len()).filter(|&place| run.systems[place].measures(what, size));
            let mut order: Vec<usize> = able.collect();
            if at % 2 == 1 {
                order.reverse();
            }
            for place in order {
                eprintln!(
                    "lm-bench: round {} of {}: {} {} {}",
                    at + 1,
                    args.rounds,
                    what.name(),
                    ByteSize::new(size),
                    run.systems[place].name
                );
                run.measure(&mut bench, (what, size, place), at, args);
            }
        }
    }
    crate::bare::remove_pace_file();
    let report = run.report(args, &bench, started);
    print!("{}", output::text(&report));
    if let Some(kept) = kept {
        let text = serde_json::to_string_pretty(&report).expect("a report is numbers and names");
        kept.write(&text)?;
    }
    if report.rows.is_empty() {
        let failed = report.failures.first().map(|failed| &failed.why);
        let why = failed.or_else(|| report.absent.first().map(|absent| &absent.why));
        let why = why.map_or("nothing was asked for", String::as_str);
        return Err(Failure::new(format!("nothing was measured: {why}")));
    }
    earlier.map_or(Ok(()), |earlier| agree(&report, &earlier))
}

/// Two runs agree when no figure differs by more than this.
const AGREE: f64 = 0.01;

/// Says by how much each row of an earlier run is better now.
fn agree(report: &Report, earlier: &Report) -> Result<(), Failure> {
    let value = |report| serde_json::to_value(report).expect("a report is numbers and names");
    let (changes, mut differing) = (changes(&value(report), &value(earlier)), 0);
    for change in &changes {
        println!("against the earlier run: {change}");
        differing += u32::from(change.better.is_none_or(|better| better.abs() > AGREE));
    }
    match differing {
        0 => Ok(()),
        _ => Err(Failure::new(format!(
            "{differing} of {} rows differ by more than {} % from the earlier run",
            changes.len(),
            AGREE * 100.0
        ))),
    }
}

/// A measurement with this number of failures will not succeed, and takes longest.
const FAILURES_MOST: usize = 2;

/// What was measured so far.
#[derive(Default)]
struct Run {
    systems: Vec<System>,
    absent: Vec<Absent>,
    failures: Vec<Failed>,
    /// Rounds, and all round trips of them, by task, length and the system's place.
    rows: BTreeMap<(What, u64, usize), (Vec<Round>, LatencyHistogram)>,
}

impl Run {
    /// Measures once. What fails is not repeated, but told: a success after a failure is another measurement.
    fn measure(
        &mut self,
        bench: &mut Bench,
        (what, size, place): (What, u64, usize),
        at: u32,
        args: &CompareArgs,
    ) {
        let system = &self.systems[place];
        let same = (self.failures.iter())
            .filter(|one| (one.what, &one.system, one.size) == (what, &system.name, size));
        let measured = match same.count() >= FAILURES_MOST {
            true => Err(Failure::new(format!("not tried after {FAILURES_MOST} failures"))),
            false => bench.measure(system, what, size, at, args),
        };
        match measured {
            Ok((round, histogram)) => {
                let row = self.rows.entry((what, size, place));
                let (rounds, all) = row.or_insert_with(|| (Vec::new(), LatencyHistogram::new()));
                rounds.push(round);
                all.record_counts(histogram.counts());
            }
            Err(failure) => {
                eprintln!("lm-bench: {}: {}", system.name, failure.text);
                self.failures.push(Failed {
                    what,
                    system: system.name.clone(),
                    size,
                    at,
                    why: failure.text,
                });
            }
        }
    }

    fn report(self, args: &CompareArgs, bench: &Bench, started: String) -> Report {
        let row = |((what, size, place), (rounds, all)): ((What, u64, usize), (_, LatencyHistogram))| Row {
            what,
            system: self.systems[place].name.clone(),
            size,
            rounds,
            histogram: (all.count() > 0).then(|| {
                let mut text = Vec::new();
                all.write_hgrm(&mut text).expect("memory can be written to");
                String::from_utf8_lossy(&text).into_owned()
            }),
        };
        let rows: Vec<Row> = self.rows.into_iter().map(row).collect();
        let settings = [
            ("rounds", Some(args.rounds.to_string())),
            ("seconds", Some(args.seconds.to_string())),
            ("warm_up_seconds", Some(args.warm_up.to_string())),
            ("round_trips", Some(args.count.to_string())),
            ("round_trips_per_second", args.rate.map(|rate| rate.to_string())),
            ("bits_per_second", args.bit_rate.map(|rate| rate.to_string())),
            ("load", args.load.as_ref().map(|load| load.name.clone())),
        ];
        let settings = (settings.into_iter()).filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let measured =
            (self.systems.iter()).filter(|system| rows.iter().any(|row| row.system == system.name));
        let measured = measured.map(|system| Measured {
            id: system.name.clone(),
            configuration: system.how.configuration().to_owned(),
            link: bench.pair(system).near.link.interface.clone(),
        });
        Report {
            schema: SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started,
            host: bench.here.host.clone(),
            far: bench.far.hello.host.clone(),
            links: bench.links(),
            settings: settings.chain(args.setting.iter().cloned()).collect(),
            caveats: caveats(args, bench),
            systems: measured.collect(),
            ratios: ratios::ratios(&rows, self.systems.first().map_or("", |first| &first.name)),
            rows,
            absent: self.absent,
            failures: self.failures,
        }
    }
}

fn caveats(args: &CompareArgs, bench: &Bench) -> Vec<String> {
    let plain = bench.plain.as_ref().unwrap_or(&bench.main);
    let all = [
        (
            bench.main.near.is_virtual,
            "A veth pair has no zero-copy mode, and no network card takes work off the processor: these figures \
             compare software paths and say nothing about a network.",
        ),
        (
            bench.same_machine(),
            "Both hosts are on one machine: its caches, memory and clock are shared, and its busy time is counted \
             once.",
        ),
        (
            plain.near.link.xdp || plain.far.link.xdp,
            "An XDP program was attached to the kernel systems' link before the run: their figures mean nothing.",
        ),
        (
            args.peer_host.is_none(),
            "Kernel systems ran on LM's own link, between its runs: no XDP program was attached meanwhile.",
        ),
        (
            true,
            "A datagram of UDP may be lost, and only what was received counts. A stream's first packets do not.",
        ),
    ];
    let said = all.into_iter().filter(|(is_so, _)| *is_so);
    said.map(|(_, text)| text.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: CompareArgs,
    }

    #[test]
    fn lengths_are_of_the_tasks_that_are_named() {
        let rows = |line: &str| rows(&Line::parse_from(format!("x host {line}").split_whitespace()).args);
        assert_eq!(rows("").len(), 6);
        let of_streams = rows("--sizes 64K");
        assert_eq!(
            of_streams,
            [
                (What::RoundTrips, 64),
                (What::Stream, 64 << 10),
                (What::Beside, 64 << 10)
            ]
        );
        assert_eq!(
            rows("--tasks round-trips --sizes 1,7168"),
            [(What::RoundTrips, 1), (What::RoundTrips, 7168)]
        );
    }
}
