//! Ends of programs, wanted and unwanted, and what comes after them: senders and receivers that are killed, and queues
//! that are opened again and again.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::pair::{Pair, await_link, steering_notes};
use super::spoil;
use super::streams::Stream;
use crate::bed::{Host, INTERFACE, Launch, Program, until};
use crate::content::Content;
use crate::machine::status_kib;
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

/// A message that takes a while.
const MESSAGE: &str = "8M";
const MESSAGE_LEN: u64 = 8 << 20;

/// Senders are killed in the middle of a message; the next one gets through, and the receiver's memory does not grow.
pub(super) fn abort(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let source = Content::new(&std::env::temp_dir(), MESSAGE_LEN)?;
    let line = format!(
        "lm-recv --json --from-anyone --max-message-size {MESSAGE} --output {}",
        source.folder.display()
    );
    let receiver = pair.receiving(&line).time_limit(Duration::from_secs(300));
    let receiver = pair.start_receiver(receiver, "listening on")?;
    let mut memory = Vec::new();
    let rounds = if plan.short { 4 } else { 12 };
    let mut sent = Value::Null;
    for round in 0..=rounds {
        // The first one is not killed: what it needs is what everybody needs.
        if round > 0 {
            kill_in_the_middle(&pair, &source)
                .with_context(|| format!("sender {round}, which was to be killed"))?;
        }
        let sender = pair.start_sender(pair.sending("lm-send --json").arg(&source.file))?;
        sent = (sender.finish().and_then(|sent| sent.json()))
            .with_context(|| format!("the sender after {round} dead ones, {memory:?} KiB"))?;
        let received = received_file(&source)?;
        source.ensure_same(&received)?;
        std::fs::remove_file(&received).with_context(|| format!("cannot remove {}", received.display()))?;
        // Ordinary and huge pages.
        memory.push(status_kib(receiver.id(), &["VmRSS", "HugetlbPages"])?);
    }
    let report = receiver.stop()?;
    let report = (report.json()).with_context(|| format!("lm-recv: {}", report.stderr))?;
    pair.prove_mode(&sent, &report)?;
    ensure!(
        report["transfers"] == rounds + 1,
        "not every sender got through: {report}"
    );
    ensure!(
        report["failed_transfers"] == rounds,
        "{rounds} senders were killed under way, and the receiver says: {report}"
    );
    // Zones lie elsewhere when some are quarantined, and each place is touched for the first time once.
    let (middle, last) = (memory[rounds / 2], memory[rounds]);
    ensure!(
        last <= middle + 1024,
        "the receiver's memory grew from {middle} to {last} KiB in the second half: {memory:?}"
    );
    Ok(())
}

/// Starts a sender whose message takes three seconds, and kills it after one of them.
fn kill_in_the_middle(pair: &Pair, source: &Content) -> Result<()> {
    let sender = pair
        .sending(&format!("lm-send --json --rate 20M --message-size {MESSAGE}"))
        .arg(&source.file);
    let mut sender = pair.start_sender(sender)?;
    until("the sender begins", Duration::from_secs(10), || {
        Ok(pair.bed.left().has_xdp_program()? || sender.has_ended()?)
    })?;
    // Its gate made the card begin anew.
    await_link(&pair.bed)?;
    // The middle of it is what this is about.
    std::thread::sleep(Duration::from_secs(1));
    kill(sender)
}

/// `kill -9`.
fn kill(mut program: Program) -> Result<()> {
    ensure!(!program.has_ended()?, "it ended before it was killed");
    program.signal(Signal::KILL);
    let output = program.outcome()?;
    ensure!(!output.status.success(), "it ended before it was killed");
    Ok(())
}

/// What was received: one file, and of transfers that broke one part at most, with which that file would go on.
fn received_file(source: &Content) -> Result<PathBuf> {
    let entries = std::fs::read_dir(&source.folder).context("cannot read the received files' folder")?;
    let files = entries.flatten().map(|entry| entry.path());
    let (parts, files): (Vec<PathBuf>, Vec<PathBuf>) = files
        .filter(|path| *path != source.file)
        .partition(|path| path.extension().is_some_and(|ending| ending == "part"));
    match files.as_slice() {
        [file] if parts.len() <= 1 => Ok(file.clone()),
        _ => bail!("there are {files:?} and {parts:?} instead of one received file and one part"),
    }
}

