//! The evaluation of LM's paper (LM §4), redone: its figures beside ours, as ratios to kernel UDP in the same run, because a ratio
//! is what two machines twenty years apart can share.
//!
//! Which rows are ours is told by names: links `veth` (below an MTU of 9000 and from there on), `through a switch`, `igb (emulated)`,
//! `igb (emulated), coalescing` and `igb (emulated), polling`; systems `lm`, `lm-sleeping` and `udp-…`. What is at one place may be in
//! several files: `latency` and `throughput` write one each. What is not there is "not measured".

use maud::{Markup, html};

use super::figures::{Group, number, of_latency, of_transfer, times};
use crate::suite::schema::{Row, TransferRound, What};

/// All that was measured at one place.
type Place<'a> = Vec<&'a Group<'a>>;

/// A system's figures at one place.
#[derive(Clone, Copy)]
struct Side<'a> {
    place: &'a [&'a Group<'a>],
    systems: &'a dyn Fn(&str) -> bool,
}

/// What one side shows, and in which unit.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    value: f64,
    unit: &'static str,
}

/// Sizes at which something is compared.
const SMALL: u64 = 64;
const MEDIUM: u64 = 7168;
const BULK: u64 = 65_536;
/// Links of at least this MTU have jumbo frames.
const JUMBO_MTU: u32 = 9000;

/// A row within a factor of two of the size, the nearest.
fn nearest<'a>(rows: impl Iterator<Item = &'a Row>, size: u64) -> impl Iterator<Item = &'a Row> {
    let rows: Vec<&Row> = rows
        .filter(|row| row.size.max(1) <= 2 * size && size <= 2 * row.size.max(1))
        .collect();
    let least = rows.iter().map(|row| row.size.abs_diff(size)).min();
    rows.into_iter()
        .filter(move |row| Some(row.size.abs_diff(size)) == least)
}

impl<'a> Side<'a> {
    /// A figure by the first file that has it, so that both sides of a ratio are of one run.
    fn first(&self, figure: impl Fn(&Group<'a>, &[&'a str]) -> Option<f64>) -> Option<f64> {
        self.place.iter().find_map(|group| {
            let ids = group.systems.iter().map(|system| system.id.as_str());
            let ids: Vec<&str> = ids.filter(|id| (self.systems)(id)).collect();
            figure(group, &ids)
        })
    }

    /// The least median round trip among the systems, at a size near this one.
    fn latency(&self, size: u64) -> Option<Figure> {
        let value = self.first(|group, ids| {
            let rows = ids.iter().flat_map(|id| group.rows(What::Latency, id));
            let medians = nearest(rows, size).filter_map(|row| of_latency(row, |round| Some(round.p50_ns)));
            medians.map(|spread| spread.median / 1e3).min_by(f64::total_cmp)
        });
        value.map(|value| Figure { value, unit: "µs" })
    }

    /// The greatest throughput at any size.
    fn bandwidth(&self) -> Option<Figure> {
        let value = self.first(|group, ids| {
            let rows = ids.iter().flat_map(|id| group.transfers(id));
            let medians = rows.filter_map(|row| of_transfer(row, |round| round.bits_per_s() / 1e9));
            medians.map(|spread| spread.median).max_by(f64::total_cmp)
        });
        value.map(|value| Figure {
            value,
            unit: "Gbit/s",
        })
    }

    /// The least processor time for a GB, at 64 KiB.
    fn cpu(&self) -> Option<Figure> {
        let value = self.first(|group, ids| {
            let rows = ids.iter().flat_map(|id| group.transfers(id));
            let medians = nearest(rows, BULK).filter_map(|row| of_transfer(row, TransferRound::cpu_s_per_gb));
            medians.map(|spread| spread.median).min_by(f64::total_cmp)
        });
        value.map(|value| Figure {
            value,
            unit: "s per GB",
        })
    }
}

fn is_lm(id: &str) -> bool {
    id == "lm"
}

fn is_sleeping_lm(id: &str) -> bool {
    id == "lm-sleeping"
}

/// On an emulated card whoever spins takes a core from the emulator: there LM's faster way to wait counts.
fn is_lm_on_card(id: &str) -> bool {
    is_lm(id) || is_sleeping_lm(id)
}

/// How LM waits where a row compares it with others.
const fn lm_of(on_card: bool) -> &'static dyn Fn(&str) -> bool {
    if on_card { &is_lm_on_card } else { &is_lm }
}

fn is_blocking_udp(id: &str) -> bool {
    id == "udp-blocking"
}

/// Kernel UDP without segmentation offloads, which make of many packets one.
fn is_udp(id: &str) -> bool {
    id.starts_with("udp-") && !id.contains("gso")
}

/// One figure over another.
fn ratio(one: Option<Figure>, other: Option<Figure>) -> Markup {
    match (one, other) {
        (Some(one), Some(other)) if other.value > 0.0 => html! {
            strong { (times(one.value / other.value)) } " "
            span.note { (number(one.value)) " over " (number(other.value)) " " (one.unit) }
        },
        _ => not_measured(),
    }
}

fn not_measured() -> Markup {
    html! { span.absent { "not measured" } }
}

