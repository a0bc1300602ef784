//! Kernel UDP. A message longer than a datagram goes as a train of datagrams, each with the message's number; nobody repeats what is
//! lost, and only what came counts.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::{
    set_ip_tos, set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force,
};

use super::{
    Arrival, End, How, NUMBER_LEN, Patience, Spec, Task, has_come, place, read_number, write_number,
};
use crate::bare::set_option;
use crate::cli::Failure;
use crate::suite::systems::MAX_DATAGRAM;

/// Receive memory where datagrams come in batches, and send memory where they go by the clock, in bytes. The kernel's default of 208 KiB
/// overflows while the receiver handles a batch, and lets what waits in the host's own queueing discipline block the sender; more than this was
/// no faster.
const BUFFER: usize = 4 << 20;
/// `IP_TOS` of expedited forwarding (DSCP 46, RFC 3246), and the highest `SO_PRIORITY` that takes no privilege.
const EXPEDITED: u8 = 46 << 2;
const PRIORITY: i32 = 6;
/// How long the far end waits for the first datagram: the near one may wait for its link before.
const FIRST: Duration = Duration::from_secs(10);
/// How long before a round trip that waits for its time the near end is awake.
const AWAKE: Duration = Duration::from_millis(1);
/// Headers of a datagram over IPv4.
const HEADERS_LEN: usize = 28;
/// The kernel's bounds of a segmented send (`UDP_MAX_SEGMENTS` was 64 for long, and an IP packet's length).
const SEGMENTS_MAX: usize = 64;
/// Longer than any datagram.
const DATAGRAM_LEN: usize = 65_536;

/// A socket that talks to the other end alone. The far one learns from the first datagram to whom; where several send it talks to all.
fn socket(near: bool, spec: &Spec, ready: impl FnOnce()) -> Result<UdpSocket, Failure> {
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
        set_ip_tos(&socket, EXPEDITED)?;
        set_option(&socket, libc::SOL_SOCKET, libc::SO_PRIORITY, PRIORITY)?;
    }
    Ok(socket)
}

