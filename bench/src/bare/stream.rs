//! One-way stream of equal packets between two bare sockets.
//!
//! The sender keeps a bounded number of packets in flight: between its TX ring and their completion (which veth gives when
//! the packet was consumed at the far end), or, with `--pace`, until the receiver has taken them. The receiver counts payload by its own
//! clock, after a warm-up, and finds losses by the sequence number in each packet.

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::frame::{HEADER_LEN, SEQUENCE_LEN};
use super::pace::Pace;
use super::socket::{CHUNKS_EACH_WAY, Socket, is_last};
use super::{Attach, BusyPoll, Idle, Port, PortArgs, ToArgs, Waiting, ifindex, redirect};
use crate::suite::Cost;

/// Arguments of `bare send`.
#[derive(Debug, Clone, Args)]
pub struct SendArgs {
    /// Switches of the port
    #[command(flatten)]
    pub port: PortArgs,
    /// Receiver
    #[command(flatten)]
    pub to: ToArgs,
    /// UDP payload of each packet in bytes
    #[arg(long, default_value_t = 1472)]
    pub payload: usize,
    /// Seconds to send
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Packets that may be in flight: not completed, or not taken by the receiver with --pace
    #[arg(long, default_value_t = 192)]
    pub in_flight: u32,
    /// Packets that the receiver may not have taken yet, with --pace [default: as --in-flight]
    #[arg(long, requires = "pace")]
    pub credit: Option<u32>,
}

/// What a sender may have on the way.
struct Room {
    uncompleted: u32,
    credit: u32,
    pace: Option<Pace>,
}

impl Room {
    /// For packets of so many chunks.
    fn new(args: &SendArgs, chunks: u32) -> io::Result<Room> {
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

/// What `bare send` prints.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SendReport {
    /// Name of the program.
    pub program: String,
    /// Packets given to the kernel.
    pub packets: u64,
    /// By the sender's clock.
    pub seconds: f64,
    /// Calls that woke the kernel.
    pub wake_ups: u64,
    /// What sending cost.
    pub cost: Cost,
}

/// Where a stream's packets go, each with the next number.
pub(super) trait Sending {
    /// Packets that there is room for.
    fn room(&mut self) -> u32;

    /// Hands so many packets to the kernel, the first with this number.
    fn send(&mut self, count: u32, sequence: u64);

    /// Packets that have been sent since this was asked last.
    fn reap(&mut self) -> u32;

    /// Wakes the kernel unless it has taken everything; whether it did.
    fn wake(&mut self) -> io::Result<bool>;
}

/// Runs `bare send`.
///
/// # Errors
///
/// Anything the kernel says when the socket is made, and sending errors other than a full device.
pub(super) fn send(args: &SendArgs) -> io::Result<SendReport> {
    args.port.check_payload(args.payload)?;
    let own = Own::open(args)?;
    let room = Room::new(args, own.chunks)?;
    send_by(args, own, &room)
}

fn send_by(args: &SendArgs, mut to: impl Sending, room: &Room) -> io::Result<SendReport> {
    let mut unfinished = 0;
    let mut sequence = 0_u64;
    let mut wake_ups = 0;
    let mut meter = args.port.meter()?;
    meter.begin(Some(0));
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    while Instant::now() < end {
        unfinished -= to.reap();
        let count = room
            .for_batch(args.port.batch, sequence, unfinished)
            .min(to.room());
        if count == 0 {
            std::hint::spin_loop();
        } else {
            to.send(count, sequence);
            sequence += u64::from(count);
            unfinished += count;
        }
        wake_ups += u64::from(to.wake()?);
    }
    Ok(SendReport {
        program: "bare-send".to_owned(),
        packets: sequence,
        seconds: started.elapsed().as_secs_f64(),
        wake_ups,
        cost: meter.end(Some(0)),
    })
}

/// Packets by this program's own rings.
struct Own {
    socket: Socket,
    free: Slots,
    chunks: u32,
    packet_len: u32,
    _redirect: Option<redirect::Redirect>,
}

impl Own {
    fn open(args: &SendArgs) -> io::Result<Own> {
        let ifindex = ifindex(&args.port.interface)?;
        let mut socket = args.port.socket(ifindex)?;
        let redirect = || redirect::Redirect::to(socket.raw_fd(), ifindex, &args.port);
        let redirect = args.port.zero_copy.then(redirect).transpose()?;
        let headers = args.to.ends(args.port.port).headers(args.payload);
        let packet_len = (HEADER_LEN + args.payload) as u32;
        let chunks = socket.chunks(packet_len);
        let mut free = Slots::new(&socket, chunks);
        for &chunk in &free.chunks {
            socket.copy_in(chunk, &headers);
            socket.copy_in(chunk + HEADER_LEN as u64, &vec![0x5a; args.payload]);
        }
        teach_queue(&mut socket, &args.to, args.port.port, &mut free)?;
        Ok(Own {
            socket,
            free,
            chunks,
            packet_len,
            _redirect: redirect,
        })
    }
}

impl Sending for Own {
    fn room(&mut self) -> u32 {
        self.socket.tx.room() / self.chunks
    }

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

    fn reap(&mut self) -> u32 {
        self.free.reap(&mut self.socket)
    }

