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
//! [`Credits`] are atomic words, so that processes which send on one interface can have them in a page that they share: whoever looks brings what
//! is due, and a refresh is made by whoever comes first. A [`Smoother`] hears of losses and delays, and it alone changes the rate.

use crate::time::Time;
use alloc::boxed::Box;
use core::fmt;
use core::num::{NonZeroU32, NonZeroU64};
use core::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
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

/// How fast credits come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    law: Law,
    /// CBD, in billionths.
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
            Law::Paced => {
                let credits_per_second = u64::from(self.credits_per_second.max(1));
                Duration::from_nanos(self.depth as u64 / credits_per_second) // positive
            }
        }
    }

    /// Most that `paced` keeps, in billionths.
    #[inline]
    fn burst(&self) -> i64 {
        let of_time = i64::from(self.credits_per_second) * PACED_BURST.as_nanos() as i64; // below 2^49
        of_time.max(PACED_BURST_CREDITS * CREDIT)
    }
}

/// Packets that took credits, and whether more would have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Departures {
    /// Real-time and control packets.
    pub first: u64,
    /// All others.
    pub others: u64,
    /// Others did not get the credits that they asked for since this was asked last.
    pub others_wait: bool,
}

/// Others waited: not yet seen at a refresh, and not yet by [`Credits::departures`].
const WANTED_AT_REFRESH: u64 = 1;
const WANTED_AT_LOOK: u64 = 2;

/// Credits that there are, and how fast more come.
///
/// Each word is right for itself, whatever the others are, so that nothing orders their accesses: time is claimed by moving `filled_ns` or
/// `next_refresh_ns`, and whoever moved one adds what it brings. In a page that processes share any word may be anything. That makes packets wait,
/// or leave: its owner mends in a refresh period what nothing else would.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Credits {
    /// λ in the upper half, and in the lower what of it leaves elsewhere.
    rate: AtomicU64,
    refresh_period_ns: AtomicU64,
    /// CBD in billionths; negative at `paper`; 0: there is no rate yet.
    depth: AtomicI64,
    /// Credits in billionths; negative: real-time packets used up more than there were.
    billionths: AtomicI64,
    /// Up to when `paced` has brought credits.
    filled_ns: AtomicU64,
    next_refresh_ns: AtomicU64,
    /// Others that left, and those that had at the last refresh, with the one that a forgiven debt let go.
    others: AtomicU64,
    others_at_refresh: AtomicU64,
    /// Packets that took a credit, of all kinds.
    sent: AtomicU64,
    /// Debt that was forgiven, in millionths of a credit.
    forgiven: AtomicU64,
    wanted: AtomicU64,
    /// For the owner, when it looks: packets that were lost, and the longest delay of a real-time packet.
    lost: AtomicU64,
    delay_max_ns: AtomicU64,
}

impl AsRef<Credits> for Credits {
    fn as_ref(&self) -> &Credits {
        self
    }
}

impl Credits {
    /// How fast they come.
    #[inline]
    pub fn rate(&self) -> Rate {
        let (rate, depth) = (self.rate.load(Relaxed), self.depth.load(Relaxed));
        Rate {
            law: if depth < 0 { Law::Paper } else { Law::Paced },
            depth: depth.saturating_abs(),
            credits_per_second: (rate >> 32) as u32,
            elsewhere_per_second: rate as u32, // the lower half
            refresh_period: Duration::from_nanos(self.refresh_period_ns.load(Relaxed)),
        }
    }

    fn set_rate(&self, rate: &Rate) {
        let period_ns = u64::try_from(rate.refresh_period.as_nanos()).unwrap_or(u64::MAX);
        let words = u64::from(rate.credits_per_second) << 32 | u64::from(rate.elsewhere_per_second);
        self.rate.store(words, Relaxed);
        self.refresh_period_ns.store(period_ns, Relaxed);
        self.depth.store(
            match rate.law {
                Law::Paper => -rate.depth,
                Law::Paced => rate.depth,
            },
            Relaxed,
        );
    }

