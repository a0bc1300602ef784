//! One row of `cargo xtask bench card`, in the guest: a system of `lm-bench` at one length between two cards, on a bed of its own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::interrupts::set_usecs;
use super::pair::{Steering, await_link, hosts, share_instances};
use super::probes::Probes;
use super::sessions;
use crate::bed::leftovers::{Registered, temporary_folder};
use crate::bed::{Bed, Host, INTERFACE, Launch, Output, Program, middle};
use crate::vm::devices::Device;
use crate::vm::protocol::Mode;

/// Round trips of a round, and the longest that they may take.
pub const ROUND_TRIPS: u32 = 100;
const ROUND_TRIPS_SECONDS: f64 = 0.5;
/// A stream's time that does not count, in seconds. In less, and in less that counts, rounds of LM's copy mode differ by 10 %.
pub const WARM_UP: f64 = 0.1;
/// A stream's time that counts, in seconds.
pub const STREAM_SECONDS: f64 = 0.5;
/// The same while system calls are counted.
const COUNTED_WARM_UP: f64 = 0.05;
const COUNTED_SECONDS: f64 = 0.1;
/// Where the kernel numbers the tracepoint that each system call passes.
const SYSTEM_CALLS: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id";
/// Functions that a program's wake-ups of AF_XDP sockets call.
const WAKEUPS: [&str; 3] = ["xsk_sendmsg", "xsk_recvmsg", "xsk_poll"];
/// Functions of drivers that tell a card of descriptors once a call: of igb, for packets of AF_XDP in zero-copy mode, for all others, and both ways to
/// give it frames; of virtio, which leaves it out where the device looks anyway.
const DOORBELLS_OF_IGB: [&str; 4] = [
    "xsk_tx_peek_release_desc_batch()",
    "igb_xmit_frame_ring",
    "igb_alloc_rx_buffers",
    "igb_alloc_rx_buffers_zc",
];
const DOORBELLS_OF_VIRTIO: [&str; 2] = ["vp_notify", "vp_notify_with_data"];
/// Functions by which the kernel copies, and where their length in bytes is: AF_XDP's in copy mode, to and fro; what takes bytes out of packets. Of sockets
/// it is what they return: the function that copies there is of lib/, which has no probes (`CONFIG_KPROBE_EVENTS_ON_NOTRACE`).
const COPIES: [&str; 5] = [
    "__xsk_rcv:3",
    "skb_store_bits:4",
    "skb_copy_bits:4",
    "inet_sendmsg()",
    "inet_recvmsg()",
];
/// For igb's `ethtool -C IF rx-usecs` and `tx-usecs`, of which QEMU makes 41 µs (see `interrupts`). The driver's own setting (3) adapts to the length of
/// packets, to 0.8 ms here: a stream of LM falls to a fifth by it, and kernel UDP loses nearly everything. In zero-copy mode packets leave by the
/// interrupt of the transmit queue, so that `tx-usecs` is a packet's delay. Without any (0) each packet has an interrupt, and kernel UDP's receiver
/// does nothing else.
pub const USECS: u32 = 10;

/// What the names of systems of `lm-bench` begin with that are an earlier build's.
pub const FROZEN: &str = "lm@";

/// What a function of the kernel's stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    /// A call of the program's that may wake an AF_XDP socket's driver.
    Wakeup,
    /// A write to a card that tells it of descriptors.
    Doorbell,
    /// A copy of packets or payload.
    Copy,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// One way, as much as goes.
    Stream,
    /// One message to and fro.
    RoundTrips,
    /// 64 bytes to and fro beside a stream of longer messages, on the same two threads.
    Beside,
    /// One way, from eight senders.
    Sessions,
}

