//! Kernel TCP. Both ends know the messages' length, so nothing frames them.
//!
//! Round trips: `TCP_NODELAY`; where a message fits a packet both ends spin on a non-blocking socket, longer ones are waited for (a spinning
//! receiver keeps the kernel from working on its core). Streams: short messages are gathered for one `write`, a `read`
//! takes as much as there is, as a program that moves many messages would; the kernel sizes its own buffers.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::time::Instant;

use rustix::net::sockopt;

use super::{Arrival, End, NUMBER_LEN, Outcome, Patience, Spec, Task, has_come, read_number, write_number};
use crate::cli::Failure;

/// Bytes for one `write` of short messages, and for one `read`.
const GATHERED: usize = 128 << 10;

/// One connection.
pub(super) struct Tcp {
    connection: TcpStream,
    message_len: usize,
    spin: bool,
    /// What waits to be written.
    outgoing: Vec<u8>,
    /// What was read: a ring of no kind, `rest` of it is new.
    incoming: Vec<u8>,
    rest: Range<usize>,
    /// Of the message that is coming: bytes so far, and its number's.
    came: usize,
    start: [u8; NUMBER_LEN],
}

impl Tcp {
    pub(super) fn open(near: bool, spec: &Spec, ready: impl FnOnce()) -> Result<Tcp, Failure> {
        let connection = if near {
            TcpStream::connect(spec.address)?
        } else {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, spec.address.port()))?;
            ready();
            listener.accept()?.0
        };
        let round_trips = matches!(spec.task, Task::RoundTrips { .. });
        let spin = round_trips && spec.size <= u64::from(spec.mtu) / 2;
        connection.set_nodelay(true)?;
        if let (true, Some(name)) = (near, &spec.system.options.congestion) {
            sockopt::set_tcp_congestion(&connection, name)?;
        }
        connection.set_nonblocking(spin)?;
        let message_len = spec.size as usize;
        let gathered = match round_trips {
            true => message_len,
            false => message_len.max(GATHERED),
        };
        Ok(Tcp {
            connection,
            message_len,
            spin,
            outgoing: Vec::with_capacity(gathered),
            incoming: vec![0; message_len.clamp(GATHERED, 1 << 20)],
            rest: 0..0,
            came: 0,
            start: [0; NUMBER_LEN],
        })
    }
}

impl End for Tcp {
    fn send(&mut self, len: usize, number: u64) -> Result<(), Failure> {
        let at = self.outgoing.len();
        // A buffer's memory keeps its bytes when it is cleared: only the number is written anew.
        if self.outgoing.capacity() - at < len {
            self.outgoing.reserve_exact(len);
        }
        self.outgoing.resize(at + len, 0x5a);
        write_number(&mut self.outgoing[at..], number);
        if self.outgoing.len() + len > GATHERED.max(len) {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        let mut bytes = &self.outgoing[..];
        while !bytes.is_empty() {
            match self.connection.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if self.spin && error.kind() == io::ErrorKind::WouldBlock => {
                    std::hint::spin_loop();
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.outgoing.clear();
        Ok(())
    }

    fn receive(&mut self, until: Option<Instant>) -> Result<Option<Arrival>, Failure> {
        let mut patience = Patience::until(until);
        let mut bytes = 0;
        loop {
            let taken = self.rest.len().min(self.message_len - self.came);
            let new = &self.incoming[self.rest.start..][..taken];
            for (to, from) in self.start.iter_mut().skip(self.came).zip(new) {
                *to = *from;
            }
            self.rest.start += taken;
            self.came += taken;
            bytes += taken;
            if self.came == self.message_len {
                let number = read_number(&self.start[..self.message_len.min(NUMBER_LEN)]);
                self.came = 0;
                return Ok(Some(Arrival {
                    from: 0,
                    number,
                    bytes,
                    whole: true,
                }));
            }
            if !self.spin && !has_come(&self.connection, until)? {
                return Ok(None);
            }
            match self.connection.read(&mut self.incoming) {
                Ok(0) => return Ok(None),
                Ok(len) => self.rest = 0..len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if patience.is_over() {
                        return Ok(None);
                    }
                    std::hint::spin_loop();
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn tell(&mut self, outcome: &mut Outcome) {
        outcome.congestion = sockopt::tcp_congestion(&self.connection).ok();
    }

    fn close(&mut self) -> Result<(), Failure> {
        self.flush()?;
        Ok(self.connection.shutdown(Shutdown::Write)?)
    }
}
