use super::*;
use proptest::prelude::*;

const ID: TransferId = TransferId::new(7).unwrap();
const PATIENCE: Duration = Duration::from_secs(10);

fn outgoing(total_len: Option<u64>, now: Instant) -> Outgoing {
    Outgoing::new(ID, Plan::new(total_len, 10).unwrap(), false, now)
}

fn ready(outgoing: &mut Outgoing, now: Instant) {
    outgoing.handle(
        Control::Ready {
            transfer: ID,
            held: 0,
        },
        now,
    );
}

fn result(status: Status, bytes: u64, messages: u64) -> Control {
    Control::Result {
        transfer: ID,
        status,
        bytes,
        messages,
        text: "why; what to do".into(),
    }
}

#[test]
fn a_file_goes_piece_by_piece() {
    let now = Instant::now();
    let mut outgoing = outgoing(Some(25), now);
    assert_eq!(outgoing.next_piece(), None);
    assert!(matches!(outgoing.poll_control(now), Some(Control::Start { .. })));
    assert_eq!(outgoing.poll_control(now), None);
    ready(&mut outgoing, now);
    for (index, offset, len) in [(0, 0, 10), (1, 10, 10), (2, 20, 5)] {
        let piece = Piece {
            tag: ID.data_tag(index),
            offset,
            len,
        };
        assert_eq!(outgoing.next_piece(), Some(piece));
        outgoing.handed(len, now);
    }
    assert_eq!(outgoing.next_piece(), None);
    assert_eq!(
        outgoing.poll_control(now),
        None,
        "the receiver sees the end by itself"
    );
    assert_eq!(outgoing.outcome(), None, "handed over is not delivered");
    let later = now + REPEAT_EVERY;
    assert_eq!(
        outgoing.poll_control(later),
        Some(Control::End {
            transfer: ID,
            status: Status::Complete,
            bytes: 25,
            messages: 3
        })
    );
    outgoing.handle(result(Status::Complete, 25, 3), later);
    assert_eq!(outgoing.outcome(), Some(&Outcome::Complete));
    assert_eq!(outgoing.abort(), None);
}

#[test]
fn standard_input_ends_with_end() {
    let now = Instant::now();
    let mut outgoing = outgoing(None, now);
    ready(&mut outgoing, now);
    outgoing.handed(10, now);
    assert_eq!(
        outgoing.next_piece(),
        Some(Piece {
            tag: ID.data_tag(1),
            offset: 10,
            len: 10
        })
    );
    outgoing.handed(3, now);
    outgoing.input_ended(now);
    let end = Control::End {
        transfer: ID,
        status: Status::Complete,
        bytes: 13,
        messages: 2,
    };
    assert_eq!(outgoing.poll_control(now), Some(end.clone()));
    assert_eq!(outgoing.poll_control(now + REPEAT_EVERY), Some(end));
}

#[test]
fn start_is_repeated_and_given_up() {
    let now = Instant::now();
    let mut outgoing = outgoing(Some(25), now);
    let mut asked = 0;
    for second in 0..=10 {
        let now = now + Duration::from_secs(second);
        outgoing.poll_timeout(now, PATIENCE);
        asked += u32::from(outgoing.poll_control(now).is_some());
    }
    assert_eq!(asked, 11);
    outgoing.poll_timeout(now + PATIENCE + Duration::from_millis(1), PATIENCE);
    assert_eq!(outgoing.outcome(), Some(&Outcome::Silent));
}

#[test]
fn a_busy_receiver_is_waited_for() {
    let mut now = Instant::now();
    let mut outgoing = outgoing(Some(10), now);
    ready(&mut outgoing, now);
    outgoing.handed(10, now);
    for _ in 0..5 {
        now += PATIENCE;
        outgoing.handle(Control::Alive { transfer: ID }, now);
        outgoing.poll_timeout(now, PATIENCE);
    }
    assert_eq!(outgoing.outcome(), None);
}

