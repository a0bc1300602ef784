//! `cargo xtask models`: every formula of the models in `models/`, and every mistake that is put into them.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use lm_measure::table::Table;

use crate::fuzz::answers;
use crate::machine::cores;
use crate::verify::is_ci;
use crate::workspace::{root, target_dir};

/// What is asked of a model that is built with these macros.
struct Question {
    model: &'static str,
    defines: &'static [&'static str],
    formulas: Formulas,
}

#[derive(Clone, Copy)]
enum Formulas {
    /// All of the file's. Names that begin with `never_` or `always_` are of formulas that are to be violated.
    All,
    These(&'static [&'static str]),
    /// With a mistake in the model, this one is violated.
    Broken(&'static str),
}

use Formulas::{All, Broken, These};

const fn ask(model: &'static str, defines: &'static [&'static str], formulas: Formulas) -> Question {
    Question {
        model,
        defines,
        formulas,
    }
}

/// The longest first: two or more are answered at once.
const QUESTIONS: &[Question] = &[
    ask(
        "stream",
        &["ENDS", "LOSSES=1"],
        These(&[
            "safe",
            "released_is_shown",
            "aborted_is_settled",
            "settled_is_freed",
            "others_go_on",
        ]),
    ),
    ask(
        "stream",
        &["ZERO_COPY"],
        These(&[
            "safe",
            "released_is_shown",
            "finished_is_delivered",
            "never_overlaps",
        ]),
    ),
    ask("stream", &[], All),
    ask("eudp", &[], All),
    ask("eudp", &["CHUNKS=5", "THRESHOLD=0"], These(&["one_owner"])),
    ask("eudp", &["UNGUARDED"], Broken("one_owner")),
    ask("stream", &["RELEASE_BEYOND_WRITTEN"], Broken("s1")),
    ask("stream", &["RELAXED"], Broken("s1")),
    ask("stream", &["ABORT_IS_END", "ENDS", "LOSSES=0"], Broken("s1")),
    ask("stream", &["WRITES_RELEASED"], Broken("s2")),
    ask("stream", &["TAIL_EARLY"], Broken("s3")),
    ask("stream", &["REPOSTED"], Broken("s3")),
    ask("stream", &["LEFTOVER_IGNORED"], Broken("s3")),
    ask("stream", &["OTHER_DIGEST", "ZERO_COPY"], Broken("s3")),
    ask("stream", &["TAKEN_BACK"], Broken("s4")),
    ask("stream", &["DELIVERED_EARLY"], Broken("s5")),
    ask("stream", &["LEFTOVER_IGNORED", "ENDS", "LOSSES=0"], Broken("s6")),
    ask("stream", &["READER_IGNORED"], Broken("s6")),
    ask("stream", &["STALLED_TURN"], Broken("s7")),
    ask(
        "stream",
        &["STALLED_TURN", "ENDS", "LOSSES=0"],
        Broken("others_go_on"),
    ),
];

/// What Spin found out about a formula.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Search {
    is_violated: bool,
    states: u64,
    depth: u64,
}

impl Search {
    /// From what the verifier says.
    fn parse(text: &str) -> Result<Search> {
        for cut in [
            "max search depth too small",
            "out of memory",
            "too many processes",
        ] {
            ensure!(!text.contains(cut), "the search was cut short: {cut}");
        }
        let line = |part: &str| {
            let found = text.lines().find(|line| line.contains(part));
            found.with_context(|| format!("the verifier said nothing of \"{}\"", part.trim()))
        };
        let number = |words: &str| words.trim().split(' ').next().unwrap_or_default().parse::<u64>();
        let (head, errors) = line(", errors: ")?.split_once(", errors: ").unwrap_or_default();
        let is_violated = number(errors).context("no number of errors")? > 0;
        ensure!(
            is_violated || !text.contains("Search not completed"),
            "the search was cut short"
        );
        Ok(Search {
            is_violated,
            states: number(line(" states, stored")?).context("no number of states")?,
            depth: head
                .rsplit(' ')
                .next()
                .unwrap_or_default()
                .parse()
                .context("no depth")?,
        })
    }
}

