//! Credits that others take, and how fast they come.

use core::num::NonZeroU32;
use core::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use core::time::Duration;

use super::{Law, Parameters};
use crate::time::Time;

/// Credits are counted in billionths, which is what a nanosecond brings at one credit a second: nothing is ever rounded.
pub(super) const CREDIT: i64 = 1_000_000_000;

/// Time whose credits `paced` keeps, if they are more than [`PACED_BURST_CREDITS`]: what a network card takes at once anyway.
const PACED_BURST: Duration = Duration::from_micros(100);
const PACED_BURST_CREDITS: i64 = 2;

/// Percent of the link that sockets may declare together: the rest is for others, whatever real time takes.
const DECLARED_PERCENT: u64 = 75;

/// How fast credits come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    pub(super) law: Law,
    /// CBD, in billionths.
    pub(super) depth: i64,
    /// λ; at `paper` the mean.
    pub(super) credits_per_second: u32,
    /// Of these, what leaves elsewhere and takes no credits.
    pub(super) elsewhere_per_second: u32,
    /// Until the refresh after the next one.
    pub(super) refresh_period: Duration,
}

impl Rate {
    pub(super) fn new(parameters: &Parameters) -> Rate {
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

    /// Most that there are, in billionths.
    fn full(&self) -> i64 {
        match self.law {
            Law::Paper => self.depth,
            Law::Paced => self.burst(),
        }
    }

    /// Most that `paced` keeps, in billionths.
    #[inline]
    fn burst(&self) -> i64 {
        let of_time = i64::from(self.credits_per_second) * PACED_BURST.as_nanos() as i64; // below 2^49
        of_time.max(PACED_BURST_CREDITS * CREDIT)
    }
}

/// Packets that took credits, modulo 2^64, and whether more would have.
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
pub(super) const WANTED_AT_REFRESH: u64 = 1;
const WANTED_AT_LOOK: u64 = 2;

/// Credits that there are, and how fast more come.
///
/// Each word is right for itself, whatever the others are, so that nothing orders their accesses: time is claimed by moving `filled_ns` or
/// `next_refresh_ns`, and whoever moved one adds what it brings. In a page that processes share any word may be anything. That makes packets wait,
/// or leave: its owner, which keeps its schedule for itself, mends each of them in a refresh period.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Credits {
    /// λ in the upper half, and in the lower what of it leaves elsewhere.
    pub(super) rate: AtomicU64,
    pub(super) refresh_period_ns: AtomicU64,
    /// CBD in billionths; negative at `paper`; 0: there is no rate yet.
    pub(super) depth: AtomicI64,
    /// Credits in billionths; negative: real-time packets used up more than there were.
    pub(super) billionths: AtomicI64,
    /// Up to when `paced` has brought credits.
    pub(super) filled_ns: AtomicU64,
    pub(super) next_refresh_ns: AtomicU64,
    /// Others that left, and those that had at the last refresh, with the one that a forgiven debt let go.
    pub(super) others: AtomicU64,
    pub(super) others_at_refresh: AtomicU64,
    /// Packets that took a credit, of all kinds.
    pub(super) sent: AtomicU64,
    /// Debt that was forgiven, in millionths of a credit.
    pub(super) forgiven: AtomicU64,
    pub(super) wanted: AtomicU64,
    /// For the owner, when it looks: packets that were lost, and the longest delay of a real-time packet.
    pub(super) lost: AtomicU64,
    pub(super) delay_max_ns: AtomicU64,
    /// Not 0: the kernel's traffic is held to the rate as well.
    pub(super) kernel: AtomicU64,
    /// Real-time packets a second that sockets have declared.
    pub(super) declared: AtomicU64,
    /// Frames of full length that the link carries in a second; 0: nobody said.
    pub(super) link_frames: AtomicU64,
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

