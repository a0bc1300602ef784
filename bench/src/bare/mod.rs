//! A bare AF_XDP sender and receiver: what the kernel's interface gives on a bed when nothing is done but moving packets.
//!
//! It is the yardstick for the data plane, so it shares none of its code but the message that defers interrupts: its own rings ([`socket`](self)), its
//! own XDP program, fixed frames that do not overlap, no message, no acknowledgement, no gate. By the data plane's rings, whose every access is checked, a
//! stream of 64 bytes in zero-copy mode cost a sixth more instructions. Two pairs of
//! programs: a one-way stream, and a ping-pong of one packet, with switches for the queue, native or generic attachment, batch, packets in
//! flight, and busy polling.

mod frame;
mod inject;
mod mapping;
mod pace;
mod pingpong;
mod redirect;
mod socket;
mod stream;

use std::ffi::CString;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub use frame::{Ends, HEADER_LEN as UDP_HEADER_LEN, Mac};
pub use inject::{Injector, Stored};
use pingpong::{ping, pong};
pub use redirect::Attach;
use socket::Moved;
pub(crate) use socket::set_option;
use stream::{receive, send};

use crate::cli::print;
use crate::kept::Kept;

/// The programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Send packets
    Send,
    /// Receive packets and count
    Recv,
    /// Measure round trips
    Ping,
    /// Answer until ended
    Pong,
}

/// Arguments of `bare`.
#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// What to do
    #[arg(value_enum)]
    pub role: Role,
    /// Switches of the port
    #[command(flatten)]
    pub port: PortArgs,
    /// The other side, where this one begins
    #[command(flatten)]
    pub to: Option<ToArgs>,
    /// UDP payload of each packet in bytes
    #[arg(long, default_value_t = 1472)]
    pub payload: usize,
    /// Seconds to send, or that count of what is received
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Seconds after the first received packet that do not count
    #[arg(long, default_value_t = 0.2)]
    pub warmup: f64,
    /// Packets that may be in flight: not completed, or not taken by the receiver with --pace
    #[arg(long, default_value_t = 192)]
    pub in_flight: u32,
    /// Packets that the receiver may not have taken yet, with --pace [default: as --in-flight]
    #[arg(long, requires = "pace")]
    pub credit: Option<u32>,
    /// Round trips that count (a tenth of it again goes before as a warm-up)
    #[arg(long, default_value_t = 20_000)]
    pub count: u64,
}

impl Arguments {
    /// Headers of a packet to the other side, with this payload, to the port this far `above`.
    fn headers(&self, payload: usize, above: u16) -> io::Result<[u8; frame::HEADER_LEN]> {
        let to = self
            .to
            .as_ref()
            .ok_or_else(|| io::Error::other("say to whom with --to, --to-mac, --from, --from-mac"))?;
        Ok(to.ends(self.port.port + above).headers(payload))
    }
}

/// Runs a program and prints what it reports.
///
/// # Errors
///
/// Anything the kernel says when sockets and XDP program are made; packets that do not come.
pub fn run(args: &Arguments, ready: impl FnOnce()) -> io::Result<()> {
    match args.role {
        Role::Send => print(&send(args)?),
        Role::Recv => print(&receive(args, ready)?),
        Role::Ping => print(&ping(args)?),
        Role::Pong => pong(args, ready)?,
    }
    Ok(())
}

/// Longest payload of a UDP datagram over IPv4.
const MAX_PAYLOAD: usize = 65_507;

/// Whose busy polling moves the packets of a receive queue into its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BusyPoll {
    /// Nobody's: the kernel's softirq does it.
    Off,
    /// A UDP socket's that has seen one datagram on that queue.
    Udp,
}

/// The switches both sides have.
#[derive(Debug, Clone, Args)]
pub struct PortArgs {
    /// Interface
    #[arg(long, short)]
    pub interface: String,
    /// Queue of the AF_XDP socket
    #[arg(long, short, default_value_t = 0)]
    pub queue: u32,
    /// Where the XDP program runs (receiving programs)
    #[arg(long, value_enum, default_value_t = Attach::Native)]
    pub mode: Attach,
    /// UDP port of the packets; the one above it takes the datagram that teaches a UDP socket its queue
    #[arg(long, default_value_t = 7300)]
    pub port: u16,
    /// Whose busy polling drives the receive queue
    #[arg(long, value_enum, default_value_t = BusyPoll::Off)]
    pub busy_poll: BusyPoll,
    /// Packets that one round of busy polling takes
    #[arg(long, default_value_t = 64)]
    pub busy_budget: u32,
    /// Keep the interrupts of the polled queue's NAPI instance away while it is polled, as LM does while a stream lands (Linux 6.14)
    #[arg(long)]
    pub keep_napi: bool,
    /// Packets or descriptors handled at a time
    #[arg(long, default_value_t = 32)]
    pub batch: u32,
    /// Receive chunks in circulation: few stay in the processor's cache
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=4096))]
    pub posted: u32,
    /// Chunks of 4096 bytes, of which a packet may take several (XDP_USE_SG): for payload of more than 1728 bytes
    #[arg(long)]
    pub long: bool,
    /// The card reads and writes the socket's memory itself (XDP_ZEROCOPY), where the driver can. The sending side then has an XDP program too: igb
    /// has no zero-copy mode without
    #[arg(long)]
    pub zero_copy: bool,
    /// File with a counter through which the receiver paces the sender (the same on both sides, streams on one host)
    #[arg(long)]
    pub pace: Option<PathBuf>,
}

