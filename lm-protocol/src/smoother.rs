//! The real-time traffic smoother (SS-RTUDP §3.2.2): how many packets that are not real-time may leave a host now.
//!
//! A switch drops what its port cannot hold, real-time packets as readily as others. So each host holds back its *others*: packets that are
//! neither real-time nor control. They need a credit each from a leaky bucket. Real-time and control packets never wait, and use up credits all
//! the same. How fast credits come is one of two laws:
//!
//! | | `paper` | `paced` |
//! |---|---|---|
//! | credits come | CBD at once, each RP | one by one, at λ = CBD/RP; at most 2, or what 100 µs bring, are kept |
//! | signal | loss | loss, or delay of real-time packets above a limit, of all for 5 ms |
//! | signalled | RP doubles at the next refresh | λ falls by 10 % at once, at most once in RP0 |
//! | not signalled | RP falls by ΔRP at a refresh | λ rises by λ0/200 at a refresh, each RP0, if others waited; behind refreshes in which none did it is lower by that for each, down to λ0/2 |
//!
//! `paper` learns by losing, and what is lost is as often real-time as not. `paced` sees the queue of a port that others fill, before it is full.
//!
//! Figure 5 is mended where it cannot be meant as printed:
//!
//! - §3.2.2, figure 5: `send-back-to-queue()` lacks its `else`. A packet without a credit waits, others do not.
//! - Figure 5: `CNS ≥ 0` lets a packet go on no credit. "If there is at least one credit" (§3.2.2) holds: `CNS > 0`.
//! - Figure 5: `RP = RP0` stands where it runs each time. It is "the initialization value" (§3.2.2).
//! - Figure 5: RP is adapted at each packet, and would be RPmax after four. It is adapted at refreshes, about "the latest RP region".
//! - Figure 5: `CurrentTime == NextRefreshTime` misses a moment between two looks: `≥`.
//! - Figure 5: `NextRefreshTime = CurrentTime + RP` drifts by each delay of a look: the next refresh is RP after this one was due. After a
//!   pause there is one refresh, and the next is RP after it.
//! - §3.2.2: `RPmin ≤ RP ≤ Pmax` means RPmax, and RP0 is not "also the average value" of RP.
//! - Figure 5: CNS has no floor, so that real-time packets above the rate would stop all others for ever. It never falls below −CBD, and a
//!   refresh after which others would still have nothing leaves one credit. What is forgiven that way is counted.
//! - Equation 1: Z stands in no rule. Here one loss in 1/Z packets is no signal.
//! - Table 3's 8000 packets/s (CBD/RPmin) are nearly all that 100 Mbit/s carry. `paced` stays below 0.97 of its link, so that the queue of its
//!   own link stands in the host.
//!
//! [`Credits`] are atomic words, so that processes which send on one interface can have them in a page that they share: whoever looks brings what
//! is due, and a refresh is made by whoever comes first. A [`Smoother`] hears of losses and delays, and it alone changes the rate.

mod credits;
mod parameters;

use crate::time::Time;
use alloc::boxed::Box;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use credits::{CREDIT, WANTED_AT_REFRESH};
pub use credits::{Credits, Departures, Rate};
pub use parameters::{Parameters, ParametersError, TIMER_GRAIN};

/// Refreshes of `paced` in which λ rises by λ0: 20 packets/s each, at 100 Mbit/s.
const PACED_STEPS: u32 = 200;

/// Part of λ that a signal costs: 1/10.
const PACED_CUT: u32 = 10;

/// Frame times of the link that real-time packets may wait, whatever their deadlines: a frame ahead at each of two hops is no queue.
const DELAY_FRAMES: u32 = 4;

/// How credits come, and what a signal does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Law {
    /// Figure 5, mended.
    Paper,
    /// Credits one by one, and delay as a signal beside loss.
    #[default]
    Paced,
}

