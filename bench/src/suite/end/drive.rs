//! What is done with an [`End`]: round trips, or a stream.

use std::collections::VecDeque;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_box::split_mix;
use serde::{Deserialize, Serialize};

use super::meter::{Cost, Meter};
use super::watch::watch;
use super::{Arrival, End, How, SILENCE, Spec, cut_number};
use crate::cli::{Failure, IntegrityOption};
use crate::histogram::LatencyHistogram;
use crate::signals::Interrupt;

/// A sender goes on for so long after its time has counted: the receiver's began later, on two busy cores by more than 60 ms.
const OVERTIME: Duration = Duration::from_millis(300);
/// Round trips that are asked for at least, however slow: warm-up and measured.
const LEAST: u64 = 3;
/// Messages that have no answer before the first one that has, at most.
const UNANSWERED_MOST: u64 = 8;
/// How long what is due may wait where it is not repeated; then it is not sent any more: a burst of what had been due before was not asked for.
const LATE: Duration = Duration::from_millis(10);
/// How long the last answers of round trips by the clock may take.
const LAST: Duration = Duration::from_secs(1);

/// What an end has measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Round trips in nanoseconds, and how many had this time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) round_trips: Vec<(u64, u64)>,
    /// Payload that arrived while the time counted.
    pub(crate) bytes: u64,
    /// Messages that arrived whole meanwhile.
    pub(crate) messages: u64,
    /// Messages that did not; round trips that never ended.
    pub(crate) lost_messages: u64,
    /// The time that counted.
    pub(crate) seconds: f64,
    /// What it cost.
    pub(crate) cost: Cost,
    /// How AF_XDP moved the packets, as [`super::super::schema::Link::mode`] says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mode: Option<String>,
    /// LM: whether digests go with what is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) integrity: Option<IntegrityOption>,
    /// LM: payload bytes that user space copied since the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user_copied_bytes: Option<u64>,
    /// TCP: congestion control in effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) congestion: Option<String>,
    /// What came of each sender, in the order of their first messages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) senders: Vec<Sent>,
}

impl Outcome {
    /// Round trips, and nothing else.
    pub(crate) fn of_round_trips(histogram: &LatencyHistogram) -> Outcome {
        Outcome {
            messages: histogram.count(),
            round_trips: histogram.counts().collect(),
            ..Outcome::default()
        }
    }
}

/// What one sender's messages came to while the time counted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Sent {
    /// Its address and data port.
    pub(crate) address: Option<SocketAddrV4>,
    /// Payload that arrived.
    pub(crate) bytes: u64,
    /// Messages that arrived whole.
    pub(crate) messages: u64,
    /// Messages that did not.
    pub(crate) lost_messages: u64,
    /// The number after the last one's, now and when the time began to count.
    #[serde(skip)]
    next: u64,
    #[serde(skip)]
    first: u64,
}

/// Asks for round trips: `count` of them, or as many as go in `seconds` after the first answer, which may be late: an address is asked
/// for, a session opened, or a card has just begun anew. A message whose answer does not come is counted as lost, where nobody repeats it.
pub(super) fn ask(end: &mut dyn End, spec: &Spec, count: u64, seconds: f64) -> Result<Outcome, Failure> {
    let mut meter = Meter::default();
    let len = spec.size as usize;
    let mut histogram = LatencyHistogram::new();
    let mut warm_up = (count / 10).max(1);
    let started = Instant::now();
    let limit = Duration::from_secs_f64(seconds);
    let mut answered = None;
    let mut lost = 0;
    let gives_up = spec.system.gives_up();
    let progress = watch("an answer is missing".to_owned(), spec.size);
    for number in 0..count + warm_up {
        if number == warm_up {
            meter.begin(end.work());
        }
        let from = Instant::now();
        end.send(len, number)?;
        end.flush()?;
        let until = gives_up.then(|| Instant::now() + SILENCE);
        let mut came = 0;
        let is_answered = loop {
            let Some(arrival) = end.receive(until)? else {
                break false;
            };
            // Behind its time.
            if lost > 0 && came == 0 && arrival.number != cut_number(number, len) {
                continue;
            }
            came += arrival.bytes;
            if arrival.number != cut_number(number, len) || came > len {
                return Err(Failure::new(format!(
                    "the answer to message {number} is another message"
                )));
            }
            if arrival.whole {
                break true;
            }
        };
        let elapsed = from.elapsed();
        progress.store(number + 1, Ordering::Relaxed);
        if !is_answered && !gives_up {
            return Err(Failure::new("the answering end has gone"));
        }
        if is_answered && came != len {
            return Err(Failure::new(format!(
                "an answer of {came} bytes to a message of {len}"
            )));
        }
        lost += u64::from(!is_answered);
        if is_answered {
            answered.get_or_insert_with(Instant::now);
        } else if answered.is_none() && lost == UNANSWERED_MOST {
            return Err(Failure::new("no answer comes from the far end"));
        }
        // Where time is short, the warm-up is, too: a tenth of it.
        let passed = answered.map_or(Duration::ZERO, |first| first.elapsed());
        if passed >= limit / 10 {
            warm_up = warm_up.min(number + 1);
        }
        let done = passed >= limit;
        if is_answered && (number >= warm_up || (done && number + 1 >= LEAST)) {
            histogram.record_ns(elapsed.as_nanos() as u64);
        }
        if (done || histogram.count() == count) && number + 1 >= LEAST {
            break;
        }
    }
    let cost = meter.end(end.work());
    end.close()?;
    Ok(Outcome {
        lost_messages: lost,
        seconds: started.elapsed().as_secs_f64(),
        cost,
        ..Outcome::of_round_trips(&histogram)
    })
}