/// The first place whose name has all these words and none of those, with jumbo frames or without: one file of each command.
fn place<'a>(groups: &'a [Group<'a>], words: &[&str], without: &[&str], jumbo: bool) -> Place<'a> {
    let mut place: Place<'a> = Vec::new();
    for group in groups {
        let is_meant = words.iter().all(|word| group.place.contains(word))
            && !without.iter().any(|word| group.place.contains(word))
            && group.links.iter().any(|link| (link.mtu >= JUMBO_MTU) == jumbo);
        let is_more = place
            .iter()
            .all(|known| known.place == group.place && known.report.command != group.report.command);
        if is_meant && is_more {
            place.push(group);
        }
    }
    place
}

/// Places of the paper's evaluation, as we have them.
struct Places<'a> {
    direct: Place<'a>,
    jumbo: Place<'a>,
    switch: Place<'a>,
    card: Place<'a>,
    coalescing: Place<'a>,
    polling: Place<'a>,
}

impl<'a> Places<'a> {
    fn of(groups: &'a [Group<'a>]) -> Places<'a> {
        Places {
            direct: place(groups, &["veth"], &["switch"], false),
            jumbo: place(groups, &["veth"], &["switch"], true),
            switch: place(groups, &["switch"], &[], false),
            card: place(groups, &["igb"], &["coalesc", "polling"], false),
            coalescing: place(groups, &["igb", "coalesc"], &[], false),
            polling: place(groups, &["igb", "polling"], &[], false),
        }
    }
}

fn side<'a>(place: &'a [&'a Group<'a>], systems: &'a dyn Fn(&str) -> bool) -> Side<'a> {
    Side { place, systems }
}

/// The part of the page.
pub(super) fn section(groups: &[Group<'_>]) -> Markup {
    let places = Places::of(groups);
    html! {
        section {
            h2 { "The paper's evaluation, redone" }
            p { "LM (Lightweight Messages) was measured on Celerons with 2 GHz, Intel PRO/1000 adapters, Linux 2.4 and Gigabit Ethernet (its table 2). "
                "No absolute figure of then compares with one of today, so each stands as a ratio to kernel UDP, or to LM itself, in the same run. "
                "On a veth pair there is no wire, no adapter and no interrupt; what the emulated adapter shows is its emulation's speed as well." }
            (to_udp(&places))
            (features(&places))
            (table_3(&places))
        }
    }
}

/// Figure 4, LM and standard UDP.
fn to_udp(places: &Places<'_>) -> Markup {
    let here = [
        ("veth, back to back", &places.direct, lm_of(false)),
        ("veth, jumbo frames (MTU 9000)", &places.jumbo, lm_of(false)),
        ("through a switch", &places.switch, lm_of(false)),
        ("igb, emulated", &places.card, lm_of(true)),
    ];
    html! {
        h3 { "Figure 4: LM over standard UDP" }
        table.cards {
            thead { tr { th { "where" } th { "latency, small message" } th { "bandwidth" } th { "CPU" } } }
            tbody {
                tr.paper {
                    td { "the paper, back to back" }
                    td data-th="latency" { strong { (times(28.9 / 68.1)) } " " span.note { "28.9 over 68.1 µs" } }
                    td data-th="bandwidth" { strong { (times(668.6 / 398.6)) } " " span.note { "668.6 over 398.6 Mbit/s" } }
                    td data-th="CPU" { "“much lower” " span.note { "no figure in its text" } }
                }
                @for (name, place, lm) in here {
                    @let (lm, udp, blocking) = (side(place, lm), side(place, &is_udp), side(place, &is_blocking_udp));
                    tr {
                        td { (name) }
                        td data-th="latency" {
                            div { (ratio(lm.latency(SMALL), blocking.latency(SMALL))) }
                            @if udp.latency(SMALL).is_some() {
                                div { span.note { "the fastest UDP: " } (ratio(lm.latency(SMALL), udp.latency(SMALL))) }
                            }
                        }
                        td data-th="bandwidth" { (ratio(lm.bandwidth(), udp.bandwidth())) }
                        td data-th="CPU" { (ratio(lm.cpu(), udp.cpu())) }
                    }
                }
            }
        }
        p.note { "Latency: the median round trip of 64 bytes (or the size next to it) over blocking UDP's. Bandwidth: the highest at any size, over that of the "
            "best UDP without segmentation offloads. CPU: busy seconds of all cores for a GB in messages of 64 KiB. On the "
            "emulated card LM sleeps or spins, whichever is better: spinning takes a core from the emulator." }
    }
}

/// LM beside LM: what, where the paper speaks of it, what it says of each of [`HEADS`], and the two sides.
type Comparison<'a> = (&'static str, &'static str, [&'static str; 4], Side<'a>, Side<'a>);

/// What LM is compared with itself in.
const HEADS: [&str; 4] = ["latency, 64 B", "latency, 7 KiB", "bandwidth", "CPU"];

