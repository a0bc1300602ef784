//! Line charts as inline SVG, both axes logarithmic: names stand at the lines' ends, colours come from the page's style sheet, light or dark.

use lm_measure::size::exact;
use maud::{Markup, html};

use crate::size::ByteSize;
use crate::suite::schema::{Measured, Report, What};

/// Units of the drawing; the page scales it. To the right is room for names at the lines' ends.
const PLACE: [f64; 4] = [50.0, 420.0, 10.0, 260.0];
/// From one name to the next.
const NAME_HEIGHT: f64 = 13.5;

/// A message length, a figure, and what a pointer that rests on it is told.
type Point = (f64, f64, String);

/// Where values are drawn between the least and the most.
struct Scale {
    low: f64,
    high: f64,
    place: [f64; 2],
}

impl Scale {
    fn of(values: impl Iterator<Item = f64>, place: [f64; 2]) -> Scale {
        let (low, high) = values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        Scale {
            low: low / 1.2,
            high: high * 1.2,
            place,
        }
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        let [from, to] = self.place;
        let place = from + part * (to - from);
        (place * 10.0).round() / 10.0
    }

    /// Round values in it.
    fn ticks(&self) -> Vec<f64> {
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let all = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|factor| factor * 10_f64.powi(power)));
        all.filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }
}

/// A figure of each system against the message length: medians over the rounds, in multiples of a unit. Nothing where there is no line.
pub(super) fn chart(report: &Report, what: What, metric: &str, unit: f64, title: &str) -> Markup {
    let line = |system: &Measured| {
        let id = &system.id;
        let rows = (report.rows.iter()).filter(|row| row.what == what && row.system == *id);
        let points = rows.filter_map(|row| {
            let figure = row.summary(metric)?.median / unit;
            let says = format!("{id}: {} at {}", number(figure), exact(row.size));
            (figure > 0.0).then_some((row.size as f64, figure, says))
        });
        (id.clone(), points.collect::<Vec<Point>>())
    };
    let lines: Vec<_> = (report.systems.iter().map(line))
        .filter(|(_, points)| !points.is_empty())
        .collect();
    if lines.is_empty() {
        return html! {};
    }
    let points = || lines.iter().flat_map(|(_, points)| points);
    let [left, right, top, bottom] = PLACE;
    let x = Scale::of(points().map(|point| point.0), [left, right]);
    let y = Scale::of(points().map(|point| point.1), [bottom, top]);
    let ends: Vec<f64> = lines
        .iter()
        .map(|(_, points)| y.at(points[points.len() - 1].1))
        .collect();
    let names = spread_names(&ends, top);
    let sizes = (0..40).step_by(2).map(|power| 2_f64.powi(power));
    let height = bottom + 45.0 + NAME_HEIGHT * lines.len() as f64;
    html! {
        h3 { (title) }
        svg viewBox=(format!("0 0 640 {height:.0}")) role="img" aria-label=(title) {
            @for tick in y.ticks() {
                line.grid x1=(left) x2=(right) y1=(y.at(tick)) y2=(y.at(tick)) {}
                text x=(left - 6.0) y=(y.at(tick) + 4.0) text-anchor="end" { (number(tick)) }
            }
            @for size in sizes.filter(|size| (x.low..=x.high).contains(size)) {
                text x=(x.at(size)) y=(bottom + 17.0) text-anchor="middle" { (ByteSize::new(size as
                    u64).to_string()) }
            }
            @for ((name, points), place) in lines.iter().zip(&names) {
                g class=(family(name)) {
                    path d=(path(points, &x, &y)) {}
                    @for (size, figure, says) in points {
                        circle cx=(x.at(*size)) cy=(y.at(*figure)) r="2.5" { title { (says) } }
                    }
                    text x=(right + 8.0) y=(place + 4.0) { (name) }
                }
            }
        }
    }
}

fn path(points: &[Point], x: &Scale, y: &Scale) -> String {
    let places = points
        .iter()
        .map(|(size, figure, _)| format!("{} {}", x.at(*size), y.at(*figure)));
    format!("M{}", places.collect::<Vec<_>>().join("L"))
}

/// Places for names that want to be at `wanted`: in that order, and far enough apart.
fn spread_names(wanted: &[f64], top: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    let mut places = wanted.to_vec();
    let mut least = top;
    for &index in &order {
        places[index] = places[index].max(least);
        least = places[index] + NAME_HEIGHT;
    }
    places
}

/// The style's class for a system: systems of one kind have one colour.
fn family(name: &str) -> &'static str {
    let families = [
        ("lm", "lm"),
        ("real-time", "lm"),
        ("udp", "udp"),
        ("sockperf", "udp"),
        ("tcp", "tcp"),
        ("bare", "bare"),
    ];
    let found = families.iter().find(|(start, _)| name.starts_with(start));
    found.map_or("other", |(_, family)| family)
}

/// Three significant digits.
fn number(value: f64) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let texts = [0.0, 0.0123, 0.42, 1.684, 28.94, 398.6].map(number);
        assert_eq!(texts, ["0", "0.012", "0.420", "1.68", "28.9", "399"]);
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let scale = Scale::of([3.0, 40.0].into_iter(), [0.0, 100.0]);
        assert_eq!(scale.ticks(), [5.0, 10.0, 20.0]);
        assert!(scale.at(3.0) > 0.0 && scale.at(40.0) < 100.0);
        // A single value has an axis as well.
        assert_eq!(Scale::of([7.0].into_iter(), [0.0, 100.0]).at(7.0), 50.0);
    }

    #[test]
    fn names_do_not_overlap() {
        let mut places = spread_names(&[50.0, 51.0, 10.0, 219.0, 220.0], 13.0);
        assert!(places[0] < places[1] && places[2] < places[0]);
        places.sort_by(f64::total_cmp);
        assert!(
            places
                .windows(2)
                .all(|pair| pair[1] - pair[0] >= NAME_HEIGHT - 1e-9),
            "{places:?}"
        );
    }
}
