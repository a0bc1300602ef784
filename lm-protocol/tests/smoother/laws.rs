//! The smoother's laws, each beside a model that counts packet by packet.

use lm_protocol::smoother::{Law, Parameters, ParametersError, Smoother, TIMER_GRAIN};
use lm_protocol::time::Time;
use proptest::prelude::*;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

/// Table 3's.
fn table_3(law: Law) -> Parameters {
    Parameters {
        law,
        ..Parameters::of_link(NonZeroU64::new(100_000_000).unwrap(), 1514)
    }
}

/// What happens to a smoother.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// So many others would leave.
    Others(u32),
    RealTime(u32),
    Lost(u32),
    Delayed(Duration),
}

/// Events, and how long after the one before each comes.
fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    let gap_ns = prop_oneof![Just(0), 0u64..300_000, 0u64..12_000_000, 0u64..250_000_000];
    let event = prop_oneof![
        6 => (0u32..60).prop_map(Event::Others),
        3 => (0u32..8).prop_map(Event::RealTime),
        1 => (0u32..200).prop_map(Event::RealTime),
        1 => (1u32..4).prop_map(Event::Lost),
        1 => (0u64..2_000).prop_map(|micros| Event::Delayed(Duration::from_micros(micros))),
    ];
    prop::collection::vec((gap_ns, event), 1..300)
}

/// Figure 5, line by line, with the slips mended that the module lists.
#[allow(non_snake_case)]
struct Figure5 {
    CBD: i64,
    RPmax: u64,
    RPmin: u64,
    dRP: u64,
    RP: u64,
    CNS: i64,
    NextRefreshTime: u64,
    packet_lost_in_the_latest_RP_region: bool,
}

impl Figure5 {
    /// The upper half, for a packet. Tells whether it was sent to the network card; if not, it went back to the queue.
    fn smooth(&mut self, is_ss_rtudp: bool) -> bool {
        if is_ss_rtudp {
            self.CNS = (self.CNS - 1).max(-self.CBD);
            return true;
        }
        if self.CNS > 0 {
            self.CNS -= 1;
            return true;
        }
        false
    }

    /// The lower half.
    #[allow(non_snake_case)]
    fn refresh(&mut self, CurrentTime: u64) {
        if CurrentTime >= self.NextRefreshTime {
            if self.packet_lost_in_the_latest_RP_region {
                self.RP = self.RPmax.min(2 * self.RP);
            } else {
                self.RP = self.RPmin.max(self.RP - self.dRP);
            }
            self.packet_lost_in_the_latest_RP_region = false;
            self.CNS = self.CBD.min(self.CNS + self.CBD).max(1);
            self.NextRefreshTime += self.RP;
            if self.NextRefreshTime <= CurrentTime {
                self.NextRefreshTime = CurrentTime + self.RP;
            }
        }
    }
}

/// Credits that come one by one: each is waited for, and each packet takes one.
struct Bucket {
    lambda: u64,
    depth: i64,
    whole: i64,
    /// Billionths of the next credit.
    part: u64,
    filled_ns: u64,
    next_refresh_ns: u64,
    cut_ns: Option<u64>,
    others: i64,
    is_cut: bool,
    is_wanted: bool,
    unwanted: u64,
}

const REFRESH_NS: u64 = 10_000_000;

