//! One-way UDP stream of messages.
//!
//! A message longer than a datagram can be (65,507 bytes of payload over IPv4, RFC 768 and RFC 791) has to be split by
//! the program. 64 KiB is 29 bytes too long: a program free to choose sends 65,507 bytes instead, and so does this one,
//! since a second datagram of 29 bytes would make UDP look worse than it is. Anything longer is a train of as few and as
//! equal datagrams as possible (1 MiB: 17 of at most 61,681 bytes). Bytes are counted, not messages, so the rates compare.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::watch::Progress;
use crate::size::ByteSize;

/// Longest UDP payload over IPv4.
const MAX_DATAGRAM: u64 = 65_507;
/// Each datagram begins with a 64-bit sequence number.
const SEQUENCE_LEN: usize = 8;

/// Arguments of `udp-send`.
#[derive(Debug, Clone, Args)]
pub struct SendArgs {
    /// Receiver
    #[arg(long)]
    pub to: SocketAddr,
    /// Message length (64K goes as one datagram of 65507 bytes)
    #[arg(long, default_value = "64K")]
    pub message_size: ByteSize,
    /// Seconds to send
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
}

/// What `udp-send` prints.
#[derive(Debug, Serialize)]
pub struct SendReport {
    /// Name of the program.
    pub program: &'static str,
    /// Payload sent.
    pub bytes: u64,
    /// Datagrams sent.
    pub packets: u64,
    /// By the sender's clock.
    pub seconds: f64,
    /// The receiver's report; `{}` when none came.
    pub receiver: Value,
}

/// Arguments of `udp-recv`.
#[derive(Debug, Clone, Args)]
pub struct ReceiveArgs {
    /// Address and port to receive on
    #[arg(long, default_value = "0.0.0.0:7400")]
    pub bind: SocketAddr,
    /// Seconds after the first datagram that do not count
    #[arg(long, default_value_t = 0.2)]
    pub warmup: f64,
    /// Seconds that count
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Spin on a non-blocking socket instead of sleeping in recv
    #[arg(long)]
    pub spin: bool,
}

/// What `udp-recv` prints.
#[derive(Debug, Serialize)]
pub struct ReceiveReport {
    /// Name of the program.
    pub program: &'static str,
    /// Payload received.
    pub bytes: u64,
    /// Datagrams received.
    pub packets: u64,
    /// Sequence numbers that did not come.
    pub lost_packets: u64,
    /// By the receiver's clock.
    pub seconds: f64,
    /// Payload over time.
    pub gbit_per_s: f64,
}

/// Lengths of the datagrams that carry a message.
pub(crate) fn train(message_len: u64) -> Vec<usize> {
    if message_len <= 65_536 {
        return vec![message_len.min(MAX_DATAGRAM) as usize];
    }
    let count = message_len.div_ceil(MAX_DATAGRAM);
    let (each, longer) = (message_len / count, message_len % count);
    (0..count)
        .map(|n| (each + u64::from(n < longer)) as usize)
        .collect()
}

/// Runs `udp-send`. It ends early, without error, when the receiver has gone.
///
/// # Errors
///
/// Socket errors.
pub fn send(args: &SendArgs) -> io::Result<SendReport> {
    if args.message_size.bytes() < SEQUENCE_LEN as u64 {
        return Err(io::Error::other(format!(
            "--message-size must be {SEQUENCE_LEN} bytes at least"
        )));
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(args.to)?;
    let train = train(args.message_size.bytes());
    let mut payload = vec![0x5a_u8; train[0]];
    let (mut bytes, mut packets) = (0_u64, 0_u64);
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    'sending: while Instant::now() < end {
        for &len in &train {
            payload[..SEQUENCE_LEN].copy_from_slice(&packets.to_be_bytes());
            match socket.send(&payload[..len]) {
                Ok(sent) => bytes += sent as u64,
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && packets > 0 => {
                    break 'sending;
                }
                Err(error) => return Err(error),
            }
            packets += 1;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(SendReport {
        program: "udp-send",
        bytes,
        packets,
        seconds,
        receiver: await_report(&socket)?,
    })
}

/// The report that the receiver sends when it has measured.
fn await_report(socket: &UdpSocket) -> io::Result<Value> {
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = vec![0; 65_536];
    // The receiver may have gone already: its refusals come before what it sent.
    for _ in 0..64 {
        match socket.recv(&mut text) {
            Ok(len) => return Ok(serde_json::from_slice(&text[..len])?),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(_) => break,
        }
    }
    Ok(Value::Object(serde_json::Map::new()))
}

/// Runs `udp-recv`: waits for the first datagram, then measures.
///
/// # Errors
///
/// Socket errors.
pub fn receive(args: &ReceiveArgs, ready: impl FnOnce()) -> io::Result<ReceiveReport> {
    let socket = UdpSocket::bind(args.bind)?;
    socket.set_nonblocking(args.spin)?;
    let progress = Progress::watch("the sender stopped before the measurement ended");
    ready();
    let mut payload = vec![0_u8; 65_536];
    let (mut bytes, mut packets) = (0_u64, 0_u64);
    let mut started: Option<Instant> = None;
    let mut counts_from: Option<(Instant, u64)> = None;
    loop {
        let len = match socket.recv(&mut payload) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::hint::spin_loop();
                continue;
            }
            Err(error) => return Err(error),
        };
        let Some(sequence) = payload[..len].first_chunk::<SEQUENCE_LEN>() else {
            continue;
        };
        let next = u64::from_be_bytes(*sequence) + 1;
        bytes += len as u64;
        packets += 1;
        progress.set(next);
        let now = Instant::now();
        let started = *started.get_or_insert(now);
        match counts_from {
            None if (now - started).as_secs_f64() >= args.warmup => {
                counts_from = Some((now, next));
                (bytes, packets) = (0, 0);
            }
            Some((from, first)) if (now - from).as_secs_f64() >= args.seconds => {
                let seconds = (now - from).as_secs_f64();
                let report = ReceiveReport {
                    program: "udp-recv",
                    bytes,
                    packets,
                    lost_packets: (next - first).saturating_sub(packets),
                    seconds,
                    gbit_per_s: bytes as f64 * 8.0 / seconds / 1e9,
                };
                tell(&socket, &report)?;
                return Ok(report);
            }
            _ => {}
        }
    }
}

/// Sends the report to whoever the next datagram comes from.
fn tell(socket: &UdpSocket, report: &ReceiveReport) -> io::Result<()> {
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    if let Ok((_, sender)) = socket.recv_from(&mut [0; 8]) {
        socket.send_to(&serde_json::to_vec(report)?, sender)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_datagram_or_a_train_of_equal_ones() {
        assert_eq!(train(1024), [1024]);
        assert_eq!(train(65_507), [65_507]);
        assert_eq!(train(65_536), [65_507]);
        let mebibyte = train(1 << 20);
        assert_eq!(mebibyte.len(), 17);
        assert_eq!(mebibyte.iter().sum::<usize>(), 1 << 20);
        assert_eq!(mebibyte[0], 61_681);
        assert!(mebibyte.iter().all(|&len| len.abs_diff(mebibyte[0]) <= 1));
    }
}
