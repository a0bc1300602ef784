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
use serde_json::Value;

use super::fates;
use crate::bed::{Bed, BedConfig, INTERFACE, Impairments, Launch, require_root};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// A run takes a second or two; the sender gives up by itself after this.
const PATIENCE: Duration = Duration::from_secs(20);
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
    messages: u64,
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
        let messages = (RUN_LEN as f64 / average) as u64;
        let messages = messages.min(20 + dice.roll(1500));
        let mut options = format!("--seed {seed}");
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                options += &format!(" --{name} {value}");
            }
        };
        add("loss", dice.shares(60_000, 6));
        add(
            "loss-burst",
            Some(format!("{},{}", 1 + dice.roll(6), 1 + dice.roll(6))),
        );
        add("duplicate", dice.shares(40_000, 4));
        add("corrupt", dice.shares(10_000, 4));
        add("reorder", dice.shares(40_000, 3));
        add(
            "reorder-by",
            Some(format!("{},{}", 1 + dice.roll(30), 1 + dice.roll(30))),
        );
        // Both take packets through user space, one at a time.
        let delay =
            (dice.roll(4) == 0).then(|| format!("{}us,{}us", 1 + dice.roll(1000), 1 + dice.roll(1000)));
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

    fn arguments(&self, seed: u64) -> Vec<String> {
        let line = format!(
            "messages --interface {INTERFACE} --idle default --seed {seed} --message-size {} --messages {} \
             --in-flight {} --mode {}",
            self.message_size, self.messages, self.in_flight, self.mode
        );
        line.split_whitespace().map(str::to_owned).collect()
    }
}

/// What all runs together did, by name.
type Tally = BTreeMap<&'static str, u64>;

/// Runs of seeds on one bed, one after the other.
struct Kernel {
    bed: Bed,
    programs: Programs,
}

impl Kernel {
    fn run_one(&self, plan: &Plan, seed: u64, tally: &mut Tally) -> Result<()> {
        let (bed, programs) = (&self.bed, &self.programs);
        let [sending, receiving] = two_cores();
        let program = programs.path("lm-check");
        let launch = |core: usize| {
            Launch::new(&program)
                .args(plan.arguments(seed))
                .core(core)
                .time_limit(TIME_LIMIT)
        };
        let running = bed.start_box(&programs.path("lm-bench"), &plan.impairments)?;
        let read = plan.is_read.then_some("--read");
        let mut receiver = bed.right().spawn(launch(receiving).args(read))?;
        receiver.await_text("ready")?;
        let patience = PATIENCE.as_secs().to_string();
        let to = bed.right().address().to_string();
        let sender =
            launch(sending).args(["--to", &to, "--delivery", plan.delivery, "--patience", &patience]);
        let sent = bed.left().spawn(sender)?.finish();
        // The link first: after it nothing passes, so what the box sent is what the gate saw.
        let forwarded = running.stop()?;
        let received = receiver.stop()?;
        ensure!(
            received.status.success(),
            "the receiver ended with {}: {}",
            received.status,
            received.stderr.trim()
        );
        let received = received.json().context("the receiver")?;
        let sent = match sent {
            Ok(output) => output.json().context("the sender")?,
            Err(error) => bail!("{error:#}; the receiver: {received}; the box: {forwarded}"),
        };
        let judged = judge(plan, &sent, &received, &forwarded, tally);
        judged.with_context(|| format!("sender {sent}; receiver {received}; box {forwarded}"))
    }
}

/// Runs `count` seeds from `first` on, one after the other.
pub(super) fn soak(first: u64, count: u64) -> Result<()> {
    require_root("make network namespaces")?;
    let last = first.checked_add(count);
    let last = last.context("no seed is beyond 2^64; choose a lower --from")?;
    let programs = Programs::build()?;
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
    let (kernel, mut tally) = (Kernel { bed, programs }, Tally::new());
    for (done, seed) in (first..last).enumerate() {
        let plan = Plan::new(seed);
        kernel.run_one(&plan, seed, &mut tally).with_context(|| {
            format!(
                "seed {seed} failed after {done} good ones ({plan:?}); again: cargo xtask soak --kernel 1 --from {seed}"
            )
        })?;
    }
    let words: Vec<String> = tally
        .iter()
        .map(|(what, count)| format!("{what} {count}"))
        .collect();
    println!("{count} seeds: {}", words.join(", "));
    Ok(())
}

fn number(report: &Value, path: &[&str]) -> Result<u64> {
    let value = path.iter().fold(report, |value, name| &value[*name]);
    value
        .as_u64()
        .with_context(|| format!("no number {}", path.join(".")))
}

