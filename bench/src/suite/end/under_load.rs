//! Round trips of 64 bytes beside a stream of long messages, both by one thread on each side: what becomes of small messages when much
//! else is to be done.
//!
//! Near: whenever there is no round trip under way, begin one; hand over a long message if there is room; look for the answer.
//! Far: take what comes, answer what is short. Both spin, or sleep where they are told to. LM's round trips are small messages, or messages of
//! a real-time socket on the endpoint of the stream. UDP has a socket for each of the two.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectOptions, Endpoint, Message, PeerId, RecvError, SendRegion};

use super::drive::Outcome;
use super::lm::{failed, try_loan};
use super::socket::Socket;
use super::udp::MAX_DATAGRAM;
use super::{EndArgs, How, Spec, cut_number, read_number, write_number};
use crate::cli::{Failure, chain};
use crate::histogram::LatencyHistogram;
use crate::lm::connect;

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

/// Round trips, one at a time.
struct Asking {
    histogram: LatencyHistogram,
    number: u64,
    since: Option<Instant>,
    /// When it was asked for last.
    asked: Instant,
    warm_up: u64,
    count: u64,
    until: Instant,
    /// Whether it sleeps when there is nothing to do.
    sleeps: bool,
}

impl Asking {
    fn new(count: u64, seconds: f64) -> Asking {
        Asking {
            histogram: LatencyHistogram::new(),
            number: 0,
            since: None,
            asked: Instant::now(),
            warm_up: count / 10,
            count,
            until: Instant::now() + Duration::from_secs_f64(seconds),
            sleeps: false,
        }
    }

    /// Whether the next round trip is due.
    fn is_due(&self) -> bool {
        self.since.is_none()
    }

    /// Whether nobody repeats what was lost, perhaps, but who asked.
    fn is_unanswered(&self) -> bool {
        self.since.is_some() && self.asked.elapsed() > AGAIN
    }

    /// One was asked for, for the first time or again.
    fn has_asked(&mut self) {
        self.asked = Instant::now();
        self.since.get_or_insert(self.asked);
    }

    fn answered(&mut self, number: u64) {
        // A repeated question may have two answers.
        if number != cut_number(self.number, SHORT) {
            return;
        }
        if let Some(since) = self.since.take() {
            if self.number >= self.warm_up {
                self.histogram.record_ns(since.elapsed().as_nanos() as u64);
            }
            self.number += 1;
        }
    }

    /// Round trips without a load are not what was asked for, however many there are.
    fn is_done(&self, long_messages: u64) -> bool {
        (self.histogram.count() >= self.count && long_messages >= LONG_LEAST) || Instant::now() >= self.until
    }

    fn outcome(self) -> io::Result<Outcome> {
        if self.histogram.count() == 0 {
            return Err(io::Error::other("no round trip came to its end beside the load"));
        }
        Ok(Outcome::of_round_trips(&self.histogram))
    }
}

