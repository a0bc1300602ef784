//! `cargo xtask figures`: docs/figures.md, made of the result files in bench/figures and of nothing else.
//!
//! A result file is what a measuring command kept with `--json`, without what the programs reported one by one. Above each table of the page
//! are the command, commit, date and host of its file. What is asked is what the code asks now; a target that was higher once is
//! remembered in bench/figures/targets.json, so that the page says where it was lowered.

mod model;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::bench::{all_comparisons, card};
use crate::workspace;

/// Makes docs/figures.md anew from the result files in bench/figures.
///
/// Files that are named are taken into that folder first: what a command of `cargo xtask bench` kept with --json, measured by a program
/// that is in a commit. The page has every figure with all its rounds, and what is asked of it, met or missed.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Result files to take in, under their names; a file of the same name is replaced
    files: Vec<PathBuf>,
}

const FOLDER: &str = "bench/figures";
/// The most that was ever asked, by target.
const TARGETS: &str = "bench/figures/targets.json";
const PAGE: &str = "docs/figures.md";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let root = workspace::root();
    for path in &arguments.files {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}; name a file that --json wrote", path.display()))?;
        let whole = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let name = path.file_name().context("a result file has a name")?;
        let small = cut(&whole).with_context(|| path.display().to_string())?;
        write(&root.join(FOLDER).join(name), &format!("{small}\n"))?;
    }
    let made = make(root)?;
    write(&root.join(PAGE), &made.page)?;
    write(&root.join(TARGETS), &made.targets)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// What the command writes.
struct Made {
    page: String,
    targets: String,
}

fn make(root: &Path) -> Result<Made> {
    let targets = root.join(TARGETS);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(root.join(FOLDER)).with_context(|| format!("cannot read {FOLDER}"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "json") && path != targets {
            files.push(path);
        }
    }
    files.sort();
    let mut measured = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path)?;
        let value: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        measured.push(Measured::of(&value).with_context(|| path.display().to_string())?);
    }
    let most = match std::fs::read_to_string(&targets) {
        Ok(text) => serde_json::from_str(&text).context(TARGETS)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
        Err(error) => return Err(error).context(TARGETS),
    };
    Ok(page(&measured, asked_by_code(), most))
}

/// A result file without what no page shows: the programs' own reports, and histograms.
fn cut(whole: &Value) -> Result<Value> {
    let mut small = whole.clone();
    if whole["schema"].is_string() {
        for row in small["rows"].as_array_mut().into_iter().flatten() {
            row.as_object_mut()
                .context("a row is an object")?
                .remove("histogram");
        }
    } else {
        let kept = [
            "suite",
            "rounds",
            "machine",
            "comparisons",
            "clock",
            "rustc",
            "boots",
            "rows",
            "runs",
        ];
        small
            .as_object_mut()
            .context("a result file is an object")?
            .retain(|name, _| kept.contains(&name.as_str()));
        let comparisons = small["comparisons"].as_array_mut().into_iter().flatten();
        for contender in comparisons
            .flat_map(|one| one["contenders"].as_array_mut())
            .flatten()
        {
            contender
                .as_object_mut()
                .context("a contender is an object")?
                .remove("reports");
        }
    }
    // Whether it is a result file that the page can show.
    Measured::of(&small)?;
    Ok(small)
}

/// By what a file's figures were measured: each row of the page says it.
#[derive(Clone, Debug)]
struct Run {
    command: String,
    commit: String,
    date: String,
    host: String,
}

impl Run {
    fn of_machine(machine: &Value) -> Run {
        Run {
            command: text(&machine["command"]),
            commit: text(&machine["revision"]),
            date: text(&machine["date"]),
            host: match (machine["processor"].as_str(), machine["kernel"].as_str()) {
                (Some(processor), Some(kernel)) => {
                    format!("{processor}, {} cores, Linux {kernel}", machine["cores"])
                }
                _ => String::new(),
            },
        }
    }

    fn check(self) -> Result<Run> {
        for (name, value) in [
            ("command", &self.command),
            ("commit", &self.commit),
            ("date", &self.date),
            ("host", &self.host),
        ] {
            ensure!(
                !value.is_empty(),
                "the file does not say its {name}; measure again by cargo xtask bench"
            );
        }
        ensure!(
            !self.commit.ends_with("-dirty"),
            "measured by a program that is in no commit ({}); commit it and measure again",
            self.commit
        );
        Ok(self)
    }

    fn line(&self) -> String {
        format!(
            "`{}` at {}, {}, {}",
            self.command, self.commit, self.date, self.host
        )
    }
}

/// A system's figure for one quantity.
#[derive(Debug)]
struct Figure {
    what: String,
    who: String,
    unit: String,
    figure: f64,
    rounds: Vec<f64>,
    /// Of each round, in nanoseconds before and after it; `*` where the cores were near.
    cores: Vec<String>,
}

