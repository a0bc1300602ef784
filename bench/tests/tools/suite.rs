//! `lm-bench serve` and the commands that talk to it, on two hosts. Speeds are not judged here, only that what is told is complete and true.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use lm_bench::suite::schema::{Failed, Report, Round, Row, What};
use rustix::process::{Pid, Signal};
use serde_json::json;

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, SENDER, Tool, wait_until};
use crate::measuring::lm_bench;

/// Everybody is a lot, and the machine may be busy.
const LONG: Duration = Duration::from_secs(300);

fn serve(bed: &Bed) -> Tool {
    serve_with(bed, &format!("--bind {RECEIVER}:7170 --allow {SENDER}"))
}

fn serve_with(bed: &Bed, options: &str) -> Tool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let line = format!("serve --core {} {options}", 1.min(cores - 1));
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
    assert_eq!(round.at, at, "{row:?}");
    assert_eq!(round.times.is_some(), row.what != What::Stream, "{row:?}");
    // What travels one way is there in a stream, and beside round trips.
    let travels = round.bytes > 0 && round.seconds > 0.0;
    assert_eq!(travels, row.what != What::RoundTrips, "{row:?}");
    if let Some(times) = &round.times {
        let ordered = [
            times.min_ns,
            Some(times.p50_ns),
            times.p99_ns,
            times.p999_ns,
            times.max_ns,
        ];
        assert!(ordered.iter().flatten().is_sorted(), "{row:?}");
        assert!(times.p50_ns > 500.0, "no round trip is that short: {row:?}");
    } else if row.system.starts_with("lm") || row.system == "tcp" {
        assert_eq!(round.bytes, round.messages * row.size, "{row:?}");
        assert_eq!(round.lost_messages, 0, "{row:?}");
    }
    if row.system.starts_with("lm") && row.what == What::Stream {
        assert_eq!(round.copied_bytes_per_message, [0.0, 0.0], "{row:?}");
        // Beside other work an end may not run for the whole of a round.
        assert!(
            row.rounds.iter().any(|round| round.wakeups_per_message[0] > 0.0),
            "{row:?}"
        );
    }
}

#[test]
fn compare_measures_everybody_in_turns() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let (report, text) = measure(
        &bed,
        &format!(
            "compare {RECEIVER} --rounds 2 --sizes 7168 --seconds 0.5 --warm-up 0.02 --count 50 --setting by=test"
        ),
    );
    for row in &report.rows {
        let is_failure = |at: u32| {
            let of_row = |failed: &&Failed| {
                (failed.what, &failed.system, failed.size, failed.at) == (row.what, &row.system, row.size, at)
            };
            report.failures.iter().any(|failed| of_row(&failed))
        };
        let mut rounds = row.rounds.iter();
        (0..2).filter(|&at| !is_failure(at)).for_each(|at| {
            let round = rounds.next();
            check_round(row, round.unwrap_or_else(|| panic!("no round {at}: {row:?}")), at);
        });
        assert!(rounds.next().is_none(), "{row:?}");
        let system = report.systems.iter().find(|system| system.id == row.system);
        let system = system.unwrap_or_else(|| panic!("no system is {}", row.system));
        assert!(!system.configuration.is_empty());
        assert!(
            report.links.iter().any(|link| link.interface == system.link),
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
        "lm --integrity none",
        "udp-blocking",
        "udp-spinning",
        "tcp",
        "bare",
    ] {
        assert!(
            measured(What::RoundTrips, system),
            "{system}: {:?}",
            report.absent
        );
        assert!(measured(What::Stream, system), "{system}: {:?}", report.absent);
    }
    assert!(measured(What::Stream, "udp-gso"), "{:?}", report.absent);
    for system in ["lm", "udp-spinning"] {
        assert!(measured(What::Beside, system), "{system}: {:?}", report.failures);
    }
    let ratios = |against: &str| {
        report
            .ratios
            .iter()
            .filter(|ratio| ratio.against == against)
            .count()
    };
    // Two figures each: round trips, a stream, and round trips beside one.
    assert_eq!(
        (ratios("udp-spinning"), ratios("udp-gso"), ratios("lm")),
        (6, 2, 0)
    );
    assert!(
        report
            .ratios
            .iter()
            .all(|ratio| ratio.system == "lm" && ratio.rounds == 2),
        "{:?}",
        report.failures
    );
    assert_eq!(report.settings["by"], "test");
    let first = text.lines().next().unwrap();
    assert!(
        first.starts_with("LM: ") && first.contains("kernel UDP (udp-") && first.contains("kernel TCP (tcp)"),
        "{text}"
    );
    assert!(
        text.contains("p50 µs") && text.contains("lm --integrity none"),
        "{text}"
    );
    let is_it = |row: &&Row| (row.what, &*row.system, row.size) == (What::RoundTrips, "lm", 64);
    let histogram = report
        .rows
        .iter()
        .find(is_it)
        .and_then(|row| row.histogram.as_ref());
    let histogram = histogram.expect("round trips have a histogram");
    assert!(histogram.contains("Total count    =          100"), "{histogram}");
    end(&bed, server);
}

