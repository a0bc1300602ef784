//! What a tool measures while it runs, and how it shows it: the histogram, a line now and then, a progress bar.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::{Failure, LinkOptions, complain};
use crate::files;
use crate::histogram::LatencyHistogram;
use crate::report::gbit_per_s;
use crate::size::approximate;

/// How often the progress bar is drawn anew.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// Bytes, messages and latencies of one run.
pub struct Meter {
    tool: &'static str,
    /// Completion times of messages.
    pub latency: LatencyHistogram,
    /// Payload bytes done.
    pub bytes: u64,
    /// Messages done.
    pub messages: u64,
    began: Instant,
    look_at: Instant,
    stats: Option<Stats>,
    bar: Option<ProgressBar>,
    histogram: Option<(PathBuf, File)>,
}

/// The state of `--stats`.
struct Stats {
    every: Duration,
    next: Instant,
    since: Instant,
    bytes: u64,
}

impl Meter {
    /// A meter that shows what `options` ask for; the bar only where standard error is a terminal.
    ///
    /// # Errors
    /// When the file of `--histogram` cannot be created: better known before the transfer than after it.
    pub fn new(tool: &'static str, options: &LinkOptions, now: Instant) -> Result<Self, Failure> {
        let create = |path: &PathBuf| files::create(path, options.force).map(|file| (path.clone(), file));
        let histogram = options.histogram.as_ref().map(create).transpose()?;
        let stats = options.stats.map(|every| Stats {
            every,
            next: now + every,
            since: now,
            bytes: 0,
        });
        let bar = (stats.is_none() && io::stderr().is_terminal()).then(bar);
        let latency = LatencyHistogram::new();
        Ok(Meter {
            tool,
            latency,
            bytes: 0,
            messages: 0,
            began: now,
            look_at: now,
            stats,
            bar,
            histogram,
        })
    }

    /// The bar is to end at `total` bytes; `None`: nobody knows.
    pub fn expect(&self, total: Option<u64>) {
        if let Some(bar) = &self.bar {
            match total {
                Some(total) => bar.set_length(total),
                None => bar.unset_length(),
            }
        }
    }

    /// Shows what is due. What is `seen` is asked only when a line is printed: how far each station is, up to the one that
    /// [`bytes`](Self::bytes) says, and all drops.
    pub fn tick(&mut self, now: Instant, seen: impl FnOnce() -> (String, u64)) {
        if now < self.look_at {
            return;
        }
        self.look_at = now + DRAW_EVERY;
        if let Some(bar) = &self.bar {
            bar.set_position(self.bytes);
        }
        let Some(stats) = &mut self.stats else { return };
        self.look_at = self.look_at.min(stats.next);
        if now < stats.next {
            return;
        }
        let elapsed = now.duration_since(stats.since).as_secs_f64();
        let rate = gbit_per_s(self.bytes - stats.bytes, elapsed);
        let (stations, drops) = seen();
        let line = format!(
            "{:.1} s, {stations} {} in {} messages, {rate:.3} Gbit/s, {drops} drops",
            now.duration_since(self.began).as_secs_f64(),
            approximate(self.bytes),
            self.messages,
        );
        stats.since = now;
        stats.bytes = self.bytes;
        stats.next = now + stats.every;
        self.look_at = self.look_at.min(stats.next);
        complain(self.tool, &line);
    }

    /// One line on standard error that does not tear the bar.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| complain(self.tool, text)),
            None => complain(self.tool, text),
        }
    }

    /// Takes the bar away and writes the histogram file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn finish(&mut self) -> Result<(), Failure> {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        let Some((path, file)) = self.histogram.take() else {
            return Ok(());
        };
        let mut out = BufWriter::new(file);
        let written = self.latency.write_hgrm(&mut out).and_then(|()| out.flush());
        written.map_err(|error| files::cannot_write(&path, &error))
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::no_length();
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use clap::Parser;
    use std::fs;

    #[derive(Parser)]
    struct Options {
        #[command(flatten)]
        link: LinkOptions,
    }

    fn meter(arguments: &[&str], now: Instant) -> Result<Meter, Failure> {
        let options = Options::parse_from([&["tool"], arguments].concat());
        Meter::new("tool", &options.link, now)
    }

    #[test]
    fn the_histogram_is_written_over_an_old_one_when_told_so() {
        let scratch = Scratch::new("meter");
        let path = scratch.path().join("x.hgrm");
        fs::write(&path, "old ".repeat(10_000)).unwrap();
        let arguments = ["--histogram", path.to_str().unwrap(), "--force"];
        assert!(meter(&arguments[..2], Instant::now()).is_err());
        let mut meter = meter(&arguments, Instant::now()).unwrap();
        meter.latency.record_ns(5000);
        meter.finish().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("       Value") && text.ends_with("2048]\n"),
            "{text}"
        );
    }

    #[test]
    fn an_unwritable_histogram_is_told_first() {
        let error = meter(&["--histogram", "/nowhere/x"], Instant::now())
            .err()
            .unwrap();
        assert!(
            error.text.contains("/nowhere/x") && error.text.contains("; "),
            "{error}"
        );
    }

    #[test]
    fn statistics_come_when_due() {
        let now = Instant::now();
        let mut meter = meter(&["--stats", "0.5"], now).unwrap();
        let mut lines = 0;
        for ms in (0..=2000).step_by(10) {
            meter.bytes += 1000;
            meter.tick(now + Duration::from_millis(ms), || {
                lines += 1;
                (String::new(), 0)
            });
        }
        assert_eq!(lines, 4);
    }
}
