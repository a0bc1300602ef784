//! `cargo xtask mutants`: whether the simulated tests notice that something in the data path is wrong.
//!
//! All mutants are compiled into one test program, in a worktree below the target folder, and an environment variable switches one of
//! them on: a build for each would take a day.

mod sites;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::soak::world::executable;
use crate::workspace::{root, target_dir};
use sites::{Site, rewritten, sites};

/// Change the data path in a few hundred places, one at a time, and see which changes the simulated tests notice.
///
/// A comparison, an operator, a number, a guard or a returned value is another one, or a call is left out; the places are chosen by the
/// seed, as many in `landing` as in `outbound` with `sending`, in the commit that is checked out. Says how many were noticed in each
/// file, and names the others. Takes hours; a run that was broken off goes on where it was.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Decides which places.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many in each of the two parts.
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u16).range(1..))]
    count: u16,
}

const PARTS: [&str; 2] = ["landing.rs landing", "outbound.rs outbound sending.rs sending"];
/// Go to the head and to the end of lib.rs.
const ALLOW: &str = "#![allow(warnings, arithmetic_overflow, unconditional_panic)]\n";
const SWITCH: &str = "
pub(crate) fn mutated(number: usize) -> bool {
    use std::sync::{LazyLock, atomic::{AtomicBool, Ordering::Relaxed}};
    static ON: LazyLock<usize> = LazyLock::new(|| std::env::var(\"LM_MUTANT\").map_or(0, |on| on.parse().unwrap()));
    static REACHED: [AtomicBool; 1 << 17] = [const { AtomicBool::new(false) }; 1 << 17];
    if *ON == 0 && !REACHED[number].load(Relaxed) && !REACHED[number].swap(true, Relaxed) {
        use std::io::Write as _;
        writeln!(std::io::stderr(), \"\\nreached {number}\").unwrap();
    }
    *ON == number
}
";
/// Optimised, with everything checked that the tests' own profile checks.
const BUILD: &str = "CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true \
    CARGO_PROFILE_RELEASE_DEBUG=false cargo test --release --lib --no-run --message-format json \
    --target-dir ../../../target || true";
/// How many tests run before the others: those that noticed most, and the shortest ones, which take a tenth of the time.
const FIRST: usize = 150;
/// CPU time of them, and of the others, in seconds: some six times what they take. Nothing in the simulated world sleeps.
const LIMITS_S: [u32; 2] = [60, 400];
/// Memory of a test program, in KiB: a mutant may take without end.
const MEMORY_KIB: u32 = 6 << 20;

const UNVIABLE: &str = "does not compile";
const SURVIVED: &str = "survived";
const TIMED_OUT: &str = "timed out";
const UNREACHED: &str = "not reached";

/// Runs `cargo xtask mutants`.
pub fn run(arguments: &Arguments) -> Result<()> {
    let commit = shell(root(), "git rev-parse HEAD")?.trim().to_owned();
    let folder = target_dir()?.join("mutants").join(&commit[..12]);
    let tree = folder.join("tree");
    if !tree.join(".git").exists() {
        // By force: git still knows a worktree whose folder `cargo clean` took.
        let add = "git worktree add --quiet --force --force --detach";
        shell(root(), &format!("{add} '{}' {commit}", tree.display()))?;
    }
    let mut mutants = Mutants::find(tree.join("dataplane/src"), folder.join("known"), arguments)?;
    println!("{commit}; {} keeps what is known", mutants.file.display());
    let program = mutants.build()?;
    let list = format!("'{}' --list --format terse sim_tests::", program.display());
    let list = shell(&tree, &list)?;
    // Those of `copies` run valgrind, which wants line numbers.
    let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
    let mut tests = Vec::new();
    for name in names.filter(|name| !name.contains("::copies::")) {
        let (started, mut reached) = (Instant::now(), BTreeSet::new());
        let unmutated = outcome(&program, 0, &[name], &mut reached)?;
        ensure!(
            unmutated == SURVIVED,
            "{name} without any mutant: {unmutated}; let `cargo test -p lm-dataplane` pass first"
        );
        tests.push((name, started.elapsed(), reached));
    }
    let chosen = mutants.chosen();
    for (number, site) in (1..).zip(&chosen) {
        if mutants.outcome(site).is_empty() {
            let kills = |name: &str| mutants.outcomes.values().filter(|by| *by == name).count();
            tests.sort_by_cached_key(|(name, time, _)| (Reverse(kills(name)), *time));
            let reaching = tests.iter().filter(|(_, _, reached)| reached.contains(&number));
            let reaching: Vec<_> = reaching.map(|(name, ..)| *name).collect();
            let outcome = outcome(&program, number, &reaching, &mut BTreeSet::new())?;
            println!("{number} of {}: {}: {outcome}", chosen.len(), site.name);
            mutants.learn(site, &outcome)?;
        }
    }
    mutants.report();
    Ok(())
}

struct Mutants {
    /// The folder of sources.
    source: PathBuf,
    /// All sites of both parts, in the order in which they are taken.
    parts: Vec<Vec<Site>>,
    count: usize,
    /// What became of mutants, by name, and the file with it, a line each.
    outcomes: BTreeMap<String, String>,
    file: PathBuf,
}

impl Mutants {
    fn find(source: PathBuf, file: PathBuf, arguments: &Arguments) -> Result<Mutants> {
        let mut parts = Vec::new();
        for names in PARTS {
            let mut part = Vec::new();
            for file in shell(&source, &format!("git ls-tree -r --name-only HEAD {names}"))?.lines() {
                part.extend(sites(file, &committed(&source, file)?)?);
            }
            part.sort_by_cached_key(|site| Sha256::digest(format!("{} {}", arguments.seed, site.name)));
            parts.push(part);
        }
        let known = fs::read_to_string(&file).unwrap_or_default();
        // The last line may have been broken off.
        let known = known
            .split_inclusive('\n')
            .filter_map(|line| line.strip_suffix('\n'));
        let pair = |line: &str| {
            line.split_once('\t')
                .map(|(name, outcome)| (name.to_owned(), outcome.to_owned()))
        };
        Ok(Mutants {
            source,
            parts,
            count: arguments.count.into(),
            outcomes: known.filter_map(pair).collect(),
            file,
        })
    }

    fn outcome(&self, site: &Site) -> &str {
        self.outcomes.get(&site.name).map_or("", |outcome| outcome)
    }

    fn learn(&mut self, site: &Site, outcome: &str) -> Result<()> {
        let file = File::options().create(true).append(true).open(&self.file);
        let written = file.and_then(|mut file| writeln!(file, "{}\t{outcome}", site.name));
        written.with_context(|| format!("cannot write {}", self.file.display()))?;
        self.outcomes.insert(site.name.clone(), outcome.to_owned());
        Ok(())
    }

    /// The chosen ones of both parts in turn, without those that do not compile.
    fn chosen(&self) -> Vec<Site> {
        let viable = self.parts.iter().flat_map(|part| {
            let viable = part.iter().filter(|site| self.outcome(site) != UNVIABLE);
            viable.take(self.count).enumerate()
        });
        let mut chosen: Vec<_> = viable.collect();
        chosen.sort_by_key(|(turn, _)| *turn);
        chosen.into_iter().map(|(_, site)| site.clone()).collect()
    }

    /// Builds the test program with all chosen ones in it. Which do not compile is known by where the compiler finds errors.
    fn build(&mut self) -> Result<PathBuf> {
        loop {
            let chosen = self.chosen();
            let files = self.parts.iter().flatten().map(|site| &*site.file);
            for file in files.chain(["lib.rs"]).collect::<BTreeSet<_>>() {
                let here = (1..).zip(&chosen).filter(|(_, site)| site.file == file);
                let mut text = rewritten(&committed(&self.source, file)?, &here.collect::<Vec<_>>());
                if file == "lib.rs" {
                    text = [ALLOW, &text, SWITCH].concat();
                }
                let path = self.source.join(file);
                // So that nothing is built anew that is as it was.
                if fs::read_to_string(&path).is_ok_and(|old| old != text) {
                    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
                }
            }
            let messages = shell(&self.source, BUILD)?;
            if let Some(program) = executable(&messages, "lm_dataplane") {
                return Ok(program);
            }
            let unviable = messages.lines().filter_map(|line| self.culprit(line));
            let unviable: BTreeSet<usize> = unviable.collect();
            ensure!(
                !unviable.is_empty(),
                "it does not build, and no mutant is why: {messages}"
            );
            eprintln!("{} do not compile; others take their places", unviable.len());
            for number in unviable {
                self.learn(&chosen[number - 1], UNVIABLE)?;
            }
        }
    }

    /// The number of the mutant that an error of the compiler is about: that of the last switch before it.
    fn culprit(&self, line: &str) -> Option<usize> {
        let message = &serde_json::from_str::<Value>(line).ok()?["message"];
        let spans = message["spans"]
            .as_array()
            .filter(|_| message["level"] == "error")?;
        let primary = spans.iter().find(|span| span["is_primary"] == true)?;
        let file = primary["file_name"].as_str()?.strip_prefix("dataplane/src/")?;
        let text = fs::read_to_string(self.source.join(file)).ok()?;
        let before = &text[..primary["byte_start"].as_u64()? as usize];
        let (_, number) = before.rsplit_once("crate::mutated(")?;
        number.split_once(')')?.0.parse().ok()
    }

    fn report(&self) {
        let mut counts: BTreeMap<_, u64> = BTreeMap::new();
        for site in self.chosen() {
            let outcome = match self.outcome(&site) {
                outcome @ (SURVIVED | TIMED_OUT | UNREACHED) => outcome,
                _ => "killed",
            };
            if outcome == SURVIVED || outcome == UNREACHED {
                println!("{outcome}: {}", site.name);
            }
            *counts.entry((site.file, outcome)).or_default() += 1;
        }
        for ((file, outcome), count) in counts {
            println!("{file}: {count} {outcome}");
        }
    }
}

/// What a command says; its errors are shown.
fn shell(folder: &Path, line: &str) -> Result<String> {
    let mut command = Command::new("sh");
    command
        .args(["-c", line])
        .current_dir(folder)
        .stderr(Stdio::inherit());
    let output = command.output().context("cannot start sh")?;
    ensure!(
        output.status.success(),
        "`{line}` failed; its own message is above"
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// A file without mutants.
fn committed(folder: &Path, file: &str) -> Result<String> {
    shell(folder, &format!("git show HEAD:./{file}"))
}

/// Runs tests with a mutant until one fails, and gives its name, or another outcome. Without any: which mutants it would reach.
fn outcome(program: &Path, number: usize, tests: &[&str], reached: &mut BTreeSet<usize>) -> Result<String> {
    if tests.is_empty() {
        return Ok(UNREACHED.to_owned());
    }
    let program = program.display();
    let (first, others) = tests.split_at(FIRST.min(tests.len()));
    for (tests, limit_s) in [first, others]
        .into_iter()
        .zip(LIMITS_S)
        .filter(|(tests, _)| !tests.is_empty())
    {
        let limits = format!("ulimit -t {limit_s}; ulimit -v {MEMORY_KIB}");
        let line = format!(
            "{limits}; LM_MUTANT={number} exec '{program}' --exact {} 2>&1",
            tests.join(" ")
        );
        let mut command = Command::new("sh");
        let child = command.args(["-c", &line]).stdout(Stdio::piped()).spawn();
        let mut child = child.context("cannot start sh")?;
        for line in BufReader::new(child.stdout.take().expect("it is piped")).lines() {
            let line = line.context("cannot read what the tests say")?;
            reached.extend(
                line.strip_prefix("reached ")
                    .and_then(|number| number.parse::<usize>().ok()),
            );
            let failed = line
                .strip_prefix("test ")
                .and_then(|rest| rest.strip_suffix(" ... FAILED"));
            if let Some(test) = failed {
                // It may have ended by itself.
                let _ = child.kill();
                child.wait()?;
                return Ok(test.to_owned());
            }
        }
        let status = child.wait()?;
        match status.signal() {
            _ if status.success() => {}
            Some(signal) if signal == Signal::KILL.as_raw() => return Ok(TIMED_OUT.to_owned()),
            _ => return Ok(status.to_string()),
        }
    }
    Ok(SURVIVED.to_owned())
}
