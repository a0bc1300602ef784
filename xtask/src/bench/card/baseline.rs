//! A run against an earlier one, and the short list against its baseline: what `cargo xtask ci` asks of each change.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use super::{
    AGREE, BASELINE, Kept, Machine, Measured, USECS, What, earlier, measure, other_machine, short_rows, table,
};
use crate::bed::leftovers::temporary_folder;
use crate::machine;
use crate::vm::qemu::Clock;
use crate::vm::{Build, Choice};
use crate::workspace::{self, cargo, target_dir};

/// By so much a row may be worse.
const WORSE: f64 = 0.03;

/// Measures the short list, and fails where a row is worse than in the baseline. In another machine than the baseline's, the parent commit is built
/// and measured, and is the baseline.
///
/// # Errors
///
/// What is worse or has no figure; what the virtual machine lacks.
pub(crate) fn check() -> Result<()> {
    let root = workspace::root();
    let baseline = earlier(&root.join(BASELINE))?;
    let choice = Choice {
        clock: Clock::Instructions,
        build: Build::Counted,
        ..Choice::default()
    };
    let (now, machines) = measure(short_rows(1, USECS), &choice)?;
    print!("{}", table(&now));
    if is_of(&baseline, machine::rustc(), &machines) {
        return not_worse(&now, &baseline.rows);
    }
    println!(
        "{BASELINE} is of another machine ({}; Rust {}): the parent commit is measured in this one",
        other_machine(&machines, &baseline.boots),
        baseline.rustc.unwrap_or_default()
    );
    not_worse(&now, &parent(root)?.rows)
}

/// What the parent commit measures of itself, in a worktree below the target folder.
fn parent(root: &Path) -> Result<Kept> {
    let folder = target_dir()?.join("parent");
    let git =
        |words: &[&str], folder: &Path| workspace::run(Command::new("git").current_dir(folder).args(words));
    if !folder.join(".git").exists() {
        let place = folder.to_string_lossy();
        // By force: git still knows a worktree whose folder `cargo clean` took.
        let add = [
            "worktree", "add", "--quiet", "--force", "--force", "--detach", &place, "HEAD^",
        ];
        git(&add, root)?;
    }
    let commit = Command::new("git")
        .current_dir(root)
        .args(["rev-parse", "HEAD^"])
        .output()?
        .stdout;
    let commit = String::from_utf8_lossy(&commit);
    git(&["reset", "--quiet", "--hard", commit.trim()], &folder)?;
    let (results, _registered) = temporary_folder(&target_dir()?, "card")?;
    let file = results.join("parent.json");
    let words = ["xtask", "bench", "card", "--short", "--rounds", "1", "--json"];
    let mut measure = cargo();
    measure
        .current_dir(&folder)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .args(words)
        .arg(&file);
    workspace::run(&mut measure)?;
    earlier(&file)
}

/// Whether a baseline's programs are this compiler's, and instructions took as long: QEMU, kernel and cards. The guest's files are what is to be judged.
fn is_of(baseline: &Kept, rustc: Option<String>, now: &[Machine]) -> bool {
    let parts = |machine: &Machine| {
        (
            machine.device,
            machine.qemu.clone(),
            machine.kernel_sha256.clone(),
        )
    };
    baseline.rustc == rustc && now.iter().map(parts).eq(baseline.boots.iter().map(parts))
}

fn not_worse(now: &[Measured], before: &[Measured]) -> Result<()> {
    let mut worse = Vec::new();
    for one in now {
        let name = one.row.name();
        let was = before.iter().find(|other| other.row == one.row);
        let (Some(figure), Some(was)) = (one.median(), was.and_then(Measured::median)) else {
            worse.push(format!("{name} has no figure"));
            continue;
        };
        let by = match one.row.what {
            What::Stream => was / figure,
            What::RoundTrips | What::Beside => figure / was,
        } - 1.0;
        println!("  {:+.2} %  {name}", -by * 100.0);
        if by > WORSE {
            worse.push(format!("{name} by {:.1} %", by * 100.0));
        }
    }
    ensure!(!now.is_empty(), "no row was measured");
    ensure!(
        worse.is_empty(),
        "worse than before: {}; find out why, or make a new baseline in a commit that says why (cargo xtask bench \
         card --short --rounds 1 --json {BASELINE})",
        worse.join(", ")
    );
    Ok(())
}

