//! Goodput against loss as an SVG file.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

/// One chart of the file.
#[derive(Debug)]
pub(super) struct Chart {
    /// What stands above it.
    pub(super) title: String,
    /// Names of the places on the horizontal axis.
    pub(super) places: Vec<String>,
    /// What is drawn.
    pub(super) lines: Vec<Line>,
}

/// One contender.
#[derive(Debug)]
pub(super) struct Line {
    /// As the legend names it.
    pub(super) name: &'static str,
    /// Place, lower quartile, median, upper quartile in Gbit/s.
    pub(super) points: Vec<(usize, f64, f64, f64)>,
}

/// Size of one chart, in pixels.
const CHART: (u32, u32) = (560, 420);
/// Colours that people with any kind of sight tell apart (Okabe and Ito 2008).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
];

/// Draws the charts beside each other into `path`.
pub(super) fn goodput(path: &Path, charts: &[Chart]) -> Result<()> {
    if charts.is_empty() {
        return Err(anyhow!("nothing to plot; leave out --only"));
    }
    let failed = |error: String| anyhow!("cannot draw {}: {error}", path.display());
    let size = (CHART.0 * charts.len() as u32, CHART.1);
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE).map_err(|error| failed(error.to_string()))?;
    for (chart, area) in charts.iter().zip(area.split_evenly((1, charts.len()))) {
        draw(chart, &area).map_err(failed)?;
    }
    area.present().map_err(|error| failed(error.to_string()))
}

fn draw(chart: &Chart, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), String> {
    let text = |error: DrawingAreaErrorKind<_>| -> String { error.to_string() };
    let highest = chart
        .lines
        .iter()
        .flat_map(|line| &line.points)
        .fold(0.1_f64, |highest, point| highest.max(point.3));
    let last = chart.places.len() as f64 - 1.0;
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(-0.25..last + 0.25, 0.0..highest * 1.3)
        .map_err(text)?;
    let place = |x: &f64| {
        let nearest = x.round();
        let name = chart.places.get(nearest as usize).filter(|_| nearest >= 0.0);
        match name {
            Some(name) if (x - nearest).abs() < 1e-6 => name.clone(),
            _ => String::new(),
        }
    };
    context
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(2 * chart.places.len() + 1)
        .x_label_formatter(&place)
        .x_desc("packets lost")
        .y_desc("goodput, Gbit/s")
        .label_style(("sans-serif", 14))
        .draw()
        .map_err(text)?;
    for (line, colour) in chart.lines.iter().zip(COLOURS.iter().cycle()) {
        let at = |&(place, _, median, _): &(usize, f64, f64, f64)| (place as f64, median);
        context
            .draw_series(LineSeries::new(
                line.points.iter().map(at),
                colour.stroke_width(2),
            ))
            .map_err(text)?
            .label(line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        let quartiles = line.points.iter().map(|&(place, lower, _, upper)| {
            let x = place as f64;
            PathElement::new([(x, lower), (x, upper)], colour.stroke_width(1))
        });
        context.draw_series(quartiles).map_err(text)?;
        let dots = line
            .points
            .iter()
            .map(|point| Circle::new(at(point), 3, colour.filled()));
        context.draw_series(dots).map_err(text)?;
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()
        .map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_and_place_is_in_the_picture() {
        let path = std::env::temp_dir().join(format!("xtask-plot-{}.svg", std::process::id()));
        let line = |name, factor: f64| Line {
            name,
            points: (0..4)
                .map(|place| {
                    let median = factor / (place as f64 + 1.0);
                    (place, median * 0.9, median, median * 1.1)
                })
                .collect(),
        };
        let chart = Chart {
            title: "messages of 64 KiB".to_owned(),
            places: ["0 %", "0.1 %", "1 %", "5 %"].map(str::to_owned).to_vec(),
            lines: vec![line("LM reliable", 9.0), line("kernel TCP", 4.0)],
        };
        goodput(&path, &[chart]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for words in [
            "LM reliable",
            "kernel TCP",
            "0.1 %",
            "5 %",
            "messages of 64 KiB",
            "Gbit/s",
        ] {
            assert!(text.contains(words), "{words} is missing");
        }
        assert!(goodput(Path::new("/no/such/folder/p.svg"), &[]).is_err());
    }
}
