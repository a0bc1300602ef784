//! A flow at its receiver: what came, what was late, what did not come, and when to say so.

use std::time::Duration;

use lm_protocol::serial;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{RealTimePacket, RtReport};

/// Reports leave so often while packets come.
pub(crate) const REPORT_PERIOD: Duration = Duration::from_millis(5);
/// The least delay is that of the last ten seconds: clocks that drift apart by 100 ppm differ by a millisecond then.
const LEAST_SECONDS: usize = 10;

/// A message that came and is the application's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// How far behind its deadline it came.
    pub(crate) late: Option<Duration>,
    /// Messages that did not come since the one before.
    pub(crate) lost: u32,
    /// How long it waited on its way, above the least of the flow.
    pub(crate) delay: Duration,
    /// How long it was on its way, where its sender's clock is ours.
    pub(crate) latency: Option<Duration>,
    /// How much longer or less long its way took than that of the message before.
    pub(crate) jitter: Option<Duration>,
}

/// The least of what came in the last ten seconds, by second; and that of all, as it was found in the last one.
#[derive(Debug, Default)]
struct Least([Option<(u64, i128)>; LEAST_SECONDS], Option<(u64, i128)>);

impl Least {
    fn of(&mut self, value: i128, now: Time) -> i128 {
        let second = now.as_nanos() / 1_000_000_000;
        // As nearly always: what is no less changes nothing.
        if let Some((_, least)) = self.1.filter(|&(known, least)| known == second && value >= least) {
            return least;
        }
        let is_recent = |known: u64| second.saturating_sub(known) < LEAST_SECONDS as u64;
        let here = &mut self.0[second as usize % LEAST_SECONDS];
        *here = match here {
            Some((known, least)) if *known == second => Some((second, value.min(*least))),
            _ => Some((second, value)),
        };
        let recent = self.0.iter().flatten().filter(|(known, _)| is_recent(*known));
        let least = recent.map(|(_, least)| *least).min().unwrap_or(value);
        self.1 = Some((second, least));
        least
    }
}

/// A flow's receive side. Sums wrap.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    port: u16,
    newest: u32,
    whole: u32,
    late: u32,
    lost: u32,
    /// Of these, those behind the last whole message, and those that nobody has asked for yet.
    lost_since: u32,
    lost_new: u32,
    least: Least,
    /// What the newest message took, as far as clocks tell.
    on_the_way: Option<i128>,
    /// The least delay since the last report.
    delay: Option<Duration>,
    /// When the newest message was sent, as its sender said, and when it came.
    sent_at: Time,
    came_at: Time,
    reported_at: Time,
    /// A report is due then.
    due: Option<Time>,
}

impl Incoming {
    /// Of a flow whose first message that came is `first`: what was before it is not missed.
    pub(crate) fn new(first: &RealTimePacket<'_>, now: Time) -> Incoming {
        Incoming {
            port: first.port,
            newest: first.message.wrapping_sub(1),
            came_at: now,
            reported_at: now,
            ..Incoming::default()
        }
    }

    /// A message is whole at `host_now` by the clock that senders go by, and its last packet had `waited` here.
    /// `is_one_clock`: its sender's is the same. `None`: a newer one has come, or it came already.
    pub(crate) fn came(
        &mut self,
        packet: &RealTimePacket<'_>,
        is_one_clock: bool,
        (host_now, waited): (Time, Duration),
        now: Time,
    ) -> Option<Arrival> {
        if self.has_overtaken(packet.message) {
            return None;
        }
        let took = i128::from(host_now.as_nanos()) - i128::from(packet.sent_at.as_nanos());
        // Waking up is no delay of the network's.
        let on_the_way = took - waited.as_nanos() as i128;
        let least = self.least.of(on_the_way, now);
        let delay = Duration::from_nanos((on_the_way - least) as u64);
        let before = self.on_the_way.replace(on_the_way);
        let jitter = before.map(|before| Duration::from_nanos(on_the_way.abs_diff(before) as u64));
        let latency = is_one_clock.then(|| Duration::from_nanos(took.max(0) as u64));
        // Of another clock only what is above the least is known.
        let age = latency.unwrap_or(delay + waited);
        let late = (packet.deadline).and_then(|deadline| age.checked_sub(deadline));
        let late = late.filter(|late| !late.is_zero());
        self.advance_to(packet.message, now);
        let lost = std::mem::take(&mut self.lost_since);
        self.whole = self.whole.wrapping_add(1);
        self.late = self.late.wrapping_add(u32::from(late.is_some()));
        self.delay = Some(self.delay.map_or(delay, |before| before.min(delay)));
        (self.sent_at, self.came_at) = (packet.sent_at, now);
        self.report_by(self.reported_at + REPORT_PERIOD, now);
        Some(Arrival {
            late,
            lost,
            delay,
            latency,
            jitter,
        })
    }

