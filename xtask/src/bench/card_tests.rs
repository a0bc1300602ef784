use super::*;

fn row(what: What) -> Row {
    Row {
        device: Device::Igb,
        system: "lm".to_owned(),
        mode: Some(Mode::Copy),
        what,
        size: 64,
        rounds: 2,
        usecs: USECS,
        shared: false,
        taps: false,
    }
}

fn ended(outcome: Outcome, report: Value) -> Ended {
    Ended {
        name: row(What::Stream).name(),
        outcome,
        seconds: 1.0,
        report,
        output: "first\nlast words\n".to_owned(),
    }
}

fn streams(seconds: [f64; 2], lost: u64) -> Measured {
    let round =
        |seconds: f64| json!({"bytes": 1_000_000, "seconds": seconds, "messages": 10, "lost_messages": lost});
    let report = json!({
        "rounds": seconds.map(round),
        "failures": Value::Null,
    });
    Measured::of(&row(What::Stream), &ended(Outcome::Passed, report))
}

#[test]
fn rounds_agree_within_one_percent_or_the_row_says_by_how_much_not() {
    let good = streams([1.0, 1.009], 0);
    assert!(good.remark().is_empty(), "{good:?}");
    assert!((good.median().unwrap() - 8e6 / 1.0045).abs() < 1e3);
    let bad = streams([1.0, 1.02], 5);
    assert_eq!(
        bad.remark(),
        "rounds differ by 2.0 %; 0.50 lost for each that came"
    );
}

#[test]
fn what_failed_is_in_the_row() {
    let report = json!({
        "rounds": [{"p50_ns": 5.0, "p99_ns": 9.0}],
        "failures": [{"why": "no answer"}],
        "error": "something else",
    });
    let one = Measured::of(&row(What::RoundTrips), &ended(Outcome::Passed, report));
    assert_eq!(
        (one.median(), one.remark().as_str()),
        (Some(5.0), "1 failed: no answer; one round")
    );
    let dead = Measured::of(&row(What::Stream), &ended(Outcome::Failed, Value::Null));
    assert_eq!(
        (dead.median(), dead.remark().as_str()),
        (None, "1 failed: last words")
    );
    let nothing = json!({"rounds": null, "error": "nothing was measured"});
    let nothing = Measured::of(&row(What::Stream), &ended(Outcome::Passed, nothing));
    assert_eq!(nothing.remark(), "1 failed: nothing was measured");
    assert!(table(&[nothing]).to_string().contains("–"));
}

#[test]
fn what_lm_counted_of_itself_is_that_of_a_message() {
    let round = |wakeups: f64| {
        json!({"bytes": 64, "seconds": 1.0, "wakeups_per_message": [wakeups, 0.5],
        "copied_bytes_per_message": [3.0]})
    };
    let report = json!({"rounds": [round(1.0), round(2.0)]});
    let one = Measured::of(&row(What::Stream), &ended(Outcome::Passed, report));
    assert_eq!(
        (one.wakeups, one.copied_bytes),
        ([Some(1.5), Some(0.5)], [Some(3.0), None])
    );
    assert!(table(&[one]).to_string().contains("1.50; 0.50"));
}

#[test]
fn two_runs_are_compared_row_by_row() {
    let first = [streams([1.0, 1.0], 0)];
    compare(&[streams([1.005, 1.005], 0)], &first).unwrap();
    let error = compare(&[streams([1.05, 1.05], 0)], &first)
        .unwrap_err()
        .to_string();
    assert!(error.contains("1 of 1 rows differ"), "{error}");
    let scattered = [streams([1.0, 1.5], 0)];
    assert!(
        compare(&scattered, &first).is_err(),
        "rounds that differ are no excuse"
    );
    let dead = [Measured::of(
        &row(What::Stream),
        &ended(Outcome::Failed, Value::Null),
    )];
    assert!(compare(&dead, &first).is_err(), "nor is a row without a figure");
    let error = compare(&first, &[]).unwrap_err().to_string();
    assert_eq!(error, "no row is in both runs");
    // As it is kept in a file.
    let text = serde_json::to_string(&first[0]).unwrap();
    assert_eq!(serde_json::from_str::<Measured>(&text).unwrap(), first[0]);
}

