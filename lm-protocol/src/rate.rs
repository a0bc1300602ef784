//! How many packets may leave now: a sender's rate limit ([`TokenBucket`]), and its back-off on loss ([`Backoff`]).
//!
//! Both are arithmetic on numbers that the caller tells: they send nothing and read no clock.

use crate::time::Time;
use core::num::NonZeroU64;
use core::time::Duration;

/// A limit in bits per second with bursts of a number of packets.
///
/// A bucket of tokens, one for each bit that may leave, that fills at the rate and never holds more than the burst. Over
/// any time `t` from the start on, no more leaves than `rate · t + burst`; a sender that always has something to send and
/// asks in time sends `rate · t` less one packet at least. Tokens are counted in billionths of a bit, which is what one
/// nanosecond at 1 bit/s brings, so nothing is ever rounded and the limit does not drift.
///
/// ```
/// use core::num::NonZeroU64;
/// use lm_protocol::rate::TokenBucket;
/// use lm_protocol::time::Time;
///
/// // 12 Mbit/s, packets of up to 1500 bytes, four at once: one packet each millisecond.
/// let rate = NonZeroU64::new(12_000_000).unwrap();
/// let mut bucket = TokenBucket::new(rate, 4, 1500, Time::ZERO);
/// assert_eq!(bucket.packets(1500, Time::ZERO), 4);
/// bucket.spend(4 * 1500);
/// assert_eq!(bucket.packets(1500, Time::from_nanos(999_999)), 0);
/// assert_eq!(bucket.next(1500), Time::from_millis(1));
/// assert_eq!(bucket.packets(1500, Time::from_millis(1)), 1);
/// ```
#[derive(Clone, Debug)]
pub struct TokenBucket {
    rate_bits_per_second: u64,
    /// Most that the bucket holds, in billionths of a bit.
    burst: i128,
    /// Billionths of a bit at `filled`; negative after a packet longer than the bucket.
    tokens: i128,
    filled: Time,
}

/// Billionths of a bit in a byte.
const BYTE: i128 = 8_000_000_000;

impl TokenBucket {
    /// A full bucket at the moment `now`.
    ///
    /// `burst_packets` of `packet_len_bytes` may leave at once; at least one packet may, whatever is asked for. The burst
    /// must bring the sender over the time between two of its looks: 1 Gbit/s is one packet of 1250 bytes in 10 µs.
    pub fn new(
        rate_bits_per_second: NonZeroU64,
        burst_packets: u32,
        packet_len_bytes: u32,
        now: Time,
    ) -> TokenBucket {
        let burst = i128::from(burst_packets.max(1)) * i128::from(packet_len_bytes.max(1)) * BYTE;
        TokenBucket {
            rate_bits_per_second: rate_bits_per_second.get(),
            burst,
            tokens: burst,
            filled: now,
        }
    }

    /// The limit in bits per second.
    pub fn rate_bits_per_second(&self) -> u64 {
        self.rate_bits_per_second
    }

    /// How many packets of `packet_len_bytes` may leave now. [`TokenBucket::spend`] says how many did.
    ///
    /// A packet that is longer than the burst may leave when the bucket is full. A `now` before the last one counts as the
    /// last one.
    pub fn packets(&mut self, packet_len_bytes: u32, now: Time) -> u32 {
        let elapsed_ns = now.since(self.filled).as_nanos() as i128; // below 2^64: a difference of two `Time`s
        let rate = i128::from(self.rate_bits_per_second);
        // What a nanosecond brings is kept above the burst: `next` rounds up to whole nanoseconds, and a bucket of one
        // packet would lose what is over each time.
        let full = self.burst + rate - 1;
        self.tokens = self
            .tokens
            .saturating_add(elapsed_ns.saturating_mul(rate))
            .min(full);
        self.filled = self.filled.max(now);
        let cost = cost(packet_len_bytes);
        if self.tokens >= self.burst && cost > self.burst {
            return 1;
        }
        u32::try_from((self.tokens / cost).max(0)).unwrap_or(u32::MAX)
    }

