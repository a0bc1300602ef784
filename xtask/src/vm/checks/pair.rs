//! Two hosts on the two devices of a kind, and LM's programs on them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::bed::{Bed, BedConfig, Host, INTERFACE, Launch, Program, introduce, ip, middle, until};
use crate::ends::Ends;
use crate::vm::devices::Device;
use crate::vm::guest::cards;
use crate::vm::protocol::{COPY, Plan, Spoil, ZERO_COPY};

/// Where a process writes down what it changes of a card; nothing may be left there.
const STEERING_FOLDER: &str = "/run/lm/steering";

/// The queue that LM lands on where a card has two.
pub(super) const LANDING_QUEUE: u32 = 1;
/// With so many queues igb has one NAPI instance for both ways of each.
const SHARING_QUEUES: u32 = 5;
/// How long a card may take to begin anew.
const LIMIT: Duration = Duration::from_secs(15);

/// Two hosts on the devices of one kind.
pub(super) struct Pair {
    /// The hosts.
    pub(super) bed: Bed,
    /// A fault to put in.
    pub(super) spoil: Option<Spoil>,
}

impl Pair {
    /// Two hosts with a link.
    pub(super) fn new(plan: &Plan, device: Device) -> Result<Pair> {
        Pair::of(plan, device, false)
    }

    /// The sender on a veth, an impairment box, and the receiver on a card.
    pub(super) fn with_box(plan: &Plan, device: Device) -> Result<Pair> {
        Pair::of(plan, device, true)
    }

    fn of(plan: &Plan, device: Device, with_box: bool) -> Result<Pair> {
        // A check that failed leaves what its programs had no time to take back; its namespaces are gone, and its cards
        // reset.
        for note in steering_notes() {
            let _ = std::fs::remove_file(Path::new(STEERING_FOLDER).join(note));
        }
        let bed = hosts(device, with_box)?;
        bed.introduce()?;
        Ok(Pair {
            bed,
            spoil: plan.spoil,
        })
    }

    /// A program of LM's for the right host, in zero-copy mode.
    pub(super) fn receiving(&self, line: &str) -> Launch {
        launch(line, ZERO_COPY).core(1)
    }

    /// A program of LM's for the left host.
    pub(super) fn sending(&self, line: &str) -> Launch {
        let to = self.bed.right().address().to_string();
        launch(line, self.sending_mode()).args(["--to", &to]).core(0)
    }

    /// Zero-copy where the left host has a card.
    fn sending_mode(&self) -> &'static str {
        match self.bed.middle() {
            Some(_) => COPY,
            None => ZERO_COPY,
        }
    }

    /// Starts a stream of LM that sleeps while it has nothing to do, in zero-copy mode on both cards: receiver and
    /// sender.
    pub(super) fn start_stream(&self, message_len: u64, seconds: [f64; 2]) -> Result<(Program, Program)> {
        let mut ends = Ends::stream("lm --idle default", message_len, seconds);
        ends.mode = ZERO_COPY;
        let receiver = self.start_receiver(lm_bench(ends.far(), 1), "ready")?;
        Ok((receiver, self.start_sender(lm_bench(ends.near(), 0))?))
    }

    /// Starts a receiver and waits until packets can come.
    pub(super) fn start_receiver(&self, launch: Launch, ready: &str) -> Result<Program> {
        await_detached(self.bed.right())?;
        await_link(&self.bed)?;
        let receiver = self.bed.right().spawn_until(launch, ready)?;
        // The gate made the card begin anew.
        await_link(&self.bed)?;
        Ok(receiver)
    }

    /// Starts a sender, once the last one is gone from its card.
    pub(super) fn start_sender(&self, launch: Launch) -> Result<Program> {
        await_detached(self.bed.left())?;
        await_link(&self.bed)?;
        self.bed.left().spawn(launch)
    }

    /// Both ends were in the mode that was demanded, by their own reports.
    pub(super) fn prove_mode(&self, sent: &Value, received: &Value) -> Result<()> {
        ensure_mode(received, ZERO_COPY).context("the receiver")?;
        ensure_mode(sent, self.sending_mode()).context("the sender")
    }

    /// What `ethtool -x` says on both hosts; no receiver has left an XDP program or a note of changes behind.
    pub(super) fn tables(&self) -> Result<[String; 2]> {
        let hosts = [self.bed.left(), self.bed.right()];
        for host in hosts {
            ensure!(!host.has_xdp_program()?, "an XDP program is still attached");
        }
        let notes = steering_notes();
        ensure!(notes.is_empty(), "notes are left: {}", notes.join(", "));
        // A device may have none.
        Ok(hosts.map(|host| ethtool(host, &format!("-x {INTERFACE}")).unwrap_or_default()))
    }

    /// Nothing is attached, nothing written down, and the tables are those of before.
    pub(super) fn ensure_as_before(&self, before: &[String; 2]) -> Result<()> {
        let now = self.tables()?;
        ensure!(now == *before, "the RSS tables were {before:?} and are {now:?}");
        Ok(())
    }
}

/// A program's report says that it was in that mode: as LM's programs call it, or as the ends of measurements do.
pub(super) fn ensure_mode(report: &Value, mode: &str) -> Result<()> {
    let names = match mode {
        ZERO_COPY => ["zero-copy", "native zero-copy"],
        _ => ["copy-native", "native copy"],
    };
    ensure!(
        names.iter().any(|name| report["mode"] == *name),
        "it was in mode {} and not in {}: {report}",
        report["mode"],
        names[0]
    );
    Ok(())
}

