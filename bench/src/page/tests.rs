use serde_json::{Value, json};

use super::*;
use crate::scratch::Scratch;
use crate::suite::schema::What;

fn latency(at: u32, us: f64) -> Value {
    let ns = us * 1e3;
    json!({"at": at, "count": 5000, "min_ns": ns * 0.8, "p50_ns": ns, "p90_ns": ns * 1.2, "p99_ns": ns * 2.0, "p999_ns": ns * 4.0,
        "max_ns": ns * 9.0, "mean_ns": ns * 1.1})
}

fn transfer(at: u32, gbit_per_s: f64, cpu_s_per_gb: f64) -> Value {
    let bytes = gbit_per_s * 1e9 / 8.0;
    json!({"at": at, "bytes": bytes as u64, "messages": 10, "lost_messages": 0, "seconds": 1.0, "cpu_seconds_send": 0.5,
        "cpu_seconds_receive": 0.5, "cpu_seconds_machine": cpu_s_per_gb * bytes / 1e9, "spare_fraction": [0.25, 0.5]})
}

/// A report of LM and blocking UDP on one link.
fn measured(link: &str, mtu: u32) -> Value {
    let rows = [("lm", 5.0, 10.0, 0.6), ("udp-blocking", 50.0, 5.0, 1.2)].map(|(system, us, gbit, cpu)| {
        [
            json!({"what": "latency", "system": system, "size": 64, "rounds": [latency(0, us), latency(1, us), latency(2, us * 9.0)]}),
            json!({"what": "throughput", "system": system, "size": 65_536, "rounds": [transfer(0, gbit, cpu), transfer(1, gbit, cpu)]}),
            json!({"what": "throughput", "system": system, "size": 1024, "rounds": [transfer(0, gbit / 2.0, cpu)]}),
        ]
    });
    let ratio = |what: &str, metric: &str, median: f64, target: Value, verdict: &str| {
        json!({"what": what, "size": 65_536, "metric": metric, "system": "lm", "against": "udp-blocking", "rounds": 20,
            "median": median, "low": median * 0.98, "high": median * 1.02, "target": target, "verdict": verdict})
    };
    json!({
        "schema": "lm-bench/1", "command": "compare", "version": "9.8.7", "started": "2031-02-03T04:05:06Z",
        "host": {"name": "near", "kernel": "6.18.3", "cpu": "Some Processor", "cores": [2, 3], "memory_bytes": 4_294_967_296u64,
            "governor": "performance"},
        "far": {"name": "distant", "kernel": "6.18.4", "cpu": "Another", "cores": [5], "memory_bytes": 1_073_741_824u64},
        "links": [{"name": link, "interface": "if7", "driver": "somedriver", "mtu": mtu, "mode": "native copy", "queues": 4,
            "offloads": {"generic-receive-offload": false, "tx-checksumming": true}, "xdp": false}],
        "settings": {"rounds": "20"},
        "caveats": ["the first <caveat>", "another caveat"],
        "systems": [
            {"id": "lm", "title": "LM", "configuration": "as it comes", "link": link},
            {"id": "udp-blocking", "title": "kernel UDP, blocking", "configuration": "large socket buffers", "link": link}],
        "rows": rows.concat(),
        "ratios": [
            ratio("throughput", "bits_per_s", 2.0, json!({"at_least": 1.45}), "met"),
            ratio("cpu", "cpu_s_per_gb", 0.95, json!({"at_most": 0.9}), "missed"),
            ratio("throughput", "bits_per_s", 1.01, json!({"at_least": 1.0}), "unclear"),
            ratio("latency", "p50", 0.1, Value::Null, "none")],
        "absent": [{"system": "fi_pingpong", "why": "install libfabric-bin"}],
    })
}

/// The page made of these files.
fn page_of(files: &[Value]) -> String {
    made_of(files).unwrap()
}

fn made_of(files: &[Value]) -> Result<String, Failure> {
    let scratch = Scratch::new("page");
    let paths: Vec<PathBuf> = (0..files.len())
        .map(|number| scratch.path().join(format!("{number}.json")))
        .collect();
    for (path, file) in paths.iter().zip(files) {
        std::fs::write(path, file.to_string()).unwrap();
    }
    let html = scratch.path().join("page.html");
    report(&ReportArgs {
        files: paths,
        html: html.clone(),
    })?;
    Ok(std::fs::read_to_string(html).unwrap())
}

#[test]
fn the_page_names_what_the_figures_depend_on() {
    let page = page_of(&[measured("veth", 1500)]);
    for words in [
        "near",
        "6.18.3",
        "Some Processor",
        "cores 2 and 3",
        "4.00 GiB",
        "performance",
        "distant",
        "if7",
        "somedriver",
        "native copy",
        "MTU 1500",
        "on: tx-checksumming; off: generic-receive-offload",
        "2031-02-03T04:05:06Z",
        "compare",
        "9.8.7",
        "the first &lt;caveat&gt;",
        "another caveat",
        "large socket buffers",
        "fi_pingpong",
        "install libfabric-bin",
    ] {
        assert!(page.contains(words), "{words} is missing");
    }
}

