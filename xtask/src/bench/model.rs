//! The analytical model of E-UDP §4.4 against what is measured: part of `bench pipeline`. Five stations' costs are fitted to one half of the lengths
//! (`lm-bench model`), the other half is foretold and compared, and so are a producer that takes twice as long and windows of four times the
//! length, whose predictions are in a file before they are measured.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;
use lm_measure::size::ByteSize;
use lm_measure::statistics::{Quantile, Summary};
use lm_measure::table::Table;
use serde_json::{Value, json};

use crate::bed::{Bed, BedConfig, INTERFACE, Launch, Port};
use crate::machine::{self, ResultFile, two_cores};
use crate::workspace::{Programs, target_dir};

/// Of these every other one is fitted to.
const LENS: [u64; 8] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];
/// In fragments; a window's cost is told from a byte's by two of them.
const WINDOWS: [u64; 2] = [16, 32];
/// What is foretold before it is measured.
const WINDOW_LONGER: u64 = 64;
const SLOWER: u32 = 2;
/// One half of the lengths.
const NOT_FITTED: &str = "lengths not fitted to";
/// What is asked of errors.
const MEDIAN_MOST: f64 = 0.05;
const WORST_MOST: f64 = 0.12;
/// What cores pass at least, in bits a second.
const SLOWEST: u64 = 1_000_000_000;
/// Frames in a port's buffer.
const PORT_FRAMES: u32 = 1000;
/// Of a link's rate, what is left for payload in packets of 1500 bytes: so many of so many.
const PAYLOAD: (u64, u64) = (1448, 1538);

/// Where messages go: a veth pair, or a port's rate.
const BEDS: [(&str, Option<BitRate>); 3] = [
    ("veth", None),
    ("500 Mbit/s", Some(BitRate(500_000_000))),
    ("100 Mbit/s", Some(BitRate(100_000_000))),
];

/// A kind of message.
#[derive(Clone, Copy, Debug)]
struct Kind {
    bed: &'static str,
    rate: Option<BitRate>,
    len: u64,
    window: u64,
    whole: bool,
    slower: u32,
}

