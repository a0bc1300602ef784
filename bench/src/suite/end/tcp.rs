//! Kernel TCP. Both ends know the messages' length, so nothing frames them.
//!
//! Round trips: `TCP_NODELAY`; where a message fits a packet both ends spin on a non-blocking socket, longer ones are waited for (a spinning
//! receiver keeps the kernel from working on its core). Streams: short messages are gathered for one `write`, a `read`
//! takes as much as there is, as a program that moves many messages would; the kernel sizes its own buffers. With `MSG_ZEROCOPY` each
//! buffer rests until the kernel says that it has finished with it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use rustix::net::sockopt;

use super::polling::Polling;
use super::sys;
use super::{Arrival, End, NUMBER_LEN, Outcome, SILENCE, Spec, Task, Transport, read_number, write_number};

/// Bytes for one `write` of short messages, and for one `read`.
const GATHERED: usize = 128 << 10;
/// Buffers that the kernel may hold at a time.
const ZEROCOPY_BUFFERS: usize = 16;

/// One connection.
pub(super) struct Tcp {
    polling: Polling,
    connection: TcpStream,
    message_len: usize,
    spin: bool,
    /// What waits to be written; with zero-copy the buffer in turn.
    buffers: Vec<Vec<u8>>,
    sends: Option<Sends>,
    /// What was read: a ring of no kind, `from..to` of it is new.
    incoming: Vec<u8>,
    from: usize,
    to: usize,
    /// Of the message that is coming: bytes so far, and its number's.
    message: Partial,
}

#[derive(Default)]
struct Partial {
    bytes: usize,
    start: [u8; NUMBER_LEN],
}

/// Zero-copy sends: which buffer each of them held, and how far the kernel is.
pub(crate) struct Sends {
    /// Number after the last send of each buffer.
    ends: Vec<u32>,
    started: u32,
    finished: u32,
    turn: usize,
}

impl Tcp {
    /// A near end takes the congestion control of this name, else the system's.
    pub(super) fn open(
        near: bool,
        any: SocketAddrV4,
        spec: &Spec,
        congestion: Option<&str>,
        ready: impl FnOnce(),
    ) -> io::Result<Tcp> {
        let zerocopy = spec.transport == Transport::TcpZerocopy;
        let connection = if near {
            TcpStream::connect(spec.address)?
        } else {
            let listener = TcpListener::bind(any)?;
            ready();
            listener.accept()?.0
        };
        let round_trips = matches!(spec.task, Task::RoundTrips { .. });
        let polls = spec.transport == Transport::TcpPolled && (round_trips || !near);
        let spin = polls || round_trips && spec.size <= u64::from(spec.mtu) / 2;
        connection.set_nodelay(true)?;
        if let Some(name) = congestion {
            sockopt::set_tcp_congestion(&connection, name)?;
        }
        connection.set_nonblocking(spin)?;
        let sends = zerocopy.then(|| Sends::new(&connection, ZEROCOPY_BUFFERS));
        let sends = sends.transpose()?;
        let message_len = spec.size as usize;
        let gathered = if round_trips {
            message_len
        } else {
            message_len.max(GATHERED)
        };
        let buffers = if zerocopy { ZEROCOPY_BUFFERS } else { 1 };
        Ok(Tcp {
            polling: Polling::new(polls),
            connection,
            message_len,
            spin,
            buffers: (0..buffers).map(|_| Vec::with_capacity(gathered)).collect(),
            sends,
            incoming: vec![0; message_len.clamp(GATHERED, 1 << 20)],
            from: 0,
            to: 0,
            message: Partial::default(),
        })
    }

    fn turn(&self) -> usize {
        self.sends.as_ref().map_or(0, |sends| sends.turn)
    }
}

impl End for Tcp {
    fn copied_bytes(&self) -> Option<u64> {
        self.sends.is_none().then_some(0)
    }