    /// Whether a newer message has come, or is not waited for any more.
    pub(crate) fn has_overtaken(&self, message: u32) -> bool {
        serial::distance(self.newest, message) <= 0
    }

    /// Neither this message nor one before it is waited for any more.
    pub(crate) fn give_up(&mut self, message: u32, now: Time) {
        if !self.has_overtaken(message) {
            self.advance_to(message, now);
            self.lose(1, now);
        }
    }

    /// Those between are lost.
    fn advance_to(&mut self, message: u32, now: Time) {
        let ahead = serial::distance(self.newest, message) as u32; // positive
        self.newest = message;
        self.lose(ahead - 1, now);
    }

    fn lose(&mut self, count: u32, now: Time) {
        if count > 0 {
            self.lost = self.lost.wrapping_add(count);
            self.lost_since = self.lost_since.saturating_add(count);
            self.lost_new = self.lost_new.saturating_add(count);
            self.report_by(now, now);
        }
    }

    fn report_by(&mut self, due: Time, now: Time) {
        self.due = Some(self.due.map_or(due, |before| before.min(due)).max(now));
    }

    /// How many are lost that were not before this was asked last.
    pub(crate) fn newly_lost(&mut self) -> u32 {
        std::mem::take(&mut self.lost_new)
    }

    /// When its report is due.
    pub(crate) fn due(&self) -> Option<Time> {
        self.due
    }

    /// The report that is due.
    pub(crate) fn report(&mut self, now: Time) -> Option<RtReport> {
        self.due.take_if(|due| *due <= now)?;
        let report = RtReport {
            newest: self.newest,
            whole: self.whole,
            late: self.late,
            lost: self.lost,
            delay: self.delay.take().unwrap_or_default(),
            interval: now.since(self.reported_at),
            port: self.port,
            refused: false,
            sent_at: self.sent_at,
            held: now.since(self.came_at),
        };
        self.reported_at = now;
        Some(report)
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    fn packet(message: u32, sent_us: u64) -> RealTimePacket<'static> {
        RealTimePacket {
            message,
            count: 1,
            deadline: Some(Duration::from_micros(500)),
            sent_at: at(sent_us),
            message_len: 1,
            port: 9,
            payload: &[1],
            ..RealTimePacket::default()
        }
    }

    fn at(micros: u64) -> Time {
        Time::from_nanos(micros * 1000)
    }

    #[test]
    fn gaps_are_gaps_and_reports_come_at_once_behind_them() {
        let mut incoming = Incoming::new(&packet(u32::MAX, 0), at(100));
        let micros = Duration::from_micros;
        let whole = |late: Option<u64>, lost, delay_us, latency_us, jitter: Option<u64>| {
            Some(Arrival {
                late: late.map(micros),
                lost,
                delay: micros(delay_us),
                latency: Some(micros(latency_us)),
                jitter: jitter.map(micros),
            })
        };
        assert_eq!(
            incoming.came(&packet(u32::MAX, 0), true, (at(100), Duration::ZERO), at(100)),
            whole(None, 0, 0, 100, None)
        );
        assert_eq!(incoming.due(), Some(at(5100)));
        assert_eq!(
            incoming.came(&packet(u32::MAX, 0), true, (at(101), Duration::ZERO), at(101)),
            None
        );
        // 0 and 1 are missing.
        assert_eq!(
            incoming.came(&packet(2, 1000), true, (at(1150), Duration::ZERO), at(1150)),
            whole(None, 2, 50, 150, Some(50))
        );
        assert_eq!(incoming.due(), Some(at(1150)));
        assert_eq!(
            incoming.came(&packet(1, 900), true, (at(1151), Duration::ZERO), at(1151)),
            None
        );
        let report = incoming.report(at(1160)).expect("it is due");
        assert_eq!(
            (report.newest, report.whole, report.late, report.lost),
            (2, 2, 0, 2)
        );
        // One of the two did not wait.
        assert_eq!(report.delay, Duration::ZERO);
        assert_eq!(
            (report.sent_at, report.held),
            (at(1000), Duration::from_micros(10))
        );
        assert_eq!(incoming.report(at(9000)), None);
        assert_eq!(
            incoming.came(&packet(3, 8000), true, (at(9000), Duration::ZERO), at(9000)),
            whole(Some(500), 0, 900, 1000, Some(850))
        );
        let report = incoming.report(at(9000)).expect("it is due");
        assert_eq!((report.late, report.delay), (1, Duration::from_micros(900)));
    }