/// What the far end has received of the load, from the first long message to the last.
#[derive(Default)]
struct Load {
    bytes: u64,
    messages: u64,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Load {
    fn came(&mut self, bytes: usize) {
        let now = Instant::now();
        // The first one's time has begun before it was here.
        if self.first.is_some() {
            self.bytes += bytes as u64;
            self.messages += 1;
        }
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    fn outcome(&self) -> Outcome {
        let seconds = match (self.first, self.last) {
            (Some(first), Some(last)) => (last - first).as_secs_f64(),
            _ => 0.0,
        };
        Outcome {
            bytes: self.bytes,
            messages: self.messages,
            seconds,
            ..Outcome::default()
        }
    }
}

/// A socket for the round trips, if they are real-time.
fn socket(endpoint: &mut Endpoint, args: &EndArgs, spec: &Spec) -> Result<Option<Socket>, Failure> {
    let is_real_time = spec.system.how == How::RealTime;
    is_real_time
        .then(|| Socket::open(endpoint, args, spec, SHORT as u64))
        .transpose()
}

pub(super) fn lm_ask(args: &EndArgs, spec: &Spec, count: u64, seconds: f64) -> Result<Outcome, Failure> {
    let in_flight = super::lm::in_flight(spec.size);
    let mut endpoint = super::lm::endpoint(args, spec, spec.size, 2 * in_flight)?;
    let mut socket = socket(&mut endpoint, args, spec)?;
    let options = ConnectOptions {
        max_message_len: spec.size,
        messages_in_flight: in_flight,
        ..ConnectOptions::default()
    };
    let peer = connect(&mut endpoint, spec.address, &options)?;
    if let Some(socket) = &mut socket {
        socket.connect(&mut endpoint, spec.address)?;
    }
    let asking = Asking {
        sleeps: spec.system.sleeps(),
        ..Asking::new(count, seconds)
    };
    let asked = lm_ask_on(&mut endpoint, socket.as_mut(), peer, spec.size as usize, asking);
    asked.map_err(|error| Failure::new(chain(&error)))
}

fn lm_ask_on(
    endpoint: &mut Endpoint,
    mut socket: Option<&mut Socket>,
    peer: PeerId,
    len: usize,
    mut asking: Asking,
) -> io::Result<Outcome> {
    // What the endpoint would not take yet.
    let mut waiting: Option<(SendRegion, u64)> = None;
    let mut long = 0;
    while !asking.is_done(long) {
        let number = asking.number;
        if let Some(socket) = &mut socket {
            if (asking.is_due() || asking.is_unanswered()) && socket.try_send(SHORT, number)? {
                asking.has_asked();
            }
        } else if waiting.is_none() && asking.is_due() {
            let region = try_loan(endpoint, peer, SHORT, number).map_err(|error| failed(&error))?;
            if let Some(region) = region {
                waiting = Some((region, number));
                asking.has_asked();
            }
        }
        if waiting.is_none() {
            waiting = try_loan(endpoint, peer, len, long)
                .map_err(|error| failed(&error))?
                .map(|region| (region, long));
            long += u64::from(waiting.is_some());
        }
        if let Some((region, number)) = waiting.take()
            && let Err(error) = endpoint.try_send(region, number)
        {
            match error.reason {
                lm_dataplane::SendError::WouldBlock => waiting = Some((error.region, number)),
                reason => return Err(failed(&reason)),
            }
        }
        if endpoint.poll() == 0 && asking.sleeps {
            endpoint.wait(STEP);
        }
        while let Some(answer) = socket.as_mut().and_then(|socket| socket.receive()) {
            asking.answered(read_number(&answer));
        }
        loop {
            match endpoint.try_recv() {
                // A socket's greeting.
                Ok(Some(_)) if socket.is_some() => {}
                Ok(Some(message)) => asking.answered(read_number(&message)),
                Ok(None) => break,
                Err(RecvError::Incomplete { .. }) => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        while endpoint.try_completion().is_some() {}
    }
    drop(waiting);
    let end = [0xff; SHORT];
    endpoint
        .send_copy(peer, &end, END)
        .map_err(|error| failed(&error))?;
    // Until it has arrived.
    let limit = Instant::now() + Duration::from_secs(1);
    while endpoint.try_completion().is_none_or(|done| done.tag != END) && Instant::now() < limit {
        endpoint.poll();
    }
    asking.outcome()
}

pub(super) fn lm_answer(args: &EndArgs, spec: &Spec, ready: impl FnOnce()) -> Result<Outcome, Failure> {
    let in_flight = super::lm::in_flight(spec.size);
    let mut endpoint = super::lm::endpoint(args, spec, spec.size, 2 * in_flight)?;
    let mut socket = socket(&mut endpoint, args, spec)?;
    ready();
    let mut load = Load::default();
    let mut silence = None;
    loop {
        let received = match &mut socket {
            Some(socket) => receive_beside(&mut endpoint, socket, silence)?,
            None => endpoint.recv(silence),
        };
        let message = match received {
            Ok(message) => message,
            Err(RecvError::Incomplete { .. }) => continue,
            Err(error) => return Err(Failure::new(chain(&error))),
        };
        silence = Some(PATIENCE);
        if message.len() > SHORT {
            load.came(message.len());
        } else if message.tag() == END {
            return Ok(load.outcome());
        } else {
            let (peer, tag) = (message.peer(), message.tag());
            let sent = endpoint.send_copy(peer, &message, tag);
            sent.map_err(|error| Failure::new(chain(&error)))?;
        }
        while endpoint.try_completion().is_some() {}
    }
}

/// As [`Endpoint::recv`], while real-time messages are answered.
fn receive_beside(
    endpoint: &mut Endpoint,
    socket: &mut Socket,
    silence: Option<Duration>,
) -> Result<Result<Message, RecvError>, Failure> {
    let until = silence.map(|silence| Instant::now() + silence);
    loop {
        endpoint.poll();
        let failed = |error: io::Error| Failure::new(chain(&error));
        while let Some(question) = socket.receive_to_answer(endpoint).map_err(failed)? {
            // It leaves in the next round; one for which there is no room is lost like any other.
            let number = read_number(&question);
            let _ = socket.try_send(question.len(), number).map_err(failed)?;
        }
        if let Some(message) = endpoint.try_recv().transpose() {
            // A socket's greeting is empty.
            if message.as_ref().is_ok_and(|message| message.is_empty()) {
                continue;
            }
            return Ok(message);
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            return Ok(Err(RecvError::TimedOut));
        }
    }
}

pub(super) fn udp_ask(spec: &Spec, count: u64, seconds: f64) -> io::Result<Outcome> {
    let [long, short] = [0, 1].map(|above| -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect((*spec.address.ip(), spec.address.port() + above))?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    });
    let (long, short) = (long?, short?);
    let mut asking = Asking::new(count, seconds);
    let mut question = [0x5a; SHORT];
    let mut answer = [0; SHORT];
    let message = vec![0x5a; spec.size.min(MAX_DATAGRAM) as usize];
    let mut sent = 0;
    while !asking.is_done(sent) {
        if asking.is_due() || asking.is_unanswered() {
            write_number(&mut question, asking.number);
            asking.has_asked();
            not_now(short.send(&question))?;
        }
        sent += u64::from(not_now(long.send(&message))?.is_some());
        while let Some(len) = not_now(short.recv(&mut answer))? {
            asking.answered(read_number(&answer[..len]));
        }
    }
    write_number(&mut question, END);
    // One of them gets there.
    for _ in 0..10 {
        let _gone = short.send(&question);
        std::thread::sleep(Duration::from_millis(2));
    }
    asking.outcome()
}

/// `None` where a socket that does not wait would have to.
fn not_now(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(len) => Ok(Some(len)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn udp_answer(spec: &Spec, ready: impl FnOnce()) -> io::Result<Outcome> {
    let [long, short] = [0, 1].map(|above| -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind((*spec.address.ip(), spec.address.port() + above))?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    });
    let (long, short) = (long?, short?);
    ready();
    let mut datagram = vec![0; 65_536];
    let mut load = Load::default();
    let mut heard: Option<Instant> = None;
    loop {
        if let Some(len) = not_now(long.recv(&mut datagram))? {
            load.came(len);
        }
        match short.recv_from(&mut datagram) {
            Ok((len, _)) if read_number(&datagram[..len]) == END => return Ok(load.outcome()),
            Ok((len, from)) => {
                heard = Some(Instant::now());
                // A full socket's answer is asked for again.
                let _dropped = short.send_to(&datagram[..len], from);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if heard.is_some_and(|heard| heard.elapsed() > PATIENCE) {
            return Err(io::Error::other("the asking end has gone"));
        }
    }
}
