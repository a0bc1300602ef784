//! Turns: whose packets come next, where several senders share one landing queue.
//!
//! A landing queue places packets best when they come in the order of its fill entries, so its senders have credit one
//! after the other. A *turn* is what one of them may send until it is another's. In each round every session that has
//! something to send gets one turn; inside the round the one with the least left goes first, so that short messages do
//! not wait for long ones, and nobody waits for more than two rounds (the ageing bound).

/// Who had a turn in which round. `PLACES`: sessions that there can be.
///
/// ```
/// use lm_protocol::turns::Turns;
///
/// let mut turns = Turns::<4>::default();
/// // Session 2 has least left, then 0.
/// assert_eq!(turns.next([(0, 500), (2, 7), (3, 900)]), Some(2));
/// assert_eq!(turns.next([(0, 500), (2, 1), (3, 900)]), Some(0));
/// assert_eq!(turns.next([(0, 400), (2, 1), (3, 900)]), Some(3)); // the long one's turn in this round
/// assert_eq!(turns.next([(0, 400), (2, 1), (3, 800)]), Some(2)); // a new round
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Turns<const PLACES: usize> {
    round: u64,
    /// The round of each session's last turn.
    had: [u64; PLACES],
}

impl<const PLACES: usize> Default for Turns<PLACES> {
    fn default() -> Self {
        Turns {
            round: 1,
            had: [0; PLACES],
        }
    }
}

impl<const PLACES: usize> Turns<PLACES> {
    /// Whose turn it is: `waiting` are the places of the sessions that have something to send, and how many packets that is.
    /// `None`: nobody's. Places from `PLACES` on are ignored. Among equals the one that has waited longest comes first.
    pub fn next(
        &mut self,
        waiting: impl IntoIterator<Item = (usize, u64), IntoIter: Clone>,
    ) -> Option<usize> {
        let waiting = waiting.into_iter().filter(|(place, _)| *place < PLACES);
        let had = self.had;
        let shortest = |round: u64| {
            (waiting.clone())
                .filter(|(place, _)| had[*place] < round)
                .min_by_key(|(place, left)| (*left, had[*place]))
        };
        let (place, _) = match shortest(self.round) {
            Some(found) => found,
            None => {
                let found = shortest(self.round + 1)?;
                self.round += 1;
                found
            }
        };
        self.had[place] = self.round;
        Some(place)
    }

    /// A new session has the place: it is as if it had its turn in the round before this one.
    pub fn arrived(&mut self, place: usize) {
        if let Some(had) = self.had.get_mut(place) {
            *had = self.round - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nobody_waits_and_places_that_do_not_exist() {
        let mut turns = Turns::<2>::default();
        assert_eq!(turns.next([]), None);
        assert_eq!(turns.next([(2, 1)]), None);
        assert_eq!(turns.next([(1, 9), (7, 1)]), Some(1));
    }

    #[test]
    fn one_alone_has_every_turn() {
        let mut turns = Turns::<16>::default();
        assert!((0..100).all(|left| turns.next([(3, 100 - left)]) == Some(3)));
    }

    #[test]
    fn a_newcomer_joins_the_round() {
        let mut turns = Turns::<4>::default();
        for _ in 0..5 {
            assert_eq!(turns.next([(0, 50), (1, 60)]), Some(0));
            assert_eq!(turns.next([(0, 50), (1, 60)]), Some(1));
        }
        assert_eq!(turns.next([(0, 50), (1, 60)]), Some(0));
        turns.arrived(2);
        assert_eq!(turns.next([(0, 50), (1, 60), (2, 1)]), Some(2));
        assert_eq!(turns.next([(0, 50), (1, 60), (2, 1)]), Some(1));
        assert_eq!(turns.next([(0, 50), (1, 60), (2, 1)]), Some(2));
    }

    proptest! {
        /// Whatever the others have to send and whoever else comes and goes: who waits has a turn within two rounds.
        #[test]
        fn the_ageing_bound_holds(lefts in proptest::collection::vec((0u64..1000, any::<u8>()), 64..256)) {
            const PLACES: usize = 8;
            let mut turns = Turns::<PLACES>::default();
            let mut waited = [0; PLACES];
            for (left, mask) in lefts {
                // Place 0 always waits, with more to send than anybody else.
                let present = |place: usize| place == 0 || mask & 1 << place != 0;
                let waiting: Vec<_> = (0..PLACES)
                    .filter(|&place| present(place))
                    .map(|place| (place, if place == 0 { u64::MAX } else { left * place as u64 % 97 }))
                    .collect();
                let next = turns.next(waiting.iter().copied()).expect("somebody waits");
                prop_assert!(present(next));
                for (place, waited) in waited.iter_mut().enumerate() {
                    *waited = if place == next { 0 } else { *waited + 1 };
                }
                prop_assert!(waited[0] <= 2 * PLACES, "{}", waited[0]);
            }
        }
    }
}
