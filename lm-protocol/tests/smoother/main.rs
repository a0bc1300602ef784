//! The smoother's laws, and the smoother in the network of SS-RTUDP's table 4.

mod laws;
mod network;
mod shared;

use lm_protocol::smoother::Law;
use network::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// As long as the paper's experiment.
const TABLE_4: Duration = Duration::from_secs(300);

/// What the port of figure 10 carries, in packets a second.
const PORT: f64 = 8127.4;

/// What became of a network.
#[derive(Debug)]
struct Run {
    seed: u64,
    real_time: Tally,
    others: Tally,
    answered_ns: Vec<u64>,
}

/// Runs a network from each seed, on all cores.
fn runs(bed: Bed, offered: &[Offered], time: Duration, seeds: u64) -> Vec<Run> {
    let next_seed = AtomicU64::new(0);
    let run_some = || {
        let mut runs = Vec::new();
        loop {
            let seed = next_seed.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return runs;
            }
            let mut network = Network::new(bed, offered, seed);
            network.run_until(time);
            let run = Run {
                seed,
                real_time: network.real_time(),
                others: network.others(),
                answered_ns: network.answered_ns().collect(),
            };
            balance(&network);
            runs.push(run);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run_some)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Every packet that was sent is accounted for.
fn balance(network: &Network) {
    let all: Tally = [network.real_time(), network.others()].into_iter().sum();
    let found = all.leaf_drops + all.port_drops + all.delivered + network.under_way();
    assert_eq!(all.sent, found, "{all:?}");
}

/// Most that a run lost of its real-time packets and of its others, in percent.
fn worst(name: &str, runs: &[Run]) -> (f64, f64) {
    let most = |lost: fn(&Run) -> f64| runs.iter().map(lost).fold(0.0, f64::max) * 100.0;
    let worst = (most(|run| run.real_time.lost()), most(|run| run.others.lost()));
    println!(
        "{name}: of real-time packets at most {:.3} % lost, of others {:.2} %",
        worst.0, worst.1
    );
    worst
}

/// From a real-time packet that the port dropped to its host's next lower rate, p99 in milliseconds.
fn answered_ms(name: &str, runs: &[Run]) -> f64 {
    let mut answered_ns: Vec<u64> = runs.iter().flat_map(|run| &run.answered_ns).copied().collect();
    answered_ns.sort_unstable();
    let p99_ms = answered_ns
        .get(answered_ns.len() * 99 / 100)
        .map_or(0.0, |&ns| ns as f64 / 1e6);
    println!(
        "{name}: {} losses were answered, after {p99_ms:.1} ms (p99)",
        answered_ns.len()
    );
    p99_ms
}

fn held(held: Held) -> Bed {
    Bed { held, ..FIGURE_10 }
}

/// Others that arrived, in packets a second.
fn goodput(run: &Run) -> f64 {
    run.others.delivered as f64 / TABLE_4.as_secs_f64()
}

/// Table 4, by the law that is the default, whoever sends the others; and what a hand that knows all rates would reach.
#[test]
fn table_4_is_reproduced() {
    let by_hand = Held::Fixed((0.97 * PORT - 1200.0) / 3.0);
    let by_hand = runs(held(by_hand), &[PAPER; 3], TABLE_4, 10);
    let by_hand = by_hand.iter().map(goodput).sum::<f64>() / by_hand.len() as f64;
    for (name, how, seeds) in [
        ("paced, others of the kernel", Held::ByHtb(Law::Paced), 100),
        ("paced, others of LM", Held::ByCredits(Law::Paced), 10),
    ] {
        let runs = runs(held(how), &[PAPER; 3], TABLE_4, seeds);
        worst(name, &runs);
        let answered_ms = answered_ms(name, &runs);
        assert!(answered_ms <= 20.0, "{name}: {answered_ms}");
        for run in &runs {
            let (seed, goodput) = (run.seed, goodput(run));
            assert!(run.real_time.lost() <= 0.000_74, "{name}, seed {seed}: {run:?}");
            assert!(run.others.lost() <= 0.226, "{name}, seed {seed}: {run:?}");
            assert!(
                goodput >= 0.85 * by_hand,
                "{name}, seed {seed}: {goodput} of {by_hand} packets/s"
            );
        }
    }
}

/// Figure 5 learns by losing, and still loses a fifth at most of what is lost without it.
#[test]
fn figure_5_loses_a_fifth_of_what_is_lost_without_it() {
    let without = runs(held(Held::Not), &[PAPER; 3], TABLE_4, 10);
    worst("not held back", &without);
    for run in &without {
        assert!(run.real_time.lost() > 0.05, "{run:?}");
        // What the port cannot carry.
        let all: Tally = [run.real_time, run.others].into_iter().sum();
        assert!(all.lost() >= 1.0 - PORT / 8700.0 - 0.005, "{run:?}");
    }
    let least = without.iter().map(|run| run.real_time.lost()).fold(1.0, f64::min);
    for (name, how) in [
        ("figure 5, others of the kernel", Held::ByHtb(Law::Paper)),
        ("figure 5, others of LM", Held::ByCredits(Law::Paper)),
    ] {
        let runs = runs(held(how), &[PAPER; 3], TABLE_4, 10);
        let (lost, _) = worst(name, &runs);
        answered_ms(name, &runs);
        assert!(lost / 100.0 <= least / 5.0, "{name}: {lost} % of {least}");
    }
}

/// The parameters are figure 10's, and the networks are not.
#[test]
fn other_networks_lose_little() {
    let unequal = |hosts: &[(u64, u64)]| -> Vec<Offered> {
        let offered = |&(real_time, others): &(u64, u64)| Offered { real_time, others };
        hosts.iter().map(offered).collect()
    };
    let paper = unequal(&[(400, 2500); 3]);
    let five_times = unequal(&[(2000, 12_500); 3]);
    let two = unequal(&[(400, 3000), (800, 5000)]);
    let six = unequal(&[
        (50, 400),
        (100, 800),
        (150, 1200),
        (200, 1600),
        (250, 2000),
        (300, 2400),
    ]);
    let time = Duration::from_secs(60);
    for how in [Held::ByHtb(Law::Paced), Held::ByCredits(Law::Paced)] {
        for port_frames in [16, 32, 64] {
            for (mbit_per_second, offered) in [(100, &paper), (500, &five_times), (100, &two), (100, &six)] {
                let bed = Bed {
                    link_bits_per_second: mbit_per_second * 1_000_000,
                    port_frames,
                    ..held(how)
                };
                let hosts = offered.len();
                let name =
                    format!("{how:?}, {hosts} hosts, {port_frames} frames at {mbit_per_second} Mbit/s");
                let (lost, _) = worst(&name, &runs(bed, offered, time, 3));
                assert!(lost <= 0.2, "{name}: {lost} %");
            }
        }
    }
}

/// What a host leaves the others take, and give it back.
#[test]
fn what_a_host_leaves_others_take_and_give_back() {
    let greedy = Offered {
        real_time: 400,
        others: 5000,
    };
    for how in [Held::ByHtb(Law::Paced), Held::ByCredits(Law::Paced)] {
        for seed in 0..10 {
            let mut network = Network::new(held(how), &[greedy; 3], seed);
            let delivered = |network: &mut Network, from: u64, to: u64| -> [f64; 3] {
                network.run_until(Duration::from_secs(from));
                let before = [0, 1, 2].map(|host| network.others_of(host).delivered);
                network.run_until(Duration::from_secs(to));
                let seconds = (to - from) as f64;
                [0, 1, 2].map(|host| (network.others_of(host).delivered - before[host]) as f64 / seconds)
            };
            let shares = delivered(&mut network, 5, 20);
            network.stop(2, true);
            // The fourth second after that.
            let alone = delivered(&mut network, 23, 24);
            let taken = alone[0] + alone[1] - shares[0] - shares[1];
            assert!(
                taken >= 0.8 * shares[2],
                "{how:?}, seed {seed}: {taken} of {shares:?}"
            );
            let before = network.real_time();
            network.stop(2, false);
            network.run_until(Duration::from_secs(28));
            let lost = network.real_time().since(&before).lost();
            assert!(lost <= 0.002, "{how:?}, seed {seed}: {lost}");
            let again = delivered(&mut network, 28, 43);
            assert!(
                again[2] >= 0.8 * shares[2],
                "{how:?}, seed {seed}: {again:?} of {shares:?}"
            );
            balance(&network);
        }
    }
}
