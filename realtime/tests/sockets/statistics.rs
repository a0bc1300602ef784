//! What is counted, and how long things took.

use std::time::Duration;

use lm_examples::ROUND_NS;
use lm_realtime::{Histogram, OpenError, SocketConfig};
use lm_sim::{Impairments, Semantics};

use crate::{Bed, exact, options};

/// The way of a message in a round, and in how many a millisecond passes.
const ROUND: Duration = Duration::from_nanos(ROUND_NS);
const MILLISECOND: u32 = 50;

fn counts(histogram: &Histogram) -> u64 {
    histogram.percentiles().count
}

/// Every value of a histogram lies between these, but for its buckets' width.
fn lies_between(histogram: &Histogram, least: Duration, most: Duration) {
    let [least, most] = [least, most].map(|time| time.as_nanos() as u64);
    let values: Vec<_> = histogram.counts().collect();
    let is_there = |(value, _): &(u64, u64)| (least..=most + most / 64).contains(value);
    assert!(!values.is_empty() && values.iter().all(is_there), "{values:?}");
}

#[test]
fn what_messages_took_is_told_by_histograms() {
    let config = SocketConfig {
        keep: 4,
        drops_late: false,
        ..exact()
    };
    let mut bed = Bed::new(Semantics::Copy, 1, &config, None);
    bed.calm();
    let send = |bed: &mut Bed, count: u32| {
        for _ in 0..count {
            bed.send(b"sample", options(7, 1500));
            bed.rounds(MILLISECOND);
            bed.sockets[1].recv();
        }
    };
    bed.delay(Duration::from_micros(500));
    send(&mut bed, 200);
    let times = bed.sockets[1].histograms();
    let half = Duration::from_micros(500);
    assert_eq!((counts(&times.latency), counts(&times.jitter)), (200, 199));
    lies_between(&times.latency, half, half + 3 * ROUND);
    lies_between(&times.jitter, Duration::ZERO, ROUND);
    lies_between(&times.delay, Duration::ZERO, ROUND);
    assert_eq!((counts(&times.lost), counts(&times.late)), (0, 0));
    // The next ones take 1.5 ms more, and are half a millisecond late.
    bed.delay(Duration::from_millis(2));
    send(&mut bed, 20);
    bed.rounds(3 * MILLISECOND);
    let (times, late) = (bed.sockets[1].histograms(), Duration::from_micros(500));
    assert_eq!((counts(&times.latency), counts(&times.late)), (220, 20));
    lies_between(&times.late, late, late + 3 * ROUND);
    let (delay, jitter) = (times.delay.percentiles(), times.jitter.percentiles());
    let more = 1_450_000..=1_600_000;
    assert!(
        more.contains(&delay.p99) && more.contains(&delay.max),
        "{delay:?}"
    );
    assert!(delay.p50 <= ROUND_NS && delay.count == 220, "{delay:?}");
    // Once.
    assert!(more.contains(&jitter.max) && jitter.p99 <= ROUND_NS, "{jitter:?}");
    // Three in a row are lost, then five.
    for lost in [3, 5] {
        let none = Impairments {
            loss_ppm: 1_000_000,
            ..Impairments::default()
        };
        bed.world.wire.impair(0, none);
        send(&mut bed, lost);
        bed.calm();
        send(&mut bed, 2);
    }
    let lost: Vec<_> = bed.sockets[1].histograms().lost.counts().collect();
    assert_eq!(
        (lost, bed.sockets[1].statistics().lost),
        (vec![(3, 1), (5, 1)], 8)
    );
    // Nobody polls for a millisecond: of six messages two give way, by then a millisecond old.
    for _ in 0..4 {
        bed.send(b"old", options(7, 0));
    }
    bed.pause(Duration::from_millis(1));
    for _ in 0..2 {
        bed.send(b"new", options(7, 0));
    }
    bed.world.round();
    let superseded = &bed.sockets[0].histograms().superseded;
    assert_eq!(counts(superseded), 2);
    lies_between(superseded, Duration::from_millis(1), Duration::from_millis(1));
}

/// Where clocks differ the time between two of them is none of a message.
#[test]
fn of_another_host_no_latency_is_told() {
    let mut bed = Bed::new(Semantics::Copy, 2, &SocketConfig::default(), None);
    bed.calm();
    for _ in 0..10 {
        bed.send(b"sample", options(0, 0));
        bed.rounds(5);
    }
    let times = bed.sockets[1].histograms();
    let found = [&times.latency, &times.delay, &times.jitter].map(counts);
    assert_eq!(found, [0, 10, 9]);
}

#[test]
fn a_period_without_a_message_is_an_event() {
    let period = Duration::from_millis(1);
    let config = SocketConfig {
        period: Some(period),
        ..exact()
    };
    let mut bed = Bed::new(Semantics::Copy, 3, &config, None);
    bed.calm();
    // Nothing is expected before the first message.
    bed.rounds(5 * MILLISECOND);
    assert_eq!(bed.sockets[1].missed(), 0);
    for _ in 0..20 {
        bed.send(b"in time", options(0, 0));
        bed.rounds(MILLISECOND - 2);
    }
    assert_eq!(bed.sockets[1].missed(), 0);
    assert_eq!(counts(&bed.sockets[1].histograms().missed), 0);
    // It is told while nothing comes, each period once.
    bed.rounds(3);
    assert_eq!(bed.sockets[1].missed(), 1);
    assert_eq!(bed.sockets[1].missed(), 0);
    bed.rounds(MILLISECOND);
    assert_eq!(bed.sockets[1].missed(), 1);
    bed.send(b"again", options(0, 0));
    bed.rounds(5);
    assert_eq!(
        (bed.sockets[1].missed(), bed.sockets[1].statistics().missed),
        (0, 2)
    );
    let missed = &bed.sockets[1].histograms().missed;
    lies_between(missed, 2 * period, 2 * period + 6 * ROUND);
    assert_eq!(counts(missed), 1);
    // A period too short to be kept is none.
    let short = SocketConfig {
        period: Some(Duration::from_micros(9)),
        ..exact()
    };
    let error = bed.socket(1, &short).expect_err("too short");
    assert!(
        matches!(error, OpenError::Period) && error.to_string().contains("10 µs"),
        "{error}"
    );
}
