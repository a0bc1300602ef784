//! Soak: two engines on a bad link, everything random, everything at once, all from one seed.
//!
//! Whatever happens to the packets, to the rings and to the hosts: a message that is delivered is the one that was sent, and is
//! delivered once; a message that is not is reported to its sender; all memory comes back; nothing is written where nothing
//! may be written; and every packet is accounted for.
//!
//! `cargo xtask soak` runs many seeds. One seed again: `cargo xtask soak --seeds 1 --from SEED`.
#![cfg(test)]

mod books;
mod plan;
mod run;
#[path = "../../../lm-protocol/tests/admission/seeds.rs"]
mod seeds;
mod writing;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::trace::{Hashes, recorded_seeds};
use crate::mutants::{Mutant, PUT_IN};
use crate::release::Released;
use crate::simnic::ImpairmentCounters;
pub(super) use books::check_packets;
use plan::Plan;
use run::Run;

/// Seeds that an ordinary test run takes.
const SEEDS: std::ops::Range<u64> = 0..120;
/// Which kinds of trouble beside the usual ones, with commas between.
const WITH_VARIABLE: &str = "LM_SOAK_WITH";
/// The file that the seeds' traces are written to; then they are compared with none.
const RECORD_VARIABLE: &str = "LM_SOAK_RECORD";
/// A seed that is not settled after so much virtual time never will be.
const LIMIT_NS: u64 = 120_000_000_000;
/// Which kinds of trouble there may be. Loss, duplication, reordering and delay always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Soak {
    /// Packets that nobody sent.
    pub(crate) foreign: bool,
    /// Hosts that pause.
    pub(crate) stalls: bool,
    /// A host that stops for ever.
    pub(crate) death: bool,
    /// Fill entries that run out, and full RX rings.
    pub(crate) rings: bool,
    /// Changed bytes: anywhere where there are digests, else in those headers of fragments that are checked without.
    pub(crate) corrupt: bool,
    /// Changed bytes anywhere where there are no digests either, so that nothing notices.
    pub(crate) unverified: bool,
    /// Messages are read while they arrive.
    pub(crate) reading: bool,
}

impl Soak {
    /// All that must be survived.
    pub(crate) const USUAL: Soak = Soak {
        foreign: true,
        stalls: true,
        death: true,
        rings: true,
        corrupt: true,
        unverified: false,
        reading: false,
    };

    /// Adds kinds by name.
    fn with(mut self, names: &str) -> Soak {
        for name in names.split(',').filter(|name| !name.is_empty()) {
            match name {
                "corrupt-unverified" => self.unverified = true,
                "reading" => self.reading = true,
                other => {
                    panic!("{WITH_VARIABLE}: unknown kind {other}; there are corrupt-unverified and reading")
                }
            }
        }
        self
    }
}

/// What a seed brought. Equal for every run of the seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Messages taken over by an engine.
    pub(crate) accepted: u64,
    pub(crate) delivered: u64,
    /// Reported to their senders as not delivered.
    pub(crate) reported: u64,
    /// Told to their receivers as given up by their writers.
    pub(crate) aborted: u64,
    pub(crate) sessions: u64,
    pub(crate) packets: u64,
    pub(crate) violations: u64,
    /// Sessions that went on by the one-copy path.
    pub(crate) astray: u64,
    /// Sessions that landed after they had begun by the one-copy path.
    pub(crate) changed_over: u64,
    /// Bytes that were read before their messages had ended.
    pub(crate) read_early: u64,
    pub(crate) virtual_ns: u64,
    pub(crate) died: bool,
    pub(crate) impaired: [ImpairmentCounters; 2],
    pub(super) trace: Hashes,
}

/// Runs a seed to its end and checks everything.
///
/// # Errors
///
/// What is wrong, in one line. Assertions of the engine panic.
pub(crate) fn soak(seed: u64, soak: &Soak) -> Result<Report, String> {
    let plan = Plan::new(seed, soak);
    let mut run = Run::new(seed, plan);
    while !run.is_settled() {
        run.round()?;
        if run.bed.now_ns - run.start_ns > LIMIT_NS {
            return Err(run.unsettled());
        }
    }
    run.finish()
}

/// Runs [`soak`], and makes a panic of the engine an error.
fn caught(seed: u64, kinds: &Soak) -> Result<Report, String> {
    seeds::caught(|| soak(seed, kinds))
}

/// The packets, events and messages of a seed are those that were recorded.
fn as_recorded(report: Report, recorded: Option<&Hashes>) -> Result<Report, String> {
    match recorded {
        Some(recorded) if *recorded != report.trace => Err(format!(
            "other {} than recorded; where that is meant: cargo xtask soak --record",
            report.trace.differences(*recorded)
        )),
        _ => Ok(report),
    }
}