/// A socket that is connected to whoever sends the first datagram, within `limit`.
fn await_first(spec: &Spec, limit: Duration, ready: impl FnOnce()) -> Result<UdpSocket, Failure> {
    let socket = UdpSocket::bind(spec.address)?;
    if spec.senders > 1 {
        // Where the administrator has bounded it, less is as good as it gets.
        let _less = set_socket_recv_buffer_size_force(&socket, BUFFER);
    }
    ready();
    // Every datagram of a stream may be lost; then nobody would tell this end that it is over.
    if !has_come(&socket, Some(Instant::now() + limit))? {
        return Err(Failure::new(format!("no datagram came within {limit:?}")));
    }
    if spec.senders == 1 {
        let (_, from) = socket.peek_from(&mut [0; 1])?;
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

/// What has come of a sender's message: its datagrams carry its number, and come one after the other or not at all.
#[derive(Default)]
struct Train {
    number: u64,
    bytes: usize,
}

impl Train {
    fn arrival(&mut self, datagram: &[u8], message_len: usize) -> Arrival {
        let number = read_number(datagram);
        if number != self.number || self.bytes >= message_len {
            (self.number, self.bytes) = (number, 0);
        }
        self.bytes += datagram.len();
        Arrival {
            from: 0,
            number,
            bytes: datagram.len(),
            whole: self.bytes == message_len,
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

/// One system call for each datagram; or segmentation and reassembly by the kernel: one carries many datagrams of one packet each, in both
/// directions.
pub(super) struct Udp {
    socket: UdpSocket,
    spin: bool,
    /// A stream by the clock: what the kernel has no room for, or drops in this host, is lost like anywhere else.
    is_paced: bool,
    /// Whether it has to be awake at the time that it waits for, and not only soon after.
    on_time: bool,
    /// Lengths of a message's datagrams.
    train: Vec<usize>,
    message_len: usize,
    /// Length that the kernel cuts and joins datagrams of, and the most bytes of them that wait for one call.
    segment: usize,
    together: usize,
    outgoing: Vec<u8>,
    waiting: usize,
    incoming: Vec<u8>,
    /// What of `incoming` has not been looked at, and its sender.
    rest: Range<usize>,
    from: usize,
    /// Senders in the order of their first datagrams, and what comes of each.
    senders: Vec<SocketAddr>,
    trains: Vec<Train>,
}

impl Udp {
    pub(super) fn open(near: bool, spec: &Spec, ready: impl FnOnce()) -> Result<Udp, Failure> {
        let socket = socket(near, spec, ready)?;
        let spin = spec.system.how == How::UdpSpinning;
        socket.set_nonblocking(spin)?;
        let is_paced = matches!(spec.task, Task::Stream { rate: Some(_), .. });
        if is_paced {
            let _less = set_socket_send_buffer_size_force(&socket, BUFFER);
            // Without it the kernel does not tell that this host dropped a datagram (`udp_send_skb` in net/ipv4/udp.c).
            set_option(&socket, libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
        }
        let (mut train, mut segment, mut together) = (train(spec.size), DATAGRAM_LEN, 0);
        if spec.system.how == How::UdpGso {
            let _less = set_socket_recv_buffer_size_force(&socket, BUFFER);
            let size = spec.size as usize;
            segment = segment_len(spec.mtu as usize - HEADERS_LEN, size);
            together = (SEGMENTS_MAX * segment).min(MAX_DATAGRAM as usize);
            train = (0..size)
                .step_by(segment)
                .map(|at| segment.min(size - at))
                .collect();
            set_option(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, segment as i32)?;
            set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        }
        Ok(Udp {
            socket,
            spin,
            is_paced,
            on_time: spin && matches!(spec.task, Task::RoundTrips { .. }),
            // What cannot be said in one datagram of 65,507 bytes and is not longer than 64 KiB is cut (`train`).
            message_len: train.iter().sum(),
            train,
            segment,
            together,
            outgoing: vec![0x5a; DATAGRAM_LEN],
            waiting: 0,
            incoming: vec![0; DATAGRAM_LEN],
            rest: 0..0,
            from: 0,
            senders: Vec::new(),
            trains: Vec::new(),
        })
    }
}

impl End for Udp {
    fn send(&mut self, _: usize, number: u64) -> Result<(), Failure> {
        for at in 0..self.train.len() {
            let len = self.train[at];
            write_number(&mut self.outgoing[self.waiting..][..len], number);
            self.waiting += len;
            // A shorter segment is the last one of a call.
            if len < self.segment || self.waiting + len > self.together {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        let flags = match self.is_paced {
            true => SendFlags::DONTWAIT,
            false => SendFlags::empty(),
        };
        while self.waiting > 0 {
            match rustix::net::send(&self.socket, &self.outgoing[..self.waiting], flags) {
                Ok(_) => self.waiting = 0,
                Err(Errno::AGAIN | Errno::NOBUFS) if self.is_paced => self.waiting = 0,
                Err(Errno::AGAIN) => std::hint::spin_loop(),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn receive(&mut self, until: Option<Instant>) -> Result<Option<Arrival>, Failure> {
        let mut patience = Patience::until(until);
        while self.rest.is_empty() {
            if !self.spin && !has_come(&self.socket, until)? {
                return Ok(None);
            }
            match self.socket.recv_from(&mut self.incoming) {
                Ok((len, address)) => {
                    self.rest = 0..len;
                    self.from = place(&mut self.senders, address);
                    self.trains.resize_with(self.senders.len(), Train::default);
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) if patience.is_over() => return Ok(None),
                Err(_) => std::hint::spin_loop(),
            }
        }
        // The kernel joins segments of one length, and a shorter one at the end (`udp_gro_receive_segment`).
        let at = self.rest.start;
        self.rest.start = self.rest.end.min(at + self.segment);
        let datagram = &self.incoming[at..self.rest.start];
        let arrival = self.trains[self.from].arrival(datagram, self.message_len);
        Ok(Some(Arrival {
            from: self.from,
            ..arrival
        }))
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
        let mut train = Train::default();
        let datagram = |number: u64, len: usize| {
            let mut bytes = vec![0; len];
            write_number(&mut bytes, number);
            bytes
        };
        let mut whole = |number, len| train.arrival(&datagram(number, len), 30).whole;
        assert_eq!([whole(0, 20), whole(0, 10)], [false, true]);
        // The second half of message 1 is lost.
        assert_eq!([whole(1, 20), whole(2, 20), whole(2, 10)], [false, false, true]);
        // The first half of message 3 is.
        assert_eq!([whole(3, 10), whole(4, 20), whole(4, 10)], [false, false, true]);
    }
}
