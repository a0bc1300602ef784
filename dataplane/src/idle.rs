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

/// Counts the rounds without work and climbs from spinning to sleeping.
#[derive(Debug)]
pub(crate) struct Idle {
    strategy: IdleStrategy,
    rounds: u32,
}

impl Idle {
    pub(crate) fn new(strategy: IdleStrategy) -> Idle {
        Idle { strategy, rounds: 0 }
    }

    /// There was work: start from spinning again.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.rounds = 0;
    }

    /// The step after one more round without work.
    #[inline]
    pub(crate) fn step(&mut self) -> IdleStep {
        if self.rounds < self.strategy.spins {
            self.rounds += u32::from(self.strategy.spins != u32::MAX);
            return IdleStep::Spin;
        }
        match self.strategy.sleep {
            Some(longest) if self.rounds - self.strategy.spins >= self.strategy.yields => {
                IdleStep::Sleep(longest)
            }
            _ => {
                self.rounds = self.rounds.saturating_add(1);
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
            spins: 2,
            yields: 1,
            sleep: Some(sleep),
        });
        let steps: Vec<_> = (0..5).map(|_| idle.step()).collect();
        use IdleStep::{Sleep, Spin, Yield};
        assert_eq!(steps, [Spin, Spin, Yield, Sleep(sleep), Sleep(sleep)]);
        idle.reset();
        assert_eq!(idle.step(), Spin);
    }

    #[test]
    fn a_pure_spinner_never_leaves_the_core() {
        let mut idle = Idle::new(IdleStrategy::SPIN);
        assert!((0..100_000).all(|_| idle.step() == IdleStep::Spin));
    }
}
