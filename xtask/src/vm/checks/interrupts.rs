//! How a program learns of packets on the emulated igb: by interrupts that the card holds back (LM §2.1 and figure 4), or by looking
//! itself (LM §5). `lm-bench` measures under each setting.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::pair::{await_link, hosts, require_zero_copy};
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Bed, Host, INTERFACE, Launch};
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

/// What igb comes with: it adapts the interval to the traffic (`IGB_DEFAULT_ITR`).
const DRIVERS_OWN: u32 = 3;
/// As long as the kernel's stream takes of which interrupts are counted.
const COUNTED_SECONDS: f64 = 1.0;
/// Longer than any command here takes.
const LIMIT: Duration = Duration::from_secs(880);
/// A way to learn of packets, and who is measured in it.
#[derive(Clone, Copy, Debug)]
struct Setting {
    name: &'static str,
    /// `ethtool -C IF rx-usecs`, on both hosts.
    rx_usecs: u32,
    /// Of `lm-bench`.
    systems: &'static [&'static str],
}

/// A fixed interval, because the driver's own setting becomes short for exactly those packets that would show the delay. The driver of
/// the paper's PRO/1000 had 125 µs (e1000's `InterruptThrottleRate` of 8000), a few of its round trips; here a round trip takes a
/// millisecond, and 125 µs between two interrupts hold nothing back. QEMU has the interval last 4.1 times as long as it is asked
/// for: igb writes it in quarters of a microsecond, and each counts for 1024 ns (`igb_intrmgr_rearm_timer` of hw/net/igb_core.c in
/// QEMU 10.0). So these 500 µs are two milliseconds, again some round trips.
const COALESCING: Setting = Setting {
    name: "coalescing",
    rx_usecs: 500,
    systems: &["lm-sleeping", "udp-blocking"],
};

const POLLING: Setting = Setting {
    name: "polling",
    rx_usecs: 0,
    systems: &["lm", "udp-spinning"],
};

/// Round trips of 64 bytes, and messages of a stream.
const SIZES: [(&str, u64); 2] = [("latency", 64), ("throughput", 65_536)];

/// Both settings, a few round trips and a short stream each: the cards take the setting, every program runs to its end, and what the
/// reports say of the link is what the driver has.
pub(super) fn check(_plan: &Plan, device: Option<Device>) -> Result<Value> {
    require_zero_copy(device.context("this check is of a device")?)?;
    let measured = measure(device)?;
    for (name, report) in measured["reports"].as_object().into_iter().flatten() {
        let link = &report["links"][0];
        ensure!(
            link["mode"] == "native zero-copy" && link["driver"] == "igb",
            "the link of {name} is {link}"
        );
    }
    Ok(measured)
}

/// Measures under each setting; the reports of `lm-bench` by setting and command.
fn measure(device: Option<Device>) -> Result<Value> {
    let bed = hosts(device.context("this check is of a device")?, false)?;
    bed.introduce()?;
    let measured = measure_on(&bed);
    // The card keeps its setting when the bed has gone.
    set_rx_usecs(&bed, DRIVERS_OWN)?;
    measured
}

fn measure_on(bed: &Bed) -> Result<Value> {
    let serve = lm_bench().args(["serve", "--core", "1"]);
    let serve = serve.args([
        "--bind",
        &format!("{}:7170", bed.right().address()),
        "--from-anyone",
    ]);
    let mut server = bed.right().spawn(serve)?;
    server.await_text("ready")?;
    let (mut reports, mut lines, mut interrupts) = (Map::new(), Vec::new(), Vec::new());
    for setting in [COALESCING, POLLING] {
        set_rx_usecs(bed, setting.rx_usecs)?;
        let count = count_interrupts(bed)?;
        for (command, size) in SIZES {
            let report =
                run(bed, &setting, command, size).with_context(|| format!("{}, {command}", setting.name))?;
            ensure_measured(&report, setting.systems, &[size])?;
            reports.insert(format!("{}-{command}", setting.name), report);
        }
        lines.push(format!("{}: {}", setting.name, count.words()));
        interrupts.push(json!({
            "setting": setting.name,
            "rx_usecs": setting.rx_usecs,
            "interrupts": count.interrupts,
            "packets": count.packets,
            "seconds": count.seconds,
        }));
    }
    server.stop()?;
    Ok(json!({"summary": lines.join("; "), "interrupts": interrupts, "reports": reports}))
}

fn lm_bench() -> Launch {
    Launch::new("/bin/lm-bench").time_limit(LIMIT)
}

/// One command of `lm-bench` from the left host to the right one; its report.
fn run(bed: &Bed, setting: &Setting, command: &str, size: u64) -> Result<Value> {
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "interrupts")?;
    let file = folder.join("report.json");
    let launch = lm_bench()
        .args([command, &bed.right().address().to_string(), "--core", "0"])
        .args([
            "--systems",
            &setting.systems.join(","),
            "--sizes",
            &size.to_string(),
        ])
        .args(["--seconds", "0.1", "--count", "5"])
        .arg("--json")
        .arg(&file);
    bed.left().spawn(launch)?.finish()?;
    let text = std::fs::read_to_string(&file).context("no report of lm-bench")?;
    serde_json::from_str(&text).context("the report of lm-bench is no JSON")
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
                "{system} has no figures at {size} bytes: {}",
                report["absent"]
            );
        }
    }
    Ok(())
}

