//! One comparison of `cargo xtask bench card`, in the guest: `lm-bench` between two cards, on a bed of its own.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::pair::{await_link, ethtool, hosts, set_queues, share_instances, spread_evenly, steer};
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Bed, Host, INTERFACE, Launch, Output};
use crate::vm::devices::Device;
use crate::vm::qemu::VIRTIO_QUEUES;

/// What is measured where options do not say otherwise. A stream's time that does not count, and that counts, in seconds: in less, rounds of LM's
/// copy mode differ by 10 %.
const EXTENT: &str = "--rounds 1 --count 100 --warm-up 0.1 --seconds 0.5";
/// For igb's `ethtool -C IF rx-usecs` and `tx-usecs`, of which QEMU makes 41 µs (see `interrupts`). The driver's own setting (3) adapts to the length of
/// packets, to 0.8 ms here: a stream of LM falls to a fifth by it, and kernel UDP loses nearly everything. In zero-copy mode packets leave by the
/// interrupt of the transmit queue, so that `tx-usecs` is a packet's delay. Without any (0) each packet has an interrupt, and kernel UDP's receiver
/// does nothing else.
const USECS: u32 = 10;

/// A comparison on cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The cards.
    pub device: Device,
    /// Whether each queue of igb has one NAPI instance for both ways, as many cards have, and not one for each.
    pub shared: bool,
    /// Whether taps of the host join the cards, on which virtio-net has two queues.
    pub taps: bool,
    /// As `lm-bench compare --systems` takes them. Bare ones have the card's first queue, and no others beside them.
    pub systems: String,
    /// More of its options.
    pub options: String,
    /// Seconds after which it has failed, of the guest's clock and of the host's.
    pub limit_s: u32,
}

impl Row {
    /// `igb lm --mode copy --tasks stream`.
    pub fn name(&self) -> String {
        let bed = match (self.taps, self.shared) {
            (true, _) => " taps",
            (false, true) => " shared",
            (false, false) => "",
        };
        format!("{}{bed} {} {}", self.device.name(), self.systems, self.options)
    }
}

/// What `lm-bench` finds of a row, on a bed of its own. In the guest.
pub(super) fn measure(row: &Row) -> Result<Value> {
    let bed = hosts(row.device, false)?;
    bed.introduce()?;
    if row.shared {
        share_instances(&bed, true)?;
    }
    prepare(&bed, row)?;
    steer_bare(&bed, row, true)?;
    await_link(&bed)?;
    let measured = compare(&bed, row);
    // The card keeps it when the bed has gone.
    steer_bare(&bed, row, false)?;
    if row.shared {
        share_instances(&bed, false)?;
    }
    measured
}

/// Has the packets for a bare socket come to its queue, until it is taken back; other receivers see to it.
fn steer_bare(bed: &Bed, row: &Row, begins: bool) -> Result<()> {
    let is_bare = row.systems.starts_with("bare");
    for host in [bed.left(), bed.right()].into_iter().filter(|_| is_bare) {
        match row.device {
            // The card's RSS table names that queue alone.
            Device::Igb if begins => {
                ensure!(steer(host, 0), "{} takes no RSS table for queue 0", host.name());
            }
            Device::Igb => spread_evenly(host)?,
            // The card has no other queue. When an XDP program comes to a virtio-net card with a table that was set,
            // the driver names the number of queues once more (`virtnet_set_queues`, drivers/net/virtio_net.c), and
            // QEMU has no table from then on (`virtio_net_handle_mq`, hw/net/virtio-net.c): tun chooses a queue by its
            // own hash.
            Device::VirtioNet if row.taps => set_queues(host, if begins { 1 } else { VIRTIO_QUEUES })?,
            Device::VirtioNet | Device::Veth => {}
        }
    }
    Ok(())
}

/// A card's interrupts come to its host's own core, and at an interval of its own.
fn prepare(bed: &Bed, row: &Row) -> Result<()> {
    for (core, host) in [bed.left(), bed.right()].into_iter().enumerate() {
        for irq in irqs(host)? {
            // The one that the card itself has may be fixed.
            let _fixed = std::fs::write(
                format!("/proc/irq/{irq}/smp_affinity"),
                format!("{:x}", 1 << core),
            );
        }
    }
    match row.device {
        Device::Igb => set_usecs(bed, USECS, row.shared),
        Device::VirtioNet | Device::Veth => Ok(()),
    }
}

