//! How a program learns of packets on the emulated igb: by interrupts that the card holds back (LM §2.1 and figure 4), or by looking
//! itself (LM §5). `lm-bench` measures under each setting.

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use super::card::LmBench;
use super::pair::{hosts, require_zero_copy};
use crate::bed::{Bed, Host, INTERFACE, Launch};
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

/// What igb comes with: it adapts the interval to the traffic (`IGB_DEFAULT_ITR`).
pub(super) const DRIVERS_OWN: u32 = 3;
/// Longer than any command here takes, in seconds.
const LIMIT: u32 = 880;

/// A way to learn of packets: its name, `ethtool -C IF rx-usecs` on both hosts, and systems of `lm-bench`.
type Setting = (&'static str, u32, &'static [&'static str]);

/// A fixed interval, because the driver's own setting becomes short for exactly those packets that would show the delay. The driver of
/// the paper's PRO/1000 had 125 µs (e1000's `InterruptThrottleRate` of 8000), a few of its round trips; here a round trip takes a
/// millisecond, and 125 µs between two interrupts hold nothing back. QEMU has the interval last 4.1 times as long as it is asked
/// for: igb writes it in quarters of a microsecond, and each counts for 1024 ns (`igb_intrmgr_rearm_timer` of hw/net/igb_core.c in
/// QEMU 10.0). So these 500 µs are two milliseconds, again some round trips.
const COALESCING: Setting = ("coalescing", 500, &["lm-sleeping", "udp-blocking"]);
const POLLING: Setting = ("polling", 0, &["lm", "udp-spinning"]);

/// Round trips of 64 bytes, and messages of a stream.
const SIZES: [(&str, u64); 2] = [("latency", 64), ("throughput", 65_536)];

/// Both settings, a few round trips and a short stream each: the cards take the setting and keep it, every program runs to its end, and what
/// the reports say of the link is what the driver has.
pub(super) fn check(_plan: &Plan, device: Device) -> Result<Value> {
    require_zero_copy(device)?;
    let bed = hosts(device, false)?;
    bed.introduce()?;
    let measured = measure(&bed);
    // The card keeps its setting when the bed has gone.
    set_both(&bed, DRIVERS_OWN)?;
    measured
}

/// Measures under each setting; the reports of `lm-bench` by setting and command.
fn measure(bed: &Bed) -> Result<Value> {
    let bench = LmBench::serve(bed, LIMIT, "")?;
    let mut reports = Map::new();
    for (name, rx_usecs, systems) in [COALESCING, POLLING] {
        set_both(bed, rx_usecs)?;
        for (command, size) in SIZES {
            let line = format!(
                "{command} --systems {} --sizes {size} --seconds 0.1 --count 5",
                systems.join(",")
            );
            let (ended, report) = bench.run(&line)?;
            ensure!(ended.status.success(), "{line}: {}", ended.stderr.trim());
            ensure_measured(&report, systems, &[size]).with_context(|| format!("{name}, {command}"))?;
            let link = &report["links"][0];
            ensure!(
                link["mode"] == "native zero-copy" && link["driver"] == "igb",
                "the link of {name} is {link}"
            );
            reports.insert(format!("{name}-{command}"), report);
        }
        for host in [bed.left(), bed.right()] {
            let now = shown_usecs(&shown(host, INTERFACE)?, "rx-usecs");
            ensure!(
                now == Some(rx_usecs),
                "somebody set rx-usecs {rx_usecs}, and LM left {now:?}"
            );
        }
    }
    bench.stop()?;
    Ok(json!({"reports": reports}))
}

/// Whether every system has figures at every size: one that fails is no error of `lm-bench`.
fn ensure_measured(report: &Value, systems: &[&str], sizes: &[u64]) -> Result<()> {
    let rows = report["rows"].as_array().map_or(&[][..], Vec::as_slice);
    for system in systems {
        for size in sizes {
            let found = rows.iter().any(|row| {
                row["system"] == *system
                    && row["size"] == *size
                    && row["rounds"].as_array().is_some_and(|rounds| !rounds.is_empty())
            });
            ensure!(
                found,
                "{system} has no figures at {size} bytes: {} {}",
                report["absent"],
                report["failures"]
            );
        }
    }
    Ok(())
}

fn set_both(bed: &Bed, rx_usecs: u32) -> Result<()> {
    [bed.left(), bed.right()]
        .into_iter()
        .try_for_each(|host| set_usecs(host, INTERFACE, "rx-usecs", rx_usecs))
}

/// Sets `rx-usecs` or `tx-usecs` of a card, and asks it.
pub(super) fn set_usecs(host: &Host, interface: &str, which: &str, usecs: u32) -> Result<()> {
    let set = Launch::new("ethtool").args(["-C", interface, which, &usecs.to_string()]);
    // It calls it an error when nothing changes.
    let set = host.spawn(set)?.outcome()?;
    let shown = shown(host, interface)?;
    ensure!(
        shown_usecs(&shown, which) == Some(usecs),
        "{} would not have {which} {usecs}: {}{shown}",
        host.name(),
        set.stderr,
    );
    Ok(())
}

/// What `ethtool -c` says.
fn shown(host: &Host, interface: &str) -> Result<String> {
    let shown = Launch::new("ethtool").args(["-c", interface]);
    Ok(host.spawn(shown)?.finish()?.stdout)
}

/// `rx-usecs` or `tx-usecs` in what `ethtool -c` says.
fn shown_usecs(text: &str, which: &str) -> Option<u32> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(name, _)| *name == which)?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cards_own_word_is_read() {
        let text = "Coalesce parameters for lm0:\nAdaptive RX: n/a  TX: n/a\nstats-block-usecs:\tn/a\n\nrx-usecs:\t125\nrx-frames:\tn/a\n\
                    rx-usecs-irq:\tn/a\n\ntx-usecs:\t10\n";
        assert_eq!(shown_usecs(text, "rx-usecs"), Some(125));
        assert_eq!(shown_usecs(text, "tx-usecs"), Some(10));
        assert_eq!(shown_usecs("rx-usecs:\tn/a\n", "rx-usecs"), None);
    }

    #[test]
    fn a_system_without_figures_is_named() {
        let report = json!({
            "rows": [
                {"system": "lm", "size": 64, "rounds": [{"at": 0}]},
                {"system": "lm", "size": 7168, "rounds": [{"at": 0}]},
                {"system": "udp-spinning", "size": 64, "rounds": []},
            ],
            "absent": [{"system": "udp-spinning", "why": "an answer is missing"}],
        });
        ensure_measured(&report, &["lm"], &[64, 7168]).unwrap();
        let error = ensure_measured(&report, &["lm", "udp-spinning"], &[64])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("udp-spinning has no figures at 64 bytes")
                && error.contains("an answer is missing"),
            "{error}"
        );
    }
}
