//! The receiver of a landing stream: posts frames ahead into zones, takes what came, and holds each packet against the log.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use clap::Args;
use lm_ebpf::{AttachMode, Gate, GateConfig, Log, Role, SessionAdmission, Wire};
use lm_protocol::window::TailRule;
use serde::Serialize;

use super::{
    Cursor, FIRST_MESSAGE, HEADER_LEN, KEY, LEAST_STRIPPED_LEN, PAYLOAD_LEN, Placement, Shape, StreamArgs,
    write_content,
};
use crate::bare::pace::Pace;
use crate::bare::socket::{CHUNK_LEN, Socket};
use crate::bare::{Attach, Waiting, ifindex};

/// The kernel writes a packet so far behind the fill address (XDP_PACKET_HEADROOM).
const HEADROOM: u64 = 256;
/// Before a zone's payload: headroom and headers of the lowest fragment, up to a cache line's end.
const MARGIN: u64 = 384;
const _: () = assert!(MARGIN >= HEADROOM + HEADER_LEN as u64 && MARGIN.is_multiple_of(64));
/// What lies around payload before anything arrives.
const GUARD: u8 = 0xee;
/// A stream that stops for so long is over.
const SILENCE: Duration = Duration::from_secs(2);
/// Where the LM header has key, message and index, in bytes from its start.
const LM_HEADER_LEN: usize = 24;

/// Arguments of `land-recv`.
#[derive(Debug, Clone, Args)]
pub struct LandArgs {
    /// What both sides must be told alike
    #[command(flatten)]
    pub stream: StreamArgs,
    /// Where payload goes
    #[arg(long, value_enum, default_value_t = Placement::Overlay)]
    pub placement: Placement,
    /// IPv4 address of this side
    #[arg(long)]
    pub to: Ipv4Addr,
    /// IPv4 address of the sender
    #[arg(long)]
    pub from: Ipv4Addr,
    /// Seconds after the first packet that do not count
    #[arg(long, default_value_t = 0.2)]
    pub warmup: f64,
    /// Seconds that count
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
}

/// What `land-recv` prints.
#[derive(Debug, Serialize)]
pub struct LandReport {
    /// Name of the program.
    pub program: &'static str,
    /// Where payload went.
    pub placement: Placement,
    /// Fragments of a window.
    pub window: u32,
    /// Payload received.
    pub bytes: u64,
    /// Packets received.
    pub packets: u64,
    /// Messages completed since the start, warm-up included.
    pub messages: u64,
    /// Whether each byte of them was compared.
    pub verified: bool,
    /// By the receiver's clock.
    pub seconds: f64,
    /// Payload over time.
    pub gbit_per_s: f64,
    /// What the receiving core spent on a packet: the rounds of polling that brought packets, and placing them.
    pub receiver_ns_per_packet: f64,
    /// Mean packets per such round.
    pub packets_per_batch: f64,
    /// LM packets that the gate passed to the kernel.
    pub passed: u64,
    /// Dropped by the kernel at this socket since it was opened.
    pub dropped: u64,
    /// The NAPI id that busy polling used; 0: none was known.
    pub napi_id: u32,
}