/// What `lm-bench` said and kept.
fn compare(bed: &Bed, row: &Row) -> Result<Value> {
    let (ended, mut report) = lm_bench_compare(
        bed,
        row.limit_s - 10,
        &row.systems,
        &format!("{EXTENT} {}", row.options),
    )?;
    for row in report["rows"].as_array_mut().into_iter().flatten() {
        row["histogram"].take();
    }
    let error = ended.stderr.trim().lines().last().unwrap_or_default();
    let error = (!ended.status.success()).then(|| error.to_owned());
    Ok(json!({"said": ended.stdout, "report": report, "error": error}))
}

/// `lm-bench serve` on the right host of a bed, and `lm-bench compare` of these systems with these options more on the left one, within `limit_s`
/// seconds: how it ended, and its report; null where it made none. Fragments of datagrams that were lost go soon: they fill the kernel's 4 MiB for
/// them, and then no datagram of several packets comes through for 30 s (`net.ipv4.ipfrag_high_thresh`, `ipfrag_time`).
pub(super) fn lm_bench_compare(
    bed: &Bed,
    limit_s: u32,
    systems: &str,
    options: &str,
) -> Result<(Output, Value)> {
    for host in [bed.left(), bed.right()] {
        host.write_file("/proc/sys/net/ipv4/ipfrag_time", "1")?;
    }
    let (to, limit) = (bed.right().address(), Duration::from_secs(limit_s.into()));
    let lm_bench = |line: &str| {
        let launch = Launch::new("/bin/lm-bench").args(line.split_whitespace());
        launch.time_limit(limit)
    };
    let line = format!("serve --core 1 --from-anyone --bind {to}:7170");
    let server = bed.right().spawn_until(lm_bench(&line), "ready")?;
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "lm-bench")?;
    let file = folder.join("report.json");
    let launch = lm_bench(&format!("compare {to} --core 0 {options} --json")).arg(&file);
    let launch = launch.args(["--systems", systems]);
    let ended = bed.left().spawn(launch)?.outcome()?;
    server.stop()?;
    let report = match std::fs::read_to_string(&file) {
        Ok(text) => serde_json::from_str(&text).context("the report of lm-bench is no JSON")?,
        Err(_) => Value::Null,
    };
    Ok((ended, report))
}

/// Numbers of a card's interrupts; none where there is no card.
fn irqs(host: &Host) -> Result<Vec<u32>> {
    host.enter(|| {
        let device = Path::new("/sys/class/net").join(INTERFACE).join("device");
        if !device.exists() {
            return Ok(Vec::new());
        }
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

/// What igb comes with: it adapts the interval to the traffic (`IGB_DEFAULT_ITR`).
pub(super) const DRIVERS_OWN: u32 = 3;

/// Sets `rx-usecs` and `tx-usecs` of two cards, and asks them. An instance for both ways has one interval, the receive
/// queue's.
pub(super) fn set_usecs(bed: &Bed, usecs: u32, shared: bool) -> Result<()> {
    for host in [bed.left(), bed.right()] {
        for which in &["rx-usecs", "tx-usecs"][..if shared { 1 } else { 2 }] {
            // It calls it an error when nothing changes.
            let set = ethtool(host, &format!("-C {INTERFACE} {which} {usecs}"));
            let shown = ethtool(host, &format!("-c {INTERFACE}"))?;
            ensure!(
                shown_usecs(&shown, which) == Some(usecs),
                "{} would not have {which} {usecs}: {set:?} {shown}",
                host.name(),
            );
        }
    }
    Ok(())
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
    fn a_row_comes_through_the_plan_and_has_a_name() {
        let row = Row {
            device: Device::VirtioNet,
            shared: false,
            taps: true,
            systems: "lm --idle default,tcp".to_owned(),
            options: "--tasks stream".to_owned(),
            limit_s: 100,
        };
        assert_eq!(row.name(), "virtio-net taps lm --idle default,tcp --tasks stream");
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row);
    }

    #[test]
    fn the_cards_own_word_is_read() {
        let text = "Coalesce parameters for lm0:\nAdaptive RX: n/a  TX: \
                    n/a\nstats-block-usecs:\tn/a\n\nrx-usecs:\t125\nrx-frames:\tn/a\n\
                    rx-usecs-irq:\tn/a\n\ntx-usecs:\t10\n";
        assert_eq!(shown_usecs(text, "rx-usecs"), Some(125));
        assert_eq!(shown_usecs(text, "tx-usecs"), Some(10));
        assert_eq!(shown_usecs("rx-usecs:\tn/a\n", "rx-usecs"), None);
    }
}
