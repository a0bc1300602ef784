//! Asking the voters, under the policy `exclusive`, whether this host alone may have active DLD.
//!
//! The paper's rule (figure 3) looks at the host's own list and then tells the others. Two hosts that are asked at the same
//! instant both find their lists empty, and both activate. Here LM_APPEND_ADDR is a question first, and DLD is activated when a
//! majority of the *voters*, the same few hosts for everybody, have promised to say yes to nobody else for
//! [`PROMISE`](super::PROMISE). Two majorities share a voter, so there cannot be two. That holds whatever is lost, doubled, late or out of order:
//!
//! - *Loss* costs yeses, never invents one.
//! - *Late answers* carry the claim's number; only those to the last one count. The host relies on a yes until [`TENURE`] after it
//!   *first asked* under that number, and the voter keeps its word for the longer `PROMISE` after it *answered*, which was later.
//! - *Late questions* are a host's own: they can only make a voter keep its word for nothing, until it runs out.
//! - *A voter that restarts* forgot its word, so it abstains for as long as it could have been bound. *A claimant that dies* is over when
//!   its tenure is, which ends before the promises do. Its next life has what is left of the tenure, as the gate knows it: promises are
//!   made to an address.
//!
//! Voters are asked in the same order by everybody, and the others only after the first one that answers said yes: of several
//! claimants the first voter picks one, and votes are not split.

use super::message::Verdict;
use super::voter::TENURE;
use crate::time::Time;
use alloc::vec::Vec;
use core::time::Duration;

/// When a voter is asked again, at first.
const FIRST_REPEAT: Duration = Duration::from_millis(15);
/// And at last.
const LAST_REPEAT: Duration = Duration::from_millis(120);
/// How long the others wait for one voter.
const ALONE: Duration = Duration::from_millis(50);
/// How long a claim may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// How a claim stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Not decided.
    Open,
    /// A majority has promised; good until then.
    Won { until: Time },
    /// No majority can come any more. `held`: because another host was faster.
    Lost { held: bool },
}

/// One round of questions.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) number: u64,
    first_asked: Time,
    answers: Vec<Option<Verdict>>,
    /// The voter that is asked before the others, and since when; `None` when all are asked.
    alone: Option<(usize, Time)>,
    next: Time,
    repeat: Duration,
}

impl Claim {
    /// A claim that begins now. A renewal asks everybody at once: it competes with nobody.
    pub(super) fn new(number: u64, voters: usize, now: Time, is_renewal: bool) -> Claim {
        Claim {
            number,
            first_asked: now,
            answers: alloc::vec![None; voters],
            alone: (!is_renewal).then_some((0, now)),
            next: now,
            repeat: FIRST_REPEAT,
        }
    }

    /// A voter's answer to this claim.
    pub(super) fn answer(&mut self, voter: usize, verdict: Verdict, now: Time) {
        // A promise stays one, whatever a repetition finds.
        if self.answers[voter] == Some(Verdict::Promised) {
            return;
        }
        self.answers[voter] = Some(verdict);
        match (self.alone, verdict) {
            (Some(_), Verdict::Promised) => self.ask_next(None, now),
            (Some((asked, _)), Verdict::Abstains) if asked == voter => {
                self.ask_next(Some((voter + 1, now)), now);
            }
            _ => {}
        }
    }

    fn ask_next(&mut self, alone: Option<(usize, Time)>, now: Time) {
        self.alone = alone;
        self.next = now;
        self.repeat = FIRST_REPEAT;
    }

    /// Whom to ask now.
    pub(super) fn poll(&mut self, now: Time) -> Vec<usize> {
        if let Some((voter, since)) = self.alone
            && now.since(since) >= ALONE
        {
            self.ask_next(Some((voter + 1, now)), now);
        }
        if now < self.next || self.standing(now) != Standing::Open {
            return Vec::new();
        }
        self.next = now + self.repeat;
        self.repeat = (self.repeat * 2).min(LAST_REPEAT);
        match self.alone {
            Some((voter, _)) => alloc::vec![voter],
            None => (0..self.answers.len())
                .filter(|&voter| self.answers[voter] != Some(Verdict::Promised))
                .collect(),
        }
    }

    /// A voter can be asked now that could not before.
    pub(super) fn hurry(&mut self, now: Time) {
        self.next = now;
    }

    /// When to [`poll`](Claim::poll), or to look how it [stands](Claim::standing).
    pub(super) fn timeout(&self) -> Time {
        let alone = self.alone.map_or(Time::MAX, |(_, since)| since + ALONE);
        self.next.min(alone).min(self.first_asked + PATIENCE)
    }

    pub(super) fn standing(&self, now: Time) -> Standing {
        let count = |verdict| {
            self.answers
                .iter()
                .filter(|answer| **answer == Some(verdict))
                .count()
        };
        let voters = self.answers.len();
        let held = count(Verdict::Held) > 0;
        // First of all, so that whoever slept over the answers does not rely on promises that are over.
        if now.since(self.first_asked) >= PATIENCE {
            return Standing::Lost { held };
        }
        if count(Verdict::Promised) > voters / 2 {
            return Standing::Won {
                until: self.first_asked + TENURE,
            };
        }
        let refused = count(Verdict::Held) + count(Verdict::Abstains) + count(Verdict::Released);
        let first_refused = self
            .alone
            .is_some_and(|(voter, _)| voter >= voters || self.answers[voter] == Some(Verdict::Held));
        if first_refused || refused >= voters.div_ceil(2) {
            return Standing::Lost { held };
        }
        Standing::Open
    }
}

/// Telling the voters that claims are over, until they say that they know, or need not know any more.
#[derive(Clone, Debug)]
pub(super) struct Release {
    pub(super) number: u64,
    unanswered: Vec<bool>,
    next: Time,
    repeat: Duration,
    until: Time,
}

impl Release {
    pub(super) fn new(number: u64, voters: usize, now: Time) -> Release {
        Release {
            number,
            unanswered: alloc::vec![true; voters],
            next: now,
            repeat: FIRST_REPEAT,
            until: now + super::voter::PROMISE,
        }
    }

    pub(super) fn answer(&mut self, voter: usize) {
        self.unanswered[voter] = false;
    }

    pub(super) fn is_over(&self, now: Time) -> bool {
        now >= self.until || !self.unanswered.contains(&true)
    }

    /// Whom to tell now.
    pub(super) fn poll(&mut self, now: Time) -> Vec<usize> {
        if now < self.next {
            return Vec::new();
        }
        self.next = now + self.repeat;
        self.repeat = (self.repeat * 2).min(LAST_REPEAT);
        (0..self.unanswered.len())
            .filter(|&voter| self.unanswered[voter])
            .collect()
    }

    pub(super) fn timeout(&self) -> Time {
        self.next.min(self.until)
    }
}
