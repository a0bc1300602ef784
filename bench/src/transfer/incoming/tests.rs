//! Tests of [`super`]: a receiver fed by hand, with files in a scratch directory.

use super::*;
use crate::scratch::Scratch;
use crate::transfer::wire::DIGESTS_MAX;
use proptest::prelude::*;
use std::fs;
use std::ops::Range;
use std::path::Path;

mod shown;

const FROM: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const ID: TransferId = TransferId::new(7).unwrap();
const PATIENCE: Duration = Duration::from_secs(10);
const READY: Control = Control::Ready {
    transfer: ID,
    held: 0,
};

struct Bed {
    scratch: Scratch,
    receiver: Receiver<u32, Vec<u8>>,
    now: Instant,
}

impl Bed {
    fn new() -> Self {
        let scratch = Scratch::new("incoming");
        let output = Output::new(scratch.path(), false).unwrap();
        Self::with(scratch, output, &[])
    }

    fn with(scratch: Scratch, output: Output, allow: &[&str]) -> Self {
        let allow = allow.iter().map(|text| text.parse().unwrap()).collect();
        let policy = Policy {
            allow,
            max_message_len: 100,
        };
        Bed {
            scratch,
            receiver: Receiver::new(output, policy),
            now: Instant::now(),
        }
    }

    fn say(&mut self, control: &Control) -> Vec<Control> {
        self.message(CONTROL_TAG, control.encode());
        self.answers()
    }

    fn message(&mut self, tag: u64, bytes: Vec<u8>) -> Taken {
        self.receiver
            .on_message(1, FROM, tag, bytes, self.now, &mut || true)
    }

    fn data(&mut self, index: u32, bytes: &[u8]) -> Vec<Control> {
        assert_eq!(self.message(ID.data_tag(index), bytes.to_vec()), Taken::Data);
        self.answers()
    }

