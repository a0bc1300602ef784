//! One row of `cargo xtask bench card`, in the guest: a system of `lm-bench` at one length between two cards, on a bed of its own.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::pair::{await_link, ethtool, hosts, set_queues, share_instances, spread_evenly, steer};
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Bed, Host, INTERFACE, Launch, Output};
use crate::vm::devices::Device;
use crate::vm::protocol::Mode;
use crate::vm::qemu::VIRTIO_QUEUES;

/// Round trips of a round, and the longest that they may take.
pub const ROUND_TRIPS: u32 = 100;
const ROUND_TRIPS_SECONDS: f64 = 0.5;
/// A stream's time that does not count, in seconds. In less, and in less that counts, rounds of LM's copy mode differ by 10 %.
pub const WARM_UP: f64 = 0.1;
/// A stream's time that counts, in seconds.
pub const STREAM_SECONDS: f64 = 0.5;
/// For igb's `ethtool -C IF rx-usecs` and `tx-usecs`, of which QEMU makes 41 µs (see `interrupts`). The driver's own setting (3) adapts to the length of
/// packets, to 0.8 ms here: a stream of LM falls to a fifth by it, and kernel UDP loses nearly everything. In zero-copy mode packets leave by the
/// interrupt of the transmit queue, so that `tx-usecs` is a packet's delay. Without any (0) each packet has an interrupt, and kernel UDP's receiver
/// does nothing else.
pub const USECS: u32 = 10;

/// What is measured, as `lm-bench compare --tasks` calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// One way, as much as goes.
    Stream,
    /// One message to and fro.
    RoundTrips,
    /// 64 bytes to and fro beside a stream of longer messages, on the same two threads.
    Beside,
}

impl What {
    /// As tables show it.
    pub const fn name(self) -> &'static str {
        match self {
            What::Stream => "stream",
            What::RoundTrips => "round trips",
            What::Beside => "round trips beside",
        }
    }

    /// Of a bare socket of `lm-bench`, where there are two.
    const fn bare_queue(self) -> u32 {
        match self {
            What::Stream => 1,
            What::RoundTrips | What::Beside => 0,
        }
    }
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The cards.
    pub device: Device,
    /// Of `lm-bench`.
    pub system: String,
    /// How packets pass between driver and LM; `None` for whatever else.
    pub mode: Option<Mode>,
    /// What is measured.
    pub what: What,
    /// Message length in bytes.
    pub size: u64,
    /// How often.
    pub rounds: u32,
    /// For `ethtool -C IF rx-usecs` and `tx-usecs` of igb.
    pub usecs: u32,
    /// Whether each queue of igb has one NAPI instance for both ways, as many cards have, and not one for each.
    #[serde(default)]
    pub shared: bool,
    /// Whether taps of the host join the cards, on which virtio-net has two queues.
    pub taps: bool,
}

impl Row {
    /// `igb lm copy stream 7168`.
    pub fn name(&self) -> String {
        let mode = self.mode.map_or("", Mode::option);
        let bed = match (self.taps, self.shared) {
            (true, _) => "taps",
            (false, true) => "shared",
            (false, false) => "",
        };
        let words = [self.device.name(), bed, &self.system, mode, self.what.name()];
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        format!("{} {}", words.join(" "), self.size)
    }

    /// It has failed after so many seconds, of the guest's clock and of the host's.
    pub fn limit_s(&self) -> u32 {
        60 + 40 * self.rounds
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

/// Has the packets for a bare socket come to its queue, until it is taken back; whoever else receives sees to it.
fn steer_bare(bed: &Bed, row: &Row, begins: bool) -> Result<()> {
    let is_bare = row.system == "bare";
    for host in [bed.left(), bed.right()].into_iter().filter(|_| is_bare) {
        match row.device {
            // The card's RSS table names that queue alone.
            Device::Igb if begins => {
                let (name, queue) = (host.name(), row.what.bare_queue());
                ensure!(steer(host, queue), "{name} takes no RSS table for queue {queue}");
            }
            Device::Igb => spread_evenly(host)?,
            // The card has no other queue. When an XDP program comes to a virtio-net card whose table somebody has set,
            // the driver names the number of queues once more (`virtnet_set_queues`, drivers/net/virtio_net.c), and
            // QEMU has no table from then on (`virtio_net_handle_mq`, hw/net/virtio-net.c): tun chooses a queue by its
            // own hash.
            Device::VirtioNet if row.taps => set_queues(host, if begins { 1 } else { VIRTIO_QUEUES })?,
            Device::VirtioNet | Device::Veth => {}
        }
    }
    Ok(())
}

/// A card's interrupts come to its host's own core, and at the interval that the row asks for.
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
        Device::Igb => set_usecs(bed, row.usecs, row.shared),
        Device::VirtioNet | Device::Veth => Ok(()),
    }
}

/// What `lm-bench` found.
fn compare(bed: &Bed, row: &Row) -> Result<Value> {
    let seconds = match row.what {
        What::RoundTrips | What::Beside => ROUND_TRIPS_SECONDS,
        What::Stream => STREAM_SECONDS,
    };
    let line = format!(
        "--tasks {} --sizes {} --mode {} --count {ROUND_TRIPS} --rounds {} --warm-up {WARM_UP} --seconds {seconds}",
        row.what
            .to_possible_value()
            .context("a task of lm-bench")?
            .get_name(),
        row.size,
        row.mode.unwrap_or(Mode::Auto).option(),
        row.rounds,
    );
    let (ended, report) = lm_bench_compare(bed, row.limit_s() - 10, &row.system, &line)?;
    Ok(json!({
        "rounds": report["rows"][0]["rounds"],
        "mode": report["links"][0]["mode"],
        "offloads": report["links"][0]["offloads"],
        "failures": report["failures"],
        "absent": report["absent"],
        "error": (!ended.status.success()).then(|| ended.stderr.trim().lines().last().unwrap_or_default().to_owned()),
    }))
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
    let mut server = bed.right().spawn(lm_bench(&line))?;
    server.await_text("ready")?;
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
            system: "lm --idle default".to_owned(),
            mode: Some(Mode::Copy),
            what: What::RoundTrips,
            size: 7168,
            rounds: 2,
            usecs: USECS,
            shared: false,
            taps: false,
        };
        assert_eq!(row.name(), "virtio-net lm --idle default copy round trips 7168");
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row);
        let udp = Row {
            mode: None,
            system: "udp-gso".to_owned(),
            taps: true,
            ..row
        };
        assert_eq!(udp.name(), "virtio-net taps udp-gso round trips 7168");
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
