//! What sender and receiver of `lm-check messages` say of each message, one letter each, and what of it fits together.

use std::ops::RangeBounds;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// How messages fared, by the receiver's letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fates {
    /// Delivered whole.
    pub(crate) whole: u64,
    /// Delivered in part, with a map.
    pub(crate) in_part: u64,
    /// Reported incomplete, or never heard of.
    pub(crate) reported: u64,
}

/// The receiver found nothing wrong with any message that it was given.
pub(crate) fn ensure_no_fault(received: &Value) -> Result<()> {
    let faults = received["faults"].as_array().context("no faults")?;
    ensure!(faults.is_empty(), "{}", received["faults"]);
    Ok(())
}

/// Compares the reports of a sender and a receiver: no message was wrong, and what its sender was told of each is what
/// became of it. `messages`: how many there may be.
///
/// # Errors
/// Which message is not as it should be.
pub(crate) fn compare(
    delivery: &str,
    messages: impl RangeBounds<usize>,
    sent: &Value,
    received: &Value,
) -> Result<Fates> {
    ensure_no_fault(received)?;
    let letters = |report: &Value, way: &str, other: &Value| {
        let mut hosts = report[way].as_array().into_iter().flatten();
        // Of a receiver with nothing to tell of that host, nothing came.
        let found = hosts.find(|host| host["address"] == other["address"] && host["life"] == 0);
        found
            .map_or("", |host| host["fates"].as_str().unwrap_or(""))
            .to_owned()
    };
    let (sent, received) = (letters(sent, "to", received), letters(received, "from", sent));
    ensure!(messages.contains(&sent.len()), "{} fates", sent.len());
    ensure!(
        received.len() <= sent.len(),
        "{} messages, {} were sent",
        received.len(),
        sent.len()
    );
    let mut fates = Fates::default();
    let received = received.chars().chain(std::iter::repeat('-'));
    for (number, (sent, received)) in sent.chars().zip(received).enumerate() {
        let is_fair = match (sent, received) {
            // Confirmed, and there.
            ('d', 'w') => true,
            // Not there, and both know, or the one who sent it knows.
            ('i', 'i') | ('e' | 't' | 'i', '-' | 'i') => delivery != "reliable",
            // There in part, with a map, and its sender knows.
            ('i', 'p') => delivery == "partial",
            // There, and the word of it was lost with the session.
            ('e' | 't', 'w' | 'p') => delivery != "reliable",
            _ => false,
        };
        ensure!(
            is_fair,
            "message {number}: its sender says {sent:?}, its receiver {received:?} ({delivery})"
        );
        match received {
            'w' => fates.whole += 1,
            'p' => fates.in_part += 1,
            _ => fates.reported += 1,
        }
    }
    Ok(fates)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_fits_together_is_fair() {
        let compare = |delivery, sent: &str, received: &str, faults: &[&str]| {
            let fates = |other, fates| json!([{"address": other, "life": 0, "fates": fates}]);
            let received = json!({"address": "b", "from": fates("a", received), "faults": faults});
            let sent = json!({"address": "a", "to": fates("b", sent)});
            compare(delivery, 3..=3, &sent, &received)
        };
        let fates = compare("partial", "dii", "wpi", &[]).unwrap();
        assert_eq!((fates.whole, fates.in_part, fates.reported), (1, 1, 1));
        for (delivery, sent, received, words) in [
            ("reliable", "ddd", "wwi", "message 2"),
            ("reliable", "ddi", "wwi", "message 2"),
            ("unreliable", "did", "wpw", "message 1"),
            ("partial", "d?d", "www", "message 1"),
            ("partial", "dd", "ww", "2 fates"),
            ("partial", "ddd", "wwww", "4 messages"),
            ("reliable", "ddd", "ww", "message 2"),
        ] {
            let error = format!("{:#}", compare(delivery, sent, received, &[]).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
        let error = compare("reliable", "ddd", "www", &["byte 1 is wrong"]).unwrap_err();
        assert!(error.to_string().contains("byte 1"), "{error}");
    }
}
