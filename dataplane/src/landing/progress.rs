//! Which packets of a session have come, and how many may be on the way.

use std::time::Duration;

use lm_protocol::delivery::RequestTimer;
use lm_protocol::depth::PathDepth;
use lm_protocol::rate::{Backoff, BackoffShape};
use lm_protocol::serial;
use lm_protocol::time::Time;

use super::claim::Claim;
use super::terms::Limits;
use crate::bounds::TRANSMIT_BURST;

/// A sender that loses packets has at least so many on the way, and so many more after each round trip without a decrease
/// ([`Backoff`]): whatever random loss alone does, it holds it near 112, which fills a path of 100 µs at 13 Gbit/s.
const BACKOFF_FLOOR: u32 = 32;
const BACKOFF_INCREASE: u32 = 16;
/// Losses of so many packets in a hundred are taken for the path's, not for a full queue's.
const BACKOFF_TOLERATED_PERCENT: u32 = 2;
/// Losses that come together count once: for a round trip, and not less than this.
const ROUND_TRIP_MIN_NS: u64 = 100_000;
/// Entries beyond what may be on the way, while packets are being lost: enough to the next round.
const POSTED_SLACK: u32 = 64;
/// So long after a claim, and after the last packet, what is missing is looked for in the socket.
const CLAIM_LATE_NS: u64 = 50_000;

/// Why a sender's announcement, or its word how much it sent, is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Untaken {
    /// An announcement before it is missing.
    Early,
    /// No honest sender says it.
    Implausible,
}

/// Which packets have come.
#[derive(Debug)]
pub(crate) struct Progress {
    /// All packets before this one have been accepted by the gate or overtaken by one that was. Zero-copy mode: packets that
    /// came, and that are known to be lost.
    accepted: u64,
    /// Zero-copy mode: by how much `accepted` was corrected, beside what came.
    corrections: i64,
    claim: Option<Claim>,
    /// Message and position of the last packet that the gate accepted.
    last: Option<(u32, u32)>,
    /// Last packet or announcement, for the message's time limit.
    last_ns: u64,
    /// A pause of our own was forgiven since the last packet.
    forgiven: bool,
}

impl Progress {
    pub(super) fn new(now_ns: u64) -> Progress {
        Progress {
            accepted: 0,
            corrections: 0,
            claim: None,
            last: None,
            last_ns: now_ns,
            forgiven: false,
        }
    }

    #[inline]
    pub(super) fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Packets of the session up to the last that was accepted (cumulative, mod 2^32).
    #[inline]
    pub(crate) fn accepted_packets(&self) -> u32 {
        self.accepted as u32
    }

    pub(super) fn corrections(&self) -> i64 {
        self.corrections
    }

    /// When the last packet came, or the last announcement.
    #[inline]
    pub(crate) fn last_ns(&self) -> u64 {
        self.last_ns
    }

    /// The message's time limit begins anew.
    #[inline]
    pub(super) fn begin(&mut self, now_ns: u64) {
        self.last_ns = now_ns;
    }

    /// Begins the message's time limit anew after a pause of our own, once until a packet comes: perhaps the sender
    /// waited for a credit of ours.
    pub(crate) fn forgive_pause(&mut self, now_ns: u64) {
        if !self.forgiven {
            self.forgiven = true;
            self.last_ns = now_ns;
        }
    }

    /// The gate accepted the packet of a message's position, the session's `end`th.
    #[inline]
    pub(super) fn accept(&mut self, last: (u32, u32), end: u64, now_ns: u64) {
        self.last = Some(last);
        self.accepted = self.accepted.max(end);
        self.last_ns = now_ns;
        self.forgiven = false;
    }

    /// Zero-copy mode: another packet came. Gives the number of those before it.
    pub(super) fn count(&mut self, now_ns: u64) -> u64 {
        self.accepted += 1;
        self.last_ns = now_ns;
        self.forgiven = false;
        self.accepted - 1
    }

    /// Whether that is the last packet that the gate accepted.
    #[inline]
    pub(super) fn is_last(&self, last: (u32, u32)) -> bool {
        self.last == Some(last)
    }