    /// Full, and the first refresh is in a period.
    fn begin(&self, rate: &Rate, now: Time) {
        let full = match rate.law {
            Law::Paper => rate.depth,
            Law::Paced => rate.burst(),
        };
        self.billionths.store(full, Relaxed);
        self.filled_ns.store(now.as_nanos(), Relaxed);
        self.next_refresh_ns
            .store((now + rate.refresh_period).as_nanos(), Relaxed);
        self.set_rate(rate);
    }

    /// Credits that came one by one.
    #[inline]
    fn fill(&self, rate: &Rate, now: Time) {
        let filled_ns = self.filled_ns.load(Relaxed);
        if rate.law == Law::Paper || now.as_nanos() <= filled_ns {
            return;
        }
        let claimed = self
            .filled_ns
            .compare_exchange(filled_ns, now.as_nanos(), Relaxed, Relaxed);
        if claimed.is_err() {
            return;
        }
        let brought = (now.as_nanos() - filled_ns).saturating_mul(u64::from(rate.here_per_second()));
        let brought = i64::try_from(brought).unwrap_or(i64::MAX);
        self.change(|credits| credits.saturating_add(brought).min(rate.burst()));
    }

    /// Changes what there is; gives what was there before.
    #[inline]
    fn change(&self, to: impl Fn(i64) -> i64) -> i64 {
        let changed = { &self.billionths }.fetch_update(Relaxed, Relaxed, |credits| Some(to(credits)));
        changed.expect("it always changes")
    }

    /// The refresh, if it is due and nobody else makes it. What it forgives is counted.
    fn refresh(&self, rate: &Rate, now: Time) {
        let due_ns = self.next_refresh_ns.load(Relaxed);
        if now.as_nanos() < due_ns {
            return;
        }
        let mut next = Time::from_nanos(due_ns) + rate.refresh_period;
        if next <= now {
            next = now + rate.refresh_period;
        }
        let claimed = { &self.next_refresh_ns }.compare_exchange(due_ns, next.as_nanos(), Relaxed, Relaxed);
        if claimed.is_err() {
            return;
        }
        let brought = match rate.law {
            Law::Paper => {
                let here = i128::from(rate.depth) * i128::from(rate.here_per_second());
                (here / i128::from(rate.credits_per_second.max(1))) as i64 // at most CBD
            }
            Law::Paced => 0,
        };
        // Others that had a packet wait for the next credit like any; at `paper` they never had less than a refresh brings.
        let others = self.others.load(Relaxed);
        let had_none = others.wrapping_sub(self.others_at_refresh.load(Relaxed)) as i64 <= 0;
        let least = if had_none || rate.law == Law::Paper {
            CREDIT
        } else {
            i64::MIN
        };
        let refreshed = |credits: i64| match rate.law {
            Law::Paper => rate.depth.min(credits.saturating_add(brought)),
            Law::Paced => credits,
        };
        let before = self.change(|credits| refreshed(credits).max(least));
        let forgiven = least.saturating_sub(refreshed(before)).max(0);
        self.forgive(forgiven);
        self.others_at_refresh
            .store(others.wrapping_add(u64::from(forgiven > 0)), Relaxed);
    }

    fn forgive(&self, billionths: i64) {
        if billionths > 0 {
            self.forgiven.fetch_add(billionths as u64 / 1000, Relaxed);
        }
    }

    /// Brings what is due: credits, and the refresh.
    #[inline]
    fn advance(&self, now: Time) -> Rate {
        let rate = self.rate();
        self.fill(&rate, now);
        self.refresh(&rate, now);
        rate
    }

    /// Of `packets` that are neither real-time nor control and would leave now, how many may. Takes their credits.
    #[inline]
    pub fn take(&self, packets: u32, now: Time) -> u32 {
        self.advance(now);
        let taken = |credits: i64| (credits / CREDIT).clamp(0, i64::from(packets));
        let whole = taken(self.change(|credits| credits - taken(credits) * CREDIT)) as u32; // at most `packets`
        if whole < packets {
            self.others_wait();
        }
        if whole > 0 {
            self.others.fetch_add(whole.into(), Relaxed);
            self.sent.fetch_add(whole.into(), Relaxed);
        }
        whole
    }