/// Every message is accounted for, and so is every packet.
fn judge(plan: &Plan, sent: &Value, received: &Value, forwarded: &Value, tally: &mut Tally) -> Result<()> {
    let fates = fates::compare(plan.delivery, plan.messages, sent, received)?;
    for (what, count) in [
        ("messages", plan.messages),
        ("whole", fates.whole),
        ("in part", fates.in_part),
        ("reported", fates.reported),
    ] {
        *tally.entry(what).or_default() += count;
    }
    balance(plan, sent, received, forwarded)?;
    for direction in ["rightward", "leftward"] {
        let of = |name: &str| number(forwarded, &[direction, name]);
        *tally.entry("packets").or_default() += of("received")?;
        *tally.entry("lost").or_default() += of("lost")? + of("queue_full")?;
        for what in ["duplicated", "reordered", "corrupted"] {
            *tally.entry(what).or_default() += of(what)?;
        }
    }
    *tally.entry("resent").or_default() += number(sent, &["counters", "fragments_resent"])?;
    *tally.entry("bytes read early").or_default() += number(received, &["read", "early_bytes"])?;
    Ok(())
}

/// Sent = delivered + Σ drops + in flight, for messages and for packets.
fn balance(plan: &Plan, sent: &Value, received: &Value, forwarded: &Value) -> Result<()> {
    let same = |words: &str, one: u64, other: u64| {
        ensure!(one == other, "{words}: {one} and {other}");
        Ok(())
    };
    let sum = |report: &Value, path: &str, names: &[&str]| -> Result<u64> {
        names.iter().map(|name| number(report, &[path, name])).sum()
    };
    // Messages: each that was accepted has ended one way, by the sender's count.
    let ended = sum(sent, "counters", &["messages_sent", "messages_failed"])?;
    same("messages ended, of", ended, plan.messages)?;
    for direction in ["rightward", "leftward"] {
        let of = |names: &[&str]| sum(forwarded, direction, names);
        let went = of(&["sent", "lost", "queue_full", "refused", "held"])?;
        same(
            "packets that the box took, and that went",
            of(&["received", "duplicated"])?,
            went,
        )?;
        same("packets that the kernel refused to the box", of(&["refused"])?, 0)?;
    }
    // What the box sent met the gate, or found the interface's queue full.
    let gate = received["gate"].as_object().context("no gate")?;
    let judged: u64 = gate.values().filter_map(Value::as_u64).sum();
    let judged = judged + number(forwarded, &["rightward", "overrun"])?;
    let arrived = number(forwarded, &["rightward", "sent"])?;
    same(
        "packets that the box sent, and that the gate judged or the interface dropped",
        arrived,
        judged,
    )?;
    // Fragments leave through the box before anything happens to them.
    let fragments = number(sent, &["counters", "data_packets_sent"])?;
    let left = number(forwarded, &["rightward", "received"])?;
    ensure!(
        fragments <= left,
        "{fragments} fragments were sent, and {left} packets"
    );
    let drops = received["drops"].as_object().context("no drops")?;
    let discarded = drops
        .get("landing_discarded")
        .and_then(Value::as_u64)
        .unwrap_or(0);
    let landed = number(received, &["gate", "gate_redirect_landing"])?;
    let taken = sum(received, "counters", &["landing_packets"])? + discarded;
    same(
        "fragments that the gate let land, and that were taken or discarded",
        landed,
        taken,
    )?;
    let redirected = number(received, &["gate", "gate_redirect_general"])?;
    let taken = sum(received, "counters", &["general_packets"])?;
    same(
        "general packets that the gate redirected, and that were taken",
        redirected,
        taken,
    )?;
    // Each packet that was taken was of use, or moved one counter of drops. Violations are counted there too, and are
    // no packets; those that were discarded were not taken.
    const TAKEN: [&str; 5] = [
        "landing_packets",
        "general_packets",
        "one_copy_packets",
        "control_packets",
        "landing_heard",
    ];
    const NOT_TAKEN: [&str; 3] = ["landing_discarded", "foreign_frame", "foreign_completion"];
    let used = sum(
        received,
        "counters",
        &["packets_used", "challenged", "fragments_delivered"],
    )?;
    let is_packet = |name: &str| !NOT_TAKEN.contains(&name) && !is_violation(name);
    let packets = drops.iter().filter(|(name, _)| is_packet(name));
    let dropped: u64 = packets.filter_map(|(_, count)| count.as_u64()).sum();
    let taken = sum(received, "counters", &TAKEN)?;
    same(
        "packets that were taken, and that were of use or dropped",
        taken,
        used + dropped,
    )
}

/// Violations of the pairing invariant stand among the drops, by these names.
fn is_violation(name: &str) -> bool {
    let kinds = [
        "unposted",
        "address",
        "sequence",
        "displaced",
        "length",
        "header",
        "statistics",
        "processor",
    ];
    let kind = name.strip_prefix("landing_");
    kind.is_some_and(|kind| kinds.contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        let sent = json!({"fates": "dii", "counters": {"messages_sent": 1, "messages_failed": 2,
            "data_packets_sent": 40, "fragments_resent": 2}});
        let received = json!({"fates": "wpi", "faults": [], "read": {"early_bytes": 0},
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
            ("message 0", |_, _, r, _| r["fates"] = json!("-pi")),
            ("message 2", |_, s, _, _| s["fates"] = json!("did")),
            ("message 1", |plan, _, _, _| plan.delivery = "unreliable"),
            ("fates", |_, s, _, _| s["fates"] = json!("di")),
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
