//! `cargo xtask models`: every formula of the models in `models/`, and every mistake that is put into them.

use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};

use crate::fuzz::{answers, lacking};
use crate::machine::cores;
use crate::workspace::{root, target_dir};

/// What is asked of models: the model, the macros that it is built with, and formulas. `all`: those of the file; names
/// that begin with `never_` or `always_` are of formulas that are to be violated. `!NAME`: with this mistake in the
/// model that one is violated. The longest first: two or more are answered at once.
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

/// Answers one: `$0` is the model, `$1` its macros, and the others are formulas. Spin says what is wrong with a model
/// and ends as if nothing were. Weak fairness among more than six processes. A model with a mistake is built for one
/// search, and not optimised. Of each search there is a line: the formula, whether it is violated, the depth and the
/// states; one that was cut short is an error.
const ANSWER: &str = r#"
defines=$1; shift; [ "$defines" != - ] || defines=
defines=$(echo "$defines" | sed 's/[^,][^,]*/-D&/g; s/,/ /g')
case $1 in
    all) set -- $(sed -n 's/^ltl \([^ ]*\).*/\1/p' "$0"); level=-O1 ;;
    !*) set -- "${1#!}"; level=-O0 ;;
    *) level=-O1 ;;
esac
rm -f pan.c; spin -a $defines "$0" >said
[ -f pan.c ] || { head -n 1 said >&2; exit 1; }
cc $level -w -DNFAIR=3 -o pan pan.c
for formula; do
    grep -q "^ltl $formula " "$0" || { echo "it has no formula $formula" >&2; exit 1; }
    ./pan -a -f -n -m20000 -w20 -N "$formula" >said 2>&1 || true
    found=violated; grep -q ' errors: 0$' said && found=holds
    cut='max search depth too small|out of memory|too many processes'
    [ $found = violated ] || cut="$cut|Search not completed"
    if ! grep -q ' errors: ' said || grep -qE "$cut" said; then
        echo "$formula: the search was cut short: $(grep -E "$cut" said | head -n 1)" >&2; exit 1
    fi
    depth='s/.*\(, depth reached [0-9]*\), errors.*/\1/p'
    states='s/^ *\([0-9.e+]* states\), stored.*/, \1/p'
    echo "$formula $found$(sed -n "$depth; $states" said | tr -d '\n')"
done
"#;

/// A line of [`QUESTIONS`].
#[derive(Clone, Copy)]
struct Question {
    model: &'static str,
    defines: &'static str,
    formulas: &'static str,
}

fn questions() -> impl Iterator<Item = Question> {
    QUESTIONS.lines().filter_map(|line| {
        let (model, rest) = line.split_once(' ')?;
        let (defines, formulas) = rest.split_once(' ')?;
        Some(Question {
            model,
            defines,
            formulas,
        })
    })
}

