//! The demonstration between two real machines. This one sends; the user starts the receivers on the other, told
//! by name at each step. Nothing is configured on either machine.

use std::io::{BufRead as _, IsTerminal as _};
use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Arguments, make_content, result, sender, show_transfer};
use crate::bed::Launch;
use crate::machine::two_cores;
use crate::workspace::Programs;

const DATA_PORT: u16 = 7168;
/// Whom `lm-bench compare` compares here.
const SYSTEMS: &str = "lm,udp-blocking,udp-spinning";
/// Its rounds take some ten seconds each; cards that begin anew take more.
const COMPARE_LIMIT: Duration = Duration::from_secs(3600);

pub(super) fn run(arguments: &Arguments, interface: &str, peer: &str, programs: &Programs) -> Result<Value> {
    let ours = address_towards(peer)?;
    let content = make_content(arguments.size)?;
    println!(
        "The other machine needs lm-recv and lm-bench: `cargo xtask dist` makes a tarball that runs without Rust.\n\
         IF stands for its interface towards this machine."
    );
    ask(&[
        &format!("lm-recv --interface IF --allow {ours} --count 1 --output received --force"),
        "sha256sum received",
    ])?;
    let send = sender(&content, programs, interface, peer);
    let sent = send.spawn()?.finish()?.json().context("lm-send --json")?;
    show_transfer(&sent);
    println!("to check   sha256sum over there must say {}", content.sha256);

    ask(&[&format!("lm-bench serve --bind 0.0.0.0:7170 --allow {ours}")])?;
    let kept = content.folder.join("compare.json");
    let (core, rounds) = (two_cores()[0].to_string(), arguments.rounds.to_string());
    let compare = Launch::new(programs.path("lm-bench"))
        .args(["compare", peer, "--systems", SYSTEMS])
        .args(["--core", &core, "--rounds", &rounds, "--json"])
        .arg(&kept)
        .time_limit(COMPARE_LIMIT);
    print!("{}", compare.aloud().spawn()?.finish()?.stdout);
    result(&content, "two machines", json!({"send": sent}), &kept)
}

/// This machine's address as the peer sees it, which is what the kernel sends from.
fn address_towards(peer: &str) -> Result<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").context("cannot open a UDP socket")?;
    // Sends nothing.
    let connected = socket.connect((peer, DATA_PORT));
    connected.with_context(|| format!("no route to {peer}; give a host that has an IPv4 address"))?;
    Ok(socket.local_addr().context("a socket without an address")?.ip())
}

/// Says what to start on the other machine and waits for Enter. Without a terminal it goes on at once.
fn ask(commands: &[&str]) -> Result<()> {
    println!("\nStart on the other machine (Ctrl-C there whatever still runs):");
    for command in commands {
        println!("    {command}");
    }
    if std::io::stdin().is_terminal() {
        println!("then press Enter here.");
        std::io::stdin()
            .lock()
            .read_line(&mut String::new())
            .context("cannot read from the terminal")?;
    }
    Ok(())
}
