//! Medians of the rounds' ratios, their intervals, and verdicts.

use super::schema::{Target, Verdict};

/// A median and its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Median {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Median {
    /// The interval has order statistics as its ends and assumes nothing about the distribution (the sign test's interval: Conover,
    /// Practical Nonparametric Statistics, 3.2). With fewer than six values it is all of them, and less sure than 95 %. `None` for no values.
    pub(super) fn of(values: &[f64]) -> Option<Median> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let last = count.checked_sub(1)?;
        let middle = (sorted[last / 2] + sorted[count / 2]) / 2.0;
        let left_out = left_out(count);
        Some(Median {
            median: middle,
            low: sorted[left_out],
            high: sorted[last - left_out],
        })
    }

    /// Whether the interval is clear of a target.
    pub(super) fn verdict(&self, target: Option<Target>) -> Verdict {
        let (inside, outside) = match target {
            None => return Verdict::None,
            Some(Target::AtLeast(least)) => (self.low >= least, self.high < least),
            Some(Target::AtMost(most)) => (self.high <= most, self.low > most),
        };
        match (inside, outside) {
            (true, _) => Verdict::Met,
            (_, true) => Verdict::Missed,
            _ => Verdict::Unclear,
        }
    }
}

/// How many values each end of the interval leaves out: as many as the median is beyond with at most 2.5 % (binomial distribution).
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
        let median = Median::of(&values).unwrap();
        assert_eq!((median.median, median.low, median.high), (10.5, 6.0, 15.0));
        let one = Median::of(&[3.0]).unwrap();
        assert_eq!((one.median, one.low, one.high), (3.0, 3.0, 3.0));
        assert_eq!(Median::of(&[]), None);
        assert_eq!(Median::of(&[f64::NAN]), None);
    }

    #[test]
    fn verdicts_are_clear_or_unclear() {
        let median = Median {
            median: 1.0,
            low: 0.9,
            high: 1.1,
        };
        for (target, verdict) in [
            (Target::AtLeast(0.9), Verdict::Met),
            (Target::AtLeast(1.0), Verdict::Unclear),
            (Target::AtLeast(1.2), Verdict::Missed),
            (Target::AtMost(1.1), Verdict::Met),
            (Target::AtMost(1.0), Verdict::Unclear),
            (Target::AtMost(0.8), Verdict::Missed),
        ] {
            assert_eq!(median.verdict(Some(target)), verdict, "{target:?}");
        }
        assert_eq!(median.verdict(None), Verdict::None);
    }
}
