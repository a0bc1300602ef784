//! IP fragments in zero-copy mode, under exclusive use: cards put them on the queue of their addresses.

use anyhow::{Context, Result, bail, ensure};

use super::pair::Pair;
use super::streams::Stream;
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

/// IPv4's and UDP's headers; what they leave of 1500 is a message's first fragment.
const HEADERS_LEN: u64 = 28;
/// Longest message: what one UDP datagram carries (RFC 768 with RFC 791).
const LONGEST: u64 = 65_507;
/// The ports of about one sender in 32 meet the same entry of the card's table as its addresses: so many are tried.
const SENDERS_MAX: usize = 4;

/// Lengths at which something changes: two fragments, three, last ones that Ethernet fills up to its shortest frame,
/// and the longest.
fn lens() -> Vec<u64> {
    let first = 1500 - HEADERS_LEN;
    let payload = first + 8;
    let bound = |fragments: u64| first + (fragments - 1) * payload;
    let mut lens = vec![first - 8, bound(1), LONGEST - 1, LONGEST];
    for fragments in [1, 2, 20] {
        lens.extend([1, 25, 26, 27, payload].map(|last| bound(fragments) + last));
    }
    lens
}

/// Messages up to the longest, every byte; and a receiver that is not under exclusive use refuses them.
pub(super) fn check(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let stream = Stream {
        options: ["--ipfrag", "--exclusive"],
        delivery: "unreliable",
        ..Stream::of(lens(), if plan.short { 2 } else { 10 })
    };
    let mut attempts = Vec::new();
    let [sent, received] = loop {
        match stream.run(&pair) {
            Err(error) if attempts.len() + 1 < SENDERS_MAX && is_unsupported(&error) => {
                attempts.push(format!("{error:#}"));
            }
            result => break result.with_context(|| format!("before: {attempts:?}"))?,
        }
    };
    let fates = received["from"][0]["fates"].as_str().unwrap_or_default();
    ensure!(
        fates.len() == stream.messages && fates.chars().all(|fate| fate == 'w'),
        "nothing was lost on the way, and not every message is whole: {sent} {received}"
    );
    // The kernel would put fragments together that come to another queue, and pass the message on.
    let packets = sent["counters"]["data_packets_sent"].as_u64();
    ensure!(
        received["counters"]["one_copy_packets"].as_u64() == Some(0)
            && received["counters"]["landing_packets"].as_u64() >= packets
            && packets > Some(stream.messages as u64),
        "not all fragments came to the landing queue: {sent} {received}"
    );
    let refused = Stream {
        options: ["--ipfrag", ""],
        ..stream
    };
    let refusal = match refused.run(&pair) {
        Ok(reports) => bail!("IP fragments landed without exclusive use: {reports:?}"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(refusal.contains("--exclusive"), "not the remedy: {refusal}");
    Ok(())
}

/// The receiver found no way for that sender's ports.
fn is_unsupported(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("cannot receive what was asked for")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_at_the_bounds_of_fragments_and_of_datagrams() {
        let lens = lens();
        for bound in [1472, 1473, 1472 + 26, 1472 + 1480, 1472 + 1480 + 1, 65_507] {
            assert!(lens.contains(&bound), "{bound} is not in {lens:?}");
        }
        assert!(lens.iter().all(|len| *len <= LONGEST));
    }
}