    /// Real-time or control packets leave, whatever credits there are.
    #[inline]
    pub fn spend(&self, packets: u32, now: Time) {
        let rate = self.advance(now);
        let spent = |credits: i64| credits.saturating_sub(i64::from(packets) * CREDIT);
        let before = self.change(|credits| spent(credits).max(-rate.depth));
        self.forgive((-rate.depth).saturating_sub(spent(before)));
        self.sent.fetch_add(packets.into(), Relaxed);
    }

    /// Packets that [`Credits::take`] had allowed did not leave.
    pub fn give_back(&self, packets: u32) {
        self.unspend(packets);
        self.others.fetch_sub(packets.into(), Relaxed);
    }

    /// Packets of [`Credits::spend`] did not leave.
    pub fn unspend(&self, packets: u32) {
        self.change(|credits| credits.saturating_add(i64::from(packets) * CREDIT));
        self.sent.fetch_sub(packets.into(), Relaxed);
    }

    /// Others wait that do not [take](Credits::take) credits: the kernel's, in a class that has what LM leaves of the rate.
    ///
    /// `paced` does not raise a rate that nobody waits for: it would know nothing of the port when all of it is used at once.
    pub fn others_wait(&self) {
        if self.wanted.load(Relaxed) != WANTED_AT_REFRESH | WANTED_AT_LOOK {
            self.wanted.fetch_or(WANTED_AT_REFRESH | WANTED_AT_LOOK, Relaxed);
        }
    }

    /// What has left so far.
    pub fn departures(&self) -> Departures {
        let (first, others) = self.sent();
        Departures {
            first,
            others,
            others_wait: self.wanted.fetch_and(!WANTED_AT_LOOK, Relaxed) & WANTED_AT_LOOK != 0,
        }
    }

    /// Whole credits that there are; negative: real time used up more.
    pub fn whole(&self) -> i64 {
        self.billionths.load(Relaxed) / CREDIT
    }

    /// Real-time and control packets that have left, and others.
    pub fn sent(&self) -> (u64, u64) {
        let (sent, others) = (self.sent.load(Relaxed), self.others.load(Relaxed));
        (sent.saturating_sub(others), others)
    }

    /// Credits that real-time and control packets used up and nobody waited for.
    pub fn forgiven(&self) -> u64 {
        self.forgiven.load(Relaxed) / 1_000_000
    }

    /// When another may leave that may not now: if no real-time packet comes first. `None` if it might have at the last look.
    pub fn next(&self) -> Option<Time> {
        let rate = self.rate();
        let lacking = CREDIT.saturating_sub(self.billionths.load(Relaxed));
        let next_refresh = Time::from_nanos(self.next_refresh_ns.load(Relaxed));
        if lacking <= 0 {
            return None;
        }
        if rate.law == Law::Paper {
            return Some(next_refresh);
        }
        let wait_ns = (lacking as u64).div_ceil(u64::from(rate.here_per_second())); // positive
        let next = Time::from_nanos(self.filled_ns.load(Relaxed)) + Duration::from_nanos(wait_ns);
        let since_refresh = { &self.others }
            .load(Relaxed)
            .wrapping_sub(self.others_at_refresh.load(Relaxed));
        Some(match since_refresh as i64 <= 0 {
            true => next.min(next_refresh),
            false => next,
        })
    }

    /// For an owner elsewhere: packets were lost on their way, of whatever class.
    pub fn tell_lost(&self, packets: u32) {
        self.lost.fetch_add(packets.into(), Relaxed);
    }

    /// For an owner elsewhere: as [`Smoother::delayed`].
    pub fn tell_delayed(&self, delay: Duration) {
        let delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.delay_max_ns.fetch_max(delay_ns, Relaxed);
    }