impl What {
    /// As tables show it.
    pub const fn name(self) -> &'static str {
        match self {
            What::Stream => "stream",
            What::RoundTrips => "round trips",
            What::Beside => "round trips beside",
            What::Sessions => "eight streams",
        }
    }

    /// Of a bare socket of `lm-bench`, where there are two.
    const fn bare_queue(self) -> u32 {
        match self {
            What::Stream | What::Sessions => 1,
            What::RoundTrips | What::Beside => 0,
        }
    }

    const fn command(self) -> &'static str {
        match self {
            What::Stream | What::Sessions => "throughput",
            What::RoundTrips => "latency",
            What::Beside => "beside",
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
    /// Whether system calls, wake-ups, doorbells and copies are counted, in a round that does not count otherwise.
    pub calls: bool,
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

    /// For `lm-bench`: the build whose ends the system's are, in the guest's /tests/.
    fn frozen(&self) -> String {
        let name = self.system.strip_prefix(FROZEN);
        name.map_or_else(String::new, |name| format!("--frozen {name}=/tests/{name}"))
    }

    /// Whether the card has the offloads that its driver gives it; else several packets never pass the stack as one.
    pub fn has_offloads(&self) -> bool {
        self.system.ends_with("-offloads")
    }

    /// Payload of a message, or of both of a round trip.
    pub fn bytes(&self) -> f64 {
        match self.what {
            What::Stream | What::Sessions => self.size as f64,
            What::RoundTrips | What::Beside => 2.0 * self.size as f64,
        }
    }

    /// It has failed after so many seconds, of the guest's clock and of the host's.
    pub fn limit_s(&self) -> u32 {
        // Eight senders and their links take the host 45 s to begin, and three times that where others work beside.
        let begin = match self.what {
            What::Sessions => 240,
            _ => 60,
        };
        begin + 40 * self.rounds
    }
}

/// Measures a row and prints what came of it as one line of JSON. In the guest.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The row, as JSON
    row: String,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let row: Row = serde_json::from_str(&arguments.row).context("no row is that")?;
    if row.what == What::Sessions {
        println!("{}", sessions::measure(&row)?);
        return Ok(());
    }
    let bed = hosts(row.device, false)?;
    bed.introduce()?;
    if row.shared {
        share_instances(&bed, true)?;
    }
    prepare(&bed, &row)?;
    for host in [bed.left(), bed.right()] {
        if row.has_offloads() {
            host.switch_segmentation_offloads(true)?;
        }
    }
    let steering = match row.system.as_str() {
        "bare" => Steering::of_bare(row.device, row.what.bare_queue(), row.taps),
        _ => Steering::Nothing,
    };
    let ends = [bed.left(), bed.right()];
    ends.into_iter().try_for_each(|host| steering.begin(host))?;
    await_link(&bed)?;
    let measured = measure(&bed, &row);
    // The card keeps it when the bed has gone.
    ends.into_iter().try_for_each(|host| steering.end(host))?;
    if row.shared {
        share_instances(&bed, false)?;
    }
    println!("{}", measured?);
    Ok(())
}

/// A card's interrupts come to its host's own core, and at the interval that the row asks for.
pub(super) fn prepare(bed: &Bed, row: &Row) -> Result<()> {
    let near = match bed.middle() {
        Some(middle) => (middle, middle::RIGHT),
        None => (bed.left(), INTERFACE),
    };
    for (core, (host, interface)) in [near, (bed.right(), INTERFACE)].into_iter().enumerate() {
        for irq in irqs(host, interface)? {
            // The one that the card itself has may be fixed.
            let _fixed = std::fs::write(
                format!("/proc/irq/{irq}/smp_affinity"),
                format!("{:x}", 1 << core),
            );
        }
        if row.device == Device::Igb {
            // An instance for both ways has one interval, the receive queue's.
            let intervals = ["rx-usecs", "tx-usecs"];
            for which in if row.shared { &intervals[..1] } else { &intervals } {
                set_usecs(host, interface, which, row.usecs)?;
            }
        }
    }
    Ok(())
}

