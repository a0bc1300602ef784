//! Histograms of a fixed length, which one thread writes while others read.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets of an octave, as a power of two: a value is told from one that is larger by a 64th of it.
const STEPS_LOG2: u32 = 6;
const STEPS: u64 = 1 << STEPS_LOG2;
/// Values of so many bits are told apart; longer ones count as the largest of these (18 minutes in nanoseconds).
const BITS: u32 = 40;
const BUCKETS: usize = ((BITS - STEPS_LOG2 + 1) as usize) << STEPS_LOG2;

/// How often each value came: exact below 128, within 1.6 % above. All memory is taken, and touched, when it is made.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
    count: AtomicU64,
    max: AtomicU64,
}

/// What of a histogram is shown: in C `struct lm_rt_percentiles`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Percentiles {
    /// Values recorded.
    pub count: u64,
    /// Half of the values are at most this.
    pub p50: u64,
    /// 99 % of them.
    pub p99: u64,
    /// 99.9 % of them.
    pub p999: u64,
    /// All of them.
    pub max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }
}

fn bucket(value: u64) -> usize {
    let value = value.min((1 << BITS) - 1);
    if value < STEPS {
        return value as usize;
    }
    let octave = value.ilog2() - STEPS_LOG2;
    (u64::from(octave) * STEPS + (value >> octave)) as usize
}

/// The largest value of a bucket.
fn largest(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let octave = bucket / STEPS - 1;
    ((bucket - octave * STEPS + 1) << octave) - 1
}

/// Counts one more, where no other thread does: without the price of a locked instruction.
fn add_one(count: &AtomicU64) {
    // Relaxed: each number is right for itself.
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Histogram {
    /// One value more. One thread alone records.
    pub(crate) fn record(&self, value: u64) {
        add_one(&self.buckets[bucket(value)]);
        if value > self.max.load(Ordering::Relaxed) {
            self.max.store(value, Ordering::Relaxed);
        }
        add_one(&self.count);
    }

    /// Values that came, ascending, each with how often it did.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        let max = self.max.load(Ordering::Relaxed);
        let counts = self.buckets.iter().enumerate();
        counts.filter_map(move |(at, count)| {
            let count = count.load(Ordering::Relaxed);
            // What goes beyond the last bucket is known as the largest value alone.
            let value = match at + 1 == BUCKETS {
                true => max,
                false => largest(at).min(max),
            };
            (count > 0).then_some((value, count))
        })
    }

    /// [`write_hgrm`] of it: one `unit` of its values is written as 1, which is a microsecond where that is 1000 and the values are nanoseconds.
    ///
    /// # Errors
    /// Whatever `out` reports.
    pub fn write_hgrm(&self, unit: f64, out: &mut impl Write) -> io::Result<()> {
        let counts: Vec<_> = self.counts().collect();
        write_hgrm(&counts, unit, [BUCKETS as u64 / STEPS, STEPS], out)
    }

    /// What is shown of it: one pass, some microseconds. While it is written, of about that moment.
    pub fn percentiles(&self) -> Percentiles {
        let (count, max) = (
            self.count.load(Ordering::Relaxed),
            self.max.load(Ordering::Relaxed),
        );
        let ranks = [500, 990, 999].map(|part: u64| (u128::from(count) * u128::from(part)).div_ceil(1000));
        let mut found = [max; 3];
        let (mut seen, mut next) = (0u128, 0);
        for (value, count) in self.counts() {
            seen += u128::from(count);
            while next < ranks.len() && seen >= ranks[next] {
                found[next] = value;
                next += 1;
            }
        }
        let [p50, p99, p999] = found;
        Percentiles {
            count,
            p50,
            p99,
            p999,
            max,
        }
    }
}

/// Percentile lines per halving of the distance to 100 %, HdrHistogram's customary 5.
const TICKS_PER_HALF_DISTANCE: f64 = 5.0;

