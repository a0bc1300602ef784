//! Programs of a daemon: a receiver that sessions are granted for, and a sender that asks its own daemon.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use lm_dataplane::ipc::{
    Asked, Call, Control, DESCRIPTORS_MAX, Decision, Event, Joined, MESSAGE_LEN_MAX, Mode, Offer, Outcome,
    Reply, Role, Said, VERSION,
};
use lm_protocol::control::ControlMessage;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::Serialize;

use super::request;
use crate::cli::{Failure, chain};
use crate::histogram::{LatencyHistogram, LatencySummary};
use crate::signals::Interrupt;

/// How long the daemon may take to reply.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a program that waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(100);
/// Memory of the landing channel: nothing lands in it.
const MEMORY_LEN: u64 = 1 << 20;
const CHUNK_LEN: u32 = 2048;
const RING_LEN: u32 = 64;

/// How to reach the daemon.
#[derive(Debug, Clone, Args)]
pub struct DaemonArgs {
    /// The daemon's socket
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Network interface
    #[arg(long, short, value_name = "IF")]
    pub interface: String,
    /// Own data address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub bind: SocketAddrV4,
}

/// Arguments of `admission receive`. It ends with Ctrl-C or SIGTERM.
#[derive(Debug, Clone, Args)]
pub struct ReceiveArgs {
    /// The daemon
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `admission hop`.
#[derive(Debug, Clone, Args)]
pub struct HopArgs {
    /// The daemon
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Data address of the receiver
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub to: SocketAddrV4,
    /// Requests
    #[arg(long, default_value_t = 1000)]
    pub requests: u32,
    /// Requests a second
    #[arg(long, default_value_t = 150.0)]
    pub rate: f64,
}

/// What `admission hop` prints.
#[derive(Debug, Serialize)]
pub(super) struct HopReport {
    /// Name of the program.
    pub program: &'static str,
    /// Sessions that were granted.
    pub granted: u64,
    /// Requests that were not.
    pub refused: u64,
    /// From the call to its daemon to the news of the grant, in microseconds.
    pub latency_us: LatencySummary,
}

struct Program {
    socket: OwnedFd,
    number: u32,
    events: VecDeque<Event>,
    joined: Joined,
    _data: UdpSocket,
}

/// Runs `admission receive`.
///
/// # Errors
///
/// A one-line reason when the daemon does not let it receive.
pub(super) fn receive(args: &ReceiveArgs, ready: impl FnOnce()) -> Result<(), Failure> {
    let interrupt = Interrupt::install().map_err(|error| Failure::new(chain(&error)))?;
    let mut program = Program::join(&args.daemon, true)?;
    let queue = program
        .joined
        .landing_queue
        .ok_or_else(|| Failure::new("the daemon has no landing queue left; end another receiver"))?;
    let memory = memory().map_err(|error| Failure::new(format!("cannot make memory: {error}")))?;
    let channel = Call::OpenChannel {
        queue,
        role: Role::Landing,
        registered_len: MEMORY_LEN,
        chunk_len: CHUNK_LEN,
        multi_buffer: false,
        ring_lens: [RING_LEN; 4],
    };
    // The XSK and the log stay open.
    let (_, _channel) = program.call(channel, &[memory.as_fd()])?;
    program.call(
        Call::Receive(Offer {
            queue,
            mtu: 1500,
            chunk_len: CHUNK_LEN,
            max_message_len: 1 << 30,
            window_max: 256,
            allow: Vec::new(),
        }),
        &[],
    )?;
    set_socket_timeout(&program.socket, Timeout::Recv, Some(LOOK)).map_err(failed)?;
    ready();
    while !interrupt.is_set() {
        match program.event()? {
            Some(Event::Closed { session_key, .. }) => {
                program.call(Call::Released { session_key }, &[])?;
            }
            Some(_) | None => {}
        }
    }
    Ok(())
}

/// Runs `admission hop`.
///
/// # Errors
///
/// A one-line reason when the daemon does not let it ask.
pub(super) fn hop(args: &HopArgs) -> Result<HopReport, Failure> {
    let mut program = Program::join(&args.daemon, false)?;
    let mut latencies = LatencyHistogram::new();
    let (mut granted, mut refused) = (0, 0);
    let started = Instant::now();
    for number in 0..args.requests {
        let due = started + Duration::from_secs_f64(f64::from(number) / args.rate.max(0.1));
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let request = request(u64::from(number) + 1, args.daemon.bind.port());
        let call = Call::Request {
            to: args.to,
            request: Control::new(1, &ControlMessage::Request(request)),
            patience_ms: 3000,
        };
        let asked = Instant::now();
        let Reply::Requested(Decision::Requested(ticket)) = program.call(call, &[])?.0 else {
            refused += 1;
            continue;
        };
        if !matches!(program.told(ticket)?, Outcome::Granted(_)) {
            refused += 1;
            continue;
        }
        latencies.record_ns(asked.elapsed().as_nanos() as u64);
        granted += 1;
        program.call(Call::End { ticket, messages: 0 }, &[])?;
        program.told(ticket)?;
    }
    Ok(HopReport {
        program: "admission-hop",
        granted,
        refused,
        latency_us: latencies.summary(),
    })
}

/// Memory as a daemon wants it: a file that cannot shrink.
fn memory() -> Result<OwnedFd, Errno> {
    let fd = rustix::fs::memfd_create("lm-bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, MEMORY_LEN)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK)?;
    Ok(fd)
}

fn failed(error: Errno) -> Failure {
    Failure::new(format!("cannot speak with the daemon: {error}"))
}

impl Program {
    fn join(args: &DaemonArgs, landing: bool) -> Result<Program, Failure> {
        let data = UdpSocket::bind(args.bind).map_err(|error| Failure::new(chain(&error)))?;
        let socket = connect(&args.socket).map_err(|error| {
            let path = args.socket.display();
            Failure::new(format!(
                "cannot reach the daemon at {path}: {error}; is it running?"
            ))
        })?;
        let mut program = Program {
            socket,
            number: 0,
            events: VecDeque::new(),
            joined: Joined {
                token: 0,
                interface_index: 0,
                general_queue: None,
                landing_queue: None,
                generic: false,
                control_port: 0,
                received: Vec::new(),
                sent: Vec::new(),
            },
            _data: data.try_clone().map_err(|error| Failure::new(chain(&error)))?,
        };
        program.call(Call::Hello { version: VERSION }, &[])?;
        let join = Call::Join {
            interface: args.interface.clone(),
            landing,
            mode: Mode::Auto,
        };
        match program.call(join, &[data.as_fd()])?.0 {
            Reply::Joined(joined) => program.joined = joined,
            other => {
                return Err(Failure::new(format!(
                    "the daemon replied {other:?}; is it this version?"
                )));
            }
        }
        Ok(program)
    }

    /// Calls, and gives the reply with what lies beside it; events that come before are kept.
    fn call(&mut self, call: Call, beside: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        self.number += 1;
        let number = self.number;
        let bytes = postcard::to_stdvec(&Asked { number, call })
            .map_err(|error| Failure::new(format!("a call cannot be encoded: {error}")))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !beside.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(beside));
        }
        let flags = SendFlags::NOSIGNAL;
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, flags).map_err(failed)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.packet()? {
                Some((Said::Reply(_, Reply::Refused(why)), _)) => return Err(Failure::new(why)),
                Some((Said::Reply(of, reply), beside)) if of == number => return Ok((reply, beside)),
                Some((Said::Reply(..), _)) => {}
                Some((Said::Event(event), _)) => self.events.push_back(event),
                None if Instant::now() < deadline => {}
                None => return Err(Failure::new("the daemon does not reply; look at its log")),
            }
        }
    }

    /// The next event, or nothing within the socket's time limit.
    fn event(&mut self) -> Result<Option<Event>, Failure> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        Ok(match self.packet()? {
            Some((Said::Event(event), _)) => Some(event),
            _ => None,
        })
    }

    /// What becomes of a request or a session.
    fn told(&mut self, wanted: u32) -> Result<Outcome, Failure> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match self.event()? {
                Some(Event::Told { ticket, outcome }) if ticket == wanted => return Ok(outcome),
                _ => {}
            }
        }
        Err(Failure::new(
            "the daemon says nothing of a request; look at its log",
        ))
    }

    /// The next packet, or nothing within the socket's time limit.
    fn packet(&mut self) -> Result<Option<(Said, Vec<OwnedFd>)>, Failure> {
        let mut bytes = vec![0; MESSAGE_LEN_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let len = match rustix::net::recvmsg(&self.socket, slices, &mut ancillary, flags) {
            Ok(received) if received.bytes > 0 => received.bytes,
            Ok(_) => return Err(Failure::new("the daemon closed the connection; look at its log")),
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let beside = rights.flatten().collect();
        let said = postcard::from_bytes(&bytes[..len])
            .map_err(|error| Failure::new(format!("the daemon speaks another language: {error}")))?;
        Ok(Some((said, beside)))
    }
}

fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