/// Runs `land-recv`: waits for the first packet, then measures.
///
/// # Errors
///
/// Anything the kernel says when socket and gate are made; a packet that is not the next one of the stream or lies
/// elsewhere; with `--verify`, a wrong byte.
pub fn land(args: &LandArgs, ready: impl FnOnce()) -> io::Result<LandReport> {
    let port = &args.stream.port;
    let mut waiting = Waiting::open(port)?;
    let mut landing = Landing::open(args)?;
    landing.post();
    ready();
    let (mut packets, mut batches, mut bytes) = (0_u64, 0_u64, 0_u64);
    let mut working = Duration::ZERO;
    let mut started: Option<Instant> = None;
    let mut counts_from: Option<Instant> = None;
    let mut last_packet = Instant::now();
    loop {
        let before = Instant::now();
        let mut count = landing.socket.rx.waiting(port.batch);
        if count == 0 {
            waiting.step(landing.socket.raw_fd())?;
            count = landing.socket.rx.waiting(port.batch);
        }
        if count == 0 {
            if started.is_some() && last_packet.elapsed() > SILENCE {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the sender stopped before the measurement ended",
                ));
            }
            continue;
        }
        bytes += landing.take(count)?;
        landing.post();
        packets += u64::from(count);
        batches += 1;
        let now = Instant::now();
        working += now - before;
        last_packet = now;
        let started = *started.get_or_insert(now);
        match counts_from {
            None if (now - started).as_secs_f64() >= args.warmup => {
                counts_from = Some(now);
                (packets, batches, bytes, working) = (0, 0, 0, Duration::ZERO);
            }
            // Not before a message is whole, however slow the machine.
            Some(from)
                if (now - from).as_secs_f64() >= args.seconds && landing.taking.message > FIRST_MESSAGE =>
            {
                let seconds = (now - from).as_secs_f64();
                return Ok(LandReport {
                    program: "land-recv",
                    placement: args.placement,
                    window: args.stream.window,
                    bytes,
                    packets,
                    messages: u64::from(landing.taking.message - FIRST_MESSAGE),
                    verified: args.stream.verify,
                    seconds,
                    gbit_per_s: bytes as f64 * 8.0 / seconds / 1e9,
                    receiver_ns_per_packet: working.as_secs_f64() * 1e9 / packets as f64,
                    packets_per_batch: packets as f64 / batches as f64,
                    passed: landing.log.passed(),
                    dropped: landing.socket.dropped()?,
                    napi_id: waiting.napi_id(landing.socket.raw_fd())?,
                });
            }
            _ => {}
        }
    }
}

/// The zones in the socket's memory, used in turns.
#[derive(Debug, Clone, Copy)]
struct Zones {
    placement: Placement,
    count: u32,
    /// From one zone to the next.
    stride: u64,
}

impl Zones {
    fn new(placement: Placement, shape: &Shape, posted: u32) -> Zones {
        Zones {
            placement,
            // One is being read, one has its last frames posted, and the others hold what is posted ahead.
            count: (posted.div_ceil(shape.count) + 2).max(4),
            // The kernel demands a whole chunk behind each fill address.
            stride: (MARGIN + shape.message_len).next_multiple_of(64) + CHUNK_LEN,
        }
    }

    fn memory_len(&self) -> usize {
        (u64::from(self.count) * self.stride).next_multiple_of(4096) as usize
    }

    fn zone(&self, message: u32) -> u64 {
        u64::from((message - FIRST_MESSAGE) % self.count) * self.stride
    }

    /// `R`, where the message begins.
    fn payload(&self, message: u32) -> u64 {
        self.zone(message) + MARGIN
    }

    /// Bytes of a packet in memory before its payload.
    fn header_len(&self) -> u16 {
        match self.placement {
            Placement::Overlay => HEADER_LEN,
            Placement::Strip => 0,
        }
    }

    /// Where the kernel writes fragment `index`: its headers, if it has them here.
    fn packet(&self, message: u32, index: u32) -> u64 {
        self.payload(message) + u64::from(index) * u64::from(PAYLOAD_LEN) - u64::from(self.header_len())
    }
}

struct Landing {
    socket: Socket,
    log: Log,
    pace: Pace,
    shape: Shape,
    zones: Zones,
    verify: bool,
    ahead: u64,
    /// Frames posted and packets taken since the start: positions of the log as well.
    posted: u64,
    taken: u64,
    posting: Cursor,
    taking: Cursor,
    /// Of the message that is taken.
    tails: TailRule,
    saved: [[u8; HEADER_LEN as usize]; 2],
    _gate: Gate,
}