#[test]
fn seeds_settle() {
    let with = std::env::var(WITH_VARIABLE).unwrap_or_default();
    let kinds = Soak::USUAL.with(&with);
    let file = std::env::var_os(RECORD_VARIABLE);
    let recorded = match kinds == Soak::USUAL && file.is_none() {
        true => recorded_seeds(),
        false => BTreeMap::new(),
    };
    let again = match with.is_empty() {
        true => "cargo xtask soak".to_owned(),
        false => format!("cargo xtask soak --with {with}"),
    };
    let (mut sum, mut traces) = (Report::default(), BTreeMap::new());
    let one = |seed| soak(seed, &kinds).and_then(|report| as_recorded(report, recorded.get(&seed)));
    let seeds = seeds::run(SEEDS, &again, one, |seed, report| {
        if file.is_some() {
            traces.insert(seed, report.trace);
        }
        sum.accepted += report.accepted;
        sum.delivered += report.delivered;
        sum.reported += report.reported;
        sum.aborted += report.aborted;
        sum.sessions += report.sessions;
        sum.packets += report.packets;
        sum.violations += report.violations;
        sum.astray += report.astray;
        sum.changed_over += report.changed_over;
    });
    println!(
        "{} messages, {} delivered, {} sessions, {} violations, {} packets",
        sum.accepted, sum.delivered, sum.sessions, sum.violations, sum.packets
    );
    if let Some(file) = file {
        let mut text = String::new();
        for (seed, hashes) in traces {
            let _ = writeln!(text, "{seed} {hashes}");
        }
        std::fs::write(file, text).expect("the file for traces can be written");
    }
    // That messages arrive and fail at all shows that something was tried.
    if seeds.end - seeds.start >= SEEDS.end {
        assert!(
            sum.delivered > 100
                && sum.reported > 10
                && sum.aborted > 10
                && sum.violations > 3
                && sum.astray > 0
                && sum.changed_over > 0,
            "{sum:?}"
        );
    }
}

/// Seeds that found a fault, beyond those that are always run: the books of messages shown in a round that ended early.
const FOUND: [u64; 2] = [12_695, 18_656];

#[test]
fn seeds_that_found_a_fault_settle() {
    for seed in FOUND {
        soak(seed, &Soak::USUAL).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn a_seed_repeats_itself() {
    for seed in [1, 2, 3, 17] {
        let first = soak(seed, &Soak::USUAL).expect("settled");
        assert_eq!(first, soak(seed, &Soak::USUAL).expect("settled"), "seed {seed}");
    }
}

/// Each mistake in a rule of the engine's is found by some seed.
#[test]
fn every_mistake_is_found() {
    let finds = |kinds: &Soak, seed: &u64| caught(*seed, kinds).is_err();
    for mutant in Mutant::ALL {
        PUT_IN.set(Some(mutant));
        let found = (0..SEEDS.end).find(|seed| finds(&Soak::USUAL, seed));
        println!("{mutant:?}: seed {found:?}");
        assert!(found.is_some(), "{mutant:?} is found by no seed");
    }
}

/// Whatever happens to packets and hosts, what is shown of a message is what was sent, and stays so.
#[test]
fn what_is_read_while_it_arrives_is_right() {
    let kinds = Soak {
        reading: true,
        ..Soak::USUAL
    };
    let early = (0..SEEDS.end).map(|seed| match caught(seed, &kinds) {
        Ok(report) => report.read_early,
        Err(error) => {
            panic!("seed {seed}: {error}; again: cargo xtask soak --seeds 1 --from {seed} --with reading")
        }
    });
    assert!(early.sum::<u64>() > 1 << 20);
}

/// Where nothing notices changed bytes, the soak does.
#[test]
fn corruption_without_digests_is_found() {
    let kinds = Soak {
        unverified: true,
        ..Soak::USUAL
    };
    let found = (0..SEEDS.end).filter(|&seed| {
        let result = caught(seed, &kinds);
        result.is_err_and(|error| error.contains(" is wrong ")) && caught(seed, &Soak::USUAL).is_ok()
    });
    assert!(found.count() > 0);
}

/// A byte of a message that the application keeps, of free landing memory, and of a zone's margin.
#[test]
fn what_the_soak_looks_for_it_finds() {
    let mut plan = Plan::new(1, &Soak::USUAL);
    // In zero-copy mode a device may write before a packet.
    plan.bed.wire = crate::simnic::WireConfig::default();
    plan.impairments = Default::default();
    plan.stalls.clear();
    plan.death = None;
    plan.detour = None;
    plan.mode = lm_protocol::geometry::Wire::Lm;
    plan.max_message_len = 60_000;
    plan.messages = [vec![50_000], vec![]];
    plan.keep_max_ns = u64::MAX >> 1;
    let mut run = Run::new(1, plan);
    while run.applications[1].held.is_empty() {
        run.round().expect("nothing is wrong yet");
    }
    run.check_guards().expect("untouched");
    let (message, _) = &run.applications[1].held[0];
    let Some(Released::Zone { start, len }) = message.released else {
        panic!("a landing zone");
    };
    let payload_start = message.umem_offset();
    let header_start = payload_start - u64::from(run.layout.header_len());
    let change = |run: &Run, at: u64| {
        let umem = &run.bed.hosts[1].memory.umem();
        let [byte] = umem.read_header::<1>(at);
        umem.copy_to(at, &[!byte]);
    };
    let margins = |run: &mut Run| {
        let (message, kept_ns) = run.applications[1].held.pop().expect("one");
        let result = run.check_margins(1, &message, (start, len));
        run.applications[1].held.push((message, kept_ns));
        result
    };
    let arena_end = {
        let arena = &run.bed.hosts[1].landing.as_ref().expect("landing").arena;
        arena.start() + arena.len()
    };
    for at in [start, header_start - 1, start + len - 1] {
        margins(&mut run).expect("untouched");
        change(&run, at);
        let error = margins(&mut run).expect_err("a margin was written");
        assert!(error.contains("guard byte"), "{error}");
        change(&run, at);
    }
    // Behind the arena, and at its end.
    for at in [arena_end, arena_end - 1] {
        change(&run, at);
        let error = run.check_guards().expect_err("free memory was written");
        assert!(error.contains("guard byte"), "{error}");
        change(&run, at);
    }
    change(&run, payload_start + 7);
    let error = run.give_back(1, 0).expect_err("the message was written");
    assert!(error.contains("byte 7 of 50000"), "{error}");
}
