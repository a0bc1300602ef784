//! One-way stream of equal packets between two bare sockets.
//!
//! The sender keeps a bounded number of packets in flight: between its TX ring and their completion (which veth gives when
//! the packet was consumed at the far end), or, with `--pace`, until the receiver has taken them. The receiver counts payload by its own
//! clock, after a warm-up, and finds losses by the sequence number in each packet.

use std::io;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::frame::{HEADER_LEN, SEQUENCE_LEN};
use super::pace::Pace;
use super::socket::{CHUNKS_EACH_WAY, Socket, is_last};
use super::{Arguments, Port, ifindex, redirect};
use crate::suite::{Cost, Meter};

/// What a sender may have on the way.
struct Room {
    uncompleted: u32,
    credit: u32,
    pace: Option<Pace>,
}

impl Room {
    /// For packets of so many chunks.
    fn new(args: &Arguments, chunks: u32) -> io::Result<Room> {
        let uncompleted = args.in_flight.min(CHUNKS_EACH_WAY / chunks);
        Ok(Room {
            uncompleted,
            credit: args.credit.unwrap_or(uncompleted),
            pace: args.port.pace.as_deref().map(Pace::open).transpose()?,
        })
    }

    /// Packets that may be sent now, `batch` at most; 0 while a whole batch is worth waiting for: one completion must not cost one
    /// system call.
    fn for_batch(&self, batch: u32, sequence: u64, uncompleted: u32) -> u32 {
        let on_the_way = match &self.pace {
            Some(pace) => ((sequence - pace.count()) as u32).min(self.credit),
            None => 0,
        };
        let count = (batch)
            .min(self.uncompleted.saturating_sub(uncompleted))
            .min(self.credit - on_the_way);
        let is_busy = uncompleted > self.uncompleted / 2 || on_the_way > self.credit / 2;
        if count < batch && is_busy { 0 } else { count }
    }
}

/// What the programs of a stream print.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// Packets given to the kernel, or received while the time counted.
    messages: u64,
    /// Payload received.
    bytes: u64,
    /// Sequence numbers that did not come.
    lost_messages: u64,
    /// By the program's own clock.
    seconds: f64,
    /// What it cost meanwhile.
    cost: Cost,
    /// Dropped by the kernel at this socket since it was opened.
    dropped: u64,
    /// The NAPI id that busy polling used; 0: none was known.
    napi_id: u32,
    /// Whether its interrupts were deferred.
    kept: bool,
}

/// Runs `bare send`.
///
/// # Errors
///
/// Anything the kernel says when the socket is made, and sending errors other than a full device.
pub(super) fn send(args: &Arguments) -> io::Result<Report> {
    args.port.check_payload(args.payload)?;
    let mut to = Sender::open(args)?;
    let room = Room::new(args, to.chunks)?;
    let mut unfinished = 0;
    let mut sequence = 0_u64;
    let mut meter = Meter::default();
    meter.begin(None);
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    while Instant::now() < end {
        unfinished -= to.free.reap(&mut to.socket);
        let count = room
            .for_batch(args.port.batch, sequence, unfinished)
            .min(to.socket.tx.room() / to.chunks);
        if count == 0 {
            std::hint::spin_loop();
        } else {
            to.send(count, sequence);
            sequence += u64::from(count);
            unfinished += count;
        }
        if !to.socket.tx.is_drained() {
            to.socket.wake_tx()?;
        }
    }
    Ok(Report {
        messages: sequence,
        seconds: started.elapsed().as_secs_f64(),
        cost: meter.end(None),
        ..Report::default()
    })
}

/// Packets, each with the next number.
struct Sender {
    socket: Socket,
    free: Slots,
    chunks: u32,
    packet_len: u32,
    _redirect: Option<redirect::Redirect>,
}

impl Sender {
    fn open(args: &Arguments) -> io::Result<Sender> {
        let ifindex = ifindex(&args.port.interface)?;
        let mut socket = args.port.socket(ifindex)?;
        let redirect = || redirect::Redirect::to(socket.raw_fd(), ifindex, &args.port);
        let redirect = args.port.zero_copy.then(redirect).transpose()?;
        let headers = args.headers(args.payload, 0)?;
        let packet_len = (HEADER_LEN + args.payload) as u32;
        let chunks = socket.chunks(packet_len);
        let mut free = Slots::new(&socket, chunks);
        for &chunk in &free.chunks {
            socket.copy_in(chunk, &headers);
            socket.copy_in(chunk + HEADER_LEN as u64, &vec![0x5a; args.payload]);
        }
        teach_queue(&mut socket, args, &mut free)?;
        Ok(Sender {
            socket,
            free,
            chunks,
            packet_len,
            _redirect: redirect,
        })
    }

    /// Hands `count` packets to the kernel, the first with this number.
    fn send(&mut self, count: u32, sequence: u64) {
        for n in 0..count {
            let chunk = self.free.take();
            let number = sequence + u64::from(n);
            self.socket
                .copy_in(chunk + HEADER_LEN as u64, &number.to_be_bytes());
            self.socket.write_packet(n * self.chunks, chunk, self.packet_len);
        }
        self.socket.tx.submit(count * self.chunks);
    }
}

/// Room for packets to send, each in so many chunks one after the other. What was given back last is used first: the
/// cache has it.
struct Slots {
    /// First chunk of each free one.
    chunks: Vec<u64>,
    first: u64,
    len: u64,
}

