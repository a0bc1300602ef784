//! One packet to and fro between two bare sockets: the least round trip that AF_XDP gives on a bed.

use std::io;
use std::time::{Duration, Instant};

use clap::Args;

use super::frame::{HEADER_LEN, SEQUENCE_LEN, turn_around};
use super::socket::{CHUNK_LEN, CHUNKS_EACH_WAY};
use super::{Port, PortArgs, ToArgs};
use crate::peer::latency::{RoundTripReport, RoundTrips};

/// Arguments of `bare-ping`.
#[derive(Debug, Clone, Args)]
pub struct PingArgs {
    /// Switches of the port
    #[command(flatten)]
    pub port: PortArgs,
    /// The answering side
    #[command(flatten)]
    pub to: ToArgs,
    /// UDP payload of the packet in bytes
    #[arg(long, default_value_t = 64)]
    pub payload: usize,
    /// Round trips that count (a tenth of it again goes before as a warm-up)
    #[arg(long, default_value_t = 20_000)]
    pub count: u64,
}

/// Arguments of `bare-pong`.
#[derive(Debug, Clone, Args)]
pub struct PongArgs {
    /// Switches of the port
    #[command(flatten)]
    pub port: PortArgs,
}

/// The one chunk that is ever sent.
const CHUNK: u64 = CHUNKS_EACH_WAY as u64 * CHUNK_LEN;

impl Port {
    /// Sends the first `len` bytes of the send chunk.
    fn send_chunk(&mut self, len: usize) -> io::Result<()> {
        let done = self.socket.completion.waiting(u32::MAX);
        self.socket.completion.release(done);
        self.socket.tx.write(
            0,
            libc::xdp_desc {
                addr: CHUNK,
                len: len as u32,
                options: 0,
            },
        );
        self.socket.tx.submit(1);
        self.socket.wake_tx()
    }

    /// The next received packet, if one waits. The chunk must go back with `give_back`.
    fn next_packet(&mut self) -> Option<libc::xdp_desc> {
        (self.socket.rx.waiting(1) > 0).then(|| self.socket.rx.read(0))
    }

    fn give_back(&mut self, descriptor: &libc::xdp_desc) {
        self.socket.fill.write(0, descriptor.addr & !(CHUNK_LEN - 1));
        self.socket.rx.release(1);
        self.socket.fill.submit(1);
    }
}

/// Runs `bare-ping`.
///
/// # Errors
///
/// Set-up errors of the kernel, and a round trip that took more than a second.
pub fn ping(args: &PingArgs) -> io::Result<RoundTripReport> {
    let longest = CHUNK_LEN as usize - 256 - HEADER_LEN;
    if !(SEQUENCE_LEN..=longest).contains(&args.payload) {
        return Err(io::Error::other(format!(
            "--payload must be {SEQUENCE_LEN} to {longest} bytes"
        )));
    }
    let mut port = Port::open(&args.port)?;
    port.socket
        .copy_in(CHUNK, &args.to.ends(args.port.port).headers(args.payload));
    let mut round_trips = RoundTrips::new();
    let warm_up = args.count / 10;
    for number in 0..args.count + warm_up {
        port.socket
            .copy_in(CHUNK + HEADER_LEN as u64, &number.to_be_bytes());
        let sent = Instant::now();
        port.send_chunk(HEADER_LEN + args.payload)?;
        let descriptor = loop {
            if let Some(descriptor) = port.next_packet() {
                break descriptor;
            }
            port.wait()?;
            if sent.elapsed() > Duration::from_secs(1) {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "no answer within a second",
                ));
            }
        };
        let elapsed = sent.elapsed();
        let sequence = port
            .socket
            .copy_out::<SEQUENCE_LEN>(descriptor.addr + HEADER_LEN as u64);
        port.give_back(&descriptor);
        if u64::from_be_bytes(sequence) != number {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an answer to another packet",
            ));
        }
        if number >= warm_up {
            round_trips.record(elapsed);
        }
    }
    Ok(round_trips.report("bare-ping"))
}

/// Runs `bare-pong` until the process is ended.
///
/// # Errors
///
/// Set-up errors of the kernel.
pub fn pong(args: &PongArgs, ready: impl FnOnce()) -> io::Result<()> {
    let mut port = Port::open(&args.port)?;
    ready();
    loop {
        let Some(descriptor) = port.next_packet() else {
            port.wait()?;
            continue;
        };
        let mut headers = port.socket.copy_out::<HEADER_LEN>(descriptor.addr);
        turn_around(&mut headers);
        let sequence = port
            .socket
            .copy_out::<SEQUENCE_LEN>(descriptor.addr + HEADER_LEN as u64);
        port.socket.copy_in(CHUNK, &headers);
        port.socket.copy_in(CHUNK + HEADER_LEN as u64, &sequence);
        port.give_back(&descriptor);
        port.send_chunk(descriptor.len as usize)?;
    }
}
