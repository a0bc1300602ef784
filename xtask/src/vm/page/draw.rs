//! The figures: a landing zone's memory from left to right, time from top to bottom.
//!
//! A header is 66 bytes of 1514 and must be seen, so the scale has two levels: the last bytes of each fragment's payload, where the next
//! one's headers lie meanwhile, are drawn wide, and what is before them narrow.

use svg::Document;
use svg::node::element::{Group, Line, Path, Rectangle, Style, Text, Title};

use crate::vm::checks::overlay::{Event, Run, Step, Trace, What};

/// Colours that people with any kind of sight tell apart (Okabe and Ito 2008), on a panel of its own for light or dark surroundings. No
/// CSS variables: not every program that draws SVG knows them.
const STYLE: &str = "\
text{font:12px 'DejaVu Sans',Verdana,sans-serif;fill:#1c1c1c}\
.small{font-size:10.5px;fill:#5d5d5d}.head{font-weight:bold;font-size:13px}\
.mid{text-anchor:middle}.end{text-anchor:end}\
.panel{fill:#fbfbf9}.paint{fill:#dcdcd6}\
.now{fill:none;stroke:#1c1c1c;stroke-width:2.5}.back{fill:none;stroke:#1c1c1c;stroke-width:2.5;stroke-dasharray:4 2}\
.tick{stroke:#5d5d5d;stroke-width:1}.arrow{fill:#8a8a8a}.edge{stroke:#fbfbf9;stroke-width:1.5}\
.even{fill:#56b4e9}.odd{fill:#9ad4f5}.header{fill:#d55e00}.header2{fill:#b84a00}.prefix{fill:#7a3068}\
@media(prefers-color-scheme:dark){text{fill:#ececec}.small{fill:#a8a8a8}.panel{fill:#1b1e22}.paint{fill:#42474e}\
.now,.back{stroke:#ffffff}.tick{stroke:#a8a8a8}.edge{stroke:#1b1e22}}\
text.on{fill:#08263b;font-size:10.5px}text.on-dark{fill:#ffffff;font-size:10.5px}";

/// Names and lengths of the parts of a packet's headers, in bytes.
const PARTS: [(&str, i64, &str); 4] = [
    ("Ethernet", 14, "header2"),
    ("IPv4", 20, "header"),
    ("UDP", 8, "header2"),
    ("LM", 24, "header"),
];

/// Where memory is drawn: parts of it, each with a scale of its own.
struct Axis {
    /// First byte, byte behind the last one, and the places of both.
    parts: Vec<(i64, i64, f64, f64)>,
}

impl Axis {
    /// Parts side by side from `left` on, given as their ends and widths.
    fn new(start: i64, left: f64, parts: &[(i64, f64)]) -> Axis {
        let (mut from, mut x) = (start, left);
        let mut placed = Vec::new();
        for &(to, width) in parts {
            placed.push((from, to, x, x + width));
            (from, x) = (to, x + width);
        }
        Axis { parts: placed }
    }

    /// The place of a byte; what lies outside is at the end that is nearer.
    fn x(&self, at: i64) -> f64 {
        let (first, last) = (self.parts[0], self.parts[self.parts.len() - 1]);
        let at = at.clamp(first.0, last.1);
        let part = self.parts.iter().find(|part| at <= part.1).unwrap_or(&last);
        let share = (at - part.0) as f64 / (part.1 - part.0) as f64;
        let x = part.2 + share * (part.3 - part.2);
        (x * 10.0).round() / 10.0
    }

    fn right(&self) -> f64 {
        self.parts[self.parts.len() - 1].3
    }
}

fn text(x: f64, y: f64, class: &str, content: &str) -> Text {
    Text::new(content).set("x", x).set("y", y).set("class", class)
}

fn bar(axis: &Axis, from: i64, to: i64, y: f64, height: f64, class: &str) -> Rectangle {
    let left = axis.x(from);
    let width = ((axis.x(to) - left) * 10.0).round() / 10.0;
    Rectangle::new()
        .set("x", left)
        .set("y", y)
        .set("width", width)
        .set("height", height)
        .set("class", class)
}

