//! Delivery: which fragments of a message have arrived, which are missing, and when to ask for them.
//!
//! Positions are those of the transmit order ([`crate::window`]). A receiver takes packets in that order; a jump says
//! that the positions in between are lost or late, and a sender that waits says how far it has sent
//! ([`Arrivals::claim`]), so that a loss at the end comes to light as well. Asking again is driven by
//! [`RequestTimer`], which is told the time.

use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;

use crate::time::Time;

/// What becomes of a message of which fragments were lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Delivery {
    /// It is reported as incomplete, and the next one follows: the paper's service.
    #[default]
    Unreliable = 0,
    /// Its missing fragments are requested again until it is whole.
    Reliable = 1,
    /// It is delivered with a map of what is valid.
    Partial = 2,
}

impl Delivery {
    /// The mode's number on the wire.
    pub const fn to_u8(self) -> u8 {
        self as u8
    }

    /// The mode with this number.
    pub const fn from_u8(byte: u8) -> Option<Delivery> {
        match byte {
            0 => Some(Delivery::Unreliable),
            1 => Some(Delivery::Reliable),
            2 => Some(Delivery::Partial),
            _ => None,
        }
    }

    /// Its name on a command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Delivery::Unreliable => "unreliable",
            Delivery::Reliable => "reliable",
            Delivery::Partial => "partial",
        }
    }
}

/// What a packet was for its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The next one.
    Next,
    /// So many positions before it are missing now that were not before; at least 1.
    Jumped(u32),
    /// One that was missing.
    Late,
    /// It had arrived before.
    Duplicate,
}

/// Which positions of one message have arrived. Nothing is allocated while nothing is missing.
///
/// ```
/// use lm_protocol::delivery::{Arrival, Arrivals};
///
/// let mut arrivals = Arrivals::new(5);
/// assert_eq!(arrivals.take(0), Arrival::Next);
/// assert_eq!(arrivals.take(3), Arrival::Jumped(2));
/// assert_eq!(arrivals.missing(), [1..3]);
/// assert_eq!(arrivals.take(2), Arrival::Late);
/// arrivals.claim(5); // the sender says that it has sent all
/// assert_eq!(arrivals.missing(), [1..2, 4..5]);
/// assert_eq!((arrivals.take(1), arrivals.take(4)), (Arrival::Late, Arrival::Late));
/// assert!(arrivals.is_complete());
/// assert_eq!(arrivals.take(4), Arrival::Duplicate);
/// ```
#[derive(Clone, Debug)]
pub struct Arrivals {
    count: u32,
    /// All positions from here on are still to come.
    expected: u32,
    /// Positions below `expected` that did not come: ascending, disjoint, not adjacent.
    missing: Vec<Range<u32>>,
}

impl Arrivals {
    /// Nothing of `count` positions has arrived.
    pub const fn new(count: u32) -> Arrivals {
        Arrivals {
            count,
            expected: 0,
            missing: Vec::new(),
        }
    }

    /// A packet is here. `position` is below the count.
    #[inline]
    pub fn take(&mut self, position: u32) -> Arrival {
        debug_assert!(position < self.count);
        if position == self.expected {
            self.expected += 1;
            return Arrival::Next;
        }
        self.take_unexpected(position)
    }

    /// The next `count` packets are here, each at the first position of which nothing was known.
    #[inline]
    pub fn take_next(&mut self, count: u32) {
        debug_assert!(count <= self.count - self.expected);
        self.expected += count;
    }

    fn take_unexpected(&mut self, position: u32) -> Arrival {
        if position > self.expected {
            let jumped = position - self.expected;
            self.add_missing(self.expected..position);
            self.expected = position + 1;
            return Arrival::Jumped(jumped);
        }
        let at = self.missing.partition_point(|range| range.end <= position);
        let Some(range) = self
            .missing
            .get(at)
            .filter(|range| range.start <= position)
            .cloned()
        else {
            return Arrival::Duplicate;
        };
        let (before, after) = (range.start..position, position + 1..range.end);
        match (before.is_empty(), after.is_empty()) {
            (true, true) => drop(self.missing.remove(at)),
            (false, true) => self.missing[at] = before,
            (true, false) => self.missing[at] = after,
            (false, false) => {
                self.missing[at] = before;
                self.missing.insert(at + 1, after);
            }
        }
        Arrival::Late
    }

