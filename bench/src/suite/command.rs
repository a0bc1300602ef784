//! The commands: what is measured how often, in which order, and what is told of it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use lm_measure::distance::{Apart, Distances, PATIENCE};

use super::args::MeasureArgs;
use super::bare::{self, Recipe};
use super::catalogue::{self, Entry, How, On};
use super::measure::{Addresses, Bench, Extent, SHORT};
use super::output;
use super::schema::{Absent, Cores, Failed, Report, Round, Row, SCHEMA, System, What};
use super::serve;
use super::targets;
use crate::cli::Failure;
use crate::histogram::LatencyHistogram;
use crate::link;
use crate::size::ByteSize;

/// How often each recipe of bare AF_XDP is tried before the best one is measured, at most.
const TRIES: u32 = 3;

/// Which command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measuring {
    /// Round trips.
    Latency,
    /// Round trips of 64 bytes beside a stream.
    Beside,
    /// One way.
    Throughput,
    /// What it costs.
    Cpu,
    /// Bare AF_XDP, every recipe.
    Limit,
    /// Everybody.
    Compare,
}

impl Measuring {
    const fn name(self) -> &'static str {
        match self {
            Measuring::Latency => "latency",
            Measuring::Beside => "beside",
            Measuring::Throughput => "throughput",
            Measuring::Cpu => "cpu",
            Measuring::Limit => "limit",
            Measuring::Compare => "compare",
        }
    }

    fn systems(self) -> &'static [&'static str] {
        match self {
            Measuring::Latency | Measuring::Beside | Measuring::Throughput => &["lm"],
            Measuring::Cpu => &["lm", "lm-sleeping", "udp-blocking", "tcp"],
            Measuring::Limit => &["bare"],
            Measuring::Compare => &["all"],
        }
    }

    /// What to measure at which lengths.
    fn rows(self, sizes: &[u64]) -> Vec<(What, u64)> {
        let or = |defaults: &[u64]| -> Vec<u64> {
            let sizes = if sizes.is_empty() { defaults } else { sizes };
            sizes.to_vec()
        };
        let each = |what, sizes: Vec<u64>| -> Vec<(What, u64)> {
            sizes.into_iter().map(|size| (what, size)).collect()
        };
        let bulk = [1 << 10, 7168, 64 << 10, 1 << 20];
        match self {
            Measuring::Latency => each(What::Latency, or(&netpipe())),
            Measuring::Beside => each(What::LatencyUnderLoad, or(&bulk[2..3])),
            Measuring::Throughput => each(What::Throughput, or(&bulk)),
            Measuring::Limit => each(What::Throughput, or(&bulk[..2])),
            Measuring::Cpu => each(What::Cpu, or(&bulk[2..3])),
            Measuring::Compare => {
                let mut rows = vec![(What::Latency, SHORT)];
                rows.extend(each(What::Throughput, or(&bulk)));
                rows.push((What::LatencyUnderLoad, 64 << 10));
                rows
            }
        }
    }
}