/// Both ends are opened, pass one message, and are closed, again and again.
pub(super) fn rebind(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let before = pair.tables().context("before anything ran")?;
    let rounds = if plan.short { 3 } else { 100 };
    for round in 0..rounds {
        let passed = one_message(&pair, round);
        spoil::card(pair.spoil, pair.bed.right())?;
        let failed = passed.as_ref().err();
        let failed = failed.map_or_else(String::new, |error| format!(", whose message failed: {error:#}"));
        // Whatever became of the message: a card that is left changed is a fault of its own.
        (pair.ensure_as_before(&before))
            .and(passed)
            .with_context(|| format!("round {round} of {rounds}{failed}"))?;
    }
    Ok(())
}

/// A receiver, a sender and a message between them.
fn one_message(pair: &Pair, seed: u64) -> Result<()> {
    let stream = Stream {
        seed,
        in_flight: 1,
        ..Stream::of(vec![100_000], 1)
    };
    stream.run(pair).map(drop)
}

/// A receiver is killed; the next one undoes what that one changed, takes over, and leaves everything as it was before.
pub(super) fn takeover(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let before = pair.tables().context("before anything ran")?;
    for round in 0..if plan.short { 1 } else { 5 } {
        let receiver = pair.receiving("lm-check messages --lens 100000 --messages 1");
        kill(pair.start_receiver(receiver, "ready")?).context("the receiver")?;
        ensure!(
            !steering_notes().is_empty(),
            "a killed receiver left no note of what it changed: was the card steered at all?"
        );
        one_message(&pair, round).context("after a receiver that was killed")?;
        pair.ensure_as_before(&before)?;
    }
    Ok(())
}

/// Address resolution, ping and TCP of the kernel go on between the same interfaces while a stream lands.
pub(super) fn kernel_traffic(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let (receiver, mut sender) = pair.start_stream(1 << 20, [0.2, 14.0])?;
    await_stream(&pair, &mut sender)?;
    let (left, right) = (pair.bed.left(), pair.bed.right());
    let ping = format!("ping -c 100 -i 0.05 -W 2 {}", right.address());
    let ping = left.spawn(Launch::new("/bin/busybox").args(ping.split(' ')))?;
    tcp(left, right, if plan.short { 1 << 20 } else { 4 << 20 })?;
    let ping = ping.outcome()?;
    let answers = answers(&ping.stdout).with_context(|| format!("ping: {}{}", ping.stdout, ping.stderr))?;
    ensure!(
        !sender.has_ended()?,
        "the stream ended before ping and TCP did, so they were not beside it"
    );
    let received = receiver.finish()?.json().context("the far end")?;
    let sent = sender.finish()?.json().context("the near end")?;
    pair.prove_mode(&sent, &received)?;
    ensure!(
        received["lost_messages"] == 0 && received["messages"].as_u64() > Some(0),
        "the stream suffered: {received}"
    );
    ensure!(
        answers >= 95,
        "ping had {answers} of 100 answers: {}",
        ping.stdout
    );
    Ok(())
}

/// Waits until the stream is in full flow.
pub(super) fn await_stream(pair: &Pair, sender: &mut Program) -> Result<()> {
    let file = format!("/sys/class/net/{INTERFACE}/statistics/rx_packets");
    let packets = || anyhow::Ok(pair.bed.right().read_file(&file)?.parse::<u64>().unwrap_or(0));
    let before = packets()?;
    until("2000 packets came", Duration::from_secs(20), || {
        ensure!(!sender.has_ended()?, "the sender has ended");
        Ok(packets()? >= before + 2000)
    })
}

/// The number of answers in what ping says at its end.
fn answers(said: &str) -> Option<u32> {
    let line = said.lines().find(|line| line.contains("packets transmitted"))?;
    let received = line.split(", ").find(|part| part.contains("received"))?;
    received.split_whitespace().next()?.parse().ok()
}

/// Fetches a file from one host to the other by HTTP and compares it.
fn tcp(from: &Host, to: &Host, len: u64) -> Result<()> {
    let source = Content::new(&std::env::temp_dir(), len)?;
    let busybox = |line: &str| Launch::new("/bin/busybox").args(line.split(' '));
    let server = from.spawn(busybox("httpd -f -p 8000 -h").arg(&source.folder))?;
    let received = source.received();
    let client = busybox(&format!("wget -q http://{}:8000/sent -O", from.address()));
    let client = to.spawn(client.arg(&received))?;
    client.finish().context("no TCP beside the stream")?;
    server.stop()?;
    source.ensure_same(&received)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_ping() {
        let said = "64 bytes\n--- x ping statistics ---\n100 packets transmitted, 98 packets received, 2% packet \
            loss\n";
        assert_eq!(answers(said), Some(98));
        assert_eq!(answers("nothing"), None);
    }
}