    /// Packets with `bytes` altogether left.
    ///
    /// More than [`TokenBucket::packets`] allowed is a debt: nothing may leave until it is paid.
    pub fn spend(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub(i128::from(bytes) * BYTE);
    }

    /// When the next packet of `packet_len_bytes` may leave: not after the moment of the last [`TokenBucket::packets`], or
    /// when the bucket will have filled so far.
    pub fn next(&self, packet_len_bytes: u32) -> Time {
        let lacking = cost(packet_len_bytes).min(self.burst) - self.tokens;
        if lacking <= 0 {
            return self.filled;
        }
        // Both are positive.
        let wait_ns = lacking
            .unsigned_abs()
            .div_ceil(u128::from(self.rate_bits_per_second));
        self.filled + Duration::from_nanos(u64::try_from(wait_ns).unwrap_or(u64::MAX))
    }
}

/// Billionths of a bit for a packet; a packet has at least one byte.
fn cost(packet_len_bytes: u32) -> i128 {
    i128::from(packet_len_bytes.max(1)) * BYTE
}

/// How a [`Backoff`] moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackoffShape {
    /// Packets on the way that are always allowed; at least 1.
    pub floor: u32,
    /// Packets on the way that are never exceeded; at least `floor`.
    pub ceiling: u32,
    /// Packets more after each round trip without a decrease (additive increase); at least 1.
    pub increase: u32,
    /// Eighths that are kept after losses (multiplicative decrease): 1 to 7. TCP (RFC 5681) keeps 4.
    pub kept_eighths: u32,
    /// What may be lost of a round trip's packets without counting, in percent: 0 to 99. TCP tolerates nothing, BBR 2
    /// (`BBR.LossThresh`, draft-ietf-ccwg-bbr).
    pub tolerated_percent: u32,
}

/// Why a [`BackoffShape`] is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a back-off needs 1 ≤ floor ≤ ceiling, an increase of at least 1, 1 to 7 eighths kept, and less than 100 % \
     tolerated"
)]
pub struct BackoffShapeError;

/// How many packets may be on the way to a receiver: fewer after losses, more while there are few.
///
/// Additive increase, multiplicative decrease (Chiu and Jain, 1989): flows that lose packets in the same queue move
/// towards equal shares. Begins at the ceiling: a path without losses never notices it. Losses of a few packets in a
/// hundred say nothing about a queue, which loses what is too much of each round trip, and more the next time; they are tolerated.
/// Where every round trip brings more, whatever the sender does, it settles near `increase · kept / (1 − kept)` or at the floor: 16
/// packets and 7/8 kept hold it near 112, and so random loss alone does not starve a flow.
///
/// ```
/// use core::time::Duration;
/// use lm_protocol::rate::{Backoff, BackoffShape};
/// use lm_protocol::time::Time;
///
/// let shape = BackoffShape { floor: 16, ceiling: 192, increase: 16, kept_eighths: 4, tolerated_percent: 2 };
/// let mut backoff = Backoff::new(shape)?;
/// let round_trip = Duration::from_micros(100);
/// assert!(!backoff.lost(3, Time::from_millis(1), round_trip), "3 of 192 are below 2 %");
/// assert!(backoff.lost(1, Time::from_millis(1), round_trip), "4 are not");
/// assert!(!backoff.lost(9, Time::from_millis(1), round_trip), "the same round trip");
/// assert_eq!(backoff.allowed(), 96);
/// backoff.confirmed(96);
/// assert_eq!(backoff.allowed(), 112);
/// # Ok::<(), lm_protocol::rate::BackoffShapeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Backoff {
    shape: BackoffShape,
    allowed: u32,
    /// Packets confirmed since the last step, below `allowed`.
    confirmed: u32,
    /// Packets lost since the last step.
    lost: u32,
    /// Losses before this moment belong to the last decrease.
    deaf_until: Time,
}