/// NetPIPE's lengths: powers of two from 1 byte to 16 MiB, and three bytes less and more than each.
fn netpipe() -> Vec<u64> {
    let around = (0..=24).flat_map(|power| {
        let size = 1_i64 << power;
        [size - 3, size, size + 3]
    });
    let mut sizes: Vec<u64> = around
        .filter_map(|size| u64::try_from(size).ok())
        .filter(|size| (1..=16 << 20).contains(size))
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The systems of these names that this program was built with, or that are frozen.
fn entries(names: &[&str], frozen: &[Entry]) -> Result<Vec<Entry>, Failure> {
    if names.contains(&"all") {
        return Ok(catalogue::ALL.to_vec());
    }
    let known = || catalogue::known().copied().chain(frozen.iter().copied());
    names
        .iter()
        .map(|name| {
            let found = known().find(|entry| entry.id == *name);
            found.ok_or_else(|| {
                let known: Vec<_> = known().map(|entry| entry.id).collect();
                Failure::usage(format!(
                    "no system is called {name}; there are {}",
                    known.join(", ")
                ))
            })
        })
        .collect()
}

/// Runs a command: measures, prints tables on standard output and progress on standard error, and writes the files asked for.
///
/// # Errors
///
/// A one-line reason when the other host does not answer, or a file cannot be written. A system that fails is part of the report.
pub fn measure(command: Measuring, args: &MeasureArgs) -> Result<(), Failure> {
    let asked: Vec<&str> = match &args.systems[..] {
        [] => command.systems().to_vec(),
        names => names.iter().map(String::as_str).collect(),
    };
    let frozen: Vec<Entry> = (args.frozen.iter())
        .map(|one| catalogue::frozen(&one.name))
        .collect();
    let mut entries = entries(&asked, &frozen)?;
    let unnamed = frozen.into_iter().filter(|one| !asked.contains(&one.id));
    entries.extend(unnamed);
    let sizes: Vec<u64> = args.sizes.iter().map(|size| size.bytes().max(1)).collect();
    let rounds = args
        .rounds
        .unwrap_or(if command == Measuring::Compare { 20 } else { 1 });
    let started = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let host = if args.host.contains(':') {
        args.host.clone()
    } else {
        format!("{}:{}", args.host, serve::PORT)
    };
    let to = Addresses {
        control: link::resolve(&host)?,
        plain: args.peer_host,
        steered: args.rps_host,
        polled: args.napi_host,
        offloads: args.offloads_host,
    };
    let mut bench = Bench::connect(&to, args.place.as_deref(), args.core, &args.frozen)?;
    bench.counted = args.counted.clone();
    let extent = Extent {
        warm_up: args.warm_up,
        seconds: args.seconds,
        count: args.count,
        rate: args.rate.map(|rate| rate.get() as f64),
        bit_rate: args.bit_rate.map(|rate| rate.get() as f64),
        mode: args.mode,
    };
    let cores = [&bench.here, &bench.far.hello].map(|hello| hello.host.cores[0] as usize);
    let mut run = Run {
        distances: if args.near_cores && bench.same_machine() {
            Distances::between(cores)
        } else {
            Distances::default()
        },
        absent: Vec::new(),
        failures: Vec::new(),
        rows: Vec::new(),
        histograms: BTreeMap::new(),
        recipes: Vec::new(),
    };
    let mut present = Vec::new();
    for entry in &entries {
        match bench.absence(entry) {
            Some(why) => run.is_absent(entry.id, why),
            None => present.push(*entry),
        }
    }
    run.choose_recipes(command, &mut bench, &present, rounds, args.recipe, extent);
    run.all(&mut bench, &present, &command.rows(&sizes), rounds, extent);
    bare::remove_pace_file();
    let report = run.report(command, args, &bench, &present, started, rounds);
    print!("{}", output::text(&report));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report).expect("a report is numbers and names");
        output::write(path, &text)?;
    }
    if report.rows.is_empty() {
        let failed = report.failures.first().map(|failed| &failed.why);
        let why = failed.or_else(|| report.absent.first().map(|absent| &absent.why));
        let why = why.map_or("nothing was asked for", String::as_str);
        return Err(Failure::new(format!("nothing was measured: {why}")));
    }
    Ok(())
}

/// A row's system in one round.
struct Measured<'a> {
    what: What,
    entry: &'a Entry,
    size: u64,
    at: u32,
    round: Round,
    histogram: Option<LatencyHistogram>,
    apart: Option<Apart>,
}

/// What has failed so often will not succeed, and takes longest.
const FAILURES_MOST: usize = 2;

/// What was measured so far.
struct Run {
    distances: Distances,
    absent: Vec<Absent>,
    failures: Vec<Failed>,
    rows: Vec<Row>,
    /// By row.
    histograms: BTreeMap<usize, LatencyHistogram>,
    /// What each recipe of a system on bare AF_XDP came to, by name in [`Report::settings`].
    recipes: Vec<(String, String)>,
}

impl Run {
    fn is_absent(&mut self, system: &str, why: String) {
        if !self
            .absent
            .iter()
            .any(|absent| absent.system == system && absent.why == why)
        {
            self.absent.push(Absent {
                system: system.to_owned(),
                why,
            });
        }
    }

    /// Everything in turns: each round has all rows, each row all systems, every other round backwards, so that what the machine does
    /// meanwhile hits all alike.
    fn all(
        &mut self,
        bench: &mut Bench,
        entries: &[Entry],
        rows: &[(What, u64)],
        rounds: u32,
        extent: Extent,
    ) {
        for at in 0..rounds {
            self.round(bench, entries, rows, (at, rounds), extent);
        }
    }