fn document(width: f64, height: f64, title: &str) -> Document {
    Document::new()
        .set("viewBox", (0.0, 0.0, width, height))
        .set("width", width)
        .set("height", height)
        .set("role", "img")
        .add(Title::new(title))
        .add(Style::new(STYLE))
        .add(
            Rectangle::new()
                .set("width", width)
                .set("height", height)
                .set("rx", 8)
                .set("class", "panel"),
        )
}

fn class(what: What) -> &'static str {
    match what {
        What::Paint | What::Foreign => "paint",
        What::Prefix { .. } => "prefix",
        What::Header { .. } => "header",
        What::Payload { fragment } if fragment.is_multiple_of(2) => "even",
        What::Payload { .. } => "odd",
    }
}

/// Bytes at a payload's end that other packets' headers may cover, with a device's prefix; the same for all drivers, so that figures
/// compare.
const SEAM: i64 = 66 + 12;

/// The whole message, a line for each step.
pub(super) fn film(trace: &Trace) -> String {
    const LEFT: f64 = 306.0;
    const TOP: f64 = 104.0;
    const ROW: f64 = 30.0;
    const HEIGHT: f64 = 22.0;
    let shape = &trace.shape;
    let mut parts = vec![(-SEAM, 18.0), (0, 39.0)];
    for fragment in 0..shape.fragments {
        let end = (i64::from(fragment + 1) * shape.payload_len).min(shape.message_len);
        if fragment + 1 == shape.fragments {
            parts.push((end, 62.0));
        } else {
            parts.push((end - SEAM, 38.0));
            parts.push((end, 39.0));
        }
    }
    parts.push((shape.zone_len - shape.front_margin, 24.0));
    let axis = Axis::new(-shape.front_margin, LEFT, &parts);
    let width = axis.right() + 20.0;
    let height = TOP + ROW * trace.steps.len() as f64 + 62.0;
    let title = format!(
        "{}: the memory of a landing zone, before and after each packet",
        trace.driver
    );
    let mut figure = document(width, height, &title)
        .add(text(20.0, 28.0, "head", &title))
        .add(text(
            20.0,
            46.0,
            "small",
            &format!(
                "Linux {}, zero-copy mode, {} bytes in {} fragments, windows of {}. Memory from left to right, time from top to bottom.",
                trace.kernel, shape.message_len, shape.fragments, shape.window
            ),
        ));
    for fragment in 0..shape.fragments {
        let start = i64::from(fragment) * shape.payload_len;
        let end = (start + shape.payload_len).min(shape.message_len);
        let middle = (axis.x(start) + axis.x(end)) / 2.0;
        figure = figure
            .add(text(
                middle,
                TOP - 24.0,
                "mid",
                &format!("fragment {fragment}")
                    .replace("fragment ", if fragment == 0 { "fragment " } else { "" }),
            ))
            .add(text(axis.x(start), TOP - 9.0, "small mid", &start.to_string()))
            .add(tick(
                axis.x(start),
                TOP - 6.0,
                TOP + ROW * trace.steps.len() as f64 - 4.0,
            ));
    }
    figure = figure
        .add(text(LEFT - 8.0, TOP - 9.0, "small end", "byte of the message"))
        .add(text(axis.right(), TOP - 24.0, "small end", "guard"));
    for (number, step) in trace.steps.iter().enumerate() {
        let y = TOP + ROW * number as f64;
        let (label, note) = words(trace, step);
        figure = figure
            .add(text(20.0, y + 15.0, "", &label))
            .add(text(92.0, y + 15.0, "small", &note))
            .add(film_row(trace, &axis, step, y, HEIGHT));
    }
    let y = height - 38.0;
    let scales = format!(
        "Two scales: the last {SEAM} bytes of a payload, where other headers lie meanwhile, are drawn wide; the {} before them narrow.",
        shape.payload_len - SEAM
    );
    figure = figure
        .add(legend(20.0, y, trace.footprint.prefix_len > 0))
        .add(text(20.0, y + 22.0, "small", &scales));
    finished(&figure)
}

/// Pixels that a payload's name takes.
const LABEL: f64 = 58.0;