impl Kind {
    /// All of a bed: those that are measured first, or those that are foretold first.
    fn all((bed, rate): (&'static str, Option<BitRate>), foretold: bool) -> Vec<Kind> {
        let variants: &[(u64, u32)] = match foretold {
            false => &[(WINDOWS[0], 1), (WINDOWS[1], 1)],
            true => &[(WINDOWS[0], SLOWER), (WINDOW_LONGER, 1)],
        };
        let lens = LENS.into_iter().filter(|&len| !foretold || !fits(len));
        let each = lens.flat_map(|len| {
            variants.iter().flat_map(move |&(window, slower)| {
                [false, true].map(|whole| Kind {
                    bed,
                    rate,
                    len,
                    window,
                    whole,
                    slower,
                })
            })
        });
        each.collect()
    }

    /// Bits of payload a second.
    fn pace(&self) -> Option<u64> {
        self.rate.map(|rate| rate.0 * PAYLOAD.0 / PAYLOAD.1)
    }

    /// As `lm-bench model` reads it.
    fn run(&self, times: Option<&Value>) -> Value {
        json!({
            "bed": self.bed, "len": self.len, "window": self.window, "whole": self.whole, "slower": self.slower,
            "link": self.pace(), "pace": self.pace(), "fits": times.is_some() && self.slower == 1 && fits(self.len), "times": times,
        })
    }

    /// Measures such messages: medians, without the first one, which warms up.
    fn measure(&self, bed: &Bed, programs: &Programs) -> Result<Value> {
        // A message passes up to `SLOWER` + 2 stations one after the other.
        let pace = self.pace().unwrap_or(SLOWEST);
        let most_ms = (u64::from(self.slower) + 2) * self.len * 8000 / pace;
        let messages = (4000 / (most_ms + 120)).clamp(3, 24) + 1;
        let limit = Duration::from_millis(20_000 + 2 * messages * (most_ms + 500));
        let work = self
            .pace()
            .map_or("--work keystream".to_owned(), |pace| format!("--pace {pace}"));
        let whole = if self.whole { " --whole" } else { "" };
        let launch = |side: &str, core: usize| {
            let line = format!(
                "--time-limit {} pipeline {side} --len {} --messages {messages} --window {} --interface {INTERFACE} {work}{whole}",
                limit.as_secs(),
                self.len,
                self.window
            );
            Launch::new(programs.path("lm-bench"))
                .args(line.split(' '))
                .core(core)
                .time_limit(limit)
        };
        let cores = two_cores();
        let mut far = bed.right().spawn(launch("far", cores[1]))?;
        far.await_text("ready")?;
        let to = format!("{}:7168", bed.right().address());
        let slower = self.slower.to_string();
        let near = launch("near", cores[0]).args(["--to", &to, "--slower", &slower]);
        let near = bed.left().spawn(near)?.finish()?.json()?;
        times(&near, &far.finish()?.json()?).with_context(|| format!("{self:?}"))
    }
}

fn fits(len: u64) -> bool {
    LENS.iter()
        .position(|&one| one == len)
        .is_some_and(|place| place % 2 == 0)
}

/// Medians of what both ends say, in nanoseconds.
fn times(near: &Value, far: &Value) -> Result<Value> {
    let messages = |report: &Value| report["messages"].as_array().cloned().unwrap_or_default();
    let pairs: Vec<_> = messages(near).into_iter().zip(messages(far)).skip(1).collect();
    ensure!(!pairs.is_empty(), "no messages: {near} {far}");
    ensure!(
        pairs.iter().all(|(sent, came)| sent["sha256"] == came["sha256"]),
        "what came is not what was sent: {near} {far}"
    );
    let median = |of: &dyn Fn(&Value, &Value) -> Option<f64>| {
        let mut values: Vec<f64> = pairs
            .iter()
            .map(|(sent, came)| of(sent, came))
            .collect::<Option<_>>()?;
        values.sort_by(f64::total_cmp);
        Quantile::of(&values, 0.5).map(|found| found.value)
    };
    let needed = |of: &dyn Fn(&Value, &Value) -> Option<f64>| {
        median(of).with_context(|| format!("a message without its times: {near} {far}"))
    };
    Ok(json!({
        "latency_ns": needed(&|sent, came| Some(came["consumed_ns"].as_f64()? - sent["begins_ns"].as_f64()?))?,
        "produce_ns": needed(&|sent, _| sent["worked_ns"].as_f64())?,
        "send_ns": needed(&|sent, _| sent["moved_ns"].as_f64())?,
        "land_ns": median(&|_, came| came["moved_ns"].as_f64()),
        "consume_ns": needed(&|_, came| came["worked_ns"].as_f64())?,
    }))
}

/// What the model says of runs.
fn predict(programs: &Programs, runs: &[Value]) -> Result<Value> {
    let mut model = Command::new(programs.path("lm-bench"))
        .arg("model")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start lm-bench model")?;
    let mut stdin = model.stdin.take().context("a pipe was asked for")?;
    stdin.write_all(Value::from(runs).to_string().as_bytes())?;
    drop(stdin);
    let output = model.wait_with_output()?;
    ensure!(
        output.status.success(),
        "lm-bench model failed; its own message is above"
    );
    serde_json::from_slice(&output.stdout).context("lm-bench model printed no JSON")
}

/// Measures, foretells, measures what was foretold, and compares.
pub(super) fn run(json: Option<&Path>) -> Result<()> {
    let file = json.map(ResultFile::create).transpose()?;
    let programs = Programs::build()?;
    let mut runs = Vec::new();
    let mut beds = Vec::new();
    for bed in BEDS {
        let (name, rate) = bed;
        let config = BedConfig {
            senders: rate.map(|_| 1),
            port: rate.map(|rate| Port {
                rate,
                frames: PORT_FRAMES,
            }),
            ..BedConfig::default()
        };
        let made = Bed::new(&config).with_context(|| format!("the bed of {name}"))?;
        for kind in Kind::all(bed, false) {
            let times = measured(&kind, &made, &programs)?;
            runs.push(kind.run(Some(&times)));
        }
        runs.extend(Kind::all(bed, true).iter().map(|kind| kind.run(None)));
        beds.push((bed, made));
    }
    let foretold = predict(&programs, &runs)?;
    let place = target_dir()?.join("pipeline-predictions.json");
    ResultFile::create(&place)?.write(&foretold)?;
    let mut all = foretold["runs"].as_array().cloned().unwrap_or_default();
    for (bed, made) in beds {
        for kind in Kind::all(bed, true) {
            let times = measured(&kind, &made, &programs)?;
            let run = all.iter_mut().find(|run| {
                let wanted = kind.run(None);
                ["bed", "len", "window", "whole", "slower"]
                    .iter()
                    .all(|key| run[key] == wanted[key])
            });
            run.context("the model leaves no run out")?["times"] = times;
        }
    }
    print(&foretold, &all)?;
    let Some(file) = file else { return Ok(()) };
    file.write(&json!({
        "suite": "model", "machine": machine::describe(), "costs": foretold["costs"], "rates": foretold["rates"], "runs": all,
    }))
}

fn measured(kind: &Kind, bed: &Bed, programs: &Programs) -> Result<Value> {
    let times = kind.measure(bed, programs)?;
    let latency_ms = times["latency_ns"].as_f64().unwrap_or_default() / 1e6;
    let how = if kind.whole {
        "one after the other"
    } else {
        "all at once"
    };
    eprintln!(
        "  {}, {}, windows of {}, producer × {}, {how}: {latency_ms:.3} ms",
        kind.bed,
        ByteSize::new(kind.len),
        kind.window,
        kind.slower
    );
    Ok(times)
}

/// A kind of messages on a bed, and how far off the model is.
#[derive(Debug)]
pub(crate) struct Judged {
    /// Bed and kind.
    pub(crate) what: String,
    /// By how they are sent: the lengths, and each one's error.
    pub(crate) rows: BTreeMap<String, (Vec<String>, Vec<f64>)>,
    /// The error's name, it, and the most that is asked.
    pub(crate) asked: Vec<(&'static str, f64, f64)>,
}

/// Of runs that the costs are not fitted to; `None`: one of them says too little.
pub(crate) fn judged(runs: &[Value]) -> Option<Vec<Judged>> {
    let mut all: BTreeMap<_, BTreeMap<String, (Vec<_>, Vec<_>)>> = BTreeMap::new();
    for run in runs.iter().filter(|run| run["fits"] == false) {
        let (window, slower) = (run["window"].as_u64()?, run["slower"].as_u64()?);
        let kind = match (slower, window) {
            (1, WINDOW_LONGER) => "θ four times as long",
            (1, _) => NOT_FITTED,
            _ => "a producer twice as slow",
        };
        let how = format!("windows of {window}, producer × {slower}, {}", way(run));
        let rows = all.entry((run["bed"].as_str()?, kind)).or_default();
        let (lens, errors) = rows.entry(how).or_default();
        lens.push(ByteSize::new(run["len"].as_u64()?).to_string());
        errors.push(run["predicted_ns"].as_f64()? / run["times"]["latency_ns"].as_f64()? - 1.0);
    }
    let judged = all.into_iter().map(|((bed, kind), rows)| {
        let errors = rows.values().flat_map(|(_, errors)| errors);
        let errors: Vec<f64> = errors.map(|error| error.abs()).collect();
        let worst = errors.iter().copied().fold(0.0, f64::max);
        let mut asked = vec![("worst", worst, WORST_MOST)];
        // Of what was foretold in a file only the worst one is asked.
        if kind == NOT_FITTED {
            asked.insert(0, ("median", Summary::of(&errors)?.median, MEDIAN_MOST));
        }
        let what = format!("{bed}, {kind}");
        Some(Judged { what, rows, asked })
    });
    judged.collect()
}

fn way(run: &Value) -> &'static str {
    if run["whole"] == true { "coarse" } else { "fine" }
}

fn print(foretold: &Value, all: &[Value]) -> Result<()> {
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let mut costs = Table::new(&[
        "costs",
        "station",
        "µs a message",
        "µs a window",
        "ns a packet",
        "ns a byte",
    ]);
    for of in foretold["costs"].as_array().into_iter().flatten() {
        for name in ["produce", "send", "link", "land", "consume"] {
            let cost = &of["stations"][name];
            costs.row([
                format!("{}, {}", of["bed"].as_str().unwrap_or_default(), way(of)),
                name.to_owned(),
                format!("{:.1}", number(&cost["message_us"])),
                format!("{:.2}", number(&cost["window_us"])),
                format!("{:.0}", 1e3 * number(&cost["packet_us"])),
                format!("{:.3}", number(&cost["byte_ns"])),
            ]);
        }
    }
    println!("{costs}");
    let mut runs = Table::new(&[
        "bed", "length", "window", "producer", "", "measured", "foretold", "error",
    ]);
    for run in all.iter().filter(|run| run["fits"] == false) {
        let (measured, predicted) = (number(&run["times"]["latency_ns"]), number(&run["predicted_ns"]));
        let error = predicted / measured - 1.0;
        runs.row([
            run["bed"].as_str().unwrap_or_default().to_owned(),
            ByteSize::new(run["len"].as_u64().unwrap_or_default()).to_string(),
            run["window"].to_string(),
            format!("× {}", run["slower"]),
            way(run).to_owned(),
            format!("{:.3} ms", measured / 1e6),
            format!("{:.3} ms", predicted / 1e6),
            format!("{:+.1} %", 100.0 * error),
        ]);
    }
    println!("{runs}");
    let mut verdicts = Table::new(&["foretold", "error", "", ""]);
    for judged in judged(all).context("a run without its times")? {
        for (of, reached, most) in &judged.asked {
            verdicts.row([
                judged.what.clone(),
                (*of).to_owned(),
                format!("{:.1} %", 100.0 * reached),
                if reached <= most { "met" } else { "MISSED" }.to_owned(),
            ]);
        }
    }
    println!("Asked: median ≤ 5 % of lengths that were not fitted to, none above 12 %.\n\n{verdicts}");
    let mut rates = Table::new(&["link", "length", "fine", "coarse", "best window", "many messages"]);
    for rate in foretold["rates"].as_array().into_iter().flatten() {
        for of in rate["lens"].as_array().into_iter().flatten() {
            rates.row([
                format!("{} Gbit/s", rate["gbit"]),
                ByteSize::new(of["len"].as_u64().unwrap_or_default()).to_string(),
                format!("{:.3} ms", number(&of["fine_ns"]) / 1e6),
                format!("{:.3} ms", number(&of["coarse_ns"]) / 1e6),
                of["window"].to_string(),
                format!("{:.2} Gbit/s", number(&of["gbit_per_second"])),
            ]);
        }
    }
    println!("Foretold of two cores of this machine, ChaCha20 to SHA-256, in copy mode:\n\n{rates}");
    Ok(())
}
