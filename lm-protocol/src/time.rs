//! The time that state machines are told: a monotonic nanosecond count whose zero the caller chooses.

use core::fmt;
use core::ops::{Add, AddAssign, Sub};
use core::time::Duration;

/// A moment, in nanoseconds since a zero that the caller chose and keeps.
///
/// Nothing in this crate reads a clock. Arithmetic saturates: `u64` nanoseconds last 584 years, and a moment "never"
/// is [`Time::MAX`].
///
/// ```
/// use core::time::Duration;
/// use lm_protocol::time::Time;
///
/// let start = Time::from_nanos(1_000);
/// let later = start + Duration::from_micros(5);
/// assert_eq!(later.as_nanos(), 6_000);
/// assert_eq!(later - start, Duration::from_micros(5));
/// assert_eq!(start - later, Duration::ZERO);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The caller's zero.
    pub const ZERO: Time = Time(0);
    /// Later than everything: "never".
    pub const MAX: Time = Time(u64::MAX);

    /// The moment `nanos` nanoseconds after zero.
    #[inline]
    pub const fn from_nanos(nanos: u64) -> Time {
        Time(nanos)
    }

    /// The moment `millis` milliseconds after zero.
    #[inline]
    pub const fn from_millis(millis: u64) -> Time {
        Time(millis.saturating_mul(1_000_000))
    }

    /// Nanoseconds since zero.
    #[inline]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long ago `earlier` was; zero when it lies ahead.
    #[inline]
    pub const fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    #[inline]
    fn add(self, rhs: Duration) -> Time {
        Time(
            self.0
                .saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl AddAssign<Duration> for Time {
    #[inline]
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}

impl Sub for Time {
    type Output = Duration;

    #[inline]
    fn sub(self, rhs: Time) -> Duration {
        self.since(rhs)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09} s", self.0 / 1_000_000_000, self.0 % 1_000_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Time::MAX + Duration::from_secs(1), Time::MAX);
        assert_eq!(Time::ZERO + Duration::MAX, Time::MAX);
        assert_eq!(Time::from_millis(u64::MAX), Time::MAX);
        assert_eq!(Time::from_millis(1_500).to_string(), "1.500000000 s");
    }
}
