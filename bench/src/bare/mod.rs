//! Bare AF_XDP as an `End`: what the kernel's interface gives on a bed when nothing is done but moving packets.
//!
//! It is the yardstick for the data plane, so it shares none of its code but what is done once (mappings, options, the
//! message that defers interrupts, headers): its own rings ([`socket`](self)), its
//! own XDP program, fixed frames that do not overlap, no message, no acknowledgement, no gate. By the data plane's rings, whose every access is checked, a
//! stream of 64 bytes in zero-copy mode cost a sixth more instructions.
//!
//! A stream's sender keeps a bounded number of packets in flight: between its TX ring and their completion (which veth gives when the packet was
//! consumed at the far end), or, where both ends are on one machine, until the receiver has taken them (`pace`). On a veth pair the receiving
//! core polls its queue as LM does, else the receiver spins.

mod frame;
mod inject;
mod mapping;
mod pace;
mod redirect;
mod sending;
mod socket;

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Instant;

use lm_cards::Interface;
use lm_dataplane::prefer_busy_polling;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;

pub use frame::{HEADER_LEN as UDP_HEADER_LEN, headers};
pub use inject::{Injector, Stored};
use pace::Pace;
pub(crate) use pace::remove_pace_file;
use redirect::Redirect;
use sending::Outgoing;
pub(crate) use socket::set_option;
use socket::{Socket, is_last};

use crate::cli::{Failure, Mode};
use crate::kept::Kept;
use crate::suite::{Arrival, End, EndArgs, Outcome, Patience, Side, Spec, Task};

/// Headers of a packet over IPv4 with UDP.
const HEADERS_LEN: u64 = 28;
/// Longest payload that a chunk of 2048 bytes takes.
const LONGEST_OF_ONE: u64 = 1728;
/// Bytes that a chunk of 4096 takes of a received packet; of a sent one it takes them all.
const LONG_CHUNK: u64 = socket::LONG_CHUNK_LEN - socket::HEADROOM_LEN;
/// Most packets in flight, below veth's 256, and the bytes of long ones: more leave the cache.
const IN_FLIGHT: [u64; 2] = [192, 512 << 10];
/// Packets that LM's receiver allows, in those that may be in flight: 768.
const CREDIT: u64 = 4;
/// Receive chunks beyond those of what is in flight, and where that is as much as LM allows: LM posts as many as it allows once more.
const SPARE_CHUNKS: [u64; 2] = [320, 768];
/// Packets or descriptors handled at a time.
const BATCH: u32 = 32;
/// Packets that one round of busy polling takes.
const BUDGET: i32 = 128;

/// Payload of the packets that messages of this length make.
pub(crate) fn payload(spec: &Spec) -> u64 {
    let most = u64::from(spec.mtu).saturating_sub(HEADERS_LEN);
    spec.size.min(most).max(frame::SEQUENCE_LEN as u64)
}

/// One end: packets of [`payload`] bytes, each with a number.
pub(crate) struct Bare {
    socket: Socket,
    waiting: Waiting,
    mode: &'static str,
    outgoing: Outgoing,
    pace: Option<Pace>,
    /// Whether the headers of what comes are kept: its sender is answered.
    answers: bool,
    /// Descriptors that came together, and how many of them have been looked at.
    came: u32,
    at: u32,
    /// Of the packet of which something has come.
    len: u64,
    number: u64,
    _redirect: Option<Redirect>,
}

