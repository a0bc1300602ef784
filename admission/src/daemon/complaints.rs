//! Lines of the log that others cause, who may cause as many as they like: some of each moment, and how many were left out.

use std::time::Duration;

use lm_protocol::time::Time;

/// Lines in a period.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Counts them.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    /// When the period began, and lines in it.
    since: Option<Time>,
    lines: u32,
    withheld: u64,
}

impl Complaints {
    /// What to write behind the next line, if it may be written.
    pub(super) fn next(&mut self, now: Time) -> Option<String> {
        if self.since.is_none_or(|since| now >= since + PERIOD) {
            self.since = Some(now);
            self.lines = 0;
        }
        if self.lines >= LINES {
            self.withheld += 1;
            return None;
        }
        self.lines += 1;
        Some(match std::mem::take(&mut self.withheld) {
            0 => String::new(),
            withheld => format!(" ({withheld} such lines before this one were left out)"),
        })
    }
}