#[test]
fn why_two_runs_differ_is_told() {
    let machine = |qemu: &str, files: &str| Machine {
        device: Device::Igb,
        qemu: qemu.to_owned(),
        guest: "7.3".to_owned(),
        kernel_sha256: "k".to_owned(),
        initramfs_sha256: files.to_owned(),
    };
    let first = [machine("10", "a")];
    assert!(other_machine(&first, &first).contains("something else than instructions"));
    let other = other_machine(&[machine("11", "b")], &first);
    assert!(
        other.contains("QEMU") && other.contains("files") && !other.contains("kernel"),
        "{other}"
    );
    assert!(other_machine(&[], &first).contains("another machine"));
    let result = json!({"qemu": {"version": "10"}, "guest": {"kernel": "7.3"}, "sha256": {"kernel": "k",
        "initramfs": "a"}});
    assert_eq!(Machine::of(&row(What::Stream), &result), first[0]);
}

#[test]
fn a_boot_has_cards_of_one_kind_and_an_end() {
    let mut rows = vec![row(What::Stream); 20];
    rows[18].device = Device::VirtioNet;
    rows[19].device = Device::VirtioNet;
    rows[19].taps = true;
    let of_rounds = |rounds: u32| {
        let rows = rows.iter().map(|row| Row {
            rounds,
            ..row.clone()
        });
        let rows: Vec<Row> = rows.collect();
        boots(&rows).iter().map(|rows| rows.len()).collect::<Vec<_>>()
    };
    assert_eq!(of_rounds(2), [14, 4, 1, 1], "and is joined in one way");
    assert_eq!(of_rounds(10).len(), 11, "two at a time");
}

#[test]
fn real_time_is_the_same_rows_by_the_hosts_clock() {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }
    let parse = |line: &str| {
        let words = std::iter::once("card").chain(line.split_whitespace());
        <Line as clap::Parser>::try_parse_from(words).map(|line| line.arguments)
    };
    let (counted, real) = (parse("").unwrap(), parse("--real-time").unwrap());
    assert_eq!(rows(&counted), rows(&real));
    assert_eq!(
        [&counted, &real].map(|arguments| choice(arguments).clock),
        [Clock::Instructions, Clock::Real]
    );
    // All that is to be measured, of each kind of card.
    for device in Device::ALL {
        for what in [What::Stream, What::RoundTrips, What::Beside] {
            for system in ["lm", "lm --integrity none"] {
                let is_it = |row: &Row| (row.device, row.what, &*row.system) == (device, what, system);
                assert!(rows(&counted).iter().any(is_it), "{device:?} {what:?} {system}");
            }
        }
    }
    assert!(parse("--short --size 64").is_err(), "the list is as it is");
}

#[test]
fn only_what_a_system_can_do_is_asked_of_it() {
    assert!(!measures("bare", What::RoundTrips, 7168) && measures("lm", What::RoundTrips, 1 << 20));
    assert!(
        !measures("udp-blocking", What::RoundTrips, 65_508)
            && measures("udp-blocking", What::Stream, 1 << 20)
    );
    let (zero_copy, copy) = (Some(Mode::ZeroCopy), Some(Mode::Copy));
    assert_eq!(ways(Device::Igb, "lm --integrity none"), [(copy, false)]);
    assert_eq!(ways(Device::Igb, "bare"), [(zero_copy, false), (copy, false)]);
    assert_eq!(
        ways(Device::VirtioNet, "bare"),
        [(zero_copy, true), (copy, false)]
    );
    assert_eq!(ways(Device::VirtioNet, "tcp"), [(None, true), (None, false)]);
    assert_eq!(ways(Device::Veth, "lm"), [(copy, false)]);
    assert_eq!(ways(Device::Igb, SLEEPING), ways(Device::Igb, "lm"));
    assert!(!measures("udp-gso", What::RoundTrips, 64) && !measures("tcp", What::Beside, 7168));
    let short = short_rows(2, USECS);
    let names: std::collections::BTreeSet<String> = short.iter().map(Row::name).collect();
    assert_eq!(names.len(), short.len(), "a row is known by its name");
}
