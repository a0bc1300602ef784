//! A run against an earlier one, and the short list against its baseline: what `cargo xtask ci` asks of each change.

use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lm_measure::against::changes;

use super::{BASELINE, Kept, Measured, measure, short_rows};
use crate::bed::leftovers::temporary_folder;
use crate::machine;
use crate::vm::Machine;
use crate::workspace::{self, cargo, said_by, target_dir};

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
    let (now, machines) = measure(short_rows())?;
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
    let mut parse = Command::new("git");
    let commit = said_by(parse.current_dir(root).args(["rev-parse", "HEAD^"]))?;
    git(&["reset", "--quiet", "--hard", commit.trim()], &folder)?;
    let (results, _registered) = temporary_folder(&target_dir()?, "card")?;
    let file = results.join("parent.json");
    let words = ["xtask", "bench", "card", "--short", "--json"];
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
    within(-WORSE..=f64::INFINITY, now, before).with_context(|| {
        format!(
            "worse than before; find out why, or make a new baseline in a commit that says why (cargo xtask bench card \
             --short --json {BASELINE})"
        )
    })
}

/// Says by how much two runs differ, row by row; an error where one is better or worse by more than it may, or has no figure. Rows whose rounds differ
/// count like all others: to leave them out would have two runs agree that do not.
pub(super) fn within(bounds: RangeInclusive<f64>, now: &[Measured], earlier: &[Measured]) -> Result<()> {
    let (mut compared, mut outside) = (0, Vec::new());
    for one in now {
        let same = earlier.iter().find(|other| other.row == one.row);
        for change in same.map_or_else(Vec::new, |same| changes(&one.report, &same.report)) {
            let name = format!("{} {change}", one.row.device.name());
            println!("  {name}");
            compared += 1;
            if change.better.is_none_or(|better| !bounds.contains(&better)) {
                outside.push(name);
            }
        }
    }
    ensure!(compared > 0, "no row is in both runs");
    ensure!(
        outside.is_empty(),
        "{} of {compared} rows differ by too much: {}",
        outside.len(),
        outside.join(", ")
    );
    Ok(())
}

/// An earlier run.
pub(super) fn earlier(path: &Path) -> Result<Kept> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no result of this command", path.display()))
}

/// In what the machines of two runs differ: why their figures may.
pub(super) fn other_machine(now: &[Machine], earlier: &[Machine]) -> String {
    let differs = |part: fn(&Machine) -> &str| !now.iter().map(part).eq(earlier.iter().map(part));
    let parts = [
        ("QEMU", differs(|one| &one.qemu)),
        ("the kernel", differs(|one| &one.kernel_sha256)),
        (
            "the guest's files (programs, or which rows and their order)",
            differs(|one| &one.initramfs_sha256),
        ),
    ];
    let parts: Vec<&str> = (parts.iter())
        .filter_map(|(name, differs)| differs.then_some(*name))
        .collect();
    match parts.as_slice() {
        [] => "QEMU, kernel and the guest's files are the same: something else than instructions decided"
            .to_owned(),
        parts => format!("another machine was measured: different are {}", parts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::vm::devices::Device;

    fn streams(figure: f64) -> Vec<Measured> {
        let rounds = json!([{"bytes": figure, "seconds": 8.0}]);
        let report = json!({"rows": [{"what": "stream", "system": "lm", "size": 65536, "rounds": rounds}]});
        vec![Measured {
            row: short_rows()[0].clone(),
            report,
        }]
    }

    #[test]
    fn a_row_that_is_worse_or_missing_is_named() {
        not_worse(&streams(98.0), &streams(100.0)).unwrap();
        not_worse(&streams(200.0), &streams(100.0)).unwrap();
        let error = format!("{:#}", not_worse(&streams(96.0), &streams(100.0)).unwrap_err());
        assert!(error.contains("-4.00 %") && error.contains("igb"), "{error}");
        assert!(not_worse(&streams(1.0), &[]).is_err() && not_worse(&[], &streams(1.0)).is_err());
        let mut dead = streams(1.0);
        dead[0].report = serde_json::Value::Null;
        assert!(
            not_worse(&dead, &streams(1.0)).is_err(),
            "nor is a row without a figure"
        );
    }

    #[test]
    fn two_runs_agree_within_one_percent() {
        let bounds = -super::super::AGREE..=super::super::AGREE;
        within(bounds.clone(), &streams(100.5), &streams(100.0)).unwrap();
        for figure in [98.0, 102.0] {
            let error = within(bounds.clone(), &streams(figure), &streams(100.0)).unwrap_err();
            assert!(error.to_string().contains("1 of 1 rows differ"), "{error}");
        }
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
        assert_eq!(rows, short_rows().iter().collect::<Vec<_>>());
        let has_figure = |one: &Measured| changes(&one.report, &one.report)[0].better == Some(0.0);
        assert!(baseline.rows.iter().all(has_figure));
    }
}
