//! The demonstration on one machine: two namespaces, a veth pair.

use anyhow::Result;
use serde_json::Value;

use super::{Arguments, TRANSFER_LIMIT, exchange, make_content, result, sender};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch};
use crate::bench::compare;
use crate::content::Content;
use crate::machine::{cores, two_cores};
use crate::workspace::Programs;

pub(super) fn run(arguments: &Arguments, programs: &Programs) -> Result<Value> {
    let content = make_content(arguments.size)?;
    if cores() < 2 {
        println!(
            "note       this machine has one core: sender and receiver share it, and the figures suffer"
        );
    }
    let transfer = transfer(programs, &content)?;
    let file = content.folder.join("compared.json");
    print!("{}", compare::for_show(programs, arguments.rounds, &file)?);
    println!("\nMore comparisons: cargo xtask bench compare.");
    result(&content, "two hosts on a veth pair", transfer, &file)
}

/// Sends the file once and checks it.
fn transfer(programs: &Programs, content: &Content) -> Result<Value> {
    let [sending, receiving] = two_cores();
    let bed = Bed::new(&BedConfig::default())?;
    let [from, to] = [bed.left(), bed.right()].map(|host| host.address().to_string());
    println!(
        "hosts      {from} (core {sending}) and {to} (core {receiving}), veth pair {INTERFACE}, MTU 1500, 2 queues"
    );
    let received = content.received();
    let receiver = Launch::new(programs.path("lm-recv"))
        .args(["--interface", INTERFACE, "--count", "1", "--json", "--output"])
        .arg(&received)
        .args(["--allow", &from])
        .core(receiving)
        .time_limit(TRANSFER_LIMIT);
    let sender = sender(content, programs, INTERFACE, &to);
    exchange(
        content,
        (receiver, |launch| bed.right().spawn(launch)),
        (sender, |launch| bed.left().spawn(launch)),
    )
}