/// What was asked, and what came of it.
#[derive(Debug)]
struct Verdict {
    /// Its name in [`TARGETS`].
    key: String,
    what: String,
    asked: String,
    bound: f64,
    at_least: bool,
    reached: String,
    near: String,
    verdict: &'static str,
}

impl Verdict {
    fn of_card(line: card::asked::Line) -> Verdict {
        Verdict {
            key: line.key,
            what: line.what,
            asked: format!("{} {}", if line.at_least { "≥" } else { "≤" }, line.bound),
            bound: line.bound,
            at_least: line.at_least,
            reached: line.reached,
            near: "–".to_owned(),
            verdict: match line.is_met {
                Some(true) => "met",
                Some(false) => "**missed**",
                None => "unclear",
            },
        }
    }
}

/// A result file.
#[derive(Debug)]
struct Measured {
    run: Run,
    suite: String,
    figures: Vec<Figure>,
    verdicts: Vec<Verdict>,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn or_none(value: &Value) -> String {
    value.as_f64().map_or_else(|| "–".to_owned(), number)
}

fn apart(cores: &Value, near: &str) -> String {
    let ns = |name: &str| cores[name].as_f64().map(|ns| format!("{ns:.0}"));
    let (Some(before), Some(after)) = (ns("before_ns"), ns("after_ns")) else {
        return "–".to_owned();
    };
    let mark = if cores[near] == true { "*" } else { "" };
    format!("{before}/{after}{mark}")
}

impl Measured {
    fn of(file: &Value) -> Result<Measured> {
        match (file["schema"].as_str(), file["suite"].as_str()) {
            (Some("lm-bench/1"), _) => Measured::of_lm_bench(file),
            (None, Some(suite)) if file["comparisons"].is_array() => Measured::of_suite(file, suite),
            (None, Some("card")) => Measured::of_card(file),
            (None, Some("model")) if file["runs"].is_array() => Measured::of_model(file),
            _ => bail!("no result file of cargo xtask bench; name one that --json wrote"),
        }
    }

    fn of_suite(file: &Value, suite: &str) -> Result<Measured> {
        let run = Run::of_machine(&file["machine"]);
        let (mut figures, mut verdicts) = (Vec::new(), Vec::new());
        for comparison in list(&file["comparisons"]) {
            let (key, title) = (text(&comparison["key"]), text(&comparison["title"]));
            for contender in list(&comparison["contenders"]) {
                let figure = contender["figure"].as_f64().or(contender["median"].as_f64());
                figures.push(Figure {
                    what: title.clone(),
                    who: text(&contender["name"]),
                    unit: text(&comparison["unit"]),
                    figure: figure.with_context(|| format!("{key} has no figure"))?,
                    rounds: list(&contender["samples"])
                        .iter()
                        .filter_map(Value::as_f64)
                        .collect(),
                    cores: list(&comparison["cores"])
                        .iter()
                        .map(|one| apart(one, "is_near"))
                        .collect(),
                });
            }
            for target in list(&comparison["targets"]) {
                let bound = target["bound"].as_f64();
                let asked = text(&target["asked"]);
                verdicts.push(Verdict {
                    key: format!("{suite}/{key}/{}", text(&target["of"])),
                    what: format!("{title}: {}", text(&target["of"])),
                    bound: bound.with_context(|| format!("a target of {key} has no bound"))?,
                    at_least: asked.contains('≥'),
                    asked,
                    reached: or_none(&target["reached"]),
                    near: or_none(&target["near"]),
                    verdict: if target["met"] == true {
                        "met"
                    } else {
                        "**missed**"
                    },
                });
            }
        }
        Ok(Measured {
            run: run.check()?,
            suite: suite.to_owned(),
            figures,
            verdicts,
        })
    }

