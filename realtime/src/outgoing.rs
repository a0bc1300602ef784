//! Messages that wait to leave: by priority, then by deadline, then in the order in which they came.

use lm_protocol::time::Time;

/// Where a message stands: lower ones leave first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// 7 less its priority.
    rank: u8,
    /// Messages without a deadline stand behind all that have one.
    deadline: Time,
    number: u64,
}

/// What became of a message before it left.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<T> {
    /// It leaves.
    Send(T),
    /// Its deadline has passed.
    Late(T),
}

/// Messages that wait, at most so many. All memory is taken at the start.
#[derive(Debug)]
pub(crate) struct Outgoing<T> {
    /// The next one is the last.
    waiting: Vec<(Place, T)>,
    next: u64,
    keep: usize,
}

/// Rank and deadline of a message: lower ones leave first.
pub(crate) fn urgency(priority: u8, deadline: Option<Time>) -> (u8, Time) {
    (7 - priority.min(7), deadline.unwrap_or(Time::MAX))
}

impl<T> Outgoing<T> {
    /// Keeps the last `keep` messages (DDS: HISTORY), at least one.
    pub(crate) fn new(keep: usize) -> Outgoing<T> {
        let keep = keep.max(1);
        Outgoing {
            waiting: Vec::with_capacity(keep),
            next: 0,
            keep,
        }
    }

    /// One more message; gives the oldest back if there were as many as are kept.
    pub(crate) fn push(&mut self, priority: u8, deadline: Option<Time>, message: T) -> Option<T> {
        let superseded = match self.waiting.len() < self.keep {
            true => None,
            false => {
                let oldest = (0..self.keep).min_by_key(|at| self.waiting[*at].0.number);
                oldest.map(|at| self.waiting.remove(at).1)
            }
        };
        let (rank, deadline) = urgency(priority, deadline);
        let place = Place {
            rank,
            deadline,
            number: self.next,
        };
        self.next += 1;
        let at = self.waiting.partition_point(|(other, _)| *other > place);
        self.waiting.insert(at, (place, message));
        superseded
    }

    /// The next message, and whether it may still leave (`SO_TXTIME`'s deadline mode).
    pub(crate) fn pop(&mut self, now: Time) -> Option<Next<T>> {
        let (place, message) = self.waiting.pop()?;
        Some(match place.deadline < now {
            true => Next::Late(message),
            false => Next::Send(message),
        })
    }

    /// Rank and deadline of the next message.
    pub(crate) fn first(&self) -> Option<(u8, Time)> {
        let (place, _) = self.waiting.last()?;
        Some((place.rank, place.deadline))
    }

    /// The next message.
    pub(crate) fn peek(&self) -> Option<&T> {
        self.waiting.last().map(|(_, message)| message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::from_millis(millis)
    }

    fn all(outgoing: &mut Outgoing<u32>, now: Time) -> Vec<Next<u32>> {
        std::iter::from_fn(|| outgoing.pop(now)).collect()
    }

    #[test]
    fn the_first_priority_leaves_first_then_the_earliest_deadline_then_the_oldest() {
        let mut outgoing = Outgoing::new(8);
        for (priority, deadline, number) in [
            (0, Some(1), 0),
            (7, None, 1),
            (7, Some(9), 2),
            (7, Some(5), 3),
            (7, None, 4),
            (3, None, 5),
        ] {
            assert_eq!(outgoing.push(priority, deadline.map(at), number), None);
        }
        let order = [3, 2, 1, 4, 5, 0].map(Next::Send);
        assert_eq!(all(&mut outgoing, Time::ZERO), order);
    }

    #[test]
    fn what_is_late_says_so_and_the_next_one_leaves() {
        let mut outgoing = Outgoing::new(8);
        outgoing.push(7, Some(at(3)), 0);
        outgoing.push(7, Some(at(4)), 1);
        outgoing.push(7, None, 2);
        assert_eq!(
            all(&mut outgoing, at(4)),
            [Next::Late(0), Next::Send(1), Next::Send(2)]
        );
    }

    #[test]
    fn the_oldest_gives_way_whatever_its_priority() {
        let mut outgoing = Outgoing::new(2);
        assert_eq!(outgoing.push(7, None, 0), None);
        assert_eq!(outgoing.push(0, None, 1), None);
        assert_eq!(outgoing.push(3, None, 2), Some(0));
        assert_eq!(outgoing.push(3, None, 3), Some(1));
        assert_eq!(all(&mut outgoing, Time::ZERO), [2, 3].map(Next::Send));
        assert!(outgoing.peek().is_none());
    }
}