    fn wake(&mut self) -> io::Result<bool> {
        if self.socket.tx.is_drained() {
            return Ok(false);
        }
        self.socket.wake_tx().map(|()| true)
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
fn teach_queue(socket: &mut Socket, to: &ToArgs, port: u16, free: &mut Slots) -> io::Result<()> {
    let chunk = free.take();
    socket.copy_in(chunk, &to.ends(port + 1).headers(SEQUENCE_LEN));
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

/// Arguments of `bare recv`.
#[derive(Debug, Clone, Args)]
pub struct ReceiveArgs {
    /// Switches of the port
    #[command(flatten)]
    pub port: PortArgs,
    /// Seconds after the first packet that do not count
    #[arg(long, default_value_t = 0.2)]
    pub warmup: f64,
    /// Seconds that count
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
}

/// What `bare recv` prints.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReceiveReport {
    /// Name of the program.
    pub program: String,
    /// Payload received.
    pub bytes: u64,
    /// Packets received.
    pub packets: u64,
    /// Sequence numbers that did not come.
    pub lost_packets: u64,
    /// By the receiver's clock.
    pub seconds: f64,
    /// Payload over time.
    pub gbit_per_s: f64,
    /// Dropped by the kernel at this socket since it was opened.
    pub dropped: u64,
    /// Where the program ran.
    pub mode: Attach,
    /// How the receiver waited.
    pub idle: Idle,
    /// Who polled the queue.
    pub busy_poll: BusyPoll,
    /// The NAPI id that busy polling used; 0: none was known.
    pub napi_id: u32,
    /// Whether its interrupts were deferred.
    #[serde(default)]
    pub kept: bool,
    /// Mean packets per look at the RX ring that found any.
    pub packets_per_batch: f64,
    /// What it cost while the time counted.
    pub cost: Cost,
}

/// Where a stream's packets come from.
pub(super) trait Receiving {
    /// Takes what has come, so many descriptors at most; how many those were.
    fn receive(&mut self, most: u32, taken: &mut Taken) -> u32;

    /// One step of waiting.
    fn wait(&mut self) -> io::Result<()>;

    /// How it waits, and the socket that it waits for.
    fn waiting(&self) -> (&Waiting, i32);

    /// Packets that the kernel dropped at the socket.
    fn dropped(&self) -> io::Result<u64>;
}

/// What has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Taken {
    bytes: u64,
    packets: u64,
    /// The number after the last packet's.
    next: u64,
}

impl Taken {
    /// A whole packet with its number.
    pub(super) fn packet(&mut self, len: u64, sequence: u64) {
        self.next = sequence + 1;
        self.bytes += len - HEADER_LEN as u64;
        self.packets += 1;
    }
}

/// Runs `bare recv`: waits for the first packet, then measures.
///
/// # Errors
///
/// Anything the kernel says when socket and program are made.
pub(super) fn receive(args: &ReceiveArgs, ready: impl FnOnce()) -> io::Result<ReceiveReport> {
    let port = Port::open(&args.port)?;
    let whole = Whole {
        port,
        len: 0,
        sequence: 0,
    };
    receive_by(args, whole, ready)
}

fn receive_by(
    args: &ReceiveArgs,
    mut from: impl Receiving,
    ready: impl FnOnce(),
) -> io::Result<ReceiveReport> {
    let pace = args.port.pace.as_deref().map(Pace::open).transpose()?;
    if let Some(pace) = &pace {
        pace.set_count(0);
    }
    ready();
    let (mut taken, mut batches) = (Taken::default(), 0_u64);
    let mut started: Option<Instant> = None;
    let mut counts_from: Option<(Instant, u64)> = None;
    let mut meter = args.port.meter()?;
    loop {
        let count = from.receive(args.port.batch, &mut taken);
        if count == 0 {
            from.wait()?;
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
        batches += 1;
        let now = Instant::now();
        let started = *started.get_or_insert(now);
        match counts_from {
            None if (now - started).as_secs_f64() >= args.warmup => {
                counts_from = Some((now, taken.next));
                meter.begin(Some(0));
                (taken.bytes, taken.packets, batches) = (0, 0, 0);
            }
            Some((since, first)) if (now - since).as_secs_f64() >= args.seconds => {
                let seconds = (now - since).as_secs_f64();
                let (waiting, fd) = from.waiting();
                return Ok(ReceiveReport {
                    program: "bare-recv".to_owned(),
                    bytes: taken.bytes,
                    packets: taken.packets,
                    lost_packets: (taken.next - first).saturating_sub(taken.packets),
                    seconds,
                    gbit_per_s: taken.bytes as f64 * 8.0 / seconds / 1e9,
                    dropped: from.dropped()?,
                    mode: args.port.mode,
                    idle: args.port.idle,
                    busy_poll: args.port.busy_poll,
                    napi_id: waiting.napi_id(fd)?,
                    kept: waiting.is_kept(),
                    packets_per_batch: taken.packets as f64 / batches as f64,
                    cost: meter.end(Some(0)),
                });
            }
            _ => {}
        }
    }
}

/// A port whose packets may have several chunks.
struct Whole {
    port: Port,
    /// Of the packet of which something has come.
    len: u64,
    sequence: u64,
}

impl Receiving for Whole {
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
                sum.packet(std::mem::take(&mut len), sequence);
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

    fn wait(&mut self) -> io::Result<()> {
        self.port.wait()
    }

    fn waiting(&self) -> (&Waiting, i32) {
        (&self.port.waiting, self.port.socket.raw_fd())
    }

    fn dropped(&self) -> io::Result<u64> {
        self.port.socket.dropped()
    }
}