    pub(super) fn set_rate(&self, rate: &Rate) {
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
    pub(super) fn begin(&self, rate: &Rate, now: Time) {
        self.billionths.store(rate.full(), Relaxed);
        self.filled_ns.store(now.as_nanos(), Relaxed);
        self.next_refresh_ns
            .store((now + rate.refresh_period).as_nanos(), Relaxed);
        self.set_rate(rate);
    }

    /// Credits that came one by one.
    #[inline]
    pub(super) fn fill(&self, rate: &Rate, now: Time) {
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
    pub(super) fn refresh(&self, rate: &Rate, now: Time) {
        let due_ns = self.next_refresh_ns.load(Relaxed);
        if now.as_nanos() < due_ns {
            return;
        }
        let mut next = Time::from_nanos(due_ns) + rate.refresh_period;
        if next <= now {
            next = now + rate.refresh_period;
        }
        let claimed = { &self.next_refresh_ns }.compare_exchange(due_ns, next.as_nanos(), Relaxed, Relaxed);
        if claimed.is_ok() {
            self.bring(rate);
        }
    }

    /// The refresh that is due by its owner's schedule, unless a program has made it: what that leaves here is at most a period away, and clocks
    /// are read a moment apart. The next one is at `next`.
    pub(super) fn refresh_by_owner(&self, rate: &Rate, now: Time, next: Time) {
        let due = Time::from_nanos(self.next_refresh_ns.swap(next.as_nanos(), Relaxed));
        if due <= now || due > now + rate.refresh_period.saturating_mul(2) {
            self.bring(rate);
        }
    }

    /// What a refresh brings.
    fn bring(&self, rate: &Rate) {
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

    /// What has left so far: the difference of two looks is right whatever was in the page before.
    pub fn departures(&self) -> Departures {
        let (sent, others) = (self.sent.load(Relaxed), self.others.load(Relaxed));
        Departures {
            first: sent.wrapping_sub(others),
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

    /// Whether the kernel's traffic is held to the rate as well, as their owner says.
    pub fn holds_kernel(&self) -> bool {
        self.kernel.load(Relaxed) != 0
    }

    /// For their owner: whether it is.
    pub fn set_holds_kernel(&self, is_held: bool) {
        self.kernel.store(is_held.into(), Relaxed);
    }

    /// Real-time packets a second that a socket may send from now on, of full length.
    ///
    /// # Errors
    /// How many are left: all together may declare three quarters of the link.
    pub fn declare(&self, packets_per_second: u32) -> Result<(), u64> {
        let more = u64::from(packets_per_second);
        let most = self.link_frames_per_second().map_or(u64::MAX, most_declared);
        let sum = |declared: u64| declared.checked_add(more).filter(|sum| *sum <= most);
        let declared = self.declared.fetch_update(Relaxed, Relaxed, sum);
        declared
            .map(drop)
            .map_err(|declared| most.saturating_sub(declared))
    }

    /// It sends them no more.
    pub fn undeclare(&self, packets_per_second: u32) {
        let rest = |declared: u64| Some(declared.saturating_sub(packets_per_second.into()));
        let _ = self.declared.fetch_update(Relaxed, Relaxed, rest);
    }

    /// For their owner: nobody has them, and what one that ended at once had declared is nobody's.
    pub fn undeclare_all(&self) {
        self.declared.store(0, Relaxed);
    }

    /// Frames of full length that the link carries in a second, as their owner says.
    pub fn link_frames_per_second(&self) -> Option<NonZeroU32> {
        u32::try_from(self.link_frames.load(Relaxed))
            .ok()
            .and_then(NonZeroU32::new)
    }

    /// For an owner elsewhere: packets were lost on their way, of whatever class.
    pub fn tell_lost(&self, packets: u32) {
        self.lost.fetch_add(packets.into(), Relaxed);
    }

    /// For an owner elsewhere: as [`Smoother::delayed`](super::Smoother::delayed).
    pub fn tell_delayed(&self, delay: Duration) {
        let delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.delay_max_ns.fetch_max(delay_ns, Relaxed);
    }

    /// What no packet and no look would ever mend. Clocks of processes that share a page are read a moment apart.
    pub(super) fn mend(&self, rate: &Rate, link_frames: NonZeroU32, now: Time) {
        self.set_rate(rate);
        self.link_frames.store(link_frames.get().into(), Relaxed);
        if self.filled_ns.load(Relaxed) > (now + rate.refresh_period).as_nanos() {
            self.filled_ns.store(now.as_nanos(), Relaxed);
        }
        self.change(|credits| credits.clamp(-rate.depth, rate.full()));
        // How much it was is not known any more, and the sockets that declared it give it back all the same.
        let is_possible = |declared: u64| declared <= most_declared(link_frames);
        let _ = { &self.declared }
            .fetch_update(Relaxed, Relaxed, |declared| (!is_possible(declared)).then_some(0));
    }
}

/// Real-time packets a second that sockets may declare together.
fn most_declared(link_frames_per_second: NonZeroU32) -> u64 {
    u64::from(link_frames_per_second.get()) * DECLARED_PERCENT / 100
}