/// Holds back what is neither real-time nor control.
///
/// ```
/// use core::num::NonZeroU64;
/// use core::time::Duration;
/// use lm_protocol::smoother::{Parameters, Smoother};
/// use lm_protocol::time::Time;
///
/// // 100 Mbit/s in frames of 1514 bytes: 4000 credits a second, one each 250 µs, and two at once.
/// let parameters = Parameters::of_link(NonZeroU64::new(100_000_000).unwrap(), 1514);
/// let mut smoother = Smoother::new(parameters, Time::ZERO)?;
/// assert_eq!(smoother.take(9, Time::ZERO), 2);
/// assert_eq!(smoother.next(), Some(Time::from_nanos(250_000)));
/// // A real-time packet does not wait, and another waits for longer.
/// smoother.spend(1, Time::ZERO);
/// assert_eq!(smoother.next(), Some(Time::from_nanos(500_000)));
/// // It was lost: a tenth less from now on.
/// smoother.lost(1, Time::from_millis(1));
/// assert_eq!(smoother.rate().credits_per_second(), 3600);
/// # Ok::<(), lm_protocol::smoother::ParametersError>(())
/// ```
#[derive(Debug)]
pub struct Smoother<C = Box<Credits>> {
    parameters: Parameters,
    rate: Rate,
    credits: C,
    /// When the rate is looked at next: at each refresh. The credits are told, and never asked: others may write there.
    next_look: Time,
    /// Losses that are no signal yet, in billionths of a packet, and packets that had left when that was counted.
    tolerated: i64,
    tolerated_at: u64,
    /// A signal came since the last refresh; at `paced`, one that counted.
    is_signalled: bool,
    signals: u64,
    /// Refreshes, up to now, in which no others waited.
    unwanted: u32,
    /// Before this moment a signal is about what left before the last one.
    deaf_until: Time,
    /// Delay of real-time packets that is no signal.
    delay_limit: Duration,
}

impl Smoother {
    /// With a full bucket, and at RP0.
    ///
    /// # Errors
    ///
    /// The rule that the parameters break.
    pub fn new(parameters: Parameters, now: Time) -> Result<Smoother, ParametersError> {
        Smoother::over(Box::default(), parameters, now)
    }
}

impl<C: AsRef<Credits>> Smoother<C> {
    /// The owner of credits that others take as well. The rate of an owner before, of the same law and depth, stays where it is allowed.
    ///
    /// # Errors
    ///
    /// The rule that the parameters break.
    pub fn over(credits: C, parameters: Parameters, now: Time) -> Result<Smoother<C>, ParametersError> {
        parameters.check()?;
        let (before, mut rate) = (credits.as_ref().rate(), Rate::new(&parameters));
        if (before.law, before.depth) == (rate.law, rate.depth) {
            let (least, most) = parameters.paced_bounds();
            let periods = (parameters.refresh_period_min, parameters.refresh_period_max);
            match rate.law {
                Law::Paper => {
                    rate.refresh_period = before.refresh_period.clamp(periods.0, periods.1);
                    rate.credits_per_second = parameters.credits_per_second(rate.refresh_period);
                }
                Law::Paced => rate.credits_per_second = before.credits_per_second.clamp(least, most),
            }
        } else {
            credits.as_ref().begin(&rate, now);
        }
        let (link_frames, next_look) = (parameters.link_frames_per_second, now + rate.refresh_period);
        credits.as_ref().mend(&rate, link_frames, now);
        { &credits.as_ref().next_refresh_ns }.store(next_look.as_nanos(), Relaxed);
        Ok(Smoother {
            parameters,
            rate,
            next_look,
            tolerated: 0,
            tolerated_at: credits.as_ref().sent.load(Relaxed),
            is_signalled: false,
            signals: 0,
            unwanted: 0,
            deaf_until: Time::ZERO,
            delay_limit: Duration::from_secs(1) * DELAY_FRAMES / link_frames.get(),
            credits,
        })
    }

    /// The credits that it gives.
    pub fn credits(&self) -> &Credits {
        self.credits.as_ref()
    }

    /// [`Credits::take`].
    #[inline]
    pub fn take(&mut self, packets: u32, now: Time) -> u32 {
        self.advance(now);
        self.credits().take(packets, now)
    }

    /// [`Credits::spend`].
    #[inline]
    pub fn spend(&mut self, packets: u32, now: Time) {
        self.advance(now);
        self.credits().spend(packets, now);
    }

    /// Packets were lost on their way, of whatever class. What the host itself dropped is no loss: that is what smoothing does.
    pub fn lost(&mut self, packets: u32, now: Time) {
        self.advance(now);
        self.tolerated = self.tolerance() - i64::from(packets) * CREDIT;
        self.tolerated_at = self.credits().sent.load(Relaxed);
        if self.tolerated < 0 {
            self.tolerated = 0;
            self.signalled(now);
        }
    }

    /// Each real-time packet of a [report](crate::wire::lm::RtReport) was on its way for so much longer than the fastest one of its flow: what it
    /// waited for. (Its whole time has a frame time for each link; with four as the limit, two frames at a port would be a signal. One that
    /// waited alone is none: a host is held up for a moment, a queue stands.)
    pub fn delayed(&mut self, delay: Duration, now: Time) {
        if self.rate.law == Law::Paced && delay > self.delay_limit {
            self.advance(now);
            self.signalled(now);
        }
    }