    /// The newest message too, and whatever else is counted.
    #[test]
    fn sums_wrap() {
        let mut incoming = Incoming::new(&packet(u32::MAX, 0), at(0));
        (incoming.whole, incoming.late, incoming.lost) = (u32::MAX, u32::MAX, u32::MAX - 1);
        // The second one is late, behind two that are missing, and the sender's clock does not go.
        for (message, came_us) in [(u32::MAX, 100), (2, 700)] {
            let arrival = incoming.came(
                &packet(message, 0),
                true,
                (at(came_us), Duration::ZERO),
                at(came_us),
            );
            assert!(arrival.is_some(), "{arrival:?}");
        }
        let report = incoming.report(at(700)).expect("at once");
        assert_eq!(
            (report.newest, report.whole, report.late, report.lost),
            (2, 1, 0, 0)
        );
        // Times at both ends of what can be said.
        for (message, sent_at) in [(3, Time::MAX), (4, Time::ZERO)] {
            let packet = RealTimePacket {
                sent_at,
                ..packet(message, 0)
            };
            let arrival = incoming.came(&packet, false, (at(800), Duration::from_secs(9)), at(800));
            assert!(arrival.is_some(), "{arrival:?}");
        }
    }

    #[test]
    fn what_is_given_up_is_lost_once() {
        let mut incoming = Incoming::new(&packet(5, 0), at(0));
        assert_eq!(incoming.newly_lost(), 0);
        incoming.give_up(6, at(10));
        assert_eq!((incoming.newly_lost(), incoming.due()), (2, Some(at(10))));
        incoming.give_up(5, at(11));
        incoming.give_up(6, at(11));
        assert_eq!(
            incoming.came(&packet(6, 0), true, (at(12), Duration::ZERO), at(12)),
            None
        );
        assert_eq!(incoming.newly_lost(), 0);
        let report = incoming.report(at(12)).expect("at once");
        assert_eq!((report.newest, report.whole, report.lost), (6, 0, 2));
        // The application hears of all of them with the next message that comes.
        let arrival = incoming.came(&packet(9, 100), true, (at(110), Duration::ZERO), at(110));
        assert!(matches!(arrival, Some(Arrival { lost: 4, .. })), "{arrival:?}");
        assert_eq!(incoming.newly_lost(), 2);
    }

    #[test]
    fn of_another_clock_only_the_delay_above_the_least_counts() {
        let mut incoming = Incoming::new(&packet(0, 0), at(0));
        // The sender's clock is a second ahead.
        let ahead = 1_000_000;
        for (message, delay_us, late) in [(0, 300, false), (1, 200, false), (2, 701, true), (3, 700, false)] {
            let sent = 2000 * u64::from(message);
            let arrival = incoming.came(
                &packet(message, sent + ahead),
                false,
                (at(sent + delay_us), Duration::ZERO),
                at(sent + delay_us),
            );
            let Some(Arrival { late: found, .. }) = arrival else {
                panic!("{arrival:?}");
            };
            assert_eq!(found.is_some(), late, "message {message}");
        }
        // What it waited here is no delay, and makes it late all the same.
        let (sent, waited) = (9000, Duration::from_micros(501));
        let packet_4 = packet(4, sent + ahead);
        let arrival = incoming.came(&packet_4, false, (at(sent + 701), waited), at(sent + 701));
        let Some(Arrival { late, delay, .. }) = arrival else {
            panic!("{arrival:?}");
        };
        assert_eq!((late.is_some(), delay), (true, Duration::ZERO));
        // The least is forgotten after ten seconds.
        let later = 11_000_000;
        let arrival = incoming.came(
            &packet(5, later + ahead),
            false,
            (at(later + 900), Duration::ZERO),
            at(later + 900),
        );
        assert_eq!(
            arrival,
            Some(Arrival {
                late: None,
                lost: 0,
                delay: Duration::ZERO,
                latency: None,
                jitter: Some(Duration::from_micros(700)),
            })
        );
    }
}
