//! Line charts as inline SVG: names stand at the lines' ends, colours come from the page's style sheet, light or dark.

use std::fmt::Write as _;

use maud::{Markup, html};

use super::figures::number;

/// Units of the drawing; the page scales it to its column.
const WIDTH: f64 = 440.0;
const LEFT: f64 = 46.0;
/// Room for names at the lines' ends.
const RIGHT: f64 = 118.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;
/// Height of what is drawn, at least.
const HEIGHT: f64 = 220.0;
/// From one name to the next.
const NAME_HEIGHT: f64 = 13.5;

/// One axis.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// What it shows, with its unit.
    pub(super) title: String,
    /// Equal distances are equal factors.
    pub(super) logarithmic: bool,
    /// Values with a name; none: the axis finds its own.
    pub(super) ticks: Vec<(f64, String)>,
}

/// A place on a line.
#[derive(Clone, Debug)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    /// A bar from here to there: the quartiles.
    pub(super) range: Option<(f64, f64)>,
    /// What a pointer that rests on it is told; empty: no dot.
    pub(super) says: String,
}

/// One line.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<Point>,
}

/// One chart.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    /// What a reader has to know to read it.
    pub(super) note: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) lines: Vec<Line>,
}

/// The style's class for a system, by its id or name: systems of one kind have one colour.
pub(super) fn family(name: &str) -> &'static str {
    let name = name.to_lowercase();
    let families = [
        ("lm", "lm"),
        ("udp", "udp"),
        ("sockperf", "udp"),
        ("kernel udp", "udp"),
        ("tcp", "tcp"),
        ("iperf3-tcp", "tcp"),
        ("iperf3", "udp"),
        ("kernel tcp", "tcp"),
        ("quinn", "quic"),
        ("bare", "bare"),
        ("limit", "bare"),
        ("xsk", "bare"),
    ];
    let found = families.iter().find(|(start, _)| name.starts_with(start));
    found.map_or("other", |(_, family)| family)
}

/// Lines of one family differ by these, in their order.
const DASHES: [&str; 6] = ["none", "5 3", "1.5 2.5", "9 3", "7 2.5 1.5 2.5", "3 3"];

/// An axis with its ends and its length in the drawing.
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) logarithmic: bool,
    pub(super) from: f64,
    pub(super) to: f64,
}

impl Scale {
    /// Where a value is drawn; one beyond an end, such as 0 on a logarithmic axis, at that end.
    pub(super) fn at(&self, value: f64) -> f64 {
        let value = value.clamp(self.low, self.high);
        let part = match self.logarithmic {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        self.from + part * (self.to - self.from)
    }
}

/// Round values from `low` to `high`: four to eight of them.
pub(super) fn round_ticks(low: f64, high: f64, logarithmic: bool) -> Vec<f64> {
    if logarithmic {
        let decades = (high / low).log10();
        let factors: &[f64] = match decades {
            ..1.5 => &[1.0, 2.0, 3.0, 5.0, 7.0],
            1.5..3.0 => &[1.0, 3.0],
            _ => &[1.0],
        };
        let first = low.log10().floor() as i32;
        let last = high.log10().ceil() as i32;
        let all = (first..=last).flat_map(|power| factors.iter().map(move |f| f * 10f64.powi(power)));
        let ticks: Vec<f64> = all
            .filter(|tick| (low * 0.999..=high * 1.001).contains(tick))
            .collect();
        // Between two of them a linear axis looks the same.
        if ticks.len() > 1 {
            return ticks;
        }
    }
    let rough = (high - low) / 5.0;
    let magnitude = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * magnitude);
    let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(rough);
    let first = (low / step).ceil();
    (0..=8)
        .map(|count| (first + f64::from(count)) * step)
        .filter(|tick| *tick <= high * 1.001)
        .collect()
}

