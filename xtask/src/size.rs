//! Code lines by folder, and the ceilings of `xtask/size.txt`: the sum of a base and of named allowances each.
//!
//! A code line is one that is neither blank nor a comment, of a tracked file that is compiled, executed or generates
//! code. Tests are what is compiled for tests alone, `tests`, `examples`, `benches`, `fuzz`, `loom` and `stateright`;
//! everything else belongs to the longest folder that begins its path.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::workspace::root;

/// Where the ceilings stand, from the workspace's root.
pub const FILE: &str = "xtask/size.txt";
/// The rows that are sums of others.
const TESTS: &str = "tests";
const ALL: &str = "everything";
/// A count below its ceiling by more than this share and this many lines asks for a lower base.
const SLACK: (usize, usize) = (20, 200);
/// Most columns of a code line.
const COLUMNS: usize = 120;
/// What all `FIX` allowances together may be.
const FIXES: usize = 500;

const TEST_FOLDERS: [&str; 6] = ["tests", "examples", "benches", "fuzz", "loom", "stateright"];
const LANGUAGES: [&str; 7] = ["rs", "c", "h", "css", "pml", "py", "sh"];

/// One row of [`FILE`]: `NAME BASE [+N ISSUE]…`.
#[derive(Debug, PartialEq, Eq)]
struct Row<'a> {
    name: &'a str,
    base: usize,
    allowances: Vec<(usize, &'a str)>,
}

impl<'a> Row<'a> {
    fn parse(line: &'a str) -> Option<Row<'a>> {
        let mut words = line.split_whitespace();
        let (name, base) = (words.next()?, words.next()?.parse().ok()?);
        let mut allowances = Vec::new();
        while let Some(lines) = words.next() {
            allowances.push((lines.strip_prefix('+')?.parse().ok()?, words.next()?));
        }
        Some(Row {
            name,
            base,
            allowances,
        })
    }

    fn ceiling(&self) -> usize {
        self.base + self.allowances.iter().map(|(lines, _)| lines).sum::<usize>()
    }
}

fn rows(text: &str) -> Result<Vec<Row<'_>>> {
    let lines = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let row =
        |line| Row::parse(line).with_context(|| format!("{FILE}: `{line}` is not NAME BASE [+N ISSUE]…"));
    lines.map(row).collect()
}

/// What of the tree and of these command lines is above its ceiling, or so far below its base that this has to be
/// lowered.
///
/// # Errors
///
/// [`FILE`] or a tracked file cannot be read.
pub fn complaints(programs: &[clap::Command]) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root().join(FILE)).context(FILE)?;
    let rows = rows(&text)?;
    let (mut counts, mut complaints) = count_lines(&rows)?;
    for program in programs {
        let name = program.get_name().replace(' ', "-");
        let (commands, options) = leaves_and_options(program);
        counts.insert(format!("{name}:commands"), commands);
        counts.insert(format!("{name}:options"), options);
    }
    for row in &rows {
        let (count, ceiling) = (counts.remove(row.name).unwrap_or_default(), row.ceiling());
        if count > ceiling {
            complaints.push(format!(
                "{}: {count}, and may be {ceiling}: cut what it does not need",
                row.name
            ));
        } else if row.base > count + SLACK.1.max(row.base / SLACK.0) {
            complaints.push(format!(
                "{}: {count} of {}: `cargo xtask test --update-size` keeps that",
                row.name, row.base
            ));
        }
    }
    let unknown = counts.into_keys();
    complaints.extend(unknown.map(|name| format!("{name}: {FILE} has no row of that name")));
    let rows = rows.iter().filter(|row| row.name != ALL);
    let fixes = rows
        .flat_map(|row| &row.allowances)
        .filter(|(_, issue)| *issue == "FIX");
    let fixes: usize = fixes.map(|(lines, _)| lines).sum();
    if fixes > FIXES {
        complaints.push(format!(
            "{fixes} lines are allowed for mended faults, and may be {FIXES}"
        ));
    }
    Ok(complaints)
}

/// Lowers each base of [`FILE`] to what there is, and raises none.
///
/// # Errors
///
/// As of [`complaints`].
pub fn lower() -> Result<()> {
    let path = root().join(FILE);
    let text = std::fs::read_to_string(&path).context(FILE)?;
    let (counts, _) = count_lines(&rows(&text)?)?;
    let lowered = text.lines().map(|line| {
        // Commands and options have a colon in their names; they are lowered by hand.
        let row = Row::parse(line).filter(|row| !line.starts_with('#') && !row.name.contains(':'));
        let count = |row: &Row<'_>| counts.get(row.name).copied().unwrap_or_default();
        match row.filter(|row| count(row) < row.base) {
            Some(row) => line.replacen(&format!(" {}", row.base), &format!(" {}", count(&row)), 1) + "\n",
            None => format!("{line}\n"),
        }
    });
    Ok(std::fs::write(&path, lowered.collect::<String>())?)
}

/// Commands without commands below them, hidden ones too, and the options of all.
fn leaves_and_options(command: &clap::Command) -> (usize, usize) {
    let below = command.get_subcommands().map(leaves_and_options);
    let (leaves, options) = below.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let own = command
        .get_arguments()
        .filter(|argument| !argument.is_positional());
    (leaves.max(1), options + own.count())
}