fn film_row(trace: &Trace, axis: &Axis, step: &Step, y: f64, height: f64) -> Group {
    let mut row = Group::new();
    for run in &step.runs {
        row = row.add(bar(axis, run.at, run.at + run.len, y, height, class(run.what)));
    }
    for run in &step.runs {
        if let What::Payload { fragment } = run.what
            && run.len > SEAM
        {
            let start = i64::from(fragment) * trace.shape.payload_len;
            let end = (start + trace.shape.payload_len).min(trace.shape.message_len);
            let end = match step.event {
                Event::TailRestored { window } if fragment + 1 == (window + 1) * trace.shape.window => {
                    end - SEAM
                }
                _ => end.min(run.at + run.len),
            };
            let (left, right) = (axis.x(start), axis.x(end));
            let name = if right - left > LABEL {
                format!("payload {fragment}")
            } else {
                fragment.to_string()
            };
            row = row.add(text((left + right) / 2.0, y + 15.5, "on mid", &name));
        }
    }
    match step.event {
        Event::Packet { fragment } => {
            let start = i64::from(fragment) * trace.shape.payload_len;
            let end = (start + trace.shape.payload_len).min(trace.shape.message_len);
            row = row.add(bar(axis, start - trace.shape.header_len, end, y, height, "now"));
        }
        Event::TailRestored { window } => {
            let end = i64::from((window + 1) * trace.shape.window) * trace.shape.payload_len;
            row = row.add(bar(axis, end - SEAM, end, y, height, "back"));
        }
        Event::Painted => {}
    }
    row
}

/// What a step is called, and what it does to what was there.
fn words(trace: &Trace, step: &Step) -> (String, String) {
    let shape = &trace.shape;
    match step.event {
        Event::Painted => ("before".into(), "a pattern".into()),
        Event::TailRestored { window } => (
            "at the end".into(),
            format!(
                "saved bytes of payload {} put back",
                (window + 1) * shape.window - 1
            ),
        ),
        Event::Packet { fragment } => {
            let is_highest = fragment + 1 == shape.fragments || (fragment + 1).is_multiple_of(shape.window);
            let is_lowest = fragment.is_multiple_of(shape.window);
            let note = match (is_highest, is_lowest) {
                (true, _) if fragment + 1 < shape.fragments => {
                    format!("the end of payload {fragment} is saved")
                }
                (true, _) => "the second window begins".into(),
                (_, true) if fragment == 0 => "own headers stay before the message".into(),
                (_, true) => "own headers lie on saved bytes".into(),
                _ => format!("overwrites headers {}", fragment + 1),
            };
            (format!("packet {fragment}"), note)
        }
    }
}

fn legend(left: f64, y: f64, has_prefix: bool) -> Group {
    let mut entries = vec![("paint", "untouched"), ("header", "headers"), ("even", "payload")];
    if has_prefix {
        entries.push(("prefix", "the device's own header"));
    }
    entries.push(("now", "this packet"));
    let mut group = Group::new();
    let mut x = left;
    for (class, name) in entries {
        group = group
            .add(
                Rectangle::new()
                    .set("x", x)
                    .set("y", y - 10.0)
                    .set("width", 18)
                    .set("height", 11)
                    .set("class", class),
            )
            .add(text(x + 24.0, y, "", name));
        x += 44.0 + 6.6 * name.len() as f64;
    }
    group
}

fn tick(x: f64, from: f64, to: f64) -> Line {
    Line::new()
        .set("x1", x)
        .set("x2", x)
        .set("y1", from)
        .set("y2", to)
        .set("class", "tick")
}

