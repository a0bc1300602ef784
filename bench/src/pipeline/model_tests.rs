use lm_box::split_mix;

use super::*;

/// A number from 0 to 1.
fn random(case: u64, number: u64) -> f64 {
    split_mix(case, number) as f64 / u64::MAX as f64
}

fn station(message_ns: f64, byte_ns: f64, core: usize) -> Station {
    Station {
        message_ns,
        byte_ns,
        core,
        ..Station::default()
    }
}

fn stations(case: u64) -> Vec<Station> {
    let count = 1 + split_mix(case, 0) % 6;
    (0..count)
        .map(|i| {
            station(
                1e4 * random(case, 2 * i + 1),
                10.0 * random(case, 2 * i + 2),
                i as usize,
            )
        })
        .collect()
}

/// The time of a path that stays at station k for all but one chunk.
fn closed_form(stations: &[Station], len: f64, grain: f64) -> f64 {
    let at = |k: usize| {
        let before: f64 = stations[..=k].iter().map(|station| station.message_ns).sum();
        let once: f64 = stations.iter().map(|station| station.byte_ns).sum();
        before + grain * (once - stations[k].byte_ns) + len * stations[k].byte_ns
    };
    (0..stations.len()).map(at).fold(0.0, f64::max)
}

#[test]
fn a_message_of_whole_chunks_takes_what_the_closed_form_says() {
    for case in 0..2500 {
        let stations = stations(case);
        let grain = 1 + split_mix(case, 100) % 50_000;
        let len = grain * (1 + split_mix(case, 101) % 60);
        let (found, expected) = (
            latency_ns(&stations, len, grain, grain),
            closed_form(&stations, len as f64, grain as f64),
        );
        assert!(
            (found / expected - 1.0).abs() < 1e-12,
            "case {case}: {found} {expected}"
        );
    }
}

#[test]
fn one_chunk_is_one_station_after_the_other() {
    for case in 0..200 {
        let stations = stations(case);
        let len = 1 + split_mix(case, 100) % 1_000_000;
        let sum: f64 = stations.iter().map(|station| station.alone_ns(1, len)).sum();
        for grain in [len, len + 1, 10 * len] {
            assert!((latency_ns(&stations, len, grain, grain) / sum - 1.0).abs() < 1e-12);
        }
    }
}

/// Equations 2 and 4: in the long run a message more takes as long as at the slowest station, however it is cut.
#[test]
fn many_messages_are_as_fast_whole_as_in_chunks() {
    for case in 0..100 {
        let stations = stations(case);
        let (len, many) = (60_000, 200);
        let slowest = (stations.iter())
            .map(|station| station.message_ns + station.byte_ns * len as f64)
            .fold(0.0, f64::max);
        for grain in [len, 5000] {
            let all = |messages: usize| finished_ns(&stations, &chunks(len, grain, grain).repeat(messages));
            let each = (all(2 * many) - all(many)) / many as f64;
            assert!(
                (each / slowest - 1.0).abs() < 0.01,
                "case {case}: {each} {slowest}"
            );
            assert!((period_ns(&stations, len, grain) / slowest - 1.0).abs() < 1e-12);
        }
    }
}

/// Two stations on one core: chunk by chunk, one after the other. Those of another core go on meanwhile.
#[test]
fn stations_of_a_core_take_turns() {
    let shared = [station(0.0, 1.0, 0), station(0.0, 2.0, 0)];
    assert_eq!(latency_ns(&shared, 40, 10, 10), 120.0);
    assert_eq!(period_ns(&shared, 40, 10), 120.0);
    // 0: p0 0–10, s0 10–30, p1 30–40, s1 40–60; 1: c0 30–35, c1 60–65.
    let with_third = [shared[0], shared[1], station(0.0, 0.5, 1)];
    assert_eq!(latency_ns(&with_third, 20, 10, 10), 65.0);
    // 0: p0 0–10, p1 10–20; 1: l0 10–20, then c0 20–50, which is ready when l1 is, and the later one; l1 50–60, c1 60–90.
    let far = [station(0.0, 1.0, 0), station(0.0, 1.0, 1), station(0.0, 3.0, 1)];
    assert_eq!(latency_ns(&far, 20, 10, 10), 90.0);
    let message = [station(5.0, 1.0, 0), station(7.0, 1.0, 0)];
    assert_eq!(latency_ns(&message, 20, 10, 10), 52.0);
}

