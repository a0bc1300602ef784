//! Bare AF_XDP between two cards, in both modes: the limit that LM is measured against must itself run where LM does.

use anyhow::{Context, Result, ensure};

use super::card::{self, Row};
use crate::vm::devices::Device;
use crate::vm::guest::cards;
use crate::vm::protocol::Plan;

/// UDP payload of a packet, in bytes.
const PAYLOAD: u64 = 1000;

/// Round trips from the first packet on, though the card loses its link when the program comes, and a stream; copied, and in zero-copy mode.
pub(super) fn check(_plan: &Plan, device: Device) -> Result<()> {
    let measured = card::measure(&Row {
        device,
        shared: false,
        taps: device == Device::VirtioNet && cards("virtio_net").iter().all(|card| card.rx_queues > 1),
        systems: "bare --queue 0 --mode copy,bare --queue 0 --mode zero-copy".to_owned(),
        options: format!("--tasks round-trips,stream --sizes {PAYLOAD} --count 5 --seconds 0.2"),
        limit_s: 200,
    })?;
    let rows = measured["report"]["rows"].as_array();
    ensure!(
        rows.map(Vec::len) == Some(4),
        "not all of it was measured: {measured}"
    );
    for row in rows.into_iter().flatten() {
        let round = &row["rounds"][0];
        let messages = round["messages"].as_u64().context("no messages")?;
        let bytes = if row["what"] == "stream" {
            messages * PAYLOAD
        } else {
            0
        };
        ensure!(messages > 0 && round["bytes"] == bytes, "{row}");
    }
    Ok(())
}