impl Bucket {
    fn advance(&mut self, now_ns: u64) {
        while self.filled_ns < now_ns {
            let wait_ns = (1_000_000_000 - self.part)
                .div_ceil(self.lambda)
                .min(now_ns - self.filled_ns);
            self.filled_ns += wait_ns;
            self.part += wait_ns * self.lambda;
            if self.part >= 1_000_000_000 {
                self.part -= 1_000_000_000;
                self.whole += 1;
            }
            if self.whole >= 2 {
                (self.whole, self.part) = (2, 0);
            }
        }
        if now_ns < self.next_refresh_ns {
            return;
        }
        match (self.is_wanted, self.unwanted) {
            (false, _) => self.unwanted += 1,
            (true, _) if self.is_cut => {}
            // 0.97 of 8127 frames a second.
            (true, 0) => self.lambda = (self.lambda + 20).min(7883),
            (true, pause) => self.lambda = self.lambda.saturating_sub(20 * pause).max(self.lambda.min(2000)),
        }
        self.unwanted *= u64::from(!self.is_wanted);
        (self.is_cut, self.is_wanted) = (false, false);
        self.next_refresh_ns += REFRESH_NS;
        if self.next_refresh_ns <= now_ns {
            self.next_refresh_ns = now_ns + REFRESH_NS;
        }
        let is_starved = self.others <= 0 && self.whole < 1;
        if is_starved {
            (self.whole, self.part) = (1, 0);
        }
        self.others = if is_starved { -1 } else { 0 };
    }

    fn other(&mut self) -> bool {
        let may_leave = self.whole >= 1;
        if may_leave {
            self.whole -= 1;
            self.others += 1;
        } else {
            self.is_wanted = true;
        }
        may_leave
    }

    fn real_time(&mut self) {
        self.whole -= 1;
        if self.whole < -self.depth {
            (self.whole, self.part) = (-self.depth, 0);
        }
    }

