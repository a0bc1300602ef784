//! The workspace's test programs: built once, run two at a time, and compared by name with the committed list of tests.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::tally::{Tally, without_line};
use crate::workspace::{cargo, command_line, ensure_dpdk, root, run, said_aloud_by};

/// What runs at a time: where one waits for leases and links, another counts. More would take the cores from each
/// other.
const AT_ONCE: usize = 2;
/// What takes longest, so that it begins first: a minute and half a minute of what waits, and half a minute of what
/// counts.
const FIRST: [&str; 3] = [
    "admission/tests/attacks/main.rs",
    "bench/tests/tools/main.rs",
    "dataplane/src/lib.rs",
];
/// Every test there is, so that none vanishes unseen: source and name, one a line.
const NAMES: &str = "xtask/test-names.txt";

/// A test program, or all documentation tests.
struct Program {
    /// Its source, from the workspace's root; the names of documentation tests say theirs.
    source: String,
    /// Where its tests run: the package's folder.
    folder: PathBuf,
    /// The program; nothing for documentation tests.
    path: Option<PathBuf>,
}

impl Program {
    /// What stands before the names of its tests.
    fn prefix(&self) -> String {
        (self.path.iter()).map(|_| format!("{} ", self.source)).collect()
    }

    /// Where cargo would run it, with what it would say.
    fn command(&self, selection: &Selection, filters: &[String], for_tests: &[&str]) -> Command {
        let Some(path) = &self.path else {
            let mut command = selection.command(&["test", "--doc"]);
            command.args(filters).arg("--").args(for_tests);
            return command;
        };
        let mut command = Command::new(path);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .args(filters)
            .args(for_tests)
            .stdin(Stdio::null());
        command
    }

    /// Runs it, with whatever it prints in one piece; what passing tests printed is left out.
    fn run(&self, selection: &Selection, filters: &[String], for_tests: &[&str]) -> Result<Tally> {
        let (mut reader, writer) = std::io::pipe().context("cannot make a pipe")?;
        let started = Instant::now();
        // A name of a source stands for all of its tests.
        let is_named = filters.iter().any(|filter| self.source.contains(filter.as_str()));
        let filters = if is_named { &[] } else { filters };
        let mut command = self.command(selection, filters, for_tests);
        let child = command.stdout(writer.try_clone()?).stderr(writer).spawn();
        let mut child = child.with_context(|| format!("cannot start `{}`", command_line(&command)))?;
        // Its ends of the pipe.
        drop(command);
        let mut said = Vec::new();
        reader
            .read_to_end(&mut said)
            .context("cannot read what the tests say")?;
        let said = String::from_utf8_lossy(&said);
        let mut tally = Tally::default();
        let shown: Vec<&str> = said.lines().filter(|line| tally.line(line)).collect();
        let status = child.wait().context("cannot wait for the tests")?;
        if !status.success() && tally.failed == 0 {
            tally.failed = 1;
            tally
                .failures
                .push(format!("{} ended with {status}", self.source));
        }
        let (source, seconds) = (&self.source, started.elapsed().as_secs_f64());
        println!("── {source}: {seconds:.1} s\n{}\n", shown.join("\n"));
        Ok(tally)
    }

    /// The names of its tests, as [`NAMES`] has them.
    fn list(&self) -> Result<Vec<String>> {
        let mut command = self.command(&Selection::default(), &[], &["--list"]);
        let said = said_aloud_by(&mut command)?;
        let names = said.lines().filter_map(|line| line.strip_suffix(": test"));
        let name = |name| format!("{}{}", self.prefix(), without_line(name));
        Ok(names.map(name).collect())
    }
}

/// Which tests: of these packages, without any of the whole workspace.
#[derive(Debug, Default)]
pub(crate) struct Selection(pub(crate) Vec<String>);

