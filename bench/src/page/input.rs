//! The files of a report.

use std::path::PathBuf;

use serde::Deserialize;

use crate::cli::Failure;
use crate::suite::schema::{Report, SCHEMA};

/// What all files together hold, in the order of the command line.
#[derive(Debug, Default)]
pub(super) struct Input {
    pub(super) reports: Vec<Report>,
}

/// What tells one kind of file from another.
#[derive(Deserialize)]
struct Kind {
    schema: Option<String>,
}

impl Input {
    pub(super) fn read(files: &[PathBuf]) -> Result<Input, Failure> {
        let mut input = Input::default();
        for path in files {
            let shown = path.display();
            let text = std::fs::read_to_string(path).map_err(|error| {
                let why = crate::output::describe(&error);
                Failure::new(format!(
                    "cannot read {shown}: {why}; name a file that --json wrote"
                ))
            })?;
            let broken = |error: serde_json::Error| {
                Failure::new(format!("{shown}: {error}; name a file that --json wrote"))
            };
            let kind: Kind = serde_json::from_str(&text).map_err(broken)?;
            if kind.schema.as_deref() != Some(SCHEMA) {
                return Err(Failure::new(format!(
                    "{shown} is of another kind or version; name files of `lm-bench` ({SCHEMA})"
                )));
            }
            input.reports.push(serde_json::from_str(&text).map_err(broken)?);
        }
        Ok(input)
    }
}
