//! What is compared with what: the first system with each other one, within the rounds.

use lm_measure::size::exact;
use lm_measure::statistics::Summary;

use super::schema::{Ratio, Row, What};

/// The figures that are compared.
const fn metrics(what: What) -> [&'static str; 2] {
    match what {
        What::Stream => ["bits_per_s", "cpu_s_per_gb"],
        What::RoundTrips | What::Beside => ["p50", "p99"],
    }
}

/// Ratios of the first system over all others, row by row.
pub(super) fn ratios(rows: &[Row], first: &str) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for one in rows.iter().filter(|row| row.system == first) {
        let others = rows
            .iter()
            .filter(|row| (row.what, row.size) == (one.what, one.size));
        for other in others.filter(|row| row.system != first) {
            ratios.extend(
                metrics(one.what)
                    .iter()
                    .filter_map(|metric| ratio(one, other, metric)),
            );
        }
    }
    ratios
}

fn ratio(one: &Row, other: &Row, metric: &str) -> Option<Ratio> {
    let of_round = |round: &super::schema::Round| {
        let beside = other.rounds.iter().find(|other| other.at == round.at)?;
        Some(round.figure(metric)? / beside.figure(metric)?)
    };
    let summary = Summary::of_finite(one.rounds.iter().filter_map(of_round))?;
    let [low, high] = summary.interval;
    Some(Ratio {
        what: one.what,
        size: one.size,
        metric: metric.to_owned(),
        system: one.system.clone(),
        against: other.system.clone(),
        rounds: summary.samples.len() as u32,
        median: summary.median,
        low,
        high,
    })
}

/// What a newcomer wants to know, in a line: the first system beside the kernel's UDP and TCP, each in its best way.
pub(super) fn headline(ratios: &[Ratio]) -> Option<String> {
    let first = &ratios.first()?.system;
    let name = if first == "lm" { "LM" } else { first };
    let mut parts = Vec::new();
    for (family, title) in [("udp", "kernel UDP"), ("tcp", "kernel TCP")] {
        let of = |what, metric: &str| {
            let is_it = move |ratio: &&Ratio| ratio.what == what && ratio.against.starts_with(family);
            let found = ratios.iter().filter(is_it).filter(|ratio| ratio.metric == metric);
            found.collect::<Vec<_>>()
        };
        let size = of(What::Stream, "bits_per_s")
            .iter()
            .map(|ratio| ratio.size)
            .max();
        // The best of the family is the one that this is least ahead of.
        let best = (of(What::Stream, "bits_per_s").into_iter())
            .filter(|ratio| Some(ratio.size) == size)
            .min_by(|one, other| one.median.total_cmp(&other.median));
        if let Some(best) = best {
            let cpu = of(What::Stream, "cpu_s_per_gb")
                .into_iter()
                .find(|ratio| (ratio.size, &ratio.against) == (best.size, &best.against));
            let at = cpu.map_or_else(String::new, |cpu| {
                format!(" at {:.2} × of its processor time", cpu.median)
            });
            let size = exact(best.size);
            parts.push(format!(
                "{:.2} × {title} ({}) at {size}{at}",
                best.median, best.against
            ));
        }
        let shortest = (of(What::RoundTrips, "p50").into_iter()).max_by(|one, other| {
            (other.size, one.median)
                .partial_cmp(&(one.size, other.median))
                .expect("numbers")
        });
        if let Some(shortest) = shortest {
            let size = exact(shortest.size);
            parts.push(format!(
                "round trips of {size} take {:.2} × of {title}'s ({})",
                shortest.median, shortest.against
            ));
        }
    }
    (!parts.is_empty()).then(|| format!("{name}: {}.", parts.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::super::schema::Round;
    use super::*;

    fn row(system: &str, gbit: &[f64]) -> Row {
        let round = |(at, gbit): (u32, &f64)| Round {
            at,
            bytes: (gbit * 1e9 / 8.0) as u64,
            seconds: 1.0,
            cpu_seconds_machine: 1.0,
            ..Round::default()
        };
        Row {
            what: What::Stream,
            system: system.to_owned(),
            size: 65_536,
            rounds: (0..).zip(gbit).map(round).collect(),
            histogram: None,
        }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let mut rows = [row("lm", &[2.0, 4.0, 8.0]), row("udp-gso", &[1.0, 2.0, 16.0])];
        let found = ratios(&rows, "lm");
        // The medians' ratio is 2, and that of the rounds' ratios as well; without the second round it is not.
        assert_eq!((found[0].median, found[0].low, found[0].high), (2.0, 0.5, 2.0));
        assert_eq!(
            (&*found[0].metric, &*found[1].metric),
            ("bits_per_s", "cpu_s_per_gb")
        );
        assert_eq!(found[1].median, 0.5);
        rows[1].rounds.remove(1);
        assert_eq!(
            (ratios(&rows, "lm")[0].rounds, ratios(&rows, "lm")[0].median),
            (2, 1.25)
        );
        assert!(ratios(&rows, "tcp").is_empty());
    }

    #[test]
    fn the_first_line_names_the_best_of_the_kernel() {
        let rows = [
            row("lm", &[2.0]),
            row("udp-gso", &[1.0]),
            row("udp-blocking", &[0.5]),
            row("tcp", &[4.0]),
        ];
        let line = headline(&ratios(&rows, "lm")).unwrap();
        assert!(
            line.starts_with("LM: 2.00 × kernel UDP (udp-gso) at 64 KiB at 0.50 × of its processor time; "),
            "{line}"
        );
        assert!(line.contains("0.50 × kernel TCP (tcp)"), "{line}");
        assert_eq!(headline(&[]), None);
    }
}
