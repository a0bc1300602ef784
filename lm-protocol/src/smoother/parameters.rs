//! What a smoother is made of, and which parameters make sense.

use core::num::{NonZeroU32, NonZeroU64};
use core::time::Duration;

use super::Law;

/// Preamble, check sequence and gap: what a frame takes on the wire beside its bytes.
const WIRE_OVERHEAD_BYTES: u64 = 24;

/// Shortest refresh period: what `epoll_wait` counts in. A faster link has a deeper bucket, not a shorter period.
pub const TIMER_GRAIN: Duration = Duration::from_millis(1);

/// Percent of its link that `paced` never exceeds.
const LINK_PERCENT: u64 = 97;

/// What a [`Smoother`](super::Smoother) is made of. [`Parameters::of_link`] has table 3's.
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

    pub(super) fn check(&self) -> Result<(), ParametersError> {
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
    pub(super) fn credits_per_second(&self, refresh_period: Duration) -> u32 {
        let per_second = u128::from(self.bucket_depth) * 1_000_000_000 / refresh_period.as_nanos();
        u32::try_from(per_second).unwrap_or(u32::MAX).max(1)
    }

    /// λmin and λmax of `paced`.
    pub(super) fn paced_bounds(&self) -> (u32, u32) {
        let of_link = u64::from(self.link_frames_per_second.get()) * LINK_PERCENT / 100;
        let of_link = (of_link as u32).max(1); // less than what it is a part of
        let most = self.credits_per_second(self.refresh_period_min).min(of_link);
        (self.credits_per_second(self.refresh_period_max).min(most), most)
    }
}

/// A rule that [`Parameters`] break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParametersError {
    /// CBD is 0.
    #[error("CBD is 0: a refresh has to bring at least one credit")]
    NoCredits,
    /// ΔRP is 0.
    #[error("ΔRP is 0: the refresh period would never fall again after a loss")]
    NoStep,
    /// RPmin is below [`TIMER_GRAIN`].
    #[error("RPmin is below 1 ms, a timer's grain: for a higher rate choose a higher CBD")]
    BelowTimer,
    /// RPmin is above RP0.
    #[error("RPmin is above RP0: choose RPmin ≤ RP0 ≤ RPmax")]
    BelowMin,
    /// RP0 is above RPmax.
    #[error("RP0 is above RPmax: choose RPmin ≤ RP0 ≤ RPmax")]
    AboveMax,
    /// Z is no share.
    #[error("Z is the share of packets that may be lost: choose 0 (none) to 1")]
    NoShare,
}
