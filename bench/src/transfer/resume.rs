//! Where an earlier transfer of a file ended: the sender compares digests of its blocks with digests of what the receiver has, from the
//! first byte on. Where a block differs it looks into it with smaller ones, down to a message. Nothing is concluded from lengths.

use super::wire::{Control, DIGESTS_MAX, Digest, Plan, TransferId};

/// A file is at most about so many blocks at first. With 12 answers in a message that bounds the round trips to some hundred,
/// however long the file.
const BLOCKS_MAX: u64 = 1024;

/// The search for the first byte that is not verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    plan: Plan,
    /// Everything before is the file's; a multiple of the message length, or `end`.
    verified: u64,
    /// What lies behind is not, or the receiver does not have it.
    end: u64,
    block_len: u64,
    asked: bool,
    theirs: Option<Vec<Digest>>,
}

impl Search {
    /// Among the first `held` bytes; `None` where there is nothing to look for.
    #[must_use]
    pub fn new(plan: Plan, held: u64) -> Option<Search> {
        let end = held.min(plan.total_len?);
        let messages = plan.message_count()?.div_ceil(BLOCKS_MAX);
        (end > 0).then(|| Search {
            plan,
            verified: 0,
            end,
            block_len: messages.saturating_mul(plan.message_len),
            asked: false,
            theirs: None,
        })
    }

    /// The blocks that are to be compared: first offset, length of each, end.
    #[must_use]
    pub fn blocks(&self) -> (u64, u64, u64) {
        let most = self.block_len.saturating_mul(DIGESTS_MAX as u64);
        let end = self.verified.saturating_add(most).min(self.end);
        (self.verified, self.block_len, end)
    }

    /// The question; once it was asked, a sign of life unless the receiver is `silent`.
    pub fn say(&mut self, transfer: TransferId, silent: bool) -> Control {
        if self.asked && !(silent && self.is_unanswered()) {
            return Control::Alive { transfer };
        }
        self.asked = true;
        let (offset, block_len, end) = self.blocks();
        Control::Check {
            transfer,
            offset,
            block_len,
            end,
        }
    }

    /// Whether it is the receiver's turn.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        self.theirs.is_none()
    }

    /// The receiver's digests. Those of another question change nothing.
    pub fn answered(&mut self, offset: u64, block_len: u64, digests: Vec<Digest>) {
        if self.asked && (offset, block_len) == (self.verified, self.block_len) {
            self.theirs = Some(digests);
        }
    }

    /// Compares the file's digests of [`blocks`](Self::blocks) with the answer, if there is one. At the end of the search: how many
    /// bytes are verified.
    pub fn compare(&mut self, ours: &[Digest]) -> Option<u64> {
        let theirs = self.theirs.take()?;
        self.asked = false;
        let same = ours
            .iter()
            .zip(&theirs)
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        let differs = same < ours.len().min(theirs.len());
        let verified = self
            .verified
            .saturating_add(self.block_len.saturating_mul(same as u64));
        self.verified = verified.min(self.end);
        if differs {
            let messages = self.block_len / self.plan.message_len;
            if messages <= 1 {
                return Some(self.verified);
            }
            self.end = self.end.min(self.verified.saturating_add(self.block_len));
            self.block_len = messages.div_ceil(DIGESTS_MAX as u64) * self.plan.message_len;
            return None;
        }
        // No answer to anything: the receiver cannot read what it has.
        (self.verified == self.end || theirs.is_empty()).then_some(self.verified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Searches, and returns what was verified and how many questions that took. Digests are bytes of the blocks themselves.
    fn search(ours: &[u8], held: &[u8], message_len: u64, answers_max: usize) -> (u64, u32) {
        let plan = Plan::new(Some(ours.len() as u64), message_len).unwrap();
        let transfer = TransferId::new(7).unwrap();
        let Some(mut search) = Search::new(plan, held.len() as u64) else {
            return (0, 0);
        };
        let digests = |bytes: &[u8], (offset, block_len, end): (u64, u64, u64)| -> Vec<Digest> {
            let mixed = |block: &[u8]| {
                let hash = xxhash_rust::xxh3::xxh3_64(block).to_be_bytes();
                std::array::from_fn(|n| hash[n % 8])
            };
            let end = end.min(bytes.len() as u64) as usize;
            bytes[offset as usize..end]
                .chunks(block_len as usize)
                .map(mixed)
                .collect()
        };
        for questions in 1.. {
            let Control::Check {
                offset,
                block_len,
                end,
                ..
            } = search.say(transfer, false)
            else {
                panic!("no question");
            };
            assert!((1..=DIGESTS_MAX as u64).contains(&(end - offset).div_ceil(block_len)));
            let blocks = search.blocks();
            let mut theirs = digests(held, (offset, block_len, end));
            theirs.truncate(answers_max);
            search.answered(offset, block_len, theirs);
            if let Some(verified) = search.compare(&digests(ours, blocks)) {
                return (verified, questions);
            }
        }
        unreachable!()
    }

    #[test]
    fn a_long_file_takes_few_round_trips() {
        let ours = vec![7; 1 << 20];
        let mut held = ours.clone();
        held[1_000_000] = 8;
        let (verified, questions) = search(&ours, &held, 1, DIGESTS_MAX);
        assert_eq!(verified, 1_000_000);
        assert!(questions < 100, "{questions}");
    }

    proptest! {
        /// What is verified is the longest common beginning in whole messages, whatever else the receiver has, and however few
        /// answers it gives at once.
        #[test]
        fn the_first_difference_is_found(
            len in 1usize..6000,
            held_len in 0usize..8000,
            changed in proptest::option::of(0usize..8000),
            message_len in 1u64..100,
            answers_max in 1usize..20,
        ) {
            let bytes: Vec<u8> = (0..8000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let ours = &bytes[..len];
            let mut held = bytes[..held_len].to_vec();
            if let Some(byte) = changed.and_then(|at| held.get_mut(at)) {
                *byte ^= 1;
            }
            let same = ours.iter().zip(&held).take_while(|(ours, held)| ours == held).count() as u64;
            let (verified, _) = search(ours, &held, message_len, answers_max);
            let plan = Plan::new(Some(len as u64), message_len).unwrap();
            prop_assert_eq!(plan.message_at(verified), plan.message_at(same));
        }
    }
}
