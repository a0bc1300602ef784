//! Rate limit: how much of what a session has to send may leave now. Between steps 3 and 4 of the data's path.

use std::time::Duration;

use std::num::NonZeroU64;

use lm_protocol::rate::TokenBucket;
use lm_protocol::time::Time;

/// Fewest and most packets of such a burst. The most is what a window has, and no more than what veth's ring takes.
const RATE_BURST_PACKETS: (u32, u32) = (4, 256);

/// A burst under a rate limit: full packets of so much time, so that neither the sleep of an endpoint that waits nor a short
/// pause of its thread costs throughput.
const RATE_BURST: Duration = Duration::from_millis(1);

/// What [`crate::ConnectOptions::rate`] asks for; without one everything may leave.
#[derive(Debug)]
pub(crate) struct RateLimit {
    bucket: Option<TokenBucket>,
    full_len_bytes: u32,
    /// When it was last asked.
    looked_ns: u64,
}

impl RateLimit {
    /// `full_len_bytes`: length of the longest packet.
    pub(crate) fn new(rate: Option<NonZeroU64>, full_len_bytes: u16, now_ns: u64) -> RateLimit {
        let full_len_bytes = u32::from(full_len_bytes);
        let bucket = rate.map(|rate| {
            let burst = burst_packets(rate, full_len_bytes);
            TokenBucket::new(rate, burst, full_len_bytes, Time::from_nanos(now_ns))
        });
        RateLimit {
            bucket,
            full_len_bytes,
            looked_ns: now_ns,
        }
    }

    /// How many full packets may leave now.
    #[inline]
    pub(crate) fn full_packets(&mut self, now_ns: u64) -> u32 {
        self.looked_ns = now_ns;
        match &mut self.bucket {
            Some(bucket) => bucket.packets(self.full_len_bytes, Time::from_nanos(now_ns)),
            None => u32::MAX,
        }
    }

    /// Whether a small message may leave now. Fragments wait for what a full packet costs, and would starve it if it did the
    /// same: it may leave on the last token, and the next fragment waits for longer.
    #[inline]
    pub(crate) fn allows_small(&mut self, now_ns: u64) -> bool {
        self.looked_ns = now_ns;
        (self.bucket.as_mut()).is_none_or(|bucket| bucket.packets(1, Time::from_nanos(now_ns)) > 0)
    }

    /// Packets of `bytes` altogether have left.
    #[inline]
    pub(crate) fn spend(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bucket {
            bucket.spend(bytes);
        }
    }

    /// When the next full packet may leave, or the next small message; `None` where it might have left at the last look.
    pub(crate) fn next_ns(&self, full: bool) -> Option<u64> {
        let len = if full { self.full_len_bytes } else { 1 };
        let next_ns = self.bucket.as_ref()?.next(len).as_nanos();
        (next_ns > self.looked_ns).then_some(next_ns)
    }
}

/// How many full packets may leave at once at this rate.
fn burst_packets(rate: NonZeroU64, full_len_bytes: u32) -> u32 {
    let bits = u128::from(rate.get()) * RATE_BURST.as_nanos() / 1_000_000_000;
    let packets = bits / (u128::from(full_len_bytes.max(1)) * 8);
    let (least, most) = RATE_BURST_PACKETS;
    u32::try_from(packets).unwrap_or(u32::MAX).clamp(least, most)
}
