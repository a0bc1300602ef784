//! `lm-bench serve` and the commands that talk to it, on two hosts. Speeds are not judged here, only that what is told is complete and true.

use std::fs;
use std::time::Duration;

use lm_bench::suite::schema::{Report, Round, Row, Verdict, What};
use rustix::process::Signal;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, Tool, wait_until};
use crate::measuring::lm_bench;

/// Everybody is a lot, and the machine may be busy.
const LONG: Duration = Duration::from_secs(300);

fn serve(bed: &Bed) -> Tool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let line = format!("serve --core {}", 1.min(cores - 1));
    let tool = Tool::start(lm_bench(bed, Host::Receiver, &line));
    tool.wait_for_line("ready");
    tool
}

/// Runs a command; its report, and what it printed.
fn measure(bed: &Bed, line: &str) -> (Report, String) {
    let json = bed.path("report.json");
    let line = format!("{line} --json {}", json.display());
    let ended = Tool::start(lm_bench(bed, Host::Sender, &line)).end_within(LONG);
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    ended.expect_code(0);
    let report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    (report, text)
}

/// Ends the server, which must not have left anything.
fn end(bed: &Bed, server: Tool) {
    server.signal(Signal::TERM);
    server.end();
    wait_until("a program stayed attached", || {
        !bed.has_program(Host::Receiver) && !bed.has_program(Host::Sender)
    });
}

fn check_round(row: &Row, round: &Round, at: u32) {
    match round {
        Round::Latency(round) => {
            assert_eq!(round.at, at, "{row:?}");
            let ordered = [
                round.min_ns,
                Some(round.p50_ns),
                round.p90_ns,
                round.p99_ns,
                round.p999_ns,
                round.max_ns,
            ];
            assert!(ordered.iter().flatten().is_sorted(), "{row:?}");
            assert!(round.p50_ns > 500.0, "no round trip is that short: {row:?}");
            let load = row.what == What::LatencyUnderLoad;
            assert_eq!(
                round.load_bits_per_s.is_some_and(|bits| bits > 0.0),
                load,
                "{row:?}"
            );
        }
        Round::Transfer(round) => {
            assert_eq!(round.at, at, "{row:?}");
            assert!(round.bytes > 0 && round.seconds > 0.0, "{row:?}");
            if row.system.starts_with("lm") || row.system == "quinn" || row.system == "tcp" {
                assert_eq!(round.bytes, round.messages * row.size, "{row:?}");
                assert_eq!(round.lost_messages, 0, "{row:?}");
            }
        }
    }
}