/// Asks by the clock, whether answers come or not: each is measured from when its question was due. What was due and could not be sent has been
/// waiting since (no coordinated omission).
pub(super) fn ask_on_time(
    end: &mut dyn End,
    spec: &Spec,
    [warm_up, count]: [u64; 2],
    rate: f64,
) -> Result<Outcome, Failure> {
    let mut meter = Meter::default();
    let len = spec.size as usize;
    let all = warm_up + count.max(1);
    let mut histogram = LatencyHistogram::new();
    let mut pace = Pace::new(1.0 / rate, 1, std::process::id().into());
    let mut waiting: VecDeque<(u64, Instant)> = VecDeque::new();
    let begin = Instant::now();
    for number in 0..=all {
        let is_over = number == all;
        let due = match is_over {
            true => Instant::now() + LAST,
            false => begin + pace.next(),
        };
        while !(is_over && waiting.is_empty()) {
            if let Some(arrival) = end.receive(Some(due))?.filter(|arrival| arrival.whole) {
                let is_it = |(asked, _): &(u64, Instant)| cut_number(*asked, len) == arrival.number;
                let place = waiting.iter().position(is_it);
                let answered = place.and_then(|place| waiting.remove(place));
                if let Some((_, due)) = answered.filter(|(asked, _)| *asked >= warm_up) {
                    histogram.record_ns(due.elapsed().as_nanos() as u64);
                }
            }
            if Instant::now() >= due {
                break;
            }
        }
        if number == warm_up {
            meter.begin(end.work());
        }
        if !is_over {
            end.send(len, number)?;
            end.flush()?;
            waiting.push_back((number, due));
        }
    }
    if histogram.count() == 0 {
        return Err(Failure::new("no answer comes from the far end"));
    }
    let cost = meter.end(end.work());
    // The far end may have gone.
    let _gone = end.close();
    Ok(Outcome {
        lost_messages: waiting.iter().filter(|(asked, _)| *asked >= warm_up).count() as u64,
        seconds: begin.elapsed().as_secs_f64(),
        cost,
        ..Outcome::of_round_trips(&histogram)
    })
}

/// When messages are due. Single ones come within half of their gap around it, and gaps between bursts are exponential: equal ones would lock in
/// phase at a FIFO, and one flow lose all.
struct Pace {
    gap_s: f64,
    burst: u64,
    seed: u64,
    number: u64,
    at_s: f64,
}

impl Pace {
    fn new(gap_s: f64, burst: u64, seed: u64) -> Pace {
        Pace {
            gap_s,
            burst,
            seed,
            number: 0,
            at_s: 0.0,
        }
    }

    /// When the next message is due, after the first one's begin.
    fn next(&mut self) -> Duration {
        if self.number.is_multiple_of(self.burst) {
            // 53 bits: from 0 to just below 1.
            let random = (split_mix(self.seed, self.number) >> 11) as f64 / (1_u64 << 53) as f64;
            let gaps = match self.burst {
                1 => 0.5 + random,
                burst => -(1.0 - random).ln() * burst as f64,
            };
            self.at_s += self.gap_s * gaps;
        }
        self.number += 1;
        Duration::from_secs_f64(self.at_s)
    }
}

