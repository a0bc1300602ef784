//! The list in `docs/conformance.md` names every case of the kernel's test once, and tests that exist.

use std::process::Command;

/// The cases of `test_xsk.h`.
const CASES: [&str; 36] = [
    "SEND_RECEIVE",
    "SEND_RECEIVE_2K_FRAME",
    "SEND_RECEIVE_SINGLE_PKT",
    "POLL_RX",
    "POLL_TX",
    "POLL_RXQ_FULL",
    "POLL_TXQ_FULL",
    "ALIGNED_INV_DESC",
    "ALIGNED_INV_DESC_2K_FRAME_SIZE",
    "UMEM_HEADROOM",
    "BIDIRECTIONAL",
    "STAT_RX_DROPPED",
    "STAT_TX_INVALID",
    "STAT_RX_FULL",
    "STAT_FILL_EMPTY",
    "XDP_PROG_CLEANUP",
    "XDP_DROP_HALF",
    "XDP_SHARED_UMEM",
    "XDP_METADATA_COPY",
    "XDP_METADATA_COPY_MULTI_BUFF",
    "ALIGNED_INV_DESC_MULTI_BUFF",
    "TOO_MANY_FRAGS",
    "XDP_ADJUST_TAIL_SHRINK",
    "TX_QUEUE_CONSUMER",
    "XDP_ADJUST_TAIL_SHRINK_MULTI_BUFF",
    "XDP_ADJUST_TAIL_GROW",
    "XDP_ADJUST_TAIL_GROW_MULTI_BUFF",
    "SEND_RECEIVE_9K_PACKETS",
    "SEND_RECEIVE_UNALIGNED",
    "UNALIGNED_INV_DESC",
    "UNALIGNED_INV_DESC_4001_FRAME_SIZE",
    "SEND_RECEIVE_UNALIGNED_9K_PACKETS",
    "UNALIGNED_INV_DESC_MULTI_BUFF",
    "HW_SW_MIN_RING_SIZE",
    "HW_SW_MAX_RING_SIZE",
    "TEARDOWN",
];

/// Cells of the rows that begin with a case's name.
fn rows(document: &str) -> Vec<Vec<&str>> {
    let cells = |line| -> Vec<&str> { str::split(line, '|').map(str::trim).collect() };
    let rows = document.lines().filter(|line| line.starts_with('|')).map(cells);
    rows.filter(|cells| cells[1].starts_with(|first: char| first.is_ascii_uppercase()))
        .filter(|cells| !cells[1].contains(|letter: char| letter.is_ascii_lowercase()))
        .collect()
}

#[test]
fn the_list_of_cases_is_complete_and_its_tests_exist() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/conformance.md");
    let document = std::fs::read_to_string(path).expect("docs/conformance.md");
    let output = Command::new(std::env::current_exe().expect("this program"))
        .arg("--list")
        .output()
        .expect("the list of tests");
    let tests = String::from_utf8(output.stdout).expect("names");
    let rows = rows(&document);
    let mut listed: Vec<&str> = rows.iter().map(|row| row[1]).collect();
    let mut cases = CASES.to_vec();
    listed.sort_unstable();
    cases.sort_unstable();
    assert_eq!(listed, cases);
    let mut named = Vec::new();
    for row in &rows {
        let [_, case, test, native, generic, _] = row[..] else {
            panic!("a row has four cells: {row:?}")
        };
        let test = test.trim_matches('`');
        for mode in ["native", "generic"] {
            let line = format!("{test}::{mode}: test");
            assert!(
                tests.lines().any(|known| known == line),
                "{case}: no test {test}::{mode}"
            );
        }
        for cell in [native, generic] {
            let known = ["holds", "in part", "refused"]
                .iter()
                .any(|word| cell.starts_with(word));
            assert!(known, "{case}: {cell}");
        }
        assert!(!named.contains(&test), "{test} stands for two cases");
        named.push(test);
    }
}
