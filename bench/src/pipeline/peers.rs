//! The same by what the kernel has: TCP from a file (`sendfile`) or from the program's memory (`MSG_ZEROCOPY`, io_uring's `SEND_ZC`), and UDP;
//! and by QUIC.
//!
//! A message is produced into memory that holds all of it, window by window, each handed over at once: who produces stops where a socket takes
//! no more. What a read brings is consumed before the next one, from memory of one window, which stays in the cache.

use std::io::{self, IoSliceMut, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::ops::Range;
use std::time::Duration;

use rustix::net::sockopt;

use super::loaned::{Memory, Ring};
use super::work::{Consumer, Producer};
use super::{Args, PAUSE_NS, Passed, Timetable, failed, now_ns, sha256};
use crate::cli::Failure;
#[cfg(feature = "peers")]
use crate::suite::Quic;
use crate::suite::Sends;

/// What moves messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Transport {
    /// LM
    Lm,
    /// TCP, sendfile(2) from memory that is a file
    TcpSendfile,
    /// TCP, `MSG_ZEROCOPY`
    TcpZerocopy,
    /// TCP, io_uring's `SEND_ZC` from registered memory
    IoUring,
    /// UDP, a window in each datagram
    Udp,
    /// QUIC, which encrypts
    #[cfg(feature = "peers")]
    Quic,
}

/// Of TCP: the system's may be another one.
const CONGESTION: &str = "cubic";
/// Largest IP packet of the link in bytes.
#[cfg(feature = "peers")]
const MTU: u32 = 1500;
/// Longest payload of UDP over IPv4.
const DATAGRAM_MOST: u64 = 65_507;
/// Datagrams' bytes that are on the way at once. The receiver's memory holds four times as much: a reassembled datagram takes twice its length.
const ON_THE_WAY: u64 = 1 << 20;
/// How long an end waits for the other one.
const PATIENCE: Duration = Duration::from_secs(10);

/// The near end of a way.
enum Sending {
    File(TcpStream),
    Zerocopy(TcpStream, Sends),
    Ring(Box<Ring>),
    #[cfg(feature = "peers")]
    Quic(Box<Quic>),
    Datagrams {
        socket: UdpSocket,
        /// Bytes of all messages: sent, and arrived.
        sent: u64,
        arrived: u64,
    },
}

impl Sending {
    fn open(args: &Args, to: SocketAddrV4, memory: &Memory) -> io::Result<Sending> {
        let connection = || {
            let connection = TcpStream::connect(to)?;
            connection.set_nodelay(true)?;
            sockopt::set_tcp_congestion(&connection, CONGESTION)?;
            io::Result::Ok(connection)
        };
        Ok(match args.transport {
            Transport::Lm => unreachable!("LM has ends of its own"),
            Transport::TcpSendfile => Sending::File(connection()?),
            Transport::TcpZerocopy => {
                let connection = connection()?;
                let windows = Timetable::of(args).windows().count();
                let sends = Sends::new(&connection, windows)?;
                Sending::Zerocopy(connection, sends)
            }
            Transport::IoUring => Sending::Ring(Box::new(Ring::new(connection()?, memory)?)),
            #[cfg(feature = "peers")]
            Transport::Quic => Sending::Quic(Box::new(Quic::open(true, to, MTU, 0, || ())?)),
            Transport::Udp => {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
                socket.connect(to)?;
                socket.set_read_timeout(Some(PATIENCE))?;
                Sending::Datagrams {
                    socket,
                    sent: 0,
                    arrived: 0,
                }
            }
        })
    }

    /// Sends a window of a message, perhaps later.
    fn send(&mut self, memory: &Memory, bytes: &Range<u64>) -> io::Result<()> {
        match self {
            Sending::File(connection) => {
                let mut from = bytes.start;
                while from < bytes.end {
                    let left = (bytes.end - from) as usize;
                    rustix::fs::sendfile(&connection, memory.file(), Some(&mut from), left)?;
                }
                Ok(())
            }
            Sending::Zerocopy(connection, sends) => sends.write_all(connection, memory.bytes(bytes), false),
            Sending::Ring(ring) => ring.send(memory, bytes.end),
            #[cfg(feature = "peers")]
            Sending::Quic(connection) => connection.write_all(memory.bytes(bytes)),
            Sending::Datagrams {
                socket,
                sent,
                arrived,
            } => {
                *sent += bytes.end - bytes.start;
                await_arrived(socket, arrived, sent.saturating_sub(ON_THE_WAY))?;
                socket.send(memory.bytes(bytes)).map(drop)
            }
        }
    }

    /// Waits until the far end has all of a message.
    fn confirmed(&mut self, memory: &Memory) -> io::Result<()> {
        let connection = match self {
            Sending::Datagrams {
                socket,
                sent,
                arrived,
            } => return await_arrived(socket, arrived, *sent),
            Sending::File(connection) | Sending::Zerocopy(connection, _) => connection,
            Sending::Ring(ring) => {
                ring.finish(memory)?;
                ring.connection()
            }
            #[cfg(feature = "peers")]
            Sending::Quic(connection) => return connection.read_exact(&mut [0; 8]),
        };
        connection.read_exact(&mut [0; 8])
    }

    /// Whether the kernel copied what it was to send without.
    fn copied(&self) -> Option<bool> {
        match self {
            Sending::Zerocopy(_, sends) => Some(sends.copied()),
            Sending::Ring(ring) => Some(ring.copied()),
            _ => None,
        }
    }
}

