//! `cargo xtask models`: every formula of the models in `models/`, and every mistake that is put into them.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use lm_measure::table::Table;

use crate::fuzz::answers;
use crate::machine::cores;
use crate::verify::is_ci;
use crate::workspace::{root, target_dir};

/// What is asked of models: the model, the macros that it is built with, and formulas. `all`: those of the file; names
/// that begin with
/// `never_` or `always_` are of formulas that are to be violated. `!NAME`: with this mistake in the model that one is
/// violated. The longest first: two or more are answered at once.
const QUESTIONS: &str = "\
stream ENDS,LOSSES=1 safe released_is_shown aborted_is_settled settled_is_freed others_go_on
stream ZERO_COPY safe released_is_shown finished_is_delivered never_overlaps
stream - all
eudp - all
eudp CHUNKS=5,THRESHOLD=0 one_owner
eudp UNGUARDED !one_owner
stream RELEASE_BEYOND_WRITTEN !s1
stream RELAXED !s1
stream ABORT_IS_END,ENDS,LOSSES=0 !s1
stream WRITES_RELEASED !s2
stream TAIL_EARLY !s3
stream REPOSTED !s3
stream LEFTOVER_IGNORED !s3
stream OTHER_DIGEST,ZERO_COPY !s3
stream TAKEN_BACK !s4
stream DELIVERED_EARLY !s5
stream LEFTOVER_IGNORED,ENDS,LOSSES=0 !s6
stream READER_IGNORED !s6
stream STALLED_TURN !s7
stream STALLED_TURN,ENDS,LOSSES=0 !others_go_on
";

/// Builds the verifier of the model `$0` in this folder; `$1` is the compiler's level. Spin says what is wrong with a
/// model and ends as if nothing were. Weak fairness among more than six processes.
const BUILD: &str = "level=$1; shift; rm -f pan.c; spin -a \"$@\" \"$0\" >said; \
    [ -f pan.c ] || { head -n 1 said >&2; exit 1; }; cc $level -w -DNFAIR=3 -o pan pan.c";

/// A line of [`QUESTIONS`].
struct Question {
    model: &'static str,
    defines: Vec<&'static str>,
    formulas: Vec<&'static str>,
}

fn questions() -> Vec<Question> {
    let question = |line: &'static str| {
        let mut words = line.split(' ');
        let (model, defines) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        Question {
            model,
            defines: defines.split(',').filter(|define| *define != "-").collect(),
            formulas: words.collect(),
        }
    };
    QUESTIONS.lines().map(question).collect()
}

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
    let questions = questions();
    let next = Mutex::new(questions.iter().enumerate());
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
    let broken = question.formulas[0].strip_prefix('!');
    let mut build = Command::new("sh");
    build
        .args(["-euc", BUILD])
        .arg(&source)
        .arg(if broken.is_some() { "-O0" } else { "-O1" })
        .args(&defines);
    let built = build
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .context("cannot start sh")?;
    ensure!(
        built.status.success(),
        "cannot build {model}: {}",
        String::from_utf8_lossy(&built.stderr)
    );
    let names: Vec<&str> = match (broken, &*question.formulas) {
        (Some(name), _) => vec![name],
        (None, ["all"]) => formulas(&text).collect(),
        (None, names) => names.to_vec(),
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
        let said = verifier
            .stdin(Stdio::null())
            .output()
            .context("cannot start the verifier")?
            .stdout;
        let search = Search::parse(&String::from_utf8_lossy(&said))
            .with_context(|| format!("{formula} of {model}"))?;
        rows.push(Row {
            model: model.trim().to_owned(),
            formula: formula.to_owned(),
            to_be_violated: broken.is_some() || is_to_be_violated(formula),
            search,
            seconds: started.elapsed().as_secs_f64(),
        });
    }
    Ok(rows)
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
            let of_model = questions().into_iter().filter(|question| question.model == model);
            let of_model: Vec<Question> = of_model.collect();
            let questions = || of_model.iter();
            for name in text.lines().filter_map(|line| line.strip_prefix("#ifdef ")) {
                assert!(
                    questions().any(|question| question.defines.contains(&name)),
                    "{model} {name}"
                );
            }
            for question in questions() {
                for define in &question.defines {
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
