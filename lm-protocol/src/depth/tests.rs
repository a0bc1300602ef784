use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const STEP_NS: u64 = 10_000;

fn at(step: u64) -> Time {
    Time::from_nanos(step * STEP_NS)
}

/// A device that is done with `per_second` packets a second and says so every `every_ns`, behind who hands over bursts of 32 while there is room.
/// What part of the time it had something, over the last half, and the depth at the end.
fn device(per_second: u64, every_ns: u64, most: u32, seconds: u64) -> (f64, u32) {
    let mut depth = DeviceDepth::new(64, most);
    let (mut handed, mut done, mut told, mut owed, mut busy) = (0u64, 0u64, 0u64, 0u64, 0u64);
    let steps = seconds * 1_000_000_000 / STEP_NS;
    for step in 0..steps {
        let in_flight = |told: u64, handed: u64| (handed - told) as u32;
        loop {
            if in_flight(told, handed) + 32 > depth.allowed() {
                depth.waited();
                break;
            }
            handed += 32;
        }
        owed += per_second * STEP_NS;
        let able = owed / 1_000_000_000;
        owed %= 1_000_000_000;
        let does = able.min(handed - done);
        done += does;
        busy += if step >= steps / 2 {
            u64::from(handed > done || does == able)
        } else {
            0
        };
        if (step * STEP_NS).is_multiple_of(every_ns) && done > told {
            let packets = (done - told) as u32;
            told = done;
            depth.completed(packets, in_flight(told, handed), at(step));
        }
    }
    (busy as f64 / (steps / 2) as f64, depth.allowed())
}

#[test]
fn a_device_gets_what_keeps_it_busy_and_little_more() {
    // 81,000 packets a second are 1 Gbit/s of full ones.
    for (per_second, every_ns) in [
        (81_000, 50_000),
        (81_000, 500_000),
        (81_000, 2_000_000),
        (800_000, 100_000),
        (40_000, 10_000),
    ] {
        let (busy, depth) = device(per_second, every_ns, 4096, 2);
        let between = (per_second * every_ns / 1_000_000_000) as u32;
        assert!(
            busy > 0.98,
            "{per_second} a second, told every {every_ns} ns: busy {busy}, {depth}"
        );
        assert!(
            depth <= 64 + 32 + 4 * between,
            "{per_second} a second, told every {every_ns} ns: {depth}"
        );
    }
}

#[test]
fn who_is_never_held_back_leaves_the_depth_as_it_is() {
    let mut depth = DeviceDepth::new(32, 192);
    for step in 0..100_000 {
        depth.completed(1, 0, at(step));
    }
    assert_eq!(depth.allowed(), 32);
}

proptest! {
    #[test]
    fn a_device_has_no_more_and_no_less_than_was_said(
        least in 0u32..300,
        most in 0u32..300,
        looks in prop::collection::vec(
            (any::<bool>(), 0u32..400, prop_oneof![Just(0u32), 0u32..400], 0u64..60_000_000),
            0..200,
        ),
    ) {
        let mut depth = DeviceDepth::new(least, most);
        let mut now = Time::ZERO;
        for (waited, packets, left, after_ns) in looks {
            now += Duration::from_nanos(after_ns);
            let before = depth.allowed();
            if waited {
                depth.waited();
            }
            depth.completed(packets, left, now);
            let allowed = depth.allowed();
            prop_assert!((least.min(most).max(1)..=most.max(1)).contains(&allowed));
            prop_assert!(allowed <= before || (waited && left == 0 && allowed - before <= packets));
            prop_assert!(allowed >= before || left > 0 || !waited);
        }
    }
}

/// A path with a FIFO of `per_second` packets, a round trip without it, and a receiver that sleeps at times.
#[derive(Clone, Copy, Debug)]
struct Path {
    per_second: u64,
    round_trip_ns: u64,
    most: u32,
    /// Every so often the receiver looks at nothing for so long.
    pauses_ns: (u64, u64),
    /// Packets of others in the FIFO whenever one of ours comes there, between these two moments in seconds.
    others: u64,
    others_at: (u64, u64),
}

const GIGABIT: Path = Path {
    per_second: 81_000,
    round_trip_ns: 100_000,
    most: 768,
    pauses_ns: (1_000_000_000, 0),
    others: 0,
    others_at: (0, 0),
};

/// What went through a path in its last second.
#[derive(Clone, Copy, Debug)]
struct Passed {
    /// Of what the FIFO passes.
    part: f64,
    /// Packets of ours before one of ours, in the mean.
    before: f64,
    allowed: u32,
}

