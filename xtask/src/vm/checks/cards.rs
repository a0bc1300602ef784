//! The machine and its cards: what everything else stands on.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::pair::{hosts, launch, require_zero_copy};
use crate::vm::devices::Device;
use crate::vm::guest::{all_cards, cards, facts};
use crate::vm::protocol::{Mode, Plan};
use crate::vm::qemu;

pub(super) fn boot(plan: &Plan) -> Result<Value> {
    let facts = facts();
    for device in &plan.devices {
        let Some(driver) = device.driver() else {
            continue;
        };
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
    }
    let reserved = facts["huge_pages"]["total"].as_u64();
    ensure!(
        reserved == Some(u64::from(plan.huge_pages)),
        "{reserved:?} huge pages instead of {}; does the machine have the memory?",
        plan.huge_pages
    );
    Ok(facts)
}

/// An endpoint has a socket on each of a card's two queues.
pub(super) fn bind_zerocopy(_plan: &Plan, device: Device) -> Result<Value> {
    require_zero_copy(device)?;
    let bed = hosts(device, false)?;
    let mut modes = Vec::new();
    for host in [bed.left(), bed.right()] {
        let mut program = host.spawn(launch("lm-check messages", Mode::ZeroCopy))?;
        program.await_text("ready")?;
        let output = program.stop()?;
        let report = output.json().with_context(|| output.stderr.clone())?;
        let mode = report["mode"].clone();
        ensure!(
            mode == Mode::ZeroCopy.in_effect(),
            "{} is in mode {mode}",
            host.name()
        );
        modes.push(mode);
    }
    Ok(json!({"modes": modes, "huge_pages": qemu::HUGE_PAGES}))
}