    /// Of emulated cards: the guest and QEMU decide, whatever the host is.
    fn of_card(file: &Value) -> Result<Measured> {
        let boot = &file["boots"][0];
        let run = Run {
            host: match (boot["qemu"].as_str(), boot["guest"].as_str()) {
                (Some(qemu), Some(guest)) => format!("QEMU {qemu}, Linux {guest}"),
                _ => String::new(),
            },
            ..Run::of_machine(&file["machine"])
        };
        let figure = |row: &Value| {
            let rounds = list(&row["rounds"]).iter().filter_map(Value::as_f64);
            let (what, unit, scale) = match row["row"]["what"].as_str() {
                Some("stream") => ("stream", "Mbit/s", 1e6),
                Some("sessions") => ("eight streams", "Mbit/s", 1e6),
                Some("beside") => ("round trip of 64 B p50 beside a stream", "µs", 1e3),
                _ => ("round trip p50", "µs", 1e3),
            };
            let rounds: Vec<f64> = rounds.map(|round| round / scale).collect();
            let row = &row["row"];
            let mode = row["mode"]
                .as_str()
                .map_or_else(String::new, |mode| format!(", {mode}"));
            let taps = if row["taps"] == true { ", through taps" } else { "" };
            Some(Figure {
                what: format!("{}, {what}, {} B", text(&row["device"]), row["size"]),
                who: format!("{}{mode}{taps}", text(&row["system"])),
                unit: unit.to_owned(),
                figure: lm_measure::statistics::Summary::of(&rounds)?.median,
                rounds,
                cores: Vec::new(),
            })
        };
        Ok(Measured {
            run: run.check()?,
            suite: "card".to_owned(),
            figures: list(&file["rows"]).iter().filter_map(figure).collect(),
            verdicts: (card::asked::asked(&file["rows"])?.into_iter())
                .map(Verdict::of_card)
                .collect(),
        })
    }

