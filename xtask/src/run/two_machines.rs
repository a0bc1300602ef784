//! The demonstration between two real machines. This one sends; the user starts the receivers on the other, told
//! by name at each step. Nothing is configured on either machine.

use std::io::{BufRead as _, IsTerminal as _};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, ToSocketAddrs as _, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Arguments, Content, TRANSFER_LIMIT, number, result, send_options, tool_options, transfer_line};
use crate::bed::Launch;
use crate::machine::two_cores;
use crate::stats::Summary;
use crate::table::Table;
use crate::workspace::Programs;

/// The largest UDP datagram over IPv4: 65,535 − 20 − 8.
const UDP_MESSAGE_LEN: u32 = 65_507;
const DATA_PORT: u16 = 7168;
const SECONDS: f64 = 1.0;
const ROUND_TRIPS: u32 = 10_000;

pub(super) fn run(arguments: &Arguments, interface: &str, peer: &str, programs: &Programs) -> Result<Value> {
    let to = resolve(peer)?;
    let ours = address_towards(to)?;
    let to = to.to_string();
    let content = Content::make(arguments)?;
    let rounds = arguments.rounds;
    println!(
        "The other machine needs lm-recv and lm-bench: `cargo xtask dist` makes a tarball that runs without Rust.\n\
         IF stands for its interface towards this machine."
    );
    let mode: String = tool_options(arguments)
        .iter()
        .map(|word| format!(" {word}"))
        .collect();
    let on_link = |program: &str, verb: &str| {
        let launch = Launch::new(programs.path(program))
            .core(two_cores()[0])
            .time_limit(TRANSFER_LIMIT);
        if verb.is_empty() { launch } else { launch.arg(verb) }
    };
    let repeat = |launch: &dyn Fn() -> Launch| -> Result<Vec<Value>> {
        (0..rounds).map(|_| launch().spawn()?.finish()?.json()).collect()
    };

    ask(&[
        format!("lm-recv --interface IF{mode} --allow {ours} --count 1 --output received.tar --force"),
        "sha256sum received.tar".to_owned(),
    ])?;
    let send = || {
        on_link("lm-send", "")
            .args(["--interface", interface, "--json", "--to", peer])
            .args(send_options(arguments))
            .arg(&content.path)
    };
    let first = send().spawn()?.finish()?.json().context("lm-send --json")?;
    println!("transfer   {}", transfer_line(&first));
    println!("to check   sha256sum over there must say {}", content.sha256);

    ask(&[format!(
        "lm-recv --interface IF{mode} --allow {ours} --count {rounds} --output /dev/null"
    )])?;
    let lm_streams = repeat(&send)?;

    ask(&[format!(
        "for i in $(seq {rounds}); do lm-bench udp-recv --bind 0.0.0.0:7168 --seconds {SECONDS}; done"
    )])?;
    let udp_streams = repeat(&|| {
        // A moment for the next receiver of the loop over there to start.
        std::thread::sleep(Duration::from_millis(500));
        on_link("lm-bench", "udp-send")
            .args(["--to", &to, "--message-size", &UDP_MESSAGE_LEN.to_string()])
            .args(["--seconds", &(SECONDS + 1.0).to_string()])
    })?;

    ask(&[format!(
        "lm-bench lm-pong --bind 0.0.0.0:7168 --interface IF{mode}"
    )])?;
    let ping = |verb: &str| {
        on_link("lm-bench", verb).args([
            "--to",
            &to,
            "--message-size",
            "64",
            "--count",
            &ROUND_TRIPS.to_string(),
        ])
    };
    let lm_pings = repeat(&|| {
        ping("lm-ping")
            .args(["--interface", interface])
            .args(tool_options(arguments))
    })?;
    ask(&["lm-bench udp-pong --bind 0.0.0.0:7168".to_owned()])?;
    let udp_pings = repeat(&|| ping("udp-ping"))?;

    let rows = [
        (
            "throughput, Gbit/s",
            "LM, a file",
            values(&lm_streams, &["gbit_per_s"], "lm-send")?,
        ),
        (
            "",
            "kernel UDP",
            values(&udp_streams, &["receiver", "gbit_per_s"], "udp-send")?,
        ),
        (
            "round trip, 64 B, p50, µs",
            "LM",
            values(&lm_pings, &["rtt_us", "p50"], "lm-ping")?,
        ),
        (
            "",
            "kernel UDP",
            values(&udp_pings, &["rtt_us", "p50"], "udp-ping")?,
        ),
    ];
    let mut table = Table::new(&["", "", "median", "spread"]);
    for (quantity, name, summary) in &rows {
        let spread = format!("±{:.0} %", summary.spread() * 100.0);
        table.row([*quantity, *name, &format!("{:.2}", summary.median), &spread]);
    }
    let mode = first["mode"].as_str().unwrap_or("unknown").to_owned();
    println!(
        "\nMedians of {rounds} measurements, one contender after the other; LM in mode {mode}.\n\n{table}\n\
         LM's throughput includes reading the file here."
    );
    let comparisons = rows.iter().map(|(quantity, name, summary)| {
        let mut entry = summary.to_json();
        entry["quantity"] = json!(quantity);
        entry["name"] = json!(name);
        entry
    });
    Ok(result(
        "two machines",
        &content,
        json!({"send": first}),
        comparisons.collect(),
    ))
}

/// The peer's IPv4 address and data port.
fn resolve(peer: &str) -> Result<SocketAddrV4> {
    let found = (peer, DATA_PORT)
        .to_socket_addrs()
        .with_context(|| format!("cannot find the host {peer}"))?;
    let ipv4 = found.into_iter().find_map(|address| match address {
        SocketAddr::V4(address) => Some(address),
        SocketAddr::V6(_) => None,
    });
    ipv4.with_context(|| format!("{peer} has no IPv4 address; give one"))
}

/// This machine's address as the peer sees it, which is what the kernel sends from.
fn address_towards(to: SocketAddrV4) -> Result<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").context("cannot open a UDP socket")?;
    // Sends nothing.
    socket.connect(to).with_context(|| format!("no route to {to}"))?;
    Ok(socket.local_addr().context("a socket without an address")?.ip())
}

/// Says what to start on the other machine and waits for Enter. Without a terminal it goes on at once.
fn ask(commands: &[String]) -> Result<()> {
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

fn values(reports: &[Value], path: &[&str], program: &str) -> Result<Summary> {
    let values = reports
        .iter()
        .map(|report| number(report, path, program))
        .collect::<Result<Vec<f64>>>()?;
    Summary::of(&values).with_context(|| format!("{program} was not measured"))
}