impl Backoff {
    /// Begins at the ceiling.
    ///
    /// # Errors
    ///
    /// [`BackoffShapeError`] when a field is out of the range that it states.
    pub fn new(shape: BackoffShape) -> Result<Backoff, BackoffShapeError> {
        let BackoffShape {
            floor,
            ceiling,
            increase,
            kept_eighths,
            tolerated_percent,
        } = shape;
        let is_movement = increase > 0 && (1..=7).contains(&kept_eighths);
        if floor == 0 || floor > ceiling || !is_movement || tolerated_percent > 99 {
            return Err(BackoffShapeError);
        }
        Ok(Backoff {
            shape,
            allowed: ceiling,
            confirmed: 0,
            lost: 0,
            deaf_until: Time::ZERO,
        })
    }

    /// Packets that may be on the way; from the floor to the ceiling.
    #[inline]
    pub fn allowed(&self) -> u32 {
        self.allowed
    }

    /// The receiver has `packets` more. As many as are allowed make a round trip, and each adds a step.
    #[inline]
    pub fn confirmed(&mut self, packets: u32) {
        if self.allowed == self.shape.ceiling && self.lost == 0 {
            return;
        }
        let mut confirmed = u64::from(self.confirmed) + u64::from(packets);
        while confirmed >= u64::from(self.allowed) {
            confirmed -= u64::from(self.allowed);
            self.lost = 0;
            self.allowed = self
                .allowed
                .saturating_add(self.shape.increase)
                .min(self.shape.ceiling);
            if self.allowed == self.shape.ceiling {
                confirmed = 0;
            }
        }
        self.confirmed = confirmed as u32; // below `allowed`
    }

