//! The indirection table that keeps other traffic off landing queues.

use std::collections::BTreeMap;

use super::Share;

/// `table` without the landing queues, but for their share. What pointed to them goes to the other queues that the table
/// names, to the least loaded first; nothing else moves, so that flows stay where they are. `None` when no queue is left.
pub(super) fn spread(table: &[u32], landing: &[u32], rx_queues: u32, share: Share) -> Option<Vec<u32>> {
    let mut loads: BTreeMap<u32, usize> = BTreeMap::new();
    for queue in table.iter().filter(|queue| !landing.contains(queue)) {
        *loads.entry(*queue).or_default() += 1;
    }
    if loads.is_empty() {
        // The table named landing queues alone.
        loads = (0..rx_queues)
            .filter(|queue| !landing.contains(queue))
            .map(|queue| (queue, 0))
            .collect();
    }

    let mut result = table.to_vec();
    let mut kept = vec![false; table.len()];
    if share == Share::OneEntry {
        let mut landing = landing.to_vec();
        landing.sort_unstable();
        landing.dedup();
        for queue in landing {
            let own = (0..table.len()).rev().find(|at| table[*at] == queue);
            let at = match own {
                Some(at) => at,
                // It has none: the most loaded queue gives its last one.
                None => {
                    let (&loaded, load) = loads.iter_mut().max_by_key(|(_, load)| **load)?;
                    let at = (0..table.len())
                        .rev()
                        .find(|at| !kept[*at] && result[*at] == loaded)?;
                    *load -= 1;
                    at
                }
            };
            result[at] = queue;
            kept[at] = true;
        }
    }
    for at in 0..result.len() {
        if !kept[at] && landing.contains(&result[at]) {
            let (&queue, load) = loads.iter_mut().min_by_key(|(_, load)| **load)?;
            result[at] = queue;
            *load += 1;
        }
    }
    // Somebody must be left: with few entries, landing queues can have taken the last one.
    result
        .iter()
        .any(|queue| !landing.contains(queue))
        .then_some(result)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn count(table: &[u32], queue: u32) -> usize {
        table.iter().filter(|entry| **entry == queue).count()
    }

    #[test]
    fn the_others_share_equally() {
        let table: Vec<u32> = (0..128).map(|at| at % 4).collect();
        let spread_out = spread(&table, &[2], 4, Share::None).expect("three are left");
        assert_eq!(count(&spread_out, 2), 0);
        let mut loads: Vec<usize> = [0, 1, 3].iter().map(|queue| count(&spread_out, *queue)).collect();
        loads.sort_unstable();
        assert_eq!(loads, [42, 43, 43]);
        for (at, queue) in table.iter().enumerate().filter(|(_, queue)| **queue != 2) {
            assert_eq!(spread_out[at], *queue, "it did not have to move");
        }
    }

    #[test]
    fn igbs_two_queues_leave_one_entry() {
        // As the driver makes it: halves.
        let table: Vec<u32> = (0..128).map(|at| at * 2 / 128).collect();
        let one = spread(&table, &[1], 2, Share::OneEntry).expect("queue 0 is left");
        let mut expected = vec![0; 128];
        expected[127] = 1;
        assert_eq!(one, expected);
        let none = spread(&table, &[1], 2, Share::None).expect("queue 0 is left");
        assert_eq!(none, vec![0; 128]);
        // Again, from where it is.
        assert_eq!(spread(&one, &[1], 2, Share::OneEntry), Some(one));
        let mut given = vec![0; 128];
        given[127] = 1;
        assert_eq!(spread(&none, &[1], 2, Share::OneEntry), Some(given));
    }

    #[test]
    fn queues_left_out_stay_out_unless_nothing_else_is_left() {
        assert_eq!(
            spread(&[0, 1, 0, 1], &[1], 4, Share::None),
            Some(vec![0, 0, 0, 0])
        );
        assert_eq!(
            spread(&[1, 1, 1, 1], &[1], 3, Share::None),
            Some(vec![0, 2, 0, 2])
        );
        assert_eq!(
            spread(&[1, 1, 1, 1], &[1], 3, Share::OneEntry),
            Some(vec![0, 2, 0, 1])
        );
    }

    #[test]
    fn somebody_must_be_left() {
        assert_eq!(spread(&[0, 1], &[0, 1], 2, Share::None), None);
        assert_eq!(spread(&[0], &[1], 2, Share::OneEntry), None);
        assert_eq!(spread(&[0, 0], &[1, 2], 3, Share::OneEntry), None);
        assert_eq!(spread(&[], &[1], 2, Share::None), None);
    }

    proptest! {
        #[test]
        fn landing_queues_have_their_share_and_no_more(
            table in prop::collection::vec(0_u32..6, 1..64),
            landing in prop::collection::vec(1_u32..6, 0..5),
            one: bool,
        ) {
            let share = if one { Share::OneEntry } else { Share::None };
            if let Some(result) = spread(&table, &landing, 6, share) {
                prop_assert_eq!(result.len(), table.len());
                for queue in 0..6 {
                    let entries = count(&result, queue);
                    if landing.contains(&queue) {
                        prop_assert_eq!(entries, usize::from(one));
                    } else {
                        prop_assert!(entries <= count(&table, queue) + table.len());
                    }
                }
                // Doing it again changes nothing.
                prop_assert_eq!(spread(&result, &landing, 6, share), Some(result));
            } else {
                // Queue 0 is never a landing queue here, so that only a short table can leave nobody.
                prop_assert!(one && table.len() <= landing.len());
            }
        }
    }
}
