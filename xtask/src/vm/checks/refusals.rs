//! Where a device or the machine cannot do zero-copy: who demands it is told why and what to do, and who does not gets
//! copy mode, and a warning where the driver could do more.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::pair::{Pair, await_link, hosts, launch, spread_evenly};
use crate::bed::{Bed, Host, INTERFACE, Launch};
use crate::soak::fates;
use crate::vm::devices::Device;
use crate::vm::protocol::{Mode, Plan};

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// A device of one queue, no huge pages, and both undone again; sums of a device that makes none.
pub(super) fn cards(plan: &Plan, device: Device) -> Result<Value> {
    let pair = Pair::new(plan, device)?;
    let right = pair.bed.right();

    // A table that somebody has set, be it the one from before, keeps the queues that it names.
    spread_evenly(right)?;
    ethtool(right, &["-L", INTERFACE, "combined", "1"])?;
    await_link(&pair.bed)?;
    let one_queue = refused_and_copied(&pair.bed, "queue", "", true);
    ethtool(right, &["-L", INTERFACE, "combined", "2"])?;
    let one_queue = one_queue.context("with one queue")?;
    await_link(&pair.bed)?;
    let before = pair.traces()?;
    before.ensure_as_before(&before)?;

    let reserved =
        std::fs::read_to_string(HUGE_PAGES).with_context(|| format!("cannot read {HUGE_PAGES}"))?;
    reserve_huge_pages("0")?;
    let no_huge_pages = refused_and_copied(&pair.bed, "huge", "", true);
    reserve_huge_pages(reserved.trim())?;
    let no_huge_pages = no_huge_pages.context("without huge pages")?;

    pair.traces()?.ensure_as_before(&before)?;
    // Of the drivers that can be had here none does, and the kernel does it in copy mode.
    let no_sums = refused_and_copied(&pair.bed, "checksum", " --checksum offload", true)?;
    pair.traces()?.ensure_as_before(&before)?;
    Ok(json!({"one_queue": one_queue, "no_huge_pages": no_huge_pages, "no_sums": no_sums}))
}

/// A driver without zero-copy.
pub(super) fn veth(_plan: &Plan, device: Device) -> Result<Value> {
    let bed = hosts(device, false)?;
    let found = refused_and_copied(&bed, "zero-copy", "", false)?;
    Ok(json!({"no_driver": found}))
}

fn reserve_huge_pages(count: &str) -> Result<()> {
    std::fs::write(HUGE_PAGES, count).with_context(|| format!("cannot write {HUGE_PAGES}"))?;
    let now = std::fs::read_to_string(HUGE_PAGES).with_context(|| format!("cannot read {HUGE_PAGES}"))?;
    ensure!(
        now.trim() == count,
        "{} huge pages instead of {count}: somebody holds them, or memory is in pieces",
        now.trim()
    );
    Ok(())
}

fn ethtool(host: &Host, arguments: &[&str]) -> Result<()> {
    let program = Launch::new("ethtool").args(arguments);
    host.spawn(program)?.finish().map(drop)
}

/// Who demands zero-copy on the right host with these `options` is refused, in one line that says `word` and what to
/// do; `auto` copies and works, and says so where the driver has zero-copy.
fn refused_and_copied(bed: &Bed, word: &str, options: &str, has_driver: bool) -> Result<Value> {
    let mut refusals = Vec::new();
    for line in ["lm-recv --from-anyone --output /tmp", "lm-check messages"] {
        let program = bed
            .right()
            .spawn(launch(&format!("{line}{options}"), Mode::ZeroCopy))?;
        let output = program.outcome()?;
        let said = output.stderr.trim().to_owned();
        ensure!(
            output.status.code() == Some(1),
            "{line} ended with {} and not with exit code 1: {said}",
            output.status
        );
        ensure!(
            said.lines().count() == 1 && said.contains("; ") && said.to_lowercase().contains(word),
            "{line} does not say in one line that it is about {word:?} and what to do: {said:?}"
        );
        ensure!(
            !bed.right().has_xdp_program()?,
            "{line} was refused, and an XDP program is attached"
        );
        refusals.push(said);
    }
    await_link(bed)?;
    let plan = "--seed 3 --lens 100000 --messages 4";
    let mut receiver = bed
        .right()
        .spawn(launch(&format!("lm-check messages {plan}{options}"), Mode::Auto))?;
    receiver.await_text("ready")?;
    await_link(bed)?;
    let to = bed.right().address().to_string();
    let sender = launch(&format!("lm-check messages {plan} --to {to}"), Mode::Copy);
    let sent = bed.left().spawn(sender)?.finish()?.json().context("the sender")?;
    let output = receiver.stop()?;
    let received = output.json().with_context(|| output.stderr.clone())?;
    fates::compare("reliable", 4, &sent, &received)
        .with_context(|| format!("sender {sent}; receiver {received}"))?;
    ensure!(
        received["mode"] == Mode::Copy.in_effect(),
        "mode auto became {}",
        received["mode"]
    );
    let warning = output
        .stderr
        .lines()
        .find(|line| line.contains("no zero-copy mode"));
    // Of a driver that never has zero-copy nobody expects it.
    ensure!(
        warning.is_some() || !has_driver,
        "no warning of the fallback: {:?}",
        output.stderr
    );
    Ok(json!({"refusals": refusals, "warning": warning, "receive": received}))
}