#[test]
fn compare_measures_everybody_in_turns() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let (csv, hgrm) = (bed.path("rounds.csv"), bed.path("hgrm"));
    let (report, text) = measure(
        &bed,
        &format!(
            "compare {RECEIVER} --rounds 2 --sizes 7168 --seconds 0.1 --warm-up 0.02 --count 50 --caveat tested --csv {} --hgrm {}",
            csv.display(),
            hgrm.display()
        ),
    );
    for row in &report.rows {
        assert_eq!(row.rounds.len(), 2, "{row:?}");
        (0..)
            .zip(&row.rounds)
            .for_each(|(at, round)| check_round(row, round, at));
        let system = report.systems.iter().find(|system| system.id == row.system);
        let system = system.unwrap_or_else(|| panic!("nobody is {}", row.system));
        assert!(!system.configuration.is_empty());
        assert!(
            report.links.iter().any(|link| link.name == system.link),
            "{system:?}"
        );
    }
    let measured = |what: What, system: &str| {
        report
            .rows
            .iter()
            .any(|row| row.what == what && row.system == system)
    };
    for system in [
        "lm",
        "lm-no-integrity",
        "udp-blocking",
        "udp-spinning",
        "tcp",
        "quinn",
        "bare",
    ] {
        assert!(measured(What::Latency, system), "{system}: {:?}", report.absent);
        assert!(
            measured(What::Throughput, system),
            "{system}: {:?}",
            report.absent
        );
    }
    for system in ["udp-mmsg", "udp-gso", "tcp-zerocopy"] {
        assert!(
            measured(What::Throughput, system),
            "{system}: {:?}",
            report.absent
        );
    }
    for system in ["lm", "udp-spinning"] {
        assert!(
            measured(What::LatencyUnderLoad, system),
            "{system}: {:?}",
            report.absent
        );
    }
    // Who is not there is said to be absent: this link has no receive packet steering.
    assert!(report.absent.iter().any(|absent| absent.system == "udp-rps"));
    // So is who was not built in.
    for system in ["xsk-rs", "xsk-rs-no-copy"] {
        let absent = report.absent.iter().find(|absent| absent.system == system);
        assert_eq!(absent.is_none(), cfg!(feature = "xsk-rs"), "{:?}", report.absent);
        assert_eq!(measured(What::Throughput, system), cfg!(feature = "xsk-rs"));
        assert!(absent.is_none_or(|absent| absent.why == "built without the feature xsk-rs"));
    }
    let targets = |against: &str| {
        let of = report.ratios.iter().filter(move |ratio| ratio.against == against);
        of.filter(|ratio| ratio.target.is_some())
            .inspect(|ratio| assert!(ratio.rounds == 2 && ratio.verdict != Verdict::None, "{ratio:?}"))
            .count()
    };
    assert_eq!((targets("bare"), targets("lm-sleeping")), (1, 0));
    // Round trips: two; with a load: one.
    assert!(targets("udp-spinning") >= 3, "{:?}", report.ratios);
    assert!(report.caveats.iter().any(|caveat| caveat == "tested"));
    assert!(report.core_distances_ns.is_empty(), "nobody asked");
    assert!(text.contains("t_typical") && text.contains(">= 0.95"), "{text}");
    let rounds: usize = report.rows.iter().map(|row| row.rounds.len()).sum();
    let csv = fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), rounds + 1, "{csv}");
    let fields = csv.lines().next().unwrap().split(',').count();
    assert!(csv.lines().all(|line| line.split(',').count() == fields), "{csv}");
    let histogram = fs::read_to_string(hgrm.join("latency-lm-64.hgrm")).unwrap();
    assert!(histogram.contains("Total count    =          100"), "{histogram}");
    end(&bed, server);
}

#[test]
fn round_trips_of_any_length_by_the_clock_and_without() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line =
        format!("latency {RECEIVER} --systems lm,udp-blocking,tcp,quinn --sizes 1,61,65539 --count 30");
    let (report, _) = measure(&bed, &line);
    for system in ["lm", "tcp", "quinn"] {
        let sizes: Vec<u64> = (report.rows.iter())
            .filter(|row| row.system == system)
            .inspect(|row| check_round(row, &row.rounds[0], 0))
            .map(|row| row.size)
            .collect();
        assert_eq!(sizes, [1, 61, 65_539], "{system}: {:?}", report.absent);
    }
    // A datagram is not that long.
    assert_eq!(
        report
            .rows
            .iter()
            .filter(|row| row.system == "udp-blocking")
            .count(),
        2
    );
    let line = format!("latency {RECEIVER} --systems lm --sizes 64 --count 40 --rate 100 --seconds 5");
    let (report, _) = measure(&bed, &line);
    assert_eq!(report.settings["round_trips_per_second"], "100");
    assert!(
        matches!(&report.rows[0].rounds[0], Round::Latency(round) if round.count == 40),
        "{report:?}"
    );
    end(&bed, server);
}

#[test]
fn costs_of_a_transfer_with_a_rate() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line = format!(
        "cpu {RECEIVER} --systems lm-sleeping,udp-blocking --sizes 7168 --bit-rate 20Mbit --seconds 0.4"
    );
    let (report, text) = measure(&bed, &line);
    assert_eq!(report.rows.len(), 2, "{:?}", report.absent);
    for row in &report.rows {
        let Round::Transfer(round) = &row.rounds[0] else {
            panic!("no transfer: {row:?}")
        };
        assert!(
            round.bits_per_s() < 60e6,
            "three times what was asked for: {row:?}"
        );
        assert_eq!(round.spare_fraction.len(), 2, "{row:?}");
        assert!(
            round
                .spare_fraction
                .iter()
                .all(|part| part.is_finite() && *part >= 0.0),
            "{row:?}"
        );
        assert!(
            round.cpu_seconds_send > 0.0 && round.cpu_seconds_receive > 0.0,
            "{row:?}"
        );
    }
    assert!(text.contains("spare"), "{text}");
    end(&bed, server);
}