/// Windows of 20 bytes in packets of 10: what is given away by windows waits for their last packet, other packets do not.
#[test]
fn packets_overlap_inside_a_window() {
    let way = [station(0.0, 1.0, 0), station(0.0, 1.0, 1)];
    assert_eq!(latency_ns(&way, 40, 20, 10), 50.0);
    let mut windows = way;
    windows[0].gives = Gives::Window;
    assert_eq!(latency_ns(&windows, 40, 20, 10), 60.0);
    // The last window may be shorter, and costs as much as another.
    windows[0].window_ns = 3.0;
    assert_eq!(
        latency_ns(&windows, 35, 20, 10),
        3.0 + 20.0 + f64::max(20.0, 18.0) + 15.0
    );
    // On one core a window that is begun is ended: p0 0–20, s0 20–40, p1 40–60, s1 60–80.
    windows[0].window_ns = 0.0;
    windows[1].core = 0;
    let third = [windows[0], windows[1], station(0.0, 0.0, 1)];
    assert_eq!(latency_ns(&third, 40, 20, 10), 80.0);
    for case in 0..300 {
        // Where every station gives windows away, packets change nothing.
        let mut stations = stations(case);
        stations
            .iter_mut()
            .for_each(|station| station.gives = Gives::Window);
        let len = 1 + split_mix(case, 100) % 100_000;
        let [whole, cut] = [5000, 1000].map(|packet| latency_ns(&stations, len, 5000, packet));
        assert!((whole / cut - 1.0).abs() < 1e-9, "case {case}: {whole} {cut}");
    }
}

/// Windows of 20 bytes in packets of 10 (I5).
#[test]
fn a_window_waits_for_the_lowest_packet_of_the_next_and_that_for_credit() {
    let mut way = [station(0.0, 1.0, 0), station(0.0, 1.0, 1)];
    way[0].gives = Gives::Window;
    assert_eq!(latency_ns(&way, 60, 20, 10), 80.0);
    // Given away at 40, 60 and 60, the last one at its own end.
    way[0].gives = Gives::WindowBelow;
    assert_eq!(latency_ns(&way, 60, 20, 10), 100.0);
    assert_eq!(latency_ns(&way, 20, 20, 10), 40.0);
    let mut way = [station(0.0, 1.0, 0), station(0.0, 0.0, 1), station(0.0, 0.0, 2)];
    way[0].credit_ns = Some(15.0);
    assert_eq!(latency_ns(&way, 80, 20, 10), 80.0);
    // The last of the second window at 10 + 100, so that the first of the third ends at 130; the last of the fourth at 130 + 100.
    way[0].credit_ns = Some(100.0);
    assert_eq!(latency_ns(&way, 40, 20, 10), 120.0);
    assert_eq!(latency_ns(&way, 80, 20, 10), 240.0);
    assert_eq!(period_ns(&way, 80, 20), 200.0);
}

#[test]
fn costs_are_found_again() {
    let real = Station {
        message_ns: 9000.0,
        window_ns: 400.0,
        byte_ns: 0.7,
        core: 1,
        ..Station::default()
    };
    let lens = [4096, 65_536, 1 << 20, 16 << 20];
    let points = |real: &Station, wrong: f64| {
        let point = |(number, (len, grain)): (usize, (u64, u64))| {
            let (windows, bytes) = (len.div_ceil(grain), len);
            let took_ns = real.alone_ns(windows, bytes) * if number == 3 { wrong } else { 1.0 };
            Point {
                windows,
                bytes,
                took_ns,
            }
        };
        let all = lens.iter().flat_map(|&len| [(len, 23_168), (len, 46_336)]);
        all.enumerate().map(point).collect::<Vec<_>>()
    };
    let near = |found: Station, real: &Station, most: f64| {
        let [found, real] = [&found, real].map(|one| one.alone_ns(1000, 64 << 20));
        assert!((found / real - 1.0).abs() < most, "{found} {real}");
    };
    let found = fit(&points(&real, 1.0), 1);
    assert_eq!(found.core, 1);
    assert!((found.message_ns / 9000.0 - 1.0).abs() < 1e-3, "{found:?}");
    assert!((found.window_ns / 400.0 - 1.0).abs() < 1e-3, "{found:?}");
    assert!((found.byte_ns / 0.7 - 1.0).abs() < 1e-3, "{found:?}");
    // One that is twice as long as it should be moves the others little, and no cost is below nothing.
    near(fit(&points(&real, 2.0), 1), &real, 0.05);
    let free = Station {
        window_ns: 0.0,
        ..real
    };
    let found = fit(&points(&free, 0.97), 1);
    assert!(
        found.window_ns >= 0.0 && found.byte_ns >= 0.0 && found.message_ns >= 0.0,
        "{found:?}"
    );
    near(found, &free, 0.02);
}