    fn answers(&mut self) -> Vec<Control> {
        std::iter::from_fn(|| self.receiver.take_reply())
            .map(|(_, control)| control)
            .collect()
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.scratch.path()).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

fn start(total_len: Option<u64>, message_len: u64) -> Control {
    start_of(ID, total_len, message_len)
}

fn start_of(transfer: TransferId, total_len: Option<u64>, message_len: u64) -> Control {
    Control::Start {
        transfer,
        ipfrag: false,
        plan: Plan {
            total_len,
            message_len,
        },
        key: None,
        resume: false,
    }
}

fn abort() -> Control {
    Control::End {
        transfer: ID,
        status: Status::Aborted,
        bytes: 0,
        messages: 0,
    }
}

fn end(bytes: u64, messages: u64) -> Control {
    Control::End {
        transfer: ID,
        status: Status::Complete,
        bytes,
        messages,
    }
}

fn result(status: Status, bytes: u64, messages: u64) -> Control {
    Control::Result {
        transfer: ID,
        status,
        bytes,
        messages,
        text: String::new(),
    }
}

fn status_of(answers: &[Control]) -> Status {
    match answers {
        [Control::Result { status, .. }] => *status,
        other => panic!("not one RESULT: {other:?}"),
    }
}

fn refusal_of(answers: &[Control]) -> Refusal {
    match answers {
        [Control::Refused { refusal, text, .. }] => {
            assert!(text.contains("; "), "no remedy: {text}");
            *refusal
        }
        other => panic!("not one REFUSED: {other:?}"),
    }
}

#[test]
fn repeated_questions_have_the_same_answers() {
    let mut bed = Bed::new();
    for _ in 0..2 {
        assert_eq!(bed.say(&start(Some(3), 10)), [READY]);
    }
    assert_eq!(bed.files().len(), 1);
    let done = result(Status::Complete, 3, 1);
    for answers in [
        bed.data(0, b"abc"),
        bed.say(&end(3, 1)),
        bed.say(&start(Some(3), 10)),
    ] {
        assert_eq!(answers, std::slice::from_ref(&done));
    }
    assert_eq!(bed.files(), ["transfer-000001"]);
    // Data that comes after the end is a stray, not a new file.
    assert_eq!(bed.message(ID.data_tag(0), b"abc".to_vec()), Taken::Stray);
}

#[test]
fn an_unknown_length_ends_with_end_in_any_order() {
    for end_first in [false, true] {
        let mut bed = Bed::new();
        bed.say(&start(None, 10));
        bed.data(0, b"abcdefghij");
        let answers = if end_first {
            assert_eq!(bed.say(&end(12, 2)), [Control::Alive { transfer: ID }]);
            bed.data(1, b"kl")
        } else {
            assert_eq!(bed.data(1, b"kl"), []);
            bed.say(&end(12, 2))
        };
        assert_eq!(answers, [result(Status::Complete, 12, 2)]);
        assert_eq!(
            fs::read(bed.scratch.path().join("transfer-000001")).unwrap(),
            b"abcdefghijkl"
        );
    }
}

#[test]
fn refusals() {
    let mut bed = Bed::new();
    assert_eq!(refusal_of(&bed.say(&start(Some(1000), 101))), Refusal::TooLarge);
    assert_eq!(refusal_of(&bed.say(&start(None, 101))), Refusal::TooLarge);
    // A file shorter than the message size makes one shorter message.
    assert_eq!(bed.say(&start(Some(100), 1 << 20)), [READY]);
    assert_eq!(
        bed.message(CONTROL_TAG, start(Some(10), 0).encode()),
        Taken::Control
    );
    assert_eq!(refusal_of(&bed.answers()), Refusal::Malformed);

    let mut old = start(Some(1), 1).encode();
    old[4] = 1;
    assert_eq!(bed.message(CONTROL_TAG, old), Taken::Control);
    assert_eq!(refusal_of(&bed.answers()), Refusal::Version);

    let scratch = Scratch::new("incoming-allow");
    let output = Output::new(scratch.path(), false).unwrap();
    let mut bed = Bed::with(scratch, output, &["192.0.2.0/24"]);
    assert_eq!(refusal_of(&bed.say(&start(Some(1), 1))), Refusal::NotAllowed);
    assert!(matches!(
        bed.receiver.take_event(),
        Some(Event::Refused { from: FROM, .. })
    ));
    assert!(bed.files().is_empty() && bed.receiver.is_idle());
}

#[test]
fn an_existing_file_is_refused_and_one_output_takes_one_transfer() {
    let scratch = Scratch::new("incoming-file");
    let path = scratch.path().join("x");
    let output = Output::new(&path, false).unwrap();
    let mut bed = Bed::with(scratch, output, &[]);
    bed.say(&start(Some(3), 10));
    let other = start(Some(3), 10).encode();
    bed.receiver
        .on_message(2, FROM, CONTROL_TAG, other, bed.now, &mut || true);
    assert_eq!(refusal_of(&bed.answers()), Refusal::Busy);
    bed.data(0, b"abc");
    let next = TransferId::new(8).unwrap();
    let again = start_of(next, Some(3), 10);
    assert_eq!(refusal_of(&bed.say(&again)), Refusal::Exists);
    assert_eq!(fs::read(path).unwrap(), b"abc");
}

#[test]
fn what_ends_a_transfer_leaves_no_file() {
    type Step = fn(&mut Bed) -> Status;
    let steps: [(&str, Step); 8] = [
        ("abort", |bed| status_of(&bed.say(&abort()))),
        ("wrong length", |bed| status_of(&bed.data(1, b"short"))),
        ("twice", |bed| status_of(&bed.data(0, b"abcdefghij"))),
        ("past the end", |bed| status_of(&bed.data(9, b"abcdefghij"))),
        ("wrong count", |bed| status_of(&bed.say(&end(20, 2)))),
        ("incomplete", |bed| {
            bed.receiver.on_incomplete(
                1,
                "fragments 3 to 5 of message 1 are missing; send again",
                bed.now,
            );
            status_of(&bed.answers())
        }),
        ("silence", |bed| {
            bed.now += PATIENCE;
            bed.receiver.poll_timeout(bed.now, PATIENCE);
            // It is asked whether it is there.
            assert_eq!(bed.answers(), [Control::Alive { transfer: ID }]);
            bed.now += Duration::from_millis(1);
            bed.receiver.poll_timeout(bed.now, PATIENCE);
            status_of(&bed.answers())
        }),
        ("stop", |bed| {
            bed.receiver.stop(bed.now);
            status_of(&bed.answers())
        }),
    ];
    for (name, step) in steps {
        let mut bed = Bed::new();
        bed.say(&start(Some(30), 10));
        bed.data(0, b"abcdefghij");
        assert_eq!(bed.files().len(), 1, "{name}");
        let status = step(&mut bed);
        assert_ne!(status, Status::Complete, "{name}");
        assert!(bed.files().is_empty(), "{name}");
        assert_eq!(bed.receiver.totals().failed_transfers, 1, "{name}");
        // The number is free again.
        let next = TransferId::new(8).unwrap();
        bed.say(&start_of(next, Some(1), 1));
        bed.message(next.data_tag(0), b"x".to_vec());
        assert_eq!(bed.files(), ["transfer-000001"], "{name}");
    }
}

#[test]
fn alive_keeps_a_slow_transfer() {
    let mut bed = Bed::new();
    bed.say(&start(None, 10));
    for _ in 0..5 {
        bed.now += PATIENCE;
        assert_eq!(bed.say(&Control::Alive { transfer: ID }), []);
        bed.receiver.poll_timeout(bed.now, PATIENCE);
    }
    assert!(!bed.receiver.is_idle());
    // Nothing that is said to it arrives.
    bed.receiver.on_gone(1, bed.now);
    assert!(bed.receiver.is_idle());
}

#[test]
fn a_new_transfer_replaces_the_senders_old_one() {
    let mut bed = Bed::new();
    bed.say(&start(None, 10));
    let next = TransferId::new(8).unwrap();
    let answers = bed.say(&start_of(next, Some(1), 1));
    assert_eq!(status_of(&answers[..1]), Status::Aborted);
    assert_eq!(
        answers[1],
        Control::Ready {
            transfer: next,
            held: 0
        }
    );
    assert_eq!(bed.files().len(), 1);
}

#[test]
fn an_unknown_transfers_end_is_answered() {
    let mut bed = Bed::new();
    assert_eq!(status_of(&bed.say(&end(1, 1))), Status::Unknown);
}

#[test]
fn a_stream_keeps_a_bounded_number_of_early_messages() {
    let scratch = Scratch::new("incoming-early");
    let output = Output::new(Path::new("/dev/null"), false).unwrap();
    let mut bed = Bed::with(scratch, output, &[]);
    bed.say(&start(None, 1));
    for index in 1..=EARLY_MAX as u32 {
        assert_eq!(bed.data(index, b"x"), []);
    }
    assert_eq!(
        status_of(&bed.data(EARLY_MAX as u32 + 1, b"x")),
        Status::Inconsistent
    );
}

#[test]
fn a_write_that_fails_ends_the_transfer() {
    let scratch = Scratch::new("incoming-full");
    let output = Output::new(Path::new("/dev/full"), false).unwrap();
    let mut bed = Bed::with(scratch, output, &[]);
    bed.say(&start(Some(20), 10));
    assert_eq!(status_of(&bed.data(0, b"abcdefghij")), Status::WriteFailed);
}

#[test]
fn strangers_cannot_touch_a_transfer() {
    let mut bed = Bed::new();
    bed.say(&start(Some(3), 10));
    for (tag, bytes) in [
        (ID.data_tag(0), b"xyz".to_vec()),
        (CONTROL_TAG, end(3, 1).encode()),
        (CONTROL_TAG, abort().encode()),
        (CONTROL_TAG, READY.encode()),
        (CONTROL_TAG, b"noise".to_vec()),
        (0, Vec::new()),
    ] {
        bed.receiver
            .on_message(2, FROM, tag, bytes, bed.now, &mut || true);
    }
    bed.answers();
    assert_eq!(bed.data(0, b"abc"), [result(Status::Complete, 3, 1)]);
    assert_eq!(
        (
            bed.receiver.totals().stray_data,
            bed.receiver.totals().stray_control
        ),
        (2, 2)
    );
}

/// Transfers that end as soon as they have begun, of one address and then of hundreds: of all that is remembered each has
/// a share.
#[test]
fn what_is_over_is_remembered_within_bounds() {
    let mut bed = Bed::new();
    let mut len = |numbers: Range<u32>, address: fn(u32) -> u32| {
        for number in numbers {
            let from = Ipv4Addr::from_bits(address(number));
            for control in [start(None, 10), abort()] {
                let bytes = control.encode();
                (bed.receiver).on_message(number, from, CONTROL_TAG, bytes, bed.now, &mut || true);
            }
        }
        let Receiver {
            ended,
            wasted,
            replies,
            events,
            ..
        } = &bed.receiver;
        [ended.len(), wasted.len(), replies.len(), events.len()]
    };
    assert_eq!(len(0..300, |_| 1), [128, 256, 256, 256]);
    assert_eq!(len(300..5000, |number| number / 20), [256, 4096, 256, 256]);
}

/// Four addresses begin more transfers than there are places and ask for all that is there, again and again, and for more blocks than an
/// answer has: one question for each place is worked at, and each answer has what one may have.
#[test]
fn questions_are_one_a_transfer_and_answers_have_their_length() {
    let scratch = Scratch::new("incoming-questions");
    let sources = (0..16).map(|key| Source {
        from: Ipv4Addr::from_bits(FROM.to_bits() + key % 4),
        key: key.into(),
    });
    let sources: Vec<Source> = sources.collect();
    for source in &sources {
        fs::write(scratch.path().join(format!(".{source}")), [0; 100]).unwrap();
    }
    let output = Output::new(scratch.path(), false).unwrap();
    let mut bed = Bed::with(scratch, output, &[]);
    let plan = Plan {
        total_len: Some(1000),
        message_len: 10,
    };
    let mut answers = Vec::new();
    for (peer, source) in (0..).zip(sources.iter().cycle().take(64)) {
        let transfer = TransferId::new(peer + 1).unwrap();
        let begin = Control::Start {
            transfer,
            ipfrag: false,
            plan,
            key: Some(source.key),
            resume: true,
        };
        let check = |blocks| Control::Check {
            transfer,
            offset: 0,
            block_len: 1,
            end: blocks,
        };
        for control in [begin, check(12), check(13), check(12)] {
            (bed.receiver).on_message(
                peer,
                source.from,
                CONTROL_TAG,
                control.encode(),
                bed.now,
                &mut || true,
            );
        }
        let asked = bed.receiver.active.iter().filter(|one| one.question.is_some());
        assert_eq!(asked.count(), 16.min(peer as usize + 1));
        answers.extend(bed.answers());
    }
    while bed.receiver.is_waiting() {
        bed.receiver.poll_timeout(bed.now, PATIENCE);
        answers.extend(bed.answers());
    }
    let digests = answers.iter().filter_map(|it| match it {
        Control::Digests { digests, .. } => Some(digests.len()),
        _ => None,
    });
    assert_eq!(digests.collect::<Vec<_>>(), [DIGESTS_MAX; 16]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Random, almost valid conversations: never a panic, bounded memory, and a file only for what is complete.
    #[test]
    fn hostile_conversations(
        steps in proptest::collection::vec(
            (0u32..3, 1u32..4, 0u8..13, 0u64..40, 0u64..12, proptest::collection::vec(any::<u8>(), 0..60)),
            0..120,
        ),
    ) {
        let scratch = Scratch::new("incoming-hostile");
        let mut output = Output::new(scratch.path(), false).unwrap();
        output.fsync = true;
        let mut bed = Bed::with(scratch, output, &[]);
        for (peer, number, kind, a, b, noise) in steps {
            let transfer = TransferId::new(number).unwrap();
            let status = if a % 3 == 0 { Status::Aborted } else { Status::Complete };
            if kind >= 10 {
                // The last of them lies behind the message, and the first is none.
                let shown = [b..b / 2, b / 2..b, b + 1..a, 3 * a..u64::MAX];
                let get = |range: Range<u64>| noise.get(..(range.end - range.start) as usize);
                let tag = transfer.data_tag(a as u32 % 5);
                bed.receiver.on_shown(peer, (tag, b), shown.into_iter(), get, bed.now, &mut || true);
                continue;
            }
            let (tag, bytes) = match kind {
                0 => match Plan::new((a % 4 > 0).then_some(a), b) {
                    Some(plan) => (CONTROL_TAG, Control::Start {
                        transfer,
                        ipfrag: a % 2 == 0,
                        plan,
                        key: (a % 3 > 0).then_some(b),
                        resume: a % 5 > 0,
                    }.encode()),
                    None => (CONTROL_TAG, noise),
                },
                1 => (CONTROL_TAG, Control::End { transfer, status, bytes: a, messages: b }.encode()),
                2 => (CONTROL_TAG, Control::Alive { transfer }.encode()),
                3 => (CONTROL_TAG, [&b"LMtr\x03"[..], &noise].concat()),
                4 => (a << 32 | b, noise),
                5 => (CONTROL_TAG, Control::Begin { transfer, first: b }.encode()),
                6 => (CONTROL_TAG, Control::Check { transfer, offset: b, block_len: 1 + a / 4, end: a + b }.encode()),
                _ => (transfer.data_tag(a as u32 % 5), vec![0x5a; b as usize]),
            };
            bed.now += Duration::from_millis(a * 100);
            bed.receiver.on_message(peer, FROM, tag, bytes, bed.now, &mut || true);
            bed.receiver.poll_timeout(bed.now, PATIENCE);
            let Receiver { active, closing, replies, .. } = &bed.receiver;
            prop_assert!(active.len() + closing.len() <= 8 && replies.len() <= 3 * REPLIES_MAX.1);
            prop_assert!(bed.receiver.active.iter().all(|one| one.early.len() <= AHEAD_MAX && one.shown.len() <= 5));
        }
        bed.receiver.stop(bed.now);
        let complete = bed.receiver.totals().transfers as usize;
        // Each of the keys 0 to 11 may have left a part, and one address keeps half of them.
        let (parts, files): (Vec<_>, Vec<_>) = bed.files().into_iter().partition(|name| name.ends_with(".part"));
        prop_assert_eq!(files.len(), complete);
        prop_assert!(files.iter().all(|name| name.starts_with("transfer-")));
        prop_assert!(parts.len() <= 8);
    }
}
