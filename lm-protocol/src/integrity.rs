//! Integrity: whether a sender's messages come with digests, and when their receiver asks for those that it lacks.
//!
//! What the digests are is in [`crate::manifest`]. A message that arrives whole needs only its own, which its sender says
//! once it has sent the last fragment; those of the fragments are asked for when it differs.

use core::time::Duration;

use crate::time::Time;

/// What an endpoint does so that nobody takes what it sends for something else. Receivers obey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Integrity {
    /// Nothing: each hop's checksums must do.
    None = 0,
    /// Digests, end to end, of fragments and messages and of every packet of one fragment. Nothing is shown before it is
    /// verified.
    #[default]
    Manifest = 1,
}

impl Integrity {
    /// Whether there are digests.
    #[inline]
    pub const fn has_digests(self) -> bool {
        matches!(self, Integrity::Manifest)
    }

    /// Its name on a command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Integrity::None => "none",
            Integrity::Manifest => "manifest",
        }
    }
}

/// When to ask for digests of one message: a while after they were first missed, because they are on their way, and then
/// again and again with a pause that doubles.
///
/// ```
/// use lm_protocol::integrity::DigestTimer;
/// use lm_protocol::time::Time;
///
/// let start = Time::from_millis(1);
/// let mut timer = DigestTimer::default();
/// assert!(!timer.poll(start));
/// let mut now = start + DigestTimer::GRACE;
/// assert!(timer.poll(now));
/// assert!(!timer.poll(now));
/// now += DigestTimer::PAUSE;
/// assert!(timer.poll(now));
/// assert!(!timer.poll(now + DigestTimer::PAUSE)); // twice as long
/// assert_eq!(timer.waited(now), DigestTimer::GRACE + DigestTimer::PAUSE);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct DigestTimer {
    since: Option<Time>,
    due: Option<Time>,
    repeats: u32,
}

impl DigestTimer {
    /// How long digests may take that nobody asked for.
    pub const GRACE: Duration = Duration::from_micros(300);
    /// The first pause before a question is repeated.
    pub const PAUSE: Duration = Duration::from_millis(2);
    /// The longest one.
    pub const PAUSE_MAX: Duration = Duration::from_millis(200);

    /// Whether to ask now. The first call starts the timer.
    pub fn poll(&mut self, now: Time) -> bool {
        self.since.get_or_insert(now);
        let due = *self.due.get_or_insert(now + DigestTimer::GRACE);
        if now < due {
            return false;
        }
        let pause = DigestTimer::PAUSE * (1 << self.repeats.min(10));
        self.repeats = self.repeats.saturating_add(1);
        self.due = Some(now + pause.min(DigestTimer::PAUSE_MAX));
        true
    }

    /// Another question than before: it is asked at once. How long there has been one does not change.
    pub fn ask_at_once(&mut self, now: Time) {
        self.since.get_or_insert(now);
        self.due = Some(now);
        self.repeats = 0;
    }

    /// A part of the answer came: the rest may be behind it.
    pub fn progressed(&mut self, now: Time) {
        self.repeats = 0;
        self.due = Some(now + DigestTimer::PAUSE);
    }

    /// How long there has been a question; 0 where there is none.
    pub fn waited(&self, now: Time) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now - since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_repeated_ever_less_often_until_something_comes() {
        let mut timer = DigestTimer::default();
        let start = Time::from_millis(7);
        let mut now = start;
        let mut asked = std::vec::Vec::new();
        while now < start + Duration::from_secs(1) {
            if timer.poll(now) {
                asked.push(now - start);
            }
            now += Duration::from_micros(100);
        }
        let pauses: std::vec::Vec<u128> = asked
            .windows(2)
            .map(|two| (two[1] - two[0]).as_millis())
            .collect();
        assert_eq!(asked[0], DigestTimer::GRACE);
        assert_eq!(pauses[..7], [2, 4, 8, 16, 32, 64, 128]);
        assert!(pauses[7..].iter().all(|&pause| pause == 200));
        timer.progressed(now);
        assert!(!timer.poll(now) && timer.poll(now + DigestTimer::PAUSE));
        timer.ask_at_once(now);
        assert!(timer.poll(now));
        assert_eq!(timer.waited(now), Duration::from_secs(1));
    }
}
