//! Medians, spreads and intervals of repeated measurements.

use serde_json::{Value, json};

/// What repeated measurements of one quantity say.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The middle value, or the mean of the two middle values.
    pub median: f64,
    /// The lower quartile: a quarter of the values are not above it.
    pub lower: f64,
    /// The upper quartile.
    pub upper: f64,
    /// 95 % interval of the median. Its ends are order statistics and assume nothing about the distribution (the sign
    /// test's interval: Conover, Practical Nonparametric Statistics, 3.2). With fewer than six values it is all of
    /// them, and less sure than 95 %.
    pub interval: [f64; 2],
    /// Every value, in the order measured.
    pub samples: Vec<f64>,
}

impl Summary {
    /// Summarises at least one value; `None` for none, and when a value is not a number.
    pub fn of(samples: &[f64]) -> Option<Summary> {
        if samples.is_empty() || samples.iter().any(|sample| sample.is_nan()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |fraction: f64| interpolated(&sorted, fraction);
        let left_out = left_out(sorted.len());
        Some(Summary {
            median: at(0.5),
            lower: at(0.25),
            upper: at(0.75),
            interval: [sorted[left_out], sorted[sorted.len() - 1 - left_out]],
            samples: samples.to_vec(),
        })
    }

    /// Summarises the values that are finite; `None` where none is.
    pub fn of_finite(samples: impl IntoIterator<Item = f64>) -> Option<Summary> {
        let finite: Vec<f64> = samples.into_iter().filter(|sample| sample.is_finite()).collect();
        Summary::of(&finite)
    }

    /// Half the distance between the quartiles as a part of the median.
    pub fn spread(&self) -> f64 {
        if self.median == 0.0 {
            0.0
        } else {
            (self.upper - self.lower) / 2.0 / self.median
        }
    }

    /// As it is kept in JSON files: `median`, `lower_quartile`, `upper_quartile`, `samples`.
    pub fn to_json(&self) -> Value {
        json!({
            "median": self.median,
            "lower_quartile": self.lower,
            "upper_quartile": self.upper,
            "samples": self.samples,
        })
    }
}

/// Linear interpolation between the closest ranks (type 7 of Hyndman and Fan, what spreadsheets do).
fn interpolated(sorted: &[f64], fraction: f64) -> f64 {
    let rank = fraction * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    below + (above - below) * rank.fract()
}

/// How many values each end of the interval leaves out: as many as the median is beyond with at most 2.5 % (binomial
/// distribution).
fn left_out(count: usize) -> usize {
    let mut probability = 0.5_f64.powi(count as i32);
    let mut below = 0.0;
    for k in 0..count {
        below += probability;
        if below > 0.025 {
            return k.saturating_sub(1);
        }
        probability *= (count - k) as f64 / (k + 1) as f64;
    }
    0
}

/// A quantile of many values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantile {
    /// The value.
    pub value: f64,
    /// 95 % interval.
    pub interval: [f64; 2],
}

impl Quantile {
    /// The value of which `part` of all `values` (in order) are at most as large, and the two that the true one lies
    /// between in 95 of 100 cases: how many of `values` lie below that is distributed binomially, here as a normal
    /// distribution. `None` of no values.
    pub fn of(values: &[f64], part: f64) -> Option<Quantile> {
        let count = values.len() as f64;
        let at = |rank: f64| {
            let last = values.len().checked_sub(1)?;
            values.get((rank.ceil().max(1.0) as usize - 1).min(last)).copied()
        };
        let spread = 1.96 * (count * part * (1.0 - part)).sqrt();
        Some(Quantile {
            value: at(count * part)?,
            interval: [at(count * part - spread)?, at(count * part + spread)?],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quartiles() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0, 5.0]).unwrap();
        assert_eq!((summary.lower, summary.median, summary.upper), (2.0, 3.0, 4.0));
        let summary = Summary::of(&[1.0, 2.0]).unwrap();
        assert_eq!((summary.lower, summary.median, summary.upper), (1.25, 1.5, 1.75));
        assert_eq!(Summary::of(&[7.0]).unwrap().spread(), 0.0);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
    }
    /// The table that textbooks print: ranks of the 95 % interval of the median.
    #[test]
    fn intervals_are_those_of_the_sign_test() {
        for (count, rank) in [
            (5, 1),
            (6, 1),
            (8, 1),
            (9, 2),
            (10, 2),
            (12, 3),
            (20, 6),
            (25, 8),
            (50, 18),
        ] {
            assert_eq!(left_out(count) + 1, rank, "{count} values");
        }
    }

    #[test]
    fn median_and_interval() {
        let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        let summary = Summary::of(&values).unwrap();
        assert_eq!((summary.median, summary.interval), (10.5, [6.0, 15.0]));
        let one = Summary::of(&[3.0]).unwrap();
        assert_eq!((one.median, one.interval), (3.0, [3.0, 3.0]));
    }

    #[test]
    fn what_is_no_number_can_be_left_out() {
        let summary = Summary::of_finite([4.0, f64::NAN, 1.0, 3.0, 2.0, 5.0]).unwrap();
        assert_eq!((summary.lower, summary.median, summary.upper), (2.0, 3.0, 4.0));
        assert_eq!(Summary::of_finite([f64::INFINITY]), None);
        assert_eq!(Summary::of_finite([f64::NAN]), None);
        assert_eq!(Summary::of_finite([]), None);
    }

    #[test]
    fn quantiles_have_an_interval_that_more_values_narrow() {
        let values: Vec<f64> = (1..=10_000).map(f64::from).collect();
        let found = Quantile::of(&values, 0.99).expect("there are values");
        // sqrt(10,000 * 0.99 * 0.01) = 9.95 ranks to each side, 1.96 times.
        assert_eq!((found.value, found.interval), (9900.0, [9881.0, 9920.0]));
        let few = Quantile::of(&values[..10], 0.99).expect("there are values");
        assert_eq!((few.value, few.interval), (10.0, [10.0, 10.0]));
        assert_eq!(Quantile::of(&[], 0.5), None);
    }
}