/// Sets both cards, and asks them.
pub(super) fn set_rx_usecs(bed: &Bed, rx_usecs: u32) -> Result<()> {
    for host in [bed.left(), bed.right()] {
        let value = rx_usecs.to_string();
        let set = Launch::new("ethtool").args(["-C", INTERFACE, "rx-usecs", &value]);
        // It calls it an error when nothing changes.
        let set = host.spawn(set)?.outcome()?;
        let shown = host
            .spawn(Launch::new("ethtool").args(["-c", INTERFACE]))?
            .finish()?;
        ensure!(
            shown_rx_usecs(&shown.stdout) == Some(rx_usecs),
            "{} would not have rx-usecs {rx_usecs}: {}{}",
            host.name(),
            set.stderr,
            shown.stdout
        );
    }
    Ok(())
}

/// `rx-usecs` in what `ethtool -c` says.
fn shown_rx_usecs(text: &str) -> Option<u32> {
    let line = text.lines().find_map(|line| line.strip_prefix("rx-usecs:"))?;
    line.trim().parse().ok()
}

/// Interrupts and packets of a receiving card.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Count {
    interrupts: u64,
    packets: u64,
    seconds: f64,
}

impl Count {
    fn words(&self) -> String {
        format!(
            "{:.0} interrupts a second of the receiving card for {:.0} packets a second",
            self.interrupts as f64 / self.seconds,
            self.packets as f64 / self.seconds
        )
    }
}

/// Counts interrupts of the right host's card while kernel UDP sends to it as fast as it can: what the setting comes to here.
fn count_interrupts(bed: &Bed) -> Result<Count> {
    await_link(bed)?;
    let stream = lm_bench()
        .args(["throughput", &bed.right().address().to_string(), "--core", "0"])
        .args(["--systems", "udp-blocking", "--sizes", "1K"])
        .args(["--seconds", &COUNTED_SECONDS.to_string()]);
    let irqs = irqs(bed.right())?;
    let read = || -> Result<(Instant, u64, u64)> {
        let text = std::fs::read_to_string("/proc/interrupts").context("cannot read /proc/interrupts")?;
        let packets = bed
            .right()
            .read_file(&format!("/sys/class/net/{INTERFACE}/statistics/rx_packets"))?;
        let packets = packets.parse().context("rx_packets is no number")?;
        Ok((Instant::now(), interrupts_in(&text, &irqs), packets))
    };
    let idle = read()?;
    let mut sending = bed.left().spawn(stream)?;
    // From when the stream runs to the last packet seen.
    let (mut first, mut last) = (None, idle);
    while !sending.has_ended()? {
        let now = read()?;
        // The control connection has fewer.
        if first.is_none() && now.2 > idle.2 + 100 {
            first = Some(now);
        }
        if now.2 > last.2 + 10 {
            last = now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    sending.finish()?;
    let Some(first) = first.filter(|first| last.0 > first.0) else {
        bail!("no stream was seen on {}", bed.right().name());
    };
    Ok(Count {
        interrupts: last.1 - first.1,
        packets: last.2 - first.2,
        seconds: (last.0 - first.0).as_secs_f64(),
    })
}

/// Numbers of a card's interrupts.
pub(super) fn irqs(host: &Host) -> Result<Vec<u32>> {
    host.enter(|| {
        let device = Path::new("/sys/class/net").join(INTERFACE).join("device");
        // A virtio device hangs on the PCI device that has them.
        let folders = [device.join("msi_irqs"), device.join("../msi_irqs")];
        let entries = (folders.iter())
            .find_map(|folder| std::fs::read_dir(folder).ok())
            .with_context(|| format!("{} has no interrupts", device.display()))?;
        let numbers = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(numbers.collect())
    })
}

/// How often these interrupts have come, on all cores, by `/proc/interrupts`.
pub(super) fn interrupts_in(text: &str, irqs: &[u32]) -> u64 {
    let of_line = |line: &str| {
        let (number, rest) = line.split_once(':')?;
        let number: u32 = number.trim().parse().ok()?;
        let counts = rest.split_whitespace().map_while(|word| word.parse::<u64>().ok());
        irqs.contains(&number).then(|| counts.sum::<u64>())
    };
    text.lines().filter_map(of_line).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_of_one_card_are_counted_on_all_cores() {
        let text = "           CPU0       CPU1       \n\
                    \x20 4:       1000        200   IO-APIC    4-edge      ttyS0\n\
                    \x2024:          7          0   PCI-MSIX-0000:01:00.0    0-edge      lm0\n\
                    \x2025:         40          2   PCI-MSIX-0000:01:00.0    1-edge      lm0-TxRx-0\n\
                    \x2028:        999        999   PCI-MSIX-0000:02:00.0    1-edge      lm0-TxRx-0\n\
                    NMI:          5          5   Non-maskable interrupts\n";
        assert_eq!(interrupts_in(text, &[24, 25, 26]), 49);
        assert_eq!(interrupts_in(text, &[]), 0);
    }

    #[test]
    fn the_cards_own_word_is_read() {
        let text = "Coalesce parameters for lm0:\nAdaptive RX: n/a  TX: n/a\nstats-block-usecs:\tn/a\n\nrx-usecs:\t125\nrx-frames:\tn/a\n\
                    rx-usecs-irq:\tn/a\n\ntx-usecs:\t125\n";
        assert_eq!(shown_rx_usecs(text), Some(125));
        assert_eq!(shown_rx_usecs("rx-usecs:\tn/a\n"), None);
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

    #[test]
    fn interrupts_and_packets_are_told_by_the_second() {
        let count = Count {
            interrupts: 4000,
            packets: 30_000,
            seconds: 0.5,
        };
        assert_eq!(
            count.words(),
            "8000 interrupts a second of the receiving card for 60000 packets a second"
        );
    }
}
