//! Messages of many fragments.

use std::time::Duration;

use lm_examples::{Dice, ROUND_NS, noise, semantics};
use lm_realtime::{Blocks, SendError, SocketConfig};
use lm_sim::Semantics;

use crate::hostile::inject_fragment;
use crate::{Bed, PORT, exact, options, three_blocks, with_blocks};

/// Messages of up to 47 fragments, which are lost, repeated and overtaken: every byte of those that come is compared, and each of the others
/// is counted once.
#[test]
fn messages_of_many_fragments_come_whole_or_are_counted_as_lost() {
    let (mut lost, mut whole) = (0, 0);
    for seed in 0..200 {
        let semantics = semantics()[seed as usize % 2];
        let mut bed = Bed::new(semantics, seed, &with_blocks(), None);
        let most = bed.sockets[0].payload_max();
        assert_eq!(most, 65_436);
        let mut dice = Dice(seed);
        let mut lens: Vec<usize> = (0..40)
            .map(|_| dice.roll() as usize % (most >> (dice.roll() % 6)))
            .collect();
        lens.extend([
            0, 1, 1416, 1417, 2832, 2833, 3996, 3997, 16_284, 16_285, 32_668, 32_669, most,
        ]);
        // Of the last ones nothing is lost, so that all before them are known of.
        let message = |number: usize| noise(seed << 32 | number as u64, lens[number]);
        let mut numbers = Vec::new();
        for number in 0..lens.len() {
            if number + 3 >= lens.len() {
                bed.calm();
            }
            bed.send(&message(number), options(0, 0));
            for _ in 0..20 + dice.roll() % 20 {
                bed.round();
                while let Some(came) = bed.sockets[1].recv() {
                    let number = came.info().number as usize;
                    assert!(came[..] == message(number), "seed {seed}: message {number}");
                    numbers.push((number, came.info().lost));
                }
            }
        }
        assert!(numbers.is_sorted_by(|a, b| a.0 < b.0), "seed {seed}: {numbers:?}");
        let last = numbers.last().expect("some came").0;
        assert_eq!(last, lens.len() - 1, "seed {seed}");
        let is_told = |pair: &[(usize, u32)]| pair[1].0 - pair[0].0 - 1 == pair[1].1 as usize;
        assert!(numbers.windows(2).all(is_told), "seed {seed}: {numbers:?}");
        let statistics = bed.sockets[1].statistics();
        assert_eq!(statistics.whole as usize, numbers.len(), "seed {seed}");
        let behind_first = lens.len() - numbers[0].0;
        let among = statistics.whole + statistics.lost;
        // A first message that did not come whole is known of if a fragment of it came.
        assert!(
            (behind_first..=lens.len()).contains(&(among as usize)),
            "seed {seed}: {statistics:?}"
        );
        let came = numbers.iter().map(|(number, _)| lens[*number] as u64);
        let of_several = came.filter(|len| *len > 1416).sum::<u64>();
        assert_eq!(statistics.copied_bytes, of_several, "seed {seed}");
        let refused = statistics.no_block + statistics.refused_packets;
        let sent = bed.sockets[0].statistics().sent as usize;
        assert_eq!((refused, sent), (0, lens.len()), "seed {seed}: {statistics:?}");
        (lost, whole) = (lost + statistics.lost, whole + statistics.whole);
    }
    assert!(lost > 500 && whole > 5000, "{lost} lost, {whole} whole");
}