    fn signal(&mut self, now_ns: u64) {
        if self.cut_ns.is_none_or(|cut_ns| now_ns >= cut_ns + REFRESH_NS) {
            self.lambda = (self.lambda - self.lambda.div_ceil(10)).max(400);
            self.cut_ns = Some(now_ns);
            self.is_cut = true;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn paper_is_figure_5(start_ns in 0u64..1 << 50, events in events()) {
        let mut smoother = Smoother::new(table_3(Law::Paper), Time::from_nanos(start_ns)).unwrap();
        let mut figure = Figure5 {
            CBD: 40,
            RPmax: 100_000_000,
            RPmin: 5_000_000,
            dRP: 2_000_000,
            RP: 10_000_000,
            CNS: 40,
            NextRefreshTime: start_ns + 10_000_000,
            packet_lost_in_the_latest_RP_region: false,
        };
        let mut now_ns = start_ns;
        for (gap_ns, event) in events {
            now_ns += gap_ns;
            let now = Time::from_nanos(now_ns);
            figure.refresh(now_ns);
            match event {
                Event::Others(packets) => {
                    let sent = (0..packets).filter(|_| figure.smooth(false)).count();
                    prop_assert_eq!(smoother.take(packets, now) as usize, sent);
                }
                Event::RealTime(packets) => {
                    smoother.spend(packets, now);
                    (0..packets).for_each(|_| assert!(figure.smooth(true)));
                }
                Event::Lost(packets) => {
                    smoother.lost(packets, now);
                    figure.packet_lost_in_the_latest_RP_region = true;
                }
                Event::Delayed(delay) => {
                    smoother.delayed(delay, now);
                    smoother.advance(now);
                }
            }
            prop_assert_eq!(smoother.rate().refresh_period().as_nanos() as u64, figure.RP);
            prop_assert_eq!(smoother.next_refresh().as_nanos(), figure.NextRefreshTime);
            let waits_until = (figure.CNS <= 0).then_some(Time::from_nanos(figure.NextRefreshTime));
            prop_assert_eq!(smoother.next(), waits_until);
        }
    }

    #[test]
    fn paced_is_a_bucket_that_counts_packet_by_packet(start_ns in 0u64..1 << 50, events in events()) {
        let mut smoother = Smoother::new(table_3(Law::Paced), Time::from_nanos(start_ns)).unwrap();
        let mut bucket = Bucket {
            lambda: 4000,
            depth: 40,
            whole: 2,
            part: 0,
            filled_ns: start_ns,
            next_refresh_ns: start_ns + REFRESH_NS,
            cut_ns: None,
            others: 0,
            is_cut: false,
            is_wanted: false,
            unwanted: 0,
        };
        let mut now_ns = start_ns;
        for (gap_ns, event) in events {
            now_ns += gap_ns;
            let now = Time::from_nanos(now_ns);
            bucket.advance(now_ns);
            match event {
                Event::Others(packets) => {
                    let sent = (0..packets).filter(|_| bucket.other()).count();
                    prop_assert_eq!(smoother.take(packets, now) as usize, sent);
                }
                Event::RealTime(packets) => {
                    smoother.spend(packets, now);
                    (0..packets).for_each(|_| bucket.real_time());
                }
                Event::Lost(packets) => {
                    smoother.lost(packets, now);
                    bucket.signal(now_ns);
                }
                Event::Delayed(delay) => {
                    smoother.delayed(delay, now);
                    smoother.advance(now);
                    // Four of 8127 frames a second.
                    if delay > Duration::from_nanos(4_000_000_000 / 8127) {
                        bucket.signal(now_ns);
                    }
                }
            }
            prop_assert_eq!(u64::from(smoother.rate().credits_per_second()), bucket.lambda);
            prop_assert_eq!(smoother.next_refresh().as_nanos(), bucket.next_refresh_ns);
            prop_assert_eq!(smoother.next().is_none(), bucket.whole >= 1);
        }
    }

    /// Others that ask when they are told to find a packet, and not a nanosecond sooner.
    #[test]
    fn the_next_packet_comes_when_it_was_promised(
        is_paced: bool,
        real_time in prop::collection::vec(prop_oneof![9 => 0u32..3, 1 => 0u32..100], 1..300),
    ) {
        let law = if is_paced { Law::Paced } else { Law::Paper };
        let mut smoother = Smoother::new(table_3(law), Time::ZERO).unwrap();
        let mut now = Time::ZERO;
        for packets in real_time {
            smoother.take(1000, now);
            smoother.spend(packets, now);
            let mut next = smoother.next().expect("nothing is left");
            prop_assert!(next > now);
            prop_assert_eq!(smoother.take(1, Time::from_nanos(next.as_nanos() - 1)), 0);
            // A refresh on the way raises the rate; a promise is of the latest look.
            next = smoother.next().unwrap();
            prop_assert!(smoother.take(1000, next) >= 1);
            now = next;
        }
    }

    /// Whatever real-time packets use up, others have a packet in a refresh period, and what that forgives is counted.
    #[test]
    fn others_are_not_starved(is_paced: bool, per_milli in 10u32..100) {
        let law = if is_paced { Law::Paced } else { Law::Paper };
        let mut smoother = Smoother::new(table_3(law), Time::ZERO).unwrap();
        smoother.take(40, Time::ZERO);
        let mut others = 0;
        for milli in 0..1000 {
            let now = Time::from_millis(milli);
            others += smoother.take(1, now);
            smoother.spend(per_milli, now);
        }
        // Of paced 100 refreshes; of figure 5 one each RPmin in the end, and 40 credits at most each.
        let least = if is_paced { 98 } else { 190 };
        prop_assert!(others >= least, "{others}");
        prop_assert!(!is_paced || others <= 101, "{others}");
        prop_assert!(smoother.credits().forgiven() >= u64::from(per_milli - 9) * 1000 - 40);
    }

    /// No more losses than Z of the packets go without a signal, but for those that it keeps the tolerance for; and so few do.
    #[test]
    fn losses_within_the_tolerance_are_no_signal(
        z_percent in 0u32..=100,
        losses in prop::collection::vec((1u32..50, 0u32..4), 1..200),
    ) {
        let parameters = Parameters { loss_tolerance: f64::from(z_percent) / 100.0, ..table_3(Law::Paper) };
        let mut smoother = Smoother::new(parameters, Time::ZERO).unwrap();
        let most = (40 * z_percent).max(100);
        // Losses that are tolerated, in percent of a packet.
        let (mut tolerated, mut now) = (0, Time::ZERO);
        for (sent, lost) in losses {
            let before = smoother.rate().refresh_period();
            smoother.spend(sent, now);
            smoother.lost(lost, now);
            tolerated = (tolerated + sent * z_percent).min(most);
            let is_signal = lost * 100 > tolerated;
            tolerated = tolerated.saturating_sub(lost * 100);
            now = smoother.next_refresh();
            smoother.advance(now);
            let after = smoother.rate().refresh_period();
            let milli = Duration::from_millis;
            let expected = if is_signal { milli(100).min(before * 2) } else { milli(5).max(before - milli(2)) };
            prop_assert_eq!(after, expected, "{} of {}", lost, sent);
        }
    }
}

#[test]
fn what_did_not_leave_is_given_back() {
    for law in [Law::Paper, Law::Paced] {
        let mut smoother = Smoother::new(table_3(law), Time::ZERO).unwrap();
        let allowed = smoother.take(100, Time::ZERO);
        assert_eq!(smoother.take(100, Time::ZERO), 0);
        smoother.credits().give_back(allowed - 1);
        assert_eq!(smoother.take(100, Time::ZERO), allowed - 1, "{law:?}");
    }

    // Others that had nothing in the end get their packet after the refresh.
    let mut smoother = Smoother::new(table_3(Law::Paced), Time::ZERO).unwrap();
    let allowed = smoother.take(2, Time::ZERO);
    smoother.credits().give_back(allowed);
    smoother.spend(100, Time::from_millis(9));
    assert_eq!(smoother.take(2, Time::from_millis(10)), 1);
    // What did not leave brings no tolerance.
    let one_in_two = Parameters {
        loss_tolerance: 0.5,
        ..table_3(Law::Paced)
    };
    for (given_back, rate) in [(0, 4000), (1, 3600)] {
        let mut smoother = Smoother::new(one_in_two, Time::ZERO).unwrap();
        smoother.take(2, Time::ZERO);
        smoother.credits().give_back(given_back);
        smoother.lost(1, Time::ZERO);
        assert_eq!(smoother.rate().credits_per_second(), rate);
    }
}

#[test]
fn a_rate_that_nobody_waited_for_is_lower_afterwards() {
    let mut smoother = Smoother::new(table_3(Law::Paced), Time::ZERO).unwrap();
    let mut rate_after = |periods: std::ops::Range<u64>, others_wait: bool| {
        for period in periods {
            smoother.advance(Time::from_millis(10 * period));
            if others_wait {
                smoother.credits().others_wait();
            }
        }
        smoother.rate().credits_per_second()
    };
    // Nobody waits in the first two periods, all do in the third and fourth.
    assert_eq!(rate_after(1..3, false), 4000);
    assert_eq!(rate_after(3..4, true), 4000);
    assert_eq!(rate_after(4..5, true), 3940);
    assert_eq!(rate_after(5..6, false), 3960);
    // Half of the first rate is left after however long.
    assert_eq!(rate_after(6..400, false), 3960);
    assert_eq!(rate_after(400..402, true), 2000);
    assert_eq!(rate_after(402..403, true), 2020);
}

#[test]
fn what_leaves_elsewhere_is_not_for_those_that_ask() {
    for law in [Law::Paced, Law::Paper] {
        let mut smoother = Smoother::new(table_3(law), Time::ZERO).unwrap();
        while smoother.take(100, Time::ZERO) > 0 {}
        let taken_in_100_ms = |smoother: &mut Smoother, from: u64, elsewhere| {
            smoother.set_elsewhere(elsewhere, Time::from_millis(from));
            let taken = |tenth| smoother.take(100, Time::from_nanos((from * 10 + tenth) * 100_000));
            (1..=1000).map(taken).sum::<u32>()
        };
        let mut part = |from, elsewhere| {
            let taken = f64::from(taken_in_100_ms(&mut smoother, from, elsewhere));
            taken / (f64::from(smoother.rate().credits_per_second()) / 10.0)
        };
        // λ rises meanwhile, and `paper` brings what a refresh does.
        for (from, elsewhere, least, most) in [
            (0, 0, 0.7, 1.01),
            (100, 2000, 0.4, 0.75),
            (200, 1_000_000, 0.0, 0.03),
        ] {
            let part = part(from, elsewhere);
            assert!(
                (least..=most).contains(&part),
                "{law:?}, {elsewhere} elsewhere: {part}"
            );
        }
        assert!(smoother.next().is_some_and(|next| next > Time::from_millis(300)));
    }
}

#[test]
fn a_delay_of_more_than_four_frames_is_a_signal() {
    let signalled_by = |delay: u64| {
        let mut smoother = Smoother::new(table_3(Law::Paced), Time::ZERO).unwrap();
        smoother.delayed(Duration::from_micros(delay), Time::ZERO);
        smoother.rate().credits_per_second() < 4000
    };
    // Four frame times are 492 µs.
    assert!(!signalled_by(492));
    assert!(signalled_by(493));
}

#[test]
fn parameters_that_break_a_rule_are_refused_by_its_name() {
    let good = table_3(Law::Paced);
    let milli = Duration::from_millis;
    assert!(Smoother::new(good, Time::ZERO).is_ok());
    for loss_tolerance in [0.0, 1.0] {
        assert!(
            Smoother::new(
                Parameters {
                    loss_tolerance,
                    ..good
                },
                Time::ZERO
            )
            .is_ok()
        );
    }
    let refused = |parameters: Parameters, error: ParametersError, name: &str| {
        assert_eq!(Smoother::new(parameters, Time::ZERO).unwrap_err(), error);
        let text = error.to_string();
        assert!(text.starts_with(name) && !text.contains('\n'), "{text}");
    };
    let bad = |change: fn(&mut Parameters)| {
        let mut parameters = good;
        change(&mut parameters);
        parameters
    };
    refused(
        bad(|bad| bad.bucket_depth = 0),
        ParametersError::NoCredits,
        "CBD is 0",
    );
    let step = bad(|bad| bad.refresh_period_step = Duration::ZERO);
    refused(step, ParametersError::NoStep, "ΔRP is 0");
    let min = bad(|bad| bad.refresh_period_min = Duration::from_millis(11));
    refused(min, ParametersError::BelowMin, "RPmin is above RP0");
    let initial = Parameters {
        refresh_period: milli(101),
        ..good
    };
    refused(initial, ParametersError::AboveMax, "RP0 is above RPmax");
    let short = bad(|bad| bad.refresh_period_min = TIMER_GRAIN - Duration::from_nanos(1));
    refused(short, ParametersError::BelowTimer, "RPmin is below 1 ms");
    for loss_tolerance in [-0.1, 1.1, f64::NAN] {
        let parameters = Parameters {
            loss_tolerance,
            ..good
        };
        refused(parameters, ParametersError::NoShare, "Z is the share");
    }
}

#[test]
fn extremes_do_not_overflow() {
    for law in [Law::Paper, Law::Paced] {
        let parameters = Parameters {
            bucket_depth: u32::MAX,
            refresh_period_min: TIMER_GRAIN,
            refresh_period_max: Duration::MAX,
            loss_tolerance: 1.0,
            link_frames_per_second: NonZeroU32::MAX,
            law,
            ..table_3(law)
        };
        let mut smoother = Smoother::new(parameters, Time::ZERO).unwrap();
        for now in [Time::ZERO, Time::MAX, Time::ZERO, Time::MAX] {
            for _ in 0..3 {
                smoother.spend(u32::MAX, now);
                smoother.lost(u32::MAX, now);
                smoother.delayed(Duration::MAX, now);
                smoother.take(u32::MAX, now);
                smoother.next();
            }
        }
        let slow = Parameters::of_link(NonZeroU64::MIN, u16::MAX);
        let mut slow = Smoother::new(Parameters { law, ..slow }, Time::ZERO).unwrap();
        slow.lost(1, Time::ZERO);
        assert!(slow.rate().credits_per_second() >= 1);
    }
}
