//! `lm-bench land-send` and `land-recv`: both placements put every byte in its place, and what is wrong is no measurement.

use crate::bed::{Bed, INTERFACE, RECEIVER, SENDER};
use crate::measuring::{bare_addresses, number, receiver, sender, stream};

fn both(bed: &Bed, size: &str, window: u32) -> String {
    format!(
        "--interface {INTERFACE} --queue 1 --pace {} --posted 384 --message-size {size} --window {window}",
        bed.path("pace").display()
    )
}

fn receiving(both: &str, placement: &str) -> String {
    format!("land-recv {both} --busy-poll udp --to {RECEIVER} --from {SENDER} --placement {placement}")
}

#[test]
fn every_byte_is_in_its_place() {
    let Some(bed) = Bed::new() else { return };
    for (placement, window, size, fragments, len) in [
        ("overlay", 256, "7168", 5, 7168),
        ("overlay", 4, "64K", 46, 1 << 16),
        ("overlay", 256, "1M", 725, 1_u64 << 20),
        ("strip", 256, "7168", 5, 7168),
        ("strip", 256, "1M", 725, 1 << 20),
        ("strip", 1, "1M", 725, 1 << 20),
    ] {
        let both = both(&bed, size, window);
        let (received, sent) = stream(
            &bed,
            &format!("{} --verify", receiving(&both, placement)),
            &format!("land-send {both} --verify {}", bare_addresses(&bed)),
        );
        let what = format!("{placement} {window} {size}: {received} {sent}");
        assert!(number(&received, "messages") > 0, "{what}");
        assert_eq!(received["verified"], true, "{what}");
        assert_eq!(number(&received, "passed"), 0, "{what}");
        assert_eq!(number(&received, "dropped"), 0, "{what}");
        assert!(
            number(&received, "napi_id") > 0,
            "the receiver polls the queue: {what}"
        );
        let (bytes, packets) = (number(&received, "bytes"), number(&received, "packets"));
        // The measurement may begin and end inside a message, whose last fragment is shorter.
        let mean = bytes as f64 / packets as f64;
        let exact = len as f64 / f64::from(fragments);
        assert!((mean / exact - 1.0).abs() < 0.01, "{what}");
        assert!(packets <= number(&sent, "packets"), "{what}");
    }
}

/// Runs a stream that must fail; gives the receiver's complaint.
fn complaint(bed: &Bed, receiving: &str, sending: &str) -> String {
    let receiver = receiver(bed, receiving);
    sender(bed, &format!("{sending} --seconds 0.3 {}", bare_addresses(bed)));
    receiver.end().expect_code(1).stderr.clone()
}

#[test]
fn a_wrong_byte_is_noticed() {
    let Some(bed) = Bed::new() else { return };
    for placement in ["overlay", "strip"] {
        let both = both(&bed, "64K", 256);
        // This sender does not fill messages in.
        let text = complaint(
            &bed,
            &format!("{} --verify", receiving(&both, placement)),
            &format!("land-send {both}"),
        );
        assert!(text.contains("byte 0 of message 1 is wrong"), "{text}");
    }
}

#[test]
fn a_missing_packet_ends_the_stream() {
    let Some(bed) = Bed::new() else { return };
    // In forward order the gate lets the first packet of each of the receiver's windows in.
    let text = complaint(
        &bed,
        &receiving(&both(&bed, "64K", 4), "strip"),
        &format!("land-send {}", both(&bed, "64K", 1)),
    );
    assert!(text.contains("should be fragment 3 of message 1"), "{text}");
}

#[test]
fn placements_that_cannot_work_are_refused() {
    let Some(bed) = Bed::new() else { return };
    for (placement, size, window, why) in [
        ("overlay", "64K", 1, "would destroy the payload"),
        ("strip", "1449", 256, "less than 14 bytes"),
        ("overlay", "64K", 3, "not a power of two"),
        ("overlay", "0", 4, "1 byte to 1G"),
    ] {
        let line = receiving(&both(&bed, size, window), placement);
        let ended = crate::bed::Tool::start(crate::measuring::lm_bench(
            &bed,
            crate::bed::Host::Receiver,
            &line,
        ))
        .end();
        assert!(ended.expect_code(1).stderr.contains(why), "{ended:?}");
    }
}
