//! Streaming: writers, announcements and what is shown, against definitions that look at every byte.

use lm_protocol::manifest::{message_digest, window_digest};
use lm_protocol::streaming::*;
use lm_protocol::time::Time;
use lm_protocol::window::{TailRule, WindowShape};
use lm_protocol::wire::lm::AnnounceEntry;
use proptest::prelude::*;
use std::ops::Range;
use std::time::Duration;

fn any_grain() -> impl Strategy<Value = (Grain, u64, u16, u32)> {
    (1u64..2000, 1u16..90, 0u32..4).prop_map(|(len, payload_len, shift)| {
        let shape = WindowShape::new(1 << shift).unwrap();
        (
            Grain::new(len, payload_len, shape).unwrap(),
            len,
            payload_len,
            1 << shift,
        )
    })
}

#[test]
fn messages_that_have_no_windows() {
    let shape = WindowShape::new(1).unwrap();
    assert_eq!(Grain::new(0, 1448, shape), None);
    assert_eq!(Grain::new(5, 0, shape), None);
    assert_eq!(Grain::new(u64::MAX, 1, shape), None);
    // More windows than an announcement can tell from an abort.
    assert_eq!(Grain::new(u64::from(AnnounceEntry::ABORTED), 1, shape), None);
    let longest = Grain::new(u64::from(AnnounceEntry::ABORTED) - 1, 1, shape).unwrap();
    assert_eq!(longest.windows(), AnnounceEntry::ABORTED - 1);
}

#[test]
fn releases_on_the_wire() {
    for release in [
        Release::Windows(0),
        Release::Windows(7),
        Release::Aborted,
        Release::Whole,
    ] {
        assert_eq!(Release::from_u32(release.to_u32()), release);
    }
    assert_eq!(Release::Whole.to_u32(), AnnounceEntry::ALL_WINDOWS);
    let watermark = Watermark::new();
    assert_eq!(watermark.seen(), Release::Windows(0));
    watermark.publish(Release::Aborted);
    assert_eq!(watermark.seen(), Release::Aborted);
}