impl Slots {
    /// All of the socket's memory for sending.
    fn new(socket: &Socket, chunks: u32) -> Slots {
        let (first, len) = (socket.first_to_send(), u64::from(chunks) * socket.chunk_len());
        let count = u64::from(CHUNKS_EACH_WAY / chunks);
        Slots {
            chunks: (0..count).map(|n| first + n * len).collect(),
            first,
            len,
        }
    }

    /// One that is free.
    fn take(&mut self) -> u64 {
        self.chunks.pop().expect("fewer packets in flight than room")
    }

    /// Takes finished packets back; returns how many. All of a packet's chunks finish together.
    fn reap(&mut self, socket: &mut Socket) -> u32 {
        let (done, before) = (socket.completion.waiting(u32::MAX), self.chunks.len());
        for n in 0..done {
            // 6.18 loses bit 0 of completion addresses; chunks are aligned, so masking restores them everywhere.
            let chunk = socket.chunk_of(socket.completion.read(n));
            if (chunk - self.first).is_multiple_of(self.len) {
                self.chunks.push(chunk);
            }
        }
        socket.completion.release(done);
        (self.chunks.len() - before) as u32
    }
}

/// Sends a datagram through this queue to the port above, where a UDP socket may want to learn the queue's NAPI id.
fn teach_queue(socket: &mut Socket, args: &Arguments, free: &mut Slots) -> io::Result<()> {
    let chunk = free.take();
    socket.copy_in(chunk, &args.headers(SEQUENCE_LEN, 1)?);
    socket.write_packet(0, chunk, (HEADER_LEN + SEQUENCE_LEN) as u32);
    socket.tx.submit(1);
    socket.wake_tx()?;
    // This chunk keeps its own headers: it is not given back.
    let deadline = Instant::now() + Duration::from_millis(200);
    while socket.completion.waiting(1) == 0 && Instant::now() < deadline {
        socket.wake_tx()?;
        std::thread::yield_now();
    }
    let done = socket.completion.waiting(1);
    socket.completion.release(done);
    Ok(())
}

/// What has come.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    bytes: u64,
    packets: u64,
    /// The number after the last packet's.
    next: u64,
}

/// Runs `bare recv`: waits for the first packet, then measures.
///
/// # Errors
///
/// Anything the kernel says when socket and program are made.
pub(super) fn receive(args: &Arguments, ready: impl FnOnce()) -> io::Result<Report> {
    let mut from = Receiver {
        port: Port::open(&args.port)?,
        len: 0,
        sequence: 0,
    };
    let pace = args.port.pace.as_deref().map(Pace::open).transpose()?;
    if let Some(pace) = &pace {
        pace.set_count(0);
    }
    ready();
    let mut taken = Taken::default();
    let mut started: Option<Instant> = None;
    let mut counts_from: Option<(Instant, u64)> = None;
    let mut meter = Meter::default();
    loop {
        let count = from.receive(args.port.batch, &mut taken);
        if count == 0 {
            from.port.wait()?;
            if let Some((since, _)) = counts_from
                && since.elapsed().as_secs_f64() > args.seconds + 1.0
            {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the sender stopped before the measurement ended",
                ));
            }
            continue;
        }
        if let Some(pace) = &pace {
            pace.set_count(taken.next);
        }
        let now = Instant::now();
        let started = *started.get_or_insert(now);
        match counts_from {
            None if (now - started).as_secs_f64() >= args.warmup => {
                counts_from = Some((now, taken.next));
                meter.begin(None);
                (taken.bytes, taken.packets) = (0, 0);
            }
            Some((since, first)) if (now - since).as_secs_f64() >= args.seconds => {
                let Port { socket, waiting, .. } = &from.port;
                return Ok(Report {
                    bytes: taken.bytes,
                    messages: taken.packets,
                    lost_messages: (taken.next - first).saturating_sub(taken.packets),
                    seconds: (now - since).as_secs_f64(),
                    cost: meter.end(None),
                    dropped: socket.dropped()?,
                    napi_id: waiting.napi_id(socket.raw_fd())?,
                    kept: waiting.is_kept(),
                });
            }
            _ => {}
        }
    }
}

/// A port whose packets may have several chunks.
struct Receiver {
    port: Port,
    /// Of the packet of which something has come.
    len: u64,
    sequence: u64,
}

impl Receiver {
    /// Takes descriptors that arrived, up to a maximum; returns their number.
    fn receive(&mut self, most: u32, taken: &mut Taken) -> u32 {
        let socket = &mut self.port.socket;
        let count = socket.rx.waiting(most);
        // In registers until the batch is through: the yardstick counts instructions.
        let (mut sum, mut len, mut sequence) = (*taken, self.len, self.sequence);
        for n in 0..count {
            let descriptor = socket.rx.read(n);
            if len == 0 {
                sequence = u64::from_be_bytes(socket.copy_out(descriptor.addr + HEADER_LEN as u64));
            }
            len += u64::from(descriptor.len);
            if is_last(&descriptor) {
                sum.next = sequence + 1;
                sum.bytes += std::mem::take(&mut len) - HEADER_LEN as u64;
                sum.packets += 1;
            }
            socket.fill.write(n, socket.chunk_of(descriptor.addr));
        }
        (*taken, self.len, self.sequence) = (sum, len, sequence);
        if count > 0 {
            socket.rx.release(count);
            socket.fill.submit(count);
        }
        count
    }
}