/// The border of two fragments, byte by byte: before, with the upper packet's headers, and when the lower packet has come.
pub(super) fn seam(trace: &Trace) -> String {
    const LEFT: f64 = 176.0;
    const TOP: f64 = 106.0;
    const ROW: f64 = 74.0;
    const HEIGHT: f64 = 34.0;
    /// The fragment below the border.
    const BELOW: u32 = 1;
    let shape = &trace.shape;
    let border = i64::from(BELOW + 1) * shape.payload_len;
    let (from, to) = (border - 104, border + 30);
    let axis = Axis::new(from, LEFT, &[(to, 804.0)]);
    let width = axis.right() + 20.0;
    let after = |fragment| {
        let is_it = |step: &&Step| step.event == Event::Packet { fragment };
        trace.steps.iter().find(is_it)
    };
    let lines = [
        ("1. before", "a pattern", trace.steps.first()),
        (
            "2. packet 2 has come",
            "headers before payload 2",
            after(BELOW + 1),
        ),
        ("3. packet 1 has come", "its payload lies over them", after(BELOW)),
    ];
    let title = format!(
        "The border of payload {BELOW} and payload {}, byte by byte ({})",
        BELOW + 1,
        trace.driver
    );
    let mut figure = document(width, TOP + ROW * 3.0 - 10.0, &title)
        .add(text(20.0, 28.0, "head", &title))
        .add(text(
            20.0,
            46.0,
            "small",
            "Each packet begins with its headers. Its entry is posted so that its payload lies at its place in the message, and the headers \
             before it, on the place of payload 1.",
        ));
    for (at, name) in [
        (
            border - shape.header_len,
            format!("byte {} of the message: headers begin", border - shape.header_len),
        ),
        (border, format!("byte {border}: payload {} begins", BELOW + 1)),
    ] {
        let x = axis.x(at);
        let class = if at == border { "small" } else { "small end" };
        let shift = if at == border { -6.0 } else { 6.0 };
        figure = figure.add(text(x + shift, TOP - 20.0, class, &name)).add(tick(
            x,
            TOP - 14.0,
            TOP + ROW * 3.0 - 26.0,
        ));
    }
    for (number, (label, note, step)) in lines.iter().enumerate() {
        let y = TOP + ROW * number as f64;
        figure = figure
            .add(text(20.0, y + 15.0, "", label))
            .add(text(20.0, y + 30.0, "small", note));
        for run in step.iter().flat_map(|step| &step.runs) {
            let (start, end) = (run.at.max(from), (run.at + run.len).min(to));
            if start < end {
                let run = Run {
                    at: start,
                    len: end - start,
                    what: run.what,
                };
                figure = figure.add(seam_run(&axis, &run, y, HEIGHT));
            }
        }
        if number < 2 {
            let x = LEFT + 402.0;
            let arrow = format!("M{} {}l-6 0l6 8l6 -8z", x, y + HEIGHT + 16.0);
            figure = figure.add(Path::new().set("d", arrow).set("class", "arrow"));
        }
    }
    finished(&figure)
}

fn seam_run(axis: &Axis, run: &Run, y: f64, height: f64) -> Group {
    let mut group = Group::new();
    let middle = (axis.x(run.at) + axis.x(run.at + run.len)) / 2.0;
    let centre = y + height / 2.0 + 4.0;
    let label = |name: &str, class: &str| text(middle, centre, class, name);
    let whole = |class: &str| bar(axis, run.at, run.at + run.len, y, height, class);
    match run.what {
        What::Header { .. } => {
            let mut at = run.at;
            for (name, len, class) in PARTS {
                let middle = (axis.x(at) + axis.x(at + len)) / 2.0;
                group = group
                    .add(bar(axis, at, at + len, y, height, &format!("{class} edge")))
                    .add(text(middle, y + 15.0, "on-dark mid", name))
                    .add(text(middle, y + 28.0, "on-dark mid", &len.to_string()));
                at += len;
            }
        }
        What::Prefix { .. } => {
            group = group
                .add(whole("prefix"))
                .add(text(middle, y + 15.0, "on-dark mid", "virtio"))
                .add(text(middle, y + 28.0, "on-dark mid", &run.len.to_string()));
        }
        What::Payload { fragment } => {
            group = group.add(whole(class(run.what)));
            if run.len > 8 {
                group = group.add(label(&format!("payload {fragment}"), "on mid"));
            }
        }
        What::Paint | What::Foreign => {
            group = group.add(whole("paint"));
            if run.len > 8 {
                group = group.add(label("untouched", "mid small"));
            } else {
                group = group.add(text(
                    axis.x(run.at + run.len) - 4.0,
                    y + height + 12.0,
                    "small end",
                    &format!("{} not written", run.len),
                ));
            }
        }
    }
    group
}

fn finished(figure: &Document) -> String {
    format!("{figure}\n")
}
