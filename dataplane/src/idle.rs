//! Idle: what the thread does between poll rounds that found nothing.

use std::time::Duration;

use crate::config::IdleStrategy;

/// A yield that took so long gave the core to somebody else.
const SHARED_YIELD_NS: u64 = 50_000;
/// A core is taken to be shared for so long after that: some turns of several senders that share one.
const SHARED_NS: u64 = 100_000_000;

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleStep {
    Spin,
    Yield,
    Sleep(Duration),
}

/// Climbs from spinning to sleeping while there is no work.
///
/// On a core that others use as well it sleeps at once: who spins keeps them from their work, which may be what is waited for.
#[derive(Debug)]
pub(crate) struct Idle {
    strategy: IdleStrategy,
    /// When the first round without work was.
    since_ns: Option<u64>,
    yields: u32,
    /// Others use this core, as far as is known.
    shared_until_ns: u64,
}

impl Idle {
    pub(crate) fn new(strategy: IdleStrategy) -> Idle {
        Idle {
            strategy,
            since_ns: None,
            yields: 0,
            shared_until_ns: 0,
        }
    }

    /// There was work: start from spinning again.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.since_ns = None;
        self.yields = 0;
    }

    /// The step after one more round without work, at `now_ns`.
    #[inline]
    pub(crate) fn step(&mut self, now_ns: u64) -> IdleStep {
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        let is_shared = now_ns < self.shared_until_ns;
        // Measured, not counted: a round with the kernel's receive work in it takes ten times as long as one without.
        if !is_shared && u128::from(now_ns.saturating_sub(since_ns)) < self.strategy.spin.as_nanos() {
            return IdleStep::Spin;
        }
        match self.strategy.sleep {
            Some(longest) if is_shared || self.yields >= self.strategy.yields => IdleStep::Sleep(longest),
            _ => {
                self.yields = self.yields.saturating_add(1);
                IdleStep::Yield
            }
        }
    }

    /// Yielding the core took from `before_ns` to `now_ns`.
    #[inline]
    pub(crate) fn yielded(&mut self, before_ns: u64, now_ns: u64) {
        if now_ns.saturating_sub(before_ns) >= SHARED_YIELD_NS {
            self.shared_until_ns = now_ns + SHARED_NS;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEEP: Duration = Duration::from_millis(1);

    fn idle(spin_ns: u64, yields: u32, sleep: Option<Duration>) -> Idle {
        let spin = Duration::from_nanos(spin_ns);
        Idle::new(IdleStrategy { spin, yields, sleep })
    }

    #[test]
    fn climbs_and_starts_again() {
        let mut idle = idle(20, 1, Some(SLEEP));
        let steps: Vec<_> = (100..105).map(|round| idle.step(round * 10)).collect();
        use IdleStep::{Sleep, Spin, Yield};
        assert_eq!(steps, [Spin, Spin, Yield, Sleep(SLEEP), Sleep(SLEEP)]);
        idle.reset();
        assert_eq!(idle.step(5000), Spin);
    }

    #[test]
    fn sleeps_at_once_where_others_use_the_core() {
        let mut idle = idle(100_000, 2, Some(SLEEP));
        use IdleStep::{Sleep, Spin, Yield};
        assert_eq!((idle.step(0), idle.step(200_000)), (Spin, Yield));
        idle.yielded(200_000, 201_000);
        idle.reset();
        assert_eq!((idle.step(300_000), idle.step(500_000)), (Spin, Yield), "alone");
        let back_ns = 500_000 + SHARED_YIELD_NS;
        idle.yielded(500_000, back_ns);
        assert_eq!(idle.step(back_ns), Sleep(SLEEP));
        idle.reset();
        assert_eq!(idle.step(back_ns + SHARED_NS - 1), Sleep(SLEEP));
        idle.reset();
        assert_eq!(idle.step(back_ns + SHARED_NS), Spin, "perhaps alone again");
    }

    #[test]
    fn who_never_sleeps_yields_at_once_where_others_use_the_core() {
        let mut idle = idle(100_000, 2, None);
        idle.yielded(0, SHARED_YIELD_NS);
        assert_eq!(idle.step(SHARED_YIELD_NS), IdleStep::Yield);
    }

    #[test]
    fn a_pure_spinner_never_leaves_the_core() {
        let mut idle = Idle::new(IdleStrategy::SPIN);
        assert!((0..100_000).all(|second| idle.step(second * 1_000_000_000) == IdleStep::Spin));
    }
}