/// Runs the command.
pub fn run() -> Result<()> {
    for (program, package) in [("spin", "spin"), ("cc", "gcc")] {
        if !answers(program, &[if program == "spin" { "-V" } else { "--version" }]) {
            let reason = format!("no `{program}`: `apt-get install {package}`");
            ensure!(
                !is_ci(),
                "the models were skipped, which CI=true does not allow: {reason}"
            );
            println!("SKIPPED: the models in models/: {reason}");
            return Ok(());
        }
    }
    let folder = target_dir()?.join("models");
    let next = Mutex::new(QUESTIONS.iter().enumerate());
    let answered = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..cores() {
            scope.spawn(|| {
                while let Some((number, question)) = { next.lock().expect("no thread panics").next() } {
                    let rows = answer(question, &folder.join(number.to_string()));
                    answered.lock().expect("no thread panics").push((number, rows));
                }
            });
        }
    });
    let mut answered = answered.into_inner().expect("no thread panics");
    answered.sort_by_key(|(number, _)| *number);
    let mut table = Table::new(&["model", "formula", "", "states", "deep", "seconds"]);
    let mut wrong = Vec::new();
    for (_, rows) in answered {
        for row in rows? {
            table.row(row.cells());
            if !row.is_right() {
                wrong.push(format!("{} of {}", row.formula, row.model));
            }
        }
    }
    println!("{table}");
    if !wrong.is_empty() {
        bail!(
            "otherwise than it is to be: {}; the trail is in {}",
            wrong.join(", "),
            folder.display()
        );
    }
    Ok(())
}

/// What became of a formula.
struct Row {
    model: String,
    formula: String,
    to_be_violated: bool,
    search: Search,
    seconds: f64,
}

impl Row {
    fn is_right(&self) -> bool {
        self.search.is_violated == self.to_be_violated
    }

    fn cells(&self) -> [String; 6] {
        let found = if self.search.is_violated {
            "violated"
        } else {
            "holds"
        };
        [
            self.model.clone(),
            self.formula.clone(),
            match self.is_right() {
                true => found.to_owned(),
                false => format!("{found}: WRONG"),
            },
            self.search.states.to_string(),
            self.search.depth.to_string(),
            format!("{:.1}", self.seconds),
        ]
    }
}

/// Builds the verifier and searches for each formula.
fn answer(question: &Question, folder: &Path) -> Result<Vec<Row>> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let source = root().join("models").join(question.model).with_extension("pml");
    let text =
        std::fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let defines: Vec<String> = question
        .defines
        .iter()
        .map(|define| format!("-D{define}"))
        .collect();
    let model = format!("{} {}", question.model, defines.join(" "));
    build(&source, &defines, matches!(question.formulas, Broken(_)), folder)
        .with_context(|| format!("cannot build {model}"))?;
    let names: Vec<&str> = match question.formulas {
        All => formulas(&text).collect(),
        These(names) => names.to_vec(),
        Broken(name) => vec![name],
    };
    let mut rows = Vec::new();
    for formula in names {
        ensure!(
            formulas(&text).any(|name| name == formula),
            "{model} has no formula {formula}"
        );
        let started = Instant::now();
        let mut verifier = Command::new(folder.join("pan"));
        verifier
            .current_dir(folder)
            .args(["-a", "-f", "-n", "-m20000", "-w20", "-N", formula]);
        let search = Search::parse(&said(&mut verifier)?).with_context(|| format!("{formula} of {model}"))?;
        rows.push(Row {
            model: model.trim().to_owned(),
            formula: formula.to_owned(),
            to_be_violated: matches!(question.formulas, Broken(_)) || is_to_be_violated(formula),
            search,
            seconds: started.elapsed().as_secs_f64(),
        });
    }
    Ok(rows)
}