/// Files in the folder where changed cards are written down.
pub(super) fn steering_notes() -> Vec<String> {
    let entries = std::fs::read_dir(STEERING_FOLDER).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".json")).collect()
}

/// What `ethtool` says, by its command line.
pub(super) fn ethtool(host: &Host, line: &str) -> Result<String> {
    let program = Launch::new("ethtool").args(line.split(' '));
    Ok(host.spawn(program)?.finish()?.stdout)
}

/// A program of LM's on [`INTERFACE`], by its command line.
pub(super) fn launch(line: &str, mode: &str) -> Launch {
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or_default();
    // lm-recv and lm-send have no such option: it is their way.
    let idle = (program == "lm-check").then_some(["--idle", "default"]);
    Launch::new(format!("/bin/{program}"))
        .args(words)
        .args(["--interface", INTERFACE, "--mode", mode])
        .args(idle.into_iter().flatten())
        .time_limit(Duration::from_secs(120))
}

/// `lm-bench` on a core.
pub(super) fn lm_bench(words: impl IntoIterator<Item = String>, core: usize) -> Launch {
    let launch = Launch::new("/bin/lm-bench").args(words).core(core);
    launch.time_limit(Duration::from_secs(120))
}

/// The interfaces of the two cards of a kind; none of a kind that is no card.
pub(super) fn two_cards(device: Device) -> Result<Option<[String; 2]>> {
    let Some(driver) = device.driver() else {
        return Ok(None);
    };
    let found: Vec<String> = cards(driver).into_iter().map(|card| card.name).collect();
    let count = found.len();
    let two = found.try_into().ok();
    two.map(Some)
        .with_context(|| format!("{count} interfaces with the driver {driver} instead of 2"))
}

/// Two hosts on the devices of one kind, with a link.
pub(super) fn hosts(device: Device, with_box: bool) -> Result<Bed> {
    let cards = two_cards(device)?;
    let bed = Bed::new(&BedConfig {
        cards,
        with_box,
        // A box keeps and copies packets.
        checksum_offload: !with_box,
        ..BedConfig::default()
    })?;
    await_link(&bed)?;
    Ok(bed)
}

/// One more sender, in the namespace of a bed's box, and a bridge that joins it and both hosts.
pub(super) fn further_sender(bed: &Bed) -> Result<&Host> {
    let (further, right) = (bed.middle().context("a bed with a box")?, bed.right());
    let queues = "numrxqueues 2 numtxqueues 2";
    let mut commands = vec![
        format!("link add {INTERFACE} {queues} type veth peer name further {queues}"),
        "link add bridge type bridge mcast_snooping 0".to_owned(),
    ];
    let ports = [middle::LEFT, middle::RIGHT, "further"];
    commands.extend(ports.map(|port| format!("link set {port} master bridge up")));
    commands.push("link set bridge up".to_owned());
    commands.push(format!("addr add {}/24 dev {INTERFACE}", further.address()));
    commands.push(format!("link set {INTERFACE} up"));
    ip::batch(Some(further.name()), &commands).context("cannot make a further sender's link")?;
    further.switch_segmentation_offloads(INTERFACE, false)?;
    further.set_features(&[("tx-checksum-ip-generic", false)])?;
    introduce(&[further], &[right])?;
    Ok(further)
}

/// Waits until all interfaces have their link: a card negotiates it anew whenever it is set up.
pub(super) fn await_link(bed: &Bed) -> Result<()> {
    let hosts = [(bed.left(), INTERFACE), (bed.right(), INTERFACE)];
    let middle = bed.middle().map(|host| (host, middle::RIGHT));
    for (host, interface) in hosts.into_iter().chain(middle) {
        let carrier = format!("/sys/class/net/{interface}/carrier");
        until(&format!("{} has its link", host.name()), LIMIT, || {
            Ok(host.read_file(&carrier).ok().as_deref() == Some("1"))
        })?;
    }
    Ok(())
}

/// Waits until whoever was there before has gone: the kernel detaches a dead process's program a moment later, and then
/// the card begins anew.
pub(super) fn await_detached(host: &Host) -> Result<()> {
    let what = format!("no XDP program is attached on {}", host.name());
    until(&what, LIMIT, || Ok(!host.has_xdp_program()?))
}

/// Sends everything that comes in to one queue, as a rule of a real card would. Whether that worked.
pub(super) fn steer(host: &Host, queue: u32) -> bool {
    ethtool(host, &format!("-X {INTERFACE} start {queue} equal 1")).is_ok()
}

/// Takes back what anybody has set of the RSS table.
pub(super) fn spread_evenly(host: &Host) -> Result<()> {
    ethtool(host, &format!("-X {INTERFACE} default")).map(drop)
}

/// Gives each queue of two igb cards one NAPI instance for both ways, or one for each way again, which it has while no
/// more than half of the card's eight queues are in use (`igb_set_flag_queue_pairs`). Packets come to the first two
/// queues.
pub(super) fn share_instances(bed: &Bed, shared: bool) -> Result<()> {
    for host in [bed.left(), bed.right()] {
        set_queues(host, if shared { SHARING_QUEUES } else { 2 })?;
        match shared {
            true => ethtool(host, &format!("-X {INTERFACE} equal 2")).map(drop)?,
            false => spread_evenly(host)?,
        }
    }
    await_link(bed)
}

pub(super) fn set_queues(host: &Host, queues: u32) -> Result<()> {
    ethtool(host, &format!("-L {INTERFACE} combined {queues}")).map(drop)
}
