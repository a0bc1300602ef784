//! `lm-bench report`: what measuring commands kept in files, as one HTML page that needs nothing else.
//!
//! `figures` finds numbers in the files, `plot` draws lines, `sections` and `ratios` are the page's parts.

mod figures;
mod input;
mod plot;
mod ratios;
mod sections;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use self::input::Input;
use crate::cli::Failure;
use crate::files;

/// Options of `lm-bench report`.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Files that `lm-bench compare`, `latency`, `throughput`, `cpu` and `limit` wrote with --json
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
    let input = Input::read(&args.files)?;
    write(&args.html, &page(&input).into_string())
}

/// Writes the file whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".part");
    let mut file = files::create(Path::new(&partial), true)?;
    let written = file.write_all(text.as_bytes());
    let renamed = written.and_then(|()| std::fs::rename(&partial, path));
    renamed.map_err(|error| {
        let _ = std::fs::remove_file(&partial);
        let why = crate::output::describe(&error);
        Failure::new(format!(
            "cannot write {}: {why}; name a file in a folder that exists",
            path.display()
        ))
    })
}

fn page(input: &Input) -> Markup {
    let groups = figures::groups(&input.reports);
    document(
        "lm-bench report",
        html! {
            (sections::header(input))
            main {
                (ratios::section(&input.reports))
                @for group in &groups { (sections::group(group)) }
                (sections::systems(&input.reports))
                (sections::beds(input))
            }
        },
    )
}

/// A page that needs nothing else.
fn document(title: &str, body: Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body { (body) }
        }
    }
}

#[cfg(test)]
mod tests;
