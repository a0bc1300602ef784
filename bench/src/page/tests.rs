use serde_json::{Value, json};

use super::*;
use crate::scratch::Scratch;

fn round(at: u32, gbit_per_s: f64, us: Option<f64>) -> Value {
    let bytes = (gbit_per_s * 1e9 / 8.0) as u64;
    let mut round = json!({"at": at, "bytes": bytes, "messages": 10, "lost_messages": 0, "seconds": 1.0,
        "cpu_seconds_send": 0.5,
        "cpu_seconds_receive": 0.5, "cpu_seconds_machine": 1.0});
    if let Some(us) = us {
        round["p50_ns"] = json!(us * 1e3);
        round["mean_ns"] = json!(us * 1e3);
    }
    round
}

/// A report of LM and blocking UDP on one link.
fn measured(interface: &str) -> Value {
    let rows = [("lm", 5.0, 10.0), ("udp-blocking", 50.0, 5.0)].map(|(system, us, gbit)| {
        let rounds: Vec<Value> = [us, us, us * 9.0].map(|us| round(0, 0.0, Some(us))).into();
        [
            json!({"what": "round-trips", "system": system, "size": 64, "rounds": rounds}),
            json!({"what": "stream", "system": system, "size": 1024, "rounds": [round(0, gbit / 2.0, None)]}),
            json!({"what": "stream", "system": system, "size": 65_536, "rounds": [round(0, gbit, None), round(1,
                gbit, None)]}),
        ]
    });
    let host = |name: &str, core: u32| {
        json!({"name": name, "kernel": "6.18.3", "cpu": "Some Processor", "core": core,
            "memory_bytes": 4_294_967_296u64,
            "governor": "performance"})
    };
    json!({
        "schema": SCHEMA, "version": "9.8.7", "started": "2031-02-03T04:05:06Z",
        "host": host("nearby", 2), "far": host("distant", 5),
        "links": [{"interface": interface, "driver": "somedriver", "mtu": 1500, "mode": "native copy", "queues": 4,
            "offloads": {"generic-receive-offload": false, "tx-checksumming": true}, "xdp": false}],
        "settings": {"rounds": "20"},
        "caveats": ["the first <caveat>", "another caveat"],
        "systems": [
            {"id": "lm", "configuration": "as it comes", "link": interface},
            {"id": "udp-blocking", "configuration": "large socket buffers", "link": interface}],
        "rows": rows.concat(),
        "ratios": [{"what": "stream", "size": 65_536, "metric": "bits_per_s", "system": "lm",
            "against": "udp-blocking", "rounds": 20,
            "median": 2.0, "low": 1.96, "high": 2.04}],
        "absent": [{"system": "sockperf", "why": "apt-get install sockperf"}],
        "failures": [{"what": "beside", "system": "tcp", "size": 64, "at": 2, "why": "it went"}],
    })
}

/// The page made of these files.
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
    let page = made_of(&[measured("if7"), measured("if8")]).unwrap();
    for words in [
        "core 2, cpu Some Processor, governor performance, kernel 6.18.3, memory_bytes 4294967296, name nearby",
        "distant",
        "driver somedriver, interface if7, mode native copy, mtu 1500, offloads generic-receive-offload false, \
         tx-checksumming true, queues 4, xdp false",
        "interface if8, mode",
        "2031-02-03T04:05:06Z",
        "9.8.7",
        "the first &lt;caveat&gt;",
        "another caveat",
        "large socket buffers",
        "apt-get install sockperf",
        "tcp, round trips beside 64, round 3: it went",
        "udp-blocking  2.000  1.960..2.040",
    ] {
        assert!(page.contains(words), "{words} is missing");
    }
}

#[test]
fn the_page_needs_nothing_else() {
    let page = made_of(&[measured("if7")]).unwrap();
    for outside in [
        "http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("@media print"));
}

/// Each line of a chart is there, with its name, and says its figures: of round trips the median of rounds.
#[test]
fn what_was_measured_is_drawn() {
    let page = made_of(&[measured("if7")]).unwrap();
    for words in [
        "lm: 10.0 at 64 KiB",
        "udp-blocking: 50.0 at 64 B",
        "udp-blocking: 2.50 at 1 KiB",
    ] {
        assert!(page.contains(words), "{words} is missing");
    }
    assert_eq!(page.matches("<svg").count(), 2);
    // No place or length that is no number.
    assert!(!page.contains("NaN") && !page.contains("inf\""));
}

#[test]
fn files_of_another_kind_are_refused_in_one_line() {
    let mut older = measured("if7");
    older["schema"] = json!("lm-bench/1");
    let mut broken = measured("if7");
    broken["host"] = json!(7);
    for (file, words) in [
        (older, "another kind"),
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