impl Selection {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = cargo();
        command
            .args(words)
            .args(self.0.is_empty().then_some("--workspace"));
        command.args(self.0.iter().flat_map(|name| ["--package", name]));
        if ensure_dpdk().is_ok() {
            let with_dpdk = [("lm-bench", "dpdk"), ("lm-dpdk", "faults")].into_iter();
            let chosen =
                with_dpdk.filter(|(name, _)| self.0.is_empty() || self.0.iter().any(|one| one == name));
            command.args(chosen.map(|(name, feature)| format!("--features={name}/{feature}")));
        }
        command
    }

    /// Runs its tests, or those whose names have one of `filters` in them.
    pub(crate) fn run(&self, filters: &[String], for_tests: &[String]) -> Result<Tally> {
        if !self.0.is_empty() {
            // Tests start programs of other packages. With all tests cargo builds all of them.
            run(&mut Selection::default().command(&["build", "--bins"]))?;
        }
        let programs = self.build()?;
        let mut arguments = vec!["--show-output"];
        arguments.extend(for_tests.iter().map(String::as_str));
        let waiting = Mutex::new(programs.iter());
        let sum = Mutex::new(Tally::default());
        let work = || -> Result<()> {
            while let Some(program) = { waiting.lock().expect("no worker panics").next() } {
                let tally = program.run(self, filters, &arguments)?;
                sum.lock()
                    .expect("no worker panics")
                    .add(tally, &program.prefix());
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers = [(); AT_ONCE].map(|()| scope.spawn(work));
            let mut results = workers
                .map(|worker| worker.join().expect("a worker does not panic"))
                .into_iter();
            results.try_for_each(|result| result)
        })?;
        Ok(sum.into_inner().expect("no worker panics"))
    }

    /// Builds its test programs; the longest come first.
    fn build(&self) -> Result<Vec<Program>> {
        let mut command = self.command(&["test", "--no-run"]);
        command.arg("--message-format=json-render-diagnostics");
        let mut programs = programs_in(&said_aloud_by(&mut command)?, root());
        ensure!(
            !programs.is_empty(),
            "`{}` named no test program",
            command_line(&command)
        );
        programs.push(Program {
            source: "documentation tests".to_owned(),
            folder: root().to_owned(),
            path: None,
        });
        let rank = |program: &Program| FIRST.iter().position(|source| *source == program.source);
        programs.sort_by_key(|program| rank(program).unwrap_or(FIRST.len()));
        Ok(programs)
    }
}

/// The test programs among what cargo says that it built.
fn programs_in(messages: &str, root: &Path) -> Vec<Program> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let of_tests = messages.filter(|message| message["profile"]["test"] == true);
    of_tests
        .filter_map(|message| {
            let source = Path::new(message["target"]["src_path"].as_str()?);
            Some(Program {
                source: source.strip_prefix(root).unwrap_or(source).to_str()?.to_owned(),
                folder: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
                path: Some(PathBuf::from(message["executable"].as_str()?)),
            })
        })
        .collect()
}

/// Compares the tests that ran with the committed list.
///
/// # Errors
/// Which tests ran that are not on it, or the other way round.
pub(crate) fn compare(ran: &BTreeSet<String>) -> Result<()> {
    let text = std::fs::read_to_string(root().join(NAMES));
    let text =
        text.with_context(|| format!("cannot read {NAMES}; `cargo xtask test --update-names` makes it"))?;
    let has_dpdk = ensure_dpdk().is_ok();
    let is_built = |line: &&str| has_dpdk || !line.contains("dpdk");
    let committed: Vec<_> = text.lines().filter(is_built).collect();
    let differences = differences(&committed.join("\n"), ran);
    ensure!(
        differences.is_empty(),
        "{NAMES} has other tests than ran (-: vanished, +: new); where that is meant, commit what \
         `cargo xtask test --update-names` makes of it\n{}",
        differences.join("\n")
    );
    Ok(())
}

/// Lines that vanished, and new ones.
pub(crate) fn differences(committed: &str, ran: &BTreeSet<String>) -> Vec<String> {
    let committed: BTreeSet<String> = committed.lines().map(str::to_owned).collect();
    let gone = committed.difference(ran).map(|name| format!("- {name}"));
    let new = ran.difference(&committed).map(|name| format!("+ {name}"));
    gone.chain(new).collect()
}

/// Writes the list anew; runs nothing.
pub(crate) fn update() -> Result<()> {
    let mut names = BTreeSet::new();
    for program in Selection::default().build()? {
        names.extend(program.list()?);
    }
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    std::fs::write(root().join(NAMES), text).with_context(|| format!("cannot write {NAMES}"))?;
    println!("{} tests are in {NAMES}", names.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_among_what_cargo_built() {
        let messages = r#"
{"reason":"compiler-artifact","target":{"src_path":"/w/a/src/lib.rs"},"profile":{"test":false},"executable":null}
not JSON
{"manifest_path":"/w/a/x","target":{"src_path":"/w/a/tests/b/main.rs"},"profile":{"test":true},"executable":"/t/b-1"}
{"reason":"build-finished","success":true}"#;
        let programs = programs_in(messages, Path::new("/w"));
        assert_eq!(programs.len(), 1);
        assert_eq!(programs[0].prefix(), "a/tests/b/main.rs ");
        assert_eq!(programs[0].folder, Path::new("/w/a"));
        assert_eq!(programs[0].path.as_deref(), Some(Path::new("/t/b-1")));
    }

    #[test]
    fn tests_that_vanish_and_new_ones_are_named() {
        let ran = ["a one", "a two"].map(str::to_owned).into();
        assert_eq!(differences("a one\na two\n", &ran), Vec::<String>::new());
        assert_eq!(differences("a one\nb three\n", &ran), ["- b three", "+ a two"]);
    }
}
