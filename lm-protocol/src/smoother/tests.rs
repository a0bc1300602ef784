//! What processes write into a page that they share.

use super::*;
use core::num::NonZeroU64;
use proptest::prelude::*;

fn words(words: [u64; 16]) -> Credits {
    let [
        rate,
        period,
        depth,
        credits,
        filled,
        next,
        others,
        at_refresh,
        sent,
        forgiven,
        wanted,
        lost,
        delay,
        kernel,
        declared,
        link_frames,
    ] = words;
    Credits {
        rate: rate.into(),
        refresh_period_ns: period.into(),
        depth: (depth as i64).into(),
        billionths: (credits as i64).into(),
        filled_ns: filled.into(),
        next_refresh_ns: next.into(),
        others: others.into(),
        others_at_refresh: at_refresh.into(),
        sent: sent.into(),
        forgiven: forgiven.into(),
        wanted: wanted.into(),
        lost: lost.into(),
        delay_max_ns: delay.into(),
        kernel: kernel.into(),
        declared: declared.into(),
        link_frames: link_frames.into(),
    }
}

fn word() -> impl Strategy<Value = u64> {
    let edges = [0, 1, u64::MAX, i64::MAX as u64, i64::MIN as u64, 1_000_000_000];
    prop_oneof![any::<u64>(), prop::sample::select(edges.to_vec())]
}

proptest! {
    /// Nobody who takes credits fails by it, and after a period of the owner's others have packets again.
    #[test]
    fn whatever_a_page_holds_its_owner_mends(page in prop::array::uniform16(word()), is_paper: bool) {
        let law = if is_paper { Law::Paper } else { Law::Paced };
        let parameters = Parameters { law, ..Parameters::of_link(NonZeroU64::new(100_000_000).unwrap(), 1514) };
        let now = Time::from_millis(1000);
        let credits = words(page);
        for _ in 0..3 {
            credits.take(5, now);
            credits.spend(5, now);
            credits.give_back(5);
            credits.next();
            credits.departures();
        }
        let _ = credits.rate().refresh_period();
        let mut smoother = Smoother::over(credits, parameters, now).unwrap();
        // After it has looked: it keeps nothing of what it reads there.
        smoother.credits = words(page);
        let mut others = 0;
        for milli in 1000..1500 {
            let now = Time::from_millis(milli);
            smoother.look(now);
            let wait = smoother.next_refresh().since(now);
            prop_assert!(!wait.is_zero() && wait <= parameters.refresh_period_max);
            others += smoother.credits.take(100, now);
        }
        prop_assert!(others >= 4, "{others}");
        prop_assert_eq!(smoother.credits.rate(), smoother.rate());
        let credits = smoother.credits();
        prop_assert_eq!(credits.link_frames_per_second(), Some(parameters.link_frames_per_second));
        prop_assert!(credits.whole().abs() <= 40 && credits.declare(1).is_ok());
        // A look's difference to the next is right again.
        let before = credits.departures();
        credits.spend(3, now);
        prop_assert_eq!(credits.departures().first.wrapping_sub(before.first), 3);
    }
}