impl Bare {
    pub(crate) fn open(args: &EndArgs, spec: &Spec, ready: impl FnOnce()) -> Result<Bare, Failure> {
        let is_near = args.side == Side::Near;
        let is_stream = matches!(spec.task, Task::Stream { .. });
        let card = Interface::by_name(&args.interface)?;
        let polls = is_stream && card.kind.as_deref() == Some("veth");
        let (port, payload) = (spec.address.port(), payload(spec));
        let (in_flight, chunks) = match payload > LONGEST_OF_ONE {
            true => (
                (IN_FLIGHT[1] / payload).clamp(8, IN_FLIGHT[0]),
                (payload + HEADERS_LEN + 14).div_ceil(LONG_CHUNK),
            ),
            false => (IN_FLIGHT[0], 1),
        };
        let pace = spec.pace.map(Pace::open).transpose()?;
        // Only where the receiver paces is more on the way than in flight.
        let credit = in_flight * if pace.is_some() { CREDIT } else { 1 };
        let posted = (credit * chunks + SPARE_CHUNKS[usize::from(pace.is_some())]).min(4096);
        let by_card = spec.mode == Mode::ZeroCopy;
        let mode = match spec.mode {
            Mode::ZeroCopy => "native zero-copy",
            Mode::Generic => "generic copy",
            _ => "native copy",
        };
        // In zero-copy mode a whole page, whatever packets are: igb asks its card for whole KiB of what a chunk has without headroom, which is
        // one of 2048 bytes, and then longer packets come in pieces.
        let chunk_len = match payload > LONGEST_OF_ONE || by_card {
            true => socket::LONG_CHUNK_LEN,
            false => socket::CHUNK_LEN,
        };
        // Small things on queue 0, bulk on a queue of its own.
        let queue = u32::from(is_stream && spec.queues > 1);
        let queue = spec.system.options.queue.unwrap_or(queue);
        let socket = Socket::open(card.index, queue, posted as u32, chunk_len, by_card)?;
        // A sender has one in zero-copy mode alone: igb has none without.
        let needs_program = !(is_near && is_stream) || by_card;
        let redirect = || Redirect::to(&socket, queue, port, &card, spec.mode);
        let redirect = needs_program.then(redirect).transpose()?;
        let mut poller = None;
        if polls && !is_near {
            // The port above that of the packets takes the datagram that teaches a UDP socket its queue.
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port.saturating_add(1)))?;
            socket.set_nonblocking(true)?;
            poller = Some(socket);
        }
        let mut bare = Bare {
            outgoing: Outgoing::new(
                &socket,
                payload as usize,
                [in_flight, credit].map(|most| most as u32),
            ),
            waiting: Waiting { kept: None, poller },
            socket,
            mode,
            pace,
            answers: !is_near && !is_stream,
            came: 0,
            at: 0,
            len: 0,
            number: 0,
            _redirect: redirect,
        };
        if !is_near {
            bare.pace.iter().for_each(|pace| pace.set_count(0));
            ready();
            return Ok(bare);
        }
        let hop = lm_dataplane::route::resolve(*spec.address.ip(), Some(card.index))?;
        let ends = |port| Addressing {
            src_mac: MacAddr(card.mac),
            dst_mac: MacAddr(hop.mac),
            vlan: None,
            src_ip: hop.source,
            dst_ip: *spec.address.ip(),
            src_port: port,
            dst_port: port,
        };
        let written = headers(&ends(port), payload as usize);
        bare.outgoing.fill(&bare.socket, &written);
        if polls {
            let written = headers(&ends(port.saturating_add(1)), frame::SEQUENCE_LEN);
            bare.outgoing.teach_queue(&mut bare.socket, &written)?;
        }
        Ok(bare)
    }

    /// Gives the descriptors that were looked at back, and takes new ones.
    fn next_batch(&mut self) {
        if self.came > 0 {
            self.socket.rx.release(self.came);
            self.socket.fill.submit(self.came);
            if let Some(pace) = &self.pace {
                pace.set_count(self.number + 1);
            }
        }
        self.came = self.socket.rx.waiting(BATCH);
        self.at = 0;
    }
}

impl End for Bare {
    fn send(&mut self, _: usize, number: u64) -> Result<(), Failure> {
        Ok(self.outgoing.send(&mut self.socket, self.pace.as_ref(), number)?)
    }

    fn flush(&mut self) -> Result<(), Failure> {
        Ok(self.outgoing.flush(&mut self.socket)?)
    }

    fn receive(&mut self, until: Option<Instant>) -> Result<Option<Arrival>, Failure> {
        let mut patience = Patience::until(until);
        loop {
            while self.at < self.came {
                let descriptor = self.socket.rx.read(self.at);
                if self.len == 0 {
                    let sequence = descriptor.addr + frame::HEADER_LEN as u64;
                    self.number = u64::from_be_bytes(self.socket.copy_out(sequence));
                    if self.answers {
                        let mut headers = self.socket.copy_out(descriptor.addr);
                        frame::turn_around(&mut headers);
                        self.outgoing.answer = Some(headers);
                    }
                }
                self.len += u64::from(descriptor.len);
                let chunk = self.socket.chunk_of(descriptor.addr);
                self.socket.fill.write(self.at, chunk);
                self.at += 1;
                if is_last(&descriptor) {
                    return Ok(Some(Arrival {
                        from: 0,
                        number: self.number,
                        bytes: std::mem::take(&mut self.len) as usize - frame::HEADER_LEN,
                        whole: true,
                    }));
                }
            }
            self.next_batch();
            if self.came == 0 {
                if patience.is_over() {
                    return Ok(None);
                }
                if self.socket.fill.needs_wakeup() {
                    self.socket.wake_rx();
                }
                self.waiting.step()?;
            }
        }
    }

    fn tell(&mut self, outcome: &mut Outcome) {
        outcome.mode = Some(self.mode.to_owned());
    }
}

/// How a receiver waits for packets, and makes them come.
struct Waiting {
    // Dropped before the socket that polls.
    kept: Option<Kept>,
    /// The UDP socket that polls, as soon as it knows its queue.
    poller: Option<UdpSocket>,
}

impl Waiting {
    fn step(&mut self) -> io::Result<()> {
        let Some(socket) = &self.poller else {
            std::hint::spin_loop();
            return Ok(());
        };
        let received = socket.recv(&mut [0; 16]).is_ok();
        if !received || self.kept.is_some() {
            return Ok(());
        }
        let napi = socket::napi_id(socket)?;
        if napi != 0 {
            prefer_busy_polling(socket, BUDGET)?;
            self.kept = Some(Kept::new(napi)?);
        }
        Ok(())
    }
}