#[test]
fn what_files_have_in_common_is_said_once() {
    let mut other = measured("igb", 1500);
    other["caveats"] = json!(["another caveat", "held back"]);
    let mut later = measured("veth", 1500);
    later["started"] = json!("2031-02-03T05:00:00Z");
    let page = page_of(&[measured("veth", 1500), other, later]);
    let count = |words: &str| page.matches(words).count();
    assert_eq!(
        (
            count("another caveat"),
            count("held back"),
            count("Before believing")
        ),
        (1, 1, 1)
    );
    assert!(page.contains("<li>another caveat"), "it is for all");
    assert!(page.contains("<li><b>igb: </b>held back"), "for one of two links");
    assert!(
        page.contains("<li><b>veth: </b>the first"),
        "for the other one, named once"
    );
    assert!(
        page.contains("compare, 2031-02-03T05:00:00Z"),
        "the later one is in its bed's lines"
    );
    assert_eq!(count("<dt>far host</dt>"), 2, "two beds");
}

#[test]
fn the_page_needs_nothing_else_and_is_short() {
    let mut long = measured("veth", 1500);
    let mut histogram = crate::histogram::LatencyHistogram::new();
    (1..100_000).for_each(|us| histogram.record_ns(us * 10));
    let mut text = Vec::new();
    histogram.write_hgrm(&mut text).unwrap();
    long["rows"][0]["histogram"] = json!(String::from_utf8(text).unwrap());
    // As many rows as the longest comparison has: twenty systems, fifty sizes each.
    let row = long["rows"][1].clone();
    for number in 0..20 {
        let id = format!("udp-{number}");
        let system = json!({"id": id, "title": id, "configuration": "c", "link": "veth"});
        long["systems"].as_array_mut().unwrap().push(system);
        for size in 0..50 {
            let mut row = row.clone();
            row["system"] = json!(id);
            row["size"] = json!(1024 * (size + 1));
            long["rows"].as_array_mut().unwrap().push(row);
        }
    }
    let page = page_of(&[long]);
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    for outside in [
        "http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("@media print"));
}

/// Each line of a chart is there, with its name, and says its figures.
#[test]
fn what_was_measured_is_drawn() {
    let page = page_of(&[measured("veth", 1500)]);
    for words in [
        "Throughput against message size",
        "CPU per GB",
        "Round trip, p50",
        "Round trips of 64 B by percentile",
        "lm: 10.0 Gbit/s at 64 KiB",
        "udp-blocking: 50.0 µs at 64 B",
        "lm: 0.600 s per GB at 64 KiB",
        "25 %, 50 %",
    ] {
        assert!(page.contains(words), "{words} is missing");
    }
    // No place or length that is no number.
    assert!(!page.contains("NaN") && !page.contains("inf\""));
}

#[test]
fn ratios_stand_with_their_intervals_and_verdicts() {
    let page = page_of(&[measured("veth", 1500)]);
    for words in [
        "Of 3 targets 1 are met, 1 are missed, 1 are unclear.",
        "✓ met",
        "✗ missed",
        "? unclear",
        "≥ 1.45",
        "≤ 0.9",
        "≥ 1",
        "1.96 – 2.04",
        "1 more, of which nothing is asked",
    ] {
        assert!(page.contains(words), "{words} is missing");
    }
}

#[test]
fn files_of_another_kind_are_refused_in_one_line() {
    let mut newer = measured("veth", 1500);
    newer["schema"] = json!("lm-bench/2");
    let mut broken = measured("veth", 1500);
    broken["host"] = json!(7);
    for (file, words) in [
        (newer, "another kind"),
        (json!({"suite": "core"}), "another kind"),
        (broken, "invalid type"),
    ] {
        let failure = made_of(&[file]).unwrap_err();
        assert!(
            failure.text.contains(words) && failure.text.contains("; "),
            "{}",
            failure.text
        );
    }
    let missing = ReportArgs {
        files: vec![PathBuf::from("/no/such/file.json")],
        html: PathBuf::from("/no/such/page.html"),
    };
    assert!(report(&missing).unwrap_err().text.contains("/no/such/file.json"));
}

#[test]
fn a_system_belongs_to_the_place_of_its_link() {
    let mut one = measured("veth", 1500);
    one["systems"][1]["link"] = json!("veth with RPS");
    let reports = [serde_json::from_value(one).unwrap()];
    let groups = figures::groups(&reports);
    assert_eq!((groups.len(), groups[0].systems.len()), (1, 2));
    assert_eq!(
        groups[0]
            .rows(What::Throughput, "lm")
            .iter()
            .map(|row| row.size)
            .collect::<Vec<_>>(),
        [1024, 65_536]
    );
}
