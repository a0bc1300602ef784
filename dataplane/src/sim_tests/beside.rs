//! Small messages to and fro beside a stream of long ones: short bursts, and nothing before an answer.
#![cfg(test)]

use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, noise};

use crate::bounds::TRANSMIT_BURST;
use crate::completion::{LoanError, Outcome, PeerId, SendError};
use crate::scheduler::BURST_BESIDE_SMALL;

const LONG: usize = 60_000;

/// Host 0 hands over long messages as long as there is room.
fn keep_full(bed: &mut Bed, peer: PeerId, payload: &[u8]) {
    loop {
        match bed.try_send(0, peer, payload, 0) {
            Ok(_) => {}
            Err(SendError::WouldBlock | SendError::Loan(LoanError::WouldBlock)) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// What came to a host: bytes of long messages, and how many short ones.
fn take(bed: &mut Bed, host: usize) -> (usize, usize) {
    let (mut long, mut short) = (0, 0);
    while let Some(message) = bed.hosts[host].take_message().expect("no failure") {
        match message.len() {
            LONG => long += LONG,
            _ => short += 1,
        }
    }
    while let Some(completion) = bed.hosts[host].told.completions().pop_front() {
        assert_eq!(completion.outcome, Outcome::Delivered);
    }
    (long, short)
}

/// One round with the long messages kept coming: fragments that left host 0.
fn busy_round(bed: &mut Bed, peer: PeerId, payload: &[u8]) -> u64 {
    keep_full(bed, peer, payload);
    let before = bed.hosts[0].counters.data_packets_sent;
    bed.round();
    bed.hosts[0].counters.data_packets_sent - before
}

#[test]
fn bursts_are_short_while_small_messages_are_answered() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, LONG as u64);
    let back = bed.resolve(1);
    let payload = noise(1, LONG);
    let question = noise(2, 64);

    // Alone, the stream leaves in full bursts.
    let mut most = 0;
    for _ in 0..200 {
        most = most.max(busy_round(&mut bed, peer, &payload));
        take(&mut bed, 1);
    }
    assert!(most > u64::from(TRANSMIT_BURST), "{most} fragments in a round");

    // One question after the other, each answered by the far end. The first answer begins the exchange.
    let (mut answers, mut streamed, mut waiting) = (0, 0, false);
    for round in 0..2000 {
        if !waiting {
            bed.send(0, peer, &question, 1);
            waiting = true;
        }
        let sent = busy_round(&mut bed, peer, &payload);
        if answers > 1 {
            assert!(
                sent <= u64::from(BURST_BESIDE_SMALL),
                "{sent} fragments in round {round}"
            );
            let has_answer = bed.hosts[0].told.messages().count() > 0;
            assert!(!has_answer || sent == 0, "{sent} fragments before the answer");
        }
        let (long, questions) = take(&mut bed, 1);
        streamed += long;
        for _ in 0..questions {
            bed.send(1, back, &question, 2);
        }
        let (_, answered) = take(&mut bed, 0);
        answers += answered;
        waiting &= answered == 0;
    }
    assert!(answers > 100, "{answers} answers");
    assert!(streamed > 20 * LONG, "the stream goes on: {streamed} bytes");

    // The exchange is over soon after its last message, and credits are no answers: small messages that nobody answers change nothing.
    bed.pass(Duration::from_millis(2));
    let mut most = 0;
    for _ in 0..200 {
        bed.send(0, peer, &question, 3);
        most = most.max(busy_round(&mut bed, peer, &payload));
        take(&mut bed, 1);
        take(&mut bed, 0);
    }
    assert!(most > u64::from(TRANSMIT_BURST), "{most} fragments in a round");
    bed.check_clean();
}
