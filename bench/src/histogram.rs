//! Latency histograms: recorded in nanoseconds, shown in microseconds, saved in HdrHistogram's percentile text format.

use std::io::{self, Write};

use hdrhistogram::Histogram;
use serde::Serialize;

/// The longest latency that is told apart, in nanoseconds (one hour); longer ones count as this.
const HIGHEST_NS: u64 = 3_600_000_000_000;

/// Significant decimal digits that are kept of every value.
const SIGNIFICANT_DIGITS: u8 = 3;

/// Nanoseconds in the unit of everything that is printed.
const NS_PER_US: f64 = 1000.0;

/// A histogram of latencies of 1 ns to one hour with three significant digits. Takes all its memory when made.
#[derive(Clone, Debug)]
pub struct LatencyHistogram {
    inner: Histogram<u64>,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self::new()
    }
}

/// The percentiles that every report carries, in microseconds; all `None` (JSON `null`) when nothing was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Half of the latencies are at most this.
    pub p50: Option<f64>,
    /// 90 % are at most this.
    pub p90: Option<f64>,
    /// 99 % are at most this.
    pub p99: Option<f64>,
    /// 99.9 % are at most this.
    pub p999: Option<f64>,
    /// The longest one.
    pub max: Option<f64>,
}

impl LatencyHistogram {
    /// An empty histogram.
    ///
    /// # Panics
    /// Never: the constants above are bounds that `hdrhistogram` accepts (a test makes one).
    #[must_use]
    pub fn new() -> Self {
        let inner = Histogram::new_with_bounds(1, HIGHEST_NS, SIGNIFICANT_DIGITS);
        LatencyHistogram {
            inner: inner.expect("constant bounds are valid"),
        }
    }

    /// Counts one latency, in nanoseconds.
    pub fn record_ns(&mut self, latency_ns: u64) {
        self.inner.saturating_record(latency_ns.max(1));
    }

    /// Counts `count` latencies of the same length, as [`LatencyHistogram::counts`] gives them.
    pub fn record_counts(&mut self, counts: impl IntoIterator<Item = (u64, u64)>) {
        for (latency_ns, count) in counts {
            self.inner.saturating_record_n(latency_ns.max(1), count);
        }
    }

    /// The latencies that were recorded, in nanoseconds and ascending, each with how many there were: what a histogram on another host is
    /// made of again without loss.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.inner
            .iter_recorded()
            .map(|step| (step.value_iterated_to(), step.count_at_value()))
    }

    /// Mean of the latencies in nanoseconds; 0 when empty.
    #[must_use]
    pub fn mean_ns(&self) -> f64 {
        self.inner.mean()
    }

    /// Number of recorded latencies.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.inner.len()
    }

    /// The value in nanoseconds below or at which `quantile` (0.0..=1.0) of the latencies lie; `None` when empty.
    #[must_use]
    pub fn quantile_ns(&self, quantile: f64) -> Option<u64> {
        (!self.inner.is_empty()).then(|| self.inner.value_at_quantile(quantile))
    }

    /// The percentiles of a report, in microseconds.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        let at = |quantile| self.quantile_ns(quantile).map(|ns| ns as f64 / NS_PER_US);
        LatencySummary {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: (!self.inner.is_empty()).then(|| self.inner.max() as f64 / NS_PER_US),
        }
    }

    /// Writes the percentile distribution in microseconds as `.hgrm`.
    ///
    /// # Errors
    /// Whatever `out` reports.
    pub fn write_hgrm(&self, out: &mut impl Write) -> io::Result<()> {
        let counts: Vec<_> = self.counts().collect();
        let resolution = [self.inner.buckets().into(), sub_bucket_count()];
        lm_realtime::write_hgrm(&counts, NS_PER_US, resolution, out)
    }
}

/// Linear steps per bucket that three digits need: the next power of two above 2 * 10^3 (as in HdrHistogram).
const fn sub_bucket_count() -> u64 {
    (2 * 10u64.pow(SIGNIFICANT_DIGITS as u32)).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hgrm(histogram: &LatencyHistogram) -> String {
        let mut text = Vec::new();
        histogram.write_hgrm(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn percentiles_of_a_ramp() {
        let mut histogram = LatencyHistogram::new();
        for us in 1..=1000 {
            histogram.record_ns(us * 1000);
        }
        let summary = histogram.summary();
        for (value, wanted) in [
            (summary.p50, 500.0),
            (summary.p90, 900.0),
            (summary.p99, 990.0),
            (summary.p999, 999.0),
            (summary.max, 1000.0),
        ] {
            let value: f64 = value.unwrap();
            assert!(
                (value - wanted).abs() <= wanted * 0.001,
                "{value} is not {wanted}"
            );
        }
    }

    #[test]
    fn an_empty_histogram_claims_nothing() {
        let histogram = LatencyHistogram::new();
        assert_eq!(histogram.summary(), LatencySummary::default());
        assert_eq!(
            serde_json::to_string(&histogram.summary()).unwrap(),
            r#"{"p50":null,"p90":null,"p99":null,"p999":null,"max":null}"#
        );
        assert!(hgrm(&histogram).contains("Total count    =            0]"));
    }

    #[test]
    fn extremes_are_clamped() {
        let mut histogram = LatencyHistogram::new();
        histogram.record_ns(0);
        histogram.record_ns(u64::MAX);
        assert_eq!(histogram.count(), 2);
        assert_eq!(histogram.quantile_ns(0.0), Some(1));
    }

    /// Four values whose table can be written down by hand, laid out as the Java original does.
    #[test]
    fn hgrm_text() {
        let mut histogram = LatencyHistogram::new();
        for us in [1, 2, 3, 4] {
            histogram.record_ns(us * 1000);
        }
        let text = hgrm(&histogram);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "       Value     Percentile TotalCount 1/(1-Percentile)"
        );
        assert_eq!(lines[1], "");
        assert_eq!(lines[2], "       1.000 0.000000000000          1           1.00");
        assert!(
            lines.contains(&"       2.000 0.500000000000          2           2.00"),
            "{text}"
        );
        assert!(
            lines.contains(&"       4.001 1.000000000000          4"),
            "{text}"
        );
        assert_eq!(
            lines[lines.len() - 3],
            "#[Mean    =        2.501, StdDeviation   =        1.118]"
        );
        assert!(lines[lines.len() - 2].starts_with("#[Max     ="));
        assert!(
            lines[lines.len() - 1].ends_with("SubBuckets     =         2048]"),
            "{text}"
        );
        for line in &lines[2..lines.len() - 3] {
            let fields: Vec<f64> = line
                .split_whitespace()
                .map(|field| field.parse().unwrap())
                .collect();
            assert!(
                fields.len() == 4 || (fields.len() == 3 && fields[1] == 1.0),
                "{line}"
            );
        }
    }
}
