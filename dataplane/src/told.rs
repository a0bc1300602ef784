//! What the application is told: messages in the order in which they were settled, those that stay incomplete among them, and how its
//! own messages ended.

use std::collections::VecDeque;

use crate::completion::{Completion, Outcome, RecvError, SendToken};
use crate::counters::Counters;
use crate::message::Message;

/// Completions kept for an application that does not ask for them; older ones are dropped and counted.
const COMPLETIONS_MAX: usize = 4096;
/// Failures kept for an application that does not ask for them.
const FAILURES_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Told {
    messages: VecDeque<Message>,
    /// Messages that stay incomplete, each behind so many whole ones.
    failures: VecDeque<(u64, RecvError)>,
    /// Whole messages that the application has taken.
    taken: u64,
    completions: VecDeque<Completion>,
    /// Messages that did not arrive since the application last asked.
    failed_sends: u64,
    next_token: u64,
}

impl Told {
    /// With room for so many messages that wait.
    pub(crate) fn new(messages_max: usize) -> Told {
        Told {
            messages: VecDeque::with_capacity(messages_max),
            failures: VecDeque::with_capacity(64),
            taken: 0,
            completions: VecDeque::with_capacity(COMPLETIONS_MAX),
            failed_sends: 0,
            next_token: 0,
        }
    }

    /// A whole message came.
    #[inline]
    pub(crate) fn received(&mut self, message: Message) {
        self.messages.push_back(message);
    }

    /// A message was given up.
    pub(crate) fn incomplete(&mut self, failure: RecvError) {
        if self.failures.len() == FAILURES_MAX {
            self.failures.pop_front();
        }
        let behind = self.taken + self.messages.len() as u64;
        self.failures.push_back((behind, failure));
    }

    /// Whether a message waits for the application.
    #[inline]
    pub(crate) fn has_message(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Takes the next message, or the news that one stays incomplete.
    #[inline]
    pub(crate) fn next_message(&mut self) -> Result<Option<Message>, RecvError> {
        let comes_first = |&(behind, _): &(u64, _)| behind <= self.taken || self.messages.is_empty();
        if self.failures.front().is_some_and(comes_first) {
            return self
                .failures
                .pop_front()
                .map_or(Ok(None), |(_, failure)| Err(failure));
        }
        let message = self.messages.pop_front();
        self.taken += u64::from(message.is_some());
        Ok(message)
    }

    /// A name for one more message of the application's.
    #[inline]
    pub(crate) fn new_token(&mut self) -> SendToken {
        let token = SendToken(self.next_token);
        self.next_token += 1;
        token
    }

    /// A message of the application's has ended.
    #[inline]
    pub(crate) fn ended(&mut self, completion: Completion, counters: &mut Counters) {
        match completion.outcome {
            Outcome::Delivered | Outcome::Sent => {
                counters.messages_sent += 1;
                counters.bytes_sent += completion.len;
            }
            _ => {
                counters.messages_failed += 1;
                self.failed_sends += 1;
            }
        }
        if self.completions.len() == COMPLETIONS_MAX {
            self.completions.pop_front();
            counters.completions_discarded += 1;
        }
        self.completions.push_back(completion);
    }

    /// The end of a message, if one has ended.
    pub(crate) fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// How many messages did not arrive since the last time this was asked.
    pub(crate) fn take_failed_sends(&mut self) -> u64 {
        std::mem::take(&mut self.failed_sends)
    }
}

/// For tests, which look at what was not taken.
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), allow(dead_code, reason = "the fuzzer uses a part of the tests"))]
impl Told {
    pub(crate) fn messages(&mut self) -> &mut VecDeque<Message> {
        &mut self.messages
    }

    pub(crate) fn failures(&mut self) -> &mut VecDeque<(u64, RecvError)> {
        &mut self.failures
    }

    pub(crate) fn completions(&mut self) -> &mut VecDeque<Completion> {
        &mut self.completions
    }
}