/// Answers each message with one of the same length and number, until the asking end has gone.
pub(super) fn answer(end: &mut dyn End) -> Result<Outcome, Failure> {
    let (mut len, mut messages) = (0, 0);
    loop {
        let arrival = match end.receive(None) {
            Ok(Some(arrival)) => arrival,
            // Refused or reset: the asking end has what it wanted.
            Ok(None) => break,
            Err(_) if messages > 0 => break,
            Err(error) => return Err(error),
        };
        len += arrival.bytes;
        if arrival.whole {
            let sent = end.send(len, arrival.number).and_then(|()| end.flush());
            if sent.is_err() && messages > 0 {
                break;
            }
            sent?;
            messages += 1;
            len = 0;
        }
    }
    Ok(Outcome {
        messages,
        ..Outcome::default()
    })
}

/// Sends for `warm_up` and then `seconds` that count, or until it is asked to end.
pub(super) fn send(
    end: &mut dyn End,
    spec: &Spec,
    [warm_up, seconds]: [f64; 2],
    rate: Option<f64>,
    interrupt: &Interrupt,
) -> Result<Outcome, Failure> {
    let mut meter = Meter::default();
    let len = spec.size as usize;
    let begin = Instant::now();
    let counts_from = begin + Duration::from_secs_f64(warm_up);
    let counts_to = counts_from + Duration::from_secs_f64(seconds);
    let burst = spec.system.options.burst.into();
    let mut pace = rate.map(|bits| Pace::new(len as f64 * 8.0 / bits, burst, std::process::id().into()));
    let mut number = 0;
    let mut look = Look::new(len);
    let (mut first, mut counted) = (None, None);
    loop {
        let mut is_late = false;
        if let Some(pace) = &mut pace {
            let due = begin + pace.next();
            if due > Instant::now() {
                end.flush()?;
                end.wait_until(due);
            }
            is_late = spec.system.how.loses() && due.elapsed() > LATE;
        }
        let sent = match is_late {
            true => Ok(()),
            false => end.send(len, number),
        };
        match sent {
            Ok(()) => number += 1,
            // The receiver has measured and gone.
            Err(_) if counted.is_some() => break,
            Err(error) => return Err(error),
        }
        if pace.is_none() && !look.is_due() {
            continue;
        }
        let now = Instant::now();
        match (first, counted) {
            (None, _) if now >= counts_from => {
                meter.begin(end.work());
                first = Some((now, number));
            }
            (Some((from, before)), None) if now >= counts_to => {
                counted = Some(((now - from).as_secs_f64(), number - before, meter.end(end.work())));
            }
            (_, Some(_)) if now >= counts_to + OVERTIME => break,
            _ if interrupt.is_set() => break,
            _ => {}
        }
    }
    // What is left need not arrive: the receiver has measured.
    let _gone = end.close();
    let so_far = || (begin.elapsed().as_secs_f64(), number, meter.end(end.work()));
    let (seconds, messages, cost) = counted.unwrap_or_else(so_far);
    Ok(Outcome {
        bytes: messages * spec.size,
        messages,
        seconds,
        cost,
        ..Outcome::default()
    })
}

/// Receives, and counts what comes in `seconds` after `warm_up`, from the first message of the last sender on.
pub(super) fn receive(
    end: &mut dyn End,
    spec: &Spec,
    [warm_up, seconds]: [f64; 2],
) -> Result<Outcome, Failure> {
    let mut meter = Meter::default();
    let expected = spec.senders as usize;
    let mut senders: Vec<Sent> = Vec::new();
    let mut progress = watch_senders(spec, 0);
    let mut arrivals = 0;
    let mut look = Look::new(spec.size as usize);
    let mut started: Option<Instant> = None;
    let mut counts_from: Option<Instant> = None;
    loop {
        let arrival = (end.receive(None)?).ok_or_else(|| Failure::new(stopped(senders.len(), expected)))?;
        if arrival.from == senders.len() {
            if senders.len() == expected {
                return Err(Failure::new(format!(
                    "more than {expected} senders came; end what else sends"
                )));
            }
            senders.push(Sent::default());
            progress = watch_senders(spec, senders.len());
        }
        senders[arrival.from].count(&arrival);
        arrivals += 1;
        if let Some(progress) = &progress {
            progress.store(arrivals, Ordering::Relaxed);
        }
        if senders.len() < expected || (started.is_some() && !look.is_due()) {
            continue;
        }
        let now = Instant::now();
        let started = *started.get_or_insert(now);
        match counts_from {
            None if (now - started).as_secs_f64() >= warm_up => {
                counts_from = Some(now);
                meter.begin(end.work());
                senders.iter_mut().for_each(Sent::begin);
            }
            Some(from) if (now - from).as_secs_f64() >= seconds => {
                senders.iter_mut().for_each(Sent::end);
                return Ok(Outcome {
                    bytes: senders.iter().map(|one| one.bytes).sum(),
                    messages: senders.iter().map(|one| one.messages).sum(),
                    lost_messages: senders.iter().map(|one| one.lost_messages).sum(),
                    seconds: (now - from).as_secs_f64(),
                    cost: meter.end(end.work()),
                    senders,
                    ..Outcome::default()
                });
            }
            _ => {}
        }
    }
}

