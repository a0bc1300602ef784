//! Two hosts on the two devices of a kind, and LM's programs on them in the mode that the plan demands.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::NotHere;
use crate::bed::{Bed, BedConfig, Host, INTERFACE, Launch, Lone, Program, ip, middle, until};
use crate::ends::Ends;
use crate::vm::devices::Device;
use crate::vm::guest::{cards, facts};
use crate::vm::protocol::{Mode, Plan, Spoil};
use crate::vm::qemu;

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
    /// What every receiver must be in.
    pub(super) mode: Mode,
    /// A fault to put in.
    pub(super) spoil: Option<Spoil>,
}

impl Pair {
    /// Two hosts with a link. What the driver lacks in this kernel is no failure.
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
        if plan.mode == Mode::ZeroCopy {
            require_zero_copy(device)?;
        }
        let bed = hosts(device, with_box)?;
        bed.introduce()?;
        Ok(Pair {
            bed,
            mode: plan.mode,
            spoil: plan.spoil,
        })
    }

    /// A program of LM's for the right host, in the demanded mode.
    pub(super) fn receiving(&self, line: &str) -> Launch {
        launch(line, self.mode).core(1)
    }

    /// A program of LM's for the left host: in the demanded mode where it has a card.
    pub(super) fn sending(&self, line: &str) -> Launch {
        let mode = if self.is_boxed() { Mode::Copy } else { self.mode };
        let to = self.bed.right().address().to_string();
        launch(line, mode).args(["--to", &to]).core(0)
    }

    fn is_boxed(&self) -> bool {
        self.bed.middle().is_some()
    }

    /// Starts a stream of LM that sleeps while it has nothing to do, in the demanded mode on both cards: receiver and
    /// sender.
    pub(super) fn start_stream(&self, message_len: u64, seconds: [f64; 2]) -> Result<(Program, Program)> {
        let ends = Ends::stream("lm --idle default", message_len, seconds).mode(self.mode.option());
        let launch = |words, core| {
            Launch::new("/bin/lm-bench")
                .args(words)
                .core(core)
                .time_limit(Duration::from_secs(120))
        };
        let receiver = self.start_receiver(launch(ends.far(), 1), "ready")?;
        Ok((receiver, self.start_sender(launch(ends.near(), 0))?))
    }

    /// Starts a receiver and waits until packets can come.
    pub(super) fn start_receiver(&self, launch: Launch, ready: &str) -> Result<Program> {
        await_detached(self.bed.right())?;
        await_link(&self.bed)?;
        let mut receiver = self.bed.right().spawn(launch)?;
        receiver.await_text(ready)?;
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

    /// Both ends were in the demanded mode, by their own reports.
    pub(super) fn prove_mode(&self, sent: &Value, received: &Value) -> Result<()> {
        let sender = if self.is_boxed() { Mode::Copy } else { self.mode };
        for (report, mode, end) in [(received, self.mode, "receiver"), (sent, sender, "sender")] {
            ensure!(
                report["mode"] == mode.in_effect() || report["mode"] == mode.of_ends(),
                "the {end} was in mode {} and not in {}: {report}",
                report["mode"],
                mode.in_effect()
            );
        }
        Ok(())
    }

    /// What a receiver may leave behind and must not: an XDP program, a note of changes, another RSS table.
    pub(super) fn traces(&self) -> Result<Traces> {
        Ok(Traces {
            xdp: self.bed.left().has_xdp_program()? || self.bed.right().has_xdp_program()?,
            notes: steering_notes(),
            tables: [self.bed.left(), self.bed.right()].map(|host| rss_table(host).unwrap_or_default()),
        })
    }
}

/// What the checks and the programs may leave behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Traces {
    /// Whether an XDP program is attached.
    pub(super) xdp: bool,
    /// Files about changed cards.
    pub(super) notes: Vec<String>,
    /// What `ethtool -x` says on both hosts.
    pub(super) tables: [String; 2],
}

