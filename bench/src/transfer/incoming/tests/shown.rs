//! Messages that are written while they arrive.

use super::*;

impl Bed {
    /// These ranges of message `index` of the transfer are shown. Whether some of it was written.
    fn show(&mut self, index: u32, message: &[u8], shown: impl IntoIterator<Item = Range<u64>>) -> bool {
        let get = |range: Range<u64>| message.get(range.start as usize..range.end as usize);
        let name = (ID.data_tag(index), message.len() as u64);
        (self.receiver).on_shown(1, name, shown.into_iter(), get, self.now, &mut || true)
    }

    /// What is there of the one file that is written.
    fn part(&self) -> Vec<u8> {
        let [name] = &self.files()[..] else {
            panic!("{:?}", self.files())
        };
        fs::read(self.scratch.path().join(name)).unwrap()
    }
}

/// START of a file that has a name, of 30 bytes.
fn start_of_file(number: u32, resume: bool) -> Control {
    let mut start = start_of(TransferId::new(number).unwrap(), Some(30), 10);
    if let Control::Start {
        key, resume: again, ..
    } = &mut start
    {
        (*key, *again) = (Some(1), resume);
    }
    start
}

#[test]
fn what_is_shown_is_written_once_and_counts_when_the_message_is_whole() {
    let mut bed = Bed::new();
    bed.receiver = bed.receiver.max_bytes(20);
    bed.say(&start(Some(20), 10));
    let shown = [2..4, 5..8];
    assert!(bed.show(1, b"klmnopqrst", shown.clone()));
    assert!(bed.show(1, b"klmnopqrst", shown.clone()));
    assert!(!bed.show(1, b"klmnopqrst", shown.clone()));
    assert_eq!(bed.part(), b"\0\0\0\0\0\0\0\0\0\0\0\0mn\0pqr");
    let totals = bed.receiver.totals();
    assert_eq!(
        (totals.bytes, totals.messages, bed.receiver.shown_bytes()),
        (0, 0, 5)
    );
    assert!(bed.show(1, b"klmnopqrst", Some(1..9)));
    assert!(bed.show(1, b"klmnopqrst", Some(1..9)));
    assert!(bed.show(1, b"klmnopqrst", Some(1..9)));
    assert!(!bed.show(1, b"klmnopqrst", Some(1..9)));
    // What is written is not written again: of these bytes only those that were not.
    assert_eq!(bed.data(1, b"K********T"), []);
    assert_eq!((bed.receiver.totals().bytes, bed.receiver.shown_bytes()), (10, 0));
    assert!(!bed.show(1, b"klmnopqrst", Some(0..10)), "it has come");
    assert_eq!(bed.data(0, b"abcdefghij"), [result(Status::Complete, 20, 2)]);
    assert_eq!(bed.part(), b"abcdefghijKlmnopqrsT");
    assert_eq!(bed.receiver.quota.taken, 20);
}

#[test]
fn what_would_be_refused_is_not_written_before() {
    let mut bed = Bed::new();
    bed.receiver = bed.receiver.max_bytes(25);
    let ten = b"abcdefghij";
    assert!(!bed.show(0, ten, Some(0..10)), "an unknown transfer");
    bed.say(&start(None, 10));
    bed.data(1, b"klmnopqrst");
    let before = bed.part();
    assert!(!bed.show(1, ten, Some(0..10)), "it has come");
    assert!(!bed.show(0, b"abc", Some(0..3)), "only the last is short");
    assert!(!bed.show(0, b"abcdefghijk", Some(0..3)), "too long");
    assert!(!bed.show(2000, ten, Some(0..10)), "too far ahead");
    assert!(!bed.show(0, ten, None), "nothing");
    assert!(
        !bed.show(0, ten, [10..20, Range { start: 5, end: 4 }]),
        "behind it, and none"
    );
    let none = |_: Range<u64>| None;
    let short = |_: Range<u64>| Some(&b"a"[..]);
    let (name, all) = ((ID.data_tag(0), 10), std::iter::once(0..10));
    for get in [none, short] {
        assert!(!(bed.receiver).on_shown(1, name, all.clone(), get, bed.now, &mut || true));
    }
    let get = |_: Range<u64>| Some(&ten[..]);
    assert!(
        !(bed.receiver).on_shown(2, name, all, get, bed.now, &mut || true),
        "another peer"
    );
    assert_eq!(bed.part(), before);

    assert!(bed.show(0, ten, Some(0..6)));
    assert!(!bed.show(2, ten, Some(0..1)), "all of it would be too much");
    assert!(bed.show(2, b"uvwxy", Some(0..1)));
    assert!(!bed.show(2, b"uvwx", Some(1..2)), "two lengths");
    // Of what lies behind the message nothing is asked for.
    let get = |range: Range<u64>| {
        assert_eq!(range, 1..5);
        None
    };
    let name = (ID.data_tag(2), 5);
    (bed.receiver).on_shown(1, name, std::iter::once(1..20), get, bed.now, &mut || true);
    assert_eq!(status_of(&bed.data(2, b"uvwx")), Status::Inconsistent);
    assert_eq!(bed.receiver.quota.taken, 0);
    assert!(bed.files().is_empty());
}