#[test]
fn what_a_writer_may_not_do_says_why() {
    let mut writer = Writer::new(Grain::new(10, 2, WindowShape::new(2).unwrap()).unwrap());
    assert_eq!(writer.release(1), Err(WriterError::Written(0)));
    writer.wrote(0..9).unwrap();
    assert_eq!(writer.release(9), Ok(Release::Windows(2)));
    assert_eq!(writer.release(8), Ok(Release::Windows(2)), "nothing new");
    assert_eq!(writer.release(7), Err(WriterError::Released(8)));
    assert_eq!(writer.wrote(7..9), Err(WriterError::Released(8)));
    assert_eq!(writer.wrote(9..11), Err(WriterError::Len(10)));
    assert_eq!(
        writer.wrote(10..10),
        Err(WriterError::Written(9)),
        "one is left out"
    );
    assert_eq!(writer.finish(), Err(WriterError::Written(9)));
    writer.wrote(9..10).unwrap();
    assert_eq!(
        writer.release(10),
        Ok(Release::Windows(2)),
        "the last window goes with the end"
    );
    assert_eq!(writer.finish(), Ok(Release::Whole));
    assert_eq!(writer.finish(), Err(WriterError::Ended));
    assert_eq!(writer.wrote(9..10), Err(WriterError::Ended));
    assert_eq!(writer.release(10), Err(WriterError::Ended));
    assert_eq!(
        writer.abort(),
        None,
        "a finished message is not aborted when its writer is dropped"
    );
    assert!(writer.writable().is_empty());

    let mut dropped = Writer::new(Grain::new(10, 2, WindowShape::new(2).unwrap()).unwrap());
    assert_eq!(dropped.abort(), Some(Release::Aborted));
    assert_eq!(dropped.wrote(0..1), Err(WriterError::Ended));
    for (error, words) in [
        (WriterError::Ended, "begin another"),
        (WriterError::Released(8), "before 8"),
        (WriterError::Len(10), "10 bytes"),
        (WriterError::Written(9), "9 bytes"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn an_abort_is_the_end_at_both_ends() {
    let grain = Grain::new(100, 10, WindowShape::new(2).unwrap()).unwrap();
    let mut released = Released::new(grain);
    assert_eq!(released.hear(Release::Windows(2)), Heard::More);
    assert!(released.waits_for_writer(4) && !released.waits_for_writer(3));
    assert_eq!(released.hear(Release::Aborted), Heard::Aborted);
    assert_eq!(released.hear(Release::Aborted), Heard::Nothing);
    assert_eq!((released.fragments(), released.release()), (4, Release::Aborted));
    assert!(!released.waits_for_writer(4));
    assert_eq!(released.hear(Release::Windows(1)), Heard::Nothing, "overtaken");
    assert_eq!(released.hear(Release::Windows(3)), Heard::Contradiction);
    assert_eq!(released.hear(Release::Whole), Heard::Contradiction);
    assert_eq!(released.fragments(), 4);

    let mut whole = Released::new(grain);
    assert_eq!(
        whole.hear(Release::Windows(5)),
        Heard::Contradiction,
        "all of them is whole"
    );
    assert_eq!(whole.hear(Release::Whole), Heard::More);
    assert_eq!(whole.hear(Release::Aborted), Heard::Contradiction);
    assert_eq!((whole.fragments(), whole.release()), (10, Release::Whole));
}

#[test]
fn announcements_are_news_or_keepalives() {
    let mut announcements = Announcements::new(Duration::from_millis(400));
    let at = Time::from_millis;
    let (one, two) = (Release::Windows(1), Release::Windows(2));
    assert_eq!(announcements.next(one, at(10)), Some(one));
    assert_eq!(announcements.next(one, at(10)), None);
    assert_eq!(announcements.next(two, at(10)), Some(two));
    assert_eq!(announcements.next(two, at(109)), None);
    assert_eq!(
        announcements.next(two, at(110)),
        Some(two),
        "a quarter of the time-out"
    );
    assert_eq!(announcements.next(two, at(111)), None);
    assert_eq!(
        announcements.next(Release::Aborted, at(111)),
        Some(Release::Aborted)
    );
}

#[test]
fn a_turn_is_for_what_is_released() {
    let grain = Grain::new(100, 10, WindowShape::new(2).unwrap()).unwrap();
    let mut first = Released::new(grain);
    let released = |first: &Released| {
        let is_whole = first.release() == Release::Whole;
        packets_released([(first.fragments(), is_whole), (10, true)])
    };
    assert_eq!(
        released(&first),
        0,
        "a later message waits for a slow earlier one"
    );
    first.hear(Release::Windows(1));
    assert_eq!(released(&first), 2);
    first.hear(Release::Whole);
    assert_eq!(released(&first), 20);
    assert_eq!(packets_released([]), 0);
}

#[test]
fn digests_of_windows_are_bound_to_their_place() {
    let digests: Vec<u64> = (0..64).collect();
    let of = |key, message, window, digests| window_digest(key, message, window, digests);
    let mut all = vec![
        of(7, 1, 0, &digests),
        of(8, 1, 0, &digests),
        of(7, 2, 0, &digests),
        of(7, 1, 1, &digests),
        of(7, 1, 0, &digests[1..]),
        of(7, 1, 0, &digests[..63]),
        message_digest(7, 1, &digests, 0, 0),
    ];
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 7);
}

/// A receiver whose every byte is looked at.
struct Bytes {
    entries: Vec<Range<u64>>,
    shown: Vec<bool>,
}

const fn landing(has_digests: bool, write_len: u32) -> Landing {
    Landing {
        has_digests,
        tail_len: 66,
        write_len,
    }
}

#[test]
fn a_window_is_shown_when_everything_holds_and_not_before() {
    let shape = WindowShape::new(2).unwrap();
    let grain = Grain::new(600, 100, shape).unwrap();
    let mut released = Released::new(grain);
    released.hear(Release::Whole);
    let packets = Err(Awaits::Packets);
    let outcomes = [
        packets,
        packets,
        Err(Awaits::Header),
        Err(Awaits::Digest),
        Err(Awaits::Digest),
        Ok(Part::Body),
    ];
    for (missing, outcome) in outcomes.into_iter().enumerate() {
        let mut showing = Showing::new(grain, landing(true, 166));
        let mut tails = TailRule::new(shape, 6);
        showing.post(1).unwrap();
        showing.post(0).unwrap();
        assert!(tails.tail_saved(0));
        showing.post(3).unwrap();
        showing.post(2).unwrap();
        if missing != 0 {
            showing.took(1);
            showing.took(0);
        }
        showing.landed(0, 7);
        if missing != 1 {
            showing.in_place(0, 9);
        }
        let checked = if missing != 2 { 7 } else { 6 };
        if missing != 3 {
            assert_eq!(showing.tell(0, [5].into_iter(), &released), Ok(1));
        }
        showing.found(0, if missing == 4 { 6 } else { 5 });
        assert!(!showing.keeps(0..3));
        assert_eq!(showing.show(0, checked, &tails), outcome, "{missing}");
        assert_eq!(showing.keeps(0..1), missing == 5);
        if missing == 5 {
            assert_eq!(showing.show(0, 7, &tails), packets, "nothing new");
            // Posted over the tail, then not restored yet, then final.
            showing.took(3);
            showing.took(2);
            assert_eq!(showing.show(0, 7, &tails), packets);
            assert_eq!(tails.lowest_arrived(1), Some(0));
            assert_eq!(showing.show(0, 7, &tails), Ok(Part::Whole));
            assert_eq!(
                showing.post(2),
                Err(PostError::Shown(0)),
                "its headers go over the tail"
            );
            assert_eq!(showing.post(3), Ok(()));
            assert!(showing.keeps(0..3) && !showing.keeps(1..3));
            showing.let_go();
            assert!(!showing.keeps(0..3) && !showing.is_held(), "nobody reads it");
            assert_eq!(showing.post(2), Ok(()));
        }
    }
}

#[test]
fn digests_that_contradict_each_other() {
    let grain = Grain::new(600, 100, WindowShape::new(2).unwrap()).unwrap();
    let mut released = Released::new(grain);
    let mut showing = Showing::new(grain, landing(true, 166));
    // Without windows behind them tails are final.
    let tails = TailRule::new(WindowShape::new(8).unwrap(), 6);
    assert_eq!(
        showing.tell(0, [1].into_iter(), &released),
        Err(TellError::Foreign),
        "not released"
    );
    released.hear(Release::Whole);
    assert_eq!(
        showing.tell(3, [1].into_iter(), &released),
        Err(TellError::Foreign)
    );
    assert_eq!(
        showing.tell(u32::MAX, [1].into_iter(), &released),
        Err(TellError::Foreign)
    );
    assert_eq!(showing.tell(0, [1, 2].into_iter(), &released), Ok(2));
    assert_eq!(showing.tell(0, [1, 2, 3].into_iter(), &released), Ok(1));
    for window in 0..2 {
        showing.in_place(window, 0);
        showing.found(window, u64::from(window) + 1);
    }
    assert_eq!(showing.show(0, 0, &tails), Ok(Part::Whole));
    assert_eq!(
        showing.tell(0, [9, 9].into_iter(), &released),
        Err(TellError::Conflict(2))
    );
    // What is shown stays; of the other one nothing is known any more.
    assert_eq!(showing.show(1, 0, &tails), Err(Awaits::Digest));
    assert_eq!(showing.tell(0, [1, 2].into_iter(), &released), Ok(1));
    assert_eq!(showing.show(1, 0, &tails), Ok(Part::Whole));
}

#[test]
fn messages_end_once() {
    let grain = Grain::new(400, 100, WindowShape::new(2).unwrap()).unwrap();
    let tails = TailRule::new(WindowShape::new(2).unwrap(), 4);
    for (ending, valid_to) in [(Ending::Aborted, 0), (Ending::Whole, 400)] {
        let (mut showing, shown) = (Showing::new(grain, landing(false, 166)), Shown::new(grain, 66));
        assert_eq!(showing.post(4), Err(PostError::Nothing), "no such fragment");
        showing.post(1).unwrap();
        assert!(showing.settle(ending, &shown));
        assert_eq!(shown.valid_to(0), valid_to, "{ending:?}");
        assert!(!showing.settle(Ending::Whole, &shown), "it has ended");
        assert_eq!(shown.valid_to(0), valid_to);
        assert_eq!(showing.post(0), Err(PostError::Nothing));
        showing.took(1);
        showing.in_place(0, 0);
        assert_eq!(
            showing.show(0, 0, &tails),
            Err(Awaits::Packets),
            "nothing is shown any more"
        );
    }
    let quarantine = Quarantine { posted: 5 };
    assert!(!quarantine.is_over(4) && quarantine.is_over(5));
}

proptest! {
    /// Windows as they are counted byte by byte.
    #[test]
    fn windows_are_whole_payloads((grain, len, payload_len, fragments) in any_grain(), at in 0u64..2500) {
        let of = |byte: u64| (byte / u64::from(payload_len)) as u32 / fragments;
        prop_assert_eq!(grain.windows(), of(len - 1) + 1);
        prop_assert_eq!(grain.fragments(), ((len - 1) / u64::from(payload_len)) as u32 + 1);
        for window in 0..grain.windows() + 2 {
            let bytes: Vec<u64> = (0..len).filter(|&byte| of(byte) == window).collect();
            let range = grain.bytes(window);
            prop_assert_eq!(range.clone().collect::<Vec<_>>(), bytes);
            prop_assert_eq!(grain.fragments_of(window), (window * fragments).min(grain.fragments()));
        }
        let ended = (0..grain.windows()).filter(|&window| grain.bytes(window).end <= at).count();
        prop_assert_eq!(grain.windows_before(at), ended as u32);
        prop_assert_eq!(grain.windows_before(len), grain.windows());
    }

    /// A sender never may read what was not written, and a writer never may write what a sender may read.
    #[test]
    fn writers_and_senders_keep_apart(
        (grain, len, ..) in any_grain(),
        steps in proptest::collection::vec((0u8..8, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..60),
    ) {
        let mut writer = Writer::new(grain);
        let (watermark, mut sender) = (Watermark::new(), Released::new(grain));
        let mut written = vec![false; len as usize];
        let mut ended = false;
        for (step, a, b) in steps {
            let (a, b) = (a.index(len as usize + 2) as u64, b.index(len as usize + 2) as u64);
            let released_to = grain.bytes(match sender.release() {
                Release::Windows(windows) => windows,
                Release::Whole => u32::MAX,
                Release::Aborted => 0,
            }).start;
            match step {
                0..=3 => {
                    let start = if step == 0 { a.min(b) } else { writer.written() };
                    let range = start..a.max(b).max(start);
                    if writer.wrote(range.clone()).is_ok() {
                        prop_assert!(!ended && range.end <= len);
                        let is_released = range.start >= released_to || range.is_empty();
                prop_assert!(sender.release() == Release::Aborted || is_released);
                        written[range.start as usize..range.end as usize].fill(true);
                    }
                }
                4 | 5 => if let Ok(release) = writer.release(a) {
                    watermark.publish(release);
                },
                6 => match writer.finish() {
                    Ok(release) => {
                        prop_assert!(!ended && written.iter().all(|&is| is));
                        ended = true;
                        watermark.publish(release);
                    }
                    Err(error) => prop_assert_eq!(error == WriterError::Ended, ended),
                },
                _ if a < 3 => if let Some(release) = writer.abort() {
                    ended = true;
                    watermark.publish(release);
                },
                _ => {}
            }
            let before = sender.fragments();
            prop_assert_ne!(sender.hear(watermark.seen()), Heard::Contradiction);
            prop_assert!(sender.fragments() >= before);
            for position in 0..sender.fragments() {
                let window = (0..).find(|&window| position < grain.fragments_of(window + 1)).unwrap();
                let bytes = grain.bytes(window);
                prop_assert!(written[bytes.start as usize..bytes.end as usize].iter().all(|&is| is));
            }
        }
    }

    /// Whatever announcements come in whatever order: what is released never goes back and never beyond the message.
    #[test]
    fn announcements_from_anywhere((grain, ..) in any_grain(), said in proptest::collection::vec(any::<u32>(), 0..40)) {
        let mut released = Released::new(grain);
        for number in said {
            let number = if number & 1 == 0 { number >> 1 & 0x3f } else { u32::MAX - (number >> 29) };
            let (before, was) = (released.fragments(), released.release());
            let heard = released.hear(Release::from_u32(number));
            prop_assert!(released.fragments() >= before && released.fragments() <= grain.fragments());
            prop_assert_eq!(heard == Heard::More || heard == Heard::Aborted, released.release() != was);
            if was == Release::Aborted || was == Release::Whole {
                prop_assert_eq!(released.release(), was, "an end is final");
            }
        }
    }

    /// No entry is ever posted over what is shown, nothing is shown that a posted entry may write to, and nothing is withheld that is
    /// final.
    #[test]
    fn entries_and_what_is_shown_never_meet(
        (len, shift) in (1u64..3000, 0u32..3),
        extra in prop_oneof![Just(0), 0u32..200],
        steps in proptest::collection::vec((0u8..6, any::<prop::sample::Index>()), 1..120),
    ) {
        let shape = WindowShape::new(1 << shift).unwrap();
        let grain = Grain::new(len, 100, shape).unwrap();
        let count = grain.fragments();
        let mut showing = Showing::new(grain, landing(false, 166 + extra));
        let shown = Shown::new(grain, 66);
        // No tail is overwritten but by entries, of which the bytes know.
        let tails = TailRule::new(WindowShape::whole(count), count);
        let mut bytes = Bytes { entries: Vec::new(), shown: vec![false; len as usize] };
        let mut posted: Vec<u32> = Vec::new();
        let mut landed: Vec<Option<u64>> = vec![None; grain.windows() as usize];
        let (mut received, mut checked) = (0, 0);
        for (step, index) in steps {
            let at = index.index(count as usize) as u32;
            let start = (u64::from(at) * 100).saturating_sub(66);
            let range = start..(u64::from(at) * 100 + 100 + u64::from(extra)).min(len);
            let window = shape.window_of(at);
            match step {
                0 | 1 => {
                    let is_over = bytes.shown[range.start as usize..range.end as usize].iter().any(|&is| is);
                    let result = showing.post(at);
                    prop_assert!(!is_over || result.is_err());
                    // Parts are refused or taken as wholes: one shown byte of a part is all of it.
                    prop_assert_eq!(is_over, result.is_err());
                    if result.is_ok() {
                        posted.push(at);
                        bytes.entries.push(range);
                    }
                }
                2 => if !posted.is_empty() {
                    let taken = index.index(posted.len());
                    showing.took(posted.remove(taken));
                    bytes.entries.remove(taken);
                },
                3 => {
                    received += 1;
                    showing.in_place(window, received);
                    landed[window as usize].get_or_insert(received);
                }
                4 => checked = received,
                _ => {
                    let is_paired = landed[window as usize].is_some_and(|landed| landed <= checked);
                    if let Ok(part) = showing.show(window, checked, &tails) {
                        shown.publish(window, part);
                        prop_assert!(is_paired);
                    }
                    let whole = grain.bytes(window);
                    let meets = |entry: &Range<u64>| entry.start < whole.end && whole.start < entry.end;
                    if is_paired && !bytes.entries.iter().any(meets) {
                        prop_assert_eq!(shown.check(whole), Ok(()));
                    }
                }
            }
            let valid: Vec<Range<u64>> = shown.valid().collect();
            for byte in valid.into_iter().flatten() {
                bytes.shown[byte as usize] = true;
                prop_assert!(!bytes.entries.iter().any(|entry| entry.contains(&byte)), "byte {byte}");
            }
        }
    }

    /// Ranges, and how far they go, as a reader counts them.
    #[test]
    fn valid_ranges_are_those_of_all_bytes(
        (len, shift) in (1u64..3000, 0u32..3),
        parts in proptest::collection::vec(0u8..3, 30),
        from in 0u64..3100,
        to in 0u64..3100,
    ) {
        let grain = Grain::new(len, 100, WindowShape::new(1 << shift).unwrap()).unwrap();
        let shown = Shown::new(grain, 66);
        let mut is_valid = vec![false; len as usize + 1];
        for window in 0..grain.windows() {
            let part = [Part::Nothing, Part::Body, Part::Whole][usize::from(parts[window as usize % 30])];
            shown.publish(window, part);
            let bytes = grain.bytes(window);
            let end = match part {
                Part::Nothing => bytes.start,
                Part::Body if window + 1 < grain.windows() => bytes.end - 66,
                _ => bytes.end,
            };
            is_valid[bytes.start as usize..end as usize].fill(true);
        }
        let ranges: Vec<Range<u64>> = shown.valid().collect();
        prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        let counted: Vec<u64> = ranges.into_iter().flatten().collect();
        let all: Vec<u64> = (0..len).filter(|&byte| is_valid[byte as usize]).collect();
        prop_assert_eq!(counted, all);
        let valid_to = (from..).find(|&byte| !is_valid.get(byte as usize).copied().unwrap_or(false)).unwrap();
        prop_assert_eq!(shown.valid_to(from), valid_to);
        let expected = if to > valid_to { Err(NotValid { valid_to }) } else { Ok(()) };
        prop_assert_eq!(shown.check(from..to), expected);
    }
}
