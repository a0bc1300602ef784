//! Faults put into checks on purpose, each once: whether they are found, and end the run.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};

use super::pair::{LANDING_QUEUE, steer};
use crate::bed::Host;
use crate::vm::protocol::Spoil;

/// Two places in each page of a huge page.
const STRIDE: u64 = 2048;

/// Whether it is this fault's turn. Relaxed: a check has one thread that asks.
fn is_due(wanted: Option<Spoil>, kind: Spoil) -> bool {
    static DONE: AtomicBool = AtomicBool::new(false);
    wanted == Some(kind) && !DONE.swap(true, Ordering::Relaxed)
}

/// Changes a byte in the middle of a received file.
pub(super) fn file(wanted: Option<Spoil>, path: &Path) -> Result<()> {
    if !is_due(wanted, Spoil::File) {
        return Ok(());
    }
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    flip(&file, file.metadata()?.len() / 2)
}

/// Changes bytes all over the landing memory of a receiver, which holds messages that it was given.
pub(super) fn messages(wanted: Option<Spoil>, receiver: u32) -> Result<()> {
    if !is_due(wanted, Spoil::Message) {
        return Ok(());
    }
    let maps = std::fs::read_to_string(format!("/proc/{receiver}/maps")).context("the receiver is gone")?;
    let memory = OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/{receiver}/mem"))?;
    let ranges: Vec<std::ops::Range<u64>> = maps.lines().filter_map(huge_range).collect();
    ensure!(!ranges.is_empty(), "the receiver has no huge pages: {maps}");
    for range in ranges {
        for at in range.step_by(STRIDE as usize) {
            flip(&memory, at + STRIDE / 2)?;
        }
    }
    Ok(())
}

/// Leaves a card with another table than it had.
pub(super) fn card(wanted: Option<Spoil>, host: &Host) -> Result<()> {
    if is_due(wanted, Spoil::Card) {
        ensure!(steer(host, LANDING_QUEUE), "the card takes no other table");
    }
    Ok(())
}

fn flip(file: &std::fs::File, at: u64) -> Result<()> {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).context("cannot read a byte")?;
    file.write_all_at(&[byte[0] ^ 0x10], at)
        .context("cannot change a byte")
}

/// The addresses of a line of `/proc/PID/maps` that is of huge pages.
fn huge_range(line: &str) -> Option<std::ops::Range<u64>> {
    let is_huge = line.contains("/anon_hugepage") || line.contains("/memfd:lm-umem");
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    is_huge.then_some(number(from)?..number(to)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_found_in_the_map() {
        let line = "7f0000000000-7f0000200000 rw-s 00000000 00:10 5 /anon_hugepage (deleted)";
        assert_eq!(huge_range(line), Some(0x7f00_0000_0000..0x7f00_0020_0000));
        assert_eq!(
            huge_range("00400000-00401000 r-xp 00000000 00:10 5 /bin/lm-bench"),
            None
        );
    }
}
