//! A sender that falls silent in the middle of a message while another one waits for its place.
//!
//! ```text
//!   left     198.18.0.1  veth ──┐
//!                               ├── bridge ── card ─────── card  198.18.0.2  right
//!   the box  198.18.0.3  veth ──┘
//! ```

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::ends::await_stream;
use super::pair::{Pair, further_sender};
use crate::bed::leftovers::temporary_folder;
use crate::content::{Content, sha256};
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

/// A message that takes seconds, and one that is sent in many messages, for longer than nobody has a place.
const LENS: [u64; 2] = [8 << 20, 4 << 20];
/// Messages of the second sender.
const MESSAGES: u64 = 64;

/// It is stopped while its message lands. The second one, whose messages arrive all the same, gets its place after 5 s,
/// and lands; the first one, when it goes on, brings the rest of its message to the end without a place.
pub(super) fn check(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::with_box(plan, device)?;
    let second = further_sender(&pair.bed)?;
    let [long, short] = LENS.map(|len| Content::new(&std::env::temp_dir(), len));
    let (long, short) = (long?, short?);
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "stalled")?;
    let line = format!(
        "lm-recv --json --from-anyone --max-message-size 8M --output {}",
        folder.display()
    );
    let receiver = pair.receiving(&line);
    let receiver = pair.start_receiver(receiver, "listening on")?;

    let first = pair.sending("lm-send --json --rate 20M --message-size 8M");
    let mut first = pair.start_sender(first.arg(&long.file))?;
    await_stream(&pair, &mut first)?;
    first.signal(Signal::STOP);
    let other = pair.sending("lm-send --json --rate 3M --message-size 64K");
    let other = second.spawn(other.arg(&short.file))?.finish();
    ensure!(!first.has_ended()?, "it ended before it was stopped");
    first.signal(Signal::CONT);
    let other = other?.json().context("the second sender")?;
    let without = other["messages_one_copy"].as_u64().unwrap_or(0);
    ensure!(
        (1..MESSAGES).contains(&without),
        "of the second sender's {MESSAGES} messages {without} did not land: {other}"
    );
    let sent = first.finish()?.json().context("the sender that was stopped")?;

    let received = receiver.stop()?;
    let received = (received.json()).with_context(|| format!("lm-recv: {}", received.stderr))?;
    pair.prove_mode(&sent, &received)?;
    ensure!(
        received["transfers"] == 2 && received["failed_transfers"] == 0,
        "not both are whole: {received}"
    );
    ensure!(
        received["fragments_one_copy"].as_u64() > Some(0),
        "the first sender had its place to the end: {received}"
    );
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&folder).context("cannot read the received files' folder")? {
        found.push(sha256(&entry?.path())?);
    }
    let mut expected = vec![long.sha256, short.sha256];
    found.sort();
    expected.sort();
    ensure!(
        found == expected,
        "what arrived is not what was sent: SHA-256 {found:?} instead of {expected:?}"
    );
    Ok(())
}