/// Places for names that want to be at `wanted`: in that order, and far enough apart.
fn spread_names(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    let mut places = wanted.to_vec();
    let mut least = top;
    for &index in &order {
        places[index] = places[index].max(least);
        least = places[index] + NAME_HEIGHT;
    }
    let mut most = bottom;
    for &index in order.iter().rev() {
        places[index] = places[index].min(most);
        most = places[index] - NAME_HEIGHT;
    }
    places
}

impl Chart {
    /// The chart with its title, for one column of the page; nothing where there is no line.
    pub(super) fn draw(&self) -> Markup {
        let drawn: Vec<&Line> = self.lines.iter().filter(|line| !line.points.is_empty()).collect();
        if drawn.is_empty() {
            return html! {};
        }
        html! {
            figure.chart {
                figcaption { strong { (self.title) } @if !self.note.is_empty() { " " span.note { (self.note) } } }
                (self.svg(&drawn))
            }
        }
    }

    fn svg(&self, lines: &[&Line]) -> Markup {
        let height = HEIGHT.max(lines.len() as f64 * NAME_HEIGHT);
        let (right, bottom) = (WIDTH - RIGHT, TOP + height);
        let values = || lines.iter().flat_map(|line| &line.points);
        let ys = values().flat_map(|point| {
            let (low, high) = point.range.unwrap_or((point.y, point.y));
            [low, high, point.y]
        });
        let (x, y) = (
            scale(&self.x, values().map(|point| point.x), (LEFT, right)),
            scale(&self.y, ys, (bottom, TOP)),
        );
        let y_ticks: Vec<(f64, String)> = match self.y.ticks.is_empty() {
            true => round_ticks(y.low, y.high, y.logarithmic)
                .into_iter()
                .map(|tick| (tick, tick_name(tick)))
                .collect(),
            false => self.y.ticks.clone(),
        };
        let ends: Vec<(f64, f64)> = lines
            .iter()
            .filter_map(|line| line.points.last())
            .map(|point| (x.at(point.x), y.at(point.y)))
            .collect();
        let wanted: Vec<f64> = ends.iter().map(|end| end.1).collect();
        let names = spread_names(&wanted, TOP + 3.0, bottom);
        let dashes = dashes(lines);
        html! {
            svg viewBox=(format!("0 0 {WIDTH} {:.0}", bottom + BOTTOM)) role="img" aria-label=(self.title) {
                @for (tick, name) in &y_ticks {
                    line.grid x1=(LEFT) x2=(right) y1=(place(y.at(*tick))) y2=(place(y.at(*tick))) {}
                    text.tick x=(LEFT - 6.0) y=(place(y.at(*tick) + 4.0)) text-anchor="end" { (name) }
                }
                @for (tick, name) in self.x.ticks.iter().filter(|(tick, _)| (x.low..=x.high).contains(tick)) {
                    line.axis x1=(place(x.at(*tick))) x2=(place(x.at(*tick))) y1=(place(bottom)) y2=(place(bottom + 4.0)) {}
                    text.tick x=(place(x.at(*tick))) y=(place(bottom + 17.0)) text-anchor="middle" { (name) }
                }
                line.axis x1=(LEFT) x2=(right) y1=(place(bottom)) y2=(place(bottom)) {}
                text.title x=(place((LEFT + right) / 2.0)) y=(place(bottom + 33.0)) text-anchor="middle" { (self.x.title) }
                @for (index, line) in lines.iter().enumerate() {
                    g class=(format!("line {}", family(&line.name))) {
                        @for point in &line.points {
                            @if let Some((low, high)) = point.range {
                                line.range x1=(place(x.at(point.x))) x2=(place(x.at(point.x))) y1=(place(y.at(low))) y2=(place(y.at(high))) {}
                            }
                        }
                        path d=(path(line, &x, &y)) stroke-dasharray=(dashes[index]) {}
                        @for point in line.points.iter().filter(|point| !point.says.is_empty()) {
                            circle cx=(place(x.at(point.x))) cy=(place(y.at(point.y))) r="2.2" { title { (line.name) ": " (point.says) } }
                        }
                        path.lead d=(lead(ends[index], names[index], right)) {}
                        text x=(right + 12.0) y=(place(names[index] + 4.0)) { (line.name) }
                    }
                }
            }
        }
    }
}