    /// The sender has sent everything before `position`: what has not come of it is missing. Says whether that is more
    /// than before.
    pub fn claim(&mut self, position: u32) -> bool {
        let position = position.min(self.count);
        if position <= self.expected {
            return false;
        }
        self.add_missing(self.expected..position);
        self.expected = position;
        true
    }

    /// A position that arrived is no good, and missing again.
    pub fn reject(&mut self, position: u32) {
        let at = self.missing.partition_point(|range| range.end <= position);
        let known = self.missing.get(at).is_some_and(|range| range.start <= position);
        if position < self.expected && !known {
            self.missing.insert(at, position..position + 1);
        }
    }

    fn add_missing(&mut self, range: Range<u32>) {
        match self.missing.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.missing.push(range),
        }
    }

    /// Positions known to be missing: ascending and disjoint.
    pub fn missing(&self) -> &[Range<u32>] {
        &self.missing
    }

    /// How many positions that is.
    pub fn missing_count(&self) -> u32 {
        self.missing.iter().map(|range| range.end - range.start).sum()
    }

    /// Whether `position` has arrived.
    pub fn has(&self, position: u32) -> bool {
        let at = self.missing.partition_point(|range| range.end <= position);
        position < self.expected && self.missing.get(at).is_none_or(|range| range.start > position)
    }

    /// The first position of which nothing is known.
    #[inline]
    pub const fn expected(&self) -> u32 {
        self.expected
    }

    /// Whether every position has arrived.
    #[inline]
    pub const fn is_complete(&self) -> bool {
        self.expected == self.count && self.missing.is_empty()
    }
}

/// When to ask for what is missing of a message: once soon after it was noticed, so that packets that were merely
/// overtaken can still come, then for everything again with a pause that doubles.
///
/// ```
/// use lm_protocol::delivery::RequestTimer;
/// use lm_protocol::time::Time;
///
/// let start = Time::from_millis(1);
/// let mut timer = RequestTimer::default();
/// timer.noticed(start);
/// assert_eq!(timer.poll(start), None);
/// let soon = start + RequestTimer::REORDER;
/// assert_eq!(timer.poll(soon), Some(0)); // everything from position 0 on
/// let pause = RequestTimer::PAUSE;
/// timer.asked(soon, 0, 7, pause); // positions below 7 are known to be sent
/// timer.noticed(soon);
/// assert_eq!(timer.poll(soon + RequestTimer::REORDER), Some(7)); // only what is new
/// assert_eq!(timer.poll(soon + pause), Some(0)); // all of it again
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestTimer {
    /// When to ask for what was noticed since the last request.
    fresh: Option<Time>,
    /// When to ask for everything again.
    repeat: Option<Time>,
    /// Positions below were asked for before.
    asked_to: u32,
    repeats: u32,
    /// When the last request left that nothing has answered; `None` also after a repetition, whose answer may be to the
    /// one before (Karn's rule).
    unanswered: Option<Time>,
}

impl RequestTimer {
    /// How long an overtaken packet may take.
    pub const REORDER: Duration = Duration::from_micros(50);
    /// The first pause before a request is repeated, while no round trip is known.
    pub const PAUSE: Duration = Duration::from_millis(2);
    /// The shortest one, however short the round trips.
    pub const PAUSE_MIN: Duration = Duration::from_micros(250);
    /// The longest one.
    pub const PAUSE_MAX: Duration = Duration::from_millis(200);

    /// Something is missing that was not missing before.
    pub fn noticed(&mut self, now: Time) {
        self.fresh.get_or_insert(now + RequestTimer::REORDER);
    }

    /// Something that was asked for came: the path works. Gives the time from request to answer, when this is the first.
    pub fn progressed(&mut self, now: Time) -> Option<Duration> {
        self.repeats = 0;
        self.unanswered.take().map(|asked| now - asked)
    }

