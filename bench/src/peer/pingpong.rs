//! One datagram to and fro over kernel UDP sockets.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use clap::Args;

use super::latency::{RoundTripReport, RoundTrips};
use super::watch::Progress;
use crate::size::ByteSize;

/// Arguments of `udp-ping`.
#[derive(Debug, Clone, Args)]
pub struct PingArgs {
    /// The answering side
    #[arg(long)]
    pub to: SocketAddr,
    /// Length of the datagram
    #[arg(long, default_value = "64")]
    pub message_size: ByteSize,
    /// Round trips that count (a tenth of it again goes before as a warm-up)
    #[arg(long, default_value_t = 20_000)]
    pub count: u64,
    /// Round trips a second at most, which finds colder caches [default: one after the other]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: Option<u32>,
    /// Spin on a non-blocking socket instead of sleeping in recv
    #[arg(long)]
    pub spin: bool,
    /// Print all round trips, as a histogram, so that several runs can be put together
    #[arg(long)]
    pub histogram: bool,
}

/// How long before a round trip that waits for its time the program is awake.
const SPIN_BEFORE: Duration = Duration::from_millis(1);

/// Arguments of `udp-pong`.
#[derive(Debug, Clone, Args)]
pub struct PongArgs {
    /// Address and port to answer on
    #[arg(long, default_value = "0.0.0.0:7400")]
    pub bind: SocketAddr,
    /// Spin on a non-blocking socket instead of sleeping in recv
    #[arg(long)]
    pub spin: bool,
}

/// Runs `udp-ping`.
///
/// # Errors
///
/// Socket errors. A datagram that is lost ends the process.
pub fn ping(args: &PingArgs) -> io::Result<RoundTripReport> {
    if !(8..=65_507).contains(&args.message_size.bytes()) {
        return Err(io::Error::other("--message-size must be 8 to 65507 bytes"));
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(args.to)?;
    socket.set_nonblocking(args.spin)?;
    let mut payload = vec![0x5a_u8; args.message_size.bytes() as usize];
    let mut answer = vec![0_u8; 65_536];
    let mut round_trips = RoundTrips::new();
    let warm_up = args.count / 10;
    let progress = Progress::watch("an answer is missing");
    let started = Instant::now();
    for number in 0..args.count + warm_up {
        if let Some(rate) = args.rate {
            sleep_until(started + Duration::from_secs_f64(number as f64 / f64::from(rate)));
        }
        payload[..8].copy_from_slice(&number.to_be_bytes());
        let sent = Instant::now();
        socket.send(&payload)?;
        let len = loop {
            match socket.recv(&mut answer) {
                Ok(len) => break len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        };
        let elapsed = sent.elapsed();
        progress.set(number + 1);
        if answer[..len] != payload[..] {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an answer to another datagram",
            ));
        }
        if number >= warm_up {
            round_trips.record(elapsed);
        }
    }
    let mut report = round_trips.report("udp-ping");
    if args.histogram {
        report.rtt_counts = round_trips.counts().collect();
    }
    Ok(report)
}

/// Awake for the last moment, as whoever spins for its answer is.
fn sleep_until(due: Instant) {
    while let Some(left) = due.checked_duration_since(Instant::now()) {
        match left.checked_sub(SPIN_BEFORE) {
            Some(left) => std::thread::sleep(left),
            None => std::hint::spin_loop(),
        }
    }
}

/// Runs `udp-pong` until the process is ended.
///
/// # Errors
///
/// Socket errors.
pub fn pong(args: &PongArgs, ready: impl FnOnce()) -> io::Result<()> {
    let socket = UdpSocket::bind(args.bind)?;
    socket.set_nonblocking(args.spin)?;
    ready();
    let mut payload = vec![0_u8; 65_536];
    loop {
        match socket.recv_from(&mut payload) {
            Ok((len, from)) => drop(socket.send_to(&payload[..len], from)?),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
}
