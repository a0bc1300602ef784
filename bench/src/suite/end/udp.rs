//! Kernel UDP. A message longer than a datagram goes as a train of datagrams, each with the message's number; nobody repeats what is
//! lost, and only what came counts.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use super::sys::{self, Batch};
use super::{Arrival, End, How, NUMBER_LEN, Patience, SILENCE, Spec, Task, read_number, write_number};

/// Receive memory where datagrams come in batches, in bytes. The kernel's default of 208 KiB overflows while the receiver handles a
/// batch; more than this was no faster.
pub(super) const RECEIVE_BUFFER: usize = 4 << 20;
/// Datagrams for one `sendmmsg` or `recvmmsg`, at most.
const BATCH: usize = 32;
/// Bytes of one `sendmmsg`, at most: more would push each other out of the cache.
const BATCH_BYTES: usize = 256 << 10;
/// How long the far end waits for the first datagram: the near one may wait for its link before.
const FIRST: Duration = Duration::from_secs(10);
/// Longest UDP payload over IPv4.
pub(super) const MAX_DATAGRAM: u64 = 65_507;
/// How long before a round trip that waits for its time the near end is awake.
const AWAKE: Duration = Duration::from_millis(1);
/// Headers of a datagram over IPv4.
const HEADERS_LEN: usize = 28;
/// The kernel's bounds of a segmented send (`UDP_MAX_SEGMENTS` was 64 for long, and an IP packet's length).
const SEGMENTS_MAX: usize = 64;
const SEGMENTED_LEN_MAX: usize = MAX_DATAGRAM as usize;

/// A socket that talks to the other end alone. The far one learns from the first datagram to whom.
pub(super) fn socket(near: bool, spec: &Spec, ready: impl FnOnce()) -> io::Result<UdpSocket> {
    if near {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(spec.address)?;
        return Ok(socket);
    }
    await_first(spec, FIRST, ready)
}

/// A socket that is connected to whoever sends the first datagram, within `limit`.
fn await_first(spec: &Spec, limit: Duration, ready: impl FnOnce()) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddrV4::new(*spec.address.ip(), spec.address.port()))?;
    ready();
    // Every datagram of a stream may be lost; then nobody would tell this end that it is over.
    socket.set_read_timeout(Some(limit))?;
    let (_, from) = (socket.peek_from(&mut [0; 1])).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other(format!("no datagram came within {limit:?}")),
        _ => error,
    })?;
    socket.set_read_timeout(None)?;
    socket.connect(from)?;
    Ok(socket)
}

/// Lengths of the datagrams that carry a message.
fn train(message_len: u64) -> Vec<usize> {
    if message_len <= 65_536 {
        return vec![message_len.min(MAX_DATAGRAM) as usize];
    }
    let count = message_len.div_ceil(MAX_DATAGRAM);
    let (each, longer) = (message_len / count, message_len % count);
    (0..count)
        .map(|n| (each + u64::from(n < longer)) as usize)
        .collect()
}

/// Puts datagrams together: those of one message carry its number, and come one after the other or not at all.
struct Trains {
    message_len: usize,
    number: u64,
    bytes: usize,
}

impl Trains {
    fn new(spec: &Spec) -> Trains {
        Trains {
            // What cannot be said in one datagram of 65,507 bytes and is not longer than 64 KiB is cut (`train`).
            message_len: train(spec.size).iter().sum(),
            number: u64::MAX,
            bytes: 0,
        }
    }

    fn arrival(&mut self, datagram: &[u8]) -> Arrival {
        let number = read_number(datagram);
        if number != self.number || self.bytes >= self.message_len {
            (self.number, self.bytes) = (number, 0);
        }
        self.bytes += datagram.len();
        Arrival {
            from: 0,
            number,
            bytes: datagram.len(),
            whole: self.bytes == self.message_len,
        }
    }
}

pub(super) fn begin_silence(socket: &UdpSocket) -> io::Result<()> {
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(SILENCE))
}

pub(super) fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::ConnectionRefused
    )
}

/// One system call for each datagram.
pub(super) struct Single {
    socket: UdpSocket,
    spin: bool,
    /// Whether it has to be awake at the time that it waits for, and not only soon after.
    on_time: bool,
    ending: bool,
    patience: Patience,
    train: Vec<usize>,
    trains: Trains,
    payload: Vec<u8>,
    datagram: Vec<u8>,
}

