//! Everything goes wrong at once, from one seed: what may never happen does not.
//!
//! `cargo xtask soak --admission` runs many seeds; `LM_SOAK_SEEDS=FROM..TO cargo test -p lm-protocol --test admission soak` does
//! the same without it.

use crate::seeds;
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
            ..Limits::default()
        };
    }
    if voters == 0 {
        // Silent sessions go on beyond their leases, and give way.
        setup.limits.patience = setup.patience;
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
        "{} messages, {} hosts, {} voters, {} requests, {} done, {} one-copy, {} cancelled, {} lost, {} active at \
         most, {} attacks",
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

/// Runs a seed, and says at a failure how to run it again.
fn replayable<R>(seed: u64, again: &str, run: impl FnOnce() -> R + std::panic::UnwindSafe) -> R {
    std::panic::catch_unwind(run).unwrap_or_else(|panic| {
        let text = (panic.downcast_ref::<String>().map(String::as_str))
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("a panic");
        println!("soak: {seed} failed: {}", text.lines().next().unwrap_or_default());
        panic!("seed {seed}; again: {again}");
    })
}

#[test]
fn seeds_settle() {
    let again = "cargo xtask soak --admission";
    seeds::run(
        0..40,
        again,
        |seed| Ok(run(seed)),
        |seed, done| println!("{seed}: {done}"),
    );
}

#[test]
fn every_seed_runs_once() {
    for (range, jobs) in [
        (0..1, 0),
        (0..1, 4),
        (5..105, 3),
        (7..1000, 2),
        (u64::MAX - 9..u64::MAX, 4),
    ] {
        let mut seen = Vec::new();
        let take = |seed, same| {
            assert_eq!(seed, same);
            seen.push(seed);
        };
        seeds::over(range.clone(), jobs, Ok, take).unwrap();
        seen.sort_unstable();
        assert!(
            seen.iter().copied().eq(range.clone()),
            "{range:?} in {jobs} threads: {seen:?}"
        );
    }
}

#[test]
fn a_failure_stops_all_and_is_told() {
    for jobs in [0, 3] {
        let mut done = 0;
        let one = |seed| match seed {
            60 => Err("wrong byte".to_owned()),
            _ => Ok(()),
        };
        let failure = seeds::over(0..1_000_000, jobs, one, |_, ()| done += 1).unwrap_err();
        assert_eq!(failure, (60, "wrong byte".to_owned()));
        assert!(done < 500_000, "{done}");
    }
    let two_lines = |seed: u64| -> Result<(), String> {
        assert!(seed != 9, "a\nb");
        Ok(())
    };
    let failure = seeds::over(0..20, 0, two_lines, |_, ()| ()).unwrap_err();
    assert_eq!(failure, (9, "panic: a b".to_owned()));
}

/// What a seed says it did, it does again.
#[test]
fn a_seed_is_a_whole_run() {
    for seed in [3, 17] {
        assert_eq!(run(seed), run(seed));
    }
}

/// A thousand hosts for some seconds: a network that loses, doubles and reorders, clocks that differ, programs that ask `rivals` at a time
/// at so many `moments`, hosts and daemons that die in the middle of it, voters among them, and the attacker.
fn thousand(seed: u64, voters: usize, moments: u64, rivals: u64) -> World {
    const HOSTS: u64 = 1000;
    let mut random = Random(seed ^ 0x1000_0715);
    let mut setup = Setup::new(seed, HOSTS as usize, voters);
    setup.weather = Weather {
        loss_per_mille: 20,
        duplicate_per_mille: 20,
        delay_min: Duration::from_micros(20),
        delay_max: MILLISECOND,
    };
    setup.is_drifting = true;
    let mut world = World::new(setup);
    for step in 0..moments {
        // The voters know after PROMISE, by their own clocks, that they are bound by nothing.
        let at = Time::from_millis(2200 + 50 * step);
        let mut who = [0; 2];
        for _ in 0..rivals {
            let sender = random.below(HOSTS);
            let receiver = (sender + 1 + random.below(HOSTS - 1)) % HOSTS;
            who = [sender as usize, receiver as usize];
            let hold = Duration::from_micros(random.below(20_000));
            world.job(at, who[0], who[1], 1 << (10 + random.below(20)), hold);
        }
        let host = match random.below(16) {
            // Two of them in all, so that the others remain a majority.
            0 => usize::from(voters > 0 && step > moments / 2),
            1..4 => who[random.below(2) as usize],
            _ => continue,
        };
        let death = [Death::Host, Death::Daemon][random.below(2) as usize];
        let after = Duration::from_micros(random.below(10_000));
        world.die(at + after, host, death, Duration::from_millis(random.below(400)));
    }
    for _ in 0..200 {
        world.attack(Time::ZERO + Duration::from_micros(2_200_000 + random.below(50_000 * moments)));
    }
    for audit in 0..moments / 10 + 10 {
        world.audit(Time::ZERO + Duration::from_millis(500 * audit));
    }
    world.run(Time::MAX);
    world.check_quiet();
    world
}

/// Runs it; gives the world, and how many messages landed.
fn thousand_settle(voters: usize, moments: u64, rivals: u64) -> (World, usize) {
    let seed = std::env::var("LM_SEED").map_or(1000, |seed| seed.parse().expect("LM_SEED is a number"));
    let again = format!("LM_SEED={seed} cargo test -p lm-protocol --test admission a_thousand_hosts");
    let (world, done) = replayable(seed, &again, || {
        let world = thousand(seed, voters, moments, rivals);
        let count = |fate| world.jobs.iter().filter(|job| job.fate == fate).count();
        assert_eq!(count(Fate::Asking) + count(Fate::Holding), 0);
        let done = count(Fate::Done);
        println!(
            "soak: {seed} ok, {voters} voters, {} datagrams, {done} done, {} one-copy, {} lost or dead, {} attacks",
            world.datagrams,
            count(Fate::OneCopy),
            count(Fate::Lost) + count(Fate::Nothing),
            world.attacks,
        );
        (world, done)
    });
    let lives: u64 = world.hosts.iter().map(|host| host.life).sum();
    assert!(lives > 1000 + 3, "{} deaths", lives - 1000);
    assert!(world.attacks > 150, "{} attacks", world.attacks);
    (world, done)
}

#[test]
fn a_thousand_hosts_take_turns() {
    let (world, done) = thousand_settle(5, 160, 3);
    assert!(done >= 15, "{done} of 160 moments had a receiver");
    assert_eq!(world.most_active, 1);
}

#[test]
fn a_thousand_hosts_at_once() {
    let (world, done) = thousand_settle(0, 40, 4);
    assert!(done >= 140, "{done} of 160 messages landed");
    assert!(
        world.most_active > 3,
        "{} hosts received at once",
        world.most_active
    );
}
