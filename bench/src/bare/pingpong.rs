//! One packet to and fro between two bare sockets: the least round trip that AF_XDP gives on a bed.

use std::io;
use std::time::{Duration, Instant};

use super::frame::{HEADER_LEN, SEQUENCE_LEN, turn_around};
use super::socket::is_last;
use super::{Arguments, Port};
use crate::histogram::LatencyHistogram;
use crate::suite::{Meter, Outcome};

/// What a received packet begins with, and its length in bytes.
struct Arrived {
    headers: [u8; HEADER_LEN],
    sequence: [u8; SEQUENCE_LEN],
    len: u32,
}

impl Port {
    /// Writes the start of the one packet that is ever sent.
    fn prepare(&self, headers: &[u8; HEADER_LEN], sequence: &[u8; SEQUENCE_LEN]) {
        let chunk = self.socket.first_to_send();
        self.socket.copy_in(chunk, headers);
        self.socket.copy_in(chunk + HEADER_LEN as u64, sequence);
    }

    /// Sends that packet, `len` bytes long.
    fn send(&mut self, len: u32) -> io::Result<()> {
        let done = self.socket.completion.waiting(u32::MAX);
        self.socket.completion.release(done);
        self.socket.write_packet(0, self.socket.first_to_send(), len);
        self.socket.tx.submit(self.socket.chunks(len));
        self.socket.wake_tx()
    }

    /// The next received packet, if one waits: the kernel shows no part of one before its last.
    fn next_packet(&mut self) -> Option<Arrived> {
        let waiting = self.socket.rx.waiting(u32::MAX);
        if waiting == 0 {
            return None;
        }
        let start = self.socket.rx.read(0).addr;
        let mut arrived = Arrived {
            headers: self.socket.copy_out(start),
            sequence: self.socket.copy_out(start + HEADER_LEN as u64),
            len: 0,
        };
        let mut count = 0;
        while count < waiting {
            let descriptor = self.socket.rx.read(count);
            let chunk = self.socket.chunk_of(descriptor.addr);
            self.socket.fill.write(count, chunk);
            arrived.len += descriptor.len;
            count += 1;
            if is_last(&descriptor) {
                break;
            }
        }
        self.socket.rx.release(count);
        self.socket.fill.submit(count);
        Some(arrived)
    }
}

/// Runs `bare ping`.
///
/// # Errors
///
/// Set-up errors of the kernel, and a round trip that took more than a second.
pub(super) fn ping(args: &Arguments) -> io::Result<Outcome> {
    args.port.check_payload(args.payload)?;
    let mut port = Port::open(&args.port)?;
    let headers = args.headers(args.payload, 0)?;
    let len = (HEADER_LEN + args.payload) as u32;
    let mut round_trips = LatencyHistogram::new();
    let warm_up = args.count / 10;
    let mut meter = Meter::default();
    for number in 0..args.count + warm_up {
        if number == warm_up {
            meter.begin(None);
        }
        port.prepare(&headers, &number.to_be_bytes());
        let sent = Instant::now();
        port.send(len)?;
        let arrived = loop {
            if let Some(arrived) = port.next_packet() {
                break arrived;
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
        if u64::from_be_bytes(arrived.sequence) != number || arrived.len != len {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an answer to another packet",
            ));
        }
        if number >= warm_up {
            round_trips.record_ns(elapsed.as_nanos() as u64);
        }
    }
    Ok(Outcome {
        cost: meter.end(None),
        ..Outcome::of_round_trips(&round_trips)
    })
}

/// Runs `bare pong` until the process is ended.
///
/// # Errors
///
/// Set-up errors of the kernel.
pub(super) fn pong(args: &Arguments, ready: impl FnOnce()) -> io::Result<()> {
    let mut port = Port::open(&args.port)?;
    ready();
    loop {
        let Some(mut arrived) = port.next_packet() else {
            port.wait()?;
            continue;
        };
        turn_around(&mut arrived.headers);
        port.prepare(&arrived.headers, &arrived.sequence);
        port.send(arrived.len)?;
    }
}
