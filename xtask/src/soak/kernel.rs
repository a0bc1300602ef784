//! `cargo xtask soak --kernel N`: the same questions to the real kernel. Two hosts with the impairment box between
//! them, real gate, rings and sockets.
//!
//! ```text
//!   lm-check messages --to ── lm0 ═══ impairment box ═══ lm0 ── lm-check messages
//!        │ fates, counters              │ counters              │ fates, faults, counters, gate
//!        └──────────────────────────────┴───────────┬───────────┘
//!                                                 judge
//! ```
//!
//! One seed decides what is sent, how, and what the box does to it. Both programs know every byte from the seed; here
//! only their letters for each message and the counters of both ends are compared.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::fates;
use crate::bed::{Bed, BedConfig, INTERFACE, Impairments, Launch, require_root};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// A run takes a second or two; the sender gives up by itself after this.
const PATIENCE_S: u32 = 20;
/// Programs that do not end by themselves are killed.
const TIME_LIMIT: Duration = Duration::from_secs(40);
/// Queues of the hosts' interfaces.
const QUEUES: u32 = 3;
/// Bytes of all messages of a run together, about.
const RUN_LEN: u64 = 6 << 20;

/// What a seed stands for.
#[derive(Debug)]
struct Plan {
    delivery: &'static str,
    message_size: u64,
    messages: usize,
    in_flight: u64,
    impairments: Impairments,
    /// Where the gate runs.
    mode: &'static str,
    /// Messages are read while they arrive.
    is_read: bool,
}

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(super) struct Dice(pub(super) u64);

impl Dice {
    /// 0 to `sides` - 1.
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len() as u64) as usize]
    }

    /// A number for each direction, from 1 to `most`.
    fn two(&mut self, most: u64, unit: &str) -> String {
        format!("{}{unit},{}{unit}", 1 + self.roll(most), 1 + self.roll(most))
    }

    /// A share of all packets for each direction, of up to `most` per million; nothing once in `blank` times.
    fn shares(&mut self, most: u64, blank: u64) -> Option<String> {
        if self.roll(blank) == 0 {
            return None;
        }
        // Small shares as often as large ones.
        let mut share = || {
            let most = most >> self.roll(5);
            self.roll(most + 1)
        };
        Some(format!("{}ppm,{}ppm", share(), share()))
    }
}

impl Plan {
    fn new(seed: u64) -> Plan {
        let mut dice = Dice(seed);
        let delivery = dice.pick(&["reliable", "reliable", "partial", "unreliable"]);
        let message_size = dice.pick(&[1000, 4 << 10, 30_000, 64 << 10, 256 << 10, 1 << 20]);
        // Logarithms of lengths are even, so that the average length is the longest through its logarithm.
        let average = message_size as f64 / (message_size as f64).ln();
        let messages = (RUN_LEN as f64 / average) as usize;
        let messages = messages.min(20 + dice.roll(1500) as usize);
        let mut options = format!("--seed {seed}");
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                options += &format!(" --{name} {value}");
            }
        };
        add("loss", dice.shares(60_000, 6));
        add("loss-burst", Some(dice.two(6, "")));
        add("duplicate", dice.shares(40_000, 4));
        add("corrupt", dice.shares(10_000, 4));
        add("reorder", dice.shares(40_000, 3));
        add("reorder-by", Some(dice.two(30, "")));
        // Both take packets through user space, one at a time.
        let delay = (dice.roll(4) == 0).then(|| dice.two(1000, "us"));
        let rate = (dice.roll(8) == 0).then(|| format!("{}Mbit", 200 + dice.roll(1800)));
        let is_by_user_space = delay.is_some() || rate.is_some();
        add("delay", delay);
        add("rate", rate);
        let impairments = Impairments(options);
        let in_flight = 1 + dice.roll(64);
        // What the box's program redirects, a generic program never sees (netif_receive_generic_xdp in net/core/dev.c);
        // what goes through the box's sockets it does.
        let mode = match is_by_user_space {
            true => dice.pick(&["copy", "generic"]),
            false => "copy",
        };
        Plan {
            delivery,
            message_size,
            messages,
            in_flight,
            impairments,
            mode,
            is_read: dice.roll(2) == 0,
        }
    }
}

/// What all runs together did, by name.
type Tally = BTreeMap<&'static str, u64>;

