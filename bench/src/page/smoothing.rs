//! `lm-bench rt smoothing`: figure 6 of SS-RTUDP, a burst before and after the smoother, by the smoother that hosts have.
//!
//! The paper's burst is "symmetric in [0, 6 RP0]". Here it is a triangle with its peak at 3 RP0, twice as high as PAR0, the rate at which credits
//! come at first: as many packets as credits come in that time. Nothing is lost meanwhile.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use lm_protocol::smoother::{Law, Parameters, Smoother};
use lm_protocol::time::Time;
use maud::html;

use super::plot::{Axis, Chart, Line, Point};
use super::{document, write};
use crate::cli::{Failure, chain, parse_rate};

/// How long the burst is, in RP0.
const PERIODS: u32 = 6;
/// A point of a line is what came or left in such a part of RP0.
const PARTS: u32 = 2;
/// Length of an Ethernet frame at MTU 1500.
const FRAME_LEN: u16 = 1514;

/// Draw a burst before and after the smoother (SS-RTUDP, figure 6)
#[derive(Debug, clap::Args)]
pub struct SmoothingArgs {
    /// Write the page to this file
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
    /// Rate of the link
    #[arg(long, value_name = "RATE", value_parser = parse_rate, default_value = "100M")]
    rate: NonZeroU64,
}

/// Runs the smoother with both laws, and writes the page.
///
/// # Errors
/// A page that cannot be written.
pub fn smoothing(args: &SmoothingArgs) -> Result<(), Failure> {
    let parameters = |law| Parameters {
        law,
        ..Parameters::of_link(args.rate, FRAME_LEN)
    };
    let period = parameters(Law::Paced).refresh_period;
    let burst = arrivals(&parameters(Law::Paced));
    let after = |law| after(&burst, parameters(law));
    let lines = [
        ("before", burst.clone()),
        ("after, paced", after(Law::Paced)?),
        ("after, paper", after(Law::Paper)?),
    ];
    let axis = |title: &str| Axis {
        title: title.to_owned(),
        logarithmic: false,
        ticks: Vec::new(),
    };
    let chart = Chart {
        title: format!("A burst of {} packets before and after the smoother", burst.len()),
        note: format!("packets a second, in steps of {:?}", period / PARTS),
        x: Axis {
            ticks: (0..=2 * PERIODS)
                .map(|at| (f64::from(at) * period.as_secs_f64() * 1e3, format!("{at} RP0")))
                .step_by(2)
                .collect(),
            ..axis("time")
        },
        y: axis("packets/s"),
        lines: lines
            .map(|(name, times)| Line {
                name: name.to_owned(),
                points: rates(&times, period / PARTS),
            })
            .into(),
    };
    let page = document(
        "SS-RTUDP, figure 6",
        html! { main { section { h2 { "SS-RTUDP, figure 6" } div.charts { (chart.draw()) } } } },
    );
    write(&args.html, &page.into_string())
}

/// When the burst's packets come.
fn arrivals(parameters: &Parameters) -> Vec<Time> {
    let len_ns = (parameters.refresh_period * PERIODS).as_nanos() as f64;
    let count = PERIODS * parameters.bucket_depth;
    let all = (0..count).map(|number| {
        // Of a triangle's area the part before a moment; twice the square of that moment's before the peak.
        let part = (f64::from(number) + 0.5) / f64::from(count);
        let at = match part < 0.5 {
            true => (part / 2.0).sqrt(),
            false => 1.0 - ((1.0 - part) / 2.0).sqrt(),
        };
        Time::from_nanos((at * len_ns) as u64)
    });
    all.collect()
}

/// When packets that came at these times leave, if none is real-time.
fn after(arrivals: &[Time], parameters: Parameters) -> Result<Vec<Time>, Failure> {
    let smoother = Smoother::new(parameters, Time::ZERO);
    let mut smoother = smoother.map_err(|error| Failure::new(chain(&error)))?;
    let mut left = Vec::with_capacity(arrivals.len());
    let mut came = 0;
    while left.len() < arrivals.len() {
        let waits = came > left.len();
        let next = arrivals.get(came).copied().into_iter();
        let next = next.chain(smoother.next().filter(|_| waits)).min();
        let now = next.expect("one comes, or one waits for a credit");
        came += arrivals[came..].iter().take_while(|at| **at <= now).count();
        let leave = smoother.take((came - left.len()) as u32, now);
        left.extend((0..leave).map(|_| now));
    }
    Ok(left)
}

/// How many there were in a second, step by step.
fn rates(times: &[Time], step: Duration) -> Vec<Point> {
    let mut counts = Vec::new();
    for time in times {
        let at = (u128::from(time.as_nanos()) / step.as_nanos()) as usize;
        counts.resize(counts.len().max(at + 1), 0_u32);
        counts[at] += 1;
    }
    let step_s = step.as_secs_f64();
    let point = |(at, count)| Point {
        x: (at as f64 + 0.5) * step_s * 1e3,
        y: f64::from(count) / step_s,
        range: None,
        says: String::new(),
    };
    counts.into_iter().enumerate().map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peak(times: &[Time]) -> f64 {
        let rates = rates(times, Duration::from_millis(5));
        rates.iter().map(|point| point.y).fold(0.0, f64::max)
    }

    #[test]
    fn a_burst_leaves_whole_and_flatter() {
        let parameters = |law| Parameters {
            law,
            ..Parameters::of_link(NonZeroU64::new(100_000_000).unwrap(), FRAME_LEN)
        };
        let burst = arrivals(&parameters(Law::Paced));
        assert_eq!(burst.len(), 240);
        assert!(burst.is_sorted() && *burst.last().unwrap() < Time::from_millis(60));
        // It is symmetric, and its highest rate is twice that of the credits.
        let early = burst.iter().filter(|at| **at < Time::from_millis(30)).count();
        assert_eq!(early, 120);
        assert!((7200.0..=8000.0).contains(&peak(&burst)), "{}", peak(&burst));
        let [paced, paper] = [Law::Paced, Law::Paper].map(|law| after(&burst, parameters(law)).unwrap());
        for left in [&paced, &paper] {
            assert_eq!(left.len(), 240);
            assert!(left.is_sorted() && left.iter().zip(&burst).all(|(left, came)| left >= came));
        }
        // Credits come one by one. `paper` has them sooner at each refresh that nothing was lost before, and holds back less.
        assert!(peak(&paced) < 4500.0, "{}", peak(&paced));
        assert!(peak(&paper) > peak(&paced), "{}", peak(&paper));
    }
}