impl Traces {
    /// Nothing is attached, nothing written down, and the tables are those of `before`.
    pub(super) fn ensure_as_before(&self, before: &Traces) -> Result<()> {
        ensure!(!self.xdp, "an XDP program is still attached");
        ensure!(self.notes.is_empty(), "notes are left: {}", self.notes.join(", "));
        ensure!(
            self.tables == before.tables,
            "the RSS tables were {:?} and are {:?}",
            before.tables,
            self.tables
        );
        Ok(())
    }
}

/// Files in the folder where changed cards are written down.
pub(super) fn steering_notes() -> Vec<String> {
    let entries = std::fs::read_dir(STEERING_FOLDER).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".json")).collect();
    names.sort();
    names
}

/// What `ethtool -x` says; `None` where the device has no table.
pub(super) fn rss_table(host: &Host) -> Option<String> {
    let program = Launch::new("ethtool").args(["-x", INTERFACE]);
    let output = host.spawn(program).ok()?.outcome().ok()?;
    output.status.success().then_some(output.stdout)
}

/// A program of LM's on [`INTERFACE`], by its command line.
pub(super) fn launch(line: &str, mode: Mode) -> Launch {
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or_default();
    let idle = ["--idle", "default"];
    // lm-recv and lm-send have no such option: it is their way.
    let idle = match program {
        "lm-recv" | "lm-send" => &[],
        _ => &idle[..],
    };
    Launch::new(format!("/bin/{program}"))
        .args(words)
        .args(["--interface", INTERFACE, "--mode", mode.option()])
        .args(idle)
        .time_limit(Duration::from_secs(120))
}

/// The interfaces of the two cards of a kind; none of a kind that is no card.
pub(super) fn two_cards(device: Device) -> Result<Option<[String; 2]>> {
    let Some(driver) = device.driver() else {
        return Ok(None);
    };
    let found: Vec<String> = cards(driver).into_iter().map(|card| card.interface).collect();
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

/// One more host behind a bed's box, whose address ends in this number. Nothing passes until [`join`].
pub(super) fn further_sender(bed: &Bed, number: u8) -> Result<Lone> {
    let (further, right) = (Lone::new()?, bed.right());
    let address = format!("198.18.0.{number}");
    let middle = bed.middle().context("a bed with a box")?;
    let link = format!(
        "link add {INTERFACE} netns {} numrxqueues 2 numtxqueues 2 type veth peer name {} netns {} numrxqueues 2 \
            numtxqueues 2",
        further.host().name(),
        port(number),
        middle.name()
    );
    ip::batch(None, &[link]).context("cannot make a further sender's link")?;
    further.host().switch_segmentation_offloads(false)?;
    (further.host()).set_features(&[("tx-checksum-ip-generic", false)])?;
    let mac = |host: &Host| host.read_file(&format!("/sys/class/net/{INTERFACE}/address"));
    let neighbour =
        |address, mac| format!("neigh replace {address} lladdr {mac} nud permanent dev {INTERFACE}");
    further.configure(&[
        "link set lo up".to_owned(),
        format!("addr add {address}/24 dev {INTERFACE}"),
        format!("link set {INTERFACE} up"),
        neighbour(right.address().to_string(), mac(right)?),
    ])?;
    ip::batch(Some(right.name()), &[neighbour(address, mac(further.host())?)])?;
    Ok(further)
}

/// The box's interface towards a further sender.
fn port(number: u8) -> String {
    format!("more{number}")
}

/// A bridge in the box joins both hosts and the further senders of these numbers.
pub(super) fn join(bed: &Bed, further: impl IntoIterator<Item = u8>) -> Result<()> {
    let ports = [middle::LEFT, middle::RIGHT].map(str::to_owned).into_iter();
    let ports = ports.chain(further.into_iter().map(port));
    let mut commands = vec!["link add bridge type bridge mcast_snooping 0".to_owned()];
    commands.extend(ports.map(|port| format!("link set {port} master bridge up")));
    commands.push("link set bridge up".to_owned());
    let middle = bed.middle().context("a bed with a box")?;
    ip::batch(Some(middle.name()), &commands).context("cannot make the bridge")
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
    until(
        &format!("no XDP program is attached on {}", host.name()),
        LIMIT,
        || Ok(!host.has_xdp_program()?),
    )
}

/// Sends everything that comes in to one queue, as a rule of a real card would. Whether that worked.
pub(super) fn steer(host: &Host, queue: u32) -> Result<bool> {
    let queue = queue.to_string();
    let program = Launch::new("ethtool").args(["-X", INTERFACE, "start", &queue, "equal", "1"]);
    Ok(host.spawn(program)?.outcome()?.status.success())
}

/// Takes back what anybody has set of the RSS table.
pub(super) fn spread_evenly(host: &Host) -> Result<()> {
    let program = Launch::new("ethtool").args(["-X", INTERFACE, "default"]);
    host.spawn(program)?.finish().map(drop)
}

/// Gives each queue of two igb cards one NAPI instance for both ways, or one for each way again, which it has while no
/// more than half of the card's eight queues are in use (`igb_set_flag_queue_pairs`). Packets come to the first two
/// queues.
pub(super) fn share_instances(bed: &Bed, shared: bool) -> Result<()> {
    for host in [bed.left(), bed.right()] {
        set_queues(host, if shared { SHARING_QUEUES } else { 2 })?;
        let spread = Launch::new("ethtool").args(["-X", INTERFACE]);
        let spread = match shared {
            true => spread.args(["equal", "2"]),
            false => spread.args(["default"]),
        };
        host.spawn(spread)?.finish()?;
    }
    await_link(bed)
}

/// What is done that the packets for a bare socket come to its queue: which one a packet comes to is the card's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steering {
    /// Whoever receives sees to it, or there is one queue.
    Nothing,
    /// The card's RSS table names that queue alone.
    Table(u32),
    /// The card has no other queue. When an XDP program comes to a virtio-net card whose table somebody has set, the
    /// driver names the number of queues once more (`virtnet_set_queues`, drivers/net/virtio_net.c), and QEMU has no
    /// table from then on (`virtio_net_handle_mq`, hw/net/virtio-net.c): tun chooses a queue by its own hash.
    OneQueue,
}

