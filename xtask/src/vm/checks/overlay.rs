//! The check `overlay`: what a landing zone's memory holds before, after each packet, and at the end, on the driver's zero-copy path.
//!
//! `lm-check overlay` receives a message packet by packet, and fails where a byte of its memory is not what geometry says.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::pair::two_cards;
use crate::bed::{Launch, ip};
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

/// Two cards of this namespace, set up, in a guest that sends nothing by itself.
#[derive(Debug)]
pub(super) struct Pair([String; 2]);

impl Pair {
    pub(super) fn of(device: Device) -> Result<Pair> {
        let cards = two_cards(device)?.context("this check is of a device with a driver")?;
        // IPv6 would send packets of its own over the link.
        let _ = std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
        let pair = Pair(cards);
        let up = |name: &String| format!("link set {name} mtu 1500 up");
        ip::batch(None, &pair.0.each_ref().map(up)).context("cannot set up the cards")?;
        Ok(pair)
    }

    /// Runs `lm-check overlay` from the first to the second card.
    pub(super) fn overlay(&self) -> Result<Value> {
        let [from, to] = &self.0;
        let program = Launch::new("/bin/lm-check").args(["overlay", "--from", from, "--interface", to]);
        program.spawn()?.finish()?.json().context("lm-check overlay")
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let down = |name: &String| format!("link set {name} down");
        // Whoever takes them next sets them up anew.
        let _ = ip::batch(None, &self.0.each_ref().map(down));
    }
}

pub(super) fn check(_: &Plan, device: Device) -> Result<()> {
    judge(&Pair::of(device)?.overlay()?)
}

fn judge(report: &Value) -> Result<()> {
    ensure!(
        report["zero_copy_send"] == true && report["zero_copy_receive"] == true,
        "not in zero-copy mode: {report}"
    );
    let footprint = &report["footprint"];
    let written = |name: &str| footprint[name].as_u64().context("a footprint");
    // virtio's header has 12 bytes; the last two are written only where packets may have several buffers.
    let prefixes: &[(u64, u64)] = match report["driver"].as_str() {
        Some("virtio_net") => &[(12, 10), (12, 12), (10, 10)],
        _ => &[(0, 0)],
    };
    let prefix = (written("prefix_len")?, written("prefix_written")?);
    ensure!(
        prefixes.contains(&prefix),
        "the driver writes beside packets: {report}"
    );
    ensure!(written("packets")? >= 200, "too few lengths were tried: {report}");
    // Two windows of four, each in reverse; the end of the first is put back.
    ensure!(
        report["order"] == json!([3, 2, 1, 0, 7, 6, 5, 4]) && report["tails_restored"] == 1,
        "packets came otherwise: {report}"
    );
    Ok(())
}
