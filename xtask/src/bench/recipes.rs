//! A stream between two ends of `lm-bench`, one sample of it.
//!
//! Every sample has a fresh bed, one receiver and one sender, each on a core of its own; a receiver says `ready` on standard error as soon as a
//! sender may start. All beds are [`BedConfig::default`](crate::bed::BedConfig): two queues each way, no receive packet steering, no threaded
//! NAPI, veth's own queueing. `bench/RECIPE.md` tells what LM does to be fast there, and how the same is done on real hosts.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::Sample;
use crate::bed::{Bed, Launch, Program};
use crate::ends::{self, Ends};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// How long one throughput sample lasts, in seconds of the receiver's clock.
pub(super) const SECONDS: f64 = 1.0;

/// What a sender and a receiver reported, as the JSON objects they printed.
#[derive(Debug)]
pub(super) struct Reports {
    /// The sender's.
    pub(super) sender: Value,
    /// The receiver's.
    pub(super) receiver: Value,
}

/// A stream between two ends, on a bed that has been made for it.
pub(super) fn stream(bed: &Bed, programs: &Programs, ends: &Ends) -> Result<Sample> {
    let lm_bench = programs.path("lm-bench");
    let limit = Duration::from_secs(30);
    stream_of(bed, ends, |words, core| {
        Launch::new(&lm_bench).args(words).core(core).time_limit(limit)
    })
}

/// The same of programs that are launched with these words, on this core.
pub(super) fn stream_of(
    bed: &Bed,
    ends: &Ends,
    launch: impl Fn(Vec<String>, usize) -> Launch,
) -> Result<Sample> {
    let [sending, receiving] = two_cores();
    let mut receiver = bed.right().spawn(launch(ends.far(), receiving))?;
    receiver.await_text("ready")?;
    let sender = bed.left().spawn(launch(ends.near(), sending))?;
    let sender = finish_sender(sender, &mut receiver)?;
    let receiver = receiver.finish()?.json()?;
    stream_sample(Reports { sender, receiver })
}

/// What a sender reports that ends by itself, or is asked to when the receiver has measured; nothing of one that does not listen then,
/// since it waits for what was lost.
pub(super) fn finish_sender(mut sender: Program, receiver: &mut Program) -> Result<Value> {
    while !sender.has_ended()? {
        if receiver.has_printed() || receiver.has_ended()? {
            let output = sender.stop()?;
            return if output.status.success() {
                output.json()
            } else {
                Ok(Value::Null)
            };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    sender.finish()?.json()
}

/// What the receiver has received counts.
pub(super) fn stream_sample(reports: Reports) -> Result<Sample> {
    Ok(Sample {
        value: ends::gbit_per_s(&reports.receiver)?,
        report: json!({"sender": reports.sender, "receiver": reports.receiver}),
    })
}