    /// `packets` were lost, or are taken for lost. Tells whether that led to a decrease: not while no more than what is tolerated
    /// was lost in this round trip, and not within `round_trip` after a decrease, when losses are of packets that left before it.
    pub fn lost(&mut self, packets: u32, now: Time, round_trip: Duration) -> bool {
        if now < self.deaf_until {
            return false;
        }
        self.lost = self.lost.saturating_add(packets);
        let tolerated = u64::from(self.allowed) * u64::from(self.shape.tolerated_percent);
        if u64::from(self.lost) * 100 <= tolerated {
            return false;
        }
        self.deaf_until = now + round_trip;
        (self.confirmed, self.lost) = (0, 0);
        let kept = u64::from(self.allowed) * u64::from(self.shape.kept_eighths) / 8;
        self.allowed = (kept as u32).max(self.shape.floor); // less than `allowed`
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bits that the rate brings in this time, in billionths.
    fn brought(rate: u64, from: Time, to: Time) -> u128 {
        u128::from(rate) * to.since(from).as_nanos()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Whatever the schedule of looks and the lengths, no more leaves than rate · t + burst.
        #[test]
        fn a_bucket_never_exceeds_its_limit(
            rate in prop_oneof![1u64..1000, 1_000_000u64..400_000_000_000, Just(u64::MAX)],
            burst in 1u32..300,
            packet_len in 1u32..9000,
            start: u64,
            looks in prop::collection::vec(
                (prop_oneof![0u64..3, 0u64..100_000, 0u64..2_000_000_000_000], 1u32..9000, 0u32..400), 1..200,
            ),
        ) {
            let start = Time::from_nanos(start / 2);
            let rate_limit = NonZeroU64::new(rate).unwrap();
            let mut bucket = TokenBucket::new(rate_limit, burst, packet_len, start);
            let (mut now, mut sent) = (start, 0u128);
            let limit = |now| brought(rate, start, now) + u128::from(burst) * u128::from(packet_len) * BYTE as u128;
            for (after_ns, len, wanted) in looks {
                now += Duration::from_nanos(after_ns);
                let len = len.min(packet_len);
                let packets = bucket.packets(len, now);
                let taken = packets.min(wanted);
                bucket.spend(u64::from(taken) * u64::from(len));
                sent += u128::from(taken) * u128::from(len) * BYTE as u128;
                prop_assert!(sent <= limit(now), "{sent} > {}", limit(now));
                prop_assert_eq!(bucket.packets(len, now), packets - taken, "a second look gives nothing more");
            }
        }

        /// A sender that asks whenever something may go gets its rate, less one packet; also with a burst of one packet,
        /// at rates where a nanosecond is many bits, and after any number of steps.
        #[test]
        fn a_ready_sender_gets_its_rate(
            rate in prop_oneof![1_000u64..1_000_000, 1_000_000u64..400_000_000_000],
            burst in 1u32..5,
            packet_len in 60u32..9000,
            start in 0u64..1 << 60,
            steps in 1u32..3000,
            early in 0u64..1000,
        ) {
            let start = Time::from_nanos(start);
            let mut bucket = TokenBucket::new(NonZeroU64::new(rate).unwrap(), burst, packet_len, start);
            let (mut now, mut sent) = (start, 0u128);
            for step in 0..steps {
                let packets = bucket.packets(packet_len, now);
                if step > 0 {
                    prop_assert!(packets >= 1, "`next` promised a packet");
                }
                bucket.spend(u64::from(packets) * u64::from(packet_len));
                sent += u128::from(packets) * u128::from(packet_len) * BYTE as u128;
                let next = bucket.next(packet_len);
                prop_assert!(next > now);
                // A look before that finds nothing, and takes nothing away.
                let before = Time::from_nanos(next.as_nanos() - 1 - early.min(next.since(now).as_nanos() as u64 - 1));
                prop_assert_eq!(bucket.packets(packet_len, before), 0);
                let least = brought(rate, start, before).saturating_sub(u128::from(packet_len) * BYTE as u128);
                prop_assert!(sent >= least, "{sent} < {least}");
                now = next;
            }
        }

        /// Bounds hold under any sequence, few losses count for nothing and those of one round trip once, and without losses the
        /// ceiling is reached in the stated number of round trips.
        #[test]
        fn back_off_stays_in_its_bounds_and_recovers(
            floor in 1u32..100, above in 0u32..2000, increase in 1u32..100, kept_eighths in 1u32..=7,
            tolerated_percent in 0u32..100,
            events in prop::collection::vec((0u64..300, any::<bool>(), 0u32..2000), 0..100),
        ) {
            let shape = BackoffShape { floor, ceiling: floor + above, increase, kept_eighths, tolerated_percent };
            let mut backoff = Backoff::new(shape).unwrap();
            prop_assert_eq!(backoff.allowed(), shape.ceiling);
            let round_trip = Duration::from_micros(100);
            // The same, packet by packet.
            let (mut allowed, mut confirmed, mut lost) = (shape.ceiling, 0, 0);
            let (mut now, mut counted) = (Time::from_millis(1), None::<Time>);
            for (after_us, is_loss, packets) in events {
                now += Duration::from_micros(after_us);
                if is_loss {
                    let hears = counted.is_none_or(|at| now.since(at) >= round_trip);
                    // Few losses are as likely as many.
                    let packets = packets >> (packets % 12);
                    lost += if hears { packets } else { 0 };
                    let counts = hears && lost * 100 > allowed * tolerated_percent;
                    if counts {
                        (allowed, confirmed, lost) = ((allowed * kept_eighths / 8).max(floor), 0, 0);
                        counted = Some(now);
                    }
                    prop_assert_eq!(backoff.lost(packets, now, round_trip), counts);
                } else {
                    for _ in 0..packets {
                        if allowed == shape.ceiling && lost == 0 {
                            break;
                        }
                        confirmed += 1;
                        if confirmed == allowed {
                            (allowed, confirmed, lost) = ((allowed + increase).min(shape.ceiling), 0, 0);
                        }
                    }
                    backoff.confirmed(packets);
                }
                prop_assert_eq!(backoff.allowed(), allowed);
                prop_assert!((shape.floor..=shape.ceiling).contains(&allowed));
            }
            // Nothing but loss leads to the floor.
            for _ in 0..200 {
                now += round_trip;
                prop_assert!(backoff.lost(shape.ceiling, now, round_trip));
            }
            prop_assert_eq!(backoff.allowed(), floor);
            let mut round_trips = 0;
            while backoff.allowed() < shape.ceiling {
                backoff.confirmed(backoff.allowed());
                round_trips += 1;
            }
            prop_assert_eq!(round_trips, (shape.ceiling - floor).div_ceil(increase));
        }
    }

    #[test]
    fn a_packet_longer_than_the_burst_leaves_when_the_bucket_is_full() {
        let mut bucket = TokenBucket::new(NonZeroU64::new(8_000).unwrap(), 1, 1000, Time::ZERO);
        assert_eq!(bucket.packets(3000, Time::ZERO), 1);
        bucket.spend(3000);
        // 2000 bytes of debt and a bucket of 1000, at 1000 bytes a second.
        assert_eq!(bucket.packets(1, Time::from_millis(2_000)), 0);
        assert_eq!(bucket.next(3000), Time::from_millis(3_000));
        assert_eq!(bucket.packets(3000, Time::from_millis(3_000)), 1);
        assert_eq!(bucket.packets(1000, Time::from_millis(3_000)), 1);
        // Time that goes back changes nothing.
        assert_eq!(bucket.packets(1000, Time::from_millis(1)), 1);
    }

    #[test]
    fn extremes_do_not_overflow() {
        let limit = NonZeroU64::MAX;
        let mut bucket = TokenBucket::new(limit, u32::MAX, u32::MAX, Time::ZERO);
        assert_eq!(bucket.packets(u32::MAX, Time::MAX), u32::MAX);
        assert_eq!(bucket.packets(0, Time::MAX), u32::MAX);
        for _ in 0..3 {
            bucket.spend(u64::MAX);
        }
        assert_eq!(bucket.packets(1, Time::MAX), 0);
        assert_eq!(bucket.next(u32::MAX), Time::MAX);
        let mut slow = TokenBucket::new(NonZeroU64::MIN, 0, 0, Time::ZERO);
        slow.spend(u64::MAX);
        assert_eq!(slow.next(1), Time::MAX);
    }

    /// The settled state that the documentation promises: a loss in each round trip, and whole round trips confirmed.
    #[test]
    fn constant_loss_settles_between_floor_and_ceiling() {
        let shape = BackoffShape {
            floor: 16,
            ceiling: 384,
            increase: 16,
            kept_eighths: 7,
            tolerated_percent: 0,
        };
        let mut backoff = Backoff::new(shape).unwrap();
        let round_trip = Duration::from_micros(100);
        let mut now = Time::from_millis(1);
        for _ in 0..200 {
            backoff.confirmed(backoff.allowed());
            now += round_trip;
            assert!(backoff.lost(1, now, round_trip));
        }
        assert!((105..=115).contains(&backoff.allowed()), "{}", backoff.allowed());
    }

    #[test]
    fn shapes_that_are_none() {
        let good = BackoffShape {
            floor: 1,
            ceiling: 1,
            increase: 1,
            kept_eighths: 1,
            tolerated_percent: 99,
        };
        assert!(Backoff::new(good).is_ok());
        for bad in [
            BackoffShape { floor: 0, ..good },
            BackoffShape { floor: 2, ..good },
            BackoffShape { increase: 0, ..good },
            BackoffShape {
                kept_eighths: 0,
                ..good
            },
            BackoffShape {
                kept_eighths: 8,
                ..good
            },
            BackoffShape {
                tolerated_percent: 100,
                ..good
            },
        ] {
            assert_eq!(Backoff::new(bad).unwrap_err(), BackoffShapeError);
        }
    }
}
