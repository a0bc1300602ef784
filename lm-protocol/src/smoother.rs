//! The real-time traffic smoother (SS-RTUDP §3.2.2): how many packets that are not real-time may leave a host now.
//!
//! A switch drops what its port cannot hold, real-time packets as readily as others. So each host holds back its *others*: packets that are
//! neither real-time nor control. They need a credit each from a leaky bucket. Real-time and control packets never wait, and use up credits all
//! the same. How fast credits come is one of two laws:
//!
//! | | `paper` | `paced` |
//! |---|---|---|
//! | credits come | CBD at once, each RP | one by one, at λ = CBD/RP; at most 2, or what 100 µs bring, are kept |
//! | signal | loss | loss, or delay of real-time packets above a limit |
//! | signalled | RP doubles at the next refresh | λ falls by 10 % at once, at most once in RP0 |
//! | not signalled | RP falls by ΔRP at a refresh | λ rises by λ0/200 at a refresh, each RP0, if others waited |
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
//! The state has three parts, so that the credits can lie in memory that processes share: [`Rate`] is written by one and read by all,
//! [`Credits`] are plain words that whoever looks moves on, and the rest, which hears signals, is its owner's alone.

use crate::time::Time;
use core::fmt;
use core::num::{NonZeroU32, NonZeroU64};
use core::time::Duration;

/// Credits are counted in billionths, which is what a nanosecond brings at one credit a second: nothing is ever rounded.
const CREDIT: i64 = 1_000_000_000;

/// Preamble, check sequence and gap: what a frame takes on the wire beside its bytes.
const WIRE_OVERHEAD_BYTES: u64 = 24;

/// Shortest refresh period: what `epoll_wait` counts in. A faster link has a deeper bucket, not a shorter period.
pub const TIMER_GRAIN: Duration = Duration::from_millis(1);

/// Time whose credits `paced` keeps, if they are more than [`PACED_BURST_CREDITS`]: what a network card takes at once anyway.
const PACED_BURST: Duration = Duration::from_micros(100);
const PACED_BURST_CREDITS: i64 = 2;

/// Percent of its link that `paced` never exceeds.
const LINK_PERCENT: u64 = 97;

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

/// What a [`Smoother`] is made of. [`Parameters::of_link`] has table 3's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// How credits come.
    pub law: Law,
    /// CBD: credits of a refresh, and most that `paper` keeps.
    pub bucket_depth: u32,
    /// RP0: refresh period at the beginning; at `paced` of all refreshes.
    pub refresh_period: Duration,
    /// RPmin: refresh period of the highest rate.
    pub refresh_period_min: Duration,
    /// RPmax: refresh period of the lowest rate.
    pub refresh_period_max: Duration,
    /// ΔRP: what a refresh without a signal takes off `paper`'s refresh period.
    pub refresh_period_step: Duration,
    /// Z: share of packets that may be lost without a signal; 0: none.
    pub loss_tolerance: f64,
    /// Frames of full length that the link carries in a second.
    pub link_frames_per_second: NonZeroU32,
}

impl Parameters {
    /// Table 3's, for 100 Mbit/s, with a bucket that grows with the link's rate.
    ///
    /// `frame_len_bytes`: longest frame, from its Ethernet header on: 1514 at MTU 1500.
    pub fn of_link(link_bits_per_second: NonZeroU64, frame_len_bytes: u16) -> Parameters {
        let rate = link_bits_per_second.get();
        let frame_bits = (u64::from(frame_len_bytes) + WIRE_OVERHEAD_BYTES) * 8;
        let positive = |value: u64| {
            u32::try_from(value).ok().map_or(NonZeroU32::MAX, |value| {
                NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN)
            })
        };
        Parameters {
            law: Law::default(),
            bucket_depth: positive(rate / 2_500_000).get(), // 40 at 100 Mbit/s
            refresh_period: Duration::from_millis(10),
            refresh_period_min: Duration::from_millis(5),
            refresh_period_max: Duration::from_millis(100),
            refresh_period_step: Duration::from_millis(2),
            loss_tolerance: 0.0,
            link_frames_per_second: positive(rate / frame_bits),
        }
    }

    fn check(&self) -> Result<(), ParametersError> {
        let rules = [
            (self.bucket_depth == 0, ParametersError::NoCredits),
            (self.refresh_period_step.is_zero(), ParametersError::NoStep),
            (self.refresh_period_min < TIMER_GRAIN, ParametersError::BelowTimer),
            (
                self.refresh_period_min > self.refresh_period,
                ParametersError::BelowMin,
            ),
            (
                self.refresh_period > self.refresh_period_max,
                ParametersError::AboveMax,
            ),
            (
                !(0.0..=1.0).contains(&self.loss_tolerance),
                ParametersError::NoShare,
            ),
        ];
        rules
            .into_iter()
            .find(|(broken, _)| *broken)
            .map_or(Ok(()), |(_, error)| Err(error))
    }

    /// λ at a refresh period, in whole credits a second.
    fn credits_per_second(&self, refresh_period: Duration) -> u32 {
        let per_second = u128::from(self.bucket_depth) * 1_000_000_000 / refresh_period.as_nanos();
        u32::try_from(per_second).unwrap_or(u32::MAX).max(1)
    }

    /// λmin and λmax of `paced`.
    fn paced_bounds(&self) -> (u32, u32) {
        let of_link = u64::from(self.link_frames_per_second.get()) * LINK_PERCENT / 100;
        let of_link = (of_link as u32).max(1); // less than what it is a part of
        let most = self.credits_per_second(self.refresh_period_min).min(of_link);
        (self.credits_per_second(self.refresh_period_max).min(most), most)
    }
}