/// Takes what still comes: the sender's stream goes on for a little, and shall not meet a closed door.
pub(super) fn drain(end: &mut dyn End) -> Result<(), Failure> {
    while let Ok(Some(_)) = end.receive(Some(Instant::now() + SILENCE)) {}
    Ok(())
}

/// Ends the process when nothing arrives any more. TCP itself tells of an end, and repeats what is lost after seconds at times.
fn watch_senders(spec: &Spec, came: usize) -> Option<Arc<AtomicU64>> {
    let what_is_wrong = stopped(came, spec.senders as usize);
    (spec.system.how != How::Tcp).then(|| watch(what_is_wrong, spec.size))
}

/// Why a measurement ends without a result.
fn stopped(came: usize, senders: usize) -> String {
    if (1..senders).contains(&came) {
        format!(
            "{came} of {senders} senders came and none is left; start them all, and let them send for longer"
        )
    } else {
        "the sender stopped before the measurement ended".to_owned()
    }
}

impl Sent {
    fn count(&mut self, arrival: &Arrival) {
        self.bytes += arrival.bytes as u64;
        self.messages += u64::from(arrival.whole);
        self.next = self.next.max(arrival.number + 1);
    }

    fn begin(&mut self) {
        (self.bytes, self.messages, self.first) = (0, 0, self.next);
    }

    fn end(&mut self) {
        self.lost_messages = (self.next - self.first).saturating_sub(self.messages);
    }
}

/// The clock is looked at once in so many bytes: for each small message it would be felt.
struct Look {
    every: u32,
    since: u32,
}

impl Look {
    fn new(message_len: usize) -> Look {
        const BYTES: usize = 16 << 10;
        Look {
            every: (BYTES / message_len.max(1)).clamp(1, 64) as u32,
            since: 0,
        }
    }