/// Writes a percentile distribution as `.hgrm`, the text that HdrHistogram's plotters read (`AbstractHistogram.outputPercentileDistribution`),
/// of values, ascending, each with how often it came. One `unit` is written as 1; the last line has how many `buckets` there are, and steps in
/// each.
///
/// # Errors
/// Whatever `out` reports.
pub fn write_hgrm(
    counts: &[(u64, u64)],
    unit: f64,
    [buckets, steps]: [u64; 2],
    out: &mut impl Write,
) -> io::Result<()> {
    writeln!(
        out,
        "{:>12} {:>14} {:>10} {:>14}\n",
        "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
    )?;
    let total: u64 = counts.iter().map(|(_, count)| count).sum();
    let (mut seen, mut quantile) = (0, 0.0_f64);
    for (value, count) in counts {
        seen += count;
        while seen as f64 / total as f64 >= quantile {
            let value = *value as f64 / unit;
            write!(out, "{value:12.3} {quantile:14.12} {seen:10}")?;
            if quantile >= 1.0 {
                writeln!(out)?;
                break;
            }
            writeln!(out, " {:14.2}", 1.0 / (1.0 - quantile))?;
            let halvings = (1.0 / (1.0 - quantile)).log2().floor();
            let next = quantile + 1.0 / (TICKS_PER_HALF_DISTANCE * (halvings + 1.0).exp2());
            quantile = if seen == total || next <= quantile {
                1.0
            } else {
                next
            };
        }
    }
    let mean_of = |of: &dyn Fn(f64) -> f64| {
        let sum: f64 = { counts.iter() }
            .map(|(value, count)| of(*value as f64) * *count as f64)
            .sum();
        sum / total.max(1) as f64
    };
    let mean = mean_of(&|value| value);
    let deviation = mean_of(&|value| (value - mean) * (value - mean)).sqrt() / unit;
    let (mean, max) = (
        mean / unit,
        counts.last().map_or(0.0, |(value, _)| *value as f64 / unit),
    );
    writeln!(out, "#[Mean    = {mean:12.3}, StdDeviation   = {deviation:12.3}]")?;
    writeln!(out, "#[Max     = {max:12.3}, Total count    = {total:12}]")?;
    writeln!(out, "#[Buckets = {buckets:12}, SubBuckets     = {steps:12}]")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the Java original lays it out.
    #[test]
    fn hgrm_is_a_line_for_each_fifth_of_the_half_that_is_left() {
        let histogram = Histogram::default();
        for (value, times) in [(1000, 5), (2000, 3)] {
            (0..times).for_each(|_| histogram.record(value));
        }
        let mut text = Vec::new();
        histogram.write_hgrm(1000.0, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let expected = "       Value     Percentile TotalCount 1/(1-Percentile)

       1.007 0.000000000000          5           1.00
       1.007 0.100000000000          5           1.11
       1.007 0.200000000000          5           1.25
       1.007 0.300000000000          5           1.43
       1.007 0.400000000000          5           1.67
       1.007 0.500000000000          5           2.00
       1.007 0.550000000000          5           2.22
       1.007 0.600000000000          5           2.50
       2.000 0.650000000000          8           2.86
       2.000 1.000000000000          8
#[Mean    =        1.379, StdDeviation   =        0.481]
#[Max     =        2.000, Total count    =            8]
#[Buckets =           35, SubBuckets     =           64]
";
        assert_eq!(text, expected);
    }

    #[test]
    fn every_value_lies_in_a_bucket_that_is_a_64th_of_it_wide() {
        let mut before = 0;
        for at in 0..BUCKETS {
            let largest = largest(at);
            assert_eq!(
                (bucket(largest), bucket(before)),
                (at, at),
                "{before} to {largest}"
            );
            assert!((largest - before) * STEPS <= before, "{before} to {largest}");
            before = largest + 1;
        }
        assert_eq!(before, 1 << BITS);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let histogram = Histogram::default();
        assert_eq!(histogram.percentiles(), Percentiles::default());
        // 1 to 10,000, in another order.
        for step in 0..10_000 {
            histogram.record(1 + step * 7919 % 10_000);
        }
        let found = histogram.percentiles();
        assert_eq!((found.count, found.max), (10_000, 10_000));
        for (value, exact) in [(found.p50, 5000), (found.p99, 9900), (found.p999, 9990)] {
            assert!(
                (exact..=exact + exact / 64).contains(&value),
                "{value} of {exact}"
            );
        }
        assert_eq!(histogram.counts().map(|(_, count)| count).sum::<u64>(), 10_000);
        assert!(histogram.counts().is_sorted_by(|a, b| a.0 < b.0));
        // One that is longer than all buckets keeps its value.
        histogram.record(1 << 50);
        assert_eq!(histogram.percentiles().max, 1 << 50);
        assert_eq!(histogram.counts().last(), Some((1 << 50, 1)));
    }

    #[test]
    fn small_numbers_are_exact() {
        let histogram = Histogram::default();
        for (value, times) in [(0, 3), (1, 2), (127, 1)] {
            (0..times).for_each(|_| histogram.record(value));
        }
        let counts: Vec<_> = histogram.counts().collect();
        assert_eq!(counts, [(0, 3), (1, 2), (127, 1)]);
        assert_eq!(histogram.percentiles().p50, 0);
    }
}