/// A rule that [`Parameters`] break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParametersError {
    /// CBD is 0.
    NoCredits,
    /// ΔRP is 0.
    NoStep,
    /// RPmin is below [`TIMER_GRAIN`].
    BelowTimer,
    /// RPmin is above RP0.
    BelowMin,
    /// RP0 is above RPmax.
    AboveMax,
    /// Z is no share.
    NoShare,
}

impl fmt::Display for ParametersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ParametersError::NoCredits => "CBD is 0: a refresh has to bring at least one credit",
            ParametersError::NoStep => "ΔRP is 0: the refresh period would never fall again after a loss",
            ParametersError::BelowTimer => {
                "RPmin is below 1 ms, a timer's grain: for a higher rate choose a higher CBD"
            }
            ParametersError::BelowMin => "RPmin is above RP0: choose RPmin ≤ RP0 ≤ RPmax",
            ParametersError::AboveMax => "RP0 is above RPmax: choose RPmin ≤ RP0 ≤ RPmax",
            ParametersError::NoShare => "Z is the share of packets that may be lost: choose 0 (none) to 1",
        })
    }
}

impl core::error::Error for ParametersError {}

/// How fast credits come. The owner of a [`Smoother`] changes it; whoever takes credits reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    law: Law,
    /// CBD.
    depth: i64,
    /// λ; at `paper` the mean.
    credits_per_second: u32,
    /// Of these, what leaves elsewhere and takes no credits.
    elsewhere_per_second: u32,
    /// Until the refresh after the next one.
    refresh_period: Duration,
}

impl Rate {
    fn new(parameters: &Parameters) -> Rate {
        let of_period = parameters.credits_per_second(parameters.refresh_period);
        let (least, most) = parameters.paced_bounds();
        Rate {
            law: parameters.law,
            depth: i64::from(parameters.bucket_depth) * CREDIT,
            credits_per_second: match parameters.law {
                Law::Paper => of_period,
                Law::Paced => of_period.clamp(least, most),
            },
            elsewhere_per_second: 0,
            refresh_period: parameters.refresh_period,
        }
    }

    /// What is left of λ here, positive.
    #[inline]
    fn here_per_second(&self) -> u32 {
        let left = self.credits_per_second.saturating_sub(self.elsewhere_per_second);
        left.max(1)
    }

    /// λ: credits, and so packets, in a second.
    #[inline]
    pub fn credits_per_second(&self) -> u32 {
        self.credits_per_second
    }

    /// RP = CBD/λ (equation 2).
    pub fn refresh_period(&self) -> Duration {
        match self.law {
            Law::Paper => self.refresh_period,
            Law::Paced => Duration::from_nanos(self.depth as u64 / u64::from(self.credits_per_second)), // positive
        }
    }

    /// Most that `paced` keeps, in billionths.
    fn burst(&self) -> i64 {
        let of_time = i64::from(self.credits_per_second) * PACED_BURST.as_nanos() as i64; // below 2^49
        of_time.max(PACED_BURST_CREDITS * CREDIT)
    }
}

/// Credits that there are.
///
/// Plain words, so that they can be atomics of a page that processes share. Time is claimed by moving `filled` or `next_refresh`, and whoever
/// moved one adds what it brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    /// Credits in billionths; negative: real-time packets used up more than there were.
    billionths: i64,
    /// Up to when `paced` has brought credits.
    filled: Time,
    next_refresh: Time,
    /// Others that left since the last refresh, without the one that a forgiven debt let go.
    others: i64,
    /// Packets that took a credit, of all kinds.
    sent: u64,
    /// Others waited since the last refresh.
    is_wanted: bool,
}

impl Credits {
    fn new(rate: &Rate, now: Time) -> Credits {
        let billionths = match rate.law {
            Law::Paper => rate.depth,
            Law::Paced => rate.burst(),
        };
        Credits {
            billionths,
            filled: now,
            next_refresh: now + rate.refresh_period,
            others: 0,
            sent: 0,
            is_wanted: false,
        }
    }