#[test]
fn a_message_that_the_sender_does_not_count_makes_no_file() {
    let mut bed = Bed::new();
    bed.say(&start(None, 10));
    assert!(bed.show(1, b"klmnopqrst", Some(0..5)));
    bed.data(0, b"abcdefghij");
    assert_eq!(status_of(&bed.say(&end(10, 1))), Status::Inconsistent);
    assert!(bed.files().is_empty());
}

#[test]
fn a_disk_that_fails_ends_the_transfer_early() {
    let scratch = Scratch::new("incoming-full-early");
    let output = Output::new(Path::new("/dev/full"), false).unwrap();
    let mut bed = Bed::with(scratch, output, &[]);
    bed.say(&start(Some(20), 10));
    assert!(bed.show(0, b"abcdefghij", Some(0..3)));
    assert_eq!(status_of(&bed.answers()), Status::WriteFailed);
}

/// A stream cannot be written but from the first byte to the last.
#[test]
fn of_a_stream_only_what_comes_next_is_written() {
    let scratch = Scratch::new("incoming-stream-early");
    let path = scratch.path().join("fifo");
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, 0o600.into(), 0).unwrap();
    let reader = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let read = |len: usize| {
        let mut got = vec![0; len];
        std::io::Read::read_exact(&mut &reader, &mut got).unwrap();
        got
    };
    let mut bed = Bed::with(scratch, Output::new(&path, false).unwrap(), &[]);
    bed.say(&start(Some(25), 10));
    let messages = [&b"abcdefghij"[..], b"klmnopqrst", b"uvwxy"];
    assert!(!bed.show(1, messages[1], Some(0..5)), "out of turn");
    assert!(!bed.show(0, messages[0], Some(2..10)), "not the beginning");
    assert!(bed.show(0, messages[0], [0..3, 5..10]));
    assert!(!bed.show(0, messages[0], [0..3, 5..10]));
    assert_eq!(read(3), b"abc");
    assert_eq!(bed.data(1, messages[1]), []);
    assert_eq!(bed.data(0, messages[0]), []);
    assert_eq!(read(17), b"defghijklmnopqrst");
    assert!(bed.show(2, messages[2], Some(0..4)));
    assert_eq!(bed.data(2, messages[2]), [result(Status::Complete, 25, 3)]);
    assert_eq!(read(5), b"uvwxy");
}

