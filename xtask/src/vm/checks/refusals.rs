//! Where a device or the machine cannot do zero-copy: who demands it is told why and what to do, and who does not gets
//! copy mode, and a warning where the driver could do more.

use anyhow::{Context, Result, ensure};

use super::pair::{Pair, await_link, ensure_mode, launch, set_queues, spread_evenly};
use super::streams::Stream;
use crate::vm::devices::Device;
use crate::vm::protocol::{COPY, Plan, ZERO_COPY};

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// A device of one queue, no huge pages, and both undone again; sums of a device that makes none.
pub(super) fn cards(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let right = pair.bed.right();

    // A table that somebody has set, be it the one from before, keeps the queues that it names.
    spread_evenly(right)?;
    set_queues(right, 1)?;
    await_link(&pair.bed)?;
    let one_queue = refused_and_copied(&pair, "queue", "", true);
    set_queues(right, 2)?;
    one_queue.context("with one queue")?;
    await_link(&pair.bed)?;
    let before = pair.tables()?;

    let reserved =
        std::fs::read_to_string(HUGE_PAGES).with_context(|| format!("cannot read {HUGE_PAGES}"))?;
    reserve_huge_pages("0")?;
    let no_huge_pages = refused_and_copied(&pair, "huge", "", true);
    reserve_huge_pages(reserved.trim())?;
    no_huge_pages.context("without huge pages")?;

    pair.ensure_as_before(&before)?;
    // Of the drivers that can be had here none does, and the kernel does it in copy mode.
    refused_and_copied(&pair, "checksum", "--checksum offload", true)?;
    pair.ensure_as_before(&before)
}

/// A driver without zero-copy.
pub(super) fn veth(plan: &Plan, device: Device) -> Result<()> {
    refused_and_copied(&Pair::new(plan, device)?, "zero-copy", "", false)
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

/// Who demands zero-copy on the right host with these `options` is refused, in one line that says `word` and what to
/// do; `auto` copies and works, and says so where the driver has zero-copy.
fn refused_and_copied(pair: &Pair, word: &str, options: &'static str, has_driver: bool) -> Result<()> {
    let (left, right) = (pair.bed.left(), pair.bed.right());
    for line in ["lm-recv --from-anyone --output /tmp", "lm-check messages"] {
        let program = right.spawn(launch(&format!("{line} {options}"), ZERO_COPY))?;
        let output = program.outcome()?;
        let said = output.stderr.trim();
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
            !right.has_xdp_program()?,
            "{line} was refused, and an XDP program is attached"
        );
    }
    let stream = Stream {
        options: ["", options],
        ..Stream::of(vec![100_000], 4)
    };
    let [sending, receiving] = stream.lines();
    let receiver = pair.start_receiver(launch(&receiving, "auto"), "ready")?;
    let sender = launch(&sending, COPY).args(["--to", &right.address().to_string()]);
    let sent = left.spawn(sender)?.finish()?.json().context("the sender")?;
    let output = receiver.stop()?;
    let received = output.json().with_context(|| output.stderr.clone())?;
    (stream.judge(&sent, &received, None)).with_context(|| format!("sender {sent}; receiver {received}"))?;
    ensure_mode(&received, COPY).context("mode auto")?;
    // Of a driver that never has zero-copy nobody expects it.
    ensure!(
        output.stderr.contains("no zero-copy mode") || !has_driver,
        "no warning of the fallback: {:?}",
        output.stderr
    );
    Ok(())
}
