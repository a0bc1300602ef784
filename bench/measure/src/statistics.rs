//! Medians and intervals of repeated measurements.

/// What repeated measurements of one quantity say.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The middle value, or the mean of the two middle values.
    pub median: f64,
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
        let left_out = left_out(sorted.len());
        Some(Summary {
            median: (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0,
            interval: [sorted[left_out], sorted[sorted.len() - 1 - left_out]],
            samples: samples.to_vec(),
        })
    }

    /// Summarises the values that are finite; `None` where none is.
    pub fn of_finite(samples: impl IntoIterator<Item = f64>) -> Option<Summary> {
        let finite: Vec<f64> = samples.into_iter().filter(|sample| sample.is_finite()).collect();
        Summary::of(&finite)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_numbers() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0, 5.0]).unwrap();
        assert_eq!((summary.median, summary.interval), (3.0, [1.0, 5.0]));
        assert_eq!(Summary::of(&[2.0, 1.0]).unwrap().median, 1.5);
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
        assert_eq!(summary.median, 3.0);
        assert_eq!(Summary::of_finite([f64::INFINITY]), None);
        assert_eq!(Summary::of_finite([f64::NAN]), None);
        assert_eq!(Summary::of_finite([]), None);
    }
}