impl Landing {
    fn open(args: &LandArgs) -> io::Result<Landing> {
        let port = &args.stream.port;
        let shape = args.stream.shape()?;
        if args.placement == Placement::Strip && shape.payload_len(shape.count - 1) < LEAST_STRIPPED_LEN {
            return Err(io::Error::other(format!(
                "the last fragment has less than {LEAST_STRIPPED_LEN} bytes, which cannot be stripped; choose another --message-size"
            )));
        }
        if args.placement == Placement::Overlay && shape.windows.fragments() == 1 && shape.count > 1 {
            return Err(io::Error::other(
                "--window 1 is forward order, where each packet's headers would destroy the payload before it; use \
                 --placement strip",
            ));
        }
        let pace = args.stream.pace()?;
        pace.set_count(0);
        let zones = Zones::new(args.placement, &shape, port.posted);
        let ifindex = ifindex(&port.interface)?;
        let socket = Socket::open_unaligned(ifindex, port.queue, zones.memory_len())?;
        socket.fill_with(GUARD, 0, zones.memory_len());
        let gate = open_gate(args, ifindex, &socket, &shape)?;
        let log = gate.log(port.queue).map_err(io::Error::other)?;
        Ok(Landing {
            socket,
            log,
            pace,
            shape,
            zones,
            verify: args.stream.verify,
            ahead: u64::from(port.posted),
            posted: 0,
            taken: 0,
            posting: Cursor::START,
            taking: Cursor::START,
            tails: TailRule::new(shape.windows, shape.count),
            saved: [[0; HEADER_LEN as usize]; 2],
            _gate: gate,
        })
    }

    /// Posts frames as far ahead as there is room, and lets the sender know.
    fn post(&mut self) {
        let room = self.socket.fill.room();
        let mut count = 0;
        while self.posted - self.taken < self.ahead && count < room && self.may_post() {
            let index = self.posting.index(&self.shape);
            let address = self.zones.packet(self.posting.message, index) - HEADROOM;
            self.socket.fill.write(count, address);
            count += 1;
            self.posted += 1;
            self.log
                .set_message_limit(SessionAdmission::place_of(KEY), self.posting.message);
            self.posting.advance(&self.shape);
        }
        if count > 0 {
            self.socket.fill.submit(count);
            self.log.set_posted(self.posted);
            self.pace.set_count(self.posted);
        }
    }

    fn may_post(&self) -> bool {
        if self.posting.message - self.taking.message >= self.zones.count {
            return false; // the zone is still in use
        }
        let index = self.posting.index(&self.shape);
        if self.zones.placement == Placement::Strip || !self.shape.windows.is_lowest(index) {
            return true;
        }
        // I5: the tail below must be saved. Nothing is, of a message of which nothing has come.
        let window = self.shape.windows.window_of(index);
        window == 0 || self.posting.message == self.taking.message && self.tails.may_post_lowest(window)
    }

    /// Takes `count` packets; returns their payload's length.
    fn take(&mut self, count: u32) -> io::Result<u64> {
        let mut bytes = 0;
        if self.log.producer() < self.taken + u64::from(count) {
            return Err(io::Error::other(
                "the log has fewer entries than the RX ring (I3)",
            ));
        }
        for n in 0..count {
            let descriptor = self.socket.rx.read(n);
            // Unaligned mode: base address below, offset above.
            let address = (descriptor.addr & ((1 << 48) - 1)) + (descriptor.addr >> 48);
            let entry = self.log.entry(self.taken);
            let Cursor { message, .. } = self.taking;
            let index = self.taking.index(&self.shape);
            let payload_len = self.shape.payload_len(index);
            let is_right = entry.sequence == self.taken as u16
                && (entry.message, entry.index) == (message, index)
                && entry.frame_len == HEADER_LEN + payload_len
                && descriptor.len == u32::from(self.zones.header_len() + payload_len)
                && address == self.zones.packet(message, index);
            if !is_right {
                return Err(io::Error::other(format!(
                    "packet {} should be fragment {index} of message {message} at {}: the log has {entry:?}, the RX ring {} \
                     bytes at {address} (a packet was lost, or it lies in the wrong place)",
                    self.taken,
                    self.zones.packet(message, index),
                    descriptor.len,
                )));
            }
            if self.zones.placement == Placement::Overlay {
                self.mend(message, index)?;
            }
            bytes += u64::from(payload_len);
            self.taken += 1;
            self.taking.advance(&self.shape);
            if self.taking.position == 0 {
                self.tails = TailRule::new(self.shape.windows, self.shape.count);
                if self.verify {
                    self.compare(message)?;
                }
            }
        }
        self.socket.rx.release(count);
        Ok(bytes)
    }

