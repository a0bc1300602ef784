//! The indirection table that keeps other traffic off landing queues.

use std::collections::BTreeMap;

/// `table` without the landing queues, of which 0 is none. What pointed to them goes to the other queues that the table names, to
/// the least loaded first; nothing else moves, so that flows stay where they are.
pub(super) fn spread(table: &[u32], landing: &[u32], rx_queues: u32) -> Vec<u32> {
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
    for queue in result.iter_mut().filter(|queue| landing.contains(queue)) {
        if let Some((&other, load)) = loads.iter_mut().min_by_key(|(_, load)| **load) {
            *queue = other;
            *load += 1;
        }
    }
    result
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
        let spread_out = spread(&table, &[2], 4);
        assert_eq!(count(&spread_out, 2), 0);
        let mut loads: Vec<usize> = [0, 1, 3].iter().map(|queue| count(&spread_out, *queue)).collect();
        loads.sort_unstable();
        assert_eq!(loads, [42, 43, 43]);
        for (at, queue) in table.iter().enumerate().filter(|(_, queue)| **queue != 2) {
            assert_eq!(spread_out[at], *queue, "it did not have to move");
        }
    }

    #[test]
    fn igbs_two_queues_leave_one() {
        // As the driver makes it: halves.
        let table: Vec<u32> = (0..128).map(|at| at * 2 / 128).collect();
        assert_eq!(spread(&table, &[1], 2), vec![0; 128]);
    }

    #[test]
    fn queues_left_out_stay_out_unless_nothing_else_is_left() {
        assert_eq!(spread(&[0, 1, 0, 1], &[1], 4), [0, 0, 0, 0]);
        assert_eq!(spread(&[1, 1, 1, 1], &[1], 3), [0, 2, 0, 2]);
    }

    proptest! {
        #[test]
        fn landing_queues_have_no_entry(
            table in prop::collection::vec(0_u32..6, 1..64),
            landing in prop::collection::vec(1_u32..6, 0..5),
        ) {
            let result = spread(&table, &landing, 6);
            prop_assert_eq!(result.len(), table.len());
            for queue in 0..6 {
                match landing.contains(&queue) {
                    true => prop_assert_eq!(count(&result, queue), 0),
                    false => prop_assert!(count(&result, queue) >= count(&table, queue)),
                }
            }
            // Doing it again changes nothing.
            prop_assert_eq!(spread(&result, &landing, 6), result);
        }
    }
}