/// One run on a bed.
fn run_one(bed: &Bed, programs: &Programs, plan: &Plan, seed: u64, tally: &mut Tally) -> Result<()> {
    let [sending, receiving] = two_cores();
    let to = bed.right().address();
    let launch = |core: usize, options: String| {
        let line = format!(
            "messages --interface {INTERFACE} --idle default --seed {seed} --message-size {} --messages {} \
             --in-flight {} --mode {} {options}",
            plan.message_size, plan.messages, plan.in_flight, plan.mode
        );
        let launch = Launch::new(programs.path("lm-check")).args(line.split_whitespace());
        launch.core(core).time_limit(TIME_LIMIT)
    };
    let running = bed.start_box(&programs.path("lm-bench"), &plan.impairments)?;
    let read = if plan.is_read { "--read" } else { "" };
    let receiver = launch(receiving, read.to_owned());
    let receiver = bed.right().spawn_until(receiver, "ready")?;
    let options = format!("--to {to} --delivery {} --patience {PATIENCE_S}", plan.delivery);
    let sent = bed.left().spawn(launch(sending, options))?.finish();
    // The link first: after it nothing passes, so what the box sent is what the gate saw.
    let forwarded = running.stop()?.report_of("the box")?;
    let received = receiver.stop()?.report_of("the receiver")?;
    let sent = match sent {
        Ok(output) => output.json().context("the sender")?,
        Err(error) => bail!("{error:#}; the receiver: {received}; the box: {forwarded}"),
    };
    let judged = judge(plan, &sent, &received, &forwarded, tally);
    judged.with_context(|| format!("sender {sent}; receiver {received}; box {forwarded}"))
}

/// Runs `count` seeds from `first` on, one after the other.
pub(super) fn soak(first: u64, count: u64) -> Result<()> {
    require_root("make network namespaces")?;
    let last = first.checked_add(count);
    let last = last.context("no seed is beyond 2^64; choose a lower --from")?;
    let programs = Programs::build(&["lm-bench", "lm-check"])?;
    let bed = Bed::new(&BedConfig {
        with_box: true,
        box_cores: Some(two_cores()),
        // The box keeps and copies packets.
        checksum_offload: false,
        queues: QUEUES,
        ..BedConfig::default()
    })?;
    // Nothing but LM's packets shall pass, so that they can be counted.
    bed.introduce()?;
    let mut tally = Tally::new();
    for (done, seed) in (first..last).enumerate() {
        let plan = Plan::new(seed);
        run_one(&bed, &programs, &plan, seed, &mut tally).with_context(|| {
            format!(
                "seed {seed} failed after {done} good ones ({plan:?}); again: cargo xtask soak --kernel 1 --from {seed}"
            )
        })?;
    }
    let words = tally.iter().map(|(what, count)| format!("{what} {count}"));
    println!("{count} seeds: {}", words.collect::<Vec<_>>().join(", "));
    Ok(())
}

/// Sent = delivered + Σ drops + in flight, for messages and for packets: on both sides the sum is the same, of these
/// numbers of these groups (`*`: of all). What the box sent met the gate, or found the interface's queue full. Each
/// packet that was taken was of use, or moved one counter of drops. Violations of the pairing invariant are counted
/// there too, and are no packets; what was discarded was not taken.
const BALANCE: &str = "\
messages ended, of: sender.messages_sent sender.messages_failed = plan.messages
packets that the box took, and that went: rightward.received rightward.duplicated = \
    rightward.sent rightward.lost rightward.queue_full rightward.refused rightward.held
packets that the box took, and that went: leftward.received leftward.duplicated = \
    leftward.sent leftward.lost leftward.queue_full leftward.refused leftward.held
packets that the kernel refused to the box: rightward.refused leftward.refused =
packets that the box sent, and that the gate judged or the interface dropped: rightward.sent = gate.* rightward.overrun
fragments that the gate let land, and that were taken or discarded: gate.gate_redirect_landing = \
    receiver.landing_packets drops.landing_discarded
general packets that the gate redirected, and that were taken: gate.gate_redirect_general = receiver.general_packets
packets that were taken, and that were of use or dropped: \
    receiver.landing_packets receiver.general_packets receiver.one_copy_packets receiver.control_packets \
    receiver.landing_heard drops.landing_discarded drops.foreign_frame drops.foreign_completion \
    drops.landing_unposted drops.landing_address drops.landing_sequence drops.landing_displaced drops.landing_length \
    drops.landing_header drops.landing_statistics drops.landing_processor = \
    receiver.packets_used receiver.challenged receiver.fragments_delivered drops.*
";

/// What is told of all runs.
const TOLD: [(&str, &str); 11] = [
    ("messages", "plan.messages"),
    ("packets", "rightward.received leftward.received"),
    (
        "lost",
        "rightward.lost leftward.lost rightward.queue_full leftward.queue_full",
    ),
    ("duplicated", "rightward.duplicated leftward.duplicated"),
    ("reordered", "rightward.reordered leftward.reordered"),
    ("corrupted", "rightward.corrupted leftward.corrupted"),
    ("resent", "sender.fragments_resent"),
    ("bytes read early", "read.early_bytes"),
    ("whole", "fates.whole"),
    ("in part", "fates.in_part"),
    ("reported", "fates.reported"),
];

/// The sum of these numbers, each `GROUP.NAME`.
fn sum(groups: &Value, numbers: &str) -> Result<u64> {
    let number = |path: &str| {
        let (group, name) = path.split_once('.').context("a number of no group")?;
        let found = &groups[group][name];
        match (group, name) {
            (_, "*") => {
                let all = groups[group].as_object();
                Ok(all
                    .context(group.to_owned())?
                    .values()
                    .filter_map(Value::as_u64)
                    .sum())
            }
            // What never occurred is not told.
            ("drops", _) if found.is_null() => Ok(0),
            _ => found.as_u64().with_context(|| format!("no number {path}")),
        }
    };
    numbers.split_whitespace().map(number).sum()
}

