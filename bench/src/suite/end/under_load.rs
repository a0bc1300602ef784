//! Round trips of 64 bytes beside a stream of long messages, both by one thread on each side: what becomes of small messages when much
//! else is to be done.
//!
//! Near: whenever there is no round trip under way, begin one; hand over a long message if there is room; look for the answer.
//! Far: take what comes, answer what is short. Both spin, or sleep where they are told to. LM's round trips are small messages, or messages of
//! a real-time socket on the endpoint of the stream. UDP has a socket for each of the two.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use lm_dataplane::{RecvError, SendError, SendRegion};

use super::drive::Outcome;
use super::lm::{Lm, try_loan};
use super::socket::Socket;
use super::{EndArgs, How, Side, Spec, read_number, write_number};
use crate::cli::Failure;
use crate::histogram::LatencyHistogram;
use crate::suite::systems::MAX_DATAGRAM;

/// Length of the messages that go to and fro.
const SHORT: usize = 64;
/// A short message that tells the far end that this was all.
const END: u64 = u64::MAX;
/// Long messages that are handed over at least.
const LONG_LEAST: u64 = 16;
/// A round trip of datagrams or real-time messages without an answer for so long is begun again; its time goes on.
const AGAIN: Duration = Duration::from_millis(20);
/// Longest sleep.
const STEP: Duration = Duration::from_millis(1);
/// A far end hears nothing for so long: the near one has gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// What one thread sends and receives both kinds of messages by.
trait Both {
    /// Hands over a message that begins with its number, if there is room; a short one goes to and fro.
    fn try_send(&mut self, len: usize, number: u64) -> Result<bool, Failure>;

    /// Looks once whether something has come: its length and its number.
    fn next(&mut self) -> Result<Option<(usize, u64)>, Failure>;

    /// Tells the far end that this was all.
    fn close(&mut self) -> Result<(), Failure>;
}

/// Runs one end of `count` round trips, or as many as go in `seconds`.
pub(super) fn run(
    args: &EndArgs,
    spec: &Spec,
    (count, seconds): (u64, f64),
    ready: impl FnOnce(),
) -> Result<Outcome, Failure> {
    let near = args.side == Side::Near;
    let mut both: Box<dyn Both> = match spec.system.how.is_lm() {
        true => Box::new(OfLm::open(args, spec)?),
        false => Box::new(OfUdp::open(near, spec)?),
    };
    match near {
        true => ask(both.as_mut(), spec.size as usize, count, seconds),
        false => {
            ready();
            answer(both.as_mut())
        }
    }
}

/// Asks for round trips, one at a time, and hands over long messages meanwhile.
fn ask(both: &mut dyn Both, len: usize, count: u64, seconds: f64) -> Result<Outcome, Failure> {
    let mut histogram = LatencyHistogram::new();
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let (mut number, mut long) = (0, 0);
    // When it was asked for first, and last.
    let mut since: Option<Instant> = None;
    let mut asked = Instant::now();
    // Round trips without a load are not what was asked for, however many there are.
    while (histogram.count() < count || long < LONG_LEAST) && Instant::now() < until {
        // What was lost, perhaps, is repeated by the asking end alone.
        let is_due = since.is_none() || asked.elapsed() > AGAIN;
        let now = Instant::now();
        // One message in each turn: what comes is looked for in between.
        if is_due && both.try_send(SHORT, number)? {
            asked = now;
            since.get_or_insert(now);
        } else {
            long += u64::from(both.try_send(len, long)?);
        }
        while let Some((_, answered)) = both.next()? {
            // A repeated question may have two answers.
            let Some(since) = since.take_if(|_| answered == number) else {
                continue;
            };
            if number >= count / 10 {
                histogram.record_ns(since.elapsed().as_nanos() as u64);
            }
            number += 1;
        }
    }
    both.close()?;
    if histogram.count() == 0 {
        return Err(Failure::new("no round trip came to its end beside the load"));
    }
    Ok(Outcome::of_round_trips(&histogram))
}

/// Answers what is short; what it has received of the load, from the first long message to the last.
fn answer(both: &mut dyn Both) -> Result<Outcome, Failure> {
    let mut load = Outcome::default();
    let (mut first, mut heard): (Option<Instant>, Option<Instant>) = (None, None);
    loop {
        let Some((len, number)) = both.next()? else {
            if heard.is_some_and(|heard| heard.elapsed() > PATIENCE) {
                return Err(Failure::new("the asking end has gone"));
            }
            continue;
        };
        let now = Instant::now();
        heard = Some(now);
        match first {
            _ if number == END => return Ok(load),
            // One for which there is no room is asked for again.
            _ if len <= SHORT => drop(both.try_send(SHORT, number)?),
            // The first one's time has begun before it was here.
            None => first = Some(now),
            Some(first) => {
                load.bytes += len as u64;
                load.messages += 1;
                load.seconds = (now - first).as_secs_f64();
            }
        }
    }
}

/// An endpoint, and a socket on it for the round trips, if they are real-time.
struct OfLm {
    lm: Lm,
    socket: Option<Socket>,
    /// What the endpoint would not take yet.
    waiting: Option<(SendRegion, u64)>,
    is_far: bool,
    sleeps: bool,
}

