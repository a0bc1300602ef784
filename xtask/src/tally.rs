//! What test programs said, summed.

use std::collections::BTreeSet;

/// What test programs said, in lines of libtest with `--show-output`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Tests that ran, by name; documentation tests without their lines.
    pub(crate) names: BTreeSet<String>,
    /// Test name and reason.
    pub(crate) skipped: Vec<(String, String)>,
    /// Test name and what the kernel lacks for a part of it; nobody can install that.
    pub(crate) absent: Vec<(String, String)>,
    pub(crate) failures: Vec<String>,
    /// The test whose captured output is being read.
    current: String,
    /// Whether the lines read are the captured output of tests that passed.
    in_successes: bool,
}

impl Tally {
    /// Takes one line of `cargo test -- --show-output`; tells whether to show it.
    pub(crate) fn line(&mut self, line: &str) -> bool {
        if let Some(result) = line.strip_prefix("test result: ") {
            for (number, what) in result
                .split([';', '.'])
                .filter_map(|part| part.trim().split_once(' '))
            {
                let number = number.parse().unwrap_or(0);
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    _ => {}
                }
            }
            self.in_successes = false;
            return true;
        }
        if line == "successes:" {
            self.in_successes = true;
        } else if line == "failures:" {
            self.in_successes = false;
        } else if let Some(name) = between(line, "---- ", " stdout ----") {
            self.current = name.to_owned();
        } else if let Some((_, reason)) = line.split_once("SKIPPED: ") {
            self.skipped
                .push((self.current.clone(), reason.trim().to_owned()));
        } else if let Some((_, what)) = line.split_once("NOT IN THIS KERNEL: ") {
            self.absent.push((self.current.clone(), what.trim().to_owned()));
        } else if let Some((name, verdict)) =
            between(line, "test ", "").and_then(|line| line.rsplit_once(" ... "))
        {
            if verdict == "FAILED" {
                self.failures.push(name.to_owned());
            }
            self.names.insert(without_line(name).to_owned());
        }
        !self.in_successes
    }

    /// Takes another program's; its names begin with `prefix`.
    pub(crate) fn add(&mut self, other: Tally, prefix: &str) {
        self.passed += other.passed;
        self.failed += other.failed;
        let names = other.names.into_iter().map(|name| format!("{prefix}{name}"));
        self.names.extend(names);
        self.skipped.extend(other.skipped);
        self.absent.extend(other.absent);
        self.failures.extend(other.failures);
    }
}

fn between<'a>(line: &'a str, start: &str, end: &str) -> Option<&'a str> {
    line.strip_prefix(start)?.strip_suffix(end)
}

/// A test's name without what libtest and rustdoc add: that it should panic, and where it stands.
pub(crate) fn without_line(name: &str) -> &str {
    let name = name.split_once(" (line ").map_or(name, |(name, _)| name);
    name.strip_suffix(" - should panic").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tally_sums_test_programs_and_finds_what_was_skipped() {
        let output = "\
running 3 tests
test wire::tests::golden ... ok
test bed::needs_root ... ok
test bed::breaks - should panic ... ok
test bad ... FAILED

successes:

---- bed::needs_root stdout ----
SKIPPED: not root; network namespaces need it

---- wire::tests::golden stdout ----
NOT IN THIS KERNEL: bond devices


successes:
    wire::tests::golden
    bed::needs_root

failures:

---- bad stdout ----
thread 'bad' panicked

failures:
    bad

test result: FAILED. 2 passed; 1 failed; 4 ignored; 0 measured; 0 filtered out; finished in 0.00s
   Doc-tests x
test src/lib.rs - wire::sum (line 12) ... ok
test src/lib.rs - wire (line 3) - compile ... ok
test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.20s";
        let mut tally = Tally::default();
        let shown: Vec<&str> = output.lines().filter(|line| tally.line(line)).collect();
        assert_eq!((tally.passed, tally.failed), (7, 1));
        let names = [
            "bad",
            "bed::breaks",
            "bed::needs_root",
            "src/lib.rs - wire",
            "src/lib.rs - wire::sum",
            "wire::tests::golden",
        ];
        assert!(tally.names.iter().eq(names), "{:?}", tally.names);
        assert_eq!(
            tally.skipped,
            [(
                "bed::needs_root".to_owned(),
                "not root; network namespaces need it".to_owned()
            )]
        );
        assert_eq!(
            tally.absent,
            [("wire::tests::golden".to_owned(), "bond devices".to_owned())]
        );
        assert_eq!(tally.failures, ["bad"]);
        assert!(
            shown.contains(&"thread 'bad' panicked") && !shown.iter().any(|line| line.contains("SKIPPED"))
        );
        assert!(shown.last().unwrap().starts_with("test result: ok."));

        let mut sum = Tally::default();
        sum.add(tally, "a/src/lib.rs ");
        assert_eq!((sum.passed, sum.failed), (7, 1));
        assert!(sum.names.contains("a/src/lib.rs bad") && sum.names.len() == names.len());
    }
}