    fn is_due(&mut self) -> bool {
        self.since += 1;
        let due = self.since >= self.every;
        if due {
            self.since = 0;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mode, Task};
    use super::*;

    /// An end whose other end is perfect, and late once.
    #[derive(Default)]
    struct Mirror {
        sent: Vec<(usize, u64)>,
        late: Option<Duration>,
    }

    impl End for Mirror {
        fn send(&mut self, len: usize, number: u64) -> Result<(), Failure> {
            self.sent.push((len, number));
            Ok(())
        }

        fn receive(&mut self, _: Option<Instant>) -> Result<Option<Arrival>, Failure> {
            if let Some(late) = self.late.take() {
                std::thread::sleep(late);
            }
            Ok(self.sent.pop().map(|(bytes, number)| Arrival {
                from: 0,
                number: cut_number(number, bytes),
                bytes,
                whole: true,
            }))
        }
    }

    fn spec(size: u64) -> Spec {
        Spec {
            system: crate::suite::systems::System::parse("udp-spinning").unwrap(),
            task: Task::Beside {
                count: 1,
                seconds: 1.0,
            },
            size,
            address: "127.0.0.1:1".parse().unwrap(),
            mtu: 1500,
            mode: Mode::Auto,
            senders: 1,
            queues: 1,
            pace: None,
            goes_first: false,
        }
    }

    #[test]
    fn warm_up_does_not_count() {
        let outcome = ask(&mut Mirror::default(), &spec(3), 1000, 60.0).unwrap();
        assert_eq!(outcome.messages, 1000);
        assert_eq!(
            outcome.round_trips.iter().map(|(_, count)| count).sum::<u64>(),
            1000
        );
    }

    /// The first answer takes longer than all may, and the others come all the same.
    #[test]
    fn a_late_first_answer_takes_nobodys_time() {
        let mut end = Mirror {
            late: Some(Duration::from_millis(600)),
            ..Mirror::default()
        };
        let outcome = ask(&mut end, &spec(64), 20, 0.5).unwrap();
        assert_eq!(outcome.messages, 20, "{:?}", outcome.round_trips);
    }

    /// One answer is 50 ms late, and a message was due each millisecond: some fifty of them have waited.
    #[test]
    fn what_was_due_and_not_sent_has_waited() {
        let mut end = Mirror {
            late: Some(Duration::from_millis(50)),
            ..Mirror::default()
        };
        let outcome = ask_on_time(&mut end, &spec(64), [10, 100], 1000.0).unwrap();
        let waited: u64 = (outcome.round_trips.iter())
            .filter(|(ns, _)| *ns > 10_000_000)
            .map(|(_, count)| count)
            .sum();
        // 40 of them are warm-up's or below 10 ms at the latest.
        assert!(waited >= 25, "{waited} of {:?}", outcome.round_trips);
    }

    /// Of 22 messages, warm-up included, every fifth has no answer, and the answer before that comes once more.
    #[test]
    fn answers_that_do_not_come_are_counted() {
        #[derive(Default)]
        struct Lossy(Mirror);
        impl End for Lossy {
            fn send(&mut self, len: usize, number: u64) -> Result<(), Failure> {
                self.0.sent.clear();
                match number % 5 {
                    4 => Ok(()),
                    0 if number > 0 => (self.0.send(len, number)).and_then(|()| self.0.send(len, number - 1)),
                    _ => self.0.send(len, number),
                }
            }

            fn receive(&mut self, until: Option<Instant>) -> Result<Option<Arrival>, Failure> {
                self.0.receive(until)
            }
        }
        let outcome = ask(&mut Lossy::default(), &spec(64), 20, 60.0).unwrap();
        assert_eq!((outcome.lost_messages, outcome.messages), (4, 16));
    }

    fn gaps_ms(mut pace: Pace, bursts: usize) -> Vec<f64> {
        let burst = pace.burst as usize;
        let all = (0..bursts * burst).map(|_| pace.next().as_secs_f64() * 1e3);
        let times: Vec<f64> = all.step_by(burst).collect();
        times.windows(2).map(|two| two[1] - two[0]).collect()
    }

    #[test]
    fn bursts_come_by_chance_at_their_mean_rate() {
        let gaps = gaps_ms(Pace::new(1.0 / 2500.0, 10, 1), 25_000);
        // 25,000 gaps: the mean's deviation is 0.6 %.
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean / 4.0 - 1.0).abs() < 0.03, "{mean}");
        let longer = gaps.iter().filter(|gap| **gap > 4.0).count() as f64 / gaps.len() as f64;
        assert!((longer - (-1.0_f64).exp()).abs() < 0.02, "{longer}");
    }

    #[test]
    fn lone_datagrams_come_within_half_of_their_gap() {
        let gaps = gaps_ms(Pace::new(1.0 / 400.0, 1, 1), 40_000);
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean / 2.5 - 1.0).abs() < 0.02, "{mean}");
        assert!(gaps.iter().all(|gap| (1.249..=3.751).contains(gap)));
        assert!(gaps.iter().any(|gap| *gap < 1.3) && gaps.iter().any(|gap| *gap > 3.7));
    }

    #[test]
    fn the_seed_decides() {
        let gaps = |seed| gaps_ms(Pace::new(1e-3, 10, seed), 100);
        assert_eq!(gaps(1), gaps(1));
        assert_ne!(gaps(1), gaps(2));
    }

    /// This end is asked too late for most of a stream without repetition: what was due is missing among the numbers.
    #[test]
    fn what_is_too_late_is_not_sent_and_was_due_all_the_same() {
        #[derive(Default)]
        struct Slow(Vec<u64>);
        impl End for Slow {
            fn send(&mut self, _: usize, number: u64) -> Result<(), Failure> {
                self.0.push(number);
                std::thread::sleep(Duration::from_millis(30));
                Ok(())
            }

            fn receive(&mut self, _: Option<Instant>) -> Result<Option<Arrival>, Failure> {
                Ok(None)
            }
        }
        let (mut end, interrupt) = (Slow::default(), Interrupt::install().unwrap());
        // A message each millisecond.
        let outcome = send(&mut end, &spec(125), [0.0, 0.3], Some(1e6), &interrupt).unwrap();
        let last = *end.0.last().unwrap();
        assert!(last > 2 * end.0.len() as u64, "{:?}", end.0);
        assert!(outcome.messages > end.0.len() as u64, "{outcome:?}");
    }

    #[test]
    fn another_message_is_no_answer() {
        struct Wrong;
        impl End for Wrong {
            fn send(&mut self, _: usize, _: u64) -> Result<(), Failure> {
                Ok(())
            }

            fn receive(&mut self, _: Option<Instant>) -> Result<Option<Arrival>, Failure> {
                Ok(Some(Arrival {
                    from: 0,
                    number: 77,
                    bytes: 64,
                    whole: true,
                }))
            }
        }
        let error = ask(&mut Wrong, &spec(64), 10, 60.0).unwrap_err();
        assert!(error.to_string().contains("another message"), "{error}");
    }
}