/// Every message is accounted for, and so is every packet.
fn judge(plan: &Plan, sent: &Value, received: &Value, forwarded: &Value, tally: &mut Tally) -> Result<()> {
    let fates = fates::compare(plan.delivery, plan.messages..=plan.messages, sent, received)?;
    let groups = json!({
        "plan": {"messages": plan.messages}, "sender": sent["counters"], "receiver": received["counters"],
        "gate": received["gate"], "drops": received["drops"], "read": received["read"],
        "rightward": forwarded["rightward"], "leftward": forwarded["leftward"],
        "fates": {"whole": fates.whole, "in_part": fates.in_part, "reported": fates.reported},
    });
    for line in BALANCE.lines() {
        let (words, sums) = line.split_once(": ").context("no words")?;
        let (one, other) = sums.split_once('=').context("no sums")?;
        let (one, other) = (sum(&groups, one)?, sum(&groups, other)?);
        ensure!(one == other, "{words}: {one} and {other}");
    }
    // Fragments leave through the box before anything happens to them.
    let [fragments, left] = ["sender.data_packets_sent", "rightward.received"].map(|one| sum(&groups, one));
    let (fragments, left) = (fragments?, left?);
    ensure!(
        fragments <= left,
        "{fragments} fragments were sent, and {left} packets"
    );
    for (what, numbers) in TOLD {
        *tally.entry(what).or_default() += sum(&groups, numbers)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_always_the_same_run() {
        for seed in 0..50 {
            let plan = Plan::new(seed);
            assert_eq!(format!("{plan:?}"), format!("{:?}", Plan::new(seed)));
            assert!(plan.messages > 0 && plan.in_flight > 0);
        }
        let deliveries = ["reliable", "partial", "unreliable"];
        let of = |delivery| {
            (0..200)
                .filter(|&seed| Plan::new(seed).delivery == delivery)
                .count()
        };
        assert!(deliveries.into_iter().all(|delivery| of(delivery) > 20));
    }

    /// Reports of a run in which all goes well.
    fn good() -> (Plan, Value, Value, Value) {
        let plan = Plan {
            messages: 3,
            delivery: "partial",
            ..Plan::new(1)
        };
        let fates = |other, fates| json!([{"address": other, "life": 0, "fates": fates}]);
        let sent = json!({"address": "a", "to": fates("b", "dii"), "counters": {"messages_sent": 1,
            "messages_failed": 2, "data_packets_sent": 40, "fragments_resent": 2}});
        let received = json!({"address": "b", "from": fates("a", "wpi"), "faults": [], "read": {"early_bytes": 0},
            "drops": {"fragment_duplicate": 3, "landing_discarded": 2, "landing_header": 1},
            "counters": {"landing_packets": 33, "general_packets": 9, "one_copy_packets": 1,
                "control_packets": 2, "landing_heard": 0,
                "packets_used": 9, "challenged": 1, "fragments_delivered": 32},
            "gate": {"gate_redirect_landing": 35, "gate_redirect_general": 9, "gate_pass_order": 2}});
        let direction = json!({"received": 50, "duplicated": 1, "sent": 46, "lost": 4, "queue_full": 0,
            "refused": 0, "held": 1, "reordered": 3, "corrupted": 0, "overrun": 0});
        let forwarded = json!({"rightward": direction, "leftward": direction});
        (plan, sent, received, forwarded)
    }

    fn judged(change: impl FnOnce(&mut Plan, &mut Value, &mut Value, &mut Value)) -> Result<()> {
        let (mut plan, mut sent, mut received, mut forwarded) = good();
        change(&mut plan, &mut sent, &mut received, &mut forwarded);
        judge(&plan, &sent, &received, &forwarded, &mut Tally::default())
    }

    #[test]
    fn each_kind_of_trouble_is_found() {
        judged(|_, _, _, _| ()).unwrap();
        type Change = fn(&mut Plan, &mut Value, &mut Value, &mut Value);
        let changes: [(&str, Change); 10] = [
            ("wrong", |_, _, r, _| r["faults"] = json!(["byte 1 is wrong"])),
            ("message 0", |_, _, r, _| r["from"][0]["fates"] = json!("-pi")),
            ("message 2", |_, s, _, _| s["to"][0]["fates"] = json!("did")),
            ("message 1", |plan, _, _, _| plan.delivery = "unreliable"),
            ("fates", |_, s, _, _| s["to"][0]["fates"] = json!("di")),
            ("messages ended", |_, s, _, _| {
                s["counters"]["messages_failed"] = json!(1);
            }),
            ("that the box took", |_, _, _, f| f["leftward"]["lost"] = json!(5)),
            ("that the gate judged", |_, _, r, _| {
                r["gate"]["gate_pass_order"] = json!(1)
            }),
            ("were taken or discarded", |_, _, r, _| {
                r["counters"]["landing_packets"] = json!(34);
            }),
            ("were of use", |_, _, r, _| {
                r["drops"]["fragment_duplicate"] = json!(4)
            }),
        ];
        for (words, change) in changes {
            let error = format!("{:#}", judged(change).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