impl PortArgs {
    /// In zero-copy mode a whole page, whatever packets are: igb asks its card for whole KiB of what a chunk has without headroom, which is one of
    /// 2048 bytes, and then longer packets come in pieces.
    fn chunk_len(&self) -> u64 {
        if self.long || self.zero_copy {
            socket::LONG_CHUNK_LEN
        } else {
            socket::CHUNK_LEN
        }
    }

    fn socket(&self, ifindex: u32) -> io::Result<socket::Socket> {
        let moved = match self.zero_copy {
            true => Moved::ByCard,
            false => Moved::ByKernel,
        };
        socket::Socket::open(ifindex, self.queue, self.posted, self.chunk_len(), moved)
    }

    /// Refuses payload that packets cannot have.
    fn check_payload(&self, payload: usize) -> io::Result<()> {
        let longest = if self.long {
            MAX_PAYLOAD
        } else {
            (socket::CHUNK_LEN - socket::HEADROOM_LEN) as usize - frame::HEADER_LEN
        };
        if (frame::SEQUENCE_LEN..=longest).contains(&payload) {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "--payload must be {} to {longest} bytes",
            frame::SEQUENCE_LEN
        )))
    }
}

/// Whom a sending program talks to.
#[derive(Debug, Clone, Args)]
pub struct ToArgs {
    /// IPv4 address of the receiver
    #[arg(long, required = false)]
    pub to: Ipv4Addr,
    /// Ethernet address of the receiver
    #[arg(long, required = false)]
    pub to_mac: Mac,
    /// IPv4 address to send from
    #[arg(long, required = false)]
    pub from: Ipv4Addr,
    /// Ethernet address to send from
    #[arg(long, required = false)]
    pub from_mac: Mac,
}

impl ToArgs {
    /// These ends, with this UDP port at both.
    pub fn ends(&self, port: u16) -> Ends {
        Ends {
            source_mac: self.from_mac,
            destination_mac: self.to_mac,
            source: self.from,
            destination: self.to,
            port,
        }
    }
}

fn ifindex(name: &str) -> io::Result<u32> {
    let c_name = CString::new(name)?;
    // SAFETY: a live NUL-terminated string.
    let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("no interface is called {name}"),
        ));
    }
    Ok(index)
}

/// The receiving end of a queue: program, socket, and the means to wait for packets.
struct Port {
    socket: socket::Socket,
    waiting: Waiting,
    _redirect: redirect::Redirect,
}

impl Port {
    fn open(args: &PortArgs) -> io::Result<Port> {
        let ifindex = ifindex(&args.interface)?;
        let socket = args.socket(ifindex)?;
        let redirect = redirect::Redirect::to(socket.raw_fd(), ifindex, args)?;
        Ok(Port {
            socket,
            waiting: Waiting::open(args)?,
            _redirect: redirect,
        })
    }

    /// One step of waiting.
    fn wait(&mut self) -> io::Result<()> {
        if self.socket.fill.needs_wakeup() {
            socket::ask(self.socket.raw_fd());
        }
        self.waiting.step()
    }
}

/// How a receiver waits for packets, and makes them come.
struct Waiting {
    // Dropped before the socket that polls.
    kept: Option<Kept>,
    keep: bool,
    /// The UDP socket that polls, as soon as it knows its queue.
    poller: Option<UdpSocket>,
    polls: bool,
    budget: u32,
}

impl Waiting {
    fn open(args: &PortArgs) -> io::Result<Waiting> {
        let udp = || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, args.port + 1))?;
            socket.set_nonblocking(true)?;
            io::Result::Ok(socket)
        };
        Ok(Waiting {
            kept: None,
            keep: args.keep_napi,
            poller: (args.busy_poll == BusyPoll::Udp).then(udp).transpose()?,
            polls: false,
            budget: args.busy_budget,
        })
    }

    fn step(&mut self) -> io::Result<()> {
        let Some(socket) = &self.poller else {
            std::hint::spin_loop();
            return Ok(());
        };
        let received = socket.recv(&mut [0; 16]).is_ok();
        if !received || self.polls {
            return Ok(());
        }
        let napi = socket::napi_id(socket.as_raw_fd())?;
        self.polls = napi != 0;
        if self.polls {
            socket::prefer_busy_poll(socket.as_raw_fd(), self.budget)?;
            self.kept = self.keep.then(|| Kept::new(napi)).transpose()?;
        }
        Ok(())
    }

    /// Whether the instance's interrupts are deferred.
    fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// The NAPI id that busy polling uses; 0 where none is known (then the softirq did the work).
    fn napi_id(&self, xsk: i32) -> io::Result<u32> {
        socket::napi_id(self.poller.as_ref().map_or(xsk, AsRawFd::as_raw_fd))
    }
}
