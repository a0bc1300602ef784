//! How deep the lower level of a queue of two levels is (E-UDP §4.2).
//!
//! ```text
//!  upper level: messages in memory          lower level: what the device has, and what is on the way
//!  any number, nobody waits behind them ──▶ whatever leaves next waits behind all of it
//! ```
//!
//! The lower level clocks itself: what comes out of it lets something in. Too short, and whoever works it off runs dry while there is work; too
//! long, and a small message waits behind it. It has two counts, and none of them says what the other does:
//!
//! | count | goes down with | bound by |
//! |---|---|---|
//! | handed over, not completed | completions of the device | [`DeviceDepth`], in packets: Linux's byte queue limits (`lib/dynamic_queue_limits.c`) |
//! | allowed to be sent, not arrived | arrivals, which the receiver sees | [`PathDepth`], in time: least round trip and a slack, at the rate of arrivals |
//!
//! Both are arithmetic on numbers that the caller tells: they send nothing and read no clock.

use core::time::Duration;

use crate::time::Time;

/// What was not needed for so long is not needed, by either count.
const CALM: Duration = Duration::from_millis(100);

/// Part of the packets of a look by which a device has more that ran dry.
const GROWTH: u32 = 8;

/// How many packets may be handed over and not completed.
///
/// ```
/// use lm_protocol::depth::DeviceDepth;
/// use lm_protocol::time::Time;
///
/// let mut depth = DeviceDepth::new(64, 1024);
/// for at in [1, 2] {
///     depth.waited();
///     depth.completed(64, 0, Time::from_millis(at));
/// }
/// assert_eq!(depth.allowed(), 72, "all of 64 were done while more waited, and not for the first time");
/// depth.completed(20, 50, Time::from_millis(50));
/// depth.completed(20, 5, Time::from_millis(103));
/// assert_eq!(depth.allowed(), 67, "5 were never needed");
/// ```
#[derive(Clone, Debug)]
pub struct DeviceDepth {
    least: u32,
    most: u32,
    allowed: u32,
    /// Something waited for room since completions were last looked at.
    waited: bool,
    /// It was found dry meanwhile, once.
    was_dry: bool,
    /// Fewest that were left when completions had been looked at, since then; looks that found none left out.
    left: u32,
    since: Time,
}

impl DeviceDepth {
    /// Between `least`, with which it begins, and `most`, which goes before it.
    pub fn new(least: u32, most: u32) -> DeviceDepth {
        let most = most.max(1);
        let least = least.clamp(1, most);
        DeviceDepth {
            least,
            most,
            allowed: least,
            waited: false,
            was_dry: false,
            left: u32::MAX,
            since: Time::ZERO,
        }
    }

    /// Packets that may be handed over and not completed.
    #[inline]
    pub fn allowed(&self) -> u32 {
        self.allowed
    }

    /// Whether something waits above for room, since completions were last found.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        self.waited
    }

    /// Something waits above for room.
    #[inline]
    pub fn waited(&mut self) {
        self.waited = true;
    }

    /// `packets` were found to be completed, and so many are left that are not.
    pub fn completed(&mut self, packets: u32, left: u32, now: Time) {
        let waited = core::mem::take(&mut self.waited);
        if left == 0 && waited {
            // It ran dry, and would have taken more. Once in a while is a pause of whoever hands packets over, which is no reason; and how long
            // it has been dry nobody knows: what it needs it has after some such looks.
            if core::mem::replace(&mut self.was_dry, true) {
                self.allowed = self
                    .allowed
                    .saturating_add(packets.div_ceil(GROWTH))
                    .min(self.most);
                (self.left, self.since) = (u32::MAX, now);
            }
            return;
        }
        self.left = self.left.min(left);
        if now.since(self.since) >= CALM {
            self.allowed = self.allowed.saturating_sub(self.left).max(self.least);
            (self.left, self.since, self.was_dry) = (u32::MAX, now, false);
        }
    }
}

