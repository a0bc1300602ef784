//! Packets a second in zero-copy mode and in copy mode, on the same driver, in turns.

use anyhow::{Context, Result, ensure};
use lm_measure::statistics::Summary;
use serde_json::{Value, json};

use super::pair::Pair;
use crate::vm::devices::Device;
use crate::vm::protocol::{Mode, Plan};

/// Measurements in each mode.
const ROUNDS: usize = 7;
/// Length of the messages, and of the payload of a fragment at MTU 1500, in bytes.
const MESSAGE_LEN: u64 = 2 << 20;
const PAYLOAD_LEN: f64 = 1448.0;

/// What zero-copy mode has to reach, as a multiple of copy mode.
fn asked(device: Device) -> f64 {
    match device {
        Device::Igb => 1.3,
        Device::VirtioNet => 1.8,
        Device::Veth => f64::INFINITY,
    }
}

/// Measures both modes in turns; fails when the median of the rounds' ratios is too low.
pub(super) fn packets_per_second(plan: &Plan, device: Device) -> Result<Value> {
    let mut pair = Pair::new(plan, device)?;
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        let mut modes = [(0, Mode::ZeroCopy), (1, Mode::Copy)];
        if round % 2 == 1 {
            modes.reverse();
        }
        for (index, mode) in modes {
            pair.mode = mode;
            let packets = measure(&pair).with_context(|| format!("round {round}, {}", mode.option()))?;
            samples[index].push(packets);
        }
    }
    let ratios: Vec<f64> = samples[0]
        .iter()
        .zip(&samples[1])
        .map(|(zero, copy)| zero / copy)
        .collect();
    let summary = |values: &[f64]| Summary::of(values).context("no figures");
    let [zero_copy, copy, ratio] = [summary(&samples[0])?, summary(&samples[1])?, summary(&ratios)?];
    let asked = asked(pair.device);
    let text = format!(
        "{:.0} packets/s in zero-copy mode, {:.0} in copy mode, {:.2} × (median of {ROUNDS} rounds' ratios; asked: {asked} ×)",
        zero_copy.median, copy.median, ratio.median
    );
    ensure!(
        ratio.median >= asked,
        "too slow: {text}; ratios: {:.2?}",
        ratio.samples
    );
    let report = json!({
        "summary": text,
        "message_bytes": MESSAGE_LEN,
        "zero_copy_packets_per_s": zero_copy.to_json(),
        "copy_packets_per_s": copy.to_json(),
        "ratio": ratio.to_json(),
        "asked": asked,
    });
    Ok(report)
}

/// A stream; full packets that arrived in a second.
fn measure(pair: &Pair) -> Result<f64> {
    let (receiver, sender) = pair.start_stream(MESSAGE_LEN, [0.5, 3.0])?;
    let received = receiver.finish()?.json().context("the far end")?;
    let sent = sender.finish()?.json().context("the near end")?;
    pair.prove_mode(&sent, &received)?;
    ensure!(received["lost_messages"] == 0, "messages were lost: {received}");
    let number = |name: &str| {
        received[name]
            .as_f64()
            .with_context(|| format!("no {name}: {received}"))
    };
    Ok(number("bytes")? / PAYLOAD_LEN / number("seconds")?)
}
