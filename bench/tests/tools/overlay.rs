//! `lm-check overlay` on a veth pair, in copy mode: the memory is what geometry says after each packet, and what cannot be is refused.

use crate::bed::{Bed, Ended, Host, Tool};
use crate::measuring::number;

/// Both ends of a veth pair of its own, in the namespace between the hosts, where nobody else sends.
fn bed() -> Option<Bed> {
    let bed = Bed::with_box()?;
    let queues = "numrxqueues 2 numtxqueues 2";
    bed.ip(
        Host::Box,
        &format!("link add one {queues} type veth peer name other {queues}"),
    );
    bed.ip(Host::Box, "link set one up");
    bed.ip(Host::Box, "link set other up");
    Some(bed)
}

fn overlay(bed: &Bed, arguments: &str) -> Ended {
    check(bed, &format!("overlay --from one --interface other {arguments}"))
}

fn check(bed: &Bed, line: &str) -> Ended {
    let mut command = bed.command(Host::Box, env!("CARGO_BIN_EXE_lm-check"));
    command.args(["--time-limit", "15"]).args(line.split_whitespace());
    Tool::start(command).end()
}

#[test]
fn each_packet_overwrites_the_headers_of_the_one_before() {
    let Some(bed) = bed() else { return };
    for (len, window, order) in [
        (1, 4, &[0][..]),
        (1448, 4, &[0]),
        (5000, 1, &[0, 1, 2, 3]),
        (11_036, 4, &[3, 2, 1, 0, 7, 6, 5, 4]),
        (11_584, 8, &[7, 6, 5, 4, 3, 2, 1, 0]),
    ] {
        let ended = overlay(
            &bed,
            &format!("--mode copy --message-size {len} --window {window}"),
        );
        let report = ended.expect_code(0).json();
        assert_eq!(report["order"], serde_json::json!(order), "{report}");
        let restored = order.len().div_ceil(window) - 1;
        assert_eq!(number(&report, "tails_restored"), restored as u64, "{report}");
        assert_eq!(number(&report["footprint"], "prefix_len"), 0, "{report}");
        assert_eq!(report["zero_copy_receive"], false, "{report}");
    }
}

#[test]
fn what_cannot_be_shown_is_refused() {
    let Some(bed) = bed() else { return };
    for (arguments, code, why) in [
        ("--mode copy --message-size 11585", 2, "--message-size 11584"),
        ("--mode copy --window 3", 2, "not a power of two"),
        ("--mode copy --queue 9", 1, "other queue 9"),
        ("--mode zero-copy", 1, ";"),
    ] {
        let ended = overlay(&bed, arguments);
        assert!(ended.expect_code(code).stderr.contains(why), "{ended:?}");
    }
    bed.ip(Host::Box, "link set one down");
    let ended = check(&bed, "overlay --from none --interface other");
    assert!(ended.expect_code(1).stderr.contains("none"), "{ended:?}");
}
