//! A bare AF_XDP sender and receiver: what the kernel's interface gives on a bed when nothing is done but moving packets.
//!
//! It is the yardstick for the data plane, so it shares none of its code but the message that defers interrupts: its own rings ([`socket`](self)), its
//! own XDP program, fixed frames that do not overlap, no message, no acknowledgement, no gate. By the data plane's rings, whose every access is checked, a
//! stream of 64 bytes in zero-copy mode cost a sixth more instructions. A stream by the crate `xsk-rs` judges these rings. Two pairs of
//! programs: a one-way stream, and a ping-pong of one packet. Each has the switches that a recipe is made of: queue,
//! native or generic attachment, batch, packets in flight, how to wait, and busy polling.

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
use serde::{Deserialize, Serialize};

pub use frame::{Ends, HEADER_LEN as UDP_HEADER_LEN, Mac};
pub use inject::{Injector, Stored};
use pingpong::{PingArgs, PongArgs, ping, pong};
pub use redirect::Attach;
pub use socket::Idle;
use socket::Moved;
use stream::{ReceiveArgs, SendArgs, receive, send};
pub(crate) use stream::{ReceiveReport, SendReport};

use crate::cli::print;
use crate::kept::Kept;
use crate::suite::{Counted, Meter, Metered};

/// The programs.
#[derive(Debug, clap::Subcommand)]
pub enum Program {
    /// Send packets
    Send(SendArgs),
    /// Receive packets and count
    Recv(ReceiveArgs),
    /// Measure round trips
    Ping(PingArgs),
    /// Answer until ended
    Pong(PongArgs),
}

/// Runs a program and prints what it reports.
///
/// # Errors
///
/// Anything the kernel says when sockets and XDP program are made; packets that do not come.
pub fn run(program: &Program, ready: impl FnOnce()) -> io::Result<()> {
    match program {
        Program::Send(args) => print(&send(args)?),
        Program::Recv(args) => print(&receive(args, ready)?),
        Program::Ping(args) => print(&ping(args)?),
        Program::Pong(args) => pong(args, ready)?,
    }
    Ok(())
}

/// Longest payload of a UDP datagram over IPv4.
const MAX_PAYLOAD: usize = 65_507;

/// Whose busy polling moves the packets of a receive queue into its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
    /// What to do while there is nothing to do
    #[arg(long, value_enum, default_value_t = Idle::Spin)]
    pub idle: Idle,
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
    /// What is counted while it measures
    #[command(flatten)]
    pub counted: Counted,
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

    fn meter(&self) -> io::Result<Meter> {
        Meter::new(Metered {
            counted: self.counted.clone(),
            ..Metered::default()
        })
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
    #[arg(long)]
    pub to: Ipv4Addr,
    /// Ethernet address of the receiver
    #[arg(long)]
    pub to_mac: Mac,
    /// IPv4 address to send from
    #[arg(long)]
    pub from: Ipv4Addr,
    /// Ethernet address to send from
    #[arg(long)]
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
        self.waiting.step(self.socket.raw_fd())
    }
}

/// How a receiver waits for packets, and makes them come.
struct Waiting {
    // Dropped before the socket that polls.
    kept: Option<Kept>,
    keep: bool,
    idle: Idle,
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
            idle: args.idle,
            poller: (args.busy_poll == BusyPoll::Udp).then(udp).transpose()?,
            polls: false,
            budget: args.busy_budget,
        })
    }

    fn step(&mut self, xsk: i32) -> io::Result<()> {
        let Some(socket) = &self.poller else {
            match self.idle {
                Idle::Spin => std::hint::spin_loop(),
                Idle::Poll => socket::sleep(xsk),
            }
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
