//! The machine and its cards: what everything else stands on.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::pair::{hosts, require_zero_copy};
use crate::bed::{INTERFACE, Launch};
use crate::vm::devices::Device;
use crate::vm::guest::{all_cards, cards, facts};
use crate::vm::protocol::Plan;
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

pub(super) fn bind_zerocopy(_plan: &Plan, device: Device) -> Result<Value> {
    require_zero_copy(device)?;
    let bed = hosts(device, false)?;
    let mut reports = Vec::new();
    for host in [bed.left(), bed.right()] {
        let program =
            Launch::new("/bin/lm-check").args(["bind", "--interface", INTERFACE, "--mode", "zero-copy"]);
        let report = host.spawn(program)?.finish()?.json().context("lm-check bind")?;
        let queues = report["queues"]
            .as_array()
            .context("lm-check bind names no queues")?;
        ensure!(!queues.is_empty(), "{INTERFACE} has no queues");
        for queue in queues {
            ensure!(
                queue["zero_copy"] == true,
                "queue {} of {} is not in zero-copy mode: {queue}",
                queue["queue"],
                host.name()
            );
        }
        reports.push(report);
    }
    Ok(json!({"left": reports[0], "right": reports[1], "huge_pages": qemu::HUGE_PAGES}))
}
