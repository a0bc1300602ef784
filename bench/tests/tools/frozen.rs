//! Frozen builds of `lm-bench` as systems of its measuring commands.

use lm_bench::suite::schema::{Ratio, What};

use crate::bed::{Bed, Host, RECEIVER, SENDER, Tool};
use crate::measuring::lm_bench;
use crate::suite::{LONG, check_round, end, measure, serve_with};

#[test]
fn a_frozen_build_is_measured_beside_this_one() {
    let Some(bed) = Bed::new() else { return };
    // Another build would do the same more slowly or faster.
    let build = format!("--frozen v1={}", env!("CARGO_BIN_EXE_lm-bench"));
    let server = serve_with(&bed, &format!("--bind {RECEIVER}:7170 --allow {SENDER} {build}"));
    let line = format!(
        "compare {RECEIVER} {build} --systems lm --sizes 7168 --rounds 2 --seconds 0.1 --warm-up 0.02 --count 50"
    );
    let (report, text) = measure(&bed, &line);
    for row in &report.rows {
        row.rounds
            .iter()
            .zip(0..)
            .for_each(|(round, at)| check_round(row, round, at));
        let of_row =
            |ratio: &&Ratio| (ratio.what, ratio.size, &*ratio.against) == (row.what, row.size, "lm@v1");
        let ratios: Vec<_> = report.ratios.iter().filter(of_row).collect();
        assert!(
            ratios.len() == 2 && ratios.iter().all(|one| one.rounds == 2),
            "{ratios:?}"
        );
        assert!(ratios.iter().any(|one| one.target.is_some()), "{ratios:?}");
    }
    let measured: Vec<_> = report.rows.iter().map(|row| (row.what, &*row.system)).collect();
    let whats = [What::Latency, What::Throughput, What::LatencyUnderLoad];
    let both = whats.map(|what| [(what, "lm"), (what, "lm@v1")]);
    assert_eq!(measured, both.concat(), "{:?}", report.failures);
    assert!(text.contains("lm@v1"), "{text}");
    let line = format!(
        "latency {RECEIVER} --frozen v2={} --systems lm --count 50",
        env!("CARGO_BIN_EXE_lm-bench")
    );
    let ended = Tool::start(lm_bench(&bed, Host::Sender, &format!("{line} --sizes 64"))).end_within(LONG);
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(
        text.contains("no build is called v2 here; start lm-bench serve with --frozen"),
        "{text}"
    );
    end(&bed, server);
}
