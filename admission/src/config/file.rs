//! The configuration file: every error names file and line.

use std::path::Path;

use super::Settings;

/// Reads a configuration file.
///
/// # Errors
/// One line: the file, the line, what is wrong.
pub fn load(path: &Path) -> Result<(Settings, String), String> {
    let name = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: cannot read it: {error}"))?;
    match toml::from_str(&text) {
        Ok(settings) => Ok((settings, text)),
        Err(error) => {
            let line = error.span().map_or(1, |span| line_at(&text, span.start));
            let what = error.message().lines().collect::<Vec<_>>().join(" ");
            Err(format!("{name}:{line}: {what}"))
        }
    }
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