/// The axis from the least value to the greatest; linear ones begin at 0.
fn scale(axis: &Axis, values: impl Iterator<Item = f64>, (from, to): (f64, f64)) -> Scale {
    let (mut low, mut high) = values
        .filter(|value| value.is_finite() && (!axis.logarithmic || *value > 0.0))
        .fold((f64::INFINITY, 0.0f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    if !axis.logarithmic {
        (low, high) = (0.0, high * 1.05);
    } else if axis.ticks.is_empty() {
        (low, high) = (low * 0.9, high * 1.1);
    }
    if low.partial_cmp(&high) != Some(std::cmp::Ordering::Less) {
        (low, high) = match axis.logarithmic && high > 0.0 {
            true => (high / 2.0, high * 2.0),
            false => (0.0, 1.0),
        };
    }
    Scale {
        low,
        high,
        logarithmic: axis.logarithmic,
        from,
        to,
    }
}

fn dashes(lines: &[&Line]) -> Vec<&'static str> {
    let before = |index: usize| {
        let own = family(&lines[index].name);
        lines[..index]
            .iter()
            .filter(|line| family(&line.name) == own)
            .count()
    };
    (0..lines.len())
        .map(|index| DASHES[before(index) % DASHES.len()])
        .collect()
}

fn path(line: &Line, x: &Scale, y: &Scale) -> String {
    let mut text = String::new();
    for point in &line.points {
        let step = if text.is_empty() { 'M' } else { 'L' };
        let _ = write!(text, "{step}{} {}", place(x.at(point.x)), place(y.at(point.y)));
    }
    text
}

/// From a line's end to its name.
fn lead((x, y): (f64, f64), name: f64, right: f64) -> String {
    format!(
        "M{} {}L{} {}L{} {}",
        place(x + 3.0),
        place(y),
        place(right.max(x + 3.0)),
        place(y),
        place(right + 9.0),
        place(name)
    )
}

/// A place in a drawing.
pub(super) fn place(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

pub(super) fn tick_name(value: f64) -> String {
    let text = number(value);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(round_ticks(0.0, 21.0, false), [0.0, 5.0, 10.0, 15.0, 20.0]);
        assert_eq!(
            round_ticks(2.7, 60.0, true),
            [3.0, 5.0, 7.0, 10.0, 20.0, 30.0, 50.0]
        );
        assert_eq!(round_ticks(10.6, 13.0, true), [11.0, 11.5, 12.0, 12.5, 13.0]);
        assert_eq!(round_ticks(0.9, 9000.0, true), [1.0, 10.0, 100.0, 1000.0]);
    }

    #[test]
    fn names_do_not_overlap_and_stay_inside() {
        let places = spread_names(&[50.0, 51.0, 10.0, 219.0, 220.0], 13.0, 230.0);
        let mut sorted = places.clone();
        sorted.sort_by(f64::total_cmp);
        assert!(
            sorted
                .windows(2)
                .all(|pair| pair[1] - pair[0] >= NAME_HEIGHT - 1e-9),
            "{places:?}"
        );
        assert!(sorted[0] >= 10.0 && sorted[4] <= 230.0, "{places:?}");
        assert!(places[0] < places[1] && places[2] < places[0]);
    }

    #[test]
    fn systems_of_a_kind_share_a_colour() {
        let families = [
            "lm-no-integrity",
            "udp-gso",
            "kernel TCP, cubic",
            "quinn",
            "bare",
            "ucx_perftest",
        ]
        .map(family);
        assert_eq!(families, ["lm", "udp", "tcp", "quic", "bare", "other"]);
    }
}