/// A tracked file of code.
struct Source {
    path: String,
    text: String,
}

impl Source {
    /// `None`: no code, or not there any more.
    fn read(path: &str) -> Option<Source> {
        let text = std::fs::read_to_string(root().join(path)).ok()?;
        let (_, ending) = path.rsplit_once('.').unwrap_or_default();
        (LANGUAGES.contains(&ending) || text.starts_with("#!")).then(|| Source {
            path: path.to_owned(),
            text,
        })
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Each line that is neither blank nor a comment: its number, the line, and whether it is compiled for tests alone.
    /// What `#[cfg(test)]` or a feature for fuzzing stands before ends, as rustfmt lays it out, with the first line of
    /// the same indentation that closes it.
    fn code(&self) -> Vec<(usize, &str, bool)> {
        let (mut is_comment, mut of_tests) = (false, None);
        let mut found = Vec::new();
        for (number, line) in (1..).zip(self.text.lines()) {
            let text = line.trim_start();
            let is_hash =
                text.starts_with('#') && ![".rs", ".c", ".h"].iter().any(|end| self.path.ends_with(end));
            is_comment |= text.starts_with("/*");
            if text.is_empty() || text.starts_with("//") || is_comment || (is_hash && number > 1) {
                is_comment &= !text.contains("*/");
                continue;
            }
            let indent = line.len() - text.len();
            if self.is_rust() && is_for_tests(text) && of_tests.is_none() {
                of_tests = Some(indent);
            }
            found.push((number, line, of_tests.is_some()));
            let closes = text.ends_with([';', ','])
                || text.starts_with('}')
                || (text.contains('{') && text.ends_with('}'));
            if of_tests == Some(indent) && closes && !text.starts_with('#') {
                of_tests = None;
            }
        }
        found
    }

    /// The modules that it declares for tests alone, as paths without ending.
    fn modules_for_tests(&self) -> impl Iterator<Item = PathBuf> {
        let path = PathBuf::from(&self.path);
        let folder = path.parent().map(PathBuf::from).unwrap_or_default();
        let stem = path.file_stem().unwrap_or_default().to_owned();
        let is_root = ["lib", "main", "mod"].iter().any(|name| stem == *name);
        let inside = if is_root {
            folder.clone()
        } else {
            folder.join(stem)
        };
        let mut named = None;
        let lines = self
            .code()
            .into_iter()
            .filter(|(.., of_tests)| self.is_rust() && *of_tests);
        lines.filter_map(move |(_, line, _)| {
            let line = line.trim();
            if let Some(path) = line.strip_prefix("#[path = \"") {
                named = Some(folder.join(path.split_once(".rs\"").map_or(path, |(path, _)| path)));
            }
            let (before, name) = line.strip_suffix(';')?.rsplit_once("mod ")?;
            (before.is_empty() || before.starts_with("pub"))
                .then(|| named.take().unwrap_or_else(|| inside.join(name)))
        })
    }

    fn is_of(&self, module: &PathBuf) -> bool {
        let path = PathBuf::from(&self.path);
        path.with_extension("") == *module || path.starts_with(module)
    }

    /// A folder's row is of what begins so: `bench/src/page` is `page.rs`, too.
    fn is_in(&self, folder: &str) -> bool {
        let rest = self.path.strip_prefix(folder);
        rest.is_some_and(|rest| rest.starts_with(['/', '.', '_']) || rest.is_empty())
    }
}

fn is_for_tests(text: &str) -> bool {
    [
        "#[cfg(test)]",
        "#[cfg(any(test, feature = \"fuzzing\"))]",
        "#[cfg(doctest)]",
    ]
    .contains(&text)
}

/// Code lines of each row that is a folder, of tests, and of everything but tests; and complaints of those that are too
/// long, for which rustfmt has no remedy.
fn count_lines(rows: &[Row<'_>]) -> Result<(BTreeMap<String, usize>, Vec<String>)> {
    let listed = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "-z"])
        .output()?;
    ensure!(listed.status.success(), "git ls-files failed");
    let listed = String::from_utf8(listed.stdout).context("a file's name is not UTF-8")?;
    let sources: Vec<_> = listed.split_terminator('\0').filter_map(Source::read).collect();
    let for_tests: BTreeSet<_> = sources.iter().flat_map(Source::modules_for_tests).collect();
    let (mut counts, mut complaints) = (BTreeMap::new(), Vec::new());
    for source in &sources {
        let is_test = source.path.split('/').any(|part| TEST_FOLDERS.contains(&part))
            || for_tests.iter().any(|module| source.is_of(module));
        let names = rows.iter().map(|row| row.name).filter(|name| source.is_in(name));
        let folder = names.max_by_key(|name| name.len());
        for (number, line, of_tests) in source.code() {
            let columns = line.chars().count();
            if columns > COLUMNS {
                complaints.push(format!(
                    "{}:{number}: {columns} columns, and may be {COLUMNS}",
                    source.path
                ));
            }
            let row = match folder {
                _ if is_test || of_tests => TESTS,
                Some(folder) => folder,
                None => bail!("{}: {FILE} has no row of its folder: begin one at 0", source.path),
            };
            *counts.entry(row.to_owned()).or_default() += 1;
            *counts.entry(ALL.to_owned()).or_default() += usize::from(row != TESTS);
        }
    }
    Ok((counts, complaints))
}
