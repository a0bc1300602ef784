//! Round-trip times and their percentiles.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Collects round trips. All memory is taken at the start, recording allocates nothing.
#[derive(Debug)]
pub struct RoundTrips {
    nanoseconds: Histogram<u64>,
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
    /// Room for times from 1 ns to 10 s with three significant digits; longer ones count as 10 s.
    #[must_use]
    pub fn new() -> RoundTrips {
        RoundTrips {
            nanoseconds: Histogram::new_with_bounds(1, 10_000_000_000, 3).expect("the bounds are legal"),
        }
    }

    /// Adds one round trip.
    pub fn record(&mut self, time: Duration) {
        self.nanoseconds
            .saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// What was recorded, in nanoseconds and ascending, each with how many there were.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        let recorded = self.nanoseconds.iter_recorded();
        recorded.map(|step| (step.value_iterated_to(), step.count_at_value()))
    }

    /// Percentiles of what was recorded.
    #[must_use]
    pub fn report(&self, program: &'static str) -> RoundTripReport {
        let at = |quantile| self.nanoseconds.value_at_quantile(quantile) as f64 / 1e3;
        let rtt_us = Percentiles {
            min: self.nanoseconds.min() as f64 / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.nanoseconds.max() as f64 / 1e3,
            mean: self.nanoseconds.mean() / 1e3,
        };
        RoundTripReport {
            program,
            count: self.nanoseconds.len(),
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
