//! `lm-bench report`: what `lm-bench compare` kept in files, as one HTML page that needs nothing else. For each file: two charts (streams,
//! round trips), what the command printed, and what the figures depend on.

mod chart;

use std::path::{Path, PathBuf};

use clap::Args;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::{Value, json};

use self::chart::chart;
use crate::cli::Failure;
use crate::suite::schema::{Report, SCHEMA, What};
use crate::suite::{Partial, text};

/// Options of `lm-bench report`.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Files that `lm-bench compare` wrote with --json
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Write the page to this file
    #[arg(long, value_name = "FILE")]
    pub html: PathBuf,
}

/// Reads the files and writes the page.
///
/// # Errors
/// A file that cannot be read or is of another kind, or a page that cannot be written; nothing is written then.
pub fn report(args: &ReportArgs) -> Result<(), Failure> {
    let reports: Vec<Report> = args
        .files
        .iter()
        .map(|path| read(path))
        .collect::<Result<_, _>>()?;
    Partial::create(&args.html)?.write(&page(&reports).into_string())
}

/// A report that `lm-bench compare` kept.
pub(crate) fn read(path: &Path) -> Result<Report, Failure> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let why = crate::output::describe(&error);
        Failure::new(format!(
            "cannot read {shown}: {why}; name a file that --json wrote"
        ))
    })?;
    let broken =
        |error: serde_json::Error| Failure::new(format!("{shown}: {error}; name a file that --json wrote"));
    let value: Value = serde_json::from_str(&text).map_err(broken)?;
    if value["schema"] != SCHEMA {
        return Err(Failure::new(format!(
            "{shown} is of another kind or version; name files of `lm-bench` ({SCHEMA})"
        )));
    }
    serde_json::from_value(value).map_err(broken)
}

fn page(reports: &[Report]) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "lm-bench report" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                h1 { "lm-bench report" }
                @for report in reports { (section(report)) }
            }
        }
    }
}

fn section(report: &Report) -> Markup {
    let value = json!(report);
    html! {
        section {
            h2 { (report.started) }
            (chart(report, What::Stream, "bits_per_s", 1e9, "received payload, Gbit/s"))
            (chart(report, What::RoundTrips, "p50", 1e3, "round trip, p50, µs"))
            pre { (text(report)) }
            table {
                @for system in &report.systems { tr {
                    th { (system.id) } td { (system.link) ": " (system.configuration) }
                } }
                @for name in ["version", "host", "far", "links", "settings"] { tr {
                    th { (name) } td { (words(&value[name])) }
                } }
            }
        }
    }
}

/// What a value has, by the names in the file.
fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(words).collect();
            values.join("; ")
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| format!("{name} {}", words(value));
            fields.iter().map(field).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
