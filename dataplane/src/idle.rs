//! Idle: what the thread does between poll rounds that found nothing.

use std::time::Duration;

use crate::config::IdleStrategy;

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleStep {
    Spin,
    Yield,
    Sleep(Duration),
}

/// Climbs from spinning to sleeping while there is no work.
#[derive(Debug)]
pub(crate) struct Idle {
    strategy: IdleStrategy,
    /// When the first round without work was.
    since_ns: Option<u64>,
    yields: u32,
}

impl Idle {
    pub(crate) fn new(strategy: IdleStrategy) -> Idle {
        Idle {
            strategy,
            since_ns: None,
            yields: 0,
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
        // Measured, not counted: a round with the kernel's receive work in it takes ten times as long as one without.
        if u128::from(now_ns.saturating_sub(since_ns)) < self.strategy.spin.as_nanos() {
            return IdleStep::Spin;
        }
        match self.strategy.sleep {
            Some(longest) if self.yields >= self.strategy.yields => IdleStep::Sleep(longest),
            _ => {
                self.yields = self.yields.saturating_add(1);
                IdleStep::Yield
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn climbs_and_starts_again() {
        let sleep = Duration::from_millis(1);
        let mut idle = Idle::new(IdleStrategy {
            spin: Duration::from_nanos(20),
            yields: 1,
            sleep: Some(sleep),
        });
        let steps: Vec<_> = (100..105).map(|round| idle.step(round * 10)).collect();
        use IdleStep::{Sleep, Spin, Yield};
        assert_eq!(steps, [Spin, Spin, Yield, Sleep(sleep), Sleep(sleep)]);
        idle.reset();
        assert_eq!(idle.step(5000), Spin);
    }

    #[test]
    fn a_pure_spinner_never_leaves_the_core() {
        let mut idle = Idle::new(IdleStrategy::SPIN);
        assert!((0..100_000).all(|second| idle.step(second * 1_000_000_000) == IdleStep::Spin));
    }
}
