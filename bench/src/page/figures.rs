//! Numbers out of reports: medians and quartiles of rounds, systems by the link they ran on, and how numbers are written.

use lm_measure::statistics::Summary;

use crate::suite::schema::{LatencyRound, Link, Report, Round, Row, System, TransferRound, What};

/// Systems of a report that ran on links of one kind and can be drawn side by side.
#[derive(Debug)]
pub(super) struct Group<'a> {
    pub(super) report: &'a Report,
    /// The link's name without what a variant has ` with ` or ` without `.
    pub(super) place: &'a str,
    pub(super) links: Vec<&'a Link>,
    pub(super) systems: Vec<&'a System>,
}

/// `veth` of `veth with RPS`.
pub(super) fn place_of(link: &str) -> &str {
    let end = [" with ", " without "]
        .iter()
        .filter_map(|word| link.find(word))
        .min();
    &link[..end.unwrap_or(link.len())]
}

/// Every report's systems by place, in their order.
pub(super) fn groups(reports: &[Report]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for report in reports {
        let first = groups.len();
        for system in &report.systems {
            let place = place_of(&system.link);
            match groups[first..].iter_mut().find(|group| group.place == place) {
                Some(group) => group.systems.push(system),
                None => groups.push(Group {
                    report,
                    place,
                    links: (report.links.iter())
                        .filter(|link| place_of(&link.name) == place)
                        .collect(),
                    systems: vec![system],
                }),
            }
        }
    }
    groups
}

impl<'a> Group<'a> {
    /// What was measured of a system, by size.
    pub(super) fn rows(&self, what: What, system: &str) -> Vec<&'a Row> {
        let rows = self.report.rows.iter();
        let mut rows: Vec<&Row> = rows
            .filter(|row| row.what == what && row.system == system)
            .collect();
        rows.sort_by_key(|row| row.size);
        rows
    }

    /// What was measured of a system, as a transfer with or without spare cycles.
    pub(super) fn transfers(&self, system: &str) -> Vec<&'a Row> {
        match self.rows(What::Throughput, system) {
            rows if rows.is_empty() => self.rows(What::Cpu, system),
            rows => rows,
        }
    }

    pub(super) fn has(&self, what: What) -> bool {
        let system = |row: &Row| self.systems.iter().any(|system| system.id == row.system);
        self.report.rows.iter().any(|row| row.what == what && system(row))
    }
}

/// A figure of every latency round.
pub(super) fn of_latency(row: &Row, figure: impl Fn(&LatencyRound) -> Option<f64>) -> Option<Summary> {
    let rounds = row.rounds.iter().filter_map(|round| match round {
        Round::Latency(round) => figure(round),
        Round::Transfer(_) => None,
    });
    Summary::of_finite(rounds)
}

/// A figure of every transfer.
pub(super) fn of_transfer(row: &Row, figure: impl Fn(&TransferRound) -> f64) -> Option<Summary> {
    let rounds = row.rounds.iter().filter_map(|round| match round {
        Round::Transfer(round) => Some(figure(round)),
        Round::Latency(_) => None,
    });
    Summary::of_finite(rounds)
}

/// Points of an `.hgrm` text: quantile and microseconds; of those with many more nines than samples only the first.
pub(super) fn of_histogram(text: &str) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut numbers = line.split_whitespace().map(str::parse::<f64>);
        if let (Some(Ok(value)), Some(Ok(quantile))) = (numbers.next(), numbers.next())
            && (0.0..1.0).contains(&quantile)
            && points.last().is_none_or(|last| last.0 < quantile)
        {
            points.push((quantile, value));
        }
    }
    points
}

/// Three significant digits.
pub(super) fn number(value: f64) -> String {
    let decimals = match value.abs() {
        0.0 => 0,
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 => 2,
        value if value >= 0.01 => 3,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

/// A ratio as the page writes it.
pub(super) fn times(value: f64) -> String {
    format!("{} ×", number(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let texts = [0.0, 0.0123, 0.42, 1.684, 28.94, 398.6].map(number);
        assert_eq!(texts, ["0", "0.012", "0.420", "1.68", "28.9", "399"]);
    }

    #[test]
    fn variants_of_a_link_are_one_place() {
        assert_eq!(place_of("veth with RPS"), "veth");
        assert_eq!(place_of("igb (emulated)"), "igb (emulated)");
    }

    #[test]
    fn histograms_are_read_as_the_tools_write_them() {
        let mut histogram = crate::histogram::LatencyHistogram::new();
        for us in 1..=1000 {
            histogram.record_ns(us * 1000);
        }
        let mut text = Vec::new();
        histogram.write_hgrm(&mut text).unwrap();
        let points = of_histogram(&String::from_utf8(text).unwrap());
        let median = points.iter().find(|point| point.0 >= 0.5).unwrap();
        assert!((median.1 - 500.0).abs() < 2.0, "{median:?}");
        assert!(points.iter().all(|point| point.0 < 1.0) && points.len() > 20);
    }
}