    /// Credits that came one by one.
    #[inline]
    fn fill(&mut self, rate: &Rate, now: Time) {
        if rate.law == Law::Paper || now <= self.filled {
            return;
        }
        let elapsed_ns = now.as_nanos() - self.filled.as_nanos();
        let brought = elapsed_ns.saturating_mul(u64::from(rate.here_per_second()));
        let brought = i64::try_from(brought).unwrap_or(i64::MAX);
        self.billionths = self.billionths.saturating_add(brought).min(rate.burst());
        self.filled = now;
    }

    /// The refresh that was due. Returns the debt that it forgives, in billionths.
    fn refresh(&mut self, rate: &Rate, now: Time) -> i64 {
        if rate.law == Law::Paper {
            let here = i128::from(rate.depth) * i128::from(rate.here_per_second());
            let brought = (here / i128::from(rate.credits_per_second.max(1))) as i64; // at most CBD
            self.billionths = rate.depth.min(self.billionths.saturating_add(brought));
        }
        self.next_refresh += rate.refresh_period;
        if self.next_refresh <= now {
            self.next_refresh = now + rate.refresh_period;
        }
        // Others that had a packet wait for the next credit like any; at `paper` they never had less than a refresh brings.
        let starved = self.others <= 0 || rate.law == Law::Paper;
        let forgiven = if starved {
            (CREDIT - self.billionths).max(0)
        } else {
            0
        };
        self.billionths += forgiven;
        self.others = if forgiven > 0 { -1 } else { 0 };
        self.is_wanted = false;
        forgiven
    }

    /// Of `packets` others, how many may leave: a credit each is taken.
    #[inline]
    fn take(&mut self, packets: u32) -> u32 {
        let whole = (self.billionths / CREDIT).clamp(0, i64::from(packets));
        self.billionths -= whole * CREDIT;
        self.others += whole;
        self.sent += whole as u64; // not negative
        self.is_wanted |= whole < i64::from(packets);
        whole as u32 // at most `packets`
    }

    /// Real-time and control packets take a credit each. Returns the debt below the floor, which is forgiven, in billionths.
    #[inline]
    fn spend(&mut self, rate: &Rate, packets: u32) -> i64 {
        let wanted = self.billionths.saturating_sub(i64::from(packets) * CREDIT);
        self.billionths = wanted.max(-rate.depth);
        self.sent += u64::from(packets);
        self.billionths - wanted
    }

    fn give_back(&mut self, packets: u32) {
        self.billionths = self.billionths.saturating_add(i64::from(packets) * CREDIT);
        self.others -= i64::from(packets);
        self.sent = self.sent.saturating_sub(u64::from(packets));
    }

    /// When another may leave that may not now: if no real-time packet comes first.
    fn next(&self, rate: &Rate) -> Option<Time> {
        let lacking = CREDIT - self.billionths;
        if lacking <= 0 {
            return None;
        }
        if rate.law == Law::Paper {
            return Some(self.next_refresh);
        }
        let wait_ns = (lacking as u64).div_ceil(u64::from(rate.here_per_second())); // positive
        let next = self.filled + Duration::from_nanos(wait_ns);
        Some(if self.others <= 0 {
            next.min(self.next_refresh)
        } else {
            next
        })
    }
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
#[derive(Clone, Debug)]
pub struct Smoother {
    parameters: Parameters,
    rate: Rate,
    credits: Credits,
    /// Losses that are no signal yet, in billionths of a packet, and packets that had left when that was counted.
    tolerated: i64,
    tolerated_at: u64,
    /// A signal came since the last refresh; at `paced`, one that counted.
    is_signalled: bool,
    /// Before this moment a signal is about what left before the last one.
    deaf_until: Time,
    /// Delay of real-time packets that is no signal.
    delay_limit: Duration,
    forgiven: u128,
}

impl Smoother {
    /// With a full bucket, and at RP0.
    ///
    /// # Errors
    ///
    /// The rule that the parameters break.
    pub fn new(parameters: Parameters, now: Time) -> Result<Smoother, ParametersError> {
        parameters.check()?;
        let rate = Rate::new(&parameters);
        let mut smoother = Smoother {
            parameters,
            rate,
            credits: Credits::new(&rate, now),
            tolerated: 0,
            tolerated_at: 0,
            is_signalled: false,
            deaf_until: Time::ZERO,
            delay_limit: Duration::ZERO,
            forgiven: 0,
        };
        smoother.set_deadline(None);
        Ok(smoother)
    }