    /// How bare AF_XDP's streams are to go: as asked for, or in the best way of all.
    fn choose_recipes(
        &mut self,
        command: Measuring,
        bench: &mut Bench,
        entries: &[Entry],
        rounds: u32,
        asked: Option<Recipe>,
        extent: Extent,
    ) {
        for entry in entries.iter().filter(|entry| matches!(entry.how, How::Bare)) {
            if let Some(recipe) = asked {
                bench.take_recipe(entry, recipe);
                continue;
            }
            let full = u64::from(bench.main.near.mtu.min(bench.main.far.mtu)) - 28;
            eprintln!("lm-bench: {}: every recipe", entry.title);
            let tried = bench.choose_recipe(entry, full, rounds.min(TRIES), extent);
            if command == Measuring::Limit && entries.len() > 1 {
                println!("{}", entry.title);
            }
            for (number, (recipe, speed)) in tried.iter().enumerate() {
                let line = match speed {
                    Some(bits) => format!("{}: {:.2} Gbit/s", recipe.title(), bits / 1e9),
                    None => format!("{}: failed", recipe.title()),
                };
                if command == Measuring::Limit {
                    println!("{line}");
                }
                self.recipes.push((format!("{}_recipe_{number}", entry.id), line));
            }
        }
    }

    /// One of so many rounds. What fails in it is not repeated, but told: a success after a failure is another measurement.
    fn round(
        &mut self,
        bench: &mut Bench,
        entries: &[Entry],
        rows: &[(What, u64)],
        (at, rounds): (u32, u32),
        extent: Extent,
    ) {
        for &(what, size) in rows {
            let mut order: Vec<&Entry> = entries
                .iter()
                .filter(|entry| entry.measures(what, size))
                .collect();
            if at % 2 == 1 {
                order.reverse();
            }
            for entry in order {
                let failed = |why| Failed {
                    what,
                    system: entry.id.to_owned(),
                    size,
                    at,
                    why,
                };
                let same = (self.failures.iter())
                    .filter(|one| (one.what, &*one.system, one.size) == (what, entry.id, size));
                if same.count() >= FAILURES_MOST {
                    let why = format!("not tried after {FAILURES_MOST} failures");
                    self.failures.push(failed(why));
                    continue;
                }
                eprintln!(
                    "lm-bench: round {} of {rounds}: {what:?} {} {}",
                    at + 1,
                    ByteSize::new(size),
                    entry.id
                );
                let distances = &mut self.distances;
                match distances.around(|| bench.measure(entry, what, size, at, extent)) {
                    Ok(((round, histogram), apart)) => self.keep(Measured {
                        what,
                        entry,
                        size,
                        at,
                        round,
                        histogram,
                        apart,
                    }),
                    Err(failure) => {
                        eprintln!("lm-bench: {}: {}", entry.id, failure.text);
                        self.failures.push(failed(failure.text));
                    }
                }
            }
        }
    }

    fn keep(&mut self, measured: Measured<'_>) {
        let Measured {
            what,
            entry,
            size,
            at,
            round,
            histogram,
            apart,
        } = measured;
        let known = self
            .rows
            .iter()
            .position(|row| row.what == what && row.system == entry.id && row.size == size);
        let index = known.unwrap_or_else(|| {
            self.rows.push(Row {
                what,
                system: entry.id.to_owned(),
                size,
                rounds: Vec::new(),
                cores: Vec::new(),
                histogram: None,
            });
            self.rows.len() - 1
        });
        let row = &mut self.rows[index];
        row.rounds.push(round);
        row.cores.extend(apart.map(|apart| Cores {
            at,
            before_ns: apart.before_ns,
            after_ns: apart.after_ns,
            shared: apart.is_shared,
            near: apart.is_near,
        }));
        if let Some(histogram) = histogram {
            let all = self.histograms.entry(index).or_default();
            all.record_counts(histogram.counts());
        }
    }