    fn of_lm_bench(file: &Value) -> Result<Measured> {
        let host = &file["host"];
        let run = Run {
            command: text(&file["settings"]["command"]),
            commit: text(&file["settings"]["commit"]),
            date: text(&file["started"]),
            host: match (host["cpu"].as_str(), host["kernel"].as_str()) {
                (Some(cpu), Some(kernel)) => format!("{cpu}, Linux {kernel}"),
                _ => String::new(),
            },
        };
        let title = |id: &Value| {
            let system = list(&file["systems"]).iter().find(|system| system["id"] == *id);
            system.map_or_else(|| text(id), |system| text(&system["title"]))
        };
        let mut figures = Vec::new();
        for row in list(&file["rows"]) {
            let metrics: &[(&str, &str, f64)] = match row["what"].as_str() {
                Some("latency" | "latency-under-load") => &[("p50_ns", "µs", 1e3), ("p99_ns", "µs", 1e3)],
                _ => &[("", "Gbit/s", 1e9)],
            };
            for (metric, unit, scale) in metrics {
                let value = |round: &Value| match *metric {
                    "" => Some(round["bytes"].as_f64()? * 8.0 / round["seconds"].as_f64()? / scale),
                    name => Some(round[name].as_f64()? / scale),
                };
                let rounds: Vec<f64> = list(&row["rounds"]).iter().filter_map(value).collect();
                let Some(summary) = lm_measure::statistics::Summary::of(&rounds) else {
                    continue;
                };
                let what = format!(
                    "{} {}, {} B",
                    text(&row["what"]),
                    metric.trim_end_matches("_ns"),
                    row["size"]
                );
                figures.push(Figure {
                    what: what.replace(" ,", ","),
                    who: title(&row["system"]),
                    unit: (*unit).to_owned(),
                    figure: summary.median,
                    rounds,
                    cores: list(&row["cores"]).iter().map(|one| apart(one, "near")).collect(),
                });
            }
        }
        let ratios = list(&file["ratios"]).iter().filter_map(|ratio| {
            let target = ratio["target"].as_object()?;
            let (kind, bound) = target.iter().next()?;
            let at_least = kind == "at_least";
            let words = [
                &ratio["what"],
                &ratio["size"],
                &ratio["metric"],
                &ratio["system"],
                &ratio["against"],
            ];
            let words = words.map(|word| word.as_str().map_or_else(|| word.to_string(), str::to_owned));
            let [what, size, metric, system, against] = &words;
            Some(Verdict {
                key: format!("compare/{}", words.join("/")),
                what: format!("{what}, {size} B, {metric}: {system} / {against}"),
                asked: format!("{} {bound}", if at_least { "≥" } else { "≤" }),
                bound: bound.as_f64()?,
                at_least,
                reached: format!(
                    "{} ({} to {})",
                    or_none(&ratio["median"]),
                    or_none(&ratio["low"]),
                    or_none(&ratio["high"])
                ),
                near: or_none(&ratio["near"]["median_low_high"][0]),
                verdict: match ratio["verdict"].as_str() {
                    Some("met") => "met",
                    Some("missed") => "**missed**",
                    _ => "unclear",
                },
            })
        });
        Ok(Measured {
            run: run.check()?,
            suite: text(&file["command"]),
            verdicts: ratios.collect(),
            figures,
        })
    }
}

/// A target in the code.
#[derive(Debug)]
struct Asked {
    key: String,
    what: String,
    bound: f64,
    at_least: bool,
}

fn asked_by_code() -> Vec<Asked> {
    let comparisons = all_comparisons().into_iter();
    let all = comparisons.flat_map(|(suite, words, all)| all.into_iter().map(move |one| (suite, words, one)));
    all.flat_map(|(suite, words, comparison)| {
        let first = comparison.contenders.first().map_or("", |one| one.name);
        let own = (comparison.key, comparison.title, &comparison.targets[..]);
        let columns = (comparison.columns.iter()).map(|column| (column.place, column.title, column.targets));
        let all = std::iter::once(own).chain(columns);
        let asked = all.flat_map(|(key, title, targets)| {
            targets.iter().map(move |target| {
                let of = target.of(first);
                Asked {
                    key: format!("{suite}/{key}/{of}"),
                    what: format!("`bench {words}`, {title}: {of}"),
                    bound: target.bound(),
                    at_least: target.is_at_least(),
                }
            })
        });
        asked.collect::<Vec<_>>()
    })
    .collect()
}

fn page(measured: &[Measured], code: Vec<Asked>, mut most: BTreeMap<String, f64>) -> Made {
    let mut page = String::from(HEAD);
    let of_files = measured
        .iter()
        .flat_map(|file| &file.verdicts)
        .map(|verdict| Asked {
            key: verdict.key.clone(),
            what: verdict.what.clone(),
            bound: verdict.bound,
            at_least: verdict.at_least,
        });
    let mut lowered = Vec::new();
    for asked in code
        .iter()
        .map(|one| (one, true))
        .chain(of_files.collect::<Vec<_>>().iter().map(|one| (one, false)))
    {
        let (asked, is_code) = asked;
        let before = most.entry(asked.key.clone()).or_insert(asked.bound);
        let is_lower = if asked.at_least {
            asked.bound < *before
        } else {
            asked.bound > *before
        };
        if !is_lower {
            *before = asked.bound;
        } else if is_code || !code.iter().any(|one| one.key == asked.key) {
            lowered.push(format!(
                "- {}: {} is asked, and {} was once.",
                asked.what, asked.bound, before
            ));
        }
    }
    page.push_str("\n## Asked\n");
    for file in measured.iter().filter(|file| !file.verdicts.is_empty()) {
        let _ = writeln!(page, "\n{}:\n", file.run.line());
        page.push_str("| what | asked | reached, all rounds | near cores | |\n|---|---|---|---|---|\n");
        for one in &file.verdicts {
            let _ = writeln!(
                page,
                "| {} | {} | {} | {} | {} |",
                one.what, one.asked, one.reached, one.near, one.verdict
            );
        }
    }
    page.push_str("\n## Lowered targets\n\n");
    lowered.dedup();
    page.push_str(&match lowered.is_empty() {
        true => "None asks for less than it once did.\n".to_owned(),
        false => format!("{}\n", lowered.join("\n")),
    });
    page.push_str("\n## Asked in the code, and not measured yet\n\n");
    let measured_keys: Vec<&str> = (measured.iter())
        .flat_map(|file| file.verdicts.iter().map(|one| &*one.key))
        .collect();
    let open: Vec<String> = (code.iter())
        .filter(|asked| !measured_keys.contains(&&*asked.key))
        .map(|asked| {
            format!(
                "- {} {} {}",
                asked.what,
                if asked.at_least { "≥" } else { "≤" },
                asked.bound
            )
        })
        .collect();
    page.push_str(&match open.is_empty() {
        true => "Nothing.\n".to_owned(),
        false => format!("{}\n", open.join("\n")),
    });
    for file in measured {
        let _ = writeln!(page, "\n## {}\n\n{}:\n", file.suite, file.run.line());
        page.push_str("| what | who | figure | all rounds | cores, ns |\n|---|---|---|---|---|\n");
        for figure in &file.figures {
            let rounds: Vec<String> = figure.rounds.iter().copied().map(number).collect();
            let _ = writeln!(
                page,
                "| {} | {} | {} {} | {} | {} |",
                figure.what,
                figure.who,
                number(figure.figure),
                figure.unit,
                rounds.join(" "),
                if figure.cores.is_empty() {
                    "–".to_owned()
                } else {
                    figure.cores.join(" ")
                }
            );
        }
    }
    let targets = format!("{:#}\n", json!(most));
    Made { page, targets }
}

const HEAD: &str = "\
# Figures

Made by `cargo xtask figures` from the result files in bench/figures, which `cargo xtask bench … --json` wrote; never edited by hand. To
measure anew: run the command above a table with `--json FILE` from a commit, then `cargo xtask figures FILE`, and commit both. What a veth pair can
and cannot show, and what each setting brings, is in [bench/RECIPE.md](../bench/RECIPE.md).

A figure is the median of its rounds, if its row does not say otherwise; all rounds stand beside it, in the order in which they were
measured, with the distance of the two cores before and after each (a cache line there and back; `*`: near, and they stayed). Ratios are taken
within a round, over all rounds, and beside that over those with near cores. A verdict is about all rounds.
";

#[cfg(test)]
#[path = "figures_tests.rs"]
mod tests;