    /// The tightest deadline of real-time packets that leave here: `paced` takes half of it for a signal, and four frame times at least.
    ///
    /// A port whose whole buffer delays less than the limit is known by its losses alone. (500 Mbit/s, 32 frames, a deadline of 2 ms: 0.2 to 2 %
    /// of real-time packets lost in simulation, 0.01 % with no deadline.)
    pub fn set_deadline(&mut self, tightest: Option<Duration>) {
        let frames = Duration::from_secs(1) * DELAY_FRAMES / self.parameters.link_frames_per_second.get();
        self.delay_limit = tightest.map_or(frames, |deadline| frames.max(deadline / 2));
    }

    /// Of `packets` that are neither real-time nor control and would leave now, how many may. Takes their credits.
    #[inline]
    pub fn take(&mut self, packets: u32, now: Time) -> u32 {
        self.advance(now);
        self.credits.take(packets)
    }

    /// Real-time or control packets leave, whatever credits there are.
    #[inline]
    pub fn spend(&mut self, packets: u32, now: Time) {
        self.advance(now);
        let forgiven = self.credits.spend(&self.rate, packets);
        self.forgiven += forgiven as u128; // not negative
    }

    /// Packets that [`Smoother::take`] had allowed did not leave.
    pub fn give_back(&mut self, packets: u32) {
        self.credits.give_back(packets);
    }

    /// Packets were lost on their way, of whatever class. What the host itself dropped is no loss: that is what smoothing does.
    pub fn lost(&mut self, packets: u32, now: Time) {
        self.advance(now);
        self.tolerated = self.tolerance() - i64::from(packets) * CREDIT;
        self.tolerated_at = self.credits.sent;
        if self.tolerated < 0 {
            self.tolerated = 0;
            self.signalled(now);
        }
    }

    /// A real-time packet was on its way for so much longer than the fastest one of its flow: what it waited for. (Its whole time has a frame
    /// time for each link; with four as the limit, two frames at a port would be a signal.)
    pub fn delayed(&mut self, delay: Duration, now: Time) {
        if self.rate.law == Law::Paced && delay > self.delay_limit {
            self.advance(now);
            self.signalled(now);
        }
    }

    /// Others wait that do not [take](Smoother::take) credits: the kernel's, in a class that has what LM leaves of the rate.
    ///
    /// `paced` does not raise a rate that nobody waits for: it would know nothing of the port when all of it is used at once.
    pub fn others_wait(&mut self) {
        self.credits.is_wanted = true;
    }

    /// So many packets a second leave elsewhere, which do not [take](Smoother::take) credits: the rest of λ is for those that do.
    pub fn set_elsewhere(&mut self, packets_per_second: u32, now: Time) {
        self.advance(now);
        self.rate.elsewhere_per_second = packets_per_second;
    }

    /// Makes the refresh that is due, and lets credits come. All that is told the time does that; a timer has to where nothing leaves.
    #[inline]
    pub fn advance(&mut self, now: Time) {
        self.credits.fill(&self.rate, now);
        if now >= self.credits.next_refresh {
            self.refresh(now);
        }
    }

    /// When another may leave; `None` if it might have at the last look.
    pub fn next(&self) -> Option<Time> {
        self.credits.next(&self.rate)
    }

    /// When the next refresh is due.
    pub fn next_refresh(&self) -> Time {
        self.credits.next_refresh
    }

    /// How fast credits come.
    #[inline]
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Credits that real-time and control packets used up and nobody waited for.
    pub fn forgiven_credits(&self) -> u64 {
        u64::try_from(self.forgiven / CREDIT as u128).unwrap_or(u64::MAX)
    }

    fn refresh(&mut self, now: Time) {
        let Parameters {
            refresh_period_min: least,
            refresh_period_max: most,
            refresh_period_step: step,
            ..
        } = self.parameters;
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
            Law::Paced if self.credits.is_wanted && !self.is_signalled => {
                let initial = self.parameters.credits_per_second(self.parameters.refresh_period);
                let raised = rate
                    .credits_per_second
                    .saturating_add((initial / PACED_STEPS).max(1));
                rate.credits_per_second = raised.min(self.parameters.paced_bounds().1);
            }
            Law::Paced => {}
        }
        self.is_signalled = false;
        let forgiven = self.credits.refresh(&self.rate, now);
        self.forgiven += forgiven as u128; // not negative
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
        }
        self.is_signalled = true;
    }

    /// Losses that are no signal now: of 1/Z packets that leave one. The tolerance of CBD packets is kept, and one loss at least.
    fn tolerance(&self) -> i64 {
        let share = (self.parameters.loss_tolerance * CREDIT as f64) as i64; // at most one packet
        let sent = self.credits.sent.saturating_sub(self.tolerated_at);
        let brought = share.saturating_mul(i64::try_from(sent).unwrap_or(i64::MAX));
        let most = CREDIT.max(share.saturating_mul(i64::from(self.parameters.bucket_depth)));
        self.tolerated.saturating_add(brought).min(most)
    }
}