    fn report(
        mut self,
        command: Measuring,
        args: &MeasureArgs,
        bench: &Bench,
        entries: &[Entry],
        started: String,
        rounds: u32,
    ) -> Report {
        for (index, histogram) in &self.histograms {
            let mut text = Vec::new();
            histogram.write_hgrm(&mut text).expect("memory can be written to");
            self.rows[*index].histogram = Some(String::from_utf8_lossy(&text).into_owned());
        }
        let place = |system: &str| {
            let known = catalogue::known().position(|entry| entry.id == system);
            known.unwrap_or(usize::MAX)
        };
        self.rows
            .sort_by_key(|row| (row.what, row.size, place(&row.system)));
        let systems = entries
            .iter()
            .filter(|entry| self.rows.iter().any(|row| row.system == entry.id));
        let systems = systems.map(|entry| System {
            id: entry.id.to_owned(),
            title: entry.title.to_owned(),
            configuration: match entry.how {
                How::Bare => format!("{}; {}", bench.recipe(entry).title(), entry.configuration),
                _ => entry.configuration.to_owned(),
            },
            link: bench.link_name(entry.on),
        });
        let mtu = bench.main.near.mtu.min(bench.main.far.mtu);
        let mut settings: BTreeMap<String, String> = [
            ("rounds", rounds.to_string()),
            ("seconds", args.seconds.to_string()),
            ("warm_up_seconds", args.warm_up.to_string()),
            ("round_trips", args.count.to_string()),
            ("latency_under_load_message_bytes", SHORT.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if let Some(rate) = args.rate {
            settings.insert("round_trips_per_second".to_owned(), rate.to_string());
        }
        if let Some(rate) = args.bit_rate {
            settings.insert("bits_per_second".to_owned(), rate.to_string());
        }
        settings.extend(self.recipes);
        settings.extend(args.setting.iter().cloned());
        Report {
            schema: SCHEMA.to_owned(),
            command: command.name().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started,
            host: bench.here.host.clone(),
            far: Some(bench.far.hello.host.clone()),
            links: bench.links(entries),
            settings,
            caveats: caveats(args, bench, &self.rows),
            systems: systems.collect(),
            ratios: targets::ratios(&self.rows, mtu, &args.least),
            rows: self.rows,
            absent: self.absent,
            failures: self.failures,
        }
    }
}

fn caveats(args: &MeasureArgs, bench: &Bench, rows: &[Row]) -> Vec<String> {
    let mut caveats = args.caveat.clone();
    let mut say = |text: &str| caveats.push(text.to_owned());
    if bench.main.near.is_virtual() {
        say(
            "A veth pair has no zero-copy mode, and no network card takes work off the processor: these figures compare software paths and \
             say nothing about a network.",
        );
        say(
            "With segmentation offloads, kernel TCP and UDP move segments of 64 KiB over a veth pair that never become packets; those rows \
             stand beside the others.",
        );
    }
    if bench.same_machine() {
        say(
            "Both hosts are on one machine: its caches, memory and clock are shared, and its busy time is counted once.",
        );
    }
    let cores: Vec<&Cores> = rows.iter().flat_map(|row| &row.cores).collect();
    if !cores.is_empty() {
        let distances = || cores.iter().flat_map(|cores| [cores.before_ns, cores.after_ns]);
        let near = cores.iter().filter(|cores| cores.near).count();
        say(&format!(
            "The two cores were {:.0} to {:.0} ns apart (a cache line there and back). Each measurement waited up to {} s for near cores and \
             was done once, wherever they were then; of {} all are kept, and {} are left out of the ratios over near cores: the cores were far, \
             moved, or were two threads of one core of the machine below ({}).",
            distances().fold(f64::INFINITY, f64::min),
            distances().fold(0.0, f64::max),
            PATIENCE.as_secs(),
            cores.len(),
            cores.len() - near,
            cores.iter().filter(|cores| cores.shared).count(),
        ));
    }
    let plain = bench.pair(On::Plain);
    if plain.is_ok_and(|pair| pair.near.xdp || pair.far.xdp) {
        say(
            "An XDP program was attached to the kernel systems' link before the run: their figures mean nothing.",
        );
    }
    if args.peer_host.is_none() {
        say("Kernel systems ran on LM's own link, between its runs: no XDP program was attached meanwhile.");
    }
    say("A datagram of UDP may be lost, and only what was received counts. A stream's first packets do not.");
    caveats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_of_netpipe() {
        let sizes = netpipe();
        assert_eq!(sizes[..9], [1, 2, 4, 5, 7, 8, 11, 13, 16]);
        assert_eq!(sizes.last(), Some(&(16 << 20)));
        assert!(sizes.is_sorted() && sizes.contains(&65_533) && sizes.contains(&65_539));
    }

    #[test]
    fn unknown_systems_are_refused_with_the_known_ones() {
        let failure = entries(&["lm", "rdma"], &[]).unwrap_err();
        assert!(
            failure.text.contains("rdma") && failure.text.contains("tcp-zerocopy"),
            "{failure}"
        );
        assert_eq!(entries(&["all"], &[]).unwrap().len(), catalogue::ALL.len());
        let frozen = [catalogue::frozen("v1")];
        assert_eq!(entries(&["lm@v1"], &frozen).unwrap()[0].id, "lm@v1");
        assert!(entries(&["lm@v2"], &frozen).is_err());
    }
}