/// What `lm-bench` found, and how many interrupts the two cards had meanwhile: the sending or asking one, then the other. Packets are not counted: igb
/// begins anew with that whenever an XDP program comes or goes.
fn measure(bed: &Bed, row: &Row) -> Result<Value> {
    let bench = LmBench::serve(bed, row.limit_s() - 10, &row.frozen())?;
    let seconds = match row.what {
        What::RoundTrips | What::Beside => ROUND_TRIPS_SECONDS,
        What::Stream | What::Sessions => STREAM_SECONDS,
    };
    let line = format!(
        "{} --systems {} --sizes {} --mode {} --recipe native-spinning --count {ROUND_TRIPS} {}",
        row.what.command(),
        row.system,
        row.size,
        row.mode.unwrap_or(Mode::Auto).option(),
        row.frozen(),
    );
    let before = counts(bed)?;
    let (ended, report) = bench.run(&format!(
        "{line} --rounds {} --warm-up {WARM_UP} --seconds {seconds}",
        row.rounds
    ))?;
    let after = counts(bed)?;
    let (counted, uncopied) = match row.calls {
        true => count(&bench, &line, row.device)?,
        false => (Value::Null, None),
    };
    bench.stop()?;
    Ok(json!({
        "rounds": report["rows"][0]["rounds"],
        "mode": report["links"][0]["mode"],
        "offloads": report["links"][0]["offloads"],
        "failures": report["failures"],
        "absent": report["absent"],
        "error": (!ended.status.success()).then(|| ended.stderr.trim().lines().last().unwrap_or_default().to_owned()),
        "interrupts": after.zip(before).map(|(after, before)| [after[0] - before[0], after[1] - before[1]]),
        "counted": counted["rows"][0]["rounds"][0],
        "uncounted": counted["failures"][0]["why"],
        "copies_uncounted": uncopied,
    }))
}

/// The report of a round in which system calls, wake-ups, doorbells and copies are counted, and why the last are not.
fn count(bench: &LmBench<'_>, line: &str, device: Device) -> Result<(Value, Option<String>)> {
    let calls = std::fs::read_to_string(SYSTEM_CALLS).context("no tracepoint of system calls")?;
    let doorbells = match device {
        Device::Igb => &DOORBELLS_OF_IGB[..],
        Device::VirtioNet => &DOORBELLS_OF_VIRTIO,
        Device::Veth => &[],
    };
    let of_kind = |functions: &[&'static str], kind| {
        functions
            .iter()
            .map(move |&name| (name, kind))
            .collect::<Vec<_>>()
    };
    let functions = [
        of_kind(&WAKEUPS, Counted::Wakeup),
        of_kind(doorbells, Counted::Doorbell),
        of_kind(&COPIES, Counted::Copy),
    ]
    .concat();
    let probes = Probes::set(&functions)?;
    let mut line = format!(
        "{line} --warm-up {COUNTED_WARM_UP} --seconds {COUNTED_SECONDS} --count-system-calls {}",
        calls.trim()
    );
    // Some of them would be a figure as well, and a wrong one.
    let uncopied = missing(&probes.not_counted);
    let copies = uncopied.is_none().then_some(("copies", Counted::Copy));
    let kinds = [("wakeups", Counted::Wakeup), ("doorbells", Counted::Doorbell)];
    for (option, kind) in kinds.into_iter().chain(copies) {
        let numbers = probes.numbers(kind)?;
        if !numbers.is_empty() {
            line.push_str(&format!(" --count-{option} {numbers}"));
        }
    }
    Ok((bench.run(&line)?.1, uncopied))
}

/// Which of the functions that copy this kernel lets nobody count.
fn missing(not_counted: &[&str]) -> Option<String> {
    let missing = COPIES.iter().filter(|one| not_counted.contains(one));
    let names: Vec<&str> = missing.copied().collect();
    (!names.is_empty()).then(|| format!("no probe of {}", names.join(", ")))
}

/// `lm-bench serve` on the right host of a bed, and its commands on the left one.
pub(super) struct LmBench<'a> {
    bed: &'a Bed,
    server: Program,
    limit: Duration,
    file: PathBuf,
    _folder: Registered,
}