    /// Hears of what those told who share the credits ([`Credits::tell_lost`], [`Credits::tell_delayed`]), and lets time pass.
    pub fn look(&mut self, now: Time) {
        let (lost, delay_max_ns) = {
            let credits = self.credits();
            credits.mend(&self.rate, self.parameters.link_frames_per_second, now);
            (
                credits.lost.swap(0, Relaxed),
                credits.delay_max_ns.swap(0, Relaxed),
            )
        };
        if lost > 0 {
            self.lost(u32::try_from(lost).unwrap_or(u32::MAX), now);
        }
        self.delayed(Duration::from_nanos(delay_max_ns), now);
        self.advance(now);
    }

    /// So many packets a second leave elsewhere, which do not [take](Credits::take) credits: the rest of λ is for those that do.
    pub fn set_elsewhere(&mut self, packets_per_second: u32, now: Time) {
        self.advance(now);
        self.rate.elsewhere_per_second = packets_per_second;
        self.credits().set_rate(&self.rate);
    }

    /// Makes the refresh that is due, and lets credits come. All that is told the time does that; a timer has to where nothing leaves.
    #[inline]
    pub fn advance(&mut self, now: Time) {
        self.credits().fill(&self.rate, now);
        if now >= self.next_look {
            self.adapt();
            let period = self.rate.refresh_period;
            self.next_look = match self.next_look + period {
                next if next > now => next,
                _ => now + period,
            };
            self.credits().refresh_by_owner(&self.rate, now, self.next_look);
        }
    }

    /// [`Credits::next`].
    pub fn next(&self) -> Option<Time> {
        self.credits().next()
    }

    /// When the next refresh is due.
    pub fn next_refresh(&self) -> Time {
        self.next_look
    }

    /// How fast credits come.
    #[inline]
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Signals so far.
    pub fn signals(&self) -> u64 {
        self.signals
    }

    /// The rate from this refresh on.
    fn adapt(&mut self) {
        let Parameters {
            refresh_period_min: least,
            refresh_period_max: most,
            refresh_period_step: step,
            ..
        } = self.parameters;
        let is_wanted = self.credits().wanted.fetch_and(!WANTED_AT_REFRESH, Relaxed) & WANTED_AT_REFRESH != 0;
        let rate = &mut self.rate;
        match rate.law {
            Law::Paper => {
                let period = rate.refresh_period;
                rate.refresh_period = match self.is_signalled {
                    true => period.saturating_mul(2).min(most),
                    false => period.saturating_sub(step).max(least),
                };
                rate.credits_per_second = self.parameters.credits_per_second(rate.refresh_period);
            }
            Law::Paced if !is_wanted => self.unwanted = self.unwanted.saturating_add(1),
            Law::Paced => {
                let initial = self.parameters.credits_per_second(self.parameters.refresh_period);
                let (step, lambda) = ((initial / PACED_STEPS).max(1), rate.credits_per_second);
                rate.credits_per_second = match core::mem::take(&mut self.unwanted) {
                    _ if self.is_signalled => lambda,
                    0 => lambda.saturating_add(step).min(self.parameters.paced_bounds().1),
                    // Others may have taken meanwhile what was not used.
                    pause => lambda
                        .saturating_sub(step.saturating_mul(pause))
                        .max(lambda.min(initial / 2)),
                };
            }
        }
        self.is_signalled = false;
        self.credits().set_rate(&self.rate);
    }

    fn signalled(&mut self, now: Time) {
        if self.rate.law == Law::Paced {
            if now < self.deaf_until {
                return;
            }
            self.deaf_until = now + self.parameters.refresh_period;
            let lambda = self.rate.credits_per_second;
            self.rate.credits_per_second =
                (lambda - lambda.div_ceil(PACED_CUT)).max(self.parameters.paced_bounds().0);
            self.credits().set_rate(&self.rate);
        }
        self.is_signalled = true;
        self.signals += 1;
    }

    /// Losses that are no signal now: of 1/Z packets that leave one. The tolerance of CBD packets is kept, and one loss at least.
    fn tolerance(&self) -> i64 {
        let share = (self.parameters.loss_tolerance * CREDIT as f64) as i64; // at most one packet
        // Modulo 2^64: where others write, it may have been anything.
        let sent = self.credits().sent.load(Relaxed).wrapping_sub(self.tolerated_at);
        let brought = share.saturating_mul(i64::try_from(sent).unwrap_or(i64::MAX));
        let most = CREDIT.max(share.saturating_mul(i64::from(self.parameters.bucket_depth)));
        self.tolerated.saturating_add(brought).min(most)
    }
}

#[cfg(test)]
mod tests;
