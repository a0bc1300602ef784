//! The bare programs over the crate `xsk-rs` (libxdp): somebody else's rings, so that ours are judged by them. The XDP
//! program is ours ([`Redirect`]): libxdp's own takes every packet of a queue, ARP and the commands' connection included.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io::{self, Write};
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use xsk_rs::config::{
    BindFlags, Interface, LibxdpFlags, QueueSize, SocketConfig, UmemConfig, XDP_UMEM_MIN_CHUNK_SIZE,
};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue, Umem};

use super::frame::{HEADER_LEN, SEQUENCE_LEN, turn_around};
use super::pace::Pace;
use super::pingpong::{PingArgs, PongArgs};
use super::socket::{CHUNKS_EACH_WAY, patiently, raise_send_buffer};
use super::stream::{ReceiveArgs, ReceiveReport, Room, SendArgs, SendReport};
use super::sys::Redirect;
use super::{PortArgs, Waiting, ifindex};
use crate::histogram::LatencyHistogram;
use crate::suite::{Meter, Outcome};

/// A socket, its rings and its frames.
struct Port {
    umem: Umem,
    tx: TxQueue,
    rx: RxQueue,
    fill: FillQueue,
    completion: CompQueue,
    /// Frames for sending that are free. What was given back last is used first: the cache has it.
    free: Vec<FrameDesc>,
    /// Those that the kernel has, in its order.
    sent: VecDeque<FrameDesc>,
    /// Where finished and received frames are told.
    told: Vec<FrameDesc>,
    copies: bool,
}

impl Port {
    fn open(args: &PortArgs) -> io::Result<Port> {
        if args.zero_copy {
            return Err(io::Error::other(
                "--zero-copy is for --sockets own: here the kernel copies",
            ));
        }
        if args.long {
            return Err(io::Error::other(
                "--long is for --sockets own: here a packet has one frame",
            ));
        }
        let ring = QueueSize::new(CHUNKS_EACH_WAY).map_err(io::Error::other)?;
        let memory = UmemConfig::builder()
            .frame_size(XDP_UMEM_MIN_CHUNK_SIZE.try_into().map_err(io::Error::other)?)
            .fill_queue_size(ring)
            .comp_queue_size(ring)
            .build()
            .map_err(io::Error::other)?;
        let socket = SocketConfig::builder()
            .rx_queue_size(ring)
            .tx_queue_size(ring)
            .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
            .bind_flags(BindFlags::XDP_COPY | BindFlags::XDP_USE_NEED_WAKEUP)
            .build();
        let interface = Interface::new(CString::new(args.interface.as_str())?);
        let frames = NonZeroU32::new(2 * CHUNKS_EACH_WAY).expect("a constant");
        let (umem, frames) = Umem::new(memory, frames, false).map_err(io::Error::other)?;
        let (tx, rx, queues) = patiently(|| {
            // SAFETY: the memory is this socket's alone.
            unsafe { Socket::new(socket, &umem, &interface, args.queue) }.map_err(system_error)
        })?;
        let (mut fill, completion) = queues.expect("memory that nobody shares has rings of its own");
        raise_send_buffer(tx.fd().as_raw_fd())?;
        let (receiving, sending) = frames.split_at(CHUNKS_EACH_WAY as usize);
        let posted = &receiving[..receiving.len().min(args.posted as usize)];
        // SAFETY: frames of this memory, each of which is in this ring alone.
        unsafe { fill.produce(posted) };
        Ok(Port {
            umem,
            tx,
            rx,
            fill,
            completion,
            free: sending.to_vec(),
            sent: VecDeque::with_capacity(sending.len()),
            told: vec![FrameDesc::default(); sending.len()],
            copies: args.sockets.copies(),
        })
    }

    fn fd(&self) -> i32 {
        self.rx.fd().as_raw_fd()
    }

    fn attach(&self, args: &PortArgs) -> io::Result<Redirect> {
        Redirect::to(self.fd(), ifindex(&args.interface)?, args)
    }

    /// Writes a packet into every frame for sending; later ones differ in their payload alone.
    fn prepare(&mut self, packet: &[u8]) -> io::Result<()> {
        for frame in &mut self.free {
            // SAFETY: a frame of this memory that is in no ring.
            let mut data = unsafe { self.umem.data_mut(frame) };
            let mut cursor = data.cursor();
            // It goes on behind what was written before.
            cursor.set_pos(0);
            cursor.write_all(packet)?;
        }
        Ok(())
    }

    /// Queues a prepared packet with this payload; of it, only the sequence number where nothing is copied.
    fn queue(&mut self, payload: &[u8]) {
        let mut frame = self.free.pop().expect("fewer packets in flight than frames");
        let bytes = if self.copies {
            payload
        } else {
            &payload[..SEQUENCE_LEN]
        };
        // SAFETY: a frame of this memory that is in no ring until the next statement.
        let mut data = unsafe { self.umem.data_mut(&mut frame) };
        data.contents_mut()[HEADER_LEN..HEADER_LEN + bytes.len()].copy_from_slice(bytes);
        self.sent.push_back(frame);
    }