    /// What no packet and no look would ever mend. Clocks of processes that share a page are read a moment apart.
    fn mend(&self, rate: &Rate, now: Time) {
        let period = rate.refresh_period;
        if self.filled_ns.load(Relaxed) > (now + period).as_nanos() {
            self.filled_ns.store(now.as_nanos(), Relaxed);
        }
        if self.next_refresh_ns.load(Relaxed) > (now + period.saturating_mul(2)).as_nanos() {
            self.next_refresh_ns.store((now + period).as_nanos(), Relaxed);
        }
        if self.billionths.load(Relaxed) < -rate.depth {
            self.billionths.store(-rate.depth, Relaxed);
        }
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
#[derive(Debug)]
pub struct Smoother<C = Box<Credits>> {
    parameters: Parameters,
    rate: Rate,
    credits: C,
    /// When the rate is looked at next: at a refresh, whoever makes it.
    next_look: Time,
    /// Losses that are no signal yet, in billionths of a packet, and packets that had left when that was counted.
    tolerated: i64,
    tolerated_at: u64,
    /// A signal came since the last refresh; at `paced`, one that counted.
    is_signalled: bool,
    signals: u64,
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
            credits.as_ref().set_rate(&rate);
            credits.as_ref().mend(&rate, now);
        } else {
            credits.as_ref().begin(&rate, now);
        }
        let mut smoother = Smoother {
            parameters,
            rate,
            next_look: Time::from_nanos(credits.as_ref().next_refresh_ns.load(Relaxed)),
            tolerated: 0,
            tolerated_at: credits.as_ref().sent.load(Relaxed),
            is_signalled: false,
            signals: 0,
            deaf_until: Time::ZERO,
            delay_limit: Duration::ZERO,
            credits,
        };
        smoother.set_deadline(None);
        Ok(smoother)
    }

    /// The credits that it gives.
    pub fn credits(&self) -> &Credits {
        self.credits.as_ref()
    }

    /// The tightest deadline of real-time packets that leave here: `paced` takes half of it for a signal, and four frame times at least.
    ///
    /// A port whose whole buffer delays less than the limit is known by its losses alone. (500 Mbit/s, 32 frames, a deadline of 2 ms: 0.2 to 2 %
    /// of real-time packets lost in simulation, 0.01 % with no deadline.)
    pub fn set_deadline(&mut self, tightest: Option<Duration>) {
        let frames = Duration::from_secs(1) * DELAY_FRAMES / self.parameters.link_frames_per_second.get();
        self.delay_limit = tightest.map_or(frames, |deadline| frames.max(deadline / 2));
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

    /// A real-time packet was on its way for so much longer than the fastest one of its flow: what it waited for. (Its whole time has a frame
    /// time for each link; with four as the limit, two frames at a port would be a signal.)
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
            credits.mend(&self.rate, now);
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
            self.credits().refresh(&self.rate, now);
            self.next_look = self.next_refresh();
        }
    }

    /// [`Credits::next`].
    pub fn next(&self) -> Option<Time> {
        self.credits().next()
    }

    /// When the next refresh is due.
    pub fn next_refresh(&self) -> Time {
        Time::from_nanos(self.credits().next_refresh_ns.load(Relaxed))
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
            Law::Paced if is_wanted && !self.is_signalled => {
                let initial = self.parameters.credits_per_second(self.parameters.refresh_period);
                let raised = rate
                    .credits_per_second
                    .saturating_add((initial / PACED_STEPS).max(1));
                rate.credits_per_second = raised.min(self.parameters.paced_bounds().1);
            }
            Law::Paced => {}
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
        let sent = self
            .credits()
            .sent
            .load(Relaxed)
            .saturating_sub(self.tolerated_at);
        let brought = share.saturating_mul(i64::try_from(sent).unwrap_or(i64::MAX));
        let most = CREDIT.max(share.saturating_mul(i64::from(self.parameters.bucket_depth)));
        self.tolerated.saturating_add(brought).min(most)
    }
}

#[cfg(test)]
mod tests;
