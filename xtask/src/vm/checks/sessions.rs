//! Eight senders of LM into one receiver, in the guest. They stand behind the box, in which a bridge joins them with a card: there are two cards.
//!
//! ```text
//!   198.18.0.1  veth ──┐  namespace of the box
//!   …                  ├── bridge ── card ─────── card  198.18.0.2
//!   198.18.0.9  veth ──┘
//! ```

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::card::{Row, STREAM_SECONDS, WARM_UP};
use super::pair::{await_link, further_sender, hosts, join};
use crate::bed::{Bed, Launch, Lone, Program};
use crate::ends::Ends;
use crate::vm::protocol::Mode;

/// Last bytes of the addresses of those beside the left host.
const FURTHER: std::ops::RangeInclusive<u8> = 3..=9;
/// How long each sends at most: until the last one has begun, and the receiver's time.
const SENDING_SECONDS: f64 = 10.0;

/// Measures a row's rounds; its report is like that of one sender.
pub(super) fn measure(row: &Row) -> Result<Value> {
    let bed = hosts(row.device, true)?;
    bed.introduce()?;
    let further: Vec<Lone> = FURTHER
        .map(|number| further_sender(&bed, number))
        .collect::<Result<_>>()?;
    join(&bed, FURTHER)?;
    super::card::prepare(&bed, row)?;
    let (mut rounds, mut failures) = (Vec::new(), Vec::new());
    for _ in 0..row.rounds {
        match round(&bed, &further, row) {
            Ok(round) => rounds.push(round),
            Err(error) => failures.push(json!({"why": format!("{error:#}")})),
        }
    }
    Ok(json!({"rounds": rounds, "failures": failures}))
}

/// What the receiver counted from the moment on when it had a message of each.
fn round(bed: &Bed, further: &[Lone], row: &Row) -> Result<Value> {
    let hosts: Vec<_> = std::iter::once(bed.left())
        .chain(further.iter().map(Lone::host))
        .collect();
    let ends = Ends::stream(&row.system, row.size, [WARM_UP, STREAM_SECONDS])
        .sending(SENDING_SECONDS)
        .options("", &format!("--senders {}", hosts.len()));
    let far = ends.clone().mode(row.mode.unwrap_or(Mode::Auto).option());
    let launch = |words, core| {
        let launch = Launch::new("/bin/lm-bench").args(words).core(core);
        launch.time_limit(Duration::from_secs(row.limit_s().into()))
    };
    let mut receiver = bed.right().spawn(launch(far.far(), 1))?;
    receiver.await_text("ready")?;
    // The gate made the card begin anew.
    await_link(bed)?;
    let senders: Vec<Program> = (hosts.iter())
        .map(|host| host.spawn(launch(ends.near(), 0)))
        .collect::<Result<_>>()?;
    while !receiver.has_printed() && !receiver.has_ended()? {
        std::thread::sleep(Duration::from_millis(10));
    }
    for sender in senders {
        sender.signal(Signal::TERM);
        sender.outcome()?;
    }
    let report = receiver.finish()?.json().context("the receiver")?;
    let heard = report["senders"].as_array().map_or(0, Vec::len);
    ensure!(
        heard == hosts.len(),
        "the receiver heard {heard} of {} senders",
        hosts.len()
    );
    Ok(report)
}
