//! A decision of the smoother, which has to take 100 ns at most: `cargo bench -p lm-protocol --bench smoother`.

use std::num::NonZeroU64;
use std::time::Duration;

use divan::{Bencher, black_box};
use lm_protocol::smoother::{Law, Parameters, Smoother};
use lm_protocol::time::Time;

fn main() {
    divan::main();
}

/// A look each microsecond: some packets are allowed, most wait, and a real-time one comes each 32 µs.
#[divan::bench(args = [Law::Paper, Law::Paced])]
fn decision(bencher: Bencher<'_, '_>, law: Law) {
    let parameters = Parameters {
        law,
        ..Parameters::of_link(NonZeroU64::new(1_000_000_000).unwrap(), 1514)
    };
    let mut smoother = Smoother::new(parameters, Time::ZERO).unwrap();
    let (mut now, mut turn) = (Time::ZERO, 0u32);
    bencher.bench_local(|| {
        now += Duration::from_micros(1);
        turn += 1;
        if turn.is_multiple_of(32) {
            smoother.spend(1, black_box(now));
        }
        smoother.take(1, black_box(now))
    });
}