    fn send(&mut self, len: usize, number: u64) -> io::Result<()> {
        let turn = self.turn();
        if !self.buffers[turn].is_empty() && self.buffers[turn].len() + len > self.buffers[turn].capacity() {
            self.flush()?;
        }
        let turn = self.turn();
        let buffer = &mut self.buffers[turn];
        let at = buffer.len();
        // A buffer's memory keeps its bytes when it is cleared: only the number is written anew.
        if buffer.capacity() - at < len {
            buffer.reserve_exact(len);
        }
        buffer.resize(at + len, 0x5a);
        write_number(&mut buffer[at..], number);
        if buffer.len() + len > GATHERED.max(len) {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let turn = self.turn();
        match &mut self.sends {
            None => write_all(&mut self.connection, &self.buffers[turn], self.spin)?,
            Some(sends) => sends.write_all(&self.connection, &self.buffers[turn], self.spin)?,
        }
        let turn = self.turn();
        self.buffers[turn].clear();
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Option<Arrival>> {
        let mut bytes = 0;
        loop {
            let left = self.message_len - self.message.bytes;
            let taken = left.min(self.to - self.from);
            if self.message.bytes < NUMBER_LEN {
                let count = taken.min(NUMBER_LEN - self.message.bytes);
                self.message.start[self.message.bytes..][..count]
                    .copy_from_slice(&self.incoming[self.from..][..count]);
            }
            self.from += taken;
            self.message.bytes += taken;
            bytes += taken;
            if self.message.bytes == self.message_len {
                let number = read_number(&self.message.start[..self.message_len.min(NUMBER_LEN)]);
                self.message.bytes = 0;
                return Ok(Some(Arrival {
                    from: 0,
                    number,
                    bytes,
                    whole: true,
                }));
            }
            (self.from, self.to) = (0, 0);
            match self.connection.read(&mut self.incoming) {
                Ok(0) => return Ok(None),
                Ok(len) => {
                    self.to = len;
                    self.polling.begin(&self.connection)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.spin => {
                    std::hint::spin_loop();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn end_soon(&mut self) -> io::Result<()> {
        self.spin = false;
        self.connection.set_nonblocking(false)?;
        self.connection.set_read_timeout(Some(SILENCE))
    }

    fn tell(&mut self, outcome: &mut Outcome) {
        outcome.congestion = sockopt::tcp_congestion(&self.connection).ok();
    }

    fn close(&mut self) -> io::Result<()> {
        self.flush()?;
        self.connection.shutdown(Shutdown::Write)
    }
}

fn write_all(connection: &mut TcpStream, mut bytes: &[u8], spin: bool) -> io::Result<()> {
    while !bytes.is_empty() {
        match connection.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if spin && error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Sends {
    /// Of so many buffers, which are sent in turns.
    pub(crate) fn new(connection: &TcpStream, buffers: usize) -> io::Result<Sends> {
        sys::set_option(connection, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)?;
        Ok(Sends {
            ends: vec![0; buffers],
            started: 0,
            finished: 0,
            turn: 0,
        })
    }

    /// Sends a buffer, and waits until the next one is free.
    pub(crate) fn write_all(
        &mut self,
        connection: &TcpStream,
        mut bytes: &[u8],
        spin: bool,
    ) -> io::Result<()> {
        let socket = connection.as_raw_fd();
        while !bytes.is_empty() {
            match sys::send_zerocopy(socket, bytes) {
                Ok(sent) => {
                    bytes = &bytes[sent..];
                    self.started = self.started.wrapping_add(1);
                }
                Err(error) if spin && error.kind() == io::ErrorKind::WouldBlock => self.reap(socket)?,
                // Too many notices wait (`optmem_max`).
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => self.reap(socket)?,
                Err(error) => return Err(error),
            }
        }
        self.ends[self.turn] = self.started;
        self.turn = (self.turn + 1) % self.ends.len();
        self.reap(socket)?;
        while self.ends[self.turn].wrapping_sub(self.finished) as i32 > 0 {
            let mut wait = [rustix::event::PollFd::new(
                connection,
                rustix::event::PollFlags::empty(),
            )];
            // An error queue that is not empty is reported whatever was asked for.
            rustix::event::poll(&mut wait, None)?;
            self.reap(socket)?;
        }
        Ok(())
    }

    fn reap(&mut self, socket: i32) -> io::Result<()> {
        while let Some(finished) = sys::finished_sends(socket)? {
            self.finished = finished;
        }
        Ok(())
    }
}
