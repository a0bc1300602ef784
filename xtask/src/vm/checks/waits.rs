//! Round trips of LM that wait for a timer: a sleeping end that nobody woke, or an end that repeats what was not lost.
//!
//! The shortest such timer is a sleeper's, ten milliseconds (`WAIT_STEP` of dataplane/src/endpoint.rs); a round trip
//! takes three at most here, with interrupts held back, too.

use anyhow::{Result, ensure};
use serde_json::Value;

use super::card::{DRIVERS_OWN, lm_bench_compare, set_usecs};
use super::pair::hosts;
use crate::bed::Bed;
use crate::vm::devices::Device;
use crate::vm::protocol::{Plan, Spoil};
use crate::vm::qemu::Clock;

const SYSTEMS: [&str; 2] = ["lm", "lm --idle default"];
/// One packet, the most that goes without a session, a few fragments, many.
const SIZES: [u64; 4] = [64, 1024, 7168, 65_536];
const ROUND_TRIPS: u32 = 20;
const TIMER_NS: u64 = 10_000_000;
/// Longer than any command here takes, in seconds.
const LIMIT: u32 = 230;

/// `ethtool -C IF rx-usecs` and `tx-usecs` of igb: none, and a quarter of a millisecond, as QEMU has intervals last 4.1
/// times as long.
const INTERVALS: [u32; 2] = [0, 60];
/// What has a packet of igb's wait for longer than a timer: 41 ms.
const SPOILED: [u32; 1] = [10_000];

/// Every length, polling and sleeping, interrupts held back and not.
pub(super) fn check(plan: &Plan, device: Device) -> Result<()> {
    let bed = hosts(device, false)?;
    bed.introduce()?;
    if device != Device::Igb {
        // Zero-copy mode is on taps there: packets wait for this machine, whatever the guest's clock is.
        return measure(&bed, Clock::Real);
    }
    let intervals = match plan.spoil {
        Some(Spoil::Interrupts) => &SPOILED[..],
        _ => &INTERVALS,
    };
    let found = intervals.iter().try_for_each(|&usecs| {
        set_usecs(&bed, usecs, false)?;
        measure(&bed, plan.clock)
    });
    // The card keeps its setting when the bed has gone.
    set_usecs(&bed, DRIVERS_OWN, false)?;
    found
}

fn measure(bed: &Bed, clock: Clock) -> Result<()> {
    let sizes = SIZES.map(|size| size.to_string()).join(",");
    let line = format!(
        "--tasks round-trips --rounds 1 --sizes {sizes} --count {ROUND_TRIPS} --seconds 5 --mode zero-copy"
    );
    let (ended, report) = lm_bench_compare(bed, LIMIT, &SYSTEMS.join(","), &line)?;
    ensure!(ended.status.success(), "{line}: {}", ended.stderr.trim());
    judge(&report, clock)
}

/// Where packets have the guest's time, and that is instructions, no round trip takes as long as a timer; in this
/// machine's, where its other work shows, half of them do not.
fn judge(report: &Value, clock: Clock) -> Result<()> {
    let figure = match clock {
        Clock::Instructions => "max_ns",
        Clock::Real => "p50_ns",
    };
    let rows = report["rows"].as_array().map_or(&[][..], Vec::as_slice);
    for system in SYSTEMS {
        for size in SIZES {
            let row = rows
                .iter()
                .find(|row| row["system"] == system && row["size"] == size);
            let took = row.and_then(|row| row["rounds"][0][figure].as_f64());
            let Some(took) = took else {
                anyhow::bail!(
                    "{system} has no round trips of {size} bytes: {} {}",
                    report["absent"],
                    report["failures"]
                );
            };
            ensure!(
                took < TIMER_NS as f64,
                "{system} waited for a timer: {figure} of {size} bytes is {:.1} ms",
                took / 1e6
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(longest: f64) -> Value {
        let rounds = json!([{"p50_ns": 2e6, "max_ns": longest}]);
        let row = |system: &str, size: u64| json!({"system": system, "size": size, "rounds": rounds});
        let rows: Vec<Value> = SYSTEMS
            .iter()
            .flat_map(|system| SIZES.map(|size| row(system, size)))
            .collect();
        json!({ "rows": rows })
    }

    #[test]
    fn one_late_round_trip_is_enough_where_instructions_are_counted() {
        judge(&report(3e6), Clock::Instructions).unwrap();
        judge(&report(12e6), Clock::Real).unwrap();
        let error = judge(&report(12e6), Clock::Instructions).unwrap_err().to_string();
        assert!(
            error.contains(Spoil::Interrupts.words()) && error.contains("12.0 ms"),
            "{error}"
        );
    }

    #[test]
    fn a_length_without_figures_is_named() {
        let mut report = report(3e6);
        report["rows"].as_array_mut().unwrap().pop();
        let error = judge(&report, Clock::Real).unwrap_err().to_string();
        assert!(
            error.contains("lm --idle default has no round trips of 65536 bytes"),
            "{error}"
        );
    }
}
