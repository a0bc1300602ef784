use super::*;

fn committed(path: &str) -> String {
    std::fs::read_to_string(workspace::root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn the_page_is_what_the_command_makes_of_the_committed_files() {
    let made = make(workspace::root()).unwrap();
    assert_eq!(
        committed(PAGE),
        made.page,
        "run cargo xtask figures and commit {PAGE}"
    );
    assert_eq!(
        committed(TARGETS),
        made.targets,
        "run cargo xtask figures and commit {TARGETS}"
    );
}

#[test]
fn no_row_is_without_command_commit_date_and_host() {
    let page = committed(PAGE);
    // Rows are in tables, and above each table stands its run.
    let tables: Vec<(&str, &str)> = page.split("\n\n").zip(page.split("\n\n").skip(1)).collect();
    let tables = tables.into_iter().filter(|(_, part)| part.starts_with('|'));
    let mut rows = 0;
    for (run, table) in tables {
        rows += table.lines().filter(|line| !line.is_empty()).count() - 2;
        let run = run.trim();
        let (command, rest) = run.split_once("` at ").expect(run);
        let [commit, date, host] = rest.splitn(3, ", ").collect::<Vec<_>>().try_into().expect(run);
        assert!(command.starts_with("`cargo xtask bench "), "{run}");
        assert!(
            commit.len() >= 7 && commit.bytes().all(|b| b.is_ascii_hexdigit()),
            "{run}"
        );
        assert!(date.starts_with("20") && date.ends_with('Z'), "{run}");
        assert!(host.contains("Linux") && host.ends_with(':'), "{run}");
    }
    let all = page.lines().filter(|line| line.starts_with('|')).count();
    let heads = page.lines().filter(|line| line.starts_with("|---")).count();
    assert!(rows > 100 && rows == all - 2 * heads, "{rows} of {all} lines");
}

fn file(revision: &str) -> Value {
    let contender = |name: &str, samples: [f64; 2]| json!({"name": name, "median": 1.5, "samples": samples, "reports": [{"a": 1}]});
    let cores =
        |after_ns: f64, is_near: bool| json!({"before_ns": 60.0, "after_ns": after_ns, "is_near": is_near});
    json!({
        "suite": "core", "rounds": 2, "sleeping": {"rounds": []},
        "machine": {"command": "cargo xtask bench core", "revision": revision, "date": "2031-02-03T04:05:06Z", "processor": "P",
            "kernel": "7.0", "cores": 2},
        "comparisons": [{"key": "k", "title": "T", "unit": "Gbit/s",
            "contenders": [contender("LM", [1.0, 2.0]), contender("UDP", [1.0, 1.0])],
            "cores": [cores(60.0, true), cores(400.0, false)],
            "targets": [{"asked": "≥ 2 × UDP", "of": "LM / UDP", "bound": 2.0, "reached": 1.5, "near": 1.0, "met": false}]}],
    })
}

#[test]
fn what_is_missed_stands_as_missed_with_all_its_rounds() {
    let small = cut(&file("1a2b3c4")).unwrap();
    assert!(
        small["comparisons"][0]["contenders"][0].get("reports").is_none() && small.get("sleeping").is_none()
    );
    let page = page(&[Measured::of(&small).unwrap()], Vec::new(), BTreeMap::new()).page;
    let run =
        "\n\n`cargo xtask bench core` at 1a2b3c4, 2031-02-03T04:05:06Z, P, 2 cores, Linux 7.0:\n\n| what |";
    // Above either table.
    let tables: Vec<&str> = page.split(run).skip(1).collect();
    let rows = [
        "\n| T: LM / UDP | ≥ 2 × UDP | 1.50 | 1.00 | **missed** |\n",
        "\n| T | LM | 1.50 Gbit/s | 1.00 2.00 | 60/60* 60/400 |\n",
    ];
    assert_eq!(tables.len(), rows.len(), "{page}");
    for (table, row) in tables.iter().zip(rows) {
        assert!(table.contains(row), "{page}");
    }
}

#[test]
fn a_file_that_does_not_say_by_what_it_was_measured_is_refused() {
    for revision in ["", "1a2b3c4-dirty"] {
        let error = cut(&file(revision)).unwrap_err().to_string();
        assert!(error.contains("commit"), "{error}");
    }
    let mut without_date = file("1a2b3c4");
    without_date["machine"]["date"] = Value::Null;
    assert!(cut(&without_date).unwrap_err().to_string().contains("date"));
    assert!(cut(&json!({"suite": "run"})).is_err());
}

#[test]
fn rows_of_emulated_cards_have_the_guest_for_a_host() {
    let row = |what: &str, rounds: &[f64]| {
        json!({
            "row": {"device": "igb", "system": "lm", "mode": "copy", "what": what, "size": 64, "rounds": 2, "usecs": 10, "taps": false,
                "calls": false},
            "rounds": rounds, "p99": [], "beside": [], "lost": 0.0, "calls": [null, null], "uncounted": null, "interrupts": null,
            "failures": [],
        })
    };
    let file = json!({
        "suite": "card", "rounds": 2, "clock": "instructions", "rustc": "rustc 1", "secret": 1,
        "machine": {"command": "cargo xtask bench card", "revision": "1a2b3c4", "date": "2031-02-03T04:05:06Z"},
        "boots": [{"qemu": "10.0", "guest": "7.3"}],
        "rows": [row("stream", &[1e6, 3e6]), row("round-trips", &[5e3]), row("stream", &[]), row("sessions", &[2e6]), row("beside", &[7e3])],
    });
    let small = cut(&file).unwrap();
    assert!(small.get("secret").is_none() && small["boots"] == file["boots"]);
    let page = page(&[Measured::of(&small).unwrap()], Vec::new(), BTreeMap::new()).page;
    let run =
        "\n\n`cargo xtask bench card` at 1a2b3c4, 2031-02-03T04:05:06Z, QEMU 10.0, Linux 7.3:\n\n| what |";
    let (_, table) = page.split_once(run).expect(run);
    for row in [
        "\n| igb, stream, 64 B | lm, copy | 2.00 Mbit/s | 1.00 3.00 | – |\n",
        "\n| igb, round trip p50, 64 B | lm, copy | 5.00 µs | 5.00 | – |\n",
        "\n| igb, eight streams, 64 B | lm, copy | 2.00 Mbit/s | 2.00 | – |\n",
        "\n| igb, round trip of 64 B p50 beside a stream, 64 B | lm, copy | 7.00 µs | 7.00 | – |\n",
    ] {
        assert!(table.contains(row), "{page}");
    }
}

#[test]
fn what_the_model_foretold_is_judged_by_bed_and_kind() {
    let run = |fits: bool, len: u64, slower: u32, predicted_ns: f64| {
        json!({"bed": "veth", "fits": fits, "len": len, "window": 16, "slower": slower, "whole": false, "predicted_ns": predicted_ns,
            "times": {"latency_ns": 1000.0}})
    };
    let mut file = json!({
        "suite": "model", "costs": [], "machine": file("1a2b3c4")["machine"],
        "runs": [run(true, 4096, 1, 9e9), run(false, 16384, 1, 1020.0), run(false, 262_144, 1, 870.0), run(false, 16384, 2, 1110.0)],
    });
    let small = cut(&file).unwrap();
    assert!(small.get("costs").is_none());
    let page = page(&[Measured::of(&small).unwrap()], Vec::new(), BTreeMap::new()).page;
    for row in [
        "\n| veth, lengths not fitted to: median error | ≤ 5.00 % | 7.50 % | – | **missed** |\n",
        "\n| veth, lengths not fitted to: worst error | ≤ 12.0 % | 13.0 % | – | **missed** |\n",
        "\n| veth, a producer twice as slow: worst error | ≤ 12.0 % | 11.0 % | – | met |\n",
        "\n| veth, lengths not fitted to, windows of 16, producer × 1, fine: error | 16K 256K | 7.50 % | 2.00 -13.0 | – |\n",
    ] {
        assert!(page.contains(row), "{page}");
    }
    file["runs"][1]["times"] = Value::Null;
    assert!(cut(&file).is_err());
}

#[test]
fn a_target_that_is_lowered_in_code_is_on_the_page() {
    let asked = |bound| Asked {
        key: "core/k/LM / UDP".to_owned(),
        what: "k".to_owned(),
        bound,
        at_least: true,
    };
    let first = page(&[], vec![asked(2.0)], BTreeMap::new());
    assert!(first.page.contains("None asks for less"), "{}", first.page);
    let most = || serde_json::from_str(&first.targets).unwrap();
    let lower = page(&[], vec![asked(1.0)], most());
    assert!(
        lower.page.contains("k: 1 is asked, and 2 was once"),
        "{}",
        lower.page
    );
    assert_eq!(lower.targets, first.targets, "the most is remembered");
    let higher = page(&[], vec![asked(3.0)], most());
    assert!(higher.page.contains("None asks for less") && higher.targets.contains("3.0"));
}

/// Figures have one place.
#[test]
fn readme_and_changelog_link_to_the_page_and_have_no_figures() {
    for path in ["README.md", "CHANGELOG.md"] {
        let text = committed(path);
        assert!(text.contains("(docs/figures.md)"), "{path}");
        for line in text.lines() {
            let measured = ["Gbit/s", " µs", " ns", "times as much", " ×"];
            assert!(!measured.iter().any(|word| line.contains(word)), "{path}: {line}");
        }
    }
}