    /// The position from which on missing ones are to be asked for now, if any.
    pub fn poll(&self, now: Time) -> Option<u32> {
        if self.repeat.is_some_and(|due| due <= now) {
            return Some(0);
        }
        self.fresh.filter(|due| *due <= now).map(|_| self.asked_to)
    }

    /// A request for what is missing from `from` to `to` has left. It is repeated after `pause`, which doubles each time.
    pub fn asked(&mut self, now: Time, from: u32, to: u32, pause: Duration) {
        self.fresh = None;
        self.asked_to = to;
        self.unanswered = (self.repeats == 0 || from > 0).then_some(now);
        if from == 0 || self.repeat.is_none() {
            let pause = pause.max(RequestTimer::PAUSE_MIN) * (1 << self.repeats.min(10));
            self.repeat = Some(now + pause.min(RequestTimer::PAUSE_MAX));
            self.repeats = self.repeats.saturating_add(1);
        }
    }

    /// Whether the fragment at this position may have been asked for.
    pub fn has_asked_for(&self, position: u32) -> bool {
        position < self.asked_to
    }

    /// Nothing is missing at present.
    pub fn clear(&mut self) {
        *self = RequestTimer {
            asked_to: self.asked_to,
            ..RequestTimer::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Against a set of positions, for any order of packets, claims and rejections.
        #[test]
        fn arrivals_are_a_set(count in 1u32..200, steps in prop::collection::vec((0u8..10, 0u32..200), 0..300)) {
            let mut arrivals = Arrivals::new(count);
            let (mut come, mut known) = (BTreeSet::new(), 0);
            for (kind, position) in steps {
                let position = position % count;
                match kind {
                    0 => {
                        prop_assert_eq!(arrivals.claim(position + 1), position >= known);
                        known = known.max(position + 1);
                    }
                    1 => {
                        arrivals.reject(position);
                        come.remove(&position);
                    }
                    _ => {
                        let expected = match position {
                            _ if come.contains(&position) => Arrival::Duplicate,
                            _ if position < known => Arrival::Late,
                            _ if position == known => Arrival::Next,
                            _ => Arrival::Jumped(position - known),
                        };
                        prop_assert_eq!(arrivals.take(position), expected);
                        come.insert(position);
                        known = known.max(position + 1);
                    }
                }
                let missing: Vec<u32> = arrivals.missing().iter().cloned().flatten().collect();
                let expected: Vec<u32> = (0..known).filter(|position| !come.contains(position)).collect();
                prop_assert_eq!(&missing, &expected);
                prop_assert_eq!(arrivals.missing_count() as usize, expected.len());
                prop_assert!(arrivals.missing().iter().all(|range| range.start < range.end));
                prop_assert!((0..count).all(|position| arrivals.has(position) == come.contains(&position)));
                prop_assert_eq!(arrivals.is_complete(), come.len() == count as usize);
            }
        }
    }

    #[test]
    fn requests_are_repeated_ever_less_often_and_never_stop() {
        let mut timer = RequestTimer::default();
        let mut now = Time::from_millis(5);
        timer.noticed(now);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            let begin = now;
            while timer.poll(now).is_none() {
                now += Duration::from_micros(10);
            }
            timer.asked(now, 0, 100, RequestTimer::PAUSE);
            pauses.push(now - begin);
        }
        assert_eq!(pauses[..4], [50, 2000, 4000, 8000].map(Duration::from_micros));
        assert_eq!(pauses[11], RequestTimer::PAUSE_MAX);
        assert_eq!(timer.progressed(now), None, "which request was answered?");
        timer.asked(now, 0, 100, Duration::ZERO);
        now += RequestTimer::PAUSE_MIN;
        assert_eq!(timer.poll(now), Some(0));
        assert_eq!(timer.progressed(now), Some(RequestTimer::PAUSE_MIN));
        assert_eq!(timer.progressed(now), None);
        timer.clear();
        assert_eq!(timer.poll(Time::MAX), None);
    }
}