impl LmBench<'_> {
    /// Starts the server, with these options more; no command takes longer than `limit_s` seconds. Fragments of datagrams that were lost go soon: they fill the kernel's
    /// 4 MiB for them, and then no datagram of several packets comes through for 30 s (`net.ipv4.ipfrag_high_thresh`, `ipfrag_time`).
    pub(super) fn serve<'a>(bed: &'a Bed, limit_s: u32, options: &str) -> Result<LmBench<'a>> {
        let limit = Duration::from_secs(limit_s.into());
        for host in [bed.left(), bed.right()] {
            host.write_file("/proc/sys/net/ipv4/ipfrag_time", "1")?;
        }
        let line = format!(
            "serve --core 1 --from-anyone --bind {}:7170 {options}",
            bed.right().address()
        );
        let launch = Launch::new("/bin/lm-bench").args(line.split_whitespace());
        let mut server = bed.right().spawn(launch.time_limit(limit))?;
        server.await_text("ready")?;
        let (folder, registered) = temporary_folder(&std::env::temp_dir(), "lm-bench")?;
        Ok(LmBench {
            bed,
            server,
            limit,
            file: folder.join("report.json"),
            _folder: registered,
        })
    }

    /// Runs `COMMAND OPTIONS…` against the server: how it ended, and its report; null where it made none.
    pub(super) fn run(&self, line: &str) -> Result<(Output, Value)> {
        let (command, options) = line.split_once(' ').unwrap_or((line, ""));
        let launch = Launch::new("/bin/lm-bench")
            .args([command, &self.bed.right().address().to_string(), "--core", "0"])
            .args(options.split_whitespace())
            .arg("--json")
            .arg(&self.file)
            .time_limit(self.limit);
        let _before = std::fs::remove_file(&self.file);
        let ended = self.bed.left().spawn(launch)?.outcome()?;
        let report = match std::fs::read_to_string(&self.file) {
            Ok(text) => serde_json::from_str(&text).context("the report of lm-bench is no JSON")?,
            Err(_) => Value::Null,
        };
        Ok((ended, report))
    }

    pub(super) fn stop(self) -> Result<()> {
        self.server.stop().map(drop)
    }
}

/// Interrupts of both hosts' cards so far; a veth pair has none.
fn counts(bed: &Bed) -> Result<Option<[u64; 2]>> {
    let text = std::fs::read_to_string("/proc/interrupts").context("cannot read /proc/interrupts")?;
    let [near, far] = [bed.left(), bed.right()].map(|host| irqs(host, INTERFACE));
    let (near, far) = (near?, far?);
    Ok((!near.is_empty()).then(|| [interrupts_in(&text, &near), interrupts_in(&text, &far)]))
}

/// Numbers of a card's interrupts; none where there is no card.
fn irqs(host: &Host, interface: &str) -> Result<Vec<u32>> {
    host.enter(|| {
        let device = Path::new("/sys/class/net").join(interface).join("device");
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

/// How often these interrupts have come, on all cores, by `/proc/interrupts`.
fn interrupts_in(text: &str, irqs: &[u32]) -> u64 {
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
    fn a_row_comes_through_the_plan_and_has_a_name() {
        let row = Row {
            device: Device::VirtioNet,
            system: "lm-sleeping".to_owned(),
            mode: Some(Mode::Copy),
            what: What::RoundTrips,
            size: 7168,
            rounds: 2,
            usecs: USECS,
            shared: false,
            taps: false,
            calls: true,
        };
        assert!(!row.has_offloads());
        assert_eq!(row.name(), "virtio-net lm-sleeping copy round trips 7168");
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row);
        let udp = Row {
            mode: None,
            system: "udp-gso-offloads".to_owned(),
            taps: true,
            ..row
        };
        assert_eq!(udp.name(), "virtio-net taps udp-gso-offloads round trips 7168");
        assert!(udp.has_offloads());
    }

    #[test]
    fn a_copy_that_nobody_counts_is_named() {
        assert_eq!(missing(&["vp_notify"]), None);
        let why = missing(&["vp_notify", "skb_copy_bits:4", "__xsk_rcv:3"]);
        assert_eq!(why.as_deref(), Some("no probe of __xsk_rcv:3, skb_copy_bits:4"));
    }

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
}
