//! The machine and its cards: what everything else stands on.

use anyhow::{Context, Result, ensure};

use super::pair::Pair;
use super::streams::Stream;
use crate::vm::devices::Device;
use crate::vm::guest::{all_cards, cards};
use crate::vm::protocol::Plan;
use crate::vm::qemu::HUGE_PAGES;

pub(super) fn boot(_plan: &Plan, device: Device) -> Result<()> {
    let driver = device
        .driver()
        .context("this check is of a device with a driver")?;
    let found = cards(driver);
    ensure!(
        found.len() == 2,
        "{} interfaces with the driver {driver} instead of 2; all cards: {:?}",
        found.len(),
        all_cards()
    );
    ensure!(
        found.iter().all(|card| card.rx_queues > 0),
        "no queues: {found:?}"
    );
    let reserved = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")?;
    ensure!(
        reserved.trim() == HUGE_PAGES.to_string(),
        "{} huge pages instead of {HUGE_PAGES}; does the machine have the memory?",
        reserved.trim()
    );
    Ok(())
}

/// An endpoint has a socket on each of a card's two queues, and says of itself that all are in zero-copy mode.
pub(super) fn bind_zerocopy(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    Stream::of(vec![100_000], 1).run(&pair).map(drop)
}
