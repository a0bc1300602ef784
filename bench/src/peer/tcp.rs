//! One-way stream of messages over one kernel TCP connection.
//!
//! Blocking calls and `TCP_NODELAY`, the system's default socket buffers. Both sides know the messages' length, so nothing
//! frames them; the receiver counts a message when it has all of it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::net::sockopt;
use serde::Serialize;
use serde_json::Value;

use crate::size::ByteSize;

/// A longer message would only take memory.
const MESSAGE_LEN_MAX: u64 = 1 << 30;
/// A connection on which nothing arrives for so long is given up. Retransmission backs off to seconds on bad links.
const SILENCE: Duration = Duration::from_secs(10);

/// Arguments of `tcp-stream-send`.
#[derive(Debug, Clone, Args)]
pub struct SendArgs {
    /// Receiver
    #[arg(long)]
    pub to: SocketAddr,
    /// Message length
    #[arg(long, default_value = "64K")]
    pub message_size: ByteSize,
    /// Seconds to send
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Congestion control [default: the system's]
    #[arg(long, value_name = "NAME")]
    pub congestion: Option<String>,
}

/// What `tcp-stream-send` prints.
#[derive(Debug, Serialize)]
pub struct SendReport {
    /// Name of the program.
    pub program: &'static str,
    /// Payload handed to the kernel.
    pub bytes: u64,
    /// Messages handed to the kernel.
    pub messages: u64,
    /// By the sender's clock.
    pub seconds: f64,
    /// Congestion control in effect.
    pub congestion: String,
    /// The receiver's report; `{}` when none came.
    pub receiver: Value,
}

/// Arguments of `tcp-stream-recv`.
#[derive(Debug, Clone, Args)]
pub struct ReceiveArgs {
    /// Address and port to listen on
    #[arg(long, default_value = "0.0.0.0:7500")]
    pub bind: SocketAddr,
    /// Message length
    #[arg(long, default_value = "64K")]
    pub message_size: ByteSize,
    /// Seconds after the first message that do not count
    #[arg(long, default_value_t = 0.2)]
    pub warmup: f64,
    /// Seconds that count
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
}

/// What `tcp-stream-recv` prints.
#[derive(Debug, Serialize)]
pub struct ReceiveReport {
    /// Name of the program.
    pub program: &'static str,
    /// Payload of whole messages received.
    pub bytes: u64,
    /// Whole messages received.
    pub messages: u64,
    /// Always 0: TCP repeats what is lost.
    pub lost_messages: u64,
    /// By the receiver's clock.
    pub seconds: f64,
    /// Payload over time.
    pub gbit_per_s: f64,
}

fn message(size: ByteSize) -> io::Result<Vec<u8>> {
    let len = size.bytes();
    if !(1..=MESSAGE_LEN_MAX).contains(&len) {
        return Err(io::Error::other("--message-size must be 1 byte to 1G"));
    }
    Ok(vec![0x5a; len as usize])
}

/// Runs `tcp-stream-send`. It ends early, without error, when the receiver has gone after the first message.
///
/// # Errors
///
/// Socket errors; a congestion control that the kernel does not have.
pub fn send(args: &SendArgs) -> io::Result<SendReport> {
    let message = message(args.message_size)?;
    let mut connection = TcpStream::connect(args.to)?;
    connection.set_nodelay(true)?;
    if let Some(name) = &args.congestion {
        sockopt::set_tcp_congestion(&connection, name)?;
    }
    let congestion = sockopt::tcp_congestion(&connection)?;
    // The report's arrival is what ends a stream early: the receiver has measured.
    let reports = connection.try_clone()?;
    let report = std::thread::spawn(move || await_report(reports));
    let mut messages = 0;
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    while Instant::now() < end && !report.is_finished() {
        match connection.write_all(&message) {
            Ok(()) => messages += 1,
            Err(_) if messages > 0 => break,
            Err(error) => return Err(error),
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    // Tells the receiver that nothing follows; one that has gone has been told already.
    let _ = connection.shutdown(Shutdown::Write);
    Ok(SendReport {
        program: "tcp-stream-send",
        bytes: messages * message.len() as u64,
        messages,
        seconds,
        congestion,
        receiver: report.join().unwrap_or_default(),
    })
}

/// The report that the receiver sends when it has measured.
fn await_report(mut connection: TcpStream) -> Value {
    let mut text = String::new();
    // The connection may end in any way: then there is no report, which the caller sees.
    let _ = connection.read_to_string(&mut text);
    serde_json::from_str(&text).unwrap_or_else(|_| Value::Object(serde_json::Map::new()))
}

/// Runs `tcp-stream-recv`: takes one connection, waits for the first message, then measures.
///
/// # Errors
///
/// Socket errors, and a sender that ends before the measurement does.
pub fn receive(args: &ReceiveArgs, ready: impl FnOnce()) -> io::Result<ReceiveReport> {
    let mut message = message(args.message_size)?;
    let listener = TcpListener::bind(args.bind)?;
    ready();
    let (mut connection, _) = listener.accept()?;
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(SILENCE))?;
    connection.read_exact(&mut message)?;
    let started = Instant::now();
    let mut counts_from: Option<Instant> = None;
    let mut messages = 0_u64;
    loop {
        let now = match read_message(&mut connection, &mut message)? {
            true => Instant::now(),
            false => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the sender stopped before the measurement ended; let it send for longer",
                ));
            }
        };
        messages += 1;
        match counts_from {
            None if (now - started).as_secs_f64() >= args.warmup => {
                counts_from = Some(now);
                messages = 0;
            }
            Some(from) if (now - from).as_secs_f64() >= args.seconds => {
                let seconds = (now - from).as_secs_f64();
                let bytes = messages * message.len() as u64;
                let report = ReceiveReport {
                    program: "tcp-stream-recv",
                    bytes,
                    messages,
                    lost_messages: 0,
                    seconds,
                    gbit_per_s: bytes as f64 * 8.0 / seconds / 1e9,
                };
                tell(connection, &report);
                return Ok(report);
            }
            _ => {}
        }
    }
}

/// Reads one whole message; `false` at the end of the stream.
fn read_message(connection: &mut TcpStream, message: &mut [u8]) -> io::Result<bool> {
    match connection.read_exact(message) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Sends the sender its report, then takes what is still under way: closing with unread data would reset the connection and the
/// report with it.
fn tell(mut connection: TcpStream, report: &ReceiveReport) {
    let Ok(text) = serde_json::to_vec(report) else {
        return;
    };
    let sent = connection
        .write_all(&text)
        .and_then(|()| connection.shutdown(Shutdown::Write));
    let end = Instant::now() + SILENCE;
    let mut rest = vec![0; 1 << 16];
    while sent.is_ok() && Instant::now() < end && connection.read(&mut rest).is_ok_and(|len| len > 0) {}
}