#[test]
fn round_trips_of_any_length_by_the_clock_and_without() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line = format!(
        "compare {RECEIVER} --tasks round-trips --rounds 1 --systems lm,udp-blocking,tcp --sizes 1,61,65539 --count 30"
    );
    let (report, _) = measure(&bed, &line);
    for system in ["lm", "tcp"] {
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
    let line = format!(
        "compare {RECEIVER} --tasks round-trips --rounds 1 --systems lm --count 40 --rate 100 --seconds 5"
    );
    let (report, _) = measure(&bed, &line);
    assert_eq!(report.settings["round_trips_per_second"], "100");
    assert_eq!(report.rows[0].rounds[0].messages, 40, "{report:?}");
    end(&bed, server);
}

/// E-UDP's question as words; and a run that is compared with an earlier one.
#[test]
fn bytes_are_made_and_read_while_a_message_is_on_its_way_or_before_and_after() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line = format!(
        "compare {RECEIVER} --tasks round-trips --rounds 1 --systems 'lm --work overlap,lm --work coarse' --sizes 1M \
         --count 5 --seconds 5"
    );
    let (report, _) = measure(&bed, &line);
    assert_eq!(report.rows.len(), 2, "{:?}", report.failures);
    report
        .rows
        .iter()
        .for_each(|row| check_round(row, &row.rounds[0], 0));
    let against = bed.path("earlier.json");
    let mut earlier = report.clone();
    earlier.rows[0].rounds[0].times.as_mut().unwrap().p50_ns = 1.0;
    fs::write(&against, serde_json::to_vec(&earlier).unwrap()).unwrap();
    let line = format!("{line} --against {}", against.display());
    let ended = Tool::start(lm_bench(&bed, Host::Sender, &line)).end_within(LONG);
    ended.expect_code(1);
    assert!(ended.stderr.contains("from the earlier run"), "{}", ended.stderr);
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(text.contains("lm --work overlap round-trips 1048576 -"), "{text}");
    end(&bed, server);
}

#[test]
fn costs_of_a_transfer_with_a_rate() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line = format!(
        "compare {RECEIVER} --tasks stream --rounds 1 --systems 'lm --idle default,udp-blocking' --sizes 7168 \
         --bit-rate 20Mbit --seconds 0.4"
    );
    let (report, text) = measure(&bed, &line);
    assert_eq!(report.rows.len(), 2, "{:?}", report.absent);
    for row in &report.rows {
        let round = &row.rounds[0];
        assert!(
            round.figure("bits_per_s") < Some(60e6),
            "three times what was asked for: {row:?}"
        );
        assert!(
            round.cpu_seconds_send > 0.0
                && round.cpu_seconds_receive > 0.0
                && round.figure("cpu_s_per_gb") > Some(0.0),
            "{row:?}"
        );
    }
    assert!(text.contains("s/GB"), "{text}");
    end(&bed, server);
}

/// A program of the far host that dies under a measurement: that round has no sample, which is told, and the next one has.
#[test]
fn a_measurement_that_fails_is_told_and_not_repeated() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let json = bed.path("failed.json");
    let line = format!(
        "compare {RECEIVER} --tasks stream --systems tcp --sizes 7168 --rounds 3 --seconds 1 --json {}",
        json.display()
    );
    let client = Tool::start(lm_bench(&bed, Host::Sender, &line));
    let mut killed = None;
    wait_until("the far end did not start", || {
        killed = child_of(server.id());
        killed.is_some()
    });
    rustix::process::kill_process(killed.unwrap(), Signal::KILL).unwrap();
    let ended = client.end_within(LONG);
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    ended.expect_code(0);
    let report: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let failures = report["failures"].as_array().map_or(&[][..], |failures| failures);
    assert_eq!(failures.len(), 1, "{report:#}");
    assert_eq!(
        (&failures[0]["system"], &failures[0]["at"]),
        (&"tcp".into(), &0.into())
    );
    let rounds = report["rows"][0]["rounds"].as_array().unwrap();
    let at: Vec<_> = rounds.iter().map(|round| round["at"].as_u64().unwrap()).collect();
    assert_eq!(at, [1, 2], "{report:#}");
    assert!(text.contains("failed, and not repeated"), "{text}");
    end(&bed, server);
}

/// The program that `lm-bench serve` has started, below the `ip netns exec` that this test has.
fn child_of(id: u32) -> Option<Pid> {
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    let child: i32 = children.split_whitespace().next()?.parse().ok()?;
    Pid::from_raw(child)
}

