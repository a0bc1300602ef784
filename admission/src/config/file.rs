//! The configuration file: every error names file and line.

use std::path::Path;

use super::Config;

/// Reads a configuration file.
///
/// # Errors
/// One line: the file, and why it cannot be read.
pub fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: cannot read it: {error}", path.display()))
}

/// What the text of a configuration file says.
///
/// # Errors
/// One line: the file, the line, what is wrong.
pub fn parse(path: &Path, text: &str) -> Result<Config, String> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_at(text, span.start));
        let what = error.message().lines().collect::<Vec<_>>().join(" ");
        format!("{}:{line}: {what}", path.display())
    })
}

/// The line, from 1, on which a key is set; `None` where it is not.
pub fn line_of(text: &str, key: &str) -> Option<usize> {
    let sets = |line: &str| {
        let rest = line.trim_start().strip_prefix(key).map(str::trim_start);
        !key.is_empty() && rest.is_some_and(|rest| rest.starts_with('='))
    };
    text.lines().position(sets).map(|index| index + 1)
}

fn line_at(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
}