/// Says by how much two runs differ, row by row; an error where one does by more than it may, or has no figure. Rows whose rounds differ count like
/// all others: to leave them out would have two runs agree that do not.
pub(super) fn compare(now: &[Measured], earlier: &[Measured]) -> Result<()> {
    let mut differing = Vec::new();
    let mut compared = 0;
    for one in now {
        let Some(other) = earlier.iter().find(|other| other.row == one.row) else {
            continue;
        };
        compared += 1;
        let (Some(figure), Some(before)) = (one.median(), other.median()) else {
            println!("  no figure  {}", one.row.name());
            differing.push(one.row.name());
            continue;
        };
        let change = figure / before - 1.0;
        println!("  {:+.2} %  {}", change * 100.0, one.row.name());
        if change.abs() > AGREE {
            differing.push(one.row.name());
        }
    }
    ensure!(compared > 0, "no row is in both runs");
    ensure!(
        differing.is_empty(),
        "{} of {compared} rows differ by more than {} %: {}",
        differing.len(),
        AGREE * 100.0,
        differing.join(", ")
    );
    println!(
        "{compared} rows agree with the earlier run within {} %",
        AGREE * 100.0
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::devices::Device;

    #[test]
    fn a_row_that_is_worse_or_missing_is_named() {
        let stream = |figure: f64| {
            let mut one = Measured::absent(&short_rows(1, USECS)[0], String::new());
            one.row.what = What::Stream;
            one.rounds = vec![figure];
            one
        };
        not_worse(&[stream(98.0)], &[stream(100.0)]).unwrap();
        not_worse(&[stream(200.0)], &[stream(100.0)]).unwrap();
        let error = not_worse(&[stream(96.0)], &[stream(100.0)])
            .unwrap_err()
            .to_string();
        assert!(error.contains("by 4.2 %"), "{error}");
        let round_trips = |figure: f64| {
            let mut one = stream(figure);
            one.row.what = What::RoundTrips;
            one
        };
        not_worse(&[round_trips(50.0)], &[round_trips(100.0)]).unwrap();
        assert!(not_worse(&[round_trips(104.0)], &[round_trips(100.0)]).is_err());
        for (now, before) in [(vec![stream(1.0)], vec![]), (vec![], vec![stream(1.0)])] {
            assert!(not_worse(&now, &before).is_err());
        }
        let mut dead = stream(1.0);
        dead.rounds.clear();
        assert!(not_worse(&[dead], &[stream(1.0)]).is_err());
    }

    /// Elsewhere the parent commit is.
    #[test]
    fn a_baseline_is_one_where_compiler_kernel_and_qemu_are_the_same() {
        let baseline = earlier(&workspace::root().join(BASELINE)).unwrap();
        let is_of = |rustc: Option<&str>, change: fn(&mut Machine)| {
            let mut now = baseline.boots.clone();
            now.iter_mut().for_each(change);
            super::is_of(&baseline, rustc.map(str::to_owned), &now)
        };
        let is_named = |one: &Machine| {
            !one.qemu.is_empty()
                && [&one.kernel_sha256, &one.initramfs_sha256].map(|sum| sum.len()) == [64; 2]
        };
        assert!(baseline.boots.iter().all(is_named), "{:?}", baseline.boots);
        let rustc = baseline.rustc.as_deref();
        assert!(rustc.is_some() && is_of(rustc, |_| {}));
        assert!(is_of(rustc, |now| now.initramfs_sha256.clear()), "this is judged");
        for change in [
            |now: &mut Machine| now.qemu.push('1'),
            |now: &mut Machine| now.kernel_sha256.push('1'),
            |now: &mut Machine| now.device = Device::Veth,
        ] {
            assert!(!is_of(rustc, change));
        }
        assert!(!is_of(Some("1.0.0"), |_| {}) && !is_of(None, |_| {}));
        assert!(!super::is_of(&baseline, baseline.rustc.clone(), &[]));
    }

    /// It is of the list that is measured.
    #[test]
    fn the_baseline_has_every_row() {
        let baseline = earlier(&workspace::root().join(BASELINE)).unwrap();
        let rows: Vec<_> = baseline.rows.iter().map(|one| &one.row).collect();
        let mut list = short_rows(1, USECS);
        list.sort_by_key(super::super::machine_of);
        assert_eq!(rows, list.iter().collect::<Vec<_>>());
        assert!(baseline.rows.iter().all(|one| one.median().is_some()));
    }
}
