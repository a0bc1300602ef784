//! Medians and spreads of repeated measurements.

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
        let at = |fraction: f64| quantile(&sorted, fraction);
        Some(Summary {
            median: at(0.5),
            lower: at(0.25),
            upper: at(0.75),
            samples: samples.to_vec(),
        })
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
fn quantile(sorted: &[f64], fraction: f64) -> f64 {
    let rank = fraction * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    below + (above - below) * rank.fract()
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
}
