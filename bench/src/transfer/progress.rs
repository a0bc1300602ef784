//! Which messages of a transfer have arrived: every index once, each of the right length, none too far ahead.

use std::collections::BTreeSet;

use super::wire::Plan;

/// How far ahead of the first missing message another one may be. A sender has at most 256 messages in flight.
const AHEAD_MAX: u64 = 1024;

/// The arrival of one transfer's messages.
#[derive(Clone, Debug)]
pub struct Sequence {
    plan: Plan,
    /// Known from the plan, or from END.
    total_len: Option<u64>,
    /// Every index below has arrived.
    next: u64,
    /// Those that have arrived beyond `next`, [`AHEAD_MAX`] at most.
    ahead: BTreeSet<u64>,
    /// Index and length of a message shorter than the others: it can only be the last.
    short: Option<(u64, u64)>,
    bytes: u64,
}

impl Sequence {
    /// Nothing of `plan` has arrived.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        Sequence::resumed(plan, 0)
    }

    /// The same, but what lies before message `first` is there.
    #[must_use]
    pub fn resumed(plan: Plan, first: u64) -> Self {
        let bytes = first.saturating_mul(plan.message_len);
        Sequence {
            plan,
            total_len: plan.total_len,
            next: first,
            ahead: BTreeSet::new(),
            short: None,
            bytes: plan.total_len.map_or(bytes, |total| bytes.min(total)),
        }
    }

    /// Bytes that have arrived.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Messages that have arrived.
    #[must_use]
    pub fn messages(&self) -> u64 {
        self.next + self.ahead.len() as u64
    }

    /// Bytes of the whole transfer, once they are known.
    #[must_use]
    pub fn total_len(&self) -> Option<u64> {
        self.total_len
    }

    /// Where the message's first byte belongs, in bytes from the transfer's beginning.
    #[must_use]
    pub fn offset(&self, index: u32) -> u64 {
        // Cannot overflow for an index that `arrived` let in: it lies inside the total, or within AHEAD_MAX of messages
        // that did arrive; a hostile message length is stopped by the receiver's limit long before.
        u64::from(index).saturating_mul(self.plan.message_len)
    }

    /// Where the first message that is missing begins: all before it has arrived, or was there.
    #[must_use]
    pub fn contiguous(&self) -> u64 {
        let end = self.next.saturating_mul(self.plan.message_len);
        self.total_len.map_or(end, |total| end.min(total))
    }

    /// Whether message `index` with `len` bytes may arrive; and `next`: of those that may it is the first.
    #[must_use]
    pub fn expects(&self, index: u32, len: u64, next: bool) -> bool {
        let index = u64::from(index);
        self.check(index, len).is_ok() && (!next || index == self.next)
    }

    /// Whether all is there.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.total_len == Some(self.bytes) && self.ahead.is_empty()
    }

    /// One more than the highest index that arrived.
    fn end_index(&self) -> u64 {
        self.ahead.last().map_or(self.next, |last| last + 1)
    }

    /// Notes the arrival of message `index` with `len` bytes.
    ///
    /// # Errors
    /// A line for people when that contradicts the plan or what arrived before.
    pub fn arrived(&mut self, index: u32, len: u64) -> Result<(), &'static str> {
        let index = u64::from(index);
        self.check(index, len)?;
        if len < self.plan.message_len {
            self.short = Some((index, len));
        }
        self.ahead.insert(index);
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
        self.bytes += len;
        Ok(())
    }

    fn check(&self, index: u64, len: u64) -> Result<(), &'static str> {
        if index < self.next || self.ahead.contains(&index) {
            return Err("a message came twice; send again");
        }
        if index - self.next >= AHEAD_MAX {
            return Err("a message came too far ahead of the others; send again");
        }
        let wanted = match (self.total_len, self.short) {
            (Some(total), _) => {
                let offset = index.saturating_mul(self.plan.message_len);
                total.saturating_sub(offset).min(self.plan.message_len)
            }
            (None, Some((last, _))) if index > last => 0,
            // Any length is good for what may be the last message, and that is so while none came after it.
            (None, None) if index >= self.end_index() => len.min(self.plan.message_len),
            _ => self.plan.message_len,
        };
        if len == 0 || len != wanted {
            return Err("a message has the wrong length or lies past the end; send again");
        }
        Ok(())
    }

    /// The sender says how much there was.
    ///
    /// # Errors
    /// A line for people when that contradicts the plan or what has arrived.
    pub fn end(&mut self, bytes: u64, messages: u64) -> Result<(), &'static str> {
        const CONTRADICTION: &str = "the sender's count contradicts what came; send again";
        let plan = Plan::new(Some(bytes), self.plan.message_len).ok_or(CONTRADICTION)?;
        let last = messages.saturating_sub(1);
        let last_len = bytes - last.saturating_mul(self.plan.message_len).min(bytes);
        let short_fits = match self.short {
            Some(short) => short == (last, last_len),
            None => self.end_index() < messages || last_len == self.plan.message_len,
        };
        let fits = plan.message_count() == Some(messages)
            && self.total_len.is_none_or(|total| total == bytes)
            && self.end_index() <= messages
            && short_fits;
        if !fits {
            return Err(CONTRADICTION);
        }
        self.total_len = Some(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequence(total_len: Option<u64>, message_len: u64) -> Sequence {
        Sequence::new(Plan::new(total_len, message_len).unwrap())
    }

    #[test]
    fn in_order_and_complete() {
        let mut sequence = sequence(Some(25), 10);
        assert_eq!(sequence.arrived(0, 10), Ok(()));
        assert_eq!(sequence.arrived(2, 5), Ok(()));
        assert!(!sequence.is_complete());
        assert_eq!(sequence.arrived(1, 10), Ok(()));
        assert!(sequence.is_complete());
        assert_eq!(
            (sequence.bytes(), sequence.messages(), sequence.offset(2)),
            (25, 3, 20)
        );
    }

    #[test]
    fn contradictions_of_a_known_plan() {
        let mut sequence = sequence(Some(25), 10);
        for (index, len) in [(0, 9), (0, 11), (0, 0), (2, 10), (2, 6), (3, 5), (u32::MAX, 10)] {
            assert!(sequence.arrived(index, len).is_err(), "{index} {len}");
        }
        sequence.arrived(1, 10).unwrap();
        sequence.arrived(0, 10).unwrap();
        for index in [0, 1] {
            assert!(sequence.arrived(index, 10).is_err());
        }
        assert!(sequence.end(24, 3).is_err());
        assert!(sequence.end(25, 2).is_err());
        assert_eq!(sequence.end(25, 3), Ok(()));
    }

    #[test]
    fn unknown_end() {
        let mut open = sequence(None, 10);
        open.arrived(0, 10).unwrap();
        open.arrived(2, 4).unwrap();
        assert!(open.arrived(3, 10).is_err(), "nothing comes after the short one");
        assert!(open.arrived(1, 9).is_err(), "only the last is short");
        assert!(open.end(14, 2).is_err() && open.end(23, 3).is_err() && open.end(30, 3).is_err());
        assert!(open.end(34, 4).is_err() && open.end(0, 0).is_err());
        assert_eq!(open.end(24, 3), Ok(()));
        assert!(!open.is_complete());
        open.arrived(1, 10).unwrap();
        assert!(open.is_complete());

        // END first, then data; and a total that is a multiple of the message length.
        let mut open = sequence(None, 10);
        assert_eq!(open.end(20, 2), Ok(()));
        assert!(open.arrived(2, 1).is_err());
        open.arrived(1, 10).unwrap();
        open.arrived(0, 10).unwrap();
        assert!(open.is_complete());
    }

    #[test]
    fn too_far_ahead() {
        let mut sequence = sequence(None, 10);
        assert!(sequence.arrived(AHEAD_MAX as u32, 10).is_err());
        assert_eq!(sequence.arrived(AHEAD_MAX as u32 - 1, 10), Ok(()));
        for index in 0..AHEAD_MAX as u32 - 1 {
            assert_eq!(sequence.arrived(index, 10), Ok(()));
        }
        assert_eq!(sequence.arrived(AHEAD_MAX as u32, 10), Ok(()));
    }

    proptest! {
        /// Any order within the limit completes exactly at the last message, with or without a known end.
        #[test]
        fn every_order_completes_once(
            (total, message_len, order) in (1u64..4000, 1u64..200).prop_flat_map(|(total, message_len)| {
                let count = total.div_ceil(message_len).min(AHEAD_MAX) as u32;
                let order = Just((0..count).collect::<Vec<u32>>()).prop_shuffle();
                (Just(total.min(u64::from(count) * message_len)), Just(message_len), order)
            }),
            known: bool,
            end_at in 0usize..1024,
        ) {
            let mut sequence = sequence(known.then_some(total), message_len);
            for (position, index) in order.iter().enumerate() {
                prop_assert!(!sequence.is_complete());
                if position == end_at % order.len() {
                    prop_assert_eq!(sequence.end(total, order.len() as u64), Ok(()));
                }
                let len = (total - u64::from(*index) * message_len).min(message_len);
                prop_assert!(sequence.arrived(*index, len).is_ok());
            }
            prop_assert!(sequence.is_complete());
            for index in order {
                prop_assert!(sequence.arrived(index, message_len).is_err());
            }
        }

        /// Whatever comes, nothing panics and the counts stay those of distinct messages.
        #[test]
        fn hostile_arrivals(
            known: Option<u16>,
            steps in proptest::collection::vec((0u32..40, 0u64..12, any::<bool>()), 0..200),
        ) {
            let mut sequence = sequence(known.map(|total| u64::from(total) + 1), 10);
            let mut seen = std::collections::BTreeSet::new();
            for (index, len, end) in steps {
                if end {
                    let _ = sequence.end(u64::from(index) * 10 + len, u64::from(index) + 1);
                } else if sequence.arrived(index, len).is_ok() {
                    prop_assert!(seen.insert(index), "{} twice", index);
                }
            }
            prop_assert_eq!(sequence.messages(), seen.len() as u64);
            if sequence.is_complete() {
                let total = sequence.total_len().unwrap();
                prop_assert_eq!(total.div_ceil(10), seen.len() as u64);
            }
        }
    }
}