    /// Hands the last `count` queued packets to the kernel, which is asked to send by [`Port::wake`].
    fn submit(&mut self, count: u32) {
        let from = self.sent.len() - count as usize;
        let frames = &self.sent.make_contiguous()[from..];
        // SAFETY: frames of this memory that are in no other ring; `sent` keeps them from being used again.
        let taken = unsafe { self.tx.produce(frames) };
        assert_eq!(
            taken,
            frames.len(),
            "the ring has as many entries as there are frames"
        );
    }

    /// Takes finished packets back; returns how many. They finish in order, and Linux 6.18 loses a bit of the addresses it tells.
    fn reap(&mut self) -> u32 {
        // SAFETY: only the number of what is told is used.
        let done = unsafe { self.completion.consume(&mut self.told) };
        self.free.extend(self.sent.drain(..done));
        done as u32
    }

    fn is_drained(&mut self) -> bool {
        self.tx.nb_free_exact() == CHUNKS_EACH_WAY
    }

    fn wake(&self) -> io::Result<()> {
        self.tx.wakeup()
    }

    /// Looks at received packets, `most` at a time: each one's bytes are shown, then its frame goes back. How many there were.
    fn receive(&mut self, most: u32, mut show: impl FnMut(&[u8])) -> u32 {
        let told = &mut self.told[..most as usize];
        // SAFETY: descriptors of this memory.
        let count = unsafe { self.rx.consume(told) };
        for frame in &told[..count] {
            // SAFETY: a frame of this memory that the kernel has given back.
            show(&unsafe { self.umem.data(frame) });
        }
        // SAFETY: frames that were just received are in no ring.
        let posted = unsafe { self.fill.produce(&told[..count]) };
        assert_eq!(posted, count, "the ring has as many entries as there are frames");
        count as u32
    }

    /// What the application has of a packet's payload, in `out`; its sequence number.
    fn take(copies: bool, packet: &[u8], out: &mut [u8]) -> u64 {
        let payload = &packet[HEADER_LEN..];
        let len = if copies { payload.len() } else { SEQUENCE_LEN };
        out[..len].copy_from_slice(&payload[..len]);
        u64::from_be_bytes(*out.first_chunk().expect("as long as a frame"))
    }
}

/// The system's error within, so that a queue that is busy is asked again.
fn system_error(error: xsk_rs::socket::SocketCreateError) -> io::Error {
    let within = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
    match within.and_then(io::Error::raw_os_error) {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::other(error),
    }
}

fn packet(args: &PortArgs, to: &super::ToArgs, payload: &[u8]) -> Vec<u8> {
    [&to.ends(args.port).headers(payload.len()), payload].concat()
}

/// [`super::send`] by these sockets.
pub(super) fn send(args: &SendArgs) -> io::Result<SendReport> {
    args.port.check_payload(args.payload)?;
    let mut port = Port::open(&args.port)?;
    let mut payload = vec![0x5a; args.payload];
    teach_queue(&mut port, args)?;
    port.prepare(&packet(&args.port, &args.to, &payload))?;
    let room = Room::new(args, 1)?;
    let (mut unfinished, mut sequence, mut wake_ups) = (0, 0_u64, 0);
    let mut meter = Meter::new(false)?;
    meter.begin();
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    while Instant::now() < end {
        unfinished -= port.reap();
        let count = room.for_batch(args.port.batch, sequence, unfinished);
        if count == 0 {
            std::hint::spin_loop();
        } else {
            for _ in 0..count {
                payload[..SEQUENCE_LEN].copy_from_slice(&sequence.to_be_bytes());
                port.queue(&payload);
                sequence += 1;
            }
            port.submit(count);
            unfinished += count;
        }
        if !port.is_drained() {
            port.wake()?;
            wake_ups += 1;
        }
    }
    Ok(SendReport {
        program: "bare-send".to_owned(),
        packets: sequence,
        seconds: started.elapsed().as_secs_f64(),
        wake_ups,
        cost: meter.end(),
    })
}

/// As by our own sockets: one datagram through this queue to the port above.
fn teach_queue(port: &mut Port, args: &SendArgs) -> io::Result<()> {
    let lesson = [
        &args.to.ends(args.port.port + 1).headers(SEQUENCE_LEN)[..],
        &[0; SEQUENCE_LEN],
    ]
    .concat();
    port.prepare(&lesson)?;
    port.queue(&[0; SEQUENCE_LEN]);
    port.submit(1);
    let deadline = Instant::now() + Duration::from_millis(200);
    loop {
        port.wake()?;
        if port.reap() > 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the kernel did not send a packet within 200 ms",
            ));
        }
        std::thread::yield_now();
    }
}