#[test]
fn a_slow_input_says_alive() {
    let now = Instant::now();
    let mut outgoing = outgoing(None, now);
    ready(&mut outgoing, now);
    let later = now + REPEAT_EVERY;
    assert_eq!(
        outgoing.poll_control(later),
        Some(Control::Alive { transfer: ID })
    );
    outgoing.poll_timeout(now + 100 * PATIENCE, PATIENCE);
    assert_eq!(
        outgoing.outcome(),
        None,
        "while sending, the endpoint watches the peer"
    );
}

#[test]
fn bad_ends() {
    let now = Instant::now();
    let refused = Control::Refused {
        transfer: ID,
        refusal: Refusal::Exists,
        text: "x".into(),
    };
    let mut asking = outgoing(Some(20), now);
    asking.handle(refused.clone(), now);
    assert!(matches!(
        asking.outcome(),
        Some(Outcome::Refused {
            refusal: Refusal::Exists,
            ..
        })
    ));

    // A receiver that claims more, less or earlier than it can have is not believed.
    for (handed, claim) in [
        (20, (10, 1)),
        (20, (20, 1)),
        (20, (30, 3)),
        (10, (10, 1)),
        (10, (20, 2)),
    ] {
        let mut sending = outgoing(Some(20), now);
        ready(&mut sending, now);
        sending.handle(refused.clone(), now);
        for _ in 0..handed / 10 {
            sending.handed(10, now);
        }
        sending.handle(result(Status::Complete, claim.0, claim.1), now);
        let outcome = sending.outcome();
        assert!(
            matches!(
                outcome,
                Some(Outcome::Failed {
                    status: Status::Inconsistent,
                    ..
                })
            ),
            "{claim:?}: {outcome:?}"
        );
    }

    let mut sending = outgoing(Some(20), now);
    ready(&mut sending, now);
    sending.handle(result(Status::WriteFailed, 0, 0), now);
    assert_eq!(
        sending.outcome(),
        Some(&Outcome::Failed {
            status: Status::WriteFailed,
            text: "why; what to do".into()
        })
    );
    assert_eq!(sending.next_piece(), None);
}

#[test]
fn other_transfers_change_nothing() {
    let now = Instant::now();
    let mut outgoing = outgoing(Some(20), now);
    let other = TransferId::new(8).unwrap();
    outgoing.handle(
        Control::Ready {
            transfer: other,
            held: 0,
        },
        now,
    );
    assert_eq!(outgoing.next_piece(), None);
    assert!(outgoing.abort().is_some());
}

proptest! {
    /// Whatever a hostile receiver says and when, nothing panics, pieces tile the file, and success is only
    /// reported when everything was handed over.
    #[test]
    fn hostile_receiver(total in 1u64..60, steps in proptest::collection::vec((0u8..8, 0u64..70, 0u64..8), 0..60)) {
        let mut now = Instant::now();
        let mut outgoing = outgoing(Some(total), now);
        let mut sent = 0;
        for (kind, a, b) in steps {
            now += Duration::from_millis(a * 50);
            match kind {
                0 => ready(&mut outgoing, now),
                1 => outgoing.handle(result(Status::Complete, a, b), now),
                2 if a == 0 => outgoing.handle(result(Status::Incomplete, a, b), now),
                3 => outgoing.handle(Control::Alive { transfer: ID }, now),
                4 => outgoing.input_ended(now),
                _ => if let Some(piece) = outgoing.next_piece() {
                    prop_assert_eq!(piece.offset, sent);
                    prop_assert!(piece.len > 0 && piece.offset + piece.len <= total);
                    sent += piece.len;
                    outgoing.handed(piece.len, now);
                }
            }
            outgoing.poll_timeout(now, PATIENCE);
            let _ = outgoing.poll_control(now);
        }
        if outgoing.outcome() == Some(&Outcome::Complete) {
            prop_assert_eq!(sent, total);
        }
    }
}