#[test]
fn the_limit_is_that_of_the_best_recipe() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let (report, text) = measure(&bed, &format!("limit {RECEIVER} --seconds 0.1 --warm-up 0.02"));
    assert_eq!(report.rows.len(), 2, "{:?}", report.absent);
    assert_eq!(
        text.matches("Gbit/s").count(),
        4 + 1,
        "four recipes and a heading: {text}"
    );
    let speeds = text.lines().filter_map(|line| {
        let (recipe, speed) = line.rsplit_once(": ")?;
        Some((recipe, speed.strip_suffix(" Gbit/s")?.parse::<f64>().unwrap()))
    });
    let (best, speed) = speeds.max_by(|one, other| one.1.total_cmp(&other.1)).unwrap();
    let system = &report.systems[0];
    assert!(
        speed > 0.0 && system.id == "bare" && system.configuration.starts_with(best),
        "{system:?} {text}"
    );
    end(&bed, server);
}

/// Whether the cores stay is the machine's affair, so there may be no distance; what there is is told.
#[test]
fn a_round_tells_how_far_apart_the_cores_were() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line = format!("latency {RECEIVER} --sizes 64 --count 20 --near-cores");
    let (report, _) = measure(&bed, &line);
    assert_eq!(report.rows[0].rounds.len(), 1, "{:?}", report.rows);
    let distances = &report.core_distances_ns;
    let told = report.caveats.iter().any(|caveat| caveat.contains("ns apart"));
    assert_eq!(told, !distances.is_empty(), "{:?}", report.caveats);
    assert!(
        distances.len() <= 1 && distances.iter().all(|ns| *ns > 1.0),
        "{distances:?}"
    );
    end(&bed, server);
}

/// At a large MTU packets are as long as it allows.
#[test]
fn the_limit_of_a_large_mtu() {
    let Some(bed) = Bed::new() else { return };
    for host in [Host::Sender, Host::Receiver] {
        bed.ip(host, &format!("link set {INTERFACE} mtu 9000"));
    }
    let server = serve(&bed);
    let line = format!("limit {RECEIVER} --sizes 1M --seconds 0.1 --warm-up 0.02");
    let (report, text) = measure(&bed, &line);
    assert!(!text.contains("failed"), "{text}");
    let Round::Transfer(round) = &report.rows[0].rounds[0] else {
        panic!("{report:?}")
    };
    assert_eq!(round.bytes, round.messages * (9000 - 28), "{round:?}");
    assert_eq!(round.lost_messages, 0, "{round:?}");
    end(&bed, server);
}

#[test]
fn what_a_client_has_started_goes_with_it() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line = format!("throughput {RECEIVER} --seconds 50");
    let client = Tool::start(lm_bench(&bed, Host::Sender, &line));
    wait_until("the far end did not start", || bed.has_program(Host::Receiver));
    client.signal(Signal::KILL);
    client.end();
    wait_until("the far end stayed", || !bed.has_program(Host::Receiver));
    // The next client is served.
    let (report, _) = measure(
        &bed,
        &format!("throughput {RECEIVER} --sizes 1K,1M --seconds 0.1"),
    );
    assert_eq!(report.rows.len(), 2, "{:?}", report.absent);
    end(&bed, server);
}

#[test]
fn nobody_there_is_said_in_a_line() {
    let Some(bed) = Bed::new() else { return };
    let ended = Tool::start(lm_bench(&bed, Host::Sender, &format!("latency {RECEIVER}"))).end();
    ended.expect_code(1);
    assert!(
        ended.stderr.contains("start it on the other host"),
        "{}",
        ended.stderr
    );
}