fn build(source: &Path, defines: &[String], is_short: bool, folder: &Path) -> Result<()> {
    let pan: PathBuf = folder.join("pan.c");
    // Spin says what is wrong with a model and ends as if nothing were.
    let _ = std::fs::remove_file(&pan);
    let mut spin = Command::new("spin");
    let text = said(spin.current_dir(folder).arg("-a").args(defines).arg(source))?;
    ensure!(
        pan.is_file(),
        "{}",
        text.lines().next().unwrap_or("spin wrote nothing")
    );
    // Weak fairness among more than six processes.
    let arguments = [
        if is_short { "-O0" } else { "-O1" },
        "-w",
        "-DNFAIR=3",
        "-o",
        "pan",
        "pan.c",
    ];
    let mut cc = Command::new("cc");
    let output = output(cc.current_dir(folder).args(arguments))?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn output(command: &mut Command) -> Result<Output> {
    let output = command.stdin(Stdio::null()).output();
    output.with_context(|| format!("cannot start {}", command.get_program().display()))
}

fn said(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&output(command)?.stdout).into_owned())
}

/// The names of a model's formulas.
fn formulas(text: &str) -> impl Iterator<Item = &str> {
    let named = text.lines().filter_map(|line| line.strip_prefix("ltl "));
    named.filter_map(|rest| rest.split_whitespace().next())
}

fn is_to_be_violated(formula: &str) -> bool {
    formula.starts_with("never_") || formula.starts_with("always_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDS: &str =
        "State-vector 148 byte, depth reached 120, errors: 0\n    26056 states, stored (114928 visited)\n";

    #[test]
    fn what_a_verifier_says() {
        let whole = Search {
            is_violated: false,
            states: 26056,
            depth: 120,
        };
        assert_eq!(Search::parse(HOLDS).unwrap(), whole);
        let violated = format!(
            "Warning: Search not completed\n{}",
            HOLDS.replace("errors: 0", "errors: 1")
        );
        assert!(Search::parse(&violated).unwrap().is_violated);
    }

    #[test]
    fn a_search_that_was_cut_short_shows_nothing() {
        for line in [
            "error: max search depth too small",
            "pan: out of memory",
            "Warning: Search not completed",
            "pan: error: too many processes -- current max is 6 procs (-DNFAIR=2)",
        ] {
            let error = Search::parse(&format!("{line}\n{HOLDS}"))
                .unwrap_err()
                .to_string();
            assert!(error.contains("cut short"), "{error}");
        }
        assert!(Search::parse("").is_err());
    }

    #[test]
    fn names_of_formulas() {
        let text = "#define p x\nltl never_1 { [] !p }\n/* ltl no */\nltl s1 { [] p }\n";
        assert_eq!(formulas(text).collect::<Vec<_>>(), ["never_1", "s1"]);
        assert!(is_to_be_violated("never_1") && is_to_be_violated("always_1") && !is_to_be_violated("s1"));
    }

    /// Each mistake that a model has is asked for, each question is of a formula that is there.
    #[test]
    fn every_mistake_of_a_model_is_asked_for() {
        for model in ["eudp", "stream"] {
            let text =
                std::fs::read_to_string(root().join("models").join(model).with_extension("pml")).unwrap();
            let questions = || QUESTIONS.iter().filter(|question| question.model == model);
            for name in text.lines().filter_map(|line| line.strip_prefix("#ifdef ")) {
                assert!(
                    questions().any(|question| question.defines.contains(&name)),
                    "{model} {name}"
                );
            }
            for question in questions() {
                for define in question.defines {
                    let name = define.split('=').next().unwrap();
                    let guards = [format!("#ifdef {name}\n"), format!("#ifndef {name}\n")];
                    assert!(
                        guards.iter().any(|guard| text.contains(guard)),
                        "{model} has no {name}"
                    );
                }
            }
        }
    }
}
