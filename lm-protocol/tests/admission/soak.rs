//! Everything goes wrong at once, from one seed: what may never happen does not.
//!
//! `cargo xtask soak --admission` runs many seeds; `LM_SOAK_SEEDS=FROM..TO cargo test -p lm-protocol --test admission soak` does
//! the same without it.

use crate::world::*;
use lm_protocol::admission::Limits;
use lm_protocol::time::Time;
use std::time::Duration;

const MILLISECOND: Duration = Duration::from_millis(1);

fn setup(seed: u64, random: &mut Random) -> Setup {
    let hosts = match random.below(8) {
        0 => 40 + random.below(60),
        1 => 2,
        _ => 3 + random.below(20),
    } as usize;
    let voters = match random.chance(600) {
        true => [1, 2, 3, 4, 5][random.below(5) as usize].min(hosts),
        false => 0,
    };
    // Half of the seeds on a good network, where more comes of it.
    let bad = random.chance(500);
    let mut worse = |bound| {
        if bad {
            random.below(bound)
        } else {
            random.below(bound / 20 + 1)
        }
    };
    let (loss_per_mille, duplicate_per_mille) = (worse(400), worse(400));
    let delay_max = MILLISECOND + Duration::from_micros(worse(400_000));
    let mut setup = Setup::new(seed, hosts, voters);
    setup.weather = Weather {
        loss_per_mille,
        duplicate_per_mille,
        delay_min: Duration::from_micros(20),
        delay_max,
    };
    setup.places = 1 + random.below(3) as usize;
    setup.is_drifting = true;
    setup.patience = Duration::from_millis(200 + random.below(8000));
    if random.chance(200) {
        setup.limits = Limits {
            hosts: 1 + random.below(hosts as u64) as usize,
            outgoing: 1 + random.below(8) as usize,
            waiting: random.below(8) as usize,
        };
    }
    setup
}

/// Fills a world with work and trouble for some seconds.
fn fill(world: &mut World, random: &mut Random) {
    let hosts = world.setup.hosts as u64;
    let span = 12_000_000;
    let moment = |random: &mut Random| Time::ZERO + Duration::from_micros(random.below(span));
    // Several at the same instant, to be sure that they race.
    for _ in 0..random.below(12) {
        let at = moment(random);
        for _ in 0..2 + random.below(4) {
            add_job(world, random, at);
        }
    }
    for _ in 0..10 + random.below(15 * hosts) {
        let at = moment(random);
        add_job(world, random, at);
    }
    if random.chance(700) {
        for _ in 0..random.below(hosts + 2) {
            let death = [Death::Host, Death::Daemon][random.below(2) as usize];
            let down = Duration::from_millis(random.below(4000));
            let at = moment(random);
            world.die(at, random.below(hosts) as usize, death, down);
        }
    }
    for _ in 0..random.below(60) {
        let at = moment(random);
        world.attack(at);
    }
    for audit in 0..60 {
        world.audit(Time::ZERO + Duration::from_millis(500 * audit));
    }
}

fn add_job(world: &mut World, random: &mut Random, at: Time) {
    let hosts = world.setup.hosts as u64;
    let sender = random.below(hosts);
    let receiver = (sender + 1 + random.below(hosts - 1)) % hosts;
    let len = 1 << (10 + random.below(24));
    // Few of them long.
    let hold = match random.below(10) {
        0 => random.below(8_000_000),
        1..3 => random.below(500_000),
        _ => random.below(20_000),
    };
    let hold = Duration::from_micros(hold);
    world.job(at, sender as usize, receiver as usize, len, hold);
}

/// One seed; gives what it did. Panics when something happens that may not.
fn run(seed: u64) -> String {
    let mut random = Random(seed ^ 0xad31_5510);
    let setup = setup(seed, &mut random);
    let mut world = World::new(setup);
    fill(&mut world, &mut random);
    world.run(Time::MAX);
    world.check_quiet();
    let count = |fate| world.jobs.iter().filter(|job| job.fate == fate).count();
    assert_eq!(count(Fate::Asking) + count(Fate::Holding), 0);
    format!(
        "{} messages, {} hosts, {} voters, {} requests, {} done, {} one-copy, {} cancelled, {} lost, {} active at most, {} attacks",
        world.datagrams,
        world.setup.hosts,
        world.setup.voters,
        world.jobs.len(),
        count(Fate::Done),
        count(Fate::OneCopy),
        count(Fate::Cancelled),
        count(Fate::Lost),
        world.most_active,
        world.attacks,
    )
}

/// The seeds that LM_SOAK_SEEDS names, `FROM..TO`, or the first 40.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("LM_SOAK_SEEDS") else {
        return 0..40;
    };
    let range = text
        .split_once("..")
        .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.unwrap_or_else(|| panic!("LM_SOAK_SEEDS={text} is not of the form FROM..TO"))
}

#[test]
fn seeds_settle() {
    for seed in seeds() {
        match std::panic::catch_unwind(|| run(seed)) {
            Ok(done) => println!("soak: {seed} ok, {done}"),
            Err(panic) => {
                let text = (panic.downcast_ref::<String>().map(String::as_str))
                    .or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or("a panic");
                println!("soak: {seed} failed: {}", text.lines().next().unwrap_or_default());
                panic!("seed {seed}; again: cargo xtask soak --admission --seeds 1 --from {seed}");
            }
        }
    }
}

/// What a seed says it did, it does again.
#[test]
fn a_seed_is_a_whole_run() {
    for seed in [3, 17] {
        assert_eq!(run(seed), run(seed));
    }
}

/// A thousand hosts, a network that loses, and one active receiver at a time.
#[test]
fn a_thousand_hosts_take_turns() {
    let mut setup = Setup::new(1000, 1000, 5);
    setup.weather.loss_per_mille = 20;
    setup.weather.delay_max = MILLISECOND;
    let mut world = World::new(setup);
    let mut random = Random(1);
    // The voters know after PROMISE that they are bound by nothing.
    for step in 0..60 {
        let at = Time::from_millis(2100 + 40 * step);
        for _ in 0..3 {
            let sender = random.below(1000) as usize;
            let receiver = (sender + 1 + random.below(999) as usize) % 1000;
            world.job(at, sender, receiver, 1 << 20, 5 * MILLISECOND);
        }
    }
    world.run(Time::MAX);
    world.check_quiet();
    let done = world.jobs.iter().filter(|job| job.fate == Fate::Done).count();
    assert!(done >= 30, "{done} of 60 moments had a receiver");
    assert_eq!(world.most_active, 1);
}
