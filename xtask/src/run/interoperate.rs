//! `--wire ipfrag`: LM on one side only. Its packets are plain IP fragments in reverse order, which any host puts
//! together again; the receiver here is an ordinary UDP socket in a process of its own, with no LM near it.

use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde_json::{Value, json};

use super::{Arguments, Content, TRANSFER_LIMIT, result, send_options};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch};
use crate::machine::two_cores;
use crate::workspace::Programs;

const PORT: u16 = 7168;
/// How long the receiver waits for the next datagram before it takes the last one to have been the last.
const IDLE_LIMIT: Duration = Duration::from_secs(2);
/// How long it waits for the first.
const FIRST_LIMIT: Duration = Duration::from_secs(20);

pub(super) fn run(arguments: &Arguments, programs: &Programs) -> Result<Value> {
    let content = Content::make(arguments)?;
    let [sending, receiving] = two_cores();
    let bed = Bed::new(&BedConfig::default())?;
    let to = SocketAddr::from((bed.right().address(), PORT)).to_string();
    let received = content.folder.join("received");
    let receiver = Launch::new(std::env::current_exe().context("cannot find this program")?)
        .args([
            "udp-receive",
            "--bind",
            &to,
            "--bytes",
            &content.len.to_string(),
            "--output",
        ])
        .arg(&received)
        .core(receiving)
        .time_limit(TRANSFER_LIMIT);
    let sender = Launch::new(programs.path("lm-send"))
        .args([
            "--interface",
            INTERFACE,
            "--wire",
            "ipfrag",
            "--json",
            "--to",
            &to,
        ])
        .args(send_options(arguments))
        .arg(&content.path)
        .core(sending)
        .time_limit(TRANSFER_LIMIT);
    println!("receiver   an ordinary UDP socket bound to {to}: recv() and nothing else");
    println!("sender     {}", sender.command_line());
    let mut receiver = bed.right().spawn(receiver)?;
    receiver.await_udp_port(PORT)?;
    let sent = bed
        .left()
        .spawn(sender)?
        .finish()?
        .json()
        .context("lm-send --json")?;
    ensure!(
        !bed.right().has_xdp_program()?,
        "an XDP program is attached where only a UDP socket should be"
    );
    let report = receiver.finish()?.json()?;
    if report["bytes"] != json!(content.len) {
        bail!(
            "{} of {} bytes arrived: UDP has no flow control, and the receiving socket overflowed; try a smaller --size",
            report["bytes"],
            content.len
        );
    }
    let sha256 = content.compare(&received)?;
    println!(
        "transfer   {} datagrams, sent by LM as IP fragments, put together by the kernel",
        report["datagrams"]
    );
    println!("checked    SHA-256 of what the UDP socket received is that of what LM sent");
    let transfer = json!({"send": sent, "receive": report, "sha256_received": sha256});
    Ok(result(
        "LM to an ordinary UDP socket",
        &content,
        transfer,
        Vec::new(),
    ))
}

/// An ordinary UDP receiver (used by `run --wire ipfrag`).
#[derive(Debug, clap::Args)]
pub struct UdpReceiveArguments {
    /// Address and port to receive on.
    #[arg(long)]
    bind: SocketAddr,
    /// File for what arrives, datagram after datagram.
    #[arg(long)]
    output: PathBuf,
    /// Stop after so many bytes.
    #[arg(long)]
    bytes: usize,
}

/// A socket with room before it has its port, since whoever waits for that may send at once.
fn bind(arguments: &UdpReceiveArguments) -> std::io::Result<UdpSocket> {
    let family = match arguments.bind {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // The sender knows nothing of us and does not wait: room for everything it may send meanwhile. The kernel
    // counts its own structures too, about as much again; where it refuses, the default has to do.
    let room = arguments.bytes.saturating_mul(2).clamp(1 << 20, 512 << 20);
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, room);
    rustix::net::bind(&socket, &arguments.bind)?;
    Ok(socket.into())
}

/// Receives datagrams until all bytes have come or none comes any more; prints `{"bytes", "datagrams"}`.
pub fn udp_receive(arguments: &UdpReceiveArguments) -> Result<()> {
    let socket = bind(arguments).with_context(|| format!("cannot bind {}", arguments.bind))?;
    let mut bytes = Vec::with_capacity(arguments.bytes);
    let mut datagram = vec![0; 1 << 16];
    let mut datagrams = 0_u64;
    let first_limit = Instant::now() + FIRST_LIMIT;
    while bytes.len() < arguments.bytes {
        let limit = if datagrams == 0 {
            first_limit.saturating_duration_since(Instant::now())
        } else {
            IDLE_LIMIT
        };
        if limit.is_zero() {
            break;
        }
        socket
            .set_read_timeout(Some(limit))
            .context("cannot set a time limit")?;
        match socket.recv(&mut datagram) {
            Ok(len) => {
                bytes.extend_from_slice(&datagram[..len]);
                datagrams += 1;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
    std::fs::write(&arguments.output, &bytes)
        .with_context(|| format!("cannot write {}", arguments.output.display()))?;
    println!("{}", json!({"bytes": bytes.len(), "datagrams": datagrams}));
    Ok(())
}