/// Slack of a path, beyond its least round trip: what the ends' pauses may take before it runs dry.
const SLACK: Duration = Duration::from_millis(1);
/// And at most.
const SLACK_MOST: Duration = Duration::from_millis(16);
/// Over so long the rate of arrivals is taken. After a longer pause than [`CALM`] it says nothing of the path.
const SPAN: Duration = Duration::from_millis(4);

/// How many packets may be on the way, by who receives them: it says how many may be sent, and sees when they come.
///
/// So many that the path is filled for its least round trip and a slack, and `burst` more, so that there is always one that can leave at once.
/// A round trip is from a word that allows a packet to the packet, of a sender that had nothing left to send without. One that takes twice as
/// long as both together was not made longer by what this sender has on the way: somebody paused, or others fill the path's queues. Then the
/// slack grows to it, and goes back by half in each 100 ms.
#[derive(Clone, Debug)]
pub struct PathDepth {
    burst: u32,
    most: u32,
    allowed: u32,
    least_round_trip: Option<Duration>,
    slack: Duration,
    /// When the slack was last changed, or needed.
    slack_since: Time,
    /// A packet behind so many was allowed then.
    asked: Option<(u64, Time)>,
    /// Arrivals a second, and how many there were when.
    rate: u64,
    counted: (u64, Time),
}

impl PathDepth {
    /// Of a path that takes no more than `most`, where `burst` packets leave at once.
    pub fn new(burst: u32, most: u32, now: Time) -> PathDepth {
        let mut depth = PathDepth {
            burst,
            most,
            allowed: 0,
            least_round_trip: None,
            slack: SLACK,
            slack_since: now,
            asked: None,
            rate: 0,
            counted: (0, now),
        };
        depth.settle();
        depth
    }

    /// Packets that may be on the way.
    #[inline]
    pub fn allowed(&self) -> u32 {
        self.allowed
    }

    /// The sender is told that it may send more than the first `before` packets. It has them.
    pub fn told(&mut self, before: u64, now: Time) {
        self.asked.get_or_insert((before, now));
    }

    /// The first `packets` packets have come by now.
    pub fn arrived(&mut self, packets: u64, now: Time) {
        if let Some((before, then)) = self.asked
            && packets > before
        {
            self.asked = None;
            self.took(now.since(then), now);
        }
        if now.since(self.slack_since) >= CALM {
            self.slack = (self.slack / 2).max(SLACK);
            self.slack_since = now;
        }
        let (counted, then) = self.counted;
        let passed = now.since(then);
        if passed >= SPAN {
            self.counted = (packets, now);
            if passed < CALM {
                let came = u128::from(packets.saturating_sub(counted)) * 1_000_000_000;
                let rate = u64::try_from(came / passed.as_nanos()).unwrap_or(u64::MAX);
                // What came late comes in clumps, so that one span does not count much; and who has little to send, or shares the path, for
                // a while will have more.
                self.rate = match rate > self.rate {
                    true => self.rate + (rate - self.rate).div_ceil(4),
                    false => self.rate - (self.rate - rate) / 256,
                };
            }
        }
        self.settle();
    }

    /// A round trip took so long.
    fn took(&mut self, round_trip: Duration, now: Time) {
        let least = self
            .least_round_trip
            .map_or(round_trip, |least| least.min(round_trip));
        self.least_round_trip = Some(least);
        if round_trip > 2 * (least + self.slack) {
            self.slack = (round_trip - least).min(SLACK_MOST);
            self.slack_since = now;
        }
    }

    fn settle(&mut self) {
        let filled = self.least_round_trip.unwrap_or_default() + self.slack;
        let packets = u128::from(self.rate) * filled.as_nanos() / 1_000_000_000;
        let packets = u32::try_from(packets).unwrap_or(u32::MAX);
        // Two bursts at least: one on the way while the other leaves.
        let wanted = packets.max(self.burst).saturating_add(self.burst);
        self.allowed = wanted.min(self.most).max(1);
    }
}

#[cfg(test)]
mod tests;
