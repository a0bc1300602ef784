//! Credits that several take: threads here, as processes that have them in one page.

use lm_protocol::smoother::{Credits, Law, Parameters, Smoother};
use lm_protocol::time::Time;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn table_3(law: Law) -> Parameters {
    Parameters {
        law,
        ..Parameters::of_link(NonZeroU64::new(100_000_000).unwrap(), 1514)
    }
}

/// Credits that the test holds as well as their owner.
fn shared(law: Law) -> (Arc<Credits>, Smoother<Arc<Credits>>) {
    let credits = Arc::new(Credits::default());
    let smoother = Smoother::over(Arc::clone(&credits), table_3(law), Time::ZERO).unwrap();
    (credits, smoother)
}

/// Four threads ask as fast as they can, each with a look at the time of its own, and real-time packets leave meanwhile: in ten seconds all of
/// them have what comes in ten seconds, and no more.
#[test]
fn together_they_take_what_comes() {
    let (credits, smoother) = shared(Law::Paced);
    let clock = AtomicU64::new(0);
    let end_ns = 10_000_000_000;
    let ask = |real_time: u32| {
        let mut taken = 0;
        loop {
            let now_ns = clock.fetch_add(20_000, Ordering::Relaxed);
            if now_ns >= end_ns {
                return taken;
            }
            let now = Time::from_nanos(now_ns);
            taken += u64::from(credits.take(3, now));
            if now_ns.is_multiple_of(2_000_000) {
                credits.spend(real_time, now);
                taken += u64::from(real_time);
            }
        }
    };
    let taken: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = [0, 1, 0, 1]
            .map(|real_time| scope.spawn(move || ask(real_time)))
            .into();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    // Two at first, 4000 a second, and what a refresh forgave to those that had nothing.
    let most = 2 + 40_000 + smoother.credits().forgiven() + 1;
    assert!((39_000..=most).contains(&taken), "{taken} of {most}");
    let departures = credits.departures();
    assert_eq!(departures.first + departures.others, taken);
    assert!(departures.others_wait && !credits.departures().others_wait);
}

/// The owner is dead: whoever comes first makes the refresh.
#[test]
fn a_dead_owner_starves_nobody() {
    for law in [Law::Paper, Law::Paced] {
        let (credits, smoother) = shared(law);
        drop(smoother);
        let taken: u32 = (0..10_000)
            .map(|tick| credits.take(9, Time::from_nanos(tick * 100_000)))
            .sum();
        // A second of 4000, and a bucket that was full.
        assert!((3900..=4045).contains(&taken), "{law:?}: {taken}");
        assert_eq!(credits.rate().credits_per_second(), 4000);
        // More real time than there are credits: others have one in each period.
        let mut others = 0;
        for milli in 1000..2000 {
            let now = Time::from_millis(milli);
            others += credits.take(1, now);
            credits.spend(50, now);
        }
        assert!((98..=110).contains(&others), "{law:?}: {others}");
    }
}

#[test]
fn the_owner_hears_what_others_tell() {
    let (credits, mut smoother) = shared(Law::Paced);
    let rate = |smoother: &mut Smoother<Arc<Credits>>, millis| {
        smoother.look(Time::from_millis(millis));
        assert_eq!(smoother.rate(), credits.rate());
        credits.rate().credits_per_second()
    };
    assert_eq!(rate(&mut smoother, 1), 4000);
    credits.tell_lost(1);
    assert_eq!(rate(&mut smoother, 2), 3600);
    assert_eq!(rate(&mut smoother, 12), 3600);
    credits.tell_delayed(Duration::from_micros(492));
    assert_eq!(rate(&mut smoother, 13), 3600);
    credits.tell_delayed(Duration::from_micros(493));
    credits.tell_delayed(Duration::ZERO);
    assert_eq!(rate(&mut smoother, 14), 3240);
    // It adapts once in a period, even where somebody else has made the refresh.
    credits.take(9, Time::from_nanos(20_100_000));
    assert_eq!(rate(&mut smoother, 21), 3240, "it was cut in this period");
    credits.take(9, Time::from_nanos(30_100_000));
    assert_eq!(rate(&mut smoother, 31), 3260);
    assert_eq!(rate(&mut smoother, 32), 3260);
}

#[test]
fn the_next_owner_goes_on_at_the_rate_of_the_last() {
    for law in [Law::Paper, Law::Paced] {
        let (credits, mut smoother) = shared(law);
        credits.tell_lost(1);
        smoother.look(Time::from_millis(1));
        smoother.look(Time::from_millis(10));
        let before = credits.rate();
        assert!(before.credits_per_second() < 4000, "{law:?}");
        let now = Time::from_millis(5000);
        let next = Smoother::over(Arc::clone(&credits), table_3(law), now).unwrap();
        assert_eq!((next.rate(), credits.rate()), (before, before));
        // Of another link it knows nothing.
        let other = Parameters::of_link(NonZeroU64::new(500_000_000).unwrap(), 1514);
        let other = Smoother::over(Arc::clone(&credits), other, now).unwrap();
        assert_eq!(other.rate().credits_per_second(), 20_000);
    }
}
