//! A stream of the bare programs over the crate `xsk-rs` (libxdp): somebody else's rings, so that ours are judged by them. The XDP
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

use super::frame::{HEADER_LEN, SEQUENCE_LEN};
use super::redirect::Redirect;
use super::socket::{CHUNKS_EACH_WAY, patiently, raise_send_buffer};
use super::stream::{Receiving, SendArgs, Sending, Taken};
use super::{PortArgs, Waiting, ifindex};

/// A socket, its rings and its frames.
pub(super) struct Port {
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
    waiting: Waiting,
    redirect: Option<Redirect>,
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
            waiting: Waiting::open(args)?,
            redirect: None,
        })
    }

    fn fd(&self) -> i32 {
        self.rx.fd().as_raw_fd()
    }

    /// A socket that packets come to.
    pub(super) fn to_receive(args: &PortArgs) -> io::Result<Port> {
        let mut port = Port::open(args)?;
        port.redirect = Some(Redirect::to(port.fd(), ifindex(&args.interface)?, args)?);
        Ok(port)
    }

    /// A socket whose frames have the packets to send; later ones differ in their number alone. Before that one datagram goes through this queue to
    /// the port above, as by our own sockets.
    pub(super) fn to_send(args: &SendArgs) -> io::Result<Port> {
        let mut port = Port::open(&args.port)?;
        let packet = |port, payload: &[u8]| [&args.to.ends(port).headers(payload.len()), payload].concat();
        port.prepare(&packet(args.port.port + 1, &[0; SEQUENCE_LEN]))?;
        port.send(1, 0);
        let deadline = Instant::now() + Duration::from_millis(200);
        while port.reap() == 0 {
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the kernel did not send a packet within 200 ms",
                ));
            }
            port.wake()?;
            std::thread::yield_now();
        }
        port.prepare(&packet(args.port.port, &vec![0x5a; args.payload]))?;
        Ok(port)
    }

    /// Writes a packet into every frame for sending.
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
}

impl Sending for Port {
    fn room(&mut self) -> u32 {
        self.free.len() as u32
    }

    fn send(&mut self, count: u32, sequence: u64) {
        let from = self.sent.len();
        for number in sequence..sequence + u64::from(count) {
            let mut frame = self.free.pop().expect("fewer packets in flight than frames");
            // SAFETY: a frame of this memory that is in no ring until all are written.
            let mut data = unsafe { self.umem.data_mut(&mut frame) };
            data.contents_mut()[HEADER_LEN..HEADER_LEN + SEQUENCE_LEN].copy_from_slice(&number.to_be_bytes());
            self.sent.push_back(frame);
        }
        let frames = &self.sent.make_contiguous()[from..];
        // SAFETY: frames of this memory that are in no other ring; `sent` keeps them from being used again.
        let taken = unsafe { self.tx.produce(frames) };
        assert_eq!(
            taken,
            frames.len(),
            "the ring has as many entries as there are frames"
        );
    }

    /// They finish in order, and Linux 6.18 loses a bit of the addresses it tells.
    fn reap(&mut self) -> u32 {
        // SAFETY: only the number of what is told is used.
        let done = unsafe { self.completion.consume(&mut self.told) };
        self.free.extend(self.sent.drain(..done));
        done as u32
    }

    fn wake(&mut self) -> io::Result<bool> {
        if self.tx.nb_free_exact() == CHUNKS_EACH_WAY {
            return Ok(false);
        }
        self.tx.wakeup().map(|()| true)
    }
}

impl Receiving for Port {
    fn receive(&mut self, most: u32, taken: &mut Taken) -> u32 {
        let told = &mut self.told[..most as usize];
        // SAFETY: descriptors of this memory.
        let count = unsafe { self.rx.consume(told) };
        for frame in &told[..count] {
            // SAFETY: a frame of this memory that the kernel has given back.
            let packet = unsafe { self.umem.data(frame) };
            let number = packet[HEADER_LEN..].first_chunk().expect("as long as a number");
            taken.packet(packet.len() as u64, u64::from_be_bytes(*number));
        }
        // SAFETY: frames that were just received are in no ring.
        let posted = unsafe { self.fill.produce(&told[..count]) };
        assert_eq!(posted, count, "the ring has as many entries as there are frames");
        count as u32
    }

    fn wait(&mut self) -> io::Result<()> {
        self.waiting.step(self.rx.fd().as_raw_fd())
    }

    fn waiting(&self) -> (&Waiting, i32) {
        (&self.waiting, self.fd())
    }

    fn dropped(&self) -> io::Result<u64> {
        let lost = self.rx.fd().xdp_statistics()?;
        Ok(lost.rx_dropped() + lost.rx_ring_full() + lost.rx_fill_ring_empty_descs())
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
