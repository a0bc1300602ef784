//! Files through `lm-send` and `lm-recv`, as users send them.

use std::env::temp_dir;

use anyhow::{Context, Result};
use serde_json::Value;

use super::pair::{LANDING_QUEUE, Pair, launch, steer};
use crate::bed::Output;
use crate::content::Content;
use crate::vm::devices::Device;
use crate::vm::protocol::{COPY, Plan};

const FILE_LEN: u64 = 1 << 20;

pub(super) fn transfer(plan: &Plan, device: Device) -> Result<()> {
    let source = Content::new(&temp_dir(), FILE_LEN)?;
    pass(&Pair::new(plan, device)?, &source, COPY, "")?;
    source.ensure_same(&source.received())
}

/// Passes a file from one host to another, `options` being the sender's: the sender's report, and what the receiver
/// said.
pub(super) fn pass(pair: &Pair, source: &Content, mode: &str, options: &str) -> Result<(Value, Output)> {
    let right = pair.bed.right();
    let receiver = launch("lm-recv --json --count 1 --from-anyone", mode).arg("--output");
    // Said when the gate is attached; the control port is bound before.
    let receiver = pair.start_receiver(receiver.arg(source.received()).core(1), "listening on")?;
    // Only now: attaching an XDP program sets virtio-net's number of queues, at which QEMU forgets its table
    // (virtio_net_handle_mq of hw/net/virtio-net.c). In zero-copy mode LM steers, and on veth nothing does.
    if mode == COPY {
        steer(right, LANDING_QUEUE);
    }
    let sender = launch(&format!("lm-send --json {options}"), mode).core(0);
    let sender = sender.args(["--to", &right.address().to_string()]);
    let sent = pair.start_sender(sender.arg(&source.file))?.finish()?;
    Ok((sent.json().context("lm-send --json")?, receiver.finish()?))
}
