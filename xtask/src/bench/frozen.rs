//! Builds of `lm-bench` that stay what they were, to measure this tree beside: a revision's worktree below the target folder.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::vm::checks::card::FROZEN;
use crate::workspace::{self, cargo, target_dir};

/// Names that mean the same commit in a clone without tags.
const NAMED: &[(&str, &str)] = &[
    ("before-house", "1dd50729e28f98de2cf9fa871f5478fea8759f7e"),
    (BEFORE_PIPELINE, "41584c9528fb5a690b14137ff5ea0a2ca2eff712"),
];

/// The last commit at which a message was sent when it was written, and read when it was whole.
pub(super) const BEFORE_PIPELINE: &str = "before-pipeline";

/// A revision by the name that it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Revision {
    name: String,
    commit: String,
}

/// The revisions of these names in a repository.
pub(super) fn revisions(repository: &Path, names: &[String]) -> Result<Vec<Revision>> {
    let find = |name: &String| {
        let known = NAMED
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, commit)| *commit);
        let mut texts = std::iter::once(name.as_str()).chain(known);
        let commit = texts.find_map(|text| commit(repository, text)).with_context(|| {
            format!("--frozen {name}: this repository has no such commit; name one that `git log` shows, or fetch it (`git fetch --tags --unshallow`)")
        })?;
        // It becomes part of a system's name.
        Ok(Revision {
            name: name.replace('/', "-"),
            commit,
        })
    };
    names.iter().map(find).collect()
}

/// The whole hash of the commit that a text names.
fn commit(repository: &Path, text: &str) -> Option<String> {
    let mut git = Command::new("git");
    git.current_dir(repository)
        .args(["rev-parse", "--verify", "--quiet", "--end-of-options"])
        .arg(format!("{text}^{{commit}}"));
    let output = git.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl Revision {
    /// The system of `lm-bench` that is this build's.
    pub(super) fn system(&self) -> String {
        format!("{FROZEN}{}", self.name)
    }

    /// A copy of its `lm-bench` under the revision's name in this folder.
    pub(super) fn copy_to(&self, folder: &Path) -> Result<PathBuf> {
        let (program, copy) = (self.built()?, folder.join(&self.name));
        std::fs::copy(&program, &copy).with_context(|| format!("cannot copy {}", program.display()))?;
        Ok(copy)
    }

    /// Its `lm-bench`, which is built first unless it was before.
    pub(super) fn built(&self) -> Result<PathBuf> {
        let Revision { name, commit } = self;
        let folder = target_dir()?.join("frozen").join(&commit[..12]);
        let lm_bench = folder.join("target/release/lm-bench");
        if !lm_bench.is_file() {
            eprintln!("building lm-bench at {name}, once ({})", folder.display());
            self.build(&folder)?;
        }
        let mut help = Command::new(&lm_bench);
        help.args(["end", "--help"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        ensure!(
            help.status().context("cannot start it")?.success(),
            "--frozen {name}: its lm-bench has no command `end`; name a later revision"
        );
        Ok(lm_bench)
    }

    fn build(&self, folder: &Path) -> Result<()> {
        let git = |arguments: &[&str], folder: &Path| {
            let mut git = Command::new("git");
            workspace::run(git.current_dir(folder).args(arguments))
        };
        if !folder.join(".git").exists() {
            let place = folder.to_string_lossy();
            // By force: git still knows a worktree whose folder `cargo clean` took.
            let add = [
                "worktree",
                "add",
                "--quiet",
                "--force",
                "--force",
                "--detach",
                &place,
                &self.commit,
            ];
            git(&add, workspace::root())?;
        }
        // What was interrupted is made whole.
        git(&["reset", "--quiet", "--hard", &self.commit], folder)?;
        workspace::run(
            cargo()
                .current_dir(folder)
                .args([
                    "build",
                    "--release",
                    "--quiet",
                    "--locked",
                    "--package",
                    "lm-bench",
                ])
                .args(["--bin", "lm-bench", "--no-default-features", "--target-dir"])
                .arg(folder.join("target")),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::bed::leftovers::{Registered, temporary_folder};

    /// A repository with two commits, of which the first has a tag.
    fn repository() -> (PathBuf, Registered) {
        let (path, registered) = temporary_folder(&std::env::temp_dir(), "frozen").unwrap();
        for line in [
            "init -q",
            "commit -q --allow-empty -m 1",
            "tag old/1",
            "commit -q --allow-empty -m 2",
        ] {
            let mut git = Command::new("git");
            git.current_dir(&path)
                .args(["-c", "user.name=x", "-c", "user.email=x@example.org"]);
            assert!(git.args(line.split(' ')).status().unwrap().success(), "{line}");
        }
        (path, registered)
    }

    #[test]
    fn revisions_are_found_by_tag_and_by_hash() {
        let (path, _folder) = repository();
        let [first, last] = ["old/1", "HEAD"].map(|text| commit(&path, text).unwrap());
        let names = ["old/1".to_owned(), last[..8].to_owned()];
        let found = revisions(&path, &names).unwrap();
        let expected = [("old-1", first), (&last[..8], last.clone())];
        let found: Vec<_> = found.iter().map(|one| (&*one.name, one.commit.clone())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn an_unknown_revision_is_told_in_a_line() {
        let (path, _folder) = repository();
        // The commit that this name means is not there either.
        for name in ["before-house", "no-such", "--all", "HEAD~9"] {
            let error = format!("{:#}", revisions(&path, &[name.to_owned()]).unwrap_err());
            assert!(
                error.contains(name) && error.contains("git fetch") && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