impl OfLm {
    fn open(args: &EndArgs, spec: &Spec) -> Result<OfLm, Failure> {
        let mut lm = Lm::open(args, spec, || ())?;
        let mut socket = None;
        if spec.system.how == How::RealTime {
            let socket = socket.insert(Socket::open(&mut lm.endpoint, args, spec, SHORT as u64)?);
            if args.side == Side::Near {
                socket.connect(&mut lm.endpoint, spec.address)?;
            }
        }
        Ok(OfLm {
            lm,
            socket,
            waiting: None,
            is_far: args.side == Side::Far,
            sleeps: spec.system.sleeps(),
        })
    }

    fn hand_over(&mut self) -> Result<(), Failure> {
        let Some((region, number)) = self.waiting.take() else {
            return Ok(());
        };
        match self.lm.endpoint.try_send(region, number) {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.reason, SendError::WouldBlock) => {
                self.waiting = Some((error.region, number));
                Ok(())
            }
            Err(error) => Err(error.reason.into()),
        }
    }
}

impl Both for OfLm {
    fn try_send(&mut self, len: usize, number: u64) -> Result<bool, Failure> {
        if let Some(socket) = self.socket.as_mut().filter(|_| len == SHORT) {
            return socket.try_send(len, number);
        }
        self.hand_over()?;
        let Some(peer) = self.lm.peer.filter(|_| self.waiting.is_none()) else {
            return Ok(false);
        };
        if self.is_far {
            self.lm.endpoint.send_copy(peer, &[0x5a; SHORT], number)?;
            return Ok(true);
        }
        let region = try_loan(&mut self.lm.endpoint, peer, len, number)?;
        self.waiting = region.map(|region| (region, number));
        let taken = self.waiting.is_some();
        self.hand_over()?;
        Ok(taken)
    }

    fn next(&mut self) -> Result<Option<(usize, u64)>, Failure> {
        self.hand_over()?;
        while self.lm.endpoint.try_completion().is_some() {}
        // A far end has nothing to do but to wait, and as it waits it polls best.
        let waits = self.is_far && self.socket.is_none();
        let worked = !waits && self.lm.endpoint.poll() > 0;
        if let Some(socket) = &mut self.socket
            && let Some(message) = socket.receive(&mut self.lm.endpoint)?
        {
            return Ok(Some((SHORT, read_number(&message))));
        }
        loop {
            let received = match waits {
                true => self.lm.endpoint.recv(Some(PATIENCE)).map(Some),
                false => self.lm.endpoint.try_recv(),
            };
            match received {
                // A socket's greeting is empty.
                Ok(Some(message)) if self.socket.is_some() && message.is_empty() => {}
                Ok(Some(message)) => {
                    self.lm.peer = Some(message.peer());
                    return Ok(Some((message.len(), message.tag())));
                }
                Ok(None) | Err(RecvError::TimedOut) => break,
                Err(RecvError::Incomplete { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !worked && self.sleeps {
            self.lm.endpoint.wait(STEP);
        }
        Ok(None)
    }

    fn close(&mut self) -> Result<(), Failure> {
        self.waiting = None;
        let peer = self.lm.peer.expect("a near end has connected");
        self.lm.endpoint.send_copy(peer, &[0xff; SHORT], END)?;
        // Until it has arrived.
        let limit = Instant::now() + Duration::from_secs(1);
        while (self.lm.endpoint.try_completion()).is_none_or(|done| done.tag != END) && Instant::now() < limit
        {
            self.lm.endpoint.poll();
        }
        Ok(())
    }
}

/// A socket for each of the two.
struct OfUdp {
    long: UdpSocket,
    short: UdpSocket,
    /// The address that the far end answers to.
    peer: Option<SocketAddr>,
    is_near: bool,
    datagram: Vec<u8>,
}

impl OfUdp {
    fn open(is_near: bool, spec: &Spec) -> Result<OfUdp, Failure> {
        let open = |above| -> io::Result<UdpSocket> {
            let there = (*spec.address.ip(), spec.address.port() + above);
            let socket = match is_near {
                true => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?,
                false => UdpSocket::bind(there)?,
            };
            if is_near {
                socket.connect(there)?;
            }
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        Ok(OfUdp {
            long: open(0)?,
            short: open(1)?,
            peer: None,
            is_near,
            datagram: vec![0x5a; 65_536],
        })
    }
}

impl Both for OfUdp {
    fn try_send(&mut self, len: usize, number: u64) -> Result<bool, Failure> {
        let message = &mut self.datagram[..len.min(MAX_DATAGRAM as usize)];
        write_number(message, number);
        let sent = match (len == SHORT, self.peer) {
            (true, Some(peer)) => self.short.send_to(message, peer),
            (true, None) => self.short.send(message),
            (false, _) => self.long.send(message),
        };
        Ok(not_now(sent)?.is_some())
    }

    fn next(&mut self) -> Result<Option<(usize, u64)>, Failure> {
        let mut received = not_now(self.short.recv_from(&mut self.datagram))?;
        match received {
            Some((_, from)) if !self.is_near => self.peer = Some(from),
            Some(_) => {}
            None => received = not_now(self.long.recv_from(&mut self.datagram))?,
        }
        Ok(received.map(|(len, _)| (len, read_number(&self.datagram[..len]))))
    }

    fn close(&mut self) -> Result<(), Failure> {
        // One of them gets there.
        for _ in 0..10 {
            let _gone = self.try_send(SHORT, END);
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// `None` where a socket that does not wait would have to.
fn not_now<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        result => result.map(Some),
    }
}
