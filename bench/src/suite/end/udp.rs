//! Kernel UDP. A message longer than a datagram goes as a train of datagrams, each with the message's number; nobody repeats what is
//! lost, and only what came counts.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::{set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force};

use super::{Arrival, End, How, NUMBER_LEN, Patience, Spec, Task, has_come, read_number, write_number};
use crate::bare::set_option;

/// Receive memory where datagrams come in batches, and send memory where they go by the clock, in bytes. The kernel's default of 208 KiB
/// overflows while the receiver handles a batch, and lets what waits in the host's own queueing discipline block the sender; more than this was
/// no faster.
const BUFFER: usize = 4 << 20;
/// `IP_TOS` of expedited forwarding (DSCP 46, RFC 3246), and the highest `SO_PRIORITY` that takes no privilege.
const EXPEDITED: i32 = 46 << 2;
const PRIORITY: i32 = 6;
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

/// A socket that talks to the other end alone. The far one learns from the first datagram to whom; where several send it talks to all.
pub(super) fn socket(near: bool, spec: &Spec, ready: impl FnOnce()) -> io::Result<UdpSocket> {
    let socket = match near {
        true => {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(spec.address)?;
            socket
        }
        false => await_first(spec, FIRST, ready)?,
    };
    if spec.system.options.expedited {
        // In this order: each TOS brings a priority of its own.
        set_option(&socket, libc::IPPROTO_IP, libc::IP_TOS, EXPEDITED)?;
        set_option(&socket, libc::SOL_SOCKET, libc::SO_PRIORITY, PRIORITY)?;
    }
    Ok(socket)
}

/// A socket that is connected to whoever sends the first datagram, within `limit`.
fn await_first(spec: &Spec, limit: Duration, ready: impl FnOnce()) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddrV4::new(*spec.address.ip(), spec.address.port()))?;
    if spec.senders > 1 {
        // Where the administrator has bounded it, less is as good as it gets.
        let _less = set_socket_recv_buffer_size_force(&socket, BUFFER);
    }
    ready();
    // Every datagram of a stream may be lost; then nobody would tell this end that it is over.
    socket.set_read_timeout(Some(limit))?;
    let (_, from) = (socket.peek_from(&mut [0; 1])).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other(format!("no datagram came within {limit:?}")),
        _ => error,
    })?;
    socket.set_read_timeout(None)?;
    if spec.senders == 1 {
        socket.connect(from)?;
    }
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
    fn new(message_len: usize) -> Trains {
        Trains {
            message_len,
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

/// One system call for each datagram.
pub(super) struct Single {
    socket: UdpSocket,
    spin: bool,
    /// A stream by the clock: what the kernel has no room for, or drops in this host, is lost like anywhere else.
    is_paced: bool,
    /// Whether it has to be awake at the time that it waits for, and not only soon after.
    on_time: bool,
    train: Vec<usize>,
    payload: Vec<u8>,
    datagram: Vec<u8>,
    /// Senders in the order of their first datagrams, and what comes of each.
    senders: Vec<(SocketAddr, Trains)>,
}

impl Single {
    pub(super) fn new(socket: UdpSocket, spec: &Spec) -> io::Result<Single> {
        let spin = spec.system.how != How::UdpBlocking;
        socket.set_nonblocking(spin)?;
        let is_paced = matches!(spec.task, Task::Stream { rate: Some(_), .. });
        if is_paced {
            let _less = set_socket_send_buffer_size_force(&socket, BUFFER);
            // Without it the kernel does not tell that this host dropped a datagram (`udp_send_skb` in net/ipv4/udp.c).
            set_option(&socket, libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
        }
        let train = train(spec.size);
        Ok(Single {
            socket,
            spin,
            is_paced,
            on_time: spin && matches!(spec.task, Task::RoundTrips { .. }),
            payload: vec![0x5a; train[0]],
            train,
            datagram: vec![0; 65_536],
            senders: Vec::with_capacity(spec.senders as usize),
        })
    }

    fn send_one(&mut self, len: usize) -> io::Result<()> {
        let flags = match self.is_paced {
            true => SendFlags::DONTWAIT,
            false => SendFlags::empty(),
        };
        loop {
            match rustix::net::send(&self.socket, &self.payload[..len], flags) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN | Errno::NOBUFS) if self.is_paced => return Ok(()),
                Err(Errno::AGAIN) => std::hint::spin_loop(),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl End for Single {
    fn send(&mut self, _: usize, number: u64) -> io::Result<()> {
        for at in 0..self.train.len() {
            let len = self.train[at];
            write_number(&mut self.payload[..len], number);
            self.send_one(len)?;
        }
        Ok(())
    }

    fn receive(&mut self, until: Option<Instant>) -> io::Result<Option<Arrival>> {
        let mut patience = Patience::until(until);
        loop {
            if !self.spin && !has_come(&self.socket, until)? {
                return Ok(None);
            }
            let (len, address) = match self.socket.recv_from(&mut self.datagram) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if patience.is_over() {
                        return Ok(None);
                    }
                    std::hint::spin_loop();
                    continue;
                }
                Err(error) => return Err(error),
            };
            let from = self.senders.iter().position(|(known, _)| *known == address);
            let from = from.unwrap_or_else(|| {
                // What cannot be said in one datagram of 65,507 bytes and is not longer than 64 KiB is cut (`train`).
                self.senders.push((address, Trains::new(self.train.iter().sum())));
                self.senders.len() - 1
            });
            let arrival = self.senders[from].1.arrival(&self.datagram[..len]);
            return Ok(Some(Arrival { from, ..arrival }));
        }
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
        let _less = set_socket_recv_buffer_size_force(&socket, BUFFER);
        let segment = segment_len(spec.mtu as usize - HEADERS_LEN, spec.size as usize);
        set_option(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, segment as i32)?;
        set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        Ok(Segmented {
            socket,
            segment,
            trains: Trains::new(spec.size as usize),
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

    fn receive(&mut self, until: Option<Instant>) -> io::Result<Option<Arrival>> {
        while self.rest.is_empty() {
            if !has_come(&self.socket, until)? {
                return Ok(None);
            }
            let len = self.socket.recv(&mut self.incoming)?;
            // The kernel joins segments of one length, and a shorter one at the end (`udp_gro_receive_segment`).
            let starts = (0..len).step_by(self.segment);
            self.rest
                .extend(starts.map(|at| (at, (at + self.segment).min(len))));
        }
        let (from, to) = self.rest.pop_front().expect("it was just filled");
        Ok(Some(self.trains.arrival(&self.incoming[from..to])))
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
            },
            size: 64,
            address: "127.0.0.1:0".parse().unwrap(),
            mtu: 1500,
            mode: Mode::Auto,
            senders: 1,
            queues: 1,
            pace: None,
            goes_first: false,
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
        let mut trains = Trains::new(30);
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