impl Single {
    pub(super) fn new(socket: UdpSocket, spec: &Spec) -> io::Result<Single> {
        let spin = spec.system.how != How::UdpBlocking;
        socket.set_nonblocking(spin)?;
        let train = train(spec.size);
        Ok(Single {
            socket,
            spin,
            on_time: matches!(spec.task, Task::RoundTrips { .. }),
            ending: false,
            patience: Patience::default(),
            payload: vec![0x5a; train[0]],
            train,
            trains: Trains::new(spec),
            datagram: vec![0; 65_536],
        })
    }
}

impl End for Single {
    fn send(&mut self, _: usize, number: u64) -> io::Result<()> {
        for &len in &self.train {
            let payload = &mut self.payload[..len];
            write_number(payload, number);
            loop {
                match self.socket.send(payload) {
                    Ok(_) => break,
                    Err(error) if self.spin && error.kind() == io::ErrorKind::WouldBlock => {
                        std::hint::spin_loop();
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Option<Arrival>> {
        loop {
            match self.socket.recv(&mut self.datagram) {
                Ok(len) => return Ok(Some(self.trains.arrival(&self.datagram[..len]))),
                Err(error) if self.ending && is_silence(&error) => return Ok(None),
                Err(error) if self.spin && error.kind() == io::ErrorKind::WouldBlock => {
                    if self.patience.is_over() {
                        return Ok(None);
                    }
                    std::hint::spin_loop();
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn give_up_soon(&mut self) -> bool {
        if self.spin {
            self.patience = Patience::until(Instant::now() + SILENCE);
        }
        self.spin
    }

    fn end_soon(&mut self) -> io::Result<()> {
        self.ending = true;
        begin_silence(&self.socket)
    }

    fn wait_until(&mut self, time: Instant) {
        while let Some(left) = time.checked_duration_since(Instant::now()) {
            match left.checked_sub(AWAKE) {
                Some(left) => std::thread::sleep(left),
                None if self.on_time => std::hint::spin_loop(),
                None => std::thread::sleep(left),
            }
        }
    }
}

/// `sendmmsg` and `recvmmsg`.
pub(super) struct Many {
    socket: UdpSocket,
    ending: bool,
    train: Vec<usize>,
    trains: Trains,
    outgoing: Batch,
    held: usize,
    batch_bytes: usize,
    incoming: Batch,
    next: usize,
}

impl Many {
    pub(super) fn new(socket: UdpSocket, spec: &Spec) -> Many {
        // Where the administrator has bounded it, less is as good as it gets.
        let _less = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER);
        let train = train(spec.size);
        Many {
            socket,
            ending: false,
            outgoing: Batch::new(BATCH, train[0]),
            train,
            trains: Trains::new(spec),
            held: 0,
            batch_bytes: BATCH_BYTES,
            incoming: Batch::new(BATCH, 65_536),
            next: 0,
        }
    }
}

impl End for Many {
    fn send(&mut self, _: usize, number: u64) -> io::Result<()> {
        for n in 0..self.train.len() {
            let len = self.train[n];
            write_number(self.outgoing.push(len), number);
            self.held += len;
            if self.outgoing.is_full() || self.held + len > self.batch_bytes {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.held = 0;
        if self.outgoing.len() == 0 {
            return Ok(());
        }
        self.outgoing.send(&self.socket)
    }

    fn receive(&mut self) -> io::Result<Option<Arrival>> {
        while self.next == self.incoming.len() {
            self.next = 0;
            match self.incoming.receive(&self.socket) {
                Ok(()) => {}
                Err(error) if self.ending && is_silence(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let datagram = self.incoming.datagram(self.next);
        self.next += 1;
        Ok(Some(self.trains.arrival(datagram)))
    }

    fn end_soon(&mut self) -> io::Result<()> {
        self.ending = true;
        begin_silence(&self.socket)
    }
}

/// Longest segments that leave no tail too short for a number.
fn segment_len(longest: usize, message_len: usize) -> usize {
    let mut len = longest.min(message_len);
    while (1..NUMBER_LEN).contains(&(message_len % len)) {
        len -= NUMBER_LEN;
    }
    len
}

/// Segmentation and reassembly by the kernel: one system call carries many datagrams of one packet each, in both directions.
pub(super) struct Segmented {
    socket: UdpSocket,
    ending: bool,
    segment: usize,
    trains: Trains,
    /// Segments that wait to be sent, all but the last one of the same length.
    outgoing: Vec<u8>,
    segments: usize,
    incoming: Vec<u8>,
    /// What of `incoming` has not been looked at.
    rest: VecDeque<(usize, usize)>,
}

impl Segmented {
    pub(super) fn new(socket: UdpSocket, spec: &Spec) -> io::Result<Segmented> {
        let _less = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER);
        let segment = segment_len(spec.mtu as usize - HEADERS_LEN, spec.size as usize);
        sys::set_option(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, segment as i32)?;
        sys::set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        Ok(Segmented {
            socket,
            ending: false,
            segment,
            trains: Trains {
                message_len: spec.size as usize,
                number: u64::MAX,
                bytes: 0,
            },
            outgoing: Vec::with_capacity(SEGMENTED_LEN_MAX),
            segments: 0,
            incoming: vec![0; 65_536],
            rest: VecDeque::with_capacity(SEGMENTS_MAX),
        })
    }
}

impl End for Segmented {
    fn send(&mut self, len: usize, number: u64) -> io::Result<()> {
        let mut left = len;
        while left > 0 {
            let next = left.min(self.segment);
            if self.segments == SEGMENTS_MAX || self.outgoing.len() + next > SEGMENTED_LEN_MAX {
                self.flush()?;
            }
            let at = self.outgoing.len();
            self.outgoing.resize(at + next, 0x5a);
            write_number(&mut self.outgoing[at..], number);
            self.segments += 1;
            left -= next;
            // A shorter segment is the last one of a send.
            if next < self.segment {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.segments > 0 {
            self.socket.send(&self.outgoing)?;
            self.outgoing.clear();
            self.segments = 0;
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Option<Arrival>> {
        while self.rest.is_empty() {
            match self.socket.recv(&mut self.incoming) {
                Ok(len) => {
                    // The kernel joins segments of one length, and a shorter one at the end (`udp_gro_receive_segment`).
                    let starts = (0..len).step_by(self.segment);
                    self.rest
                        .extend(starts.map(|at| (at, (at + self.segment).min(len))));
                }
                Err(error) if self.ending && is_silence(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let (from, to) = self.rest.pop_front().expect("it was just filled");
        Ok(Some(self.trains.arrival(&self.incoming[from..to])))
    }

    fn end_soon(&mut self) -> io::Result<()> {
        self.ending = true;
        begin_silence(&self.socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Mode;

    #[test]
    fn a_far_end_to_which_nothing_comes_ends() {
        let spec = Spec {
            system: crate::suite::systems::System::parse("udp-blocking").unwrap(),
            task: Task::Beside {
                count: 1,
                seconds: 1.0,
                rate: None,
            },
            size: 64,
            address: "127.0.0.1:0".parse().unwrap(),
            mtu: 1500,
            mode: Mode::Auto,
        };
        let error = await_first(&spec, Duration::from_millis(20), || ()).unwrap_err();
        assert!(error.to_string().contains("no datagram came within"), "{error}");
    }

    #[test]
    fn a_message_is_one_datagram_or_a_train_of_equal_ones() {
        assert_eq!(train(1024), [1024]);
        assert_eq!(train(65_507), [65_507]);
        assert_eq!(train(65_536), [65_507]);
        let mebibyte = train(1 << 20);
        assert_eq!(mebibyte.len(), 17);
        assert_eq!(mebibyte.iter().sum::<usize>(), 1 << 20);
        assert_eq!(mebibyte[0], 61_681);
        assert!(mebibyte.iter().all(|&len| len.abs_diff(mebibyte[0]) <= 1));
    }

    #[test]
    fn every_segment_has_room_for_a_number() {
        assert_eq!(segment_len(1472, 1024), 1024);
        assert_eq!(segment_len(1472, 7168), 1472);
        for message_len in 64..20_000 {
            let len = segment_len(1472, message_len);
            assert!(
                len >= 64 && !(1..NUMBER_LEN).contains(&(message_len % len)),
                "{message_len}"
            );
        }
    }

    #[test]
    fn a_message_is_whole_when_all_its_datagrams_came() {
        let mut trains = Trains {
            message_len: 30,
            number: u64::MAX,
            bytes: 0,
        };
        let datagram = |number: u64, len: usize| {
            let mut bytes = vec![0; len];
            write_number(&mut bytes, number);
            bytes
        };
        let mut whole = |number, len| trains.arrival(&datagram(number, len)).whole;
        assert_eq!([whole(0, 20), whole(0, 10)], [false, true]);
        // The second half of message 1 is lost.
        assert_eq!([whole(1, 20), whole(2, 20), whole(2, 10)], [false, false, true]);
        // The first half of message 3 is.
        assert_eq!([whole(3, 10), whole(4, 20), whole(4, 10)], [false, false, true]);
    }
}