    /// What overlapping costs at a window's first and last packet: its tail is saved, the surviving header compared (I3), and
    /// the tail below put back (I5).
    fn mend(&mut self, message: u32, index: u32) -> io::Result<()> {
        let windows = self.shape.windows;
        if let Some(window) = self.tails.tail_to_save(windows, index, self.shape.count) {
            let end = self.zones.packet(message, index) + u64::from(HEADER_LEN + PAYLOAD_LEN);
            self.saved[TailRule::slot(window)] = self.socket.copy_out(end - u64::from(HEADER_LEN));
            if !self.tails.tail_saved(window) {
                return Err(io::Error::other("a window's tail was saved out of turn (I5)"));
            }
        }
        if windows.is_lowest(index) {
            let packet = self.zones.packet(message, index);
            let at = packet + u64::from(HEADER_LEN) - LM_HEADER_LEN as u64;
            let header: [u8; LM_HEADER_LEN] = self.socket.copy_out(at);
            if header[4..12] != KEY.to_be_bytes()
                || header[12..16] != message.to_be_bytes()
                || header[16..20] != index.to_be_bytes()
            {
                return Err(io::Error::other(format!(
                    "the header of fragment {index} of message {message} names another one"
                )));
            }
            if let Some(below) = self.tails.lowest_arrived(windows.window_of(index)) {
                self.socket.copy_in(packet, &self.saved[TailRule::slot(below)]);
            }
        }
        Ok(())
    }

    /// Compares a message with what was sent, and its zone's guard bytes.
    fn compare(&self, message: u32) -> io::Result<()> {
        let (mut expected, mut found) = ([0; PAYLOAD_LEN as usize], [0; PAYLOAD_LEN as usize]);
        let start = self.zones.payload(message);
        for index in 0..self.shape.count {
            let len = usize::from(self.shape.payload_len(index));
            let offset = u64::from(index) * u64::from(PAYLOAD_LEN);
            write_content(message, index, &mut expected[..len]);
            self.socket.copy_to(start + offset, &mut found[..len]);
            if let Some(at) = (0..len).find(|&at| expected[at] != found[at]) {
                return Err(io::Error::other(format!(
                    "byte {} of message {message} is wrong",
                    offset + at as u64
                )));
            }
        }
        let zone = self.zones.zone(message);
        let end = start + self.shape.message_len;
        for (from, to) in [
            (zone, start - u64::from(self.zones.header_len())),
            (end, zone + self.zones.stride),
        ] {
            let mut guard = vec![0; (to - from) as usize];
            self.socket.copy_to(from, &mut guard);
            if let Some(at) = guard.iter().position(|&byte| byte != GUARD) {
                return Err(io::Error::other(format!(
                    "byte {} of the guard around message {message} was written",
                    from + at as u64 - zone
                )));
            }
        }
        Ok(())
    }
}

/// The gate with the session open on the landing queue.
fn open_gate(args: &LandArgs, ifindex: u32, socket: &Socket, shape: &Shape) -> io::Result<Gate> {
    let port = &args.stream.port;
    let config = GateConfig {
        local_ip: Some(args.to),
        data_port: port.port,
        control_port: port.port + 1,
        landing_queues: vec![port.queue],
        strip_headers: args.placement == Placement::Strip,
        ..GateConfig::default()
    };
    let mode = match port.mode {
        Attach::Native => AttachMode::Native,
        Attach::Generic => AttachMode::Generic,
    };
    let mut gate = Gate::attach(ifindex, &config, mode).map_err(io::Error::other)?;
    // SAFETY: the socket is open for as long as the borrow.
    let xsk = unsafe { BorrowedFd::borrow_raw(socket.raw_fd()) };
    let session = SessionAdmission {
        key: KEY,
        wire: Wire::Lm,
        peer_ip: args.from,
        peer_port: port.port,
        local_ip: args.to,
        header_len: HEADER_LEN,
        payload_len: PAYLOAD_LEN,
        window_fragments: shape.windows.fragments(),
        first_message: FIRST_MESSAGE,
        active_until_ns: 0,
    };
    gate.register_xsk(port.queue, xsk)
        .and_then(|()| gate.set_role(port.queue, Role::Landing))
        .and_then(|()| gate.open_session(port.queue, &session))
        .map_err(io::Error::other)?;
    Ok(gate)
}
