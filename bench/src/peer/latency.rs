//! Round-trip times and their percentiles.

use std::time::Duration;

use serde::Serialize;

use crate::histogram::LatencyHistogram;

/// Collects round trips. All memory is taken at the start, recording allocates nothing.
#[derive(Debug)]
pub struct RoundTrips {
    latencies: LatencyHistogram,
}

/// Round-trip times in microseconds (whole round trips, not halves).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// Least.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 90 of 100 were below.
    pub p90: f64,
    /// 99 of 100 were below.
    pub p99: f64,
    /// 999 of 1000 were below.
    pub p999: f64,
    /// Greatest.
    pub max: f64,
    /// Mean.
    pub mean: f64,
}

/// What a ping program prints.
#[derive(Debug, Serialize)]
pub struct RoundTripReport {
    /// Name of the program.
    pub program: &'static str,
    /// Round trips measured.
    pub count: u64,
    /// Their times.
    pub rtt_us: Percentiles,
    /// The same as a histogram, where that was asked for: nanoseconds, and round trips.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rtt_counts: Vec<(u64, u64)>,
}

impl RoundTrips {
    /// None yet.
    #[must_use]
    pub fn new() -> RoundTrips {
        RoundTrips {
            latencies: LatencyHistogram::new(),
        }
    }

    /// Adds one round trip.
    pub fn record(&mut self, time: Duration) {
        self.latencies
            .record_ns(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// What was recorded, as [`LatencyHistogram::counts`] gives it.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.latencies.counts()
    }

    /// Percentiles of what was recorded.
    #[must_use]
    pub fn report(&self, program: &'static str) -> RoundTripReport {
        let at = |quantile| self.latencies.quantile_ns(quantile).unwrap_or(0) as f64 / 1e3;
        let rtt_us = Percentiles {
            min: at(0.0),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: at(1.0),
            mean: self.latencies.mean_ns() / 1e3,
        };
        RoundTripReport {
            program,
            count: self.latencies.count(),
            rtt_us,
            rtt_counts: Vec::new(),
        }
    }
}

impl Default for RoundTrips {
    fn default() -> RoundTrips {
        RoundTrips::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_a_known_series() {
        let mut round_trips = RoundTrips::new();
        for microseconds in 1..=1000 {
            round_trips.record(Duration::from_micros(microseconds));
        }
        let report = round_trips.report("test");
        assert_eq!(report.count, 1000);
        assert!((report.rtt_us.p50 - 500.0).abs() < 1.0, "{report:?}");
        assert!((report.rtt_us.p99 - 990.0).abs() < 1.0, "{report:?}");
        assert!((report.rtt_us.max - 1000.0).abs() < 1.0, "{report:?}");
    }
}