/// A sender that always has something, over so many seconds. It is told of bursts.
fn path(path: Path, seconds: u64) -> Passed {
    let Path {
        per_second,
        round_trip_ns,
        most,
        pauses_ns,
        others,
        others_at,
    } = path;
    let mut depth = PathDepth::new(32, most, Time::ZERO);
    let half = round_trip_ns / 2 / STEP_NS;
    // Words and packets on the way, with the moments at which they are there.
    let (mut words, mut fifo, mut packets) = (VecDeque::new(), VecDeque::new(), VecDeque::<u64>::new());
    let (mut told, mut sent, mut came, mut seen, mut owed) = (0u64, 0u64, 0u64, 0u64, 0u64);
    let (mut passed, mut before, mut entered) = (0u64, 0u64, 0u64);
    let steps = seconds * 1_000_000_000 / STEP_NS;
    let last = steps - 1_000_000_000 / STEP_NS;
    for step in 0..steps {
        let second = step * STEP_NS / 1_000_000_000;
        let theirs = if (others_at.0..others_at.1).contains(&second) {
            others
        } else {
            0
        };
        while words.front().is_some_and(|&(there, _)| there <= step) {
            let (_, limit): (u64, u64) = words.pop_front().unwrap();
            while sent < limit {
                // Others' packets pass before it: it waits for as long as they take.
                let waits = theirs * 1_000_000_000 / per_second / STEP_NS;
                before += if step >= last { fifo.len() as u64 } else { 0 };
                entered += u64::from(step >= last);
                fifo.push_back(step + waits);
                sent += 1;
            }
        }
        owed = (owed + per_second * STEP_NS).min(1_000_000_000 + per_second * STEP_NS);
        while owed >= 1_000_000_000 && fifo.front().is_some_and(|&from| from <= step) {
            fifo.pop_front();
            packets.push_back(step + half);
            owed -= 1_000_000_000;
            passed += u64::from(step >= last);
        }
        while packets.front().is_some_and(|&there| there <= step) {
            packets.pop_front();
            came += 1;
        }
        if (step * STEP_NS) % pauses_ns.0 < pauses_ns.1 {
            continue;
        }
        if came > seen || step == 0 {
            seen = came;
            depth.arrived(seen, at(step));
        }
        let limit = seen + u64::from(depth.allowed());
        if limit >= told + 32 {
            depth.told(told, at(step));
            told += (limit - told) / 32 * 32;
            words.push_back((step + half, told));
        }
    }
    Passed {
        part: passed as f64 / per_second as f64,
        before: before as f64 / entered.max(1) as f64,
        allowed: depth.allowed(),
    }
}

#[test]
fn a_path_is_full_and_its_queue_short() {
    for (per_second, round_trip_ns) in [
        (40_600, 100_000),
        (8_127, 100_000),
        (81_000, 40_000),
        (81_000, 2_000_000),
        (81_000, 5_000_000),
        (400_000, 100_000),
    ] {
        let most = 4096;
        let slow = Path {
            per_second,
            round_trip_ns,
            most,
            ..GIGABIT
        };
        let through = path(slow, 3);
        let of_slack = per_second as f64 / 1e3;
        assert!(through.part > 0.98, "{slow:?}: {through:?}");
        assert!(through.before <= of_slack + 64.0, "{slow:?}: {through:?}");
    }
}

#[test]
fn a_receiver_that_pauses_gets_more_on_the_way_and_less_again() {
    let pausing = Path {
        pauses_ns: (20_000_000, 4_000_000),
        ..GIGABIT
    };
    let through = path(pausing, 3);
    assert!(through.part > 0.95, "{through:?}");
    assert!(through.allowed > 300, "{through:?}");
    let once = Path {
        pauses_ns: (3_000_000_000, 4_000_000),
        ..GIGABIT
    };
    assert!(path(once, 3).allowed < 160, "{:?}", path(once, 3));
}

#[test]
fn others_in_the_queue_leave_a_sender_its_share() {
    // 5 ms of others' packets before each of ours.
    let beside = Path {
        others: 405,
        others_at: (1, 9),
        ..GIGABIT
    };
    let through = path(beside, 3);
    assert!(through.part > 0.5, "{through:?}");
    let after = path(
        Path {
            others_at: (1, 2),
            ..beside
        },
        4,
    );
    assert!(after.part > 0.98 && after.allowed < 160, "{after:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_path_has_no_more_than_it_takes_and_one_packet_at_least(
        burst in 0u32..64,
        most in 0u32..1000,
        looks in prop::collection::vec(
            (any::<bool>(), 0u64..5000, prop_oneof![0u64..100_000, 0u64..300_000_000]),
            0..300,
        ),
    ) {
        let mut depth = PathDepth::new(burst, most, Time::ZERO);
        let (mut now, mut packets) = (Time::ZERO, 0u64);
        for (told, more, after_ns) in looks {
            now += Duration::from_nanos(after_ns);
            if told {
                depth.told(packets.saturating_sub(more), now);
            }
            packets += more;
            depth.arrived(packets, now);
            prop_assert!(depth.allowed() >= 1);
            prop_assert!(depth.allowed() <= most.max(1));
            prop_assert!(depth.allowed() >= (2 * burst).min(most));
        }
    }
}
