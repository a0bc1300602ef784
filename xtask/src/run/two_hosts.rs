//! The demonstration on one machine: two namespaces, a veth pair.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Arguments, TRANSFER_LIMIT, make_content, result, sender, show_transfer};
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
    println!("receiver   {}", receiver.command_line());
    println!("sender     {}", sender.command_line());
    let receiver = bed.right().spawn_until(receiver, "listening on")?;
    let sent = bed
        .left()
        .spawn(sender)?
        .finish()?
        .json()
        .context("lm-send --json")?;
    let report = receiver.finish()?.json().context("lm-recv --json")?;
    content.ensure_same(&received)?;
    show_transfer(&report);
    println!("checked    SHA-256 of what arrived is that of what was sent");
    Ok(json!({"send": sent, "receive": report, "sha256_received": content.sha256}))
}