/// A message of which a fragment is missing is given up after 2 ms, and what comes of it then begins nothing.
#[test]
fn a_message_with_a_gap_is_lost_and_its_block_comes_back() {
    let config = three_blocks();
    let mut bed = Bed::new(Semantics::Copy, 10, &config, None);
    bed.calm();
    let message = noise(10, 3000);
    let fragment = |bed: &Bed, number, index: usize| {
        inject_fragment(bed, (number, bed.world.now(), None), &message, 1000, index);
    };
    // More messages than there are blocks for, each without its last fragment.
    for number in 0..12 {
        fragment(&bed, number, 0);
        fragment(&bed, number, 1);
        bed.rounds(if number % 3 == 2 { 110 } else { 1 });
    }
    let statistics = bed.sockets[1].statistics();
    assert_eq!(
        (statistics.lost, statistics.whole, statistics.no_block),
        (12, 0, 0),
        "{statistics:?}"
    );
    fragment(&bed, 11, 2);
    bed.rounds(2);
    assert_eq!(bed.sockets[1].statistics().overtaken, 1);
    for index in [2, 0, 0, 1] {
        fragment(&bed, 12, index);
    }
    bed.rounds(2);
    let came = bed.sockets[1].recv().expect("it is whole");
    assert!(came[..] == message && came.info().lost == 12, "{:?}", came.info());
    drop(came);
    assert_eq!(bed.sockets[1].statistics().overtaken, 2);
    // A newer one that is whole ends those before it at once.
    fragment(&bed, 13, 0);
    fragment(&bed, 14, 0);
    for index in 0..3 {
        fragment(&bed, 15, index);
    }
    fragment(&bed, 14, 1);
    bed.rounds(2);
    assert_eq!(bed.sockets[1].recv().expect("it is whole").info().lost, 2);
    let statistics = bed.sockets[1].statistics();
    assert_eq!((statistics.lost, statistics.overtaken), (14, 3));
}

/// Memory for blocks is there when the socket is open, or there is no socket.
#[test]
fn blocks_that_are_too_few_or_too_many_are_an_error_at_once() {
    let mut bed = Bed::new(Semantics::Copy, 12, &exact(), None);
    let mut open = |blocks| bed.socket(1, &SocketConfig { blocks, ..exact() });
    let none = Blocks::default();
    let error = open(Blocks { of_4: 17, ..none }).expect_err("18 at least");
    assert!(
        error.to_string().contains("17 blocks of 4 pages are too few")
            && error.to_string().contains("ask for 18"),
        "{error}"
    );
    let error = open(Blocks {
        of_16: u32::MAX,
        ..none
    })
    .expect_err("256 TiB");
    assert!(
        error.to_string().contains("ask for fewer") && error.to_string().contains("ulimit -l"),
        "{error}"
    );
    let mut long = open(Blocks { of_8: 18, ..none }).expect("memory");
    assert_eq!(long.payload_max(), 32_668);
    long.connect(&mut bed.world.ends[0], bed.peer, PORT)
        .expect("frames");
    assert_eq!(
        long.send(&[0; 32_669], options(0, 0)),
        Err(SendError::TooLong(32_668))
    );
    // As many as there are blocks wait for the endpoint.
    for _ in 0..18 {
        long.send(&[0; 32_668], options(0, 0)).expect("a block");
    }
    assert_eq!(long.send(&[0; 2000], options(0, 0)), Err(SendError::NotPolled));
    long.send(&[0; 1416], options(0, 0)).expect("another kind");
}

/// A message with a deadline is waited for until then, and no longer.
#[test]
fn a_message_with_a_gap_is_waited_for_until_its_deadline() {
    let mut bed = Bed::new(Semantics::Copy, 14, &three_blocks(), None);
    bed.calm();
    let message = noise(14, 3000);
    let millisecond = (1_000_000 / ROUND_NS) as u32;
    for (number, millis) in [(0, 9), (1, 11)] {
        let of = (number, bed.world.now(), Some(Duration::from_millis(10)));
        let fragment = |bed: &Bed, index| inject_fragment(bed, of, &message, 1000, index);
        fragment(&bed, 0);
        fragment(&bed, 1);
        bed.rounds(millis * millisecond);
        fragment(&bed, 2);
        bed.rounds(2);
    }
    let statistics = bed.sockets[1].statistics();
    assert_eq!((statistics.whole, statistics.lost), (1, 1), "{statistics:?}");
}
