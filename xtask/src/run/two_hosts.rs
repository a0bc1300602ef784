//! The demonstration on one machine: two namespaces, a veth pair.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Arguments, Content, TRANSFER_LIMIT, result, send_options, tool_options, transfer_line};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch};
use crate::bench::compare;
use crate::machine::{cores, two_cores};
use crate::workspace::Programs;

/// The control port of `lm-recv`: bound means that it listens.
const CONTROL_PORT: u16 = 7169;

pub(super) fn run(arguments: &Arguments, programs: &Programs) -> Result<Value> {
    let content = Content::make(arguments)?;
    if cores() < 2 {
        println!(
            "note       this machine has one core: sender and receiver share it, and the figures suffer"
        );
    }
    let transfer = transfer(arguments, programs, &content)?;
    let file = content.folder.join("compared.json");
    print!("{}", compare::for_show(programs, arguments.rounds, &file)?);
    println!("\nMore comparisons: cargo xtask bench compare.");
    let compared = std::fs::read_to_string(&file).context("lm-bench kept nothing")?;
    Ok(result(
        "two hosts on a veth pair",
        &content,
        transfer,
        vec![serde_json::from_str(&compared).context("what lm-bench kept is no JSON")?],
    ))
}

/// Sends the file once and checks it.
fn transfer(arguments: &Arguments, programs: &Programs, content: &Content) -> Result<Value> {
    let [sending, receiving] = two_cores();
    let bed = Bed::new(&BedConfig::default())?;
    let (left, right) = (bed.left(), bed.right());
    println!(
        "hosts      {} (core {sending}) and {} (core {receiving}), veth pair {INTERFACE}, MTU 1500, 2 queues",
        left.address(),
        right.address()
    );
    let received = content.folder.join("received");
    let receiver = Launch::new(programs.path("lm-recv"))
        .args(["--interface", INTERFACE, "--count", "1", "--json", "--output"])
        .arg(&received)
        .args(["--allow", &left.address().to_string()])
        .args(tool_options(arguments))
        .core(receiving)
        .time_limit(TRANSFER_LIMIT);
    let sender = Launch::new(programs.path("lm-send"))
        .args([
            "--interface",
            INTERFACE,
            "--json",
            "--to",
            &right.address().to_string(),
        ])
        .args(send_options(arguments))
        .arg(&content.path)
        .core(sending)
        .time_limit(TRANSFER_LIMIT);
    println!("receiver   {}", receiver.command_line());
    println!("sender     {}", sender.command_line());
    let mut receiver = right.spawn(receiver)?;
    receiver.await_udp_port(CONTROL_PORT)?;
    let sent = left.spawn(sender)?.finish()?.json().context("lm-send --json")?;
    let report = receiver.finish()?.json().context("lm-recv --json")?;
    let sha256 = content.compare(&received)?;
    println!("transfer   {}", transfer_line(&report));
    println!("checked    SHA-256 of what arrived is that of what was sent");
    Ok(json!({"send": sent, "receive": report, "sha256_received": sha256}))
}