    /// Whether the gate accepts a message's position next, or a later one: it never goes back.
    #[inline]
    pub(super) fn may_follow(&self, (number, position): (u32, u32)) -> bool {
        self.last.is_none_or(|(last_number, last_position)| {
            !serial::precedes(number, last_number) && (number != last_number || position > last_position)
        })
    }

    /// The gate may accept any packet next.
    pub(super) fn forget_last(&mut self) {
        self.last = None;
    }

    /// All packets of the session before `end` have come, or will not.
    #[inline]
    pub(super) fn overtaken(&mut self, end: u64) {
        let accepted = self.accepted.max(end);
        self.corrections += (accepted - self.accepted) as i64;
        self.accepted = accepted;
    }

    /// Zero-copy mode: the sender says that so many packets of the session were sent, and nothing has come since.
    pub(super) fn correct(&mut self, sent: u64) {
        self.corrections += sent as i64 - self.accepted as i64;
        self.accepted = sent;
    }

    /// The sender says how many packets of the session it has sent (cumulative, mod 2^32), of `announced` ones and as far as `limit` at most.
    /// If it is not believed, nothing changed.
    pub(super) fn claimed(
        &mut self,
        sent: u32,
        announced: u64,
        limit: u32,
        now_ns: u64,
    ) -> Result<(), Untaken> {
        let ahead = sent.wrapping_sub(self.accepted as u32) as i32;
        let packets = self.accepted.saturating_add_signed(i64::from(ahead));
        if packets > announced {
            return match serial::precedes(limit, sent) {
                true => Err(Untaken::Implausible),
                false => Err(Untaken::Early),
            };
        }
        self.suspect(packets, now_ns);
        Ok(())
    }

    /// Packets of the session before `sent` are lost, unless they come soon.
    pub(super) fn suspect(&mut self, sent: u64, now_ns: u64) {
        if self.claim.is_none_or(|claim| claim.sent < sent) {
            self.claim = Some(Claim::new(sent, now_ns));
        }
    }

    #[inline]
    pub(super) fn has_claim(&self) -> bool {
        self.claim.is_some()
    }

    /// What was sent is late. In a stream there is always a claim, since it overtakes the packets that it speaks of.
    #[inline]
    pub(super) fn is_late(&self, now_ns: u64) -> bool {
        let is_late = |since_ns: u64| now_ns.saturating_sub(since_ns.max(self.last_ns)) >= CLAIM_LATE_NS;
        self.claim.is_some_and(|claim| is_late(claim.since_ns))
    }

    /// What came until `now_ns` was looked at. Gives what the sender has sent, if what of it has not come is lost, and whether nothing came
    /// since it said so.
    pub(super) fn believe(&mut self, grace_ns: u64, now_ns: u64) -> Option<(u64, bool)> {
        let claim = self.claim.as_mut()?;
        if !claim.outlasts(grace_ns, self.last_ns, now_ns) {
            return None;
        }
        let Claim { sent, since_ns, .. } = self.claim.take()?;
        Some((sent, since_ns >= self.last_ns))
    }
}

/// How many packets may be on the way, and how long answers take.
#[derive(Debug)]
pub(super) struct Pace {
    /// Packets that the sender may have on the way now, and up to which they were counted as arrived.
    backoff: Backoff,
    /// Those that fill the path, where there are to be no more.
    depth: Option<PathDepth>,
    confirmed: u64,
    /// How long requests for missing fragments take to be answered, smoothed; 0: none was yet.
    answer_ns: u64,
}

impl Pace {
    pub(super) fn new(ceiling: u32, adapts: bool, now_ns: u64) -> Pace {
        let depth = || PathDepth::new(TRANSMIT_BURST, ceiling, Time::from_nanos(now_ns));
        Pace {
            backoff: backoff_below(ceiling),
            depth: adapts.then(depth),
            confirmed: 0,
            answer_ns: 0,
        }
    }

    /// At most so many from now on.
    pub(super) fn bound(&mut self, ceiling: u32) {
        self.backoff = backoff_below(ceiling);
    }