/// At a large MTU packets are as long as it allows.
#[test]
fn bare_packets_are_as_long_as_a_large_mtu() {
    let Some(bed) = Bed::new() else { return };
    for host in [Host::Sender, Host::Receiver] {
        bed.ip(host, &format!("link set {INTERFACE} mtu 9000"));
    }
    let server = serve(&bed);
    let line = format!(
        "compare {RECEIVER} --tasks stream --rounds 1 --systems bare --sizes 1M --seconds 0.1 --warm-up 0.02"
    );
    let (report, text) = measure(&bed, &line);
    assert!(!text.contains("failed"), "{text}");
    let round = &report.rows[0].rounds[0];
    assert_eq!(round.bytes, round.messages * (9000 - 28), "{round:?}");
    assert_eq!(round.lost_messages, 0, "{round:?}");
    end(&bed, server);
}

#[test]
fn what_a_client_has_started_goes_with_it() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let line = format!("compare {RECEIVER} --tasks stream --systems lm --seconds 50");
    let client = Tool::start(lm_bench(&bed, Host::Sender, &line));
    wait_until("the far end did not start", || bed.has_program(Host::Receiver));
    client.signal(Signal::KILL);
    client.end();
    wait_until("the far end stayed", || !bed.has_program(Host::Receiver));
    // The next client is served.
    let (report, _) = measure(
        &bed,
        &format!("compare {RECEIVER} --tasks stream --rounds 1 --systems lm --sizes 1K,1M --seconds 0.1"),
    );
    assert_eq!(report.rows.len(), 2, "{:?}", report.absent);
    end(&bed, server);
}

#[test]
fn nobody_there_is_said_in_a_line() {
    let Some(bed) = Bed::new() else { return };
    let ended = Tool::start(lm_bench(&bed, Host::Sender, &format!("compare {RECEIVER}"))).end();
    ended.expect_code(1);
    assert!(
        ended.stderr.contains("start it on the other host"),
        "{}",
        ended.stderr
    );
}

#[test]
fn serve_lets_in_whom_it_was_told() {
    let Some(bed) = Bed::new() else { return };
    let asked = || {
        Tool::start(lm_bench(
            &bed,
            Host::Sender,
            &format!("compare {RECEIVER} --tasks round-trips --rounds 1 --systems lm --count 20"),
        ))
        .end()
    };
    // By itself it serves its own host.
    let server = serve_with(&bed, "");
    asked().expect_code(1);
    end(&bed, server);
    // For others it wants to be told for whom.
    let line = format!("serve --bind {RECEIVER}:7170");
    let ended = Tool::start(lm_bench(&bed, Host::Receiver, &line)).end();
    ended.expect_code(2);
    assert!(
        ended.stderr.contains("--allow CIDR, or --from-anyone"),
        "{}",
        ended.stderr
    );
    let server = serve_with(&bed, &format!("--bind {RECEIVER}:7170 --allow 10.77.0.128/25"));
    let ended = asked();
    ended.expect_code(1);
    assert!(ended.stderr.contains("--allow"), "{}", ended.stderr);
    server.wait_for_line(&format!("{SENDER} is refused"));
    end(&bed, server);
    for who in ["--allow 10.77.0.128/25 --allow 10.77.0.0/30", "--from-anyone"] {
        let server = serve_with(&bed, &format!("--bind {RECEIVER}:7170 {who}"));
        asked().expect_code(0);
        end(&bed, server);
    }
}

/// A request whose numbers are as large as they can be, which are added to others.
#[test]
fn no_number_of_a_client_ends_the_server() {
    let Some(bed) = Bed::new() else { return };
    let server = serve(&bed);
    let stream = json!({"stream": {"warm_up": 0.1, "seconds": 0.1, "rate": null}});
    let spec = json!({
        "system": "bare --queue 0", "task": stream, "size": u64::MAX, "address": format!("{RECEIVER}:65535"),
        "mtu": u32::MAX, "mode": "copy", "queues": u32::MAX, "senders": u32::MAX,
    });
    let answer = bed.on(Host::Sender, || {
        let mut connection = TcpStream::connect((RECEIVER, 7170)).unwrap();
        writeln!(connection, r#"{{"Start":["Far",{spec},60.0]}}"#).unwrap();
        let mut answer = String::new();
        BufReader::new(connection).read_line(&mut answer).unwrap();
        answer
    });
    assert_eq!(answer, "{\"Ok\":null}\n");
    let line = format!("compare {RECEIVER} --tasks round-trips --rounds 1 --systems lm --count 20");
    Tool::start(lm_bench(&bed, Host::Sender, &line))
        .end()
        .expect_code(0);
    end(&bed, server);
}