impl Steering {
    pub(super) fn of_bare(device: Device, queue: u32, has_queues: bool) -> Steering {
        match device {
            Device::Igb => Steering::Table(queue),
            Device::VirtioNet if has_queues => Steering::OneQueue,
            Device::VirtioNet | Device::Veth => Steering::Nothing,
        }
    }

    pub(super) fn begin(self, host: &Host) -> Result<()> {
        match self {
            Steering::Nothing => Ok(()),
            Steering::Table(queue) => {
                let is_steered = steer(host, queue)?;
                ensure!(is_steered, "{} takes no RSS table for queue {queue}", host.name());
                Ok(())
            }
            Steering::OneQueue => set_queues(host, 1),
        }
    }

    /// The card keeps what was set when the bed has gone.
    pub(super) fn end(self, host: &Host) -> Result<()> {
        match self {
            Steering::Nothing => Ok(()),
            Steering::Table(_) => spread_evenly(host),
            Steering::OneQueue => set_queues(host, qemu::VIRTIO_QUEUES),
        }
    }
}

fn set_queues(host: &Host, queues: u32) -> Result<()> {
    let program = Launch::new("ethtool").args(["-L", INTERFACE, "combined", &queues.to_string()]);
    host.spawn(program)?.finish().map(drop)
}

/// Where this kernel's driver has no zero-copy, what needs it is skipped.
pub(super) fn require_zero_copy(device: Device) -> Result<()> {
    let release = facts()["kernel"].as_str().unwrap_or_default().to_owned();
    let since = device.zerocopy_since().context("this device has no zero-copy")?;
    if qemu::numbers(&release) < since.to_vec() {
        bail!(NotHere(format!(
            "{} has zero-copy since Linux {}.{}, and this is {release}; take a newer one (--kernel FILE --modules DIR)",
            device.name(),
            since[0],
            since[1]
        )));
    }
    Ok(())
}
