//! Bare AF_XDP between two cards, in both modes: the limit that LM is measured against must itself run where LM does.

use anyhow::{Context, Result, ensure};

use super::card::{self, DRIVERS_OWN, Row, What};
use crate::vm::devices::Device;
use crate::vm::guest::cards;
use crate::vm::protocol::{Mode, Plan};

/// UDP payload of a packet, in bytes.
const PAYLOAD: u64 = 1000;

/// Round trips from the first packet on, though the card loses its link when the program comes, and a stream; copied, and in zero-copy mode.
pub(super) fn check(_plan: &Plan, device: Device) -> Result<()> {
    let driver = device
        .driver()
        .context("this check is of a device with a driver")?;
    let taps = device == Device::VirtioNet && cards(driver).iter().all(|card| card.rx_queues > 1);
    for mode in [Mode::Copy, Mode::ZeroCopy] {
        for what in [What::RoundTrips, What::Stream] {
            let report = card::measure(&Row {
                device,
                system: "bare".to_owned(),
                mode: Some(mode),
                what,
                size: PAYLOAD,
                rounds: 1,
                usecs: DRIVERS_OWN,
                shared: false,
                taps,
            })?;
            let round = &report["rounds"][0];
            let bytes = round["bytes"].as_u64();
            ensure!(
                bytes > Some(0) && bytes == round["messages"].as_u64().map(|count| count * PAYLOAD),
                "{}, {}: {report}",
                mode.option(),
                what.name()
            );
        }
    }
    Ok(())
}
