//! What the application is told: messages in the order in which they were settled, those that stay incomplete among them, and how its
//! own messages ended. It may ask for all of it in this order, or for one peer's.

use std::collections::VecDeque;

use crate::completion::{Completion, Outcome, PeerId, RecvError, SendToken};
use crate::counters::Counters;
use crate::message::Message;

/// Completions kept for an application that does not ask for them; older ones are dropped and counted.
const COMPLETIONS_MAX: usize = 4096;
/// Failures kept for an application that does not ask for them.
const FAILURES_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Told {
    messages: VecDeque<Result<Message, RecvError>>,
    completions: VecDeque<Completion>,
    /// Messages that did not arrive since the application last asked.
    failed_sends: u64,
    next_token: u64,
}

/// Takes the first that is the peer's.
fn first_of<T>(queue: &mut VecDeque<T>, peer: PeerId, peer_of: impl Fn(&T) -> Option<PeerId>) -> Option<T> {
    let at = queue.iter().position(|next| peer_of(next) == Some(peer))?;
    queue.remove(at)
}

fn sender(next: &Result<Message, RecvError>) -> Option<PeerId> {
    match next {
        Ok(message) => Some(message.peer),
        Err(RecvError::Incomplete { peer, .. } | RecvError::Aborted { peer, .. }) => Some(*peer),
        Err(_) => None,
    }
}

impl Told {
    /// With room for so many messages that wait.
    pub(crate) fn new(messages_max: usize) -> Told {
        Told {
            messages: VecDeque::with_capacity(messages_max + 64),
            completions: VecDeque::with_capacity(COMPLETIONS_MAX),
            failed_sends: 0,
            next_token: 0,
        }
    }

    /// A whole message came.
    #[inline]
    pub(crate) fn received(&mut self, message: Message) {
        self.messages.push_back(Ok(message));
    }

    /// A message was given up.
    #[cold]
    pub(crate) fn incomplete(&mut self, failure: RecvError) {
        if self.messages.iter().filter(|next| next.is_err()).count() == FAILURES_MAX {
            let oldest = self.messages.iter().position(Result::is_err);
            let _ = oldest.and_then(|at| self.messages.remove(at));
        }
        self.messages.push_back(Err(failure));
    }

    /// Whether a message waits for the application, or the news that one stays incomplete.
    #[inline]
    pub(crate) fn has_message(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Takes the next message, or the news that one stays incomplete.
    #[inline]
    pub(crate) fn next_message(&mut self) -> Result<Option<Message>, RecvError> {
        self.messages.pop_front().transpose()
    }

    /// The same of one peer's.
    pub(crate) fn next_message_of(&mut self, peer: PeerId) -> Result<Option<Message>, RecvError> {
        first_of(&mut self.messages, peer, sender).transpose()
    }

    /// Adds the peers of whom something waits, each once, those first that have waited longest for a message.
    pub(crate) fn waiting(&self, peers: &mut Vec<PeerId>) {
        let senders = self.messages.iter().filter_map(sender);
        let receivers = self.completions.iter().map(|completion| completion.peer);
        for peer in senders.chain(receivers) {
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
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

    /// The same of one that went to this peer.
    pub(crate) fn next_completion_of(&mut self, peer: PeerId) -> Option<Completion> {
        first_of(&mut self.completions, peer, |next| Some(next.peer))
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
    pub(crate) fn messages(&self) -> impl Iterator<Item = &Message> + Clone {
        self.messages.iter().flatten()
    }

    pub(crate) fn failures(&self) -> impl Iterator<Item = &RecvError> + Clone {
        self.messages.iter().filter_map(|next| next.as_ref().err())
    }

    pub(crate) fn forget_failures(&mut self) {
        self.messages.retain(Result::is_ok);
    }

    pub(crate) fn completions(&mut self) -> &mut VecDeque<Completion> {
        &mut self.completions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An application that asks for nothing: of how messages ended the last are kept, and the drops are counted.
    #[test]
    fn what_is_not_asked_for_is_bounded() {
        let (mut told, mut counters) = (Told::new(0), Counters::default());
        let peer = PeerId {
            index: 1,
            generation: 1,
        };
        for _ in 0..10_000 {
            told.incomplete(RecvError::Link);
            let completion = Completion {
                token: told.new_token(),
                peer,
                tag: 0,
                len: 1,
                latency_ns: 0,
                outcome: Outcome::TimedOut,
            };
            told.ended(completion, &mut counters);
        }
        assert_eq!(told.failures().count(), FAILURES_MAX);
        assert_eq!(told.completions().len(), COMPLETIONS_MAX);
        assert_eq!(counters.completions_discarded, 10_000 - COMPLETIONS_MAX as u64);
    }
}