/// Figure 4's other lines, and what the paper leaves to future work: LM over itself.
fn features(places: &Places<'_>) -> Markup {
    let comparisons: [Comparison<'_>; 4] = [
        (
            "jumbo over standard frames",
            "figure 4",
            ["worse", "worse", "higher for large messages", "lower"],
            side(&places.jumbo, &is_lm),
            side(&places.direct, &is_lm),
        ),
        (
            "interrupt coalescing over polling (igb, emulated)",
            "figure 4, §5",
            ["worse", "worse", "", "lower"],
            side(&places.coalescing, &is_sleeping_lm),
            side(&places.polling, &is_lm),
        ),
        (
            "through a switch over back to back",
            "§4",
            ["", "", "", ""],
            side(&places.switch, &is_lm),
            side(&places.direct, &is_lm),
        ),
        (
            "sleeping over spinning",
            "§5, adaptive interrupts",
            ["", "", "", ""],
            side(&places.direct, &is_sleeping_lm),
            side(&places.direct, &is_lm),
        ),
    ];
    let pair = |one: Side<'_>, other: Side<'_>, figure: &dyn Fn(&Side<'_>) -> Option<Figure>| {
        ratio(figure(&one), figure(&other))
    };
    html! {
        h3 { "Figure 4 and §5: LM over LM" }
        table.cards {
            thead { tr { th { "what" } @for head in HEADS { th { (head) } } } }
            tbody {
                @for (name, part, says, one, other) in comparisons {
                    tr.paper {
                        td { (name) br; span.note { "the paper, " (part) } }
                        @for (head, word) in HEADS.iter().zip(says) { td data-th=(head) { @if word.is_empty() { span.absent { "no figure" } } @else { "“" (word) "”" } } }
                    }
                    tr {
                        td { "here" }
                        td data-th=(HEADS[0]) { (pair(one, other, &|side| side.latency(SMALL))) }
                        td data-th=(HEADS[1]) { (pair(one, other, &|side| side.latency(MEDIUM))) }
                        td data-th=(HEADS[2]) { (pair(one, other, &|side| side.bandwidth())) }
                        td data-th=(HEADS[3]) { (pair(one, other, &|side| side.cpu())) }
                    }
                }
            }
        }
        p.note { "Interrupt coalescing: the card holds interrupts back, and LM sleeps until one comes. Polling: the card does not, and LM never sleeps." }
    }
}

/// An approach of the paper's table 3: name, latency in µs, bandwidth in Mbit/s, zero-copy receiving, adapter requirements.
type Approach = (&'static str, Option<f64>, f64, &'static str, &'static str);

const TABLE_3: [Approach; 4] = [
    ("LM", Some(28.9), 668.6, "yes", "no"),
    ("CLIC", Some(36.0), 450.0, "no", "no"),
    ("GAMMA", Some(32.0), 568.0, "no", "no"),
    ("Speculative Defragmentation", None, 600.0, "yes", "yes"),
];

/// The paper's table 3, with latency and bandwidth over those of UDP in its text.
fn table_3(places: &Places<'_>) -> Markup {
    let ours = [
        ("LM here, veth", &places.direct, lm_of(false)),
        ("LM here, igb (emulated)", &places.card, lm_of(true)),
    ];
    html! {
        h3 { "Table 3: LM and other mechanisms" }
        table.cards {
            thead { tr {
                th { "approach" } th { "latency over UDP" } th { "bandwidth over UDP" } th { "zero-copy receiving" } th { "adapter requirements" }
            } }
            tbody {
                @for (name, latency, bandwidth, zero_copy, adapter) in TABLE_3 {
                    tr.paper {
                        td { (name) br; span.note { "the paper" } }
                        td data-th="latency" { @match latency {
                            Some(latency) => { strong { (times(latency / 68.1)) } " " span.note { (latency) " µs" } },
                            None => span.absent { "not mentioned" },
                        } }
                        td data-th="bandwidth" { strong { (times(bandwidth / 398.6)) } " " span.note { (bandwidth) " Mbit/s" } }
                        td data-th="zero-copy receiving" { (zero_copy) }
                        td data-th="adapter requirements" { (adapter) }
                    }
                }
                @for (name, place, lm) in ours {
                    @let (lm, udp, blocking) = (side(place, lm), side(place, &is_udp), side(place, &is_blocking_udp));
                    tr {
                        td { (name) }
                        td data-th="latency" { (ratio(lm.latency(SMALL), blocking.latency(SMALL))) }
                        td data-th="bandwidth" { (ratio(lm.bandwidth(), udp.bandwidth())) }
                        td data-th="zero-copy receiving" { @match mode(place) {
                            Some(mode) => { @if mode.contains("zero-copy") { "yes" } @else { "no" } " " span.note { (mode) } },
                            None => (not_measured()),
                        } }
                        td data-th="adapter requirements" { "a driver with XDP; zero-copy mode of it for zero-copy" }
                    }
                }
            }
        }
    }
}

/// How AF_XDP moved LM's packets there.
fn mode<'a>(place: &[&'a Group<'a>]) -> Option<&'a str> {
    place.iter().find_map(|group| {
        let lm = group.systems.iter().find(|system| is_lm_on_card(&system.id))?;
        let link = group.links.iter().find(|link| link.name == lm.link)?;
        Some(link.mode.as_str())
    })
}