    /// Packets that the sender may have on the way now.
    pub(super) fn on_the_way(&self) -> u32 {
        let allowed = self.backoff.allowed();
        (self.depth.as_ref()).map_or(allowed, |depth| allowed.min(depth.allowed()))
    }

    /// Of how many packets more a sender is told at once, where few are on the way: bursts, each of which it hands over at once.
    pub(super) fn step(&self) -> Option<u32> {
        let half = self.depth.as_ref()?.allowed() / 2;
        Some(match half / TRANSMIT_BURST {
            0 => half.max(1),
            bursts => bursts * TRANSMIT_BURST,
        })
    }

    /// The sender is told that it may send more than the first `before` packets, which it has.
    pub(super) fn told(&mut self, before: u64, now_ns: u64) {
        if let Some(depth) = &mut self.depth {
            depth.told(before, Time::from_nanos(now_ns));
        }
    }

    /// Entries that may be posted at once. While back-off holds they are few: what is posted when a packet is lost is met by the one
    /// behind it, and each of those is copied to its place.
    pub(super) fn posted_max(&self, limits: &Limits) -> u32 {
        let allowed = self.backoff.allowed();
        match allowed < limits.on_the_way {
            true => (allowed + POSTED_SLACK).min(limits.posted_max),
            false => limits.posted_max,
        }
    }

    /// Packets were found to be lost.
    pub(super) fn lost(&mut self, packets: u32, now_ns: u64) {
        let round_trip_ns = self.answer_ns.max(ROUND_TRIP_MIN_NS);
        self.backoff.lost(
            packets,
            Time::from_nanos(now_ns),
            Duration::from_nanos(round_trip_ns),
        );
    }

    /// What has come since this was last called counts as arrived: `accepted` by now.
    pub(super) fn confirm(&mut self, accepted: u64, now_ns: u64) {
        // In zero-copy mode it may have turned out that fewer came.
        let arrived = accepted.saturating_sub(self.confirmed);
        self.confirmed = self.confirmed.max(accepted);
        if let Some(depth) = &mut self.depth {
            depth.arrived(self.confirmed, Time::from_nanos(now_ns));
        }
        self.backoff.confirmed(arrived.min(u64::from(u32::MAX)) as u32);
    }

    /// A request was answered after so long.
    pub(super) fn answered(&mut self, sample: Duration) {
        // RFC 6298's smoothing, with an eighth for what is new.
        let sample_ns = sample.as_nanos() as u64;
        self.answer_ns = match self.answer_ns {
            0 => sample_ns,
            known => known - known / 8 + sample_ns / 8,
        };
    }

    /// How long to wait for an answer: a few of its usual times.
    pub(super) fn pause(&self) -> Duration {
        match self.answer_ns {
            0 => RequestTimer::PAUSE,
            known => Duration::from_nanos(3 * known),
        }
    }
}

/// What bounds the packets on the way to `ceiling`, and to fewer after losses.
fn backoff_below(ceiling: u32) -> Backoff {
    let shape = BackoffShape {
        floor: BACKOFF_FLOOR.min(ceiling),
        ceiling,
        increase: BACKOFF_INCREASE,
        kept_eighths: 7,
        tolerated_percent: BACKOFF_TOLERATED_PERCENT,
    };
    Backoff::new(shape).expect("a ceiling that is not below the floor")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a sender may have on the way after 200 round trips that each lose so many packets in a thousand.
    fn allowed_with(lost_permille: u32) -> u32 {
        let mut backoff = backoff_below(768);
        let round_trip = Duration::from_micros(100);
        for at in 1..=200 {
            let now = Time::from_nanos(at * 100_000);
            backoff.lost(
                (backoff.allowed() * lost_permille).div_ceil(1000),
                now,
                round_trip,
            );
            backoff.confirmed(backoff.allowed());
        }
        backoff.allowed()
    }

    #[test]
    fn random_losses_do_not_hold_a_sender_back_and_full_queues_do() {
        assert_eq!(allowed_with(1), 768);
        assert_eq!(allowed_with(10), 768);
        assert!((100..=130).contains(&allowed_with(50)), "{}", allowed_with(50));
    }
}