/// Runs the command.
pub fn run() -> Result<()> {
    for (program, version, package) in [("spin", "-V", "spin"), ("cc", "--version", "gcc")] {
        if !answers(program, &[version]) {
            let remedy = format!("the models in models/: no `{program}`: `apt-get install {package}`");
            return lacking(&remedy);
        }
    }
    let next = Mutex::new(questions().enumerate());
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..cores() {
            scope.spawn(|| {
                while let Some((number, question)) = { next.lock().expect("no thread panics").next() } {
                    if let Err(error) = question.answer(number) {
                        wrong.lock().expect("no thread panics").push(format!("{error:#}"));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no thread panics");
    ensure!(
        wrong.is_empty(),
        "otherwise than it is to be: {}",
        wrong.join("; ")
    );
    Ok(())
}

impl Question {
    /// Builds the verifier, searches for each formula, and says what was found.
    fn answer(&self, number: usize) -> Result<()> {
        let Question {
            model,
            defines,
            formulas,
        } = self;
        let folder = target_dir()?.join("models").join(number.to_string());
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut command = Command::new("sh");
        command
            .args(["-euc", ANSWER])
            .arg(root().join("models").join(model).with_extension("pml"))
            .arg(defines)
            .args(formulas.split(' '))
            .current_dir(&folder)
            .stdin(Stdio::null());
        let output = command.output().context("cannot start sh")?;
        let (said, why) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        for line in said.lines() {
            println!("{model} {defines}: {line}");
        }
        ensure!(output.status.success(), "{model} {defines}: {}", why.trim());
        let is_wrong = |line: &&str| line.contains(" violated") != is_to_be_violated(formulas, line);
        let wrong: Vec<&str> = said.lines().filter(is_wrong).collect();
        ensure!(
            wrong.is_empty(),
            "{model} {defines}: {}; the trail is in {}",
            wrong.join(", "),
            folder.display()
        );
        Ok(())
    }
}

/// Whether the formula that a line begins with is to be violated where this one is asked for.
fn is_to_be_violated(asked: &str, line: &str) -> bool {
    asked.starts_with('!') || line.starts_with("never_") || line.starts_with("always_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bed::leftovers::temporary_folder;

    const HOLDS: &str =
        "State-vector 148 byte, depth reached 120, errors: 0\n    26056 states, stored (114928 visited)";

    /// What is made of a verifier that says this, of a model with two formulas.
    fn answer(said: &str, formula: &str) -> std::result::Result<String, String> {
        let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "models").unwrap();
        std::fs::write(
            folder.join("model"),
            "#define p x\nltl never_1 { [] !p }\n/* ltl no */\nltl s1 { [] p }\n",
        )
        .unwrap();
        std::fs::write(folder.join("answer"), said).unwrap();
        let tools = "spin() { : >pan.c; }; cc() { printf 'cat answer' >pan; chmod +x pan; }; ";
        let script = tools.to_owned() + ANSWER;
        let words = ["-euc", &script, "model", "-", formula];
        let output = Command::new("sh")
            .args(words)
            .current_dir(&folder)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        match output.status.success() {
            true => Ok(text(output.stdout)),
            false => Err(text(output.stderr)),
        }
    }

    #[test]
    fn what_a_verifier_says() {
        let found = ", depth reached 120, 26056 states";
        let each = format!("never_1 holds{found}\ns1 holds{found}\n");
        assert_eq!(answer(HOLDS, "all").unwrap(), each);
        let violated = format!(
            "Warning: Search not completed\n{}",
            HOLDS.replace("errors: 0", "errors: 1")
        );
        assert_eq!(answer(&violated, "!s1").unwrap(), format!("s1 violated{found}\n"));
        assert!(answer(HOLDS, "no").unwrap_err().contains("no formula no"));
        assert!(
            is_to_be_violated("all", "never_1 ")
                && !is_to_be_violated("all", "s1 ")
                && is_to_be_violated("!s1", "s1 ")
        );
    }

    #[test]
    fn a_search_that_was_cut_short_shows_nothing() {
        for line in [
            "error: max search depth too small",
            "pan: out of memory",
            "Warning: Search not completed",
            "pan: error: too many processes -- current max is 6 procs (-DNFAIR=2)",
        ] {
            let error = answer(&format!("{line}\n{HOLDS}"), "s1").unwrap_err();
            assert!(error.contains("cut short"), "{error}");
        }
        assert!(answer("", "s1").is_err());
    }

    /// Each mistake that a model has is asked for, each question is of a formula that is there.
    #[test]
    fn every_mistake_of_a_model_is_asked_for() {
        for model in ["eudp", "stream"] {
            let text =
                std::fs::read_to_string(root().join("models").join(model).with_extension("pml")).unwrap();
            let of_model = questions().filter(|question| question.model == model);
            let of_model: Vec<Question> = of_model.collect();
            let questions = || of_model.iter();
            for name in text.lines().filter_map(|line| line.strip_prefix("#ifdef ")) {
                assert!(
                    questions().any(|question| question.defines.split(',').any(|define| define == name)),
                    "{model} {name}"
                );
            }
            for question in questions() {
                for define in question.defines.split(',').filter(|define| *define != "-") {
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
