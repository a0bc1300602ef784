//! Bare AF_XDP between two cards, in both modes: the limit that LM is measured against must itself run where LM does.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::pair::{Pair, Steering, await_detached, await_link, require_zero_copy};
use crate::bed::{Host, INTERFACE, Launch};
use crate::vm::devices::Device;
use crate::vm::guest::cards;
use crate::vm::protocol::Plan;

/// Round trips that count.
const ROUND_TRIPS: u64 = 5;
/// UDP payload of a packet, in bytes.
const PAYLOAD: u64 = 1000;

/// Round trips from the first packet on, though the card loses its link when the program comes, and a stream; copied, and in zero-copy mode.
pub(super) fn check(plan: &Plan, device: Device) -> Result<Value> {
    require_zero_copy(device)?;
    let has_queues = device
        .driver()
        .is_some_and(|driver| cards(driver).iter().all(|card| card.rx_queues > 1));
    let pair = Pair::new(plan, device)?;
    let ends = [pair.bed.left(), pair.bed.right()];
    let steering = Steering::of_bare(device, 0, has_queues);
    ends.into_iter().try_for_each(|host| steering.begin(host))?;
    let measured = measure(&pair);
    ends.into_iter().try_for_each(|host| steering.end(host))?;
    measured
}

fn measure(pair: &Pair) -> Result<Value> {
    let mut found = Vec::new();
    for mode in ["", " --zero-copy"] {
        let both = format!("--interface {INTERFACE} --posted 512{mode}");
        let near = format!("{both} --payload {PAYLOAD} {}", addresses(pair)?);
        // What QEMU still keeps of a stream while a card begins anew is no answer.
        let pong = start_far(pair, &format!("bare pong {both} --port 7302"))?;
        let round_trips = run_near(
            pair,
            &format!("bare ping {near} --port 7302 --count {ROUND_TRIPS}"),
        )?;
        pong.stop()?;
        ensure!(round_trips["messages"] == ROUND_TRIPS, "{round_trips}");
        let receiver = start_far(pair, &format!("bare recv {both} --warmup 0.05 --seconds 0.2"))?;
        run_near(pair, &format!("bare send {near} --seconds 1"))?;
        let received = receiver.finish()?.json().context("bare-recv")?;
        let number = |name: &str| {
            received[name]
                .as_u64()
                .with_context(|| format!("no {name}: {received}"))
        };
        let packets = number("messages")?;
        ensure!(packets > 0 && number("bytes")? == packets * PAYLOAD, "{received}");
        found.push(json!({"round_trips": round_trips, "stream": received}));
    }
    Ok(json!({"copied": found[0], "zero_copy": found[1]}))
}

fn start_far(pair: &Pair, line: &str) -> Result<crate::bed::Program> {
    await_detached(pair.bed.right())?;
    await_link(&pair.bed)?;
    let mut program = pair.bed.right().spawn(lm_bench(line).core(1))?;
    program.await_text("ready")?;
    Ok(program)
}

fn run_near(pair: &Pair, line: &str) -> Result<Value> {
    await_detached(pair.bed.left())?;
    await_link(&pair.bed)?;
    let program = pair.bed.left().spawn(lm_bench(line).core(0))?;
    program.finish()?.json().with_context(|| line.to_owned())
}

fn lm_bench(line: &str) -> Launch {
    Launch::new("/bin/lm-bench").args(line.split_whitespace())
}

/// Whom the near end talks to.
fn addresses(pair: &Pair) -> Result<String> {
    let [near, far] = [pair.bed.left(), pair.bed.right()];
    let mac = |host: &Host| host.read_file(&format!("/sys/class/net/{INTERFACE}/address"));
    Ok(format!(
        "--from {} --from-mac {} --to {} --to-mac {}",
        near.address(),
        mac(near)?,
        far.address(),
        mac(far)?
    ))
}