/// What is kept of a transfer that broke ends where the last whole message does.
#[test]
fn nobody_goes_on_in_the_middle_of_a_message() {
    let mut bed = Bed::new();
    bed.receiver = bed.receiver.max_bytes(30);
    bed.say(&start_of_file(7, false));
    assert!(bed.show(2, b"uvwxyzabcd", Some(0..7)));
    assert_eq!(status_of(&bed.say(&abort())), Status::Aborted);
    assert!(bed.files().is_empty() && bed.receiver.quota.taken == 0);

    let get = |range: Range<u64>| Some(&b"klmnopqrst"[range.start as usize..range.end as usize]);
    bed.say(&start_of_file(8, false));
    let transfer = TransferId::new(8).unwrap();
    bed.message(transfer.data_tag(0), b"abcdefghij".to_vec());
    let name = (transfer.data_tag(1), 10);
    assert!((bed.receiver).on_shown(1, name, std::iter::once(2..7), get, bed.now, &mut || true));
    assert_eq!(bed.part().len(), 17);
    bed.receiver.on_incomplete(1, "gone", bed.now);
    bed.answers();
    assert_eq!(bed.part(), b"abcdefghij");
    assert_eq!(bed.receiver.quota.taken, 10);

    // What is there is compared first: nothing is written over it meanwhile.
    let (transfer, held) = (TransferId::new(9).unwrap(), 10);
    assert_eq!(
        bed.say(&start_of_file(9, true)),
        [Control::Ready { transfer, held }]
    );
    let name = (transfer.data_tag(0), 10);
    assert!(!(bed.receiver).on_shown(1, name, std::iter::once(0..7), get, bed.now, &mut || true));
    assert_eq!(bed.part(), b"abcdefghij");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is shown of whichever message, in any order and beside what is none of it: the file, and what is counted, are as without.
    #[test]
    fn a_transfer_is_the_same_whatever_is_shown(
        len in 1u64..200,
        message_len in 1u64..100,
        is_known in any::<bool>(),
        steps in proptest::collection::vec((0u8..8, any::<u32>(), 0u64..110, 0u64..110, 0u64..110), 0..200),
        order in any::<u64>(),
    ) {
        let content: Vec<u8> = (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let messages: Vec<&[u8]> = content.chunks(message_len as usize).collect();
        let mut left: Vec<usize> = (0..messages.len()).collect();
        let mut bed = Bed::new();
        bed.receiver = bed.receiver.max_bytes(len);
        bed.say(&start(is_known.then_some(len), message_len));
        let mut written = 0;
        for (kind, which, a, b, c) in steps {
            let at = which as usize % left.len().max(1);
            match kind {
                // All but the last message come; the last one ends the transfer.
                0 if left.len() > 1 => {
                    let index = left.swap_remove(at);
                    prop_assert_eq!(bed.data(index as u32, messages[index]), []);
                    written += messages[index].len() as u64;
                }
                1..6 if !left.is_empty() => {
                    let index = left[at];
                    bed.show(index as u32, messages[index], [a..b, b..c, c..a]);
                }
                // Of a message that has come, or is not of the plan.
                6 => {
                    let junk = vec![0x5a; message_len as usize + 1];
                    prop_assert!(!bed.show(which % 8, &junk, [a..b, b..c]));
                }
                _ => {
                    let tag = TransferId::new(8).unwrap().data_tag(which % 4);
                    let get = |range: Range<u64>| content.get(range.start as usize..range.end as usize);
                    let shown = [a..b, b..c].into_iter();
                    prop_assert!(!(bed.receiver).on_shown(1, (tag, message_len), shown, get, bed.now, &mut || true));
                }
            }
            let receiver = &bed.receiver;
            prop_assert_eq!(receiver.totals().bytes, written);
            prop_assert_eq!(receiver.quota.taken, written + receiver.shown_bytes());
            prop_assert!(receiver.active[0].shown.len() <= left.len());
        }
        let mut answers = Vec::new();
        while !left.is_empty() {
            let index = left.swap_remove(order as usize % left.len());
            answers = bed.data(index as u32, messages[index]);
        }
        if !is_known {
            answers = bed.say(&end(len, messages.len() as u64));
        }
        prop_assert_eq!(answers, [result(Status::Complete, len, messages.len() as u64)]);
        prop_assert!(bed.part() == content);
        let totals = bed.receiver.totals();
        prop_assert_eq!((totals.bytes, totals.messages), (len, messages.len() as u64));
        prop_assert_eq!((totals.transfers, totals.failed_transfers, bed.receiver.is_idle()), (1, 0, true));
        prop_assert_eq!(bed.receiver.quota.taken, len);
    }
}