/// Waits until so many bytes of datagrams have arrived. Nothing is sent again.
fn await_arrived(socket: &UdpSocket, arrived: &mut u64, least: u64) -> io::Result<()> {
    while *arrived < least {
        let mut sum = [0; 8];
        let came = socket.recv(&mut sum).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::other(format!(
                "{arrived} of {least} bytes arrived, and no more within {PATIENCE:?}: datagrams were lost"
            )),
            _ => error,
        });
        came?;
        *arrived = u64::from_le_bytes(sum);
    }
    Ok(())
}

/// Produces and sends; and whether the kernel copied what it was to send without.
pub(super) fn near(args: &Args) -> Result<(Vec<Passed>, Option<bool>), Failure> {
    let failed = |error: io::Error| failed(&error);
    let timetable = Timetable::of(args);
    if args.transport == Transport::Udp && timetable.window > DATAGRAM_MOST {
        let text = "a window is longer than a datagram; --window 45 at most";
        return Err(Failure::usage(text));
    }
    let mut memory = Memory::new(args.len).map_err(failed)?;
    let to = args.to.expect("the command line asks for it");
    let mut sending = Sending::open(args, to, &memory).map_err(failed)?;
    let mut messages = Vec::new();
    for message in 0..args.messages {
        let begins_ns = now_ns() + PAUSE_NS;
        let mut producer = Producer::new(args.work, message, args.len, args.slower)?;
        std::thread::sleep(Duration::from_nanos(begins_ns.saturating_sub(now_ns())));
        let mut passed = Passed {
            begins_ns: Some(begins_ns),
            ..Passed::default()
        };
        for bytes in timetable.windows() {
            passed
                .worked
                .at(|| producer.fill(bytes.start, &mut [IoSliceMut::new(memory.bytes_mut(&bytes))]))?;
            passed.produced_ns = Some(now_ns());
            passed.released_ns = passed.released_ns.or(passed.produced_ns);
            sending.send(&memory, &bytes).map_err(failed)?;
        }
        sending.confirmed(&memory).map_err(failed)?;
        passed.confirmed_ns = Some(now_ns());
        passed.sha256 = sha256(args, message)?;
        messages.push(passed);
    }
    Ok((messages, sending.copied()))
}

/// The far end of a way.
enum Receiving {
    Stream(TcpStream),
    #[cfg(feature = "peers")]
    Quic(Box<Quic>),
    Datagrams(UdpSocket),
}

impl Receiving {
    fn open(args: &Args, ready: impl FnOnce()) -> io::Result<Receiving> {
        let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, args.port);
        #[cfg(feature = "peers")]
        if args.transport == Transport::Quic {
            return Ok(Receiving::Quic(Box::new(Quic::open(false, any, MTU, 0, ready)?)));
        }
        if args.transport != Transport::Udp {
            let listener = TcpListener::bind(any)?;
            ready();
            return Ok(Receiving::Stream(listener.accept()?.0));
        }
        let socket = UdpSocket::bind(any)?;
        sockopt::set_socket_recv_buffer_size_force(&socket, 4 * ON_THE_WAY as usize)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        ready();
        let (_, from) = socket.peek_from(&mut [0; 1])?;
        socket.connect(from)?;
        Ok(Receiving::Datagrams(socket))
    }

    /// What comes next of a message, as soon as it comes. Nothing of the next one does before this one is confirmed.
    fn receive(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        let count = match self {
            Receiving::Stream(connection) => connection.read(memory)?,
            #[cfg(feature = "peers")]
            Receiving::Quic(connection) => connection.read(memory)?,
            Receiving::Datagrams(socket) => socket.recv(memory)?,
        };
        match count {
            0 => Err(io::Error::other(
                "the near end has gone in the middle of a message",
            )),
            count => Ok(count),
        }
    }

    /// Says how many bytes came, of a stream when that is all of a message.
    fn confirm(&mut self, came: u64, is_whole: bool) -> io::Result<()> {
        let sum = came.to_le_bytes();
        match self {
            Receiving::Datagrams(socket) => socket.send(&sum).map(drop),
            _ if !is_whole => Ok(()),
            Receiving::Stream(connection) => connection.write_all(&sum),
            #[cfg(feature = "peers")]
            Receiving::Quic(connection) => connection.write_all(&sum),
        }
    }
}

/// Receives and consumes.
pub(super) fn far(args: &Args, ready: impl FnOnce()) -> Result<Vec<Passed>, Failure> {
    let failed = |error: io::Error| failed(&error);
    let mut receiving = Receiving::open(args, ready).map_err(failed)?;
    let mut memory = vec![0; Timetable::of(args).window as usize];
    let mut messages = Vec::new();
    for number in 0..args.messages {
        let mut consumer = Consumer::new(args.work, number)?;
        let mut passed = Passed::default();
        let mut came = 0;
        while came < args.len {
            let count = receiving.receive(&mut memory).map_err(failed)?;
            let now_ns = now_ns();
            passed.first_ns.get_or_insert(now_ns);
            let from = came;
            came += count as u64;
            if came == args.len {
                passed.whole_ns = Some(now_ns);
            }
            let sum = u64::from(number) * args.len + came;
            receiving.confirm(sum, came == args.len).map_err(failed)?;
            passed.worked.at(|| consumer.take(from, &memory[..count]))?;
        }
        passed.consumed_ns = Some(now_ns());
        passed.sha256 = consumer.sha256().expect("SHA-256 is what consumes");
        messages.push(passed);
    }
    Ok(messages)
}