/// [`super::receive`] by these sockets.
pub(super) fn receive(args: &ReceiveArgs, ready: impl FnOnce()) -> io::Result<ReceiveReport> {
    let mut port = Port::open(&args.port)?;
    let _redirect = port.attach(&args.port)?;
    let mut waiting = Waiting::open(&args.port)?;
    let pace = args.port.pace.as_deref().map(Pace::open).transpose()?;
    if let Some(pace) = &pace {
        pace.set_count(0);
    }
    let mut out = vec![0; XDP_UMEM_MIN_CHUNK_SIZE as usize];
    let copies = port.copies;
    ready();
    let (mut bytes, mut packets, mut batches, mut next) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut started: Option<Instant> = None;
    let mut counts_from: Option<(Instant, u64)> = None;
    let mut meter = Meter::new(false)?;
    loop {
        let count = port.receive(args.port.batch, |packet| {
            next = Port::take(copies, packet, &mut out) + 1;
            bytes += (packet.len() - HEADER_LEN) as u64;
        });
        if count == 0 {
            waiting.step(port.fd())?;
            if let Some((from, _)) = counts_from
                && from.elapsed().as_secs_f64() > args.seconds + 1.0
            {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the sender stopped before the measurement ended",
                ));
            }
            continue;
        }
        if let Some(pace) = &pace {
            pace.set_count(next);
        }
        packets += u64::from(count);
        batches += 1;
        let now = Instant::now();
        let started = *started.get_or_insert(now);
        match counts_from {
            None if (now - started).as_secs_f64() >= args.warmup => {
                counts_from = Some((now, next));
                meter.begin();
                (bytes, packets, batches) = (0, 0, 0);
            }
            Some((from, first)) if (now - from).as_secs_f64() >= args.seconds => {
                let seconds = (now - from).as_secs_f64();
                let statistics = port.rx.fd().xdp_statistics()?;
                return Ok(ReceiveReport {
                    program: "bare-recv".to_owned(),
                    bytes,
                    packets,
                    lost_packets: (next - first).saturating_sub(packets),
                    seconds,
                    gbit_per_s: bytes as f64 * 8.0 / seconds / 1e9,
                    dropped: statistics.rx_dropped()
                        + statistics.rx_ring_full()
                        + statistics.rx_fill_ring_empty_descs(),
                    mode: args.port.mode,
                    idle: args.port.idle,
                    busy_poll: args.port.busy_poll,
                    napi_id: waiting.napi_id(port.fd())?,
                    kept: waiting.is_kept(),
                    packets_per_batch: packets as f64 / batches as f64,
                    cost: meter.end(),
                });
            }
            _ => {}
        }
    }
}

/// [`super::ping`] by these sockets.
pub(super) fn ping(args: &PingArgs) -> io::Result<Outcome> {
    args.port.check_payload(args.payload)?;
    let mut port = Port::open(&args.port)?;
    let _redirect = port.attach(&args.port)?;
    let mut waiting = Waiting::open(&args.port)?;
    let mut payload = vec![0; args.payload];
    port.prepare(&packet(&args.port, &args.to, &payload))?;
    let mut out = vec![0; XDP_UMEM_MIN_CHUNK_SIZE as usize];
    let copies = port.copies;
    let mut round_trips = LatencyHistogram::new();
    let warm_up = args.count / 10;
    for number in 0..args.count + warm_up {
        port.reap();
        payload[..SEQUENCE_LEN].copy_from_slice(&number.to_be_bytes());
        let sent = Instant::now();
        port.queue(&payload);
        port.submit(1);
        port.wake()?;
        let mut answer = None;
        while answer.is_none() {
            port.receive(1, |packet| answer = Some(Port::take(copies, packet, &mut out)));
            if answer.is_none() {
                waiting.step(port.fd())?;
                if sent.elapsed() > Duration::from_secs(1) {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "no answer within a second",
                    ));
                }
            }
        }
        let elapsed = sent.elapsed();
        if answer != Some(number) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an answer to another packet",
            ));
        }
        if number >= warm_up {
            round_trips.record_ns(elapsed.as_nanos() as u64);
        }
    }
    Ok(Outcome::of_round_trips(&round_trips))
}

/// [`super::pong`] by these sockets.
pub(super) fn pong(args: &PongArgs, ready: impl FnOnce()) -> io::Result<()> {
    let mut port = Port::open(&args.port)?;
    let _redirect = port.attach(&args.port)?;
    let mut waiting = Waiting::open(&args.port)?;
    let mut out = vec![0; XDP_UMEM_MIN_CHUNK_SIZE as usize];
    let mut prepared = Vec::new();
    let copies = port.copies;
    ready();
    loop {
        let mut headers = None;
        port.receive(1, |packet| {
            Port::take(copies, packet, &mut out);
            headers = Some((*packet.first_chunk::<HEADER_LEN>().expect("ours"), packet.len()));
        });
        let Some((mut headers, len)) = headers else {
            waiting.step(port.fd())?;
            continue;
        };
        port.reap();
        if prepared.len() != len {
            // All of a ping's packets have the same headers and length.
            turn_around(&mut headers);
            prepared = [&headers, &out[..len - HEADER_LEN]].concat();
            port.prepare(&prepared)?;
        }
        port.queue(&out[..len - HEADER_LEN]);
        port.submit(1);
        port.wake()?;
    }
}
