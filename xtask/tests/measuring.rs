//! What the measuring commands show, measured once by the real programs. Speeds are not judged, only what stands under which name.

use std::path::Path;

use serde_json::Value;
use xtask::bench::all_comparisons;
use xtask::workspace::Programs;

/// The named contenders of a comparison, each measured once by the programs that `cargo xtask test` builds before the tests; their results.
fn measured(suite: &str, key: &str, names: &[&str]) -> Option<Vec<Value>> {
    let built = Path::new(env!("CARGO_BIN_EXE_xtask")).parent().unwrap();
    let why = match (
        rustix::process::geteuid().is_root(),
        built.join("lm-bench").exists(),
    ) {
        (false, _) => "not root; network namespaces need it",
        (_, false) => "the tools are not built; cargo build -p lm-bench --bins",
        _ => {
            let suites = all_comparisons().into_iter();
            let (_, comparisons) = suites.into_iter().find(|(name, _)| *name == suite).unwrap();
            let mut comparison = comparisons.into_iter().find(|one| one.key == key).unwrap();
            comparison.contenders.retain(|one| names.contains(&one.name));
            let measured = comparison.measure(1, &Programs::in_folder(built), |_| {});
            let json = measured.unwrap().to_json();
            let contenders = json["contenders"].as_array().unwrap().clone();
            assert_eq!(contenders.len(), names.len(), "{json:#}");
            return Some(contenders);
        }
    };
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{why}, and CI=true allows no skipped test"
    );
    println!("SKIPPED: {why}");
    None
}

#[test]
fn the_headline_row_is_lm_by_its_tools_defaults() {
    let names = ["LM", "LM, no digests"];
    let Some(rows) = measured("core", "throughput_64k", &names) else {
        return;
    };
    for (row, (name, integrity)) in rows.iter().zip([("LM", "manifest"), ("LM, no digests", "none")]) {
        assert_eq!(row["name"], name);
        assert_eq!(row["reports"][0]["sender"]["integrity"], integrity, "{row:#}");
    }
}

/// What is called forwarded has arrived, and no more than the box says that it sent.
#[test]
fn what_the_box_forwards_is_counted_where_it_arrives() {
    let Some(rows) = measured("loss", "box", &["the box", "the link without it"]) else {
        return;
    };
    for row in &rows {
        let report = &row["reports"][0];
        let sender = &report["sender"];
        let packets = report["packets_per_s"].as_f64().unwrap() * sender["seconds"].as_f64().unwrap();
        let given = sender["packets"].as_f64().unwrap();
        // The lesson for a UDP socket, and ARP, are no packets of the sender's count.
        assert!(packets > 0.0 && packets <= given + 20.0, "{row:#}");
        if row["name"] == "the box" {
            let sent = report["box"]["rightward"]["sent"].as_f64().unwrap();
            assert!((packets - sent).abs() <= 0.01 * sent + 20.0, "{row:#}");
        }
    }
}
