//! `cargo xtask run`: the demonstration. A file crosses a real link through LM and is checked; then LM and kernel
//! UDP are shown beside each other.

pub(crate) mod cluster;
mod dpdk;
mod two_hosts;
mod two_machines;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use lm_measure::size::{self, ByteSize};
use serde_json::{Value, json};

use crate::bed::leftovers::watch_signals;
use crate::bed::{Launch, Program};
use crate::content::Content;
use crate::machine::{self, ResultFile, two_cores};
use crate::workspace;

/// Send a file through LM, check it, and show LM and kernel UDP beside each other.
///
/// Without --interface: makes two hosts on this machine (network namespaces joined by a veth pair with two queues
/// each), starts lm-recv on one and lm-send on the other, each on a core of its own, compares SHA-256 of what was
/// sent and received, then measures LM and kernel UDP in turns and prints the medians.
///
/// With --interface and --peer: the same to another machine; says what to start there at each step.
///
/// With --hosts N: makes a cluster of N hosts on one switch with an admission daemon each, on which a program of every
/// host sends to every other one at once, without privileges; compares every byte of every message, and prints a table.
///
/// With --backend dpdk: two programs on the two ends of a socket, by DPDK and without privileges; sends the file and
/// compares it.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Length of the file.
    #[arg(long, default_value = "256M")]
    size: ByteSize,
    /// How often each figure of the table is measured.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Between two real machines: this machine's interface.
    #[arg(long, value_name = "IF", requires = "peer")]
    interface: Option<String>,
    /// Between two real machines: the other machine's name or address.
    #[arg(long, value_name = "HOST", requires = "interface")]
    peer: Option<String>,
    /// All to all on so many hosts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=64))]
    #[arg(conflicts_with_all = ["interface", "peer", "size", "rounds"])]
    hosts: Option<u32>,
    /// By what packets move, instead of AF_XDP.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["interface", "peer", "hosts", "rounds"])]
    backend: Option<Backend>,
    /// Also keep the results, with every single sample, in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// `--backend`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Backend {
    /// DPDK, on drivers that need no card.
    Dpdk,
}

/// No transfer of this demonstration takes longer on a link that works.
const TRANSFER_LIMIT: Duration = Duration::from_secs(120);

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    match (arguments.backend, &arguments.interface) {
        (Some(Backend::Dpdk), _) => workspace::ensure_dpdk()?,
        (None, Some(_)) => crate::bed::require_root("open AF_XDP sockets")?,
        (None, None) => crate::bed::require_root("make network namespaces")?,
    }
    watch_signals()?;
    let result_file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let features = arguments
        .backend
        .map_or(&[][..], |Backend::Dpdk| &workspace::WITH_DPDK);
    let programs = || workspace::Programs::build_with(&["lm-bench", "lm-recv", "lm-send"], features);
    let mut result = match (arguments.hosts, &arguments.interface, &arguments.peer) {
        _ if arguments.backend.is_some() => dpdk::run(arguments, &programs()?)?,
        (Some(hosts), ..) => cluster::run(hosts)?,
        (None, Some(interface), Some(peer)) => two_machines::run(arguments, interface, peer, &programs()?)?,
        _ => two_hosts::run(arguments, &programs()?)?,
    };
    result["suite"] = "run".into();
    result["machine"] = machine::describe();
    result_file.map_or(Ok(()), |file| file.write(&result))
}

/// The file to send.
fn make_content(size: ByteSize) -> Result<Content> {
    let content = Content::new(&workspace::target_dir()?, size.bytes())?;
    println!(
        "file       {}, random bytes, SHA-256 {}…",
        size::exact(content.len),
        &content.sha256[..16]
    );
    Ok(content)
}

/// `lm-send` with it, on the first of two cores.
fn sender(content: &Content, programs: &workspace::Programs, interface: &str, to: &str) -> Launch {
    Launch::new(programs.path("lm-send"))
        .args(["--interface", interface, "--json", "--to", to])
        .arg(&content.file)
        .core(two_cores()[0])
        .time_limit(TRANSFER_LIMIT)
}

/// The whole of a result file, with the file in which `lm-bench compare` kept its own.
fn result(content: &Content, kind: &str, transfer: Value, compared: &Path) -> Result<Value> {
    let compared = std::fs::read_to_string(compared).context("cannot read what lm-bench compare kept")?;
    let compared: Value = serde_json::from_str(&compared).context("what lm-bench kept is no JSON")?;
    Ok(json!({
        "kind": kind,
        "file": {"bytes": content.len, "sha256": content.sha256},
        "transfer": transfer,
        "comparisons": [compared],
    }))
}

/// Starts the receiver, then the sender, each where its function does; checks what arrived. What both reported.
fn exchange(
    content: &Content,
    (receiver, start_receiver): (Launch, impl FnOnce(Launch) -> Result<Program>),
    (sender, start_sender): (Launch, impl FnOnce(Launch) -> Result<Program>),
) -> Result<Value> {
    println!("receiver   {}", receiver.command_line());
    println!("sender     {}", sender.command_line());
    let mut receiver = start_receiver(receiver)?;
    receiver.await_text("listening on")?;
    let sent = start_sender(sender)?.finish()?.json().context("lm-send --json")?;
    let report = receiver.finish()?.json().context("lm-recv --json")?;
    content.ensure_same(&content.received())?;
    show_transfer(&report);
    println!("checked    SHA-256 of what arrived is that of what was sent");
    Ok(json!({"send": sent, "receive": report, "sha256_received": content.sha256}))
}

/// Says of a tool's report how much, how fast, in which mode, what user space copied.
fn show_transfer(report: &Value) {
    let number = |name: &str| report[name].as_f64().unwrap_or(f64::NAN);
    println!(
        "transfer   {} messages in {:.3} s, {:.2} Gbit/s with reading and writing the file, mode {}, {} bytes copied \
            by user space",
        report["messages"],
        number("seconds"),
        number("gbit_per_s"),
        report["mode"].as_str().unwrap_or("unknown"),
        report["user_copied_bytes"],
    );
}
